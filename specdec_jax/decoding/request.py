"""Turns the arguments of `generate` into the decode loop's first state.

`plan` checks them and pairs the drafter with the target; `Plan.start` prefills.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from specdec_jax.backends.jax_settings import check_not_traced
from specdec_jax.decoding.checks import (
    UnsupportedCombination,
    check_drafter_inputs,
    check_drafter_sampling,
    check_eos_ids,
    check_input_lengths,
    check_limits,
    check_memory,
    check_pair,
    check_per_row,
    check_policy,
    check_prompts,
    check_stop,
    check_target,
    cut_to_positions,
    unsupported,
    verifier_settings,
)
from specdec_jax.decoding.defaults import (
    expect_no_search,
    fill_limits,
    fill_sampling,
    read_defaults,
)
from specdec_jax.decoding.generation_config import (
    ConfigOrPath,
    GenerationConfig,
    split_options,
)
from specdec_jax.decoding.inputs import (
    as_ids,
    as_list,
    count_rows,
    decoder_tokens,
    empty_rows,
    pad,
    prompt_tokens,
)
from specdec_jax.decoding.keys import check_keys, row_keys, take_keys
from specdec_jax.decoding.languages import (
    OutputLanguage,
    choose_output_languages,
    choose_vocabularies,
    force_languages,
)
from specdec_jax.decoding.strategies import choose_strategy
from specdec_jax.decoding.trees import resolve_tree
from specdec_jax.models import arguments
from specdec_jax.models.forks import check_process
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network, is_decoder_only
from specdec_jax.models.padding import bucket_length
from specdec_jax.speculative.adaptive_gamma import Auto
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import call_widths
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.prefill import PrefillInputs
from specdec_jax.speculative.sampling import SamplingRows
from specdec_jax.speculative.state import StaticConfig
from specdec_jax.speculative.strategy import AnyConfig, prefill
from specdec_jax.speculative.verifier import Settings

# γ = "auto" where nothing can be measured: on a mesh, whose processes would have to agree.
FIXED = 4
_PENDING = Auto()  # γ = "auto" until `autotune` has chosen its costs


def is_measurable(network: Network) -> bool:
    """Returns whether times measured here hold wherever they are used: not on a mesh."""
    return network.rules is None and jax.process_count() == 1


@dataclasses.dataclass(frozen=True)
class Request:
    """What the host keeps of a batch while it decodes.

    Attributes:
      network: the target's network, for `advance`.
      drafter: the drafter that is really used: None if γ = 0.
      prefix_lengths: `[B]`, number of ids in the start token and decoder prefix, or in the prompt.
      limits: `[B]`, the most new tokens of each row.
      eos_ids, stop: ids and strings that stop a row.
      deadline: seconds after which rows are left as they are, or None.
      empty: `[B]` bool, rows without input.
      inputs: `[B]`, the number of each row's input; −1 for a row that only fills up the batch.
      config: static settings of the loop.
      learned_key: key under which `autotune.record` keeps the number of accepted tokens; None:
        where γ was given, or outputs would depend on it.
      times_key: key of how long batches took, or None.
    """

    network: Network
    drafter: Drafter | None
    prefix_lengths: np.ndarray
    limits: np.ndarray
    eos_ids: tuple[int, ...]
    stop: tuple[str, ...]
    deadline: float | None
    empty: np.ndarray
    inputs: np.ndarray
    config: AnyConfig
    learned_key: str | None = None
    times_key: tuple | None = None

    def take(self, rows: np.ndarray) -> "Request":
        """Returns the request of `rows` only."""
        names = "prefix_lengths", "limits", "empty", "inputs"
        per_row: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return dataclasses.replace(self, **per_row)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checked arguments of `generate` for N inputs, on the host.

    Attributes:
      network, drafter, eos_ids, stop, deadline: as in `Request`.
      config: static settings, for which the loop is compiled.
      samples: number of rows for each input; each has `config.returned` outputs.
      slots: S, for a state with all inputs; prompts that are padded to less than the longest take
        fewer.
      prompted: whether the target is decoder-only; its inputs are then in `prefix`, and L = 0.
      tokens: `[N, L]` ids of the inputs, padded.
      lengths: `[N]`, how many of them count.
      prefix: `[N, P]` start token and decoder prefix, padded.
      prefix_lengths, limits, gammas: `[N]` int32, ids of the prefix, most new tokens, γ.
      empty: `[N]` bool, inputs with nothing to decode.
      key: one key, N keys, or None for the default.
      rows, settings, policy: settings of sampling, verifier and γ per input.
      times_key: key of the times of batches; None: nothing times them.
      explores: whether `autotune` chose γ to find out whether drafting pays.
      draft_rows: settings of the drafter's sampling per input; None: the target's.
      bias: `[V]`, what is added to the logits of all rows, or None.
      auto_rows: number of rows decoded together, for which `autotune` has yet to choose γ; None if
        γ is given or chosen.
      learned_key: key under which `autotune` keeps what it learns of drafts; None if γ was given.
    """

    network: Network
    drafter: Drafter | None
    eos_ids: tuple[int, ...]
    stop: tuple[str, ...]
    deadline: float | None
    config: AnyConfig
    samples: int
    slots: int
    prompted: bool
    tokens: np.ndarray
    lengths: np.ndarray
    prefix: np.ndarray
    prefix_lengths: np.ndarray
    limits: np.ndarray
    gammas: np.ndarray
    empty: np.ndarray
    key: jax.Array | None
    rows: SamplingRows
    settings: Settings | None
    policy: Policy | None
    bias: np.ndarray | None
    auto_rows: int | None = None
    learned_key: str | None = None
    times_key: tuple | None = None
    explores: bool = False
    draft_rows: SamplingRows | None = None

    @property
    def input_lengths(self) -> np.ndarray:
        """`[N]`, number of ids of each input, for a decoder-only target too."""
        return self.prefix_lengths if self.prompted else self.lengths

    @property
    def outputs(self) -> int:
        """Number of outputs of each input."""
        return self.samples * self.config.returned

    @property
    def may_learn(self) -> bool:
        """Whether γ may depend on earlier requests, as where outputs do not depend on γ."""
        return isinstance(self.config, StaticConfig) and self.config.strict_argmax

    @functools.cached_property
    def keys(self) -> jax.Array:
        """`[N · samples]`, the keys of all rows, derived once for the request."""
        keys, rules = row_keys(self.key, len(self.limits), self.samples), self.network.rules
        return keys if rules is None else rules.put(keys)

    def plainly(self) -> "Plan":
        """Returns the plan for plain decoding, without a drafter.

        A coupled verifier stays: what it draws is then the same with a draft and without.
        """
        assert isinstance(self.config, StaticConfig), "a beam search has no automatic γ"
        mode, size, own = self.config.mode, self.config.vocab_size, self.config.verifier
        static = StaticConfig(0, mode, size, strategy=choose_strategy(None))
        return dataclasses.replace(
            self,
            drafter=None,
            config=static._replace(verifier=own) if own.coupled else static,
            slots=self.slots - self.config.gamma,
            gammas=np.zeros_like(self.gammas),
            settings=None,
            policy=None,
            draft_rows=None,
            auto_rows=None,
        )

    def start(
        self, numbers: ArrayLike | None = None, width: int | None = None
    ) -> tuple[Any, Request]:
        """Prefills inputs and returns the decode loop's state and the request.

        Args:
          numbers: `[I]`, those of the inputs; None: all, in order. −1 makes rows that are done, to
            fill up the batch to a size that is compiled.
          width: length to which the inputs are padded; None: the bucket of the longest of them.
        """
        return prefill(*self.arguments(numbers, width)), self.request(numbers)

    def arguments(
        self, numbers: ArrayLike | None = None, width: int | None = None
    ) -> tuple[Network, Drafter | None, AnyConfig, int, PrefillInputs]:
        """Returns the arguments of `prefill` for inputs; parameters as for `start`."""
        keys, num_slots, chosen = self.keys, self.slots, np.arange(len(self.limits))
        if numbers is not None:
            chosen = np.asarray(numbers)
            rows = chosen[:, None] * self.samples + np.arange(self.samples)
            keys = take_keys(keys, rows.reshape(-1))
        filler = chosen < 0
        lengths = np.where(filler, 0, self.lengths[chosen])
        prefix_lengths = np.where(filler, 1, self.prefix_lengths[chosen])
        inputs, prefix = self.tokens[chosen], self.prefix[chosen]
        if width is None:
            width = bucket_length(int(max(prefix_lengths if self.prompted else lengths)))
        if self.prompted:
            prefix, new = pad(prefix, width), int(max(self.limits))
            num_slots = self.config.count_slots(width, new)
        else:
            inputs = pad(inputs, width)
        repeat = functools.partial(np.repeat, repeats=self.samples, axis=0)
        row_inputs = repeat(chosen)
        sampling, settings, gamma, policy, draft_sampling = jax.tree.map(
            lambda values: np.asarray(values)[row_inputs],
            (self.rows, self.settings, self.gammas, self.policy, self.draft_rows),
        )
        ends = repeat(prefix_lengths + self.limits[chosen])
        given = PrefillInputs(
            inputs=inputs,
            input_lengths=lengths,
            tokens=repeat(prefix),
            prefix_lengths=repeat(prefix_lengths),
            sampling=dataclasses.replace(sampling, bias=self.bias),
            limits=ends,
            eos_ids=_stop_ids(self.eos_ids, len(ends)),
            done=repeat(self.empty[chosen] | filler),
            keys=keys,
            settings=settings,
            gamma=gamma,
            policy=policy,
            draft_sampling=draft_sampling,
        )
        return self.network, self.drafter, self.config, num_slots, given

    def request(self, numbers: ArrayLike | None = None) -> Request:
        """Returns what the host keeps of inputs, whose `numbers` are as for `start`."""
        numbers = np.arange(len(self.limits)) if numbers is None else numbers
        numbers = np.repeat(np.asarray(numbers), self.outputs)
        filler = numbers < 0
        return Request(
            self.network,
            self.drafter,
            np.where(filler, 1, self.prefix_lengths[numbers]),
            self.limits[numbers],
            self.eos_ids,
            self.stop,
            self.deadline,
            filler | self.empty[numbers],
            numbers,
            self.config,
            self.learned_key if self.may_learn else None,
            self.times_key,
        )


