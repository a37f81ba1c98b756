"""Trains a drafting model that reads the target's states, on its own drafts (EAGLE).

As in EAGLE-3's training-time test (Li et al. 2025, arXiv 2503.01840), the model is unrolled: a
token is predicted from the target's states up to the tokens before it, and from the model's own
states at the last 0, 1, 2 … of them, as while drafting.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.backends.tree_positions import Nodes
from specdec_jax.checkpoints import loader
from specdec_jax.drafters.eagle import EagleDrafter
from specdec_jax.files import mirrors
from specdec_jax.files.progress import print_line
from specdec_jax.models import arguments
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.eagle import EagleConfig, StateProjections, init_projections
from specdec_jax.models.family import ModelConfig, check_uses_backend
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import check_model
from specdec_jax.training import corpus, losses, optimizer, train
from specdec_jax.training.batches import Batch
from specdec_jax.training.config import ExamplesConfig, TrainConfig
from specdec_jax.training.losses import Metrics, TeacherAgreement, TrainState
from specdec_jax.training.run_folder import Checkpoints, record_target
from specdec_jax.training.run_vocabulary import RunVocabulary


@document_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTrainConfig(ExamplesConfig):
    """The settings of a run that trains a drafting model to read the target's states.

    Attributes:
      target: model whose states are read: a folder or a bundled name
      drafter: drafting model that the run begins with: a folder or a bundled name
      steps: optimiser steps in all; a run may be resumed with another number
      decay_steps: steps of linear decay to zero at the end (default: half of the steps)
      soft_weight: w in (1 - w) * cross-entropy + w * KL(target || drafter)
      matmul_dtype: dtype to which operands of products are rounded (default: they are not)

    Raises:
      ValueError: a setting outside its range.
    """

    decay_share = 2

    target: str
    drafter: str
    depth: int = make_option(4, "tokens of a draft that are trained; later ones read own states")
    depth_weight: float = make_option(0.8, "weight of a token's loss relative to the one before it")
    steps: int = 1000
    decay_steps: int | None = None
    learning_rate: float = make_option(0.001, "learning rate of Adam, for the projections")
    model_learning_rate: float = make_option(
        0.002,
        "for the drafting model: size of a step relative to the root mean square of the array it"
        " changes; 0: it stays as it is",
    )
    label_smoothing: float = make_option(0.0, "probability that is spread over the vocabulary")
    soft_weight: float = 1.0
    matmul_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.expect("depth", 1 <= self.depth <= 16, "a number from 1 to 16")
        self.expect("depth_weight", 0 < self.depth_weight <= 1, "a number in (0, 1]")
        self.expect("soft_weight", 0 <= self.soft_weight <= 1, "a number in [0, 1]")
        unused = self.soft_weight == 1 and self.label_smoothing > 0
        self.expect("label_smoothing", not unused, "0 with soft_weight = 1")
        finite = 0 <= self.model_learning_rate < float("inf")
        self.expect("model_learning_rate", finite, "at least 0")

    def model_config(self, target: ModelConfig) -> TrainConfig:
        """Returns the settings by which a model of the target's shape would be trained."""
        rounding = dict(dtype="float32", matmul_dtype=self.matmul_dtype, dropout_rate=0.0)
        # Validation begins at step 0, with the drafter as it was.
        begin: dict[str, Any] = dict(initialise_from=self.drafter, vocabulary_size=1)
        return TrainConfig(model=target.replace(**rounding), **begin, **self.shared_settings())


# The loss.


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleObjective(losses.Objective):
    """What is minimised; `model` drafts, and `teacher` is the target.

    Attributes:
      projections: the network of the projections.
      depth, depth_weight: as in `EagleTrainConfig`.
    """

    projections: StateProjections
    depth: int = 1
    depth_weight: float = 1.0


