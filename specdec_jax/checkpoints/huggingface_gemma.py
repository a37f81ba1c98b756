"""Hugging Face's Gemma 2 and T5Gemma: config.json and the names of tensors; read only."""

import pathlib
import re
from typing import Any

from specdec_jax.checkpoints.huggingface_config import check_fixed, choose_value, read_fields
from specdec_jax.checkpoints.stored_tensor import Parameters, is_same_tensor
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.config_validation import build
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.parameters import parameter_shapes

ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "t5gemma": ("T5GemmaForConditionalGeneration",),
}
START = "decoder_start_token_id", "bos_token_id"
NO_START: tuple[int, ...] = (2,)  # where no file says
_IDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
SPECIAL_IDS = dict.fromkeys(ARCHITECTURES, _IDS)  # where config.json does not say
NO_EOS: tuple[int, ...] = ()  # what `"eos_token_id": null` means: nothing ends a sequence
# "gelu" alone is the exact form.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu", "silu": "silu"}
# Options that are not supported, with the only value that is.
_FIXED = {"rms_norm_eps": 1e-6, "attention_bias": False, "rope_scaling": None}
_FIELDS = {
    "vocab_size": "vocab_size",
    "emb_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "num_decoder_layers": "num_hidden_layers",
    "mlp_dim": "intermediate_size",
    "query_scalar": "query_pre_attn_scalar",
}
# The classes' own defaults, those of the 2B.
_DEFAULTS = {
    "vocab_size": 256_000,
    "emb_dim": 2304,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 256,
    "num_decoder_layers": 26,
    "mlp_dim": 9216,
    "query_scalar": 256,
}
_CAPS = {
    "attention_cap": ("attn_logit_softcapping", 50.0),
    "logits_cap": ("final_logit_softcapping", 30.0),
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# What an encoder may have of its own.
_OWN = "emb_dim", "mlp_dim", "num_heads", "num_kv_heads", "windows"


def open_model(
    folder: pathlib.Path, options: dict, tensors: Parameters
) -> tuple[GemmaConfig, Parameters]:
    """Returns the configuration that config.json gives, and the tensors by our names."""
    path, tied = folder / "config.json", options.get("tie_word_embeddings", True)
    if options["model_type"] == "t5gemma":
        stacks = [_nested(path, options, name) for name in ("encoder", "decoder")]
        encoder, decoder = (_read_stack(path, stack) for stack in stacks)
        for name, value in encoder.items():
            if name not in (*_OWN, "num_decoder_layers") and value != decoder[name]:
                expected = f"the decoder's, {quote_value(decoder[name])}"
                raise mismatch_error(f"{path}: encoder: {name}", quote_value(value), expected)
        fields = decoder | {f"encoder_{name}": encoder[name] for name in _OWN}
        fields["num_encoder_layers"] = encoder["num_decoder_layers"]
        shape: type[GemmaConfig] = T5GemmaConfig
    else:
        fields, shape = _read_stack(path, options), GemmaConfig
    config = build(shape, fields | {"logits_via_embedding": tied}, path, _FIELDS)
    return config, _rename_tensors(folder, config, tensors)


def _nested(path: pathlib.Path, options: dict, name: str) -> dict:
    """Returns the part of config.json that describes a stack."""
    if not isinstance(stack := options.get(name, {}), dict):
        raise mismatch_error(f"{path}: {name}", quote_value(stack), "an object")
    return stack


def _read_stack(path: pathlib.Path, options: dict) -> dict[str, Any]:
    """Returns the fields that describe a decoder or, by the same names, an encoder."""
    check_fixed(path, options, _FIXED)
    if options.get("use_bidirectional_attention"):
        raise mismatch_error(f"{path}: use_bidirectional_attention", "true", "false")
    fields = read_fields(options, _FIELDS, _DEFAULTS)
    for name, (theirs, default) in _CAPS.items():
        fields[name] = options.get(theirs, default)
    name = "hidden_activation"
    activation = choose_value(path, options, name, "gelu_pytorch_tanh", _ACTIVATIONS)
    return fields | dict(
        mlp_activation=activation,
        rotary_base=_read_base(path, options),
        windows=_read_windows(path, options, fields["num_decoder_layers"]),
    )


def _read_base(path: pathlib.Path, options: dict) -> Any:
    """Returns θ of the rotary positions."""
    rope = options.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, dict) else rope
    if kind != "default":
        raise mismatch_error(f"{path}: rope_parameters", quote_value(kind), "rope_type 'default'")
    return rope.get("rope_theta", options.get("rope_theta", 10_000.0))


