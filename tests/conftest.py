"""Runs tests on the CPU, in float32 unless a test asks for more, and with the same examples every
time."""

import contextlib
import gc
import importlib.util
import os
import pathlib

import hypothesis
import pytest
from absl.flags import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=40, database=None)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Frees the compiled programs of a test file at its end.

    Each holds memory mappings, and XLA's compiler crashes when a process has no more of them (Linux
    allows some 65,000).
    """
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def kernel():
    """Compiles the CPU's kernels before any test reads what a command prints, since compiling them
    prints a line."""
    from specdec_jax.models import native

    native.available()


@pytest.fixture(scope="session", autouse=True)
def nothing_measured():
    """Makes `gamma="auto"` mean 4, as on a mesh, since measuring every toy model would take most of
    the time.

    `test_auto.py` measures.
    """
    from specdec_jax.decoding import costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "measurable", lambda network: False)
        yield


# XLA's newer fusion emitters take more than half of the time of a compilation without optimisation.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@pytest.fixture(scope="session")
def quick_options():
    """Yields those options of `QUICK` that this version of XLA has; they hold for every program
    compiled without optimisation."""
    import jax

    try:
        from jax._src import compiler  # no public setting holds for every compilation of some files only

        whole = compiler.get_compile_options
    except (ImportError, AttributeError):  # slower, not wrong
        yield {}
        return
    options = {}
    for name, value in QUICK.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
            options[name] = value

    def less(*arguments, env_options_overrides=None, **more):
        others = options if jax.config.read("jax_disable_most_optimizations") else {}
        return whole(*arguments, env_options_overrides={**others, **(env_options_overrides or {})}, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", less)
        yield options


@pytest.fixture(scope="session")
def quick_environment(quick_options):
    """Returns the environment of a separate process that compiles as with `quick`."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in quick_options.items())
    return {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}


@pytest.fixture(scope="module")
def quick(quick_options):
    """Compiles without optimisation; for programs that run for milliseconds."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def quick_draws(quick, quick_options):
    """Compiles with one level of optimisation, which pays for programs that run for seconds."""
    quick_options["xla_backend_optimization_level"] = 1
    yield
    del quick_options["xla_backend_optimization_level"]


@pytest.fixture
def optimised():
    """Compiles as for users, in a file whose other tests are `quick`; for tests that read compiled
    programs."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Returns a folder with the tiny language's files for training and validation."""
    from toy_training import write_language

    return write_language(tmp_path_factory.mktemp("text"))


@pytest.fixture
def load_script():
    """Returns a function that loads `scripts/<name>.py` as a module; the flags it defines are
    removed afterwards."""
    before = set(FLAGS)

    def load(name: str):
        path = pathlib.Path(__file__).parent.parent / "scripts" / f"{name}.py"
        if not path.is_file():
            pytest.skip("no scripts beside the tests")
        spec = importlib.util.spec_from_file_location(f"{name}_for_test", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in set(FLAGS) - before:
        delattr(FLAGS, name)
