"""Trees as text show every node once, the accepted path and the mask, in a terminal's width."""

import json
import re
import types

import pytest
from matplotlib import colors

from specdec_jax.analysis import tree_drawing
from specdec_jax.analysis.report import plots
from specdec_jax.decoding.trace import TraceStep, TreeNode, TreeStep

TARGET = types.SimpleNamespace(
    eos_ids=(1,),
    start_token=0,
    vocabulary=types.SimpleNamespace(piece=lambda token: "\n" if token == 9 else f" t{token}"),
)


def step(parents, path, corrected=7, tokens=None) -> TraceStep:
    """A step with nodes of the tokens 10, 11, …; the ratio of node n is n."""
    tokens = tokens or [0, *range(11, 11 + len(parents))]
    nodes = [
        TreeNode(tokens[node], parent, node / 64, 1 / 64)
        for node, parent in enumerate([-1, *parents])
    ]
    tree = TreeStep(nodes, path)
    children = tree.children(path[-1])
    rejected = nodes[children[0]].token if children else None
    return TraceStep(
        [tokens[node] for node in path[1:]], rejected, corrected, len(parents), None, tree
    )


# Numbered by breadth, so that lines come in another order than numbers.
STEP = step([0, 0, 1, 1, 2, 4], [0, 1, 4])


def plain(lines):
    return ["".join(text for _, text in line) for line in lines]


def test_each_node_has_a_line_and_the_path_is_marked():
    lines = tree_drawing.tree_lines(STEP, TARGET)
    drawn = [text for line in lines[1:] for kind, text in line[1:]]
    assert drawn == ["[START]", " t11", " t13", " t14", " t16", " t7", " t12", " t15"]
    kinds = {text: kind for line in lines[1:] for kind, text in line[1:]}
    assert [text for text, kind in kinds.items() if kind == "accepted"] == [" t11", " t14"]
    assert kinds[" t7"] == "corrected"
    assert plain(lines) == [
        "# sees",
        "0 ■······ [START]",
        "1 ■■····· ├─ t11",
        "2 ■■■···· │ ├─ t13",
        "3 ■■·■··· │ └─ t14",
        "4 ■■·■■·· │   ├─ t16",
        "          │   └─ t7",
        "5 ■····■· └─ t12",
        "6 ■····■■   └─ t15",
    ]


def test_p_q_and_their_ratio():
    lines = plain(tree_drawing.tree_lines(STEP, TARGET, numbers=True))
    assert lines[0].split() == ["#", "sees", "p", "q", "p/q"]
    assert [line.split()[2:5] for line in lines[2:4]] == [
        ["0.0156", "0.0156", "1"],
        ["0.0469", "0.0156", "3"],
    ]
    lawless = STEP._replace(
        tree=TreeStep([node._replace(q=None) for node in STEP.tree.nodes], STEP.tree.path)
    )
    assert plain(tree_drawing.tree_lines(lawless, TARGET, numbers=True))[3].split()[2:5] == [
        "0.0469",
        "-",
        "-",
    ]


