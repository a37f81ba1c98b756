"""Beam search inside another framework's traced function, as T5X's `decoding.beam_search`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.generation_config import (
    CallData,
    ConfigOrPath,
    check_unset,
    document_options,
)
from specdec_jax.decoding.search_options import LEVELS, BeamOptions, check_drafting
from specdec_jax.decoding.traced_arguments import (
    check_models,
    check_names,
    check_parts,
    check_rows,
    end_ids,
    is_traced,
)
from specdec_jax.decoding.under_jit import (
    UNSUPPORTED,
    Decoded,
    align_inputs,
    read_options,
    run_loop,
)
from specdec_jax.models import arguments
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.beam_search import BeamState, sort_hypotheses
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import MAX_GAMMA
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.sampling import SamplingConfig

_KNOWN = ("alpha", "max_decode_len", "max_decode_step", "min_log_prob", "decode_rng", "eos_id")
# T5X's own, which stops nothing.
_LEAST_LOG_PROB = -1e7
# Options without meaning for a beam search, beside those of every traced decode.
_UNSET = (
    *("sampling", "drafter_sampling", "verifier", "tree"),
    *("lenience", "typical_epsilon", "typical_delta"),
)


class BeamDecoder:
    """A beam search under `jax.jit`; its settings are checked when the object is made."""

    @functools.partial(document_options, without=(*UNSUPPORTED, *_UNSET, *CallData._fields))
    @isolated
    def __init__(
        self,
        config: T5Config,
        drafter: Drafter | None = None,
        generation: ConfigOrPath = None,
        **options: Any,
    ) -> None:
        """Checks the settings.

        Args:
          config: the target's configuration.
          drafter: a `BeamDrafter`; None is plain beam search.
          generation: a `GenerationConfig`, or the path of its file, which the options change.
          options: `gamma`, the levels of the tree, "auto" is 3; `beam_width`.

        Raises:
          TypeError, ValueError: as for `read_options`; or settings that make no sense together.
        """
        check_parts(config, drafter)
        given = read_options(generation, options, "beam search")
        check_unset(given, "for beam search", *_UNSET)
        self.config, self.drafter, self.beam_width = config, drafter, given.beam_width
        gamma: Any = LEVELS if isinstance(given.gamma, str) else given.gamma
        check_drafting(drafter, gamma)
        self.gamma = arguments.check_integer("gamma", gamma, 0, MAX_GAMMA)
        check_models(drafter, config)
        BeamOptions(1, beam_width=self.beam_width)

    @isolated
    def check_call(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for `decoder_params` that `decode` rejects, whatever its arrays are."""
        check_names(given, _KNOWN, None)
        self._checked(given, 1, given.get("max_decode_len") or 1)
        _end_id(given.get("eos_id", 0), 1)

    @isolated
    def decode(
        self,
        params: Mapping,
        inputs: jax.Array,
        prompts: jax.Array,
        eos_id: Any,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        prompted: bool = True,
        num_decodes: int = 1,
    ) -> Decoded:
        """Searches for a batch; to be called under `jax.jit`.

        Args:
          params, inputs, prompts, prompted: as for `Decoder.decode`. The prompt counts in the
            penalty for length.
          eos_id: one id, which ends a hypothesis, but not in its prompt.
          rng: nothing is drawn with it.
          decoder_params: what T5X's `beam_search` takes, for this call: `alpha` (0.6), the exponent
            of the length; `max_decode_len`, the L of what comes out, static; `max_decode_step`, the
            most tokens of a hypothesis, its prompt included, where it is more than 0; `eos_id`; and
            `decode_rng` in place of `rng`.
          num_decodes: K, beams and hypotheses.

        Returns:
          `tokens [B, K, L]`, the best last, and their `scores [B, K]`; places that nothing filled
          are T5X's, zeros and −1e7. A row that met logits that are not numbers, or whose input has
          a 0 inside, has NaN for scores.

        Raises:
          ValueError: arrays of other kinds or shapes; other `decoder_params`, or values that make
            no sense; parameters of another shape.
        """
        given = check_names(decoder_params, _KNOWN, rng)
        inputs, prompts = check_rows(inputs, prompts)
        beams, penalty, length = self._checked(given, num_decodes, prompts.shape[1])
        batch, vocab = len(prompts), self.config.vocab_size
        eos_ids = _end_id(given.get("eos_id", eos_id), batch)
        drafter = self.drafter if self.gamma else None
        sampling = SamplingConfig()
        beams.check_ids(1, vocab)
        config = beams.config(
            1, sampling.mode, vocab, self.gamma if drafter is not None else 0, drafter
        )
        most = jnp.asarray(given.get("max_decode_step", -1), jnp.int32)
        most = jnp.where(most > 0, jnp.minimum(most, length), length)
        tokens, prefix_lengths = jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32)
        if prompted:
            tokens, prefix_lengths = _make_prefixes(prompts, length, most)
        limits = jnp.broadcast_to(most + 1, prefix_lengths.shape)
        inputs, input_lengths, whole = align_inputs(inputs)
        begin = PrefillInputs(
            inputs=inputs,
            input_lengths=input_lengths,
            tokens=tokens,
            prefix_lengths=prefix_lengths,
            sampling=sampling.rows(batch, vocab),
            limits=limits,
            eos_ids=eos_ids,
            done=limits == prefix_lengths,
            settings={"length_penalty": jnp.full(batch, penalty, jnp.float32)},
        )
        config = config._replace(max_new=length)
        state = run_loop(params, self.config, drafter, config, length + 1, begin)
        return _order_as_t5x(state, length, whole)

    def _checked(
        self, given: Mapping[str, Any], num_decodes: int, longest: int
    ) -> tuple[BeamOptions, Any, int]:
        """Returns a call's options, its penalty (maybe traced) and the length of its output."""
        penalty, length = given.get("alpha", 0.6), given.get("max_decode_len")
        if not is_traced(penalty) and not (arguments.is_number(penalty) and 0 <= penalty < np.inf):
            raise ValueError(f"alpha: got {penalty}, expected a finite number of at least 0")
        length = longest if length is None else length
        what = ", the targets' length"
        length = arguments.check_integer("max_decode_len", length, 1, longest, what)
        least = given.get("min_log_prob", _LEAST_LOG_PROB)
        if is_traced(least) or least > _LEAST_LOG_PROB:
            # T5X ends all rows by the best of them, so that each would depend on the others.
            raise ValueError(f"min_log_prob: got {least}, expected none")
        most = given.get("max_decode_step", -1)
        if not is_traced(most):
            arguments.check_numbers("max_decode_step", most, "an integer", whole=True)
        return BeamOptions(num_decodes, beam_width=self.beam_width), penalty, length


