"""`specdec demo`: speculative decoding as one can see it, after the paper's Figure 1, and the time it takes."""

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax import measure, traces
from specdec_jax.draws import seeded
from specdec_jax.generate import GenerationResult, generate, trace
from specdec_jax.options import DecodingOptions, at_least, check_gamma, option
from specdec_jax.progress import track
from specdec_jax.request import fold_keys
from specdec_jax.sentences import SENTENCES, check_text, encode

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
        self.gamma_of(self.gamma)


def run(options: DemoOptions, arguments: Sequence[str]) -> None:
    """`specdec demo`: a trace of every sentence, then the wall time of plain and speculative decoding."""
    options.check()
    check_text("sentence", arguments)
    sentences = list(arguments) or list(SENTENCES)
    target, drafter = options.load()
    encode(target, sentences, options.max_input_length)
    keys = fold_keys(seeded(options.seed), np.arange(len(sentences)))
    speculative = dict(drafter=drafter, gamma=options.gamma_of(options.gamma), **options.decoding())
    console = Console()
    colours = console.is_terminal and "NO_COLOR" not in os.environ
    show = lambda parts: console.print(render(parts, colours), soft_wrap=True)
    show([("committed", "drafted tokens: "), ("accepted", "accepted"), ("committed", ", "), ("rejected", "rejected"),
          ("committed", "; by the target: "), ("corrected", "corrected")])  # fmt: skip
    for number, sentence in enumerate(sentences):
        steps = trace(target, sentence, key=keys[number : number + 1], **speculative)
        console.print(Text(f"\n{sentence}"), soft_wrap=True)
        for parts in traces.lines(steps, target):
            show(parts)
    print(file=sys.stdout)
    decode = lambda number, **how: generate(target, [sentences[number]], key=keys[number : number + 1], **how)
    arms: dict[str, Callable[[int], GenerationResult]] = {
        "plain": lambda number: decode(number, **options.decoding(plain=True)),
        "speculative": lambda number: decode(number, **speculative),
    }
    print(comparison(arms, [number for number, text in enumerate(sentences) if text.strip()], options.repeats))


def render(parts: Sequence[tuple[str, str]], colours: bool) -> Text:
    """A line with styles, or with marks; leading spaces stay outside of both."""
    line = Text()
    for kind, text in parts:
        space = text[: len(text) - len(text.lstrip(" "))]
        line.append(space)
        body = text[len(space) :]
        line.append(body, _STYLES[kind]) if colours else line.append(_MARKS[kind].format(body))
    return line


def comparison(arms, numbers: Sequence[int], repeats: int) -> str:
    """Wall time of both arms on the same sentences, interleaved, after a warm-up that compiles every shape.

    Args:
      arms: from the number of a sentence to its result, "plain" and "speculative".
      numbers: of the sentences that have anything to decode.
      repeats: passes.
    """
    if not numbers:
        return "nothing to time: no sentence has any text"
    for number in track(numbers, len(numbers), "compiling"):
        for arm in arms.values():
            arm(number)
    seconds: dict[str, list[float]] = {name: [0.0] * repeats for name in arms}
    results: dict[str, list[GenerationResult]] = {}
    for repeat in range(repeats):
        results = {name: [] for name in arms}
        for number in track(numbers, len(numbers), f"pass {repeat + 1} of {repeats}"):
            for name in measure.rotated(arms, repeat + number):
                start = time.perf_counter()
                results[name].append(arms[name](number))
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
