"""Lists what scripts/accelerator_report.py measures on a device, in its order, and loads the
models."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

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
from tools.accelerator_figures import Against, Figure, NotHere, Pair, Setup


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
    first, *rest = setup.batches

    def each(
        kind: str, of: Callable[[Setup, str], list[Figure]], load=_load, name: str | None = None
    ) -> list[Stage]:
        def loads(preset):
            return lambda: load(setup, preset)

        return [
            Stage(f"{preset}: {name or kind}", kind, of(setup, preset), loads(preset))
            for preset in targets
        ]

    def calls(setup, preset):
        return figures.calls(setup, preset) + figures.decodes(setup, preset, first)

    def decodes(batch):
        return lambda setup, preset: figures.decodes(setup, preset, batch)

    def beside(name, decode):
        return lambda setup, preset: [figures.beside(setup, preset, name, decode)]

    return [
        Stage("copies", "copies", [figures.copy(setup)], Pair),
        *each("calls", calls, _load_for_calls, f"calls and batch {first}"),
        *(stage for batch in rest for stage in each(f"batch {batch}", decodes(batch))),
        *each("searches", figures.searches, name="tree and beams"),
        *each("int8", figures.rounded, _load_rounded),
        *(
            stage
            for name, decode in against.items()
            for stage in each(name, beside(name, decode), _load if decode else _missing(name))
        ),
        *each("self:int8", figures.drafted_by_itself, _load_for_itself),
    ]


def _fill(setup: Setup, preset: str, quantize: str | None = None) -> LanguageModel:
    return LanguageModel.dummy(setup.config(preset), name=preset, eos_ids=(), quantize=quantize)


def _load(setup: Setup, preset: str) -> Pair:
    return Pair(_fill(setup, preset), ModelDrafter(_fill(setup, setup.drafter)))


def _load_for_calls(setup: Setup, preset: str) -> Pair:
    pair = _load(setup, preset)
    _prefill(setup, pair.target, pair.target.network, pair.drafter.network)
    return pair


def _load_rounded(setup: Setup, preset: str) -> Pair:
    try:
        packed_weights.check_quantize("int8", setup.dtype, False)
    except ValueError as error:
        raise NotHere(str(error)) from None
    pair = Pair(_fill(setup, preset, "int8"), ModelDrafter(_fill(setup, setup.drafter)))
    _prefill(setup, pair.target, pair.target.network)
    return pair


def _load_for_itself(setup: Setup, preset: str) -> Pair:
    target = _fill(setup, preset)
    return Pair(target, SelfDrafter(target))


def _prefill(setup: Setup, target: LanguageModel, *networks: Network) -> None:
    """Compiles what makes the caches of calls, lest every call's program does it again."""
    for network in networks:
        jax.block_until_ready(
            timing.prefill_variant(network, 1, setup.input_length, figures.room(setup, target))()
        )


def _missing(name: str) -> Callable[[Setup, str], Pair]:
    def load(*_) -> Pair:
        raise NotHere(f"{name} is not installed")

    return load
