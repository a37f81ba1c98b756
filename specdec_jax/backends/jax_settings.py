"""Runs the package's functions under their own JAX settings, whatever the process has set."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state

with jax.ensure_compile_time_eval():
    _OUTSIDE = get_opaque_trace_state()
_END = object()


# The package's settings by JAX's names.
_SETTINGS: tuple[tuple[str, Any, Callable[[Any], Any]], ...] = (
    ("jax_enable_x64", False, jax.enable_x64),  # buffers, caches and kernels are of 32 bits or less
    ("jax_numpy_rank_promotion", "allow", jax.numpy_rank_promotion),
    ("jax_threefry_partitionable", True, jax.threefry_partitionable),  # else keys draw other tokens
    # Masks are infinite, and slots that nobody reads may hold anything. What is read is checked:
    # `NonFiniteLogitsError` names input and token.
    ("jax_debug_nans", False, jax.debug_nans),
    ("jax_debug_infs", False, jax.debug_infs),
)


def use_package_settings() -> contextlib.ExitStack:
    """Enters JAX's settings for this package, in this thread.

    Leaving the returned context restores the process's own. Precision of products, type promotion,
    devices, `jax_disable_jit` and the checks for leaked tracers and for transfers stay as they are.
    Only settings that differ are entered: mostly none, and outputs are many.
    """
    stack = contextlib.ExitStack()
    for name, value, setting in _SETTINGS:
        if getattr(jax.config, name) != value:
            stack.enter_context(setting(value))
    return stack


def isolated(function: Callable) -> Any:
    """Makes `function`, which may be a generator or jitted, run under `use_package_settings`.

    The result has an attribute `isolated`, by which a test finds public names that are not.
    """
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generate(*args, **options):
            return _iterate_isolated(function(*args, **options))

        generate.isolated = True
        return generate

    @functools.wraps(function)
    def call(*args, **options):
        with use_package_settings():
            return function(*args, **options)

    call.isolated = True
    if hasattr(function, "lower"):
        for name in ("lower", "trace", "eval_shape"):
            setattr(call, name, isolated(getattr(function, name)))
        call._cache_size = function._cache_size
        call.__wrapped__ = function.__wrapped__  # the function itself, as a jitted function has it
    return call


def _iterate_isolated(items: Iterator) -> Iterator:
    """Yields `items`; between two of them the process has its own settings."""
    while True:
        with use_package_settings():
            item = next(items, _END)
        if item is _END:
            return
        yield item


def check_not_traced(name: str, values: Iterable[Any] = ()) -> None:
    """Raises ValueError inside a function that JAX traces, where `name` cannot be called.

    With `values` only if one of them is traced.
    """
    values = tuple(values)
    traced = any(isinstance(value, jax.core.Tracer) for value in values)
    if traced or (not values and get_opaque_trace_state() != _OUTSIDE):
        raise ValueError(
            f"{name}: got a call inside a function that JAX traces (jit, grad, vmap, scan),"
            " expected one outside it, where values are known (of decoding, only `advance` can be"
            " traced)"
        )
