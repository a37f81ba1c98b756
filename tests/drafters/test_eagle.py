"""Drafting models that read the target's states: what they are fed, and what they draft."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from distribution_samples import FALSE_ALARM, ROWS, SPREAD, g_test, joint_distribution, sample
from eagle_models import V, eagle, model, random_eagle, reader, target
from toy_models import noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.drafters.named import make_named_drafter, make_traced_drafter
from specdec_jax.models.eagle import EagleConfig, init_projections

pytestmark = pytest.mark.usefixtures("quick")
B, LIMIT, GAMMA = 4, 14, 3
INPUTS = [[3, 4, 5, 4, 1], [7, 1], [9, 2, 9, 2, 1], [6, 8, 11, 1]]
PREFIXES = [[4, 2], [], [11, 9, 2, 9], [5]]
OPTIONS = dict(max_new_tokens=LIMIT, decoder_prefix=PREFIXES, key=jax.random.key(5))
SAMPLED = sd.SamplingConfig(temperature=1.0)
WAYS = {
    "chain": dict(gamma=GAMMA),
    "tree": dict(tree=sd.Tree.uniform((2, 2, 1))),
    "dynamic tree": dict(tree=sd.DynamicTree(3, 3, 8)),
}
SLOW_WAYS = [
    name if name == "chain" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS
]


def decode(drafter, function=sd.generate, **options):
    return function(target(), INPUTS, drafter=drafter, **OPTIONS | options)


# --- What is drafted ---


@pytest.mark.slow
@pytest.mark.parametrize("way", SLOW_WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_projections_it_drafts_what_its_model_drafts(way, temperature):
    options = WAYS[way] | dict(sampling=sd.SamplingConfig(temperature=temperature))
    if temperature and way == "dynamic tree":
        options |= dict(verifier="block")
    found, expected = (decode(one, **options) for one in (eagle(0.0), sd.ModelDrafter(model())))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    for name in ("drafted", "accepted", "draft_calls", "target_calls"):
        assert getattr(found.stats, name) == getattr(expected.stats, name), name
    assert found.stats.accepted > 0


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_argmax_gives_plain_tokens(way):
    found, expected = (
        decode(one, **options) for one, options in ((eagle(0.3), WAYS[way]), (None, {}))
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert 0 < found.stats.accepted < found.stats.drafted


def _score(state) -> np.ndarray:
    """Returns the target's last states `[B, S, D]` at the committed tokens, without a cache."""
    network, length = target().network, max(map(len, INPUTS))
    inputs = np.array([row + [0] * (length - len(row)) for row in INPUTS], np.int32)
    lengths = np.array([len(row) for row in INPUTS], np.int32)

    @jax.jit
    def run(network, inputs, lengths, tokens):
        starts = jnp.zeros(B, jnp.int32)
        cache = network.prefill(inputs, lengths, tokens.shape[1])
        return network.encode(inputs, lengths), network.decode_states(tokens, starts, cache)[0]

    return jax.device_get((inputs, lengths, *run(network, inputs, lengths, state.tokens)))


@jax.jit
def read_again(network, inputs, lengths, encoded, tokens, states):
    """Returns the model's states at all pairs of a token and the target's state before it."""
    shifted = jnp.pad(states[:, :-1], ((0, 0), (1, 0), (0, 0)))
    encoded = encoded if network.model.encoder_dim else None
    cache = network.model.prefill(inputs, lengths, tokens.shape[1], encoded=encoded)
    return network.decode(tokens, shifted, jnp.zeros(B, jnp.int32), cache)


@functools.cache
def stopped(way: str, own, sampled: bool, iterations: int):
    """Returns the loop's state after some iterations, and the request."""
    options = WAYS[way] | (dict(sampling=SAMPLED) if sampled else {}) | dict(eos_ids=())
    state, request = decode(eagle(0.3, own), prepare, **options)
    return advance(request.network, request.drafter, state, np.int32(iterations)), request


@pytest.mark.parametrize("way", SLOW_WAYS)
@tiers.parametrize("own, iterations", [(model, 3), (reader, 0), (reader, 2)], first=1)
def test_committed_pairs_are_what_was_read(way, own, iterations):
    """Also where drafts were rejected, whose keys and values held the model's own states."""
    state, request = stopped(way, own, False, iterations)
    inputs, lengths, encoded, states = _score(state)
    found, _ = read_again(request.drafter.network, inputs, lengths, encoded, state.tokens, states)
    last = np.asarray(state.lengths) - 1
    expected = np.take_along_axis(np.asarray(found), last[:, None, None], axis=1)
    np.testing.assert_allclose(state.draft_state.own, expected, atol=1e-4)
    if own is model:
        assert np.sum(state.counts.drafted) > np.sum(state.counts.accepted) > 0


@tiers.parametrize(
    "own, sampled, iterations", [(model, False, 3), (reader, True, 2), (reader, False, 2)], first=1
)
def test_drafted_tokens_follow_own_states(own, sampled, iterations):
    """The distributions are those of steps that read the model's own states, one after another."""
    state, request = stopped("chain", own, sampled, iterations)
    wanted = np.array([3, 1, 2, 3], np.int32)
    drafter = request.drafter
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, wanted))(drafter, state)
    inputs, lengths, encoded, states = _score(state)
    network = drafter.network
    read = np.asarray(state.draft_state.own)
    _, cache = read_again(network, inputs, lengths, encoded, state.tokens, states)
    step = jax.jit(lambda n, *given: n.decode(*given, own=True))
    head = jax.jit(lambda n, states: n.model.head(states))
    for place in range(GAMMA):
        here = wanted > place
        logits = np.asarray(head(network, read))[:, 0]
        if sampled:
            expected = np.asarray(jax.nn.log_softmax(logits))
            dist = np.asarray(draft.dist.logits - draft.dist.log_normalizer[..., None])[:, place]
            np.testing.assert_allclose(dist[here], expected[here], atol=1e-4)
        else:
            np.testing.assert_array_equal(draft.tokens[here, place], logits.argmax(axis=1)[here])
        positions = np.asarray(state.lengths) + place
        read, cache = step(network, draft.tokens[:, place : place + 1], read, positions, cache)
    np.testing.assert_array_equal(draft.num_drafted, wanted)
    np.testing.assert_array_equal(draft.calls, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["chain", "tree"])
