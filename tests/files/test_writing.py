"""Writing is atomic, follows links and devices, replaces only our files, one process at a time."""

import ast
import os
import stat

import devices
import pytest
from devices import Pipe, names, null_device
from package_modules import MODULES, for_each

from specdec_jax.commands import resumable_output
from specdec_jax.files import locks, writing

disk = devices.disk


# Nothing else writes.

WRITERS = {
    "write_text",
    "write_bytes",
    "savefig",
    "savez",
    "savez_compressed",
    "tofile",
    "dump",
    "symlink_to",
    "touch",
}
SYSTEM = {"open", "replace", "rename", "link", "mknod", "truncate"}  # of `os`
MAY_WRITE = {
    ("commands.resumable_output", "open"): "grows by a line for every result",
    ("training.run_folder", "open"): "the log of a training grows by a line for every record",
    (
        "checkpoints.safetensors_files",
        "open",
    ): "a shard grows by a tensor, in a folder that appears whole",
    ("analysis.report.plots", "savefig"): "into memory",
    ("drafters.ngram_table", "savez_compressed"): "into memory",
    ("training.online", "savez"): "into memory",
    (
        "files.user_cache",
        "shutil.rmtree",
    ): "temporary folders that processes which were killed have left",
    ("files.locks", "os.open"): "a folder, which is locked and not written",
    ("files.places", "write_bytes"): "an outline in a temporary folder",
    ("files.places", "os.truncate"): "the same",
    ("commands.main", "os.open"): "the null device, in place of a stream that is lost",
    ("commands.entry", "os.open"): "the null device, in place of a stream that is closed",
}


def writes(tree: ast.AST) -> set[str]:
    """What in a module opens files for writing, or gives them names."""
    results = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        modes = [
            value.value
            for value in values
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        ]
        name = called.rpartition(".")[2]
        if called.partition(".")[0] in ("os", "shutil"):
            if (
                name in SYSTEM
                or called.startswith("shutil")
                and name not in ("disk_usage", "get_terminal_size", "which")
            ):
                results.add(called)
        elif name == "open" and any(
            set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes
        ):
            results.add("open")
        elif name in WRITERS:
            results.add(name)
    return results


@for_each(sorted(set(MODULES) - {"files.writing"}))
def test_nothing_else_writes(module):
    rest = writes(MODULES[module]) - {name for of, name in MAY_WRITE if of == module}
    assert rest == set()


def test_what_may_write_does():
    assert all(name in writes(MODULES[module]) for module, name in MAY_WRITE)


@pytest.mark.parametrize(
    "text",
    [
        "open(p, 'w')",
        "p.open(mode='ab')",
        "p.write_text('')",
        "os.replace(a, b)",
        "np.savez(p)",
        "shutil.copy(a, b)",
        "open(p, 'r+b')",
    ],
)
def test_writing_is_seen(text):
    assert writes(ast.parse(text)) and not writes(
        ast.parse("open(p, 'rb'); open(p); p.read_text(); store.open(x, 'zarr')")
    )


# Regular files.


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path):
    path, other = tmp_path / "out", tmp_path / "out.part"
    other.write_text("not ours")
    writing.write_file(path, "ä")
    assert (
        path.read_text(encoding="utf-8") == "ä"
        and stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask()
    )
    path.chmod(0o640)
    before = path.stat().st_ino
    with writing.open_new_file(path) as file:
        file.write(b"new")
        assert path.read_bytes() == "ä".encode()
    assert (
        path.read_bytes() == b"new"
        and stat.S_IMODE(path.stat().st_mode) == 0o640
        and path.stat().st_ino != before
    )
    with pytest.raises(KeyboardInterrupt), writing.open_new_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"new" and other.read_text() == "not ours"
    assert names(tmp_path) == ["out", "out.part"]


def test_what_a_file_url_names_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/out"
    writing.check_output(url)
    writing.write_file(url, "a")
    with writing.open_new_folder(f"{url}.folder", lambda path: None) as folder:
        (folder / "b").touch()
    assert (tmp_path / "out").read_text() == "a" and names(tmp_path / "out.folder") == ["b"]
    assert names(tmp_path) == ["out", "out.folder"]
    with pytest.raises(ValueError, match="output: got .*, expected a file in a folder that exists"):
        writing.check_output(f"{url}.folder")
    assert writing.is_pass_through("file:///dev/null")


def test_names_that_no_file_can_have(tmp_path):
    """Nor those that lie beside it while a command works."""
    writing.check_output(str(tmp_path / ("x" * 242)))
    for text, got in (
        ("x" * 243, "a name of 243 bytes"),
        ("ä" * 122, "a name of 244 bytes"),
        ("x" * 300, "a name of 300 bytes"),
    ):
        with pytest.raises(ValueError, match=f"output: got {got}, expected at most 242"):
            writing.check_output(str(tmp_path / text))
    with pytest.raises(ValueError, match="plot: got .*, expected a name without NUL"):
        writing.check_output(str(tmp_path / "a\0b"), "plot")


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
    target = tmp_path / "there/file"
    link = tmp_path / "here/link"
    dangling = tmp_path / "here/dangling"
    target.write_text("old")
    (tmp_path / "here/first").symlink_to("../there/file")
    link.symlink_to("first")
    dangling.symlink_to("../there/new")
    for path, content in ((link, "by two links"), (dangling, "made")):
        writing.write_file(path, content)
        assert path.is_symlink() and path.read_text() == content
    assert names(tmp_path / "there") == ["file", "new"] and names(tmp_path / "here") == [
        "dangling",
        "first",
        "link",
    ]
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
        assert writing.is_pass_through(path)
        writing.write_file(path, "x")
    assert (
        stat.S_ISCHR(device.stat().st_mode)
        and link.is_symlink()
        and names(tmp_path) == ["link", "null"]
    )


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
        assert writing.is_pass_through(named)
        before = path.stat().st_ino
        file.write(b"before, ")
        writing.write_file(named, "between, ")
        file.write(b"after")
    assert path.read_bytes() == b"before, between, after" and path.stat().st_ino == before
    with pytest.raises(OSError, match=r"Bad file descriptor: '/dev/fd/999'"):
        writing.write_file("/dev/fd/999", "x")


