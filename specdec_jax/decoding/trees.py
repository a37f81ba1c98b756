"""Checks the tree of a request and turns it into the options of its decode loop."""

from typing import Any, NamedTuple

from specdec_jax.decoding.checks import UnsupportedCombination, check_per_row
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.gamma import MAX_GAMMA
from specdec_jax.speculative.trees import AUTO, DynamicTree, Tree
from specdec_jax.speculative.verifier import Verifier

# What `generate` takes where no verifier is named.
_UNSET = "block"
# The verifiers of chains whose statistics and parameters those of trees have; "token" for others.
_CHAIN_FORMS = {"traversal": "block", "gumbel": "gumbel", "typical": "typical"}


class TreeOptions(NamedTuple):
    """The options of `generate` that a tree decides.

    Attributes:
      tree: None for a tree with one branch that leaves its verifier open: then it is a chain.
      gamma: as for `generate`; for a tree the most nodes that are drafted.
      verifier: as for `generate`.
    """

    tree: Tree | DynamicTree | None
    gamma: Any
    verifier: str | Verifier


def tree_options(
    tree: Tree | DynamicTree | None, drafter: Drafter | None, gamma, verifier: str | Verifier
) -> TreeOptions:
    """Returns the options with a tree in the place of γ, or as they are where `tree` is None.

    Raises:
      ValueError: `tree` is no tree.
      UnsupportedCombination: no drafter, or one that drafts no trees; a policy; a verifier beside
        the tree's own.
    """
    if tree is None:
        return TreeOptions(None, gamma, verifier)
    if not isinstance(tree, Tree | DynamicTree):
        raise ValueError(f"tree: got {tree!r}, expected a Tree, such as sd.Tree.uniform((3, 2, 1))")
    if drafter is None:
        raise UnsupportedCombination("tree: got one without a drafter, expected None")
    automatic = isinstance(gamma, str) and gamma == "auto"
    if tree.is_chain and tree.children == tree.verifier == AUTO and tree.depth <= MAX_GAMMA:
        return TreeOptions(None, tree.depth if automatic else gamma, verifier)
    if isinstance(drafter, Drafter) and not drafter.drafts_trees:
        raise UnsupportedCombination(f"tree: got one for {type(drafter).__name__}, which drafts chains, expected None")
    if verifier != _UNSET:
        raise UnsupportedCombination(
            f"verifier: got {verifier!r} beside a tree, expected the default: a tree has a verifier of its own"
        )
    if automatic:
        gamma = tree.size - 1
    elif isinstance(gamma, str) or not hasattr(gamma, "__index__") and not hasattr(gamma, "__len__"):
        raise UnsupportedCombination(
            f"gamma: got {gamma!r} with a tree, expected 'auto' or an integer, the most nodes that are drafted"
        )
    check_per_row("gamma", gamma, 1 if hasattr(gamma, "__index__") else len(gamma), 1, tree.size - 1)
    return TreeOptions(tree, gamma, _CHAIN_FORMS.get(tree.judge, "token"))
