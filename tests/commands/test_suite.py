"""`specdec benchmark --suite=paper`: which rows it has, what a kill leaves, what is rejected."""

import json

import pytest
from announcements import without_course

from specdec_jax.analysis import benchmark
from specdec_jax.analysis.report.records import read_records
from specdec_jax.commands import main, suite
from specdec_jax.commands.benchmark import BenchmarkOptions
from specdec_jax.models.families import PRESETS
from specdec_jax.models.t5 import T5Config

pytestmark = pytest.mark.usefixtures("quick")
FLAGS = [
    "--suite=paper",
    "--preset=tiny",
    "--drafter_preset=tiny",
    "--drafter=lookup",
    "--gamma=1,2",
    "--synthetic_alpha=0.4,1",
    "--max_new_tokens=12",
    "--input_length=5",
    "--repeats=1",
]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", T5Config(48, 16, 2, 8, 1, 1, 24))


@pytest.fixture
def specdec(capsys):
    def call(*arguments):
        code = main.main(["benchmark", *map(str, arguments), "--compilation_cache_dir="])
        out, err = capsys.readouterr()
        return code, out, without_course(err)

    return call


def test_rows_of_checkpoints():
    """Per drafter: tables 2 to 4 at both temperatures by algorithm 1, then table 5's leniences."""
    options = BenchmarkOptions(
        suite="paper", target="t", drafter="d,lookup", gamma=(3, 5), output="records.jsonl"
    )
    made = suite.list_rows(options)
    how = [
        (0.0, "token", None),
        (1.0, "token", None),
        *((1.0, "lenient", value) for value in (0.5, 0.3, 0.1)),
    ]
    assert [(row.temperature, row.verifier, row.lenience) for row in made] == how * 2
    assert [row.drafter for row in made] == ["d"] * 5 + ["lookup"] * 5
    assert all(row.suite is row.output is None and row.gamma == (3, 5) for row in made)


def test_rows_of_presets():
    """Per drafter and γ, since one process may not be able to hold the programs of all."""
    options = BenchmarkOptions(
        suite="paper",
        preset="tiny",
        drafter_preset="tiny",
        drafter="lookup",
        gamma=(1, 2),
        synthetic_alpha=(0.4, 1.0),
        output="r.jsonl",
    )
    found = [
        (row.drafter_preset, row.drafter, row.gamma, row.synthetic_alpha)
        for row in suite.list_rows(options)
    ]
    drafters = [("tiny", None), (None, "lookup")]
    assert found == [(*drafter, (gamma,), (0.4, 1.0)) for drafter in drafters for gamma in (1, 2)]


@pytest.mark.slow
def test_a_killed_suite_resumes(specdec, monkeypatch, tmp_path):
    output, measure, begun = tmp_path / "records.jsonl", benchmark.benchmark, []

    def killed(workload, others):
        options = workload.options
        begun.append((options.drafter_preset, options.drafter, options.gamma))
        if len(begun) == 2:
            raise KeyboardInterrupt
        return measure(workload, others)

    monkeypatch.setattr(benchmark, "benchmark", killed)
    assert specdec(*FLAGS, "--output", output)[0] == 130 and not output.exists()
    code, out, err = specdec(*FLAGS, "--output", output)
    assert code == 0 and "1 of 4 rows are there" in err
    rows = [
        (*drafter, (gamma,)) for drafter in (("tiny", None), (None, "lookup")) for gamma in (1, 2)
    ]
    assert begun == [*rows[:2], *rows[1:]]
    assert len(read_records(str(output))) == 4
    found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [record["drafter"]["name"] for record in found] == [
        "tiny",
        "tiny",
        "prompt lookup",
        "prompt lookup",
    ]
    for record, gamma in zip(found, (1, 2, 1, 2), strict=True):
        assert [
            (variant["gamma"], variant["synthetic_alpha"]) for variant in record["speculative"]
        ] == [
            (gamma, 0.4),
            (gamma, 1),
        ]
    for record, prediction in zip(found, ["with_lengths"] * 2 + ["with_counts"] * 2, strict=True):
        for variant in record["speculative"]:
            assert variant["prediction"] == prediction
            expected = variant["improvement"]["median"] / variant["predicted"][prediction]
            assert variant["measured_over_predicted"] == pytest.approx(expected)
    assert found[1]["speculative"][1]["stats"]["tokens_per_target_call"] == 3
    # Random ids repeat nothing, and yet prompt lookup is timed: a draft is as long as was asked
    # for.
    looked_up = found[3]["speculative"][1]["stats"]
    assert looked_up["acceptance_rate"] == 1 and looked_up["tokens_per_target_call"] == 3
    assert "nothing was drafted" not in out and "drafted nothing" not in out
    assert (
        out.count("acceptance is synthetic: outputs mean nothing") == 3
    )  # one row was there before
    assert (
        out.count("synthetic, α = 0.4") == 4
        and len(output.read_text(encoding="utf-8").splitlines()) == 4
    )

    report = tmp_path / "report.html"
    assert main.main(["figures", f"--records={output}", f"--output={report}"]) == 0
    text = report.read_text(encoding="utf-8")
    assert text.count("synthetic, α = 0.4") >= 4 and "prompt lookup" in text


