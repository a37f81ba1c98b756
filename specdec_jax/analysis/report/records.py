"""Defines the records that commands and scripts write and that `specdec figures` reads.

A model names the fields that the page shows, with their types and ranges. A record may have more.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from specdec_jax.analysis.machine import PACKAGES, describe_hardware
from specdec_jax.analysis.timing import Spread
from specdec_jax.analysis.tree_drawing import Drawn
from specdec_jax.files import reading
from specdec_jax.files.writing import write_file
from specdec_jax.speculative.policy import MAX_GAMMA
from specdec_jax.speculative.trees import MAX_NODES

MOST_ITEMS, MOST_CALLS, MOST_CHARACTERS, MOST_TREES = 500, 20_000, 100_000, 16
_MOST_BYTES = 1 << 24
_COMMANDS = (
    "`specdec benchmark`, `specdec measure`, `specdec demo`, or a script: compare_drafters, "
    "tpu_aot, accelerator_report"
)


def _check_length(text: str) -> str:
    if len(text) > MOST_CHARACTERS:
        raise PydanticCustomError("length", f"text of at most {MOST_CHARACTERS} characters")
    return text


def _check_size(table: Any) -> Any:
    if isinstance(table, dict) and len(table) > MOST_ITEMS:
        raise PydanticCustomError("length", f"an object of at most {MOST_ITEMS}")
    return table


# Bounds within which numbers can be drawn; no measurement comes near them.
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Positive = Annotated[float, Field(ge=0, le=1e12)]
Share = Annotated[float, Field(ge=0, le=1.01)]  # a mean of float32 probabilities may exceed 1
Count = Annotated[int, Field(ge=0, le=10**12)]
Gamma = Annotated[int, Field(ge=0, le=MAX_GAMMA)]
Digits = Annotated[str, Field(pattern="^[0-9]{1,6}$")]
Text = Annotated[str, AfterValidator(_check_length)]  # `max_length` would reject lone surrogates

Verifier = Literal["token", "block", "gumbel", "lenient", "typical", "rejection"]
Children = Literal["top", "mixed"]
Call = Literal["target encoder", "drafter encoder", "draft step", "target call"]
Style = Literal["committed", "accepted", "rejected", "corrected", "bonus"]

K = TypeVar("K")
V = TypeVar("V")
Items = Annotated[list[V], Field(max_length=MOST_ITEMS, fail_fast=True)]
PerCall = Annotated[list[V], Field(max_length=MOST_CALLS, fail_fast=True)]
Nodes = Annotated[list[V], Field(max_length=MAX_NODES, fail_fast=True)]
Entries = Annotated[dict[K, V], BeforeValidator(_check_size)]  # before values are checked
Lines = PerCall[Items[Annotated[tuple[Style, Text], Strict(False)]]]


class Record(BaseModel):
    """Part of a record: JSON values of exactly these types; other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class SpreadRecord(Record):
    median: Positive
    least: Positive
    most: Positive

    @model_validator(mode="after")
    def _check_order(self) -> "SpreadRecord":
        if not self.least <= self.median <= self.most:
            raise PydanticCustomError("order", "a median between least and most")
        return self

    def spread(self) -> Spread:
        """Returns the numbers as measuring code has them."""
        return Spread(self.median, self.least, self.most)


class ModelRecord(Record):
    name: Text


class MachineRecord(Record):
    processor: Text
    cores: Count | None
    device: Text
    kernel: Text | None = None
    python: Text | None = None
    specdec_jax: Text | None = None
    jax: Text | None = None
    jaxlib: Text | None = None
    flax: Text | None = None
    numpy: Text | None = None

    def describe(self) -> str:
        """Returns hardware and versions on one line."""
        versions = {name: getattr(self, name) for name in ("python", *PACKAGES)}
        shown = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
        return f"{describe_hardware(self.model_dump(exclude_defaults=True))}; {shown}"


class ShownOptions(Record):
    temperature: Positive


class SharedOptions(ShownOptions):
    verifier: Text
    input_file: Text | None
    preset: Text | None = None
    lenience: Positive | None = None


class MeasureOptionsRecord(SharedOptions):
    batch_size: Count


class BeamOptionsRecord(SharedOptions):
    num_beams: Count


class StatsRecord(Record):
    acceptance_rate: Share | None
    acceptance_rate_per_position: Share | None = None
    tokens_per_target_call: Number


class BareCosts(Record):
    """c and v of bare matrix products."""

    cost_ratio: Number | None = None
    verify_cost: Entries[Text, Number] = {}


class SpeculativeRecord(Record):
    gamma: Gamma
    synthetic_alpha: Share | None
    stats: StatsRecord
    differences: list[Any]
    compared: bool = True
    predicted: Entries[Text, Number] | None
    prediction: Text = "with_lengths"
    improvement: SpreadRecord


class TreeRecord(Record):
    tree: Text
    nodes: Count
    depth: Count
    verifier: Text
    stats: StatsRecord
    predicted: Number | None = None
    verify_cost: Number
    differences: list[Any]
    compared: bool = True
    improvement: SpreadRecord


