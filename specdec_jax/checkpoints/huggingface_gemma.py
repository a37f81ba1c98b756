"""Hugging Face's Gemma 2 and 3, T5Gemma 1 and 2: config.json and names of tensors."""

import re
from typing import Any, NamedTuple

from specdec_jax.checkpoints.huggingface_config import check_fixed, choose_value, read_fields
from specdec_jax.checkpoints.stored_tensor import Parameters, is_same_tensor
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models.config_validation import build
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig, shorten_windows
from specdec_jax.models.parameters import parameter_shapes

ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Model"),
    "gemma3_text": ("Gemma3ForCausalLM", "Gemma3TextModel"),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "t5gemma": ("T5GemmaForConditionalGeneration",),
    "t5gemma2": ("T5Gemma2ForConditionalGeneration",),
}
_TEXT = "text_config"  # the part of config.json that describes the text's stack, beside images'
START = "decoder_start_token_id", "bos_token_id"
NO_START: tuple[int, ...] = (2,)  # where no file says
_IDS = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
SPECIAL_IDS = dict.fromkeys(ARCHITECTURES, _IDS)  # where config.json does not say
NO_EOS: tuple[int, ...] = ()  # what `"eos_token_id": null` means: nothing ends a sequence
# "gelu" alone is the exact form.
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu", "silu": "silu"}
# Options that are not supported, with the only value that is.
_FIXED = {"rms_norm_eps": 1e-6, "attention_bias": False}
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
_SLIDING, _FULL = "sliding_attention", "full_attention"


class _Kind(NamedTuple):
    """What sets a class of models apart.

    Attributes:
      vocab_size: the default of config.json.
      attention_cap, logits_cap: as well.
      reads_attention_cap: whether config.json's cap of scores counts.
      every: every how many layers one has no window, where config.json does not list them.
      rotary_base, local_rotary_base: defaults of layers without and with a window; None: one for
        both.
      qk_norm: as in `GemmaConfig`.
    """

    vocab_size: int = 256_000
    attention_cap: float | None = 50.0
    logits_cap: float | None = 30.0
    reads_attention_cap: bool = True
    every: int = 2
    rotary_base: float = 10_000.0
    local_rotary_base: float | None = None
    qk_norm: bool = False


_GEMMA_3 = _Kind(262_208, None, None, False, 6, 1_000_000.0, 10_000.0, True)
_KINDS = {"gemma2": _Kind(), "t5gemma": _Kind()}
# What an encoder may have of its own.
_OWN = "emb_dim", "mlp_dim", "num_heads", "num_kv_heads", "windows"


def open_model(
    folder: AnyPath, options: dict, tensors: Parameters
) -> tuple[GemmaConfig, Parameters]:
    """Returns the configuration that config.json gives, and the tensors by our names."""
    path, tied = folder / "config.json", options.get("tie_word_embeddings", True)
    kind = _KINDS.get(options["model_type"], _GEMMA_3)
    if options["model_type"] in ("t5gemma", "t5gemma2"):
        stacks = [_nested(path, options, name) for name in ("encoder", "decoder")]
        merged = options["model_type"] == "t5gemma2"
        eoi = stacks[0].get("eoi_token_index", 256_000)
        stacks[0] = _nested(path, stacks[0], _TEXT) if merged else stacks[0]
        encoder, decoder = (_read_stack(path, stack, kind) for stack in stacks)
        for name, value in encoder.items():
            if name not in (*_OWN, "num_decoder_layers") and value != decoder[name]:
                expected = f"the decoder's, {quote_value(decoder[name])}"
                raise mismatch_error(f"{path}: encoder: {name}", quote_value(value), expected)
        fields = decoder | {f"encoder_{name}": encoder[name] for name in _OWN}
        fields["num_encoder_layers"] = encoder["num_decoder_layers"]
        fields |= dict(merged_attention=True, apart_id=eoi) if merged else {}
        shape: type[GemmaConfig] = T5GemmaConfig
    else:
        text = options["model_type"] == "gemma3"
        stack = _nested(path, options, _TEXT) if text else options
        fields, shape = _read_stack(path, stack, kind), GemmaConfig
        # In transformers 5.24, the class that reads images does not cap logits.
        fields |= {"logits_cap": None} if text else {}
    fields |= {"logits_via_embedding": tied, "image_id": _read_image_id(path, options)}
    config = build(shape, fields, path, _FIELDS)
    return config, _rename_tensors(folder, config, tensors)


