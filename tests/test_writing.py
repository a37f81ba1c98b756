"""What is written: whole or not at all, through links and devices, over nothing that is not ours, by one process, on full disks."""

import ast
import errno
import os
import pathlib
import stat
import subprocess
import sys

import numpy as np
import pytest
import test_cli
from devices import Pipe, fill, null_device, small_disk
from test_layers import MODULES

import specdec_jax as sd
from specdec_jax import benchmark, checkpoints, journal, measuring, records, tuning, writing

pair, cache, specdec = test_cli.pair, test_cli.cache, test_cli.specdec
pytestmark = pytest.mark.usefixtures("quick")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk") as folder:
        yield folder


# Nothing else writes.

WRITERS = {"write_text", "write_bytes", "savefig", "savez", "savez_compressed", "tofile", "dump", "symlink_to", "touch"}
SYSTEM = {"open", "replace", "rename", "link", "mknod", "truncate"}  # of `os`
MAY_WRITE = {
    ("journal", "open"): "grows by a line for every result",
    ("runs", "open"): "the log of a training grows by a line for every record",
    ("formats.safetensors_files", "open"): "a shard grows by a tensor, in a folder that appears whole",
    ("plots", "savefig"): "into memory",
    ("drafters.ngrams", "savez_compressed"): "into memory",
    ("cli", "os.open"): "the null device, in place of a stream that is lost",
}


