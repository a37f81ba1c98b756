"""Measures quality and α of a pair, and compares greedy speculative with greedy plain output.

    python scripts/evaluate_pair.py --target=ende/target --drafter=ende/drafter \
        --files=ende/test.tsv.gz,wiki_pe/test.tsv.gz \
        --gamma=1,3,5,8 --batch_size=1,8 --output=evaluation.json

BLEU and chrF are sacrebleu's (extra `test`). Every differing token is listed, with the target's
margin and the measured difference between calls over one position and over γ + 1. They decide
whether it is a near-tie. Exit code 1 if a token differs that is no near-tie, or if a token of the
target as its own drafter (`--self_drafting`) is ever rejected.
"""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from specdec_jax.analysis import near_ties
from specdec_jax.checkpoints import loader
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.files.progress import track
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.training import text_files
from tools.quality import quality

_TARGET = flags.DEFINE_string("target", "ende/target", "Folder or bundled name of the target.")
_DRAFTER = flags.DEFINE_string("drafter", "ende/drafter", "Folder or bundled name of the drafter.")
_DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "dtype of both models; by default float32 on a CPU, else bfloat16.",
)
_FILES = flags.DEFINE_list("files", None, "TSV files: source, tab, reference.", required=True)
_GAMMA = flags.DEFINE_list("gamma", ["4"], "Values of γ to decode with.")
_BATCH = flags.DEFINE_list("batch_size", ["8"], "Batch sizes to decode with.")
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "The most new tokens.")
_LIMIT = flags.DEFINE_integer("limit", 0, "Read only this many lines of each file; 0: all.")
_SELF = flags.DEFINE_boolean(
    "self_drafting", False, "Also draft with the target itself: α must be 1."
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "File for the JSON record, which is rewritten after every run."
)


def compare(
    target: LanguageModel,
    inputs: Sequence[Sequence[int]],
    plain: Sequence[Any],
    outputs: Sequence[Any],
    gamma: int,
    batch: int,
) -> dict:
    """Returns the acceptance of one speculative run, and its differences from plain decoding."""
    examined = sum(int(output.stats.examined_by_position.sum()) for output in outputs)
    accepted = sum(output.stats.accepted for output in outputs)
    calls = sum(output.stats.target_calls for output in outputs)
    differing = []
    for index, (ours, theirs) in enumerate(zip(outputs, plain, strict=True)):
        if ours.tokens != theirs.tokens:
            pairs = list(zip(ours.tokens, theirs.tokens))
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            prefix = [target.start_token, *theirs.tokens[:position]]
            how = near_ties.measure_difference(target, inputs[index], prefix, gamma + 1, batch)
            found = how._asdict() | {"near_tie": bool(how.near_tie)}
            differing.append({"input": index, "position": position, **found})
    return {
        "gamma": gamma,
        "batch_size": batch,
        "alpha": accepted / examined if examined else None,
        "tokens_per_target_call": sum(len(output.tokens) for output in outputs) / calls,
        "differing": differing,
        "not_near_ties": sum(not item["near_tie"] for item in differing),
    }


def evaluate(
    target: LanguageModel,
    drafter: ModelDrafter,
    file: str,
    record: dict,
    save: Callable[[], None],
) -> None:
    """Fills the `record` of one file; calls `save` after each addition."""
    pairs = text_files.read_pairs([file])[: _LIMIT.value or None]
    inputs = encode(target, [source for source, _ in pairs], 512)
    drafters = {"drafter": drafter}
    if _SELF.value:
        drafters["target itself"] = ModelDrafter(target)

    def decode(batch: int, what: str, **options: Any) -> list:
        options |= dict(batch_size=batch, max_new_tokens=_NEW.value, generation_config=None, seed=0)
        return list(track(decode_all(target, inputs, **options), len(inputs), what))

    record |= {"sentences": len(pairs), "runs": {name: [] for name in drafters}}
    for batch in map(int, _BATCH.value):
        plain = decode(batch, f"{file}: plain, batch {batch}")
        if "bleu" not in record:
            record |= quality(plain, [reference for _, reference in pairs])
            lengths = [len(output.tokens) for output in plain]
            record["mean_output_tokens"] = round(float(np.mean(lengths)), 2)
            scores = f"BLEU {record['bleu']}, chrF {record['chrf']}"
            print(f"{file}: {scores}", file=sys.stderr, flush=True)
            save()
        for name, one in drafters.items():
            for gamma in map(int, _GAMMA.value):
                what = f"{file}: γ {gamma}, batch {batch}"
                outputs = decode(batch, what, drafter=one, gamma=gamma)
                run = compare(target, inputs, plain, outputs, gamma, batch)
                record["runs"][name].append(run)
                print(f"{file}: {name}, {json.dumps(run)}", file=sys.stderr, flush=True)
                save()


def write(record: dict, path: str | None) -> None:
    """Replaces the file at `path` as a whole, so that a killed run leaves its last record."""
    if path:
        write_file(path, json.dumps(record, indent=1) + "\n")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got the arguments {argv[1:]}, expected flags only")
    check_output(_OUTPUT.value)
    target = loader.load(_TARGET.value, _DTYPE.value)
    drafter = ModelDrafter(loader.load(_DRAFTER.value, _DTYPE.value))
    record: dict = {file: {} for file in _FILES.value}
    for file, part in record.items():
        evaluate(target, drafter, file, part, lambda: write(record, _OUTPUT.value))
    print(json.dumps(record, indent=1))
    write(record, _OUTPUT.value)
    runs = [run for one in record.values() for run in sum(one["runs"].values(), [])]
    own = [run for one in record.values() for run in one["runs"].get("target itself", [])]
    wrong = sum(run["not_near_ties"] for run in runs) + sum(run["alpha"] != 1.0 for run in own)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    app.run(main)
