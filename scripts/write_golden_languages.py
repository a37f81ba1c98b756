"""Writes tests/golden/hf_languages/*: tokenizers of BART-like models, beside transformers' ids.

Needs transformers 5.24, sentencepiece, protobuf and tokenizers; the package needs no transformers.
Run from the repository root: `python scripts/write_golden_languages.py`. The tokenizers are small
and trained on `make_lines`, 200 lines of sentences written for this file.

Each folder has the files that a model of its kind comes with. `records.json.gz` holds:
  lines: the 200 lines.
  cases: by name, what one tokenizer gives for them:
    folder: the folder of the files.
    config: what tokenizer_config.json says.
    model_type: what config.json says.
    source, target: the languages, or null.
    ids: for each line the encoder's input.
    decoded: for each line the text of these ids without special tokens and languages.
    target_ids: of outputs, where they have a vocabulary of their own, with `target_decoded`; else
      null.
"""

import gzip
import io
import itertools
import json
import pathlib
import shutil
import tempfile
from typing import Any

import sentencepiece
import tokenizers
import transformers
from transformers.models.nllb import tokenization_nllb as nllb

GOLDEN = pathlib.Path("tests/golden/hf_languages")
COUNT = 200
PEOPLE = ("My aunt", "Le boulanger", "Der Gärtner", "Nobody", "Our neighbour", "La voisine")
ACTIONS = (
    "painted the garden gate",
    "cherche ses clés dans l'entrée",
    "hat den Schlüssel verloren",
    "read three letters aloud",
    "répare un vieux vélo",
    "kocht heute Suppe für alle",
    "counted 17 sheep",
)
ENDS = (
    "before breakfast.",
    "depuis hier soir…",
    "und lachte laut!",
    "at 6:45, as always.",
    "(or so it seems)?",
    "– voilà «tout».",
)
# No tabs: SentencePiece's usual normalization, which these models lack, makes spaces of them.
ODD = (
    "",
    "UPPER lower MiXeD",
    "l'été, où ça ?",
    "Straße; Größe",
    "a-b_c/d@e.fr",
    "100,000.50 €",
    '"quoted" ‘single’',
    "ö",
    "…",
    "漢字 and ☃",
    "x²",
)


def make_lines() -> list[str]:
    """Returns 200 lines in three languages, some with signs that no piece has."""
    sentences = (" ".join(parts) for parts in itertools.product(PEOPLE, ACTIONS, ENDS))
    lines = [*ODD, *itertools.islice(sentences, 0, None, 2)]
    lines += [f"{one} {other}" for one, other in zip(lines[11:], reversed(lines))]
    return lines[:COUNT]


def train_model(lines: list[str], kind: str, size: int, **ids: int) -> bytes:
    """Returns a SentencePiece model of at most `size` pieces."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line and "漢" not in line]),
        model_writer=out,
        model_type=kind,
        vocab_size=size,
        minloglevel=2,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        **ids,
    )
    return out.getvalue()


def list_pieces(model: bytes) -> list[str]:
    """Returns the pieces of a SentencePiece model."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def write(folder: str, files: dict[str, Any]) -> None:
    """Writes the files of a folder: bytes, or the contents of JSON files."""
    path = GOLDEN / folder
    path.mkdir(parents=True)
    for name, content in files.items():
        if not isinstance(content, bytes):
            content = json.dumps(content, ensure_ascii=False).encode("utf-8")
        (path / name).write_bytes(content)


def write_folders(lines: list[str]) -> None:
    """Writes the tokenizers."""
    bpe, unigram = (train_model(lines, kind, 190) for kind in ("bpe", "unigram"))
    pieces = list_pieces(bpe)[3:]
    # Every ninth piece is unknown to the table.
    kept = [piece for i, piece in enumerate(pieces) if i % 9]
    table = {piece: i for i, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *kept])}
    write("m2m_100", {"vocab.json": table, "sentencepiece.bpe.model": bpe})
    write("fairseq", {"sentencepiece.bpe.model": unigram})
    write("nllb", {"sentencepiece.bpe.model": bpe})
    pegasus = train_model(lines, "unigram", 190, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    write("pegasus", {"spiece.model": pegasus})
    french, german = (train_model(part, "unigram", 120) for part in (lines[:110], lines[90:]))
    models = {"source.spm": french, "target.spm": german}
    sides = [list_pieces(model)[3:] for model in (french, german)]
    codes = [">>fra<<", ">>deu<<", ">>pt_br<<"]
    shared = ["</s>", "<unk>", *dict.fromkeys(sides[0] + sides[1]), *codes, "<pad>"]
    write("marian", models | {"vocab.json": {piece: i for i, piece in enumerate(shared)}})
    own = [
        {piece: i for i, piece in enumerate(["</s>", "<unk>", "<pad>", *side])} for side in sides
    ]
    write("marian_separate", models | {"vocab.json": own[0], "target_vocab.json": own[1]})
    bytes_ = tokenizers.ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    bytes_.train_from_iterator(lines, 330, min_frequency=2, special_tokens=special)
    (GOLDEN / "bart").mkdir()
    bytes_.save_model(str(GOLDEN / "bart"))


CASES: dict[str, tuple[str, str, dict, str | None, str | None]] = {
    # name: (folder, model_type, tokenizer_config.json, source, target)
    "m2m_100": ("m2m_100", "m2m_100", {"tokenizer_class": "M2M100Tokenizer"}, "fr", "de"),
    "wmt21": (
        "m2m_100",
        "m2m_100",
        {"tokenizer_class": "M2M100Tokenizer", "language_codes": "wmt21"},
        "ha",
        "de",
    ),
    "mbart": ("fairseq", "mbart", {"tokenizer_class": "MBartTokenizer"}, "fr_XX", "de_DE"),
    "mbart50": ("fairseq", "mbart", {"tokenizer_class": "MBart50Tokenizer"}, "fr_XX", "sl_SI"),
    "nllb": ("nllb", "m2m_100", {"tokenizer_class": "NllbTokenizer"}, "fra_Latn", "deu_Latn"),
    "nllb legacy": (
        "nllb",
        "m2m_100",
        {"tokenizer_class": "NllbTokenizer", "legacy_behaviour": True},
        "fra_Latn",
        "deu_Latn",
    ),
    "nllb tokenizer.json": (
        "nllb_fast",
        "m2m_100",
        {"tokenizer_class": "NllbTokenizer"},
        "eng_Latn",
        "zul_Latn",
    ),
    "pegasus": ("pegasus", "pegasus", {"tokenizer_class": "PegasusTokenizer"}, None, None),
    "bart": ("bart", "bart", {"tokenizer_class": "BartTokenizer"}, None, None),
    "marian": ("marian", "marian", {"tokenizer_class": "MarianTokenizer"}, None, "fra"),
    "marian separate": (
        "marian_separate",
        "marian",
        {"tokenizer_class": "MarianTokenizer", "separate_vocabs": True},
        None,
        None,
    ),
}


def open_tokenizer(name: str, folder: pathlib.Path) -> Any:
    """Returns transformers' tokenizer of a case, whose files it copies to `folder`."""
    source_folder, model_type, config, source, target = CASES[name]
    shutil.copytree(GOLDEN / source_folder, folder, dirs_exist_ok=True)
    contents = {"config.json": {"model_type": model_type}, "tokenizer_config.json": config}
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content))
    languages = {} if source is None else {"src_lang": source, "tgt_lang": target}
    return transformers.AutoTokenizer.from_pretrained(folder, **languages)


