"""Heads on the target's last state: inputs, drafts, distributions, files and commands."""

import functools
import json

import jax
import numpy as np
import pytest
import toy
from distribution_samples import FALSE_ALARM, g_test
from heads_models import drafter, t5
from random_heads_of import random_heads
from toy_models import HashModel, compilations, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters.heads import HeadsState
from specdec_jax.models import heads as heads_module
from specdec_jax.models.heads import Heads, HeadsConfig
from specdec_jax.models.parameters import flatten
from specdec_jax.speculative import distributions as speculative_distributions
from specdec_jax.speculative import randomness
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")
B, GAMMA, LIMIT = 8, 4, 12
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, 24, n).tolist() for n in RNG.integers(1, 7, B)]
PREFIXES = [RNG.integers(2, 24, row % 3).tolist() for row in range(B)]
GAMMAS = [1 + row % GAMMA for row in range(B)]
LIMITS = [1 if row == 5 else LIMIT for row in range(B)]


@functools.cache
def eos() -> int:
    """An id that some rows of the plain output meet and others do not."""
    tokens = sd.generate(
        t5(), INPUTS, max_new_tokens=LIMITS, decoder_prefix=PREFIXES, eos_ids=()
    ).tokens
    rows = [set(row[2:]) for row in tokens.tolist()]
    return next(x for x in range(1, 24) if 1 < sum(x in row for row in rows) < B - 2)


def decode(drafter=None, order=range(B), function=sd.generate):
    def reorder(values):
        return [values[row] for row in order]

    options = dict(
        max_new_tokens=reorder(LIMITS), decoder_prefix=reorder(PREFIXES), eos_ids=[eos()]
    )
    return function(t5(), reorder(INPUTS), drafter=drafter, gamma=reorder(GAMMAS), **options)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "own"])
def test_greedy_output_is_that_of_plain_decoding(share):
    """Three heads for γ of 1 to 4, prefixes, one new token or several, EOS, permuted rows."""
    result, expected = decode(drafter(share)), decode()
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.lengths, expected.lengths)
    assert (
        0 < result.stats.acceptance_rate < 1
        and "eos" in result.finish_reasons
        and "length" in result.finish_reasons
    )
    rows = result.stats.per_row
    assert len({row.accepted for row in rows}) > 2
    for row, stats in enumerate(rows):
        assert stats.draft_calls < stats.target_calls  # nothing is known before the first call
        assert stats.drafted <= min(GAMMAS[row], 3) * stats.draft_calls
    assert (
        rows[5].drafted == 0
        and max(stats.drafted / max(stats.draft_calls, 1) for stats in rows) > 2
    )
    order = np.random.default_rng(1).permutation(B)

    def again():
        other = decode(drafter(share), order)
        for place, row in enumerate(order):
            assert other.tokens[place].tolist() == result.tokens[row].tolist()
            assert other.stats.per_row[place].accepted == rows[row].accepted

    assert compilations(again) == 0


def test_heads_see_the_state_that_gave_the_last_committed_token():
    """States equal teacher-forced ones after every iteration; finished rows keep theirs."""
    state, request = decode(drafter(True), function=prepare)
    inputs = np.zeros((B, 8), np.int32)
    for row, ids in enumerate(INPUTS):
        inputs[row, : len(ids)] = ids
    valid = np.arange(8) < np.array([[len(ids)] for ids in INPUTS])
    network, rows = t5().network, np.arange(B)
    teacher_forced = jax.jit(
        lambda tokens: network.module.apply(
            {"params": network.params}, inputs, valid, tokens, method="states"
        )
    )
    assert not np.any(state.draft_state.known)
    done_early = 0
    while not np.all(state.done):
        before = np.asarray(state.done)
        kept = np.asarray(state.draft_state.states)
        state = sd.advance(request.network, request.drafter, state, np.int32(1))
        tokens, lengths, states = map(
            np.asarray, (state.tokens, state.lengths, state.draft_state.states)
        )
        assert np.all(state.draft_state.known)
        np.testing.assert_allclose(
            states, np.asarray(teacher_forced(tokens))[rows, lengths - 2], atol=1e-5
        )
        np.testing.assert_array_equal(states[before], kept[before])
        done_early += before.sum()
    assert done_early


def test_head_i_gives_token_1_plus_i_after_its_state():
    """With blocks of 0 and the target's head it repeats the last committed token."""
    config = drafter(True).config
    zeros = sd.HeadsDrafter.for_target(
        t5(), config, heads_module.init_params(config, jax.random.key(0))
    )
    state, request = decode(zeros, function=prepare)
    state = sd.advance(request.network, request.drafter, state, np.int32(1))
    repetition = np.take_along_axis(
        np.asarray(state.tokens), np.asarray(state.lengths)[:, None] - 1, axis=1
    )
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, np.full(B, 4, np.int32)))(
        request.drafter, state
    )
    np.testing.assert_array_equal(draft.num_drafted, np.where(repetition[:, 0] == eos(), 1, 3))
    valid = np.arange(4) < np.asarray(draft.num_drafted)[:, None]
    assert np.all((draft.tokens == repetition) | ~valid)


