"""Hugging Face folders of T5 1.0, 1.1, Flan-T5, mT5, UL2, ByT5 and GPT-2: config.json, tensors, tokenizer."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

from specdec_jax.formats import flax_msgpack, safetensors_files
from specdec_jax.formats.leaves import Checkpoint, Leaf, Track, parameter_shapes
from specdec_jax.models.base import ModelConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
    Vocabulary,
    byte_level_bpe,
)
from specdec_jax.writing import write_file

_MODEL_TYPES = ("t5", "mt5", "gpt2")
_T5_ARCHITECTURES = ("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "T5WithLMHeadModel")
_GPT_ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")
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
    options = _read_json(folder / "config.json", required=True)
    _check_architecture(folder, options)
    tensors = _open_tensors(folder)
    generation = _read_json(folder / "generation_config.json")
    if options["model_type"] == "gpt2":
        gpt = _gpt_config(folder, options)
        special = {"bos_token_id": _GPT_END, "eos_token_id": _GPT_END} | options
        found = _checkpoint(folder, gpt, _gpt_by_our_names(tensors, gpt), special, generation, "bos_token_id")
        return dataclasses.replace(found, eos_ids=found.eos_ids or ())  # null: nothing ends a sequence
    config = _config(folder, options, separate_head="lm_head.weight" in tensors)
    leaves = _by_our_names(tensors, config)
    return _checkpoint(folder, config, leaves, options, generation, "decoder_start_token_id")


def _checkpoint(folder, config: ModelConfig, leaves: dict[str, Leaf], options, generation, start_id: str) -> Checkpoint:
    start = _first(generation.get(start_id), options.get(start_id), 0)
    eos = _first(generation.get("eos_token_id"), options.get("eos_token_id"))
    eos = eos if eos is None or isinstance(eos, list) else [eos]
    eos_ids = None if eos is None else tuple(eos)
    return Checkpoint(config, leaves, open_vocabulary(folder, eos_ids), start, eos_ids)


def _first(*values):
    return next((value for value in values if value is not None), None)


def _read_json(path: pathlib.Path, required: bool = False) -> dict:
    if not path.exists() and not required:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent}: got no {path.name}, expected one beside the weights") from None
    except ValueError:
        raise ValueError(f"{path}: got no readable JSON, expected an object") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: got {type(content).__name__}, expected an object")
    return content


def _check_architecture(folder: pathlib.Path, options: dict) -> None:
    architectures = options.get("architectures") or []
    known = _GPT_ARCHITECTURES if options.get("model_type") == "gpt2" else _T5_ARCHITECTURES
    if options.get("model_type") not in _MODEL_TYPES or not set(architectures) <= set(known):
        got = f"model_type {options.get('model_type')!r}, architectures {architectures}"
        expected = f"model_type {' or '.join(_MODEL_TYPES)} with an architecture of {', '.join(known)}"
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


def _config(folder: pathlib.Path, options: dict, separate_head: bool) -> T5Config:
    """config.json as ours; what decides on the head is the file (transformers 5 calls every T5 tied)."""
    is_mt5 = options["model_type"] == "mt5"
    feed_forward = options.get("feed_forward_proj", "gated-gelu" if is_mt5 else "relu")
    if feed_forward not in _ACTIVATIONS:
        raise ValueError(
            f"{folder}: feed_forward_proj: got {feed_forward!r}, expected one of {', '.join(_ACTIVATIONS)}"
        )
    epsilon = options.get("layer_norm_epsilon", 1e-6)
    if epsilon != 1e-6:
        raise ValueError(f"{folder}: layer_norm_epsilon: got {epsilon}, expected 1e-06")
    # mT5's reference never scales, whatever its tie_word_embeddings says (transformers 5 always writes true).
    scale = options.get("scale_decoder_outputs", not is_mt5 and options.get("tie_word_embeddings", True))

    integer = functools.partial(_integer, folder, options)
    return T5Config(
        vocab_size=integer("vocab_size"), emb_dim=integer("d_model"), num_heads=integer("num_heads"),
        head_dim=integer("d_kv"), num_encoder_layers=integer("num_layers"),
        num_decoder_layers=integer("num_decoder_layers", options.get("num_layers")), mlp_dim=integer("d_ff"),
        mlp_activations=_ACTIVATIONS[feed_forward], logits_via_embedding=not separate_head,
        scale_decoder_outputs=bool(scale), num_buckets=integer("relative_attention_num_buckets", 32),
        max_distance=integer("relative_attention_max_distance", 128),
    )  # fmt: skip


def _integer(folder: pathlib.Path, options: dict, name: str, default=None) -> int:
    value = options.get(name)
    value = default if value is None else value
    if not isinstance(value, int):
        raise ValueError(f"{folder / 'config.json'}: {name}: got {value!r}, expected an integer")
    return value


def _gpt_config(folder: pathlib.Path, options: dict) -> GPTConfig:
    for name, expected in _GPT_FIXED.items():
        if options.get(name, expected) != expected:
            raise ValueError(f"{folder / 'config.json'}: {name}: got {options[name]!r}, expected {expected!r}")
    activation = options.get("activation_function", "gelu_new")
    if activation not in _GPT_ACTIVATIONS:
        raise ValueError(
            f"{folder / 'config.json'}: activation_function: got {activation!r}, expected one of {', '.join(_GPT_ACTIVATIONS)}"
        )
    integer = functools.partial(_integer, folder, options)
    width = integer("n_embd", 768)
    return GPTConfig(
        vocab_size=integer("vocab_size", 50257), emb_dim=width, num_heads=integer("n_head", 12),
        num_decoder_layers=integer("n_layer", 12), mlp_dim=integer("n_inner", 4 * width),
        num_positions=integer("n_positions", 1024), mlp_activation=_GPT_ACTIVATIONS[activation],
        logits_via_embedding=bool(options.get("tie_word_embeddings", True)),
    )  # fmt: skip


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


def open_vocabulary(folder: pathlib.Path, stop_ids: tuple[int, ...] | None) -> Vocabulary | None:
    """The tokenizer of a folder: `tokenizer.json`, else `vocab.json` with `merges.txt`, else `spiece.model`, else bytes where
    it says ByT5, else None.

    Args:
      stop_ids: ids at which the model stops; inputs end with the tokenizer's own EOS all the same, where it has one.
    """
    options = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").exists():
        path, token = folder / "tokenizer.json", _special_token(folder, options, "eos_token") or "</s>"
        return TokenizerJsonVocabulary.load(path, eos_token=token, stop_ids=stop_ids or ())
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return _byte_level_bpe(folder, options, stop_ids or ())
    if (folder / "spiece.model").exists():
        return _sentencepiece(folder, options)
    if str(options.get("tokenizer_class", "")).startswith("ByT5"):
        added = _added_tokens(folder, options)
        vocabulary = ByteVocabulary(_first(options.get("extra_ids") or None, len(_sentinels(added)) or None, 125))
        _check_added(folder, added, vocabulary)
        return vocabulary
    return None


def _special_token(folder: pathlib.Path, options: dict, name: str) -> str | None:
    token = options.get(name) or _read_json(folder / "special_tokens_map.json").get(name)
    return token.get("content") if isinstance(token, dict) else token


def _byte_level_bpe(folder: pathlib.Path, options: dict, stop_ids: tuple[int, ...]) -> TokenizerJsonVocabulary:
    """GPT-2's own files: pieces with their ids, and merges in their order."""
    names = ("bos_token", "eos_token", "unk_token")
    special = {_special_token(folder, options, name) or "<|endoftext|>": None for name in names}
    added = special | _added_tokens(folder, options)
    text = byte_level_bpe(
        folder / "vocab.json", folder / "merges.txt", sorted(added, key=lambda token: added[token] or -1),
        bool(options.get("add_prefix_space", False)),
    )  # fmt: skip
    token = _special_token(folder, options, "eos_token") or "<|endoftext|>"
    vocabulary = TokenizerJsonVocabulary(text, eos_token=token, stop_ids=stop_ids)
    _check_added(folder, added, vocabulary)
    return vocabulary


