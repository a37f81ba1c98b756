"""Times single steps on this machine: seconds of a target step, a verify call, a draft step, an
encoder.

Every timing runs many steps inside one compiled program, so that dispatch does not count. A step is
a decode call and the argmax of its logits. The tokens that it finds are fed to the next step, so
that the compiler can remove or move nothing.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.tree_positions import WindowNodes
from specdec_jax.decoding.autotune import iterated_steps
from specdec_jax.decoding.inputs import slots
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.request import Request, prepare
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, decoder_only
from specdec_jax.speculative import distributions, iteration, prefill
from specdec_jax.speculative.distributions import Categorical
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
    def from_samples(cls, values) -> "Spread":
        """Returns the spread of `values`."""
        return cls(float(np.median(values)), float(np.min(values)), float(np.max(values)))


def passes(function: Callable[[], object]) -> list[float]:
    """Returns the seconds of several calls, the devices' work included.

    An untimed call goes before, because after a pause the first one also pays for sleeping threads
    and cold caches. For calls of more than two seconds that does not count, and the first one is
    taken.
    """

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - start

    first = once()
    if first > 2:
        return [first]
    return [once() for _ in range(1 if first > 0.5 else 5)]


def timed(function: Callable[[], object]) -> float:
    """Returns the seconds of one call, for a short call the median of a few (`passes`)."""
    return float(np.median(passes(function)))


def rotate(variants: Mapping[str, object], turn: int) -> list[str]:
    """Returns the names of the variants, beginning with another one every turn."""
    names = list(variants)
    return names[turn % len(names) :] + names[: turn % len(names)]


@functools.partial(jax.jit, static_argnames="steps")
def decode_steps(network: Network, tokens: jax.Array, positions: jax.Array, cache, *, steps: int):
    """Feeds T tokens at the same positions `steps` times, each time those that the last step found.

    Args:
      network: the network.
      tokens: `[B, T]`.
      positions: `[B]`; positions + T must not exceed the cache's slots.
      cache: the decoder's cache.
      steps: number of steps.

    Returns:
      The last tokens `[B, T]`.
    """

    def body(_, carry):
        tokens, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        return distributions.argmax(logits).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


@functools.partial(jax.jit, static_argnames="slots")
def prefill_cache(network: Network, inputs, input_lengths, *, slots: int):
    """Returns the cache with which decoding begins; for a decoder-only network, after all but the
    last id of the prompt. A network that attends to another's encoder output is given zeros."""
    if decoder_only(network):
        return prefill.fill_cache(network, inputs[:, :0], input_lengths * 0, inputs, slots)
    encoded = None
    if network.encoder_dim is not None:
        encoded = jnp.zeros((*inputs.shape, network.encoder_dim), network.config.dtype)
    return network.prefill(inputs, input_lengths, slots, encoded=encoded)


def total_slots(target: LanguageModel, input_length: int, max_new_tokens: int, gamma: int) -> int:
    """Returns the number of slots that `generate` would take for inputs of this padded length."""
    return slots((input_length if decoder_only(target) else 1) + max_new_tokens, gamma)


@functools.partial(jax.jit, static_argnames="steps")
def draft_steps(network: Network, tokens: jax.Array, positions: jax.Array, cache, *, steps: int):
    """Runs steps as `decode_steps` does for one or two tokens `[B, T]`, with the head on the last
    only, like a drafter: it feeds two to catch up, and always two where pairs are free."""
    body = functools.partial(_draft_step, network, positions)
    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


def _draft_step(network: Network, positions: jax.Array, _, carry: tuple) -> tuple:
    tokens, cache = carry
    states, cache = network.decode_states(tokens, positions, cache)
    token = distributions.argmax(network.head(states[:, -1:])).astype(jnp.int32)
    return jnp.concatenate([tokens[:, 1:], token], axis=1), cache


@functools.partial(jax.jit, static_argnames=("tree", "slots", "steps"))
def node_steps(
    network: Network,
    tokens: jax.Array,
    positions: jax.Array,
    cache,
    *,
    tree: Tree,
    slots: int,
    steps: int,
):
    """Runs steps as `decode_steps` does over the N nodes `[B, N]` of `tree`, node 0 at `positions`;
    `cache` is from `Network.node_cache`, with `slots` slots."""
    branches = tree.branches(len(tokens))
    nodes = WindowNodes(positions, positions, branches.depths, branches.lines, slots)

    def body(_, carry):
        tokens, cache = carry
        states, cache = network.decode_nodes(tokens, nodes, cache)
        return distributions.argmax(network.head(states)).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, body, (tokens, cache))[0]


