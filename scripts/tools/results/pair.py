"""Stages that decode with the bundled pair, one sentence at a time."""

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.analysis import matmul_roofline, timing, variants
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.drafters.best_of import BestOf
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.drafters.early_exit import EarlyExitDrafter
from specdec_jax.drafters.gated import GatedDrafter
from specdec_jax.drafters.lookahead import LookaheadDecoding
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.named import WITHOUT_FILES
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.recycling import TokenRecycling
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.policies import (
    Calibrated,
    Confidence,
    CostAware,
    Entropy,
    EntropyBound,
    Heuristic,
)
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from tools.results.cases import (
    AUTO,
    FIXED,
    NEW_TOKENS,
    Case,
    drafts,
    forget_programs,
    load_drafter,
    load_target,
    make_bundled,
    time_cases,
)
from tools.results.copying import time_edits
from tools.results.stage import Row, Rows, Settings, Skipped
from tools.results.texts import TEXTS, find_text, read_sentences, require_pairs


def measure_pair(settings: Settings) -> Rows:
    """Measures the bundled pair, in float32 and as it is stored."""
    cases = {
        "plain, float32": Case("none"),
        "speculative, float32, γ = 4": drafts(4),
        "speculative, float32, γ = 6": drafts(6),
        'speculative, float32, `gamma="auto"`': drafts("auto"),
        "plain, int8": Case("int8"),
        "speculative, int8, γ = 4": drafts(4, "int8"),
        'speculative, int8, `gamma="auto"`': drafts("auto", "int8"),
    }
    texts = read_sentences(settings, ("ende", "wiki_pe"), settings.choose(40, 10))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_texts(settings: Settings) -> Rows:
    """Measures γ = "auto" beside fixed γ on several texts."""
    rows: Rows = {}
    for form, label in (("none", "float32"), ("int8", "int8")):
        forget_programs()
        fixed = {f"{FIXED}{gamma}": drafts(gamma, form) for gamma in (2, 4, 6)}
        others = {AUTO: drafts("auto", form), "`Calibrated`": drafts(Calibrated(8), form)}
        cases = {"plain": Case(form)} | fixed | others
        texts = read_sentences(settings, TEXTS, settings.choose(12, 3))
        for name, text in texts.items():
            rows[f"{name} {label}"] = time_cases(cases, text, settings.choose(7, 2))
    return rows


def count_table(outputs: Sequence[list[int]], order: int) -> NGramDrafter:
    """Returns the drafter of a table of n-grams that is counted from outputs."""
    target = load_target("none")
    size = target.config.vocab_size
    return NGramDrafter.count(list(outputs), size, order, vocabulary=target.vocabulary)


def sort_texts(outputs: Sequence[list[int]]) -> SuffixDrafter:
    """Returns the drafter of a file of sorted text, which is mapped and has no name any more."""
    target = load_target("none")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/texts.suffix"
        SuffixDrafter.save_texts(path, outputs, target.config.vocab_size, target.vocabulary)
        return SuffixDrafter.load(path, target.vocabulary)


def list_trees(target: LanguageModel) -> dict[str, Case]:
    """Returns the drafters without a model that draft trees, at temperature 0."""

    def recycle() -> TokenRecycling:
        return TokenRecycling(target.config.vocab_size)

    lookahead = LookaheadDecoding(window=3, ngram=3, guesses=3)
    small, own = f"{lookahead.tree.size} tokens", f"{LookaheadDecoding().tree.size} tokens"
    return {
        "`recycling`, tree of widths 4, 2, 1": Case(
            "none", recycle, {"tree": Tree.uniform((4, 2, 1))}
        ),
        f"`lookahead`, {small}": Case("none", lambda: lookahead, {"tree": lookahead.tree}),
        f"`lookahead`, {own}": Case("none", LookaheadDecoding, {"tree": LookaheadDecoding().tree}),
    }


def read_references(settings: Settings, count: int) -> list[list[int]]:
    """Returns the references of `ende/train` as ids; raises Skipped without them."""
    vocabulary = load_target("none").vocabulary
    assert vocabulary is not None
    pairs = require_pairs(settings, "ende", count, "train")
    return [vocabulary.encode_output(reference) for _, reference in pairs]


POLICIES: dict[str, Callable[[], Any]] = {
    "`Heuristic`": lambda: Heuristic(8),
    "`Confidence`": lambda: Confidence(8),
    "`Entropy`": lambda: Entropy(8),
    "`EntropyBound`": lambda: EntropyBound(8),
    "`CostAware`": lambda: CostAware(8),
    "`Calibrated`": lambda: Calibrated(8),
}


