"""Tries a library of kernels in a process of its own: `python -I selftest.py JSON`.

A faulty library may end the process that loads it. This file imports nothing of the package, so
that the process starts quickly.
"""

import ctypes
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

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
    symbols = {name: getattr(loaded, symbol) for name, symbol in targets.items()}
    handlers = {name: jax.ffi.pycapsule(symbol) for name, symbol in symbols.items()}
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return loaded


def check() -> None:
    """Runs every handler once, in a size that several threads share.

    Leaves the process where a result is wrong.
    """
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    for name, arguments, attributes, results, *expected in _product_cases(rng) + _attention_cases(
        rng
    ):
        out = [jax.ShapeDtypeStruct(shape, np.float32) for shape in results]
        if name.startswith("head_"):
            out[0] = out[0].update(dtype=np.int32)
        call = functools.partial(jax.ffi.ffi_call(f"specdec_{name}", out), **attributes)
        got = jax.jit(call)(*arguments)
        off = _measure_error(got, expected)
        if not off < _TOLERANCE:
            most = f"expected at most {_TOLERANCE:g}"
            sys.exit(f"specdec_{name}: got outputs that are off by {off:.2g}, {most}")


def _measure_error(got: Any, expected: Any) -> float:
    """Returns the greatest relative error of any result; NaN if one of them has NaN.

    Python's `max` would pass over a NaN that is not the first.
    """
    import numpy as np

    return float(
        np.max([np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(got, expected)])
    )


