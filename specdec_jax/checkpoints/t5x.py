"""Reads and writes T5X checkpoints without t5x: legacy (msgpack and zarr) and Orbax (OCDBT)."""

import collections
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import serialization

from specdec_jax.checkpoints import flax_msgpack, stored_tensor, tensorstore_arrays
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Parameters, Report, StoredTensor
from specdec_jax.files import reading
from specdec_jax.files.places import AnyPath
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.files.writing import write_file
from specdec_jax.models.config_validation import build
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import flatten, unflatten
from specdec_jax.models.t5 import T5Config

_STEP = re.compile(r"checkpoint_(\d+)")
_MOST_LAYERS = 1000  # the limit of a configuration
_TABLE_SIZE = 1 << 22  # most numbers in the position tables of all layers; T5 11B's have 98,304


def find_step(folder: AnyPath) -> AnyPath | None:
    """Returns the `checkpoint_<step>` directory that `folder` is, or the newest in it, or None."""
    if _is_step(folder):
        return folder
    matches = ((_STEP.fullmatch(child.name), child) for child in folder.iterdir())
    steps = {int(name[1]): child for name, child in matches if name}
    newest = (steps[step] for step in sorted(steps, reverse=True))
    return next(filter(_is_step, newest), None)


def explain_unsupported(config: ModelConfig) -> str | None:
    """Returns why T5X's network `t5x.examples.t5` cannot compute such a model, None if it can."""
    if config.family != T5Config.family:
        return f"got a {type(config).__name__}, expected a T5"
    if (config.num_buckets, config.max_distance) != (32, 128):
        got = f"num_buckets={config.num_buckets}, max_distance={config.max_distance}"
        return f"got {got}, expected 32 and 128, which T5X's module has built in"
    if config.separate_embeddings:
        return "got separate_embeddings, expected one embedding that encoder and decoder share"
    if config.relative_bias_per_layer:
        expected = "a position table that all layers of a stack share"
        return f"got relative_bias_per_layer, expected {expected}"
    if config.scales_outputs != config.logits_via_embedding:
        return "got scale_decoder_outputs other than logits_via_embedding, expected T5X's scale"
    return None


def _is_step(folder: AnyPath) -> bool:
    return (folder / "checkpoint").is_file() or (folder / "state").is_dir()


