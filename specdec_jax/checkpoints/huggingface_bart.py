"""Hugging Face's BART, mBART, Marian, Pegasus, M2M-100 and NLLB: config.json and tensors' names."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.checkpoints.huggingface_config import (
    choose_value,
    read_fields,
    resolve_aliases,
)
from specdec_jax.checkpoints.stored_tensor import (
    Parameters,
    StoredTensor,
    fill_rows,
    is_same_tensor,
)
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.config_validation import build
from specdec_jax.models.parameters import parameter_shapes

ARCHITECTURES = {
    "bart": ("BartForConditionalGeneration", "BartModel"),
    "mbart": ("MBartForConditionalGeneration",),
    "marian": ("MarianMTModel",),
    "pegasus": ("PegasusForConditionalGeneration",),
    "m2m_100": ("M2M100ForConditionalGeneration",),
}
START = ("decoder_start_token_id",)
NO_START: tuple[int, ...] = ()  # an mBART's is the language
_BART = {"eos_token_id": 2, "pad_token_id": 1}
# Where config.json does not say.
SPECIAL_IDS = {
    "bart": _BART | {"decoder_start_token_id": 2, "forced_eos_token_id": 2},
    "mbart": _BART | {"forced_eos_token_id": 2},
    "marian": {
        "eos_token_id": 0,
        "pad_token_id": 58100,
        "decoder_start_token_id": 58100,
        "forced_eos_token_id": 0,
    },
    "pegasus": {
        "eos_token_id": 1,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "forced_eos_token_id": 1,
    },
    "m2m_100": _BART | {"decoder_start_token_id": 2},
}
NO_EOS: tuple[int, ...] = ()  # what `"eos_token_id": null` means: nothing ends a sequence
_ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "num_heads": "encoder_attention_heads",
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "mlp_dim": "encoder_ffn_dim",
    "num_positions": "max_position_embeddings",
    "scale_embedding": "scale_embedding",
    "pad_id": "pad_token_id",
    "logits_via_embedding": "tie_word_embeddings",
}
# Options of the decoder that have to be the encoder's.
_SAME_FIELDS = {"num_heads": "decoder_attention_heads", "mlp_dim": "decoder_ffn_dim"}
# The classes' own defaults.
_DEFAULTS = {
    "vocab_size": 50265,
    "emb_dim": 1024,
    "num_heads": 16,
    "num_encoder_layers": 12,
    "num_decoder_layers": 12,
    "mlp_dim": 4096,
    "num_positions": 1024,
    "scale_embedding": False,
    "logits_via_embedding": True,
}
_OTHER_SIZES = {"marian": {"vocab_size": 58101}, "m2m_100": {"vocab_size": 128112}}


class _Kind(NamedTuple):
    """What sets a class of models apart.

    Attributes:
      norm_place, embedding_norm, logits_bias: as in `BartConfig`.
      make_positions: `(numbers of rows, D, id of padding)` -> these rows of the table where the
        file has none; None: the file's, without its first two rows.
      activation: the default of config.json.
      stores_positions: whether a file may have a table; M2M-100's class always makes its own.
    """

    norm_place: str
    embedding_norm: bool
    logits_bias: bool
    make_positions: Callable[[np.ndarray, int, int], np.ndarray] | None
    activation: str = "gelu"
    stores_positions: bool = True


def _make_halves(rows: np.ndarray, width: int, pad: int) -> np.ndarray:
    """Returns the sines of Marian and Pegasus and, after them, the cosines."""
    angles = rows[:, None] / np.power(10000, 2 * np.arange(-(-width // 2)) / width)
    return np.concatenate([np.sin(angles), np.cos(angles[:, : width // 2])], axis=1)


def _make_m2m(rows: np.ndarray, width: int, pad: int) -> np.ndarray:
    """Returns the sines and cosines of M2M-100, whose first row comes after that of padding."""
    half = width // 2
    step = np.float32(-np.log(10000) / max(half - 1, 1))
    steps = np.exp(np.arange(half, dtype=np.float32) * step)
    angles = (rows + (pad + 1)).astype(np.float32)[:, None] * steps
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.pad(table, ((0, 0), (0, width % 2)))


_KINDS = {
    "bart": _Kind("post", True, True, None),
    "mbart": _Kind("pre", True, True, None),
    "marian": _Kind("post", False, True, _make_halves),
    "pegasus": _Kind("pre", False, True, _make_halves),
    "m2m_100": _Kind("pre", False, False, _make_m2m, "relu", stores_positions=False),
}


def open_model(
    folder: AnyPath, options: dict, tensors: Parameters
) -> tuple[BartConfig, Parameters]:
    """Returns the configuration that config.json gives, and the tensors by our names."""
    path, tensors = folder / "config.json", _shorten_names(folder, tensors)
    config = _read_config(path, resolve_aliases(options, _ALIASES))
    if config.shares_vocabulary and not config.logits_via_embedding:
        config, tensors = _choose_embeddings(config, tensors)
    return config, _rename_tensors(folder, config, options, tensors)


def check_start(path: AnyPath, options: dict, start: int, config: BartConfig) -> None:
    """Raises ValueError if outputs of an M2M-100 start with padding, to which it gives no position.

    Its class computes positions from ids, and others with a cache than without one.
    """
    if options["model_type"] == "m2m_100" and start == config.pad_id:
        expected = "another id than pad_token_id, which has no position in M2M-100"
        raise mismatch_error(f"{path}: decoder_start_token_id", str(start), expected)


def _read_config(path: AnyPath, options: dict) -> BartConfig:
    kind = _KINDS[options["model_type"]]
    defaults = _DEFAULTS | _OTHER_SIZES.get(options["model_type"], {})
    defaults["scale_embedding"] = options["model_type"] == "m2m_100"
    fields: dict[str, Any] = read_fields(options, _FIELDS, defaults)
    for name, value in read_fields(options, _SAME_FIELDS, defaults).items():
        if value != fields[name]:
            expected = f"{_FIELDS[name]} = {quote_value(fields[name])}"
            raise mismatch_error(f"{path}: {_SAME_FIELDS[name]}", quote_value(value), expected)
    if not _shares_embedding(path, options):
        fields["encoder_vocab_size"] = fields["vocab_size"]
        fields["vocab_size"] = options.get("decoder_vocab_size") or fields["vocab_size"]
    name = "activation_function"
    fields |= dict(
        mlp_activation=choose_value(path, options, name, kind.activation, _ACTIVATIONS),
        norm_place=kind.norm_place,
        embedding_norm=kind.embedding_norm,
        logits_bias=kind.logits_bias,
    )
    return build(BartConfig, fields, path, _FIELDS)


def make_options(config: BartConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a config.json for `config`: the inverse of what `open_model` reads.

    Raises:
      ValueError: Hugging Face has no such model.
    """
    kind = _find_kind(config)
    names = [name for name, known in _ACTIVATIONS.items() if known == config.mlp_activation]
    if not names:
        expected = f"one of {', '.join(dict.fromkeys(_ACTIVATIONS.values()))}"
        got = f"'huggingface' for the activation {config.mlp_activation!r}"
        raise mismatch_error("format", got, expected)
    options = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        "is_encoder_decoder": True,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        **{theirs: getattr(config, ours) for ours, theirs in _SAME_FIELDS.items()},
        "vocab_size": config.input_vocab_size,
        "activation_function": names[0],
        "dropout": config.dropout_rate,
        "torch_dtype": dtype,
    }
    if kind == "marian":
        options["share_encoder_decoder_embeddings"] = config.shares_vocabulary
        options["decoder_vocab_size"] = config.vocab_size
    return options


