"""Rows that continuous batching refills see nothing of earlier rows' caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding import batch_rows, continuous_batching
from specdec_jax.decoding.continuous_batching import decode_stream

V = 16
RNG = np.random.default_rng(0)
# Of two padded lengths, each of which has a queue.
INPUTS = [RNG.integers(2, V, length).tolist() for length in [*RNG.integers(1, 9, 15), *[17] * 9]]


def poisoned(shapes, make=batch_rows._empty_layers):
    return jax.tree.map(lambda layer: jnp.full_like(layer, jnp.nan), make(shapes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"gamma": 2}, {"tree": sd.Tree.uniform((2, 1))}], ids=["plain", "chain", "tree"]
)
@pytest.mark.parametrize("waits", ["never", "always", "at first"])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "XLA"])
def test_what_lies_past_a_row_reaches_nobody(options, kernel, waits, monkeypatch):
    """Caches begin full of NaN, and outputs of various lengths refill rows at various times."""
    monkeypatch.setattr(continuous_batching, "may_wait", lambda plan: waits != "never")
    placed, place = [], batch_rows._place_rows
    monkeypatch.setattr(batch_rows, "_place_rows", lambda *of: placed.append(1) or place(*of))
    if waits == "at first":
        for name, value in dict(_WORTH=-100, _LEAST_AHEAD=2, LEAST=0).items():
            monkeypatch.setattr(batch_rows, name, value)
    if not kernel:
        monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    target = tiny_t5(0, V)
    drafter = sd.ModelDrafter(noisy_copy(target, 0.3)) if options else None
    how = dict(
        drafter=drafter,
        max_new_tokens=RNG.integers(1, 9, len(INPUTS)).tolist(),
        eos_ids=(1,),
        **options,
    )
    made, times = [], []

    def make(shapes):
        layers = poisoned(shapes)  # which are given away, and gone afterwards
        times.append(len(made))
        made.extend(np.all(np.isnan(leaf)) for leaf in jax.tree.leaves(layers))
        return layers

    monkeypatch.setattr(batch_rows, "_empty_layers", make)
    found = dict(decode_stream(target, INPUTS, batch_size=4, **how))
    assert made and all(made), "no cache was poisoned"
    assert bool(placed) == (waits != "always")
    assert len(times) == 1, "another queue takes the caches of the one before"
    expected = sd.generate(target, INPUTS, **how)
    for number, length in enumerate(expected.lengths):
        assert found[number][0].tokens == expected.tokens[number, :length].tolist(), number
