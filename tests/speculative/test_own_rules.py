"""Verifiers, drafters and policies of a user's own: parameters and error messages."""

import dataclasses
from typing import Any, ClassVar

import flax.struct
import jax.numpy as jnp
import numpy as np
import pytest
from own_parts import MIRRORED
from toy_models import HashModel, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.drafters.drafting import point_mass
from specdec_jax.drafters.tree_levels import Children, draft_children
from specdec_jax.speculative.distributions import PointMass
from specdec_jax.speculative.drafter import TreeDrafter
from specdec_jax.speculative.policy import number_field
from specdec_jax.speculative.randomness import draw
from specdec_jax.speculative.state import Draft
from specdec_jax.speculative.tree_verifiers import TreeVerifier, walk
from specdec_jax.speculative.trees import POINTS
from specdec_jax.speculative.verifier import Verification
from specdec_jax.speculative.verifiers import (
    VERIFIERS,
    correct,
    count_leading,
    leading_distribution,
    take_at,
)

pytestmark = pytest.mark.usefixtures("quick")

TARGET, DRAFTER = HashModel(12), sd.ModelDrafter(HashModel(12, 1, likeness=0.5))
INPUTS = [[3, 4, 1], [5, 1]]


def decode(**options):
    warm = sd.SamplingConfig(temperature=1.0)
    defaults = dict(drafter=DRAFTER, gamma=3, sampling=warm, max_new_tokens=12, eos_ids=())
    return sd.generate(TARGET, INPUTS, **{**defaults, **options})


# --- Verifiers ---


def verify(target, draft, draft_tokens, num_drafted, randomness, settings):
    """Lets tokens are accepted that have at least `least` of probability."""
    accepted = leading_distribution(target).prob(draft_tokens) >= settings["least"][:, None]
    return correct(
        target, draft, count_leading(accepted, num_drafted), num_drafted, randomness.final
    )


OWN = sd.Verifier("probable", verify, exact=False, parameters=(("least", None),))


def accepted(result) -> list[int]:
    return [row.accepted for row in result.stats.per_row]


def test_a_verifier_of_ones_own_is_given_its_parameters():
    """Per row, and without another program."""
    rows, found = accepted(decode(verifier=OWN.with_parameters(least=0))), []

    def others():
        for least in (2.0, [0, 2], np.float32(2)):
            found.append(accepted(decode(verifier=OWN.with_parameters(least=least))))

    assert compilations(others) == 0
    assert min(rows) > 0 and found == [[0, 0], [rows[0], 0], [0, 0]]


def test_the_package_takes_its_own_parameters_either_way():
    lenient = VERIFIERS["lenient"]
    by_argument = decode(verifier="lenient", lenience=0.3).tokens
    np.testing.assert_array_equal(
        decode(verifier=lenient.with_parameters(lenience=0.3)).tokens, by_argument
    )
    assert lenient.with_parameters(lenience=0.3) == lenient, "one program for all values"


def accept_all(logits, draft_tokens, num_drafted, accept, settings):
    """Accepts every token at temperature 0."""
    best = jnp.argmax(logits, axis=-1)
    return Verification(num_drafted, take_at(best, num_drafted))


