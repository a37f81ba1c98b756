"""The results of a job whose output lies in a store survive kills there, in parts."""

import io
import json
import time

import pytest
import stores
from journals import SETTINGS
from stores import FailingStore, list_urls

from specdec_jax.commands import remote_parts
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.files.places import RemotePath, make_path

store = stores.store
OUTPUT = "memory://jobs/out.txt"
PARTS = f"{OUTPUT}.partial"


@pytest.fixture(autouse=True)
def machine(store, tmp_path, monkeypatch):
    """Gives the test a cache folder of its own, which it may change: another machine."""
    monkeypatch.setattr(remote_parts, "_LEAST_SECONDS", 0.01)

    def change(number):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(number)))

    change(0)
    return change


def journal(output=OUTPUT, settings=SETTINGS, total=3, **options):
    return Journal(output, settings, total, **options)


def wait_for(parts):
    for _ in range(500):
        if len(list_urls(PARTS)) >= parts:
            return
        time.sleep(0.01)
    raise AssertionError(list_urls(PARTS))


def test_finished_lines_are_parts_until_the_file_is_written():
    with journal() as opened:
        assert opened.name == PARTS and len(list_urls(PARTS)) == 1  # the settings
        opened.add(2, ["drei", "ü\u2028"])
        wait_for(2)
        opened.add(0, ["eins"])
        opened.add(1, [])
        opened.finish()
        assert not opened.path.exists()
    assert make_path(OUTPUT).read_bytes() == "eins\ndrei\nü\u2028\n".encode()
    assert list_urls("memory://jobs") == ["out.txt"]


def kill(opened):
    """Ends a journal as a kill would: what is in no part stays on this machine."""
    opened._file.close()
    opened._parts._ends = True
    opened._parts._wake.set()
    opened._parts._thread.join()


def test_a_kill_on_this_machine_loses_nothing(monkeypatch):
    monkeypatch.setattr(remote_parts, "_LEAST_SECONDS", 60.0)
    opened = journal()
    opened.add(1, ["zwei"])
    kill(opened)
    assert len(list_urls(PARTS)) == 1  # no part has the line
    with open(opened.path, "ab") as file:
        file.write(b'[2, ["ha')  # nor the one that was being written
    with journal() as opened:
        assert opened.done == {1}
        opened.add(2, ["drei"])
    with journal() as opened:
        assert opened.done == {1, 2}
        opened.add(0, ["eins"])
        opened.finish()
    assert make_path(OUTPUT).read_bytes() == b"eins\nzwei\ndrei\n"


def test_a_line_that_is_being_written_is_in_no_part():
    with journal() as opened:
        with open(opened.path, "ab") as file:
            file.write(b'[0, ["ha')
        opened._parts.copy()
    assert len(list_urls(PARTS)) == 1


def test_a_kill_while_parts_are_removed_leaves_a_beginning(monkeypatch):
    removed, unlink = [], RemotePath.unlink

    def remove(path, **options):
        removed.append(path.name)
        unlink(path, **options)

    with journal() as opened:
        for number in range(2):
            opened.add(number, ["eins"])
            wait_for(number + 2)
        monkeypatch.setattr(RemotePath, "unlink", remove)
        opened._parts.remove()
    assert removed == sorted(removed)[::-1] and len(removed) == 3


def test_a_journal_is_restored_where_a_call_writes_less_than_is_given():
    class Slow(io.BytesIO):
        def write(self, content):
            return super().write(content[:3])

    with journal() as opened:
        opened.add(1, ["zwei"])
        wait_for(2)
        whole = opened.path.read_bytes()
        opened.path.write_bytes(b"")
        file = Slow()
        opened._parts.restore(file)
        opened.path.write_bytes(whole)
    assert file.getvalue() == whole


def test_another_machine_goes_on_from_the_parts(machine):
    opened = journal()
    opened.add(1, ["zwei"])
    wait_for(2)
    kill(opened)
    machine(1)
    with journal() as opened:
        assert opened.done == {1}
        opened.add(0, ["anderswo"])
    machine(0)  # its journal is older than the parts
    with journal() as opened:
        assert opened.done == {0, 1}
        opened.add(2, ["drei"])
        opened.finish()
    assert make_path(OUTPUT).read_bytes() == b"anderswo\nzwei\ndrei\n"


def test_parts_that_were_removed_do_not_come_back():
    with journal() as opened:
        opened.add(0, ["alt"])
    for name in list_urls(PARTS):
        make_path(f"{PARTS}/{name}").unlink()
    with journal(settings={"other": 1}) as opened:
        assert opened.done == set()


def test_parts_of_other_settings_or_of_nothing_are_rejected():
    with journal():
        pass
    with pytest.raises(ValueError, match=f"{PARTS}: got results with gamma 4, expected 5"):
        journal(settings=SETTINGS | {"gamma": 5})
    name = list_urls(PARTS)[0]
    make_path(f"{PARTS}/readme").create(b"x")
    with pytest.raises(ValueError, match="2 files that are not all parts of one run"):
        journal()
    make_path(f"{PARTS}/readme").unlink()
    make_path(f"{PARTS}/{name.replace('000000', '000002')}").create(b"x\n")
    with pytest.raises(ValueError, match="not all parts"):
        journal()


@pytest.mark.parametrize(
    "content", [b"[", b"", b'{"a": 1}\n[0, 5]\n', b"[[" * 10**5 + b"\n", b"\xff\n"]
)
def test_a_damaged_part_is_named_in_one_line(content):
    with journal():
        pass
    name = list_urls(PARTS)[0]
    make_path(f"{PARTS}/{name.replace('000000', '000001')}").create(content)
    with pytest.raises(
        ValueError, match=f"^{PARTS}.*(, line 2: got|got a part that does not end).*; remove the"
    ):
        journal()


def test_two_processes_do_not_write_one_file(machine):
    first = journal()
    machine(1)
    second = journal()
    first.add(0, ["a"])
    wait_for(2)
    second._parts._wake.set()
    second.add(1, ["b"])
    with pytest.raises(ValueError, match=f"{PARTS}: another process is writing it"):
        second.__exit__(None, None, None)
    first.__exit__(None, None, None)


def test_a_store_that_fails_ends_the_job_and_keeps_its_lines(monkeypatch):
    output = "failing://jobs/out.txt"
    with pytest.raises(OSError, match=r"^failing://jobs/out.txt.partial/\w+-000001.jsonl: got "):
        with journal(output) as opened:
            FailingStore.left, FailingStore.how = 0, RuntimeError("503")
            opened.add(0, ["eins"])
            for _ in range(500):
                time.sleep(0.01)
                opened._parts.check()
    FailingStore.left = 10**9
    with journal(output) as opened:
        assert opened.done == {0}
    FailingStore.left = 0
    with pytest.raises(OSError, match="^failing://jobs/other.partial/.* expected a place that"):
        journal("failing://jobs/other")


def test_a_journal_may_hold_a_part_of_the_inputs():
    with journal(total=2, first=5) as opened:
        opened.add(6, ["b"])
        opened.add(5, ["a"])
        opened.finish()
    assert make_path(OUTPUT).read_bytes() == b"a\nb\n"


def test_the_parts_together_are_the_journal():
    with journal() as opened:
        opened.add(0, ["x"], {"cut": 1})
        content = opened.path.read_bytes()
    parts = [make_path(f"{PARTS}/{name}").read_bytes() for name in list_urls(PARTS)]
    assert b"".join(parts) == content
    assert json.loads(content.splitlines()[-1]) == [0, ["x"], {"cut": 1}]
