"""Learning while decoding: what is learnt from, when, exactness, and what a kill leaves."""

import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distribution_samples import g_test
from tiers import parametrize
from toy_models import HashModel, Words, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding import under_jit
from specdec_jax.decoding.results import Stats
from specdec_jax.drafters.drafting import draft_without_calls, point_mass
from specdec_jax.files import reading
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.training import online

pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow
V, LIMIT = 24, 8
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, V, length).tolist() for length in RNG.integers(2, 9, 72)]
GREEDY = dict(gamma=2, batch_size=4, max_new_tokens=LIMIT)
SHAPE = sd.T5Config(V, 16, 2, 8, 1, 1, 32)
SMALL = online._Shape(4, 32, 32)


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0, vocab=V)


@pytest.fixture(scope="module")
def drafter(target):
    return sd.ModelDrafter(noisy_copy(target, 0.4))


def finished(tokens, calls=2, reason="eos", drafted=2):
    stats = Stats(calls, drafted, drafted, 0, np.zeros(1), np.zeros(1), None, None)
    return types.SimpleNamespace(tokens=list(tokens), finish_reason=reason, stats=stats)


def feed(learner, start, stop):
    """Lets a learner see and learn from made-up outputs with numbers from `start` to `stop`."""
    for number in range(start, stop):
        rng = np.random.default_rng(number)
        output = finished(rng.integers(2, V, 6).tolist() + [1])
        learner.saw(rng.integers(2, V, 5), np.zeros(1, np.int32), output)
        learner.learn()
    return learner


def make(target, drafter, **options):
    return sd.OnlineDistillation(target, drafter, **{"share_of_time": 1.0, **options})


def same(trees):
    one, other = map(jax.tree.leaves, trees)
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


class Spy:
    """A learner that learns nothing and notes what it is told."""

    def __init__(self, drafter):
        self.drafter, self.seen, self.kept = drafter, [], []

    def saw(self, inputs, prefix, output):
        self.seen.append((inputs.tolist(), prefix.tolist(), output))
        # An output that its receiver has not kept would be an open row.
        assert any(output is one for one in self.kept)

    def learn(self):
        pass


@parametrize("refill", [True, False], first=1)
def test_a_learner_sees_whole_outputs_after_they_are_kept(refill):
    words = Words()
    target = HashModel(12, 0, vocabulary=words)
    spy = Spy(sd.ModelDrafter(HashModel(12, 1, likeness=0.5, vocabulary=words)))
    inputs = [[2, 3, 4 + number] for number in range(8)]
    for _, rows in sd.decode_stream(
        target, inputs, gamma=2, batch_size=2, max_new_tokens=6, refill=refill, learner=spy
    ):
        spy.kept += rows
    assert sorted(ids for ids, _, _ in spy.seen) == inputs
    for _, prefix, output in spy.seen:
        assert prefix == [0]
        assert output.tokens[-1] == 1 if output.finish_reason == "eos" else len(output.tokens) == 6


def test_outputs_stay_equal_and_nothing_compiles_for_new_weights(target, drafter):
    """Every swap of weights finds the compiled programs."""
    plain = dict(sd.decode_stream(target, INPUTS, drafter=drafter, **GREEDY))
    learner, drafters, found = make(target, drafter, learning_rate=0.1), set(), {}

    def decode():
        for number, rows in sd.decode_stream(target, INPUTS, learner=learner, **GREEDY):
            found[number] = rows
            drafters.add(id(learner.drafter))

    decode()
    assert compilations(decode) == 0
    assert len(drafters) > 4 and learner.updates > 8
    assert not same([learner.drafter, drafter])
    assert {n: rows[0].tokens for n, rows in found.items()} == {
        n: rows[0].tokens for n, rows in plain.items()
    }


KINDS = {
    "int8": dict(quantize="int8"),
    "a tied head in int8": dict(quantize="int8", logits_via_embedding=True),
    "a shortlist in int8": dict(shortlist=12, int8=True),
    "bfloat16": dict(dtype="bfloat16"),
}


