"""Exact, fast decoding for T5-family and GPT-like models in JAX: speculative decoding.

The algorithm is Leviathan, Kalman and Matias's (2023). Importing the package takes milliseconds:
the module of a public name, and JAX with it, is imported when the name is first used.
"""

# ruff: noqa: F401
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test compares it with the table below
    from specdec_jax.checkpoints.converter import convert, save
    from specdec_jax.checkpoints.loader import bundled, load
    from specdec_jax.decoding.checks import UnsupportedCombination
    from specdec_jax.decoding.continuous_batching import Output, decode_stream
    from specdec_jax.decoding.generate import advance, generate, prepare, warm_up
    from specdec_jax.decoding.generation_config import GenerationConfig
    from specdec_jax.decoding.results import GenerationResult, NonFiniteLogitsError, Stats, finish
    from specdec_jax.decoding.stream import Piece, stream
    from specdec_jax.decoding.trace import trace
    from specdec_jax.drafters.assisted import AssistedNGramDrafter
    from specdec_jax.drafters.best_of import BestOf
    from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
    from specdec_jax.drafters.eagle import EagleDrafter
    from specdec_jax.drafters.early_exit import EarlyExitDrafter
    from specdec_jax.drafters.gated import GatedDrafter
    from specdec_jax.drafters.heads import HeadsDrafter
    from specdec_jax.drafters.lookahead import LookaheadDecoding
    from specdec_jax.drafters.merged import MergedDrafter
    from specdec_jax.drafters.model import ModelDrafter
    from specdec_jax.drafters.ngram import NGramDrafter
    from specdec_jax.drafters.parallel import ParallelDrafter
    from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
    from specdec_jax.drafters.random_tokens import RandomDrafter
    from specdec_jax.drafters.recycling import TokenRecycling
    from specdec_jax.drafters.self_drafting import SelfDrafter
    from specdec_jax.drafters.shortlist import shortlist_from_counts
    from specdec_jax.drafters.suffix import SuffixDrafter
    from specdec_jax.drafters.suffix_history import SuffixHistory
    from specdec_jax.models.families import PRESETS
    from specdec_jax.models.gpt import GPTConfig
    from specdec_jax.models.heads import HeadsConfig
    from specdec_jax.models.language_model import LanguageModel
    from specdec_jax.models.meshes import make_mesh
    from specdec_jax.models.model_defaults import ModelDefaults
    from specdec_jax.models.t5 import T5Config
    from specdec_jax.speculative.drafter import Drafter
    from specdec_jax.speculative.policies import (
        Calibrated,
        Confidence,
        CostAware,
        Entropy,
        EntropyBound,
        Heuristic,
    )
    from specdec_jax.speculative.policy import Policy
    from specdec_jax.speculative.sampling import SamplingConfig
    from specdec_jax.speculative.trees import Chains, DynamicTree, Tree
    from specdec_jax.speculative.verifier import Verifier
    from specdec_jax.training.online import OnlineDistillation

__version__ = "0.1.0"

# The public names of each module.
_NAMES = {
    "checkpoints.converter": "convert save",
    "checkpoints.loader": "bundled load",
    "decoding.checks": "UnsupportedCombination",
    "decoding.continuous_batching": "Output decode_stream",
    "decoding.generate": "advance generate prepare warm_up",
    "decoding.generation_config": "GenerationConfig",
    "decoding.results": "GenerationResult NonFiniteLogitsError Stats finish",
    "decoding.stream": "Piece stream",
    "decoding.trace": "trace",
    "drafters.assisted": "AssistedNGramDrafter",
    "drafters.best_of": "BestOf",
    "drafters.cascade": "HorizontalCascade VerticalCascade",
    "drafters.eagle": "EagleDrafter",
    "drafters.early_exit": "EarlyExitDrafter",
    "drafters.gated": "GatedDrafter",
    "drafters.heads": "HeadsDrafter",
    "drafters.lookahead": "LookaheadDecoding",
    "drafters.merged": "MergedDrafter",
    "drafters.model": "ModelDrafter",
    "drafters.ngram": "NGramDrafter",
    "drafters.parallel": "ParallelDrafter",
    "drafters.prompt_lookup": "PromptLookupDrafter",
    "drafters.random_tokens": "RandomDrafter",
    "drafters.recycling": "TokenRecycling",
    "drafters.self_drafting": "SelfDrafter",
    "drafters.shortlist": "shortlist_from_counts",
    "drafters.suffix": "SuffixDrafter",
    "drafters.suffix_history": "SuffixHistory",
    "models.families": "PRESETS",
    "models.model_defaults": "ModelDefaults",
    "models.gpt": "GPTConfig",
    "models.heads": "HeadsConfig",
    "models.language_model": "LanguageModel",
    "models.meshes": "make_mesh",
    "models.t5": "T5Config",
    "speculative.drafter": "Drafter",
    "speculative.policies": "Calibrated Confidence CostAware Entropy EntropyBound Heuristic",
    "speculative.policy": "Policy",
    "speculative.sampling": "SamplingConfig",
    "speculative.trees": "Chains DynamicTree Tree",
    "speculative.verifier": "Verifier",
    "training.online": "OnlineDistillation",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    """Returns the module's names, those not yet imported too."""
    return sorted({*globals(), *__all__})
