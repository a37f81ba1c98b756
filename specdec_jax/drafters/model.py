"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023, section 2.3)."""

import copy
import functools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.drafters.beam_levels import draft_levels
from specdec_jax.drafters.drafting import (
    NetworkDrafter,
    Recorded,
    Step,
    draft_in_pairs,
    draft_tokens,
    draw_adjusted,
    match_width,
)
from specdec_jax.drafters.shortlist import Shortlist, check_shortlist
from specdec_jax.drafters.tree_levels import draft_with_model
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.models.shared_encoders import share_encoder
from specdec_jax.speculative.beam_drafter import BeamDrafter
from specdec_jax.speculative.beam_search import BeamState
from specdec_jax.speculative.beam_tree import BeamTree
from specdec_jax.speculative.prefill import fill_cache
from specdec_jax.speculative.state import DecodeState, Draft
from specdec_jax.speculative.tree_draft import TreeDraft

# By drafter: the network of the target that it was paired with last, and what drafts for it where
# that is not the drafter itself.
_paired: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Network], Any]] = (
    weakref.WeakKeyDictionary()
)


@flax.struct.dataclass
class ModelDraftState:
    """A model drafter's state between iterations.

    Attributes:
      cache: the drafter's own decoder cache.
      cached: `[B]` int32, number of leading slots that hold keys and values of committed tokens, or
        of drafted tokens as far as they are accepted.
    """

    cache: Any
    cached: jax.Array


