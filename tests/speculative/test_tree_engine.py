"""Trees through real networks equal autoregressive decoding and chains.

Caches, limits and budgets are tested, too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import HashModel, Words, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.adaptive_gamma import Auto
from specdec_jax.speculative.trees import CHILDREN, DynamicTree, Tree

pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow
V, LIMIT = 24, 10
INPUTS = [[3, 4, 5, 4, 1], [7, 1], [9, 2, 9, 2, 1], [6, 8, 11, 1]]
INPUTS_WORDS = [[3, 4, 5], [7], [9, 2, 9, 2]]
PREFIXES = [[4, 2], [], [11, 9, 2, 9], [5]]
KEY = jax.random.key(5)
SAMPLED = sd.SamplingConfig(temperature=1.0)
# The second and the last row are at temperature 0.
MIXED = sd.SamplingConfig(
    temperature=[1.0, 0.0, 0.7, 0.0], top_k=[0, 0, 6, 0], top_p=[1.0, 1.0, 0.9, 1.0]
)


def gpt(seed=0):
    return LanguageModel.random(GPTConfig(V, 16, 2, 2, 32, num_positions=64), seed, eos_ids=(1,))


MODELS = {
    "t5": lambda: noisy_copy(tiny_t5(0, V), 2.0),  # else it repeats itself
    "t5, a bias a layer": lambda: noisy_copy(tiny_t5(0, V, relative_bias_per_layer=True), 2.0),
    "gpt": lambda: noisy_copy(gpt(), 2.0),
}


@functools.cache
def pair(name="t5", kernel=True):
    """A target and a model that drafts for it, in the CPU's kernels or as XLA alone runs them."""
    usable = packed_weights.can_pack
    packed_weights.can_pack = usable if kernel else lambda dtype: False
    try:
        target = MODELS[name]()
        return target, sd.ModelDrafter(noisy_copy(target, 0.15, 1))
    finally:
        packed_weights.can_pack = usable


def run(name="t5", kernel=True, inputs=INPUTS, speculative=True, **options):
    target, drafter = pair(name, kernel)
    if not target.config.decoder_only:
        options = {"decoder_prefix": PREFIXES[: len(inputs)], **options}
    options = {"max_new_tokens": LIMIT, "key": KEY, **options}
    return sd.generate(target, inputs, drafter=drafter if speculative else None, **options)


def random_tree(seed: int, nodes: int = 12, **kinds) -> Tree:
    """A tree of random shape, not too wide."""
    rng, parents = np.random.default_rng(seed), []
    for node in range(1, nodes):
        free = [parent for parent in range(node) if parents.count(parent) < 4]
        parents.append(int(rng.choice(free)))
    return Tree(parents, **kinds)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-4)
    np.testing.assert_allclose(found.adjusted_log_probs, expected.adjusted_log_probs, atol=1e-4)
    assert found.finish_reasons == expected.finish_reasons


# --- Identities ---

TREES = {
    "uniform": Tree.uniform((3, 2, 1)),
    "wide": Tree.uniform((6,), children="top"),
    "random": random_tree(1),
    "chain": Tree.chain(4, children="top"),
    "late branch": Tree((0, 1, 2, 2, 2, 4), children="top"),
    "dynamic": DynamicTree(3, 3, 9),
}


# Shape, model, and whether it runs in the CPU's kernels.
GREEDY = [(shape, name, kernel) for shape in TREES for name in MODELS for kernel in (True, False)]
QUICK = [("uniform", "t5", False), ("dynamic", "gpt", True)]


@pytest.mark.parametrize(
    "shape, name, kernel",
    [*QUICK, *(pytest.param(*one, marks=slow) for one in GREEDY if one not in QUICK)],
)
def test_greedy_trees_equal_plain_decoding(shape, name, kernel):
    """Also with several EOS ids, which end branches, and with ragged prefixes."""
    for eos_ids in ((), (1, 5, 17)):
        found = run(name, kernel, tree=TREES[shape], eos_ids=eos_ids)
        assert_same(found, run(name, kernel, speculative=False, eos_ids=eos_ids))
        assert 0 < found.stats.accepted < found.stats.drafted
        assert found.stats.target_calls < int(found.lengths.sum())


