"""GPT-like models: what is rejected before anything compiles, and commands."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from announcements import without_course
from flax import serialization
from gpt_inputs import IO, TINY, decode, decode_golden, golden, tiny
from gpt_models import FOLDER, tensors, write_hf
from toy_models import compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import acceptance, near_ties, timing, variants
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis.variants import Workload
from specdec_jax.checkpoints import huggingface, loader
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import distill, main, measure
from specdec_jax.commands.output_lines import join_lines
from specdec_jax.decoding.generate import prepare
from specdec_jax.models import parameters, t5
from specdec_jax.models.gpt import GPT_PRESETS
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

pytestmark = pytest.mark.usefixtures("quick")


# What is rejected, before anything compiles.


def rejected(function, message, kind=ValueError):
    def call():
        with pytest.raises(kind, match=re.escape(message)):
            function()

    assert compilations(call) == 0


@pytest.mark.slow
def test_more_tokens_than_positions():
    model = tiny()
    expected = (
        "inputs: got sequences of up to 41 tokens, new ones included, expected at most "
        "num_positions = 40"
    )
    rejected(lambda: decode(model, [[3] * 4, [3] * 29]), expected)
    assert prepare(model, [[3] * 28], max_new_tokens=12)[1].limits == [12]
    short = sd.ModelDrafter(tiny(1, num_positions=20))
    for drafter in (short, sd.VerticalCascade(short, sd.PromptLookupDrafter(), 2)):
        rejected(
            lambda drafter=drafter: decode(model, [[3] * 9], drafter),
            "drafter: got sequences of up to 21",
        )
    rejected(lambda: model.logits(None, np.zeros((1, 41), int)), "got sequences of up to 41")


@pytest.mark.slow
def test_other_kinds_of_model():
    t5, gpt = tiny_t5(0), tiny()
    expected = (
        "drafter: got a model with an encoder, expected a decoder-only model, like the target"
    )
    rejected(lambda: decode(gpt, [[3]], sd.ModelDrafter(t5)), expected)
    expected = (
        "drafter: got a decoder-only model, expected a model with an encoder, like the target"
    )
    rejected(lambda: decode(t5, [[3]], sd.ModelDrafter(gpt)), expected)
    rejected(
        lambda: decode(gpt, [[3]], decoder_prefix=[[4]]),
        "decoder_prefix: got a prefix",
        sd.UnsupportedCombination,
    )
    rejected(
        lambda: t5.logits(None, np.zeros((1, 2), int)),
        "inputs: got None for a model with an encoder",
    )
    rejected(
        lambda: gpt.logits(np.array([[24]]), np.array([[3]])), "inputs: got id 24, expected 0 to 23"
    )


def test_a_drafter_of_another_kind_is_not_distilled(tmp_path):
    (tmp_path / "text.tsv").write_text("a\tb\n")
    config = distill.DistillConfig(
        target="ende/target",
        data_dir=str(tmp_path),
        source_files=("text.tsv",),
        validation_files=("text.tsv",),
        output_dir=str(tmp_path / "run"),
        drafter=str(FOLDER),
    )
    message = "drafter: got a decoder-only model, expected a model with an encoder, like the target"
    rejected(lambda: distill.run(config), message)
    rejected(lambda: t5.check_t5("target", TINY), "target: got a decoder-only model, expected a T5")


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(num_positions=0), "GPTConfig.num_positions: got 0, expected at least 1"),
        (dict(num_heads=3), "GPTConfig.emb_dim: got 16, expected a multiple of num_heads = 3"),
        (dict(mlp_activation="tanh"), "GPTConfig.mlp_activation: got 'tanh'"),
    ],
)
def test_bad_shapes(shape, message):
    rejected(lambda: dataclasses.replace(TINY, **shape), message)


def assert_golden(model):
    jax.tree.map(np.testing.assert_array_equal, model.params, golden().params)
    assert (model.config, model.start_token, model.eos_ids) == (golden().config, 287, (287,))


def test_names_without_prefix_masks_and_a_copy_of_the_head(tmp_path):
    assert all(name.startswith("transformer.") for name in tensors())
    plain = {name.removeprefix("transformer."): x for name, x in tensors().items()}
    masks = {
        "h.0.attn.bias": np.ones((1, 1, 4, 4), "f"),
        "h.1.attn.masked_bias": np.float32([-1e4]),
    }
    assert_golden(loader.load(write_hf(tmp_path / "old", plain | masks), "float32"))
    copied = tensors() | {"lm_head.weight": plain["wte.weight"].copy()}
    assert_golden(loader.load(write_hf(tmp_path / "copy", copied), "float32"))


def test_flax_file(tmp_path):
    tree = {}
    for name, x in tensors().items():
        *parents, last = name.split(".")
        if last == "weight":
            last = (
                "embedding"
                if parents[-1] in ("wte", "wpe")
                else "scale"
                if "ln_" in parents[-1]
                else "kernel"
            )
        tree["/".join([*parents, last])] = np.ascontiguousarray(x.T) if last == "kernel" else x
    folder = write_hf(tmp_path / "flax")
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(parameters.unflatten(tree)))
    assert_golden(loader.load(folder, "float32"))


def test_a_head_of_its_own(tmp_path):
    head = np.random.default_rng(0).normal(size=(288, 24)).astype("f")
    folder = write_hf(
        tmp_path / "hf", tensors() | {"lm_head.weight": head}, tie_word_embeddings=False
    )
    model = loader.load(folder, "float32")
    np.testing.assert_array_equal(model.params["decoder"]["logits_dense"]["kernel"], head.T)
    tokens = IO["decoder_tokens"]
    apply = functools.partial(
        model.network.module.apply, method=lambda m, t: m.decoder(m.token_embedder(t))
    )
    states = jax.jit(apply)({"params": model.network.params}, tokens)
    np.testing.assert_allclose(model.logits(None, tokens), np.asarray(states) @ head.T, atol=1e-3)


def export(folder, **fields):
    """Writes the golden model with other fields to Hugging Face's format, and returns its path."""
    model = golden()
    config = model.config.replace(**fields)
    ids = dict(start_token=model.start_token, eos_ids=model.eos_ids)
    params = sd.LanguageModel.random(config, 0).params if fields else model.params
    made = sd.LanguageModel(config, params, model.vocabulary, **ids)
    sd.save(made, folder, format="huggingface", say=lambda line: None)
    return made, folder


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(logits_via_embedding=False, mlp_activation="silu"),
        dict(mlp_activation="gelu_exact"),
    ],
)
def test_what_is_exported_is_loaded_again(fields, tmp_path):
    model, folder = export(tmp_path / "hf", **fields)
    again = loader.load(folder, "float32")
    assert again.config == model.config and again.fingerprint == model.fingerprint
    assert (again.start_token, again.eos_ids) == (model.start_token, model.eos_ids)
    assert again.vocabulary.encode_prompt("a") == model.vocabulary.encode_prompt("a")


