"""`scripts/accelerator_report.py`: a line for each figure, whatever happens to it, none measured twice,
and the page that draws them."""

import html
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from absl.flags import FLAGS
from sample_records import ACCELERATOR

from specdec_jax.analysis import accelerators, machine
from specdec_jax.analysis.accelerators import Figure, NotHere, Pair, Setup, Stage
from specdec_jax.analysis.report import accelerators as laid_out
from specdec_jax.analysis.report import page, rows
from specdec_jax.analysis.timing import Spread
from specdec_jax.commands import main as specdec
from specdec_jax.models import fused_step, fused_trial, gpu_attention, layouts, native
from specdec_jax.models.network import Network, random_params

TINY = Setup(
    targets=("t5_1_1/large",),
    tiny=True,
    input_length=4,
    max_new_tokens=6,
    gamma=2,
    widths=(1, 2),
    alphas=(0.5,),
    batches=(1,),
)


@pytest.fixture
def script(load_script):
    return load_script("accelerator_report")


@pytest.mark.parametrize("trial", [None, "a trial gave other numbers"])
def test_the_machine_says_which_kernels_run(trial, monkeypatch):
    """Figures with and without them are not of one file."""
    for kind, module in (("gpu", gpu_attention), ("tpu", fused_trial)):
        monkeypatch.setattr(module.TRIAL, "result", lambda: trial)
        assert machine._kernels(kind) == ("Pallas" if trial is None else "none, a trial gave other numbers")
    assert machine._kernels("metal") == "none" and machine.machine()["kernel"] == machine._kernels("cpu")
    monkeypatch.setenv(native.SETTING, "off")
    assert machine._kernels("gpu") == machine._kernels("tpu") == "none"


def test_the_drafter_of_a_tiny_report_takes_a_tpus_kernel():
    """So that a try of the script compiles it."""
    config, found = TINY.config(TINY.drafter), []

    def begin():
        params = layouts.pack(random_params(jax.random.key(0), module=config.module(), dtype=config.dtype), False, True)
        network = Network(params, config.module(fused=True), together=2)
        cache = network.prefill(jnp.ones((1, 4), jnp.int32), jnp.full(1, 4), 16)
        found.append(fused_step.fits(network.module, network.params, (1, 2), cache, None))

    jax.eval_shape(begin)
    assert found == [True]


def figure(name: str, arm=lambda pair: lambda: jnp.zeros(2), program: str | None = None) -> Figure:
    read = lambda seconds, result, before: {
        "milliseconds": seconds._asdict(),
        "size": result.size,
        "after": len(before),
    }
    return Figure(name, {"kind": "call"}, program or name, arm, read)


def fails(error: Exception):
    def arm(pair):
        raise error

    return arm


def refuses(error: Exception):
    def load():
        raise error

    return load


HEAD = {"accelerator_report": 1, "machine": {"device": "cpu"}, "options": {"gamma": 7}}


def test_every_figure_is_a_line_whatever_becomes_of_it(script, tmp_path, capsys):
    path, made = tmp_path / "a.jsonl", []

    def counted(pair):
        made.append(pair)
        return lambda: jnp.zeros(2)

    planned = [
        Stage("first", "a", [figure("good", counted), figure("big", fails(MemoryError("no\nroom")))], Pair),
        Stage("second", "b", [figure("later")], Pair),
        Stage("third", "c", [figure("absent")], refuses(NotHere("no such chip"))),
        Stage("fourth", "d", [figure("heavy")], refuses(RuntimeError("RESOURCE_EXHAUSTED"))),
    ]
    with script.Lines(str(path), HEAD) as lines:
        assert script.run(lines, planned, 2, 1e9) == []
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert written[0] == HEAD
    found = {line["figure"]: line for line in written[1:]}
    assert list(found) == ["good", "big", "later", "absent", "heavy"]
    assert found["good"]["size"] == 2 and found["good"]["milliseconds"]["median"] > 0 and found["good"]["after"] == 0
    assert found["big"]["failed"] == "MemoryError: no room" and found["later"]["after"] == 2
    assert found["absent"]["unsupported"] == "no such chip" and "RESOURCE" in found["heavy"]["failed"]
    printed = capsys.readouterr().out
    for text in ("first: filling weights, then compiling 2 programs for good; big", "timing good", "big: failed",
                 "absent: not supported here: no such chip"):  # fmt: skip
        assert text in printed
    # A second start measures nothing that is there.
    repeated = Stage("e", "e", [figure("good")], refuses(AssertionError()))
    with script.Lines(str(path), HEAD) as again:
        assert script.run(again, [*planned, repeated], 2, 1e9) == []
    assert len(made) == 1 and len(path.read_text().splitlines()) == 6


