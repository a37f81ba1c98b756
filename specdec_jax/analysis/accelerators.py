"""Lists what scripts/accelerator_report.py measures on a device: bare copies and products, target
calls by width, draft steps, whole decodes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis import arms, timing
from specdec_jax.analysis.products import products_arms
from specdec_jax.analysis.timing import STEPS, Spread
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models import panels
from specdec_jax.models.families import PRESETS
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.parameters import parameter_count
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.verifiers import FORCED

# Bytes that are copied to measure the bandwidth; with tiny shapes fewer.
_COPIED, _COPIED_TINY = 2**30, 2**16
# Another implementation's way to decode one batch, made of the target.
Against = Callable[[LanguageModel], Callable[[arms.Batch], GenerationResult]]


class NotHere(Exception):
    """A figure that this package, or what is installed, does not support on this device."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is measured; all of it goes into the report's first line.

    Attributes:
      targets, drafter: shapes of T5s. Encoders have one layer, since only decoding is measured.
      dtype: dtype of weights and caches.
      tiny: whether every shape is shrunk to a width of 64 and two layers, for a test.
      input_length, max_new_tokens: lengths of all inputs and outputs.
      gamma: γ of all chains.
      widths: numbers of positions of target calls, 1 among them.
      alphas: acceptance rates that a coin forces.
      batches: numbers of rows.
      num_beams, levels: beams of a search, and levels that are drafted for it.
      tree: a tree as text.
    """

    targets: tuple[str, ...] = ("t5_1_1/large", "t5_1_1/xl", "t5_1_1/xxl")
    drafter: str = "t5_1_1/small"
    dtype: str = "bfloat16"
    tiny: bool = False
    input_length: int = 128
    max_new_tokens: int = 128
    gamma: int = 7
    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    alphas: tuple[float, ...] = (0.6, 0.75, 0.9)
    batches: tuple[int, ...] = (1, 8, 32)
    num_beams: int = 4
    levels: int = 3
    tree: str = "dynamic:8,8,64"

    def config(self, preset: str) -> ModelConfig:
        """Returns the shape of a preset in this dtype, with an encoder of one layer."""
        config = PRESETS[preset].replace(dtype=self.dtype, num_encoder_layers=1)
        # As small as a TPU's kernel of a draft step takes them.
        small = dict(vocab_size=512, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=128, num_decoder_layers=2)
        return config.replace(**small) if self.tiny else config

    def ids(self, rows: int, vocab_size: int) -> np.ndarray:
        """Returns random inputs `[rows, L]`."""
        return np.random.default_rng(0).integers(2, vocab_size, (rows, self.input_length), np.int32)


class Pair(NamedTuple):
    """A target and a drafter for it; both None where a figure needs none."""

    target: Any = None
    drafter: Any = None


class Figure(NamedTuple):
    """One figure: a call that is timed.

    Attributes:
      name: unique name.
      about: what the figure's line says besides what is measured.
      program: name of the program that it runs; of figures with the same, one alone compiles.
      arm: makes the call.
      read: returns what the line says of the seconds of one call, what the last call returned, and the
        lines before by name.
    """

    name: str
    about: dict[str, Any]
    program: str
    arm: Callable[[Pair], Callable[[], Any]]
    read: Callable[[Spread, Any, Mapping[str, Any]], dict[str, Any]]


class Stage(NamedTuple):
    """Figures whose programs compile side by side, and what loads the models that they share, or
    raises `NotHere`.

    `kind` is the same for the stage of another target with the same figures.
    """

    name: str
    kind: str
    figures: list[Figure]
    load: Callable[[], Pair]


def stages(setup: Setup, against: Mapping[str, Against | None]) -> list[Stage]:
    """Returns all stages, smaller targets before larger ones, and what is asked first before what
    is rarer.

    Args:
      setup: what is measured.
      against: other implementations by name; None: not installed.
    """
    targets = sorted(setup.targets, key=lambda preset: parameter_count(PRESETS[preset]))
    load = lambda preset: lambda: _load(setup, preset)
    first, *rest = setup.batches
    calls = [
        Stage(
            f"{preset}: calls and batch {first}", "calls", _calls(setup, preset) + _decodes(setup, preset, first),
            functools.partial(_load_for_calls, setup, preset),
        )
        for preset in targets
    ]  # fmt: skip
    others = [
        Stage(f"{preset}: batch {batch}", f"batch {batch}", _decodes(setup, preset, batch), load(preset))
        for batch in rest
        for preset in targets
    ]
    searches = [
        Stage(f"{preset}: tree and beams", "searches", _searches(setup, preset), load(preset)) for preset in targets
    ]
    rounded = [
        Stage(f"{preset}: int8", "int8", _rounded(setup, preset), functools.partial(_load_rounded, setup, preset))
        for preset in targets
    ]
    beside = [
        Stage(
            f"{preset}: {name}",
            name,
            [_beside(setup, preset, name, decode)],
            load(preset) if decode else _missing(name),
        )
        for name, decode in against.items()
        for preset in targets
    ]
    return [Stage("copies", "copies", [_copy(setup)], Pair), *calls, *others, *searches, *rounded, *beside]


def _load(setup: Setup, preset: str) -> Pair:
    fill = lambda name: LanguageModel.filled(setup.config(name), name=name, eos_ids=())
    return Pair(fill(preset), ModelDrafter(fill(setup.drafter)))


def _load_for_calls(setup: Setup, preset: str) -> Pair:
    """Loads a pair and compiles what makes its caches, lest every call's program does it again."""
    pair = _load(setup, preset)
    for network in (pair.target.network, pair.drafter.network):
        jax.block_until_ready(timing.prefill_arm(network, 1, setup.input_length, _room(setup, pair.target))())
    return pair


