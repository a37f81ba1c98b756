"""Random draws: keys of requests, random bits by purpose, and the draw of one id.

Every draw is a function of a request's key, its committed length, the offset in the draft and the
purpose; so a request's sample does not depend on its batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from specdec_jax.backends.axes import PerRow

# Every key is turned into this kind, since JAX batches the others (rbg, unsafe_rbg) by drawing for
# all rows from the first row's key.
KEY_IMPL = "threefry2x32"


def make_key(seed: int) -> Key[Array, ""]:
    """Returns the threefry key of a seed, whatever kind of key JAX is set to make by default."""
    return jax.random.key(seed, impl=KEY_IMPL)


def to_threefry(key: Array) -> Key[Array, "..."]:
    """Returns a key, or an array of keys, as threefry keys; threefry keys are returned as they are.

    Args:
      key: typed keys of any kind, or raw ones `[..., random_bits]` in uint32: two words are a
        threefry key, four an rbg key. Of a key of another kind all words count: the first two make
        a threefry key, into which the others are folded.

    Raises:
      ValueError: `key` holds neither typed nor raw keys.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if typed and str(jax.random.key_impl(key)) == KEY_IMPL:
        return key
    bits = jax.random.key_data(key) if typed else key
    if bits.dtype != jnp.uint32 or bits.ndim == 0 or not (typed or bits.shape[-1] in (2, 4)):
        got = f"an array of shape {key.shape} and type {key.dtype}"
        expected = "raw keys of 2 words of uint32 (threefry) or 4 (rbg)"
        raise ValueError(f"key: got {got}, expected jax.random.key(seed), or {expected}")
    return _bits_to_uniform(bits)


@jax.jit
def _bits_to_uniform(random_bits: UInt32[Array, "*N W"]) -> Key[Array, "*N"]:
    fold = jnp.vectorize(jax.random.fold_in)
    keys = jax.random.wrap_key_data(random_bits[..., :2], impl=KEY_IMPL)
    for place in range(2, random_bits.shape[-1]):
        keys = fold(keys, random_bits[..., place])
    return keys


# Tags of the purposes for which one row draws; no two purposes share one, so that their draws are
# independent.
DRAFT, ACCEPT, RESIDUAL, BONUS, GUMBEL = range(5)


def random_bits(
    keys: Key[Array, " B"], lengths: PerRow, offsets: Int[Array, "B N"], tag: int
) -> UInt32[Array, "B N 2"]:
    """Returns pairs of random bits, as `draw` takes them.

    Each pair is a function of the four arguments' values for its row, never of the row's place in
    the batch.

    Args:
      keys: threefry keys, one per request.
      lengths: committed lengths at the start of the iteration.
      offsets: offsets in the draft, from 0.
      tag: the purpose: DRAFT, ACCEPT, RESIDUAL or BONUS.
    """

    def one(key: jax.Array, offset: jax.Array):
        # Nothing is drawn from this key, so its own two words serve as the random ones.
        return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, offset), tag))

    folded = jax.vmap(jax.random.fold_in)(keys, lengths)
    return jax.vmap(jax.vmap(one, (None, 0)))(folded, offsets)


def uniforms(
    keys: Key[Array, " B"], lengths: PerRow, offsets: Int[Array, "B N"], tag: int
) -> Float[Array, "B N"]:
    """Returns uniforms in [0, 1), multiples of 2⁻²⁴; the arguments are those of `random_bits`."""
    bits = random_bits(keys, lengths, offsets, tag)[..., 1] >> 8
    return bits.astype(jnp.float32) * jnp.float32(2**-24)


def gumbel_noise(
    keys: Key[Array, " B"], positions: Int[Array, "B N"], vocab_size: int
) -> Float[Array, "B N {vocab_size}"]:
    """Returns the standard Gumbel noise of absolute positions, the same at every visit.

    Only Gumbel coupling may use randomness that depends on the position alone: other verifiers
    condition on draws that they then discard.
    """

    def one(key: jax.Array, position: jax.Array):
        key = jax.random.fold_in(jax.random.fold_in(key, position), GUMBEL)
        return jax.random.gumbel(key, (vocab_size,), mode="high")

    return jax.vmap(jax.vmap(one, (None, 0)))(keys, positions)


_BLOCK = 128


def draw(weights: Float[Array, "B V"], random: UInt32[Array, "B 2"]) -> Int[Array, " B"]:
    """Draws one id per row: a block of ids by the first random word, one of its ids by the second.

    A single float32 uniform has too few bits for a large vocabulary, and float32 sums round: with
    256,000 ids, both would shift the distribution by 1e-5 to 1e-2 in total variation. Sums of
    integers are exact, and two words of 32 bits leave an error of less than 1e-6.

    Args:
      weights: probabilities up to a factor; not negative.
      random: pairs of words as from `random_bits`.

    Returns:
      Ids; −1 where no weight is positive, or one is NaN. An id of weight 0 is never drawn, an id of
      positive weight always can be.
    """
    batch, size = weights.shape
    blocks = -(-size // _BLOCK)
    weights = jnp.pad(weights, ((0, 0), (0, blocks * _BLOCK - size))).reshape(batch, blocks, _BLOCK)
    block = choose(jnp.sum(weights, axis=-1), random[:, 0])
    chosen = jnp.take_along_axis(weights, jnp.maximum(block, 0)[:, None, None], axis=1)[:, 0]
    inside = choose(chosen, random[:, 1])
    return jnp.where((block < 0) | (inside < 0), -1, block * _BLOCK + inside)


def choose(weights: Float[Array, "B N"], bits: UInt32[Array, " B"]) -> Int[Array, " B"]:
    """Returns the index of the weight at the fraction `bits` / 2³² of the cumulative sum.

    Weights are rounded up to multiples of 2⁻³¹ of their sum, so that no positive one becomes 0. The
    index is −1 where the sum is not positive and finite.
    """
    total = jnp.sum(weights, axis=-1, keepdims=True)
    sound = (total > 0) & (total < jnp.inf)  # False for NaN too
    shares = jnp.where(sound, weights / jnp.where(sound, total, 1), 0)
    shares = jnp.ceil(shares * 2.0**31).astype(jnp.uint32)
    cumulative = jnp.cumsum(shares, axis=-1, dtype=jnp.uint32)
    goal = _high_bits(bits[:, None], cumulative[:, -1:])
    place = jnp.sum(cumulative <= goal, axis=-1, dtype=jnp.int32)
    return jnp.where(sound[:, 0], place, -1)


def _high_bits(a: UInt32[Array, "*N"], b: UInt32[Array, "*N"]) -> UInt32[Array, "*N"]:
    """Returns ⌊a · b / 2³²⌋, computed from 16-bit halves: JAX has no 64-bit integers by default."""
    (a_low, a_high), (b_low, b_high) = ((x & 0xFFFF, x >> 16) for x in (a, b))
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)
