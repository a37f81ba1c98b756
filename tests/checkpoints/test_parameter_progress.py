"""Long readings and writings show a bar on a terminal, and lines elsewhere; short ones nothing."""

import re

import make_checkpoints as make
import pytest
from make_checkpoints import TENSORS, TINY
from terminal import as_stderr

import specdec_jax as sd
from specdec_jax.checkpoints import stored_tensor
from specdec_jax.checkpoints.converter import FORMATS
from specdec_jax.commands import benchmark, convert
from specdec_jax.files import progress
from specdec_jax.files.progress import Progress
from specdec_jax.models.parameters import parameter_count, parameter_shapes

pytestmark = pytest.mark.usefixtures("quick")

COUNT = len(parameter_shapes(TINY))
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # what hides a terminal's cursor, and shows it again
# The bar is taken away, and what is printed next stands in its place.
CLEARED = f"\r\n{SHOWN}\r\x1b[1A\x1b[2K"


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_DELAY", 3.0)  # tests/conftest.py makes it longer
    return now


@pytest.fixture
def folder(tmp_path):
    return make.write_hf(tmp_path / "model", TENSORS)


@pytest.fixture
def slowly(clock, monkeypatch):
    """Returns a function that makes reading `TINY` take so many seconds.

    It fails at one of the parameters if asked to.
    """
    read = stored_tensor.StoredTensor.load

    def slow(seconds: float, fails_at: int | None = None) -> None:
        numbers = iter(range(COUNT))

        def load(self, dtype):
            clock[0] += seconds / COUNT
            if next(numbers) == fails_at:
                raise ValueError("a truncated file")
            return read(self, dtype)

        monkeypatch.setattr(stored_tensor.StoredTensor, "load", load)

    return slow


def test_lines_have_the_right_numbers(clock):
    lines_printed = []
    options = dict(say=lines_printed.append, last="placing them")
    with Progress("reading flan-t5-xxl", 11_300_000_000, "parameters", **options) as shown:
        for seconds, count, lines in (
            (2.0, 400_000_000, 0),
            (3.0, 600_000_000, 1),
            (9.0, 113_000_000, 1),
            (2.0, 1_987_000_000, 2),
            (8.0, 3_000_000_000, 2),
            (1.0, 5_200_000_000, 3),
        ):
            clock[0] += seconds
            shown.advance(count)
            assert len(lines_printed) == lines
    assert lines_printed == [
        "reading flan-t5-xxl: 1.0 of 11.3 billion parameters, 0:00:52 left",  # 5 s × 10.3 / 1
        "reading flan-t5-xxl: 3.1 of 11.3 billion parameters, 0:00:42 left",  # 16 s × 8.2 / 3.1
        "reading flan-t5-xxl: 11.3 of 11.3 billion parameters, placing them",
    ]


def test_loading_prints_progress_without_a_terminal(slowly, folder, capsys):
    slowly(36.0)
    model = sd.load(folder, "float32")
    lines = capsys.readouterr().err.splitlines()
    total = f"{parameter_count(TINY):,}"
    expected = (
        rf"reading {re.escape(str(folder))}: [\d,]+ of {total} parameters, "
        r"[\d.,]+ a second, 0:00:(\d\d) left"
    )
    found = [re.fullmatch(expected, line) for line in lines[:-1]]
    assert len(found) == 4 and all(found)
    assert lines[-1] == f"reading {folder}: {total} of {total} parameters, placing them"
    assert model.params["token_embedder"]["embedding"].shape == (40, 16)


def test_time_left_is_by_size_not_by_count(slowly, folder):
    """The largest are read first: half of the names are far more than half of the parameters."""
    slowly(36.0)
    lines_printed = []
    sd.load(folder, "float32", say=lines_printed.append)
    left = [int(re.search(r":(\d\d) left", line)[1]) for line in lines_printed[:2]]
    assert len(lines_printed) == 5 and left[0] < 15 and left[1] < 10  # 33 and 23 by their count


@pytest.mark.parametrize("seconds, kind", [(2.9, "xterm"), (2.9, "dumb"), (2.9, None)])
def test_nothing_is_shown_of_a_short_reading(slowly, folder, monkeypatch, capsys, seconds, kind):
    slowly(seconds)
    if kind is None:
        sd.load(folder, "float32")
        assert capsys.readouterr() == ("", "")
        return
    with as_stderr(monkeypatch, kind) as got:
        sd.load(folder, "float32")
    assert got == [""]


