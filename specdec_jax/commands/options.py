"""Defines the options that every decoding command takes, and the checks that need no model."""

import dataclasses
import functools
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specdec_jax.backends.cpu.packed_weights import INPUT_BITS, check_quantize_name, has_accelerator
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints import loader
from specdec_jax.commands import generation_flags
from specdec_jax.commands.generation_flags import make_flag
from specdec_jax.decoding import checks
from specdec_jax.decoding.checks import SamplingChanges, UnsupportedCombination
from specdec_jax.decoding.defaults import MAX_NEW_TOKENS
from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.drafters import named
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.shortlist import shortlist_from_counts
from specdec_jax.files.progress import print_line
from specdec_jax.models.arguments import document_fields, make_option
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.meshes import make_mesh, parse_mesh
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifiers import LOSSY, SYNTHETIC, VERIFIERS, find_verifier

_VERIFYING = ("verifier", "lenience", "typical_epsilon", "typical_delta")
_LANGUAGES = ("source_language", "target_language")
_MOST_TOKENS = 2**20  # a limit of new tokens that none exceeds


@document_fields
@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Options of every decoding command that are no fields of a `GenerationConfig`.

    Each field's help is in its metadata.

    Attributes:
      target: model whose output you want: a checkpoint's folder, here or at a URL such as
        gs://bucket/model, or a bundled name (ende/target)
      shortlist_size: let a drafting model propose only this many ids, the most frequent ones, so
        that its last layer is smaller; 0: all
      shortlist: table (.npz) of `specdec count` that says which ids are frequent (default: the
        vocabulary's first ids); without --shortlist_size, all ids that it counted are proposed
      vocabulary: SentencePiece model or tokenizer.json of both models, for checkpoints that have
        none (T5X's)
      dtype: float32 or bfloat16 (default: float32 on a CPU, bfloat16 on an accelerator)
      quantize: int8: round the target's weights to int8 while they are read (on an accelerator, or
        in float32 on a CPU); w8a8, on a CPU: round the inputs of products to int8, too, instead of
        int16, which is faster for many rows; with both, the output distribution is the rounded
        model's; none: widen weights that are stored in int8 to --dtype (default: on a CPU, multiply
        such weights in int8 where that is possible); for a drafter see --drafter_int8 and
        --drafter=self:int8
      mesh: DATAxMODEL, such as 1x4: divide rows among DATA devices, the target's parameters and
        caches among MODEL devices (default: one device)
      shard_drafter: with --mesh: divide a drafting model like the target instead of copying it to
        every device
      seed: seed of the sampling; input i draws from fold_in(key(seed), i), whatever its batch
    """

    target: str | None = None
    drafter: str | None = make_option(
        None,
        "a smaller model, named like --target; a folder that `specdec train_heads` or"
        " `specdec train_eagle` wrote;"
        " parallel:FOLDER, a model that drafts all tokens in one call;"
        " exit:K, the target's first K decoder layers;"
        " a table (.npz) or sorted text (.suffix) that `specdec count` wrote; "
        + "; ".join(f"{name}: {one.summary}" for name, one in named.WITHOUT_FILES.items())
        + " (default: none, which is autoregressive decoding)",
    )
    shortlist_size: int = 0
    shortlist: str | None = None
    drafter_int8: bool = make_option(False, "let a drafting model multiply with int8 weights")
    vocabulary: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    mesh: str | None = None
    shard_drafter: bool = False
    seed: int = 0
    gamma_policy: str | None = make_option(None, f"{generation_flags.POLICY_HELP} (default: fixed)")
    gamma_settings: tuple[str, ...] = make_option((), generation_flags.SETTINGS_HELP)

    def configuration(self) -> GenerationConfig:
        """Returns the options of decoding."""
        raise NotImplementedError

    def sampling(self) -> SamplingConfig:
        """Returns how tokens are chosen, without the model's own defaults."""
        given = self.configuration().sampling
        if isinstance(given, SamplingChanges):
            return SamplingConfig(**given.fields)
        return given or SamplingConfig()

    def _possible_sampling(self) -> SamplingConfig:
        """Returns `sampling`, with temperature 1 where the model may have one."""
        config: Any = self.configuration()
        fields = getattr(config.sampling, "fields", {})
        known = config.generation_config is None or "temperature" in fields
        return self.sampling() if known else SamplingConfig(**{**fields, "temperature": 1.0})

    @property
    def policy(self) -> Any:
        """γ, or the policy that adapts it."""
        return self.configuration().gamma

    def check(self) -> None:
        """Raises ValueError for options that can be seen to be wrong before a model is loaded."""
        if not self.target:
            expected = " or ".join(["a checkpoint's folder", *loader.bundled()])
            raise ValueError(f"target: got nothing, expected {expected}")
        self.check_decoding()

    def check_decoding(self) -> None:
        """Checks the same as `check`, except that a target is named."""
        config = self.configuration()
        limit: Any = _MOST_TOKENS if config.max_new_tokens is None else config.max_new_tokens
        check_at_least(1, max_new_tokens=limit)
        if config.verifier == SYNTHETIC.name:
            raise ValueError(
                f"verifier: got {config.verifier!r}, expected one of {', '.join(VERIFIERS)}"
                " (--synthetic_alpha of `specdec benchmark` times with it)"
            )
        parameters = {name: getattr(config, name) for name in (*_VERIFYING[1:], "synthetic_alpha")}
        verifier, sampling = find_verifier(config.verifier), self._possible_sampling()
        checks.verifier_settings(verifier, sampling, int(self.drafts), 1, **parameters)
        adapts = isinstance(self.policy, Policy) or self.gamma_policy not in (None, "fixed")
        if adapts and not self.drafts:
            got = f"gamma_policy: got {self.gamma_policy or self.policy!r} for plain decoding"
            raise UnsupportedCombination(f"{got}, expected a drafter and gamma of at least 1")
        checks.check_limits(sampling, np.array([limit]), config.num_samples)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected an integer from 0 to {2**32 - 1}")
        check_at_least(0, shortlist_size=self.shortlist_size)
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, expected float32 or bfloat16")
        self._check_quantize()
        if self.shard_drafter and not self.mesh:
            raise checks.unsupported(
                "shard_drafter", "True without a mesh", "--mesh=DATAxMODEL too"
            )
        if self.mesh:
            ShardingRules(self.devices()).check_rows("batch_size", self.rows)

    def _check_quantize(self) -> None:
        check_quantize_name(self.quantize)
        if self.quantize in INPUT_BITS and self.drafter == named.SELF_INT8:
            got = f"drafter: got {self.drafter!r} with quantize={self.quantize!r}"
            raise UnsupportedCombination(f"{got}, expected a target that is not in int8")
        narrow = self.dtype == "bfloat16" and not (self.quantize == "int8" and has_accelerator())
        if self.quantize in INPUT_BITS and (self.mesh or narrow):
            got = f"mesh={self.mesh!r}" if self.mesh else f"dtype={self.dtype!r}"
            got = f"quantize: got {self.quantize!r} with {got}"
            there = "" if self.quantize == "w8a8" else ", or an accelerator"
            raise UnsupportedCombination(f"{got}, expected one device: a CPU in float32{there}")

    @property
    def drafts(self) -> bool:
        """Whether anything is to be drafted; without it a lossy verifier makes no sense."""
        return bool(self.drafter) and self.policy != 0

    @property
    def rows(self) -> int:
        """Number of sentences that are decoded together."""
        return getattr(self, "batch_size", 1)

    def devices(self) -> Mesh | None:
        """Returns the devices of `mesh`, None without one."""
        return make_mesh(*parse_mesh(self.mesh)) if self.mesh else None

    def placement(self, drafts: bool) -> ShardingRules | None:
        """Returns how the target, or the drafter, is divided over the mesh; None without one."""
        copied = drafts and not self.shard_drafter
        return ShardingRules(self.devices(), copied) if self.mesh else None

    def load(
        self, target: LanguageModel | None = None, share: bool = True
    ) -> tuple[LanguageModel, Drafter | None]:
        """Returns the target (unless it is given) and the drafter, if one is named.

        With `share`, the drafter has no encoder of its own where it is equal to the target's.

        Raises ValueError for a drafter with another vocabulary.
        """
        load = functools.partial(
            loader.load, dtype=self.dtype, vocabulary=self.vocabulary, mesh=self.devices()
        )
        if self.drafter:
            named.check_drafter_name(self.drafter)
        target = target or load(self.target, quantize=self.quantize)
        if self.configuration().generation_config is None and target.generation_config.fields():
            what = "decoding by the flags alone, without the model's own defaults"
            print_line(f"{target.name}: {what}")
        load = functools.partial(load, replicate=bool(self.mesh) and not self.shard_drafter)
        self.sampling().rows(1, target.config.vocab_size)  # rejects ids that the vocabulary lacks
        drafter = (
            named.make_named_drafter(self.drafter, target, load, self.reduced)
            if self.drafter
            else None
        )
        if drafter is None or drafter.second_model is None:
            self.reject_reduction()
        if drafter is not None:
            checks.check_pair(target, drafter)
            checks.check_policy(self.policy, drafter)
            paired = drafter.pair_with(target) if share else drafter
            if paired is not drafter:
                print_line(f"{drafter.name}: has the target's encoder, which is run once")
            drafter = paired
        return target, drafter

    def reduced(self, model: LanguageModel) -> ModelDrafter:
        """Returns a drafter with `model`, with the shortlist and int8 weights of the options."""
        if not self.shortlist:
            return ModelDrafter(model, self.shortlist_size or None, self.drafter_int8)
        table = NGramDrafter.load(self.shortlist)
        table.check_vocabulary("shortlist", model.vocabulary)
        counts = np.asarray(table.unigram)
        size = self.shortlist_size or len({*np.flatnonzero(counts), *model.eos_ids})
        ids = shortlist_from_counts(counts, size, model.eos_ids)
        return ModelDrafter(model, ids, self.drafter_int8)

    def reject_reduction(self) -> None:
        """Raises UnsupportedCombination for options about a drafting model if no model drafts."""
        for name in ("shortlist_size", "shortlist", "drafter_int8", "shard_drafter"):
            if given := getattr(self, name):
                raise checks.unsupported(name, repr(given), "a drafter that is a model")


