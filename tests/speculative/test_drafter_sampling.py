"""A drafter with its own temperature and filters (`drafter_sampling=`), and the same output."""

import jax
import numpy as np
import pytest
import tiers
import toy
from cascade_parts import (
    INPUTS,
    KEY,
    MODEL,
    PREFIXES,
    TARGET,
    B,
    drafted,
    model,
    table,
    teacher_forced,
)
from distribution_samples import (
    FALSE_ALARM,
    ROWS,
    SPREAD,
    g_test,
    hash_pair,
    joint_distribution,
    sample,
)

import specdec_jax as sd
from specdec_jax.commands.generation_flags import read_options
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.speculative.distributions import Categorical

pytestmark = pytest.mark.usefixtures("quick")
WARM, OWN = sd.SamplingConfig(temperature=1.0), sd.SamplingConfig(temperature=0.4, top_k=6)


def decode(drafter=model, **options):
    options = {"sampling": WARM, "gamma": 3, "max_new_tokens": 10, "key": KEY} | options
    return sd.generate(TARGET, INPUTS, drafter=drafter, **options)


class Misreported(sd.ModelDrafter):
    """Draws with its own temperature and says that it drew with the target's."""

    def draft(self, draft_state, state, num_wanted):
        draft_state, draft = super().draft(draft_state, state, num_wanted)
        logits = draft.dist.logits * state.sampling.temperature[:, None, None]
        return draft_state, draft._replace(dist=Categorical.from_logits(logits))


jax.tree_util.register_pytree_node_class(Misreported)


def sampled(drafter, **options) -> float:
    target, _ = hash_pair()
    counts, (examined, accepted) = sample(target, drafter, SPREAD, ROWS, **options)
    if options.get("verifier") in ("block", "token"):  # not "rejection", whose M is max p / q
        assert options.get("tree") or 0.1 < accepted.sum() / examined.sum() < 0.9
    return g_test(counts, joint_distribution(target, SPREAD))


HOT, COLD = sd.SamplingConfig(temperature=1.7), sd.SamplingConfig(temperature=0.3)


@tiers.parametrize("verifier", ["block", "token", "rejection"], first=1)
@tiers.parametrize("own", [COLD, HOT, OWN], ids=["cold", "hot", "top-k"], first=1)
def test_the_output_distribution_is_the_targets(own, verifier):
    drafter = sd.ModelDrafter(hash_pair()[1])
    assert sampled(drafter, verifier=verifier, drafter_sampling=own) > FALSE_ALARM


@pytest.mark.slow
def test_a_distribution_that_was_not_drawn_from_is_detected():
    drafter = Misreported(hash_pair()[1])
    assert sampled(drafter, verifier="token", drafter_sampling=COLD) < FALSE_ALARM


@pytest.mark.slow
@pytest.mark.parametrize("tree", [sd.Tree.uniform((2, 2)), sd.Chains(2, 2)], ids=["tree", "chains"])
def test_the_output_distribution_of_trees_is_the_targets(tree):
    drafter, unset = sd.ModelDrafter(hash_pair()[1]), {"verifier": "block", "gamma": "auto"}
    for own in (sd.SamplingConfig(temperature=0.5), HOT):
        assert sampled(drafter, tree=tree, drafter_sampling=own, **unset) > FALSE_ALARM


