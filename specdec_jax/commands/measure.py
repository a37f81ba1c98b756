"""Runs `specdec measure`: α, top-k hit rate, acceptance by depth, c and v of a pair."""

import dataclasses
import json

from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.expectations import measure
from specdec_jax.analysis.report import plots
from specdec_jax.analysis.report.records import MeasureRecord, write_record
from specdec_jax.analysis.report.summaries import measure_summary
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands.generation_flags import check_gamma
from specdec_jax.commands.options import DecodingOptions, check_at_least
from specdec_jax.commands.sentences import check_any_text, check_input_file, load_sentences
from specdec_jax.decoding.checks import UnsupportedCombination, unsupported
from specdec_jax.files.writing import check_output
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.speculative.drafter import Drafter, can_draft_chains

INPUT_FILE_HELP = (
    "UTF-8 text, one sentence a line, gzip or not (default: ende/sentences.txt, which comes with "
    "the package)"
)


@document_fields
@dataclasses.dataclass(frozen=True)
class MeasureOptions(DecodingOptions):
    """Options of `specdec measure`.

    Attributes:
      gamma_max: compute the improvement for every number of drafted tokens up to this one
      widths: numbers of positions of the target calls that are timed, up to gamma_max + 1; v is
        interpolated in between
      compare_alpha: also decode by token verification with gamma_max, and compare the counted alpha
        with alpha from the models' distributions on the same positions; only for a drafting model
        in full precision without a shortlist
      repeats: passes over the single steps, of which the median and the spread are reported
      output: file to write the JSON record to; Tree.best takes its acceptance.by_rank, verify_cost
        and cost_ratio
      plot: file for a plot of expected improvement, acceptance by position and by depth, v and
        top-k hit rate (.png, .pdf, .svg)
    """

    gamma_max: int = 8
    widths: tuple[int, ...] = (2, 3, 5, 9)
    input_file: str | None = make_option(None, INPUT_FILE_HELP)
    limit: int = make_option(0, "read only this many lines of the input; 0: all")
    batch_size: int = make_option(1, "sentences decoded together")
    compare_alpha: bool = False
    repeats: int = 3
    output: str | None = None
    json: bool = make_option(False, "print the JSON record instead of the summary")
    plot: str | None = None

    def check(self) -> None:
        check_measured(self, self.batch_size, self.repeats, self.limit)
        check_input_file(self.input_file)
        check_gamma(self.gamma_max)
        check_at_least(1, gamma_max=self.gamma_max)
        for width in self.widths:
            check_at_least(2, widths=width)
        if self.compare_alpha and self.max_new_tokens == 1:
            raise UnsupportedCombination(
                "compare_alpha: got True with max_new_tokens=1, expected at least 2: the last "
                "token is never drafted"
            )
        check_output(self.output, source=self.input_file)
        if self.plot:
            plots.check(self.plot)

    @property
    def timed_gammas(self) -> tuple[int, ...]:
        """The γ whose target calls are timed: those of the widths, and γ_max."""
        gammas = {width - 1 for width in self.widths if width <= self.gamma_max}
        return tuple(sorted(gammas | {self.gamma_max}))


def check_measured(options: DecodingOptions, batch_size: int, repeats: int, limit: int) -> None:
    """Checks the common options of `measure` and `tune`."""
    DecodingOptions.check(options)
    if not options.drafter:
        raise ValueError("drafter: got nothing, expected one of those in `specdec generate --help`")
    if options.gamma_policy != "fixed":
        got = f"gamma_policy: got {options.gamma_policy!r}"
        raise UnsupportedCombination(f"{got}, expected fixed: this command measures every gamma")
    if options.mesh:
        raise unsupported("mesh", repr(options.mesh), "none (one device is measured)")
    check_at_least(1, batch_size=batch_size, repeats=repeats)
    check_at_least(0, limit=limit)


def check_drafts_chains(drafter: Drafter | None) -> None:
    """Raises UnsupportedCombination for a drafter of trees alone, whose cost no formula tells."""
    if drafter is not None and not can_draft_chains(drafter):
        expected = "one that drafts chains: specdec benchmark times trees"
        raise unsupported("drafter", drafter.name, expected)


def run(options: MeasureOptions) -> None:
    """Runs `specdec measure`."""
    options.check()
    sentences = load_sentences(options.input_file, options.limit)
    target, drafter = options.load()
    check_drafts_chains(drafter)
    check_any_text(target, sentences)
    batches = analysis_variants.make_batches(target, sentences, options)
    record = measure(Workload(target, drafter, batches, options))
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else measure_summary(record))
        if options.plot:
            plots.save(
                plots.draw_measurement(MeasureRecord.model_validate(json.loads(text))), options.plot
            )
    finally:  # if one of these outputs fails, the others still have the record
        if options.output:
            write_record(options.output, record)
