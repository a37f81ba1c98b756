"""Continuations of earlier texts beside slow searches, in jobs, in files and commands."""

import functools
import pathlib
import sys
import types

import golden_languages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_samples import g_test
from golden_models import GOLDEN
from suffix_texts import sort_texts
from tiers import parametrize
from toy_models import HashModel, Words, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.checkpoints import converter
from specdec_jax.commands import count
from specdec_jax.drafters import sorted_text
from specdec_jax.drafters.continuations import Texts, follow_passages
from specdec_jax.drafters.sorted_file import join_sequences, map_text, write_sorted
from specdec_jax.drafters.sorted_text import DEPTH, SortedText, find_places, sort_places
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow


def random_sequences(seed: int, vocab: int, count: int = 12) -> list[list[int]]:
    """Returns sequences of few ids, in which long endings recur."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, vocab, n).tolist() for n in (2, 5, 20)]
    pick = rng.integers(0, 3, (count, 3))
    return [sum((phrases[i] for i in row), []) + rng.integers(0, vocab, 2).tolist() for row in pick]


def context(ids: np.ndarray, place: int) -> list[int]:
    """Returns the ids before a place, the last first, and 0 beyond the beginning."""
    before = ids[max(place - DEPTH, 0) : place][::-1].tolist()
    return before + [0] * (DEPTH - len(before))


@pytest.mark.parametrize("seed, vocab", [(0, 2), (1, 3), (2, 9)])
def test_places_are_sorted_by_what_precedes_them(seed, vocab):
    ids = join_sequences(random_sequences(seed, vocab), vocab)
    order = sort_places(ids)
    assert sorted(order.tolist()) == np.flatnonzero(ids).tolist()
    contexts = [context(ids, place) for place in order]
    assert contexts == sorted(contexts)
    assert sort_places(np.zeros(0, np.int32)).tolist() == []


search = jax.jit(find_places, static_argnums=2)


def match_slowly(ids: np.ndarray, place: int, ending: list[int]) -> tuple[int, int]:
    pairs = [(a, b) for a, b in zip(context(ids, place), ending)]
    same = [a == b and b > 0 for a, b in pairs]
    return (same + [False]).index(False), sum(same)


@parametrize("seed, vocab, capacity", [(0, 3, 1), (1, 2, 512), (2, 9, 1)], first=1)
def test_the_longest_match_is_found(seed, vocab, capacity):
    sequences = random_sequences(seed, vocab)
    ids = join_sequences(sequences, vocab)
    text = sort_texts(sequences, vocab, capacity)
    rng, endings = np.random.default_rng(seed), []
    for _ in range(40):  # endings of sequences, whole ones too, some with a change
        one = sequences[rng.integers(len(sequences))]
        ending = np.array(one[: rng.integers(0, len(one)) + 1][::-1][:DEPTH]) + 1
        if rng.random() < 0.4:
            ending[rng.integers(len(ending))] = rng.integers(1, vocab + 1)
        endings.append(np.pad(ending, (0, DEPTH - len(ending))).tolist())
    endings.append([0] * DEPTH)
    found = search(text, jnp.array(endings), 8)
    for row, ending in enumerate(endings):
        slow = {int(p): match_slowly(ids, p, ending) for p in np.flatnonzero(ids)}
        longest = max(match for match, _ in slow.values())
        all_of_it = {place for place, (match, _) in slow.items() if match == longest > 0}
        places = [int(p) for p, match in zip(found.places[row], found.match[row]) if match]
        assert len(set(places)) == len(places) == min(8, len(all_of_it))
        assert set(places) <= all_of_it
        for place, match, equal in zip(*(values[row] for values in found)):
            assert (match, equal) == ((slow[int(place)]) if match else (0, 0))


def test_what_was_added_is_found_with_the_right_size_only():
    """A size that is not brought up to date loses texts, which the test would notice."""
    one, other = [[3, 4, 5, 6]], [[3, 4, 5, 6], [7, 8, 9]]
    old, new = (sort_texts(texts, 10, 64) for texts in (one, other))
    ending = jnp.array([[9, 8, *[0] * (DEPTH - 2)]])
    assert int(old.size) == 4 and int(new.size) == 7
    for text, match in ((new, 2), (new.replace(size=old.size), 0), (old, 0)):
        assert search(text, ending, 8).match.max() == match


def test_passages_are_followed_by_weight():
    ids = jnp.array([[[3, 4, 5], [3, 4, 6], [3, 7, 7], [8, 1, -1], [-1, -1, -1]]])
    weights = jnp.array([[2.0, 3.0, 1.0, 2.0, 9.0]])
    follow = jax.jit(functools.partial(follow_passages, ids, weights), static_argnums=0)
    assert follow(1, 0.1).tolist() == [[[3, 4, 6]]]
    assert follow(3, 0.1).tolist() == [[[3, 4, 6], [8, 1, -1], [-1, -1, -1]]]
    assert follow(1, 0.5).tolist() == [[[3, 4, -1]]], "3 of 8 agree with the third id"
    assert follow(1, 0.9).tolist() == [[[-1, -1, -1]]]


# --- What is drafted ---


@functools.partial(jax.jit, static_argnames=("count", "length"))
def run_find(drafter, padded, width, tokens, lengths, count, length):
    memory = drafter.init(padded, width, tokens[:, :1], tokens.shape[1])
    state = types.SimpleNamespace(tokens=tokens, lengths=lengths)
    memory = drafter.read_prefix(memory, state, None)
    return drafter.find(memory, Texts(tokens, lengths, lengths), count, length)


def find(drafter, text: list[int], inputs=(), count=3, length=8):
    """Returns the continuations of one text, for an encoder's input or none."""
    padded = np.array([[*inputs] + [0] * (8 - len(inputs))] if inputs else [[]], np.int32)
    tokens = np.array([text + [0] * (16 - len(text))], np.int32)
    widths = np.array([len(inputs)], np.int32), np.array([len(text)], np.int32)
    found = run_find(drafter, padded, widths[0], tokens, widths[1], count, length)
    kept = [[int(i) for i in ids if i >= 0] for ids in found.ids[0]]
    return kept, found.match[0].tolist()


