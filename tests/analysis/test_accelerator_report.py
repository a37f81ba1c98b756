"""Tests `scripts/accelerator_report.py`: figures are kept, not measured twice, and drawn."""

import html
import json
import os
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app
from absl.flags import FLAGS
from sample_records import ACCELERATOR, parse

from specdec_jax.analysis import machine
from specdec_jax.analysis.matmul_roofline import Products
from specdec_jax.analysis.report import page, plots, records, rows
from specdec_jax.analysis.timing import Spread
from specdec_jax.backends.backend import TPUBackend
from specdec_jax.backends.cpu import native
from specdec_jax.backends.gpu import attention as gpu_attention
from specdec_jax.backends.tpu import fused_step
from specdec_jax.commands import main as specdec
from specdec_jax.models import fused_step_selftest, weight_layouts
from specdec_jax.models.network import Network, random_params
from tools import accelerator_figures, accelerator_peers, accelerator_stages
from tools.accelerator_figures import ModelPair, Peer, ReportSetup, TimedFigure, UnsupportedHere
from tools.accelerator_stages import Stage
from tools.compiled_text import bodies, computations

pytestmark = pytest.mark.usefixtures("quick")

TINY = ReportSetup(
    targets=("t5_1_1/large",),
    tiny=True,
    input_length=4,
    max_new_tokens=6,
    gamma=2,
    widths=(1, 2),
    alphas=(0.5,),
    batches=(1,),
)


PEER = Peer(lambda setup, preset: ModelPair(), lambda *_: lambda: np.zeros((1, 6), np.int32))


@pytest.fixture
def script(load_script):
    return load_script("accelerator_report")


@pytest.mark.parametrize("trial", [None, "a self-test gave other numbers"])
def test_the_record_names_the_kernels_that_run(trial, monkeypatch):
    """Figures with and without them are not of one file."""
    monkeypatch.setattr(fused_step_selftest.GPU_SELF_TEST, "result", lambda: None)
    for kind, module in (("gpu", gpu_attention), ("tpu", fused_step_selftest)):
        monkeypatch.setattr(module.SELF_TEST, "result", lambda: trial)
        rest = "some" if kind == "gpu" else "none"
        assert machine._kernels(kind) == ("Pallas" if trial is None else f"{rest}, {trial}")
    assert machine._kernels("metal") == "none" and machine.describe_machine()[
        "kernel"
    ] == machine._kernels("cpu")
    monkeypatch.setenv(native.SETTING, "off")
    assert machine._kernels("gpu") == machine._kernels("tpu") == "none"


def test_the_drafter_of_a_tiny_report_takes_a_tpus_kernel():
    """So that a try of the script compiles it."""
    config, found = TINY.config(TINY.drafter), []

    def begin():
        params = weight_layouts.pack(
            random_params(jax.random.key(0), module=config.module(), dtype=config.dtype),
            False,
            True,
        )
        network = Network(params, config.module(TPUBackend(True)))
        cache = network.prefill(jnp.ones((1, 4), jnp.int32), jnp.full(1, 4), 16)
        found.append(fused_step.supports_call(network.module, network.params, (1, 2), cache, None))

    jax.eval_shape(begin)
    assert found == [True]


def figure(
    name: str, variant=lambda pair: lambda: jnp.zeros(2), program: str | None = None
) -> TimedFigure:
    def read(seconds, result, before):
        return {
            "milliseconds": seconds._asdict(),
            "size": result.size,
            "after": len(before),
        }

    return TimedFigure(name, {"kind": "call"}, program or name, variant, read)


def fails(error: Exception):
    def variant(pair):
        raise error

    return variant


def rejects(error: Exception):
    def load():
        raise error

    return load


HEAD = {name: value for name, value in ACCELERATOR.items() if name != "figures"}


def run(script, path, planned, threads=2, seconds=1e9):
    """Returns the figures of the record by name, and the names of those without time left."""
    with script.open_report(str(path), HEAD) as record:
        missing = script.run(str(path), record, planned, threads, seconds)
    return {line["figure"]: line for line in json.loads(path.read_text())["figures"]}, missing


