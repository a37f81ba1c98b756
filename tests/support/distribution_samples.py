"""Samples decodes on the production random path and compares their distribution by G-tests."""

import contextlib

import jax
import numpy as np
import scipy.stats
import toy
from toy_models import HashModel

from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.models.network import is_decoder_only
from specdec_jax.speculative.sampling import SamplingConfig

V, POSITIONS, EOS, GAMMA = 16, 3, 5, 2
DRAWS, ROWS = 200_000, 20_000
FALSE_ALARM, POWER, DEVIATION = 1e-9, 0.999, 0.07
INPUTS = [3, 7, 1]


def joint_distribution(model, config: SamplingConfig) -> np.ndarray:
    """Returns `[V³]` float64, the probabilities of the first three ids.

    They are teacher-forced over all prefixes, and 0 after an EOS.
    """
    pairs = np.stack(np.meshgrid(np.arange(V), np.arange(V), indexing="ij"), axis=-1).reshape(-1, 2)
    inputs, first = (
        (INPUTS[:-1], INPUTS[-1]) if is_decoder_only(model) else (INPUTS, model.start_token)
    )
    decoder = np.concatenate([np.full((len(pairs), 1), first), pairs], axis=1)
    logits = np.asarray(
        model.logits(np.tile(inputs, (len(pairs), 1)), decoder, np.full(len(pairs), len(inputs)))
    )
    probs = toy.adjusted_probs(logits, config.temperature, config.top_k, config.top_p)
    first, second, third = probs[0, 0], probs[::V, 1], probs[:, 2].reshape(V, V, V)
    joint = first[:, None, None] * second[:, :, None] * third
    after = np.zeros((V, V, V))
    after[:, :, 0] = joint.sum(axis=2)  # what follows an EOS is written as 0
    joint[:, EOS] = after[:, EOS]
    joint[EOS] = 0
    joint[EOS, 0, 0] = first[EOS]
    return joint.ravel()


def g_test(counts: np.ndarray, probs: np.ndarray) -> float:
    """Returns the p-value of `counts` under `probs`, with Williams's correction.

    Cells that expect fewer than 20 are merged.
    """
    assert counts[probs == 0].sum() == 0, "drawn although its probability is 0"
    draws = counts.sum()
    small = probs * draws < 20
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(probs[~small], probs[small].sum()) * draws
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    freedom = len(observed) - 1
    seen = observed > 0
    statistic = 2 * np.sum(observed[seen] * np.log(observed[seen] / expected[seen]))
    correction = 1 + (np.sum(draws / expected) - 1) / (6 * draws * freedom)
    return float(scipy.stats.chi2.sf(statistic / correction, freedom))


def sample(
    target, drafter, config, draws: int, run=advance, impl="threefry2x32", empty=0, **options
):
    """Returns joint counts `[V³]` over `draws` rows in batches, and statistics.

    Each row has its own key. The first `empty` rows of each batch have no input, are done from the
    beginning, and do not count.
    """
    counts, stats, options = (
        np.zeros(V**POSITIONS),
        [],
        {"verifier": "token", "gamma": GAMMA} | options,
    )
    for start in range(0, draws, ROWS):
        key = jax.random.fold_in(jax.random.key(0, impl=impl), start)
        state, request = prepare(
            target,
            np.tile(INPUTS, (ROWS, 1)),
            input_lengths=np.where(np.arange(ROWS) < empty, 0, 3),
            drafter=drafter,
            sampling=config,
            max_new_tokens=POSITIONS,
            eos_ids=[EOS],
            key=key,
            **options,
        )
        with optimised():
            state = run(target.network, request.drafter, state, np.int32(99))
        first = int(request.prefix_lengths[0])
        tokens, counted = jax.device_get((state.tokens[:, first : first + POSITIONS], state.counts))
        valid = np.arange(POSITIONS) < np.asarray(state.lengths)[:, None] - first
        tokens = np.where(valid, tokens, 0)[empty:]
        counts += np.bincount(tokens @ np.array([V * V, V, 1]), minlength=V**POSITIONS)
        stats.append(
            [counted.examined_by_position.sum(axis=0), counted.accepted_by_position.sum(axis=0)]
        )
    return counts, np.sum(stats, axis=0)


@contextlib.contextmanager
def optimised():
    """Compiles as users' programs are, which pays for so many rows, in a file of `quick` ones."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def hash_pair():
    return HashModel(V, 0, spread=3.0), HashModel(V, 1, spread=3.0, likeness=0.3)


def traced_anew():
    """Returns `advance`, to be compiled with the functions that the modules hold now."""
    return jax.jit(lambda *args: advance.__wrapped__(*args))


SPREAD = SamplingConfig(temperature=1.0)
