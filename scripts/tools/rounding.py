"""Measures how far int8 weights move a model's distributions, and a drafter's acceptance."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.drafting import match_width
from specdec_jax.files.progress import track
from specdec_jax.models import weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from tools.quality import quality

_WIDTHS = 8  # padded lengths are multiples of it


@isolated
def moved(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Returns `model` with every weight moved at random by up to half a step of int8 rounding.

    Rounding a model again that is stored in int8 changes nothing. The model with moved weights is
    one of those that round to the stored integers.

    Raises:
      ValueError: a model in bfloat16, whose numbers are further apart than half a step.
    """
    if model.config.dtype != "float32":
        raise ValueError(f"dtype: got {model.config.dtype}, expected float32 for moved weights")
    params = model.params
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params))))

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        key, names = next(keys), tuple(one.key for one in path)
        head = names[-2:] == ("token_embedder", "embedding") and model.config.logits_via_embedding
        if names[-1] != "kernel" and not head:
            return leaf
        # An output of the head is a row of the embedding, elsewhere a column.
        step = jnp.max(jnp.abs(leaf), axis=1 if head else 0, keepdims=True) / 127
        return leaf + (jax.random.uniform(key, leaf.shape, leaf.dtype) - 0.5) * step

    return _like(model, jax.tree.map_with_path(move, params))


@isolated
def rounded(model: LanguageModel, quantize: str) -> LanguageModel:
    """Returns `model` with weights in int8, as `load` does with this `quantize`."""
    packed_weights.check_quantize(quantize, model.config.dtype, False)
    bits, tied = packed_weights.input_bits(quantize), model.config.logits_via_embedding
    return _like(model, weight_layouts.round_params(model.params, bits, tied))


def _like(model: LanguageModel, params: dict) -> LanguageModel:
    how = dict(
        start_token=model.start_token, eos_ids=model.eos_ids, name=model.name, donate_params=True
    )
    return LanguageModel(model.config, params, model.vocabulary, **how)


