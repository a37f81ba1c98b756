"""Turns texts and ids into padded arrays of a few lengths, so that few shapes compile."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_jax.decoding.checks import check_input_lengths, cut_to_positions
from specdec_jax.decoding.languages import OutputLanguage, PerInput, choose_vocabularies
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.models.padding import bucket_length, move_left, padding_id, remove_padding
from specdec_jax.tokenizers.vocabularies import Vocabulary, check_texts


def as_list(name: str, inputs: Any) -> Any:
    """Returns inputs as a list that can be read again, or as the array of ids that they are.

    Raises ValueError for what is neither.
    """
    if hasattr(inputs, "shape"):
        array = arguments.as_array(inputs)
        return array.tolist() if array.ndim == 1 and array.dtype.kind in "OTU" else inputs
    if not isinstance(inputs, Iterable) or isinstance(inputs, str | bytes | Mapping):
        got = f"the string {inputs!r}" if isinstance(inputs, str) else arguments.quote(inputs)
        raise ValueError(f"{name}: got {got}, expected a list of strings or of ids")
    return list(inputs)


def count_rows(inputs: Any) -> int:
    """Returns the number of inputs that `as_list` returned."""
    return len(inputs) if getattr(inputs, "ndim", 1) else 1


def as_ids(
    target: LanguageModel,
    inputs: Any,
    input_lengths: Any,
    framed: bool,
    attention_mask: Any = None,
    name: str = "input",
    vocabularies: Sequence[Vocabulary] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids `[B, L]`, padded behind the text, and lengths `[B]`.

    Args:
      target: the model that reads the ids.
      inputs: strings, lists of ids or an array.
      input_lengths, attention_mask: which ids count, as for `generate`.
      framed: whether strings get what the tokenizer puts around a text.
      name: what a message calls one of the inputs, before its number.
      vocabularies: what encodes each string; none: the target's vocabulary.

    Raises:
      ValueError: inputs of another kind, ids outside the vocabulary, or texts without a language
        that the vocabulary needs.
    """
    whole = "inputs" if name == "input" else name
    inputs = as_list(whole, inputs)
    if hasattr(inputs, "shape"):
        array = np.asarray(inputs)
        if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
            got = f"an array of shape {array.shape} and type {array.dtype}"
            raise ValueError(f"{whole}: got {got}, expected integers [B, L]")
        array, lengths = remove_padding(target, array, input_lengths, attention_mask)
    else:
        strings = [row for row in inputs if row is not None]
        text = bool(strings) and all(isinstance(row, str) for row in strings)
        if text:
            if target.vocabulary is None:
                got = "strings for a model without a vocabulary"
                raise ValueError(f"{whole}: got {got}, expected ids")
            if attention_mask is not None:
                expected = "None (strings have no padding)"
                raise ValueError(f"attention_mask: got one with strings, expected {expected}")
            check_texts(name, inputs, first=0)
            own = vocabularies or [target.vocabulary] * len(inputs)
            encoders = [
                _choose_encoder(target, one) if framed else one.encode_target for one in own
            ]
            inputs = [
                None if text is None else to_ids(text)
                for text, to_ids in zip(inputs, encoders, strict=True)
            ]
        if input_lengths is not None:
            expected = "None (lists have lengths)"
            raise ValueError(
                f"input_lengths: got lengths with a list of inputs, expected {expected}"
            )
        array, lengths = _as_array(name, inputs)
        pad_id = padding_id(target)
        if attention_mask is not None:
            mask = _mask_of_rows(attention_mask, lengths)
            array, lengths = remove_padding(target, array, None, mask)
        elif pad_id is not None and not text:
            inside = np.arange(array.shape[1]) < lengths[:, None]
            array, lengths = move_left(array, inside & (array != pad_id))
    config = target.config
    vocab_size = config.input_vocab_size if framed else config.vocab_size
    if array.size and (array.min() < 0 or array.max() >= vocab_size):
        wrong = _find_ids(array, lengths, lambda ids: (ids < 0) | (ids >= vocab_size))
        if wrong is not None:
            which = f"({name} {wrong[0]}: id {array[wrong]})"
            expected = f"expected 0 to {vocab_size - 1}"
            raise ValueError(f"{whole}: got ids outside the vocabulary, {expected} {which}")
    if config.image_id is not None:
        image = _find_ids(array, lengths, lambda ids: ids == config.image_id)
        if image is not None:
            raise _image_error(target, f"{name} {image[0]}")
    return array.astype(np.int32, copy=False), lengths


