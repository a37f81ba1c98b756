"""Runs `specdec demo`: shows speculative decoding call by call, and times it."""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax.analysis import machine, traces, tree_drawing
from specdec_jax.analysis.report import plots
from specdec_jax.analysis.report.records import write_record
from specdec_jax.analysis.variants import SentenceBatch, Variant, make_decoder, time_passes, warm_up
from specdec_jax.backends.cpu import native
from specdec_jax.commands.generation_flags import check_gamma, make_flag
from specdec_jax.commands.options import DecodingOptions, check_at_least
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.decoding import request
from specdec_jax.decoding.checks import unsupported
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.trace import TraceStep, trace
from specdec_jax.decoding.trees import check_beside_tree
from specdec_jax.files.progress import show_waiting
from specdec_jax.files.reading import mismatch_error
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.adaptive_gamma import MAXIMUM
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import MAX_GAMMA
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.tree_text import EXPECTED, read_tree
from specdec_jax.speculative.trees import LOSSY_TREES, DynamicTree, Tree
from specdec_jax.speculative.verifiers import find_verifier
from specdec_jax.tokenizers.vocabularies import check_texts

# Styles in a terminal; marks where there are no colours (wdiff's, and one for the bonus).
_STYLES = {
    "committed": ("dim", "{}"),
    "accepted": ("green", "{{={}=}}"),
    "rejected": ("red strike", "[-{}-]"),
    "corrected": ("blue bold", "{{+{}+}}"),
    "bonus": ("cyan bold", "{{*{}*}}"),
}
# γ is a number here, so that there is something to see: "auto" drafts nothing where that would not
# pay.
_GAMMA = 4
_COLUMNS = 112  # width of the picture in characters
_COLUMNS_OF_A_TREE = (
    "sees: the drafted tokens (■) that a token attends to, beside all committed ones;\n"
    "p, q: its probability by the target and by the drafter, at temperature 0 as if it were 1"
)
_SENTENCES = 8  # how many of the built-in sentences are shown
_NEXT = """
next: specdec demo "A sentence of your own."
      specdec generate --help      decodes files, with models of your own
      specdec benchmark --help     times a pair carefully, with acceptance rate and bottleneck"""


@document_fields
@dataclasses.dataclass(frozen=True)
class DemoOptions(DecodingOptions):
    """Options of `specdec demo`.

    Attributes:
      target: model whose output you want: a checkpoint's folder or a bundled name
      drafter: smaller model that drafts, or another drafter (`specdec generate --help` lists them)
      trace: draw every target call, with p, q and p/q of each drafted token: its probability by the
        target and by the drafter
      plot: file for a figure of one call's tree and mask: .png, .pdf or .svg
      picture: SVG file to write, a picture of the terminal in colour
      output: file to write a JSON record of the calls to, with the drawn tree, for `specdec
        figures`
    """

    target: str | None = "ende/target"
    drafter: str | None = "ende/drafter"
    gamma: int | str | None = make_flag("gamma", None, f"{_GAMMA}; with --tree all of its nodes")
    tree: str | None = make_option(
        None,
        f"token tree to draft instead of a chain; one target call is drawn as a tree: {EXPECTED}",
    )
    trace: bool = False
    plot: str | None = None
    repeats: int = make_option(3, "timed passes over the sentences")
    picture: str | None = None
    output: str | None = None

    def check(self) -> None:
        super().check()
        if not self.drafter:
            raise mismatch_error("drafter", "nothing", "a checkpoint's folder or a bundled name")
        gamma, tree = self.max_drafted, self.parse_tree()
        check_gamma(gamma, MAX_GAMMA if tree is None else tree.size - 1)
        check_beside_tree(tree, self.verifier)
        check_at_least(1, repeats=self.repeats, gamma=1 if isinstance(gamma, str) else gamma)
        self.gamma_of(gamma, tree)
        if self.plot:
            if not (self.tree or self.trace):
                raise unsupported("plot", f"{self.plot!r} without a tree", "--tree or --trace too")
            plots.check(self.plot)
        if self.picture and not self.picture.endswith(".svg"):
            expected = "the name of a file that ends in .svg"
            raise ValueError(f"picture: got {self.picture!r}, expected {expected}")
        check_output(self.picture, "picture")
        check_output(self.output)

    @property
    def max_drafted(self) -> int | str:
        """γ, or the most nodes of a tree."""
        if self.gamma is not None:
            return self.gamma
        return _GAMMA if self.tree is None else "auto"

    def parse_tree(self) -> Tree | DynamicTree | None:
        """Returns the tree that is drafted, None for a chain."""
        return None if self.tree is None else read_tree(self.tree)


