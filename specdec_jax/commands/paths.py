"""Expands, checks and records the options that are paths."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from specdec_jax.files import places, writing

# Options that are paths, of all commands; some may have other values too, such as the name of a
# drafter.
INPUTS = (
    "target drafter shortlist vocabulary input_file source records source_files validation_files"
    " train_files data_dir tfds_data_dir initialise_from teacher"
).split()
OUTPUTS = "output output_file output_dir config plot picture report".split()


def expand_options(options: Any) -> Any:
    """Returns options with the user's home folder for `~` in those that are paths.

    A shell leaves the `~` of `--target=~/model` as it is. Of a `file://` URL its path is left.
    """
    names = {field.name for field in dataclasses.fields(options)} & {*INPUTS, *OUTPUTS}
    paths = {name: _expand(getattr(options, name)) for name in names}
    return dataclasses.replace(options, **paths)


def expand_flags(values: flags.FlagValues, names: Sequence[str]) -> None:
    """Does what `expand_options` does, for flags that are no options of a command."""
    for name in names:
        values[name].value = _expand(values[name].value)


def _expand(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_expand, value))
    if not isinstance(value, str):
        return value
    return ",".join(map(_expand_path, value.split(",")))  # a suite takes several drafters


def _expand_path(path: str) -> str:
    prefix = "parallel:" if path.startswith("parallel:") else ""
    return prefix + os.path.expanduser(re.sub("^file://", "", path.removeprefix(prefix)))


def find_replaced(options: Any) -> Iterator[str]:
    """Yields the files that a command replaces because an option names them."""
    for name in OUTPUTS:
        # A folder replaces no file.
        path = None if name == "output_dir" else getattr(options, name, None)
        if not isinstance(path, str) or writing.is_pass_through(path):
            continue
        if places.is_remote_file(path) or os.path.isfile(path):
            yield path


def record(options: Any, settings: str, unfinished: bool = False) -> None:
    """Writes the settings of a run as a gin file.

    It is `operative.gin` in the run's folder, or a file beside its output file. Settings of an
    unfinished output file lie beside the results that a kill would leave (.partial), until the file
    is there.
    """
    if folder := getattr(options, "output_dir", None):
        path = places.join(folder, "operative.gin")
        if isinstance(path, pathlib.Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        writing.write_file(path, settings)
        return
    file = getattr(options, "output_file", None) or getattr(options, "output", None)
    if not file or writing.is_pass_through(file):
        return
    place = places.make_path(file).absolute()  # a folder may end in "/"
    partial = place.with_name(f"{place.name}.partial.gin")
    writing.write_file(partial if unfinished else place.with_name(f"{place.name}.gin"), settings)
    if not unfinished:
        partial.unlink(missing_ok=True)
