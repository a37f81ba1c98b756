"""Writes tests/golden/t5x_scalable_t5.npz: a tiny network of T5X's `scalable_t5`, and what T5X
computes with it.

Needs T5X; the package itself does not. Run from the repository root: `python
scripts/write_golden_scalable_t5.py [folder]`. In this network every layer has a relative position
table of its own, and layers are stacked on axis 1. Parameters are random numbers from a seed.

The file holds the parameters by T5X's names, `/`-joined; `config` (JSON); and for B = 3 rows of
which two are padded:
  inputs [B, L], input_lengths [B]: encoder ids, 0 after the length. decoder_tokens [B, T], logits
  [B, T, V]: teacher-forced decoder inputs, the start token 0 first, and
    their logits.
  greedy [B, T], greedy_margin [B, T]: T5X's own argmax decode without an EOS, and the difference
    between the two largest logits at each token.
"""

import functools
import json
import pathlib
import sys

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


def random_params(module, seed: int) -> dict:
    """Returns parameters by their names, larger than T5X's initial ones, so that all of them affect
    the results."""
    tokens, rng = jnp.ones((1, 2), jnp.int32), np.random.default_rng(seed)

    def init():
        return module.init(jax.random.key(0), tokens, tokens, tokens, enable_dropout=False)

    made = flax.traverse_util.flatten_dict(jax.eval_shape(init)["params"], sep="/")
    scales = {
        "scale": (1.0, 0.3),
        "rel_embedding": (0.0, 1.0),
        "embedding": (0.0, 1.0),
        "kernel": (0.0, 0.35),
    }

    def draw(mean, deviation, shape):
        return (mean + deviation * rng.standard_normal(shape)).astype(np.float32)

    return {name: draw(*scales[name.split("/")[-1]], leaf.shape) for name, leaf in made.items()}


def compute(module, flat: dict, seed: int) -> dict[str, np.ndarray]:
    """Returns the arrays besides the parameters."""
    rng, params = np.random.default_rng(seed), flax.traverse_util.unflatten_dict(flat, sep="/")
    lengths = np.array([LENGTH, 4, 7], np.int32)
    inputs = (
        rng.integers(2, SHAPE["vocab_size"], (3, LENGTH)) * (np.arange(LENGTH) < lengths[:, None])
    ).astype(np.int32)
    decoder_tokens = rng.integers(2, SHAPE["vocab_size"], (3, TARGET)).astype(np.int32)
    decoder_tokens[:, 0] = 0

    # Targets decide the decoder's mask, which is causal if all of them are above 0.
    def logits_of(tokens):
        return np.asarray(
            module.apply(
                {"params": params}, inputs, tokens, np.ones_like(tokens), enable_dropout=False
            )
        )

    sample = functools.partial(decoding.temperature_sample, temperature=0.0)
    model = models.EncoderDecoderModel(module, None, None, None, decode_fn=sample)
    batch = dict(encoder_input_tokens=inputs, decoder_input_tokens=np.zeros((3, TARGET), np.int32))
    greedy = np.asarray(
        model.predict_batch_with_aux(params, batch, decoder_params={"eos_id": NO_EOS})[0]
    )
    top = np.sort(logits_of(np.pad(greedy, ((0, 0), (1, 0)))[:, :-1]), axis=-1)
    return {
        "inputs": inputs,
        "input_lengths": lengths,
        "decoder_tokens": decoder_tokens,
        "logits": logits_of(decoder_tokens),
        "greedy": greedy,
        "greedy_margin": top[..., -1] - top[..., -2],
    }


def main(folder: pathlib.Path) -> None:
    module = network.Transformer(network.T5Config(**SHAPE, dtype=jnp.float32))
    for seed in range(100):
        params = random_params(module, seed)
        io = compute(module, params, seed)
        varied = min(len(set(row.tolist())) for row in io["greedy"])
        if io["greedy_margin"].min() > 0.01 and varied >= 5 and not (io["greedy"] == NO_EOS).any():
            break
    else:
        raise RuntimeError("no seed gave decodes with clear margins")
    path = folder / "t5x_scalable_t5.npz"
    np.savez_compressed(path, config=json.dumps(SHAPE), **io, **params)
    print(
        path,
        "seed",
        seed,
        "margin",
        io["greedy_margin"].min(),
        io["greedy"].tolist(),
        path.stat().st_size,
        "bytes",
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden"))
