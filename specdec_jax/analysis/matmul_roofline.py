"""Times the bare matrix products of a decoder step: the floor under every step."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specdec_jax.analysis.timing import STEPS
from specdec_jax.backends.matmul import product
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.layers import apply_kernel
from specdec_jax.models.network import Network
from specdec_jax.models.weight_layouts import Kernel, matrix, shape_of, step_kernels


class Products(NamedTuple):
    """The weights that one decoder step multiplies with.

    Attributes:
      kernels: all kernels of the decoder and the head, as `apply_kernel` takes them, except those
        of cross-attention's keys and values, which are used once per request.
      axes: for each, the axis of a `[D, F]` kernel that is summed over: 0, or 1 for a head that is
        the embedding `[V, D]`.
    """

    kernels: list[Kernel]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, network: Network, packed: bool = True) -> "Products":
        """Returns the weights in the loop's own layout (`packed`) or in the checkpoint's (new
        arrays, if the two differ)."""
        kernels = step_kernels(network.params)
        kernels = kernels if packed else list(map(matrix, kernels))
        axes = [0] * len(kernels)
        if network.module.config.logits_via_embedding:
            kernels.append(network.params["token_embedder"]["embedding"])
            axes.append(1)
        return cls(kernels, tuple(axes))

    @property
    def nbytes(self) -> int:
        """Bytes of the kernels, with the scales of those in int8."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.kernels))


@functools.partial(jax.jit, static_argnames=("axes", "steps", "dtype"))
def bare_products(
    kernels: list[Kernel],
    x: jax.Array,
    *,
    axes: tuple[int, ...],
    steps: int,
    dtype: str = "float32",
) -> jax.Array:
    """Computes `steps` times the products `x [B, K] · kernel` of one decoder step, with `x` in
    `dtype`, and nothing else.

    Each product's operand depends on the maximum of the one before, so that no compiler can leave
    one out; the factor keeps the numbers as they are.
    """

    def body(_, carry):
        for kernel, axis in zip(kernels, axes, strict=True):
            operand = (x[:, : shape_of(kernel)[axis]] + carry).astype(dtype)
            y = (
                product(operand, kernel, ((1,), (1,)))
                if axis
                else apply_kernel(operand, kernel, jnp.float32)
            )
            carry = jnp.max(y) * 1e-9
        return carry

    return jax.lax.fori_loop(0, steps, body, jnp.float32(0))


def products_variants(network: Network, batch: int) -> dict[str, Callable[[], object]]:
    """Returns calls that compute `STEPS` times the bare matrix products of one step of `batch`
    rows.

    They use the loop's own layout of the weights; where that is another than the checkpoint's, the
    checkpoint's is timed too, since it may be faster for one position.
    """
    layouts = {"products": Products.of(network)}
    if network.backend.packs_weights:
        layouts["products, checkpoint's layout"] = Products.of(network, packed=False)
    return {name: _products_variant(network, weights, batch) for name, weights in layouts.items()}


def bare_variants(
    target: LanguageModel, drafter, rows: int, gammas: Sequence[int]
) -> dict[str, Callable[[], object]]:
    """Returns calls as `products_variants` does, in the loop's own layout, for target calls over γ
    + 1 positions.

    If the drafter is a model without a shortlist or 8 bits, a draft step is among them.
    """
    variants = {}
    for gamma in gammas:
        wide = rows * (gamma + 1)
        network = target.network
        variants[f"bare verify {gamma}"] = _products_variant(network, Products.of(network), wide)
    if drafter is not None and drafter.scorable:
        variants["bare draft step"] = _products_variant(
            drafter.network, Products.of(drafter.network), rows
        )
    return variants


def _products_variant(network: Network, weights: Products, rows: int) -> Callable[[], object]:
    config = network.module.config
    width = max(config.emb_dim, config.mlp_dim, config.num_heads * config.head_dim)
    x = jax.random.normal(jax.random.key(0), (rows, width))
    return functools.partial(
        bare_products, weights.kernels, x, axes=weights.axes, steps=STEPS, dtype=config.dtype
    )
