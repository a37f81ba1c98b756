"""Commands write through devices and pipes, and reject places and full disks in one line."""

import errno
import os
import pathlib
import stat
import subprocess
import sys

import command_line
import devices
import numpy as np
import pytest
from devices import SPECDEC, Pipe, fill, names, null_device
from sample_records import BENCHMARK, MEASURE

import specdec_jax as sd
from specdec_jax.analysis.report import summaries
from specdec_jax.checkpoints import loader
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import measure as measure_command
from specdec_jax.commands import resumable_output, tune
from specdec_jax.files import locks

disk = devices.disk
pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def commands(pair, tmp_path, monkeypatch):
    """Returns arguments of commands that write a file, but for its name, with made-up figures."""
    monkeypatch.setattr(benchmark_command, "benchmark", lambda *_: (BENCHMARK, []))
    monkeypatch.setattr(measure_command, "measure", lambda *_: MEASURE)
    monkeypatch.setattr(tune, "tune", lambda *_: {"a": 1, "acceptance": {"alpha": None}})
    monkeypatch.setattr(tune, "make_gin_file", lambda *_: "# chosen\n")
    monkeypatch.setattr(summaries, "benchmark_summary", lambda *_: "")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "text").write_text("".join(text + "\n" for text in command_line.TEXT))
    models = [*command_line.MODELS, "--json"]
    return {
        "generate": ["generate", *command_line.MODELS, "Tom", "We", "--output_file"],
        "benchmark": ["benchmark", *models, "--output"],
        "measure": ["measure", *models[:4], "--json", "--gamma_max=2", "--output"],
        "tune": [
            "tune",
            *models[:4],
            "--json",
            "--gamma=2",
            f"--config={inputs / 'gin'}",
            "--output",
        ],
        "tune's choice": ["tune", *models[:4], "--json", "--gamma=2", "--config"],
        "figures": ["figures", "--output"],
        "count": ["count", "--target=TARGET", f"--input_file={inputs / 'text'}", "--output"],
    }


SUFFIX = {"figures": ".html", "count": ".npz"}
COMMANDS = ["generate", "benchmark", "measure", "tune", "tune's choice", "figures", "count"]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if command == "figures" else ())
        for command in COMMANDS
    ],
)
def test_commands_write_through(specdec, commands, tmp_path, command):
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = names(tmp_path / "inputs")
    suffix = SUFFIX.get(command, "")
    device = null_device(folder / f"null{suffix}")
    assert specdec(*commands[command][:-1], f"{commands[command][-1]}={device}")[0] == 0
    assert stat.S_ISCHR(device.stat().st_mode) and names(folder) == [device.name]
    file, link, pipe = (folder / f"{name}{suffix}" for name in ("file", "link", "pipe"))
    link.symlink_to(file.name)
    assert specdec(*commands[command][:-1], f"{commands[command][-1]}={link}")[0] == 0
    assert link.is_symlink() and file.is_file() and not file.is_symlink()
    reader = Pipe(pipe)
    assert specdec(*commands[command][:-1], f"{commands[command][-1]}={pipe}")[0] == 0
    written = reader.read()
    assert written == file.read_bytes() or command == "count" and same_arrays(written, file)
    beside = [] if command in ("tune's choice",) else [f"{link.name}.gin"]
    assert names(folder) == sorted([device.name, file.name, link.name, pipe.name, *beside])
    assert names(tmp_path / "inputs") == sorted({*kept, *(["gin"] if command == "tune" else [])})


def same_arrays(written: bytes, file: pathlib.Path) -> bool:
    (file.parent / "copy").write_bytes(written)  # the archive holds the time
    one, other = np.load(file.parent / "copy"), np.load(file)
    (file.parent / "copy").unlink()
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_job_through_a_pipe_warns_that_it_cannot_resume(specdec, commands, tmp_path):
    code, printed, _ = specdec(*commands["generate"][:-1])
    reader = Pipe(tmp_path / "pipe")
    code, out, err = specdec(*commands["generate"][:-1], f"--output_file={tmp_path / 'pipe'}")
    assert (code, out) == (0, "") and reader.read().decode() == printed
    message = (
        "not a regular file: outputs are written in order, and a run that is killed begins anew"
    )
    assert err == f"{tmp_path / 'pipe'}: {message}\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="the system has no /dev/stdout")
