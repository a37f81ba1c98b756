"""A long task shows a bar on a terminal and a line every 10 seconds elsewhere.

A short one shows nothing.
"""

import re
import time

import pytest
from terminal import as_stderr

from specdec_jax.files import progress
from specdec_jax.files.progress import Progress, print_line, show_waiting, track

# Hides a terminal's cursor; removes the bar and shows the cursor.
HIDDEN, CLEARED = "\x1b[?25l", "\x1b[1A\x1b[2K"


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_DELAY", 3.0)  # tests/conftest.py makes it longer
    return now


def test_lines_begin_after_3_seconds_and_come_every_10(clock, capsys):
    said = []
    for name in track("abcd", 4, "compiling", names=["plain [1]", "gamma 2", "gamma 3", "gamma 4"]):
        said.append((name, capsys.readouterr().err))
        clock[0] += 6
    assert said == [
        ("a", ""),
        ("b", "compiling: 1 of 4, gamma 2, 6.0 seconds each, 0:00:18 left\n"),
        ("c", ""),
        ("d", "compiling: 3 of 4, gamma 4, 6.0 seconds each, 0:00:06 left\n"),
    ]
    assert capsys.readouterr().err == "compiling: 4 of 4\n"


def test_nothing_is_shown_of_a_short_task_of_nothing_or_on_request(clock, capsys):
    assert list(track([], 0, "scoring")) == [] and list(track([5], 1, "scoring")) == [5]
    for _ in track([5, 6], 2, "scoring", quiet=True):
        clock[0] += 60
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("text", ["compiling", "loading [x]"])
def test_what_blocks_shows_a_line_without_a_count(monkeypatch, capsys, text):
    monkeypatch.setattr(progress, "_DELAY", 0.05)
    with show_waiting(text):
        time.sleep(0.5)
    assert capsys.readouterr().err == f"{text}\n"


def test_the_first_item_may_take_longer_than_the_delay(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_DELAY", 0.05)
    with Progress("decoding", 3, "sentences") as shown:
        time.sleep(0.5)
        assert capsys.readouterr().err == "decoding: 0 of 3 sentences\n"
        shown.advance()
    assert capsys.readouterr().err == ""


def test_lines_of_a_caller_come_from_its_thread(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.05)
    said = []
    with Progress("reading", 3, say=said.append) as shown:
        time.sleep(0.2)
        assert said == []
        shown.advance()
    assert len(said) == 1 and said[0].startswith("reading: 1 of 3, ")


@pytest.mark.parametrize(
    "seconds, rate", [(100.0, "20.0 seconds each"), (0.5, "10.0 a second"), (5.0, "1.0 a second")]
)
def test_rate_and_time_left_are_of_this_run(clock, seconds, rate):
    with Progress("decoding", 20, "rows", quiet=True) as shown:
        shown.skip(10)
        clock[0] = seconds
        shown.advance(5)
        left = f"0:{int(seconds) // 60:02}:{round(seconds) % 60:02}"
        assert shown.text == f"15 of 20 rows, {rate}, {left} left"


def test_large_numbers_and_hours(clock):
    with Progress("reading small", 60_500_000, "parameters", quiet=True) as shown:
        clock[0] = 3725.0
        shown.advance(30_250_000)
        assert shown.text == "30.2 of 60.5 million parameters, 1:02:05 left"


def test_a_terminal_has_a_bar_that_goes_away(clock, monkeypatch):
    with as_stderr(monkeypatch) as got:
        for _ in track("ab", 2, "compiling", names=["plain [x]", "gamma 2"]):
            clock[0] += 4
    assert got[0].startswith(HIDDEN) and got[0].endswith(CLEARED) and "━" in got[0]
    shown = re.sub(r"\x1b\[[\d?;]*\w", "", got[0])
    assert "1 of 2, gamma 2, 4.0 seconds each, 0:00:04 left: compiling" in shown
    assert "2 of 2: compiling" in shown


def test_messages_stand_above_the_bar(clock, monkeypatch):
    with as_stderr(monkeypatch) as got:
        with Progress("decoding", 2, "sentences") as shown:
            shown.message("before [x]")
            clock[0] += 4
            shown.advance()
            shown.message("meanwhile [x]")
    assert got[0].startswith("before [x]\r\n") and "meanwhile [x]\r\n" in got[0]
    assert got[0].endswith(CLEARED)


def test_what_blocks_shows_a_moving_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(progress, "_DELAY", 0.05)
    with as_stderr(monkeypatch) as got:
        with show_waiting("loading"):
            time.sleep(0.8)
    assert got[0].count("loading") > 2 and "0:00:00" in got[0] and got[0].endswith(CLEARED)


def test_a_task_inside_another_shows_no_second_bar(clock, monkeypatch):
    with as_stderr(monkeypatch) as got:
        with Progress("outer", 2) as outer:
            clock[0] += 4
            outer.advance()
            with Progress("inner", 2) as inner:
                clock[0] += 4
                inner.advance(2)
            outer.advance()
        with Progress("after", 1) as after:
            clock[0] += 4
            after.advance()
    assert "inner" not in got[0] and "outer" in got[0] and "after" in got[0]


def test_lines_go_to_the_standard_error_of_the_moment(capsys):
    print_line("a line")
    assert capsys.readouterr() == ("", "a line\n")
