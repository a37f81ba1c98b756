"""Inside T5X: its checkpointers restore what is exported, and it decodes what it would decode.

Needs the extra t5x, with which TensorFlow comes; skipped where T5X is not installed, and fails
where it is but cannot be imported.
"""

import dataclasses
import functools
import importlib.util
import json
import warnings

import gin
import jax
import jax.numpy as jnp
import make_checkpoints as make
import numpy as np
import own_parts
import pytest
from distribution_samples import (
    EOS,
    FALSE_ALARM,
    INPUTS,
    POSITIONS,
    ROWS,
    SPREAD,
    V,
    g_test,
    joint_distribution,
)
from golden_models import unpack_t5x
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import beams, variants
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis.report import summaries
from specdec_jax.analysis.variants import Workload
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.checkpoints import t5x
from specdec_jax.checkpoints.stored_tensor import StoredTensor
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.models.parameters import flatten
from specdec_jax.tokenizers.vocabularies import ByteVocabulary

if importlib.util.find_spec("t5x") is None:
    pytest.skip("t5x is not installed", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TensorFlow's
    import t5x_calls
    from t5x import decoding, models, partitioning, utils
    from t5x.examples.scalable_t5 import network as scalable_t5
    from t5x_calls import STEPS, Ids, predict, speculative, standard_promotion

    from specdec_jax.interop import t5x as interop

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick")]
promotion = standard_promotion


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """Folder of T5X's own checkpoint, what T5X computed from it, and the model."""
    folder, io = unpack_t5x(tmp_path_factory.mktemp("t5x"))
    return folder, io, sd.load(folder, "float32")


# Checkpoints.

SHAPE = dataclasses.replace(make.TINY, vocab_size=48, num_encoder_layers=1, num_decoder_layers=1)
SHAPES = {
    "1.1": SHAPE,
    "1.0": dataclasses.replace(SHAPE, mlp_activations=("relu",), logits_via_embedding=True),
    "umT5": dataclasses.replace(SHAPE, num_decoder_layers=2, relative_bias_per_layer=True),
}


def network_of(config: sd.T5Config):
    """T5X's network of this shape: `scalable_t5`'s, where every layer has a position table."""
    if not config.relative_bias_per_layer:
        return interop.make_transformer(config)
    names = (
        "vocab_size",
        "emb_dim",
        "num_heads",
        "head_dim",
        "num_encoder_layers",
        "num_decoder_layers",
        "mlp_dim",
    )
    shape = {
        name: getattr(config, name) for name in (*names, "mlp_activations", "logits_via_embedding")
    }
    return scalable_t5.Transformer(
        scalable_t5.T5Config(**shape, dtype=jnp.dtype(config.dtype), dropout_rate=0.0)
    )


@pytest.mark.parametrize(
    "form, use_orbax", [("t5x", True), ("t5x_legacy", True), ("t5x_legacy", False)]
)
@pytest.mark.parametrize(
    "shape, dtype", [("1.1", "float32"), ("1.0", "bfloat16"), ("umT5", "float32")]
)
def test_t5x_restores_what_is_exported(shape, form, dtype, use_orbax, tmp_path):
    params = {name: x.astype(dtype) for name, x in make.random_params(SHAPES[shape]).items()}
    sd.save(make.model_of(params, SHAPES[shape]), tmp_path / "model", format=form)
    leaves = {name: StoredTensor.from_array(x) for name, x in params.items()}
    params = {
        name: leaf.load(dtype) for name, leaf in t5x.stack_layers(leaves, SHAPES[shape]).items()
    }
    model = models.EncoderDecoderModel(network_of(SHAPES[shape]), None, None, None)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    shapes = dict(encoder_input_tokens=(2, 8), decoder_input_tokens=(2, 8))
    initializer = utils.TrainStateInitializer(
        optimizer_def=None,
        init_fn=model.get_initial_variables,
        input_shapes=shapes,
        input_types=dict.fromkeys(shapes, jnp.int32),
        partitioner=partitioner,
    )
    config = utils.RestoreCheckpointConfig(
        str(tmp_path / "model" / "checkpoint_1"), "specific", strict=False
    )
    state, _ = utils.create_checkpoint_manager_and_restore(
        initializer, partitioner, config, config.path, None, use_orbax=use_orbax
    )
    got = flatten(jax.tree.map(np.asarray, state.params.unfreeze()))
    assert got.keys() == params.keys() and int(state.step) == 1
    for name, x in params.items():
        assert got[name].dtype == x.dtype and got[name].tobytes() == x.tobytes(), name


# Decoding.


DECODES = [
    ("greedy_noeos", "none"),
    ("greedy_eos1", "itself"),
    ("greedy_eos_early", "another"),
    ("greedy_prompt3", "another"),
    ("greedy_noeos", "a cascade"),
    ("greedy_prompt3", "a tree"),
    ("greedy_eos1", "from outside"),
]


@pytest.mark.parametrize("decode, drafter", DECODES)
def test_argmax_tokens_and_scores_are_t5xs(decode, drafter, golden, tmp_path):
    folder, io, target = golden
    options: dict = dict(rescale_log_probs=False, counts=True)
    if drafter == "itself":
        options |= dict(drafter=str(folder), gamma=3)
    elif drafter in ("another", "a tree"):
        small = dataclasses.replace(target.config, num_encoder_layers=1, num_decoder_layers=1)
        sd.save(sd.LanguageModel.random(small, seed=3), tmp_path / "small")
        options |= dict(
            drafter=str(tmp_path / "small"),
            **({"gamma": 2} if drafter == "another" else {"tree": "widths:2,2"}),
        )
    elif drafter == "a cascade":
        parts = sd.RandomDrafter(target.config.vocab_size), sd.PromptLookupDrafter(1)
        options |= dict(drafter=sd.HorizontalCascade(*parts, 1), gamma=3)
    elif drafter == "from outside":
        options |= dict(drafter=own_parts.RepeatDrafter(), gamma=2)
    eos = {"greedy_eos1": 1, "greedy_eos_early": int(io["eos_early_id"])}.get(decode, -1)
    prompted = decode == "greedy_prompt3"
    prompts = io["prompt_decoder_input_tokens"] if prompted else None
    tokens, aux = predict(
        speculative(target, **options),
        target.params,
        io["encoder_input_tokens"],
        prompts,
        prompt_with_targets=prompted,
        decoder_params={"eos_id": eos},
    )
    np.testing.assert_array_equal(tokens, io[decode])
    if f"{decode}_logprob" in io:
        np.testing.assert_allclose(aux["scores"], io[f"{decode}_logprob"], rtol=1e-5, atol=1e-4)
    if drafter == "itself":
        assert (aux["accepted"] == aux["drafted"]).all() and (aux["drafted"] > 0).all()
    assert (aux["drafted"] > 0).all() == (drafter != "none")


OPTIONS = {
    # what one call says; whether there are prompts, and all decodes are asked for
    "steps": (dict(max_decode_steps=5, rescale_log_probs=False), True, True),
    "hard limit": (dict(max_decode_steps=9, max_decode_steps_hard_limit=4), False, False),
    "no hard limit": (dict(max_decode_steps=3, max_decode_steps_hard_limit=-1), False, False),
    "the best": (dict(temperature=1.0, topk=1, rescale_log_probs=False), True, False),
    "cold rows": (
        dict(temperature=np.array([0, 5e-5, 0, 0], np.float32), rescale_log_probs=False),
        False,
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_one_call_are_t5xs(case, golden):
    """Where T5X's sampler leaves no choice, its tokens, shapes and scores."""
    folder, io, target = golden
    bound, prompted, everything = OPTIONS[case]
    given = {"temperature": 0.0} | bound
    prompts = np.array(io["prompt_decoder_input_tokens"])
    prompts[0, 3:] = 0  # prompts of different lengths
    options = dict(
        decoder_params=given, return_all_decodes=everything, prompt_with_targets=prompted
    )
    theirs = models.EncoderDecoderModel(
        interop.make_transformer(target.config),
        Ids,
        Ids,
        None,
        decode_fn=decoding.temperature_sample,
    )
    ours = speculative(
        target, drafter=str(folder), gamma=3, sampling=sd.SamplingConfig(temperature=0.7, top_k=5)
    )
    inputs = io["encoder_input_tokens"]
    expected = predict(
        theirs, target.params, inputs, prompts, **{**options, "decoder_params": dict(given)}
    )
    tokens, aux = predict(ours, target.params, inputs, prompts, **options)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(aux["scores"], expected[1]["scores"], rtol=1e-5, atol=1e-4)
    assert given.keys() == {"temperature", *bound}  # T5X writes into it; we do not


@pytest.mark.slow
def test_zeros_before_an_input_are_masked_as_t5x_does(golden):
    _, io, target = golden
    inputs = np.pad(np.array(io["encoder_input_tokens"]), ((0, 0), (3, 0)))
    theirs = models.EncoderDecoderModel(
        interop.make_transformer(target.config),
        Ids,
        Ids,
        None,
        decode_fn=functools.partial(
            decoding.temperature_sample, temperature=0.0, rescale_log_probs=False
        ),
    )
    expected = predict(theirs, target.params, inputs)
    tokens, aux = predict(speculative(target, rescale_log_probs=False), target.params, inputs)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_allclose(aux["scores"], expected[1]["scores"], rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_a_decode_function_sets_the_sampling(golden):
    _, io, target = golden
    options = dict(temperature=0.7, topk=0, topp=0.9, decode_rng=jax.random.PRNGKey(3))
    bound = speculative(target, decode_fn=functools.partial(decoding.temperature_sample, **options))
    meant = speculative(target, sampling=sd.SamplingConfig(temperature=0.7, top_p=0.9))
    for keys in (dict(rng=jax.random.PRNGKey(4)), {}):
        other = keys or dict(rng=options["decode_rng"])
        (tokens, aux), (expected, scores) = (
            predict(model, target.params, io["encoder_input_tokens"], **key)
            for model, key in ((bound, keys), (meant, other))
        )
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_allclose(aux["scores"], scores["scores"], rtol=1e-5)
    tokens, _ = predict(
        speculative(target, decode_fn=decoding.temperature_sample),
        target.params,
        io["encoder_input_tokens"],
    )
    np.testing.assert_array_equal(tokens, io["greedy_eos1"])  # T5X's own default is the best token


def test_scores_of_given_targets_are_t5xs(golden):
    _, io, target = golden
    batch = {
        name: io[name]
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    }
    batch["decoder_loss_weights"] = (batch["decoder_target_tokens"] > 0).astype(np.float32)
    theirs = models.EncoderDecoderModel(interop.make_transformer(target.config), Ids, Ids, None)
    scores = [
        jax.jit(model.score_batch)(target.params, batch) for model in (theirs, speculative(target))
    ]
    np.testing.assert_array_equal(*scores)


def test_another_loss_than_that_of_t5xs_class_is_rejected(golden, monkeypatch):
    """What a model's gin file binds to that class is not this class's."""
    _, io, target = golden
    batch = {
        name: io[name]
        for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    }
    batch["decoder_loss_weights"] = (batch["decoder_target_tokens"] > 0).astype(np.float32)
    monkeypatch.setitem(interop.t5x_run._losses, "z_loss", 0.1)
    with pytest.raises(ValueError, match="z_loss: got 0.0 for SpeculativeEncoderDecoderModel"):
        speculative(target).loss_fn(target.params, batch, None)
    speculative(target, z_loss=0.1).loss_fn(target.params, batch, None)


def test_a_program_without_reports_can_be_exported(golden, monkeypatch):
    """One with them calls the host; this package's kernels of a CPU cannot be exported either."""
    _, io, target = golden
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    batch = {name: io[name] for name in ("encoder_input_tokens", "decoder_input_tokens")}

    def export(**options) -> bytes:
        model = speculative(target, drafter="lookup", **options)
        program = jax.jit(lambda params, batch: model.predict_batch(params, batch))
        return jax.export.export(program)(target.params, batch).serialize()

    assert export(report=False)
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        export()


@pytest.mark.slow
def test_samples_depend_on_the_key(golden):
    folder, io, target = golden
    model = speculative(
        target, drafter=str(folder), gamma=2, sampling=sd.SamplingConfig(temperature=1.0)
    )
    decode = functools.partial(predict, model, target.params, io["encoder_input_tokens"])
    first, aux = decode()  # T5X's default key is that of seed 0
    other, _ = decode(rng=jax.random.PRNGKey(1))
    assert (first != other).any() and (aux["scores"] < 0).all()
    np.testing.assert_array_equal(
        decode(decoder_params={"decode_rng": jax.random.PRNGKey(1)})[0], other
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("drafts", [True, False], ids=["speculative", "plain"])
def test_distribution_with_keys_of_every_kind(impl, drafts):
    """A G-test of the joint distribution of three tokens; T5X's trainer can be set to rbg keys."""
    target, drafter = tiny_t5(0, V, decoder_layers=1), tiny_t5(1, V, decoder_layers=1)
    vocabulary = type("Letters", (), dict(eos_id=EOS, vocab_size=V))
    model = interop.SpeculativeEncoderDecoderModel(
        interop.make_transformer(target.config),
        vocabulary,
        vocabulary,
        None,
        gamma=1,
        verifier="token",
        sampling=SPREAD,
        drafter=sd.ModelDrafter(drafter) if drafts else None,
    )
    inputs = np.tile(INPUTS, (ROWS, 1)).astype(np.int32)
    prompts = np.zeros((ROWS, POSITIONS), np.int32)
    counts = np.zeros(V**POSITIONS)
    for seed in range(4):
        rng = jax.random.key_data(jax.random.key(seed, impl=impl))  # raw, as T5X makes them
        tokens, _ = predict(model, target.params, inputs, prompts, rng)
        counts += np.bincount(tokens @ np.array([V * V, V, 1]), minlength=V**POSITIONS)
    assert g_test(counts, joint_distribution(target, SPREAD)) > FALSE_ALARM
    assert g_test(counts, joint_distribution(drafter, SPREAD)) < FALSE_ALARM


BAD = {
    "decodes": (dict(num_decodes=4), "num_decodes: got 4, expected 1"),
    "alpha": (dict(decoder_params={"alpha": 0.6}), "decoder_params: got alpha, expected only"),
    "filters": (
        dict(decoder_params={"topk": 3, "topp": 0.5}),
        "got topk and topp, expected at most one",
    ),
    "two keys": (
        dict(decoder_params={"decode_rng": jax.random.PRNGKey(1)}, rng=jax.random.PRNGKey(0)),
        "got decode_rng beside the argument rng",
    ),
    "temperature": (dict(decoder_params={"temperature": np.inf}), "temperature: got inf, expected"),
    "steps": (
        dict(decoder_params={"max_decode_steps": 0}),
        "max_decode_steps: got 0, expected an integer of at least 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_speculative_is_rejected(case, golden):
    _, io, target = golden
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        predict(speculative(target), target.params, io["encoder_input_tokens"], **options)


def test_an_embedding_that_is_the_head_counts_once(monkeypatch):
    config = dataclasses.replace(SHAPES["1.0"], num_heads=2, head_dim=8, mlp_dim=32)  # no padding
    model = make.model_of(make.random_params(config), config)
    size = 4 * sum(array.size for array in jax.tree.leaves(make.random_params(config)))
    monkeypatch.setattr(interop, "_MOST_BYTES", size)
    interop._check_model(model, None)
    monkeypatch.setattr(interop, "_MOST_BYTES", size - 1)
    with pytest.raises(ValueError, match="GB of weights, expected at most"):
        interop._check_model(model, None)


def max_decode(inputs, cache, tokens_to_logits, eos_id, num_decodes):
    """A decode function of one's own."""


def test_bad_configurations_are_rejected(golden, tmp_path):
    folder, _, target = golden
    with pytest.raises(
        ValueError, match="decode_fn: got .*max_decode.*, expected t5x.decoding.beam_search or"
    ):
        speculative(target, decode_fn=max_decode)
    with pytest.raises(ValueError, match="sampling: got .* for decode_fn, expected None"):
        speculative(target, decode_fn=decoding.temperature_sample, sampling=sd.SamplingConfig())
    with pytest.raises(ValueError, match="beam_width: got 4 for sampling, expected None"):
        speculative(target, beam_width=4)
    with pytest.raises(
        ValueError,
        match="drafter: got EarlyExitDrafter, expected a name as for --drafter, or a drafter "
        "that needs nothing",
    ):
        speculative(target, drafter=sd.EarlyExitDrafter(target, 1))
    with pytest.raises(ValueError, match="gamma: got -1, expected"):
        speculative(target, drafter=str(folder), gamma=-1)
    with pytest.raises(ValueError, match="lenience: got none with verifier='lenient'"):
        speculative(target, drafter=str(folder), verifier="lenient")
    with pytest.raises(ValueError, match="no/such: got no such path"):
        speculative(target, drafter="no/such")
    sample = functools.partial(decoding.temperature_sample, topk=2, topp=0.5)
    for options, message in (
        (dict(decode_fn=sample), "decoder_params: got topk and topp, expected at most one"),
        (
            dict(decode_fn=functools.partial(sample, topp=0.0, state_callback_fn=max_decode)),
            "decoder_params: got state_callback_fn, expected only",
        ),
        (
            dict(decode_fn=functools.partial(decoding.beam_search, alpha=-1.0)),
            "alpha: got -1.0, expected a finite",
        ),
        (dict(decode_fn=decoding.beam_search, beam_width=0), "beam_width: got 0, expected an int"),
        (dict(default_decoder_params=models.DecoderParams), "default_decoder_params: got <class"),
        (dict(drafter_dtype="float16"), "drafter_dtype: got 'float16', expected 'float32', 'bf"),
    ):
        with pytest.raises(ValueError, match=message):
            speculative(target, **options)
    for name in ("report", "counts", "rescale_log_probs"):
        with pytest.raises(ValueError, match=f"{name}: got 'False', expected True or False"):
            speculative(target, **{name: "False"})
    with pytest.raises(
        ValueError, match="module: got object, expected t5x.examples.t5.network.Transformer"
    ):
        interop.SpeculativeEncoderDecoderModel(object(), Ids, Ids, None)
    wide = dataclasses.replace(target.config, vocab_size=400)
    sd.save(sd.LanguageModel.random(wide, vocabulary=ByteVocabulary(3)), tmp_path / "bytes")
    with pytest.raises(ValueError, match="got a vocabulary of 262 tokens that differs from T5X's"):
        speculative(target, drafter=str(tmp_path / "bytes"))
    other = dataclasses.replace(target.config, num_decoder_layers=3)
    model = interop.SpeculativeEncoderDecoderModel(interop.make_transformer(other), Ids, Ids, None)
    with pytest.raises(
        ValueError, match="params: parameter decoder/layers_2/.*: got none, expected"
    ):
        predict(model, target.params, np.ones((1, 4), np.int32))


WRITTEN = {
    "policy": dict(gamma=sd.Heuristic(3), verifier="token"),
    "sampled": dict(gamma=2, sampling=sd.SamplingConfig(temperature=0.8, top_k=9)),
    "tree": dict(tree=sd.Tree.uniform((2, 2))),
}
MODEL = """
from __gin__ import dynamic_registration
from specdec_jax.decoding import generation_config
from specdec_jax.interop import t5x as speculative
import t5x_calls

include "{path}"

speculative.SpeculativeEncoderDecoderModel:
  config = @generation_config.GenerationConfig()
  module = @t5x_calls.tiny_module()
  input_vocabulary = @t5x_calls.Ids()
  output_vocabulary = @t5x_calls.Ids()
  optimizer_def = None
  drafter = "lookup"
  rescale_log_probs = False
{more}
t5x_calls.configured.model = @speculative.SpeculativeEncoderDecoderModel()
"""


def configured(path, more: str = ""):
    """Returns the model of a gin file that includes the one at `path`."""
    gin.clear_config()
    try:
        gin.parse_config(MODEL.format(path=path, more=more))
        return gin.get_configurable(t5x_calls.configured)()
    finally:
        gin.clear_config()


@pytest.mark.parametrize("case", WRITTEN)
def test_an_included_file_of_options_decodes_as_generate(case, golden, tmp_path):
    """A file of `GenerationConfig.save` has the same effect in T5X's gin file."""
    _, io, target = golden
    path, key, inputs = tmp_path / "generation.gin", jax.random.key(5), io["encoder_input_tokens"]
    sd.GenerationConfig(**WRITTEN[case]).save(path)
    rows = [[int(token) for token in row if token] for row in inputs]
    drafter, ends = sd.PromptLookupDrafter(), dict(eos_ids=[1], max_new_tokens=STEPS)
    result = sd.generate(target, rows, drafter=drafter, config=path, key=key, **ends)
    tokens, aux = predict(
        configured(path), target.params, inputs, rng=key, decoder_params={"eos_id": 1}
    )
    expected = np.zeros_like(tokens)
    for row, length in enumerate(result.lengths):
        expected[row, :length] = result.tokens[row, :length]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_allclose(aux["scores"], result.log_probs.sum(axis=1), atol=1e-4)


def test_options_in_gin_change_the_file_or_are_rejected(golden, tmp_path):
    path = tmp_path / "generation.gin"
    sd.GenerationConfig(gamma=2, verifier="token").save(path)
    assert configured(path)._decoder.gamma == 2
    assert configured(path, "  gamma = None")._decoder.gamma == 2
    assert configured(path, "  gamma = 5")._decoder.gamma == 5
    assert configured(
        path, "  tree = 'widths:2,2'\n  gamma = 3\n  verifier = 'block'"
    )._decoder.tree
    for name in ("gama", "stop", "deadline", "num_samples", "num_beams", "key"):
        with pytest.raises(ValueError, match=f"doesn't have a parameter named '{name}'"):
            configured(path, f"  {name} = 3")
    for options in (dict(num_samples=2), dict(stop="x"), dict(deadline=1.0), dict(num_beams=2)):
        sd.GenerationConfig(**options).save(path)
        (name,) = options
        with pytest.raises(ValueError, match=f"{name}: got .* for T5X, expected"):
            configured(path)
    with pytest.raises(TypeError, match="gama: got an unknown option; did you mean"):
        speculative(golden[2], gama=3)
    with pytest.raises(TypeError, match="key: got an unknown option for T5X"):
        speculative(golden[2], key=3)


# The benchmark's variant.


@pytest.mark.slow
def test_benchmark_against_t5x(golden):
    """Interleaved with ours, the same tokens, and fillers that count for nothing."""
    _, io, target = golden
    rows = [[int(token) for token in row if token] for row in io["encoder_input_tokens"]][:3]
    options = benchmark_command.BenchmarkOptions(
        target="target",
        drafter="drafter",
        gamma=(2,),
        max_new_tokens=STEPS,
        repeats=1,
        batch_size=2,
        against="t5x",
    )
    batches = variants.cut_batches(rows, rows, options.batch_size, options.seed)
    others = benchmark_command.make_others(options, target)
    record, problems = analysis_benchmark.benchmark(
        Workload(target, sd.ModelDrafter(target), batches, options), others
    )
    against = record["against"]
    assert (against["name"], against["differences"], problems) == ("t5x", [], [])
    assert against["tokens"] == record["plain"]["tokens"] == record["speculative"][0]["tokens"]
    assert (
        against["improvement"].keys() == {"plain", "gamma 2"} and against["seconds"]["median"] > 0
    )
    assert "\nt5x            " in summaries.benchmark_summary(
        record
    ) and "  gamma 2: " in summaries.benchmark_summary(record)
    json.dumps(record)


def test_benchmark_of_beams_against_t5x(golden):
    """T5X's own beam search of the same model gives the same tokens and scores.

    Rows that fill up a batch count for nothing.
    """
    _, io, target = golden
    rows = [[int(token) for token in row if token] for row in io["encoder_input_tokens"]][:3]
    options = benchmark_command.BenchmarkOptions(
        target="target",
        drafter="drafter",
        gamma=(2,),
        max_new_tokens=STEPS,
        repeats=1,
        batch_size=2,
        against="t5x",
        num_beams=3,
        length_penalty=1.5,
    )
    options.check()
    batches = variants.cut_batches(rows, rows, options.batch_size, options.seed)
    others = benchmark_command.make_others(options, target)
    record, problems = beams.benchmark_beams(
        Workload(target, sd.ModelDrafter(target), batches, options), others
    )
    against = record["against"]
    assert (against["name"], against["differences"], problems) == ("t5x", [], [])
    assert against["tokens"] == record["plain"]["tokens"] == record["searches"][0]["tokens"]
    ours = sd.generate(
        target, batches[0].inputs, num_beams=3, length_penalty=1.5, max_new_tokens=STEPS
    )
    np.testing.assert_allclose(others["t5x"].results[0].scores, ours.scores, rtol=1e-5)
    assert "\nt5x " in summaries.benchmark_summary(record)


def test_t5x_cannot_decode_every_model(golden):
    _, _, target = golden
    for change, message in (
        (dict(eos_ids=(1, 2)), "EOS ids"),
        (dict(start_token=3), "start token 3"),
    ):
        model = sd.LanguageModel(target.config, target.params, **change)
        with pytest.raises(ValueError, match=f"t5x: got .*{message}.*, expected one EOS id"):
            interop.make_predictor(model)
    for change in (dict(max_distance=64), dict(scale_decoder_outputs=True)):
        with pytest.raises(ValueError, match="t5x: got"):
            interop.make_transformer(dataclasses.replace(target.config, **change))
