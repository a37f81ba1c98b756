"""Runs `specdec measure`: α, top-k hit rate, acceptance by depth, c and v of a pair on this
machine."""

import dataclasses
import json

from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.expectations import measure
from specdec_jax.analysis.report import plots
from specdec_jax.analysis.report.summaries import measure_summary
from specdec_jax.commands.options import DecodingOptions, at_least, check_gamma, option
from specdec_jax.commands.sentences import sentences_of
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.files.writing import check_output, write_file


@dataclasses.dataclass(frozen=True)
class MeasureOptions(DecodingOptions):
    """Options of `specdec measure`."""

    gamma_max: int = option(
        8, "compute the improvement for every number of drafted tokens up to this one"
    )
    widths: tuple[int, ...] = option(
        (2, 3, 5, 9),
        "widths of the target calls that are timed, in positions, up to gamma_max + 1; v is interpolated in between",
    )
    input_file: str | None = option(
        None,
        "UTF-8 text, one sentence a line, gzip or not (default: ende/sentences.txt, which comes with the package)",
    )
    limit: int = option(0, "read only this many lines of the input; 0: all")
    batch_size: int = option(1, "sentences decoded together")
    compare_alpha: bool = option(
        False,
        "also decode by token verification with gamma_max, and compare alpha as counted with alpha from the "
        "models' distributions on the same positions; only for a drafting model in full precision without a shortlist",
    )
    repeats: int = option(
        3, "passes over the single steps, of which the median and the spread are reported"
    )
    output: str | None = option(
        None,
        "file that the JSON record is written to; of it Tree.best takes acceptance.by_rank, verify_cost and "
        "cost_ratio",
    )
    json: bool = option(False, "print the JSON record instead of the summary")
    plot: str | None = option(
        None,
        "file for a plot of expected improvement, acceptance by position and by depth, v and top-k hit rate "
        "(.png, .pdf, "
        ".svg)",
    )

    def check(self) -> None:
        check_measured(self)
        check_gamma(self.gamma_max)
        at_least(1, gamma_max=self.gamma_max)
        for width in self.widths:
            at_least(2, widths=width)
        if self.compare_alpha and self.max_new_tokens == 1:
            raise UnsupportedCombination(
                "compare_alpha: got True with max_new_tokens=1, expected at least 2: nothing is drafted before the "
                "last token"
            )
        check_output(self.output)
        if self.plot:
            plots.check(self.plot)

    @property
    def timed_gammas(self) -> tuple[int, ...]:
        """The γ whose target calls are timed: those of the widths up to γ_max + 1, and γ_max
        itself."""
        return (
            *sorted(
                {width - 1 for width in self.widths if width <= self.gamma_max} | {self.gamma_max}
            ),
        )


def check_measured(options) -> None:
    """Checks what `measure` and `tune` have in common: drafter, policy, mesh, batch size, repeats
    and limit."""
    DecodingOptions.check(options)
    if not options.drafter:
        raise ValueError(
            "drafter: got nothing, expected what `specdec generate --help` lists for --drafter"
        )
    if options.gamma_policy != "fixed":
        raise UnsupportedCombination(
            f"gamma_policy: got {options.gamma_policy!r}, expected fixed: gamma is what is chosen"
        )
    if options.mesh:
        raise UnsupportedCombination(
            f"mesh: got {options.mesh!r}, expected none (one device is measured)"
        )
    at_least(1, batch_size=options.batch_size, repeats=options.repeats)
    at_least(0, limit=options.limit)


def run(options: MeasureOptions) -> None:
    """Runs `specdec measure`."""
    options.check()
    sentences = sentences_of(options.input_file, options.limit)
    target, drafter = options.load()
    assert drafter is not None, "the options were checked"
    batches = analysis_variants.make_batches(target, sentences, options)
    record = measure(target, drafter, batches, options)
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else measure_summary(record))
        if options.plot:
            plots.save(plots.improvement(record), options.plot)
    finally:  # if one of these outputs fails, the others still have the record
        if options.output:
            write_file(options.output, text + "\n")
