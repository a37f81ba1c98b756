"""Position tables per layer (T5X's `scalable_t5`, umT5) in every format and drafter."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import make_checkpoints as make
import numpy as np
import pytest
import tiers
from golden_models import DRAFTERS, GOLDEN, engine_tokens, greedy_tokens

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.tree_positions import Nodes, WindowNodes
from specdec_jax.checkpoints import t5x
from specdec_jax.models import parameters
from specdec_jax.models.families import build_config, describe
from specdec_jax.models.network import initial_params
from specdec_jax.models.relative_bias import (
    RelativePositionBias,
    make_window_mask,
    relative_position_bucket,
    slice_biases,
)
from specdec_jax.training.depth_expansion import deepen
from specdec_jax.training.losses import Objective, loss_fn

pytestmark = pytest.mark.usefixtures("quick")
TINY = dataclasses.replace(make.TINY, relative_bias_per_layer=True)
NAMES_OF_TABLES = [f"{stack}/{stack}/relpos_bias/rel_embedding" for stack in ("encoder", "decoder")]


def read_golden() -> tuple[sd.T5Config, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns the shape, T5X's parameters by its names, and what it computed.

    `scripts/write_golden_scalable_t5.py` describes them.
    """
    arrays = dict(np.load(GOLDEN / "t5x_scalable_t5.npz"))
    shape = json.loads(str(arrays.pop("config")))
    params = {name: arrays.pop(name) for name in list(arrays) if "/" in name}
    return sd.T5Config(**shape, relative_bias_per_layer=True), params, arrays


SHAPE, PARAMS, IO = read_golden()


def unrolled() -> dict[str, np.ndarray]:
    """Returns T5X's parameters as with `scan_layers = False`, heads and features apart."""
    found = {}
    for name, x in PARAMS.items():
        stack, *path = name.split("/")
        if path[0] == stack:
            found |= {
                "/".join([stack, f"layers_{i}", *path[1:]]): x[:, i] for i in range(x.shape[1])
            }
        else:
            found[name] = x
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """T5X's checkpoint."""
    place = tmp_path_factory.mktemp("scalable_t5")
    make.write_t5x_orbax(place / "checkpoint_7", PARAMS)
    return place


@pytest.fixture(scope="module")
def model(folder):
    return sd.load(folder, "float32")


# What T5X computes.


