"""Tests `specdec convert`: every pair of formats bit for bit, interruptions, T5X's restore."""

import dataclasses
import itertools
import json
import pathlib
import shutil
import signal
import subprocess
import sys

import make_checkpoints as make
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiers
from announcements import without_course
from golden_models import GOLDEN
from make_checkpoints import PARAMS, TINY, TINY_1_0

import specdec_jax as sd
from specdec_jax.checkpoints import loader, safetensors_files, t5x
from specdec_jax.checkpoints import stored_tensor as checkpoints_stored_tensor
from specdec_jax.checkpoints.converter import FORMATS, convert
from specdec_jax.commands import main
from specdec_jax.files import progress
from specdec_jax.models.parameters import flatten
from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
)

pytestmark = pytest.mark.usefixtures("quick")
SPIECE = GOLDEN / "hf_tokenizer" / "spiece.model"


def opened(path) -> checkpoints_stored_tensor.Checkpoint:
    return loader.open_complete(pathlib.Path(path))


def contents(path, dtype="float32") -> dict[str, bytes]:
    """Every parameter as it is stored: the dtype is compared too."""
    leaves = opened(path).parameters
    assert {leaf.dtype for leaf in leaves.values()} == {dtype}
    return {name: leaf.load(dtype).tobytes() for name, leaf in leaves.items()}


SMALL = dataclasses.replace(
    TINY, num_encoder_layers=1, num_decoder_layers=1
)  # every parameter is a file or more
SHAPES = {
    "1.1": SMALL,
    "1.0": dataclasses.replace(TINY_1_0, num_encoder_layers=1, num_decoder_layers=1),
    "silu": dataclasses.replace(
        SMALL, mlp_activations=("silu", "linear"), num_buckets=16, max_distance=64
    ),
    "scaled": dataclasses.replace(SMALL, scale_decoder_outputs=True),
}


@tiers.parametrize("dtype", ["float32", "bfloat16"], first=1)
@tiers.parametrize("shape", ["1.1", "1.0"], first=1)
def test_every_pair_of_formats_bit_for_bit(shape, dtype, tmp_path):
    params = make.random_params(SHAPES[shape])
    params["encoder/encoder_norm/scale"][:] = 0  # zarr would leave it out
    model = make.model_of({name: x.astype(dtype) for name, x in params.items()}, SHAPES[shape])
    for form in FORMATS:
        sd.save(model, tmp_path / form, format=form)
    expected = {name: x.astype(dtype).tobytes() for name, x in params.items()}
    for source, form in itertools.product(FORMATS, FORMATS):
        written = convert(tmp_path / source, tmp_path / "out", form)
        assert (written.dtype, written.stored) == (dtype, (dtype,))
        assert written.parameters == sum(x.size for x in params.values())
        assert contents(tmp_path / "out", dtype) == expected
        assert contents(written.folder, dtype) == expected
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_shape_and_special_ids_are_kept(shape, form, tmp_path):
    config = SHAPES[shape]
    model = make.model_of(make.random_params(config), config, start_token=3, eos_ids=(5, 7))
    sd.save(model, tmp_path / "model", format=form)
    got = opened(tmp_path / "model")

    def plain(config):
        return dataclasses.replace(config, scale_decoder_outputs=None)

    assert plain(got.config) == plain(config)
    scale = config.scale_decoder_outputs
    assert bool(got.config.scale_decoder_outputs) == bool(scale) or shape == "1.0"
    assert (got.start_token, got.eos_ids) == (3, (5, 7))


def test_where_nothing_ends_a_sequence_an_id_below_0_is_exported(tmp_path):
    """transformers' `generate` fails with an empty list."""
    model = make.model_of(make.random_params(SMALL), SMALL, eos_ids=())
    sd.save(model, tmp_path / "hf", format="huggingface")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / name).read_text())["eos_token_id"] == -1
    assert opened(tmp_path / "hf").eos_ids == ()


