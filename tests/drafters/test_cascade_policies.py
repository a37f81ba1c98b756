"""Policies of γ that read the distributions of a cascade: what they see, and where drafts end."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from cascade_parts import (
    FILTERS,
    INPUTS,
    KEY,
    LIMITS,
    OTHER,
    PREFIXES,
    TARGET,
    B,
    V,
    allowed,
    drafted,
    model,
    plain,
    run,
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
    traced_anew,
)

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters import cascade
from specdec_jax.speculative.policy import number_field
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")
G = 5
other = sd.ModelDrafter(OTHER)
CASCADES = {
    "model, table": lambda: sd.HorizontalCascade(model, table(False), 2),
    "model, model": lambda: sd.HorizontalCascade(model, other, 2),
    "lookup, model": lambda: sd.HorizontalCascade(sd.PromptLookupDrafter(1), model, 3),
    "three": lambda: sd.HorizontalCascade(
        sd.PromptLookupDrafter(2), sd.HorizontalCascade(other, model, 1), 2, None
    ),
    "vertical": lambda: sd.VerticalCascade(model, other, 2),
}

ORDERED = ["lookup, model", "model, table", "model, model", "three", "vertical"]


@dataclasses.dataclass(frozen=True)
class Product(sd.Policy):
    """Ends a draft after a token with Π q(x) < θ: it reads all tokens up to this one."""

    threshold: Any = number_field(0.4, 0, 1)
    most: Any = number_field(64, 1, 64)
    needs_probs = True

    def budget(self, state, seen):
        return jnp.where(seen.entropy[:, 0] > 2.2, 1, self.most)

    def goes_on(self, state, seen):
        return jnp.cumprod(seen.prob, axis=1) >= self.threshold[:, None]


def first_draft(drafter, policy, config):
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=drafter,
        gamma=policy,
        sampling=config,
        max_new_tokens=12,
        decoder_prefix=PREFIXES,
        key=KEY,
        eos_ids=(),
        verifier="token",
    )
    return jax.device_get(drafted(request.drafter, state, np.full(B, G, np.int32)))


MIXED = SamplingConfig(
    temperature=[0.0, *[FILTERS["temperature"]] * (B - 1)],
    top_k=FILTERS["top_k"],
    forbidden_tokens=(3,),
)


@functools.cache
def whole(name: str):
    """Returns a draft that no policy ends."""
    return first_draft(CASCADES[name](), Product(G, threshold=0.0, most=64), MIXED)


def which(drafter, place: int, count: int):
    """Returns the drafter of the token at `place`; the first of a cascade drafted `count`."""
    if isinstance(drafter, sd.VerticalCascade):
        return drafter.parts[0]
    first, then = drafter.parts
    if place < count:
        return first
    return which(then, place - count, 1) if isinstance(then, sd.HorizontalCascade) else then


def lookups(name: str) -> np.ndarray:
    """Returns how many tokens the first part of a cascade drafts."""
    drafter = CASCADES[name]()
    first, switch = drafter.parts[0], drafter.settings[0]
    if isinstance(first, sd.ModelDrafter):
        return np.full(B, switch)
    policy = sd.Heuristic(G, start=switch)
    return np.minimum(first_draft(first, policy, MIXED).num_drafted, switch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERED)
def test_a_policy_sees_the_distribution_of_every_part(name):
    """A part without distributions is certain; at temperature 0 they are those at 1."""
    drafter, draft, counts = CASCADES[name](), whole(name), lookups(name)
    assert drafter.provides_probs and draft.seen is not None
    for row in range(B):
        ids = draft.tokens[row, : draft.num_drafted[row]].tolist()
        for place, token in enumerate(ids):
            part = which(drafter, place, counts[row])
            probs = np.eye(V)[token]
            if isinstance(part, sd.ModelDrafter):
                logits = allowed(teacher_forced(part.model, row, ids)[place])
                filters = FILTERS if row else FILTERS | {"temperature": 1.0}
                probs = toy.adjusted_probs(logits, **filters)
            entropy = -sum(p * math.log(p) for p in probs if p > 0)
            np.testing.assert_allclose(draft.seen.prob[row, place], probs[token], rtol=1e-4)
            np.testing.assert_allclose(draft.seen.entropy[row, place], entropy, atol=1e-5)
            np.testing.assert_allclose(
                draft.seen.evenness[row, place], entropy / math.log(V), atol=1e-5
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERED[::-1])
def test_a_draft_ends_where_its_policy_says(name):
    """Whichever part drafts the last token, and however much of the draft came before it."""
    full, lengths = whole(name), []
    # The number of tokens left decides by which draws a vertical cascade makes them.
    most = 64 if name == "vertical" else 4
    for policy in (Product(G, 0.1), Product(G, 0.01, most), sd.Confidence(G, threshold=0.25)):
        draft = first_draft(CASCADES[name](), policy, MIXED)
        for row, length in enumerate(full.num_drafted):
            probs, expected = full.seen.prob[row, :length], length
            if isinstance(policy, Product):
                budget = 1 if full.seen.entropy[row, 0] > 2.2 else policy.most
                probs, expected = np.cumprod(probs), min(length, budget)
            (ends,) = np.nonzero(probs < policy.threshold)
            expected = min(expected, ends[0] + 1) if len(ends) else expected
            assert draft.num_drafted[row] == expected, (row, policy)
            np.testing.assert_array_equal(draft.tokens[row, :expected], full.tokens[row, :expected])
            np.testing.assert_allclose(
                draft.seen.prob[row, :expected], full.seen.prob[row, :expected], rtol=1e-5
            )
        lengths.extend(draft.num_drafted.tolist())
    assert len(set(lengths)) > 2, "or nothing ends"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASCADES)
def test_greedy_output_is_that_of_plain_decoding(name):
    policy = sd.Confidence(G, threshold=[0.2, 0.5, 0.8] * (B // 3))
    result = run(CASCADES[name](), gamma=policy, max_new_tokens=LIMITS)
    np.testing.assert_array_equal(result.tokens, plain().tokens)
    assert 0 < result.stats.accepted < result.stats.drafted


def test_tables_alone_tell_no_distribution():
    drafter = sd.HorizontalCascade(sd.PromptLookupDrafter(1), table(False), 2)
    with pytest.raises(ValueError, match="Confidence, which needs draft probabilities"):
        run(drafter, gamma=sd.Confidence(G))


def sampled(drafter, run=None):
    target, _ = hash_pair()
    options = dict(verifier="token", gamma=sd.Confidence(2, threshold=0.12))
    counts, _ = sample(
        target, drafter, SPREAD, 2 * ROWS, **options, **({"run": run} if run else {})
    )
    return g_test(counts, joint_distribution(target, SPREAD))


def pair(kind: str) -> sd.Drafter:
    first, second = (sd.ModelDrafter(one) for one in hash_pair()[::-1])
    return {
        "vertical": lambda: sd.VerticalCascade(
            first, sd.RandomDrafter(hash_pair()[0].config.vocab_size), 1
        ),
        "horizontal": lambda: sd.HorizontalCascade(first, second, 1),
    }[kind]()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vertical", "horizontal"])
def test_distribution_through_the_engine(kind):
    assert sampled(pair(kind)) > FALSE_ALARM


@pytest.mark.slow
def test_a_token_dropped_after_a_look_is_detected(monkeypatch):
    """The same end, but the token that ends the draft does not stay in it."""

    def dropping(state, seen, wanted, starts, counts, width):
        ends = find_end(state, seen, wanted, starts, counts, width)
        return jnp.where(ends < wanted, ends - 1, ends)

    find_end = cascade._find_end
    monkeypatch.setattr(cascade, "_find_end", dropping)
    assert sampled(pair("vertical"), traced_anew()) < FALSE_ALARM
