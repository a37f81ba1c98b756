"""Folders with several weights or embeddings, wrapped names, and masks of any dtype."""

import dataclasses
import json
import shutil

import flax.serialization
import jax
import make_checkpoints as make
import numpy as np
import pytest
import safetensors.numpy
from golden_models import GOLDEN, engine_tokens, greedy_tokens
from make_checkpoints import HF_CONFIG, PARAMS, TENSORS, TINY

import specdec_jax as sd
from specdec_jax.checkpoints import converter, huggingface_gpt, loader, t5x
from specdec_jax.models import parameters

pytestmark = pytest.mark.usefixtures("quick")
OTHER = make.random_params(TINY, seed=1)
CHOICES = json.loads((GOLDEN / "hf_choices.json").read_text(encoding="utf-8"))


def assert_params(model, expected=PARAMS):
    got = parameters.flatten(model.params)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)


def load(folder, dtype="float32"):
    printed = []
    return loader.load(folder, dtype, say=printed.append), printed


def add(folder, name, params):
    """Adds weights to a folder, as a second saving into it would."""
    if name in ("model.safetensors", "model.safetensors.index.json"):
        make.write_hf(
            folder, make.to_tensors(params), shards=1 if name == "model.safetensors" else 3
        )
    elif name == "flax_model.msgpack":
        make.write_hf_flax(folder, params)
    elif name == "checkpoint_7":
        make.write_t5x_legacy(folder / name, params)
    elif name == "params":
        converter.save(make.model_of(params), folder.with_name("own"))
        for path in folder.with_name("own").iterdir():
            shutil.move(path, folder / path.name)
    else:
        write = make.write_hf_pytorch if name.endswith(".bin") else make.write_hf_pytorch_shards
        write(folder, make.to_tensors(params))


@pytest.mark.parametrize("names", [names for names in CHOICES if "+" in names])
def test_of_several_files_transformers_choice_is_read(names, tmp_path):
    names, chosen = names.split("+"), CHOICES[names]
    for name in names:
        add(tmp_path / "model", name, PARAMS if name == chosen else OTHER)
    model, printed = load(tmp_path / "model")
    assert_params(model)
    others = ", ".join(name for name in names if name != chosen)
    assert printed == [
        f"{tmp_path / 'model'}: several checkpoints are there: reading {chosen}, leaving {others}"
    ]


@pytest.mark.parametrize(
    "first, second",
    [
        ("model.safetensors", "flax_model.msgpack"),
        ("model.safetensors.index.json", "flax_model.msgpack"),
        ("pytorch_model.bin", "flax_model.msgpack"),
        ("model.safetensors", "checkpoint_7"),
        ("flax_model.msgpack", "checkpoint_7"),
        ("pytorch_model.bin", "checkpoint_7"),
        ("params", "model.safetensors"),
        ("params", "checkpoint_7"),
    ],
)
def test_formats_that_transformers_does_not_know(first, second, tmp_path):
    for name in (second, first):  # the later one writes config.json
        add(tmp_path / "model", name, PARAMS if name == first else OTHER)
    model, printed = load(tmp_path / "model")
    assert_params(model)
    shown = {"checkpoint_7": "checkpoint_7/checkpoint"}
    [line] = printed
    assert line.endswith(f"reading {shown.get(first, first)}, leaving {shown.get(second, second)}")


def test_stale_shards_of_another_model_do_not_matter(tmp_path):
    make.write_hf(tmp_path, TENSORS, shards=3)
    next(tmp_path.glob("model-00002*")).unlink()  # the index names it
    make.write_hf(tmp_path, TENSORS)
    model, printed = load(tmp_path)
    assert_params(model)
    assert len(printed) == 1


def test_one_checkpoint_prints_nothing_and_config_means_t5x(tmp_path):
    _, printed = load(make.write_hf(tmp_path / "one", TENSORS))
    assert printed == []
    add(tmp_path / "two", "model.safetensors", OTHER)
    add(tmp_path / "two", "checkpoint_7", PARAMS)
    assert_params(loader.load(tmp_path / "two", "float32", config=TINY))


def test_convert_prints_it_too(tmp_path):
    add(tmp_path / "model", "model.safetensors.index.json", OTHER)
    add(tmp_path / "model", "model.safetensors", PARAMS)
    printed = []
    converter.convert(tmp_path / "model", tmp_path / "out", say=printed.append)
    assert len(printed) == 1 and "leaving model.safetensors.index.json" in printed[0]
    assert_params(loader.load(tmp_path / "out", "float32"))


EMBEDDINGS = dict(np.load(GOLDEN / "hf_embeddings.npz"))
CASES = [name.removeprefix("logits/") for name in EMBEDDINGS if name.startswith("logits/")]


