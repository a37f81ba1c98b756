"""The folder of compiled programs, which later processes read."""

import jax

from specdec_jax.files import user_cache


def keep_programs(folder: str | None = None) -> None:
    """Keeps compiled programs in `folder`, so that a second start is quick.

    None is the user's cache folder; "" keeps nothing.
    """
    folder = str(user_cache.cache_folder()) if folder is None else folder
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
