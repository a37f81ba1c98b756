"""Stages about whole files: beside other libraries, ways of batching, and the same bits."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.analysis import timing
from specdec_jax.analysis.timing import summarize
from specdec_jax.decoding.continuous_batching import decode_all, decode_stream
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.inputs import encode
from specdec_jax.models.language_model import LanguageModel
from tools.results import peers
from tools.results.cases import (
    AUTO,
    FIXED,
    NEW_TOKENS,
    add_over_fixed,
    forget_programs,
    format_over_fixed,
    load_target,
    make_bundled,
)
from tools.results.stage import Row, Rows, Settings
from tools.results.texts import TEXTS, read_texts

# What `decode_stream` is told of refilling rows.
_REFILL = {"like length": False, "refilled": True, "the default": None}
HOW: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, generation_config=None)


def measure_file(settings: Settings) -> Rows:
    """Measures sentences a second of whole files, also with the libraries that are installed."""
    rows: Rows = {}
    for name, text in read_texts(settings, ("ende",), settings.choose(2000, 300)).items():
        ids = encode(load_target("none"), text, 512)
        ways: dict[str, Callable[[], list]] = {}
        for label, form in (("float32", "none"), ("int8", "int8"), ("`w8a8`", "w8a8")):
            ways[f"plain, {label}, batch 64"] = functools.partial(
                decode_file, load_target(form), ids, 64
            )
        ways |= peers.make_ctranslate2(ids) | peers.make_transformers(ids)
        rows[name] = time_ways(ways, settings.choose(3, 2))
    return rows


def time_ways(ways: Mapping[str, Callable[[], list]], passes: int) -> dict[str, Row]:
    """Returns the rows of ways of decoding a file, in turn; the first is the base of ratios."""
    seconds: dict[str, list[float]] = {label: [] for label in ways}
    outputs = {label: decode() for label, decode in ways.items()}  # compiles
    for turn in range(passes):
        for label in timing.rotate(ways, turn):
            start = time.perf_counter()
            outputs[label] = ways[label]()
            seconds[label].append(time.perf_counter() - start)
    base, first = np.array(next(iter(seconds.values()))), next(iter(outputs.values()))
    rows: dict[str, Row] = {
        label: {
            "sentences_per_second": len(first) / float(np.median(times)),
            "improvement": summarize(base / np.array(times)),
            "differing": count_differing(outputs[label], first),
        }
        for label, times in seconds.items()
    }
    add_over_fixed(rows, seconds)
    return rows


def count_differing(ours: Iterable[Any], theirs: Iterable[Any]) -> int:
    """Returns how many of two lists' elements differ."""
    return sum(one != other for one, other in zip(ours, theirs, strict=True))


def decode_file(
    target: LanguageModel, ids: list, batch: int, gamma: Any = 0, **options: Any
) -> list[list[int]]:
    """Returns the outputs of a file in its order, by continuous batching."""
    how = HOW | dict(batch_size=batch, seed=0, gamma=gamma)
    return [output.tokens for output in decode_all(target, ids, **how, **options)]


def format_file(row: Row) -> str:
    """Returns sentences a second, and over the first row."""
    gain = row["improvement"]
    text = f"{row['sentences_per_second']:.0f} a second; "
    text += f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
    return f"{text}; {row['differing']} outputs differ"


def format_gain(row: Row) -> str:
    """Returns the speed over the first row's, sentences a second, and beside the best fixed γ."""
    gain, speed = row["improvement"]["median"], row["sentences_per_second"]
    return f"{gain:.2f}; {speed:.0f}" + format_over_fixed(row)


def measure_batching(settings: Settings) -> Rows:
    """Measures batches in a file's order, of like length, with refilled rows, and by default."""
    target, rows = load_target("none"), {}
    for name, text in read_texts(settings, ("ende",), settings.choose(500, 150)).items():
        ids = encode(target, text, 512)
        ways = {
            f"{label}, batch 8, {way}": functools.partial(decode_batches, ids, way, **how)
            for label, how in (
                ("plain", dict(gamma=0)),
                ("bundled drafter, γ = 4", dict(gamma=4, drafter=make_bundled())),
            )
            for way in ("file order", *_REFILL)
        }
        rows[name] = time_ways(ways, settings.choose(3, 2))
    return rows


