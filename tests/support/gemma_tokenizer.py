"""A tokenizer of Gemma's kind in miniature: pairs of characters, and bytes for what is none."""

import functools
import json
import pathlib
import random

import tokenizers

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
END = SPECIAL.index("<end_of_turn>")
# Gemma has tokens for runs of line breaks and spaces, and for marks of pages, that are not special.
RUNS = ("\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁", "<table>", "<unused0>")
_WORDS = (
    "the then there a and in of over river bridge Brücke Straße l'été été naïve 12 1999".split()
)
_ODD = [
    "🎈",
    "👩‍👩‍👧",
    "日本語",
    "תודה",
    "שלום",
    "e\u0301",
    "\u00a0",
    "\u200b",
    "�",
    "ﬁ",
    "\x7f",
    "𝒳",
]
_ODD += ["<end_of_turn>", "<table>", "<0x41>", "▁", "▁▁x", "\t", "\r\n", "\n", "\n\n", "\n\n\n\n"]
_SPACES = ("", " ", " ", " ", "  ", "   ", "     ")


def make_lines(count: int = 200, seed: int = 0) -> list[str]:
    """Returns lines of words, numbers, spaces, line breaks, and characters without a piece."""
    rng, lines = random.Random(seed), ["", " ", "  ", "\n", "a", " a", "a ", "  a  b   "]
    while len(lines) < count:
        parts = [
            rng.choice(_ODD if rng.random() < 0.25 else _WORDS) for _ in range(rng.randint(1, 12))
        ]
        lines.append("".join(rng.choice(_SPACES) + part for part in parts) + rng.choice(_SPACES))
    return lines


@functools.cache
def make_tokenizer() -> tokenizers.Tokenizer:
    """Returns the tokenizer, whose pairs are those that are frequent in other lines."""
    space = tokenizers.pre_tokenizers.Split(" ", "merged_with_previous")
    model = tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = space
    plain = [line for line in make_lines(400, seed=1) if line.isascii() and "<" not in line]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    )
    tokenizer.train_from_iterator(plain, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = []  # bytes are pieces like others
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    parts = ("Replace", ("▁", " ")), ("ByteFallback", ()), ("Fuse", ())
    decoders = [getattr(tokenizers.decoders, name)(*given) for name, given in parts]
    tokenizer.decoder = tokenizers.decoders.Sequence(decoders)
    pair, special = "<bos> $A <bos> $B", [("<bos>", 2)]
    template = tokenizers.processors.TemplateProcessing("<bos> $A", pair, special)
    tokenizer.post_processor = template
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens([tokenizers.AddedToken(run, normalized=False) for run in RUNS])
    return tokenizer


def write_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    """Writes the files of the tokenizer to a folder, and returns it."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "GemmaTokenizer", "eos_token": "<eos>", "bos_token": "<bos>"}
    options |= {"pad_token": "<pad>", "unk_token": "<unk>", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return tokenizer
