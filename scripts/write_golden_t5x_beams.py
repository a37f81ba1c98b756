"""Writes tests/golden/t5x_beams.npz: T5X's beam searches with the golden T5X checkpoint.

Needs T5X. Run from the repository root: `PYTHONPATH=.:tests/support python
scripts/write_golden_t5x_beams.py`.

For each search, by name: `NAME/tokens [4, K, 16]` and `NAME/scores [4, K]`, as T5X gives them, the
best hypothesis last. `searches` is a JSON object: by name `num_decodes`, `alpha`, `eos_id` and
whether there are `prompts [4, 16]`. The inputs are those of the checkpoint's own archive.
"""

import functools
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from golden_models import GOLDEN, unpack_t5x
from t5x import models
from t5x_calls import Ids

import specdec_jax as sd
from specdec_jax.interop import t5x as interop

EARLY, NONE = "early", -1
SEARCHES = {
    "one": dict(num_decodes=1, alpha=0.6, eos_id=EARLY),
    "two": dict(num_decodes=2, alpha=1.0, eos_id=EARLY, prompted=True),
    "four": dict(num_decodes=4, alpha=0.6, eos_id=1),
    "four_prompted": dict(num_decodes=4, alpha=0.0, eos_id=EARLY, prompted=True),
    "eight": dict(num_decodes=8, alpha=0.6, eos_id=EARLY, prompted=True),
    "no_end": dict(num_decodes=8, alpha=0.6, eos_id=NONE),
}


def search(
    model: Any, params: dict, io: Mapping[str, np.ndarray], prompts: np.ndarray, given: dict
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and scores of one search."""
    options = {name: given[name] for name in ("alpha", "eos_id")}
    predict = functools.partial(
        model.predict_batch_with_aux,
        decoder_params=options,
        num_decodes=given["num_decodes"],
        return_all_decodes=True,
        prompt_with_targets=given.get("prompted", False),
    )
    batch = dict(encoder_input_tokens=io["encoder_input_tokens"], decoder_input_tokens=prompts)
    tokens, aux = jax.jit(predict)(params, batch)
    return np.asarray(tokens), np.asarray(aux["scores"])


def main() -> None:
    folder, io = unpack_t5x(pathlib.Path(tempfile.mkdtemp()))
    target, rng = sd.load(folder, "float32"), np.random.default_rng(0)
    model = models.EncoderDecoderModel(interop.make_transformer(target.config), Ids, Ids, None)
    shaken = jax.tree.map(
        lambda x: x * (1 + 1e-6 * rng.standard_normal(x.shape).astype(np.float32)), target.params
    )
    prompts = np.array(io["prompt_decoder_input_tokens"])
    prompts[0, 1], prompts[1, 2:], prompts[2] = 9, 0, 0
    arrays, searches = {"prompts": prompts.astype(np.int16)}, {}
    for name, given in SEARCHES.items():
        given = given | ({"eos_id": int(io["eos_early_id"])} if given["eos_id"] == EARLY else {})
        (tokens, scores), (again, _) = (
            search(model, params, io, prompts, given) for params in (target.params, shaken)
        )
        if not np.array_equal(tokens, again):
            raise RuntimeError(f"{name}: tokens depend on rounding")
        print(name, "ends before the last place:", float((tokens[..., -1] == 0).mean()))
        arrays |= {f"{name}/tokens": tokens.astype(np.int16), f"{name}/scores": scores}
        searches[name] = given
    path = GOLDEN / "t5x_beams.npz"
    np.savez_compressed(path, searches=json.dumps(searches), **arrays)
    print(path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
