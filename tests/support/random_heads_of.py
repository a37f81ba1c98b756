"""Makes heads with random weights for a target."""

import functools

import numpy as np

import specdec_jax as sd
from specdec_jax.models.heads import HeadsConfig


def random_heads(target, scale=0.3, seed=0, **shape) -> sd.HeadsDrafter:
    config = HeadsConfig(
        **{
            **dict(num_heads=3, emb_dim=target.config.emb_dim, vocab_size=target.config.vocab_size),
            **shape,
        }
    )
    rng, params = np.random.default_rng(seed), {}
    for name, size in config.parameter_shapes.items():
        *parents, last = name.split("/")
        functools.reduce(lambda node, part: node.setdefault(part, {}), parents, params)[last] = (
            rng.normal(size=size, scale=scale).astype(np.float32)
        )
    return sd.HeadsDrafter.for_target(target, config, params)
