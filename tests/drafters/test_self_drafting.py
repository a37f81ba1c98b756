"""Self-speculation: the target in int8 drafts for itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from engine_inputs import INPUTS, V
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.checkpoints import loader
from specdec_jax.commands import generate
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.models import weight_layouts

pytestmark = pytest.mark.usefixtures("quick")
SLOW = pytest.mark.slow
GAMMA = 3


@functools.cache
def t5():
    return noisy_copy(tiny_t5(0, V), 2.0)  # else it repeats itself


@functools.cache
def gpt():
    return sd.LanguageModel.random(sd.GPTConfig(V, 32, 4, 2, 32, num_positions=40))


SHAPES = {
    "chain": dict(gamma=GAMMA),
    "tree": dict(tree=sd.Tree.uniform((2, 1))),
    "beams": dict(num_beams=2, gamma=2),
}


@tiers.parametrize(
    "shape", ["chain", *(pytest.param(name, marks=SLOW) for name in ("tree", "beams"))], first=1
)
@tiers.parametrize("family", [t5, pytest.param(gpt, marks=SLOW)], first=1)
def test_greedy_output_is_that_of_plain_decoding(family, shape):
    target, more = family(), dict(max_new_tokens=12, eos_ids=())
    drafter, beams = (
        sd.SelfDrafter(target),
        {name: n for name, n in SHAPES[shape].items() if name == "num_beams"},
    )
    plain = sd.generate(target, INPUTS, **beams, **more)
    found = sd.generate(target, INPUTS, drafter=drafter, **SHAPES[shape], **more)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.stats.accepted > 0.5 * found.stats.drafted * (0.5 if shape != "chain" else 1)


def test_only_weights_of_decoder_steps_are_its_own():
    target, drafter = t5(), sd.SelfDrafter(t5())
    theirs, ours = target.network.params, drafter.network.params
    shared = {id(leaf) for leaf in jax.tree.leaves(theirs)}
    others = [leaf for leaf in jax.tree.leaves(ours) if id(leaf) not in shared]
    rounded = jax.tree.leaves(weight_layouts.step_weights(ours))
    assert {id(leaf) for leaf in others} == {id(leaf) for leaf in rounded}
    assert all(
        weight_layouts.is_weight_object(weight) for weight in weight_layouts.step_weights(ours)
    )


@pytest.mark.slow
def test_the_targets_encoder_output_takes_the_place_of_its_own():
    """Which would be the same: the encoder is the target's."""
    drafter, inputs = sd.SelfDrafter(t5()), jnp.array([[3, 4, 5], [6, 7, 0]])
    arguments = inputs, jnp.array([3, 2]), jnp.zeros((2, 1), int), 8
    assert drafter.reads_encoder and not sd.SelfDrafter(gpt()).reads_encoder
    own, given = (
        drafter.init(*arguments, encoded=x)
        for x in (None, drafter.model.network.encode(*arguments[:2]))
    )
    jax.tree.map(np.testing.assert_array_equal, own, given)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_nearly_always_right_for_the_bundled_target(temperature, optimised):
    target = sd.load("ende/target", "float32", quantize="none")
    sampling = sd.SamplingConfig(temperature=temperature)
    how = dict(
        gamma=GAMMA, max_new_tokens=24, verifier="token", sampling=sampling, key=jax.random.key(0)
    )
    found = sd.generate(
        target, read_built_in_sentences()[:4], drafter=sd.SelfDrafter(target), **how
    )
    assert found.stats.drafted > 20 and found.stats.accepted > 0.9 * found.stats.drafted


def test_command_line(monkeypatch):
    monkeypatch.setattr(loader, "load", lambda *_, **__: t5())
    options = generate.GenerateOptions(target="target", drafter="self:int8")
    options.check()
    target, drafter = options.load()
    assert isinstance(drafter, sd.SelfDrafter) and drafter.model is target is t5()
    assert drafter.name == f"{target.name} in int8"
    with pytest.raises(
        ValueError, match="shortlist_size: got 5, expected a drafter that is a model"
    ):
        dataclasses.replace(options, shortlist_size=5).load()
    for quantize in packed_weights.INPUT_BITS:
        with pytest.raises(
            ValueError,
            match=f"drafter: got 'self:int8' with quantize='{quantize}', expected a target",
        ):
            dataclasses.replace(options, quantize=quantize).check()


def test_what_cannot_be_is_rejected():
    other = sd.LanguageModel(t5().config, t5().params, name="other")
    with pytest.raises(ValueError, match="drafter: got the 8 bits of another model"):
        sd.generate(other, INPUTS, drafter=sd.SelfDrafter(t5()))
    rounded = weight_layouts.round_params(
        t5().params,
        packed_weights.input_bits("int8") if packed_weights.can_pack("float32") else None,
    )
    with pytest.raises(
        ValueError, match=r"got the 8 bits of a target that is in int8 itself \(rounded\), expected"
    ):
        sd.SelfDrafter(sd.LanguageModel(t5().config, rounded, name="rounded"))