VOCABULARIES = {
    "sentencepiece": lambda: SentencePieceVocabulary.load(SPIECE, 100),
    "sentencepiece without sentinels": lambda: SentencePieceVocabulary.load(SPIECE),
    "tokenizer_json": lambda: TokenizerJsonVocabulary.load(
        GOLDEN / "hf_tokenizer" / "tokenizer.json"
    ),
    "bytes": lambda: ByteVocabulary(69),
    "bytes without sentinels": lambda: ByteVocabulary(0),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_vocabulary_and_sentinels_are_kept(kind, tmp_path):
    config, vocabulary = dataclasses.replace(SMALL, vocab_size=328), VOCABULARIES[kind]()
    model = make.model_of(make.random_params(config), config, vocabulary)
    sd.save(model, tmp_path / "specdec")
    source = tmp_path / "specdec"
    for form in ("huggingface", "t5x", "t5x_legacy"):
        source = convert(source, tmp_path / form, form).folder
    convert(source, tmp_path / "again", "huggingface")
    for folder in (*FORMATS, "again"):
        got = opened(tmp_path / folder).vocabulary
        assert got.fingerprint() == vocabulary.fingerprint() and got.eos_ids == vocabulary.eos_ids
        text = "Tom <extra_id_0> Mary"
        assert got.encode(text) == vocabulary.encode(text)
    file = {"s": "spiece.model", "t": "tokenizer.json"}.get(kind[0])
    if file:
        assert (tmp_path / "again" / file).read_bytes() == (
            GOLDEN / "hf_tokenizer" / file
        ).read_bytes()


class OwnVocabulary(ByteVocabulary):
    """A vocabulary that its class's files do not give back."""

    def fingerprint(self):
        return "own"


def test_what_a_hugging_face_config_cannot_express_is_rejected(tmp_path):
    config = dataclasses.replace(SMALL, vocab_size=264)
    model = make.model_of(make.random_params(config), config, OwnVocabulary(5))
    with pytest.raises(
        ValueError, match="format: got vocabulary=.*, which huggingface would give back as"
    ):
        sd.save(model, tmp_path / "model", format="huggingface")
    odd = dataclasses.replace(TINY, mlp_activations=("gelu", "gelu"))
    with pytest.raises(
        ValueError,
        match=r"mlp_activations: got \('gelu', 'gelu'\), expected one of .* Hugging Face",
    ):
        sd.save(make.model_of(PARAMS, odd), tmp_path / "model", format="huggingface")
    assert not list(tmp_path.iterdir())


def test_the_safetensors_library_reads_what_is_written(tmp_path, monkeypatch):
    make.FORMATS["legacy"](tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "one", "huggingface")
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 7000)
    convert(tmp_path / "source", tmp_path / "shards", "huggingface", "bfloat16")
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(x.size for x in PARAMS.values())
    shards = {}
    for file in files:
        tensors = safetensors.numpy.load_file(tmp_path / "shards" / file)
        assert sum(x.nbytes for x in tensors.values()) <= 7000 and {
            index["weight_map"][name] for name in tensors
        } == {file}
        shards |= tensors
    one = safetensors.numpy.load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == shards.keys() == make.TENSORS.keys()
    for name, x in make.TENSORS.items():
        np.testing.assert_array_equal(one[name], x)
        np.testing.assert_array_equal(shards[name], x.astype(ml_dtypes.bfloat16))
    assert contents(tmp_path / "shards", "bfloat16")


@pytest.mark.parametrize("form, folder", [("t5x", "checkpoint_7/state"), ("specdec", "params")])
def test_orbax_reads_what_is_written(form, folder, tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    monkeypatch.setattr(
        loader.native_format.tensorstore_arrays, "_COMMIT_BYTES", 3000
    )  # several commits
    monkeypatch.setattr(loader.native_format.tensorstore_arrays, "_CHUNK_BYTES", 500)
    make.FORMATS["legacy"](tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", form)
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out" / folder)
    if form == "t5x":
        assert int(tree["state"]["step"]) == 7
        tree = tree["target"]
    got = flatten(tree)
    assert got.keys() == PARAMS.keys()
    for name, x in PARAMS.items():
        np.testing.assert_array_equal(got[name], x)


@pytest.mark.parametrize(
    "stored, expected",
    [(np.float16, "float32"), (np.float64, "float32"), (ml_dtypes.bfloat16, "bfloat16")],
)
def test_the_default_dtype_is_the_stored_one(stored, expected, tmp_path):
    make.write_hf(tmp_path / "source", {name: x.astype(stored) for name, x in make.TENSORS.items()})
    written = convert(tmp_path / "source", tmp_path / "out", "t5x")
    assert written.dtype == expected and written.stored == (np.dtype(stored).name,)
    mixed = {
        name: x.astype(np.float32 if i else stored)
        for i, (name, x) in enumerate(make.TENSORS.items())
    }
    make.write_hf(tmp_path / "mixed", mixed)
    assert convert(tmp_path / "mixed", tmp_path / "mixed_out", "t5x").dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["t5x", "t5x_legacy"])
def test_the_step_of_a_t5x_checkpoint(form, tmp_path):
    make.FORMATS["legacy"](tmp_path / "source")
    make.FORMATS["own"](tmp_path / "own")
    assert (
        convert(tmp_path / "source", tmp_path / "a", form).folder == tmp_path / "a" / "checkpoint_7"
    )
    assert convert(tmp_path / "own", tmp_path / "b", form).folder == tmp_path / "b" / "checkpoint_1"
    assert (
        convert(tmp_path / "own", tmp_path / "checkpoint_30", form).folder
        == tmp_path / "checkpoint_30"
    )
    assert t5x.find_step(tmp_path) == tmp_path / "checkpoint_30"


def test_layers_that_were_stacked_and_optimizer_states(tmp_path):
    for form in ("orbax scan", "legacy inline", "flax"):
        make.FORMATS[form](tmp_path / form)
        written = convert(tmp_path / form, tmp_path / f"{form} out", "t5x_legacy")
        assert contents(written.folder) == {name: x.tobytes() for name, x in PARAMS.items()}
        assert not list(written.folder.glob("state.*"))


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, ""),
        (dict(scale_decoder_outputs=True), "scale_decoder_outputs other than"),
        (dict(num_buckets=8), "num_buckets=8"),
    ],
)
def test_a_line_says_what_the_network_of_t5x_cannot_compute(changes, expected, tmp_path):
    config = dataclasses.replace(make.TINY, **dict(num_buckets=32, max_distance=128) | changes)
    model, lines = make.model_of(make.random_params(config), config), []
    sd.save(model, tmp_path / "out", format="t5x_legacy", say=lines.append)
    said = [line for line in lines if "T5X's network" in line]
    assert len(said) == bool(expected) and all(expected in line for line in said)