@pytest.mark.slow
def test_every_figure_is_in_the_record_whatever_becomes_of_it(script, tmp_path, capsys):
    path, made = tmp_path / "a.json", []

    def counted(pair):
        made.append(pair)
        return lambda: jnp.zeros(2)

    planned = [
        Stage(
            "first",
            "a",
            [figure("good", counted), figure("big", fails(MemoryError("no\nroom")))],
            ModelPair,
        ),
        Stage("second", "b", [figure("later")], ModelPair),
        Stage("third", "c", [figure("absent")], rejects(UnsupportedHere("no such chip"))),
        Stage("fourth", "d", [figure("heavy")], rejects(RuntimeError("RESOURCE_EXHAUSTED"))),
    ]
    found, missing = run(script, path, planned)
    written = json.loads(path.read_text())
    assert missing == [] and written == HEAD | {"figures": list(found.values())}
    assert list(found) == ["good", "big", "later", "absent", "heavy"]
    assert (
        found["good"]["size"] == 2
        and found["good"]["milliseconds"]["median"] > 0
        and found["good"]["after"] == 0
    )
    assert found["big"]["failed"] == "MemoryError: no room" and found["later"]["after"] == 2
    assert (
        found["absent"]["unsupported"] == "no such chip" and "RESOURCE" in found["heavy"]["failed"]
    )
    printed = capsys.readouterr().out
    for text in (
        "first: making dummy weights, then compiling 2 programs for good; big",
        "timing good",
        "big: failed",
        "absent: not supported here: no such chip",
    ):
        assert text in printed
    # A second start measures nothing that is there.
    repeated = Stage("e", "e", [figure("good")], rejects(AssertionError()))
    assert run(script, path, [*planned, repeated]) == (found, [])
    assert len(made) == 1 and json.loads(path.read_text()) == written
    assert os.listdir(tmp_path) == [path.name]


def test_what_does_not_compile_is_reported_at_once(script, monkeypatch, tmp_path):
    """Not after the other programs of the stage, which may take minutes."""
    reported, texts = threading.Event(), []

    def say(text):
        texts.append(text)
        if "big: MemoryError: no room" in text:
            reported.set()

    def slow(pair):
        assert reported.wait(20)
        return lambda: jnp.zeros(2)

    monkeypatch.setattr(script, "say", say)
    planned = [
        Stage(
            "first",
            "a",
            [figure("slow", slow), figure("big", fails(MemoryError("no room")))],
            ModelPair,
        )
    ]
    found, missing = run(script, tmp_path / "a.json", planned)
    assert missing == [] and "milliseconds" in found["slow"]
    assert (
        sum("big" in text for text in texts) == 3
    )  # with the list of figures, and the line itself


def test_what_there_is_no_time_for_is_named(script, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(script.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(script, "_BEGUN", 0.0)

    def slow(pair):
        now[0] += 40.0
        return lambda: jnp.zeros(2)

    stages = [
        Stage(name, kind, [figure(name, slow)], ModelPair)
        for name, kind in (("a", "x"), ("b", "x"), ("c", "y"))
    ]
    for _ in range(2):
        # 40 of 60 s are gone: not enough for another of the kind that took 40, but for one of
        # another kind.
        found, missing = run(script, tmp_path / "a.json", stages, 1, 60.0)
        assert missing == ["b"] and list(found) == ["a", "c"]


@pytest.mark.parametrize(
    "name, value", [("machine", {"device": "gpu"}), ("options", {"gamma": 5}), ("flags", "--xla")]
)
def test_figures_of_another_run_are_rejected(script, tmp_path, name, value):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ACCELERATOR))
    with pytest.raises(ValueError, match=f"got figures with {name}"):
        with script.open_report(str(path), HEAD | {name: value}):
            pass


def test_one_process_writes_at_a_time(script, tmp_path):
    path = str(tmp_path / "a.json")
    with script.open_report(path, HEAD) as record:
        assert record == HEAD | {"figures": []}
        with pytest.raises(ValueError, match="another process is writing it"):
            with script.open_report(path, HEAD):
                pass