PROCESSORS = {
    "repetition": dict(repetition_penalty=[1.3, 1.0, 2.0, 1.1]),
    "n-grams": dict(no_repeat_ngram=2),
    "minimum and bias": dict(min_new_tokens=4, logit_bias={3: 2.0}, forbidden_tokens=[7]),
    "synthetic": dict(forced_tokens={1: 9, 3: 4}),
    "own": dict(
        processor=lambda tokens, lengths, logits: jnp.where(
            (tokens[:, :1] + lengths[:, None]) % 3 == 2, logits[:, ::-1], logits
        )
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "own" else pytest.param(name, marks=slow) for name in PROCESSORS],
)
def test_processors_see_the_path_of_each_node(name):
    sampling = sd.SamplingConfig(**PROCESSORS[name])
    found = run(tree=random_tree(2, children="top"), sampling=sampling, eos_ids=(1, 5))
    assert_same(found, run(speculative=False, sampling=sampling, eos_ids=(1, 5)))
    assert found.stats.accepted > 0
    sampling = sd.SamplingConfig(temperature=1.0, **PROCESSORS[name])
    found = run(tree=random_tree(3, children="gumbel"), sampling=sampling)
    assert_same(found, run(speculative=False, sampling=sampling, verifier="gumbel"))


@tiers.parametrize(
    "children, verify, verifier",
    [
        ("mixed", "mixed", "token"),
        ("drawn", "traversal", "block"),
        ("drawn", "recursive", "token"),
        ("iid", "recursive", "token"),
        ("iid", "kseq", "token"),
        ("gumbel", "gumbel", "gumbel"),
    ],
    first=1,
)
def test_one_branch_draws_what_a_chain_draws(children, verify, verifier):
    tree = Tree.chain(3, children=children, verifier=verify)
    for sampling in (SAMPLED, MIXED):
        found = run(tree=tree, sampling=sampling, eos_ids=(1, 5))
        chain = run(gamma=3, verifier=verifier, sampling=sampling, eos_ids=(1, 5))
        assert_same(found, chain)
        for name in ("target_calls", "drafted", "accepted"):
            assert getattr(found.stats, name) == getattr(chain.stats, name)
        np.testing.assert_array_equal(
            found.stats.accepted_by_position, chain.stats.accepted_by_position
        )


@pytest.mark.slow
def test_a_chain_is_a_chain():
    """A tree with one branch that leaves everything open is γ, with `generate`'s verifier."""
    for verifier in ("block", "token"):
        found = run(tree=Tree.chain(3), sampling=SAMPLED, verifier=verifier)
        assert_same(found, run(gamma=3, sampling=SAMPLED, verifier=verifier))


@pytest.mark.parametrize(
    "children, seed",
    [
        ("drawn", 0),
        *(
            pytest.param(kind, seed, marks=slow)
            for kind in CHILDREN
            for seed in range(4)
            if (kind, seed) != ("drawn", 0)
        ),
    ],
)
def test_gumbel_trees_equal_plain_sampling(children, seed):
    """Whatever the tree, what its children are, and how many of its nodes are drafted."""
    expected = run(speculative=False, sampling=MIXED, verifier="gumbel", eos_ids=(1, 5))
    tree = random_tree(seed, children=children, verifier="gumbel")
    for gamma in ("auto", [1, 4, 7, 11]):
        assert_same(run(tree=tree, gamma=gamma, sampling=MIXED, eos_ids=(1, 5)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree",
    [
        DynamicTree(3, 2, 8),
        pytest.param(DynamicTree(4, 3, 12, "top", "gumbel"), marks=slow),
        pytest.param(DynamicTree(1, 4, 5), marks=slow),
    ],
)
def test_gumbel_trees_of_any_shape_equal_plain_sampling(tree):
    expected = run(speculative=False, sampling=MIXED, verifier="gumbel", eos_ids=(1, 5))
    for gamma in ("auto", [1, 4, 3, 2]):
        found = run(tree=tree, gamma=gamma, sampling=MIXED, eos_ids=(1, 5))
        assert_same(found, expected)
        assert found.stats.accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "children, verifier",
    [
        pytest.param(
            kind,
            rule,
            marks=[] if (kind, rule) == ("drawn", "traversal") else slow,
        )
        for kind in CHILDREN
        for rule in CHILDREN[kind]
    ],
)
def test_rows_at_temperature_0_are_plain_ones(children, verifier):
    found = run(tree=random_tree(6, children=children, verifier=verifier), sampling=MIXED)
    expected = run(speculative=False, sampling=MIXED)
    for row in (1, 3):
        np.testing.assert_array_equal(found.tokens[row], expected.tokens[row])
    assert found.stats.accepted > 0


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch():
    tree = Tree.uniform((2, 2, 1))
    together = run(tree=tree, sampling=SAMPLED)
    for row in range(4):
        own = dict(decoder_prefix=PREFIXES[row : row + 1], key=jax.random.fold_in(KEY, row)[None])
        alone = run(inputs=INPUTS[row : row + 1], tree=tree, sampling=SAMPLED, **own)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


