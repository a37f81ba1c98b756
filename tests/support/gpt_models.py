"""Tiny GPT-2 folders and models."""

import json

import safetensors.numpy
from golden_models import GOLDEN

FOLDER = GOLDEN / "hf_gpt2"


# Files.


def write_hf(folder, tensors=None, **options):
    """Writes the golden folder without its tokenizer, with other options or tensors."""
    folder.mkdir()
    content = json.loads((FOLDER / "config.json").read_text()) | options
    (folder / "config.json").write_text(json.dumps(content))
    if tensors is not None:
        safetensors.numpy.save_file(
            tensors, folder / "model.safetensors", metadata={"format": "pt"}
        )
    return folder


def tensors():
    return safetensors.numpy.load_file(FOLDER / "model.safetensors")
