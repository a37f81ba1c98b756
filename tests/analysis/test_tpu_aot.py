"""Tests `scripts/tpu_aot.py` with this machine's CPU in the place of the TPU."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import pytest
from absl import app
from absl.flags import FLAGS
from sample_records import ESTIMATE, parse

import specdec_jax as sd
from specdec_jax.analysis.report import page, records
from specdec_jax.models import families, gemma, t5
from tools import tpu_estimates
from tools.compiled_text import collectives, computations, loop_copies
from tools.lowering import Case, size
from tools.tpu_chips import CHIPS, chip_line

SCRIPTS = pathlib.Path(__file__).parents[2] / "scripts"
PROGRAM = """
import sys
import jax
from absl import app
from specdec_jax.models import families, gemma, t5

families.PRESETS["tiny"] = t5.T5Config(32000, 64, 2, 8, 1, 1, 24)
families.PRESETS["wide-narrow"] = gemma.T5GemmaConfig(
    32000, 32, 4, 2, 16, 2, 24, num_encoder_layers=2, encoder_emb_dim=48, encoder_mlp_dim=40,
    encoder_num_heads=2, encoder_num_kv_heads=1)
sys.path.insert(0, sys.argv[1])
import tpu_aot
tpu_aot._devices = jax.devices
app.run(tpu_aot.main, argv=["tpu_aot.py", *sys.argv[2:]])
"""
TINY = ["--target=tiny", "--drafter=tiny", "--input_length=8", "--max_new_tokens=8"]


def compiled(*flags: str, output: pathlib.Path | None = None) -> tuple[int, dict]:
    flags += (f"--output={output}",) if output else ()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, SCRIPTS, *TINY, *flags], capture_output=True, text=True
    )
    text = output.read_text() if output else done.stdout
    assert text, done.stderr
    return done.returncode, json.loads(text)


def describe(record):
    return page.describe_memory(parse(record))


@pytest.mark.slow
def test_a_pair_is_compiled_and_sized():
    code, record = compiled("--gamma=2", "--iteration")
    assert code == 0 and record["fits"] and record["gamma"] == 2 and record["drafter"] == "tiny"
    assert 0 < record["weights_gb"] <= record["needed_gb"] <= record["memory_gb"] == 32
    assert "tiny with tiny, γ = 2, batch 1, bfloat16" in describe(record)
    assert page.tabulate_times(parse(record)) is None
    assert record["chip"] == "v4" and record["topology"] == "v4:2x2x1"
    # One layer, in bfloat16: the decoder's weights (the drafter's three times: twice drafted, and
    # once as the target).
    weights = 4 * 64 * 16 + 2 * 64 * 16 + 3 * 64 * 24 + 64 * 32000
    floor = 1e3 * (3 * weights * 2 / 1e9 + record["state_gb"]) / CHIPS["v4"].bandwidth
    assert record["floor_ms"] == pytest.approx(floor, abs=1.1e-3)
    assert record["iteration_ms"] == 0  # a CPU's compiler estimates no cycles
    assert "An iteration: 0.25 ms, floor 0." in describe(record | {"iteration_ms": 0.25})
    assert "copy: unknown." in describe(record | {"copied_in_loops": None})


@pytest.mark.slow
def test_a_beam_search_is_compiled_and_sized(tmp_path):
    path = tmp_path / "tpu.json"
    flags = ["--gamma=2", "--num_beams=2", "--batch_size=8", "--max_new_tokens=256", "--iteration"]
    (code, record), (_, wide) = compiled(*flags, output=path), compiled(*flags, "--beam_width=999")
    assert records.read_records(str(path)) == [parse(record)]
    assert (
        code == 0
        and record["fits"]
        and "tiny with tiny, 2 beams, γ = 2, batch 8" in describe(record)
    )
    assert wide["state_gb"] > record["state_gb"] > 0  # a slot of the cache for each node of a call


@pytest.mark.slow
def test_what_does_not_fit_exits_with_1_and_8_bits_take_half():
    code, record = compiled("--gamma=0", "--memory_gb=1e-9", "--quantize=int8")
    weights, embedding = 8 * 64 * 16 + 4 * 64 * 16 + 2 * 3 * 64 * 24 + 64 * 32000, 2 * 64 * 32000
    assert record["weights_gb"] == pytest.approx((weights + embedding) / 1e9, rel=0.05)
    assert "batch 1, bfloat16, target in int8, compiled" in describe(record)
    assert code == 1 and not record["fits"] and record["drafter"] is None


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle:tiny", "recycling", "suffix", "lookahead"])
def test_other_drafters_are_compiled_and_sized(drafter):
    more = [] if drafter == "lookahead" else ["--gamma=3"]
    code, record = compiled(f"--drafter={drafter}", "--iteration", *more)
    plain = compiled("--gamma=0")[1]
    assert code == 0 and record["drafter"] == drafter and record["iteration_ms"] == 0
    assert record["gamma"] == (10 if drafter == "lookahead" else 3)
    assert record.get("nodes") == (57 if drafter == "lookahead" else None)
    own = record["weights_gb"] - plain["weights_gb"]
    assert own > 0 if drafter in ("eagle:tiny", "suffix") else own == 0
    if drafter == "recycling":
        assert record["state_gb"] > plain["state_gb"]
        assert compiled("--drafter=recycling", "--tree=widths:2,2")[1]["nodes"] == 7


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["wide-narrow", "eagle:tiny"])
def test_a_pair_whose_encoder_is_wider_is_compiled_and_sized(drafter):
    code, record = compiled(
        "--target=wide-narrow", f"--drafter={drafter}", "--gamma=2", "--iteration"
    )
    plain = compiled("--target=wide-narrow", "--gamma=0")[1]
    assert code == 0 and record["target"] == "wide-narrow" and record["drafter"] == drafter
    assert 0 < plain["needed_gb"] < record["needed_gb"] and record["iteration_ms"] == 0


@pytest.fixture
def script(load_script):
    return load_script("tpu_aot")


HLO = """
%body (p: (f32[512,1024], f32[8])) -> (f32[512,1024], f32[8]) {
  %copied = f32[512,1024]{1,0} copy(f32[512,1024]{1,0} %x)
  %little = f32[8]{0} copy(f32[8]{0} %y)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (f32[512,1024], f32[8]) while(%init), condition=%cond, body=%body
  %outside = f32[512,1024]{1,0} copy(f32[512,1024]{1,0} %z), \
backend_config={"estimated_cycles":"2100"}
  %r = f32[8]{0} all-reduce(f32[8]{0} %v), backend_config={"estimated_cycles":"1050"}
  %unknown = f32[8]{0} add(%v, %v), backend_config={"estimated_cycles":"9223372036854775807"}
  %kernel = f32[8]{0} custom-call(%v), \
backend_config={"cost_estimate":{"flops":"9","bytes_accessed":"2456000"}}
}
"""


def test_what_is_read_from_a_program():
    assert loop_copies(HLO) == ["f32[512,1024]"] and loop_copies(HLO, least=1) == [
        "f32[512,1024]",
        "f32[8]",
    ]
    assert collectives(HLO) == {"all-reduce": 1}
    lines = computations(HLO)["ENTRY"]
    # 3150 cycles, and 2,456,000 bytes at 1,228 GB/s.
    assert tpu_estimates.estimated_seconds(lines, CHIPS["v4"]) == pytest.approx(5e-6)
    assert tpu_estimates.estimated_seconds(lines, CHIPS["v4"]._replace(clock=2.1)) == pytest.approx(
        3.5e-6
    )


LOOP = """
%catch_up (p: f32[8]) -> f32[8] {
  %pair = f32[8]{0} add(%v, %v), backend_config={"estimated_cycles":"3150"}
}

