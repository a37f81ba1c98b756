"""Folders of a store that are written here: what is copied, and what an interruption leaves."""

import json

import pytest
import stores
from stores import FailingStore, list_urls, upload

from specdec_jax.files import mirrors
from specdec_jax.files.places import RemotePath, make_path

store = stores.store
URL = "failing://bucket/run"


@pytest.fixture(autouse=True)
def cache(store, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "specdec_jax" / "runs"


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def restore():
    with mirrors.read_folder(URL) as folder:
        return read(folder)


def test_a_folder_on_this_machine_stays_where_it_is(tmp_path):
    for path in (tmp_path / "run", f"file://{tmp_path / 'run'}"):
        with mirrors.open_folder(path) as folder:
            assert folder == mirrors.find_folder(path) == tmp_path / "run"
            mirrors.copy_folder(path)
    with mirrors.read_folder(tmp_path) as folder:
        assert folder == tmp_path
    assert mirrors.name_inside(tmp_path, "model") == tmp_path / "model"
    assert str(mirrors.name_inside(URL, "model")) == f"{URL}/model"


def test_what_has_changed_is_copied(cache, monkeypatch):
    uploaded = []
    put = RemotePath.upload
    monkeypatch.setattr(
        RemotePath, "upload", lambda self, path: (uploaded.append(self.name), put(self, path))
    )
    first = {"log": "1", "checkpoints/1/a": "old", "checkpoints/1/_METADATA": "m", "b/c/d": "x"}
    with mirrors.open_folder(URL) as folder:
        assert read(folder) == {}
        write(folder, first | {"checkpoints/2.orbax-checkpoint-tmp/a": "half"})
        mirrors.copy_folder(URL)
        assert uploaded == [mirrors.RECORD, "d", "a", "_METADATA", "log", mirrors.RECORD]
        assert list_urls(URL) == sorted([*first, mirrors.RECORD])
        mirrors.copy_folder(URL)
        assert len(uploaded) == 6, "nothing has changed"
        (folder / "b/c/d").unlink()
        write(folder, {"log": "12", "best/3/a": "b"})
        with mirrors.open_folder(f"{URL}/") as inner:
            assert inner == folder == mirrors.find_folder(URL)
        assert len(uploaded) == 6, "a block inside another one copies nothing"
    assert uploaded[6:] == ["a", "log", mirrors.RECORD]
    expected = {name: text for name, text in first.items() if name != "b/c/d"}
    expected |= {"log": "12", "best/3/a": "b"}
    assert sorted(list_urls(URL)) == sorted([*expected, mirrors.RECORD])
    with mirrors.open_folder(URL) as again:
        assert read(again) == expected
    assert not list(cache.iterdir())


def test_an_error_copies_nothing():
    with pytest.raises(KeyError), mirrors.open_folder(URL) as folder:
        write(folder, {"log": "1"})
        mirrors.copy_folder(URL)
        write(folder, {"log": "2"})
        raise KeyError
    assert restore() == {"log": "1"}


def test_an_interrupted_copy_leaves_files_that_belong_together():
    old = {"log": "1", "best/3/a": "old", "best/3/b": "old", "best/4/a": "kept", "model/c": "old"}
    new = old | {"log": "12", "best/3/a": "new", "best/3/b": "new", "model/c": "new"}
    del new["best/4/a"]
    found, left, failed = set(), 0, True
    while failed:
        FailingStore.left, FailingStore.how = 10**9, None
        make_path(URL)._store.system.store.clear()
        with mirrors.open_folder(URL) as folder:
            write(folder, old)
        failed = False
        try:
            with mirrors.open_folder(URL) as folder:
                (folder / "best/4/a").unlink()
                write(folder, {name: text for name, text in new.items() if old[name] != text})
                FailingStore.left, FailingStore.how = left, ConnectionError("gone")
        except (OSError, ValueError) as error:
            assert URL in str(error) and len(str(error).splitlines()) == 1
            failed = True
        FailingStore.left = 10**9
        files = restore()
        step = {files.get("best/3/a"), files.get("best/3/b")}
        assert step in ({"old"}, {"new"}, {None}) and files["log"] in ("1", "12"), left
        found |= step
        with mirrors.open_folder(URL) as folder:  # a run resumes from any of them
            write(folder, {"log": "123"})
        assert restore()["log"] == "123"
        left += 1
    assert left > 5 and found == {"old", "new", None} and files == new


def test_a_second_process_is_noticed(tmp_path):
    with pytest.raises(ValueError, match=f"{URL}: another process is writing it, expected one"):
        with mirrors.open_folder(URL) as folder:
            write(folder, {"log": "1"})
            mirrors.copy_folder(URL)
            mirrors.Mirror(make_path(URL), tmp_path)
            write(folder, {"log": "2"})
    assert restore() == {"log": "1"} == read(tmp_path)


@pytest.mark.parametrize(
    "files, message",
    [
        ({"data.txt": "x"}, "got a folder with other files, expected none, or what this package"),
        ({mirrors.RECORD: "{}"}, r"files.json: got {}, expected a writer, and names of files"),
        ({mirrors.RECORD: '{"writer": 5, "files": []}'}, "expected a writer, and names"),
        ({mirrors.RECORD: '{"writer": "a", "files": [5]}'}, "expected a writer, and names"),
        ({mirrors.RECORD: "[" * 9000}, "got no readable JSON"),
        ({mirrors.RECORD: "\x00"}, "files.json: "),
        (
            {mirrors.RECORD: json.dumps({"writer": "a", "files": ["log"]})},
            "run: got no log, expected all files of its files.json",
        ),
        (
            {mirrors.RECORD: json.dumps({"writer": "a", "files": ["../../x"]}), "x": ""},
            "got no ../../x, expected all files",
        ),
    ],
)
def test_other_folders_and_damaged_records_are_rejected(files, message, tmp_path):
    write(tmp_path / "run", files)
    upload(tmp_path / "run", URL)
    with pytest.raises(ValueError, match=message) as caught, mirrors.open_folder(URL):
        pass
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(list_urls(URL)) == sorted(files), "nothing is written"
