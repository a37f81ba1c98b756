"""Reads a checkpoint's parameters one at a time: in floating point, or with weights in int8."""

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.sharding import ShardingRules, read_parts
from specdec_jax.checkpoints import int8
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Report, StoredTensor
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import parameter_shapes, unflatten

# Parameters that are read at a time, if all have at most a part of the model's size, or little.
_READERS, _AHEAD, _LEAST_AHEAD = 8, 16, 4 << 20
_EMBEDDING, _HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"


def choose_int8_weights(
    checkpoint: Checkpoint, quantize: str | None, dtype: str, rules: ShardingRules | None = None
) -> str | None:
    """Returns whether weights are kept in int8, and where their integers come from.

    They are "stored" (the checkpoint has them), or "rounded" (while weights are read). None means
    that weights are in `dtype`.

    Args:
      checkpoint: an opened checkpoint.
      quantize, dtype: as for `checkpoints.load`.
      rules: how parameters are divided on a mesh, None without one.

    Raises:
      ValueError: `quantize` is not known, or not possible here.
    """
    packed_weights.check_quantize(quantize, dtype, rules is not None)
    asked = quantize in packed_weights.INPUT_BITS
    if not asked and (
        quantize == "none" or rules is not None or not packed_weights.can_pack(dtype)
    ):
        return None
    return "stored" if _are_stored_in_int8(checkpoint) else "rounded" if asked else None


def _are_stored_in_int8(checkpoint: Checkpoint) -> bool:
    """Returns whether all weights are stored in int8; the embedding too if it is also the head."""
    names = [name for name in checkpoint.parameters if _is_weight(name)]
    names += [_EMBEDDING] if checkpoint.config.logits_via_embedding else []
    return all(int8.is_quantized(name, checkpoint.parameters[name]) for name in names)


def _is_weight(name: str) -> bool:
    return name.endswith("/kernel")


def read_params(
    checkpoint: Checkpoint,
    dtype: str,
    rules: ShardingRules | None,
    int8_weights: str | None,
    input_bits: int | None,
    report: Report,
) -> dict:
    """Returns the parameters as a nested dict of arrays, read one at a time.

    They lie on the default device, or divided over a mesh.

    Args:
      checkpoint: what to read.
      dtype: dtype of the arrays.
      rules: how parameters are divided on a mesh, None without one.
      int8_weights: from `choose_int8_weights`. Weights in int8 are `Int8Weight`s; an embedding that
        is also the head is then there once more as a weight. In floating point a head is a
        `PackedWeight` where weights are packed, also one that is the embedding.
      input_bits: of the `Int8Weight`s.
      report: called with the size of each parameter once it is on its devices.
    """
    params: dict = {name: None for name in parameter_shapes(checkpoint.config)}
    alone = rules is None and checkpoint.config.uses_backend
    packs = alone and not int8_weights and packed_weights.can_pack(dtype)
    # The largest first: what a read needs beside its result comes when little else is in memory.
    tensors = sorted(checkpoint.parameters.items(), key=lambda item: -item[1].size)
    # A process of several reads only what its own devices hold.
    is_whole = rules is None or jax.process_count() == 1
    for name, tensor in _read_ahead(tensors, dtype, int8_weights) if is_whole else tensors:
        if int8_weights and _is_weight(name):
            params[name] = _read_int8(name, tensor, input_bits)
        elif packs and name == _EMBEDDING and checkpoint.config.logits_via_embedding:
            params[name] = PackedWeight.pack_rows(tensor.load(np.float32))
        else:
            params[name] = _read_floats(name, tensor, jnp.dtype(dtype), rules)
        if packs and name == _HEAD:  # large: later it would be there twice beside all others
            params[name] = jax.block_until_ready(PackedWeight.pack(params[name]))
        if int8_weights and name == _EMBEDDING and checkpoint.config.logits_via_embedding:
            params[_HEAD] = _read_int8(_HEAD, tensor.transposed(), input_bits)
        report(tensor.size)
        del tensor  # which may hold its numbers, while the next one is read
    return unflatten(params)


