"""Times single steps on this machine: target steps, verify calls, draft steps, encoders.

Every timing runs many steps inside one compiled program, so that dispatch does not count. A step is
a decode call and the argmax of its logits. Its tokens are fed to the next step, so that the
compiler can remove or move nothing.
"""

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.decoding.autotune import iterated_steps
from specdec_jax.decoding.inputs import slots
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.request import Request, prepare
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, decoder_only
from specdec_jax.models.tree_positions import WindowNodes
from specdec_jax.speculative import distributions, iteration, prefill
from specdec_jax.speculative.distributions import Categorical
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.randomness import seeded
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import DecodeState, Draft, StaticConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifiers import VERIFIERS

STEPS = 32
# The verifiers whose cost is measured.
SAMPLED = ("token", "block", "gumbel")


class Spread(NamedTuple):
    """Median, least and greatest of repeated measurements."""

    median: float
    least: float
    most: float

    @classmethod
    def from_samples(cls, values: Sequence[float] | np.ndarray) -> "Spread":
        """Returns the spread of `values`."""
        return cls(float(np.median(values)), float(np.min(values)), float(np.max(values)))


def summarize(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Returns the spread of `values` as records have it."""
    return Spread.from_samples(values)._asdict()


class CallShape(NamedTuple):
    """The shape of timed calls.

    Attributes:
      rows: B.
      input_length: padded length of the inputs.
      slots: number of slots of every cache.
    """

    rows: int
    input_length: int
    slots: int

    def inputs(self, network: Network) -> tuple[np.ndarray, np.ndarray]:
        """Returns random inputs `[B, L]` and their lengths `[B]`."""
        ids = np.random.default_rng(0).integers(2, network.vocab_size, self[:2], np.int32)
        return ids, np.full(self.rows, self.input_length, np.int32)

    def middle(self, width: int) -> jax.Array:
        """Returns positions `[B]` in the middle of the slots, for calls over `width` positions."""
        return jnp.full(self.rows, (self.slots - width) // 2, jnp.int32)

    def tokens(self, width: int) -> jax.Array:
        """Returns tokens `[B, width]`."""
        return jnp.ones((self.rows, width), jnp.int32)


def time_passes(function: Callable[[], object]) -> list[float]:
    """Returns the seconds of several calls, the devices' work included.

    An untimed call comes first: after a pause, a call also pays for sleeping threads and cold
    caches. A first call of more than two seconds is itself the only sample.
    """

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - start

    first = once()
    if first > 2:
        return [first]
    return [once() for _ in range(1 if first > 0.5 else 5)]


def time_call(function: Callable[[], object]) -> float:
    """Returns the median seconds of a call, over `time_passes`."""
    return float(np.median(time_passes(function)))


def rotate(names: Iterable[str], turn: int) -> list[str]:
    """Returns the names, beginning with another one every turn."""
    ordered = list(names)
    return ordered[turn % len(ordered) :] + ordered[: turn % len(ordered)]


@functools.partial(jax.jit, static_argnames="steps")
def decode_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> jax.Array:
    """Feeds T tokens at the same positions `steps` times, each time those of the last step.

    Args:
      network: the network.
      tokens: `[B, T]`.
      positions: `[B]`; positions + T must not exceed the cache's slots.
      cache: the decoder's cache.
      steps: number of steps.

    Returns:
      The last tokens `[B, T]`.
    """

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        return distributions.argmax(logits).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnames="slots")
def prefill_cache(
    network: Network, inputs: jax.Array, input_lengths: jax.Array, *, slots: int
) -> Any:
    """Returns the cache with which decoding begins.

    For a decoder-only network it holds all but the last id of the prompt. A network that attends to
    another's encoder output is given zeros.
    """
    if decoder_only(network):
        return prefill.fill_cache(network, inputs[:, :0], input_lengths * 0, inputs, slots)
    encoded = None
    if network.encoder_dim is not None:
        encoded = jnp.zeros((*inputs.shape, network.encoder_dim), network.config.dtype)
    return network.prefill(inputs, input_lengths, slots, encoded=encoded)


def total_slots(target: LanguageModel, input_length: int, max_new_tokens: int, gamma: int) -> int:
    """Returns the number of slots that `generate` takes for inputs of this padded length."""
    return slots((input_length if decoder_only(target) else 1) + max_new_tokens, gamma)


@functools.partial(jax.jit, static_argnames="steps")
def draft_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> jax.Array:
    """Runs steps like a drafter: as `decode_steps`, with the head on the last token only.

    `tokens` are `[B, 1]` or `[B, 2]`: a drafter feeds two to catch up, and always two where pairs
    are free.
    """
    body = functools.partial(_draft_step, network, positions)
    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


def _draft_step(network: Network, positions: jax.Array, _: jax.Array, carry: tuple) -> tuple:
    tokens, cache = carry
    states, cache = network.decode_states(tokens, positions, cache)
    token = distributions.argmax(network.head(states[:, -1:])).astype(jnp.int32)
    return jnp.concatenate([tokens[:, 1:], token], axis=1), cache


@functools.partial(jax.jit, static_argnames=("tree", "slots", "steps"))
def node_steps(
    network: Network,
    tokens: jax.Array,
    positions: jax.Array,
    cache: Any,
    *,
    tree: Tree,
    slots: int,
    steps: int,
) -> jax.Array:
    """Runs steps as `decode_steps` does over the N nodes `[B, N]` of `tree`.

    Node 0 is at `positions`. `cache` is from `Network.node_cache`, with `slots` slots.
    """
    branches = tree.branches(len(tokens))
    nodes = WindowNodes(positions, positions, branches.depths, branches.lines, slots)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache = carry
        states, cache = network.decode_nodes(tokens, nodes, cache)
        return distributions.argmax(network.head(states)).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


def tree_variant(
    network: Network, shape: CallShape, tree: Tree | DynamicTree
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` steps over the nodes of a tree.

    A dynamic tree is replaced by a fixed one of the same depth with as many nodes, whose call takes
    as long.
    """
    tree = tree.fixed() if isinstance(tree, DynamicTree) else tree
    cache = network.node_cache(prefill_variant(network, shape)(), shape.slots, shape.slots)
    inputs = (shape.tokens(tree.size), shape.middle(tree.size), cache)
    return functools.partial(
        node_steps, network, *inputs, tree=tree, slots=shape.slots, steps=STEPS
    )


def step_variant(
    network: Network, shape: CallShape, width: int, stepping: Callable = decode_steps
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` steps over `width` positions.

    `stepping` runs the steps: `decode_steps`, or `draft_steps`, for which `width` is 1 or 2.
    """
    cache = prefill_variant(network, shape)()
    inputs = (shape.tokens(width), shape.middle(width), cache)
    return functools.partial(stepping, network, *inputs, steps=STEPS)


def draft_width(network: Network, shape: CallShape) -> int:
    """Returns the number of positions in a draft step with a fixed γ."""
    cache = prefill_cache(network, *shape.inputs(network), slots=shape.slots)
    return 1 + network.pairs_are_free(cache)


@functools.partial(jax.jit, static_argnames=("gamma", "steps", "width"))
def paired_steps(
    target: Network,
    drafter: Network,
    tokens: jax.Array,
    positions: jax.Array,
    caches: tuple,
    *,
    gamma: int,
    steps: int,
    width: int,
) -> jax.Array:
    """Runs γ draft steps and a target call over γ + 1 positions in turn, `steps` times.

    Between target calls a draft step takes longer than alone, because they push its weights out of
    the processor's caches.

    Args:
      target, drafter: the networks.
      tokens: `[B, G + 1]`.
      positions: `[B]`.
      caches: the target's cache and the drafter's.
      gamma: γ.
      steps: number of rounds.
      width: number of positions in a draft step, 1 or 2.

    Returns:
      The last tokens `[B, G + 1]`.
    """
    draft = functools.partial(_draft_step, drafter, positions)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, (cache, draft_cache) = carry
        drafted, draft_cache = jax.lax.fori_loop(0, gamma, draft, (tokens[:, -width:], draft_cache))
        fed = jnp.concatenate([drafted[:, -1:], tokens[:, 1:]], axis=1)
        logits, cache = target.decode(fed, positions, cache)
        return distributions.argmax(logits).astype(jnp.int32), (cache, draft_cache)

    return jax.lax.fori_loop(0, steps, body, (tokens, caches))[0]


@functools.partial(jax.jit, static_argnames="steps")
def call_steps(
    network: Network, tokens: jax.Array, positions: jax.Array, cache: Any, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Runs steps as `decode_steps` does, but without the argmax: the call alone.

    Each next token is made of one logit. All logits are carried along, so that the compiler cannot
    reduce the call to that one.

    Returns:
      The last tokens `[B, T]` and logits `[B, T, V]`.
    """

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, cache, _ = carry
        logits, cache = network.decode(tokens, positions, cache)
        return jnp.abs(logits[..., 0] * 1e3).astype(jnp.int32) % network.vocab_size, cache, logits

    logits = jnp.zeros((*tokens.shape, network.vocab_size), jnp.float32)
    tokens, _, logits = jax.lax.fori_loop(0, steps, body, (tokens, cache, logits))
    return tokens, logits


@functools.partial(jax.jit, static_argnames="steps")
def verified_steps(
    network: Network, state: DecodeState, *, steps: int
) -> tuple[jax.Array, jax.Array, Categorical | None]:
    """Runs steps over γ + 1 positions, with the engine's verification in place of the argmax.

    The drafter's distribution is the target's distribution of the step before, one position on. The
    token after the accepted ones is among the tokens fed next, and their number enters the keys of
    the next draws, so that the compiler can move nothing out of the loop.

    Args:
      network: the target.
      state: from `verified_state`.
      steps: number of steps.

    Returns:
      The last tokens `[B, G + 1]`, numbers of accepted ones `[B]`, and the target's distributions
        `[B, G + 1, V]` (None for argmax).
    """
    config, positions = state.config, state.lengths - 1
    batch, width = len(positions), config.gamma + 1
    none, all_drafted = jnp.zeros(batch, jnp.int32), jnp.full(batch, config.gamma, jnp.int32)

    def body(_: jax.Array, carry: tuple) -> tuple:
        tokens, num_accepted, dist, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        before = None
        if config.needs_draft_probs:
            before = Categorical(dist.logits[:, :-1], dist.log_normalizer[:, :-1])
        draft = Draft(tokens[:, 1:], all_drafted, before, none)
        later = state.replace(lengths=state.lengths + num_accepted)
        verified, dist = iteration.verify(later, draft, logits)
        at_end = jnp.arange(width) == verified.num_accepted[:, None]
        tokens = jnp.where(at_end, verified.next_token[:, None], tokens)
        return tokens, verified.num_accepted, dist, cache

    dist = None
    if not config.strict_argmax:
        dist = Categorical.from_logits(jnp.zeros((batch, width, config.vocab_size)))
    carry = (jnp.ones((batch, width), jnp.int32), none, dist, state.target_cache)
    return jax.lax.fori_loop(0, steps, body, carry)[:3]


def verified_state(
    network: Network, shape: CallShape, gamma: int, config: SamplingConfig, verifier: str
) -> DecodeState:
    """Returns a state in the middle of rows of `shape.slots` tokens, for `verified_steps`."""
    batch, _, slots = shape
    inputs, lengths = shape.inputs(network)
    vocab, rows = network.vocab_size, lambda value: jnp.full(batch, value, jnp.int32)
    start = (slots - gamma - 1) // 2 + 1
    state = _prefill_state(
        network,
        None,
        StaticConfig(gamma, config.mode, vocab, VERIFIERS[verifier]),
        slots,
        inputs,
        lengths,
        rows(0)[:, None],
        rows(1),
        fold_keys(seeded(0), np.arange(batch)),
        config.rows(batch, vocab),
        None,
        rows(slots),
        rows(-1)[:, None],
        rows(gamma),
        rows(0).astype(bool),
    )
    return state.replace(lengths=rows(start))


def sampling_variants(
    network: Network, shape: CallShape, gamma: int, config: SamplingConfig
) -> dict[str, Callable[[], object]]:
    """Returns calls that run `STEPS` target calls over γ + 1 positions.

    They are: "alone", with "argmax", and with each verifier of `SAMPLED`.
    """
    argmax = verified_state(network, shape, gamma, SamplingConfig(), "token")
    states = {name: verified_state(network, shape, gamma, config, name) for name in SAMPLED}
    inputs = (shape.tokens(gamma + 1), argmax.lengths - 1, argmax.target_cache)
    return {"alone": functools.partial(call_steps, network, *inputs, steps=STEPS)} | {
        name: functools.partial(verified_steps, network, state, steps=STEPS)
        for name, state in ({"argmax": argmax} | states).items()
    }


def paired_variant(
    target: Network, drafter: Network, shape: CallShape, gamma: int, width: int
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` rounds of `paired_steps`."""
    inputs, lengths = shape.inputs(target)
    caches = tuple(
        prefill_cache(network, inputs, lengths, slots=shape.slots) for network in (target, drafter)
    )
    state = (shape.tokens(gamma + 1), shape.middle(gamma + 1), caches)
    how = dict(gamma=gamma, steps=STEPS, width=width)
    return functools.partial(paired_steps, target, drafter, *state, **how)


_prefill_state = jax.jit(prefill.prefill, static_argnames=("config", "slots"))


def prefill_variant(network: Network, shape: CallShape) -> Callable[[], Any]:
    """Returns a call of the encoder and of everything else that happens once per request."""
    return functools.partial(prefill_cache, network, *shape.inputs(network), slots=shape.slots)


def encoder_variants(
    model: str, network: Network, lengths: Sequence[int], shape: CallShape
) -> dict[str, Callable[[], object]]:
    """Returns "`model` encoder L" for inputs of each padded length L."""
    return {
        f"{model} encoder {length}": prefill_variant(network, shape._replace(input_length=length))
        for length in lengths
    }


def step_variants(
    target: LanguageModel,
    drafter: Drafter | None,
    lengths: Sequence[int],
    shape: CallShape,
    gammas: Sequence[int],
    pairs: Sequence[int],
) -> dict[str, Callable[[], object]]:
    """Returns single steps and encoders by name, with `count_steps(name)` steps in each call.

    Args:
      target: the target.
      drafter: the drafter; one without a model has no steps of its own.
      lengths: padded lengths of inputs, for encoders.
      shape: the shape of every other call.
      gammas: for each γ there is "verify γ", a target call over γ + 1 positions.
      pairs: for each γ there is "draft γ and verify", which has γ draft steps before that call; and
        a "draft pair", the call over two positions with which a model catches up, unless all are.
    """
    network = target.network
    variants = {"target step": step_variant(network, shape, 1)}
    variants |= {f"verify {gamma}": step_variant(network, shape, gamma + 1) for gamma in gammas}
    variants |= encoder_variants("target", network, lengths, shape)
    if drafter is None or not (steps := drafter.steps()):
        return variants
    drafting, own_model = steps["draft step"], drafter.second_model is not None
    width = draft_width(drafting, shape) if own_model else 1
    for name, one in steps.items():
        variants[name] = step_variant(one, shape, width, draft_steps)
    for gamma in pairs:
        paired = paired_variant(network, drafting, shape, gamma, width)
        variants[f"draft {gamma} and verify"] = paired
    if own_model and width == 1:
        variants["draft pair"] = step_variant(drafting, shape, 2, draft_steps)
    return variants | (encoder_variants("drafter", drafting, lengths, shape) if own_model else {})


def count_steps(name: str) -> int:
    """Returns how many steps one call of the variant with this name runs."""
    return 1 if "encoder" in name else STEPS


def iteration_state(
    target: LanguageModel,
    drafter: Drafter | None,
    batch: int,
    input_length: int,
    gamma: int,
    **options: Any,
) -> tuple[DecodeState, Request]:
    """Returns a state in the middle of `batch` rows, and its request.

    Its drafter has nothing to catch up with. Options are those of `generate`.
    """
    inputs, lengths = CallShape(batch, input_length, 0).inputs(target.network)
    options |= dict(input_lengths=lengths, max_input_length=input_length, eos_ids=())
    state, request = prepare(target, inputs, drafter=drafter, gamma=gamma, **options)
    new = max(0, int(request.limits[0]) - gamma - 1) // 2
    middle = jnp.full(batch, int(request.prefix_lengths[0]) + new, jnp.int32)
    state = iterated_steps(
        request.network, request.drafter, state.replace(lengths=middle), np.int32(1)
    )
    return state, request


def iteration_variant(state: DecodeState, request: Request) -> Callable[[], object]:
    """Returns a call that runs `STEPS` iterations."""
    return functools.partial(
        iterated_steps, request.network, request.drafter, state, np.int32(STEPS)
    )


def call_variant(state: DecodeState, request: Request) -> Callable[[], object]:
    """Returns a call that runs `STEPS` times target call and verification, without the draft."""
    return functools.partial(verified_steps, request.network, state, steps=STEPS)