def test_what_there_is_no_time_for_is_named(script, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script, "_BEGUN", 0.0)

    def slow(pair):
        now[0] += 40.0
        return lambda: jnp.zeros(2)

    stages = [Stage(name, kind, [figure(name, slow)], Pair) for name, kind in (("a", "x"), ("b", "x"), ("c", "y"))]
    with script.Lines(str(tmp_path / "a.jsonl"), HEAD) as lines:
        # 40 of 60 s are gone: not enough for another of the kind that took 40, but for one of another kind.
        assert script.run(lines, stages, 1, 60.0) == ["b"] and list(lines.found) == ["a", "c"]
        assert script.run(lines, stages, 1, 60.0) == ["b"]


@pytest.mark.parametrize("name, value", [("machine", {"device": "gpu"}), ("options", {"gamma": 5}), ("flags", "--xla")])
def test_figures_of_another_run_are_refused(script, tmp_path, name, value):
    path = str(tmp_path / "a.jsonl")
    with script.Lines(path, HEAD) as lines:
        lines.add({"figure": "a", "kind": "call"})
    with pytest.raises(ValueError, match=f"got figures with {name}"):
        script.Lines(path, HEAD | {name: value})


def test_a_line_that_was_cut_short_is_measured_again(script, tmp_path):
    path = tmp_path / "a.jsonl"
    with script.Lines(str(path), HEAD) as lines:
        lines.add({"figure": "a", "kind": "call"})
    whole = path.read_bytes()
    for begun, figures in ((whole + b'{"figure": "b", "ki', ["a"]), (whole[:9], [])):
        path.write_bytes(begun)
        with script.Lines(str(path), HEAD) as lines:
            assert list(lines.found) == figures
        assert whole.startswith(path.read_bytes()) and path.read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("text", ["[1]\n", "nothing\n", "nothing", '{"a": 1}\n', "null\n"])
def test_another_file_is_refused_and_left_as_it_is(script, tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        script.Lines(str(path), HEAD)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--targets=t5_1_1/huge"], "targets: got"),
        (["--batches=0"], "batches: got"),
        (["--alphas=1.5"], "alphas: got"),
        (["--tree=oak"], "tree: got 'oak'"),
    ],
)
def test_bad_flags(script, flags, message):
    FLAGS(["accelerator_report.py", *flags])
    with pytest.raises(app.UsageError, match=message):
        script.setup_of()


def test_flags_are_what_is_measured(script):
    FLAGS(["accelerator_report.py", "--targets=t5_1_1/xl,t5_1_1/base", "--batches=2", "--alphas=0.5,1", "--gamma=3"])
    setup = script.setup_of()
    assert (setup.targets, setup.batches, setup.alphas) == (("t5_1_1/xl", "t5_1_1/base"), (2,), (0.5, 1.0))
    planned = accelerators.stages(setup, {"T5X": None})
    assert [stage.name for stage in planned[:3]] == [
        "copies",
        *(f"t5_1_1/{x}: calls and batch 2" for x in ("base", "xl")),
    ]
    names = [figure.name for stage in planned for figure in stage.figures]
    assert len(set(names)) == len(names) and "t5_1_1/xl, alpha 0.5, batch 2" in names


