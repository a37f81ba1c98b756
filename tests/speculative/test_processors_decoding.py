"""Processors in the decode loop, greedy and sampled; mutants; several samples of an input."""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import tiers
import toy
import toy_processors
from toy_models import HashModel, HashNetwork, tiny_t5
from toy_options import (
    ALL,
    DRAFT,
    EOS,
    FILTERS,
    GAMMA,
    INPUTS,
    LIMIT,
    PREFIXES,
    PROCESSORS,
    QUIET,
    TARGET,
    B,
    V,
    assert_log_probs,
    decode,
    ids_of,
    of_row,
    raw_logits,
    slow_greedy,
)

from specdec_jax.decoding.generate import generate, prepare
from specdec_jax.decoding.results import finish
from specdec_jax.drafters import drafting
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative import iteration
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")

# --- Greedy identity under each processor, and mutants that the test catches ---


@tiers.parametrize("name", PROCESSORS, first=7)
def test_greedy_plain_and_speculative_equal_the_slow_version(name):
    config, wanted = (
        SamplingConfig(**PROCESSORS[name]),
        [slow_greedy(r, of_row(PROCESSORS[name], r)) for r in range(B)],
    )
    fewer = {"logit_bias": QUIET} if PROCESSORS[name].get("logit_bias") is QUIET else {}
    assert sum(ids != slow_greedy(row, fewer) for row, ids in enumerate(wanted)) >= 3, (
        "the processor matters"
    )
    for speculative in (False, True):
        result = decode(config, speculative)
        assert ids_of(result) == wanted
        assert not result.adjusted_log_probs.any(), "the distribution is one-hot"
        for row, ids in enumerate(wanted):
            logits = raw_logits(TARGET, row, [0, *PREFIXES[row], *ids])[len(PREFIXES[row]) : -1]
            own = np.log(toy.adjusted_probs(logits))[np.arange(len(ids)), ids]
            np.testing.assert_allclose(result.log_probs[row, : len(ids)], own, atol=1e-5)
    assert result.stats.acceptance_rate < 0.95 and result.stats.accepted > 0, (
        "or nothing is rejected"
    )


def carried(state, tokens=None, ahead=0):
    """Is a mutant: what the last iteration drafted counts as output, accepted or not."""
    real, gamma = CONTEXT(state, tokens, ahead), state.last_draft.shape[1]
    return Context(
        jnp.concatenate([state.last_draft, real.tokens], axis=1),
        real.lengths + gamma,
        real.starts + gamma,
        real.eos_ids,
    )


class Committed(Context):
    """A mutant: all positions of an iteration see the committed prefix only."""

    def prefix_lengths(self, positions):
        return jnp.broadcast_to(self.lengths[:, None], (len(self.lengths), positions))


class Unverified(Context):
    """A mutant: all positions of an iteration see its whole draft."""

    def prefix_lengths(self, positions):
        return jnp.broadcast_to(
            self.lengths[:, None] + positions - 1, (len(self.lengths), positions)
        )


CONTEXT = iteration.make_prefixes
MUTANTS = {
    "none": CONTEXT,
    "carried": carried,
    "committed": lambda *args: Committed(*CONTEXT(*args)),
    "unverified": lambda *args: Unverified(*CONTEXT(*args)),
}


def decode_with(mutant, monkeypatch, target, inputs, drafter, **options):
    """`generate` with another `make_prefixes`, compiled anew."""
    for module in (iteration, drafting):
        monkeypatch.setattr(module, "make_prefixes", mutant)

    @jax.jit
    def loop(network, drafter, state):
        def body(state):
            return iteration.ChainDecoding().iterate(network, drafter, state)

        return jax.lax.while_loop(lambda state: ~jnp.all(state.done), body, state)

    state, request = prepare(target, inputs, drafter=drafter, **options)
    return finish(target, loop(target.network, request.drafter, state), request)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_greedy_identity_catches_prefixes_that_are_not_the_committed_ones(name, monkeypatch):
    """PITFALLS row 22."""
    options = PROCESSORS["repetition"]
    result = decode_with(
        MUTANTS[name],
        monkeypatch,
        TARGET,
        INPUTS,
        ModelDrafter(DRAFT),
        sampling=SamplingConfig(**options),
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        eos_ids=EOS,
        gamma=GAMMA,
    )
    same = ids_of(result) == [slow_greedy(row, of_row(options, row)) for row in range(B)]
    assert same == (name == "none")


