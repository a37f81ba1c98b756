"""Holds the numbers that Leviathan, Kalman and Matias (2023) printed, to compare with ours."""

from typing import NamedTuple


class Trade(NamedTuple):
    """A row of table 1: factors in arithmetic operations and in speed, c = ĉ = 0."""

    alpha: float
    gamma: int
    operations: float
    speed: float


TABLE_1 = (
    Trade(0.6, 2, 1.53, 1.96),
    Trade(0.7, 3, 1.58, 2.53),
    Trade(0.8, 2, 1.23, 2.44),
    Trade(0.8, 5, 1.63, 3.69),
    Trade(0.9, 2, 1.11, 2.71),
    Trade(0.9, 10, 1.60, 6.86),
)


class Speed(NamedTuple):
    """A row of tables 2 and 4: T5-XXL on one TPU v4 at batch 1.

    `expected` is the improvement by theorem 3.8, `measured` the measured one.
    """

    task: str
    drafter: str
    temperature: int
    gamma: int
    alpha: float
    cost_ratio: float
    expected: float
    measured: float


TABLE_4 = (
    Speed("EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    Speed("EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    Speed("EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    Speed("EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    Speed("EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    Speed("EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    Speed("CNN/DM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    Speed("CNN/DM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    Speed("CNN/DM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    Speed("CNN/DM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    Speed("CNN/DM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    Speed("CNN/DM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7),
)


class Rate(NamedTuple):
    """Two rows of table 3: α at temperature 0 and at temperature 1."""

    target: str
    drafter: str
    argmax: float
    sampled: float


TABLE_3 = (
    Rate("GPT-like (97M)", "unigram", 0.03, 0.03),
    Rate("GPT-like (97M)", "bigram", 0.05, 0.05),
    Rate("GPT-like (97M)", "GPT-like (6M)", 0.88, 0.89),
    Rate("T5-XXL (EnDe)", "unigram", 0.08, 0.07),
    Rate("T5-XXL (EnDe)", "bigram", 0.20, 0.19),
    Rate("T5-XXL (EnDe)", "T5-small", 0.75, 0.62),
    Rate("T5-XXL (EnDe)", "T5-base", 0.80, 0.68),
    Rate("T5-XXL (EnDe)", "T5-large", 0.82, 0.71),
    Rate("T5-XXL (CNN/DM)", "unigram", 0.13, 0.08),
    Rate("T5-XXL (CNN/DM)", "bigram", 0.23, 0.16),
    Rate("T5-XXL (CNN/DM)", "T5-small", 0.65, 0.53),
    Rate("T5-XXL (CNN/DM)", "T5-base", 0.73, 0.55),
    Rate("T5-XXL (CNN/DM)", "T5-large", 0.74, 0.56),
    Rate("LaMDA (137B)", "LaMDA (100M)", 0.61, 0.57),
    Rate("LaMDA (137B)", "LaMDA (2B)", 0.71, 0.71),
    Rate("LaMDA (137B)", "LaMDA (8B)", 0.75, 0.74),
)

# Table 5: α of standard sampling over lenience, target T5-XXL, EnDe.
LENIENCES = (1.0, 0.5, 0.3, 0.1)
TABLE_5 = {
    "unigram": (0.07, 0.10, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.80, 0.83, 0.90),
}
