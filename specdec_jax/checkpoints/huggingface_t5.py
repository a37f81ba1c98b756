"""Hugging Face's T5, Flan-T5, mT5, umT5, UL2 and ByT5: config.json and names of tensors."""

from typing import Any

from specdec_jax.checkpoints.huggingface_config import (
    check_fixed,
    choose_value,
    read_fields,
    resolve_aliases,
)
from specdec_jax.checkpoints.stored_tensor import Parameters, StoredTensor, is_same_tensor
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.config_validation import build
from specdec_jax.models.parameters import parameter_shapes
from specdec_jax.models.t5 import T5Config

_NAMES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel")
# Architectures by model_type. In umT5 every layer has a position table of its own.
ARCHITECTURES = {"t5": _NAMES, "mt5": _NAMES, "umt5": ("UMT5ForConditionalGeneration",)}
START = ("decoder_start_token_id",)
NO_START = (0,)  # where no file says
SPECIAL_IDS: dict[str, dict[str, int]] = {}  # by model_type, where config.json does not say
NO_EOS = None  # `"eos_token_id": null` leaves open what ends a sequence
# In Hugging Face's names "gelu" alone is the exact form, which no T5 uses; "gated-gelu" is the tanh
# approximation.
_ACTIVATIONS = {
    "relu": ("relu",),
    "gelu_new": ("gelu",),
    "silu": ("silu",),
    "gated-relu": ("relu", "linear"),
    "gated-gelu": ("gelu", "linear"),
    "gated-gelu_new": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
}
# The tensors that may hold the embedding of the encoder, that of the decoder, and a head that is
# tied: as in transformers, the first that is there.
_SHARED, _HEAD = "shared.weight", "lm_head.weight"
_ENCODERS, _DECODERS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
_EMBEDDINGS = {
    "encoder": (_ENCODERS, _SHARED, _DECODERS),
    "decoder": (_DECODERS, _SHARED, _ENCODERS),
    "head": (_HEAD, _SHARED, _ENCODERS, _DECODERS),
}
# A bias that the first T5 checkpoints hold and no implementation uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "head_dim": "d_kv",
}

# What config.json calls the fields of `T5Config`.
_FIELDS = {
    "vocab_size": "vocab_size",
    "emb_dim": "d_model",
    "num_heads": "num_heads",
    "head_dim": "d_kv",
    "num_encoder_layers": "num_layers",
    "num_decoder_layers": "num_decoder_layers",
    "mlp_dim": "d_ff",
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "scale_decoder_outputs": "scale_decoder_outputs",
}


def open_model(folder: AnyPath, options: dict, tensors: Parameters) -> tuple[T5Config, Parameters]:
    """Returns the configuration that config.json and tensors give, and the tensors by our names."""
    places = {
        part: next((name for name in names if name in tensors), _SHARED)
        for part, names in _EMBEDDINGS.items()
    }
    tied = options.get("tie_word_embeddings") is not False  # null is no answer
    if places["decoder"] not in tensors and _HEAD in tensors and tied:
        places = dict.fromkeys(places, _HEAD)  # of the tied tensors, the file holds the head alone
    encoder, decoder, head = (places[part] for part in ("encoder", "decoder", "head"))
    separate_head = head == _HEAD != decoder or not _is_same_tensor(tensors, head, decoder)
    separate_embeddings = not _is_same_tensor(tensors, encoder, decoder)
    config = _read_config(folder, options, separate_head, separate_embeddings)
    return config, _rename_tensors(tensors, config, places)


def _is_same_tensor(tensors: Parameters, name: str, other: str) -> bool:
    return name == other or is_same_tensor(tensors[name], tensors[other])


def _read_config(
    folder: AnyPath, options: dict, separate_head: bool, separate_embeddings: bool
) -> T5Config:
    """Returns config.json as our configuration.

    What is separate is decided by the tensors: transformers 5 calls every T5 tied.
    """
    path, kind = folder / "config.json", options["model_type"]
    if options.get("tie_word_embeddings", True) is None:  # as if it were not there
        options = options | {"tie_word_embeddings": True}
    layers = options.get("num_layers")  # as in transformers, the other name is the encoder's alone
    options = resolve_aliases(options, _ALIASES)
    activation = "relu" if kind == "t5" else "gated-gelu"
    activations = choose_value(path, options, "feed_forward_proj", activation, _ACTIVATIONS)
    activations = _override_activations(path, options, activations)
    check_fixed(path, options, {"layer_norm_epsilon": 1e-6})
    # mT5's reference never scales the decoder's outputs, whatever config.json says (transformers 5
    # always writes that embeddings are tied). umT5's does if it is true, as T5's; in the published
    # checkpoints it is false.
    defaults = {
        "num_decoder_layers": options.get("num_layers") if layers is None else layers,
        "num_buckets": 32,
        "max_distance": 128,
        "scale_decoder_outputs": options.get("tie_word_embeddings", True),
    }
    names = dict(_FIELDS)
    if "scale_decoder_outputs" not in options:
        names["scale_decoder_outputs"] = "tie_word_embeddings"
    fields = read_fields(options, _FIELDS, defaults) | {
        "mlp_activations": activations,
        "logits_via_embedding": not separate_head,
        "relative_bias_per_layer": kind == "umt5",
        "separate_embeddings": separate_embeddings,
    }
    fields |= {"scale_decoder_outputs": False} if kind == "mt5" else {}
    return build(T5Config, fields, path, names)


