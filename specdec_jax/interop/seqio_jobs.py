"""Reads, writes and evaluates registered seqio tasks as T5X's `infer` and `eval` do.

Needs the extra `seqio`, which brings TensorFlow.
"""

import atexit
import contextlib
import difflib
import functools
import importlib
import itertools
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import seqio
import tensorflow as tf

from specdec_jax.decoding.continuous_batching import Output
from specdec_jax.files.places import RemotePath, is_remote, make_path
from specdec_jax.files.user_cache import private_folder, scratch_folder
from specdec_jax.files.writing import write_file
from specdec_jax.interop.vocabularies import find_difference
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import is_decoder_only

try:
    tf.config.set_visible_devices([], "GPU")  # it would take the memory that JAX needs
except RuntimeError:  # somebody has used TensorFlow before, and its devices are fixed
    pass

FEATURES = ("inputs", "targets")
_NEAR = 3
_INFO = re.compile(r"info\.(.+)\.json")  # what a folder of seqio_cache_tasks has of each split
_scratch = contextlib.ExitStack()
atexit.register(_scratch.close)


class TaskSplit(NamedTuple):
    """One split of some tasks.

    Attributes:
      tasks: the tasks.
      name: name of the split.
      use_cached: whether its data are those that `seqio_cache_tasks` has preprocessed.
    """

    tasks: tuple[seqio.Task, ...]
    name: str
    use_cached: bool = False


class Example(NamedTuple):
    """One example of a task.

    Attributes:
      task: the task.
      fields: everything that the task gives, for its metrics.
      inputs, targets: ids.
    """

    task: seqio.Task
    fields: dict[str, Any]
    inputs: list[int]
    targets: list[int]


@contextlib.contextmanager
def _name_failure(name: str, got: str, what: str, expected: str = "") -> Iterator[None]:
    """Raises ValueError, with the first line of its message, for any error inside.

    Such errors come from TensorFlow, its data sets, or a task's own functions.
    """
    try:
        yield
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{name}: got {got!r}, {what} ({line}){expected}") from error


def find_tasks(
    name: str,
    split: str,
    modules: Sequence[str] = (),
    data_dir: str | None = None,
    use_cached: bool = False,
    cache_dirs: Sequence[str] = (),
) -> TaskSplit:
    """Returns a split of a registered task, or of the tasks of a mixture; no data are read.

    Args:
      name: name of the task or mixture.
      split: a split that each task must have; with TensorFlow Datasets also a part, as in
        "test[:100]".
      modules: modules to import first, which register tasks; the working directory is searched too.
      data_dir: where TensorFlow Datasets keeps its data; None: where each task says.
      use_cached: whether the data are those that `seqio_cache_tasks` has preprocessed.
      cache_dirs: folders of such data beside those that modules have added, here or at URLs, from
        which the split's files are copied; as in T5X's flag, commas separate several.

    Raises:
      ValueError: a module cannot be imported, the name or split is unknown, a task is not from ids
        to ids, or has no preprocessed data.
    """
    if os.getcwd() not in sys.path:  # a console script does not search the working directory
        sys.path.append(os.getcwd())
    for module in modules:
        expected = ", expected a module that registers seqio tasks"
        with _name_failure("module_import", module, "which fails", expected):
            importlib.import_module(module)
    known = sorted({*seqio.MixtureRegistry.names(), *seqio.TaskRegistry.names()})
    if name not in known:
        near = (
            ", ".join(difflib.get_close_matches(name, known, _NEAR, 0.0))
            or "none: --module_import registers some"
        )
        raise ValueError(
            f"task: got {name!r}, expected one of the {len(known)} registered (the nearest: {near})"
        )
    if data_dir is not None:
        seqio.set_tfds_data_dir_override(data_dir)
    tasks = tuple(seqio.get_subtasks(seqio.get_mixture_or_task(name)))
    folders = [folder for given in cache_dirs for folder in given.split(",") if folder]
    for task in tasks:
        if use_cached:
            _find_cached(task, split, folders)
        _check(task, split, use_cached)
    return TaskSplit(tasks, split, use_cached)


