"""Continuous batching without a terminal announces what comes next before it begins."""

import pytest

from specdec_jax.decoding import progress
from specdec_jax.decoding.progress import Progress, track


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_comes_before_the_first_item_and_then_now_and_then(clock, capsys):
    printed = []
    for name in track("abcd", 4, "compiling", names=["plain [1]", "gamma 2", "gamma 3", "gamma 4"]):
        printed.append((name, capsys.readouterr().err))
        clock[0] += 6
    assert printed == [
        ("a", "compiling 1 of 4: plain [1]\n"),
        ("b", ""),
        ("c", "compiling 3 of 4: gamma 3\n"),
        ("d", ""),
    ]
    assert list(track([5], 1, "scoring")) == [5] and capsys.readouterr().err == "scoring 1 of 1\n"


def test_nothing_is_printed_for_no_work_or_when_switched_off(capsys):
    assert list(track([], 0, "scoring")) == [] and list(track([5], 1, "scoring", quiet=True)) == [5]
    with Progress("sentences", 0):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_job_prints_at_once_that_it_compiles(capsys, quiet):
    with Progress("sentences", 3, quiet=quiet):
        assert capsys.readouterr().err == "compiling; sentences 0/3\n"


def test_on_a_terminal_a_bar_has_the_name_of_what_comes_next(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    found = [
        (item, capsys.readouterr().err)
        for item in track("ab", 2, "compiling", names=["plain [x]", "gamma 2"])
    ]
    assert [item for item, _ in found] == ["a", "b"]
    assert "compiling: plain [x]" in found[0][1] and "compiling: gamma 2" in found[1][1]
