"""Writes tests/golden/hf_choices.json and hf_embeddings.npz: how transformers loads odd folders.

Needs torch, transformers (5 or newer) and safetensors; the package itself needs neither torch nor
transformers. Run from the repository root: `python scripts/write_golden_loading.py [tests/golden]`.
The models are random, from a seed.

hf_choices.json: the files of weights in a folder -> the one that transformers loads.
hf_embeddings.npz: the tensors of a T5 1.1 (`tensor/NAME`), three embeddings (`embedding/NAME`) and
inputs; for every case `logits/NAMES`, where NAMES are the embeddings, joined by "+", that the file
holds beside the tensors; with "lm_head.weight" among them, config.json calls the head untied.
"""

import itertools
import json
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

SHAPE = dict(
    d_model=16,
    d_kv=8,
    num_heads=2,
    d_ff=24,
    num_layers=1,
    vocab_size=40,
    dropout_rate=0.0,
    feed_forward_proj="gated-gelu",
)
IDS = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
NAMES = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
HEAD, INDEX, WHOLE = "lm_head.weight", "model.safetensors.index.json", "model.safetensors"


def build_model(seed: int) -> Any:
    """Returns a T5 with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.T5Config(**SHAPE, **IDS)
    return transformers.T5ForConditionalGeneration(config).eval()


def load_model(folder: pathlib.Path) -> Any:
    """Returns the model that transformers makes of `folder`."""
    import transformers

    return transformers.T5ForConditionalGeneration.from_pretrained(folder).eval()


def find_choices() -> dict[str, str]:
    """Returns which of the files in a folder is loaded, for all sets of two and more of them."""
    import torch

    kinds = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
    choices = {}
    for number in (1, 2, 3, 4):
        for names in itertools.combinations(kinds, number):
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder)
                for name in names:
                    model = build_model(0)
                    with torch.no_grad():
                        model.encoder.final_layer_norm.weight.fill_(float(kinds.index(name)))
                    _save_beside(model, path, name)
                value = float(load_model(path).encoder.final_layer_norm.weight[0])
            choices["+".join(names)] = kinds[int(value)]
    return choices


def _save_beside(model: Any, path: pathlib.Path, name: str) -> None:
    """Adds the model's weights to a folder under `name`, and keeps the files that are there."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        one = pathlib.Path(folder)
        model.save_pretrained(one, max_shard_size="10KB" if name == INDEX else "1GB")
        if name.startswith("pytorch"):
            whole = name == "pytorch_model.bin"
            file = name if whole else "pytorch_model-00001-of-00001.bin"
            torch.save(model.state_dict(), path / file)
            if not whole:
                weights = dict.fromkeys(model.state_dict(), file)
                (path / name).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
            (one / WHOLE).unlink()
        for file in one.iterdir():
            file.replace(path / file.name)


def compute_embeddings() -> dict[str, np.ndarray]:
    """Returns the arrays of hf_embeddings.npz."""
    import torch
    from safetensors.torch import load_file, save_file

    rng = np.random.default_rng(0)
    inputs, decoder_tokens = rng.integers(2, 40, (2, 6)), rng.integers(2, 40, (2, 5))
    decoder_tokens[:, 0] = 0
    fed = inputs, decoder_tokens
    result = {"inputs": inputs.astype(np.int32), "decoder_tokens": decoder_tokens.astype(np.int32)}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        build_model(1).save_pretrained(path)
        config = json.loads((path / "config.json").read_text())
        del config["scale_decoder_outputs"]  # else it decides, and not whether the head is tied
        torch.manual_seed(2)
        tables = {name: torch.randn(40, 16) for name in (*NAMES, HEAD)}
        tensors = {name: x for name, x in load_file(path / WHOLE).items() if name not in tables}
        result |= {f"tensor/{name}": x.numpy() for name, x in tensors.items()}
        result |= {f"embedding/{name}": x.numpy() for name, x in tables.items()}
        subsets = [names for number in (1, 2, 3) for names in itertools.combinations(NAMES, number)]
        for names in [(*names, *head) for names in subsets for head in ((), (HEAD,))]:
            tied = {"tie_word_embeddings": HEAD not in names}
            (path / "config.json").write_text(json.dumps(config | tied))
            stored = tensors | {name: tables[name].clone() for name in names}
            save_file(stored, path / WHOLE, metadata={"format": "pt"})
            ids = dict(zip(("input_ids", "decoder_input_ids"), map(torch.tensor, fed)))
            with torch.no_grad():
                result["logits/" + "+".join(names)] = load_model(path)(**ids).logits.numpy()
    return result


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden")
    (root / "hf_choices.json").write_text(json.dumps(find_choices(), indent=1) + "\n")
    np.savez_compressed(root / "hf_embeddings.npz", **compute_embeddings())
    for written in ("hf_choices.json", "hf_embeddings.npz"):
        print(root / written, (root / written).stat().st_size)
