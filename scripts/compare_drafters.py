"""Compares many drafters on the same sentences: α, tokens per target call, c, v, improvement over plain decoding.

    python scripts/compare_drafters.py --input_file=ende/test.tsv.gz --limit=300 --output=drafters.json \
        --variant=ende/drafter,gamma=4 \
        --variant=ende/drafter,gamma=4,shortlist=counts.npz,shortlist_size=3072 \
        --variant=ende/drafter,gamma=8,gamma_policy=heuristic --variant=lookup,gamma=4 --variant=exit:2,gamma=2 \
        --variant=trigrams.npz,gamma=2

A variant is a value of `specdec generate --drafter`, then any of its flags that concern drafting.
Cascades are `vertical|MODEL|INNER|N`, where INNER drafts N tokens at a time for MODEL, and
`horizontal|FIRST|THEN|N`, with N tokens of FIRST before THEN's. All variants are timed in turn, sentence
by sentence. The improvement is in total wall time, encoders included; its median and spread are over
the passes. At temperature 0 every output is compared with plain decoding's, and differing ones are
counted (`specdec benchmark` tells which are near-ties).

α is given per position of the output, where one at which nothing was drafted counts as not accepted,
and ("drafted") only where something was drafted: the two differ for drafters that draft now and then.

c is the cost of a drafted token inside the loop, v the cost of the target's call and its
verification, both in iterations of plain decoding and timed apart from the sentences. They are not
timed for an adaptive γ, which has no one draft to time, nor for cascades.
"""

import dataclasses
import json
import typing

import numpy as np
from absl import app, flags

from specdec_jax.analysis import machine, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.timing import Spread
from specdec_jax.commands.options import DecodingOptions
from specdec_jax.commands.sentences import read_sentences
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.files.writing import check_output, write_file