def writes(tree: ast.AST) -> set[str]:
    """What in a module opens files for writing, or gives them names."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, values = ast.unparse(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        name = called.rpartition(".")[2]
        if called.partition(".")[0] in ("os", "shutil"):
            if called.startswith("shutil") or name in SYSTEM:
                found.add(called)
        elif name == "open" and any(set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes):
            found.add("open")
        elif name in WRITERS:
            found.add(name)
    return found


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"writing"}))
def test_nothing_else_writes(module):
    rest = writes(MODULES[module]) - {name for of, name in MAY_WRITE if of == module}
    # Of a training's half written checkpoint.
    assert rest - ({"shutil.rmtree"} if module == "runs" else set()) == set()


def test_what_may_write_does():
    assert all(name in writes(MODULES[module]) for module, name in MAY_WRITE)


@pytest.mark.parametrize(
    "text",
    ["open(p, 'w')", "p.open(mode='ab')", "p.write_text('')", "os.replace(a, b)", "np.savez(p)", "shutil.copy(a, b)", "open(p, 'r+b')"],
)  # fmt: skip
def test_writing_is_seen(text):
    assert writes(ast.parse(text)) and not writes(
        ast.parse("open(p, 'rb'); open(p); p.read_text(); store.open(x, 'zarr')")
    )


# Regular files.


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path):
    path, other = tmp_path / "out", tmp_path / "out.part"
    other.write_text("not ours")
    writing.write_file(path, "ä")
    assert path.read_text(encoding="utf-8") == "ä" and stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    path.chmod(0o640)
    before = path.stat().st_ino
    with writing.new_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == "ä".encode()
    assert path.read_bytes() == b"new" and stat.S_IMODE(path.stat().st_mode) == 0o640 and path.stat().st_ino != before
    with pytest.raises(KeyboardInterrupt), writing.new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new" and other.read_text() == "not ours"
    assert names(tmp_path) == ["out", "out.part"]


def umask() -> int:
    os.umask(mask := os.umask(0))
    return mask


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root may give files away")
def test_a_file_keeps_its_owner(tmp_path):
    path = tmp_path / "out"
    path.touch()
    os.chown(path, 12345, 12346)
    writing.write_file(path, "x")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


def test_links_are_followed(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    target, link, dangling = tmp_path / "there/file", tmp_path / "here/link", tmp_path / "here/dangling"
    target.write_text("old")
    (tmp_path / "here/first").symlink_to("../there/file")
    link.symlink_to("first")
    dangling.symlink_to("../there/new")
    for path, content in ((link, "by two links"), (dangling, "made")):
        writing.write_file(path, content)
        assert path.is_symlink() and path.read_text() == content
    assert names(tmp_path / "there") == ["file", "new"] and names(tmp_path / "here") == ["dangling", "first", "link"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels of symbolic links: .*loop"):
        writing.write_file(tmp_path / "loop", "x")
    assert (tmp_path / "loop").is_symlink()


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(OSError, match=r"directory: .*folder"):
        (tmp_path / "folder").mkdir()
        writing.write_file(tmp_path / "folder", "x")
    assert names(tmp_path) == ["folder"]


# What passes bytes on.


def test_a_device_stays_one(tmp_path):
    device, link = null_device(tmp_path / "null"), tmp_path / "link"
    link.symlink_to("null")
    for path in (device, link):
        assert writing.passes_through(path)
        writing.write_file(path, "x")
    assert stat.S_ISCHR(device.stat().st_mode) and link.is_symlink() and names(tmp_path) == ["link", "null"]


def test_a_pipe_gets_what_is_written(tmp_path):
    pipe = Pipe(tmp_path / "pipe")
    writing.write_file(tmp_path / "pipe", "through")
    assert pipe.read() == b"through" and names(tmp_path) == ["pipe"]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="the system has no /dev/fd")
@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "link"])
def test_an_open_file_is_written_where_it_stands(tmp_path, name):
    path, link = tmp_path / "out", tmp_path / "link"
    with open(path, "wb", buffering=0) as file:
        if name == "link":
            link.symlink_to(f"/dev/fd/{file.fileno()}")
        named = link if name == "link" else name.format(file.fileno())
        if name.startswith("/proc") and not os.path.exists(named):
            pytest.skip("the system has no /proc")
        assert writing.passes_through(named)
        before = path.stat().st_ino
        file.write(b"before, ")
        writing.write_file(named, "between, ")
        file.write(b"after")
    assert path.read_bytes() == b"before, between, after" and path.stat().st_ino == before
    with pytest.raises(OSError, match=r"Bad file descriptor: '/dev/fd/999'"):
        writing.write_file("/dev/fd/999", "x")


# Folders.


def make(folder, content="new", check=lambda place: None):
    with writing.new_folder(folder, check) as temporary:
        (temporary / "file").write_text(content)
        assert not (folder / "file").exists() or (folder / "file").read_text() != content


def refuse(place):
    if place.exists() and any(place.iterdir()):
        raise ValueError(f"{place}: not ours")


def test_a_folder_appears_whole(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    link.symlink_to("folder")  # leads nowhere yet
    make(link, "made")
    assert link.is_symlink() and (folder / "file").read_text() == "made"
    folder.chmod(0o700)
    make(link)
    assert link.is_symlink() and (folder / "file").read_text() == "new" and stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(ValueError, match="folder: not ours"):
        make(link, "other", refuse)
    with pytest.raises(KeyboardInterrupt), writing.new_folder(folder, lambda place: None):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["folder", "link"] and (folder / "file").read_text() == "new"


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
    with (
        pytest.raises(ValueError, match="folder: not ours"),
        writing.new_folder(tmp_path / "folder", refuse) as temporary,
    ):
        (temporary / "file").touch()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/other").touch()
    assert names(tmp_path) == ["folder"] and names(tmp_path / "folder") == ["other"]


def test_what_a_kill_left_is_taken_over(tmp_path):
    new, old = tmp_path / ".folder.specdec-new", tmp_path / ".folder.specdec-old"
    (new / "sub").mkdir(parents=True)
    (new / "half").touch()
    old.mkdir()  # killed between the two renamings: `folder` is missing
    (old / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), writing.new_folder(tmp_path / "folder", lambda place: None) as temporary:
        assert not any(temporary.iterdir())
        raise KeyboardInterrupt
    assert names(tmp_path) == ["folder"] and (tmp_path / "folder/file").read_text() == "old"


def test_a_mount_point_is_refused_at_once(disk):
    with pytest.raises(ValueError, match="disk: got a mount point, expected a folder in it"):
        make(disk)
    assert names(disk.parent) == ["disk"]


# One process at a time. Another opening of a file within a process locks as another process does.


def test_a_second_writer_of_a_folder_is_refused(tmp_path):
    folder = tmp_path / "folder"
    with writing.new_folder(folder, refuse) as temporary:
        (temporary / "file").write_text("first")
        with pytest.raises(ValueError, match="another process is writing it, expected one at a time"):
            make(folder, "second")
    assert names(tmp_path) == ["folder"] and (folder / "file").read_text() == "first"


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    with writing.new_file(tmp_path / "out") as first, writing.new_file(tmp_path / "out") as second:
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "out").read_bytes() == b"first" and names(tmp_path) == ["out"]  # which was finished last


def test_a_journal_that_was_finished_in_the_meantime_is_refused(tmp_path, monkeypatch):
    """Another process opens the journal before it is removed, and locks it after that."""
    pytest.importorskip("fcntl")
    first = journal.Journal(tmp_path / "out", {}, 1)
    first.add(0, ["first"])

    def late(number, path):
        first.finish()
        first.__exit__()
        writing.lock(number, path)

    monkeypatch.setattr(journal, "lock", late)
    with pytest.raises(ValueError, match="out.partial: another process is writing it"):
        journal.Journal(tmp_path / "out", {}, 1)
    assert (tmp_path / "out").read_text() == "first\n" and names(tmp_path) == ["out"]


def test_names_of_one_output_are_one_to_journals(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / "link").symlink_to("out")
    with journal.Journal(tmp_path / "link", {}, 1) as first:
        with pytest.raises(ValueError, match="out.partial: another process is writing it"):
            journal.Journal(tmp_path / "out", {}, 1)
        first.add(0, ["a"])
        first.finish()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out").read_text() == "a\n"
    assert names(tmp_path) == ["link", "out"]


@pytest.mark.parametrize("command", ["train", "distill"])
def test_a_second_training_into_a_folder_is_refused(specdec, pair, language, tmp_path, command):
    pytest.importorskip("fcntl")
    gin = pathlib.Path(__file__).parent.parent / "configs/train/smoke.gin"
    arguments = {
        "train": [f"--gin_file={gin}", "--gin_search_paths=/", f"--gin.DATA_DIR='{language}'", f"--gin.OUTPUT_DIR='{tmp_path}'"],
        "distill": ["--target=TARGET", "--drafter_shape=1,1,8,1,8,16", f"--source_files={language / 'train.tsv'}",
                    f"--validation_files={language / 'validation.tsv'}", f"--output_dir={tmp_path}"],
    }  # fmt: skip
    with writing.alone(tmp_path):
        code, out, err = specdec(command, *arguments[command])
    assert (code, out) == (2, "") and not names(tmp_path)
    assert err.splitlines()[-1] == f"specdec: error: {tmp_path}: another process is writing it, expected one at a time"


# Every command.


@pytest.fixture
def commands(pair, tmp_path, monkeypatch):
    """Arguments of commands that write a file, but for its name; what would be measured is made up."""
    monkeypatch.setattr(benchmark, "benchmark", lambda *_: ({"a": 1}, []))
    monkeypatch.setattr(measuring, "measured", lambda *_: {"a": 1})
    monkeypatch.setattr(tuning, "tuned", lambda *_: {"a": 1})
    monkeypatch.setattr(tuning, "gin_file", lambda *_: "# chosen\n")
    monkeypatch.setattr(records, "summary", lambda *_: "")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "text").write_text("".join(text + "\n" for text in test_cli.TEXT))
    models = [*test_cli.MODELS, "--json"]
    return {
        "generate": ["generate", *test_cli.MODELS, "Tom", "We", "--output_file"],
        "benchmark": ["benchmark", *models, "--output"],
        "measure": ["measure", *models[:4], "--json", "--gamma_max=2", "--output"],
        "tune": ["tune", *models[:4], "--json", "--gamma=2", f"--config={inputs / 'gin'}", "--output"],
        "tune's choice": ["tune", *models[:4], "--json", "--gamma=2", "--config"],
        "figures": ["figures", "--output"],
        "count": ["count", "--target=TARGET", f"--input_file={inputs / 'text'}", "--output"],
    }


SUFFIX = {"figures": ".html", "count": ".npz"}
COMMANDS = ["generate", "benchmark", "measure", "tune", "tune's choice", "figures", "count"]


@pytest.mark.parametrize("command", COMMANDS)
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


def test_a_job_through_a_pipe_says_that_it_cannot_go_on(specdec, commands, tmp_path):
    code, printed, _ = specdec(*commands["generate"][:-1])
    reader = Pipe(tmp_path / "pipe")
    code, out, err = specdec(*commands["generate"][:-1], f"--output_file={tmp_path / 'pipe'}")
    assert (code, out) == (0, "") and reader.read().decode() == printed
    assert (
        err
        == f"{tmp_path / 'pipe'}: no regular file: outputs go there in order, and a run that is killed begins anew\n"
    )


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="the system has no /dev/stdout")
def test_standard_output_by_its_name(pair, tmp_path, quick_environment):
    """Also where it is a file, of which it then keeps what is there."""
    path = tmp_path / "printed"
    models = [
        argument.replace("=TARGET", f"={pair / 'target'}") for argument in test_cli.MODELS if "DRAFTER" not in argument
    ]
    with open(path, "w") as file:
        print("before", file=file, flush=True)
        command = [
            sys.executable,
            "-m",
            "specdec_main",
            "generate",
            *models,
            "--gamma=0",
            "--output_file=/dev/stdout",
            "Tom",
            "We",
        ]
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
            env=os.environ | quick_environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        print("after", file=file)
    assert done.returncode == 0, done.stderr
    assert path.read_text().splitlines() == ["before", *test_cli.expected(pair, ["Tom", "We"]), "after"]
    assert names(tmp_path) == ["printed"]


def test_a_suite_needs_a_file_to_read_again(specdec, tmp_path):
    device = null_device(tmp_path / "null")
    code, out, err = specdec("benchmark", *test_cli.MODELS[:4], "--suite=paper", f"--output={device}")
    assert (code, out) == (2, "") and "null', expected a regular file: its records are read again" in err


def test_a_plot_is_written_through(tmp_path):
    matplotlib = pytest.importorskip("matplotlib.figure")
    from specdec_jax import plots

    link = tmp_path / "link.png"
    link.symlink_to("figure.png")
    plots.save(matplotlib.Figure(), str(link))
    assert link.is_symlink() and (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("place", ["folder that is missing", "loop", "link to a missing folder", "folder"])
def test_a_place_for_no_file_is_told_before_anything_is_loaded(specdec, tmp_path, place):
    output = tmp_path / "out"
    if place == "folder that is missing":
        output = tmp_path / "missing/out"
    elif place == "folder":
        output.mkdir()
    else:
        output.symlink_to("out" if place == "loop" else "missing/out")
    code, out, err = specdec("generate", "--target=no/such", f"--output_file={output}", "Tom")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(output) in err and ("expected a file in a folder that exists" in err or "symbolic links" in err)


def test_a_read_only_folder_is_told_before_anything_is_loaded(specdec, disk):
    if subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode:
        pytest.skip("no disk can be made read-only here")
    code, out, err = specdec("generate", "--target=no/such", f"--output_file={disk / 'out'}", "Tom")
    assert (code, out) == (2, "") and err.endswith(f"expected a file that may be written: {disk} may not\n")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_journal_that_is_no_file_is_refused(tmp_path, kind):
    partial = tmp_path / "out.partial"
    os.mkfifo(partial) if kind == "pipe" else partial.mkdir()
    with pytest.raises((OSError, ValueError), match="out.partial") as raised:
        journal.Journal(tmp_path / "out", {}, 1)
    assert "expected a journal or nothing there" in str(raised.value) or raised.value.errno == errno.EISDIR


def test_a_journal_that_cannot_be_removed_is_told(tmp_path):
    partial = tmp_path / "out.partial"
    with journal.Journal(tmp_path / "out", {}, 1) as opened:
        opened.add(0, ["a"])
        if subprocess.run(["mount", "--bind", str(partial), str(partial)], capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
        try:
            with pytest.raises(OSError, match="busy: .*out.partial"):
                opened.finish()
        finally:
            subprocess.run(["umount", "-l", str(partial)], check=True)
    assert (tmp_path / "out").read_text() == "a\n"


# A full disk.


def test_a_journal_on_a_full_disk_goes_on_when_there_is_room(disk):
    filler, out = fill(disk, leave=12_288), disk / "out"
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial'"):
        with journal.Journal(out, {"a": 1}, 30) as opened:
            for number in range(30):
                opened.add(number, [f"{number} " * 500])
                done = {*opened.done}
    assert done and names(disk) == ["filler", "out.partial"]
    filler.unlink()
    with journal.Journal(out, {"a": 1}, 30) as opened:
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
    assert out.read_text() == "".join(f"{number} " * 500 + "\n" for number in range(30)) and names(disk) == ["out"]


def test_a_journal_that_cannot_begin_leaves_nothing(disk):
    fill(disk)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.partial'"):
        journal.Journal(disk / "out", {"a": "b" * 5000}, 1)
    assert names(disk) == ["filler"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line_and_leaves_what_was_there(specdec, commands, disk, command):
    output = disk / f"out{SUFFIX.get(command, '')}"
    output.write_text("old")
    fill(disk)
    code, _, err = specdec(*commands[command][:-1], f"{commands[command][-1]}={output}")
    assert code == 2 and err.endswith(
        f"specdec: error: [Errno 28] No space left on device: '{output}{'.partial' * (command == 'generate')}'\n"
    )
    assert "Traceback" not in err and output.read_text() == "old" and names(disk) == ["filler", output.name]


@pytest.mark.parametrize("form", ["specdec", "huggingface", "t5x", "t5x_legacy"])
def test_a_checkpoint_on_a_full_disk_leaves_nothing(pair, specdec, disk, form):
    fill(disk, leave=24_576)  # enough for some of it
    code, out, err = specdec("convert", "--source=TARGET", f"--output={disk / 'out'}", f"--format={form}")
    assert (code, out, err.count("\n")) == (2, "", 1) and names(disk) == ["filler"]
    assert str(disk / ".out.specdec-new") in err and "space" in err.lower()
    with pytest.raises((OSError, ValueError)):
        sd.save(checkpoints.load(pair / "target", "float32"), disk / "model")
    assert names(disk) == ["filler"]
