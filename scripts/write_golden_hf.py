"""Writes tests/golden/hf_*: tiny T5-family models, a GPT-2 and tokenizers, from transformers.

Needs torch, transformers (5 or newer), sentencepiece, protobuf, safetensors; the package itself
needs neither torch nor transformers. Run from the repository root:
`python scripts/write_golden_hf.py [tests/golden [hf_gpt2 …]]`; with names it writes only those.
Every model is randomly initialised from a seed, so that nothing here derives from anybody's weights
or texts.

Each model's `io.npz` holds, for B = 4 rows of which two are padded:
  inputs [B, L], input_lengths [B]: encoder ids, 0 after the length.
  decoder_tokens [B, T], logits [B, T, V]: teacher-forced decoder inputs, start token first, and
    their logits.
  greedy [B, T], greedy_margin [B, T]: new tokens of a batched greedy decode, 0 after the EOS, and
    the difference between the two largest logits at each (infinite after the EOS).
  greedy_alone [B, T]: the same, with each row decoded alone without padding.
  early_eos_id [], greedy_early [B, T]: the same batch with another EOS id, one that occurs in the
    decodes above.

For the GPT-2, `inputs` are prompts of 1 to L ids, among them 0; `decoder_tokens` are whole
sequences that begin with the prompts; `greedy` is a left-padded batch, as in transformers;
`unconditional [T]` continues <|endoftext|> alone. After an EOS comes −1.
"""

import functools
import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import numpy as np

LENGTH, TARGET = 12, 16
SHAPE = dict(
    d_model=32, d_kv=12, num_heads=2, d_ff=48, num_layers=2, vocab_size=96, dropout_rate=0.0
)
MODELS = {
    # name: (class of model, configuration beyond SHAPE, separate head, shard size, ids of the
    # generation config, seed)
    "hf_t5_1_0": ("T5", dict(feed_forward_proj="relu"), False, "1GB", dict(), 14),
    "hf_t5_1_1": (
        "T5",
        dict(feed_forward_proj="gated-gelu", num_decoder_layers=3, tie_word_embeddings=False),
        True,
        "20KB",
        dict(eos_token_id=[1, 95]),
        2,
    ),
    "hf_mt5": (
        "MT5",
        dict(feed_forward_proj="gated-gelu", d_kv=16),
        True,
        "1GB",
        dict(decoder_start_token_id=2),
        4,
    ),
    "hf_umt5": (
        "UMT5",
        dict(feed_forward_proj="gated-gelu", num_decoder_layers=3),
        True,
        "1GB",
        dict(),
        0,
    ),
}

SENTENCES = """
The river froze early that year, and the ferry stayed on the far bank until March.
Der Fluss fror in jenem Jahr früh zu, und die Fähre blieb bis März am anderen Ufer.
She counted the lanterns twice and still came up one short.
Sie zählte die Laternen zweimal und trotzdem fehlte eine.
Nobody in the village could say when the clock had stopped.
Niemand im Dorf konnte sagen, wann die Uhr stehen geblieben war.
Please send the corrected drawings to the office before noon.
Bitte schicken Sie die berichtigten Zeichnungen vor dem Mittag ins Büro.
He keeps his tools in a wooden box under the stairs.
Er bewahrt sein Werkzeug in einer Holzkiste unter der Treppe auf.
The train was late again, so we walked along the canal instead.
Der Zug hatte wieder Verspätung, also gingen wir am Kanal entlang.
Seven of the twelve windows were open when the storm arrived.
Sieben der zwölf Fenster standen offen, als der Sturm kam.
They planted apple trees where the old factory used to be.
Sie pflanzten Apfelbäume dort, wo früher die alte Fabrik stand.
Is there enough bread left for everyone at the table?
Ist noch genug Brot für alle am Tisch da?
We measured the temperature of the water every ten minutes.
Wir haben alle zehn Minuten die Temperatur des Wassers gemessen.
"""

