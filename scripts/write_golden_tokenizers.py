"""Writes tests/golden/hf_tokenizers.json: how transformers reads small folders with a tokenizer.

Needs transformers 5.24, sentencepiece, protobuf; the package needs no transformers. Run from the
repository root, after `write_golden_hf.py`: `python scripts/write_golden_tokenizers.py`. It also
writes the tokenizers hf_codet5 (CodeT5's layout) and hf_control and hf_madlad (SentencePiece models
with a piece `<s>`), trained on the sentences of `write_golden_hf.py`.

A case is a folder, described by:
  base: the folder of tests/golden whose files it has.
  files: the names of those files.
  changes: by name of a JSON file, the fields that differ from the base's; {} in the place of a file
    that the base does not have.
  records: texts, and the ids that `AutoTokenizer` gives for them; for CodeT5 also their text again,
    without special tokens.
  pad: id of the padding, padded: ids of the first two texts as a padded batch; only for the cases
    that begin with "written", which are what `specdec convert` writes.
"""

import io
import json
import pathlib
import shutil
import tempfile
from typing import Any

import sentencepiece
import transformers
from write_golden_hf import SENTENCES

GOLDEN = pathlib.Path("tests/golden")
TEXTS = ("The ferry stayed.", "", " Is there  bread?")
SPECIAL = (
    "a </s> b",
    "a</s>b",
    "The river </s> froze",
    "x <pad> y<unk>z",
    "<s> a <s>",
    "<extra_id_0> a<extra_id_1>",
    "</sx> <pad",
    "a <mask> b",
)
MORE_TEXTS = (*TEXTS, *SPECIAL)
MARKED = ("The <hl>ferry <hl> stayed.",)
ADDED = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)


def make_template(*parts: str | tuple[str, int]) -> dict:
    """Returns a TemplateProcessing of texts ("A") and tokens with their ids."""
    single = [
        {"Sequence": {"id": part, "type_id": 0}}
        if isinstance(part, str)
        else {"SpecialToken": {"id": part[0], "type_id": 0}}
        for part in parts
    ]
    pair = [{"Sequence": {"id": text, "type_id": i}} for i, text in enumerate("AB")]
    tokens = [part for part in parts if isinstance(part, tuple)]
    special = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in tokens}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": special,
    }


def make_case(
    base: str,
    files: str,
    texts: tuple[str, ...] = TEXTS,
    kind: str = "t5",
    processor: dict | None = None,
    others: dict | None = None,
    **options: Any,
) -> dict:
    """Returns a case without its records; `options` are those of tokenizer_config.json.

    `others` are changes of further files.
    """
    changes: dict = {"config.json": {"model_type": kind}, "tokenizer_config.json": options}
    changes |= others or {}
    if processor is not None:
        changes["tokenizer.json"] = {"post_processor": processor or None}
    return {
        "base": base,
        "files": files.split(),
        "changes": changes,
        "records": [{"text": text} for text in texts],
    }


FAST, END = "PreTrainedTokenizerFast", ("<|endoftext|>", 287)
BEGIN, SEP = ("<s>", 1), ("</s>", 2)
MERGES, JSON, SPIECE = "vocab.json merges.txt", "tokenizer.json", "spiece.model"
SENTINELS = [f"<extra_id_{i}>" for i in range(20)]
# Options of tokenizer_config.json.
CODET5 = {"tokenizer_class": "RobertaTokenizer"}
T5 = {"tokenizer_class": "T5Tokenizer", "extra_ids": 20}
GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
ANY = {"tokenizer_class": FAST}
NAMES = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
WRITTEN = NAMES | {"extra_ids": 20, "additional_special_tokens": SENTINELS}
CONTROL = {
    "tokenizer_class": "T5Tokenizer",
    "extra_ids": 2,
    "added_tokens_decoder": {
        str(i): {"content": token} | ADDED
        for i, token in enumerate(["<pad>", "</s>", "<unk>", "<s>"])
    },
}
MADLAD = NAMES | {"pad_token": "</s>", "extra_ids": 0, "additional_special_tokens": []}
BERT = {"type": "BertProcessing", "sep": SEP, "cls": BEGIN}
SEQUENCE = {"type": "Sequence", "processors": [BYTE_LEVEL, make_template(BEGIN, "A", SEP)]}
TWO_BEFORE = make_template(BEGIN, ("<mask>", 4), "A", SEP)
UNK_BEFORE = make_template(("<unk>", 2), "A", ("</s>", 1))
BOS, EOS = {"add_bos_token": True}, {"add_eos_token": True}