def eagle_loss(
    params: dict,
    batch: Batch,
    objective: EagleObjective,
    target_params: dict,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss, and sums over the tokens of all depths.

    `params` are {"model": …, "projections": …}. Nothing is dropped. The loss at depth i, the i-th
    token of a draft, counts `depth_weight`^(i − 1).
    """
    total, weighted, tokens = Metrics(*[jnp.zeros((), jnp.float32)] * 3), 0.0, 0.0
    for depth, sums in enumerate(_sum_by_depth(params, batch, objective, target_params)):
        weight = objective.depth_weight**depth
        weighted, tokens = weighted + weight * sums[0].loss, tokens + weight * sums[0].tokens
        total = jax.tree.map(jnp.add, total, sums[0])
    loss = weighted / jnp.maximum(tokens, 1)
    return loss, total._replace(loss=loss * total.tokens)


def assess_eagle(
    params: dict, batch: Batch, objective: EagleObjective, target_params: dict
) -> tuple[Metrics, TeacherAgreement]:
    """Returns sums over the tokens of all depths; takes the place of `losses.assess`."""
    sums = _sum_by_depth(params, batch, objective, target_params)
    return jax.tree.map(lambda *values: sum(values), *sums)


def _sum_by_depth(
    params: dict, batch: Batch, objective: EagleObjective, target_params: dict
) -> list[tuple[Metrics, TeacherAgreement]]:
    """Returns metrics and agreement with the target at each depth of a draft.

    A draft may begin at any position, so that of depth i the first i − 1 positions do not count.
    """
    (_, targets), teacher = batch, objective.teacher
    assert teacher is not None
    *inputs, tokens = losses.list_arguments(batch, objective)

    def run_target(method: str, *given: Any) -> Any:
        found = teacher.apply({"params": target_params}, *given, method=method)
        return jax.lax.stop_gradient(found)

    encoded = run_target("encode", *inputs) if inputs else None
    more = (True, encoded) if inputs else ()
    states = run_target("states", *inputs, tokens, *more)
    soft = run_target("head", states)
    # A decoder-only model has inputs without a token.
    fed, mask = inputs or (tokens[:, :0], tokens[:, :0] >= 0)
    found, offsets = [], jnp.arange(targets.shape[1])
    for depth, own in enumerate(_unroll(params, fed, mask, tokens, encoded, states, objective)):
        logits = objective.model.apply({"params": params["model"]}, own, method="head")
        there = jnp.where(offsets >= depth, targets, -1)
        metrics = losses.sum_metrics(logits, soft, there, objective)
        found.append((metrics, losses.sum_agreement(logits, soft, there)))
    return found


def _unroll(
    params: dict,
    inputs: Array,
    mask: Array,
    tokens: Array,
    encoded: Float[Array, "B L E"] | None,
    states: Float[Array, "B T D"],
    objective: EagleObjective,
) -> list[Float[Array, "B T d"]]:
    """Returns the model's states at all positions, with 0, 1, 2 … own states at the last ones.

    All of them lie in one cache, as nodes of trees: the node of depth i at position t continues
    that of depth i − 1 at position t − 1, after which the draft began.
    """
    model, variables = objective.model, {"params": params["model"]}
    (batch, length), depths = tokens.shape, objective.depth
    own_encoded = None if model.config.encoder_dim is None else encoded
    run = functools.partial(model.apply, variables)
    cache = run(inputs, mask, length, encoded=own_encoded, method="prefill")
    cache = run(cache, length * depths, length, method="node_cache")
    embedded = run(tokens, method="embed")
    project = functools.partial(objective.projections.apply, {"params": params["projections"]})
    before, found, places = states, [], jnp.arange(length, dtype=jnp.int32)
    for depth in range(depths):
        shifted = jnp.pad(before[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the state before each token
        method = "project_own" if depth else "project_target"
        x = embedded + project(shifted, method=method)
        # By position: slots of the committed tokens, then of those that the draft has.
        drafted = places - (places[:, None] - depth)
        paths = jnp.maximum(drafted, 0) * length + places
        starts = jnp.full(batch, depth * length, jnp.int32)
        # Alike in all rows, so that the gradient of the position bias is not a sum over the batch's
        # scores, for which a GPU takes longer than for all else.
        nodes = Nodes(starts, places[None], paths[None])
        before, cache = run(x, None, cache, None, None, nodes, method="decode_embedded")
        found.append(before)
    return found


# The run.


class EagleRun(train.Run):
    """What a run needs besides its state, which has the drafting model and the projections."""

    loss = staticmethod(eagle_loss)
    assess = staticmethod(assess_eagle)

    def __init__(
        self,
        settings: EagleTrainConfig,
        target: LanguageModel,
        drafter: LanguageModel,
        saved: Checkpoints,
    ):
        config = settings.model_config(train.check_target(target.config))
        for name, shape in (("target", target.config), ("drafter", drafter.config)):
            train.check_lengths(config, name, shape)
        check_uses_backend(drafter.config, "a drafter that reads the target's states")
        ids = RunVocabulary.from_model(target, "target")
        self.settings, self.config, self.saved = settings, config, saved
        self.target, self.drafter = target, drafter
        network = train.set_dtype(config, config.model)
        rounding = dict(dtype=network.dtype, matmul_dtype=network.matmul_dtype, dropout_rate=0.0)
        model = drafter.config.replace(**rounding)
        self.shape = EagleConfig(network.emb_dim, model.emb_dim, model.dtype, model.matmul_dtype)
        self.objective: Any = EagleObjective(
            model.module(),
            settings.label_smoothing,
            teacher=network.module(),
            distill_weight=settings.soft_weight,
            start_token=train.choose_start(config, ids),
            projections=StateProjections(self.shape),
            depth=settings.depth,
            depth_weight=settings.depth_weight,
        )
        self.optimizer = make_optimizer(config, settings.model_learning_rate)
        self.teacher_params = target.params
        self.read(ids)

    @staticmethod
    def fixed(settings: dict) -> dict:
        return {"model_learning_rate": settings["model_learning_rate"] > 0}

    def init(self, key: jax.Array) -> TrainState:
        model = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), self.drafter.params)
        params = {"model": model, "projections": init_projections(self.shape)}
        return TrainState.begin(params, self.optimizer)

    def begin(self) -> TrainState:
        return self.init(jax.random.key(self.config.seed))

    def export(self) -> None:
        """Writes the drafter that agreed best with the target on the validation files."""
        path, drafter = self.config.output_dir, self.drafter
        params = self.saved.restore_best(train.make_abstract_state(self.init))
        model = LanguageModel(
            drafter.config,
            params["model"],
            drafter.vocabulary,
            start_token=drafter.start_token,
            eos_ids=drafter.eos_ids,
            name=drafter.name,
            encoder_fingerprint=drafter.encoder_fingerprint,
            generation_config=drafter.generation_config,
        )
        eagle = EagleDrafter(model, self.target, params["projections"])
        eagle.save(mirrors.find_folder(path) / "eagle", dtype="bfloat16")
        print_line(f"wrote {mirrors.name_inside(path, 'eagle')}")


def make_optimizer(config: TrainConfig, model_rate: float) -> optax.GradientTransformation:
    """Returns Adam for the projections, and the optimiser of models for the drafting model.

    The projections begin at 0, so that no step can be relative to their size.
    """
    adam = optax.adam(functools.partial(optimizer.learning_rate, config), b2=0.98)
    model = optax.set_to_zero()
    if model_rate:
        model = optimizer.make_optimizer(dataclasses.replace(config, learning_rate=model_rate))
    optimizers = {"projections": optax.chain(optax.clip_by_global_norm(1.0), adam), "model": model}
    return optax.partition(optimizers, {name: name for name in optimizers})


@isolated
def fit(settings: EagleTrainConfig, on_start: Callable[[], object] = lambda: None) -> dict:
    """Trains a drafter and writes it, or resumes, as `train.fit` does, with its result and errors.

    The folder `output_dir/eagle` is what `EagleDrafter.load` takes.
    """
    arguments.check_kind("settings", settings, EagleTrainConfig, "an EagleTrainConfig")
    train.check_files(settings, corpus.ANY_FILES)
    target = loader.load(settings.target, settings.dtype, quantize="none")
    drafter = loader.load(settings.drafter, "float32", quantize="none")
    check_model(target, drafter)
    RunVocabulary.from_model(target, "target")  # rejected before there is a folder

    def make_run(saved: Checkpoints) -> EagleRun:
        for name, model in (("target", target), ("drafter", drafter)):
            path = mirrors.find_folder(settings.output_dir) / f"{name}_fingerprint"
            record_target(path, name, model, saved.step)
        return EagleRun(settings, target, drafter, saved)

    return train.run_to_end(settings, EagleRun.fixed, make_run, on_start, "agreement").params