def run(options: DemoOptions, arguments: Sequence[str]) -> None:
    """Runs `specdec demo`: prints a trace of every sentence, then times."""
    options.check()
    check_texts("sentence", arguments)
    sentences = list(arguments) or read_built_in_sentences()[:_SENTENCES]
    target, drafter = options.load()
    assert drafter is not None, "the options were checked"
    Demo(options, target, drafter, sentences).run()


class Demo:
    """What the parts of the demo share: models, sentences with their keys, and the screen.

    Attributes:
      batches: each sentence by itself.
    """

    def __init__(
        self,
        options: DemoOptions,
        target: LanguageModel,
        drafter: Drafter,
        sentences: Sequence[str],
    ):
        self.options, self.target, self.drafter = options, target, drafter
        self.sentences, self.screen = sentences, Screen()
        # What is too long is rejected before anything compiles.
        languages = options.source_language, options.target_language
        ids = encode(target, sentences, options.max_input_length, *languages)
        keys = fold_keys(make_key(options.seed), np.arange(len(sentences)))
        self.batches = [
            SentenceBatch([text], [row], [number], keys[number : number + 1])
            for number, (text, row) in enumerate(zip(sentences, ids, strict=True))
        ]

    def run(self) -> None:
        """Prints a trace of every sentence, and one call as a tree; then times."""
        options, say = self.options, self.screen.say
        say(
            f"The drafter, {options.drafter}, proposes {_describe_draft(options)}. The target, "
            f"{options.target}, checks them all in one\ncall and adds one token of its own; "
            f"{_describe_promise(options)}.\nEach line below is one such call:"
        )
        self.screen.show(traces.LEGEND)
        if options.trace:
            say(_COLUMNS_OF_A_TREE)
        tree = options.parse_tree()
        drafts = dict(gamma=options.gamma_of(options.max_drafted, tree), tree=tree)
        decoding = {"drafter": self.drafter, **options.decoding(), **drafts}
        calls: list[list[TraceStep]] = []
        compiled = set()
        for sentence, batch in zip(self.sentences, self.batches):
            announced = f"compiling speculative decoding (up to {batch.padded} tokens)"
            compiles = batch.padded not in compiled
            with show_waiting(announced) if compiles else contextlib.nullcontext():
                steps = trace(self.target, sentence, key=batch.keys, **decoding)
            if options.trace:  # a chain is drawn as the tree that it is
                steps = [step._replace(tree=step.tree or step.chain) for step in steps]
            calls.append(steps)
            compiled.add(batch.padded)
            say(f"\n{sentence}")
            lines = traces.trace_lines(calls[-1], self.target)
            for step, parts in zip(calls[-1], lines, strict=True):
                self.screen.show(parts)
                if options.trace:
                    self._draw(step, numbers=True)
        say("")
        drawn = self._draw_one(calls)
        if options.output:
            write_record(options.output, self._make_record(calls, drawn))
        if options.max_drafted == "auto" and not any(step.gamma for one in calls for step in one):
            say(
                "nothing was drafted: plain decoding is as fast on this machine, as measured "
                "(--gamma=4 drafts anyway)\n"
            )
        self._time()
        self.screen.save(options.picture)

    def _draw(self, step: TraceStep, numbers: bool = False) -> None:
        if step.tree is not None:
            for parts in tree_drawing.tree_lines(step, self.target, numbers):
                self.screen.show(parts)

    def _draw_one(self, calls: Sequence[Sequence[TraceStep]]) -> dict[str, Any] | None:
        """Draws one call as a tree, on the screen and with `--plot` as a figure.

        With `--trace` all calls are on the screen already. Returns the tree as a record has it;
        None if no call has a tree.
        """
        options = self.options
        steps = [
            (sentence, number, step)
            for sentence, one in zip(self.sentences, calls)
            for number, step in enumerate(one, 1)
        ]
        chosen = tree_drawing.choose_step([step for *_, step in steps])
        if chosen is None:
            if options.plot:
                got = f"plot: got {options.plot!r}, but nothing was drafted as a tree"
                raise ValueError(f"{got}, expected more tokens")
            return None
        sentence, number, step = steps[chosen]
        if not options.trace:
            self.screen.say(
                f"Call {number} of “{sentence}” as a tree of {step.gamma} drafted tokens,\n"
                f"of which {len(step.accepted)} are accepted. ■: the drafted tokens that a token "
                "attends to."
            )
            self._draw(step)
            self.screen.say("")
        drawn = tree_drawing.Drawn.from_step(step, self.target)
        if options.plot:
            plots.save(plots.draw_tree(drawn), options.plot)
        call = {"tree": options.tree or "chain", "call": number, "input": sentence}
        return call | drawn.record()

    def _make_record(
        self, calls: Sequence[Sequence[TraceStep]], drawn: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Returns the calls and the drawn tree as JSON values."""
        lines = [traces.trace_lines(steps, self.target) for steps in calls]
        return {
            "machine": machine.describe_machine(),
            "options": dataclasses.asdict(self.options),
            "target": machine.describe_model(self.target),
            "drafter": machine.describe_drafter(self.drafter),
            "calls": [
                {"input": sentence, "lines": parts}
                for sentence, parts in zip(self.sentences, lines)
            ],
            "tree": drawn,
        }

    def _time(self) -> None:
        """Times plain and speculative decoding in turn, and prints how they compare."""
        options, tree = self.options, self.options.parse_tree()
        gamma = options.gamma_of(options.max_drafted, tree)
        speculative = options.decoding() | dict(drafter=self.drafter, gamma=gamma, tree=tree)
        variants = {
            "plain": Variant(0, make_decoder(self.target, options.decoding(plain=True))),
            "speculative": Variant(1, make_decoder(self.target, speculative)),
        }
        batches = [batch for batch in self.batches if batch.inputs[0].strip()]
        if not batches:
            return self.screen.say("nothing to time: no sentence has any text")
        warm_up(variants, {}, batches)
        time_passes(variants, batches, options.repeats, "timing")
        kernel = [native.describe_state()] if jax.default_backend() == "cpu" else []
        self.screen.say(compare_times(**variants))
        print(*kernel, _NEXT, sep="\n")


class Screen:
    """Standard output, and a copy in colour for a picture."""

    def __init__(self) -> None:
        self._console = Console()
        self._colours = self._console.is_terminal and "NO_COLOR" not in os.environ
        self._picture = Console(
            file=io.StringIO(),
            record=True,
            force_terminal=True,
            color_system="truecolor",
            width=_COLUMNS,
            legacy_windows=False,
        )

    def say(self, text: str) -> None:
        """Prints plain text."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()
        self._picture.print(Text(text))

    def show(self, parts: Sequence[tuple[str, str]]) -> None:
        """Prints a line of (kind, text)."""
        self._console.print(render(parts, self._colours), soft_wrap=True)
        self._console.file.flush()
        self._picture.print(render(parts, True))

    def save(self, path: str | None) -> None:
        """Writes the printed lines as an SVG file, if there is a path.

        The file downloads no font.
        """
        if path:
            svg = self._picture.export_svg(title="specdec demo", unique_id="specdec")
            svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
            fonts = "ui-monospace, SFMono-Regular, Menlo, Consolas"
            write_file(path, svg.replace("Fira Code", fonts))


def _describe_draft(options: DemoOptions) -> str:
    """Returns how much is drafted at most."""
    gamma, tree = options.max_drafted, options.parse_tree()
    if tree is not None:
        return f"a tree of up to {tree.size - 1 if isinstance(gamma, str) else gamma} tokens"
    if gamma == "auto":
        gamma = MAXIMUM if options.gamma_policy == "fixed" else request.FIXED
    return f"up to {gamma} tokens"


def _describe_promise(options: DemoOptions) -> str:
    """Returns the verifier's guarantee about the output."""
    tree = options.parse_tree()
    verifier = options.verifier if tree is None or tree.verify not in LOSSY_TREES else tree.verify
    if not find_verifier(verifier).exact:
        return f"{verifier} verification accepts tokens that the target would not choose"
    if options.temperature > 0:
        return "the text is distributed as if the target alone had written it"
    return "the text is the one that the target alone would have written"


def render(parts: Sequence[tuple[str, str]], colours: bool) -> Text:
    """Returns a line with styles, or with marks; leading spaces stay outside of both."""
    line = Text()
    for kind, text in parts:
        space = text[: len(text) - len(text.lstrip(" "))]
        line.append(space)
        body = text[len(space) :] or "␣"  # a token may be a space alone
        style, marks = _STYLES[kind]
        line.append(body, style) if colours else line.append(marks.format(body))
    return line


def compare_times(plain: Variant, speculative: Variant) -> str:
    """Returns lines with the times of both variants, in the pass whose ratio is the median."""
    ratios, lines = plain.seconds_per_token / speculative.seconds_per_token, []
    repeats, middle = len(ratios), int(np.argsort(ratios)[len(ratios) // 2])
    for name, variant in {"plain": plain, "speculative": speculative}.items():
        whole = f"{variant.tokens} tokens in {variant.seconds[middle]:.4g} s"
        each = 1e3 * variant.seconds_per_token[middle]
        lines.append(f"{name:<12} {each:8.4g} ms per token: {whole}")
    passes = f"median of {repeats} {'passes' if repeats > 1 else 'pass'}"
    spread = f"{passes} ({min(ratios):.2f} to {max(ratios):.2f})"
    lines.append(f"ratio        {ratios[middle]:8.2f}, {spread}; the times are of that pass")
    calls = speculative.total("target_calls")
    lines.append(f"{speculative.tokens / calls:.2f} tokens per target call")
    return "\n".join(lines)
