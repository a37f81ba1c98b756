"""Defines as types what the report reads of each kind of record, and checks records against them."""

import functools
import re
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from specdec_jax.analysis.tree_drawing import Drawn
from specdec_jax.speculative.gamma import MAX_GAMMA
from specdec_jax.speculative.trees import MAX_NODES

# Bounds within which numbers can be drawn; no measurement comes near them.
Number = Annotated[float, -1e12, 1e12]
Positive = Annotated[float, 0, 1e12]
Share = Annotated[float, 0, 1.01]  # a mean of probabilities in float32 may exceed 1 by its rounding
Count = Annotated[int, 0, 10**12]
Gamma = Annotated[int, 0, MAX_GAMMA]
Verifier = Literal["token", "block", "gumbel", "lenient", "typical", "rejection"]
MOST_ITEMS, MOST_CALLS, MOST_CHARACTERS, MOST_TREES = 500, 20_000, 100_000, 16


class SpreadRecord(TypedDict):
    median: Positive
    least: Positive
    most: Positive


class Named(TypedDict):
    name: str


class Machine(TypedDict):
    processor: str
    cores: Count | None
    device: str
    kernel: NotRequired[str]
    python: NotRequired[str]
    specdec_jax: NotRequired[str]
    jax: NotRequired[str]
    jaxlib: NotRequired[str]
    flax: NotRequired[str]
    numpy: NotRequired[str]


class ShownOptions(TypedDict):
    temperature: Positive


class Options(ShownOptions):
    verifier: str
    input_file: str | None
    preset: NotRequired[str | None]
    lenience: NotRequired[Positive | None]


class BatchedOptions(Options):
    batch_size: Count


class Stats(TypedDict):
    acceptance_rate: Share | None
    tokens_per_target_call: Number


class Bare(TypedDict):
    cost_ratio: Number | None
    verify_cost: dict[str, Number]


class SpeculativeArm(TypedDict):
    gamma: Gamma
    forced_alpha: Share | None
    stats: Stats
    differences: list
    predicted: dict[str, Number] | None
    prediction: NotRequired[str]
    improvement: SpreadRecord


class TreeArm(TypedDict):
    tree: str
    nodes: Count
    depth: Count
    verifier: str
    stats: Stats
    predicted: NotRequired[Number | None]
    verify_cost: Number
    differences: list
    improvement: SpreadRecord


class Against(TypedDict):
    name: str
    improvement: dict[str, SpreadRecord]
    differences: list


Line = list[tuple[Literal["committed", "accepted", "rejected", "corrected", "bonus"], str]]

Call = Literal["target encoder", "drafter encoder", "draft step", "target call"]


class ExampleArm(TypedDict):
    gamma: Gamma
    lines: Annotated[list[Line], 0, MOST_CALLS]
    spans: Annotated[list[tuple[Call, Positive]], 0, MOST_CALLS]


class DrawnNode(TypedDict):
    text: str
    parent: Annotated[int, -1, MAX_NODES]


class DrawnTree(TypedDict):
    tree: str
    call: Count
    nodes: Annotated[list[DrawnNode], 0, MAX_NODES]
    path: Annotated[list[Count], 0, MAX_NODES]
    own: str | None


class ShownInput(TypedDict):
    input: str
    lines: Annotated[list[Line], 0, MOST_CALLS]


class ShownTree(DrawnTree):
    input: str


class Shown(TypedDict):
    """A record of `specdec demo`."""

    machine: Machine
    options: ShownOptions
    target: Named
    drafter: Named
    calls: list[ShownInput]
    tree: ShownTree | None


class Example(TypedDict):
    input: str
    arms: Annotated[list[ExampleArm], 0, MAX_GAMMA + 1]
    trees: NotRequired[Annotated[list[DrawnTree], 0, MOST_TREES]]


class Benchmark(TypedDict):
    """A record of `specdec benchmark`, or a line of a suite's."""

    machine: Machine
    options: Options
    target: Named
    drafter: Named | None
    sentences: Count
    cost_ratio: Number | None
    verify_cost: dict[str, Number]
    bare: NotRequired[Bare | None]
    speculative: list[SpeculativeArm]
    trees: NotRequired[list[TreeArm]]
    against: NotRequired[Against | None]
    example: NotRequired[Example | None]


