"""What works with BART-like models of every kind.

Each way of decoding gives plain decoding's tokens, on the small models that transformers made.
"""

import functools

import golden_mesh_run
import numpy as np
import pytest
from golden_bart import NAMES, decode, draft, golden, load, plain_options
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.decoding.continuous_batching import decode_stream
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.models.t5 import T5Config, check_t5

pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]


@functools.cache
def decoder_alone(name):
    """A T5 that reads the target's encoder output, with random weights."""
    target = load(name).config
    shape = dict(num_heads=2, head_dim=8, num_encoder_layers=0, num_decoder_layers=1, mlp_dim=24)
    config = T5Config(target.vocab_size, 16, **shape, encoder_dim=target.emb_dim)
    ids = dict(start_token=load(name).start_token, eos_ids=load(name).eos_ids)
    return sd.ModelDrafter(sd.LanguageModel.random(config, 1, **ids))


def count_ngrams(name):
    rows = [[token for token in row if token >= 0] for row in golden(name)["greedy"].tolist()]
    width, start = load(name).config.vocab_size, load(name).start_token
    return sd.NGramDrafter.count(rows, width, 3, start_token=start)


DRAFTERS = {
    "decoder alone": decoder_alone,
    "self in int8": lambda name: sd.SelfDrafter(load(name)),
    "model in int8": lambda name: sd.ModelDrafter(draft(name).model, int8=True),
    "n-grams": count_ngrams,
    "copy": lambda name: sd.PromptLookupDrafter(min_match=0),
    "assisted": lambda name: AssistedNGramDrafter(),
    "parallel": lambda name: sd.ParallelDrafter(draft(name).model),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_keeps_the_tokens(kind, name):
    if kind in ("copy", "assisted") and name == "marian_separate":
        pytest.skip("inputs are not copied")
    plain = plain_options(name)
    expected = decode(name, **plain)
    drafter = DRAFTERS[kind](name)
    np.testing.assert_array_equal(decode(name, drafter=drafter, gamma=3, **plain), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_tree_and_beams_of_a_decoder_alone_keep_the_tokens(name):
    plain, drafter = plain_options(name), decoder_alone(name)
    expected = decode(name, **plain)
    tree = sd.Tree.uniform((3, 2))
    np.testing.assert_array_equal(decode(name, drafter=drafter, tree=tree, **plain), expected)
    beams = decode(name, num_beams=4, **plain)
    drafted = decode(name, num_beams=4, drafter=drafter, gamma=2, **plain)
    np.testing.assert_array_equal(drafted, beams)


@pytest.mark.parametrize("quantize", ["int8", "w8a8"])
@pytest.mark.parametrize("name", NAMES)
def test_a_target_in_int8_decodes_like_itself(name, quantize):
    path = GOLDEN / "hf_bart" / name
    target = sd.load(path, "float32", quantize=quantize, say=lambda line: None)
    numbers, options = golden(name), plain_options(name)
    rows = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    plain = sd.generate(target, rows, **options)
    drafted = sd.generate(target, rows, drafter=draft(name), gamma=3, **options)
    assert target.quantized
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_continuous_batching_keeps_the_tokens(name):
    numbers, target, options = golden(name), load(name), plain_options(name)
    rows = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    expected = [[token for token in row if token >= 0] for row in numbers["greedy"].tolist()]
    given = dict(drafter=draft(name), gamma=3, **options)
    streamed = decode_stream(target, rows * 2, batch_size=2, **given)
    found = {number: outputs[0].tokens for number, outputs in streamed}
    assert [found[number] for number in range(8)] == expected * 2


def test_meshes_give_the_same_tokens():
    """Learned and sinusoidal positions, biases of the logits, and two embeddings."""
    names = "bart", "marian_separate"
    for name, found in golden_mesh_run.run(*(GOLDEN / "hf_bart" / name for name in names)).items():
        expected = golden_mesh_run.expect(golden(name))
        assert found == dict.fromkeys(golden_mesh_run.MESHES, expected), name


def test_t5x_is_for_t5s():
    with pytest.raises(ValueError, match="target: got a BartConfig, expected a T5"):
        check_t5("target", load("bart").config)
