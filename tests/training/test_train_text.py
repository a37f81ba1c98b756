"""Tests training of decoder-only models: text blocks, losses, runs and commands."""

import dataclasses
import json
import os
import pathlib
import re
import signal

import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from announcements import without_course
from toy_models import compilations
from toy_training import (
    CONFIGS,
    ORDER,
    TINY,
    TINY_GPT,
    config_of,
    random_params,
    text_config,
    write_text,
)

import specdec_jax as sd
from specdec_jax.analysis import expectations, tuning, variants
from specdec_jax.commands import main, measure, tune
from specdec_jax.models import parameters
from specdec_jax.models.gpt import GPT_PRESETS
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import config as training_config
from specdec_jax.training import corpus, losses, optimizer, run_folder, train

pytestmark = pytest.mark.usefixtures("quick", "one_optimizer")


@pytest.fixture(scope="module")
def one_optimizer():
    """One object, so that a step compiles once; and Adam alone, which compiles quickly."""
    adam = optax.adam(3e-3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "make_optimizer", lambda config: adam)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory, one_optimizer):
    """An undisturbed run and its last parameters."""
    config = text_config(text, tmp_path_factory.mktemp("runs") / "target")
    return config, train.fit(config)


@pytest.fixture(scope="module")
def distilled(text, finished, one_optimizer):
    """A run that learns the distributions of that run's model."""
    folder = pathlib.Path(finished[0].output_dir)
    config = text_config(
        text,
        folder.parent / "drafter",
        model=dataclasses.replace(TINY_GPT, emb_dim=16, mlp_dim=32),
        teacher=str(folder / "model"),
        distill_weight=1.0,
        select="acceptance",
    )
    train.fit(config)
    return config