%draft (p: f32[8]) -> f32[8] {
  %kernel = f32[8]{0} custom-call(%v), \
backend_config={"cost_estimate":{"flops":"9","bytes_accessed":"1228000"}}
  %head = f32[8]{0} add(%v, %v), backend_config={"estimated_cycles":"1050"}
}

%body (p: f32[8]) -> f32[8] {
  %a = f32[8]{0} while(%p), condition=%cond.1, body=%catch_up
  %b = f32[8]{0} while(%a), condition=%cond.2, body=%draft
  %target = f32[8]{0} add(%b, %b), backend_config={"estimated_cycles":"10500"}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %before = f32[8]{0} copy(%p), backend_config={"estimated_cycles":"999999"}
  %w = f32[8]{0} while(%before), condition=%cond.3, body=%body
}
"""


@pytest.mark.parametrize(
    "gamma, pairs, microseconds",
    [(7, True, 10 + 7 * 2), (7, False, 10 + 3 + 6 * 2), (1, True, 10), (0, True, 10)],
)
def test_an_iteration_is_a_pass_of_the_loop_with_gamma_draft_steps(gamma, pairs, microseconds):
    """Only the loop's body counts, with catching up where steps are over one position.

    A draft of one step is no loop of its own.
    """
    text = "\n".join(line for line in LOOP.splitlines() if gamma != 1 or "body=%draft" not in line)
    seconds = tpu_estimates.iteration_seconds(text, CHIPS["v4"], gamma, pairs)
    assert seconds == pytest.approx(1e-6 * microseconds)


PAIR = Case((), "t5_1_1/xxl", "t5_1_1/small", 7)
CONDITIONS = """
%cond.1 (p: s32[]) -> pred[] {
  %constant.2 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %constant.2), direction=LT
}

