"""Tests seqio tasks through `specdec generate`, beside T5X's and seqio's own results."""

import json
import pathlib
import shutil
import types

import command_line
import fsspec
import jax
import numpy as np
import pytest
import seqio_jobs_of
from seqio_jobs_of import (
    LENGTH,
    PAIRS,
    WIDTH,
    dataset,
    decoded,
    interop,
    needs_seqio,
    seqio,
    tasks,
    tf,
    write_cached,
)

import specdec_jax as sd
from specdec_jax.commands import resumable_output
from specdec_jax.decoding import continuous_batching

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick")]
pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec

toys, generate, target = seqio_jobs_of.toys, seqio_jobs_of.generate, seqio_jobs_of.target


@needs_seqio
def test_where_tensorflow_datasets_keeps_its_data(toys, tmp_path):
    loader = seqio.TaskRegistry.get("wmt_t2t_ende").source.tfds_dataset
    before = loader.data_dir
    interop.find_tasks("toy_text", "test", data_dir=str(tmp_path))
    assert loader.data_dir == str(tmp_path) != before
    seqio.set_tfds_data_dir_override(None)


# Lines and metrics.


@needs_seqio
def test_lines_have_what_generate_gives(generate, toys, target, tmp_path):
    path = tmp_path / "out.jsonl"
    code, out, err = generate("--task=toy_text", f"--output_file={path}")
    assert (code, out) == (0, "") and "toy_text (test): words " in err
    examples, lines = list(dataset("toy_text").as_numpy_iterator()), decoded(path.read_text())
    assert (
        len(lines) == len(PAIRS) and max(len(example["inputs"]) for example in examples) == LENGTH
    )
    result = sd.generate(
        target, [example["inputs"].tolist() for example in examples], max_new_tokens=WIDTH
    )
    for row, (line, example) in enumerate(zip(lines, examples)):
        assert list(line) == ["inputs", "prediction", "prediction_tokens", "aux", "score"]
        assert line["inputs"] == {
            "inputs_pretokenized": "Tom " + PAIRS[row][0],
            "targets_pretokenized": PAIRS[row][1],
        }
        tokens = result.tokens[row, : result.lengths[row]]
        assert line["prediction_tokens"] == tokens.tolist()
        assert line["aux"]["scores"] == pytest.approx(float(result.log_probs[row].sum()), abs=1e-4)
        if row not in (2, 5):  # every length compiles
            continue
        ids = example["targets"]
        dists = jax.nn.log_softmax(target.logits([example["inputs"]], [[0, *ids[:-1]]])[0])
        assert line["score"] == pytest.approx(
            float(np.sum(np.asarray(dists)[np.arange(len(ids)), ids])), abs=1e-4
        )
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "out.jsonl",
        "out.jsonl.gin",
        "out.jsonl.metrics.json",
    ]


@needs_seqio
def test_lines_are_t5xs(generate, toys, tmp_path):
    """T5X's own function writes the same for the same predictions."""
    infer = pytest.importorskip("t5x.infer", reason="t5x is not installed", exc_type=ImportError)
    code, out, _ = generate("--task=toy_more", "--split=validation")
    lines = decoded(out)
    assert code == 0 and len(lines) == 2
    tokens = np.zeros((2, WIDTH), np.int32)
    for row, line in enumerate(lines):
        tokens[row, : len(line["prediction_tokens"])] = line["prediction_tokens"]
    aux = {"scores": np.array([line["aux"]["scores"] for line in lines])}
    vocabulary = seqio.get_mixture_or_task("toy_more").output_features["targets"].vocabulary
    data = dataset("toy_more", "validation")
    path = tmp_path / "theirs"
    infer.write_inferences_to_file(
        str(path),
        (tokens, aux),
        data,
        mode="predict_with_aux",
        vocabulary=vocabulary,
        output_ids=True,
    )
    assert decoded(path.read_text()) == lines


