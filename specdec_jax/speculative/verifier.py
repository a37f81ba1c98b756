"""What a verifier is: how many drafted tokens stand, and which token follows them, as an iteration asks it."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int, UInt32

from specdec_jax.models.axes import PerRow
from specdec_jax.speculative.laws import Law

# What a verifier is asked for, per row, by the name of the parameter.
Settings = dict[str, Float[Array, " B"]]
Drafted = Int[Array, "B G"]


class Verification(NamedTuple):
    """Outcome of one iteration.

    Attributes:
      num_accepted: τ, drafted tokens that stand, at most `num_drafted`.
      next_token: the token after them: the correction at a rejection, else the bonus token; −1 where the target's law
        there is not one of numbers.
    """

    num_accepted: PerRow
    next_token: PerRow


class Randomness(NamedTuple):
    """The randomness of one iteration.

    Attributes:
      accept: uniforms in [0, 1).
      final: random words, the n-th two for the token that follows n accepted ones (residual or bonus).
      noise: standard Gumbel noise of the absolute positions, shared with the drafter; None but for
        `verify_coupled`.
    """

    accept: Float[Array, "B G"]
    final: UInt32[Array, "B G+1 2"]
    noise: Float[Array, "B G+1 V"] | None = None


# What the draft's law and the settings are, or None, depends on what the verifier declares.
Judge = Callable[[Law, Any, Drafted, PerRow, Randomness, Any], Verification]
JudgeGreedy = Callable[[Float[Array, "B G+1 V"], Drafted, PerRow, Float[Array, "B G"], Any], Verification]


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A rule that decides which drafted tokens stand. Static: a part of what is compiled.

    Attributes:
      name: what messages and records call it.
      judge: the rule above temperature 0, a pure function `(target, draft, draft_tokens, num_drafted, randomness,
        settings) -> Verification`, where p is the target's law and q the drafter's:

          target: `Law` over `[B, G + 1, V]`.
          draft: `Law` over `[B, G, V]` from which the tokens were really drawn, `PointMass` where they were not drawn,
            None unless it `reads_draft_law`.
          draft_tokens: a row examines the first `num_drafted` of them; the rest may be anything.
          settings: of its `parameters`, None without any.
      exact: the output law is the target's.
      reads_draft_law: q enters the rule.
      coupled: drafter and target share the noise of absolute positions (`Randomness.noise`).
      has_rate: accepted over examined tokens is an acceptance rate; not where a draft is judged as a whole.
      softens: at temperature 0 too it may let tokens stand that are not the most probable.
      sampled_only: it means nothing at temperature 0.
      judge_greedy: the rule at temperature 0, `(logits, draft_tokens, num_drafted, accept,
        settings) -> Verification`, for processed logits and uniforms `accept`; None: a token stands
        iff it is the target's argmax.
      parameters: names of what can be asked of it, with their defaults; None must be given.
    """

    name: str
    judge: Judge
    exact: bool = True
    reads_draft_law: bool = True
    coupled: bool = False
    has_rate: bool = True
    softens: bool = False
    sampled_only: bool = False
    judge_greedy: JudgeGreedy | None = None
    parameters: tuple[tuple[str, float | None], ...] = ()