def test_token_i_of_a_draft_is_head_i_s():
    """Heads that all say the same, as above, do not show which of them is read."""
    state, request = decode(drafter(True), function=prepare)
    state = sd.advance(request.network, request.drafter, state, np.int32(1))
    best = np.argmax(request.drafter.network.logits(state.draft_state.states), axis=-1)
    assert np.any(best[:, 1:] != best[:, :-1])
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, np.full(B, 4, np.int32)))(
        request.drafter, state
    )
    valid = np.arange(best.shape[1]) < np.asarray(draft.num_drafted)[:, None]
    assert np.any(valid[:, 1:])
    np.testing.assert_array_equal(np.where(valid, draft.tokens[:, : best.shape[1]], best), best)


# --- Distributions ---

V = 6
HASH = HashModel(V, 0, spread=3.0)  # its states are its logits
FILTERS = dict(temperature=0.8, top_k=5)


@pytest.mark.parametrize("verifier", ["token", "gumbel"])
def test_the_returned_distribution_is_the_distribution_that_was_drawn_from(verifier):
    """The draft is repeated in numpy from its distribution and uniforms; an EOS ends it."""
    rows, own = 300, random_heads(HASH, num_blocks=2)
    config = SamplingConfig(**FILTERS, forbidden_tokens=(3,))
    options = dict(drafter=own, gamma=4, sampling=config, max_new_tokens=9, verifier=verifier)
    inputs = np.random.default_rng(1).integers(2, V, (rows, 3))
    state, request = prepare(HASH, inputs, eos_ids=(5,), **options)
    seen = HASH.logits(inputs, np.zeros((rows, 1), int))[:, 0]
    known = np.arange(rows) % 7 > 0
    state = state.replace(draft_state=HeadsState(seen, known))
    wanted = np.arange(rows, dtype=np.int32) % 5
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, wanted))(request.drafter, state)
    np.testing.assert_array_equal(draft.calls, known & (wanted > 0))

    logits = []
    for head in own.params.values():
        x = seen.astype(np.float64)
        for block in ("block_0", "block_1"):
            y = x @ np.asarray(head[block]["kernel"], np.float64)
            x = x + y / (1 + np.exp(-y))
        logits.append(
            np.where(np.arange(V) == 3, -np.inf, x @ np.asarray(head["logits_dense"]["kernel"]))
        )
    expected = toy.adjusted_probs(np.stack(logits, axis=1), **FILTERS)

    @jax.jit
    def drawn(keys, lengths):
        offsets = np.broadcast_to(np.arange(3), (rows, 3))
        if verifier == "gumbel":
            return speculative_distributions.argmax(
                np.log(expected) + randomness.gumbel_noise(keys, lengths[:, None] + offsets, V)
            )
        random_bits = randomness.random_bits(keys, lengths, offsets, randomness.DRAFT)
        return randomness.draw(
            expected.reshape(-1, V).astype(np.float32), random_bits.reshape(-1, 2)
        ).reshape(rows, 3)

    with np.errstate(divide="ignore"):
        again = np.asarray(drawn(state.keys, state.lengths))
    ends = np.where(again == 5, np.arange(3), 3).min(axis=1) + 1
    num = np.asarray(draft.num_drafted)
    np.testing.assert_array_equal(num, np.where(known, np.minimum(np.minimum(wanted, 3), ends), 0))
    valid = np.arange(3) < num[:, None]
    np.testing.assert_array_equal(np.asarray(draft.tokens)[:, :3][valid], again[valid])
    assert np.any((ends < 3) & (wanted > ends))
    if verifier == "gumbel":
        assert draft.dist is None
    else:
        dist = np.exp(draft.dist.logits - draft.dist.log_normalizer[..., None])
        np.testing.assert_allclose(dist[:, :3][valid], expected[valid], atol=1e-5)


