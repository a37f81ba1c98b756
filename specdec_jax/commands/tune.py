"""Runs `specdec tune`: chooses γ, verifier or tree by measurement, and writes a gin file."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.beams import BeamChoice
from specdec_jax.analysis.expectations import verifiers_to_compare
from specdec_jax.analysis.report.summaries import tune_summary
from specdec_jax.analysis.tuning import Choice, keep_acceptance, read_choice, tune, tune_beams
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands.generation_flags import (
    SearchFlags,
    check_beside_beams,
    check_gamma,
    width_option,
)
from specdec_jax.commands.measure import INPUT_FILE_HELP, check_drafts_chains, check_measured
from specdec_jax.commands.options import DecodingOptions, check_at_least
from specdec_jax.commands.sentences import check_any_text, check_input_file, load_sentences
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models import arguments
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.speculative.trees import MAX_NODES
from specdec_jax.speculative.verifiers import LOSSY

# Options that plain decoding does not take.
_OF_DRAFTS = (
    "lenience typical_epsilon typical_delta shortlist shortlist_size drafter_int8"
).split()


@document_fields
@dataclasses.dataclass(frozen=True)
class TuneOptions(SearchFlags, DecodingOptions):
    """Options of `specdec tune`.

    Attributes:
      gamma: numbers of drafted tokens to choose from (default: 1 to 8); with --num_beams numbers of
        levels of the tree (default: 1 to 3)
      tree_nodes: also choose from token trees of these numbers of positions, no deeper than the
        greatest --gamma: the best shape of each by the top-k hit rate and the times of calls, and a
        dynamic tree; only for a drafting model whose distribution is scored
      choose_verifier: above temperature 0, choose between block and token verification if
        --verifier is one of them
      sweep: check the choice: time all choices in turn on this many of the lines that follow; 0: do
        not check
      repeats: passes over steps and sentences, of which the median and the spread are reported
      config: gin file to write the choice to, for `generate` and `benchmark`
    """

    gamma: tuple[int, ...] = ()
    beam_width: tuple[int, ...] = width_option("num_beams, and the drafter's default")
    tree_nodes: tuple[int, ...] = ()
    choose_verifier: bool = True
    input_file: str | None = make_option(None, INPUT_FILE_HELP)
    limit: int = make_option(64, "tune on the first lines of the input, this many; 0: on all")
    sweep: int = 0
    batch_size: int = make_option(1, "sentences decoded together")
    repeats: int = 3
    config: str | None = None
    output: str | None = make_option(None, "file to write the JSON record to")
    json: bool = make_option(False, "print the JSON record instead of the summary")

    def check(self) -> None:
        for width in self.beam_width or (None,):
            self.search(beam_width=width)
        check_beside_beams(
            self, temperature=0.0, verifier="block", choose_verifier=True, tree_nodes=()
        )
        check_measured(self, self.batch_size, self.repeats, self.limit)
        check_input_file(self.input_file)
        for gamma in self.gamma:
            check_gamma(gamma)
            check_at_least(1, gamma=gamma)  # γ = 0, plain decoding, is always among the choices
        for nodes in self.tree_nodes:
            arguments.check_integer("tree_nodes", nodes, 3, MAX_NODES)
        check_at_least(0, sweep=self.sweep)
        if self.sweep and not (self.limit and self.input_file):
            raise ValueError(
                f"got --sweep={self.sweep} alone, expected --input_file and a --limit above 0 too"
            )
        if not self.config:
            raise ValueError("config: got nothing, expected the name of a gin file to write")
        check_output(self.config, "config", self.input_file)
        check_output(self.output, source=self.input_file)

    @property
    def gammas(self) -> tuple[int, ...]:
        """The numbers of drafted tokens, or of levels, to choose from."""
        return self.gamma or tuple(range(1, 9 if self.num_beams is None else 4))

    @property
    def verifiers(self) -> tuple[str, ...]:
        return verifiers_to_compare(self) if self.choose_verifier else (self.verifier,)


def run(options: TuneOptions) -> None:
    """Runs `specdec tune`."""
    options.check()
    sentences = load_sentences(options.input_file, 0)
    sample = sentences[: options.limit or None]
    rest = sentences[len(sample) : len(sample) + options.sweep]
    if len(rest) < options.sweep:
        lines = f"the {len(rest)} lines after the first {len(sample)}"
        raise ValueError(f"sweep: got {options.sweep}, expected at most {lines}")
    target, drafter = options.load()
    check_drafts_chains(drafter)
    check_any_text(target, sample)
    batches, others = (
        analysis_variants.make_batches(target, lines, options) if lines else []
        for lines in (sample, rest)
    )
    workload = Workload(target, drafter, batches, options)
    record = (tune_beams if options.num_beams else tune)(workload, others)
    text = json.dumps(record, indent=1)
    try:
        assert options.config
        write_file(options.config, make_gin_file(record, options))
        accepted = record.get("acceptance", {})
        # Policies count drafted tokens, not positions without a draft.
        alpha = accepted.get("alpha_where_drafted") or accepted.get("alpha")
        if alpha is not None:
            keep_acceptance(workload, alpha)
        print(text if options.json else tune_summary(record))
    finally:  # if one of these outputs fails, the others still have the record
        if options.output:
            write_file(options.output, text + "\n")


def make_gin_file(record: Mapping[str, Any], options: TuneOptions) -> str:
    """Returns a gin file for `generate` and `benchmark`: the options of tuning, with the choice.

    `benchmark` times a tree beside the fastest chain.
    """
    chosen, gain, host = read_choice(record["chosen"]), record["improvement"], record["machine"]
    tree = chosen.tree if isinstance(chosen, Choice) else None
    skipped = {"drafter", "verifier"} if chosen.gamma else {"drafter", "verifier", *_OF_DRAFTS}
    settings = {
        field.name: getattr(options, field.name)
        for field in (*dataclasses.fields(DecodingOptions), *dataclasses.fields(SearchFlags))
        if field.name not in skipped and getattr(options, field.name) != field.default
    }
    if chosen.gamma:
        spread = f"{gain['least']:.2f} to {gain['most']:.2f}"
        why = f"{chosen}: {gain['median']:.2f} times the speed of plain decoding ({spread})"
        if gain["least"] <= 1:
            why += ", within the spread: in some pass plain decoding was as fast"
        settings["drafter"] = options.drafter
        if isinstance(chosen, Choice):
            settings["verifier"] = chosen.verifier
        else:
            settings["beam_width"] = chosen.width
        settings |= {"tree": tree} if tree else {}
    else:
        why = f"plain decoding was faster than drafting with {options.drafter}"
        settings["drafter"] = None
        if options.verifier not in LOSSY:
            settings["verifier"] = options.verifier
    settings["batch_size"] = options.batch_size
    chain = _fastest_chain(record["choices"]) if tree else chosen
    # `benchmark` takes several values of these, `generate` one.
    timed = settings | {
        name: (settings[name],) for name in ("beam_width", "tree") if name in settings
    }
    timed |= {"verifier": chain.verifier} if isinstance(chain, Choice) and tree else {}
    place = f"{host['processor']}, {host['device']}"
    lines = [
        f"# Written by `specdec tune` on {place}, with {record['sentences']} sentences;",
        f"# {why}.",
        "",
        "from __gin__ import dynamic_registration",
        "",
        "from specdec_jax.commands import benchmark",
        "from specdec_jax.commands import generate",
        "",
    ]
    if chosen.gamma:
        lines += [f"GAMMA = {chain.gamma}", ""]
    # Tuning ignores the model's default configuration, and so must `generate`.
    generating = settings | {"generation_config": "none"}
    for name, gamma, values in (
        ("generate.GenerateOptions", None if tree else "%GAMMA", generating),
        ("benchmark.BenchmarkOptions", "(%GAMMA,)", timed),
    ):
        lines.append(f"{name}:")
        lines += [f"  {field} = {value!r}" for field, value in values.items()]
        lines += [f"  gamma = {gamma}"] * bool(chosen.gamma and gamma) + [""]
    return "\n".join(lines)


def _fastest_chain(choices: Sequence[Mapping[str, Any]]) -> Choice | BeamChoice:
    chains = [
        item for item in choices if item["gamma"] and item["tree"] is None and item["improvement"]
    ]
    return read_choice(max(chains, key=lambda item: item["improvement"]["median"]))
