"""Decoding inside another program's traced function gives what `generate` gives.

T5X itself is in test_t5x.py.
"""

import dataclasses
import functools

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from make_checkpoints import TINY

import specdec_jax as sd
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.decoding.under_jit import Decoder, make_network
from specdec_jax.decoding.under_jit_beams import BeamDecoder
from specdec_jax.models.network import Network

pytestmark = pytest.mark.usefixtures("quick")
LENGTH, INPUTS = 7, np.array([[5, 6, 7, 8, 1], [9, 4, 1, 0, 0], [11, 1, 0, 0, 0]], np.int32)
PROMPTS = np.array([[0, 3, 4, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 9, 8, 7, 6, 5, 4]], np.int32)


@pytest.fixture(scope="module")
def pair():
    target, drafter = (
        sd.LanguageModel.random(dataclasses.replace(TINY, num_decoder_layers=1), seed)
        for seed in (0, 1)
    )
    return target, sd.ModelDrafter(drafter)


def decode(
    decoder: Decoder,
    target,
    prompts=PROMPTS,
    eos=1,
    rng=None,
    traced=None,
    inputs=INPUTS,
    **options,
):
    """Decodes as a framework would, with all of `traced` as arguments of a jitted function."""

    @jax.jit
    def config(params, inputs, prompts, rng, traced):
        given = {**options.get("decoder_params", {}), **traced}
        return decoder.decode(
            params, inputs, prompts, eos, rng, **(options | {"decoder_params": given})
        )

    return jax.tree.map(
        np.asarray, config(flax.core.freeze(target.params), inputs, prompts, rng, traced or {})
    )


def expected(target, drafter, prompts=PROMPTS, eos=1, **options):
    """The same by `generate`: tokens with their prompts, and the sums of both log-probabilities."""
    prefixes = [[int(token) for token in row if token] for row in prompts]
    limits = [LENGTH - len(prefix) for prefix in prefixes]
    result = sd.generate(
        target,
        INPUTS,
        drafter=drafter,
        decoder_prefix=prefixes,
        max_new_tokens=limits,
        eos_ids=(eos,),
        **options,
    )
    tokens = np.zeros((len(prompts), LENGTH), np.int32)
    for row, prefix in enumerate(prefixes):
        tokens[row, : len(prefix)] = prefix
        new = result.tokens[row, : result.lengths[row]]
        tokens[row, len(prefix) : len(prefix) + len(new)] = new
    return tokens, result.log_probs.sum(axis=1), result.adjusted_log_probs.sum(axis=1), result.stats


LIVELY = sd.SamplingConfig(temperature=0.8, top_k=9)
COLD = sd.SamplingConfig(temperature=0.3)
CASES = {  # what the decoder and `generate` are given alike
    "argmax": dict(gamma=2),
    "sampled": dict(gamma=sd.Heuristic(3), sampling=LIVELY, verifier="token"),
    "tree": dict(gamma="auto", tree=sd.Tree.uniform((2, 2)), sampling=LIVELY),
    "own temperature": dict(gamma=2, sampling=LIVELY, drafter_sampling=COLD, verifier="token"),
}


@tiers.parametrize("case", CASES, first=2)
def test_tokens_scores_and_counts_are_those_of_generate(case, pair):
    target, drafter = pair
    options, key = CASES[case], jax.random.key(5)
    tokens, *_ = expected(target, drafter, key=key, **options)
    eos = int(tokens[0, 4])  # one that comes up
    tokens, own, adjusted, stats = expected(target, drafter, key=key, eos=eos, **options)
    rescaled = case != "argmax"
    got = decode(
        Decoder(target.config, drafter, rescale_log_probs=rescaled, **options),
        target,
        eos=eos,
        rng=key,
    )
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_allclose(got.scores, adjusted if rescaled else own, atol=1e-4)
    assert got.target_calls.sum() == stats.target_calls and got.drafted.sum() == stats.drafted > 0
    assert got.accepted.sum() == stats.accepted


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_kind_draw_what_generate_draws(impl, pair):
    """Keys may be raw or typed, an argument or among the decoder's.

    T5X's trainer makes them of the kind that JAX is set to.
    """
    target, drafter = pair
    key, options = jax.random.key(5, impl=impl), CASES["sampled"]
    tokens, *_ = expected(target, drafter, key=key, **options)
    decoder = Decoder(target.config, drafter, **options)
    np.testing.assert_array_equal(decode(decoder, target, rng=key).tokens, tokens)
    raw = jax.random.key_data(key)
    np.testing.assert_array_equal(decode(decoder, target, rng=raw).tokens, tokens)
    np.testing.assert_array_equal(
        decode(decoder, target, traced={"decode_rng": raw}).tokens, tokens
    )


