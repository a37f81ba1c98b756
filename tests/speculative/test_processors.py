"""Processors against slow versions in numpy, with stale and future tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_processors

from specdec_jax.speculative import distributions, processors
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")

B, T, S, V = 5, 3, 14, 6
EOS = (1, 4)
RNG = np.random.default_rng


@functools.partial(jax.jit, static_argnames="mode")
def process(logits, context, rows, mode):
    return distributions.process(logits, context, rows, mode)


@functools.partial(jax.jit, static_argnames="mode")
def distribution_of(logits, context, rows, mode):
    return distributions.standardize(logits, context, rows, mode).probs()


def some_case(seed: int):
    """Returns logits, prefixes of all lengths before T positions, and starts.

    There are few ids, so that n-grams repeat.
    """
    rng = RNG(seed)
    logits = (rng.normal(size=(B, T, V)) * 3).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = 0
    tokens = rng.integers(0, 3 + seed % 3, (B, S)).astype(np.int32)
    lengths = rng.integers(1, S - T + 1, B).astype(np.int32)
    lengths[seed % B] = 1 + seed % 3  # short ones too
    starts = rng.integers(1, lengths + 1).astype(np.int32)
    eos = np.broadcast_to(np.array([*EOS, -1, -1], np.int32), (B, 4))
    return logits, Context(tokens, lengths, starts, eos)


def expected(logits, context, options):
    """`[B, T, V]`: each row and position by itself."""
    found = np.zeros_like(logits)
    for row, position in np.ndindex(logits.shape[:2]):
        own = {name: value[row] if name in PER_ROW else value for name, value in options.items()}
        length = int(context.lengths[row]) + position
        found[row, position] = toy_processors.processed(
            logits[row, position],
            context.tokens[row, :length].tolist(),
            new=length - int(context.starts[row]),
            eos_ids=EOS,
            **own,
        )
    return found


def own_processor(prefixes, lengths, logits):
    """Only the id after the last one, and ids that came up an even number of times."""
    ids, valid = jnp.arange(logits.shape[1]), jnp.arange(prefixes.shape[1]) < lengths[:, None]
    counts = jnp.sum((prefixes[..., None] == ids) & valid[..., None], axis=1)
    last = jnp.take_along_axis(prefixes, lengths[:, None] - 1, axis=1)
    return jnp.where((counts % 2 == 0) | (ids == last + 1), logits, -jnp.inf)


def own_in_numpy(prefix, logits):
    allowed = [
        prefix.count(token) % 2 == 0 or token == prefix[-1] + 1 for token in range(len(logits))
    ]
    return np.where(allowed, logits, -np.inf)


PER_ROW = {
    "repetition_penalty": (1.0, 1.5, 3.0, 0.4, 1.1),
    "min_new_tokens": (0, 1, 2, 5, 30),
}
CASES = {
    "repetition": dict(repetition_penalty=PER_ROW["repetition_penalty"]),
    "1-grams": dict(no_repeat_ngram=1),
    "2-grams": dict(no_repeat_ngram=2),
    "3-grams": dict(no_repeat_ngram=3),
    "minimum length": dict(min_new_tokens=PER_ROW["min_new_tokens"]),
    "bias": dict(logit_bias={0: 5.0, 3: -2.5}),
    "forbidden": dict(forbidden_tokens=(0, 5)),
    "mask": dict(vocabulary_mask=(True, False, True, True, False, True)),
    "synthetic": dict(forced_tokens={0: 3, 2: 1, 9: 0}),
    "own": dict(processor=own_processor),
    "all": dict(
        **PER_ROW,
        no_repeat_ngram=2,
        logit_bias={0: 5.0, 3: -2.5},
        forbidden_tokens=(0, 5),
        forced_tokens={0: 3, 2: 1, 9: 0},
        processor=own_processor,
    ),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_processor_equals_its_slow_version(options):
    config = SamplingConfig(**options)
    slow = {**options, "processor": own_in_numpy} if "processor" in options else options
    rows, changed = config.rows(B, V), 0
    for seed in range(25):
        logits, context = some_case(seed)
        found = np.asarray(process(logits, context, rows, config.mode))
        np.testing.assert_allclose(found, expected(logits, context, slow), rtol=1e-6)
        # What lies past a prefix plays no part: neither junk nor the tokens of later positions.
        for first in range(T):
            valid = np.arange(S) < context.lengths[:, None] + first
            junk = np.where(
                valid, context.tokens, RNG(seed).integers(0, V, (B, S)).astype(np.int32)
            )
            again = np.asarray(process(logits, context._replace(tokens=junk), rows, config.mode))
            np.testing.assert_array_equal(again[:, : first + 1], found[:, : first + 1])
        changed += np.any(found != logits)
    assert changed > 20


def alone(function, logits, prefix, start: int = 1, **options):
    """Returns logits or probabilities `[V]` after one prefix, by `process` or `distribution_of`."""
    config = SamplingConfig(**{"temperature": 1.0, **options})
    tokens = np.array([[*prefix, *[3] * (S - len(prefix))]], np.int32)
    eos = np.array([[*EOS, -1, -1]], np.int32)
    context = Context(tokens, np.array([len(prefix)], np.int32), np.array([start], np.int32), eos)
    logits = np.array(logits, np.float32)[None, None]
    return np.asarray(function(logits, context, config.rows(1, logits.shape[-1]), config.mode))[
        0, 0
    ]


def test_numbers_of_hugging_face():
    """Written by transformers 5.23.0, from its own processors for each of the options."""
    prefix, logits, inf = [0, 2, 3, 2, 5, 3, 2], [1.5, -2, 3, -0.5, 0.25, 2], np.inf
    found = functools.partial(alone, process, logits, prefix)
    np.testing.assert_allclose(
        found(repetition_penalty=1.25), [1.2, -2, 2.4, -0.625, 0.25, 1.6], atol=1e-6
    )
    np.testing.assert_array_equal(found(no_repeat_ngram=3), [1.5, -2, 3, -0.5, 0.25, -inf])
    np.testing.assert_array_equal(found(no_repeat_ngram=2), [1.5, -2, 3, -inf, 0.25, -inf])
    probs = alone(
        distribution_of,
        logits,
        prefix,
        3,
        repetition_penalty=1.25,
        no_repeat_ngram=2,
        min_new_tokens=5,
        temperature=0.7,
        top_k=4,
        top_p=0.95,
        min_p=0.1,
    )
    np.testing.assert_allclose(probs, [0.1526, 0, 0.8474, 0, 0, 0], atol=1e-4)


def test_the_start_token_is_part_of_the_prefix():
    np.testing.assert_allclose(
        alone(process, [3.0, 2, 1], [0], repetition_penalty=2.0), [1.5, 2, 1]
    )
    assert np.isneginf(alone(process, [3.0, 2, 1], [0, 0], no_repeat_ngram=2)[0])
    assert np.isfinite(alone(process, [3.0, 2, 1], [0], no_repeat_ngram=2)).all()


def test_an_ngram_longer_than_the_buffer_changes_nothing():
    np.testing.assert_array_equal(
        alone(process, [3.0, 2, 1], [0, 0, 0, 0], no_repeat_ngram=S + 1), [3, 2, 1]
    )


def test_nan_of_a_processor_stays():
    """It must be noticed, not taken for a processor that leaves nothing."""
    for other in (0.0, jnp.inf):

        def processor(prefixes, lengths, logits):
            return logits.at[:, 1].set(jnp.nan).at[:, 2].set(other)  # noqa: B023

        assert np.isnan(alone(process, np.zeros(5, np.float32), [0, 1], processor=processor)[1])


NOTHING_LEFT = {
    "1-grams": dict(no_repeat_ngram=1),
    "minimum length of EOS ids alone": dict(min_new_tokens=9, forbidden_tokens=(0, 2, 3)),
    "own": dict(processor=lambda prefixes, lengths, logits: jnp.full_like(logits, -jnp.inf)),
}


@pytest.mark.parametrize("options", NOTHING_LEFT.values(), ids=NOTHING_LEFT)
def test_where_no_id_is_left_none_of_them_applies(options):
    logits = np.array([0.5, -1, 2, 0.25, 1.0], np.float32)
    np.testing.assert_array_equal(
        alone(process, logits, [0, 1, 2, 3, 4], logit_bias={0: 9.0}, **options), logits
    )
    if options is NOTHING_LEFT["1-grams"]:
        probs = alone(distribution_of, logits, [0, 1, 2, 3, 4], logit_bias={0: 9.0}, **options)
        np.testing.assert_allclose(probs, np.exp(logits) / np.exp(logits).sum(), atol=1e-6)


def test_forced_wins_over_forbidden_and_minimum_length():
    options = dict(forced_tokens={2: 4}, forbidden_tokens=(4,), min_new_tokens=9, no_repeat_ngram=1)
    np.testing.assert_array_equal(
        alone(process, [5.0, 1, 1, 1, 1], [0, 2, 2], **options),
        [-np.inf, -np.inf, -np.inf, -np.inf, 0],
    )


def test_min_p_comes_after_top_p_and_the_temperature():
    """Of (0.4, 0.3, 0.2, 0.1) p = 0.65 leaves two; 0.3 is 3/4 of the greatest."""

    def kept(**options):
        return np.count_nonzero(
            alone(distribution_of, np.log([0.4, 0.3, 0.2, 0.1]), [0], **options)
        )

    assert [kept(min_p=m) for m in (0.2, 0.3, 0.6, 0.74, 0.76, 1.0)] == [4, 3, 2, 2, 1, 1]
    assert kept(min_p=0.3, top_p=0.65) == 2 and kept(min_p=0.76, top_p=0.65) == 1
    assert kept(min_p=0.6, temperature=0.5) == 1 and kept(min_p=0.6, temperature=3.0) == 4


def test_processors_come_before_the_temperature():
    """Added after it, the bias would count half as much."""
    probs = alone(
        distribution_of,
        [2.0, 1.5, 0],
        [0],
        repetition_penalty=2.0,
        logit_bias={1: 1.0},
        temperature=0.5,
    )
    wanted = np.exp(np.array([1.0, 2.5, 0]) / 0.5)
    np.testing.assert_allclose(probs, wanted / wanted.sum(), atol=1e-6)


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 1e-6, 1e38])
def test_an_extreme_penalty_leaves_a_distribution(penalty):
    for logits in ([4.0, 3, -2, 1], [-4.0, -3, -2, -1], [-np.inf, 0, 1, -1]):
        probs = alone(distribution_of, logits, [0, 1, 2, 3], repetition_penalty=penalty)
        assert np.all(np.isfinite(probs)) and np.isclose(probs.sum(), 1)
        assert np.all(probs[np.isneginf(logits)] == 0)


def test_bfloat16_logits_are_cast_before_the_processors():
    logits, context = some_case(0)
    config = SamplingConfig(repetition_penalty=1.3, logit_bias={2: 0.01})
    rows, logits = config.rows(B, V), jnp.asarray(logits, jnp.bfloat16)
    found = process(logits, context, rows, config.mode)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(
        found, process(logits.astype(jnp.float32), context, rows, config.mode)
    )
    assert process(logits, context, rows, SamplingConfig().mode).dtype == jnp.bfloat16, (
        "nothing is on"
    )


def test_a_context_counts_from_its_rows_lengths():
    def as_ids(*values):
        return np.array(values, np.int32)

    context = Context(
        np.zeros((2, 9), np.int32), as_ids(2, 5), as_ids(1, 3), np.full((2, 1), -1, np.int32)
    )
    np.testing.assert_array_equal(context.prefix_lengths(3), [[2, 3, 4], [5, 6, 7]])
    places = jnp.array([[-1, 2, -1, 3], [0, -1, 1, -1]])
    forced = processors.force(jnp.zeros((2, 3, 4)), context, places)
    np.testing.assert_array_equal(jnp.sum(jnp.isneginf(forced), axis=-1), [[3, 0, 3], [3, 0, 0]])
    np.testing.assert_array_equal(jnp.argmax(forced, axis=-1), [[2, 0, 3], [1, 0, 0]])


def test_a_processor_of_the_wrong_shape_is_rejected():
    with pytest.raises(
        ValueError, match=r"processor: got logits of shape \(1, 2\), expected \(1, 3\)"
    ):
        alone(process, [3.0, 2, 1], [0], processor=lambda prefixes, lengths, logits: logits[:, :2])