class AgainstRecord(Record):
    """Another implementation beside ours."""

    name: Text
    improvement: Entries[Text, SpreadRecord]
    differences: list[Any]


class ExampleVariant(Record):
    gamma: Gamma
    lines: Lines
    spans: PerCall[Annotated[tuple[Call, Positive], Strict(False)]]


class DrawnNode(Record):
    text: Text
    parent: Annotated[int, Field(ge=-1, le=MAX_NODES)]


class DrawnTree(Record):
    tree: Text
    call: Count
    nodes: Nodes[DrawnNode]
    path: Nodes[Count]
    own: Text | None

    @model_validator(mode="after")
    def _check_nodes(self) -> "DrawnTree":
        self.drawn()
        return self

    def drawn(self) -> Drawn:
        """Returns the tree as drawings take it."""
        return Drawn.read(self.model_dump())


class ShownTree(DrawnTree):
    input: Text


class ShownInput(Record):
    input: Text
    lines: Lines


class DemoRecord(Record):
    """A record of `specdec demo`."""

    machine: MachineRecord
    options: ShownOptions
    target: ModelRecord
    drafter: ModelRecord
    calls: Items[ShownInput]
    tree: ShownTree | None


class ExampleRecord(Record):
    input: Text
    variants: Annotated[list[ExampleVariant], Field(max_length=MAX_GAMMA + 1)]
    trees: Annotated[list[DrawnTree], Field(max_length=MOST_TREES)] = []


class BenchmarkRecord(Record):
    """A record of `specdec benchmark`, or a line of a suite's."""

    machine: MachineRecord
    options: SharedOptions
    target: ModelRecord
    drafter: ModelRecord | None
    sentences: Count
    cost_ratio: Number | None
    verify_cost: Entries[Text, Number]
    bare: BareCosts | None = None
    speculative: Items[SpeculativeRecord]
    trees: Items[TreeRecord] = []
    against: AgainstRecord | None = None
    example: ExampleRecord | None = None


class BeamStats(Record):
    steps_per_target_call: Number


class BeamVariant(Record):
    gamma: Gamma
    width: Count
    stats: BeamStats
    calls_over_plain: Number
    differences: list[Any]
    improvement: SpreadRecord


class BeamRecord(Record):
    """A record of `specdec benchmark --num_beams`."""

    machine: MachineRecord
    options: BeamOptionsRecord
    target: ModelRecord
    drafter: ModelRecord | None
    sentences: Count
    searches: Items[BeamVariant]
    against: AgainstRecord | None = None


class AcceptedShare(Record):
    accepted: Share
    standard_error: Positive | None


class HitRate(Record):
    covered: Share
    standard_error: Positive | None


class AcceptanceRecord(Record):
    alpha: Share | None
    alpha_where_drafted: Share | None = None
    by_position: Entries[Verifier, Items[AcceptedShare]]
    by_depth: Entries[Verifier, Items[AcceptedShare]] = {}
    hit_rate: Entries[Children, Items[HitRate]] = {}
    hit_rate_by_depth: Entries[Children, Items[Items[HitRate]]] = {}


class ExpectedImprovement(Record):
    with_verify_cost: Number
    with_lengths: Number | None = None


class GammaRecord(Record):
    gamma: Gamma
    verify_cost: Number
    tokens: Number | None
    theorem_3_8: Number | None
    with_verify_cost: Number | None
    by_position: Entries[Verifier, ExpectedImprovement]


class SamePositions(Record):
    positions: Count
    counted: Share
    overlap: Share
    difference: Number
    standard_error: Positive | None


class MeasureRecord(Record):
    """A record of `specdec measure`."""

    machine: MachineRecord
    options: MeasureOptionsRecord
    target: ModelRecord
    drafter: ModelRecord
    sentences: Count
    cost_ratio: Number
    verify_cost: Entries[Digits, Number]
    acceptance: AcceptanceRecord
    table: Items[GammaRecord]
    same_positions: SamePositions | None = None

    @model_validator(mode="after")
    def _check_table(self) -> "MeasureRecord":
        for name, shares in self.acceptance.by_position.items():
            in_rows = all(name in row.by_position for row in self.table)
            if len(shares) != len(self.table) or not in_rows:
                raise ValueError(
                    f"acceptance.by_position: got {name!r}, expected it in every row of the table"
                )
        return self


class ComparedVariant(Record):
    variant: Text
    alpha: Share | None
    alpha_where_drafted: Share | None = None
    cost_ratio: Number | None
    verify_cost: Number | None
    tokens_per_call: Number
    improvement: SpreadRecord
    differ: Count | None


class ComparisonRecord(Record):
    """A record of scripts/compare_drafters.py."""

    machine: MachineRecord
    target: Text
    input_file: Text
    sentences: Count
    temperature: Positive
    verifier: Text
    variants: Items[ComparedVariant]


class EstimatedCosts(Record):
    c: Number
    v: Number
    improvement: Number


