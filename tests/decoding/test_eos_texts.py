"""Texts of rows that end with one of several EOS ids are transformers' texts."""

import json

import pytest
from golden_models import GOLDEN
from toy_models import EchoModel

import specdec_jax as sd
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary, TokenizerJsonVocabulary

pytestmark = pytest.mark.usefixtures("quick")
FOLDER, WIDEST = GOLDEN / "hf_tokenizer", 24
CONTENT = json.loads((GOLDEN / "hf_eos.json").read_text(encoding="utf-8"))
EOS_IDS, OUTPUTS = tuple(CONTENT["eos_ids"]), CONTENT["outputs"]
FORMS = {
    "spiece.model": lambda: SentencePieceVocabulary.load(FOLDER / "spiece.model", 20),
    "tokenizer.json": lambda: TokenizerJsonVocabulary.load(
        FOLDER / "tokenizer.json", stop_ids=EOS_IDS
    ),
}


@pytest.fixture(params=FORMS)
def model(request):
    """Repeats its input: new tokens are the ids of an output."""
    return EchoModel(FORMS[request.param]())


def inputs() -> list[list[int]]:
    assert max(len(output["ids"]) for output in OUTPUTS) <= WIDEST
    return [output["ids"] for output in OUTPUTS]


def limits() -> list[int]:
    return [len(ids) for ids in inputs()]


def test_the_two_forms_have_the_same_ids():
    pieces, tokenizer = (make() for make in FORMS.values())
    assert pieces.fingerprint() == tokenizer.fingerprint()
    assert [pieces.is_special(i) for i in range(pieces.size)] == [
        tokenizer.is_special(i) for i in range(pieces.size)
    ]


def test_texts_are_those_of_transformers(model):
    result = sd.generate(model, inputs(), eos_ids=EOS_IDS, max_new_tokens=limits())
    assert result.texts == [output["text"] for output in OUTPUTS]
    assert {"eos", "length"} == set(result.finish_reasons)
    outputs = dict(
        sd.decode_stream(model, inputs(), eos_ids=EOS_IDS, max_new_tokens=limits(), batch_size=8)
    )
    assert [outputs[row][0].text for row in range(len(OUTPUTS))] == result.texts


@pytest.mark.parametrize("every", [1, 100])
def test_pieces_of_a_stream_make_the_same_texts(model, every):
    texts, tokens = [""] * len(OUTPUTS), [[] for _ in OUTPUTS]
    for piece in sd.stream(model, inputs(), eos_ids=EOS_IDS, max_new_tokens=limits(), every=every):
        texts[piece.row] += piece.text
        tokens[piece.row] += piece.tokens
    assert texts == [output["text"] for output in OUTPUTS]
    assert tokens == inputs()  # ids are all there


def test_ordinary_tokens_stay_inside_a_row_too(model):
    """As in a row that only </s> ends."""
    ids = [*inputs()[0], *inputs()[2]]
    (text,) = sd.generate(model, [ids], eos_ids=(1,), max_new_tokens=len(ids)).texts
    assert text == f"{OUTPUTS[0]['text']} {OUTPUTS[2]['text']}"
