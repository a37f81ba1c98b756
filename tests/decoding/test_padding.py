"""Padded ids, as transformers' tokenizers give them, decode as the text alone."""

import functools

import numpy as np
import pytest
from golden_models import GOLDEN
from gpt_inputs import IO, golden
from toy_models import HashModel, Words

import specdec_jax as sd
from specdec_jax.checkpoints.loader import load
from specdec_jax.decoding.inputs import as_ids, encode
from specdec_jax.tokenizers.vocabularies import ByteVocabulary, SentencePieceVocabulary

pytestmark = pytest.mark.usefixtures("quick")


@functools.cache
def t5() -> tuple[sd.LanguageModel, dict[str, np.ndarray]]:
    """A golden T5 and what transformers computed from it."""
    return load(GOLDEN / "hf_t5_1_1", "float32"), dict(np.load(GOLDEN / "hf_t5_1_1" / "io.npz"))


def padded(rows, lengths, side: str, width: int, padding: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and mask as `tokenizer(…, padding=True, padding_side=side)` does."""
    ids, mask = np.full((len(rows), width), padding), np.zeros((len(rows), width), np.int64)
    for row, (tokens, length) in enumerate(zip(rows, lengths)):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = tokens[:length], 1
    return ids, mask


FORMS = {
    "array": lambda ids, mask: (ids, {}),
    "array and mask": lambda ids, mask: (ids, {"attention_mask": mask}),
    "lists": lambda ids, mask: (ids.tolist(), {}),
    "lists and mask": lambda ids, mask: (ids.tolist(), {"attention_mask": mask.tolist()}),
    "booleans": lambda ids, mask: (ids, {"attention_mask": mask.astype(bool)}),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", FORMS)
def test_an_encoders_input_is_padded_on_either_side(form, side):
    model, io = t5()
    ids, mask = padded(io["inputs"], io["input_lengths"], side, 14)
    inputs, options = FORMS[form](ids, mask)
    result = sd.generate(model, inputs, max_new_tokens=16, **options)
    np.testing.assert_array_equal(result.tokens, io["greedy"])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padding", [0, 50])
def test_prompts_are_padded_where_the_mask_says_so(side, padding):
    """0 is an ordinary id in prompts, so padding is unknown without a mask."""
    ids, mask = padded(IO["inputs"], IO["input_lengths"], side, 14, padding)
    assert (IO["inputs"][:, 0] == 0).any() or (IO["inputs"][0] == 0).any()
    for inputs, marks in ((ids, mask), (ids.tolist(), mask.tolist())):
        result = sd.generate(golden(), inputs, attention_mask=marks, max_new_tokens=16)
        np.testing.assert_array_equal(result.tokens, np.where(IO["greedy"] < 0, 0, IO["greedy"]))


@pytest.mark.slow
def test_streams_traces_and_logits_take_a_mask():
    model, io = t5()
    ids, mask = padded(io["inputs"], io["input_lengths"], "left", 14)
    outputs = dict(
        sd.decode_stream(model, ids, attention_mask=mask, max_new_tokens=16, batch_size=2)
    )
    for row, expected in enumerate(io["greedy"]):
        (output,) = outputs[row]
        assert (
            output.tokens == expected[: len(output.tokens)].tolist()
            and not expected[len(output.tokens) :].any()
        )
    for inputs, options in ((ids, {}), (ids, {"attention_mask": mask})):
        logits = model.logits(inputs, io["decoder_tokens"], **options)
        np.testing.assert_allclose(logits, io["logits"], rtol=0, atol=1e-4)
    beams = sd.generate(model, ids, attention_mask=mask, num_beams=2, max_new_tokens=4)
    text = [row[:length].tolist() for row, length in zip(io["inputs"], io["input_lengths"])]
    np.testing.assert_array_equal(
        beams.tokens, sd.generate(model, text, num_beams=2, max_new_tokens=4).tokens
    )


TARGET = HashModel(16, vocabulary=Words())


def ids_of(inputs, target=TARGET, lengths=None, **options) -> list[list[int]]:
    tokens, counts = as_ids(target, inputs, lengths, True, **options)
    return [row[:count].tolist() for row, count in zip(tokens, counts)]


def test_what_is_padding():
    assert ids_of([[0, 0, 5, 0, 1], [6, 1, 0, 0], [0, 0], []]) == [[5, 0, 1], [6, 1], [], []]
    assert ids_of(np.array([[0, 0, 5, 0, 1], [6, 1, 0, 0, 0], [0] * 5])) == [[5, 0, 1], [6, 1], []]
    assert ids_of(np.array([[5, 1, 0], [6, 7, 1]]), lengths=[3, 2]) == [[5, 1], [6, 7]]
    assert ids_of([[9, 9, 5, 1], [6, 1]], attention_mask=[[0, 0, 1, 1], [1, 1]]) == [[5, 1], [6, 1]]
    assert ids_of([[9, 9]], attention_mask=[[0, 0]]) == [[]]
    pieces = SentencePieceVocabulary.train(["a b c d"] * 9, 8)
    other = HashModel(16, vocabulary=pieces)
    other.vocabulary.pad_id = 3
    assert ids_of([[3, 5, 0, 3]], other) == [[5, 0]]
    other.vocabulary.pad_id = None  # 0 may be the unknown piece, as in MADLAD's vocabulary
    assert ids_of([[0, 5, 2]], other) == [[0, 5, 2]]


def test_empty_rows_are_those_of_padding_alone():
    result = sd.generate(TARGET, [[0, 0], [3, 1]], max_new_tokens=2)
    assert result.finish_reasons[0] == "empty" and result.finish_reasons[1] != "empty"


def test_a_padded_prefix_is_the_prefix():
    run = functools.partial(sd.generate, TARGET, [[3, 1], [4, 1]], max_new_tokens=4)
    expected = run(decoder_prefix=[[7], [5, 6]]).tokens
    for prefix in ([[7, 0], [5, 6]], [[0, 7], [5, 6]], np.array([[0, 0, 7], [0, 5, 6]])):
        np.testing.assert_array_equal(run(decoder_prefix=prefix).tokens, expected)


@pytest.mark.parametrize(
    "inputs, options, message",
    [
        ([[3, 1]], dict(attention_mask=[[1]]), r"attention_mask: .*expected 0 or 1 for each id"),
        (
            [[3, 1]],
            dict(attention_mask=[[1, 1], [1, 1]]),
            r"attention_mask: .*expected 0 or 1 for each id",
        ),
        (
            np.ones((1, 2), int),
            dict(attention_mask=[[1, 2]]),
            r"attention_mask: got other values, expected 0 or 1",
        ),
        (
            np.ones((1, 2), int),
            dict(attention_mask=[["a", "b"]]),
            r"attention_mask: got other values, expected 0 or 1",
        ),
        (
            np.ones((2, 3), int),
            dict(attention_mask=[[1, 1, 0], [1, 0, 1]]),
            r"0 inside the text of input 1",
        ),
        (["w3"], dict(attention_mask=[[1]]), r"attention_mask: got one with strings"),
        (
            np.ones((1, 2), int),
            dict(attention_mask=[[1, 1]], input_lengths=[2]),
            r"beside input_lengths, expected one",
        ),
        (
            np.array([[3, 1], [0, 3]]),
            dict(input_lengths=[2, 2]),
            r"input 1: got padding before the text with input_le",
        ),
    ],
)
def test_wrong_masks(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        sd.generate(TARGET, inputs, **options)


# Texts.

LONE = "x \ud83d"
VOCABULARIES = {
    "bytes": ByteVocabulary,
    "pieces": lambda: SentencePieceVocabulary.train(["a b c d"] * 9, 8),
    "tokenizer.json": lambda: load(GOLDEN / "hf_gpt2").vocabulary,
}
CALLS = {
    "generate": sd.generate,
    "stream": lambda *arguments: list(sd.stream(*arguments)),
    "decode_stream": lambda *arguments: list(sd.decode_stream(*arguments)),
    "prepare": sd.prepare,
    "trace": lambda model, inputs: sd.trace(model, inputs[1]),
    "decoder_prefix": lambda model, inputs: sd.generate(model, ["a", "b"], decoder_prefix=inputs),
    "beams": lambda model, inputs: sd.generate(model, inputs, num_beams=2),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("form", VOCABULARIES)
def test_half_a_character_is_rejected_by_its_inputs_number(form, call):
    model = HashModel(400, vocabulary=VOCABULARIES[form]())
    name = (
        "input 0"
        if call == "trace"
        else "decoder_prefix 1"
        if call == "decoder_prefix"
        else "input 1"
    )
    with pytest.raises(
        ValueError, match=rf"^{name}: got 'x \\ud83d', which is not UTF-8 \(character 2 is half"
    ):
        CALLS[call](model, ["fine", LONE])


def test_half_a_character_in_a_sentence():
    with pytest.raises(ValueError, match=r"^sentence 2: got 'x \\ud83d', which is not UTF-8"):
        encode(TARGET, ["w3", LONE], 9)


@pytest.mark.parametrize("kind", [np.array, lambda texts: np.array(texts, object), np.str_])
def test_arrays_of_strings_are_strings(kind):
    texts = kind(["w3 w4", "w5"]) if kind is not np.str_ else [np.str_("w3 w4"), np.str_("w5")]
    expected = sd.generate(TARGET, ["w3 w4", "w5"], max_new_tokens=3)
    found = sd.generate(TARGET, texts, max_new_tokens=3)
    np.testing.assert_array_equal(found.tokens, expected.tokens)


def test_an_array_that_is_given_stays_as_it_was():
    """An empty prompt becomes the start token, in a copy."""
    inputs = np.full((2, 8), 5, np.int32)
    sd.generate(golden(), inputs, input_lengths=[8, 0], max_new_tokens=1)
    assert (inputs == 5).all()
