"""MADLAD-400: a T5 1.1 in its form, with its tokenizer, beside transformers.

`scripts/write_golden_madlad.py` describes the files.
"""

import functools

import numpy as np
import pytest
import safetensors.numpy
import sentencepiece
from golden_models import GOLDEN

import specdec_jax as sd

pytestmark = pytest.mark.usefixtures("quick")
FOLDER = GOLDEN / "hf_madlad"
PAD, EOS = 1, 2


@functools.cache
def load():
    return sd.load(FOLDER, "float32", say=lambda line: None)


@functools.cache
def golden():
    return dict(np.load(FOLDER / "io.npz"))


def decode(**options):
    """Returns new tokens, −1 after the EOS."""
    rows = [row[:n].tolist() for row, n in zip(golden()["inputs"], golden()["input_lengths"])]
    result = sd.generate(load(), rows, **options)
    made = np.full_like(golden()["greedy"], -1)
    for row, tokens, count in zip(made, result.tokens, result.lengths):
        row[:count] = tokens[:count]
    return made


def draft():
    """A model of the same kind, with the target's weights but for its second layers."""
    params = dict(load().params)
    for stack in ("encoder", "decoder"):
        params[stack] = {k: v for k, v in params[stack].items() if k != "layers_1"}
    config = load().config.replace(num_encoder_layers=1, num_decoder_layers=1)
    return sd.ModelDrafter(sd.LanguageModel(config, params, eos_ids=(EOS,)))


PLAIN = dict(
    generation_config=None, sampling=sd.SamplingConfig(no_repeat_ngram=2), max_new_tokens=14
)


def test_the_folder_has_madlads_form():
    names = safetensors.numpy.load_file(FOLDER / "model.safetensors")
    assert {"decoder.embed_tokens.weight", "lm_head.weight"} <= names.keys()
    assert not {"shared.weight", "encoder.embed_tokens.weight"} & names.keys()
    model = load()
    assert (model.start_token, model.eos_ids, model.vocabulary.pad_id) == (0, (EOS,), PAD)
    assert model.vocabulary.size == model.config.vocab_size and model.vocabulary.extra_ids == 0
    assert not (model.config.logits_via_embedding or model.config.scales_outputs)
    greedy = golden()["greedy"]
    assert np.any(greedy == -1) and np.any(golden()["inputs"][2, :7] == 0)


def test_logits_are_transformers():
    numbers = golden()
    given = numbers["inputs"], numbers["decoder_tokens"], numbers["input_lengths"]
    logits, expected = np.asarray(load().logits(*given)), numbers["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_greedy_tokens_are_transformers():
    np.testing.assert_array_equal(decode(**PLAIN), golden()["greedy"])
    speculative = decode(drafter=draft(), gamma=3, **PLAIN)
    np.testing.assert_array_equal(speculative, golden()["greedy"])


def test_padding_is_no_text():
    """config.json alone gives its id; 0, which pads other models' inputs, is a token."""
    rows = golden()["inputs"]
    padded = sd.generate(load(), rows, **PLAIN)
    for row, tokens, count in zip(golden()["greedy"], padded.tokens, padded.lengths):
        np.testing.assert_array_equal(row[row >= 0], tokens[:count])


@pytest.mark.slow
def test_beams_with_the_folders_defaults_are_transformers():
    np.testing.assert_array_equal(decode(), golden()["beams"])
    speculative = decode(drafter=draft(), gamma=2)
    np.testing.assert_array_equal(speculative, golden()["beams"])


def test_texts_are_what_sentencepiece_makes_of_them():
    processor = sentencepiece.SentencePieceProcessor(str(FOLDER / "spiece.model"))
    vocabulary = load().vocabulary
    for text in ("<2de> The river froze early.", "a <extra_id_0> b", "漢字 and  two spaces", "é"):
        assert vocabulary.encode_input(text) == [*processor.encode(text), EOS]
        ids = processor.encode(text)
        assert vocabulary.decode([*ids, EOS, PAD]).strip() == processor.decode(ids).strip()


@pytest.mark.slow
def test_what_is_saved_is_loaded_again(tmp_path):
    for form in ("huggingface", "specdec"):
        sd.save(load(), tmp_path / form, format=form)
        again = sd.load(tmp_path / form, "float32", say=lambda line: None)
        assert again.config == load().config and again.fingerprint == load().fingerprint
        ids = again.start_token, again.eos_ids, again.vocabulary.pad_id
        assert ids == (0, (EOS,), PAD)
        assert again.vocabulary.fingerprint() == load().vocabulary.fingerprint()