def joint_distribution(model) -> np.ndarray:
    """`[V⁴]` of the first four ids, in float64."""
    prefixes = np.stack(np.meshgrid(*[np.arange(V)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    decoder = np.pad(prefixes, ((0, 0), (1, 0)))
    probs = toy.adjusted_probs(model.logits(np.tile([3, 4, 1], (len(decoder), 1)), decoder))
    joint = probs[0, 0]
    for place in (1, 2, 3):
        joint = joint[..., None] * probs[:: V ** (3 - place), place].reshape(*[V] * place, V)
    return joint.ravel()


@pytest.mark.slow
def test_distribution_through_the_engine():
    """The joint distribution of four tokens, with heads that are often wrong."""
    rows = 20_000
    own = random_heads(HASH, 0.4)
    state, request = prepare(
        HASH,
        np.tile([3, 4, 1], (rows, 1)),
        drafter=own,
        gamma=3,
        sampling=SamplingConfig(temperature=1.0),
        max_new_tokens=4,
        eos_ids=(),
        key=jax.random.key(7),
    )
    state = sd.advance(HASH.network, request.drafter, state, np.int32(99))
    counts = np.bincount(
        np.asarray(state.tokens)[:, 1:5] @ V ** np.arange(3, -1, -1), minlength=V**4
    )
    assert g_test(counts, joint_distribution(HASH)) > FALSE_ALARM
    assert 0.02 < state.counts.accepted.sum() / state.counts.drafted.sum() < 0.9
    wrong = joint_distribution(HashModel(V, 1, spread=3.0, likeness=0.8))
    assert g_test(counts, wrong) < FALSE_ALARM, "the test can fail"


# --- Shapes, files, and heads that do not fit ---


@pytest.mark.parametrize("share, blocks", [(True, 2), (False, 0), (False, 1)])
def test_parameters_have_the_shapes_that_are_written_out(share, blocks):
    config = HeadsConfig(2, 4, 6, blocks, share)
    params = heads_module.init_params(config, jax.random.key(0), None if share else np.ones((4, 6)))
    assert {name: leaf.shape for name, leaf in flatten(params).items()} == config.parameter_shapes
    output = jax.eval_shape(Heads(config).apply, {"params": params}, np.ones((3, 4)))
    assert output.shape == (3, 2, 4 if share else 6)
    packed = heads_module.pack(params, "float32")
    assert jax.tree.all(jax.tree.map(np.array_equal, heads_module.unpack(packed), params))


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(num_heads=0), "num_heads: got 0, expected at least 1"),
        (dict(emb_dim=0), "emb_dim: got 0"),
        (dict(num_blocks=0, share_head=True), "num_blocks: got 0, expected at least 1"),
        (dict(num_blocks=-1), "num_blocks: got -1, expected at least 0"),
    ],
)
def test_bad_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        HeadsConfig(**{**dict(num_heads=2, emb_dim=4, vocab_size=6), **shape})


def test_saved_heads_draft_the_same(tmp_path):
    for share in (True, False):
        drafter(share).save(tmp_path / "heads")  # the second replaces the first
        loaded = sd.HeadsDrafter.load(tmp_path / "heads", t5())
        assert (
            jax.tree.structure(loaded) == jax.tree.structure(drafter(share))
            and loaded.name == "3 heads"
        )
        for ours, theirs in zip(
            jax.tree.leaves(loaded), jax.tree.leaves(drafter(share)), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    assert set(json.loads((tmp_path / "heads/config.json").read_text())["heads"]) >= {
        "num_heads",
        "share_head",
    }


def test_heads_that_do_not_fit_are_rejected(tmp_path):
    path, model = tmp_path / "heads", tmp_path / "model"
    drafter(False).save(path)
    sd.save(t5(), model)
    load = functools.partial(sd.HeadsDrafter.load, path)
    with pytest.raises(
        ValueError,
        match="heads: heads: got heads of a target with other weights, expected heads trained",
    ):
        load(tiny_t5(2))
    with pytest.raises(ValueError, match="got emb_dim 16, expected the target's 8"):
        load(tiny_t5(1, emb_dim=8))
    with pytest.raises(ValueError, match="got vocab_size 24, expected the target's 32"):
        load(tiny_t5(1, 32))
    with pytest.raises(ValueError, match="heads: got heads of a target with other weights"):
        sd.generate(tiny_t5(2), INPUTS, drafter=drafter(True), gamma=2)
    with pytest.raises(ValueError, match="model: got no heads, expected a folder with heads"):
        sd.HeadsDrafter.load(model, t5())
    with pytest.raises(ValueError, match="none: got no heads"):
        sd.HeadsDrafter.load(tmp_path / "none", t5())
    with pytest.raises(
        ValueError, match="heads: got heads, which only draft for their target, expected a model"
    ):
        sd.load(path, "float32")
    with pytest.raises(ValueError, match="model: got something that is no heads folder"):
        drafter(True).save(model)
    with pytest.raises(ValueError, match="heads: got something that is no model folder"):
        sd.save(t5(), path)
    record = json.loads((path / "config.json").read_text())
    wrong = [
        ({**record, "version": 2}, "config.json: got version 2, expected 1"),
        (
            {**record, "heads": {"width": 3}},
            "config.json: got 'width', expected a configuration of num_heads",
        ),
        (
            {**record, "heads": {**record["heads"], "num_heads": 4}},
            "parameter head_3/block_0/kernel: got none",
        ),
        (
            {**record, "heads": {**record["heads"], "num_heads": 2}},
            "got unexpected parameter head_2/block_0/kernel",
        ),
        (
            {**record, "heads": {**record["heads"], "emb_dim": 8}},
            r"got shape \(16, 16\), expected \(8, 8\)",
        ),
    ]
    for content, message in wrong:
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(t5())
