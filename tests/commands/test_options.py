"""Every option of sampling, verification and stopping arrives, or is rejected in one line."""

import dataclasses
import json
import types
import typing

import command_line
import jax
import pytest

import specdec_jax as sd
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import generate
from specdec_jax.commands.endings import Endings
from specdec_jax.commands.options import DecodingOptions
from specdec_jax.commands.output_lines import Sentences, join_lines
from specdec_jax.decoding import continuous_batching
from specdec_jax.decoding.stream import Piece

pair = command_line.pair
cache = command_line.cache
specdec = command_line.specdec
compilations = command_line.compilations
TEXTS = ["We asked", "Tom"]
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def decode(specdec):
    """Runs `specdec generate --json` on `TEXTS` with the tiny pair; the objects it prints."""

    def run(*argv):
        code, out, err = specdec(
            "generate", *command_line.MODELS, "--batch_size=2", "--json", *argv, *TEXTS
        )
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]

    return run


@pytest.fixture(scope="module")
def library(pair):
    """What the library gives for the same, as (tokens, text) of every row."""
    target, drafter = (sd.load(pair / name, dtype="float32") for name in ("target", "drafter"))

    def run(sampling, **options):
        options = dict(drafter=sd.ModelDrafter(drafter), gamma=2, max_new_tokens=6) | options
        result = sd.generate(target, TEXTS, sampling=sd.SamplingConfig(**sampling), **options)
        rows = zip(result.tokens, result.lengths, result.texts, strict=True)
        return [(row[:length].tolist(), text) for row, length, text in rows]

    return run


def test_flags_have_the_types_and_defaults_of_their_fields():
    """In `generate` all are derived; where other commands name a type, it is the same."""
    configs = (sd.GenerationConfig, sd.SamplingConfig)
    fields = {field.name: field for config in configs for field in dataclasses.fields(config)}
    derived = typing.get_type_hints(generate.GenerateOptions)
    own = typing.get_type_hints(DecodingOptions)
    shared = [field for field in dataclasses.fields(DecodingOptions) if field.name in fields]
    assert len(shared) > 14
    for flag in shared:
        name, kind, default = flag.name, own[flag.name], fields[flag.name].default
        assert derived[name] in (kind, kind | None) and flag.metadata["help"]
        unset = () if default is None and kind == tuple[str, ...] else default
        assert flag.default == (64 if name == "max_new_tokens" else unset)
    assert derived["gamma"] == int | str | None and derived["stop"] == tuple[str, ...]
    no_flag = {"sampling", "eos_ids", "synthetic_alpha"}
    no_flag |= {"vocabulary_mask", "processor", "forbidden_sequences"}
    assert fields.keys() - derived.keys() == no_flag


# Flags -> fields of SamplingConfig, arguments of generate.
ARGMAX = {
    "repetition_penalty": (["--repetition_penalty=50"], {"repetition_penalty": 50.0}, {}),
    "no_repeat_ngram": (["--no_repeat_ngram=1"], {"no_repeat_ngram": 1}, {}),
    "forbidden_tokens": (["--forbidden_tokens=FIRST,7"], {"forbidden_tokens": ("FIRST", 7)}, {}),
    "logit_bias": (
        ["--logit_bias=9:1e3", "--logit_bias=8:-5"],
        {"logit_bias": {9: 1e3, 8: -5}},
        {},
    ),
    "forced_tokens": (
        ["--forced_tokens=0:9", "--forced_tokens=2:4"],
        {"forced_tokens": {0: 9, 2: 4}},
        {},
    ),
    "max_new_tokens": (["--max_new_tokens=3"], {}, {"max_new_tokens": 3}),
    "lenience": (
        ["--verifier=lenient", "--lenience=1e-6"],
        {},
        {"verifier": "lenient", "lenience": 1e-6},
    ),
}
TYPICAL = ["--verifier=typical", "--typical_epsilon=1"]
DRAWN = {
    "seed": (["--seed=5"], {}, {"key": 5}),
    "temperature": (["--temperature=3"], {"temperature": 3.0}, {}),
    "top_k": (["--top_k=2"], {"top_k": 2}, {}),
    "top_p": (["--top_p=0.2"], {"top_p": 0.2}, {}),
    "min_p": (["--min_p=0.9"], {"min_p": 0.9}, {}),
    "token": (["--verifier=token"], {}, {"verifier": "token"}),
    "gumbel": (["--verifier=gumbel"], {}, {"verifier": "gumbel"}),
    "rejection": (["--verifier=rejection"], {}, {"verifier": "rejection"}),
    "typical_delta": (
        [*TYPICAL, "--typical_delta=1"],
        {},
        {"verifier": "typical", "typical_epsilon": 1, "typical_delta": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARGMAX))
def test_options_of_argmax(decode, library, name):
    """Each changes what comes out, to what the library gives for it."""
    flags, sampling, options = ARGMAX[name]
    plain = library({})
    first = plain[0][0][0]
    if name == "forbidden_tokens":
        flags, sampling = [flag.replace("FIRST", str(first)) for flag in flags], {name: (first, 7)}
    result = [(record["tokens"], record["text"]) for record in decode(*flags)]
    assert result == library(sampling, **options) != plain


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DRAWN))
def test_options_of_sampling(decode, library, name):
    flags, sampling, options = DRAWN[name]
    options = {"key": 1} | options
    options["key"] = jax.random.key(options["key"])
    result = [
        (record["tokens"], record["text"])
        for record in decode("--temperature=1", "--seed=1", *flags)
    ]
    drawn = library({"temperature": 1.0}, key=jax.random.key(1))
    assert result == library({"temperature": 1.0} | sampling, **options) != drawn


