"""Writes tests/golden/hf_gemma/*: tiny models of the Gemma family, from transformers.

Needs torch and transformers 5.24; the package itself needs neither. Run from the repository root:
`python scripts/write_golden_gemma.py [tests/golden [gemma2_capped …]]`; with names it writes only
those. Every model is randomly initialised from a seed. Weights are stored in float16; numbers are
computed in float32 with eager attention, since the others may leave the cap out.

Each model's `io.npz` holds, for B = 4 rows of which three are padded:
  inputs [B, L], input_lengths [B]: encoder ids, or prompts.
  decoder_tokens [B, T], logits [B, T, V]: teacher-forced decoder inputs, start token first, and
    their logits; for a decoder-only model any ids.
  greedy [B, N], beams [B, N]: new tokens, −1 after the EOS: by argmax without repeated pairs; and
    by 4 beams with the defaults of the model's generation_config.json.

transformers 5.4 to 5.24 let an encoder's query see one position more on each side than the window
of the authors' code and of earlier versions does: T5Gemmas here are given windows of one less.
"""

import pathlib
import sys
from typing import Any

import numpy as np

LENGTH, TARGET, VOCAB = 10, 14, 48
STACK = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=8,
    query_pre_attn_scalar=12,
    sliding_window=3,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=2.0,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=2,
)
NO_CAPS = dict(attn_logit_softcapping=None, final_logit_softcapping=None)
GEMMA_3 = dict(
    attn_logit_softcapping=None,
    rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1000.0, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=100.0),
    ),
)
IMAGES = dict(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    image_size=4,
    patch_size=2,
)
EOI = 5  # the id whose embedding is not scaled
MODELS: dict[str, tuple[str, dict, dict, dict]] = {
    # name: (class, configuration beyond STACK, the encoder's beyond that, generation config)
    "gemma2_capped": (
        "Gemma2ForCausalLM",
        dict(num_hidden_layers=3),
        {},
        dict(eos_token_id=[1, 7], length_penalty=0.8),
    ),
    "gemma2_plain": (
        "Gemma2ForCausalLM",
        NO_CAPS
        | dict(
            num_hidden_layers=3,
            num_key_value_heads=2,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
            tie_word_embeddings=False,
            eos_token_id=2,
        ),
        {},
        dict(early_stopping=True),
    ),
    "t5gemma_capped": (
        "T5GemmaForConditionalGeneration",
        {},
        dict(
            hidden_size=24,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=4,
        ),
        dict(eos_token_id=[1, 7]),
    ),
    "t5gemma_plain": (
        "T5GemmaForConditionalGeneration",
        NO_CAPS | dict(num_hidden_layers=3, num_key_value_heads=2, eos_token_id=2),
        dict(num_hidden_layers=1, num_key_value_heads=4),
        dict(length_penalty=0.5),
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        GEMMA_3 | dict(num_hidden_layers=3),
        {},
        dict(eos_token_id=[1, 7]),
    ),
    "t5gemma2": (
        "T5Gemma2ForConditionalGeneration",
        GEMMA_3 | dict(num_hidden_layers=3),
        dict(num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, sliding_window=5),
        dict(eos_token_id=[1, 7]),
    ),
    "gemma3_untied": (
        "Gemma3ForCausalLM",
        GEMMA_3 | dict(num_hidden_layers=3, num_key_value_heads=2, final_logit_softcapping=None),
        {},
        dict(eos_token_id=[1, 7]),
    ),
    "t5gemma2_untied": (
        "T5Gemma2ForConditionalGeneration",
        GEMMA_3 | dict(num_hidden_layers=3, final_logit_softcapping=None),
        dict(num_hidden_layers=2, intermediate_size=20, sliding_window=4),
        dict(eos_token_id=[1, 7]),
    ),
}
UNTIED = "gemma2_plain", "t5gemma_plain", "gemma3_untied", "t5gemma2_untied"
# For which ids of padding come out, and rows end in several ways.
SEEDS = dict(gemma2_capped=15, gemma2_plain=41, t5gemma_capped=3, t5gemma_plain=3)
SEEDS |= dict(gemma3_text=1, t5gemma2=1, gemma3_untied=1, t5gemma2_untied=1)


