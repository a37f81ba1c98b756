"""Every matrix product in float32 asks a TPU's compiler for the highest precision."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from random_heads_of import random_heads
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding.generate import advance
from specdec_jax.models.network import Network

pytestmark = pytest.mark.usefixtures("quick", "as_on_an_accelerator")
V, GAMMA = 24, 2
INPUTS, TOKENS = np.array([[3, 4, 5]], np.int32), np.array([[0, 6, 7, 8]], np.int32)
DTYPES = ("float32", "bfloat16")


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """Models as they are there: XLA multiplies their weights, not the CPU's own product."""
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)


@functools.cache
def t5(dtype: str, tied: bool = False) -> sd.LanguageModel:
    return tiny_t5(0, V, dtype=dtype, logits_via_embedding=tied)


@functools.cache
def gpt(dtype: str) -> sd.LanguageModel:
    return sd.LanguageModel.random(sd.GPTConfig(V, 16, 2, 2, 32, num_positions=32, dtype=dtype))


def weight(dtype: str) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, V)).astype(dtype)


DECODING = {
    "model": lambda dtype: (t5(dtype), sd.ModelDrafter(t5(dtype), shortlist=12)),
    "plain, the embedding as head": lambda dtype: (t5(dtype, True), None),
    "early exit with a head": lambda dtype: (
        t5(dtype),
        sd.EarlyExitDrafter(t5(dtype), 1, weight(dtype)),
    ),
    "heads": lambda dtype: (t5(dtype), random_heads(t5(dtype))),
    "GPT": lambda dtype: (gpt(dtype), sd.ModelDrafter(gpt(dtype))),
}


def loop(name: str, dtype: str):
    """`advance` and its arguments."""
    target, drafter = DECODING[name](dtype)
    state, request = sd.prepare(target, INPUTS, drafter=drafter, gamma=GAMMA, max_new_tokens=8)
    return advance, (request.network, request.drafter, state, np.int32(1))


def gradients(network: Network):
    """Those of the sum of a T5's teacher-forced logits, as training computes them."""

    def loss(params):
        return jnp.sum(network.replace(params=params).teacher_forced(INPUTS, np.array([3]), TOKENS))

    return jax.grad(loss)(network.params)


OTHERS = {
    "prefill": (lambda network: network.prefill(INPUTS, np.array([3]), slots=16), t5),
    "teacher-forced": (lambda network: network.teacher_forced(INPUTS, np.array([3]), TOKENS), t5),
    "teacher-forced GPT": (
        lambda network: network.module.apply({"params": network.params}, TOKENS),
        gpt,
    ),
    "gradients": (gradients, t5),
}


def products(text: str) -> list[tuple[str, str]]:
    """(dtype of the operands, precision that is asked for) of each product in StableHLO."""
    lines = [line for line in text.splitlines() if "stablehlo.dot" in line]
    return [
        (
            re.search(r": \(tensor<(?:\d+x)*(\w+)>, tensor<(?:\d+x)*\1>\)", line)[1],
            re.search(r"precision = \[(\w+), \1\]", line)[1],
        )
        for line in lines
    ]


CASES = [(name, "float32") for name in (*DECODING, *OTHERS)] + [
    (name, "bfloat16") for name in ("model", "GPT")
]


@tiers.parametrize(("name", "dtype"), CASES, first=1)
def test_every_product_asks_for_the_precision_of_its_dtype(name, dtype):
    """Lowered for a TPU: the highest precision for float32, none for bfloat16."""
    if name in DECODING:
        function, arguments = loop(name, dtype)
    else:
        function, model = OTHERS[name]
        function, arguments = jax.jit(function), (model(dtype).network,)
    found = products(function.trace(*arguments).lower(lowering_platforms=("tpu",)).as_text())
    assert len(found) >= 8
    assert set(found) == {("f32", "HIGHEST") if dtype == "float32" else ("bf16", "DEFAULT")}


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_for_a_tpu(dtype, optimised, monkeypatch):
    """Compiled ahead of time, every product left to the matrix unit has the precision, too."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra tpu-aot")
    from jax.experimental import topologies

    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends the process at flags of a CPU's compiler
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore"
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    function, arguments = loop("model", dtype)

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    text = function.lower(*jax.tree.map(place, arguments)).compile().as_text()
    lines = [line for line in text.splitlines() if re.search(r" (?:dot|convolution)\(", line)]
    precise = ["operand_precision={highest,highest}" in line for line in lines]
    assert len(lines) >= 8
    assert set(precise) == {dtype == "float32"}