def _find_kind(config: BartConfig) -> str:
    """Returns the `model_type` of a model; raises ValueError if Hugging Face has none for it."""
    if config.separate_embeddings and config.logits_via_embedding:
        expected = "a head of its own, beside which transformers ties no embedding to another"
        raise mismatch_error("format", "'huggingface' for separate_embeddings", expected)
    for name, kind in _KINDS.items():
        parts = kind.norm_place, kind.embedding_norm, kind.logits_bias
        if parts == (config.norm_place, config.embedding_norm, config.logits_bias):
            if config.shares_vocabulary or name == "marian":
                return name
    fields = "norm_place", "embedding_norm", "logits_bias", "encoder_vocab_size"
    got = ", ".join(f"{name}={getattr(config, name)!r}" for name in fields)
    expected = f"those of one of {', '.join(_KINDS)}"
    raise mismatch_error("format", f"'huggingface' for {got}", expected)


def _shares_embedding(path: AnyPath, options: dict) -> bool:
    """Returns whether encoder and decoder have one embedding; only a Marian may have two."""
    name = "share_encoder_decoder_embeddings"
    shares = options.get(name, True)
    known = (True, False) if options["model_type"] == "marian" else (True,)
    if shares not in known or not isinstance(shares, bool):
        expected = " or ".join("true" if one else "false" for one in known)
        raise mismatch_error(f"{path}: {name}", quote_value(shares), expected)
    return shares


