"""A smaller model of the same vocabulary as drafter (Leviathan et al. 2023, section 2.3)."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specdec_jax import sampling
from specdec_jax.models.base import LanguageModel
from specdec_jax.sampling import Law
from specdec_jax.speculative import DecodeState, Draft, context


@flax.struct.dataclass
class ModelDraftState:
    """A model drafter's state between iterations.

    Attributes:
      cache: the drafter's own decoder cache.
      cached: `[B]` int32, leading slots that hold keys and values of committed or, as far as they stand, drafted tokens.
    """

    cache: Any
    cached: jax.Array


@jax.tree_util.register_pytree_node_class
class ModelDrafter:
    """Drafts γ tokens one after another with `model`, under the same processors as the target.

    Attributes:
      model: the drafter's model; must share the target's vocabulary (its logits may be narrower or wider).
    """

    def __init__(self, model: LanguageModel):
        self.model = model
        self.network = model.network

    def tree_flatten(self):
        return (self.network,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        drafter = object.__new__(cls)  # inside jit only the network is there
        (drafter.network,) = children
        return drafter

    def init(self, inputs, input_lengths, tokens, slots: int) -> ModelDraftState:
        batch, prefix = tokens.shape
        cache = self.network.prefill(inputs, input_lengths, slots, batch // inputs.shape[0])
        if prefix > 1:
            _, cache = self.network.decode(tokens[:, :-1], jnp.zeros(batch, jnp.int32), cache)
        # A row whose prefix is shorter has junk past its own last token; `draft` takes the smaller of the two.
        return ModelDraftState(cache, jnp.full(batch, prefix - 1, jnp.int32))

    def draft(self, draft_state: ModelDraftState, state: DecodeState, num_wanted) -> tuple[ModelDraftState, Draft]:
        """Drafts with a loop of single steps, preceded by one for each token that the slowest row must catch up.

        After a full acceptance the last drafted token was drawn but never fed. Starting the loop a position early
        costs a step in those iterations only; the other rows feed the same token to the same slot again.

        A row stops drafting after an EOS that it drew; the EOS stays in the draft (dropping it would bias the law).
        """
        program, last, slots = state.program, state.lengths - 1, jnp.arange(state.tokens.shape[1])
        lag = jnp.where(num_wanted > 0, last - jnp.minimum(draft_state.cached, last), 0)
        law = None
        if program.asks_draft_law:
            shape = (len(last), program.gamma)
            law = Law(jnp.zeros((*shape, program.vocab_size), jnp.float32), jnp.zeros(shape, jnp.float32))

        def more(carry):
            step, num_drafted = carry[0], carry[3]
            return jnp.any(step < num_drafted)

        def body(carry):
            step, tokens, cache, num_drafted, law = carry
            position = jnp.maximum(last + step, 0)
            fed = jnp.take_along_axis(tokens, position[:, None], axis=1)
            logits, cache = self.network.decode(fed, position, cache)
            drawn, law = _draw(state, match_width(logits, program.vocab_size), tokens, step, law)
            drawing = (step >= 0) & (step < num_drafted)
            written = drawing[:, None] & (slots == (last + 1 + step)[:, None])
            tokens = jnp.where(written, drawn[:, None], tokens)
            is_eos = jnp.any(drawn[:, None] == state.eos_ids, axis=1)
            return step + 1, tokens, cache, jnp.where(drawing & is_eos, step + 1, num_drafted), law

        carry = (-jnp.max(lag), state.tokens, draft_state.cache, num_wanted, law)
        _, tokens, cache, num_drafted, law = jax.lax.while_loop(more, body, carry)
        drafted = jnp.minimum(state.lengths[:, None] + jnp.arange(program.gamma), len(slots) - 1)
        draft = Draft(
            tokens=jnp.take_along_axis(tokens, drafted, axis=1),
            num_drafted=num_drafted,
            law=law,
            calls=jnp.where(num_wanted > 0, num_drafted + lag, 0),
        )
        # A row that only watched has cached nothing new; its prefix's padding is no longer hidden by `last`.
        cached = jnp.where(num_wanted > 0, last + num_drafted, jnp.minimum(draft_state.cached, last))
        return ModelDraftState(cache, cached), draft


def _draw(state: DecodeState, logits, tokens, step, law: Law | None) -> tuple[jax.Array, Law | None]:
    """One token `[B]` from `logits [B, 1, V]`, and `law` with the law it was drawn from at position `step`.

    `tokens [B, S]` holds what was drafted before. While catching up (step < 0) what is drawn is thrown away.
    """
    program, prefixes = state.program, context(state, tokens, jnp.maximum(step, 0))
    if program.mode.greedy:
        return sampling.argmax(sampling.process(logits, prefixes, state.sampling, program.mode))[:, 0], law
    here = sampling.standardize(logits, prefixes, state.sampling, program.mode)
    if program.verifier == "gumbel":
        noise = sampling.gumbel_noise(state.keys, prefixes.lengths[:, None], program.vocab_size)
        return sampling.argmax(here.logits + noise)[:, 0], law
    offsets = jnp.broadcast_to(step, state.lengths[:, None].shape)
    uniform = sampling.uniforms(state.keys, state.lengths, offsets, sampling.DRAFT)[:, 0]
    drawn = sampling.draw(here.probs()[:, 0], uniform)
    if law is not None:
        # While catching up position 0 is written, which step 0 then overwrites.
        write = lambda buffer, new: jax.lax.dynamic_update_slice_in_dim(buffer, new, jnp.maximum(step, 0), axis=1)
        law = Law(*map(write, law, here))
    return drawn, law


def match_width(logits: jax.Array, vocab_size: int) -> jax.Array:
    """`logits [..., W]` as `[..., vocab_size]`: ids that the drafter lacks get probability 0, ids that the target lacks go.

    The cut comes before any adjustment, so that the resulting law is the one that is drawn from.
    """
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return jnp.pad(logits, ((0, 0),) * (logits.ndim - 1) + ((0, missing),), constant_values=-jnp.inf)
    return logits[..., :vocab_size]