def test_what_cannot_be_exported_is_rejected(tmp_path):
    message = "format: got 'huggingface' for the activation 'linear', expected one of gelu"
    with pytest.raises(ValueError, match=message):
        export(tmp_path / "hf", mlp_activation="linear")
    vocabulary = SentencePieceVocabulary.train(["a b c", "b c d"] * 3, 10)
    model = sd.LanguageModel.random(TINY, 0, vocabulary, eos_ids=(1,))
    message = "vocabulary: got SentencePieceVocabulary, expected a tokenizer.json"
    with pytest.raises(ValueError, match=message):
        sd.save(model, tmp_path / "hf", format="huggingface")
    assert not (tmp_path / "hf").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, dict(mlp_activation="gelu_exact")])
def test_transformers_reads_what_is_exported(tmp_path, fields):
    """The exact gelu is Cerebras-GPT's."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, folder = export(tmp_path / "hf", **fields)
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs, info = read(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    tokens = IO["decoder_tokens"]
    with torch.no_grad():
        found = theirs.eval()(torch.tensor(tokens).long()).logits
    np.testing.assert_allclose(model.logits(None, tokens), found, rtol=1e-4, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "The museum was founded in"
    assert tokenizer(text).input_ids == model.vocabulary.encode_prompt(text)


@pytest.mark.parametrize(
    "option, value",
    [
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("reorder_and_upcast_attn", True),
        ("add_cross_attention", True),
        ("activation_function", "tanh"),
        ("n_embd", "24"),
    ],
)
def test_options_that_are_not_here(option, value, tmp_path):
    folder = write_hf(tmp_path / "hf", tensors(), **{option: value})
    rejected(
        lambda: loader.load(folder), f"{folder / 'config.json'}: {option}: got {value!r}, expected"
    )


def test_an_usual_id_that_the_vocabulary_lacks_ends_nothing(tmp_path):
    """A GPT-2's is 50256 where no file says; an id of a file that is too large stays an error."""
    none = dict(bos_token_id=None, eos_token_id=None)
    folder = write_hf(tmp_path / "hf", tensors())
    path = folder / "config.json"
    options = {k: v for k, v in json.loads(path.read_text()).items() if k not in none}
    path.write_text(json.dumps(options))
    assert options["vocab_size"] < 50256 and not (folder / "generation_config.json").exists()
    model = loader.load(folder, "float32")
    assert (model.start_token, model.eos_ids) == (0, ())
    path.write_text(json.dumps(options | {"eos_token_id": 50256}))
    rejected(lambda: loader.load(folder), "special id: got 50256, expected an id of the vocabulary")