def parse_step(folder: AnyPath) -> int | None:
    """Returns the step in the name `checkpoint_<step>`, None for other names."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def open_step(folder: AnyPath, config: T5Config | None = None) -> Checkpoint:
    """Opens a `checkpoint_<step>` directory without reading its parameters.

    Args:
      folder: the directory, with the file `checkpoint` (legacy) or the folder `state` (Orbax).
      config: shape of the network; None infers it from the parameters (`infer_config`).
    """
    if (folder / "checkpoint").is_file():
        stored = _open_legacy(folder)
    else:
        stored = tensorstore_arrays.open_ocdbt(folder / "state", ("target",))
    if not stored:
        raise mismatch_error(folder, "no parameters under 'target'", "those of a T5X checkpoint")
    per_layer = None if config is None else config.relative_bias_per_layer
    parameters = _unstack(stored, folder, per_layer)
    return Checkpoint(config or infer_config(parameters, folder), parameters)


def _open_legacy(folder: AnyPath) -> Parameters:
    path = folder / "checkpoint"
    contents = flax_msgpack.read_tree(path)
    version = contents.get("version", 0) if isinstance(contents, dict) else 0
    if version not in (2, 3):
        raise mismatch_error(path, f"checkpoint version {quote_value(version)}", "3")
    state = contents.get("optimizer", contents)
    target = state.get("target") if isinstance(state, dict) else None
    if not isinstance(target, dict):
        raise mismatch_error(path, "no 'target'", "the parameters of a T5X checkpoint")
    arrays = flatten(target, is_leaf=lambda _, value: _is_spec(value))
    # Whatever file system it was written to (gfile, gcs), the arrays now lie beside the msgpack.
    # Before TensorStore 0.1.14 the path was at the top of the spec.
    folders = {
        name: _find_array(name, spec, path) for name, spec in arrays.items() if _is_spec(spec)
    }
    made = {
        name: flax_msgpack.open_array(path, name, value)
        for name, value in arrays.items()
        if name not in folders
    }
    return made | tensorstore_arrays.open_zarr(folder, folders)


def _is_spec(value: Any) -> bool:
    """Returns whether a value is a TensorStore spec, which stands for an array."""
    return isinstance(value, dict) and {"driver", "kvstore"} <= value.keys()


def _find_array(name: str, spec: dict, path: AnyPath) -> str:
    """Returns the folder of a parameter's array, from the checkpoint's on."""
    store = spec["kvstore"]
    if spec["driver"] != "zarr" or not isinstance(store, dict):
        raise mismatch_error(
            f"{path}: parameter {name}", f"driver {quote_value(spec['driver'])}", "zarr"
        )
    given: Any = store.get("path", spec.get("path"))
    array = reading.join_inside(path.parent, given, path)
    reading.check_folder(array)
    # In a store TensorStore checks it: a listing of every array's folder would take long.
    if isinstance(array, pathlib.Path) and (array / ".zarray").exists():
        reading.check_file(array / ".zarray")
    return str(pathlib.PurePosixPath(given))


def _unstack(stored: Parameters, folder: AnyPath, per_layer: bool | None) -> Parameters:
    """Returns the parameters of `scalable_t5` as those of separate layers; others as they are.

    In `scalable_t5` the layers are stacked on axis 1 under `decoder/decoder` and `encoder/encoder`
    (or separate, if they were not scanned), weights may keep heads and features apart (`[D, layers,
    H, K]`, `out [H, layers, K, D]`), and every layer has a position table of its own.

    Args:
      stored: parameters by T5X's names.
      folder: the checkpoint, for error messages.
      per_layer: whether every layer keeps its own table; None: only if the tables of a stack
        differ.
    """

    @functools.lru_cache(maxsize=1)  # the layers of one parameter are read one after the other
    def read_stack(name: str, dtype: np.dtype) -> np.ndarray:
        return stored[name].load(dtype)

    def read_layer(name: str, i: int, dtype: np.dtype) -> np.ndarray:
        return read_stack(name, dtype)[:, i]

    is_table = re.compile(r"(encoder|decoder)/\1/relpos_bias(/.*)?").fullmatch
    tables = {name: _read_tables(stored[name], name, folder) for name in filter(is_table, stored)}
    if per_layer is None:
        per_layer = not all((table == table[:, :1]).all() for table in tables.values())
    parameters = {}
    for name, tensor in stored.items():
        stack, *path = name.split("/")
        if stack not in ("encoder", "decoder") or path[:1] != [stack]:
            in_layer = len(path) > 2 and path[0].startswith("layers_")
            parameters[name] = _join_heads(tensor, path[-2]) if in_layer else tensor
        elif name in tables and not per_layer:
            table = _share_table(tables[name], tensor.dtype, name, folder)
            parameters["/".join([stack, *path[1:]])] = table
        else:
            shape = tensor.shape
            if len(path) < 3 or len(shape) < 2 or shape[1] > _MOST_LAYERS:
                expected = f"at most {_MOST_LAYERS} layers on axis 1"
                raise mismatch_error(f"{folder}: parameter {name}", f"shape {shape}", expected)
            for i in range(shape[1]):
                made = functools.partial(read_layer, name, i)
                layer = StoredTensor.from_function((shape[0], *shape[2:]), made, tensor.dtype)
                key = "/".join([stack, f"layers_{i}", *path[1:]])
                parameters[key] = _join_heads(layer, path[-2])
    return parameters


def _join_heads(tensor: StoredTensor, module: str) -> StoredTensor:
    """Returns a weight `[D, H, K]`, or `[H, K, D]` for `out`, as a matrix; others as they are."""
    shape = tensor.shape
    if len(shape) != 3:
        return tensor
    shape = (shape[0] * shape[1], shape[2]) if module == "out" else (shape[0], shape[1] * shape[2])
    return StoredTensor.from_function(
        shape, lambda dtype: tensor.load(dtype).reshape(shape), tensor.dtype
    )


def _read_tables(tensor: StoredTensor, name: str, folder: AnyPath) -> np.ndarray:
    """Returns the position tables `[H, layers, buckets]` of a stack in float32."""
    if len(tensor.shape) != 3 or tensor.size > _TABLE_SIZE:
        raise mismatch_error(
            f"{folder}: parameter {name}", f"shape {tensor.shape}", "relative position tables"
        )
    return tensor.load(np.float32)


def _share_table(tables: np.ndarray, dtype: str, name: str, folder: AnyPath) -> StoredTensor:
    """Returns the table `[H, buckets]` that all layers of `tables [H, layers, buckets]` share."""
    if not (tables == tables[:, :1]).all():
        raise mismatch_error(
            f"{folder}: parameter {name}",
            "a relative position table of its own for each layer (as in umT5)",
            "one that all layers share, or a configuration with relative_bias_per_layer",
        )
    return dataclasses.replace(StoredTensor.from_array(tables[:, 0]), dtype=dtype)


def infer_config(parameters: Parameters, path: reading.PathLike) -> T5Config:
    """Returns the configuration that the parameters' shapes imply.

    A gated feed-forward block is taken to be gelu, and the distance limit to be 128.
    """
    table = "decoder/layers_0/relpos_bias/rel_embedding"
    per_layer = table in parameters
    names = {
        "embedding": "token_embedder/embedding",
        "table": table if per_layer else "decoder/relpos_bias/rel_embedding",
        "query": "decoder/layers_0/self_attention/query/kernel",
        "mlp": "decoder/layers_0/mlp/wo/kernel",
    }
    shapes = {}
    for key, name in names.items():
        if name not in parameters:
            expected = "one (the network's shape is inferred from it)"
            raise ValueError(f"{path}: parameter {name}: got none, expected {expected}")
        shapes[key] = shape = parameters[name].shape
        if len(shape) != 2:
            raise mismatch_error(f"{path}: parameter {name}", f"shape {shape}", "2 axes")
    (vocab_size, emb_dim), (num_heads, num_buckets) = shapes["embedding"], shapes["table"]
    inner = shapes["query"][1]
    if not num_heads or inner % num_heads:
        expected = f"a multiple of the {num_heads} heads"
        raise ValueError(f"{path}: got query weights of width {inner}, expected {expected}")
    layers = {"encoder": 1, "decoder": 1}
    for name in parameters:
        if match := re.match(r"(encoder|decoder)/layers_(\d{1,6})/", name):
            layers[match[1]] = max(layers[match[1]], int(match[2]) + 1)
    gated = "decoder/layers_0/mlp/wi_0/kernel" in parameters
    fields = {
        "vocab_size": vocab_size,
        "emb_dim": emb_dim,
        "num_heads": num_heads,
        "head_dim": inner // num_heads,
        "num_encoder_layers": layers["encoder"],
        "num_decoder_layers": layers["decoder"],
        "mlp_dim": shapes["mlp"][0],
        "mlp_activations": ("gelu", "linear") if gated else ("relu",),
        "logits_via_embedding": "decoder/logits_dense/kernel" not in parameters,
        "num_buckets": num_buckets,
        "relative_bias_per_layer": per_layer,
    }
    return build(T5Config, fields, path)


def stack_layers(parameters: Parameters, config: T5Config) -> Parameters:
    """Returns our parameters as those of the T5X network that can compute with them.

    That network is `t5`; or, if every layer has a position table, `scalable_t5` as it is by
    default: layers stacked on axis 1, and attention weights that keep heads and features apart.
    """
    if not config.relative_bias_per_layer:
        return parameters
    stored: Parameters = {}
    stacks: dict[str, dict[int, StoredTensor]] = collections.defaultdict(dict)
    for name, tensor in parameters.items():
        stack, *path = name.split("/")
        if path[0].startswith("layers_"):
            number = int(path[0].removeprefix("layers_"))
            stacks["/".join([stack, stack, *path[1:]])][number] = tensor
        else:
            stored[name] = tensor
    for name, layers in stacks.items():
        stored[name] = _stack(name, [layers[number] for number in sorted(layers)], config)
    return stored


def _stack(name: str, layers: list[StoredTensor], config: T5Config) -> StoredTensor:
    """Returns a parameter stacked over its layers, which are read together; inverts `_unstack`."""
    *_, parent, module, last = name.split("/")
    shape, heads = layers[0].shape, (config.num_heads, config.head_dim)
    if "attention" in parent and last == "kernel":
        shape = (*heads, shape[1]) if module == "out" else (shape[0], *heads)

    return StoredTensor.from_function(
        (shape[0], len(layers), *shape[1:]),
        lambda dtype: np.stack([layer.load(dtype).reshape(shape) for layer in layers], axis=1),
        layers[0].dtype,
    )


def write_legacy(
    parameters: Parameters, dtype: str, folder: pathlib.Path, step: int, report: Report
) -> None:
    """Writes a `checkpoint_<step>` directory in the legacy format, without optimizer states."""
    target = {}
    for name in stored_tensor.iterate_names(parameters, report):
        path = "target." + name.replace("/", ".")
        target[name] = tensorstore_arrays.write_zarr(parameters[name].load(dtype), folder, path)
    state = {"step": np.asarray(step, np.int32)}  # T5X reads its dtype
    contents = {"version": 3, "optimizer": {"state": state, "target": unflatten(target)}}
    write_file(folder / "checkpoint", serialization.msgpack_serialize(contents))


def write_orbax(
    parameters: Parameters, dtype: str, folder: pathlib.Path, step: int, report: Report
) -> None:
    """Writes the same as `write_legacy` in Orbax's format, which T5X writes today."""

    def arrays() -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
        yield ("state", "step"), np.asarray(step, np.int32)
        for name in stored_tensor.iterate_names(parameters, report):
            yield ("target", *name.split("/")), parameters[name].load(dtype)

    (folder / "state").mkdir()
    tensorstore_arrays.write_ocdbt(arrays(), folder / "state")
