"""Prompt lookup: what it copies, and drafters without a model through the command line."""

import collections
import json

import jax
import numpy as np
import pytest
from announcements import without_course
from tables import GAMMA, TARGET, V
from toy_models import EchoModel, Words, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import formulas
from specdec_jax.commands import main
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.trace import trace
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

pytestmark = pytest.mark.usefixtures("quick")


# --- Copying ---


def slow_copy(output, source, new: int, copier, wanted: int, eos) -> list[int]:
    """The ids to draft: copied from the best of all places, by the order that the class names."""

    def rank(text, place):
        before, last = text[:place][::-1], output[::-1]
        same = [a == b for a, b in zip(before[:4], last[:4])]
        match = min((same + [False]).index(False), copier.max_match)
        if match < copier.min_match or text is output and not any(same):
            return None
        if copier.prefer == "latest":
            return match, text is output, place
        near = -abs(place - new) if text is source else place
        return match, sum(same), text is source, near, -text[place]

    found = [
        (rank(text, place), text[place:]) for text in (output, source) for place in range(len(text))
    ]
    found = [one for one in found if one[0] is not None]
    draft = max(found, key=lambda one: one[0])[1][:wanted] if found else []
    ends = [i for i, token in enumerate(draft) if token in eos]
    return draft[: ends[0] + 1] if ends else draft


