"""The stage of models that no cache holds, with weights in int8, beside CTranslate2.

Only its times mean anything: weights are random, no output ends before its limit, and drafted
tokens are accepted at random. Encoders have one layer.
"""

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax.analysis.variants import SentenceBatch, Variant
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.language_model import LanguageModel
from tools.results import peers
from tools.results.cases import (
    Case,
    drafts,
    forget_programs,
    make_random,
    make_shape,
    time_cases,
)
from tools.results.pair import time_iterations
from tools.results.shapes import NEW_TOKENS, draw_inputs
from tools.results.stage import Rows, Settings

SIZES, FORMS = ("t5_1_1/large", "t5_1_1/xl"), ("int8", "w8a8")
DRAFTER, ALPHA, GAMMAS = "t5_1_1/small", 0.75, (3, 5)


@functools.lru_cache(maxsize=len(FORMS))
def make_target(preset: str, form: str) -> LanguageModel:
    """Returns a published shape with dummy weights of 8 bits, and an encoder of one layer."""
    return LanguageModel.dummy(make_shape(preset), eos_ids=(), name=preset, quantize=form)


def measure_large(settings: Settings) -> Rows:
    """Measures T5-large and T5-XL, with T5-small in int8 as the drafter."""
    rows: Rows = {}
    for preset in SIZES[: settings.choose(2, 1)]:
        rows |= measure_size(preset, settings)
    return rows


def measure_size(preset: str, settings: Settings) -> Rows:
    """Measures iterations and whole decodes of one size."""
    forget_programs()
    make_target.cache_clear()
    with tempfile.TemporaryDirectory() as folder:  # first, while there is memory for its float32
        calls = peers.make_decoder(make_shape(preset), pathlib.Path(folder), NEW_TOKENS)
    others = {name: Variant(0, count_tokens(decode)) for name, decode in calls.items()}
    drafter = ModelDrafter(make_random(DRAFTER), int8=True)
    target_of = functools.partial(make_target, preset)
    options = dict(verifier="synthetic", synthetic_alpha=ALPHA)
    steps, cases = {}, {}
    for form in FORMS:
        label = form if form == "int8" else f"`{form}`"
        steps |= time_iterations(label, target_of(form), drafter, GAMMAS, settings.choose(5, 1))
        cases[f"plain, {label}"] = Case(form)
        for gamma in GAMMAS:
            name = f"γ = {gamma}, {label}, accepted with α = {ALPHA:.2f}"
            cases[name] = drafts(gamma, form, lambda: drafter, **options)
    inputs, passes = draw_inputs(target_of("int8"), settings.choose(4, 1)), settings.choose(3, 2)
    found = time_cases(cases, inputs, passes, target_of, NEW_TOKENS, others)
    return {f"{preset} steps": steps, f"{preset} rows": found}


def count_tokens(
    decode: Callable[[list[int]], int],
) -> Callable[[SentenceBatch], GenerationResult]:
    """Returns another library's decoding of one input, of whose output only the length is known."""

    def run(batch: SentenceBatch) -> GenerationResult:
        lengths = np.array([decode(ids) for ids in batch.ids], np.int32)
        tokens = np.zeros((len(lengths), NEW_TOKENS), np.int32)
        nothing, stats = np.zeros(tokens.shape, np.float32), None
        rest: Any = (nothing, stats, nothing, [], np.zeros(len(lengths), np.float32))
        return GenerationResult(None, tokens, lengths, *rest)

    return run
