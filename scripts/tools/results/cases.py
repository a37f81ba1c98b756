"""Ways of decoding that are timed in turn, and how their rows read."""

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.analysis import variants
from specdec_jax.analysis.timing import summarize
from specdec_jax.analysis.variants import SentenceBatch, Variant
from specdec_jax.checkpoints import loader
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.families import PRESETS
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from tools.results.stage import Row

NEW_TOKENS = 64
# The row of γ = "auto" in a table; those of a fixed γ begin with `FIXED`.
AUTO, FIXED = '`gamma="auto"`', "γ = "


@functools.cache
def load_target(form: str) -> LanguageModel:
    """Returns the bundled target: "none" is float32, "int8" and "w8a8" are rounded."""
    return loader.load("ende/target", "float32", quantize=form, say=_say_nothing)


@functools.cache
def load_drafter(form: str | None = None) -> LanguageModel:
    """Returns the bundled drafter, by default as stored."""
    return loader.load("ende/drafter", "float32", quantize=form, say=_say_nothing)


def _say_nothing(line: str) -> None:
    pass


def make_bundled() -> ModelDrafter:
    """Returns the bundled drafter."""
    return ModelDrafter(load_drafter())


def make_shape(preset: str) -> ModelConfig:
    """Returns a published shape in float32, with an encoder of one layer if it has one."""
    config = PRESETS[preset].replace(dtype="float32")
    return config if config.decoder_only else config.replace(num_encoder_layers=1)


@functools.lru_cache(maxsize=3)
def make_random(preset: str) -> LanguageModel:
    """Returns such a shape with random weights."""
    return LanguageModel.random(make_shape(preset), eos_ids=(), name=preset)


class Case(NamedTuple):
    """One way of decoding.

    Attributes:
      form: the target, as `load_target` or another function takes it.
      drafter: makes the drafter; None is autoregressive decoding.
      options: of `generate`.
      each: further options of the sentence with this number.
    """

    form: str
    drafter: Callable[[], Any] | None = None
    options: Mapping[str, Any] = {}
    each: Callable[[int], Mapping[str, Any]] | None = None


def drafts(
    gamma: Any, form: str = "none", drafter: Callable = make_bundled, **options: Any
) -> Case:
    """Returns a case that drafts, by default with the bundled drafter."""
    return Case(form, drafter, {"gamma": gamma, **options})


def forget_programs() -> None:
    """Forgets compiled programs: a process has too few memory mappings for those of all stages."""
    jax.clear_caches()
    gc.collect()


def time_cases(
    cases: Mapping[str, Case],
    sentences: Sequence[Any],
    passes: int,
    load: Callable[[str], LanguageModel] = load_target,
    new_tokens: int = NEW_TOKENS,
    others: Mapping[str, Variant] = {},
) -> dict[str, Row]:
    """Decodes inputs one at a time by all cases in turn; the first one is the base of ratios.

    Args:
      cases: the ways of decoding by name.
      sentences: strings, or lists of ids.
      passes: the passes that are timed, after an untimed one.
      load: returns the target of a case's form.
      new_tokens: the most new tokens.
      others: other libraries' decoding by name, which takes its turn too.
    """
    runs = {name: Variant(0, _make_decoder(case, load, new_tokens)) for name, case in cases.items()}
    runs |= others
    inputs = list(sentences)
    if isinstance(inputs[0], str):
        inputs = encode(load(next(iter(cases.values())).form), inputs, 512)
    batches = variants.cut_batches(inputs, inputs, 1, 0)
    variants.warm_up(runs, {}, batches)
    for run in runs.values():
        for batch in batches:  # what γ = "auto" learns, and programs of other widths
            batch.decode_with(run.decode)
    variants.time_passes(runs, batches, passes, "timing")
    base = next(iter(runs.values()))
    rows = {name: describe_run(run, base) for name, run in runs.items()}
    add_over_fixed(rows, {name: run.seconds for name, run in runs.items()})
    return rows


