"""Trees as text."""

import doctest

import pytest

import specdec_jax as sd
from specdec_jax.speculative import tree_text
from specdec_jax.speculative.tree_text import read_tree, write_tree


def test_doctests():
    found = doctest.testmod(tree_text)
    assert found.attempted == 3 and not found.failed


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("widths:3,2,1", sd.Tree.uniform((3, 2, 1))),
        ("widths:2:top:gumbel", sd.Tree.uniform((2,), children="top", verifier="gumbel")),
        ("parents:0,0,1:iid", sd.Tree((0, 0, 1), "iid")),
        ("chains:3,2", sd.Chains(3, 2)),
        ("dynamic:3,4,20", sd.DynamicTree(3, 4, 20)),
        ("dynamic:3,4,20:top", sd.DynamicTree(3, 4, 20, "top")),
    ],
)
def test_reading(text, tree):
    assert read_tree(text) == tree


@pytest.mark.parametrize(
    "tree",
    [
        sd.Tree.chain(3),
        sd.Tree((0, 0, 1)),
        sd.Tree((0, 0, 1), "mixed", "point"),
        sd.Tree((0, 0, 1), "drawn"),
        sd.Tree((0,), "top", "typical"),
        sd.Chains(3, 2),
        sd.Chains(2, 2, verifier="recursive"),
        sd.DynamicTree(3, 4, 20),
        sd.DynamicTree(3, 4, 20, "top", "gumbel"),
        sd.DynamicTree(3, 4, 20, "gumbel", "point"),
    ],
)
def test_what_is_written_is_read(tree):
    read = read_tree(write_tree(tree))

    def shape(tree):
        return (
            tree.size,
            tree.depth,
            tree.width,
            tree.kind,
            tree.verify,
            getattr(tree, "parents", None),
        )

    assert shape(read) == shape(tree) and write_tree(read) == write_tree(tree)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tree: got '', expected widths:3,2,1 .* or dynamic:DEPTH,WIDTH,NODES"),
        ("3,2,1", "tree: got '3,2,1', expected widths"),
        ("star:3", "tree: got 'star:3'"),
        ("widths:", "tree: got 'widths:'"),
        ("widths:3,x", "tree: got 'widths:3,x'"),
        ("chains:3", "tree: got 'chains:3'"),
        ("dynamic:3,4", "tree: got 'dynamic:3,4'"),
        ("widths:3:top:point:more", "tree: got 'widths:3:top:point:more'"),
        ("widths:3,0", r"widths: got \(3, 0\)"),
        ("parents:0,2", "parents: got 2 for node 2"),
        ("widths:3:all", "children: got 'all'"),
        ("widths:3:top:kseq", "verifier: got 'kseq'"),
    ],
)
def test_rejected_text(text, message):
    with pytest.raises(ValueError, match=message):
        read_tree(text)
