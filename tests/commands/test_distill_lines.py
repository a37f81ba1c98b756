"""What `specdec distill` says at its start and its end, and schedules that follow the steps."""

import json
import shlex

import numpy as np
import pytest
from toy_training import TINY, config_of

from specdec_jax.commands import distill, distill_lines
from specdec_jax.training import heads, run_folder
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.sequence_distillation import Job


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(steps=20), (1, 5)),
        (dict(steps=2000), (100, 500)),
        (dict(steps=1), (0, 0)),
        (dict(steps=20, warmup_steps=18), (18, 2)),
        (dict(steps=20, decay_steps=20), (0, 20)),
        (dict(steps=20, warmup_steps=0, decay_steps=0), (0, 0)),
    ],
)
def test_warm_up_and_decay_follow_the_steps(given, expected):
    """`train`, `distill` and `train_heads` follow a number of steps set after gin."""
    files = dict(train_files=("a",), validation_files=("b",), output_dir="c")
    config = TrainConfig(model=TINY, vocabulary_size=64, **files, **given)
    assert (config.warmup_steps, config.decay_steps) == expected
    stage = distill.DistillConfig(target="x", output_dir="y", **given).train_config(
        TINY, 64, ["outputs-train", "outputs-validation"]
    )
    assert (stage.warmup_steps, stage.decay_steps) == expected
    made = heads.HeadsTrainConfig(target="x", **files, **given)
    assert made.warmup_steps + made.decay_steps <= made.steps and made.warmup_steps == expected[0]
    assert "decay_steps" in given or made.decay_steps == min(
        made.steps // 2, made.steps - made.warmup_steps
    )


def test_given_parts_that_exceed_the_steps_are_rejected():
    with pytest.raises(
        ValueError, match="steps: got 3, expected at least warmup_steps . decay_steps = 6"
    ):
        config_of(".", ".", steps=3)


def test_the_start_prints_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr(distill_lines, "_measure_product_speed", lambda dtype: 1e6)
    sources = [[5, 6, 1], [7, 1]]
    jobs = [
        Job(tmp_path / f"outputs-{part}-greedy.tsv", sources, ["a", "b"], 0, 0)
        for part in ("train", "validation-1")
    ]
    training = config_of(
        tmp_path, tmp_path, steps=30, warmup_steps=0, decay_steps=0, evaluate_every=10
    )
    config = distill.DistillConfig(target="x", output_dir=str(tmp_path), max_new_tokens=8)
    needs, takes = distill_lines.describe_needs(config, training, TINY, jobs)
    size = distill_lines.parameter_count(TINY)
    assert needs.startswith(
        f"needs 4 outputs of the target, {size:,} parameters, each of at most 8 tokens; then 30 "
    )
    assert (
        f"steps of 256 tokens for a drafter of {size:,} parameters" in needs and " MB in " in needs
    )
    decoding, learning = 2 * size * 10, 2 * (4 * size * 30 * 256 + 2 * size * 3 * 5)
    seconds = [decoding / 1e6 / 0.2, learning / 1e6 / 0.5]
    shown = [distill_lines._format_duration(part) for part in (sum(seconds), *seconds)]
    assert takes.startswith(
        f"takes about {shown[0]} here (outputs {shown[1]}, training {shown[2]})"
    )
    # What an earlier run did is not needed again.
    jobs[0].path.touch()
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    needs, _ = distill_lines.describe_needs(config, training, TINY, jobs)
    assert needs.startswith("needs 2 outputs") and "then 10 steps" in needs


def test_the_speed_of_a_product_is_measured():
    assert 1e7 < distill_lines._measure_product_speed("float32") < 1e16
    assert [distill_lines._format_duration(seconds) for seconds in (0, 89, 600, 7200)] == [
        "1 s",
        "89 s",
        "10 min",
        "2.0 h",
    ]


def record(step, loss, acceptance, agreement):
    return dict(step=step, validation_loss=loss, acceptance=acceptance, agreement=agreement)


@pytest.mark.parametrize(
    "validations, select, expected",
    [
        (
            [(0, 2.0, 0.5, 0.6), (6, 1.0, 0.7, 0.8)],
            "loss",
            [
                "kept: step 6 of 6, the best by loss: acceptance 0.5000 -> 0.7000, agreement "
                "0.6000 -> 0.8000 (before -> "
                "after)"
            ],
        ),
        (
            [(0, 2.0, 0.5, 0.6), (6, 1.0, 0.7, 0.55), (9, 1.5, 0.6, 0.7)],
            "loss",
            [
                "kept: step 6 of 9, the best by loss: acceptance 0.5000 -> 0.7000, agreement "
                "0.6000 -> 0.5500 (before -> "
                "after)",
                "worse than it began: agreement fell by 0.0500; --select=agreement keeps the step "
                "that is best "
                "by it",
            ],
        ),
        (
            [(0, 1.0, 0.5, 0.6), (6, 2.0, 0.4, 0.7)],
            "loss",
            [
                "kept: the drafter as it was: by loss no step was better (acceptance 0.5000 -> "
                "0.5000, agreement "
                "0.6000 -> 0.6000)"
            ],
        ),
        (
            [(6, 2.0, 0.4, 0.7)],
            "acceptance",
            [
                "kept: step 6 of 6, the best by acceptance: acceptance 0.4000, agreement 0.7000 on "
                "the target's outputs "
                "for other sources"
            ],
        ),
        ([], "loss", ["kept: the newest parameters, since no validation loss was finite"]),
    ],
)
def test_the_end_prints_the_outcome(validations, select, expected, tmp_path):
    saved = run_folder.Checkpoints(tmp_path, select=select)
    for step, loss, *figures in validations:
        saved.keep_best(
            step,
            {"a": np.zeros(2, np.float32)},
            loss,
            **dict(zip(("acceptance", "agreement"), figures)),
        )
    lines = [json.dumps(record(*values)) for values in validations]
    (tmp_path / "log.jsonl").write_text(
        "".join(f"{line}\n" for line in [json.dumps({"step": 1, "loss": 3}), *lines])
    )
    config = distill.DistillConfig(
        target="a target",
        output_dir=str(tmp_path),
        select=select,
        greedy=False,
        samples=1,
        target_language="de",
    )
    *actual, command = distill_lines.describe_outcome(config)
    assert actual == expected
    argv = shlex.split(command.removeprefix("next: "))
    assert argv[:4] == [
        "specdec",
        "benchmark",
        "--target=a target",
        f"--drafter={tmp_path / 'model'}",
    ]
    assert "--target_language=de" in argv and "source_language" not in command
    run_folder.trim_log(tmp_path / "log.jsonl", 5)  # as a run does that resumes at step 5
    assert distill_lines.describe_outcome(config)[0] == expected[0].replace("6 of 9", "6 of 6")
    assert "--temperature=1" in argv and f"--input_file={tmp_path / 'validation.txt'}" in argv


def test_the_next_command_drafts_as_the_model_was_trained(tmp_path):
    run_folder.Checkpoints(tmp_path).keep_best(
        1, {"a": np.zeros(2, np.float32)}, 0.5, acceptance=0.5, agreement=0.5
    )
    (tmp_path / "log.jsonl").write_text("")
    config = distill.DistillConfig(target="a target", output_dir=str(tmp_path), masks=2)
    *_, command = distill_lines.describe_outcome(config)
    assert f"--drafter=parallel:{tmp_path / 'model'}" in shlex.split(command)
