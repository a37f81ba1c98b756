"""The flags of a token tree, which several commands share."""

import dataclasses

from specdec_jax.commands.options import option
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.trees import TREE_FORMS, parse_tree
from specdec_jax.speculative.trees import AUTO, CHILDREN, LOSSY_TREES, DynamicTree, Tree

_VERIFIERS = sorted({name for names in CHILDREN.values() for name in names} | set(LOSSY_TREES))


@dataclasses.dataclass(frozen=True)
class TreeFlags:
    """Flags that say which tree is drafted; see `generate`."""

    tree: str | None = option(
        None, f"draft a tree in the place of a chain of --gamma tokens: {TREE_FORMS}; --gamma is then the most nodes "
        "that are drafted (auto: all)",
    )  # fmt: skip
    tree_children: str = option(
        AUTO, f"with --tree, how the children of a node are chosen: {', '.join(CHILDREN)} (default: mixed, the most "
        "probable and one that is drawn; for chains iid, for dynamic gumbel)",
    )  # fmt: skip
    tree_verifier: str = option(
        AUTO, f"with --tree, in the place of --verifier: {', '.join(_VERIFIERS)} (default: the best for such children)"
    )

    def tree_of(self) -> Tree | DynamicTree | None:
        """Returns the tree, None without one.

        Raises:
          ValueError: a text that describes no tree, or kinds that do not fit each other.
          UnsupportedCombination: kinds without a tree.
        """
        kinds = dict(tree_children=self.tree_children, tree_verifier=self.tree_verifier)
        if self.tree is not None:
            return parse_tree(self.tree, *kinds.values())
        for name, got in kinds.items():
            if got != AUTO:
                raise UnsupportedCombination(f"{name}: got {got!r} without a tree, expected {AUTO!r}")
        return None
