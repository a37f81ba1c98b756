"""Reads and writes T5X checkpoints without t5x: legacy (msgpack and zarr arrays) and Orbax (OCDBT),
with scanned layers too."""

import collections
import dataclasses
import functools
import math
import pathlib
import re
from typing import NamedTuple

import numpy as np
from flax import serialization

from specdec_jax.checkpoints import flax_msgpack, tensorstore_arrays
from specdec_jax.checkpoints.stored_tensor import Checkpoint, Leaf, Report, reporting
from specdec_jax.files.reading import check_file, check_folder, inside, shown
from specdec_jax.files.writing import write_file
from specdec_jax.models.config_validation import build
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.parameters import flatten, unflatten
from specdec_jax.models.t5 import T5Config

_STEP = re.compile(r"checkpoint_(\d+)")
_MOST_LAYERS = 1000  # the limit of a configuration
_TABLE_SIZE = 1 << 22  # most numbers in the position tables of all layers; T5 11B's have 98,304


def find(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the `checkpoint_<step>` directory that `folder` is, or the newest in it, or None."""
    if _is_step(folder):
        return folder
    found = ((_STEP.fullmatch(child.name), child) for child in folder.iterdir())
    steps = {int(name[1]): child for name, child in found if name and _is_step(child)}
    return steps[max(steps)] if steps else None


def why_not(config: ModelConfig) -> str | None:
    """Returns why T5X's own network, `t5x.examples.t5`, cannot compute a model of this shape; None
    if it can."""
    if config.family != T5Config.family:
        return f"got a {type(config).__name__}, expected a T5"
    if (config.num_buckets, config.max_distance) != (32, 128):
        got = f"num_buckets={config.num_buckets}, max_distance={config.max_distance}"
        return f"got {got}, expected 32 and 128, which T5X's module has built in"
    if config.separate_embeddings:
        return "got separate_embeddings, expected one embedding that encoder and decoder share"
    if config.relative_bias_per_layer:
        return "got relative_bias_per_layer, expected a position table that all layers of a stack share"
    if config.scales_outputs != config.logits_via_embedding:
        return "got scale_decoder_outputs other than logits_via_embedding, expected T5X's scale"
    return None


def _is_step(folder: pathlib.Path) -> bool:
    return (folder / "checkpoint").is_file() or (folder / "state").is_dir()


def step_of(folder: pathlib.Path) -> int | None:
    """Returns the step in the name `checkpoint_<step>`, None for other names."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def open_step(folder: pathlib.Path, config: T5Config | None = None) -> Checkpoint:
    """Opens a `checkpoint_<step>` directory without reading its parameters.

    Args:
      folder: the directory, with the file `checkpoint` (legacy) or the folder `state` (Orbax).
      config: shape of the network; None infers it from the parameters (`infer_config`).
    """
    if (folder / "checkpoint").is_file():
        leaves = _open_legacy(folder)
    else:
        leaves = tensorstore_arrays.open_ocdbt(folder / "state", ("target",))
    if not leaves:
        raise ValueError(
            f"{folder}: got no parameters under 'target', expected those of a T5X checkpoint"
        )
    leaves = _unstack(leaves, folder, None if config is None else config.relative_bias_per_layer)
    return Checkpoint(config or infer_config(leaves, folder), leaves)


def _open_legacy(folder: pathlib.Path) -> dict[str, Leaf]:
    path = folder / "checkpoint"
    contents = flax_msgpack.read_tree(path)
    version = contents.get("version", 0) if isinstance(contents, dict) else 0
    if version not in (2, 3):
        raise ValueError(f"{path}: got checkpoint version {shown(version)}, expected 3")
    state = contents.get("optimizer", contents)
    target = state.get("target") if isinstance(state, dict) else None
    if not isinstance(target, dict):
        raise ValueError(f"{path}: got no 'target', expected the parameters of a T5X checkpoint")
    return {
        name: _legacy_leaf(name, value, path)
        for name, value in flatten(_mark_arrays(target)).items()
    }


class _Spec(NamedTuple):
    """A TensorStore spec, kept apart from the nested dicts around it."""

    spec: dict


def _mark_arrays(tree):
    """Returns the tree with every TensorStore spec wrapped, so that `flatten` stops there."""
    if not isinstance(tree, dict):
        return tree
    if {"driver", "kvstore"} <= tree.keys():
        return _Spec(tree)
    return {key: _mark_arrays(value) for key, value in tree.items()}


def _legacy_leaf(name: str, value, path: pathlib.Path) -> Leaf:
    if not isinstance(value, _Spec):
        return flax_msgpack.leaf(path, name, value)
    spec, store = value.spec, value.spec["kvstore"]
    if spec["driver"] != "zarr" or not isinstance(store, dict):
        raise ValueError(
            f"{path}: parameter {name}: got driver {shown(spec['driver'])}, expected zarr"
        )
    # Whatever file system it was written to (gfile, gcs), the arrays now lie beside the msgpack.
    # Before TensorStore 0.1.14 the path was at the top of the spec.
    array = inside(path.parent, store.get("path", spec.get("path")), path)
    check_folder(array)
    if (array / ".zarray").exists():
        check_file(array / ".zarray")
    kvstore = {"driver": "file", "path": f"{array.resolve()}/"}
    return tensorstore_arrays.open_array({"driver": "zarr", "kvstore": kvstore}, name, path.parent)


def _unstack(
    leaves: dict[str, Leaf], folder: pathlib.Path, per_layer: bool | None
) -> dict[str, Leaf]:
    """Returns the parameters of `scalable_t5` as those of separate layers; others as they are.

    In `scalable_t5` the layers are stacked on axis 1 under `decoder/decoder` and `encoder/encoder`
    (or separate, if they were not scanned), kernels may keep heads and features apart (`[D, layers,
    H, K]`, `out [H, layers, K, D]`), and every layer has a position table of its own.

    Args:
      leaves: parameters by T5X's names.
      folder: the checkpoint, for error messages.
      per_layer: whether every layer keeps its own table; None: only if the tables of a stack
        differ.
    """
    flat = {}

    @functools.lru_cache(maxsize=1)  # the layers of one parameter are read one after the other
    def stacked(name: str, dtype) -> np.ndarray:
        return leaves[name].load(dtype)

    tables = {
        name: _read_tables(leaf, name, folder)
        for name, leaf in leaves.items()
        if _is_stack_of_tables(name)
    }
    if per_layer is None:
        per_layer = not all((table == table[:, :1]).all() for table in tables.values())
    for name, leaf in leaves.items():
        stack, *path = name.split("/")
        if stack not in ("encoder", "decoder") or path[:1] != [stack]:
            flat[name] = (
                _joined(leaf, path[-2]) if len(path) > 2 and path[0].startswith("layers_") else leaf
            )
        elif name in tables and not per_layer:
            flat["/".join([stack, *path[1:]])] = _shared_table(
                tables[name], leaf.dtype, name, folder
            )
        else:
            if len(path) < 3 or len(leaf.shape) < 2 or leaf.shape[1] > _MOST_LAYERS:
                expected = f"at most {_MOST_LAYERS} layers on axis 1"
                raise ValueError(
                    f"{folder}: parameter {name}: got shape {leaf.shape}, expected {expected}"
                )
            for i in range(leaf.shape[1]):
                layer = _layer(leaf, functools.partial(stacked, name), i)
                flat["/".join([stack, f"layers_{i}", *path[1:]])] = _joined(layer, path[-2])
    return flat


def _layer(stack: Leaf, read_stack, i: int) -> Leaf:
    """Returns layer `i` of a stacked parameter."""

    def read(dtype, transpose: bool) -> np.ndarray:
        array = read_stack(dtype)[:, i]
        return np.ascontiguousarray(array.T if transpose else array)

    return Leaf((stack.shape[0], *stack.shape[2:]), read, stack.dtype)


def _joined(leaf: Leaf, module: str) -> Leaf:
    """Returns a kernel `[D, H, K]`, or `[H, K, D]` for `out`, with heads and features joined;
    anything else as it is."""
    shape = leaf.shape
    if len(shape) != 3:
        return leaf
    shape = (shape[0] * shape[1], shape[2]) if module == "out" else (shape[0], shape[1] * shape[2])

    def read(dtype, transpose: bool) -> np.ndarray:
        array = leaf.load(dtype).reshape(shape)
        return np.ascontiguousarray(array.T if transpose else array)

    return Leaf(shape, read, leaf.dtype)


def _is_stack_of_tables(name: str) -> bool:
    stack, *path = name.split("/")
    return stack in ("encoder", "decoder") and path[:2] == [stack, "relpos_bias"]


def _read_tables(leaf: Leaf, name: str, folder: pathlib.Path) -> np.ndarray:
    """Returns the position tables `[H, layers, buckets]` of a stack in float32."""
    if len(leaf.shape) != 3 or math.prod(leaf.shape) > _TABLE_SIZE:
        raise ValueError(
            f"{folder}: parameter {name}: got shape {leaf.shape}, expected relative position tables"
        )
    return leaf.load(np.float32)


def _shared_table(tables: np.ndarray, dtype: str, name: str, folder: pathlib.Path) -> Leaf:
    """Returns the one table `[H, buckets]` that all layers of `tables [H, layers, buckets]` share."""
    if not (tables == tables[:, :1]).all():
        raise ValueError(
            f"{folder}: parameter {name}: got a relative position table of its own for each layer (as in umT5), "
            "expected one that all layers share, or a configuration with relative_bias_per_layer"
        )
    return dataclasses.replace(Leaf.from_array(tables[:, 0]), dtype=dtype)


def infer_config(leaves: dict[str, Leaf], path) -> T5Config:
    """Returns the configuration that the parameters' shapes imply; takes a gated feed-forward block
    for gelu and the distance limit to be 128."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in leaves:
            raise ValueError(
                f"{path}: parameter {name}: got none, expected one (it tells the shape of the network)"
            )
        got = leaves[name].shape
        if len(got) != rank:
            raise ValueError(f"{path}: parameter {name}: got shape {got}, expected {rank} axes")
        return got

    def layers(stack: str) -> int:
        numbers = [
            int(match[1])
            for name in leaves
            if (match := re.match(rf"{stack}/layers_(\d{{1,6}})/", name))
        ]
        return max(numbers, default=0) + 1

    vocab_size, emb_dim = shape("token_embedder/embedding", 2)
    table = "relpos_bias/rel_embedding"
    per_layer = f"decoder/layers_0/{table}" in leaves
    num_heads, num_buckets = shape(
        f"decoder/layers_0/{table}" if per_layer else f"decoder/{table}", 2
    )
    inner = shape("decoder/layers_0/self_attention/query/kernel", 2)[1]
    if not num_heads or inner % num_heads:
        raise ValueError(
            f"{path}: got query kernels of width {inner}, expected a multiple of the {num_heads} heads"
        )
    gated = "decoder/layers_0/mlp/wi_0/kernel" in leaves
    fields = dict(
        vocab_size=vocab_size,
        emb_dim=emb_dim,
        num_heads=num_heads,
        head_dim=inner // num_heads,
        num_encoder_layers=layers("encoder"),
        num_decoder_layers=layers("decoder"),
        mlp_dim=shape("decoder/layers_0/mlp/wo/kernel", 2)[0],
        mlp_activations=("gelu", "linear") if gated else ("relu",),
        logits_via_embedding="decoder/logits_dense/kernel" not in leaves,
        num_buckets=num_buckets,
        relative_bias_per_layer=per_layer,
    )
    return build(T5Config, fields, path)


def leaves_by_their_names(leaves: dict[str, Leaf], config: T5Config) -> dict[str, Leaf]:
    """Returns our leaves as those of the T5X network that can compute with them.

    That network is `t5`; or, if every layer has a position table, `scalable_t5` as it is by
    default: layers stacked on axis 1, and attention kernels that keep heads and features apart.
    """
    if not config.relative_bias_per_layer:
        return leaves
    found, stacks = {}, collections.defaultdict(list)
    for name, leaf in leaves.items():
        stack, *path = name.split("/")
        if path[0].startswith("layers_"):
            stacks["/".join([stack, stack, *path[1:]])].append(
                (int(path[0].removeprefix("layers_")), leaf)
            )
        else:
            found[name] = leaf
    for name, layers in stacks.items():
        layers.sort(key=lambda layer: layer[0])
        found[name] = _stacked(name, [leaf for _, leaf in layers], config)
    return found


def _stacked(name: str, layers: list[Leaf], config: T5Config) -> Leaf:
    """Returns a parameter stacked over its layers: the inverse of `_unstack`; all layers are read
    together."""
    *_, parent, module, last = name.split("/")
    shape, heads = layers[0].shape, (config.num_heads, config.head_dim)
    if "attention" in parent and last == "kernel":
        shape = (*heads, shape[1]) if module == "out" else (shape[0], *heads)

    def read(dtype, transpose):
        return np.stack([leaf.load(dtype).reshape(shape) for leaf in layers], axis=1)

    return Leaf((shape[0], len(layers), *shape[1:]), read, layers[0].dtype)


def write_legacy(
    leaves: dict[str, Leaf], dtype: str, folder: pathlib.Path, step: int, report: Report
) -> None:
    """Writes the contents of a `checkpoint_<step>` directory in the legacy format, without
    optimizer states."""
    target = {}
    for name in reporting(leaves, report):
        path = "target." + name.replace("/", ".")
        target[name] = tensorstore_arrays.write_zarr(leaves[name].load(dtype), folder, path)
    state = {"step": np.asarray(step, np.int32)}  # T5X asks it for its dtype
    contents = {"version": 3, "optimizer": {"state": state, "target": unflatten(target)}}
    write_file(folder / "checkpoint", serialization.msgpack_serialize(contents))


def write_orbax(
    leaves: dict[str, Leaf], dtype: str, folder: pathlib.Path, step: int, report: Report
) -> None:
    """Writes the same as `write_legacy` in Orbax's format, which T5X writes today."""

    def arrays():
        yield ("state", "step"), np.asarray(step, np.int32)
        for name in reporting(leaves, report):
            yield ("target", *name.split("/")), leaves[name].load(dtype)

    (folder / "state").mkdir()
    tensorstore_arrays.write_ocdbt(arrays(), folder / "state")