def test_a_draft_tells_what_it_was_drawn_from():
    """By temperature and filters of its own, row by row, and through the target's processors."""
    own = sd.SamplingConfig(temperature=np.linspace(0.3, 2, B).tolist(), top_k=[0, 5] * (B // 2))
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=model,
        gamma=3,
        sampling=sd.SamplingConfig(temperature=1.0, top_p=0.9, forbidden_tokens=(3,)),
        drafter_sampling=own,
        max_new_tokens=9,
        decoder_prefix=PREFIXES,
        key=KEY,
        eos_ids=(),
    )
    draft = jax.device_get(drafted(request.drafter, state.for_drafter(), np.full(B, 3, np.int32)))
    for row in range(B):
        logits = teacher_forced(MODEL, row, draft.tokens[row].tolist())
        logits = np.where(np.arange(logits.shape[-1]) == 3, -np.inf, logits)
        expected = toy.adjusted_probs(logits, own.temperature[row], own.top_k[row])
        np.testing.assert_allclose(
            np.exp(draft.dist.logits - draft.dist.log_normalizer[..., None])[row],
            expected,
            atol=1e-5,
        )


@pytest.mark.slow
def test_the_targets_own_settings_change_nothing():
    sampling = sd.SamplingConfig(temperature=[0.0, *[0.8] * (B - 1)], top_k=9)
    given, unset = (decode(sampling=sampling, drafter_sampling=own) for own in (sampling, None))
    np.testing.assert_array_equal(given.tokens, unset.tokens)
    other = decode(sampling=sampling, drafter_sampling=COLD)
    assert np.any(other.tokens != unset.tokens)
    np.testing.assert_array_equal(other.tokens[0], unset.tokens[0])  # argmax, whatever was drafted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vertical", "horizontal", "table", "greedy drafts"])
def test_gumbel_output_is_that_of_plain_decoding(kind):
    drafter = {
        "vertical": lambda: sd.VerticalCascade(model, table(True), 2),
        "horizontal": lambda: sd.HorizontalCascade(model, table(True), 1),
        "table": lambda: table(True),
        "greedy drafts": lambda: model,
    }[kind]()
    own = sd.SamplingConfig(temperature=0.0) if kind == "greedy drafts" else COLD
    result = decode(drafter, verifier="gumbel", drafter_sampling=own)
    np.testing.assert_array_equal(result.tokens, decode(None, verifier="gumbel", gamma=0).tokens)
    assert 0 < result.stats.accepted < result.stats.drafted


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(drafter_sampling=0.5), "got 0.5, expected a SamplingConfig, or None"),
        (dict(drafter=None, gamma=0), "got one without a drafter, expected None"),
        (dict(gamma=0), "got one with gamma = 0, expected None"),
        (dict(drafter=sd.PromptLookupDrafter()), "PromptLookupDrafter, which does not draw"),
        (dict(drafter=sd.RandomDrafter(4)), "got one with RandomDrafter, which does not draw"),
        (
            dict(sampling=sd.SamplingConfig()),
            "got one beside a target at temperature 0, expected None",
        ),
        (
            dict(drafter_sampling=sd.SamplingConfig(temperature=1.0, repetition_penalty=1.2)),
            "got repetition_penalty 1.2, expected temperature, top_k, top_p, min_p alone",
        ),
        (
            dict(drafter_sampling=sd.SamplingConfig(), tree=sd.Tree.uniform((2, 1)), gamma="auto"),
            "got temperature 0 with a tree, expected more than 0",
        ),
        (dict(num_beams=2, sampling=None), "with num_beams, expected None"),
        (dict(drafter_sampling=sd.SamplingConfig([0.1, 0.2])), "ing: temperature: got 2 values"),
    ],
)
def test_what_means_nothing_is_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        decode(**{"drafter_sampling": OWN} | options)


@pytest.mark.parametrize("suffix", ["json", "gin"])
def test_files_hold_it(tmp_path, suffix):
    for sampling in (None, sd.SamplingConfig(temperature=0.9, repetition_penalty=1.2)):
        config = GenerationConfig(sampling=sampling, drafter_sampling=OWN)
        config.save(tmp_path / f"config.{suffix}")
        assert GenerationConfig.load(tmp_path / f"config.{suffix}") == config


def test_a_flag_gives_it():
    class Flags:
        drafter_sampling = "temperature:0.4,top_k:6"

    assert read_options(Flags, ["drafter_sampling"]) == {"drafter_sampling": OWN}
    for text, message in (
        ("heat:1", "drafter_sampling: got 'heat', expected temperature, top_k, top_p, min_p"),
        ("0.4", "drafter_sampling: got '0.4', expected name:number"),
    ):
        Flags.drafter_sampling = text
        with pytest.raises(ValueError, match=message):
            read_options(Flags, ["drafter_sampling"])
