"""Autoregressive and speculative decoding see the same bits with the CPU's own kernels.

Log-probabilities are compared bit for bit; with heads of twin columns every token hangs on a last
bit.

XLA adds up rows in one order in calls of less than 4,096 numbers and in another in larger ones, so
models are wide. The programs are compiled as users' are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from random_heads_of import random_heads
from toy_models import noisy_copy
from twins import V, bart, gemma, gpt, t5, t5gemma, twins

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from specdec_jax.speculative import distributions
from specdec_jax.speculative.processors import Context

pytestmark = pytest.mark.skipif(not native.is_available(), reason=native.describe_state())
slow = pytest.mark.slow
ROWS, NEW = 64, 12
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, V, count).tolist() for count in (1, 9, 4, 14, 2, 7)]
TOKENS = RNG.integers(2, V, (ROWS, ROWS), dtype=np.int32)
SAMPLING = {
    "argmax": sd.SamplingConfig(),
    "processors": sd.SamplingConfig(repetition_penalty=1.3, min_new_tokens=3, logit_bias={5: 2.0}),
    "temperature": sd.SamplingConfig(temperature=0.7),
    "filters": sd.SamplingConfig(temperature=1.3, top_k=20, top_p=0.8, min_p=0.01),
}
FAMILIES = {"t5": t5, "t5 1.0": functools.partial(t5, scale_decoder_outputs=True), "gpt": gpt}
GEMMAS = {
    "gemma": gemma,
    "t5gemma": t5gemma,
    "t5gemma 2": functools.partial(t5gemma, merged=True),
}
M2M = dict(norm_place="pre", embedding_norm=False, logits_bias=False, mlp_activation="relu")
BARTS = {"bart": bart, "m2m_100": functools.partial(bart, scale_embedding=True, **M2M)}


@functools.cache
def model(family: str, width: int, quantize: str | None = None) -> sd.LanguageModel:
    return twins((FAMILIES | GEMMAS | BARTS)[family](width), quantize=quantize)


# Calls of a network.


@jax.jit
def call(network, tokens, positions, cache):
    states, cache = network.decode_states(tokens, positions, cache)
    logits = network.head(states)
    greedy_token_and_logprob, log_probs = network.greedy_token_and_logprob(states)
    log_prob = distributions.log_prob_under(logits, network.skips_padding)
    every = distributions.log_softmax(logits, network.skips_padding)
    return (
        states,
        logits,
        greedy_token_and_logprob,
        log_probs,
        log_prob(greedy_token_and_logprob),
        log_prob(tokens),
        every,
    ), cache


@functools.partial(jax.jit, static_argnames="rows")
def cache_of(network, rows: int):
    length = 0 if network.config.decoder_only else 7
    inputs = jnp.broadcast_to(jnp.arange(2, 2 + length, dtype=jnp.int32), (rows, length))
    return network.prefill(inputs, jnp.full(rows, length, jnp.int32), ROWS + 8)


def equal(got, expected) -> bool:
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(got, expected))


def check_calls(network, widths, rows):
    """Compares calls over several positions and rows with a row fed token by token."""
    expected, cache = [], cache_of(network, 1)
    for place in range(max(widths)):
        found, cache = call(
            network, TOKENS[:1, place : place + 1], np.full(1, place, np.int32), cache
        )
        assert equal(found[4:5], found[3:4]), "log-probabilities of the argmax"
        expected.append(jax.tree.map(np.asarray, found))
    all_rows = [np.concatenate(part, axis=1) for part in zip(*expected)]
    for width in widths:
        found, _ = call(network, TOKENS[:1, :width], np.zeros(1, np.int32), cache_of(network, 1))
        assert equal(found, [part[:, :width] for part in all_rows]), width
    for count in rows:
        fed = np.broadcast_to(TOKENS[:1, :3], (count, 3))
        found, _ = call(network, fed, np.zeros(count, np.int32), cache_of(network, count))
        assert all(
            equal([part[row] for part in found], [part[0, :3] for part in all_rows])
            for row in range(count)
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "t5", "gemma", "t5gemma 2", *BARTS])
def test_calls(family):
    check_calls(model(family, 512).network, (9,), (3,))


# Every pair of family, width and kind of weights.
LATIN_SQUARE = [
    (family, width, (None, "int8", "w8a8")[(row + column) % 3])
    for row, family in enumerate(FAMILIES)
    for column, width in enumerate((512, 1024, 4096))
]


LATIN_SQUARE += [(family, 512, kind) for family, kind in zip(GEMMAS, ("int8", None, "w8a8"))]


@slow
@pytest.mark.parametrize("case", range(len(LATIN_SQUARE)), ids=lambda case: str(LATIN_SQUARE[case]))
def test_calls_of_every_width(case):
    """Small numbers of positions and rows, and the greatest; of the others each in some case."""
    numbers = [
        n for n in range(1, ROWS + 1) if n < 10 or n % len(LATIN_SQUARE) == case or n == ROWS
    ]
    check_calls(model(*LATIN_SQUARE[case]).network, numbers, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "t5gemma", *BARTS])
@pytest.mark.parametrize("rows, length", [(2, 8), (5, 3)])
def test_encoders(rows, length, family):
    """An input's states depend neither on its padding nor on other inputs.

    Calls lie on both sides of 4,096 numbers.
    """
    network = model(family, 512).network
    encode = jax.jit(lambda network, inputs, lengths: network.encode(inputs, lengths))
    alone = encode(network, jnp.asarray(TOKENS[:1, :3]), np.full(1, 3))
    all_rows = encode(network, jnp.asarray(TOKENS[:rows, :length]), np.full(rows, 3))
    np.testing.assert_array_equal(all_rows[0, :3], alone[0])


# Decoding.


@functools.cache
def plainly(family: str, width: int, quantize: str | None, dist: str = "argmax", verifier="block"):
    """What each input gives alone: tokens and log-probabilities under both distributions."""
    options = dict(max_new_tokens=NEW, sampling=SAMPLING[dist], verifier=verifier)
    found = [
        decoded(model(family, width, quantize), [one], key=key(row), **options)
        for row, one in enumerate(INPUTS)
    ]
    return [np.concatenate(parts) for parts in zip(*found)]


def key(row: int):
    return jax.random.fold_in(jax.random.key(0), row)[None]


def decoded(target, inputs, **options):
    found = sd.generate(target, inputs, **options)
    return found.tokens, found.log_probs, found.adjusted_log_probs


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


def check_decoding(family, width, quantize, batch=len(INPUTS), dist="argmax", **options):
    target = model(family, width, quantize)
    keys = jnp.concatenate([key(row) for row in range(len(INPUTS))])
    limit = dict(max_new_tokens=NEW, sampling=SAMPLING[dist])
    expected = plainly(family, width, quantize, dist, options.get("verifier", "block"))
    for start in range(0, len(INPUTS), batch):
        rows = slice(start, start + batch)
        found = decoded(target, INPUTS[rows], key=keys[rows], **limit, **options)
        for got, wanted in zip(found, expected):
            np.testing.assert_array_equal(
                *(x if x.dtype == np.int32 else bits(x) for x in (got, wanted[rows]))
            )


def drafter(family, width, quantize=None, kind="model"):
    target = model(family, width, quantize)
    if kind == "heads":
        return random_heads(target, 0.1, share_head=True)
    return sd.ModelDrafter(noisy_copy(model(family, width), 0.01))


@tiers.parametrize(
    "options",
    [dict(gamma=6), dict(tree=sd.Tree.uniform((3, 2, 1)))],
    ids=["chain", "tree"],
    first=0,
)
def test_decoding(options):
    check_decoding("t5", 512, None, drafter=drafter("t5", 512), **options)


DRAFTS = {
    "plain": {},
    "chain of 4": dict(gamma=4),
    "chain of 8": dict(gamma=8),
    "other lengths": dict(gamma=[1, 2, 8, 4, 7, 3]),
    "tree": dict(tree=sd.Tree.uniform((3, 2, 1))),
    "dynamic tree": dict(tree=sd.DynamicTree(3, 3, 9)),
    **{
        name: dict(gamma=getattr(sd, name)(8))
        for name in ("Confidence", "Heuristic", "CostAware", "Entropy")
    },
}


# Each way of drafting with each model once: one input alone or all together, in turn.
MODELS = [
    ("t5", 512, None),
    ("t5", 1024, "int8"),
    ("t5 1.0", 1024, "w8a8"),
    ("gpt", 1024, None),
    ("t5", 4096, None),
    ("gemma", 512, None),
    ("t5gemma 2", 512, "int8"),
]
DRAFTED = [
    (name, *shape, 1 if (row + column) % 2 and name != "other lengths" else len(INPUTS))
    for row, name in enumerate(DRAFTS)
    for column, shape in enumerate(MODELS)
]


@slow
@pytest.mark.parametrize("name, family, width, quantize, batch", DRAFTED)
def test_every_way_of_drafting(name, family, width, quantize, batch):
    options = {} if name == "plain" else dict(drafter=drafter(family, width), **DRAFTS[name])
    check_decoding(family, width, quantize, batch, **options)


@slow
@pytest.mark.parametrize(
    "options", [dict(gamma=8), dict(tree=sd.Tree.uniform((3, 2, 1)))], ids=["chain", "tree"]
)
@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_drafters_that_read_states(family, options):
    """Then the target's logits are stored, and log-probabilities come from them."""
    check_decoding(family, 1024, None, drafter=drafter(family, 1024, kind="heads"), **options)


