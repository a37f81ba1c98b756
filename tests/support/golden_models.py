"""Reads the golden models: what T5X and transformers saved, and what they computed from it."""

import pathlib
import tarfile
from collections.abc import Iterator

import numpy as np

import specdec_jax as sd

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
HF_MODELS = ("hf_t5_1_0", "hf_t5_1_1", "hf_mt5", "hf_umt5")


def golden_hf_models() -> Iterator[tuple[str, pathlib.Path, dict[str, np.ndarray]]]:
    """Yields (name, model folder, arrays) of each Hugging Face model.

    `scripts/write_golden_hf.py` describes the arrays.
    """
    for name in HF_MODELS:
        yield name, GOLDEN / name, dict(np.load(GOLDEN / name / "io.npz"))


def unpack_t5x(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, np.ndarray]]:
    """Unpacks T5X's checkpoint into `folder`; returns (directory of `checkpoint_7`, arrays).

    It has some 300 small files.

    The arrays are encoder_input_tokens [4, 12], decoder_input_tokens [4, 16], logits [4, 16, 128],
    and greedy decodes [4, 16] with EOS 1 (`greedy_eos1`), without EOS (`greedy_noeos`), with
    `eos_early_id` as EOS (`greedy_eos_early`), and with a prompt of 3 tokens that the result
    repeats (`prompt_decoder_input_tokens`, `greedy_prompt3`).
    """
    with tarfile.open(GOLDEN / "t5x_t5_1_1.tar.gz") as archive:
        # Set as an attribute, since extractall has an argument for it only from Python 3.11.4 on.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    root = folder / "t5x_t5_1_1"
    return root / "legacy_f32_adafactor", dict(np.load(root / "io.npz"))


def greedy_tokens(model, inputs, input_lengths, steps: int, eos_ids=(), prefix=None) -> np.ndarray:
    """Returns a greedy decode `[B, steps]` by teacher-forced logits alone, 0 after an EOS.

    `prefix [B, P]` is fed first.
    """
    rows = len(inputs)
    tokens = np.zeros((rows, steps), np.int32)
    forced = 0 if prefix is None else prefix.shape[1]
    tokens[:, :forced] = prefix if forced else 0
    ended = np.zeros(rows, bool)
    for step in range(forced, steps):
        fed = np.concatenate([np.full((rows, 1), model.start_token), tokens[:, :-1]], axis=1)
        best = np.argmax(model.logits(inputs, fed, input_lengths)[:, step], axis=-1)
        tokens[:, step] = np.where(ended, 0, best)
        ended |= np.isin(best, eos_ids)
    return tokens


DRAFTERS = ("plain", "speculative")


def engine_tokens(
    model, inputs, input_lengths, steps: int, eos_ids=None, prefix=None, drafter="plain"
) -> np.ndarray:
    """Returns the same `[B, steps]` from the package's own decode loop.

    With "speculative" the model drafts three tokens for itself.
    """
    forced = 0 if prefix is None else prefix.shape[1]
    options = dict(drafter=sd.ModelDrafter(model), gamma=3) if drafter == "speculative" else {}
    result = sd.generate(
        model,
        inputs,
        input_lengths=np.asarray(input_lengths),
        decoder_prefix=prefix,
        eos_ids=eos_ids,
        max_new_tokens=steps - forced,
        **options,
    )
    if options:
        assert (
            result.stats.accepted == result.stats.examined_by_position.sum() > 0
        )  # it agrees with itself
    return result.tokens if prefix is None else np.concatenate([prefix, result.tokens], axis=1)