@pytest.mark.parametrize("softens", [True, False])
def test_a_rule_for_temperature_0_holds_beside_rows_that_are_sampled(softens):
    own = dataclasses.replace(MIRRORED, exact=False, softens=softens, verify_greedily=accept_all)
    alone = decode(verifier=own, sampling=sd.SamplingConfig(temperature=0.0))
    mixed = decode(verifier=own, sampling=sd.SamplingConfig(temperature=[0.0, 1.0]))
    np.testing.assert_array_equal(mixed.tokens[0], alone.tokens[0])
    assert accepted(alone)[0] == accepted(mixed)[0] == alone.stats.per_row[0].drafted > 0


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: decode(verifier=OWN),
            "least: got none with verifier='probable', expected a number, by Verifier",
        ),
        (
            lambda: OWN.with_parameters(most=1),
            "most: got one for verifier 'probable', expected least",
        ),
        (
            lambda: MIRRORED.with_parameters(most=1),
            "most: got one for verifier 'mirrored', expected none",
        ),
        (
            lambda: OWN.with_parameters(least="a"),
            "least: got 'a', expected a number, or one per input",
        ),
        (
            lambda: decode(verifier=OWN.with_parameters(least=[1, 2, 3])),
            "least: got 3 values, expected one or 2",
        ),
        (
            lambda: decode(verifier=OWN.with_parameters(least=np.inf)),
            "least: got inf, expected a finite number",
        ),
        (
            lambda: decode(verifier=OWN.with_parameters(least=1), drafter=None),
            "verifier: got 'probable' for plain",
        ),
        (
            lambda: decode(verifier=VERIFIERS["lenient"].with_parameters(lenience=2)),
            "lenience: got 2, expected a num",
        ),
        (
            lambda: decode(
                verifier=VERIFIERS["lenient"].with_parameters(lenience=0.5), lenience=0.4
            ),
            "lenience: got 0.4 and 0.5 of the verifier, expected one of them",
        ),
        (lambda: sd.Verifier("a", 3), "Verifier: got 'a', 3, expected a name and a function"),
        (
            lambda: sd.Verifier("a", lambda target, draft: None),
            r"verify: got a function of \(target, draft\), expected a function of \(target, dr",
        ),
        (
            lambda: sd.Verifier("a", verify, verify_greedily=lambda logits: None),
            r"verify_greedily: got a function of \(logits\), expected a function of \(logits",
        ),
        (
            lambda: decode(verifier=OWN, tree=sd.Tree.uniform((2, 1))),
            "verifier: got 'probable' beside a tree",
        ),
        (lambda: decode(gamma=sd.Heuristic), "gamma: got Heuristic, expected an integer or an ins"),
        (lambda: decode(gamma=len), "gamma: got len, expected an integer or an instance of a Pol"),
        (
            lambda: sd.Verifier("a", verify, parameters=("least",)),
            "parameters: got 'least', expected a list of names",
        ),
        (
            lambda: sd.Verifier("a", verify, parameters="least"),
            "parameters: got 'least', expected a list of names",
        ),
        (
            lambda: sd.Verifier("a", verify, parameters=(("b", "c"),)),
            r"parameters: got \('b', 'c'\), expected a list",
        ),
        (
            lambda: decode(verifier=sd.Verifier("a", lambda *_: None)),
            "verifier a: got NoneType from its rule",
        ),
    ],
)
def test_what_is_wrong_with_a_verifier_is_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_parameters_twice_are_a_combination():
    with pytest.raises(UnsupportedCombination):
        decode(verifier=VERIFIERS["lenient"].with_parameters(lenience=0.5), lenience=0.4)


# --- Verifiers of trees ---


def verify_tree(target, draft, kind, random, settings):
    """Does what "point" does."""

    def step(node, children):
        return draw(target.row(node), take_at(random.final, node)), children

    return walk(draft, step)


OWN_TREE = TreeVerifier("own", verify_tree, needs_draft_probs=False)
SHAPE = (0, 0, 1)


def decode_tree(tree=sd.Tree(SHAPE), **options):
    return decode(gamma="auto", tree=tree, **{"verifier": OWN_TREE, **options})


@pytest.mark.slow
def test_a_tree_verifier_of_ones_own_takes_the_place_of_the_trees():
    expected = decode_tree(sd.Tree(SHAPE, "drawn", "point"), verifier="block")
    actual = decode_tree()
    np.testing.assert_array_equal(actual.tokens, expected.tokens)
    assert actual.stats.accepted == expected.stats.accepted > 0
    other = decode_tree(sd.Tree(SHAPE, "drawn", "traversal"), verifier="block")
    assert np.any(actual.tokens != other.tokens), "or any verifier would do"


