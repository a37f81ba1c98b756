"""Decoder-only models: against Hugging Face's GPT-2, prompts through the decode loop, files, what is refused."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from gpt_models import FOLDER, tensors, write_hf
from toy_models import HashModel, compilations, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import acceptance, arms, near_ties, timing
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.checkpoints import huggingface, huggingface_tokenizers, loader
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import distill, generate, main, measure
from specdec_jax.decoding.inputs import slots
from specdec_jax.decoding.request import Plan, prepare
from specdec_jax.models import heads, parameters, t5
from specdec_jax.models.cache import KVCache
from specdec_jax.models.gpt import GPT, GPT_PRESETS
from specdec_jax.speculative.sampling import SamplingConfig

IO = dict(np.load(FOLDER / "io.npz"))
RECORDS = json.loads((FOLDER / "ids.json").read_text(encoding="utf-8"))
PROMPTS = [row[:length].tolist() for row, length in zip(IO["inputs"], IO["input_lengths"])]
GREEDY = np.where(IO["greedy"] < 0, 0, IO["greedy"])
TINY = sd.GPTConfig(24, 16, 2, 2, 32, num_positions=40)
pytestmark = pytest.mark.usefixtures("quick")


@functools.cache
def golden():
    return loader.load(FOLDER, "float32")


@functools.cache
def tiny(seed=0, **shape):
    return sd.LanguageModel.random(dataclasses.replace(TINY, **shape), seed, eos_ids=(23,))


DRAFTERS = {
    "plain": lambda model: None,
    "model": lambda model: sd.ModelDrafter(noisy_copy(model, 0.05)),
    "lookup": lambda model: sd.PromptLookupDrafter(max_match=1),
    "exit": lambda model: sd.EarlyExitDrafter(model, 1),
}


def decode(model, prompts, drafter=None, **options):
    """Of lists always four rows, so that few shapes compile."""
    if isinstance(prompts, list):
        prompts = prompts + [None] * (4 - len(prompts))
    return sd.generate(model, prompts, drafter=drafter, **{"gamma": 3, "max_new_tokens": 12, "eos_ids": ()} | options)


def decode_golden(prompts, drafter=None, **options):
    """The same with the shapes of the golden batch."""
    return decode(golden(), [*prompts, PROMPTS[0]], drafter, **{"max_new_tokens": 16} | options)


# Against Hugging Face.


def test_logits_of_whole_sequences_and_of_their_ends():
    logits = golden().logits(None, IO["decoder_tokens"])
    np.testing.assert_allclose(logits, IO["logits"], rtol=0, atol=1e-4)
    rest = golden().logits(IO["decoder_tokens"][:, :5], IO["decoder_tokens"][:, 5:])
    np.testing.assert_allclose(rest, IO["logits"][:, 5:], rtol=0, atol=1e-4)
    # Prompts of several lengths: the ids after each are those of `decoder_tokens` again.
    lengths = np.array([3, 1, 6, 2])
    tail = np.stack([row[length : length + 4] for row, length in zip(IO["decoder_tokens"], lengths)])
    expected = np.stack([row[length : length + 4] for row, length in zip(IO["logits"], lengths)])
    rest = golden().logits(np.where(np.arange(7) < lengths[:, None], IO["decoder_tokens"][:, :7], 999), tail, lengths)
    np.testing.assert_allclose(rest, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_of_prompts_of_different_lengths(name):
    """In one batch, padded on the right; Hugging Face padded on the left, and decoded each alone."""
    assert IO["greedy_margin"] > 0.01 and len(set(IO["input_lengths"].tolist())) == 4
    np.testing.assert_array_equal(IO["greedy"], IO["greedy_alone"])
    run = functools.partial(decode, golden(), IO["inputs"], DRAFTERS[name](golden()), max_new_tokens=16)
    result = run(input_lengths=IO["input_lengths"], eos_ids=None)
    np.testing.assert_array_equal(result.tokens, GREEDY)
    if name != "plain":
        assert 0 < result.stats.accepted < result.stats.drafted
    early = run(input_lengths=IO["input_lengths"], eos_ids=int(IO["early_eos_id"]))
    np.testing.assert_array_equal(early.tokens, np.where(IO["greedy_early"] < 0, 0, IO["greedy_early"]))
    np.testing.assert_array_equal(early.lengths, (IO["greedy_early"] >= 0).sum(axis=1))


def test_log_probs_are_those_of_the_whole_sequence():
    result = decode(golden(), PROMPTS, max_new_tokens=16)
    for row, prompt in enumerate(PROMPTS):
        whole = np.array([[*prompt, *result.tokens[row]]])
        law = jax.nn.log_softmax(golden().logits(None, np.pad(whole, ((0, 0), (0, 40 - whole.shape[1])))))[0]
        places = np.arange(len(prompt) - 1, whole.shape[1] - 1)
        np.testing.assert_allclose(result.log_probs[row], law[places, whole[0, places + 1]], atol=1e-4)


def test_an_empty_prompt_is_the_start_token_and_none_is_nothing():
    result = decode_golden([[], None], eos_ids=None)
    np.testing.assert_array_equal(result.tokens[0], IO["unconditional"])
    assert result.finish_reasons == ["length", "empty", "length", "empty"]
    assert result.lengths.tolist() == [16, 0, 16, 0] and result.texts[1] == ""
    assert prepare(HashModel(16), [[5, 1], None], max_new_tokens=2)[1].empty.tolist() == [False, True]


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_tokenizers_of_both_forms(form, tmp_path):
    files = ("tokenizer.json",) if form == "tokenizer.json" else ("vocab.json", "merges.txt")
    for name in files:
        shutil.copy(FOLDER / name, tmp_path)
    vocabulary = huggingface_tokenizers.open_folder(tmp_path, (287,))
    assert (vocabulary.size, vocabulary.eos_ids) == (288, (287,))
    assert vocabulary.fingerprint() == golden().vocabulary.fingerprint()
    for record in RECORDS:
        assert vocabulary.encode(record["text"]) == record["ids"]
        assert vocabulary.decode(record["ids"]) == record["text"].replace("<|endoftext|>", "")


def test_added_tokens_beside_merges(tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<turn>": 289, "<pause>": 288}))
    vocabulary = huggingface_tokenizers.open_folder(tmp_path, (287,))
    assert vocabulary.encode("<turn>The<pause>") == [289, *vocabulary.encode("The"), 288]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<turn>": 300}))
    with pytest.raises(ValueError, match="got added token '<turn>' with id 300"):
        huggingface_tokenizers.open_folder(tmp_path, (287,))
    (tmp_path / "merges.txt").write_text("no merge of pieces\n")
    with pytest.raises(ValueError, match="vocab.json: got no readable vocabulary with merges"):
        huggingface_tokenizers.open_folder(tmp_path, (287,))


# Through the loop.


def test_id_0_is_an_id():
    """In prompts, arrays without lengths among them, and in outputs."""
    model, rows = tiny(), [[5, 7, 0, 0], [0, 0, 0, 0], [5, 7, 0, 3], [1, 0, 0, 0]]
    expected = decode(model, rows)
    np.testing.assert_array_equal(decode(model, np.array(rows)).tokens, expected.tokens)
    assert not np.array_equal(expected.tokens[0], decode(model, [[5, 7]]).tokens[0])
    zeros = decode(model, rows, sd.ModelDrafter(model), sampling=SamplingConfig(logit_bias={0: 1e3}))
    assert not zeros.tokens.any() and zeros.lengths.tolist() == [12] * 4
    assert np.all(zeros.log_probs < 0) and zeros.finish_reasons == ["length"] * 4
    assert zeros.stats.acceptance_rate == 1


def test_what_lies_past_a_prompt_does_not_matter():
    """To a target, and to a drafter with a short head and kernels of 8 bits."""
    rng, lengths = np.random.default_rng(1), np.array([2, 5, 3, 1])
    inputs, junk = rng.integers(0, 24, (2, 4, 7))
    drafter = sd.ModelDrafter(tiny(1), shortlist=range(3, 24), int8=True)
    clean, dirty = (
        decode(tiny(), np.where(np.arange(7) < lengths[:, None], inputs, rest), drafter, input_lengths=lengths)
        for rest in (0, junk)
    )
    assert clean.stats.drafted
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)
    np.testing.assert_allclose(clean.log_probs, dirty.log_probs, atol=1e-5)
    for row, length in enumerate(lengths):
        alone = decode(tiny(), [inputs[row, :length]])
        np.testing.assert_array_equal(alone.tokens[0], clean.tokens[row])


def test_samples_share_their_prompt():
    """Four rows each time: of four prompts, and of two, whose cache is repeated."""
    prompts, key = [[3, 4, 5], [7], [0, 0], [9, 3]], jax.random.key(3)
    spread, narrow = SamplingConfig(temperature=1.0), SamplingConfig(temperature=1e-4)
    run = lambda number, config: (
        sd.generate(
            tiny(), prompts[: 4 // number], num_samples=number, sampling=config, max_new_tokens=12, eos_ids=(), key=key
        ).tokens
    )
    one, several = run(1, spread), run(2, spread)
    np.testing.assert_array_equal(several[::2], one[:2])
    assert len({tuple(row) for row in several.tolist()}) == 4
    np.testing.assert_array_equal(run(2, narrow), np.repeat(decode(tiny(), prompts).tokens[:2], 2, axis=0))
    one_row = jnp.arange(6.0).reshape(1, 3, 2)  # without batch axis
    np.testing.assert_array_equal(KVCache(one_row, one_row).repeated(2).key, np.stack([one_row, one_row]))


def test_processors_see_the_prompt():
    """Against the argmax of adjusted logits of the whole sequence, id by id."""
    config = SamplingConfig(repetition_penalty=3.0, no_repeat_ngram=2)
    result = decode_golden([[3, 4, 5, 3]], sampling=config)
    sequence = [3, 4, 5, 3]
    for token in result.tokens[0]:
        whole = np.array([sequence + [0] * (24 - len(sequence))])
        logits = np.array(golden().logits(None, whole)[0, len(sequence) - 1])
        seen = list(set(sequence))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 3, logits[seen] * 3)
        logits[[b for a, b in zip(sequence, sequence[1:]) if a == sequence[-1]]] = -np.inf
        assert token == np.argmax(logits)
        sequence.append(token)


def test_heads_draft_from_the_states():
    config = sd.HeadsConfig(2, 16, 24, share_head=True)
    drafter = sd.HeadsDrafter.of(tiny(), config, heads.init_params(config, jax.random.key(0)))
    result = decode(tiny(), [[3, 4, 5, 3, 4], [7]], drafter)
    np.testing.assert_array_equal(result.tokens, decode(tiny(), [[3, 4, 5, 3, 4], [7]]).tokens)
    assert result.stats.drafted


@pytest.mark.parametrize("drafter", [sd.PromptLookupDrafter(), sd.AssistedNGramDrafter()])
def test_copies_come_from_the_prompt(drafter):
    """The first draft, of which nothing has been decoded yet."""
    state, request = prepare(tiny(), [[0, 5, 6, 7, 8, 0, 5], [9]], drafter=drafter, gamma=3, max_new_tokens=12)
    draft = lambda state, wanted: request.drafter.draft(state.draft_state, state, wanted)[1]
    found = jax.jit(draft)(state, np.array([3, 0], np.int32))
    assert found.tokens[0].tolist() == [6, 7, 8] and found.num_drafted.tolist() == [3, 0]


def test_after_warm_up_nothing_compiles():
    model, options = tiny(), dict(max_new_tokens=9)
    assert sd.warm_up(model, max_input_length=12, **options) == 2

    def prompts_of_every_length():
        for length in range(13):
            sd.generate(model, [[3] * length], key=jax.random.key(0), **options)

    assert compilations(prompts_of_every_length) == 0


@pytest.mark.parametrize("refill", [True, False])
def test_prompts_of_long_jobs_are_padded_to_their_own_length(monkeypatch, refill):
    """Every prompt gives what it gives in one batch of all; states of short ones have fewer slots."""
    rng, widths = np.random.default_rng(2), []
    prompts = [
        rng.integers(0, 24, length).tolist() for length in [12, 3, 0, 9, 5, 11, 1, 10, 8, 12, 2, 11, 10, 4, 9, 6, 8]
    ]
    options = dict(max_new_tokens=6, eos_ids=(23,))
    expected = sd.generate(tiny(), prompts, **options)
    arguments = Plan.arguments
    monkeypatch.setattr(
        Plan, "arguments",
        lambda plan, *given: (found := arguments(plan, *given), widths.append((found[6].shape[1], found[3])))[0],
    )  # fmt: skip
    found = dict(sd.decode_stream(tiny(), prompts, batch_size=2, refill=refill, **options))
    for row, length in enumerate(expected.lengths):
        assert found[row][0].tokens == expected.tokens[row, :length].tolist()
    assert set(widths) == {(8, slots(8 + 6, 0)), (12, slots(12 + 6, 0))}


def test_streamed_text_is_the_text():
    drafter, prompts = DRAFTERS["model"](golden()), [golden().vocabulary.encode("The ferry"), None, None, PROMPTS[0]]
    expected = decode(golden(), prompts, drafter, max_new_tokens=16)
    pieces = list(sd.stream(golden(), prompts, drafter=drafter, gamma=3, max_new_tokens=16, eos_ids=()))
    for row in range(4):
        assert "".join(piece.text for piece in pieces if piece.row == row) == expected.texts[row]
        ids = sum((piece.tokens for piece in pieces if piece.row == row), [])
        assert ids == expected.tokens[row, : expected.lengths[row]].tolist()


# What is refused, before anything compiles.


def refused(function, message, kind=ValueError):
    def call():
        with pytest.raises(kind, match=re.escape(message)):
            function()

    assert compilations(call) == 0


def test_more_tokens_than_positions():
    model = tiny()
    expected = "inputs: got sequences of up to 41 tokens, new ones included, expected at most num_positions = 40"
    refused(lambda: decode(model, [[3] * 4, [3] * 29]), expected)
    assert prepare(model, [[3] * 28], max_new_tokens=12)[1].limits == [12]
    short = sd.ModelDrafter(tiny(1, num_positions=20))
    for drafter in (short, sd.VerticalCascade(short, sd.PromptLookupDrafter(), 2)):
        refused(lambda drafter=drafter: decode(model, [[3] * 9], drafter), "drafter: got sequences of up to 21")
    refused(lambda: model.logits(None, np.zeros((1, 41), int)), "got sequences of up to 41")


def test_other_kinds_of_model():
    t5, gpt = tiny_t5(0), tiny()
    expected = "drafter: got a model with an encoder, expected a decoder-only model, like the target"
    refused(lambda: decode(gpt, [[3]], sd.ModelDrafter(t5)), expected)
    expected = "drafter: got a decoder-only model, expected a model with an encoder, like the target"
    refused(lambda: decode(t5, [[3]], sd.ModelDrafter(gpt)), expected)
    refused(lambda: decode(gpt, [[3]], decoder_prefix=[[4]]), "decoder_prefix: got one", sd.UnsupportedCombination)
    refused(lambda: t5.logits(None, np.zeros((1, 2), int)), "inputs: got None for a model with an encoder")
    refused(lambda: gpt.logits(np.array([[24]]), np.array([[3]])), "inputs: got id 24, expected 0 to 23")


def test_only_t5s_are_distilled_by_command(tmp_path):
    (tmp_path / "text.tsv").write_text("a\tb\n")
    config = distill.DistillConfig(
        target=str(FOLDER), data_dir=str(tmp_path), source_files=("text.tsv",), validation_files=("text.tsv",),
        output_dir=str(tmp_path / "run"), drafter=str(FOLDER),
    )  # fmt: skip
    refused(lambda: distill.run(config), "target: got a decoder-only model, expected a T5")
    refused(lambda: t5.t5_only("target", TINY), "target: got a decoder-only model, expected a T5")


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(num_positions=0), "GPTConfig.num_positions: got 0, expected at least 1"),
        (dict(num_heads=3), "GPTConfig.emb_dim: got 16, expected a multiple of num_heads = 3"),
        (dict(mlp_activation="tanh"), "GPTConfig.mlp_activation: got 'tanh'"),
    ],
)
def test_bad_shapes(shape, message):
    refused(lambda: dataclasses.replace(TINY, **shape), message)


def assert_golden(model):
    jax.tree.map(np.testing.assert_array_equal, model.params, golden().params)
    assert (model.config, model.start_token, model.eos_ids) == (golden().config, 287, (287,))


def test_names_without_prefix_masks_and_a_copy_of_the_head(tmp_path):
    assert all(name.startswith("transformer.") for name in tensors())
    plain = {name.removeprefix("transformer."): x for name, x in tensors().items()}
    masks = {"h.0.attn.bias": np.ones((1, 1, 4, 4), "f"), "h.1.attn.masked_bias": np.float32([-1e4])}
    assert_golden(loader.load(write_hf(tmp_path / "old", plain | masks), "float32"))
    copied = tensors() | {"lm_head.weight": plain["wte.weight"].copy()}
    assert_golden(loader.load(write_hf(tmp_path / "copy", copied), "float32"))


def test_flax_file(tmp_path):
    tree = {}
    for name, x in tensors().items():
        *parents, last = name.split(".")
        if last == "weight":
            last = "embedding" if parents[-1] in ("wte", "wpe") else "scale" if "ln_" in parents[-1] else "kernel"
        tree["/".join([*parents, last])] = np.ascontiguousarray(x.T) if last == "kernel" else x
    folder = write_hf(tmp_path / "flax")
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(parameters.unflatten(tree)))
    assert_golden(loader.load(folder, "float32"))


def test_a_head_of_its_own(tmp_path):
    head = np.random.default_rng(0).normal(size=(288, 24)).astype("f")
    folder = write_hf(tmp_path / "hf", tensors() | {"lm_head.weight": head}, tie_word_embeddings=False)
    model = loader.load(folder, "float32")
    np.testing.assert_array_equal(model.params["decoder"]["logits_dense"]["kernel"], head.T)
    tokens = IO["decoder_tokens"]
    apply = functools.partial(model.network.module.apply, method=lambda m, t: m.decoder(m.token_embedder(t)))
    states = jax.jit(apply)({"params": model.network.params}, tokens)
    np.testing.assert_allclose(model.logits(None, tokens), np.asarray(states) @ head.T, atol=1e-3)


@pytest.mark.parametrize("option, value", [
    ("layer_norm_epsilon", 1e-6), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
    ("reorder_and_upcast_attn", True), ("add_cross_attention", True), ("activation_function", "gelu"), ("n_embd", "24"),
])  # fmt: skip
def test_options_that_are_not_here(option, value, tmp_path):
    folder = write_hf(tmp_path / "hf", tensors(), **{option: value})
    refused(lambda: loader.load(folder), f"{folder / 'config.json'}: {option}: got {value!r}, expected")


def test_damaged_folders(tmp_path):
    some = {name: x for name, x in tensors().items() if "c_attn" not in name}
    folder = write_hf(tmp_path / "some", some)
    refused(lambda: loader.load(folder), "causal_attention/qkv/kernel: got none, expected one of shape (24, 72)")
    more = write_hf(
        tmp_path / "more", tensors() | {"transformer.h.0.crossattention.c_attn.weight": np.ones((2, 2), "f")}
    )
    refused(lambda: loader.load(more), "expected only those of a GPT of this configuration")
    folder = write_hf(tmp_path / "kind", tensors(), architectures=["GPT2DoubleHeadsModel"])
    refused(lambda: loader.load(folder), "unknown architecture: got model_type 'gpt2'")


def test_special_ids(tmp_path):
    ids = lambda **options: dataclasses.astuple(
        huggingface.open_folder(write_hf(tmp_path / str(len(list(tmp_path.iterdir()))), tensors(), **options))
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
    params = jax.eval_shape(GPT(config).init, jax.random.key(0), tokens)["params"]
    assert {name: leaf.shape for name, leaf in parameters.flatten(params).items()} == parameters.parameter_shapes(
        config
    )


def test_sizes_of_the_presets():
    counts = {name: parameters.parameter_count(config) for name, config in GPT_PRESETS.items()}
    assert counts["gpt2/small"] == 124_439_808 and counts["gpt2/xl"] == 1_557_611_200  # Hugging Face's counts
    assert counts["gpt/97m"] // 10**6 == 97 and round(counts["gpt/6m"] / 1e6) == 6  # the paper's, section 4.2


# Commands.


def test_specdec_generate(capsys):
    """A folder of Hugging Face's, prompts of different lengths, one of them empty, in a batch that is filled up."""
    texts = ["The ferry froze", "", " stop"]
    ids = [golden().vocabulary.encode(text) for text in texts]
    assert 8 < max(map(len, ids)) <= 12, "the shapes of the golden batch"
    expected = [generate._one_line(text) for text in decode_golden(ids, eos_ids=None).texts[:3]]
    argv = ["generate", f"--target={FOLDER}", "--drafter=exit:1", "--dtype=float32", "--batch_size=4", "--gamma=3"]
    argv += ["--compilation_cache_dir="]
    assert main.main([*argv, "--max_new_tokens=16", *texts, texts[1]]) == 0
    out, err = capsys.readouterr()
    assert out.split("\n") == [*expected, expected[1], ""] and not err
    assert main.main([*argv, "--max_new_tokens=38", *texts]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "num_positions = 40" in err


PAIR_PROMPTS = [[3, 4, 5, 3], [7, 8, 9]]


@pytest.mark.slow
def test_benchmark():
    options = benchmark_command.BenchmarkOptions(gamma=(2,), repeats=1, max_new_tokens=8)
    drafter, batches = sd.ModelDrafter(noisy_copy(tiny(), 0.3)), arms.cut(PAIR_PROMPTS, PAIR_PROMPTS, 1, 0)
    record, problems = analysis_benchmark.benchmark(tiny(), drafter, batches, options)
    assert not problems and record["speculative"][0]["differences"] == []
    assert {"target encoder 8", "drafter encoder 8", "draft step", "verify 2"} <= set(record["steps"])


def test_what_is_measured_of_a_prompt():
    """The cache after a prompt, how near a tie its next id is, and how far two models agree on what follows it."""
    target, draft = tiny(), noisy_copy(tiny(), 0.3)
    plain = decode(target, PAIR_PROMPTS)
    prefix = [*PAIR_PROMPTS[0], *plain.tokens[0, :3]]
    found = near_ties.measure_difference(target, PAIR_PROMPTS[0], prefix, width=3)
    logits = np.sort(target.logits(None, np.array([prefix]))[0, -1])
    assert found.noise < 1e-4 and abs(found.margin - (logits[-1] - logits[-2])) < 1e-4
    cache = timing.prefill_arm(target.network, 1, 4, 12)()
    assert np.all(np.any(np.asarray(cache.layers[1].key) != 0, axis=(0, 2))[:3])
    assert (
        timing.total_slots(target, 8, 12, 3)
        == prepare(target, [[3]], max_new_tokens=12, gamma=3, drafter=sd.PromptLookupDrafter())[0].tokens.shape[1]
    )

    config, tokens = SamplingConfig(temperature=1.0, repetition_penalty=1.5), plain.tokens[:2, :8]
    agreed = acceptance.agreement(target, draft, PAIR_PROMPTS, tokens, np.array([8, 8]), config)
    for row, prompt in enumerate(PAIR_PROMPTS):
        whole, laws = np.array([[*prompt, *tokens[row]]]), []
        for model in (target, draft):
            logits = np.array(model.logits(None, np.pad(whole, ((0, 0), (0, 12 - whole.shape[1]))))[0], np.float64)
            for place in range(whole.shape[1]):
                seen = list(set(whole[0, : place + 1].tolist()))
                values = logits[place, seen]
                logits[place, seen] = np.where(values > 0, values / 1.5, values * 1.5)
            laws.append(np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True))
        overlap = np.minimum(*laws).sum(axis=-1)[len(prompt) - 1 :][:8]
        np.testing.assert_allclose(agreed.overlap[row, :8], overlap, atol=1e-4)


def test_counting_and_overlap_are_one_after_prompts_of_different_lengths():
    """With argmax exactly, on the positions after each prompt; the last batch is filled up."""
    drafter, prompts = sd.ModelDrafter(noisy_copy(tiny(), 0.3)), [*PAIR_PROMPTS, [5, 4]]
    options = measure.MeasureOptions(target="target", drafter="drafter", max_new_tokens=12)
    found = acceptance.compare(tiny(), drafter, arms.cut(prompts, prompts, 2, 0), 3, options)
    assert found.positions > 20 and 0 < found.counted < 1 and found.counted == found.overlap


def test_presets_of_one_kind():
    check = lambda **options: benchmark_command.BenchmarkOptions(preset="gpt/97m", **options).check
    check(drafter_preset="gpt/6m")()
    expected = "drafter_preset: got 't5_1_1/small', expected a shape of the same family as 'gpt/97m'"
    refused(check(drafter_preset="t5_1_1/small"), expected)
    refused(check(drafter_preset="gpt/6m", max_new_tokens=449), "preset: got sequences of up to 513 tokens")
