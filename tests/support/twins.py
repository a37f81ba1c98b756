"""Wide shallow models whose every token hangs on a last bit, for bitwise comparisons."""

import numpy as np

from specdec_jax.backends.cpu import packed_weights
from specdec_jax.models import weight_layouts
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config

V = 512
HEAD = "decoder/logits_dense/kernel"


def t5(width: int, vocab: int = V, **shape) -> T5Config:
    return T5Config(vocab, width, 2, 16, 1, 1, 32, **shape)


def gpt(width: int, vocab: int = V, **shape) -> GPTConfig:
    return GPTConfig(vocab, width, 2, 1, 32, num_positions=128, logits_via_embedding=False, **shape)


def twins(
    config: T5Config | GPTConfig, seed: int = 0, quantize: str | None = None
) -> LanguageModel:
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
