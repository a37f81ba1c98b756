"""Loading and saving: every layout gives the same parameters."""

import dataclasses
import json
import os
import shutil

import flax.serialization
import jax
import jax.numpy as jnp
import make_checkpoints as make
import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN
from make_checkpoints import FORMATS, PARAMS, TENSORS, TINY, TINY_1_0, model_of

from specdec_jax.checkpoints import converter, huggingface_t5, loader, stored_tensor
from specdec_jax.models import padding, parameters
from specdec_jax.models.t5 import PRESETS
from specdec_jax.tokenizers import vocabularies

pytestmark = pytest.mark.usefixtures("quick")
SPIECE = GOLDEN / "hf_tokenizer" / "spiece.model"


def assert_params(model, expected=PARAMS, dtype="float32"):
    got = parameters.flatten(model.params)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(got[name]), x.astype(dtype), err_msg=name)


WIDE = dataclasses.replace(TINY, vocab_size=264)  # room for bytes
WIDE_PARAMS = make.random_params(WIDE)


def same_shape(config):
    """`config` with what a checkpoint may say in two ways, or not at all, set alike."""
    return dataclasses.replace(config, scale_decoder_outputs=None, dropout_rate=0.0)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_gives_the_parameters(form, tmp_path):
    FORMATS[form](tmp_path / "model")
    model = loader.load(tmp_path / "model", "float32")
    assert_params(model)
    assert same_shape(model.config) == same_shape(TINY)
    assert (model.start_token, model.eos_ids, model.vocabulary) == (0, (1,), None)
    model = loader.load(str(tmp_path / "model"), jnp.bfloat16)
    assert_params(model, dtype="bfloat16")
    assert model.config.dtype == "bfloat16"


@pytest.mark.parametrize("form", ["own", "orbax", "legacy", "safetensors"])
def test_a_folder_whose_name_a_url_would_have_to_quote(form, tmp_path):
    folder = tmp_path / "run #2? 100% a%20b"
    FORMATS[form](folder)
    assert_params(loader.load(folder, "float32"))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_stored_dtypes(stored, tmp_path):
    tensors = {name: x.astype(stored) for name, x in TENSORS.items()}
    model = loader.load(make.write_hf(tmp_path, tensors), "float32")
    assert_params(model, {name: x.astype(stored).astype(np.float32) for name, x in PARAMS.items()})


def test_t5x_in_bfloat16(tmp_path):
    params = {name: x.astype(ml_dtypes.bfloat16) for name, x in PARAMS.items()}
    make.write_t5x_legacy(tmp_path / "checkpoint_7", params)
    assert_params(
        loader.load(tmp_path, "float32"), {name: x.astype(np.float32) for name, x in params.items()}
    )


def test_large_leaves_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_tensor, "_BLOCK_BYTES", 200)  # three rows of width 16
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 100)  # Flax cuts arrays above it
    for form in ("safetensors", "flax", "legacy", "own"):
        FORMATS[form](tmp_path / form)
        assert_params(loader.load(tmp_path / form, "float32"))


@pytest.mark.parametrize(
    "config", [TINY, TINY_1_0, dataclasses.replace(TINY, mlp_activations=("silu", "linear"))]
)
def test_expected_shapes_are_those_of_the_network(config):
    tokens = jnp.ones((1, 1), jnp.int32)
    tree = jax.eval_shape(config.module().init, jax.random.key(0), tokens, tokens > 0, tokens)[
        "params"
    ]
    assert parameters.parameter_shapes(config) == {
        name: leaf.shape for name, leaf in parameters.flatten(tree).items()
    }


def test_parameter_counts():
    assert parameters.parameter_count(PRESETS["t5_1_1/small"]) == 76_961_152  # T5X's own count
    assert (
        parameters.parameter_count(PRESETS["t5_1_0/small"]) == 60_506_624
    )  # Hugging Face's t5-small
    billions = parameters.parameter_count(PRESETS["madlad/3b"]) / 1e9
    assert abs(billions - 2.94) < 0.005  # as its Hub page rounds it