@pytest.mark.parametrize("name", SAMPLING)
def test_distributions_of_calls(name):
    """Sums over the vocabulary in a call over many positions equal those of each alone."""
    sampling, logits = SAMPLING[name], 3 * RNG.standard_normal((1, 24, V), dtype=np.float32)
    mode, rows = sampling.mode._replace(native=True), sampling.rows(1, V)
    tokens, starts, eos_ids = (
        np.full((1, 32), 3, np.int32),
        np.ones(1, np.int32),
        np.full((1, 1), 5, np.int32),
    )

    @jax.jit
    def dist(logits, length):
        return distributions.standardize(
            logits, Context(tokens, length, starts, eos_ids), rows, mode
        )

    whole = dist(logits, np.full(1, 4, np.int32))
    for place in range(24):
        alone = dist(logits[:, place : place + 1], np.full(1, 4 + place, np.int32))
        assert equal([part[:, 0] for part in alone], [part[:, place] for part in whole])


@slow
@pytest.mark.parametrize(
    "dist, shape",
    [
        ("processors", dict(gamma=8)),
        ("processors", dict(tree=sd.Tree.uniform((3, 2, 1)))),
        ("temperature", dict(gamma=8, verifier="gumbel")),
        ("filters", dict(gamma=8, verifier="gumbel")),
    ],
)
def test_distributions(dist, shape):
    """Log-probabilities after processors and filters, too; Gumbel coupling gives equal tokens."""
    check_decoding("t5", 512, None, dist=dist, drafter=drafter("t5", 512), **shape)


