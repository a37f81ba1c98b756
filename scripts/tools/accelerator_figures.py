"""Defines the figures of scripts/accelerator_report.py: the timed call and the fields of each.

They are copies, bare products, target calls by width, draft steps and whole decodes.
"""

import dataclasses
import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis import step_loops, timing
from specdec_jax.analysis.matmul_roofline import Products, products_variants
from specdec_jax.analysis.timing import STEPS, CallShape, Spread
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
# The synthetic acceptance rate of a target for which its own weights in int8 draft.
_OWN_ALPHA = 0.99
# The records of earlier figures by name.
Lines = Mapping[str, Any]


class UnsupportedHere(Exception):
    """A figure that this package, or the installed software, does not support on this device."""


@dataclasses.dataclass(frozen=True)
class ReportSetup:
    """The options of the report; all go into its record.

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
        if not self.tiny:
            return config
        # The smallest that a TPU's kernel of a draft step takes.
        widths = dict(vocab_size=512, emb_dim=128, head_dim=64, mlp_dim=128)
        return config.replace(num_heads=2, num_decoder_layers=2, **widths)

    def ids(self, rows: int, vocab_size: int) -> np.ndarray:
        """Returns random inputs `[rows, L]`."""
        return np.random.default_rng(0).integers(2, vocab_size, (rows, self.input_length), np.int32)

    def shape(self, target: LanguageModel, more: int = 0) -> CallShape:
        """Returns the shape of calls of one row, whose caches have `more` slots than needed."""
        slots = timing.total_slots(target, self.input_length, self.max_new_tokens, max(self.widths))
        return CallShape(1, self.input_length, slots + more)


class ModelPair(NamedTuple):
    """A target and a drafter for it; both None where a figure needs none."""

    target: Any = None
    drafter: Any = None


class TimedFigure(NamedTuple):
    """One figure: a call that is timed.

    Attributes:
      name: unique name.
      about: the fields of the figure's record besides the measured ones.
      program: name of the program that it runs; of figures with the same, one alone compiles.
      variant: makes the call.
      read: returns the measured fields, given the seconds of one call, the result of the last call,
        and the earlier figures.
    """

    name: str
    about: dict[str, Any]
    program: str
    variant: Callable[[ModelPair], Callable[[], Any]]
    read: Callable[[Spread, Any, Lines], dict[str, Any]]


class Peer(NamedTuple):
    """Another library that decodes, taking the argmax.

    Attributes:
      load: loads the models that `decode` needs, or raises `UnsupportedHere`.
      decode: returns, for the models, a call that returns the new tokens `[1, max_new_tokens]`.
      free: frees what is left when the figure is measured.
    """

    load: Callable[[ReportSetup, str], ModelPair]
    decode: Callable[[ReportSetup, str, ModelPair], Callable[[], np.ndarray]]
    free: Callable[[], Any] = gc.collect


def _scale(seconds: Spread, factor: float) -> dict[str, float]:
    return Spread(*(factor * one for one in seconds))._asdict()


def _ratio(name: str, above: Lines, below: Lines) -> dict[str, float]:
    """Returns the ratio of two figures' medians under `name`; nothing if one has none."""
    if "milliseconds" not in above or "milliseconds" not in below:
        return {}
    return {name: above["milliseconds"]["median"] / below["milliseconds"]["median"]}


def _read_steps(
    seconds: Spread,
    result: Any,
    before: Lines,
    ratio: str = "",
    beside: str = "",
    weights: bool = False,
) -> dict[str, Any]:
    """Returns the fields of a figure of single steps.

    Args:
      seconds, result, before: as for `TimedFigure.read`.
      ratio: name of the ratio to the figure `beside`; empty: none.
      beside: name of a figure before.
      weights: whether `result` is from `_with_bytes`; then there are the bytes of the weights, and
        the time of reading them at the measured bandwidth.
    """
    found: dict[str, Any] = {"milliseconds": _scale(seconds, 1e3 / STEPS)}
    if ratio:
        found |= _ratio(ratio, found, before.get(beside, {}))
    if weights:
        found["bytes"] = result[1]
        bandwidth = before.get("copy", {}).get("gb_per_second")
        found |= {"floor_ms": result[1] / bandwidth / 1e6} if bandwidth else {}
    return found