def test_tensor_names():
    names = [huggingface_t5.tensor_name(name) for name in parameters.parameter_shapes(TINY)]
    assert len(set(names)) == len(names)
    assert "decoder.block.2.layer.2.DenseReluDense.wi_1.weight" in names


@pytest.mark.parametrize("activations", [(), ("gelu", "gelu", "linear"), ("tanh",)])
def test_other_feed_forward_blocks_are_rejected(activations):
    with pytest.raises(ValueError, match="mlp_activations: got .*, expected one name or two"):
        dataclasses.replace(TINY, mlp_activations=activations)


def test_ids_that_a_model_lacks_have_no_logits():
    model = model_of()
    lengths, padded = [3], [[39, 0, 7, -1]]
    assert model.logits(padded, [[0, 39]], lengths).shape == (1, 2, 40)
    for inputs, decoder_tokens, message in (
        ([[40, 1]], [[0, 1]], "inputs: got id 40, expected 0 to 39"),
        ([[3, -1, 1]], [[0, 1]], "inputs: got id -1"),
        (padded, [[0, 1]], "inputs: got id -1"),
        ([[3, 1]], [[0, 41]], "decoder_tokens: got id 41"),
        ([[3, 1]], [[-2, 1]], "decoder_tokens: got id -2"),
    ):
        with pytest.raises(ValueError, match=message):
            model.logits(inputs, decoder_tokens)


def test_text_of_padded_rows():
    """It is moved to the left; padding inside it stays."""
    ids = np.array([[3, 0, 4, 0], [0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 5, 6]])
    moved, lengths = padding.move_left(ids, ids != 0)
    np.testing.assert_array_equal(moved, [[3, 0, 4, 0], [0] * 4, [1, 2, 3, 4], [5, 6, 0, 0]])
    assert lengths.tolist() == [3, 0, 4, 2] and lengths.dtype == np.int32
    none = np.zeros((2, 0), np.int32)
    moved, lengths = padding.move_left(none, none != 0)
    assert moved.shape == (2, 0) and lengths.tolist() == [0, 0] and lengths.dtype == np.int32


TIES = {
    # (what config.json adds, whether the file has lm_head) -> (head is the embedding, output is
    # scaled)
    "1.0 old": (dict(), False, (True, True)),
    "1.0 new": (dict(tie_word_embeddings=True, scale_decoder_outputs=True), False, (True, True)),
    "1.0 with a copy of the head": (dict(tie_word_embeddings=True), True, (False, True)),
    "1.0 with null": (dict(tie_word_embeddings=None), True, (False, True)),
    "1.1 old": (dict(tie_word_embeddings=False), True, (False, False)),
    "1.1 new": (dict(tie_word_embeddings=True, scale_decoder_outputs=False), True, (False, False)),
    "mt5 old": (dict(model_type="mt5", tie_word_embeddings=False), True, (False, False)),
    "mt5 new": (dict(model_type="mt5", tie_word_embeddings=True), True, (False, False)),
    "mt5 scaled": (dict(model_type="mt5", scale_decoder_outputs=True), True, (False, False)),
}