def test_standard_output_by_its_name(pair, tmp_path, quick_environment):
    """Also where it is a file, of which it then keeps what is there."""
    path = tmp_path / "printed"
    models = [
        argument.replace("=TARGET", f"={pair / 'target'}")
        for argument in command_line.MODELS
        if "DRAFTER" not in argument
    ]
    with open(path, "w") as file:
        print("before", file=file, flush=True)
        command = [
            *SPECDEC,
            "generate",
            *models,
            "--gamma=0",
            "--output_file=/dev/stdout",
            "Tom",
            "We",
        ]
        done = subprocess.run(
            command,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | quick_environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        print("after", file=file)
    assert done.returncode == 0, done.stderr
    assert path.read_text().splitlines() == [
        "before",
        *command_line.expected(pair, ["Tom", "We"]),
        "after",
    ]
    assert names(tmp_path) == ["printed"]


def test_a_suite_needs_a_file_to_read_again(specdec, tmp_path):
    device = null_device(tmp_path / "null")
    code, out, err = specdec(
        "benchmark", *command_line.MODELS[:4], "--suite=paper", f"--output={device}"
    )
    assert (code, out) == (
        2,
        "",
    ) and "null', expected a regular file: its records are read again" in err


def test_a_plot_is_written_through(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from specdec_jax.analysis.report import plots

    link = tmp_path / "link.png"
    link.symlink_to("figure.png")
    plots.save(matplotlib.Figure(), str(link))
    assert link.is_symlink() and (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "place", ["folder that is missing", "loop", "link to a missing folder", "folder"]
)
def test_a_place_for_no_file_is_rejected_before_anything_is_loaded(specdec, tmp_path, place):
    output = tmp_path / "out"
    if place == "folder that is missing":
        output = tmp_path / "missing/out"
    elif place == "folder":
        output.mkdir()
    else:
        output.symlink_to("out" if place == "loop" else "missing/out")
    code, out, err = specdec("generate", "--target=no/such", f"--output_file={output}", "Tom")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(output) in err and (
        "expected a file in a folder that exists" in err or "symbolic links" in err
    )


def test_a_read_only_folder_is_rejected_before_anything_is_loaded(specdec, disk):
    if subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
        pytest.skip("no disk can be made read-only here")
    code, out, err = specdec("generate", "--target=no/such", f"--output_file={disk / 'out'}", "Tom")
    assert (code, out) == (2, "") and err.endswith(
        f"expected a file that may be written: {disk} may not\n"
    )


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_journal_that_is_no_file_is_rejected(tmp_path, kind):
    partial = tmp_path / "out.partial"
    os.mkfifo(partial) if kind == "pipe" else partial.mkdir()
    with pytest.raises((OSError, ValueError), match="out.partial") as raised:
        resumable_output.Journal(tmp_path / "out", {}, 1)
    assert (
        "expected a journal or nothing there" in str(raised.value)
        or raised.value.errno == errno.EISDIR
    )


def test_a_journal_that_cannot_be_removed_is_reported(tmp_path):
    partial = tmp_path / "out.partial"
    with resumable_output.Journal(tmp_path / "out", {}, 1) as opened:
        opened.add(0, ["a"])
        if subprocess.run(
            ["mount", "--bind", str(partial), str(partial)], capture_output=True
        ).returncode:
            pytest.skip("nothing can be mounted here")
        try:
            with pytest.raises(OSError, match="busy: .*out.partial"):
                opened.finish()
        finally:
            subprocess.run(["umount", "-l", str(partial)], check=True)
    assert (tmp_path / "out").read_text() == "a\n"


@pytest.mark.parametrize("command", ["train", "distill"])
def test_a_second_training_into_a_folder_is_rejected(specdec, pair, language, tmp_path, command):
    pytest.importorskip("fcntl")
    gin = pathlib.Path(__file__).parents[2] / "configs/train/smoke.gin"
    arguments = {
        "train": [
            f"--gin_file={gin}",
            "--gin_search_paths=/",
            f"--gin.DATA_DIR='{language}'",
            f"--gin.OUTPUT_DIR='{tmp_path}'",
        ],
        "distill": [
            "--target=TARGET",
            "--drafter_shape=1,1,8,1,8,16",
            f"--source_files={language / 'train.tsv'}",
            f"--validation_files={language / 'validation.tsv'}",
            f"--output_dir={tmp_path}",
        ],
    }
    with locks.lock_folder(tmp_path):
        code, out, err = specdec(command, *arguments[command])
    assert (code, out) == (2, "") and not names(tmp_path)
    assert (
        err.splitlines()[-1]
        == f"specdec: error: {tmp_path}: another process is writing it, expected one at a time"
    )


def test_a_checkpoint_goes_where_a_link_leads(specdec, pair, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    code, out, err = specdec(
        "convert", "--source=TARGET", f"--output={tmp_path / 'link'}", "--format=specdec"
    )
    assert (code, out) == (0, "") and (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["empty", "link", "link.gin"] and "config.json" in names(
        tmp_path / "empty"
    )
    model = loader.load(tmp_path / "link", "float32")
    sd.save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == ["empty", "link", "link.gin"]


# A full disk.


def test_a_journal_on_a_full_disk_resumes_when_there_is_space(disk):
    filler, out = fill(disk, leave=12_288), disk / "out"
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial'"):
        with resumable_output.Journal(out, {"a": 1}, 30) as opened:
            for number in range(30):
                opened.add(number, [f"{number} " * 500])
                done = {*opened.done}
    assert done and names(disk) == ["filler", "out.partial"]
    filler.unlink()
    with resumable_output.Journal(out, {"a": 1}, 30) as opened:
        assert opened.done == done
        for number in {*range(30)} - done:
            opened.add(number, [f"{number} " * 500])
        filler = fill(disk)
        with pytest.raises(OSError, match=r"No space left on device: '.*out'"):
            opened.finish()
        assert names(disk) == ["filler", "out.partial"]
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=256k", str(disk)], check=True)
        opened.finish()
    assert out.read_text() == "".join(f"{number} " * 500 + "\n" for number in range(30)) and names(
        disk
    ) == ["out"]


def test_a_journal_that_cannot_begin_leaves_nothing(disk):
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial'"):
        resumable_output.Journal(disk / "out", {"a": "b" * 5000}, 1)
    assert names(disk) == ["filler"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line_and_leaves_what_was_there(specdec, commands, disk, command):
    output = disk / f"out{SUFFIX.get(command, '')}"
    output.write_text("old")
    fill(disk)
    code, _, err = specdec(*commands[command][:-1], f"{commands[command][-1]}={output}")
    assert code == 2 and err.endswith(
        "specdec: error: [Errno 28] No space left on device: "
        f"'{output}{'.partial' * (command == 'generate')}'\n"
    )
    assert (
        "Traceback" not in err
        and output.read_text() == "old"
        and names(disk) == ["filler", output.name]
    )


@pytest.mark.parametrize("form", ["specdec", "huggingface", "t5x", "t5x_legacy"])
def test_a_checkpoint_on_a_full_disk_leaves_nothing(pair, specdec, disk, form):
    fill(disk, leave=24_576)  # enough for some of it
    code, out, err = specdec(
        "convert", "--source=TARGET", f"--output={disk / 'out'}", f"--format={form}"
    )
    assert (code, out, err.count("\n")) == (2, "", 1) and names(disk) == ["filler"]
    assert str(disk / ".out.specdec-new") in err and "space" in err.lower()
    with pytest.raises((OSError, ValueError)):
        sd.save(loader.load(pair / "target", "float32"), disk / "model")
    assert names(disk) == ["filler"]