def test_logits_are_t5xs(model):
    assert dataclasses.replace(model.config, dropout_rate=0.0) == SHAPE
    logits = model.logits(IO["inputs"], IO["decoder_tokens"], IO["input_lengths"])
    np.testing.assert_allclose(logits, IO["logits"], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_t5xs(model, drafter):
    assert IO["greedy_margin"].min() > 0.01  # far above what logits may differ by
    steps = IO["greedy"].shape[1]
    np.testing.assert_array_equal(
        greedy_tokens(model, IO["inputs"], IO["input_lengths"], steps), IO["greedy"]
    )
    tokens = engine_tokens(model, IO["inputs"], IO["input_lengths"], steps, (), drafter=drafter)
    np.testing.assert_array_equal(tokens, IO["greedy"])


def test_without_the_cpus_own_kernels(model, folder, monkeypatch):
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    plain = sd.load(folder, "float32")
    assert not plain.network.backend.packs_weights
    tokens = engine_tokens(
        plain, IO["inputs"], IO["input_lengths"], IO["greedy"].shape[1], (), drafter="speculative"
    )
    np.testing.assert_array_equal(tokens, IO["greedy"])


def test_each_table_is_in_its_layer(model):
    """T5X's table of layer i, axis 1 of the stacked ones, is what layer i has here."""
    for stack, name in zip(("encoder", "decoder"), NAMES_OF_TABLES, strict=True):
        for layer in range(PARAMS[name].shape[1]):
            table = model.params[stack][f"layers_{layer}"]["relpos_bias"]["rel_embedding"]
            np.testing.assert_array_equal(table, PARAMS[name][:, layer])
        assert "relpos_bias" not in model.params[stack]


@pytest.mark.filterwarnings("ignore")  # TensorFlow's
@pytest.mark.parametrize("scanned", [True, False])
def test_t5x_itself_computes_the_same(scanned, tmp_path):
    """Its network with the golden parameters, scanned or not; where T5X is installed."""
    network = pytest.importorskip("t5x.examples.scalable_t5.network")
    from specdec_jax.interop import t5x as interop

    names = (
        "vocab_size",
        "emb_dim",
        "num_heads",
        "head_dim",
        "num_encoder_layers",
        "num_decoder_layers",
        "mlp_dim",
    )
    shape = {name: getattr(SHAPE, name) for name in (*names, "mlp_activations")}
    module = network.Transformer(network.T5Config(**shape, dropout_rate=0.0, scan_layers=scanned))
    inputs, tokens = IO["inputs"], IO["decoder_tokens"]

    def init():
        return module.init(jax.random.key(0), inputs, tokens, tokens, enable_dropout=False)

    shapes = {
        name: leaf.shape
        for name, leaf in parameters.flatten(jax.eval_shape(init)["params"]).items()
    }
    flat = PARAMS if scanned else unrolled()
    assert shapes == {name: x.shape for name, x in flat.items()}
    make.write_t5x_orbax(tmp_path / "checkpoint_1", flat)
    params = {"params": parameters.unflatten(flat)}
    expected = module.apply(params, inputs, tokens, np.ones_like(tokens), enable_dropout=False)
    ours = sd.load(tmp_path, "float32")
    assert ours.config.relative_bias_per_layer
    np.testing.assert_allclose(
        ours.logits(inputs, tokens, IO["input_lengths"]), expected, rtol=0, atol=1e-4
    )
    with pytest.raises(
        ValueError, match="expected t5x.examples.t5.network.Transformer, not scanned"
    ):
        interop.read_config(module)


# A bias depends on distance only.


def test_a_window_of_nodes_is_that_of_a_sequence():
    """Of a chain whose nodes lie in the slots of their positions."""
    slots, window, first, depths = 9, 3, 2, np.arange(4, dtype=np.int32)[None]
    start, positions = np.array([first], np.int32), first + depths
    paths = np.tile(np.arange(slots, dtype=np.int32), (1, 4, 1))
    lines = np.tile(depths, (1, 4, 1))
    causal = np.arange(slots) <= positions[..., None]
    expected = causal & (np.arange(slots) > positions[..., None] - window)
    for nodes in (
        None,
        Nodes(start, positions, paths),
        WindowNodes(start, start, depths, lines, slots),
    ):
        found = make_window_mask(jnp.asarray(positions), jax.tree.map(jnp.asarray, nodes), 9, 3)
        np.testing.assert_array_equal(np.asarray(found)[:, 0] & causal, expected)


def test_distances_at_an_edge_have_the_buckets_of_t5x():
    """They are computed in float32: in float64 each would be one bucket lower."""
    distances = -np.array([10, 20, 80])
    assert relative_position_bucket(distances, False, 10, 160).tolist() == [6, 7, 9]
    assert relative_position_bucket(distances, True, 20, 160).tolist() == [6, 7, 9]


@pytest.mark.parametrize("slots", [9, 100])
@pytest.mark.parametrize("queries", [1, 2, 8, 9])
@pytest.mark.parametrize("rows", [2, 40])
def test_slices_of_shifted_rows_are_the_bias_of_every_query(slots, queries, rows):
    """Up to the last query position, over more positions and rows than are shifted one by one."""
    table = RelativePositionBias(3, 6, 20, bidirectional=False)
    params = table.init(jax.random.key(0), 1, 1)
    whole = np.asarray(table.apply(params, slots, slots))
    shifted = table.apply(params, slots, method="shifted")
    positions = np.arange(rows) * 7 % (slots - queries + 1)
    positions[-1] = slots - queries
    found = slice_biases(jnp.asarray(positions), queries, shifted, slots)
    expected = [whole[first : first + queries].transpose(1, 0, 2) for first in positions]
    seen = np.arange(slots) <= (positions[:, None] + np.arange(queries))[:, None, :, None]
    np.testing.assert_array_equal(np.where(seen, found, 0), np.where(seen, expected, 0))
    np.testing.assert_array_equal(table.apply(params, slots, method="last_query_bias"), whole[-1])


@pytest.mark.parametrize("packed", [True, False])
def test_a_cache_grows_no_faster_than_its_slots(packed, folder, monkeypatch):
    """A bias for each pair of positions would take most of the memory of long outputs."""
    if not packed:
        monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    network = sd.load(folder, "float32").network

    def count_numbers(slots):
        given = np.zeros((1, 4), np.int32), np.full(1, 4, np.int32)
        cache = jax.eval_shape(lambda: network.prefill(*given, slots))
        assert cache.position_bias
        return sum(x.size for x in jax.tree.leaves(cache))

    assert count_numbers(2048) <= 2 * count_numbers(1024)


# Formats.


@pytest.mark.parametrize("form", ["legacy", "unrolled", "unrolled, heads joined"])
def test_other_forms_of_it(form, model, tmp_path):
    if form == "legacy":
        make.write_t5x_legacy(tmp_path / "checkpoint_7", PARAMS)
    else:
        params = unrolled()
        if form == "unrolled, heads joined":
            params = {name: np.asarray(x) for name, x in parameters.flatten(model.params).items()}
        make.write_t5x_orbax(tmp_path / "checkpoint_7", params)
    again = sd.load(tmp_path, "float32")
    assert again.config == model.config and again.fingerprint == model.fingerprint


@pytest.mark.parametrize("form", ["specdec", "huggingface", "t5x", "t5x_legacy"])
@pytest.mark.parametrize("by", ["save", "convert"])
def test_round_trips(form, by, model, folder, tmp_path):
    if by == "save":
        sd.save(model, tmp_path / "there", format=form)
    else:
        sd.convert(folder, tmp_path / "there", form)
    again = sd.load(tmp_path / "there", "float32")
    assert again.fingerprint == model.fingerprint and again.config.relative_bias_per_layer
    if form == "huggingface":
        assert json.loads((tmp_path / "there" / "config.json").read_text())["model_type"] == "umt5"


@pytest.mark.parametrize("form", ["t5x", "t5x_legacy"])
def test_t5x_gets_its_own_names_and_numbers_back(form, folder, tmp_path):
    from specdec_jax.checkpoints import tensorstore_arrays

    sd.convert(folder, tmp_path, form)
    (written,) = tmp_path.glob("checkpoint_*")
    if form == "t5x":
        leaves = tensorstore_arrays.open_ocdbt(written / "state", ("target",))
    else:
        leaves = t5x._open_legacy(written)
    assert leaves.keys() == PARAMS.keys()
    for name, x in PARAMS.items():
        got = leaves[name].load(np.float32)
        assert got.shape == x.shape and got.tobytes() == x.tobytes(), name


def test_umt5s_tensors(model, tmp_path):
    """Back from Hugging Face's folder to T5X, by the names of umT5's tensors."""
    sd.convert(GOLDEN / "hf_umt5", tmp_path / "t5x", "t5x")
    there = sd.load(GOLDEN / "hf_umt5", "float32")
    assert sd.load(tmp_path / "t5x", "float32").fingerprint == there.fingerprint
    sd.convert(tmp_path / "t5x", tmp_path / "back", "huggingface")
    assert sd.load(tmp_path / "back", "float32").fingerprint == there.fingerprint
    configs = [
        json.loads((place / "config.json").read_text())
        for place in (GOLDEN / "hf_umt5", tmp_path / "back")
    ]
    kept = (
        "model_type",
        "architectures",
        "tie_word_embeddings",
        "num_decoder_layers",
        "feed_forward_proj",
    )
    assert [configs[0][name] for name in kept] == [configs[1][name] for name in kept]


@pytest.mark.parametrize(
    "tied, separate, expected", [(None, True, True), (True, True, True), (False, True, False)]
)
def test_umt5s_scale(tied, separate, expected, tmp_path):
    """As transformers: where config.json says or implies that the head is tied."""
    tensors = make.to_tensors(make.random_params(TINY))
    options = {} if tied is None else dict(tie_word_embeddings=tied)
    make.write_hf(
        tmp_path, tensors, model_type="umt5", architectures=["UMT5ForConditionalGeneration"]
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("tie_word_embeddings")
    (tmp_path / "config.json").write_text(json.dumps(config | options))
    assert sd.load(tmp_path, "float32").config.scales_outputs == expected


def test_a_umt5_without_a_table_is_rejected(tmp_path):
    tensors = make.to_tensors(make.random_params(TINY))
    lost = "decoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    make.write_hf(
        tmp_path,
        {name: x for name, x in tensors.items() if name != lost},
        model_type="umt5",
        architectures=["UMT5ForConditionalGeneration"],
    )
    expected = (
        "parameter decoder/layers_1/relpos_bias/rel_embedding: got none, expected one of shape"
    )
    with pytest.raises(ValueError, match=expected):
        sd.load(tmp_path, "float32")


def test_equal_tables_are_one_unless_a_configuration_says_otherwise(tmp_path):
    stacked = make.stack_layers(make.PARAMS, heads=2)
    make.write_t5x_orbax(tmp_path / "checkpoint_7", stacked)
    shared = sd.load(tmp_path, "float32")
    own = sd.load(tmp_path, "float32", config=TINY)
    assert not shared.config.relative_bias_per_layer and own.config.relative_bias_per_layer
    arguments = np.array([[3, 4, 5]]), np.array([[0, 6, 7, 8]])
    np.testing.assert_allclose(
        own.logits(*arguments), shared.logits(*arguments), rtol=1e-6, atol=1e-6
    )
    sd.save(
        own, tmp_path / "again", format="t5x"
    )  # what stands beside it says that they are the layers' own
    again = sd.load(tmp_path / "again", "float32")
    assert again.config == own.config and again.fingerprint == own.fingerprint


def test_one_stack_with_tables_of_its_own_gives_them_to_both(tmp_path):
    stacked = make.stack_layers(make.PARAMS)
    stacked[NAMES_OF_TABLES[1]][:, 1] += 1
    make.write_t5x_orbax(tmp_path / "checkpoint_7", stacked)
    config = sd.load(tmp_path, "float32").config
    assert config.relative_bias_per_layer


# What is made of it.


def test_parameter_shapes_are_those_that_it_is_made_with():
    made = jax.eval_shape(lambda key: initial_params(TINY.module(), key), jax.random.key(0))
    assert parameters.parameter_shapes(TINY) == {
        name: leaf.shape for name, leaf in parameters.flatten(made).items()
    }
    tables = [name for name in parameters.parameter_shapes(TINY) if "relpos_bias" in name]
    assert len(tables) == TINY.num_encoder_layers + TINY.num_decoder_layers
    assert build_config(describe(TINY)) == TINY


DRAFTED = {
    "model": lambda target: sd.ModelDrafter(
        sd.LanguageModel.random(dataclasses.replace(TINY, vocab_size=48), 3)
    ),
    "shared tables": lambda target: sd.ModelDrafter(
        sd.LanguageModel.random(dataclasses.replace(make.TINY, vocab_size=48), 3)
    ),
    "exit": lambda target: sd.EarlyExitDrafter(target, 1),
    "8 bits": lambda target: sd.ModelDrafter(target, int8=True),
    "shortlist": lambda target: sd.ModelDrafter(target, shortlist=np.arange(1, 40)),
}


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTED)
def test_every_kind_of_draft_leaves_the_tokens(drafter, model):
    result = sd.generate(
        model,
        IO["inputs"],
        input_lengths=IO["input_lengths"],
        eos_ids=(),
        drafter=DRAFTED[drafter](model),
        gamma=3,
        max_new_tokens=IO["greedy"].shape[1],
    )
    np.testing.assert_array_equal(result.tokens, IO["greedy"])
    assert result.stats.drafted > 0


