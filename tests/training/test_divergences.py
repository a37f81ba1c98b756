"""Tests divergences against slow versions, and training with a teacher."""

import dataclasses
import functools

import distill_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from distill_models import SMALL, _optimizer, same
from toy_training import TINY, config_of, random_params

from specdec_jax.checkpoints import loader
from specdec_jax.tokenizers import vocabularies
from specdec_jax.training import batches as training_batches
from specdec_jax.training import losses, run_folder, train

pytestmark = pytest.mark.usefixtures("quick")

models, one_optimizer = distill_models.models, distill_models.one_optimizer


# Divergences.


def dist(logits):
    weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def kl(p, q):
    return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))


SLOW = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jensen_shannon": lambda p, q: (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2,
    "total_variation": lambda p, q: np.sum(np.abs(p - (p + q) / 2)),  # definition 3.2
}


def test_every_divergence_has_a_slow_version():
    assert set(SLOW) == set(losses.DIVERGENCES)


@pytest.mark.parametrize("name", sorted(SLOW))
def test_divergence_and_its_gradient_against_finite_differences(name):
    rng = np.random.default_rng(0)

    def divergence(teacher, student):
        return losses.DIVERGENCES[name](*map(jax.nn.log_softmax, (teacher, student)))

    fast = jax.jit(jax.value_and_grad(divergence, argnums=1))
    for scale in (0.1, 1.0, 5.0):
        teacher, student = rng.normal(0, scale, (2, 9))

        def slow(logits):
            return SLOW[name](dist(teacher), dist(logits))

        value, grad = fast(np.float32(teacher), np.float32(student))
        bumps = 1e-6 * np.eye(9)
        expected = [(slow(student + bump) - slow(student - bump)) / 2e-6 for bump in bumps]
        np.testing.assert_allclose(value, slow(student), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(SLOW))
def test_divergence_of_equal_and_of_disjoint_distributions(name):
    far = np.log(np.array([[1.0, 1e-30], [1e-30, 1.0]], np.float32))
    limit = {
        "forward_kl": 30 * np.log(10),
        "reverse_kl": 30 * np.log(10),
        "jensen_shannon": np.log(2),
    }.get(name, 1.0)
    value, grad = jax.jit(jax.value_and_grad(losses.DIVERGENCES[name], argnums=1))(far[0], far[1])
    assert value == pytest.approx(limit, rel=1e-5) and np.all(np.isfinite(grad))

    def through(same, logits):
        return losses.DIVERGENCES[name](jax.nn.log_softmax(same), jax.nn.log_softmax(logits))

    value, grad = jax.jit(jax.value_and_grad(through, argnums=1))(np.arange(6.0), np.arange(6.0))
    assert abs(value) < 1e-6 and np.max(np.abs(grad)) < 1e-6


def test_total_variation_is_one_minus_the_acceptance_probability():
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
    accepted = sum(
        q[x] * min(1, p[x] / q[x]) for x in range(3)
    )  # a draft x ~ q is accepted with min(1, p/q)
    assert (
        losses.total_variation(jnp.log(p), jnp.log(q))
        == pytest.approx(1 - accepted)
        == pytest.approx(0.4)
    )


def random_batch():
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(2, 64, (2, 3, 6)).astype(np.int32)
    inputs[0, 4:], targets[1, 3:], targets[2, 5:] = -1, -1, -1
    return inputs, targets


@functools.partial(jax.jit, static_argnames="shape")
def forward(params, inputs, targets, shape):
    before = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return shape.module().apply(
        {"params": params}, jnp.maximum(inputs, 0), inputs >= 0, jnp.maximum(before, 0)
    )


def logits_of(params, batch, shape=TINY):
    return np.asarray(forward(params, *batch, shape), np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, weight, temperature", [("total_variation", 1.0, 0.5), ("reverse_kl", 0.3, 2.0)]
)
def test_loss_is_the_sum_over_target_tokens(name, weight, temperature):
    params, teacher, batch = random_params(), random_params(seed=1), random_batch()
    objective = losses.Objective(TINY.module(), 0.0, TINY.module(), weight, name, temperature)
    loss, metrics = jax.jit(losses.loss_fn, static_argnums=2)(params, batch, objective, teacher)
    q, p = dist(logits_of(params, batch)), dist(logits_of(teacher, batch) / temperature)
    expected = sum(
        weight * SLOW[name](p[at], q[at]) - (1 - weight) * np.log(q[at][batch[1][at]])
        for at in zip(*np.nonzero(batch[1] >= 0))
    )
    assert metrics.tokens == 14
    np.testing.assert_allclose([metrics.loss, loss], [expected, expected / 14], rtol=1e-5)
    grads = jax.jit(jax.grad(lambda teacher: losses.loss_fn(params, batch, objective, teacher)[0]))(
        teacher
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(grads))