@needs_seqio
def test_a_beam_search_of_a_task(generate, toys, target, tmp_path):
    """A line has the best hypothesis, or a list with the best last, as T5X writes them.

    Metrics are those of the best.
    """
    one, all_of_them = tmp_path / "one", tmp_path / "all"
    flags = ("--task=toy_text", "--num_beams=3", "--length_penalty=1")
    assert generate(*flags, f"--output_file={one}")[0] == 0
    assert generate(*flags, "--num_return_sequences=3", f"--output_file={all_of_them}")[0] == 0
    inputs = [example["inputs"].tolist() for example in dataset("toy_text").as_numpy_iterator()]
    actual = sd.generate(
        target, inputs, max_new_tokens=WIDTH, num_beams=3, length_penalty=1, num_return_sequences=3
    )
    tokens = actual.tokens.reshape(-1, 3, WIDTH)[:, ::-1]
    scores = actual.scores.reshape(-1, 3)[:, ::-1]
    lines = decoded(all_of_them.read_text())
    assert len(lines) == len(PAIRS)
    for best, line, ids, expected in zip(
        decoded(one.read_text()), lines, tokens, scores, strict=True
    ):
        assert best["aux"]["scores"] == pytest.approx(float(expected[-1]), abs=1e-5)
        assert line["aux"]["scores"] == pytest.approx(expected.tolist(), abs=1e-5)
        last = dict(line, aux={"scores": line["aux"]["scores"][-1]})
        last |= {name: line[name][-1] for name in ("prediction", "prediction_tokens")}
        assert best == last
        line["prediction_tokens"] = [
            row + [0] * (WIDTH - len(row)) for row in line["prediction_tokens"]
        ]
        assert line["prediction_tokens"] == ids.tolist()
    metrics = json.loads((tmp_path / "all.metrics.json").read_text())
    assert metrics == json.loads((tmp_path / "one.metrics.json").read_text())

    infer = pytest.importorskip("t5x.infer", reason="t5x is not installed", exc_type=ImportError)
    vocabulary = seqio.get_mixture_or_task("toy_text").output_features["targets"].vocabulary
    aux = {"scores": np.array([line["aux"]["scores"] for line in lines])}
    path = str(tmp_path / "theirs")
    data = dataset("toy_text")
    how = dict(mode="predict_with_aux", vocabulary=vocabulary, output_ids=True)
    infer.write_inferences_to_file(path, (tokens, aux), data, **how)
    for line in lines:
        del line["score"]  # which T5X writes in another mode
    assert decoded(pathlib.Path(path).read_text()) == lines


@needs_seqio
@pytest.mark.parametrize("name", ["toy_text", "toy_both"])
def test_metrics_are_what_seqios_evaluator_finds(name, generate, toys, tmp_path):
    path = tmp_path / "out.jsonl"
    assert generate(f"--task={name}", f"--output_file={path}", "--score_targets")[0] == 0
    written = json.loads((tmp_path / "out.jsonl.metrics.json").read_text())
    assert written["not computed"] == ["not written: curve of toy_text, which is a Histogram"]
    for task in [task.name for task in seqio.get_subtasks(seqio.get_mixture_or_task(name))]:
        lines = [line for line in decoded(path.read_text()) if line.get("task", task) == task]
        assert len(lines) == len(PAIRS) and all(
            ("task" in line) == (name == "toy_both") for line in lines
        )
        rows = [
            line["prediction_tokens"] + [0] * (WIDTH - len(line["prediction_tokens"]))
            for line in lines
        ]

        def numbered(values):
            return list(enumerate(values))

        evaluator = seqio.Evaluator(
            task,
            seqio.EncDecFeatureConverter(pack=False),
            "test",
            sequence_length={"inputs": LENGTH, "targets": WIDTH},
            async_compute_metrics=False,
        )
        scores = {"scores": [line["aux"]["scores"] for line in lines]}
        result, _ = evaluator.evaluate(
            compute_metrics=True,
            predict_fn=lambda _: numbered(rows),
            predict_with_aux_fn=lambda _: (numbered(rows), scores),
            score_fn=lambda _: numbered([line["score"] for line in lines]),
        )
        plain = {
            key: getattr(value, "value", getattr(value, "textdata", value))
            for key, value in result.result()[task].items()
        }
        plain.pop("curve", None)
        assert written["metrics"][task] == pytest.approx(plain, abs=1e-5)
        assert plain.keys() == (
            {"words", "kinds", "likelihood", "certainty"}
            if task == "toy_text"
            else {"words", "kinds"}
        )


@needs_seqio
@pytest.mark.parametrize("how", [["--gamma=0"], ["--num_beams=3", "--num_return_sequences=2"]])
def test_an_interrupted_job_resumes(how, generate, toys, tmp_path, monkeypatch):
    whole, path = tmp_path / "whole", tmp_path / "out"
    flags = ("--task=toy_both", *how)
    assert generate(*flags, f"--output_file={whole}")[0] == 0
    add, numbers = resumable_output.Journal.add, []

    def interrupted(self, number, lines, *notes):
        if len(numbers) == 9:
            raise KeyboardInterrupt
        numbers.append(number)
        add(self, number, lines, *notes)

    monkeypatch.setattr(resumable_output.Journal, "add", interrupted)
    assert generate(*flags, f"--output_file={path}")[0] == 130 and not path.exists()
    monkeypatch.setattr(
        resumable_output.Journal, "add", lambda *args: (numbers.append(args[1]), add(*args))
    )
    code, _, err = generate(*flags, f"--output_file={path}")
    assert code == 0 and "out.partial: 9 of 14 sentences are there" in err
    assert sorted(numbers) == list(range(14))
    for suffix in ("", ".metrics.json"):
        assert (
            pathlib.Path(f"{path}{suffix}").read_text()
            == pathlib.Path(f"{whole}{suffix}").read_text()
        )


