"""T5X's own `beam_search` beside ours: tokens and scores of random toys."""

import numpy as np
import pytest
from toy_models import HashModel

import specdec_jax as sd

pytestmark = pytest.mark.usefixtures("quick")
LENGTH = 10


def t5x_beams(model, inputs, beams, penalty, eos_id, prefix=()):
    """T5X's tokens `[B, K, LENGTH]`, best last, and scores `[B, K]`."""
    decoding = pytest.importorskip("t5x.decoding", exc_type=ImportError)
    import jax
    import jax.numpy as jnp

    batch = len(inputs)
    number = model.network.prefill(jnp.asarray(inputs), jnp.full(batch, inputs.shape[1]), 1).inputs
    cache = {"number": number[:, None], "previous": jnp.zeros((batch, 1), jnp.uint32)}

    def tokens_to_logits(state):
        current = state.cur_token[:, 0].astype(jnp.uint32)
        own = state.cache
        logits = model.dist.logits(own["number"][:, 0], own["previous"][:, 0], current)
        return logits, {"number": own["number"], "previous": current[:, None]}

    prompts = np.zeros((batch, LENGTH), np.int32)
    prompts[:, 1 : 1 + len(prefix)] = prefix
    with jax.numpy_dtype_promotion("standard"):
        tokens, scores = decoding.beam_search(
            jnp.asarray(prompts), cache, tokens_to_logits, eos_id, num_decodes=beams, alpha=penalty
        )
    return np.asarray(tokens), np.asarray(scores)


@pytest.mark.parametrize("prefix", [(), (3, 2)])
@pytest.mark.parametrize(
    "beams, penalty, spread", [(1, 0.6, 4.0), (2, 0.0, 4.0), (4, 0.6, 1.0), (8, 1.5, 4.0)]
)
def test_search_is_t5xs(beams, penalty, spread, prefix):
    inputs = np.random.default_rng(beams).integers(1, 14, (60, 3))
    model = HashModel(14, 0, eos_ids=(5,), spread=spread)
    drafter = HashModel(14, 7, eos_ids=(5,), likeness=0.9, spread=spread)
    tokens, scores = t5x_beams(model, inputs, beams, penalty, 5, prefix)
    ours = sd.generate(
        model,
        inputs,
        drafter=sd.ModelDrafter(drafter),
        gamma=3,
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=penalty,
        max_new_tokens=LENGTH - len(prefix),
        decoder_prefix=[list(prefix)] * len(inputs) if prefix else None,
    )
    np.testing.assert_allclose(
        ours.scores.reshape(-1, beams)[:, ::-1], scores, rtol=1e-5, atol=1e-5
    )
    for row in range(len(inputs)):
        for place in range(beams):
            at = row * beams + beams - 1 - place
            length = ours.lengths[at]
            expected = (
                [*prefix, *ours.tokens[at, :length]] if ours.finish_reasons[at] != "none" else []
            )
            np.testing.assert_array_equal(
                tokens[row, place], np.pad(expected, (0, LENGTH - len(expected)))
            )
