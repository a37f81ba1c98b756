"""Gemmas and T5Gemmas: the numbers and tokens of transformers, planted mistakes, and drafting.

`scripts/write_golden_gemma.py` describes the files.
"""

import functools
import json
import shutil

import golden_mesh_run
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from golden_models import GOLDEN
from tiers import parametrize

import specdec_jax as sd
from specdec_jax.backends import xla
from specdec_jax.backends.backend import choose_backend
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.decoding import inputs
from specdec_jax.models import layers, parameters, weight_layouts
from specdec_jax.models.network import Network
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.vocabularies import TokenizerJsonVocabulary

NAMES = ("t5gemma_capped", "t5gemma2", "gemma2_plain", "gemma2_capped", "t5gemma_plain")
NAMES += ("gemma3_text", "gemma3_untied", "t5gemma2_untied")
pytestmark = pytest.mark.usefixtures("quick")


@functools.cache
def load(name, quantize=None):
    folder = GOLDEN / "hf_gemma" / name
    return sd.load(folder, "float32", quantize=quantize, say=lambda line: None)


@functools.cache
def golden(name):
    return dict(np.load(GOLDEN / "hf_gemma" / name / "io.npz"))


def rebuild(name, params=None, **fields):
    """Returns the model with other fields, or parameters."""
    target = load(name)
    config = target.config.replace(**fields)
    shapes, flat = parameters.parameter_shapes(config), parameters.flatten(target.params)
    tree = parameters.unflatten({key: flat[key] for key in shapes} | (params or {}))
    ids = dict(start_token=target.start_token, eos_ids=target.eos_ids)
    return sd.LanguageModel(config, tree, **ids)


@functools.cache
def draft(name):
    """A smaller model of the same kind, which agrees with the target now and then."""
    fewer = {} if load(name).config.decoder_only else dict(num_encoder_layers=1)
    return sd.ModelDrafter(rebuild(name, num_decoder_layers=1, **fewer))


def prompts(name):
    numbers = golden(name)
    return [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]


def pad_rows(name, rows):
    made = np.full_like(golden(name)["greedy"], -1)
    for out, tokens in zip(made, rows):
        out[: len(tokens)] = tokens
    return made


def decode(name, target=None, **options):
    """Returns new tokens, −1 after the EOS."""
    result = sd.generate(target or load(name), prompts(name), **options)
    rows = [tokens[:count] for tokens, count in zip(result.tokens, result.lengths)]
    return pad_rows(name, rows)


PLAIN = dict(
    generation_config=None, sampling=sd.SamplingConfig(no_repeat_ngram=2), max_new_tokens=14
)


def logits(name, target=None):
    numbers, target = golden(name), target or load(name)
    if target.config.decoder_only:
        return np.asarray(target.logits(None, numbers["decoder_tokens"]))
    given = numbers["inputs"], numbers["decoder_tokens"], numbers["input_lengths"]
    return np.asarray(target.logits(*given))


def distance(name, target=None):
    """Returns the greatest difference from transformers' logits, relative to the largest."""
    expected = golden(name)["logits"]
    return np.abs(logits(name, target) - expected).max() / np.abs(expected).max()


# Against Hugging Face.


@parametrize("name", NAMES, first=3)
def test_logits_are_transformers(name):
    assert distance(name) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma2", "gemma2_capped", "t5gemma_plain"])
