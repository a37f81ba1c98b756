"""Exact, fast decoding for T5-family and GPT-like models in JAX: speculative decoding
(Leviathan, Kalman and Matias 2023)."""

from specdec_jax.checkpoints.converter import convert, save
from specdec_jax.checkpoints.loader import bundled, load
from specdec_jax.decoding.checks import UnsupportedCombination
from specdec_jax.decoding.continuous_batching import Output, decode_stream
from specdec_jax.decoding.generate import generate, warm_up
from specdec_jax.decoding.loop import advance
from specdec_jax.decoding.request import prepare
from specdec_jax.decoding.results import GenerationResult, NonFiniteLogitsError, Stats, finish
from specdec_jax.decoding.stream import Piece, stream
from specdec_jax.decoding.trace import trace
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.drafters.early_exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.merged import MergedDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.drafters.shortlist import shortlist_from_counts
from specdec_jax.models.families import PRESETS
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.meshes import make_mesh
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import (
    Confidence,
    CostAware,
    Entropy,
    EntropyBound,
    Heuristic,
    Policy,
)
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import Chains, DynamicTree, Tree
from specdec_jax.speculative.verifier import Verifier

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AssistedNGramDrafter",
    "Chains",
    "Confidence",
    "CostAware",
    "Drafter",
    "DynamicTree",
    "EarlyExitDrafter",
    "Entropy",
    "EntropyBound",
    "GPTConfig",
    "GenerationConfig",
    "GenerationResult",
    "HeadsConfig",
    "HeadsDrafter",
    "Heuristic",
    "HorizontalCascade",
    "LanguageModel",
    "MergedDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "NonFiniteLogitsError",
    "Output",
    "Piece",
    "Policy",
    "PromptLookupDrafter",
    "RandomDrafter",
    "SamplingConfig",
    "SelfDrafter",
    "Stats",
    "T5Config",
    "Tree",
    "UnsupportedCombination",
    "Verifier",
    "VerticalCascade",
    "advance",
    "bundled",
    "convert",
    "decode_stream",
    "finish",
    "generate",
    "load",
    "make_mesh",
    "prepare",
    "save",
    "shortlist_from_counts",
    "stream",
    "trace",
    "warm_up",
]
