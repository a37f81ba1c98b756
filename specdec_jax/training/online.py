"""Trains a drafter on finished outputs while others are decoded (online speculative decoding)."""

import collections
import copy
import io
import json
import os
import time
import zipfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.learning import FinishedOutput
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.reading import MOST_BYTES, mismatch_error, read_bytes
from specdec_jax.files.writing import write_file
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.training.batches import PADDING
from specdec_jax.training.losses import Objective, TrainState, replace_padding, train_step
from specdec_jax.training.optimizer import make_online_optimizer

# Lengths to which both sides of an output are padded, and the number of ids in a batch: 8, 4 or 2
# outputs. Each length is a shape that compiles.
_LENGTHS, _BATCH_IDS = (32, 64, 128), 256
# Outputs before the first update, and updates before the drafter is compared with the first one;
# the comparison is over as many.
_FIRST_OUTPUTS, _COMPARED = 32, 20
# Seconds that the compilation of a shape is taken to last before one has been timed.
_COMPILE_SECONDS = 5.0
_FORMAT = "specdec_jax online distillation 1"


class OnlineBatch(NamedTuple):
    """Outputs of one padded length.

    Attributes:
      inputs: `[B, L]` int32 ids of the encoder's inputs, then `PADDING`; L = 0 without an encoder.
      fed: `[B, T]` int32, what the decoder is fed, then `PADDING`.
      labels: `[B, T]` int32, the next token where it is new, else `PADDING`.
      encoded: `[B, L, D]`, the target's encoder output, for a drafter that reads it; else None.
    """

    inputs: np.ndarray
    fed: np.ndarray
    labels: np.ndarray
    encoded: jax.Array | None = None


class Agreement(NamedTuple):
    """How well the drafter predicted outputs before it learnt them, each `[]` int32.

    Attributes:
      tokens: number of new tokens.
      right: tokens that are the drafter's argmax after the same prefix.
      right_at_first: the same for the drafter as it was before the first update.
    """

    tokens: Any
    right: Any
    right_at_first: Any


def online_loss(
    params: dict,
    batch: OnlineBatch,
    objective: Objective,
    first_params: dict,
    dropout_key: Array | None = None,
) -> tuple[Array, Agreement]:
    """Returns the mean cross-entropy of the new tokens, and what the drafter had right.

    Args:
      params: the drafter's parameters.
      batch: the outputs.
      objective: has the drafter's network.
      first_params: the parameters before the first update; no gradient flows to them.
      dropout_key: not used.
    """
    options: dict[str, Any] = {}
    ids: tuple[Array, ...] = (replace_padding(batch.fed),)
    if not objective.model.config.decoder_only:
        ids = (replace_padding(batch.inputs), batch.inputs >= 0, *ids)
        options["encoded"] = batch.encoded
    logits, first = (
        objective.model.apply({"params": one}, *ids, **options) for one in (params, first_params)
    )
    counted, labels = batch.labels >= 0, replace_padding(batch.labels)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(logits, axis=-1) - chosen
    right = (jnp.argmax(logits, axis=-1) == labels) & counted
    right_at_first = (jnp.argmax(first, axis=-1) == labels) & counted

    counts = (jnp.sum(where, dtype=jnp.int32) for where in (counted, right, right_at_first))
    total = jnp.sum(counted, dtype=jnp.float32)
    return jnp.sum(loss, where=counted) / jnp.maximum(total, 1), Agreement(*counts)


@jax.jit
def _encode(network: Network, inputs: jax.Array) -> jax.Array:
    encoded = network.encode(replace_padding(inputs), jnp.sum(inputs >= 0, axis=1))
    return encoded.astype(jnp.float32)


