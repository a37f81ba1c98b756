"""G-tests of the distribution that the engine really draws, through its own keys.

They test the joint distribution of three positions.

The false-alarm rate of one test is 1e-9. `DRAWS` is what `draws_needed` says for a smallest
deviation worth finding: a joint distribution of 16³ cells that is off by 7 % (root mean square,
relative: E_p[(q/p − 1)²] = 0.0049) must be found with probability 0.999.
`test_the_sample_is_large_enough` repeats the calculation.
"""

import dataclasses
import functools

import jax
import numpy as np
import own_parts
import pytest
import scipy.stats
import tiers
import toy
from distribution_samples import (
    DEVIATION,
    DRAWS,
    EOS,
    FALSE_ALARM,
    INPUTS,
    POSITIONS,
    POWER,
    ROWS,
    SPREAD,
    V,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
    traced_anew,
)
from toy_models import HashModel, tiny_t5

from specdec_jax.decoding.generate import advance, generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import distributions, verifiers
from specdec_jax.speculative import randomness as speculative_randomness
from specdec_jax.speculative.sampling import SamplingConfig


def draws_needed(cells: int) -> int:
    """Draws with which a G-test over `cells` cells finds `DEVIATION` with probability `POWER`.

    Under a wrong distribution G is noncentral χ² with noncentrality draws · E_p[(q/p − 1)²].
    """
    freedom = cells - 1
    critical = scipy.stats.chi2.isf(FALSE_ALARM, freedom)
    low, high = 1, 10**9
    while low < high:
        middle = (low + high) // 2
        enough = scipy.stats.ncx2.sf(critical, freedom, middle * DEVIATION**2) >= POWER
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def test_the_sample_is_large_enough():
    assert 150_000 < draws_needed(V**POSITIONS) <= DRAWS
    assert draws_needed(V**2) < DRAWS / 3


@functools.cache
def t5_pair():
    return tiny_t5(0, V, decoder_layers=1), tiny_t5(1, V, decoder_layers=1)


# The functions as they are: some tests put others in their place.
verify_tokens = verifiers.verify_tokens
random_bits = speculative_randomness.random_bits
draw = speculative_randomness.draw


FILTERED = SamplingConfig(temperature=1.3, top_k=9, top_p=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "speculative_",
    [True, False],
    ids=["speculative", "plain"],
)
def test_t5_distribution(speculative_):
    target, draft = t5_pair()
    config = SamplingConfig(temperature=1.0)
    counts, (examined, accepted) = sample(
        target, ModelDrafter(draft) if speculative_ else None, config, DRAWS
    )
    assert g_test(counts, joint_distribution(target, config)) > FALSE_ALARM
    if speculative_:
        assert 0.2 < accepted.sum() / examined.sum() < 0.9, (
            "the test says little where all or nothing is accepted"
        )
        assert g_test(counts, joint_distribution(draft, config)) < FALSE_ALARM, (
            "and nothing if both distributions were the same"
        )