def _load_rounded(setup: Setup, preset: str) -> Pair:
    try:
        panels.check_quantize("int8", setup.dtype, False)
    except ValueError as error:
        raise NotHere(str(error)) from None
    return Pair(LanguageModel.filled(setup.config(preset), name=preset, eos_ids=(), quantize="int8"))


def _missing(name: str) -> Callable[[], Pair]:
    def load() -> Pair:
        raise NotHere(f"{name} is not installed")

    return load


def _scaled(seconds: Spread, factor: float) -> dict[str, float]:
    return Spread(*(factor * one for one in seconds))._asdict()


def _steps_in_ms(seconds: Spread) -> dict[str, Any]:
    return {"milliseconds": _scaled(seconds, 1e3 / STEPS)}


def _copy(setup: Setup) -> Figure:
    size = _COPIED_TINY if setup.tiny else _COPIED

    def arm(_):
        numbers = jnp.ones(size // 4, jnp.int32)
        copy = jax.jit(lambda x: x + 1)
        return lambda: copy(numbers)

    read = lambda seconds, *_: {
        "milliseconds": _scaled(seconds, 1e3), "gb_per_second": 2 * size / 1e9 / max(seconds.least, 1e-9)
    }  # fmt: skip
    return Figure("copy", {"kind": "copy", "megabytes": size / 1e6}, "copy", arm, read)


def _room(setup: Setup, target: LanguageModel) -> int:
    return timing.total_slots(target, setup.input_length, setup.max_new_tokens, max(setup.widths))


def _calls(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of bare products, draft steps and target calls over several positions."""
    length = setup.input_length
    one = f"{preset}, call over 1"

    def call(width: int) -> Figure:
        def read(seconds, _, before):
            found = _steps_in_ms(seconds)
            alone = found if width == 1 else before.get(one, {})
            return found | _ratio("v", found, alone)

        arm = lambda pair: timing.step_arm(pair.target.network, 1, length, _room(setup, pair.target), width)
        name, about = f"{preset}, call over {width}", {"kind": "call", "target": preset, "batch": 1, "width": width}
        return Figure(name, about, name, arm, read)

    def step(seconds, _, before):
        found = _steps_in_ms(seconds)
        return found | _ratio("c", found, before.get(one, {}))

    about = {"target": preset, "batch": 1}

    def drafting(pair):
        network, room = pair.drafter.steps()["draft step"], _room(setup, pair.target)
        width = timing.draft_width(network, 1, length, room)
        return timing.step_arm(network, 1, length, room, width, timing.draft_steps)

    products = lambda pair: products_arms(pair.target.network, 1)["products"]
    return [
        *map(call, sorted({1, *setup.widths})),
        Figure(f"{preset}, draft step", about | {"kind": "draft step"}, "draft step", drafting, step),
        Figure(
            f"{preset}, products", about | {"kind": "products"}, "products", products,
            lambda seconds, *_: _steps_in_ms(seconds),
        ),
    ]  # fmt: skip


def _ratio(name: str, found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Returns how many times the median of `other` that of `found` is; nothing without one."""
    return {name: found["milliseconds"]["median"] / other["milliseconds"]["median"]} if "milliseconds" in other else {}


def _decodes(setup: Setup, preset: str, batch: int) -> list[Figure]:
    """Returns the figures of whole decodes of `batch` rows: plain, and with each forced α."""
    plain = f"{preset}, plain, batch {batch}"
    about = {"target": preset, "batch": batch}

    def forced(alpha: float) -> Figure:
        how = dict(gamma=setup.gamma, verifier=FORCED.name, forced_alpha=alpha)
        return Figure(
            f"{preset}, alpha {alpha:g}, batch {batch}",
            about | {"kind": "speculative", "alpha": alpha, "gamma": setup.gamma}, f"speculative {batch}",
            lambda pair: _decode(setup, pair, batch, drafter=pair.drafter, **how),
            lambda seconds, result, before: _per_token(seconds, result, before.get(plain, {})),
        )  # fmt: skip

    alone = Figure(
        plain, about | {"kind": "plain"}, f"plain {batch}", lambda pair: _decode(setup, pair, batch),
        lambda seconds, result, _: _per_token(seconds, result, {}),
    )  # fmt: skip
    return [alone, *map(forced, setup.alphas)]


def _decode(setup: Setup, pair: Pair, batch: int, **how) -> Callable[[], GenerationResult]:
    """Returns a call that decodes a batch, its encoder included."""
    ids = setup.ids(batch, pair.target.config.vocab_size)
    return lambda: generate(pair.target, ids, max_new_tokens=setup.max_new_tokens, **how)


def _per_token(seconds: Spread, result: GenerationResult, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the milliseconds for a token of a row, those of an iteration, and how much faster than
    `plain` that is."""
    tokens = float(np.mean(result.lengths))
    found = {
        "milliseconds": _scaled(seconds, 1e3 / tokens),
        "tokens_per_second": float(result.lengths.sum()) / seconds.median,
    }
    if result.stats is None:
        return found
    calls = max(row.target_calls for row in result.stats.per_row or (result.stats,))
    gain = _ratio("slower", plain, found)["slower"] if "milliseconds" in plain else None
    return found | {"iteration_ms": 1e3 * seconds.median / calls} | ({} if gain is None else {"improvement": gain})


def _searches(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of a tree's calls and iterations, and of beam search, plain and drafted.

    With random weights hardly anything that is drafted stands: the figure is the time of an
    iteration.
    """
    tree, length = read_tree(setup.tree), setup.input_length
    about = {"target": preset, "batch": 1}

    def over_nodes(seconds, _, before):
        found = _steps_in_ms(seconds)
        return found | _ratio("v", found, before.get(f"{preset}, call over 1", {}))

    nodes = lambda pair: timing.tree_arm(pair.target.network, 1, length, _room(setup, pair.target) + tree.size, tree)
    iterations = lambda seconds, result, _: _per_token(seconds, result, {})
    made = lambda kind, arm, read=iterations: Figure(f"{preset}, {kind}", about | {"kind": kind}, kind, arm, read)
    beams = dict(num_beams=setup.num_beams)
    return [
        made("tree call", nodes, over_nodes),
        made("tree", lambda pair: _decode(setup, pair, 1, drafter=pair.drafter, tree=tree)),
        made("beams", lambda pair: _decode(setup, pair, 1, **beams)),
        made("drafted beams", lambda pair: _decode(setup, pair, 1, drafter=pair.drafter, gamma=setup.levels, **beams)),
    ]


def _rounded(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of a target in 8 bits: calls over one and over γ + 1 positions."""

    def call(width: int) -> Figure:
        def arm(pair: Pair):
            return timing.step_arm(pair.target.network, 1, setup.input_length, _room(setup, pair.target), width)

        def read(seconds, _, before):
            found = _steps_in_ms(seconds)
            return found | _ratio("over_full", found, before.get(f"{preset}, call over {width}", {}))

        name = f"{preset}, int8, call over {width}"
        about = {"kind": "int8 call", "target": preset, "batch": 1, "width": width}
        return Figure(name, about, name, arm, read)

    return [call(1), call(setup.gamma + 1)]


def _beside(setup: Setup, preset: str, name: str, decode: Against | None) -> Figure:
    def arm(pair: Pair):
        assert decode is not None, "or there is no pair"
        ids = setup.ids(1, pair.target.config.vocab_size).tolist()
        (batch,), run = arms.cut(ids, ids, 1, 0), decode(pair.target)
        return lambda: run(batch)

    read = lambda seconds, result, _: _per_token(seconds, result, {})
    return Figure(f"{preset}, {name}", {"kind": name, "target": preset, "batch": 1}, name, arm, read)