def frame_nllb(tokenizer: Any, lines: list[str], source: str, config: dict) -> list[list[int]]:
    """Returns the inputs of an NLLB whose folder has a SentencePiece model alone.

    transformers 5.24 then has `<unk>` for every language; NLLB's own ids follow the pieces.
    """
    count = len(list_pieces((GOLDEN / "nllb" / "sentencepiece.bpe.model").read_bytes()))
    code, eos = count + 1 + nllb.FAIRSEQ_LANGUAGE_CODES.index(source), tokenizer.eos_token_id
    rows = [tokenizer(line, add_special_tokens=False).input_ids for line in lines]
    if config.get("legacy_behaviour"):
        return [[*row, eos, code] for row in rows]
    return [[code, *row, eos] for row in rows]


def write_nllb_json(tokenizer: Any) -> None:
    """Writes NLLB's tokenizer.json, in which languages and `<mask>` follow the pieces."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    count = len(list_pieces((GOLDEN / "nllb" / "sentencepiece.bpe.model").read_bytes())) + 1
    assert max(i for piece, i in vocab.items() if piece != "<mask>") == count - 1
    vocab.pop("<mask>", None)
    plain = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokens = [*enumerate(names), *enumerate([*nllb.FAIRSEQ_LANGUAGE_CODES, "<mask>"], count)]
    content["added_tokens"] = [{"id": i, "content": token} | plain for i, token in tokens]
    content["post_processor"] = None
    write("nllb_fast", {"tokenizer.json": content})


def record_case(name: str, lines: list[str], folder: pathlib.Path) -> dict[str, Any]:
    """Returns what transformers gives for the lines."""
    source_folder, model_type, config, source, target = CASES[name]
    tokenizer = open_tokenizer(name, folder)
    print(name, type(tokenizer).__name__, len(tokenizer))
    code = f">>{target}<< " if name == "marian" else ""
    ids = [tokenizer(code + line).input_ids for line in lines]
    if source_folder == "nllb":
        ids = frame_nllb(tokenizer, lines, source, config)
    languages = set()
    if source is not None:
        languages = {i for i in ids[0] if i != tokenizer.eos_token_id}
    hidden = {tokenizer.eos_token_id, tokenizer.pad_token_id} | languages
    if name == "bart":
        hidden.add(tokenizer.bos_token_id)

    def decode(row: list[int]) -> str:
        shown = [i for i in row if i not in hidden]
        return tokenizer.decode(shown, clean_up_tokenization_spaces=False)

    case = dict(folder=source_folder, model_type=model_type, config=config)
    case |= dict(source=source, target=target, ids=ids, target_ids=None, target_decoded=None)
    if name == "marian separate":
        case["target_ids"] = [tokenizer(text_target=line).input_ids for line in lines]
        case["target_decoded"] = [decode(row) for row in case["target_ids"]]
        # Ids of inputs have no text: transformers decodes all of them as outputs.
        case["decoded"] = None
    else:
        case["decoded"] = [decode(row) for row in ids]
    return case


def main() -> None:
    """Writes the tokenizers and the cases."""
    transformers.logging.set_verbosity_error()
    shutil.rmtree(GOLDEN, ignore_errors=True)
    lines = make_lines()
    assert len(lines) == COUNT
    write_folders(lines)
    with tempfile.TemporaryDirectory() as temporary:
        write_nllb_json(open_tokenizer("nllb", pathlib.Path(temporary)))
    cases = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            cases[name] = record_case(name, lines, pathlib.Path(temporary))
    text = json.dumps({"lines": lines, "cases": cases}, ensure_ascii=False)
    data = gzip.compress(text.encode("utf-8"), mtime=0)
    (GOLDEN / "records.json.gz").write_bytes(data)


if __name__ == "__main__":
    main()
