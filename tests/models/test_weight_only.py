"""Weights in int8 as an accelerator multiplies them, tried on a CPU."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from int8_models import EMBEDDING, HEAD, INPUTS, TIED, assert_weight, save_tiny, stored_in
from make_checkpoints import TINY, TINY_1_0
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import Backend, GPUBackend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.checkpoints import loader, native_format
from specdec_jax.checkpoints import weights as checkpoints_weights
from specdec_jax.commands.options import DecodingOptions
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.models import weight_layouts
from specdec_jax.models.parameters import flatten
from tools.accelerator_figures import ReportSetup
from tools.accelerator_stages import stages

pytestmark = pytest.mark.usefixtures("quick", "as_on_an_accelerator")
SLOW = pytest.mark.slow
GPT = sd.GPTConfig(24, 16, 2, 2, 32, num_positions=32)
SHAPES = {"T5": TINY, "T5 1.0": TINY_1_0, "GPT": GPT}


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """XLA multiplies, with the operands that a GPU would get."""
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    monkeypatch.setattr(packed_weights, "has_accelerator", lambda: True)
    monkeypatch.setattr(Backend, "transposes_int8", GPUBackend.transposes_int8)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments)
    )


# Numbers.


@tiers.parametrize("dtype", ["float32", "bfloat16"], first=2)
@tiers.parametrize("rows", [(1,), (2,), (8,), (1, 1), (3, 2)], first=2)
def test_a_product_is_exact_but_for_the_sums_in_float32(dtype, rows):
    """The error is that of 300 additions and one product with the scale.

    Neither the inputs nor the integers are rounded.
    """
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((*rows, 300)), dtype)
    weight = Int8Weight.quantize(jnp.asarray(rng.standard_normal((300, 40)), jnp.float32), None)
    inputs, integers, scales = (
        np.asarray(a).astype(np.float64) for a in (x, weight.values, weight.scales)
    )
    exact, most = inputs @ integers * scales, np.abs(inputs) @ np.abs(integers) * scales
    transposed = weight.transpose_values()
    assert transposed.values.shape == (40, 300) and not transposed.unpack().transposed
    np.testing.assert_array_equal(transposed.matrix(), weight.matrix())
    for one in (transposed, weight):
        found = jax.jit(lambda x, weight: weight.product(x, jnp.float32))(x, one)
        assert found.shape == (*rows, 40) and found.dtype == jnp.float32
        assert np.all(np.abs(np.asarray(found) - exact) <= 302 * 2.0**-24 * most)
    assert weight.product(x, jnp.bfloat16).dtype == jnp.bfloat16
    rounded = Int8Weight(weight.values, weight.scales).product(x, jnp.float32)
    assert np.abs(rounded - exact).max() > 100 * np.abs(found - exact).max()


def logits(model, rng):
    tokens = rng.integers(2, 24, (3, 7))
    return model.logits(None if model.config.decoder_only else rng.integers(2, 24, (3, 5)), tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["T5 1.0", pytest.param("T5", marks=SLOW), pytest.param("GPT", marks=SLOW)]
)
def test_a_model_computes_what_its_widened_numbers_do(name):
    model = sd.LanguageModel.random(SHAPES[name], quantize="int8")
    assert model.quantized and model.input_bits is None and not model.network.backend.packs_weights
    assert " in int8 with inputs as they are" in model.contents
    assert (
        flatten(model.params).keys() == flatten(sd.LanguageModel.random(SHAPES[name]).params).keys()
    )
    weights = weight_layouts.step_weights(model.network.params)
    assert all(isinstance(weight, Int8Weight) and weight.input_bits is None for weight in weights)
    config, params = SHAPES[name].with_own_head(), model.params
    head = model.network.params["decoder"]["logits_dense"]["kernel"]  # of a tied model too
    params["decoder"]["logits_dense"] = {"kernel": head.matrix()}
    widened = sd.LanguageModel(config, params)
    found, expected = (logits(one, np.random.default_rng(1)) for one in (model, widened))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


# Tokens.


@pytest.mark.slow
@pytest.mark.parametrize("drafting", ["model", "tree", "exit"])
@pytest.mark.parametrize("tied", [False, True])
def test_speculative_decoding_gives_what_plain_decoding_gives(tied, drafting):
    plain = noisy_copy(tiny_t5(0, logits_via_embedding=tied), 2.0)
    target = sd.LanguageModel(plain.config, weight_layouts.round_params(plain.params, None, tied))
    how = dict(max_new_tokens=12, eos_ids=())
    expected = sd.generate(target, INPUTS, **how)
    exits = drafting == "exit"
    drafter = (
        sd.EarlyExitDrafter(target, 1)
        if exits
        else sd.ModelDrafter(noisy_copy(plain, 0.3), int8=True)
    )
    shape = dict(tree=sd.Tree.uniform((2, 1))) if drafting == "tree" else dict(gamma=3)
    found = sd.generate(target, INPUTS, drafter=drafter, **shape, **how)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    assert 0 < found.stats.accepted < found.stats.drafted
    assert exits or all(
        weight.input_bits is None for weight in weight_layouts.step_weights(drafter.network.params)
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_pair_decodes_what_it_does_widened(dtype, optimised):
    models = [sd.load("ende/target", dtype, quantize=how) for how in ("int8", None)]
    assert [model.quantized for model in models] == [True, False]
    assert (
        models[0].fingerprint == models[1].fingerprint and models[0].contents != models[1].contents
    )
    texts = [
        sd.generate(model, read_built_in_sentences()[:3], max_new_tokens=32).texts
        for model in models
    ]
    assert texts[0] == texts[1]
    drafter = sd.ModelDrafter(sd.load("ende/drafter", dtype, quantize="int8"))
    assert (
        sd.generate(
            models[0], read_built_in_sentences()[:3], max_new_tokens=32, drafter=drafter, gamma=3
        ).texts
        == texts[0]
    )


def test_a_gpu_reads_transposed_weights(monkeypatch):
    """Drafters that are made of the model, and a shortlist of its head, have them too."""
    monkeypatch.setattr(Backend, "transposes_int8", False)
    ids, rng = np.arange(3, 20), np.random.default_rng
    plain = sd.LanguageModel.random(SHAPES["T5"], quantize="int8")
    monkeypatch.setattr(Backend, "transposes_int8", GPUBackend.transposes_int8)
    turned = sd.LanguageModel.random(SHAPES["T5"], quantize="int8")
    wide = sd.LanguageModel.random(SHAPES["T5"])
    whole = plain.config.vocab_size
    for network, on_gpu, columns in (
        (plain.network, False, whole),
        (turned.network, True, whole),
        (turned.network.shortlisted(ids), True, len(ids)),
        (wide.network.in_int8(), True, whole),
        (wide.network.in_int8().shortlisted(ids), True, len(ids)),
    ):
        weights = weight_layouts.step_weights(network.params)
        assert {weight.transposed for weight in weights} == {on_gpu}
        head = network.params["decoder"]["logits_dense"]["kernel"]
        assert head.values.shape[not on_gpu] == weight_layouts.weight_shape(head)[1] == columns
    np.testing.assert_allclose(logits(plain, rng(1)), logits(turned, rng(1)), atol=1e-5)
    for (name, a), (other, b) in zip(flatten(plain.params).items(), flatten(turned.params).items()):
        assert name == other and np.array_equal(a, b)


# Files, and memory.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_8_bits_are_used_as_they_are_only_if_asked_for(dtype, tmp_path):
    folder, printed = save_tiny(tmp_path / "model"), []
    asked, default = (sd.load(folder, dtype, quantize=how) for how in ("int8", None))
    assert asked.quantized and not default.quantized
    leaves = native_format.open_folder(folder).parameters
    for name, found in stored_in(asked).items():
        if name.endswith("/kernel"):
            values, scales = leaves[name].parts
            assert_weight(found, values.load(np.int8), scales.load(np.float32)[0])
        else:
            assert found.dtype == dtype
    sd.save(asked, tmp_path / "again", dtype="int8")
    for name, found in stored_in(sd.load(tmp_path / "again", dtype, quantize="int8")).items():
        if name.endswith("/kernel"):
            values, scales = leaves[name].parts
            assert_weight(found, values.load(np.int8), scales.load(np.float32)[0])
    sd.load(folder, quantize="int8", say=printed.append)
    assert "with the 8-bit weights it is stored with (dtype" in printed[0]


@tiers.parametrize("form", TIED, first=1)
def test_the_head_of_an_embedding_is_rounded_by_the_embeddings_rows(form, tmp_path):
    TIED[form](tmp_path / "model")
    model = sd.load(tmp_path / "model", "bfloat16", quantize="int8")
    embedding = flatten(sd.load(tmp_path / "model", "float32").params)[EMBEDDING]
    weight = Int8Weight.quantize(embedding.T)
    head = model.network.params["decoder"]["logits_dense"]["kernel"]
    assert_weight(head.unpack(), weight.values, weight.scales)
    assert HEAD not in flatten(model.params)


@pytest.mark.slow
def test_memory_is_that_of_8_bits():
    large = sd.PRESETS["t5_1_0/large"].replace(
        num_encoder_layers=1, num_decoder_layers=1, vocab_size=2000
    )
    model = sd.LanguageModel.dummy(large.replace(dtype="bfloat16"), quantize="int8")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.network.params))
    required = checkpoints_weights.required_bytes(large, "bfloat16", None, "rounded")
    assert required == pytest.approx(weights + 2 * 4096 * 1024, rel=0.03)
    assert required < 0.7 * checkpoints_weights.required_bytes(large, "bfloat16")


def test_weights_of_no_meaning_are_rounded_one_by_one(monkeypatch):
    """So that a model which fits only in int8 can be filled."""
    made, alive, of = [], [], Int8Weight.quantize

    def noted(weight, bits):
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(weight))
        return of(weight, bits)

    monkeypatch.setattr(Int8Weight, "quantize", noted)
    model = sd.LanguageModel.dummy(TINY_1_0, quantize="int8")
    assert len(made) > 20 and max(alive) == 0
    assert isinstance(weight_layouts.step_weights(model.network.params)[0], Int8Weight)


# Figures, and what is rejected.


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, alphas", [("int8", ()), pytest.param("int8", (0.5,), marks=SLOW), ("self:int8", ())]
)
def test_the_report_of_accelerators_times_8_bits(kind, alphas):
    setup = ReportSetup(
        tiny=True, input_length=4, max_new_tokens=4, gamma=2, widths=(1, 3), alphas=alphas
    )
    stage = next(stage for stage in stages(setup, {}) if stage.kind == kind)
    pair = stage.load()
    assert pair.target.quantized == (kind == "int8") and pair.target.config.dtype == "bfloat16"
    rounded = (pair.target if kind == "int8" else pair.drafter).network
    assert all(weight.input_bits is None for weight in weight_layouts.step_weights(rounded.params))
    for figure in stage.figures:
        jax.block_until_ready(figure.variant(pair)())


@pytest.mark.slow
def test_inputs_in_8_bits_and_meshes_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "read_params", lambda *args: pytest.fail("read"))
    folder = save_tiny(tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            ValueError, match="quantize: got 'w8a8', expected 8 bits only for float32 on a CPU"
        ):
            sd.load(folder, dtype, quantize="w8a8")
        with pytest.raises(
            ValueError, match="got 'int8' with a mesh, expected 8 bits only .* without a mesh"
        ):
            sd.load(folder, dtype, quantize="int8", mesh=sd.make_mesh(1, 1))
    with pytest.raises(ValueError, match="params: got weights in int8, expected 8 bits only"):
        sd.LanguageModel(TINY, weight_layouts.round_params(sd.LanguageModel.random(TINY).params))
    monkeypatch.setattr("specdec_jax.commands.options.has_accelerator", lambda: True)
    options = dict(target="absent", dtype="bfloat16")
    DecodingOptions(**options, quantize="int8").check()
    for more in (dict(quantize="w8a8"), dict(quantize="int8", mesh="1x1")):
        with pytest.raises(
            ValueError, match="quantize: got '.*', expected one device: a CPU in float32"
        ):
            DecodingOptions(**options, **more).check()
