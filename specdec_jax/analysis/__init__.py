"""Predicts and measures the gain of speculation: formulas, α, c, v, benchmark, report."""

from specdec_jax.analysis.formulas import (
    acceptance_rate,
    best_gamma,
    block_survival,
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
    output_calls,
    token_survival,
    tokens_by_survival,
)

__all__ = [
    "acceptance_rate",
    "best_gamma",
    "block_survival",
    "output_calls",
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
