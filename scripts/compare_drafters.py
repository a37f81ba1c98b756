"""Compares many drafters on the same sentences: α, tokens per target call, c, v, improvement.

    python scripts/compare_drafters.py --input_file=ende/test.tsv.gz --limit=300 \
        --output=drafters.json --variant=ende/drafter,gamma=4 \
        --variant=ende/drafter,gamma=4,shortlist=counts.npz,shortlist_size=3072 \
        --variant=ende/drafter,gamma=8,gamma_policy=heuristic --variant=lookup,gamma=4 \
        --variant=exit:2,gamma=2 --variant=trigrams.npz,gamma=2

A variant is a value of `specdec generate --drafter`, then any of its flags that concern drafting.
Cascades are `vertical|MODEL|INNER|N`, where INNER drafts N tokens at a time for MODEL, and
`horizontal|FIRST|THEN|N`, with N tokens of FIRST before THEN's. All variants are timed in turn,
with eight sentences at a time. The improvement over plain decoding is in total wall time, encoders
included; its median and spread are over the passes. At temperature 0 every output is compared with
plain decoding's, and differing ones are counted (`specdec benchmark` lists which are near-ties).

α is given per position of the output, where a position without a draft counts as not accepted, and
("drafted") over positions with a draft only. The two differ for drafters that do not always draft.

c is the cost of a drafted token inside the loop, v the cost of the target's call and its
verification, both in iterations of plain decoding and timed apart from the sentences. They are not
timed for an adaptive γ, nor for cascades.
"""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
from absl import app, flags
from absl.flags import FLAGS

from specdec_jax.analysis import machine, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.report.records import write_record
from specdec_jax.analysis.timing import Spread, summarize
from specdec_jax.analysis.variants import Variant, make_decoder
from specdec_jax.commands.generation_flags import check_gamma
from specdec_jax.commands.options import DecodingOptions, check_at_least
from specdec_jax.commands.sentences import read_sentences
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.files.writing import check_output
from specdec_jax.models.language_model import LanguageModel