def make_gpt2_case(files: str, processor: dict | None = None, **options: Any) -> dict:
    """Returns a case with the files of the GPT-2."""
    return make_case("hf_gpt2", files, kind="gpt2", processor=processor, **options)


CASES = {
    "codet5": make_case(
        "hf_codet5", f"{MERGES} special_tokens_map.json added_tokens.json", MORE_TEXTS, **CODET5
    ),
    "codet5 fast": make_case("hf_codet5", JSON, MORE_TEXTS, **CODET5),
    "roberta processing": make_case("hf_codet5", JSON, **ANY),
    "bert processing": make_case("hf_codet5", JSON, processor=BERT, **ANY),
    "two before": make_case("hf_codet5", JSON, processor=TWO_BEFORE, **ANY),
    "sequence": make_case("hf_codet5", JSON, processor=SEQUENCE, **ANY),
    "gpt2 template": make_gpt2_case(JSON, make_template(END, "A"), **GPT2),
    "gpt2 merges": make_gpt2_case(MERGES, **GPT2),
    "gpt2 merges with bos": make_gpt2_case(MERGES, **GPT2, **BOS),
    "gpt2 fast with bos": make_gpt2_case(JSON, BYTE_LEVEL, **GPT2, **BOS),
    "gpt2 without class with bos": make_gpt2_case(JSON, **BOS),
    "gpt2 both": make_gpt2_case(JSON, **GPT2, **BOS, **EOS),
    "gpt2 no bos": make_gpt2_case(JSON, make_template(END, "A"), **GPT2, add_bos_token=False),
    "t5 as gpt2": make_case("hf_gpt2", MERGES, **GPT2),
    "t5's class decides": make_case(
        "hf_tokenizer", JSON, processor=UNK_BEFORE, tokenizer_class="T5TokenizerFast", extra_ids=20
    ),
    "no processor": make_case("hf_tokenizer", JSON, processor={}, **ANY, eos_token="</s>"),
    "no processor of a t5": make_case("hf_tokenizer", JSON, processor={}, **T5),
    "spiece": make_case("hf_tokenizer", SPIECE, MORE_TEXTS, **T5),
    "spiece with bos": make_case("hf_tokenizer", SPIECE, **T5, **BOS),
    "t5 fast": make_case("hf_tokenizer", JSON, MORE_TEXTS, **T5),
    "byt5": make_case("hf_tokenizer", "", MORE_TEXTS, tokenizer_class="ByT5Tokenizer"),
    "control pieces": make_case("hf_control", SPIECE, MORE_TEXTS, **CONTROL),
    "codet5 fast with a space": make_case("hf_codet5", JSON, **CODET5, add_prefix_space=True),
    "gpt2 fast with a space": make_gpt2_case(JSON, **GPT2, add_prefix_space=True),
    "gpt2 fast without a space": make_case(
        "hf_gpt2", JSON, kind="gpt2", others={JSON: {"pre_tokenizer": BYTE_LEVEL}}, **GPT2
    ),
    "gpt2 without class with a space": make_gpt2_case(JSON, add_prefix_space=True),
    "any class with a space": make_gpt2_case(JSON, **ANY, add_prefix_space=True),
    "json lacks a listed token": make_case(
        "hf_codet5", JSON, MARKED, **CODET5, additional_special_tokens=["<hl>"]
    ),
    "json lacks a token of added_tokens.json": make_case(
        "hf_codet5", JSON, MARKED, others={"added_tokens.json": {"<hl>": 296}}, **CODET5
    ),
    "json lacks a token of added_tokens_decoder": make_case(
        "hf_codet5",
        JSON,
        MARKED,
        **ANY,
        added_tokens_decoder={"296": {"content": "<hl>"} | ADDED | {"lstrip": True}},
    ),
    "map before config": make_case(
        "hf_codet5",
        MERGES,
        MARKED,
        others={"special_tokens_map.json": {"sep_token": "<hl>", "cls_token": "<mask>"}},
        **CODET5,
        sep_token="<pad>",
    ),
    "config without map": make_case(
        "hf_codet5",
        MERGES,
        MARKED,
        others={
            "special_tokens_map.json": {"sep_token": "<mask>"},
            "added_tokens.json": {"<hl>": 9},
        },
        **CODET5,
        added_tokens_decoder={"2": {"content": "</s>"} | ADDED},
    ),
    "json lacks a token with a name of its own": make_case(
        "hf_codet5",
        JSON,
        MARKED,
        others={"special_tokens_map.json": {"highlight_token": "<hl>"}},
        **CODET5,
    ),
    "json lacks eos": make_case("hf_gpt2", JSON, MARKED, "gpt2", **ANY, eos_token="<hl>"),
    "written spiece": make_case("hf_tokenizer", SPIECE, **WRITTEN, tokenizer_class="T5Tokenizer"),
    "written madlad": make_case("hf_madlad", SPIECE, **MADLAD, tokenizer_class="T5Tokenizer"),
    "written tokenizer.json": make_case("hf_tokenizer", JSON, **NAMES, **ANY),
    "written gpt2": make_case("hf_gpt2", JSON, eos_token=END[0], pad_token=END[0], **ANY),
    "written byt5": make_case("hf_tokenizer", "", **WRITTEN, tokenizer_class="ByT5Tokenizer"),
}


