"""Sampling distributions against a sort in numpy, and draws over whole grids of uniforms."""

import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
import toy
from toy_models import HashModel

from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative import distributions, randomness
from specdec_jax.speculative.sampling import SamplingConfig, SamplingMode

LAST = np.float32(1 - 2**-24)  # the largest float32 below 1
draw = jax.jit(randomness.draw)


@functools.partial(jax.jit, static_argnames="mode")
def standardized(logits, rows, mode):
    dist = distributions.standardize(logits, None, rows, mode)
    return (
        dist.probs(),
        dist.row(jnp.zeros(logits.shape[0], jnp.int32)),
        dist.prob(jnp.zeros(logits.shape[:2], jnp.int32)),
    )


def probs_of(logits, **config):
    """`[B, T, V]` from the package."""
    config = SamplingConfig(**config)
    return np.asarray(
        standardized(np.asarray(logits), config.rows(*np.shape(logits)[::2]), config.mode)[0]
    )


def some_logits(rng, batch, vocab):
    """Continuous, tied, signed-zero and −inf logits."""
    logits = rng.normal(size=(batch, 2, vocab)).astype(np.float32) * 3
    logits[::3] = np.round(logits[::3])
    logits[1::4] *= np.where(rng.random(logits[1::4].shape) < 0.3, -0.0, 1).astype(np.float32)
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[..., 0] = 0.5
    return logits


@tiers.parametrize("vocab", [5, 130, 300], first=2)
@pytest.mark.parametrize("most", [64, None])
def test_every_filter_equals_a_sort(vocab, most):
    """Each row has its own temperature, top-k and top-p; 0 and 1 switch them off."""
    rng, batch = np.random.default_rng(vocab), 48
    logits = some_logits(rng, batch, vocab)
    temperature = rng.choice([0.0, 0.3, 1.0, 2.5], batch).astype(np.float32)
    some = (
        [0, 1, 2, 3, min(63, vocab), min(64, vocab)]
        if most
        else [0, 1, 2, 3, 63, vocab - 1, vocab, vocab + 7]
    )
    top_k = rng.choice(some, batch)
    # Thresholds that no mass of float32 sums meets by rounding.
    top_p = rng.choice([1.0, 0.05123, 0.51237, 0.90171, 0.99903], batch).astype(np.float32)
    for use_k, use_p in ((False, False), (True, False), (False, True), (True, True)):
        k, p = (top_k if use_k else np.zeros_like(top_k)), (top_p if use_p else np.ones_like(top_p))
        found = probs_of(
            logits, temperature=temperature.tolist(), top_k=k.tolist(), top_p=p.tolist()
        )
        expected = np.stack([toy.adjusted_probs(*row) for row in zip(logits, temperature, k, p)])
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_ties_with_the_last_kept_stay():
    tied = np.array([[[2.0, 1, 1, 1, 0]]], np.float32)
    assert np.count_nonzero(probs_of(tied, temperature=1.0, top_k=2)) == 4
    assert np.count_nonzero(probs_of(tied, temperature=1.0, top_k=1)) == 1
    assert np.count_nonzero(probs_of(tied, temperature=1.0, top_p=0.6)) == 4
    equal = np.zeros((1, 1, 8), np.float32)
    np.testing.assert_allclose(probs_of(equal, temperature=1.0, top_k=1, top_p=0.1), 1 / 8)


def test_top_p_comes_after_top_k():
    """Of (0.4, 0.3, 0.2, 0.1), k = 2 leaves (4/7, 3/7): p = 0.55 then keeps one id.

    Before top-k it would keep two.
    """
    logits = np.log(np.array([[[0.4, 0.3, 0.2, 0.1]]], np.float32))
    np.testing.assert_allclose(
        probs_of(logits, temperature=1.0, top_k=2, top_p=0.55)[0, 0], [1, 0, 0, 0]
    )
    assert np.count_nonzero(probs_of(logits, temperature=1.0, top_p=0.55)) == 2