def records(config):
    lines = pathlib.Path(config.output_dir, "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def model_of(config):
    return sd.load(pathlib.Path(config.output_dir) / "model", "float32")


# Blocks.


def test_blocks_are_the_stream_of_documents_each_followed_by_eos(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n\n  de fg \n")
    (tmp_path / "b.txt").write_text("hijklmnop")
    vocabulary = vocabularies.ByteVocabulary(0)
    stream = [1] + [
        i for text in ("abc", "de fg", "hijklmnop") for i in [*vocabulary.encode(text), 1]
    ]
    batches = corpus.Text(6).batches(
        vocabulary, [tmp_path / "a.txt", tmp_path / "b.txt"], 300, 13, 0
    )
    assert batches.per_epoch == 2 and batches.pairs == 4 and batches.dropped == 0
    for epoch in range(2):
        result = [batches[2 * epoch + step] for step in range(2)]
        assert all(batch.inputs.shape == batch.targets.shape == (2, 6) for batch in result)
        rows = [
            row for batch in result for row in zip(batch.inputs.tolist(), batch.targets.tolist())
        ]
        for i in range(0, len(stream) - 1, 6):
            block = tuple(
                (part + [-1] * 6)[:6]
                for part in (stream[i : i + 6][: len(stream) - 1 - i], stream[i + 1 : i + 7])
            )
            rows.remove(block)
        assert not rows
    assert (
        corpus.Text(6).start_token(vocabulary) == 1
        and corpus.Text(6).summary(batches) == "4 blocks of 6 tokens"
    )


def test_a_vocabulary_learns_from_all_of_a_long_document(tmp_path):
    lines = ["word " * 450, "字" * 2100, "short"]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    parts = list(corpus.Text(6).texts([tmp_path / "a.txt"]))
    assert max(map(len, parts)) == 1000 and [len(part) for part in parts[-4:]] == [
        1000,
        1000,
        100,
        5,
    ]
    assert "".join(parts) == "".join(lines).replace("word " * 450, ("word " * 450).strip())
    assert all(part.strip().startswith("word") and part.endswith("word") for part in parts[:-4])


def test_loss_is_that_of_the_next_token():
    params, teacher = random_params(TINY_GPT), random_params(TINY_GPT, seed=1)
    rng = np.random.default_rng(0)
    stream = rng.integers(1, 40, (2, 9)).astype(np.int32)
    inputs, targets = stream[:, :-1], stream[:, 1:].copy()
    targets[1, 5:] = -1
    dist = jax.jit(
        lambda params: jax.nn.log_softmax(TINY_GPT.module().apply({"params": params}, inputs))
    )
    dists = [np.asarray(dist(p), np.float64) for p in (params, teacher)]
    expected, nll, overlap = 0.0, 0.0, 0.0
    for b, t in zip(*np.nonzero(targets >= 0)):
        log_q, log_p = (dist[b, t] for dist in dists)
        reference = np.full(40, 0.1 / 40)
        reference[targets[b, t]] += 0.9
        expected += 0.4 * -np.sum(reference * log_q) + 0.6 * np.sum(np.exp(log_p) * (log_p - log_q))
        nll -= log_q[targets[b, t]]
        overlap += np.minimum(np.exp(log_p), np.exp(log_q)).sum()
    objective = losses.Objective(TINY_GPT.module(), 0.1, TINY_GPT.module(), 0.6)

    def both(*given):
        return (losses.loss_fn(*given), losses.assess(*given)[1])

    (loss, metrics), likeness = jax.jit(both, static_argnums=2)(
        params, (inputs, targets), objective, teacher
    )
    assert metrics.tokens == 13
    np.testing.assert_allclose(
        [metrics.loss, metrics.nll, loss], [expected, nll, expected / 13], rtol=1e-5
    )
    np.testing.assert_allclose(likeness.acceptance, overlap, rtol=1e-5)


def test_dropout_depends_on_its_key():
    model = dataclasses.replace(TINY_GPT, dropout_rate=0.5).module()
    objective, batch = losses.Objective(model), (np.arange(6)[None], np.arange(1, 7)[None])
    loss = jax.jit(lambda params, key: losses.loss_fn(params, batch, objective, None, key)[0])
    params = random_params(TINY_GPT)
    dropped = [float(loss(params, jax.random.key(seed))) for seed in (0, 1, 0)]
    assert dropped[0] == dropped[2] != dropped[1]
    with pytest.raises(ValueError, match="GPTConfig.dropout_rate: got 1.0"):
        dataclasses.replace(TINY_GPT, dropout_rate=1.0)


# Runs.


@pytest.mark.slow
def test_the_loss_falls_to_what_the_text_leaves_open(finished):
    """Only the first word of a document is a matter of chance: log 7 of about 15 tokens."""
    log = records(finished[0])
    validation = [record["validation_loss"] for record in log if "validation_loss" in record]
    assert log[0]["loss"] > 1 and len(validation) == 2 and validation[-1] < 0.25


@pytest.mark.slow
def test_what_it_writes(finished, distilled):
    """A loaded target and drafter write mostly the text's own continuations."""
    target, drafter = model_of(finished[0]), sd.ModelDrafter(model_of(distilled))
    assert (target.start_token, target.eos_ids) == (1, (1,)) and target.config.num_positions == 40
    assert target.vocabulary.fingerprint() == drafter.model.vocabulary.fingerprint()
    prompts = ["fo", "ba ce di", "jem", *[""] * 12]
    sampling = sd.SamplingConfig(temperature=0.7, top_k=40)
    result = sd.generate(
        target,
        prompts,
        drafter=drafter,
        gamma=3,
        max_new_tokens=30,
        sampling=sampling,
        verifier="token",
    )
    assert result.finish_reasons == ["eos"] * 15 and result.stats.acceptance_rate > 0.8
    ends = [" ".join(ORDER[start:]) for start in range(len(ORDER))]
    texts = [f"{prompt} {text}".strip() for prompt, text in zip(prompts, result.texts)]
    assert sum(text.endswith(tuple(ends[:-1])) for text in texts) >= 11 and len(set(texts[3:])) > 1
    assert sum(text in ends for text in texts) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_run_that_was_stopped_ends_as_an_undisturbed_one(
    finished, tmp_path, monkeypatch, capsys, how
):
    reference, params = finished
    config = dataclasses.replace(reference, output_dir=str(tmp_path))
    with monkeypatch.context() as patch:
        if how == "killed":  # between two checkpoints: nothing is saved any more

            def die(reporter, step):
                if step == 70:
                    raise SystemExit

            patch.setattr(run_folder.Reporter, "advance", die)
        else:
            training = run_folder.Reporter.training
            patch.setattr(
                run_folder.Reporter,
                "training",
                lambda reporter, step, *rest, **more: (
                    training(reporter, step, *rest, **more),
                    step == 80 and signal.raise_signal(signal.SIGTERM),
                ),
            )
        with pytest.raises(SystemExit if how == "killed" else KeyboardInterrupt):
            train.fit(config)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == (
        ["50"] if how == "killed" else ["50", "80"]
    )
    again = train.fit(config)
    printed = capsys.readouterr().err
    assert (
        f"resumed at step {50 if how == 'killed' else 80} of 120" in printed
        and " blocks of 32 tokens" in printed
    )
    jax.tree.map(np.testing.assert_array_equal, again, params)

    def losses_of(config):
        return [(r["step"], r["loss"]) for r in records(config) if "tokens_per_second" in r]

    assert losses_of(config)[-2:] == losses_of(reference)[-2:]

    def values(config):
        return [r["validation_loss"] for r in records(config) if "validation_loss" in r]

    assert values(config) == values(reference)


@pytest.mark.slow
def test_a_drafter_learns_the_targets_distributions(finished, distilled):
    log = [record for record in records(distilled) if "acceptance" in record]
    assert log[-1]["acceptance"] > 0.8 and log[-1]["agreement"] > 0.8
    assert log[-1]["validation_loss"] < log[0]["validation_loss"]
    assert not pathlib.Path(distilled.output_dir, "encoder_fingerprint").exists()


# Commands.


def specdec(capsys, *argv):
    code = main.main(
        [
            *map(str, argv),
            *([] if argv[0] == "train" else ["--dtype=float32"]),
            "--compilation_cache_dir=",
        ]
    )
    out, err = capsys.readouterr()
    return code, out, without_course(err)


def test_train_and_generate(finished, text, tmp_path, capsys):
    """The files in `configs/train`, made tiny: only the model is written anew."""
    config, output = finished[0], tmp_path / "run"
    assert os.system(f"cp -r {config.output_dir} {output}") == 0
    names = {field.name for field in dataclasses.fields(training_config.TrainConfig)} - {
        "model",
        "output_dir",
        "data_dir",
    }
    flags = [f"--gin.TrainConfig.{name}={getattr(config, name)!r}" for name in names]
    flags += [
        f"--gin.GPTConfig.{name}={value!r}" for name, value in dataclasses.asdict(TINY_GPT).items()
    ]
    gin_file = f"--gin_file={CONFIGS / 'wikitext_target.gin'}"
    code, out, err = specdec(
        capsys,
        "train",
        gin_file,
        f"--gin.DATA_DIR='{text}'",
        f"--gin.OUTPUT_DIR='{output}'",
        *flags,
    )
    assert (code, out) == (0, "") and "resumed at step 120 of 120" in err and "wrote " in err
    code, out, err = specdec(
        capsys,
        "generate",
        f"--target={output / 'model'}",
        "--max_new_tokens=30",
        "fo",
        "",
        "ba ce di",
        "ce",
    )
    lines = out.splitlines()
    assert (
        (code, err) == (0, "")
        and lines[0] == lines[3][6:] == "gu hal jem kin"
        and lines[2] == lines[3][3:]
    )
    assert lines[1].endswith("jem kin")


PROMPTS = "fo\n\nba ce di\nce\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["measure", "benchmark"])
def test_a_pair_is_measured_with_the_top_40(finished, distilled, tmp_path, capsys, command):
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    models = [
        f"--{n}={pathlib.Path(c.output_dir) / 'model'}"
        for n, c in (("target", finished[0]), ("drafter", distilled))
    ]
    flags = ["--gamma_max=2"] if command == "measure" else ["--gamma=2"]
    code, out, err = specdec(
        capsys,
        command,
        *models,
        *flags,
        "--temperature=1",
        "--top_k=40",
        f"--input_file={tmp_path / 'prompts.txt'}",
        "--max_new_tokens=20",
        "--batch_size=4",
        "--repeats=1",
        "--json",
    )
    record = json.loads(out)
    assert (code, err) == (0, "") and record["sentences"] == 4 and record["options"]["top_k"] == 40
    if command == "measure":
        assert record["acceptance"]["how"] == "scored" and record["acceptance"]["alpha"] > 0.5


@pytest.mark.slow
def test_prompts_that_are_too_long_are_rejected_before_anything_compiles(
    finished, distilled, tmp_path, capsys
):
    target, drafter = model_of(finished[0]), sd.ModelDrafter(model_of(distilled))
    lines = ["fo"] * 200 + ["ba ce di fo gu"]  # in the last window of continuous batching
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n")
    expected = (
        r"inputs: got sequences of up to 45 tokens, new ones included, expected at most "
        r"num_positions = 40"
    )
    for module, options, work in (
        (expectations, measure.MeasureOptions(max_new_tokens=30), expectations.measure),
        (
            tuning,
            tune.TuneOptions(max_new_tokens=30),
            lambda workload: tuning.tune(workload, []),
        ),
    ):
        batches = variants.make_batches(target, lines, options)

        def call(work=work, batches=batches, options=options):
            with pytest.raises(ValueError, match=expected):
                work(variants.Workload(target, drafter, batches, options))

        assert compilations(call) == 0
    folder = pathlib.Path(finished[0].output_dir) / "model"
    argv = [
        "generate",
        f"--target={folder}",
        f"--input_file={tmp_path / 'prompts.txt'}",
        "--batch_size=2",
    ]
    code, out, err = specdec(capsys, *argv, "--max_new_tokens=30")
    assert (code, out) == (2, "") and re.search(expected, err) and err.count("\n") == 1


# Settings.


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(sequence_length=None),
            "sequence_length: got None, expected a number from 1 to the smaller of",
        ),
        (
            dict(sequence_length=41),
            "sequence_length: got 41, expected .*num_positions = 40 and batch_tokens = 256",
        ),
        (dict(sequence_length=0), "sequence_length: got 0"),
        (dict(batch_tokens=31), "sequence_length: got 32, expected .* batch_tokens = 31"),
        (dict(buckets=(8, 32)), r"buckets: got \(8, 32\), expected none beside sequence_length"),
        (dict(target_buckets=(8,)), "target_buckets: got"),
        (dict(model=TINY), "sequence_length: got 32, expected None: the model has an encoder"),
        (
            dict(vocabulary_size=41),
            "vocabulary_size: got 41, expected at most model.vocab_size = 40",
        ),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        text_config(".", ".", **settings)


@pytest.mark.parametrize(
    "contents, settings, message",
    [
        (b"\n  \n", {}, "train.txt: got no text, expected at least one line that is not empty"),
        (b"ba\n\xff\n", {}, "train.txt, line 2: got bytes that are not UTF-8"),
        (None, {}, "train_files: got '.*train.txt', expected a text file"),
        (b"ba ce\n", {}, "vocabulary_size: got 20, expected a number that fits"),
        (
            b"ba\n",
            dict(teacher="T5", distill_weight=1.0),
            "teacher: got a model with an encoder, expected a decoder-only model, like the model",
        ),
        (
            b"ba\n",
            dict(teacher="SHORT", distill_weight=1.0),
            "teacher: got '8 positions', expected at least sequence_length = 32",
        ),
        (
            b"ba\n",
            dict(initialise_from="SHORT"),
            "initialise_from: got GPTConfig.*, expected the shape",
        ),
    ],
)
def test_bad_files_and_models_are_rejected_before_anything_compiles(
    text, finished, tmp_path, monkeypatch, contents, settings, message
):
    for name in ("train.txt", "validation.txt"):
        (tmp_path / name).write_bytes((text / name).read_bytes())
    (tmp_path / "train.txt").unlink()
    if contents is not None:
        (tmp_path / "train.txt").write_bytes(contents)
    good = model_of(finished[0])
    wrong = {"T5": TINY, "SHORT": dataclasses.replace(TINY_GPT, num_positions=8)}
    for name in wrong.keys() & set(settings.values()):
        params = parameters.unflatten(
            {
                n: np.zeros(shape, "f")
                for n, shape in parameters.parameter_shapes(wrong[name]).items()
            }
        )
        sd.save(
            sd.LanguageModel(
                wrong[name], params, good.vocabulary, start_token=int(name == "SHORT")
            ),
            tmp_path / name,
        )
    settings = {
        name: str(tmp_path / value) if value in wrong else value for name, value in settings.items()
    }
    with pytest.raises(ValueError, match=message):
        monkeypatch.setattr(train, "train_step", None)
        monkeypatch.setattr(train, "_init", None)
        train.fit(text_config(tmp_path, tmp_path / "run", **settings))


def test_a_t5_has_no_decoder_only_teacher(language, finished, tmp_path):
    teacher = str(pathlib.Path(finished[0].output_dir) / "model")
    with pytest.raises(
        ValueError,
        match="teacher: got a decoder-only model, expected a model with an encoder, like the model",
    ):
        train.fit(config_of(language, tmp_path / "run", teacher=teacher, distill_weight=1.0))


@pytest.mark.parametrize(
    "pair, preset", [(("target", "drafter"), None), (("97m", "6m"), ("gpt/97m", "gpt/6m"))]
)
def test_configurations(pair, preset, tmp_path):
    counts = []
    for number, name in enumerate(pair):
        gin.clear_config()
        bindings = [f"{macro} = '{tmp_path}'" for macro in ("DATA_DIR", "OUTPUT_DIR", "TEACHER")]
        gin.parse_config_files_and_bindings([str(CONFIGS / f"wikitext_{name}.gin")], bindings)
        config = gin.get_configurable(training_config.TrainConfig)()
        gin.clear_config()
        assert (
            isinstance(config.corpus, corpus.Text)
            and config.paths("train_files")[0].parent == tmp_path / "wikitext2"
        )
        assert (config.teacher is None) == (number == 0)
        if preset:
            assert (
                dataclasses.replace(config.model, dropout_rate=0.0) == GPT_PRESETS[preset[number]]
            )
        counts.append(parameters.parameter_count(config.model))
    assert preset or counts[0] in range(8_000_000, 12_000_000)
    assert 8 * counts[1] <= counts[0]


def test_a_checkpoint_has_the_known_names():
    """Runs are resumed by later versions: the tree of a state must not change."""

    def init():
        return (
            lambda params: losses.TrainState(
                params,
                optimizer.make_optimizer(text_config(".", ".")).init(params),
                jnp.zeros((), jnp.int32),
            )
        )(random_params(TINY_GPT))

    names = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree.leaves_with_path(jax.eval_shape(init))
    }
    muon = "opt_state/1/inner_states/muon/inner_state"
    adam = "opt_state/1/inner_states/adam/inner_state"
    weight = "decoder/layers_0/causal_attention/qkv/kernel"
    assert {
        f"params/{weight}",
        f"{muon}/0/mu/{weight}",
        f"{adam}/0/mu/decoder/position_embedder/embedding",
    } <= names
    assert f"{adam}/0/mu/decoder/logits_dense/kernel" in names
