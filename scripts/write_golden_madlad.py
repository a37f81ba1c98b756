"""Writes the model of tests/golden/hf_madlad: a tiny T5 in the form of MADLAD-400, by transformers.

Needs torch and transformers 5.24, since earlier versions of 5 leave such a file's embedding out;
the package itself needs neither. Run from the repository root:
`python scripts/write_golden_madlad.py`, after `write_golden_tokenizers.py`, which writes the
tokenizer beside it. The model is randomly initialised from a seed. Weights are stored in float16;
numbers are computed in float32.

MADLAD-400 is a T5 1.1 with SentencePiece's own special ids: unknown 0, which the decoder starts
with, padding 1, EOS 2. It has no sentinels, so there are as many logits as pieces. Its file has
the embedding as `decoder.embed_tokens.weight` and the head as `lm_head.weight`, no `shared.weight`.

`io.npz` has the arrays that `write_golden_bart.py` describes.
"""

import json
import pathlib
from typing import Any

import numpy as np
from write_golden_bart import LENGTH, TARGET, cut_rows

GOLDEN = pathlib.Path("tests/golden/hf_madlad")
VOCAB, UNKNOWN, PAD, EOS = 90, 0, 1, 2  # as many as spiece.model has pieces
OPTIONS = dict(
    vocab_size=VOCAB,
    d_model=16,
    d_kv=12,
    num_heads=2,
    d_ff=24,
    num_layers=2,
    feed_forward_proj="gated-gelu",
    dropout_rate=0.0,
    pad_token_id=PAD,
    eos_token_id=EOS,
    decoder_start_token_id=UNKNOWN,
)
TOKENIZER = {
    "tokenizer_class": "T5Tokenizer",
    "bos_token": "<s>",
    "pad_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "extra_ids": 0,
    "additional_special_tokens": [],
}
SEED = 11  # for which rows end in several ways, and padding comes out


def build_model() -> Any:
    """Returns a model with random weights that float16 can hold, and a head of its own."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**OPTIONS)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, OPTIONS["d_model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 1.0 if "layer_norm" in name else 0.0
            parameter.copy_((scale + 0.4 * torch.randn_like(parameter)).half().float())
    beams = dict(num_beams=4, no_repeat_ngram_size=2, max_new_tokens=TARGET)
    ids = {name: value for name, value in OPTIONS.items() if name.endswith("token_id")}
    model.generation_config = transformers.GenerationConfig(**ids, **beams)
    return model


def save_model(folder: pathlib.Path) -> None:
    """Writes the model's folder, with tensors named as the published files have them."""
    import safetensors.torch

    model = build_model()
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    state["decoder.embed_tokens.weight"] = state.pop("shared.weight")
    del state["encoder.embed_tokens.weight"]
    safetensors.torch.save_file(
        {name: tensor.clone() for name, tensor in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    options = model.config.to_dict() | {"tie_word_embeddings": False}
    options["architectures"] = ["T5ForConditionalGeneration"]
    for name in ("dtype", "scale_decoder_outputs"):  # which no published file has
        options.pop(name, None)
    (folder / "config.json").write_text(json.dumps(options, indent=1) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER, indent=1) + "\n")
    model.generation_config.save_pretrained(folder)


def load_model(folder: pathlib.Path) -> Any:
    """Returns the model that transformers reads, after a check that it reads every tensor."""
    import torch
    import transformers

    built = build_model()
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    return model.eval()


def write_numbers(folder: pathlib.Path) -> None:
    """Writes io.npz."""
    import torch
    import transformers

    model, rng = load_model(folder), np.random.default_rng(0)
    lengths = np.array([LENGTH, 4, 7, 2], np.int32)
    inputs = rng.integers(3, VOCAB, (4, LENGTH)).astype(np.int32)
    inputs[np.arange(4), lengths - 1] = EOS
    inputs[np.arange(LENGTH) >= lengths[:, None]] = PAD
    inputs[2, 1] = UNKNOWN  # the id that pads other models' inputs
    fed = rng.integers(0, VOCAB, (4, TARGET)).astype(np.int32)
    fed[:, 0] = UNKNOWN
    given = dict(
        input_ids=torch.tensor(inputs).long(),
        attention_mask=torch.tensor(np.arange(LENGTH) < lengths[:, None]).long(),
    )
    ids = {name: value for name, value in OPTIONS.items() if name.endswith("token_id")}
    plain = transformers.GenerationConfig(**ids, max_new_tokens=TARGET, no_repeat_ngram_size=2)
    defaults, model.generation_config = model.generation_config, transformers.GenerationConfig()
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=torch.tensor(fed).long()).logits.numpy()
        greedy, beams = (
            cut_rows(model.generate(**given, generation_config=config).numpy(), EOS)
            for config in (plain, defaults)
        )
    print(greedy.tolist(), beams.tolist(), sep="\n")
    np.savez_compressed(
        folder / "io.npz",
        inputs=inputs,
        input_lengths=lengths,
        decoder_tokens=fed,
        logits=logits.astype(np.float32),
        greedy=greedy,
        beams=beams,
    )


def main() -> None:
    """Writes the model's files beside spiece.model."""
    save_model(GOLDEN)
    write_numbers(GOLDEN)


if __name__ == "__main__":
    main()
