"""Options that are paths: home folders, replaced files, and sentences that begin with a dash."""

import dataclasses
import pathlib
import typing

import command_line
import jax
import pytest
from absl import flags

import specdec_jax as sd
from specdec_jax.commands import main, output_lines, paths
from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.files.writing import write_file

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")

# Options that hold strings and are no paths.
OTHERS = {
    "shard",
    "dtype",
    "quantize",
    "mesh",
    "logit_bias",
    "forced_tokens",
    "verifier",
    "gamma_policy",
    "gamma_settings",
    "gamma",
    "tree",
    "beam_style",
    "early_stopping",
    "stop",
    "task",
    "split",
    "module_import",
    "preset",
    "drafter_preset",
    "against",
    "suite",
    "format",
    "gated_activation",
    "divergence",
    "select",
    "matmul_dtype",
    "non_finite",
    "generation_config",
    "drafter_sampling",
    "source_language",
    "target_language",
}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_every_option_that_is_a_path_begins_at_home(name, home):
    cls, _ = main.COMMANDS[name].load()
    kinds = typing.get_type_hints(cls)
    texts = [field.name for field in dataclasses.fields(cls) if "str" in str(kinds[field.name])]
    named = [field for field in texts if field not in OTHERS]
    assert named and {*named} <= {*paths.INPUTS, *paths.OUTPUTS}

    for field in named:
        made = dataclasses.make_dataclass(field, [(field, typing.Any)], frozen=True)
        for given, expected in [
            ("~/a", f"{home}/a"),
            ("a~", "a~"),
            (None, None),
            (("~/a", "b"), (f"{home}/a", "b")),
            ("file:///a/b", "/a/b"),
            ("File:///a/b", "/a/b"),
            ("gs://a/b", "gs://a/b"),
        ]:
            assert getattr(paths.expand_options(made(given)), field) == expected
    assert not {*paths.INPUTS, *paths.OUTPUTS} & OTHERS


def test_several_drafters_of_a_suite(home):
    options = dataclasses.replace(GenerateOptions(), drafter="~/small,lookup,~/base")
    assert paths.expand_options(options).drafter == f"{home}/small,lookup,{home}/base"


def test_paths_of_a_command_begin_at_home(specdec, pair, home):
    """As flags, from gin, and for flags that every command has."""
    (home / "target").symlink_to(pair / "target")
    write_file(home / "texts.txt", "We asked\n")
    write_file(home / "here.gin", 'GenerateOptions.target = "~/target"\n')
    common = [
        "--dtype=float32",
        "--max_new_tokens=6",
        "--input_file=~/texts.txt",
        "--compilation_cache_dir=~/programs",
    ]
    code, printed, _ = specdec("generate", "--target=~/target", *common)
    assert code == 0 and len(printed.splitlines()) == 1
    assert (
        jax.config.jax_compilation_cache_dir == f"{home}/programs"
        and not pathlib.Path("~").exists()
    )
    code, out, _ = specdec("generate", "--gin_file=~/here.gin", *common, "--output_file=~/out.txt")
    assert (code, out, (home / "out.txt").read_text()) == (0, "", printed)


DASHES = ["-5 degrees outside.", "- a list", "--no idea", "-x", "-5"]


@pytest.mark.parametrize("text", DASHES)
def test_a_sentence_that_begins_with_a_dash_needs_two(text):
    command = main.COMMANDS["generate"]

    def define():
        return main._define_flags(GenerateOptions, dataclasses.fields(GenerateOptions))

    with pytest.raises(main.UsageError, match="write -- before sentences that begin with a dash"):
        main._parse_flags(define(), ["--gamma=2", text], command)
    assert main._parse_flags(define(), ["--gamma=2", "--", text, "b"], command) == [text, "b"]
    with pytest.raises(flags.UnrecognizedFlagError):  # a command without sentences
        main._parse_flags(define(), [text], main.COMMANDS["benchmark"])


def test_a_file_that_is_replaced_is_named_before_it_is(specdec, pair, tmp_path, monkeypatch):
    path, seen = tmp_path / "out.txt", []
    arguments = ["generate", *command_line.MODELS, f"--output_file={path}"]
    assert "replaced" not in specdec(*arguments, "We")[2]
    monkeypatch.setattr(
        output_lines, "join_lines", lambda text: seen.append(path.read_text()) or text
    )
    code, _, err = specdec(*arguments, "Tom")
    assert code == 0 and err.startswith(f"{path}: this file is there and will be replaced\n")
    assert len(seen) == 1 and path.read_text() != "" and seen[0].count("\n") == 1
    code, _, err = specdec(*arguments, "--max_new_tokens=0", "Tom")
    assert code == 2 and err.count("\n") == 1, "an error of the options is the only line"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["count", "figures"])