def test_a_row_alone_has_the_same_tokens(name):
    """Its caches have no axis of rows."""
    for row, expected in zip(prompts(name)[1:3], golden(name)["greedy"][1:3]):
        for options in ({}, dict(drafter=draft(name), gamma=3)):
            found = sd.generate(load(name), [row], **options, **PLAIN)
            np.testing.assert_array_equal(
                found.tokens[0, : found.lengths[0]], expected[expected >= 0]
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_near_float32(name):
    folder = GOLDEN / "hf_gemma" / name
    target = sd.load(folder, "bfloat16", say=lambda line: None)
    expected = golden(name)["logits"]
    error = np.abs(np.float32(logits(name, target)) - expected)
    assert 1e-4 < error.mean() < 0.03 * np.abs(expected).max()


@parametrize("name", NAMES, first=1)
def test_greedy_tokens_are_transformers(name):
    expected = golden(name)["greedy"]
    np.testing.assert_array_equal(decode(name, **PLAIN), expected)
    speculative = decode(name, drafter=draft(name), gamma=4, **PLAIN)
    np.testing.assert_array_equal(speculative, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_beams_with_the_folders_defaults_are_transformers(name):
    np.testing.assert_array_equal(decode(name), golden(name)["beams"])


def test_the_golden_rows_are_worth_comparing():
    """A padding id comes out, and rows are longer than the windows and end in several ways."""
    greedy = np.concatenate([golden(name)["greedy"] for name in NAMES])
    assert np.any(greedy == 0) and np.any(greedy == -1)
    assert np.any(golden("t5gemma2")["decoder_tokens"] == load("t5gemma2").config.apart_id)
    assert len(np.unique(greedy)) > 20
    assert any(model.start_token in model.eos_ids for model in map(load, NAMES))


# Planted mistakes: what each part of the block changes is far above the tolerance.


def permute_heads(name):
    """The heads of queries in another order: those that share keys lie apart."""
    config, params = load(name).config, parameters.flatten(load(name).params)
    groups = config.num_heads // config.num_kv_heads
    changed = {}
    for key in params:
        if key.endswith("grouped_attention/query/kernel") and key.startswith("decoder"):
            parts = params[key].reshape(-1, config.num_kv_heads, groups, config.head_dim)
            changed[key] = parts.swapaxes(1, 2).reshape(params[key].shape)
    return rebuild(name, changed)


MISTAKES = {
    "no cap of scores": lambda name: rebuild(name, attention_cap=None),
    "another cap of scores": lambda name: rebuild(name, attention_cap=1.9),
    "no cap of logits": lambda name: rebuild(name, logits_cap=None),
    "a wider window": lambda name: rebuild(name, windows=(4, 0)),
    "a narrower window": lambda name: rebuild(name, windows=(2, 0)),
    "no window": lambda name: rebuild(name, windows=(0,)),
    "windows in another order": lambda name: rebuild(name, windows=(0, 3)),
    "another base": lambda name: rebuild(name, rotary_base=9_000.0),
    "another scale": lambda name: rebuild(name, query_scalar=8.0),
    "another activation": lambda name: rebuild(name, mlp_activation="gelu_exact"),
}
ENCODERS = {
    "a wider window": lambda name: rebuild(name, encoder_windows=(5, 0)),
    "a narrower window": lambda name: rebuild(name, encoder_windows=(3, 0)),
}
SECOND = {
    "a wider window": lambda name: rebuild(name, encoder_windows=(6, 0)),
    "a narrower window": lambda name: rebuild(name, encoder_windows=(4, 0)),
    "another base of windows": lambda name: rebuild(name, local_rotary_base=110.0),
    "one base": lambda name: rebuild(name, local_rotary_base=None),
    "no factor": lambda name: rebuild(name, rotary_factor=1.0),
    "no norm of queries and keys": lambda name: rebuild(name, qk_norm=False),
    "a scaled row": lambda name: rebuild(name, apart_id=None),
}
PLANTED = [("gemma2_capped", MISTAKES, mistake) for mistake in MISTAKES]
PLANTED += [("t5gemma_capped", ENCODERS, mistake) for mistake in ENCODERS]
PLANTED += [("t5gemma2", SECOND, mistake) for mistake in SECOND]


@parametrize("name, table, mistake", PLANTED, first=1)
def test_a_planted_mistake_is_found(name, table, mistake):
    assert distance(name, table[mistake](name)) > 1e-4


@pytest.mark.slow
def test_heads_in_another_order_are_found():
    assert distance("gemma2_plain", permute_heads("gemma2_plain")) > 1e-3


def test_a_norm_without_its_1_is_found(monkeypatch):
    monkeypatch.setitem(layers.NORMS, "offset_rms", layers.RMSNorm)
    assert distance("gemma2_capped", rebuild("gemma2_capped", dropout_rate=0.5)) > 1e-2


def test_a_key_is_masked_after_the_cap():
    """Capped after it, the score of a masked key would be −c, and the key be seen."""
    heads = xla.AttentionShape(4, 8, jnp.float32, num_kv_heads=2, cap=2.0)
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, 2, 6, 8)).astype(np.float32)
    mask = np.tril(np.ones((3, 3), bool))[None, None]
    given = jnp.asarray(query), jnp.asarray(mask), None, heads
    outputs = []
    for hidden in (0.0, 1e9, np.nan):
        keys = jnp.asarray(key[:, :, :3]).at[:, :, 2].set(hidden)
        cache = KVCache(keys, jnp.asarray(value[:, :, :3]))
        outputs.append(np.asarray(xla.attend(given[0], cache, *given[1:])[:, :2]))
    assert np.array_equal(outputs[0], outputs[1]) and np.array_equal(outputs[0], outputs[2])


