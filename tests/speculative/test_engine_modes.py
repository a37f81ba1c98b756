"""Every mode as a pure function, pairs of modes compiled, and what all have in common."""

import functools
import itertools
import re
import types

import jax
import numpy as np
import pytest
import tiers
import toy
from engine_inputs import loop_bodies
from enumerations import float64
from toy_models import HashModel, Words, compilations, tiny_t5

from specdec_jax.decoding.generate import advance, generate, prepare, warm_up
from specdec_jax.decoding.trace import trace
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative import distributions, randomness
from specdec_jax.speculative.policy import MAX_GAMMA
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.strategy import prefill
from specdec_jax.speculative.verifier import Randomness
from specdec_jax.speculative.verifiers import verify_tokens

MODES = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=1.2),
    "top-k": dict(temperature=1.0, top_k=3),
    "top-p": dict(temperature=1.0, top_p=0.7),
    "top-k and top-p": dict(temperature=0.8, top_k=4, top_p=0.8),
}
V = 16

# --- The full product, as pure functions ---


@functools.partial(jax.jit, static_argnames="mode")
def one_iteration(target_logits, draft_logits, rows, drafted_at, wanted, accept, final, *, mode):
    """standardize → draw → verify, as the engine composes them."""
    target, draft = (
        distributions.standardize(logits, None, rows, mode)
        for logits in (target_logits, draft_logits)
    )
    gamma = draft_logits.shape[1]
    drafted = [randomness.draw(draft.probs()[:, i], drafted_at[:, i]) for i in range(gamma)]
    drafted = (
        jax.numpy.stack(drafted, axis=1)
        if gamma
        else jax.numpy.zeros((len(wanted), 0), jax.numpy.int32)
    )
    return drafted, *verify_tokens(target, draft, drafted, wanted, Randomness(accept, final))


@tiers.parametrize("gamma", [3, 0, 1], first=1)
@tiers.parametrize("vocab", [5, 2, 130], first=1)
def test_full_product_of_modes(vocab, gamma):
    """Each row takes the decisions of a sort and of the enumeration, in float64.

    The product is modes × γ × num_drafted × V.
    """
    repeats = 20
    cases = [
        (name, wanted) for name in MODES for wanted in range(gamma + 1) for _ in range(repeats)
    ]
    rng, size = np.random.default_rng([vocab, gamma]), len(cases)
    p_logits, q_logits = 3 * rng.normal(size=(2, size, gamma + 1, vocab))
    q_logits = np.where(rng.random((size, 1, 1)) < 0.5, p_logits + 0.5 * q_logits, q_logits)[
        :, :gamma
    ]
    p_logits[..., 1:][rng.random(p_logits[..., 1:].shape) < 0.1] = -np.inf
    config = {
        name: [MODES[mode].get(name, neutral) for mode, _ in cases]
        for name, neutral in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0))
    }
    config = SamplingConfig(**config)
    wanted = np.array([n for _, n in cases], np.int32)
    drafted_at, accept = rng.random((2, size, gamma))
    final = rng.random((size, gamma + 1))
    with float64():
        rows = jax.tree.map(
            lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, config.rows(size, vocab)
        )
        at = toy.random_bits(drafted_at), wanted, accept, toy.random_bits(final)
        found = one_iteration(p_logits, q_logits, rows, *at, mode=config.mode)
        drafted, accepted, token = jax.device_get(found)
    for row, (mode, count) in enumerate(cases):
        # The parameters travel as float32.
        exact = {
            name: float(np.float32(value)) if name != "top_k" else value
            for name, value in MODES[mode].items()
        }
        p, q = (toy.adjusted_probs(logits[row], **exact) for logits in (p_logits, q_logits))
        assert drafted[row].tolist() == [toy.invert(dist, u) for dist, u in zip(q, drafted_at[row])]
        expected = toy.TOKEN.decide(p, q, drafted[row, :count], accept[row], final[row])
        assert (accepted[row], token[row]) == expected, (mode, count)


# --- A pairwise cover, compiled ---

