"""Bad input ends in one clear line and exit code 2; the command as a process."""

import io
import os
import subprocess
import sys

import command_line
import main_folders
import pytest
from command_line import MODELS, expected
from devices import SPECDEC

from specdec_jax.backends.cpu import native
from specdec_jax.commands import generate as generate_command

pair = command_line.pair
cache = command_line.cache
specdec = command_line.specdec
compilations = command_line.compilations
pytestmark = pytest.mark.usefixtures("quick")

generate = main_folders.generate


# Bad input: one clear line, exit code 2, nothing compiled.

BAD = {
    "unknown command": (["translate"], "got 'translate', expected one of demo, generate"),
    "unknown flag": (["generate", "--gama=3"], "Unknown command line flag 'gama'"),
    "flag of another command": (["generate", "--repeats=3"], "Unknown command line flag 'repeats'"),
    "not a number": (["generate", "PAIR", "--gamma=many", "hello"], "gamma: got many, expected"),
    "arguments to benchmark": (["benchmark", "hello"], "got 'hello', expected flags only"),
    "no target": (["generate", "hello"], "target: got nothing, expected"),
    "missing checkpoint": (["generate", "--target=no/such/folder", "hello"], "no/such/folder"),
    "dtype": (
        ["generate", "PAIR", "--dtype=float8", "hello"],
        "got 'float8', expected float32 or bfloat16",
    ),
    "other vocabulary": (
        ["generate", "PAIR", "--drafter=STRANGER", "hello"],
        "got a vocabulary of 35 pieces",
    ),
    "gamma": (["generate", "PAIR", "--gamma=-1", "hello"], "gamma: got -1, expected"),
    "tree": (["generate", "PAIR", "--tree=3,2", "hello"], "tree: got '3,2', expected widths:3,2,1"),
    "children of a tree": (
        ["generate", "PAIR", "--tree=widths:2:all", "hello"],
        "children: got 'all', expected",
    ),
    "tree and beams": (
        ["generate", "PAIR", "--tree=widths:2", "--num_beams=2", "hello"],
        "tree: got 'widths:2' with num_beams, expected none",
    ),
    "width of plain beams": (
        ["generate", "--target=t", "--num_beams=4", "--beam_width=8", "hello"],
        "beam_width: got 8 for plain beam search, expected a drafter",
    ),
    "gamma of plain decoding": (
        ["generate", "--target=t", "--gamma=3", "hello"],
        "gamma: got 3 for plain decoding, expected a drafter, or a gamma of 0",
    ),
    "gamma of the demo": (["demo", "PAIR", "--gamma=-1"], "gamma: got -1, expected"),
    "gamma of the benchmark": (["benchmark", "PAIR", "--gamma=2,-1"], "gamma: got -1, expected"),
    "no text to time": (
        ["benchmark", "PAIR", "--input_file=BLANK"],
        "input_file: got no sentence with any text, expected at least one",
    ),
    "no text to measure": (
        ["measure", "PAIR", "--input_file=BLANK"],
        "input_file: got no sentence with any text, expected at least one",
    ),
    **{
        f"empty name of a file, {name} {more[0]}": (
            [name, *more, "--input_file="],
            "input_file: got an empty name, expected a file, or not to be given",
        )
        for name, more in (
            ("generate", ["--target=t", "hello"]),
            ("benchmark", ["--target=t"]),
            ("benchmark", ["--preset=t5_1_1/small", "--synthetic_alpha=1", "--drafter=lookup"]),
            ("measure", ["--target=t", "--drafter=d"]),
            ("tune", ["--target=t", "--drafter=d", "--config=tuned.gin"]),
        )
    },
    **{
        f"{flag[2:]} of sorted texts": (
            ["count", "--target=t", "--input_file=BLANK", "--suffix", "--output=x.suffix", flag],
            f"{got} with suffix, expected {default}: texts are not counted",
        )
        for flag, got, default in (
            ("--order=3", "order: got 3", 2),
            ("--continuations=4", "continuations: got 4", 8),
            ("--sampled", "sampled: got True", False),
        )
    },
    "gammas": (["benchmark", "PAIR", "--gamma=2,x"], "gamma: got '2,x', expected"),
    "temperature": (
        ["generate", "PAIR", "--temperature=-0.5", "hello"],
        "temperature: got -0.5, expected",
    ),
    "temperature NaN": (
        ["generate", "PAIR", "--temperature=nan", "hello"],
        "temperature: got nan, expected",
    ),
    "top_k": (["generate", "PAIR", "--top_k=-1", "hello"], "top_k: got -1, expected"),
    "top_p 0": (["generate", "PAIR", "--top_p=0", "hello"], "top_p: got 0.0, expected"),
    "top_p 1.5": (["generate", "PAIR", "--top_p=1.5", "hello"], "top_p: got 1.5, expected"),
    "max_new_tokens": (
        ["generate", "PAIR", "--max_new_tokens=0", "hello"],
        "max_new_tokens: got 0, expected at least 1",
    ),
    "batch_size": (
        ["generate", "PAIR", "--batch_size=0", "hello"],
        "batch_size: got 0, expected at least 1",
    ),
    "missing file": (
        ["generate", "PAIR", "--input_file=no.txt"],
        "input_file: got 'no.txt', which is no file",
    ),
    "empty file": (["generate", "PAIR", "--input_file=EMPTY"], "got no lines from"),
    "not UTF-8": (
        ["generate", "PAIR", "--input_file=LATIN1"],
        "line 2: got bytes that are not UTF-8",
    ),
    "output in no folder": (
        ["generate", "PAIR", "--output_file=no/such/file", "hello"],
        "output_file: got 'no/such/file', expected",
    ),
    "long output name": (
        ["generate", "PAIR", f"--output_file={'x' * 300}", "hello"],
        "output_file: got a name of 300 bytes, expected at most 242",
    ),
    "output over the input": (
        ["generate", "PAIR", "--input_file=LATIN1", "--output_file=LATIN1"],
        "which is the input, expected",
    ),
    "measurements over the input": (
        ["measure", "PAIR", "--input_file=LATIN1", "--output=LATIN1"],
        "which is the input, expected",
    ),
    "settings over the input": (
        ["tune", "PAIR", "--input_file=LATIN1", "--config=LATIN1"],
        "which is the input, expected",
    ),
    "compressed output": (
        ["generate", "PAIR", "--output_file=a.txt.gz", "hello"],
        "output_file: got 'a.txt.gz', expected a name without .gz",
    ),
    "output file and stream": (
        ["generate", "PAIR", "--output_file=LATIN1", "--stream", "hello"],
        "stream: got True with output_file=",
    ),
    "two sources": (
        ["generate", "PAIR", "--input_file=LATIN1", "hello"],
        "expected one of the two",
    ),
    "too long": (["generate", "PAIR", "--max_input_length=5", "hello " * 9], "sentence 1: got"),
    "too long for the benchmark": (
        ["benchmark", "PAIR", "--max_input_length=5"],
        "sentences 1, 2, ",
    ),
    "too long for the demo": (["demo", "PAIR", "--max_input_length=5"], "sentences 1, 2, "),
    "gin name": (
        ["generate", "PAIR", "--gin.Nothing.x=1", "hello"],
        "No configurable matching 'Nothing'",
    ),
    "gin field": (
        ["generate", "PAIR", "--gin.GenerateOptions.gama=1", "hello"],
        "doesn't have a parameter named 'gama'",
    ),
    "gin macro": (
        ["generate", "PAIR", "--gin.GAMMA=1", "hello"],
        "got --gin.GAMMA, expected a name that `specdec generate` uses",
    ),
    "gin scope": (
        ["generate", "PAIR", "--gamma=1", "--gin.x/GenerateOptions.gamma=2", "hello"],
        "expected a name that",
    ),
    "gin value": (
        ["generate", "PAIR", "--gin.GenerateOptions.gamma=1.5", "hello"],
        "gamma: got 1.5, expected int",
    ),
    "gin syntax": (["generate", "PAIR", "--gin.GenerateOptions.gamma=[", "hello"], "gin: "),
    "gin form": (["generate", "PAIR", "--gin.GAMMA", "hello"], "expected --gin.NAME=value"),
    "gin file": (
        ["generate", "PAIR", "--gin_file=no.gin", "hello"],
        "gin_file: got 'no.gin', expected a file in",
    ),
    "train without settings": (["train"], "expected --gin_file or --gin.NAME=value"),
    "train with half of them": (["train", "--gin.TrainConfig.steps=3"], "gin: "),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input(specdec, pair, tmp_path, compilations, case):
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text("\n  \n")
    (tmp_path / "latin1").write_bytes("gut\nschön\n".encode("latin-1"))
    argv, message = BAD[case]
    filled = []
    for argument in argv:
        for name in ("empty", "blank", "latin1"):
            argument = argument.replace(f"={name.upper()}", f"={tmp_path / name}")
        filled += MODELS[:3] if argument == "PAIR" else [argument]
    code, out, err = specdec(*filled)
    assert code == 2 and not out
    *before, last = err.splitlines()
    assert last.startswith("specdec: error: ") and message in last
    assert not before or argv[0] == "demo" and before[0].startswith("loading "), (
        "the demo says what it waits for"
    )
    assert not compilations


def test_the_default_dtype_is_printed(specdec):
    code, _, err = specdec("generate", "--target=TARGET", "--max_input_length=1", "Tom")
    assert (
        code == 2
        and "float32" in err.splitlines()[0]
        and err.splitlines()[-1].startswith("specdec: error: sentence 1")
    )


def test_empty_standard_input(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code, out, err = generate()
    assert (code, out) == (2, "") and "got no lines from standard input" in err


def test_standard_input_not_utf8(generate, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"sch\xf6n\n")))
    code, out, err = generate()
    assert (code, out) == (2, "") and "standard input, line 1: got bytes that are not UTF-8" in err


