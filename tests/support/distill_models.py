"""Shared by the tests of distill and divergences."""

import functools

import jax
import numpy as np
import pytest
from toy_training import TINY, config_of

from specdec_jax.checkpoints import converter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import optimizer, train

SMALL = T5Config(64, 8, 2, 4, 1, 1, 16)


# Training: settings, the start, the choice of the best.


@pytest.fixture(scope="module")
def models(language, tmp_path_factory):
    """Makes a folder with a random `target`, a smaller `drafter`, and a `stranger`.

    The stranger has another vocabulary.
    """
    folder = tmp_path_factory.mktemp("models")
    texts = (language / "train.tsv").read_text().split("\n")
    vocabulary, other = (
        vocabularies.SentencePieceVocabulary.train(texts, size) for size in (40, 39)
    )
    for seed, (name, shape, pieces) in enumerate(
        [("target", TINY, vocabulary), ("drafter", SMALL, vocabulary), ("stranger", SMALL, other)]
    ):
        converter.save(LanguageModel.random(shape, seed, pieces), folder / name)
    return folder


@pytest.fixture(autouse=True)
def one_optimizer(monkeypatch):
    """Uses one optimiser object for all runs of a schedule, so that a step compiles once."""
    monkeypatch.setattr(train, "make_optimizer", _optimizer)


_make_optimizer = optimizer.make_optimizer


@functools.cache
def _schedule(*schedule):
    return _make_optimizer(config_of(".", ".", **dict(schedule)))


def _optimizer(config):
    names = ("steps", "warmup_steps", "decay_steps", "learning_rate")
    return _schedule(*((name, getattr(config, name)) for name in names))


def same(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