@pytest.mark.slow
def test_a_tree_verifier_of_ones_own_has_parameters():
    def verify(target, draft, kind, random, settings):
        valid = draft.valid & (settings["most"][:, None] > 0)
        return verify_tree(target, draft._replace(valid=valid), kind, random, settings)

    own = dataclasses.replace(OWN_TREE, verify=verify, parameters=(("most", None),))
    expected = accepted(decode_tree())
    assert accepted(decode_tree(verifier=own.with_parameters(most=[0, 1]))) == [0, expected[1]]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: decode(verifier=OWN_TREE), "verifier: got the tree verifier 'own' without a tree"),
        (
            lambda: decode_tree(sd.Tree(SHAPE, "drawn", "point")),
            "verifier: got 'own' beside a tree with 'point', expected one of them",
        ),
        (
            lambda: decode_tree(
                sd.DynamicTree(2, 2, 4), verifier=TreeVerifier("reads", verify_tree)
            ),
            "verifier: got 'reads', which needs draft probabilities, with a DynamicTree of Model",
        ),
        (
            lambda: decode_tree(
                verifier=TreeVerifier("reads", verify_tree), drafter=sd.PromptLookupDrafter()
            ),
            "verifier: got 'reads', which needs draft probabilities, with a Tree of PromptLookup",
        ),
        (
            lambda: TreeVerifier("a", lambda target, draft: None),
            r"verify: got a function of \(target, draft\), expected a function of \(target, dr",
        ),
        (
            lambda: decode_tree(
                verifier=TreeVerifier("a", lambda *_: None, needs_draft_probs=False)
            ),
            "verifier a: got NoneType from its rule, expected a TreeVerification",
        ),
    ],
)
def test_what_is_wrong_with_a_tree_verifier_is_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- Drafters ---


def repeating(**changes):
    """Makes a drafter that drafts id 3 over and over, with other fields of `Draft` or methods."""

    def draft(self, draft_state, state, num_wanted):
        tokens = jnp.full((len(num_wanted), state.config.gamma), 3, jnp.int32)
        fields = dict(
            tokens=tokens,
            num_drafted=num_wanted,
            dist=point_mass(state, tokens),
            calls=num_wanted * 0,
        )
        return draft_state, Draft(
            **{**fields, **{name: of(num_wanted) for name, of in changes.items() if name in fields}}
        )

    methods = {"init": lambda self, inputs, input_lengths, tokens, slots: (), "draft": draft}
    methods |= {name: value for name, value in changes.items() if name not in Draft._fields}
    return flax.struct.dataclass(type("Own", (sd.Drafter,), methods))()


def test_no_row_drafts_less_than_nothing():
    """As by a drafter that counts what is left of an input, and does not clip the number at 0."""
    target = noisy_copy(tiny_t5(0), 2.0)  # which may skip positions that are not drafted
    plain = sd.generate(target, INPUTS, max_new_tokens=6, eos_ids=())
    fewer = repeating(num_drafted=lambda wanted: wanted * 0 - 1)
    for one in (fewer, sd.HorizontalCascade(fewer, sd.PromptLookupDrafter(), 2)):
        result = sd.generate(target, INPUTS, drafter=one, gamma=3, max_new_tokens=6, eos_ids=())
        np.testing.assert_array_equal(result.tokens, plain.tokens)


def test_no_row_drafts_more_than_is_wanted():
    """Else a row would pass its limit."""
    greedy = sd.generate(TARGET, INPUTS, max_new_tokens=12, eos_ids=())
    fixed = repeating(num_drafted=lambda wanted: wanted + 3)
    result = sd.generate(TARGET, INPUTS, drafter=fixed, gamma=4, max_new_tokens=12, eos_ids=())
    np.testing.assert_array_equal(result.tokens, greedy.tokens)
    assert (
        result.stats.drafted
        == decode(drafter=repeating(), gamma=4, sampling=sd.SamplingConfig()).stats.drafted
    )


@pytest.mark.parametrize(
    "drafter, message",
    [
        (
            repeating(dist=lambda wanted: None),
            "drafter Own: draft gave NoneType as the distribution of its tokens",
        ),
        (
            repeating(num_drafted=lambda wanted: 3),
            r"Own: draft gave num_drafted int32\[\], expected int32\[2\]",
        ),
        (
            repeating(calls=lambda wanted: 0),
            r"Own: draft gave calls int32\[\], expected int32\[2\]",
        ),
        (
            repeating(draft=lambda self, *_: None),
            r"Own: draft returned NoneType, expected \(draft_state, Draft\)",
        ),
        (
            repeating(
                draft=lambda self, before, state, wanted: (
                    1,
                    repeating().draft(before, state, wanted)[1],
                )
            ),
            r"Own: draft returned the state int32\[\], expected what init makes, \(\)",
        ),
        (
            repeating(dist=lambda wanted: PointMass(jnp.full((2, 3), 3), 13)),
            "Own: draft gave a distribution over 13 ids, expected 12, the target's",
        ),
        (repeating(draft=sd.Drafter.draft), "got Own, which does not define draft"),
    ],
)
def test_what_is_wrong_with_a_drafter_is_reported(drafter, message):
    with pytest.raises(ValueError, match=message):
        decode(drafter=drafter)


