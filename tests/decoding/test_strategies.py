"""`generate`, `stream` and `decode_stream` decode by the strategy of the plan, one's own too."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import HashModel, Words

import specdec_jax as sd
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.decoding.strategies import STRATEGIES
from specdec_jax.speculative.iteration import ChainDecoding
from specdec_jax.speculative.strategy import prefill

pytestmark = pytest.mark.usefixtures("quick")
V, LIMIT = 23, 6  # a vocabulary that no other test has: nothing is compiled for it yet
INPUTS = [[3, 4, 5], [7], [9, 2, 9, 2], [6, 6], [8]]
OPTIONS = {
    "chain": dict(gamma=2),
    "tree": dict(tree=sd.Tree.uniform((2, 1))),
    "beams": dict(gamma=2, num_beams=2, num_return_sequences=2),
}


def decoding(name, seed=0):
    """The target, which is another for every test, and the options of a strategy."""
    target = HashModel(V, seed, vocabulary=Words())
    drafter = sd.ModelDrafter(HashModel(V, seed + 1, likeness=0.8, vocabulary=Words()))
    return target, dict(drafter=drafter, max_new_tokens=LIMIT, **OPTIONS[name])


def recorded(strategy, calls):
    """A strategy of the same kind that notes the names of its methods as they are called."""

    class Recorded(type(strategy)):
        def __getattribute__(self, name):
            if not name.startswith("_"):
                calls.append(name)
            return super().__getattribute__(name)

    return Recorded()


@tiers.parametrize("name", OPTIONS, first=1)
def test_every_call_goes_through_the_strategy(name, monkeypatch):
    target, options = decoding(name, 10)
    calls = []
    monkeypatch.setitem(STRATEGIES, name, recorded(STRATEGIES[name], calls))
    assert plan_decoding(target, INPUTS, **options).config.strategy is STRATEGIES[name]
    expected = sd.generate(target, INPUTS, **options)
    assert {"prefill", "iterate", "read"} <= set(calls)
    calls.clear()
    rows = dict(sd.decode_stream(target, INPUTS, batch_size=2, **options))
    assert {"prefill", "iterate", "read", "commits_tokens"} <= set(calls)
    tokens = [output.tokens for number in range(len(INPUTS)) for output in rows[number]]
    lengths = expected.lengths.tolist()
    assert tokens == [row[:length].tolist() for row, length in zip(expected.tokens, lengths)]


class ShortDecoding(ChainDecoding):
    """Ends every row after two iterations, for which it keeps no state of its own."""

    def iterate(self, target, drafter, state):
        after = super().iterate(target, drafter, state)
        return after.replace(done=after.done | (after.counts.target_calls >= 2))


def test_a_strategy_of_ones_own(monkeypatch):
    """It takes the place of another, in calls, streams and batches whose rows are refilled."""
    target, options = decoding("chain", 20)
    monkeypatch.setitem(STRATEGIES, "chain", ShortDecoding())
    options |= dict(drafter=None, gamma=0, eos_ids=())
    result = sd.generate(target, INPUTS, **options)
    assert result.lengths.tolist() == [2] * len(INPUTS)
    rows = dict(sd.decode_stream(target, INPUTS, batch_size=2, **options))
    pieces = list(sd.stream(target, INPUTS, **options))
    for number, tokens in enumerate(result.tokens[:, :2].tolist()):
        assert rows[number][0].tokens == tokens
        assert sum((piece.tokens for piece in pieces if piece.row == number), []) == tokens


@pytest.mark.slow
def test_every_strategy_begins_with_the_same_inputs():
    """It makes a state of `PrefillInputs`, of which rows that are not decoded yet can be read."""
    for name in OPTIONS:
        target, options = decoding(name, 30)
        plan = plan_decoding(target, INPUTS, **options)
        *given, inputs = plan.arguments()
        assert inputs.tokens.shape == (len(INPUTS), 1)
        state = prefill(*given, inputs)
        assert state.config.strategy is STRATEGIES[name] and not np.any(state.done)
        read = state.config.strategy.read(state)
        assert len(read.lengths) == len(INPUTS) * plan.outputs == len(plan.request().inputs)
        assert jnp.all(read.lengths == 1)  # the start token
