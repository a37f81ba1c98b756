"""Stop strings, streamed text and deadlines: ids, text and log-probabilities agree."""

import collections
import dataclasses
import functools
import io
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece
from gemma_tokenizer import make_tokenizer
from toy_models import EchoModel, HashModel

from specdec_jax.decoding import generate as generate_module
from specdec_jax.decoding import stream as stream_module
from specdec_jax.decoding.generate import generate, mark_stopped
from specdec_jax.decoding.stop import count_visible, find_stop
from specdec_jax.decoding.stream import stream
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
)

pytestmark = pytest.mark.usefixtures("quick")

LETTERS = "aab bü€𝄞c "
STOPS = [
    ("b",),
    ("ab", "b"),
    ("€", "ü€"),
    ("abc", "b", "c "),
    (" ",),
    ("𝄞a", "aa"),
    ("b𝄞a", "𝄞"),
    ("zz",),
]


@functools.cache
def vocabulary(name: str, *whole: str):
    """Returns a vocabulary; `whole` are pieces that it certainly has."""
    if name == "bytes":
        return ByteVocabulary(extra_ids=2)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a ab abc b bc c ca aa ba"] * 30),
        model_writer=out,
        vocab_size=280,
        byte_fallback=True,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        user_defined_symbols=list(whole),
    )
    return SentencePieceVocabulary(out.getvalue())


def some_text(rng, most: int, stops=()) -> str:
    """Letters of one to four bytes, words that repeat; mostly with one of `stops` among them."""
    letters = rng.choice(list(LETTERS), rng.integers(1, most)).tolist()
    if stops and rng.random() < 0.7:
        letters.insert(rng.integers(len(letters) + 1), rng.choice(stops))
    return "".join(letters).strip() or "a"


def some_ids(rng, name: str, stops=()) -> list[int]:
    """A text's ids, or those of a text torn to pieces: bytes that are no characters."""
    ids = vocabulary(name).encode(some_text(rng, 14, stops))
    return [token for token in ids if rng.random() < 0.8] if rng.random() < 0.5 else ids