def tree_variant(
    network: Network, batch: int, input_length: int, slots: int, tree: Tree | DynamicTree
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` steps over the nodes of a tree; in the place of one whose
    shape the drafter's distribution decides stands one of as many nodes, as deep, whose call takes
    as long."""
    tree = tree.fixed() if isinstance(tree, DynamicTree) else tree
    inputs, lengths = _inputs(network, batch, input_length)
    cache = network.node_cache(prefill_cache(network, inputs, lengths, slots=slots), slots, slots)
    tokens, positions = (
        jnp.ones((batch, tree.size), jnp.int32),
        jnp.full(batch, (slots - tree.size) // 2, jnp.int32),
    )
    return functools.partial(
        node_steps, network, tokens, positions, cache, tree=tree, slots=slots, steps=STEPS
    )


def step_variant(
    network: Network,
    batch: int,
    input_length: int,
    slots: int,
    width: int,
    stepping: Callable = decode_steps,
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` steps over `width` positions of `batch` rows, with inputs of
    `input_length` tokens.

    `stepping` runs the steps: `decode_steps`, or `draft_steps`, for which `width` is 1 or 2.
    """
    inputs, lengths = _inputs(network, batch, input_length)
    cache = prefill_cache(network, inputs, lengths, slots=slots)
    tokens = jnp.ones((batch, width), jnp.int32)
    positions = jnp.full(batch, (slots - width) // 2, jnp.int32)
    return lambda: stepping(network, tokens, positions, cache, steps=STEPS)


def draft_width(network: Network, batch: int, input_length: int, slots: int) -> int:
    """Returns the number of positions in a draft step with a fixed γ."""
    return 1 + network.pairs_are_free(
        prefill_cache(network, *_inputs(network, batch, input_length), slots=slots)
    )


@functools.partial(jax.jit, static_argnames=("gamma", "steps", "width"))
def paired_steps(
    target: Network,
    drafter: Network,
    tokens,
    positions,
    caches,
    *,
    gamma: int,
    steps: int,
    width: int,
):
    """Runs γ steps of the drafter and a call of the target over γ + 1 positions, `steps` times in
    turn.

    Between target calls a draft step costs another time than alone, because they push its weights
    out of the processor's caches.

    Args:
      target, drafter: the networks.
      tokens: `[B, G + 1]`.
      positions: `[B]`.
      caches: the target's cache and the drafter's.
      gamma: γ.
      steps: number of rounds.
      width: number of positions in a draft step, 1 or 2.
    """

    draft = functools.partial(_draft_step, drafter, positions)

    def body(_, carry):
        tokens, (cache, draft_cache) = carry
        drafted, draft_cache = jax.lax.fori_loop(0, gamma, draft, (tokens[:, -width:], draft_cache))
        logits, cache = target.decode(
            jnp.concatenate([drafted[:, -1:], tokens[:, 1:]], axis=1), positions, cache
        )
        return distributions.argmax(logits).astype(jnp.int32), (cache, draft_cache)

    return jax.lax.fori_loop(0, steps, body, (tokens, caches))[0]


@functools.partial(jax.jit, static_argnames="steps")
def call_steps(network: Network, tokens: jax.Array, positions: jax.Array, cache, *, steps: int):
    """Runs steps as `decode_steps` does, but without the argmax: the call alone.

    Each next token is made of one logit. All logits are carried along, so that the compiler cannot
    reduce the call to that one.

    Returns:
      The last tokens `[B, T]` and logits `[B, T, V]`.
    """

    def body(_, carry):
        tokens, cache, _ = carry
        logits, cache = network.decode(tokens, positions, cache)
        return jnp.abs(logits[..., 0] * 1e3).astype(jnp.int32) % network.vocab_size, cache, logits

    logits = jnp.zeros((*tokens.shape, network.vocab_size), jnp.float32)
    tokens, _, logits = jax.lax.fori_loop(0, steps, body, (tokens, cache, logits))
    return tokens, logits


@functools.partial(jax.jit, static_argnames="steps")
def verified_steps(network: Network, state: DecodeState, *, steps: int):
    """Runs steps as `decode_steps` does over γ + 1 positions, with the engine's own verification in
    place of the argmax.

    The drafter's distribution is the target's distribution of the step before, one position on.
    What follows the accepted tokens is among the tokens fed next, and their number enters the keys
    of the next draws, so that nothing can leave the loop.

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

    def body(_, carry):
        tokens, num_accepted, dist, cache = carry
        logits, cache = network.decode(tokens, positions, cache)
        before = (
            Categorical(dist.logits[:, :-1], dist.log_normalizer[:, :-1])
            if config.needs_draft_probs
            else None
        )
        draft = Draft(
            tokens[:, 1:],
            jnp.full(batch, config.gamma, jnp.int32),
            before,
            jnp.zeros(batch, jnp.int32),
        )
        verified, dist = iteration.verify(
            state.replace(lengths=state.lengths + num_accepted), draft, logits
        )
        at_end = jnp.arange(width) == verified.num_accepted[:, None]
        return (
            jnp.where(at_end, verified.next_token[:, None], tokens),
            verified.num_accepted,
            dist,
            cache,
        )

    dist = (
        None
        if config.strict_argmax
        else Categorical.from_logits(jnp.zeros((batch, width, config.vocab_size)))
    )
    carry = (
        jnp.ones((batch, width), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        dist,
        state.target_cache,
    )
    return jax.lax.fori_loop(0, steps, body, carry)[:3]


def verified_state(
    network: Network,
    batch: int,
    input_length: int,
    slots: int,
    gamma: int,
    config: SamplingConfig,
    verifier: str,
) -> DecodeState:
    """Returns a state in the middle of `batch` rows of `slots` tokens, for `verified_steps`."""
    inputs, lengths = _inputs(network, batch, input_length)
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
    network: Network, batch: int, input_length: int, slots: int, gamma: int, config: SamplingConfig
) -> dict[str, Callable[[], object]]:
    """Returns calls that run `STEPS` target calls over γ + 1 positions: alone, with argmax, and
    with each verifier of `SAMPLED`."""
    argmax = verified_state(network, batch, input_length, slots, gamma, SamplingConfig(), "token")
    tokens = jnp.ones((batch, gamma + 1), jnp.int32)
    variants = {
        "alone": functools.partial(
            call_steps, network, tokens, argmax.lengths - 1, argmax.target_cache, steps=STEPS
        )
    }
    states = {"argmax": argmax} | {
        name: verified_state(network, batch, input_length, slots, gamma, config, name)
        for name in SAMPLED
    }
    return variants | {
        name: functools.partial(verified_steps, network, state, steps=STEPS)
        for name, state in states.items()
    }


def paired_variant(
    target: Network,
    drafter: Network,
    batch: int,
    input_length: int,
    slots: int,
    gamma: int,
    width: int,
) -> Callable[[], object]:
    """Returns a call that runs `STEPS` rounds of γ draft steps over `width` positions and a target
    call over γ + 1."""
    inputs, lengths = _inputs(target, batch, input_length)
    caches = tuple(
        prefill_cache(network, inputs, lengths, slots=slots) for network in (target, drafter)
    )
    tokens = jnp.ones((batch, gamma + 1), jnp.int32)
    positions = jnp.full(batch, (slots - gamma - 1) // 2, jnp.int32)
    how = dict(gamma=gamma, steps=STEPS, width=width)
    return functools.partial(paired_steps, target, drafter, tokens, positions, caches, **how)


_prefill_state = jax.jit(prefill.prefill, static_argnames=("config", "slots"))


def prefill_variant(
    network: Network, batch: int, input_length: int, slots: int
) -> Callable[[], object]:
    """Returns a call of the encoder and of everything else that happens once per request."""
    inputs, lengths = _inputs(network, batch, input_length)
    return lambda: prefill_cache(network, inputs, lengths, slots=slots)


def step_variants(
    target: LanguageModel,
    drafter,
    rows: int,
    lengths: Sequence[int],
    room: int,
    gammas: Sequence[int],
    pairs: Sequence[int],
) -> dict[str, Callable[[], object]]:
    """Returns single steps and encoders by name, with `steps_in(name)` steps in each call.

    Args:
      target: the target.
      drafter: the drafter; one without a model has no steps of its own.
      rows: B.
      lengths: padded lengths of inputs.
      room: number of slots.
      gammas: for each γ there is "verify γ", a target call over γ + 1 positions.
      pairs: for each γ there is "draft γ and verify", which has γ draft steps before that call; and
        a "draft pair", the call over two positions with which a model catches up, unless all are.
    """
    single, longest = target.network, max(lengths)
    variants = {"target step": step_variant(single, rows, longest, room, 1)}
    for gamma in gammas:
        variants[f"verify {gamma}"] = step_variant(target.network, rows, longest, room, gamma + 1)
    for length in lengths:
        variants[f"target encoder {length}"] = prefill_variant(target.network, rows, length, room)
    steps = drafter.steps() if drafter is not None else {}
    width = 1
    if steps and drafter.second_model is not None:
        width = draft_width(steps["draft step"], rows, longest, room)
    for name, network in steps.items():
        variants[name] = step_variant(network, rows, longest, room, width, draft_steps)
    if steps:
        drafting = steps["draft step"]
        for gamma in pairs:
            variants[f"draft {gamma} and verify"] = paired_variant(
                single, drafting, rows, longest, room, gamma, width
            )
        if drafter.second_model is not None:
            if width == 1:
                variants["draft pair"] = step_variant(drafting, rows, longest, room, 2, draft_steps)
            for length in lengths:
                variants[f"drafter encoder {length}"] = prefill_variant(
                    drafting, rows, length, room
                )
    return variants


def steps_in(name: str) -> int:
    """Returns how many steps one call of the variant with this name runs."""
    return 1 if "encoder" in name else STEPS


def iteration_state(
    target: LanguageModel, drafter, batch: int, input_length: int, gamma: int, **options
) -> tuple[DecodeState, Request]:
    """Returns a state in the middle of `batch` rows whose drafter has nothing to catch up with, and
    its request.

    Options are those of `generate`.
    """
    inputs, lengths = _inputs(target.network, batch, input_length)
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
    """Returns a call that runs `STEPS` times the target call and the verification of such an
    iteration, without its draft."""
    return functools.partial(verified_steps, request.network, state, steps=STEPS)


def _inputs(network: Network, batch: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(2, network.vocab_size, (batch, length), np.int32)
    return ids, np.full(batch, length, np.int32)