def test_damaged_folders(tmp_path):
    some = {name: x for name, x in tensors().items() if "c_attn" not in name}
    folder = write_hf(tmp_path / "some", some)
    rejected(
        lambda: loader.load(folder),
        "causal_attention/qkv/kernel: got none, expected one of shape (24, 72)",
    )
    more = write_hf(
        tmp_path / "more",
        tensors() | {"transformer.h.0.crossattention.c_attn.weight": np.ones((2, 2), "f")},
    )
    rejected(lambda: loader.load(more), "expected only those of a GPT of this configuration")
    folder = write_hf(tmp_path / "kind", tensors(), architectures=["GPT2DoubleHeadsModel"])
    rejected(lambda: loader.load(folder), "unknown architecture: got model_type 'gpt2'")


def test_special_ids(tmp_path):
    def ids(**options):
        return dataclasses.astuple(
            huggingface.open_folder(
                write_hf(tmp_path / str(len(list(tmp_path.iterdir()))), tensors(), **options)
            )
        )[3:5]

    assert ids(bos_token_id=5, eos_token_id=[3, 4]) == (5, (3, 4))
    assert ids(eos_token_id=None) == (287, ())  # nothing ends a sequence


def test_own_folder(tmp_path):
    sd.save(golden(), tmp_path / "model")
    again = sd.load(tmp_path / "model", "float32")
    assert_golden(again)
    assert again.vocabulary.fingerprint() == golden().vocabulary.fingerprint()
    half = sd.load(tmp_path / "model", "bfloat16")
    np.testing.assert_allclose(half.logits(None, IO["decoder_tokens"]), IO["logits"], atol=0.5)


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_the_network(tied):
    config, tokens = dataclasses.replace(TINY, logits_via_embedding=tied), jnp.ones((1, 2), int)
    params = jax.eval_shape(config.module().init, jax.random.key(0), tokens)["params"]
    assert {
        name: leaf.shape for name, leaf in parameters.flatten(params).items()
    } == parameters.parameter_shapes(config)


def test_sizes_of_the_presets():
    counts = {name: parameters.parameter_count(config) for name, config in GPT_PRESETS.items()}
    assert (
        counts["gpt2/small"] == 124_439_808 and counts["gpt2/xl"] == 1_557_611_200
    )  # Hugging Face's counts
    assert (
        counts["gpt/97m"] // 10**6 == 97 and round(counts["gpt/6m"] / 1e6) == 6
    )  # the paper's, section 4.2


# Commands.


