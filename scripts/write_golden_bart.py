"""Writes tests/golden/hf_bart/*: tiny BART-like models of every kind, from transformers.

Needs torch and transformers (5 or newer); the package itself needs neither. Run from the repository
root: `python scripts/write_golden_bart.py [tests/golden [marian …]]`; with names it writes only
those. Every model is randomly initialised from a seed. Weights are stored in float16, or in
PyTorch's own file, and numbers are computed in float32.

`marian_tokenizer.json` has the `pieces` of a vocab.json over hf_tokenizer/spiece.model, and texts
with the ids that MarianTokenizer gives an input, and the text of these ids.

Each model's `io.npz` holds, for B = 4 rows of which three are padded:
  inputs [B, L], input_lengths [B]: encoder ids.
  decoder_tokens [B, T], logits [B, T, V]: teacher-forced decoder inputs, start token first, and
    their logits.
  greedy [B, T], beams [B, T]: new tokens, −1 after the EOS: by argmax, without repeated pairs and,
    but for bart_untied, without padding; and by 4 beams with the defaults of the model's
    generation_config.json.
"""

import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

LENGTH, TARGET, VOCAB = 10, 14, 48
SIZES = dict(
    d_model=16,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    vocab_size=VOCAB,
    max_position_embeddings=32,
    dropout=0.0,
)
MODELS: dict[str, tuple[str, dict, dict, str]] = {
    # name: (class, configuration beyond SIZES, generation config, file of the weights)
    "bart": (
        "BartForConditionalGeneration",
        dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2),
        dict(forced_bos_token_id=0, forced_eos_token_id=2),
        "model.safetensors",
    ),
    "mbart": (
        "MBartForConditionalGeneration",
        dict(
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            activation_function="relu",
            scale_embedding=True,
            encoder_layers=1,
        ),
        dict(forced_bos_token_id=45, forced_eos_token_id=2),
        "model.safetensors",
    ),
    "marian": (
        "MarianMTModel",
        dict(
            pad_token_id=VOCAB - 1,
            eos_token_id=0,
            decoder_start_token_id=VOCAB - 1,
            activation_function="swish",
            scale_embedding=True,
            decoder_layers=1,
        ),
        dict(forced_eos_token_id=0, length_penalty=1.0),
        "pytorch_model.bin",
    ),
    "marian_separate": (
        "MarianMTModel",
        dict(
            pad_token_id=2,
            eos_token_id=0,
            decoder_start_token_id=2,
            activation_function="swish",
            scale_embedding=True,
            share_encoder_decoder_embeddings=False,
            decoder_vocab_size=VOCAB - 8,
        ),
        dict(forced_eos_token_id=0),
        "model.safetensors",
    ),
    "pegasus": (
        "PegasusForConditionalGeneration",
        dict(
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            activation_function="relu",
            scale_embedding=True,
        ),
        dict(forced_eos_token_id=1, length_penalty=0.8),
        "model.safetensors",
    ),
    "m2m_100": (
        "M2M100ForConditionalGeneration",
        dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, scale_embedding=True),
        dict(forced_bos_token_id=44, early_stopping=True),
        "pytorch_model.bin",
    ),
    # Another head than the embedding, and outputs that may have padding.
    "bart_untied": (
        "BartForConditionalGeneration",
        dict(
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=2,
            tie_word_embeddings=False,
        ),
        dict(bad_words_ids=None),
        "model.safetensors",
    ),
    # Outputs start with their language.
    "mbart_25": (
        "MBartForConditionalGeneration",
        dict(
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=45,
            activation_function="gelu",
            scale_embedding=True,
            decoder_layers=1,
        ),
        dict(forced_eos_token_id=2),
        "model.safetensors",
    ),
    # Tables of positions that are no sines.
    "pegasus_table": (
        "PegasusForConditionalGeneration",
        dict(
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            activation_function="relu",
            scale_embedding=True,
            encoder_layers=1,
        ),
        dict(forced_eos_token_id=1),
        "model.safetensors",
    ),
}
OTHER_TABLES = "pegasus_table"
SEEDS = dict(bart_untied=19)  # for which padding comes out; else the sum of a name's letters


def build_model(name: str) -> Any:
    """Returns the model `name` with random weights that float16 can hold."""
    import torch
    import transformers

    kind, options, generation, _ = MODELS[name]
    family = kind.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    torch.manual_seed(SEEDS.get(name, sum(map(ord, name))))
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            is_sines = kind.startswith(("Marian", "Pegasus")) and name != OTHER_TABLES
            if "embed_positions" in key and is_sines:
                continue
            scale = 1.0 if "norm" in key and key.endswith("weight") else 0.0
            # So that outputs depend on more than the last token, whose embedding is the head's.
            spread = 0.1 if "shared" in key or "embed_tokens" in key else 0.5
            tensor.copy_((scale + spread * torch.randn_like(tensor)).half().float())
        model.tie_weights()
        if not config.tie_word_embeddings:  # else no embedding is tied, nor the stacks' two
            for stack in (model.model.encoder, model.model.decoder):
                stack.embed_tokens.weight.copy_(model.model.shared.weight)
    pad = options["pad_token_id"]
    beams = dict(num_beams=4, no_repeat_ngram_size=2)
    defaults = dict(max_length=TARGET + 1, bad_words_ids=[[pad]]) | beams | generation
    ids = {key: value for key, value in options.items() if key.endswith("token_id")}
    model.generation_config = transformers.GenerationConfig(**defaults, **ids)
    return model


