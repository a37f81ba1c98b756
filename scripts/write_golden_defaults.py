"""Writes tests/golden/hf_defaults.json: what transformers generates with a folder's own defaults.

Needs torch and transformers (5 or newer); the package itself needs neither. Run from the repository
root: `python scripts/write_golden_defaults.py [tests/golden]`, after `write_golden_hf.py`, whose
models and inputs are used.

Each case has the model, the fields that are added to its generation_config.json ("generation") or,
without that file, to its config.json ("config"), and `tokens`: for every input the new tokens, up
to the first EOS; with several outputs for each input, side by side. Where the fields sample, the
case has `scores` instead: the logits of the first new token after all processors, null where they
are −inf. Prompts of the GPT-2 are decoded one by one, since transformers counts padding as length.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np


def make_cases(greedy: dict[str, np.ndarray]) -> dict[str, tuple[str, str, dict]]:
    """Returns the cases, given the tokens that each model decodes by itself."""
    seen = {name: [int(token) for token in tokens[0]] for name, tokens in greedy.items()}
    t5, gpt = seen["hf_t5_1_1"], seen["hf_gpt2"]
    words = [[t5[1]], [1], t5[3:5], t5[4:7]]
    t5_cases = {
        "none": {"max_new_tokens": 16},
        "max_length": {"max_length": 7},
        "both maxima": {"max_length": 7, "max_new_tokens": 9},
        "n-grams": {"no_repeat_ngram_size": 2, "max_new_tokens": 16},
        "repetition": {"repetition_penalty": 1.7, "max_length": 13},
        "first": {"forced_bos_token_id": 7, "max_new_tokens": 8},
        "last": {"forced_eos_token_id": 1, "max_length": 9},
        "first and last": {
            "forced_bos_token_id": 9,
            "forced_eos_token_id": [95],
            "max_new_tokens": 6,
        },
        "suppressed": {"suppress_tokens": [t5[0], t5[2], 4000], "max_new_tokens": 12},
        "unusual values": {
            "forced_bos_token_id": [7],
            "suppress_tokens": [-1, 74],
            "max_length": 9.0,
        },
        "no end": {"eos_token_id": -1, "max_new_tokens": 9.0},
        "bad words": {"bad_words_ids": words, "max_new_tokens": 12},
        "min_length": {"min_length": 10, "max_length": 14, "suppress_tokens": t5[:1]},
        "min_new_tokens": {"min_new_tokens": 12, "min_length": 3, "max_new_tokens": 14},
        "too long a minimum": {"min_length": 40, "max_new_tokens": 6},
        "beams": {"num_beams": 3, "length_penalty": 2.0, "max_length": 12},
        "beams, early": {
            "num_beams": 4,
            "early_stopping": True,
            "max_length": 12,
            "num_return_sequences": 2,
        },
        "beams, processed": {
            "num_beams": 3,
            "no_repeat_ngram_size": 2,
            "min_length": 6,
            "bad_words_ids": words[2:],
            "max_length": 12,
            "repetition_penalty": 1.2,
            "early_stopping": "never",
            "length_penalty": 0.5,
        },
        "neutral": {
            "num_beams": 1,
            "length_penalty": 1.0,
            "repetition_penalty": 1.0,
            "no_repeat_ngram_size": 0,
            "min_length": 0,
            "bad_words_ids": None,
            "do_sample": False,
            "temperature": 0.3,
            "top_k": 5,
            "max_length": 9,
        },
        "everything": {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": words,
            "min_length": 5,
            "suppress_tokens": t5[6:8],
            "forced_bos_token_id": 12,
            "forced_eos_token_id": 95,
            "max_length": 11,
        },
        "sampling": {"do_sample": True, "max_new_tokens": 2},
        "sampling, filtered": {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.02,
            "max_new_tokens": 2,
            "repetition_penalty": 1.4,
            "suppress_tokens": t5[:1],
        },
    }
    gpt_cases = {
        "prompts": {
            "min_length": 16,
            "max_length": 20,
            "bad_words_ids": [gpt[1:3]],
            "repetition_penalty": 1.3,
        },
        "prompts, last": {"max_new_tokens": 6, "forced_eos_token_id": gpt[2]},
        "prompts, beams": {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 0.0},
    }
    task = {"num_beams": 4, "max_length": 3, "forced_bos_token_id": 5}
    old = {"no_repeat_ngram_size": 2, "min_length": 6, "max_length": 10}
    old["task_specific_params"] = {"summarization": task}
    made = {name: ("hf_t5_1_1", "generation", fields) for name, fields in t5_cases.items()}
    made["old config.json"] = ("hf_t5_1_1", "config", old)
    first = {"force_bos_token_to_be_generated": True, "bos_token_id": 7, "max_length": 9}
    made["old config.json, first"] = ("hf_t5_1_1", "config", first)
    return made | {name: ("hf_gpt2", "generation", fields) for name, fields in gpt_cases.items()}


def write_model(
    root: pathlib.Path, case: tuple[str, str, dict], folder: pathlib.Path
) -> pathlib.Path:
    """Copies the model of a case to `folder`, with its fields; returns `folder`."""
    name, file, fields = case
    shutil.copytree(root / name, folder)
    path = folder / "generation_config.json"
    if file == "config":
        path.unlink()
        path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def generate(root: pathlib.Path, case: tuple[str, str, dict]) -> dict:
    """Returns the "tokens" or "scores" of a case."""
    import torch
    import transformers

    kind = "T5ForConditionalGeneration" if case[0] != "hf_gpt2" else "GPT2LMHeadModel"
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_model(root, case, pathlib.Path(temporary) / "model")
        model = getattr(transformers, kind).from_pretrained(folder).eval()
    io = np.load(root / case[0] / "io.npz")
    ends, tokens = np.atleast_1d(model.generation_config.eos_token_id), []
    torch.manual_seed(0)
    for row, length in zip(io["inputs"], io["input_lengths"]):
        inputs = torch.tensor(row[None, :length]).long()
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            use_cache=False,
        )
        if case[2].get("do_sample"):
            scores = out.scores[0][0].tolist()
            tokens.append([score if np.isfinite(score) else None for score in scores])
            continue
        for one in out.sequences.numpy()[:, 1 if kind.startswith("T5") else length :].tolist():
            stop = next((place + 1 for place, token in enumerate(one) if token in ends), len(one))
            tokens.append(one[:stop])
    return {"scores" if case[2].get("do_sample") else "tokens": tokens}


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden")
    plain = {name: np.load(root / name / "io.npz")["greedy"] for name in ("hf_t5_1_1", "hf_gpt2")}
    lines = []
    for name, case in make_cases(plain).items():
        record = dict(zip(("model", "file", "fields"), case)) | generate(root, case)
        print(name, record.get("tokens"))
        lines.append(f"{json.dumps(name)}: {json.dumps(record)}")
    (root / "hf_defaults.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