def _override_activations(
    path: AnyPath, options: dict, activations: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the activations with what `dense_act_fn` and `is_gated_act` say, as transformers."""
    first, *gate = activations
    if options.get("dense_act_fn") is not None:
        known = {name: of[0] for name, of in _ACTIVATIONS.items() if not name.startswith("gated-")}
        first = choose_value(path, options, "dense_act_fn", "", known)
    is_gated = options.get("is_gated_act")
    if is_gated is not None and not isinstance(is_gated, bool):
        raise mismatch_error(f"{path}: is_gated_act", quote_value(is_gated), "true or false")
    is_gated = bool(gate) if is_gated is None else is_gated
    return (first, "linear") if is_gated else (first,)


_FIXED = {
    "token_embedder/embedding": _SHARED,
    "encoder_embedder/embedding": _ENCODERS,
    "decoder/logits_dense/kernel": _HEAD,
}
# The blocks of a layer, whose norms have names of ours, by Hugging Face's number of them.
_NORMS = {
    "pre_attention_layer_norm": 0,
    "pre_self_attention_layer_norm": 0,
    "pre_cross_attention_layer_norm": 1,
}
_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


def tensor_name(name: str) -> str:
    """Returns Hugging Face's name of our parameter `name`.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `decoder.block.3.layer.2.DenseReluDense.wo.weight`.
    """
    if name in _FIXED:
        return _FIXED[name]
    stack, *path = name.split("/")
    if path[-2] == "relpos_bias":
        # T5 has one table, in its first layer; umT5 has one in every layer.
        layer = 0 if path[0] == "relpos_bias" else path[0].removeprefix("layers_")
        return f"{stack}.block.{layer}.layer.0.SelfAttention.relative_attention_bias.weight"
    if path[0].endswith("_norm"):
        return f"{stack}.final_layer_norm.weight"
    block = f"{stack}.block.{path[0].removeprefix('layers_')}.layer"
    mlp = 1 if stack == "encoder" else 2
    if path[1].endswith("layer_norm"):
        return f"{block}.{_NORMS.get(path[1], mlp)}.layer_norm.weight"
    if path[1] == "mlp":
        return f"{block}.{mlp}.DenseReluDense.{path[2]}.weight"
    sublayer = "1.EncDecAttention" if path[1] == "encoder_decoder_attention" else "0.SelfAttention"
    return f"{block}.{sublayer}.{_ATTENTION[path[2]]}.weight"


def _transpose_weight(name: str, tensor: StoredTensor) -> StoredTensor:
    """Returns our parameter `name`, transposed if Hugging Face keeps it `[out, in]`; or back."""
    return tensor.transposed() if name.endswith(("/kernel", "/rel_embedding")) else tensor


def _rename_tensors(tensors: Parameters, config: T5Config, places: dict[str, str]) -> Parameters:
    """Returns Hugging Face's tensors by our names; those that no such T5 has keep their names.

    `places` are the tensors that are the "encoder"'s and the "decoder"'s embedding, and the "head".
    """
    special = {
        "token_embedder/embedding": places["decoder"],
        "encoder_embedder/embedding": places["encoder"],
        "decoder/logits_dense/kernel": places["head"],
    }
    renamed, used = {}, {_SHARED, _ENCODERS, _DECODERS, _UNUSED}
    for name in parameter_shapes(config):
        theirs = special.get(name) or tensor_name(name)
        used.add(theirs)
        if theirs in tensors:
            renamed[name] = _transpose_weight(name, tensors[theirs])
    return renamed | {name: tensor for name, tensor in tensors.items() if name not in used}


def rename_parameters(parameters: Parameters, config: T5Config) -> Parameters:
    """Returns our parameters as Hugging Face's tensors, by their names."""
    return {tensor_name(name): _transpose_weight(name, it) for name, it in parameters.items()}


def make_options(config: T5Config, dtype: str) -> dict[str, Any]:
    """Returns the contents of a config.json for `config`: the inverse of `_read_config`.

    Raises:
      ValueError: Hugging Face's T5 has no name for the feed-forward block.
    """
    names = [name for name, known in _ACTIVATIONS.items() if known == config.mlp_activations]
    if not names:
        blocks = ", ".join(map(str, dict.fromkeys(_ACTIVATIONS.values())))
        got = f"mlp_activations: got {config.mlp_activations}"
        raise ValueError(f"{got}, expected one of {blocks} for Hugging Face")
    kind = "umt5" if config.relative_bias_per_layer else "t5"
    # transformers builds the network by `num_decoder_layers`, but its caches by `decoder_layers`,
    # or by `num_layers` if that is missing.
    return {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind][0]],
        "is_encoder_decoder": True,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "decoder_layers": config.num_decoder_layers,
        "feed_forward_proj": names[0],
        "tie_word_embeddings": config.logits_via_embedding,
        "scale_decoder_outputs": config.scales_outputs,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": config.dropout_rate,
        "torch_dtype": dtype,
    }