def test_a_passage_ends_where_its_sequence_ends():
    """Without the ends between sequences the next one would be drafted."""
    drafter = sd.SuffixDrafter(sort_texts([[3, 4, 5, 6], [7, 8, 9]], 10, 64))
    assert find(drafter, [0, 3, 4, 5]) == ([[6], [], []], [3, 0, 0])
    joined = sd.SuffixDrafter(sort_texts([[3, 4, 5, 6, 7, 8, 9]], 10, 64))
    assert find(joined, [0, 3, 4, 5])[0][0] == [6, 7, 8, 9], "the test can fail"


@parametrize("factor, drafted", [(2.0, [4, 5]), (2.5, [4, 5, 6])], first=1)
def test_the_length_is_limited_by_the_match(factor, drafted):
    text = sort_texts([[1, 3, 4, 5, 6, 7, 8, 9]], 10, 64)
    assert find(sd.SuffixDrafter(text, factor=factor), [0, 3])[0][0] == drafted
    assert find(sd.SuffixDrafter(text), [0, 3, 4])[0][0] == [5, 6, 7, 8]


def test_the_most_frequent_continuation_is_drafted():
    texts = [[3, 4, 5], [3, 4, 6], [3, 4, 6], [9, 4, 7], [9, 4, 7], [9, 4, 7]]
    drafter = sd.SuffixDrafter(sort_texts(texts, 10, 64))
    found, match = find(drafter, [0, 3, 4])
    assert found[:2] == [[6], [5]] and match[:2] == [2, 2]
    assert find(drafter, [0, 4])[0][0] == [7]
    assert find(drafter, [0, 8])[0] == [[], [], []]


