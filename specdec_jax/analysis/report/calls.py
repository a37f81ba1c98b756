"""Shows the calls of an example and of `specdec demo`: their texts, timelines and trees."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis import traces, tree_drawing
from specdec_jax.analysis.report import plots, tables, tree_plot
from specdec_jax.analysis.report.markup import Markup, element, join
from specdec_jax.analysis.report.rows import measured_at


def example_parts(example: Mapping[str, Any] | None) -> list[Markup]:
    """Returns figures 1 and 5 of one input, and its trees."""
    if not example or len(example["variants"]) < 2:
        return _trees(example)
    parts = [
        element("h4", "As in figure 1: one line per target call"),
        element("p", example["input"]),
        _legend(),
    ]
    for variant in example["variants"]:
        if variant["lines"]:
            parts += [element("p", f"γ = {variant['gamma']}"), _lines(variant["lines"])]
    timeline = plots.timeline(
        [(_variant_name(variant["gamma"]), variant["spans"]) for variant in example["variants"]]
    )
    parts += [
        element("h4", "As in figure 5: its calls, by the medians of single steps"),
        plots.svg(timeline),
    ]
    return parts + _trees(example)


def shown(path: pathlib.Path, record: Mapping[str, Any]) -> list[Markup]:
    """Returns what `specdec demo` showed."""
    about = f"{record['target']['name']} with {record['drafter']['name']}, temperature {record['options']['temperature']:g}"
    parts = [
        element("h3", path.name),
        element("p", about),
        tables.note(measured_at(record)),
        _legend(),
    ]
    for shown in record["calls"]:
        parts += [element("p", shown["input"]), _lines(shown["lines"])]
    return parts + (_tree(record["tree"], f"“{record['tree']['input']}”") if record["tree"] else [])


def _trees(example: Mapping[str, Any] | None) -> list[Markup]:
    """Returns a picture of one call for every tree of an example."""
    drawn = (example or {}).get("trees", ())
    return [part for tree in drawn for part in _tree(tree, "the first input")]


def _tree(drawn: Mapping[str, Any], input: str) -> list[Markup]:
    """Returns a picture of a call's tree and attention mask."""
    figure = tree_plot.token_tree(tree_drawing.Drawn.read(drawn))
    return [
        element("h4", f"Tree {drawn['tree']}: call {drawn['call']} of {input}"),
        plots.svg(figure),
    ]


def _legend() -> Markup:
    return tables.note(*(_piece(kind, text) for kind, text in traces.LEGEND))


def _lines(lines: Sequence[Sequence[tuple[str, str]]]) -> Markup:
    """Returns a line for each call of the target."""
    return element(
        "pre",
        Markup("\n".join(join(*(_piece(kind, text) for kind, text in line)) for line in lines)),
    )


def _piece(kind: str, text: str) -> Markup:
    return element("span", text, class_=kind)


def _variant_name(gamma: int) -> str:
    return f"γ = {gamma}" if gamma else "plain"
