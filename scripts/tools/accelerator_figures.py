"""Says what each figure of scripts/accelerator_report.py times, and what its line says: bare copies
and products, target calls by width, draft steps, whole decodes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis import timing, variants
from specdec_jax.analysis.matmul_roofline import Products, products_variants
from specdec_jax.analysis.timing import STEPS, Spread
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.models.families import PRESETS
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.verifiers import SYNTHETIC

# Bytes that are copied to measure the bandwidth, with tiny shapes fewer, and how often in one
# program.
_COPIED, _COPIED_TINY, _COPIES = 2**30, 2**16, 16
# The acceptance that is forced where a target's own weights in int8 draft for it.
_OWN_ALPHA = 0.99
# Another implementation's way to decode one batch, made of the target.
Against = Callable[[LanguageModel], Callable[[variants.Batch], GenerationResult]]


class NotHere(Exception):
    """A figure that this package, or what is installed, does not support on this device."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is measured; all of it goes into the report's first line.

    Attributes:
      targets, drafter: shapes of T5s. Encoders have one layer, since only decoding is measured.
      dtype: dtype of weights and caches.
      tiny: whether every shape is shrunk to a width of 128 and two layers, for a test.
      input_length, max_new_tokens: lengths of all inputs and outputs.
      gamma: γ of all chains.
      widths: numbers of positions of target calls; 1 and γ + 1 are among them.
      alphas: synthetic acceptance rates.
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

    def __post_init__(self):
        object.__setattr__(self, "widths", tuple(sorted({*self.widths, 1, self.gamma + 1})))

    def config(self, preset: str) -> ModelConfig:
        """Returns the shape of a preset in this dtype, with an encoder of one layer."""
        config = PRESETS[preset].replace(dtype=self.dtype, num_encoder_layers=1)
        # As small as a TPU's kernel of a draft step takes them.
        small = dict(
            vocab_size=512, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=128, num_decoder_layers=2
        )
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
      variant: makes the call.
      read: returns what the line says of the seconds of one call, what the last call returned, and
        the lines before by name.
    """

    name: str
    about: dict[str, Any]
    program: str
    variant: Callable[[Pair], Callable[[], Any]]
    read: Callable[[Spread, Any, Mapping[str, Any]], dict[str, Any]]


def _scaled(seconds: Spread, factor: float) -> dict[str, float]:
    return Spread(*(factor * one for one in seconds))._asdict()


def _steps_in_ms(seconds: Spread) -> dict[str, Any]:
    return {"milliseconds": _scaled(seconds, 1e3 / STEPS)}


def _ratio(name: str, found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Returns how many times the median of `other` that of `found` is; nothing without one."""
    return (
        {name: found["milliseconds"]["median"] / other["milliseconds"]["median"]}
        if "milliseconds" in other
        else {}
    )


