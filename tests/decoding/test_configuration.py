"""One `GenerationConfig` for all ways into the package: what it takes, and what it rejects."""

import dataclasses
import inspect
import re

import numpy as np
import pages
import pytest
from toy_models import EchoModel, Words, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.generation_config import FIELDS, CallData

pytestmark = pytest.mark.usefixtures("quick")

INPUTS = [[5, 6, 7, 1], [9, 4, 1]]
CONFIG = sd.GenerationConfig(
    gamma=3,
    sampling=sd.SamplingConfig(temperature=0.8, top_k=5),
    max_new_tokens=6,
    eos_ids=(),
    verifier="token",
)
ENTRY_POINTS = [sd.generate, sd.decode_stream, sd.stream, sd.trace, sd.prepare, sd.warm_up]


@pytest.fixture(scope="module")
def models():
    target = tiny_t5(0)
    target.vocabulary = Words()
    return target, sd.ModelDrafter(noisy_copy(target, 0.1))


@pytest.mark.slow
def test_a_config_and_its_options_decode_the_same_tokens(models):
    target, drafter = models
    options = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    by_options = sd.generate(target, INPUTS, drafter=drafter, **options)
    by_config = sd.generate(target, INPUTS, drafter=drafter, config=CONFIG)
    np.testing.assert_array_equal(by_config.tokens, by_options.tokens)
    assert by_config.stats.drafted > 0
    found = dict(sd.decode_stream(target, INPUTS, drafter=drafter, config=CONFIG))
    assert [found[row][0].tokens for row in range(2)] == by_config.tokens.tolist()
    pieces = sd.stream(target, INPUTS, drafter=drafter, config=CONFIG)
    first = [token for piece in pieces if piece.row == 0 for token in piece.tokens]
    assert first == by_config.tokens[0].tolist()


def test_options_change_a_config(models):
    target, drafter = models
    expected = sd.generate(target, INPUTS, config=dataclasses.replace(CONFIG, max_new_tokens=4))
    found = sd.generate(target, INPUTS, config=CONFIG, max_new_tokens=4)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.tokens.shape == (2, 4) and CONFIG.max_new_tokens == 6


@pytest.mark.slow
def test_many_inputs_read_their_deadline_from_the_config(models):
    """A deadline belongs to a batch, so rows are not refilled, which would be rejected."""
    target, drafter = models
    options = dict(batch_size=2, seed=0, drafter=drafter)
    late = dataclasses.replace(CONFIG, deadline=1e6)
    found = list(decode_all(target, INPUTS * 2, config=late, **options))
    expected = list(decode_all(target, INPUTS * 2, config=CONFIG, **options))
    assert [output.tokens for output in found] == [output.tokens for output in expected]


