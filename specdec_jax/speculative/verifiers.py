"""Verifiers: pure functions that decide how many drafted tokens are accepted, and what follows.

p is the target's distribution (`target`), q the drafter's (`draft`), and there are γ = G drafted
positions. `Verifier.verify` describes the arguments. To verify "exactly" means that the output
distribution is exactly the target's. Sections are those of Leviathan et al. 2023.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from specdec_jax.backends.axes import PerRow
from specdec_jax.models import arguments
from specdec_jax.speculative.distributions import Categorical, PointMass, argmax
from specdec_jax.speculative.randomness import draw
from specdec_jax.speculative.verifier import (
    BaseVerifier,
    Drafted,
    Randomness,
    Settings,
    Verification,
    Verifier,
)


def verify_greedy(
    target_tokens: Int[Array, "B T"], draft_tokens: Int[Array, "B T-1"], num_drafted: PerRow
) -> Verification:
    """Verifies at temperature 0: a drafted token is accepted iff it is the target's argmax (2.2).

    Args:
      target_tokens: the target's argmax at each of T = G + 1 positions.
      num_drafted: number of drafted tokens of each row, at most G.
    """
    return _take_leading(target_tokens[:, :-1] == draft_tokens, num_drafted, target_tokens)


def verify_greedy_leniently(
    logits: Float[Array, "B T V"],
    draft_tokens: Drafted,
    num_drafted: PerRow,
    accept: Float[Array, "B T-1"],
    settings: Settings,
) -> Verification:
    """Verifies at temperature 0 with lenience l: x is accepted iff p(x) ≥ l · max p.

    p is the distribution at temperature 1, before it is made one-hot. (The paper prints ≤, which
    would accept the improbable.) Every token of the output then has at least l times the
    probability of the most probable one after the same prefix. l = 1 is greedy decoding.
    """
    lenience = settings["lenience"]
    best = jnp.max(logits[:, :-1], axis=-1)
    drafted = jnp.take_along_axis(logits[:, :-1], draft_tokens[..., None], axis=-1)[..., 0]
    near = (drafted >= best + jnp.log(lenience)[:, None]) & (lenience < 1)[:, None]
    tokens = argmax(logits)
    return _take_leading(near | (tokens[:, :-1] == draft_tokens), num_drafted, tokens)


def verify_tokens(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Any = None,
) -> Verification:
    """Verifies token by token (Algorithm 1, section 2.3), exactly.

    Drafted token x_i is accepted while u_i < p_i(x_i) / q_i(x_i); the inequality is strict, so that
    a token with p = 0 is never accepted. After the first rejection the next token is drawn from
    norm(max(0, p − q)); if all tokens are accepted, from p at the next position.
    """
    target_probs = leading_distribution(target).prob(draft_tokens)
    accepted = draws.accept * draft.prob(draft_tokens) < target_probs
    accepted = count_leading(accepted, num_drafted)
    return correct(target, draft, accepted, num_drafted, draws.final)


def verify_leniently(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Settings,
) -> Verification:
    """Verifies with lenience l (section A.5): x is accepted while u < p(x) / (l · q(x)).

    All else is as in `verify_tokens`, and l = 1 is `verify_tokens`. After any prefix no token x has
    a probability of more than p(x) / l.
    """
    scaled = draws.accept * settings["lenience"][:, None] * draft.prob(draft_tokens)
    accepted = scaled < leading_distribution(target).prob(draft_tokens)
    num_accepted = count_leading(accepted, num_drafted)
    return correct(target, draft, num_accepted, num_drafted, draws.final)


def verify_blocks(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Any = None,
) -> Verification:
    """Verifies a draft as a block, exactly (Sun et al. 2024, arXiv 2403.10444).

    On average at least as many tokens are accepted as with `verify_tokens`. With n drafted tokens,
    π_0 = 1 and π_i = min(1, π_{i−1} · p_i(x_i) / q_i(x_i)). For i < n, S_i = Σ_x max(π_i ·
    p_{i+1}(x) − q_{i+1}(x), 0) and h_i = S_i / (S_i + 1 − π_i); h_n = π_n. τ is the *largest* i
    with u_i < h_i. The next token is drawn from norm(max(π_τ · p − q, 0)), or from p where τ = n.
    """
    gamma = draft_tokens.shape[1]
    if not gamma:
        return correct(target, draft, num_drafted, num_drafted, draws.final)
    # A draft ends where p has NaN. Later positions decide about earlier tokens here, and tokens
    # that plain decoding would fail after must not become rarer.
    failed = ~jnp.isfinite(target.log_normalizer)
    ends = jnp.min(jnp.where(failed, jnp.arange(gamma + 1), gamma), axis=1)
    num_drafted = jnp.minimum(num_drafted, ends.astype(num_drafted.dtype))
    target_probs = leading_distribution(target).prob(draft_tokens)
    draft_probs = draft.prob(draft_tokens)
    possible = (target_probs > 0).astype(target_probs.dtype)  # p(x) = 0 is never accepted
    ratios = jnp.where(draft_probs == 0, possible, target_probs / draft_probs)
    # Past the draft anything may lie, NaN too.
    ratios = jnp.where(jnp.arange(gamma) < num_drafted[:, None], ratios, 1)
    weight, weights = jnp.ones_like(ratios[:, 0]), []
    for i in range(gamma):
        weight = jnp.minimum(1, weight * ratios[:, i])
        weights.append(weight)
    pi = jnp.stack(weights, axis=1)  # π_1 … π_γ

    excess = _sum_excess(target, draft, draft_tokens, pi[:, :-1])  # S_1 … S_{γ−1}
    total = excess + 1 - pi[:, :-1]
    accept_probs = jnp.where(total == 0, 1, excess / jnp.where(total == 0, 1, total))
    accept_probs, index = jnp.pad(accept_probs, ((0, 0), (0, 1))), jnp.arange(1, gamma + 1)
    accept_probs = jnp.where(index == num_drafted[:, None], pi, accept_probs)
    accepted = (draws.accept < accept_probs) & (index <= num_drafted[:, None])
    num_accepted = jnp.max(jnp.where(accepted, index, 0), axis=1).astype(jnp.int32)
    pi = jnp.pad(pi, ((0, 0), (1, 0)), constant_values=1)
    scale = jnp.take_along_axis(pi, num_accepted[:, None], axis=1)
    return correct(target, draft, num_accepted, num_drafted, draws.final, scale)


def verify_by_rejection(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Any = None,
) -> Verification:
    """Verifies by rejection sampling with a constant (section A.2), exactly; for comparison.

    x_i is accepted while u_i < p_i(x_i) / (M_i · q_i(x_i)), where M_i = max_x p_i(x) / q_i(x).
    After a rejection the next token is drawn from p itself. Fewer tokens are accepted than with
    `verify_tokens`.
    """
    gamma = draft_tokens.shape[1]
    if not gamma:
        return correct(target, draft, num_drafted, num_drafted, draws.final)
    if isinstance(draft, PointMass):
        draft = draft.dist()
    here = leading_distribution(target)
    log_q = draft.logits - draft.log_normalizer[..., None]
    ratio = log_q - (here.logits - here.log_normalizer[..., None])
    inverse = jnp.exp(jnp.min(jnp.where(here.logits > -jnp.inf, ratio, jnp.inf), axis=-1))  # 1 / M
    accepted = draws.accept * draft.prob(draft_tokens) < here.prob(draft_tokens) * inverse
    num_accepted = count_leading(accepted, num_drafted)
    return Verification(
        num_accepted, draw(target.row(num_accepted), take_at(draws.final, num_accepted))
    )


def verify_coupled(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Any = None,
) -> Verification:
    """Verifies by Gumbel coupling, exactly (Daliri et al. 2024, arXiv 2408.07978).

    The token of each position is argmax(log p + g) with noise g that depends on the key and the
    absolute position alone; a drafted token is accepted iff it is that token. So the output is,
    token for token, that of plain sampling with the same noise, whatever the drafter and γ. The
    draft of a model that takes argmax(log q + g) is accepted with probability at least (1 − D) / (1
    + D) at each position, where D is the total variation between p and q.
    """
    return verify_greedy(argmax(target.logits + draws.noise), draft_tokens, num_drafted)


def verify_typical(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Settings,
) -> Verification:
    """Verifies by typical acceptance (Medusa, Cai et al. 2024, arXiv 2401.10774); lossy.

    It ignores q. x_i is accepted while p_i(x_i) > min(ε, δ · exp(−H(p_i))). The token after the
    last that is accepted is drawn from p. So the last token of each iteration is the target's own,
    and every other one has more than that threshold of probability under the target.
    """
    here = leading_distribution(target)
    num_accepted = count_leading(
        here.prob(draft_tokens) > typical_threshold(here, settings), num_drafted
    )
    return Verification(
        num_accepted, draw(target.row(num_accepted), take_at(draws.final, num_accepted))
    )


def typical_threshold(target: Categorical, settings: Settings) -> Float[Array, "B N"]:
    """Returns min(ε, δ · exp(−H(p))) at each of N positions."""
    factor = settings["typical_delta"][:, None]
    return jnp.minimum(settings["typical_epsilon"][:, None], factor * jnp.exp(-target.entropy()))


def verify_synthetically(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    num_drafted: PerRow,
    draws: Randomness,
    settings: Settings,
) -> Verification:
    """Accepts each drafted token with probability α, whatever it is; for timing alone.

    The next token is drawn as in `verify_tokens`, so that an iteration takes as long as with that.
    """
    num_accepted = count_leading(draws.accept < settings["synthetic_alpha"][:, None], num_drafted)
    return correct(target, draft, num_accepted, num_drafted, draws.final)


def verify_synthetically_at_zero(
    logits: Float[Array, "B T V"],
    draft_tokens: Drafted,
    num_drafted: PerRow,
    accept: Float[Array, "B T-1"],
    settings: Settings,
) -> Verification:
    """Does what `verify_synthetically` does at temperature 0: the argmax is the next token."""
    return _take_leading(accept < settings["synthetic_alpha"][:, None], num_drafted, argmax(logits))


# What typical acceptance declares, of chains and of trees; the defaults are Medusa's constants.
TYPICAL: dict[str, Any] = dict(
    exact=False,
    needs_draft_probs=False,
    sampled_only=True,
    parameters=(("typical_epsilon", 0.09), ("typical_delta", 0.3)),
)
_KNOWN = (
    Verifier("token", verify_tokens),
    Verifier("block", verify_blocks, has_rate=False),
    Verifier("gumbel", verify_coupled, needs_draft_probs=False, coupled=True),
    Verifier(
        "lenient",
        verify_leniently,
        exact=False,
        softens=True,
        parameters=(("lenience", None),),
        verify_greedily=verify_greedy_leniently,
    ),
    Verifier("typical", verify_typical, **TYPICAL),
    Verifier("rejection", verify_by_rejection),
)
VERIFIERS: dict[str, Verifier] = {verifier.name: verifier for verifier in _KNOWN}
# Names of the verifiers whose output distribution differs from the target's.
LOSSY = tuple(name for name, verifier in VERIFIERS.items() if not verifier.exact)
# Not in the table above, because it is for timing alone: outputs mean nothing.
SYNTHETIC = Verifier(
    "synthetic",
    verify_synthetically,
    exact=False,
    parameters=(("synthetic_alpha", None),),
    verify_greedily=verify_synthetically_at_zero,
)


def find_verifier(given: str | BaseVerifier) -> BaseVerifier:
    """Returns the verifier with the name `given`, or `given` itself if it is a verifier.

    Raises:
      ValueError: there is no verifier of this name.
    """
    if isinstance(given, BaseVerifier):
        return given
    if not isinstance(given, str) or given not in (*VERIFIERS, SYNTHETIC.name):
        expected = f"one of {', '.join(VERIFIERS)}, or a Verifier"
        raise ValueError(f"verifier: got {arguments.quote(given)}, expected {expected}")
    return VERIFIERS.get(given, SYNTHETIC)


def leading_distribution(target: Categorical) -> Categorical:
    """Returns the target's distribution over the drafted positions, without the bonus token's."""
    return Categorical(target.logits[:, :-1], target.log_normalizer[:, :-1])


def take_at(values: Shaped[Array, "B N ..."], index: PerRow) -> Shaped[Array, "B ..."]:
    """Returns the entry at place `index[b]` of each row b of `values`."""
    return jnp.take_along_axis(values, index.reshape(-1, *[1] * (values.ndim - 1)), axis=1)[:, 0]


def pick(values: Shaped[Array, "B N ..."], places: Int[Array, "B J"]) -> Shaped[Array, "B J ..."]:
    """Returns the entries at the places `places[b]` of each row b of `values`."""
    places = places.reshape(*places.shape, *[1] * (values.ndim - 2))
    return jnp.take_along_axis(values, places, axis=1)


def count_leading(accepted: Bool[Array, "B G"], num_drafted: PerRow) -> PerRow:
    """Counts the leading True of each row of `accepted`, at most `num_drafted`."""
    inside = jnp.arange(accepted.shape[1]) < num_drafted[:, None]
    return jnp.sum(jnp.cumprod((accepted & inside).astype(jnp.int32), axis=1), axis=1)


def _take_leading(
    accepted: Bool[Array, "B G"], num_drafted: PerRow, target_tokens: Int[Array, "B G+1"]
) -> Verification:
    num_accepted = count_leading(accepted, num_drafted)
    return Verification(num_accepted, take_at(target_tokens, num_accepted))


def _sum_excess(
    target: Categorical,
    draft: Categorical | PointMass,
    draft_tokens: Drafted,
    scale: Float[Array, "B G-1"],
) -> Float[Array, "B G-1"]:
    """Returns Σ_x max(scale_i · p_{i+1}(x) − q_{i+1}(x), 0) for i = 1 … G − 1."""
    here = Categorical(target.logits[:, 1:-1], target.log_normalizer[:, 1:-1])
    if isinstance(draft, PointMass):
        # scale · p(x) ≤ 1 = q(x) at the drafted id, q = 0 elsewhere.
        return scale * (1 - here.prob(draft_tokens[:, 1:]))
    there = Categorical(draft.logits[:, 1:], draft.log_normalizer[:, 1:])
    return jnp.sum(jnp.maximum(scale[..., None] * here.probs() - there.probs(), 0), axis=-1)


def correct(
    target: Categorical,
    draft: Categorical | PointMass,
    num_accepted: PerRow,
    num_drafted: PerRow,
    final: UInt32[Array, "B T 2"],
    scale: Float[Array, "B 1"] | float = 1.0,
) -> Verification:
    """Draws the next token: from norm(max(scale · p − q, 0)) after a rejection, else from p.

    Args:
      num_accepted: how many drafted tokens are accepted.
      final: random bits, as in `Randomness`.
    """
    weights, gamma = target.row(num_accepted), final.shape[1] - 1
    if gamma:
        rejected = (num_accepted < num_drafted)[:, None]
        draft_probs = draft.row(jnp.minimum(num_accepted, gamma - 1))
        residual = jnp.maximum(weights * scale - draft_probs, 0)
        # p ≡ q up to rounding leaves no residual mass: then p itself is right.
        some = rejected & (jnp.sum(residual, axis=-1, keepdims=True) > 0)
        weights = jnp.where(some, residual, weights)
    return Verification(num_accepted, draw(weights, take_at(final, num_accepted)))
