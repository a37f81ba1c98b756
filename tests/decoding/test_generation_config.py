"""A folder's decoding defaults: what transformers generates with them, and what calls do."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tiers
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.checkpoints.converter import save
from specdec_jax.decoding.checks import SamplingChanges, UnsupportedCombination
from specdec_jax.decoding.defaults import fill_sampling
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.planning import plan_decoding
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative import distributions
from specdec_jax.speculative.processors import Context

pytestmark = pytest.mark.usefixtures("quick")
CASES = json.loads((GOLDEN / "hf_defaults.json").read_text(encoding="utf-8"))
DECODED = [name for name, case in CASES.items() if "tokens" in case]
# The fields of the others are among those of these.
QUICK = ("none", "max_length", "both maxima", "last", "min_new_tokens", "too long a minimum")
QUICK += ("beams, early", "beams, processed", "neutral", "everything", "old config.json", "prompts")
QUICK += ("old config.json, first", "unusual values", "no end")
SAMPLED = [name for name, case in CASES.items() if "scores" in case]


def folder_of(case, folder):
    shutil.copytree(GOLDEN / case["model"], folder)
    file = folder / {"generation": "generation_config.json", "config": "config.json"}[case["file"]]
    if case["file"] == "config":
        (folder / "generation_config.json").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | case["fields"]))
    return folder


def load(folder):
    printed = []
    return sd.load(folder, "float32", say=printed.append), printed


def inputs_of(case):
    io = np.load(GOLDEN / case["model"] / "io.npz")
    return [row[:length].tolist() for row, length in zip(io["inputs"], io["input_lengths"])]


def new_tokens(result):
    return [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in DECODED],
)
def test_transformers_tokens(name, tmp_path):
    case = CASES[name]
    model, _ = load(folder_of(case, tmp_path / "model"))
    inputs = inputs_of(case)
    assert new_tokens(sd.generate(model, inputs)) == case["tokens"]
    if name in ("everything", "beams, processed", "prompts"):
        assert (
            new_tokens(sd.generate(model, inputs, drafter=sd.PromptLookupDrafter()))
            == case["tokens"]
        )
        found = dict(sd.decode_stream(model, inputs, batch_size=2))
        assert [found[number][0].tokens for number in range(4)] == case["tokens"]
    if name == "prompts":
        rows = [[], [], [], []]
        for piece in sd.stream(model, inputs):
            rows[piece.row] += piece.tokens
        assert rows == case["tokens"]


@tiers.parametrize("name", SAMPLED, first=1)
def test_transformers_distribution(name, tmp_path):
    case = CASES[name]
    model, _ = load(folder_of(case, tmp_path / "model"))
    inputs = inputs_of(case)
    plan = plan_decoding(model, inputs)
    padded = np.zeros((4, 12), np.int32)
    for row, ids in enumerate(inputs):
        padded[row, : len(ids)] = ids
    start, ones = np.full((4, 1), model.start_token, np.int32), np.ones(4, np.int32)
    logits = model.logits(padded, start, list(map(len, inputs)))
    rows = dataclasses.replace(plan.rows, bias=plan.bias)
    dist = distributions.standardize(
        logits, Context(start, ones, ones, np.full((4, 4), -1)), rows, plan.config.mode
    )
    expected = np.array(
        [[-np.inf if score is None else score for score in row] for row in case["scores"]]
    )
    expected -= np.log(np.sum(np.exp(expected), axis=1, keepdims=True))
    found = np.asarray(dist.logits - dist.log_normalizer[..., None])[:, 0]
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    kept = ~np.isneginf(expected)
    np.testing.assert_allclose(found[kept], expected[kept], rtol=0, atol=1e-3)
    assert sd.generate(model, inputs, key=None).lengths.max() <= 2
    assert not plan.config.mode.greedy


@pytest.fixture(scope="module")
def plain():
    return load(GOLDEN / "hf_t5_1_1")[0]


@pytest.fixture
def ruled(plain, monkeypatch):
    """The model with defaults that change every output."""
    monkeypatch.setattr(
        plain, "generation_config", ModelDefaults(max_length=7, forced_bos_token_id=7)
    )
    return plain


INPUTS = inputs_of(CASES["none"])


def test_a_call_goes_first_and_one_switch_turns_all_off(ruled):
    without = CASES["none"]["tokens"]
    assert (
        new_tokens(sd.generate(ruled, INPUTS, generation_config=None, max_new_tokens=16)) == without
    )
    assert (
        new_tokens(sd.generate(ruled, INPUTS, sampling=sd.SamplingConfig(), max_new_tokens=16))
        == without
    )
    shorter = sd.generate(ruled, INPUTS, max_new_tokens=3)
    assert shorter.tokens.shape[1] == 3 and set(shorter.tokens[:, 0]) == {7}
    assert sd.generate(ruled, INPUTS).tokens.shape[1] == 6
    other = sd.generate(
        ruled, INPUTS, generation_config=ruled.generation_config.replace(forced_bos_token_id=9)
    )
    assert set(other.tokens[:, 0]) == {9} and other.tokens.shape[1] == 6
    with pytest.raises(
        ValueError, match="generation_config: got 'none', expected a ModelDefaults, 'model'"
    ):
        sd.generate(ruled, INPUTS, generation_config="none")


def test_a_field_of_a_call_goes_before_the_models(plain):
    """The model's other fields stay."""
    defaults = ModelDefaults(
        repetition_penalty=2.0, no_repeat_ngram_size=3, do_sample=True, temperature=0.7
    )
    changes = SamplingChanges({"repetition_penalty": 1.5, "temperature": 0.2})
    found = fill_sampling(plain, defaults, changes, np.ones(2), np.full(2, 8), (1,))
    assert (found.repetition_penalty, found.temperature) == (1.5, 0.2)
    assert (found.no_repeat_ngram, found.top_k) == (3, 50)