def test_an_output_that_holds_something_is_rejected(tmp_path):
    make.FORMATS["own"](tmp_path / "source")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "source", tmp_path / "empty", "specdec")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="got a folder that is not empty, expected nothing there"):
        convert(tmp_path / "source", tmp_path / "empty", "specdec")
    with pytest.raises(ValueError, match="got a folder that is not empty, expected nothing there"):
        sd.save(make.model_of(), tmp_path / "empty", format="t5x")
    with pytest.raises(ValueError, match="got a file, expected nothing there"):
        convert(tmp_path / "source", tmp_path / "source" / "config.json", "specdec")
    assert sorted(tmp_path.rglob("*")) == before


def broken(path):
    """Opens, but one of its arrays cannot be read."""
    make.FORMATS["legacy"](path)
    (path / "checkpoint_7" / "target.encoder.layers_1.mlp.wo.kernel" / "1.0").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_what_goes_wrong_on_the_way_leaves_nothing(form, tmp_path, monkeypatch):
    broken(tmp_path / "source")
    with pytest.raises(ValueError, match="mlp/wo/kernel: got .*missing, expected float32"):
        convert(tmp_path / "source", tmp_path / "out", form)

    written = []

    def interrupted(self, count):
        written.append(count)
        if len(written) == 5:
            raise KeyboardInterrupt

    make.FORMATS["own"](tmp_path / "whole")
    monkeypatch.setattr(progress.Progress, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "whole", tmp_path / "out", form)
    assert len(written) == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "whole"]


