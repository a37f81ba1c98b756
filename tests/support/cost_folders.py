"""Shared by the tests of costs and costs_command."""

import jax
import pytest

from specdec_jax.decoding import autotune, iteration_costs, past_requests, request
from specdec_jax.decoding.iteration_costs import Costs
from specdec_jax.speculative.adaptive_gamma import MAXIMUM

CHEAP = Costs(tuple(1 + 0.05 * gamma for gamma in range(MAXIMUM + 1)), 0.1)
DEAR = Costs(tuple(1 + 0.95 * gamma for gamma in range(MAXIMUM + 1)), 0.1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Gives a test its own cache folder and a process that has measured nothing.

    XLA's programs go elsewhere.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(iteration_costs, "_known", {})
    monkeypatch.setattr(past_requests, "_learned", {})
    monkeypatch.setattr(past_requests, "_times", {})
    monkeypatch.setattr(request, "is_measurable", lambda network: True)
    before = jax.config.jax_compilation_cache_dir
    yield tmp_path / "cache/specdec_jax/costs"
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def measured(monkeypatch):
    """Replaces measuring: `measured.gives` is the result, `measured.calls` counts the calls."""

    class Measured:
        gives, calls = CHEAP, 0

        def __call__(self, *_):
            self.calls += 1
            return self.gives

    actual = Measured()
    monkeypatch.setattr(autotune, "measure", actual)
    return actual