def _gain(name: str, found: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """Returns how many times as fast as `other` `found` is; nothing without one."""
    return (
        {name: other["milliseconds"]["median"] / found["milliseconds"]["median"]}
        if "milliseconds" in other
        else {}
    )


def copy(setup: Setup) -> Figure:
    """Returns the figure of the bandwidth: of copies in place, many in one program, so that what
    the host takes to launch it does not count."""
    size = _COPIED_TINY if setup.tiny else _COPIED

    def variant(_):
        kept = [jnp.ones(size // 4, jnp.int32)]

        def call():
            kept[0] = copies(kept[0])
            return kept[0]

        return call

    gigabytes = 2 * size * _COPIES / 1e9

    def read(seconds, *_):
        return {
            "milliseconds": _scaled(seconds, 1e3 / _COPIES),
            "gb_per_second": gigabytes / max(seconds.least, 1e-9),
        }

    return Figure(
        "copy", {"kind": "copy", "megabytes": size / 1e6, "copies": _COPIES}, "copy", variant, read
    )


@functools.partial(jax.jit, donate_argnums=0)
def copies(numbers: jax.Array) -> jax.Array:
    """Reads and writes an array several times. The barrier keeps a compiler that writes the passes
    out from joining them; that the array is donated, from copying it once more."""

    def one_pass(_, numbers):
        return jax.lax.optimization_barrier(numbers + 1)

    return jax.lax.fori_loop(0, _COPIES, one_pass, numbers)


def _of_weights(network: Network, call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `call`, whose steps multiply by the kernels of `network`, with their bytes beside
    what it returns, for `_floor`."""
    size = Products.of(network).nbytes
    return lambda: (call(), size)


def _floor(result: tuple[Any, int], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the bytes of the weights of a step, and the time in which they are read at the
    bandwidth measured."""
    size, measured = result[1], before.get("copy", {})
    return {"bytes": size} | (
        {"floor_ms": size / measured["gb_per_second"] / 1e6} if "gb_per_second" in measured else {}
    )


def room(setup: Setup, target: LanguageModel) -> int:
    """Returns the number of slots of every call's cache."""
    return timing.total_slots(target, setup.input_length, setup.max_new_tokens, max(setup.widths))


def calls(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of bare products, draft steps and target calls over several positions."""

    def products(pair):
        return _of_weights(
            pair.target.network, products_variants(pair.target.network, 1)["products"]
        )

    return [
        *(_call(setup, preset, width) for width in sorted({1, *setup.widths})),
        _draft_step(setup, preset),
        Figure(
            f"{preset}, products",
            {"target": preset, "batch": 1, "kind": "products"},
            "products",
            products,
            lambda seconds, result, before: _steps_in_ms(seconds) | _floor(result, before),
        ),
    ]


def _call(setup: Setup, preset: str, width: int, kind: str = "") -> Figure:
    """Returns the figure of a target call; of one in int8 (`kind` "int8 ") beside the full
    target's."""
    full = f"{preset}, call over {width}"
    name = full if not kind else f"{preset}, int8, call over {width}"

    def variant(pair: Pair):
        network = pair.target.network
        call = timing.step_variant(network, 1, setup.input_length, room(setup, pair.target), width)
        return _of_weights(network, call) if width == 1 else call

    def read(seconds, result, before):
        found = _steps_in_ms(seconds)
        if kind:
            found |= _ratio("over_full", found, before.get(full, {}))
        else:
            found |= _ratio(
                "v", found, found if width == 1 else before.get(f"{preset}, call over 1", {})
            )
        return found | (_floor(result, before) if width == 1 else {})

    return Figure(
        name,
        {"kind": f"{kind}call", "target": preset, "batch": 1, "width": width},
        name,
        variant,
        read,
    )


def _draft_step(setup: Setup, preset: str, of: str = "") -> Figure:
    """Returns the figure of a step of the pair's drafter, whose name is in `of` if it is not the
    usual one."""
    length = setup.input_length

    def variant(pair: Pair):
        network, slots = pair.drafter.steps()["draft step"], room(setup, pair.target)
        width = timing.draft_width(network, 1, length, slots)
        return _of_weights(
            network, timing.step_variant(network, 1, length, slots, width, timing.draft_steps)
        )

    def read(seconds, result, before):
        found = _steps_in_ms(seconds)
        return (
            found
            | _ratio("c", found, before.get(f"{preset}, call over 1", {}))
            | _floor(result, before)
        )

    name = ", ".join(filter(None, (preset, of, "draft step")))
    about = {"target": preset, "batch": 1, "kind": f"{of} draft step".strip()}
    return Figure(name, about, "draft step", variant, read)


def decodes(setup: Setup, preset: str, batch: int, kind: str = "") -> list[Figure]:
    """Returns the figures of whole decodes of `batch` rows: plain, and with each forced α; of a
    target in int8 (`kind` "int8 ") beside the full target's plain decoding too."""
    full, model = f"{preset}, plain, batch {batch}", f"{preset}, int8" if kind else preset
    plain = f"{model}, plain, batch {batch}"
    about = {"target": preset, "batch": batch}

    def read(seconds, result, before, alone: str | None = None):
        found = _per_token(seconds, result, before.get(alone, {}))
        return found | (_gain("over_full_plain", found, before.get(full, {})) if kind else {})

    def forced(alpha: float) -> Figure:
        return Figure(
            f"{model}, alpha {alpha:g}, batch {batch}",
            about | {"kind": f"{kind}speculative", "alpha": alpha, "gamma": setup.gamma},
            f"speculative {batch}",
            lambda pair: _forced(setup, pair, batch, alpha),
            functools.partial(read, alone=plain),
        )

    def variant(pair):
        return _decode(setup, pair, batch)

    return [
        Figure(plain, about | {"kind": f"{kind}plain"}, f"plain {batch}", variant, read),
        *map(forced, setup.alphas),
    ]


def _forced(setup: Setup, pair: Pair, batch: int, alpha: float) -> Callable[[], GenerationResult]:
    how = dict(gamma=setup.gamma, verifier=SYNTHETIC.name, synthetic_alpha=alpha)
    return _decode(setup, pair, batch, drafter=pair.drafter, **how)


def _decode(setup: Setup, pair: Pair, batch: int, **how) -> Callable[[], GenerationResult]:
    """Returns a call that decodes a batch, its encoder included."""
    ids = setup.ids(batch, pair.target.config.vocab_size)
    return lambda: generate(pair.target, ids, max_new_tokens=setup.max_new_tokens, **how)


def _per_token(
    seconds: Spread, result: GenerationResult, plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the milliseconds for a token of a row, those of an iteration, and how many times as
    fast as `plain` that is."""
    tokens = float(np.mean(result.lengths))
    found = {
        "milliseconds": _scaled(seconds, 1e3 / tokens),
        "tokens_per_second": float(result.lengths.sum()) / seconds.median,
    }
    if result.stats is None:
        return found
    calls = max(row.target_calls for row in result.stats.per_row or (result.stats,))
    return (
        found | {"iteration_ms": 1e3 * seconds.median / calls} | _gain("improvement", found, plain)
    )


def searches(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of a tree's calls and iterations, and of beam search, plain and drafted.

    With random weights hardly anything that is drafted is accepted: the figure is the time of an
    iteration.
    """
    tree, length = read_tree(setup.tree), setup.input_length
    about = {"target": preset, "batch": 1}

    def over_nodes(seconds, _, before):
        found = _steps_in_ms(seconds)
        return found | _ratio("v", found, before.get(f"{preset}, call over 1", {}))

    def nodes(pair):
        return timing.tree_variant(
            pair.target.network, 1, length, room(setup, pair.target) + tree.size, tree
        )

    def iterations(seconds, result, _):
        return _per_token(seconds, result, {})

    def made(kind, variant, read=iterations):
        return Figure(f"{preset}, {kind}", about | {"kind": kind}, kind, variant, read)

    beams = dict(num_beams=setup.num_beams)
    return [
        made("tree call", nodes, over_nodes),
        made("tree", lambda pair: _decode(setup, pair, 1, drafter=pair.drafter, tree=tree)),
        made("beams", lambda pair: _decode(setup, pair, 1, **beams)),
        made(
            "drafted beams",
            lambda pair: _decode(setup, pair, 1, drafter=pair.drafter, gamma=setup.levels, **beams),
        ),
    ]


def rounded(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of a target in int8: calls over one and over γ + 1 positions, and
    decodes."""
    wide = (_call(setup, preset, width, "int8 ") for width in (1, setup.gamma + 1))
    return [*wide, *decodes(setup, preset, 1, "int8 ")]


def drafted_by_itself(setup: Setup, preset: str) -> list[Figure]:
    """Returns the figures of a target for which its own weights in int8 draft. Weights of no
    meaning do not tell how often they would agree: the acceptance is forced."""
    plain = f"{preset}, plain, batch 1"
    about = {
        "target": preset,
        "batch": 1,
        "kind": "self:int8",
        "alpha": _OWN_ALPHA,
        "gamma": setup.gamma,
    }
    return [
        _draft_step(setup, preset, "self:int8"),
        Figure(
            f"{preset}, self:int8, forced alpha {_OWN_ALPHA:g}, batch 1",
            about | {"acceptance": "synthetic"},
            "self:int8",
            lambda pair: _forced(setup, pair, 1, _OWN_ALPHA),
            lambda seconds, result, before: _per_token(seconds, result, before.get(plain, {})),
        ),
    ]


def beside(setup: Setup, preset: str, name: str, decode: Against | None) -> Figure:
    """Returns the figure of another implementation's argmax decoding."""

    def variant(pair: Pair):
        assert decode is not None, "or there is no pair"
        ids = setup.ids(1, pair.target.config.vocab_size).tolist()
        (batch,), run = variants.cut(ids, ids, 1, 0), decode(pair.target)
        return lambda: run(batch)

    def read(seconds, result, _):
        return _per_token(seconds, result, {})

    return Figure(
        f"{preset}, {name}", {"kind": name, "target": preset, "batch": 1}, name, variant, read
    )
