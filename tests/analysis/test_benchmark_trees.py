"""Tests `specdec benchmark --tree` on a tiny random pair."""

import dataclasses
import functools
import json
import pathlib

import benchmark_models
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from benchmark_models import CONFIG
from sample_records import parse
from toy_models import noisy_copy

import specdec_jax as sd
from specdec_jax.analysis import acceptance, predictions, step_loops, timing
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.report import page, plots, records, rows, summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import main, suite
from specdec_jax.speculative.tree_text import read_tree
from specdec_jax.speculative.trees import DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")

target, batches = benchmark_models.target, benchmark_models.batches
STATIC, DYNAMIC = "widths:2,1,1:gumbel", "dynamic:2,2,4"


@pytest.fixture(scope="module")
def options() -> benchmark_command.BenchmarkOptions:
    return benchmark_command.BenchmarkOptions(
        target="target",
        drafter="drafter",
        gamma=(3,),
        tree=(STATIC, DYNAMIC),
        max_new_tokens=12,
        repeats=2,
        batch_size=2,
    )


@pytest.fixture(scope="module")
def measured(target, options, batches):
    """Drafter = target."""
    record, problems = analysis_benchmark.benchmark(
        Workload(target, sd.ModelDrafter(target), batches, options)
    )
    return json.loads(json.dumps(record)), problems


@pytest.mark.slow
def test_record(measured, target, batches):
    record, problems = measured
    assert problems == []
    assert isinstance(parse(record), records.BenchmarkRecord)
    (chain,), (static, dynamic) = record["speculative"], record["trees"]

    def described(variant):
        return tuple(variant[name] for name in ("tree", "nodes", "depth", "children", "verifier"))

    assert described(static) == (STATIC, 7, 3, "gumbel", "gumbel")
    assert described(dynamic) == (DYNAMIC, 4, 2, "gumbel", "gumbel")
    results = [
        sd.generate(
            target,
            b.inputs,
            drafter=sd.ModelDrafter(target),
            tree=Tree.uniform((2, 1, 1)),
            max_new_tokens=12,
        )
        for b in batches
    ]
    calls = sum(result.stats.target_calls for result in results)
    assert (
        static["stats"]["target_calls"]
        == calls
        == chain["stats"]["target_calls"]
        < dynamic["stats"]["target_calls"]
    )
    for variant in (static, dynamic):
        stats = variant["stats"]
        assert (
            variant["tokens"]
            == record["plain"]["tokens"]
            == stats["target_calls"] * stats["tokens_per_target_call"]
        )
        assert (
            len(stats["accepted_by_position"]) == variant["depth"] and variant["differences"] == []
        )
        assert (
            variant["improvement"]["least"]
            <= variant["improvement"]["median"]
            <= variant["improvement"]["most"]
        )
        assert (
            variant["verify_cost"]
            == record["steps"][f"nodes of {variant['tree']}"]["median"]
            / (record["steps"]["target step"]["median"])
        )
    # A call over N positions beside the one over N nodes.
    assert record["verify_cost"].keys() == {"3", "6"} == record["bare"]["verify_cost"].keys()
    fastest = min((static, dynamic), key=lambda variant: variant["seconds"]["median"])
    assert (
        record["tree_over_chain"]["tree"] == fastest["tree"]
        and record["tree_over_chain"]["gamma"] == 3
    )
    times = sorted(
        chain["seconds"][one] / fastest["seconds"][other]
        for one in ("least", "most")
        for other in ("least", "most")
    )
    assert times[0] <= record["tree_over_chain"]["improvement"]["median"] <= times[-1]


@pytest.mark.slow
def test_predicted_tokens_are_those_of_the_hit_rate_measured(measured, target, options, batches):
    """The drafter is the target: every call commits a whole branch, but for ends of outputs."""
    static, dynamic = measured[0]["trees"]
    assert static["predicted"] == pytest.approx(4) and static["prediction"] == "top"
    assert (dynamic["predicted"], dynamic["prediction"]) == (None, "dynamic")
    drafter = sd.ModelDrafter(noisy_copy(target, 0.5))
    sampled = dataclasses.replace(options, temperature=1.0, seed=3)
    workload = Workload(target, drafter, batches, sampled)
    results = [
        batch.decode_with(
            lambda batch: sd.generate(
                target, batch.inputs, key=batch.keys, **sampled.decoding(plain=True)
            )
        )
        for batch in batches
    ]
    found = acceptance.measure_hit_rate(workload, results)
    scored = acceptance.score(workload, ("block",), 3)
    assert found == scored.hit_rate and 0 < found["mixed"][0][0] < found["mixed"][1][0] < 1

    def tokens(text):
        return predictions.tree_tokens(read_tree(text), found)

    (one, _), (two, _) = found["mixed"][:2]
    assert tokens("widths:2,1:mixed") == {
        "predicted": pytest.approx(1 + two + two * one),
        "prediction": "mixed",
    }
    assert tokens("widths:2:drawn")["predicted"] == pytest.approx(1 + two)
    assert tokens("widths:2:top") == {
        "predicted": pytest.approx(1 + found["top"][1][0]),
        "prediction": "top",
    }
    assert tokens("widths:2:top:typical") == {"predicted": None, "prediction": "lossy"}
    unscored = predictions.tree_tokens(read_tree("widths:2"), {})
    assert unscored == {"predicted": None, "prediction": "unscored"}


