"""`specdec demo`: speculative decoding as one can see it, after the paper's Figure 1, and the time it takes."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax import measure
from specdec_jax.generate import GenerationResult, TraceStep, generate, trace
from specdec_jax.inference import SENTENCES, DecodingOptions, at_least, check_gamma, encode, option
from specdec_jax.models.base import LanguageModel

# Styles in a terminal, and marks where there are no colours (those of wdiff).
_STYLES = {"committed": "dim", "accepted": "green", "rejected": "red strike", "corrected": "blue bold"}
_MARKS = {"committed": "{}", "accepted": "{}", "rejected": "[-{}-]", "corrected": "{{+{}+}}"}


@dataclasses.dataclass(frozen=True)
class DemoOptions(DecodingOptions):
    """Options of `specdec demo`."""

    target: str | None = option(
        "ende/target", "the model whose outputs are wanted: a checkpoint's folder or a bundled name"
    )
    drafter: str | None = option("ende/drafter", "the smaller model that drafts")
    gamma: int = option(4, "tokens drafted per target call")
    repeats: int = option(3, "timed passes over the sentences")

    def check(self) -> None:
        super().check()
        if not self.drafter:
            raise ValueError("drafter: got nothing, expected a checkpoint's folder or a bundled name")
        check_gamma(self.gamma)
        at_least(1, repeats=self.repeats, gamma=self.gamma)


def run(options: DemoOptions, arguments: Sequence[str]) -> None:
    """`specdec demo`: a trace of every sentence, then the wall time of plain and speculative decoding."""
    options.check()
    sentences = list(arguments) or list(SENTENCES)
    target, drafter = options.load()
    encode(target, sentences, options.max_input_length)
    decoding = options.decoding()
    console = Console()
    colours = console.is_terminal and "NO_COLOR" not in os.environ
    show = lambda parts: console.print(render(parts, colours), soft_wrap=True)
    show([("committed", "drafted tokens: "), ("accepted", "accepted"), ("committed", ", "), ("rejected", "rejected"),
          ("committed", "; by the target: "), ("corrected", "corrected")])  # fmt: skip
    for sentence in sentences:
        steps = trace(target, sentence, drafter=drafter, gamma=options.gamma, **decoding)
        console.print(Text(f"\n{sentence}"), soft_wrap=True)
        for parts in trace_lines(steps, target):
            show(parts)
    print(file=sys.stdout)
    arms: dict[str, Callable[[str], GenerationResult]] = {
        "plain": lambda text: generate(target, [text], **options.decoding(plain=True)),
        "speculative": lambda text: generate(target, [text], drafter=drafter, gamma=options.gamma, **decoding),
    }
    print(comparison(arms, sentences, options.repeats))


def trace_lines(steps: Sequence[TraceStep], target: LanguageModel) -> list[list[tuple[str, str]]]:
    """One line per target call: (kind, text) of what was committed before, accepted, rejected and corrected."""
    lines, committed = [], ""
    for step in steps:
        accepted = "".join(_surface(token, target) for token in step.accepted)
        rejected = "" if step.rejected is None else _surface(step.rejected, target)
        corrected = "" if step.corrected is None else _surface(step.corrected, target)
        parts = [("committed", committed), ("accepted", accepted), ("rejected", rejected), ("corrected", corrected)]
        lines.append([(kind, text) for kind, text in parts if text])
        committed += accepted + corrected
    return lines


def _surface(token: int, target: LanguageModel) -> str:
    return " [END]" if token in target.eos_ids else target.vocabulary.piece(token)


def render(parts: Sequence[tuple[str, str]], colours: bool) -> Text:
    """A line with styles, or with marks; leading spaces stay outside of both."""
    line = Text()
    for kind, text in parts:
        space = text[: len(text) - len(text.lstrip(" "))]
        line.append(space)
        body = text[len(space) :]
        line.append(body, _STYLES[kind]) if colours else line.append(_MARKS[kind].format(body))
    return line


def comparison(arms, sentences: Sequence[str], repeats: int) -> str:
    """Wall time of both arms on the same sentences, interleaved, after a warm-up that compiles every shape."""
    for text in sentences:
        for arm in arms.values():
            arm(text)
    seconds: dict[str, list[float]] = {name: [0.0] * repeats for name in arms}
    results: dict[str, list[GenerationResult]] = {}
    for repeat in range(repeats):
        results = {name: [] for name in arms}
        for index, text in enumerate(sentences):
            for name in measure.rotated(arms, repeat + index):
                start = time.perf_counter()
                results[name].append(arms[name](text))
                seconds[name][repeat] += time.perf_counter() - start
    tokens = {name: int(sum(result.lengths.sum() for result in results[name])) for name in arms}
    calls = sum(result.stats.target_calls for result in results["speculative"])
    per_token = {name: np.array(seconds[name]) / tokens[name] for name in arms}
    ratio = measure.Spread.of(per_token["plain"] / per_token["speculative"])
    lines = [f"{name:<12} {np.median(seconds[name]):7.3f} s  {tokens[name]} tokens" for name in arms]
    return "\n".join([
        *lines,
        f"ratio        {ratio.median:7.2f}    ({ratio.least:.2f} to {ratio.most:.2f} over {repeats} passes)",
        f"tokens per target call {tokens['speculative'] / calls:.2f}",
    ])  # fmt: skip