@dataclasses.dataclass(frozen=True)
class DecodingOptions(ModelOptions):
    """Options of a command that decodes by its flags alone, without the model's own defaults."""

    temperature: float = make_flag("temperature")
    top_k: int = make_flag("top_k")
    top_p: float = make_flag("top_p")
    min_p: float = make_flag("min_p")
    repetition_penalty: float = make_flag("repetition_penalty")
    no_repeat_ngram: int = make_flag("no_repeat_ngram")
    min_new_tokens: int = make_flag("min_new_tokens")
    forbidden_tokens: tuple[int, ...] = make_flag("forbidden_tokens")
    logit_bias: tuple[str, ...] = make_flag("logit_bias")
    forced_tokens: tuple[str, ...] = make_flag("forced_tokens")
    verifier: str = make_flag("verifier")
    lenience: float | None = make_flag("lenience")
    typical_epsilon: float | None = make_flag("typical_epsilon")
    typical_delta: float | None = make_flag("typical_delta")
    gamma_policy: str = make_option("fixed", generation_flags.POLICY_HELP)
    max_new_tokens: int = make_flag("max_new_tokens", MAX_NEW_TOKENS)
    max_input_length: int = make_flag("max_input_length")
    source_language: str | None = make_flag("source_language")
    target_language: str | None = make_flag("target_language")

    def configuration(self, plain: bool = False) -> GenerationConfig:
        """Returns the options of decoding but for γ.

        With `plain` they are those of plain decoding, where a lossy verifier has nothing to verify.
        """
        names = () if plain and self.verifier in LOSSY else _VERIFYING
        names = (*names, "max_new_tokens", "max_input_length", *_LANGUAGES)
        given = generation_flags.read_options(self, names)
        sampling = SamplingConfig(**generation_flags.read_sampling(self))
        return GenerationConfig(sampling=sampling, generation_config=None, **given)

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        """Returns `configuration` as an argument of `generate`."""
        return {"config": self.configuration(plain)}

    def gamma_of(
        self, gamma: int | str, tree: Tree | DynamicTree | None = None
    ) -> int | str | Policy:
        """Returns what `generate` takes as γ, as `read_gamma` makes it."""
        return generation_flags.read_gamma(gamma, self.gamma_policy, self.gamma_settings, tree)

    @property
    def policy(self) -> Any:
        return self.gamma_of(MAX_GAMMA)


def check_at_least(minimum: int, **values: int) -> None:
    """Raises ValueError for the first of `values` below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name}: got {value}, expected at least {minimum}")
