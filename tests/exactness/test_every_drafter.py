"""Every drafter under every exact verifier, and in a job that is interrupted.

Rows at temperature 0 must be plain decoding's, token for token; with Gumbel coupling all rows must.
Whether sampled rows have the target's distribution is a matter of statistics and of enumeration,
which each drafter's own file has.
"""

import dataclasses
import functools

import jax
import numpy as np
import own_parts
import pytest
from eagle_models import random_eagle
from random_heads_of import random_heads
from suffix_texts import random_texts
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd

V, LIMIT, GAMMA = 24, 10, 3
INPUTS = [[3, 4, 5, 4, 1], [7, 1], [9, 2, 9, 2, 1], [6, 8, 11, 1]]
PREFIXES = [[4, 2], [], [11, 9, 2, 9], [5]]  # 0 to 4 tokens: what a drafter has to go by
SAMPLING = sd.SamplingConfig(
    temperature=[0.0, 1.0, 0.7, 0.0], top_k=[0, 0, 6, 0], top_p=[1.0, 1.0, 0.9, 1.0]
)
ARGMAX = [0, 3]
pytestmark = pytest.mark.usefixtures("quick")


@functools.cache
def target():
    return noisy_copy(tiny_t5(0, V), 2.0)  # else it repeats itself


@functools.cache
def similar():
    return noisy_copy(target(), 0.1, 1)


def table(order: int, sampled: bool) -> sd.NGramDrafter:
    sequences = np.random.default_rng(2).integers(0, V - 4, (6, 20)).tolist()
    return sd.NGramDrafter.count(sequences, V - 4, order, sampled=sampled)


DRAFTERS = {
    "model": lambda: sd.ModelDrafter(similar()),
    "shortlist": lambda: sd.ModelDrafter(similar(), shortlist=12),
    "8 bits": lambda: sd.ModelDrafter(similar(), int8=True),
    "self": lambda: sd.SelfDrafter(target()),
    "early exit": lambda: sd.EarlyExitDrafter(target(), 1),
    "heads": lambda: random_heads(target()),
    "eagle": lambda: random_eagle(target(), similar()),
    "unigrams": lambda: table(1, True),
    "trigrams": lambda: table(3, False),
    "parallel": lambda: sd.ParallelDrafter(similar()),
    "lookup": lambda: sd.PromptLookupDrafter(1),
    "latest": lambda: sd.PromptLookupDrafter(1, prefer="latest"),
    "copy": lambda: sd.PromptLookupDrafter(min_match=0),
    "assisted": lambda: sd.AssistedNGramDrafter(),
    "recycling": lambda: sd.TokenRecycling(V),
    "gated": lambda: sd.GatedDrafter(sd.PromptLookupDrafter(min_match=0)),
    "suffix": lambda: random_texts(V),
    "random": lambda: sd.RandomDrafter(V),
    "from outside": own_parts.RepeatDrafter,
    "vertical cascade": lambda: sd.VerticalCascade(sd.ModelDrafter(similar()), table(2, False), 2),
    "better of two": lambda: sd.BestOf(sd.PromptLookupDrafter(1), sd.ModelDrafter(similar())),
    "horizontal cascade": lambda: sd.HorizontalCascade(
        sd.ModelDrafter(similar()), table(2, True), 2
    ),
}

# Whose own files test their exactness in the first tier.
COVERED = (
    *("latest", "shortlist", "parallel", "eagle", "8 bits", "trigrams", "recycling"),
    *("vertical cascade", "better of two", "self", "early exit", "heads", "lookup", "assisted"),
)


def run(drafter, verifier: str | sd.Verifier, sampling=SAMPLING):
    return sd.generate(
        target(),
        INPUTS,
        drafter=drafter,
        gamma=GAMMA,
        verifier=verifier,
        sampling=sampling,
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        key=jax.random.key(5),
    )


@functools.cache
def plain(verifier: str | sd.Verifier):
    return run(None, verifier)


@pytest.mark.parametrize(
    "verifier",
    [
        "block",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("token", "gumbel", "rejection")),
        pytest.param(own_parts.MIRRORED, id="from outside", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in COVERED else ()) for name in DRAFTERS],
)
def test_every_drafter_under_every_verifier(name, verifier):
    result, expected = run(DRAFTERS[name](), verifier), plain(verifier)
    rows = range(len(INPUTS)) if verifier == "gumbel" else ARGMAX
    for row in rows:
        np.testing.assert_array_equal(result.tokens[row], expected.tokens[row])
        assert result.finish_reasons[row] == expected.finish_reasons[row]
    assert np.all(result.lengths > 0) and np.all((result.tokens >= 0) & (result.tokens < V))
    assert result.stats.drafted > 0, "or nothing was verified"
    assert result.stats.target_calls <= int(result.lengths.sum()) + len(INPUTS)


def look_ahead() -> sd.LookaheadDecoding:
    return sd.LookaheadDecoding(3, 3, 2)


JOB = dict(
    batch_size=3,
    num_samples=2,
    max_new_tokens=[LIMIT, 4, 7, LIMIT] * 2,
    decoder_prefix=PREFIXES * 2,
    eos_ids=(1, 8),
    sampling=sd.SamplingConfig(temperature=0.9),
    key=jax.random.key(7),
)


def run_job(drafter, **options) -> dict:
    """Returns each output's tokens and number of accepted ones; the job is interrupted twice."""
    found: dict = {}
    for stop in (2, 5, 8):
        stream = sd.decode_stream(
            target(), INPUTS * 2, skip=tuple(found), drafter=drafter, **JOB | options
        )
        for number, rows in stream:
            found[number] = [(row.tokens, row.stats.accepted) for row in rows]
            if len(found) >= stop:
                break
    return found


@functools.cache
def plain_job() -> dict:
    return run_job(None, verifier="gumbel")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAFTERS, "look-ahead"])
def test_every_drafter_in_a_job_that_is_interrupted(name):
    """Several samples of each input, refilled rows, prefixes: all are plain decoding's."""
    drafter, options = (DRAFTERS | {"look-ahead": look_ahead})[name](), dict(gamma=GAMMA)
    options |= dict(verifier="gumbel")
    if name == "look-ahead":
        options = dict(tree=dataclasses.replace(drafter.tree, verifier="gumbel"))
    found, expected = run_job(drafter, **options), plain_job()
    assert found.keys() == expected.keys()
    for number, rows in expected.items():
        assert [tokens for tokens, _ in found[number]] == [tokens for tokens, _ in rows], number
    assert sum(accepted for rows in found.values() for _, accepted in rows) > 0


def test_the_table_has_every_drafter():
    """Of those that draft chains; for trees there is `test_tree_drafters.py`."""
    ends = "Drafter", "Cascade", "BestOf", "Recycling"
    exported = {name for name in sd.__all__ if name.endswith(ends)} - {"Drafter"}
    exported = {name for name in exported if getattr(sd, name).draft is not sd.Drafter.draft}
    assert exported == {
        type(make()).__name__ for name, make in DRAFTERS.items() if name != "from outside"
    }
