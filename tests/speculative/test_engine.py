"""The engine on tiny random T5s commits the target's tokens, whatever the options."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from engine_inputs import GAMMA, INPUTS, LIMIT, V, cut
from engine_models import KEY, SAMPLED, plain, run, target
from toy_models import teacher_forced_greedy

from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")


def teacher_forced_log_probs(result, inputs=INPUTS, prefixes=None):
    """Returns log-probabilities of a result's tokens from one teacher-forced pass.

    They are zero past each row's length.
    """
    padded = np.zeros((len(inputs), 8), np.int32)
    for row, ids in enumerate(inputs):
        padded[row, : len(ids)] = ids
    prefixes = prefixes or [[]] * len(inputs)
    decoder = np.zeros((len(inputs), 17), np.int32)
    for row, prefix in enumerate(prefixes):
        whole = [0, *prefix, *result.tokens[row, : result.lengths[row]]]
        decoder[row, : len(whole)] = whole
    logits = np.asarray(
        target().logits(padded, decoder[:, :16], [len(ids) for ids in inputs]), np.float64
    )
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    found = np.zeros_like(result.log_probs)
    for row, prefix in enumerate(prefixes):
        for i in range(result.lengths[row]):
            found[row, i] = log_probs[row, len(prefix) + i, decoder[row, len(prefix) + i + 1]]
    return found


# --- Token identity ---


def test_plain_decoding_equals_the_slow_reference():
    tokens, log_probs = plain()
    assert len({tuple(row) for row in tokens}) >= 5, "the toy must not say the same to everything"
    for row, ids in enumerate(INPUTS):
        expected_tokens, expected_log_probs = teacher_forced_greedy(target(), ids, LIMIT)
        assert tokens[row].tolist() == expected_tokens
        np.testing.assert_allclose(log_probs[row], expected_log_probs, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("gamma", [1, 3, pytest.param(5, marks=pytest.mark.slow), 8])
def test_greedy_speculative_equals_greedy_plain(gamma, batch):
    """Also: a drafter equal to the target is always right, which a hole in its cache would end."""
    tokens, log_probs = plain(batch)
    inputs = INPUTS if batch == 8 else INPUTS[2:3]
    rows = slice(None) if batch == 8 else slice(2, 3)
    rates = {}
    for name in ("self", "noisy copy", "unrelated"):
        result = run(inputs, drafter=name, gamma=gamma)
        np.testing.assert_array_equal(result.tokens, tokens[rows])
        np.testing.assert_allclose(result.log_probs, log_probs[rows], atol=1e-4)
        rates[name] = result.stats.acceptance_rate
        if name == "self":
            assert result.stats.target_calls == len(inputs) * -(-LIMIT // (gamma + 1))
    assert rates["self"] == 1.0
    if batch == 8:
        assert rates["unrelated"] < 0.9 and rates["noisy copy"] < 1.0, (
            "or rejections are not tested"
        )
        assert rates["noisy copy"] > rates["unrelated"]


AS_USERS = """
import numpy as np
from engine_models import plain, run

