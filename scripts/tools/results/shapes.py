"""Stages about published shapes with random weights: only their times mean anything.

Drafted tokens are accepted at random, with the acceptance rates that the paper measured for such
pairs, and encoders have one layer.
"""

import importlib.util

import numpy as np

from specdec_jax.analysis.variants import Variant
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.models.language_model import LanguageModel
from tools.results.cases import Case, drafts, forget_programs, make_random, time_cases
from tools.results.copying import DRAFTERS, change_words, make_cases
from tools.results.pair import time_iterations
from tools.results.stage import Row, Rows, Settings

INPUT_IDS = 64
NEW_TOKENS = 32


def draw_inputs(model: LanguageModel, count: int) -> list[list[int]]:
    """Returns inputs of random ids."""
    random = np.random.default_rng(0)
    return random.integers(3, model.config.vocab_size, (count, INPUT_IDS)).tolist()


def accept_at_random(
    preset: str, drafter: ModelDrafter | SelfDrafter, gamma: int, alpha: float
) -> Case:
    """Returns a case in which drafted tokens are accepted at random."""
    options = dict(verifier="synthetic", synthetic_alpha=alpha)
    return drafts(gamma, preset, lambda: drafter, **options)


def measure_gpt(settings: Settings) -> Rows:
    """Measures the paper's decoder-only pair: steps, decodes, and copies of the prompt."""
    target, drafter = make_random("gpt/97m"), ModelDrafter(make_random("gpt/6m"))
    cases = {"plain": Case("gpt/97m")} | {
        f"γ = {gamma}, accepted with α = 0.88": accept_at_random("gpt/97m", drafter, gamma, 0.88)
        for gamma in (3, 5)
    }
    prompts = draw_inputs(target, settings.choose(8, 2))
    passes = settings.choose(3, 2)
    found = time_cases(cases, prompts, passes, make_random)
    outputs = [change_words(prompt, 8, seed) for seed, prompt in enumerate(prompts)]
    lookup = {name: one for name, one in DRAFTERS.items() if "assisted" not in name}
    copied = time_cases(make_cases(outputs, lookup, "gpt/97m"), prompts, passes, make_random)
    found |= {f"the prompt again, 8 % changed: {name}": row for name, row in copied.items()}
    steps = time_iterations("float32", target, drafter, (3, 5), settings.choose(9, 3))
    return {"steps": steps, "rows": found}


def measure_paper(settings: Settings) -> Rows:
    """Measures pairs of shapes as in the paper's table 2, with T5-large in place of T5-XXL.

    T5X takes its turn where it is installed.
    """
    preset, steps = "t5_1_1/large", {}
    target, cases = make_random(preset), {"T5-large, plain": Case(preset)}
    drafters = {
        "T5-small": ("t5_1_1/small", 0.75, False),
        "T5-small in int8": ("t5_1_1/small", 0.75, True),
        "T5-base": ("t5_1_1/base", 0.80, False),
    }
    if settings.quick:
        del drafters["T5-base"]
    gammas = (7,) if settings.quick else (5, 7)
    for drafter, (shape, alpha, int8) in drafters.items():
        forget_programs()
        model, label = ModelDrafter(make_random(shape), int8=int8), f"T5-large with {drafter}"
        steps |= time_iterations(label, target, model, gammas, settings.choose(3, 1))
        for gamma in gammas:
            name = f"{label}, γ = {gamma}, accepted with α = {alpha:.2f}"
            cases[name] = accept_at_random(preset, model, gamma, alpha)
    name = "T5-large with `self:int8`, γ = 5, accepted with α = 0.998"
    cases[name] = accept_at_random(preset, SelfDrafter(target), 5, 0.998)
    inputs, passes = draw_inputs(target, settings.choose(4, 1)), settings.choose(3, 2)
    others = make_t5x("T5-large, T5X", target)
    rows = time_cases(cases, inputs, passes, make_random, NEW_TOKENS, others)
    return {"steps": steps, "rows": rows}


def make_t5x(name: str, target: LanguageModel) -> dict[str, Variant]:
    """Returns T5X's own decoding of a model under this name; nothing where T5X is not installed."""
    if importlib.util.find_spec("t5x") is None:
        return {}
    from specdec_jax.interop import t5x  # needs T5X

    return {name: t5x.make_variant(target, NEW_TOKENS)}


def format_shape(row: Row) -> str:
    """Returns the cell of a step or of whole decodes."""
    if "ms" in row:
        return f"{row['ms']:.1f} ms, {row['over_plain']:.2f} plain iterations"
    gain = row["improvement"]
    text = f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
    return (
        f"{text}, {row['tokens_per_call']:.2f} tokens a call, {row['ms_per_token']:.1f} ms a token"
    )