%cond.2 (p: s32[]) -> pred[] {
  ROOT %lt = pred[] compare(%i, %wanted), direction=LT
}
"""


def test_a_draft_without_a_model_takes_its_own_loops():
    """The first of the two has a known number of passes."""
    text = CONDITIONS + LOOP
    for drafter, steps in (("suffix", 7), ("eagle:t5_1_1/small", 6)):
        case = dataclasses.replace(PAIR, drafter=drafter)
        expected = 1e-3 * (10 + 5 * 3 + steps * 2)
        assert tpu_estimates.iteration_ms(case, CHIPS["v4"], text) == pytest.approx(expected)
        assert tpu_estimates.iteration_ms(case, CHIPS["v4"], None) is None


@pytest.mark.parametrize("more", [dict(tree=sd.Tree((0, 1))), dict(beams=2)])
def test_an_iteration_that_walks_is_a_pass_with_its_inner_loops_at_every_level(more):
    case = Case((), "t5_1_1/xxl", "t5_1_1/small", 2, **more)
    assert tpu_estimates.iteration_ms(case, CHIPS["v4"], LOOP) == pytest.approx(
        1e-3 * (10 + 3 * (3 + 2))
    )
    assert tpu_estimates.iteration_ms(case, CHIPS["v4"], None) is None


class Unreadable:
    """A program whose text JAX cannot read."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: of a later version")


def test_without_the_loops_text_an_iteration_is_single_calls(monkeypatch, capsys):
    assert tpu_estimates.read_text(Unreadable()) is None
    assert "no text of a program: UNIMPLEMENTED" in capsys.readouterr().err
    calls = {("t5_1_1/xxl", 8): 10e-3, ("t5_1_1/xxl", 2): 9e-3, ("t5_1_1/small", 2): 1e-3}
    monkeypatch.setattr(
        tpu_estimates,
        "call_seconds",
        lambda case, chip, preset, width, drafts=False: calls[preset, width],
    )
    plain = dataclasses.replace(PAIR, gamma=0)
    assert tpu_estimates.iteration_ms(PAIR, CHIPS["tpu7x"], None) == 17
    assert (
        tpu_estimates.iteration_ms(plain, CHIPS["tpu7x"], None) == 9
    )  # a step, as over two positions


def test_an_iteration_of_which_no_text_can_be_read_has_no_estimate(monkeypatch, capsys):
    monkeypatch.setattr(tpu_estimates, "call_seconds", lambda *_, **__: Unreadable().as_text())
    assert tpu_estimates.iteration_ms(PAIR, CHIPS["tpu7x"], None) is None
    assert "no estimate: UNIMPLEMENTED" in capsys.readouterr().err


