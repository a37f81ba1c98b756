"""The CPU's kernels inside programs: threads, loops, vmap, export, other shapes."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.backends.cpu.packed_weights import PackedWeight
from specdec_jax.backends.int8 import Int8Weight

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(not native.is_available(), reason=native.describe_state()),
]

# Prints a digest of many outputs, then calls the program from six threads at once and says whether
# the numbers are the same.
CHILD = """
import hashlib, threading
import jax, jax.numpy as jnp, numpy as np
from specdec_jax.backends.cpu import native
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.cpu.packed_weights import PackedWeight

assert native.is_available(), native.describe_state()
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, dtype=np.float32))
cells = [PackedWeight.pack(normal(640, 640) / 25) for _ in range(6)]
cells += [PackedWeight.pack(Int8Weight.quantize(normal(640, 640) / 25, bits)) for bits in (16, 8)]
keys, values, bias = normal(8, 8, 60, 64), normal(8, 8, 60, 64), normal(8, 119)
positions, lengths = jnp.arange(8, dtype=jnp.int32) * 7, 60 - jnp.arange(8, dtype=jnp.int32) * 5

@jax.jit
def run(cells, x, qkv, keys, values):
    step = lambda i, x: sum(cell.product(x, jnp.float32) for cell in cells) / 3
    y = jax.lax.fori_loop(0, 5, step, x)
    out = packed_weights.attend_to_cache(qkv[:, :4], keys, values, bias[:, :60], positions, 8.0)
    crossed = packed_weights.attend_to_encoded(qkv[..., :512], keys, values, lengths)
    return y, out, crossed, packed_weights.attend_to_inputs(qkv, bias, lengths)

inputs = [(cells, normal(M, 640), normal(8, 60, 1536), keys, values) for M in (1, 5, 40)]
def outputs():
    arrays = [y for given in inputs for y in jax.tree.leaves(run(*given))]
    return b"".join(np.asarray(y).tobytes() for y in arrays)
