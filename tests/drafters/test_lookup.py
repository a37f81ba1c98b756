"""Drafters without a model beside slow counts and searches, in files and commands."""

import collections
import functools

import jax
import numpy as np
import pytest
import tiers
import toy
from distribution_samples import FALSE_ALARM, ROWS, SPREAD, g_test, joint_distribution, sample
from tables import EOS, GAMMA, INPUTS, LIMIT, LIMITS, OPTIONS, PREFIXES, TARGET, B, V, plain
from toy_models import HashModel, Words, compilations

import specdec_jax as sd
from specdec_jax.decoding.generate import prepare
from specdec_jax.drafters.continuations import Texts
from specdec_jax.speculative import distributions as speculative_distributions
from specdec_jax.speculative import randomness
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")
GAMMAS = [1 + row % GAMMA for row in range(B)]


@functools.cache
def drafter(name: str):
    """Counts tables from the target's output without prefixes, right now and then."""
    if name == "lookup":
        return sd.PromptLookupDrafter()
    if name == "random":
        return sd.RandomDrafter(V)
    outputs = sd.generate(TARGET, INPUTS, max_new_tokens=LIMIT, eos_ids=[EOS])
    sequences = [row[:length].tolist() for row, length in zip(outputs.tokens, outputs.lengths)]
    return sd.NGramDrafter.count(sequences, V, int(name[0]), sampled=name.endswith("sampled"))


NAMES = ["1-gram", "2-gram", "3-gram", "2-gram, sampled", "lookup", "random"]


def greedy(name: str, order=range(B)):
    def reorder(values):
        return [values[row] for row in order]

    options = dict(OPTIONS, max_new_tokens=reorder(LIMITS), decoder_prefix=reorder(PREFIXES))
    return sd.generate(
        TARGET, reorder(INPUTS), drafter=drafter(name), gamma=reorder(GAMMAS), **options
    )


@tiers.parametrize("name", NAMES, first=2)
def test_greedy_output_is_that_of_plain_decoding(name):
    """γ of 1 to 4, prefixes of 0 to 4 tokens, one new token, independent rows; PITFALLS 29."""
    result, expected = greedy(name), plain()
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    np.testing.assert_array_equal(result.lengths, expected.lengths)
    assert result.stats.draft_calls == 0
    rows = result.stats.per_row
    for row, stats in enumerate(rows):
        assert stats.accepted <= stats.drafted <= GAMMAS[row] * stats.target_calls
        if LIMITS[row] == 1:
            assert (
                stats.drafted == 0
                and stats.acceptance_rate is None
                and stats.tokens_per_target_call == 1
            )
    if "gram" in name:
        assert 0 < result.stats.acceptance_rate < 1
    order = np.random.default_rng(1).permutation(B)

    def again():
        other = greedy(name, order)
        for place, row in enumerate(order):
            assert other.tokens[place].tolist() == result.tokens[row].tolist()
            if name != "random":  # which draws from keys that belong to a place
                assert other.stats.per_row[place].drafted == rows[row].drafted
                assert other.stats.per_row[place].accepted == rows[row].accepted

    assert compilations(again) == 0


# --- Distributions ---


def table_for_distribution(sampled: bool):
    """Of fewer ids than the target has, and of contexts many of which were not seen."""
    sequences = np.random.default_rng(2).integers(0, 13, (6, 20)).tolist()
    return sd.NGramDrafter.count(sequences, 13, 3, continuations=4, sampled=sampled)


@tiers.parametrize(
    "how, verifier", [("sampled", "block"), ("point", "token"), ("point", "block")], first=0
)
def test_distribution_through_the_engine(how, verifier):
    """Rows 5 and 12 of PITFALLS: the joint distribution of three tokens."""
    target = HashModel(V, 0, spread=3.0)
    counts, (examined, accepted) = sample(
        target, table_for_distribution(how == "sampled"), SPREAD, 2 * ROWS, verifier=verifier
    )
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert 0.02 < accepted.sum() / examined.sum() < 0.9
    assert (
        g_test(counts, joint_distribution(HashModel(V, 1, spread=3.0, likeness=0.8), SPREAD))
        < FALSE_ALARM
    ), "the test can fail"


