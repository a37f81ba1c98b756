"""BART, mBART, Marian, Pegasus and M2M-100: the numbers and tokens of transformers, and drafting.

`scripts/write_golden_bart.py` describes the files.
"""

import json
import shutil
import tracemalloc

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from golden_bart import NAMES, VARIANTS, decode, draft, golden, load, plain_options
from golden_models import GOLDEN
from tiers import parametrize

import specdec_jax as sd
from specdec_jax.analysis.agreement import agreement
from specdec_jax.checkpoints import huggingface_bart, native_format, safetensors_files
from specdec_jax.drafters.assisted import AssistedNGramDrafter
from specdec_jax.models import parameters
from specdec_jax.models.bart import BartConfig
from specdec_jax.tokenizers import huggingface_folders, piece_tables

pytestmark = pytest.mark.usefixtures("quick")


@parametrize("name", (*NAMES, *VARIANTS), first=len(NAMES))
def test_logits_are_transformers(name):
    numbers = golden(name)
    given = numbers["inputs"], numbers["decoder_tokens"], numbers["input_lengths"]
    logits, expected = np.asarray(load(name).logits(*given)), numbers["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@parametrize("name", ("marian", *VARIANTS, *NAMES[1:]), first=2)
def test_greedy_tokens_are_transformers(name):
    expected = golden(name)["greedy"]
    np.testing.assert_array_equal(decode(name, **plain_options(name)), expected)
    speculative = decode(name, drafter=draft(name), gamma=3, **plain_options(name))
    np.testing.assert_array_equal(speculative, expected)


@parametrize("name", (*NAMES, *VARIANTS), first=1)
def test_beams_with_the_folders_defaults_are_transformers(name):
    np.testing.assert_array_equal(decode(name), golden(name)["beams"])


def test_the_variants_are_what_they_are_named_for():
    """A head of its own, padding in an output, the start of a language, tables of positions."""
    untied, mbart, sines = load("bart_untied"), load("mbart_25"), load("pegasus").params
    assert not untied.config.logits_via_embedding
    assert 1 in golden("bart_untied")["greedy"] and -1 in golden("bart_untied")["greedy"]
    assert mbart.start_token == 45 and mbart.config.mlp_activation == "gelu_exact"
    for stack in ("encoder", "decoder"):
        table, formula = (
            params[stack]["position_embedder"]["embedding"]
            for params in (load("pegasus_table").params, sines)
        )
        assert np.abs(np.asarray(table) - np.asarray(formula)).max() > 1


def test_kernels_and_xla_agree():
    """With the CPU's own kernels, and in plain XLA with the parameters as checkpoints have them."""
    numbers, target = golden("mbart"), load("mbart")
    mask = np.arange(numbers["inputs"].shape[1]) < numbers["input_lengths"][:, None]
    arrays = numbers["inputs"], mask, numbers["decoder_tokens"]
    apply = jax.jit(target.config.module().apply)  # one program, not one an operation
    logits = apply({"params": target.params}, *map(jnp.asarray, arrays))
    expected = numbers["logits"]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


DRAFTERS = {
    "tree": lambda name: dict(drafter=draft(name), tree=sd.Tree.uniform((3, 2))),
    "beams": lambda name: dict(drafter=draft(name), gamma=2, num_beams=4),
    "early exit": lambda name: dict(drafter=sd.EarlyExitDrafter(load(name), 1), gamma=2),
    "shortlist": lambda name: dict(drafter=shortlisted(name), gamma=2),
    "prompt lookup": lambda name: dict(drafter=sd.PromptLookupDrafter(), gamma=3),
}


def shortlisted(name):
    drafter = draft(name)
    ids = {1, *range(0, drafter.model.config.vocab_size, 2)}
    return sd.ModelDrafter(drafter.model, shortlist=sorted(ids))


@pytest.mark.slow
@pytest.mark.parametrize("name", (*NAMES, *VARIANTS))
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafts_change_no_token(kind, name):
    if (kind, name) == ("prompt lookup", "marian_separate"):
        pytest.skip("inputs are not copied")
    if kind == "early exit" and name in ("marian", "mbart_25"):
        pytest.skip("it has one layer")
    plain = plain_options(name) | (dict(num_beams=4) if kind == "beams" else {})
    expected = decode(name, **plain)
    given = plain | DRAFTERS[kind](name)
    np.testing.assert_array_equal(decode(name, **given), expected)


@parametrize("dtype", ["float32", "int8"], first=1)
def test_what_is_saved_is_loaded_again(dtype, tmp_path):
    target = load("marian")
    sd.save(target, tmp_path / "saved", dtype=dtype)
    again = sd.load(tmp_path / "saved", "float32", say=lambda line: None)
    ids = [5, 9, 11, 0]
    expected = sd.generate(target, [ids], max_new_tokens=6)
    found = sd.generate(again, [ids], max_new_tokens=6)
    assert again.config == target.config and again.quantized == (dtype == "int8")
    if dtype == "float32":
        np.testing.assert_array_equal(found.tokens, expected.tokens)
    with pytest.raises(ValueError, match="format: got 't5x' for a BartConfig"):
        sd.save(target, tmp_path / "t5x", format="t5x")


def export(model, folder):
    """Writes Hugging Face's folder of a model, and returns its path."""
    sd.save(model, folder, format="huggingface", say=lambda line: None)
    return folder


def rebuild(name, change=lambda key, array: array, **fields):
    """Returns a golden model with other fields, whose parameters went through `change`."""
    model = load(name)
    config, flat = model.config.replace(**fields), parameters.flatten(model.params)
    if "decoder/logits_dense/kernel" in parameters.parameter_shapes(config):
        flat["decoder/logits_dense/kernel"] = 0.5 * flat["token_embedder/embedding"].T
    flat.setdefault("encoder_embedder/embedding", flat["token_embedder/embedding"][::-1])
    params = {key: change(key, flat[key]) for key in parameters.parameter_shapes(config)}
    ids = dict(start_token=model.start_token, eos_ids=model.eos_ids)
    defaults = dict(generation_config=model.generation_config)
    return sd.LanguageModel(config, parameters.unflatten(params), **ids, **defaults)


def move_positions(key, array):
    return array + 0.25 if key.endswith("position_embedder/embedding") else array


def assert_same(found, expected):
    assert found.config == expected.config
    assert (found.start_token, found.eos_ids) == (expected.start_token, expected.eos_ids)
    assert found.generation_config == expected.generation_config
    ours, theirs = (parameters.flatten(model.params) for model in (expected, found))
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        np.testing.assert_array_equal(theirs[key], array, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_converted_is_loaded_again(name, tmp_path):
    source = GOLDEN / "hf_bart" / name
    sd.convert(source, tmp_path / "hf", format="huggingface", say=lambda line: None)
    assert_same(sd.load(tmp_path / "hf", "float32", say=lambda line: None), load(name))


CHANGED = {
    "a head of its own": ("bart", dict(logits_via_embedding=False)),
    "an embedding for each stack": (
        "bart",
        dict(logits_via_embedding=False, separate_embeddings=True),
    ),
    "a head beside two embeddings": ("marian_separate", dict(logits_via_embedding=False)),
    "another activation": ("mbart", dict(mlp_activation="gelu")),
    "learned positions": ("marian", dict(change=move_positions)),
}


@parametrize("case", CHANGED, first=2)
def test_what_was_changed_is_exported_too(case, tmp_path):
    name, changes = CHANGED[case]
    model = rebuild(name, **changes)
    assert_same(sd.load(export(model, tmp_path / "hf"), "float32", say=lambda line: None), model)


def test_stacks_with_embeddings_of_their_own_do_not_read_the_shared_one(tmp_path):
    """In transformers 5 nothing does where the head is not tied."""
    shutil.copytree(GOLDEN / "hf_bart" / "bart_untied", tmp_path, dirs_exist_ok=True)
    path, expected = tmp_path / "model.safetensors", load("bart_untied")
    tensors = safetensors.numpy.load_file(path)
    tensors["model.shared.weight"] = tensors["model.shared.weight"][::-1].copy()
    safetensors.numpy.save_file(tensors, path)
    assert_same(sd.load(tmp_path, "float32", say=lambda line: None), expected)
    tensors["model.encoder.embed_tokens.weight"] = tensors.pop("model.shared.weight")
    safetensors.numpy.save_file(tensors, path)
    found = sd.load(tmp_path, "float32", say=lambda line: None)
    assert found.config == expected.config.replace(separate_embeddings=True)
    found, expected = (parameters.flatten(model.params) for model in (found, expected))
    embedding = expected["token_embedder/embedding"]
    np.testing.assert_array_equal(found["token_embedder/embedding"], embedding)
    np.testing.assert_array_equal(found["encoder_embedder/embedding"], embedding[::-1])


def test_positions_in_bfloat16_are_those_of_the_formula(tmp_path):
    folder = GOLDEN / "hf_bart" / "m2m_100"
    rounded = sd.load(folder, "bfloat16", say=lambda line: None)
    again = sd.load(export(rounded, tmp_path / "hf"), "float32", say=lambda line: None)
    key = "encoder/position_embedder/embedding"
    made, expected = (parameters.flatten(model.params)[key] for model in (again, load("m2m_100")))
    np.testing.assert_array_equal(made, expected)


CANNOT = {
    "positions that were trained": (
        "m2m_100",
        dict(change=move_positions),
        "for an M2M-100 whose decoder/position_embedder/embedding was trained .*, expected the s",
    ),
    "norms of no class": (
        "bart",
        dict(embedding_norm=False, logits_bias=False),
        "'huggingface' for norm_place='post', embedding_norm=False, logits_bias=False, .* bart, mb",
    ),
    "two embeddings": (
        "marian_separate",
        dict(norm_place="pre"),
        "encoder_vocab_size=48, expected those of one of bart",
    ),
    "two embeddings for one vocabulary": (
        "bart",
        dict(separate_embeddings=True),
        "'huggingface' for separate_embeddings, expected a head of its own",
    ),
}


@parametrize("case", CANNOT, first=1)
def test_what_cannot_be_exported_is_rejected(case, tmp_path):
    name, changes, expected = CANNOT[case]
    if changes.get("norm_place") == "pre":
        config = load(name).config.replace(**changes)
        model = sd.LanguageModel.random(config, eos_ids=(0,))
    else:
        model = rebuild(name, **changes)
    with pytest.raises(ValueError, match=expected) as caught:
        export(model, tmp_path / "hf")
    assert len(str(caught.value).splitlines()) == 1 and not list(tmp_path.iterdir())


UNTIED = [(name, dict(logits_via_embedding=False)) for name in NAMES]
SEPARATE = [
    (name, dict(logits_via_embedding=False, separate_embeddings=True))
    for name in NAMES
    if name != "marian_separate"
]
LEARNED = [(name, dict(change=move_positions)) for name in ("bart", "marian", "pegasus")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, changes", [*((name, {}) for name in NAMES), *UNTIED, *SEPARATE, *LEARNED]
)
def test_transformers_reads_what_is_exported(name, changes, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = rebuild(name, **changes)
    read = transformers.AutoModelForSeq2SeqLM.from_pretrained
    folder = export(model, tmp_path / "hf")
    theirs, info = read(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    numbers = golden(name)
    arrays = numbers["inputs"], numbers["decoder_tokens"], numbers["input_lengths"]
    inputs, fed = (torch.tensor(array).long() for array in arrays[:2])
    mask = (torch.arange(inputs.shape[1]) < torch.tensor(arrays[2])[:, None]).long()
    with torch.no_grad():
        found = theirs.eval()(input_ids=inputs, attention_mask=mask, decoder_input_ids=fed).logits
    expected = np.asarray(model.logits(*arrays))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with torch.no_grad():
        made = theirs.generate(input_ids=inputs, attention_mask=mask)[:, 1:].numpy()
    assert theirs.generation_config.decoder_start_token_id == model.start_token
    if not changes:  # with the defaults that were written, beams of the golden file
        for row, tokens in zip(made, numbers["beams"]):
            count = np.count_nonzero(tokens >= 0)
            np.testing.assert_array_equal(row[:count], tokens[:count])


def test_inputs_and_outputs_have_as_many_tokens_as_there_are_positions():
    target = load("pegasus")
    for inputs, limit, expected in (
        ([[5] * 33], 4, "the model has 32 positions"),
        ([[5]], 32, "sequences of up to 33 tokens, new ones included"),
    ):
        with pytest.raises(ValueError, match=expected):
            sd.generate(target, inputs, max_new_tokens=limit, generation_config=None)
    assert sd.generate(target, [[5] * 32], max_new_tokens=31, generation_config=None).tokens.size
    with pytest.raises(ValueError, match="decoder_tokens: got sequences of up to 33 tokens"):
        target.logits([[5]], [[0] * 33])


def edit(folder, **changes):
    options = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(options))


REJECTED = {
    "separate embeddings": (
        "bart",
        dict(share_encoder_decoder_embeddings=False),
        "share_encoder_decoder_embeddings: got False, expected true",
    ),
    "ids of outputs": ("marian_separate", dict(decoder_vocab_size=39), "embedding: got shape"),
    "stacks of other widths": ("bart", dict(decoder_ffn_dim=32), "decoder_ffn_dim: got 32, expec"),
    "heads": ("bart", dict(decoder_attention_heads=4), "decoder_attention_heads: got 4, expected"),
    "activation": ("bart", dict(activation_function="mish"), "got 'mish', expected one of gelu"),
    "positions": ("bart", dict(max_position_embeddings=40), "position_embedder/embedding: got sha"),
    "more layers": ("pegasus", dict(encoder_layers=3), "encoder/layers_2/.*: got none"),
    "fewer layers": ("pegasus", dict(encoder_layers=1), "unexpected parameter encoder.layers.1"),
    "no vocabulary": ("bart", dict(vocab_size=0), "vocab_size: got 0, expected at least 1"),
    "padding": ("m2m_100", dict(pad_token_id=99), "pad_token_id: got 99, expected an id below"),
    "encoder only": ("bart", dict(architectures=["BartForCausalLM"]), "got .*BartForCausalLM"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_not_supported_is_rejected_in_one_line(case, tmp_path):
    name, changes, expected = REJECTED[case]
    shutil.copytree(GOLDEN / "hf_bart" / name, tmp_path / "model")
    edit(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=expected) as caught:
        sd.load(tmp_path / "model", "float32", say=lambda line: None)
    assert len(str(caught.value).splitlines()) == 1


def test_an_mbart_without_a_start_token_starts_with_bos(tmp_path):
    """The tokens are those of transformers 5.24, which needs one of the two ids as well."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "hf_bart" / "mbart", folder)
    (folder / "generation_config.json").unlink()
    options = json.loads((folder / "config.json").read_text())
    del options["decoder_start_token_id"]
    inputs = [[37, 28, 23, 14, 16, 5, 6, 4, 10, 2]]
    for bos, tokens in ((0, [12, 41]), (3, [46, 40])):
        (folder / "config.json").write_text(json.dumps(options | {"bos_token_id": bos}))
        target = sd.load(folder, "float32", say=lambda line: None)
        found = sd.generate(target, inputs, max_new_tokens=8).tokens.tolist()
        assert found == [[*tokens, 40, 40, 40, 40, 40, 2]]
    options.pop("bos_token_id", None)
    (folder / "config.json").write_text(json.dumps(options))
    with pytest.raises(ValueError, match=r"the start tokens \(\), expected one"):
        sd.load(folder, "float32", say=lambda line: None)


FILES_OF_IDS = "config.json", "generation_config.json"


@pytest.mark.parametrize("name", FILES_OF_IDS)
def test_an_m2m100_whose_outputs_start_with_padding_is_rejected(name, tmp_path):
    """Its class gives padding no position, and later tokens others with a cache than without."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "hf_bart" / "m2m_100", folder)
    options = {file: json.loads((folder / file).read_text()) for file in FILES_OF_IDS}
    for file in FILES_OF_IDS:
        options[file].pop("decoder_start_token_id", None)
    options[name]["decoder_start_token_id"] = options["config.json"]["pad_token_id"]
    for file in FILES_OF_IDS:
        (folder / file).write_text(json.dumps(options[file]))
    expected = "decoder_start_token_id: got 1, expected another id than pad_token_id"
    with pytest.raises(ValueError, match=expected) as caught:
        sd.load(folder, "float32", say=lambda line: None)
    assert len(str(caught.value).splitlines()) == 1


LANGUAGES = {
    "NllbTokenizer": ({"src_lang": "eng_Latn"}, ["eng_Latn", "a", "</s>"]),
    "NllbTokenizerFast": ({"src_lang": "deu_Latn"}, ["deu_Latn", "a", "</s>"]),
    "MBart50Tokenizer": ({"src_lang": "de_DE"}, ["de_DE", "a", "</s>"]),
    "MBartTokenizer": ({"src_lang": "en_XX"}, ["a", "</s>", "en_XX"]),
    "": ({"src_lang": "de_DE"}, ["a", "</s>", "de_DE"]),  # config.json says that it is an mBART
}


@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_class_puts_the_language_beside_a_text(kind, tmp_path):
    options, expected = LANGUAGES[kind]
    names = ["<pad>", "</s>", "<unk>", "a", "eng_Latn", "deu_Latn", "de_DE", "en_XX"]
    ids = {name: i for i, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "<unk>"))
    tokenizer.add_special_tokens([name for name in names if name != "a"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    (tmp_path / "config.json").write_text('{"model_type": "mbart"}')
    config.write_text(json.dumps({"tokenizer_class": kind} | options))
    vocabulary = huggingface_folders.open_folder(tmp_path, (1,))
    assert vocabulary.encode_input("a") == [ids[name] for name in expected]
    config.write_text(json.dumps({"tokenizer_class": kind, "src_lang": "fra_Latn"}))
    with pytest.raises(ValueError, match="src_lang: got 'fra_Latn', expected one of "):
        huggingface_folders.open_folder(tmp_path, (1,))


def test_marians_tokenizer_is_transformers(tmp_path):
    record = json.loads((GOLDEN / "hf_bart" / "marian_tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(record["pieces"]))
    shutil.copy(GOLDEN / "hf_tokenizer" / "spiece.model", tmp_path / "source.spm")
    vocabulary = huggingface_folders.open_folder(tmp_path, (0,))
    assert vocabulary.pad_id == len(record["pieces"]) - 1 and vocabulary.eos_ids == (0,)
    for case in record["records"]:
        assert vocabulary.encode_input(case["text"]) == case["ids"], case
        assert vocabulary.decode(case["ids"]) == case["decoded"], case
    entry, contents = native_format.describe_vocabulary(vocabulary)
    (tmp_path / entry["file"]).write_bytes(contents)
    again = native_format.open_vocabulary(tmp_path, entry)
    assert again.fingerprint() == vocabulary.fingerprint()
    assert again.encode_input("The river") == vocabulary.encode_input("The river")
    sound = json.loads(contents)
    broken = [{}, {"pieces": {"a": -1}}, sound | {"eos_token": ["x"]}, sound | {"source_spm": 5}]
    for text in map(json.dumps, broken):
        with pytest.raises(ValueError, match="^(source_spm: )?got "):
            piece_tables.PieceTableVocabulary(text)
    (tmp_path / "tokenizer_config.json").write_text('{"separate_vocabs": true}')
    with pytest.raises(ValueError, match="target_vocab.json: got "):
        huggingface_folders.open_folder(tmp_path, (0,))


def test_flaxs_file_is_read(tmp_path):
    """Flax's names of weights are those of their kinds; that of the logits' bias is its own."""
    shutil.copytree(GOLDEN / "hf_bart" / "bart", tmp_path, dirs_exist_ok=True)
    tensors = safetensors_files.open_folder(tmp_path)
    tree = {}
    for name, tensor in tensors.items():
        *parents, last = name.split(".")
        if last == "weight":
            table = parents[-1].startswith(("embed_", "shared"))
            last = "embedding" if table else "scale" if "norm" in parents[-1] else "kernel"
        array = tensor.load("float32")
        tree["/".join([*parents, last])] = array.T if last == "kernel" else array
    content = flax.serialization.msgpack_serialize(parameters.unflatten(tree))
    (tmp_path / "flax_model.msgpack").write_bytes(content)
    (tmp_path / "model.safetensors").unlink()
    found, expected = sd.load(tmp_path, "float32", say=lambda line: None), load("bart")
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_ids_of_two_vocabularies_are_not_mixed_up():
    target = load("marian_separate")
    assert (target.config.input_vocab_size, target.config.vocab_size) == (48, 40)
    inputs = [[45, 5, 0]]  # 45 is an id of inputs alone
    for drafter in (sd.PromptLookupDrafter(), AssistedNGramDrafter(), sd.SuffixDrafter()):
        with pytest.raises(ValueError, match="expected one that does not copy: ids of inputs are"):
            sd.generate(target, inputs, drafter=drafter, gamma=2)
    with pytest.raises(ValueError, match="got ids outside the vocabulary, expected 0 to 47"):
        sd.generate(target, [[48, 0]])
    with pytest.raises(ValueError, match="got ids outside the vocabulary, expected 0 to 39"):
        sd.generate(target, inputs, decoder_prefix=[[45]])
    other = sd.ModelDrafter(load("marian"))
    with pytest.raises(ValueError, match="a model with one vocabulary, expected one with separate"):
        sd.generate(target, inputs, drafter=other, gamma=2)


@pytest.mark.slow
def test_an_input_past_a_drafters_encoder_is_rejected():
    shape = dict(vocab_size=24, emb_dim=16, num_heads=2, num_encoder_layers=1, mlp_dim=32)
    shape |= dict(num_decoder_layers=1)
    target, drafter = (
        sd.LanguageModel.random(sd.PRESETS["bart/base"].replace(**shape, num_positions=positions))
        for positions in (64, 16)
    )
    inputs = np.full((1, 20), 3, np.int32)
    with pytest.raises(ValueError, match="drafter: got an input of 20 tokens, expected at most"):
        sd.generate(target, inputs, drafter=sd.ModelDrafter(drafter), max_new_tokens=4, gamma=2)


@pytest.mark.parametrize("kind", ["marian", "m2m_100"])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_formulas_table_takes_no_more_memory_than_it_has(kind, transpose):
    shape = dict(vocab_size=8, num_heads=1, num_encoder_layers=1, num_decoder_layers=1, mlp_dim=8)
    config = BartConfig(**shape, emb_dim=256, num_positions=20_000)
    name = "encoder/position_embedder/embedding"
    options = {"model_type": kind}
    table = huggingface_bart._read_positions(name, config, options, {})[name]
    tracemalloc.start()
    array = table.read(np.dtype("float32"), transpose)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.shape == ((256, 20_000) if transpose else (20_000, 256))
    blocks = 10 * 4 * 2**20  # beside the table: angles, sines and cosines of one block, in float64
    assert most < array.nbytes + blocks < 5 * array.nbytes
    rows = huggingface_bart._KINDS[kind].make_positions(np.arange(20_000), 256, 1)
    whole = rows.astype(np.float32)
    np.testing.assert_array_equal(array, whole.T if transpose else whole)


def test_presets_have_the_published_sizes():
    """transformers counts neither M2M-100's sines nor the bias of the logits as parameters."""
    counts = {"mbart/large": 610_879_488, "pegasus/large": 570_797_056}
    counts |= {"m2m100/418m": 483_905_536, "nllb/600m": 615_073_792, "nllb/3.3b": 3_344_863_232}
    for name, expected in counts.items():
        config = sd.PRESETS[name]
        found = parameters.parameter_count(config) - config.logits_bias * config.vocab_size
        if name.startswith(("m2m100", "nllb")):
            found -= 2 * config.num_positions * config.emb_dim
        elif name.startswith("mbart"):  # two rows before each table that nothing reads
            found += 2 * 2 * config.emb_dim
        assert found == expected, name


@pytest.mark.slow
def test_outputs_are_scored_within_the_positions_of_a_model():
    """Their padded length, 12, is more than the target has positions."""
    shape = dict(vocab_size=24, emb_dim=16, num_heads=2, num_encoder_layers=1, mlp_dim=32)
    shape |= dict(num_decoder_layers=1)
    target, drafter = (
        sd.LanguageModel.random(BartConfig(**shape, num_positions=positions), seed=positions)
        for positions in (11, 15)
    )
    tokens, lengths = np.full((2, 11), 5, np.int32), np.array([11, 4])
    config = sd.SamplingConfig(temperature=1.0)
    agreed = agreement(target, drafter, [[3, 1], [4, 1]], tokens, lengths, config)
    assert agreed.overlap.shape == (2, 11) and (agreed.overlap[0] > 0).all()