def test_a_model_may_be_assigned_none_but_nothing_of_another_kind(plain, monkeypatch, tmp_path):
    monkeypatch.setattr(plain, "generation_config", None)
    assert new_tokens(sd.generate(plain, INPUTS, max_new_tokens=16)) == CASES["none"]["tokens"]
    save(plain, tmp_path / "saved")
    for wrong in ({"num_beams": 2}, "model", "none"):
        monkeypatch.setattr(plain, "generation_config", wrong)
        with pytest.raises(ValueError, match="generation_config: got .*, expected a ModelDefaults"):
            sd.generate(plain, INPUTS)


def test_beams_by_default_and_asked_for(plain, monkeypatch):
    case = CASES["beams"]
    config = ModelDefaults(num_beams=3, length_penalty=2.0, max_length=12)
    monkeypatch.setattr(plain, "generation_config", config)
    asked = sd.generate(plain, INPUTS, num_beams=3)
    assert new_tokens(asked) == case["tokens"]  # the model's length penalty, in transformers' form
    t5x = sd.generate(plain, INPUTS, num_beams=3, beam_style="t5x")
    expected = sd.generate(plain, INPUTS, num_beams=3, max_new_tokens=11, generation_config=None)
    np.testing.assert_array_equal(t5x.scores, expected.scores)
    for options in (
        dict(sampling=sd.SamplingConfig(temperature=1.0)),
        dict(num_samples=2),
        dict(deadline=9.0),
    ):
        with pytest.raises(
            UnsupportedCombination,
            match=r"num_beams.*\(num_beams = 3 is a default of .*decodes with",
        ):
            sd.generate(plain, INPUTS, **options)
    with pytest.raises(UnsupportedCombination, match="num_beams: got 3, a default of"):
        prepare(plain, INPUTS)  # what `stream` and `trace` begin with


def test_beams_of_a_model_that_samples_by_default(plain, monkeypatch):
    monkeypatch.setattr(plain, "generation_config", ModelDefaults(do_sample=True))
    with pytest.raises(
        UnsupportedCombination, match="temperature: got 1.0 with num_beams.*samples by default"
    ):
        sd.generate(plain, INPUTS, num_beams=2)


def test_other_defaults_that_depend_on_the_rows(ruled, plain, monkeypatch):
    mixed = plan_decoding(ruled, INPUTS, decoder_prefix=[[], [3], [], []])
    assert mixed.rows.forced[:, 0].tolist() == [7, -1, 7, 7]
    assert set(sd.generate(ruled, INPUTS, decoder_prefix=[[3]] * 4).tokens[:, 0]) != {7}
    with pytest.raises(
        ValueError,
        match="input 0: got 7 tokens before the first new one, expected fewer than max_len",
    ):
        sd.generate(ruled, INPUTS, decoder_prefix=[[3] * 6] * 4)
    monkeypatch.setattr(plain, "generation_config", ModelDefaults(forced_eos_token_id=1))
    result = sd.generate(plain, INPUTS, max_new_tokens=[3, 4, 3, 4], eos_ids=())
    assert result.tokens[[0, 1, 2, 3], [2, 3, 2, 3]].tolist() == [1] * 4


READ = [
    (
        {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True},
        ["num_beams=4, length_penalty=0.6, early_stopp"],
    ),
    (
        {
            "num_beams": 1,
            "length_penalty": 1.0,
            "top_k": 50,
            "temperature": 1.0,
            "suppress_tokens": [],
        },
        [],
    ),
    (
        {"typical_p": 0.9, "begin_suppress_tokens": [5]},
        ["does without: begin_suppress_tokens=[5], typical_p=0.9"],
    ),
    ({"typical_p": 1.0, "diversity_penalty": 0.0, "output_scores": True, "use_cache": False}, []),
    (
        {"do_sample": True, "num_beams": 4, "top_k": 0},
        ["do_sample=True, top_k=0", "does without: num_beams=4"],
    ),
    ({"forced_eos_token_id": [1, 95]}, ["does without: forced_eos_token_id=[1, 95]"]),
]