def test_refilled_rows_and_samples(model):
    """The tables belong to all rows: rows that are placed one by one decode as in a batch."""
    rows = [IO["inputs"][i, :length].tolist() for i, length in enumerate(IO["input_lengths"])] * 2
    outputs = dict(
        sd.decode_stream(
            model, rows, batch_size=2, eos_ids=(), max_new_tokens=IO["greedy"].shape[1]
        )
    )
    for place in range(len(rows)):
        np.testing.assert_array_equal(outputs[place][0].tokens, IO["greedy"][place % 3])


@tiers.parametrize("dtype", ["float32", "bfloat16"], first=1)
def test_speculative_decoding_is_plain_decoding(dtype, folder):
    target = sd.load(folder, dtype)
    arguments = (IO["inputs"], IO["input_lengths"], 12, ())
    plain, drafted = (engine_tokens(target, *arguments, drafter=name) for name in DRAFTERS)
    np.testing.assert_array_equal(plain, drafted)


@pytest.mark.slow
def test_in_8_bits(folder, model, tmp_path):
    """The tables stay as they are, however the weights are stored or kept."""
    sd.convert(folder, tmp_path / "int8", "specdec", "int8")
    widened = sd.load(tmp_path / "int8", "float32", quantize="none")
    tables = [name for name in parameters.parameter_shapes(SHAPE) if "relpos_bias" in name]
    flat, before = parameters.flatten(widened.params), parameters.flatten(model.params)
    error = {name: float(jnp.abs(flat[name] - before[name]).max()) for name in before}
    assert all(error[name] < 0.05 for name in error) and len(tables) == 5
    if not packed_weights.can_pack("float32"):
        pytest.skip("no kernels of the CPU's own")
    for quantized in (
        sd.load(tmp_path / "int8", "float32"),
        sd.load(folder, "float32", quantize="int8"),
    ):
        assert quantized.quantized
        arguments = (IO["inputs"], IO["input_lengths"], 12, ())
        plain, drafted = (engine_tokens(quantized, *arguments, drafter=name) for name in DRAFTERS)
        np.testing.assert_array_equal(plain, drafted)