found, (tokens, log_probs) = run(drafter="noisy copy", gamma=3), plain()
np.testing.assert_array_equal(found.tokens, tokens)
np.testing.assert_allclose(found.log_probs, log_probs, atol=1e-4)
"""


@pytest.mark.slow
def test_greedy_identity_as_users_programs_are_compiled():
    """Runs in a process with optimisations whose kernels differ between one row and several."""
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", AS_USERS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_log_probs_are_the_targets_own():
    """Log-probabilities are those at temperature 1 without filters, whatever the sampling."""
    config = SamplingConfig(temperature=0.7)
    for result in (run(drafter="noisy copy"), run(drafter="noisy copy", sampling=config, key=KEY)):
        np.testing.assert_allclose(result.log_probs, teacher_forced_log_probs(result), atol=1e-4)


# --- Rows ---


@pytest.mark.parametrize("config", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_rows_do_not_depend_on_their_mates(config):
    """A row alone, with the key it had, and rows in another order give the same."""
    together = run(drafter="noisy copy", sampling=config, key=KEY)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, np.arange(len(INPUTS)))
    order = np.array([3, 7, 1, 0, 6, 2, 5, 4])
    turned = run([INPUTS[i] for i in order], drafter="noisy copy", sampling=config, key=keys[order])
    np.testing.assert_array_equal(turned.tokens, together.tokens[order])
    for row in (0, 2, 6):
        alone = run(
            INPUTS[row : row + 1], drafter="noisy copy", sampling=config, key=keys[row : row + 1]
        )
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.log_probs[0], together.log_probs[row], atol=1e-4)
        assert alone.stats.per_row[0].accepted == together.stats.per_row[row].accepted
    again = run(
        drafter="noisy copy", sampling=config, key=keys
    )  # one key, or the keys made from it: the same
    np.testing.assert_array_equal(again.tokens, together.tokens)
    assert not keys.is_deleted()


def test_rows_do_not_depend_on_padding():
    """A longer mate makes all inputs' padding longer."""
    tokens, _ = plain()
    result = run([*INPUTS[:7], [4, 8] * 6], drafter="noisy copy")
    np.testing.assert_array_equal(result.tokens[:7], tokens[:7])
    array = np.full((8, 11), 17, np.int32)  # ids past a row's length do not matter
    for row, ids in enumerate(INPUTS):
        array[row, : len(ids)] = ids
    result = run(array, input_lengths=[len(ids) for ids in INPUTS], drafter="noisy copy")
    np.testing.assert_array_equal(result.tokens, tokens)


def test_other_keys_give_other_samples():
    first, second = (
        run(drafter="noisy copy", sampling=SAMPLED, key=jax.random.key(seed)) for seed in (0, 1)
    )
    assert np.any(first.tokens != second.tokens)
    unset = run(drafter="noisy copy", sampling=SAMPLED)
    np.testing.assert_array_equal(unset.tokens, first.tokens)


def test_temperature_zero_in_a_sampled_batch_is_the_greedy_path():
    temperature = [0.0, 1.0, 0.0, 0.5, 0.0, 2.0, 0.0, 0.0]
    result = run(drafter="noisy copy", sampling=SamplingConfig(temperature=temperature), key=KEY)
    cold = np.equal(temperature, 0)
    np.testing.assert_array_equal(result.tokens[cold], plain()[0][cold])
    assert np.all(np.any(result.tokens[~cold] != plain()[0][~cold], axis=1))


# --- Limits and EOS ---


def test_limits_of_every_length():
    """1, γ, γ + 1, γ + 2, … in one batch: a row stops exactly there, and what follows is 0."""
    limits = [1, 2, GAMMA, GAMMA + 1, GAMMA + 2, 2 * GAMMA + 2, 2 * GAMMA + 3, LIMIT]
    for name in ("none", "self", "noisy copy"):
        result = run(drafter=name, max_new_tokens=limits)
        np.testing.assert_array_equal(result.lengths, limits)
        valid = np.arange(LIMIT) < np.array(limits)[:, None]
        np.testing.assert_array_equal(result.tokens, np.where(valid, plain()[0], 0))
        np.testing.assert_allclose(result.log_probs, np.where(valid, plain()[1], 0), atol=1e-4)


def test_one_new_token_examines_nothing():
    result = run(drafter="self", max_new_tokens=1)
    assert result.tokens.shape == (8, 1)
    assert (
        result.stats.acceptance_rate is None
        and result.stats.drafted == 0
        and result.stats.target_calls == 8
    )


@pytest.mark.parametrize("name", ["none", "self", "noisy copy"])
def test_every_id_as_eos(name):
    """With each id as EOS, it falls on drafts, corrections and bonus tokens."""
    hits = 0
    several = [(5, 3), tuple(plain()[0][0, [9, 6, 4, 1]])]  # those that come first stand last
    for eos in [(token,) for token in range(V)] + several:
        expected, lengths = cut(plain()[0], eos)
        result = run(drafter=name, eos_ids=eos)
        np.testing.assert_array_equal(result.tokens, expected)
        np.testing.assert_array_equal(result.lengths, lengths)
        assert np.all((result.log_probs != 0) == (np.arange(LIMIT) < lengths[:, None]))
        hits += np.sum(lengths < LIMIT)
        if name == "self" and result.stats.acceptance_rate is not None:
            assert result.stats.acceptance_rate == 1.0
    assert hits > 20


