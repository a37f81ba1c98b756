"""Other libraries that decode the bundled target, where they are installed."""

import functools
import importlib.util
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax.checkpoints import converter
from specdec_jax.decoding.iteration_costs import count_cores
from tools.results.cases import NEW_TOKENS, load_target


def is_installed(*names: str) -> bool:
    """Returns whether all these libraries are installed."""
    return all(importlib.util.find_spec(name) for name in names)


@functools.cache
def write_huggingface() -> pathlib.Path:
    """Returns a folder with the bundled target in float32 in Hugging Face's format."""
    folder = pathlib.Path(tempfile.mkdtemp()) / "hf"
    converter.save(load_target("none"), folder, format="huggingface")
    return folder


def make_ctranslate2(ids: list[list[int]]) -> dict[str, Callable[[], list]]:
    """Returns calls of CTranslate2, with a translator of one thread a core; {} without it."""
    if not is_installed("ctranslate2", "transformers", "torch"):
        return {}
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    folder = write_huggingface()
    converted = folder.with_name("ct2")
    TransformersConverter(str(folder)).convert(str(converted))
    names = json.loads((converted / "shared_vocabulary.json").read_text(encoding="utf-8"))
    numbers = {name: number for number, name in enumerate(names)}
    tokens = [[names[i] for i in row] for row in ids]
    calls: dict[str, Callable[[], list]] = {}
    for kind in ("float32", "int8"):
        translator = ctranslate2.Translator(
            str(converted), compute_type=kind, inter_threads=count_cores() or 1, intra_threads=1
        )

        def translate(translator: Any = translator) -> list[list[int]]:
            results = translator.translate_batch(
                tokens,
                beam_size=1,
                max_batch_size=64,
                max_decoding_length=NEW_TOKENS,
                return_end_token=True,
            )
            return [[numbers[name] for name in result.hypotheses[0]] for result in results]

        calls[f"CTranslate2 {ctranslate2.__version__}, {kind}"] = translate
    return calls


def make_transformers(ids: list[list[int]]) -> dict[str, Callable[[], list]]:
    """Returns a call of transformers in float32, in batches of like length; {} without it."""
    if not is_installed("transformers", "torch"):
        return {}
    import torch
    import transformers

    model = transformers.T5ForConditionalGeneration.from_pretrained(write_huggingface()).eval()
    order = sorted(range(len(ids)), key=lambda number: len(ids[number]))

    def decode() -> list[list[int]]:
        found: list[list[int]] = [[] for _ in ids]
        for begin in range(0, len(order), 64):
            chosen = order[begin : begin + 64]
            longest = max(len(ids[number]) for number in chosen)
            rows = [ids[number] + [0] * (longest - len(ids[number])) for number in chosen]
            given = torch.tensor(rows)
            how = dict(do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS)
            with torch.inference_mode():
                made = model.generate(given, attention_mask=(given != 0).long(), **how)
            for number, row in zip(chosen, made[:, 1:].tolist(), strict=True):
                found[number] = row[: row.index(1) + 1] if 1 in row else row
        return found

    return {f"transformers {transformers.__version__}, float32, batches of 64": decode}


def make_encoders(config: Any, folder: str) -> dict[str, Callable[[list[int]], Any]]:
    """Returns calls of other libraries' encoders of a T5 of this shape; {} without them.

    Args:
      config: the shape.
      folder: an empty folder for the model that CTranslate2 reads.
    """
    if not is_installed("transformers", "torch"):
        return {}
    import torch
    import transformers

    model = _make_t5(config.replace(num_decoder_layers=1))

    def encode(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model.encoder(torch.tensor([ids])).last_hidden_state.numpy()

    calls: dict[str, Callable[[list[int]], Any]] = {
        f"transformers {transformers.__version__}": encode
    }
    if not is_installed("ctranslate2"):
        return calls
    import ctranslate2
    from ctranslate2.converters.transformers import T5Loader
    from ctranslate2.specs import transformer_spec

    spec = transformer_spec.TransformerEncoderModelSpec(T5Loader().get_model_spec(model).encoder)
    spec.register_vocabulary(_name_ids(config))
    spec.config.unk_token = "<2>"
    spec.validate()
    spec.optimize()
    path = pathlib.Path(folder) / "encoder"
    path.mkdir()
    spec.save(str(path))
    threads = count_cores() or 1
    encoder = ctranslate2.Encoder(str(path), compute_type="float32", intra_threads=threads)

    def encode_by_ctranslate2(ids: list[int]) -> Any:
        return np.array(encoder.forward_batch([ids]).last_hidden_state)

    given = [7, 5, 9, 11]
    error = np.max(np.abs(encode_by_ctranslate2(given) - encode(given)))
    assert error < 1e-3, f"CTranslate2's encoder differs from transformers' by {error}"
    return calls | {f"CTranslate2 {ctranslate2.__version__}": encode_by_ctranslate2}


def make_decoder(
    config: Any, folder: pathlib.Path, new_tokens: int
) -> dict[str, Callable[[list[int]], int]]:
    """Returns a call of CTranslate2 in int8 that decodes an input; it returns the tokens' number.

    {} without it.

    Args:
      config: the shape of a T5, which gets random weights.
      folder: an empty folder for the model that CTranslate2 reads.
      new_tokens: the number of new tokens.
    """
    if not is_installed("ctranslate2", "transformers", "torch"):
        return {}
    import ctranslate2
    from ctranslate2.converters.transformers import T5Loader

    names, spec = _name_ids(config), T5Loader().get_model_spec(_make_t5(config))
    spec.register_source_vocabulary(names)
    spec.register_target_vocabulary(names)
    pad, eos, unknown = names[:3]
    spec.config.bos_token = spec.config.decoder_start_token = pad
    spec.config.eos_token, spec.config.unk_token = eos, unknown
    spec.validate()
    spec.optimize(quantization="int8")
    spec.save(str(folder))
    threads = count_cores() or 1
    translator = ctranslate2.Translator(str(folder), compute_type="int8", intra_threads=threads)
    how = dict(beam_size=1, max_decoding_length=new_tokens, min_decoding_length=new_tokens)

    def decode(ids: list[int]) -> int:
        (result,) = translator.translate_batch([[names[i] for i in ids]], **how)
        return len(result.hypotheses[0])

    return {f"CTranslate2 {ctranslate2.__version__}, int8": decode}


def _make_t5(config: Any) -> Any:
    """Returns a T5 of transformers of this shape, with random weights."""
    import transformers

    shape = transformers.T5Config(
        vocab_size=config.vocab_size,
        d_model=config.emb_dim,
        d_kv=config.head_dim,
        d_ff=config.mlp_dim,
        num_layers=config.num_encoder_layers,
        num_decoder_layers=config.num_decoder_layers,
        num_heads=config.num_heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    return transformers.T5ForConditionalGeneration(shape).eval()


def _name_ids(config: Any) -> list[str]:
    """Returns a name for each id of a vocabulary that has none."""
    return [f"<{number}>" for number in range(config.vocab_size)]
