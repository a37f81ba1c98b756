"""Every command that the help and the pages show runs: on toy models and inputs, with few steps.

What needs data, devices or packages that are not there is run up to the error that says so.
"""

import contextlib
import functools
import gc
import importlib.util
import re
import shlex
import sys

import command_line
import documented
import pages
import pytest

from specdec_jax.commands import help_page, main

pages.require_checkout()
pytestmark = [pytest.mark.usefixtures("quick")]
cache = command_line.cache
HELP = [line for lines in help_page.EXAMPLES.values() for line in lines]
ON_PAGES = [shlex.join(argv) for argv in documented.all_commands()]
# Cheap on toy models. The others time, search or measure.
_QUICK = ("generate", "count", "convert", "distill", "train", "train_heads")
CHEAP = [line for line in HELP if line.split()[1] in _QUICK]
CHEAP.append("specdec figures --output=report.html")
# What a command needs that need not be here, and how the error begins that says so.
NEEDS = {
    "data": (
        r"DATA_DIR=|--data_dir=data",
        r"(train|validation|source)_files: got '\S*(data|runs/outputs)/\S+'",
    ),
    "languages": (r"--source_language=", r"source_language: got .* no languages"),
    "a store": (r"=gs://", r".*gs://.*(a URL|Cannot connect to host)"),
    "a record of a device": (
        r"--records=(tpu|v4|gpu|accelerator)\.",
        r"\S+: .*no such|got '?(tpu|v4|gpu|accelerator)",
    ),
    "devices": (r"--mesh=", r"mesh: got .*devices"),
    "T5X": (r"--against=t5x", r"against: got 't5x', which is not installed"),
    "a task": (r"--task=|configs/tasks/", r"(task|gin|module_import|seqio): .*"),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Returns a function that builds the folder of a test function, all of whose cases share it."""

    @functools.cache
    def build(name: str):
        folder = tmp_path_factory.mktemp("documented")
        documented.build(folder)
        return folder

    return build


@pytest.fixture
def run(request, folder_of, monkeypatch, capsys):
    """Returns a function that runs a documented command; it returns what went wrong, or None."""
    folder = folder_of(request.function.__name__)
    documented.shrink(monkeypatch, folder)

    def run(line: str) -> str | None:
        argv = shlex.split(line)[1:]
        with contextlib.ExitStack() as files:
            if "<" in argv:
                place = argv.index("<")
                source = files.enter_context(open(argv[place + 1], encoding="utf-8"))
                monkeypatch.setattr(sys, "stdin", source)
                argv = argv[:place]
            code = main.main([argv[0], *argv[1:], *smaller(argv)])
        gc.collect()  # some commands make models of a gigabyte
        printed = capsys.readouterr().err
        for need, (pattern, message) in NEEDS.items():
            if (
                code
                and re.search(pattern, line)
                and re.search(f"specdec: error: {message}", printed)
            ):
                return None if need != "T5X" or importlib.util.find_spec("t5x") is None else printed
        return f"{line}: {code}: {printed[-600:]}" if code else None

    return run


def smaller(argv: list[str]) -> list[str]:
    """Returns the flags that make a command smaller."""
    added = list(documented.SMALLER.get(argv[0], ()))
    if argv[0] == "benchmark" and not any(word.startswith("--preset") for word in argv):
        added.append("--limit=2")
    if any(word.startswith("--preset") for word in argv):
        added.append("--input_length=8")
    return added


@pytest.mark.slow
@pytest.mark.parametrize("line", CHEAP, ids=lambda line: " ".join(line.split()[1:2]))
def test_cheap_examples_of_the_help_run(line, run):
    """In their order: some read what others write."""
    assert run(line) is None


@pytest.mark.slow
def test_every_documented_command_runs(run):
    """In the order of the help and the pages; those that read records come last."""
    lines = sorted(dict.fromkeys(HELP + ON_PAGES), key=lambda line: "--records=" in line)
    assert not [wrong for line in lines if (wrong := run(line))]