def golden_folder(folder, names):
    tensors = {
        name.removeprefix("tensor/"): x
        for name, x in EMBEDDINGS.items()
        if name.startswith("tensor/")
    }
    tensors |= {name: EMBEDDINGS[f"embedding/{name}"] for name in names.split("+")}
    shape = dict(num_heads=2, d_kv=8, num_layers=1, num_decoder_layers=1, d_ff=24, vocab_size=40)
    return make.write_hf(
        folder, tensors, **shape, tie_word_embeddings="lm_head.weight" not in names
    )


@pytest.mark.parametrize("names", CASES)
def test_embeddings_that_differ_are_all_used(names, tmp_path):
    model, _ = load(golden_folder(tmp_path, names))
    logits = model.logits(EMBEDDINGS["inputs"], EMBEDDINGS["decoder_tokens"], [6, 6])
    np.testing.assert_allclose(logits, EMBEDDINGS[f"logits/{names}"], rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A model whose encoder has an embedding of its own, and whose head is the decoder's."""
    folder = golden_folder(
        tmp_path_factory.mktemp("two"), "shared.weight+encoder.embed_tokens.weight"
    )
    return load(folder)[0]


def test_the_decode_loop_uses_both(two):
    assert two.config.separate_embeddings and two.config.logits_via_embedding
    inputs = EMBEDDINGS["inputs"]
    expected = greedy_tokens(two, inputs, [6, 6], 6, two.eos_ids)
    for drafter in ("plain", "speculative"):
        np.testing.assert_array_equal(
            engine_tokens(two, inputs, [6, 6], 6, drafter=drafter), expected
        )


@pytest.mark.parametrize("form", ["specdec", "huggingface"])
def test_both_are_written(two, form, tmp_path):
    converter.save(two, tmp_path / "out", format=form)
    again, _ = load(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, two.params))
    assert again.config.separate_embeddings and again.fingerprint == two.fingerprint


@pytest.mark.parametrize("form", ["t5x", "t5x_legacy"])
def test_t5x_has_no_place_for_both(two, form, tmp_path):
    with pytest.raises(
        ValueError, match=f"got '{form}' for a model whose encoder has an embedding of its own"
    ):
        converter.save(two, tmp_path / "out", format=form)
    assert "got separate_embeddings" in t5x.explain_unsupported(two.config)


def test_int8_and_a_network_of_its_own_shape(two, tmp_path):
    converter.save(two, tmp_path / "out", dtype="int8")
    again, _ = load(tmp_path / "out")
    assert again.quantized and again.config.separate_embeddings
    config = dataclasses.replace(TINY, separate_embeddings=True)
    plain = config.module()
    tree = jax.eval_shape(plain.init, jax.random.key(0), *plain.dummy_inputs())["params"]
    shapes = {name: leaf.shape for name, leaf in parameters.flatten(tree).items()}
    assert parameters.parameter_shapes(config) == shapes
    with pytest.raises(ValueError, match="separate_embeddings: got True without an encoder"):
        dataclasses.replace(config, encoder_dim=16, num_encoder_layers=0)


WRAPPED = {
    "module.{}": ["module."],
    "_orig_mod.{}": ["_orig_mod."],
    "_orig_mod.module.{}": ["_orig_mod.", "module."],
}


@pytest.mark.parametrize("form", ["safetensors", "shards", "flax"])
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_prefixes_of_wrappers_are_left_out(wrapped, form, tmp_path):
    renamed = {wrapped.format(name): x for name, x in TENSORS.items()}
    if form == "flax":
        make.write_hf_flax(tmp_path, PARAMS)
        tree = flax.serialization.msgpack_restore((tmp_path / "flax_model.msgpack").read_bytes())
        for part in reversed(wrapped.split(".")[:-1]):
            tree = {part: tree}
        (tmp_path / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(tree))
    else:
        make.write_hf(tmp_path, renamed, shards=3 if form == "shards" else 1)
    model, printed = load(tmp_path)
    assert_params(model)
    assert len(printed) == 1 and all(part in printed[0] for part in WRAPPED[wrapped])


def test_a_wrapped_part_of_a_model(tmp_path):
    inside = {
        name.replace("encoder.block", "encoder._orig_mod.block"): x for name, x in TENSORS.items()
    }
    model, printed = load(make.write_hf(tmp_path / "inside", inside))
    assert_params(model)
    assert len(printed) == 1
    twice = TENSORS | {"module.shared.weight": TENSORS["shared.weight"]}
    with pytest.raises(ValueError, match="got two tensors that are shared.weight without"):
        load(make.write_hf(tmp_path / "twice", twice))