def test_the_help_warns_that_gin_files_are_code(specdec):
    code, out, _ = specdec("train", "--help")
    assert code == 0 and "it is code: use none from a source you do not trust" in " ".join(
        out.split()
    )


def test_debug_shows_the_traceback(generate):
    with pytest.raises(ValueError, match="gamma"):
        generate("--gamma=-1", "--debug", "hello")


def test_interrupt(generate, monkeypatch):
    monkeypatch.setattr(
        generate_command, "decode_all", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert generate("hello") == (130, "", "specdec: interrupted\n")


# As a process.


def process(*argv, environment, **options):
    return subprocess.run(
        [*SPECDEC, *map(str, argv)],
        capture_output=True,
        encoding="utf-8",
        env=os.environ | environment,
        **options,
    )


@pytest.mark.slow
def test_process_reads_writes_and_keeps_what_it_compiled(pair, tmp_path, quick_environment):
    argv = [
        "generate",
        "--target",
        pair / "target",
        "--dtype=float32",
        "--max_new_tokens=6",
        "--batch_size=1",
    ]
    # A new folder would get a kernel of its own, which takes seconds to compile.
    cache = {"XDG_CACHE_HOME": str(tmp_path), native.SETTING: "off"}
    done = process(*argv, environment=quick_environment | cache, input="Tom\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n".join([*expected(pair, ["Tom"]), "", ""])
    assert any((tmp_path / "specdec_jax").iterdir())


@pytest.mark.slow
def test_process_error():
    done = process("generate", "--target=no/such/model", "hello", environment={})
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("specdec: error: ") and done.stderr.count("\n") == 1
