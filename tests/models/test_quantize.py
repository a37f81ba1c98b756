"""Models with weights in int8: used as stored, rounded while read, saved, rejected."""

import dataclasses
import functools

import jax
import make_checkpoints as make
import numpy as np
import pytest
import tiers
from int8_models import EMBEDDING, HEAD, INPUTS, TIED, assert_weight, save_tiny, stored_in
from make_checkpoints import TINY
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.checkpoints import int8, loader, native_format, tensorstore_arrays
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.models import weight_layouts
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.parameters import flatten

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]
RNG = np.random.default_rng(0)


def assert_params(model, expected):
    found = flatten(model.params)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@functools.cache
def bundled(quantize=None):
    return sd.load("ende/target", "float32", quantize=quantize)


# As they are stored.


@pytest.mark.slow
def test_the_bundled_target_computes_with_the_very_integers_that_are_stored():
    model, widened = bundled(), bundled("none")
    assert model.quantized and not widened.quantized
    leaves = native_format.open_folder(loader.resolve("ende/target")).parameters
    weights = {name: value for name, value in stored_in(model).items() if name.endswith("/kernel")}
    assert len(weights) == 2 * 7 + 4 * 11 + 1
    for name, weight in weights.items():
        values, scales = leaves[name].parts
        assert_weight(weight, values.load(np.int8), scales.load(np.float32)[0])
    assert_params(model, flatten(widened.params))
    assert model.fingerprint == widened.fingerprint and model.contents != widened.contents
    sizes = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(one.network.params)) for one in (model, widened)
    ]
    assert sizes[0] < 0.35 * sizes[1]


@pytest.mark.slow
def test_the_bundled_target_decodes_what_it_does_widened():
    model, widened, drafter = (
        bundled(),
        bundled("none"),
        sd.ModelDrafter(sd.load("ende/drafter", "float32")),
    )
    plain, expected, speculative = (
        sd.generate(target, read_built_in_sentences(), max_new_tokens=32, **how)
        for target, how in ((model, {}), (widened, {}), (model, dict(drafter=drafter, gamma=4)))
    )
    for found in (plain, speculative):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        # Inputs of every product are rounded to 16 bits.
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=2e-3)
    assert speculative.stats.accepted > 0


@pytest.mark.slow
def test_stored_8_bits_are_widened_where_they_cannot_be_had(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    assert sd.load(folder, "float32").quantized and not sd.load(folder, "bfloat16").quantized
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    model = sd.load(folder, "float32")
    assert not model.quantized and not model.network.backend.packs_weights


def write_stored(folder, arrays):
    (folder / "params").mkdir()
    paths = ((tuple(name.split("/")), array) for name, array in arrays.items())
    tensorstore_arrays.write_ocdbt(paths, folder / "params")


def test_a_folder_with_other_scales_is_widened_unless_it_is_to_be_rounded(tmp_path):
    """A scale per row of a weight, or some weights in floating point, can be read.

    This package writes neither.
    """
    params = make.random_params(TINY)
    make.write_own(tmp_path / "written")
    wo = "decoder/layers_0/mlp/wo/kernel"
    ones = {
        f"{wo}/values": np.ones(params[wo].shape, np.int8),
        f"{wo}/scales": np.full((len(params[wo]), 1), 0.5, "f"),
    }
    rest = {name: array for name, array in params.items() if name != wo}
    stored = {
        f"{name}{end}": array
        for name, x in rest.items()
        for end, array in _divided(name, x).items()
    }
    for name, arrays in (("rows", stored | ones), ("mixed", stored | {wo: params[wo]})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            (tmp_path / "written" / "config.json").read_text()
        )
        write_stored(tmp_path / name, arrays)
        model = sd.load(tmp_path / name, "float32")
        assert not model.quantized
        rounded = sd.load(tmp_path / name, "float32", quantize="int8")
        weight = Int8Weight.quantize(flatten(model.params)[wo])
        assert_weight(stored_in(rounded)[wo], weight.values, weight.scales)
        assert_weight(
            stored_in(rounded)[HEAD], stored[f"{HEAD}/values"], stored[f"{HEAD}/scales"][0]
        )


def _divided(name, array):
    return {key.removeprefix(name): part for key, part in int8.quantize(name, array).items()}


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [True, False])
def test_a_drafter_stored_in_8_bits_drafts_as_it_is_stored(encoder, tmp_path):
    target = tiny_t5(0)
    model = noisy_copy(target, 0.3)
    if not encoder:
        config = dataclasses.replace(
            model.config, num_encoder_layers=0, encoder_dim=model.config.emb_dim
        )
        params = {name: node for name, node in model.params.items() if name != "encoder"}
        model = sd.LanguageModel(config, params)
    sd.save(model, tmp_path / "drafter", dtype="int8")
    model = sd.load(tmp_path / "drafter", "float32")
    drafter, again = sd.ModelDrafter(model), sd.ModelDrafter(model, int8=True)
    assert (
        model.quantized
        and not drafter.reduced
        and again.network is model.network
        and list(again.steps()) == ["draft step"]
    )
    plain = sd.generate(target, INPUTS, max_new_tokens=12, eos_ids=())
    found = sd.generate(target, INPUTS, drafter=drafter, gamma=3, max_new_tokens=12, eos_ids=())
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.stats.accepted > 0