def test_other_commands_name_it_too(specdec, pair, tmp_path, kind):
    write_file(tmp_path / "text", "We asked\n")
    argv = {
        "count": [
            "count",
            "--target=TARGET",
            f"--input_file={tmp_path / 'text'}",
            f"--output={tmp_path / 'a.npz'}",
        ],
        "figures": ["figures", f"--output={tmp_path / 'a.html'}"],
    }[kind]
    for there in (False, True):
        code, _, err = specdec(*argv)
        assert code == 0 and ("this file is there and will be replaced" in err) == there


def test_settings_lie_beside_what_a_kill_leaves(specdec, pair, tmp_path, monkeypatch):
    """Until the output file is there; those of an earlier output stay until then."""
    path = tmp_path / "out.txt"
    arguments = [
        "generate",
        *command_line.MODELS,
        "--batch_size=1",
        f"--output_file={path}",
        "We",
        "Tom",
    ]
    assert specdec(*arguments, "--seed=1")[0] == 0
    before = (tmp_path / "out.txt.gin").read_text()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(output_lines, "join_lines", interrupt)
        assert specdec(*arguments, "--seed=2")[0] == 130
    assert (tmp_path / "out.txt.gin").read_text() == before and "seed = 1" in before
    partial = tmp_path / "out.txt.partial.gin"
    assert "seed = 2" in partial.read_text()
    code, _, err = specdec("generate", f"--gin_file={partial}", "We", "Tom")
    assert code == 0, err
    assert not partial.exists() and "seed = 2" in (tmp_path / "out.txt.gin").read_text()


def test_a_file_in_the_place_of_a_folder_is_not_reported_as_replaced(tmp_path):
    options = dataclasses.make_dataclass("Options", ["output", "output_dir"], frozen=True)
    for name in ("output", "output_dir"):
        write_file(tmp_path / name, "a file")
    assert [
        *paths.find_replaced(options(str(tmp_path / "output"), str(tmp_path / "output_dir")))
    ] == [f"{tmp_path}/output"]


def test_settings_replace_no_file_that_the_command_line_names(specdec, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = command_line.MODELS
    sd.GenerationConfig(max_new_tokens=3).save("german.gin")
    write_file("flags.gin", "GenerateOptions.seed = 3\n")
    write_file("lines.gin", "We\n")
    (tmp_path / "link.gin").symlink_to("flags.gin")
    before = {path: path.read_text() for path in tmp_path.glob("*.gin")}
    for name, argv in {
        "config": ["--config=german.gin", "--output_file=german", "We"],
        "gin_file": ["--gin_file=flags.gin", "--output_file=link", "We"],
        "input_file": ["--input_file=lines.gin", "--output_file=./lines"],
    }.items():
        code, out, err = specdec("generate", *models, *argv)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f".gin, which {name} names too, expected another name" in err
    for output, message in [
        ("tuned", "settings go to tuned.gin, which config names too"),
        ("./tuned.gin", "config: got 'tuned.gin', expected another file than output"),
    ]:
        argv = ["tune", *models[:2], "--config=tuned.gin", f"--output={output}"]
        code, _, err = specdec(*argv)
        assert code == 2 and err.count("\n") == 1 and message in err
    assert {path: path.read_text() for path in tmp_path.glob("*.gin")} == before


def test_settings_that_repeat_their_run_stay(specdec, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert specdec("generate", *command_line.MODELS, "--output_file=out", "We")[0] == 0
    first, again = (tmp_path / "out").read_text(), ["generate", "--gin_file=out.gin"]
    settings = (tmp_path / "out.gin").read_text() + "# mine\n"
    write_file("out.gin", settings)
    assert specdec(*again, "We")[0] == 0
    assert ((tmp_path / "out").read_text(), (tmp_path / "out.gin").read_text()) == (first, settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.gin"]
    code, _, err = specdec(*again, "--seed=5", "We")
    assert code == 2 and "out.gin, which gin_file names too" in err
    assert (tmp_path / "out.gin").read_text() == settings
