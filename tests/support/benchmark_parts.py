"""What the tests of benchmark and of benchmark_command share."""

import benchmark_models
import pytest

from specdec_jax.analysis import arms as analysis_arms
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.drafters.model import ModelDrafter

target, options = benchmark_models.target, benchmark_models.options


@pytest.fixture(scope="module")
def batches(options) -> list[analysis_arms.Batch]:
    ids = [[5, 9, 1], [7, 8, 9, 1], [3, 1]]
    return analysis_arms.cut(ids, ids, options.batch_size, options.seed)


@pytest.fixture(scope="module")
def measured(target, options, batches):
    """Drafter = target: everything is accepted."""
    return analysis_benchmark.benchmark(target, ModelDrafter(target), batches, options)
