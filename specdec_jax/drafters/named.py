"""Makes drafters from their names on the command line: `lookup`, `exit:3`, a table, a folder …."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec_jax.checkpoints import loader, native_format
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.drafters.continuations import StoredDrafter
from specdec_jax.drafters.eagle import EagleDrafter
from specdec_jax.drafters.early_exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookahead import LookaheadDecoding
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.parallel import ParallelDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.drafters.recycling import TokenRecycling
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.drafters.suffix import SuffixDrafter
from specdec_jax.drafters.traced_target import TracedExit, TracedHeads, TracedSelf
from specdec_jax.files import places
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.tokenizers.vocabularies import Vocabulary


class NamedDrafter(NamedTuple):
    """A drafter that needs nothing but the target.

    Attributes:
      summary: what it drafts, for `--help`.
      make: takes the target and returns the drafter.
    """

    summary: str
    make: Callable[[LanguageModel], Drafter]


SELF_INT8, PARALLEL = "self:int8", "parallel:"
TABLES = NGRAMS, SORTED = ".npz", ".suffix"  # ends of the names of files without weights
# A new drafter without files of its own is a row here.
WITHOUT_FILES = {
    "lookup": NamedDrafter("copies from input and output", lambda target: PromptLookupDrafter()),
    "copy": NamedDrafter(
        "the same, also where nothing matches", lambda target: PromptLookupDrafter(min_match=0)
    ),
    "assisted": NamedDrafter(
        "n-grams gathered while decoding", lambda target: AssistedNGramDrafter()
    ),
    "recycling": NamedDrafter(
        "the target's most probable tokens after the same token before",
        lambda target: TokenRecycling(target.config.vocab_size),
    ),
    "lookahead": NamedDrafter(
        "guesses that the target improves in each call", lambda target: LookaheadDecoding()
    ),
    "suffix": NamedDrafter(
        "copies from input, output and, in a job, earlier outputs", lambda target: SuffixDrafter()
    ),
    SELF_INT8: NamedDrafter("the target's own weights rounded to 8 bits", SelfDrafter),
    "random": NamedDrafter("random tokens", lambda target: RandomDrafter(target.config.vocab_size)),
}


def needs_no_model(name: str) -> bool:
    """Returns whether `--drafter=name` has no weights of its own."""
    return name in WITHOUT_FILES or name.startswith("exit:") or name.endswith(TABLES)


def make_named_drafter(
    name: str,
    target: LanguageModel,
    load: Callable[[str], LanguageModel],
    reduced: Callable[[LanguageModel], ModelDrafter],
) -> Drafter:
    """Returns the drafter that `--drafter=name` means.

    Args:
      name: a name of `WITHOUT_FILES`, `exit:K`, a table (.npz), sorted text (.suffix), a folder, or
        `parallel:` and one; a folder with the name of a drafter can be given as ./NAME.
      target: the target.
      load: loads a model.
      reduced: makes a drafter of a model, with the shortlist and 8 bits that other options ask for.
    """
    if name in WITHOUT_FILES:
        return WITHOUT_FILES[name].make(target)
    if name.startswith("exit:"):
        return EarlyExitDrafter(target, _exit_layer(name, target.config.num_decoder_layers))
    if name.endswith(TABLES):
        return _load_table(name, target.vocabulary)
    if native_format.is_folder(places.make_path(name), "heads"):
        return HeadsDrafter.load(name, target)
    if name.startswith(PARALLEL):
        return ParallelDrafter(load(name.removeprefix(PARALLEL)))
    if native_format.is_folder(places.make_path(name), "eagle"):
        return EagleDrafter.load(name, target, load(str(places.make_path(name) / "model")))
    return reduced(load(name))


def make_traced_drafter(
    name: str, config: ModelConfig, load: Callable[[str], ModelDrafter]
) -> Drafter:
    """Returns the drafter that `--drafter=name` means, for a target whose parameters are traced.

    Args:
      name: as for `make_named_drafter`.
      config: the target's configuration; its sequences begin with 0.
      load: loads a model, and makes a drafter of it.
    """
    check_drafter_name(name)
    if name == SELF_INT8:
        return TracedSelf()
    if name in WITHOUT_FILES:  # they ask for nothing but the configuration
        target: Any = types.SimpleNamespace(config=config)
        return WITHOUT_FILES[name].make(target)
    if name.startswith("exit:"):
        return TracedExit(_exit_layer(name, config.num_decoder_layers), config)
    if name.endswith(TABLES):
        table = _load_table(name, None)
        table.check_ids(config.vocab_size, 0)
        return table
    if name.startswith(PARALLEL):
        return ParallelDrafter(load(name.removeprefix(PARALLEL)).model)
    if native_format.is_folder(places.make_path(name), "eagle"):
        got = f"{name}, which reads the states of the target it was trained on"
        raise ValueError(f"drafter: got {got}, expected another kind for a target under jit")
    heads = native_format.is_folder(places.make_path(name), "heads")
    return TracedHeads(name, config) if heads else load(name)


def check_drafter_name(name: str) -> None:
    """Raises ValueError for a name that means no drafter, before a large target is loaded."""
    if needs_no_model(name):
        return
    if name == PARALLEL:
        raise ValueError(f"drafter: got {name!r}, expected a folder after {PARALLEL}")
    try:
        loader.resolve(name.removeprefix(PARALLEL))
    except ValueError as error:
        missing, stop, advice = str(error).partition(". If a model")
        others = f"{', '.join(WITHOUT_FILES)}, exit:K, a table (.npz) or sorted text (.suffix)"
        raise ValueError(f"drafter: {missing}, {others}{stop}{advice}") from None


def _load_table(name: str, vocabulary: Vocabulary | None) -> StoredDrafter:
    """Returns the drafter in a file of n-grams or of sorted text."""
    kind: Any = NGramDrafter if name.endswith(NGRAMS) else SuffixDrafter
    return kind.load(name, vocabulary)


def _exit_layer(name: str, num_layers: int) -> int:
    expected = "exit:K with a number of decoder layers K"
    try:
        layers = int(name.removeprefix("exit:"))
    except ValueError:
        raise ValueError(f"drafter: got {name!r}, expected {expected}") from None
    if not 1 <= layers < num_layers:
        expected = "a target with more than one decoder layer"
        if num_layers > 1:
            expected = f"exit:K with K from 1 to {num_layers - 1}"
        expected += f" (the target has {num_layers} decoder layers)"
        raise ValueError(f"drafter: got {name!r}, expected {expected}")
    return layers
