"""Writes tiny checkpoints in every layout that `load` reads, from `{T5X name: array}`."""

import io
import json
import pathlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytorch_pickles
import safetensors.numpy
import sentencepiece
import tensorstore
from flax import serialization

from specdec_jax.checkpoints import converter
from specdec_jax.checkpoints.huggingface_t5 import tensor_name
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import parameter_shapes, unflatten
from specdec_jax.models.t5 import T5Config

TINY = T5Config(40, 16, 2, 4, 2, 3, 24)
TINY_1_0 = T5Config(40, 16, 2, 4, 2, 2, 24, mlp_activations=("relu",), logits_via_embedding=True)
HF_CONFIG = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 40,
    "d_model": 16,
    "num_heads": 2,
    "d_kv": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "d_ff": 24,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-6,
}


def random_params(config: T5Config, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in parameter_shapes(config).items()
    }


def to_tensors(params: dict[str, np.ndarray], dtype=np.float32) -> dict[str, np.ndarray]:
    """Returns tensors under Hugging Face's names, `[out, in]`."""
    transposed = ("/kernel", "/rel_embedding")
    return {
        tensor_name(name): np.array(x.T if name.endswith(transposed) else x, dtype, order="C")
        for name, x in params.items()
    }


def write_hf(folder: pathlib.Path, tensors: dict, shards: int = 1, **config) -> pathlib.Path:
    """Writes a Hugging Face folder with one or several safetensors files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
    if shards == 1:
        safetensors.numpy.save_file(
            tensors, folder / "model.safetensors", metadata={"format": "pt"}
        )
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        safetensors.numpy.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def write_hf_flax(folder: pathlib.Path, params: dict, **config) -> pathlib.Path:
    """Writes a Hugging Face folder with flax_model.msgpack only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
    tree = {}
    for name, x in params.items():
        *parents, _ = tensor_name(name).split(".")
        embedding = name.endswith(("/embedding", "/rel_embedding"))
        last = "embedding" if embedding else "kernel" if name.endswith("/kernel") else "weight"
        tree["/".join([*parents, last])] = (
            np.ascontiguousarray(x.T) if name.endswith("/rel_embedding") else x
        )
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(unflatten(tree)))
    return folder


