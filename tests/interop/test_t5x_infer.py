"""T5X's own program, `t5x.infer`, writes the same lines with this package's model, and with beams.

Needs the extra t5x; skipped where T5X is not installed.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from golden_models import unpack_t5x

import specdec_jax as sd
from specdec_jax.checkpoints import loader
from specdec_jax.commands import main
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

if importlib.util.find_spec("t5x") is None:
    pytest.skip("t5x is not installed", allow_module_level=True)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick")]
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def golden(tmp_path):
    """Returns the folder of T5X's checkpoint, what T5X computed from it, and the model.

    The task and T5X's settings lie beside.
    """
    folder, io = unpack_t5x(tmp_path)
    rows = [[int(token) for token in row if token] for row in io["encoder_input_tokens"]]
    lines = [f"{' '.join(map(str, row))}\t5 1\n" for row in rows]
    (tmp_path / "task.tsv").write_text("".join(lines))
    (tmp_path / "settings.gin").write_text(SETTINGS)
    return folder, io, sd.load(folder, "float32")


SETTINGS = """
from __gin__ import dynamic_registration
import __main__ as infer_script
import t5x_task
from t5x import decoding
from t5x import models
from t5x import utils
from t5x.examples.t5 import network

include "t5x/examples/t5/t5_1_1/small.gin"
include "t5x/configs/runs/infer.gin"

MIXTURE_OR_TASK_NAME = "specdec_ids"
TASK_FEATURE_LENGTHS = {"inputs": 12, "targets": 16}
DROPOUT_RATE = 0.0
VOCABULARY = @t5x_task.vocabulary()
infer_script.infer.mode = "predict_with_aux"
models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
decoding.temperature_sample.temperature = 0.0
utils.DatasetConfig.batch_size = 3
utils.RestoreCheckpointConfig.dtype = "float32"
network.T5Config:
  vocab_size = 128
  dtype = "float32"
  emb_dim = 32
  num_heads = 2
  num_encoder_layers = 2
  num_decoder_layers = 2
  head_dim = 16
  mlp_dim = 64
