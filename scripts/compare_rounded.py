"""Measures the effect of int8 weights: on distributions, outputs, BLEU and a drafter's acceptance.

    python scripts/compare_rounded.py --target=flan-t5-large/ --drafter=flan-t5-small/ \
        --input_file=test.txt
    python scripts/compare_rounded.py --target=ende/target --drafter=ende/drafter \
        --input_file=ende/test.tsv.gz --move_weights --output=rounded.json
    python scripts/compare_rounded.py --preset=t5_1_1/large --limit=16

The model decodes the inputs in full precision. At every token of these outputs its distribution is
compared with that of its rounded form (`--quantize`), and the drafter's with both. Then the rounded
form decodes too. Both forms are in memory at the same time.

A rounded model's output has another distribution than the full model's; speculative decoding does
not change that. This script measures how far apart the two are for your model and your text.
Presets have random weights, as at the start of training, and an encoder of one layer: for them only
the error of the logits is meaningful.
"""

import importlib.util
import json
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from specdec_jax.analysis import machine
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.checkpoints import loader
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.progress import show_waiting, track
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training import text_files
from tools import rounding
from tools.quality import quality

_TARGET = flags.DEFINE_string("target", None, "Folder or bundled name of the model.")
_PRESET = flags.DEFINE_enum(
    "preset", None, sorted(PRESETS), "Shape of a model with random weights, and ids as inputs."
)
_DRAFTER = flags.DEFINE_string("drafter", None, "Folder or bundled name of a drafting model.")
_QUANTIZE = flags.DEFINE_enum(
    "quantize", "int8", ["int8", "w8a8"], "How the model is rounded, as for `specdec`."
)
_MOVE = flags.DEFINE_bool(
    "move_weights",
    False,
    "First move every weight at random by up to half a step of the rounding: for models that are "
    "stored in int8, which rounding again would not change.",
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "dtype of all models; by default float32 on a CPU, else bfloat16.",
)
_FILE = flags.DEFINE_string(
    "input_file", None, "One input a line, or TSV: source, tab, reference, for BLEU and chrF."
)
_LIMIT = flags.DEFINE_integer(
    "limit", 0, "Read only this many inputs; 0: all, of a preset 64.", lower_bound=0
)
_BATCH = flags.DEFINE_integer(
    "batch_size", 16, "Inputs decoded and scored together.", lower_bound=1
)
_NEW = flags.DEFINE_integer("max_new_tokens", 64, "The most new tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Of the outputs; 0 takes the most probable token.", lower_bound=0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON record.")

_PRESET_INPUT, _PRESET_ROWS = 64, 64  # ids in an input of a preset; inputs


def models() -> tuple[LanguageModel, LanguageModel, LanguageModel | None]:
    """Returns the full model, its rounded form, and the drafter."""
    if _PRESET.value:
        dtype = loader.choose_dtype(_DTYPE.value, _PRESET.value)
        packed_weights.check_quantize(_QUANTIZE.value, dtype, False)
        config = PRESETS[_PRESET.value].replace(dtype=dtype)
        if not config.decoder_only:
            config = config.replace(num_encoder_layers=1)
        with show_waiting(f"making and rounding random weights of {_PRESET.value}"):
            full = LanguageModel.random(config, eos_ids=(), name=_PRESET.value)
            return full, rounding.rounded(full, _QUANTIZE.value), None
    full = loader.load(_TARGET.value, _DTYPE.value, quantize="none")
    drafter = loader.load(_DRAFTER.value, _DTYPE.value) if _DRAFTER.value else None
    if drafter is not None:
        check_pair(full, ModelDrafter(drafter))
        if drafter.config.vocab_size < full.config.vocab_size:
            raise ValueError(
                f"drafter: got {drafter.config.vocab_size} ids, expected at least the model's "
                f"{full.config.vocab_size}, all of which are its inputs"
            )
    if not _MOVE.value:
        return full, loader.load(_TARGET.value, _DTYPE.value, quantize=_QUANTIZE.value), drafter
    full = rounding.moved(full)
    return full, rounding.rounded(full, _QUANTIZE.value), drafter


def read_texts(path: str) -> tuple[list[str], list[str] | None]:
    """Returns the inputs of a file and the references, None if it has none.

    Raises:
      ValueError: no such file, one without lines, some lines with a reference and others without,
        or references without sacrebleu.
    """
    try:
        lines = [line.split("\t") for line in text_files.read_lines(path)][: _LIMIT.value or None]
    except OSError as error:
        raise ValueError(
            f"input_file: got {path} ({error.strerror}), expected a file of inputs"
        ) from None
    references = [line[1] for line in lines if len(line) > 1]
    if not lines or len(references) not in (0, len(lines)):
        got = f"{len(references)} references for {len(lines)} lines" if lines else "no lines"
        raise ValueError(
            f"input_file: got {got}, expected inputs, and one reference for each or none"
        )
    if references and importlib.util.find_spec("sacrebleu") is None:
        raise ValueError(
            "input_file: got references without sacrebleu, expected it (`pip install '.[test]'`)"
        )
    return [line[0] for line in lines], references or None


def decode(model: LanguageModel, inputs: Sequence[Sequence[int]], what: str) -> list:
    """Returns the model's outputs for all inputs."""
    options = dict(
        batch_size=_BATCH.value,
        seed=0,
        max_new_tokens=_NEW.value,
        sampling=SamplingConfig(temperature=1.0 if _PRESET.value else _TEMPERATURE.value),
        generation_config=None,
    )
    return list(track(decode_all(model, inputs, **options), len(inputs), what))


def _check(argv: list[str]) -> None:
    """Raises UsageError for flags that do not go together."""
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    if (_TARGET.value is None) == (_PRESET.value is None):
        raise app.UsageError("got both of --target and --preset or none, expected one of them")
    if _PRESET.value and (_DRAFTER.value or _MOVE.value or _FILE.value):
        raise app.UsageError(
            "got --drafter, --move_weights or --input_file with --preset, expected --target"
        )
    if _TARGET.value and _FILE.value is None:
        raise app.UsageError("got --target without --input_file, expected a file of inputs")
    if _PRESET.value and _TEMPERATURE.present:
        raise app.UsageError(
            "got --temperature with --preset, expected none: its outputs are sampled at 1"
        )


def main(argv: list[str]) -> None:
    _check(argv)
    check_output(_OUTPUT.value)
    try:
        texts, references = read_texts(_FILE.value) if _FILE.value else ([], None)
        full, other, drafter = models()
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    shape = _LIMIT.value or _PRESET_ROWS, _PRESET_INPUT
    drawn = np.random.default_rng(0).integers(2, full.config.vocab_size, shape).tolist()
    inputs = drawn if _PRESET.value else encode(full, texts, 512)
    outputs = decode(full, inputs, "decoding in full precision")
    found = rounding.Divergence(full, other, drafter)
    kept = [
        (row, output.tokens) for row, output in zip(inputs, outputs, strict=True) if output.tokens
    ]
    if not kept:
        raise app.UsageError("got only empty outputs, expected inputs that the model answers")
    parts = [kept[start : start + _BATCH.value] for start in range(0, len(kept), _BATCH.value)]
    for part in track(parts, len(parts), "scoring"):
        found.add(*zip(*part))
    again = decode(other, inputs, "decoding with rounded weights")
    differ = sum(one.tokens != two.tokens for one, two in zip(outputs, again, strict=True))
    record = {
        "machine": machine.describe_machine(),
        "model": machine.describe_model(full),
        "quantize": _QUANTIZE.value,
        "moved_weights": _MOVE.value,
        "drafter": _DRAFTER.value,
        "input_file": _FILE.value,
        "inputs": len(inputs),
        "max_new_tokens": _NEW.value,
        "temperature": 1.0 if _PRESET.value else _TEMPERATURE.value,
        **found.record(),
        "outputs_that_differ": differ,
        "full": {} if references is None else quality(outputs, references),
        "rounded": {} if references is None else quality(again, references),
    }
    print(json.dumps(record, indent=1))
    if _OUTPUT.value:
        write_file(_OUTPUT.value, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
