"""Reads and writes models on disk: Hugging Face folders, T5X checkpoints and this package's own."""

from specdec_jax.checkpoints.converter import convert, save
from specdec_jax.checkpoints.loader import bundled, load, load_shape, load_vocabulary

__all__ = ["bundled", "convert", "load", "load_shape", "load_vocabulary", "save"]