def test_id_0_may_be_an_eos():
    """The outputs above hardly have it; here it is made likely. Row 8 of the pitfalls."""
    likely = SamplingConfig(logit_bias={0: 3.0})
    expected, lengths = cut(run(sampling=likely).tokens, (0,))
    assert np.sum((1 < lengths) & (lengths < LIMIT)) > 2
    for name in ("none", "noisy copy"):
        result = run(drafter=name, sampling=likely, eos_ids=(0,))
        np.testing.assert_array_equal(result.tokens, expected)
        np.testing.assert_array_equal(result.lengths, lengths)


@pytest.mark.slow
def test_eos_in_a_sampled_draft():
    """The committed tokens up to the EOS are those of the same key without it.

    By token verification: block verification verifies a draft as a whole, and an EOS makes it
    another draft.
    """
    endless = run(drafter="noisy copy", sampling=SAMPLED, key=KEY, verifier="token")
    for eos in range(0, V, 3):
        expected, lengths = cut(endless.tokens, (eos,))
        result = run(
            drafter="noisy copy", sampling=SAMPLED, key=KEY, eos_ids=(eos,), verifier="token"
        )
        np.testing.assert_array_equal(result.tokens, expected)
        for stats, length in zip(result.stats.per_row, lengths):
            assert stats.accepted <= length <= stats.accepted + stats.target_calls


# --- Decoder prefix ---


@pytest.mark.parametrize("name", ["none", "noisy copy"])
def test_decoder_prefix_continues(name):
    """Feeding the first k ids of a greedy output gives the rest of it.

    k differs from row to row; 0 is an id like others.
    """
    tokens, log_probs = plain()
    prefixes = [tokens[row, :row].tolist() for row in range(8)]
    result = run(drafter=name, decoder_prefix=prefixes, max_new_tokens=5)
    for row in range(8):
        np.testing.assert_array_equal(result.tokens[row], tokens[row, row : row + 5])
        np.testing.assert_allclose(result.log_probs[row], log_probs[row, row : row + 5], atol=1e-4)
    np.testing.assert_allclose(
        result.log_probs, teacher_forced_log_probs(result, prefixes=prefixes), atol=1e-4
    )
    array = np.zeros((8, 2), np.int32)
    array[:, 0] = 7
    as_lists, as_array = (
        run(drafter=name, decoder_prefix=p, max_new_tokens=5) for p in ([[7]] * 8, array)
    )
    np.testing.assert_array_equal(as_lists.tokens, as_array.tokens)


def test_eos_in_the_prefix_does_not_stop():
    prefixes = [[3, 9, 3]] * 8
    endless = run(drafter="noisy copy", decoder_prefix=prefixes, max_new_tokens=8)
    result = run(drafter="noisy copy", decoder_prefix=prefixes, max_new_tokens=8, eos_ids=(3,))
    np.testing.assert_array_equal(result.tokens, cut(endless.tokens, (3,))[0])
    assert np.all(result.lengths >= 1)


def test_prefixes_and_limits_of_very_different_lengths():
    """A row with a long prefix and a small limit beside one with no prefix and a large limit."""
    result = run(INPUTS[:1] * 2, decoder_prefix=[[3] * 20, []], max_new_tokens=[1, 40])
    np.testing.assert_array_equal(result.lengths, [1, 40])
    np.testing.assert_array_equal(result.tokens[1, :LIMIT], plain()[0][0])


@pytest.mark.slow
def test_sampled_with_prefix():
    prefixes = [[5], [], [9, 9], [1], [4, 0, 9], [2], [3], [8, 7, 6, 5]]
    result = run(
        drafter="self",
        decoder_prefix=prefixes,
        max_new_tokens=8,
        sampling=SAMPLED,
        key=KEY,
        verifier="token",
    )
    np.testing.assert_allclose(
        result.log_probs, teacher_forced_log_probs(result, prefixes=prefixes), atol=1e-4
    )
    assert result.stats.acceptance_rate == 1.0