TEXTS = [
    "The ferry stayed on the far bank.",
    "Sie zählte die Laternen und ging am Kanal entlang.",
    "  two  spaces   and a tab\there ",
    "",
    " ",
    "Unknown signs: 漢字 ☃ and again ☃☃.",
    "full-width １２３ and a ligature ﬁnd",
    "The <extra_id_0> stayed on <extra_id_1> bank <extra_id_2>",
    "<extra_id_0> The river <extra_id_1> froze",
    "no space<extra_id_0>around<extra_id_19>it",
    "not a sentinel: <extra_id_20> <extra_id_> <extra_id_0",
    "<extra_id_0><extra_id_1> <extra_id_2>",
    "a line\nand another",
]


def build_model(name: str, seed: int) -> Any:
    """Returns the model `name` with random weights drawn from `seed`, ready to be saved."""
    import torch
    import transformers

    kind, extra, separate_head, _, ids, _ = MODELS[name]
    torch.manual_seed(seed)
    options = SHAPE | dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0) | extra
    config = getattr(transformers, f"{kind}Config")(**options)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        if separate_head:
            weight = 0.3 * torch.randn(config.vocab_size, config.d_model)
            model.lm_head.weight = torch.nn.Parameter(weight)
        else:  # with a tied head, a large embedding repeats its own token for ever
            model.shared.weight.mul_(0.05)
            model.decoder.final_layer_norm.weight.mul_(100.0)
        for parameter_name, parameter in model.named_parameters():
            # Scales are ones at initialisation, which would hide a forgotten one.
            if "layer_norm" in parameter_name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter_name.startswith("decoder.block"):
                parameter.mul_(2.0)  # so that the decodes depend on the position and the source
            if kind == "UMT5" and "relative_attention_bias" in parameter_name:
                parameter.mul_(5.0)  # so that a mix-up of two layers' tables shows
    for key, value in ids.items():
        setattr(model.generation_config, key, value)
    return _untie(model)


def _untie(model: Any) -> Any:
    """Returns the model as its kind is published.

    transformers 5 calls every T5 tied, and scales the inputs of umT5's head, for which transformers
    4 and T5X need a tied head.
    """
    if model.config.model_type == "umt5":
        model.config.tie_word_embeddings = False
    return model


def decode_greedily(
    model: Any, inputs: np.ndarray, mask: np.ndarray, eos_ids: int | list[int]
) -> np.ndarray:
    """Returns new tokens `[B, TARGET]`, 0 after the EOS."""
    import torch

    out = model.generate(
        input_ids=torch.tensor(inputs),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        num_beams=1,
        max_new_tokens=TARGET,
        eos_token_id=eos_ids,
        pad_token_id=0,
        use_cache=False,
    ).numpy()[:, 1:]
    return np.pad(out, ((0, 0), (0, TARGET - out.shape[1]))).astype(np.int32)


