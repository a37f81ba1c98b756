"""Tests `specdec tune`: expectations, timed choices, the choice taken, and the file."""

import dataclasses
import json

import command_line
import numpy as np
import pytest

from specdec_jax.analysis import acceptance, tuning, variants
from specdec_jax.analysis.beams import BeamChoice
from specdec_jax.analysis.predictions import Work
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.tuning import Choice
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import generate, tune
from specdec_jax.commands import options as options_command
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import trees
from specdec_jax.speculative.tree_text import read_tree

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")
PLAIN = Choice(0, "block")


def spreads(**seconds):
    return {name.replace("_", " "): Spread(value, value, value) for name, value in seconds.items()}


# Two batches of one row and 10 tokens; the iteration of γ takes 1 + γ/10 target steps and a draft
# step 0.1.
ACCEPTED = acceptance.Acceptance(
    "scored",
    0.8,
    0.0,
    20,
    {},
    [np.array([10]), np.array([10])],
    {
        ("block", 1): [Work(8, 6.0, 5.0)] * 2,
        ("block", 2): [Work(8, 4.0, 7.5)] * 2,
        ("block", 4): [Work(8, 3.5, 14.0)] * 2,
    },
)
CHOICES = [PLAIN, *(Choice(gamma, "block") for gamma in (1, 2, 4))]
TIMES = spreads(target_encoder_8=2.0, drafter_encoder_8=0.5) | {
    f"iteration, {choice}": Spread(*[1 + choice.gamma / 10] * 3) for choice in CHOICES
}


def test_expected_seconds():
    found = {
        choice: tuning.expected_seconds(ACCEPTED, [8, 8], choice, TIMES, 0.1) for choice in CHOICES
    }
    assert found[PLAIN] == pytest.approx(2 * (2 + 10))  # no drafter, no encoder of it
    # 6 iterations of 1.1, and a draft step less than the 6 in them, at the end.
    assert found[CHOICES[1]] == pytest.approx(2 * (2.5 + 6 * 1.1 - 0.1))
    assert found[CHOICES[2]] == pytest.approx(2 * (2.5 + 4 * 1.2 - 0.5 * 0.1))
    assert found[CHOICES[3]] == pytest.approx(2 * (2.5 + 3.5 * 1.4))
    without = {name: spread for name, spread in TIMES.items() if name != "drafter encoder 8"}
    assert tuning.expected_seconds(ACCEPTED, [8, 8], CHOICES[3], without, 0.0) == pytest.approx(
        2 * (2 + 3.5 * 1.4)
    )


def test_a_second_verifier_is_timed_with_the_longest_draft():
    times = TIMES | {"iteration, gamma 4, token": Spread(1.2, 1.2, 1.2)}

    def seconds(gamma, verifier):
        return tuning.iteration_seconds(Choice(gamma, verifier), times)

    assert [seconds(gamma, "block") for gamma in (1, 2, 4)] == [1.1, 1.2, 1.4]
    assert [seconds(gamma, "token") for gamma in (1, 2, 4)] == pytest.approx([1.05, 1.1, 1.2])
    assert seconds(0, "block") == 1


EXPECTED = {Choice(0, "block"): 9.0} | {
    Choice(gamma, name): abs(gamma - 3) + extra
    for name, extra in (("token", 1.5), ("block", 1.0))
    for gamma in (1, 3, 5)
}


def test_the_best_few_are_timed_beside_plain_decoding():
    named = [(3, "block"), (3, "token"), (1, "block"), (5, "block"), (1, "token")]
    assert tuning.list_candidates(EXPECTED) == [PLAIN, *(Choice(*each) for each in named)]
    assert tuning.list_candidates({PLAIN: 1.0, Choice(4, "block"): 2.0}) == [
        PLAIN,
        Choice(4, "block"),
    ]


def test_the_fastest_by_its_median():
    seconds = {
        PLAIN: np.array([3.0, 3.0, 3.0]),
        CHOICES[1]: np.array([2.0, 2.1, 9.0]),
        CHOICES[2]: np.array([2.2, 2.2, 1.0]),
    }
    assert tuning.find_fastest(seconds) == CHOICES[1]
    assert tuning.find_fastest(seconds | {PLAIN: np.array([1.0, 1.0, 1.0])}) == PLAIN


