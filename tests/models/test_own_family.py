"""A family that uses no backend decodes with what `decode_states` and `head` compute."""

import dataclasses
from typing import ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax as sd
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.models.family import FamilyModule, ModelConfig

pytestmark = pytest.mark.usefixtures("quick")

PROMPTS = [[3, 4, 5, 3, 4], [7]]
TREE = sd.Tree.uniform((2, 1))
MESH = ShardingRules(sd.make_mesh(1, 1))


@dataclasses.dataclass(frozen=True)
class OwnConfig(ModelConfig):
    vocab_size: int = 50
    emb_dim: int = 16
    dtype: str = "float32"
    family: ClassVar[str] = "own"
    decoder_only: ClassVar[bool] = True
    uses_backend: ClassVar[bool] = False

    def module(self, backend: Backend = Backend()) -> "Own":
        return Own(self, backend)


@flax.struct.dataclass
class OwnCache:
    keys: jax.Array
    values: jax.Array

    def repeated(self, copies: int) -> "OwnCache":
        return jax.tree.map(lambda array: jnp.repeat(array, copies, axis=0), self)


class SelfAttention(nn.Module):
    """Kernels with the names that a network with a backend would join."""

    width: int

    @nn.compact
    def __call__(self, x):
        return [nn.Dense(self.width, name=name)(x) for name in ("query", "key", "value")]


class Own(FamilyModule):
    config: OwnConfig
    backend: Backend = Backend()

    def setup(self):
        self.embed = nn.Embed(self.config.vocab_size, self.config.emb_dim)
        self.self_attention = SelfAttention(self.config.emb_dim)
        self.out = nn.Dense(self.config.vocab_size)

    def prefill(self, inputs, mask, slots, copies=1, encoded=None):
        empty = jnp.zeros((len(inputs) * copies, slots, self.config.emb_dim))
        return OwnCache(empty, empty)

    def decode_states(self, tokens, positions, cache, layers=None, valid=None):
        x = self.embed(tokens)
        query, key, value = self.self_attention(x)
        rows = jnp.arange(len(tokens))[:, None]
        slots = positions[:, None] + jnp.arange(tokens.shape[1])
        keys, values = (
            array.at[rows, slots].set(new)
            for array, new in ((cache.keys, key), (cache.values, value))
        )
        past = jnp.arange(keys.shape[1]) <= slots[:, :, None]
        scores = jnp.where(past, jnp.einsum("btd,bsd->bts", query, keys), -jnp.inf)
        return x + jax.nn.softmax(scores) @ values, OwnCache(keys, values)

    def head(self, states, valid=None):
        return self.out(states)


@dataclasses.dataclass(frozen=True)
class WithoutDtype(ModelConfig):
    vocab_size: int = 50
    emb_dim: int = 16


@pytest.fixture(scope="module")
def own():
    return sd.LanguageModel.random(OwnConfig(), 0, eos_ids=())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_decodes_speculatively_as_plainly(own, temperature):
    drafters = [sd.ModelDrafter(sd.LanguageModel.random(OwnConfig(), 1, eos_ids=()))]
    drafters += [sd.ModelDrafter(own), sd.PromptLookupDrafter()]
    sampling = sd.SamplingConfig(temperature=temperature)
    options = dict(max_new_tokens=8, sampling=sampling, verifier="gumbel")
    options |= dict(num_samples=2) if temperature else {}
    plain = sd.generate(own, PROMPTS, **options)
    accepted = []
    for drafter in drafters:
        found = sd.generate(own, PROMPTS, drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
        accepted.append(found.stats.accepted)
    assert accepted[1] > accepted[0]
    assert len(set(plain.tokens.ravel().tolist())) > 3


def test_it_is_scored_and_counted_without_a_method_of_its_own(own):
    tokens = sd.generate(own, PROMPTS, max_new_tokens=8).tokens
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        logits = own.logits(None, np.array([prompt + new[:-1].tolist()]))
        np.testing.assert_array_equal(np.argmax(logits[0, len(prompt) - 1 :], axis=-1), new)
    shapes = own.config.parameter_shapes()
    assert shapes["self_attention/query/kernel"] == (16, 16)
    made = sum(leaf.size for leaf in jax.tree.leaves(own.params))
    assert f"of {made:,} parameters" in repr(own)


@pytest.mark.parametrize(
    "call, got",
    [
        (lambda own: sd.generate(own, PROMPTS, drafter=sd.ModelDrafter(own), tree=TREE), "a tree"),
        (lambda own: sd.generate(own, PROMPTS, num_beams=2), "a tree or beams"),
        (lambda own: sd.EarlyExitDrafter(own, 1), "an early exit"),
        (lambda own: sd.SelfDrafter(own), "a drafter in int8"),
        (lambda own: sd.ModelDrafter(own, int8=True), "a drafter in int8"),
        (lambda own: sd.ModelDrafter(own, shortlist=20), "a shortlist"),
        (lambda own: own.network.head_alone(), "drafting heads that share its head"),
        (lambda own: sd.LanguageModel.random(own.config, quantize="int8"), "weights in int8"),
        (lambda own: sd.LanguageModel.random(own.config, rules=MESH), "a mesh"),
    ],
)
def test_what_needs_a_backend_is_rejected(own, call, got):
    with pytest.raises(ValueError, match=f"OwnConfig: got {got}.*, expected a family that uses"):
        call(own)


def test_a_configuration_without_a_dtype_is_rejected():
    with pytest.raises(ValueError, match="WithoutDtype: got no dtype, expected a field dtype"):
        sd.LanguageModel.random(WithoutDtype())