# All tensors of an embedding that is tied; the first that is there is read.
_ENCODER, _DECODER = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
_SHARED = "shared.weight"
_EMBEDDINGS = (_SHARED, _ENCODER, _DECODER)
_HEAD, _BIAS, _POSITIONS = "lm_head.weight", "final_logits_bias", "embed_positions.weight"
# What old files hold beside the parameters: numbers of versions, and M2M-100's own table.
_UNUSED = re.compile(r"(encoder|decoder)\.(version|embed_positions\.(weights|_float_tensor))")
_BLOCKS = {
    "attention": "self_attn",
    "self_attention": "self_attn",
    "encoder_decoder_attention": "encoder_attn",
    "attention_layer_norm": "self_attn_layer_norm",
    "self_attention_layer_norm": "self_attn_layer_norm",
    "cross_attention_layer_norm": "encoder_attn_layer_norm",
    "mlp_layer_norm": "final_layer_norm",
    "embedding_norm": "layernorm_embedding",
    "encoder_norm": "layer_norm",
    "decoder_norm": "layer_norm",
    "wi": "fc1",
    "wo": "fc2",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
}


def tensor_name(name: str) -> str:
    """Returns Hugging Face's name, without `model.`, of our parameter `name` of a stack.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `decoder.layers.3.fc2.weight`.
    """
    stack, *places, last = name.split("/")
    names = [stack]
    for place in places:
        if place.startswith("layers_"):
            names += ["layers", place.removeprefix("layers_")]
        elif place != "mlp":
            names.append(_BLOCKS[place.removeprefix("pre_").removeprefix("post_")])
    return ".".join([*names, "bias" if last == "bias" else "weight"])