def test_the_fastest_on_a_machine_that_slows_down():
    """In each pass γ = 1 takes half of autoregressive decoding's time.

    γ = 2 has the least median of seconds, but for one pass more.
    """
    slower = np.array([1.0, 2.0, 4.0])
    seconds = {PLAIN: 2 * slower, CHOICES[1]: 1.0 * slower, CHOICES[2]: np.array([1.1, 1.8, 4.4])}
    assert np.median(seconds[CHOICES[2]]) < np.median(seconds[CHOICES[1]])
    assert tuning.find_fastest(seconds) == CHOICES[1]


def scored(shares, lengths=((5, 9), (7,))) -> acceptance.Acceptance:
    """What scoring finds of drafts that are covered by rank with these probabilities."""
    hit_rate = {"top": [(value, None) for value in np.cumsum(shares)]}
    return acceptance.Acceptance(
        "scored", shares[0], None, 9, {}, [np.array(row) for row in lengths], {}, hit_rate
    )


def test_the_best_tree_of_every_size():
    """Trees of 5 positions cost 1.1 steps, those of 9 cost 3: only deeper trees would pay there."""
    shares = [0.5, 0.3, 0.1]
    times = {f"call over {width}": Spread(v, v, v) for width, v in {1: 2.0, 5: 2.2, 9: 6.0}.items()}
    found = tuning.best_trees(scored(shares), 3, times, plain=0.01, step=0.001)
    (choice, seconds), (dynamic, same) = found.items()
    tree = read_tree(choice.tree)
    assert str(choice) == "tree of 5" and (choice.gamma, choice.verifier) == (tree.depth, "block")
    assert str(dynamic) == "dynamic tree of 5" and same == seconds and dynamic.gamma == tree.depth
    assert read_tree(dynamic.tree) == trees.DynamicTree(tree.depth, 2, 5)
    assert tree == trees.Tree.best(shares, 5, 3, {2: 1.1, 5: 1.1}, 0.1) and not tree.is_chain
    assert seconds == pytest.approx(16 / tree.expected(shares) * (1.1 * 0.01 + tree.depth * 0.001))


def test_the_drawn_child_counts_above_temperature_0():
    accepted = scored([0.9, 0.0])
    accepted.hit_rate["mixed"] = [(0.5, None), (0.9, None)]
    times = {f"call over {width}": Spread(1.0, 1.0, 1.0) for width in (1, 3)}
    choice, dynamic = tuning.best_trees(accepted, 1, times, 0.01, 0.0)
    assert read_tree(choice.tree).parents == (0, 0) and dynamic.tree == "dynamic:1,2,3"


def test_no_tree_where_a_chain_is_best_or_no_call_was_timed():
    times = {f"call over {width}": Spread(1.0, 1.0, 1.0) for width in (1, 4)}
    assert tuning.best_trees(scored([0.9, 0.01]), 3, times, 0.01, 0.0) == {}
    assert tuning.best_trees(scored([0.1, 0.01]), 3, times, 0.01, 0.01) == {}
    assert (
        tuning.best_trees(
            scored([0.5, 0.4]), 3, {"target encoder 8": Spread(1.0, 1.0, 1.0)}, 0.01, 0.0
        )
        == {}
    )


def test_every_tree_is_timed():
    tree = Choice(3, "block", "parents:0,0,1")
    expected = (
        {PLAIN: 9.0}
        | {Choice(gamma, "block"): float(gamma) for gamma in range(1, 8)}
        | {tree: 20.0}
    )
    assert tuning.list_candidates(expected) == [
        PLAIN,
        *(Choice(gamma, "block") for gamma in range(1, 6)),
        tree,
    ]


# The file that is written.

RECORD = {
    "sentences": 2,
    "improvement": {"median": 1.5, "least": 1.4, "most": 1.6},
    "machine": {"processor": "some processor", "device": "cpu: cpu, 1"},
}