def test_estimates_of_table_2_are_what_the_page_reads(monkeypatch):
    """c, v and the improvement come from the estimated seconds of single calls.

    A step that is estimated too dear is shown both ways.
    """
    seconds = {1: 3.0, 2: 1.0, 4: 1.25, 6: 1.25, 8: 1.5}

    def of_call(case, chip, preset, width, drafts=False):
        return 0.1 if drafts else seconds[width]

    monkeypatch.setattr(tpu_estimates, "call_seconds", of_call)
    found = tpu_estimates.times(PAIR, CHIPS["v4"])
    lines = page.tabulate_times(parse(ESTIMATE | {"times": found})).lines
    assert len(lines) == 12 and lines[0][:5] == ("EnDe, t5_1_1/small", "0", "7", "0.75", "0.02")
    tokens = (1 - 0.75**8) / 0.25
    c, v, gain, c_two, v_two, gain_two = map(float, lines[0][5:11])
    assert (c, v) == (0.033, 0.5) and gain == pytest.approx(tokens / (7 * 0.1 / 3 + 0.5), abs=0.006)
    assert (c_two, v_two) == (0.1, 1.5) and gain_two == pytest.approx(
        tokens / (0.7 + 1.5), abs=0.006
    )
    assert found["target_call_1_ms"] == 3000 and "not a measurement" in found["what"]


def test_c_and_v_are_ratios_of_single_calls(monkeypatch):
    calls = {("t5_1_1/xxl", 8): 9e-3, ("t5_1_1/xxl", 1): 8e-3, ("t5_1_1/small", 1): 1e-3}
    monkeypatch.setattr(
        tpu_estimates,
        "call_seconds",
        lambda case, chip, preset, width, drafts=False: calls[preset, width],
    )
    found = tpu_estimates.estimate_calls(PAIR, CHIPS["v4"])
    assert found == {"target_call_1_ms": 8.0, "c": 0.125, "v": 1.125}


@pytest.fixture
def case(monkeypatch):
    """Two tiny models on this machine's fake devices."""
    monkeypatch.setitem(families.PRESETS, "tiny", t5.T5Config(32000, 64, 2, 8, 1, 1, 24))
    return Case(tuple(jax.devices()), "tiny", "tiny", 2, batch=4, input_length=8, new_tokens=8)


def test_networks_are_shapes_on_the_devices(case):
    rounded = dataclasses.replace(case, int8=True)
    whole, meshed = case.network("tiny"), dataclasses.replace(case, mesh="1x1").network("tiny")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(whole.params))
    assert whole.rules is None and meshed.rules is not None and size(meshed) == size(whole) > 0
    assert size(rounded.network("tiny")) < size(whole)
    assert size(rounded.network("tiny", drafts=True)) == size(
        whole
    )  # only the target's weights are rounded
    assert case.make_drafter() is not None
    assert dataclasses.replace(case, gamma=0).make_drafter() is None


WIDE = 48  # the encoder's width, that of the decoder is 32


@pytest.fixture
def unbalanced(case, monkeypatch):
    """A T5Gemma whose encoder is wider than its decoder."""
    encoder = dict(num_encoder_layers=1, encoder_emb_dim=WIDE, encoder_mlp_dim=24)
    heads = dict(encoder_num_heads=2, encoder_num_kv_heads=1)
    shape = gemma.T5GemmaConfig(500, 32, 4, 2, 16, 1, 24, **encoder, **heads)
    monkeypatch.setitem(families.PRESETS, "wide-narrow", shape)
    return dataclasses.replace(case, target="wide-narrow")


