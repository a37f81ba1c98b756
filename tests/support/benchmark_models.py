"""Shared by the tests of benchmark and benchmark_options."""

import pytest

from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config

CONFIG = T5Config(48, 16, 2, 8, 1, 1, 24)


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return LanguageModel.random(CONFIG, seed=0, name="target")


@pytest.fixture(scope="module")
def options() -> benchmark_command.BenchmarkOptions:
    return benchmark_command.BenchmarkOptions(
        target="target", drafter="drafter", gamma=(3,), max_new_tokens=12, repeats=2, batch_size=2
    )


@pytest.fixture(scope="module")
def batches(options) -> list[analysis_variants.SentenceBatch]:
    ids = [[5, 9, 1], [7, 8, 9, 1], [3, 1]]
    return analysis_variants.cut_batches(ids, ids, options.batch_size, options.seed)


@pytest.fixture(scope="module")
def measured(target, options, batches):
    """Returns a benchmark whose drafter is the target itself, so that everything is accepted."""
    return analysis_benchmark.benchmark(Workload(target, ModelDrafter(target), batches, options))
