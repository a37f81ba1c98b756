"""Loading and saving: every layout gives the same parameters, and bad input one clear line."""

import dataclasses
import json
import shutil
import struct

import flax.serialization
import jax
import jax.numpy as jnp
import make_checkpoints as make
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN
from make_checkpoints import TINY, TINY_1_0

from specdec_jax import checkpoints, data
from specdec_jax.formats import huggingface, leaves
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.t5 import PRESETS, T5

SPIECE = GOLDEN / "hf_tokenizer" / "spiece.model"
PARAMS = make.random_params(TINY)
TENSORS = make.to_tensors(PARAMS)


def model_of(params=PARAMS, config=TINY, vocabulary=None, **ids) -> LanguageModel:
    tree = leaves.unflatten({name: jnp.asarray(x) for name, x in params.items()})
    return LanguageModel(config, tree, vocabulary, **ids)


def write_own(folder):
    checkpoints.save(model_of(), folder)
    return folder


FORMATS = {
    "safetensors": lambda path: make.write_hf(path, TENSORS),
    "shards": lambda path: make.write_hf(path, TENSORS, shards=3),
    "flax": lambda path: make.write_hf_flax(path, PARAMS),
    "legacy": lambda path: make.write_t5x_legacy(path / "checkpoint_7", PARAMS),
    "legacy without optimizer": lambda path: make.write_t5x_legacy(path / "checkpoint_7", PARAMS, optimizer=False),
    "legacy gfile": lambda path: make.write_t5x_legacy(path / "checkpoint_7", PARAMS, driver="gfile"),
    "legacy gcs": lambda path: make.write_t5x_legacy(path / "checkpoint_7", PARAMS, driver="gcs", top_level_path=True),
    "legacy inline": lambda path: make.write_t5x_legacy(path / "checkpoint_7", PARAMS, inline=sorted(PARAMS)[:9]),
    "legacy scan": lambda path: make.write_t5x_legacy(path / "checkpoint_7", make.stack_layers(PARAMS)),
    "orbax": lambda path: make.write_t5x_orbax(path / "checkpoint_7", PARAMS),
    "orbax without optimizer": lambda path: make.write_t5x_orbax(path / "checkpoint_7", PARAMS, optimizer=False),
    "orbax scan": lambda path: make.write_t5x_orbax(path / "checkpoint_7", make.stack_layers(PARAMS, heads=2)),
    "scan, one table": lambda path: make.write_t5x_orbax(
        path / "checkpoint_7", make.stack_layers(PARAMS, heads=2, tables="one")
    ),
    "own": write_own,
}


def assert_params(model, expected=PARAMS, dtype="float32"):
    got = leaves.flatten(model.params)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(got[name]), x.astype(dtype), err_msg=name)


def same_shape(config):
    """`config` with what a checkpoint may say in two ways, or not at all, set alike."""
    return dataclasses.replace(config, scale_decoder_outputs=None, dropout_rate=0.0)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_parameters(form, tmp_path):
    FORMATS[form](tmp_path / "model")
    model = checkpoints.load(tmp_path / "model", "float32")
    assert_params(model)
    assert same_shape(model.config) == same_shape(TINY)
    assert (model.start_token, model.eos_ids, model.vocabulary) == (0, (1,), None)
    model = checkpoints.load(str(tmp_path / "model"), jnp.bfloat16)
    assert_params(model, dtype="bfloat16")
    assert model.config.dtype == "bfloat16"


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_stored_dtypes(stored, tmp_path):
    tensors = {name: x.astype(stored) for name, x in TENSORS.items()}
    model = checkpoints.load(make.write_hf(tmp_path, tensors), "float32")
    assert_params(model, {name: x.astype(stored).astype(np.float32) for name, x in PARAMS.items()})


def test_t5x_in_bfloat16(tmp_path):
    params = {name: x.astype(ml_dtypes.bfloat16) for name, x in PARAMS.items()}
    make.write_t5x_legacy(tmp_path / "checkpoint_7", params)
    assert_params(checkpoints.load(tmp_path, "float32"), {name: x.astype(np.float32) for name, x in params.items()})


def test_large_leaves_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", 200)  # three rows of width 16
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)  # Flax cuts arrays above it
    for form in ("safetensors", "flax", "legacy", "own"):
        FORMATS[form](tmp_path / form)
        assert_params(checkpoints.load(tmp_path / form, "float32"))


