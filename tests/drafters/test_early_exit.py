"""Early exit drafts as a model of the target's first layers, on the target's own cache."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from engine_inputs import INPUTS, V, cut, loop_bodies
from toy_models import HashModel, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import step_loops, variants
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.checkpoints import loader
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import generate
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.decoding.results import finish
from specdec_jax.speculative.sampling import SamplingConfig

LAYERS, LIMIT, GAMMA = 4, 12, 3
KEY = jax.random.key(0)
GREEDY, SAMPLED = SamplingConfig(), SamplingConfig(temperature=0.9, top_p=0.95)
PREFIXES = [[5], [], [9, 9], [1], [0, 0, 0], [2], [3], [8, 7, 6, 5]]
pytestmark = pytest.mark.usefixtures("quick")


@functools.cache
def target():
    return tiny_t5(0, V, decoder_layers=LAYERS)


@functools.cache
def cut_off(layers: int):
    """The target without the decoder layers from `layers` on, as a model of its own."""
    params = jax.tree.map(lambda leaf: leaf, target().params)
    for number in range(layers, LAYERS):
        del params["decoder"][f"layers_{number}"]
    return sd.LanguageModel(dataclasses.replace(target().config, num_decoder_layers=layers), params)


@functools.cache
def early(layers: int = 3):
    return sd.EarlyExitDrafter(target(), layers)


def run(drafter=None, **options):
    options = dict(max_new_tokens=LIMIT, eos_ids=(), gamma=GAMMA, key=KEY) | options
    return sd.generate(target(), INPUTS, drafter=drafter, **options)


@functools.cache
def plain():
    return run()


def counted(result) -> list:
    return [(row.target_calls, row.drafted, row.accepted) for row in result.stats.per_row]


def assert_same(result, expected):
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.lengths, expected.lengths)
    np.testing.assert_allclose(result.log_probs, expected.log_probs, atol=1e-4)


# With a γ and a prefix for each row; several tests run what compiles with these.
RAGGED = dict(decoder_prefix=PREFIXES, gamma=[0, 1, 2, 3, 3, 3, 2, 3])


@tiers.parametrize(
    "layers, config", [(3, SAMPLED), (1, GREEDY)], ids=["sampled", "greedy"], first=1
)
def test_drafts_are_those_of_the_cut_off_model(layers, config):
    """Token for token and count for count: the same distribution and the same draws."""
    result, expected = (
        run(drafter, sampling=config, **RAGGED)
        for drafter in (early(layers), sd.ModelDrafter(cut_off(layers)))
    )
    assert_same(result, expected)
    assert counted(result) == counted(expected) and 0 < result.stats.accepted < result.stats.drafted
    assert result.stats.draft_calls == result.stats.drafted, "nothing to catch up with"


def test_greedy_output_is_that_of_plain_decoding():
    """Every id as EOS in turn, so that it falls on every place in a draft; and every limit."""
    hits = 0
    for eos in [(), *[(token,) for token in range(V)]]:
        result = run(early(), eos_ids=eos)
        expected, lengths = cut(plain().tokens, eos)
        np.testing.assert_array_equal(result.tokens, expected)
        hits += np.sum(lengths < LIMIT)
    assert hits > 20
    limits = [1, 2, 3, 4, 5, 6, 7, LIMIT]
    result = run(early(), max_new_tokens=limits)
    np.testing.assert_array_equal(result.lengths, limits)
    np.testing.assert_array_equal(
        result.tokens, np.where(np.arange(LIMIT) < np.array(limits)[:, None], plain().tokens, 0)
    )


def test_a_head_of_its_own():
    """The target's own kernel changes nothing; another one changes the drafts alone."""
    weight = np.asarray(target().params["decoder"]["logits_dense"]["kernel"])
    same, other = (
        run(sd.EarlyExitDrafter(target(), 3, head)) for head in (weight, weight[:, ::-1])
    )
    for result in (same, other):
        assert_same(result, plain())
    assert counted(same) == counted(run(early())) != counted(other)


@functools.cache
def without(layers: tuple[int, ...]):
    """The target with only these decoder layers, as a model of its own."""
    decoder = dict(target().params["decoder"])
    kept = {f"layers_{place}": decoder[f"layers_{number}"] for place, number in enumerate(layers)}
    others = {name: leaf for name, leaf in decoder.items() if not name.startswith("layers_")}
    params = dict(target().params) | {"decoder": others | kept}
    config = dataclasses.replace(target().config, num_decoder_layers=len(layers))
    return sd.LanguageModel(config, params)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(0, 2), pytest.param((1, 2, 3), marks=pytest.mark.slow)])
