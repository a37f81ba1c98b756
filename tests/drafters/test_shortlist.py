"""Cheaper model drafters: a head for frequent ids only, and weights in int8."""

import jax
import numpy as np
import pytest
import tiers
import toy
from distribution_samples import FALSE_ALARM, ROWS, SPREAD, g_test, joint_distribution, sample
from short_heads import DRAFT, EOS, GAMMA, INPUTS, LIMIT, RNG, TARGET, WIDE, B, V, decode, plain
from toy_models import HashModel, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters.drafting import match_width
from specdec_jax.drafters.shortlist import Shortlist
from specdec_jax.models import weight_layouts
from specdec_jax.models.layers import apply_weight
from specdec_jax.speculative import randomness
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")
LISTED = [1, 3, 4, 5, 8, 9, 11, 13]
OFF_LIST = sorted(set(range(V)) - set(LISTED))


@pytest.mark.parametrize("options", [dict(shortlist=LISTED), dict(int8=True)])
def test_a_dtype_of_products_is_rejected(options):
    model = sd.LanguageModel.random(tiny_t5(0).config.replace(matmul_dtype="bfloat16"))
    with pytest.raises(ValueError, match="matmul_dtype='bfloat16', expected a model without it"):
        sd.ModelDrafter(model, **options)


def test_greedy_output_is_that_of_plain_decoding():
    """γ of 1 to 4, prefixes of 0 to 4 tokens, one new token; the list is a traced array."""
    result, whole = decode(sd.ModelDrafter(DRAFT, LISTED)), decode(sd.ModelDrafter(DRAFT))
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    assert 0 < result.stats.accepted < whole.stats.accepted
    order = np.random.default_rng(1).permutation(B)

    def again():
        other = decode(sd.ModelDrafter(DRAFT, LISTED), order)
        for place, row in enumerate(order):
            assert other.tokens[place].tolist() == result.tokens[row].tolist()
            assert other.stats.per_row[place].accepted == result.stats.per_row[row].accepted
        other = decode(sd.ModelDrafter(DRAFT, [1, 2, 6]))
        np.testing.assert_array_equal(other.tokens, plain().tokens)
        assert other.stats.accepted != result.stats.accepted

    assert compilations(again) == 0


def test_the_whole_vocabulary_as_shortlist_drafts_the_same():
    found, whole = decode(sd.ModelDrafter(DRAFT, V)), decode(sd.ModelDrafter(DRAFT))
    assert (
        found.stats.accepted == whole.stats.accepted and found.stats.drafted == whole.stats.drafted
    )


def test_a_draft_holds_what_is_most_probable_on_the_list():
    """Teacher forcing over listed ids, and of a wider drafter's only those of the target."""
    for draft, listed in ((DRAFT, LISTED), (HashModel(V + 9, 2), [1, 2, 7, V, 20, 24])):
        drafter = sd.ModelDrafter(draft, listed)
        state, request = prepare(
            TARGET, INPUTS, drafter=drafter, gamma=3, max_new_tokens=9, eos_ids=()
        )
        _, found = jax.jit(lambda d, s: d.draft(s.draft_state, s, np.full(B, 3, np.int32)))(
            request.drafter, state
        )
        width = max(map(len, INPUTS))
        padded = np.array([[*row, *[0] * (width - len(row))] for row in INPUTS])
        decoder = np.pad(np.asarray(found.tokens), ((0, 0), (1, 0)))[:, :-1]
        logits = np.asarray(draft.logits(padded, decoder, [len(row) for row in INPUTS]))
        off = ~np.isin(np.arange(logits.shape[-1]), [token for token in listed if token < V])
        logits[..., off] = -np.inf
        np.testing.assert_array_equal(found.tokens, logits.argmax(axis=-1))


# --- Distributions ---


