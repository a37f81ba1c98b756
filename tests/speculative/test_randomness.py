"""Draws: the distribution of `draw`, point by point of its random bits, and keys of every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import HashModel

from specdec_jax.decoding.generate import generate
from specdec_jax.decoding.keys import row_keys
from specdec_jax.speculative import randomness
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")

draw, choose = jax.jit(randomness.draw), jax.jit(randomness.choose)
SPREAD = SamplingConfig(temperature=1.0)


# --- The distribution ---


def dist(weights: np.ndarray, choose=choose) -> np.ndarray:
    """Returns the probabilities `[N]` of `choose` over all 2³² random bits, exactly.

    Bisection finds where each place begins.
    """
    size = len(weights)
    rows, places = np.broadcast_to(weights, (size, size)), np.arange(size)
    low, high = (
        np.zeros(size, np.int64),
        np.full(size, 2**32, np.int64),
    )  # the first word whose place is above j
    while np.any(low < high):
        middle = (low + high) // 2
        above = np.asarray(choose(rows, np.minimum(middle, 2**32 - 1).astype(np.uint32))) > places
        low, high = np.where(above | (low == high), low, middle + 1), np.where(above, middle, high)
    return np.diff(np.concatenate([[0], low])) / 2**32


def deviation(weights: np.ndarray, choose=choose) -> float:
    """Total variation between the distribution of `choose` and the weights."""
    found, expected = (
        dist(weights, choose),
        weights.astype(np.float64) / weights.astype(np.float64).sum(),
    )
    np.testing.assert_array_equal(found > 0, expected > 0)
    return 0.5 * np.abs(found - expected).sum()


V = 256_000
RNG = np.random.default_rng(0)
DISTRIBUTIONS = {
    "uniform": np.ones(V),
    "Zipf's": 1 / np.arange(1, V + 1),
    "logits": np.exp(4 * RNG.normal(size=V)),
    "one id and a tail": np.where(np.arange(V) == 77_777, 1.0, 1e-7),
    "one id and next to nothing": np.where(
        np.arange(V) == 77_777, 1.0, 1e-20
    ),  # what is rounded up most
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_grid_hardly_shows_at_256000_ids(name):
    """Blocks and their ids deviate by less than 1e-6 in sum, and every id can be drawn."""
    weights = (DISTRIBUTIONS[name] / DISTRIBUTIONS[name].sum()).astype(np.float32)
    blocks = weights.reshape(-1, 128)
    sums = np.asarray(jax.jit(lambda x: jnp.sum(x, axis=-1))(blocks))
    exact = blocks.astype(np.float64).sum(axis=1)
    heaviest = np.argsort(sums)[-6:]
    inside = max(
        deviation(blocks[block]) for block in [*heaviest, *RNG.integers(len(blocks), size=6)]
    )
    rounded = 0.5 * np.abs(sums / sums.sum(dtype=np.float64) - exact / exact.sum()).sum()
    assert deviation(sums) + rounded + inside < 1e-6


@pytest.mark.slow
def test_fewer_bits_would_show():
    """With the 23 bits of a float32 uniform the same test fails."""

    def few(weights, bits):
        return choose(weights, bits & np.uint32(0xFFFFFE00))

    blocks = DISTRIBUTIONS["logits"].astype(np.float32).reshape(-1, 128).sum(axis=1)
    assert deviation(blocks, few) > 1e-5


@tiers.parametrize("vocab", [1, 3, 128, 129, 400, 40_000], first=5)
def test_draw_inverts_the_distribution_function(vocab):
    """A block by the first word, an id of it by the second, in order; weights need not sum to 1."""
    rng = np.random.default_rng(vocab)
    weights = (rng.dirichlet(np.full(vocab, 0.3)) * 0.25 * (rng.random(vocab) < 0.7)).astype(
        np.float32
    )
    weights[-1] = 0.01
    random = rng.integers(2**32, size=(4096, 2), dtype=np.uint32)
    padded = np.pad(weights.astype(np.float64), (0, -vocab % 128)).reshape(-1, 128)

    def draw_at(weights, bits):
        ends = np.cumsum(weights, axis=-1) / weights.sum(axis=-1, keepdims=True)
        points = bits / 2**32
        near = np.any(np.abs(ends - points[:, None]) < 1e-6, axis=1)
        return np.minimum(np.sum(ends <= points[:, None], axis=1), weights.shape[-1] - 1), near

    block, near = draw_at(np.broadcast_to(padded.sum(axis=1), (4096, len(padded))), random[:, 0])
    inside, near_too = draw_at(
        np.where(padded[block].sum(axis=1, keepdims=True) > 0, padded[block], 1), random[:, 1]
    )
    ids, clear = (
        np.asarray(draw(np.broadcast_to(weights, (4096, vocab)), random)),
        ~(near | near_too),
    )
    assert np.mean(clear) > 0.9
    np.testing.assert_array_equal(ids[clear], (block * 128 + inside)[clear])
    assert np.all(weights[ids] > 0)


@pytest.mark.parametrize("bits", [0, 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("vocab", [4, 128, 1000, 40_000])
def test_draw_never_takes_weight_zero(vocab, bits):
    rng = np.random.default_rng(vocab)
    weights = (rng.random((32, vocab)) * (rng.random((32, vocab)) < 0.3)).astype(np.float32)
    weights[:, 0] = weights[:, -1] = 0
    weights[:, 2] = 0.1
    weights[0], weights[0, 1] = 0, 1e-30
    ids = np.asarray(draw(weights, np.full((32, 2), bits, np.uint32)))
    assert np.all(np.take_along_axis(weights, ids[:, None], axis=1) > 0)


def test_every_positive_weight_can_be_drawn():
    """A weight of less than 2⁻³¹ of the sum is rounded up, and is drawn by the greatest words."""
    weights = np.array([[1, 1e-12, 0]], np.float32)
    assert draw(weights, np.full((1, 2), 2**32 - 1, np.uint32)).tolist() == [1]


def test_nothing_is_drawn_from_what_is_no_distribution():
    weights = np.ones((5, 300), np.float32)
    weights[0, 200], weights[1], weights[2, 3], weights[3, 299] = np.nan, 0, np.inf, -np.nan
    ids = np.asarray(draw(weights, np.full((5, 2), 2**31, np.uint32)))
    np.testing.assert_array_equal(ids[:4], -1)
    assert ids[4] >= 0


def test_random_bits_are_apart():
    """No two of (request, committed length, offset, use) share random bits.

    The batch index plays no part.
    """
    keys = jax.random.split(randomness.make_key(0), 4)
    lengths, offsets = jnp.array([1, 2, 2, 3]), jnp.broadcast_to(jnp.arange(5), (4, 5))
    tags = (randomness.DRAFT, randomness.ACCEPT, randomness.RESIDUAL, randomness.BONUS)
    assert len(set(tags)) == 4
    values = [np.asarray(randomness.random_bits(keys, lengths, offsets, tag)) for tag in tags]
    later = np.asarray(randomness.random_bits(keys, lengths + 10, offsets, randomness.DRAFT))
    everything = np.concatenate([np.ravel(value) for value in (*values, later)])
    assert len(np.unique(everything)) == len(everything)
    turned = randomness.random_bits(keys[::-1], lengths[::-1], offsets, randomness.DRAFT)
    np.testing.assert_array_equal(turned[::-1], values[0])
    alone = randomness.random_bits(keys[2:3], lengths[2:3], offsets[:1, 3:], randomness.DRAFT)
    np.testing.assert_array_equal(alone, values[0][2:3, 3:])
    uniform = np.asarray(randomness.uniforms(keys, lengths, offsets, randomness.ACCEPT))
    assert uniform.dtype == np.float32 and np.all((uniform >= 0) & (uniform < 1))


def test_uniforms_reach_both_ends(monkeypatch):
    keys, offsets = randomness.make_key(0)[None], jnp.zeros((1, 1), jnp.int32)
    for bits, expected in ((0, 0.0), (2**32 - 1, 1 - 2**-24)):
        monkeypatch.setattr(
            randomness,
            "random_bits",
            lambda *args, bits=bits: jnp.full((1, 1, 2), bits, jnp.uint32),
        )
        assert float(randomness.uniforms(keys, offsets[0], offsets, 0)[0, 0]) == expected


# --- Keys ---

IMPLS = ["rbg", "unsafe_rbg"]


def words_of(key):
    return np.asarray(jax.random.key_data(randomness.to_threefry(key))).tolist()


def test_threefry_keys_stay_what_they_are():
    key = jax.random.key(7, impl="threefry2x32")
    assert randomness.to_threefry(key) is key
    assert words_of(jax.random.key_data(key)) == [0, 7]
    many = jax.random.split(key, 3)
    np.testing.assert_array_equal(words_of(jax.random.key_data(many)), jax.random.key_data(many))


@pytest.mark.parametrize("impl", IMPLS)
def test_every_word_of_other_keys_counts(impl):
    data = np.array(jax.random.key_data(jax.random.key(3, impl=impl)))
    changed = data + np.eye(4, dtype=np.uint32)
    keys = jax.random.wrap_key_data(jnp.asarray(np.vstack([data, changed])), impl=impl)
    found = words_of(keys)
    assert len({tuple(random_bits) for random_bits in found}) == 5
    assert [words_of(key) for key in keys] == found, "one by one or together"
    assert words_of(jnp.asarray(data)) == found[0], "raw or typed"


@pytest.mark.parametrize(
    "key",
    [
        jnp.zeros(2),
        jnp.zeros((), jnp.uint32),
        jnp.zeros(1, jnp.uint32),
        jnp.zeros(3, jnp.uint32),
        jnp.zeros(2, jnp.int32),
    ],
)
def test_what_is_no_key_is_rejected(key):
    with pytest.raises(
        ValueError, match=r"key: got an array of shape .* expected jax.random.key\(seed\)"
    ):
        generate(HashModel(8, 0), [[3, 1]], key=key)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_do_not_depend_on_their_mates_whatever_the_key(impl):
    target = HashModel(16, 0, spread=3.0)

    def sample(inputs, key):
        return generate(target, inputs, key=key, sampling=SPREAD, max_new_tokens=6, eos_ids=())

    together = sample([[3, 1], [4, 1], [3, 1]], jax.random.key(5, impl=impl))
    assert together.tokens[0].tolist() != together.tokens[2].tolist()
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        randomness.to_threefry(jax.random.key(5, impl=impl)), jnp.arange(3)
    )
    for row, inputs in enumerate([[3, 1], [4, 1], [3, 1]]):
        assert (
            sample([inputs], keys[row : row + 1]).tokens[0].tolist()
            == together.tokens[row].tolist()
        )
    mine = jnp.stack([jax.random.key(seed, impl=impl) for seed in (1, 2)])
    both = sample([[3, 1], [3, 1]], mine).tokens.tolist()
    assert both[0] != both[1] and sample([[3, 1]], mine[1:]).tokens.tolist() == both[1:]


def test_no_key_is_the_same_whatever_jax_makes_by_default():
    target, options = (
        HashModel(16, 0, spread=3.0),
        dict(sampling=SPREAD, max_new_tokens=6, eos_ids=()),
    )
    expected = generate(target, [[3, 1]] * 5, **options).tokens
    with jax.default_prng_impl("rbg"):
        found = generate(target, [[3, 1]] * 5, **options).tokens
        np.testing.assert_array_equal(jax.random.key_data(randomness.make_key(9)), [0, 9])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        generate(target, [[3, 1]] * 5, key=randomness.make_key(0), **options).tokens, expected
    )


def test_samples_have_keys_of_their_own():
    """The first sample of an input has the input's key, so that it is the same without others."""
    several, one = (jax.random.key_data(row_keys(jax.random.key(5), 3, n)) for n in (4, 1))
    assert len({tuple(random_bits) for random_bits in several.tolist()}) == 12
    np.testing.assert_array_equal(several[::4], one)
