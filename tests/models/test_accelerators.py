"""Caches as accelerators have them, tried on a CPU: tokens, and where a NaN may reach."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.backend import Backend, GPUBackend, TPUBackend, choose_backend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.kv_cache import KVCache, take_slots, take_slots_one_by_one
from specdec_jax.backends.tpu import fused_step
from specdec_jax.backends.tree_positions import Nodes, WindowNodes
from specdec_jax.backends.xla import AttentionShape
from specdec_jax.decoding.generate import advance
from tools.compiled_text import loop_copies

pytestmark = pytest.mark.usefixtures("quick", "as_on_an_accelerator")
V = 24
INPUTS = np.array([[3, 4, 5, 6], [7, 8, 9, 0], [10, 0, 0, 0]], np.int32)


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    """XLA multiplies the weights, not the CPU's own product."""
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)


def t5(**shape) -> sd.LanguageModel:
    return tiny_t5(0, V, num_heads=6, head_dim=32, **shape)


def wide(**shape) -> sd.LanguageModel:
    """A T5 of which one head fills the lanes of a TPU's tile."""
    return tiny_t5(0, V, num_heads=2, head_dim=128, **shape)


def gpt() -> sd.LanguageModel:
    return sd.LanguageModel.random(sd.GPTConfig(V, 32, 4, 2, 32, num_positions=40))


def laid_out(model: sd.LanguageModel, platform: str) -> sd.LanguageModel:
    model.network = model.network.with_backend(platform)
    return model


MODES = {
    "chain": dict(gamma=3),
    "tree": dict(tree=sd.Tree.uniform((2, 1, 1))),
    "beams": dict(num_beams=2, gamma=2),
}


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "rows"),
    [(t5, 1), (gpt, 3), pytest.param(t5, 3, marks=SLOW), pytest.param(gpt, 1, marks=SLOW)],
)
def test_logits_do_not_depend_on_the_layout_of_caches(family, rows):
    """In calls over one and several positions, and over nodes of a tree."""
    found = []
    for platform in ("cpu", "gpu", "tpu"):
        network = laid_out(family(), platform).network
        found.append(calls(network, INPUTS[:rows, :0] if family is gpt else INPUTS[:rows]))
    for other in found[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), other, found[0]
        )


@jax.jit
def calls(network, inputs):
    rows = len(inputs)
    begun = network.prefill(inputs, jnp.full(rows, inputs.shape[1]), 7)
    starts, tokens = jnp.arange(rows), jnp.arange(4 * rows).reshape(rows, 4) + 2
    several, cache = network.decode(tokens, jnp.zeros(rows, int), begun)
    one, cache = network.decode(tokens[:, :1], starts + 1, cache)
    depths = jnp.tile(jnp.array([0, 1, 1]), (rows, 1))
    lines = jnp.tile(jnp.array([[0, 0], [0, 1], [0, 2]]), (rows, 1, 1))
    nodes = WindowNodes(starts + 2, starts + 2, depths, lines, 12)
    states, _ = network.decode_nodes(tokens[:, :3], nodes, network.node_cache(cache, 12, 12))
    return several, one, network.head(states)


@jax.jit
def wide_calls(network, inputs):
    """Calls over more tokens than a tile has rows, and one over a single token that sees them."""
    rows = len(inputs)
    begun = network.prefill(inputs, jnp.full(rows, inputs.shape[1]), 40)
    tokens, zeros, found = (
        jnp.arange(16 * rows).reshape(rows, 16) % (V - 2) + 2,
        jnp.zeros(rows, int),
        [],
    )
    for count in (9, 15, 16):
        several, cache = network.decode(tokens[:, :count], zeros, begun)
        one, cache = network.decode(tokens[:, :1], zeros + count, cache)
        found += [
            several,
            one,
            jnp.reshape(cache.layers[0].value[..., :count, :], (rows, -1)).sum(axis=1),
        ]
    lines = jnp.tile(jnp.arange(15)[:, None] * jnp.array([0, 1]), (rows, 1, 1))
    nodes = WindowNodes(
        zeros + 17, zeros + 17, jnp.minimum(jnp.arange(15), 1)[None] + zeros[:, None], lines, 40
    )
    states, _ = network.decode_nodes(tokens[:, :15], nodes, network.node_cache(cache, 40, 40))
    return found, network.head(states)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "rows"), [(t5, 1), (t5, 3), (wide, 1)])
