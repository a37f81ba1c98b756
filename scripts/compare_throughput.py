"""Measures sentences per second on a whole file, batched in three ways.

    python scripts/compare_throughput.py --target=ende/target --drafter=ende/drafter \
        --input_file=ende/test.tsv.gz --batch_size=8 --limit=2000 --output=throughput.json

The ways are file order, sentences of like length, and continuous batching, where finished rows are
refilled. All three decode the same sentences with the same keys, in turn. Tokenisation, encoders
and detokenisation are inside the time. Compilation is not: an untimed pass of each comes first. A
ratio is the time of a pass over the time with continuous batching; median and spread are over the
passes. Every output is compared: except for near-ties, all must have the same ids. That holds above
temperature 0 too, since each row has random bits of its own. The number of differing outputs is
printed.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from absl import app, flags

from specdec_jax.analysis import machine, timing
from specdec_jax.analysis.timing import summarize
from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.commands.sentences import read_sentences
from specdec_jax.decoding.continuous_batching import decode_stream
from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.inputs import encode
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.files.progress import Progress
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.language_model import LanguageModel

_TARGET = flags.DEFINE_string("target", "ende/target", "Folder or bundled name of the target.")
_DRAFTER = flags.DEFINE_string(
    "drafter", "ende/drafter", "Drafter, as for `specdec generate`; empty: plain decoding."
)
_GAMMA = flags.DEFINE_integer("gamma", 4, "Tokens drafted per target call.")
_POLICY = flags.DEFINE_string("gamma_policy", "fixed", "As for `specdec generate`.")
_FILE = flags.DEFINE_string(
    "input_file",
    None,
    "One sentence a line, or a TSV file, of which the first column is read.",
    required=True,
)
_BATCH = flags.DEFINE_integer("batch_size", 8, "Sentences decoded together.", lower_bound=2)
_LIMIT = flags.DEFINE_integer("limit", 0, "Read only this many lines; 0: all.", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most probable token.")
_NEW = flags.DEFINE_integer("max_new_tokens", 64, "The most new tokens.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Timed passes over the sentences for each way of batching.", lower_bound=1
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON record.")

_WAYS = ("file order", "like length", "refilled")


def decode(
    way: str, target: LanguageModel, inputs: Sequence[Sequence[int]], size: int, how: dict
) -> Iterator[tuple[int, list[int]]]:
    """Yields (number of the input, ids of its output) for all inputs, batched in one of `_WAYS`."""
    if way != "file order":
        options = how | {"batch_size": size, "refill": way == "refilled"}
        for place, (output,) in decode_stream(target, inputs, **options):
            yield place, output.tokens
        return
    for begin in range(0, len(inputs), size):
        batch = list(inputs[begin : begin + size])
        padded = batch + [None] * (size - len(batch))  # so that one shape compiles
        keys = fold_keys(how["key"], np.arange(begin, begin + size))
        result = generate(target, padded, **how | {"key": keys})
        for row in range(len(batch)):
            yield begin + row, result.tokens[row, : result.lengths[row]].tolist()


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1]!r}, expected flags only")
    check_output(_OUTPUT.value)
    options = GenerateOptions(
        target=_TARGET.value,
        drafter=_DRAFTER.value or None,
        gamma=_GAMMA.value,
        gamma_policy=_POLICY.value,
        temperature=_TEMPERATURE.value,
        max_new_tokens=_NEW.value,
        batch_size=_BATCH.value,
    )
    options.check()
    lines = read_sentences([], _FILE.value)[: _LIMIT.value or None]
    sentences = [line.partition("\t")[0] for line in lines]
    target, drafter = options.load()
    config, key = options.configuration(), jax.random.key(options.seed)
    how = dict(config=config, drafter=drafter, key=key)
    outputs: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in _WAYS}

    def one_pass(name: str, what: str) -> float:
        begin, found = time.perf_counter(), {}
        inputs = encode(target, sentences, config.max_input_length)
        with Progress(what, len(sentences), "sentences") as progress:
            for place, tokens in decode(name, target, inputs, options.rows, how):
                found[place] = tokens
                progress.advance()
        outputs[name] = [found[place] for place in range(len(sentences))]
        return time.perf_counter() - begin

    for name in _WAYS:
        one_pass(name, f"{name}, compiling")
    for turn in range(_REPEATS.value):
        for name in timing.rotate(_WAYS, turn):
            seconds[name].append(one_pass(name, f"{name}, pass {turn + 1} of {_REPEATS.value}"))
    differ = sum(
        any(other != found[0] for other in found[1:])
        for found in zip(*outputs.values(), strict=True)
    )
    ratios = {
        f"refilled / {name}": summarize(np.array(seconds[name]) / np.array(seconds["refilled"]))
        for name in _WAYS[:-1]
    }
    speed = {name: summarize(len(sentences) / np.array(times)) for name, times in seconds.items()}
    asked = (_TARGET, _DRAFTER, _GAMMA, _POLICY, _TEMPERATURE, _NEW, _FILE, _BATCH)
    record = {
        "machine": machine.describe_machine(),
        **{flag.name: flag.value for flag in asked},
        "sentences": len(sentences),
        "tokens": sum(map(len, outputs["refilled"])),
        "differ": differ,
        "seconds": seconds,
        "sentences_per_second": speed,
        "ratios": ratios,
    }
    if _OUTPUT.value:
        write_file(_OUTPUT.value, json.dumps(record, indent=1) + "\n")
    for name, values in {**speed, **ratios}.items():
        spread = f"{values['median']:>9.3f} ({values['least']:.3f} to {values['most']:.3f})"
        print(f"{name:<22} {spread}" + " sentences per second" * (name in _WAYS))
    print(f"{differ} of {len(sentences)} outputs differ")
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    app.run(main)