def test_layers_in_the_middle_are_left_out(layers):
    """The first draft after the start token alone is the smaller model's, which has no cache yet.

    Later ones read what all layers of the target wrote.
    """
    options = dict(drafter=sd.EarlyExitDrafter(target(), list(layers)), gamma=GAMMA, key=KEY)
    state, request = prepare(target(), INPUTS, eos_ids=(), max_new_tokens=LIMIT, **options)
    expected = sd.generate(without(layers), INPUTS, eos_ids=(), max_new_tokens=GAMMA)
    draft = jax.jit(lambda drafter, state: drafter.draft((), state, state.gamma)[1])
    drafted = draft(request.drafter, state)
    np.testing.assert_array_equal(drafted.tokens, expected.tokens)
    exit_ = options.pop("drafter")
    for more in (RAGGED, dict(tree=sd.Tree.uniform((2, 1)), gamma="auto")):
        more = dict(decoder_prefix=PREFIXES) | more
        result, wanted = run(exit_, **more), run(decoder_prefix=PREFIXES)
        np.testing.assert_array_equal(result.tokens, wanted.tokens)
        assert 0 < result.stats.accepted < result.stats.drafted
    names = ", ".join(map(str, layers))
    assert exit_.name == f"the decoder layers {names} of {LAYERS}"


# --- The shared cache ---


def poisoned(state):
    """Puts NaN into every slot past the target's valid ones, in all layers."""
    dead = (jnp.arange(state.tokens.shape[1]) >= state.lengths[:, None] - 1)[:, None, :, None]
    cache = state.target_cache
    return state.replace(
        target_cache=cache.replace(
            layers=jax.tree.map(lambda x: jnp.where(dead, jnp.nan, x), cache.layers)
        )
    )


@pytest.mark.slow
def test_poisoned_caches_and_streaming():
    """One iteration after another, with all stale slots poisoned, gives one call's result."""
    expected = run(early(), sampling=SAMPLED, **RAGGED)
    options = dict(drafter=early(), sampling=SAMPLED, key=KEY, max_new_tokens=LIMIT, eos_ids=())
    state, request = prepare(target(), INPUTS, **options, **RAGGED)
    fed_at_once = jax.jit(
        lambda network, tokens, cache: network.decode(tokens, jnp.zeros(8, jnp.int32), cache)[1]
    )
    while not np.all(state.done):
        state = advance(request.network, request.drafter, poisoned(state), np.int32(1))
        valid = (np.arange(state.tokens.shape[1]) < np.asarray(state.lengths)[:, None] - 1)[
            :, None, :, None
        ]
        fresh = fed_at_once(target().network, state.tokens, state.target_cache)
        for got, wanted in zip(
            jax.tree.leaves(state.target_cache.layers), jax.tree.leaves(fresh.layers)
        ):
            np.testing.assert_allclose(
                np.where(valid, got, 0), np.where(valid, wanted, 0), atol=1e-5
            )
    result = finish(target(), state, request)
    assert_same(result, expected)
    assert jax.tree.all(jax.tree.map(np.array_equal, result.stats, expected.stats))


def test_rows_that_do_not_draft_for_a_while():
    """There is nothing to catch up with: acceptance is that of a model which does."""
    found = []
    for proposer in (early(1), sd.ModelDrafter(cut_off(1))):
        options = dict(drafter=proposer, max_new_tokens=LIMIT, eos_ids=())
        state, request = prepare(target(), INPUTS, **options, **RAGGED)
        for wanted in ([0] * 8, [0, 3] * 4, *[[3] * 8] * LIMIT):
            state = state.replace(gamma=jnp.array(wanted, jnp.int32))
            state = advance(request.network, request.drafter, state, np.int32(1))
        found.append(finish(target(), state, request))
    assert_same(*found)
    assert (
        counted(found[0]) == counted(found[1])
        and 0 < found[0].stats.accepted < found[0].stats.drafted
    )


@pytest.mark.slow
def test_no_copy_of_a_cache_in_the_loop(optimised):
    """The drafter and the target write to one cache in turn, in place."""
    model = tiny_t5(0, 53, decoder_layers=2, num_heads=5, head_dim=6, emb_dim=22, mlp_dim=34)
    state, request = prepare(
        model, INPUTS[:1], drafter=sd.EarlyExitDrafter(model, 1), gamma=3, max_new_tokens=40
    )
    bodies = loop_bodies(
        advance.lower(request.network, request.drafter, state, np.int32(9))
        .compile(optimised)
        .as_text()
    )
    arrays = jax.tree.leaves((state.target_cache, model.network.params))
    shapes = {
        ",".join(map(str, leaf.shape)) for leaf in arrays if leaf.ndim > 1 and leaf.size > 200
    }
    assert any(f"[{shape}]" in bodies for shape in shapes)
    copies = re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", bodies)
    assert not shapes & set(copies), sorted(shapes & set(copies))


