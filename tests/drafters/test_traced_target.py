"""Every `--drafter` works for a target with traced parameters, with `generate`'s counts."""

import functools

import jax
import numpy as np
import pytest
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu.packed_weights import can_pack
from specdec_jax.decoding import ambient_mesh
from specdec_jax.decoding.under_jit import Decoder
from specdec_jax.drafters.named import make_named_drafter, make_traced_drafter
from specdec_jax.models.heads import HeadsConfig, init_params

pytestmark = pytest.mark.usefixtures("quick")
INPUTS = np.array([[5, 6, 7, 8, 1], [9, 4, 1, 0, 0]], np.int32)
LENGTH = 8


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


@pytest.fixture(scope="module")
def names(target, tmp_path_factory):
    """Names of drafters by kind; heads, a table and a model lie in a folder."""
    folder = tmp_path_factory.mktemp("drafters")
    config = HeadsConfig(2, target.config.emb_dim, target.config.vocab_size, share_head=True)
    params = init_params(config, jax.random.key(3))
    sd.HeadsDrafter.for_target(target, config, params).save(folder / "heads")
    outputs = sd.generate(target, INPUTS, max_new_tokens=LENGTH).tokens.tolist()
    sd.NGramDrafter.count(outputs, target.config.vocab_size, 2).save(folder / "table.npz")
    sd.save(tiny_t5(1), folder / "model")
    found = {"heads": "heads", "table": "table.npz", "model": "model"}
    return {kind: str(folder / name) for kind, name in found.items()} | {"exit": "exit:1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "exit",
        "heads",
        "self:int8",
        "table",
        "lookup",
        "assisted",
        "recycling",
        "lookahead",
        "random",
        "model",
    ],
)
def test_a_named_drafter_drafts_for_a_traced_target(kind, names, target):
    name, load = names.get(kind, kind), functools.partial(sd.load, dtype="float32")
    given = make_named_drafter(name, target, load, sd.ModelDrafter)
    drafter = make_traced_drafter(name, target.config, lambda path: sd.ModelDrafter(load(path)))
    assert (
        kind == "self:int8"
        or drafter.name == given.name
        or kind == "exit"
        and "first 1 of 2" in drafter.name
    )
    decoder = Decoder(target.config, drafter, gamma=2)
    prompts = np.zeros((2, LENGTH), np.int32)
    run = jax.jit(lambda params: decoder.decode(params, INPUTS, prompts, -1, prompted=False))
    found = jax.tree.map(np.asarray, run(target.params))
    expected = sd.generate(
        target, INPUTS, drafter=given, gamma=2, max_new_tokens=LENGTH, eos_ids=()
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert (
        found.drafted.sum() == expected.stats.drafted
        and found.target_calls.sum() == expected.stats.target_calls
    )
    if kind == "self:int8" and can_pack("float32"):
        assert found.accepted.sum() == expected.stats.accepted > 0
    assert expected.stats.drafted > 0


@pytest.mark.slow
def test_the_8_bits_of_a_traced_target_search(target):
    from specdec_jax.decoding.under_jit_beams import BeamDecoder

    prompts = np.zeros((2, LENGTH), np.int32)
    decoders = (
        BeamDecoder(target.config, make_traced_drafter(name, target.config, None), gamma=2)
        for name in ("self:int8",)
    )
    for decoder in (*decoders, BeamDecoder(target.config)):
        run = jax.jit(
            lambda params: decoder.decode(params, INPUTS, prompts, 1, prompted=False, num_decodes=2)
        )
        found = jax.tree.map(np.asarray, run(target.params))
        expected = sd.generate(
            target, INPUTS, num_beams=2, max_new_tokens=LENGTH, beam_style="t5x", eos_ids=(1,)
        )
        np.testing.assert_array_equal(found.tokens[:, -1], expected.tokens)


@pytest.mark.parametrize(
    "name, message",
    [
        ("exit:2", "drafter: got 'exit:2', expected exit:K with K from 1 to 1"),
        ("exit:x", "drafter: got 'exit:x', expected exit:K with a number"),
        ("nowhere", "drafter: nowhere: got no such path, expected .*lookup"),
        ("HEADS", "heads: got emb_dim 16, expected the target's 24"),
    ],
)
def test_a_name_that_does_not_fit_is_rejected(name, message, names, target):
    config = target.config.replace(emb_dim=24) if name == "HEADS" else target.config
    with pytest.raises(ValueError, match=message):
        make_traced_drafter(names["heads"] if name == "HEADS" else name, config, None)


def check_traced(target, drafter, several, monkeypatch):
    """Compares what is drafted for a traced target, as on several devices, with `generate`."""
    how = dict(drafter=drafter, gamma=2, max_new_tokens=LENGTH, eos_ids=())
    expected = sd.generate(target, INPUTS, **how)
    if several:
        monkeypatch.setattr(ambient_mesh, "is_on_one_device", lambda: False)
    decoder, prompts = Decoder(target.config, drafter, gamma=2), np.zeros((2, LENGTH), np.int32)
    found = jax.jit(lambda params: decoder.decode(params, INPUTS, prompts, -1))(target.params)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.accepted.sum() == expected.stats.accepted


@pytest.mark.parametrize("several", [False, True], ids=["one device", "several"])
@pytest.mark.parametrize(
    "layers, own_head", [(1, False), ((0, 2), True)], ids=["the first", "two and a head"]
)
def test_an_early_exit_lies_as_the_traced_target_does(layers, own_head, several, monkeypatch):
    """For several devices the target has no kernels of a CPU, and other caches than the model's."""
    target = tiny_t5(0, decoder_layers=3)
    shape = target.config.emb_dim, target.config.vocab_size
    head = np.random.default_rng(5).normal(size=shape) if own_head else None
    drafter = sd.EarlyExitDrafter(target, layers, head)
    check_traced(target, drafter, several, monkeypatch)


@pytest.mark.parametrize("several", [False, True], ids=["one device", "several"])
def test_an_early_exit_in_a_pair_lies_as_the_traced_target_does(several, monkeypatch):
    target = tiny_t5(0, decoder_layers=3)
    drafter = sd.HorizontalCascade(sd.EarlyExitDrafter(target, 1), sd.PromptLookupDrafter(), 1)
    check_traced(target, drafter, several, monkeypatch)


def test_an_early_exit_of_a_deeper_model_is_rejected(target):
    decoder = Decoder(target.config, sd.EarlyExitDrafter(tiny_t5(0, decoder_layers=4), 3), gamma=2)
    with pytest.raises(ValueError, match="layers: got 3, expected a.* from 1 to 1"):
        decoder.decode(target.params, INPUTS, np.zeros((2, LENGTH), np.int32), -1)
