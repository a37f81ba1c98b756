"""Times single steps on this machine: target steps, verify calls, draft steps, encoders.

Every timing runs many steps inside one compiled program (`step_loops`), so that dispatch does not
count.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.analysis import step_loops
from specdec_jax.decoding.autotune import iterate_steps
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.request import Request
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.speculative import prefill
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.randomness import make_key
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import DecodeState, Draft, StaticConfig, count_slots
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


# A timed call, and the seconds of calls by name.
Call = Callable[[], object]
Times = Mapping[str, Spread]


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


def time_passes(function: Call) -> list[float]:
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


def rotate(names: Iterable[str], turn: int) -> list[str]:
    """Returns the names, beginning with another one every turn."""
    ordered = list(names)
    return ordered[turn % len(ordered) :] + ordered[: turn % len(ordered)]


def total_slots(target: LanguageModel, input_length: int, max_new_tokens: int, gamma: int) -> int:
    """Returns the number of slots that `generate` takes for inputs of this padded length."""
    return count_slots((input_length if is_decoder_only(target) else 1) + max_new_tokens, gamma)


def tree_variant(network: Network, shape: CallShape, tree: Tree | DynamicTree) -> Call:
    """Returns a call that runs `STEPS` steps over the nodes of a tree.

    A dynamic tree is replaced by a fixed one of the same depth with as many nodes, whose call takes
    as long.
    """
    tree = tree.fixed() if isinstance(tree, DynamicTree) else tree
    cache = network.node_cache(prefill_variant(network, shape)(), shape.slots, shape.slots)
    inputs = (shape.tokens(tree.size), shape.middle(tree.size), cache)
    return functools.partial(
        step_loops.node_steps, network, *inputs, tree=tree, slots=shape.slots, steps=STEPS
    )


def step_variant(
    network: Network, shape: CallShape, width: int, stepping: Callable = step_loops.decode_steps
) -> Call:
    """Returns a call that runs `STEPS` steps over `width` positions.

    `stepping` runs the steps: `decode_steps`, or `draft_steps`, for which `width` is 1 or 2.
    """
    cache = prefill_variant(network, shape)()
    inputs = (shape.tokens(width), shape.middle(width), cache)
    return functools.partial(stepping, network, *inputs, steps=STEPS)


def draft_width(network: Network, shape: CallShape) -> int:
    """Returns the number of positions in a draft step with a fixed γ."""
    cache = step_loops.prefill_cache(network, *shape.inputs(network), slots=shape.slots)
    return 1 + network.pairs_are_free(cache)


def verified_state(
    network: Network, shape: CallShape, gamma: int, config: SamplingConfig, verifier: str
) -> DecodeState:
    """Returns a state in the middle of rows of `shape.slots` tokens, for `verified_steps`."""
    batch, _, slots = shape
    inputs, lengths = shape.inputs(network)
    vocab, rows = network.vocab_size, functools.partial(jnp.full, batch, dtype=jnp.int32)
    start = (slots - gamma - 1) // 2 + 1
    static = StaticConfig(gamma, config.mode, vocab, VERIFIERS[verifier])
    given = prefill.PrefillInputs(
        inputs,
        lengths,
        tokens=rows(0)[:, None],
        prefix_lengths=rows(1),
        sampling=config.rows(batch, vocab),
        limits=rows(slots),
        eos_ids=rows(-1)[:, None],
        done=rows(0).astype(bool),
        keys=fold_keys(make_key(0), np.arange(batch)),
        gamma=rows(gamma),
    )
    state = _prefill_state(network, None, static, slots, given)
    return state.replace(lengths=rows(start))


def sampling_variants(
    network: Network, shape: CallShape, gamma: int, config: SamplingConfig
) -> dict[str, Call]:
    """Returns calls that run `STEPS` target calls over γ + 1 positions.

    They are: "alone", with "argmax", and with each verifier of `SAMPLED`.
    """
    argmax = verified_state(network, shape, gamma, SamplingConfig(), "token")
    states = {name: verified_state(network, shape, gamma, config, name) for name in SAMPLED}
    inputs = (shape.tokens(gamma + 1), argmax.lengths - 1, argmax.target_cache)
    return {"alone": functools.partial(step_loops.call_steps, network, *inputs, steps=STEPS)} | {
        name: functools.partial(step_loops.verified_steps, network, state, steps=STEPS)
        for name, state in ({"argmax": argmax} | states).items()
    }


def paired_variant(
    target: Network, drafter: Network, shape: CallShape, gamma: int, width: int
) -> Call:
    """Returns a call that runs `STEPS` rounds of `paired_steps`."""
    inputs, lengths = shape.inputs(target)
    caches = tuple(
        step_loops.prefill_cache(network, inputs, lengths, slots=shape.slots)
        for network in (target, drafter)
    )
    state = (shape.tokens(gamma + 1), shape.middle(gamma + 1), caches)
    how = dict(gamma=gamma, steps=STEPS, width=width)
    return functools.partial(step_loops.paired_steps, target, drafter, *state, **how)


_prefill_state = jax.jit(prefill.prefill, static_argnames=("config", "slots"))


def prefill_variant(network: Network, shape: CallShape) -> Callable[[], Any]:
    """Returns a call of the encoder and of everything else that happens once per request."""
    return functools.partial(
        step_loops.prefill_cache, network, *shape.inputs(network), slots=shape.slots
    )


def encoder_variants(
    target: LanguageModel, drafter: Drafter | None, lengths: Sequence[int], shape: CallShape
) -> dict[str, Call]:
    """Returns "target encoder L" and "drafter encoder L" for inputs of each padded length L."""
    encoders = {"target": (target.network,), "drafter": drafter.encoders if drafter else ()}
    variants: dict[str, Call] = {}
    for name, length in itertools.product([name for name in encoders if encoders[name]], lengths):
        given = shape._replace(input_length=length)
        calls = [prefill_variant(network, given) for network in encoders[name]]
        variants[f"{name} encoder {length}"] = functools.partial(_call_each, calls)
    return variants


def _call_each(calls: Sequence[Call]) -> list[Any]:
    return [call() for call in calls]


def step_variants(
    target: LanguageModel,
    drafter: Drafter | None,
    lengths: Sequence[int],
    shape: CallShape,
    gammas: Sequence[int],
    pairs: Sequence[int],
) -> dict[str, Call]:
    """Returns single steps and encoders by name, with `count_steps(name)` steps in each call.

    Args:
      target, drafter: the pair; of a drafter without draft steps none is timed.
      lengths, shape: padded lengths of inputs, for encoders, and the shape of every other call.
      gammas: for each γ there is "verify γ", a target call over γ + 1 positions.
      pairs: for each γ there is "draft γ and verify", which has γ draft steps before that call; and
        a "draft pair", the call over two positions with which a model catches up, unless all are.
    """
    network = target.network
    variants = {"target step": step_variant(network, shape, 1)}
    variants |= {f"verify {gamma}": step_variant(network, shape, gamma + 1) for gamma in gammas}
    variants |= encoder_variants(target, drafter, lengths, shape)
    if drafter is None or not (steps := drafter.steps()):
        return variants
    drafting, own_model = steps["draft step"], drafter.second_model is not None
    width = draft_width(drafting, shape) if own_model else 1
    for name, one in steps.items():
        variants[name] = step_variant(one, shape, width, step_loops.draft_steps)
    for gamma in pairs:
        paired = paired_variant(network, drafting, shape, gamma, width)
        variants[f"draft {gamma} and verify"] = paired
    if own_model and width == 1:
        variants["draft pair"] = step_variant(drafting, shape, 2, step_loops.draft_steps)
    return variants


def count_steps(name: str) -> int:
    """Returns how many steps one call of the variant with this name runs."""
    return 1 if name.startswith(("target encoder", "drafter encoder")) else STEPS


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
    state = iterate_steps(
        request.network, request.drafter, state.replace(lengths=middle), np.int32(1)
    )
    return state, request


def iteration_variant(state: DecodeState, request: Request) -> Call:
    """Returns a call that runs `STEPS` iterations."""
    return functools.partial(
        iterate_steps, request.network, request.drafter, state, np.int32(STEPS)
    )


@flax.struct.dataclass
class _ZeroDrafter(Drafter):
    """Drafts token 0 at every position, which takes no time."""

    name = "token 0"

    def draft(
        self, draft_state: tuple, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[tuple, Draft]:
        tokens = jnp.zeros((len(state.lengths), state.config.gamma), jnp.int32)
        return (), Draft(tokens, num_wanted, None, jnp.zeros_like(state.lengths))


def call_variant(state: DecodeState, request: Request) -> Call:
    """Returns a call that runs `STEPS` times target call and verification, without the draft.

    At temperature 0 it is the iteration, which may run as one kernel, with drafts that take no
    time. Else verification needs a drafter's distribution, which is made of the target's.
    """
    if state.config.needs_draft_probs:
        return functools.partial(step_loops.verified_steps, request.network, state, steps=STEPS)
    state = state.replace(draft_state=(), policy=None, policy_state=None, last_seen=None)
    return iteration_variant(state, dataclasses.replace(request, drafter=_ZeroDrafter()))