@tiers.parametrize("rescaled", [True, False], first=1)
@tiers.parametrize("temperature", [0.0, 1.0], first=1)
def test_weights_that_are_no_numbers_have_no_score(temperature, rescaled, pair):
    """Nothing can be raised here: the score says it, and every token is an id."""
    target, drafter = pair
    params = target.params
    params["decoder"]["decoder_norm"]["scale"] = (
        params["decoder"]["decoder_norm"]["scale"].at[0].set(np.nan)
    )
    broken = sd.LanguageModel(target.config, params)
    for drafts in (drafter, None):
        options = dict(
            sampling=sd.SamplingConfig(temperature=temperature), rescale_log_probs=rescaled
        )
        got = decode(Decoder(target.config, drafts, **options), broken)
        assert np.isnan(got.scores).all() and (got.tokens >= 0).all()


def test_without_a_drafter_or_a_prompt(pair):
    target, _ = pair
    got = decode(Decoder(target.config), target, prompted=False)
    tokens, *_ = expected(target, None, np.zeros_like(PROMPTS))
    np.testing.assert_array_equal(got.tokens, tokens)
    assert (got.drafted == 0).all() and (got.scores == 0).all()


@pytest.mark.slow
def test_arguments_of_one_call_may_be_traced(pair):
    target, drafter = pair
    decoder, key = (
        Decoder(target.config, drafter, gamma=2, rescale_log_probs=False),
        jax.random.PRNGKey(3),
    )
    settings = sd.SamplingConfig(temperature=[0.9, 0.0, 0.7], top_p=0.8)
    tokens, own, *_ = expected(
        target, drafter, gamma=2, sampling=settings, key=jax.random.wrap_key_data(key)
    )
    traced_options = {
        "temperature": np.array([0.9, 5e-5, 0.7], np.float32),
        "topp": np.float32(0.8),
    }
    for traced, fixed in ((traced_options, {}), ({}, traced_options)):
        got = decode(decoder, target, rng=key, traced=traced, decoder_params=fixed)
        np.testing.assert_array_equal(got.tokens, tokens)
        np.testing.assert_allclose(got.scores, own, atol=1e-4)


def test_zeros_before_and_inside_an_input(pair):
    """Before it they are padding; inside, where T5X would mask them, the scores are NaN."""
    target, drafter = pair
    decoder = Decoder(target.config, drafter, gamma=2, rescale_log_probs=False)
    plain = decode(decoder, target)
    moved = decode(decoder, target, inputs=np.array([*INPUTS[:2], [0, 0, 11, 1, 0]], np.int32))
    for one, other in zip(plain, moved):
        np.testing.assert_array_equal(one, other)
    inside = decode(decoder, target, inputs=np.array([*INPUTS[:2], [0, 11, 0, 1, 0]], np.int32))
    np.testing.assert_array_equal(np.isnan(inside.scores), [False, False, True])
    np.testing.assert_array_equal(inside.scores[:2], plain.scores[:2])


@pytest.mark.parametrize(
    ("steps", "hard", "most"),
    [(3, 2, 2), (3, -1, 3), (3, 0, 3), (3, 2**40, 3), (2**32, 2, 2), (2**63 - 1, None, LENGTH)],
)
def test_steps_of_one_call(steps, hard, most, pair):
    target, _ = pair
    given = {"max_decode_steps": steps, "max_decode_steps_hard_limit": hard}
    greedy, *_ = expected(target, None)
    counted = np.arange(LENGTH) < np.count_nonzero(PROMPTS, axis=1)[:, None] + most
    for name in (None, *given):
        if name and (given[name] is None or given[name] > 2**31):
            continue  # more than JAX's integers hold
        traced = {name: given[name]} if name else {}
        others = {one: value for one, value in given.items() if one != name}
        got = decode(Decoder(target.config), target, traced=traced, decoder_params=others)
        np.testing.assert_array_equal(got.tokens, np.where(counted, greedy, 0))