def test_tokens_that_fill_tiles_change_nothing(family, rows):
    plain, filled = (
        wide_calls(laid_out(family(), platform).network, INPUTS[:rows])
        for platform in ("cpu", "tpu")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), filled, plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", [t5, wide])
def test_nine_tokens_are_computed_as_whole_tiles(family):
    """Of one row always, of three rows only fifteen or sixteen; on a TPU alone."""

    def widest(platform, rows, count):
        network = laid_out(family(emb_dim=40, mlp_dim=36), platform).network
        cache = network.prefill(INPUTS[:rows], jnp.full(rows, 4), 40)

        def call(tokens):
            return network.decode_states(tokens, jnp.zeros(rows, int), cache)[0]

        text = str(jax.make_jaxpr(call)(jnp.zeros((rows, count), int)))
        hidden = 2 * network.config.mlp_dim  # both parts of the gate; the weight is [40, hidden]
        (number,) = {int(found) for found in re.findall(rf"\[(\d+),{hidden}\]", text)} - {40}
        return number

    assert [widest("tpu", 1, count) for count in (7, 8, 9, 16)] == [8, 8, 16, 16]
    assert [widest("tpu", 3, count) for count in (7, 9, 15)] == [21, 27, 48]
    assert [widest("gpu", 1, count) for count in (1, 7, 9)] == [2, 7, 9]


def test_how_many_tokens_fill_tiles():
    def paddings(rows, *counts):
        return [TPUBackend().count_padding(rows, count) for count in counts]

    assert paddings(1, 1, 5, 8, 9, 16, 28, 65) == [0, 0, 0, 7, 0, 4, 7]
    assert paddings(4, 8, 9, 13, 15, 28, 65) == [0, 0, 0, 1, 4, 7]
    assert GPUBackend().count_padding(1, 9) == 0 == Backend().count_padding(1, 9)