def test_samples_and_refilled_rows(way):
    """With Gumbel coupling every sample is plain decoding's, whatever rows lie beside it."""
    options = WAYS[way] | dict(num_samples=2, sampling=SAMPLED, max_new_tokens=9)
    options |= dict(tree=sd.Tree.uniform((2, 2, 1), children="gumbel")) if way == "tree" else {}
    verifier = {} if way == "tree" else dict(verifier="gumbel")
    plain = dict(verifier="gumbel", num_samples=2, sampling=SAMPLED, max_new_tokens=9)
    expected = decode(None, **plain)
    rows = dict(decode(eagle(0.3), sd.decode_stream, batch_size=2, **options | verifier))
    for number in range(B):
        for which in range(2):
            row = number * 2 + which
            tokens = expected.tokens[row, : expected.lengths[row]].tolist()
            assert rows[number][which].tokens == tokens, (number, which)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["chain", "tree"])
def test_distribution_through_the_engine(way):
    """The joint distribution of three tokens is the target's."""
    target = noisy_copy(tiny_t5(0, 16, emb_dim=24), 2.0)
    drafter = random_eagle(target, noisy_copy(target, 0.1, 1))
    options = WAYS[way] | (dict(gamma="auto", verifier="block") if way == "tree" else {})
    counts, (examined, accepted) = sample(target, drafter, SPREAD, 2 * ROWS, **options)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    wrong = joint_distribution(noisy_copy(target, 0.1, 1), SPREAD)
    assert g_test(counts, wrong) < FALSE_ALARM, "the test can fail"
    assert 0.02 < accepted.sum() / examined.sum() < 0.98


# --- Beside other drafters ---


@pytest.mark.slow
def test_it_drafts_the_first_part_of_a_cascade_and_half_of_a_merged_tree():
    expected = decode(None)
    copies = sd.PromptLookupDrafter(1)
    for drafter, options in (
        (sd.HorizontalCascade(eagle(0.3), copies, 2), dict(gamma=4)),
        (sd.MergedDrafter(eagle(0.3), copies), WAYS["tree"]),
    ):
        found = decode(drafter, **options)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        assert found.stats.accepted > 0


def test_it_cannot_draft_after_another():
    with pytest.raises(ValueError, match="got EagleDrafter, expected a drafter that needs nothing"):
        sd.HorizontalCascade(sd.PromptLookupDrafter(1), eagle(0.3), 2)
    with pytest.raises(ValueError, match="got EagleDrafter, expected a ModelDrafter"):
        sd.VerticalCascade(eagle(0.3), sd.PromptLookupDrafter(1), 2)


# --- Files, and drafters that do not fit ---


def test_a_saved_one_drafts_the_same(tmp_path):
    eagle(0.0).save(tmp_path / "eagle", "float32")
    eagle(0.3).save(tmp_path / "eagle", "float32")  # replaces the first
    loaded = sd.EagleDrafter.load(tmp_path / "eagle", target())
    for ours, theirs in zip(*map(jax.tree.leaves, (loaded, eagle(0.3))), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    load = functools.partial(sd.load, dtype="float32")
    named = make_named_drafter(str(tmp_path / "eagle"), target(), load, sd.ModelDrafter)
    assert named.name == loaded.name and loaded.name.endswith("/model with the target's states")
    with pytest.raises(ValueError, match="expected another kind for a target under jit"):
        make_traced_drafter(str(tmp_path / "eagle"), target().config, sd.load)


def test_drafters_that_do_not_fit_are_rejected(tmp_path):
    path = tmp_path / "eagle"
    own = functools.partial(tiny_t5, 4, V)
    drafter = eagle(0.3, own)
    drafter.save(path, "float32")
    load = functools.partial(sd.EagleDrafter.load, path)
    other = tiny_t5(7, V, emb_dim=24)
    with pytest.raises(
        ValueError, match="eagle: drafter: got one that reads the states of a target"
    ):
        load(other)
    with pytest.raises(ValueError, match="got one that reads the states of a target with other"):
        sd.generate(other, INPUTS, drafter=drafter, gamma=2)
    with pytest.raises(
        ValueError, match="got one that reads states of 24 numbers, expected the ta"
    ):
        load(tiny_t5(1, V))
    with pytest.raises(ValueError, match="got parts of an EAGLE drafter, which only draft"):
        sd.load(path, "float32")
    with pytest.raises(ValueError, match="got no parts of an EAGLE drafter"):
        sd.EagleDrafter.load(path / "model", target())
    record = json.loads((path / "config.json").read_text())
    for content, message in (
        ({**record, "version": 2}, "config.json: got version 2, expected 1"),
        ({**record, "eagle": {"width": 3}}, "config.json: got 'width', expected a configuration"),
        (
            {**record, "eagle": {**record["eagle"], "emb_dim": 8}},
            r"got shape \(24, 16\), expected \(24, 8\)",
        ),
    ):
        (path / "config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(target())
    with pytest.raises(ValueError, match="params: got"):
        sd.EagleDrafter(model(), target(), init_projections(EagleConfig(24, 8)))