# Folders.


def make(folder, content="new", check=lambda place: None):
    with writing.open_new_folder(folder, check) as temporary:
        (temporary / "file").write_text(content)
        assert not (folder / "file").exists() or (folder / "file").read_text() != content


def reject(place):
    if place.exists() and any(place.iterdir()):
        raise ValueError(f"{place}: not ours")


def test_a_folder_appears_whole(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    link.symlink_to("folder")  # leads nowhere yet
    make(link, "made")
    assert link.is_symlink() and (folder / "file").read_text() == "made"
    folder.chmod(0o700)
    make(link)
    assert (
        link.is_symlink()
        and (folder / "file").read_text() == "new"
        and stat.S_IMODE(folder.stat().st_mode) == 0o700
    )
    with pytest.raises(ValueError, match="folder: not ours"):
        make(link, "other", reject)
    with pytest.raises(KeyboardInterrupt), writing.open_new_folder(folder, lambda place: None):
        raise KeyboardInterrupt
    assert names(tmp_path) == ["folder", "link"] and (folder / "file").read_text() == "new"


def test_what_appears_meanwhile_is_not_replaced(tmp_path):
    with (
        pytest.raises(ValueError, match="folder: not ours"),
        writing.open_new_folder(tmp_path / "folder", reject) as temporary,
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
    with (
        pytest.raises(KeyboardInterrupt),
        writing.open_new_folder(tmp_path / "folder", lambda place: None) as temporary,
    ):
        assert not any(temporary.iterdir())
        raise KeyboardInterrupt
    assert names(tmp_path) == ["folder"] and (tmp_path / "folder/file").read_text() == "old"


def test_a_mount_point_is_rejected_at_once(disk):
    with pytest.raises(ValueError, match="disk: got a mount point, expected a folder in it"):
        make(disk)
    assert names(disk.parent) == ["disk"]


@pytest.mark.parametrize("which", ["new", "old"])
def test_a_link_in_the_place_of_what_is_left_behind_is_not_followed(tmp_path, which):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("mine")
    (tmp_path / f".folder.specdec-{which}").symlink_to(precious)
    with pytest.raises(
        ValueError, match=f"specdec-{which}: got a symbolic link, expected nothing there"
    ):
        make(tmp_path / "folder")
    assert (precious / "file").read_text() == "mine" and not (tmp_path / "folder").exists()


# One process at a time. Another opening of a file within a process locks as another process does.


def test_a_second_writer_of_a_folder_is_rejected(tmp_path):
    folder = tmp_path / "folder"
    with writing.open_new_folder(folder, reject) as temporary:
        (temporary / "file").write_text("first")
        with pytest.raises(
            ValueError, match="another process is writing it, expected one at a time"
        ):
            make(folder, "second")
    assert names(tmp_path) == ["folder"] and (folder / "file").read_text() == "first"


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    with (
        writing.open_new_file(tmp_path / "out") as first,
        writing.open_new_file(tmp_path / "out") as second,
    ):
        first.write(b"first")
        second.write(b"second")
    assert (tmp_path / "out").read_bytes() == b"first" and names(tmp_path) == [
        "out"
    ]  # which was finished last


def test_a_journal_that_was_finished_in_the_meantime_is_rejected(tmp_path, monkeypatch):
    """Another process opens the journal before it is removed, and locks it after that."""
    pytest.importorskip("fcntl")
    first = resumable_output.Journal(tmp_path / "out", {}, 1)
    first.add(0, ["first"])

    def late(number, path):
        first.finish()
        first.__exit__()
        locks.lock_file(number, path)

    monkeypatch.setattr(resumable_output, "lock_file", late)
    with pytest.raises(ValueError, match="out.partial: another process is writing it"):
        resumable_output.Journal(tmp_path / "out", {}, 1)
    assert (tmp_path / "out").read_text() == "first\n" and names(tmp_path) == ["out"]


def test_names_of_one_output_are_one_to_journals(tmp_path):
    pytest.importorskip("fcntl")
    (tmp_path / "link").symlink_to("out")
    with resumable_output.Journal(tmp_path / "link", {}, 1) as first:
        with pytest.raises(ValueError, match="out.partial: another process is writing it"):
            resumable_output.Journal(tmp_path / "out", {}, 1)
        first.add(0, ["a"])
        first.finish()
    assert (tmp_path / "link").is_symlink() and (tmp_path / "out").read_text() == "a\n"
    assert names(tmp_path) == ["link", "out"]
