"""Writes tests/golden/hf_eos.json: transformers' texts of outputs with several EOS ids.

Needs transformers (5 or newer) with sentencepiece, which the package does not. Run from the
repository root: `python scripts/write_golden_eos.py`. The tokenizer is that of
tests/golden/hf_tokenizer, whose vocabulary comes from synthetic sentences.

The file holds `eos_ids` (`</s>`, the full stop and a sentinel), and for each output its `ids`, up
to and with the first EOS id if there is one, and the `text` that `decode(ids,
skip_special_tokens=True)` gives.
"""

import functools
import json
import pathlib

GOLDEN = pathlib.Path("tests/golden")
TEXTS = [
    "The ferry stayed on the far bank.</s>",
    "The ferry stayed on the far bank. The river froze.",
    "The river froze, and the ferry stayed</s>",
    "She counted the lanterns<extra_id_0>",
    "Sie ging am Kanal entlang",
    ".",
    "</s>",
    "<extra_id_0>",
]


def main() -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(GOLDEN / "hf_tokenizer")
    encode = functools.partial(tokenizer, add_special_tokens=False)
    (stop,) = {encode(text).input_ids[-1] for text in ("bank.", "froze.")}
    eos_ids = [tokenizer.eos_token_id, stop, tokenizer.convert_tokens_to_ids("<extra_id_0>")]
    outputs = []
    for text in TEXTS:
        ids = encode(text).input_ids
        end = next((place + 1 for place, token in enumerate(ids) if token in eos_ids), len(ids))
        decoded = tokenizer.decode(ids[:end], skip_special_tokens=True)
        outputs.append({"ids": ids[:end], "text": decoded})
    content = {"transformers": transformers.__version__, "eos_ids": eos_ids, "outputs": outputs}
    text = json.dumps(content, ensure_ascii=False, indent=1)
    (GOLDEN / "hf_eos.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