@pytest.mark.parametrize("config", [TINY, TINY_1_0, dataclasses.replace(TINY, mlp_activations=("silu", "linear"))])
def test_expected_shapes_are_those_of_the_network(config):
    tokens = jnp.ones((1, 1), jnp.int32)
    tree = jax.eval_shape(T5(config).init, jax.random.key(0), tokens, tokens > 0, tokens)["params"]
    assert leaves.parameter_shapes(config) == {name: leaf.shape for name, leaf in leaves.flatten(tree).items()}


def test_parameter_counts():
    assert leaves.parameter_count(PRESETS["t5_1_1/small"]) == 76_961_152  # T5X's own count
    assert leaves.parameter_count(PRESETS["t5_1_0/small"]) == 60_506_624  # Hugging Face's t5-small


def test_tensor_names():
    names = [huggingface.tensor_name(name) for name in leaves.parameter_shapes(TINY)]
    assert len(set(names)) == len(names)
    assert "decoder.block.2.layer.2.DenseReluDense.wi_1.weight" in names


TIES = {
    # (what config.json adds, whether the file has lm_head) -> (head is the embedding, output is scaled)
    "1.0 old": (dict(), False, (True, True)),
    "1.0 new": (dict(tie_word_embeddings=True, scale_decoder_outputs=True), False, (True, True)),
    "1.0 with a copy of the head": (dict(tie_word_embeddings=True), True, (False, True)),
    "1.1 old": (dict(tie_word_embeddings=False), True, (False, False)),
    "1.1 new": (dict(tie_word_embeddings=True, scale_decoder_outputs=False), True, (False, False)),
    "mt5 old": (dict(model_type="mt5", tie_word_embeddings=False), True, (False, False)),
    "mt5 new": (dict(model_type="mt5", tie_word_embeddings=True), True, (False, False)),
}


