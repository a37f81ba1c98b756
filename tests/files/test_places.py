"""Paths with a scheme lead into stores, all others to this machine."""

import asyncio
import gzip
import pathlib
import sys

import fsspec.asyn
import numpy as np
import pytest
import stores
from stores import FailingStore, upload

from specdec_jax.files import places, reading, writing
from specdec_jax.files.places import RemotePath, make_path
from specdec_jax.training import text_files

store = stores.store
pytestmark = pytest.mark.usefixtures("store")


@pytest.mark.parametrize("path", ["a/b", "/a/b", "~/a", "C:/a", "a:b", "-", "", "gs:/a", "é//x"])
def test_a_path_without_a_scheme_is_this_machines(path):
    assert make_path(path) == pathlib.Path(path) and not places.is_remote(path)
    here = pathlib.Path(path)
    assert make_path(here) is here


def test_a_file_url_is_this_machines(tmp_path):
    for scheme in ("file", "FILE"):
        assert make_path(f"{scheme}://{tmp_path}/x") == tmp_path / "x"


def test_a_remote_path_has_the_methods_of_a_local_one(tmp_path):
    for name in ("m/config.json", "m/params/d/1", "m/params/manifest.ocdbt", "other.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    local, remote = tmp_path, make_path(upload(tmp_path, "memory://s/t/"))
    assert str(remote) == "memory://s/t" and remote.scheme == "memory"
    for name in ("", "m", "m/config.json", "m/params", "m/x", "m/config.json/x", "other.txt"):
        ours, theirs = remote / name, local / name
        assert (ours.exists(), ours.is_file(), ours.is_dir()) == (
            theirs.exists(),
            theirs.is_file(),
            theirs.is_dir(),
        ), name
        assert name == "" or (ours.name, ours.suffix) == (theirs.name, theirs.suffix)
        assert str(ours.relative_to(remote)) == str(theirs.relative_to(local))
        if theirs.is_file():
            assert ours.stat().st_size == theirs.stat().st_size
            assert ours.read_bytes() == theirs.read_bytes()
        else:
            assert sorted(path.name for path in ours.iterdir()) == sorted(
                path.name for path in (theirs.iterdir() if theirs.is_dir() else ())
            )
    assert (remote / "m").parent == remote and remote.parent == make_path("memory://s")
    assert remote.parent.parent == remote.parent  # a bucket has nothing above it
    assert (remote.parent / "t" / "other.txt").is_file() and not (remote.parent / "x").exists()
    found = (remote / "m").rglob("manifest.*")
    assert [str(path) for path in found] == ["memory://s/t/m/params/manifest.ocdbt"]
    assert remote.with_name("u") == make_path("memory://s/u") and hash(remote) == hash(remote / "")
    with pytest.raises(FileNotFoundError):
        (remote / "x").stat()


def test_a_folder_is_listed_once(monkeypatch):
    upload_texts("memory://s/m", a="1", b="2")
    listed = []
    monkeypatch.setattr(
        FailingStore,
        "ls",
        lambda self, path, *_, **options: (
            listed.append(path) or super(FailingStore, self).ls(path, *_, **options)
        ),
    )
    folder = make_path("failing://s/m")
    assert [(folder / name).exists() for name in "abcdefg"] == [True, True, *[False] * 5]
    assert listed == ["/s/m"]


def upload_texts(url, **files):
    for name, text in files.items():
        make_path(f"{url}/{name}").create(text.encode())


def test_ranges_are_read_in_pieces_and_files_like_local_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_REQUEST_BYTES", 1000)
    data = np.random.default_rng(0).integers(0, 256, 4321, np.uint8).tobytes()
    (tmp_path / "x").write_bytes(data)
    path = make_path(upload(tmp_path, stores.ROOT)) / "x"
    for start, count in ((0, 4321), (17, 0), (999, 2), (1, 4000), (4320, 1)):
        assert bytes(path.read_range(start, count)) == data[start : start + count]
    with path.open() as file:
        assert file.read(8) == data[:8] and file.seek(-4, 2) == 4317
        assert file.read() == data[-4:] and file.seek(100) == 100 and file.read(3) == data[100:103]
    array = places.read_array(path, np.uint16, 5, 7)
    assert array.tolist() == places.read_array(tmp_path / "x", np.uint16, 5, 7).tolist()
    assert places.choose_block(tmp_path / "x", 10**9) is None
    assert places.choose_block(path, 10**6) < places.choose_block(path, 10**9) == 32 << 20


def test_texts_gzip_or_not_are_read_from_a_store(tmp_path):
    lines = [f"Zeile {i} ü" for i in range(1000)]
    text = "\ufeff" + "\n".join(lines)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    url = upload(tmp_path, stores.ROOT)
    for name in ("a.txt", "a.txt.gz"):
        text_files.check_is_file("input_file", f"{url}/{name}")
        assert list(text_files.read_lines(f"{url}/{name}")) == lines
    with pytest.raises(ValueError, match="input_file: got 'memory://store/b', which is no file"):
        text_files.check_is_file("input_file", f"{url}/b")


def one_line(error, *parts):
    text = str(error.value)
    assert len(text.splitlines()) == 1 and len(text) < 700, text
    assert all(part in text for part in parts), text


def test_without_a_package_the_error_names_the_extra(monkeypatch):
    registry = sys.modules["fsspec.registry"]
    monkeypatch.delitem(registry._registry, "gs", raising=False)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError) as error:
        make_path("gs://bucket/model")
    one_line(error, "gs://bucket/model: got", "gcsfs", "pip install '.[remote]'")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ValueError) as error:
        make_path("memory://bucket/model")
    one_line(error, "fsspec", "pip install '.[remote]'")