def test_ratios_are_to_the_call_of_one_and_to_plain_decoding():
    half = Spread(0.5, 0.25, 1.0)
    figures = {
        one.name.split(", ", 1)[1]: one for one in accelerators._calls(TINY, "t") + accelerators._decodes(TINY, "t", 1)
    }
    before = {"t, call over 1": figures["call over 1"].read(half, None, {})}
    assert before["t, call over 1"] == {"milliseconds": {"median": 15.625, "least": 7.8125, "most": 31.25}, "v": 1.0}
    assert figures["call over 2"].read(Spread(1.0, 1.0, 1.0), None, before)["v"] == 2
    assert figures["draft step"].read(Spread(0.125, 0.125, 0.125), None, before)["c"] == 0.25
    assert "c" not in figures["draft step"].read(half, None, {})
    row = type("Stats", (), {"target_calls": 2, "per_row": None})()
    result = type("Result", (), {"lengths": np.array([4, 4]), "stats": row})()
    before = {"t, plain, batch 1": {"milliseconds": {"median": 500.0}}}
    found = figures["alpha 0.5, batch 1"].read(half, result, before)
    assert found["milliseconds"]["median"] == 125 and found["improvement"] == 4 and found["iteration_ms"] == 250
    assert found["tokens_per_second"] == 16


def test_the_page_shows_what_is_there_and_what_is_not(tmp_path, capsys):
    path = tmp_path / "gpu.jsonl"
    head = {name: value for name, value in ACCELERATOR.items() if name != "figures"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *ACCELERATOR["figures"])))
    (record,) = rows.read_records(str(path))
    assert record == ACCELERATOR and rows.rows(record) == []
    found = {line[0]: line[1:] for line in laid_out.lines(record)}
    assert found["xxl, call over 8"] == (1, "1.5", "1.25 to 1.75", "v = 1.06", "-", "-", "")
    assert found["xxl, alpha 0.75"] == (1, "1.5", "1.25 to 1.75", "3.12", "4.500", "750", "")
    ends = [found[name][-1] for name in ("copy", "xxl, int8", "xxl, beams", "xxl, T5X")]
    assert ends == ["3100 GB a second", "not supported here: bfloat16", "failed: RESOURCE_EXHAUSTED", "not run"]
    text = html.unescape(page.report([(pathlib.Path("gpu.jsonl"), record)]))
    assert text.count("not run") == 1 and "NVIDIA H100" in text and "positions of a target call" in text
    assert "T5-XXL with T5-small on an accelerator" not in text  # it is there
    assert laid_out.plot(record | {"figures": record["figures"][:1]}) is None
    output = tmp_path / "page.html"
    specdec.main(["figures", f"--records={path}", f"--output={output}"])
    assert "An accelerator's figures" in html.unescape(output.read_text()) and str(output) in capsys.readouterr().out


def test_the_figures_of_calls_can_be_measured(script, tmp_path):
    """The rest, which takes a minute to compile, is in the slow test."""
    stages = [stage for stage in accelerators.stages(TINY, {}) if stage.kind in ("copies", "calls")]
    chosen = [
        stage._replace(figures=[one for one in stage.figures if one.about["kind"] != "speculative"]) for stage in stages
    ]
    with script.Lines(str(tmp_path / "a.jsonl"), HEAD) as lines:
        assert script.run(lines, chosen, 2, 1e9) == []
    kinds = {line["kind"]: line for line in lines.found.values()}
    assert set(kinds) == {"copy", "call", "draft step", "products", "plain"}
    assert not [line for line in kinds.values() if "milliseconds" not in line]
    assert kinds["call"]["v"] > 0 and kinds["draft step"]["c"] > 0 and kinds["copy"]["gb_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_figures_can_be_measured(script, tmp_path, dtype):
    path = tmp_path / "a.jsonl"
    flags = [
        "--tiny", "--compilation_cache_dir=", f"--output={path}", "--targets=t5_1_1/base", "--max_new_tokens=8",
        "--input_length=8", "--batches=1,2", "--alphas=0.75", f"--dtype={dtype}", "--threads=2",
    ]  # fmt: skip
    FLAGS(["accelerator_report.py", *flags])
    script.main([""])
    (record,) = rows.read_records(str(path))
    assert [line["figure"] for line in record["figures"]] == record["plan"]
    without = [line for line in record["figures"] if "milliseconds" not in line]
    assert all("unsupported" in line for line in without), without
    assert len(without) <= 3  # T5X, and 8 bits in bfloat16
    FLAGS(["accelerator_report.py", *flags, "--minutes=0"])
    before = path.read_bytes()
    script.main([""])
    assert path.read_bytes() == before