@pytest.mark.parametrize("rows", [1, 3])
def test_slots_are_taken_one_by_one_or_together(rows):
    cache = KVCache.empty(rows, 2, 16, 4, jnp.float32)
    keys = jnp.arange(cache.key.size, dtype=jnp.float32).reshape(cache.key.shape)
    sources = jnp.array([[3, 15, 0], [1, 1, 7], [14, 2, 5]])[:rows]
    np.testing.assert_array_equal(take_slots_one_by_one(keys, sources), take_slots(keys, sources))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [t5, gpt])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_do_not_depend_on_the_layout_of_caches(family, mode, rows):
    found = []
    for platform in ("cpu", "gpu", "tpu"):
        target = laid_out(family(), platform)
        drafter = sd.ModelDrafter(laid_out(noisy_copy(family(), 0.1), platform))
        found.append(
            sd.generate(target, INPUTS[:rows], drafter=drafter, max_new_tokens=9, **MODES[mode])
        )
    for other in found[1:]:
        np.testing.assert_array_equal(other.tokens, found[0].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_a_token_of_nan_that_is_rejected_reaches_nothing(platform):
    """The target reads a drafted token with NaN for embedding, keys and values."""
    plain = sd.generate(t5(), INPUTS, max_new_tokens=12)
    never = next(
        token for token in range(2, V) if token not in plain.tokens and token not in INPUTS
    )
    target = laid_out(t5(), platform)
    embedding = target.network.params["token_embedder"]["embedding"]
    embedding = embedding.at[never].set(jnp.nan)
    target.network.params["token_embedder"]["embedding"] = embedding
    found = sd.generate(target, INPUTS, drafter=sd.RandomDrafter(V), gamma=4, max_new_tokens=12)
    np.testing.assert_array_equal(found.tokens, plain.tokens)


@pytest.mark.parametrize("batch", [1, 2])
def test_who_sees_a_value_that_is_not_finite_gets_nan_from_its_key(batch):
    new = jnp.ones((batch, 1, 2, 4))
    bad = new.at[:, :, 1, 2].set(jnp.inf)
    backend, heads = TPUBackend(), AttentionShape(2, 2, jnp.float32)
    cache = backend.append(backend.empty_cache(batch, 5, heads), new, bad, jnp.full(batch, 3))
    key, value = (np.asarray(x).reshape(batch, 16, 4) for x in (cache.key, cache.value))
    assert (
        np.all(np.isfinite(value))
        and np.all(value[:, 3] == 1)
        and np.all(value[:, 4] == [1, 1, 0, 1])
    )
    assert np.all(np.isnan(key[:, 4]) == [False, False, True, False]) and np.all(
        np.isfinite(key[:, :4])
    )
    assert cache.slots == 16 and np.all(value[:, 5:] == 0)


def test_as_many_heads_lie_side_by_side_as_fill_a_tile_and_a_mesh_can_divide():
    small, wide = (AttentionShape(6, features, jnp.float32) for features in (32, 128))

    def heads_per_tile(platform, shape, rules=None):
        return choose_backend(platform, rules).heads_per_tile(shape)

    assert [heads_per_tile(platform, small) for platform in ("cpu", "gpu", "tpu")] == [None, 1, 3]
    assert heads_per_tile("tpu", wide) == 1
    three_parts = type("Rules", (), {"parts": 3})
    assert heads_per_tile("tpu", small, three_parts) == 2


@pytest.mark.slow
def test_two_positions_cost_what_one_does_but_for_several_rows_of_xlas_on_a_tpu(monkeypatch):
    def free(platform, rows):
        network = laid_out(t5(), platform).network
        return network.pairs_are_free(
            network.prefill(jnp.ones((rows, 4), int), jnp.full(rows, 4), 7)
        )

    assert (
        not free("cpu", 1)
        and free("gpu", 1)
        and free("gpu", 9)
        and free("tpu", 1)
        and not free("tpu", 2)
    )
    monkeypatch.setattr(
        fused_step, "supports_call", lambda module, params, shape, cache, layers: shape == (2, 2)
    )
    assert free("tpu", 2) and not free("tpu", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("platform", "min_query_len"), [("gpu", 2), ("tpu", 8)])
@pytest.mark.parametrize("family", [gpt, t5, wide])
def test_few_positions_of_a_row_are_fed_as_more(family, platform, min_query_len):
    """A GPU feeds two positions for one, a TPU eight for up to seven.

    The others write nothing into the sequence, in the last slots neither.
    """
    inputs, tokens = INPUTS[:1, : 0 if family is gpt else 4], np.arange(16) % (V - 2) + 2
    widths, found = [], []
    for layout in ("cpu", platform):
        network = laid_out(family(), layout).network
        step = type(network.module).decode_states

        def noted(self, x, *rest, step=step):
            return widths.append(x.shape) or step(self, x, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(network.module), "decode_states", noted)
            cache = network.prefill(inputs, jnp.full(1, inputs.shape[1]), 16)
            for position, token in enumerate(tokens):
                logits, cache = network.decode(jnp.array([[token]]), jnp.array([position]), cache)
                found.append(logits)
            again, _ = network.decode(jnp.array([tokens[-3:]]), jnp.array([13]), cache)
            assert again.shape == (1, 3, V)
            found.append(again[:, -1:])
    assert widths == [(1, 1)] * 16 + [(1, 3)] + [(1, min_query_len)] * 16 + [
        (1, max(3, min_query_len))
    ]
    np.testing.assert_allclose(found[17:], found[:17], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[-1], found[-2], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_for_nodes_has_the_slots_that_were_asked_for(platform, rows):
    """Whether or not the cache for sequences, which has more for one row, fills one more tile."""
    found = []

    def ask(network, slots):
        cache = network.prefill(jnp.ones((rows, 4), int), jnp.full(rows, 4), slots)
        found.append(network.node_cache(cache, slots, slots).layers[0].slots)

    for slots in range(16, 33):
        jax.eval_shape(lambda network: ask(network, slots), laid_out(t5(), platform).network)
        assert found[-1] >= slots and found[-1] % 16 == 0


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize("most", [24, 25, 30, 31])
def test_a_tree_of_one_row_decodes_whatever_slots_it_has(platform, most):
    plain = sd.generate(t5(), INPUTS[:1], max_new_tokens=most)
    target = laid_out(t5(), platform)
    drafter = sd.ModelDrafter(laid_out(noisy_copy(t5(), 0.1), platform))
    found = sd.generate(
        target, INPUTS[:1], drafter=drafter, tree=sd.Tree.uniform((2, 1)), max_new_tokens=most
    )
    np.testing.assert_array_equal(found.tokens, plain.tokens)


def test_inputs_without_any_id():
    model = t5()
    assert model.logits(np.zeros((2, 0)), np.ones((2, 3), int), [0, 0]).shape == (2, 3, V)


@pytest.mark.slow
def test_several_rows_are_fed_as_they_are():
    network = laid_out(t5(), "tpu").network
    cache = network.prefill(INPUTS, jnp.full(3, 4), 16)
    call = jax.make_jaxpr(lambda *given: network.decode(*given)[0])(
        INPUTS[:, :1], jnp.zeros(3, int), cache
    )
    assert "[3,1,16]" in str(call) and "[3,8,16]" not in str(call)


@pytest.mark.slow
def test_distances_of_nodes_in_eights_are_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    nodes = Nodes(
        jnp.zeros(2, int),
        jnp.asarray(rng.integers(0, 7, (2, 11))),
        jnp.asarray(rng.integers(0, 30, (2, 11, 8))),
    )
    expected = nodes.distances(30)
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments)
    )
    np.testing.assert_array_equal(nodes.distances(30), expected)
    assert expected.max() > 2


