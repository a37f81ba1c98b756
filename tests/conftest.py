"""Tests run on the CPU, in float32 unless a test asks for more, and with the same examples every time."""

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
    """Frees the compiled programs of a file: each holds memory mappings, and where a process has no more of them (Linux
    allows some 65,000) XLA's compiler crashes."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session", autouse=True)
def kernel():
    """The CPU's kernels are compiled before a test reads what a command says: that they are is a line."""
    from specdec_jax.models import native

    native.available()


@pytest.fixture(scope="session", autouse=True)
def nothing_measured():
    """`gamma="auto"` is 4, as on a mesh: to measure every toy model would take most of the time.
    `test_auto.py` does."""
    from specdec_jax.decoding import costs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "measurable", lambda network: False)
        yield


# XLA's newer way of emitting fused loops takes more than half of the time of a compilation without optimisation.
QUICK = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}


@pytest.fixture(scope="session")
def quick_options():
    """Those of `QUICK` that this version of XLA has; they hold for every program that is
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
    """Environment of a process of its own that compiles as with `quick`."""
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in quick_options.items())
    return {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags}


@pytest.fixture(scope="module")
def quick(quick_options):
    """Programs that run for milliseconds are compiled without optimisation."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def quick_draws(quick, quick_options):
    """As `quick`, for programs that run for seconds, which pays for one level of optimisation."""
    quick_options["xla_backend_optimization_level"] = 1
    yield
    del quick_options["xla_backend_optimization_level"]


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


@pytest.fixture
def load_script():
    """Loads `scripts/<name>.py` as a module; the flags that it defines go again afterwards."""
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
