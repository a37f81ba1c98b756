"""Trains heads on a target's last state, with the target frozen or trained beside them.

They learn from the target's own outputs (TSV files that `specdec generate` makes), from other text,
or with the target's own distributions as soft targets.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import converter, loader
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.files import mirrors
from specdec_jax.files.progress import print_line
from specdec_jax.files.reading import mismatch_error
from specdec_jax.models import arguments
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.heads import Heads, HeadsConfig, HeadsNetwork, head_weight, init_params
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.models.t5 import T5Config
from specdec_jax.training import corpus, losses, optimizer, train
from specdec_jax.training.batches import Batch
from specdec_jax.training.config import ExamplesConfig, TrainConfig
from specdec_jax.training.losses import Metrics, TrainState
from specdec_jax.training.run_folder import Checkpoints, record_target
from specdec_jax.training.run_vocabulary import RunVocabulary


@document_fields
@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsTrainConfig(ExamplesConfig):
    """The settings of a run that trains heads.

    Attributes:
      target: model on whose states the heads are put: a folder or a bundled name
      share_head: whether logits come from the target's own output layer, not from one of each head
      steps: optimiser steps in all; a run may be resumed with another number
      decay_steps: steps of linear decay to zero at the end (default: half of the steps)
      soft_weight: w in (1 - w) * cross-entropy + w * KL(target || head), with the target's
        distribution after the tokens in between, which a head does not see
      backbone_weight: weight of the target's own cross-entropy beside the heads' loss; above 0 if
        and only if the target is trained
      matmul_dtype: dtype to which operands of products are rounded (default: they are not)

    Raises:
      ValueError: a setting outside its range, or settings that contradict each other.
    """

    decay_share = 2

    target: str
    num_heads: int = make_option(4, "number of heads; each predicts one token more ahead")
    num_blocks: int = make_option(1, "residual blocks in each head")
    share_head: bool = True
    steps: int = 1000
    decay_steps: int | None = None
    learning_rate: float = make_option(0.001, "learning rate of Adam, for the heads")
    label_smoothing: float = make_option(0.0, "probability that is spread over the vocabulary")
    soft_weight: float = 0.0
    backbone_learning_rate: float = make_option(
        0.0, "learning rate of the target, as that of a model's training; 0: the target stays"
    )
    backbone_weight: float = 0.0
    matmul_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.heads_config(T5Config(1, 1, 1, 1, 1, 1, 1))  # which checks it
        self.expect("soft_weight", 0 <= self.soft_weight <= 1, "a number in [0, 1]")
        finite = 0 <= self.backbone_learning_rate < float("inf")
        self.expect("backbone_learning_rate", finite, "at least 0")
        allowed = 0 <= self.backbone_weight < float("inf")
        allowed = allowed and (self.backbone_weight > 0) == self.trains_backbone
        expected = "a number above 0 with a backbone_learning_rate, 0 without"
        self.expect("backbone_weight", allowed, expected)
        # The loss of a target that is trained has its own cross-entropy.
        unused = self.soft_weight == 1 and self.label_smoothing > 0 and not self.trains_backbone
        self.expect("label_smoothing", not unused, "0 with soft_weight = 1")

    @property
    def trains_backbone(self) -> bool:
        """Whether the target is trained too."""
        return self.backbone_learning_rate > 0

    def model_config(self, target: ModelConfig) -> TrainConfig:
        """Returns the settings by which a model of the target's shape would be trained."""
        rounding = dict(dtype="float32", matmul_dtype=self.matmul_dtype, dropout_rate=0.0)
        model = target.replace(**rounding)
        return TrainConfig(model=model, vocabulary_size=1, **self.shared_settings())

    def heads_config(self, target: ModelConfig) -> HeadsConfig:
        """Returns the configuration of the heads on a target of this shape."""
        own = {name: getattr(self, name) for name in ("num_heads", "num_blocks", "share_head")}
        names = ("emb_dim", "vocab_size", "dtype", "matmul_dtype")
        return HeadsConfig(**own, **{name: getattr(target, name) for name in names})


# The loss.


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsObjective(losses.Objective):
    """What is minimised; `distill_weight` is that of the target's own distribution.

    Attributes:
      heads: the network of the heads.
      backbone_weight: as in `HeadsTrainConfig`.
    """

    heads: Heads
    backbone_weight: float = 0.0


def heads_loss(
    params: dict,
    batch: Batch,
    objective: HeadsObjective,
    target_params: dict | None = None,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the mean loss, and sums over the tokens that heads predict.

    The loss is the mean over these tokens, plus `backbone_weight` times the mean over the tokens
    that the target itself predicts. Nothing is dropped.
    """
    sums, own = assess_heads(params, batch, objective, target_params)
    loss = sums.loss / jnp.maximum(sums.tokens, 1)
    if own is not None:
        loss += objective.backbone_weight * own.loss / jnp.maximum(own.tokens, 1)
    return loss, sums._replace(loss=loss * sums.tokens)


def assess_heads(
    params: dict, batch: Batch, objective: HeadsObjective, target_params: dict | None = None
) -> tuple[Metrics, Metrics | None]:
    """Returns the metrics of heads on a batch, and those of a target whose loss counts too.

    The target's state at decoder position t predicts token t + 1; head i predicts token t + 1 + i.
    `params` are {"heads": …}, and {"target": …} if the target is trained; else `target_params` are
    its parameters. It takes the place of `losses.assess`.
    """
    _, targets = batch
    trained = params["target"] if target_params is None else target_params
    target, fed = Network(trained, objective.model), losses.list_arguments(batch, objective)
    states = objective.model.apply({"params": target.params}, *fed, method="states")
    heads = HeadsNetwork(params["heads"], target, objective.heads)
    logits = heads.logits(states.reshape(-1, states.shape[-1]))
    logits = logits.reshape(*targets.shape, -1, target.vocab_size)
    own = target.head(states) if objective.distill_weight or objective.backbone_weight else None
    soft = jax.lax.stop_gradient(own) if objective.distill_weight else None

    total = Metrics(*[jnp.zeros((), jnp.float32)] * 3)
    for head in range(1, objective.heads.config.num_heads + 1):
        known = max(targets.shape[1] - head, 0)  # positions whose token lies inside the batch
        soft_logits = None if soft is None else soft[:, head:]
        ahead = logits[:, :known, head - 1]
        sums = losses.sum_metrics(ahead, soft_logits, targets[:, head:], objective)
        total = jax.tree.map(jnp.add, total, sums)
    counts = bool(objective.backbone_weight)
    return total, losses.sum_metrics(own, None, targets, objective) if counts else None


# The run.


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns Adam, with which Medusa's heads were trained.

    Steps relative to an array's size would never move weights that begin at 0.
    """
    rate = functools.partial(optimizer.learning_rate, config)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))