def _read_image_id(path: AnyPath, options: dict) -> int | None:
    """Returns the id that stands for images, under its new or old name, or None."""
    for name in ("image_token_id", "image_token_index"):
        if (given := options.get(name)) is not None:
            if type(given) is not int or given < 0:
                raise mismatch_error(f"{path}: {name}", quote_value(given), "an id")
            return given
    return None


def _nested(path: Any, options: dict, name: str) -> dict:
    """Returns a part of config.json, {} if it has none."""
    part = {} if options.get(name) is None else options[name]
    if not isinstance(part, dict):
        raise mismatch_error(f"{path}: {name}", quote_value(part), "an object")
    return part


def _read_stack(path: AnyPath, options: dict, kind: _Kind) -> dict[str, Any]:
    """Returns the fields that describe a decoder or, by the same names, an encoder."""
    check_fixed(path, options, _FIXED)
    if options.get("use_bidirectional_attention"):
        raise mismatch_error(f"{path}: use_bidirectional_attention", "true", "false")
    fields = read_fields(options, _FIELDS, _DEFAULTS | {"vocab_size": kind.vocab_size})
    fields["logits_cap"] = options.get("final_logit_softcapping", kind.logits_cap)
    if kind.reads_attention_cap:
        fields["attention_cap"] = options.get("attn_logit_softcapping", kind.attention_cap)
    name = "hidden_activation"
    activation = choose_value(path, options, name, "gelu_pytorch_tanh", _ACTIVATIONS)
    return fields | dict(
        mlp_activation=activation,
        qk_norm=kind.qk_norm,
        windows=_read_windows(path, options, kind, fields["num_decoder_layers"]),
        **_read_rotary(path, options, kind),
    )


def _read_rotary(path: AnyPath, options: dict, kind: _Kind) -> dict[str, Any]:
    """Returns the fields of rotary positions.

    As in transformers, the old name `rope_scaling` counts before `rope_parameters`: in its place,
    or before what it says of layers without a window.
    """
    name, old = "rope_parameters", "rope_scaling"
    rope, scaling = (_nested(path, options, part) for part in (name, old))
    if kind.local_rotary_base is None:
        base, factor = _read_angles(f"{path}: {name}", scaling or rope)
        default = options.get("rope_theta", kind.rotary_base)
        return dict(rotary_base=default if base is None else base, rotary_factor=factor)
    whole, local = (_nested(f"{path}: {name}", rope, part) for part in (_FULL, _SLIDING))
    base, factor = _read_angles(f"{path}: {name}: {_FULL}", whole | scaling)
    local_base, local_factor = _read_angles(f"{path}: {name}: {_SLIDING}", local)
    if local_factor != 1:
        raise mismatch_error(f"{path}: {name}: {_SLIDING}", quote_value(local_factor), "factor 1")
    theta = options.get("rope_theta", kind.rotary_base)
    local_theta = options.get("rope_local_base_freq", kind.local_rotary_base)
    return dict(
        rotary_base=theta if base is None else base,
        rotary_factor=factor,
        local_rotary_base=local_theta if local_base is None else local_base,
    )


def _read_angles(place: str, rope: dict) -> tuple[Any, Any]:
    """Returns θ, None if it is not given, and the factor."""
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in ("default", "linear"):
        expected = "rope_type 'default' or 'linear'"
        raise mismatch_error(place, quote_value(name), expected)
    return rope.get("rope_theta"), rope.get("factor", 1.0) if name == "linear" else 1.0


