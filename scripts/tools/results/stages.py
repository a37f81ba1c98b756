"""The table of stages of `results.py`."""

from tools.results import (
    copying,
    elsewhere,
    encoders,
    large,
    learning,
    limits,
    loading,
    only,
    pair,
    rounding_stages,
    rules,
    scaling,
    shapes,
    starting,
    templates,
    translation,
    whole_files,
)
from tools.results.cases import format_brief, format_ratio, format_speed, format_step
from tools.results.stage import Stage

_OVER_PLAIN = "one sentence at a time, over plain"

STAGES: dict[str, Stage] = {
    "pair": Stage(
        "bundled pair, one sentence at a time",
        (2.5, 0.9),
        pair.measure_pair,
        format_speed,
        by_sentence=True,
    ),
    "steps": Stage("one row", (2, 1), pair.measure_steps, format_step),
    "limits": Stage("one row", (0.5, 0.5), limits.measure_limits, limits.format_limit),
    "texts": Stage(_OVER_PLAIN, (8, 0.8), pair.measure_texts, format_speed, by_sentence=True),
    "auto": Stage(
        "64 inputs: over plain; inputs a second",
        (25, None),
        whole_files.measure_auto,
        whole_files.format_file,
        whole_files.format_gain,
        once=True,
    ),
    "drafters": Stage(
        _OVER_PLAIN, (9, 2.2), pair.measure_drafters, format_speed, format_brief, by_sentence=True
    ),
    "policies": Stage(
        _OVER_PLAIN, (3, None), pair.measure_policies, format_speed, by_sentence=True
    ),
    "cascades": Stage(
        _OVER_PLAIN, (1.5, None), pair.measure_cascades, format_speed, once=True, by_sentence=True
    ),
    "only": Stage(_OVER_PLAIN, (3.5, 1.2), only.measure_only, format_speed, by_sentence=True),
    "trained": Stage(
        _OVER_PLAIN, (14, None), only.measure_trained, format_speed, once=True, by_sentence=True
    ),
    "summaries": Stage(
        "summaries by people, over plain",
        (3, None),
        copying.measure_summaries,
        format_speed,
        by_sentence=True,
    ),
    "edits": Stage(
        "corrected sentences, over plain",
        (3.5, None),
        copying.measure_edits,
        format_speed,
        by_sentence=True,
    ),
    "templates": Stage(
        "the same sentences with other names, over plain",
        (3, None),
        templates.measure_templates,
        format_speed,
        once=True,
    ),
    "learning": Stage(
        "whole jobs, one input at a time, γ = 4, over plain decoding",
        (15, None),
        learning.measure_learning,
        learning.format_learning,
        once=True,
    ),
    "trees": Stage(
        _OVER_PLAIN,
        (3, 0.4),
        pair.measure_trees,
        format_speed,
        unrated=".* T=1, (chain|tree of widths)",
        by_sentence=True,
    ),
    "verifiers": Stage(
        "one sentence at a time, over plain",
        (6, None),
        rules.measure_verifiers,
        format_speed,
        once=True,
        by_sentence=True,
    ),
    "expected": Stage(
        "one sentence at a time",
        (4, None),
        rules.measure_expected,
        rules.format_expected,
        once=True,
        by_sentence=True,
    ),
    "beams": Stage(
        "one sentence at a time, over plain beams",
        (1.5, 0.5),
        pair.measure_beams,
        format_speed,
        by_sentence=True,
    ),
    "gpt": Stage(
        "gpt/97m with gpt/6m, random weights",
        (3, None),
        shapes.measure_gpt,
        shapes.format_shape,
        once=True,
        by_sentence=True,
    ),
    "paper": Stage(
        "random weights", (6, None), shapes.measure_paper, shapes.format_shape, by_sentence=True
    ),
    "large": Stage(
        "random weights, one input at a time",
        (11, None),
        large.measure_large,
        shapes.format_shape,
        once=True,
        by_sentence=True,
    ),
    "scaling": Stage(
        "size of what grows",
        (2.4, None),
        scaling.measure_scaling,
        scaling.format_scaling,
    ),
    "opus": Stage(
        "opus-mt's shape, random weights, one sentence at a time",
        (2, None),
        translation.measure_opus,
        translation.format_opus,
        by_sentence=True,
    ),
    "file": Stage(
        "a whole file, over float32", (4.5, 0.8), whole_files.measure_file, whole_files.format_file
    ),
    "encoders": Stage(
        "an encoder over one input, T5 1.1 small with random weights, float32",
        (2, 0.7),
        encoders.measure_encoders,
        encoders.format_encoders,
    ),
    "batching": Stage(
        "a whole file, over its order",
        (1.5, None),
        whole_files.measure_batching,
        whole_files.format_file,
    ),
    "bits": Stage(
        "differs from plain decoding of one sentence at a time",
        (1.5, None),
        whole_files.measure_bits,
        whole_files.format_bits,
        timed=False,
        once=True,
    ),
    "quality": Stage(
        "the bundled target's argmax output",
        (1, None),
        rounding_stages.measure_quality,
        rounding_stages.format_quality,
        timed=False,
        once=True,
    ),
    "rounded": Stage(
        "float32 beside its rounded form",
        (5.5, None),
        rounding_stages.measure_rounded,
        rounding_stages.format_rounded,
        timed=False,
        once=True,
    ),
    "t5x": Stage(
        "the package's sentences, over T5X",
        (1.5, 1),
        elsewhere.measure_t5x,
        format_ratio,
        by_sentence=True,
    ),
    "accelerator": Stage(
        "T5-XXL with T5-small in bfloat16, inputs and outputs of 128 tokens, γ = 7",
        (0, 0),  # five minutes on an accelerator
        elsewhere.measure_accelerator,
        elsewhere.format_figure,
        accelerator=True,
    ),
    "accelerator_peers": Stage(
        "T5-XXL with T5-small in bfloat16, inputs and outputs of 128 tokens, γ = 7",
        (0, 0),  # five minutes on an accelerator
        elsewhere.measure_accelerator_peers,
        elsewhere.format_figure,
        accelerator=True,
    ),
    "tpu": Stage(
        "T5-XXL in bfloat16, by the compiler's estimates",
        (12, None),
        elsewhere.measure_tpu,
        elsewhere.format_tpu,
        timed=False,
        once=True,
    ),
    "tpu_drafters": Stage(
        "T5-XXL in bfloat16, one row, by the compiler's estimates",
        (3.5, None),
        elsewhere.measure_tpu_drafters,
        elsewhere.format_tpu,
        timed=False,
        once=True,
    ),
    "tpu_families": Stage(
        "in bfloat16, one row, by the compiler's estimates",
        (37, None),
        elsewhere.measure_tpu_families,
        elsewhere.format_tpu,
        timed=False,
        once=True,
    ),
    "start": Stage(
        "a process, from the shell to its end",
        (0.5, None),
        starting.measure_start,
        starting.format_start,
    ),
    "loading": Stage(
        "dummy weights, loaded in a process of its own",
        (8, None),
        loading.measure_loading,
        loading.format_loading,
        once=True,
    ),
}