def _read_ahead(
    tensors: list[tuple[str, StoredTensor]], dtype: str, int8_weights: str | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields tensors by name; those that read ahead are in memory, and the next ones on their way.

    Only those that are read once, in one dtype, are read ahead.
    """
    kinds: dict[str, np.dtype] = {}
    sizes: dict[str, int] = {}
    model_bytes = 0
    for name, tensor in tensors:
        model_dtype = "int8" if int8_weights and _is_weight(name) else dtype
        model_bytes += jnp.dtype(model_dtype).itemsize * tensor.size
        if tensor.reads_ahead and not (int8_weights and name == _EMBEDDING):
            kind = dtype
            if int8_weights and _is_weight(name):
                kind = "int8" if tensor.parts and int8.is_quantized(name, tensor) else "float32"
            # Integers are widened to float32 on the way to any other dtype.
            widened = 1 + 4 if tensor.parts and kind != "int8" else 0
            kinds[name] = jnp.dtype(kind)
            sizes[name] = (kinds[name].itemsize + widened) * tensor.size
    most = max(_LEAST_AHEAD, model_bytes // _AHEAD)
    waiting = collections.deque((name, tensor) for name, tensor in tensors if name in kinds)
    running: dict[str, concurrent.futures.Future] = {}
    pool = concurrent.futures.ThreadPoolExecutor(_READERS)
    try:
        for name, tensor in tensors:
            while waiting and (
                not running or sum(sizes[other] for other in running) + sizes[waiting[0][0]] <= most
            ):
                following, its = waiting.popleft()
                running[following] = pool.submit(_hold, its, kinds[following])
            if name in running:
                tensor = running[name].result()
            yield name, tensor
            del tensor
            running.pop(name, None)
    finally:
        pool.shutdown(cancel_futures=True)


def _hold(tensor: StoredTensor, dtype: npt.DTypeLike) -> StoredTensor:
    """Returns a tensor that is in memory in `dtype`; of int8, its integers and scales are."""
    if tensor.parts and dtype == np.int8:
        values, scales = tensor.parts
        return dataclasses.replace(tensor, parts=(_hold(values, dtype), _hold(scales, np.float32)))
    held = StoredTensor.from_array(tensor.load(dtype))
    return dataclasses.replace(held, dtype=tensor.dtype)


def _read_floats(
    name: str, tensor: StoredTensor, dtype: np.dtype, rules: ShardingRules | None
) -> jax.Array:
    if rules is None:
        array = jax.device_put(tensor.load(dtype))
    else:
        sharding = rules.parameter_sharding(name, tensor.shape)
        array = read_parts(sharding, tensor.shape, functools.partial(tensor.load_part, dtype))
    return array.block_until_ready()


def _read_int8(name: str, tensor: StoredTensor, input_bits: int | None) -> Int8Weight:
    """Returns a weight `[D, F]` in int8: its stored integers if there are any, else rounded."""
    if tensor.parts and int8.is_quantized(name, tensor):
        values, scales = (
            part.load(kind) for part, kind in zip(tensor.parts, (np.int8, np.float32))
        )
        weight = Int8Weight(jax.device_put(values), jax.device_put(scales[0]), input_bits)
    else:
        weight = Int8Weight.quantize(jax.device_put(tensor.load(np.float32)), input_bits)
    return jax.block_until_ready(weight)


def required_bytes(
    config: ModelConfig,
    dtype: str,
    rules: ShardingRules | None = None,
    int8_weights: str | None = None,
) -> int:
    """Returns the bytes of a device's memory that loading takes.

    They are those of the parameters, or of the device's part of them, and of twice the largest one,
    while the decode loop's layout is made of it. In int8 an embedding that is also the head is
    there once more. The devices of a CPU share one memory.

    Args:
      config: shape of the network.
      dtype: dtype of the parameters.
      rules: how parameters are divided on a mesh, None without one.
      int8_weights: from `choose_int8_weights`.
    """
    shapes: Mapping[str, tuple[int, ...]] = parameter_shapes(config)
    devices = 1
    if rules is not None:
        shapes = {
            name: rules.parameter_sharding(name, x).shard_shape(x) for name, x in shapes.items()
        }
        devices = len(rules.mesh.local_devices) if jax.default_backend() == "cpu" else 1
    elif config.logits_via_embedding and int8_weights:
        shapes = {**shapes, _HEAD: shapes[_EMBEDDING][::-1]}
    itemsize = jnp.dtype(dtype).itemsize
    sizes = {name: math.prod(shape) * itemsize for name, shape in shapes.items()}
    if int8_weights:  # with a scale of 4 bytes for each output
        weights = {name: shape for name, shape in shapes.items() if _is_weight(name)}
        sizes |= {name: math.prod(shape) + 4 * shape[-1] for name, shape in weights.items()}
    return sum(sizes.values()) * devices + 2 * max(sizes.values())
