"""Drafts what followed the same ids in a job's earlier outputs, or in a file of sorted text."""

import os
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.continuations import (
    Found,
    StoredDrafter,
    Texts,
    check_copying,
    compare_endings,
    follow_passages,
    last_ids,
)
from specdec_jax.drafters.sorted_file import join_sequences, map_text, write_sorted
from specdec_jax.drafters.sorted_text import (
    DEPTH,
    SortedText,
    find_places,
    read_ids,
)
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.state import DecodeState
from specdec_jax.tokenizers.vocabularies import Vocabulary

# Passages that are read of the sorted text, and of the row's own texts; places of an input at which
# a similar earlier one is looked for, and passages that are compared at each.
_SORTED, _OWN, _PROBES, _COMPARED = 32, 8, 16, 8


class OwnTexts(NamedTuple):
    """What a row reads besides its new tokens, each id plus 1, with 0 where there is none.

    Attributes:
      similar: `[B, W]`, the part of the sorted text that is most like the row's input.
      inputs: `[B, L]`, the encoder's input, at the right.
    """

    similar: jax.Array
    inputs: jax.Array


@flax.struct.dataclass
class SuffixDrafter(StoredDrafter):
    """A drafter that proposes what followed the same ids in earlier texts, input and output.

    Earlier texts are the sequences of a `SortedText`: those that a job has finished
    (`SuffixHistory`), or a file that `save` wrote. Of the places there after the longest equal
    ending, 32 are read. (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975; REST, He et al.
    2023, arXiv 2311.08252.) Of the row's input and output, 8 places are read before which most of
    the last 16 ids are equal. The same is done for one passage of the earlier texts, that which is
    most like the input: an output that differs from an earlier one in a few words is copied from
    there also after these words.

    The weight of a passage doubles with every id before it that is equal to the row's, and doubles
    again with every id of the unbroken match right before it. The draft, a point mass, is what the
    heaviest passages have in common. It ends where those that agree have less than `least_share` of
    the weight, and is no longer than `factor` times the number of ids that match. If nothing
    matches, nothing is drafted.

    A sequence of earlier texts is an encoder's input (if it is known), start token and decoder
    prefix, and the output; of a decoder-only model, prompt and output.

    Attributes:
      text: the earlier texts; None: only the row's own input and output are read.
      factor: the most ids that are drafted for each that matches.
      least_share: see above, from 0 to 1.
      min_match: the fewest ids that must match; ids equal but not in a row count a half.
      remembers: whether the texts are outputs, which the same key may have drawn.
      vocab_size: V of a file, None of a history.
      fingerprint: fingerprint of the vocabulary of a file, "" if it is not known.
      checksum: checksum of a file.
    """

    text: SortedText | None = None
    factor: float = flax.struct.field(pytree_node=False, default=2.0)
    least_share: float = flax.struct.field(pytree_node=False, default=0.1)
    min_match: int = flax.struct.field(pytree_node=False, default=1)
    remembers: bool = flax.struct.field(pytree_node=False, default=False)  # type: ignore[misc]
    vocab_size: int | None = flax.struct.field(pytree_node=False, default=None)
    fingerprint: str = flax.struct.field(pytree_node=False, default="")
    checksum: str = flax.struct.field(pytree_node=False, default="")
    passages: ClassVar[bool] = True
    what: ClassVar[str] = "sorted text"

    def __post_init__(self):
        arguments.keep_number(self, "factor", 0, 64)
        arguments.keep_number(self, "least_share", 0, 1)
        arguments.keep_integer(self, "min_match", 1, DEPTH)
        arguments.check_flag("remembers", self.remembers)

    @classmethod
    @isolated
    def load(
        cls, path: str | os.PathLike[str], vocabulary: Vocabulary | None = None, **settings: Any
    ) -> "SuffixDrafter":
        """Returns a drafter that reads a file of sorted text, which `save_texts` wrote.

        On a CPU the file is mapped: only the parts that are read take memory, whatever its size.
        Elsewhere it is copied to the device.

        Args:
          path: the file.
          vocabulary: the target's; a file of another one is rejected.
          settings: `factor`, `least_share`, `min_match`, and `remembers=False` for outputs that
            `SuffixHistory.save` wrote and that were drawn with other keys, or at temperature 0.

        Raises:
          ValueError: no such file, a damaged one, or one of another vocabulary.
        """
        text, info = map_text(path)
        drafter = cls(text, **info._asdict() | settings)
        drafter.check_vocabulary(str(path), vocabulary)
        return drafter

    @staticmethod
    @isolated
    def save_texts(
        path: str | os.PathLike[str],
        sequences: Iterable[Sequence[int]],
        vocab_size: int,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """Sorts texts and writes one file that `load` reads.

        Args:
          path: the file.
          sequences: ids of texts, each as in the class's description; empty ones count for nothing.
          vocab_size: V; all ids lie below it.
          vocabulary: the ids' vocabulary; if given, the file is rejected for a target with another.

        Raises:
          ValueError: no id at all, or ids outside the vocabulary.
        """
        fingerprint = vocabulary.fingerprint() if vocabulary is not None else ""
        write_sorted(path, join_sequences(sequences, vocab_size), vocab_size, fingerprint)

    __repr__ = Drafter.__repr__  # not the dataclass's, with all arrays

    @property
    def name(self) -> str:
        return "suffix"

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        check_copying(target, type(self).__name__)

    def identity(self) -> tuple[list[Any], Any]:
        # With the checksum; what a job adds decides no output.
        return [jax.tree.structure(self)], ()

    def init(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int
    ) -> OwnTexts:
        columns = jnp.arange(inputs.shape[1])
        ids = jnp.where(columns < input_lengths[:, None], inputs + 1, 0)
        moved = columns - (inputs.shape[1] - input_lengths)[:, None]
        right = jnp.take_along_axis(ids, jnp.maximum(moved, 0), axis=1)
        similar = self._find_similar(ids, input_lengths, inputs.shape[1] + slots)
        copies = len(tokens) // len(inputs)
        own = OwnTexts(similar, jnp.where(moved < 0, 0, right))
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), own)

    def read_prefix(self, draft_state: OwnTexts, state: DecodeState, states: Any) -> OwnTexts:
        if draft_state.inputs.shape[1]:
            return draft_state
        prompts = jnp.where(
            jnp.arange(state.tokens.shape[1]) < state.lengths[:, None], state.tokens + 1, 0
        )
        similar = self._find_similar(prompts, state.lengths, draft_state.similar.shape[1])
        return draft_state._replace(similar=similar)

    def _find_similar(self, ids: jax.Array, lengths: jax.Array, width: int) -> jax.Array:
        """Returns the part `[N, W]` of the sorted text that is most like texts `[N, T]`."""
        if self.text is None:
            return jnp.zeros((len(ids), 0), jnp.int32)
        if not ids.shape[1]:
            return jnp.zeros((len(ids), width), jnp.int32)
        probes = min(_PROBES, ids.shape[1])
        ends = 1 + (lengths[:, None] - 1) * jnp.arange(1, probes + 1) // probes
        repeated = jnp.repeat(ids, probes, axis=0)
        endings = last_ids(repeated, ends.reshape(-1), DEPTH, 0)
        found = find_places(self.text, endings, _COMPARED)
        # The best of all places of all probes, of equally good ones the latest.
        strength = (found.match + found.equal).reshape(len(ids), -1)
        starts = found.places.reshape(len(ids), -1) - jnp.repeat(ends, _COMPARED, axis=1)
        best = jnp.max(strength, axis=1, keepdims=True)
        start = jnp.max(jnp.where(strength == best, starts, -width), axis=1, keepdims=True)
        similar = read_ids(self.text, start + jnp.arange(width))
        return jnp.where(best > 0, similar, 0)

    def find(self, memory: OwnTexts, texts: Texts, count: int, length: int) -> Found:
        new = jnp.arange(texts.tokens.shape[1]) < texts.lengths[:, None]
        own = jnp.concatenate([*memory, jnp.where(new, texts.tokens + 1, 0)], axis=1)
        ends = own.shape[1] - texts.tokens.shape[1] + texts.lengths
        begins = memory.similar.shape[1]
        ending = last_ids(own[:, begins:], ends - begins, DEPTH, 0)
        found = [_find_own(own, ends, ending, length)]
        if self.text is not None:
            places = find_places(self.text, ending, _SORTED)
            ids = read_ids(self.text, places.places[..., None] + jnp.arange(length))
            found.append((ids, places.match + places.equal))
        ids, strength = (jnp.concatenate(parts, axis=1) for parts in zip(*found))
        ids -= 1  # −1 at the end of a sequence, where a passage ends
        weights = jnp.where(strength > 0, jnp.exp2(strength.astype(jnp.float32)), 0)
        drafted = follow_passages(ids, weights, count, self.least_share)
        agrees = (ids[:, None, :, 0] == drafted[:, :, :1]) & (drafted[:, :, :1] >= 0)
        match = jnp.max(jnp.where(agrees, strength[:, None], 0), axis=2) // 2
        most = jnp.ceil(self.factor * match.astype(jnp.float32)).astype(jnp.int32)
        return Found(jnp.where(jnp.arange(length) < most[..., None], drafted, -1), match)


def _find_own(
    own: jax.Array, ends: jax.Array, ending: jax.Array, length: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the passages `[N, C, G]` of texts `[N, M]` that fit an ending best, and how well."""
    # An id that is not there is equal to none.
    match, equal = compare_endings(own, ends, jnp.where(ending > 0, ending, -1), DEPTH)
    # Of equally good places the latest: in the output, in the input, in a similar text.
    keys = jnp.where(own > 0, match + equal, 0) * own.shape[1] + jnp.arange(own.shape[1])
    found = []
    for _ in range(min(_OWN, own.shape[1])):  # a sort takes many times as long
        found.append(jnp.max(keys, axis=1, keepdims=True))
        keys = jnp.where(keys == found[-1], -1, keys)
    strength, places = jnp.divmod(jnp.concatenate(found, axis=1), own.shape[1])
    places = places[..., None] + jnp.arange(length)
    there = places < ends[:, None, None]
    places = jnp.minimum(places, own.shape[1] - 1).reshape(len(own), -1)
    ids = jnp.take_along_axis(own, places, axis=1).reshape(there.shape)
    return jnp.where(there, ids, 0), strength