@needs_seqio
def test_metrics_that_fail_leave_the_predictions(generate, toys, pair, tmp_path):
    def failing(targets, predictions):
        raise KeyError("no such word")

    tasks.tsv(
        {"test": toys["validation"]}, str(pair / "target"), metric_fns=[failing], name="toy_failing"
    )
    path = tmp_path / "out"
    code, _, err = generate("--task=toy_failing", f"--output_file={path}")
    assert (
        code == 2
        and "task: got 'toy_failing', whose metrics fail ('no such word')" in err.splitlines()[-1]
    )
    assert len(decoded(path.read_text())) == 2 and not (tmp_path / "out.partial").exists()


@needs_seqio
def test_metrics_of_other_kinds_are_named(toys, target):
    """An object of one's own is called; a metric of the network's inside is skipped with a line."""

    class Inside(seqio.metrics.Metric):
        pass

    class Longest(seqio.metrics.Metric):
        model_output_type = seqio.metrics.ModelOutputType.PREDICTION

        def from_model_output(self, inputs, model_output, features):
            result = types.SimpleNamespace()
            result.compute = lambda: {
                "longest": np.int32((model_output > 0).sum(axis=1).max()),
                "rows": len(inputs),
            }
            return result

    inside = Inside(model_output_type=seqio.metrics.ModelOutputType.SCORE_WITH_INTERMEDIATES)
    objects = [inside, Longest(model_output_type=seqio.metrics.ModelOutputType.PREDICTION)]
    task = seqio.TaskRegistry.get("toy_more").replace(metric_fns=[], metric_objs=objects)
    split = interop.TaskSplit((task,), "test")
    job = interop.Examples(split, target, input_length=LENGTH, output_length=WIDTH, batch_size=2)
    output = continuous_batching.Output("", [5, 6, 1], [-1.0, -2.0, -float("inf")], [], "eos", None)
    lines = [line for number in range(len(PAIRS)) for line in job.lines(number, [output])]
    assert (
        json.loads(lines[0])["aux"] == {"scores": None}
        and "score" not in lines[0].partition("aux")[0]
    )
    result, notes = job.evaluate(lines)
    assert result == {"toy_more": {"longest": 3, "rows": len(PAIRS)}}
    assert notes == ["not computed: a metric of toy_more that needs score_with_intermediates"]


