"""Defines as types what the report reads of each kind of record."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from specdec_jax.speculative.policies import MAX_GAMMA
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
    acceptance_rate_per_position: NotRequired[Share | None]
    tokens_per_target_call: Number


class Bare(TypedDict):
    cost_ratio: Number | None
    verify_cost: dict[str, Number]


class SpeculativeVariant(TypedDict):
    gamma: Gamma
    synthetic_alpha: Share | None
    stats: Stats
    differences: list
    predicted: dict[str, Number] | None
    prediction: NotRequired[str]
    improvement: SpreadRecord


class TreeVariant(TypedDict):
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


class ExampleVariant(TypedDict):
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
    variants: Annotated[list[ExampleVariant], 0, MAX_GAMMA + 1]
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
    speculative: list[SpeculativeVariant]
    trees: NotRequired[list[TreeVariant]]
    against: NotRequired[Against | None]
    example: NotRequired[Example | None]


class SearchOptions(Options):
    num_beams: Count


class SearchStats(TypedDict):
    steps_per_target_call: Number


class SearchVariant(TypedDict):
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
    searches: list[SearchVariant]
    against: NotRequired[Against | None]


class KeptShare(TypedDict):
    accepted: Share
    standard_error: Positive | None


class Covered(TypedDict):
    covered: Share
    standard_error: Positive | None


Children = Literal["top", "mixed"]


class Accepted(TypedDict):
    alpha: Share | None
    alpha_where_drafted: NotRequired[Share | None]
    by_position: dict[Verifier, list[KeptShare]]
    by_depth: NotRequired[dict[Verifier, list[KeptShare]]]
    hit_rate: NotRequired[dict[Children, list[Covered]]]
    hit_rate_by_depth: NotRequired[dict[Children, list[list[Covered]]]]


class Expected(TypedDict):
    with_verify_cost: Number
    with_lengths: NotRequired[Number | None]


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


class ComparedVariant(TypedDict):
    variant: str
    alpha: Share | None
    alpha_where_drafted: NotRequired[Share | None]
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
    variants: list[ComparedVariant]


class Costs(TypedDict):
    c: Number
    v: Number
    improvement: Number


EstimateRow = TypedDict(
    "EstimateRow",
    {
        "task": str,
        "drafter": str,
        "temperature": Positive,
        "gamma": Gamma,
        "alpha_paper": Share,
        "c_paper": Number,
        "expected_paper": Number,
        "measured_paper": Number,
        "as compiled": Costs,
        "as for two positions": Costs,
    },
)


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
    quantize: NotRequired[str | None]
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
    over_full_plain: NotRequired[Number]
    bytes: NotRequired[Count]
    floor_ms: NotRequired[Number]
    acceptance: NotRequired[str]
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
    """All lines of a file of scripts/accelerator_report.py: its first, with the others as
    `figures`."""

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
        "variants": Compared,
        "speculative": Benchmark,
        "searches": Searched,
        "calls": Shown,
    }
    return next((kind for mark, kind in marks.items() if mark in record), Measured)
