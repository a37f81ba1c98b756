"""Drafts n-grams of the decode itself: beside a slow search, in the engine, distributions."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_samples import FALSE_ALARM, ROWS, SPREAD, g_test, joint_distribution, sample
from toy_models import EchoModel, HashModel, Words, compilations

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters.assisted import NGramMemory
from specdec_jax.drafters.named import make_named_drafter
from specdec_jax.drafters.prompt_lookup import Inputs
from specdec_jax.speculative.state import Scored

V, B, GAMMA, LIMIT, EOS = 16, 12, 4, 12, 1
TARGET = HashModel(V, 0)
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n), EOS] for n in RNG.integers(0, 7, B)]
GAMMAS = [1 + row % GAMMA for row in range(B)]
PREFIXES = [RNG.integers(2, V, row % 5).tolist() for row in range(B)]
LIMITS = [1 if row % 6 == 5 else LIMIT for row in range(B)]
pytestmark = pytest.mark.usefixtures("quick")


def greedy(drafter, order=range(B), **options):
    def reorder(values):
        return [values[row] for row in order]

    options = (
        dict(
            max_new_tokens=reorder(LIMITS),
            decoder_prefix=reorder(PREFIXES),
            gamma=reorder(GAMMAS),
            eos_ids=[EOS],
        )
        | options
    )
    return sd.generate(TARGET, reorder(INPUTS), drafter=drafter, **options)


def test_greedy_output_is_that_of_plain_decoding():
    """γ of 1 to 4, prefixes of 0 to 4 tokens, one new token, independent rows; PITFALLS 29."""
    drafter = sd.AssistedNGramDrafter(order=3, memory=5)
    result = greedy(drafter)
    np.testing.assert_array_equal(result.tokens, greedy(None).tokens)
    assert result.stats.draft_calls == 0 and 0 < result.stats.acceptance_rate < 1
    for row, stats in enumerate(result.stats.per_row):
        assert LIMITS[row] > 1 or stats.drafted == 0
    order = np.random.default_rng(1).permutation(B)

    def again():
        other = greedy(drafter, order)
        for place, row in enumerate(order):
            assert other.tokens[place].tolist() == result.tokens[row].tolist()
            assert other.stats.per_row[place].drafted == result.stats.per_row[row].drafted
            assert other.stats.per_row[place].accepted == result.stats.per_row[row].accepted

    assert compilations(again) == 0


def test_an_input_that_is_repeated_is_copied():
    target, ids = EchoModel(Words()), [5, 9, 3, 7, 2, 11, 4, 8, 6, 1]
    result = sd.generate(
        target, [ids], drafter=sd.AssistedNGramDrafter(), gamma=4, max_new_tokens=20
    )
    assert result.tokens[0, : result.lengths[0]].tolist() == ids
    assert result.stats.target_calls <= 4


@pytest.mark.slow
def test_distribution_through_the_engine():
    """Row 5 of PITFALLS: the joint distribution of three tokens by token verification.

    Token verification tells apart what a mistake changes.
    """
    target = HashModel(V, 0, spread=3.0)
    drafter = sd.AssistedNGramDrafter(order=3, top_k=2, memory=4)
    counts, (examined, accepted) = sample(target, drafter, SPREAD, 2 * ROWS, verifier="token")
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.02 < accepted.sum() / examined.sum() < 0.9
    assert (
        g_test(counts, joint_distribution(HashModel(V, 1, spread=3.0, likeness=0.8), SPREAD))
        < FALSE_ALARM
    )


@functools.cache
def coupled(drafter):
    return greedy(
        drafter,
        verifier="gumbel",
        sampling=sd.SamplingConfig(temperature=1.0),
        key=jax.random.key(3),
    )


@pytest.mark.slow
def test_with_gumbel_coupling_the_output_is_the_targets_own_sample():
    drafted = coupled(sd.AssistedNGramDrafter(order=3, memory=5))
    np.testing.assert_array_equal(drafted.tokens, coupled(None).tokens)
    assert drafted.stats.accepted > 0


# --- What is drafted ---


def slow_draft(known, order: int, prefix: list[int], wanted: int, eos: int) -> list[int]:
    """Ids by counting in Python; `known` is ([input], [(context, {id: weight})] of the memory)."""
    source, memory, drafted = *known, []
    while len(drafted) < wanted and eos not in drafted:
        text, found = prefix + drafted, collections.defaultdict(lambda: collections.Counter())
        for size in range(order):
            context = tuple(text[len(text) - size :])
            if len(context) < size:
                continue
            for random_bits, first in ((text, max(size, 1)), (source, size)):
                for place in range(first, len(random_bits)):
                    if tuple(random_bits[place - size : place]) == context:
                        found[size][random_bits[place]] += 1
            for before, following in memory:
                if before[len(before) - size :] == context:
                    found[size].update(following)
        best = found[max(found)] if found else {0: 1.0}
        heaviest = max(best.values())
        drafted.append(min(token for token, weight in best.items() if weight > heaviest - 1e-5))
    return drafted


@pytest.mark.parametrize("order", [2, 4])
def test_drafts_equal_a_slow_count(order):
    """Small alphabets, junk past the lengths, two rows of every input, a part-empty memory."""
    rows, rng = 300, np.random.default_rng(order)
    drafter = sd.AssistedNGramDrafter(order, top_k=2, memory=6)
    state, _ = prepare(
        TARGET, [[3, 4, 5]] * rows, drafter=drafter, gamma=GAMMA, max_new_tokens=12, eos_ids=[EOS]
    )
    alphabet = rng.choice([3, 5, 9], rows)
    tokens = rng.integers(0, alphabet[:, None], (rows, state.tokens.shape[1])).astype(np.int32)
    lengths, wanted = (
        rng.integers(1, 13, rows).astype(np.int32),
        rng.integers(0, GAMMA + 1, rows).astype(np.int32),
    )
    inputs = rng.integers(0, alphabet[::2, None], (rows // 2, 8)).astype(np.int32)
    input_lengths = rng.integers(0, 9, rows // 2).astype(np.int32)
    written = rng.integers(0, 7, rows).astype(np.int32)
    empty = np.arange(6) >= written[:, None]
    missing = np.arange(order - 1) >= rng.integers(0, order, (rows, 6, 1))
    contexts = np.where(
        missing | empty[..., None],
        -2,
        rng.integers(0, alphabet[:, None, None], (rows, 6, order - 1)),
    )
    first = rng.integers(0, alphabet[:, None], (rows, 6))
    following = np.stack([first, (first + 1) % alphabet[:, None]], axis=-1)
    # Eighths, so that sums are exact in any order.
    weights = np.where(
        empty[..., None],
        0,
        np.stack([rng.integers(4, 7, (rows, 6)), rng.integers(1, 4, (rows, 6))], -1) / 8,
    )

    @jax.jit
    def run(state, own, tokens, lengths, wanted):
        return drafter.draft(own, state.replace(tokens=tokens, lengths=lengths), wanted)[1]

    own = NGramMemory(
        Inputs(np.repeat(inputs, 2, axis=0), np.repeat(input_lengths, 2)),
        contexts.astype(np.int32),
        following.astype(np.int32),
        weights.astype(np.float32),
        written,
    )
    draft = jax.device_get(run(state, own, tokens, lengths, wanted))
    assert not draft.calls.any() and draft.dist is None
    by_memory = 0
    for row in range(rows):
        source = inputs[row // 2, : input_lengths[row // 2]].tolist()
        memory = [
            (
                tuple(token for token in context[::-1].tolist() if token >= 0),
                dict(zip(ids.tolist(), shares.tolist())),
            )
            for context, ids, shares in list(zip(contexts[row], following[row], weights[row]))[
                : written[row]
            ]
        ]
        prefix = tokens[row, : lengths[row]].tolist()
        expected = slow_draft((source, memory), order, prefix, wanted[row], EOS)
        assert draft.tokens[row, : draft.num_drafted[row]].tolist() == expected
        by_memory += expected != slow_draft((source, []), order, prefix, wanted[row], EOS)
    assert by_memory > 20


def test_what_is_remembered():
    """The ring of latest positions equals a Python list: contexts, best ids, probabilities."""
    rows, memory, calls, order = 40, 6, 5, 3
    drafter = sd.AssistedNGramDrafter(order, top_k=2, memory=memory)
    state, request = prepare(
        TARGET, [[3, 4, 5]] * rows, drafter=drafter, gamma=GAMMA, max_new_tokens=40, eos_ids=[EOS]
    )
    observe, rng = (
        jax.jit(lambda own, state, scored: drafter.observe(own, state, scored)),
        np.random.default_rng(0),
    )
    own, texts, kept = state.draft_state, [[0] for _ in range(rows)], [[] for _ in range(rows)]
    assert own.contexts.shape == (rows, memory, order - 1)
    for _ in range(calls):
        logits = rng.normal(size=(rows, GAMMA + 1, V)).astype(np.float32)
        drafted, done = rng.integers(0, GAMMA + 1, rows), rng.random(rows) < 0.2
        num_new = np.where(done, 0, 1 + rng.integers(0, drafted + 1))
        fed = rng.integers(2, V, (rows, GAMMA + 1))
        fed[:, 0] = [text[-1] for text in texts]
        probs = np.exp(logits.astype(np.float64))
        probs /= probs.sum(axis=-1, keepdims=True)
        for row in np.flatnonzero(~done):
            for place in range(drafted[row] + 1):
                before = (texts[row][:-1] + fed[row, : place + 1].tolist())[1 - order :]
                best = np.argsort(-logits[row, place])[:2]
                kept[row].append((before, best.tolist(), probs[row, place, best]))
            texts[row] += [*fed[row, 1 : num_new[row]].tolist(), int(rng.integers(2, V))]
        tokens = np.array(
            [text + [7] * (state.tokens.shape[1] - len(text)) for text in texts], np.int32
        )
        lengths = np.array([len(text) for text in texts], np.int32)
        after = state.replace(
            tokens=tokens, lengths=lengths, last_drafted=np.where(done, 0, drafted).astype(np.int32)
        )
        scored = Scored(fed.astype(np.int32), jnp.zeros(()), logits, num_new.astype(np.int32))
        own = jax.device_get(observe(own, after, scored))
        for row in range(rows):
            assert own.written[row] == len(kept[row])
            for number in range(max(0, len(kept[row]) - memory), len(kept[row])):
                (before, best, shares), slot = kept[row][number], number % memory
                assert [
                    token for token in own.contexts[row, slot][::-1].tolist() if token != -2
                ] == before
                assert own.tokens[row, slot].tolist() == best
                np.testing.assert_allclose(own.weights[row, slot], shares, rtol=1e-5)
    assert max(map(len, kept)) > 2 * memory


@pytest.mark.parametrize(
    "name, value", [("order", 1), ("order", 17), ("top_k", 0), ("memory", 0), ("order", 2.0)]
)
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}, expected an integer from"):
        sd.AssistedNGramDrafter(**{name: value})


def test_its_name_on_the_command_line():
    drafter = make_named_drafter("assisted", TARGET, None, None)
    assert drafter == sd.AssistedNGramDrafter() and drafter.name == "assisted 4-grams"