def measure_policies(settings: Settings) -> Rows:
    """Measures the policies of γ with the bundled drafter, at temperatures 0 and 1."""
    rows: Rows = {}
    for temperature in settings.temperatures:
        more = sample_at(temperature)
        cases = {"plain": Case("none", None, more)}
        cases |= {f"γ = {gamma}": drafts(gamma, **more) for gamma in (2, 4, 6)}
        cases |= {name: drafts(make(), **more) for name, make in POLICIES.items()}
        rows |= time_at(cases, settings, temperature)
    return rows


def sample_at(temperature: int) -> dict[str, Any]:
    """Returns the options of decoding at a temperature, by token verification."""
    return {"sampling": SamplingConfig(temperature=float(temperature)), "verifier": "token"}


# Drafters that copy, and their γ.
COPYING: dict[str, tuple[Callable[[], Any], int]] = {
    "`lookup`, γ = 2": (PromptLookupDrafter, 2),
    "`lookup`, γ = 8": (PromptLookupDrafter, 8),
    "`copy`, γ = 8": (functools.partial(PromptLookupDrafter, min_match=0), 8),
    "`copy` behind a gate, γ = 8": (
        lambda: GatedDrafter(PromptLookupDrafter(min_match=0)),
        8,
    ),
    "`suffix` without earlier outputs, γ = 8": (SuffixDrafter, 8),
    "`assisted`, γ = 4": (AssistedNGramDrafter, 4),
}


def list_drafters(settings: Settings, target: LanguageModel) -> dict[str, tuple[Callable, Any]]:
    """Returns what makes each drafter, and its γ."""

    def better() -> BestOf:
        return BestOf(make_bundled(), PromptLookupDrafter(min_match=2), costs=(0.15, 0.0))

    def follow() -> HorizontalCascade:
        return HorizontalCascade(PromptLookupDrafter(min_match=2), make_bundled(), 8)

    found: dict[str, tuple[Callable[[], Any], Any]] = {
        "bundled drafter, γ = 4": (make_bundled, 4),
        "the same in int8": (lambda: ModelDrafter(load_drafter("none"), int8=True), 4),
        "`self:int8`, γ = 4": (lambda: SelfDrafter(target), 4),
        "`exit:3`, of four layers, γ = 2": (lambda: EarlyExitDrafter(target, 3), 2),
        "`BestOf` the bundled drafter and `lookup`, γ = 4": (better, 4),
        "`lookup` after two equal tokens, else the bundled drafter, γ = 8": (follow, 8),
        **COPYING,
        "`recycling`, γ = 4": (lambda: TokenRecycling(target.config.vocab_size), 4),
        "`random`, γ = 1": (lambda: WITHOUT_FILES["random"].make(target), 1),
    }
    try:
        references = read_references(settings, settings.choose(50_000, 10_000))
    except Skipped:
        return found
    bigrams, unigrams = count_table(references, 2), count_table(references, 1)
    sorted_texts = sort_texts(references)
    return found | {
        f"sorted text of {len(references):,} references, γ = 4": (lambda: sorted_texts, 4),
        "bigrams, γ = 1": (lambda: bigrams, 1),
        "unigrams, γ = 1": (lambda: unigrams, 1),
    }


def measure_drafters(settings: Settings) -> Rows:
    """Measures every kind of drafter on all texts, at temperatures 0 and 1.

    The text `edits` has 8 % of the words changed. Its outputs are forced, so that only what
    copies can draft them.
    """
    drafters = list_drafters(settings, load_target("none"))
    rows: Rows = {}
    for temperature in settings.temperatures:
        more = sample_at(temperature)
        cases = {"plain": Case("none", None, more)}
        cases |= {
            name: Case("none", make, {"gamma": gamma, **more})
            for name, (make, gamma) in drafters.items()
        }
        cases |= {} if temperature else list_trees(load_target("none"))
        rows |= time_at(cases, settings, temperature, TEXTS, settings.choose(6, 2), alike=True)
    if find_text(settings, "wikitext2"):
        rows["edits T=0"] = time_edits(settings, settings.choose(6, 2), 8, COPYING)
    return rows


def time_at(
    cases: Mapping[str, Case],
    settings: Settings,
    temperature: int,
    names: Sequence[str] = ("ende", "wiki_pe"),
    count: int | None = None,
    alike: bool = False,
) -> Rows:
    """Returns the rows of texts, by default the pair's two, at one temperature."""
    texts = read_sentences(settings, names, count or settings.choose(12, 3), alike)
    passes, rows = settings.choose(3, 2), {}
    forget_programs()
    for name, text in texts.items():
        rows[f"{name} T={temperature}"] = time_cases(cases, text, passes)
        if not settings.quick:  # quickly, texts have one length, and so the same programs
            forget_programs()
    return rows


