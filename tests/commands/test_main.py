"""The command line through `main(argv)`, and once or twice as a process."""

import gzip
import io
import json
import pathlib
import sys

import command_line
import gin
import main_folders
import pytest
import tiers
from command_line import MODELS, SENTENCES, expected
from sample_records import BENCHMARK

import specdec_jax as sd
from specdec_jax.analysis import traces
from specdec_jax.analysis.report import records
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import generate as generate_command
from specdec_jax.commands import main
from specdec_jax.decoding import continuous_batching
from specdec_jax.decoding import inputs as decoding_inputs
from specdec_jax.speculative.tree_text import read_tree

pair = command_line.pair
cache = command_line.cache
specdec = command_line.specdec
compilations = command_line.compilations
pytestmark = pytest.mark.usefixtures("quick")

generate = main_folders.generate


# Help.


def test_help(specdec):
    code, out, err = specdec("--help")
    assert code == 0 and not err
    assert all(name in out for name in main.COMMANDS)


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_help_of_a_command_names_every_setting(specdec, name):
    code, out, err = specdec(name, "--help")
    assert code == 0 and not err
    cls, _ = main.COMMANDS[name].load()
    prefix = "--" if main.COMMANDS[name].by_flags else ""
    out = out.replace("--[no]", "--")
    assert all(
        f"{prefix}{field}" in out
        for field in [*cls.__dataclass_fields__, "gin_file", "gin_search_paths"]
    )


def test_no_command(specdec):
    code, out, err = specdec()
    assert code == 2 and not out and "usage" in err


def test_version(specdec):
    assert specdec("--version") == (0, f"specdec {sd.__version__}\n", "")


# specdec generate.


def test_sentences_from_arguments_in_order(generate, pair, compilations):
    code, out, err = generate(*SENTENCES)
    assert compilations  # so that the fixture is known to notice
    assert (code, err) == (0, "")
    assert out.splitlines() == expected(pair)


@pytest.mark.parametrize("name", ["sentences.txt", "sentences.txt.gz"])
def test_sentences_from_a_file(generate, pair, tmp_path, name):
    content = "".join(f"{text}\n" for text in SENTENCES).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    code, out, _ = generate("--input_file", tmp_path / name, "--gamma=0", "--batch_size=1")
    assert code == 0 and out.splitlines() == expected(pair)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_sentences_from_standard_input(generate, pair, monkeypatch, end):
    text = "".join(f"{sentence}{end}" for sentence in SENTENCES)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    code, out, _ = generate()
    assert code == 0 and out.splitlines() == expected(pair)


def test_json(generate, pair):
    code, out, _ = generate("--json", *SENTENCES)
    records = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [record["text"] for record in records] == expected(pair)
    for text, record in zip(SENTENCES, records, strict=True):
        stats = record["stats"]
        assert len(record["tokens"]) == len(record["log_probs"]) <= 6
        assert bool(record["tokens"]) == bool(text)
        assert sum(stats["accepted_by_position"]) == stats["accepted"] <= stats["drafted"]
        assert len(stats["examined_by_position"]) == 2


@tiers.parametrize(
    "form", ["widths:2,1", "parents:0,0,1:drawn:recursive", "dynamic:2,2,4"], first=1
)
def test_a_tree(generate, pair, tmp_path, form):
    """Drafts so many nodes, and gives the same outputs, in a file too."""
    arguments = [f"--tree={form}", "--gamma=auto", *SENTENCES]
    code, out, err = generate("--json", *arguments)
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "") and [record["text"] for record in records] == expected(pair)
    nodes = read_tree(form).size - 1
    drafting = [record["stats"] for record in records if record["stats"]["drafted"]]
    assert drafting and all(
        nodes <= stats["drafted"] <= nodes * stats["target_calls"] for stats in drafting
    )
    assert generate(*arguments, "--output_file", tmp_path / "out.txt")[0] == 0
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines() == expected(pair)


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_batch(generate):
    arguments = ["--temperature=1", "--seed=7"]
    together = generate(*arguments, *SENTENCES)
    assert together[0] == 0
    assert together == generate(*arguments, "--batch_size=1", *SENTENCES)
    assert together != generate(*arguments[:-1], "--seed=8", *SENTENCES)


def test_sampling_settings_arrive():
    options = generate_command.GenerateOptions(target="target", temperature=0.5, top_k=3, top_p=0.9)
    assert options.sampling() == sd.SamplingConfig(temperature=0.5, top_k=3, top_p=0.9)


