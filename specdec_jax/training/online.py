"""Trains a drafter on finished outputs while others are decoded (online speculative decoding)."""

import collections
import copy
import functools
import io
import json
import os
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.learning import FinishedOutput
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram_table import UNREADABLE
from specdec_jax.files.reading import MOST_BYTES, mismatch_error, read_bytes
from specdec_jax.files.writing import write_file
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.training.batches import PADDING
from specdec_jax.training.losses import Objective, TrainState, replace_padding, train_step
from specdec_jax.training.optimizer import make_online_optimizer

# Inputs and outputs are padded to a power of two between these; a batch of outputs has so many ids.
_SHORTEST, _LONGEST, _BATCH_IDS = 32, 512, 128
# Outputs before the first update, and how many of the latest wait for one.
_FIRST_OUTPUTS, _WAITING = 32, 8
# Updates before the drafter is compared with the first one, over as many.
_COMPARED = 20
# Seconds that the compilation of a shape is taken to last before one has been timed.
_COMPILE_SECONDS = 5.0
_FORMAT = "specdec_jax online distillation 1"


class _Example(NamedTuple):
    """The ids of an input, those of prefix and output, and the length of the prefix."""

    inputs: np.ndarray
    tokens: np.ndarray
    prefix: int


class _Shape(NamedTuple):
    """Number of outputs in a batch, and the lengths that inputs and outputs are padded to."""

    rows: int
    inputs: int
    fed: int

    def holds(self, example: _Example) -> bool:
        """Returns whether an example fits; its last token is not fed."""
        return len(example.inputs) <= self.inputs and len(example.tokens) <= self.fed + 1


