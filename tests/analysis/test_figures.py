"""`specdec figures`: the paper's tables from our formulas, and records laid beside them."""

import dataclasses
import html
import json
import pathlib
import re
import subprocess
import sys

import gin
import pytest
import tiers
from sample_records import (
    ACCELERATOR,
    AGAINST,
    BENCHMARK,
    COMPARED,
    ESTIMATE,
    MACHINE,
    MEASURE,
    SHOWN,
    parse,
)

from specdec_jax.analysis import formulas
from specdec_jax.analysis.report import page as report_page
from specdec_jax.analysis.report import paper, plots, records, rows
from specdec_jax.analysis.timing import Spread
from specdec_jax.commands import benchmark, main

pytestmark = pytest.mark.usefixtures("theory_once")


def write_page(found):
    return report_page.report([(pathlib.Path(path), parse(record)) for path, record in found])


CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("row", paper.TABLE_1, ids=str)
def test_table_1_to_the_digit(row):
    assert round(formulas.operations(row.alpha, row.gamma), 2) == row.operations
    assert round(formulas.improvement(row.alpha, row.gamma, 0.0), 2) == row.speed


@pytest.mark.parametrize("row", paper.TABLE_4, ids=str)
def test_table_4_to_the_digit(row):
    """Three rows need more digits of α and c than were printed.

    Numbers that are printed so give their factor.
    """
    computed = formulas.improvement(row.alpha, row.gamma, row.cost_ratio)
    blurred = {
        ("EnDe", "T5-base", 1): 2.35,
        ("EnDe", "T5-large", 1): 1.93,
        ("CNN/DM", "T5-large", 1): 1.54,
    }
    name = row.task, row.drafter, row.temperature
    assert (row in report_page.BLURRED) == (name in blurred)
    if name in blurred:
        assert round(computed, 2) == blurred[name]
        assert (
            round(formulas.improvement(row.alpha + 0.005, row.gamma, row.cost_ratio - 0.005), 1)
            == row.expected
        )
    else:
        assert round(computed, 1) == row.expected


def test_tables_2_and_3_agree_on_alpha():
    by_name = {(rate.target, rate.drafter): rate for rate in paper.TABLE_3}
    for row in paper.TABLE_4:
        rate = by_name[f"T5-XXL ({row.task})", row.drafter]
        assert row.alpha == (rate.sampled if row.temperature else rate.argmax)
    for name, alphas in paper.TABLE_5.items():
        assert alphas[0] == by_name["T5-XXL (EnDe)", name].sampled
        assert list(alphas) == sorted(alphas)


@pytest.mark.parametrize("row", paper.TABLE_4, ids=str)
def test_there_is_a_configuration_for_every_row_of_table_2(row):
    task, drafter = {"EnDe": "ende", "CNN/DM": "cnndm"}[row.task], row.drafter.removeprefix("T5-")
    path = (
        CONFIGS / "paper" / (f"{task}_xxl_{drafter}" + ("_t1" if row.temperature else "") + ".gin")
    )
    gin.clear_config()
    gin.parse_config_file(str(path))
    options = gin.get_configurable(benchmark.BenchmarkOptions)(
        target="xxl", drafter="small", input_file="test.txt"
    )
    gin.clear_config()
    assert (options.gamma, options.temperature, options.verifier) == (
        [row.gamma],
        row.temperature,
        "token",
    )
    text = path.read_text(encoding="utf-8").replace("\n# ", " ")
    assert (
        f"α {row.alpha:.2f}, improvement {row.measured}" in text
        and f"configs/paper/{path.name} " in text
    )


