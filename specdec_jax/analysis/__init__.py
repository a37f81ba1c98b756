"""Says what speculation should gain, and measures what it does: the paper's formulas, α, c and
v, the benchmark, the report."""

from specdec_jax.analysis.formulas import (
    acceptance_rate,
    best_gamma,
    block_survival,
    calls_along,
    clustered_mean,
    divergence,
    expected_calls,
    expected_tokens,
    improvement,
    least_improvement,
    operations,
    optimal_gamma,
    oracle_improvement,
    oracle_tokens,
    token_survival,
    tokens_by_survival,
)

__all__ = [
    "acceptance_rate",
    "best_gamma",
    "block_survival",
    "calls_along",
    "clustered_mean",
    "divergence",
    "expected_calls",
    "expected_tokens",
    "improvement",
    "least_improvement",
    "operations",
    "optimal_gamma",
    "oracle_improvement",
    "oracle_tokens",
    "token_survival",
    "tokens_by_survival",
]