def write_codet5(folder: pathlib.Path) -> None:
    """Writes a byte-level BPE in the layout of CodeT5.

    RoBERTa's special tokens come first, sentinels last, and `<extra_id_0>` is the last of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    plain = json.loads((GOLDEN / "hf_gpt2" / "vocab.json").read_text(encoding="utf-8"))
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    pieces = [piece for piece in sorted(plain, key=plain.__getitem__) if piece != "<|endoftext|>"]
    vocab = {piece: i for i, piece in enumerate(special + pieces)}
    names = dict(bos=1, eos=2, unk=3, sep=2, pad=0, cls=1)
    tokens: dict = {f"{name}_token": {"content": special[i]} | ADDED for name, i in names.items()}
    tokens["mask_token"] = {"content": "<mask>"} | ADDED | {"lstrip": True}
    tokens["additional_special_tokens"] = [f"<extra_id_{i}>" for i in reversed(range(4))]
    contents = {
        "vocab.json": vocab,
        "special_tokens_map.json": tokens,
        "added_tokens.json": {f"<extra_id_{i}>": len(vocab) + 3 - i for i in range(4)},
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copy(GOLDEN / "hf_gpt2" / "merges.txt", folder)
    fast = transformers.RobertaTokenizer.from_pretrained(folder)
    first, last = (fast.convert_tokens_to_ids(f"<extra_id_{i}>") for i in (0, 3))
    assert (first, last) == (len(vocab) + 3, len(vocab))
    fast.backend_tokenizer.save(str(folder / "tokenizer.json"))


def write_spiece(folder: pathlib.Path, **ids: int) -> None:
    """Writes a small SentencePiece model with these special ids."""
    folder.mkdir(exist_ok=True)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES.strip().splitlines()),
        model_writer=out,
        vocab_size=90,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        **ids,
    )
    (folder / "spiece.model").write_bytes(out.getvalue())


def write_case(described: dict, folder: pathlib.Path) -> None:
    """Writes the folder of a case."""
    base = GOLDEN / described["base"]
    for name in described["files"]:
        shutil.copy(base / name, folder)
    for name, changes in described["changes"].items():
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | changes, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    """Writes the tokenizers and the cases."""
    transformers.logging.set_verbosity_error()
    write_codet5(GOLDEN / "hf_codet5")
    write_spiece(GOLDEN / "hf_control", pad_id=0, eos_id=1, unk_id=2, bos_id=3)
    write_spiece(GOLDEN / "hf_madlad")
    for name, described in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_case(described, pathlib.Path(folder))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for record in described["records"]:
            record["ids"] = tokenizer(record["text"])["input_ids"]
            if name.startswith("codet5"):
                record["decoded"] = tokenizer.decode(record["ids"], skip_special_tokens=True)
        if name.startswith("written"):
            described["pad"] = tokenizer.pad_token_id
            texts = [record["text"] for record in described["records"][:2]]
            described["padded"] = tokenizer(texts, padding=True)["input_ids"]
        first = [record["ids"] for record in described["records"][:3]]
        print(name, type(tokenizer).__name__, first)
    lines = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(described, ensure_ascii=False)}"
        for name, described in CASES.items()
    )
    path = GOLDEN / "hf_tokenizers.json"
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
