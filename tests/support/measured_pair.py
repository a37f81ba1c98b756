"""Shared by the tests of measure and measure_command."""

from specdec_jax.analysis import acceptance

ACCEPTED = acceptance.Acceptance(
    "scored",
    0.8,
    0.01,
    100,
    {"block": [(0.8, 0.1), (0.7, 0.1), (0.3, 0.1)]},
    [],
    {},
    {"top": [(0.8, 0.01), (0.9, None)]},
    {"block": [(0.8, 0.1), (0.875, 0.1)]},
    {"top": [[(0.8, 0.01)], [(0.9, 0.01), (0.85, None)]]},
)
