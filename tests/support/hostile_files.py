"""Reads hostile files one by one, in a process of its own.

Some could hang, fill the memory or end the process.
"""

import contextlib
import dataclasses
import functools
import io
import json
import os
import pathlib
import resource
import shutil
import sys
import time

import fsspec
import golden_languages
import hostile_languages
import make_checkpoints as make
import numpy as np
import stores
from golden_models import GOLDEN
from hostile_cases import ARRAY
from hostile_table import CASES, SLOW_CASES

from specdec_jax.files.places import make_path

TOKENIZER = GOLDEN / "hf_tokenizer"


def write_bases(folder: pathlib.Path) -> None:
    """Writes one small sound folder of each kind."""
    from specdec_jax.checkpoints import native_format
    from specdec_jax.drafters.ngram import NGramDrafter
    from specdec_jax.drafters.suffix import SuffixDrafter
    from specdec_jax.models.heads import HeadsConfig

    for name in ("safetensors", "shards", "flax", "pytorch", "orbax", "own"):
        make.FORMATS[name](folder / name)
    inline = [name for name in make.PARAMS if name.replace("/", ".") not in ARRAY]
    make.write_t5x_legacy(folder / "legacy" / "checkpoint_7", make.PARAMS, inline=inline)
    wide = dataclasses.replace(make.TINY, vocab_size=328)
    tensors = make.to_tensors(make.random_params(wide))
    for name, files in (
        ("text", ("spiece.model", "tokenizer_config.json")),
        ("json", ("tokenizer.json",)),
    ):
        make.write_hf(folder / name, tensors, vocab_size=328)
        (folder / name / "generation_config.json").write_text("{}")
        for file in files:
            shutil.copy(TOKENIZER / file, folder / name)
    config = HeadsConfig(2, 16, 40, 1, True)
    params = {name: np.zeros(shape, np.float32) for name, shape in config.parameter_shapes.items()}
    with native_format.write_part(folder / "heads", "heads", config, "x", make.unflatten(params)):
        pass
    (folder / "table").mkdir()
    NGramDrafter.count([[3, 4, 5], [3, 4]], 8, 2).save(folder / "table" / "table.npz")
    SuffixDrafter.save_texts(folder / "table" / "texts.suffix", [[3, 4, 5], [3, 4]], 8)
    for base in {case.base for case in hostile_languages.ALL.values()}:
        golden_languages.copy_folder(base, folder / base)


@functools.cache
def target():
    return make.model_of()


def read(how: str, folder: pathlib.Path) -> None:
    """Reads the folder; a command's exit code 2 becomes a ValueError with its line.

    With "remote" before, what is read is a copy of the folder in a store.
    """
    import specdec_jax as sd
    from specdec_jax.commands import main as main_command
    from specdec_jax.tokenizers import huggingface_folders

    if how.startswith("remote "):
        fsspec.filesystem("memory").store.clear()
        stores.upload(folder, "memory://hostile/model")
        return read(how.removeprefix("remote "), make_path("memory://hostile/model"))
    if how == "load":
        sd.load(folder, "float32")
    elif how == "tokenizer":
        huggingface_folders.open_folder(folder, (0,))
    elif how == "heads":
        sd.HeadsDrafter.load(folder, target())
    elif how == "table":
        sd.NGramDrafter.load(folder / "table.npz")
    elif how == "sorted text":
        sd.SuffixDrafter.load(folder / "texts.suffix")
    else:
        argv = {
            "figures": ["--records=record.json", "--output=out.html"],
            "train": ["--gin_file=a.gin"],
            "generate": [
                "--target=.",
                "--dtype=float32",
                *(f"--input_file={p.name}" for p in folder.glob("*.txt*")),
            ],
        }[how]
        error = io.StringIO()
        with contextlib.chdir(folder), contextlib.redirect_stderr(error):
            code = main_command.main([how, *argv, "--compilation_cache_dir="])
        if code == 2:
            raise ValueError(error.getvalue().removesuffix("\n"))


def high_water() -> int:
    """Returns the greatest memory of the process in bytes since the last call.

    Where Linux cannot reset it, since the start of the process.
    """
    try:
        status = pathlib.Path("/proc/self/status").read_text()
        most = (
            int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
            * 1024
        )
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        return most
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(name: str, folder: pathlib.Path) -> dict:
    """Tries one case; returns the error's type and text, seconds, bytes, and standard error."""
    of, path = (CASES | SLOW_CASES)[name], folder / "model"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folder / "bases" / of.base, path)
    of.damage(path)
    high_water()
    before = high_water()
    start, result = time.process_time(), {"error": None, "text": ""}
    with open(folder / "stderr", "w+b") as written:
        kept = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            read(of.read, path)
        except BaseException as error:
            result = {"error": type(error).__name__, "text": str(error)}
        finally:
            os.dup2(kept, 2)
            os.close(kept)
    seconds, grown = time.process_time() - start, high_water() - before
    return result | {
        "seconds": seconds,
        "bytes": grown,
        "stderr": (folder / "stderr").read_text(errors="replace"),
    }


def main(folder: pathlib.Path) -> None:
    """Tries the cases whose names come on standard input; prints a line of JSON for each."""
    names = sys.stdin.read().splitlines()
    if not (folder / "bases").exists():
        write_bases(folder / "bases")
    target()
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
    for name in names:
        print(json.dumps({"case": name, **attempt(name, folder)}), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