@pytest.mark.parametrize("url", ["nonsense://x/y", "memory+x://a"])
def test_an_unknown_scheme_ends_in_one_line(url):
    with pytest.raises(ValueError) as error:
        make_path(url)
    one_line(error, url, "the scheme", "gs://, s3:// or memory://")
    with pytest.raises(ValueError, match="memory:///: got a scheme alone"):
        make_path("memory:///")


def test_a_store_that_fails_is_named_in_one_line(tmp_path):
    upload_texts("memory://s/m", a="x" * 100)
    FailingStore.left, FailingStore.how = 0, RuntimeError("503\nService   Unavailable")
    for read in (
        lambda: reading.read_bytes("failing://s/m/a"),
        lambda: make_path("failing://s/m/a").open().read(),
        lambda: list(text_files.read_lines("failing://s/m/a")),
    ):
        with pytest.raises(ValueError) as error:
            read()
        one_line(error, "failing://s/m/a: got RuntimeError: 503 Service Unavailable")
    with pytest.raises(OSError) as error:
        writing.write_file("failing://s/m/b", "text")
    one_line(error, "failing://s/m/b: got RuntimeError: 503", "a place that can be written")
    FailingStore.how = "truncated"
    with pytest.raises(ValueError) as error:
        reading.read_bytes("failing://s/m/a")
    one_line(error, "failing://s/m/a: got 50 bytes of 100 at 0", "truncated?")


def test_a_store_without_the_right_to_list_is_named_in_one_line():
    upload_texts("memory://s/m", a="1")
    FailingStore.how = "forbidden"
    with pytest.raises(ValueError) as error:
        (make_path("failing://s/m") / "a").exists()
    one_line(error, "failing://s/m: got PermissionError: 403", "storage.objects.list")


def test_copies_are_removed_with_what_reads_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upload_texts("memory://s/m", a="1", b="22")
    make_path("memory://s/m/d/c").create(b"333")
    copy = places.FolderCopy(make_path("memory://s/m"), ("a", "d/"))
    assert sorted(p.name for p in copy.path.rglob("*")) == ["a", "c", "d"]
    folder = copy.path
    del copy
    assert not folder.exists()
    with places.open_copies(make_path("memory://s/m/b"), tmp_path) as (there, here):
        assert there.read_text() == "22" and there.name == "b" and here is tmp_path
    assert not there.exists()


def test_a_copy_that_is_cut_short_is_rejected(tmp_path):
    upload_texts("memory://s/m", a="12345")
    for size in (None, 5):
        make_path("memory://s/m").download({"a": size}, tmp_path)
    for size in (4, 9):
        with pytest.raises(ValueError) as error:
            make_path("memory://s/m").download({"a": size}, tmp_path)
        one_line(error, f"memory://s/m/a: got 5 bytes, expected {size}", "truncated?")