@pytest.mark.slow
def test_outputs_appear_window_by_window(pair, monkeypatch):
    """Sorting within a window must not change the order of outputs or of the random keys."""
    target = sd.load(pair / "target", dtype="float32")
    inputs = decoding_inputs.encode(target, SENTENCES, 512)
    drafter = sd.ModelDrafter(sd.load(pair / "drafter", dtype="float32"))
    options = dict(batch_size=2, seed=3, drafter=drafter, gamma=2, max_new_tokens=6)
    options["sampling"] = sd.SamplingConfig(temperature=1.0)
    whole = list(continuous_batching.decode_all(target, inputs, **options))
    monkeypatch.setattr(continuous_batching, "_WINDOW", 1)
    windows = continuous_batching.decode_all(target, inputs, **options)
    assert [output.tokens for output in windows] == [output.tokens for output in whole]


# The other commands.


def test_trace_lines_add_up_to_the_output(pair):
    target, drafter = (sd.load(pair / name, dtype="float32") for name in ("target", "drafter"))
    options = dict(drafter=sd.ModelDrafter(drafter), gamma=2, max_new_tokens=6)
    lines = traces.trace_lines(sd.trace(target, SENTENCES[0], **options), target)
    tokens = sd.generate(target, [SENTENCES[0]], **options)
    whole = "".join(text for kind, text in lines[-1] if kind != "rejected")
    assert whole == "".join(
        traces.token_text(int(t), target) for t in tokens.tokens[0, : tokens.lengths[0]]
    )


@pytest.mark.slow
def test_benchmark(specdec, tmp_path):
    (tmp_path / "sentences.txt").write_text("Tom\nWe\nShe\n", encoding="utf-8")
    files = ["--input_file", tmp_path / "sentences.txt", "--output", tmp_path / "record.json"]
    code, out, err = specdec(
        "benchmark", *MODELS, "--repeats=1", "--limit=2", "--tree=widths:2:top", "--json", *files
    )
    assert (code, err) == (0, "")
    record = json.loads(out)
    records.parse(record)
    assert record == json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert record["sentences"] == 2 and [variant["gamma"] for variant in record["speculative"]] == [
        2
    ]
    plain, speculative = record["example"]["variants"]
    assert record["example"]["input"] == "Tom" and (plain["gamma"], speculative["gamma"]) == (0, 2)
    calls = [
        [name for name, _ in variant["spans"]].count("target call")
        for variant in (plain, speculative)
    ]
    assert calls[1] == len(speculative["lines"]) <= calls[0]
    (tree,) = record["example"]["trees"]
    assert tree["tree"] == "widths:2:top" and tree["call"] >= 1 and tree["path"][0] == 0
    assert [node["parent"] for node in tree["nodes"]] == [-1, 0, 0] and tree["nodes"][0][
        "text"
    ] == "[START]"


def test_benchmark_that_fails_a_check(specdec, monkeypatch, tmp_path):
    """The record is written, the exit code is 1."""
    monkeypatch.setattr(
        benchmark_command, "benchmark", lambda *_: (BENCHMARK, ["gamma 2: got other tokens"])
    )
    code, out, err = specdec("benchmark", *MODELS, "--json", "--output", tmp_path / "record.json")
    assert code == 1 and json.loads(out) == BENCHMARK == json.loads(
        (tmp_path / "record.json").read_text()
    )
    assert err == "specdec: error: gamma 2: got other tokens\n"


# gin.


def test_gin_binds_what_flags_do_not_give(specdec, pair, tmp_path, caplog):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "base.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from specdec_jax.commands import generate\n"
        f"generate.GenerateOptions.target = '{pair / 'target'}'\n"
        "generate.GenerateOptions.dtype = 'float32'\n"
        "generate.GenerateOptions.json = True\n"
        "generate.GenerateOptions.max_new_tokens = %TOKENS\n"
        "TOKENS = 2\n"
    )
    (folder / "more.gin").write_text("include 'base.gin'\nTOKENS = 3\n")

    def tokens(*argv):
        code, out, err = specdec(
            "generate", f"--gin_search_paths={tmp_path},{folder}", *argv, "Tom"
        )
        assert code == 0, err
        return len(json.loads(out)["tokens"])

    assert tokens("--gin_file=base.gin") == 2
    assert tokens("--gin_file=more.gin") == 3
    assert tokens("--gin_file=base.gin", "--gin_file=more.gin") == 3
    assert tokens("--gin_file=base.gin", "--gin.TOKENS=4") == 4
    assert tokens("--gin_file=base.gin", "--gin.GenerateOptions.max_new_tokens=5") == 5
    assert tokens("--gin_file=base.gin", "--max_new_tokens=6") == 6
    # T5X, for one, is imported later and registers functions.
    assert not gin.config_is_locked()
    assert not caplog.records, "gin logs the folders that a file is not in as errors"