def test_the_page_lists_every_option_with_its_default():
    pages.require_checkout()
    text = (pages.PACKAGE / "decoding/README.md").read_text(encoding="utf-8")
    _, _, table = text.partition("| option | default | meaning |\n")
    rows = [line.split("|")[1:3] for line in table.partition("\n\n")[0].splitlines()[1:]]
    listed = {
        name: default.strip(" `")
        for names, default in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    expected = {name: repr(field.default).replace("'", '"') for name, field in FIELDS.items()}
    assert listed == expected


@pytest.mark.parametrize(
    "entry_point", ENTRY_POINTS, ids=[entry_point.__name__ for entry_point in ENTRY_POINTS]
)
def test_every_entry_point_shows_every_option_and_rejects_others(entry_point):
    parameters = inspect.signature(entry_point).parameters
    assert {*FIELDS, *CallData._fields, "config"} <= set(parameters)
    for name, field in FIELDS.items():
        if (entry_point, name) != (sd.warm_up, "max_input_length"):
            assert parameters[name].default == field.default
    given = (EchoModel(Words()),) if entry_point is sd.warm_up else (EchoModel(Words()), [[3, 1]])
    with pytest.raises(TypeError, match="^lenienc: .* did you mean 'lenience'"):
        entry_point(*given, lenienc=0.5)


def test_help_lists_every_option():
    assert all(f"\n  {name}: " in sd.generate.__doc__ for name in FIELDS)
    assert all(len(line) <= 100 for line in sd.generate.__doc__.splitlines())
    assert "{options}" not in sd.generate.__doc__


WRONG = [
    (dict(gamma="fast"), "gamma: got 'fast', expected 'auto'"),
    (dict(verifier="best"), "verifier: got 'best', expected one of"),
    (dict(num_samples=0), "num_samples: got 0, expected an integer from 1"),
    (dict(max_input_length=0), "max_input_length: got 0, expected an integer"),
    (dict(deadline=-1), "deadline: got -1, expected seconds"),
    (dict(non_finite="ignore"), "non_finite: got 'ignore', expected"),
    (dict(num_beams=2, stop="a"), "stop: got 'a' with num_beams"),
    (dict(sampling={}), "sampling: got {}, expected a SamplingConfig"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=[message for _, message in WRONG])
def test_what_no_model_is_needed_for_is_checked_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        sd.GenerationConfig(**options)


def test_what_is_no_config(models):
    with pytest.raises(ValueError, match="config: got {'gamma': 3}, expected a GenerationConfig"):
        sd.generate(models[0], INPUTS, config={"gamma": 3})
    with pytest.raises(ValueError, match="non_finite: got 'report' for prepare"):
        sd.prepare(models[0], INPUTS, non_finite="report")
    with pytest.raises(ValueError, match="beam_width: got 4, expected None: stream"):
        sd.stream(models[0], INPUTS, beam_width=4)


ON_DISK = [
    CONFIG,
    sd.GenerationConfig(
        gamma=sd.Heuristic(maximum=6, up=1),
        sampling=sd.SamplingConfig(logit_bias={3: 1.5}, forced_tokens={0: 5}, forbidden_tokens=[4]),
        stop=["a"],
        max_new_tokens=[3, 4],
        deadline=2.5,
        generation_config=None,
    ),
    sd.GenerationConfig(tree=sd.Tree.uniform((2, 1)), eos_ids=(1, 2)),
    sd.GenerationConfig(num_beams=3, early_stopping="never", beam_style="huggingface"),
    sd.GenerationConfig(generation_config=sd.ModelDefaults(max_length=9, bad_words_ids=((3, 4),))),
]


@pytest.mark.parametrize("suffix", ["json", "gin"])
@pytest.mark.parametrize("number", range(len(ON_DISK)))
def test_files_hold_every_option(number, suffix, tmp_path):
    """Saved and read, and saved again: both files are the same, and no option is lost."""
    config, files = ON_DISK[number], [tmp_path / f"{name}.{suffix}" for name in "ab"]
    config.save(files[0])
    found = sd.GenerationConfig.load(files[0])
    found.save(files[1])
    assert files[0].read_text() == files[1].read_text()
    for name in FIELDS:
        expected, read = getattr(config, name), getattr(found, name)
        if isinstance(expected, list | tuple):
            expected, read = list(expected), list(read)
        assert repr(read) == repr(expected), name


@pytest.mark.parametrize("suffix", ["json", "gin"])
def test_numbers_of_numpy_are_written_as_plain_ones(suffix, tmp_path):
    """Its float64 is a float whose repr is no number."""
    path, share = tmp_path / f"numbers.{suffix}", np.float64(0.5)
    sampling = sd.SamplingConfig(temperature=share, top_p=[share, np.float32(0.25)])
    sd.GenerationConfig(verifier="lenient", lenience=share, sampling=sampling).save(path)
    found = sd.GenerationConfig.load(path)
    assert (found.lenience, found.sampling.temperature) == (0.5, 0.5)
    assert list(found.sampling.top_p) == [0.5, 0.25]


@pytest.mark.parametrize("suffix", ["json", "gin"])
def test_a_file_decodes_what_the_options_decode(models, suffix, tmp_path):
    target, drafter = models
    path = tmp_path / f"generation.{suffix}"
    CONFIG.save(path)
    expected = sd.generate(target, INPUTS, drafter=drafter, config=CONFIG)
    for given in (path, str(path)):
        found = sd.generate(target, INPUTS, drafter=drafter, config=given)
        np.testing.assert_array_equal(found.tokens, expected.tokens)


WRONG_FILES = {
    "unknown.json": ('{"gama": 3}', "got an unknown field 'gama'; did you mean 'gamma'"),
    "line.json": (r'{"ga\nma\n": 3}', r"got an unknown field 'ga\\nma\\n'"),
    "line inside.json": (r'{"sampling": {"a\nb": 1}}', r"sampling: got 'a\\nb', expected"),
    "range.json": ('{"num_samples": 0}', "num_samples: got 0, expected an integer"),
    "policy.json": ('{"gamma": {"policy": "best"}}', "gamma: got policy 'best', expected one of"),
    "sampling.json": ('{"sampling": {"heat": 1}}', "sampling: got 'heat', expected fields of"),
    "inner.json": ('{"sampling": {"top_p": 2}}', "sampling: top_p: got 2, expected"),
    "tree.json": ('{"tree": "x:1"}', "tree: got 'x:1', expected widths"),
    "list.json": ("[3]", "got .* expected"),
    "unknown.gin": ("generation_config.GenerationConfig.gama = 3", "got an unknown field 'gama'"),
    "range.gin": ("generation_config.GenerationConfig.deadline = -1", "deadline: got -1, expected"),
    "other.gin": ("train.run.steps = 3", "train.run: got bindings of it, expected those of"),
    "macro.gin": ("generation_config.GenerationConfig.gamma = %X", "gamma: got @%X, expected"),
    "nested.gin": (
        "generation_config.GenerationConfig.stop = [@a.b()]",
        "stop: got @a.b, expected a value",
    ),
    "alone.gin": (
        "sampling.SamplingConfig.temperature = 0.7",
        r"sampling.SamplingConfig: got bindings that count nowhere, expected "
        r"generation_config.GenerationConfig.sampling = @sampling.SamplingConfig\(\) too",
    ),
    "policy.gin": (
        "generation_config.GenerationConfig.gamma = 3\npolicies.Heuristic.maximum = 6",
        r"policies.Heuristic: got .*GenerationConfig.gamma = @policies.Heuristic\(\) too",
    ),
    "tree.gin": (
        "generation_config.GenerationConfig.tree = @tree_text.read_tree()\n"
        "tree_text.read_tree.text = 'widths:2'\ntree_text.read_tree.width = 3",
        "read_tree: got text, width, expected its text alone",
    ),
    "bare.gin": (
        "generation_config.GenerationConfig.tree = @tree_text.read_tree()",
        "read_tree: got nothing, expected its text alone",
    ),
    "kind.gin": (
        "generation_config.GenerationConfig.tree = @sampling.SamplingConfig()",
        r"tree: got @sampling.SamplingConfig, expected a value or @tree_text.read_tree\(\)",
    ),
    "defaults.gin": (
        "generation_config.GenerationConfig.generation_config = @model_defaults.ModelDefaults()\n"
        "model_defaults.ModelDefaults.max_lenght = 9",
        "generation_config: got an unknown field 'max_lenght'; did you mean 'max_length'",
    ),
    "defaults.json": ('{"generation_config": {"top": 2}}', "got an unknown field 'top'"),
    "ids.gin": (
        "generation_config.GenerationConfig.sampling = @sampling.SamplingConfig()\n"
        "sampling.SamplingConfig.logit_bias = {1.7: 0.5}",
        "sampling: got id 1.7, expected an integer",
    ),
    "ids.json": ('{"sampling": {"logit_bias": {"1.7": 1}}}', "got id '1.7', expected an integer"),
    "include.gin": ("include 'other.gin'", "got IncludeStatement, expected bindings alone"),
    "bracket.gin": ("generation_config.GenerationConfig.stop = ['.'", "EOF in multi-line"),
    "quote.gin": ('generation_config.GenerationConfig.stop = """.', "EOF in multi-line string"),
    "deep.gin": (
        "generation_config.GenerationConfig.stop = " + "[" * 3000,
        "recursion|too many nested",
    ),
    "syntax.gin": ("generation_config.GenerationConfig.gamma = =", "."),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_is_rejected_in_one_line(name, tmp_path):
    text, message = WRONG_FILES[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        sd.GenerationConfig.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_what_no_file_can_hold(tmp_path):
    sampling = sd.SamplingConfig(processor=lambda tokens, lengths, logits: logits)
    with pytest.raises(ValueError, match="processor: got .* which no file can hold"):
        sd.GenerationConfig(sampling=sampling).save(tmp_path / "a.json")
    with pytest.raises(ValueError, match="config: got .*expected a file named .json or .gin"):
        sd.GenerationConfig().save(tmp_path / "a.txt")
    assert list(tmp_path.iterdir()) == []