def first_stop(text: str, stops) -> int | None:
    """Where the stop string begins that is complete first, letter by letter."""
    for end in range(len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(complete)
    return None


# --- As functions of ids ---


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_cut_keeps_all_whole_tokens_before_the_first_stop_string(name):
    decode, rng, met = vocabulary(name).decode, np.random.default_rng(0), collections.Counter()
    for stops, _ in itertools.product(STOPS, range(40)):
        ids = some_ids(rng, name, stops)
        text = decode(ids)
        kept, start = find_stop(vocabulary(name), ids, stops), first_stop(text, stops)
        assert (kept is None) == (start is None)
        if kept is None:
            continue
        part = decode(ids[:kept])
        places = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
        met["any"] += 1
        met["one that begins first and ends later"] += any(place < start for _, place in places)
        met["two that end together"] += sum(end == min(places)[0] for end, _ in places) > 1
        met["a token that reaches into it"] += len(part) < start
        met["bytes of a character that is cut"] += decode(ids[: kept + 1]) == part
        assert text[:start].startswith(part) and not any(stop in part for stop in stops)
        assert not kept or decode(ids[: kept - 1]) != part, (
            "an id that adds nothing to the text before the stop string"
        )
        for more in range(kept + 1, len(ids) + 1):
            longer = decode(ids[:more])
            assert longer == part or len(longer) > start or not text.startswith(longer)
        # However far the decoding went beyond it.
        complete = next(
            n for n in range(len(ids) + 1) if first_stop(decode(ids[:n]), stops) is not None
        )
        assert all(
            find_stop(vocabulary(name), ids[:n], stops) == kept for n in range(complete, len(ids))
        )
    impossible = {"bytes": {"a token that reaches into it"}, "pieces": set()}
    assert len(met) == 5 and all(
        count > 5 for rule, count in met.items() if rule not in impossible[name]
    ), met


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_what_is_shown_is_never_taken_back(name):
    decode, rng = vocabulary(name).decode, np.random.default_rng(1)
    for stops, _ in itertools.product([(), *STOPS], range(40)):
        ids = some_ids(rng, name)
        kept = find_stop(vocabulary(name), ids, stops)
        final = decode(ids if kept is None else ids[:kept])
        seen = 0
        for n in range(len(ids) + 1):
            if stops and first_stop(decode(ids[:n]), stops) is not None:
                break
            count = count_visible(vocabulary(name), ids[:n], stops)
            assert seen <= count <= n and final.startswith(decode(ids[:count]))
            assert kept is None or count <= kept
            seen = count


def test_worked_examples():
    """Of "a €" only "a " is shown until its last byte is there.

    "x" with a stop "xy" waits for what follows.
    """
    bytes_ = vocabulary("bytes")
    ids = bytes_.encode("a €")
    assert [count_visible(bytes_, ids[:n], ()) for n in range(6)] == [0, 1, 2, 2, 2, 5]
    assert [count_visible(bytes_, bytes_.encode("wx" + c), ("xy",)) for c in ("", "z", "x")] == [
        1,
        3,
        2,
    ]
    assert (
        find_stop(bytes_, bytes_.encode("wxyz"), ("xy",)) == 1
        and find_stop(bytes_, bytes_.encode("wxz"), ("xy",)) is None
    )
    assert find_stop(bytes_, bytes_.encode("aü"), ("ü",)) == 1, "none of its bytes"
    assert find_stop(bytes_, bytes_.encode("abc"), ("abc", "b")) == 1, "b was complete first"
    assert find_stop(bytes_, bytes_.encode("abc"), ("c", "bc")) == 1, (
        "the longer of two that end together"
    )
    pieces = vocabulary("pieces", "▁abc")
    ids = pieces.encode("ab abc")
    kept = find_stop(pieces, ids, ("bc",))
    assert "ab a".startswith(pieces.decode(ids[:kept])) and len(
        pieces.decode(ids[: kept + 1])
    ) > len("ab a")
    assert pieces.decode(ids[:kept]) == "ab", "the piece that reaches into it goes"


def test_a_run_of_bytes_is_shown_at_its_end():
    """A byte that is none of a character's makes all bytes before it none."""
    vocabulary = TokenizerJsonVocabulary(make_tokenizer().to_str(), eos_ids=(1,))
    find = make_tokenizer().token_to_id
    letter, byte, other = (find(piece) for piece in ("a", "<0x3D>", "<0xFF>"))
    texts = [vocabulary.decode(ids) for ids in ([letter, byte], [letter, byte, other])]
    assert texts == ["a=", "a\ufffd\ufffd"]
    ids = [letter, byte, other, letter]
    assert [count_visible(vocabulary, ids[:n], ()) for n in range(5)] == [0, 1, 1, 1, 4]


def test_a_stop_string_in_a_run_of_bytes_counts_at_its_end():
    """Whether the host looks before the byte that changes the run, or only after it."""
    vocabulary = TokenizerJsonVocabulary(make_tokenizer().to_str(), eos_ids=(1,))
    find = make_tokenizer().token_to_id
    letter, byte, other = (find(piece) for piece in ("a", "<0x3D>", "<0xFF>"))
    target = types.SimpleNamespace(vocabulary=vocabulary, network=types.SimpleNamespace(rules=None))
    tokens = jnp.array([[letter, byte, other, letter], [letter, byte, letter, letter]])

    def met(length):
        state = DecodeLike(jnp.full(2, length), jnp.zeros(2, bool), tokens)
        return np.asarray(mark_stopped(target, state, np.zeros(2, int), ("=",)).done).tolist()

    assert [met(length) for length in (1, 2, 3, 4)] == [
        [False, False],
        [False, False],
        [False, True],
        [False, True],
    ]


@dataclasses.dataclass
class DecodeLike:
    """The part of a state that is looked at."""

    lengths: jax.Array
    done: jax.Array
    tokens: jax.Array


# --- Through the engine: an echoing target, a drafter that is often wrong ---

ROWS, LIMIT = 6, 40


def echo(name: str, **options):
    """Returns arguments for `generate` and `stream` whose shapes are the same in every call."""
    models = EchoModel(vocabulary(name)), EchoModel(vocabulary(name), wrong=3)
    return dict(
        target=models[0], drafter=ModelDrafter(models[1]), gamma=3, max_new_tokens=LIMIT, **options
    )


def some_texts(rng, name: str) -> list[str]:
    encode = vocabulary(name).encode
    texts = (some_text(rng, 22) for _ in itertools.count())
    texts = (text for text in texts if len(encode(text)) < 31)
    longest = next(text for text in ("a" * n + "ca" * 30 for n in range(9)))
    while not 25 <= len(encode(longest)) < 31:
        longest = longest[:-1]
    return [longest, *itertools.islice(texts, ROWS - 1)]


def joined(pieces, rows: int):
    """Texts, ids and reasons of streamed pieces; each row has one last piece."""
    pieces = list(pieces)
    texts = ["".join(piece.text for piece in pieces if piece.row == row) for row in range(rows)]
    ids = [
        [token for piece in pieces if piece.row == row for token in piece.tokens]
        for row in range(rows)
    ]
    last = [piece for piece in pieces if piece.finish_reason is not None]
    assert sorted(piece.row for piece in last) == list(range(rows))
    assert all(piece.text and piece.tokens for piece in pieces if piece.finish_reason is None)
    return (
        texts,
        ids,
        [reason for _, reason in sorted((piece.row, piece.finish_reason) for piece in last)],
    )


@pytest.mark.parametrize("name", ["bytes", "pieces"])
def test_texts_are_cut_and_streamed(name):
    rng, reasons = np.random.default_rng(2), []
    for number, stops in enumerate([(), *STOPS]):
        texts = some_texts(rng, name)
        arguments = echo(name, inputs=texts, stop=stops)
        result = generate(**arguments)
        for row, text in enumerate(texts):
            ids = vocabulary(name).encode(text)
            start = first_stop(vocabulary(name).decode(ids), stops)
            wanted = [*ids, 1] if start is None else ids[: find_stop(vocabulary(name), ids, stops)]
            assert result.tokens[row].tolist() == wanted + [0] * (LIMIT - len(wanted))
            assert result.lengths[row] == len(wanted) == np.count_nonzero(result.log_probs[row])
            assert result.finish_reasons[row] == ("eos" if start is None else "stop")
            assert result.texts[row] == vocabulary(name).decode(wanted)
        pieces = list(stream(**arguments, every=1 + number % 3))
        found = joined(pieces, ROWS)
        valid = [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]
        assert found == (result.texts, valid, result.finish_reasons)
        assert "\ufffd" not in "".join(piece.text for piece in pieces)
        assert len(pieces) > 2 * ROWS or stops
        reasons += result.finish_reasons
    assert reasons.count("stop") > 10 and reasons.count("eos") > 10
    # Two looks apart or eight, one token at a time or four: the same.
    plain = generate(**{**arguments, "drafter": None})
    assert plain.texts == result.texts and plain.finish_reasons == result.finish_reasons


def test_a_stop_string_at_the_limit_and_one_past_it():
    arguments = echo("bytes", inputs=["abcab" * 5, "bcabc" * 5], stop=["xx"])
    for limit, stop, wanted in [
        (5, "ab", ("stop", "stop")),
        (4, "cab", ("length", "stop")),
        (3, "zz", ("length",) * 2),
    ]:
        result = generate(**{**arguments, "max_new_tokens": limit, "stop": stop})
        assert tuple(result.finish_reasons) == wanted
        assert (
            joined(stream(**{**arguments, "max_new_tokens": limit, "stop": stop}), 2)[0]
            == result.texts
        )
    assert result.texts == ["abc", "bca"]


@pytest.mark.parametrize("drafts", [{}, {"drafter": None, "gamma": 0}], ids=["drafts", "plain"])
def test_what_fails_after_a_stop_string_is_no_error(drafts):
    """Iterations go on for a while after it."""

    def process(tokens, lengths, logits):
        return jnp.where(lengths[:, None] > 3, jnp.nan, logits)

    arguments = echo("bytes", inputs=["abcabc", "bcabca"]) | drafts
    arguments |= dict(sampling=SamplingConfig(processor=process), stop="b")
    result = generate(**arguments)
    assert result.texts == ["a", ""] and result.finish_reasons == ["stop", "stop"]
    assert result.errors == [None, None] and joined(stream(**arguments), 2)[0] == result.texts
    result = generate(**arguments | dict(stop="ca", non_finite="report"))
    assert result.finish_reasons == ["error", "stop"] and result.texts == [None, "b"]


def test_half_a_character_at_the_end_is_what_generate_gives():
    """Streaming holds it back as long as more may come, and no longer."""
    for name in ("bytes", "pieces"):
        arguments = {**echo(name, inputs=["a" + "€" * 8, "b"]), "max_new_tokens": 3}
        result = generate(**arguments)
        assert result.finish_reasons == ["length", "eos"]
        assert joined(stream(**arguments), 2)[0] == result.texts


def test_empty_rows_have_a_last_piece_too():
    result = generate(**echo("bytes", inputs=["ab", "", "  "]))
    assert result.finish_reasons == ["eos", "empty", "empty"] and result.texts == ["ab", "", ""]
    pieces = joined(stream(**echo("bytes", inputs=["ab", "", "  "])), 3)
    assert pieces == (["ab", "", ""], [[100, 101, 1], [], []], ["eos", "empty", "empty"])


def test_log_probs_of_both_distributions_are_cut_alike():
    """With a stop string a row of sampled bytes is the beginning of the row without."""
    bytes_ = ByteVocabulary(extra_ids=0)
    models = [HashModel(bytes_.size, seed, likeness=0.5, vocabulary=bytes_) for seed in (0, 1)]
    allowed = np.isin(np.arange(bytes_.size), bytes_.encode("ab€ü"))
    config = SamplingConfig(temperature=0.9, vocabulary_mask=allowed)
    options = dict(
        drafter=ModelDrafter(models[1]), gamma=2, sampling=config, max_new_tokens=30, eos_ids=()
    )
    inputs = [[5, row] for row in range(8)]
    whole = generate(models[0], inputs, **options)
    assert np.all(whole.lengths == 30) and len(set(whole.texts)) == 8
    for stop in ("b", ["ab", "€", "ü"], "aa"):
        result = generate(models[0], inputs, stop=stop, **options)
        valid = np.arange(30) < result.lengths[:, None]
        for name in ("tokens", "log_probs", "adjusted_log_probs"):
            np.testing.assert_array_equal(
                getattr(result, name), np.where(valid, getattr(whole, name), 0)
            )
        for row, text in enumerate(whole.texts):
            start = first_stop(text, [stop] if isinstance(stop, str) else stop)
            assert result.finish_reasons[row] == ("length" if start is None else "stop")
            assert (
                result.texts[row]
                == text[:start]
                == bytes_.decode(result.tokens[row, : result.lengths[row]])
            )
        assert "stop" in result.finish_reasons
        valid = [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]
        found = joined(stream(models[0], inputs, stop=stop, every=2, **options), 8)
        assert found == (result.texts, valid, result.finish_reasons)
    assert np.all(whole.adjusted_log_probs > whole.log_probs), "no id outside the mask takes mass"


# --- The deadline ---


@pytest.fixture
def clock(monkeypatch):
    """A clock that a second passes on with every look at it."""
    seconds = itertools.count()
    fake = types.SimpleNamespace(monotonic=lambda: float(next(seconds)))
    for module in (generate_module, stream_module):
        monkeypatch.setattr(module, "time", fake)


@pytest.mark.parametrize("deadline, calls", [(0.5, 1), (1.5, 2), (3.5, 4)])
def test_at_the_deadline_rows_are_returned_as_they_are(clock, deadline, calls):
    """The clock is read once an iteration; a drafter that is always right gives 4 ids in each."""
    texts = ["abcabcabcabcabcabcabcabcabca", "ab", "", "abab"]
    arguments = echo("bytes", inputs=texts, deadline=deadline)
    arguments["drafter"] = ModelDrafter(arguments["target"])
    result = generate(**arguments)
    assert result.texts == [texts[0][: 4 * calls], "ab", "", "abab"]
    assert result.lengths.tolist() == [4 * calls, 3, 0, 4 if calls == 1 else 5]
    assert result.finish_reasons == [
        "deadline",
        "eos",
        "empty",
        "deadline" if calls == 1 else "eos",
    ]
    assert result.stats.per_row[0].target_calls == calls
    assert np.count_nonzero(result.log_probs[0]) == 4 * calls
    texts, ids, reasons = joined(stream(**arguments), 4)
    assert texts == result.texts and reasons == result.finish_reasons
    assert [len(row) for row in ids] == result.lengths.tolist()


def test_a_row_that_is_finished_before_its_end_says_so():
    arguments = echo("bytes", inputs=["abcabcabc", "a"])
    target, inputs = arguments.pop("target"), arguments.pop("inputs")
    state, request = generate_module.prepare(target, inputs, **arguments)
    state = generate_module.advance(request.network, request.drafter, state, np.int32(2))
    result = generate_module.finish(target, state, request)
    assert result.finish_reasons[0] == "unfinished" and 0 < result.lengths[0] < 9


def test_a_stop_string_and_a_deadline(clock):
    arguments = echo(
        "bytes", inputs=["abcabcabcabcabcabcabcabcabca", "cbacbacba"], stop="ac", deadline=1.5
    )
    result = generate(**{**arguments, "drafter": None})
    assert result.texts == ["ab", "cb"] and result.finish_reasons == ["deadline", "deadline"]
    result = generate(**{**arguments, "drafter": None, "deadline": 9.0})
    assert (
        result.finish_reasons == ["deadline", "stop"]
        and result.texts[1] == "cb"
        and len(result.texts[0]) == 10
    )


def test_a_late_deadline_changes_nothing():
    arguments = echo("bytes", inputs=["abc", "ab ba"])
    result, never = generate(**arguments, deadline=1e6), generate(**arguments)
    assert result.texts == never.texts == ["abc", "ab ba"] and result.finish_reasons == [
        "eos",
        "eos",
    ]
    assert jax.tree.all(jax.tree.map(np.array_equal, result.stats, never.stats))


@pytest.mark.parametrize("every", [0, -1, 1.5, 2**31])
def test_bad_intervals_are_rejected_at_once(every):
    with pytest.raises(ValueError, match=f"every: got {every}, expected an integer of at least 1"):
        stream(**echo("bytes", inputs=["ab"]), every=every)


def test_only_text_is_streamed():
    with pytest.raises(ValueError, match="stream: got a model without a vocabulary, expected one"):
        stream(HashModel(16), [[3, 1]])
