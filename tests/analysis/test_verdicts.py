"""What `benchmark`, `tune` and `measure` say first: whether drafting pays, and what to try else."""

import numpy as np
import pytest

from specdec_jax.analysis import formulas, verdicts
from specdec_jax.analysis.report import summaries
from specdec_jax.commands import tune

PLAIN = np.array([4.0, 8.0, 6.0])  # a machine whose speed drifts


def test_the_best_is_compared_pass_by_pass():
    found = verdicts.find_best(
        {"plain": PLAIN, "gamma 3": PLAIN / 2, "gamma 5": PLAIN / np.array([1.8, 2.1, 1.9])}
    )
    assert (found["best"], found["next"]) == ("gamma 3", "gamma 5")
    assert found["improvement"] == {"median": 2, "least": 2, "most": 2}
    assert found["over_next"] == pytest.approx(
        {"median": 2 / 1.9, "least": 2 / 2.1, "most": 2 / 1.8}
    )
    alone = verdicts.find_best({"plain": PLAIN, "gamma 3": PLAIN})
    assert (
        alone["next"] is alone["over_next"] is None and verdicts.find_best({"plain": PLAIN}) is None
    )


@pytest.mark.parametrize(
    ("gains", "message"),
    [
        (
            (1.9, 1.6, 2.3),
            "drafting pays here: 1.9 times (1.6 to 2.3) the speed of plain decoding, with gamma 3",
        ),
        (
            (0.94, 0.88, 0.98),
            "drafting does not pay here: 0.94 times (0.88 to 0.98) the speed of plain decoding, "
            "with "
            "gamma 3; try a rest",
        ),
        (
            (1.056, 0.994, 1.077),
            "drafting may or may not pay here: 1.06 times (0.994 to 1.08) the speed of plain "
            "decoding, with gamma 3, within the spread of 3 passes; try a rest",
        ),
        (
            (1.5,),
            "drafting seems to pay here: 1.5 times the speed of plain decoding, with gamma 3; one "
            "pass shows no "
            "spread, --repeats=3 does",
        ),
        (
            (0.5,),
            "drafting does not seem to pay here: 0.5 times the speed of plain decoding, with gamma "
            "3; one pass "
            "shows no spread, --repeats=3 does; try a rest",
        ),
    ],
    ids=["pays", "does not", "within the spread", "one pass", "one slow pass"],
)
def test_verdict(gains, message):
    plain = PLAIN[: len(gains)]
    found = verdicts.find_best({"plain": plain, "gamma 3": plain / np.array(gains)})
    assert verdicts.describe_best(found, len(gains), "a rest") == [message]


def test_whether_the_choice_is_beyond_the_spread():
    def describe(factor):
        return verdicts.describe_best(
            verdicts.find_best(
                {"plain": PLAIN, "gamma 3": PLAIN / 2, "gamma 2": PLAIN / 2 * np.array(factor)}
            ),
            3,
            "",
        )[1]

    ahead = (
        "gamma 3 over gamma 2, the next best: 1.1 times (1.05 to 1.2) as fast, beyond the spread"
    )
    assert describe((1.1, 1.05, 1.2)) == ahead
    assert describe((1.1, 0.9, 1.2)).endswith("1.1 times (0.9 to 1.2) as fast, within the spread")