@slow
@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_are_rounded_and_laid_out_like_the_loaded_ones(target, kind):
    options = dict(KINDS[kind])
    ways = {name: options.pop(name) for name in ("shortlist", "int8") if name in options}
    quantize = options.pop("quantize", None)
    config = SHAPE.replace(**{"dtype": "float32", **options})
    first = sd.ModelDrafter(sd.LanguageModel.random(config, 3, quantize=quantize), **ways)
    learner = make(target, first)
    before = learner.drafter
    assert same([before, first])
    feed(learner, 0, 40)
    after = learner.drafter
    assert learner.updates and not same([before, after])
    for one in (before, after):
        assert jax.tree.structure(one) == jax.tree.structure(first)
        types = (list(map(jax.typeof, jax.tree.leaves(drafter))) for drafter in (one, first))
        assert next(types) == next(types)


@pytest.mark.slow
def test_a_restored_learner_goes_on_as_if_it_had_not_been_killed(target, drafter, tmp_path):
    """The optimiser's state is restored, so the next update is the same."""
    learner = feed(make(target, drafter), 0, 40)
    learner.save(tmp_path / "learned")
    restored = make(target, drafter)
    restored.restore(tmp_path / "learned")
    assert same([restored.drafter, learner.drafter])
    assert (restored.updates, restored.outputs) == (learner.updates, learner.outputs)
    restored._compiled = set(learner._compiled)  # the same outputs make its batches then
    feed(learner, 40, 48), feed(restored, 40, 48)
    assert restored.updates == learner.updates == 6
    assert same([restored.drafter, learner.drafter])


@pytest.mark.slow
def test_a_learner_larger_than_other_files_is_restored(tmp_path):
    target = tiny_t5(0, vocab=V, emb_dim=128, mlp_dim=512)
    drafter, path = sd.ModelDrafter(noisy_copy(target, 0.4)), tmp_path / "learned"
    feed(make(target, drafter), 0, 40).save(path)
    assert path.stat().st_size > reading.MOST_BYTES
    restored = make(target, drafter)
    restored.restore(path)
    assert restored.updates


_FLIPS = (8, 1), (10, 8), (10, 99)  # encrypted, compressed though it is not, of an unknown kind