def _end_id(eos_id: Any, batch: int) -> jax.Array:
    """Returns `[B, 1]` int32: the id that ends a hypothesis."""
    ids = end_ids(eos_id, batch)
    if ids.shape[1] != 1:
        raise ValueError(f"eos_id: got {ids.shape[1]} ids, expected one")
    return ids


def _make_prefixes(prompts: jax.Array, length: int, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns start tokens and what T5X forces after them `[B, length + 1]`, and lengths `[B]`.

    Where a prompt fills all of its places, T5X's last step, which has none to look at, forces the
    last token once more.
    """
    tokens = jnp.concatenate([prompts, prompts[:, -1:]], axis=1)[:, : length + 1].at[:, 0].set(0)
    forced = jnp.sum(jnp.cumprod(tokens[:, 1:] != 0, axis=1), axis=1, dtype=jnp.int32)
    return tokens, 1 + jnp.minimum(forced, most)


def _order_as_t5x(state: BeamState, length: int, whole: jax.Array) -> Decoded:
    """Returns the result of a search in T5X's order and form.

    `whole [B]` tells the rows whose inputs have no 0 inside.
    """
    best, there = jax.tree.map(lambda x: x[:, ::-1], sort_hypotheses(state))
    lengths = (state.prefix_lengths[:, None] + best.lengths)[..., None]
    filled = there[..., None] & (jnp.arange(1, length + 1) < lengths)
    scores = jnp.where(((state.failed > 0) | ~whole)[:, None], jnp.nan, best.scores)
    counts = state.counts
    tokens = jnp.where(filled, best.tokens[:, :, 1 : length + 1], 0)
    return Decoded(tokens, scores, counts.target_calls, counts.drafted, counts.accepted)
