"""Damages the files of BART-like tokenizers: tables, SentencePiece models, merges and settings.

The sound folders are those of `golden_languages.py`; their tokenizers are read without a model.
"""

import json
import pathlib
import shutil

import golden_languages
from hostile_cases import OTHERS, Case

EVERY = 12  # one in so many is in the first tier
ALL: dict[str, Case] = {}


def case(name, base, file, damage, names=None, read="tokenizer") -> None:
    """Adds a case, as `hostile_cases.case` does."""
    assert name not in ALL, name
    ALL[name] = Case(
        base, lambda folder: damage(folder / file), names or pathlib.Path(file).name, read
    )


# Each file, and what cannot lie in its place without making another tokenizer of the folder. Half
# of a table of merges is a smaller one, and so is a model that is cut between two pieces.
FILES = {
    ("marian", "vocab.json"): "links",
    ("marian", "source.spm"): "links",
    ("marian", "target.spm"): "links",
    ("marian separate", "target_vocab.json"): "",
    ("m2m_100", "vocab.json"): "links",
    ("m2m_100", "sentencepiece.bpe.model"): "links half",
    ("nllb", "sentencepiece.bpe.model"): "links half",
    ("mbart", "sentencepiece.bpe.model"): "links half",
    ("pegasus", "spiece.model"): "links",
    ("bart", "vocab.json"): "links",
    ("bart", "merges.txt"): "links empty half",
}
for (base, file), without in FILES.items():
    for kind, damage in OTHERS.items():
        if kind.split()[-1] not in without.split():
            case(f"{base}, {file}: {kind}", base, file, damage)


def edited(change):
    """Returns damage to a JSON file: a function of its contents gives the new ones."""

    def damage(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(change(content)), encoding="utf-8")

    return damage


def replaced(**pieces):
    return edited(lambda table: table | pieces)


def without(*pieces):
    return edited(lambda table: {name: i for name, i in table.items() if name not in pieces})


TABLES = {
    "a list": edited(lambda table: list(table)),
    "no pieces": edited(lambda table: {}),
    "a negative id": replaced(a=-1),
    "an id of 2**31": replaced(a=2**31),
    "a fraction as an id": replaced(a=1.5),
    "text as an id": replaced(a="1"),
    "true as an id": replaced(a=True),
    "no id": replaced(a=None),
    "no end": without("</s>"),
    "twice the same name": lambda path: path.write_text('{"</s>": 0, "<unk>": 1, "</s>": 2}'),
}
for base, file in (
    ("marian", "vocab.json"),
    ("marian separate", "target_vocab.json"),
    ("m2m_100", "vocab.json"),
):
    for kind, damage in TABLES.items():
        case(f"{base}, {file}: {kind}", base, file, damage)
for base, file in (
    ("marian", "source.spm"),
    ("marian", "target.spm"),
    ("m2m_100", "sentencepiece.bpe.model"),
    ("nllb", "sentencepiece.bpe.model"),
    ("mbart", "sentencepiece.bpe.model"),
    ("pegasus", "spiece.model"),
):
    for kind, damage in {
        "noise": lambda path: path.write_bytes(bytes(range(256)) * 40),
        "a length past the end": lambda path: path.write_bytes(b"\x0a\xff\xff\xff\xff\x07a"),
        "pieces of no text": lambda path: path.write_bytes(b"\x0a\x00" * 5000),
        "one byte less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "text": lambda path: path.write_text("not a model\n" * 100),
    }.items():
        case(f"{base}, {file}: {kind}", base, file, damage)
for base in ("nllb", "mbart"):
    case(
        f"{base}: the model of another class",
        base,
        "sentencepiece.bpe.model",
        lambda path: shutil.copy(golden_languages.FOLDER / "pegasus" / "spiece.model", path),
    )

MERGES = {
    "three parts": "#version: 0.2\na b c\n",
    "one part": "#version: 0.2\nab\n",
    "unknown pieces": "#version: 0.2\nqqq zzz\n",
    "a long line": "#version: 0.2\n" + "a" * 3_000_000 + " b\n",
    "bytes": b"#version: 0.2\n\xff\xfe \x80\n",
}
for kind, text in MERGES.items():
    content = text if isinstance(text, bytes) else text.encode()
    case(
        f"bart, merges.txt: {kind}",
        "bart",
        "merges.txt",
        lambda path, content=content: path.write_bytes(content),
    )
SETTINGS = {
    "a language as a number": ("m2m_100", dict(src_lang=5)),
    "an unknown language": ("m2m_100", dict(src_lang="xx")),
    "languages of no set": ("m2m_100", dict(language_codes="all")),
    "a list of languages": ("m2m_100", dict(language_codes=["en"])),
    "tables that are neither separate nor not": ("marian", dict(separate_vocabs="yes")),
    "an end of no text": ("marian", dict(eos_token=5)),
    "another offset": ("pegasus", dict(offset=5)),
    "an offset of text": ("pegasus", dict(offset="103")),
    "an added token with an id of another": (
        "m2m_100",
        dict(added_tokens_decoder={"5": {"content": "</s>"}}),
    ),
    "an added token of a huge id": (
        "m2m_100",
        dict(added_tokens_decoder={str(2**40): {"content": "<new>"}}),
    ),
    "an added token without text": ("nllb", dict(added_tokens_decoder={"5": {"content": 5}})),
    "added tokens in a list": ("nllb", dict(added_tokens_decoder=[5])),
    "a behaviour that is text": ("nllb", dict(legacy_behaviour="no")),
}
for kind, (base, options) in SETTINGS.items():
    case(
        f"{base}, tokenizer_config.json: {kind}",
        base,
        "tokenizer_config.json",
        edited(lambda content, options=options: content | options),
    )
QUICK = dict(list(ALL.items())[::EVERY])