def write(path, pair, chosen: Choice, **settings):
    options = tune.TuneOptions(
        target=str(pair / "target"),
        drafter=str(pair / "drafter"),
        dtype="float32",
        max_new_tokens=6,
        config=str(path),
        batch_size=2,
        **settings,
    )
    path.write_text(
        tune.make_gin_file(RECORD | {"chosen": chosen._asdict()}, options), encoding="utf-8"
    )
    return options


@pytest.fixture
def arrived(monkeypatch):
    """The options that a command runs with, which then ends."""
    found = []
    for module in (generate, benchmark_command):
        monkeypatch.setattr(module, "run", lambda options, *_: found.append(options))
    return found


SETTINGS = {
    "argmax": {},
    "sampling": dict(temperature=0.7, top_k=5, top_p=0.9, seed=3, verifier="token"),
    "processors": dict(
        forbidden_tokens=(3, 4), logit_bias=("5:-1.5",), forced_tokens=("0:7",), min_new_tokens=1
    ),
    "lossy": dict(verifier="lenient", lenience=0.5),
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("gamma", [0, 3])
def test_both_commands_take_the_file(specdec, pair, tmp_path, arrived, gamma, name):
    options = write(
        tmp_path / "tuned.gin",
        pair,
        Choice(gamma, SETTINGS[name].get("verifier", "block")),
        **SETTINGS[name],
    )
    for command in ("generate", "benchmark"):
        assert specdec(command, f"--gin_file={tmp_path / 'tuned.gin'}", "--gin_search_paths=/") == (
            0,
            "",
            "",
        )
    generating, timing = arrived
    assert (generating.gamma, timing.gamma) == ((gamma, (gamma,)) if gamma else (None, ()))
    assert (
        generating.batch_size == timing.batch_size == 2 and generating.generation_config == "none"
    )
    plain = {"drafter": None} | ({"verifier": "block", "lenience": None} if name == "lossy" else {})
    for found in arrived:
        for field in dataclasses.fields(options_command.DecodingOptions):
            expected = getattr(options, field.name)
            if not gamma:
                expected = plain.get(field.name, expected)
            value = getattr(found, field.name)
            if (
                value is None and found is generating
            ):  # what no flag says, and no default of the model either
                value = field.default
            assert (tuple(value) if isinstance(value, list) else value) == expected, field.name
        found.check()


def test_both_commands_take_the_file_of_a_tree(specdec, pair, tmp_path, arrived, monkeypatch):
    """`benchmark` times it beside the chain that was the fastest, with this chain's verifier."""
    timed = {
        Choice(1, "block"): 1.25,
        Choice(2, "token"): 1.375,
        Choice(3, "block"): None,
        PLAIN: 1.5,
    }
    tree = Choice(2, "block", "parents:0,0,1")
    choices = [
        {**choice._asdict(), "improvement": gain and {"median": gain}}
        for choice, gain in (timed | {tree: 1.5}).items()
    ]
    monkeypatch.setitem(RECORD, "choices", choices)
    write(tmp_path / "tuned.gin", pair, tree, temperature=1.0)
    for command in ("generate", "benchmark"):
        assert specdec(command, f"--gin_file={tmp_path / 'tuned.gin'}", "--gin_search_paths=/") == (
            0,
            "",
            "",
        )
    generating, timing = arrived
    assert (generating.tree, generating.gamma, generating.verifier) == (
        "parents:0,0,1",
        None,  # "auto"
        "block",
    )
    assert (tuple(timing.tree), timing.gamma, timing.verifier) == (
        ("parents:0,0,1",),
        (2,),
        "token",
    )
    assert (
        generating.temperature == timing.temperature == 1 and generating.drafter == timing.drafter
    )
    assert "# tree of 4: 1.50 times the speed of plain decoding" in (
        tmp_path / "tuned.gin"
    ).read_text(encoding="utf-8")
    generating.check()
    timing.check()


def test_the_file_holds_the_choice(pair, tmp_path):
    write(tmp_path / "some.gin", pair, Choice(3, "block"))
    text = (tmp_path / "some.gin").read_text(encoding="utf-8")
    assert (
        "# gamma 3, block: 1.50 times the speed of plain decoding (1.40 to 1.60)." in text
        and "GAMMA = 3" in text
    )
    write(tmp_path / "none.gin", pair, PLAIN)
    text = (tmp_path / "none.gin").read_text(encoding="utf-8")
    assert "plain decoding was faster" in text and "GAMMA" not in text and "drafter = None" in text


# The command.

FLAGS = ["--target=TARGET", "--dtype=float32", "--max_new_tokens=6", "--repeats=1", "--limit=2"]


@pytest.fixture
def sentences(tmp_path):
    (tmp_path / "sentences.txt").write_text("Tom\nWe\nShe\n", encoding="utf-8")
    return tmp_path / "sentences.txt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "gammas", "flags"),
    [("random", (2, 1), []), ("DRAFTER", (2,), ["--temperature=1"])],
    ids=["argmax", "drawn"],
)
def test_command(specdec, tmp_path, sentences, drafter, gammas, flags):
    """Writes a file with which `generate` gives what the flags give; a sweep times every choice."""
    config = tmp_path / "tuned.gin"
    files = ["--input_file", sentences, "--config", config, "--output", tmp_path / "record.json"]
    argv = [
        *FLAGS,
        *flags,
        f"--drafter={drafter}",
        f"--gamma={','.join(map(str, gammas))}",
        "--sweep=1",
    ]
    code, out, err = specdec("tune", *argv, *files)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert out == summaries.tune_summary(record) + "\n" and out.endswith(f"written to {config}\n")
    verifiers = ["token", "block"] if flags else ["block"]
    names = ["plain", *(f"gamma {gamma}, {name}" for name in verifiers for gamma in sorted(gammas))]
    choices = [str(Choice(item["gamma"], item["verifier"])) for item in record["choices"]]
    assert choices == names == list(record["sweep"]["improvement"])
    timed = {
        name for name, item in zip(choices, record["choices"], strict=True) if item["improvement"]
    }
    chosen, best = (str(Choice(**found)) for found in (record["chosen"], record["sweep"]["best"]))
    assert {"plain", chosen, str(Choice(**record["expected_best"]))} <= timed and best in names
    assert record["sentences"] == 2 and record["sweep"]["sentences"] == 1
    assert record["sweep"]["chosen_over_best"]["median"] >= 1 or chosen != best
    found = specdec(
        "generate", f"--gin_file={config}", "--gin_search_paths=/", "--json", "Tom", "We"
    )
    assert found[0] == 0 and not found[2]
    plain = specdec("generate", *FLAGS[:3], "Tom", "We")[1].splitlines()
    outputs = [json.loads(line) for line in found[1].splitlines()]
    assert flags or [output["text"] for output in outputs] == plain
    assert all(bool(output["stats"]["drafted"]) == (chosen != "plain") for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0, 1])
