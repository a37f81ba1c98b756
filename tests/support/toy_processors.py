"""Applies processors to the logits after one prefix, slowly, one id at a time, in numpy."""

import numpy as np
import toy


def penalized(logits, prefix, penalty: float) -> np.ndarray:
    """Applies Hugging Face's repetition penalty once to every id of `prefix`.

    The start token counts, too.
    """
    result = np.array(logits)
    for token in set(prefix):
        result[token] = (
            result[token] / np.float32(penalty)
            if result[token] > 0
            else result[token] * np.float32(penalty)
        )
    return result


def without_repeated_ngrams(logits, prefix, size: int) -> np.ndarray:
    """Forbids every id that would end an n-gram which `prefix` holds already."""
    result, prefix = np.array(logits), list(prefix)
    seen = [prefix[i : i + size] for i in range(len(prefix) - size + 1)]
    for token in range(len(result)):
        if [*prefix[len(prefix) - size + 1 :], token] in seen and len(prefix) >= size - 1:
            result[token] = -np.inf
    return result


def processed(
    logits,
    prefix,
    *,
    new: int,
    eos_ids=(),
    repetition_penalty=1.0,
    no_repeat_ngram=0,
    min_new_tokens=0,
    logit_bias=None,
    forbidden_tokens=(),
    vocabulary_mask=None,
    forced_tokens=None,
    processor=None,
    forbidden_sequences=(),
) -> np.ndarray:
    """Returns logits `[V]` float32 after all processors.

    `prefix` starts with the start token and holds `new` new tokens. Here `processor` is a function
    of (prefix as a list, logits).
    """
    original = np.array(logits, np.float32)
    result = original.copy()
    for token, value in (logit_bias or {}).items():
        result[token] += np.float32(value)
    result[list(forbidden_tokens)] = -np.inf
    if vocabulary_mask is not None:
        result[~np.asarray(vocabulary_mask)] = -np.inf
    result = penalized(result, prefix, repetition_penalty)
    if no_repeat_ngram:
        result = without_repeated_ngrams(result, prefix, no_repeat_ngram)
    for *before, last in forbidden_sequences:
        if len(before) <= len(prefix) and list(prefix[len(prefix) - len(before) :]) == before:
            result[last] = -np.inf
    if processor is not None:
        result = processor(list(prefix), result)
    if new < min_new_tokens:
        result[list(eos_ids)] = -np.inf
    if new in (forced_tokens or {}):
        result = np.where(
            np.arange(len(result)) == forced_tokens[new], np.float32(0), np.float32(-np.inf)
        )
    return result if np.max(result) > -np.inf else original


def dist(
    logits, prefix, *, new: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **options
) -> np.ndarray:
    """Returns probabilities `[V]` in float64: processors, then temperature and filters."""
    probs = toy.adjusted_probs(
        processed(logits, prefix, new=new, **options), temperature, top_k, top_p
    )
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    return probs / probs.sum()