@pytest.mark.parametrize("wrong", [dict(draft=lambda self, *_: None), dict(calls=lambda n: 0)])
def test_it_is_reported_by_its_own_name_where_it_is_timed_or_traced(wrong):
    with pytest.raises(ValueError, match="drafter Own: draft (returned|gave)"):
        decode(drafter=repeating(**wrong), gamma="auto")
    with pytest.raises(ValueError, match="drafter Own: draft (returned|gave)"):
        sd.trace(TARGET, INPUTS[0], drafter=repeating(**wrong), gamma=3)


@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_that_the_target_lacks_is_reported(verifier, temperature):
    """Its probability would be NaN: the output is the target's, and the drafter named."""
    ids = jnp.array([[12, 3, 3], [3, 12, 3]], jnp.int32)
    drafter = repeating(tokens=lambda wanted: ids, dist=lambda wanted: PointMass(ids, 12))
    options = dict(verifier=verifier, sampling=sd.SamplingConfig(temperature=temperature))
    with pytest.raises(NonFiniteLogitsError, match="drafter Own .*, or an id that the target lack"):
        decode(drafter=drafter, **options)
    found = decode(drafter=drafter, non_finite="report", **options)
    assert found.errors[0].by_drafter and found.errors[0].token == 0
    assert np.isfinite(found.log_probs).all() and found.stats.drafted <= found.lengths[1]
    if temperature == 0:
        np.testing.assert_array_equal(
            found.tokens, decode(drafter=None, gamma=0, sampling=options["sampling"]).tokens
        )


@flax.struct.dataclass
class Boundless(TreeDrafter):
    """Drafts an id at all nodes of its tree, whatever is wanted."""

    token: int = flax.struct.field(pytree_node=False)
    kinds: ClassVar[Any] = POINTS

    def draft_tree(self, draft_state, state, num_wanted, max_depth):
        def children_of(level, carry):
            shape = *level.tokens.shape, max(level.counts)
            return Children(jnp.full(shape, self.token, jnp.int32)), carry

        return draft_state, draft_children(state, num_wanted + 9, max_depth + 9, children_of)[0]


def test_no_row_drafts_more_of_a_tree_than_is_wanted():
    """Else a row would pass its limit."""
    target = tiny_t5(0)  # which repeats itself
    options = dict(max_new_tokens=[2, 7], eos_ids=())
    plain = sd.generate(target, INPUTS, **options)
    token, tree = int(plain.tokens[1, -1]), sd.Tree.chain(4)
    for gamma in ("auto", 2):
        drafter = Boundless(token)
        result = sd.generate(target, INPUTS, drafter=drafter, tree=tree, gamma=gamma, **options)
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        assert result.stats.accepted
        assert max(row.drafted / row.target_calls for row in result.stats.per_row) <= (
            4 if gamma == "auto" else 2
        )