def measure_cascades(settings: Settings) -> Rows:
    """Measures cascades beside their parts, on translations and on long inputs."""

    def follow() -> HorizontalCascade:
        return HorizontalCascade(PromptLookupDrafter(), make_bundled(), 2)

    def lead() -> HorizontalCascade:
        return HorizontalCascade(make_bundled(), PromptLookupDrafter(), 4)

    def inside() -> VerticalCascade:
        return VerticalCascade(make_bundled(), PromptLookupDrafter(), 2)

    cases = {
        "plain": Case("none"),
        "bundled drafter, γ = 6": drafts(6),
        "`lookup`, γ = 6": drafts(6, drafter=PromptLookupDrafter),
        "two tokens of `lookup`, then the bundled drafter, γ = 6": drafts(6, drafter=follow),
        "four tokens of the bundled drafter, then `lookup`, γ = 6": drafts(6, drafter=lead),
        "the bundled drafter, itself drafted for by `lookup`, γ = 6": drafts(6, drafter=inside),
    }
    texts = read_sentences(settings, ("ende", "wiki_pe", "scitldr"), settings.choose(12, 3))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_trees(settings: Settings) -> Rows:
    """Measures trees beside chains, at temperatures 0 and 1."""
    shapes: dict[str, dict[str, Any]] = {
        "tree of widths 2, 1, 1, 1": dict(tree=Tree.uniform((2, 1, 1, 1))),
        "tree of widths 3, 2, 1": dict(tree=Tree.uniform((3, 2, 1))),
        "dynamic tree of 16 nodes": dict(tree=DynamicTree(4, 4, 16)),
    }
    rows: Rows = {}
    for temperature in settings.temperatures:
        more: dict[str, Any] = {"sampling": SamplingConfig(temperature=float(temperature))}
        cases = {"plain": Case("none", None, more), "chain, γ = 4": drafts(4, **more)}
        cases |= {"chain, γ = 6": drafts(6, **more)}
        cases |= {name: Case("none", make_bundled, more | tree) for name, tree in shapes.items()}
        rows |= time_at(cases, settings, temperature)
    return rows


def measure_beams(settings: Settings) -> Rows:
    """Measures speculative beam search beside plain beam search and greedy decoding."""
    beams = {"num_beams": 4}
    cases = {"four beams, plain": Case("none", None, beams)}
    for gamma in (1, 2, 3):
        options = {"gamma": gamma, "beam_width": 8, **beams}
        cases[f"four beams, γ = {gamma}, 8 nodes a level"] = Case("none", make_bundled, options)
    cases["greedy, plain"] = Case("none")
    texts = read_sentences(settings, ("ende", "wiki_pe"), settings.choose(16, 3))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_steps(settings: Settings) -> Rows:
    """Measures v, a call over several positions, and c, a drafted token, in plain iterations.

    Beside them stand the products of a call alone, without which no call can be.
    """
    rows: dict[str, Row] = {}
    for form, label in (("none", "float32"), ("int8", "int8"), ("w8a8", "`w8a8`")):
        target, drafter = load_target(form), make_bundled()
        calls = matmul_roofline.bare_variants(target, None, 1, (0, 4)).values()
        name = f"{label}, products alone of a call over"
        bare = {f"{name} {width}": call for width, call in zip((1, 5), calls, strict=True)}
        passes = settings.choose(15, 5)
        rows |= time_iterations(label, target, drafter, (1, 3, 4, 7), passes, bare)
    return {"steps": rows}


def time_iterations(
    label: str,
    target: LanguageModel,
    drafter: Any,
    gammas: Sequence[int],
    passes: int,
    more: Mapping[str, timing.Call] = {},
) -> dict[str, Row]:
    """Returns milliseconds of iterations, and their ratio to one of plain decoding.

    `more` are calls of `timing.STEPS` steps that are timed in turn with them.
    """
    how = dict(max_new_tokens=NEW_TOKENS)
    plain = f"{label}, plain"
    state = timing.iteration_state(target, None, 1, 16, 0, **how)
    steps: dict[str, Any] = {plain: timing.iteration_variant(*state)}
    for gamma in gammas:
        state = timing.iteration_state(target, drafter, 1, 16, gamma, **how)
        steps[f"{label}, call over {gamma + 1} positions"] = timing.call_variant(*state)
        steps[f"{label}, iteration with γ = {gamma}"] = timing.iteration_variant(*state)
    steps |= more
    variants.warm_up({}, steps, [])
    seconds = variants.time_steps(steps, passes)
    return {
        name: {"ms": 1e3 * spread.median, "over_plain": spread.median / seconds[plain].median}
        for name, spread in seconds.items()
    }