def _shorten_names(folder: AnyPath, given: Parameters) -> Parameters:
    """Returns the tensors by their names without `model.`, and without those that are not used."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in given.items()}
    if len(tensors) < len(given):
        twice = next(name for name in tensors if name in given and f"model.{name}" in given)
        raise mismatch_error(
            folder, f"two tensors that are {twice}, with and without model.", "one"
        )
    return {name: tensor for name, tensor in tensors.items() if not _UNUSED.fullmatch(name)}


def _choose_embeddings(config: BartConfig, given: Parameters) -> tuple[BartConfig, Parameters]:
    """Returns the configuration and tensors of a model with a head of its own.

    transformers 5 then ties no embedding to another, and uses those of the stacks. Earlier versions
    have one, which a file holds under any of the names.
    """
    tensors = {name: tensor for name, tensor in given.items() if name not in _EMBEDDINGS}
    kept = [given[name] for name in (_ENCODER, *_EMBEDDINGS) if name in given]
    if not kept:
        return config, tensors
    encoder, decoder = kept[0], given.get(_DECODER, given.get(_SHARED, kept[0]))
    tensors[_DECODER] = decoder
    if not is_same_tensor(encoder, decoder):
        tensors[_ENCODER] = encoder
        config = config.replace(separate_embeddings=True)
    return config, tensors


def _rename_tensors(
    folder: AnyPath, config: BartConfig, options: dict, given: Parameters
) -> Parameters:
    """Returns the tensors by our names; unknown ones keep theirs."""
    tensors = dict(given)
    renamed: Parameters = {}
    known: tuple[str, ...] = _EMBEDDINGS
    if config.block_options().separate_embeddings:
        known = (_DECODER,)
        if _ENCODER in tensors:
            renamed["encoder_embedder/embedding"] = tensors.pop(_ENCODER)
    tied = (*known, _HEAD) if config.logits_via_embedding else known
    copies = {name: tensors.pop(name) for name in tied if name in tensors}
    for name, tensor in copies.items():
        if not is_same_tensor(tensor, renamed.setdefault("token_embedder/embedding", tensor)):
            raise mismatch_error(f"{folder}: {name}", "another embedding", next(iter(copies)))
    for name in parameter_shapes(config):
        if name == "decoder/logits_bias":
            renamed[name] = _read_bias(config, tensors)
        elif name.endswith("position_embedder/embedding"):
            renamed |= _read_positions(name, config, options, tensors)
        elif name not in ("token_embedder/embedding", "encoder_embedder/embedding"):
            theirs = _HEAD if name == "decoder/logits_dense/kernel" else tensor_name(name)
            if (found := tensors.pop(theirs, None)) is not None:
                renamed[name] = found.transposed() if name.endswith("/kernel") else found
    return renamed | tensors


def _read_bias(config: BartConfig, tensors: Parameters) -> StoredTensor:
    """Returns the bias of the logits, stored as one row, or zeros where the file has none."""
    shape, row = (config.vocab_size,), tensors.pop(_BIAS, None)
    if row is None:
        return StoredTensor.from_function(shape, lambda dtype: np.zeros(shape, dtype), "float32")
    return _take(row, 0, shape) if row.shape == (1, *shape) else row


def _read_positions(
    name: str, config: BartConfig, options: dict, tensors: Parameters
) -> Parameters:
    """Returns a stack's table of positions by our name: the file's, or what a formula makes."""
    shape = config.num_positions, config.emb_dim
    make = _KINDS[options["model_type"]].make_positions
    table = tensors.pop(f"{name.split('/')[0]}.{_POSITIONS}", None)
    if table is None and make is not None:

        def make_rows(start: int, stop: int) -> np.ndarray:
            return make(np.arange(start, stop), config.emb_dim, config.pad_id)

        # By blocks: the angles of a whole table, in float64, would take five times its memory.
        def read(dtype: np.dtype, transpose: bool) -> np.ndarray:
            return fill_rows(shape, make_rows, dtype, transpose)

        return {name: StoredTensor(shape, read, "float32")}
    if table is not None and make is None and table.shape == (shape[0] + 2, shape[1]):
        table = _take(table, slice(2, None), shape)
    return {} if table is None else {name: table}


def _take(tensor: StoredTensor, rows: int | slice, shape: tuple[int, ...]) -> StoredTensor:
    """Returns a part of a tensor, which is read whole for it."""
    return StoredTensor.from_function(shape, lambda dtype: tensor.load(dtype)[rows], tensor.dtype)


def rename_parameters(parameters: Parameters, config: BartConfig) -> Parameters:
    """Returns our parameters as Hugging Face's tensors, by their names.

    Raises:
      ValueError: a table of positions is not the one that Hugging Face's class makes.
    """
    kind, renamed = _KINDS[_find_kind(config)], {}
    for name, tensor in parameters.items():
        if name == "decoder/logits_bias":
            renamed[_BIAS] = _write_bias(tensor)
        elif name == "decoder/logits_dense/kernel":
            renamed[_HEAD] = tensor.transposed()
        elif name == "encoder_embedder/embedding":
            renamed[f"model.{_ENCODER}"] = tensor
        elif name == "token_embedder/embedding":
            renamed |= {f"model.{theirs}": tensor for theirs in _list_embeddings(config)}
        elif not name.endswith("position_embedder/embedding"):
            turned = tensor.transposed() if name.endswith("/kernel") else tensor
            renamed[f"model.{tensor_name(name)}"] = turned
        elif not kind.stores_positions:
            _check_positions(name, tensor, config, kind)
        else:
            stored = _add_rows(tensor) if kind.make_positions is None else tensor
            renamed[f"model.{name.split('/')[0]}.{_POSITIONS}"] = stored
    return renamed


def _list_embeddings(config: BartConfig) -> tuple[str, ...]:
    """Returns the tensors that hold the decoder's embedding.

    Where the head is not tied to the embedding, transformers does not tie the stacks' to each other
    either.
    """
    if not config.shares_vocabulary:
        return (_DECODER,)
    if config.separate_embeddings:
        return (_SHARED, _DECODER)  # the shared one is in the files, although nothing uses it
    return (_SHARED,) if config.logits_via_embedding else _EMBEDDINGS


def _write_bias(bias: StoredTensor) -> StoredTensor:
    """Returns the bias of the logits as one row."""
    return StoredTensor.from_function(
        (1, *bias.shape), lambda dtype: bias.load(dtype)[None], bias.dtype
    )


def _add_rows(table: StoredTensor) -> StoredTensor:
    """Returns a table of positions after the two rows that BART and mBART do not use."""
    shape = (table.shape[0] + 2, table.shape[1])

    def make(dtype: np.dtype) -> np.ndarray:
        return np.concatenate([np.zeros((2, shape[1]), dtype), table.load(dtype)])

    return StoredTensor.from_function(shape, make, table.dtype)


def _check_positions(name: str, table: StoredTensor, config: BartConfig, kind: _Kind) -> None:
    """Raises ValueError unless a table of positions is the one that the class's formula makes."""
    assert kind.make_positions is not None
    made = kind.make_positions(np.arange(config.num_positions), config.emb_dim, config.pad_id)
    # Processors differ in the last bits of sines; bfloat16 and float16 round them.
    most = 2**-8 if table.dtype == "bfloat16" else 2**-10
    if not np.abs(table.load("float32") - made).max() <= most:
        got = f"'huggingface' for an M2M-100 whose {name} was trained or rounded"
        expected = "the sines of the class, which are not stored there, or 'specdec'"
        raise mismatch_error("format", got, expected)