def decode_batches(ids: list[list[int]], way: str, **options: Any) -> list[list[int]]:
    """Returns the outputs of inputs that are batched in one of these ways."""
    target, size = load_target("none"), 8
    found: list[list[int]] = [[] for _ in ids]
    if way != "file order":
        options |= dict(batch_size=size, refill=_REFILL[way])
        for place, (output,) in decode_stream(target, ids, **HOW, **options):
            found[place] = output.tokens
        return found
    for begin in range(0, len(ids), size):
        batch: list[Any] = ids[begin : begin + size]
        batch += [None] * (size - len(batch))  # so that one shape compiles
        result = generate(target, batch, **HOW, **options)
        for row in range(min(size, len(ids) - begin)):
            found[begin + row] = result.tokens[row, : result.lengths[row]].tolist()
    return found


def measure_auto(settings: Settings) -> Rows:
    """Measures γ = "auto" beside fixed γ, where rows are decoded together."""
    rows: Rows = {}
    texts = read_texts(settings, TEXTS, 64)
    for form, label in (("none", "float32"), ("int8", "int8")):
        forget_programs()
        target, drafts = load_target(form), dict(drafter=make_bundled())
        for (name, text), size in itertools.product(texts.items(), (8, 32)):
            decode = functools.partial(decode_file, target, encode(target, text, 512), size)
            ways: dict[str, Callable[[], list]] = {"plain": decode}
            for gamma in (2, 4, "auto"):
                case = f"{FIXED}{gamma}" if gamma != "auto" else AUTO
                ways[case] = functools.partial(decode, gamma=gamma, **drafts)
            for _ in range(5):  # by then it has timed batches with drafts and without
                ways[AUTO]()
            rows[f"{name} {label} {size}"] = time_ways(ways, 5)
    return rows


def measure_bits(settings: Settings) -> Rows:
    """Counts outputs, and log-probabilities in any bit, that differ from plain decoding's."""
    target, drafter, rows = load_target("int8"), make_bundled(), {}
    for name, text in read_texts(settings, ("ende", "wiki_pe"), settings.choose(150, 30)).items():
        ids = encode(target, text, 512)
        plain = decode_scored(target, ids, 1)
        rows[name] = {"plain, batches of 64": compare_bits(plain, decode_scored(target, ids, 64))}
        for gamma, batch in ((4, 64), (7, 8), (8, 1)):
            how = dict(gamma=gamma, drafter=drafter)
            label = (
                f"γ = {gamma}, batches of {batch}" if batch > 1 else f"γ = {gamma}, one at a time"
            )
            rows[name][label] = compare_bits(plain, decode_scored(target, ids, batch, **how))
    return rows


def decode_scored(target: LanguageModel, ids: list, batch: int, **options: Any) -> list:
    """Returns outputs with their log-probabilities."""
    how = HOW | dict(batch_size=batch, seed=0, gamma=0) | options
    return list(decode_all(target, ids, **how))


def compare_bits(plain: Sequence[Any], others: Sequence[Any]) -> Row:
    """Returns how many outputs and log-probabilities differ."""
    pairs = list(zip(plain, others, strict=True))
    scores = [pair for one, other in pairs for pair in zip(one.log_probs, other.log_probs)]
    return {
        "differing": sum(one.tokens != other.tokens for one, other in pairs),
        "outputs": len(pairs),
        "scores_that_differ": sum(one != other for one, other in scores),
        "scores": len(scores),
    }


def format_bits(row: Row) -> str:
    """Returns the counts of what differs."""
    text = f"{row['differing']} of {row['outputs']:,} outputs, "
    return text + f"{row['scores_that_differ']} of {row['scores']:,} log-probabilities"
