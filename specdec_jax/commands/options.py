"""Defines the options that every decoding command takes (models, drafting, sampling), and the
checks that need no model."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specdec_jax.backends.cpu.packed_weights import INPUT_BITS, accelerated, check_quantize_name
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.checkpoints import loader
from specdec_jax.decoding.checks import (
    UnsupportedCombination,
    check_limits,
    check_pair,
    check_policy,
    verifier_settings,
)
from specdec_jax.decoding.request import FIXED
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.named import SELF_INT8, WITHOUT_FILES, check_drafter_name, named_drafter
from specdec_jax.drafters.ngram_table import NGramTable
from specdec_jax.drafters.shortlist import shortlist_from_counts
from specdec_jax.files.progress import print_line
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.meshes import make_mesh, parse_mesh
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import MAX_GAMMA, POLICIES, Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifiers import LOSSY, SYNTHETIC, VERIFIERS, verifier_of

AUTO_HELP = (
    "tokens drafted per target call, or auto: as many as pay, possibly none, by the costs on this"
    " machine (measured when a model is first used) and each sentence's own acceptance"
)


def option(default, text: str):
    """Returns a field of an options dataclass; `text` is its help on the command line."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class DecodingOptions:
    """The options that every decoding command takes; each field's help is in its metadata."""

    target: str | None = option(
        None, "model whose output you want: a checkpoint's folder or a bundled name (ende/target)"
    )
    drafter: str | None = option(
        None,
        "what drafts: a smaller model, named like --target; a folder that `specdec train_heads`"
        " wrote; exit:K, the target's first K decoder layers; a table (.npz) that `specdec count`"
        " wrote; "
        + "; ".join(f"{name}: {one.summary}" for name, one in WITHOUT_FILES.items())
        + " (default: nothing drafts, which is plain decoding)",
    )
    shortlist_size: int = option(
        0,
        "let a drafting model propose only this many ids, the most frequent ones, so that its last"
        " layer is smaller; 0: all",
    )
    shortlist: str | None = option(
        None,
        "table (.npz) of `specdec count` that says which ids are frequent (default: the"
        " vocabulary's first ids); without --shortlist_size, all ids that it counted are proposed",
    )
    drafter_int8: bool = option(False, "let a drafting model multiply with weights of 8 bits")
    vocabulary: str | None = option(
        None,
        "SentencePiece model or tokenizer.json of both models, for checkpoints that have none"
        " (T5X's)",
    )
    dtype: str | None = option(
        None, "float32 or bfloat16 (default: float32 on a CPU, bfloat16 on an accelerator)"
    )
    quantize: str | None = option(
        None,
        "int8: round the target's weights to 8 bits while they are read (on an accelerator, or in"
        " float32 on a CPU); w8a8, on a CPU: and the inputs of its products to 8 bits instead of"
        " 16, which is faster for many rows; the output distribution is then the rounded model's;"
        " none: widen weights that are stored in int8 to --dtype (default: on a CPU use such"
        " weights as they are stored, where that is possible); for a drafter see --drafter_int8 and"
        " --drafter=self:int8",
    )
    mesh: str | None = option(
        None,
        "DATAxMODEL, such as 1x4: divide rows among DATA devices, the target's parameters and"
        " caches among MODEL devices (default: one device)",
    )
    shard_drafter: bool = option(
        False,
        "with --mesh: divide a drafting model like the target instead of copying it to every"
        " device",
    )
    temperature: float = option(
        0.0, "0: always the most probable token; above 0: sample, with logits divided by this"
    )
    top_k: int = option(0, "sample among the k most probable tokens; 0: among all")
    top_p: float = option(
        1.0, "sample among the most probable tokens that together have at least this probability"
    )
    min_p: float = option(
        0.0, "sample among the tokens with at least this fraction of the greatest probability"
    )
    repetition_penalty: float = option(1.0, "above 1: make tokens that have occurred less probable")
    no_repeat_ngram: int = option(
        0, "forbid tokens that would repeat an n-gram of this size; 0: none"
    )
    min_new_tokens: int = option(0, "minimum length of an output, in tokens before EOS")
    forbidden_tokens: tuple[int, ...] = option((), "ids that are never chosen, comma-separated")
    logit_bias: tuple[str, ...] = option(
        (), "ID:NUMBER, a number to add to the logit of an id; repeatable"
    )
    forced_tokens: tuple[str, ...] = option(
        (), "PLACE:ID, the id that must stand at a place of the output, counted from 0; repeatable"
    )
    verifier: str = option("block", f"how drafts are verified: {', '.join(VERIFIERS)}")
    lenience: float | None = option(
        None,
        "with --verifier=lenient: a token may come up to 1/lenience times as often as it should; 1"
        " is exact",
    )
    typical_epsilon: float | None = option(
        None, "with --verifier=typical: accept tokens above this probability (default: 0.09)"
    )
    typical_delta: float | None = option(
        None,
        "with --verifier=typical: accept tokens above this times exp(-entropy) too (default: 0.3)",
    )
    gamma_policy: str = option(
        "fixed",
        "how the number of drafted tokens, or of a tree's nodes, adapts while decoding, with"
        f" --gamma as its maximum (if that is auto: 4, of a tree all nodes, up to {MAX_GAMMA}):"
        f" fixed, {', '.join(POLICIES)}",
    )
    gamma_settings: tuple[str, ...] = option(
        (),
        "NAME:NUMBER, a setting of --gamma_policy; repeatable; "
        + "; ".join(f"{name} has {', '.join(cls.numbers())}" for name, cls in POLICIES.items()),
    )
    max_new_tokens: int = option(64, "maximum length of an output, in tokens")
    max_input_length: int = option(
        512, "maximum length of an input, in tokens; a longer one is rejected, never cut"
    )
    seed: int = option(
        0, "seed of the sampling; input i draws from fold_in(key(seed), i), whatever its batch"
    )

    @property
    def token_limit(self) -> int:
        """The most new tokens of an output, as far as it is known before a model is loaded."""
        return self.max_new_tokens

    def sampling(self) -> SamplingConfig:
        """Returns how tokens are chosen."""
        return SamplingConfig(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
            min_new_tokens=self.min_new_tokens,
            forbidden_tokens=self.forbidden_tokens,
            logit_bias=_pairs("logit_bias", self.logit_bias, float),
            forced_tokens=_pairs("forced_tokens", self.forced_tokens, int),
        )

    def possible_sampling(self) -> SamplingConfig:
        """Returns `sampling`, as far as it is known before a model is loaded."""
        return self.sampling()

    def decoding(self, plain: bool = False) -> dict[str, Any]:
        """Returns the arguments of `generate` that every decoding command passes on, except the
        drafter.

        With `plain`, they are those of plain decoding, where a lossy verifier has nothing to
        verify.
        """
        common: dict[str, Any] = dict(
            sampling=self.sampling(),
            max_new_tokens=self.max_new_tokens,
            max_input_length=self.max_input_length,
            generation_config=None,
        )
        if plain and self.verifier in LOSSY:
            return common
        return common | dict(
            verifier=self.verifier,
            lenience=self.lenience,
            typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
        )

    def gamma_of(
        self, gamma: int | str, tree: Tree | DynamicTree | None = None
    ) -> int | str | Policy:
        """Returns what `generate` takes as γ: `gamma` itself, or the policy with `gamma` (for
        "auto" 4, with `tree` all its nodes) as its maximum.

        Raises:
          ValueError: no such policy, or settings that it does not have.
        """
        settings = _settings("gamma_settings", self.gamma_settings)
        if self.gamma_policy == "fixed":
            if settings:
                raise UnsupportedCombination(
                    f"gamma_settings: got {', '.join(self.gamma_settings)!r} with"
                    " gamma_policy='fixed', expected none"
                )
            return gamma
        if self.gamma_policy not in POLICIES:
            raise ValueError(
                f"gamma_policy: got {self.gamma_policy!r}, expected one of fixed,"
                f" {', '.join(POLICIES)}"
            )
        policy = POLICIES[self.gamma_policy]
        for name in settings:
            if name not in policy.numbers():
                expected = ", ".join(policy.numbers())
                raise ValueError(
                    f"gamma_settings: got {name!r} with gamma_policy={self.gamma_policy!r},"
                    f" expected one of {expected}"
                )
        if gamma == "auto":
            gamma = FIXED if tree is None else min(tree.size - 1, MAX_GAMMA)
        return policy(gamma, **settings) if gamma else 0

    def check(self) -> None:
        """Raises ValueError for options that can be seen to be wrong before a model is loaded."""
        if not self.target:
            expected = " or ".join(["a checkpoint's folder", *loader.bundled()])
            raise ValueError(f"target: got nothing, expected {expected}")
        self.check_decoding()

    def check_decoding(self) -> None:
        """Checks the same as `check`, except that a target is named.

        For commands that may do without a checkpoint.
        """
        sampling = self.sampling()
        at_least(1, max_new_tokens=self.token_limit, max_input_length=self.max_input_length)
        if self.verifier not in VERIFIERS:
            why = (
                " (--synthetic_alpha of `specdec benchmark` times with it)"
                if self.verifier == SYNTHETIC.name
                else ""
            )
            raise ValueError(
                f"verifier: got {self.verifier!r}, expected one of {', '.join(VERIFIERS)}{why}"
            )
        verifier_settings(
            verifier_of(self.verifier),
            self.possible_sampling(),
            int(self.drafts),
            1,
            lenience=self.lenience,
            typical_epsilon=self.typical_epsilon,
            typical_delta=self.typical_delta,
        )
        if not self.drafts and (self.gamma_policy != "fixed" or self.gamma_settings):
            raise UnsupportedCombination(
                f"gamma_policy: got {self.gamma_policy!r} for plain decoding, expected a drafter"
                " and gamma of at least 1"
            )
        check_limits(sampling, np.array([self.token_limit]), 1)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: got {self.seed}, expected an integer from 0 to {2**32 - 1}")
        at_least(0, shortlist_size=self.shortlist_size)
        if self.dtype not in (None, "float32", "bfloat16"):
            raise ValueError(f"dtype: got {self.dtype!r}, expected float32 or bfloat16")
        self._check_quantize()
        if self.shard_drafter and not self.mesh:
            raise UnsupportedCombination(
                "shard_drafter: got True without a mesh, expected --mesh=DATAxMODEL too"
            )
        if self.mesh:
            ShardingRules(self.devices()).check_rows("batch_size", self.rows)

    def _check_quantize(self) -> None:
        check_quantize_name(self.quantize)
        if self.quantize in INPUT_BITS and self.drafter == SELF_INT8:
            raise UnsupportedCombination(
                f"drafter: got {self.drafter!r} with quantize={self.quantize!r}, expected a target"
                " that is not in int8"
            )
        narrow = self.dtype == "bfloat16" and not (self.quantize == "int8" and accelerated())
        if self.quantize in INPUT_BITS and (self.mesh or narrow):
            got = f"mesh={self.mesh!r}" if self.mesh else f"dtype={self.dtype!r}"
            there = "" if self.quantize == "w8a8" else ", or an accelerator"
            raise UnsupportedCombination(
                f"quantize: got {self.quantize!r} with {got}, expected one device: a CPU in"
                f" float32{there}"
            )

    @property
    def drafts(self) -> bool:
        """Whether anything is to be drafted; without it a lossy verifier makes no sense."""
        return bool(self.drafter)

    @property
    def rows(self) -> int:
        """Number of sentences that are decoded together."""
        return getattr(self, "batch_size", 1)

    def devices(self) -> Mesh | None:
        """Returns the devices of `mesh`, None without one."""
        return make_mesh(*parse_mesh(self.mesh)) if self.mesh else None

    def placement(self, drafts: bool) -> ShardingRules | None:
        """Returns how the target (or with `drafts` the drafter) is divided over the mesh, None
        without one."""
        return (
            ShardingRules(self.devices(), drafts and not self.shard_drafter) if self.mesh else None
        )

    def load(self, target: LanguageModel | None = None) -> tuple[LanguageModel, Drafter | None]:
        """Returns the target (unless it is given) and the drafter, if one is named.

        Raises ValueError for a drafter with another vocabulary.
        """
        load = functools.partial(
            loader.load, dtype=self.dtype, vocabulary=self.vocabulary, mesh=self.devices()
        )
        if self.drafter:
            check_drafter_name(self.drafter)
        target = target or load(self.target, quantize=self.quantize)
        if self.decoding()["generation_config"] is None and target.generation_config.fields():
            print_line(
                f"{target.name}: decoding by the flags alone, without the model's own defaults"
            )
        load = functools.partial(load, replicate=bool(self.mesh) and not self.shard_drafter)
        self.sampling().rows(1, target.config.vocab_size)  # rejects ids that the vocabulary lacks
        drafter = named_drafter(self.drafter, target, load, self.reduced) if self.drafter else None
        if drafter is None or drafter.second_model is None:
            self.reject_reduction()
        if drafter is not None:
            check_pair(target, drafter)
            check_policy(self.gamma_of(1), drafter)
        return target, drafter

    def reduced(self, model: LanguageModel) -> ModelDrafter:
        """Returns a drafter with `model`, and with the shortlist and 8 bits that the options ask
        for."""
        if not self.shortlist:
            return ModelDrafter(model, self.shortlist_size or None, self.drafter_int8)
        table, _ = NGramTable.load(self.shortlist)
        if not table.matches(model.vocabulary):
            raise ValueError(
                f"shortlist: got a table of {table.vocab_size} ids of another vocabulary, expected"
                " the drafter's"
            )
        counts = np.asarray(table.unigram)
        size = self.shortlist_size or len({*np.flatnonzero(counts), *model.eos_ids})
        return ModelDrafter(
            model, shortlist_from_counts(counts, size, model.eos_ids), self.drafter_int8
        )

    def reject_reduction(self) -> None:
        """Raises UnsupportedCombination for options about a drafting model if no model drafts."""
        for name in ("shortlist_size", "shortlist", "drafter_int8", "shard_drafter"):
            if getattr(self, name):
                raise UnsupportedCombination(
                    f"{name}: got {getattr(self, name)!r}, expected a drafter that is a model"
                )


