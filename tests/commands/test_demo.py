"""Tests `specdec demo`: its lines while one waits, its marks, and its times and their ratio."""

import json
import re
import types
import xml.etree.ElementTree

import command_line
import numpy as np
import pytest
from sample_records import parse

import specdec_jax as sd
from specdec_jax.analysis import traces
from specdec_jax.analysis.report import records
from specdec_jax.analysis.variants import Variant
from specdec_jax.checkpoints import loader
from specdec_jax.commands import demo, sentences
from specdec_jax.commands import generate as generate_command
from specdec_jax.decoding.trace import TraceStep
from specdec_jax.files import progress
from specdec_jax.models.padding import bucket_length

pytestmark = pytest.mark.usefixtures("quick")
cache, pair, specdec = command_line.cache, command_line.pair, command_line.specdec
MODELS = command_line.MODELS[:-1]  # without γ


def test_demo_prints_what_it_does(specdec, monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.0)
    code, out, err = specdec(
        "demo",
        *command_line.MODELS,
        "--repeats=1",
        "Tom",
        "We",
        "We asked where she left the book.",
    )
    assert code == 0 and "\x1b" not in out + err
    waits = re.findall("^compiling speculative decoding \\(up to (\\d+) tokens", err, re.MULTILINE)
    assert len(waits) == len(set(waits)) == 2
    first, second, _, legend, *_ = out.splitlines()
    assert (
        "proposes up to 2 tokens" in first
        and "the one that the target alone would have written" in second
    )
    assert "{+correction+}" in legend and "{*bonus*}" in legend
    assert "\nTom\n" in out and "\nWe\n" in out and "{+" in out.partition("\nTom\n")[2]
    assert "tokens per target call" in out and out.splitlines()[-3].startswith(
        "next: specdec demo "
    )
    assert out.splitlines()[-5].startswith("kernel: ")


def test_picture_of_the_demo(specdec, tmp_path):
    """The picture is in colour wherever the output goes, without marks, fonts or paths."""
    picture = tmp_path / "demo.svg"
    code, out, _ = specdec(
        "demo", *command_line.MODELS, "--repeats=1", f"--picture={picture}", "Tom", "We"
    )
    root = xml.etree.ElementTree.parse(picture).getroot()
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert (
        code == 0
        and root.tag.endswith("svg")
        and "proposes up to 2 tokens" in text
        and "tokens per target call" in text
    )
    assert "{=" in out and "{=" not in text and "http" not in text and "kernel" not in text
    assert (
        "line-through" in text
        and specdec("demo", *command_line.MODELS, "--picture=demo.png", "Tom")[0] == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "promise"),
    [
        (["--temperature=1"], "is distributed as if the target alone"),
        (["--verifier=lenient", "--lenience=0.5"], "accepts tokens that the target would not"),
    ],
)
def test_demo_promises_no_more_than_it_keeps(specdec, flags, promise):
    assert (
        promise
        in specdec("demo", *command_line.MODELS, "--repeats=1", *flags, "Tom")[1].splitlines()[1]
    )


@pytest.mark.slow
def test_demo_of_a_tree(specdec, tmp_path):
    """One call is drawn, with as many tokens as the sentence says; the times are those of trees."""
    plot = tmp_path / "tree.svg"
    record = tmp_path / "demo.json"
    argv = [
        "demo",
        *MODELS,
        "--repeats=1",
        "--tree=widths:2,1",
        f"--output={record}",
        f"--plot={plot}",
        "Tom",
        "We",
    ]
    code, out, _ = specdec(*argv)
    assert code == 0 and "proposes a tree of up to 4 tokens" in out.splitlines()[0]
    number, sentence, drafted, accept_probs = re.search(
        r"^Call (\d+) of “(\w+)” as a tree of (\d+) drafted tokens,\nof which (\d+) are accepted",
        out,
        re.MULTILINE,
    ).groups()
    drawn = out.partition("# sees\n")[2].partition("\n\n")[0].splitlines()
    assert [line[0] for line in drawn if line[0] != " "] == [*map(str, range(int(drafted) + 1))]
    assert sum("{=" in line for line in drawn) == int(accept_probs)
    call = out.partition(f"\n{sentence}\n")[2].splitlines()[int(number) - 1]
    marked = "".join(re.findall("{=(.*?)=}", "".join(drawn))).replace(" ", "")
    assert marked == "".join(re.findall("{=(.*?)=}", call)).replace(" ", "")
    assert xml.etree.ElementTree.parse(plot).getroot().tag.endswith("svg")
    found = json.loads(record.read_text(encoding="utf-8"))
    assert records.read_records(str(record)) == [parse(found)]
    assert [shown["input"] for shown in found["calls"]] == ["Tom", "We"]
    assert (found["tree"]["input"], found["tree"]["call"]) == (sentence, int(number))
    assert (len(found["tree"]["nodes"]), len(found["tree"]["path"])) == (
        int(drafted) + 1,
        int(accept_probs) + 1,
    )
    pieces = [text.strip() for line in found["calls"][0]["lines"] for _, text in line]
    assert pieces and all(piece in out for piece in pieces)
    assert (
        "tokens per target call" in out
        and specdec(*argv[:-3], f"--plot={tmp_path / 'no.bmp'}", "Tom")[0] == 2
    )