CASCADES: dict[str, Any] = {"vertical": VerticalCascade, "horizontal": HorizontalCascade}
# Options of a drafting model with its whole vocabulary in full precision.
_WHOLE: dict[str, Any] = dict(shortlist=None, shortlist_size=0, drafter_int8=False)
_TARGET = flags.DEFINE_string("target", "ende/target", "Folder or bundled name of the target.")
_VARIANT = flags.DEFINE_multi_string(
    "variant", None, "DRAFTER[,flag=value ...]; repeatable.", required=True
)
# Options of drafting; plain decoding has none of them.
_DRAFTING = (
    *("drafter", "shard_drafter", "gamma_policy", "gamma_settings"),
    *("lenience", "typical_epsilon", "typical_delta", *_WHOLE),
)
# These are the same for all variants.
_COMMON = ("target", "temperature", "verifier", "max_new_tokens")
_FILE = flags.DEFINE_string(
    "input_file",
    None,
    "One sentence a line, or a TSV file, of which the first column is read.",
    required=True,
)
_LIMIT = flags.DEFINE_integer("limit", 0, "Read only this many lines; 0: all.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most probable token.")
_VERIFIER = flags.DEFINE_string(
    "verifier", "token", "As for `specdec generate`; token gives α at every temperature."
)
flags.DEFINE_integer("max_new_tokens", 64, "The most new tokens.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Passes over the sentences.")
_STEPS = flags.DEFINE_bool(
    "steps", True, "Time c and v too, which compiles two more programs for every variant."
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON record.")


def read_variant(variant: str) -> tuple[DecodingOptions, int]:
    """Returns the options of a variant, and its γ; raises ValueError for wrong ones."""
    drafter, *settings = variant.split(",")
    drafter = drafter.split("|")[1] if "|" in drafter else drafter
    kinds = typing.get_type_hints(DecodingOptions) | {"gamma": int}
    chosen: dict[str, Any] = {"gamma": 4}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds or name in ("drafter", *_COMMON):
            expected = "gamma or an option of `specdec generate` that concerns drafting"
            raise ValueError(f"variant: got {setting!r} in {variant!r}, expected {expected}")
        if kinds[name] == tuple[str, ...]:
            chosen[name] = (*chosen.get(name, ()), value)
            continue
        try:  # without a value an option is turned on
            chosen[name] = pydantic.TypeAdapter(kinds[name]).validate_python(value or "true")
        except pydantic.ValidationError:
            expected = f"a value of {name}"
            raise ValueError(f"variant: got {setting!r}, expected {expected}") from None
    gamma = chosen.pop("gamma")
    chosen |= {name: FLAGS[name].value for name in _COMMON}
    options = DecodingOptions(drafter=drafter, **chosen)
    options.check()
    check_gamma(gamma)
    check_at_least(1, gamma=gamma)
    return options, gamma


def check_alike(asked: Mapping[str, tuple[DecodingOptions, int]]) -> None:
    """Raises ValueError for variants that differ in what plain decoding depends on, too."""
    (first, one), *others = (
        (name, {field.name: getattr(options, field.name) for field in dataclasses.fields(options)})
        for name, (options, _) in asked.items()
    )
    for name, other in others:
        for field in one:
            if field not in _DRAFTING and one[field] != other[field]:
                got = f"{field} {one[field]!r} in {first!r} and {other[field]!r} in {name!r}"
                raise ValueError(f"variant: got {got}, expected the same in all, beside one plain")


def load_drafter(variant: str, options: DecodingOptions, target: LanguageModel) -> Any:
    """Returns the drafter of a variant; builds a cascade from its parts."""
    drafter = options.load(target)[1]
    kind, *parts = variant.split(",")[0].split("|")
    if not parts:
        return drafter
    if kind not in CASCADES or len(parts) != 3 or not parts[2].isdigit():
        expected = "vertical|MODEL|INNER|N or horizontal|FIRST|THEN|N"
        raise ValueError(f"variant: got {variant!r}, expected {expected}")
    second = dataclasses.replace(options, drafter=parts[1], **_WHOLE)
    cascade = CASCADES[kind](drafter, second.load(target)[1], int(parts[2]))
    check_pair(target, cascade)
    return cascade


def make_variant(
    options: DecodingOptions, gamma: int, target: LanguageModel, drafter: Any
) -> Variant:
    """Returns a variant that decodes with these options."""
    how = options.decoding(plain=drafter is None) | {"drafter": drafter, "gamma": 0}
    if drafter is not None:
        how["gamma"] = options.gamma_of(gamma)
    return Variant(gamma, make_decoder(target, how))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1]!r}, expected flags only")
    try:
        check_output(_OUTPUT.value, source=_FILE.value)
        asked = {variant: read_variant(variant) for variant in _VARIANT.value}
        check_alike(asked)
        check_at_least(0, limit=_LIMIT.value)
        check_at_least(1, repeats=_REPEATS.value)
        lines = read_sentences([], _FILE.value)[: _LIMIT.value or None]
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    first = next(iter(asked.values()))[0]
    fixed: dict[str, Any] = dict(gamma_policy="fixed", gamma_settings=())
    plain = dataclasses.replace(first, drafter=None, **fixed, **_WHOLE)
    target, _ = plain.load()
    sentences = [line.partition("\t")[0] for line in lines]
    ids = encode(target, sentences, plain.max_input_length)
    batches = analysis_variants.cut_batches(sentences, ids, 1, plain.seed)
    variants, models = {"plain": make_variant(plain, 0, target, None)}, {}
    for name, (options, gamma) in asked.items():
        models[name] = target, load_drafter(name, options, target)
        variants[name] = make_variant(options, gamma, *models[name])
    longest = max(batch.padded for batch in batches)
    steps = {}
    if _STEPS.value:
        state = timing.iteration_state(target, None, 1, longest, 0, **plain.decoding(plain=True))
        steps["plain"] = timing.iteration_variant(*state)
    for name, (options, gamma) in asked.items():
        if _STEPS.value and options.gamma_policy == "fixed" and "|" not in name:
            state = timing.iteration_state(*models[name], 1, longest, gamma, **options.decoding())
            steps |= {
                f"call, {name}": timing.call_variant(*state),
                f"iteration, {name}": timing.iteration_variant(*state),
            }
    analysis_variants.warm_up(variants, steps, batches)
    times = analysis_variants.time_steps(steps, _REPEATS.value) if steps else {}
    analysis_variants.time_passes(variants, batches, _REPEATS.value, "timing")
    rows = [
        row(name, variant, variants["plain"]) | costs(name, variant, times)
        for name, variant in variants.items()
        if name != "plain"
    ]
    record = {
        "machine": machine.describe_machine(),
        "target": _TARGET.value,
        "input_file": _FILE.value,
        "sentences": len(sentences),
        "temperature": _TEMPERATURE.value,
        "verifier": _VERIFIER.value,
        "plain_seconds": variants["plain"].seconds,
        "variants": rows,
    }
    if _OUTPUT.value:
        write_record(_OUTPUT.value, record)
    print(
        f"{'α':>7}{'drafted':>9}{'tokens/call':>13}{'drafted/call':>14}{'c':>8}{'v':>8}"
        f"{'improvement':>25}  differ  drafter"
    )
    for line in rows:
        gain = line["improvement"]
        shown = f"{gain['median']:.3f} ({gain['least']:.3f} to {gain['most']:.3f})"
        alpha, drafted, c, v = (
            "-" if line[name] is None else f"{line[name]:.3f}"
            for name in ("alpha", "alpha_where_drafted", "cost_ratio", "verify_cost")
        )
        differ = "-" if line["differ"] is None else line["differ"]
        counts = f"{line['tokens_per_call']:>13.2f}{line['drafted_per_call']:>14.2f}"
        numbers = f"{alpha:>7}{drafted:>9}{counts}{c:>8}{v:>8}{shown:>25}{differ:>8}"
        print(f"{numbers}  {line['variant']}")


def costs(name: str, variant: Variant, times: dict[str, Spread]) -> dict:
    """Returns c and v, from medians."""
    if f"call, {name}" not in times:
        return {"cost_ratio": None, "verify_cost": None}
    call, both = times[f"call, {name}"].median, times[f"iteration, {name}"].median
    step = times["plain"].median
    return {"cost_ratio": max(0.0, both - call) / variant.gamma / step, "verify_cost": call / step}


def row(name: str, variant: Variant, plain: Variant) -> dict:
    """Returns the counts of a variant and its improvement over plain decoding."""
    examined = int(np.sum(variant.total("examined_by_position")))
    calls, accepted = variant.total("target_calls"), variant.total("accepted")
    rated = variant.has_rate
    differ = analysis_variants.count_differing(variant, plain)
    return {
        "variant": name,
        "alpha": accepted / (examined + variant.total("undrafted")) if rated else None,
        "alpha_where_drafted": accepted / examined if rated else None,
        "tokens_per_call": variant.tokens / max(calls, 1),
        "drafted_per_call": variant.total("drafted") / max(calls, 1),
        "improvement": summarize(plain.seconds_per_token / variant.seconds_per_token),
        "compile_seconds": variant.compile_seconds,
        "differ": differ if _TEMPERATURE.value == 0 else None,
    }


if __name__ == "__main__":
    app.run(main)
