"""Wide shallow models whose every token hangs on a last bit, for bitwise comparisons."""

import dataclasses

import numpy as np

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.models import weight_layouts
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config

V = 512
HEAD = "decoder/logits_dense/kernel"


def t5(width: int, vocab: int = V, **shape) -> T5Config:
    return T5Config(vocab, width, 2, 16, 1, 1, 32, **shape)


def gpt(width: int, vocab: int = V, **shape) -> GPTConfig:
    return GPTConfig(vocab, width, 2, 1, 32, num_positions=128, logits_via_embedding=False, **shape)


def gemma(width: int, vocab: int = V, **shape) -> GemmaConfig:
    """Shared keys, caps, windows, rotary positions, and norms of queries and keys."""
    caps = dict(attention_cap=20.0, logits_cap=30.0, windows=(5, 0), qk_norm=True)
    return GemmaConfig(vocab, width, 4, 2, 16, 2, 32, **caps, logits_via_embedding=False, **shape)


def bart(width: int, vocab: int = V, **shape) -> BartConfig:
    """Norms after each block and after the embedding, biases, and a bias of the logits."""
    return BartConfig(vocab, width, 2, 1, 1, 32, 128, logits_via_embedding=False, **shape)


def t5gemma(width: int, vocab: int = V, merged: bool = False) -> T5GemmaConfig:
    """The same with an encoder, to whose output the decoder attends apart, or `merged`."""
    own = dataclasses.asdict(gemma(width, vocab)) | dict(qk_norm=merged)
    shape = dict(num_encoder_layers=2, encoder_emb_dim=width, encoder_mlp_dim=32)
    heads = dict(encoder_num_heads=4, encoder_num_kv_heads=2, encoder_windows=(4, 0))
    return T5GemmaConfig(**own, **shape, **heads, merged_attention=merged)


def twins(config: ModelConfig, seed: int = 0, quantize: str | None = None) -> LanguageModel:
    """Returns a random model whose two greatest logits all but tie.

    The odd columns of its head equal the even ones up to last bits.
    """
    params, rng = LanguageModel.random(config, seed).params, np.random.default_rng(seed)
    weight = np.array(params["decoder"]["logits_dense"]["kernel"])
    even = weight[:, ::2]
    towards = rng.choice(np.float32([-np.inf, np.inf]), even.shape)
    weight[:, 1::2] = np.where(rng.random(even.shape) < 0.5, even, np.nextafter(even, towards))
    params["decoder"]["logits_dense"]["kernel"] = weight
    if quantize is not None:
        params = weight_layouts.round_params(params, packed_weights.input_bits(quantize))
    return LanguageModel(config, params, eos_ids=())