@needs_seqio
def test_ids_that_stand_for_themselves_are_padded_as_t5xs(target):
    feature = seqio.Feature(seqio.PassThroughVocabulary(64, eos_id=1), add_eos=False)

    def data(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensors({"inputs": [5, 6], "targets": [7, 1]})

    source = seqio.FunctionDataSource(data, splits=["test"])
    task = seqio.Task("toy_ids", source, {"inputs": feature, "targets": feature})
    split = interop.TaskSplit((task,), "test")
    job = interop.Examples(split, target, input_length=LENGTH, output_length=4, batch_size=2)
    assert job.inputs == [[5, 6]] and job.examples[0].targets == [7, 1]
    (line,) = job.lines(
        0, [continuous_batching.Output(None, [9, 1], [-1.0, -0.5], [], "eos", None)]
    )
    expected = {
        "inputs": {},
        "prediction": [9, 1, 0, 0],
        "prediction_tokens": [9, 1],
        "aux": {"scores": -1.5},
    }
    assert json.loads(line) == expected


@needs_seqio
def test_an_example_without_output_is_null_and_to_metrics_empty(toys, target):
    """The decoding of one example met logits that are not finite numbers."""
    task = seqio.TaskRegistry.get("toy_more").replace(
        metric_fns=[seqio_jobs_of.words], metric_objs=[]
    )
    split = interop.TaskSplit((task,), "test")
    job = interop.Examples(split, target, input_length=LENGTH, output_length=WIDTH, batch_size=2)
    result = continuous_batching.Output("", [5, 6, 1], [-1.0, -2.0, -1.0], [], "eos", None)
    lost = continuous_batching.Output(
        None, [], [], [], "error", None, None, sd.NonFiniteLogitsError("the target toy", 1, 0)
    )
    lines = [
        line
        for number in range(len(PAIRS))
        for line in job.lines(number, [lost if number == 1 else result])
    ]
    record = json.loads(lines[1])
    assert (record["prediction"], record["prediction_tokens"], record["aux"]) == (
        None,
        [],
        {"scores": None},
    )
    assert record["error"].startswith(
        "got logits from the target toy"
    ) and "error" not in json.loads(lines[0])
    (several,) = job.lines(1, [result, lost])
    assert json.loads(several)["prediction"][0] is None and json.loads(several)["aux"][
        "scores"
    ] == [None, -4.0]
    values, notes = job.evaluate(lines)
    assert set(values["toy_more"]) == {"words", "kinds"}
    assert notes == ["no output, which metrics take for an empty one: 1 examples"]


@needs_seqio
def test_parts_of_a_task_join_into_what_one_run_gives(generate, toys, tmp_path):
    """Metrics need all lines: a part prints why there are none."""
    whole, parts = tmp_path / "whole", [tmp_path / "0", tmp_path / "1"]
    assert generate("--task=toy_text", f"--output_file={whole}")[0] == 0
    for number, part in enumerate(parts):
        code, _, error = generate("--task=toy_text", f"--shard={number}/2", f"--output_file={part}")
        assert code == 0 and f"--shard={number}/2: no metrics of a part" in error
        assert not part.with_name(f"{part.name}.metrics.json").exists()
    assert "".join(part.read_text() for part in parts) == whole.read_text()
    code, _, error = generate("--task=toy_text", "--shard=0/999", f"--output_file={whole}")
    assert code == 2 and "shard: got '0/999' of" in error


@pytest.fixture
def cached(toys, pair, tmp_path):
    """A task of its own; a folder has four of its preprocessed examples."""
    tasks.tsv(toys, str(pair / "target"), prefix="Tom ", name="toy_cached")
    write_cached("toy_cached", tmp_path / "cached", "test", 4)
    yield tmp_path / "cached"
    seqio.TaskRegistry.remove("toy_cached")
    seqio.set_global_cache_dirs([])


@needs_seqio
@pytest.mark.parametrize("where", ["here", "in a store"])
def test_preprocessed_data(where, generate, cached, tmp_path):
    """They are read in place of the task's own, here and from a store."""
    assert generate("--task=toy_cached", f"--output_file={tmp_path / 'own'}")[0] == 0
    folder = str(cached)
    if where == "in a store":
        folder = "memory://caches/of/tasks,memory://others"
        fsspec.filesystem("memory").put(str(cached), "memory://caches/of/tasks", recursive=True)
        shutil.rmtree(cached)
    argv = "--task=toy_cached", "--use_cached", f"--seqio_additional_cache_dirs={folder}"
    code, _, error = generate(*argv, f"--output_file={tmp_path / 'read'}")
    assert code == 0, error
    own = decoded((tmp_path / "own").read_text())
    assert decoded((tmp_path / "read").read_text()) == own[:4] and len(own) == len(PAIRS)
    code, _, error = generate(*argv, "--split=train")
    place = f"{folder.partition(',')[0]}/toy_cached"
    assert code == 2 and f"got 'train', of which {place} has no preprocessed data" in error


@needs_seqio
def test_preprocessed_data_that_are_not_there(generate, cached):
    def error_of(*argv):
        code, _, error = generate(*argv)
        assert code == 2
        return error

    ask = "--task=toy_cached", f"--seqio_additional_cache_dirs={cached}"
    assert "without use_cached, expected --use_cached" in error_of(*ask)
    assert "use_cached: got True without a task" in error_of("--use_cached", "Hello.")
    wrong = error_of(*ask, "--use_cached", "--split=validation")
    assert "no preprocessed data, expected one of test" in wrong
    (cached / "toy_cached" / "info.test.json").write_text("{")
    assert "data cannot be read" in error_of(*ask, "--use_cached")

    task = seqio.TaskRegistry.get("toy_cached")
    plain = [one for one in task.preprocessors if type(one) is not seqio.CacheDatasetPlaceholder]
    for name, steps, expected in (
        ("toy_plain", plain, "expected one with a seqio.CacheDatasetPlaceholder"),
        ("toy_lost", task.preprocessors, f"without preprocessed data (searched: {cached})"),
    ):
        seqio.TaskRegistry.add_provider(name, task.replace(name=name, preprocessors=steps))
        try:
            wrong = error_of(f"--task={name}", "--use_cached", *ask[1:])
        finally:
            seqio.TaskRegistry.remove(name)
        assert expected in wrong


@needs_seqio
def test_ids_0_of_targets_weigh_nothing():
    from specdec_jax.interop import seqio_jobs

    logits = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    targets = np.array([[3, 0, 2, 1], [0, 5, 1, 0]])
    dists = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(dists, targets[..., None], axis=-1)[..., 0]
    found = seqio_jobs._log_likelihood(logits, targets, np.array([4, 3]))
    np.testing.assert_allclose(found, [chosen[0, [0, 2, 3]].sum(), chosen[1, 1:3].sum()], rtol=1e-5)