@pytest.mark.parametrize("numbers", [False, True])
@pytest.mark.parametrize("nodes", [4, 12, 40, 76, 77, 130])
def test_eighty_columns(nodes, numbers):
    """A mask too wide to stand beside the tree stands below it, or is not drawn."""
    one = step([node // 3 for node in range(nodes - 1)], [0, 1])
    lines = plain(tree_drawing.tree_lines(one, TARGET, numbers))
    assert max(map(len, lines)) <= tree_drawing.COLUMNS
    order = list(tree_drawing.walk_depth_first(one.tree))
    assert sorted(order) == list(range(nodes))
    found = [match[1] for line in lines if (match := re.match(r" *\d+ ([■·]+)( |$)", line))]
    if nodes > 77:
        assert not found and f"mask of {nodes} nodes" in lines[-1]
        return
    ancestors = [{order.index(above) for above in one.tree.line(node)} for node in order]
    assert [{place for place, mark in enumerate(row) if mark == "■"} for row in found] == ancestors


def test_the_step_that_is_drawn():
    spine = step([0, 0], [0, 1])
    longer = step([0, 1, 0], [0, 1, 2])
    chain = TraceStep([5], None, 7, 2, None)
    aside = step([0, 0], [0, 2])
    assert (
        tree_drawing.choose_step([chain]) is None
        and tree_drawing.choose_step([step([], [0])]) is None
    )
    assert tree_drawing.choose_step([chain, spine, longer, spine]) == 2
    assert tree_drawing.choose_step([longer, spine, aside, aside]) == 2


def test_text_keeps_to_its_line():
    lines = plain(tree_drawing.tree_lines(step([0], [0, 1], tokens=[9, 9]), TARGET))
    assert "\n" not in "".join(lines) and lines[1].endswith("␣") and lines[2].endswith("└─␣")


def test_figure_of_a_tree():
    """Texts, the path in green, and the mask with what is accepted in its own colour."""
    figure = plots.draw_tree(tree_drawing.Drawn.from_step(STEP, TARGET))
    left, right = figure.axes
    colours = {text.get_text(): text.get_bbox_patch().get_edgecolor() for text in left.texts}
    assert list(sorted(colours)) == sorted(
        ["[START]", "t11", "t13", "t14", "t16", "t7", "t12", "t15"]
    )
    green = colours["[START]"]
    assert {text for text, colour in colours.items() if colour == green} == {
        "[START]",
        "t11",
        "t14",
    }
    assert colours["t7"] not in (green, colours["t13"])
    assert mask_of(right, 7) == [
        [2, 0, 0, 0, 0, 0, 0],
        [2, 2, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [2, 2, 0, 2, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1, 1],
    ]
    assert "t16" in plots.render_svg(figure, "a tree")


def mask_of(axes, size: int) -> list[list[int]]:
    """0 where a place is empty, 2 where it has the colour of what is accepted, else 1."""
    result, green = [[0] * size for _ in range(size)], colors.to_rgba("tab:green")
    for bars in axes.collections:
        for path in bars.get_paths():
            column, row = path.get_extents().min + 0.5
            result[round(row)][round(column)] = 2 if tuple(bars.get_facecolor()[0]) == green else 1
    return result


def test_a_tree_is_read_as_it_was_written():
    drawn = tree_drawing.Drawn.from_step(STEP, TARGET)
    record = json.loads(json.dumps(drawn.record()))
    assert record["nodes"][4] == {
        "text": " t14",
        "token": 14,
        "parent": 1,
        "p": 4 / 64,
        "q": 1 / 64,
    }
    read = tree_drawing.Drawn.read(record)
    assert (read.texts, read.own) == (drawn.texts, " t7") and read.tree.path == [0, 1, 4]
    assert [read.tree.line(node) for node in range(7)] == [
        STEP.tree.line(node) for node in range(7)
    ]


@pytest.mark.parametrize(
    ("parents", "path", "message"),
    [
        ([], [], "nodes: got parents in another order"),
        ([0], [0], "nodes: got parents in another order"),
        ([-1, 1], [0], "nodes: got parents in another order"),
        ([-1, -1], [0], "nodes: got parents in another order"),
        ([-1, 0], [], "path: got other nodes"),
        ([-1, 0], [1], "path: got other nodes"),
        ([-1, 0, 0], [0, 1, 2], "path: got other nodes"),
        ([-1, 0], [0, 2], "path: got other nodes"),
        ([-1, 0], [0, 1, -1], "path: got other nodes"),
    ],
)
def test_no_tree(parents, path, message):
    with pytest.raises(ValueError, match=message):
        tree_drawing.Drawn.read(
            {"nodes": [{"text": "", "parent": p} for p in parents], "path": path, "own": None}
        )
