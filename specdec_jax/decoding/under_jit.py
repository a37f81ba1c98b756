"""Decodes speculatively inside another program's traced function.

Arguments have the names of T5X's `decoding.temperature_sample`. There the target's parameters and
the batch are traced, so nothing can be checked, padded or raised by their values.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.backend import CPUBackend
from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints.stored_tensor import check_shapes
from specdec_jax.decoding.ambient_mesh import (
    adapt_drafter_to_mesh,
    adapt_to_mesh,
    can_call_cpu_kernels,
)
from specdec_jax.decoding.checks import (
    check_drafter_sampling,
    check_limits,
    check_memory,
    check_policy,
    check_sampling,
    verifier_settings,
)
from specdec_jax.decoding.generate import FOREVER, advance
from specdec_jax.decoding.generation_config import (
    FIELDS,
    CallData,
    ConfigOrPath,
    GenerationConfig,
    check_unset,
    document_options,
    split_options,
)
from specdec_jax.decoding.keys import fold_keys
from specdec_jax.decoding.request import FIXED
from specdec_jax.decoding.strategies import choose_strategy
from specdec_jax.decoding.traced_arguments import (
    check_key,
    check_models,
    check_names,
    check_parts,
    check_rows,
    end_ids,
    is_traced,
)
from specdec_jax.decoding.trees import resolve_tree
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments, weight_layouts
from specdec_jax.models.network import Network
from specdec_jax.models.parameters import flatten, parameter_shapes
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import call_widths
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.randomness import make_key, to_threefry
from specdec_jax.speculative.sampling import SamplingConfig, SamplingMode, SamplingRows
from specdec_jax.speculative.state import StaticConfig, count_slots
from specdec_jax.speculative.strategy import AnyConfig, prefill

# T5X takes the argmax at temperatures up to this.
_LEAST_TEMPERATURE = 1e-4
# Arguments that may differ from call to call: T5X's name -> ours.
_PER_CALL = {"temperature": "temperature", "topk": "top_k", "topp": "top_p"}
_KNOWN = (
    *_PER_CALL,
    "decode_rng",
    "eos_id",
    "max_decode_steps",
    "max_decode_steps_hard_limit",
    "rescale_log_probs",
)


class Decoded(NamedTuple):
    """What `Decoder.decode` returns, as arrays.

    Of a beam search tokens are `[B, K, L]` and scores `[B, K]`.

    Attributes:
      tokens: `[B, L]` int32, the prompt and what follows, EOS included, then 0.
      scores: `[B]` float32, log-probability of the new tokens; NaN if the target's logits are not
        finite numbers, or the input has a 0 inside.
      target_calls, drafted, accepted: `[B]` int32, as in `state.Counts`.
    """

    tokens: jax.Array
    scores: jax.Array
    target_calls: jax.Array
    drafted: jax.Array
    accepted: jax.Array


def make_network(params: Mapping, config: T5Config, rows: int) -> Network:
    """Returns the network of a target whose parameters are traced.

    On an accelerator the parameters are used as they are: the loop's own layout would be a second
    copy of them.

    Args:
      params: nested dict with T5X's names.
      config: the target's configuration.
      rows: B, rows that are decoded together.

    Raises:
      ValueError: a parameter is missing, unexpected or of the wrong shape.
    """
    arguments.check_kind("params", params, Mapping, "a nested dict of the target's parameters")
    tree = _copy_nested(params)
    check_shapes(
        flatten(tree), parameter_shapes(config), "params", "of a T5 of the module's configuration"
    )
    tree = jax.tree.map(lambda leaf: leaf.astype(config.dtype), tree)
    if not can_call_cpu_kernels(config.dtype):
        return adapt_to_mesh(Network(tree, config.module()), rows)
    packed = weight_layouts.pack(tree, True)
    if config.logits_via_embedding:
        packed, config = weight_layouts.add_head(packed, True, True), config.with_own_head()
    return Network(packed, config.module(CPUBackend()))


def _copy_nested(node: Any) -> Any:
    """Returns nested mappings of any kind, frozen ones too, as nested dicts."""
    return (
        {name: _copy_nested(value) for name, value in node.items()}
        if isinstance(node, Mapping)
        else node
    )


# Options of `generate` that have no meaning in a traced function, or that its arguments have.
UNSUPPORTED = (
    *("synthetic_alpha", "max_new_tokens", "num_samples", "max_input_length", "eos_ids", "stop"),
    *("deadline", "num_beams", "length_penalty", "beam_style", "early_stopping"),
    *("num_return_sequences", "non_finite", "generation_config"),
    *("source_language", "target_language"),
)


def read_options(
    generation: ConfigOrPath, options: Mapping[str, Any], caller: str
) -> GenerationConfig:
    """Returns the options of a traced decode; rejects those that have no meaning there.

    Raises:
      TypeError: an unknown option.
      ValueError: as for `GenerationConfig`, or an option without meaning for `caller`.
    """
    config, _ = split_options(generation, options)
    if of_a_call := sorted(options.keys() - FIELDS.keys()):
        raise TypeError(f"{of_a_call[0]}: got an unknown option for {caller}")
    check_unset(config, f"for {caller}", *UNSUPPORTED)
    return config


class Decoder:
    """A decode under `jax.jit`; its settings are checked when the object is made."""

    @functools.partial(document_options, without=(*UNSUPPORTED, *CallData._fields))
    @isolated
    def __init__(
        self,
        config: T5Config,
        drafter: Drafter | None = None,
        generation: ConfigOrPath = None,
        rescale_log_probs: bool = True,
        **options: Any,
    ) -> None:
        """Checks the settings.

        Args:
          config: the target's configuration.
          drafter: None is plain decoding.
          generation: a `GenerationConfig`, or the path of its file, which the options change.
          rescale_log_probs: whether scores are under the distribution that was sampled (0 with
            argmax), as T5X's are; else they are under the target's own distribution.
          options: fields of `GenerationConfig`, but for `UNSUPPORTED`. `gamma="auto"` is 4 tokens,
            or all nodes of `tree`.

        Raises:
          TypeError, ValueError: as for `read_options`; or settings that make no sense together.
        """
        check_parts(config, drafter)
        rescale_log_probs = arguments.check_flag("rescale_log_probs", rescale_log_probs)
        given = read_options(generation, options, "a traced decode")
        check_unset(given, "for sampling", "beam_width")
        automatic = isinstance(given.gamma, str) and given.tree is None
        automatic &= getattr(drafter, "tree", None) is None
        gamma = FIXED if automatic else given.gamma
        self.config, self.drafter, self.rescale_log_probs = config, drafter, rescale_log_probs
        self.sampling = given.sampling or SamplingConfig()
        check_sampling(self.sampling)
        self.drafter_sampling = given.drafter_sampling
        parameters = ("lenience", "typical_epsilon", "typical_delta")
        self._parameters = {name: getattr(given, name) for name in parameters}
        self.tree, self.gamma, self.verifier = resolve_tree(
            given.tree, drafter, gamma, given.verifier
        )
        limit = MAX_GAMMA if self.tree is None else self.tree.size - 1
        most = self.gamma.maximum if isinstance(self.gamma, Policy) else self.gamma
        if not arguments.is_integer(most) or not 0 <= most <= limit:
            expected = f"an integer from 0 to {limit}, or a policy of it"
            raise ValueError(f"gamma: got {self.gamma!r}, expected {expected}")
        if drafter is not None:
            check_policy(self.gamma, drafter)
        check_models(drafter, config)
        check_drafter_sampling(self.drafter_sampling, self.sampling, drafter, self.tree, True)
        if drafter is not None:
            check_memory(drafter, self.verifier, self.sampling.mode)
        self._settings(1)
        self.sampling.rows(1, config.vocab_size)

    @property
    def width(self) -> int:
        """The most tokens drafted in one iteration."""
        if self.drafter is None:
            return 0
        return self.gamma.maximum if isinstance(self.gamma, Policy) else int(self.gamma)

    @isolated
    def check_call(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for `decoder_params` that `decode` rejects, whatever its arrays are."""
        check_names(given, _KNOWN, None)
        rows = max(np.size(given.get(name, 0)) for name in _PER_CALL)
        _split_sampling(self.sampling, given, rows, self.config.vocab_size)
        _count_new_tokens(given, jnp.zeros(1, jnp.int32), 1)
        self._rescales(given)
        end_ids(given.get("eos_id", ()), 1)
        _make_keys(given.get("decode_rng"), 1)

    def _rescales(self, given: Mapping[str, Any]) -> bool:
        value = given.get("rescale_log_probs")
        value = self.rescale_log_probs if value is None else value
        return arguments.check_flag("rescale_log_probs", value)

    def _settings(self, batch: int) -> dict[str, np.ndarray] | None:
        return verifier_settings(
            self.verifier, self.sampling, self.width, batch, **self._parameters
        )

    @isolated
    def decode(
        self,
        params: Mapping,
        inputs: jax.Array,
        prompts: jax.Array,
        eos_id: Any,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        prompted: bool = True,
    ) -> Decoded:
        """Decodes a batch; to be called under `jax.jit`.

        Args:
          params: the target's parameters.
          inputs: `[B, L']` int32; 0 at the beginning and at the end of a row is padding. A 0 inside
            a row, which T5X would mask, is read as a token, and the row has NaN for its score.
          prompts: `[B, L]` int32: the start token 0, a prompt to repeat and continue (up to its
            first 0), then 0. At most L tokens come out.
          eos_id: the id that ends a row, except in its prompt.
          rng: key of the batch, of any kind; None: the key of seed 0.
          decoder_params: arguments of T5X's `temperature_sample` for this call: `temperature`,
            `topk`, `topp` (one number, or one per row), `max_decode_steps`,
            `max_decode_steps_hard_limit`, `rescale_log_probs`, `eos_id`, `decode_rng`.
          prompted: False says that no row has a prompt.

        Raises:
          ValueError: arrays of other kinds or shapes, unknown `decoder_params`, values that make no
            sense, tokens forced past L, or parameters of another shape.
        """
        given = check_names(decoder_params, _KNOWN, rng)
        rng = given.get("decode_rng") if rng is None else rng
        inputs, prompts = check_rows(inputs, prompts)
        batch, length = prompts.shape
        check_limits(self.sampling, np.array([length]), 1)
        mode, rows = _split_sampling(self.sampling, given, batch, self.config.vocab_size)
        if self.drafter is not None:
            check_memory(self.drafter, self.verifier, mode)
        own = None if mode.greedy or not self.width else self.drafter_sampling
        policy = self.gamma.rows(batch) if isinstance(self.gamma, Policy) and self.width else None
        varies = self.drafter is not None and self.drafter.varies
        adapts = self.width and self.tree is None and (varies or policy is not None)
        widths = call_widths(self.width, none=varies) if adapts else ()
        depth = self.width if self.tree is None else self.tree.depth
        config = StaticConfig(
            depth,
            mode,
            self.config.vocab_size,
            self.verifier,
            widths,
            self.tree,
            strategy=choose_strategy(self.tree),
            draft_mode=None if own is None else mode.with_filters_of(own.mode),
        )
        tokens = prompts.at[:, 0].set(0) if prompted else jnp.zeros_like(prompts[:, :1])
        starts = jnp.sum(jnp.cumprod(tokens[:, 1:] != 0, axis=1), axis=1, dtype=jnp.int32) + 1
        inputs, input_lengths, whole = align_inputs(inputs)
        begin = PrefillInputs(
            inputs=inputs,
            input_lengths=input_lengths,
            tokens=tokens,
            prefix_lengths=starts,
            sampling=rows,
            limits=1 + _count_new_tokens(given, starts - 1, length),
            eos_ids=end_ids(given.get("eos_id", eos_id), batch),
            done=jnp.zeros(batch, bool),
            keys=_make_keys(rng, batch),
            settings=self._settings(batch),
            gamma=jnp.full(batch, self.width, jnp.int32),
            policy=policy,
            draft_sampling=None if own is None else own.filters(batch),
        )
        drafter = self.drafter if self.width else None
        num_slots = count_slots(length + 1, config.reach)
        state = run_loop(params, self.config, drafter, config, num_slots, begin)
        columns = jnp.arange(1, length + 1)
        decoded = jnp.where(columns < state.lengths[:, None], state.tokens[:, 1 : length + 1], 0)
        log_probs = state.log_probs
        if self._rescales(given):
            adjusted = state.adjusted_log_probs  # None where every token is the argmax
            log_probs = jnp.zeros_like(log_probs) if adjusted is None else adjusted
        counts, sound = state.counts, jnp.all(jnp.isfinite(state.log_probs), axis=1)
        scores = jnp.where(sound & whole, jnp.sum(log_probs, axis=1), jnp.nan)
        # Where no token could be drawn the id is negative, which T5X cannot take.
        return Decoded(
            jnp.maximum(decoded, 0), scores, counts.target_calls, counts.drafted, counts.accepted
        )