def test_rows_of_every_kind_of_record():
    spread = Spread(1.5, 1.25, 1.75)
    assert rows.list_rows(parse(BENCHMARK)) == [
        rows.Row(
            "big",
            "small",
            "7 of ende/test.tsv.gz",
            0.0,
            "block",
            3,
            0.8125,
            0.0625,
            1.375,
            2.75,
            1.625,
            spread,
            0,
            0.03125,
            1.25,
            0.8125,
        ),
        rows.Row(
            "big",
            "small",
            "7 of ende/test.tsv.gz",
            0.0,
            "tree widths:2, mixed",
            None,
            None,
            0.0625,
            1.125,
            1.75,
            None,
            spread,
            0,
        ),
    ]
    assert rows.list_rows(parse(MEASURE)) == [
        rows.Row(
            "big",
            "small",
            "7 built-in sentences",
            1.0,
            "token",
            1,
            0.625,
            0.0625,
            1.25,
            1.625,
            1.24,
            None,
            None,
        )
    ]
    assert rows.list_rows(parse(COMPARED)) == [
        rows.Row(
            "big",
            "lookup,gamma=2",
            "9 of test.txt",
            0.0,
            "token",
            None,
            0.25,
            None,
            None,
            1.125,
            None,
            spread,
            0,
        )
    ]


@pytest.mark.slow
def test_the_compilers_estimates_are_called_that():
    text = write_page([("tpu.json", ESTIMATE)])
    measured, _, estimated = text.partition('<h2 id="estimates">Estimated')
    assert (
        "weights 22.4 GB, needed 23.4 of 32 GB on a device: fits. Arrays over a megabyte that loop "
        "bodies copy: 1." in estimated
    )
    cells = [
        "0",
        "7",
        "0.75",
        "0.02",
        "0.016",
        "0.75",
        "3.25",
        "0.031",
        "1.12",
        "2.50",
        "3.2",
        "3.4",
    ]
    assert (
        re.findall("<td[^>]*>(.*?)</td>", estimated)[: len(cells)] == cells
        and '<th scope="row" class="text">EnDe, t5_1_1/small</th>' in estimated
        and "tpu.json" not in measured
    )
    memory = write_page(
        [("tpu.json", {name: ESTIMATE[name] for name in ESTIMATE if name != "times"})]
    )
    assert "does not fit" not in memory and "by the compiler" not in memory
    assert "does not fit" in write_page([("tpu.json", ESTIMATE | {"fits": False})])


@pytest.mark.slow
def test_what_was_not_measured_is_listed():
    """Each with its command, which the command line understands."""
    what = [
        "T5-XXL with T5-small on an accelerator",
        "T5X's own decoding",
        "The TPU compiler's estimates",
    ]

    def listed(*found):
        return write_page([("a", record) for record in found]).partition(
            "no such record was given"
        )[2]

    assert [name in html.unescape(listed(BENCHMARK)) for name in what] == [True] * 3
    other = BENCHMARK | {"machine": MACHINE | {"device": "gpu: NVIDIA H100, 1"}}
    gpu = other | {"target": {"name": "t5_1_1/xxl"}}
    assert what[0] in listed(other), "another pair on a GPU"
    assert [name in html.unescape(listed(BENCHMARK, gpu, ESTIMATE)) for name in what] == [
        False,
        True,
        False,
    ]
    assert not listed(gpu, ESTIMATE, BENCHMARK | {"against": AGAINST})
    for _, _, command in report_page._tabulate_missing([]).lines[:2]:
        flags = [flag.split("=")[0].removeprefix("--") for flag in command.split()[2:]]
        assert set(flags) <= {
            field.name for field in dataclasses.fields(benchmark.BenchmarkOptions)
        }


def test_another_implementation_is_laid_beside():
    text = write_page([("t5x.json", BENCHMARK | {"against": AGAINST})])
    assert (
        "Time of t5x&#39;s own decoding over ours" in text
        and "Inputs with other tokens than plain decoding: 1." in text
    )
    assert '<th scope="row" class="text">gamma 3</th><td>1.625 (1.250 to 1.750)</td>' in text


@pytest.fixture
def page(tmp_path):
    """The page of three records, written by the command."""
    for name, record in dict(benchmark=BENCHMARK, measure=MEASURE, compared=COMPARED).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")

    def write(name: str) -> str:
        files = [
            f"--records={tmp_path / kind}.json" for kind in ("benchmark", "measure", "compared")
        ]
        assert main.main(["figures", *files, f"--output={tmp_path / name}"]) == 0
        return (tmp_path / name).read_text(encoding="utf-8")

    return write


