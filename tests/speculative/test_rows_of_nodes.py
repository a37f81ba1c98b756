"""Nodes of trees and beams get starts, EOS ids and noise of their own row.

A step of a beam search gets enough candidates.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_reference import Search
from toy_models import HashModel

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.speculative.beam_iteration import BeamSearch
from specdec_jax.speculative.beam_search import BeamConfig
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.strategy import prefill
from specdec_jax.speculative.trees import DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
V, LIMIT, FOREVER = 12, 8, np.int32(99)
TARGET, DRAFT = HashModel(V, 0, eos_ids=()), HashModel(V, 7, likeness=0.8)
INPUTS, PREFIXES = [[3, 4, 5], [7], [9, 2, 9, 2]], [[4], [8, 2, 5], []]
EOS_IDS = np.array(
    [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 0]], np.int32
)  # so many that rows end soon, if they may
EARLY = sd.SamplingConfig(min_new_tokens=[2, 7, 5], repetition_penalty=[1.0, 1.5, 1.2])
SAMPLED = sd.SamplingConfig(temperature=1.0)


def test_processors_of_a_trees_nodes():
    """Every row has EOS ids, a start and a minimum length of its own."""
    found = []
    for drafting in (
        {},
        dict(drafter=sd.ModelDrafter(DRAFT), tree=Tree.uniform((3, 2), children="top")),
    ):
        options = dict(
            decoder_prefix=PREFIXES,
            sampling=EARLY,
            eos_ids=(1, 2),
            max_new_tokens=LIMIT,
            **drafting,
        )
        state, request = prepare(TARGET, INPUTS, **options)
        state = sd.advance(
            request.network, request.drafter, state.replace(eos_ids=jnp.array(EOS_IDS)), FOREVER
        )
        rows = zip(np.asarray(state.tokens), np.asarray(state.lengths), request.prefix_lengths)
        found.append([tokens[start:length].tolist() for tokens, length, start in rows])
    plain, trees = found
    assert trees == plain and min(map(len, plain)) < LIMIT


def test_processors_of_beams():
    """Three rows together give what each gives alone, with their own EOS ids and starts."""
    mode, beams = EARLY.mode, 3
    config = BeamConfig(beams, EOS_IDS.shape[1], mode, V, max_new=LIMIT, strategy=BeamSearch())
    tokens = np.array([[0, *prefix, *[0] * (3 - len(prefix))] for prefix in PREFIXES], np.int32)
    inputs = np.array([[*row, *[0] * (4 - len(row))] for row in INPUTS], np.int32)
    lengths, starts = (
        np.array([len(row) for row in rows], np.int32) for rows in (INPUTS, PREFIXES)
    )

    def searched(rows):
        early = sd.SamplingConfig(
            min_new_tokens=np.take(EARLY.min_new_tokens, rows).tolist(), repetition_penalty=1.2
        )
        given = PrefillInputs(
            inputs=inputs[rows],
            input_lengths=lengths[rows],
            tokens=tokens[rows],
            prefix_lengths=starts[rows] + 1,
            sampling=early.rows(len(rows), V),
            limits=starts[rows] + 1 + np.int32(LIMIT),
            eos_ids=EOS_IDS[rows],
            done=np.zeros(len(rows), bool),
            settings={"length_penalty": np.full(len(rows), 0.6, np.float32)},
        )
        state = prefill(TARGET.network, None, config, 4 + LIMIT, given)
        state = sd.advance(TARGET.network, None, state, FOREVER)
        return [
            np.asarray(part)
            for part in (state.finished.lengths, state.finished.scores, state.active.tokens)
        ]

    together = searched(np.arange(3))
    for row in range(3):
        for whole, alone in zip(together, searched(np.array([row]))):
            np.testing.assert_allclose(whole[row], alone[0], rtol=1e-6)


def test_candidates_of_a_step():
    """K beams continue even if all EOS ids are the most probable: (1 + E)·K candidates do."""
    ends, beams, bias = (1, 3, 5, 7, 8), 2, np.zeros(9, np.float32)
    target = HashModel(9, 0, eos_ids=ends)
    bias[list(ends)] = 3
    options = dict(
        num_beams=beams, beam_style="huggingface", early_stopping="never", length_penalty=3.0
    )
    sampling = sd.SamplingConfig(logit_bias={token: 3.0 for token in ends})
    inputs = np.arange(1, 9)[:, None]
    found = sd.generate(
        target, inputs, max_new_tokens=5, num_return_sequences=beams, sampling=sampling, **options
    )

    def dist(row):
        def log_probs(tokens):
            logits = target.logits(row[None], np.array([[0, *tokens]]))[0, -1]
            return (logits - np.log(np.exp(logits).sum()) + bias).astype(np.float32)

        return log_probs

    for row, one in enumerate(inputs):
        expected = Search(beams, ends, 3.0, "huggingface", "never").run(dist(one), 5)
        assert expected.margin > 1e-6
        rows = range(row * beams, (row + 1) * beams)
        assert [
            found.tokens[place, : found.lengths[place]].tolist() for place in rows
        ] == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafting",
    [
        dict(gamma=3),
        dict(tree=Tree.uniform((2, 1, 1), children="gumbel")),
        dict(tree=DynamicTree(3, 2, 8, "gumbel")),
    ],
    ids=["chain", "tree", "dynamic tree"],
)
def test_noise_of_the_drafts_positions(drafting):
    """A drafter that is the target proposes, by each position's noise, what the target takes."""
    options = dict(
        sampling=SAMPLED, key=jax.random.key(3), max_new_tokens=LIMIT, decoder_prefix=PREFIXES
    )
    verifier = {} if "tree" in drafting else dict(verifier="gumbel")
    found = sd.generate(
        TARGET, INPUTS, drafter=sd.ModelDrafter(TARGET), **options, **verifier, **drafting
    )
    plain = sd.generate(TARGET, INPUTS, verifier="gumbel", **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_array_equal(
        found.stats.accepted_by_position, found.stats.examined_by_position
    )
    if not isinstance(drafting.get("tree"), DynamicTree):  # which may keep no child of a node
        assert found.stats.target_calls == 3 * LIMIT // 4
