"""Reads a checkpoint's parameters one at a time: as floating-point numbers, or with kernels in 8
bits."""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.int8 import Int8Kernel
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.backends.sharding import read as read_shards
from specdec_jax.checkpoints import int8
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Leaf
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_shapes, unflatten

_EMBEDDING, _HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"


def kernels_of(
    checkpoint: Checkpoint, quantize: str | None, dtype: str, rules: ShardingRules | None = None
) -> str | None:
    """Returns how kernels are to be kept.

    That is "stored" (in the 8 bits that they are stored in), "rounded" (to 8 bits while they are
    read), or None (in `dtype`).

    Args:
      checkpoint: whose kernels.
      quantize, dtype: as for `checkpoints.load`.
      rules: how parameters are divided on a mesh, None without one.

    Raises:
      ValueError: `quantize` is not known, or not possible here.
    """
    packed_weights.check_quantize(quantize, dtype, rules is not None)
    asked = quantize in packed_weights.INPUT_BITS
    if not asked and (quantize == "none" or rules is not None or not packed_weights.usable(dtype)):
        return None
    return "stored" if _stored(checkpoint) else "rounded" if asked else None


def _stored(checkpoint: Checkpoint) -> bool:
    """Returns whether all kernels are stored in int8, and the embedding too if it is also the
    head."""
    names = [name for name in checkpoint.leaves if _is_kernel(name)]
    names += [_EMBEDDING] if checkpoint.config.logits_via_embedding else []
    return all(int8.fits(name, checkpoint.leaves[name]) for name in names)


def _is_kernel(name: str) -> bool:
    return name.endswith("/kernel")


def read_params(
    checkpoint: Checkpoint,
    dtype: str,
    rules: ShardingRules | None = None,
    kernels: str | None = None,
    input_bits: int | None = 16,
    report: Callable[[int], None] = lambda count: None,
) -> dict:
    """Returns the parameters as a nested dict of arrays, read one at a time.

    They lie on the default device, or divided over a mesh.

    Args:
      checkpoint: what to read.
      dtype: dtype of the arrays.
      rules: how parameters are divided on a mesh, None without one.
      kernels: from `kernels_of`. Kernels in int8 are `Int8Kernel`s; an embedding that is also the
        head is then there once more as a kernel.
      input_bits: of the `Int8Kernel`s.
      report: called with the size of each parameter once it is on its devices.
    """
    params: dict = {name: None for name in parameter_shapes(checkpoint.config)}
    # The largest first: what a read needs beside its result comes when little else is in memory.
    for name in sorted(
        checkpoint.leaves, key=lambda name: -math.prod(checkpoint.leaves[name].shape)
    ):
        leaf = checkpoint.leaves[name]
        if kernels and _is_kernel(name):
            params[name] = _in_8_bits(name, leaf, input_bits)
        else:
            params[name] = _read(name, leaf, jnp.dtype(dtype), rules)
        if kernels and name == _EMBEDDING and checkpoint.config.logits_via_embedding:
            params[_HEAD] = _in_8_bits(_HEAD, leaf.transposed(), input_bits)
        report(math.prod(leaf.shape))
    return unflatten(params)


def _read(name: str, leaf: Leaf, dtype: np.dtype, rules: ShardingRules | None) -> jax.Array:
    if rules is None:
        array = jax.device_put(leaf.load(dtype))
    else:
        sharding = rules.of_parameter(name, leaf.shape)
        array = read_shards(sharding, leaf.shape, functools.partial(leaf.load_part, dtype))
    return array.block_until_ready()


def _in_8_bits(name: str, leaf: Leaf, input_bits: int | None) -> Int8Kernel:
    """Returns a kernel `[D, F]` in int8: its stored integers if there are any, else rounded."""
    if leaf.parts and int8.fits(name, leaf):
        values, scales = leaf.parts
        integers, factors = (
            jax.device_put(values.load(np.int8)),
            jax.device_put(scales.load(np.float32)[0]),
        )
        found = Int8Kernel(integers, factors, input_bits)
    else:
        found = Int8Kernel.quantize(jax.device_put(leaf.load(np.float32)), input_bits)
    return jax.block_until_ready(found)


def required_bytes(
    config: ModelConfig, dtype: str, rules: ShardingRules | None = None, kernels: str | None = None
) -> int:
    """Returns the bytes of a device's memory that loading takes.

    They are those of the parameters, or of the device's part of them, and of twice the largest one,
    while the decode loop's layout is made of it. The devices of a CPU share one memory.

    Args:
      config: shape of the network.
      dtype: dtype of the parameters.
      rules: how parameters are divided on a mesh, None without one.
      kernels: from `kernels_of`.
    """
    shapes = parameter_shapes(config)
    if rules is not None:
        shapes = {
            name: rules.of_parameter(name, shape).shard_shape(shape)
            for name, shape in shapes.items()
        }
    if config.logits_via_embedding and rules is None and (kernels or packed_weights.usable(dtype)):
        shapes = {
            **shapes,
            _HEAD: shapes[_EMBEDDING][::-1],
        }  # a copy of the embedding, read by columns
    sizes = _sizes(shapes, jnp.dtype(dtype).itemsize)
    if kernels:
        sizes |= _sizes_in_8_bits(shapes)
    together = (
        len(rules.mesh.local_devices) if rules is not None and jax.default_backend() == "cpu" else 1
    )
    return sum(sizes.values()) * together + 2 * max(sizes.values())


def _sizes(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> dict[str, int]:
    return {name: math.prod(shape) * itemsize for name, shape in shapes.items()}


def _sizes_in_8_bits(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the bytes of each kernel in int8, with a scale of 4 bytes for each output."""
    return {
        name: math.prod(shape) + 4 * shape[-1] for name, shape in shapes.items() if _is_kernel(name)
    }
