"""Rejects computing in a process that was forked after JAX had begun, where it would hang."""

import os

_owner: int | None = None


def check_process() -> None:
    """Raises RuntimeError in a process that was forked from one that had called this before.

    JAX's threads are not copied by a fork, so that the first computation waits for them for ever.
    """
    global _owner
    if _owner is None:
        _owner = os.getpid()
    elif _owner != os.getpid():
        raise RuntimeError(
            f"process {os.getpid()}: got a fork of process {_owner}, in which JAX had computed "
            "before, expected a process of its own: JAX's threads are not copied by a fork, and "
            'this call would hang. Start it with multiprocessing.get_context("spawn"), or fork '
            "before the first model is loaded."
        )
