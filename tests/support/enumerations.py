"""Distributions, grids and rules over which verifiers are enumerated."""

import contextlib

import jax
import numpy as np
import toy
from toy import BLOCK, REJECTION, TOKEN

from specdec_jax.speculative.distributions import Categorical

# V, γ, length limit. Two iterations: the second starts from every prefix that the first can commit.
SIZES = [
    (2, 1, 4),
    (2, 2, 5),
    (2, 3, 7),
    (3, 1, 4),
    (3, 2, 5),
    (3, 3, 6),
    (4, 1, 4),
    (4, 2, 5),
    (4, 3, 5),
]


# Temperature and filters under which the distributions of iterations are enumerated.
ADJUSTMENTS = [
    {"temperature": 0},
    {"temperature": 0.5},
    {"top_k": 2},
    {"top_p": 0.7},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.8},
]


def dists(vocab, zeros=0.0):
    return toy.table_distribution(vocab, 11, zeros), toy.table_distribution(vocab, 12, zeros)


# --- The JAX code on a grid of uniforms ---


@contextlib.contextmanager
def float64(on: bool = True):
    """Runs a test with numbers of 64 bits in JAX.

    Places then have 64 bits and lengths 32, which only standard promotion brings together.
    """
    with jax.enable_x64(on), jax.numpy_dtype_promotion("standard" if on else "strict"):
        yield


# Distributions in sixteenths, one for each position. Uniforms in thirteenths then lie on no
# decision boundary but 0.
TARGETS = np.array([[4, 8, 3, 1], [16, 0, 0, 0], [2, 6, 0, 8], [5, 0, 11, 0]]) / 16
DRAFTS = {
    "other distributions": np.array([[8, 2, 3, 3], [4, 4, 4, 4], [0, 7, 9, 0], [16, 0, 0, 0]]) / 16,
    "p = q": TARGETS,
    "disjoint supports": np.array([[0, 0, 0, 16], [0, 5, 5, 6], [0, 0, 16, 0], [0, 9, 0, 7]]) / 16,
}
GRID = np.arange(13) / 13


distribution_of = jax.jit(Categorical.from_logits)


def as_distribution(probs, dtype):
    with np.errstate(divide="ignore"):
        return distribution_of(np.log(probs).astype(dtype))


LENIENCE, EPSILON, DELTA = 0.6, 0.3, 0.4
# By the package's names of verifiers; "gumbel" decides by noise and has its own tests.
ENUMERATED = {
    "token": TOKEN,
    "block": BLOCK,
    "rejection": REJECTION,
    "lenient": toy.lenient(LENIENCE),
    "typical": toy.typical(EPSILON, DELTA),
}