def test_ids_that_a_drafter_lacks_have_no_probability_at_any_temperature():
    """Not a small one: at a temperature of 1000 a finite logit would be drawn."""
    logits, ids = np.float32([[3.0, -2.0, 0.5]]), np.array([1, 4, 5])
    widened = Shortlist.select(ids, 8).widen(np.pad(logits, ((0, 0), (0, 61)), mode="edge"))
    np.testing.assert_array_equal(widened[:, ids], logits)
    assert np.all(np.isneginf(np.delete(widened, ids, axis=1)))
    np.testing.assert_array_equal(match_width(logits, 5), [[3.0, -2.0, 0.5, -np.inf, -np.inf]])
    drafter = sd.ModelDrafter(DRAFT, LISTED)
    state, request = prepare(
        TARGET, INPUTS, drafter=drafter, gamma=GAMMA, sampling=SamplingConfig(temperature=1000.0)
    )
    state = advance(TARGET.network, request.drafter, state, np.int32(1))
    drafted = np.asarray(state.last_draft)[np.arange(GAMMA) < state.last_drafted[:, None]]
    assert set(drafted.tolist()) <= set(LISTED) and len(set(drafted.tolist())) > 3


@pytest.mark.slow
def test_distribution_through_the_engine():
    """The joint distribution of three tokens; ids off the list come from the residual."""
    target, draft = HashModel(V, 0, spread=3.0), HashModel(V, 1, spread=3.0, likeness=0.5)
    counts, _ = sample(
        target, sd.ModelDrafter(draft, [1, 3, 5, 7, 11, 13]), SPREAD, 2 * ROWS, verifier="block"
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert (
        g_test(counts, joint_distribution(HashModel(V, 1, spread=3.0, likeness=0.8), SPREAD))
        < FALSE_ALARM
    )


FILTERS = dict(temperature=0.8, top_k=3)
FORBIDDEN = {"some": (3, EOS), "the whole list": tuple(LISTED), "none": ()}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_the_returned_distribution_is_the_distribution_that_was_drawn_from(name):
    """Drafts are repeated by teacher forcing, a sort and the engine's uniforms."""
    config = SamplingConfig(**FILTERS, forbidden_tokens=FORBIDDEN[name])
    drafter = sd.ModelDrafter(DRAFT, LISTED)
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=drafter,
        gamma=3,
        sampling=config,
        max_new_tokens=9,
        eos_ids=(),
        verifier="token",
    )
    wanted = np.arange(B, dtype=np.int32) % 4
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, wanted))(request.drafter, state)
    valid, tokens = np.arange(3) < wanted[:, None], np.asarray(draft.tokens)

    width = max(map(len, INPUTS))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in INPUTS])
    logits = np.array(
        DRAFT.logits(padded, np.pad(tokens, ((0, 0), (1, 0)))[:, :-1], [len(row) for row in INPUTS])
    )
    logits[..., OFF_LIST] = -np.inf
    allowed = np.where(np.isin(np.arange(V), FORBIDDEN[name]), -np.inf, logits)
    some = np.any(
        allowed > -np.inf, axis=-1, keepdims=True
    )  # where nothing is left, nothing is forbidden
    expected = toy.adjusted_probs(np.where(some, allowed, logits), **FILTERS)
    probs = np.exp(np.asarray(draft.dist.logits - draft.dist.log_normalizer[..., None]))
    np.testing.assert_allclose(probs[valid], expected[valid], atol=1e-6)
    assert draft.dist.logits.shape == (B, 3, V)

    @jax.jit
    def drawn(keys, lengths, probs):
        random_bits = randomness.random_bits(
            keys, lengths, np.broadcast_to(np.arange(3), (B, 3)), randomness.DRAFT
        )
        return randomness.draw(probs.reshape(-1, V), random_bits.reshape(-1, 2)).reshape(B, 3)

    again = np.asarray(drawn(state.keys, state.lengths, expected.astype(np.float32)))
    np.testing.assert_array_equal(again[valid], tokens[valid])


