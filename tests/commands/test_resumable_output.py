"""Resumable output keeps results of any order, whatever a kill leaves."""

import json
import multiprocessing
import os

import pytest
from journals import SETTINGS, journal, try_to_open

from specdec_jax.files.reading import digest


def fill(tmp_path, **results):
    with journal(tmp_path) as opened:
        for number, lines in results.items():
            opened.add(int(number[1:]), lines)
        return opened.path


def test_results_in_any_order_give_a_file_in_order(tmp_path):
    with journal(tmp_path) as opened:
        opened.add(2, ["zwei", "zwei'"])
        opened.add(0, ["Null ü\u2028", ""])
        assert not (tmp_path / "out.txt").exists() and opened.done == {0, 2}
        with pytest.raises(ValueError, match="out.txt.partial: got 2 results, expected 3"):
            opened.finish()
        opened.add(1, [])
        opened.finish()
    assert (tmp_path / "out.txt").read_bytes() == "Null ü\u2028\n\nzwei\nzwei'\n".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_what_was_added_is_there_again(tmp_path):
    path = fill(tmp_path, _1=["b"], _0=["a"])
    with journal(tmp_path) as opened:
        assert opened.done == {0, 1} and opened.path == path
        opened.add(2, ["c"])
        opened.finish()
    assert (tmp_path / "out.txt").read_text() == "a\nb\nc\n"


def test_a_result_is_on_its_way_to_the_disk_at_once(tmp_path):
    with journal(tmp_path) as opened:
        opened.add(1, ["b"])
        assert json.loads(opened.path.read_text().splitlines()[-1]) == [1, ["b"]]


def test_a_result_outlives_the_machine(tmp_path, monkeypatch):
    """The disk itself is told to keep it, but not for every line."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with journal(tmp_path) as opened:
        for number in range(3):
            opened.add(number, ["a"])
    assert 1 <= len(synced) < 3


def test_cut_anywhere_it_has_whole_results_only(tmp_path):
    path = fill(tmp_path, _2=["eine Zeile"], _0=["ü"])
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        with journal(tmp_path) as opened:
            assert opened.done == [set(), set(), {2}, {2, 0}][sum(end <= size for end in ends)]
            for number, line in enumerate(["ü", "neu", "eine Zeile"]):
                if number not in opened.done:
                    opened.add(number, [line])
            assert list(opened.lines()) == ["ü", "neu", "eine Zeile"]
        assert {tuple(json.loads(line)[1]) for line in path.read_text().splitlines()[1:]} == {
            ("ü",),
            ("neu",),
            ("eine Zeile",),
        }


OTHERS = {
    "a setting": (
        dict(SETTINGS, gamma=5),
        3,
        r"results with gamma 4, expected 5; remove the file to begin anew",
    ),
    "more settings": (dict(SETTINGS, top_k=5), 3, "results with top_k None, expected 5"),
    "fewer settings": (
        {"gamma": 4, "stop": ["a", "ü"]},
        3,
        "results with sentences '0123', expected None",
    ),
    "the number of inputs": (SETTINGS, 4, "results with inputs 3, expected 4"),
}


def test_an_unknown_setting_is_named_on_one_line(tmp_path):
    first = json.dumps({**SETTINGS, "inputs": 3, "a\nb": 1}) + "\n"
    (tmp_path / "out.txt.partial").write_text(first)
    with pytest.raises(ValueError, match=r"got results with 'a\\nb' 1, expected None"):
        journal(tmp_path)


@pytest.mark.parametrize("case", OTHERS)
def test_a_journal_of_something_else_is_rejected_and_left_alone(tmp_path, case):
    path = fill(tmp_path, _2=["c"])
    before, (settings, total, message) = path.read_bytes(), OTHERS[case]
    with pytest.raises(ValueError, match=f"out.txt.partial: got {message}"):
        journal(tmp_path, settings, total)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"\xff",
        b'[7, ["a"]]',
        b'[0.5, ["a"]]',
        b"[" * 20_000,
        b'[0, "a", 1]',
        b"[0, [1]]",
        b'{"0": 1}',
        b"3",
    ],
)
def test_a_damaged_line_is_rejected(tmp_path, line):
    path = fill(tmp_path, _2=["c"])
    path.write_bytes(path.read_bytes() + line + b'\n[1, ["b"]]\n')
    with pytest.raises(
        ValueError,
        match="partial, line 3: got .*, expected a result; remove the file to begin anew",
    ):
        journal(tmp_path)


@pytest.mark.parametrize("line", [b"x\n", b"[1]\n", b"half of a download", b"[" * 20_000, b"\0"])
@pytest.mark.parametrize("link", [False, True])
def test_some_other_file_is_rejected_and_left_alone(tmp_path, line, link):
    path, file = tmp_path / "out.txt.partial", tmp_path / "mine"
    (file if link else path).write_bytes(line)
    if link:
        path.symlink_to(file)
    with pytest.raises(
        ValueError, match="partial.*: got .*, expected .*; remove the file to begin anew"
    ):
        journal(tmp_path)
    assert path.read_bytes() == line


def test_one_process_at_a_time(tmp_path):
    pytest.importorskip("fcntl")
    context = multiprocessing.get_context("spawn")
    with journal(tmp_path):
        queue = context.Queue()
        other = context.Process(target=try_to_open, args=(tmp_path, queue))
        other.start()
        assert "another process is writing it" in queue.get(timeout=60)
        other.join()


def test_digests_distinguish_parts():
    assert digest([b"ab", b"c"]) == digest(iter([b"ab", b"c"])) != digest([b"a", b"bc"])
