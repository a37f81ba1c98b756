"""Keeps what a job has finished as the texts of its drafter."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.cascade import DrafterPair
from specdec_jax.drafters.gated import GatedDrafter
from specdec_jax.drafters.sorted_file import map_text, write_sorted
from specdec_jax.drafters.sorted_text import SortedText, sort_places
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only
from specdec_jax.speculative.drafter import Drafter

_SORT_AFTER = 8  # texts are sorted anew when they have grown by this part


class SuffixHistory:
    """Gives a `SuffixDrafter` the inputs and outputs that a job has finished.

    It is a `Learner`: `decode_stream(…, learner=sd.SuffixHistory(target))` calls `saw` and `learn`.
    A loop of your own calls `generate(…, drafter=history.drafter)` and `history.add`. An output is
    added once the caller has asked for the next one. The output distribution is the target's; above
    temperature 0 `verifier="gumbel"` is needed (`Drafter.remembers`).

    The arrays never change their size, so nothing is compiled again. When they are full, the older
    half is dropped.

    Attributes:
      drafter: the drafter as it is now: the same object until texts have been added.
      outputs: number of outputs that were seen, without those that have none.
      seconds: what sorting took.
    """

    @isolated
    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        *,
        capacity: int = 2**17,
    ):
        """Begins with no texts.

        Args:
          target: the target.
          drafter: a `SuffixDrafter` without texts and with other settings than the default, or a
            gate or pair of drafters, such as a cascade, with one such drafter inside.
          capacity: number of ids that are kept, a power of two; 8 bytes each on the device.

        Raises:
          ValueError: another drafter, or a capacity out of range.
        """
        arguments.check_model("target", target)
        drafter = SuffixDrafter() if drafter is None else drafter
        if [one.text for one in _list_suffix_drafters(drafter)] != [None]:
            got = f"{drafter!r} as drafter"
            expected = "one SuffixDrafter without texts, alone or inside a pair or gate"
            raise mismatch_error("history", got, expected)
        arguments.check_integer("capacity", capacity, 64, 2**30)
        if capacity & (capacity - 1):
            raise mismatch_error("capacity", capacity, "a power of two")
        self._capacity, self._vocab_size = capacity, target.config.vocab_size
        vocabulary = target.vocabulary
        self._fingerprint = "" if vocabulary is None else vocabulary.fingerprint()
        self._prompted, self._start_token = is_decoder_only(target), target.start_token
        self._languages = getattr(vocabulary, "languages", None)
        self._ids = np.zeros(0, np.int32)  # known to the drafter
        self._new: list[np.ndarray] = []
        self._drafter = _replace_text(drafter, self._sort())
        self._saved: tuple | None = None  # where, and how many outputs had been seen
        self._due = 0.0
        self.outputs, self.seconds = 0, 0.0

    @property
    def drafter(self) -> Drafter:
        """The drafter as it is now: the same object until texts have been added."""
        return self._drafter

    def saw(self, inputs: np.ndarray, prefix: np.ndarray, output: Any) -> None:
        """Keeps a finished output; arguments as for `Learner.saw`."""
        if output.finish_reason not in ("error", "empty"):
            self._keep(inputs, prefix, output.tokens)

    def add(
        self, inputs: Sequence[int], tokens: Sequence[int], target_language: str | None = None
    ) -> None:
        """Keeps an output of `generate`, and gives the drafter what was kept.

        Args:
          inputs: ids of the encoder's input, or of the prompt of a decoder-only target.
          tokens: new token ids, EOS included.
          target_language: code of its language, if `generate` got one.

        Raises:
          ValueError: a language that the target does not have, or something that is no id of its.
        """
        start, languages = self._start_token, self._languages
        if target_language is not None:
            if languages is None:
                got = quote_value(target_language)
                raise mismatch_error("target_language", got, "none: the model has no languages")
            code = languages.find("target_language", target_language)
            start = code if languages.target == "start" else start
        arguments.check_sequences([[start], inputs, tokens], self._vocab_size)
        prefix = [] if self._prompted else [start]
        self._keep(inputs, prefix, tokens)
        self.learn()

    @isolated
    def learn(self) -> None:
        """Gives the drafter what was kept, when that is enough to be worth sorting."""
        if sum(map(len, self._new)) * _SORT_AFTER < max(len(self._ids), 1):
            return
        start = time.perf_counter()
        ids = np.concatenate([self._ids, *self._new])
        self._new = []  # a copy of this object may have the old list
        if len(ids) > self._capacity:  # whole sequences stay
            ends = np.flatnonzero(ids == 0) + 1
            ids = ids[ends[np.searchsorted(ends, len(ids) - self._capacity // 2)] :]
        self._ids = ids
        self._drafter = _replace_text(self._drafter, self._sort())
        self.seconds += time.perf_counter() - start

    def _keep(self, *parts: Sequence[int] | np.ndarray) -> None:
        self.outputs += 1
        ids = np.concatenate(parts).astype(np.int32)
        if len(parts[-1]) and len(ids) < self._capacity // 2:
            self._new.append(np.append(ids + 1, 0).astype(np.int32))

    def _sort(self) -> SortedText:
        return SortedText.make(self._ids, sort_places(self._ids), self._capacity)

    def save(self, path: str | os.PathLike, every: float = 0.0) -> None:
        """Writes the texts to a file, which `SuffixDrafter.load` reads too.

        What it loads `remembers`, as the history does: its texts may be draws of the same key.
        Nothing is written if there is no text, or nothing was added since the last time to this
        path, or less than `every` seconds ago.
        """
        arguments.check_path("path", path)
        now = time.monotonic()
        seen = os.fspath(path), self.outputs
        if seen == self._saved or (every and now < self._due):
            return
        ids = np.concatenate([self._ids, *self._new])
        if not len(ids):
            return
        write_sorted(path, ids, self._vocab_size, self._fingerprint, remembers=True)
        self._saved, self._due = seen, now + every

    @isolated
    def restore(self, path: str | os.PathLike) -> None:
        """Adds the texts of a file that `save` wrote, without those too long for this capacity.

        Raises:
          ValueError: the file is damaged, or is of another vocabulary.
        """
        text, info = map_text(path)
        if (info.vocab_size, info.fingerprint) != (self._vocab_size, self._fingerprint):
            raise mismatch_error(path, "texts of another vocabulary", "those of this target")
        ids = np.array(text.ids, np.int32)
        sizes = np.diff(np.flatnonzero(ids == 0), prepend=-1)  # each with the 0 behind it
        kept = np.repeat(sizes <= self._capacity // 2, sizes)  # as `_keep` does
        self._new = [*self._new, ids[: len(kept)][kept]]
        self._saved = None  # no output was added, but the texts are others
        self.learn()

    def summary(self) -> str:
        """Returns a line about what was kept."""
        kept = len(self._ids) + sum(map(len, self._new))
        return f"{self.outputs} outputs, {kept:,} ids kept; sorting took {self.seconds:.1f} s"


def _list_suffix_drafters(drafter: Any) -> list[SuffixDrafter]:
    """Returns the drafter itself if it is a `SuffixDrafter`, else those inside a gate or pair."""
    if type(drafter) is SuffixDrafter:
        return [drafter]
    inside = [drafter.drafter] if isinstance(drafter, GatedDrafter) else []
    inside += drafter.parts if isinstance(drafter, DrafterPair) else []
    return [one for part in inside for one in _list_suffix_drafters(part)]


def _replace_text(drafter: Any, text: SortedText) -> Any:
    """Returns the drafter with another text in its `SuffixDrafter`."""
    if type(drafter) is SuffixDrafter:
        return dataclasses.replace(drafter, text=text, remembers=True)
    if isinstance(drafter, GatedDrafter):
        return dataclasses.replace(drafter, drafter=_replace_text(drafter.drafter, text))
    if isinstance(drafter, DrafterPair):
        parts = [_replace_text(part, text) for part in drafter.parts]
        return drafter.tree_unflatten(drafter.settings, parts)
    return drafter