def test_specdec_generate(capsys):
    """Prompts of a Hugging Face folder, one of them empty, in a batch that is filled up."""
    texts = ["The ferry froze", "", " stop"]
    ids = [golden().vocabulary.encode(text) for text in texts]
    assert 8 < max(map(len, ids)) <= 12, "the shapes of the golden batch"
    expected = [join_lines(text) for text in decode_golden(ids, eos_ids=None).texts[:3]]
    argv = [
        "generate",
        f"--target={FOLDER}",
        "--drafter=exit:1",
        "--dtype=float32",
        "--batch_size=4",
        "--gamma=3",
    ]
    argv += ["--compilation_cache_dir="]
    assert main.main([*argv, "--max_new_tokens=16", *texts, texts[1]]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n") == [*expected, expected[1], ""] and not without_course(err)
    assert main.main([*argv, "--max_new_tokens=38", *texts]) == 2
    out, err = capsys.readouterr()
    assert not out and without_course(err).count("\n") == 1 and "num_positions = 40" in err


PAIR_PROMPTS = [[3, 4, 5, 3], [7, 8, 9]]


@pytest.mark.slow
def test_benchmark():
    options = benchmark_command.BenchmarkOptions(gamma=(2,), repeats=1, max_new_tokens=8)
    drafter, batches = (
        sd.ModelDrafter(noisy_copy(tiny(), 0.3)),
        variants.cut_batches(PAIR_PROMPTS, PAIR_PROMPTS, 1, 0),
    )
    record, problems = analysis_benchmark.benchmark(Workload(tiny(), drafter, batches, options))
    assert not problems and record["speculative"][0]["differences"] == []
    assert {"target encoder 8", "drafter encoder 8", "draft step", "verify 2"} <= set(
        record["steps"]
    )


@pytest.mark.slow
def test_what_is_measured_of_a_prompt():
    """Measures the cache after a prompt, the margin of its next id, and the models' agreement."""
    target, draft = tiny(), noisy_copy(tiny(), 0.3)
    plain = decode(target, PAIR_PROMPTS)
    prefix = [*PAIR_PROMPTS[0], *plain.tokens[0, :3]]
    found = near_ties.measure_difference(target, PAIR_PROMPTS[0], prefix, width=3)
    logits = np.sort(target.logits(None, np.array([prefix]))[0, -1])
    assert found.noise < 1e-4 and abs(found.margin - (logits[-1] - logits[-2])) < 1e-4
    cache = timing.prefill_variant(target.network, timing.CallShape(1, 4, 12))()
    assert np.all(np.any(np.asarray(cache.layers[1].key) != 0, axis=(0, 2))[:3])
    assert (
        timing.total_slots(target, 8, 12, 3)
        == prepare(target, [[3]], max_new_tokens=12, gamma=3, drafter=sd.PromptLookupDrafter())[
            0
        ].tokens.shape[1]
    )

    config, tokens = SamplingConfig(temperature=1.0, repetition_penalty=1.5), plain.tokens[:2, :8]
    agreed = acceptance.agreement(target, draft, PAIR_PROMPTS, tokens, np.array([8, 8]), config)
    for row, prompt in enumerate(PAIR_PROMPTS):
        whole, dists = np.array([[*prompt, *tokens[row]]]), []
        for model in (target, draft):
            logits = np.array(
                model.logits(None, np.pad(whole, ((0, 0), (0, 12 - whole.shape[1]))))[0], np.float64
            )
            for place in range(whole.shape[1]):
                seen = list(set(whole[0, : place + 1].tolist()))
                values = logits[place, seen]
                logits[place, seen] = np.where(values > 0, values / 1.5, values * 1.5)
            dists.append(np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True))
        overlap = np.minimum(*dists).sum(axis=-1)[len(prompt) - 1 :][:8]
        np.testing.assert_allclose(agreed.overlap[row, :8], overlap, atol=1e-4)


def test_counting_and_overlap_are_one_after_prompts_of_different_lengths():
    """With argmax exactly, on the positions after each prompt; the last batch is filled up."""
    drafter, prompts = sd.ModelDrafter(noisy_copy(tiny(), 0.3)), [*PAIR_PROMPTS, [5, 4]]
    options = measure.MeasureOptions(target="target", drafter="drafter", max_new_tokens=12)
    found = acceptance.compare(
        Workload(tiny(), drafter, variants.cut_batches(prompts, prompts, 2, 0), options), 3
    )
    assert found.positions > 20 and 0 < found.counted < 1 and found.counted == found.overlap


def test_presets_of_one_kind():
    def check(**options):
        return benchmark_command.BenchmarkOptions(preset="gpt/97m", **options).check

    check(drafter_preset="gpt/6m")()
    expected = (
        "drafter_preset: got 't5_1_1/small', expected a shape of the same family as 'gpt/97m'"
    )
    rejected(check(drafter_preset="t5_1_1/small"), expected)
    rejected(
        check(drafter_preset="gpt/6m", max_new_tokens=449),
        "preset: got sequences of up to 513 tokens",
    )
