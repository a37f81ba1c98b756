"""In bfloat16 a call over γ + 1 positions rounds differently from a call over one."""

import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter

# Logits of the model below have a spread of about 1; bfloat16 keeps 8 bits of each product's
# operands.
TOLERANCE = 0.1
pytestmark = [pytest.mark.usefixtures("quick"), pytest.mark.slow]
INPUTS = np.random.default_rng(0).integers(2, 128, (64, 6))


def margins_of(target, tokens):
    """Returns by how much the greatest logit exceeds the second, before each of the tokens."""
    fed = np.pad(tokens, ((0, 0), (1, 0)), constant_values=target.start_token)[:, :-1]
    logits = np.sort(np.asarray(target.logits(INPUTS, fed), np.float32), axis=-1)
    return logits[..., -1] - logits[..., -2]


def test_only_near_ties_differ():
    """A row first diverges where the target's top-2 margin is below the tolerance."""
    target = tiny_t5(0, 128, emb_dim=64, head_dim=32, mlp_dim=64, dtype="bfloat16")
    drafter = ModelDrafter(noisy_copy(target, 0.3))
    options = dict(max_new_tokens=12, eos_ids=())
    plain = generate(target, INPUTS, **options)
    assert len(np.unique(plain.tokens)) > 20, "the outputs say little where they are all alike"
    margins, differing = margins_of(target, plain.tokens), 0
    for gamma in (1, 3, 7):
        found = generate(target, INPUTS, drafter=drafter, gamma=gamma, **options)
        assert 0.1 < found.stats.acceptance_rate < 1
        for row in np.flatnonzero(np.any(found.tokens != plain.tokens, axis=1)):
            position = int(np.argmax(found.tokens[row] != plain.tokens[row]))
            assert margins[row, position] < TOLERANCE, (
                gamma,
                row,
                position,
                margins[row, position],
            )
            differing += 1
    assert differing < 0.2 * 3 * len(INPUTS), "most rows stay the same"


def test_the_tolerance_is_small():
    """Most positions have a margin far above the tolerance, so that the test above could fail."""
    target = tiny_t5(0, 128, emb_dim=64, head_dim=32, mlp_dim=64, dtype="bfloat16")
    plain = generate(target, INPUTS, max_new_tokens=12, eos_ids=())
    assert np.mean(margins_of(target, plain.tokens) < TOLERANCE) < 0.5
