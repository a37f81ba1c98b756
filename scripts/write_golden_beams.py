"""Writes tests/golden/hf_beams.npz: transformers' beam searches with the golden models beside it.

Needs torch and transformers (5 or newer). Run from the repository root: `python
scripts/write_golden_beams.py`.

For each model and each of its searches, by name: `NAME/SEARCH/tokens [B, K, T]` new tokens with
EOS, then −1, best hypothesis first; `…/scores [B, K]`; `…/sound [B]`, whether a search in float64
comes to the same tokens, so that no decision was a matter of rounding. `searches` is a JSON object:
their options, by name.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

GOLDEN = pathlib.Path("tests/golden")
STEPS = 12
MODELS = {
    "hf_t5_1_0": "T5ForConditionalGeneration",
    "hf_t5_1_1": "T5ForConditionalGeneration",
    "hf_gpt2": "GPT2LMHeadModel",
}
SEARCHES = {
    "beams4": dict(num_beams=4),
    "beams5": dict(num_beams=5, length_penalty=2.0),
    "never": dict(num_beams=4, early_stopping="never", length_penalty=0.5),
    "first": dict(num_beams=4, early_stopping=True),
    "short": dict(num_beams=4, length_penalty=-1.0, early_stopping="never"),
    "unpenalised": dict(num_beams=2, length_penalty=0.0, early_stopping="never"),
    "early": dict(num_beams=4, early_stopping=True, ends="early"),
    "early5": dict(num_beams=5, ends="early"),
    "repetition": dict(num_beams=4, repetition_penalty=1.5, ends="early"),
    "ngram": dict(num_beams=4, no_repeat_ngram_size=2, ends="early"),
    "least": dict(num_beams=4, min_new_tokens=8, ends="early"),
}


def search(
    model: Any, io: Mapping[str, np.ndarray], options: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens `[B, K, STEPS]`, −1 past the end, and scores `[B, K]`.

    Each row is decoded by itself, without padding.
    """
    import torch

    options, tokens, scores = dict(options), [], []
    early = options.pop("ends", None)
    ends = io["early_eos_id"] if early else model.generation_config.eos_token_id
    ends = np.ravel(ends).tolist()
    for row, length in zip(io["inputs"], io["input_lengths"]):
        given = torch.tensor(row[None, :length].astype(np.int64))
        out = model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=STEPS,
            eos_token_id=ends,
            pad_token_id=ends[0],
            num_return_sequences=options["num_beams"],
            return_dict_in_generate=True,
            output_scores=True,
            use_cache=False,
            **options,
        )
        before = 1 if model.config.is_encoder_decoder else int(length)
        new = out.sequences.numpy()[:, before:]
        ended = np.isin(new, ends)
        new = np.where(np.cumsum(ended, axis=1) - ended == 0, new, -1)
        tokens.append(np.pad(new, ((0, 0), (0, STEPS - new.shape[1])), constant_values=-1))
        scores.append(out.sequences_scores.numpy())
    return np.stack(tokens).astype(np.int16), np.stack(scores).astype(np.float32)


def main() -> None:
    import torch
    import transformers

    arrays = {"searches": np.array(json.dumps(SEARCHES))}
    for name, kind in MODELS.items():
        io, load = np.load(GOLDEN / name / "io.npz"), getattr(transformers, kind).from_pretrained
        models = load(GOLDEN / name).eval(), load(GOLDEN / name).eval().double()
        with torch.no_grad():
            for label, options in SEARCHES.items():
                (tokens, scores), (exact, _) = (search(model, io, options) for model in models)
                sound = (tokens == exact).all(axis=(1, 2))
                saved = {"tokens": tokens, "scores": scores, "sound": sound}
                arrays |= {f"{name}/{label}/{key}": array for key, array in saved.items()}
                ended = float((tokens == -1).any(axis=2).mean())
                print(name, label, "sound", sound.tolist(), "ended early", round(ended, 2))
    np.savez_compressed(GOLDEN / "hf_beams.npz", **arrays)


if __name__ == "__main__":
    main()
