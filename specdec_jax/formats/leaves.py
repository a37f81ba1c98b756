"""What every checkpoint format gives: parameters by T5X's names, each with its shape and a way to read it alone."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from specdec_jax.models.base import ModelConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.vocabularies import Vocabulary

FLOATS = ("float32", "bfloat16", "float16", "float64")  # what a parameter may be stored as
# What a writer goes through the names of the parameters with: a progress bar, or nothing.
Track = Callable[[Sequence[str]], Iterable[str]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One stored parameter.

    Attributes:
      shape: in this package's layout, kernels `[in, out]`.
      read: `(dtype, transpose)` -> what is stored, or its transpose, as an array of that dtype; reads nothing else.
      dtype: name of the stored dtype.
      turned: the parameter is the transpose of what is stored.
      read_part: `(dtype, box)` -> that part of what is stored, a slice of every axis; None where only all can be read.
      parts: int8 values and float32 scales whose product it is, where that is what is stored; the scales have length 1 along
        the axis of which all numbers share one.
    """

    shape: tuple[int, ...]
    read: Callable[[np.dtype, bool], np.ndarray]
    dtype: str
    turned: bool = False
    read_part: Callable[[np.dtype, tuple[slice, ...]], np.ndarray] | None = None
    parts: "tuple[Leaf, Leaf] | None" = None

    def transposed(self) -> "Leaf":
        """The transpose of a matrix, made while it is read."""
        parts = self.parts and (self.parts[0].transposed(), self.parts[1].transposed())
        return dataclasses.replace(self, shape=self.shape[::-1], turned=not self.turned, parts=parts)

    def load(self, dtype) -> np.ndarray:
        """The parameter, in this package's layout."""
        return self.read(np.dtype(dtype), self.turned)

    def load_part(self, dtype, box: tuple[slice, ...]) -> np.ndarray:
        """A part of the parameter, a slice of every axis; no more is read, where the format allows it."""
        whole = all(axis.stop - axis.start == size for axis, size in zip(box, self.shape))
        if whole or self.read_part is None:
            return self.load(dtype)[box]
        return self.read_part(np.dtype(dtype), box[::-1]).T if self.turned else self.read_part(np.dtype(dtype), box)

    @classmethod
    def of(cls, array) -> "Leaf":
        """An array that is there already, of numpy or JAX."""

        def read(dtype, transpose: bool) -> np.ndarray:
            stored = np.asarray(array)
            return np.ascontiguousarray(stored.T if transpose else stored).astype(dtype, copy=False)

        return cls(tuple(array.shape), read, array.dtype.name)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint of which no parameter has been read yet.

    Attributes:
      config: shape of the network; its `dtype` does not matter.
      leaves: parameters by their name, T5X's, `decoder/layers_0/mlp/wo/kernel`.
      vocabulary: None where the checkpoint has none.
      start_token, eos_ids: None where the checkpoint does not say.
      encoder_fingerprint: of the model whose encoder output the network attends to, see `LanguageModel`.
    """

    config: ModelConfig
    leaves: dict[str, Leaf]
    vocabulary: Vocabulary | None = None
    start_token: int | None = None
    eos_ids: tuple[int, ...] | None = None
    encoder_fingerprint: str | None = None


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


def check(checkpoint: Checkpoint, path) -> None:
    """Raises ValueError where a parameter is missing, unexpected or of the wrong shape."""
    kind = "GPT" if isinstance(checkpoint.config, GPTConfig) else "T5"
    check_shapes(checkpoint.leaves, parameter_shapes(checkpoint.config), path, f"of a {kind} of this configuration")


def check_shapes(leaves: dict[str, Leaf], expected: dict[str, tuple[int, ...]], path, whose: str) -> None:
    """As `check`, for any set of names and shapes; `whose` says in the message what they are those of."""
    for name, shape in expected.items():
        if name not in leaves:
            raise ValueError(f"{path}: parameter {name}: got none, expected one of shape {shape}")
        if tuple(leaves[name].shape) != shape:
            raise ValueError(f"{path}: parameter {name}: got shape {tuple(leaves[name].shape)}, expected {shape}")
    for name in leaves:
        if name not in expected:
            raise ValueError(f"{path}: got unexpected parameter {name}, expected only those {whose}")


_BLOCK_BYTES = 1 << 22


def fill_rows(shape, dtype, read_rows, transpose: bool = False, multiple: int = 1) -> np.ndarray:
    """An array built from blocks of rows, so that a cast or a transpose never holds a second copy of it.

    Args:
      shape: `(rows, …)` as stored.
      dtype: of the result.
      read_rows: `(start, stop)` -> those rows as stored.
      transpose: the result is the transpose of the stored matrix.
      multiple: rows that are stored together; blocks are multiples of it.
    """
    out = np.empty(shape[::-1] if transpose else shape, dtype)
    if not shape:
        out[()] = read_rows(0, 1).reshape(())
        return out
    rows = _BLOCK_BYTES // (4 * max(1, math.prod(shape[1:])))
    step = multiple * max(1, rows // multiple)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        block = read_rows(start, stop)
        if transpose:
            out[:, start:stop] = block.T
        else:
            out[start:stop] = block
    return out