def plan(
    target: LanguageModel,
    inputs: Any,
    *,
    config: ConfigOrPath = None,
    batch_size: int | None = None,
    **options: Any,
) -> Plan:
    """Checks the arguments of `generate`, without a beam search, and returns them as a plan.

    Nothing is compiled, timed or written. Where γ is "auto" it is `autotune` that chooses it.

    Args:
      target, inputs, config, options: as for `generate`.
      batch_size: number of inputs that are decoded together; None: all.
    """
    config, data = split_options(config, options)
    check_not_traced("decoding")
    check_process()
    check_target(target)
    defaults = read_defaults(target, config.generation_config)
    expect_no_search(target, config, defaults)
    inputs, tokens, lengths = _read_inputs(
        target, inputs, data.input_lengths, data.attention_mask, config
    )
    prefixed = data.decoder_prefix is not None
    batch = len(lengths)
    languages = choose_output_languages(target, config, batch, defaults, prefixed)
    if any(language.first is not None for language in languages):
        defaults = defaults.replace(forced_bos_token_id=None)
    drafter = data.drafter
    tree, gamma, verifier = resolve_tree(config.tree, drafter, config.gamma, config.verifier)
    measured = isinstance(gamma, str) and drafter is not None
    gamma = _resolve_auto(gamma, target, drafter)
    measured &= isinstance(gamma, Policy)
    most = MAX_GAMMA if tree is None else tree.size - 1
    policy, gammas = _make_policy(gamma, batch, drafter, most)
    samples = int(config.num_samples)
    if drafter is not None:
        check_pair(target, drafter)
        drafter = drafter.pair_with(target)
        check_drafter_inputs(drafter, int(np.max(lengths)))
        check_policy(gamma, drafter)
    together = batch if batch_size is None else batch_size
    _check_mesh(target, "inputs" if batch_size is None else "batch_size", together, config.deadline)
    eos_ids = check_eos_ids(target, config.eos_ids)
    prefix, prefix_lengths = _make_prefixes(target, tokens, lengths, data.decoder_prefix, languages)
    limits = fill_limits(target, defaults, config.max_new_tokens, prefix_lengths)
    sampling = fill_sampling(target, defaults, config.sampling, prefix_lengths, limits, eos_ids)
    sampling = sampling if prefixed else force_languages(sampling, languages)
    own = config.drafter_sampling
    width = int(max(gammas))
    check_drafter_sampling(own, sampling, drafter, tree)
    if own is not None and not width:
        raise unsupported("drafter_sampling", "one with gamma = 0", "None")
    rows = sampling.rows(batch, target.config.vocab_size)
    parameters = "lenience", "typical_epsilon", "typical_delta", "synthetic_alpha"
    given = {name: getattr(config, name) for name in parameters}
    settings = verifier_settings(verifier, sampling, width, batch, **given)
    if drafter is not None:
        check_memory(drafter, verifier, sampling.mode)
    check_limits(sampling, limits, samples)
    stop = check_stop(config.stop, config.deadline, target)
    empty, drafter = empty_rows(target, inputs, lengths), drafter if width else None
    # The padded length of prompts, not that of the longest one, so that nothing more compiles for
    # another.
    longest = int(max(prefix_lengths + limits))
    check_prompts(target, drafter, prefix_lengths, limits)
    if is_decoder_only(target):
        longest = prefix.shape[1] + int(max(limits))
        tokens, lengths = tokens[:, :0], np.zeros_like(lengths)
    depth = width if tree is None else tree.depth
    static = StaticConfig(
        depth,
        sampling.mode,
        target.config.vocab_size,
        verifier,
        tree=tree,
        strategy=choose_strategy(tree),
        draft_mode=None if own is None else sampling.mode.with_filters_of(own.mode),
    )
    static = static._replace(widths=_choose_widths(target, drafter, policy, static))
    check_keys(data.key, batch)
    if target.network.rules is not None:  # once for the request, and not with every call
        drafter = target.network.rules.put(drafter)
    return Plan(
        network=target.network,
        drafter=drafter,
        eos_ids=eos_ids,
        stop=stop,
        deadline=config.deadline,
        config=static,
        samples=samples,
        slots=static.count_slots(0, longest),
        prompted=is_decoder_only(target),
        tokens=tokens,
        lengths=lengths,
        prefix=prefix,
        prefix_lengths=prefix_lengths,
        limits=limits,
        gammas=gammas,
        empty=empty,
        key=data.key,
        rows=rows.replace(bias=None),
        settings=settings,
        policy=policy,
        bias=rows.bias,
        auto_rows=together * samples if measured else None,
        draft_rows=None if own is None else own.filters(batch),
    )


