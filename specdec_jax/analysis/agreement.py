"""Scores outputs of a target with two models: how far their distributions agree at each token."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis.top_k_hit_rate import PositionHitRates, position_hit_rates
from specdec_jax.drafters.drafting import match_width
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only, join
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative import distributions
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingConfig, SamplingMode, SamplingRows


class Agreement(NamedTuple):
    """How far two models' distributions, as sampled, agree at each token of given outputs.

    Arrays are `[B, T]` float32, garbage past an output's end.

    Attributes:
      overlap: Σ min(p, q) over the vocabulary, the probability that a drafted token is accepted; at
        temperature 0 whether the argmax is the same.
      log_ratio: log q(y) − log p(y) of the token y of the output.
      hit_rates: the result of `position_hit_rates`, `[B, T, K]`.
    """

    overlap: np.ndarray
    log_ratio: np.ndarray
    hit_rates: PositionHitRates


def agreement(
    target: LanguageModel,
    drafter: LanguageModel,
    inputs: Sequence[Sequence[int]],
    tokens: np.ndarray,
    lengths: np.ndarray,
    config: SamplingConfig,
    start_token: int | None = None,
) -> Agreement:
    """Scores outputs of the target with both models, teacher-forced, in one call each.

    `inputs` are ids of B inputs, `tokens` `[B, T]` the new ones, of which `lengths` `[B]` count,
    `config` says how they were sampled, and `start_token` is what an encoder–decoder began with, by
    default the target's own.
    """
    start = target.start_token if start_token is None else start_token
    width, first = bucket_length(max(1, int(max(lengths)))), [start] * len(tokens)
    prompted, longest = is_decoder_only(target), 0
    if prompted:  # the last id of a prompt is used as the start token
        prompts = [list(ids) or [target.start_token] for ids in inputs]
        first, inputs = [ids[-1] for ids in prompts], [ids[:-1] for ids in prompts]
        longest = max(map(len, inputs))
    limits = [model.config.max_positions for model in (target, drafter)]
    width = min([width, *(limit - longest for limit in limits if limit is not None)])
    tokens = np.pad(tokens, ((0, 0), (0, max(0, width - tokens.shape[1]))))
    tokens = tokens[:, :width].astype(np.int32)
    fed = np.concatenate([np.array(first, np.int32)[:, None], tokens[:, :-1]], axis=1)
    input_lengths = np.array([len(ids) for ids in inputs], np.int32)
    padded = np.zeros((len(inputs), bucket_length(int(max(input_lengths)))), np.int32)
    for row, ids in enumerate(inputs):
        padded[row, : len(ids)] = ids
    logits = target.logits(padded, fed, input_lengths)
    # An id that the drafter lacks is read as its last one, as in the decode loop.
    last = drafter.config.vocab_size - 1
    encoder = {"encoder": target} if drafter.config.encoder_dim is not None else {}
    # An encoder of the target's own reads all of its ids.
    reads = last if drafter.config.shares_vocabulary else drafter.config.input_vocab_size - 1
    read = padded if encoder else np.minimum(padded, reads)
    draft_logits = drafter.logits(read, np.minimum(fed, last), input_lengths, **encoder)
    rows = config.rows(len(tokens), target.config.vocab_size)
    eos_ids = np.tile(np.array(target.eos_ids or (-1,), np.int32), (len(tokens), 1))
    starts = np.ones_like(input_lengths)
    if prompted:
        fed, starts = join(padded, input_lengths, fed)[0], input_lengths + 1
    context = Context(fed, starts, starts, eos_ids)
    agreed = _agreement(logits, draft_logits, context, tokens, rows, mode=config.mode)
    return Agreement(*jax.device_get(agreed))


@functools.partial(jax.jit, static_argnames="mode")
def _agreement(
    logits: jax.Array,
    draft_logits: jax.Array,
    context: Context,
    tokens: jax.Array,
    rows: SamplingRows,
    *,
    mode: SamplingMode,
) -> tuple[jax.Array, jax.Array, PositionHitRates]:
    draft_logits = match_width(draft_logits, logits.shape[-1])
    dist, draft_dist = (
        distributions.standardize(values, context, rows, mode) for values in (logits, draft_logits)
    )
    ranked = distributions.standardize(draft_logits, context, rows, mode, soften=True)
    overlap = jnp.sum(jnp.minimum(dist.probs(), draft_dist.probs()), axis=-1)
    here, there = dist.log_prob(tokens), draft_dist.log_prob(tokens)
    # A sampled token has p > 0, unless two ways of computing p round differently (ties, the edge of
    # a filter).
    here = jnp.where(here > -jnp.inf, here, there)
    log_ratio = jnp.where(there > -jnp.inf, there - here, -jnp.inf)
    return overlap, log_ratio, position_hit_rates(dist, ranked, tokens, mode.greedy)
