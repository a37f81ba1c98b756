"""Prints what a run inside T5X decodes with and how it went; rejects misplaced gin files."""

import atexit
import copy
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import gin
import jax
import numpy as np

from specdec_jax.speculative.sampling import SamplingConfig

CLASS = "SpeculativeEncoderDecoderModel"
_THEIRS = "models.EncoderDecoderModel"
# Arguments of T5X's class that are about decoding; a model's own gin file binds the others.
_DECODING = (
    *("decode_fn", "default_decoder_params", "num_decodes", "return_all_decodes"),
    *("decoder_params", "prompt_with_targets", "feature_converter_cls"),
)
_LOSS = ("label_smoothing", "z_loss", "loss_normalizing_factor")  # those about training
_OPTIONS, _CALL = "GenerationConfig", "predict_batch_with_aux"
# Of the gin configuration that was read last: what has no effect; what is bound to calls; and, by
# name, what is bound about the loss to T5X's class alone.
_ignored: list[str] = []
_calls: dict[str, Any] = {}
_losses: dict[str, Any] = {}


def check_gin(config: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
    """Checks a whole gin configuration; gin calls it when the last file is read.

    Raises:
      ValueError: this package's model is configured, but nothing makes it.
    """
    found = [
        (selector, name, value)
        for (_, selector), names in config.items()
        for name, value in names.items()
    ]
    values = [(selector, name) for selector, name, _ in found]
    bound = [name for selector, name in values if _is_of(selector, CLASS)]
    references = list(_list_references(config))
    if bound and not any(_is_of(selector, CLASS) for selector in references):
        raise ValueError(
            f"{CLASS}: got values for {', '.join(sorted(set(bound)))}, but no MODEL that is one, "
            "so that T5X would decode without it; expected --gin_file=t5x/speculative.gin after "
            "the model's own file, which sets MODEL too"
        )
    theirs = {
        name: value
        for selector, name, value in found
        if bound and _is_of(selector, "EncoderDecoderModel")
    }
    _ignored[:] = []
    if names := [f"{_THEIRS}.{name}" for name in sorted(theirs) if name in _DECODING]:
        _ignored.append(f"{', '.join(names)}, which is T5X's own class's (bind it to {CLASS})")
    options = {name for selector, name in values if _is_of(selector, _OPTIONS)}
    if bound and options and not any(_is_of(selector, _OPTIONS) for selector in references):
        names = [f"{_OPTIONS}.{name}" for name in sorted(options)]
        _ignored.append(f"{', '.join(names)} (bind CONFIG = @generation_config.{_OPTIONS}())")
    calls = {
        name: value
        for selector, name, value in found
        if _is_of(selector, CLASS) and _is_of(selector, _CALL)
    }
    for kept, now in (
        (_calls, calls),
        (_losses, {name: theirs[name] for name in _LOSS if name in theirs.keys() - set(bound)}),
    ):
        kept.clear()
        kept.update(now)


def _is_of(selector: str, name: str) -> bool:
    """Returns whether a gin selector names the class `name` or one of its methods."""
    return name in selector.split(".")


def _list_references(value: Any) -> Iterator[str]:
    """Yields the selectors of all configurables that a configuration's values refer to."""
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _list_references(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _list_references(inner)
    elif isinstance(value, gin.config.ConfigurableReference):
        yield value.configurable.selector


def check_losses(ours: Mapping[str, Any]) -> None:
    """Raises ValueError if T5X's class would train with other settings of the loss than `ours`."""
    for name, value in _losses.items():
        theirs = copy.deepcopy(value)  # gin evaluates a macro so
        if theirs != ours[name]:
            raise ValueError(
                f"{name}: got {ours[name]!r} for {CLASS} and {theirs!r} for {_THEIRS}, expected "
                "one for both in training (bind it to both)"
            )


@functools.cache
def say(text: str) -> None:
    """Prints a line to standard error, once, and only in the first of several processes."""
    if jax.process_index() == 0:
        print(f"specdec_jax: {text}", file=sys.stderr, flush=True)


def describe(
    drafter: Any,
    gamma: Any,
    verifier: object,
    decode_fn: str | None,
    bound: Mapping[str, Any],
    sampling: SamplingConfig,
) -> str:
    """Returns the line about what decodes.

    `decode_fn` is the name of T5X's function that is meant, with the arguments that are `bound` to
    it; None: none was named.
    """
    what = "nothing drafts" if drafter is None else f"drafter {drafter.name}, gamma {gamma}"
    parts = (
        [what] if decode_fn == "beam_search" or drafter is None else [what, f"verifier {verifier}"]
    )
    given = ", ".join(f"{name}={value!r}" for name, value in bound.items() if not callable(value))
    if decode_fn is not None:
        parts.append(f"decodes as T5X's {decode_fn}({given})")
    else:
        temperature = np.max(sampling.temperature)  # a list of one is allowed too
        how = f"samples at temperature {temperature:g}" if temperature else "decodes the argmax"
        parts.append(
            f"{how}, where T5X's default is a beam search with one beam, "
            "which may prefer another output (decode_fn = @decoding.beam_search does so here)"
        )
    if _calls:
        given = ", ".join(f"{name}={value!r}" for name, value in _calls.items())
        parts.append(f"calls have {given}, which comes first")
    parts += [f"of no effect here: {names}" for names in _ignored]
    return "; ".join(parts)


@dataclasses.dataclass
class Totals:
    """What all batches of a process came to; printed when it ends."""

    what: str = "tokens"
    batches: int = 0
    counts: tuple[int, ...] = (0, 0, 0)

    def add(self, target_calls: Any, drafted: Any, accepted: Any) -> None:
        """Adds the sums of one batch."""
        if not self.batches:
            atexit.register(self.finish)
        self.batches += 1
        added = (int(np.asarray(count)) for count in (target_calls, drafted, accepted))
        self.counts = tuple(old + new for old, new in zip(self.counts, added))

    def finish(self) -> None:
        """Prints the line about the end, once all batches are counted."""
        jax.effects_barrier()
        say(self.text())

    def text(self) -> str:
        """Returns the line about the end."""
        calls, drafted, accepted = self.counts
        rate = f"{accepted / drafted:.1%} of them" if drafted else "none"
        each = f"{accepted / max(calls, 1):.2f} a call"
        return (
            f"{self.batches} batches, rows that fill them up included: {calls:,} target calls; "
            f"{drafted:,} drafted {self.what}, {accepted:,} accepted ({rate}, {each})"
        )


TOTALS = {what: Totals(what) for what in ("tokens", "levels")}


def count(decoded: Any, what: str) -> None:
    """Adds what a traced batch came to, when it runs, to the totals of `what`."""
    sums = (
        jax.numpy.sum(counts)
        for counts in (decoded.target_calls, decoded.drafted, decoded.accepted)
    )
    jax.debug.callback(TOTALS[what].add, *sums)


gin.config.register_finalize_hook(check_gin)