# --- Limits and budgets ---


@tiers.parametrize("limit", [1, [1, 7, 3, 10], 2, 3, 4, 5], first=2)
def test_no_row_passes_its_limit(limit):
    found = run(tree=Tree.uniform((2, 2, 2, 1)), max_new_tokens=limit, eos_ids=())
    assert_same(found, run(speculative=False, max_new_tokens=limit, eos_ids=()))
    assert found.lengths.tolist() == np.broadcast_to(limit, 4).tolist()


def test_a_budget_drafts_the_first_nodes():
    """With budgets of 1 … D the tree is a chain, since its spine comes first.

    A drafter that is the target is right.
    """
    target, _ = pair()
    tree = Tree.uniform((3, 2, 2))
    found = run(tree=tree, gamma=[1, 2, 3, 17], eos_ids=(), max_new_tokens=9)
    assert [row.drafted <= calls for row, calls in zip(found.stats.per_row, (9, 18, 27, 999))] == [
        True
    ] * 4
    itself = sd.generate(
        target, INPUTS, drafter=sd.ModelDrafter(target), tree=tree, max_new_tokens=9, eos_ids=()
    )
    assert itself.stats.acceptance_rate == 1.0 and itself.stats.target_calls == 4 * 3
    assert itself.stats.per_row[0].draft_calls <= 9


def test_a_policy_adapts_the_number_of_nodes():
    """Two nodes more after a path that ended at a leaf, one fewer after another."""
    target, drafter = pair()
    policy = sd.Heuristic(9, start=2, minimum=2)
    options = dict(
        decoder_prefix=PREFIXES, max_new_tokens=LIMIT, eos_ids=(), drafter=drafter, gamma=policy
    )
    state, request = prepare(target, INPUTS, tree=Tree.uniform((3, 2)), **options)
    wanted, sizes = np.full(4, 2), set()
    while not np.all(state.done):
        done, room = np.asarray(state.done), np.asarray(state.limits - state.lengths - 1)
        state = advance(request.network, request.drafter, state, np.int32(1))
        drafted = np.asarray(state.last_drafted)
        whole = ~done & (room >= 2)
        np.testing.assert_array_equal(drafted[whole], wanted[whole])
        sizes |= set(drafted[~done].tolist())
        wanted = np.asarray(state.policy_state)
    assert_same(sd.finish(target, state, request), run(speculative=False, eos_ids=()))
    assert min(sizes) <= 2 < max(sizes) <= 9


# --- Caches ---


def poisoned(state):
    """Puts NaN as key and a huge value into every slot without a committed token."""
    last = state.lengths - 1

    def poison(cache, valid):
        dead = (jnp.arange(cache.layers[0].slots) >= valid[:, None])[:, None, :, None]

        def put(x, junk):
            return jnp.where(dead, junk, x)

        return cache.replace(
            layers=tuple(
                one.replace(key=put(one.key, jnp.nan), value=put(one.value, 1e30))
                for one in cache.layers
            )
        )

    # The drafter may lack the token before the last, a leaf that was never fed.
    return state.replace(
        target_cache=poison(state.target_cache, last),
        draft_state=poison(state.draft_state, last - 1),
    )


@pytest.mark.parametrize(
    "name, kernel",
    [
        ("t5", True),
        *(pytest.param(name, kernel, marks=slow) for name in MODELS for kernel in (True, False)),
    ],
)
def test_caches_hold_what_was_committed(name, kernel):
    """Slots of committed tokens hold what autoregressive decoding writes, in all layers.

    Everything else may be poisoned; acceptance is ragged and paths leave the spine.
    """
    target, drafter = pair(name, kernel)
    prefix = {} if target.config.decoder_only else {"decoder_prefix": PREFIXES}
    options = dict(max_new_tokens=LIMIT, eos_ids=(), **prefix)
    plain, _ = prepare(target, INPUTS, **options)
    plain = advance(target.network, None, plain, np.int32(99))
    state, request = prepare(
        target, INPUTS, drafter=drafter, tree=random_tree(4, 16, children="top"), **options
    )
    accepted = set()
    while not np.all(state.done):
        state = advance(request.network, request.drafter, poisoned(state), np.int32(1))
        accepted |= set(np.asarray(state.last_accepted).tolist())
        valid = (np.arange(state.tokens.shape[1]) < np.asarray(state.lengths)[:, None] - 1)[
            :, None, :, None
        ]
        for got, wanted in zip(state.target_cache.layers, plain.target_cache.layers):
            for mine, other in ((got.key, wanted.key), (got.value, wanted.value)):
                slots = min(mine.shape[2], other.shape[2])
                mask = valid[:, :, :slots]
                np.testing.assert_allclose(
                    np.where(mask, mine[:, :, :slots], 0),
                    np.where(mask, other[:, :, :slots], 0),
                    atol=1e-4,
                )
    assert len(accepted) > 2
    np.testing.assert_array_equal(
        np.where(np.arange(18) < np.asarray(state.lengths)[:, None], state.tokens[:, :18], 0),
        np.where(np.arange(18) < np.asarray(plain.lengths)[:, None], plain.tokens[:, :18], 0),
    )