def test_no_id_that_ends_and_flags_of_other_kinds(pair):
    target, _ = pair
    own = Decoder(target.config, sampling=LIVELY, rescale_log_probs=False)
    plain = decode(own, target, eos=-1)
    np.testing.assert_array_equal(decode(own, target, eos=()).tokens, plain.tokens)
    for flag in (None, jnp.bool_(False), np.bool_(False)):
        got = decode(own, target, eos=-1, decoder_params={"rescale_log_probs": flag})
        np.testing.assert_array_equal(got.scores, plain.scores)


@pytest.mark.skipif(not native.is_available(), reason=native.describe_state())
def test_parameters_are_packed_on_a_cpu_only(pair, monkeypatch):
    """On an accelerator they would exist twice."""
    target, _ = pair
    inputs, lengths = INPUTS, np.array([5, 3, 2])
    packed = make_network(target.params, target.config, 3)
    assert packed.backend.joins_weights
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    bare = make_network(flax.core.freeze(target.params), target.config, 3)
    assert not bare.backend.joins_weights
    logits = [
        jax.jit(Network.teacher_forced)(network, inputs, lengths, PROMPTS)
        for network in (bare, packed)
    ]
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)

    @jax.jit
    def decoded(network):
        return network.decode(PROMPTS, np.zeros(3, np.int32), network.prefill(inputs, lengths, 12))[
            0
        ]

    np.testing.assert_allclose(decoded(bare), logits[0], atol=1e-4)