def _sentencepiece(folder: pathlib.Path, options: dict) -> SentencePieceVocabulary:
    added = _added_tokens(folder, options)
    extra_ids = _first(options.get("extra_ids"), len(_sentinels(added)) or None, 100)
    vocabulary = SentencePieceVocabulary.load(folder / "spiece.model", extra_ids)
    _check_added(folder, added, vocabulary)
    return vocabulary


def _added_tokens(folder: pathlib.Path, options: dict) -> dict[str, int | None]:
    """Tokens that the tokenizer's files add to the SentencePiece model, with their ids where these are given."""
    key = "additional_special_tokens"  # transformers 5 calls them extra_special_tokens
    listed = options.get("extra_special_tokens") or options.get(key)
    listed = listed or _read_json(folder / "special_tokens_map.json").get(key) or []
    listed = listed.values() if isinstance(listed, dict) else listed
    added: dict[str, int | None] = {token if isinstance(token, str) else token["content"]: None for token in listed}
    added |= {entry["content"]: int(i) for i, entry in (options.get("added_tokens_decoder") or {}).items()}
    return added | _read_json(folder / "added_tokens.json")


def _sentinels(added: dict) -> list[str]:
    return [token for token in added if re.fullmatch(r"<extra_id_\d+>", token)]


def _check_added(folder: pathlib.Path, added: dict[str, int | None], vocabulary: Vocabulary) -> None:
    """Refuses added tokens that the vocabulary would not give the ids they have."""
    for token, i in added.items():
        if token in ("<pad>", "</s>", "<unk>"):
            continue
        known = vocabulary.encode(token)
        if len(known) != 1 or (i is not None and known != [i]):
            got = f"added token {token!r} with id {i}" if i is not None else f"added token {token!r}"
            raise ValueError(f"{folder}: got {got}, expected only sentinels <extra_id_0> … or a tokenizer.json")


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
    """Contents of the files that `open_vocabulary` makes the same vocabulary of: bytes, or what JSON holds."""
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
