"""Defines the options of `specdec benchmark`, loads models and inputs, and runs one comparison."""

import dataclasses
import importlib.util
import json
from typing import Any

import numpy as np

from specdec_jax.analysis import comparison
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.beams import benchmark_beams
from specdec_jax.analysis.benchmark import benchmark
from specdec_jax.analysis.report import plots, summaries
from specdec_jax.analysis.report.records import MOST_TREES, write_record
from specdec_jax.analysis.variants import Variant, Workload, make_decoder
from specdec_jax.backends.cpu.packed_weights import INPUT_BITS
from specdec_jax.checkpoints import loader
from specdec_jax.commands import generation_flags
from specdec_jax.commands.errors import CheckFailed
from specdec_jax.commands.measure import INPUT_FILE_HELP
from specdec_jax.commands.options import DecodingOptions, check_at_least
from specdec_jax.commands.sentences import check_any_text, check_input_file, load_sentences
from specdec_jax.decoding.checks import UnsupportedCombination, unsupported
from specdec_jax.decoding.search_options import LEVELS, BeamOptions
from specdec_jax.drafters.named import needs_no_model
from specdec_jax.files.progress import Progress
from specdec_jax.files.reading import mismatch_error
from specdec_jax.files.writing import check_output
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import check_positions
from specdec_jax.models.parameters import parameter_count
from specdec_jax.speculative.drafter import (
    Drafter,
    FullDrafter,
    TreeDrafter,
)
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_text import EXPECTED, read_tree
from specdec_jax.speculative.verifiers import LOSSY

AGAINST = ("t5x",)
_NOTHING_ACCEPTED = "with random weights no drafted token is accepted"


def check_against(name: str | None, sampling: SamplingConfig) -> None:
    """Raises ValueError, before a model is loaded, for an implementation without comparison."""
    if name is None:
        return
    if name not in AGAINST:
        raise ValueError(f"against: got {name!r}, expected {' or '.join(AGAINST)}")
    if not sampling.mode.greedy or sampling.mode.processes:
        raise unsupported("against", f"{name!r} with sampling or processors", "argmax alone")
    if importlib.util.find_spec("t5x") is None:
        got, expected = f"{name!r}, which is not installed", f"the extra: pip install '.[{name}]'"
        raise mismatch_error("against", got, expected)