def _find_cached(task: seqio.Task, split: str, folders: Sequence[str]) -> None:
    """Lets seqio find a task's preprocessed data; raises ValueError where there are none."""
    if not task.supports_caching:
        got = f"use_cached: got True for task {task.name!r}"
        raise ValueError(f"{got}, expected one with a seqio.CacheDatasetPlaceholder")
    below = seqio.utils.get_task_dir_from_name(task.name)
    remote = [folder for folder in folders if is_remote(folder)]
    copies = {folder: _copy_cached(folder, below, split) for folder in remote}
    seqio.add_global_cache_dirs([copies.get(folder, folder) for folder in folders])
    with _name_failure("task", task.name, "whose preprocessed data cannot be found"):
        found = task.cache_dir
        splits = _list_cached_splits(found) if found else []
    if not found:
        searched = ", ".join(folders or seqio.get_global_cache_dirs()) or "no folder"
        got = f"task: got {task.name!r} without preprocessed data (searched: {searched})"
        raise ValueError(f"{got}, expected {below}/ with COMPLETED, as seqio_cache_tasks writes it")
    if split not in splits:
        for folder, copy in copies.items():
            found = found.replace(copy, folder)
        got = f"split: got {split!r}, of which {found} has no preprocessed data"
        raise ValueError(f"{got}, expected one of {', '.join(splits)}")


def _list_cached_splits(folder: str) -> list[str]:
    names = tf.io.gfile.listdir(folder)
    return sorted(match[1] for name in names if (match := _INFO.fullmatch(name)))


def _copy_cached(url: str, below: str, split: str) -> str:
    """Copies the preprocessed data of a task's split from a store; returns what replaces `url`.

    The copy stays as long as this process, since seqio remembers where it found a task.
    """
    remote, scratch = make_path(url) / below, _make_scratch(url)
    assert isinstance(remote, RemotePath)
    sizes = {
        name: size
        for name, size in remote.list_files()
        if name in ("COMPLETED", f"stats.{split}.json")
        or _INFO.fullmatch(name)
        or name.startswith(f"{split}.tfrecord-")
    }
    remote.download(sizes, scratch / below)
    return str(scratch)


@functools.cache
def _make_scratch(url: str) -> pathlib.Path:
    return _scratch.enter_context(scratch_folder(private_folder("remote")))


def _check(task: seqio.Task, split: str, use_cached: bool = False) -> None:
    """Raises ValueError for a task not from ids to ids, without the split, or with bad metrics."""
    for name in FEATURES:
        feature, got = task.output_features.get(name), ", ".join(task.output_features)
        if feature is not None:
            dtype = tf.as_dtype(feature.dtype)
            if feature.rank == 1 and dtype.is_integer:
                continue
            got = f"{name} of rank {feature.rank} and {dtype.name}"
        raise ValueError(
            f"task: got {task.name!r} with {got}, "
            "expected sequences of ids called inputs and targets"
        )
    with _name_failure("task", task.name, "which cannot be used"):
        splits = [split] if use_cached else sorted(task.splits)
        task.metric_objs  # a property that makes them
    if split.partition("[")[0] not in splits:
        raise ValueError(
            f"split: got {split!r}, expected one of {', '.join(splits)} of task {task.name}"
        )


