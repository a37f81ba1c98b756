"""Trials of kernels for accelerators: before a process uses such a kernel it tries it once, on small
arrays, and does without it if that fails."""

import concurrent.futures
import sys
import threading
from collections.abc import Callable

import jax


def what_is_wrong(numbers_are_right: Callable[[], bool]) -> str | None:
    """Runs a trial; returns what is wrong, None if nothing is.

    `numbers_are_right` computes small arrays with and without a kernel, and compares them.
    """
    try:
        return None if numbers_are_right() else "a trial gave other numbers"
    except Exception as error:  # whatever a compiler or driver raises: there is another way
        first, *_ = str(error).splitlines() or [""]
        return f"a trial failed: {type(error).__name__}: {first[:200]}"


class Trial:
    """A kernel's trial, which runs when its result is first asked for.

    Attributes:
      backend: where the kernel runs: "gpu" or "tpu".
    """

    def __init__(self, backend: str, refused: str, why_not: Callable[[], str | None]):
        """Makes a trial that has not run yet.

        Args:
          backend: as above.
          refused: what a line on standard error says if the trial fails, before the reason.
          why_not: runs the trial and returns what is wrong, None if nothing is.
        """
        self.backend, self._refused, self._why_not = backend, refused, why_not
        self._lock = threading.Lock()  # several programs may be traced side by side
        self.forget()

    def forget(self) -> None:
        """Lets the trial run anew when its result is next asked for."""
        self._why: str | None = None
        self._tried = False

    def passed(self) -> bool:
        """Returns whether the kernel can be used.

        On another backend it always can: there programs are compiled for an accelerator ahead of
        time.
        """
        return jax.default_backend() != self.backend or self.result() is None

    def result(self) -> str | None:
        """Returns what is wrong with the kernel, None if nothing is."""
        with self._lock:
            if not self._tried:
                # The caller is being traced, another thread is not.
                with concurrent.futures.ThreadPoolExecutor(1) as apart:
                    self._why = apart.submit(self._why_not).result()
                self._tried = True
                if self._why:
                    print(f"{self._refused}: {self._why}", file=sys.stderr)
            return self._why
