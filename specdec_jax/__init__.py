"""Exact, fast decoding for T5-family models in JAX: speculative decoding (Leviathan, Kalman and Matias 2023)."""

from specdec_jax.checkpoints import bundled, load, save
from specdec_jax.drafters.heads import HeadsDrafter
from specdec_jax.drafters.lookup import NGramDrafter, PromptLookupDrafter, RandomDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.generate import GenerationResult, Piece, Stats, advance, finish, generate, stream, trace, warm_up
from specdec_jax.models.base import LanguageModel
from specdec_jax.models.heads import HeadsConfig
from specdec_jax.models.t5 import PRESETS, T5Config
from specdec_jax.request import UnsupportedCombination, prepare
from specdec_jax.sampling import SamplingConfig

__version__ = "0.1.0"

__all__ = [
    "PRESETS",
    "GenerationResult",
    "HeadsConfig",
    "HeadsDrafter",
    "LanguageModel",
    "ModelDrafter",
    "NGramDrafter",
    "Piece",
    "PromptLookupDrafter",
    "RandomDrafter",
    "SamplingConfig",
    "Stats",
    "T5Config",
    "UnsupportedCombination",
    "advance",
    "bundled",
    "finish",
    "generate",
    "load",
    "prepare",
    "save",
    "stream",
    "trace",
    "warm_up",
]