# On other devices' paths.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma_plain", "gemma2_plain", "t5gemma2"])
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_accelerators_layouts_of_caches_give_the_same_tokens(name, platform):
    target, backend = rebuild(name), choose_backend(platform)
    packed = weight_layouts.pack(target.params, False, backend.joins_weights)
    target.network = Network(packed, target.config.module(backend))
    other = dict(drafter=draft(name), gamma=3)
    for options in ({}, other, other | dict(tree=sd.Tree.uniform((3, 2)))):
        found = decode(name, target, **options, **PLAIN)
        np.testing.assert_array_equal(found, golden(name)["greedy"])


@pytest.mark.slow
def test_meshes_that_divide_the_heads_of_keys_give_the_same_tokens():
    names = "gemma2_plain", "t5gemma_plain", "t5gemma2"
    for name, found in golden_mesh_run.run(*(GOLDEN / "hf_gemma" / name for name in names)).items():
        expected = golden_mesh_run.expect(golden(name))
        for mesh, tokens in found.items():
            if name == "t5gemma2" and mesh != "4x1":
                assert "2 devices on the model axis for num_kv_heads = 1" in tokens
            else:
                assert tokens == expected, (name, mesh)


# Drafts, streams and jobs.


DRAFTERS = {
    "tree": lambda name: dict(drafter=draft(name), tree=sd.Tree.uniform((3, 2))),
    "dynamic tree": lambda name: dict(
        drafter=draft(name), tree=sd.DynamicTree(depth=3, width=2, nodes=7)
    ),
    "beams": lambda name: dict(drafter=draft(name), gamma=2, num_beams=4),
    "early exit": lambda name: dict(drafter=sd.EarlyExitDrafter(load(name), 1), gamma=2),
    "any layers": lambda name: dict(drafter=sd.EarlyExitDrafter(load(name), [1]), gamma=2),
    "shortlist": lambda name: dict(drafter=shortlisted(name), gamma=2),
    "prompt lookup": lambda name: dict(drafter=sd.PromptLookupDrafter(), gamma=5),
    "the target's encoder": lambda name: dict(drafter=without_encoder(name), gamma=3),
    "a drafter in int8": lambda name: dict(
        drafter=sd.ModelDrafter(draft(name).model, int8=True), gamma=3
    ),
}


def without_encoder(name):
    """A T5's decoder that attends to the output of the target's encoder; else a table."""
    target = load(name)
    if target.config.decoder_only:
        row = golden(name)["greedy"][0]
        return sd.NGramDrafter.count([row[row >= 0].tolist()], 48, 2, start_token=2)
    shape = dict(num_heads=2, head_dim=8, num_encoder_layers=0, num_decoder_layers=1, mlp_dim=16)
    shape |= dict(vocab_size=48, emb_dim=16, encoder_dim=target.config.encoded_dim)
    ids = dict(start_token=target.start_token, eos_ids=target.eos_ids)
    return sd.ModelDrafter(sd.LanguageModel.random(sd.T5Config(**shape), **ids))