class OnlineBatch(NamedTuple):
    """Outputs that are padded to one length.

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
    average. A batch is 4 outputs of at most 32 ids, prefix included, 2 of at most 64, else one, of
    which the first 512 count; with inputs longer than 512 they are left out. An update is one step
    of Adam.

    It learns for at most a share of the time that decoding will take, from the beginning on, since
    what is learnt early helps longest. Compilation counts. Batches are padded to a shape that is
    compiled already; another one is compiled only if nothing fits and the share has 5 seconds
    left, or what the last compilation took.

    Each update counts the tokens that the drafter predicts, before it learns from them, and those
    that the drafter it began with predicts. If that was better over the last 20 updates (the mean
    gain plus two standard errors is below 0), it ends with the first weights. It also ends if
    another update would save less time, over the outputs left, than it takes: it adds no more than
    an update did on average, and from 60 updates on no more than the last third of them gained over
    the third before (plus two standard errors). The first weights are used then, too, if the last
    third lost.

    Attributes:
      updates, outputs: number of updates, and of outputs that were seen.
      expected: as below; a job that resumes may set it anew, after `restore`.
      seconds: what learning took, beside `compile_seconds`.
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
        learning_rate: float = 1e-3,
        share_of_time: float = 0.1,
    ):
        """Begins with a drafter as it was loaded; its weights are kept in float32 for training.

        Args:
          target: the target; its encoder is run again for a drafter that reads its output.
          drafter: the drafter; int8 weights and a shortlist are made anew after every update.
          expected: number of outputs there will be; None: unknown, as many as were seen.
          learning_rate: Adam's, constant, relative to the root mean square of each array.
          share_of_time: the most that it learns, over the time of decoding alone, from the first
            output to the last; 1 never waits and never ends.

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
            arguments.check_integer("expected", expected, 0, 2**63 - 1)
        self._target, self._first, self.expected = target, drafter, expected
        self._share, self._optimizer = share_of_time, make_online_optimizer(learning_rate)
        config = drafter.model.config.replace(dtype="float32", matmul_dtype=None, dropout_rate=0.0)
        self._objective = Objective(config.module())
        params = drafter.model.params
        self._dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(params))
        self._first_params = jax.tree.map(lambda leaf: jnp.array(leaf, "float32"), params)
        self._state = TrainState.begin(_copy(self._first_params), self._optimizer)
        self._waiting: collections.deque[_Example] = collections.deque(maxlen=_WAITING)
        self._drafter = _mark(copy.copy(drafter))
        self._compiled: set[_Shape] = set()
        self._clock: float | None = None
        self._before, self._cost = 0.0, 0.0
        self._saved: tuple | None = None  # where, and what was learnt by then
        self._calls, self._tokens, self._drafts = 0, 0, False
        self._compile_cost = _COMPILE_SECONDS
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
        return self.outputs if self.expected is None else self.expected - self.outputs

    @property
    def _decoding(self) -> float:
        """Seconds that were not learning, since the first output."""
        return self.elapsed - self.seconds - self.compile_seconds

    def saw(self, inputs: np.ndarray, prefix: np.ndarray, output: FinishedOutput) -> None:
        """Keeps a finished output for an update; arguments as for `Learner.saw`."""
        self._clock = time.perf_counter() if self._clock is None else self._clock
        self.outputs += 1
        self._calls += output.stats.target_calls
        self._drafts |= output.stats.drafted > 0
        self._tokens += len(output.tokens)
        if self.ended or not output.tokens or output.finish_reason in ("error", "empty"):
            return
        tokens = np.concatenate([prefix, output.tokens]).astype(np.int32)[: _LONGEST + 1]
        if len(inputs) <= _LONGEST and len(prefix) < len(tokens):
            self._waiting.append(_Example(np.asarray(inputs, np.int32), tokens, len(prefix)))

    def pause(self) -> None:
        """Stops the clock until the next output: of the time until then only learning counts."""
        self._before, self._clock = self.elapsed, None

    @isolated
    def learn(self) -> None:
        """Makes at most one update, if enough outputs wait and the time allows it."""
        if self.ended or self.outputs < _FIRST_OUTPUTS:
            return
        shape = self._choose_shape()
        if shape is None:
            return
        start, batch = time.perf_counter(), self._make_batch(shape)
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
        seconds = self._take_time(start)
        if shape in self._compiled:
            self.seconds, self._cost = self.seconds + seconds, seconds
        else:
            self.compile_seconds, self._compile_cost = self.compile_seconds + seconds, seconds
            self._compiled.add(shape)
        self._compare()

    def save(self, path: str | os.PathLike, every: float = 0.0) -> None:
        """Writes weights, the optimiser's state and counts to a file, whole or not at all.

        Nothing is written if nothing was learnt, or nothing since the last time to this path, or
        less than `every` seconds ago.
        """
        arguments.check_path("path", path)
        learnt = os.fspath(path), self.updates, self.ended
        nothing = learnt == self._saved or not (self.updates or self.ended)
        if nothing or (every and self.elapsed < self._due):
            return
        start = time.perf_counter()
        leaves = {f"leaf{i}": leaf for i, leaf in enumerate(jax.tree.leaves(self._state))}
        record = {name: getattr(self, name) for name in _COUNTS} | {"elapsed": self.elapsed}
        record |= {"format": _FORMAT, **self._parts()}
        buffer = io.BytesIO()
        np.savez(buffer, record=np.array(json.dumps(record)), **jax.device_get(leaves))
        write_file(path, buffer.getvalue())
        self.seconds += self._take_time(start)
        self._saved, self._due = learnt, self.elapsed + every

    _due = 0.0  # when `save` writes again

    @isolated
    def restore(self, path: str | os.PathLike) -> None:
        """Continues from a file that `save` wrote, with the same drafter to begin with.

        Raises:
          ValueError: there is no such file, or it is damaged, or of another drafter.
        """
        arguments.check_path("path", path)
        leaves, structure = jax.tree.flatten(self._state)
        content = read_bytes(path, MOST_BYTES + 2 * sum(leaf.nbytes for leaf in leaves))
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                record = json.loads(str(file["record"]))
                found = [file[f"leaf{i}"] for i in range(len(leaves))]
            counts = {name: type(getattr(self, name))(record[name]) for name in _COUNTS}
            elapsed, form = float(record["elapsed"]), record["format"]
            others = [name for name, part in self._parts().items() if record[name] != part]
        except (*UNREADABLE, TypeError, OverflowError) as error:
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
        self._before, self._saved = elapsed, (os.fspath(path), self.updates, self.ended)
        self._drafter = self._make_drafter()

    def _parts(self) -> dict[str, str]:
        return {"drafter": self._first.contents, "target": self._target.contents}

    def summary(self) -> str:
        """Returns a line about what was learnt."""
        if not self.updates:
            why = self.ended or self._why_nothing()
            return f"nothing was learnt from {self.outputs} outputs: {why}"
        recent = self.agreements[-_COMPARED:]
        tokens, right, first = (sum(counts) for counts in zip(*recent)) if recent else (0, 0, 0)
        took = f"{self.updates} updates took {self.seconds:.1f} s of {self.elapsed:.1f} s"
        more = f", {self.compile_seconds:.1f} s more for compilation"
        said = f"; of the last {tokens} tokens {right} were right, {first} without" * bool(recent)
        return f"{took}{more}{said}{self.ended and '; ended: '}{self.ended}"

    def _why_nothing(self) -> str:
        """Returns why there was no update, although the learning has not ended."""
        if self.outputs and not self._drafts:
            return "nothing was drafted"
        if self.outputs < _FIRST_OUTPUTS:
            return f"it begins after {_FIRST_OUTPUTS}"
        if len(self._waiting) < _WAITING:
            return f"fewer than {_WAITING} had tokens, and inputs of at most {_LONGEST} ids"
        return "it was too short a time"

    def _take_time(self, start: float) -> float:
        """Returns the seconds since `start`, which was learning, in a pause too."""
        seconds = time.perf_counter() - start
        if self._clock is None:
            self._before += seconds
        return seconds

    def _choose_shape(self) -> _Shape | None:
        """Returns the smallest compiled shape of which a batch waits, or a new one, or None."""
        for shape in sorted(self._compiled, key=sum):
            if sum(map(shape.holds, self._waiting)) >= shape.rows:
                return shape if self._has_time(self._cost) else None
        if len(self._waiting) < _WAITING or not self._has_time(self._compile_cost):
            return None
        longest = [max(map(len, ids)) for ids in zip(*(one[:2] for one in self._waiting))]
        inputs, fed = (_round_up(length) for length in (longest[0], longest[1] - 1))
        return _Shape(max(_BATCH_IDS // fed, 1), inputs, fed)

    def _has_time(self, seconds: float) -> bool:
        """Returns whether the share of the time allows so many seconds more."""
        total = self._decoding * (1 + self._outputs_left / self.outputs)
        spent = self.seconds + self.compile_seconds
        return self._share == 1 or spent + seconds <= self._share * total

    def _make_batch(self, shape: _Shape) -> OnlineBatch:
        """Returns the latest waiting outputs that fit, and removes them."""
        width = self._first.model.config.vocab_size
        chosen = [one for one in self._waiting if shape.holds(one)][-shape.rows :]
        inputs = np.full((shape.rows, shape.inputs), PADDING, np.int32)
        fed, labels = np.full((2, shape.rows, shape.fed), PADDING, np.int32)
        for row, example in enumerate(chosen):
            ids, start = example.tokens, example.prefix
            inputs[row, : len(example.inputs)] = example.inputs
            fed[row, : len(ids) - 1] = np.minimum(ids[:-1], width - 1)
            # The first new token follows the last of the prefix. An id that the drafter lacks
            # cannot be learnt.
            labels[row, start - 1 : len(ids) - 1] = np.where(ids < width, ids, PADDING)[start:]
        kept = [one for one in self._waiting if all(one is not other for other in chosen)]
        self._waiting = collections.deque(kept, maxlen=_WAITING)
        return OnlineBatch(inputs[:, :0] if is_decoder_only(self._target) else inputs, fed, labels)

    def _make_drafter(self) -> ModelDrafter:
        """Returns a drafter with the current weights, rounded and laid out like the first one's."""
        first = self._first
        model, ids = first.model, None
        if first.shortlist is not None:
            ids = np.unique(first.shortlist.ids)  # without its padding
        how = (model.quantized, model.input_bits, model.config.logits_via_embedding)
        model = LanguageModel(
            model.config,
            _round(self._state.params, self._dtypes, how),
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
        self.ended = why
        self._state = TrainState.begin(_copy(self._first_params), self._optimizer)
        self._drafter = _mark(copy.copy(self._first))

    def _compare(self) -> None:
        """Ends the learning where it does not pay; see the class."""
        if self._share == 1 or len(self.agreements) < _COMPARED:
            return
        gains = [(one.right - one.right_at_first) / max(one.tokens, 1) for one in self.agreements]
        mean, error = _average(gains[-_COMPARED:])
        if mean + 2 * error < 0:
            self._begin_anew("the drafter became worse, its first weights are used again")
            return
        # Gains shrink, so the next update adds no more than those so far did on average.
        most, third = (mean + 2 * error) / self.updates, len(gains) // 3
        if third >= _COMPARED:
            last, last_error = _average(gains[-third:])
            before, error = _average(gains[-2 * third : -third])
            most = min(most, (last - before + 2 * (last_error**2 + error**2) ** 0.5) / third)
        # A token that has become right saves one call of the target.
        tokens_left = self._outputs_left * self._tokens / self.outputs
        if most * tokens_left * self._decoding / max(self._calls, 1) < self._cost:
            self.ended = "another update would take longer than it saves"
            if np.mean(gains[-max(third, _COMPARED) :]) < 0:
                self._begin_anew("the drafter became no better, its first weights are used again")


def _average(numbers: list[float]) -> tuple[float, float]:
    """Returns the mean and its standard error."""
    return float(np.mean(numbers)), float(np.std(numbers, ddof=1)) / len(numbers) ** 0.5


def _round_up(length: int) -> int:
    """Returns the padded length."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())


_COUNTS = ("updates", "outputs", "seconds", "compile_seconds", "ended", "_calls", "_tokens")


def _mark(drafter: ModelDrafter) -> ModelDrafter:
    """Returns the drafter, marked as one that knows outputs."""
    drafter.remembers = True  # type: ignore[misc]  # of this one alone
    return drafter


def _copy(params: dict) -> dict:
    """Returns new arrays, since a step of training takes the memory of its own."""
    return jax.tree.map(functools.partial(jnp.array, copy=True), params)


@functools.partial(jax.jit, static_argnames=("dtypes", "how"))
def _round(params: dict, dtypes: tuple[np.dtype, ...], how: tuple[bool, int | None, bool]) -> dict:
    """Returns the parameters as a drafter keeps them, all in one program, since each compiles.

    Args:
      params: in float32.
      dtypes: of the drafter's arrays.
      how: whether its matrices are in int8, their `input_bits`, and whether its head is tied.
    """
    leaves, structure = jax.tree.flatten(params)
    copies = (jnp.array(leaf, dtype, copy=True) for leaf, dtype in zip(leaves, dtypes, strict=True))
    params = structure.unflatten(copies)
    quantized, input_bits, tied = how
    return weight_layouts.round_params(params, input_bits, tied) if quantized else params