@pytest.mark.parametrize("case", TIES)
def test_the_head_and_its_scale(case, tmp_path):
    options, has_head, expected = TIES[case]
    tensors = {name: x for name, x in TENSORS.items() if has_head or name != "lm_head.weight"}
    make.write_hf(tmp_path, tensors)
    config = {key: value for key, value in make.HF_CONFIG.items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    model = checkpoints.load(tmp_path, "float32")
    assert (model.config.logits_via_embedding, model.config.scale_decoder_outputs) == expected


@pytest.mark.parametrize(
    "feed_forward, activations",
    [("gated-silu", ("silu", "linear")), ("gated-gelu", ("gelu", "linear")), ("gated-relu", ("relu", "linear"))],
)
def test_feed_forward(feed_forward, activations, tmp_path):
    model = checkpoints.load(make.write_hf(tmp_path, TENSORS, feed_forward_proj=feed_forward), "float32")
    assert model.config.mlp_activations == activations


def test_duplicates_and_what_nothing_uses_are_ignored(tmp_path):
    extra = {
        name: TENSORS["shared.weight"].copy() for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    }
    extra["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros((32, 2), np.float32)
    assert_params(checkpoints.load(make.write_hf(tmp_path / "all", TENSORS | extra), "float32"))
    moved = {name: x for name, x in TENSORS.items() if name != "shared.weight"}
    moved["encoder.embed_tokens.weight"] = TENSORS["shared.weight"]
    assert_params(checkpoints.load(make.write_hf(tmp_path / "moved", moved), "float32"))


SPECIAL_IDS = [
    (dict(), dict(), (0, (1,))),
    (dict(decoder_start_token_id=3, eos_token_id=5), dict(), (3, (5,))),
    (dict(decoder_start_token_id=3, eos_token_id=5), dict(decoder_start_token_id=4, eos_token_id=[6, 7]), (4, (6, 7))),
    (dict(decoder_start_token_id=3, eos_token_id=[5]), dict(decoder_start_token_id=None, eos_token_id=None), (3, (5,))),
]


@pytest.mark.parametrize("config, generation, expected", SPECIAL_IDS)
def test_start_and_eos_ids(config, generation, expected, tmp_path):
    make.write_hf(tmp_path, TENSORS, **config)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = checkpoints.load(tmp_path, "float32")
    assert (model.start_token, model.eos_ids) == expected


def test_the_newest_step_is_taken(tmp_path):
    for step in (9, 10, 2):
        make.write_t5x_legacy(tmp_path / f"checkpoint_{step}", make.random_params(TINY, seed=step))
    (tmp_path / "checkpoint_11").mkdir()  # empty: a writer was killed
    shutil.copytree(tmp_path / "checkpoint_2", tmp_path / "checkpoint_12.orbax-checkpoint-tmp-3")
    assert_params(checkpoints.load(tmp_path, "float32"), make.random_params(TINY, seed=10))
    assert_params(checkpoints.load(tmp_path / "checkpoint_9", "float32"), make.random_params(TINY, seed=9))


def test_t5x_takes_a_configuration(tmp_path):
    make.write_t5x_legacy(tmp_path / "checkpoint_7", PARAMS)
    silu = dataclasses.replace(TINY, mlp_activations=("silu", "linear"))
    assert checkpoints.load(tmp_path, "float32", config=silu).config == silu
    with pytest.raises(ValueError, match="got none, expected one of shape|got shape"):
        checkpoints.load(tmp_path, "float32", config=dataclasses.replace(TINY, num_decoder_layers=4))
    make.write_hf(tmp_path / "hf", TENSORS)
    with pytest.raises(ValueError, match="got config=, expected it for a T5X checkpoint only"):
        checkpoints.load(tmp_path / "hf", "float32", config=TINY)


def test_t5x_vocabularies(tmp_path):
    wide = dataclasses.replace(TINY, vocab_size=328)
    make.write_t5x_legacy(tmp_path / "checkpoint_7", make.random_params(wide))
    assert checkpoints.load(tmp_path, "float32").vocabulary is None
    given = checkpoints.load(tmp_path, "float32", vocabulary=SPIECE).vocabulary
    assert (given.size, given.extra_ids) == (300, 100)  # T5's sentinels fit below 328 logits
    shutil.copy(SPIECE, tmp_path / "sentencepiece.model")
    beside = checkpoints.load(tmp_path / "checkpoint_7", "float32").vocabulary
    assert beside.fingerprint() == given.fingerprint()
    own = data.SentencePieceVocabulary.load(SPIECE)
    assert checkpoints.load(tmp_path, "float32", vocabulary=own).vocabulary is own
    tokenizer = checkpoints.load(
        tmp_path, "float32", vocabulary=str(GOLDEN / "hf_tokenizer" / "tokenizer.json")
    ).vocabulary
    assert tokenizer.size == 220
    with pytest.raises(ValueError, match="got no such file"):
        checkpoints.load(tmp_path, "float32", vocabulary=tmp_path / "absent.model")


def test_a_hugging_face_folder_brings_its_vocabulary(tmp_path):
    wide = dataclasses.replace(TINY, vocab_size=328)
    make.write_hf(tmp_path, make.to_tensors(make.random_params(wide)), vocab_size=328)
    shutil.copy(SPIECE, tmp_path)
    assert checkpoints.load(tmp_path, "float32").vocabulary.size == 300
    shutil.copy(GOLDEN / "hf_tokenizer" / "tokenizer.json", tmp_path)
    model = checkpoints.load(tmp_path, "float32")
    assert (type(model.vocabulary), model.eos_ids) == (data.TokenizerJsonVocabulary, (1,))


def test_the_default_dtype_is_said(tmp_path, capsys):
    make.write_hf(tmp_path, TENSORS)
    assert checkpoints.load(tmp_path).config.dtype == "float32"  # on a CPU
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "float32" in captured.err
    checkpoints.load(tmp_path, "float32")
    assert capsys.readouterr().err == ""


# Saving.

VOCABULARIES = {
    "none": lambda: None,
    "sentencepiece": lambda: data.SentencePieceVocabulary.load(SPIECE, 20),
    "tokenizer_json": lambda: data.TokenizerJsonVocabulary.load(GOLDEN / "hf_tokenizer" / "tokenizer.json"),
    "bytes": lambda: data.ByteVocabulary(3),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_save_and_load(kind, tmp_path):
    config = dataclasses.replace(TINY, vocab_size=264, dropout_rate=0.1, scale_decoder_outputs=True)
    params, vocabulary = make.random_params(config), VOCABULARIES[kind]()
    checkpoints.save(model_of(params, config, vocabulary, start_token=2, eos_ids=(1, 7)), tmp_path / "deep" / "model")
    model = checkpoints.load(tmp_path / "deep" / "model", "float32")
    assert_params(model, params)
    assert (model.config, model.start_token, model.eos_ids) == (config, 2, (1, 7))
    assert type(model.vocabulary) is type(vocabulary)
    assert vocabulary is None or model.vocabulary.fingerprint() == vocabulary.fingerprint()


def test_save_in_another_dtype(tmp_path):
    checkpoints.save(model_of(), tmp_path / "model", "bfloat16")
    rounded = {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in PARAMS.items()}
    model = checkpoints.load(tmp_path / "model", "float32")
    assert_params(model, rounded)
    assert model.config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype: got int8, expected float32 or bfloat16"):
        checkpoints.save(model, tmp_path / "other", "int8")


def test_a_pair_shares_the_vocabulary_above(tmp_path):
    vocabulary = data.SentencePieceVocabulary.load(SPIECE)
    config = dataclasses.replace(TINY, vocab_size=200)
    model = model_of(make.random_params(config), config, vocabulary)
    shutil.copy(SPIECE, tmp_path / "spiece.model")
    for role in ("target", "drafter"):
        checkpoints.save(model, tmp_path / role)
        assert not (tmp_path / role / "spiece.model").exists()
        assert checkpoints.load(tmp_path / role, "float32").vocabulary.fingerprint() == vocabulary.fingerprint()
    (tmp_path / "spiece.model").write_bytes(b"another")
    checkpoints.save(model, tmp_path / "target")
    assert checkpoints.load(tmp_path / "target", "float32").vocabulary.size == 200


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    path = tmp_path / "model"
    checkpoints.save(model_of(), path)
    other = make.random_params(TINY, seed=1)
    checkpoints.save(model_of(other), path)
    assert_params(checkpoints.load(path, "float32"), other)
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="expected nothing there"):
        checkpoints.save(model_of(), tmp_path / "notes")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model", "notes"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    checkpoints.save(model_of(), tmp_path / "model")
    fail = lambda params, path: (_ for _ in ()).throw(OSError("disk full"))
    monkeypatch.setattr(checkpoints.own, "_write_params", fail)
    with pytest.raises(OSError):
        checkpoints.save(model_of(make.random_params(TINY, seed=1)), tmp_path / "model")
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert_params(checkpoints.load(tmp_path / "model", "float32"))


def test_a_saved_folder_is_about_the_size_of_its_weights(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=4000, emb_dim=64)
    checkpoints.save(model_of(make.random_params(config), config), tmp_path / "model", "bfloat16")
    size = sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert size < 1.1 * 2 * leaves.parameter_count(config) + 50_000


def test_bundled_names(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "BUNDLED", tmp_path / "nothing")
    assert checkpoints.bundled() == ()
    monkeypatch.setattr(checkpoints, "BUNDLED", tmp_path)
    checkpoints.save(model_of(), tmp_path / "ende" / "target")
    checkpoints.save(model_of(), tmp_path / "ende" / "drafter")
    assert checkpoints.bundled() == ("ende/drafter", "ende/target")
    model = checkpoints.load("ende/target", "float32")
    assert_params(model)
    assert model.name == "ende/target"


# Bad input: one line, what was got and what was expected, before anything compiles.


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncate(path, size=None):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2 if size is None else size)


def edit_config(folder, **options):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def without(name):
    return {key: x for key, x in TENSORS.items() if key != name}


def reshaped(name):
    return TENSORS | {name: np.zeros((3, 5), np.float32)}


def damage_header(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 10) + b"x" * 10 + content[18:])