@pytest.mark.slow
def test_training_moves_every_table():
    module = TINY.module()
    params = initial_params(module, jax.random.key(0))
    batch = np.array([[3, 4, 5, 6, 7]], np.int32), np.array([[8, 9, 10, 11, 1]], np.int32)
    gradient = jax.grad(lambda params: loss_fn(params, batch, Objective(module))[0])(params)
    for name, leaf in parameters.flatten(gradient).items():
        if "relpos_bias" in name:
            assert np.abs(leaf).max() > 0, name


@pytest.mark.slow
def test_copies_of_layers_have_copies_of_tables():
    params = initial_params(TINY.module(), jax.random.key(0))
    deeper = deepen(params, "decoder", 5)
    config = dataclasses.replace(TINY, num_decoder_layers=5)
    assert parameters.parameter_shapes(config) == {
        n: leaf.shape for n, leaf in parameters.flatten(deeper).items()
    }
    first, copy = (deeper["decoder"][f"layers_{i}"]["relpos_bias"]["rel_embedding"] for i in (0, 1))
    np.testing.assert_array_equal(first, copy)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_the_field_is_true_or_false(value):
    with pytest.raises(ValueError, match="relative_bias_per_layer: got .*, expected true or false"):
        dataclasses.replace(TINY, relative_bias_per_layer=value)


def test_t5xs_first_network_cannot_compute_it():
    assert t5x.explain_unsupported(make.TINY) is None
    assert "got relative_bias_per_layer, expected a position table" in t5x.explain_unsupported(TINY)