@pytest.mark.parametrize("text", ["[1]\n", "nothing", '{"a": 1}\n', "null\n"])
def test_another_file_is_rejected_and_left_as_it_is(script, tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected"):
        with script.open_report(str(path), HEAD):
            pass
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
        script.read_setup()


def test_only_some_kinds_are_measured_and_a_later_run_extends_them(script, tmp_path):
    planned = [Stage(kind, kind, [figure(kind)], ModelPair) for kind in ("copies", "calls", "T5X")]
    assert script.choose_stages(planned, []) == planned
    chosen = script.choose_stages(planned, ["T5X", "copies"])
    assert [stage.kind for stage in chosen] == ["copies", "T5X"]
    path = tmp_path / "a.json"
    assert list(run(script, path, chosen)[0]) == ["copies", "T5X"]
    assert list(run(script, path, planned)[0]) == ["copies", "T5X", "calls"]
    with pytest.raises(app.UsageError, match="only: got call, expected some of copies, calls, T5X"):
        script.choose_stages(planned, ["calls", "call"])


def test_flags_are_what_is_measured(script):
    FLAGS(
        [
            "accelerator_report.py",
            "--targets=t5_1_1/xl,t5_1_1/base",
            "--batches=2",
            "--alphas=0.5,1",
            "--gamma=3",
        ]
    )
    setup = script.read_setup()
    assert (setup.targets, setup.batches, setup.alphas) == (
        ("t5_1_1/xl", "t5_1_1/base"),
        (2,),
        (0.5, 1.0),
    )
    planned = accelerator_stages.stages(setup, {"T5X": PEER})
    assert [stage.name for stage in planned[:3]] == [
        "copies",
        *(f"t5_1_1/{x}: calls and batch 2" for x in ("base", "xl")),
    ]
    names = [figure.name for stage in planned for figure in stage.figures]
    assert len(set(names)) == len(names) and "t5_1_1/xl, alpha 0.5, batch 2" in names
    # What was asked first comes first; each stage of 8 bits has one program for all its forced
    # decodes.
    assert [stage.kind for stage in planned[3:]] == [
        *("searches",) * 2,
        *("int8",) * 2,
        *("T5X",) * 2,
        *("self:int8",) * 2,
    ]
    found = {stage.name: [figure.name for figure in stage.figures] for stage in planned}
    assert found["t5_1_1/xl: int8"] == [
        f"t5_1_1/xl, int8, {x}"
        for x in (
            "call over 1",
            "call over 4",
            "plain, batch 1",
            "alpha 0.5, batch 1",
            "alpha 1, batch 1",
        )
    ]
    assert found["t5_1_1/xl: self:int8"] == [
        f"t5_1_1/xl, self:int8, {x}" for x in ("draft step", "alpha 0.99, batch 1")
    ]
    programs = {stage.name: len({figure.program for figure in stage.figures}) for stage in planned}
    assert programs["t5_1_1/xl: int8"] == 4 and programs["t5_1_1/xl: self:int8"] == 2


def test_ratios_are_to_the_call_of_one_and_to_plain_decoding():
    half, eighth, weights = Spread(0.5, 0.25, 1.0), Spread(0.125, 0.125, 0.125), (None, 3000)
    figures = by_name(
        accelerator_figures.calls(TINY, "t") + accelerator_figures.decodes(TINY, "t", 1)
    )
    before = {"t, call over 1": figures["call over 1"].read(half, weights, {})}
    assert before["t, call over 1"] == {
        "milliseconds": {"median": 15.625, "least": 7.8125, "most": 31.25},
        "v": 1.0,
        "bytes": 3000,
    }
    assert figures["call over 2"].read(Spread(1.0, 1.0, 1.0), None, before)["v"] == 2
    assert figures["draft step"].read(eighth, weights, before)["c"] == 0.25
    assert "c" not in figures["draft step"].read(half, weights, {})
    before = {"t, plain, batch 1": {"milliseconds": {"median": 500.0}}}
    found = figures["alpha 0.5, batch 1"].read(half, decoded(), before)
    assert (
        found["milliseconds"]["median"] == 125
        and found["improvement"] == 4
        and found["iteration_ms"] == 250
    )
    assert found["tokens_per_second"] == 16 and "over_full_plain" not in found


def test_8_bits_are_compared_with_8_bits_and_with_the_full_target():
    half, weights = Spread(0.5, 0.5, 0.5), (None, 3000)
    figures = by_name(accelerator_figures.rounded(TINY, "t"), "int8, ")
    before = {
        "t, call over 3": {"milliseconds": {"median": 31.25}},
        "t, call over 1": {"failed": "no room"},
    }
    assert figures["call over 3"].read(half, None, before)["over_full"] == 0.5
    found = figures["call over 1"].read(half, weights, before)
    assert "over_full" not in found and "v" not in found and found["bytes"] == 3000
    full, plain = ({"milliseconds": {"median": median}} for median in (500.0, 250.0))
    found = figures["plain, batch 1"].read(half, decoded(), {"t, plain, batch 1": full})
    assert found["over_full_plain"] == 4 and "improvement" not in found
    before = {"t, plain, batch 1": full, "t, int8, plain, batch 1": plain}
    found = figures["alpha 0.5, batch 1"].read(half, decoded(), before)
    assert found["over_full_plain"] == 4 and found["improvement"] == 2
    found = figures["alpha 0.5, batch 1"].read(
        half, decoded(), {"t, plain, batch 1": {"failed": "no room"}}
    )
    assert not {"over_full_plain", "improvement"} & found.keys()
    kinds = {figure.about["kind"] for figure in figures.values()}
    assert kinds == {"int8 call", "int8 plain", "int8 speculative"}  # none of the full target's


def test_a_target_that_drafts_for_itself_is_compared_with_its_full_self():
    half = Spread(0.5, 0.5, 0.5)
    step, decode = accelerator_figures.drafted_by_itself(TINY, "t")
    found = step.read(half, (None, 3000), {"t, call over 1": {"milliseconds": {"median": 31.25}}})
    assert found["c"] == 0.5 and found["bytes"] == 3000
    found = decode.read(half, decoded(), {"t, plain, batch 1": {"milliseconds": {"median": 250.0}}})
    assert (
        found["improvement"] == 2
        and decode.about["acceptance"] == "synthetic"
        and decode.about["alpha"] == 0.99
    )
    assert {step.about["kind"], decode.about["kind"]} == {"self:int8 draft step", "self:int8"}


def test_another_librarys_decode_is_compared_with_plain_decoding():
    one = accelerator_figures.beside(TINY, "t", "other", PEER)
    before = {"t, plain, batch 1": {"milliseconds": {"median": 25.0}}}
    found = one.read(Spread(0.3, 0.3, 0.6), one.variant(ModelPair())(), before)
    assert (one.name, one.about["kind"]) == ("t, other, plain", "other")
    assert found["milliseconds"] == pytest.approx({"median": 50.0, "least": 50.0, "most": 100.0})
    assert found["improvement"] == pytest.approx(0.5)
    assert found["tokens_per_second"] == pytest.approx(20.0)
    assert "improvement" not in one.read(Spread(0.3, 0.3, 0.6), np.zeros((1, 6)), {})
    with pytest.raises(ValueError, match=r"tokens: got \(1, 5\), expected \(1, 6\)"):
        one.read(Spread(0.3, 0.3, 0.6), np.zeros((1, 5)), before)


@pytest.mark.parametrize("name", accelerator_peers.PEERS)
def test_a_library_that_is_not_there_is_said_in_a_line(monkeypatch, name):
    monkeypatch.setattr(accelerator_peers.importlib.util, "find_spec", lambda module: None)
    peer = accelerator_peers.PEERS[name]
    with pytest.raises(UnsupportedHere, match=f"^{name.split()[0]} is not installed$"):
        peer.load(TINY, "t5_1_1/large")
    peer.free()


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_transformers_decodes_as_many_tokens(static):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    decode = accelerator_peers.make_generate(TINY, "t5_1_1/large", static)
    tokens = [decode() for _ in range(2)]
    assert tokens[0].shape == (1, 6)
    np.testing.assert_array_equal(*tokens)  # the caches are emptied between


def by_name(figures, before: str = "") -> dict[str, TimedFigure]:
    return {figure.name.removeprefix(f"t, {before}"): figure for figure in figures}


def decoded():
    """Two rows of four tokens, from two calls of the target."""
    stats = type("Stats", (), {"target_calls": 2, "per_row": None})()
    return type("Result", (), {"lengths": np.array([4, 4]), "stats": stats})()


def test_the_floor_is_bytes_over_the_bandwidth_of_copies():
    figures = by_name(accelerator_figures.calls(TINY, "t")) | {
        "copy": accelerator_figures.copy(TINY)
    }
    # 16 copies of 64 KiB, each read and written, in 2 ms at best.
    copy = figures["copy"].read(Spread(0.004, 0.002, 0.008), None, {})
    assert copy["milliseconds"]["median"] == 0.25 and copy["gb_per_second"] == pytest.approx(
        1.048576
    )
    for name in ("call over 1", "draft step", "products"):
        found = figures[name].read(Spread(1.0, 1.0, 1.0), (None, 2**20), {"copy": copy})
        assert found["bytes"] == 2**20 and found["floor_ms"] == pytest.approx(1.0)
        for absent in ({}, {"copy": {"failed": "no room"}}):
            assert "floor_ms" not in figures[name].read(
                Spread(1.0, 1.0, 1.0), (None, 2**20), absent
            )
    assert "bytes" not in figures["call over 2"].read(Spread(1.0, 1.0, 1.0), None, {"copy": copy})


@pytest.mark.slow
@pytest.mark.parametrize("dtype, width", [("bfloat16", 2), ("float32", 4)])
def test_bytes_are_those_of_the_weights_of_a_step(dtype, width):
    config = ReportSetup(tiny=True, dtype=dtype).config("t5_1_1/large")
    params = random_params(jax.random.key(0), module=config.module(), dtype=config.dtype)
    network = Network(weight_layouts.pack(params, False, True), config.module(TPUBackend(True)))
    # In each of 2 layers: 4 + 2 weights of the attentions, 3 of the feed-forward block, all 128 to
    # 128. The head.
    weights = 2 * (4 + 2 + 3) * 128 * 128 + 128 * 512
    assert Products.from_network(network).nbytes == width * weights
    columns = 2 * (4 + 2 + 3) * 128 + 512
    assert (
        Products.from_network(network.in_int8()).nbytes == weights + 4 * columns
    )  # and their scales


def test_copies_are_one_pass_each_within_one_program():
    numbers = jax.ShapeDtypeStruct((2**20,), jnp.int32)
    text = accelerator_figures.copies.lower(numbers).compile().as_text()
    parts = computations(text)
    (loop,) = [name for lines in parts.values() for name in bodies(lines)]

    def written(lines):
        return [
            line
            for line in lines
            if re.search(r" = s32\[1048576\]\S* (?!parameter|get-tuple)", line)
        ]

    assert len(written(parts[loop])) == 1 and not written(parts["ENTRY"])
    assert '"known_trip_count":{"n":"16"}' in text
    np.testing.assert_array_equal(
        accelerator_figures.copies(jnp.arange(3, dtype=jnp.int32)), [16, 17, 18]
    )


@pytest.mark.slow
def test_the_page_shows_what_is_there_and_what_is_not(tmp_path, capsys):
    path = tmp_path / "gpu.json"
    records.write_record(str(path), ACCELERATOR)
    (record,) = records.read_records(str(path))
    assert record == parse(ACCELERATOR) and rows.list_rows(record) == []
    table = page.tabulate_figures(record)
    found = {line[0]: line[1:] for line in table.lines}
    assert found["xxl, call over 8"] == ("1", "1.5", "1.25 to 1.75", "-", "v = 1.06", "-", "-", "")
    assert found["xxl, call over 1"] == ("1", "1.5", "1.25 to 1.75", "1.23", "v = 1", "-", "-", "")
    assert found["xxl, alpha 0.75"] == ("1", "1.5", "1.25 to 1.75", "-", "3.12", "4.500", "750", "")
    ratios = [
        found[f"xxl, {name}"][4]
        for name in ("int8, call over 1", "int8, plain", "int8, alpha 0.75")
    ]
    full = "times the full target's plain"
    assert ratios == ["0.62", f"1.62 {full}", f"2.50; 4.06 {full}"]
    assert found["xxl, self:int8"][4:] == ("1.75", "8.500", "400", "acceptance synthetic")
    assert all(len(line) == len(table.head) for line in table.lines)
    ends = [found[name][-1] for name in ("copy", "xxl, int8", "xxl, beams", "xxl, T5X")]
    assert ends == [
        "3100 GB a second",
        "not supported here: bfloat16",
        "failed: RESOURCE_EXHAUSTED",
        "not run",
    ]
    text = html.unescape(page.report([(pathlib.Path("gpu.json"), record)]))
    assert (
        text.count("not run") == 1
        and '<th scope="col">floor</th>' in text
        and "NVIDIA H100" in text
        and "positions of a target call" in text
    )
    assert "T5-XXL with T5-small on an accelerator" not in text  # it is there
    alone = record.model_copy(update={"figures": record.figures[:1]})
    assert plots.list_accelerator_panels(alone) == {}
    output = tmp_path / "page.html"
    specdec.main(["figures", f"--records={path}", f"--output={output}"])
    assert (
        "An accelerator's figures" in html.unescape(output.read_text())
        and str(output) in capsys.readouterr().out
    )


@pytest.mark.slow
def test_the_figures_of_calls_can_be_measured(script, tmp_path):
    """The rest, which takes a minute to compile, is in the slow test."""
    stages = [
        stage for stage in accelerator_stages.stages(TINY, {}) if stage.kind in ("copies", "calls")
    ]
    chosen = [
        stage._replace(figures=[one for one in stage.figures if one.about["kind"] != "speculative"])
        for stage in stages
    ]
    found, missing = run(script, tmp_path / "a.json", chosen)
    kinds = {line["kind"]: line for line in found.values()}
    assert missing == []
    assert set(kinds) == {"copy", "call", "draft step", "products", "plain"}
    assert not [line for line in kinds.values() if "milliseconds" not in line]
    assert (
        kinds["call"]["v"] > 0
        and kinds["draft step"]["c"] > 0
        and kinds["copy"]["gb_per_second"] > 0
    )
    assert kinds["draft step"]["floor_ms"] > 0 and kinds["products"]["bytes"] == 2 * (
        2 * 9 * 128 * 128 + 128 * 512
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_figures_can_be_measured(script, tmp_path, dtype):
    path = tmp_path / "a.json"
    flags = [
        "--tiny",
        "--compilation_cache_dir=",
        f"--output={path}",
        "--targets=t5_1_1/base",
        "--max_new_tokens=8",
        "--input_length=8",
        "--batches=1,2",
        "--alphas=0.75",
        f"--dtype={dtype}",
        "--threads=2",
    ]
    FLAGS(["accelerator_report.py", *flags])
    script.main([""])
    (record,) = records.read_records(str(path))
    assert [line.figure for line in record.figures] == record.plan
    without = [line for line in record.figures if line.milliseconds is None]
    assert all(line.unsupported for line in without), without
    # Other libraries, and the target in int8 in bfloat16.
    assert {line.kind for line in without} <= {
        *accelerator_peers.PEERS,
        "int8 call",
        "int8 plain",
        "int8 speculative",
    }
    drawn = {line[0]: line[5] for line in page.tabulate_figures(record).lines}
    assert float(drawn["t5_1_1/base, self:int8, alpha 0.99, batch 1"]) > 0
    if dtype == "float32":
        assert re.fullmatch(
            r"[\d.]+; [\d.]+ times the .*", drawn["t5_1_1/base, int8, alpha 0.75, batch 1"]
        )
    FLAGS(["accelerator_report.py", *flags, "--minutes=0"])
    before = path.read_bytes()
    script.main([""])
    assert path.read_bytes() == before


def test_a_checkout_need_not_be_installed(monkeypatch):
    version = machine.metadata.version

    def find(name: str) -> str:
        if name == "specdec_jax":
            raise machine.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(machine.metadata, "version", find)
    assert machine.describe_machine()["specdec_jax"] == "not installed"