def build_model(name: str) -> Any:
    """Returns the model `name` with random weights that float16 can hold."""
    import torch
    import transformers

    kind, options, encoder, generation = MODELS[name]
    decoder = STACK | options
    tied = dict(tie_word_embeddings=name not in UNTIED)
    config_class = getattr(transformers, kind).config_class
    if "rope_parameters" in decoder and "layer_types" not in decoder:
        decoder["layer_types"] = ["sliding_attention"] * 2 + ["full_attention"]
    if "T5Gemma2" in kind:
        ids = {key: decoder[key] for key in decoder if key.endswith("token_id")}
        text = decoder | encoder
        text["layer_types"] = ["sliding_attention", "full_attention"]
        parts = dict(text_config=text, vision_config=IMAGES, eoi_token_index=EOI)
        parts |= dict(image_token_index=VOCAB - 1, mm_tokens_per_image=4)
        config = config_class(
            encoder=parts, decoder=decoder, image_token_index=VOCAB - 1, **tied, **ids
        )
    elif "T5" in kind:
        ids = {key: decoder[key] for key in decoder if key.endswith("token_id")}
        config = config_class(encoder=decoder | encoder, decoder=decoder, **tied, **ids)
    else:
        config = config_class(**decoder | tied)
    config._attn_implementation = "eager"
    torch.manual_seed(SEEDS[name])
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            spread = 0.1 if "embed_tokens.weight" in key else 0.35
            tensor.copy_((spread * torch.randn_like(tensor)).half().float())
        model.tie_weights()
        if name == "t5gemma2_untied":  # or its stacks' embeddings would differ, too
            encoder_embedder = model.model.encoder.get_input_embeddings()
            for key, tensor in model.model.decoder.embed_tokens.state_dict().items():
                encoder_embedder.state_dict()[key].copy_(tensor)
    ids = dict(pad_token_id=0, bos_token_id=2, eos_token_id=decoder["eos_token_id"])
    beams = dict(num_beams=4, no_repeat_ngram_size=2, max_new_tokens=TARGET)
    model.generation_config = transformers.GenerationConfig(**ids | beams | generation)
    return model


def write_model(name: str, folder: pathlib.Path) -> None:
    """Writes one model's folder."""
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    built = build_model(name)
    defaults = built.generation_config
    built.half().save_pretrained(folder)
    kinds = dict(dtype=torch.float32, attn_implementation="eager")
    model = type(built).from_pretrained(folder, **kinds).eval()
    decoder_only = not model.config.is_encoder_decoder
    if name.startswith("t5gemma_"):
        model.model.encoder.config.sliding_window -= 1
    rng = np.random.default_rng(0)
    lengths = np.array([LENGTH, 4, 7, 2], np.int32)
    inputs = rng.integers(3, VOCAB, (4, LENGTH))
    inputs[np.arange(LENGTH) >= lengths[:, None]] = 0
    forced = rng.integers(0, VOCAB, (4, TARGET))
    forced[:, 0] = 2
    if decoder_only:  # each alone: of padded rows, pairs of padding count as repeated
        given = [dict(input_ids=torch.tensor(row[None, :n])) for row, n in zip(inputs, lengths)]
        fed = dict(input_ids=torch.tensor(forced))
    else:
        mask = torch.tensor(np.arange(LENGTH) < lengths[:, None]).long()
        given = [dict(input_ids=torch.tensor(inputs), attention_mask=mask)]
        ones = torch.ones(forced.shape).long()
        fed = given[0] | dict(decoder_input_ids=torch.tensor(forced), decoder_attention_mask=ones)
    eos = defaults.eos_token_id
    plain = transformers.GenerationConfig(
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=eos,
        max_new_tokens=TARGET,
        no_repeat_ngram_size=2,
    )
    with torch.no_grad():
        logits = model(**fed).logits.numpy()
        model.generation_config = transformers.GenerationConfig()
        greedy, beams = (
            [model.generate(**rows, generation_config=config).numpy() for rows in given]
            for config in (plain, defaults)
        )
    cuts = lengths if decoder_only else [1]
    ends = np.atleast_1d(eos)
    greedy, beams = (
        np.concatenate([cut_rows(made[:, cut:], ends) for made, cut in zip(parts, cuts)])
        for parts in (greedy, beams)
    )
    print(name, greedy.tolist(), beams.tolist(), sep="\n")
    np.savez_compressed(
        folder / "io.npz",
        inputs=inputs.astype(np.int32),
        input_lengths=lengths,
        decoder_tokens=forced.astype(np.int32),
        logits=logits.astype(np.float32),
        greedy=greedy,
        beams=beams,
    )


def cut_rows(tokens: np.ndarray, eos: np.ndarray) -> np.ndarray:
    """Returns new tokens `[B, N]`, −1 after each row's EOS."""
    made = np.full((len(tokens), TARGET), -1, np.int32)
    for row, out in zip(tokens, made):
        ends = np.flatnonzero(np.isin(row, eos))
        count = min(ends[0] + 1 if len(ends) else len(row), TARGET)
        out[:count] = row[:count]
    return made


def main(folder: pathlib.Path, names: list[str]) -> None:
    """Writes the folders of all models, or of those that are named."""
    for name in names or MODELS:
        write_model(name, folder / "hf_gemma" / name)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden"), sys.argv[2:])