def test_command_with_trees(specdec, tmp_path, sentences, monkeypatch, temperature):
    """A tree that is worth its draft wins: `generate` then drafts it, with the same outputs."""
    tree, config = Choice(2, "block", "parents:0,0,1"), tmp_path / "tuned.gin"
    monkeypatch.setattr(
        tuning,
        "best_trees",
        lambda accepted, depth, times, plain, step: (
            {tree: 1.0} if {"call over 1", "call over 4"} <= set(times) and depth == 2 else {}
        ),
    )
    monkeypatch.setattr(tuning, "find_fastest", lambda seconds: tree)
    files = ["--input_file", sentences, "--config", config, "--output", tmp_path / "record.json"]
    flags = [
        f"--temperature={temperature}",
        "--drafter=DRAFTER",
        "--gamma=2",
        "--nochoose_verifier",
        "--tree_nodes=4",
    ]
    code, out, err = specdec("tune", *FLAGS, *flags, "--sweep=1", *files)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert [str(tuning.read_choice(item)) for item in record["choices"]] == [
        "plain",
        "gamma 2, block",
        "tree of 4",
    ]
    assert (
        tuning.read_choice(record["chosen"]) == tree
        and record["choices"][2]["improvement"]["median"] > 0
    )
    assert (
        out == summaries.tune_summary(record) + "\n"
        and "tree of 4: parents:0,0,1\nchosen: tree of 4: " in out
    )
    found = specdec(
        "generate", f"--gin_file={config}", "--gin_search_paths=/", "--json", "Tom", "We"
    )
    outputs = [json.loads(line) for line in found[1].splitlines()]
    assert not found[2] and all(output["stats"]["drafted"] for output in outputs)
    if not temperature:
        plain = specdec("generate", *FLAGS[:3], "Tom", "We")[1].splitlines()
        assert [output["text"] for output in outputs] == plain


