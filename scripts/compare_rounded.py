"""Measures the effect of int8 weights: on distributions, outputs, BLEU and a drafter's acceptance.

    python scripts/compare_rounded.py --target=flan-t5-large/ --drafter=flan-t5-small/ \
        --input_file=test.txt
    python scripts/compare_rounded.py --target=ende/target --drafter=ende/drafter \
        --input_file=ende/test.tsv.gz --move_weights --output=rounded.json

The model decodes the inputs in full precision. At every token of these outputs its distribution is
compared with that of its rounded form (`--quantize`), and the drafter's with both. Then the rounded
form decodes too. Both forms are in memory at the same time.

A rounded model's output has another distribution than the full model's; speculative decoding does
not change that. This script measures how far apart the two are for your model and your text; for
the bundled pair `results.py` does.
"""

import importlib.util
import json
from collections.abc import Sequence

from absl import app, flags

from specdec_jax.analysis import machine
from specdec_jax.checkpoints import loader
from specdec_jax.decoding.checks import check_pair
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.progress import track
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.training import text_files
from tools import rounding

_TARGET = flags.DEFINE_string("target", None, "Folder or bundled name of the model.", required=True)
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
    "input_file",
    None,
    "One input a line, or TSV: source, tab, reference, for BLEU and chrF.",
    required=True,
)
_LIMIT = flags.DEFINE_integer("limit", 0, "Read only this many inputs; 0: all.", lower_bound=0)
_BATCH = flags.DEFINE_integer(
    "batch_size", 16, "Inputs decoded and scored together.", lower_bound=1
)
_NEW = flags.DEFINE_integer("max_new_tokens", 64, "The most new tokens.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "Of the outputs; 0 takes the most probable token.", lower_bound=0
)
_OUTPUT = flags.DEFINE_string("output", None, "File for the JSON record.")


def models() -> tuple[LanguageModel, LanguageModel, LanguageModel | None]:
    """Returns the full model, its rounded form, and the drafter."""
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
        sampling=SamplingConfig(temperature=_TEMPERATURE.value),
        generation_config=None,
    )
    return list(track(decode_all(model, inputs, **options), len(inputs), what))


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    try:
        check_output(_OUTPUT.value, source=_FILE.value)
        texts, references = read_texts(_FILE.value)
        full, other, drafter = models()
        inputs = encode(full, texts, 512)
        found = rounding.compare_outputs(
            (full, other),
            drafter,
            inputs,
            references,
            lambda model, what: decode(model, inputs, what),
            _BATCH.value,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from None
    record = {
        "machine": machine.describe_machine(),
        "model": machine.describe_model(full),
        "quantize": _QUANTIZE.value,
        "moved_weights": _MOVE.value,
        "drafter": _DRAFTER.value,
        "input_file": _FILE.value,
        "max_new_tokens": _NEW.value,
        "temperature": _TEMPERATURE.value,
        **found,
    }
    print(json.dumps(record, indent=1))
    if _OUTPUT.value:
        write_file(_OUTPUT.value, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