def test_a_damaged_or_foreign_file_is_rejected_in_one_line(target, drafter, tmp_path):
    path = tmp_path / "learned"
    with pytest.raises(ValueError, match="learned: got no such file, expected one"):
        make(target, drafter).restore(path)
    make(target, drafter).save(path)
    assert not path.exists(), "nothing was learnt"
    learner = feed(make(target, drafter), 0, 40)
    for place in (path, tmp_path / "elsewhere"):
        learner.save(place)
        written = place.stat().st_mtime_ns
        learner.save(place)  # nothing was learnt since
        assert place.stat().st_mtime_ns == written
    whole = path.read_bytes()
    entry = whole.index(
        b"PK\x01\x02"
    )  # of the archive's list: flags at 8, kind of compression at 10
    changed = [whole[: entry + at] + bytes([to]) + whole[entry + at + 1 :] for at, to in _FLIPS]
    for content in (b"", b"text", whole[:-200], whole[: len(whole) // 2], *changed):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="learned: got a damaged file .*, expected what a"):
            make(target, drafter).restore(path)
    path.write_bytes(whole)
    other = sd.ModelDrafter(noisy_copy(target, 0.4, seed=1))
    with pytest.raises(ValueError, match="learned: got what a learner of another drafter saved"):
        make(target, other).restore(path)


@slow
def test_it_learns(target, drafter):
    """On outputs of one rule the drafter's share of right tokens rises."""
    learner = make(target, drafter, learning_rate=3e-2)
    for number in range(200):
        start = 2 + number % 8
        output = finished([*range(start, start + 8), 1])
        learner.saw(np.array([start]), np.zeros(1, np.int32), output)
        learner.learn()
    last = learner.agreements[-1]
    assert last.right > 0.9 * last.tokens > 2 * last.right_at_first


def test_the_loss_counts_only_new_tokens_that_the_drafter_has(target, drafter):
    learner = make(target, drafter)
    learner.saw(np.array([5, 6]), np.array([0, 7]), finished([8, 9, V + 3, 1]))
    batch = learner._make_batch(SMALL)
    assert batch.inputs[0, :3].tolist() == [5, 6, -1]
    assert batch.fed[0, :6].tolist() == [0, 7, 8, 9, V - 1, -1]
    assert batch.labels[0, :6].tolist() == [-1, 8, 9, -1, 1, -1]


@slow
def test_the_loss_is_the_mean_cross_entropy_of_the_new_tokens(target, drafter):
    learner = make(target, drafter)
    learner.saw(np.array([5, 6]), np.array([0]), finished([7, 8, 9, 4, 1]))
    batch, params = learner._make_batch(SMALL), learner._state.params
    logits = drafter.model.logits(batch.inputs[:1, :2], batch.fed[:1, :5])
    loss, counts = online.online_loss(params, batch, learner._objective, params)
    labels = batch.labels[0, :5]
    nll = -np.asarray(jax.nn.log_softmax(logits))[0, np.arange(5), labels]
    right = np.sum(np.asarray(logits)[0].argmax(-1) == labels)
    assert counts.right == counts.right_at_first == right and counts.tokens == 5
    np.testing.assert_allclose(loss, nll.mean(), rtol=1e-5)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `tick` moves."""
    now = [0.0]
    monkeypatch.setattr(online.time, "perf_counter", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


def fake_updates(monkeypatch, clock, learner, right, seconds=1.0):
    """Makes updates that take `seconds`; of 100 tokens `right(updates)` are right, 50 at first."""

    def step(state, *_, **__):
        clock(seconds)
        return state, online.Agreement(100, right(learner.updates), 50)

    monkeypatch.setattr(online, "train_step", step)
    monkeypatch.setattr(learner, "_make_drafter", lambda: learner.drafter)


def run(learner, clock, outputs, seconds):
    for number in range(outputs):
        clock(seconds)
        feed(learner, number, number + 1)


def test_it_learns_for_its_share_of_the_time_from_the_beginning_on(
    target, drafter, monkeypatch, clock
):
    learner = make(target, drafter, share_of_time=0.1, expected=400)
    fake_updates(monkeypatch, clock, learner, lambda updates: 50 + updates)
    run(learner, clock, 200, 1.0)
    assert not learner.ended and learner.compile_seconds == 1
    early = learner.updates
    run(learner, clock, 200, 1.0)
    assert early == learner.updates == 39, "one second of 400 was the compilation's"


def test_a_pause_is_no_time_of_decoding(target, drafter, clock):
    learner = make(target, drafter)
    run(learner, clock, 3, 1.0)
    learner.pause()
    clock(100)
    learner.pause()
    run(learner, clock, 3, 1.0)
    assert learner.elapsed == 4, "from the first output to the third, and again"


def test_what_is_learnt_in_a_pause_takes_no_time_of_decoding(target, drafter, monkeypatch, clock):
    learner = make(target, drafter)
    fake_updates(monkeypatch, clock, learner, lambda updates: 50)
    for number in range(40):
        learner.pause()
        learner.learn()
        clock(1.0)
        learner.saw(np.array([5]), np.zeros(1, np.int32), finished([6]))
    assert learner.updates == learner.elapsed == learner.seconds + learner.compile_seconds > 0
    assert learner._decoding == 0, "all other time was a pause"


@pytest.mark.parametrize(
    "right, expected, updates, why",
    [
        (lambda updates: 50, 10**6, 20, "longer than it saves"),
        (lambda updates: 40, 10**6, 20, "became worse"),
        (lambda updates: 53 if updates % 2 else 46, 8 * 40, 20, "no better"),
        (lambda updates: 50 + min(updates, 20), 10**6, 60, "longer than it saves"),
        (lambda updates: 50 + updates // 2, 10**6, 74, ""),
        (lambda updates: 58, 8 * 24, 23, "longer than it saves"),
    ],
    ids=["no gain", "worse", "no better", "as good as it gets", "goes on", "few are left"],
)
def test_it_ends_where_it_does_not_pay(
    target, drafter, monkeypatch, clock, right, expected, updates, why
):
    learner = make(target, drafter, share_of_time=0.5, expected=expected)
    fake_updates(monkeypatch, clock, learner, right, 1.0)
    run(learner, clock, 8 * 40, 1.0)
    assert learner.updates == updates and why in learner.ended
    assert bool(why) == bool(learner.ended)
    if right(0) < 50:
        assert same([learner._state.params, learner._first_params])


def test_nothing_is_compiled_for_a_short_job(target, drafter, monkeypatch, clock):
    learner = make(target, drafter, share_of_time=0.1, expected=49)
    fake_updates(monkeypatch, clock, learner, lambda updates: 60)
    run(learner, clock, 49, 1.0)
    assert (learner.updates, learner.compile_seconds) == (0, 0)
    assert "from 49 outputs: it was too short a time" in learner.summary()
    plain = make(target, drafter)
    plain.saw(np.array([5]), np.zeros(1, np.int32), finished([6], drafted=0))
    assert plain.summary() == "nothing was learnt from 1 outputs: nothing was drafted"


def test_the_summary_says_why_nothing_was_learnt(target, drafter):
    learner = make(target, drafter)
    feed(learner, 0, 3)
    assert learner.summary() == "nothing was learnt from 3 outputs: it begins after 32"
    see(learner, 40, 513, 4)
    expected = "from 43 outputs: fewer than 8 had tokens, and inputs of at most 512 ids"
    assert learner.summary() == f"nothing was learnt {expected}"


def see(learner, count, inputs, outputs, prefix=1):
    """Lets a learner see outputs of one length; returns the shapes of its updates so far."""
    for _ in range(count):
        learner.saw(np.full(inputs, 5), np.zeros(prefix, np.int32), finished([6] * outputs))
        learner.learn()
    for _ in range(count):  # those that wait
        learner.learn()
    return sorted(learner._compiled)


def test_outputs_are_padded_to_a_compiled_shape_if_one_holds_them(
    target, drafter, monkeypatch, clock
):
    learner = make(target, drafter)
    fake_updates(monkeypatch, clock, learner, lambda updates: 50)
    first = online._Shape(2, 256, 64)
    assert see(learner, 32, 130, 64) == [first]
    assert see(learner, 8, 20, 20) == [first] and learner.updates > 3
    assert see(learner, 8, 257, 65) == [online._Shape(1, 512, 128), first]
    updates = learner.updates
    see(learner, 8, 513, 4), see(learner, 8, 4, 0), see(learner, 8, 4, 4, prefix=513)
    assert learner.updates == updates, "too long, empty, or nothing new in the first 512"
    assert online._Shape(1, 512, 512) in see(learner, 8, 500, 700)


WARM = dict(sampling=sd.SamplingConfig(temperature=1.0))
REJECTED = {
    "block above temperature 0": (dict(WARM), "'gumbel' above temperature 0"),
    "a lossy verifier": (dict(verifier="lenient", lenience=0.5), "an exact verifier"),
    "another drafter": (dict(drafter=sd.PromptLookupDrafter()), "it has its own"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_would_depend_on_the_drafter_is_rejected(target, drafter, case):
    options, message = REJECTED[case]
    with pytest.raises(sd.UnsupportedCombination, match=message):
        sd.decode_stream(target, INPUTS, learner=make(target, drafter), gamma=2, **options)
    if "drafter" not in options:
        learner = make(target, drafter)
        with pytest.raises(sd.UnsupportedCombination, match=message):
            sd.generate(target, INPUTS[:2], drafter=learner.drafter, gamma=2, **options)


def test_pairs_and_traced_decoders_know_a_learners_drafter(target, drafter):
    own = make(target, drafter).drafter
    pair = sd.HorizontalCascade(sd.PromptLookupDrafter(), own, 2)
    with pytest.raises(sd.UnsupportedCombination, match="'gumbel' above temperature 0"):
        sd.generate(target, INPUTS[:2], drafter=pair, gamma=2, **WARM)
    with pytest.raises(sd.UnsupportedCombination, match="'gumbel' above temperature 0"):
        under_jit.Decoder(target.config, own, gamma=2, **WARM)


def test_weights_that_are_no_numbers_end_the_learning(target, drafter, monkeypatch, tmp_path):
    learner = make(target, drafter)

    def break_step(state, *_, **__):
        nan = jax.tree.map(lambda leaf: leaf * jnp.nan, state.params)
        return state.replace(params=nan), online.Agreement(1, 1, 1)

    monkeypatch.setattr(online, "train_step", break_step)
    feed(learner, 0, 60)
    learner.learn()
    assert "not finite" in learner.ended and not learner.updates
    assert same((learner.drafter.model.params, drafter.model.params))
    learner.save(tmp_path / "learned")
    restored = make(target, drafter)
    restored.restore(tmp_path / "learned")
    assert restored.ended == learner.ended, "a job that is resumed does not learn either"


def test_only_a_model_drafter_can_learn(target, drafter):
    for other in (sd.PromptLookupDrafter(), sd.EarlyExitDrafter(target, 1), None, "ende/drafter"):
        with pytest.raises(ValueError, match="learner: got .*, expected a ModelDrafter"):
            sd.OnlineDistillation(target, other)
    with pytest.raises(ValueError, match="learner: got learning_rate=0"):
        sd.OnlineDistillation(target, drafter, learning_rate=0)


OTHER_WAYS = {
    "samples": dict(WARM, verifier="gumbel", num_samples=2),
    "a tree": dict(tree=sd.Tree.uniform((2, 1)), gamma="auto"),
    "beams": dict(num_beams=2),
    "prefixes": dict(decoder_prefix=[[3] * (n % 3) for n in range(len(INPUTS))]),
}


@slow
@pytest.mark.parametrize("case", OTHER_WAYS)
def test_other_ways_to_decode_give_what_they_give_without(target, drafter, case):
    options = {**GREEDY, **OTHER_WAYS[case]}
    learner = make(target, drafter, learning_rate=0.1)
    learnt = dict(sd.decode_stream(target, INPUTS, learner=learner, **options))
    plain = dict(sd.decode_stream(target, INPUTS, drafter=drafter, **options))
    assert learner.updates > 4
    for number, rows in plain.items():
        assert [one.tokens for one in learnt[number]] == [one.tokens for one in rows]


@slow
@pytest.mark.parametrize("reads_encoder", [False, True])
def test_drafters_of_other_kinds_learn(target, reads_encoder):
    if reads_encoder:
        config = SHAPE.replace(num_encoder_layers=0, encoder_dim=16)
        model, drafter = target, sd.ModelDrafter(sd.LanguageModel.random(config, 3))
    else:
        config = GPTConfig(V, 16, 2, 1, 32, num_positions=64)
        model = sd.LanguageModel.random(config, 0)
        drafter = sd.ModelDrafter(sd.LanguageModel.random(config, 3))
    learner = make(model, drafter, learning_rate=0.1)
    learnt = dict(sd.decode_stream(model, INPUTS, learner=learner, **GREEDY))
    plain = dict(sd.decode_stream(model, INPUTS, **{**GREEDY, "gamma": 0}))
    assert learner.updates > 4
    gain = np.sum(learner.agreements[-3:], axis=0)
    assert gain[1] > gain[2]
    assert all(learnt[n][0].tokens == plain[n][0].tokens for n in plain)


@flax.struct.dataclass
class Recalling(sd.Drafter):
    """Drafts what `answers [8⁴]` has for an input of four digits, which an earlier call gave."""

    answers: jax.Array
    remembers: bool = flax.struct.field(pytree_node=False, default=True)

    def init(self, inputs, input_lengths, tokens, slots):
        return self.answers[(inputs[:, :4] - 2) @ jnp.array([512, 64, 8, 1])]

    def draft(self, draft_state, state, num_wanted):
        tokens = jnp.broadcast_to(draft_state[:, None], (len(draft_state), state.config.gamma))
        drafted = draft_without_calls(state, tokens, num_wanted, point_mass(state, tokens))
        return draft_state, drafted


@slow
def test_a_second_call_with_one_key_draws_from_the_targets_distribution():
    """What a drafter remembers biases no sample under "gumbel", and would under "block"."""
    target = HashModel(12, 0)
    inputs = np.stack(np.meshgrid(*[np.arange(2, 10)] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    logits = np.asarray(target.logits(inputs, np.zeros((len(inputs), 1), int)))[:, 0]
    probs = np.asarray(jax.nn.softmax(logits.astype(np.float64)))
    order = np.argsort(probs, axis=1)  # a bias towards likely ids shows by rank
    options = dict(key=jax.random.key(5), sampling=WARM["sampling"], gamma=1, max_new_tokens=2)

    def second_call(verifier, remembers):
        first = Recalling(jnp.full(len(inputs), 3), remembers)
        for _ in range(2):
            result = sd.generate(target, inputs, drafter=first, verifier=verifier, **options)
            first = first.replace(answers=jnp.asarray(result.tokens[:, 0]))
        ranks = np.argmax(order == result.tokens[:, :1], axis=1)
        expected = np.take_along_axis(probs, order, axis=1).mean(axis=0)
        return g_test(np.bincount(ranks, minlength=12), expected)

    assert second_call("gumbel", True) > 1e-4
    assert second_call("block", False) < 1e-9
    with pytest.raises(sd.UnsupportedCombination, match="'gumbel' above temperature 0"):
        second_call("block", True)
