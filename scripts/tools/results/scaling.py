"""A stage about growth: time and memory against rows, lengths and vocabulary.

Each row of a table is one program of prefill and loop, of a small T5 with random weights, from
which nothing but growth can be read. Beside the slope of its time stands what operations and bytes
demand, whichever grows faster; beside that of its memory, what weights, caches and the encoder's
activations demand. A slope is that of the logarithms between two rows: 1 is linear, 2 quadratic.
"""

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.analysis import formulas, timing, variants
from specdec_jax.analysis.matmul_roofline import Products
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.generate import FOREVER, advance
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from tools.results.cases import NEW_TOKENS, forget_programs, load_target
from tools.results.stage import Row, Rows, Settings


class _Shape(NamedTuple):
    """The shape of a model of equally deep encoder and decoder."""

    width: int
    heads: int
    layers: int
    hidden: int


_GAMMA, _ALPHA = 4, 0.75
_TARGET, _DRAFTER, _HEAD_DIM = _Shape(256, 4, 2, 512), _Shape(64, 1, 1, 128), 64
_NUMBER = 4  # bytes of a float32
# Time that is on no account of the growing parts, such as the start of kernels, makes slopes of
# small sizes smaller than demanded; noise makes some greater.
TOLERANCE = 0.15


class Size(NamedTuple):
    """The size of a request: B, L, new tokens and V."""

    rows: int = 1
    input_length: int = 32
    new_tokens: int = 16
    vocabulary: int = 6144


AXES: dict[str, tuple[str, tuple[int, ...]]] = {
    "batch": ("rows", (1, 4, 16, 64, 256)),
    "input": ("input_length", (32, 128, 512, 1024, 2048, 4096)),
    "output": ("new_tokens", (16, 64, 256, 1024, 2048)),
    "vocabulary": ("vocabulary", (6144, 32768, 98304, 262144)),
}
# What the other parts are while one grows: enough for the growing part to show.
_BASE = {"batch": Size(new_tokens=64), "vocabulary": Size(new_tokens=64)}
# The rows of a step, and their inputs' lengths.
_STEP_ROWS, _STEP_LENGTHS = 32, (64, 128, 256, 512)


@functools.lru_cache(maxsize=2)
def make_models(vocabulary: int) -> tuple[LanguageModel, ModelDrafter]:
    """Returns a target and a drafter with random weights."""
    target, drafter = (
        LanguageModel.random(
            T5Config(vocabulary, width, heads, _HEAD_DIM, layers, layers, hidden, dtype="float32"),
            eos_ids=(),
        )
        for width, heads, layers, hidden in (_TARGET, _DRAFTER)
    )
    return target, ModelDrafter(drafter)


def count_demands(size: Size, drafts: bool = False) -> dict[str, float]:
    """Returns the operations, the bytes read and written, and the bytes kept, of a decode."""
    if not drafts:
        return _count_model(_TARGET, size, size.new_tokens, 1)
    calls = formulas.expected_calls(_ALPHA, _GAMMA, size.new_tokens)
    target = _count_model(_TARGET, size, calls, _GAMMA + 1)
    drafter = _count_model(_DRAFTER, size, calls * _GAMMA, 1)
    return {name: target[name] + drafter[name] for name in target}


def _count_model(shape: _Shape, size: Size, calls: float, positions: int) -> dict[str, float]:
    """Counts a model's part, given how often it is called over how many positions of each row."""
    rows, length, new, vocabulary = size
    width, hidden, layers = shape.width, shape.hidden, shape.layers
    inner, inputs = shape.heads * _HEAD_DIM, rows * length
    encoder = layers * (4 * width * inner + 3 * width * hidden)
    step = layers * (6 * width * inner + 3 * width * hidden) + width * vocabulary
    once = encoder + layers * 2 * width * inner  # keys and values of cross-attention too
    # Slots that all calls together read, of self-attention and cross-attention.
    slots = rows * calls * ((new + 1) / 2 + length)
    operations: float = 2 * inputs * once + 4 * layers * inner * inputs * length
    operations += positions * (2 * rows * calls * step + 4 * layers * inner * slots)
    activations = inputs * (3 * inner + 2 * width + 2 * hidden)
    moved = once + layers * activations + calls * step + 2 * layers * inner * slots
    caches = 2 * layers * inner * rows * (length + new)
    kept = once + step + width * vocabulary + caches + activations
    return {"operations": operations, "moved": _NUMBER * moved, "kept": _NUMBER * kept}


@isolated
@functools.partial(jax.jit, static_argnames=("config", "slots"))
def _decode(target: Any, drafter: Any, config: Any, slots: int, inputs: Any) -> Any:
    """Runs prefill and loop in one program, as `generate` does."""
    state = config.strategy.prefill(target, drafter, config, slots, inputs)
    return config.strategy.read(advance(target, drafter, state, FOREVER))