FILTERS = dict(temperature=0.8, top_k=3)


@pytest.mark.parametrize(
    "name, verifier",
    [("2-gram, sampled", "token"), ("2-gram, sampled", "gumbel"), ("random", "block")],
)
def test_the_returned_distribution_is_the_distribution_that_was_drawn_from(name, verifier):
    """The draft is repeated from its distribution and uniforms, or noise.

    The distribution is that of the counts and a sort.
    """
    config, forbidden = (
        SamplingConfig(**FILTERS, forbidden_tokens=(3, EOS)),
        np.isin(np.arange(V), (3, EOS)),
    )
    state, request = prepare(
        TARGET,
        INPUTS,
        drafter=drafter(name),
        gamma=3,
        sampling=config,
        max_new_tokens=9,
        eos_ids=(),
        verifier=verifier,
    )
    wanted = np.arange(B, dtype=np.int32) % 4
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, wanted))(request.drafter, state)
    np.testing.assert_array_equal(draft.num_drafted, wanted)
    valid, tokens = np.arange(3) < wanted[:, None], np.asarray(draft.tokens)

    logits = np.zeros((B, 3, V))
    if name != "random":
        before = np.pad(tokens, ((0, 0), (1, 0)))  # the start token is 0
        dist = jax.jit(
            lambda table, tokens, lengths: table.logits((), Texts(tokens, lengths, lengths))
        )
        dists = [dist(drafter(name), before, np.full(B, length, np.int32)) for length in (1, 2, 3)]
        logits = np.stack(jax.device_get(dists), axis=1)
    allowed = np.where(forbidden, -np.inf, logits)
    some = np.any(
        allowed > -np.inf, axis=-1, keepdims=True
    )  # where nothing is left, nothing is forbidden
    expected = toy.adjusted_probs(
        np.where(some, allowed, logits), **({} if name == "random" else FILTERS)
    )

    @jax.jit
    def drawn(keys, lengths, probs):
        offsets = np.broadcast_to(np.arange(3), (B, 3))
        if verifier == "gumbel":
            noise = randomness.gumbel_noise(keys, lengths[:, None] + offsets, V)
            return speculative_distributions.argmax(jax.numpy.log(probs) + noise)
        random_bits = randomness.random_bits(keys, lengths, offsets, randomness.DRAFT)
        return randomness.draw(probs.reshape(-1, V), random_bits.reshape(-1, 2)).reshape(B, 3)

    if verifier == "gumbel":
        assert draft.dist is None
    else:
        np.testing.assert_allclose(
            np.exp(draft.dist.logits - draft.dist.log_normalizer[..., None])[valid],
            expected[valid],
            atol=1e-6,
        )
    again = np.asarray(drawn(state.keys, state.lengths, expected.astype(np.float32)))
    np.testing.assert_array_equal(again[valid], tokens[valid])


def test_random_tokens_are_uniform_at_temperature_0_too():
    rows, vocab = 4000, 8
    state, request = prepare(
        TARGET, [[3]] * rows, drafter=sd.RandomDrafter(vocab), gamma=2, max_new_tokens=5, eos_ids=()
    )
    _, draft = jax.jit(lambda d, s: d.draft(s.draft_state, s, np.full(rows, 2, np.int32)))(
        request.drafter, state
    )
    counts = np.bincount((np.asarray(draft.tokens) @ [vocab, 1]), minlength=vocab**2)
    assert g_test(counts, np.full(vocab**2, 1 / vocab**2)) > 1e-6


# --- Counting ---


def slow_counts(sequences, order: int, start: int) -> dict:
    """Context -> how often each id follows, for contexts of up to order − 1 ids."""
    found: dict = collections.defaultdict(collections.Counter)
    for sequence in sequences:
        padded = [start] * (order - 1) + list(sequence)
        for place, token in enumerate(sequence, order - 1):
            for length in range(order):
                found[tuple(padded[place - length : place])][token] += 1
    return found


