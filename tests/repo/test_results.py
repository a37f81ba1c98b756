"""The pages' tables are what the records of `scripts/results.py` render."""

import json
import re
import sys

import pages
import pytest
from absl import app
from absl.flags import FLAGS

from specdec_jax.models.t5 import T5Config

pages.require_checkout()
GAIN = {"median": 2.5, "least": 2.0, "most": 3.0}
ONE = {"median": 1.0, "least": 1.0, "most": 1.0}
RECORD = {
    "machine": {"processor": "A chip", "cores": 2},
    "stages": {
        "pair": {
            "in_a_row": 8,
            "rows": {
                "ende": {
                    "plain, float32": {
                        **dict(improvement=ONE, alpha=None, tokens_per_call=1.0),
                        **dict(ms_per_token=4.0, sentences=9),
                    },
                    "speculative": {
                        **dict(improvement=GAIN, alpha=0.75, tokens_per_call=3.25),
                        **dict(ms_per_token=1.6, sentences=9),
                    },
                }
            },
        },
        "t5x": {"skipped": "T5X is not installed"},
    },
}


@pytest.fixture
def results(load_script, monkeypatch):
    monkeypatch.syspath_prepend(str(pages.ROOT / "scripts"))
    return load_script("results")


def test_the_tables_of_the_pages_are_rendered_from_the_records(results):
    records = results.read_records()
    for page in pages.pages():
        text = page.read_text(encoding="utf-8")
        assert results.render_text(text, records) == text, (
            f"{page.name}: scripts/results.py --render"
        )


def test_a_row_is_a_case_and_a_column_is_a_machine(results):
    pair = {"rows": {}, "in_a_row": 8}
    other = {"machine": {"processor": "B", "cores": 4}, "stages": {"pair": pair}}
    other["stages"]["pair"]["rows"]["ende"] = {
        "more": RECORD["stages"]["pair"]["rows"]["ende"]["plain, float32"]
    }
    third = {"machine": {"processor": "C", "cores": 4}, "stages": {}}
    table = results.make_table("pair ende", [RECORD, other, third])
    assert table.splitlines() == [
        "| bundled pair, one sentence at a time | A chip, 2 cores | B, 4 cores |",
        "|---|---|---|",
        "| plain, float32 | 1.00 (1.00 to 1.00), 4.00 ms a token, 9 sentences | - |",
        "| speculative | 2.50 (2.00 to 3.00), α 0.75, 3.25 tokens a call, 1.60 ms a token | - |",
        "| more | - | 1.00 (1.00 to 1.00), 4.00 ms a token, 9 sentences |",
    ]


def test_rows_whose_drafts_are_verified_as_a_whole_have_no_alpha(results):
    rows = RECORD["stages"]["pair"]["rows"]["ende"]
    cases = "plain", "chain, γ = 4", "tree of widths 3, 2, 1", "dynamic tree of 16 nodes"
    found = dict.fromkeys(cases, rows["speculative"]) | {"plain": rows["plain, float32"]}
    stages = {"trees": {"rows": {"ende T=0": found, "ende T=1": found}}}
    for text, rated in ("ende T=0", cases[1:]), ("ende T=1", cases[3:]):
        _, _, plain, *drafted = results.make_table(
            f"trees {text}", [RECORD | {"stages": stages}]
        ).splitlines()
        assert "α" not in plain and "a call" not in plain
        for case, line in zip(cases[1:], drafted, strict=True):
            assert (", α 0.75, " in line) == (case in rated) and ", 3.25 tokens a call" in line


def test_a_table_of_all_texts_has_a_column_for_each(results):
    record = json.loads(json.dumps(RECORD))
    rows = record["stages"]["pair"]["rows"]["ende"]
    drafters = {"ende T=0": rows, "more T=0": {"plain, float32": rows["plain, float32"]}}
    record["stages"]["drafters"] = {"rows": drafters | {"ende T=1": rows}, "in_a_row": 8}
    table = [
        "| one sentence at a time, over plain: A chip, 2 cores | ende | more |",
        "|---|---|---|",
        "| plain, float32 | 1.00 | 1.00 |",
        "| speculative | 2.50; α 0.75; 3.25 | - |",
    ]
    other = {"machine": {"processor": "B", "cores": 4}, "stages": {}}
    assert results.make_table("drafters * T=0", [record, other]).splitlines() == table
    assert results.make_table("drafters * T=0", [record] * 2).splitlines() == [*table, "", *table]