def test_a_short_reading_does_not_import_the_bar(slowly, folder, monkeypatch):
    monkeypatch.setattr(Progress, "_begin_bar", lambda self: pytest.fail("begun"))
    slowly(2.9)
    sd.load(folder, "float32")


@pytest.mark.parametrize("columns", [120, 60])
def test_a_terminal_has_a_bar_that_goes_away(slowly, folder, monkeypatch, columns):
    slowly(36.0)
    with as_stderr(monkeypatch, columns=columns) as got:
        sd.load(folder, "float32")
    total = f"{parameter_count(TINY):,}"
    assert got[0].startswith(HIDDEN) and got[0].endswith(CLEARED)
    assert re.search(rf"of {total} parameters, [\d.,]+ a second, 0:00:", got[0])
    assert f"{total} of {total} parameters, placing them" in got[0]
    assert ("━" in got[0]) == (columns == 120)  # a narrow terminal has no room for it


def test_a_dumb_terminal_gets_lines(slowly, folder, monkeypatch):
    slowly(36.0)
    with as_stderr(monkeypatch, "dumb") as got:
        sd.load(folder, "float32")
    assert got[0].count("\r\n") == 5 and "\x1b" not in got[0]


@pytest.mark.parametrize("fails_at", [COUNT // 2, COUNT - 1])
def test_an_error_leaves_the_terminal_as_it_was(slowly, folder, monkeypatch, fails_at):
    slowly(36.0, fails_at)
    with as_stderr(monkeypatch) as got:
        try:
            sd.load(folder, "float32")
        except ValueError as error:  # printed while the traceback still holds everything
            print(error, file=progress.sys.stderr)
    assert got[0].startswith(HIDDEN) and got[0].endswith(f"{CLEARED}a truncated file\r\n")
    assert got[0].count(HIDDEN) == got[0].count(SHOWN) == 1


def test_a_caller_may_have_the_lines_or_silence(slowly, folder, monkeypatch):
    slowly(36.0)
    lines_printed = []
    with as_stderr(monkeypatch) as got:
        sd.load(folder, say=lines_printed.append)
        slowly(36.0)
        sd.load(folder, say=lambda line: None)
    assert got == [""]
    assert (
        lines_printed[0].startswith(f"loading {folder} in float32, the default")
        and len(lines_printed) == 6
    )
    assert all(line.startswith(f"reading {folder}: ") for line in lines_printed[1:])


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_dummy_weights_report_every_parameter(quantize):
    counts = []
    config = sd.T5Config(96, 64, 2, 32, 2, 2, 128, dtype="float32")
    sd.LanguageModel.dummy(config, quantize=quantize, report=counts.append)
    assert sum(counts) == parameter_count(config) and len(counts) == len(parameter_shapes(config))


def test_a_preset_says_that_it_is_made(clock, monkeypatch, capsys):
    advance = Progress.advance

    def slow(self, count):
        clock[0] += 4.0
        advance(self, count)

    monkeypatch.setattr(Progress, "advance", slow)
    monkeypatch.setitem(sd.PRESETS, "tiny", TINY)
    benchmark.load(benchmark.BenchmarkOptions(preset="tiny", dtype="float32"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 + 4 * (COUNT - 1) // 12 and all(
        line.startswith("making tiny: ") for line in lines
    )


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_long_writing_prints_progress(slowly, folder, tmp_path, form, saved):
    model = sd.load(folder, "float32")
    slowly(36.0)
    lines_printed, out = [], tmp_path / "out"
    if saved:
        sd.save(model, out, format=form, say=lines_printed.append)
    else:
        sd.convert(folder, out, form, say=lines_printed.append)
    total = f"{parameter_count(TINY):,}"
    assert len(lines_printed) == 5 and all(
        line.startswith(f"writing {out}: ") for line in lines_printed
    )
    assert re.search(rf" of {total} parameters, [\d.,]+ a second, 0:00:", lines_printed[0])
    assert lines_printed[-1] == f"writing {out}: {total} of {total} parameters"


@pytest.mark.parametrize("form", FORMATS)
def test_an_error_while_converting_leaves_the_terminal_as_it_was(
    slowly, folder, monkeypatch, tmp_path, form
):
    slowly(36.0, COUNT // 2)
    with as_stderr(monkeypatch) as got:
        try:
            convert.run(
                convert.ConvertOptions(
                    source=str(folder), output=str(tmp_path / "out"), format=form
                )
            )
        except ValueError as error:
            print(error, file=progress.sys.stderr)
    assert got[0].startswith(HIDDEN) and got[0].endswith(f"{CLEARED}a truncated file\r\n")
