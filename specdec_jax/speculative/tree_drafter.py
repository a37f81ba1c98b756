"""The interface of drafters of token trees."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.tree_draft import TreeDraft
from specdec_jax.speculative.trees import CHILDREN


class TreeDrafter(Drafter):
    """A drafter that can draft trees; a subclass defines `draft_tree`, which is traced.

    Attributes:
      kinds: how the children of its trees can be chosen, and how such trees can be verified, the
        best first, as in `CHILDREN`.
      dynamic: whether it can draft a `DynamicTree`.
      trees_only: whether it drafts nothing but trees, and does not define `draft`.
    """

    kinds: ClassVar[Mapping[str, tuple[str, ...]]] = CHILDREN
    dynamic: ClassVar[bool] = True
    trees_only: ClassVar[bool] = False

    def init_tree(
        self,
        inputs: Int[Array, "I L"],
        input_lengths: Int[Array, " I"],
        tokens: Int[Array, "B P"],
        slots: int,
        **encoded: Float[Array, "I L D"],
    ) -> Any:
        """Returns the state before the first iteration with trees; arguments as for `init`."""
        return self.init(inputs, input_lengths, tokens, slots, **encoded)

    def draft_tree(
        self,
        draft_state: Any,
        state: DecodeState,
        num_wanted: Int[Array, " B"],
        max_depth: Int[Array, " B"],
    ) -> tuple[Any, TreeDraft]:
        """Drafts the tree `state.config.tree` after each row's committed tokens.

        Args:
          num_wanted: how many of the drafted nodes are wanted: those with the smallest numbers.
          max_depth: the greatest depth of a node.
        """
        raise NotImplementedError

    def keep_path(
        self, draft_state: Any, state: DecodeState, draft: TreeDraft, path: Int[Array, "B D"]
    ) -> Any:
        """Returns the state after the nodes with the numbers `path`, by depth, were committed.

        Args:
          state: the decode loop's, before the commit.
        """
        return draft_state


def drafts_chains(drafter: Drafter) -> bool:
    """Returns whether a drafter can draft without a tree."""
    return not (isinstance(drafter, TreeDrafter) and drafter.trees_only)