def test_a_processor_is_named_briefly(results):
    names = "Intel(R) Xeon(R) Processor", "Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz", "AMD EPYC"
    brief = [results.name_processor({"processor": name}) for name in names]
    assert brief == ["Intel Xeon", "Intel Core i7-9750H", "AMD EPYC"]
    families = {(25, 17): "Zen 4", (25, 33): "family 25, model 33", (26, 2): "Zen 5"}
    for family, name in families.items():
        described = {"processor": "AMD EPYC", "processor_family": list(family)}
        assert results.name_processor(described) == f"AMD EPYC ({name})"


def test_machines_have_records_of_their_own(results, tmp_path, monkeypatch):
    """A GPU's host may have the same processor as another machine; a model, another number."""
    monkeypatch.setattr(results, "STAGES", {"a": results.STAGES["pair"]._replace(measure=dict)})
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    one = dict(processor="AMD EPYC", processor_family=[26, 2], cores=2, device="cpu: cpu, 1")
    for change in ({}, {"cores": 4}, {"device": "gpu: NVIDIA H200, 1"}):
        monkeypatch.setattr(results.machine, "describe_machine", lambda change=change: one | change)
        monkeypatch.setitem(results.STAGES, "a", results.STAGES["a"]._replace(measure=lambda _: {}))
        results.measure(results.Settings(None, False), ["a"], again=False)
    names = ["amd-epyc-zen-5-2-cores", "amd-epyc-zen-5-4-cores", "nvidia-h200"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == names


def test_a_run_with_texts_measures_what_one_without_them_did(results):
    full, with_texts = (results.Settings(data, False) for data in (None, "texts"))
    for rows, data, expected in (
        ({"sentences T=0": {}}, False, False),
        ({"sentences T=0": {}}, True, True),  # the folder lacks the stage's texts
        ({"steps": {}}, False, True),
        ({"ende": {}}, True, True),
    ):
        part = {"rows": rows, "command": "", "data": data}
        assert results.is_measured(part, with_texts) is expected
        assert results.is_measured(part, full)
    assert not results.is_measured({"failed": "x"}, full)


def test_machines_that_computed_the_same_share_a_column(results):
    def measure(processor, **rows):
        rows = {case: {"failed": text} for case, text in rows.items()}
        stages = {"tpu": {"rows": {"chips": rows}}} if rows else {}
        return {"machine": {"processor": processor, "cores": 2}, "stages": stages}

    records = [measure("A", x="1"), measure("B", x="1", y="2"), measure("C"), measure("D", x="3")]
    assert results.make_table("tpu chips", records).splitlines()[::2] == [
        "| T5-XXL in bfloat16, by the compiler's estimates | B, 2 cores; A, 2 cores | D, 2 cores |",
        "| x | 1 | 3 |",
    ]


def test_a_quick_run_and_a_busy_machine_are_marked(results):
    quick = json.loads(json.dumps(RECORD))
    quick["stages"]["pair"]["command"] = "scripts/results.py --only=pair --quick"
    head = results.make_table("pair ende", [quick]).splitlines()[0]
    assert head.endswith("| A chip, 2 cores (`--quick`) |")
    assert "| measured by a run in full only | |" in results.make_table("pair more", [quick])
    quick["stages"]["pair"]["load"] = 3.5
    head = results.make_table("pair ende", [quick]).splitlines()[0]
    assert head.endswith("| A chip, 2 cores (`--quick`, on a busy machine) |")


def test_older_records_are_marked(results):
    """Those of sentences, with every one of which ways of decoding took turns."""
    old = json.loads(json.dumps(RECORD))
    del old["stages"]["pair"]["in_a_row"]
    old["stages"]["templates"] = old["stages"]["pair"]  # which times whole jobs
    heads = [
        results.make_table(f"{one} ende", [old]).splitlines()[0] for one in ("pair", "templates")
    ]
    assert heads[0].endswith("| A chip, 2 cores (in turn with every sentence) |")
    assert heads[1].endswith("| A chip, 2 cores |")


def test_a_run_leaves_out_what_one_machine_has_measured_for_all(results, monkeypatch):
    pair = results.STAGES["pair"]
    stages = {"timed": pair, "once": pair._replace(once=True)}
    stages["full"] = pair._replace(minutes=(3, None))
    monkeypatch.setattr(results, "STAGES", stages)
    quick = {"rows": {}, "command": "results.py --quick"}
    for found, full_run, quick_run in (
        ({}, ["timed", "once", "full"], ["timed", "once"]),
        ({"timed": quick, "once": quick}, ["timed", "once", "full"], ["timed"]),
        ({"once": {"rows": {}}, "full": {"rows": {}}}, ["timed", "full"], ["timed"]),
    ):
        monkeypatch.setattr(results, "read_records", lambda found=found: [{"stages": found}])
        for quick_one, expected in ((False, full_run), (True, quick_run)):
            assert results.choose_stages(results.Settings(None, quick_one)) == expected


@pytest.mark.parametrize("data", ["", "no/such/folder", __file__])
def test_data_is_a_folder(results, data):
    FLAGS.unparse_flags()
    FLAGS(["results", f"--data={data}", "--render"])
    with pytest.raises(app.UsageError, match="data: got '.*', expected a folder"):
        results.main([])


def test_a_stage_that_was_not_measured_says_why(results):
    assert "| T5X is not installed | |" in results.make_table("t5x sentences", [RECORD])
    with pytest.raises(ValueError, match="expected a stage of pair"):
        results.make_table("nothing here", [RECORD])


def test_a_page_changes_between_its_marks_only(results):
    text = "a\n<!-- results: pair ende -->\nold\n<!-- end -->\nb <!-- results: t5x x -->"
    new = results.render_text(text, [RECORD])
    assert new.startswith("a\n<!-- results: pair ende -->\n| bundled") and "old" not in new
    assert new.endswith("1.60 ms a token |\n<!-- end -->\nb <!-- results: t5x x -->")
    assert results.render_text(new, [RECORD]) == new


def test_a_run_resumes_and_a_failing_stage_stops_no_other(results, tmp_path, monkeypatch, capsys):
    calls = []

    def stage(name, error=None):
        def measure(settings):
            calls.append(name)
            if error is not None:
                raise error
            return {"text": {}}

        return results.STAGES["pair"]._replace(measure=measure)

    skipped = results.Skipped("no data")
    stages = {
        "a": stage("a"),
        "b": stage("b", RuntimeError("/a/b/c in '/d/e'\nno")),
        "c": stage("c", skipped),
    }
    lost = stage("a", RuntimeError("no memory"))
    monkeypatch.setattr(results, "STAGES", stages)
    monkeypatch.setattr(results, "RECORDS", tmp_path)
    for _ in range(2):
        results.measure(results.Settings(None, True), list(stages), again=False)
    assert calls == ["a", "b", "c", "b", "c"]
    results.measure(results.Settings(None, False), ["a", "b"], again=False)
    results.measure(results.Settings(None, False), ["a"], again=False)
    assert calls[5:] == ["a", "b"]  # in full, but once
    stages["a"] = lost
    results.measure(results.Settings(None, False), ["a"], again=True)  # loses no rows
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text(encoding="utf-8"))["stages"]
    assert found["a"]["rows"] == {"text": {}} and found["c"]["skipped"] == "no data"
    assert (
        found["b"]["failed"] == "RuntimeError: c in 'e' no"
        and "--quick" not in found["a"]["command"]
    )
    assert "2 stages" in capsys.readouterr().out and "tools" in str(sys.modules["tools"])


