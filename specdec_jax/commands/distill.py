"""Runs `specdec distill`: a drafter learns from its target.

It learns from the target's outputs (sequence level) and distributions (token level). Both happen in
one folder, and both resume after a kill: first the target's outputs are written, in files for a
fixed number of sources each, then `train.fit` learns from them.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

from specdec_jax.checkpoints import loader, native_format
from specdec_jax.commands import distill_lines
from specdec_jax.files import mirrors, reading
from specdec_jax.files.locks import lock_folder
from specdec_jax.files.places import AnyPath
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import digest, mismatch_error
from specdec_jax.files.writing import write_file
from specdec_jax.models.family import ModelConfig
from specdec_jax.tokenizers.vocabularies import Vocabulary
from specdec_jax.training import text_files, train
from specdec_jax.training.run_vocabulary import RunVocabulary, check_same
from specdec_jax.training.sequence_distillation import DistillConfig, plan_jobs, write_outputs

_RECORD = "distill.json"
# The settings that decide the outputs, besides the sources.
_DECIDING = (
    "target max_sources greedy samples temperature max_new_tokens batch_size shard_size seed dtype"
    " source_language target_language"
).split()
_CONTENTS = ("vocabulary's contents", "target's contents")


def run(config: DistillConfig, on_start: Callable[[], object] = lambda: None) -> dict:
    """Runs `specdec distill`.

    The target's outputs are written, then the drafter is trained on them and written to
    `output_dir/model`. Arguments, result and errors are those of `train.fit`; settings that
    contradict existing outputs are an error too.
    """
    config.check()
    assert config.target
    target = loader.load_shape(config.target)
    model = config.drafter_config(target)
    if not (target.shares_vocabulary and model.shares_vocabulary):
        got = f"{config.target} with separate vocabularies"
        raise mismatch_error("target", got, "one vocabulary for inputs and outputs")
    for name, shape in (("target", target), ("drafter", model)):
        positions, longest = shape.max_positions, config.buckets[-1]
        if positions is not None and positions < longest:
            raise mismatch_error(name, f"{positions} positions", f"at least {longest}, of buckets")
    if target.encoder_dim is not None or model.encoder_dim not in (None, target.encoded_dim):
        shared = target.encoder_dim is not None
        got = "no encoder" if shared else f"an encoder of width {target.encoded_dim}"
        expected = f"one of width {model.encoder_dim}" if model.encoder_dim else "one of its own"
        raise ValueError(f"target: got {config.target} with {got}, expected {expected}")
    vocabulary = _read_vocabulary(config, target.vocab_size)
    parts = {"train": _read_sources(config, config.paths("source_files"))}
    for number, path in enumerate(config.paths("validation_files"), 1):
        parts[f"validation-{number}"] = _read_sources(config, [path])
    with mirrors.open_folder(config.output_dir):
        return _run_stages(config, on_start, target, model, vocabulary, parts)


def _run_stages(
    config: DistillConfig,
    on_start: Callable[[], object],
    target: ModelConfig,
    model: ModelConfig,
    vocabulary: Vocabulary,
    parts: dict[str, list[str]],
) -> dict:
    """Writes the target's outputs for the sources of each part, and trains the drafter."""
    jobs = plan_jobs(config, vocabulary, target, parts)
    training = config.train_config(model, vocabulary.size, [job.path.name for job in jobs])
    read, kinds = sum(map(len, parts.values())), len(jobs) // len(parts)
    used = sum(len(job.texts) for job in jobs) // kinds
    print_line(
        f"{used} sources, {read - used} left out: empty, longer than"
        f" {config.limit_source_tokens(target)} tokens or with one that the target lacks"
    )
    for line in distill_lines.describe_needs(config, training, target, jobs):
        print_line(line)
    output = mirrors.find_folder(config.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    contents = {"vocabulary's contents": digest([native_format.vocabulary_contents(vocabulary)])}
    with lock_folder(output):
        _record(output / _RECORD, config, parts, contents)
        assert config.target
        target_model = loader.load(config.target, config.dtype)
        contents |= {"target's contents": digest([target_model.contents.encode()])}
        _record(output / _RECORD, config, parts, contents)
        if not all(job.path.exists() for job in jobs):
            on_start()
            write_outputs(config, target_model, jobs)
    params = train.fit(training, on_start)
    validation = [texts for part, texts in parts.items() if part != "train"]
    held_out = [text for texts in validation for text in texts if text.strip()]
    write_file(output / distill_lines.VALIDATION, "".join(f"{text}\n" for text in held_out))
    for line in distill_lines.describe_outcome(config):
        print_line(line)
    return params


def _read_vocabulary(config: DistillConfig, width: int) -> Vocabulary:
    """Returns the target's vocabulary.

    Raises ValueError for what `train.fit` would reject hours later.
    """
    assert config.target
    ids = RunVocabulary.from_checkpoint(config.target, "target")
    if config.drafter:
        check_same(
            "drafter", RunVocabulary.from_checkpoint(config.drafter, "drafter"), "the target", ids
        )
        got = loader.load_shape(config.drafter).vocab_size
        if got != width:
            raise mismatch_error("drafter", f"{got} logits", f"{width}, as many as the target's")
    return ids.vocabulary.with_languages(config.source_language, config.target_language)


def _read_sources(config: DistillConfig, paths: Iterable[AnyPath]) -> list[str]:
    sources = []
    for path in paths:
        lines = [line.partition("\t")[0] for line in text_files.read_lines(path)]
        count = min(config.max_sources or len(lines), len(lines))
        sources += [lines[i * len(lines) // count] for i in range(count)]
    return sources


def _record(
    path: pathlib.Path, config: DistillConfig, parts: dict[str, list[str]], contents: dict[str, str]
) -> None:
    """Writes the settings that decide the outputs to `path`.

    In a run that is resumed, they are compared with those that are there. `contents` are
    fingerprints of models and vocabulary, as far as they are known; one that is not there is not
    compared.
    """
    settings: dict[str, Any] = {name: getattr(config, name) for name in _DECIDING}
    settings["longest bucket"] = config.buckets[-1]
    for part, texts in parts.items():
        digests = hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
        settings[f"{part} sources"] = f"{len(texts)} lines, {digests[:16]}"
    before = contents | (reading.read_json(path) if path.exists() else settings)
    settings |= {name: before[name] for name in _CONTENTS if name in before} | contents
    for name in before | settings:
        got, expected = settings.get(name), before.get(name)
        if got != expected:
            raise mismatch_error(name, got, f"{expected}, as for the outputs in {path.parent}")
    write_file(path, json.dumps(settings, indent=1) + "\n")