@pytest.mark.slow
def test_command_with_beams(specdec, tmp_path, sentences):
    """Times every tree and beam search; its file gives the search's outputs."""
    config, search = tmp_path / "tuned.gin", ["--num_beams=2", "--length_penalty=1.5"]
    files = ["--input_file", sentences, "--config", config, "--output", tmp_path / "record.json"]
    argv = [*FLAGS, *search, "--drafter=DRAFTER", "--gamma=2,1", "--beam_width=3", "--sweep=1"]
    code, out, err = specdec("tune", *argv, *files)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    assert out == summaries.tune_summary(record) + "\n" and out.endswith(f"written to {config}\n")
    names = ["plain", "gamma 1, width 3", "gamma 2, width 3"]
    assert (
        [str(tuning.read_choice(item)) for item in record["choices"]]
        == names
        == list(record["sweep"]["improvement"])
    )
    chosen = tuning.read_choice(record["chosen"])
    best = max(record["choices"], key=lambda item: item["improvement"]["median"])
    assert tuning.read_choice(best) == chosen and record["length_penalty"] == 1.5
    found = specdec(
        "generate", f"--gin_file={config}", "--gin_search_paths=/", "--json", "Tom", "We"
    )
    plain = specdec("generate", *FLAGS[:3], *search, "Tom", "We")[1].splitlines()
    outputs = [json.loads(line) for line in found[1].splitlines()]
    assert [output["text"] for output in outputs] == plain and not found[2]
    assert all(bool(output["stats"]["drafted"]) == bool(chosen.gamma) for output in outputs)


@pytest.mark.parametrize("gamma", [0, 2])
def test_both_commands_take_the_file_of_a_search(specdec, pair, tmp_path, arrived, gamma):
    search = dict(num_beams=2, beam_style="huggingface", early_stopping="never")
    write(tmp_path / "tuned.gin", pair, BeamChoice(gamma, 5 if gamma else 0), **search)
    for command in ("generate", "benchmark"):
        assert specdec(command, f"--gin_file={tmp_path / 'tuned.gin'}", "--gin_search_paths=/") == (
            0,
            "",
            "",
        )
    generating, timing = arrived
    assert (generating.gamma, generating.beam_width) == ((2, 5) if gamma else (None, None))
    assert (tuple(timing.gamma), tuple(timing.beam_width)) == (((2,), (5,)) if gamma else ((), ()))
    for found in arrived:
        assert {name: getattr(found, name) for name in search} == search and bool(
            found.drafter
        ) == bool(gamma)
        found.check()


def test_choices_that_are_not_given():
    def how(**values):
        return tune.TuneOptions(target="target", drafter="drafter", config="a.gin", **values)

    assert how().gammas == (1, 2, 3, 4, 5, 6, 7, 8) and how(gamma=(5, 2)).gammas == (5, 2)
    assert how(num_beams=4).gammas == (1, 2, 3)


def test_token_and_block_verification_compete_only_above_temperature_0():
    def how(**values):
        return tune.TuneOptions(
            target="target", drafter="drafter", config="a.gin", **values
        ).verifiers

    assert how() == ("block",) and how(verifier="token") == ("token",)
    assert how(temperature=1.0) == how(temperature=1.0, verifier="token") == ("token", "block")
    assert how(temperature=1.0, verifier="gumbel") == ("gumbel",)
    assert how(temperature=1.0, verifier="token", choose_verifier=False) == ("token",)