"""


def config(folder: pathlib.Path, output: pathlib.Path, *argv) -> subprocess.CompletedProcess:
    """Runs `python -m t5x.infer`."""
    paths = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    )
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "t5x.infer",
            f"--gin_search_paths={folder},{ROOT / 'configs'}",
            "--gin_file=settings.gin",
            *argv,
            f"--gin.INFER_OUTPUT_DIR='{output}'",
        ],
        env=os.environ
        | {
            "T5X_TASK_FILE": str(folder / "task.tsv"),
            "PYTHONPATH": paths,
            "JAX_NUMPY_DTYPE_PROMOTION": "standard",
        },
        capture_output=True,
        text=True,
    )


def infer(
    folder: pathlib.Path, output: pathlib.Path, *argv, stderr_parts: tuple[str, ...] = ()
) -> list:
    """`python -m t5x.infer` writes the inputs' order; `stderr_parts` are on standard error."""
    done = config(folder, output, *argv)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(part in done.stderr for part in stderr_parts), done.stderr[-3000:]
    (path,) = output.glob("*.jsonl-*-of-?????")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_the_infer_command(golden, tmp_path, monkeypatch):
    """One more gin file and a drafter: the same lines come out."""
    folder, io, target = golden
    checkpoint = f"--gin.CHECKPOINT_PATH='{folder / 'checkpoint_7'}'"
    plain = infer(tmp_path, tmp_path / "plain", checkpoint)
    sd.save(target, tmp_path / "drafter")
    ours = infer(
        tmp_path,
        tmp_path / "ours",
        checkpoint,
        "--gin_file=t5x/speculative.gin",
        f"--gin.DRAFTER='{tmp_path / 'drafter'}'",
        stderr_parts=(
            f"specdec_jax: drafter {tmp_path / 'drafter'}, gamma 4; verifier block; decodes the "
            "argmax, where",
            "of no effect here: models.EncoderDecoderModel.decode_fn",
            "specdec_jax: 2 batches",
            "(100.0% of them, ",
        ),
    )
    assert [line["prediction"] for line in ours] == io["greedy_eos1"].tolist() and ours == plain
    for name in ("lookup", "exit:1", "self:int8"):
        drafting = "--gin_file=t5x/speculative.gin", f"--gin.DRAFTER='{name}'"
        stderr_parts = (", gamma 4; verifier block; decodes the argmax", "specdec_jax: 2 batches")
        assert (
            infer(tmp_path, tmp_path / name, checkpoint, *drafting, stderr_parts=stderr_parts)
            == plain
        )
    monkeypatch.setenv("T5X_TASK_FILE", str(tmp_path / "task.tsv"))
    flags = [
        "--task=specdec_ids",
        "--module_import=t5x_task",
        "--max_input_length=12",
        "--max_new_tokens=16",
    ]
    path = tmp_path / "lines"
    assert (
        main.main(
            ["generate", f"--target={folder}", *flags, "--dtype=float32", f"--output_file={path}"]
        )
        == 0
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [{name: line[name] for name in ("inputs", "prediction")} for line in lines] == [
        {name: line[name] for name in ("inputs", "prediction")} for line in plain
    ]
    sd.convert(folder, tmp_path / "exported", "t5x")
    exported = f"--gin.CHECKPOINT_PATH='{tmp_path / 'exported' / 'checkpoint_7'}'"
    assert infer(tmp_path, tmp_path / "again", exported) == plain


def test_a_file_before_the_models_is_rejected(golden, tmp_path):
    """`MODEL` would be T5X's own again."""
    folder, _, _ = golden
    (tmp_path / "first.gin").write_text(
        "from __gin__ import dynamic_registration\ninclude 't5x/speculative.gin'\n"
    )
    settings = (tmp_path / "settings.gin").read_text()
    (tmp_path / "settings.gin").write_text(
        settings.replace('include "t5x/ex', 'include "first.gin"\ninclude "t5x/ex')
    )
    checkpoint = f"--gin.CHECKPOINT_PATH='{folder / 'checkpoint_7'}'"
    done = config(tmp_path, tmp_path / "plain", checkpoint, "--gin.DRAFTER='lookup'")
    assert (
        done.returncode
        and "but no MODEL that is one, so that T5X would decode without it" in done.stderr
    )


BEAMS = """
from __gin__ import dynamic_registration
from t5x import decoding
from t5x import models

decoding.beam_search.alpha = 1.2
models.EncoderDecoderModel.decode_fn = @decoding.beam_search
models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4
"""


@pytest.mark.slow
def test_the_infer_command_with_beams(golden, tmp_path):
    """T5X's default decode function needs one more gin file and writes the same lines."""
    folder, _, target = golden
    sd.save(target, tmp_path / "drafter")
    (tmp_path / "beams.gin").write_text(BEAMS)
    search = [f"--gin.CHECKPOINT_PATH='{folder / 'checkpoint_7'}'", "--gin_file=beams.gin"]
    plain = infer(tmp_path, tmp_path / "plain", *search)
    ours = infer(
        tmp_path,
        tmp_path / "ours",
        *search,
        "--gin_file=t5x/speculative_beams.gin",
        f"--gin.DRAFTER='{tmp_path / 'drafter'}'",
    )
    names = ("inputs", "prediction")
    assert [[line[name] for name in names] for line in ours] == [
        [line[name] for name in names] for line in plain
    ]
    scores = [[line["aux"]["scores"] for line in lines] for lines in (ours, plain)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


WHOLE_RUN = """
from __gin__ import dynamic_registration
from t5x import utils
from t5x.examples.t5 import network

include "t5x/flan_t5_xxl_v4_8.gin"

FILE = "{root}/configs/examples/validation.tsv"
VOCABULARY_FILE = "{vocabulary}"
DRAFTER = "{folder}/drafter"
CHECKPOINT_PATH = "{folder}/target/checkpoint_1"
TASK_FEATURE_LENGTHS = {{"inputs": 64, "targets": 8}}
utils.RestoreCheckpointConfig.dtype = "float32"
network.T5Config:
  vocab_size = 6144
  dtype = "float32"
  emb_dim = 32
  num_heads = 4
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 64
"""


@pytest.mark.slow
def test_the_run_on_a_v4_8(tmp_path, monkeypatch):
    """The page's whole run, with small shapes on four fake devices: drafting changes no line."""
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=4")
    file = loader.BUNDLED / "ende/spiece.model"
    shape = sd.T5Config(6144, 32, 4, 8, 1, 1, 64)
    for seed, name in enumerate(("target", "drafter")):
        model = sd.LanguageModel.random(shape, seed, SentencePieceVocabulary.load(file))
        sd.save(model, tmp_path / name / "own")
    sd.convert(tmp_path / "target/own", tmp_path / "target/checkpoint_1", "t5x_legacy")
    sd.convert(tmp_path / "drafter/own", tmp_path / "drafter/checkpoint_1", "t5x")
    settings = WHOLE_RUN.format(root=ROOT, vocabulary=file, folder=tmp_path)
    (tmp_path / "settings.gin").write_text(settings)
    parts = f"specdec_jax: drafter {tmp_path / 'drafter'}, gamma 7", "specdec_jax: 1 batches"
    ours = infer(tmp_path, tmp_path / "ours", stderr_parts=parts)
    plain = infer(tmp_path, tmp_path / "plain", "--gin.DRAFTER=None")
    names = ("inputs", "prediction")
    assert ours and [[line[name] for name in names] for line in ours] == [
        [line[name] for name in names] for line in plain
    ]