class _Program:
    """A compiled request, and its times."""

    def __init__(self, size: Size, drafts: bool):
        target, drafter = make_models(size.vocabulary)
        how: dict[str, Any] = {"gamma": 0}
        if drafts:
            how = dict(drafter=drafter, gamma=_GAMMA, verifier="synthetic", synthetic_alpha=_ALPHA)
        shape = size.rows, size.input_length
        plan = plan_decoding(
            target,
            np.random.default_rng(0).integers(3, size.vocabulary, shape, np.int32),
            input_lengths=np.full(size.rows, size.input_length),
            max_input_length=size.input_length,
            max_new_tokens=size.new_tokens,
            key=jax.random.key(0),
            **how,
        )
        network, drafting, config, slots, inputs = plan.arguments()
        compiled = _decode.lower(network, drafting, config, slots, inputs).compile()
        self._run = functools.partial(compiled, network, drafting, jax.device_put(inputs))
        memory = compiled.memory_analysis()
        self.arguments = memory.argument_size_in_bytes
        self.temporaries = memory.temp_size_in_bytes + memory.output_size_in_bytes
        self.seconds: list[float] = []

    def time(self) -> None:
        """Runs it once and notes the seconds."""
        start = time.perf_counter()
        jax.block_until_ready(self._run())
        self.seconds.append(time.perf_counter() - start)


def measure_scaling(settings: Settings) -> Rows:
    """Measures each axis alone, all sizes of it in turn, plain and speculative."""
    rows: Rows = {}
    for axis, (field, values) in AXES.items():
        base = _BASE.get(axis, Size())
        if settings.quick:
            values = (values[0], values[len(values) // 2], values[-1])
        sizes = [base._replace(**{field: value}) for value in values]
        for drafts in (False, True):
            forget_programs()
            programs = [_Program(size, drafts) for size in sizes]
            for _ in range(1 + settings.choose(3, 2)):  # the first pass is not counted
                for program in programs:
                    program.time()
            form = f"γ = {_GAMMA}" if drafts else "plain"
            described = describe_growth(
                [getattr(size, field) for size in sizes],
                [min(program.seconds[1:]) for program in programs],
                [program.arguments + program.temporaries for program in programs],
                [count_demands(size, drafts) for size in sizes],
            )
            rows[f"{axis} {form}"] = {f"{row['value']:,}": row for row in described}
        make_models.cache_clear()
    return rows | {f"step of {_STEP_ROWS} rows": measure_step(settings.choose(7, 2))}


def measure_step(passes: int) -> dict[str, Row]:
    """Measures a plain step of several rows of the bundled target against their inputs' length."""
    forget_programs()
    target, steps, memory, demands = load_target("none"), {}, [], []
    config = target.config
    slot = 2 * config.num_decoder_layers * config.num_heads * config.head_dim
    for length in _STEP_LENGTHS:
        how = dict(max_new_tokens=NEW_TOKENS)
        state, request = timing.iteration_state(target, None, _STEP_ROWS, length, 0, **how)
        steps[str(length)] = timing.iteration_variant(state, request)
        weights = Products.from_network(request.network).nbytes
        caches = jax.tree.leaves(state.target_cache)
        memory.append(weights + sum(leaf.nbytes for leaf in caches))
        cached = _STEP_ROWS * slot * (length + NEW_TOKENS)  # numbers
        operations = 2 * _STEP_ROWS * weights / _NUMBER + 2 * cached
        moved = weights + _NUMBER * cached
        demands.append({"operations": operations, "moved": moved, "kept": moved})
    variants.warm_up({}, steps, [])
    found = variants.time_steps(steps, passes)
    seconds = [found[name].least for name in steps]
    described = describe_growth(_STEP_LENGTHS, seconds, memory, demands)
    return {f"{row['value']:,}": row for row in described}


def describe_growth(
    values: Sequence[int],
    seconds: Sequence[float],
    memory: Sequence[float],
    demands: Sequence[dict[str, float]],
) -> list[Row]:
    """Returns the rows of one axis: time, memory, and slopes beside those that are demanded."""
    rows: list[Row] = []
    for i, value in enumerate(values):
        row: Row = {"value": value, "ms": 1e3 * seconds[i], "mb": memory[i] / 1e6}
        if i:

            def slope(numbers: Sequence[float], i: int = i) -> float:
                return math.log(numbers[i] / numbers[i - 1]) / math.log(values[i] / values[i - 1])

            by_kind = {name: slope([one[name] for one in demands]) for name in demands[0]}
            row["slope"], row["memory_slope"] = slope(seconds), slope(memory)
            row["demanded"] = max(by_kind["operations"], by_kind["moved"])
            row["memory_demanded"] = by_kind["kept"]
        rows.append(row)
    return rows


def format_scaling(row: Row) -> str:
    """Returns time and memory, and how they grow beside what is demanded."""
    text = f"{row['ms']:.1f} ms, {row['mb']:.0f} MB"
    if "slope" not in row:
        return text
    text += f"; time grows {row['slope']:.2f} (demanded {row['demanded']:.2f})"
    text += f", memory {row['memory_slope']:.2f} ({row['memory_demanded']:.2f})"
    faster = grows_faster(row)
    return text + f"; faster: {' and '.join(faster)}" * bool(faster)


def grows_faster(row: Row) -> list[str]:
    """Returns what grows faster than is demanded: "time", "memory", both or neither."""
    pairs = {"time": ("slope", "demanded"), "memory": ("memory_slope", "memory_demanded")}
    return [
        name
        for name, (got, asked) in pairs.items()
        if got in row and row[got] > max(row[asked], 0) + TOLERANCE
    ]