@parametrize("earlier", [[[20, 21]], None], first=1)
def test_own_output_and_input_are_read(earlier):
    drafter = sd.SuffixDrafter(earlier and sort_texts(earlier, 24, 64))
    assert find(drafter, [0, 3, 4, 5, 6, 3, 4])[0][0] == [5, 6, 3, 4]
    assert find(drafter, [0, 8, 4], inputs=[3, 4, 5, 1])[0][0] == [5, 1]


def test_an_output_like_an_earlier_one_is_copied_after_a_changed_id():
    """The input is most like that of the first sequence; 9 in the place of 5 is new."""
    earlier = [[2, 3, 4, 5, 6, 7, 1, 0, 12, 13, 15, 16, 17, 1], [8, 8, 1, 0, 19, 20, 1]]
    drafter = sd.SuffixDrafter(sort_texts(earlier, 24, 64))
    inputs = [2, 3, 4, 9, 6, 7, 1]
    assert find(drafter, [0], inputs)[0][0] == [12, 13, 15, 16, 17, 1]
    assert find(drafter, [0, 12, 13, 19], inputs)[0][0] == [16, 17, 1]
    prompt = [2, 3, 4, 9, 6, 7, 1, 0, 12, 13, 19]
    assert find(drafter, prompt)[0][0] == [16, 17, 1]


# --- In jobs ---

V, LIMIT = 24, 8
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, V, length).tolist() for length in RNG.integers(2, 9, 24)]
INPUTS += [ids[:-1] + [int(RNG.integers(2, V))] for ids in INPUTS]
OPTIONS = dict(gamma=4, batch_size=4, max_new_tokens=LIMIT)
WARM = dict(sampling=sd.SamplingConfig(temperature=1.0), verifier="gumbel")


@pytest.fixture(scope="module")
def target():
    return noisy_copy(tiny_t5(0, vocab=V), 2.0)