FACTORS = {
    "mode": tuple(MODES),
    "gamma": (0, 1, 3),
    "batch": (1, 3),
    "prefix": (False, True),
    "eos": ((), (1,), (2, 5, 7, 9, 11)),
    "drafter": ("self", "other", "narrower"),
}


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def pairwise_cover():
    """Few cases that hold every pair of values of two factors; greedy, always the same."""
    cases = list(itertools.product(*FACTORS.values()))
    missing, cover = set().union(*map(pairs_of, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        cover.append(best)
        missing -= pairs_of(best)
    return cover


COVER = pairwise_cover()
INPUTS = [[3, 4, 1], [7, 1], [9, 2, 9, 1]]
pytestmark = pytest.mark.usefixtures("quick")
PREFIXES = [[4, 2], [], [11]]
MODELS = {
    "target": HashModel(V, 0),
    "other": HashModel(V, 1, likeness=0.4),
    "narrower": HashModel(12, 1, likeness=0.4),
}
MODELS["self"] = MODELS["target"]


def check_stats(result, gamma: int):
    """What holds in every run, and row by row."""
    total = result.stats
    for stats in (total, *total.per_row):
        examined, accepted = stats.examined_by_position, stats.accepted_by_position
        assert len(examined) == len(accepted) == gamma
        assert (
            stats.accepted == accepted.sum() <= examined.sum() <= stats.drafted == stats.draft_calls
        )
        assert np.all(accepted <= examined) and np.all(examined[1:] <= accepted[:-1])
        assert stats.acceptance_rate == (
            stats.accepted / examined.sum() if examined.sum() else None
        )
        # A model drafts whatever is wanted.
        assert stats.undrafted == 0 and stats.acceptance_rate_per_position == stats.acceptance_rate
    for stats, length in zip(total.per_row, result.lengths):
        # Each call adds one token of the target's own, but for one that an accepted EOS makes
        # superfluous.
        assert (
            stats.accepted + stats.target_calls - 1 <= length <= stats.accepted + stats.target_calls
        )
        assert stats.tokens_per_target_call == length / stats.target_calls
    for name in ("target_calls", "draft_calls", "drafted", "accepted"):
        assert getattr(total, name) == sum(getattr(stats, name) for stats in total.per_row)
    assert total.tokens_per_target_call == result.lengths.sum() / total.target_calls


@tiers.parametrize("case", COVER, ids=str, first=4)
def test_pairwise_cover(case):
    case = dict(zip(FACTORS, case))
    target, batch, limit = MODELS["target"], case["batch"], 7
    prefixes = PREFIXES[:batch] if case["prefix"] else None
    result = generate(
        target,
        INPUTS[:batch],
        drafter=ModelDrafter(MODELS[case["drafter"]]),
        gamma=case["gamma"],
        sampling=SamplingConfig(**MODES[case["mode"]]),
        max_new_tokens=limit,
        eos_ids=case["eos"],
        decoder_prefix=prefixes,
        key=jax.random.key(5),
        verifier="token",
    )
    check_stats(result, case["gamma"])
    assert result.tokens.shape == (batch, limit) and result.tokens.dtype == np.int32
    for row in range(batch):
        prefix, length = (prefixes[row] if prefixes else []), result.lengths[row]
        new, after = result.tokens[row, :length].tolist(), result.tokens[row, length:]
        assert not after.any() and not result.log_probs[row, length:].any()
        assert not any(token in case["eos"] for token in new[:-1])
        assert length == limit or new[-1] in case["eos"]
        logits = target.logits([INPUTS[row]], [[0, *prefix, *new[:-1]]], [len(INPUTS[row])])[
            0, len(prefix) :
        ]
        own = np.log(toy.adjusted_probs(logits))[np.arange(length), new]
        np.testing.assert_allclose(result.log_probs[row, :length], own, atol=1e-5)
        dist = toy.adjusted_probs(logits, **MODES[case["mode"]])[np.arange(length), new]
        assert np.all(dist > 0), "an id that the distribution excludes"
        np.testing.assert_allclose(result.adjusted_log_probs[row, :length], np.log(dist), atol=1e-5)
        assert not result.adjusted_log_probs[row, length:].any()
    if case["drafter"] == "self" and result.stats.drafted:
        assert result.stats.acceptance_rate == 1.0


def test_the_cover_is_one():
    values = set().union(*map(pairs_of, itertools.product(*FACTORS.values())))
    assert set().union(*map(pairs_of, COVER)) == values and len(COVER) <= 20


def test_greedy_identity_over_a_thousand_models():
    """1,000 random pairs of models in one batch: each input has its own hash distribution."""
    rng = np.random.default_rng(0)
    inputs = np.unique(rng.integers(0, V, (1200, 5)), axis=0)[:1000]
    options = dict(input_lengths=np.full(1000, 5), max_new_tokens=20, eos_ids=(3,))
    plain = generate(MODELS["target"], inputs, **options)
    result = generate(
        MODELS["target"], inputs, drafter=ModelDrafter(MODELS["other"]), gamma=3, **options
    )
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.lengths, plain.lengths)
    np.testing.assert_allclose(result.log_probs, plain.log_probs, atol=1e-5)
    assert 0.1 < result.stats.acceptance_rate < 0.9 and len(np.unique(plain.lengths)) > 10
    assert np.all(
        plain.tokens[:, 0]
        == np.argmax(
            MODELS["target"].logits(inputs, np.zeros((1000, 1)), options["input_lengths"])[:, 0],
            axis=-1,
        )
    )


# --- The drafter's contract, compilation ---


def test_the_returned_distribution_is_the_distribution_that_was_drawn_from():
    """The draft is repeated from its distribution and uniforms.

    The distribution is that of the teacher-forced drafter and a sort.
    """
    config = SamplingConfig(**MODES["top-k and top-p"])
    state, request = prepare(
        MODELS["target"],
        INPUTS,
        drafter=ModelDrafter(MODELS["other"]),
        gamma=3,
        sampling=config,
        max_new_tokens=9,
        eos_ids=(),
    )
    wanted = np.array([3, 1, 2], np.int32)
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, wanted))(request.drafter, state)
    np.testing.assert_array_equal(draft.num_drafted, wanted)
    probs = np.asarray(draft.dist.probs())
    random_bits = randomness.random_bits(
        state.keys, state.lengths, np.broadcast_to(np.arange(3), (3, 3)), randomness.DRAFT
    )
    for row in range(3):
        n, tokens = wanted[row], np.asarray(draft.tokens[row])
        logits = MODELS["other"].logits([INPUTS[row]], [[0, *tokens[: n - 1]]], [len(INPUTS[row])])[
            0
        ]
        np.testing.assert_allclose(
            probs[row, :n], toy.adjusted_probs(logits, **MODES["top-k and top-p"]), atol=1e-5
        )
        np.testing.assert_array_equal(
            randomness.draw(probs[row, :n], random_bits[row, :n]), tokens[:n]
        )