def test_every_call_is_traced(specdec):
    code, out, _ = specdec("demo", *MODELS, "--repeats=1", "--trace", "--gamma=2", "Tom", "We")
    titles = re.findall(r"^ *# sees +p +q +p/q$", out, re.MULTILINE)
    rows = re.findall(r"^\d [■·]+ +([\d.e-]+) +([\d.e-]+) +([\d.e+-]+) [│├└ ]", out, re.MULTILINE)
    assert code == 0 and len(titles) > 1 and rows
    for p, q, ratio in rows:
        assert float(ratio) == pytest.approx(float(p) / float(q), rel=0.02)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tree=widths:2", "--gamma=3"], "gamma: got 3, expected an integer from 0 to 2"),
        (["--tree=wide"], "tree: got 'wide', expected widths:"),
        (["--plot=a.svg"], "plot: got 'a.svg' without a tree"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_trees_that_cannot_be_shown(specdec, flags, message):
    code, _, err = specdec(
        "demo", "--target=TARGET", "--drafter=DRAFTER", "--dtype=float32", *flags, "Tom"
    )
    assert code == 2 and message in err


@pytest.mark.parametrize("tree", ["widths:2", "widths:1,1:drawn", "dynamic:2,2,4"])
@pytest.mark.parametrize("command", ["demo", "generate"])
def test_a_chains_verifier_beside_a_tree_is_rejected_before_anything_loads(
    specdec, monkeypatch, command, tree
):
    monkeypatch.setattr(loader, "load", lambda *_, **__: pytest.fail("loaded"))
    models = ["--target=TARGET", "--drafter=DRAFTER"]
    code, out, err = specdec(
        command, *models, f"--tree={tree}", "--verifier=token", "--gamma=auto", "Tom"
    )
    assert (code, out, err.count("\n")) == (
        2,
        "",
        1,
    ) and "verifier: got 'token' beside a tree" in err


def test_a_chains_verifier_verifies_a_tree_with_one_branch():
    for options in (demo.DemoOptions, generate_command.GenerateOptions):
        options(target="a", drafter="b", tree="widths:1,1", verifier="token", gamma="auto").check()


def test_demo_of_nothing(specdec):
    code, out, err = specdec("demo", *command_line.MODELS, "--repeats=1", "", " ")
    assert (
        code == 0
        and out.endswith("nothing to time: no sentence has any text\n")
        and "plain" not in err
    )


def test_printed_times_give_the_printed_ratio():
    """Three passes have the ratios 3, 1 and 3.4; that of the median times is 1.7."""
    passes = {"plain": [6.0, 4.0, 10.2], "speculative": [2.0, 4.0, 3.0]}
    stats = types.SimpleNamespace(target_calls=2)
    result = types.SimpleNamespace(lengths=np.array([4]), stats=stats)
    text = demo.compare_times(
        **{
            name: Variant(1, None, seconds=found, results=[result])
            for name, found in passes.items()
        }
    )
    plain, speculative = (
        float(re.search(f"^{name} +([0-9.]+) ms", text, re.MULTILINE)[1]) for name in passes
    )
    ratio, least, most = re.search(
        "^ratio +([0-9.]+), .*\\(([0-9.]+) to ([0-9.]+)\\)", text, re.MULTILINE
    ).groups()
    assert (ratio, least, most) == (
        "3.00",
        "1.00",
        "3.40",
    ) and plain / speculative == pytest.approx(float(ratio), abs=0.005)
    assert "4 tokens in 6 s" in text and "2.00 tokens per target call" in text


KINDS = [
    ("committed", "Tom"),
    ("accepted", " lernt"),
    ("rejected", " sehr"),
    ("corrected", " Deutsch"),
    ("bonus", "."),
]


def test_marks_and_colours():
    assert demo.render(KINDS, colours=False).plain == "Tom {=lernt=} [-sehr-] {+Deutsch+}{*.*}"
    line = demo.render(KINDS, colours=True)
    assert line.plain == "Tom lernt sehr Deutsch."
    styles = {line.plain[span.start : span.end]: span.style for span in line.spans}
    assert styles == {
        "Tom": "dim",
        "lernt": "green",
        "sehr": "red strike",
        "Deutsch": "blue bold",
        ".": "cyan bold",
    }
    assert demo.render([("rejected", " ")], colours=False).plain == " [-␣-]"


def test_a_bonus_is_no_correction():
    target = types.SimpleNamespace(
        eos_ids=(1,), vocabulary=types.SimpleNamespace(piece=lambda token: f" {token}")
    )
    steps = [
        TraceStep([5, 6], None, 7, 2, None),
        TraceStep([8], 9, 3, 2, None),
        TraceStep([], None, 4, 0, None),
    ]
    kinds = [
        [kind for kind, _ in line if kind != "committed"]
        for line in traces.trace_lines(steps, target)
    ]
    assert kinds == [["accepted", "bonus"], ["accepted", "rejected", "corrected"], ["bonus"]]
    assert {kind for kind, _ in traces.LEGEND} == set(demo._STYLES)


def test_the_built_in_sentences_need_one_shape():
    vocabulary = sd.load("ende/target", dtype="float32").vocabulary
    found = sentences.read_built_in_sentences()
    assert len({bucket_length(len(vocabulary.encode(text)) + 1) for text in found}) == 1
    assert len(found) == len(set(found)) > demo._SENTENCES
    assert sentences.read_sentences([], sentences.BUILT_IN) == found