def test_gin_without_a_file(specdec):
    settings = [
        "--gin.GenerateOptions.json=True",
        "--gin.generate.GenerateOptions.max_new_tokens=6",
    ]
    code, out, _ = specdec("generate", "--target=TARGET", "--dtype=float32", *settings, "")
    assert code == 0 and json.loads(out)["text"] == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate.GenerateOptions.gama = 3", "doesn't have a parameter named 'gama'"),
        ("generate.GenrateOptions.gamma = 3", "has no attribute GenrateOptions"),
        (
            "from specdec_jax.commands import generat",
            "No module named 'specdec_jax.commands.generat'",
        ),
    ],
)
def test_a_misspelt_name_is_reported_with_file_and_line(specdec, tmp_path, line, message):
    file = tmp_path / "bad.gin"
    file.write_text(
        "from __gin__ import dynamic_registration\nfrom specdec_jax.commands import "
        f"generate\n{line}\n"
    )
    code, out, err = specdec("generate", f"--gin_file={file}", "--gin_search_paths=/", "hello")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err and f'In file "{file}", line 3' in err


@pytest.mark.parametrize("command", ["generate", "benchmark"])
def test_configurations_of_the_bundled_pair(specdec, monkeypatch, command):
    from specdec_jax.commands import generate as generate_command
    from specdec_jax.commands import suite

    seen = []
    monkeypatch.setattr(
        {"generate": generate_command, "benchmark": suite}[command],
        "run",
        lambda options, *_: seen.append(options),
    )
    config = pathlib.Path(__file__).parents[2] / f"configs/{command}/ende.gin"
    assert specdec(command, f"--gin_file={config}", "--gin_search_paths=/") == (0, "", "")
    seen[0].check()
    assert (seen[0].target, seen[0].drafter) == ("ende/target", "ende/drafter")


def test_train_settings_come_from_gin(specdec, monkeypatch, tmp_path):
    from specdec_jax.training import config as training_config
    from specdec_jax.training import train

    seen = []
    monkeypatch.setattr(train, "fit", lambda options, on_start: (seen.append(options), on_start()))
    config = pathlib.Path(__file__).parents[2] / "configs/train/smoke.gin"
    settings = [
        f"--gin.DATA_DIR='{tmp_path}'",
        f"--gin.OUTPUT_DIR='{tmp_path / 'run'}'",
        "--gin.TrainConfig.seed=5",
    ]
    assert specdec(
        "train", f"--gin_file={config}", f"--gin_search_paths={config.parent},/", *settings
    ) == (0, "", "")
    (options,) = seen
    assert isinstance(options, training_config.TrainConfig) and isinstance(
        options.model, sd.T5Config
    )
    assert options.seed == 5 and options.output_dir == str(tmp_path / "run")
    written = tmp_path / "run/operative.gin"
    assert specdec("train", f"--gin_file={written}", "--gin_search_paths=/") == (0, "", "")
    assert seen[1] == options, "what was written gives the same settings"


@pytest.mark.parametrize("way", ["flags", "gin", "both"])
def test_settings_are_written_beside_the_output(specdec, pair, tmp_path, way):
    given = {
        "target": str(pair / "target"),
        "dtype": "float32",
        "max_new_tokens": 3,
        "output_file": str(tmp_path / "a"),
    }
    flags = [f"--{name}={value}" for name, value in given.items()]
    bindings = [f"--gin.GenerateOptions.{name}={value!r}" for name, value in given.items()]
    overruled = ["--gin.GenerateOptions.max_new_tokens=5", flags[2]]
    argv = {"flags": flags, "gin": bindings, "both": [*bindings[:2], *overruled, *flags[3:]]}[way]
    assert specdec("generate", *argv, "Tom", "We")[0] == 0
    first, written = (tmp_path / "a").read_text(), tmp_path / "a.gin"
    again = [
        "generate",
        f"--gin_file={written}",
        "--gin_search_paths=/",
        f"--output_file={tmp_path / 'b'}",
    ]
    for name in ("b", "c"):
        assert specdec(*again, "Tom", "We")[0] == 0
        assert (tmp_path / name).read_text() == first
        again = [
            "generate",
            f"--gin_file={tmp_path / 'b.gin'}",
            "--gin_search_paths=/",
            f"--output_file={tmp_path / 'c'}",
        ]
    assert "max_new_tokens = 3\n" in (tmp_path / "c.gin").read_text()


def test_settings_of_a_folder_lie_beside_it(specdec, monkeypatch, tmp_path):
    from specdec_jax.commands import convert

    monkeypatch.setattr(convert, "run", lambda options: None)
    for output in (f"{tmp_path}/made/", "/dev/stdout"):
        assert specdec("convert", "--source=ende/target", f"--output={output}", "--format=t5x") == (
            0,
            "",
            "",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["made.gin"]
    assert not pathlib.Path("/dev/stdout.gin").exists()