def run_loop(
    params: Mapping,
    model: T5Config,
    drafter: Drafter | None,
    config: AnyConfig,
    num_slots: int,
    inputs: PrefillInputs,
) -> Any:
    """Returns the last state of the loop that `prefill` begins with these arguments.

    Both networks are laid out for the devices of the program.

    Args:
      params, model: parameters of the target, as for `make_network`, and its configuration.
      drafter, config, num_slots, inputs: as for `prefill`.
    """
    rows = len(inputs.tokens)
    network = make_network(params, model, rows)
    if drafter is not None:
        drafter = adapt_drafter_to_mesh(drafter.on(network), rows, network)
    state = prefill(network, drafter, config, num_slots, inputs)
    return advance(network, drafter, state, FOREVER)


def align_inputs(inputs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Moves each row of `inputs [B, L']` to the left, over the padding, 0, before it.

    T5X masks every 0. T5's positions are relative, so that moving a row changes nothing.

    Returns:
      inputs `[B, L']`; their lengths `[B]`, without the padding after them; and `[B]` whether the
      rows have no 0 inside, which would count here.
    """
    there, places = inputs != 0, jnp.arange(inputs.shape[1], dtype=jnp.int32)
    begin = jnp.argmax(there, axis=1).astype(jnp.int32)
    order = (begin[:, None] + places) % inputs.shape[1]
    moved = jnp.take_along_axis(inputs, order, axis=1)
    lengths = jnp.max(jnp.where(moved != 0, places + 1, 0), axis=1)
    return moved, lengths, jnp.sum(there, axis=1) == lengths


def _split_sampling(
    config: SamplingConfig, given: Mapping[str, Any], batch: int, vocab_size: int
) -> tuple[SamplingMode, SamplingRows]:
    """Returns the static and the traced part of `config`, with the changes of one call, `given`."""
    values = {
        ours: given[theirs] for theirs, ours in _PER_CALL.items() if given.get(theirs) is not None
    }
    fixed = {
        ours: arguments.check_numbers(theirs, given[theirs], "a number, or one for each row")
        for theirs, ours in _PER_CALL.items()
        if ours in values and not is_traced(given[theirs])
    }
    if np.any(fixed.get("top_k", 0)) and np.any(fixed.get("top_p", 0)):
        raise ValueError(
            "decoder_params: got topk and topp, expected at most one of the two to be other than 0"
        )
    if "temperature" in fixed:
        fixed["temperature"] = np.where(
            fixed["temperature"] > _LEAST_TEMPERATURE, fixed["temperature"], 0.0
        )
    if "top_p" in fixed:
        fixed["top_p"] = np.where(fixed["top_p"] == 0, 1.0, fixed["top_p"])  # T5X's 0 keeps all
    config = dataclasses.replace(config, **{name: value.tolist() for name, value in fixed.items()})
    mode, rows, late = config.mode._asdict(), config.rows(batch, vocab_size), {}
    for name in values.keys() - fixed.keys():
        value, old = jnp.asarray(values[name]), getattr(rows, name)
        if name == "temperature":
            value, mode["greedy"] = jnp.where(value > _LEAST_TEMPERATURE, value, 0), False
        else:
            value, mode[name] = jnp.where((value == 0) & (name == "top_p"), 1, value), True
        late[name] = jnp.broadcast_to(value.astype(old.dtype), (batch,))
    return SamplingMode(**mode), dataclasses.replace(rows, **late)


def _count_new_tokens(given: Mapping[str, Any], prompts: jax.Array, length: int) -> jax.Array:
    """Returns `[B]`, the most tokens that come out for each row, its prompt included."""
    steps, hard = given.get("max_decode_steps"), given.get("max_decode_steps_hard_limit")
    if steps is None:
        return jnp.full(prompts.shape, length, jnp.int32)
    if not is_traced(steps):
        expected = "an integer of at least 1"
        steps = arguments.check_numbers("max_decode_steps", steps, expected, whole=True)
        if np.any(steps < 1):
            raise mismatch_error("max_decode_steps", arguments.quote(steps), expected)
        steps = np.minimum(steps, length)  # which may be more than 32 bits hold
    if hard is not None:
        if not is_traced(hard):
            name = "max_decode_steps_hard_limit"
            hard = np.clip(arguments.check_numbers(name, hard, "an integer", whole=True), 0, length)
        steps = jnp.where(hard > 0, jnp.minimum(steps, hard), steps)
    return jnp.minimum(prompts + steps, length).astype(jnp.int32)


def _make_keys(rng: jax.Array | None, batch: int) -> jax.Array:
    """Returns the rows' keys `[B]`, folded from the batch's key, which may be of any kind."""
    key = make_key(0) if rng is None else to_threefry(check_key(rng))
    return fold_keys(key, jnp.arange(batch))