def write_hf_pytorch(
    folder: pathlib.Path,
    tensors: dict,
    write=pytorch_pickles.write_zip,
    name="pytorch_model.bin",
    **config,
) -> pathlib.Path:
    """Writes a Hugging Face folder with PyTorch's file only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | config))
    pytorch_pickles.write_state(folder / name, tensors, write)
    return folder


def write_hf_pytorch_shards(folder: pathlib.Path, tensors: dict, **config) -> pathlib.Path:
    """Writes a Hugging Face folder with two of PyTorch's files and their index."""
    weight_map = {}
    for number in range(2):
        part = dict(list(tensors.items())[number::2])
        name = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        write_hf_pytorch(folder, part, name=name, **config)
        weight_map |= dict.fromkeys(part, name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    return folder


def write_t5x_legacy(
    folder: pathlib.Path,
    params: dict,
    driver="file",
    top_level_path=False,
    inline=(),
    optimizer=True,
):
    """Writes `checkpoint` in msgpack with zarr arrays beside it, as T5X did before Orbax."""
    folder.mkdir(parents=True)

    def stored(name, x):
        if name in inline:
            return x
        path = "target." + name.replace("/", ".")
        dtype = "bfloat16" if x.dtype == ml_dtypes.bfloat16 else "<f4"
        chunks = [max(1, -(-size // 2)) for size in x.shape]
        metadata = {
            "shape": list(x.shape),
            "chunks": chunks,
            "compressor": {"id": "gzip", "level": 1},
        }
        kvstore = {"driver": "file", "path": str(folder / path)}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata | {"dtype": dtype}}
        tensorstore.open(spec, create=True).result().write(x).result()
        spec = {
            "driver": "zarr",
            "dtype": x.dtype.name,
            "kvstore": {"driver": driver},
            "metadata": metadata,
        }
        (spec if top_level_path else spec["kvstore"])["path"] = path + "/"
        return spec

    target = unflatten({name: stored(name, x) for name, x in params.items()})
    state = (
        {"state": {"step": np.int32(7), "param_states": {"v": np.zeros(3)}}} if optimizer else {}
    )
    tree = {"version": 3, "optimizer": {"target": target, **state}}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(tree))
    return folder


def write_t5x_orbax(folder: pathlib.Path, params: dict, optimizer: bool = True) -> pathlib.Path:
    """Writes `checkpoint_<step>/state/` as T5X's Orbax manager does.

    It is an OCDBT database of `target.…` and `state.…`.
    """
    tree = {"target": unflatten(params)}
    if optimizer:
        tree["state"] = {"step": np.asarray(7), "param_states": {"v": unflatten(params)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True)) as checkpointer:
        checkpointer.save(folder.absolute() / "state", args=ocp.args.PyTreeSave(tree))
    return folder


def stack_layers(
    params: dict, heads: int | None = None, tables: str = "equal"
) -> dict[str, np.ndarray]:
    """Returns parameters in `scalable_t5`'s form: layers stacked on axis 1 under `decoder/decoder`.

    With `heads`, weights are `[D, H, K]`. `tables` says whether all layers hold an "equal" position
    table, "different" ones, or whether there is "one" beside the stacks.
    """
    stacked, groups = {}, {}
    layers = {
        stack: len({name.split("/")[1] for name in params if name.startswith(f"{stack}/layers_")})
        for stack in ("encoder", "decoder")
    }
    for name, x in params.items():
        stack, *path = name.split("/")
        if path[0].startswith("layers_"):
            if heads and "attention" in path[1] and path[-1] == "kernel":
                x = (
                    x.reshape(heads, -1, x.shape[1])
                    if path[2] == "out"
                    else x.reshape(x.shape[0], heads, -1)
                )
            groups.setdefault("/".join([stack, stack, *path[1:]]), []).append(x)
        elif path[0] == "relpos_bias" and tables != "one":
            copies = [x + (i if tables == "different" else 0) for i in range(layers[stack])]
            groups["/".join([stack, stack, *path])] = copies
        else:
            stacked[name] = x
    return stacked | {name: np.stack(parts, axis=1) for name, parts in groups.items()}


def sentencepiece_model(texts, size: int, **options) -> bytes:
    """Returns a SentencePiece model; `options` are its trainer's (`eos_id=…`).

    By default its special ids are not T5's: unknown 0, beginning 1, EOS 2, no padding.
    """
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, vocab_size=size, minloglevel=2, **options
    )
    return out.getvalue()


# One model in every layout, for the tests of loading.

PARAMS = random_params(TINY)
TENSORS = to_tensors(PARAMS)


def model_of(params=PARAMS, config=TINY, vocabulary=None, **ids) -> LanguageModel:
    tree = unflatten({name: jnp.asarray(x) for name, x in params.items()})
    return LanguageModel(config, tree, vocabulary, **ids)


def write_own(folder):
    converter.save(model_of(), folder)
    return folder


FORMATS = {
    "safetensors": lambda path: write_hf(path, TENSORS),
    "shards": lambda path: write_hf(path, TENSORS, shards=3),
    "flax": lambda path: write_hf_flax(path, PARAMS),
    "pytorch": lambda path: write_hf_pytorch(path, TENSORS),
    "pytorch legacy": lambda path: write_hf_pytorch(path, TENSORS, pytorch_pickles.write_legacy),
    "pytorch shards": lambda path: write_hf_pytorch_shards(path, TENSORS),
    "legacy": lambda path: write_t5x_legacy(path / "checkpoint_7", PARAMS),
    "legacy without optimizer": lambda path: write_t5x_legacy(
        path / "checkpoint_7", PARAMS, optimizer=False
    ),
    "legacy gfile": lambda path: write_t5x_legacy(path / "checkpoint_7", PARAMS, driver="gfile"),
    "legacy gcs": lambda path: write_t5x_legacy(
        path / "checkpoint_7", PARAMS, driver="gcs", top_level_path=True
    ),
    "legacy inline": lambda path: write_t5x_legacy(
        path / "checkpoint_7", PARAMS, inline=sorted(PARAMS)[:9]
    ),
    "legacy scan": lambda path: write_t5x_legacy(path / "checkpoint_7", stack_layers(PARAMS)),
    "orbax": lambda path: write_t5x_orbax(path / "checkpoint_7", PARAMS),
    "orbax without optimizer": lambda path: write_t5x_orbax(
        path / "checkpoint_7", PARAMS, optimizer=False
    ),
    "orbax scan": lambda path: write_t5x_orbax(
        path / "checkpoint_7", stack_layers(PARAMS, heads=2)
    ),
    "scan, one table": lambda path: write_t5x_orbax(
        path / "checkpoint_7", stack_layers(PARAMS, heads=2, tables="one")
    ),
    "own": write_own,
}