@flax.struct.dataclass
class Branching(TreeDrafter):
    """Drafts the ids 3 and, below it, 12 and 4, of which 12 is none of the target's."""

    second: bool = flax.struct.field(pytree_node=False)
    change: Any = flax.struct.field(pytree_node=False, default=None)
    kinds: ClassVar[Any] = POINTS

    def draft_tree(self, draft_state, state, num_wanted, max_depth):
        def children_of(level, carry):
            ids = [[12, 4], [4, 12]][self.second] if level.depth else [3]
            shape = *level.tokens.shape, max(level.counts)
            ids = jnp.array(ids[: shape[-1]], jnp.int32)
            return Children(jnp.broadcast_to(ids, shape)), carry

        draft = draft_children(state, num_wanted, max_depth, children_of)[0]
        return self.change(draft) if self.change else (draft_state, draft)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda draft: None, r"returned NoneType, expected \(draft_state, TreeDraft\)"),
        (lambda draft: draft, r"returned TreeDraft, expected \(draft_state, TreeDraft\)"),
        (
            lambda draft: (1, draft),
            r"returned the state int32\[\], expected what init_tree makes, \(",
        ),
        (
            lambda draft: ((), draft._replace(tokens=draft.tokens[:, 1:])),
            r"gave tokens int32\[2, 4\], expected int32\[2, 5\]",
        ),
        (
            lambda draft: ((), draft._replace(valid=draft.tokens)),
            r"gave valid int32\[2, 5\], expected bool\[2, 5\]",
        ),
        (
            lambda draft: ((), draft._replace(calls=0)),
            r"gave calls int32\[\], expected int32\[2\]",
        ),
        (
            lambda draft: ((), draft._replace(branches=draft.valid)),
            "gave branches DynamicJaxprTracer, expected Branches",
        ),
        (
            lambda draft: (
                (),
                draft._replace(branches=draft.branches._replace(lines=draft.branches.parents)),
            ),
            r"gave branches.lines int32\[2, 5\], expected int32\[2, 5, 4\]",
        ),
    ],
)
def test_what_is_wrong_with_a_drafter_of_trees_is_reported(change, message):
    drafter, tree = Branching(False, change), sd.Tree((0, 1, 1, 2))
    with pytest.raises(ValueError, match=f"drafter Branching: draft_tree {message}"):
        decode(drafter=drafter, gamma="auto", tree=tree, sampling=sd.SamplingConfig())


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_id_that_the_target_lacks_is_reported_in_a_tree(second, temperature):
    """It is reported where its parent is accepted; the output stays the target's."""
    drafter, tree = Branching(second), sd.Tree((0, 1, 1, 2), verifier="gumbel")
    options = dict(sampling=sd.SamplingConfig(temperature=temperature), max_new_tokens=40)
    plain = decode(drafter=None, gamma=0, verifier="gumbel", **options)
    found = decode(drafter=drafter, gamma="auto", tree=tree, non_finite="report", **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    first = [row.tolist().index(3) if 3 in row[:-3] else None for row in plain.tokens]
    assert [error and error.token for error in found.errors] == [
        place and place + 1 for place in first
    ]


def test_a_policy_that_reads_distributions_gets_them():
    with pytest.raises(
        ValueError,
        match="Own: draft gave no Draft.seen, expected it of a drafter that provides_probs",
    ):
        decode(drafter=repeating(provides_probs=True), gamma=sd.Confidence(3))


# --- Policies ---


@dataclasses.dataclass(frozen=True)
class AfterLast(sd.Policy):
    """Drafts `more` tokens more than were accepted last time; `first` is static."""

    more: Any = number_field(1, 0, 64)
    first: int = 1

    def init(self):
        return jnp.full_like(self.more, self.first)

    def wanted(self, state):
        return state

    def update(self, state, outcome):
        return jnp.minimum(outcome.accepted + self.more, self.maximum)


class Two(sd.Policy):
    """Drafts two tokens; keeps a number that is the same for all rows."""

    def init(self):
        return 2

    def wanted(self, state):
        return state


def drafted(**options) -> list[int]:
    return [row.drafted for row in decode(**options).stats.per_row]


@pytest.mark.slow
def test_a_policy_of_ones_own_works_without_being_registered():
    """Its numbers are traced, one per input; its other fields are static."""
    plain = decode(drafter=None, sampling=sd.SamplingConfig()).tokens
    for policy in (AfterLast(4), Two(4), sd.Policy(3)):
        result = decode(gamma=policy, sampling=sd.SamplingConfig())
        np.testing.assert_array_equal(result.tokens, plain)
    assert drafted(gamma=Two(4)) == drafted(gamma=2) and drafted(gamma=sd.Policy(3)) == drafted(
        gamma=3
    )
    one = drafted(gamma=AfterLast(4))
    found = []
    assert compilations(lambda: found.append(drafted(gamma=AfterLast(4, more=[1, 3])))) == 0
    assert found[0][0] == one[0] and found[0][1] != one[1]
    assert drafted(gamma=AfterLast(4, first=4)) != one


def test_a_policy_of_ones_own_counts_nodes():
    plain = decode(drafter=None, sampling=sd.SamplingConfig()).tokens
    result = decode(gamma=AfterLast(3), tree=sd.Tree.uniform((2, 1)), sampling=sd.SamplingConfig())
    np.testing.assert_array_equal(result.tokens, plain)


@dataclasses.dataclass(frozen=True)
class Fewer(sd.Policy):
    wants: int = -1

    def wanted(self, state):
        return jnp.int32(self.wants)


@pytest.mark.parametrize("wants", [-1, -100, 100])
def test_a_policy_that_wants_less_than_nothing_changes_no_token(wants):
    target = noisy_copy(tiny_t5(0), 2.0)  # which may skip positions that are not drafted
    drafter = sd.ModelDrafter(noisy_copy(target, 0.1, 1))
    options = dict(max_new_tokens=6, eos_ids=())
    plain = sd.generate(target, INPUTS, **options)
    for one in (drafter, sd.HorizontalCascade(sd.PromptLookupDrafter(min_match=0), drafter, 2)):
        result = sd.generate(target, INPUTS, drafter=one, gamma=Fewer(3, wants=wants), **options)
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        assert (result.stats.drafted > 0) == (wants > 0)


@dataclasses.dataclass(frozen=True)
class Dearth(sd.Policy):
    wants: int = -1
    needs_probs = True

    def budget(self, state, seen):
        return jnp.int32(self.wants)


@pytest.mark.parametrize("wants", [-1, 0, 100])
def test_a_budget_of_less_than_nothing_changes_no_token(wants):
    tree = sd.DynamicTree(depth=2, width=2, nodes=4)
    greedy = sd.SamplingConfig()
    result = decode(gamma=Dearth(3, wants=wants), tree=tree, sampling=greedy)
    plain = decode(drafter=None, sampling=greedy)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    assert (result.stats.drafted > 0) == (wants > 0)


@dataclasses.dataclass(frozen=True)
class OneNode(sd.CostAware):
    """Drafts one node, whatever the costs."""

    more: Any = number_field(1, 0, 64)

    def wanted(self, state):
        return jnp.ones_like(self.minimum)


def test_a_policy_made_of_another_one_is_asked_in_a_tree_too():
    result = decode(gamma=OneNode(2), tree=sd.Tree.uniform((2, 1)), sampling=sd.SamplingConfig())
    plain = decode(drafter=None, sampling=sd.SamplingConfig()).tokens
    np.testing.assert_array_equal(result.tokens, plain)
    for row in result.stats.per_row:
        assert row.target_calls - 1 <= row.drafted <= row.target_calls


class Hesitant(sd.Policy):
    """Wants no token once it has seen what the first one was drawn from."""

    needs_probs = True

    def budget(self, state, seen):
        return jnp.zeros(len(seen.prob), jnp.int32)


def test_a_token_that_was_drawn_stays_in_the_draft():
    """Whatever a policy makes of it: to drop some tokens, and others not, would bias the output."""
    assert min(drafted(gamma=Hesitant(3))) > 0


def variant(**methods):
    return type("Own", (Two,), methods)(4)


@flax.struct.dataclass
class Traced(sd.Policy):
    more: Any = 3


@pytest.mark.parametrize(
    "policy, message",
    [
        (
            variant(wanted=lambda self, state: 2.5),
            r"gamma: got float32\[\] from Own.wanted, expected an integer",
        ),
        (
            variant(wanted=lambda self, state: None),
            "gamma: got None from Own.wanted, expected an integer",
        ),
        (
            variant(init=lambda self: jnp.zeros(3)),
            r"gamma: got shape \(3,\) from Own.init, expected one value",
        ),
        (
            variant(update=lambda self, state, outcome: state * 0.5),
            r"gamma: got float32\[2\] from Own.update, expected what init makes, int32\[2\]",
        ),
        (
            variant(update=lambda self, state, outcome: None),
            "gamma: got None from Own.update, expected what init",
        ),
        (AfterLast(4, first=[1]), r"first: got \[1\], expected a hashable value"),
        (Traced(4), "gamma: got Traced, a flax.struct.dataclass, expected a dataclasses.dataclass"),
        (AfterLast(4, more=[1, 2, 3]), "more: got 3 values, expected one or 2"),
    ],
)
def test_what_is_wrong_with_a_policy_is_reported(policy, message):
    with pytest.raises(ValueError, match=message):
        decode(gamma=policy)