class SearchOptions(Options):
    num_beams: Count


class SearchStats(TypedDict):
    steps_per_target_call: Number


class SearchArm(TypedDict):
    gamma: Gamma
    width: Count
    stats: SearchStats
    calls_over_plain: Number
    differences: list
    improvement: SpreadRecord


class Searched(TypedDict):
    """A record of `specdec benchmark --num_beams`."""

    machine: Machine
    options: SearchOptions
    target: Named
    drafter: Named | None
    sentences: Count
    searches: list[SearchArm]
    against: NotRequired[Against | None]


class Stands(TypedDict):
    stands: Share
    standard_error: Positive | None


class Covered(TypedDict):
    covered: Share
    standard_error: Positive | None


Children = Literal["top", "mixed"]


class Accepted(TypedDict):
    alpha: Share | None
    by_position: dict[Verifier, list[Stands]]
    by_depth: NotRequired[dict[Verifier, list[Stands]]]
    coverage: NotRequired[dict[Children, list[Covered]]]
    coverage_by_depth: NotRequired[dict[Children, list[list[Covered]]]]


class Expected(TypedDict):
    with_verify_cost: Number


class TableRow(TypedDict):
    gamma: Gamma
    verify_cost: Number
    tokens: Number | None
    theorem_3_8: Number | None
    with_verify_cost: Number | None
    by_position: dict[Verifier, Expected]


class SamePositions(TypedDict):
    positions: Count
    counted: Share
    overlap: Share
    difference: Number
    standard_error: Positive | None


class Measured(TypedDict):
    """A record of `specdec measure`."""

    machine: Machine
    options: BatchedOptions
    target: Named
    drafter: Named
    sentences: Count
    cost_ratio: Number
    verify_cost: dict[int, Number]
    acceptance: Accepted
    table: list[TableRow]
    same_positions: NotRequired[SamePositions | None]


class ComparedArm(TypedDict):
    arm: str
    alpha: Share | None
    cost_ratio: Number | None
    verify_cost: Number | None
    tokens_per_call: Number
    improvement: SpreadRecord
    differ: Count | None


class Compared(TypedDict):
    """A record of scripts/compare_drafters.py."""

    machine: Machine
    target: str
    input_file: str
    sentences: Count
    temperature: Positive
    verifier: str
    arms: list[ComparedArm]


class Costs(TypedDict):
    c: Number
    v: Number
    improvement: Number


EstimateRow = TypedDict("EstimateRow", {
    "task": str, "drafter": str, "temperature": Positive, "gamma": Gamma, "alpha_paper": Share, "c_paper": Number,
    "expected_paper": Number, "measured_paper": Number, "as compiled": Costs, "as for two positions": Costs,
})  # fmt: skip


class Times(TypedDict):
    rows: list[EstimateRow]


class Estimate(TypedDict):
    """What scripts/tpu_aot.py prints."""

    target: str
    drafter: str | None
    gamma: Gamma
    num_beams: NotRequired[Count | None]
    batch_size: Count
    dtype: str
    topology: str
    mesh: str | None
    jax: str
    weights_gb: Number
    needed_gb: Number
    memory_gb: Number
    fits: bool
    copied_in_loops: list | None
    floor_ms: NotRequired[Number]
    iteration_ms: NotRequired[Number | None]
    times: NotRequired[Times]


class Figure(TypedDict):
    """A line of scripts/accelerator_report.py after the first; without `milliseconds` it says why."""

    figure: str
    kind: str
    target: NotRequired[str]
    batch: NotRequired[Count]
    width: NotRequired[Count]
    alpha: NotRequired[Share]
    gamma: NotRequired[Gamma]
    milliseconds: NotRequired[SpreadRecord]
    v: NotRequired[Number]
    c: NotRequired[Number]
    over_full: NotRequired[Number]
    improvement: NotRequired[Number]
    iteration_ms: NotRequired[Number]
    tokens_per_second: NotRequired[Number]
    gb_per_second: NotRequired[Number]
    failed: NotRequired[str]
    unsupported: NotRequired[str]