# --- Sampled ---


@tiers.parametrize("name", ["repetition", "n-grams", "own", "all"], first=1)
def test_gumbel_plain_and_speculative_are_the_same_tokens(name):
    """Also: both kinds of log-probabilities against a teacher-forced numpy computation."""
    filters = FILTERS if name == "all" else {"temperature": 1.1}
    config = SamplingConfig(**filters, **PROCESSORS[name])
    plain, result = (
        decode(config, speculative, verifier="gumbel") for speculative in (False, True)
    )
    assert ids_of(plain) == ids_of(result)
    np.testing.assert_allclose(plain.adjusted_log_probs, result.adjusted_log_probs, atol=1e-5)
    np.testing.assert_allclose(plain.log_probs, result.log_probs, atol=1e-5)
    assert 0 < result.stats.accepted and result.stats.acceptance_rate < 0.95
    assert_log_probs(result, PROCESSORS[name], filters)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "plain"])
def test_log_probabilities_of_samples_are_those_of_a_slow_computation(verifier):
    """All processors and filters, rows of several lengths and ends."""
    options = {} if verifier == "plain" else {"verifier": verifier}
    result = decode(ALL, verifier != "plain", key=jax.random.key(2), **options)
    assert_log_probs(result, PROCESSORS["all"])
    assert len(set(result.lengths.tolist())) > 1 and (
        verifier == "plain" or result.stats.accepted > 0
    )


# --- The joint distribution, and several samples of one input ---

SMALL, DRAWS = 5, 4000
SMALL_TARGET, SMALL_DRAFT = (
    HashModel(SMALL, 0, spread=2.5),
    HashModel(SMALL, 1, spread=2.5, likeness=0.3),
)
SMALL_OPTIONS = dict(
    repetition_penalty=2.0, no_repeat_ngram=2, min_new_tokens=1, logit_bias={4: 0.7}, min_p=0.05
)


def small_distribution(prefix) -> np.ndarray:
    """The target's processed distribution `[5]` after new ids `prefix`, in numpy."""
    tokens = [0, *prefix]
    logits = SMALL_TARGET.logits([[2, 3]], [tokens], [2])[0, -1]
    return toy_processors.dist(
        logits, tokens, new=len(prefix), eos_ids=(1,), temperature=1.2, **SMALL_OPTIONS
    )


def significance(sequences, dist: dict, draws: int) -> float:
    """Returns the p-value of a G-test; 0 where something impossible was drawn.

    Cells with fewer than 5 expected are one.
    """
    counts = dict.fromkeys(dist, 0)
    for sequence in sequences:
        if sequence not in counts:
            return 0.0
        counts[sequence] += 1
    cells = [(counts[key], draws * prob) for key, prob in dist.items() if draws * prob >= 5]
    rest = np.sum(
        [(counts[key], draws * prob) for key, prob in dist.items() if draws * prob < 5] or [(0, 0)],
        axis=0,
    )
    observed, expected = np.array([*cells, rest] if rest[1] > 0 else cells).T
    g = 2 * np.sum(scipy.special.xlogy(observed, observed / expected))
    return scipy.stats.chi2.sf(g, len(observed) - 1)


def small_samples(function, key: int, **options):
    result = function(
        SMALL_TARGET,
        [[2, 3]],
        drafter=ModelDrafter(SMALL_DRAFT),
        gamma=2,
        num_samples=DRAWS,
        max_new_tokens=3,
        sampling=SamplingConfig(temperature=1.2, **SMALL_OPTIONS),
        key=jax.random.key(key),
        eos_ids=(1,),
        **options,
    )
    return [tuple(row) for row in ids_of(result)]


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["token", "block", "gumbel"])
def test_samples_of_one_input_follow_the_processed_distribution(verifier):
    """Joint distribution of three positions under processors; neighbours are independent."""
    dist = toy.complete({(): 1.0}, small_distribution, 3, {1})
    dist = {key: prob for key, prob in dist.items() if prob}
    assert len(dist) > 30
    samples = small_samples(generate, 0, verifier=verifier)
    assert significance(samples, dist, DRAWS) > 1e-9
    first = small_distribution(())
    pairs = {
        (x, y): first[x] * first[y]
        for x in range(SMALL)
        for y in range(SMALL)
        if first[x] * first[y]
    }
    found = [(a[0], b[0]) for a, b in zip(samples[::2], samples[1::2])]
    assert significance(found, pairs, len(found)) > 1e-9
    assert significance(found, dict.fromkeys(pairs, 1 / len(pairs)), len(found)) < 1e-9, (
        "a wrong distribution is seen"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["carried", "unverified"])
