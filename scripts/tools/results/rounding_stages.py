"""Stages about int8: quality of the outputs, and how far rounding moves distributions."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.models.language_model import LanguageModel
from tools import rounding
from tools.quality import quality
from tools.results.cases import load_drafter, load_target, make_random
from tools.results.shapes import draw_inputs
from tools.results.stage import Row, Rows, Settings
from tools.results.texts import require_pairs

QUANTITIES = {
    "KL divergence, mean; 99th percentile; greatest": (
        "{kl[mean]:.5f}; {kl[percentile_99]:.4f}; {kl[most]:.3f} nats, {tokens:,} tokens"
    ),
    "error of the logits": "{logits_error:.1%}",
    "tokens whose argmax changes": "{argmax_changes:.2%}",
    "outputs that differ": "{outputs_that_differ} of {inputs:,}",
    "BLEU and chrF in float32": "{full[bleu]:.2f}, {full[chrf]:.1f}",
    "BLEU and chrF, rounded": "{rounded[bleu]:.2f}, {rounded[chrf]:.1f}",
    "α of the drafter at temperature 1, before and after": (
        "{alpha[full]:.4f}, {alpha[rounded]:.4f}"
    ),
    "the same at temperature 0": "{alpha_argmax[full]:.4f}, {alpha_argmax[rounded]:.4f}",
}


def decode_texts(model: LanguageModel, sources: Sequence[str], new_tokens: int = 128) -> list:
    """Returns the outputs of plain decoding with argmax."""
    how: dict[str, Any] = dict(batch_size=64, seed=0, max_new_tokens=new_tokens, gamma=0)
    return list(decode_all(model, encode(model, sources, 512), generation_config=None, **how))


def measure_quality(settings: Settings) -> Rows:
    """Measures BLEU and chrF of the target's argmax output, in float32 and rounded."""
    rows: Rows = {}
    for name in ("ende", "wiki_pe"):
        sources, references = zip(*require_pairs(settings, name, settings.choose(2000, 200)))
        rows[name] = {}
        for form, label in (("none", "float32"), ("int8", "int8"), ("w8a8", "`w8a8`")):
            scores = quality(decode_texts(load_target(form), sources), references)
            rows[name][label] = {
                "bleu": scores["bleu"],
                "chrf": scores["chrf"],
                "count": len(sources),
            }
    return rows


def format_quality(row: Row) -> str:
    """Returns BLEU and chrF."""
    return f"BLEU {row['bleu']:.1f}, chrF {row['chrf']:.1f} ({row['count']} sentences)"


def measure_rounded(settings: Settings) -> Rows:
    """Measures how far rounding moves the distributions of a model that is not stored in int8.

    The bundled target is stored in int8, so its weights are first moved at random by up to half a
    step of the rounding.
    """
    full, rows = rounding.moved(load_target("none")), {}
    for name in ("ende", "wiki_pe"):
        count = settings.choose(1000, 100)
        sources, references = zip(*require_pairs(settings, name, count))
        rows[name] = {}
        for form in ("int8", "w8a8"):
            found = rounding.compare_outputs(
                (full, rounding.rounded(full, form)),
                load_drafter(),
                encode(full, sources, 512),
                references,
                lambda model, what: decode_texts(model, sources),
                50,
            )
            rows[name] |= {
                f"`{form}`: {quantity}": make_row(quantity, found) for quantity in QUANTITIES
            }
    rows["shapes"] = measure_shapes(settings)
    return rows


def measure_shapes(settings: Settings) -> dict[str, Row]:
    """Returns the error of the logits of larger shapes with random weights."""
    names = ("t5_1_1/base",) if settings.quick else ("t5_1_1/base", "t5_1_1/large")
    rows: dict[str, Row] = {}
    for name in names:
        full = make_random(name)
        inputs = draw_inputs(full, 8)
        divergence = rounding.Divergence(full, rounding.rounded(full, "int8"))
        divergence.add(inputs, [row[:16] for row in inputs])
        rows[f"`int8`: {name}"] = make_row("error of the logits", divergence.record())
    return rows


def make_row(quantity: str, found: Mapping[str, Any]) -> Row:
    """Returns a row with what its quantity shows of a comparison."""
    fields = [field for _, field, *_ in string.Formatter().parse(QUANTITIES[quantity]) if field]
    names = {field.partition("[")[0] for field in fields}
    return {"quantity": quantity, "found": {name: found[name] for name in sorted(names)}}


def format_rounded(row: Row) -> str:
    """Returns one quantity."""
    return QUANTITIES[row["quantity"]].format(**row["found"])