class OnlineDistillation:
    """Trains a model drafter on finished outputs while it drafts others (Liu et al. 2024, OSD).

    It is a `Learner`: `decode_stream(…, learner=…)` calls `saw` and `learn`. A loop of your own
    calls `generate(…, drafter=learner.drafter)`, keeps the result, and calls `learner.saw(…)` and
    `learner.learn()`. Whatever the drafter learns, the output distribution is the target's; above
    temperature 0 `verifier="gumbel"` is needed (`Drafter.remembers`).

    The labels are the output's tokens. At temperature 0 they are the target's argmax; above, draws
    from its distribution, whose cross-entropy has the gradient of the forward divergence on
    average. A batch is 8, 4 or 2 outputs of at most 32, 64 or 128 ids on the longer side (input, or
    prefix and output together); longer ones are left out. An update is one step of Adam.

    It learns for at most a share of the time. Compilation is not counted; a shape is compiled only
    if this share of the time left is at least 5 seconds, or what the last compilation took. After
    20 updates it counts the tokens that it predicts, and those that the drafter it began with
    predicts, on the outputs of the last 20 updates, before it learns from them. It ends when the
    mean gain per update plus two standard errors would save less time, over the outputs left, than
    an update takes. If even that is below 0, it restores the first weights.

    Attributes:
      updates, outputs: number of updates, and of outputs that were seen.
      seconds: what learning took, compilation not counted.
      compile_seconds: what the first update of each shape took.
      ended: why it has ended; "" if it goes on.
      agreements: `Agreement` of each update since the process began or resumed.
    """

    @isolated
    def __init__(
        self,
        target: LanguageModel,
        drafter: ModelDrafter,
        *,
        expected: int | None = None,
        learning_rate: float = 5e-4,
        share_of_time: float = 0.04,
    ):
        """Begins with a drafter as it was loaded; its weights are kept in float32 for training.

        Args:
          target: the target; its encoder is run again for a drafter that reads its output.
          drafter: the drafter; int8 weights and a shortlist are made anew after every update.
          expected: number of outputs there will be; None: unknown, as many as were seen.
          learning_rate: Adam's, constant, relative to the root mean square of each array.
          share_of_time: the most of the time, from the first output on, that it learns; 1 never
            waits and never ends.

        Raises:
          ValueError: a drafter of another kind, a mesh, or a number out of range.
        """
        arguments.check_model("target", target)
        if type(drafter) is not ModelDrafter:
            raise mismatch_error("learner", f"{drafter!r} as drafter", "a ModelDrafter")
        check_pair(target, drafter)
        if any(network.rules is not None for network in (target.network, drafter.network)):
            raise mismatch_error("learner", "models on a mesh", "models on one device")
        arguments.check_number("learning_rate", learning_rate, "a number in (0, 1)")
        arguments.check_number("share_of_time", share_of_time, "a number in (0, 1]")
        if not (0 < learning_rate < 1 and 0 < share_of_time <= 1):
            got = f"learning_rate={learning_rate}, share_of_time={share_of_time}"
            raise mismatch_error("learner", got, "numbers in (0, 1), a share of 1 too")
        if expected is not None:
            arguments.check_integer("expected", expected, 0)
        self._target, self._first, self._expected = target, drafter, expected
        self._share, self._optimizer = share_of_time, make_online_optimizer(learning_rate)
        config = drafter.model.config.replace(dtype="float32", matmul_dtype=None, dropout_rate=0.0)
        self._objective = Objective(config.module())
        params = drafter.model.params
        self._dtypes = jax.tree.map(lambda leaf: leaf.dtype, params)
        self._first_params = _copy(params, jax.tree.map(lambda _: np.dtype("float32"), params))
        self._state = TrainState.begin(_copy(self._first_params), self._optimizer)
        self._waiting: dict[int, collections.deque] = {
            length: collections.deque(maxlen=_BATCH_IDS // length) for length in _LENGTHS
        }
        self._drafter = _mark(copy.copy(drafter))
        self._compiled: set[int] = set()
        self._clock: float | None = None
        self._before, self._cost, self._saved = 0.0, 0.0, 0
        self._calls, self._tokens, self._compile_cost = 0, 0, _COMPILE_SECONDS
        self.updates, self.outputs, self.seconds, self.compile_seconds = 0, 0, 0.0, 0.0
        self.ended, self.agreements = "", list[Agreement]()

    @property
    def drafter(self) -> ModelDrafter:
        """The drafter as it is now: the same object until the next update."""
        return self._drafter

    @property
    def elapsed(self) -> float:
        """Seconds since the first output, over all processes of the job."""
        since = 0.0 if self._clock is None else time.perf_counter() - self._clock
        return self._before + since

    @property
    def _outputs_left(self) -> int:
        """Number of outputs to come; as many as there were, where that is not known."""
        return self.outputs if self._expected is None else self._expected - self.outputs

    def saw(self, inputs: np.ndarray, prefix: np.ndarray, output: FinishedOutput) -> None:
        """Keeps a finished output for an update; arguments as for `Learner.saw`."""
        self._clock = time.perf_counter() if self._clock is None else self._clock
        self.outputs += 1
        self._calls += output.stats.target_calls
        self._tokens += len(output.tokens)
        if self.ended or not output.tokens or output.finish_reason in ("error", "empty"):
            return
        ids = np.concatenate([prefix, output.tokens]).astype(np.int32)
        longest = max(len(inputs), len(ids) - 1)
        for length, waiting in self._waiting.items():
            if longest <= length:
                waiting.append((np.asarray(inputs, np.int32), ids, len(prefix)))
                return

    @isolated
    def learn(self) -> None:
        """Makes at most one update, if enough outputs wait and the time allows it."""
        if self.ended or self.outputs < _FIRST_OUTPUTS:
            return
        seconds_left = self._outputs_left * self.elapsed / self.outputs
        compiles = self._share == 1 or self._share * seconds_left >= self._compile_cost
        full = [
            length
            for length, rows in self._waiting.items()
            if len(rows) == rows.maxlen and (compiles or length in self._compiled)
        ]
        if not full:
            return
        if self._share < 1 and self.seconds + self._cost > self._share * self.elapsed:
            return
        length, start = max(full, key=lambda one: one in self._compiled), time.perf_counter()
        batch = self._make_batch(length)
        if self._first.model.config.encoder_dim is not None:
            batch = batch._replace(encoded=_encode(self._target.network, batch.inputs))
        self._state, agreement = train_step(
            self._state,
            batch,
            self._first_params,
            0,
            objective=self._objective,
            optimizer=self._optimizer,
            loss=online_loss,
        )
        weights = jax.device_get(jax.tree.leaves(self._state.params))
        if not all(np.isfinite(leaf).all() for leaf in weights):
            self._begin_anew("weights were not finite numbers, the first ones are used again")
            return
        self._drafter = self._make_drafter()
        self.agreements.append(Agreement(*map(int, jax.device_get(agreement))))
        jax.block_until_ready(jax.tree.leaves(self._drafter))
        self.updates += 1
        seconds = time.perf_counter() - start
        if length in self._compiled:
            self.seconds, self._cost = self.seconds + seconds, seconds
        else:
            self.compile_seconds, self._compile_cost = self.compile_seconds + seconds, seconds
            self._compiled.add(length)
        self._compare()

    def save(self, path: str | os.PathLike, every: float = 0.0) -> None:
        """Writes weights, the optimiser's state and counts to a file, whole or not at all.

        Nothing is written if nothing was learnt since, or less than `every` seconds ago.
        """
        if self._saved == self.updates or (every and self.elapsed < self._due):
            return
        start = time.perf_counter()
        leaves = {f"leaf{i}": leaf for i, leaf in enumerate(jax.tree.leaves(self._state))}
        record = {name: getattr(self, name) for name in _COUNTS} | {"elapsed": self.elapsed}
        record |= {"format": _FORMAT, **self._parts()}
        buffer = io.BytesIO()
        np.savez(buffer, record=np.array(json.dumps(record)), **jax.device_get(leaves))
        write_file(path, buffer.getvalue())
        self.seconds += time.perf_counter() - start
        self._saved, self._due = self.updates, self.elapsed + every

    _due = 0.0  # when `save` writes again

    @isolated
    def restore(self, path: str | os.PathLike) -> None:
        """Continues from a file that `save` wrote, with the same drafter to begin with.

        Raises:
          ValueError: the file is damaged, or is of another drafter.
        """
        leaves, structure = jax.tree.flatten(self._state)
        most = MOST_BYTES + 2 * sum(leaf.nbytes for leaf in leaves)
        try:
            with np.load(io.BytesIO(read_bytes(path, most)), allow_pickle=False) as file:
                record = json.loads(str(file["record"]))
                found = [file[f"leaf{i}"] for i in range(len(leaves))]
            counts = {name: type(getattr(self, name))(record[name]) for name in _COUNTS}
            elapsed, form = float(record["elapsed"]), record["format"]
            others = [name for name, part in self._parts().items() if record[name] != part]
        except (ValueError, KeyError, TypeError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise mismatch_error(
                path, f"a damaged file ({error})", "what a learner saved"
            ) from None
        if form != _FORMAT or others:
            what = others[0] if others else "version"
            got = f"what a learner of another {what} saved"
            raise mismatch_error(path, got, f"that of this {what}; remove the file to begin anew")
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if [(leaf.shape, leaf.dtype) for leaf in found] != shapes:
            raise mismatch_error(path, "arrays of other shapes", "those of this drafter")
        self._state = structure.unflatten(map(jnp.array, found))
        vars(self).update(counts)
        self._before, self._saved = elapsed, self.updates
        self._drafter = self._make_drafter()

    def _parts(self) -> dict[str, str]:
        return {"drafter": self._first.contents, "target": self._target.contents}

    def summary(self) -> str:
        """Returns a line about what was learnt."""
        if not self.updates:
            return (
                f"nothing was learnt from {self.outputs} outputs{self.ended and ': '}{self.ended}"
            )
        recent = self.agreements[-_COMPARED:]
        tokens, right, first = (sum(counts) for counts in zip(*recent)) if recent else (0, 0, 0)
        took = f"{self.updates} updates took {self.seconds:.1f} s of {self.elapsed:.1f} s"
        more = f", {self.compile_seconds:.1f} s more for compilation"
        said = f"; of the last {tokens} tokens {right} were right, {first} without" * bool(recent)
        return f"{took}{more}{said}{self.ended and '; ended: '}{self.ended}"

    def _make_batch(self, length: int) -> OnlineBatch:
        """Returns the waiting outputs of a length, and removes them."""
        waiting, width = self._waiting[length], self._first.model.config.vocab_size
        inputs, fed, labels = np.full((3, len(waiting), length), PADDING, np.int32)
        for row, (source, ids, start) in enumerate(waiting):
            inputs[row, : len(source)] = source
            fed[row, : len(ids) - 1] = np.minimum(ids[:-1], width - 1)
            # The first new token follows the last of the prefix. An id that the drafter lacks
            # cannot be learnt.
            labels[row, start - 1 : len(ids) - 1] = np.where(ids < width, ids, PADDING)[start:]
        waiting.clear()
        return OnlineBatch(inputs[:, :0] if is_decoder_only(self._target) else inputs, fed, labels)

    def _make_drafter(self) -> ModelDrafter:
        """Returns a drafter with the current weights, rounded and laid out like the first one's."""
        first = self._first
        model, ids = first.model, None
        if first.shortlist is not None:
            ids = np.unique(first.shortlist.ids)  # without its padding
        params = _copy(self._state.params, self._dtypes)
        if model.quantized:
            tied = model.config.logits_via_embedding
            params = weight_layouts.round_params(params, model.input_bits, tied)
        model = LanguageModel(
            model.config,
            params,
            model.vocabulary,
            start_token=model.start_token,
            eos_ids=model.eos_ids,
            name=model.name,
            donate_params=True,
            encoder_fingerprint=model.encoder_fingerprint,
            generation_config=model.generation_config,
        )
        return _mark(ModelDrafter(model, ids, first.int8))

    def _begin_anew(self, why: str) -> None:
        """Ends the learning with the first weights."""
        self.ended, self._saved = why, -1  # to be saved, although no update was made
        self._state = TrainState.begin(_copy(self._first_params), self._optimizer)
        self._drafter = _mark(copy.copy(self._first))

    def _compare(self) -> None:
        """Ends the learning where it does not pay; see the class."""
        recent = self.agreements[-_COMPARED:]
        if self._share == 1 or len(recent) < _COMPARED:
            return
        gains = [(one.right - one.right_at_first) / max(one.tokens, 1) for one in recent]
        most = float(np.mean(gains) + 2 * np.std(gains, ddof=1) / len(gains) ** 0.5)
        per_call = self.elapsed / max(self._calls, 1)
        # A token that has become right saves one call of the target.
        saved = most / self.updates * self._outputs_left * self._tokens / self.outputs * per_call
        if most < 0:
            self._begin_anew("the drafter became worse, its first weights are used again")
        elif saved < self._cost:
            self.ended = "another update would take longer than it saves"


_COUNTS = ("updates", "outputs", "seconds", "compile_seconds", "ended", "_calls", "_tokens")


def _mark(drafter: ModelDrafter) -> ModelDrafter:
    """Returns the drafter, marked as one that knows outputs."""
    drafter.remembers = True  # type: ignore[misc]  # of this one alone
    return drafter


def _copy(params: dict, dtypes: dict | None = None) -> dict:
    """Returns new arrays, since a step of training takes the memory of its own."""
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, params) if dtypes is None else dtypes
    return jax.tree.map(lambda leaf, dtype: jnp.array(leaf, dtype, copy=True), params, dtypes)