def test_a_free_perfect_drafter_of_many_tokens_is_expected_to_be_best():
    """The target as its own drafter, whose steps are said to cost nothing."""
    target = LanguageModel.random(command_line.CONFIG, seed=0)
    options = tune.TuneOptions(
        target="target", drafter="drafter", config="a.gin", max_new_tokens=12, gamma=(1, 3)
    )
    batches = variants.cut_batches([[5, 9, 1], [7, 1]], [[5, 9, 1], [7, 1]], 1, 0)
    accepted = acceptance.measure_acceptance(
        Workload(target, ModelDrafter(target), batches, options), ("block",), 3
    )
    assert accepted.alpha == 1
    choices = [PLAIN, Choice(1, "block"), Choice(3, "block")]
    times = spreads(target_encoder_8=1.0) | {
        f"iteration, {choice}": Spread(1.0, 1.0, 1.0) for choice in choices
    }
    seconds = [tuning.expected_seconds(accepted, [8, 8], choice, times, 0.0) for choice in choices]
    assert seconds[0] > seconds[1] > seconds[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--drafter="], "drafter: got nothing, expected"),
        (["--gamma=2,0"], "gamma: got 0, expected at least 1"),
        (["--gamma=65"], "gamma: got 65, expected"),
        (["--config="], "config: got nothing, expected the name of a gin file"),
        (
            ["--config=no/such/folder/tuned.gin"],
            "config: got 'no/such/folder/tuned.gin', expected a file in a folder",
        ),
        (
            ["--output=no/such/folder/record.json"],
            "output: got 'no/such/folder/record.json', expected",
        ),
        (["--sweep=-1"], "sweep: got -1, expected at least 0"),
        (["--sweep=3"], "got --sweep=3 alone, expected --input_file"),
        (
            ["--sweep=2", "--input_file=FILE"],
            "sweep: got 2, expected at most the 1 lines after the first 2",
        ),
        (
            ["--sweep=1", "--limit=0", "--input_file=FILE"],
            "got --sweep=1 alone, expected --input_file",
        ),
        (["--limit=1", "--input_file=BLANK"], "input_file: got no sentence with any text"),
        (["--repeats=0"], "repeats: got 0, expected at least 1"),
        (["--tree_nodes=8,2"], "tree_nodes: got 2, expected an integer from 3 to 257"),
        (
            ["--drafter=random", "--tree_nodes=4"],
            "tree_nodes: got (4,) with drafter='random', verifier='block', expected none",
        ),
        (
            ["--verifier=gumbel", "--temperature=1", "--tree_nodes=4"],
            "tree_nodes: got (4,) with drafter='",
        ),
        (["--num_beams=2", "--tree_nodes=8"], "tree_nodes: got (8,) with num_beams, expected none"),
        (["--beam_width=4"], "beam_width: got 4 without num_beams"),
        (["--num_beams=2", "--beam_width=1"], "beam_width: got 1, expected an integer from 2"),
        (["--num_beams=2", "--temperature=1"], "temperature: got 1.0 with num_beams, expected 0.0"),
        (
            ["--num_beams=2", "--drafter=random"],
            "drafter: got RandomDrafter with num_beams, expected",
        ),
        (["--num_beams=2", "--nochoose_verifier"], "choose_verifier: got False with num_beams"),
    ],
)
def test_bad_input(specdec, tmp_path, sentences, flags, message):
    (tmp_path / "blank.txt").write_text("\nTom\n", encoding="utf-8")
    files = {"=FILE": f"={sentences}", "=BLANK": f"={tmp_path / 'blank.txt'}"}
    for name, path in files.items():
        flags = [flag.replace(name, path) for flag in flags]
    config = tmp_path / "tuned.gin"
    code, out, err = specdec("tune", *FLAGS, "--drafter=DRAFTER", f"--config={config}", *flags)
    assert code == 2 and not out and message in err and err.count("\n") == 1
    assert not config.exists()