def test_temperature_comes_first():
    logits = np.log(np.array([[[0.4, 0.3, 0.2, 0.1]]], np.float32))
    assert np.count_nonzero(probs_of(logits, temperature=0.1, top_p=0.9)) == 1
    assert np.count_nonzero(probs_of(logits, temperature=10.0, top_p=0.9)) == 4


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 2e-38, 1e-30, 1e-3])
def test_a_tiny_temperature_is_argmax_not_nan(temperature):
    found = probs_of(np.array([[[1.0, 12, -np.inf, 11.5]]], np.float32), temperature=temperature)
    np.testing.assert_array_equal(found, [[[0, 1, 0, 0]]])


def test_temperature_zero_is_one_hot_in_a_sampled_batch():
    """Ties go to the first id, as in `argmax`."""
    logits = np.array([[[1.0, 3, 3]], [[1.0, 3, 3]]], np.float32)
    found = probs_of(logits, temperature=[0.0, 1.0], top_k=2, top_p=0.9)
    np.testing.assert_array_equal(found[0, 0], [0, 1, 0])
    np.testing.assert_allclose(found[1, 0], [0, 0.5, 0.5], atol=1e-6)


def test_bfloat16_logits_are_cast_before_the_temperature():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 50)) * 4, jnp.bfloat16)
    config = dict(temperature=0.7, top_p=0.9)
    np.testing.assert_array_equal(
        probs_of(logits, **config), probs_of(logits.astype(jnp.float32), **config)
    )
    assert probs_of(logits, **config).dtype == np.float32


def test_distribution_gives_the_same_numbers_three_ways():
    logits = some_logits(np.random.default_rng(1), 4, 20)
    config = SamplingConfig(temperature=0.8, top_k=7)
    probs, row, prob = standardized(logits, config.rows(4, 20), config.mode)
    np.testing.assert_array_equal(row, probs[:, 0])
    np.testing.assert_array_equal(prob, probs[..., 0])


def test_argmax_takes_the_first_of_equals():
    logits = np.array([[0.0, 2, 2], [-np.inf, -np.inf, -1], [-0.0, 0.0, -1], [5, 1, 5]], np.float32)
    np.testing.assert_array_equal(distributions.argmax(jnp.asarray(logits)), [1, 2, 0, 0])


def test_argmax_of_what_is_no_number():
    logits = np.array(
        [[0, np.nan, 2], [np.nan] * 3, [np.inf, np.nan, 0], [0, np.inf, 1]], np.float32
    )
    np.testing.assert_array_equal(distributions.argmax(jnp.asarray(logits)), [-1, -1, -1, 1])


@hypothesis.given(st.integers(0, 2**32 - 1))
def test_distributions_and_draws_are_sound(seed):
    """Any finite logit gives a distribution, on finite logits only, and possible draws."""
    rng, batch, vocab = np.random.default_rng(seed), 8, 11
    logits = some_logits(rng, batch, vocab) * np.float32(10.0 ** rng.integers(-3, 4))
    config = SamplingConfig(
        temperature=rng.choice([0, 1e-6, 0.1, 1, 50], batch).tolist(),
        top_k=[*rng.integers(0, vocab + 2, batch - 1), 3],
        top_p=[*(1 - rng.random(batch - 1)), 0.5],
    )
    probs = np.asarray(standardized(logits, config.rows(batch, vocab), config.mode)[0])
    assert np.all((probs >= 0) & (probs <= 1 + 1e-6))
    assert np.all(probs[np.isneginf(logits)] == 0)
    np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=1e-5)
    best = np.take_along_axis(probs, np.argmax(logits, axis=-1)[..., None], axis=-1)[..., 0]
    assert np.all(best >= probs.max(axis=-1) - 1e-6)
    ids = np.asarray(draw(probs[:, 0], toy.random_bits(rng.choice([0, 0.3, LAST], batch))))
    assert np.all(np.take_along_axis(probs[:, 0], ids[:, None], axis=1) > 0)