def _pairs(name: str, items: Sequence[str], kind: type) -> dict[int, Any] | None:
    """Returns `{5: value}` for `("5:value",)`, None for nothing."""
    try:
        pairs = [(int(key), kind(value)) for key, value in (item.split(":") for item in items)]
    except ValueError:
        expected = "integer:integer" if kind is int else "integer:number"
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected {expected}") from None
    if len(dict(pairs)) < len(pairs):
        raise ValueError(
            f"{name}: got {', '.join(items)!r}, expected every integer before a colon once"
        )
    return dict(pairs) or None


def _settings(name: str, items: Sequence[str]) -> dict[str, Any]:
    """Returns `{"a": value}` for `("a:value",)`; whole numbers are integers."""
    try:
        pairs = [(key, float(value)) for key, value in (item.split(":") for item in items)]
    except ValueError:
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected name:number") from None
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"{name}: got {', '.join(items)!r}, expected every name once")
    return {key: int(value) if value.is_integer() else value for key, value in pairs}


def check_gamma(gamma: int | str, most: int = MAX_GAMMA) -> None:
    """Raises ValueError for a γ that is out of range."""
    if gamma == "auto":
        return
    if isinstance(gamma, str) or not 0 <= gamma <= most:
        raise ValueError(f"gamma: got {gamma}, expected an integer from 0 to {most}, or auto")


def at_least(minimum: int, **values: int) -> None:
    """Raises ValueError for the first of `values` below `minimum`."""
    for name, value in values.items():
        if value < minimum:
            raise ValueError(f"{name}: got {value}, expected at least {minimum}")


def same_file(path: str, other: str) -> bool:
    """Returns whether both paths exist and are the same file."""
    return all(map(os.path.exists, (path, other))) and os.path.samefile(path, other)
