"""Shapes and dtypes are checked against annotations in tests, and not for users."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from specdec_jax.backends.backend import Backend
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.models.layers import apply_weight
from specdec_jax.speculative import distributions, processors, randomness, verifiers

B, G, V = 2, 3, 5
ids, logits = jnp.zeros((B, G), jnp.int32), jnp.zeros((B, G, V))
cache, update = KVCache.empty(B, 1, 4, 8, jnp.float32), jnp.zeros((B, 1, 1, 8))
context = processors.Context(ids, ids[:, 0], ids[:, 0], ids)
WRONG = {
    "as many tokens of the target as drafted": (
        "draft_tokens",
        lambda: verifiers.verify_greedy(ids, ids, ids[:, 0]),
    ),
    "positions of another batch": (
        "positions",
        lambda: Backend().append(cache, update, update, jnp.zeros(B + 1, jnp.int32)),
    ),
    "a valid mark for each row": (
        "valid",
        lambda: apply_weight(logits, logits[0].T, jnp.float32, ids[:, 0] > 0),
    ),
    "one row's own logits": (
        "logits",
        lambda: processors.forbid_repeated_ngrams(logits[0], context, 2),
    ),
    "tokens that are floats": (
        "tokens",
        lambda: distributions.Categorical.from_logits(logits).log_prob(ids.astype(jnp.float32)),
    ),
    "words that are signed": ("random", lambda: randomness.draw(logits[:, 0], ids[:, :2])),
    "raw keys": (
        "keys",
        lambda: randomness.random_bits(
            jnp.zeros((B, 2), jnp.uint32), ids[:, 0], ids, randomness.DRAFT
        ),
    ),
    "under jit": ("draft_tokens", lambda: jax.jit(verifiers.verify_greedy)(ids, ids, ids[:, 0])),
}


@pytest.mark.parametrize("name, call", WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise(name, call):
    with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{name}'"):
        call()


def test_fields_of_different_shapes_raise():
    with pytest.raises(
        jaxtyping.AnnotationError, match=r"Categorical.log_normalizer: got float32\(2, 3, 5\)"
    ):
        distributions.Categorical(logits, logits).entropy()


def test_a_wrong_result_raises(monkeypatch):
    monkeypatch.setattr(
        randomness, "random_bits", lambda *arguments: jnp.zeros((B, G + 1, 2), jnp.uint32)
    )
    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        randomness.uniforms(
            jax.random.split(randomness.make_key(0), B), ids[:, 0], ids, randomness.ACCEPT
        )


@pytest.mark.slow
def test_nothing_is_checked_outside_tests():
    code = """
import sys
from specdec_jax.speculative import distributions
assert not hasattr(distributions.argmax, "__wrapped__") and "beartype" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