KILLED = """
import itertools, os, signal, sys
from specdec_jax.checkpoints.converter import convert
from specdec_jax.files.progress import Progress
numbers = itertools.count()
def advance(self, count):
    if next(numbers) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
Progress.advance = advance
convert(sys.argv[1], sys.argv[2], "t5x_legacy")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the system cannot kill")
def test_killed_in_the_middle(tmp_path):
    make.FORMATS["own"](tmp_path / "source")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "source", tmp_path / "out"])
    assert done.returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.specdec-new", "source"]
    convert(tmp_path / "source", tmp_path / "out", "t5x_legacy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    assert contents(tmp_path / "out") == {name: x.tobytes() for name, x in PARAMS.items()}


# The command.


def specdec(capsys, *argv) -> tuple[int, str, str]:
    code = main.main(["convert", *map(str, argv), "--compilation_cache_dir="])
    captured = capsys.readouterr()
    return code, captured.out, without_course(captured.err)


def test_command(tmp_path, capsys):
    make.FORMATS["legacy"](tmp_path / "source")
    code, out, err = specdec(
        capsys,
        "--source",
        tmp_path / "source",
        "--output",
        tmp_path / "hf",
        "--format=huggingface",
        "--dtype=bfloat16",
        "--gated_activation=silu",
    )
    count = sum(x.size for x in PARAMS.values())
    assert (code, out) == (0, "") and err.count("\n") == 1
    assert (
        f"{tmp_path / 'hf'}: huggingface, {count:,} parameters in bfloat16 (from float32, rounded)"
        in err
    )
    assert opened(tmp_path / "hf").config.mlp_activations == ("silu", "linear")
    argv = ("--source", tmp_path / "hf", "--output", tmp_path / "deep" / "t5x", "--format=t5x")
    code, _, err = specdec(capsys, *argv)
    assert (
        code == 0
        and f"{tmp_path / 'deep' / 't5x' / 'checkpoint_1'}: t5x" in err
        and "(from bfloat16)" in err
    )
    assert opened(tmp_path / "deep" / "t5x").config.mlp_activations == ("silu", "linear")


BAD = {
    "no source": (["--output=OUT", "--format=t5x"], "source: got nothing, expected --source"),
    "no output": (["--source=SOURCE", "--format=t5x"], "output: got nothing, expected --output"),
    "no format": (["--source=SOURCE", "--output=OUT"], "format: got nothing, expected --format"),
    "format": (
        ["--source=SOURCE", "--output=OUT", "--format=onnx"],
        "got 'onnx', expected one of specdec, huggingface",
    ),
    "dtype": (
        ["--source=SOURCE", "--output=OUT", "--format=t5x", "--dtype=int8"],
        "got int8, expected float32 or bfloat16",
    ),
    "missing": (
        ["--source=no/such/model", "--output=OUT", "--format=t5x"],
        "no/such/model: got no such path",
    ),
    "there already": (
        ["--source=SOURCE", "--output=SOURCE", "--format=t5x"],
        "got a folder that is not empty",
    ),
    "vocabulary": (
        ["--source=SOURCE", "--output=OUT", "--format=t5x", "--vocabulary=no.model"],
        "no.model: got no such file",
    ),
    "too many pieces": (
        ["--source=SOURCE", "--output=OUT", "--format=t5x", f"--vocabulary={SPIECE}"],
        "got 200 pieces, expected at most",
    ),
    "activation": (
        ["--source=SOURCE", "--output=OUT", "--format=t5x", "--gated_activation=silu"],
        "expected it for a T5X checkpoint only",
    ),
    "unknown activation": (
        ["--source=LEGACY", "--output=OUT", "--format=t5x", "--gated_activation=tanh"],
        "gated_activation: got 'tanh'",
    ),
    "damaged": (["--source=BROKEN", "--output=OUT", "--format=t5x"], "mlp/wo/kernel: got"),
    "argument": (["model"], "got 'model', expected flags only"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path, capsys):
    argv, message = BAD[case]
    make.FORMATS["own"](tmp_path / "source")
    make.FORMATS["legacy"](tmp_path / "legacy")
    broken(tmp_path / "broken")
    for word in ("source", "out", "broken", "legacy"):
        argv = [argument.replace(word.upper(), str(tmp_path / word)) for argument in argv]
    code, out, err = specdec(capsys, *argv)
    assert (code, out) == (2, "") and err.count("\n") == 1 and err.startswith("specdec: error: ")
    assert message in err
    assert not (tmp_path / "out").exists()


# What transformers makes of it.


@pytest.mark.slow
def test_a_decoder_of_another_depth_is_exported_with_it(tmp_path):
    """transformers' caches count `decoder_layers`, its network `num_decoder_layers`."""
    config = dataclasses.replace(TINY, num_encoder_layers=1, num_decoder_layers=3)
    sd.save(sd.LanguageModel.random(config), tmp_path / "hf", format="huggingface")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert [written[name] for name in ("num_layers", "num_decoder_layers", "decoder_layers")] == [
        1,
        3,
        3,
    ]
    assert loader.load_shape(tmp_path / "hf").num_decoder_layers == 3


SENTENCES = [
    "The dog sleeps under the table.",
    "We will meet again tomorrow morning.",
    "I have never seen such a big house.",
    "Where did you buy that coat?",
    "She speaks three languages.",
    "It has been raining since Monday.",
    "My brother works in a hospital.",
    "Please close the door.",
    "The train leaves at seven o'clock.",
    "Nobody knew what had happened.",
    "He wanted to become a teacher.",
    "Can you help me with my homework?",
    "The old bridge was built by the Romans.",
    "They laughed until they cried.",
    "There is no milk left in the fridge.",
    "I would rather stay at home tonight.",
    "The children are playing in the garden.",
    "Why are you always late?",
    "Most people here live from fishing.",
    "If you are tired, you should go to bed.",
]


@pytest.mark.filterwarnings("ignore")
def test_transformers_generates_the_same_from_the_exported_target(tmp_path):
    """With its own cache, of the decoder's four layers, where the encoder has two."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    convert("ende/target", tmp_path / "hf", "huggingface")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    target = sd.load("ende/target", "float32")
    ours = sd.generate(target, SENTENCES, max_new_tokens=40)
    with torch.no_grad():
        for number, text in enumerate(SENTENCES):
            inputs = tokenizer([text], return_tensors="pt")
            theirs = model.generate(**inputs, do_sample=False, num_beams=1, max_new_tokens=40)[
                0, 1:
            ]
            assert theirs.tolist() == ours.tokens[number, : ours.lengths[number]].tolist(), text