@pytest.mark.slow
def test_one_command_makes_the_page(specdec, tmp_path):
    output, report = tmp_path / "records.jsonl", tmp_path / "report.html"
    few = ["--gamma=1", "--synthetic_alpha=1"]
    code, out, _ = specdec(*FLAGS, *few, "--output", output, "--report", report)
    assert code == 0 and f"wrote {output} and {report}" in out
    again = tmp_path / "again.html"
    assert main.main(["figures", f"--records={output}", f"--output={again}"]) == 0
    assert report.read_text(encoding="utf-8") == again.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_row_that_fails_a_check_is_not_kept(specdec, monkeypatch, tmp_path):
    monkeypatch.setattr(
        benchmark, "benchmark", lambda *_: ({"a": 1}, ["gamma 2: got other tokens"])
    )
    monkeypatch.setattr(suite.summaries, "benchmark_summary", str)
    code, _, err = specdec(*FLAGS, "--output", tmp_path / "records.jsonl")
    assert code == 1 and "gamma 2: got other tokens" in err
    assert len((tmp_path / "records.jsonl.partial").read_text().splitlines()) == 1  # the settings


@pytest.mark.parametrize(("installed", "expected"), [(True, ["t5x", None]), (False, [None, None])])
def test_t5x_decodes_beside_argmax_rows_where_it_is_installed(monkeypatch, installed, expected):
    seen = []
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.setattr(
        benchmark, "benchmark", lambda row, _: seen.append(row.options.against) or ({}, [])
    )
    monkeypatch.setattr(suite, "make_others", lambda *_: {})
    options = dict(
        preset="tiny",
        drafter="lookup",
        synthetic_alpha=(0.5,),
        gamma=(2,),
        input_length=5,
        max_new_tokens=4,
    )
    target = None
    for temperature in (0.0, 1.0):
        target, _, _ = suite._measure(BenchmarkOptions(temperature=temperature, **options), target)
    assert seen == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--suite=best", "--target=t", "--drafter=d", "--output=r.jsonl"],
            "suite: got 'best', expected paper",
        ),
        (["--suite=paper", "--target=t", "--drafter=d"], "output: got nothing with suite='paper'"),
        (
            ["--suite=paper", "--target=t", "--output=r.jsonl"],
            "drafter: got nothing with suite='paper'",
        ),
        (
            ["--suite=paper", "--preset=tiny", "--drafter=lookup", "--output=r.jsonl"],
            "synthetic_alpha: got nothing",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--temperature=1", "--output=r.jsonl"],
            "temperature: got 1.0 with",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--verifier=gumbel", "--output=r.jsonl"],
            "verifier: got 'gumbel'",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--json", "--output=r.jsonl"],
            "json: got True with",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--gamma=0", "--output=r.jsonl"],
            "gamma: got 0",
        ),
        (
            [
                "--suite=paper",
                "--preset=tiny",
                "--drafter_preset=tiny,huge",
                "--synthetic_alpha=1",
                "--output=r.jsonl",
            ],
            "got 'huge'",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--output=r.jsonl", "--report=r.pdf"],
            "report: got 'r.pdf', expected",
        ),
        (
            [
                "--suite=paper",
                "--target=t",
                "--drafter=d",
                "--output=r.jsonl",
                "--report=nowhere/r.html",
            ],
            "report: got 'nowhere/r.html'",
        ),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--output=r.html", "--report=./r.html"],
            "expected another file than output",
        ),
        (["--target=t", "--drafter=d", "--report=r.html"], "report: got 'r.html' without a suite"),
        (
            ["--suite=paper", "--target=t", "--drafter=d", "--output=nowhere/r.jsonl"],
            "output: got 'nowhere/r.jsonl'",
        ),
    ],
)
def test_rejects(specdec, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = specdec(*flags)
    assert code == 2 and message in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["output", "report"])
def test_the_input_file_is_not_replaced(specdec, tmp_path, name):
    source = tmp_path / "texts.html"
    source.write_text("Good morning.\n", encoding="utf-8")
    files = {"output": tmp_path / "r.jsonl", "report": tmp_path / "r.html"} | {name: source}
    flags = ["--suite=paper", "--target=t", "--drafter=d", f"--input_file={source}"]
    code, _, err = specdec(*flags, *(f"--{option}={path}" for option, path in files.items()))
    assert code == 2 and f"{name}: got '{source}', which is the input, expected another" in err
    assert source.read_text(encoding="utf-8") == "Good morning.\n"
