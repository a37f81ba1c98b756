"""Builds what `specdec COMMAND --help` prints: examples first, then flags in groups."""

import dataclasses
import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from absl.flags import Flag, FlagValues

# Flags of all commands, in the order of the page.
_GROUPS = """
models: target drafter drafter_shape vocabulary dtype quantize gated_activation mesh shard_drafter
  shortlist_size shortlist drafter_int8
input and output: records source format input_file limit sweep output_file shard output config json
  plot report picture trace stream source_files validation_files data_dir output_dir max_sources
drafting and verifying: gamma gamma_max gamma_policy gamma_settings tree tree_nodes verifier
  choose_verifier lenience typical_epsilon typical_delta drafter_sampling learn
sampling and lengths: greedy samples generation_config temperature top_k top_p min_p seed
  num_samples max_new_tokens min_new_tokens stop repetition_penalty no_repeat_ngram
  forbidden_tokens forced_tokens logit_bias
beam search: num_beams beam_style length_penalty early_stopping num_return_sequences beam_width
languages: source_language target_language
batches and limits: batch_size max_input_length deadline non_finite shard_size
seqio tasks instead of sentences: task split module_import score_targets tfds_data_dir
  use_cached seqio_additional_cache_dirs
what is measured: repeats widths compare_alpha against suite
random weights instead of models: preset drafter_preset input_length synthetic_alpha
the table: order continuations sampled suffix
training: distill_weight divergence distill_temperature select masks steps warmup_steps decay_steps
  learning_rate batch_tokens buckets matmul_dtype log_every save_every evaluate_every
settings, cache and errors: gin_file gin_search_paths compilation_cache_dir debug help
"""
GROUPS = {
    title: names.split()
    for title, names in (group.split(": ") for group in re.split(r"\n(?! )", _GROUPS.strip()))
}

_PAIR = "--target=ende/target --drafter=ende/drafter"
_DISTILL = (
    "--validation_files=configs/examples/validation.tsv --output_dir=runs/drafter"
    " --steps=20 --batch_tokens=512"
)
_EXAMPLES = rf"""
specdec demo
specdec demo "Tom is learning German."
specdec demo --gamma=2 --temperature=1 --seed=3
specdec demo --tree=widths:3,2,1 --trace
specdec generate {_PAIR} "Tom is learning German."
specdec generate {_PAIR} --input_file=ende/sentences.txt --output_file=translations.txt
specdec generate {_PAIR} --temperature=1 --top_p=0.95 --num_samples=3 --json "Good morning."
specdec benchmark {_PAIR} --gamma=3,5 --output=record.json
specdec benchmark {_PAIR} --num_beams=4 --gamma=1,2,3 --beam_width=6,8
specdec benchmark --preset=t5_1_1/small --drafter=lookup --gamma=3 --synthetic_alpha=0.75
specdec measure {_PAIR} --temperature=1 --plot=figure.png --output=measured.json
specdec figures --output=report.html
specdec figures --records=record.json --records=measured.json
specdec tune {_PAIR} --config=tuned.gin
specdec count --target=ende/target --input_file=translations.txt --order=2 --output=bigrams.npz
specdec convert --source=ende/target --output=target-t5x --format=t5x
specdec distill {_PAIR} --source_files=configs/examples/train.tsv {_DISTILL}
specdec train --gin_file=configs/examples/train.gin --gin.OUTPUT_DIR=\"runs/smoke\"
specdec train_heads --gin_file=configs/examples/heads.gin --gin.OUTPUT_DIR=\"runs/heads\"
specdec train_eagle --gin_file=configs/examples/eagle.gin --gin.OUTPUT_DIR=\"runs/eagle\"
"""
EXAMPLES = {
    name: tuple(examples)
    for name, examples in itertools.groupby(
        _EXAMPLES.strip().splitlines(), lambda line: line.split()[1]
    )
}
_INDENT, _WIDEST = 28, 100


def make_page(
    name: str, summary: str, arguments: str, cls: type, names: Sequence[str], flags: FlagValues
) -> str:
    """Returns the help of a command.

    `arguments` is the placeholder for its positional arguments, if it takes any. `names` are the
    fields of its options, `cls`, that have flags: none if it is set by gin alone.
    """
    width = min(shutil.get_terminal_size((88, 24)).columns, _WIDEST) - 1
    lines = [f"usage: specdec {name} [flags] {arguments}".rstrip(), ""]
    lines += [*textwrap.wrap(summary, width), "", "examples:"]
    lines += [f"  {example}" for example in EXAMPLES[name]]
    shown = {*names, *GROUPS["settings, cache and errors"]}
    for title, members in GROUPS.items():
        chosen = [flags[member] for member in members if member in shown]
        if chosen:
            lines += ["", f"{title}:"]
            lines += [line for flag in chosen for line in _describe_flag(flag, width)]
    binding = f"one gin binding, {cls.__name__}.FIELD=value; repeatable"
    where = "the flags above" if names else "these fields"
    lines += _wrap("--gin.NAME=value", f"{binding}; {cls.__name__} has {where}", width)
    if not names:
        lines += ["", f"fields of {cls.__name__}:"]
        for field in dataclasses.fields(cls):
            lines += _wrap(field.name, _add_default(field.metadata["help"], field.default), width)
    return "\n".join(lines)


def _describe_flag(flag: Flag, width: int) -> list[str]:
    text = flag.help.splitlines()[0].rstrip(";")  # absl appends lines to some
    name = f"--[no]{flag.name}" if flag.default is True else f"--{flag.name}"
    return _wrap(name, _add_default(text, flag.default), width)


def _add_default(text: str, default: Any) -> str:
    if isinstance(default, list | tuple):
        default = ",".join(map(str, default))
    given = default not in (dataclasses.MISSING, None, "") and default is not False
    return f"{text} (default: {default})" if given else text


def _wrap(name: str, text: str, width: int) -> list[str]:
    """Returns the lines of an entry: the name, and beside it the text."""
    return textwrap.wrap(
        text,
        max(width, 2 * _INDENT),
        initial_indent=f"  {name}".ljust(_INDENT - 1) + " ",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