def slow_distribution(found: dict, prefix, order: int, start: int, most: int) -> np.ndarray:
    padded = [start] * (order - 1) + list(prefix)
    context = next(
        context
        for length in reversed(range(order))
        if (context := tuple(padded[len(padded) - length :])) in found  # () always is
    )
    dist, kept = np.zeros(V), sorted(found[context].items(), key=lambda item: (-item[1], item[0]))
    for token, count in kept if context == () else kept[:most]:
        dist[token] = count
    return dist / dist.sum()


@pytest.mark.parametrize(
    "order, start, alphabet", [(1, 0, V), (2, 0, 4), (2, 3, V), (3, 2, 5), (4, 0, 3)]
)
def test_tables_equal_counting_in_python(order, start, alphabet):
    """Distributions after every context, seen or not, with the most frequent id and its ties."""
    rng, most = np.random.default_rng(order * alphabet), 3
    sequences = [rng.integers(0, alphabet, rng.integers(0, 9)).tolist() for _ in range(40)]
    table = sd.NGramDrafter.count(sequences, V, order, start_token=start, continuations=most)
    found = slow_counts(sequences, order, start)
    lengths = rng.integers(1, 7, 300)
    tokens = rng.integers(0, min(alphabet + 1, V), (300, 8))
    tokens[:, 0] = start  # a row begins with it
    rows = jax.jit(lambda table, tokens, lengths: table.find_rows(tokens, lengths)[0])(
        table, tokens, lengths
    )
    logits = jax.jit(lambda table, *texts: table.logits((), Texts(*texts)))
    dists = np.exp(np.asarray(logits(table, tokens, lengths, lengths), np.float64))
    best = np.asarray(table.ranked(rows, 1)[:, 0])
    for row, (ids, length) in enumerate(zip(tokens.tolist(), lengths)):
        # Its start token is one of the padding that counting puts before a sequence.
        expected = slow_distribution(found, ids[1:length] if order > 1 else [], order, start, most)
        np.testing.assert_allclose(dists[row] / dists[row].sum(), expected, rtol=1e-5)
        assert best[row] == np.argmax(expected)


def test_before_a_prompt_stand_start_tokens():
    """A prompt need not begin with one: after (0, 1) comes 2, after (1, 1) comes 3."""
    table = sd.NGramDrafter.count([[1, 2], [4, 1, 1, 3]], V, 3, start_token=0)
    rows, _ = table.find_rows(np.array([[1, 1], [1, 1]]), np.array([1, 2]))
    assert np.asarray(table.ranked(rows, 1)).tolist() == [[2], [3]]


WRONG = [
    (dict(sequences=[]), "sequences: got no id at all"),
    (
        dict(sequences=[[], []]),
        "sequences: got no id at all, expected at least one sequence that is not empty",
    ),
    (dict(sequences=[[3, V]]), f"sequences: got id {V}, expected ids from 0 to {V - 1}"),
    (dict(sequences=[[3, -1]]), "sequences: got id -1"),
    (dict(sequences=[[0.5]]), "sequences: got something else than ids"),
    (dict(order=0), "order: got 0, expected an integer from 1 to 16"),
    (dict(continuations=0), "continuations: got 0"),
    (dict(start_token=V), f"start_token: got {V}"),
]


