"""`specdec generate --config`: a file of a `GenerationConfig` gives flags that are not given."""

import json

import pytest
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.commands import config_file, main

pytestmark = pytest.mark.usefixtures("quick")
TEXTS = ["The ferry stayed", "She"]
CONFIGS = {
    "sampled": sd.GenerationConfig(
        gamma=3,
        sampling=sd.SamplingConfig(temperature=0.9, top_k=7, logit_bias={5: 1.5}),
        verifier="token",
        max_new_tokens=6,
        num_samples=2,
    ),
    "policy": sd.GenerationConfig(gamma=sd.Heuristic(4), stop=("zz",), max_new_tokens=7),
    "beams": sd.GenerationConfig(
        num_beams=2, beam_style="huggingface", early_stopping=True, max_new_tokens=5
    ),
}


@pytest.fixture
def decode(capsys, monkeypatch, tmp_path):
    """Runs the command; returns the ids of every output."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*flags):
        target = GOLDEN / "hf_gpt2"
        assert main.main(["generate", f"--target={target}", "--json", *flags, *TEXTS]) == 0
        return [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]

    return run


def expected(drafter, **options):
    target = sd.load(GOLDEN / "hf_gpt2", say=len)
    result = sd.generate(target, TEXTS, drafter=drafter, **options)
    return [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]


@pytest.mark.parametrize("suffix", ["gin", "json"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_command_decodes_as_generate_with_the_same_file(decode, tmp_path, name, suffix):
    path = tmp_path / f"options.{suffix}"
    CONFIGS[name].save(path)
    drafter = sd.PromptLookupDrafter()
    assert decode(f"--config={path}", "--drafter=lookup") == expected(drafter, config=path)


def test_flags_count_before_the_file(decode, tmp_path):
    path = tmp_path / "options.gin"
    CONFIGS["policy"].save(path)
    actual = decode(f"--config={path}", "--drafter=lookup", "--max_new_tokens=3")
    assert actual == expected(sd.PromptLookupDrafter(), config=path, max_new_tokens=3)
    assert all(len(row) <= 3 for row in actual)


def test_trees_are_flags_too(tmp_path):
    path, tree = tmp_path / "options.json", sd.Tree.uniform((3, 2, 1))
    sd.GenerationConfig(tree=tree, generation_config=None).save(path)
    flags = config_file.read_flags(path)
    assert flags == {"tree": flags["tree"], "generation_config": "none"}
    assert config_file.text_of(tree) == flags["tree"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"eos_ids": [3]}, "eos_ids: got [3], expected a value that a flag can have"),
        ({"gamma": [1, 2]}, "gamma: got"),
        ({"max_new_tokens": [4, 5]}, "max_new_tokens: got"),
        ({"sampling": {"temperature": [1.0, 2.0]}}, "sampling.temperature: got"),
        ({"sampling": {"forbidden_sequences": [[1, 2]]}}, "sampling.forbidden_sequences: got"),
        ({"gama": 3}, "gama"),
        ({"lenience": 0.5, "verifier": "block"}, "lenience: got"),
    ],
)
def test_what_no_flag_can_say_is_rejected(tmp_path, capsys, fields, message):
    path = tmp_path / "options.json"
    path.write_text(json.dumps(fields))
    flags = [f"--config={path}", "--target=ende/target", "--drafter=lookup"]
    assert main.main(["generate", *flags, "a"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_policies_that_flags_cannot_make_are_rejected(tmp_path):
    path = tmp_path / "options.json"
    sd.GenerationConfig(gamma=sd.Confidence(4, threshold=[0.1, 0.2])).save(path)
    with pytest.raises(ValueError, match="gamma: got .* expected a value that a flag can have"):
        config_file.read_flags(path)
    sd.GenerationConfig(gamma=sd.Confidence(4, threshold=0.25)).save(path)
    assert config_file.read_flags(path)["gamma_settings"] == ("threshold:0.25",)


def test_gin_does_not_name_the_file(capsys):
    assert main.main(["generate", "--target=ende/target", "--gin.GenerateOptions.config='a'"]) == 2
    assert "config: got 'a' in gin, expected it as --config" in capsys.readouterr().err