def test_the_page_shows_the_records(page):
    text = page("report.html")
    cells = [
        re.findall("<t[dh][^>]*>(.*?)</t[dh]>", line) for line in re.findall("<tr>(.*?)</tr>", text)
    ]
    measured = "1.500 (1.250 to 1.750)"
    assert [
        "small",
        "block",
        "3",
        "0.812",
        "0.062 (0.031)",
        "1.38 (1.25)",
        "2.75",
        "1.625",
        measured,
        "0.923 (0.769 to 1.077)",
        "0",
    ] in cells
    assert [
        "small",
        "token",
        "1",
        "0.625",
        "0.062",
        "1.25",
        "1.62",
        "1.240",
        "-",
        "-",
        "-",
    ] in cells
    assert [
        "lookup,gamma=2",
        "token",
        "-",
        "0.250",
        "-",
        "-",
        "1.12",
        "-",
        measured,
        "-",
        "0",
    ] in cells
    assert ["0.9", "10", "1.60", "1.60", "6.86", "6.86"] in cells
    # Table 3: the paper's, and ours at the temperature that was measured.
    assert ["T5-XXL (EnDe)", "bigram", "paper", "0.20", "0.19"] in cells
    assert ["big", "small", "7 of ende/test.tsv.gz", "0.812", "-"] in cells
    assert ["big", "small", "7 built-in sentences", "-", "0.625"] in cells
    assert "A &lt;fast&gt; one, 2 cores" in text and "/some/where" not in text
    # Figures 1 and 5.
    assert "<p>Input: A &lt; B</p>" in text
    assert re.search(r'<p>γ = 3</p>\s*<pre><span class="accepted">Eins &amp;</span>', text)
    assert '<span class="rejected"> zwei</span><span class="corrected"> drei</span></pre>' in text
    # A tree: its nodes, the target's own token, and the mask's title.
    numbers = "".join(f"<td>{number}</td>" for number in ("3", "1", "1.88", "1.75"))
    assert f'<th scope="row" class="text">tree widths:2</th>{numbers}' in text
    assert "<h4>Tree widths:2: call 1 of the first input</h4>" in text
    assert all(
        f">{drawn}</text>" in text
        for drawn in ("[START]", "Zwei", "Drei &lt;", "vier", "sees, of the tree")
    )


def test_a_demo_is_shown_call_by_call():
    text = write_page([("demo.json", SHOWN)])
    assert rows.list_rows(parse(SHOWN)) == []
    assert '<h3 id="run-1">Demo: big with small, T = 0.5</h3>' in text
    assert '<pre><span class="committed">Vier</span><span class="accepted"> fünf</span>' in text
    assert "<h4>Tree widths:2: call 1 of “C &amp; D”</h4>" in text and ">Drei &lt;</text>" in text
    drawn = text.count("<svg")
    assert write_page([("demo.json", SHOWN | {"tree": None})]).count("<svg") == drawn - 2


def test_what_drafts_less_than_it_may_is_predicted_by_the_calls_counted():
    record = json.loads(json.dumps(BENCHMARK))
    record["speculative"][0] |= {
        "prediction": "with_counts",
        "predicted": {"with_lengths": 1.625, "with_counts": 1.375},
    }
    assert [row.predicted for row in rows.list_rows(parse(record))] == [1.375, None]


def test_the_page_stands_alone_and_is_the_same_again(page, theory_once):
    text = page("one.html")
    # Theory, a timeline, bars of two records, a tree and its mask, and the panels of a measurement.
    assert text.count("<svg") == 3 + 1 + 2 + 2 + 5 == text.count("</svg>")
    assert not re.findall(r"<script|<link|<img|src=|@import|url\((?!#)", text)
    theory_once.cache_clear()
    assert text == page("two.html")


