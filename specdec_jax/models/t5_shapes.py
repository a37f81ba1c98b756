"""Names and shapes of a T5's parameters, as T5X has them."""

from specdec_jax.models.family import ModelConfig


def t5_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter by its name; `config` is a `T5Config`."""
    width, inner = config.emb_dim, config.num_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (config.vocab_size, width)}
    if config.separate_embeddings:
        shapes["encoder_embedder/embedding"] = (config.vocab_size, width)
    if not config.logits_via_embedding:
        shapes["decoder/logits_dense/kernel"] = (width, config.vocab_size)
    count = len(config.mlp_activations)
    inputs = ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]
    mlp = {f"mlp/{name}/kernel": (width, config.mlp_dim) for name in inputs}
    mlp["mlp/wo/kernel"] = (config.mlp_dim, width)
    of_decoder = (
        ("self_attention", "encoder_decoder_attention"),
        ("self_attention", "cross_attention", "mlp"),
    )
    for stack, layers, (attentions, norms) in (
        ("encoder", config.num_encoder_layers, (("attention",), ("attention", "mlp"))),
        ("decoder", config.num_decoder_layers, of_decoder),
    ):
        layer: dict[str, tuple[int, ...]] = dict(mlp)
        for attention in attentions:
            layer |= {
                f"{attention}/{name}/kernel": (width, inner) for name in ("query", "key", "value")
            }
            if attention == "encoder_decoder_attention" and config.encoder_dim is not None:
                layer |= {
                    f"{attention}/{name}/kernel": (config.encoder_dim, inner)
                    for name in ("key", "value")
                }
            layer[f"{attention}/out/kernel"] = (inner, width)
        layer |= {f"pre_{norm}_layer_norm/scale": (width,) for norm in norms}
        if stack == "encoder" and config.encoder_dim is not None:
            continue
        table = {"relpos_bias/rel_embedding": (config.num_heads, config.num_buckets)}
        if config.relative_bias_per_layer:
            layer |= table
        else:
            shapes |= {f"{stack}/{name}": shape for name, shape in table.items()}
        shapes[f"{stack}/{stack}_norm/scale"] = (width,)
        shapes |= {
            f"{stack}/layers_{i}/{name}": shape
            for i in range(layers)
            for name, shape in layer.items()
        }
    return shapes