@pytest.mark.parametrize("name", ["../x", "a/../../x", "a\\..\\x", "a\nb"])
def test_a_name_that_leads_out_of_a_folder_is_not_copied(name, tmp_path, monkeypatch, store):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upload_texts("memory://s/m", a="1")
    store.store[f"/s/m/{name}"] = store.store["/s/m/a"]
    with pytest.raises(ValueError) as error:
        places.FolderCopy(make_path("memory://s/m"))
    one_line(error, "memory://s/m: got the file", "expected one inside")
    assert [p.name for p in (tmp_path / "cache").rglob("*x")] == []


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    writing.write_file("memory://s/f", "old")
    with pytest.raises(ZeroDivisionError), writing.open_new_file("memory://s/f") as file:
        file.write(b"new")
        raise ZeroDivisionError
    assert make_path("memory://s/f").read_bytes() == b"old"
    with writing.open_new_file("memory://s/f") as file:
        file.write(b"new")
        file.seek(0)
        file.write(b"N")
    assert make_path("memory://s/f").read_bytes() == b"New"
    writing.check_output("memory://s/g")
    for text in ("memory://s", "memory://o.txt"):
        with pytest.raises(ValueError, match=f"output: got '{text}', expected a file in a bucket"):
            writing.check_output(text)
    assert stores.list_urls("memory://s") == ["f"]


def test_an_output_that_a_store_does_not_take_is_rejected_at_once(monkeypatch):
    monkeypatch.setattr(FailingStore, "how", PermissionError("403: no storage.objects.create"))
    monkeypatch.setattr(FailingStore, "left", 0)
    message = r"report: failing://s/.specdec-\w+.check: got PermissionError: 403"
    with pytest.raises(ValueError, match=message):
        writing.check_output("failing://s/f", "report")


def test_a_commit_is_no_place_for_an_output(monkeypatch):
    monkeypatch.setattr(places.RemotePath, "is_dir", lambda path: False)
    message = "output: got 'hf://a/b@0123456789.*, which names a commit, expected a branch"
    with pytest.raises(ValueError, match=message):
        writing.check_output(f"hf://a/b@{'0123456789' * 4}/f")


def test_a_folder_replaces_one_whose_mark_goes_first_and_comes_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    upload_texts("memory://s/m", **{"config.json": "old", "left": "x"})
    moved = []
    for name in ("upload", "unlink"):
        monkeypatch.setattr(
            RemotePath,
            name,
            lambda self, *rest, _do=getattr(RemotePath, name), _name=name: (
                moved.append((_name, self.name)),
                _do(self, *rest),
            ),
        )
    with writing.open_new_folder("memory://s/m", lambda folder: None) as folder:
        for name in ("config.json", "params/_METADATA", "params/d/1"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(name)
    assert moved == [
        ("unlink", "config.json"),
        ("unlink", "left"),
        ("upload", "1"),
        ("upload", "_METADATA"),
        ("upload", "config.json"),
    ]
    assert stores.list_urls("memory://s/m") == ["config.json", "params/_METADATA", "params/d/1"]
    with pytest.raises(ValueError, match="not here"), writing.open_new_folder("memory://s/m", deny):
        pass


def deny(folder):
    raise ValueError("not here")


class AsynchronousStore(fsspec.asyn.AsyncFileSystem):
    """A store that takes a while to write a file, and counts how many it writes at a time."""

    protocol = "asynchronous"
    cachable = False
    running, most, written = 0, 0, []

    async def _put_file(self, lpath, rpath, **options):
        kind = type(self)
        kind.running += 1
        kind.most = max(kind.most, kind.running)
        await asyncio.sleep(0.01)
        if not pathlib.Path(lpath).read_text():
            raise PermissionError("403")
        kind.running -= 1
        kind.written.append(rpath)

    async def _makedirs(self, path, exist_ok=False):
        pass

    async def _info(self, path, **options):
        raise FileNotFoundError(path)

    async def _ls(self, path, detail=True, **options):
        raise FileNotFoundError(path)


fsspec.register_implementation("asynchronous", AsynchronousStore, clobber=True)


def test_a_folder_is_copied_by_several_files_at_a_time(tmp_path):
    with writing.open_new_folder("asynchronous://s/model", lambda path: None) as folder:
        for i in range(20):
            (folder / f"part{i}").write_text("x")
        (folder / "config.json").write_text("{}")
    assert AsynchronousStore.most == 8 and len(AsynchronousStore.written) == 21
    assert AsynchronousStore.written[-1].endswith("model/config.json")
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("")
    with pytest.raises(OSError, match="asynchronous://s: got PermissionError: 403, expected a pl"):
        make_path("asynchronous://s").upload_files(tmp_path, ["a", "b"])