def _read_windows(path: AnyPath, options: dict, kind: _Kind, layers: Any) -> tuple[int, ...]:
    """Returns the windows of the layers, as few as say it: after the last, the first again."""
    kinds, window = options.get("layer_types"), options.get("sliding_window", 4096)
    name, known = "sliding_window_pattern", (_SLIDING, _FULL)
    if kinds is None:
        every = options.get(name, kind.every) if kind.qk_norm else kind.every
        if type(every) is not int or not 1 <= every <= 1000:
            raise mismatch_error(f"{path}: {name}", quote_value(every), "1 to 1,000")
        kinds = [*[_SLIDING] * (every - 1), _FULL]  # in turn
    elif (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(kind not in known for kind in kinds)
    ):
        expected = f"{layers} of {_SLIDING} and {_FULL}"
        raise mismatch_error(f"{path}: layer_types", quote_value(kinds), expected)
    if _SLIDING in kinds and (type(window) is not int or window < 1):
        raise mismatch_error(f"{path}: sliding_window", quote_value(window), "at least 1")
    return shorten_windows([window if kind == _SLIDING else 0 for kind in kinds])


_HEADS = "lm_head.weight", "lm_head.out_proj.weight"
_BUFFERS = re.compile(r".*rotary_emb\.inv_freq")  # of old files
_IMAGES = re.compile(r"(encoder\.)?(vision_tower|multi_modal_projector)\..*")
_PREFIXES = re.compile(r"^(model\.|language_model\.)+")  # some versions of a class have them
_PARTS = {
    "decoder_norm": "norm",
    "encoder_norm": "norm",
    "encoder_decoder_attention": "cross_attn",
    "grouped_attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "query_norm": "q_norm",
    "key_norm": "k_norm",
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
    if name == "token_embedder/row_apart":
        return "decoder.embed_tokens.eoi_embedding"
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


def _rename_tensors(folder: AnyPath, config: GemmaConfig, given: Parameters) -> Parameters:
    """Returns the tensors by our names; unknown ones keep theirs."""
    tensors: Parameters = {}
    for name, tensor in given.items():
        short = _shorten(name)
        if short in tensors:
            raise mismatch_error(folder, f"two tensors that are {short} without a prefix", "one")
        if not _BUFFERS.fullmatch(short) and not _IMAGES.fullmatch(short):
            tensors[short] = tensor
    if getattr(config, "merged_attention", False):
        _merge_copies(folder, tensors)
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
    return renamed | tensors


def rename_parameters(parameters: Parameters, config: GemmaConfig) -> Parameters:
    """Returns our parameters as Hugging Face's tensors, by their names."""
    renamed = {}
    merged = getattr(config, "merged_attention", False)
    for name, tensor in parameters.items():
        theirs = tensor_name(name, config.decoder_only)
        theirs = theirs if theirs in _HEADS else f"model.{theirs}"
        turned = tensor.transposed() if name.endswith("/kernel") else tensor
        if merged and name.startswith("token_embedder/"):
            renamed[theirs.replace("decoder", "encoder")] = turned
            if config.logits_via_embedding:
                continue  # only beside a tied head, transformers copies it to the decoder
        renamed[theirs] = turned
    return renamed


# The smallest part that reads images: T5Gemma 2's class has no form without one. Its few weights
# are in no file, so that transformers names them as missing.
_NO_IMAGES = {
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1,
        "intermediate_size": 1,
        "num_hidden_layers": 0,
        "num_attention_heads": 1,
        "image_size": 1,
        "patch_size": 1,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 1,
}


def make_options(config: GemmaConfig, dtype: str) -> dict[str, Any]:
    """Returns the contents of a config.json for `config`: the inverse of what `open_model` reads.

    Raises:
      ValueError: Hugging Face has no such model.
    """
    tied = {"tie_word_embeddings": config.logits_via_embedding}
    shared: dict[str, Any] = tied | {"torch_dtype": dtype}
    if config.image_id is not None:
        shared["image_token_index"] = config.image_id
    if not isinstance(config, T5GemmaConfig):
        kind = "gemma3_text" if config.qk_norm else "gemma2"
        names = {"model_type": kind, "architectures": [ARCHITECTURES[kind][0]]}
        return names | shared | _make_stack(config, config.num_decoder_layers)
    own = {name: getattr(config, f"encoder_{name}") for name in _OWN}
    encoder = tied | _make_stack(config.replace(**own), config.num_encoder_layers)
    decoder = tied | _make_stack(config, config.num_decoder_layers)
    if config.merged_attention:
        kind = "t5gemma2"
        encoder = {
            "model_type": "t5gemma2_encoder",
            _TEXT: {"model_type": "t5gemma2_text"} | encoder,
            **_NO_IMAGES,
            **tied,
            "eoi_token_index": config.apart_id,
        }
        decoder = {"model_type": "t5gemma2_decoder"} | decoder
    else:
        kind, module = "t5gemma", {"model_type": "t5_gemma_module"}
        sizes = {"is_decoder": True, "cross_attention_hidden_size": config.encoder_emb_dim}
        encoder = module | {"is_decoder": False} | encoder
        decoder = module | sizes | decoder
    return {
        "model_type": kind,
        "architectures": list(ARCHITECTURES[kind]),
        "is_encoder_decoder": True,
        "encoder": encoder,
        "decoder": decoder,
        "vocab_size": config.vocab_size,
        "dropout_rate": config.dropout_rate,
        **shared,
    }


def _make_stack(config: GemmaConfig, layers: int) -> dict[str, Any]:
    """Returns the options that describe a stack of so many layers."""
    names = [name for name, known in _ACTIVATIONS.items() if known == config.mlp_activation]
    windows = [config.windows[i % len(config.windows)] for i in range(layers)]
    sizes = sorted({*windows} - {0})
    if not names or len(sizes) > 1:
        got = f"activation {config.mlp_activation!r} and windows {config.windows}"
        expected = f"one of {', '.join(_ACTIVATIONS.values())} and windows of one size"
        raise mismatch_error("format", f"'huggingface' for {got}", expected)
    scalar, width, heads = config.query_scalar, config.emb_dim, config.num_heads
    if scalar % 1 or width % heads:  # transformers' classes check both
        got = f"query_scalar {scalar} and {heads} heads of a width of {width}"
        expected = "a whole number, and a width that the heads divide"
        raise mismatch_error("format", f"'huggingface' for {got}", expected)
    factor = config.rotary_factor
    scaling = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    rope: dict[str, Any] = scaling | {"rope_theta": config.rotary_base}
    if config.qk_norm:
        local = {"rope_type": "default", "rope_theta": config.local_rotary_base}
        rope = {_FULL: rope, _SLIDING: local}
    return {
        **{theirs: getattr(config, ours) for ours, theirs in _FIELDS.items()},
        "num_hidden_layers": layers,
        "query_pre_attn_scalar": int(scalar),
        "hidden_activation": names[0],
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "sliding_window": sizes[0] if sizes else 4096,
        "rope_parameters": rope,
        "attn_logit_softcapping": config.attention_cap and float(config.attention_cap),
        "final_logit_softcapping": config.logits_cap and float(config.logits_cap),
        **_FIXED,
    }


def list_notes(folder: AnyPath, tensors: Parameters) -> tuple[str, ...]:
    """Returns a line about tensors that are left out."""
    count = sum(bool(_IMAGES.fullmatch(_shorten(name))) for name in tensors)
    line = f"{folder}: left out {count} tensors that read images; inputs are text"
    return (line,) if count else ()


def _shorten(name: str) -> str:
    """Returns a tensor's name without the parts that only some versions have."""
    return re.sub(r"^encoder\.text_model\.", "encoder.", re.sub(_PREFIXES, "", name))


def _merge_copies(folder: AnyPath, tensors: Parameters) -> None:
    """Leaves one of each pair of tensors that both stacks of a T5Gemma 2 share."""
    for last in ("weight", "eoi_embedding"):
        ours, copy = (f"{stack}.embed_tokens.{last}" for stack in ("decoder", "encoder"))
        if (other := tensors.pop(copy, None)) is not None:
            if not is_same_tensor(other, tensors.setdefault(ours, other)):
                raise mismatch_error(f"{folder}: {copy}", "another", f"{ours}")