class AcceleratorOptions(TypedDict):
    drafter: str
    dtype: str
    tiny: bool
    gamma: Gamma
    input_length: Count
    max_new_tokens: Count


class Accelerator(TypedDict):
    """All lines of a file of scripts/accelerator_report.py: its first, with the others as `figures`."""

    accelerator_report: Count
    machine: Machine
    options: AcceleratorOptions
    plan: list[str]
    figures: list[Figure]


def kind_of(record: Mapping[str, Any]) -> type:
    """Returns the kind of a record, recognised by its keys."""
    marks = {
        "accelerator_report": Accelerator,
        "fits": Estimate,
        "arms": Compared,
        "speculative": Benchmark,
        "searches": Searched,
        "calls": Shown,
    }
    return next((kind for mark, kind in marks.items() if mark in record), Measured)


def check(record: Any) -> None:
    """Raises ValueError for a record that the tables and figures could not show.

    The message says which part of the record is wrong, what was got, and what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(f"got {_shown(record)}, expected an object")
    kind = kind_of(record)
    _check(record, kind, "")
    if kind is Measured:
        by_position, table = record["acceptance"]["by_position"], record["table"]
        for name, values in by_position.items():
            if len(values) != len(table) or any(name not in row["by_position"] for row in table):
                raise ValueError(f"acceptance.by_position: got {_shown(name)}, expected it in every row of the table")


def _check(value: Any, kind: Any, name: str) -> None:
    """Raises ValueError for a value that is not of a kind; `name` is its path in the record."""
    least, most = 0, MOST_ITEMS
    if typing.get_origin(kind) is Annotated:
        kind, least, most = typing.get_args(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:  # T | None
        if value is not None:
            _check(value, parts[0], name)
        return
    expect = functools.partial(_expect, name, value)
    if typing.is_typeddict(kind):
        expect(isinstance(value, dict), "an object")
        hints = typing.get_type_hints(kind, include_extras=True)
        for key, part in hints.items():
            part = typing.get_args(part)[0] if typing.get_origin(part) is NotRequired else part
            if key in kind.__required_keys__ and key not in value:
                raise ValueError(f"{name}{key}: got nothing, expected a value")
            if key in value:
                _check(value[key], part, f"{name}{key}.")
        if kind is SpreadRecord:
            expect(value["least"] <= value["median"] <= value["most"], "a median between least and most")
        if kind in (DrawnTree, ShownTree):
            try:
                Drawn.read(value)
            except ValueError as error:
                raise ValueError(f"{name}{error}") from None
    elif origin is Literal:
        expect(isinstance(value, str) and value in parts, f"one of {', '.join(parts)}")
    elif origin is list:
        expect(isinstance(value, list) and len(value) <= most, f"a list of at most {most}")
        for number, item in enumerate(value):
            _check(item, parts[0], f"{name}{number}.")
    elif origin is tuple:
        expect(isinstance(value, list) and len(value) == len(parts), f"a list of {len(parts)}")
        for number, (item, part) in enumerate(zip(value, parts)):
            _check(item, part, f"{name}{number}.")
    elif origin is dict:
        expect(isinstance(value, dict) and len(value) <= most, f"an object of at most {most}")
        for key, item in value.items():
            if parts[0] is int:
                _expect(f"{name} key", key, re.fullmatch("[0-9]{1,6}", key) is not None, "an integer")
            else:
                _check(key, parts[0], f"{name} key")
            _check(item, parts[1], f"{name}{_shown(key)}.")
    elif kind is str:
        expect(
            isinstance(value, str) and len(value) <= MOST_CHARACTERS, f"text of at most {MOST_CHARACTERS} characters"
        )
    elif kind in (int, float):
        whole = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        what = "an integer" if kind is int else "a number"
        expect(whole and least <= value <= most, f"{what} from {least:g} to {most:g}")  # NaN is in no range
    else:
        expect(isinstance(value, kind), {bool: "true or false", list: "a list"}[kind])


def _expect(name: str, value: Any, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{name.rstrip('.') or 'record'}: got {_shown(value)}, expected {what}")


def _shown(value: Any) -> str:
    """Returns a value as a message quotes it."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
