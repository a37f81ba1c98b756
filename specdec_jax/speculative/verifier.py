"""The form of verifiers: rules that decide which drafted tokens are accepted, and what follows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specdec_jax.backends.axes import PerRow
from specdec_jax.models import arguments
from specdec_jax.speculative.distributions import Categorical

# Values of a verifier's parameters, one per row, by the parameter's name.
Settings = dict[str, Float[Array, " B"]]
Drafted = Int[Array, "B G"]


class Verification(NamedTuple):
    """The outcome of one iteration.

    Attributes:
      num_accepted: τ, how many drafted tokens are accepted, at most `num_drafted`.
      next_token: the token after them: the correction at a rejection, else the bonus token; −1
        where the target's distribution contains NaN.
    """

    num_accepted: PerRow
    next_token: PerRow


class Randomness(NamedTuple):
    """The randomness of one iteration.

    Attributes:
      accept: uniforms in [0, 1), one per drafted token.
      final: random bits; pair n draws the token that follows n accepted ones (residual or bonus).
      noise: standard Gumbel noise of the absolute positions, shared with the drafter; None unless
        the verifier is `coupled`.
    """

    accept: Float[Array, "B G"]
    final: UInt32[Array, "B G+1 2"]
    noise: Float[Array, "B G+1 V"] | None = None


# The draft's distribution and the settings are `Any`: they may be None, which depends on what the
# verifier declares.
Verify = Callable[[Categorical, Any, Drafted, PerRow, Randomness, Any], Verification]
VerifyGreedily = Callable[
    [Float[Array, "B G+1 V"], Drafted, PerRow, Float[Array, "B G"], Any], Verification
]


_PAIRS = "a list of names and defaults, such as (('least', None),)"


@dataclasses.dataclass(frozen=True)
class BaseVerifier:
    """What verifiers of chains and of trees declare; static, so that another one compiles anew.

    Attributes:
      name: its name in messages and records.
      verify: the rule above temperature 0, a pure function; the subclasses say what it gets.
      exact: whether the output distribution is exactly the target's.
      needs_draft_probs: whether the rule depends on q, the drafter's distribution.
      coupled: whether drafter and target share the noise of absolute positions
        (`Randomness.noise`).
      has_rate: whether accepted over examined tokens is an acceptance rate; False where a draft is
        verified as a whole.
      softens: whether tokens may be accepted at temperature 0 that are not the most probable. Where
        all rows have that temperature, adjusted log-probabilities are 0 if it is False.
      sampled_only: whether the rule is meaningless at temperature 0.
      parameters: names and defaults of its parameters; one whose default is None must be given.
        `generate` has the arguments `lenience`, `typical_epsilon`, `typical_delta` and
        `synthetic_alpha`; any others are given by `with_parameters`.
      given: what `with_parameters` was given; no part of the compiled program.
    """

    name: str
    verify: Callable[..., Any]
    exact: bool = True
    needs_draft_probs: bool = True
    coupled: bool = False
    has_rate: bool = True
    softens: bool = False
    sampled_only: bool = False
    parameters: tuple[tuple[str, float | None], ...] = ()
    given: tuple[tuple[str, Any], ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self):
        if not isinstance(self.name, str) or not callable(self.verify):
            got = f"{arguments.quote(self.name)}, {arguments.quote(self.verify)}"
            raise ValueError(f"{type(self).__name__}: got {got}, expected a name and a function")
        pairs = arguments.check_list("parameters", self.parameters, _PAIRS)
        for pair in pairs:
            named = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)
            if not named or not (pair[1] is None or arguments.is_number(pair[1])):
                raise ValueError(f"parameters: got {arguments.quote(pair)}, expected {_PAIRS}")
        object.__setattr__(self, "parameters", tuple(map(tuple, pairs)))

    @property
    def takes_argmax(self) -> bool:
        """Whether temperature 0 accepts a token iff it is the argmax of the target's logits."""
        return not self.softens

    def with_parameters(self, **values: Any) -> Self:
        """Returns the verifier with values of its parameters, each one number or one per input.

        Other values compile nothing anew. Raises ValueError for another parameter, or no number.
        """
        known = [name for name, _ in self.parameters]
        for name, value in values.items():
            if name not in known:
                expected = ", ".join(known) or "none"
                raise ValueError(f"{name}: got one for verifier {self.name!r}, expected {expected}")
            arguments.check_numbers(name, value, "a number, or one per input")
        return dataclasses.replace(self, given=tuple({**dict(self.given), **values}.items()))


@dataclasses.dataclass(frozen=True)
class Verifier(BaseVerifier):
    """A rule that decides which drafted tokens are accepted.

    Attributes:
      verify: the rule above temperature 0, a pure function `(target, draft, draft_tokens,
        num_drafted, randomness, settings) -> Verification`. Its arguments, with p the target's
        distribution and q the drafter's:

          target: p, a `Categorical` over `[B, G + 1, V]`.
          draft: q, the `Categorical` over `[B, G, V]` from which the tokens were really drawn, or a
            `PointMass` where they were not drawn; None unless the verifier `needs_draft_probs`.
          draft_tokens: `[B, G]`; a row examines the first `num_drafted` of them, the rest may be
            anything.
          settings: values of its `parameters`; None if it has none.
      verify_greedily: the rule at temperature 0, `(logits, draft_tokens, num_drafted, accept,
        settings) -> Verification`, for processed logits and uniforms `accept`; None: a token is
        accepted iff it is the target's argmax.
      The others are those of `BaseVerifier`.
    """

    verify: Verify
    verify_greedily: VerifyGreedily | None = None

    def __post_init__(self):
        super().__post_init__()
        rule = "target, draft, draft_tokens, num_drafted, randomness, settings"
        arguments.check_function("verify", self.verify, rule)
        if self.verify_greedily is not None:
            rule = "logits, draft_tokens, num_drafted, accept, settings"
            arguments.check_function("verify_greedily", self.verify_greedily, rule)

    @property
    def takes_argmax(self) -> bool:
        return super().takes_argmax and self.verify_greedily is None


def check_verification(
    verifier: BaseVerifier, returned: Any, batch: int, kind: Any = Verification
) -> Any:
    """Returns what a verifier's rule returned for `batch` rows, a `kind` of integers.

    Raises ValueError for anything else, while the program is traced.
    """
    if not isinstance(returned, kind):
        got = f"{type(returned).__name__} from its rule"
        raise ValueError(f"verifier {verifier.name}: got {got}, expected a {kind.__name__}")
    for name, value in zip(("num_accepted", "next_token"), returned):
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        if shape != (batch,) or not jnp.issubdtype(dtype, jnp.integer):
            got, expected = f"{name} of shape {shape} and type {dtype}", f"({batch},) and integers"
            raise ValueError(f"verifier {verifier.name}: got {got}, expected {expected}")
    return returned