@pytest.mark.slow
def test_gpt_distribution():
    """A decoder-only pair that continues its prompt."""
    config = GPTConfig(V, 8, 1, 1, 16, num_positions=16)

    def spread(seed: int) -> LanguageModel:
        params = LanguageModel.random(config, seed).params
        params["decoder"]["decoder_norm"]["scale"] *= 20.0
        return LanguageModel(config, params)

    target, draft = spread(0), spread(1)
    counts, (examined, accepted) = sample(target, ModelDrafter(draft), SPREAD, DRAWS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.2 < accepted.sum() / examined.sum() < 0.9
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM


GEMMA = dict(windows=(2, 0), attention_cap=2.0, logits_cap=4.0, query_scalar=4)
ENCODER = dict(num_encoder_layers=1, encoder_emb_dim=12, encoder_mlp_dim=8)
ENCODER |= dict(encoder_num_heads=1, encoder_num_kv_heads=1, encoder_windows=(2,))
GEMMA_3 = dict(windows=(2, 0), query_scalar=4, qk_norm=True, local_rotary_base=100.0)

MERGED = dict(encoder_emb_dim=8, merged_attention=True, apart_id=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        GemmaConfig(V, 8, 2, 1, 4, 2, 16, **GEMMA),
        T5GemmaConfig(V, 8, 2, 1, 4, 2, 16, **GEMMA, **ENCODER),
        T5GemmaConfig(V, 8, 2, 1, 4, 2, 16, qk_norm=True, **GEMMA, **ENCODER | MERGED),
        GemmaConfig(V, 8, 2, 1, 4, 2, 16, **GEMMA_3),
    ],
    ids=["gemma", "t5gemma", "t5gemma2", "gemma3"],
)
def test_gemma_distribution(config):
    """With caps, windows that are shorter than the text, and shared keys."""

    def spread(seed: int) -> LanguageModel:
        params = LanguageModel.random(config, seed).params
        params["decoder"]["decoder_norm"]["scale"] += 25.0
        return LanguageModel(config, params)

    target, draft = spread(0), spread(1)
    counts, (examined, accepted) = sample(target, ModelDrafter(draft), SPREAD, DRAWS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.2 < accepted.sum() / examined.sum() < 0.9
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("speculative_", [True, False], ids=["speculative", "plain"])
def test_distribution_under_top_k_and_top_p(speculative_):
    target, draft = hash_pair()
    probs, draws = joint_distribution(target, FILTERED), DRAWS // 2
    assert draws_needed(np.count_nonzero(probs)) <= draws
    counts, _ = sample(target, ModelDrafter(draft) if speculative_ else None, FILTERED, draws)
    assert g_test(counts, probs) > FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.parametrize("speculative_", [True, False], ids=["speculative", "plain"])
def test_distribution_with_keys_of_another_kind(impl, speculative_):
    """JAX batches rbg keys by drawing for all rows from the first row's key.

    Those keys are the same again once that row is done.
    """
    target, draft = hash_pair()
    drafter = ModelDrafter(draft) if speculative_ else None
    counts, _ = sample(target, drafter, SPREAD, 2 * ROWS, impl=impl, empty=1, gamma=1)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [11, 23], ids=["narrower", "wider"])
def test_distribution_with_a_drafter_of_another_width(vocab):
    """Ids that only the target has get draft probability 0; other ids are never drafted."""
    target, draft = HashModel(V, 0, spread=3.0), HashModel(vocab, 1, spread=3.0, likeness=0.3)
    counts, _ = sample(target, ModelDrafter(draft), FILTERED, 2 * ROWS)
    assert g_test(counts, joint_distribution(target, FILTERED)) > FALSE_ALARM


def test_acceptance_is_the_sum_of_minima():
    """Per position of the first draft, two-sided: the coupling is neither better nor worse."""
    target, draft = hash_pair()
    shares = []
    for model in (target, draft):
        decoder = np.concatenate([np.zeros((V, 1), int), np.arange(V)[:, None]], axis=1)
        logits = model.logits(np.tile(INPUTS, (V, 1)), decoder, np.full(V, 3))
        shares.append(
            toy.adjusted_probs(logits, FILTERED.temperature, FILTERED.top_k, FILTERED.top_p)
        )
    p, q = shares
    both = np.minimum(p, q)
    first = both[0, 0]
    # The second is examined after a first that was accepted and was no EOS.
    reach = np.where(np.arange(V) == EOS, 0, first)
    expected = [first.sum(), reach @ both[:, 1].sum(axis=1) / reach.sum()]

    def once(*args):
        return advance(*args[:3], np.int32(1))

    _, (examined, accepted) = sample(target, ModelDrafter(draft), FILTERED, ROWS * 4, run=once)
    assert examined[0] == ROWS * 4
    assert abs(examined[1] - examined[0] * reach.sum()) < 6 * np.sqrt(
        examined[0] * reach.sum() * (1 - reach.sum())
    )
    for seen, kept, rate in zip(examined, accepted, expected):
        assert 0.2 < rate < 0.9
        assert abs(kept - seen * rate) < 6 * np.sqrt(seen * rate * (1 - rate))