@pytest.mark.parametrize("filters", [{}, dict(top_k=3), dict(top_p=0.99), dict(min_p=0.1)], ids=str)
def test_the_greatest_and_the_least_temperatures(filters):
    """Ids of probability 0 keep it.

    XLA multiplies with 1 / T, which from 8.5e37 up is 0, and −∞ · 0 is NaN.
    """
    logits = np.array([[[1.0, 2.0, 3.0, -np.inf]]], np.float32)
    for temperature in (8e37, 9e37, 1e38, np.finfo(np.float32).max):
        np.testing.assert_allclose(
            probs_of(logits, temperature=temperature, **filters), [[[1 / 3] * 3 + [0]]]
        )
    for temperature in (1.2e-38, 1e-40, 1e-45, 1e-300):
        np.testing.assert_array_equal(
            probs_of(logits, temperature=temperature, **filters), [[[0, 0, 1, 0]]]
        )


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["block", "gumbel"])
def test_a_token_is_forced_at_the_greatest_temperature(verifier):
    sampling = SamplingConfig(temperature=3.4e38, forced_tokens={0: 6}, forbidden_tokens=(2, 3))
    target, drafter = HashModel(12), ModelDrafter(HashModel(12, 1))
    for own in (drafter, None):
        result = generate(
            target, [[3, 1]], drafter=own, gamma=2, verifier=verifier, sampling=sampling
        )
        assert result.tokens[0, 0] == 6 and not {2, 3} & set(
            result.tokens[0, : result.lengths[0]].tolist()
        )
        np.testing.assert_allclose(
            result.adjusted_log_probs[0, 1 : result.lengths[0]], -np.log(10), atol=1e-5
        )


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(temperature=-0.1), "temperature: got -0.1, expected a finite number of at least 0"),
        (dict(temperature=float("nan")), "temperature: got nan"),
        (dict(temperature=[0.5, float("inf")]), "temperature: got inf"),
        (dict(temperature=1e39), "temperature: got 1e[+]39"),
        (dict(top_k=-1), "top_k: got -1, expected an integer of at least 0"),
        (dict(top_k=2.5), "top_k: got 2.5"),
        (dict(top_k=float("nan")), "top_k: got nan"),
        (dict(top_k=float("inf")), "top_k: got inf"),
        (dict(top_p=0.0), r"top_p: got 0.0, expected a number in \(0, 1\]"),
        (dict(top_p=1.01), "top_p: got 1.01"),
        (dict(top_p=float("nan")), "top_p: got nan"),
        (dict(temperature="hot"), "temperature: got 'hot', expected a finite number"),
        (dict(temperature=None), "temperature: got None"),
        (dict(min_p=-0.1), r"min_p: got -0.1, expected a number in \[0, 1\]"),
        (dict(min_p=1.5), "min_p: got 1.5"),
        (
            dict(repetition_penalty=0.0),
            "repetition_penalty: got 0.0, expected a finite number above 0",
        ),
        (dict(repetition_penalty=float("inf")), "repetition_penalty: got inf"),
        (dict(no_repeat_ngram=-1), "no_repeat_ngram: got -1, expected an integer of at least 0"),
        (dict(no_repeat_ngram=1.5), "no_repeat_ngram: got 1.5"),
        (dict(min_new_tokens=-1), "min_new_tokens: got -1, expected an integer of at least 0"),
        (
            dict(logit_bias={3: float("nan")}),
            "logit_bias: got nan for id 3, expected a finite number",
        ),
        (dict(logit_bias={3: float("-inf")}), "logit_bias: got -inf for id 3"),
        (dict(logit_bias={3: "much"}), "logit_bias: got 'much' for id 3"),
        (dict(forced_tokens=[]), r"forced_tokens: got \[\], expected a dictionary, or one per"),
        (dict(forced_tokens={-1: 3}), "forced_tokens: got place -1, expected an integer from 0"),
        (dict(forced_tokens={0.5: 3}), "forced_tokens: got place 0.5"),
        (dict(forced_tokens={2**20: 3}), "forced_tokens: got place 1048576"),
        (
            dict(processor=3),
            r"processor: got 3, expected a function of \(prefixes, lengths, logits\)",
        ),
        (
            dict(processor=lambda logits: logits),
            r"processor: got a function of \(logits\), expected a function of \(prefixes, len",
        ),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)),  # the same in every process
)
def test_bad_configurations_are_rejected(config, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**config)