class Examples:
    """The examples of one split of some tasks: their inputs, lines of output and metrics.

    Attributes:
      examples: examples of one task after the other, each in the order of its data.
      inputs: ids of each example's input.
      contents: text that identifies each example.
    """

    def __init__(
        self,
        split: TaskSplit,
        target: LanguageModel,
        *,
        input_length: int,
        output_length: int,
        batch_size: int,
        seed: int = 0,
        score_targets: bool = False,
    ):
        """Reads all examples.

        Args:
          split: what `find_tasks` returned.
          target: the target.
          input_length, output_length: lengths to which seqio cuts inputs and targets: T5X's
            TASK_FEATURE_LENGTHS.
          batch_size: number of targets that are scored together.
          seed: seed of the data, if a task draws any.
          score_targets: give every line the log-likelihood of its targets, even if no metric needs
            it.

        Raises:
          ValueError: another vocabulary than the target's, or data that cannot be read.
        """
        tasks = split.tasks
        check_vocabularies(tasks, target)
        self._split, self._width = split, output_length
        lengths = dict(zip(FEATURES, (input_length, output_length)))
        how = dict(split=split.name, use_cached=split.use_cached, seed=seed)
        self.examples = [one for task in tasks for one in _read(task, lengths, **how)]
        if not self.examples:
            raise ValueError(f"split: got {split.name!r} without examples, expected at least one")
        self.inputs = [example.inputs for example in self.examples]
        self.contents = [
            json.dumps([one.task.name, one.inputs, one.targets, _is_pretokenized(one.fields)])
            for one in self.examples
        ]
        kinds = {metric.model_output_type for task in tasks for metric in task.metric_objs}
        scored = score_targets or seqio.metrics.ModelOutputType.SCORE in kinds
        self._scores = _TargetScores(target, self.examples, batch_size) if scored else None

    def lines(self, number: int, outputs: Sequence[Output]) -> list[str]:
        """Returns the line of one example, as T5X's `infer` writes it, with the prediction's ids.

        It is that of the mode predict_with_aux. `aux` has the prediction's log-probability under
        the target's own distribution, or its score in a beam search. `score`, if targets are
        scored, is T5X's score in its mode score. `task`, if there are several, names the example's
        task. Several outputs, which come the best first, are listed with the best last, as in T5X.
        An output that is missing, since its logits were not finite numbers, is null, and `error`
        says why; to metrics it is an empty one.
        """
        example, rows = self.examples[number], []
        vocabulary = example.task.output_features["targets"].vocabulary
        for output in reversed(outputs):
            prediction, score = None, None
            if output.finish_reason != "error":
                prediction = _prediction(vocabulary, output.tokens, self._width)
                score = math.fsum(output.log_probs) if output.score is None else output.score
            rows.append((prediction, output.tokens, _make_finite(score)))
        predictions, tokens, scores = rows[0] if len(rows) == 1 else map(list, zip(*rows))
        record: dict[str, Any] = {"task": example.task.name} if len(self._split.tasks) > 1 else {}
        record |= {
            "inputs": _is_pretokenized(example.fields),
            "prediction": predictions,
            "prediction_tokens": tokens,
            "aux": {"scores": scores},
        }
        errors = [one.error for one in outputs if one.error and one.finish_reason == "error"]
        if errors:
            record["error"] = errors[0].reason
        if self._scores:
            record["score"] = _make_finite(self._scores(number))
        return [json.dumps(record, ensure_ascii=False, allow_nan=False)]

    def evaluate(self, lines: Iterable[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Returns the tasks' own metrics, given the `lines` of all examples in order.

        Returns:
          The value of every metric by task and name, and notes on what was not computed.

        Raises:
          ValueError: a metric function failed.
        """
        records = [json.loads(line) for line in lines]
        lost = sum("error" in record for record in records)
        notes = [f"no output, which metrics take for an empty one: {lost} examples"] * bool(lost)
        metrics = {}
        for task in self._split.tasks:
            members = [pair for pair in zip(self.examples, records) if pair[0].task is task]
            fields = [example.fields for example, _ in members]
            own = [record for _, record in members]
            with _name_failure("task", task.name, "whose metrics fail"):
                metrics[task.name] = _compute_metrics(task, fields, own, self._width, notes)
        return metrics, notes

    def finish(self, lines: Iterable[str], output_file: str | None) -> None:
        """Prints the metrics to standard error and writes them beside the output file."""
        metrics, notes = self.evaluate(lines)
        for task, values in metrics.items():
            shown = ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in values.items()
            )
            print(f"{task} ({self._split.name}): {shown or 'no metrics'}", file=sys.stderr)
        for note in notes:
            print(note, file=sys.stderr)
        if output_file:
            record = {"split": self._split.name, "metrics": metrics, "not computed": notes}
            write_file(f"{output_file}.metrics.json", json.dumps(record, indent=2) + "\n")


def check_vocabularies(tasks: Sequence[seqio.Task], target: LanguageModel) -> None:
    """Raises ValueError for tasks whose ids do not mean the same to the target.

    The message has the first token that differs. For a target without a vocabulary, and for ids
    that stand for themselves, only sizes can be compared.
    """
    if is_decoder_only(target):
        raise ValueError(
            "task: got a decoder-only target, expected one with an encoder for inputs and targets"
        )
    for task, name in itertools.product(tasks, FEATURES):
        vocabulary = task.output_features[name].vocabulary
        with _name_failure("task", task.name, "whose vocabulary fails"):
            size, end = vocabulary.vocab_size, vocabulary.eos_id  # reads its file
        if target.vocabulary is None or isinstance(vocabulary, seqio.PassThroughVocabulary):
            most = target.config.vocab_size
            wrong = f"it has {size} tokens, expected at most {most}" if size > most else None
        else:
            wrong = find_difference(target.vocabulary, vocabulary)
        if name == "targets" and end is not None and end not in target.eos_ids:
            wrong = wrong or f"its EOS id is {end}, not one of {target.eos_ids}"
        if wrong:
            raise ValueError(
                f"task: got {task.name!r}, whose {name} have another vocabulary "
                f"than the target: {wrong}"
            )


def _read(task: seqio.Task, lengths: Mapping[str, int], **how: Any) -> list[Example]:
    with _name_failure("task", task.name, "whose data cannot be read"):
        data = task.get_dataset(lengths, shuffle=False, num_epochs=1, **how)
        examples = list(data.as_numpy_iterator())
    return [
        Example(task, fields, *(np.asarray(fields.get(name, ())).tolist() for name in FEATURES))
        for fields in examples
    ]


# Metrics.


def _compute_metrics(
    task: seqio.Task, fields: list[dict], records: list[dict], width: int, notes: list[str]
) -> dict[str, Any]:
    """Returns the task's metrics by name; what cannot be computed goes to `notes`.

    A value is that of the best prediction where a record lists several.
    """
    kinds = seqio.metrics.ModelOutputType
    if not fields:
        notes.append(f"not computed: metrics of {task.name}, which has no examples")
        return {}
    pairs = [(record["prediction_tokens"], record["aux"]["scores"]) for record in records]
    if isinstance(pairs[0][1], list):
        pairs = [(several[-1], values[-1]) for several, values in pairs]
    tokens, _ = _make_array([ids for ids, _ in pairs], width)
    scores = np.array([score for _, score in pairs], np.float32)
    outputs: dict[Any, Any] = {
        kinds.PREDICTION: tokens,
        kinds.PREDICTION_WITH_AUX: (tokens, {"scores": scores}),
    }
    if all("score" in record for record in records):
        outputs[kinds.SCORE] = np.array([record["score"] for record in records], np.float32)
    computed: dict[str, Any] = {}
    for metric in task.metric_objs:
        kind = metric.model_output_type
        if kind not in outputs:
            notes.append(f"not computed: a metric of {task.name} that needs {kinds.to_str(kind)}")
            continue
        made = metric.from_model_output(fields, outputs[kind], task.output_features)
        if isinstance(made, seqio.metrics.CollectingMetric):
            values, _ = made.actual_compute(fields, task.output_features)
        else:
            values = made.compute()
        for name, value in values.items():
            if name in computed:
                raise ValueError(f"two metrics are called {name}")
            plain = _to_plain(getattr(value, "value", getattr(value, "textdata", value)))
            if isinstance(plain, int | float | str):
                computed[name] = _make_finite(plain)
            else:
                notes.append(
                    f"not written: {name} of {task.name}, which is a {type(value).__name__}"
                )
    return computed


class _TargetScores:
    """log p(targets | inputs) of every example, as T5X's `score_batch` gives it.

    It is computed in batches that depend on the job alone, so that a job that resumes after a kill
    finds the same numbers.
    """

    def __init__(self, target: LanguageModel, examples: Sequence[Example], batch_size: int):
        self._target, self._examples, self._scores = target, examples, dict[int, float]()
        shapes = [(_pad_ids(len(one.inputs)), _pad_ids(len(one.targets))) for one in examples]
        self._batch_of: dict[int, tuple[tuple[int, int], list[int]]] = {}
        by_shape = sorted(range(len(examples)), key=shapes.__getitem__)
        for padded, group in itertools.groupby(by_shape, shapes.__getitem__):
            members = list(group)
            for begin in range(0, len(members), batch_size):
                batch = members[begin : begin + batch_size]
                filled = batch + batch[:1] * (batch_size - len(batch))
                self._batch_of |= dict.fromkeys(batch, (padded, filled))

    def __call__(self, number: int) -> float:
        if number not in self._scores:
            widths, batch = self._batch_of[number]
            members = [self._examples[member] for member in batch]
            inputs, input_lengths = _make_array([member.inputs for member in members], widths[0])
            targets, lengths = _make_array([member.targets for member in members], widths[1])
            start = self._target.start_token
            fed = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=start)
            logits = self._target.logits(inputs, fed, input_lengths)
            scores = np.asarray(_log_likelihood(logits, targets, lengths)).tolist()
            self._scores |= dict(zip(batch, scores))
        return self._scores[number]


@jax.jit
def _log_likelihood(logits: jax.Array, targets: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns `[B]`, the log-probability of `targets [B, T]` up to `lengths [B]`.

    An id 0 weighs nothing, as in T5X. `logits` are `[B, T, V]`.
    """
    dists = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(dists, targets[..., None], axis=-1)[..., 0]
    inside = (jnp.arange(targets.shape[1]) < lengths[:, None]) & (targets != 0)
    return jnp.sum(jnp.where(inside, chosen, 0.0), axis=-1)


def _pad_ids(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def _make_array(rows: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids padded to `[B, width]`, and lengths `[B]`."""
    array = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        array[row, : len(ids)] = ids
    return array, np.array([len(ids) for ids in rows], np.int32)


# JSON.


def _prediction(vocabulary: seqio.Vocabulary, tokens: list[int], width: int) -> Any:
    """Returns an output as T5X writes it: its text, or ids that stand for themselves, padded."""
    if isinstance(vocabulary, seqio.PassThroughVocabulary):
        return tokens + [0] * (width - len(tokens))
    return _to_plain(vocabulary.decode(tokens))


def _is_pretokenized(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _to_plain(value) for name, value in fields.items() if name.endswith("_pretokenized")
    }


def _to_plain(value: Any) -> Any:
    """Returns `value` as JSON holds it: bytes become text, arrays become lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _to_plain(np.asarray(value).tolist())
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _make_finite(value: Any) -> Any:
    """Returns a number that JSON can hold: null for infinities and NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
