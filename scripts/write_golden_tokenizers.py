"""Writes tests/golden/hf_tokenizers.json: what transformers makes of small folders with a
tokenizer.

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
ADDED = {
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": False,
    "use_regex": True,
}


def template(*parts: str | tuple[str, int]) -> dict:
    """Returns a TemplateProcessing of texts ("A") and tokens with their ids."""
    special = {part[0]: part[1] for part in parts if isinstance(part, tuple)}
    single = [
        {"Sequence": {"id": part, "type_id": 0}}
        if isinstance(part, str)
        else {"SpecialToken": {"id": part[0], "type_id": 0}}
        for part in parts
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            token: {"id": token, "ids": [i], "tokens": [token]} for token, i in special.items()
        },
    }


def case(
    base: str, files: str, texts=TEXTS, kind: str = "t5", processor: dict | None = None, **options
) -> dict:
    """Returns a case without its records; `options` are those of tokenizer_config.json."""
    changes: dict = {"config.json": {"model_type": kind}, "tokenizer_config.json": options}
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
MERGES = "vocab.json merges.txt"
CODET5 = dict(tokenizer_class="RobertaTokenizer")
SENTINELS = [f"<extra_id_{i}>" for i in range(20)]
CASES = {
    "codet5": case(
        "hf_codet5",
        f"{MERGES} special_tokens_map.json added_tokens.json",
        (*TEXTS, *SPECIAL),
        **CODET5,
    ),
    "codet5 fast": case("hf_codet5", "tokenizer.json", (*TEXTS, *SPECIAL), **CODET5),
    "roberta processing": case("hf_codet5", "tokenizer.json", tokenizer_class=FAST),
    "bert processing": case(
        "hf_codet5",
        "tokenizer.json",
        processor={"type": "BertProcessing", "sep": SEP, "cls": BEGIN},
        tokenizer_class=FAST,
    ),
    "two before": case(
        "hf_codet5",
        "tokenizer.json",
        processor=template(BEGIN, ("<mask>", 4), "A", SEP),
        tokenizer_class=FAST,
    ),
    "sequence": case(
        "hf_codet5",
        "tokenizer.json",
        processor={"type": "Sequence", "processors": [BYTE_LEVEL, template(BEGIN, "A", SEP)]},
        tokenizer_class=FAST,
    ),
    "gpt2 template": case(
        "hf_gpt2",
        "tokenizer.json",
        kind="gpt2",
        processor=template(END, "A"),
        tokenizer_class="GPT2Tokenizer",
    ),
    "gpt2 merges": case("hf_gpt2", MERGES, kind="gpt2", tokenizer_class="GPT2Tokenizer"),
    "gpt2 merges with bos": case(
        "hf_gpt2", MERGES, kind="gpt2", tokenizer_class="GPT2Tokenizer", add_bos_token=True
    ),
    "gpt2 fast with bos": case(
        "hf_gpt2",
        "tokenizer.json",
        kind="gpt2",
        processor=BYTE_LEVEL,
        tokenizer_class="GPT2Tokenizer",
        add_bos_token=True,
    ),
    "gpt2 without class with bos": case(
        "hf_gpt2", "tokenizer.json", kind="gpt2", add_bos_token=True
    ),
    "gpt2 both": case(
        "hf_gpt2",
        "tokenizer.json",
        kind="gpt2",
        tokenizer_class="GPT2Tokenizer",
        add_bos_token=True,
        add_eos_token=True,
    ),
    "gpt2 no bos": case(
        "hf_gpt2",
        "tokenizer.json",
        kind="gpt2",
        processor=template(END, "A"),
        tokenizer_class="GPT2Tokenizer",
        add_bos_token=False,
    ),
    "t5 as gpt2": case("hf_gpt2", MERGES, tokenizer_class="GPT2Tokenizer"),
    "t5's class decides": case(
        "hf_tokenizer",
        "tokenizer.json",
        processor=template(("<unk>", 2), "A", ("</s>", 1)),
        tokenizer_class="T5TokenizerFast",
        extra_ids=20,
    ),
    "no processor": case(
        "hf_tokenizer", "tokenizer.json", processor={}, tokenizer_class=FAST, eos_token="</s>"
    ),
    "no processor of a t5": case(
        "hf_tokenizer", "tokenizer.json", processor={}, tokenizer_class="T5Tokenizer", extra_ids=20
    ),
    "spiece": case(
        "hf_tokenizer",
        "spiece.model",
        (*TEXTS, *SPECIAL),
        tokenizer_class="T5Tokenizer",
        extra_ids=20,
    ),
    "spiece with bos": case(
        "hf_tokenizer",
        "spiece.model",
        tokenizer_class="T5Tokenizer",
        extra_ids=20,
        add_bos_token=True,
    ),
    "t5 fast": case(
        "hf_tokenizer",
        "tokenizer.json",
        (*TEXTS, *SPECIAL),
        tokenizer_class="T5Tokenizer",
        extra_ids=20,
    ),
    "byt5": case("hf_tokenizer", "", (*TEXTS, *SPECIAL), tokenizer_class="ByT5Tokenizer"),
    "control pieces": case(
        "hf_control",
        "spiece.model",
        (*TEXTS, *SPECIAL),
        tokenizer_class="T5Tokenizer",
        extra_ids=2,
        added_tokens_decoder={
            str(i): {"content": token} | ADDED
            for i, token in enumerate(["<pad>", "</s>", "<unk>", "<s>"])
        },
    ),
    "written spiece": case(
        "hf_tokenizer",
        "spiece.model",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_ids=20,
        additional_special_tokens=SENTINELS,
        tokenizer_class="T5Tokenizer",
    ),
    "written madlad": case(
        "hf_madlad",
        "spiece.model",
        eos_token="</s>",
        pad_token="</s>",
        unk_token="<unk>",
        extra_ids=0,
        additional_special_tokens=[],
        tokenizer_class="T5Tokenizer",
    ),
    "written tokenizer.json": case(
        "hf_tokenizer",
        "tokenizer.json",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        tokenizer_class=FAST,
    ),
    "written gpt2": case(
        "hf_gpt2",
        "tokenizer.json",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        tokenizer_class=FAST,
    ),
    "written byt5": case(
        "hf_tokenizer",
        "",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_ids=20,
        additional_special_tokens=SENTINELS,
        tokenizer_class="ByT5Tokenizer",
    ),
}


def write_codet5(folder: pathlib.Path) -> None:
    """Writes a byte-level BPE in the layout of CodeT5: RoBERTa's special tokens first, sentinels
    behind, `<extra_id_0>` the last."""
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
    assert [fast.convert_tokens_to_ids(f"<extra_id_{i}>") for i in (0, 3)] == [
        len(vocab) + 3,
        len(vocab),
    ]
    fast.backend_tokenizer.save(str(folder / "tokenizer.json"))


def write_spiece(folder: pathlib.Path, **ids) -> None:
    """Writes a small SentencePiece model with these special ids."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
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


def build(described: dict, folder: pathlib.Path) -> None:
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
            build(described, pathlib.Path(folder))
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for record in described["records"]:
            record["ids"] = tokenizer(record["text"])["input_ids"]
            if name.startswith("codet5"):
                record["decoded"] = tokenizer.decode(record["ids"], skip_special_tokens=True)
        if name.startswith("written"):
            described["pad"] = tokenizer.pad_token_id
            described["padded"] = tokenizer(
                [record["text"] for record in described["records"][:2]], padding=True
            )["input_ids"]
        print(
            name, type(tokenizer).__name__, [record["ids"] for record in described["records"]][:3]
        )
    lines = [
        f" {json.dumps(name)}: {json.dumps(described, ensure_ascii=False)}"
        for name, described in CASES.items()
    ]
    (GOLDEN / "hf_tokenizers.json").write_text(
        "{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