@pytest.mark.parametrize("case", TIES)
def test_the_head_and_its_scale(case, tmp_path):
    options, has_head, expected = TIES[case]
    tensors = {name: x for name, x in TENSORS.items() if has_head or name != "lm_head.weight"}
    make.write_hf(tmp_path, tensors)
    config = {key: value for key, value in make.HF_CONFIG.items() if key != "tie_word_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    model = loader.load(tmp_path, "float32")
    assert (model.config.logits_via_embedding, model.config.scale_decoder_outputs) == expected


@pytest.mark.parametrize(
    "feed_forward, activations",
    [
        ("gated-silu", ("silu", "linear")),
        ("gated-gelu", ("gelu", "linear")),
        ("gated-relu", ("relu", "linear")),
    ],
)
def test_feed_forward(feed_forward, activations, tmp_path):
    model = loader.load(make.write_hf(tmp_path, TENSORS, feed_forward_proj=feed_forward), "float32")
    assert model.config.mlp_activations == activations


def test_duplicates_and_what_nothing_uses_are_ignored(tmp_path):
    extra = {
        name: TENSORS["shared.weight"].copy()
        for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    }
    extra["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.zeros(
        (32, 2), np.float32
    )
    assert_params(loader.load(make.write_hf(tmp_path / "all", TENSORS | extra), "float32"))
    moved = {name: x for name, x in TENSORS.items() if name != "shared.weight"}
    moved["encoder.embed_tokens.weight"] = TENSORS["shared.weight"]
    assert_params(loader.load(make.write_hf(tmp_path / "moved", moved), "float32"))


SPECIAL_IDS = [
    (dict(), dict(), (0, (1,))),
    (dict(decoder_start_token_id=3, eos_token_id=5), dict(), (3, (5,))),
    (
        dict(decoder_start_token_id=3, eos_token_id=5),
        dict(decoder_start_token_id=4, eos_token_id=[6, 7]),
        (4, (6, 7)),
    ),
    (
        dict(decoder_start_token_id=3, eos_token_id=[5]),
        dict(decoder_start_token_id=None, eos_token_id=None),
        (3, (5,)),
    ),
]


@pytest.mark.parametrize("config, generation, expected", SPECIAL_IDS)
def test_start_and_eos_ids(config, generation, expected, tmp_path):
    make.write_hf(tmp_path, TENSORS, **config)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    model = loader.load(tmp_path, "float32")
    assert (model.start_token, model.eos_ids) == expected


def test_the_newest_step_is_taken(tmp_path):
    for step in (9, 10, 2):
        make.write_t5x_legacy(tmp_path / f"checkpoint_{step}", make.random_params(TINY, seed=step))
    (tmp_path / "checkpoint_11").mkdir()  # empty: a writer was killed
    shutil.copytree(tmp_path / "checkpoint_2", tmp_path / "checkpoint_12.orbax-checkpoint-tmp-3")
    assert_params(loader.load(tmp_path, "float32"), make.random_params(TINY, seed=10))
    assert_params(
        loader.load(tmp_path / "checkpoint_9", "float32"), make.random_params(TINY, seed=9)
    )


def test_t5x_takes_a_configuration(tmp_path):
    make.write_t5x_legacy(tmp_path / "checkpoint_7", PARAMS)
    silu = dataclasses.replace(TINY, mlp_activations=("silu", "linear"))
    assert loader.load(tmp_path, "float32", config=silu).config == silu
    with pytest.raises(ValueError, match="got none, expected one of shape|got shape"):
        loader.load(tmp_path, "float32", config=dataclasses.replace(TINY, num_decoder_layers=4))
    make.write_hf(tmp_path / "hf", TENSORS)
    with pytest.raises(ValueError, match="got config=, expected it for a T5X checkpoint only"):
        loader.load(tmp_path / "hf", "float32", config=TINY)


def test_t5x_vocabularies(tmp_path):
    wide = dataclasses.replace(TINY, vocab_size=328)
    make.write_t5x_legacy(tmp_path / "checkpoint_7", make.random_params(wide))
    assert loader.load(tmp_path, "float32").vocabulary is None
    given = loader.load(tmp_path, "float32", vocabulary=SPIECE).vocabulary
    assert (given.size, given.extra_ids) == (300, 100)  # T5's sentinels fit below 328 logits
    shutil.copy(SPIECE, tmp_path / "sentencepiece.model")
    beside = loader.load(tmp_path / "checkpoint_7", "float32").vocabulary
    assert beside.fingerprint() == given.fingerprint()
    own = vocabularies.SentencePieceVocabulary.load(SPIECE)
    assert loader.load(tmp_path, "float32", vocabulary=own).vocabulary is own
    tokenizer = loader.load(
        tmp_path, "float32", vocabulary=str(GOLDEN / "hf_tokenizer" / "tokenizer.json")
    ).vocabulary
    assert tokenizer.size == 220
    with pytest.raises(ValueError, match="got no such file"):
        loader.load(tmp_path, "float32", vocabulary=tmp_path / "absent.model")


@pytest.mark.parametrize("given", [vocabularies.ByteVocabulary(3), SPIECE])
def test_a_tokenizer_that_is_rejected_can_be_replaced(given, tmp_path):
    make.write_hf(tmp_path, make.to_tensors(WIDE_PARAMS), vocab_size=WIDE.vocab_size)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XTokenizer"}')
    for name, content in (("vocab.json", '{"a": 0}'), ("merges.txt", "#version: 0.2\n")):
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="vocab.json: got the files of a XTokenizer, expected"):
        loader.load(tmp_path, "float32")
    found = loader.load(tmp_path, "float32", vocabulary=given).vocabulary
    assert found.size == (262 if given is not SPIECE else 200)
    (tmp_path / "tokenizer_config.json").write_text('{"a": 1,}')
    assert loader.load_shape(tmp_path).vocab_size == WIDE.vocab_size