WAYS = {
    "refilled": {},
    "batches": dict(refill=False),
    "samples": dict(WARM, num_samples=2),
    "a tree": dict(tree=sd.Tree.uniform((2, 1))),
    "beams": dict(num_beams=2),
    "prefixes": dict(decoder_prefix=[[3] * (n % 3) for n in range(len(INPUTS))]),
    "one by one": dict(batch_size=1),
    "automatic": dict(gamma="auto"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_jobs_outputs_are_those_of_plain_decoding(target, way):
    options = {**OPTIONS, **WAYS[way]}
    history, drafters = sd.SuffixHistory(target, capacity=512), set()

    def decode():
        found = {}
        for number, rows in sd.decode_stream(target, INPUTS, learner=history, **options):
            found[number] = [row.tokens for row in rows]
            drafters.add(id(history.drafter))
        return found

    plain = {name: value for name, value in options.items() if name not in ("tree", "gamma")}
    expected = dict(sd.decode_stream(target, INPUTS, **plain))
    found = decode()
    assert found == {n: [row.tokens for row in rows] for n, rows in expected.items()}
    assert len(drafters) > 4
    if way == "refilled":  # the arrays keep their shapes while texts are added and dropped
        assert compilations(decode) == 0
        assert history.outputs == 2 * len(INPUTS) and len(history._ids) <= 512


PAIRS = {
    "horizontal": lambda model: sd.HorizontalCascade(sd.SuffixDrafter(min_match=2), model, 4),
    "vertical": lambda model: sd.VerticalCascade(model, sd.SuffixDrafter(), 2),
    "the better": lambda model: sd.BestOf(sd.SuffixDrafter(), model, costs=(0, 0.1)),
    "gate": lambda model: sd.GatedDrafter(sd.SuffixDrafter(), least=0.3),
    "gate in a pair": lambda model: sd.HorizontalCascade(
        sd.GatedDrafter(sd.SuffixDrafter()), model, 4
    ),
    "merged": lambda model: sd.MergedDrafter(sd.SuffixDrafter(), model),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_history_inside_another_drafter(target, name):
    """Rows at temperature 0 and above it; what was accepted of the history's drafts is counted."""
    sampling = sd.SamplingConfig(temperature=[0.0, 1.0] * (len(INPUTS) // 2))
    options = dict(OPTIONS, sampling=sampling, key=jax.random.key(3))
    expected = dict(sd.decode_stream(target, INPUTS, verifier="gumbel", **options))
    ways = [dict(verifier="gumbel"), dict(verifier="block")]
    if name == "merged":
        trees = (sd.Tree.uniform((2, 1), verifier=verifier) for verifier in ("gumbel", "point"))
        ways = [dict(tree=tree, gamma="auto") for tree in trees]
    history = sd.SuffixHistory(target, PAIRS[name](sd.ModelDrafter(noisy_copy(target, 0.1, 1))))
    assert history.drafter.remembers

    def decode(way=0):
        return dict(sd.decode_stream(target, INPUTS, learner=history, **options | ways[way]))

    for found in (decode(), decode()):
        assert {n: row.tokens for n, (row,) in found.items()} == {
            n: row.tokens for n, (row,) in expected.items()
        }
        assert sum(row.stats.accepted for (row,) in found.values()) > 0
    assert history.outputs == 2 * len(INPUTS) and compilations(decode) == 0
    with pytest.raises(sd.UnsupportedCombination, match="expected 'gumbel' above temperature 0"):
        decode(1)


LIKE = (
    *("{} is learning German.", "{} told me that the train was late.", "Did you see {} yesterday?"),
    *("I have not seen {} since last summer.", "{} opened the window and looked outside."),
    *("The letter on the table is from {}.", "Do you think that {} is telling the truth?"),
)


@slow
def test_a_job_of_like_outputs_takes_fewer_calls_than_copies_of_the_input():
    """`scripts/results.py --only=templates` measures a longer job, and its time."""
    target = sd.load("ende/target")
    texts = [one.format(name) for name in ("Tom", "Mary", "John", "Anna", "Peter") for one in LIKE]
    options = dict(gamma=8, batch_size=1, max_new_tokens=32)

    def decode(**more):
        rows = dict(sd.decode_stream(target, texts, **options, **more))
        calls = sum(row.stats.target_calls for (row,) in rows.values())
        return {number: row.tokens for number, (row,) in rows.items()}, calls

    copied, calls = decode(drafter=sd.PromptLookupDrafter())
    found, fewer = decode(learner=sd.SuffixHistory(target))
    assert found == copied and calls > 1.3 * fewer


def finished(tokens, reason="eos"):
    return types.SimpleNamespace(tokens=list(tokens), finish_reason=reason)


def test_a_full_history_drops_its_older_half(target):
    history = sd.SuffixHistory(target, capacity=64)
    for number in range(9):
        history.saw(np.array([number, 20]), np.array([0]), finished([21, number, 22, 1]))
        history.learn()
    ids = history._ids.tolist()
    assert len(ids) <= 64 and history.outputs == 9
    assert ids[:4] != [1, 21, 1, 22] and ids[-8:] == [9, 21, 1, 22, 9, 23, 2, 0]
    assert int(history.drafter.text.size) == np.count_nonzero(ids)
    history.saw(np.array([], int), np.array([0]), finished([], "empty"))
    history.saw(np.array([4]), np.array([0]), finished([5, 6], "error"))
    history.saw(np.array([], int), np.array([0]), finished([3] * 40))
    assert history._new == [], "one that is empty, one that failed, and one that is too long"


@slow
@pytest.mark.parametrize("saved", [False, True])
def test_a_second_call_with_one_key_draws_from_the_targets_distribution(saved, tmp_path):
    """What a history has of a call would bias the next one with its key under "block"."""
    target = HashModel(12, 0)
    inputs = np.stack(np.meshgrid(*[np.arange(2, 10)] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    logits = np.asarray(target.logits(inputs, np.zeros((len(inputs), 1), int)))[:, 0]
    probs = np.asarray(jax.nn.softmax(logits.astype(np.float64)))
    order = np.argsort(probs, axis=1)
    options = dict(key=jax.random.key(5), gamma=1, max_new_tokens=2)

    def second_call(verifier, remembers):
        outputs = np.full((len(inputs), 2), 3)
        for _ in range(2):
            history = sd.SuffixHistory(target)
            for ids, row in zip(inputs, outputs):
                history.saw(ids, np.array([0]), finished(row.tolist()))
            history.learn()
            drafter, settings = history.drafter, {} if remembers else {"remembers": False}
            if saved:
                history.save(tmp_path / "kept.suffix")
                drafter = sd.SuffixDrafter.load(tmp_path / "kept.suffix", **settings)
            drafter = drafter.replace(**settings)
            result = sd.generate(
                target,
                inputs,
                drafter=drafter,
                verifier=verifier,
                sampling=WARM["sampling"],
                **options,
            )
            outputs = result.tokens
        assert result.stats.drafted == len(inputs)
        ranks = np.argmax(order == result.tokens[:, :1], axis=1)
        expected = np.take_along_axis(probs, order, axis=1).mean(axis=0)
        return g_test(np.bincount(ranks, minlength=12), expected)

    assert second_call("gumbel", True) > 1e-4
    assert second_call("block", False) < 1e-9, "the test can fail"
    with pytest.raises(sd.UnsupportedCombination, match="'gumbel' above temperature 0"):
        second_call("block", True)


def test_a_file_of_outputs_remembers(target, tmp_path):
    """A second call with the key that drew them may draw the same again under "block" only."""
    history, path = sd.SuffixHistory(target), tmp_path / "kept.suffix"
    history.add(INPUTS[0], [21, 5, 1])
    history.save(path)
    warm = dict(sampling=WARM["sampling"], gamma=1, max_new_tokens=2)
    with pytest.raises(sd.UnsupportedCombination, match="'gumbel' above temperature 0"):
        sd.generate(target, INPUTS[:1], drafter=sd.SuffixDrafter.load(path), **warm)
    with pytest.raises(ValueError, match="target_language: got 'de', expected none: the model"):
        history.add(INPUTS[0], [21, 5, 1], target_language="de")
    for wrong in (["x"], [-1, 1], [V, 1]):  # -1 would end a text, and V wrap around in the file
        with pytest.raises(ValueError, match="sequences: got .*, expected"):
            history.add(INPUTS[0], wrong)
    assert not sd.SuffixDrafter.load(path, remembers=False).remembers
    sd.SuffixDrafter.save_texts(path, [[21, 5, 1]], V)
    assert not sd.SuffixDrafter.load(path).remembers


@pytest.mark.slow
def test_what_is_kept_is_restored(target, tmp_path):
    history, path = sd.SuffixHistory(target, capacity=128), tmp_path / "kept.suffix"
    history.save(path, every=60)  # there is none yet, and so the first text need not wait
    assert not path.exists()
    for number in range(3):
        history.saw(np.array([number, 20]), np.array([0]), finished([21, number, 1]))
    history.learn()
    history.saw(np.array([5]), np.array([0]), finished([6, 1]))  # not yet sorted, but finished
    history.save(path, every=60)
    again = sd.SuffixHistory(target, capacity=128)
    again.restore(path)
    assert again._ids.tolist() == [*history._ids, 6, 1, 7, 2, 0]
    for kept in (history, again):  # in another place, although nothing was added since
        place = tmp_path / "elsewhere.suffix"
        kept.save(place)
        copy = sd.SuffixHistory(target, capacity=128)
        copy.restore(place)
        assert copy._ids.tolist() == again._ids.tolist()
        written = place.stat().st_mtime_ns
        kept.save(place)
        assert place.stat().st_mtime_ns == written
    long = [sd.SuffixHistory(target) for _ in range(2)]
    long[0].add([4], [5] * 29 + [1])  # 32 ids, one more than this capacity keeps
    long[1].add([4], [5] * 28 + [1])
    for history, lengths in zip(long, ([16, 16, 16], [32])):
        smaller = sd.SuffixHistory(target, capacity=64)
        for _ in range(3):
            smaller.add([4], [6] * 12 + [1])
        history.save(tmp_path / "long.suffix")
        smaller.restore(tmp_path / "long.suffix")
        ids = np.concatenate([smaller._ids, *smaller._new])
        assert np.diff(np.flatnonzero(ids == 0), prepend=-1).tolist() == lengths
    other = sd.SuffixHistory(tiny_t5(0, vocab=V + 1))
    with pytest.raises(ValueError, match="kept.suffix: got texts of another vocabulary"):
        other.restore(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match="kept.suffix: got a damaged file"):
        again.restore(path)


def test_arguments_are_checked(target):
    for make, message in (
        (lambda: sd.SuffixDrafter(factor=-1), "factor: got -1, expected a number from 0 to 64"),
        (lambda: sd.SuffixDrafter(least_share="x"), "least_share: got 'x'"),
        (lambda: sd.SuffixDrafter(min_match=0), "min_match: got 0"),
        (lambda: sd.SuffixHistory(target, capacity=100), "capacity: got 100, expected a power of"),
        (lambda: sd.SuffixHistory(target, sd.PromptLookupDrafter()), "history: got .*, expected"),
        (
            lambda: sd.SuffixHistory(target, sd.BestOf(sd.SuffixDrafter(), sd.SuffixDrafter())),
            "as drafter, expected one SuffixDrafter without texts, alone or",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


# --- Files ---


@pytest.mark.parametrize("kind", ["gpt", "nllb", "mbart"])
def test_texts_of_a_command_are_those_that_rows_read(kind, tmp_path):
    """A prompt has no EOS; where there is no source, nothing says its language."""
    lines, path, folder = tmp_path / "lines.tsv", tmp_path / "a.suffix", tmp_path / "model"
    if kind == "gpt":
        vocabulary = SentencePieceVocabulary.load(GOLDEN / "hf_tokenizer" / "spiece.model")
        config = sd.GPTConfig(vocabulary.size, 16, 2, 1, 32, num_positions=64)
        ids = dict(start_token=1, eos_ids=vocabulary.eos_ids)
        model = sd.LanguageModel.random(config, 0, vocabulary, **ids)
        lines.write_text("The river\tis long.\n")
        expected = [*vocabulary.encode_prompt("The river"), *vocabulary.encode("is long."), 1]
    else:
        model = golden_languages.make_model(kind, tmp_path / "files")
        lines.write_text("The river\n")
        expected = [model.start_token, *model.vocabulary.encode_output("The river")]
    converter.save(model, folder)
    count.run(count.CountOptions(str(folder), None, (str(lines),), suffix=True, output=str(path)))
    assert np.asarray(map_text(path)[0].ids).tolist() == [*(token + 1 for token in expected), 0]
    if kind == "gpt":
        return
    # Sources and outputs in two languages, which the options name.
    codes = [*model.vocabulary.languages.codes][:2]
    spoken = model.vocabulary.with_languages(*codes)
    start = spoken.languages.codes[codes[1]] if kind == "mbart" else model.start_token
    output = spoken.encode_output("is long.")
    expected = [*spoken.encode_input("The river"), start, *output]
    lines.write_text("The river\tis long.\n")
    options = dict(zip(("source_language", "target_language"), codes))
    write = functools.partial(count.CountOptions, str(folder), None, (str(lines),), **options)
    count.run(write(suffix=True, output=str(path)))
    assert np.asarray(map_text(path)[0].ids).tolist() == [*(token + 1 for token in expected), 0]
    history, saved = sd.SuffixHistory(model), tmp_path / "b.suffix"
    history.add(spoken.encode_input("The river"), output, target_language=codes[1])
    history.save(saved)
    np.testing.assert_array_equal(map_text(saved)[0].ids, map_text(path)[0].ids)
    with pytest.raises(ValueError, match="target_language: got 'none such', expected one of"):
        history.add([4], [5, 1], target_language="none such")
    count.run(write(order=3, output=str(tmp_path / "a.npz")))
    table = sd.NGramDrafter.load(tmp_path / "a.npz")
    table.check(model)
    rows, match = table.find_rows(jnp.array([[start, 0, 0, 0]]), jnp.array([1]))
    assert table.ranked(rows, 2).tolist() == [[output[0], -1]] and match.tolist() == [2]


def test_a_search_goes_past_the_greatest_int32(monkeypatch):
    """As in a text of 2**28 places, of which the first tried is 15 times as far."""
    monkeypatch.setattr(sorted_text, "_FAN", 2**16)
    text = SortedText.make(np.full(70_000, 3, np.int32), np.arange(70_000, dtype=np.int32))
    endings, depth = jnp.full((1, DEPTH), 9), jnp.array([DEPTH])
    found = sorted_text._count_smaller(text, endings, depth, jnp.array([True]))
    assert found.tolist() == [70_000]


@parametrize("vocab", [2**16, 2**16 - 1], first=1)
def test_a_file_is_mapped_and_drafts_as_in_memory(tmp_path, vocab):
    """65,536 ids and the end of a sequence do not fit into 16 bits."""
    sequences, path = [[3, 4, vocab - 1, 6, 0, 7], [vocab - 1, 6, 8]], tmp_path / "a.suffix"
    sd.SuffixDrafter.save_texts(path, sequences, vocab)
    drafter = sd.SuffixDrafter.load(path, factor=3)
    assert drafter.text.ids.dtype == ("uint16" if vocab < 2**16 else "int32")
    assert find(drafter, [0, vocab - 1])[0][0] == [6, 8], "the latest is most like a prompt"
    assert find(drafter, [3, 4])[0][0] == [vocab - 1, 6, 0, 7]
    for leaf in (drafter.text.ids, drafter.text.order):  # whole pages of the file
        assert leaf.unsafe_buffer_pointer() % 4096 == 0
    assert not drafter.remembers and drafter.vocab_size == vocab


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapped_file_takes_no_memory_of_its_own(tmp_path):
    """It is 12 MB; what a search reads of it the system may forget."""
    path, vocab = tmp_path / "a.suffix", 70_000
    ids = np.random.default_rng(0).integers(1, vocab, 1_500_000).astype(np.int32)
    ids[::30] = 0
    write_sorted(path, ids, vocab, "")
    ending = jnp.array([ids[1000 - DEPTH : 1000][::-1]])

    def memory() -> int:
        status = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    drafter = sd.SuffixDrafter.load(path)
    assert search(drafter.text, ending, 8).match.max() == 9, "from the end before it"
    del drafter
    before = memory()
    drafter = sd.SuffixDrafter.load(path)
    assert search(drafter.text, ending, 8).match.max() == 9
    assert memory() - before < 5e6 < path.stat().st_size / 2


def test_a_file_with_another_id_is_rejected(tmp_path):
    path = tmp_path / "a.suffix"
    sd.SuffixDrafter.save_texts(path, [[4, 5, 6]], 10)
    content = bytearray(path.read_bytes())
    assert content[4096] == 5  # the first id, plus 1, after a page
    content[4096] = 7
    path.write_bytes(content)
    with pytest.raises(ValueError, match="a.suffix: got a damaged file .the checksum"):
        sd.SuffixDrafter.load(path)


def test_files_of_other_vocabularies_are_rejected(target, tmp_path):
    path = tmp_path / "a.suffix"
    sd.SuffixDrafter.save_texts(path, [[3, 4]], V + 1, Words())
    assert sd.SuffixDrafter.load(path, Words()).fingerprint == Words().fingerprint()
    with pytest.raises(ValueError, match="a.suffix: got sorted text of 25 ids of another vocab"):
        sd.SuffixDrafter.load(path, Words(1))
    with pytest.raises(ValueError, match="drafter: got sorted text of .* ids, expected at most"):
        sd.generate(target, INPUTS[:1], drafter=sd.SuffixDrafter.load(path))
    with pytest.raises(ValueError, match="sequences: got id 24, expected ids from 0 to 23"):
        sd.SuffixDrafter.save_texts(path, [[3], [24]], 24)
    with pytest.raises(ValueError, match="sequences: got no id at all"):
        sd.SuffixDrafter.save_texts(path, [[]], 24)