def copy(setup: ReportSetup) -> TimedFigure:
    """Returns the figure of the bandwidth.

    It times copies in place, many in one program, so that launching it does not count.
    """
    size = _COPIED_TINY if setup.tiny else _COPIED

    def variant(_: ModelPair) -> Callable[[], jax.Array]:
        kept = [jnp.ones(size // 4, jnp.int32)]

        def call() -> jax.Array:
            kept[0] = copies(kept[0])
            return kept[0]

        return call

    def read(seconds: Spread, _: Any, before: Lines) -> dict[str, Any]:
        bandwidth = 2 * size * _COPIES / 1e9 / max(seconds.least, 1e-9)
        return {"milliseconds": _scale(seconds, 1e3 / _COPIES), "gb_per_second": bandwidth}

    about = {"kind": "copy", "megabytes": size / 1e6, "copies": _COPIES}
    return TimedFigure("copy", about, "copy", variant, read)


@functools.partial(jax.jit, donate_argnums=0)
def copies(numbers: jax.Array) -> jax.Array:
    """Reads and writes an array several times.

    The barrier keeps a compiler that unrolls the passes from joining them. The array is donated, so
    that it is not copied once more.
    """

    def one_pass(_: jax.Array, numbers: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier(numbers + 1)

    return jax.lax.fori_loop(0, _COPIES, one_pass, numbers)


def _with_bytes(network: Network, call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns `call` with the bytes of the weights of `network` beside its result."""
    size = Products.from_network(network).nbytes
    return lambda: (call(), size)


def calls(setup: ReportSetup, preset: str) -> list[TimedFigure]:
    """Returns the figures of bare products, draft steps and target calls over several positions."""

    def products(pair: ModelPair) -> Callable[[], Any]:
        network = pair.target.network
        return _with_bytes(network, products_variants(network, 1)["products"])

    about = {"target": preset, "batch": 1, "kind": "products"}
    read = functools.partial(_read_steps, weights=True)
    return [
        *(_call(setup, preset, width) for width in sorted({1, *setup.widths})),
        _draft_step(setup, preset),
        TimedFigure(f"{preset}, products", about, "products", products, read),
    ]


def _call(setup: ReportSetup, preset: str, width: int, kind: str = "") -> TimedFigure:
    """Returns the figure of a target call.

    With `kind` "int8 " the target is in int8, and the call is compared with the full target's.
    """
    full = f"{preset}, call over {width}"
    name = full if not kind else f"{preset}, int8, call over {width}"

    def variant(pair: ModelPair) -> Callable[[], Any]:
        network = pair.target.network
        call = timing.step_variant(network, setup.shape(pair.target), width)
        return _with_bytes(network, call) if width == 1 else call

    def read(seconds: Spread, result: Any, before: Lines) -> dict[str, Any]:
        ratio, other = ("over_full", full) if kind else ("v", f"{preset}, call over 1")
        found = _read_steps(seconds, result, before, ratio, other, weights=width == 1)
        return found | ({"v": 1.0} if width == 1 and not kind else {})

    about = {"kind": f"{kind}call", "target": preset, "batch": 1, "width": width}
    return TimedFigure(name, about, name, variant, read)


def _draft_step(setup: ReportSetup, preset: str, drafter: str = "") -> TimedFigure:
    """Returns the figure of a step of the pair's drafter; the usual one has no name."""

    def variant(pair: ModelPair) -> Callable[[], Any]:
        network, shape = pair.drafter.steps()["draft step"], setup.shape(pair.target)
        width = timing.draft_width(network, shape)
        step = timing.step_variant(network, shape, width, step_loops.draft_steps)
        return _with_bytes(network, step)

    read = functools.partial(_read_steps, ratio="c", beside=f"{preset}, call over 1", weights=True)
    name = ", ".join(filter(None, (preset, drafter, "draft step")))
    about = {"target": preset, "batch": 1, "kind": f"{drafter} draft step".strip()}
    return TimedFigure(name, about, "draft step", variant, read)


def decodes(setup: ReportSetup, preset: str, batch: int, kind: str = "") -> list[TimedFigure]:
    """Returns the figures of whole decodes of `batch` rows: plain, and with each synthetic α.

    With `kind` "int8 " the target is in int8, and compared with the full target's plain decoding.
    """
    full, model = f"{preset}, plain, batch {batch}", f"{preset}, int8" if kind else preset
    plain = f"{model}, plain, batch {batch}"
    about = {"target": preset, "batch": batch}

    def read(seconds: Spread, result: Any, before: Lines, alone: str = "") -> dict[str, Any]:
        found = _read_decode(seconds, result, before, alone)
        return found | (_ratio("over_full_plain", before.get(full, {}), found) if kind else {})

    def synthetic(alpha: float) -> TimedFigure:
        return TimedFigure(
            f"{model}, alpha {alpha:g}, batch {batch}",
            about | {"kind": f"{kind}speculative", "alpha": alpha, "gamma": setup.gamma},
            f"speculative {batch}",
            _synthetic_variant(setup, batch, alpha),
            functools.partial(read, alone=plain),
        )

    variant, about_plain = _decode_variant(setup, batch, {}), about | {"kind": f"{kind}plain"}
    return [
        TimedFigure(plain, about_plain, f"plain {batch}", variant, read),
        *map(synthetic, setup.alphas),
    ]


def _synthetic_variant(setup: ReportSetup, batch: int, alpha: float) -> Callable:
    how = dict(gamma=setup.gamma, verifier=SYNTHETIC.name, synthetic_alpha=alpha)
    return _decode_variant(setup, batch, how, drafts=True)


def _decode_variant(
    setup: ReportSetup, batch: int, how: Mapping[str, Any], drafts: bool = False
) -> Callable[[ModelPair], Callable[[], GenerationResult]]:
    """Returns the `variant` of a figure that decodes a batch, its encoder included."""

    def variant(pair: ModelPair) -> Callable[[], GenerationResult]:
        ids = setup.ids(batch, pair.target.config.vocab_size)
        drafter = {"drafter": pair.drafter} if drafts else {}
        options = dict(max_new_tokens=setup.max_new_tokens, **drafter, **how)
        return lambda: generate(pair.target, ids, **options)

    return variant


def _read_decode(
    seconds: Spread, result: GenerationResult, before: Lines, alone: str = ""
) -> dict[str, Any]:
    """Returns the milliseconds of a token of a row and of an iteration.

    With the name of the figure of plain decoding, there is the improvement over it too.
    """
    found = _read_tokens(seconds, result.lengths)
    if result.stats is None:
        return found
    calls = max(row.target_calls for row in result.stats.per_row or (result.stats,))
    found["iteration_ms"] = 1e3 * seconds.median / calls
    return found | _ratio("improvement", before.get(alone, {}), found)


def _read_tokens(seconds: Spread, lengths: np.ndarray) -> dict[str, Any]:
    """Returns the milliseconds of a token of a row, and the tokens of all rows per second."""
    return {
        "milliseconds": _scale(seconds, 1e3 / float(np.mean(lengths))),
        "tokens_per_second": float(lengths.sum()) / seconds.median,
    }


def searches(setup: ReportSetup, preset: str) -> list[TimedFigure]:
    """Returns the figures of a tree's calls and iterations, and of plain and drafted beam search.

    With random weights hardly any drafted token is accepted: the figure is the time of an
    iteration.
    """
    tree = read_tree(setup.tree)

    def nodes(pair: ModelPair) -> Callable[[], object]:
        return timing.tree_variant(pair.target.network, setup.shape(pair.target, tree.size), tree)

    over_nodes = functools.partial(_read_steps, ratio="v", beside=f"{preset}, call over 1")
    decode = functools.partial(_decode_variant, setup, 1)
    beams = dict(num_beams=setup.num_beams)
    drafted = beams | dict(gamma=setup.levels)
    kinds: dict[str, tuple[Callable, Callable]] = {
        "tree call": (nodes, over_nodes),
        "tree": (decode(dict(tree=tree), drafts=True), _read_decode),
        "beams": (decode(beams), _read_decode),
        "drafted beams": (decode(drafted, drafts=True), _read_decode),
    }
    about = {"target": preset, "batch": 1}
    return [
        TimedFigure(f"{preset}, {kind}", about | {"kind": kind}, kind, variant, read)
        for kind, (variant, read) in kinds.items()
    ]


def rounded(setup: ReportSetup, preset: str) -> list[TimedFigure]:
    """Returns the figures of a target in int8: calls over one and γ + 1 positions, and decodes."""
    wide = (_call(setup, preset, width, "int8 ") for width in (1, setup.gamma + 1))
    return [*wide, *decodes(setup, preset, 1, "int8 ")]


def drafted_by_itself(setup: ReportSetup, preset: str) -> list[TimedFigure]:
    """Returns the figures of a target for which its own weights in int8 draft.

    How often dummy weights agree means nothing, so the acceptance is synthetic.
    """
    about = {"target": preset, "batch": 1, "kind": "self:int8"}
    about |= {"alpha": _OWN_ALPHA, "gamma": setup.gamma, "acceptance": "synthetic"}
    name = f"{preset}, self:int8, alpha {_OWN_ALPHA:g}, batch 1"
    variant = _synthetic_variant(setup, 1, _OWN_ALPHA)
    read = functools.partial(_read_decode, alone=f"{preset}, plain, batch 1")
    return [
        _draft_step(setup, preset, "self:int8"),
        TimedFigure(name, about, "self:int8", variant, read),
    ]


def beside(setup: ReportSetup, preset: str, name: str, peer: Peer) -> TimedFigure:
    """Returns the figure of another library's argmax decoding."""
    alone = f"{preset}, plain, batch 1"

    def variant(pair: ModelPair) -> Callable[[], np.ndarray]:
        return peer.decode(setup, preset, pair)

    def read(seconds: Spread, tokens: np.ndarray, before: Lines) -> dict[str, Any]:
        if tokens.shape != (1, setup.max_new_tokens):
            raise ValueError(f"tokens: got {tokens.shape}, expected (1, {setup.max_new_tokens})")
        found = _read_tokens(seconds, np.array([tokens.size]))
        return found | _ratio("improvement", before.get(alone, {}), found)

    about = {"kind": name, "target": preset, "batch": 1}
    return TimedFigure(f"{preset}, {name}, plain", about, name, variant, read)
