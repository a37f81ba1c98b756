"""Every public function gives the same, and compiles no more, whatever JAX is set to."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import public_calls
import pytest
from public_calls import CALLS, INPUTS, KEY, MORE, V, generate, target
from toy_models import compilations

import specdec_jax as sd
from specdec_jax.commands import main

pytestmark = pytest.mark.usefixtures("quick", "compiled_weights")
SETTINGS = {
    "jax_enable_x64": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_threefry_partitionable": False,
}


@contextlib.contextmanager
def process(settings):
    """Sets JAX as a process does that has other work too."""
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def check_unmoved(call):
    """Asserts that a call gives the same in a process with all of `SETTINGS` as in one without."""
    expected, found = call(), []
    with process(SETTINGS):
        compiled = compilations(lambda: found.append(call()))
    expected, found = jax.tree.leaves(expected), jax.tree.leaves(found[0])
    assert len(expected) == len(found)
    for one, other in zip(expected, found):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype
    return compiled


QUICK = ("plain", "sampled", "gpt", "trace")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in [*CALLS, *MORE]
    ],
)
def test_outputs_do_not_depend_on_settings(name):
    fresh = name in (
        "random",
        "dummy",
        "digests",
        "traced",
        "traced beams",
        "training",
        "int8",
        "shortlist",
        "self",
    )
    compiled = check_unmoved((CALLS | MORE)[name])
    assert fresh or not compiled  # the others make new jitted functions at every call


# What calls no JAX, or nothing but what is tested as a method of it.
WITHOUT_JAX = {
    "PRESETS",
    "AssistedNGramDrafter",
    "GatedDrafter",
    "LookaheadDecoding",
    "Chains",
    "Confidence",
    "Drafter",
    "DynamicTree",
    "Entropy",
    "EntropyBound",
    "GPTConfig",
    "GenerationConfig",
    "ModelDefaults",
    "GenerationResult",
    "HeadsConfig",
    "Heuristic",
    "BestOf",
    "HorizontalCascade",
    "MergedDrafter",
    "NonFiniteLogitsError",
    "Output",
    "Piece",
    "Policy",
    "PromptLookupDrafter",
    "RandomDrafter",
    "Calibrated",
    "CostAware",
    "SamplingConfig",
    "Stats",
    "T5Config",
    "TokenRecycling",
    "Tree",
    "UnsupportedCombination",
    "Verifier",
    "VerticalCascade",
    "bundled",
    "make_mesh",
    "shortlist_from_counts",
}
METHODS = [
    sd.LanguageModel.__init__,
    sd.LanguageModel.random,
    sd.LanguageModel.dummy,
    sd.LanguageModel.logits,
    sd.LanguageModel.params.fget,
    sd.LanguageModel.fingerprint.func,
    sd.LanguageModel.contents.func,
    sd.ModelDrafter.__init__,
    sd.EarlyExitDrafter.__init__,
    sd.HeadsDrafter.for_target,
    sd.HeadsDrafter.load,
    sd.NGramDrafter.count,
    sd.NGramDrafter.load,
    sd.EagleDrafter.__init__,
    sd.EagleDrafter.load,
    sd.ParallelDrafter.__init__,
    sd.OnlineDistillation.__init__,
    sd.OnlineDistillation.learn,
    sd.SuffixDrafter.load,
    sd.SuffixDrafter.save_texts,
    sd.SuffixHistory.__init__,
]


def test_every_public_name_is_isolated_or_without_jax():
    assert [method for method in METHODS if not hasattr(method, "isolated")] == []
    with_methods = {method.__qualname__.split(".")[0] for method in METHODS} | {
        "SelfDrafter"
    }  # a `ModelDrafter`
    others = {name for name in sd.__all__ if not hasattr(getattr(sd, name), "isolated")}
    assert others - with_methods == WITHOUT_JAX


def test_a_caller_keeps_its_own_settings():
    """Between two pieces, inside a loop over outputs, and after an error."""
    with process(SETTINGS):
        for stream in (
            sd.stream(public_calls.speaking(), INPUTS, max_new_tokens=6),
            sd.decode_stream(target(), INPUTS, max_new_tokens=6),
        ):
            for _ in stream:
                assert jnp.arange(3).dtype == jnp.int64
        with pytest.raises(ValueError, match="max_new_tokens"):
            generate(max_new_tokens=-1)
        assert jnp.arange(3).dtype == jnp.int64 and jax.config.jax_debug_nans


def test_arrays_of_64_bits():
    """As arguments they are what they would be without `jax_enable_x64`."""
    expected = generate()
    with process({"jax_enable_x64": True}):
        params = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), target().params
        )
        assert jax.tree.leaves(params)[0].dtype == jnp.float64
        model = sd.LanguageModel(target().config, params)
        inputs, limits = jnp.array([[3, 4, 5, 1], [7, 1, 0, 0]]), jnp.array([8, 8])
        found = sd.generate(model, inputs, max_new_tokens=limits, key=KEY)
    np.testing.assert_array_equal(found.tokens, expected[0])
    np.testing.assert_array_equal(found.log_probs, expected[2])


def test_inside_a_traced_function():
    state, request = sd.prepare(target(), INPUTS, max_new_tokens=8)
    with process(SETTINGS):
        state = jax.jit(lambda state: sd.advance(request.network, None, state, np.int32(100)))(
            state
        )
    np.testing.assert_array_equal(sd.finish(target(), state, request).tokens, generate()[0])
    for call in (
        lambda x: sd.generate(target(), x).tokens,
        lambda x: sd.generate(target(), INPUTS).tokens + x,
        lambda x: list(sd.decode_stream(target(), INPUTS))[0] + x,
        lambda x: target().logits(x, x),
        lambda x: sd.load("ende/target") + x,
    ):
        with pytest.raises(ValueError, match=r"got a call inside a function that JAX traces"):
            jax.jit(call)(np.ones((2, 3), np.int32))


def test_precision_of_products_stays_the_callers():
    with jax.default_matmul_precision("highest"):
        found = generate()
    np.testing.assert_array_equal(found[0], generate()[0])


@pytest.mark.slow
def test_without_jit():
    expected = generate(max_new_tokens=2)
    with jax.disable_jit():
        np.testing.assert_array_equal(generate(max_new_tokens=2)[0], expected[0])


def test_a_processor_sees_what_it_sees_without_the_settings():
    seen = []

    def processor(prefixes, lengths, logits):
        seen.extend([prefixes.dtype, lengths.dtype, logits.dtype, jnp.arange(V).dtype])
        return logits

    with process(SETTINGS):
        generate(sampling=sd.SamplingConfig(processor=processor), max_new_tokens=2)
    assert seen[:4] == [jnp.int32, jnp.int32, jnp.float32, jnp.int32]


@pytest.mark.slow
def test_a_command(capsys):
    command = [
        "generate",
        "--target=ende/target",
        "--max_new_tokens=2",
        "--compilation_cache_dir=",
        "Good morning.",
    ]
    assert main.main(command) == 0
    expected = capsys.readouterr().out
    with process(SETTINGS):
        assert main.main(command) == 0
    assert capsys.readouterr().out == expected
