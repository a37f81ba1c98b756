"""`specdec generate --config`: a file of a `GenerationConfig` has what no flag gives."""

import json

import pytest
import tiers
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.commands import main
from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.speculative.adaptive_gamma import Auto

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


@tiers.parametrize("suffix", ["gin", "json"], first=1)
@tiers.parametrize("name", CONFIGS, first=1)
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


def test_the_file_has_what_no_flag_can_give(decode, tmp_path):
    """Ids that end a row, forbidden sequences, and other defaults than the model's."""
    first, second = expected(None, max_new_tokens=6)[0][:2]
    options = [
        dict(eos_ids=[second]),
        dict(sampling=sd.SamplingConfig(forbidden_sequences=[[first, second]])),
        dict(generation_config=sd.ModelDefaults(suppress_tokens=[first])),
    ]
    for number, one in enumerate(options):
        path = tmp_path / f"{number}.json"
        sd.GenerationConfig(max_new_tokens=6, **one).save(path)
        actual = decode(f"--config={path}")
        assert actual == expected(None, config=path) != expected(None, max_new_tokens=6)


def test_trees_of_a_file(tmp_path):
    path, tree = tmp_path / "options.json", sd.Tree.uniform((3, 2, 1))
    sd.GenerationConfig(tree=tree, generation_config=None).save(path)
    config = GenerateOptions(config=str(path)).configuration()
    assert (config.tree, config.generation_config) == (tree, None)
    other = GenerateOptions(config=str(path), tree="widths:2").configuration()
    assert other.tree == sd.Tree.uniform((2,))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"gamma": [1, 2]}, "gamma: got [1, 2], expected one value for all inputs"),
        ({"max_new_tokens": [4, 5]}, "max_new_tokens: got [4, 5], expected one value"),
        ({"sampling": {"temperature": [1.0, 2.0]}}, "sampling.temperature: got [1.0, 2.0], exp"),
        (
            {"gamma": {"policy": "confidence", "maximum": 4, "threshold": [0.1, 0.2]}},
            "gamma.threshold: got [0.1, 0.2], expected one value",
        ),
        ({"synthetic_alpha": 0.5}, "synthetic_alpha: got 0.5 with verifier='block'"),
        ({"gama": 3}, "gama"),
        ({"lenience": 0.5, "verifier": "block"}, "lenience: got"),
    ],
)
def test_what_is_rejected(tmp_path, capsys, fields, message):
    path = tmp_path / "options.json"
    path.write_text(json.dumps(fields))
    flags = [f"--config={path}", "--target=ende/target", "--drafter=lookup"]
    assert main.main(["generate", *flags, "a"]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_file_counts_before_gin(decode, tmp_path):
    path = tmp_path / "options.json"
    CONFIGS["sampled"].save(path)
    bound = dict(gamma=1, gamma_policy="'heuristic'", max_new_tokens=3, top_k=2, seed=3)
    bindings = [f"--gin.GenerateOptions.{name}={value}" for name, value in bound.items()]
    flags = ["--drafter=lookup", f"--config={path}", f"--output_file={tmp_path / 'out'}"]
    expected = decode(*flags[:2], "--seed=3")
    assert decode(*flags[:2], *bindings) == expected
    decode(*flags, *bindings)
    again = [f"--gin_file={tmp_path / 'out.gin'}", "--gin_search_paths=/", "--output_file="]
    assert decode(*again) == expected


def test_the_models_tokens_stay_where_neither_file_nor_flags_have_any():
    sampling = sd.SamplingConfig(top_k=3, forbidden_tokens=(4,))
    options = GenerateOptions(
        config=sd.GenerationConfig(sampling=sampling), forced_tokens=("0:7",), top_p=0.5
    )
    fields = options.configuration().sampling.fields
    assert (fields["temperature"], fields["top_k"], fields["top_p"]) == (0, 3, 0.5)
    assert (fields["forbidden_tokens"], fields["forced_tokens"]) == ((4,), {0: 7})
    assert "logit_bias" not in fields
    assert GenerateOptions().configuration().sampling is None


POLICY = sd.Confidence(4, threshold=0.25)
CHANGED = [
    ({}, POLICY),
    ({"gamma": 7}, sd.Confidence(7, threshold=0.25)),
    ({"gamma": 0}, 0),
    ({"gamma": "auto"}, POLICY),
    ({"gamma_policy": "fixed"}, 4),
    ({"gamma_policy": "heuristic"}, sd.Heuristic(4)),
    ({"gamma_settings": ("threshold:0.5",)}, sd.Confidence(4, threshold=0.5)),
]


@pytest.mark.parametrize("flags, gamma", CHANGED, ids=[str(flags) for flags, _ in CHANGED])
def test_flags_change_a_policy_of_the_file(flags, gamma):
    config = sd.GenerationConfig(gamma=POLICY)
    assert GenerateOptions(config=config, **flags).configuration().gamma == gamma


def test_a_policy_that_no_flag_names_stays_unless_a_flag_is_given():
    given = Auto(acceptance=0.5)
    config = sd.GenerationConfig(gamma=given)
    assert GenerateOptions(config=config).configuration().gamma is given
    assert GenerateOptions(config=config, gamma=3).configuration().gamma == 3
    changed = GenerateOptions(config=config, gamma_policy="heuristic").configuration().gamma
    assert changed == sd.Heuristic(given.maximum)


def test_a_policy_that_no_flag_names_decodes(decode, tmp_path):
    """From gin; also to a file, whose journal describes it."""
    path, output = tmp_path / "auto.gin", tmp_path / "out.jsonl"
    path.write_text(
        "from __gin__ import dynamic_registration\n"
        "from specdec_jax.commands import generate\n"
        "from specdec_jax.decoding import generation_config\n"
        "from specdec_jax.speculative import adaptive_gamma\n"
        "generate.GenerateOptions.config = @generation_config.GenerationConfig()\n"
        "generation_config.GenerationConfig.gamma = @adaptive_gamma.Auto()\n"
        "generation_config.GenerationConfig.max_new_tokens = 6\n"
        "adaptive_gamma.Auto.acceptance = 0.5\n"
    )
    flags = f"--gin_file={path}", "--drafter=lookup"
    config = sd.GenerationConfig(gamma=Auto(acceptance=0.5), max_new_tokens=6)
    assert decode(*flags) == expected(sd.PromptLookupDrafter(), config=config)
    decode(*flags, f"--output_file={output}")
    written = [json.loads(line)["tokens"] for line in output.read_text().splitlines()]
    assert written == expected(sd.PromptLookupDrafter(), config=config)


@pytest.mark.parametrize("suffix", ["gin", "json"])
def test_the_recorded_settings_hold_the_file(decode, tmp_path, suffix):
    """They give the same outputs when the file is gone, and flags count before it."""
    path, output = tmp_path / f"options.{suffix}", tmp_path / "out.jsonl"
    CONFIGS["sampled"].save(path)
    whole = decode(f"--config={path}", "--drafter=lookup", "--seed=3")
    decode(f"--config={path}", "--drafter=lookup", "--seed=3", f"--output_file={output}")
    path.unlink()
    again = [f"--gin_file={output}.gin", "--gin_search_paths=/", "--output_file="]
    assert decode(*again) == whole
    assert [row[:2] for row in decode(*again, "--max_new_tokens=2")] == [row[:2] for row in whole]


def test_references_of_gin_are_recorded_beside_the_file(decode, tmp_path):
    path, lines, output = (tmp_path / name for name in ("options.json", "run.gin", "out"))
    CONFIGS["sampled"].save(path)
    lines.write_text(
        "from __gin__ import dynamic_registration\n"
        "import json\n"
        "from specdec_jax.commands import generate\n"
        "generate.GenerateOptions.drafter = @json.loads()\n"
        "generate.GenerateOptions.max_new_tokens = 3\n"
        "json.loads.s = '\"lookup\"'\n"
    )
    flags = [f"--config={path}", "--seed=3"]
    whole = decode("--drafter=lookup", *flags)
    decode(f"--gin_file={lines}", "--gin_search_paths=/", *flags, f"--output_file={output}")
    path.unlink()
    assert "@json.loads()" in (tmp_path / "out.gin").read_text()
    again = [f"--gin_file={output}.gin", "--gin_search_paths=/", "--output_file="]
    assert decode(*again) == whole


def test_a_path_in_gin_is_rejected(tmp_path, capsys):
    path = tmp_path / "options.json"
    CONFIGS["sampled"].save(path)
    binding = f"--gin.GenerateOptions.config={str(path)!r}"
    assert main.main(["generate", "--target=ende/target", binding, "a"]) == 2
    assert "in gin, expected it as --config" in capsys.readouterr().err
