"""Hugging Face's GPT-2: config.json and the names of tensors."""

import re
from typing import Any

from specdec_jax.checkpoints.huggingface_config import (
    check_fixed,
    choose_value,
    read_fields,
    resolve_aliases,
)
from specdec_jax.checkpoints.stored_tensor import Parameters, is_same_tensor
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models.config_validation import build
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.parameters import parameter_shapes

ARCHITECTURES = {"gpt2": ("GPT2LMHeadModel", "GPT2Model")}
START = ("bos_token_id",)
_END = 50256  # <|endoftext|>
NO_START = (0,)  # where no file says
# Where config.json does not say.
SPECIAL_IDS = {"gpt2": {"bos_token_id": _END, "eos_token_id": _END}}
NO_EOS: tuple[int, ...] = ()  # what `"eos_token_id": null` means: nothing ends a sequence
_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
# Options of a GPT-2 that are not supported, with the only value that is.
_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
}
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "emb_dim": "n_embd",
    "num_heads": "n_head",
    "num_decoder_layers": "n_layer",
    "mlp_dim": "n_inner",
    "num_positions": "n_positions",
    "logits_via_embedding": "tie_word_embeddings",
}


def open_model(folder: AnyPath, options: dict, tensors: Parameters) -> tuple[GPTConfig, Parameters]:
    """Returns the configuration that config.json gives, and the tensors by our names."""
    config = _read_config(folder, resolve_aliases(options, _ALIASES))
    return config, _rename_tensors(tensors, config, folder)


def _read_config(folder: AnyPath, options: dict) -> GPTConfig:
    path, width = folder / "config.json", options.get("n_embd")
    width = 768 if width is None else width
    check_fixed(path, options, _FIXED)
    defaults = {
        "vocab_size": 50257,
        "emb_dim": width,
        "num_heads": 12,
        "num_decoder_layers": 12,
        "num_positions": 1024,
        "mlp_dim": 4 * width if isinstance(width, int) else None,
        "logits_via_embedding": True,
    }
    fields = read_fields(options, _FIELDS, defaults)
    name = "activation_function"
    fields["mlp_activation"] = choose_value(path, options, name, "gelu_new", _ACTIVATIONS)
    return build(GPTConfig, fields, path, _FIELDS)


def make_options(config: GPTConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a config.json for `config`: the inverse of what `open_model` reads.

    Raises:
      ValueError: Hugging Face has no such model.
    """
    names = [name for name, known in _ACTIVATIONS.items() if known == config.mlp_activation]
    if not names:
        expected = f"one of {', '.join(_ACTIVATIONS.values())}"
        got = f"'huggingface' for the activation {config.mlp_activation!r}"
        raise mismatch_error("format", got, expected)
    return {
        "model_type": "gpt2",
        "architectures": [ARCHITECTURES["gpt2"][0]],
        "torch_dtype": dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "activation_function": names[0],
        **_FIXED,
    }


_HEAD = "decoder/logits_dense/kernel"
_PLACES = {
    "token_embedder": "wte",
    "decoder/position_embedder": "wpe",
    "decoder/decoder_norm": "ln_f",
    "pre_self_attention_layer_norm": "ln_1",
    "causal_attention/qkv": "attn.c_attn",
    "causal_attention/out": "attn.c_proj",
    "pre_mlp_layer_norm": "ln_2",
    "mlp/wi": "mlp.c_fc",
    "mlp/wo": "mlp.c_proj",
}


def tensor_name(name: str) -> str:
    """Returns Hugging Face's name of our parameter `name`.

    All tensors but the head's may also have the prefix `transformer.`, which is left out here.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `h.3.mlp.c_proj.weight`.
    """
    if name == _HEAD:
        return "lm_head.weight"
    place, last = name.rsplit("/", 1)
    last = "bias" if last == "bias" else "weight"
    if place in _PLACES:
        return f"{_PLACES[place]}.{last}"
    _, layer, place = place.split("/", 2)
    return f"h.{layer.removeprefix('layers_')}.{_PLACES[place]}.{last}"


def rename_parameters(parameters: Parameters, config: GPTConfig) -> Parameters:
    """Returns our parameters as Hugging Face's tensors, by their names."""
    renamed = {}
    for name, tensor in parameters.items():
        head = name == _HEAD
        theirs = tensor_name(name) if head else f"transformer.{tensor_name(name)}"
        renamed[theirs] = tensor.transposed() if head else tensor
    return renamed


def _rename_tensors(given: Parameters, config: GPTConfig, folder: AnyPath) -> Parameters:
    """Returns the tensors by our names; unknown ones keep their names.

    Weights other than the head's are `[in, out]` already.
    """
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in given.items()}
    if len(tensors) < len(given):
        twice = next(name for name in tensors if name in given and f"transformer.{name}" in given)
        got = f"two tensors that are {twice}, with and without transformer."
        raise ValueError(f"{folder}: got {got}, expected one")
    renamed = {}
    for name in parameter_shapes(config):
        tensor = tensors.pop(tensor_name(name), None)
        if tensor is not None:
            renamed[name] = tensor.transposed() if name == _HEAD else tensor
    if config.logits_via_embedding and (head := tensors.pop("lm_head.weight", None)) is not None:
        # The embedding's copy, or all that the file holds of the two.
        if not is_same_tensor(head, renamed.setdefault("token_embedder/embedding", head)):
            got = "another tensor than wte.weight"
            expected = "its copy, or tie_word_embeddings false in config.json"
            raise mismatch_error(f"{folder}: lm_head.weight", got, expected)
    # Old files also hold the causal mask of every layer as a tensor.
    masks = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
    return renamed | {name: tensors[name] for name in tensors if not masks.fullmatch(name)}
