"""What `gamma="auto"` does through the command line, with costs that are made up."""

import json

import command_line
import cost_folders
import numpy as np
import pytest
from cost_folders import CHEAP, DEAR

from specdec_jax.commands import generate
from specdec_jax.decoding import continuous_batching, iteration_costs, past_requests

pytestmark = pytest.mark.usefixtures("quick")

home, measured = cost_folders.home, cost_folders.measured

pair, specdec = command_line.pair, command_line.specdec


# --- The command line ---


def arguments(*more):
    return [
        "generate",
        "--target=TARGET",
        "--drafter=DRAFTER",
        "--dtype=float32",
        "--max_new_tokens=6",
        "--batch_size=2",
        *more,
    ]


@pytest.mark.slow
def test_auto_is_the_default(specdec, pair, measured):
    texts = [
        specdec(*arguments(*more, "We asked")) for more in ([], ["--gamma=auto"], ["--gamma=2"])
    ]
    assert (
        len({out for _, out, _ in texts}) == 1
        and {code for code, *_ in texts} == {0}
        and measured.calls == 1
    )
    assert generate.GenerateOptions().configuration().gamma == "auto"


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "automatic"])
def test_flags_that_make_no_sense(specdec, pair, value):
    code, out, err = specdec(*arguments(f"--gamma={value}", "We asked"))
    assert (code, out) == (
        2,
        "",
    ) and f"gamma: got {value}, expected an integer from 0 to 64, or auto" in err


class Stop(Exception):
    pass


def file_job(specdec, tmp_path, monkeypatch, after=None):
    """Runs a file job whose `decode_stream` is recorded and ends after so many results.

    Returns (exit code, what γ was).
    """
    source, gammas, whole = tmp_path / "in.txt", [], continuous_batching.decode_stream
    source.write_text("We asked\nShe was\nTom\nWe\nTom is\n")

    def seen(*positional, config, **options):
        gammas.append(config.gamma)
        for number, output in enumerate(whole(*positional, config=config, **options)):
            if number == after:
                raise Stop
            yield output

    monkeypatch.setattr(generate, "decode_stream", seen)
    flags = [f"--input_file={source}", f"--output_file={tmp_path / 'out'}", "--temperature=1"]
    try:
        code = specdec(*arguments(*flags))[0]
    except Stop:
        code = None
    return code, gammas[0]


SAMPLED = "--temperature=1"


@pytest.mark.parametrize(
    "flags",
    [
        [SAMPLED, "--verifier=gumbel"],
        pytest.param([SAMPLED, "--drafter_sampling=temperature:1.5"], marks=pytest.mark.slow),
        pytest.param([SAMPLED, "--verifier=lenient", "--lenience=0.5"], marks=pytest.mark.slow),
        pytest.param(["--drafter=lookahead"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_file_has_what_is_printed_where_drafting_does_not_pay(
    specdec, pair, measured, tmp_path, flags
):
    """The statistics too: a drafter that brings a tree has no automatic γ."""
    measured.gives, path, texts = DEAR, tmp_path / "out", ["We asked", "Tom", "She was"]
    code, printed, err = specdec(*arguments(*flags, "--json", *texts))
    assert (code, err) == (0, "")
    code, out, err = specdec(*arguments(*flags, "--json", f"--output_file={path}", *texts))
    assert (code, out, err) == (0, "", "")
    found, expected = (
        [(one["tokens"], one["stats"]) for one in map(json.loads, lines.splitlines())]
        for lines in (path.read_text(), printed)
    )
    assert found == expected and len(found) == 3


def numbers_of(policy):
    return policy if isinstance(policy, int) else np.ravel(policy.costs).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("first, then", [(CHEAP, DEAR), (DEAR, CHEAP)], ids=["drafts", "plain"])
def test_a_job_resumes_with_the_costs_that_it_started_with(
    specdec, pair, measured, tmp_path, monkeypatch, first, then
):
    """Costs are kept though the cache is lost and the machine is another.

    Above temperature 0 draws depend on γ.
    """
    measured.gives = first
    code, begun = file_job(specdec, tmp_path, monkeypatch, after=2)
    assert code is None and (tmp_path / "out.partial").exists()
    iteration_costs._known.clear()
    for file in (tmp_path / "cache/specdec_jax/costs").glob("*"):
        file.unlink()
    measured.gives = then
    code, gone_on = file_job(specdec, tmp_path, monkeypatch)
    assert code == 0 and measured.calls == 2 and (begun == 0) == (first is DEAR)
    assert numbers_of(gone_on) == numbers_of(begun) and type(gone_on) is type(begun)
    resumed = (tmp_path / "out").read_text()
    iteration_costs._known.clear()
    for file in (tmp_path / "cache/specdec_jax/costs").glob("*"):
        file.unlink()
    measured.gives = first
    assert (
        file_job(specdec, tmp_path, monkeypatch)[0] == 0
        and (tmp_path / "out").read_text() == resumed
    )


def test_a_job_without_random_draws_learns(specdec, pair, measured, tmp_path):
    """Its outputs do not depend on γ, so the journal holds no costs, and later jobs know."""
    path, source = tmp_path / "out", tmp_path / "in.txt"
    source.write_text("We asked\nShe was\nTom\nWe\nTom is\n")
    code, _, err = specdec(*arguments(f"--input_file={source}", f"--output_file={path}"))
    assert (code, err) == (0, "")
    (learned,) = past_requests._learned.values()
    assert learned.examined > 0 and learned.requests > 0


def numbers(**changes):
    return {"costs": [1.0] * 9, "acceptance": 0.5} | changes


@pytest.mark.slow
@pytest.mark.parametrize(
    "record",
    [
        None,
        3,
        {},
        {"gamma": "x"},
        {"gamma": 65},
        numbers(costs=[1, 2]),
        numbers(costs=["a"] * 9),
        numbers(costs=[-1] * 9),
        numbers(acceptance=-1.0),
        numbers(acceptance=None),
        numbers(other=1),
    ],
    ids=str,
)
def test_a_journal_with_other_numbers_than_costs(
    specdec, pair, measured, tmp_path, monkeypatch, record
):
    file_job(specdec, tmp_path, monkeypatch, after=1)
    partial = tmp_path / "out.partial"
    head, *rest = partial.read_text().splitlines()
    partial.write_text("\n".join([json.dumps(json.loads(head) | {"costs": record}), *rest]) + "\n")
    code, out, err = specdec(
        *arguments(
            f"--input_file={tmp_path / 'in.txt'}",
            f"--output_file={tmp_path / 'out'}",
            "--temperature=1",
        )
    )
    assert (
        (code, out) == (2, "")
        and "expected" in err
        and partial.exists()
        and not (tmp_path / "out").exists()
    )


@pytest.mark.slow
def test_a_first_line_that_was_cut_short_is_written_anew(
    specdec, pair, measured, tmp_path, monkeypatch
):
    file_job(specdec, tmp_path, monkeypatch, after=1)
    partial = tmp_path / "out.partial"
    partial.write_bytes(partial.read_bytes().split(b"\n")[0][:-20])
    measured.gives = CHEAP._replace(iterations=tuple(1.01 * time for time in CHEAP.iterations))
    iteration_costs._known.clear()
    for file in (tmp_path / "cache/specdec_jax/costs").glob("*"):
        file.unlink()
    assert (
        file_job(specdec, tmp_path, monkeypatch)[0] == 0
        and len((tmp_path / "out").read_text().splitlines()) == 5
    )
