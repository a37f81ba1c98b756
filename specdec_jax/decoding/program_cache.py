"""The folder of compiled programs, which later processes read."""

import logging

import jax

from specdec_jax.files import user_cache

_LOG = logging.getLogger(__name__)


def keep_programs(folder: str | None = None) -> None:
    """Keeps compiled programs in `folder`, so that a second start is quick.

    None is `programs` in the user's cache folder, if nobody else can write to it: programs are
    run. "" keeps nothing.
    """
    if folder is None:
        try:
            folder = str(user_cache.private_folder("programs"))
        except (ValueError, OSError) as error:
            _LOG.info("%s: compiled programs hold for this process", error)
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