@jax.tree_util.register_pytree_node_class
class ModelDrafter(NetworkDrafter, BeamDrafter):
    """A drafter that draws γ tokens one after another from `model`.

    Its logits pass through the same processors as the target's.

    Attributes:
      model: the drafter's model; must share the target's vocabulary (its logits may be narrower or
        wider).
      network: the network that drafts: the model's own, or one made of it for a shortlist, for 8
        bits, or beside a target with an equal encoder.
      shortlist: the ids that are proposed, None for all.
    """

    leaves = ("network", "shortlist")
    provides_probs = True
    # Whether the model attends to the target's encoder output instead of having an encoder.
    reads_encoder: ClassVar[Any] = property(lambda self: self.network.encoder_dim is not None)
    scorable: ClassVar[Any] = property(lambda self: not self.reduced)

    @isolated
    def __init__(
        self,
        model: LanguageModel,
        shortlist: int | Sequence[int] | np.ndarray | None = None,
        int8: bool = False,
    ):
        """Makes the drafter.

        A shortlist and int8 do not change the output distribution; both change what is proposed,
        and so the acceptance rate.

        Args:
          model: the drafter's model.
          shortlist: the only ids that are proposed; the head has no more columns than these. They
            must be ascending, each once, and contain those that end a sequence (as from
            `shortlist_from_counts`). A number takes that many of the vocabulary's first ids, which
            SentencePiece orders by frequency, and the ending ones.
          int8: multiply with weights in int8. They are made now and kept beside the model's own,
            unless those are in int8 already. On a CPU inputs of products are rounded too: in
            float32 to 16 bits, without the package's own kernels to 8.

        Raises:
          ValueError: an empty shortlist, ids that are not ascending or that the model lacks, no id
            that ends a sequence, or either option with a `matmul_dtype`.
        """
        arguments.check_model("model", model)
        if (shortlist is not None or int8) and getattr(model.config, "matmul_dtype", None):
            name = "int8" if shortlist is None else "shortlist"
            got = f"one for a model with matmul_dtype={model.config.matmul_dtype!r}"
            raise mismatch_error(name, got, "a model without it")
        self.model, self.network, self.shortlist = model, model.network, None
        self.int8 = arguments.check_flag("int8", int8) and not model.quantized
        if shortlist is not None:
            ids = check_shortlist(shortlist, model.config.vocab_size, model.eos_ids)
            self.shortlist = Shortlist.select(ids, model.config.vocab_size)
            self.network = self.network.shortlisted(self.shortlist.ids)
        if self.int8:
            self.network = self.network.in_int8()

    @property
    def reduced(self) -> bool:
        """Whether a shortlist or 8 bits give the drafter another distribution than its model's."""
        return self.int8 or self.shortlist is not None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def second_model(self) -> LanguageModel | None:
        return self.model

    @property
    def encoders(self) -> tuple[Network, ...]:
        return (self.network,)

    def steps(self) -> dict[str, Network]:
        networks, whole = {"draft step": self.network}, self.model.network
        if self.int8 and self.shortlist is not None:
            networks["draft step, shortlist alone"] = whole.shortlisted(self.shortlist.ids)
            networks["draft step, int8 alone"] = whole.in_int8()
        if self.reduced:
            networks["draft step, unreduced"] = whole
        return networks

    def identity(self) -> tuple[list[Any], Any]:
        return [self.model.contents, self.int8], self.shortlist

    def check(self, target: LanguageModel) -> None:
        super().check(target)
        width = target.config.vocab_size
        if self.shortlist is not None and int(self.shortlist.ids[0]) >= width:
            got = f"a shortlist without any id below {width}, the target's number of ids"
            raise ValueError(f"drafter: got {got}")

    def pair_with(self, target: LanguageModel) -> "ModelDrafter":
        """Returns the drafter without its own encoder if that is equal to the target's.

        It then attends to the target's encoder output, which is computed once for each input.
        """
        # The encoder of one that learns while decoding changes.
        if self.reads_encoder or self.remembers:
            return self
        known = _paired.get(self)
        if known is None or known[0]() is not target.network:
            paired = None
            if share_encoder(target, self.model):
                paired = copy.copy(self)
                paired.network = self.network.without_encoder()
            known = _paired[self] = weakref.ref(target.network), paired
        return known[1] or self

    def widened(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """Returns logits as `[..., vocab_size]`, −inf for ids that are not proposed."""
        if self.shortlist is not None:
            logits = self.shortlist.widen(logits)
        return match_width(logits, vocab_size)

    def init(
        self,
        inputs: jax.Array,
        input_lengths: jax.Array,
        tokens: jax.Array,
        slots: int,
        **encoded: jax.Array,
    ) -> ModelDraftState:
        batch, prefix = tokens.shape
        cache = fill_cache(self.network, inputs, input_lengths, tokens, slots, **encoded)
        # A row with a shorter prefix has garbage past its own last token; `draft` takes the smaller
        # of the two numbers.
        return ModelDraftState(cache, jnp.full(batch, prefix - 1, jnp.int32))

    def init_beams(
        self,
        inputs: jax.Array,
        input_lengths: jax.Array,
        tokens: jax.Array,
        beams: int,
        slots: int,
        positions: int,
        **encoded: jax.Array,
    ) -> Any:
        cache = fill_cache(self.network, inputs, input_lengths, tokens, tokens.shape[1], **encoded)
        return self.network.node_cache(cache, slots, positions)

    def draft_beams(self, draft_state: Any, state: BeamState, tree: BeamTree):
        widened = functools.partial(self.widened, vocab_size=state.config.vocab_size)
        return draft_levels(self.network, widened, draft_state, state, tree)

    def move_beams(self, draft_state: Any, sources: jax.Array, starts: jax.Array):
        return self.network.move_nodes(draft_state, sources, starts)

    def init_tree(
        self, inputs: jax.Array, input_lengths: jax.Array, tokens: jax.Array, slots: int, **encoded
    ) -> Any:
        cache = fill_cache(self.network, inputs, input_lengths, tokens, tokens.shape[1], **encoded)
        return self.network.node_cache(cache, slots, slots)

    def draft_tree(
        self, draft_state: Any, state: DecodeState, num_wanted: jax.Array, max_depth: jax.Array
    ):
        widened = functools.partial(self.widened, vocab_size=state.config.vocab_size)
        whole, lag = self.shortlist is None, state.config.lag
        return draft_with_model(
            self.network, widened, draft_state, state, num_wanted, max_depth, lag, whole
        )

    def keep_path(self, draft_state: Any, state: DecodeState, draft: TreeDraft, path: jax.Array):
        fed = jnp.take_along_axis(draft.slots, path[:, 1:], axis=1)
        return self.network.move_nodes(draft_state, state.lengths[:, None] - 1 + fed, state.lengths)

    def rewind(self, draft_state: ModelDraftState, lengths: jax.Array) -> ModelDraftState:
        return ModelDraftState(draft_state.cache, jnp.minimum(draft_state.cached, lengths - 1))

    def draft(
        self, draft_state: ModelDraftState, state: DecodeState, num_wanted: jax.Array
    ) -> tuple[ModelDraftState, Draft]:
        """Drafts with a loop of single steps, the first over two positions if a row lags.

        After a full acceptance the last drafted token was drawn but never fed: it is fed together
        with the one committed after it. The other rows feed the same tokens to the same slots
        again. A row that did not draft for a while lags by more, and catches up by two tokens a
        call. On an accelerator every step feeds two positions (`draft_in_pairs`), if that takes no
        longer and no policy of γ says how many steps there are.
        """
        choose_token = functools.partial(choose_next, self.network, self.shortlist, state)
        last = state.lengths - 1
        lag = jnp.where(num_wanted > 0, last - jnp.minimum(draft_state.cached, last), 0)

        def choose(step: Step, tokens: jax.Array, carry: tuple):
            cache, recorded = carry
            position = last + step
            fed = jnp.take_along_axis(tokens, position[:, None], axis=1)
            valid = (step < num_wanted)[:, None]
            states, cache = self.network.decode_states(fed, position, cache, valid=valid)
            token, recorded = choose_token(step, tokens, states, valid, recorded)
            return token, (cache, recorded)

        def feed_pair(step: Step, tokens: jax.Array, cache: Any):
            # At position 0 the second token is fed needlessly. Past its draft a row may feed
            # anything, but only to slots that no row commits: the last two are among them.
            position = jnp.clip(last + step, 0, tokens.shape[1] - 1)
            first = jnp.maximum(position - 1, 0)
            fed = jnp.take_along_axis(tokens, first[:, None] + jnp.arange(2), axis=1)
            valid = jnp.broadcast_to((num_wanted > 0)[:, None], fed.shape)
            states, cache = self.network.decode_states(fed, first, cache, valid=valid)
            states = jnp.take_along_axis(states, (position - first)[:, None, None], axis=1)
            return states, valid[:, :1], cache

        def choose_by_pair(step: Step, tokens: jax.Array, carry: tuple):
            states, valid, cache = feed_pair(step, tokens, carry[0])
            token, recorded = choose_token(step, tokens, states, valid, carry[1])
            return token, (cache, recorded)

        def feed(step: Step, carry: tuple):
            return feed_pair(step, state.tokens, carry[0])[2], carry[1]

        carry, most = (draft_state.cache, Recorded.empty(state)), jnp.max(lag)
        if state.policy is None and self.network.pairs_are_free(draft_state.cache):
            drafted = draft_in_pairs(state, num_wanted, choose_by_pair, carry, most, feed)
        else:
            drafted = draft_tokens(
                state, num_wanted, choose, carry, most, choose_by_pair, lambda c: c[1].signals
            )
        tokens, num_drafted, (cache, recorded) = drafted
        # With an odd lag the last call that catches up drafts too.
        calls = jnp.where(num_wanted > 0, num_drafted + lag // 2, 0)
        # A row that drafted nothing has cached nothing new. Its prefix's padding is no longer
        # hidden by `last`.
        cached = jnp.minimum(draft_state.cached, last)
        cached = jnp.where(num_wanted > 0, last + num_drafted, cached)
        draft = Draft(tokens, num_drafted, recorded.dist, calls, recorded.signals)
        return ModelDraftState(cache, cached), draft


def choose_next(
    network: Network,
    shortlist: Shortlist | None,
    state: DecodeState,
    step: Step,
    tokens: jax.Array,
    states: jax.Array,
    valid: jax.Array,
    recorded: Recorded,
) -> tuple[jax.Array, Recorded]:
    """Returns the token `[B]` that a network drafts after `states [B, 1, D]`, and the record."""
    config, vocab_size = state.config, state.config.vocab_size
    bare = config.mode.greedy and not config.mode.processes and recorded.signals is None
    whole = shortlist is None and network.vocab_size <= vocab_size
    if bare and whole and network.skips_padding:
        token, _ = network.greedy_token_and_logprob(states, valid, normalize=False)
        return token[:, 0], recorded
    logits = network.head(states, valid)
    if shortlist is not None and bare:  # nothing as wide as the vocabulary is needed
        return shortlist.argmax(logits, vocab_size)[:, 0], recorded
    logits = match_width(logits if shortlist is None else shortlist.widen(logits), vocab_size)
    return draw_adjusted(state, logits, tokens, step, recorded)
