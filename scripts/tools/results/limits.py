"""A stage about limits: rates of reading and of arithmetic, beside those that NumPy reaches.

NumPy stands for the machine: each core finds the maximum of its part of an array, again and again,
or NumPy's BLAS library multiplies matrices on all cores. NumPy has no fast product of int8, so for
whole files our own products alone stand there. Rates are timed in turn, and a share is one of the
same pass.
"""

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.analysis import matmul_roofline, timing
from specdec_jax.analysis.matmul_roofline import Products
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.decoding.inputs import encode
from specdec_jax.models.families import PRESETS
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from tools.results import encoders, scaling, whole_files
from tools.results.cases import NEW_TOKENS, forget_programs, load_target, make_bundled
from tools.results.stage import Row, Rows, Settings

_LENGTH = 512  # tokens of the encoder's input
_VOCABULARY = 262144  # of the model with the most weights
_ROWS = 64  # of a batch
_COPIES = 4  # of the package's sentences, for a file of many batches
_PRODUCTS = 8  # by NumPy, of which the first wakes its threads


class Work(NamedTuple):
    """What is timed.

    Attributes:
      call: does it `steps` times.
      amount: bytes that a step reads, or with `calculates` operations.
      limit: name of the work whose rate this one's is a share of; None for NumPy's own.
    """

    call: Callable[[], Any]
    steps: int
    amount: float
    limit: str | None = None
    calculates: bool = False


def measure_limits(settings: Settings) -> Rows:
    """Measures steps that read weights, and encoders and wide calls, which calculate."""
    works: dict[str, Work] = {}
    forget_programs()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for form, label in (("int8", "int8"), ("none", "float32")):
            works |= list_steps(label, load_target(form), pool)
        large, _ = scaling.make_models(_VOCABULARY)
        works |= list_products(f"vocabulary of {_VOCABULARY:,}", large, pool)
        works |= list_calculations()
        rows = time_works(works, settings.choose(7, 5))
    scaling.make_models.cache_clear()
    return {"limits": rows}


def list_steps(
    label: str, target: LanguageModel, pool: concurrent.futures.Executor
) -> dict[str, Work]:
    """Returns products and whole calls of plain and speculative decoding of one row."""
    works, how = list_products(label, target, pool), dict(max_new_tokens=NEW_TOKENS)
    reading, products = works
    plain = timing.iteration_state(target, None, 1, 16, 0, **how)
    drafting = timing.iteration_state(target, make_bundled(), 1, 16, 4, **how)
    calls = {
        f"{label}, plain": timing.iteration_variant(*plain),
        f"{label}, call over 5 positions": timing.call_variant(*drafting),
    }
    for name, call in calls.items():
        works[name] = Work(call, timing.STEPS, works[products].amount, reading)
    return works


