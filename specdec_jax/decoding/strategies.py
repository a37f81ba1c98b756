"""The ways to decode: chains, trees and beam search."""

from specdec_jax.speculative.beam_iteration import BeamSearch
from specdec_jax.speculative.iteration import ChainDecoding
from specdec_jax.speculative.strategy import DecodingStrategy
from specdec_jax.speculative.tree_iteration import TreeDecoding

# A plan's configuration has one of these.
STRATEGIES: dict[str, DecodingStrategy] = {
    "chain": ChainDecoding(),
    "tree": TreeDecoding(),
    "beams": BeamSearch(),
}


def choose_strategy(tree: object) -> DecodingStrategy:
    """Returns the strategy for drafting this tree, or chains if it is None."""
    return STRATEGIES["chain" if tree is None else "tree"]
