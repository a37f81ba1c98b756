"""Shared by the tests of seqio and tasks."""

import importlib.util
import json
import pathlib
import warnings

import command_line
import numpy as np
import pytest

import specdec_jax as sd

INSTALLED = importlib.util.find_spec("seqio") is not None
if INSTALLED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TensorFlow's
        import seqio
        import tensorflow as tf  # noqa: F401 (for the tests)

        from specdec_jax.interop import seqio_jobs as interop  # noqa: F401 (for the tests)
        from specdec_jax.interop import tasks
else:
    interop = seqio = tasks = tf = None


def needs_seqio(test):
    return pytest.mark.seqio(
        pytest.mark.skipif(not INSTALLED, reason="needs the extra seqio")(test)
    )


PAIRS = [
    ("We asked", "Tom is nice"),
    ("Tom", "the weather"),
    ("", ""),
    ("She was where the book was", "She"),
    ("We leave before eight", "We leave"),
    ("Tom is learning German", "Tom is learning German."),
    ("the weather is nice", "is"),
]
LENGTH, WIDTH = 12, 6  # of inputs and outputs: some are cut


def write(path: pathlib.Path, pairs=PAIRS) -> str:
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs))
    return str(path)


# Metric functions of the three kinds.


def words(targets, predictions):
    assert len(targets) == len(predictions)
    return {
        "words": sum(text.count(" ") for text in predictions),
        "kinds": seqio.metrics.Text(f"{len(set(targets))}"),
    }


def likelihood(targets, scores):
    return {"likelihood": seqio.metrics.Scalar(float(np.mean(scores)))}


def certainty(targets, predictions, aux_values):
    longest = np.argmax([len(text) for text in predictions])
    return {
        "certainty": float(aux_values["scores"][longest]),
        "curve": seqio.metrics.Histogram(np.zeros(3)),
    }


@pytest.fixture(scope="module")
def toys(pair, tmp_path_factory):
    """Registers the tasks `toy_text` and `toy_more`, and both as `toy_both`, with tiny ids."""
    folder = tmp_path_factory.mktemp("tsv")
    files = {
        "test": write(folder / "test.tsv"),
        "validation": write(folder / "validation.tsv", PAIRS[3:5]),
    }
    functions = [words, likelihood, certainty]
    tasks.tsv(files, str(pair / "target"), prefix="Tom ", metric_fns=functions, name="toy_text")
    task = seqio.TaskRegistry.get("toy_text")
    seqio.TaskRegistry.add_provider(
        "toy_more",
        task.replace(
            name="toy_more",
            metric_fns=[words],
            postprocess_fn=lambda text, example, is_target: text + " !",
        ),
    )
    seqio.MixtureRegistry.add("toy_both", ["toy_more", "toy_text"], default_rate=1.0)
    yield files
    seqio.MixtureRegistry.remove("toy_both")
    for name in ("toy_text", "toy_more"):
        seqio.TaskRegistry.remove(name)


def write_cached(task: str, folder: pathlib.Path, split: str, count: int) -> None:
    """Writes the first examples of a task as `seqio_cache_tasks` does: before it appends EOS."""
    one = seqio.TaskRegistry.get(task)
    data = one.preprocess_precache(one.source.get_dataset(split, shuffle=False), seed=None)
    folder = folder / task
    folder.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord-00000-of-00001")) as records:
        for fields in data.take(count).as_numpy_iterator():
            features = {name: _feature(value) for name, value in fields.items()}
            example = tf.train.Example(features=tf.train.Features(feature=features))
            records.write(example.SerializeToString())
    info = {
        name: {"shape": spec.shape.as_list(), "dtype": spec.dtype.name}
        for name, spec in data.element_spec.items()
    }
    record = {"num_shards": 1, "features": info, "seqio_version": seqio.__version__}
    (folder / f"info.{split}.json").write_text(json.dumps(record))
    (folder / f"stats.{split}.json").write_text(json.dumps({"examples": count}))
    (folder / "COMPLETED").write_text("")


def _feature(value):
    if isinstance(value, bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(value)))


@pytest.fixture
def generate(specdec):
    """Returns a function that runs `specdec generate` with the tiny pair on a task."""
    return lambda *argv: specdec(
        "generate", *command_line.MODELS, "--batch_size=3", f"--max_input_length={LENGTH}", *argv
    )


@pytest.fixture(scope="module")
def target(pair):
    return sd.load(pair / "target", dtype="float32")


def dataset(name: str, split: str = "test"):
    lengths = {"inputs": LENGTH, "targets": WIDTH}
    return seqio.get_mixture_or_task(name).get_dataset(lengths, split=split, shuffle=False)


def decoded(lines: str) -> list[dict]:
    return [json.loads(line) for line in lines.splitlines()]