@document_fields
@dataclasses.dataclass(frozen=True)
class BenchmarkOptions(generation_flags.SearchFlags, DecodingOptions):
    """Options of `specdec benchmark`.

    Attributes:
      repeats: passes over the sentences, of which the median and the spread are reported
      drafter_preset: shape of a drafter with random weights, instead of --drafter
      input_length: with --preset: length of the input, in tokens (default: 64)
      synthetic_alpha: accept drafted tokens at random with this probability, whatever the models
        predict, so that whole decodes can be timed with random weights; several, comma-separated,
        are timed in turn
      against: time another implementation in turn with ours, by argmax or beam search, on the same
        weights and inputs: t5x, which must be installed
      suite: paper: measure every row that the paper reports, one record a line in --output, and
        resume after a kill; --drafter and --drafter_preset then take several, comma-separated
      report: with --suite: HTML file to write, with the records beside the paper's tables and
        figures
      plot: file for a plot of wall time, a bar for every way of decoding (.png, .pdf, .svg)
    """

    gamma: tuple[int, ...] = make_option(
        (),
        "tokens drafted per target call (default: 4), with --num_beams levels of the tree "
        f"(default: {LEVELS}); several, comma-separated, are timed in turn",
    )
    tree: tuple[str, ...] = make_option(
        (),
        "a token tree that is timed in turn with plain decoding and the chains of --gamma; "
        f"repeatable: {EXPECTED}",
    )
    beam_width: tuple[int, ...] = generation_flags.width_option("as for `specdec generate`")
    input_file: str | None = make_option(None, INPUT_FILE_HELP)
    limit: int = make_option(0, "read only this many lines of the input; 0: all")
    batch_size: int = make_option(1, "sentences decoded together")
    repeats: int = 3
    preset: str | None = make_option(
        None,
        "time a target of this shape with random weights instead of --target: "
        + ", ".join(PRESETS),
    )
    drafter_preset: str | None = None
    input_length: int | None = None
    synthetic_alpha: tuple[float, ...] = ()
    against: str | None = None
    suite: str | None = None
    report: str | None = None
    plot: str | None = None
    output: str | None = make_option(None, "file to write the JSON record to")
    json: bool = make_option(False, "print the JSON record instead of the summary")

    def check(self) -> None:
        presets = {"preset": self.preset, "drafter_preset": self.drafter_preset}
        for name, preset in presets.items():
            if preset and preset not in PRESETS:
                raise ValueError(f"{name}: got {preset!r}, expected one of {', '.join(PRESETS)}")
        names = ["target", "input_file", "vocabulary", "limit"]
        names += [] if needs_no_model(self.drafter or "") else ["drafter"]
        for name in names if self.preset else ():
            if getattr(self, name):
                got = f"got --preset={self.preset} with --{name}"
                raise ValueError(f"{got}, expected one or the other")
        for name in ("drafter_preset", "input_length"):
            if (value := getattr(self, name)) not in (None, "") and not self.preset:
                raise ValueError(f"got --{name}={value} alone, expected --preset too")
        shapes = [PRESETS[preset] for preset in presets.values() if preset]
        if len({shape.family for shape in shapes}) > 1:
            got = f"drafter_preset: got {self.drafter_preset!r}"
            raise ValueError(f"{got}, expected a shape of the same family as {self.preset!r}")
        if self.report:
            got = f"report: got {self.report!r} without a suite"
            raise ValueError(f"{got}, expected --suite (or `specdec figures`)")
        if self.drafter and self.drafter_preset:
            got = f"got --drafter={self.drafter} with --drafter_preset"
            raise ValueError(f"{got}, expected one or the other")
        self._check_beams()
        super().check() if not self.preset else self.check_decoding()
        self._check_synthetic()
        self._check_trees()
        check_against(self.against, self.sampling())
        for gamma in self.gammas:
            generation_flags.check_gamma(gamma)
            check_at_least(1, gamma=gamma)  # γ = 0, plain decoding, is always timed
            self.gamma_of(gamma)
        check_at_least(1, batch_size=self.batch_size, repeats=self.repeats)
        check_input_file(self.input_file)
        check_at_least(1, input_length=self.preset_length)
        check_at_least(0, limit=self.limit)
        if self.preset and self.preset_length > self.max_input_length:
            most = f"max_input_length = {self.max_input_length}"
            raise ValueError(f"input_length: got {self.preset_length}, expected at most {most}")
        for name, preset in presets.items():
            if preset:
                shape, length = PRESETS[preset], self.preset_length
                output = (length if shape.decoder_only else 1) + self.max_new_tokens
                check_positions(shape, max(length, output), name)
        check_output(self.output, source=self.input_file)
        if self.plot:
            plots.check(self.plot)

    def _check_beams(self) -> None:
        """Rejects options that do not go with beam search, and those of beam search without it."""
        for width in self.beam_width or (None,):
            self.search(beam_width=width)
        decoding = dict(temperature=0.0, verifier="block", gamma_policy="fixed")
        generation_flags.check_beside_beams(
            self, **decoding, synthetic_alpha=(), suite=None, tree=()
        )
        if self.beam_width and not self.drafter:
            raise unsupported("beam_width", f"{self.beam_width} for plain beam search", "a drafter")
        if self.num_beams is None:
            return
        if self.preset and (self.drafter or self.drafter_preset):
            got = f"num_beams: got {self.num_beams} with --preset and a drafter"
            raise UnsupportedCombination(f"{got}, expected no drafter: {_NOTHING_ACCEPTED}")
        if self.against and self.beam_style != self.against:
            got = f"against: got {self.against!r} with beam_style={self.beam_style!r}"
            raise UnsupportedCombination(f"{got}, expected the same beam_style")

    def _check_synthetic(self) -> None:
        for alpha in self.synthetic_alpha:
            if not 0 < alpha <= 1:
                raise ValueError(f"synthetic_alpha: got {alpha}, expected a number in (0, 1]")
        if self.synthetic_alpha and not (self.drafter or self.drafter_preset):
            raise unsupported("synthetic_alpha", "a value for plain decoding", "a drafter too")
        if self.preset and self.drafter and not self.synthetic_alpha:
            got = f"drafter: got {self.drafter!r} with --preset"
            raise UnsupportedCombination(
                f"{got}, expected --synthetic_alpha too: with random weights such a drafter is "
                "timed by synthetic acceptance only"
            )
        default = type(self)
        others = self.verifier != default.verifier or self.gamma_policy != default.gamma_policy
        if self.synthetic_alpha and others:
            got = f"verifier={self.verifier!r}, gamma_policy={self.gamma_policy!r}"
            raise UnsupportedCombination(
                f"synthetic_alpha: got a value with {got}, expected neither: nothing is verified"
            )

    def _check_trees(self) -> None:
        """Rejects texts that are no trees, and options that do not go with trees."""
        for text in self.tree:
            read_tree(text)
        if len(self.tree) > MOST_TREES:
            raise ValueError(f"tree: got {len(self.tree)} trees, expected at most {MOST_TREES}")
        if not self.tree:
            return
        if not self.drafter:
            got = f"tree: got {', '.join(self.tree)!r} without --drafter"
            raise UnsupportedCombination(f"{got}, expected one: {_NOTHING_ACCEPTED}")
        if self.synthetic_alpha:
            raise unsupported("synthetic_alpha", f"{self.synthetic_alpha} with a tree", "none")
        if self.verifier in LOSSY:
            raise UnsupportedCombination(
                f"verifier: got {self.verifier!r} with a tree, expected an exact one: a tree has "
                "its own verifier"
            )

    @property
    def gammas(self) -> tuple[int, ...]:
        """The numbers of drafted tokens, or of levels, that are timed."""
        return self.gamma or ((4,) if self.num_beams is None else (LEVELS,))

    @property
    def preset_length(self) -> int:
        return 64 if self.input_length is None else self.input_length

    @property
    def samples_preset(self) -> bool:
        """Whether the cost of sampling is measured."""
        return bool(self.preset) and self.temperature > 0


