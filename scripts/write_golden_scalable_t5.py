"""Writes tests/golden/t5x_scalable_t5.npz: a tiny `scalable_t5` of T5X, and its outputs.

Needs T5X; the package itself does not. Run from the repository root: `python
scripts/write_golden_scalable_t5.py [folder]`. In this network every layer has a relative position
table of its own, and layers are stacked on axis 1. Parameters are random numbers from a seed.

The file holds the parameters by T5X's names, `/`-joined; `config` (JSON); and for B = 3 rows of
which two are padded:
  inputs [B, L], input_lengths [B]: encoder ids, 0 after the length.
  decoder_tokens [B, T], logits [B, T, V]: teacher-forced decoder inputs, the start token 0 first,
    and their logits.
  greedy [B, T], greedy_margin [B, T]: T5X's own argmax decode without an EOS, and the difference
    between the two largest logits at each token.
"""

import functools
import json
import pathlib
import sys
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding, models
from t5x.examples.scalable_t5 import network

LENGTH, TARGET = 10, 12
SHAPE = dict(
    vocab_size=48,
    emb_dim=16,
    num_heads=2,
    head_dim=6,
    num_encoder_layers=2,
    num_decoder_layers=3,
    mlp_dim=20,
    mlp_activations=("gelu", "linear"),
    dropout_rate=0.0,
)
NO_EOS = 47  # T5X wants an EOS id; this one occurs in no decode of the chosen seed


def draw_params(module: Any, seed: int) -> dict[str, np.ndarray]:
    """Returns random parameters by their names, large enough that all affect the results."""
    tokens, rng = jnp.ones((1, 2), jnp.int32), np.random.default_rng(seed)
    init = functools.partial(module.init, enable_dropout=False)
    shapes = jax.eval_shape(init, jax.random.key(0), tokens, tokens, tokens)["params"]
    means, deviations = {"scale": 1.0}, {"scale": 0.3, "kernel": 0.35}  # others: 0 and 1
    params = {}
    for name, shape in flax.traverse_util.flatten_dict(shapes, sep="/").items():
        kind = name.split("/")[-1]
        noise = deviations.get(kind, 1.0) * rng.standard_normal(shape.shape)
        params[name] = (means.get(kind, 0.0) + noise).astype(np.float32)
    return params


def compute(module: Any, flat: dict, seed: int) -> dict[str, np.ndarray]:
    """Returns the arrays besides the parameters."""
    rng, params = np.random.default_rng(seed), flax.traverse_util.unflatten_dict(flat, sep="/")
    lengths = np.array([LENGTH, 4, 7], np.int32)
    mask = np.arange(LENGTH) < lengths[:, None]
    inputs = (rng.integers(2, SHAPE["vocab_size"], (3, LENGTH)) * mask).astype(np.int32)
    decoder_tokens = rng.integers(2, SHAPE["vocab_size"], (3, TARGET)).astype(np.int32)
    decoder_tokens[:, 0] = 0

    def compute_logits(tokens: np.ndarray) -> np.ndarray:
        # Targets decide the decoder's mask, which is causal if all of them are above 0.
        fed, ones = {"params": params}, np.ones_like(tokens)
        return np.asarray(module.apply(fed, inputs, tokens, ones, enable_dropout=False))

    sample = functools.partial(decoding.temperature_sample, temperature=0.0)
    model = models.EncoderDecoderModel(module, None, None, None, decode_fn=sample)
    batch = dict(encoder_input_tokens=inputs, decoder_input_tokens=np.zeros((3, TARGET), np.int32))
    predict = functools.partial(model.predict_batch_with_aux, decoder_params={"eos_id": NO_EOS})
    greedy = np.asarray(predict(params, batch)[0])
    top = np.sort(compute_logits(np.pad(greedy, ((0, 0), (1, 0)))[:, :-1]), axis=-1)
    return {
        "inputs": inputs,
        "input_lengths": lengths,
        "decoder_tokens": decoder_tokens,
        "logits": compute_logits(decoder_tokens),
        "greedy": greedy,
        "greedy_margin": top[..., -1] - top[..., -2],
    }


def main(folder: pathlib.Path) -> None:
    module = network.Transformer(network.T5Config(**SHAPE, dtype=jnp.float32))
    for seed in range(100):
        params = draw_params(module, seed)
        io = compute(module, params, seed)
        varied = min(len(set(row.tolist())) for row in io["greedy"])
        if io["greedy_margin"].min() > 0.01 and varied >= 5 and not (io["greedy"] == NO_EOS).any():
            break
    else:
        raise RuntimeError("no seed gave decodes with clear margins")
    path = folder / "t5x_scalable_t5.npz"
    np.savez_compressed(path, config=json.dumps(SHAPE), **io, **params)
    margin, size = io["greedy_margin"].min(), path.stat().st_size
    print(path, "seed", seed, "margin", margin, io["greedy"].tolist(), size, "bytes")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden"))