def add_over_fixed(rows: Mapping[str, Row], seconds: Mapping[str, Sequence[float]]) -> None:
    """Adds the speed of γ = "auto" over the best fixed γ's to its row, from two passes on.

    Which γ is the best in a pass is told by the other passes: else it would be a lucky one.

    Args:
      rows: the rows by name.
      seconds: of each pass, by name.
    """
    fixed = {name: np.array(times) for name, times in seconds.items() if name.startswith(FIXED)}
    if AUTO not in rows or not fixed or len(seconds[AUTO]) == 1:
        return
    over = []
    for turn, auto in enumerate(seconds[AUTO]):
        others = {name: np.median(np.delete(times, turn)) for name, times in fixed.items()}
        best = min(others, key=lambda name: others[name])
        over.append(fixed[best][turn] / auto)
    rows[AUTO]["over_fixed"] = summarize(over)


def _make_decoder(
    case: Case, load: Callable[[str], LanguageModel], new_tokens: int
) -> Callable[[SentenceBatch], GenerationResult]:
    target, drafter = load(case.form), case.drafter and case.drafter()
    how = dict(max_new_tokens=new_tokens, drafter=drafter, generation_config=None)
    how |= {"gamma": 0} if drafter is None else {}
    how |= case.options

    def decode(batch: SentenceBatch) -> GenerationResult:
        more = case.each(batch.numbers[0]) if case.each else {}
        return generate(target, batch.inputs, key=batch.keys, **how, **more)

    return decode


def describe_run(run: Variant, base: Variant) -> Row:
    """Returns the row of a way of decoding."""
    row: Row = {
        "ms_per_token": 1e3 * float(np.median(run.seconds_per_token)),
        "improvement": summarize(base.seconds_per_token / run.seconds_per_token),
        "alpha": None,
        "tokens_per_call": 1.0,
        "differing": variants.count_differing(run, base),
        "sentences": len(run.results),
    }
    if any(one.stats is None for one in run.results):
        return row  # another library's, which counts nothing
    row["tokens_per_call"] = run.tokens / max(run.total("target_calls"), 1)
    if run.has_rate:
        examined = sum(int(one.stats.examined_by_position.sum()) for one in run.results)
        row["alpha"] = run.total("accepted") / examined
    return row


def format_speed(row: Row) -> str:
    """Returns the improvement and its spread; α and tokens per target call if it drafts."""
    gain = row["improvement"]
    text = format_ratio(row)
    if row["alpha"] is not None:
        text += f", α {row['alpha']:.2f}"
    if _differs_in_calls(row):
        text += f", {row['tokens_per_call']:.2f} tokens a call"
    text += f", {row['ms_per_token']:.2f} ms a token" + format_over_fixed(row)
    return text + f", {row['sentences']} sentences" * (gain["least"] == gain["most"] == 1)


def format_over_fixed(row: Row) -> str:
    """Returns the speed over the best fixed γ's, with a comma; "" where there is none."""
    if "over_fixed" not in row:
        return ""
    return f", {row['over_fixed']['median']:.2f} of the best fixed γ"


def format_brief(row: Row) -> str:
    """Returns the improvement; α and tokens per target call if it drafts."""
    text = f"{row['improvement']['median']:.2f}"
    if row["alpha"] is not None:
        text += f"; α {row['alpha']:.2f}"
    if _differs_in_calls(row):
        text += f"; {row['tokens_per_call']:.2f}"
    return text


def _differs_in_calls(row: Row) -> bool:
    """Returns whether a row has other numbers of tokens and calls: it drafts, or has beams."""
    return row["alpha"] is not None or row["tokens_per_call"] != 1


def format_ratio(row: Row) -> str:
    """Returns a ratio and its spread."""
    gain = row["improvement"]
    return f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"


def format_step(row: Row) -> str:
    """Returns milliseconds, and iterations of plain decoding."""
    return f"{row['ms']:.3f} ms, {row['over_plain']:.2f} plain iterations"
