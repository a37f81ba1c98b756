"""In bfloat16 a call over γ + 1 positions rounds differently from a call over one."""

import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter

# Logits of the model below have a spread of about 1; bfloat16 keeps 8 bits of each product's
# operands.
TOLERANCE = 0.1
pytestmark = pytest.mark.usefixtures("quick")
INPUTS = np.random.default_rng(0).integers(2, 128, (64, 6))


def margins_of(target, inputs, tokens):
    """Returns by how much the greatest logit exceeds the second, before each of the tokens."""
    fed = np.pad(tokens, ((0, 0), (1, 0)), constant_values=target.start_token)[:, :-1]
    logits = np.sort(np.asarray(target.logits(inputs, fed), np.float32), axis=-1)
    return logits[..., -1] - logits[..., -2]


@pytest.mark.parametrize(
    ("rows", "gammas"), [(16, (3,)), pytest.param(64, (1, 3, 7), marks=pytest.mark.slow)]
)
def test_only_near_ties_differ(rows, gammas):
    """A row first diverges where the target's top-2 margin is below the tolerance."""
    target = tiny_t5(0, 128, emb_dim=64, head_dim=32, mlp_dim=64, dtype="bfloat16")
    drafter = ModelDrafter(noisy_copy(target, 0.3))
    options = dict(max_new_tokens=12, eos_ids=())
    inputs = INPUTS[:rows]
    plain = generate(target, inputs, **options)
    assert len(np.unique(plain.tokens)) > 20, "the outputs say little where they are all alike"
    margins, differing = margins_of(target, inputs, plain.tokens), 0
    for gamma in gammas:
        found = generate(target, inputs, drafter=drafter, gamma=gamma, **options)
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
    assert differing < 0.2 * len(gammas) * rows, "most rows stay the same"


@pytest.mark.slow
def test_the_tolerance_is_small():
    """Most positions have a margin far above the tolerance, so that the test above could fail."""
    target = tiny_t5(0, 128, emb_dim=64, head_dim=32, mlp_dim=64, dtype="bfloat16")
    plain = generate(target, INPUTS, max_new_tokens=12, eos_ids=())
    assert np.mean(margins_of(target, INPUTS, plain.tokens) < TOLERANCE) < 0.5
