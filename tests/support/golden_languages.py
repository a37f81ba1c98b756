"""The tokenizers and lines that `scripts/write_golden_languages.py` wrote."""

import functools
import gzip
import json
import pathlib
import shutil

from golden_models import GOLDEN

from specdec_jax.models.bart import BartConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.tokenizers import huggingface_folders

FOLDER = GOLDEN / "hf_languages"
SHAPE = dict(emb_dim=16, num_heads=2, num_encoder_layers=1, num_decoder_layers=2, mlp_dim=24)


@functools.cache
def read_records():
    """Returns the contents of the records."""
    return json.loads(gzip.decompress((FOLDER / "records.json.gz").read_bytes()))


def copy_folder(name: str, path: pathlib.Path, **options):
    """Writes the folder of a case, with these options in tokenizer_config.json."""
    case = read_records()["cases"][name]
    shutil.copytree(FOLDER / case["folder"], path, dirs_exist_ok=True)
    for file, content in (
        ("config.json", {"model_type": case["model_type"]}),
        ("tokenizer_config.json", case["config"] | options),
    ):
        (path / file).write_text(json.dumps(content))
    return case


def open_vocabulary(name: str, path: pathlib.Path, **options):
    """Returns the vocabulary of a case, from a folder that is written to `path`."""
    copy_folder(name, path, **options)
    return huggingface_folders.open_folder(path, (0,))


def make_model(name: str, path: pathlib.Path, start_token: int = 2, seed: int = 0, **options):
    """Returns a small model with random weights and the vocabulary of a case."""
    vocabulary = open_vocabulary(name, path, **options)
    config = BartConfig(vocab_size=vocabulary.size, **SHAPE, num_positions=96)
    ids = dict(start_token=start_token, eos_ids=vocabulary.eos_ids, name=name)
    return LanguageModel.random(config, seed, vocabulary, **ids)