def test_a_hugging_face_folder_brings_its_vocabulary(tmp_path):
    wide = dataclasses.replace(TINY, vocab_size=328)
    make.write_hf(tmp_path, make.to_tensors(make.random_params(wide)), vocab_size=328)
    shutil.copy(SPIECE, tmp_path)
    assert loader.load(tmp_path, "float32").vocabulary.size == 300
    shutil.copy(GOLDEN / "hf_tokenizer" / "tokenizer.json", tmp_path)
    model = loader.load(tmp_path, "float32")
    assert (type(model.vocabulary), model.eos_ids) == (vocabularies.TokenizerJsonVocabulary, (1,))


def test_the_default_dtype_is_printed(tmp_path, capsys):
    make.write_hf(tmp_path, TENSORS)
    assert loader.load(tmp_path).config.dtype == "float32"  # on a CPU
    captured = capsys.readouterr()
    hint = "(dtype=, or --dtype on the command line, chooses another)"
    announced = f"loading {tmp_path} in float32, the default on a CPU {hint}\n"
    assert (captured.out, captured.err) == ("", announced)
    loader.load(tmp_path, "float32")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("form", ["safetensors", "own", "legacy", "orbax"])
def test_a_path_that_goes_up(form, tmp_path, monkeypatch):
    FORMATS[form](tmp_path / "model")
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    model = loader.load("../model", "float32")
    assert_params(model)
    converter.save(model, "../saved")
    assert_params(loader.load("../saved", "float32"))


def test_links_as_in_hugging_faces_cache(tmp_path):
    """There every file of a snapshot is a link to one beside it, outside the folder."""
    make.write_hf(tmp_path / "blobs", TENSORS, shards=3)
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert_params(loader.load(snapshot, "float32"))


# Saving.

