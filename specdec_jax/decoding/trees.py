"""Checks the tree of a request and turns it into the options of its decode loop."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from specdec_jax.decoding.checks import UnsupportedCombination, check_per_row
from specdec_jax.models import arguments
from specdec_jax.speculative.drafter import Drafter, TreeDrafter, can_draft_chains
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.tree_budgets import make_budget
from specdec_jax.speculative.tree_verifiers import TREE_VERIFIERS, TreeVerifier
from specdec_jax.speculative.trees import AUTO, CHILDREN, LOSSY_TREES, DynamicTree, Tree
from specdec_jax.speculative.verifier import BaseVerifier, Verifier
from specdec_jax.speculative.verifiers import find_verifier

# What `generate` takes where no verifier is named.
_UNSET = "block"


class TreeOptions(NamedTuple):
    """The options of `generate` that a tree decides.

    Attributes:
      tree: None for a tree with one branch that leaves its verifier open: then it is a chain.
      gamma: as for `generate`; for a tree the most nodes that are drafted.
      verifier: the verifier of the chain or of the tree.
    """

    tree: Tree | DynamicTree | None
    gamma: Any
    verifier: Verifier | TreeVerifier


def resolve_tree(
    tree: Tree | DynamicTree | None,
    drafter: Drafter | None,
    gamma: Any,
    verifier: str | BaseVerifier,
) -> TreeOptions:
    """Returns the options with a tree in the place of γ, or as they are where there is none.

    Raises:
      ValueError: `tree` is no tree.
      UnsupportedCombination: no drafter, or one that drafts no trees, or not this one; no tree with
        a drafter that drafts nothing else; a policy that does not count nodes; a verifier of chains
        with a tree, one of trees without, or one that reads distributions that there are not.
    """
    own = verifier if isinstance(verifier, TreeVerifier) else None
    if tree is None and isinstance(drafter, TreeDrafter):
        tree = drafter.tree
    if tree is None:
        if own is not None:
            raise UnsupportedCombination(
                f"verifier: got the tree verifier {own.name!r} without a tree, expected a Verifier"
            )
        if drafter is not None and not can_draft_chains(drafter):
            raise UnsupportedCombination(
                f"tree: got None with {type(drafter).__name__}, expected a Tree"
            )
        return TreeOptions(None, gamma, find_verifier(verifier))  # type: ignore[arg-type]
    if not isinstance(tree, Tree | DynamicTree):
        raise ValueError(
            f"tree: got {arguments.quote(tree)}, expected a Tree, such as sd.Tree.uniform((3, 2, "
            "1))"
        )
    if drafter is None:
        raise UnsupportedCombination("tree: got one without a drafter, expected None")
    automatic = isinstance(gamma, str) and gamma == "auto"
    if own is None and can_draft_chains(drafter) and _drafts_as_chain(tree):
        gamma = tree.depth if automatic else gamma
        most = gamma.maximum if isinstance(gamma, Policy) else gamma
        check_per_row("gamma", most, arguments.as_array(most).size, 0, tree.depth)
        return TreeOptions(None, gamma, find_verifier(verifier))  # type: ignore[arg-type]
    if isinstance(drafter, Drafter):
        if not isinstance(drafter, TreeDrafter):
            raise UnsupportedCombination(
                f"tree: got one for {type(drafter).__name__}, which drafts chains, expected None,"
                " or a drafter of trees, such as ModelDrafter, PromptLookupDrafter or NGramDrafter"
            )
        if own is not None:
            _check_own(own, tree, drafter)
        tree = _resolve_auto_tree(tree, drafter)
        drafter.check_tree(tree)
    if own is None:
        _check_verifier(verifier)
    if automatic:
        gamma = tree.size - 1
    if isinstance(gamma, Policy) and gamma.counts_nodes:
        gamma, most = make_budget(gamma, tree), gamma.maximum
    elif (
        isinstance(gamma, str) or not hasattr(gamma, "__index__") and not hasattr(gamma, "__len__")
    ):
        raise UnsupportedCombination(
            f"gamma: got {arguments.quote(gamma)} with a tree, expected 'auto', an integer, "
            "the most nodes that are drafted, or a "
            "policy: Heuristic, CostAware, Entropy, EntropyBound or Confidence"
        )
    else:
        most = gamma
    check_per_row("gamma", most, arguments.as_array(most).size, 1, tree.size - 1)
    return TreeOptions(tree, gamma, own or TREE_VERIFIERS[tree.verify])


def check_beside_tree(tree: Tree | DynamicTree | None, verifier: str | BaseVerifier) -> None:
    """Raises UnsupportedCombination for a chain's verifier beside a tree that is none.

    For callers that have not loaded a drafter yet.
    """
    if tree is not None and not _drafts_as_chain(tree):
        _check_verifier(verifier)


def _drafts_as_chain(tree: Tree | DynamicTree) -> bool:
    """Returns whether a drafter that drafts chains drafts this tree as one."""
    return tree.is_chain and tree.children == tree.verifier == AUTO and tree.depth <= MAX_GAMMA


def _check_verifier(verifier: str | BaseVerifier) -> None:
    if verifier != _UNSET:
        raise UnsupportedCombination(
            f"verifier: got {getattr(verifier, 'name', verifier)!r} beside a tree, expected the"
            " default or a TreeVerifier: a tree has a verifier of its own"
        )


def _check_own(own: TreeVerifier, tree: Tree | DynamicTree, drafter: TreeDrafter) -> None:
    """Rejects a verifier of one's own for a tree that names one, or without what it reads."""
    if tree.verifier != AUTO:
        raise UnsupportedCombination(
            f"verifier: got {own.name!r} beside a tree with {tree.verifier!r}, expected one of them"
        )
    if own.needs_draft_probs and (isinstance(tree, DynamicTree) or "drawn" not in drafter.kinds):
        raise UnsupportedCombination(
            f"verifier: got {own.name!r}, which needs draft probabilities, with a"
            f" {type(tree).__name__} of {type(drafter).__name__}, expected needs_draft_probs=False"
        )


def _resolve_auto_tree(tree: Tree | DynamicTree, drafter: TreeDrafter) -> Tree | DynamicTree:
    """Returns the tree with what suits `drafter` in place of "auto".

    Raises:
      UnsupportedCombination: a tree that `drafter` cannot draft, or not so that the output
        distribution is the target's.
    """
    name, kinds = type(drafter).__name__, drafter.kinds
    only = drafter.tree
    if only is not None and getattr(tree, "parents", None) != only.parents:
        raise UnsupportedCombination(
            f"tree: got {tree} with {name}, expected None, or the drafter's `tree`"
        )
    if kinds == CHILDREN:
        return tree
    if isinstance(tree, DynamicTree):
        raise UnsupportedCombination(
            f"tree: got {tree} with {name}, expected a Tree, whose shape is fixed"
        )

    def listed(names: Iterable[str]) -> str:
        return ", ".join(map(repr, names))

    children, verifier = tree.children, tree.verifier
    if children == AUTO:
        children = next((kind for kind in kinds if kind in tree.allowed), tree.kind)
    if children not in kinds:
        raise UnsupportedCombination(
            f"children: got {children!r} with {name}, expected {listed(kinds)}"
        )
    if verifier == AUTO:
        verifier = kinds[children][0]
    if verifier not in (*kinds[children], *LOSSY_TREES):
        raise UnsupportedCombination(
            f"verifier: got {verifier!r} with {name}, expected {listed(kinds[children])}"
        )
    return Tree(tree.parents, children, verifier)