def test_nothing_compiles_twice():
    def again(**options):
        return run(tree=Tree.uniform((2, 1)), **options)

    again(sampling=SAMPLED)
    assert not compilations(lambda: again(gamma=2, sampling=sd.SamplingConfig(temperature=0.6)))


# --- Refusals ---


def test_what_makes_no_sense_is_rejected():
    target, drafter = pair()
    for options, message in (
        (dict(tree=3), "expected a Tree"),
        (dict(tree=Tree.uniform((2,)), drafter=None), "without a drafter"),
        (dict(tree=Tree.uniform((2,)), verifier="token"), "a verifier of its own"),
        (dict(tree=Tree.uniform((2,)), gamma=9), "gamma: got 9"),
        (
            dict(tree=Tree.chain(3), gamma=sd.CostAware(4)),
            "gamma: got 4, expected an integer from 0 to 3",
        ),
        (
            dict(tree=Tree.uniform((2,)), gamma=Auto(2, (1.0, 1.1, 1.2))),
            "expected 'auto', an integer",
        ),
        (
            dict(tree=Tree.uniform((2,)), gamma=sd.Entropy(2), drafter=sd.PromptLookupDrafter()),
            "needs draft probabilities",
        ),
        (dict(tree=Tree.uniform((2,)), gamma=sd.Heuristic(3)), "gamma: got 3"),
        (dict(tree=Tree.uniform((2,)), drafter=sd.RandomDrafter(V)), "which drafts chains"),
        (dict(tree=Tree.uniform((2,)), num_beams=2), "tree: got"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(target, INPUTS, **{"drafter": drafter, **options})


# --- In parts ---


@pytest.mark.slow
@pytest.mark.parametrize(
    "tree, sampling",
    [
        pytest.param(Tree.uniform((2, 2)), MIXED, marks=slow),
        (DynamicTree(3, 2, 7), sd.SamplingConfig()),
        pytest.param(DynamicTree(3, 2, 7), MIXED, marks=slow),
    ],
)
def test_iterations_one_by_one_give_what_one_call_gives(tree, sampling):
    """Also if every slot that holds no committed token is poisoned in between."""
    target, drafter = pair()
    options = dict(
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        key=KEY,
        sampling=sampling,
        eos_ids=(1, 5),
        tree=tree,
    )
    whole = sd.generate(target, INPUTS, drafter=drafter, **options)
    state, request = prepare(target, INPUTS, drafter=drafter, **options)
    while not np.all(state.done):
        state = advance(request.network, request.drafter, poisoned(state), np.int32(1))
    found = sd.finish(target, state, request)
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=1e-5)


@pytest.mark.slow
def test_streams_and_stop_strings():
    """Streamed texts are what `generate` returns; a stop string may lie within a path."""
    target = HashModel(12, 0, vocabulary=Words())
    drafter = sd.ModelDrafter(HashModel(12, 1, likeness=0.7, vocabulary=Words()))
    options = dict(
        drafter=drafter, tree=Tree.uniform((2, 2, 1)), sampling=SAMPLED, key=KEY, max_new_tokens=24
    )
    for stop in ((), ("w5", "w7 w2")):
        whole = sd.generate(target, INPUTS_WORDS, stop=stop, **options)
        pieces = list(sd.stream(target, INPUTS_WORDS, stop=stop, **options))
        for row, text in enumerate(whole.texts):
            assert "".join(piece.text for piece in pieces if piece.row == row) == text
        if stop:
            assert "stop" in whole.finish_reasons
