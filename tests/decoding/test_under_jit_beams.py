"""Beam search inside another program's traced function gives what `generate` gives.

T5X itself is in tests/interop.
"""

import dataclasses

import flax.core
import jax
import numpy as np
import pytest
import tiers
from make_checkpoints import TINY

import specdec_jax as sd
from specdec_jax.decoding.under_jit_beams import BeamDecoder

pytestmark = pytest.mark.usefixtures("quick")
LENGTH, BEAMS, INPUTS = (
    7,
    3,
    np.array([[5, 6, 7, 8, 1], [9, 4, 1, 0, 0], [11, 1, 0, 0, 0]], np.int32),
)
PROMPTS = np.array([[0, 3, 4, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 9, 8, 7, 6, 0, 0]], np.int32)


@pytest.fixture(scope="module")
def pair():
    target, drafter = (
        sd.LanguageModel.random(dataclasses.replace(TINY, num_decoder_layers=1), seed)
        for seed in (0, 1)
    )
    return target, sd.ModelDrafter(drafter)


def decode(decoder: BeamDecoder, params, eos=1, inputs=INPUTS, **traced):
    """Decodes as a framework would, with all of `traced` as arguments of a jitted function."""

    @jax.jit
    def config(params, inputs, prompts, traced):
        return decoder.decode(
            params, inputs, prompts, eos, decoder_params=traced, num_decodes=BEAMS
        )

    return jax.tree.map(np.asarray, config(flax.core.freeze(params), inputs, PROMPTS, traced))


def expected(target, drafter, limit=LENGTH, eos=1, **options):
    """Returns `generate`'s tokens `[B, K, LENGTH]` with prompts, scores `[B, K]` and counts."""
    prefixes = [row[row > 0].tolist() for row in PROMPTS]
    found = sd.generate(
        target,
        INPUTS,
        drafter=drafter,
        decoder_prefix=prefixes,
        eos_ids=(eos,),
        num_beams=BEAMS,
        max_new_tokens=[limit - len(prefix) for prefix in prefixes],
        num_return_sequences=BEAMS,
        **options,
    )
    tokens = np.zeros((len(INPUTS), BEAMS, LENGTH), np.int32)
    for row, (new, many) in enumerate(zip(found.tokens, found.lengths)):
        whole = (
            [*prefixes[row // BEAMS], *new[:many]] if found.finish_reasons[row] != "none" else []
        )
        tokens[row // BEAMS, BEAMS - 1 - row % BEAMS, : len(whole)] = whole
    return tokens, found.scores.reshape(-1, BEAMS)[:, ::-1], found.stats


def test_zeros_before_and_inside_an_input(pair):
    target, decoder = pair[0], BeamDecoder(pair[0].config)
    plain = decode(decoder, target.params)
    for last, inside in (([0, 0, 11, 1, 0], False), ([0, 11, 0, 1, 0], True)):
        inputs = np.array([*INPUTS[:2], last], np.int32)
        found = decode(decoder, target.params, inputs=inputs)
        rows = [True, True, not inside]
        np.testing.assert_array_equal(found.tokens[rows], plain.tokens[rows])
        np.testing.assert_array_equal(found.scores[rows], plain.scores[rows])
        assert np.isnan(found.scores[2]).all() == inside


@tiers.parametrize("drafts", [False, True], ids=["plain", "speculative"], first=1)
def test_tokens_scores_and_counts_are_those_of_generate(drafts, pair):
    target, drafter = pair[0], pair[1] if drafts else None
    options = dict(gamma=2, beam_width=5) if drafts else {}
    eos = int(expected(target, None)[0][1, -1, 2])  # one that comes up
    tokens, scores, stats = expected(target, drafter, eos=eos, length_penalty=1.0, **options)
    got = decode(
        BeamDecoder(target.config, drafter, **options), target.params, eos, alpha=np.float32(1.0)
    )
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5)
    assert (tokens[:, -1, -1] == 0).any()
    counts = got.target_calls.sum(), got.drafted.sum(), got.accepted.sum()
    assert counts == (stats.target_calls, stats.drafted, stats.accepted)


def test_steps_may_be_traced(pair):
    target, drafter = pair
    tokens, scores, _ = expected(target, None, limit=5)
    got = decode(
        BeamDecoder(target.config, drafter, gamma=1), target.params, max_decode_step=np.int32(5)
    )
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_allclose(got.scores, scores, rtol=1e-5)


def test_a_target_of_no_numbers_has_no_scores(pair):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, pair[0].params)
    got = decode(BeamDecoder(pair[0].config), broken)
    assert np.isnan(got.scores).all() and (got.tokens >= 0).all() and (got.target_calls == 1).all()
