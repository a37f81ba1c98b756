"""What a drafter is shown of the target's calls: no more than its class says that it reads."""

from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cascade_parts import INPUTS, LIMIT, PREFIXES, TARGET, B, V
from random_heads_of import random_heads
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters.drafting import draft_without_calls, point_mass
from specdec_jax.drafters.tree_levels import Children, draft_children
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.state import Scored, ScoredNodes
from specdec_jax.speculative.trees import POINTS, Tree

TREE = Tree((0, 0, 1, 1, 2, 3), children="top")
GAMMA = 3
pytestmark = pytest.mark.usefixtures("quick")


@flax.struct.dataclass
class Recorder(TreeDrafter):
    """Drafts ids that follow each other, and keeps what it was shown last."""

    kinds: ClassVar[Any] = POINTS
    reads_states: bool = flax.struct.field(pytree_node=False, default=False)
    reads_logits: bool = flax.struct.field(pytree_node=False, default=False)
    reads_nodes: bool = flax.struct.field(pytree_node=False, default=False)

    def init(self, inputs, input_lengths, tokens, slots):
        return self._make_empty(len(tokens), GAMMA + 1, None)

    def init_tree(self, inputs, input_lengths, tokens, slots):
        batch, shape = len(tokens), (len(tokens), TREE.size)
        nodes = None
        if self.reads_nodes:
            values = self._make_empty(batch, TREE.size, None)
            ids = jnp.zeros(shape, jnp.int32)
            path = jnp.zeros((batch, TREE.depth + 1), jnp.int32)
            nodes = ScoredNodes(values.tokens, path, ids, values.states, values.logits)
        return self._make_empty(batch, TREE.depth + 1, nodes)

    def _make_empty(self, batch, width, nodes):
        values = jnp.zeros((batch, width, V))
        read = (values if reads else None for reads in (self.reads_states, self.reads_logits))
        ids = jnp.zeros((batch, width), jnp.int32)
        return Scored(ids, *read, jnp.zeros(batch, jnp.int32), nodes)

    def draft(self, draft_state, state, num_wanted):
        last = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)
        tokens = (last + 1 + jnp.arange(state.config.gamma)) % V
        dist = point_mass(state, tokens)
        return draft_state, draft_without_calls(state, tokens, num_wanted, dist)

    def draft_tree(self, draft_state, state, num_wanted, max_depth):
        def children_of(level, carry):
            new = level.tokens[..., None] + 1 + jnp.arange(max(level.counts))
            return Children(new % V), carry

        return draft_state, draft_children(state, num_wanted, max_depth, children_of)[0]

    def observe(self, draft_state, state, scored):
        if scored.nodes is not None:
            scored = scored._replace(nodes=scored.nodes._replace(draft=scored.nodes.draft.tokens))
        return scored


OPTIONS = dict(max_new_tokens=LIMIT, decoder_prefix=PREFIXES, eos_ids=())


def decode_twice(drafter, **options):
    """Returns the states after one iteration and after two."""
    state, request = prepare(TARGET, INPUTS, drafter=drafter, **OPTIONS, **options)
    first = advance(request.network, request.drafter, state, np.int32(1))
    first = jax.tree.map(np.asarray, first.replace(keys=None))
    state, request = prepare(TARGET, INPUTS, drafter=drafter, **OPTIONS, **options)
    second = advance(request.network, request.drafter, state, np.int32(2))
    return first, second.replace(keys=None)


def score(row: int, texts) -> np.ndarray:
    """Returns the target's logits `[T, V]` after each text of one row."""
    return np.stack(
        [TARGET.logits([INPUTS[row]], [text], [len(INPUTS[row])])[0, -1] for text in texts]
    )


@pytest.mark.parametrize(
    "drafter", [Recorder(), Recorder(reads_states=True), Recorder(reads_logits=True)]
)
@pytest.mark.parametrize("options", [dict(gamma=GAMMA), dict(tree=TREE)])
@pytest.mark.parametrize(
    "temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow, id="sampled")]
)
def test_only_what_is_read_is_shown(drafter, options, temperature):
    sampling = sd.SamplingConfig(temperature=temperature)
    before, after = decode_twice(drafter, sampling=sampling, **options)
    scored = after.draft_state
    assert (scored.states is None) == (not drafter.reads_states)
    assert (scored.logits is None) == (not drafter.reads_logits)
    assert scored.nodes is None
    np.testing.assert_array_equal(scored.num_new, after.lengths - before.lengths)
    for row in range(B):
        start, end = int(before.lengths[row]) - 1, int(after.lengths[row]) - 1
        committed = np.asarray(after.tokens)[row, : end + 1].tolist()
        np.testing.assert_array_equal(scored.tokens[row, : end - start], committed[start:end])
        expected = score(row, [committed[:place] for place in range(start + 1, end + 1)])
        for values in (scored.states, scored.logits):  # a toy's states are its logits
            if values is not None:
                np.testing.assert_array_equal(values[row, : end - start], expected)


def test_all_nodes_are_shown():
    """Rejected ones too, each scored after its own path."""
    before, after = decode_twice(Recorder(reads_states=True, reads_nodes=True), tree=TREE)
    nodes, lines = after.draft_state.nodes, TREE.lines
    assert nodes.logits is None, "not read"
    for row in range(B):
        committed = np.asarray(before.tokens)[row, : int(before.lengths[row])].tolist()
        drafted = np.asarray(nodes.draft)[row]
        texts = [
            committed + drafted[lines[node, 1 : 1 + TREE.depths[node]]].tolist()
            for node in range(TREE.size)
        ]
        room = np.asarray(TREE.depths) < LIMIT + len(PREFIXES[row]) + 1 - len(committed)
        expected = score(row, texts)
        np.testing.assert_array_equal(np.asarray(nodes.states)[row][room], expected[room])
        best = np.argmax(expected, axis=1)
        np.testing.assert_array_equal(np.asarray(nodes.argmax)[row][room], best[room])
        accepted = int(after.lengths[row] - before.lengths[row]) - 1
        path = np.asarray(nodes.path)[row, : accepted + 1]
        new = np.asarray(after.tokens)[row, len(committed) : len(committed) + accepted]
        np.testing.assert_array_equal(drafted[path[1:]], new)


@pytest.mark.parametrize("options", [dict(gamma=GAMMA), dict(tree=Tree.uniform((2, 1)))])
def test_a_drafter_that_reads_states_leaves_the_argmax_path(options, monkeypatch):
    """The logits of the target are not computed for it; that takes longer than their argmax."""
    target = tiny_t5(0, 40)
    state, request = prepare(target, [[3, 4, 1]], drafter=random_heads(target), **options)
    if not request.network.skips_padding:
        pytest.skip("this backend has no argmax without logits")
    monkeypatch.setattr(Network, "head", lambda *given: pytest.fail("logits were computed"))
    jax.eval_shape(
        state.config.strategy.iterate,
        request.network,
        request.drafter,
        state,
    )


@pytest.mark.parametrize("reads", [False, True])
def test_certain_tokens_join_a_model_that_samples(reads):
    """Also where the part is drafted in a loop, as one that reads the target's calls is."""
    model = sd.ModelDrafter(tiny_t5(1, V))
    options = dict(sampling=sd.SamplingConfig(temperature=1.0), key=jax.random.key(0), **OPTIONS)
    drafter = sd.HorizontalCascade(Recorder(reads_states=reads), model, 2)
    result = sd.generate(TARGET, INPUTS, drafter=drafter, gamma=GAMMA, **options)
    assert 0 < result.stats.accepted < result.stats.drafted
