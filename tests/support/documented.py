"""Builds a folder in which the documented commands run, with the toy files that they name."""

import gzip
import pathlib
import shlex

import pages

import specdec_jax as sd
from specdec_jax.checkpoints import loader
from specdec_jax.models import families, gpt
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

T5 = sd.T5Config(6144, 16, 2, 8, 1, 3, 32)
GPT = gpt.GPTConfig(6144, 16, 2, 2, 32, num_positions=600)
# Models of the reader's own, whose folders end in "/" or that another documented command trains.
OWN_T5 = ("flan_t5_xxl", "flan_t5_small", "runs/summaries/model", "ul2-t5x/")
OWN_GPT = ("gpt2-xl/", "gpt2/", "runs/wikitext/target/model", "runs/wikitext/drafter/model")
TEXTS = (
    "test.txt",
    "ende_test.txt",
    "prompts.txt",
    "abstracts.txt",
    "ende/train.tsv.gz",
    "ende/test.tsv.gz",
)
SENTENCES = ["Tom is learning German.", "We leave before eight."]
# What a command adds so that it takes seconds; a flag that comes later counts.
SMALLER = {
    "demo": ["--max_new_tokens=4"],
    "generate": ["--max_new_tokens=4"],
    "benchmark": ["--max_new_tokens=4", "--repeats=1"],
    "measure": ["--max_new_tokens=4", "--limit=2"],
    "tune": ["--max_new_tokens=4", "--limit=2", "--repeats=1"],
    "distill": ["--buckets=64"],
    "train_heads": [
        f"--gin.HeadsTrainConfig.{name}={value}"
        for name, value in dict(
            steps=2, warmup_steps=0, decay_steps=1, batch_tokens=64, buckets=[64]
        ).items()
    ],
    "train_eagle": [
        f"--gin.EagleTrainConfig.{name}={value}"
        for name, value in dict(
            depth=2, steps=2, warmup_steps=0, decay_steps=1, batch_tokens=64, buckets=[64]
        ).items()
    ],
}


def build(folder: pathlib.Path) -> None:
    """Fills `folder`; `ende/target` and `ende/drafter` lie in its `bundled`."""
    for name in ("configs", "specdec_jax"):
        (folder / name).symlink_to(pages.ROOT / name)
    vocabulary = SentencePieceVocabulary.load(loader.BUNDLED / "ende/spiece.model")
    models = {
        path: T5
        for path in ("bundled/ende/target", "bundled/ende/drafter", *OWN_T5[:3], *_folders(T5))
    }
    models |= dict.fromkeys(OWN_GPT, GPT)
    for number, (path, shape) in enumerate(models.items()):
        start = 1 if shape is GPT else 0
        drawn = sd.LanguageModel.random(shape, number, vocabulary)
        model = sd.LanguageModel(shape, drawn.params, vocabulary, start_token=start, eos_ids=(1,))
        sd.save(model, folder / path)
    sd.convert(folder / "t5-small", folder / "ul2-t5x", "t5x")
    (folder / "bundled/ende/sentences.txt").write_text("\n".join(SENTENCES) + "\n")
    for name in TEXTS:
        (folder / name).parent.mkdir(exist_ok=True)
        text = "\n".join(SENTENCES).encode() + b"\n"
        (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    (folder / "sentencepiece.model").write_bytes(vocabulary.model)


def _folders(shape) -> set[str]:
    """Returns the folders that commands on the pages read as models of the reader's own.

    The pages write their names with "/" at the end.
    """
    words = [word.partition("=") for argv in all_commands() for word in argv]
    result = {value for flag, _, value in words if flag in ("--target", "--drafter", "--source")}
    return {
        name.rstrip("/")
        for name in result
        if name.endswith("/") and name not in (*OWN_T5, *OWN_GPT)
    }


def all_commands() -> list[list[str]]:
    """Returns the commands on all pages, each once, in their order."""
    result = [
        argv for path in pages.pages() for argv in pages.commands(path.read_text(encoding="utf-8"))
    ]
    return [
        shlex.split(line.replace("/dev/shm/", ""))
        for line in dict.fromkeys(map(shlex.join, result))
    ]


def shrink(monkeypatch, folder: pathlib.Path) -> None:
    """Replaces the bundled pair by the toy pair, and the presets' shapes by toy shapes."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(loader, "BUNDLED", folder / "bundled")
    for name, shape in families.PRESETS.items():
        monkeypatch.setitem(families.PRESETS, name, GPT if shape.decoder_only else T5)