@tiers.parametrize(
    "options",
    [
        dict(forbidden_tokens=tuple(LISTED)),
        dict(forced_tokens={0: OFF_LIST[0], 2: LISTED[2]}, min_new_tokens=5),
        dict(repetition_penalty=1.7, no_repeat_ngram=2),
    ],
    ids=["the whole list forbidden", "forced off the list", "penalties"],
    first=1,
)
def test_processors(options):
    """Argmax output is that of the same processors alone; a forced id is drafted, too."""
    config = SamplingConfig(**options)
    result = decode(sd.ModelDrafter(DRAFT, LISTED), sampling=config, max_new_tokens=LIMIT)
    np.testing.assert_array_equal(
        result.tokens, decode(None, sampling=config, max_new_tokens=LIMIT).tokens
    )
    first = result.stats.accepted_by_position[0]
    if "forced_tokens" in options:
        assert first >= B
    else:
        assert (first == 0) == ("forbidden_tokens" in options)


IDS = np.sort(RNG.choice(np.arange(2, WIDE), 70, replace=False))


def step(network, cache):
    """Logits `[rows, V]` of a first step."""
    rows = len(cache.cross_mask)
    tokens, positions = np.full((rows, 1), 7), np.zeros(rows, np.int32)
    return np.asarray(
        jax.jit(lambda network, cache: network.decode(tokens, positions, cache)[0][:, 0])(
            network, cache
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("how, rows", [("head of its own", 1), ("tied", 3), ("bfloat16", 3)])
def test_reduced_networks_compute_the_whole_ones_logits(how, rows):
    """The short head's logits are the whole head's; int8 changes them by little.

    The model itself stays as it is.
    """
    dtype = "bfloat16" if how == "bfloat16" else "float32"
    model = tiny_t5(0, WIDE, 1, dtype=dtype, logits_via_embedding=how == "tied")
    inputs, lengths = RNG.integers(2, WIDE, (rows, 5)), np.full(rows, 5)
    cache = jax.jit(lambda network: network.prefill(inputs, lengths, 8))(model.network)
    whole, before = step(model.network, cache), jax.tree.map(np.array, model.params)
    short = sd.ModelDrafter(model, [EOS, *IDS])
    head = short.network.params["decoder"]["logits_dense"]["kernel"]
    assert short.network.module.config.vocab_size == WIDE and weight_layouts.weight_shape(head) == (
        16,
        128,
    )
    assert isinstance(head, PackedWeight) == (how != "bfloat16" and native.is_available())
    found = step(short.network, cache)
    wide = np.asarray(jax.jit(Shortlist.widen)(short.shortlist, found))
    off = ~np.isin(np.arange(WIDE), [EOS, *IDS])
    assert wide.shape == whole.shape and np.all(wide[:, off] == -np.inf)
    np.testing.assert_allclose(wide[:, ~off], whole[:, ~off], rtol=1e-5, atol=1e-5)
    for drafter, expected in (
        (sd.ModelDrafter(model, int8=True), whole),
        (sd.ModelDrafter(model, [1, *IDS], True), found),
    ):
        rounded = step(drafter.network, cache)
        assert 0 < np.abs(rounded - expected).max() < 0.1 * expected.std()
    jax.tree.map(np.testing.assert_array_equal, before, model.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tied, scale, expected", [(True, None, True), (True, False, False), (False, None, False)]
)
def test_a_head_of_its_own_is_scaled_as_before(tied, scale, expected):
    model = tiny_t5(0, WIDE, 1, logits_via_embedding=tied, scale_decoder_outputs=scale)
    config = sd.ModelDrafter(model, 5).network.module.config
    assert not config.logits_via_embedding and config.scale_decoder_outputs is expected


def test_int8_weights():
    """Against rounding in numpy; columns and rows of zeros; one row and several."""
    rng = np.random.default_rng(0)
    weight, x = (
        rng.normal(size=(12, 7)).astype(np.float32),
        rng.normal(size=(2, 3, 12)).astype(np.float32),
    )
    weight[:, 2], x[1, 1] = 0, 0
    units = np.abs(weight).max(axis=0) / 127
    packed = Int8Weight.quantize(weight)
    assert packed.values.dtype == np.int8 and np.abs(packed.values).max() == 127
    np.testing.assert_allclose(packed.matrix(), weight, atol=units.max() / 2 * 1.001)
    for rows in (x, x[:1, :1]):
        found = np.asarray(apply_weight(jax.numpy.asarray(rows), packed, np.float32))
        scales = np.abs(rows).max(axis=-1, keepdims=True) / 127
        integers = np.round(rows / np.where(scales > 0, scales, 1)).astype(np.int64)
        np.testing.assert_allclose(
            found, integers @ np.asarray(packed.values, np.int64) * scales * units, rtol=1e-5
        )
        assert not found[..., 2].any()


def test_t5_drafters_in_the_engine():
    target = tiny_t5(0, WIDE, 1)
    drafter = sd.ModelDrafter(noisy_copy(target, 0.05), [EOS, *IDS], int8=True)
    inputs = np.random.default_rng(3).integers(2, WIDE, (6, 5))
    options = dict(max_new_tokens=10, eos_ids=())
    result = sd.generate(target, inputs, drafter=drafter, gamma=3, **options)
    np.testing.assert_array_equal(result.tokens, sd.generate(target, inputs, **options).tokens)
    assert 0 < result.stats.acceptance_rate < 1


# --- Lists ---


def test_the_most_frequent_ids():
    counts = np.array([5, 0, 9, 2, 9, 5, 1])
    assert sd.shortlist_from_counts(counts, 2).tolist() == [2, 4]
    assert sd.shortlist_from_counts(counts, 3).tolist() == [0, 2, 4]  # among equals the first
    assert sd.shortlist_from_counts(counts, 3, [1]).tolist() == [1, 2, 4]
    assert sd.shortlist_from_counts(counts, 7, [1]).tolist() == list(range(7))
    for kind in (np.uint8, np.uint64, np.float32):
        assert sd.shortlist_from_counts(np.array(counts, kind), 2).tolist() == [2, 4]
    assert np.asarray(sd.ModelDrafter(DRAFT, 3).shortlist.ids)[:4].tolist() == [0, 1, 2, 2]
    assert np.asarray(sd.ModelDrafter(HashModel(V, eos_ids=(9, 12)), 3).shortlist.ids)[
        :4
    ].tolist() == [0, 9, 12, 12]


WRONG = [
    ([], "shortlist: got \\[\\], expected a number of ids, or ids"),
    ([[1, 2]], "shortlist: got \\[\\[1, 2\\]\\], expected"),
    ([0.5], "expected a number of ids, or ids"),
    ([1, V], f"shortlist: got id {V}, expected ids of the drafter's model, 0 to {V - 1}"),
    ([-1, 1], "shortlist: got id -1"),
    ([1, 5, 5], "shortlist: got id 5 after 5, expected ascending ids, each once"),
    ([1, 5, 3], "shortlist: got id 3 after 5"),
    ([2, 3], "shortlist: got ids without 1, which ends a sequence"),
    (0, "shortlist: got a size of 0, expected an integer from 1 to 16"),
    (V + 1, "shortlist: got a size of 17"),
]


@pytest.mark.parametrize(
    "shortlist, message", WRONG, ids=[str(number) for number in range(len(WRONG))]
)
def test_bad_lists(shortlist, message):
    with pytest.raises(ValueError, match=message):
        sd.ModelDrafter(DRAFT, shortlist)


def test_other_bad_arguments():
    for counts, size, message in (
        ([], 1, "counts: got an array of shape"),
        ([[1]], 1, "counts: got an array of shape"),
        ([3, 4], 1, "shortlist: got a size of 1, expected an integer from 2 to 2"),
        ([3, 4], 2.0, "got a size of 2.0"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.shortlist_from_counts(counts, size, [0, 1])
    high = sd.ModelDrafter(HashModel(V + 4, eos_ids=()), [17, 18])
    with pytest.raises(ValueError, match="drafter: got a shortlist without any id below 16"):
        sd.generate(TARGET, [[3]], drafter=high, gamma=1)