def _read_windows(path: pathlib.Path, options: dict, layers: Any) -> tuple[int, ...]:
    """Returns the windows of the layers, as few as say it: after the last, the first again."""
    kinds, window = options.get("layer_types"), options.get("sliding_window", 4096)
    if kinds is None:
        kinds = [_SLIDING, _FULL]  # in turn
    elif not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {_SLIDING, _FULL}:
        expected = f"{layers} of {_SLIDING} and {_FULL}"
        raise mismatch_error(f"{path}: layer_types", quote_value(kinds), expected)
    if _SLIDING in kinds and (type(window) is not int or window < 1):
        raise mismatch_error(f"{path}: sliding_window", quote_value(window), "at least 1")
    windows = [window if kind == _SLIDING else 0 for kind in kinds]
    count = len(windows)
    repeats = (n for n in range(1, count) if windows[n:] == windows[:-n])
    return tuple(windows[: next(repeats, count)])


_HEADS = "lm_head.weight", "lm_head.out_proj.weight"
_UNUSED = re.compile(r".*rotary_emb\.inv_freq")
_PARTS = {
    "decoder_norm": "norm",
    "encoder_norm": "norm",
    "encoder_decoder_attention": "cross_attn",
    "grouped_attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "wi_0": "gate_proj",
    "wi_1": "up_proj",
    "wo": "down_proj",
    "token_embedder": "embed_tokens",
    "encoder_embedder": "embed_tokens",
}
# The norm before a block, and the one after it, which lies in the block.
_NORMS = {
    "pre_attention_layer_norm": "pre_self_attn_layernorm",
    "pre_self_attention_layer_norm": "pre_self_attn_layernorm",
    "pre_cross_attention_layer_norm": "pre_cross_attn_layernorm",
    "pre_mlp_layer_norm": "pre_feedforward_layernorm",
    "grouped_attention/output_norm": "post_self_attn_layernorm",
    "encoder_decoder_attention/output_norm": "post_cross_attn_layernorm",
    "mlp/output_norm": "post_feedforward_layernorm",
}
# What Gemma 2, which has no cross-attention, calls two of them.
_GEMMA = {
    "pre_self_attn_layernorm": "input_layernorm",
    "post_self_attn_layernorm": "post_attention_layernorm",
}


def tensor_name(name: str, decoder_only: bool) -> str:
    """Returns Hugging Face's name, without `model.`, of our parameter `name`.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `decoder.layers.3.mlp.down_proj.weight`, without
    `decoder.` where there is no encoder.
    """
    if name == "decoder/logits_dense/kernel":
        return _HEADS[not decoder_only]
    stack, *places = name.rpartition("/")[0].split("/")
    if not places:
        stack, places = ("encoder" if stack == "encoder_embedder" else "decoder"), [stack]
    names = [] if decoder_only else [stack]
    if places[0].startswith("layers_"):
        names += ["layers", places.pop(0).removeprefix("layers_")]
    if (norm := _NORMS.get("/".join(places))) is not None:
        names.append(_GEMMA.get(norm, norm) if decoder_only else norm)
    else:
        names += [_PARTS.get(place, place) for place in places]
    return ".".join([*names, "weight"])


def _rename_tensors(folder: pathlib.Path, config: GemmaConfig, given: Parameters) -> Parameters:
    """Returns the tensors by our names; unknown ones keep theirs."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in given.items()}
    if len(tensors) < len(given):
        twice = next(name for name in tensors if name in given and f"model.{name}" in given)
        got = f"two tensors that are {twice}, with and without model."
        raise mismatch_error(folder, got, "one")
    renamed = {}
    for name in parameter_shapes(config):
        if (found := tensors.pop(tensor_name(name, config.decoder_only), None)) is not None:
            renamed[name] = found.transposed() if name.endswith("/kernel") else found
    head = tensors.pop(_HEADS[not config.decoder_only], None)
    if head is not None:  # the embedding's copy, or all that the file holds of the two
        embedding = renamed.setdefault("token_embedder/embedding", head)
        if not is_same_tensor(head, embedding):
            expected = "the embedding, or tie_word_embeddings false"
            raise mismatch_error(
                f"{folder}: {_HEADS[not config.decoder_only]}", "another", expected
            )
    return renamed | {name: it for name, it in tensors.items() if not _UNUSED.fullmatch(name)}
