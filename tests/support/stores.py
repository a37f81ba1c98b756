"""Stores for tests: fsspec's memory, one that fails in chosen ways, and copies of folders in it."""

import pathlib
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

ROOT = "memory://store"


class FailingStore(MemoryFileSystem):
    """The store of `memory://` at `failing://`, whose class attributes say what fails.

    Attributes:
      left: number of readings and writings that succeed.
      how: "truncated": readings give half of the bytes; else the error that is raised.
      wait: seconds that each takes.
      asked: bytes that were asked for.
    """

    protocol = "failing"
    left, how, wait, asked = 10**9, None, 0.0, 0

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("failing://").removeprefix("memory://")
        return "/" + path.strip("/") if path.strip("/") else ""

    def _attempt(self):
        time.sleep(self.wait)
        FailingStore.left -= 1
        if self.left < 0 and isinstance(self.how, Exception):
            raise self.how

    def cat_file(self, path, start=None, end=None, **options):
        self._attempt()
        data = super().cat_file(path, start, end, **options)
        FailingStore.asked += len(data)
        return data[: len(data) // 2] if self.left < 0 and self.how == "truncated" else data

    def pipe_file(self, path, value, mode="overwrite", **options):
        self._attempt()
        super().pipe_file(path, value, mode, **options)

    def put_file(self, lpath, rpath, **options):
        self._attempt()
        super().put_file(lpath, rpath, **options)

    def ls(self, path, detail=True, **options):
        if self.how == "forbidden":
            raise PermissionError("403: the caller has no storage.objects.list")
        return super().ls(path, detail, **options)


fsspec.register_implementation("failing", FailingStore, clobber=True)


@pytest.fixture
def store():
    """Empties the memory store, before a test and after it; yields its file system."""
    system = fsspec.filesystem("memory")

    def empty():
        system.store.clear()
        system.pseudo_dirs[:] = [""]
        FailingStore.left, FailingStore.how, FailingStore.wait = 10**9, None, 0.0
        FailingStore.asked = 0

    empty()
    yield system
    empty()


def upload(folder: pathlib.Path, url: str) -> str:
    """Copies all files of a folder to a URL, and returns it."""
    system, key = fsspec.core.url_to_fs(url)
    for path in folder.rglob("*"):
        if path.is_file():
            system.pipe_file(f"{key}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return url


def list_urls(url: str) -> list[str]:
    """Returns the paths of all files below a URL, from there on."""
    system, key = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(f"{key}/") for path in system.find(key))