def list_products(
    label: str, target: LanguageModel, pool: concurrent.futures.Executor
) -> dict[str, Work]:
    """Returns NumPy's reading of as many bytes as a step's weights have, and the products alone."""
    (call,) = matmul_roofline.bare_variants(target, None, 1, (0,)).values()
    amount = Products.from_network(target.network).nbytes
    reading = f"NumPy reads {amount / 1e6:,.0f} MB"
    parts = np.array_split(np.ones(amount // 4, np.float32), os.cpu_count() or 1)

    def read() -> None:
        for _ in pool.map(lambda part: [part.max() for _ in range(timing.STEPS)], parts):
            pass

    works = {reading: Work(read, timing.STEPS, amount)}
    return works | {f"{label}, products alone": Work(call, timing.STEPS, amount, reading)}


def list_calculations() -> dict[str, Work]:
    """Returns NumPy's product, an encoder, and what the rows of a batch calculate."""
    config: Any = PRESETS[encoders.PRESET].replace(dtype="float32")
    model = LanguageModel.random(config, eos_ids=(), name=encoders.PRESET)
    width, hidden = config.emb_dim, 2 * config.mlp_dim
    shapes = (_LENGTH, width), (width, hidden)
    x, weight = (np.random.default_rng(0).random(shape, np.float32) for shape in shapes)
    product = f"NumPy multiplies [{_LENGTH}, {width}] by [{width}, {hidden}]"
    operations = 2.0 * _LENGTH * width * hidden

    def multiply() -> None:
        for _ in range(_PRODUCTS):
            np.matmul(x, weight)

    works = {product: Work(multiply, _PRODUCTS, operations, None, True)}
    ids = np.random.default_rng(_LENGTH).integers(3, config.vocab_size, _LENGTH).tolist()
    encode = functools.partial(encoders.make_encoder(model, _LENGTH), ids)
    works[f"encoder, {_LENGTH} tokens"] = Work(
        encode, 1, count_encoder(config, _LENGTH), product, True
    )
    for label, form in (("float32", "none"), ("`w8a8`", "w8a8")):
        works |= list_batches(label, load_target(form), product)
    return works


def list_batches(label: str, target: LanguageModel, product: str) -> dict[str, Work]:
    """Returns products of the rows of a batch, and a sentence of a file in such batches.

    The first is a share of NumPy's `product`, the second of the first.
    """
    products = f"{label}, products alone of {_ROWS} rows"
    (alone,) = matmul_roofline.bare_variants(target, None, _ROWS, (0,)).values()
    config: Any = target.config
    weights = Products.from_network(target.network).size
    ids = encode(target, read_built_in_sentences() * _COPIES, _LENGTH)
    decode = functools.partial(whole_files.decode_file, target, ids, _ROWS)
    operations = count_file(config, weights, ids, decode()) / len(ids)
    return {
        products: Work(alone, timing.STEPS, 2.0 * _ROWS * weights, product, True),
        f"{label}, a sentence of a file, batches of {_ROWS}": Work(
            decode, len(ids), operations, products, True
        ),
    }


def count_file(config: T5Config, weights: int, ids: list, outputs: list) -> float:
    """Returns the operations of a file: of a step with so many `weights` for every new token.

    Those of attention over earlier tokens, and those for padding, are not counted.
    """
    inner = config.num_heads * config.head_dim
    keys = config.num_decoder_layers * 4.0 * config.emb_dim * inner  # and values, of each input
    read = sum(count_encoder(config, len(one)) + keys * len(one) for one in ids)
    return read + 2.0 * weights * sum(map(len, outputs))


def count_encoder(config: T5Config, length: int) -> float:
    """Returns the operations of the products and of attention, for one input."""
    inner = config.num_heads * config.head_dim
    weights = config.emb_dim * (4 * inner + (1 + len(config.mlp_activations)) * config.mlp_dim)
    return config.num_encoder_layers * (2.0 * length * weights + 4.0 * inner * length**2)


def time_works(works: Mapping[str, Work], passes: int) -> dict[str, Row]:
    """Returns milliseconds of a step, its rate in thousand millions a second, and its share."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(-1, passes):  # the first compiles
        for name in timing.rotate(works, turn):
            start = time.perf_counter()
            jax.block_until_ready(works[name].call())
            if turn >= 0:
                seconds[name].append((time.perf_counter() - start) / works[name].steps)
    rates = {name: work.amount / np.array(seconds[name]) for name, work in works.items()}
    rows: dict[str, Row] = {}
    for name, work in works.items():
        median, rate = float(np.median(seconds[name])), float(np.median(rates[name]))
        row: Row = {"ms": 1e3 * median, "rate": rate / 1e9, "calculates": work.calculates}
        if work.limit is not None:
            row["share"] = timing.summarize(rates[name] / rates[work.limit])
            row["of"] = "NumPy's" if work.limit.startswith("NumPy") else "the products'"
        rows[name] = row
    return rows


def format_limit(row: Row) -> str:
    """Returns the time, the rate, and its share of the limit's."""
    unit = "thousand million operations" if row["calculates"] else "GB"
    text = f"{row['ms']:.2f} ms, {row['rate']:.0f} {unit} a second"
    if share := row.get("share"):
        whose, spread = row.get("of", "NumPy's"), f"{share['least']:.2f} to {share['most']:.2f}"
        text += f", {share['median']:.2f} of {whose} ({spread})"
    return text
