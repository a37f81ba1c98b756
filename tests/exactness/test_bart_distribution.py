"""G-tests of what BART-like pairs draw through the engine: one for each kind of network."""

import functools

import jax
import pytest
from distribution_samples import DRAWS, FALSE_ALARM, SPREAD, V, g_test, joint_distribution, sample

from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import flatten, unflatten
from specdec_jax.models.t5 import T5Config

pytestmark = pytest.mark.slow
SHAPE = dict(vocab_size=V, emb_dim=8, num_heads=2, mlp_dim=12, num_positions=16)
LAYERS = dict(num_encoder_layers=1, num_decoder_layers=1)
KINDS = {
    "bart": {},
    "mbart": dict(norm_place="pre", scale_embedding=True),
    "marian": dict(embedding_norm=False, scale_embedding=True, mlp_activation="silu"),
    "pegasus": dict(norm_place="pre", embedding_norm=False, mlp_activation="relu"),
    "m2m_100": dict(norm_place="pre", embedding_norm=False, logits_bias=False),
    "marian_separate": dict(embedding_norm=False, encoder_vocab_size=V + 3),
}


@functools.cache
def make_model(kind: str, seed: int) -> LanguageModel:
    """Returns a small model whose distribution is not flat; seeds 0 and 1 are alike."""
    config = BartConfig(**SHAPE, **LAYERS, **KINDS[kind])
    params = flatten(LanguageModel.random(config).params)

    def draw(name: str, number: int, key: int) -> jax.Array:
        noise = jax.random.fold_in(jax.random.key(key), number)
        spread = 0.7 if name.endswith("embedder/embedding") else 0.4
        return spread * jax.random.normal(noise, params[name].shape)

    for number, name in enumerate(sorted(params)):
        array = draw(name, number, 0) + 0.15 * seed * draw(name, number, 1)
        params[name] = array + (1.0 if name.endswith("norm/scale") else 0.0)
    return LanguageModel(config, unflatten(params), start_token=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_draws_from_the_targets_distribution(kind):
    target, draft = make_model(kind, 0), make_model(kind, 1)
    counts, (examined, accepted) = sample(target, ModelDrafter(draft), SPREAD, DRAWS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.2 < accepted.sum() / examined.sum() < 0.95
    assert g_test(counts, joint_distribution(draft, SPREAD)) < FALSE_ALARM


def test_a_t5_that_reads_a_barts_encoder_draws_from_its_distribution():
    target = make_model("bart", 0)
    shape = dict(num_heads=2, head_dim=4, num_encoder_layers=0, num_decoder_layers=1, mlp_dim=12)
    config = T5Config(vocab_size=V, emb_dim=8, encoder_dim=8, **shape)
    draft = LanguageModel.random(config, 1, start_token=2)
    counts, (examined, accepted) = sample(target, ModelDrafter(draft), SPREAD, DRAWS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.2 < accepted.sum() / examined.sum() < 0.95
