"""Expands, checks and records the options that are paths."""

import dataclasses
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from specdec_jax.files import places, writing

# Options that are paths, of all commands; some may have other values too, such as the name of a
# drafter.
INPUTS = (
    "target drafter shortlist vocabulary input_file source records source_files validation_files"
    " train_files data_dir tfds_data_dir seqio_additional_cache_dirs initialise_from teacher"
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
    return prefix + os.path.expanduser(re.sub("(?i)^file://", "", path.removeprefix(prefix)))


def find_replaced(options: Any) -> Iterator[str]:
    """Yields the files that a command replaces because an option names them."""
    for path in _find_written(options).values():
        if places.is_remote_file(path) or os.path.isfile(path):
            yield path


def check_written(options: Any, read: Mapping[str, Iterable[Any]]) -> None:
    """Checks that a command writes no file twice, nor its settings over one that it reads.

    Names that no file can have are rejected first.

    Args:
      options: a command's options.
      read: files of settings that the command reads, by option.

    Raises:
      ValueError: it does.
    """
    for name in OUTPUTS:
        if isinstance(path := getattr(options, name, None), str):
            writing.check_name(path, name)
    written = _find_written(options)
    for (other, path), (name, file) in itertools.combinations(written.items(), 2):
        if places.is_same(path, file):
            raise ValueError(f"{name}: got {file!r}, expected another file than {other}")
    settings = None if hasattr(options, "output_dir") else _find_settings(options)
    inputs = getattr(options, "input_file", None) or ()
    read = {**read, "input_file": [inputs] if isinstance(inputs, str) else inputs}
    named = [(name, path) for name, files in read.items() for path in files]
    for name, path in [*written.items(), *named]:
        if settings is not None and places.is_same(settings, path):
            got = f"an output whose settings go to {settings.name}, which {name} names too"
            raise ValueError(f"got {got}, expected another name")


def _find_written(options: Any) -> dict[str, str]:
    """Returns the files that a command writes because an option names them, by option."""
    # A folder replaces no file.
    named = {name: getattr(options, name, None) for name in OUTPUTS if name != "output_dir"}
    return {
        name: path
        for name, path in named.items()
        if isinstance(path, str) and path and not writing.is_pass_through(path)
    }


def _find_settings(options: Any, suffix: str = ".gin") -> places.AnyPath | None:
    """Returns the file beside the output that the settings of a run go to, if they go anywhere."""
    file = getattr(options, "output_file", None) or getattr(options, "output", None)
    if not file or writing.is_pass_through(file):
        return None
    place = places.make_path(file).absolute()  # a folder may end in "/"
    return place.with_name(place.name + suffix)


def record(
    options: Any, settings: str, unfinished: bool = False, kept: Iterable[places.AnyPath] = ()
) -> None:
    """Writes the settings of a run as a gin file.

    It is `operative.gin` in the run's folder, or a file beside its output file. Settings of an
    unfinished output file lie beside the results that a kill would leave (.partial), until the file
    is there. A file of `kept`, from which the settings were read, stays as it is.
    """
    if folder := getattr(options, "output_dir", None):
        path = places.join(folder, "operative.gin")
        if isinstance(path, pathlib.Path):
            path.parent.mkdir(parents=True, exist_ok=True)
        writing.write_file(path, settings)
        return
    place, partial = (_find_settings(options, suffix) for suffix in (".gin", ".partial.gin"))
    if place is None or partial is None:
        return
    if unfinished:
        writing.write_file(partial, settings)
        return
    if not any(places.is_same(place, file) for file in kept):
        writing.write_file(place, settings)
    partial.unlink(missing_ok=True)