@pytest.mark.parametrize("drafter", ["wide-narrow", "eagle:tiny"])
def test_an_encoder_wider_than_the_decoder_is_lowered(unbalanced, drafter):
    """A drafter without an encoder attends to outputs of its width, another has its own encoder."""
    case = dataclasses.replace(unbalanced, drafter=drafter)
    (network,) = case.make_drafter().encoders
    assert network.vocab_size == 500  # not that of the shape's own family
    cross = network.params["decoder"]["layers_0"]["encoder_decoder_attention"]["key"]["kernel"]
    assert ("encoder" in network.params) == (drafter == "wide-narrow") and len(cross) == WIDE
    if drafter != "wide-narrow":
        projections = case.make_drafter().network.params  # of the decoder's states
        assert projections["target_state"]["kernel"].shape == (32, 64)
    state = case.lowered_start().out_info
    assert len(state.lengths) == 4 and jax.tree.leaves(state.draft_state)


def test_a_mesh_of_more_devices_than_there_are_is_rejected(case):
    assert case.rules() is None
    with pytest.raises(ValueError, match="mesh: got 1x64, expected at most"):
        dataclasses.replace(case, mesh="1x64").rules()


FITS = {"needed_gb": 23.4, "memory_gb": 32, "fits": True, "floor_ms": 10.0, "iteration_ms": 12.5}


@pytest.mark.parametrize(
    "record, expected",
    [
        (FITS, "v4 23.4 of 32 yes 12.50 ms 10.00 ms 1.25"),
        (FITS | {"fits": False, "iteration_ms": None}, "v4 23.4 of 32 no - 10.00 ms -"),
        (
            {"failed": "RESOURCE_EXHAUSTED: used 23G of 15G"},
            "v4 does not fit: RESOURCE_EXHAUSTED: used 23G of 15G",
        ),
        ({"failed": "INTERNAL: no"}, "v4 failed: INTERNAL: no"),
    ],
)
def test_a_chips_line(record, expected):
    assert " ".join(chip_line("v4", 1, json.dumps(record)).split()) == expected


def test_a_process_that_printed_nothing_is_a_line():
    assert chip_line("v4", -9, "") == "v4     failed: exit code -9"


def test_every_chip_has_a_process_and_a_line(script, monkeypatch, capfd):
    asked = []

    def run(command, **how):
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, len(asked) % 2, json.dumps(FITS))

    monkeypatch.setattr(script.subprocess, "run", run)
    assert script.every_chip(["--gamma=3"]) == 1
    assert asked == [["--gamma=3", f"--chip={chip}", "--iteration"] for chip in CHIPS]
    printed = capfd.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[2:]] == list(CHIPS)
    assert (
        "v5e, in a separate process" in printed.err
        and "nothing here is a measurement" in printed.out
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--chip=all", "--times"], "times: got True"),
        (["--chip=all", "--memory_gb=3"], "memory_gb: got 3"),
        (["--chip=all", "--calls"], "calls: got True with --chip=all"),
        (["--calls", "--gamma=0"], "expected a drafting model and a chain"),
        (["--calls", "--drafter=suffix"], "expected a drafting model and a chain"),
        (["--chip=all", "--tree=widths:2"], "tree: got widths:2"),
        (
            ["--quantize=int8", "--mesh=1x4"],
            "quantize: got int8 with --mesh=1x4, expected one device",
        ),
        (["--topology=v5e:2x2"], "expected one of that chip"),
        (["--tree=widths:2", "--num_beams=2"], "tree: got widths:2 with --num_beams=2"),
        (["--tree=widths:2", "--gamma=3"], "tree: got widths:2 with --gamma=3"),
        (["--tree=widths:0"], "expected"),
        (["--beam_width=4"], "beam_width: got 4 without --num_beams"),
        (["--num_beams=2", "--beam_width=1"], "beam_width: got 1"),
        (["--num_beams=2", "--drafter=suffix"], "drafter: got suffix with --num_beams=2"),
        (["--drafter_layers=1", "--drafter=suffix"], "drafter_layers: got 1 with --drafter=suffix"),
        (["--drafter=lookahead", "--gamma=3"], "expected neither: it has its own tree"),
        (["--drafter=recycling", "--tree=dynamic:2,2,4"], "expected a fixed one"),
    ],
)
def test_flags_without_a_meaning_together_are_rejected(script, flags, message):
    FLAGS(["tpu_aot.py", *flags])
    with pytest.raises(app.UsageError, match=message):
        script._check(["tpu_aot.py"])