class EstimateRow(Record):
    task: Text
    drafter: Text
    temperature: Positive
    gamma: Gamma
    alpha_paper: Share
    c_paper: Number
    expected_paper: Number
    measured_paper: Number
    as_compiled: EstimatedCosts = Field(alias="as compiled")
    as_for_two_positions: EstimatedCosts = Field(alias="as for two positions")


class EstimatedTimes(Record):
    rows: Items[EstimateRow] = []


class EstimateRecord(Record):
    """A record of scripts/tpu_aot.py."""

    target: Text
    drafter: Text | None
    gamma: Gamma
    num_beams: Count | None = None
    batch_size: Count
    dtype: Text
    quantize: Text | None = None
    topology: Text
    mesh: Text | None
    jax: Text
    weights_gb: Number
    needed_gb: Number
    memory_gb: Number
    fits: bool
    copied_in_loops: list[Any] | None
    floor_ms: Number = 0.0
    iteration_ms: Number | None = None
    times: EstimatedTimes | None = None

    @property
    def devices(self) -> str:
        return f"{self.mesh or 'one device'} of a TPU {self.topology}"


class FigureRecord(Record):
    """A figure of scripts/accelerator_report.py.

    One without `milliseconds` has `failed` or `unsupported`, the reason.
    """

    figure: Text
    kind: Text
    target: Text | None = None
    batch: Count | None = None
    width: Count | None = None
    alpha: Share | None = None
    gamma: Gamma | None = None
    milliseconds: SpreadRecord | None = None
    v: Number | None = None
    c: Number | None = None
    over_full: Number | None = None
    over_full_plain: Number | None = None
    bytes: Count | None = None
    floor_ms: Number | None = None
    acceptance: Text | None = None
    improvement: Number | None = None
    iteration_ms: Number | None = None
    tokens_per_second: Number | None = None
    gb_per_second: Number | None = None
    failed: Text | None = None
    unsupported: Text | None = None


class AcceleratorOptions(Record):
    drafter: Text
    dtype: Text
    tiny: bool
    gamma: Gamma
    input_length: Count
    max_new_tokens: Count


class AcceleratorRecord(Record):
    """A record of scripts/accelerator_report.py."""

    accelerator_report: Count
    machine: MachineRecord
    options: AcceleratorOptions
    plan: Items[Text]
    figures: Items[FigureRecord]


_KINDS: dict[str, type[Record]] = {
    "accelerator_report": AcceleratorRecord,
    "fits": EstimateRecord,
    "variants": ComparisonRecord,
    "speculative": BenchmarkRecord,
    "searches": BeamRecord,
    "calls": DemoRecord,
}


def parse(record: Any) -> Record:
    """Returns a record of the kind that its keys show.

    Args:
      record: JSON values.

    Raises:
      ValueError: the first field that is wrong, with what was got and what was expected.
    """
    if not isinstance(record, dict):
        raise ValueError(f"got {_quote(record)}, expected an object")
    kind = next((kind for key, kind in _KINDS.items() if key in record), MeasureRecord)
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise ValueError(_describe(error.errors(include_url=False)[0])) from None


def _describe(error: ErrorDetails) -> str:
    """Returns a message with the field's path, what was got and what was expected."""
    keys = [str(key) if _is_plain(key) else _quote(key) for key in error["loc"]]
    path, kind = ".".join(keys), error["type"]
    if kind == "value_error":  # the message of a validator
        return ".".join([*keys, str(error["ctx"]["error"])])
    got, expected = _quote(error["input"]), re.sub(r"^\w+ should (be |have )?", "", error["msg"])
    if kind == "missing":
        got, expected = "nothing", "a value"
    elif kind in ("model_type", "dict_type"):
        expected = "an object"
    return f"{path}: got {got}, expected {expected}"


def _is_plain(key: int | str) -> bool:
    return isinstance(key, int) or re.fullmatch("[a-zA-Z0-9_ ]{1,60}", key) is not None


def _quote(value: Any) -> str:
    """Returns a value as a message quotes it."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]} …"


def read_records(path: str) -> list[Record]:
    """Returns the record in a file, or all records of a suite's file, one a line.

    Raises:
      ValueError: the file holds something else; the message names file, line and field.
    """
    text = reading.read_text(path, _MOST_BYTES)
    # A suite's file begins with a whole record, the others are written over many lines.
    first = text.partition("\n")[0].rstrip()  # a line may end in CR LF
    lines = text.splitlines() if first.endswith("}") else [text]
    names = [f"{path}: line {number}" for number in range(1, len(lines) + 1)]
    names = names if len(lines) > 1 else [path]
    records = []
    for name, line in zip(names, lines, strict=True):
        try:
            records.append(parse(reading.parse_json(line)))
        except ValueError as error:
            reason = reading.error_reason(error)
            raise ValueError(f"{name}: {reason}, in a record of {_COMMANDS}") from None
    return records


def write_record(path: str, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON, and checks that `read_records` can read it.

    Raises:
      ValueError: it cannot be read; it is written even so, since it may have taken hours.
    """
    text = json.dumps(record, indent=1)
    write_file(path, text + "\n")
    parse(json.loads(text))