def test_min_new_tokens(decode, library, pair):
    """The tiny target ends at once, and then it may not."""
    ends = f"--logit_bias={sd.load(pair / 'target', dtype='float32').eos_ids[0]}:1e6"
    assert [len(record["tokens"]) for record in decode(ends)] == [1, 1]
    assert [len(record["tokens"]) for record in decode(ends, "--min_new_tokens=3")] == [4, 4]


@pytest.mark.slow
def test_typical_epsilon(decode):
    """A threshold that every drafted token passes, against one that few do."""

    def accepted(*flags):
        return sum(
            record["stats"]["accepted"]
            for record in decode("--temperature=1", "--verifier=typical", *flags)
        )

    assert accepted("--typical_epsilon=1", "--typical_delta=1") < accepted(
        "--typical_epsilon=1e-9", "--typical_delta=1"
    )


def test_stop_is_repeatable(decode):
    whole = decode()[0]
    text = whole["text"]
    stop = text[len(text) // 2 :][:2]
    for flags in (["--stop", stop], ["--stop", "no such text", "--stop", stop]):
        record = decode(*flags)[0]
        assert record["finish_reason"] == "stop" and stop not in record["text"]
        assert record["text"] == text[: len(record["text"])] and len(record["tokens"]) < len(
            whole["tokens"]
        )
        assert (
            len(record["tokens"]) == len(record["log_probs"]) == len(record["adjusted_log_probs"])
        )


def test_deadline(specdec):
    """Over after the first iteration, of at most γ + 1 tokens; standard error says so."""
    flags = ["--batch_size=2", "--json", "--deadline=1e-9"]
    code, out, err = specdec("generate", *command_line.MODELS, *flags, *TEXTS)
    records = [json.loads(line) for line in out.splitlines()]
    reasons = [record["finish_reason"] for record in records]
    late = reasons.count("deadline")
    assert late and {*reasons} <= {"deadline", "eos"}
    assert code == 0
    assert err == f"{late} of 2 outputs ended by --deadline, before they were whole\n"
    assert all(1 <= len(record["tokens"]) <= 3 for record in records)


@pytest.mark.slow
def test_samples_stand_side_by_side(decode, library):
    records = decode("--temperature=1", "--seed=3", "--num_samples=3")
    assert [(record["tokens"], record["text"]) for record in records] == library(
        {"temperature": 1.0}, num_samples=3, key=jax.random.key(3)
    )
    alone = decode("--temperature=1", "--seed=3")
    assert [records[0]["tokens"], records[3]["tokens"]] == [record["tokens"] for record in alone]


# Streaming.


@pytest.mark.slow
def test_stream_prints_what_generate_prints(specdec):
    for flags in ([], ["--temperature=1", "--seed=7", "--stop=e"]):
        argv = ["generate", *command_line.MODELS, *flags, *command_line.SENTENCES]
        code, out, err = specdec(*argv, "--stream")
        assert (code, err) == (0, "") and len(out.splitlines()) == len(command_line.SENTENCES)
        assert out == specdec(*argv, "--batch_size=1")[1]


def test_streamed_pieces_make_up_the_output(specdec):
    argv = ["generate", *command_line.MODELS, "--json", *command_line.SENTENCES]
    pieces = [json.loads(line) for line in specdec(*argv, "--stream")[1].splitlines()]
    whole = [json.loads(line) for line in specdec(*argv, "--batch_size=1")[1].splitlines()]
    assert len(pieces) > len(whole)
    for number, record in enumerate(whole):
        mine = [piece for piece in pieces if piece["row"] == number]
        assert "".join(piece["text"] for piece in mine) == record["text"]
        assert sum((piece["tokens"] for piece in mine), []) == record["tokens"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [
            record["finish_reason"]
        ]


@pytest.mark.parametrize(
    "pieces", [["a \n", "\n b", "c"], [" a", " ", "\nb", " c \n"], ["a\n"], [""], [" "]]
)
def test_streamed_line_ends_become_spaces_as_in_a_whole_text(monkeypatch, capsys, pieces):
    """Also where a piece ends amid the white space around one."""

    def stream(*_, **__):
        return (Piece(0, text, [], None) for text in pieces)

    monkeypatch.setattr(generate, "stream", stream)
    options, source = generate.GenerateOptions(stream=True), Sentences([[3]], ["a"], False)
    config, endings = options.configuration(), Endings("a limit", print)
    generate._print_pieces(generate._Job(options, config, None, None, 1, source, endings))
    assert capsys.readouterr().out == join_lines("".join(pieces)) + "\n"


def test_lines_are_joined_in_linear_time():
    assert join_lines("a \r\n\tb  c\nd\n") == "a b  c d "
    assert join_lines(" " * 200_000) == " " * 200_000, "by a regular expression: for hours"


def test_stream_decodes_one_at_a_time_without_batch_size():
    assert [generate.GenerateOptions(stream=stream).rows for stream in (False, True)] == [8, 1]
    assert generate.GenerateOptions(batch_size=3).rows == 3


# gin.


def test_gin_binds_the_options_too(decode, library):
    flags = [
        "--forbidden_tokens=5,6",
        "--logit_bias=7:2.5",
        "--stop=a",
        "--stop=b",
        "--verifier=lenient",
        "--lenience=0.5",
    ]
    settings = [
        "forbidden_tokens=(5, 6)",
        "logit_bias=('7:2.5',)",
        "stop=['a', 'b']",
        "verifier='lenient'",
        "lenience=0.5",
    ]
    records = decode(*[f"--gin.GenerateOptions.{setting}" for setting in settings])
    assert records == decode(*flags)
    assert [(record["tokens"], record["text"]) for record in records] != library({})


def test_a_flag_wins_over_gin(decode, tmp_path):
    two = decode("--max_new_tokens=2")
    assert decode("--max_new_tokens=2", "--gin.GenerateOptions.max_new_tokens=5") == two
    (tmp_path / "settings.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom specdec_jax.commands import generate\n"
        "generate.GenerateOptions.max_new_tokens = %TOKENS\nTOKENS = 4\n"
    )
    # The macro is used, but for the flag.
    files = [f"--gin_file={tmp_path / 'settings.gin'}", "--gin_search_paths=/", "--gin.TOKENS=5"]
    assert decode("--max_new_tokens=2", *files) == two


# The other commands.


@pytest.mark.slow
def test_demo_takes_the_verifier_and_the_seed(specdec):
    def demo(*flags):
        out = specdec("demo", *command_line.MODELS, "--repeats=1", *flags, "We asked")[1]
        return out.partition("We asked")[2].partition("\nplain")[0]

    assert "[-" in demo() and "[-" not in demo("--verifier=lenient", "--lenience=1e-30")
    assert demo("--temperature=1", "--seed=1") != demo("--temperature=1", "--seed=2")


def test_benchmark_takes_the_options(specdec, monkeypatch):
    """What they then do to its variants is tested with it."""
    seen = []
    monkeypatch.setattr(
        benchmark_command,
        "benchmark",
        lambda workload, _: seen.append(workload.options) or ({}, []),
    )
    flags = [
        "--verifier=lenient",
        "--lenience=0.5",
        "--temperature=0.7",
        "--min_p=0.1",
        "--seed=4",
        "--json",
    ]
    assert specdec("benchmark", *command_line.MODELS, *flags)[0] == 0
    sampling = sd.SamplingConfig(temperature=0.7, min_p=0.1)
    speculative, plain = seen[0].configuration(), seen[0].configuration(plain=True)
    assert (speculative.verifier, speculative.lenience) == ("lenient", 0.5)
    assert speculative.sampling == plain.sampling == sampling and seen[0].seed == 4
    assert (plain.verifier, plain.lenience) == ("block", None)
    assert seen[0].decoding() == {"config": speculative}


# Rejected before anything is loaded: the models do not exist.

EARLY = {
    "verifier": (["--verifier=best"], "verifier: got 'best', expected one of token, block"),
    "lenience elsewhere": (
        ["--lenience=0.5"],
        "lenience: got 0.5 with verifier='block', expected 'lenient'",
    ),
    "no lenience": (["--verifier=lenient"], "lenience: got none with verifier='lenient'"),
    "lenience": (
        ["--verifier=lenient", "--lenience=0"],
        "lenience: got 0.0, expected a number in (0, 1]",
    ),
    "epsilon elsewhere": (
        ["--typical_epsilon=0.1"],
        "typical_epsilon: got 0.1 with verifier='block'",
    ),
    "delta elsewhere": (
        ["--verifier=block", "--typical_delta=0.1"],
        "typical_delta: got 0.1 with verifier='block'",
    ),
    "epsilon": (
        ["--verifier=typical", "--temperature=1", "--typical_epsilon=2"],
        "typical_epsilon: got 2.0, expected",
    ),
    "delta": (
        ["--verifier=typical", "--temperature=1", "--typical_delta=nan"],
        "typical_delta: got nan, expected",
    ),
    "typical at 0": (
        ["--verifier=typical", "--temperature=0"],
        "temperature: got 0.0 with verifier='typical'",
    ),
    "nothing drafted": (
        ["--gamma=0", "--verifier=lenient", "--lenience=0.5"],
        "got 'lenient' for plain decoding",
    ),
    "no drafter": (
        ["--drafter=", "--verifier=typical", "--temperature=1"],
        "got 'typical' for plain decoding",
    ),
    "min_p": (["--min_p=1.5"], "min_p: got 1.5, expected"),
    "repetition_penalty": (["--repetition_penalty=0"], "repetition_penalty: got 0.0, expected"),
    "no_repeat_ngram": (["--no_repeat_ngram=-1"], "no_repeat_ngram: got -1, expected"),
    "min_new_tokens": (["--min_new_tokens=-1"], "min_new_tokens: got -1, expected"),
    "min over max": (
        ["--min_new_tokens=7", "--max_new_tokens=6"],
        "min_new_tokens: got 7, expected at most",
    ),
    "forbidden_tokens": (
        ["--forbidden_tokens=1,x"],
        "forbidden_tokens: got '1,x', expected comma-separated integers",
    ),
    "logit_bias form": (["--logit_bias=5"], "logit_bias: got '5', expected integer:number"),
    "logit_bias number": (["--logit_bias=5:x"], "logit_bias: got '5:x', expected integer:number"),
    "logit_bias NaN": (
        ["--logit_bias=5:nan"],
        "logit_bias: got nan for id 5, expected a finite number",
    ),
    "logit_bias twice": (
        ["--logit_bias=5:1", "--logit_bias=5:2"],
        "logit_bias: got '5:1, 5:2', expected every integer",
    ),
    "forced_tokens": (
        ["--forced_tokens=0:1.5"],
        "forced_tokens: got '0:1.5', expected integer:integer",
    ),
    "forced too late": (
        [
            "--forced_tokens=64:5",
            "--max_new_tokens=64",
        ],  # else the model may say how many there are
        "forced_tokens: got place 64, expected below max_new_tokens = 64",
    ),
    "num_samples": (["--num_samples=0"], "num_samples: got 0, expected an integer from 1"),
    "samples of argmax": (
        ["--num_samples=2", "--temperature=0"],
        "num_samples: got 2 at temperature 0",
    ),
    "stop": (["--stop="], "stop: got ('',), expected strings that are not empty"),
    "stop not UTF-8": (["--stop=sch\udcf6n"], r"stop 1: got 'sch\udcf6n', which is not UTF-8"),
    "deadline": (["--deadline=0"], "deadline: got 0.0, expected seconds, more than 0"),
    "deadline endless": (["--deadline=inf"], "deadline: got inf, expected seconds, more than 0"),
    "deadline NaN": (["--deadline=nan"], "deadline: got nan, expected seconds, more than 0"),
    "stream of a batch": (
        ["--stream", "--batch_size=2"],
        "stream: got batch_size=2, num_samples=1, expected 1 of each",
    ),
    "stream of samples": (
        ["--stream", "--temperature=1", "--num_samples=2"],
        "stream: got batch_size=1, num_samples=2",
    ),
    "seed": (["--seed=-1"], "seed: got -1, expected an integer from 0 to 4294967295"),
    "great seed": (
        ["--seed=99999999999999999999999"],
        "seed: got 99999999999999999999999, expected",
    ),
    "not UTF-8": (["sch\udcf6n"], r"sentence 2: got 'sch\udcf6n', which is not UTF-8"),
    "gin tuple": (["--gin.GenerateOptions.stop='a'"], "stop: got 'a', expected tuple"),
    "gin bias": (["--gin.GenerateOptions.logit_bias=(5,)"], "logit_bias: got (5,), expected tuple"),
}


def rejected(result, message, compilations):
    code, out, err = result
    assert code == 2 and not out and not compilations
    assert err.startswith("specdec: error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("case", sorted(EARLY))
def test_rejected_before_anything_is_loaded(specdec, compilations, case):
    flags, message = EARLY[case]
    rejected(
        specdec("generate", "--target=no/model", "--drafter=no/model", "hello", *flags),
        message,
        compilations,
    )


@pytest.mark.parametrize("command", ["demo", "benchmark"])
@pytest.mark.parametrize(
    "case", ["verifier", "no lenience", "typical at 0", "logit_bias form", "great seed"]
)
def test_the_other_commands_reject_alike(specdec, compilations, command, case):
    flags, message = EARLY[case]
    rejected(
        specdec(command, "--target=no/model", "--drafter=no/model", *flags), message, compilations
    )


def test_the_demo_rejects_what_is_not_utf8(specdec, compilations):
    rejected(specdec("demo", "sch\udcf6n"), "sentence 1: got", compilations)


@pytest.mark.parametrize(
    "flag", ["--forbidden_tokens=64", "--logit_bias=-1:5", "--forced_tokens=0:99"]
)
def test_ids_outside_the_vocabulary(specdec, compilations, flag):
    """Known once the model is there, before anything compiles."""
    message = "got id " + flag.replace(":5", "").replace("0:", "").rpartition("=")[2]
    rejected(
        specdec("generate", "--target=TARGET", "--dtype=float32", flag, "hello"),
        message,
        compilations,
    )


# Many sentences.


ANYTHING = types.SimpleNamespace(
    network=types.SimpleNamespace(rules=None)
)  # a target that nothing is decoded with


def test_no_inputs_give_no_outputs():
    assert list(continuous_batching.decode_all(ANYTHING, [], batch_size=8, seed=0)) == []


def test_outputs_come_as_soon_as_those_before_them_are_there(monkeypatch):
    finished = []

    def decode_stream(target, inputs, **options):
        assert options["refill"] is None and options["batch_size"] == 2
        for number in (1, 3, 0, 2, 4):
            finished.append(number)
            yield number, (types.SimpleNamespace(text=inputs[number], error=None),)

    monkeypatch.setattr(continuous_batching, "decode_stream", decode_stream)
    # (the output, finished inputs when it came)
    outputs = [
        (output.text, len(finished))
        for output in continuous_batching.decode_all(ANYTHING, list("abcde"), batch_size=2, seed=0)
    ]
    assert outputs == [("a", 3), ("b", 3), ("c", 4), ("d", 4), ("e", 5)]


def test_rows_may_be_refilled_where_there_are_rows_to_refill():
    assert continuous_batching.may_refill(2, 3, None)
    assert (
        not continuous_batching.may_refill(1, 3, None)
        and not continuous_batching.may_refill(3, 3, None)
        and not continuous_batching.may_refill(2, 3, 5.0)
    )
