"""Self-tests of kernels for accelerators.

Before a process uses such a kernel it tries it once, on small arrays, and does without it if that
fails.
"""

import concurrent.futures
import sys
import threading
from collections.abc import Callable

import jax

from specdec_jax.backends.jax_settings import isolated


def run_self_test(numbers_are_right: Callable[[], bool]) -> str | None:
    """Runs a self-test; returns what is wrong, None if nothing is.

    `numbers_are_right` computes small arrays with and without a kernel, and compares them.
    """
    try:
        return None if numbers_are_right() else "a self-test gave other numbers"
    except Exception as error:  # whatever a compiler or driver raises: there is another way
        first, *_ = str(error).splitlines() or [""]
        return f"a self-test failed: {type(error).__name__}: {first[:200]}"


class KernelSelfTest:
    """A kernel's self-tests, one for each case: a case's runs when its result is first asked for.

    A case is the keyword arguments for which a compiler makes another program, such as a dtype;
    without any it is the usual one.

    Attributes:
      backend: where the kernel runs: "gpu" or "tpu".
    """

    def __init__(self, backend: str, rejected: str, find_fault: Callable[..., str | None]):
        """Makes a self-test that has not run yet.

        Args:
          backend: as above.
          rejected: what a line on standard error says if a self-test fails, before the case and the
            reason.
          find_fault: runs the self-test of a case and returns what is wrong, None if nothing is.
        """
        self.backend, self._rejected, self._find_fault = backend, rejected, find_fault
        self._lock = threading.Lock()  # several programs may be traced side by side
        self.forget()

    def forget(self) -> None:
        """Lets the self-tests run anew when their results are next asked for."""
        self._found: dict[tuple, str | None] = {}

    def passed(self, **case) -> bool:
        """Returns whether the kernel can be used in a case.

        On another backend it always can: there programs are compiled for an accelerator ahead of
        time.
        """
        return jax.default_backend() != self.backend or self.result(**case) is None

    def result(self, **case) -> str | None:
        """Returns what is wrong with the kernel in a case, None if nothing is."""
        key = tuple(case.items())
        with self._lock:
            if key not in self._found:
                # The caller is being traced, another thread is not.
                with concurrent.futures.ThreadPoolExecutor(1) as apart:
                    fault = apart.submit(isolated(self._find_fault), **case).result()
                self._found[key] = fault
                if fault:
                    which = ", ".join(f"{name} {value}" for name, value in key)
                    which = f" ({which})" if which else ""
                    print(f"{self._rejected}{which}: {fault}", file=sys.stderr)
            return self._found[key]
