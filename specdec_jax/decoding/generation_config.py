"""`GenerationConfig`: the options of `generate`, with their types, defaults, docs and checks."""

import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple, TypeVar

from specdec_jax.decoding import config_files
from specdec_jax.decoding.checks import (
    SamplingChanges,
    UnsupportedCombination,
    check_non_finite,
    check_sampling,
    check_stop,
)
from specdec_jax.models import arguments
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policy import MAX_GAMMA, Policy
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifier import BaseVerifier
from specdec_jax.speculative.verifiers import find_verifier

MODELS = "model"  # the value of `generation_config` that means the model's own

PerInput = float | Sequence[float]
Function = TypeVar("Function", bound=Callable)


def _make_field(default: Any, doc: str, unset: str = "", api: str = "") -> Any:
    """Returns a field with its documentation, for the docstring of `generate` and for `--help`.

    Args:
      default: the default.
      doc: what the option means, without a full stop.
      unset: what its default None stands for.
      api: what only Python can give it.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "unset": unset, "api": api})


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """The options of `generate`, checked as far as they can be without a model.

    `generate` documents the fields. `dataclasses.replace` returns a changed copy.

    Raises:
      ValueError: an option of another kind or outside its range.
      UnsupportedCombination: options that make no sense together.
    """

    gamma: str | int | Sequence[int] | Policy = _make_field(
        "auto",
        'γ ≥ 0, tokens drafted per target call, or "auto": up to 8, as many as pay by each row\'s '
        "acceptance and by what iterations cost on this machine (measured when a model is first "
        "used); on a mesh 4. Above temperature 0 the tokens that are drawn (not their "
        "distribution) then depend on the machine: fix γ to repeat them on another",
        api="One, or one per input; or a policy that adapts it (`policies.py`), e.g. "
        "`Heuristic(maximum=8)`.",
    )
    sampling: SamplingConfig | None = _make_field(
        None,
        "temperature, filters, processors such as a repetition penalty",
        "the model's, else argmax",
    )
    drafter_sampling: SamplingConfig | None = _make_field(
        None,
        "temperature, top_k, top_p and min_p that drafts are drawn with, in the place of the "
        "target's; the output distribution stays the target's",
        "the target's",
    )
    tree: Tree | DynamicTree | None = _make_field(
        None,
        "tree of drafted tokens in the place of a chain: it has a verifier of its own, and γ is "
        "the most nodes that are drafted, by default all; a policy adapts their number",
        api="E.g. `Tree.uniform((3, 2, 1))`.",
    )
    verifier: str | BaseVerifier = _make_field(
        "block",
        'how drafts are verified: "token" (Leviathan et al. 2023, Algorithm 1), "block" (accepts '
        'more on average), "gumbel" (the output is that of autoregressive decoding with "gumbel" '
        'and the same key), "rejection" (section A.2, for comparison); lossy: "lenient" and '
        '"typical"',
        api="`verifiers.py` explains each. Or your own `Verifier`, with a tree a `TreeVerifier`.",
    )
    lenience: PerInput | None = _make_field(
        None, 'l in (0, 1] of "lenient": a token may come up to 1/l times as often as it should'
    )
    typical_epsilon: PerInput | None = _make_field(
        None, 'ε of "typical": tokens above this probability are accepted', "0.09"
    )
    typical_delta: PerInput | None = _make_field(
        None,
        'δ of "typical": tokens above this times exp(-entropy) are accepted too',
        "0.3",
    )
    synthetic_alpha: PerInput | None = _make_field(
        None,
        'α in (0, 1] of "synthetic", which accepts at random with a given probability, for timing: '
        "its outputs mean nothing",
    )
    max_new_tokens: int | Sequence[int] | None = _make_field(
        None,
        "limit for new tokens, EOS included",
        "the model's, else 64",
        api="One, or one per input.",
    )
    num_samples: int = _make_field(
        1,
        "number of outputs for every input, at least 1, one after the other; each input is "
        "encoded, or read, once",
    )
    max_input_length: int = _make_field(
        512, "longest input in tokens; longer ones are rejected, never cut"
    )
    source_language: str | Collection[str] | None = _make_field(
        None,
        "code of the inputs' language, for texts and a model of several languages (eng_Latn of "
        "NLLB, en of M2M-100, en_XX of mBART)",
        "the one that the tokenizer's files give",
        api="One, or one per input.",
    )
    target_language: str | Collection[str] | None = _make_field(
        None,
        "code of the outputs' language, for a model of several languages; fra for a Marian "
        "whose codes look like >>fra<<",
        "the one that the model's files give",
        api="One, or one per input.",
    )
    eos_ids: Sequence[int] | None = _make_field(None, "ids that stop a row", "the model's own")
    stop: str | Sequence[str] = _make_field(
        (),
        "strings that stop a row; neither they nor a token that reaches into one are part of the "
        "result",
    )
    deadline: float | None = _make_field(
        None,
        "seconds after which the rows of a batch are returned as they are, compilation included; "
        "with it, finished rows are not refilled",
        api="`warm_up` compiles before.",
    )
    num_beams: int | None = _make_field(
        None,
        "number of beams of a beam search; a drafter makes it speculative, with the same outputs; "
        "γ is then the number of levels of the drafted tree",
        "the model's, else none",
    )
    length_penalty: float | None = _make_field(
        None,
        "exponent of the length penalty of a beam search, by which scores are divided",
        "the model's, else 0.6 in T5X's form, 1 in Hugging Face's",
    )
    beam_style: str | None = _make_field(
        None,
        "library whose tokens and scores a beam search gives, t5x or huggingface",
        "huggingface where the model has defaults of a beam search, else t5x",
    )
    early_stopping: bool | str | None = _make_field(
        None,
        "when a beam search in Hugging Face's form ends: True (num_beams hypotheses have "
        "finished), False (the best active beam would not be among them if it ended now) or "
        '"never" (it would not, whatever its length)',
        "the model's, else False",
    )
    num_return_sequences: int | None = _make_field(
        None,
        "hypotheses of a beam search that are returned for each input, at most num_beams",
        "the model's, else 1",
    )
    beam_width: int | None = _make_field(
        None,
        "nodes in each level of the tree that is drafted for a beam search, at least num_beams",
        "the drafter's default, mostly twice num_beams",
    )
    non_finite: str = _make_field(
        "raise",
        'what NaN and infinite logits do: "raise" an error, or "report" it row by row',
        api="The result's `errors` report it.",
    )
    generation_config: ModelDefaults | str | None = _make_field(
        MODELS,
        'where defaults of options come from: "model" (the checkpoint\'s '
        "generation_config.json) or none (this package's defaults)",
        api="Or other `ModelDefaults`, or None for none.",
    )

    def __post_init__(self) -> None:
        if self.num_beams is not None:
            self.check_beside_beams()
        if isinstance(self.gamma, str) and self.gamma != "auto":
            expected = f"'auto', an integer from 0 to {MAX_GAMMA}, or a policy"
            raise ValueError(f"gamma: got {self.gamma!r}, expected {expected}")
        if self.sampling is not None and not isinstance(self.sampling, SamplingChanges):
            check_sampling(self.sampling)
        expected = "a SamplingConfig, or None"
        if self.drafter_sampling is not None:
            arguments.check_kind(
                "drafter_sampling", self.drafter_sampling, SamplingConfig, expected
            )
        find_verifier(self.verifier)
        arguments.check_integer("num_samples", self.num_samples, 1, 2**20)
        arguments.check_integer("max_input_length", self.max_input_length, 1)
        for name in ("source_language", "target_language"):
            if (given := getattr(self, name)) is not None and not isinstance(given, str):
                expected = "a language's code, or one per input"
                codes = arguments.check_list(name, given, expected)
                if not all(isinstance(code, str) for code in codes):
                    raise ValueError(f"{name}: got {arguments.quote(given)}, expected {expected}")
                object.__setattr__(self, name, codes)
        check_stop(self.stop, self.deadline)
        check_non_finite(self.non_finite)

    def check_beside_beams(self) -> None:
        """Raises UnsupportedCombination for an option that means nothing with a beam search."""
        none = isinstance(self.stop, Sequence) and not self.stop  # an empty list is none, too
        names = _NOT_WITH_BEAMS if none else [*_NOT_WITH_BEAMS, "stop"]
        check_unset(self, "with num_beams", *names)

    def save(self, path: str | PathLike) -> None:
        """Writes the options that are not at their defaults to a `.json` or `.gin` file.

        Raises:
          ValueError: another suffix, or an option that no file can hold, such as a function.
        """
        config_files.write_fields(path, self.changed_fields())

    def changed_fields(self) -> dict[str, Any]:
        """Returns the options that are not at their defaults, by name."""
        given = {name: (getattr(self, name), field.default) for name, field in FIELDS.items()}
        return {
            name: value
            for name, (value, unset) in given.items()
            if (value is None) != (unset is None) or not arguments.is_default(value, unset)
        }

    @classmethod
    def load(cls, path: str | PathLike) -> "GenerationConfig":
        """Returns the configuration in a file that `save` wrote, or one of the same form.

        Raises:
          ValueError: the file has another form, or a field is unknown or wrong; the message names
            the file and the field.
        """
        fields = config_files.read_fields(path, FIELDS)
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


FIELDS = {field.name: field for field in dataclasses.fields(GenerationConfig)}
# The options of a beam search, and those that mean nothing with one.
BEAM_FIELDS = tuple(
    "num_beams length_penalty beam_style early_stopping num_return_sequences beam_width".split()
)
_NOT_WITH_BEAMS = (
    "verifier lenience typical_epsilon typical_delta synthetic_alpha num_samples deadline tree "
    "drafter_sampling"
).split()

ConfigOrPath = GenerationConfig | str | PathLike | None


class CallData(NamedTuple):
    """The arguments of `generate` that belong to one call, beside the target and the inputs."""

    drafter: Drafter | None = None
    key: Any = None
    input_lengths: Any = None
    attention_mask: Any = None
    decoder_prefix: Any = None


def split_options(
    config: ConfigOrPath, options: Mapping[str, Any]
) -> tuple[GenerationConfig, CallData]:
    """Returns the configuration and the data of a call, from its keyword arguments.

    Args:
      config: a configuration, or the path of its file, which the options change; None: the
        defaults.
      options: the keyword arguments.

    Raises:
      TypeError: an unknown option.
      ValueError: `config` is none, or an option is of another kind or outside its range.
    """
    if isinstance(config, str | PathLike):
        config = GenerationConfig.load(config)
    config = GenerationConfig() if config is None else config
    expected = "a GenerationConfig, the path of its file, or None"
    arguments.check_kind("config", config, GenerationConfig, expected)
    known = [*FIELDS, *CallData._fields]
    for name in options:
        if name not in known:
            raise TypeError(f"{name}: got an unknown option{_explain_unknown(name, known)}")
    changes = {name: value for name, value in options.items() if name in FIELDS}
    data = {name: value for name, value in options.items() if name not in FIELDS}
    return dataclasses.replace(config, **changes) if changes else config, CallData(**data)


# What some of transformers' arguments are called here.
_ELSEWHERE = {
    "do_sample": "sampling=sd.SamplingConfig(temperature=1.0)",
    "no_repeat_ngram_size": "sampling=sd.SamplingConfig(no_repeat_ngram=…)",
    "bad_words_ids": "sampling=sd.SamplingConfig(forbidden_sequences=…)",
    "suppress_tokens": "sampling=sd.SamplingConfig(forbidden_tokens=…)",
    "logits_processor": "sampling=sd.SamplingConfig(processor=…)",
    "assistant_model": "drafter=sd.ModelDrafter(…)",
    "num_assistant_tokens": "gamma",
    "max_length": "max_new_tokens",
    "eos_token_id": "eos_ids",
    "stop_strings": "stop",
    "max_time": "deadline",
    "seed": "key=jax.random.key(…)",
    "rng": "key",
}


def _explain_unknown(name: str, known: Sequence[str]) -> str:
    """Returns the end of the message about an option that does not exist: where to look for it."""
    if name in SamplingConfig.__dataclass_fields__:
        return f", expected it in sampling=sd.SamplingConfig({name}=…)"
    if name in _ELSEWHERE:
        return f", expected {_ELSEWHERE[name]}"
    return config_files.suggest_name(name, known)


def check_unset(config: GenerationConfig, where: str, *names: str) -> None:
    """Raises UnsupportedCombination for options that are set and mean nothing `where` they are."""
    for name in names:
        value, unset = getattr(config, name), FIELDS[name].default
        if not arguments.is_default(value, unset):
            got = arguments.quote(value)
            raise UnsupportedCombination(f"{name}: got {got} {where}, expected {unset!r}")


def _read_doc(field: dataclasses.Field) -> str:
    """Returns what a field means, for a docstring."""
    unset = field.metadata["unset"] and f"None: {field.metadata['unset']}."
    return " ".join(filter(None, (f"{field.metadata['doc']}.", unset, field.metadata["api"])))


def document_options(
    function: Function, without: Sequence[str] = (), others: Iterable[inspect.Parameter] = ()
) -> Function:
    """Gives a function with `**options` the signature and the docs of all but those of `without`.

    Its docstring has a line `{options}` among the arguments where they are to be listed. `others`
    are further parameters that `**options` takes.
    """
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    named = {*without, *(one.name for one in own)}
    fields = [field for name, field in FIELDS.items() if name not in named]
    parameter = functools.partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    listed = [parameter(name, default=None) for name in CallData._fields if name not in named]
    listed += [parameter(one.name, default=one.default, annotation=one.type) for one in fields]
    target: Any = function
    target.__signature__ = signature.replace(parameters=[*own, *listed, *others])
    indents: Any = dict(initial_indent="  ", subsequent_indent="    ")
    docs = [textwrap.fill(f"{one.name}: {_read_doc(one)}", 100, **indents) for one in fields]
    # From Python 3.13 on a docstring has no indentation of its own.
    text = inspect.cleandoc(function.__doc__ or "")
    function.__doc__ = text.replace("  {options}", "\n".join(docs))
    return function