def test_synthetic_acceptance_is_marked_and_no_measured_alpha():
    record = json.loads(json.dumps(BENCHMARK)) | {
        "options": BENCHMARK["options"] | {"preset": "t5_1_1/large"},
        "trees": [],
    }
    record["speculative"][0]["synthetic_alpha"] = 0.8
    (row,) = rows.list_rows(parse(record))
    assert (row.verifier, row.sentences) == ("synthetic, α = 0.8", "7 rows of random ids")
    text = write_page([("forced.json", record)])
    assert text.count("synthetic, α = 0.8") == 2  # in the table and beside its bar
    assert ">big</td><td class=" not in text


def test_a_drafter_that_drafts_now_and_then_has_two_rates():
    """Beside other drafters' α stands that per position of the output."""
    benchmark, measure, compared = (
        json.loads(json.dumps(record)) for record in (BENCHMARK, MEASURE, COMPARED)
    )
    benchmark["speculative"][0]["stats"] |= {
        "acceptance_rate": 0.5,
        "acceptance_rate_per_position": 0.0625,
    }
    measure["acceptance"] |= {"alpha": 0.125, "alpha_where_drafted": 0.75}
    compared["variants"][0] |= {"alpha": 0.25, "alpha_where_drafted": 0.875}
    found = [("a.json", benchmark), ("b.json", measure), ("c.json", compared)]
    text = write_page(found)
    table_3 = text.partition("<span>α per position of the output")[2].partition("</table>")[0]
    for cell in ("0.062 (0.500)", "0.125 (0.750)", "0.250 (0.875)"):
        assert f">{cell}<" in text.partition('id="runs"')[2] and f">{cell}<" in table_3


def test_lenience_makes_a_table_of_its_own():
    def record(lenience: float, alpha: float) -> dict:
        changed = json.loads(json.dumps(BENCHMARK))
        changed["trees"] = []
        changed["options"] |= {"verifier": "lenient", "lenience": lenience, "temperature": 1.0}
        changed["speculative"][0]["stats"]["acceptance_rate"] = alpha
        return changed

    named = [(f"{value}.json", record(value, 1 - value / 2)) for value in (0.25, 1.0)]
    text = write_page([*named, ("exact.json", BENCHMARK)])
    table = text.partition("<span>α and improvement by lenience")[2].partition("</table>")[0]
    assert re.findall('<th scope="col">(.*?)</th>', table)[-2:] == ["l = 1", "l = 0.25"]
    cells = ["small", "7 of ende/test.tsv.gz", "1", "3"]
    assert re.findall("<td[^>]*>(.*?)</td>", table) == [
        *cells,
        "0.500, 1.500 (1.250 to 1.750)",
        "0.875, 1.500 (1.250 to 1.750)",
    ]
    assert ">lenient, l = 0.25</td>" in text
    # It is no rate of table 3, which is that of algorithm 1.
    assert "0.500" not in text.partition("<span>α per position")[2].partition("</table>")[0]
    assert "by lenience</span>" not in write_page([("exact.json", BENCHMARK)])


def test_the_timeline_lays_calls_end_to_end():
    figure = plots.draw_timeline(
        [(str(variant["gamma"]), variant["spans"]) for variant in BENCHMARK["example"]["variants"]]
    )
    bars = {}
    for collection in figure.axes[0].collections:
        for path in collection.get_paths():
            (left, bottom), (right, _) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            bars.setdefault(round(bottom + 0.35), []).append((round(left, 6), round(right, 6)))
    assert sorted(bars[0]) == [(0, 1), (1, 3), (3, 5)]
    assert sorted(bars[1]) == [(0, 1), (1, 1.5), (1.5, 2), (2, 4)]


def test_without_records_theory_remains(tmp_path):
    assert main.main(["figures", f"--output={tmp_path / 'theory.html'}"]) == 0
    text = (tmp_path / "theory.html").read_text(encoding="utf-8")
    assert "No records were given" in text and 'href="#theory"' in text
    # Figures 1 and 5 are those of the record that comes with the package.
    assert "Drafting pays: " in text and "AMD EPYC" in text
    assert '<span class="rejected">' in text and "Figure 5: the calls" in text


