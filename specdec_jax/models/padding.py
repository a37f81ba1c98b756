"""Padded lengths, and padding in arrays of ids: it is told from text and moved behind it."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Integer

from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.network import is_decoder_only
from specdec_jax.tokenizers.vocabularies import PAD_ID

# Padded lengths: powers of two with one step between, so that few shapes compile and at most a
# third is padding.
_BUCKETS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket_length(length: int) -> int:
    """Returns the padded length (the bucket) for `length` ids.

    It is one of a few up to 512, then a multiple of 256.
    """
    return next((size for size in _BUCKETS if length <= size), -(-length // 256) * 256)


def padding_id(model: Any) -> int | None:
    """Returns the id that pads inputs, its family's without a vocabulary; None without encoder."""
    if is_decoder_only(model):
        return None
    return getattr(model.vocabulary, "pad_id", getattr(model.config, "pad_id", PAD_ID))


def remove_padding(
    model: Any,
    inputs: Integer[np.ndarray, "B L"],
    input_lengths: Any = None,
    attention_mask: Any = None,
) -> tuple[Integer[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Returns ids whose rows begin with their text, and how many ids of each row are text.

    Args:
      model: the model that reads the ids; before and after the text its `padding_id` is padding (if
        a vocabulary has none, 0).
      inputs: the ids; padding may be on either side.
      input_lengths: `[B]`, number of ids of each row that count, from its first one; None: all, or
        those that the mask marks.
      attention_mask: `[B, L]`, as transformers' tokenisers return it: 1 for text, 0 for padding.

    Raises:
      ValueError: both or wrong ones of the last two, a mask with 0 inside a row's text, or padding
        before a text whose length is given.
    """
    rows, width = inputs.shape
    lengths = np.full(rows, width, np.int32)
    if input_lengths is not None:
        lengths = _check_lengths(input_lengths, attention_mask, rows, width)
    if attention_mask is not None:
        return move_left(inputs, _check_mask(attention_mask, inputs.shape))
    if is_decoder_only(model) or (
        input_lengths is not None and getattr(model, "vocabulary", None) is None
    ):
        return inputs, lengths  # nothing says that 0 is padding where lengths say that it counts
    pad = padding_id(model)
    text = (inputs != (PAD_ID if pad is None else pad)) & (np.arange(width) < lengths[:, None])
    if input_lengths is not None and width and np.any(wrong := text.any(axis=1) & ~text[:, 0]):
        raise mismatch_error(
            f"input {np.argmax(wrong)}",
            "padding before the text with input_lengths",
            "attention_mask, or text that begins at the left",
        )
    return move_left(inputs, text)


def move_left(
    ids: Integer[np.ndarray, "B L"], text: Bool[np.ndarray, "B L"]
) -> tuple[Integer[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
    """Returns ids whose rows begin with their first text, and each row's length of text."""
    if not text.size:
        return ids, np.zeros(len(ids), np.int32)
    width, some = text.shape[1], text.any(axis=1)
    starts = np.where(some, text.argmax(axis=1), 0)
    ends = np.where(some, width - text[:, ::-1].argmax(axis=1), 0)
    if starts.any():
        places = starts[:, None] + np.arange(width)
        moved = np.take_along_axis(ids, np.minimum(places, width - 1), axis=1)
        ids = np.where(places < width, moved, PAD_ID)
    return ids, (ends - starts).astype(np.int32)


def _check_lengths(
    input_lengths: Any, attention_mask: Any, rows: int, width: int
) -> Int[np.ndarray, " B"]:
    if attention_mask is not None:
        raise mismatch_error("attention_mask", "one beside input_lengths", "one of the two")
    expected = f"{rows} integers from 0 to {width}"
    lengths = arguments.check_numbers("input_lengths", input_lengths, expected, whole=True)
    if lengths.shape != (rows,) or np.any((lengths < 0) | (lengths > width)):
        raise mismatch_error("input_lengths", input_lengths, expected)
    return lengths.astype(np.int32)


def _check_mask(attention_mask: Any, shape: tuple[int, ...]) -> Bool[np.ndarray, "B L"]:
    """Returns the mask as booleans, once it is checked."""
    mask = arguments.as_array(attention_mask)
    if mask.shape != shape or mask.dtype.kind not in "biuf" or np.any((mask != 0) & (mask != 1)):
        got = f"shape {mask.shape}" if mask.shape != shape else "other values"
        raise mismatch_error("attention_mask", got, f"0 or 1 for each id, in shape {shape}")
    holes = np.sum(np.diff(mask.astype(np.int8), axis=1, prepend=0) == 1, axis=1) > 1
    if holes.any():
        got = f"0 inside the text of input {np.argmax(holes)}"
        raise mismatch_error("attention_mask", got, "none there")
    return mask.astype(bool)