class HeadsRun(train.Run):
    """What a run needs besides its state; the target is part of the state only if it is trained."""

    loss = staticmethod(heads_loss)
    assess = staticmethod(assess_heads)

    def __init__(self, settings: HeadsTrainConfig, target: LanguageModel, saved: Checkpoints):
        self.shape = train.check_target(target.config)
        config = settings.model_config(self.shape)
        train.check_lengths(config, "target", self.shape)
        ids = RunVocabulary.from_model(target, "target")
        self.settings, self.config, self.saved, self.target = settings, config, saved, target
        network = train.set_dtype(config, config.model)
        self.objective: Any = HeadsObjective(
            network.module(),
            settings.label_smoothing,
            distill_weight=settings.soft_weight,
            start_token=train.choose_start(config, ids),
            heads=Heads(settings.heads_config(network)),
            backbone_weight=settings.backbone_weight,
        )
        self.optimizer = make_optimizer(config)
        self.teacher_params = None if settings.trains_backbone else target.params
        if settings.trains_backbone:
            rate = settings.backbone_learning_rate
            backbone = optimizer.make_optimizer(dataclasses.replace(config, learning_rate=rate))
            optimizers = {"heads": self.optimizer, "target": backbone}
            self.optimizer = optax.partition(optimizers, _label_owners)
        self.read(ids)
        for name, batches in {"train_files": self.batches, **self.validation}.items():
            steps = range(batches.per_epoch)
            if not any(np.any(batches[step].targets[:, 1:] >= 0) for step in steps):
                expected = "longer ones: no head predicts the first token"
                raise mismatch_error(name, "targets of one token", expected)

    @staticmethod
    def fixed(settings: dict) -> dict:
        names = ("num_heads", "num_blocks", "share_head")
        trained = settings["backbone_learning_rate"] > 0  # decides what a checkpoint holds
        return {name: settings[name] for name in names} | {"backbone_learning_rate": trained}

    def init(self, key: jax.Array) -> TrainState:
        original = self.target.params
        weight = head_weight(self.shape, original)
        params = {"heads": init_params(self.objective.heads.config, key, weight)}
        if self.settings.trains_backbone:
            params["target"] = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), original)
        return TrainState.begin(params, self.optimizer)

    def begin(self) -> TrainState:
        return self.init(jax.random.key(self.config.seed))

    def mean_loss(self, sums: Any) -> float:
        heads, own = sums
        loss = float(heads.loss / heads.tokens)
        if own is not None:
            loss += self.objective.backbone_weight * float(own.loss / own.tokens)
        return loss

    def export(self) -> None:
        """Writes the heads, and a trained target, that had the lowest validation loss."""
        path, target = self.config.output_dir, self.target
        output = mirrors.find_folder(path)
        params = self.saved.restore_best(train.make_abstract_state(self.init))
        if self.settings.trains_backbone:
            shape = target.config.replace(dtype="float32")
            target = LanguageModel(
                shape,
                params["target"],
                target.vocabulary,
                start_token=target.start_token,
                eos_ids=target.eos_ids,
                name="target",
                generation_config=target.generation_config,
            )
            converter.save(target, output / "target", dtype="bfloat16")
            print_line(f"wrote {mirrors.name_inside(path, 'target')}")
        heads = self.settings.heads_config(self.shape)
        drafter = HeadsDrafter.for_target(target, heads, params["heads"])
        drafter.save(output / "heads", dtype="bfloat16")
        print_line(f"wrote {mirrors.name_inside(path, 'heads')}")


def _label_owners(params: dict) -> dict:
    return {name: jax.tree.map(lambda _: name, tree) for name, tree in params.items()}


@isolated
def fit(settings: HeadsTrainConfig, on_start: Callable[[], object] = lambda: None) -> dict:
    """Trains heads and writes them, or resumes, as `train.fit` does, with its result and errors."""
    arguments.check_kind("settings", settings, HeadsTrainConfig, "a HeadsTrainConfig")
    train.check_files(settings, corpus.ANY_FILES)
    dtype = "float32" if settings.trains_backbone else settings.dtype
    target = loader.load(settings.target, dtype)
    RunVocabulary.from_model(target, "target")  # rejected before there is a folder

    def make_run(saved: Checkpoints) -> HeadsRun:
        path = mirrors.find_folder(settings.output_dir) / "target_fingerprint"
        record_target(path, "target", target, saved.step)
        return HeadsRun(settings, target, saved)

    return train.run_to_end(settings, HeadsRun.fixed, make_run, on_start).params
