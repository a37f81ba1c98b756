"""Hugging Face folders of T5 1.0, 1.1, Flan-T5, mT5, UL2, ByT5 and GPT-2: config.json, tensors, tokenizer."""

import json
import pathlib
import re
from typing import Any

from specdec_jax.checkpoints import flax_msgpack, huggingface_tokenizers, safetensors_files
from specdec_jax.checkpoints.huggingface_tokenizers import first, optional
from specdec_jax.checkpoints.leaves import Checkpoint, Leaf, Track
from specdec_jax.files import reading
from specdec_jax.files.writing import write_file
from specdec_jax.models.fields import build
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.network import ModelConfig
from specdec_jax.models.parameters import parameter_shapes
from specdec_jax.models.t5 import T5Config
from specdec_jax.models.vocabularies import ByteVocabulary, SentencePieceVocabulary, TokenizerJsonVocabulary, Vocabulary

_T5_ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel")
# Those of every model_type.
_ARCHITECTURES = {"t5": _T5_ARCHITECTURES, "mt5": _T5_ARCHITECTURES, "gpt2": ("GPT2LMHeadModel", "GPT2Model")}
# "gelu" alone means the exact form there, which no T5 uses; "gated-gelu" means the tanh approximation.
_ACTIVATIONS = {
    "relu": ("relu",), "gelu_new": ("gelu",), "silu": ("silu",), "gated-relu": ("relu", "linear"),
    "gated-gelu": ("gelu", "linear"), "gated-gelu_new": ("gelu", "linear"), "gated-silu": ("silu", "linear"),
}  # fmt: skip
_GPT_ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "silu": "silu"}
_GPT_END = 50256  # <|endoftext|>, where config.json does not say
# What a GPT-2 may be configured to and is not here, with the value that is.
_GPT_FIXED = {
    "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False, "add_cross_attention": False,
}  # fmt: skip
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A bias that the first T5 checkpoints hold and no implementation uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def is_folder(folder: pathlib.Path) -> bool:
    """Whether `folder` looks like one: a config.json, or weights in a file of Hugging Face's name."""
    names = (
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "flax_model.msgpack",
        "pytorch_model.bin",
    )
    return any((folder / name).exists() for name in names)


