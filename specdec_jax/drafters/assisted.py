"""Drafts by n-grams that are learnt, while decoding, from the target's own calls."""

from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.drafters.continuations import (
    ContinuationDrafter,
    Found,
    Inputs,
    Texts,
    check_copying,
    compare_endings,
    find_best,
    find_top_k,
    last_ids,
    repeat_inputs,
    sum_weights,
)
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.state import DecodeState, Scored


class NGramMemory(NamedTuple):
    """What `AssistedNGramDrafter` remembers of each row: its input, and a ring of N positions.

    They are the latest positions that the target scored.

    Attributes:
      inputs: the encoder's input.
      contexts: `[B, N, n − 1]` int32, the ids before a position, the last id first; −2, which is no
        id, where there is none.
      tokens: `[B, N, K]` int32, the target's K most probable ids at the position.
      weights: `[B, N, K]` float32, their probabilities under the target's own distribution.
      written: `[B]` int32, number of positions written so far.
    """

    inputs: Inputs
    contexts: jax.Array
    tokens: jax.Array
    weights: jax.Array
    written: jax.Array


@flax.struct.dataclass
class AssistedNGramDrafter(ContinuationDrafter):
    """A drafter that proposes what most often followed the last n − 1 ids in this request so far.

    Two things are counted. Every id of the encoder's input and of the output has weight 1; for a
    decoder-only target, every id of prompt and output, except that the first id is a context only.
    And at every position that the target scored, also those after rejected ids, its `top_k` most
    probable ids have their probabilities as weights. The longest context that occurs anywhere
    counts, from n − 1 ids down to none (then the heaviest single id); of equally heavy ids the
    smallest is drafted. (Context n-grams and the model's own top-k: The N-Grammys, Stewart et al.
    2024, arXiv 2411.03786.)

    Drafts are point masses, so that a mismatch costs nothing: token verification accepts x with
    probability p(x), and otherwise draws from p without x. Together that is one draw from p,
    compared with x. `verifier="gumbel"` takes just that draw, the one that plain decoding would
    make. Nothing is ever drawn a second time (PITFALLS row 5).

    Attributes:
      order: n, from 2 on.
      top_k: K.
      memory: N, how many of the latest scored positions are remembered for each row.
    """

    reads_logits: ClassVar[bool] = True
    varies: ClassVar[Any] = False

    order: int = flax.struct.field(pytree_node=False, default=4)
    top_k: int = flax.struct.field(pytree_node=False, default=4)
    memory: int = flax.struct.field(pytree_node=False, default=64)

    def __post_init__(self):
        for name, least, most in (("order", 2, 16), ("top_k", 1, 64), ("memory", 1, 2**16)):
            arguments.keep_integer(self, name, least, most)

    @property
    def name(self) -> str:
        return f"assisted {self.order}-grams"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        check_copying(target, type(self).__name__)

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> NGramMemory:
        batch, shape = len(tokens), (len(tokens), self.memory)
        return NGramMemory(
            repeat_inputs(inputs, input_lengths, batch),
            jnp.full((*shape, self.order - 1), -2, jnp.int32),
            jnp.zeros((*shape, self.top_k), jnp.int32),
            jnp.zeros((*shape, self.top_k), jnp.float32),
            jnp.zeros(batch, jnp.int32),
        )

    def find(self, memory: NGramMemory, texts: Texts, count: int, length: int) -> Found:
        inputs, remembered = memory.inputs, (len(texts.lengths), self.memory * self.top_k)
        slots, columns = jnp.arange(texts.tokens.shape[1]), jnp.arange(inputs.tokens.shape[1])
        ending = last_ids(texts.tokens, texts.lengths, self.order - 1)
        same = memory.contexts == ending[:, None]
        in_memory = jnp.sum(jnp.cumprod(same.astype(jnp.int32), axis=2), axis=2)
        # The start token, or the first id of a prompt, follows nothing.
        in_output = (slots > 0) & (slots < texts.lengths[:, None])
        in_input = columns < inputs.lengths[:, None]
        known = texts.tokens, inputs.tokens, memory.tokens.reshape(remembered)
        ones = in_output.astype(jnp.float32), in_input.astype(jnp.float32)
        counts = *ones, memory.weights.reshape(remembered)
        matches = (
            compare_endings(texts.tokens, texts.lengths, ending, self.order - 1)[0],
            compare_endings(*inputs, ending, self.order - 1)[0],
            jnp.repeat(in_memory, self.top_k, axis=1),
        )
        ids, weights, match = (jnp.concatenate(parts, axis=1) for parts in (known, counts, matches))
        longest = jnp.max(jnp.where(weights > 0, match, 0), axis=1, keepdims=True)
        weights = jnp.where(match == longest, weights, 0)
        best, _ = find_best(ids, sum_weights(ids, weights), count)
        least = jnp.where(jnp.arange(count) > 0, -1, 0)  # the first is always there
        return Found(jnp.maximum(best, least)[..., None], longest)

    def observe(self, draft_state: NGramMemory, state: DecodeState, scored: Scored) -> NGramMemory:
        """Remembers the target's most probable ids at every position that the target was fed."""
        assert scored.logits is not None
        batch, width = scored.tokens.shape
        # The first id that was fed stands in the last slot before the new ones.
        start = state.lengths - scored.num_new - 1
        before = last_ids(state.tokens, start, self.order - 2, -2)[:, ::-1]
        fed = jnp.concatenate([before, scored.tokens], axis=1)
        ends = jnp.arange(width)[:, None] + self.order - 2 - jnp.arange(self.order - 1)
        tokens = find_top_k(scored.logits, self.top_k)
        total = jax.nn.logsumexp(scored.logits, axis=-1, keepdims=True)
        logits = jnp.take_along_axis(scored.logits, jnp.maximum(tokens, 0), axis=-1)
        weights = jnp.where(tokens < 0, 0, jnp.exp(logits - total))
        # Of a tree only the accepted path is known, of a chain also what follows rejected tokens.
        count = scored.num_new
        if state.config.tree is None:
            count = jnp.where(scored.num_new > 0, state.last_drafted + 1, 0)
        # Where there are more positions than fit into the ring, the last ones stay.
        age = (draft_state.written + count - 1)[:, None] - jnp.arange(self.memory)
        place = (count - 1)[:, None] - age % self.memory

        def write(old: jax.Array, new: jax.Array):
            new = jnp.take_along_axis(new, jnp.maximum(place, 0)[..., None], axis=1)
            return jnp.where((place >= 0)[..., None], new, old)

        return draft_state._replace(
            contexts=write(draft_state.contexts, fed[:, ends]),
            tokens=write(draft_state.tokens, tokens),
            weights=write(draft_state.weights, weights),
            written=draft_state.written + count,
        )
