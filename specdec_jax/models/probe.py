"""Whether a library of kernels works here, found out in a process of its own: `python -I probe.py JSON`.

What is wrong with a library may end the process that loads it. This one imports nothing of the package, so as to start quickly.
"""

import ctypes
import json
import sys
from collections.abc import Mapping

_TOLERANCE = 1e-5  # of the largest output


def register(library: str, targets: Mapping[str, str]) -> ctypes.CDLL:
    """Loads a library and registers its handlers with XLA for the CPU; once in a process.

    Args:
      library: path of the file.
      targets: name of each FFI target, with that of the symbol of its handler.

    Raises:
      OSError: the file cannot be loaded.
      AttributeError: it lacks a symbol.
    """
    import jax

    loaded = ctypes.CDLL(library)
    handlers = {name: jax.ffi.pycapsule(getattr(loaded, symbol)) for name, symbol in targets.items()}
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return loaded


def check() -> None:
    """Runs each product once, in a size that several threads share, and leaves the process where a result is wrong."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    M, K, F, P = 5, 600, 512, 16
    x, w = (rng.standard_normal(shape, dtype=np.float32) for shape in ((M, K), (K, F)))
    quantised, scales = rng.integers(-127, 128, (K, F), dtype=np.int8), rng.random(F, dtype=np.float32) + 1
    panels = lambda kernel: kernel.reshape(K, F // P, P).transpose(1, 0, 2)
    cases = {
        "specdec_product_f32": ((x, panels(w)), x.astype(np.float64) @ w),
        "specdec_product_s8": ((x, panels(quantised), scales), x.astype(np.float64) @ quantised * scales),
    }
    for name, (arguments, expected) in cases.items():
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((M, F), np.float32))
        got = np.asarray(jax.jit(lambda *arrays: call(*arrays, threads=np.int64(2)))(*arguments))
        off = np.abs(got - expected).max() / np.abs(expected).max()
        if not off < _TOLERANCE:
            sys.exit(f"{name}: got outputs that are off by {off:.2g}, expected at most {_TOLERANCE:g}")


def main() -> None:
    """Ends with status 0 and prints "works", or with what is wrong on standard error."""
    library, targets, sys.path[:] = json.loads(sys.argv[1])
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file
    except ImportError:  # Windows
        pass
    try:
        register(library, targets)
        check()
    except Exception as error:  # without JAX's traceback, whose last line says nothing
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print("works")


if __name__ == "__main__":
    main()