def open_folder(folder: pathlib.Path) -> Checkpoint:
    """Opens a Hugging Face folder without reading its parameters.

    Raises:
      ValueError: no weights in a readable format, an unknown architecture, or damaged files.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder}: got no config.json, expected one beside the weights")
    options, generation = reading.read_json(folder / "config.json"), optional(folder / "generation_config.json")
    _check_architecture(folder, options)
    tensors = _open_tensors(folder)
    is_gpt = options["model_type"] == "gpt2"
    config: ModelConfig
    if is_gpt:
        options = {"bos_token_id": _GPT_END, "eos_token_id": _GPT_END} | options
        gpt = _gpt_config(folder, options)
        config, leaves = gpt, _gpt_by_our_names(tensors, gpt)
    else:
        t5 = _config(folder, options, separate_head="lm_head.weight" in tensors)
        config, leaves = t5, _by_our_names(tensors, t5)
    start = _ids(folder, generation, options, "bos_token_id" if is_gpt else "decoder_start_token_id") or (0,)
    if len(start) > 1:
        raise ValueError(f"{folder / 'config.json'}: got the start tokens {reading.shown(start)}, expected one")
    eos_ids = _ids(folder, generation, options, "eos_token_id")
    if eos_ids is None and is_gpt:
        eos_ids = ()  # null: nothing ends a sequence
    return Checkpoint(config, leaves, huggingface_tokenizers.open_folder(folder, eos_ids or ()), start[0], eos_ids)


def _ids(folder: pathlib.Path, generation: dict, options: dict, name: str) -> tuple[int, ...] | None:
    """The id or ids that generation_config.json, or else config.json, says."""
    file = "config.json" if generation.get(name) is None else "generation_config.json"
    found = first(generation.get(name), options.get(name))
    ids = found if found is None or isinstance(found, list) else [found]
    if ids is not None and not all(type(i) is int for i in ids):
        raise ValueError(f"{folder / file}: {name}: got {reading.shown(found)}, expected an integer")
    return None if ids is None else tuple(ids)


def _check_architecture(folder: pathlib.Path, options: dict) -> None:
    kind, architectures = options.get("model_type"), options.get("architectures") or []
    known = _ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None or not isinstance(architectures, list) or any(name not in known for name in architectures):
        got = f"model_type {reading.shown(kind)} with architectures {reading.shown(architectures)}"
        expected = "; ".join(f"{kind} with {' or '.join(names)}" for kind, names in _ARCHITECTURES.items())
        raise ValueError(f"{folder / 'config.json'}: unknown architecture: got {got}, expected {expected}")


def _open_tensors(folder: pathlib.Path) -> dict[str, Leaf]:
    if (folder / "model.safetensors").exists() or (folder / "model.safetensors.index.json").exists():
        return safetensors_files.open_folder(folder)
    if (folder / "flax_model.msgpack").exists():
        return _from_flax(flax_msgpack.open_file(folder / "flax_model.msgpack"))
    if (folder / "pytorch_model.bin").exists() or (folder / "pytorch_model.bin.index.json").exists():
        raise ValueError(
            f"{folder}: got pytorch_model.bin only, expected model.safetensors; convert with transformers: "
            "AutoModelForSeq2SeqLM (GPT-2: AutoModelForCausalLM).from_pretrained(folder).save_pretrained(new_folder)"
        )
    raise ValueError(f"{folder}: got no weights, expected model.safetensors, its shards, or flax_model.msgpack")


def _from_flax(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    """Flax's names and `[in, out]` kernels as PyTorch's, so that one mapping serves both."""
    tensors = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        leaf = leaf.transposed() if last == "kernel" else leaf
        tensors[".".join([*parents, "bias" if last == "bias" else "weight"])] = leaf
    return tensors


# What config.json calls the fields of our configurations.
_T5_NAMES = {
    "vocab_size": "vocab_size", "emb_dim": "d_model", "num_heads": "num_heads", "head_dim": "d_kv",
    "num_encoder_layers": "num_layers", "num_decoder_layers": "num_decoder_layers", "mlp_dim": "d_ff",
    "num_buckets": "relative_attention_num_buckets", "max_distance": "relative_attention_max_distance",
    "scale_decoder_outputs": "scale_decoder_outputs",
}  # fmt: skip
_GPT_NAMES = {
    "vocab_size": "vocab_size", "emb_dim": "n_embd", "num_heads": "n_head", "num_decoder_layers": "n_layer",
    "mlp_dim": "n_inner", "num_positions": "n_positions", "logits_via_embedding": "tie_word_embeddings",
}  # fmt: skip


def _fields(options: dict, names: dict[str, str], defaults: dict[str, Any]) -> dict[str, Any]:
    """Values of our fields: what config.json says, else the default, else None."""
    return {ours: first(options.get(theirs), defaults.get(ours)) for ours, theirs in names.items()}


def _config(folder: pathlib.Path, options: dict, separate_head: bool) -> T5Config:
    """config.json as ours; what decides on the head is the file (transformers 5 calls every T5 tied)."""
    path, is_mt5 = folder / "config.json", options["model_type"] == "mt5"
    activations = _choice(path, options, "feed_forward_proj", "gated-gelu" if is_mt5 else "relu", _ACTIVATIONS)
    _check_fixed(path, options, {"layer_norm_epsilon": 1e-6})
    # mT5's reference never scales, whatever its tie_word_embeddings says (transformers 5 always writes true).
    defaults = {
        "num_decoder_layers": options.get("num_layers"), "num_buckets": 32, "max_distance": 128,
        "scale_decoder_outputs": not is_mt5 and options.get("tie_word_embeddings", True),
    }  # fmt: skip
    names = _T5_NAMES | ({} if "scale_decoder_outputs" in options else {"scale_decoder_outputs": "tie_word_embeddings"})
    fields = _fields(options, _T5_NAMES, defaults)
    fields |= {"mlp_activations": activations, "logits_via_embedding": not separate_head}
    return build(T5Config, fields, path, names)


def _gpt_config(folder: pathlib.Path, options: dict) -> GPTConfig:
    path, width = folder / "config.json", first(options.get("n_embd"), 768)
    _check_fixed(path, options, _GPT_FIXED)
    defaults = {
        "vocab_size": 50257, "emb_dim": width, "num_heads": 12, "num_decoder_layers": 12, "num_positions": 1024,
        "mlp_dim": 4 * width if isinstance(width, int) else None, "logits_via_embedding": True,
    }  # fmt: skip
    fields = _fields(options, _GPT_NAMES, defaults)
    fields["mlp_activation"] = _choice(path, options, "activation_function", "gelu_new", _GPT_ACTIVATIONS)
    return build(GPTConfig, fields, path, _GPT_NAMES)


def _choice(path: pathlib.Path, options: dict, name: str, default: str, known: dict[str, Any]) -> Any:
    value = options.get(name, default)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{path}: {name}: got {reading.shown(value)}, expected one of {', '.join(known)}")
    return known[value]


def _check_fixed(path: pathlib.Path, options: dict, fixed: dict[str, Any]) -> None:
    for name, expected in fixed.items():
        if options.get(name, expected) != expected:
            raise ValueError(f"{path}: {name}: got {reading.shown(options[name])}, expected {expected!r}")


_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


def tensor_name(name: str) -> str:
    """Hugging Face's name of our parameter `name`.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `decoder.block.3.layer.2.DenseReluDense.wo.weight`.
    """
    fixed = {"token_embedder/embedding": "shared.weight", "decoder/logits_dense/kernel": "lm_head.weight"}
    if name in fixed:
        return fixed[name]
    stack, *path = name.split("/")
    if path[0] == "relpos_bias":
        return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    if path[0].endswith("_norm"):
        return f"{stack}.final_layer_norm.weight"
    block = f"{stack}.block.{path[0].removeprefix('layers_')}.layer"
    mlp = 1 if stack == "encoder" else 2
    norms = {"pre_attention_layer_norm": 0, "pre_self_attention_layer_norm": 0, "pre_cross_attention_layer_norm": 1}
    if path[1].endswith("layer_norm"):
        return f"{block}.{norms.get(path[1], mlp)}.layer_norm.weight"
    if path[1] == "mlp":
        return f"{block}.{mlp}.DenseReluDense.{path[2]}.weight"
    sublayer = "1.EncDecAttention" if path[1] == "encoder_decoder_attention" else "0.SelfAttention"
    return f"{block}.{sublayer}.{_ATTENTION[path[2]]}.weight"


def _turned(name: str, leaf: Leaf) -> Leaf:
    """Their tensor `[out, in]` of our parameter `name` as ours, or ours as theirs."""
    return leaf.transposed() if name.endswith(("/kernel", "/rel_embedding")) else leaf


def _by_our_names(tensors: dict[str, Leaf], config: T5Config) -> dict[str, Leaf]:
    """Tensors `[out, in]` as our leaves; tensors that no T5 of this configuration has keep their own names."""
    embedding = next((name for name in _EMBEDDINGS if name in tensors), _EMBEDDINGS[0])
    leaves, used = {}, {*_EMBEDDINGS, _UNUSED}
    for name in parameter_shapes(config):
        theirs = embedding if name == "token_embedder/embedding" else tensor_name(name)
        used.add(theirs)
        if theirs in tensors:
            leaves[name] = _turned(name, tensors[theirs])
    return leaves | {name: leaf for name, leaf in tensors.items() if name not in used}


_GPT_PLACES = {
    "token_embedder": "wte", "decoder/position_embedder": "wpe", "decoder/decoder_norm": "ln_f",
    "pre_self_attention_layer_norm": "ln_1", "causal_attention/qkv": "attn.c_attn", "causal_attention/out": "attn.c_proj",
    "pre_mlp_layer_norm": "ln_2", "mlp/wi": "mlp.c_fc", "mlp/wo": "mlp.c_proj",
}  # fmt: skip


def gpt_tensor_name(name: str) -> str:
    """Hugging Face's name of our parameter `name`, without the prefix `transformer.` that all but the head's may have.

    Example: `decoder/layers_3/mlp/wo/kernel` -> `h.3.mlp.c_proj.weight`.
    """
    if name == "decoder/logits_dense/kernel":
        return "lm_head.weight"
    place, last = name.rsplit("/", 1)
    last = "bias" if last == "bias" else "weight"
    if place in _GPT_PLACES:
        return f"{_GPT_PLACES[place]}.{last}"
    _, layer, place = place.split("/", 2)
    return f"h.{layer.removeprefix('layers_')}.{_GPT_PLACES[place]}.{last}"


def _gpt_by_our_names(tensors: dict[str, Leaf], config: GPTConfig) -> dict[str, Leaf]:
    """Tensors as our leaves: kernels are `[in, out]` already, but for the head; unknown ones keep their names."""
    tensors = {name.removeprefix("transformer."): leaf for name, leaf in tensors.items()}
    leaves = {}
    for name in parameter_shapes(config):
        leaf = tensors.pop(gpt_tensor_name(name), None)
        if leaf is not None:
            leaves[name] = leaf.transposed() if name == "decoder/logits_dense/kernel" else leaf
    if config.logits_via_embedding:
        tensors.pop("lm_head.weight", None)  # a copy of the embedding
    # The mask, which old files hold as a tensor of every layer.
    masks = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
    return leaves | {name: leaf for name, leaf in tensors.items() if not masks.fullmatch(name)}


def write_folder(checkpoint: Checkpoint, dtype: str, folder: pathlib.Path, track: Track = iter) -> None:
    """Writes config.json, generation_config.json, safetensors and the tokenizer's files into an empty folder.

    Raises:
      ValueError: a feed-forward block or a vocabulary that Hugging Face's T5 has no name for.
    """
    assert isinstance(checkpoint.config, T5Config)
    eos_ids = list(checkpoint.eos_ids or ())
    ids = {
        "decoder_start_token_id": checkpoint.start_token, "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids,
        "pad_token_id": 0,
    }  # fmt: skip
    files = _tokenizer_files(checkpoint.vocabulary)
    files["config.json"] = _options(checkpoint.config, dtype) | ids
    files["generation_config.json"] = ids
    for name, content in files.items():
        content = content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode()
        write_file(folder / name, content)
    tensors = {tensor_name(name): _turned(name, leaf) for name, leaf in checkpoint.leaves.items()}
    safetensors_files.write_folder(tensors, dtype, folder, track)


def _options(config: T5Config, dtype: str) -> dict[str, Any]:
    """`config` as config.json has it: the inverse of `_config`."""
    names = [name for name, activations in _ACTIVATIONS.items() if activations == config.mlp_activations]
    if not names:
        known = ", ".join(map(str, dict.fromkeys(_ACTIVATIONS.values())))
        raise ValueError(f"mlp_activations: got {config.mlp_activations}, expected one of {known} for Hugging Face")
    tied, scale = config.logits_via_embedding, config.scale_decoder_outputs
    # transformers builds the network by `num_decoder_layers`, its caches by `decoder_layers` and without it `num_layers`.
    return {
        "model_type": "t5", "architectures": [_T5_ARCHITECTURES[0]], "is_encoder_decoder": True,
        "vocab_size": config.vocab_size, "d_model": config.emb_dim, "num_heads": config.num_heads,
        "d_kv": config.head_dim, "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers, "decoder_layers": config.num_decoder_layers,
        "d_ff": config.mlp_dim, "feed_forward_proj": names[0],
        "tie_word_embeddings": tied, "scale_decoder_outputs": tied if scale is None else scale,
        "relative_attention_num_buckets": config.num_buckets, "relative_attention_max_distance": config.max_distance,
        "layer_norm_epsilon": 1e-6, "dropout_rate": config.dropout_rate, "torch_dtype": dtype,
    }  # fmt: skip


def _tokenizer_files(vocabulary: Vocabulary | None) -> dict[str, Any]:
    """Contents of the files that `huggingface_tokenizers.open_folder` makes the same vocabulary of: bytes, or what JSON holds."""
    if vocabulary is None:
        return {}
    options: dict[str, Any] = {
        "eos_token": vocabulary.piece(vocabulary.eos_ids[0]),
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    if isinstance(vocabulary, TokenizerJsonVocabulary):
        options["tokenizer_class"] = "PreTrainedTokenizerFast"
        return {"tokenizer.json": vocabulary.text.encode("utf-8"), "tokenizer_config.json": options}
    if not isinstance(vocabulary, SentencePieceVocabulary | ByteVocabulary):
        raise ValueError(f"vocabulary: got {type(vocabulary).__name__}, expected one that Hugging Face has files for")
    options["extra_ids"] = vocabulary.extra_ids
    options["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(vocabulary.extra_ids)]
    if isinstance(vocabulary, ByteVocabulary):
        return {"tokenizer_config.json": options | {"tokenizer_class": "ByT5Tokenizer"}}
    options["tokenizer_class"] = "T5Tokenizer"
    return {"spiece.model": vocabulary.model, "tokenizer_config.json": options}
