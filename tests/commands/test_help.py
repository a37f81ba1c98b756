"""`specdec COMMAND --help`, and the commands that the help and the pages of documentation show."""

import dataclasses
import json
import os
import re
import shlex
import subprocess

import pages as shared_pages
import pytest
from devices import SPECDEC

from specdec_jax.commands import help_page, main, sentences
from specdec_jax.files import places

ROOT = shared_pages.ROOT
TEXTS = {
    shared_pages.name_of(path): path.read_text(encoding="utf-8") for path in shared_pages.pages()
}
# Files and folders that are the reader's own, as the pages say of them: names that end in "/", and
# these.
OWN = (
    "data",
    "test.txt",
    "prompts.txt",
    "abstracts.txt",
    "ende/train.tsv.gz",
    "ende/test.tsv.gz",
    "wiki_pe/test.tsv.gz",
    "sentencepiece.model",
    "/dev/shm/flan_t5_xxl",
    "flan_t5_small",
)
READ = {
    "target",
    "drafter",
    "source",
    "input_file",
    "gin_file",
    "records",
    "shortlist",
    "vocabulary",
    "source_files",
    "validation_files",
}
WRITTEN = {"output", "output_file", "config", "plot", "report", "output_dir"}
EXAMPLES = [shlex.split(line) for lines in help_page.EXAMPLES.values() for line in lines]


def parsed(argv: list[str]):
    """The flags of a command line that parses, and what is neither flag nor gin."""
    command = main.COMMANDS[argv[1]]
    cls, _ = command.load()
    fields = dataclasses.fields(cls) if command.by_flags else ()
    rest, bindings = main._split_gin([word for word in argv[2:] if word != "<" and word != ">"])
    values = main._define_flags(cls, fields)
    arguments = values(["specdec", *rest])[1:]
    return values, arguments, bindings


def test_every_flag_is_in_one_group():
    grouped = [flag for flags in help_page.GROUPS.values() for flag in flags]
    assert len(grouped) == len(set(grouped))
    there = set()
    for command in main.COMMANDS.values():
        cls, _ = command.load()
        there |= set(main._define_flags(cls, dataclasses.fields(cls) if command.by_flags else ()))
    assert set(grouped) == there - {"h"}


def test_help_comes_in_groups_that_fit_the_terminal(capsys, monkeypatch):
    pages = {}
    for columns in (50, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main.main(["generate", "--help"]) == 0
        pages[columns] = capsys.readouterr().out
        flags = pages[columns].partition("\nmodels:\n")[2]
        assert max(map(len, flags.splitlines())) < min(max(columns, 57), 100)
    titles = re.findall("^([a-z][^\n]*):$", pages[80], re.MULTILINE)
    assert titles[0] == "examples" and len(titles) >= 6
    assert [re.sub(r"\s+", " ", page) for page in pages.values()] == [
        re.sub(r"\s+", " ", pages[80])
    ] * 3


@pytest.mark.parametrize("argv", EXAMPLES, ids=shlex.join)
def test_examples_of_the_help_parse(argv):
    assert (
        set(help_page.EXAMPLES) == set(main.COMMANDS) and len(help_page.EXAMPLES["generate"]) == 3
    )
    values, arguments, _ = parsed(argv)
    assert not arguments or main.COMMANDS[argv[1]].arguments
    if values.gin_file:
        shared_pages.require_checkout()
    for file in values.gin_file:
        assert (ROOT / file).is_file()


def names(argv: list[str], flags: set[str]) -> list[str]:
    """What the flags of a command line name, one by one."""
    result = [word.partition("=") for word in argv if word.startswith("--")]
    values = [(name.removeprefix("--"), value) for name, _, value in result]
    values += [
        ("output_dir", value.strip('"')) for name, value in values if name == "gin.OUTPUT_DIR"
    ]
    return [one for name, value in values if name in flags for one in value.split(",")]


def made_by(argv: list[str]) -> list[str]:
    """Files that the command writes; a training run has its model in a folder of a fixed name."""
    result = names(argv, WRITTEN)
    return result + [
        f"{folder}/{part}"
        for folder in result
        for part in ("model", "heads", "eagle")
        if "runs/" in folder
    ]


def check_files_read(argvs: list[list[str]], made: set[str]) -> None:
    """Checks the flags of commands, and that each file they read exists or was made before.

    Args:
      made: files that are made elsewhere.
    """
    from specdec_jax.checkpoints import loader
    from specdec_jax.drafters.named import needs_no_model

    made = set(made)
    for argv in argvs:
        parsed(argv)
        for name in names(argv, READ) + ([argv[argv.index("<") + 1]] if "<" in argv else []):
            known = (
                name in (*loader.bundled(), sentences.BUILT_IN, *made, *OWN)
                or (ROOT / name).is_file()
                or places.is_remote(name)
            )
            drafts = needs_no_model(name) and not name.endswith(".npz")
            assert known or drafts or name.endswith("/") or "…" in name, (shlex.join(argv), name)
        made |= set(made_by(argv))


def test_what_examples_of_the_help_read_is_there():
    """Or it is made by an example before, so that the examples run in turn as they stand."""
    shared_pages.require_checkout()
    check_files_read(EXAMPLES, set())


def test_what_pages_read_is_there_or_made_by_an_example():
    """By one before it on the same page, or by any on another page."""
    shared_pages.require_checkout()
    commands = {page: shared_pages.commands(text) for page, text in TEXTS.items()}
    made = {
        page: {file for argv in argvs for file in made_by(argv)} for page, argvs in commands.items()
    }
    for page, argvs in commands.items():
        elsewhere = {file for other in made if other != page for file in made[other]}
        check_files_read(argvs, elsewhere | shared_pages.written_by_shell(TEXTS[page]))


def test_pairs_to_try_training_on_are_whole():
    shared_pages.require_checkout()
    rows = [
        line.split("\t")
        for name in ("train", "validation")
        for line in (ROOT / f"configs/examples/{name}.tsv").read_text(encoding="utf-8").splitlines()
    ]
    assert (
        all(len(row) == 2 and all(part.strip() for part in row) for row in rows) and len(rows) > 30
    )
    assert [source for source, _ in rows][
        : len(sentences.read_built_in_sentences())
    ] == sentences.read_built_in_sentences()


@pytest.mark.slow
def test_examples_run_anywhere(tmp_path, quick_environment):
    """Of a package that is installed, from any folder: no file is needed."""
    line = (
        "generate --target=ende/target --drafter=lookup --input_file=ende/sentences.txt "
        "--max_new_tokens=2 --json"
    )
    environment = {**os.environ, **quick_environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*SPECDEC, *shlex.split(line)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len([json.loads(result)["text"] for result in done.stdout.splitlines()]) == len(
        sentences.read_built_in_sentences()
    )
