"""One call for each public way into the package; what it returns can be compared."""

import functools
import pathlib
import tempfile
from collections.abc import Callable

import jax
import numpy as np
from make_checkpoints import TINY
from random_heads_of import random_heads
from toy_models import Words, noisy_copy, tiny_t5
from toy_training import config_of, write_language

import specdec_jax as sd
from specdec_jax.decoding.under_jit import Decoder
from specdec_jax.decoding.under_jit_beams import BeamDecoder
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.training import train

V, KEY = 24, jax.random.key(3)
INPUTS = [[3, 4, 5, 1], [7, 1]]
SAMPLED = sd.SamplingConfig(
    temperature=0.9,
    top_k=12,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    no_repeat_ngram=3,
    min_new_tokens=2,
    logit_bias={4: 0.5},
    forbidden_tokens=(7,),
    forced_tokens={0: 5},
)


@functools.cache
def target() -> sd.LanguageModel:
    return noisy_copy(tiny_t5(0, V), 2.0)


@functools.cache
def drafter() -> sd.ModelDrafter:
    return sd.ModelDrafter(noisy_copy(target(), 0.1, 1))


@functools.cache
def gpt() -> sd.LanguageModel:
    config = GPTConfig(V, 16, 2, 1, 32, num_positions=64)
    return sd.LanguageModel.random(config, 0, eos_ids=(1,))


def decoded(result) -> tuple:
    scores = () if result.scores is None else result.scores
    return (
        result.tokens,
        result.lengths,
        result.log_probs,
        result.adjusted_log_probs,
        result.stats.accepted,
        scores,
    )


@functools.cache
def params() -> dict:
    return target().params


@functools.cache
def speaking() -> sd.LanguageModel:
    model = noisy_copy(target(), 0.0)
    model.vocabulary = Words()
    return model


@functools.cache
def heads() -> sd.HeadsDrafter:
    return random_heads(target())


def generate(**options) -> tuple:
    return decoded(
        sd.generate(target(), INPUTS, **{"gamma": 3, "max_new_tokens": 8, "key": KEY, **options})
    )


def drafted(**options) -> tuple:
    return generate(drafter=drafter(), **options)


def stepped() -> tuple:
    state, request = sd.prepare(target(), INPUTS, drafter=drafter(), gamma=2, max_new_tokens=6)
    state = sd.advance(request.network, request.drafter, state, np.int32(2))
    state = sd.advance(request.network, request.drafter, state, np.int32(100))
    return decoded(sd.finish(target(), state, request))


def table(order: int) -> sd.NGramDrafter:
    return sd.NGramDrafter.count(INPUTS, V, order, sampled=True)


def streamed(**options) -> list:
    return [
        (piece.row, piece.tokens)
        for piece in sd.stream(speaking(), INPUTS, max_new_tokens=6, **options)
    ]


def many(**options) -> list:
    inputs = np.random.default_rng(0).integers(2, V, (9, 5))
    result = sd.decode_stream(target(), inputs, batch_size=2, max_new_tokens=6, **options)
    return [
        (place, outputs[0].tokens, outputs[0].log_probs)
        for place, outputs in sorted(result, key=lambda o: o[0])
    ]


def under_jit(decoder) -> tuple:
    inputs, prompts = np.array([[3, 4, 5, 1], [7, 1, 0, 0]], np.int32), np.zeros((2, 7), np.int32)
    call = jax.jit(lambda *arguments: decoder.decode(*arguments[:3], 1, arguments[3]))
    return tuple(jax.tree.map(np.asarray, call(params(), inputs, prompts, KEY)))


def trained() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        write_language(pathlib.Path(folder))
        config = config_of(
            folder, pathlib.Path(folder, "run"), steps=6, save_every=6, evaluate_every=6
        )
        return jax.tree.map(np.asarray, train.fit(config))


def reloaded() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        sd.save(target(), f"{folder}/model")
        sd.convert(f"{folder}/model", f"{folder}/other")
        return jax.tree.map(np.asarray, sd.load(f"{folder}/other", "float32").params)