@pytest.mark.slow
def test_acceptance_and_agreement_are_those_of_the_pair():
    student, teacher = random_params(SMALL), random_params(seed=1)
    rng = np.random.default_rng(3)
    pairs = [
        (rng.integers(2, 64, 5).tolist(), rng.integers(2, 64, n).tolist()) for n in (2, 7, 4, 6, 3)
    ]
    batches = training_batches.BucketedBatches(pairs, (8,), 16)
    objective = losses.Objective(SMALL.module(), 0.1, TINY.module(), 0.5, distill_temperature=0.3)
    metrics, likeness = losses.evaluate(student, batches, objective, teacher)
    batch = np.full((2, 5, 8), -1, np.int32)  # all at once, padded
    for row, pair in enumerate(pairs):
        for side, ids in zip(batch, pair):
            side[row, : len(ids)] = ids
    mine, other = logits_of(student, batch, SMALL), logits_of(teacher, batch)
    accepted, agreeing = 0.0, 0
    for at in zip(*np.nonzero(batch[1] >= 0)):
        accepted += sum(min(p, q) for p, q in zip(dist(mine[at]), dist(other[at])))
        agreeing += int(np.argmax(mine[at]) == np.argmax(other[at]))
    assert metrics.tokens == 22
    np.testing.assert_allclose(likeness.acceptance, accepted, rtol=1e-5)
    assert likeness.agreement == agreeing
    assert losses.evaluate(
        teacher, batches, dataclasses.replace(objective, model=TINY.module()), teacher
    )[1] == (
        pytest.approx(22, rel=1e-5),
        22,
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(divergence="reverse_kl"),
            "divergence: got 'reverse_kl', expected 'forward_kl' without a teacher",
        ),
        (
            dict(distill_temperature=0.5),
            "distill_temperature: got 0.5, expected 1.0 without a teacher",
        ),
        (dict(select="agreement"), "select: got 'agreement', expected 'loss' without a teacher"),
        (
            dict(teacher="x", distill_weight=1.0, divergence="tv"),
            "divergence: got 'tv', expected one of forward_kl, rev",
        ),
        (
            dict(teacher="x", distill_weight=1.0, distill_temperature=0.0),
            "distill_temperature: got 0.0, expected a pos",
        ),
        (
            dict(teacher="x", distill_weight=1.0, select="alpha"),
            "select: got 'alpha', expected one of loss, acceptance",
        ),
        (
            dict(teacher="x", distill_weight=1.0, label_smoothing=0.1),
            "label_smoothing: got 0.1, expected 0 with distill_weight = 1",
        ),
    ],
)
def test_bad_training_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        config_of(".", ".", **settings)


@pytest.mark.parametrize("weight, smoothing", [(1.0, 0.0), (0.5, 0.1)])
def test_label_smoothing_that_is_not_given_is_only_where_it_counts(weight, smoothing):
    settings = dict(teacher="x", distill_weight=weight, label_smoothing=None)
    assert config_of(".", ".", **settings).label_smoothing == smoothing


def test_a_run_begins_with_the_parameters_of_a_model(models, language, tmp_path):
    start = str(models / "drafter")
    config = config_of(language, tmp_path, model=SMALL, initialise_from=start)
    state = train.Run(config, run_folder.Checkpoints(tmp_path)).initial_state()
    expected = loader.load(start, "float32")
    assert same(state.params, expected.params) and int(state.step) == 0
    assert same(state.opt_state, _optimizer(config).init(state.params))
    written = vocabularies.SentencePieceVocabulary.load(tmp_path / "vocabulary.model")
    assert written.fingerprint() == expected.vocabulary.fingerprint()


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(model=TINY),
            "initialise_from: got T5Config.*emb_dim=8, .* expected the shape T5Config.*emb_dim=16",
        ),
        (dict(initialise_from="nowhere"), "nowhere: got no such path"),
        (
            dict(initialise_from="STRANGER", teacher="TARGET", distill_weight=1.0),
            "expected the teacher's tokens",
        ),
    ],
)
def test_a_start_that_does_not_fit(models, language, tmp_path, monkeypatch, settings, message):
    monkeypatch.setattr(losses, "_compute_logits", None)  # nothing is computed before
    known = {"STRANGER": str(models / "stranger"), "TARGET": str(models / "target")}
    settings = {name: known.get(value, value) for name, value in settings.items()}
    given = dict(model=SMALL, initialise_from=str(models / "drafter")) | settings
    with pytest.raises(ValueError, match=message):
        train.fit(config_of(language, tmp_path / "run", **given))


@pytest.mark.parametrize("select, step", [("loss", 2), ("acceptance", 3), ("agreement", 1)])
def test_the_best_is_what_is_selected(tmp_path, select, step):
    saved = run_folder.Checkpoints(tmp_path, select=select)
    params = {"a": np.zeros(2, np.float32)}
    saved.keep_best(1, params, 2.0, acceptance=0.5, agreement=0.7)
    saved.keep_best(2, params, 1.0, acceptance=0.4, agreement=0.6)
    saved.keep_best(3, params, 3.0, acceptance=0.6, agreement=0.5)
    assert not saved.keep_best(4, params, float("nan"), acceptance=0.9, agreement=0.9)
    assert run_folder.Checkpoints(tmp_path, select=select).best.best_step() == step


def test_the_best_by_another_measure_gives_way(tmp_path):
    params = {"a": np.zeros(2, np.float32)}
    assert run_folder.Checkpoints(tmp_path).keep_best(
        5, params, 1.0
    )  # without a teacher: no acceptance
    assert run_folder.Checkpoints(tmp_path, select="acceptance").keep_best(
        6, params, 2.0, acceptance=0.1, agreement=0.1
    )


def test_the_best_of_a_run_that_never_saved_a_state_goes(tmp_path):
    params = {"a": np.zeros(2, np.float32)}
    run_folder.Checkpoints(tmp_path).keep_best(0, params, 1.0)
    assert run_folder.Checkpoints(tmp_path).best.best_step() == 0
    assert run_folder.Checkpoints(tmp_path, resume=True).best.best_step() is None
