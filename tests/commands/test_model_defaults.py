"""`specdec generate` decodes as the checkpoint says where no flag says otherwise."""

import json
import shutil

import pytest
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.commands import main
from specdec_jax.commands.options import DecodingOptions

pytestmark = pytest.mark.usefixtures("quick")
TEXTS = ["The ferry stayed", "She"]
SEARCH = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.0, "max_length": 12}
RULES = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "max_length": 14, "min_length": 8}


def folder_of(folder, fields):
    shutil.copytree(GOLDEN / "hf_gpt2", folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.fixture
def decode(capsys, monkeypatch, tmp_path):
    """Runs the command; returns the ids of every output, or of each piece, and standard error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(folder, *flags, code=0):
        arguments = ["generate", f"--target={folder}", "--dtype=float32", "--json", *flags]
        assert main.main(arguments + TEXTS) == code
        out, err = capsys.readouterr()
        return [json.loads(line)["tokens"] for line in out.splitlines()], err

    return run


def expected(folder, **options):
    result = sd.generate(sd.load(folder, "float32", say=len), TEXTS, **options)
    return [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]


def test_flags_replace_single_defaults(decode, tmp_path):
    folder = folder_of(tmp_path / "model", RULES)
    actual, err = decode(folder)
    assert (
        actual == expected(folder)
        and "sets the defaults of decoding: max_length=14, min_length=8" in err
    )
    vocabulary = sd.load(folder, "float32", say=len).vocabulary
    assert all(
        len(row) + len(vocabulary.encode(prompt)) == 14 for row, prompt in zip(actual, TEXTS)
    )
    rules = sd.SamplingConfig(no_repeat_ngram=2, min_new_tokens=0)
    shorter, _ = decode(
        folder, "--max_new_tokens=5", "--repetition_penalty=1", "--min_new_tokens=0"
    )
    assert shorter == expected(folder, max_new_tokens=5, sampling=rules)
    none, _ = decode(folder, "--generation_config=none", "--max_new_tokens=9")
    assert none == expected(folder, max_new_tokens=9, generation_config=None) != actual


def test_beams_to_a_file_and_what_they_reject(decode, tmp_path):
    folder = folder_of(tmp_path / "model", SEARCH)
    path = tmp_path / "out.jsonl"
    decode(folder, f"--output_file={path}")
    actual = [json.loads(line)["tokens"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert actual == expected(folder) and len(actual) == 4
    _, err = decode(folder, "--stream", code=2)
    assert err.splitlines()[-1].startswith("specdec: error: num_beams: got 2, a default of")
    _, err = decode(folder, "--temperature=0.7", code=2)
    assert "temperature: got 0.7 with num_beams" in err and "num_beams = 2 is a default of" in err
    _, err = decode(folder, "--generation_config=off", code=2)
    assert "generation_config: got 'off', expected one of model, none" in err


def test_commands_that_measure_print_that_they_use_no_defaults(capsys, tmp_path):
    folder = folder_of(tmp_path / "model", SEARCH)
    options = DecodingOptions(
        target=str(folder), dtype="float32", max_new_tokens=9
    )  # of all commands but `generate`
    target, _ = options.load()
    line = f"{folder}: decoding by the flags alone, without the model's own defaults"
    assert line in capsys.readouterr().err.splitlines()
    result = sd.generate(target, TEXTS, **options.decoding())
    assert (
        result.texts == sd.generate(target, TEXTS, max_new_tokens=9, generation_config=None).texts
    )


def test_flags_beside_the_models_own_beams(decode, tmp_path):
    folder = folder_of(tmp_path / "model", SEARCH | {"num_beams": 3})
    flags = ["--num_return_sequences=3", "--length_penalty=2", "--early_stopping=true"]
    actual, _ = decode(folder, *flags)
    assert actual == expected(
        folder, num_return_sequences=3, length_penalty=2.0, early_stopping=True
    )
    assert len(actual) == 3 * len(TEXTS)
    _, err = decode(folder, *flags, "--stream", code=2)
    assert "length_penalty: got 2.0 without num_beams" in err
    _, err = decode(
        folder_of(tmp_path / "plain", {}), "--length_penalty=2", "--max_new_tokens=4", code=2
    )
    assert "length_penalty: got 2.0 without num_beams, expected None" in err


def test_a_verifier_for_sampling_with_a_model_that_samples(decode, tmp_path):
    folder = folder_of(tmp_path / "model", {"do_sample": True, "max_new_tokens": 4})
    decode(folder, "--verifier=typical", "--drafter=lookup", "--gamma=2")
    _, err = decode(
        folder, "--verifier=typical", "--drafter=lookup", "--generation_config=none", code=2
    )
    assert "temperature: got 0.0 with verifier='typical'" in err


def test_limits_that_differ_are_named_by_the_default(decode, tmp_path):
    folder = folder_of(tmp_path / "model", RULES)
    _, err = decode(folder)
    assert "2 of 2 outputs ended by length: max_length=14, a default of the model" in err
    _, err = decode(folder, "--max_new_tokens=8")
    assert "2 of 2 outputs ended by length: --max_new_tokens=8" in err


def test_a_prompt_that_is_too_long_is_counted_from_one(decode, tmp_path):
    _, err = decode(folder_of(tmp_path / "model", {"max_length": 3}), code=2)
    assert "specdec: error: sentence 1: got " in err and "--max_new_tokens" in err