@pytest.mark.slow
def test_summary_and_figures_show_the_record(measured):
    record, _ = measured
    text = summaries.benchmark_summary(record)
    static, gain = record["trees"][0], record["tree_over_chain"]["improvement"]
    assert f"tree {STATIC} (7 positions, depth 3, gumbel children, gumbel)" in text
    calls = static["stats"]["target_calls"]
    assert (
        f"{static['stats']['tokens_per_target_call']:.2f} tokens per target call, {calls} calls"
        in text
    )
    assert f"v of its nodes {static['verify_cost']:.3f}" in text
    assert (
        "predicted    4.00 tokens per target call (top-k hit rate by k most probable ids; as if "
        "every node" in text
    )
    assert "  no prediction: the drafter's distribution shapes the tree\n" in text
    by_depth = ", ".join(
        f"{count / calls:.2f}" for count in static["stats"]["accepted_by_position"]
    )
    accepted, reached = (
        static["stats"][f"{what}_by_position"] for what in ("accepted", "examined")
    )
    given = ", ".join(f"{one / of:.2f}" for one, of in zip(accepted, reached))
    assert (
        f"by depth: {by_depth} of the calls; where those above it are accepted: {given}\n" in text
    )
    assert f"{gain['median']:.3f} times as fast ({gain['least']:.3f} to {gain['most']:.3f})" in text
    chain, row, _ = rows.list_rows(parse(record))
    assert chain.gamma == 3 and row.gamma is None and row.alpha is None, (
        "what is accepted of a tree is not α"
    )
    assert row.verifier == f"tree {STATIC}, gumbel" and row.verify_cost == static["verify_cost"]
    assert (row.improvement.median, row.differ) == (static["improvement"]["median"], 0)
    html = page.report([(pathlib.Path("trees.json"), parse(record))])
    # In tables 2 and of the run, and beside its bar.
    assert html.partition('id="measured-1"')[2].count(f"tree {STATIC}, gumbel") == 3
    tokens = f"{static['stats']['tokens_per_target_call']:.2f}"
    cells = "".join(f"<td>{value}</td>" for value in (7, 3, "4.00", tokens))
    assert f'<th scope="row" class="text">tree {STATIC}</th>{cells}' in html
    axes = plots.draw_wall_time(record).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "plain",
        "speculative, γ = 3",
        f"tree {STATIC}",
        f"tree {DYNAMIC}",
    ]
    broken = record | {"trees": [static | {"nodes": "many"}]}
    with pytest.raises(ValueError, match=r"trees.0.nodes: got 'many', expected a valid integer"):
        parse(broken)


def corrupt(monkeypatch):
    """Makes the trees' second token of the first row of every batch differ."""
    real = analysis_variants.generate

    def generate(*args, tree=None, **how):
        result = real(*args, tree=tree, **how)
        if tree is None:
            return result
        tokens = result.tokens.copy()
        tokens[0, 1] = (tokens[0, 1] + 1) % CONFIG.vocab_size
        return result._replace(tokens=tokens)

    monkeypatch.setattr(analysis_variants, "generate", generate)


@tiers.parametrize(
    ("temperature", "verifier", "wrong", "found"),
    [
        (0.0, "block", True, [(1, 1), (2, 1)]),
        (1.0, "gumbel", True, [(1, 1), (2, 1)]),  # both variants take the same noise
        (1.0, "gumbel", False, []),
        (1.0, "block", True, []),
    ],
    first=1,
)
def test_wrong_tokens_are_reported_where_they_must_be_equal(
    monkeypatch, target, batches, options, temperature, verifier, wrong, found
):
    if wrong:
        corrupt(monkeypatch)
    once = dataclasses.replace(
        options, repeats=1, temperature=temperature, verifier=verifier, tree=(STATIC,)
    )
    record, problems = analysis_benchmark.benchmark(
        Workload(target, sd.ModelDrafter(target), batches, once)
    )
    assert [
        (item["input"], item["position"]) for item in record["trees"][0]["differences"]
    ] == found
    message = (
        f"tree {STATIC}: got other tokens than plain decoding for sentences 2, 3, expected the "
        "same but for near-ties"
    )
    assert problems == [message] * bool(found)