@pytest.mark.slow
def test_nothing_compiles_after_warm_up():
    target, drafter = HashModel(V, 0), ModelDrafter(HashModel(V, 1))
    options = dict(drafter=drafter, gamma=2, max_new_tokens=20)
    sizes = warm_up(
        target,
        sampling=SamplingConfig(temperature=0.5, top_k=3),
        batch_sizes=(1, 2),
        max_input_length=16,
        **options,
    )
    assert sizes == 2 * len({bucket_length(length) for length in range(1, 17)})
    limits = [limit for limit in range(1, 64) if bucket_length(limit) == bucket_length(20)]
    caches = advance._cache_size(), prefill._cache_size()

    def varied():
        for length, config, eos, limit, seed in [
            (1, SamplingConfig(temperature=0.9, top_k=5), (1,), 20, 0),
            (8, SamplingConfig(temperature=1.9, top_k=1), (1, 2), 20, 1),
            (9, SamplingConfig(temperature=0.1, top_k=7), (3, 4, 5, 6), limits[0], 2),
            (16, SamplingConfig(temperature=0.9, top_k=16), (), limits[-1], 3),
        ]:
            for batch in (1, 2):
                generate(
                    target,
                    [[5] * length] * batch,
                    sampling=config,
                    eos_ids=eos,
                    key=jax.random.key(seed),
                    **{**options, "max_new_tokens": limit, "gamma": [2, 1][:batch]},
                )

    assert compilations(varied) == 0
    assert (advance._cache_size(), prefill._cache_size()) == caches
    assert compilations(lambda: generate(target, [[5]], **{**options, "max_new_tokens": 40})) > 0, (
        "the counter counts"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "batch, temperature",
    [(1, 0.0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 0.0), (1, 1.0)))],
)
def test_no_copy_of_a_cache_or_a_weight_in_the_loop(batch, temperature, optimised):
    """No `copy` in a compiled loop's body has the dimensions of a cache or a weight."""
    target, draft = (
        tiny_t5(seed, 53, 1, num_heads=5, head_dim=6, emb_dim=22, mlp_dim=34) for seed in (0, 1)
    )
    config = SamplingConfig(temperature=temperature)
    state, request = prepare(
        target,
        INPUTS[:batch],
        drafter=ModelDrafter(draft),
        gamma=3,
        sampling=config,
        max_new_tokens=40,
    )
    bodies = loop_bodies(
        advance.lower(target.network, request.drafter, state, np.int32(9))
        .compile(optimised)
        .as_text()
    )
    arrays = jax.tree.leaves((state.target_cache, state.draft_state.cache, target.network.params))
    shapes = {
        ",".join(map(str, leaf.shape)) for leaf in arrays if leaf.ndim > 1 and leaf.size > 200
    }
    assert any(f"[{shape}]" in bodies for shape in shapes)
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", bodies)
    assert not shapes & set(copies), sorted(shapes & set(copies))


# --- Strings, traces and errors ---


