"""A tiny language, a tiny text, and settings, shared by the tests of training."""

import dataclasses
import pathlib

import numpy as np

from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.training import config as training_config

CONFIGS = pathlib.Path(__file__).parents[2] / "configs" / "train"
TINY = T5Config(64, 16, 2, 8, 1, 1, 32)
TINY_GPT = GPTConfig(40, 32, 2, 1, 64, num_positions=40, logits_via_embedding=False)
ORDER = "ba ce di fo gu hal jem kin".split()


def write_tsv(path, count, seed):
    """Writes sentences of one to three of 40 words, with reversed words as targets."""
    words = [a + b for a in "ba ce di fo gu hal jem kin".split() for b in "ra te ni so mu".split()]
    rng = np.random.default_rng(seed)
    rows = [
        [words[i] for i in rng.integers(len(words), size=rng.integers(1, 4))] for _ in range(count)
    ]
    path.write_text("".join(f"{' '.join(row)}\t{' '.join(reversed(row))}\n" for row in rows))


def write_language(folder):
    """Writes files for training and validation into `folder`, and returns it."""
    write_tsv(folder / "train.tsv", 400, 0)
    write_tsv(folder / "validation.tsv", 50, 1)
    write_tsv(folder / "more.tsv", 20, 2)
    return folder


def write_text(folder):
    """Writes documents that count on from one of eight words to the last; returns `folder`."""
    for name, count, seed in (("train.txt", 300, 0), ("validation.txt", 40, 1)):
        starts = np.random.default_rng(seed).integers(len(ORDER) - 1, size=count)
        (folder / name).write_text("".join(f"{' '.join(ORDER[start:])}\n" for start in starts))
    return folder


def text_config(folder, output, **settings):
    defaults = dict(
        model=TINY_GPT,
        train_files="train.txt",
        validation_files="validation.txt",
        output_dir=str(output),
        data_dir=str(folder),
        vocabulary_size=20,
        steps=120,
        warmup_steps=5,
        decay_steps=60,
        learning_rate=3e-2,
        label_smoothing=0.0,
        batch_tokens=256,
        sequence_length=32,
        log_every=20,
        save_every=50,
        evaluate_every=60,
    )
    return training_config.TrainConfig(**{**defaults, **settings})


def config_of(folder, output, **settings):
    defaults = dict(
        model=TINY,
        train_files=("train.tsv",),
        validation_files=("validation.tsv", "more.tsv"),
        output_dir=str(output),
        data_dir=str(folder),
        vocabulary_size=40,
        steps=12,
        warmup_steps=2,
        decay_steps=4,
        learning_rate=1e-2,
        batch_tokens=256,
        buckets=(16, 32),
        log_every=4,
        save_every=4,
        evaluate_every=6,
    )
    return training_config.TrainConfig(**{**defaults, **settings})


def random_params(config=TINY, seed=0):
    return LanguageModel.random(dataclasses.replace(config, dtype="float32"), seed).params