@pytest.mark.parametrize("change, message", WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_counted_is_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        sd.NGramDrafter.count(**{**dict(sequences=[[3, 4]], vocab_size=V, order=2), **change})


def test_arguments_of_the_other_drafters():
    with pytest.raises(ValueError, match="max_match: got 0, expected an integer from 1"):
        sd.PromptLookupDrafter(max_match=0)
    with pytest.raises(ValueError, match="vocab_size: got 0, expected an integer from 1 to"):
        sd.RandomDrafter(0)


# --- Files, and tables that do not fit ---


def test_a_saved_table_drafts_the_same(tmp_path):
    for name in ("2-gram", "3-gram, sampled"):
        drafter(name).save(tmp_path / "table.npz")
        loaded = sd.NGramDrafter.load(tmp_path / "table.npz")
        assert loaded.sampled == drafter(name).sampled and loaded.name == drafter(name).name
        assert jax.tree.structure(loaded) == jax.tree.structure(drafter(name))
        for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(drafter(name))):
            np.testing.assert_array_equal(ours, theirs)
    assert not sd.NGramDrafter.load(tmp_path / "table.npz", sampled=False).sampled


def test_files_that_are_no_whole_table_are_rejected(tmp_path):
    path = tmp_path / "table.npz"
    with pytest.raises(ValueError, match="table.npz: got no such file, expected an n-gram table"):
        sd.NGramDrafter.load(path)
    drafter("3-gram").save(path)
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:-30], whole[:10], b"", b"no table\n" * 9):
        path.write_bytes(broken)
        with pytest.raises(
            ValueError,
            match="table.npz: got a file that cannot be read .*, expected an n-gram table",
        ):
            sd.NGramDrafter.load(path)
    np.savez(path, values=np.arange(3))
    with pytest.raises(
        ValueError, match="table.npz: got something else, expected a specdec_jax n-gram table"
    ):
        sd.NGramDrafter.load(path)
    np.save(tmp_path / "array.npy", np.arange(3))
    path.write_bytes((tmp_path / "array.npy").read_bytes())
    with pytest.raises(ValueError, match="table.npz: got"):
        sd.NGramDrafter.load(path)
    path.write_bytes(whole)
    values = dict(np.load(path))
    for name in ("next_tokens", "parents", "starts"):
        np.savez(path, **{**values, name: values[name][::-1]})
        if name != "next_tokens":  # another order of these is a table too, though another one
            with pytest.raises(
                ValueError, match="table.npz: got arrays that contradict each other"
            ):
                sd.NGramDrafter.load(path)
        np.savez(path, **{**values, name: values[name][:-1]})
        with pytest.raises(ValueError, match="table.npz: got arrays that contradict each other"):
            sd.NGramDrafter.load(path)
    wide = {name: values[name].astype(np.int64) for name in ("counts", "unigram")}
    for change, message in (
        (dict(counts=wide["counts"] * 2**32), "arrays that contradict each other"),
        (dict(unigram=wide["unigram"] * 2**32), "arrays that contradict each other"),
        (dict(unigram=values["unigram"] * 0), "arrays that contradict each other"),
        (dict(sampled=np.zeros(2, bool)), "a sampled that is no bool"),
        (dict(sampled=np.array("no")), "a sampled that is no bool"),
    ):
        np.savez(path, **{**values, **change})
        with pytest.raises(ValueError, match=f"table.npz: got {message}, expected an n-gram table"):
            sd.NGramDrafter.load(path)


def test_a_table_of_another_vocabulary_is_rejected(tmp_path):
    """PITFALLS row 28."""
    count = functools.partial(sd.NGramDrafter.count, [[3, 4, EOS]])
    count(V, 2, vocabulary=Words()).save(tmp_path / "table.npz")
    assert (
        sd.NGramDrafter.load(tmp_path / "table.npz", Words()).fingerprint == Words().fingerprint()
    )
    with pytest.raises(
        ValueError, match="table.npz: got a table of 16 ids of another vocabulary, expected that of"
    ):
        sd.NGramDrafter.load(tmp_path / "table.npz", Words(1))
    target = HashModel(V, 0, vocabulary=Words())
    for wrong, message in (
        (
            count(V, 2, vocabulary=Words(1)),
            "drafter: got a table of 16 ids of another vocabulary, expected that of",
        ),
        (count(V + 1, 2), "drafter: got a table of 17 ids, expected at most the target's 16"),
        (count(V, 2, start_token=2), "drafter: got start token 2, expected the target's 0"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(target, [[3]], drafter=wrong, gamma=2)