@pytest.mark.parametrize("missing", ["machine", "options", "speculative", "cost_ratio"])
def test_half_a_record_is_none(tmp_path, capsys, missing):
    path = tmp_path / "half.json"
    path.write_text(
        json.dumps({name: value for name, value in BENCHMARK.items() if name != missing})
    )
    assert main.main(["figures", f"--records={path}", f"--output={tmp_path / 'report.html'}"]) == 2
    error = capsys.readouterr().err
    assert str(path) in error and ": got nothing, expected a value" in error
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("missing", ["weights_gb", "copied_in_loops", "as compiled"])
def test_half_an_estimate_is_none(tmp_path, capsys, missing):
    text = json.dumps(ESTIMATE, indent=2).replace(f'"{missing}"', '"other"')
    (tmp_path / "half.json").write_text(text, encoding="utf-8")
    assert (
        main.main(
            [
                "figures",
                f"--records={tmp_path / 'half.json'}",
                f"--output={tmp_path / 'report.html'}",
            ]
        )
        == 2
    )
    assert (
        f"{missing}: got nothing, expected a value" in capsys.readouterr().err
        and not (tmp_path / "report.html").exists()
    )


@pytest.mark.parametrize(
    "change", [{"against": {"name": "t5x"}}, {"example": {"input": "a", "variants": [{}, {}]}}]
)
def test_what_the_page_cannot_show_is_no_record(tmp_path, capsys, change):
    path = tmp_path / "half.json"
    path.write_text(json.dumps(BENCHMARK | change))
    assert main.main(["figures", f"--records={path}", f"--output={tmp_path / 'report.html'}"]) == 2
    error = capsys.readouterr().err
    assert (
        str(path) in error
        and "got nothing, expected a value" in error
        and not (tmp_path / "report.html").exists()
    )


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '"machine"'])
def test_no_record(tmp_path, capsys, text):
    (tmp_path / "bad.json").write_text(text)
    assert (
        main.main(
            [
                "figures",
                f"--records={tmp_path / 'bad.json'}",
                f"--output={tmp_path / 'report.html'}",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert (
        f"error: {tmp_path / 'bad.json'}: got" in error
        and "in a record of `specdec benchmark`" in error
    )


def test_bad_output(tmp_path, capsys):
    for output in (tmp_path / "report.pdf", tmp_path / "nowhere" / "report.html"):
        assert main.main(["figures", f"--output={output}"]) == 2
        assert f"output: got '{output}', expected" in capsys.readouterr().err


def test_what_was_measured_comes_first():
    """A verdict, a summary, contents, the paper's order; words left, numbers right; none twice."""
    text = write_page([("a.json", BENCHMARK)])
    parts = (
        "Drafting pays: 1.50 (1.25 to 1.75) times",
        "<span>The runs, each by its fastest",
        "Contents",
        "Symbols</h2>",
        "Figures 1 and 5. One input, call by call</h2>",
        "Table 2. Improvement, measured beside printed</h2>",
        "Table 3. α, measured beside printed</h2>",
        "Runs</h2>",
        "a.json",
        "Theory</h2>",
        "<span>Table 1.",
        "<span>Table 5.",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert '<th scope="row" class="text">small</th><td class="text">block</td><td>3</td>' in text
    assert text.count(">Figure 2.") == 1 and "prefers-color-scheme: dark" in text
    links = re.findall('<a href="#([^"]*)"', text)
    assert "run-1" in links and all(text.count(f' id="{link}"') == 1 for link in links)


@tiers.parametrize(
    ("least", "median", "most", "verdict"),
    [
        (1.25, 1.5, 1.75, "Drafting pays: 1.50 (1.25 to 1.75) times"),
        (0.5, 1.5, 1.75, "Drafting may or may not pay: 1.50"),
        (0.5, 0.75, 0.875, "Drafting does not pay: 0.75"),
    ],
    first=1,
)
def test_the_verdict_counts_every_pass(least, median, most, verdict):
    record = json.loads(json.dumps(BENCHMARK)) | {"trees": []}
    gain = {"least": least, "median": median, "most": most}
    record["speculative"][0]["improvement"] = gain
    assert verdict in write_page([("a.json", record)])
    record["speculative"][0]["synthetic_alpha"] = 0.75
    text = write_page([("forced.json", record)])
    assert "No verdict: " in text, "synthetic acceptance says nothing about the drafter"
    assert "No verdict: " in write_page([("measure.json", MEASURE)])


def test_outputs_that_were_not_compared_are_not_called_equal():
    record = json.loads(json.dumps(BENCHMARK))
    record["speculative"][0]["compared"] = record["trees"][0]["compared"] = False
    assert [row.differ for row in rows.list_rows(parse(record))] == [None, None]


def test_plots_have_the_pages_colours():
    """No colour of matplotlib's is left, a text that looks like one is, and plots have a label."""
    record = json.loads(json.dumps(BENCHMARK))
    record["example"]["trees"][0]["nodes"][1]["text"] = 'style="fill: #1f77b4"'
    text = write_page([("a.json", record), ("b.json", MEASURE), ("c.json", ACCELERATOR)])
    drawn = re.findall("<svg.*?</svg>", text, flags=re.DOTALL)
    used = {colour for one in drawn for colour in re.findall(r"var\(--(\w+)\)", one)}
    assert used <= set(re.findall(r"--(\w+): #", text)) and {"ink", "paper", "blue"} <= used
    assert len(re.findall("#[0-9a-f]{6}", "".join(drawn))) == 1 and "fill: #1f77b4" in text
    assert all(re.match('<svg role="img" aria-label="[^"]{5,}" style="min-w', one) for one in drawn)
    ids = re.findall(r'<\w+ id="([^"]*)"', "".join(drawn))
    assert len(ids) == len(set(ids)), "a marker of one plot would stand in another"


@pytest.mark.slow
def test_only_what_reads_or_writes_records_imports_pydantic():
    program = """if True:
        import sys
        from specdec_jax.commands import generate, main
        assert not {"pydantic", "jinja2"} & set(sys.modules), "slow to import"
        from specdec_jax.analysis.report import page
        assert {"pydantic", "jinja2"} <= set(sys.modules)"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_wrong_record_is_named_by_file_line_and_field(tmp_path):
    path = tmp_path / "suite.jsonl"
    wrong = BENCHMARK | {"speculative": [BENCHMARK["speculative"][0] | {"gamma": "3"}]}
    path.write_text("".join(json.dumps(record) + "\n" for record in (BENCHMARK, wrong)))
    message = "suite.jsonl: line 2: speculative.0.gamma: got '3', expected a valid integer, in a "
    with pytest.raises(ValueError, match=re.escape(message)):
        records.read_records(str(path))


def test_what_is_written_is_checked_and_kept(tmp_path):
    """A measurement may have taken hours."""
    path = str(tmp_path / "record.json")
    records.write_record(path, SHOWN)
    assert records.read_records(path) == [parse(SHOWN)]
    wrong = SHOWN | {"calls": [{"input": 3, "lines": []}]}
    with pytest.raises(ValueError, match=r"^calls.0.input: got 3, expected a valid string$"):
        records.write_record(path, wrong)
    assert json.loads((tmp_path / "record.json").read_text()) == wrong


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_a_suite_end_in_any_way(tmp_path, end):
    path = tmp_path / "suite.jsonl"
    path.write_bytes("".join(json.dumps(one) + end for one in (BENCHMARK, MEASURE)).encode())
    assert records.read_records(str(path)) == [parse(BENCHMARK), parse(MEASURE)]
    path.write_bytes(json.dumps(MEASURE, indent=1).replace("\n", end).encode())
    assert records.read_records(str(path)) == [parse(MEASURE)]
