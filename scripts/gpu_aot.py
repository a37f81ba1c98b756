"""Compiles the decode loop ahead of time for an NVIDIA H100, without one, and counts its kernels.

    pip install . 'jax[cuda13]>=0.11'
    CUDA_VISIBLE_DEVICES=-1 JAX_PLATFORMS=cpu python scripts/gpu_aot.py --gamma=7
    CUDA_VISIBLE_DEVICES=-1 JAX_PLATFORMS=cpu python scripts/gpu_aot.py --gamma=7 --quantize=int8
    CUDA_VISIBLE_DEVICES=-1 JAX_PLATFORMS=cpu python scripts/gpu_aot.py --tree=widths:4,3,2,1
    CUDA_VISIBLE_DEVICES=-1 JAX_PLATFORMS=cpu python scripts/gpu_aot.py --gamma=3 --num_beams=4

The program is the package's own loop, in bfloat16, of the first layers of both models. For each of
its loops a record is printed: the kernels that a pass launches, those in a decoder's layers, and
the trip count. If it is null, the host waits for the GPU before each pass. The last loop is the one
over iterations; before it come those of the drafter: catching up, which runs only after a full
acceptance, and the draft. The levels of a tree and of beams are unrolled. With
`--quantize=int8` the target's weights are in int8; `widened` lists those that are written to
memory in a wider dtype before a product reads them. These are counts of a compiled program, not
measurements.
"""

import json
import os

import jax
from absl import app, flags
from jax.experimental import topologies

from specdec_jax.decoding.progress import waiting
from specdec_jax.files.writing import write_file
from specdec_jax.models.t5 import PRESETS
from specdec_jax.speculative.tree_text import read_tree
from tools.compiled_text import loop_copies, loops, widened
from tools.lowering import Case

_TARGET = flags.DEFINE_enum("target", "t5_1_1/large", sorted(PRESETS), "Shape of the target.")
_DRAFTER = flags.DEFINE_enum("drafter", "t5_1_1/small", sorted(PRESETS), "Shape of the drafter.")
_LAYERS = flags.DEFINE_integer(
    "layers", 2, "Decoder layers of each model that are compiled.", lower_bound=1
)
_GAMMA = flags.DEFINE_integer(
    "gamma", 7, "Tokens drafted per iteration; 0: plain decoding.", lower_bound=0
)
_TREE = flags.DEFINE_string(
    "tree", None, "A tree in the place of γ, as for `specdec generate`, such as widths:3,2,1."
)
_BEAMS = flags.DEFINE_integer(
    "num_beams", None, "Beams of a beam search; none without.", lower_bound=1
)
_BATCH = flags.DEFINE_integer("batch_size", 1, "Number of rows.", lower_bound=1)
_QUANTIZE = flags.DEFINE_enum(
    "quantize", None, ["int8"], "Kernels of the target in int8, inputs in bfloat16."
)
_INPUT = flags.DEFINE_integer("input_length", 128, "Number of encoder positions.", lower_bound=1)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "The most new tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is argmax.", lower_bound=0)
_TEXT = flags.DEFINE_string("hlo", None, "File for the compiled loop's HLO text.")

# The compiler's description of the device: limits of compute capability 9.0, the H100 SXM's sizes.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 threads_per_warp: 32 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 device_memory_size: 84929347584
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def compiled_text(case: Case) -> str:
    """Compiles the decode loop and returns its text."""
    state = case.place(case.lowered_start().out_info)
    with jax.sharding.use_abstract_mesh(like(case.devices[0])):
        return case.lowered_loop(state).compile().as_text()


def like(device: jax.Device) -> jax.sharding.AbstractMesh:
    """Returns a mesh by which Pallas knows for which GPU it compiles."""
    about = dict(device_kind=device.device_kind, num_cores=None, platform="gpu")
    kind = jax.sharding.AbstractDevice(**about)
    return jax.sharding.AbstractMesh((), (), abstract_device=kind)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if _TREE.value and _BEAMS.value:
        raise app.UsageError(
            f"tree: got {_TREE.value} with --num_beams={_BEAMS.value}, expected one of the two"
        )
    # JAX compares the versions of libraries that only a program on a GPU needs, and not every
    # machine can load.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H100, topology="1x1x1"
        )
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise app.UsageError(
            f"no compiler for NVIDIA GPUs: {why}; expected jax[cuda13] of version 0.11"
        ) from None
    tree = None if _TREE.value is None else read_tree(_TREE.value)
    case = Case(
        tuple(topology.devices),
        _TARGET.value,
        _DRAFTER.value,
        tree.depth if tree else _GAMMA.value,
        tree,
        _BEAMS.value,
        None,
        _BATCH.value,
        _QUANTIZE.value is not None,
        _INPUT.value,
        _NEW.value,
        _TEMPERATURE.value,
        platform="cuda",
        layers=_LAYERS.value,
    )
    drafter = case.drafter if case.gamma else None
    with waiting(
        f"compiling the loop of {case.layers} layers of {case.target} and {drafter or 'no drafter'}"
    ):
        text = compiled_text(case)
    if _TEXT.value:
        write_file(_TEXT.value, text)
    record = {
        "what": "counts of a program compiled ahead of time; not a measurement",
        "device": "NVIDIA H100 80GB HBM3",
        "target": case.target,
        "drafter": drafter,
        "layers": case.layers,
        "gamma": case.gamma,
        "tree": _TREE.value,
        "num_beams": case.beams,
        "batch_size": case.batch,
        "temperature": case.temperature,
        "dtype": "bfloat16",
        "quantize": _QUANTIZE.value,
        "loops": loops(text),
        "copied_in_loops": loop_copies(text, least=2**16),
        "widened": widened(text),
        "jax": jax.__version__,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    app.run(main)