@pytest.mark.parametrize(
    ("alpha", "cost_ratio", "verify_cost", "timed", "batch_size", "message"),
    [
        # γ = 2 would pay more than γ = 5: (1 + 0.6 + 0.36) / (0.4 + 1.12) beside 2.38 / (1 + 1.3).
        (
            0.6,
            0.2,
            {6: 1.3},
            (5,),
            1,
            f"--gamma=2, for which the formulas predict {1.96 / 1.52:.3g} times",
        ),
        (
            0.1,
            0.0,
            {4: 1.02},
            (3,),
            1,
            "a drafter whose tokens are accepted more often than alpha = 0.10",
        ),
        (
            0.3,
            0.4,
            {4: 1.1},
            (3,),
            1,
            "a cheaper drafter: a draft step takes 0.40 of a target step",
        ),
        (
            0.3,
            0.0,
            {4: 3.0},
            (3,),
            8,
            "a smaller --batch_size: a target call over 4 positions takes 3.00 steps",
        ),
        (
            0.03,
            0.0,
            {4: 1.2},
            (3,),
            1,
            "a drafter whose tokens are accepted more often than alpha = 0.03",
        ),
        (None, 0.1, {4: 1.2}, (3,), 1, "another drafter"),
        (0.5, None, {}, (), 1, "another drafter"),
    ],
)
def test_advice(alpha, cost_ratio, verify_cost, timed, batch_size, message):
    assert verdicts.advise(alpha, cost_ratio, verify_cost, timed, batch_size).startswith(message)


def test_descriptions_of_tokens():
    options = {"verifier": "block"}

    def describe(differing, near=None, **more):
        return verdicts.describe_tokens(differing, 9, options | more, near)

    assert describe([0, 0]) == "tokens are equal to plain decoding's for all 9 inputs"
    assert describe([0, None, 0]).endswith("anew or are lossy, they were not compared")
    assert (
        describe([0, 2], True)
        == "tokens differ from plain decoding's for 2 of 9 inputs, all near-ties"
    )
    assert describe([1]) == "tokens differ from plain decoding's for 1 of 9 inputs"
    assert "samples of the target's own distribution" in describe([None])
    assert (
        describe([None], verifier="lenient")
        == "lenient verification is lossy: tokens need not be the target's"
    )
    assert "acceptance is synthetic" in describe([None], synthetic_alpha=[0.5])


def test_what_measure_promises_of_whole_decodes():
    def row(gamma, token, block):
        return {
            "gamma": gamma,
            "by_position": {"token": {"with_lengths": token}, "block": {"with_lengths": block}},
        }

    text = summaries.describe_promise({"table": [row(1, 1.2, 1.3), row(2, 1.7, 1.6)]})
    assert text.startswith(
        "drafting should pay here: 1.7 times the speed of plain decoding, with gamma 2, token ("
    )
    assert (
        "encoders and output lengths are counted; the loop, the host and the tokenizer are not"
        in text
    )
    text = summaries.describe_promise({"table": [row(1, 1.02, 1.01)]})
    assert text.startswith(
        "drafting should hardly pay here: 1.02 times the speed of plain decoding, with gamma 1"
    )
    text = summaries.describe_promise({"table": [row(1, 0.8, 0.9)]})
    assert text.startswith(
        "drafting should not pay here: at best 0.9 times the speed of plain decoding ("
    )


def test_tuning_reports_what_is_within_the_spread(tmp_path):
    """The file too says of a choice that in some pass plain decoding was as fast."""
    options = tune.TuneOptions(
        target="target", drafter="drafter", config=str(tmp_path / "tuned.gin")
    )
    record = {
        "sentences": 2,
        "machine": {"processor": "some processor", "device": "cpu: cpu, 1"},
        "chosen": {"gamma": 3, "verifier": "block", "tree": None},
        "improvement": {"median": 1.056, "least": 0.994, "most": 1.077},
    }
    message = "(0.99 to 1.08), within the spread: in some pass plain decoding was as fast."
    assert message in tune.make_gin_file(record, options)
    record["improvement"]["least"] = 1.01
    assert "within the spread" not in tune.make_gin_file(record, options)


def test_improvement_in_the_advice_is_the_formula():
    """With v between the widths that were timed."""
    message = verdicts.advise(0.6, 0.2, {2: 1.0, 6: 1.4}, (5,), 1)
    best = max(
        range(1, 6), key=lambda gamma: formulas.improvement(0.6, gamma, 0.2, 1 + 0.1 * (gamma - 1))
    )
    promised = formulas.improvement(0.6, best, 0.2, 1 + 0.1 * (best - 1))
    assert message == f"--gamma={best}, for which the formulas predict {promised:.3g} times"