VOCABULARIES = {
    "none": lambda: None,
    "sentencepiece": lambda: vocabularies.SentencePieceVocabulary.load(SPIECE, 20),
    "tokenizer_json": lambda: vocabularies.TokenizerJsonVocabulary.load(
        GOLDEN / "hf_tokenizer" / "tokenizer.json"
    ),
    "bytes": lambda: vocabularies.ByteVocabulary(3),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_save_and_load(kind, tmp_path):
    config = dataclasses.replace(TINY, vocab_size=264, dropout_rate=0.1, scale_decoder_outputs=True)
    params, vocabulary = make.random_params(config), VOCABULARIES[kind]()
    converter.save(
        model_of(params, config, vocabulary, start_token=2, eos_ids=(1, 7)),
        tmp_path / "deep" / "model",
    )
    model = loader.load(tmp_path / "deep" / "model", "float32")
    assert_params(model, params)
    assert (model.config, model.start_token, model.eos_ids) == (config, 2, (1, 7))
    assert type(model.vocabulary) is type(vocabulary)
    assert vocabulary is None or model.vocabulary.fingerprint() == vocabulary.fingerprint()


@pytest.mark.parametrize("eos_ids", [(), (5, 1)])
def test_saved_eos_ids_are_those_of_the_model_even_if_none(eos_ids, tmp_path):
    converter.save(
        model_of(
            vocabulary=vocabularies.ByteVocabulary(3),
            config=WIDE,
            params=WIDE_PARAMS,
            eos_ids=eos_ids,
        ),
        tmp_path / "model",
    )
    assert loader.load(tmp_path / "model", "float32").eos_ids == eos_ids


def test_a_shape_of_numpys_integers_is_saved(tmp_path):
    sizes = {name: np.int64(getattr(TINY, name)) for name in ("vocab_size", "emb_dim", "mlp_dim")}
    config = dataclasses.replace(TINY, **sizes)
    converter.save(model_of(config=config), tmp_path / "saved")
    assert loader.load(tmp_path / "saved", "float32").config == config == TINY


def test_a_path_of_another_kind_is_named_by_its_text(tmp_path):
    converter.save(model_of(), tmp_path / "saved")
    (entry,) = os.scandir(tmp_path)  # whose own text is not its path
    assert loader.load(entry).name == entry.path
    (tmp_path / "saved").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match="^/.*/saved: got no such path, expected a checkpoint"):
        loader.load(entry)


def test_save_in_another_dtype(tmp_path):
    converter.save(model_of(), tmp_path / "model", "bfloat16")
    rounded = {name: x.astype(ml_dtypes.bfloat16).astype(np.float32) for name, x in PARAMS.items()}
    model = loader.load(tmp_path / "model", "float32")
    assert_params(model, rounded)
    assert model.config.dtype == "float32"
    with pytest.raises(ValueError, match="dtype: got int16, expected float32 or bfloat16 or int8"):
        converter.save(model, tmp_path / "other", "int16")


def test_a_pair_shares_the_vocabulary_above(tmp_path):
    vocabulary = vocabularies.SentencePieceVocabulary.load(SPIECE)
    config = dataclasses.replace(TINY, vocab_size=200)
    model = model_of(make.random_params(config), config, vocabulary)
    shutil.copy(SPIECE, tmp_path / "spiece.model")
    for role in ("target", "drafter"):
        converter.save(model, tmp_path / role)
        assert not (tmp_path / role / "spiece.model").exists()
        assert (
            loader.load(tmp_path / role, "float32").vocabulary.fingerprint()
            == vocabulary.fingerprint()
        )
    (tmp_path / "spiece.model").write_bytes(b"another")
    converter.save(model, tmp_path / "target")
    assert loader.load(tmp_path / "target", "float32").vocabulary.size == 200


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    path = tmp_path / "model"
    converter.save(model_of(), path)
    other = make.random_params(TINY, seed=1)
    converter.save(model_of(other), path)
    assert_params(loader.load(path, "float32"), other)
    (tmp_path / "notes").mkdir()
    with pytest.raises(ValueError, match="expected nothing there"):
        converter.save(model_of(), tmp_path / "notes")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["model", "notes"]


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    converter.save(model_of(), tmp_path / "model")

    def fail(params, path):
        return (_ for _ in ()).throw(OSError("disk full"))

    monkeypatch.setattr(loader.native_format, "_write_params", fail)
    with pytest.raises(OSError):
        converter.save(model_of(make.random_params(TINY, seed=1)), tmp_path / "model")
    assert [child.name for child in tmp_path.iterdir()] == ["model"]
    assert_params(loader.load(tmp_path / "model", "float32"))