@slow
@pytest.mark.parametrize(
    "options", [{}, dict(gamma=8), dict(tree=sd.Tree.uniform((3, 2, 1)))], ids=str
)
def test_continuous_batching(options):
    target, expected = model("t5", 512), plainly("t5", 512, None)
    more = {} if not options else dict(drafter=drafter("t5", 512), **options)
    inputs = INPUTS * 4
    for number, (output,) in sd.decode_stream(
        target, inputs, batch_size=5, max_new_tokens=NEW, **more
    ):
        row = number % len(INPUTS)
        assert output.tokens == expected[0][row].tolist()
        np.testing.assert_array_equal(bits(output.log_probs), bits(expected[1][row]))


@slow
@pytest.mark.parametrize("family", ["t5", "gpt"])
def test_decoder_prefixes(family):
    """A prefix, or a prompt, that is fed in one call, against the same tokens one by one."""
    target = model(family, 512)
    whole = plainly(family, 512, None)
    for cut in (1, 5, 9):
        prefixes = whole[0][:, :cut].tolist()
        if family == "gpt":
            given, more = [[*one, *prefix] for one, prefix in zip(INPUTS, prefixes)], {}
        else:
            given, more = INPUTS, dict(decoder_prefix=prefixes)
        found = sd.generate(target, given, max_new_tokens=NEW - cut, **more)
        np.testing.assert_array_equal(found.tokens, whole[0][:, cut:])
        np.testing.assert_array_equal(bits(found.log_probs), bits(whole[1][:, cut:]))


@slow
@pytest.mark.parametrize("style", ["t5x", "huggingface"])
def test_beams(style):
    target, options = (
        model("t5", 512),
        dict(num_beams=4, num_return_sequences=4, beam_style=style, max_new_tokens=NEW),
    )
    plain = [sd.generate(target, [one], eos_ids=[5], **options) for one in INPUTS]
    found = sd.generate(target, INPUTS, eos_ids=[5], drafter=drafter("t5", 512), gamma=3, **options)
    for row, one in enumerate(plain):
        rows = slice(4 * row, 4 * row + 4)
        np.testing.assert_array_equal(found.lengths[rows], one.lengths)
        np.testing.assert_array_equal(bits(found.scores[rows]), bits(one.scores))
        width = one.tokens.shape[1]
        np.testing.assert_array_equal(found.tokens[rows, :width], one.tokens)
        np.testing.assert_array_equal(bits(found.log_probs[rows, :width]), bits(one.log_probs))