def truncate_database(folder):
    """Cuts every data file of an OCDBT database: which of them the merged database still refers to varies."""
    for path in folder.rglob("d/*"):
        truncate(path)


LEGACY, STATE = "checkpoint_7/checkpoint", "checkpoint_7/state"
ARRAY = "checkpoint_7/target.encoder.layers_1.mlp.wo.kernel"
WO = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
BAD = {
    # what: (format or tensors, what is done to the folder, what the line says)
    "no path": ("safetensors", lambda p: remove(p), "got no such path, expected a checkpoint folder"),
    "a file": ("safetensors", lambda p: (remove(p), p.write_text("")), "got a file, expected a checkpoint folder"),
    "empty folder": ("safetensors", lambda p: (remove(p), p.mkdir()), "got a folder of no known format, expected"),
    "no config": ("safetensors", lambda p: remove(p / "config.json"), "got no config.json, expected"),
    "broken config": ("safetensors", lambda p: truncate(p / "config.json"), "got no readable JSON, expected"),
    "config is a list": ("safetensors", lambda p: (p / "config.json").write_text("[]"), "got list, expected an object"),
    "no weights": ("safetensors", lambda p: remove(p / "model.safetensors"), "got no weights, expected model.safetensors"),
    "pytorch": (
        "safetensors",
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "got pytorch_model.bin only, expected model.safetensors; convert",
    ),
    "umt5": ("safetensors", lambda p: edit_config(p, model_type="umt5"), "unknown architecture: got model_type 'umt5'"),
    "bert": ("safetensors", lambda p: edit_config(p, model_type="bert", architectures=["BertModel"]), "expected model_type t5"),
    "encoder only": ("safetensors", lambda p: edit_config(p, architectures=["T5EncoderModel"]), "got .*T5EncoderModel"),
    "no width": ("safetensors", lambda p: edit_config(p, d_model=None), "d_model: got None, expected an integer"),
    "exact gelu": ("safetensors", lambda p: edit_config(p, feed_forward_proj="gelu"), "feed_forward_proj: got 'gelu'"),
    "epsilon": ("safetensors", lambda p: edit_config(p, layer_norm_epsilon=1e-5), "layer_norm_epsilon: got 1e-05"),
    "no heads": ("safetensors", lambda p: edit_config(p, num_heads=0), "num_heads: got 0, expected at least 1"),
    "other layers": (
        "safetensors",
        lambda p: edit_config(p, num_layers=3),
        "parameter encoder/layers_2/.*: got none, expected one of shape",
    ),
    "fewer layers": (
        "safetensors",
        lambda p: edit_config(p, num_layers=1),
        "got unexpected parameter encoder.block.1.layer.*, expected only",
    ),
    "tensor missing": (without(WO), None, r"parameter encoder/layers_1/mlp/wo/kernel: got none, expected .*\(24, 16\)"),
    "wrong shape": (reshaped(WO), None, r"encoder/layers_1/mlp/wo/kernel: got shape \(5, 3\), expected \(24, 16\)"),
    "tensor too many": (TENSORS | {"adapter": np.zeros(2)}, None, "got unexpected parameter adapter, expected only"),
    "integers": (TENSORS | {WO: np.zeros((16, 24), np.int32)}, None, "got dtype I32, expected one of"),
    "truncated": ("safetensors", lambda p: truncate(p / "model.safetensors"), "got .* bytes, expected .* by its header"),
    "truncated header": ("safetensors", lambda p: truncate(p / "model.safetensors", 100), "expected a safetensors header"),
    "empty weights": ("safetensors", lambda p: truncate(p / "model.safetensors", 0), "expected a safetensors header"),
    "damaged header": ("safetensors", damage_header, "got no readable header, expected"),
    "shard missing": (
        "shards",
        lambda p: remove(p / "model-00002-of-00003.safetensors"),
        "got no shard model-00002-of-00003.safetensors, expected",
    ),
    "shard swapped": (
        "shards",
        lambda p: shutil.copy(p / "model-00001-of-00003.safetensors", p / "model-00002-of-00003.safetensors"),
        "got no tensor .*, expected",
    ),
    "broken index": ("shards", lambda p: truncate(p / "model.safetensors.index.json"), "got no readable weight_map"),
    "flax truncated": ("flax", lambda p: truncate(p / "flax_model.msgpack"), "got no readable msgpack"),
    "flax end cut": (
        "flax",
        lambda p: truncate(p / "flax_model.msgpack", (p / "flax_model.msgpack").stat().st_size - 3),
        "got no readable msgpack",
    ),
    "flax empty": ("flax", lambda p: truncate(p / "flax_model.msgpack", 0), "got no readable msgpack"),
    "legacy truncated": ("legacy", lambda p: truncate(p / LEGACY), "got no readable msgpack"),
    "legacy empty": ("legacy", lambda p: truncate(p / LEGACY, 0), "got no readable msgpack"),
    "array missing": ("legacy", lambda p: remove(p / ARRAY), "parameter encoder/layers_1/mlp/wo/kernel: got .*NOT_FOUND"),
    "chunk missing": ("legacy", lambda p: remove(p / ARRAY / "1.0"), r"mlp/wo/kernel: got .*missing, expected float32"),
    "chunk truncated": ("legacy", lambda p: truncate(p / ARRAY / "1.0"), "mlp/wo/kernel: got .*, expected float32"),
    "version": (
        "legacy",
        lambda p: (p / LEGACY).write_bytes(flax.serialization.msgpack_serialize({"version": 1, "optimizer": {}})),
        "got checkpoint version 1, expected 3",
    ),
    "no target": (
        "legacy",
        lambda p: (p / LEGACY).write_bytes(flax.serialization.msgpack_serialize({"version": 3, "optimizer": {}})),
        "got no 'target', expected",
    ),
    "no structure": ("orbax", lambda p: remove(p / STATE / "_METADATA"), "got no _METADATA, expected"),
    "broken structure": ("orbax", lambda p: truncate(p / STATE / "_METADATA"), "got no readable tree_metadata"),
    "no manifest": ("orbax", lambda p: remove(p / STATE / "manifest.ocdbt"), "parameter .*: got .*, expected"),
    "database cut": ("orbax", lambda p: truncate_database(p / STATE), "parameter .*: got .*, expected"),
    "own version": ("own", lambda p: edit_config(p, version=2), "got version 2, expected 1"),
    "own fields": ("own", lambda p: edit_config(p, model={"layers": 3}), "got no readable model configuration"),
    "own vocabulary": (
        "own",
        lambda p: edit_config(p, vocabulary={"kind": "sentencepiece", "file": "spiece.model"}),
        "got no vocabulary sentencepiece 'spiece.model', expected it there or in the folder above",
    ),
    "own params": ("own", lambda p: remove(p / "params"), "got no _METADATA, expected"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line(case, tmp_path, monkeypatch):
    source, damage, message = BAD[case]
    path = tmp_path / "model"
    make.write_hf(path, source) if isinstance(source, dict) else FORMATS[source](path)
    if damage:
        damage(path)
    compiled = []
    monkeypatch.setattr(LanguageModel, "__init__", lambda self, *args, **kwargs: compiled.append(args))
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.load(path, "float32")
    assert "\n" not in str(error.value) and "got" in str(error.value) and "expected" in str(error.value)
    assert not compiled


def test_layers_with_position_tables_of_their_own_are_refused(tmp_path):
    make.write_t5x_orbax(tmp_path / "checkpoint_7", make.stack_layers(PARAMS, tables="different"))
    with pytest.raises(ValueError, match=r"relpos_bias.*: got a relative position table of its own .*, expected one"):
        checkpoints.load(tmp_path, "float32")


def test_a_vocabulary_wider_than_the_logits_is_refused(tmp_path):
    make.write_t5x_legacy(tmp_path / "checkpoint_7", PARAMS)
    with pytest.raises(ValueError, match="got 200 pieces, expected at most the 40 logits"):
        checkpoints.load(tmp_path, "float32", vocabulary=SPIECE)


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    make.write_hf(tmp_path, TENSORS)
    monkeypatch.setattr(checkpoints, "read_params", lambda *args: pytest.fail("read"))
    monkeypatch.setattr(checkpoints, "available_bytes", lambda: 20_000)
    with pytest.raises(
        ValueError, match=r"got 0.00 GB of free memory, expected at least .* for [\d,]+ parameters in float32"
    ):
        checkpoints.load(tmp_path, "float32")


def test_memory_estimates():
    xxl = PRESETS["t5_1_1/xxl"]
    assert leaves.parameter_count(xxl) == 11_135_332_352
    weights = 2 * leaves.parameter_count(xxl)
    assert weights < checkpoints.required_bytes(xxl, "bfloat16") < 1.2 * weights
    assert checkpoints.available_bytes() > 10**8


@pytest.mark.parametrize("dtype", ["float16", "int32", "nonsense"])
def test_other_dtypes_are_refused(dtype, tmp_path):
    make.write_hf(tmp_path, TENSORS)
    with pytest.raises(ValueError, match=f"dtype: got {dtype}, expected float32 or bfloat16"):
        checkpoints.load(tmp_path, dtype)
