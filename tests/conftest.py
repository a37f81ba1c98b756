"""Runs tests on the CPU, in float32 unless a test asks for more, with fixed examples."""

import ctypes
import fcntl
import functools
import gc
import importlib.util
import os
import pathlib
import subprocess
import sys

import hypothesis
import pytest
from absl.flags import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"  # no number changes its type unasked
# XLA's newer way of emitting fused loops takes more than half of the time of a compilation without
# optimisation.
QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"

# Python's collector goes through all objects again and again, which takes half of the time of
# collecting tests, and a tenth of that of running them.
gc.set_threshold(50_000, 10, 20)


started: list[subprocess.Popen] = []  # processes in the background


def known(flags: str) -> bool:
    """Returns whether XLA has these flags: a process that asks for others ends where XLA starts."""
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    return not subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    ).returncode


if "PYTEST_XDIST_WORKER" not in os.environ and known(
    QUICK
):  # workers have the environment of the process that asked
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}"

hypothesis.settings.register_profile(
    "project", deadline=None, derandomize=True, max_examples=40, database=None
)
hypothesis.settings.load_profile("project")


def pytest_configure(config):
    """Keeps compiled programs beside pytest's own cache, for all workers and for the next run.

    `pytest --cache-clear` forgets them.
    """
    if hasattr(config, "cache"):  # not with `-p no:cacheprovider`
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("programs"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """Begins to compile the CPU's kernels while the workers collect; `kernel` waits for the end."""
    with open(config._tmp_path_factory.getbasetemp() / "kernel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the process ends, which inherits it
        command = "from specdec_jax.backends.cpu import native; native.is_available()"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[lock.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )


def pytest_collectstart(collector):
    """Makes random weights of toy models cheap, also of those that are made by importing a test."""
    if isinstance(collector, pytest.Session):
        import random_weights

        random_weights.install()


def pytest_collection_finish(session):
    """Lets Python's collector pass over everything that is there before the first test."""
    gc.freeze()


def pytest_report_header(config):
    """Says how long the tests take."""
    times = {"not slow": "first tier: 6 to 16 minutes", "slow": "slow tier: 50 to 90 minutes"}
    known = times.get(config.option.markexpr)
    return f"{known} on two cores" if known else None


@pytest.fixture(scope="module", autouse=True)
def little_memory(request):
    """Frees what a test file has kept at its end: compiled programs, and models it caches.

    Programs hold memory mappings, and XLA's compiler crashes when a process has no more of them
    (Linux allows some 65,000). Collecting takes half a second, so it waits until there is much.
    """
    yield
    import jax

    jax.clear_caches()
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__:
            getattr(value, "cache_clear", lambda: None)()
    process = pathlib.Path("/proc/self")
    if not process.is_dir() or (
        (process / "maps").read_bytes().count(b"\n") > 20_000
        or int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 2e9
    ):
        gc.collect()
        # The C library keeps what compiling has freed, in pieces: 9 GB at the slow tier's end.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


@pytest.fixture(scope="session", autouse=True)
def no_progress():
    """Shows no progress, so that what commands print does not depend on the machine's speed."""
    from specdec_jax.files import progress

    progress._DELAY = 3600.0


@pytest.fixture(scope="session", autouse=True)
def kernel(tmp_path_factory):
    """Waits until the CPU's kernels are compiled, before any test reads a command's output.

    Compiling them prints a line.
    """
    from specdec_jax.backends.cpu import native

    with open(tmp_path_factory.getbasetemp().parent / "kernel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        native.is_available()


@pytest.fixture(scope="session", autouse=True)
def nothing_measured():
    """Makes `gamma="auto"` mean 4, as on a mesh, since measuring every toy model takes long.

    `test_adaptive_gamma.py` measures.
    """
    from specdec_jax.decoding import request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "is_measurable", lambda network: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_waits():
    """Makes jobs of few inputs refill rows, as on an accelerator.

    `test_continuous_batching.py` and `test_refilled_caches.py` let rows wait, as with the CPU
    kernels; so do processes that tests start.
    """
    from specdec_jax.decoding import continuous_batching

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous_batching, "may_wait", lambda plan: False)
        yield


@pytest.fixture(scope="session")
def quick_environment():
    """What the environment of a process has beside ours that compiles as with `quick`."""
    return {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.fixture(scope="module")
def quick():
    """Programs that run for milliseconds are compiled without optimisation."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def optimised():
    """Options with which to compile as users' programs are, in a file whose others are `quick`."""
    import jax

    jax.config.update("jax_disable_most_optimizations", False)
    yield {"xla_cpu_use_fusion_emitters": True} if QUICK in os.environ.get("XLA_FLAGS", "") else {}
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module")
def compiled_weights():
    """Makes random weights by the program that makes users' ones."""
    from specdec_jax.models import language_model, network

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model, "random_params", network.random_params)
        yield


@pytest.fixture(scope="module")
def theory_once():
    """Draws the part of the report that is the same on every page once; returns that function."""
    from specdec_jax.analysis.report import page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_list_theory", functools.cache(page._list_theory))
        yield page._list_theory


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """Returns a folder with the tiny language's files for training and validation."""
    from toy_training import write_language

    return write_language(tmp_path_factory.mktemp("text"))


@pytest.fixture
def load_script():
    """Returns a function that loads `scripts/<name>.py` as a module.

    The flags it defines are removed afterwards.
    """
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
