"""Times the bare matrix products of a decoder step: the floor under every step."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.analysis.timing import STEPS, Call
from specdec_jax.backends.matmul import product
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.layers import apply_weight
from specdec_jax.models.network import Network
from specdec_jax.models.weight_layouts import Weight, step_weights, to_matrix, weight_shape
from specdec_jax.speculative.drafter import Drafter


class Products(NamedTuple):
    """The weights that one decoder step multiplies with.

    Attributes:
      weights: all weights of the decoder and the head, as `apply_weight` takes them, except those
        of cross-attention's keys and values, which are used once per request.
      axes: for each, the axis of a `[D, F]` weight that is summed over: 0, or 1 for a head that is
        the embedding `[V, D]`.
    """

    weights: list[Weight]
    axes: tuple[int, ...]

    @classmethod
    def from_network(cls, network: Network, packed: bool = True) -> "Products":
        """Returns the weights in the loop's layout, or without `packed` in the checkpoint's."""
        weights = step_weights(network.params)
        weights = weights if packed else list(map(to_matrix, weights))
        axes = [0] * len(weights)
        if network.module.config.logits_via_embedding:
            weights.append(network.params["token_embedder"]["embedding"])
            axes.append(1)
        return cls(weights, tuple(axes))

    @property
    def size(self) -> int:
        """Number of the weights."""
        return sum(math.prod(weight_shape(weight)) for weight in self.weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, with the scales of those in int8."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.weights))


@functools.partial(jax.jit, static_argnames=("axes", "steps", "dtype"))
def bare_products(
    weights: list[Weight],
    x: jax.Array,
    *,
    axes: tuple[int, ...],
    steps: int,
    dtype: str = "float32",
) -> jax.Array:
    """Computes only the products `x [B, K] · weight` of one decoder step, `steps` times.

    `x` is in `dtype`. Each product's operand depends on the maximum of the one before, so that no
    compiler can leave one out; the factor keeps the numbers as they are.
    """

    def body(_: jax.Array, carry: jax.Array) -> jax.Array:
        for weight, axis in zip(weights, axes, strict=True):
            operand = (x[:, : weight_shape(weight)[axis]] + carry).astype(dtype)
            if axis:
                y = product(operand, weight, ((1,), (1,)))
            else:
                y = apply_weight(operand, weight, jnp.float32)
            carry = jnp.max(y) * 1e-9
        return carry

    return jax.lax.fori_loop(0, steps, body, jnp.float32(0))


def products_variants(network: Network, batch: int) -> dict[str, Call]:
    """Returns calls that compute the matrix products of one step of `batch` rows, `STEPS` times.

    They use the loop's layout of the weights. If the checkpoint's is another, it is timed too,
    since it may be faster for one position.
    """
    layouts = {"products": Products.from_network(network)}
    if network.backend.packs_weights:
        layouts["products, checkpoint's layout"] = Products.from_network(network, packed=False)
    return {name: _products_variant(network, weights, batch) for name, weights in layouts.items()}


def bare_variants(
    target: LanguageModel, drafter: Drafter | None, rows: int, gammas: Sequence[int]
) -> dict[str, Call]:
    """Returns the products of target calls over γ + 1 positions, in the loop's layout.

    If the drafter is a model without a shortlist or int8, a draft step is among them.
    """
    network, weights = target.network, Products.from_network(target.network)
    variants = {
        f"bare verify {gamma}": _products_variant(network, weights, rows * (gamma + 1))
        for gamma in gammas
    }
    if drafter is not None and drafter.scorable:
        network = drafter.steps()["draft step"]
        weights = Products.from_network(network)
        variants["bare draft step"] = _products_variant(network, weights, rows)
    return variants


def _products_variant(network: Network, products: Products, rows: int) -> Call:
    config = network.module.config
    width = max(config.emb_dim, config.mlp_dim, config.num_heads * config.head_dim)
    x = jax.random.normal(jax.random.key(0), (rows, width))
    return functools.partial(
        bare_products, products.weights, x, axes=products.axes, steps=STEPS, dtype=config.dtype
    )
