"""Predicts and measures the gain of speculation: formulas, α, c, v, benchmark, report."""

from specdec_jax.analysis.formulas import acceptance_rate as acceptance_rate
from specdec_jax.analysis.formulas import best_gamma as best_gamma
from specdec_jax.analysis.formulas import block_survival as block_survival
from specdec_jax.analysis.formulas import clustered_mean as clustered_mean
from specdec_jax.analysis.formulas import divergence as divergence
from specdec_jax.analysis.formulas import expected_calls as expected_calls
from specdec_jax.analysis.formulas import expected_tokens as expected_tokens
from specdec_jax.analysis.formulas import improvement as improvement
from specdec_jax.analysis.formulas import least_improvement as least_improvement
from specdec_jax.analysis.formulas import operations as operations
from specdec_jax.analysis.formulas import optimal_gamma as optimal_gamma
from specdec_jax.analysis.formulas import oracle_improvement as oracle_improvement
from specdec_jax.analysis.formulas import oracle_tokens as oracle_tokens
from specdec_jax.analysis.formulas import output_calls as output_calls
from specdec_jax.analysis.formulas import token_survival as token_survival
from specdec_jax.analysis.formulas import tokens_by_survival as tokens_by_survival
