"""Trains heads on a target's last state, with the target frozen or trained beside them.

They learn from the target's own outputs (TSV files that `specdec generate` makes), from other text,
or with the target's own distributions as soft targets.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.checkpoints import converter, loader
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.files.progress import print_line
from specdec_jax.files.writing import lock_folder
from specdec_jax.models.family import FamilyModule, ModelConfig
from specdec_jax.models.heads import Heads, HeadsConfig, HeadsNetwork, head_weight, init_params
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.models.t5 import T5Config, t5_only
from specdec_jax.training import optimizer, run_vocabulary, train
from specdec_jax.training.config import TrainConfig, follow_steps
from specdec_jax.training.losses import Metrics, TrainState, fed
from specdec_jax.training.optimizer import learning_rate
from specdec_jax.training.run_folder import Checkpoints, changed_settings, record_target


@dataclasses.dataclass(frozen=True)
class HeadsTrainConfig:
    """Settings of a run that trains heads; what is not listed is as in `TrainConfig`.

    Attributes:
      target: path or bundled name of the model on whose states the heads are put.
      num_heads, num_blocks, share_head: as in `HeadsConfig`.
      output_dir: the heads are written to `heads` in it; the target, if it is trained too, to
        `target`.
      warmup_steps, decay_steps: as in `TrainConfig`. None: a twentieth and a half of `steps`.
      label_smoothing: probability mass that is spread over the vocabulary.
      soft_weight: w in (1 − w) · cross-entropy + w · KL(target ‖ head). The target's distribution
        is the one after the tokens in between, which a head does not see.
      learning_rate: learning rate of Adam, for the heads.
      backbone_learning_rate: learning rate of the target, in the sense of `TrainConfig`; 0 leaves
        the target as it is.
      backbone_weight: weight of the target's own cross-entropy beside the heads' loss; above 0 if
        and only if the target is trained.
      matmul_dtype: as in `T5Config`.
    """

    target: str
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    output_dir: str
    data_dir: str = ""
    num_heads: int = 4
    num_blocks: int = 1
    share_head: bool = True
    steps: int = 1000
    warmup_steps: int | None = None
    decay_steps: int | None = None
    learning_rate: float = 0.001
    batch_tokens: int = 4096
    buckets: tuple[int, ...] = (8, 10, 12, 14, 16, 20, 24, 32, 48, 64)
    target_buckets: tuple[int, ...] = ()
    label_smoothing: float = 0.0
    soft_weight: float = 0.0
    backbone_learning_rate: float = 0.0
    backbone_weight: float = 0.0
    seed: int = 0
    log_every: int = 20
    save_every: int = 100
    evaluate_every: int = 200
    dtype: str | None = None
    matmul_dtype: str | None = None

    def __post_init__(self):
        follow_steps(self, 2)
        run = self.run(T5Config(1, 1, 1, 1, 1, 1, 1))  # which checks what it shares with other runs
        for name in ("train_files", "validation_files", "buckets", "target_buckets"):
            object.__setattr__(self, name, getattr(run, name))
        self.heads(run.model)
        if not 0 <= self.soft_weight <= 1:
            raise ValueError(f"soft_weight: got {self.soft_weight}, expected a number in [0, 1]")
        if not 0 <= self.backbone_learning_rate < float("inf"):
            raise ValueError(
                f"backbone_learning_rate: got {self.backbone_learning_rate}, expected at least 0"
            )
        if (
            not 0 <= self.backbone_weight < float("inf")
            or (self.backbone_weight > 0) != self.trains_backbone
        ):
            expected = "a number above 0 with a backbone_learning_rate, 0 without"
            raise ValueError(f"backbone_weight: got {self.backbone_weight}, expected {expected}")

    @property
    def trains_backbone(self) -> bool:
        """Whether the target is trained too."""
        return self.backbone_learning_rate > 0

    def run(self, shape: T5Config, **settings) -> TrainConfig:
        """Returns the settings that a run on a target of this shape shares with the training of a
        model."""
        names = {field.name for field in dataclasses.fields(TrainConfig)}
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in names
        }
        model = dataclasses.replace(
            shape, dtype="float32", matmul_dtype=self.matmul_dtype, dropout_rate=0.0
        )
        return TrainConfig(model=model, vocabulary_size=1, **{**shared, **settings})

    def heads(self, shape: ModelConfig) -> HeadsConfig:
        """Returns the configuration of the heads on a target of this shape."""
        return HeadsConfig(
            self.num_heads,
            shape.emb_dim,
            shape.vocab_size,
            self.num_blocks,
            self.share_head,
            shape.dtype,
            shape.matmul_dtype,
        )


def _fixed(settings: dict) -> dict:
    names = ("num_heads", "num_blocks", "share_head")
    trained = {
        "backbone_learning_rate": settings["backbone_learning_rate"] > 0
    }  # decides what a checkpoint holds
    return {name: settings[name] for name in names} | trained


# The loss.


@dataclasses.dataclass(frozen=True)
class HeadsObjective:
    """What is minimised; hashable, so that it is static under jit.

    Attributes:
      model, heads: the networks.
      start_token: the target's start token.
      label_smoothing, soft_weight, backbone_weight: as in `HeadsTrainConfig`.
    """

    model: FamilyModule
    heads: Heads
    start_token: int = 0
    label_smoothing: float = 0.0
    soft_weight: float = 0.0
    backbone_weight: float = 0.0


def heads_loss(params, batch, objective: HeadsObjective, target_params=None, dropout_key=None):
    """Returns the mean loss, and sums over the tokens that heads predict.

    The loss is the mean over these tokens, plus `backbone_weight` times the mean over the tokens
    that the target itself predicts. The target's state at decoder position t predicts token t + 1;
    head i predicts token t + 1 + i.

    Args:
      params: {"heads": …}, and {"target": …} if the target is trained.
      batch: (inputs `[B, L]`, targets `[B, T]`), int32, padded with `PADDING`.
      objective: what is minimised.
      target_params: parameters of a target that is not trained.
      dropout_key: not used; nothing is dropped.
    """
    inputs, targets = batch
    target = Network(params.get("target", target_params), objective.model)
    decoder_tokens = jnp.pad(
        targets[:, :-1], ((0, 0), (1, 0)), constant_values=objective.start_token
    )
    variables, shown = {"params": target.params}, fed(decoder_tokens)
    states = objective.model.apply(variables, fed(inputs), inputs >= 0, shown, method="states")
    heads = HeadsNetwork(params["heads"], target, objective.heads)
    logits = heads.logits(states.reshape(-1, states.shape[-1])).reshape(
        *targets.shape, -1, target.vocab_size
    )
    own = target.head(states) if objective.soft_weight or objective.backbone_weight else None

    total = Metrics(*[jnp.zeros((), jnp.float32)] * 3)
    for head in range(1, objective.heads.config.num_heads + 1):
        known = max(
            targets.shape[1] - head, 0
        )  # positions from which the predicted token lies inside the batch
        soft = own[:, head:] if own is not None and objective.soft_weight else None
        sums = _sums(logits[:, :known, head - 1], targets[:, head:], objective, soft)
        total = jax.tree.map(jnp.add, total, sums)
    loss = total.loss / jnp.maximum(total.tokens, 1)
    if objective.backbone_weight:
        sums = _sums(own, targets, objective)
        loss += objective.backbone_weight * sums.loss / jnp.maximum(sums.tokens, 1)
    return loss, total._replace(loss=loss * total.tokens)


def _sums(logits, targets, objective: HeadsObjective, soft=None) -> Metrics:
    """Returns sums over the tokens of `targets [B, T]` for `logits [B, T, V]`.

    `soft` are the target's logits at the same tokens.
    """
    log_q, weights = jax.nn.log_softmax(logits), (targets >= 0).astype(jnp.float32)
    nll = -jnp.take_along_axis(log_q, fed(targets)[..., None], axis=-1)[..., 0]
    loss = (1 - objective.label_smoothing) * nll - objective.label_smoothing * jnp.mean(
        log_q, axis=-1
    )
    if soft is not None:
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(soft))
        divergence = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
        loss = (1 - objective.soft_weight) * loss + objective.soft_weight * divergence
    return Metrics(jnp.sum(loss * weights), jnp.sum(nll * weights), jnp.sum(weights))


def assess_heads(
    params, batch, objective: HeadsObjective, target_params=None
) -> tuple[Metrics, None]:
    """Returns the metrics of heads on a batch; takes the place of `losses.assess`."""
    return heads_loss(params, batch, objective, target_params)[1], None


# The run.


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """Returns Adam, with which Medusa's heads were trained.

    Steps relative to an array's size would never move weights that begin at 0.
    """
    rate = functools.partial(learning_rate, config)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.98))


class HeadsRun(train.Run):
    """What a run needs besides its state; the target is part of the state only if it is trained."""

    loss = staticmethod(heads_loss)
    assess = staticmethod(assess_heads)

    def __init__(self, settings: HeadsTrainConfig, target: LanguageModel, saved: Checkpoints):
        self.shape = t5_only("target", target.config)
        if self.shape.encoder_dim is not None:
            raise ValueError(
                f"target: got {target.name}, which reads another's encoder output, expected an"
                " encoder"
            )
        config = settings.run(self.shape)
        self.settings, self.config, self.saved, self.target = settings, config, saved, target
        network = train.computing(config, config.model)
        self.objective: Any = HeadsObjective(
            network.module(),
            Heads(settings.heads(network)),
            target.start_token,
            settings.label_smoothing,
            settings.soft_weight,
            settings.backbone_weight,
        )
        self.optimizer = make_optimizer(config)
        self.teacher_params = None if settings.trains_backbone else target.params
        if settings.trains_backbone:
            backbone = optimizer.make_optimizer(
                settings.run(self.shape, learning_rate=settings.backbone_learning_rate)
            )
            self.optimizer = optax.partition({"heads": self.optimizer, "target": backbone}, _owners)
        self.read(run_vocabulary.of_model(target, "target"))

    def init(self, key) -> TrainState:
        original = self.target.params
        weight = head_weight(self.shape, original)
        params = {"heads": init_params(self.objective.heads.config, key, weight)}
        if self.settings.trains_backbone:
            params["target"] = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), original)
        return TrainState(params, self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def initial_state(self) -> TrainState:
        if self.saved.newest.latest_step() is None:
            return self.init(jax.random.key(self.config.seed))
        return self.saved.restore(train.abstract_state(self.init))

    def export(self) -> list[pathlib.Path]:
        """Writes the heads, and the target if it was trained, that had the lowest validation loss.

        Returns the folders.
        """
        output, target = pathlib.Path(self.config.output_dir).absolute(), self.target
        abstract = train.abstract_state(self.init)
        step = self.saved.best.best_step()
        if step is None:  # no validation loss was finite
            params = self.saved.restore(abstract).params
        else:
            params = self.saved.best.restore(step, args=ocp.args.StandardRestore(abstract.params))
        if self.settings.trains_backbone:
            target = LanguageModel(
                target.config.replace(dtype="float32"),
                params["target"],
                target.vocabulary,
                start_token=target.start_token,
                eos_ids=target.eos_ids,
                name="target",
            )
            converter.save(target, output / "target", dtype="bfloat16")
        drafter = HeadsDrafter.for_target(target, self.settings.heads(self.shape), params["heads"])
        drafter.save(output / "heads", dtype="bfloat16")
        return [
            output / name
            for name in ("target", "heads")
            if self.settings.trains_backbone or name == "heads"
        ]


def _owners(params: dict) -> dict:
    return {name: jax.tree.map(lambda _: name, tree) for name, tree in params.items()}


@isolated
def fit(settings: HeadsTrainConfig, begun: Callable[[], object] = lambda: None) -> dict:
    """Trains heads and writes them; resumes an earlier run in `output_dir`. See `train.fit`.

    Returns:
      The parameters of the last step.

    Raises:
      ValueError: bad settings, target or files, before anything compiles; or a loss that is no
        longer finite.
      KeyboardInterrupt: after a signal, when the run is saved.
    """
    train.check_files(settings.run(T5Config(1, 1, 1, 1, 1, 1, 1)))
    output = pathlib.Path(settings.output_dir).absolute()
    dtype = "float32" if settings.trains_backbone else settings.dtype
    target = loader.load(settings.target, dtype)
    run_vocabulary.of_model(target, "target")  # rejected before there is a folder
    output.mkdir(parents=True, exist_ok=True)
    with lock_folder(output):
        saved = Checkpoints(output, resume=True)
        step = saved.newest.latest_step()
        record_target(output / "target_fingerprint", "target", target, step)
        for line in changed_settings(settings, output, step, _fixed):
            print_line(line)
        run = HeadsRun(settings, target, saved)
        state = train.go_on(run, settings, begun)
        for folder in run.export():
            print_line(f"wrote {folder}")
    return state.params