MARKED = re.compile(r"<!-- results: .*?<!-- end -->", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
# A cell that is a figure: a number with decimals, or with a unit of speed or memory.
FIGURE = re.compile(r"[~<>±]?\s*\d[\d,]*(?:\.\d+|(?:\.\d+)? (?:GB|%|times)\b).*|.*\d (?:ms|µs)\b.*")
# Speed, acceptance and quality in a sentence.
SPOKEN = re.compile(
    r"\d (?:ms|µs)\b|\d\.\d+ times (?:as|the|faster)|BLEU (?:is|was|of) \d|α (?:is|was|of) 0\.\d"
)
# The model card tells how the bundled weights were trained, once.
HISTORY = ("| step |",)


def find_typed_figures(text: str) -> list[str]:
    """Returns rows of tables with figures, and sentences of them, that no record renders.

    What other people measured may stand there, in a table whose header says "paper".
    """
    text = MARKED.sub("", pages.prose(text))
    found = []
    for table in TABLE.findall(text):
        head, *rows = table.splitlines()
        if "paper" in head or head.startswith(HISTORY):
            continue
        for row in rows:
            found += [row] * any(FIGURE.fullmatch(cell.strip()) for cell in row.split("|"))
    return found + SPOKEN.findall(TABLE.sub("", text))


@pytest.mark.parametrize("page", pages.pages(), ids=pages.name_of)
def test_no_figure_is_typed(page):
    """Speed, acceptance and quality are rendered from records, or stand on no page."""
    assert not find_typed_figures(page.read_text(encoding="utf-8"))


def test_typed_figures_are_found():
    table = "| γ | ms a token |\n|---|---|\n| 4 | 1.9 |\n"
    assert find_typed_figures(table) == ["| 4 | 1.9 |"]
    assert find_typed_figures("It takes 12 ms,\nor 2.5 times as long.") == ["2 ms", "2.5 times as"]
    rendered = f"<!-- results: pair ende -->\n{table}<!-- end -->\n"
    assert find_typed_figures(table.replace("| 1.9 |", "| fits; takes 9.9 ms |"))
    for fine in (rendered, f"```\n{table}```\n", table.replace("token", "token in the paper")):
        assert not find_typed_figures(fine)
    assert not find_typed_figures("| name | what |\n|---|---|\n| `x` | T5 1.1, by default 0.6 |\n")


def test_a_slope_above_what_is_demanded_is_named(results):
    from tools.results import scaling

    sizes = [scaling.Size(rows=rows) for rows in (1, 4, 16)]
    demands = [scaling.count_demands(size) for size in sizes]
    # The operations grow with the rows, the bytes kept hardly: weights are most of them.
    assert demands[1]["operations"] == 4 * demands[0]["operations"]
    assert demands[0]["kept"] < demands[1]["kept"] < 2 * demands[0]["kept"]
    rows = scaling.describe_growth([1, 4, 16], [1.0, 4.0, 64.0], [1e6, 1e6, 16e6], demands)
    assert [scaling.grows_faster(row) for row in rows] == [[], [], ["time", "memory"]]
    assert rows[1]["slope"] == pytest.approx(1) and rows[2]["slope"] == pytest.approx(2)
    cell = scaling.format_scaling(rows[2])
    assert "time grows 2.00 (demanded 1.00)" in cell and cell.endswith("; faster: time and memory")
    assert scaling.format_scaling(rows[0]) == "1000.0 ms, 1 MB"
    record = {"scaling": {"rows": {"batch plain": dict(zip("abc", rows))}}}
    assert len(results.list_shortfalls(record)) == 2


def test_a_share_is_of_the_rate_in_the_same_pass(results, monkeypatch):
    from tools.results import limits

    now = [0.0]
    monkeypatch.setattr(limits.time, "perf_counter", lambda: now[0])

    def take(*seconds):
        left = iter((99.0, *seconds))  # the first is not counted
        return lambda: now.__setitem__(0, now[0] + next(left))

    works = {
        "NumPy reads": limits.Work(take(1.0, 2.0, 4.0), 1, 20e9),
        "ours": limits.Work(take(1.0, 1.0, 1.0), 2, 10e9, "NumPy reads", calculates=True),
    }
    rows = limits.time_works(works, 3)
    assert rows["NumPy reads"] == {"ms": 2000.0, "rate": 10.0, "calculates": False}
    assert rows["ours"]["share"] == {"median": 2.0, "least": 1.0, "most": 4.0}
    assert limits.format_limit(rows["NumPy reads"]) == "2000.00 ms, 10 GB a second"
    assert limits.format_limit(rows["ours"]) == (
        "500.00 ms, 20 thousand million operations a second, 2.00 of NumPy's (1.00 to 4.00)"
    )


def test_the_operations_of_an_encoder_are_counted(results):
    from tools.results import limits

    config = T5Config(99, 8, 2, 4, 3, 1, 16)
    weights = 4 * 8 * 8 + 3 * 8 * 16  # of attention, and of a gated feed-forward block
    assert limits.count_encoder(config, 5) == 3 * (2 * 5 * weights + 4 * 8 * 25)
