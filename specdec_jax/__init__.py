"""Exact, fast decoding for T5-family and GPT-like models in JAX: speculative decoding (Leviathan, Kalman and Matias 2023)."""

from specdec_jax.checkpoints import bundled, convert, load, save
from specdec_jax.compatibility import UnsupportedCombination
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.drafters.exit import EarlyExitDrafter
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookup import AssistedNGramDrafter, NGramDrafter, PromptLookupDrafter, RandomDrafter
from specdec_jax.drafters.model import ModelDrafter, shortlist_from_counts
from specdec_jax.gamma import Confidence, Entropy, EntropyBound, Heuristic, Renewal
from specdec_jax.generate import (
    GenerationResult,
    NotNumbers,
    Piece,
    Stats,
    advance,
    finish,
    generate,
    stream,
    trace,
    warm_up,
)
from specdec_jax.jobs import Output, decode_stream
from specdec_jax.models.base import PRESETS, LanguageModel
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.t5 import T5Config
from specdec_jax.request import prepare
from specdec_jax.sampling import SamplingConfig
from specdec_jax.sharding import make_mesh

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "AssistedNGramDrafter",
    "Confidence",
    "EarlyExitDrafter",
    "Entropy",
    "EntropyBound",
    "GPTConfig",
    "GenerationResult",
    "HeadsConfig",
    "HeadsDrafter",
    "Heuristic",
    "HorizontalCascade",
    "LanguageModel",
    "ModelDrafter",
    "NGramDrafter",
    "NotNumbers",
    "Output",
    "Piece",
    "PromptLookupDrafter",
    "RandomDrafter",
    "Renewal",
    "SamplingConfig",
    "Stats",
    "T5Config",
    "UnsupportedCombination",
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