# --- The other verifiers ---


@tiers.parametrize(
    "verifier, draws",
    [
        ("block", DRAWS),
        ("rejection", 4 * ROWS),
        ("gumbel", 4 * ROWS),
        (own_parts.MIRRORED, 4 * ROWS),
    ],
    first=1,
)
def test_distribution_of_every_verifier(verifier, draws):
    target, draft = hash_pair()
    counts, (examined, accepted) = sample(
        target, ModelDrafter(draft), SPREAD, draws, verifier=verifier
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.1 < accepted.sum() / examined.sum() < 0.9
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM


def keyed_by_absolute_position(monkeypatch):
    def patched(keys, lengths, offsets, tag):
        return random_bits(keys, lengths * 0, lengths[:, None] + offsets, tag)

    monkeypatch.setattr(speculative_randomness, "random_bits", patched)


@pytest.mark.slow
def test_block_verification_must_not_meet_discarded_draws_again(monkeypatch):
    """Block verification stops where it does because of later draws.

    Keys by absolute position would draw those a second time.
    """
    target, draft = HashModel(V, 0, spread=3.0), HashModel(V, 1, spread=3.0)
    keyed_by_absolute_position(monkeypatch)
    counts, _ = sample(
        target, ModelDrafter(draft), SPREAD, 4 * ROWS, run=traced_anew(), verifier="block"
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) < FALSE_ALARM


OTHER, SAME = HashModel(V, 1, spread=3.0, likeness=0.3), HashModel(V, 0, spread=3.0)
NARROWER, WIDER = HashModel(11, 1, spread=3.0, likeness=0.3), HashModel(23, 2, spread=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, drafters", [(SPREAD, (OTHER, SAME)), (FILTERED, (NARROWER, WIDER))]
)
def test_coupled_output_is_that_of_plain_sampling(config, drafters):
    """Token for token, over rows of their own inputs, keys and γ (0 to 5), for every drafter."""
    target, rows, rng = SAME, 2000, np.random.default_rng(0)
    inputs = rng.integers(0, V, size=(rows, 3))
    options = dict(
        input_lengths=np.full(rows, 3),
        sampling=config,
        verifier="gumbel",
        max_new_tokens=9,
        eos_ids=[EOS],
    )
    plain = generate(target, inputs, key=jax.random.key(3), **options)
    for model in drafters:
        gamma = rng.integers(6, size=rows)
        result = generate(
            target,
            inputs,
            drafter=ModelDrafter(model),
            gamma=gamma,
            key=jax.random.key(3),
            **options,
        )
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        np.testing.assert_array_equal(result.lengths, plain.lengths)
        np.testing.assert_allclose(result.adjusted_log_probs, plain.adjusted_log_probs, atol=1e-6)
        rate = result.stats.acceptance_rate
        assert rate == 1 if model is target else 0.1 < rate < 0.9
    other = generate(target, inputs, key=jax.random.key(4), **options)
    assert np.mean(np.any(other.tokens != plain.tokens, axis=1)) > 0.9


@pytest.mark.slow
def test_coupled_acceptance_has_its_closed_form():
    """The share of equal draws at the first token is at least (1 − D) / (1 + D)."""
    target, draft = hash_pair()
    p, q = (
        toy.adjusted_probs(model.logits([INPUTS], [[0]], [3])[0, 0]) for model in (target, draft)
    )

    def once(*args):
        return advance(*args[:3], np.int32(1))

    _, (examined, accepted) = sample(
        target, ModelDrafter(draft), SPREAD, ROWS, run=once, verifier="gumbel"
    )
    share, distance = toy.coupled_share(p, q), np.abs(p - q).sum() / 2
    assert examined[0] == ROWS and abs(accepted[0] - ROWS * share) < 6 * np.sqrt(
        ROWS * share * (1 - share)
    )
    assert (1 - distance) / (1 + distance) <= share <= 1 - distance


# --- Mutants of the production code, which the same test must find in far fewer draws ---


def put(monkeypatch, verify):
    mutant = dataclasses.replace(verifiers.VERIFIERS["token"], verify=verify)
    monkeypatch.setitem(verifiers.VERIFIERS, "token", mutant)


def residual_from_target(monkeypatch):
    def verify(target, draft, draft_tokens, num_drafted, draws, settings):
        result = verify_tokens(target, draft, draft_tokens, num_drafted, draws, settings)
        here = np.arange(len(draft_tokens)), result.num_accepted
        return result._replace(next_token=draw(target.row(result.num_accepted), draws.final[here]))

    put(monkeypatch, verify)


def always_accept(monkeypatch):
    """The acceptance uniform is always 0: whatever has p(x) > 0 is accepted."""

    def verify(target, draft, draft_tokens, num_drafted, draws, settings):
        draws = draws._replace(accept=draws.accept * 0)
        return verify_tokens(target, draft, draft_tokens, num_drafted, draws, settings)

    put(monkeypatch, verify)


def tag_shared(a, b):
    return lambda monkeypatch: monkeypatch.setattr(
        speculative_randomness, a, getattr(speculative_randomness, b)
    )


def same_at_every_offset(monkeypatch):
    def patched(keys, lengths, offsets, tag):
        return random_bits(keys, lengths, offsets * 0, tag)

    monkeypatch.setattr(speculative_randomness, "random_bits", patched)


def same_at_every_iteration(monkeypatch):
    def patched(keys, lengths, offsets, tag):
        return random_bits(keys, lengths * 0, offsets, tag)

    monkeypatch.setattr(speculative_randomness, "random_bits", patched)


def draft_by_argmax(monkeypatch):
    """The drafter returns its softmax distribution but drafts the most probable id."""
    monkeypatch.setattr(
        speculative_randomness, "draw", lambda weights, random: distributions.argmax(weights)
    )


def draft_from_another_distribution(monkeypatch):
    """The distribution that is returned lacks the filters that the draft was drawn with."""

    def cut(weights, random):
        return draw(jax.numpy.where(weights < 0.1, 0, weights), random)

    monkeypatch.setattr(speculative_randomness, "draw", cut)


MUTANTS = {
    "residual from p": residual_from_target,
    "always accept": always_accept,
    "draft and acceptance share a tag": tag_shared("ACCEPT", "DRAFT"),
    "acceptance and residual share a tag": tag_shared("RESIDUAL", "ACCEPT"),
    "one uniform at every position": same_at_every_offset,
    "one uniform at every iteration": same_at_every_iteration,
    "draft by argmax, softmax in the ratio": draft_by_argmax,
    "draft from another distribution than returned": draft_from_another_distribution,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_statistics_catch(name, monkeypatch):
    target, draft = hash_pair()
    MUTANTS[name](monkeypatch)
    counts, _ = sample(target, ModelDrafter(draft), SPREAD, ROWS, run=traced_anew())
    assert g_test(counts, joint_distribution(target, SPREAD)) < FALSE_ALARM


@pytest.mark.slow
def test_without_a_mutant_the_small_sample_passes():
    target, draft = hash_pair()
    counts, _ = sample(target, ModelDrafter(draft), SPREAD, ROWS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM


@pytest.mark.slow
def test_seed_zero_and_token_zero_are_ordinary():
    """Key 0 draws like any other, and id 0 is drawn as often as its probability says."""
    target, _ = hash_pair()
    counts, _ = sample(target, None, SPREAD, ROWS)
    probs = joint_distribution(target, SPREAD).reshape(V, -1).sum(axis=1)
    seen = counts.reshape(V, -1).sum(axis=1)
    assert 0.01 < probs[0] and abs(seen[0] - ROWS * probs[0]) < 6 * np.sqrt(ROWS * probs[0])
