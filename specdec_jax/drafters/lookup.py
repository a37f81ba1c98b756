"""Drafters without a model, whose cost is next to nothing (c ≈ 0): tables of k-grams, copies, random tokens.

Leviathan et al. 2023: a bigram model as drafter in section 4, copying where the output repeats its context and random
tokens as the worst drafter that still helps in section 3.6.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax import sampling
from specdec_jax.drafters.drawing import draft_tokens, draw, draw_adjusted, empty_law, look, match_width
from specdec_jax.drafters.ngrams import NGramTable
from specdec_jax.sampling import Law, PointMass
from specdec_jax.speculative import DecodeState, Draft, Scored, context, empty_seen
from specdec_jax.vocabularies import Vocabulary


@flax.struct.dataclass
class NGramDrafter:
    """Drafts what followed the last n − 1 tokens in texts that were counted before; n = 1 is a unigram, 2 a bigram model.

    The longest context that was seen counts; if none was, the frequencies of single ids. Contexts that reach beyond the
    beginning are filled up with the start token, in counting and in drafting.

    Attributes:
      table: the counts.
      sampled: False drafts the most frequent id, a point mass; True draws from the relative frequencies (for a context,
        of the continuations kept), under the same processors, temperature and filters as the target.
    """

    table: NGramTable
    sampled: bool = flax.struct.field(pytree_node=False, default=False)

    @classmethod
    def count(
        cls, sequences: Iterable[Sequence[int]], vocab_size: int, order: int, *, start_token: int = 0,
        continuations: int = 8, sampled: bool = False, vocabulary: Vocabulary | None = None,
    ) -> "NGramDrafter":  # fmt: skip
        """Counts `sequences` of ids, each with its EOS.

        Args:
          sequences: of outputs; an empty one counts for nothing.
          vocab_size: V; all ids lie below it.
          order: n ≥ 1, one more than the longest context.
          start_token: the target's.
          continuations: M ≥ 1, how many ids are kept for a context, the most frequent ones.
          sampled: as the attribute.
          vocabulary: of the ids; a drafter that knows it is refused where the target has another.

        Raises:
          ValueError: nothing to count, ids outside the vocabulary, or a number out of its range.
        """
        table = NGramTable.count(
            sequences, vocab_size, order, start_token=start_token, continuations=continuations,
            fingerprint=vocabulary.fingerprint() if vocabulary is not None else "",
        )  # fmt: skip
        return cls(table, bool(sampled))

    def save(self, path) -> None:
        """Writes one file (.npz) that `load` reads."""
        self.table.save(path, sampled=np.bool_(self.sampled))

    @classmethod
    def load(cls, path, vocabulary: Vocabulary | None = None, sampled: bool | None = None) -> "NGramDrafter":
        """The drafter that `save` wrote; `sampled` overrides what it says.

        Raises:
          ValueError: not such a file, a truncated one, or one that was counted with another vocabulary.
        """
        table, values = NGramTable.load(path)
        if not table.matches(vocabulary):
            raise ValueError(
                f"{path}: got a table of {table.vocab_size} ids of another vocabulary, expected that of the "
                f"target ({vocabulary.size} pieces)"
            )
        return cls(table, bool(values.get("sampled", False)) if sampled is None else sampled)

    @property
    def name(self) -> str:
        return f"{self.table.order}-gram table"

    @property
    def tells_law(self) -> bool:
        return self.sampled

    def init(self, inputs, input_lengths, tokens, slots: int) -> tuple:
        return ()

    def draft(self, draft_state: tuple, state: DecodeState, num_wanted) -> tuple[tuple, Draft]:
        vocab_size = state.program.vocab_size

        def choose(step, tokens, carry):
            rows = self.table.rows(tokens, state.lengths + step)
            if not self.sampled:
                return self.table.most_frequent(rows), carry
            law, seen = carry
            logits = match_width(self.table.logits(rows)[:, None], vocab_size)
            drawn, law = draw_adjusted(state, logits, tokens, step, law)
            return drawn, (law, look(state, logits, tokens, step, drawn, seen))

        if not self.sampled:
            tokens, num_drafted, _ = draft_tokens(state, num_wanted, choose, None)
            return (), _draft(state, tokens, num_drafted, _point_mass(state, tokens))
        carry = empty_law(state), empty_seen(state.policy, len(state.lengths))
        tokens, num_drafted, (law, seen) = draft_tokens(state, num_wanted, choose, carry, seen=lambda carry: carry[1])
        return (), _draft(state, tokens, num_drafted, law)._replace(seen=seen)


class Inputs(NamedTuple):
    """What `PromptLookupDrafter` copies from beside the output: `tokens [B, L]` int32 and `lengths [B]`, of each row."""

    tokens: jax.Array
    lengths: jax.Array


@flax.struct.dataclass
class PromptLookupDrafter:
    """Copies what followed the last tokens of a row where they stood before: in its output (of a decoder-only target its
    prompt too) or in the encoder's input.

    The longest ending of at most `max_match` ids that is found counts; of several places the latest in the output (start
    token and decoder prefix included), else the latest in the input: what is nearest is most like what is being written.
    The draft, a point mass, reaches to the end of what is known there; nothing found, nothing drafted. (Prompt lookup
    decoding, Saxena 2023; LLMA, Yang et al. 2023, arXiv 2304.04487.)

    Attributes:
      max_match: the longest ending that is looked for, in ids.
    """

    max_match: int = flax.struct.field(pytree_node=False, default=3)
    varies: ClassVar[bool] = True

    def __post_init__(self):
        if not isinstance(self.max_match, int | np.integer) or not 1 <= self.max_match <= 64:
            raise ValueError(f"max_match: got {self.max_match!r}, expected an integer from 1 to 64")

    @property
    def name(self) -> str:
        return "prompt lookup"

    def init(self, inputs, input_lengths, tokens, slots: int) -> Inputs:
        copies = tokens.shape[0] // inputs.shape[0]
        return Inputs(jnp.repeat(inputs, copies, axis=0), jnp.repeat(input_lengths, copies))

    def draft(self, draft_state: Inputs, state: DecodeState, num_wanted) -> tuple[Inputs, Draft]:
        output, lengths = state.tokens, state.lengths
        slots, columns = output.shape[1], draft_state.tokens.shape[1]
        back = lengths[:, None] - jnp.arange(1, self.max_match + 1)
        ending = jnp.where(back >= 0, jnp.take_along_axis(output, jnp.maximum(back, 0), axis=1), -1)  # last id first
        # Places to copy from: the output's slots, then the input's columns. A place is as good as the ending before it
        # is long; of equally good ones the output's come first, and the latest of each.
        in_output = 2 * _match_lengths(output, lengths, ending) + 1
        in_input = 2 * _match_lengths(draft_state.tokens, draft_state.lengths, ending)
        order = max(slots, columns) * jnp.concatenate([in_output, in_input], axis=1)
        order += jnp.concatenate([jnp.arange(slots), jnp.arange(columns)])
        place = sampling.argmax(order)
        found = jnp.take_along_axis(order, place[:, None], axis=1)[:, 0] >= 2 * max(slots, columns)
        end = jnp.where(place < slots, lengths, slots + draft_state.lengths)

        known = jnp.concatenate([output, draft_state.tokens], axis=1)
        offsets = jnp.arange(state.program.gamma)
        tokens = jnp.take_along_axis(known, jnp.minimum(place[:, None] + offsets, known.shape[1] - 1), axis=1)
        num_drafted = jnp.where(found, jnp.minimum(num_wanted, end - place), 0)
        # Nothing comes after an EOS, which itself may stand.
        is_eos = jnp.any(tokens[:, :, None] == state.eos_ids[:, None, :], axis=-1)
        first_eos = jnp.min(jnp.where(is_eos, offsets, state.program.gamma), axis=1)
        num_drafted = jnp.minimum(num_drafted, first_eos + 1)
        return draft_state, _draft(state, tokens, num_drafted, _point_mass(state, tokens))


def _match_lengths(source: jax.Array, lengths: jax.Array, ending: jax.Array) -> jax.Array:
    """How many ids right before each place of `source [B, N]` equal the `ending [B, K]`, its last id first.

    0 at and past `lengths [B]`: there is nothing to copy.
    """
    matches, total = jnp.ones(source.shape, bool), jnp.zeros(source.shape, jnp.int32)
    for back in range(1, ending.shape[1] + 1):
        # −2 is no id, and not the −1 of an ending that is shorter.
        before = jnp.pad(source, ((0, 0), (back, 0)), constant_values=-2)[:, : source.shape[1]]
        matches &= before == ending[:, back - 1 : back]
        total += matches
    return jnp.where(jnp.arange(source.shape[1]) < lengths[:, None], total, 0)


@flax.struct.dataclass
class RandomDrafter:
    """Uniformly random tokens: the drafter of section 3.6 that knows nothing, and a yardstick for others.

    Drawn from a uniform law at every temperature, 0 included; what processors forbid is not drafted.

    Attributes:
      vocab_size: ids are drawn from 0 … vocab_size − 1 (those that the target lacks are left out).
    """

    vocab_size: int = flax.struct.field(pytree_node=False)

    def __post_init__(self):
        if not isinstance(self.vocab_size, int | np.integer) or self.vocab_size < 1:
            raise ValueError(f"vocab_size: got {self.vocab_size!r}, expected an integer of at least 1")

    @property
    def name(self) -> str:
        return "random tokens"

    def init(self, inputs, input_lengths, tokens, slots: int) -> tuple:
        return ()

    def draft(self, draft_state: tuple, state: DecodeState, num_wanted) -> tuple[tuple, Draft]:
        program = state.program
        uniform = match_width(jnp.zeros((len(state.lengths), 1, self.vocab_size)), program.vocab_size)

        def choose(step, tokens, law):
            # No temperature, no filters: they leave a uniform law as it is, but for argmax, which is not random.
            here = Law.of(sampling.process(uniform, context(state, tokens, step), state.sampling, program.mode))
            return draw(state, here, step, law)

        tokens, num_drafted, law = draft_tokens(state, num_wanted, choose, empty_law(state))
        return (), _draft(state, tokens, num_drafted, law)


class Knowledge(NamedTuple):
    """What `AssistedNGramDrafter` keeps of each row: its input, and its latest N calls' positions in a ring.

    Attributes:
      inputs: the encoder's input.
      contexts: `[B, N, n − 1]` int32 ids before a position, the last id first; −2, which is no id, where there is none.
      tokens: `[B, N, K]` int32 the target's K most probable ids there.
      weights: `[B, N, K]` float32 their probabilities under the target's own law.
      written: `[B]` int32 positions written so far.
    """

    inputs: Inputs
    contexts: jax.Array
    tokens: jax.Array
    weights: jax.Array
    written: jax.Array


@flax.struct.dataclass
class AssistedNGramDrafter:
    """Drafts what most often followed the last n − 1 ids in all that the decode itself has shown.

    Counted are: every id of the encoder's input and of the output (for a decoder-only target of prompt and output, the first
    id as a context only), 1; and at every position that the target scored, those
    after refused ids too, its `top_k` most probable ids, with their probabilities. The longest context that occurs anywhere
    counts, from n − 1 ids down to none (then the heaviest single id); of equally heavy ids the smallest. (Context
    n-grams and the model's own top-k: The N-Grammys, Stewart et al. 2024, arXiv 2411.03786.)

    Drafts are point masses, so that a mismatch costs nothing: token verification lets x stand with probability p(x) and else
    draws from p without x, which is one draw from p, compared with x. `verifier="gumbel"` takes just that draw, the one
    plain decoding would make. Nothing is ever drawn a second time (PITFALLS row 5).

    Attributes:
      order: n, from 2 on.
      top_k: K.
      memory: N, the latest scored positions that are remembered, for each row.
    """

    order: int = flax.struct.field(pytree_node=False, default=4)
    top_k: int = flax.struct.field(pytree_node=False, default=4)
    memory: int = flax.struct.field(pytree_node=False, default=64)

    def __post_init__(self):
        for name, least, most in (("order", 2, 16), ("top_k", 1, 64), ("memory", 1, 2**16)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or not least <= value <= most:
                raise ValueError(f"{name}: got {value!r}, expected an integer from {least} to {most}")

    @property
    def name(self) -> str:
        return f"assisted {self.order}-grams"

    def init(self, inputs, input_lengths, tokens, slots: int) -> Knowledge:
        batch = len(tokens)
        copies, room = batch // inputs.shape[0], (batch, self.memory)
        return Knowledge(
            Inputs(jnp.repeat(inputs, copies, axis=0), jnp.repeat(input_lengths, copies)),
            jnp.full((*room, self.order - 1), -2, jnp.int32), jnp.zeros((*room, self.top_k), jnp.int32),
            jnp.zeros((*room, self.top_k), jnp.float32), jnp.zeros(batch, jnp.int32),
        )  # fmt: skip

    def draft(self, draft_state: Knowledge, state: DecodeState, num_wanted) -> tuple[Knowledge, Draft]:
        inputs, remembered = draft_state.inputs, (len(state.lengths), self.memory * self.top_k)
        slots, columns = jnp.arange(state.tokens.shape[1]), jnp.arange(inputs.tokens.shape[1])
        weights = draft_state.weights.reshape(remembered)

        def choose(step, tokens, carry):
            lengths = state.lengths + step
            ending = _ending(tokens, lengths, self.order - 1, -1)
            same = draft_state.contexts == ending[:, None]
            in_memory = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=2), axis=2)
            texts = tokens, inputs.tokens, draft_state.tokens.reshape(remembered)
            matches = (
                _match_lengths(tokens, lengths, ending), _match_lengths(inputs.tokens, inputs.lengths, ending),
                jnp.repeat(in_memory, self.top_k, axis=1),
            )  # fmt: skip
            # The start token, or the first id of a prompt, follows nothing.
            inside = (slots > 0) & (slots < lengths[:, None]), columns < inputs.lengths[:, None]
            counts = *(mask.astype(jnp.float32) for mask in inside), weights
            return _heaviest(*(jnp.concatenate(parts, axis=1) for parts in (texts, matches, counts))), carry

        tokens, num_drafted, _ = draft_tokens(state, num_wanted, choose, ())
        return draft_state, _draft(state, tokens, num_drafted, _point_mass(state, tokens))

    def observe(self, draft_state: Knowledge, state: DecodeState, scored: Scored) -> Knowledge:
        """Remembers what the target made of every position that it was really fed."""
        batch, width = scored.tokens.shape
        # The first id that was fed stands in the last slot before the new ones.
        before = _ending(state.tokens, state.lengths - scored.num_new - 1, self.order - 2, -2)[:, ::-1]
        fed = jnp.concatenate([before, scored.tokens], axis=1)
        ends = jnp.arange(width)[:, None] + self.order - 2 - jnp.arange(self.order - 1)
        logits, tokens = scored.logits, []
        for _ in range(self.top_k):  # a sort of the vocabulary would cost far more
            tokens.append(sampling.argmax(logits))
            logits = jnp.where(jnp.arange(logits.shape[-1]) == tokens[-1][..., None], -jnp.inf, logits)
        tokens = jnp.stack(tokens, axis=-1)
        weights = jnp.exp(
            jnp.take_along_axis(scored.logits, tokens, axis=-1)
            - jax.nn.logsumexp(scored.logits, axis=-1, keepdims=True)
        )
        count = jnp.where(scored.num_new > 0, state.last_drafted + 1, 0)
        # Of more positions than there is room for the last stay.
        age = (draft_state.written + count - 1)[:, None] - jnp.arange(self.memory)
        place = (count - 1)[:, None] - age % self.memory
        write = lambda old, new: jnp.where(
            (place >= 0)[..., None], jnp.take_along_axis(new, jnp.maximum(place, 0)[..., None], axis=1), old
        )
        return draft_state._replace(
            contexts=write(draft_state.contexts, fed[:, ends]), tokens=write(draft_state.tokens, tokens),
            weights=write(draft_state.weights, weights), written=draft_state.written + count,
        )  # fmt: skip


def _ending(tokens: jax.Array, lengths: jax.Array, size: int, missing: int) -> jax.Array:
    """The last `size` ids `[B, size]` of the first `lengths [B]` of `tokens [B, S]`, the last first; `missing` before."""
    places = lengths[:, None] - jnp.arange(1, size + 1)
    return jnp.where(places >= 0, jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1), missing)


def _heaviest(tokens: jax.Array, matches: jax.Array, weights: jax.Array) -> jax.Array:
    """The id `[B]` with the greatest sum of weights among the longest matches with any weight, 0 if none has any.

    All args `[B, C]`.
    """
    tokens = jnp.where(weights > 0, tokens, 0)
    longest = jnp.max(jnp.where(weights > 0, matches, 0), axis=1, keepdims=True)
    weights = jnp.where(matches == longest, weights, 0)
    # Every candidate against every other: a scatter over the vocabulary is a loop on a CPU.
    equal = tokens[:, :, None] == tokens[:, None, :]
    totals = jnp.sum(jnp.where(equal, weights[:, :, None], 0), axis=1)
    best = jnp.max(totals, axis=1, keepdims=True)
    return jnp.min(jnp.where(totals == best, tokens, jnp.iinfo(jnp.int32).max), axis=1)


def _point_mass(state: DecodeState, tokens: jax.Array) -> PointMass | None:
    return PointMass(tokens, state.program.vocab_size) if state.program.asks_draft_law else None


def _draft(state: DecodeState, tokens: jax.Array, num_drafted: jax.Array, law: Law | PointMass | None) -> Draft:
    """A draft that no model was called for."""
    return Draft(tokens, num_drafted, law, jnp.zeros_like(state.lengths))