def compute(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Returns the arrays of io.npz."""
    import torch

    rng = np.random.default_rng(seed)
    vocab, start = model.config.vocab_size, model.generation_config.decoder_start_token_id
    eos_ids = model.generation_config.eos_token_id
    lengths = np.array([LENGTH, 5, 9, LENGTH], np.int32)
    mask = (np.arange(LENGTH) < lengths[:, None]).astype(np.int64)
    inputs = rng.integers(2, vocab, (4, LENGTH)) * mask

    decoder_tokens = rng.integers(2, vocab, (4, TARGET))
    decoder_tokens[:, 0] = start
    fed = dict(input_ids=torch.tensor(inputs), attention_mask=torch.tensor(mask))
    with torch.no_grad():
        tokens = decode_greedily(model, inputs, mask, eos_ids)
        alone = [
            decode_greedily(model, inputs[i : i + 1, :n], mask[i : i + 1, :n], eos_ids)
            for i, n in enumerate(lengths)
        ]
        forced = np.concatenate([np.full((4, 1), start), tokens[:, :-1]], axis=1)
        first, second = (
            model(**fed, decoder_input_ids=torch.tensor(given)).logits.numpy()
            for given in (forced, decoder_tokens)
        )
        top = np.sort(first, axis=-1)
        margins = np.where(tokens > 0, top[..., -1] - top[..., -2], np.inf)
        early = int(tokens[0, 6])
        return {
            "inputs": inputs.astype(np.int32),
            "input_lengths": lengths,
            "decoder_tokens": decoder_tokens.astype(np.int32),
            "logits": second,
            "greedy": tokens,
            "greedy_alone": np.concatenate(alone),
            "early_eos_id": np.int32(early),
            "greedy_early": decode_greedily(model, inputs, mask, early),
            "greedy_margin": margins.astype(np.float32),
        }


def write_model(name: str, folder: pathlib.Path) -> None:
    """Saves a model whose decodes have clear margins and more than one token.

    Its seed is the first such one, from the table's on.
    """
    import transformers

    kind, _, _, shard_size, _, first_seed = MODELS[name]
    for seed in range(first_seed, first_seed + 100):
        model = build_model(name, seed)
        io = compute(model, seed)
        ended = (io["greedy"] == 0).any(axis=1).sum()
        varied = min(len(set(row.tolist())) for row in io["greedy"])
        if io["greedy_margin"].min() > 0.01 and ended <= 3 and varied >= 3:
            break
    else:
        raise RuntimeError(f"{name}: no seed gave decodes with clear margins")
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    network = getattr(transformers, f"{kind}ForConditionalGeneration")
    saved = compute(_untie(network.from_pretrained(folder).eval()), seed)
    assert np.array_equal(saved["logits"], io["logits"]), f"{name}: the saved model differs"
    np.savez_compressed(folder / "io.npz", **io)
    margin, files = io["greedy_margin"].min(), sorted(path.name for path in folder.iterdir())
    print(name, "seed", seed, "margin", margin, "ended", ended, files)


def write_tokenizer(folder: pathlib.Path, extra_ids: int = 20) -> None:
    """Writes a SentencePiece model, transformers' tokenizer.json of it, and ids with EOS."""
    import io

    import sentencepiece
    import transformers

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES.strip().splitlines()),
        model_writer=out,
        vocab_size=200,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with tempfile.TemporaryDirectory() as source:
        (pathlib.Path(source) / "spiece.model").write_bytes(out.getvalue())
        tokenizer = transformers.T5Tokenizer.from_pretrained(source, extra_ids=extra_ids)
    tokenizer.save_pretrained(folder)
    (folder / "spiece.model").write_bytes(out.getvalue())
    byt5 = transformers.ByT5Tokenizer()
    records = [
        {"text": text, "ids": tokenizer(text)["input_ids"], "byt5_ids": byt5(text)["input_ids"]}
        for text in TEXTS + SENTENCES.strip().splitlines()
    ]
    for record in records:
        record["decoded"] = tokenizer.decode([i for i in record["ids"] if i > 1])
    content = {"extra_ids": extra_ids, "size": len(tokenizer), "records": records}
    _write_json(folder / "ids.json", content)
    print(folder.name, len(tokenizer), sorted((p.name, p.stat().st_size) for p in folder.iterdir()))


def _write_json(path: pathlib.Path, content: Any) -> None:
    text = json.dumps(content, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


GPT_TEXTS = [
    "The ferry stayed on the far bank.",
    " a leading space,  two spaces,\ttab\n\nand lines\r\n",
    "Sie zählte die Laternen; naïve café, 漢字 ☃ and 🦆🦆.",
    "don't, we'll, it's 1,234.5 km!",
    "",
    "before<|endoftext|>after <|endoftext|>",
]


def make_gpt_tokenizer() -> Any:
    """Returns a byte-level BPE with a few merges, whose last id is <|endoftext|>, as in GPT-2's."""
    import tokenizers
    import transformers

    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        SENTENCES.strip().splitlines(), vocab_size=287, special_tokens=[], show_progress=False
    )
    model = json.loads(bpe.to_str())["model"]
    vocab = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    return transformers.GPT2Tokenizer(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]])