@pytest.fixture
def int8() -> bool:
    """Whether both models of `program` are in int8."""
    return False


@pytest.fixture
def program(rows, int8, optimised, monkeypatch) -> str:
    """The text of the decode loop as a TPU v4's compiler leaves it."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra tpu-aot")
    from jax.experimental import topologies

    monkeypatch.setenv("XLA_FLAGS", "")  # libtpu ends the process at flags of a CPU's compiler
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore"
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def place(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)

    shape = dict(num_heads=6, head_dim=64, emb_dim=512, mlp_dim=1024, dtype="bfloat16")
    monkeypatch.setattr(packed_weights, "has_accelerator", lambda: True)
    target = laid_out(tiny_t5(0, 256, **shape), "tpu")
    if int8:
        target = laid_out(sd.LanguageModel.random(target.config, quantize="int8"), "tpu")
    drafter = sd.ModelDrafter(
        laid_out(tiny_t5(1, 256, **shape, decoder_layers=1), "tpu"), int8=int8
    )

    inputs = np.full((rows, 128), 3, np.int32)
    state, request = sd.prepare(target, inputs, drafter=drafter, gamma=7, max_new_tokens=128)
    arguments = jax.tree.map(place, (request.network, request.drafter, state, np.int32(9)))
    return advance.lower(*arguments).compile().as_text()


def results(text: str, operation: str) -> set[str]:
    """The shapes, with layouts, that instructions of one kind give."""
    return set(re.findall(rf"= (\w+\[[\d,]*\]\{{[\d,]*)\S* {operation}\(", text))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_what_a_tpu_does_not_waste(program, rows):
    """A TPU copies no cache and no weight, and keeps one layout for calls of every width.

    The cache has 144 slots for three pairs of heads. Its matrix unit multiplies single rows, too,
    without sums in bfloat16. Kernels multiply the tokens of all rows as one matrix. A draft step
    over two positions, and one that only catches up, is a single kernel, beside the head.
    """
    shape = "[3,144,128]" if rows == 1 else "[8,3,144,128]"
    changed = results(program, "copy") | results(program, "select")
    assert changed and not [found for found in changed if shape in found]
    layout = "2,1,0" if rows == 1 else "3,2,1,0"
    assert set(re.findall(rf"bf16{re.escape(shape)}{{([\d,]*)", program)) == {layout}
    weights = r"bf16\[(?:512,(?:384|1152|2048|256)|384,512|1024,512)\]"
    assert re.search(weights, program)
    assert not [found for found in results(program, "copy") if re.match(weights, found)]
    products = [line for line in program.splitlines() if "/dot_general" in line]
    assert [line for line in products if re.search(r" (?:convolution|dot)\(", line)]
    assert not [line for line in products if " reduce(" in line]
    assert re.search(rf"bf16\[{8 * rows},1152\]\S* convolution\(", program)
    assert not re.search(rf"bf16\[{rows},8,\d+\]\S* convolution\(", program)
    assert len(re.findall(r"%fused_step\S* = .* custom-call\(", program)) == 2 and not loop_copies(
        program
    )


@pytest.mark.slow
@pytest.mark.parametrize("int8", [True])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_tpu_reads_8_bits_and_writes_no_widened_weight(program):
    """A TPU's matrix unit multiplies bfloat16 by int8 and adds up in float32.

    No instruction widens or copies a weight of a decoder step.
    """
    shapes = r"\[(?:512,(?:1152|2048|256)|1024,512)\]"
    assert len(set(re.findall(rf"s8{shapes}", program))) == 4
    assert not re.search(rf"(?:bf16|f32|s32|f16){shapes}", program)
    entry = program[program.index("\nENTRY") :]
    copied = results(entry, "copy") | set(loop_copies(program, least=1))
    assert copied and not [found for found in copied if found.startswith("s8")]
    products = [line for line in program.splitlines() if "/dot_general" in line]
    assert [line for line in products if re.search(r" convolution\(", line)]
    assert not [line for line in products if " reduce(" in line]
