"""What goes together: a target, what drafts for it, a policy of γ, and prompts of a length."""

import numpy as np

from specdec_jax.drafters.exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookup import NGramDrafter
from specdec_jax.drafters.ngrams import NGramTable
from specdec_jax.gamma import Policy
from specdec_jax.models.base import LanguageModel, check_positions, decoder_only


class UnsupportedCombination(ValueError):
    """Options that are sound one by one, but make no sense together."""


def drafting_models(drafter) -> list[LanguageModel]:
    """The models that `drafter` is made of."""
    own = [drafter.model] if getattr(drafter, "model", None) is not None else []
    return own + [model for part in getattr(drafter, "parts", ()) for model in drafting_models(part)]


def check_prompts(target: LanguageModel, drafter, lengths, limits) -> None:
    """Refuses prompts of `lengths [B]` ids that with up to `limits` new ones need more positions than the target or a model
    that drafts has; models with an encoder take any.

    For callers that decode in parts, which would find the longest prompt late: `plan` looks at its own inputs.
    """
    longest = int(max(np.maximum(lengths, 1) + limits))
    for model in (target, *drafting_models(drafter)):
        check_positions(model.config, longest, "inputs" if model is target else "drafter")


def check_pair(target: LanguageModel, drafter) -> None:
    """Refuses a drafter whose vocabulary is not the target's (PITFALLS row 28), an early exit of another model, or a model
    with an encoder for one without and the other way round."""
    for part in getattr(drafter, "parts", ()):
        check_pair(target, part)
    if isinstance(drafter, EarlyExitDrafter) and drafter.model is not target:
        raise ValueError(
            f"drafter: got an early exit of another model ({drafter.model.name}), expected one of the target itself "
            f"({target.name})"
        )
    if isinstance(drafter, NGramDrafter):
        _check_table(target, drafter.table)
    if isinstance(drafter, HeadsDrafter):
        drafter.check(target)
    model = getattr(drafter, "model", None)
    if model is None:
        return
    if decoder_only(model) != decoder_only(target):
        kinds = "a decoder-only model", "a model with an encoder"
        got, expected = kinds if decoder_only(model) else kinds[::-1]
        raise ValueError(f"drafter: got {got}, expected {expected}, like the target")
    reads = model.config.encoder_dim
    if reads is not None and reads != target.config.emb_dim:
        expected = f"the target's width, {target.config.emb_dim}"
        raise ValueError(f"drafter: got a model that reads encoder outputs of width {reads}, expected {expected}")
    trained_on = model.encoder_fingerprint if reads is not None else None
    if trained_on is not None and not target.has(trained_on):
        raise ValueError(
            f"drafter: got a model that was trained on another target's encoder output, expected one trained on "
            f"{target.name or 'the target'}'s"
        )
    ours, theirs = target.vocabulary, model.vocabulary
    if ours is not None and theirs is not None and ours is not theirs and ours.fingerprint() != theirs.fingerprint():
        raise ValueError(
            f"drafter: got a vocabulary of {theirs.size} pieces that differs from the target's "
            f"({ours.size} pieces), expected the same pieces with the same ids"
        )
    if model.start_token != target.start_token:
        raise ValueError(f"drafter: got start token {model.start_token}, expected the target's {target.start_token}")
    here, there = (one.network.rules and one.network.rules.mesh for one in (target, model))
    if here != there:
        describe = lambda mesh: "none" if mesh is None else "x".join(str(size) for size in mesh.devices.shape)
        raise ValueError(f"drafter: got a model on the mesh {describe(there)}, expected the target's, {describe(here)}")
    listed, width = getattr(drafter, "shortlist", None), target.config.vocab_size
    if listed is not None and int(listed.ids[0]) >= width:
        raise ValueError(f"drafter: got a shortlist without any id below {width}, the target's number of ids")


def check_policy(gamma, drafter) -> None:
    """Refuses a policy of γ that reads laws with a drafter that has none: its tokens are copied, counted or blind."""
    if isinstance(gamma, Policy) and gamma.reads_law and not getattr(drafter, "tells_law", False):
        raise UnsupportedCombination(
            f"gamma: got {type(gamma).__name__}, which reads the drafter's laws, with {type(drafter).__name__}, which "
            "tells none, expected an integer or a policy that reads none (Heuristic, Renewal)"
        )


def _check_table(target: LanguageModel, table: NGramTable) -> None:
    ours, width = target.vocabulary, target.config.vocab_size
    if not table.matches(ours):
        raise ValueError(
            f"drafter: got a table of {table.vocab_size} ids of another vocabulary, expected that of the target "
            f"({ours.size} pieces)"
        )
    if table.vocab_size > width:
        raise ValueError(f"drafter: got a table of {table.vocab_size} ids, expected at most the target's {width}")
    if table.start_token != target.start_token:
        raise ValueError(f"drafter: got start token {table.start_token}, expected the target's {target.start_token}")