first, others = outputs(), []
print(hashlib.sha256(first).hexdigest(), flush=True)
work = lambda: [others.append(outputs() == first) for _ in range(4)]
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("same" if len(others) == 24 and all(others) else "different")
"""


@pytest.mark.slow
def test_threads():
    """NPROC's number of threads in XLA's pool gives the same bits, and callers do not hang."""
    printed = []
    for threads in ("1", "2", "5"):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": threads}
        command = [sys.executable, "-c", CHILD]
        printed.append(
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        )
    assert [(child.returncode, child.stdout.split()[1:]) for child in printed] == [
        (0, ["same"])
    ] * 3, printed
    assert len({child.stdout for child in printed}) == 1


def normal(*shape):
    return jnp.asarray(np.random.default_rng([*shape]).standard_normal(shape, dtype=np.float32))


def loop(steps, x, keys, values, bias, weights, encoded):
    """Decodes in small: products, writes to a cache, self-attention and cross-attention."""

    def body(state):
        i, x, keys, values = state
        y = weights[0].product(x, jnp.float32)
        out, keys, values = packed_weights.attend_to_cache(
            y, keys, values, bias, jnp.full(2, i, jnp.int32), 1.0
        )
        out = out + packed_weights.attend_to_encoded(out, *encoded, jnp.array([5, 3], jnp.int32))
        return i + 1, jnp.clip(weights[1].product(out, jnp.float32), -2, 2), keys, values

    return jax.lax.while_loop(lambda state: state[0] < steps, body, (0, x, keys, values))[1:]


def loop_arguments():
    bias, weights = (
        normal(2, 40),
        (
            PackedWeight.pack(normal(32, 96) / 5),
            PackedWeight.pack(Int8Weight.quantize(normal(32, 32))),
        ),
    )
    return (
        normal(2, 1, 32),
        normal(2, 2, 40, 16),
        normal(2, 2, 40, 16),
        bias,
        weights,
        (normal(2, 2, 9, 16),) * 2,
    )


def test_a_loop_copies_neither_weights_nor_caches(optimised):
    arguments = loop_arguments()
    text = jax.jit(loop).lower(30, *arguments).compile(optimised).as_text()
    (attention,) = re.findall(r".*custom_call_target=\"specdec_self_attention\".*", text)
    assert "output_to_operand_aliasing={{1}: (1, {}), {2}: (2, {})}" in attention
    sizes = {x.size for x in jax.tree.leaves(arguments) if x.size > 500}
    made = []
    for computation in re.split(r"\n\n", text):
        if "ENTRY" in computation:
            continue
        for shape, operation in re.findall(r" = \w+\[([\d,]+)\]\S* ([\w-]+)\(", computation):
            if np.prod([int(n) for n in shape.split(",")]) in sizes and operation not in (
                "parameter",
                "get-tuple-element",
            ):
                made.append((shape, operation))
    assert made == []


def test_a_loop_writes_to_its_own_caches():
    """Not to those that it was given, and the numbers are those of calls one by one."""
    x, keys, values, bias, weights, encoded = loop_arguments()
    before = np.array(keys)
    got = jax.jit(loop)(3, x, keys, values, bias, weights, encoded)
    np.testing.assert_array_equal(np.asarray(keys), before)
    for i in range(3):
        y = weights[0].product(x, jnp.float32)
        out, keys, values = packed_weights.attend_to_cache(
            y, keys, values, bias, jnp.full(2, i, jnp.int32), 1.0
        )
        out = out + packed_weights.attend_to_encoded(out, *encoded, jnp.array([5, 3], jnp.int32))
        x = jnp.clip(weights[1].product(out, jnp.float32), -2, 2)
    for of_loop, one_by_one in zip(got, (x, keys, values)):
        np.testing.assert_array_equal(np.asarray(of_loop), np.asarray(one_by_one))


def test_vmap():
    x, stored = normal(3, 2, 20), PackedWeight.pack(normal(20, 33))
    got = jax.vmap(lambda x: stored.product(x, jnp.float32))(x)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(stored.product(x, jnp.float32)))
    qkv, keys, values, bias = (
        normal(3, 1, 2, 48),
        normal(3, 1, 2, 6, 8),
        normal(3, 1, 2, 6, 8),
        normal(2, 6),
    )
    positions = jnp.array([[0], [2], [4]], jnp.int32)

    def run(*arrays):
        return packed_weights.attend_to_cache(*arrays[:3], bias, arrays[3], 2.0)

    mapped = jax.vmap(run)(qkv, keys, values, positions)
    for got, expected in zip(mapped, run(qkv[:, 0], keys[:, 0], values[:, 0], positions[:, 0])):
        np.testing.assert_array_equal(np.asarray(got)[:, 0], np.asarray(expected))


def test_no_gradients():
    stored = PackedWeight.pack(normal(20, 33))
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda x: stored.product(x, jnp.float32).sum())(normal(2, 20))


def test_export_needs_an_exemption():
    """JAX exports a program with these kernels only with an exemption.

    It runs only where they are registered.
    """
    from jax import export

    stored, x = PackedWeight.pack(normal(20, 33)), normal(2, 20)
    run = jax.jit(lambda x: stored.product(x, jnp.float32))
    with pytest.raises(ValueError, match="specdec_product_f32"):
        export.export(run)(x)
    exempt = [export.DisabledSafetyCheck.custom_call("specdec_product_f32")]
    exported = export.export(run, disabled_checks=exempt)(x)
    np.testing.assert_array_equal(np.asarray(exported.call(x)), np.asarray(run(x)))


FLOAT, INTEGER = jnp.float32, jnp.int32
NONE = ((0,), bool)
PLAIN = {"before": np.int64(0), "first": np.int64(0), "second": np.int64(0), "clear": True}
PLAIN |= {"cap": np.float32(0)}
SCORES = {"divisor": np.float32(1), "cap": np.float32(0), "clear": True}
WINDOW = {"window": np.int64(0)}
# Of every kind of weights: arguments that fit [20, 33], number of scales, misfits.
KINDS = [
    (
        "f32",
        (3, 20, 16),
        0,
        [(1, (2, 20, 16)), (1, (3, 20, 8)), (1, (60, 16)), (1, ((3, 20, 16), jnp.int8))],
    ),
    *(
        (
            kind,
            ((3, 5, 16, 4), jnp.int8),
            33,
            [(1, ((3, 10, 16, 2), jnp.int8)), (1, ((2, 5, 16, 4), jnp.int8)), (1, (3, 5, 16, 4))],
        )
        for kind in ("s8", "w8a8")
    ),
]
# Name of a target, arguments that fit (shapes of float32, or shape and type), results that fit, and
# for each misfit which arguments or results take which shapes.
CALLS = {
    **{
        f"specdec_product_{kind}": (
            [(4, 20), weights, (scales,), NONE, *[(0,)] * 4],
            [(4, 33)],
            PLAIN,
            [
                (0, (4, 22)),
                (0, ()),
                *misfits,
                (2, (32,)),
                (2, (48,)),
                (3, ((3,), bool)),
                (4, (20,)),
                (5, (20,)),
                (6, (32,)),
                (7, (4, 32)),
                (8, (5, 33)),
                (8, (4, 49)),
                (8, ()),
            ],
        )
        for kind, weights, scales, misfits in KINDS
    },
    **{
        f"specdec_head_{kind}": (
            [(4, 20), weights, (scales,), NONE, (33,)],
            [((4,), INTEGER), (4,)],
            {"columns": np.int64(33), "summed": True, "cap": np.float32(0)},
            [
                (0, (4, 22)),
                (0, ()),
                *misfits,
                (2, (32,)),
                (2, (49,)),
                (3, ((3,), bool)),
                (4, (32,)),
                (5, ((3,), INTEGER)),
                (6, (5,)),
                (6, ((4,), INTEGER)),
            ],
        )
        for kind, weights, scales, misfits in KINDS
    },
    **{
        f"specdec_keys_values_{kind}": (
            [(2, 2, 20), weights, (36 * bool(scales),), NONE, (36,)],
            [(2, 3, 2, 6), (2, 3, 2, 6)],
            {},
            [
                (0, (2, 2, 22)),
                (0, (2, 3, 20)),
                (0, (20,)),
                *misfits,
                (2, (32,)),
                (3, ((3,), bool)),
                (4, (35,)),
                (5, (2, 3, 3, 6)),
                (5, (2, 2, 2, 6)),
                (5, (12, 6)),
                (5, (2, 3, 2, 0)),
                (6, (2, 3, 2, 5)),
            ],
        )
        for kind, weights, scales, misfits in KINDS
    },
    "specdec_put": (
        [(5, 2, 8), (3, 2, 8), ((2,), INTEGER), ((2,), INTEGER), ((), INTEGER)],
        [(5, 2, 8)],
        {},
        [
            (0, (5, 2, 7)),
            (0, ()),
            (1, (3, 2, 7)),
            (1, ()),
            (2, ((3,), INTEGER)),
            (3, ((3,), INTEGER)),
            (3, (2,)),
            (4, ((2,), INTEGER)),
            (5, (4, 2, 8)),
        ],
    ),
    "specdec_rows": (
        [(5, 8), ((2, 3), INTEGER), NONE],
        [(2, 3, 8)],
        {},
        [
            (0, (0, 8)),
            (0, (40,)),
            (0, (5, 7)),
            (1, (2, 3)),
            (1, ((7,), INTEGER)),
            (2, ((5,), bool)),
            (3, (2, 3, 7)),
        ],
    ),
    "specdec_columns": (
        [(2, 8, 16), ((2, 3), INTEGER), NONE],
        [(2, 3, 8)],
        {"columns": np.int64(20)},
        [
            (0, (0, 8, 16)),
            (0, (2, 8, 8)),
            (0, (3, 8, 16)),
            (0, (1, 8, 16)),
            (0, (2, 128)),
            (0, (2, 7, 16)),
            (1, (2, 3)),
            (1, ((7,), INTEGER)),
            (2, ((5,), bool)),
            (3, (2, 3, 7)),
        ],
    ),
    "specdec_norm": (
        [(2, 3, 8), (8,), (8,), ((2, 3), bool)],
        [(2, 3, 8)],
        {"before": np.int64(2)},
        [
            (0, (2, 3, 7)),
            (0, (2, 2, 8)),
            (1, (7,)),
            (2, (0,)),
            (2, (7,)),
            (3, ((5,), bool)),
            (4, (2, 2, 8)),
            (4, ()),
        ],
    ),
    "specdec_log_sums": (
        [(2, 3, 17)],
        [(2, 3), (2, 3)],
        {},
        [(0, (2, 3, 0)), (0, (2, 2, 17)), (0, ()), (1, (5,)), (2, (2, 2))],
    ),
    "specdec_self_attention": (
        [
            *[(2, 3, 48), (2, 2, 6, 8), (2, 2, 6, 8), (2, 6), ((2,), INTEGER), NONE],
            *[(0,), (0,), ((0,), INTEGER)],
        ],
        [(2, 3, 16), (2, 2, 6, 8), (2, 2, 6, 8)],
        SCORES | WINDOW,
        [
            (0, (2, 3, 40)),
            (0, (2, 7, 48)),
            (0, (2, 7, 48), 9, (2, 7, 16)),
            (0, (2, 3, 56), 3, (3, 6), 9, (2, 3, 24)),
            (0, (6, 48)),
            (1, (2, 2, 5, 8)),
            (1, (6, 8)),
            (2, (2, 2, 5, 8)),
            (3, (2, 5)),
            (4, ((1,), INTEGER)),
            (4, (2,)),
            (5, ((5,), bool)),
            (6, (2, 2, 4, 8), 7, (2, 2, 4, 8), 8, ((2,), INTEGER)),
            (9, (2, 2, 16)),
            (10, (2, 2, 5, 8)),
            (11, (1, 2, 6, 8)),
        ],
    ),
    "specdec_node_attention": (
        [
            (2, 3, 48),
            (2, 2, 6, 8),
            (2, 2, 6, 8),
            (0, 0),
            ((2,), INTEGER),
            ((2, 3), INTEGER),
            ((2, 3, 5), INTEGER),
            NONE,
            (2, 2, 4, 8),
            (2, 2, 4, 8),
            ((2,), INTEGER),
        ],
        [(2, 3, 16), (2, 2, 6, 8), (2, 2, 6, 8)],
        SCORES | WINDOW,
        [
            (0, (2, 3, 40)),
            (0, (2, 7, 48)),
            (0, (6, 48)),
            (1, (2, 2, 5, 8)),
            (1, (6, 8)),
            (2, (2, 2, 5, 8)),
            (3, (2, 4)),
            (4, ((1,), INTEGER)),
            (4, (2,)),
            (5, ((2, 2), INTEGER)),
            (6, ((2, 2, 5), INTEGER)),
            (6, ((2, 15), INTEGER)),
            (3, (2, 5)),
            (7, ((5,), bool)),
            (8, (2, 2, 5, 8)),
            (9, (0,)),
            (10, ((1,), INTEGER)),
            (11, (2, 2, 16)),
            (12, (2, 2, 5, 8)),
            (13, (1, 2, 6, 8)),
        ],
    ),
    "specdec_angles": (
        [((2, 3), INTEGER), (4,)],
        [(2, 3, 4), (2, 3, 4)],
        {},
        [(0, (2, 3)), (1, (5,)), (2, (2, 3, 5)), (3, (2, 2, 4))],
    ),
    "specdec_heads": (
        [(2, 3, 16), (2, 3, 8), (2, 3, 8), (8,), (8,), (3, 4), (3, 4), NONE],
        [(2, 3, 32)],
        {"features": np.int64(8)},
        [
            (0, (2, 3, 20)),
            (0, (2, 2, 16)),
            (0, ()),
            (1, (2, 2, 8)),
            (1, (2, 3, 4)),
            (2, (2, 3, 16)),
            (3, (16,)),
            (4, (4,)),
            (5, (3, 8)),
            (5, (4, 4), 6, (4, 4)),
            (6, (2, 4)),
            (7, ((5,), bool)),
            (8, (2, 3, 24)),
        ],
    ),
    "specdec_move": (
        [(2, 2, 6, 8), (2, 2, 6, 8), ((2, 3), INTEGER), ((2,), INTEGER)],
        [(2, 2, 6, 8), (2, 2, 6, 8)],
        {},
        [
            (0, (2, 2, 5, 8)),
            (0, (6, 8)),
            (1, (2, 2, 5, 8)),
            (2, ((2, 7), INTEGER)),
            (2, ((6,), INTEGER)),
            (2, (2, 3)),
            (3, ((1,), INTEGER)),
            (4, (2, 2, 5, 8)),
            (5, (1, 2, 6, 8)),
        ],
    ),
    "specdec_cross_attention": (
        [(2, 3, 16), (2, 2, 6, 8), (2, 2, 6, 8), ((2,), INTEGER), NONE],
        [(2, 3, 16)],
        SCORES,
        [
            (0, (2, 3, 20)),
            (0, (3, 16)),
            (1, (2, 2, 5, 8)),
            (1, (6, 8)),
            (2, (2, 2, 5, 8)),
            (3, ((1,), INTEGER)),
            (4, ((5,), bool)),
            (5, (2, 2, 16)),
        ],
    ),
    "specdec_encoder_attention": (
        [(2, 6, 48), (2, 11), ((2,), INTEGER)],
        [(2, 6, 16)],
        {"divisor": np.float32(1), "cap": np.float32(0), "ahead": np.int64(0)} | WINDOW,
        [
            (0, (2, 6, 50)),
            (0, (2, 5, 48)),
            (0, (12, 48)),
            (1, (2, 10)),
            (1, (2, 11, 1)),
            (2, ((3,), INTEGER)),
            (3, (2, 5, 16)),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", CALLS)
def test_shapes_that_do_not_fit(target):
    arguments, results, attributes, misfits = CALLS[target]

    def call(shapes):
        shapes = [
            shape if shape and isinstance(shape[0], tuple) else (shape, FLOAT) for shape in shapes
        ]
        outputs = [jax.ShapeDtypeStruct(*shape) for shape in shapes[len(arguments) :]]
        return jax.block_until_ready(
            jax.ffi.ffi_call(target, outputs)(
                *[jnp.zeros(*shape) for shape in shapes[: len(arguments)]], **attributes
            )
        )

    assert len(call([*arguments, *results])) == len(results)
    for misfit in misfits:
        shapes = [*arguments, *results]
        for place, shape in zip(misfit[::2], misfit[1::2]):
            shapes[place] = shape
        with pytest.raises(jax.errors.JaxRuntimeError, match="specdec_jax: |Wrong buffer dtype"):
            call(shapes)


@pytest.mark.parametrize(
    "name, value", [("before", 5), ("before", -1), ("first", 5), ("second", -1)]
)
def test_norms_and_activations_that_are_unknown(name, value):
    arguments = [
        jnp.zeros(*(shape if isinstance(shape[0], tuple) else (shape, FLOAT)))
        for shape in CALLS["specdec_product_f32"][0]
    ]
    call = jax.ffi.ffi_call("specdec_product_f32", jax.ShapeDtypeStruct((4, 33), FLOAT))
    with pytest.raises(
        jax.errors.JaxRuntimeError,
        match="specdec_jax: product: expected a kind of norm or activation",
    ):
        jax.block_until_ready(call(*arguments, **{**PLAIN, name: np.int64(value)}))


def test_every_target_is_tried_with_other_shapes():
    assert set(CALLS) == set(native.TARGETS)