def test_a_timed_call_over_nodes_sees_ancestors_alone(target):
    network = noisy_copy(target, 2.0).network
    inputs, lengths = np.full((2, 3), 5, np.int32), np.full(2, 3, np.int32)
    cache = step_loops.prefill_cache(network, inputs, lengths, slots=12)
    tokens, positions = jnp.array([[4, 9, 2], [7, 7, 1]], jnp.int32), jnp.array([2, 4], jnp.int32)
    chain = functools.partial(step_loops.decode_steps, network, cache=cache)
    nodes = functools.partial(
        step_loops.node_steps, network, cache=network.node_cache(cache, 12, 12), slots=12
    )
    expected = chain(tokens, positions, steps=3)
    np.testing.assert_array_equal(nodes(tokens, positions, tree=Tree.chain(2), steps=3), expected)
    siblings = nodes(tokens, positions, tree=Tree((0, 0)), steps=1)
    for last in (1, 2):  # each sibling follows node 0, as if it were the only one
        expected = chain(tokens[:, jnp.array([0, last])], positions, steps=1)
        np.testing.assert_array_equal(siblings[:, jnp.array([0, last])], expected)
    assert not np.array_equal(siblings, chain(tokens, positions, steps=1))


def test_in_the_place_of_a_tree_that_a_distribution_shapes_stands_one_as_large(monkeypatch, target):
    seen = []
    monkeypatch.setattr(step_loops, "node_steps", lambda *_, tree, **__: seen.append(tree))
    shape = timing.CallShape(2, 5, 24)
    timing.tree_variant(target.network, shape, DynamicTree(3, 2, 7))()
    timing.tree_variant(target.network, shape, Tree((0, 0)))()
    assert [(tree.size, tree.depth) for tree in seen] == [(7, 3), (3, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tree": ("widths:2;1",)}, "tree: got 'widths:2;1', expected widths:3,2,1"),
        ({"tree": ("widths:2:iid:mixed",)}, "verifier: got 'mixed', expected"),
        (
            {"drafter": None},
            "tree: got 'widths:2,1,1:gumbel, dynamic:2,2,4' without --drafter, expected one",
        ),
        (
            {
                "preset": "t5_1_1/small",
                "target": None,
                "drafter": None,
                "drafter_preset": "t5_1_1/small",
            },
            "tree: got .* without --drafter, expected one: with random weights no",
        ),
        ({"synthetic_alpha": (0.5,)}, r"synthetic_alpha: got \(0.5,\) with a tree, expected none"),
        (
            {
                "preset": "t5_1_1/small",
                "target": None,
                "drafter": "lookup",
                "synthetic_alpha": (0.5,),
            },
            "with a tree",
        ),
        (
            {"verifier": "lenient", "lenience": 0.5, "temperature": 1.0},
            "verifier: got 'lenient' with a tree",
        ),
        ({"num_beams": 2}, "tree: got .* with num_beams, expected none"),
    ],
)
def test_rejects(options, settings, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **settings).check()


def test_the_suite_of_the_paper_has_no_trees(options, tmp_path):
    asked = dataclasses.replace(options, suite="paper", output=str(tmp_path / "paper.jsonl"))
    with pytest.raises(ValueError, match="tree: got .* with suite='paper'"):
        suite.list_rows(asked)


def test_a_drafter_of_chains_is_rejected_before_anything_is_timed(
    monkeypatch, target, batches, options
):
    monkeypatch.setattr(
        analysis_benchmark.analysis_variants, "warm_up", lambda *_: pytest.fail("timed")
    )
    with pytest.raises(ValueError, match="tree: got one for RandomDrafter"):
        analysis_benchmark.benchmark(
            Workload(target, sd.RandomDrafter(CONFIG.vocab_size), batches, options)
        )


def test_the_flag_is_repeatable(monkeypatch):
    seen = []
    monkeypatch.setattr(suite, "run", seen.append)
    command = ["benchmark", "--target=a", "--drafter=b", f"--tree={STATIC}", f"--tree={DYNAMIC}"]
    assert main.main(command) == 0
    assert seen[0].tree == (STATIC, DYNAMIC)
