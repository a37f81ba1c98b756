"""A stage about loading: seconds, and peak memory over the size of the weights.

Folders hold dummy weights and are written one after another, so that the operating system still has
their contents. Each load is a process of its own, which reads the folder from this machine or from
an emulated `gs://` in another process.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools import loading_process
from tools.results.stage import Row, Rows, Settings, Skipped

_SCRIPTS = pathlib.Path(__file__).resolve().parents[2]
_WAIT = 0.02  # seconds before each answer of the store
MOST = 1.2  # times the weights: a peak is to be below


class Source(NamedTuple):
    """A shape that is written and loaded.

    Attributes:
      preset: the published shape.
      dtype: dtype in which it is stored and loaded.
      fields: what is changed of it; the weights then take about 2 GB.
    """

    preset: str
    dtype: str
    fields: Mapping[str, Any]


T5 = Source("t5_1_1/large", "float32", dict(num_encoder_layers=14, num_decoder_layers=14))
# 0.5 GB, of which embedding and head are as small a part.
QUICK_T5 = T5._replace(fields=dict(num_encoder_layers=4, num_decoder_layers=4, vocab_size=8000))
BART = Source("bart/large", "float32", {})
GEMMA = Source("gemma3/1b", "bfloat16", {})
GEMMA_FLOAT32 = GEMMA._replace(dtype="float32")
FORMATS: dict[str, str | None] = {
    "our own": None,
    "safetensors": "huggingface",
    "`pytorch_model.bin`": "pytorch",
    "T5X's Orbax": "t5x",
    "T5X's older": "t5x_legacy",
}
Environment = Mapping[str, str]


def measure_loading(settings: Settings) -> Rows:
    """Measures loads of a T5 in each format, and of a BART and a Gemma in safetensors."""
    if not loading_process.CLEAR.exists():
        raise Skipped("peaks of memory are read from Linux's /proc")
    if not loading_process.SUPPORT.is_dir():
        raise Skipped("the tests, which have the emulated store, are not there")
    if settings.quick:
        return {"formats": measure_source(QUICK_T5, {"safetensors": "huggingface"})}
    families = {
        "BART, safetensors": BART,
        "Gemma 3, safetensors": GEMMA,
        "Gemma 3, float32": GEMMA_FLOAT32,
    }
    rows: Rows = {"formats": measure_source(T5, FORMATS), "families": {}}
    for label, source in families.items():
        rows["families"] |= measure_source(source, {label: "huggingface"})
    return rows


def measure_source(source: Source, formats: Mapping[str, str | None]) -> dict[str, Row]:
    """Writes a shape with dummy weights in formats, one after another, and loads each."""
    fields, rows = {**source.fields, "dtype": source.dtype}, {}
    with tempfile.TemporaryDirectory() as name:
        bucket = pathlib.Path(name) / "bucket"
        run("write", source.preset, json.dumps(fields), str(bucket / "specdec"))
        with emulate_store(bucket.parent) as environment:
            for label, form in formats.items():
                folder = convert(bucket, form)
                rows[label] = time_loads(folder, source.dtype, environment)
                if folder.name != "specdec":
                    shutil.rmtree(folder)
    return rows


@contextlib.contextmanager
def emulate_store(folder: pathlib.Path) -> Iterator[Environment | None]:
    """Runs an emulated `gs://` of a folder's subfolders; yields how processes find it.

    It yields None where no package opens `gs://`.
    """
    if importlib.util.find_spec("gcsfs") is None:
        yield None
        return
    program = loading_process.SUPPORT / "object_store_run.py"
    command = [sys.executable, str(program), "serve", str(folder), str(_WAIT)]
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())  # it ends with its standard input


def convert(bucket: pathlib.Path, form: str | None) -> pathlib.Path:
    """Writes the bucket's checkpoint in a format too; returns the folder."""
    source = bucket / "specdec"
    if form is None:
        return source
    new = bucket / form
    if form == "pytorch":  # it is made of the other file of Hugging Face's
        between = convert(bucket, "huggingface")
        run("convert", str(between), form, str(new))
        shutil.rmtree(between)
    else:
        run("convert", str(source), form, str(new))
    return new


def time_loads(folder: pathlib.Path, dtype: str, environment: Environment | None) -> Row:
    """Loads a folder from here, and from the store if there is one."""
    found = {"local": run("load", str(folder), dtype)}
    if environment is not None:
        url = f"gs://{folder.parent.name}/{folder.name}"
        found["store"] = run("load", url, dtype, **environment)
    row: Row = {"dtype": dtype, "gb": found["local"]["size"] / 1e9}
    for name, one in found.items():
        row[name] = {"seconds": one["seconds"], "peak": one["peak"] / one["size"]}
    return row


def run(*arguments: str, **variables: str) -> dict[str, Any]:
    """Runs `loading_process.py` and returns what it prints last."""
    command = [sys.executable, "-m", "tools.loading_process", *arguments]
    ended = subprocess.run(
        command, cwd=_SCRIPTS, env=os.environ | variables, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-500:])
    return json.loads(ended.stdout.splitlines()[-1])


def format_loading(row: Row) -> str:
    """Returns the weights' size, and peak and seconds of a load from here and from the store."""
    local = row["local"]
    text = f"{row['gb']:.2f} GB in {row['dtype']}: peak {local['peak']:.2f} times that"
    text += f", {local['seconds']:.1f} s"
    if "store" in row:
        store = row["store"]
        times = store["seconds"] / local["seconds"]
        text += f"; from the store {store['peak']:.2f}, {store['seconds']:.1f} s"
        text += f", {times:.1f} times as long"
    return text