@pytest.mark.parametrize("dtype", [np.uint8, np.bool_, np.float16, np.int64, np.float32])
@pytest.mark.parametrize("prefix", ["", "transformer.", "module.transformer."])
def test_causal_masks_of_a_gpt2_may_have_any_dtype(dtype, prefix, tmp_path):
    plain = GOLDEN / "hf_gpt2"
    tensors = safetensors.numpy.load_file(plain / "model.safetensors")
    tensors = {prefix + name.removeprefix("transformer."): x for name, x in tensors.items()}
    for layer in range(2):
        tensors[f"{prefix}h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 40, 40))).astype(dtype)
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.ones((), dtype)
    shutil.copy(plain / "config.json", tmp_path / "config.json")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    model, printed = load(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, model.params, load(plain)[0].params))
    assert bool(printed) == prefix.startswith("module.")


def test_another_dtype_where_a_parameter_is_expected_is_rejected(tmp_path):
    wrong = TENSORS | {"shared.weight": np.ones((40, 16), np.uint8)}
    with pytest.raises(
        ValueError,
        match="parameter token_embedder/embedding: got dtype U8, expected one of float32",
    ):
        load(make.write_hf(tmp_path / "tensors", wrong))
    tree = {"shared": {"embedding": np.ones((40, 16), np.int32)}}
    (tmp_path / "flax").mkdir()
    (tmp_path / "flax" / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "flax" / "flax_model.msgpack").write_bytes(
        flax.serialization.msgpack_serialize(tree)
    )
    with pytest.raises(ValueError, match="parameter .*: got"):
        load(tmp_path / "flax")


@pytest.mark.parametrize(
    "wrong", [np.ones((40, 16), np.int32), np.array(3.0, np.float32)], ids=["int32", "scalar"]
)
def test_embeddings_that_are_no_matrices_of_numbers_are_rejected_by_name(wrong, tmp_path):
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    with pytest.raises(
        ValueError, match="parameter token_embedder/embedding: got (dtype I32|shape)"
    ):
        load(make.write_hf(tmp_path, TENSORS | dict.fromkeys(names, wrong)))


def test_of_tied_tensors_a_file_may_hold_the_head_alone(tmp_path):
    """As safetensors may keep either name of one tensor; transformers 5.24 reads both models."""
    tied = (
        TENSORS | {"shared.weight": TENSORS["lm_head.weight"]}
        if "lm_head.weight" in TENSORS
        else dict(TENSORS)
    )
    tied.pop("lm_head.weight", None)
    renamed = {
        ("lm_head.weight" if name == "shared.weight" else name): x for name, x in tied.items()
    }
    expected, _ = load(make.write_hf(tmp_path / "usual", tied, tie_word_embeddings=True))
    actual, _ = load(make.write_hf(tmp_path / "t5", renamed, tie_word_embeddings=True))
    assert actual.config == expected.config and actual.config.logits_via_embedding
    assert_params(actual, parameters.flatten(expected.params))
    with pytest.raises(ValueError, match="parameter token_embedder/embedding: got none"):
        load(make.write_hf(tmp_path / "separate", renamed, tie_word_embeddings=False))
    config = sd.GPTConfig(
        vocab_size=24, emb_dim=8, num_heads=2, num_decoder_layers=1, mlp_dim=16, num_positions=8
    )
    gpt = sd.LanguageModel.random(config, eos_ids=())
    flat = {name: np.asarray(x) for name, x in parameters.flatten(gpt.params).items()}
    tensors = {huggingface_gpt.tensor_name(name): x for name, x in flat.items()}
    tensors["lm_head.weight"] = tensors.pop("wte.weight")
    (tmp_path / "gpt").mkdir()
    safetensors.numpy.save_file(tensors, tmp_path / "gpt" / "model.safetensors")
    shape = dict(
        model_type="gpt2",
        vocab_size=24,
        n_embd=8,
        n_head=2,
        n_layer=1,
        n_inner=16,
        n_positions=8,
        bos_token_id=1,
        eos_token_id=1,
    )
    (tmp_path / "gpt" / "config.json").write_text(json.dumps(shape))
    assert_params(load(tmp_path / "gpt")[0], flat)
    both = tensors | {"wte.weight": tensors["lm_head.weight"] + 1}
    safetensors.numpy.save_file(both, tmp_path / "gpt" / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight: got another tensor than wte.weight"):
        load(tmp_path / "gpt")
    tensors["transformer.h.0.ln_1.weight"] = tensors["h.0.ln_1.weight"] + 1
    safetensors.numpy.save_file(tensors, tmp_path / "gpt" / "model.safetensors")
    with pytest.raises(
        ValueError,
        match="gpt: got two tensors that are h.0.ln_1.weight, with and without transformer",
    ):
        load(tmp_path / "gpt")


def test_the_error_of_an_adapter_alone_shows_how_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(
        ValueError, match="got a PEFT adapter without its model, expected a whole model; merge them"
    ):
        loader.load(tmp_path)