@pytest.mark.parametrize(
    "copier",
    [
        sd.PromptLookupDrafter(1, prefer="latest"),
        sd.PromptLookupDrafter(prefer="latest"),
        sd.PromptLookupDrafter(2),
        sd.PromptLookupDrafter(3, 2),
        sd.PromptLookupDrafter(3, 0),
    ],
    ids=lambda copier: f"{copier.prefer} {copier.min_match} to {copier.max_match}",
)
def test_copies_equal_a_slow_search(copier):
    """Small alphabets have matches of every length; junk past the lengths; two rows an input."""
    rows, rng = 1200, np.random.default_rng(copier.max_match)
    eos = [1]
    state, _ = prepare(
        TARGET, [[3, 4, 5]] * rows, drafter=copier, gamma=GAMMA, max_new_tokens=12, eos_ids=eos
    )
    alphabet = rng.choice([3, 5, 9], rows)[:, None]
    tokens = rng.integers(0, alphabet, (rows, state.tokens.shape[1])).astype(np.int32)
    lengths = rng.integers(1, 13, rows).astype(np.int32)
    starts = rng.integers(1, lengths + 1).astype(np.int32)
    inputs = rng.integers(0, alphabet[::2], (rows // 2, 8)).astype(np.int32)
    input_lengths = rng.integers(0, 9, rows // 2).astype(np.int32)
    wanted = rng.integers(0, GAMMA + 1, rows).astype(np.int32)

    @jax.jit
    def run(state, tokens, lengths, starts, inputs, input_lengths, wanted):
        own = copier.init(inputs, input_lengths, tokens[:, :1], tokens.shape[1])
        state = state.replace(tokens=tokens, lengths=lengths, starts=starts)
        return copier.draft(own, state, wanted)[1]

    draft = jax.device_get(run(state, tokens, lengths, starts, inputs, input_lengths, wanted))
    assert not draft.calls.any() and draft.dist is None
    found = collections.Counter()
    for row in range(rows):
        output, new = tokens[row, : lengths[row]].tolist(), lengths[row] - starts[row]
        source = inputs[row // 2, : input_lengths[row // 2]].tolist()
        expected = slow_copy(output, source, new, copier, wanted[row], eos)
        assert draft.tokens[row, : draft.num_drafted[row]].tolist() == expected
        found[len(expected)] += 1
        found["input"] += expected != slow_copy(output, [], new, copier, wanted[row], eos)
    assert all(found[size] > 10 for size in range(GAMMA)) and found["input"] > 50


def test_copying_from_the_input_in_the_engine():
    """A target that repeats its input: after its first token all is copied."""
    target, ids = EchoModel(Words()), [5, 9, 3, 7, 2, 11, 4, 8, 6, 1]
    result = sd.generate(
        target, [ids], drafter=sd.PromptLookupDrafter(), gamma=4, max_new_tokens=20
    )
    assert result.tokens[0, : result.lengths[0]].tolist() == ids
    assert result.stats.accepted == result.stats.drafted == 8 and result.stats.target_calls == 3


# --- The command line ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with a vocabulary, and text to count."""
    path = tmp_path_factory.mktemp("lookup")
    text = [
        "Tom is learning German.",
        "The weather is nice.",
        "She asked where the book was.",
        "We leave before eight.",
    ] * 3
    vocabulary = SentencePieceVocabulary.train(text, 36)
    target = tiny_t5(0, 64, 1)
    target = sd.LanguageModel(target.config, target.params, vocabulary, name="target")
    sd.save(target, path / "target")
    (path / "pairs.tsv").write_text(
        "".join(f"source {i}\t{line}\n" for i, line in enumerate(text)) + "empty\t\n"
    )
    (path / "lines.txt").write_text("Tom was nice.\n")
    (path / "tom.txt").write_text("Tom\n")
    return path


@pytest.fixture
def specdec(capsys, folder):
    """Runs a command with a tiny target; returns (exit code, standard output, standard error)."""

    def run(command, *argv):
        where = [f"--target={folder / 'target'}", "--compilation_cache_dir="]
        code = main.main(
            [command, *where, *(str(argument).replace("FOLDER", str(folder)) for argument in argv)]
        )
        out, err = capsys.readouterr()
        return code, out, without_course(err)

    return run


@pytest.mark.slow
def test_count_and_generate(specdec, folder):
    table = (
        "--input_file=FOLDER/pairs.tsv",
        "--input_file=FOLDER/lines.txt",
        "--output=FOLDER/table.npz",
    )
    code, out, err = specdec("count", *table, "--order=3", "--gin.CountOptions.sampled=True")
    assert code == 0 and not out and "13 outputs of" in err
    loaded = sd.NGramDrafter.load(folder / "table.npz")
    assert loaded.sampled and loaded.order == 3
    vocabulary = sd.load(folder / "target", dtype="float32").vocabulary
    lines = [
        "Tom is learning German.",
        "The weather is nice.",
        "She asked where the book was.",
        "We leave before eight.",
    ] * 3
    lines.append("Tom was nice.")
    expected = sd.NGramDrafter.count(
        [vocabulary.encode(line) + [1] for line in lines],
        vocabulary.size,
        3,
        sampled=True,
        vocabulary=vocabulary,
    )
    assert all(map(np.array_equal, jax.tree.leaves(loaded), jax.tree.leaves(expected)))

    decode = ("--dtype=float32", "--max_new_tokens=6", "--json", "Tom")
    plain = json.loads(specdec("generate", *decode)[1])
    for name in ("lookup", "FOLDER/table.npz"):
        code, out, err = specdec("generate", f"--drafter={name}", "--gamma=2", *decode)
        assert code == 0 and not err
        record = json.loads(out)
        assert record["text"] == plain["text"] and record["tokens"] == plain["tokens"]
        assert record["stats"]["draft_calls"] == 0 and record["stats"]["drafted"] > 0


BAD = {
    "no target": (["count", "--target="], "target: got nothing"),
    "no input": (["count"], "input_file: got nothing, expected a UTF-8 text file"),
    "no such input": (
        ["count", "--input_file=none.tsv"],
        "input_file: got 'none.tsv', which is no file",
    ),
    "no output": (
        ["count", "--input_file=FOLDER/lines.txt"],
        "output: got None, expected the name of a file that ends",
    ),
    "order": (
        ["count", "--input_file=FOLDER/lines.txt", "--output=a.npz", "--order=0"],
        "order: got 0, expected an integer from 1 to 16",
    ),
    "great order": (
        ["count", "--input_file=FOLDER/three.tsv", "--output=a.npz", "--order=17"],
        "order: got 17, expected an integer from 1 to 16",
    ),
    "continuations": (
        ["count", "--input_file=FOLDER/three.tsv", "--output=a.npz", "--continuations=2000000"],
        "continuations: got 2000000, expected an integer from 1 to 1048576",
    ),
    "columns": (
        ["count", "--input_file=FOLDER/three.tsv", "--output=a.npz"],
        "three.tsv, line 1: got 3 columns",
    ),
    "nothing": (
        ["count", "--input_file=FOLDER/empty.tsv", "--output=a.npz"],
        "input_file: got no text, expected at least one output",
    ),
    "no texts": (
        ["count", "--input_file=FOLDER/empty.tsv", "--output=a.suffix", "--suffix"],
        "input_file: got no text, expected at least one output",
    ),
    "no table": (
        ["generate", "--drafter=none.npz", "Tom"],
        "none.npz: got no such file, expected an n-gram table",
    ),
    "no drafter": (
        ["generate", "--drafter=none", "Tom"],
        "drafter: none: got no such path, expected",
    ),
    "other table": (
        ["generate", "--drafter=FOLDER/other.npz", "Tom"],
        "other.npz: got a table of 16 ids of another",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_line(specdec, folder, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "three.tsv").write_text("a\tb\tc\n")
    (folder / "empty.tsv").write_text("a\t\n")
    sd.NGramDrafter.count([[3]], V, 2, vocabulary=Words()).save(folder / "other.npz")
    (command, *argv), message = BAD[name]
    code, out, err = specdec(command, *argv)
    lines = [line for line in err.splitlines() if "--dtype on the command line" not in line]
    assert code == 2 and not out and len(lines) == 1 and message in lines[0]


@pytest.mark.slow
def test_benchmark_counts_no_draft_steps(specdec, folder):
    options = ("--dtype=float32", "--max_new_tokens=6", "--gamma=2", "--repeats=1")
    argv = (
        "--drafter=lookup",
        *options,
        "--input_file=FOLDER/tom.txt",
        "--output=FOLDER/record.json",
    )
    code, out, err = specdec("benchmark", *argv)
    assert code == 0 and "with prompt lookup" in out and "no model drafts; c is counted as 0" in out
    record = json.loads((folder / "record.json").read_text())
    assert record["drafter"] == {"name": "prompt lookup"} and record["cost_ratio"] is None
    (variant,) = record["speculative"]
    assert variant["stats"]["drafted"] > 0 and variant["differences"] == []
    assert variant["predicted"]["cost_ratio"] == 0 and variant["parts"]["draft steps"] == 0
    stats = variant["stats"]
    everywhere = stats["accepted"] / (sum(stats["examined_by_position"]) + stats["undrafted"])
    assert (
        stats["acceptance_rate_per_position"] == everywhere < stats["acceptance_rate"]
        and stats["undrafted"] > 0
    )
    assert variant["oracle"]["tokens_per_target_call"] == formulas.oracle_tokens(everywhere)
    assert variant["predicted"]["theorem_3_8"] == formulas.expected_tokens(everywhere, 2)
    assert (
        f"alpha {everywhere:.3f} per position of the output, {stats['acceptance_rate']:.3f} where"
        in out
    )


@pytest.mark.slow
@pytest.mark.parametrize("eos", [(), (1,)], ids=["to the limit", "to an accepted EOS"])
def test_acceptance_per_position_by_hand(eos):
    """A position at which nothing was drafted, though it was wanted, counts as not accepted."""
    options = dict(drafter=sd.PromptLookupDrafter(1), gamma=3, max_new_tokens=24, eos_ids=eos)
    echo, row, missed, committed = EchoModel(Words()), [3, 4, 5, 3, 4, 9, 3, 4, 5, 1], 0, 0
    for step in trace(echo, row, **options):
        wanted = min(3, 24 - committed - 1)
        missed += step.rejected is None and step.corrected is not None and step.gamma < wanted
        committed += len(step.accepted) + 1
    stats = sd.generate(echo, [row], **options).stats
    assert stats.undrafted == missed > 0
    everywhere = stats.accepted / (stats.examined_by_position.sum() + missed)
    assert stats.acceptance_rate_per_position == everywhere < stats.acceptance_rate
