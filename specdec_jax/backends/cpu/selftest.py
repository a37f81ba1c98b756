"""Tries a library of kernels in a process of its own: `python -I selftest.py JSON`.

A faulty library may end the process that loads it. This file imports nothing of the package, so
that the process starts quickly.
"""

import ctypes
import json
import sys
from collections.abc import Mapping

# Of the largest output. An input of 8 bits that nearly ties may be rounded to the other side.
_TOLERANCE = 1e-3
_PART = 512  # inputs that are rounded together


def register(library: str, targets: Mapping[str, str]) -> ctypes.CDLL:
    """Loads a library and registers its handlers with XLA for the CPU; once in a process.

    Args:
      library: path of the file.
      targets: name of each FFI target, with that of the symbol of its handler.

    Raises:
      OSError: the file cannot be loaded.
      AttributeError: it lacks a symbol.
    """
    import jax

    loaded = ctypes.CDLL(library)
    handlers = {
        name: jax.ffi.pycapsule(getattr(loaded, symbol)) for name, symbol in targets.items()
    }
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return loaded


def check() -> None:
    """Runs every handler once, in a size that several threads share, and leaves the process where a
    result is wrong."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    for name, arguments, attributes, results, *expected in _products(rng) + _attentions(rng):
        call = jax.ffi.ffi_call(name, [jax.ShapeDtypeStruct(*result) for result in results])
        got = jax.jit(lambda *arrays: call(*arrays, **attributes))(*arguments)
        off = max(np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(got, expected))
        if not off < _TOLERANCE:
            sys.exit(
                f"{name}: got outputs that are off by {off:.2g}, expected at most {_TOLERANCE:g}"
            )


def _products(rng) -> list[tuple]:
    """Returns cases for the products, with both kinds of weights.

    A case is (target, arguments, attributes, shapes and dtypes of the results, and the first
    results, in float64).
    """
    import numpy as np

    M, K, F, P = 5, 600, 512, 16

    def make(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    given, w, bias, residual = make(M, 2 * K), make(K, F) / 30, make(F), make(M, F)
    quantised, scales = (
        rng.integers(-127, 128, (K, F), dtype=np.int8),
        (rng.random(F, dtype=np.float32) + 1) / 3000,
    )
    valid, all_valid, none = np.arange(M) != 2, np.zeros(0, bool), np.zeros(0, np.float32)

    def use_packed(weight):
        return np.ascontiguousarray(weight.reshape(K, F // P, P).transpose(1, 0, 2))

    def groups(n):
        return np.ascontiguousarray(
            use_packed(quantised).reshape(F // P, K // n, n, P).swapaxes(2, 3)
        )

    # A gate: the gelu of the first half of a row times the second.
    x, linear = given[:, :K].astype(np.float64), given[:, K:]
    gated = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * linear
    gate = {"before": np.int64(4), "first": np.int64(2), "second": np.int64(0), "clear": True}
    table, numbers = make(7, K), np.array([3, 0, 9, -2], np.int32)
    cases: list[tuple] = [
        (
            "specdec_rows",
            (table, numbers, all_valid),
            {},
            [((4, K), np.float32)],
            table[[3, 0, 6, 0]],
        )
    ]
    centred = x - x.mean(axis=1, keepdims=True)
    normed = (
        centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * table[0] + table[1]
    )
    most, x = x.max(axis=1), np.ascontiguousarray(given[:, :K])
    sums = np.log(np.exp(x - most[:, None]).sum(axis=1))
    cases += [
        (
            "specdec_norm",
            (x, *table[:2], valid),
            {"before": np.int64(2)},
            [((M, K), np.float32)],
            normed * valid[:, None],
        ),
        ("specdec_log_sums", (x,), {}, [((M,), np.float32)] * 2, most, sums),
    ]
    times, same = quantised * scales.astype(np.float64), lambda x: x.astype(np.float64)
    for kind, weights, w, rounded in (
        ("f32", (use_packed(w), none), w, same),
        ("s8", (groups(2), scales), times, same),
        ("w8a8", (groups(4), scales), times, _in_8_bits),
    ):
        product, logits = (
            (rounded(gated) @ w + bias + residual) * valid[:, None],
            rounded(linear) @ w,
        )
        log_probs = -np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))
        arguments = (given, *weights, valid, none, none, bias, residual)
        attributes, greedy_token_and_logprob = (
            {"columns": np.int64(F), "summed": True},
            [((M,), np.int32), ((M,), np.float32)],
        )
        cases += [
            (f"specdec_product_{kind}", arguments, gate, [((M, F), np.float32)], product),
            (
                f"specdec_head_{kind}",
                (linear.copy(), *weights, all_valid),
                attributes,
                greedy_token_and_logprob,
                logits.argmax(axis=1),
                log_probs,
            ),
        ]
    return cases


def _in_8_bits(x):
    """Returns rows of numbers, each part of a row rounded to 127 steps on either side of 0."""
    import numpy as np

    parts = [
        x[:, first : first + _PART].astype(np.float32) for first in range(0, x.shape[1], _PART)
    ]
    steps = [np.abs(part).max(axis=1, keepdims=True) / np.float32(127) for part in parts]
    return np.concatenate(
        [np.rint(part / step).astype(np.float64) * step for part, step in zip(parts, steps)], axis=1
    )


def _attentions(rng) -> list[tuple]:
    """Returns cases, as `_products` does, for four kinds of attention: two rows of four heads."""
    import numpy as np

    B, T, H, S, K = 2, 3, 4, 37, 24

    def make(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    qkv, keys, values, bias = (
        make(B, T, 3 * H * K),
        make(B, H, S, K),
        make(B, H, S, K),
        make(S, H, S),
    )
    positions, divisor, lengths = (
        np.array([5, 30], np.int32),
        np.float32(3),
        np.array([37, 11], np.int32),
    )
    whole, table, valid = make(B, S, 3 * H * K), make(S, H, S), np.arange(T) < np.array([[T], [1]])

    def attended(query, keys, values, bias):  # one head
        scores = query.astype(np.float64) @ keys.T + bias
        weights = np.exp(scores - scores.max())
        return weights @ values / weights.sum()

    # Nodes whose ancestors lie in every second slot.
    places = np.array([[5, 6, 6], [3, 4, 5]], np.int32)
    paths = np.broadcast_to(2 * np.arange(S, dtype=np.int32), (B, T, S)).copy()
    np.put_along_axis(
        paths,
        places[..., None],
        (positions[:, None] + np.arange(T))[..., None].astype(np.int32),
        axis=2,
    )

    def split(x, part):
        return x[..., part * H * K : (part + 1) * H * K].reshape(*x.shape[:-1], H, K)

    cached, crossed, inside = np.zeros((B, T, H, K)), np.zeros((B, T, H, K)), np.zeros((B, S, H, K))
    branched = np.zeros((B, T, H, K))
    for b, h in np.ndindex(B, H):
        own_keys, own_values = keys[b, h].copy(), values[b, h].copy()
        for t in range(T):
            at = positions[b] + t
            own_keys[at], own_values[at] = split(qkv, 1)[b, t, h], split(qkv, 2)[b, t, h]
            query = split(qkv, 0)[b, t, h]
            cached[b, t, h] = attended(
                query / divisor, own_keys[: at + 1], own_values[: at + 1], bias[at, h, : at + 1]
            )
            crossed[b, t, h] = attended(
                query, keys[b, h, : lengths[b]], values[b, h, : lengths[b]], 0
            )
        for t in range(T):
            query, last = split(qkv, 0)[b, t, h], places[b, t]
            seen = paths[b, t, : last + 1]
            near = bias[0, h, S - 1 - last :]
            branched[b, t, h] = attended(query / divisor, own_keys[seen], own_values[seen], near)
        for t in range(S):
            query, key, value = (split(whole, part)[b, :, h] for part in range(3))
            inside[b, t, h] = attended(
                query[t], key[: lengths[b]], value[: lengths[b]], table[t, h, : lengths[b]]
            )
    sources, moved = positions[:, None] + np.array([[2, 0, 1]], np.int32), keys.copy()
    for b in range(B):
        moved[b, :, positions[b] : positions[b] + 3] = keys[b][:, sources[b]]

    def flat(x):
        return x.reshape(*x.shape[:2], H * K)

    query = np.ascontiguousarray(qkv[..., : H * K])
    return [
        (
            "specdec_self_attention",
            (qkv, keys, values, bias, positions, valid),
            {"divisor": divisor, "clear": True},
            [(shape, np.float32) for shape in ((B, T, H * K), keys.shape, values.shape)],
            flat(cached) * valid[..., None],
        ),
        (
            "specdec_node_attention",
            (qkv, keys, values, bias[0], positions, places, paths, valid[:0]),
            {"divisor": divisor, "clear": True},
            [(shape, np.float32) for shape in ((B, T, H * K), keys.shape, values.shape)],
            flat(branched),
        ),
        (
            "specdec_move",
            (keys, values, sources, positions),
            {},
            [(keys.shape, np.float32)] * 2,
            moved,
        ),
        (
            "specdec_cross_attention",
            (query, keys, values, lengths, valid[:0]),
            {"clear": True},
            [((B, T, H * K), np.float32)],
            flat(crossed),
        ),
        (
            "specdec_encoder_attention",
            (whole, table, lengths),
            {},
            [((B, S, H * K), np.float32)],
            flat(inside) * (np.arange(S) < lengths[:, None])[..., None],
        ),
    ]


def main() -> None:
    """Ends with status 0 and prints "works", or with what is wrong on standard error."""
    library, targets, sys.path[:] = json.loads(sys.argv[1])
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file
    except ImportError:  # Windows
        pass
    try:
        register(library, targets)
        check()
    except Exception as error:  # without JAX's traceback, whose last line says nothing
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
    print("works")


if __name__ == "__main__":
    main()