def _make_policy(
    gamma: Any, batch: int, drafter: Drafter | None, most: int
) -> tuple[Policy | None, np.ndarray]:
    """Returns the policy of γ for `batch` rows, or None, and the most tokens that each drafts."""
    policy = gamma if isinstance(gamma, Policy) else None
    if policy is None and callable(gamma):
        got = getattr(gamma, "__name__", type(gamma).__name__)
        raise ValueError(f"gamma: got {got}, expected an integer or an instance of a Policy")
    gammas = check_per_row("gamma", gamma if policy is None else policy.maximum, batch, 0, most)
    if drafter is None:
        return None, np.zeros_like(gammas)
    # Of γ = "auto" it is `autotune` that makes the rows, with the costs that it has chosen.
    return policy if policy is None or policy is _PENDING else policy.rows(batch), gammas


def _read_inputs(
    target: LanguageModel,
    inputs: Any,
    input_lengths: Any,
    attention_mask: Any,
    config: GenerationConfig,
) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the inputs as a list or an array, their ids `[N, L]` and their lengths `[N]`.

    Raises:
      ValueError: no input, or one that is too long.
    """
    inputs = as_list("inputs", inputs)
    codes = config.source_language, config.target_language
    vocabularies = choose_vocabularies(target, *codes, count_rows(inputs))
    tokens, lengths = as_ids(
        target, inputs, input_lengths, True, attention_mask, vocabularies=vocabularies
    )
    if not len(lengths):
        raise ValueError("inputs: got 0 inputs, expected at least 1")
    longest = arguments.check_integer("max_input_length", config.max_input_length, 1)
    most = cut_to_positions(target, longest)
    check_input_lengths("input", lengths.tolist(), most, target.config.max_positions)
    return inputs, tokens, lengths


def _check_mesh(target: LanguageModel, name: str, rows: int, deadline: float | None) -> None:
    """Raises for rows, given by the argument `name`, that a mesh cannot divide, and for a deadline.

    Processes of a mesh cannot agree on one.
    """
    rules = target.network.rules
    if rules is None:
        return
    rules.check_rows(name, rows)
    if deadline is not None and jax.process_count() > 1:
        expected = "None: their clocks differ"
        raise UnsupportedCombination(
            f"deadline: got one for several processes, expected {expected}"
        )


def _make_prefixes(
    target: LanguageModel,
    tokens: np.ndarray,
    lengths: np.ndarray,
    decoder_prefix: Any,
    languages: Sequence[OutputLanguage],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the decoder begins with, `[N, P]`, and its lengths, `[N]`.

    It begins with a start token and a decoder prefix, or with the inputs themselves if the target
    is decoder-only.
    """
    if not is_decoder_only(target):
        return decoder_tokens(target, decoder_prefix, len(lengths), languages)
    if decoder_prefix is not None:
        got, expected = "a prefix for a decoder-only model", "None: put it at the end of the input"
        raise UnsupportedCombination(f"decoder_prefix: got {got}, expected {expected}")
    return prompt_tokens(target, tokens, lengths)


