"""Random parameters of toy models, without a program to compile for every shape of a model."""

import functools

import jax
import numpy as np

from specdec_jax.models import language_model, network


def make_params(key, *, module, dtype, rules=None) -> dict:
    """Returns what `network.random_params` returns, but for last bits.

    One array after another is made, by programs that models share, and once for each key and model.
    """
    if rules is not None or isinstance(key, jax.core.Tracer):
        return network.random_params(key, module=module, dtype=dtype, rules=rules)
    words = tuple(jax.random.key_data(key).ravel().tolist())
    values = _make_values(words, str(jax.random.key_impl(key)), module, dtype)
    return jax.tree.map(jax.device_put, values)


@functools.cache
def _make_values(words: tuple[int, ...], kind: str, module, dtype: str) -> dict:
    key = jax.random.wrap_key_data(np.array(words, np.uint32), impl=kind)
    inputs = (
        jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x
        for x in module.dummy_inputs()
    )
    params = module.lazy_init(key, *inputs)["params"]  # computes nothing of the inputs
    return jax.tree.map(lambda leaf: np.asarray(leaf.astype(dtype)), params)


def install() -> None:
    """Gives `LanguageModel.random` these parameters, for the rest of the process."""
    language_model.random_params = make_params
