"""Drafts by recycling what the target found probable after the same tokens before."""

from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specdec_jax.drafters.continuations import Found, TableDrafter, Texts, find_top_k
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.state import DecodeState, Scored


@flax.struct.dataclass
class TokenRecycling(TableDrafter):
    """A drafter that proposes the ids that the target last found most probable after a token.

    A table has K successors for each id of the vocabulary. Every position that the target scores
    renews the successors of its token, those after rejected tokens too: the K most probable ids
    there, the best first. Of several positions with the same token the last one counts. A chain
    takes the first successor of each token, a tree the first few. (Token recycling, Luo et al.
    2024, arXiv 2408.08696.)

    At first the table is empty, and nothing is drafted after a token that the target has not seen.

    Attributes:
      vocab_size: V, the target's.
      top_k: K, the most children that a node of a tree can have.
      shared: False gives every row a table of its own, which begins empty: `[B, V, K]` ids. With
        True all rows have one, which outlives them while finished rows are refilled: it knows more,
        and takes less memory. Above temperature 0 it then needs `verifier="gumbel"`, or the same in
        a tree (see `Drafter.remembers`).
    """

    reads_logits: ClassVar[bool] = True
    reads_nodes: ClassVar[bool] = True
    remembers: ClassVar[Any] = property(lambda self: self.shared)

    vocab_size: int = flax.struct.field(pytree_node=False)
    top_k: int = flax.struct.field(pytree_node=False, default=8)
    shared: bool = flax.struct.field(pytree_node=False, default=False)

    def __post_init__(self):
        arguments.keep_integer(self, "vocab_size", 1)
        arguments.keep_integer(self, "top_k", 1, 64)
        arguments.check_flag("shared", self.shared)

    @property
    def name(self) -> str:
        return "token recycling"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        if self.vocab_size != target.config.vocab_size:
            got, expected = f"a table of {self.vocab_size} ids", f"{target.config.vocab_size}"
            raise ValueError(f"drafter: got {got}, expected the target's {expected}")

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> Int[Array, "*R V K"]:
        """Returns the table, with −1 where there is no successor; R = B rows or none."""
        rows = () if self.shared else (len(tokens),)
        return jnp.full((*rows, self.vocab_size, self.top_k), -1, jnp.int32)

    def repeat_memory(self, memory: jax.Array, copies: int) -> jax.Array:
        return memory  # to copy the tables would take longer than all else

    def find(self, memory: jax.Array, texts: Texts, count: int, length: int) -> Found:
        last = jnp.take_along_axis(texts.tokens, texts.lengths[:, None] - 1, axis=1)[:, 0]
        if self.shared:
            ids = memory[last]
        else:
            rows = jnp.arange(len(last)) // (len(last) // len(memory))
            ids = memory[rows, last]
        ids = ids[:, :count]
        ids = jnp.pad(ids, ((0, 0), (0, count - ids.shape[1])), constant_values=-1)
        return Found(ids[..., None], jnp.ones((len(last), 1), jnp.int32))

    def observe(self, draft_state: jax.Array, state: DecodeState, scored: Scored) -> jax.Array:
        """Renews the successors of every token that the target was fed."""
        if scored.nodes is None:
            tokens, logits = scored.tokens, scored.logits
            fed = jnp.where(scored.num_new > 0, state.last_drafted + 1, 0)
            valid = jnp.arange(tokens.shape[1]) < fed[:, None]
        else:
            tokens, logits = scored.nodes.draft.tokens, scored.nodes.logits
            valid = scored.nodes.draft.valid
        assert logits is not None
        successors = find_top_k(logits, self.top_k)
        valid &= successors[..., 0] >= 0  # not after NaN
        if self.shared:
            tokens, valid = tokens.reshape(-1), valid.reshape(-1)
            where: tuple = (jnp.where(keep_last(tokens, valid), tokens, self.vocab_size),)
            successors = successors.reshape(len(tokens), -1)
        else:
            places = jnp.where(keep_last(tokens, valid), tokens, self.vocab_size)
            where = (jnp.arange(len(tokens))[:, None], places)
        return draft_state.at[where].set(successors, mode="drop")


def keep_last(tokens: Int[Array, "*N T"], valid: Bool[Array, "*N T"]) -> Bool[Array, "*N T"]:
    """Returns `valid` with only the last of the valid places that have the same token.

    XLA does not say which of several writes to one place counts.
    """
    later = jnp.triu(jnp.ones((tokens.shape[-1],) * 2, bool), 1)
    same = (tokens[..., :, None] == tokens[..., None, :]) & valid[..., None, :] & later
    return valid & ~jnp.any(same, axis=-1)
