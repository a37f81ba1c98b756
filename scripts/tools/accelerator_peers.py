"""Decodes with other libraries: what scripts/accelerator_report.py times beside this package."""

import concurrent.futures
import functools
import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specdec_jax.analysis import variants
from specdec_jax.checkpoints import huggingface_t5
from tools.accelerator_figures import ModelPair, Peer, ReportSetup, UnsupportedHere
from tools.accelerator_stages import load_pair


def _require(**names: str) -> None:
    """Rejects libraries that are not installed, given the names of their modules."""
    for name, module in names.items():
        if importlib.util.find_spec(module) is None:
            raise UnsupportedHere(f"{name} is not installed")


def _load_for_t5x(setup: ReportSetup, preset: str) -> ModelPair:
    _require(T5X="t5x")
    return load_pair(setup, preset)


def _decode_by_t5x(setup: ReportSetup, preset: str, pair: ModelPair) -> Callable[[], np.ndarray]:
    """Returns a call of T5X's own loop with its own network, on the target's arrays."""
    from specdec_jax.interop import t5x

    ids = setup.ids(1, pair.target.config.vocab_size).tolist()
    (batch,) = variants.cut_batches(ids, ids, 1, 0)
    decode = t5x.make_variant(pair.target, setup.max_new_tokens).decode
    return lambda: decode(batch).tokens


def _load_for_transformers(setup: ReportSetup, preset: str) -> ModelPair:
    _require(transformers="transformers", torch="torch")
    import torch

    device = jax.default_backend()
    if device != "cpu" and not (device == "gpu" and torch.cuda.is_available()):
        raise UnsupportedHere(f"torch has no {device.upper()}")
    return ModelPair()


def _load_for_compiled(setup: ReportSetup, preset: str) -> ModelPair:
    pair = _load_for_transformers(setup, preset)
    if jax.default_backend() == "cpu":
        raise UnsupportedHere("transformers compiles what it decodes with on a GPU only")
    return pair


def _decode_by_transformers(
    setup: ReportSetup, preset: str, pair: ModelPair, static: bool = False
) -> Callable[[], np.ndarray]:
    """Returns a call of `generate` on a model of the same shape with random weights of its own.

    Args:
      setup, preset, pair: as for `Peer.decode`; the pair has no models.
      static: whether caches have a fixed size, with which transformers compiles the decoder's step
        on a GPU.
    """
    # torch keeps compiled programs' CUDA graphs for the thread that made them.
    thread = concurrent.futures.ThreadPoolExecutor(1)
    decode = thread.submit(make_generate, setup, preset, static).result()
    return lambda: thread.submit(decode).result()


def make_generate(setup: ReportSetup, preset: str, static: bool) -> Callable[[], np.ndarray]:
    """Returns what decodes by transformers in this thread; see `_decode_by_transformers`."""
    import torch
    import transformers

    shape: Any = setup.config(preset)  # a T5's, as all that the report takes
    options = huggingface_t5.make_options(shape, setup.dtype)
    del options["torch_dtype"]  # newer versions have another name for it
    # Without an EOS id every output has its full length.
    options |= dict(eos_token_id=None, pad_token_id=0, decoder_start_token_id=0)
    config = transformers.AutoConfig.for_model(**options)
    # Made on the device: no copy of 13 GB of weights.
    with torch.device("cuda" if jax.default_backend() == "gpu" else "cpu") as device:
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            config, dtype=getattr(torch, setup.dtype)
        ).eval()
        ids = torch.tensor(setup.ids(1, config.vocab_size), device=device).long()
    new, given = setup.max_new_tokens, {}
    if static:  # one cache for all calls; with another at each one CUDA graphs would be made anew
        make = functools.partial(transformers.StaticCache, config=config)
        caches = make(max_cache_len=new + 1), make(max_cache_len=setup.input_length)
        # Newer versions have another name for it here, too.
        new_name = "cache" in transformers.generation.utils.ALL_CACHE_NAMES
        given["cache" if new_name else "past_key_values"] = transformers.EncoderDecoderCache(
            *caches
        )
    how: dict[str, Any] = dict(do_sample=False, num_beams=1, use_cache=True, **given)

    def decode() -> np.ndarray:
        for cache in given.values():
            cache.reset()
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **how)
        return found[:, 1:].cpu().numpy()

    return decode


def _free_torch() -> None:
    """Gives back the memory of torch, which keeps what it freed."""
    gc.collect()
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PEERS = {
    "T5X": Peer(_load_for_t5x, _decode_by_t5x),
    "transformers": Peer(_load_for_transformers, _decode_by_transformers, _free_torch),
    "transformers compiled": Peer(
        _load_for_compiled, functools.partial(_decode_by_transformers, static=True), _free_torch
    ),
}
