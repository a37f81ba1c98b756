"""Stages about outputs that repeat the input: corrected sentences and summaries.

No bundled model corrects or summarises. So the target's output is forced, token by token, to be a
known text: the corrected sentence, or a summary that a person wrote. The target's calls take the
time that they always take, and a drafter that copies sees what it would see. A drafter that is a
model cannot be measured so, since forced tokens apply to its logits too.
"""

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.sampling import SamplingConfig
from tools.results.cases import Case, load_target, make_random, time_cases
from tools.results.stage import Row, Rows, Settings, Skipped
from tools.results.texts import find_text, read_pairs, require_pairs

# Drafters that copy, and their γ; a new one needs a row here.
DRAFTERS: dict[str, tuple[Callable[[], Any], int]] = {
    "`lookup`, γ = 4": (PromptLookupDrafter, 4),
    "`lookup`, γ = 8": (PromptLookupDrafter, 8),
    "`lookup`, γ = 16": (PromptLookupDrafter, 16),
    "`copy`, γ = 8": (functools.partial(PromptLookupDrafter, min_match=0), 8),
    "`copy`, γ = 16": (functools.partial(PromptLookupDrafter, min_match=0), 16),
    '`prefer="latest"`, γ = 8': (functools.partial(PromptLookupDrafter, prefer="latest"), 8),
    '`prefer="latest"`, γ = 16': (functools.partial(PromptLookupDrafter, prefer="latest"), 16),
    "`assisted`, γ = 4": (AssistedNGramDrafter, 4),
}
CHANGED = (3, 8, 15)  # % of words


def force_outputs(outputs: Sequence[Sequence[int]]) -> Callable[[int], Mapping[str, Any]]:
    """Returns the options by which the sentence of a number has a known output."""
    configs = [SamplingConfig(forced_tokens=dict(enumerate(output))) for output in outputs]
    return lambda number: {"sampling": configs[number]}


def make_cases(
    outputs: Sequence[Sequence[int]],
    drafters: Mapping[str, tuple[Callable[[], Any], int]] = DRAFTERS,
    form: str = "none",
) -> dict[str, Case]:
    """Returns plain decoding and the drafters that copy, with known outputs."""
    each = force_outputs(outputs)
    cases = {"plain": Case(form, None, {}, each)}
    return cases | {
        name: Case(form, make, {"gamma": gamma}, each) for name, (make, gamma) in drafters.items()
    }


def change_words(words: Sequence[Any], percent: int, seed: int) -> list[Any]:
    """Returns the words with a share of them, at random places, replaced by others of them.

    At least one is replaced.
    """
    draw, changed = random.Random(seed), list(words)
    for place in draw.sample(range(len(words)), max(1, round(len(words) * percent / 100))):
        changed[place] = draw.choice([word for word in words if word != words[place]])
    return changed


def read_edits(settings: Settings, count: int, percent: int) -> tuple[list[str], list[list[int]]]:
    """Returns sentences of 40 words, and what they become where a share of the words changes.

    Raises:
      Skipped: the text is not there.
    """
    path = find_text(settings, "wikitext2")
    if path is None:
        raise Skipped("needs wikitext2/test in --data")
    sentences = [one.split() for one, _ in read_pairs(path, 50 * count, 40)]
    sentences = [one for one in sentences if len(one) == 40][:count]
    vocabulary = load_target("none").vocabulary
    assert vocabulary is not None
    changed = [change_words(one, percent, seed) for seed, one in enumerate(sentences)]
    outputs = [vocabulary.encode_output(" ".join(one)) for one in changed]
    return [" ".join(one) for one in sentences], outputs


def time_edits(
    settings: Settings,
    count: int,
    percent: int,
    drafters: Mapping[str, tuple[Callable[[], Any], int]],
) -> dict[str, Row]:
    """Returns the rows of drafters that copy, on sentences of which some words are changed."""
    texts, outputs = read_edits(settings, count, percent)
    cases, longest = make_cases(outputs, drafters), max(map(len, outputs))
    return time_cases(cases, texts, settings.choose(3, 2), new_tokens=longest)


def measure_edits(settings: Settings) -> Rows:
    """Measures sentences of which some words are changed, as in corrections."""
    rows: dict[str, Row] = {}
    for percent in CHANGED[1:2] if settings.quick else CHANGED:
        found = time_edits(settings, settings.choose(10, 3), percent, DRAFTERS)
        rows |= {f"{percent} % changed, {name}": row for name, row in found.items()}
    for name, row in ({} if settings.quick else time_larger(settings)).items():
        rows[f"{CHANGED[1]} % changed, T5-base's shape, {name}"] = row
    return {"wikitext2": rows}


def time_larger(settings: Settings) -> dict[str, Row]:
    """Returns the rows of long drafts for a larger target, whose weights are random.

    Its calls over many positions cost less, beside one over a single position.
    """
    shape = "t5_1_1/base"
    texts, outputs = read_edits(settings, 8, CHANGED[1])
    drafters = {name: one for name, one in DRAFTERS.items() if one[1] == 16}
    return time_cases(
        make_cases(outputs, drafters, shape),
        encode(load_target("none"), texts, 512),
        3,
        make_random,
        max(map(len, outputs)),
    )


def measure_summaries(settings: Settings) -> Rows:
    """Measures summaries that people wrote, with their whole sources as inputs."""
    vocabulary = load_target("none").vocabulary
    assert vocabulary is not None
    count = settings.choose(12, 4)
    drafters = {"`lookup`, γ = 2": (PromptLookupDrafter, 2)} | {
        name: one for name, one in DRAFTERS.items() if one[1] <= 8
    }
    rows: Rows = {}
    for name in ("dialogsum", "scitldr"):
        pairs = require_pairs(settings, name, 8 * count, words=400)
        both = [
            (vocabulary.encode_input(source), vocabulary.encode_output(reference))
            for source, reference in pairs
        ]
        both = [(ids, output) for ids, output in both if len(ids) <= 500 and len(output) <= 96]
        if settings.quick:  # one padded length, since each is compiled for every way
            padded = [bucket_length(len(ids)) for ids, _ in both]
            both = [pair for pair, length in zip(both, padded) if length == padded[0]]
        sources, outputs = zip(*both[:count])
        cases = make_cases(outputs, drafters)
        rows[name] = time_cases(cases, sources, settings.choose(3, 2), new_tokens=96)
    return rows