def shortlisted(name):
    ids = sorted({*load(name).eos_ids, *range(0, 48, 2)})
    return sd.ModelDrafter(draft(name).model, shortlist=ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma_capped", "gemma2_capped", "t5gemma2"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_token(kind, name):
    plain = PLAIN | (dict(num_beams=4) if kind == "beams" else {})
    expected = decode(name, **plain)
    np.testing.assert_array_equal(decode(name, **plain | DRAFTERS[kind](name)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2_capped", "t5gemma_capped"])
def test_int8_drafts_as_it_decodes(name):
    target = load(name, "int8")
    assert target.quantized
    expected = decode(name, target, **PLAIN)
    found = decode(name, target, drafter=sd.EarlyExitDrafter(target, 1), gamma=3, **PLAIN)
    np.testing.assert_array_equal(found, expected)
    assert 0 < np.abs(logits(name, target) - golden(name)["logits"]).max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma_capped", "gemma2_capped", "t5gemma2"])
def test_a_job_of_many_inputs_is_what_each_is_alone(name):
    options = PLAIN | dict(drafter=draft(name), gamma=3, batch_size=2)
    outputs = dict(sd.decode_stream(load(name), prompts(name), **options))
    rows = [outputs[i][0].tokens for i in range(4)]
    np.testing.assert_array_equal(pad_rows(name, rows), golden(name)["greedy"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5gemma_plain", "gemma2_plain"])
def test_a_stream_is_the_text(name):
    target = rebuild(name)
    words = {"<eos>": 2} | {f"w{i}": i for i in range(48) if i != 2}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w3"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    target.vocabulary = TokenizerJsonVocabulary(tokenizer.to_str(), (2,))
    options = PLAIN | dict(drafter=draft(name), gamma=3)
    expected = sd.generate(target, prompts(name), **options).texts
    texts = [""] * 4
    for piece in sd.stream(target, prompts(name), **options):
        texts[piece.row] += piece.text
    assert texts == expected and all(texts)


@pytest.mark.slow
def test_a_prefix_is_continued():
    name = "t5gemma_plain"
    prefix = golden(name)["greedy"][:, :2].tolist()
    options = PLAIN | dict(decoder_prefix=prefix, max_new_tokens=12)
    expected = decode(name, **options)
    found = decode(name, drafter=draft(name), gamma=3, **options)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[:, :12], golden(name)["greedy"][:, 2:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_saved_is_loaded_again(dtype, tmp_path):
    target = load("t5gemma_capped")
    sd.save(target, tmp_path / "saved", dtype=dtype)
    again = sd.load(tmp_path / "saved", "float32", say=lambda line: None)
    assert again.config == target.config and again.quantized == (dtype == "int8")
    if dtype == "float32":
        assert again.fingerprint == target.fingerprint
    with pytest.raises(ValueError, match="format: got 't5x' for a T5GemmaConfig"):
        sd.save(target, tmp_path / "t5x", format="t5x")


def export(name, folder):
    """Writes Hugging Face's folder of a model, and returns its path."""
    lines = []
    sd.save(load(name), folder / name, format="huggingface", say=lines.append)
    return folder / name


@parametrize("name", NAMES, first=2)
def test_what_is_exported_is_loaded_again(name, tmp_path):
    target = load(name)
    again = sd.load(export(name, tmp_path), "float32", say=lambda line: None)
    assert again.config.explicit() == target.config.explicit()
    assert again.fingerprint == target.fingerprint
    assert (again.start_token, again.eos_ids) == (target.start_token, target.eos_ids)
    assert again.generation_config == target.generation_config


def test_an_export_keeps_what_golden_models_lack(tmp_path):
    """A T5Gemma 2 without a row apart, and the id of images of a Gemma 3."""
    for name, fields in ("t5gemma2", dict(apart_id=None)), ("gemma3_text", dict(image_id=46)):
        model = rebuild(name, **fields | dict(logits_cap=2))
        sd.save(model, tmp_path / name, format="huggingface", say=lambda line: None)
        again = sd.load(tmp_path / name, "float32", say=lambda line: None)
        assert again.config.explicit() == model.config.explicit()
        stack = json.loads((tmp_path / name / "config.json").read_text())
        cap = stack.get("decoder", stack)["final_logit_softcapping"]
        assert isinstance(cap, float)  # or transformers rejects the file


CANNOT = {
    "windows": ("gemma2_capped", dict(windows=(2, 3)), "expected one of .* windows of one size"),
    "a scale": ("t5gemma2", dict(query_scalar=8.5), "query_scalar 8.5 .* expected a whole number"),
    "a width": (
        "t5gemma2",
        dict(encoder_num_heads=3, encoder_num_kv_heads=3),
        "3 heads of a width of 16, expected .* a width that the heads divide",
    ),
    "a cap beside norms": (
        "gemma3_text",
        dict(attention_cap=2.0),
        "attention_cap=2.0, which huggingface would give back as None",
    ),
    "angles": (
        "gemma2_capped",
        dict(local_rotary_base=100.0),
        "local_rotary_base=100.0, which huggingface would give back as None",
    ),
}


@parametrize("case", CANNOT, first=1)
def test_what_cannot_be_exported_is_rejected(case, tmp_path):
    name, fields, expected = CANNOT[case]
    with pytest.raises(ValueError, match=expected):
        sd.save(rebuild(name, **fields), tmp_path / "model", format="huggingface")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_what_is_exported(name, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = "CausalLM" if load(name).config.decoder_only else "Seq2SeqLM"
    how = dict(attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
    read = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
    model, info = read(export(name, tmp_path), **how)
    if name.startswith("t5gemma2"):  # transformers has no such model without a part for images
        images = "encoder.vision_tower.", "encoder.multi_modal_projector."
        missing = info.pop("missing_keys")
        assert missing and all(key.removeprefix("model.").startswith(images) for key in missing)
    assert not any(info.values())
    numbers = {key: torch.tensor(value) for key, value in golden(name).items()}
    fed = numbers["decoder_tokens"].long()
    given = dict(input_ids=fed)
    if kind == "Seq2SeqLM":
        if name.startswith("t5gemma_"):  # as in scripts/write_golden_gemma.py
            model.model.encoder.config.sliding_window -= 1
        inputs = numbers["inputs"].long()
        mask = torch.arange(inputs.shape[1]) < numbers["input_lengths"][:, None]
        given = dict(input_ids=inputs, attention_mask=mask.long(), decoder_input_ids=fed)
        given["decoder_attention_mask"] = torch.ones_like(fed)
    with torch.no_grad():
        found = model.eval()(**given).logits
    expected = golden(name)["logits"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


# Files.


def edit(folder, part, **changes):
    options = json.loads((folder / "config.json").read_text())
    (options[part] if part else options).update(changes)
    (folder / "config.json").write_text(json.dumps(options))


REJECTED = {
    "heads": ("gemma2_plain", "", dict(num_key_value_heads=3), "num_key_value_heads: got 3, expec"),
    "odd features": ("gemma2_plain", "", dict(head_dim=7), "head_dim: got 7, expected an even"),
    "activation": (
        "gemma2_plain",
        "",
        dict(hidden_activation="x"),
        "got 'x', expected one of gelu",
    ),
    "epsilon": ("gemma2_plain", "", dict(rms_norm_eps=1e-5), "rms_norm_eps: got 1e-05, expected"),
    "biases": ("gemma2_plain", "", dict(attention_bias=True), "attention_bias: got True, expected"),
    "both ways": (
        "gemma2_plain",
        "",
        dict(use_bidirectional_attention=True),
        "use_bidirectional_attention: got true",
    ),
    "rotary": (
        "gemma2_plain",
        "",
        dict(rope_parameters=dict(rope_type="yarn")),
        "rope_parameters: got 'yarn', expected rope_type 'default'",
    ),
    "kinds": ("gemma2_plain", "", dict(layer_types=["full_attention"]), "layer_types: got"),
    "window": ("gemma2_plain", "", dict(sliding_window=None), "sliding_window: got None, expected"),
    "cap": (
        "gemma2_plain",
        "",
        dict(attn_logit_softcapping=-1),
        r"attention_cap: got -1, expected a number in \(0",
    ),
    "more layers": (
        "gemma2_capped",
        "",
        dict(num_hidden_layers=4, layer_types=None),
        "decoder/layers_3/.*: got none",
    ),
    "a head beside": (
        "gemma2_plain",
        "",
        dict(tie_word_embeddings=True),
        "lm_head.weight: got another, expected the embedding",
    ),
    "other stacks": (
        "t5gemma_capped",
        "encoder",
        dict(head_dim=4),
        "encoder: head_dim: got 4, exp",
    ),
    "no stack": ("t5gemma_capped", "", dict(encoder=[]), r"encoder: got \[\], expected an object"),
    "no decoder": ("t5gemma_capped", "", dict(decoder=7), "decoder: got 7, expected an object"),
    "architecture": (
        "t5gemma_capped",
        "",
        dict(architectures=["T5GemmaEncoderModel"]),
        "got .*T5GemmaEncoderModel",
    ),
}


@parametrize("case", REJECTED, first=4)
def test_what_is_not_supported_is_rejected_in_one_line(case, tmp_path):
    name, part, changes, expected = REJECTED[case]
    shutil.copytree(GOLDEN / "hf_gemma" / name, tmp_path / "model")
    edit(tmp_path / "model", part, **changes)
    with pytest.raises(ValueError, match=expected) as caught:
        sd.load(tmp_path / "model", "float32", say=lambda line: None)
    assert len(str(caught.value).splitlines()) == 1


IMAGES = {
    "old": ("language_model.", "vision_tower."),
    "new": ("model.language_model.", "model.vision_tower."),
}


@pytest.mark.parametrize("form", IMAGES)
def test_the_texts_part_of_a_gemma_3_with_images_is_read(form, tmp_path):
    shutil.copytree(GOLDEN / "hf_gemma" / "gemma3_text", tmp_path / "model")
    path, weights = (tmp_path / "model" / name for name in ("config.json", "model.safetensors"))
    text = json.loads(path.read_text())
    rope = text.pop("rope_parameters")
    whole = rope["full_attention"]
    text |= dict(rope_theta=whole["rope_theta"], sliding_window_pattern=3, layer_types=None)
    text |= dict(rope_scaling=dict(rope_type="linear", factor=whole["factor"]))
    text |= dict(rope_local_base_freq=rope["sliding_attention"]["rope_theta"])
    options = dict(model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"])
    path.write_text(json.dumps(options | dict(text_config=text, vision_config={})))
    before, images = IMAGES[form]
    tensors = safetensors.numpy.load_file(weights)
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    inner = "model." if form == "old" else ""
    tensors = {f"{before}{inner}{name}": tensor for name, tensor in short.items()}
    extra = {f"{images}weight": np.zeros(3, np.float32)}
    safetensors.numpy.save_file(tensors | extra, weights)
    lines, expected = [], load("gemma3_text")
    model = sd.load(tmp_path / "model", "float32", say=lines.append)
    assert any("left out 1 tensors that read images" in line for line in lines)
    # As in transformers 5.24, the class for images does not cap logits; that for texts does.
    assert text["final_logit_softcapping"] == expected.config.logits_cap == 2
    assert model.config == expected.config.replace(logits_cap=None)
    assert model.fingerprint == expected.fingerprint
    assert model.start_token == expected.start_token and model.eos_ids == expected.eos_ids


ROPE = {"rope_type": "default", "rope_theta": 321.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize("name, base", [("gemma2_plain", 10_000.0), ("gemma3_text", 321.0)])
def test_the_old_name_of_scaled_positions_counts_first_as_in_transformers(name, base, tmp_path):
    """In transformers 5.24 it replaces a Gemma 2's new options, and updates a Gemma 3's."""
    shutil.copytree(GOLDEN / "hf_gemma" / name, tmp_path, dirs_exist_ok=True)
    rope = ROPE if name == "gemma2_plain" else {"full_attention": ROPE}
    edit(tmp_path, "", rope_parameters=rope, rope_scaling=LINEAR)
    config = sd.load(tmp_path, "float32", say=lambda line: None).config
    assert (config.rotary_base, config.rotary_factor) == (base, 8.0)
    edit(tmp_path, "", rope_scaling=None)
    config = sd.load(tmp_path, "float32", say=lambda line: None).config
    assert (config.rotary_base, config.rotary_factor) == (321.0, 1.0)


def test_the_other_names_of_a_t5gemma_2_are_read(tmp_path):
    shutil.copytree(GOLDEN / "hf_gemma" / "t5gemma2", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors, before = safetensors.numpy.load_file(path), "model.encoder."
    text = "embed_tokens", "layers", "norm"
    longer = {
        name.replace(before, f"{before}text_model.", 1)
        if name.removeprefix(before).split(".")[0] in text and name.startswith(before)
        else name: tensor
        for name, tensor in tensors.items()
    }
    assert len(longer.keys() - tensors.keys()) > 20
    safetensors.numpy.save_file(longer, path)
    model, expected = (
        sd.load(tmp_path / "model", "float32", say=lambda line: None),
        load("t5gemma2"),
    )
    assert model.config == expected.config and model.fingerprint == expected.fingerprint


def test_ids_of_images_are_rejected(tmp_path):
    """Of an encoder's input, of a prompt, and of a text that has the token."""
    shutil.copytree(GOLDEN / "hf_gemma" / "gemma3_text", tmp_path / "model")
    edit(tmp_path / "model", "", image_token_id=46)
    prompted = sd.load(tmp_path / "model", "float32", say=lambda line: None)
    message = "got id {}, which stands for an image, expected text alone"
    for target, token in ((load("t5gemma2"), 47), (prompted, 46)):
        for given in ([[5, 6], [7, token]], np.array([[5, 6], [7, token]])):
            with pytest.raises(ValueError, match="^input 1: " + message.format(token)):
                sd.generate(target, given, max_new_tokens=2)
        words = {"<eos>": 1} | {f"w{i}": i for i in range(48) if i != 1}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w3"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        written = rebuild("t5gemma2") if token == 47 else prompted
        written.vocabulary = TokenizerJsonVocabulary(tokenizer.to_str(), (1,))
        with pytest.raises(ValueError, match="^sentence 2: " + message.format(token)):
            inputs.encode(written, ["w5", f"w6 w{token}"], 64)
    edit(tmp_path / "model", "", image_token_id="x")
    with pytest.raises(ValueError, match="image_token_id: got 'x', expected an id"):
        sd.load(tmp_path / "model", "float32", say=lambda line: None)


def test_ids_of_the_decoders_part_count_where_nothing_else_says(tmp_path):
    shutil.copytree(GOLDEN / "hf_gemma" / "t5gemma_capped", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    path = tmp_path / "model" / "config.json"
    options = json.loads(path.read_text())
    for name in ("bos_token_id", "eos_token_id"):
        options.pop(name, None)
    options["decoder"] |= dict(bos_token_id=5, eos_token_id=[6, 8])
    path.write_text(json.dumps(options))
    model = sd.load(tmp_path / "model", "float32", say=lambda line: None)
    assert (model.start_token, model.eos_ids) == (5, (6, 8))


def test_a_tokenizer_of_gemmas_kind(tmp_path):
    """Pairs of characters and bytes, spaces that are never stripped, and <bos> before a text."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "t", "h", "e", "th", "the", "<end_of_turn>"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e")]
    model = tokenizers.models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    parts = ("Replace", ("▁", " ")), ("ByteFallback", ()), ("Fuse", ())
    decoders = [getattr(tokenizers.decoders, name)(*given) for name, given in parts]
    tokenizer.decoder = tokenizers.decoders.Sequence(decoders)
    pair, special = "<bos> $A <bos> $B", [("<bos>", 2)]
    template = tokenizers.processors.TemplateProcessing("<bos> $A", pair, special)
    tokenizer.post_processor = template
    tokenizer.add_special_tokens([*pieces[:4], "<end_of_turn>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_class": "GemmaTokenizer", "eos_token": "<eos>", "bos_token": "<bos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    vocabulary = huggingface_folders.open_folder(tmp_path, (1, 266))
    assert (vocabulary.eos_ids, vocabulary.pad_id) == ((1, 266), 0)
    for text in (" the", "the  é\n", "the<end_of_turn>"):
        found = vocabulary.encode_input(text)
        assert found == tokenizer.encode(text).ids and found[0] == 2
        assert vocabulary.decode(found) == text


def test_presets_have_the_published_sizes():
    """Billions of parameters, embeddings included, as the papers' tables give them."""
    counts = {"gemma2/2b": 2.6, "gemma2/9b": 9.2, "gemma2/27b": 27.2, "t5gemma/9b-2b": 12.3}
    counts |= {"gemma3/270m": 0.27, "gemma3/1b": 1.0, "gemma3/4b": 3.9}
    for name, billions in counts.items():
        found = parameters.parameter_count(sd.PRESETS[name]) / 1e9
        assert abs(found - billions) < 0.06, (name, found)
