"""Lists the stages of scripts/accelerator_report.py in their order, and loads the models."""

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from specdec_jax.analysis import timing
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.models.parameters import parameter_count
from tools import accelerator_figures as figures
from tools.accelerator_figures import ModelPair, Peer, ReportSetup, TimedFigure, UnsupportedHere


class Stage(NamedTuple):
    """Figures whose programs compile side by side, and share their models.

    Attributes:
      name: unique name.
      kind: the same for the stages of all targets with the same figures.
      figures: the figures.
      load: loads the models, or raises `UnsupportedHere`.
      free: frees the models when nothing refers to them any more.
    """

    name: str
    kind: str
    figures: list[TimedFigure]
    load: Callable[[], ModelPair]
    free: Callable[[], Any] = gc.collect


def _fill(setup: ReportSetup, preset: str, quantize: str | None = None) -> LanguageModel:
    return LanguageModel.dummy(setup.config(preset), name=preset, eos_ids=(), quantize=quantize)


def load_pair(setup: ReportSetup, preset: str) -> ModelPair:
    """Returns the target and the drafter with dummy weights."""
    return ModelPair(_fill(setup, preset), ModelDrafter(_fill(setup, setup.drafter)))


def _load_for_calls(setup: ReportSetup, preset: str) -> ModelPair:
    pair = load_pair(setup, preset)
    _prefill(setup, pair.target, pair.target.network, pair.drafter.network)
    return pair


def _load_rounded(setup: ReportSetup, preset: str) -> ModelPair:
    try:
        packed_weights.check_quantize("int8", setup.dtype, False)
    except ValueError as error:
        raise UnsupportedHere(str(error)) from None
    pair = ModelPair(_fill(setup, preset, "int8"), ModelDrafter(_fill(setup, setup.drafter)))
    _prefill(setup, pair.target, pair.target.network)
    return pair


def _load_for_itself(setup: ReportSetup, preset: str) -> ModelPair:
    target = _fill(setup, preset)
    return ModelPair(target, SelfDrafter(target))


def _prefill(setup: ReportSetup, target: LanguageModel, *networks: Network) -> None:
    """Compiles the prefill of calls once, lest every call's program compiles it again."""
    for network in networks:
        jax.block_until_ready(timing.prefill_variant(network, setup.shape(target))())


Loader = Callable[[ReportSetup, str], ModelPair]


def stages(setup: ReportSetup, peers: Mapping[str, Peer]) -> list[Stage]:
    """Returns all stages: the most important kinds first, and smaller targets before larger ones.

    Args:
      setup: the options of the report.
      peers: other libraries by name.
    """
    targets = sorted(setup.targets, key=lambda preset: parameter_count(PRESETS[preset]))
    first, *rest = setup.batches
    found = [Stage("copies", "copies", [figures.copy(setup)], ModelPair)]

    def add(
        kind: str,
        made: Callable[..., list],
        load: Loader = load_pair,
        name: str = "",
        free: Callable[[], Any] = gc.collect,
    ) -> None:
        for preset in targets:
            loaded, about = functools.partial(load, setup, preset), f"{preset}: {name or kind}"
            found.append(Stage(about, kind, made(setup, preset), loaded, free))

    def calls(setup: ReportSetup, preset: str) -> list[TimedFigure]:
        return figures.calls(setup, preset) + figures.decodes(setup, preset, first)

    add("calls", calls, _load_for_calls, f"calls and batch {first}")
    for batch in rest:
        add(f"batch {batch}", functools.partial(figures.decodes, batch=batch))
    add("searches", figures.searches, name="tree and beams")
    add("int8", figures.rounded, _load_rounded)
    for name, peer in peers.items():
        beside = functools.partial(figures.beside, name=name, peer=peer)
        add(name, lambda *args, made=beside: [made(*args)], peer.load, free=peer.free)
    add("self:int8", figures.drafted_by_itself, _load_for_itself)
    return found