def build_gpt(seed: int, size: int) -> Any:
    """Returns a GPT-2 with random weights drawn from `seed`."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=size,
        n_positions=40,
        n_embd=24,
        n_layer=2,
        n_head=3,
        bos_token_id=size - 1,
        eos_token_id=size - 1,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Zeros and ones at initialisation would hide forgotten parameters.
            if name.endswith("bias") or "ln_" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "wte" not in name:  # so that the decodes depend on positions and prompt
                parameter.mul_(12.0)
        model.transformer.ln_f.weight.mul_(50.0)
    return model


def compute_gpt(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Returns the arrays of io.npz."""
    import torch

    rng, size = np.random.default_rng(seed), model.config.vocab_size
    lengths = np.array([LENGTH, 1, 7, 4], np.int32)
    decoder_tokens = rng.integers(0, size - 1, (4, LENGTH))
    decoder_tokens[:, 0] = [0, 5, 0, 0]
    decoder_tokens[2, 3:7] = 0
    inside = np.arange(LENGTH) < lengths[:, None]
    inputs = np.where(inside, decoder_tokens, 0)

    def decode(tokens: np.ndarray, mask: np.ndarray, eos: int) -> np.ndarray:
        out = model.generate(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=TARGET,
            eos_token_id=eos,
            pad_token_id=eos,
            output_scores=True,
            return_dict_in_generate=True,
        )
        new = out.sequences.numpy()[:, tokens.shape[1] :]
        before = np.cumsum(new == eos, axis=1) - (new == eos)
        top = np.sort(np.stack([score.numpy() for score in out.scores], axis=1), axis=-1)
        margins.append((top[..., -1] - top[..., -2])[before == 0].min())
        new = np.where(before == 0, new, -1).astype(np.int32)
        return np.pad(new, ((0, 0), (0, TARGET - new.shape[1])), constant_values=-1)

    margins: list[float] = []
    left = np.stack([np.roll(row, LENGTH - length) for row, length in zip(inputs, lengths)])
    mask = inside[:, ::-1].astype(np.int64)
    with torch.no_grad():
        tokens = decode(left, mask, size - 1)
        alone = [
            decode(inputs[i : i + 1, :n], mask[i : i + 1, LENGTH - n :], size - 1)
            for i, n in enumerate(lengths)
        ]
        early = int(max(tokens[0, 6], 0))
        return {
            "inputs": inputs.astype(np.int32),
            "input_lengths": lengths,
            "decoder_tokens": decoder_tokens.astype(np.int32),
            "logits": model(input_ids=torch.tensor(decoder_tokens)).logits.numpy(),
            "greedy": tokens,
            "greedy_alone": np.concatenate(alone),
            "early_eos_id": np.int32(early),
            "greedy_early": decode(left, mask, early),
            "unconditional": decode(np.array([[size - 1]]), np.ones((1, 1), np.int64), size - 1)[0],
            "greedy_margin": np.float32(min(margins)),
        }


def write_gpt(folder: pathlib.Path) -> None:
    """Writes a GPT-2, its tokenizer in both forms, and the ids that this gives.

    The seed is the first whose decodes have clear margins and more than one token.
    """
    import transformers

    tokenizer = make_gpt_tokenizer()
    for seed in range(100):
        model = build_gpt(seed, len(tokenizer))
        io = compute_gpt(model, seed)
        varied = min(len(set(row.tolist())) for row in io["greedy"])
        clear = io["greedy_margin"] > 0.01 and (io["greedy_early"] < 0).any() and varied >= 5
        if clear and np.array_equal(io["greedy"], io["greedy_alone"]):
            break
    else:
        raise RuntimeError("hf_gpt2: no seed gave decodes with clear margins")
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    saved = compute_gpt(transformers.GPT2LMHeadModel.from_pretrained(folder).eval(), seed)
    assert np.array_equal(saved["logits"], io["logits"]), "hf_gpt2: the saved model differs"
    np.savez_compressed(folder / "io.npz", **io)
    tokenizer.save_pretrained(folder)
    files = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocab = json.dumps(files["vocab"], ensure_ascii=False)
    (folder / "vocab.json").write_text(vocab, encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *map(" ".join, files["merges"])])
    (folder / "merges.txt").write_text(merges + "\n", encoding="utf-8")
    records = [{"text": text, "ids": tokenizer(text)["input_ids"]} for text in GPT_TEXTS]
    _write_json(folder / "ids.json", records)
    print("hf_gpt2", "seed", seed, "margin", io["greedy_margin"], io["greedy"].tolist())


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden")
    writers = {model_name: functools.partial(write_model, model_name) for model_name in MODELS}
    writers |= {"hf_tokenizer": write_tokenizer, "hf_gpt2": write_gpt}
    for name in sys.argv[2:] or writers:
        writers[name](root / name)
