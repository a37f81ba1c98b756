"""`specdec measure` as a command: its record, its figure, what it rejects."""

import json
import sys
import types

import command_line
import pytest
from measured_pair import ACCEPTED
from sample_records import MEASURE, parse, read_macros

from specdec_jax.analysis import expectations
from specdec_jax.analysis.report import page, plots, summaries
from specdec_jax.analysis.report import rows as report_rows

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")


FLAGS = [
    "--target=TARGET",
    "--dtype=float32",
    "--max_new_tokens=6",
    "--gamma_max=2",
    "--limit=2",
    "--repeats=1",
]


# The command.


@pytest.fixture
def sentences(tmp_path):
    (tmp_path / "sentences.txt").write_text("Tom\nWe\nShe\n", encoding="utf-8")
    return tmp_path / "sentences.txt"


def test_columns_are_as_wide_as_their_heads():
    """The head of a verifier with a long name, such as "rejection gain", has space before it."""
    row = dict(gamma=1, tokens=None, theorem_3_8=None, verify_cost=1.25, with_verify_cost=None)
    found = dict(tokens=1.5, with_verify_cost=1.125, with_lengths=1.25)
    table = [row | {"timed": True, "by_position": {"rejection": found}}]
    record = {"acceptance": {"by_position": {"rejection": []}}, "table": table}
    head, line = summaries._table_rows(record)
    assert head.endswith("  rejection  rejection gain  rejection whole")
    assert len(line) == len(head) and line.split()[-3:] == ["1.500", "1.125", "1.250"]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["DRAFTER", "lookup"])
def test_command(specdec, sentences, tmp_path, drafter):
    files = ["--input_file", sentences, "--output", tmp_path / "record.json"]
    code, out, err = specdec("measure", *FLAGS, f"--drafter={drafter}", *files)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert [row.gamma for row in report_rows.list_rows(parse(record))] == [
        row["gamma"] for row in record["table"]
    ]
    assert out == summaries.measure_summary(record) + "\n"
    assert record["sentences"] == 2 and [row["gamma"] for row in record["table"]] == [1, 2]
    assert set(record["verify_cost"]) == {"1", "2", "3"} and record["cost_ratio"] >= 0
    assert record["acceptance"]["how"] == ("scored" if drafter == "DRAFTER" else "counted")
    assert set(record["acceptance"]["by_rank"]) == ({"top"} if drafter == "DRAFTER" else set())
    assert set(record["acceptance"]["hit_rate_by_depth"]) == set(record["acceptance"]["by_rank"])
    assert "acceptance by depth 1, 2 …" in out and ("tree, k = 8" in out) == (drafter == "DRAFTER")
    assert record["same_positions"] is None and "token verification accepted" not in out
    assert (record["cost_ratio_alone"] is None) == (drafter == "lookup") and "best gamma: " in out


@pytest.mark.slow
def test_command_compares(specdec, sentences, tmp_path):
    files = ["--input_file", sentences, "--output", tmp_path / "record.json"]
    code, out, err = specdec(
        "measure", *FLAGS, "--drafter=DRAFTER", "--compare_alpha", "--temperature=1", *files
    )
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    line = summaries.describe_same_positions(record["same_positions"])
    assert (
        record["same_positions"]["positions"] > 0
        and line in out
        and out == summaries.measure_summary(record) + "\n"
    )
    assert f"<p>{line}.</p>" in page.report([(tmp_path / "record.json", parse(record))])
    code, out, err = specdec("measure", *FLAGS, "--drafter=lookup", "--compare_alpha", *files)
    assert (
        code == 2
        and not out
        and "compare_alpha: got True with drafter='lookup', shortlist=None" in err
    )


def test_figure_shows_the_record(monkeypatch):
    """Curves as they are handed to matplotlib."""
    record = MEASURE | {
        "target": {"name": "a"},
        "drafter": {"name": "b"},
        "cost_ratio": 0.1,
        "verify_cost": {"1": 1.0, "2": 1.2, "4": 1.6},
        "acceptance": ACCEPTED.record(),
        **expectations.expect_improvements(ACCEPTED, [0.1] * 3, {1: 1.0, 2: 1.2, 4: 1.6}, 3),
    }
    drawn, saved = [], []

    class Axes:
        def plot(self, x, y, *_, **how):
            drawn.append((how.get("label"), list(x), list(y)))

        def errorbar(self, x, y, errors, *_, **how):
            assert len(x) == len(y) == len(errors)
            drawn.append((how["label"], list(x), list(y)))

        axhline = set = legend = grid = lambda *_, **__: None

        def get_legend_handles_labels(self):
            return [], []

    class Figure:
        def __init__(self, **_):
            pass

        def subplots(self, rows, columns):
            return [Axes() for _ in range(columns)]

        def set_figheight(self, height):
            assert height > 0

        def draw_without_rendering(self):
            pass

        def suptitle(self, text, **_):
            assert "a with b" in text

        def savefig(self, path, **_):
            saved.append(path)

    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    module = types.ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    plots.draw_measurement(parse(record)).savefig("figure.svg")
    curves = {label: values for label, _, values in drawn}
    assert (
        saved == ["figure.svg"]
        and curves["block"] == [0.8, 0.7, 0.3]
        and curves[None] == [1.0, 1.2, 1.6]
    )
    assert curves["from α, v = 1"] == [row["theorem_3_8"] for row in record["table"]]
    assert curves["k most probable ids"] == [0.8, 0.9]
    assert curves["chain, block"] == [0.8, 0.875]
    assert curves["tree, k = 2: k most probable ids"] == [0.9, 0.85]
    assert "         0.900 0.850 (tree, k = 2: k most probable ids)" in read_macros().curves(
        record["acceptance"]
    )


def test_figure_is_a_picture(tmp_path):
    record = MEASURE | {
        "target": {"name": "a"},
        "drafter": {"name": "b"},
        "cost_ratio": 0.1,
        "verify_cost": {"1": 1.0, "4": 1.6},
        "acceptance": ACCEPTED.record(),
        **expectations.expect_improvements(ACCEPTED, [0.1] * 3, {1: 1.0, 4: 1.6}, 3),
    }
    plots.draw_measurement(parse(record)).savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter="], "drafter: got nothing, expected"),
        (["--gamma_max=0"], "gamma_max: got 0, expected at least 1"),
        (["--gamma_max=65"], "gamma: got 65, expected"),
        (["--widths=1,2"], "widths: got 1, expected at least 2"),
        (["--limit=-1"], "limit: got -1, expected"),
        (
            ["--compare_alpha", "--max_new_tokens=1"],
            "compare_alpha: got True with max_new_tokens=1, expected at least 2",
        ),
        (
            ["--compare_alpha", "--drafter_int8"],
            "drafter_int8=True, expected a model that draws from its own distribution",
        ),
        (["--batch_size=0"], "batch_size: got 0, expected"),
        (["--plot=figure.doc"], "plot: got 'figure.doc', expected a file (.png, .pdf, .svg)"),
        (["--plot=no/such/folder/figure.png"], "in a folder that exists"),
        (["--input_file=no.txt"], "input_file: got 'no.txt', which is no file"),
    ],
)
def test_bad_input(specdec, flags, message):
    code, out, err = specdec("measure", *FLAGS, "--drafter=DRAFTER", *flags)
    assert code == 2 and not out and message in err and err.count("\n") == 1