# Rounded while they are read.


@pytest.mark.parametrize("form", ["safetensors", "flax", "legacy", "orbax", "orbax scan", "own"])
def test_every_weight_is_rounded_by_its_columns(form, tmp_path):
    make.FORMATS[form](tmp_path / "source")
    model = sd.load(tmp_path / "source", "float32", quantize="int8")
    plain = sd.load(tmp_path / "source", "float32")
    assert model.quantized and not plain.quantized and model.network.backend.packs_weights
    rounded = 0
    for name, array in flatten(plain.params).items():
        found = stored_in(model)[name]
        if name.endswith("/kernel"):
            weight = Int8Weight.quantize(array)
            assert_weight(found, weight.values, weight.scales)
            np.testing.assert_array_equal(np.abs(found.values).max(axis=0), 127)
            rounded += 1
        else:
            np.testing.assert_array_equal(found, array)
    assert rounded == 2 * 7 + 3 * 11 + 1
    assert model.fingerprint != plain.fingerprint


@tiers.parametrize("stored", [False, True], first=1)
@tiers.parametrize("form", TIED, first=1)
def test_the_head_of_an_embedding_is_rounded_by_the_embeddings_rows(form, stored, tmp_path):
    TIED[form](tmp_path / "model")
    if stored:
        sd.convert(tmp_path / "model", tmp_path / "stored", "specdec", "int8")
    folder = tmp_path / ("stored" if stored else "model")
    plain, model = (
        sd.load(folder, "float32", quantize="none"),
        sd.load(folder, "float32", quantize="int8"),
    )
    head = model.network.params["decoder"]["logits_dense"]["kernel"]
    embedding = flatten(plain.params)[EMBEDDING]
    np.testing.assert_array_equal(flatten(model.params)[EMBEDDING], embedding)
    if stored:
        values, scales = native_format.open_folder(folder).parameters[EMBEDDING].parts
        assert_weight(head.unpack(), values.load(np.int8).T, scales.load(np.float32)[:, 0])
        assert (
            sd.load(folder, "float32").contents == model.contents
            and model.fingerprint == plain.fingerprint
        )
    else:
        weight = Int8Weight.quantize(embedding.T)
        assert_weight(head.unpack(), weight.values, weight.scales)
    assert HEAD not in flatten(model.params)
    # The same numbers widened, with that head as a weight of its own.
    config = dataclasses.replace(plain.config.with_own_head(), dtype="float32")
    params = model.params
    params["decoder"]["logits_dense"] = {"kernel": head.matrix()}
    other = sd.LanguageModel(config, params, eos_ids=())
    tokens = RNG.integers(2, 24, (3, 7))
    inputs = None if isinstance(config, GPTConfig) else RNG.integers(2, 24, (3, 5))
    np.testing.assert_allclose(
        model.logits(inputs, tokens), other.logits(inputs, tokens), atol=2e-2, rtol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("quantize", packed_weights.INPUT_BITS)
@pytest.mark.parametrize("tied", [False, True])
def test_speculative_decoding_gives_what_plain_decoding_gives(tied, quantize):
    target = sd.LanguageModel.random(
        tiny_t5(0, logits_via_embedding=tied).config, quantize=quantize
    )
    plain = tiny_t5(0, logits_via_embedding=tied)
    assert (
        target.quantized
        and target.input_bits == packed_weights.INPUT_BITS[quantize]
        and target.contents != plain.contents
    )
    for drafter in (sd.ModelDrafter(noisy_copy(plain, 0.3)), sd.EarlyExitDrafter(target, 1)):
        how = dict(max_new_tokens=12, eos_ids=())
        found, expected = (
            sd.generate(target, INPUTS, drafter=drafter, gamma=3, **how),
            sd.generate(target, INPUTS, **how),
        )
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_array_equal(found.log_probs, expected.log_probs)
    shortlist = sd.ModelDrafter(target, [1, *range(4, 20)])
    weight = shortlist.network.params["decoder"]["logits_dense"]["kernel"]
    whole = target.network.params["decoder"]["logits_dense"]["kernel"].unpack()
    ids = shortlist.shortlist.ids
    assert_weight(weight.unpack(), np.asarray(whole.values)[:, ids], np.asarray(whole.scales)[ids])
    assert weight.unpack().input_bits == whole.input_bits == target.input_bits


# Inputs in int8.


def test_inputs_in_8_bits_give_another_distribution_for_the_same_weights(tmp_path):
    folder = save_tiny(tmp_path / "model")
    models = [sd.load(folder, "float32", quantize=how) for how in ("none", "int8", "w8a8")]
    assert [model.input_bits for model in models] == [None, 16, 8]
    assert (
        len({model.contents for model in models}) == 3
        and len({model.fingerprint for model in models}) == 1
    )
    for weight in jax.tree.leaves(
        models[2].network.params, is_leaf=weight_layouts.is_weight_object
    ):
        assert not weight_layouts.is_weight_object(weight) or weight.values.shape[2:] == (
            16,
            4,
        )  # the head's too
    assert_params(models[2], flatten(models[0].params))
    tokens, inputs = RNG.integers(2, 24, (3, 7)), RNG.integers(2, 24, (3, 5))
    exact, fine, coarse = (np.asarray(model.logits(inputs, tokens)) for model in models)
    off = np.abs(coarse - exact).max() / np.abs(exact).max()
    assert 20 * np.abs(fine - exact).max() / np.abs(exact).max() < off < 0.1
    sd.save(models[2], tmp_path / "saved", dtype="int8")
    assert sd.load(tmp_path / "saved", "float32").contents == models[1].contents


@pytest.mark.slow
def test_the_bundled_pair_with_inputs_in_8_bits_decodes_alike_with_and_without_drafts():
    """With inputs in int8, too, speculative decoding gives the same bits.

    A call over several positions has blocks of other shapes; both models' inputs are rounded.
    """
    model, drafter = (
        bundled("w8a8"),
        sd.ModelDrafter(sd.load("ende/drafter", "float32", quantize="w8a8")),
    )
    plain, found = (
        sd.generate(model, read_built_in_sentences(), max_new_tokens=24, **how)
        for how in ({}, dict(drafter=drafter, gamma=4))
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(found.log_probs, plain.log_probs)
    assert found.stats.accepted > 0


# Files.


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, *TIED])
def test_what_is_stored_in_8_bits_is_written_as_it_is(form, tmp_path):
    TIED[form](tmp_path / "source") if form else make.write_own(tmp_path / "source")
    sd.convert(tmp_path / "source", tmp_path / "first", "specdec", "int8")
    model = sd.load(tmp_path / "first", "float32")
    assert model.quantized
    sd.convert(tmp_path / "first", tmp_path / "converted", "specdec", "int8")
    sd.save(model, tmp_path / "saved", dtype="int8")
    first = native_format.open_folder(tmp_path / "first").parameters
    for other in ("converted", "saved"):
        again = native_format.open_folder(tmp_path / other).parameters
        assert again.keys() == first.keys()
        for name, leaf in first.items():
            if leaf.parts is None:
                np.testing.assert_array_equal(again[name].load(np.float32), leaf.load(np.float32))
                continue
            np.testing.assert_array_equal(
                again[name].parts[0].load(np.int8), leaf.parts[0].load(np.int8)
            )
            scales = [one.parts[1].load(np.float32) for one in (again[name], leaf)]
            # An embedding is float32 in a loaded model.
            np.testing.assert_allclose(
                *scales, rtol=2e-7 if (other, name[-9:]) == ("saved", "embedding") else 0
            )


@pytest.mark.slow
def test_other_formats_get_the_widened_numbers(tmp_path):
    model = sd.load(save_tiny(tmp_path / "model"), "float32")
    for number, (form, dtype) in enumerate(
        [("huggingface", None), ("t5x", "float32"), ("specdec", None)]
    ):
        sd.save(model, tmp_path / f"{number}", dtype=dtype, format=form)
        other = sd.load(tmp_path / f"{number}", "float32")
        assert not other.quantized and other.fingerprint == model.fingerprint
        assert_params(other, flatten(model.params))