def test_a_saved_folder_is_about_the_size_of_its_weights(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=4000, emb_dim=64)
    converter.save(model_of(make.random_params(config), config), tmp_path / "model", "bfloat16")
    size = sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file())
    assert size < 1.1 * 2 * parameters.parameter_count(config) + 50_000


def test_bundled_names(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "BUNDLED", tmp_path / "nothing")
    assert loader.bundled() == ()
    monkeypatch.setattr(loader, "BUNDLED", tmp_path)
    converter.save(model_of(), tmp_path / "ende" / "target")
    converter.save(model_of(), tmp_path / "ende" / "drafter")
    assert loader.bundled() == ("ende/drafter", "ende/target")
    model = loader.load("ende/target", "float32")
    assert_params(model)
    assert model.name == "ende/target"


ALIASES = {
    "hf_gpt2": {"num_attention_heads": "n_head", "hidden_size": "n_embd"}
    | {"num_hidden_layers": "n_layer", "max_position_embeddings": "n_positions"},
    "hf_t5_1_1": {"num_attention_heads": "num_heads", "hidden_size": "d_model"}
    | {"num_hidden_layers": "num_layers", "head_dim": "d_kv"},
    "hf_bart/bart": {"num_attention_heads": "encoder_attention_heads", "hidden_size": "d_model"}
    | {"num_hidden_layers": "encoder_layers"},
}


@pytest.mark.parametrize("name", ALIASES)
def test_other_names_of_options_count_first_as_in_transformers(name, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    options, expected = (
        json.loads((tmp_path / "config.json").read_text()),
        loader.load_shape(tmp_path),
    )
    moved = {other: options.pop(usual) for other, usual in ALIASES[name].items()}
    wrong = {usual: 3 for usual in ALIASES[name].values()}
    for given in (moved, wrong | moved):
        (tmp_path / "config.json").write_text(json.dumps(options | given))
        assert loader.load_shape(tmp_path) == expected


def test_the_other_name_of_t5s_layers_is_the_encoders_alone(tmp_path):
    """As in transformers, which takes the decoder's number from `num_layers`."""
    layers = dict(num_layers=2, num_hidden_layers=3, num_decoder_layers=None)
    config = loader.load_shape(make.write_hf(tmp_path, TENSORS, **layers))
    assert (config.num_encoder_layers, config.num_decoder_layers) == (3, 2)


BLOCKS = {
    # The first logits of transformers 5.24, with these options beside feed_forward_proj.
    "relu": ("hf_t5_1_1", {"dense_act_fn": "relu"}, [0.7600811, -4.9777308, -5.5685964]),
    "gelu": ("hf_t5_1_0", {"dense_act_fn": "gelu_new"}, [5.6980119, -11.5992833, 0.6851150]),
    "gateless": (
        "hf_t5_1_0",
        {"feed_forward_proj": "gated-relu", "is_gated_act": False},
        [4.1624246, -12.0405359, 0.2456874],
    ),
}


@pytest.mark.parametrize("name, changes, expected", BLOCKS.values(), ids=BLOCKS)
def test_t5s_other_options_of_the_feed_forward_block_count(name, changes, expected, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    options = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(options))
    logits = loader.load(tmp_path, "float32").logits([[5, 6, 7, 8]], [[0, 9, 10, 11]])
    np.testing.assert_allclose(np.asarray(logits)[0, 0, :3], expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("name, value", [("dense_act_fn", "gelu"), ("is_gated_act", "yes")])
def test_unknown_options_of_the_feed_forward_block_are_rejected(name, value, tmp_path):
    make.write_hf(tmp_path, TENSORS, **{name: value})
    with pytest.raises(ValueError, match=f"{name}: got '{value}', expected "):
        loader.load_shape(tmp_path)