def save_model(model: Any, folder: pathlib.Path, file: str) -> None:
    """Writes the model's folder, with the weights in `file`."""
    import torch

    config = model.generation_config
    if file == "pytorch_model.bin":
        model.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        state = {name: tensor.half() for name, tensor in model.state_dict().items()}
        torch.save(state, folder / file)
    else:
        model.half().save_pretrained(folder)
        model.float()
    config.save_pretrained(folder)


def write_model(name: str, folder: pathlib.Path) -> None:
    """Writes one model's folder."""
    import torch
    import transformers

    options, file = MODELS[name][1], MODELS[name][3]
    folder.mkdir(parents=True, exist_ok=True)
    save_model(build_model(name), folder, file)
    model = type(build_model(name)).from_pretrained(folder, dtype=torch.float32).eval()
    rng, pad = np.random.default_rng(0), options["pad_token_id"]
    eos, start = options["eos_token_id"], options["decoder_start_token_id"]
    lengths = np.array([LENGTH, 4, 7, 2], np.int32)
    inputs = rng.integers(4, VOCAB - 5, (4, LENGTH)).astype(np.int32)
    inputs[np.arange(LENGTH) >= lengths[:, None]] = pad
    inputs[np.arange(4), lengths - 1] = eos
    outputs = options.get("decoder_vocab_size", VOCAB)
    forced = rng.integers(4, outputs - 5, (4, TARGET)).astype(np.int32)
    forced[:, 0] = start
    given = dict(
        input_ids=torch.tensor(inputs, dtype=torch.long),
        attention_mask=torch.tensor(np.arange(LENGTH) < lengths[:, None]).long(),
    )
    with torch.no_grad():
        fed = torch.tensor(forced, dtype=torch.long)
        logits = model(**given, decoder_input_ids=fed).logits.numpy()
        ids = {key: value for key, value in options.items() if key.endswith("token_id")}
        defaults = model.generation_config
        forbidden = defaults.bad_words_ids
        plain = transformers.GenerationConfig(
            **ids, max_new_tokens=TARGET, bad_words_ids=forbidden, no_repeat_ngram_size=2
        )
        model.generation_config = transformers.GenerationConfig()
        greedy = model.generate(**given, generation_config=plain)
        beams = model.generate(**given, generation_config=defaults)
    print(name, greedy.tolist(), beams.tolist(), sep="\n")
    np.savez_compressed(
        folder / "io.npz",
        inputs=inputs,
        input_lengths=lengths,
        decoder_tokens=forced,
        logits=logits.astype(np.float32),
        greedy=cut_rows(greedy.numpy(), eos),
        beams=cut_rows(beams.numpy(), eos),
    )


def cut_rows(tokens: np.ndarray, eos: int) -> np.ndarray:
    """Returns new tokens `[B, T]` without the start token, −1 after each row's EOS."""
    made = np.full((len(tokens), TARGET), -1, np.int32)
    for row, out in zip(tokens[:, 1:], made):
        ends = np.flatnonzero(row == eos)
        count = min(ends[0] + 1 if len(ends) else len(row), TARGET)
        out[:count] = row[:count]
    return made


def write_tokenizer(golden: pathlib.Path) -> None:
    """Writes marian_tokenizer.json."""
    import sentencepiece
    import transformers
    from write_golden_hf import TEXTS

    model = golden / "hf_tokenizer" / "spiece.model"
    source = sentencepiece.SentencePieceProcessor(str(model))
    known = [source.id_to_piece(i) for i in range(source.get_piece_size())]
    known = [piece for piece in known if piece not in ("</s>", "<unk>", "<pad>")]
    names = ["</s>", "<unk>", *known[1::2], *known[0:200:2], ">>deu<<", "<pad>"]
    pieces = {name: i for i, name in enumerate(names)}
    texts = [*TEXTS, ">>deu<< The river froze", ">>deu<<The ferry", "The >>deu<< ferry", ">>x<< a"]
    texts += ["a </s> b", "x<unk>y <pad>", ">>no end", "</s>>>deu<< The river"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "vocab.json").write_text(json.dumps(pieces))
        for file in ("source.spm", "target.spm"):
            shutil.copy(model, folder / file)
        tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
        records = []
        for text in texts:
            ids = tokenizer(text).input_ids
            shown = [i for i in ids if i not in (pieces["</s>"], pieces["<pad>"])]
            decoded = tokenizer.decode(shown, clean_up_tokenization_spaces=False)
            records.append({"text": text, "ids": ids, "decoded": decoded})
    content = json.dumps({"pieces": pieces, "records": records}, ensure_ascii=False)
    (golden / "hf_bart" / "marian_tokenizer.json").write_text(content, encoding="utf-8")


def main(folder: pathlib.Path, names: list[str]) -> None:
    """Writes the folders of all models, or of those that are named."""
    for name in names or MODELS:
        write_model(name, folder / "hf_bart" / name)
    if not names:
        write_tokenizer(folder)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden"), sys.argv[2:])