def test_bad_settings_are_rejected(pair):
    target, drafter = pair
    make = functools.partial(Decoder, target.config, drafter)
    for options, message in (
        (dict(gamma=1.5), "gamma: got 1.5, expected an integer from 0"),
        (dict(verifier="coin"), "verifier: got 'coin', expected one of"),
        (dict(verifier="typical"), "temperature: got 0.0 with verifier='typical'"),
        (
            dict(sampling=sd.SamplingConfig(forbidden_tokens=(99,))),
            "forbidden_tokens: got 99|got id 99",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(ValueError, match="which needs draft probabilities"):
        Decoder(target.config, sd.PromptLookupDrafter(), gamma=sd.Confidence(3))
    wide = Decoder(dataclasses.replace(target.config, vocab_size=48))
    with pytest.raises(ValueError, match="params: parameter token_embedder/embedding: got shape"):
        decode(wide, target)
    late = make(sampling=sd.SamplingConfig(forced_tokens={7: 3}))
    with pytest.raises(ValueError, match="forced_tokens: got place 7, expected below .* = 7"):
        decode(late, target)
    for given, message in (
        ({"brevity": 1}, "decoder_params: got brevity, expected only"),
        ({"topp": 2.0}, "top_p: got 2.0, expected"),
        ({"topk": [1, 2]}, "top_k: got 2 values, expected one or 3"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(make(), target, decoder_params=given)


BAD_ARRAYS = {
    "places": (dict(inputs=INPUTS[0]), r"inputs: got an array of int32 \[5\], expected integers"),
    "numbers": (dict(inputs=INPUTS * 0.5), "inputs: got an array of float64"),
    "no rows": (dict(inputs=INPUTS[:0]), r"inputs: got an array of int32 \[0, 5\]"),
    "prompts": (dict(prompts=PROMPTS[:, :0]), r"prompts: got an array of int32 \[3, 0\]"),
    "fewer prompts": (dict(prompts=PROMPTS[:2]), "prompts: got 2 rows, expected 3, as many as"),
    "no EOS": (dict(eos_id=None), "eos_id: got None, expected an id, or several"),
    "a large EOS": (dict(eos_id=2**40), "eos_id: got 1099511627776, expected an id"),
    "parameters": (dict(params=None), "params: got None, expected a nested dict"),
    "options": (dict(decoder_params=["topk"]), "decoder_params: got .*, expected a dict of"),
}
BAD_OPTIONS = {
    "a seed": (dict(rng=3), "rng: got 3, expected one key"),
    "keys": (dict(rng=jax.random.split(jax.random.key(0), 3)), "rng: got .*, expected one key"),
    "a word": (
        dict(decoder_params={"temperature": "hot"}),
        "temperature: got 'hot', expected a nu",
    ),
    "steps": (
        dict(decoder_params={"max_decode_steps": 2.5}),
        "max_decode_steps: got 2.5, expected an integer of at least 1",
    ),
    "hard limit": (
        dict(decoder_params={"max_decode_steps": 2, "max_decode_steps_hard_limit": "3"}),
        "max_decode_steps_hard_limit: got '3', expected an integer",
    ),
    "flag": (dict(decoder_params={"rescale_log_probs": "no"}), "rescale_log_probs: got 'no'"),
}


@pytest.mark.parametrize("case", [*BAD_ARRAYS, *BAD_OPTIONS])
@pytest.mark.parametrize("kind", [Decoder, BeamDecoder])
def test_arguments_of_a_call_are_checked(kind, case, pair):
    if kind is BeamDecoder and case in BAD_OPTIONS:
        given, message = dict(decoder_params={"max_decode_step": 2.5}), "max_decode_step: got 2.5"
    else:
        given, message = (BAD_ARRAYS | BAD_OPTIONS)[case]
    whole = dict(params=pair[0].params, inputs=INPUTS, prompts=PROMPTS, eos_id=1)
    with pytest.raises(ValueError, match=message) as caught:
        kind(pair[0].config).decode(**(whole | given))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        *((Decoder, *BAD_OPTIONS[case]) for case in ("a word", "steps", "hard limit", "flag")),
        (Decoder, {"decode_rng": 3}, "rng: got 3, expected one key"),
        (Decoder, {"eos_id": 1.5}, "eos_id: got 1.5, expected an id, or several"),
        (BeamDecoder, {"max_decode_step": 2.5}, "max_decode_step: got 2.5, expected an integer"),
        (BeamDecoder, {"eos_id": 1.5}, "eos_id: got 1.5, expected an id, or several"),
        (BeamDecoder, {"eos_id": [1, 2]}, "eos_id: got 2 ids, expected one"),
    ],
)
def test_decoder_params_are_checked_before_there_are_arrays(kind, given, message, pair):
    """T5X restores a checkpoint in between, which may take minutes."""
    decoder, sound = kind(pair[0].config), {"eos_id": 1, "decode_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match=message):
        decoder.check_call(given.get("decoder_params", given))
    decoder.check_call(sound)


@pytest.mark.parametrize("kind", [Decoder, BeamDecoder])
def test_parts_of_a_decoder_are_checked(kind, pair):
    target, drafter = pair
    for parts, message in (
        ((target, drafter), "config: got LanguageModel.*, expected a T5Config"),
        ((target.config, "lookup"), "drafter: got 'lookup', expected a Drafter"),
        ((target.config, target), "drafter: got LanguageModel, expected a Drafter"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*parts)
    with pytest.raises(ValueError, match="rescale_log_probs: got 'False', expected True or False"):
        Decoder(target.config, rescale_log_probs="False")


def test_arrays_of_numpy_and_lists_need_no_conversion(pair):
    """Constants of a traced function are often numpy's."""
    target, _ = pair
    decoder, ids = Decoder(target.config), INPUTS.tolist()
    run = jax.jit(lambda params: decoder.decode(params, ids, PROMPTS, 1))
    np.testing.assert_array_equal(run(target.params).tokens, decode(decoder, target).tokens)


def test_in_a_shard_map_that_keeps_account_one_line_says_how(pair):
    """JAX's own error is about its loops, on some fifty lines."""
    target, _ = pair
    decoder, rows = Decoder(target.config), jax.sharding.PartitionSpec("rows")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("rows",))

    def run(inputs, prompts):
        return decoder.decode(target.params, inputs, prompts, 1).tokens

    how = dict(mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    with pytest.raises(ValueError, match="inputs: got an array that varies over rows in a shard_m"):
        jax.shard_map(run, **how)(INPUTS, PROMPTS)
    got = jax.jit(jax.shard_map(run, check_vma=False, **how))(INPUTS, PROMPTS)
    np.testing.assert_array_equal(got, decode(decoder, target).tokens)
