"""Names and shapes of a network's parameters, and nested dicts as flat ones."""

import functools
import math

from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.network import ModelConfig
from specdec_jax.models.t5 import T5Config


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the network, by its name (a T5's is T5X's).

    Written out, since tracing the initialisation of 24 + 24 layers takes seconds; a test compares the two.
    """
    return _gpt_shapes(config) if isinstance(config, GPTConfig) else _t5_shapes(config)


def _t5_shapes(config: T5Config) -> dict[str, tuple[int, ...]]:
    width, inner = config.emb_dim, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (config.vocab_size, width)}
    if not config.logits_via_embedding:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    count = len(config.mlp_activations)
    inputs = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
    mlp = {f"mlp/{name}/kernel": (width, config.mlp_dim) for name in inputs} | {
        "mlp/wo/kernel": (config.mlp_dim, width)
    }
    for stack, layers, attentions, norms in (
        ("encoder", config.num_encoder_layers, ("attention",), ("attention", "mlp")),
        (
            "decoder",
            config.num_decoder_layers,
            ("self_attention", "encoder_decoder_attention"),
            ("self_attention", "cross_attention", "mlp"),
        ),
    ):
        layer: dict[str, tuple[int, ...]] = dict(mlp)
        for attention in attentions:
            layer |= {f"{attention}/{name}/kernel": (width, inner) for name in ("query", "key", "value")}
            if attention == "encoder_decoder_attention" and config.encoder_dim is not None:
                layer |= {f"{attention}/{name}/kernel": (config.encoder_dim, inner) for name in ("key", "value")}
            layer[f"{attention}/out/kernel"] = (inner, width)
        layer |= {f"pre_{norm}_layer_norm/scale": (width,) for norm in norms}
        if stack == "encoder" and config.encoder_dim is not None:
            continue
        shapes[f"{stack}/relpos_bias/rel_embedding"] = (config.num_heads, config.num_buckets)
        shapes[f"{stack}/{stack}_norm/scale"] = (width,)
        shapes |= {f"{stack}/layers_{i}/{name}": shape for i in range(layers) for name, shape in layer.items()}
    return shapes


def _gpt_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    width = config.emb_dim
    norm = lambda name: {f"{name}/{part}": (width,) for part in ("scale", "bias")}
    dense = lambda name, shape: {f"{name}/kernel": shape, f"{name}/bias": shape[1:]}
    layer: dict[str, tuple[int, ...]] = {
        **norm("pre_self_attention_layer_norm"), **norm("pre_mlp_layer_norm"),
        **dense("causal_attention/qkv", (width, 3 * width)), **dense("causal_attention/out", (width, width)),
        **dense("mlp/wi", (width, config.mlp_dim)), **dense("mlp/wo", (config.mlp_dim, width)),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedder/embedding": (config.vocab_size, width),
        "decoder/position_embedder/embedding": (config.num_positions, width),
        **norm("decoder/decoder_norm"),
    }
    if not config.logits_via_embedding:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    layers = range(config.num_decoder_layers)
    return shapes | {f"decoder/layers_{i}/{name}": shape for i in layers for name, shape in layer.items()}


def parameter_count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flatten(tree: dict, prefix: str = "") -> dict:
    """A nested dict as one dict of `/`-joined names."""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def unflatten(flat: dict) -> dict:
    """The inverse of `flatten`."""
    tree: dict = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree
