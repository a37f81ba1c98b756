"""The stage of those who have one model: everything that speeds it up without a second one."""

import functools
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from specdec_jax.checkpoints import loader
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.early_exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookahead import LookaheadDecoding
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.parallel import ParallelDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.recycling import TokenRecycling
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.training import heads
from tools.results.cases import NEW_TOKENS, Case, drafts, load_target, time_cases
from tools.results.pair import count_table
from tools.results.stage import Rows, Settings
from tools.results.texts import read_sentences, require_pairs

SHAPE = "128,4,32,0,2,512"  # that of the bundled drafter
_STEPS = 400


def measure_only(settings: Settings) -> Rows:
    """Measures what makes the bundled target faster without the bundled drafter."""
    target, prompts = load_target("none"), read_prompts(settings)
    cases = {
        "plain": Case("none"),
        "int8 for the target, which changes the distribution": Case("int8"),
        "`w8a8` for the target, which changes it more": Case("w8a8"),
    }
    for gamma in (1, 3, 5):
        cases[f"`self:int8`, γ = {gamma}"] = drafts(gamma, drafter=lambda: SelfDrafter(target))
    for gamma in (2, 4):
        cases[f"`lookup`, γ = {gamma}"] = drafts(gamma, drafter=PromptLookupDrafter)
    outputs = decode(prompts)
    table = count_table(outputs, 2)
    for gamma in (1, 2):
        name = f"bigrams of the target's outputs for {len(prompts):,} sentences, γ = {gamma}"
        cases[name] = drafts(gamma, drafter=lambda: table)
    for layers in (1, 2, 3):
        exits = functools.partial(EarlyExitDrafter, target, layers)
        cases[f"`exit:{layers}`, of four layers, γ = 2"] = drafts(2, drafter=exits)
    for kept in ((0, 2, 3), (0, 3)):
        exits = functools.partial(EarlyExitDrafter, target, kept)
        name = f"the layers {', '.join(map(str, kept))} of four (Draft & Verify), γ = 2"
        cases[name] = drafts(2, drafter=exits)
    recycling = functools.partial(TokenRecycling, target.config.vocab_size)
    cases["`recycling`, γ = 2"] = drafts(2, drafter=recycling)
    cases["`lookahead`"] = Case("none", LookaheadDecoding)
    cases["look-ahead with 12 positions"] = Case("none", lambda: LookaheadDecoding(3, 3, 3))
    return time_texts(settings, cases)


def read_prompts(settings: Settings) -> list[str]:
    """Returns the sources whose outputs are counted or learned."""
    pairs = require_pairs(settings, "ende", settings.choose(10_000, 2_000), "train")
    return [source for source, _ in pairs]


def time_texts(settings: Settings, cases: Mapping[str, Case]) -> Rows:
    """Returns the rows of both texts."""
    texts = read_sentences(settings, ("ende", "wiki_pe"), settings.choose(12, 3))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_trained(settings: Settings) -> Rows:
    """Measures drafters that learn the target's outputs here, for some minutes each."""
    prompts = read_prompts(settings)
    steps = settings.choose(_STEPS, 20)
    trained = train_drafters(prompts, decode(prompts), steps)
    return time_texts(settings, {"plain": Case("none")} | trained)


def train_drafters(
    prompts: Sequence[str], outputs: Sequence[Sequence[int]], steps: int
) -> dict[str, Case]:
    """Returns cases of drafters that learn the target's outputs."""
    with tempfile.TemporaryDirectory() as folder:
        drafter = ModelDrafter(distil(prompts, steps, pathlib.Path(folder)))
        parallel = ParallelDrafter(distil(prompts, steps, pathlib.Path(folder), masks=4))
        medusa = train_heads(prompts, outputs, steps, pathlib.Path(folder))
    cases = {}
    for gamma in (2, 4):
        name = f"four heads (Medusa), {steps:,} steps of training here, γ = {gamma}"
        cases[name] = drafts(gamma, drafter=lambda: medusa)
    for gamma in (2, 4):
        name = f"`--drafter_shape={SHAPE}`, {steps:,} steps of training here, γ = {gamma}"
        cases[name] = drafts(gamma, drafter=lambda: drafter)
        name = f"the same with four masks, all tokens in one call (PARD), γ = {gamma}"
        cases[name] = drafts(gamma, drafter=lambda: parallel)
    return cases


def decode(prompts: Sequence[str]) -> list[list[int]]:
    """Returns the target's outputs, decoded in int8, which is faster."""
    model = load_target("int8")
    how: dict[str, Any] = dict(batch_size=64, seed=0, max_new_tokens=NEW_TOKENS, gamma=0)
    outputs = decode_all(model, encode(model, prompts, 512), generation_config=None, **how)
    return [output.tokens for output in outputs]


def distil(
    prompts: Sequence[str], steps: int, folder: pathlib.Path, masks: int = 0
) -> LanguageModel:
    """Returns a new drafter that learned the target's outputs for these sources."""
    names = {"source": prompts[200:], "validation": prompts[:200]}
    for name, lines in names.items():
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "specdec_jax", "distill", "--target=ende/target"]
    command += [f"--{name}_files={folder / name}" for name in names]
    command += [f"--drafter_shape={SHAPE}", f"--steps={steps}", "--batch_tokens=2048"]
    # Few programs; longer sentences, of which there are few, are left out.
    command += ["--buckets=16,32", "--max_new_tokens=32", f"--masks={masks}"]
    run = folder / f"run{masks}"
    subprocess.run([*command, f"--output_dir={run}"], check=True)
    return loader.load(run / "model", "float32", say=lambda line: None)


def train_heads(
    prompts: Sequence[str], outputs: Sequence[Sequence[int]], steps: int, folder: pathlib.Path
) -> HeadsDrafter:
    """Returns heads that learned the target's outputs for these sources."""
    target = load_target("none")
    assert target.vocabulary is not None
    texts = map(target.vocabulary.decode, outputs)
    lines = [f"{source}\t{text}\n" for source, text in zip(prompts, texts, strict=True)]
    for name, part in (("train", lines[200:]), ("validation", lines[:200])):
        (folder / f"{name}.tsv").write_text("".join(part), encoding="utf-8")
    config = heads.HeadsTrainConfig(
        target="ende/target",
        data_dir=str(folder),
        train_files=("train.tsv",),
        validation_files=("validation.tsv",),
        output_dir=str(folder / "heads"),
        steps=steps,
        learning_rate=0.002,
        soft_weight=0.5,
        batch_tokens=2048,
        buckets=(16, 32),
    )
    heads.fit(config)
    return HeadsDrafter.load(folder / "heads" / "heads", target)