@pytest.mark.parametrize("fields, expected", READ, ids=lambda value: str(value)[:40])
def test_defaults_in_effect_are_printed_and_kept(fields, expected, tmp_path):
    folder = folder_of(
        {"model": "hf_t5_1_0", "file": "generation", "fields": fields}, tmp_path / "model"
    )
    model, printed = load(folder)
    assert len(printed) == len(expected) and all(
        part in line for part, line in zip(expected, printed)
    ), printed
    for form in ("specdec", "huggingface", "t5x"):
        sd.save(model, tmp_path / form, format=form)
        again, lines = load(tmp_path / form)
        assert again.generation_config == model.generation_config and len(lines) == len(printed)
    sd.convert(folder, tmp_path / "converted", format="huggingface", say=printed.append)
    kept = json.loads((tmp_path / "converted" / "generation_config.json").read_text())
    assert ModelDefaults.read(kept, "") == model.generation_config


def test_generation_config_json_alone_counts_where_it_is_there(tmp_path):
    shutil.copytree(GOLDEN / "hf_t5_1_0", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    old = {"num_beams": 4, "task_specific_params": {"a": {"num_beams": 2}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | old))
    model, printed = load(tmp_path / "model")
    assert model.generation_config == ModelDefaults() and not printed


WRONG = {
    "num_beams": "four",
    "max_length": True,
    "temperature": [1],
    "do_sample": "yes",
    "bad_words_ids": [3],
    "suppress_tokens": [-1, True],
    "early_stopping": "soon",
    "repetition_penalty": float("nan"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_the_wrong_kind_name_file_and_field(name, tmp_path):
    fields = {name: WRONG[name]}
    folder = folder_of(
        {"model": "hf_t5_1_0", "file": "generation", "fields": fields}, tmp_path / "model"
    )
    with pytest.raises(
        ValueError, match=f"generation_config.json.*{name}: got .*, expected|no readable JSON"
    ):
        load(folder)
    with pytest.raises(ValueError, match=f"{name}: got .*, expected"):
        ModelDefaults(**fields)


OUT_OF_RANGE = {
    "repetition_penalty": {"repetition_penalty": -1},
    "num_beams": {"num_beams": 0},
    "temperature": {"do_sample": True, "temperature": -2},
    "top_p": {"do_sample": True, "top_p": 2.0},
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_values_out_of_range_name_file_and_field(name):
    with pytest.raises(ValueError, match=f"^generation_config.json: {name}: got .*, expected"):
        ModelDefaults.read(OUT_OF_RANGE[name], "generation_config.json")
    if name in ("temperature", "top_p"):  # without sampling they do not count
        assert ModelDefaults.read(OUT_OF_RANGE[name] | {"do_sample": False}, "") == ModelDefaults()


def test_messages_about_long_lists_are_short():
    found = ModelDefaults.read(
        {"suppress_tokens": [*range(10000)], "bad_words_ids": [[1, 2]] * 10000}, ""
    )
    assert [len(line) < 400 for line in found.lines("model", "generation_config.json")] == [True]


def test_bundled_and_random_models_have_none():
    assert sd.load("ende/drafter", say=len).generation_config == ModelDefaults()
    assert repr(ModelDefaults(num_beams=2)) == "ModelDefaults(num_beams=2)"


def test_forbidden_sequences_of_a_call(plain):
    greedy = CASES["none"]["tokens"][0]
    for size in (1, 2, 3):
        word = greedy[3 : 3 + size]
        sampling = sd.SamplingConfig(forbidden_sequences=[word, [90, 91]])
        [tokens] = new_tokens(sd.generate(plain, INPUTS[:1], sampling=sampling, max_new_tokens=16))
        assert tokens[: 2 + size] == greedy[: 2 + size] and tokens[2 + size] != greedy[2 + size]
        assert not any(tokens[place : place + size] == word for place in range(16))
    for wrong, message in (
        ([[]], "got an empty sequence"),
        ([[96]], "forbidden_sequences: got id 96"),
    ):
        with pytest.raises(ValueError, match=message):
            sd.generate(plain, INPUTS, sampling=sd.SamplingConfig(forbidden_sequences=wrong))


def test_lists_are_kept_as_tuples():
    given = sd.ModelDefaults(suppress_tokens=[5], bad_words_ids=[[3, 4], [5]])
    same = sd.ModelDefaults(suppress_tokens=(5,), bad_words_ids=((3, 4), (5,)))
    assert given == same and hash(given) == hash(same)
