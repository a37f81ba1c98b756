"""Writes trees as text and reads them, for flags, configuration files and records."""

from collections.abc import Callable

from specdec_jax.speculative.trees import CHILDREN, Chains, DynamicTree, Tree

_FORMS: dict[str, Callable[..., Tree | DynamicTree]] = {
    "widths": lambda *widths, **kinds: Tree.uniform(widths, **kinds),
    "parents": lambda *parents, **kinds: Tree(parents, **kinds),
    "chains": Chains,
    "dynamic": DynamicTree,
}
EXPECTED = (
    "widths:3,2,1 (children of every node by depth), parents:0,0,1 (of nodes 1, 2, …), "
    "chains:COUNT,LENGTH or dynamic:DEPTH,WIDTH,NODES, and after another colon the children, "
    "and after a third the verifier"
)


def read_tree(text: str) -> Tree | DynamicTree:
    """Returns the tree that `text` describes.

    >>> read_tree("widths:2,1").parents
    (0, 1, 0, 3)
    >>> read_tree("parents:0,0,1:drawn:recursive").verify
    'recursive'

    Raises:
      ValueError: text of another form, or a tree that there cannot be.
    """
    form, *parts = text.split(":")
    unread = ValueError(f"tree: got {text!r}, expected {EXPECTED}")
    if form not in _FORMS or not 1 <= len(parts) <= 3:
        raise unread
    try:
        numbers = [int(number) for number in parts[0].split(",")]
    except ValueError:
        raise unread from None
    if len(numbers) != {"chains": 2, "dynamic": 3}.get(form, len(numbers)):
        raise unread
    return _FORMS[form](*numbers, **dict(zip(("children", "verifier"), parts[1:])))


def write_tree(tree: Tree | DynamicTree) -> str:
    """Returns text that `read_tree` reads as a tree of the same shape, children and verifier.

    >>> write_tree(Tree((0, 0, 1), "drawn", "recursive"))
    'parents:0,0,1:drawn:recursive'
    """
    form, numbers = "parents", tree.parents if isinstance(tree, Tree) else ()
    if isinstance(tree, DynamicTree):
        form, numbers = "dynamic", (tree.depth, tree.width, tree.nodes)
    read = _FORMS[form](*numbers)
    kinds = [tree.kind] * (tree.kind != read.kind)
    if tree.verify != CHILDREN[tree.kind][0]:
        kinds = [tree.kind, tree.verify]
    return ":".join([form, ",".join(map(str, numbers)), *kinds])