def make_others(options: BenchmarkOptions, target: LanguageModel) -> dict[str, Variant]:
    """Returns the implementation that `--against` names, by its name; an empty dict for none.

    For a target in int8 there is our plain decoding without int8 too, since the other
    implementation has the weights in the target's dtype.
    """
    if not options.against:
        return {}
    from specdec_jax.interop import t5x

    beams = BeamOptions(**options.search()) if options.num_beams else None
    theirs = t5x.make_variant(target, options.max_new_tokens, beams)
    return {options.against: theirs} | unrounded_variant(options, target)


def unrounded_variant(options: BenchmarkOptions, target: LanguageModel) -> dict[str, Variant]:
    """Returns plain decoding of a target in int8 without int8; an empty dict for another target."""
    if not target.quantized:
        return {}
    ids = dict(start_token=target.start_token, eos_ids=target.eos_ids)
    wide = LanguageModel(target.config, target.params, target.vocabulary, name=target.name, **ids)
    how = options.decoding(plain=True) | (options.search() if options.num_beams else {})
    return {comparison.UNROUNDED: Variant(0, make_decoder(wide, how | {"gamma": 0}))}


def run(options: BenchmarkOptions) -> None:
    """Runs `specdec benchmark` without a suite."""
    options.check()
    workload = load(options)
    measure = benchmark_beams if options.num_beams else benchmark
    record, problems = measure(workload, make_others(options, workload.target))
    text = json.dumps(record, indent=1)
    try:
        print(text if options.json else summaries.benchmark_summary(record))
    finally:  # if one of these outputs fails, the others still have the record
        if options.output:
            write_record(options.output, record)
        if options.plot:
            plots.save(plots.draw_wall_time(record), options.plot)
    if problems:
        raise CheckFailed("; ".join(problems))


def load(options: BenchmarkOptions, target: LanguageModel | None = None) -> Workload:
    """Returns the target (unless it is given), the drafter and the inputs that the options name."""
    if options.preset:
        return _read_preset(options, target)
    sentences = load_sentences(options.input_file, options.limit)
    target, drafter = options.load(target)
    if isinstance(drafter, TreeDrafter) and drafter.tree is not None and not options.gamma:
        # It has a tree of its own, of which `generate` drafts all nodes by default.
        options = dataclasses.replace(options, gamma=(drafter.tree.size - 1,))
    check_any_text(target, sentences)
    batches = analysis_variants.make_batches(target, sentences, options)
    return Workload(target, drafter, batches, options)


def _read_preset(options: BenchmarkOptions, target: LanguageModel | None) -> Workload:
    def model(preset: str, drafts: bool = False) -> LanguageModel:
        quantize = None if drafts else options.quantize
        bits = INPUT_BITS.get(quantize or "")
        dtype = loader.choose_dtype(
            options.dtype, preset, int8_weights="rounded" if bits else None, input_bits=bits or 16
        )
        config = PRESETS[preset].replace(dtype=dtype)
        # Without EOS ids every output has full length.
        rules = options.placement(drafts)
        how: dict[str, Any] = dict(name=preset, eos_ids=(), rules=rules, quantize=quantize)
        with Progress(f"making {preset}", parameter_count(config), "parameters") as progress:
            return LanguageModel.dummy(config, report=progress.advance, **how)

    assert options.preset
    target = target or model(options.preset)
    if options.drafter_preset:
        drafter: Drafter | None = options.reduced(model(options.drafter_preset, drafts=True))
    else:
        drafter = options.load(target)[1]
        if drafter is not None and drafter.varies:  # it would propose nothing among random ids
            drafter = FullDrafter(drafter)
    rows, seed = options.batch_size, options.seed
    shape = (rows, options.preset_length)
    ids = np.random.default_rng(seed).integers(2, target.config.vocab_size, shape).tolist()
    batches = analysis_variants.cut_batches(ids, ids, rows, seed)
    return Workload(target, drafter, batches, options)