CALLS: dict[str, Callable[[], object]] = {
    "plain": generate,
    "sampled": lambda: generate(
        drafter=drafter(), sampling=SAMPLED, num_samples=2, decoder_prefix=[[3], []]
    ),
    "policy": lambda: generate(drafter=drafter(), gamma=sd.Heuristic(3)),
    "ngrams": lambda: generate(
        drafter=sd.NGramDrafter.count([[3, 4, 5, 6, 3, 4]] * 3, V, 2, sampled=True)
    ),
    "heads": lambda: generate(drafter=heads()),
    "exit": lambda: generate(drafter=sd.EarlyExitDrafter(target(), 1)),
    "tree": lambda: generate(
        drafter=drafter(), tree=sd.Tree.uniform((2, 2)), gamma="auto", sampling=SAMPLED
    ),
    "beams": lambda: generate(num_beams=3, gamma="auto"),
    "gpt": lambda: decoded(
        sd.generate(gpt(), INPUTS, drafter=sd.PromptLookupDrafter(1), max_new_tokens=6)
    ),
    "prepare, advance, finish": stepped,
    "stream": lambda: streamed(drafter=drafter(), gamma=2, stop=["w9"]),
    "decode_stream": lambda: many(drafter=drafter(), gamma=2, sampling=SAMPLED),
    "trace": lambda: sd.trace(target(), INPUTS[0], drafter=drafter(), gamma=2, max_new_tokens=6),
    "warm_up": lambda: sd.warm_up(
        target(), drafter=drafter(), gamma=2, max_new_tokens=6, max_input_length=8
    ),
    "logits": lambda: (
        np.asarray(target().logits([[3, 4, 0]], [[0, 5, 6]])),
        np.asarray(gpt().logits([[3, 4, 0]], [[0, 5, 6]])),
    ),
    "random": lambda: jax.tree.map(np.asarray, sd.LanguageModel.random(TINY, 4).params),
    "dummy": lambda: jax.tree.map(np.asarray, sd.LanguageModel.dummy(TINY).params),
    "save, convert, load": reloaded,
    "digests": lambda: tuple(
        map(ord, sd.LanguageModel.random(TINY, 4).fingerprint + noisy_copy(gpt(), 0.0).contents)
    ),
    "traced": lambda: under_jit(
        Decoder(target().config, drafter(), gamma=2, sampling=sd.SamplingConfig(temperature=1.0))
    ),
}
# Others with the same ways in.
MORE: dict[str, Callable[[], object]] = {
    **{
        f"verifier {name}": functools.partial(drafted, sampling=SAMPLED, verifier=name, **options)
        for name, options in (
            ("token", {}),
            ("gumbel", {}),
            ("rejection", {}),
            ("typical", {}),
            ("lenient", {"lenience": 0.5}),
        )
    },
    **{
        f"policy {type(policy).__name__}": functools.partial(drafted, gamma=policy)
        for policy in (
            sd.Confidence(3),
            sd.Entropy(3),
            sd.EntropyBound(3),
            sd.CostAware(3),
            sd.Calibrated(3),
        )
    },
    "gamma per input": lambda: generate(drafter=drafter(), gamma=[1, 2], max_new_tokens=[5, 3]),
    "shortlist": lambda: generate(drafter=sd.ModelDrafter(drafter().models[0], shortlist=12)),
    "self": lambda: generate(drafter=sd.SelfDrafter(target())),
    "merged": lambda: generate(
        drafter=sd.MergedDrafter(drafter(), table(2)), tree=sd.Tree.uniform((2, 2)), gamma="auto"
    ),
    "lookup": lambda: generate(drafter=sd.PromptLookupDrafter(1)),
    "assisted": lambda: generate(drafter=sd.AssistedNGramDrafter()),
    "recycling": lambda: generate(drafter=sd.TokenRecycling(V)),
    "look-ahead": lambda: generate(drafter=sd.LookaheadDecoding(), gamma="auto"),
    "gated": lambda: generate(drafter=sd.GatedDrafter(sd.PromptLookupDrafter(1))),
    "random drafter": lambda: generate(drafter=sd.RandomDrafter(V)),
    "vertical": lambda: generate(drafter=sd.VerticalCascade(drafter(), table(2), 2)),
    "horizontal": lambda: generate(drafter=sd.HorizontalCascade(drafter(), table(2), 2)),
    "dynamic tree": lambda: generate(drafter=drafter(), tree=sd.DynamicTree(2, 2, 4), gamma="auto"),
    "chains": lambda: generate(
        drafter=drafter(), tree=sd.Chains(2, 2), gamma="auto", sampling=SAMPLED
    ),
    "beams drafted": lambda: generate(
        num_beams=3, gamma="auto", drafter=drafter(), beam_style="huggingface"
    ),
    "deadline": lambda: generate(deadline=1e6),
    "decode_stream in batches": lambda: many(refill=False),
    "trace of trees": lambda: sd.trace(
        target(), INPUTS[0], drafter=drafter(), tree=sd.Tree.uniform((2, 2)), max_new_tokens=6
    ),
    "int8": lambda: decoded(
        sd.generate(sd.LanguageModel.random(TINY, 4, quantize="int8"), INPUTS, max_new_tokens=4)
    ),
    "traced beams": lambda: under_jit(BeamDecoder(target().config, drafter())),
    "training": trained,
}
