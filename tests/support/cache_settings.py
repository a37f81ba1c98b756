"""JAX's settings of the folder of compiled programs."""

import contextlib
from collections.abc import Iterator

import jax

_NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restores the settings at the end."""
    before = {name: getattr(jax.config, name) for name in _NAMES}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