# --- Bad input, the command line, the benchmark ---


@pytest.mark.parametrize("layers", [0, -1, LAYERS, LAYERS + 1, 1.5, (), (2, 1), range(LAYERS)])
def test_a_number_of_layers_that_is_no_exit(layers):
    with pytest.raises(
        ValueError,
        match=re.escape(f"layers: got {layers}, expected an integer from 1 to {LAYERS - 1}"),
    ):
        sd.EarlyExitDrafter(target(), layers)


def test_what_else_is_rejected():
    with pytest.raises(
        ValueError, match="layers: got 1, expected a target with more than one decoder layer"
    ):
        sd.EarlyExitDrafter(tiny_t5(0, V, decoder_layers=1), 1)
    for head in (np.zeros((15, V)), np.zeros(16)):
        with pytest.raises(ValueError, match=r"head: got shape .*, expected \(16, number of ids\)"):
            sd.EarlyExitDrafter(target(), 1, head)
    with pytest.raises(
        ValueError,
        match=r"got an early exit of another model \(random\), expected .* itself \(hash\)",
    ):
        sd.generate(HashModel(V), INPUTS, drafter=early())


def test_command_line(monkeypatch):
    monkeypatch.setattr(loader, "load", lambda *_, **__: target())
    options = generate.GenerateOptions(target="target", drafter="exit:2")
    loaded, drafter = options.load()
    assert loaded is target() and isinstance(drafter, sd.EarlyExitDrafter) and drafter.layers == 2
    for name, message in (
        ("exit:4", "drafter: got 'exit:4', expected exit:K with K from 1 to 3"),
        ("exit:two", "drafter: got 'exit:two', expected exit:K with a number of decoder layers K"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(options, drafter=name).load()


def count_products(run, *arguments) -> int:
    """The matrix products and kernels in one step of a timed program, which is only traced."""
    return len(re.findall(r"dot_general\[|ffi_call\[", str(jax.make_jaxpr(run)(*arguments))))


@pytest.mark.parametrize("layers", [1, 3])
def test_a_timed_draft_step_runs_the_layers_that_draft(layers):
    """Alone and between target calls: those of the model that is cut off after them, no more."""
    ids, lengths = np.ones((1, 8), np.int32), np.full(1, 8, np.int32)
    caches = {
        name: jax.eval_shape(
            lambda network=network: step_loops.prefill_cache(network, ids, lengths, slots=16)
        )
        for name, network in (("whole", target().network), ("cut", cut_off(layers).network))
    }

    def alone(network, cache) -> int:
        def run(tokens, cache):
            return step_loops.draft_steps(network, tokens, jnp.zeros(1, int), cache, steps=2)

        return count_products(run, jnp.ones((1, 1), int), caches[cache])

    def between(network, cache) -> int:
        def run(tokens, caches):
            return step_loops.paired_steps(
                target().network,
                network,
                tokens,
                jnp.zeros(1, int),
                caches,
                gamma=2,
                steps=2,
                width=1,
            )

        return count_products(run, jnp.ones((1, 3), int), (caches["whole"], caches[cache]))

    for count in (alone, between):
        exit_step, expected = (
            count(early(layers).network, "whole"),
            count(cut_off(layers).network, "cut"),
        )
        assert 0 < exit_step == expected < count(target().network, "whole")


@pytest.mark.slow
def test_benchmark_times_the_draft_steps(monkeypatch):
    options = benchmark_command.BenchmarkOptions(
        target="target", drafter="exit:3", gamma=(3,), max_new_tokens=12, repeats=1
    )
    batches = variants.cut_batches(INPUTS[:1], INPUTS[:1], 1, 0)
    steps = analysis_benchmark._step_variants(Workload(target(), early(), batches, options), {})
    assert {"draft step", "draft 3 and verify"} <= set(steps) and not any(
        "drafter encoder" in name for name in steps
    )
    assert steps["draft step"]().shape == (1, 1)
    monkeypatch.setattr(
        analysis_benchmark, "_step_variants", lambda *_: {name: lambda: None for name in steps}
    )
    record, problems = analysis_benchmark.benchmark(Workload(target(), early(), batches, options))
    assert problems == [] and record["drafter"] == {"name": "the first 3 of 4 decoder layers"}
    (variant,) = record["speculative"]
    assert (
        variant["stats"]["draft_calls"] == variant["stats"]["drafted"] > 0
        and variant["predicted"]["cost_ratio"] > 0
    )
    assert variant["parts"]["draft steps"] > 0 and variant["parts"]["drafter encoder"] == 0
    assert "with the first 3 of 4 decoder layers" in summaries.benchmark_summary(record)