CASCADES = {"vertical": VerticalCascade, "horizontal": HorizontalCascade}
_TARGET = flags.DEFINE_string("target", "ende/target", "Folder or bundled name of the target.")
_ARM = flags.DEFINE_multi_string(
    "variant", None, "DRAFTER[,flag=value ...]; repeatable.", required=True
)
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
_NEW = flags.DEFINE_integer("max_new_tokens", 64, "The most new tokens.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Passes over the sentences.")
_STEPS = flags.DEFINE_bool(
    "steps", True, "Time c and v too, which compiles two more programs for every variant."
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON record.")


def options_of(variant: str) -> tuple[DecodingOptions, int]:
    """Returns the options of a variant, and its γ."""
    drafter, *settings = variant.split(",")
    drafter = drafter.split("|")[1] if "|" in drafter else drafter
    kinds, chosen, gamma = typing.get_type_hints(DecodingOptions), {}, 4
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "gamma":
            gamma = int(value)
        elif name not in kinds:
            raise ValueError(
                f"variant: got {setting!r} in {variant!r}, expected gamma or an option of `specdec generate`"
            )
        elif kinds[name] is bool:
            chosen[name] = value.lower() in ("", "true", "1")
        elif kinds[name] == tuple[str, ...]:
            chosen[name] = (*chosen.get(name, ()), value)
        else:
            chosen[name] = int(value) if kinds[name] is int else value
    return DecodingOptions(
        target=_TARGET.value,
        drafter=drafter,
        temperature=_TEMPERATURE.value,
        verifier=_VERIFIER.value,
        max_new_tokens=_NEW.value,
        **chosen,
    ), gamma


def drafter_of(variant: str, options: DecodingOptions, target):
    """Returns the drafter of a variant; builds a cascade from its parts."""
    drafter = options.load(target)[1]
    kind, *parts = variant.split(",")[0].split("|")
    if not parts:
        return drafter
    if kind not in CASCADES or len(parts) != 3 or not parts[2].isdigit():
        expected = "vertical|MODEL|INNER|N or horizontal|FIRST|THEN|N"
        raise ValueError(f"variant: got {variant!r}, expected {expected}")
    second = dataclasses.replace(
        options, drafter=parts[1], shortlist=None, shortlist_size=0, drafter_int8=False
    )
    cascade = CASCADES[kind](drafter, second.load(target)[1], int(parts[2]))
    check_pair(target, cascade)
    return cascade


def decoder(options: DecodingOptions, gamma: int, target, drafter) -> analysis_variants.Variant:
    how = options.decoding(plain=drafter is None) | dict(
        drafter=drafter, gamma=options.gamma_of(gamma) if drafter else 0
    )
    return analysis_variants.Variant(
        gamma, lambda batch: generate(target, batch.inputs, key=batch.keys, **how)
    )


def main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1]!r}, expected flags only")
    check_output(_OUTPUT.value)
    asked = {variant: options_of(variant) for variant in _ARM.value}
    for options, _ in asked.values():
        options.check()
    if (
        len({(options.dtype, options.vocabulary, options.mesh) for options, _ in asked.values()})
        > 1
    ):
        raise ValueError(
            "variant: got different values of dtype, vocabulary or mesh, expected the same in all, which share "
            "one target"
        )
    plain = dataclasses.replace(
        next(iter(asked.values()))[0],
        drafter=None,
        gamma_policy="fixed",
        gamma_settings=(),
        shortlist=None,
        shortlist_size=0,
        drafter_int8=False,
    )
    target, _ = plain.load()
    sentences = [line.partition("\t")[0] for line in read_sentences([], _FILE.value)][
        : _LIMIT.value or None
    ]
    ids = encode(target, sentences, plain.max_input_length)
    batches = analysis_variants.cut_batches(sentences, ids, 1, plain.seed)
    variants, models = {"plain": decoder(plain, 0, target, None)}, {}
    for name, (options, gamma) in asked.items():
        models[name] = target, drafter_of(name, options, target)
        variants[name] = decoder(options, gamma, *models[name])
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
    for turn in range(_REPEATS.value):
        analysis_variants.time_pass(variants, batches, turn, f"pass {turn + 1} of {_REPEATS.value}")
    rows = [
        row(name, variant, variants["plain"]) | costs(name, variant, times)
        for name, variant in variants.items()
        if name != "plain"
    ]
    record = {
        "machine": machine.machine(),
        "target": _TARGET.value,
        "input_file": _FILE.value,
        "sentences": len(sentences),
        "temperature": _TEMPERATURE.value,
        "verifier": _VERIFIER.value,
        "plain_seconds": variants["plain"].seconds,
        "variants": rows,
    }
    if _OUTPUT.value:
        write_file(_OUTPUT.value, json.dumps(record, indent=1) + "\n")
    print(
        f"{'α':>7}{'drafted':>9}{'tokens/call':>13}{'drafted/call':>14}{'c':>8}{'v':>8}{'improvement':>25}  differ  "
        "drafter"
    )
    for line in rows:
        rates, gain = (line["alpha"], line["alpha_where_drafted"]), line["improvement"]
        shown = f"{gain['median']:.3f} ({gain['least']:.3f} to {gain['most']:.3f})"
        c, v = (
            "-" if line[name] is None else f"{line[name]:.3f}"
            for name in ("cost_ratio", "verify_cost")
        )
        everywhere, drafted = ("-" if alpha is None else f"{alpha:.3f}" for alpha in rates)
        differ = "-" if line["differ"] is None else line["differ"]
        counts = f"{line['tokens_per_call']:>13.2f}{line['drafted_per_call']:>14.2f}"
        print(
            f"{everywhere:>7}{drafted:>9}{counts}{c:>8}{v:>8}{shown:>25}{differ:>8}  {line['variant']}"
        )


def costs(name: str, variant: analysis_variants.Variant, times: dict[str, Spread]) -> dict:
    """Returns c and v, from medians."""
    if f"call, {name}" not in times:
        return {"cost_ratio": None, "verify_cost": None}
    call, both = times[f"call, {name}"].median, times[f"iteration, {name}"].median
    step = times["plain"].median
    return {"cost_ratio": max(0.0, both - call) / variant.gamma / step, "verify_cost": call / step}


def row(name: str, variant: analysis_variants.Variant, plain: analysis_variants.Variant) -> dict:
    examined = sum(int(result.stats.examined_by_position.sum()) for result in variant.results)
    calls, accepted = variant.total("target_calls"), variant.total("accepted")
    differ = sum(
        not np.array_equal(a.tokens, b.tokens)
        for a, b in zip(variant.results, plain.results, strict=True)
    )
    per_token = plain.seconds_per_token / variant.seconds_per_token
    return {
        "variant": name,
        "alpha": accepted / (examined + variant.total("undrafted")) if examined else None,
        "alpha_where_drafted": accepted / examined if examined else None,
        "tokens_per_call": variant.tokens / max(calls, 1),
        "drafted_per_call": variant.total("drafted") / max(calls, 1),
        "improvement": Spread.from_samples(per_token)._asdict(),
        "compile_seconds": variant.compile_seconds,
        "differ": differ if _TEMPERATURE.value == 0 else None,
    }


if __name__ == "__main__":
    app.run(main)
