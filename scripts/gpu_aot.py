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

from specdec_jax.files.progress import show_waiting
from specdec_jax.files.writing import write_file
from tools.case_flags import CaseFlags
from tools.compiled_text import loop_copies, loops, widened
from tools.lowering import Case

_CASE = CaseFlags("t5_1_1/large")
_LAYERS = flags.DEFINE_integer(
    "layers", 2, "Decoder layers of each model that are compiled.", lower_bound=1
)

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
    _CASE.check(argv)
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
    case = _CASE.make_case(topology.devices, platform="cuda", layers=_LAYERS.value)
    drafter = case.drafter if case.gamma else None
    with show_waiting(
        f"compiling the loop of {case.layers} layers of {case.target} and {drafter or 'no drafter'}"
    ):
        text = compiled_text(case)
    if _CASE.text.value:
        write_file(_CASE.text.value, text)
    record = {
        "what": "counts of a program compiled ahead of time; not a measurement",
        "device": "NVIDIA H100 80GB HBM3",
        **_CASE.record(case),
        "layers": case.layers,
        "loops": loops(text),
        "copied_in_loops": loop_copies(text, least=2**16),
        "widened": widened(text),
        "jax": jax.__version__,
    }
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    app.run(main)
