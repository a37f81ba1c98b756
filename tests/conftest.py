"""Tests run on the CPU, in float32 unless a test asks for more, and with the same examples every time."""

import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import hypothesis  # noqa: E402
import pytest  # noqa: E402

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Frees the compiled programs of a file: each holds memory mappings, and where a process has no more of them (Linux
    allows some 65,000) XLA's compiler crashes."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="module")
def quick():
    """Programs that run for milliseconds are compiled without optimisation."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised():
    """As users' programs are compiled, in a file whose others are `quick`: for tests that read what was compiled."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Folder with the tiny language's files for training and validation."""
    from toy_training import write_language

    return write_language(tmp_path_factory.mktemp("text"))