def test_the_joint_distribution_catches_prefixes_that_are_not_the_committed_ones(name, monkeypatch):
    dist = toy.complete({(): 1.0}, small_distribution, 3, {1})
    dist = {key: prob for key, prob in dist.items() if prob}
    found = small_samples(functools.partial(decode_with, MUTANTS[name], monkeypatch), 0)
    assert significance(found, dist, DRAWS) < 1e-9


def test_processed_distributions_are_preserved():
    """Repetition and n-grams make both distributions depend on the whole prefix.

    They are enumerated in float64.
    """

    def under(dist):
        def adjusted(prefix):
            logits = np.log(dist(prefix))
            return toy_processors.dist(
                logits, [0, *prefix], new=len(prefix), eos_ids=(1,), **options
            )

        return functools.cache(adjusted)

    for options in (
        dict(repetition_penalty=2.0, no_repeat_ngram=2),
        dict(min_new_tokens=2, forced_tokens={1: 2}, min_p=0.1),
    ):
        target, draft = under(toy.table_distribution(3, 0)), under(toy.table_distribution(3, 1))
        for gamma in (1, 2, 3):
            found = toy.speculative_distribution(target, draft, gamma, 4, {1})
            assert toy.total_variation(found, toy.complete({(): 1.0}, target, 4, {1})) < 1e-12


SEEN: list[tuple[int, ...]] = []


@flax.struct.dataclass
class Counting(HashNetwork):
    """Writes down the inputs that it is given to encode, when its prefill is traced."""

    def prefill(self, inputs, input_lengths, slots, copies=1):
        SEEN.append((inputs.shape[0], copies))
        return super().prefill(inputs, input_lengths, slots, copies)


def test_samples_share_the_encoder_and_nothing_else():
    models = [HashModel(V, seed, likeness=0.4) for seed in (0, 1)]
    for model in models:
        model.network = Counting(model.dist)
    options = dict(
        drafter=ModelDrafter(models[1]),
        sampling=SamplingConfig(temperature=1.0, repetition_penalty=1.2),
        max_new_tokens=8,
        eos_ids=(),
    )
    SEEN.clear()
    keys = jax.random.split(jax.random.key(5), 2)
    many = generate(
        models[0],
        INPUTS[:2],
        num_samples=3,
        gamma=[3, 1],
        key=keys,
        decoder_prefix=[[4, 4], []],
        **options,
    )
    assert SEEN == [(2, 3), (2, 3)], "both models encode two inputs for six rows"
    assert many.tokens.shape == (6, 8) and len(many.finish_reasons) == 6
    one = generate(
        models[0], INPUTS[:2], gamma=[3, 1], key=keys, decoder_prefix=[[4, 4], []], **options
    )
    assert ids_of(one) == ids_of(many)[::3], "the first sample is the one that is had alone"
    alone = generate(
        models[0],
        INPUTS[:1],
        num_samples=2,
        gamma=3,
        key=keys[:1],
        decoder_prefix=[[4, 4]],
        **options,
    )
    assert ids_of(alone) == ids_of(many)[:2], (
        "neither the number of samples nor the other inputs matter"
    )
    assert len({tuple(ids) for ids in ids_of(many)}) == 6
    np.testing.assert_array_equal(
        [stats.drafted > stats.target_calls for stats in many.stats.per_row], [1, 1, 1, 0, 0, 0]
    )


@pytest.mark.slow
def test_samples_of_a_t5_are_those_of_repeated_inputs():
    target, draft = (tiny_t5(seed, V, decoder_layers=1) for seed in (0, 1))
    options = dict(
        drafter=ModelDrafter(draft),
        gamma=2,
        sampling=SamplingConfig(temperature=1.0),
        max_new_tokens=6,
    )
    state, _ = prepare(target, INPUTS[:2], num_samples=2, **options)
    samples = generate(target, INPUTS[:2], num_samples=2, **options)
    repeated = generate(target, [INPUTS[0]] * 2 + [INPUTS[1]] * 2, key=state.keys, **options)
    assert ids_of(samples) == ids_of(repeated)
    np.testing.assert_allclose(samples.log_probs, repeated.log_probs, atol=1e-5)