def test_one_value_or_one_per_input():
    rows = SamplingConfig(temperature=[0.1, 0.2], top_p=0.5).rows(2, 5)
    np.testing.assert_allclose(rows.temperature, [0.1, 0.2])
    np.testing.assert_allclose(rows.top_p, [0.5, 0.5])
    with pytest.raises(ValueError, match="temperature: got 2 values, expected one or 3"):
        SamplingConfig(temperature=[0.1, 0.2]).rows(3, 5)


def test_mode_is_what_is_on():
    assert SamplingConfig().mode == SamplingMode()
    mixed = SamplingConfig(temperature=[0, 1], top_k=[0, 3], top_p=[1, 0.5], min_p=[0, 0.1])
    assert mixed.mode == SamplingMode(greedy=False, top_k=True, top_p=True, min_p=True)
    neutral = dict(
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=[1, 1.0],
        no_repeat_ngram=0,
        min_new_tokens=0,
    )
    empty = dict(
        logit_bias={}, forbidden_tokens=(), vocabulary_mask=None, forced_tokens={}, processor=None
    )
    assert SamplingConfig(temperature=1.0, **neutral, **empty).mode == SamplingMode(greedy=False)

    def one(**option):
        return SamplingConfig(**option).mode

    assert one(repetition_penalty=[1, 1.1]) == SamplingMode(repetition=True)
    assert one(no_repeat_ngram=3) == SamplingMode(ngram=3)
    assert one(min_new_tokens=[0, 2]) == SamplingMode(min_length=True)
    for table in (
        dict(logit_bias={0: 0.0}),
        dict(forbidden_tokens=[0]),
        dict(vocabulary_mask=[True]),
    ):
        assert one(**table) == SamplingMode(bias=True), "an id 0 counts"
    assert one(forced_tokens={0: 0}) == SamplingMode(forced=True)
    assert one(processor=max) == SamplingMode(processor=max)


def test_tables_over_the_vocabulary():
    config = SamplingConfig(
        logit_bias={0: 1.5, 3: -2},
        forbidden_tokens=(1, 3),
        vocabulary_mask=[True, True, True, True, False],
    )
    np.testing.assert_array_equal(config.rows(2, 5).bias, [1.5, -np.inf, 0, -np.inf, -np.inf])
    forced = SamplingConfig(forced_tokens={0: 4, 8: 0}).rows(2, 5).forced
    np.testing.assert_array_equal(forced, [[4] + [-1] * 7 + [0] + [-1] * 7] * 2)
    forced = SamplingConfig(forced_tokens=[{1: 4}, {}]).rows(2, 5).forced
    np.testing.assert_array_equal(forced, [[-1, 4] + [-1] * 6, [-1] * 8])
    with pytest.raises(ValueError, match="forced_tokens: got 2 values, expected one or 3"):
        SamplingConfig(forced_tokens=[{1: 4}, {}]).rows(3, 5)
    assert SamplingConfig().rows(1, 5).bias is None and SamplingConfig().rows(1, 5).forced is None


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(logit_bias={5: 1.0}), "logit_bias: got id 5, expected one from 0 to 4"),
        (dict(forbidden_tokens=[-1]), "forbidden_tokens: got id -1"),
        (dict(forbidden_tokens=[1.5]), "forbidden_tokens: got id 1.5"),
        (dict(forced_tokens={0: 5}), "forced_tokens: got id 5"),
        (dict(forced_tokens={0: 1.5}), "forced_tokens: got id 1.5"),
        (
            dict(vocabulary_mask=[True] * 4),
            r"vocabulary_mask: got shape \(4,\) and type bool, expected \(5,\) and bool",
        ),
        (dict(vocabulary_mask=[1] * 5), "vocabulary_mask: got shape .5,. and type int64"),
        (dict(vocabulary_mask=[False] * 5), "got all 5 ids forbidden, expected at least one"),
        (dict(forbidden_tokens=range(5)), "got all 5 ids forbidden"),
        (dict(min_p=[0.1, 0.2, 0.3]), "min_p: got 3 values, expected one or 2"),
        (dict(repetition_penalty=[2.0]), "repetition_penalty: got 1 values, expected one or 2"),
        (dict(min_new_tokens=[1, 2, 3]), "min_new_tokens: got 3 values"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_batch_or_the_vocabulary_is_rejected(config, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**config).rows(2, 5)