class Divergence:
    """How far a rounded model's distributions are from the full one's, over the same tokens."""

    def __init__(
        self, full: LanguageModel, other: LanguageModel, drafter: LanguageModel | None = None
    ):
        """Starts without any tokens.

        Args:
          full, other: the model and its rounded form.
          drafter: a drafting model; without an encoder of its own, it uses the target's.
        """
        self._models, self._drafter = (full, other), drafter
        self._found: dict[str, list[np.ndarray]] = {}

    def add(self, inputs: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        """Scores rows of inputs and of the outputs that follow, by all models."""
        full, _ = self._models
        lengths = np.array([len(row) for row in outputs])
        before = [full.start_token] * len(outputs)
        if is_decoder_only(full):  # the last id of a prompt is fed like the outputs
            prompts = [row or [full.start_token] for row in inputs]
            inputs, before = [row[:-1] for row in prompts], [row[-1] for row in prompts]
        given, sizes = _pad(inputs), [*map(len, inputs)]
        fed = _pad([[first, *row[:-1]] for first, row in zip(before, outputs, strict=True)])
        target = [model.logits(given, fed, sizes) for model in self._models]
        draft = []
        if (drafter := self._drafter) is not None:
            for model in self._models:
                encoder = model if drafter.config.encoder_dim is not None else None
                logits = drafter.logits(given, fed, sizes, encoder)
                draft.append(match_width(logits, target[0].shape[-1]))
        inside = np.arange(fed.shape[1]) < lengths[:, None]
        for name, values in _compare(*target, draft).items():
            self._found.setdefault(name, []).append(np.asarray(values)[inside])

    def record(self) -> dict[str, Any]:
        """Returns the divergence over all tokens.

        `kl` is KL(full ‖ rounded) in nats at temperature 1; `logits_error` the root of the mean
        squared difference of logits over that of the full model's, both without their mean over the
        vocabulary; `argmax_changes` the share of tokens whose argmax differs. With a drafter,
        `alpha` is the mean of Σ min(p, q) at temperature 1 and `alpha_argmax` the share of tokens
        where both argmaxes are equal, for the full and the rounded target.
        """
        found = {name: np.concatenate(values) for name, values in self._found.items()}
        kl = found["kl"]
        record: dict[str, Any] = {
            "tokens": len(kl),
            "kl": {
                "mean": float(kl.mean()),
                "percentile_99": float(np.percentile(kl, 99)),
                "most": float(kl.max()),
            },
            "logits_error": float(np.sqrt(found["squared_error"].mean() / found["squared"].mean())),
            "argmax_changes": float(found["argmax_changes"].mean()),
        }
        for name in ("alpha", "alpha_argmax"):
            if f"{name}, full" in found:
                record[name] = {
                    which: float(found[f"{name}, {which}"].mean()) for which in ("full", "rounded")
                }
        return record


def compare_outputs(
    models: tuple[LanguageModel, LanguageModel],
    drafter: LanguageModel | None,
    inputs: Sequence[Sequence[int]],
    references: Sequence[str] | None,
    decode: Callable[[LanguageModel, str], list],
    batch_size: int,
) -> dict[str, Any]:
    """Returns the divergence of a rounded model, the outputs that differ, and both qualities.

    Args:
      models: the full model and its rounded form.
      drafter: as for `Divergence`.
      inputs: the inputs as ids.
      references: one for each input, for BLEU and chrF; None: neither.
      decode: returns the outputs of a model; the text says what is decoded.
      batch_size: rows that are scored together.

    Raises:
      ValueError: all outputs are empty.
    """
    full, other = models
    outputs = decode(full, "decoding in full precision")
    kept = [(row, one.tokens) for row, one in zip(inputs, outputs, strict=True) if one.tokens]
    if not kept:
        raise ValueError("got only empty outputs, expected inputs that the model answers")
    divergence = Divergence(full, other, drafter)
    parts = [kept[start : start + batch_size] for start in range(0, len(kept), batch_size)]
    for part in track(parts, len(parts), "scoring"):
        divergence.add(*zip(*part))
    again = decode(other, "decoding with rounded weights")
    pairs = zip(outputs, again, strict=True)
    return divergence.record() | {
        "inputs": len(inputs),
        "outputs_that_differ": sum(one.tokens != two.tokens for one, two in pairs),
        "full": {} if references is None else quality(outputs, references),
        "rounded": {} if references is None else quality(again, references),
    }


def _pad(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns the rows as an array, with zeros after their ends, of few widths: each compiles."""
    longest = -(-max(map(len, rows)) // _WIDTHS) * _WIDTHS
    return np.array([[*row, *[0] * (longest - len(row))] for row in rows], np.int32)


def _centre(logits: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    return logits - jnp.mean(logits, axis=-1, keepdims=True)


@jax.jit
def _compare(
    full: Float[Array, "B T V"],
    other: Float[Array, "B T V"],
    draft: Sequence[Float[Array, "B T V"]],
) -> dict[str, Array]:
    """Returns, for every token, the numbers that `Divergence.record` averages.

    `draft` has the drafter's logits for each of the two models, or nothing.
    """
    full, other, *draft = (logits.astype(jnp.float32) for logits in (full, other, *draft))
    p, q = jax.nn.log_softmax(full), jax.nn.log_softmax(other)
    best = [jnp.argmax(logits, axis=-1) for logits in (full, other)]
    found = {
        # Rounding may make a sum near 0 negative.
        "kl": jnp.maximum(jnp.sum(jnp.exp(p) * (p - q), axis=-1), 0),
        "squared_error": jnp.mean(jnp.square(_centre(other) - _centre(full)), axis=-1),
        "squared": jnp.mean(jnp.square(_centre(full)), axis=-1),
        "argmax_changes": best[0] != best[1],
    }
    for name, target, own, drafted in zip(("full", "rounded"), (full, other), best, draft):
        dists = jax.nn.softmax(target), jax.nn.softmax(drafted)
        found[f"alpha, {name}"] = jnp.sum(jnp.minimum(*dists), axis=-1)
        found[f"alpha_argmax, {name}"] = own == jnp.argmax(drafted, axis=-1)
    return found