def _product_cases(rng: Any) -> list[tuple]:
    """Returns cases for the products, with all kinds of weights.

    A case is (handler, arguments, attributes, shapes of the results, and the first results, in
    float64). The results are float32, but for a head's first one, int32.
    """
    import numpy as np

    M, K, F, P = 20, 640, 512, 16  # as many rows and inputs as fill tiles
    B, H = 2, 4
    make = functools.partial(rng.standard_normal, dtype=np.float32)
    given, w, bias, residual = make((M, 2 * K)), make((K, F)) / 30, make(F), make((M, F))
    integers = rng.integers(-127, 128, (K, F), dtype=np.int8)
    scales = (rng.random(F, dtype=np.float32) + 1) / 3000
    valid, all_valid, none = np.arange(M) != 2, np.zeros(0, bool), np.zeros(0, np.float32)
    table, numbers, x = make((7, K)), np.array([3, 0, 9, -2], np.int32), given[:, :K].copy()
    precise, linear = x.astype(np.float64), given[:, K:].copy()

    moves = np.array([[5, 19, 0], [6, 2, 3]], np.int32)
    put = table.copy()
    put[moves[1, :2]] = x[moves[0, :2]]
    columns, taken = np.zeros((1, K, P), np.float32), (numbers, all_valid)
    columns[0, :, :7] = table.T
    centred = precise - precise.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    normed = (normed * table[0] + table[1]) * valid[:, None]
    most = precise.max(axis=1)
    sums = np.log(np.exp(precise - most[:, None]).sum(axis=1))
    cases: list[tuple] = [
        ("rows", (table, numbers, all_valid), {}, [(4, K)], table[[3, 0, 6, 0]]),
        ("put", (table, x, *moves, np.int32(2)), {}, [(7, K)], put),
        ("columns", (columns, *taken), {"columns": np.int64(7)}, [(4, K)], table[[3, 0, 6, 0]]),
        ("norm", (x, *table[:2], valid), {"before": np.int64(2)}, [(M, K)], normed),
        ("log_sums", (x,), {}, [(M,), (M,)], most, sums),
    ]

    # A gate: the gelu of the first half of a row times the second.
    tanh = 1 + np.exp(-2 * np.sqrt(2 / np.pi) * (precise + 0.044715 * precise**3))
    gated = precise / tanh * linear
    cap, at = np.float32(3), dict(before=np.int64(4), first=np.int64(2), second=np.int64(0))
    gate, head = at | dict(clear=True, cap=cap), dict(columns=np.int64(F), summed=True, cap=cap)
    panels, packed = (part.reshape(K, F // P, P).transpose(1, 0, 2) for part in (w, integers))
    for kind in ("f32", "s8", "w8a8"):
        weights, matrix = (panels.copy(), none), w
        if kind != "f32":
            groups = packed.reshape(F // P, K // 4, 4, P).swapaxes(2, 3)
            weights, matrix = (groups.copy(), scales), integers * scales.astype(np.float64)
        inputs = [_round_to_int8(part) if kind == "w8a8" else part for part in (gated, linear)]
        hidden, logits = (part.astype(np.float64) @ matrix for part in inputs)
        logits = cap * np.tanh((logits + bias) / cap)
        logprobs = -np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1))
        given_all, product = (given, *weights, valid, none, none, bias, residual), hidden + bias
        product = (cap * np.tanh(product / cap) + residual) * valid[:, None]
        cases.append((f"product_{kind}", given_all, gate, [(M, F)], product))
        found = logits.argmax(axis=1), logprobs
        head_given = linear, *weights, all_valid, bias
        cases.append((f"head_{kind}", head_given, head, [(M,), (M,)], *found))
        rows = linear.reshape(B, M // B, K), valid.reshape(B, M // B)
        by_heads = (inputs[1].astype(np.float64) @ matrix + bias) * valid[:, None]
        by_heads = by_heads.reshape(B, M // B, 2, H, -1).transpose(2, 0, 3, 1, 4)
        rows_given = rows[0], *weights, rows[1], bias
        cases.append((f"keys_values_{kind}", rows_given, {}, [by_heads[0].shape] * 2, *by_heads))
    return cases


def _round_to_int8(x: Any) -> Any:
    """Returns rows of numbers, each part of a row rounded to 127 steps on either side of 0."""
    import numpy as np

    rounded = []
    for first in range(0, x.shape[1], _PART):
        part = x[:, first : first + _PART].astype(np.float32)
        step = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        rounded.append(np.rint(part / step).astype(np.float64) * step)
    return np.concatenate(rounded, axis=1)


def _attention_cases(rng: Any) -> list[tuple]:
    """Returns cases, as `_product_cases` does, for attention of two rows and four heads of queries.

    Those over caches share two heads of keys and values, with caps and windows.
    """
    import numpy as np

    B, T, H, G, S, K = 2, 3, 4, 2, 37, 24
    make = functools.partial(rng.standard_normal, dtype=np.float32)
    qkv, keys, values = make((B, T, (H + 2 * G) * K)), make((B, G, S, K)), make((B, G, S, K))
    bias, table = make((H, S)), make((H, 2 * S - 1))
    whole, further = make((B, S, (H + 2 * G) * K)), [make((B, G, S, K)) for _ in range(2)]
    positions, lengths = np.array([5, 30], np.int32), np.array([37, 11], np.int32)
    divisor, valid = np.float32(3), np.arange(T) < np.array([[T], [1]])
    slots, written = np.arange(S), positions[:, None] + np.arange(T)
    cap, window, ahead = np.float32(2), np.int64(4), np.int64(2)

    def attend(query: Any, keys: Any, values: Any, bias: Any, seen: Any) -> Any:
        keys, values = (np.repeat(part, H // G, axis=1) for part in (keys, values))
        scores = np.einsum("bthk,bhsk->bths", query.astype(np.float64), keys)
        scores = cap * np.tanh(scores / cap) + bias
        weights = np.exp(scores - scores.max(-1, keepdims=True)) * seen[:, :, None]
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("bths,bhsk->bthk", weights, values).reshape(*query.shape[:2], H * K)

    def split(qkv: Any) -> list[Any]:
        parts = np.split(qkv, [H * K, (H + G) * K], axis=-1)
        return [part.reshape(*qkv.shape[:2], -1, K) for part in parts]

    query, key, value = split(qkv)
    new_keys, new_values, moved = keys.copy(), values.copy(), keys.copy()
    sources = positions[:, None] + np.array([[2, 0, 1]], np.int32)
    for b in range(B):
        new_keys[b, :, written[b]], new_values[b, :, written[b]] = key[b], value[b]
        moved[b, :, written[b]] = keys[b, :, sources[b]]
    seen = (slots <= written[..., None]) & (slots > written[..., None] - window)
    # Of the last position, so that a key as far back as there has the same; the wrapped are unseen.
    placed = bias[:, (slots - written[..., None] - 1) % S].transpose(1, 2, 0, 3)
    cached = attend(query / divisor, new_keys, new_values, placed, seen) * valid[..., None]

    # Nodes whose ancestors lie in every second slot.
    places = np.array([[5, 6, 6], [3, 4, 5]], np.int32)
    paths = np.broadcast_to(2 * np.arange(S, dtype=np.int32), (B, T, S)).copy()
    np.put_along_axis(paths, places[..., None], written[..., None].astype(np.int32), axis=2)
    branched = np.zeros((B, T, H * K))
    for b, t in np.ndindex(B, T):
        path = paths[b, t, : places[b, t] + 1][-window:]
        near_keys, near_values = (  # and further ones, of which a row has as many as `lengths`
            np.concatenate([own[b : b + 1, :, path], other[b : b + 1, :, : lengths[b]]], axis=2)
            for own, other in zip((new_keys, new_values), further)
        )
        seen, one = np.ones((1, 1, near_keys.shape[2]), bool), query[b : b + 1, t : t + 1]
        branched[b, t] = attend(one / divisor, near_keys, near_values, 0, seen)[0, 0]

    inside = (slots < lengths[:, None])[:, None]
    crossed = attend(query / divisor, keys, values, 0, inside)
    parts = split(whole)
    key, value = (part.transpose(0, 2, 1, 3) for part in parts[1:])
    near = table[:, slots - slots[:, None] + S - 1].transpose(1, 0, 2)
    back = slots[:, None] - slots
    seen = inside & (back < window) & (back >= -ahead)
    seen |= ~inside.transpose(0, 2, 1)  # so that queries past the end have weights too
    encoded = attend(parts[0] / divisor, key, value, near, seen) * inside.transpose(0, 2, 1)

    queries, how = qkv[..., : H * K].copy(), {"divisor": divisor, "cap": cap, "clear": True}
    sized, results = how | {"window": window}, [(B, T, H * K), keys.shape, values.shape]
    all_valid, none = valid[:0], np.zeros((0, 0, 0, 0), np.float32)
    nodes = (
        qkv,
        keys,
        values,
        bias[:, :0],
        positions,
        places,
        paths,
        all_valid,
        *further,
        lengths,
    )
    cached_given = qkv, keys, values, bias, positions, valid, none, none, lengths[:0]
    crossing = queries, keys, values, lengths, all_valid
    return [
        *_head_cases(queries, qkv[..., H * K :], positions, K, make),
        ("self_attention", cached_given, sized, results, cached),
        ("node_attention", nodes, sized, results, branched),
        ("move", (keys, values, sources, positions), {}, results[1:], moved),
        ("cross_attention", crossing, how, results[:1], crossed),
        (
            "encoder_attention",
            (whole, table, lengths),
            {"divisor": divisor, "cap": cap, "window": window, "ahead": ahead},
            [(B, S, H * K)],
            encoded,
        ),
    ]


def _head_cases(query: Any, others: Any, positions: Any, features: int, make: Any) -> list[tuple]:
    """Returns cases, as `_product_cases` does, for heads of B rows, normalised and rotated."""
    import numpy as np

    key, value = np.split(others, 2, axis=-1)
    scales, steps = make((2, features)), np.linspace(1, 0.01, features // 2, dtype=np.float32)
    angles = (positions[:, None] * steps).astype(np.float64)
    lines = np.arange(query.shape[0] * query.shape[1]).reshape(query.shape[:2]) % len(angles)

    def place(x: Any, scale: Any) -> Any:
        heads = x.reshape(*x.shape[:2], -1, features).astype(np.float64)
        heads = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-6) * scale
        pairs = heads[..., : features // 2] + 1j * heads[..., features // 2 :]
        pairs = pairs * np.exp(1j * angles)[lines][:, :, None]
        return np.concatenate([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    placed = np.concatenate([place(query, scales[0]), place(key, scales[1]), value], axis=-1)
    rotation = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    arrays = query, key.copy(), value.copy(), *scales, *rotation, np.zeros(0, bool)
    return [
        ("angles", (positions, steps), {}, [angles.shape] * 2, *rotation),
        ("heads", arrays, {"features": np.int64(features)}, [placed.shape], placed),
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
