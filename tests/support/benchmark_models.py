"""What the tests of benchmark and of benchmark_options share."""

import pytest

from specdec_jax.commands import benchmark as benchmark_command
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
