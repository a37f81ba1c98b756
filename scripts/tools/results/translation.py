"""A stage about opus-mt's shape with random weights, beside transformers and CTranslate2.

Only its times mean anything: no output ends before its limit, and drafted tokens are accepted at
random. All libraries have the same shape, each with random weights of its own.
"""

import functools
import json
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from specdec_jax.checkpoints.loader import BUNDLED
from specdec_jax.decoding.iteration_costs import count_cores
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.bart import BART_PRESETS, BartConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from tools.results.cases import Case, drafts, time_cases
from tools.results.peers import is_installed
from tools.results.shapes import INPUT_IDS
from tools.results.stage import Row, Rows, Settings

NEW_TOKENS, ALPHA = 32, 0.8
SHAPE = BART_PRESETS["marian/opus"]
EOS, PAD = 0, SHAPE.pad_id
Decode = Callable[[list[int]], int]  # decodes an input, and returns the number of new tokens


@functools.cache
def make_target(form: str, shape: BartConfig = SHAPE) -> LanguageModel:
    """Returns the target with random weights: "float32", or "int8"."""
    quantize = None if form == "float32" else form
    config = shape.replace(dtype="float32")
    return LanguageModel.random(
        config, eos_ids=(), name=f"opus-mt's shape, {form}", quantize=quantize
    )


def make_drafter(shape: BartConfig = SHAPE) -> ModelDrafter:
    """Returns a T5 of one layer that reads the target's encoder output."""
    config = T5Config(
        shape.vocab_size,
        emb_dim=256,
        num_heads=4,
        head_dim=64,
        num_encoder_layers=0,
        num_decoder_layers=1,
        mlp_dim=1024,
        encoder_dim=shape.emb_dim,
    )
    return ModelDrafter(LanguageModel.random(config, 1, eos_ids=()), shortlist=8000)


def write_marian(folder: pathlib.Path, shape: BartConfig = SHAPE) -> None:
    """Writes a model of transformers with random weights, and a tokenizer of its size.

    CTranslate2's converter reads the names of ids from the tokenizer.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (("layers", 6), ("ffn_dim", shape.mlp_dim))
    } | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), shape.num_heads)
    ids = dict(pad_token_id=shape.pad_id, eos_token_id=EOS, decoder_start_token_id=shape.pad_id)
    config = transformers.MarianConfig(
        vocab_size=shape.vocab_size,
        d_model=shape.emb_dim,
        max_position_embeddings=shape.num_positions,
        activation_function="swish",
        scale_embedding=True,
        **stacks,
        **ids,
    )
    transformers.MarianMTModel(config).save_pretrained(folder)
    names = ["</s>", "<unk>", *(f"w{i}" for i in range(2, shape.vocab_size - 1)), "<pad>"]
    vocab = {name: i for i, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    for name in ("source.spm", "target.spm"):
        shutil.copy(BUNDLED / "ende" / "spiece.model", folder / name)


def make_peers(folder: pathlib.Path, shape: BartConfig = SHAPE) -> dict[str, Decode]:
    """Returns calls of the other libraries for one input, {} where they are not installed."""
    if not is_installed("transformers", "torch", "sentencepiece"):
        return {}
    import torch
    import transformers

    write_marian(folder, shape)
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    how = dict(do_sample=False, num_beams=1, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    def decode(row: list[int]) -> int:
        with torch.inference_mode():
            made = model.generate(torch.tensor([row]), **how, forced_eos_token_id=None)
        return made.shape[1] - 1

    calls: dict[str, Decode] = {f"transformers {transformers.__version__}, float32": decode}
    return calls | (_make_ctranslate2(folder) if is_installed("ctranslate2") else {})


def _make_ctranslate2(folder: pathlib.Path) -> dict[str, Decode]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    converted = folder.with_name("ct2")
    TransformersConverter(str(folder)).convert(str(converted))
    names = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    tokens = {i: name for name, i in names.items()}
    calls: dict[str, Decode] = {}
    for kind in ("float32", "int8"):
        threads = count_cores() or 1
        translator = ctranslate2.Translator(
            str(converted), compute_type=kind, intra_threads=threads
        )

        def decode(row: list[int], translator: ctranslate2.Translator = translator) -> int:
            (result,) = translator.translate_batch(
                [[tokens[i] for i in row]],
                beam_size=1,
                max_decoding_length=NEW_TOKENS,
                min_decoding_length=NEW_TOKENS,
            )
            return len(result.hypotheses[0])

        calls[f"CTranslate2 {ctranslate2.__version__}, {kind}"] = decode
    return calls


def time_peer(decode: Decode, inputs: list[list[int]], passes: int) -> Row:
    """Returns the median time of a new token over passes, the first of which is not counted."""
    found = []
    for _ in range(passes + 1):
        begin = time.perf_counter()
        tokens = sum(decode(row) for row in inputs)
        found.append(1000 * (time.perf_counter() - begin) / tokens)
    return {"ms_per_token": statistics.median(found[1:])}


def measure_opus(settings: Settings) -> Rows:
    """Measures whole decodes of opus-mt's shape, one sentence at a time."""
    options = dict(verifier="synthetic", synthetic_alpha=ALPHA)
    cases = {"plain, float32": Case("float32"), "plain, int8": Case("int8")}
    for form in ("float32", "int8"):
        name = f"γ = 3, {form}, accepted with α = {ALPHA:.2f}"
        cases[name] = drafts(3, form, make_drafter, **options)
    random = np.random.default_rng(0)
    shape = settings.choose(8, 2), INPUT_IDS
    inputs = random.integers(3, SHAPE.vocab_size - 1, shape).tolist()
    passes = settings.choose(5, 2)
    rows = time_cases(cases, inputs, passes, make_target, new_tokens=NEW_TOKENS)
    with tempfile.TemporaryDirectory() as temporary:
        peers = make_peers(pathlib.Path(temporary) / "marian")
        rows |= {name: time_peer(decode, inputs, passes) for name, decode in peers.items()}
    return {"rows": rows}


def format_opus(row: Row) -> str:
    """Returns the cell of a way of decoding."""
    text = f"{row['ms_per_token']:.2f} ms a token"
    if "improvement" not in row:
        return text
    gain = row["improvement"]
    return f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f}), {text}"