def _find_ids(
    array: np.ndarray, lengths: np.ndarray, chosen: Callable[[np.ndarray], np.ndarray]
) -> tuple[int, int] | None:
    """Returns the row and place of the first chosen id of `[B, L]`, padding left out, or None."""
    inside = np.arange(array.shape[1]) < lengths[:, None]
    found = np.argwhere(inside & chosen(array))
    return tuple(found[0]) if len(found) else None


def _image_error(target: LanguageModel, place: str) -> ValueError:
    """Makes the error of an input with the id of images, of which no model here reads any."""
    expected = "text alone: the weights that read images are left out"
    return ValueError(
        f"{place}: got id {target.config.image_id}, which stands for an image, expected {expected}"
    )


def _as_array(name: str, inputs: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns lists of ids as an array, padded with 0, and their lengths; None is an empty one."""
    rows = []
    for number, row in enumerate(inputs):
        try:
            ids = np.asarray(() if row is None else row)
        except ValueError:  # lists of different lengths inside
            ids = np.asarray("")
        whole = not ids.size or np.issubdtype(ids.dtype, np.integer)
        if ids.ndim != 1 or not whole or arguments.has_bool(row):
            expected = "a list of integers (or strings for all inputs)"
            raise ValueError(f"{name} {number}: got {row!r}, expected {expected}")
        rows.append(ids)
    lengths = np.array([len(row) for row in rows], np.int32)
    # Jobs of a million inputs are padded to the longest; ids past 32 bits are rejected later.
    small = all(-(2**31) <= ids.min() and ids.max() < 2**31 for ids in rows if ids.size)
    array = np.zeros((len(rows), max(lengths, default=0)), np.int32 if small else np.int64)
    for number, ids in enumerate(rows):
        array[number, : len(ids)] = ids
    return array, lengths


def _mask_of_rows(attention_mask: Any, lengths: np.ndarray) -> np.ndarray:
    """Returns a mask `[B, L]` for lists of ids of these lengths."""
    given = arguments.check_list("attention_mask", attention_mask, "lists of 0 and 1")
    rows = [arguments.as_array(row) for row in given]
    if [row.shape for row in rows] != [(length,) for length in lengths]:
        got, expected = "other lengths than the inputs'", "0 or 1 for each id"
        raise ValueError(f"attention_mask: got {got}, expected {expected}")
    width = max(lengths, default=0)
    return np.array([np.pad(row, (0, width - len(row))) for row in rows]).reshape(len(rows), width)


def empty_rows(target: LanguageModel, inputs: Any, lengths: np.ndarray) -> np.ndarray:
    """Returns `[B]` bool: rows with nothing to decode.

    These are None, empty strings and empty lists of ids; a decoder-only model decodes all but None.
    """
    if hasattr(inputs, "shape"):
        return (lengths == 0) & (not is_decoder_only(target))
    if is_decoder_only(target):
        return np.array([row is None for row in inputs])
    pairs = zip(inputs, lengths)
    contents = [row.strip() if isinstance(row, str) else length for row, length in pairs]
    return np.array([not content for content in contents])


def prompt_tokens(
    target: LanguageModel, tokens: np.ndarray, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts `[B, P]`, padded to a bucket, and their numbers of ids `[B]`.

    An empty prompt becomes the start token.
    """
    tokens = pad(tokens, bucket_length(int(max(lengths))))
    tokens[:, 0] = np.where(lengths == 0, target.start_token, tokens[:, 0])
    return tokens, np.maximum(lengths, 1)


def decoder_tokens(
    target: LanguageModel,
    decoder_prefix: Any,
    batch: int,
    languages: Sequence[OutputLanguage] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the start token and the decoder prefix `[B, P]`, and their numbers of ids `[B]`.

    The prefix begins with the token of the row's language, where there is one, and is padded to a
    bucket.
    """
    languages = languages or [OutputLanguage(target.start_token, None)] * batch
    start = np.array([[language.start_token] for language in languages], np.int32)
    if decoder_prefix is None:
        return start, np.ones(batch, np.int32)
    tokens, lengths = as_ids(target, decoder_prefix, None, framed=False, name="decoder_prefix")
    if len(lengths) != batch:
        expected = f"{batch} (one per input)"
        raise ValueError(f"decoder_prefix: got {len(lengths)} prefixes, expected {expected}")
    firsts = np.array([-1 if one.first is None else one.first for one in languages])
    if np.any(firsts >= 0):
        tokens, there = pad(tokens, tokens.shape[1] + 1), lengths > 0
        there = (there & (tokens[:, 0] == firsts)) | (firsts < 0)
        moved = np.roll(tokens, 1, axis=1)
        moved[:, 0] = firsts
        tokens, lengths = np.where(there[:, None], tokens, moved), lengths + ~there
    longest = int(max(lengths))
    tokens = pad(tokens, bucket_length(longest) if longest else 0)
    return np.concatenate([start, tokens], axis=1), lengths + 1


def pad(tokens: np.ndarray, width: int) -> np.ndarray:
    """Returns `tokens [B, L]` cut or padded with 0 to `[B, width]`."""
    padded = np.zeros((len(tokens), width), tokens.dtype)
    padded[:, : tokens.shape[1]] = tokens[:, :width]
    return padded


def _choose_encoder(target: LanguageModel, vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """Returns the method of a vocabulary of the target that encodes an input or a prompt."""
    return vocabulary.encode_prompt if is_decoder_only(target) else vocabulary.encode_input


def encode(
    target: LanguageModel,
    sentences: Sequence[str],
    max_input_length: int,
    source_language: PerInput = None,
    target_language: PerInput = None,
) -> list[list[int]]:
    """Returns the ids of every sentence, with what the tokenizer puts around a text.

    An empty sentence has none. For a decoder-only model they are prompts, which get no EOS unless
    its tokenizer's files say so. The languages are as for `generate`.

    Raises:
      ValueError: the model has no vocabulary or not these languages, or a sentence is longer than
        `max_input_length` tokens, or too long to be encoded at all, or has a token for which the
        model has no logit.
    """
    codes = source_language, target_language
    vocabularies = choose_vocabularies(target, *codes, len(sentences))
    if target.vocabulary is None:
        got, expected = f"{target.name} without a vocabulary", "spiece.model or tokenizer.json"
        raise ValueError(f"target: got {got}, expected one ({expected})")
    check_texts("sentence", sentences)
    vocab_size = target.config.input_vocab_size
    inputs = [
        _choose_encoder(target, own)(text) if is_decoder_only(target) or text.strip() else []
        for text, own in zip(sentences, vocabularies, strict=True)
    ]
    for number, ids in enumerate(inputs, 1):
        if max(ids, default=0) >= vocab_size:
            token = next(i for i in ids if i >= vocab_size)
            got = f"the token {target.vocabulary.piece(token)!r} with id {token}"
            expected = f"ids below the model's {vocab_size} logits"
            raise ValueError(f"sentence {number}: got {got}, expected {expected}")
        if target.config.image_id in ids:
            raise _image_error(target, f"sentence {number}")
    lengths, most = list(map(len, inputs)), target.config.max_positions
    longest = cut_to_positions(target, max_input_length)
    check_input_lengths("sentence", lengths, longest, most, 1, "--max_input_length")
    return inputs