def _choose_widths(
    target: LanguageModel, drafter: Drafter | None, policy: Policy | None, config: StaticConfig
) -> tuple[int, ...]:
    """Returns the widths of the target's calls that are compiled; () means the widest alone."""
    varies = drafter is not None and drafter.varies
    # A network that skips padding needs no narrower calls, except that whatever is done with logits
    # other than the argmax is done for all positions, which takes long beside a step in int8.
    if isinstance(policy, Auto) and not (target.network.skips_padding and config.commits_argmax):
        return policy.widths
    adapts = (varies or policy is not None) and config.gamma and not config.tree
    if target.network.skips_padding or not adapts:
        return ()
    return call_widths(config.gamma, none=varies)


def _resolve_auto(gamma: Any, target: LanguageModel, drafter: Drafter | None) -> Any:
    """Returns `gamma`; for "auto" a policy with costs to be measured, or a number."""
    if not isinstance(gamma, str):
        return gamma
    if drafter is None:
        return 0
    return _PENDING if is_measurable(target.network) else FIXED


def _stop_ids(eos_ids: Sequence[int], batch: int) -> np.ndarray:
    """Returns the EOS ids `[B, E]`, padded with −1 to a multiple of 4, so that few E compile."""
    width = max(4, -(-len(eos_ids) // 4) * 4)
    ids = np.full((batch, width), -1, np.int32)
    ids[:, : len(eos_ids)] = eos_ids
    return ids
