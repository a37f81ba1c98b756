"""What falls short: figures of the records beside what is asked of them."""

from collections.abc import Callable, Mapping
from typing import Any

from tools.results.cases import AUTO, FIXED
from tools.results.loading import MOST
from tools.results.scaling import TOLERANCE
from tools.results.stage import Row
from tools.results.starting import PACKAGE, SENTENCE

TPU_BATCH = "32 rows, 128 new tokens"


def list_shortfalls(stages: Mapping[str, Any]) -> dict[str, str]:
    """Returns what falls short on one machine: the worst figures beside what is asked of them."""
    found: dict[str, str] = {}

    def add(name: str, values: list[float], asked: float, worst: Callable = min):
        """Adds a figure that is too small, or with `worst=max` too great."""
        if values and worst(*values, asked) != asked:
            bound = "at most " * (worst is max)
            found[f"{name} (asked: {bound}{asked:g})"] = f"{worst(values):.2f}"

    def rows(stage: str) -> list[dict[str, Row]]:
        return list(stages.get(stage, {}).get("rows", {}).values())

    def gain(row: Row) -> float:
        return row["improvement"]["median"]

    def best(table: Mapping[str, Row], begins: str) -> float:
        return max(gain(row) for name, row in table.items() if name.startswith(begins))

    def over_fixed(table: Mapping[str, Row]) -> float:
        row = table[AUTO]
        if "over_fixed" in row:
            return row["over_fixed"]["median"]
        return gain(row) / best(table, FIXED)  # of an older record

    pairs = rows("pair")
    ratio = [gain(one["speculative, int8, γ = 4"]) / gain(one["plain, int8"]) for one in pairs]
    add("speculative over plain in int8, one sentence at a time", ratio, 1.8)
    for stage, how in (("texts", "on the worst text"), ("auto", "of several rows, at worst")):
        auto = [gain(one[AUTO]) for one in rows(stage)]
        fixed = [over_fixed(one) for one in rows(stage)]
        add(f'`gamma="auto"` over the best fixed γ, {how}', fixed, 0.96)
        add(f'`gamma="auto"` over plain decoding, {how}', auto, 0.98)
    beams = [best(one, "four beams, γ") for one in rows("beams")]
    add("speculative over plain beam search", beams, 1.3)
    slopes = [row for one in rows("scaling") for row in one.values() if "slope" in row]
    for what, got, asked in (
        ("time", "slope", "demanded"),
        ("memory", "memory_slope", "memory_demanded"),
    ):
        excess = [row[got] - max(row[asked], 0) for row in slopes]
        add(
            f"scaling: slope of {what} over what operations and bytes demand",
            excess,
            TOLERANCE,
            max,
        )
    t5x = [one for one in rows("paper") if "T5-large, T5X" in one]
    large = [best(one, "T5-large with T5-small") / gain(one["T5-large, T5X"]) for one in t5x]
    add("T5-large with T5-small, α = 0.75, over T5X", large, 3.4)
    for form in ("float32", "int8"):
        calls = [one[f"{form}, call over 5 positions"]["over_plain"] for one in rows("steps")]
        add(f"v of five positions, {form}", calls, 1.15, max)
        files = [
            gain(ours) / gain(theirs)
            for one in rows("file")
            for theirs in (
                one[name] for name in one if name.startswith("CTranslate2") and form in name
            )
            for ours in (one[f"plain, {'float32' if form == 'float32' else '`w8a8`'}, batch 64"],)
        ]
        label = "" if form == "float32" else " in `w8a8`"
        add(f"a whole file, plain{label}, over CTranslate2 in {form}", files, 1.0)
    lengths = [row for one in rows("encoders") for row in one.values() if "over_best" in row]
    others = [row["over_best"]["median"] for row in lengths]
    add("an encoder over the best other library's, at the worst length", others, 0.8, max)
    peaks = [
        row[place]["peak"]
        for one in rows("loading")
        for row in one.values()
        for place in ("local", "store")
        if place in row and row["gb"] > 1  # a small model's is mostly the process's own
    ]
    add("loading: peak memory over the weights, of the worst format", peaks, MOST, max)
    started = rows("start")
    seconds = [one[SENTENCE]["seconds"]["median"] for one in started]
    add("a second start of `specdec generate`, seconds", seconds, 1.4, max)
    seconds = [one[PACKAGE]["beyond"]["median"] for one in started]
    add("`import specdec_jax` beyond `import jax`, seconds", seconds, 0.05, max)
    batches = [one[name] for one in rows("tpu") for name in one if name == TPU_BATCH]
    estimates = [
        row["iteration_ms"] / row["floor_ms"] for row in batches if row.get("iteration_ms")
    ]
    add("T5-XXL on a TPU v4, 32 rows: an iteration over its bytes, estimated", estimates, 1.4, max)
    for case, field, name, limit in (  # on a small device some do not fit
        ("draft step", "c", "T5-XXL with T5-small: c of a draft step", 0.02),
        ("int8, call over 1", "over_full", "T5-XXL: a step in int8 over one in bfloat16", 0.6),
    ):
        cells = [one[case] for one in rows("accelerator") if field in one.get(case, {})]
        add(name, [cell[field] for cell in cells], limit, max)
    return found