def test_strings_in_and_out():
    """An EOS is appended, empty sentences give empty outputs, texts are those of the ids."""
    target = HashModel(V, 0, vocabulary=Words())
    options = dict(
        drafter=ModelDrafter(HashModel(V, 1, vocabulary=Words())), gamma=2, max_new_tokens=6
    )
    result = generate(target, ["w3 w4", "", "w7", "  "], **options)
    ids = generate(target, [[3, 4, 1], [5], [7, 1], [5]], **options)
    np.testing.assert_array_equal(result.tokens[[0, 2]], ids.tokens[[0, 2]])
    assert result.texts[1] == result.texts[3] == "" and not result.lengths[[1, 3]].any()
    assert result.texts[0] == Words().decode(ids.tokens[0, : ids.lengths[0]]) != ""
    assert generate(HashModel(V), [[3]], max_new_tokens=2).texts is None
    steps = trace(target, "w3 w4", **options)
    committed = [
        token for step in steps for token in (*step.accepted, step.corrected) if token is not None
    ]
    assert committed == ids.tokens[0, : ids.lengths[0]].tolist()
    assert any(step.rejected is not None for step in steps)
    again = generate(target, (text for text in ["w3 w4", "", "w7", "  "]), **options)
    assert again.texts == result.texts


OTHER = types.SimpleNamespace(
    random_bits=HashModel(V, 1, vocabulary=Words(1)),
    start=HashModel(V, 1, start_token=2),
    same=HashModel(V, 1),
)

ERRORS = [
    (dict(gamma=-1), f"gamma: got -1, expected an integer from 0 to {MAX_GAMMA}"),
    (dict(gamma=-1, drafter=None), "gamma: got -1"),
    (dict(gamma=MAX_GAMMA + 1), "gamma: got 65"),
    (dict(gamma=1.5), "gamma: got 1.5"),
    (dict(gamma=[1, 2, 3]), "gamma: got 3 values, expected one or 2"),
    (dict(max_new_tokens=0), "max_new_tokens: got 0, expected an integer from 1"),
    (dict(max_new_tokens=[4, 0]), r"max_new_tokens: got \[4, 0\]"),
    (dict(verifier="no such"), "verifier: got 'no such', expected one of"),
    (dict(inputs="text"), "inputs: got the string 'text', expected a list"),
    (dict(inputs=[]), "inputs: got 0 inputs, expected at least 1"),
    (
        dict(inputs=["w3", "w4"], target=HashModel(V)),
        "inputs: got strings for a model without a vocabulary",
    ),
    (dict(inputs=[[3, V]]), "inputs: got ids outside the vocabulary, expected 0 to 15"),
    (dict(inputs=[[3, -1]]), "inputs: got ids outside the vocabulary"),
    (dict(inputs=[[3, 2**32 + 3]]), r"inputs: got ids outside .* \(input 0: id 4294967299\)"),
    (dict(inputs=np.zeros(3, np.int32)), r"inputs: got an array of shape \(3,\) and type int32"),
    (dict(inputs=np.zeros((2, 3))), "type float64, expected integers"),
    (dict(input_lengths=[1, 1]), "input_lengths: got lengths with a list"),
    (
        dict(inputs=np.ones((2, 3), np.int32), input_lengths=[1]),
        r"input_lengths: got \[1\], expected 2 integers",
    ),
    (
        dict(inputs=np.ones((2, 3), np.int32), input_lengths=[1, 4]),
        "expected 2 integers from 0 to 3",
    ),
    (dict(max_input_length=2), "input 0: got 3 tokens, expected at most max_input_length = 2"),
    (dict(decoder_prefix=[[3]]), "decoder_prefix: got 1 prefixes, expected 2"),
    (dict(decoder_prefix=[[3], [V]]), "got ids outside the vocabulary"),
    (dict(eos_ids=(V,)), r"eos_ids: got \(16,\), expected ids from 0 to 15"),
    (
        dict(sampling=SamplingConfig(temperature=[1.0, 1, 1])),
        "temperature: got 3 values, expected one or 2",
    ),
    (dict(key=7), r"key: got 7, expected jax.random.key\(seed\)"),
    (dict(key=jax.random.split(jax.random.key(0), 3)), "key: got 3 keys, expected one or 2"),
    (
        dict(drafter=ModelDrafter(OTHER.random_bits)),
        "drafter: got a vocabulary of 16 pieces that differs",
    ),
    (
        dict(drafter=ModelDrafter(OTHER.start)),
        "drafter: got start token 2, expected the target's 0",
    ),
]


@pytest.mark.parametrize("change, message", ERRORS, ids=[message for _, message in ERRORS])
def test_bad_arguments_are_rejected_before_anything_compiles(change, message):
    options = dict(
        target=HashModel(V, 0, vocabulary=Words()),
        inputs=[[3, 4, 1], [7]],
        drafter=ModelDrafter(OTHER.same),
        gamma=2,
    )
    options.update(change)

    def call():
        with pytest.raises(ValueError, match=message):
            generate(**options)

    assert compilations(call) == 0
