"""Runs the command line `specdec`: flags (absl), gin, the compilation cache and errors.

A command is a frozen dataclass of options and a function. Flags are made from the dataclass's
fields, and gin binds the same fields by dynamic registration. A flag overrides gin, and gin the
default. The file of `specdec generate --config` comes between flags and gin.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from tokenize import TokenError
from typing import Any, NamedTuple, TextIO

import gin
from absl import flags

import specdec_jax
from specdec_jax.commands import help_page, paths
from specdec_jax.commands.errors import CheckFailed
from specdec_jax.files import places

# What gin raises for a file that is no valid code, beside ValueError, TypeError and OSError.
_BAD_CODE = (SyntaxError, ImportError, NameError, AttributeError, TokenError)
_SENTENCES = "[--] [sentence ...]"


class Command(NamedTuple):
    """One command of the command line.

    Attributes:
      module: module of this package, imported when the command is used.
      options: name of the frozen dataclass of options in that module.
      summary: one line for `--help`.
      arguments: placeholder for the positional arguments in `--help`; "" if it takes none.
    """

    module: str
    options: str
    summary: str
    arguments: str = ""

    @property
    def by_flags(self) -> bool:
        """Whether the options have flags of their own; otherwise they come from gin alone."""
        return self.module.startswith("commands")

    def load(self) -> tuple[type, Callable]:
        """Returns the dataclass, and the function that takes it and positional arguments."""
        module = importlib.import_module(f"specdec_jax.{self.module}")
        return getattr(module, self.options), module.run if self.by_flags else module.fit


COMMANDS = {
    "demo": Command(
        "commands.demo",
        "DemoOptions",
        "Shows and times speculative decoding.",
        arguments=_SENTENCES,
    ),
    "generate": Command(
        "commands.generate",
        "GenerateOptions",
        "Decodes sentences (arguments, a file, standard input), or examples of a seqio task.",
        arguments=_SENTENCES,
    ),
    "benchmark": Command(
        "commands.suite", "BenchmarkOptions", "Times plain against speculative decoding."
    ),
    "measure": Command(
        "commands.measure", "MeasureOptions", "Measures acceptance and costs, and predicts times."
    ),
    "figures": Command(
        "commands.figures",
        "FiguresOptions",
        "Draws the paper's tables and figures, and measured records.",
    ),
    "tune": Command(
        "commands.tune",
        "TuneOptions",
        "Chooses the number of drafted tokens, and writes a gin file.",
    ),
    "count": Command("commands.count", "CountOptions", "Counts an n-gram table to draft with."),
    "convert": Command(
        "commands.convert",
        "ConvertOptions",
        "Writes a checkpoint in another format: Hugging Face, T5X, this package's.",
    ),
    "distill": Command(
        "commands.distill",
        "DistillConfig",
        "Trains a drafter on a target's outputs and distributions, or resumes a run.",
    ),
    "train": Command(
        "training.train", "TrainConfig", "Trains a model or resumes a run; settings come from gin."
    ),
    "train_heads": Command(
        "training.heads",
        "HeadsTrainConfig",
        "Trains heads on a target, to draft with; settings come from gin.",
    ),
    "train_eagle": Command(
        "training.eagle",
        "EagleTrainConfig",
        "Trains a drafter that reads the target's states; settings come from gin.",
    ),
}


class UsageError(ValueError):
    """A command line that is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code.

    It is 0; 1 if a check failed or the reader of the output has gone; 2 for bad input or an error
    of the system; 130 if interrupted; 143 if terminated.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _main(argv)
        _flush()
        return code
    except KeyboardInterrupt as error:
        number = next(iter(error.args), signal.SIGINT)  # the signal that it was
        _say("terminated" if number == signal.SIGTERM else "interrupted")
        return 128 + number
    except (ValueError, OSError, EOFError, ImportError, flags.Error, CheckFailed) as error:
        if isinstance(error, BrokenPipeError) and error.filename in (None, "standard output"):
            return 1
        if "--debug" in argv:
            raise
        with contextlib.suppress(OSError):  # the error that is printed next matters more
            _flush()
        _say(f"error: {' '.join(str(error).split())}")
        return 1 if isinstance(error, CheckFailed) else 2


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(f"specdec: {text}", file=sys.stderr)
    _flush(sys.stderr)


def _flush(*streams: TextIO) -> None:
    """Flushes standard error and standard output while a failure can still be reported.

    Raises:
      OSError: standard output is closed, its disk is full, or its reader has gone.
    """
    for stream in streams or (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())  # the interpreter's last flush must not fail too
            if stream is sys.stdout:
                raise


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "--version"):
        text = (
            f"specdec {specdec_jax.__version__}" if argv[:1] == ["--version"] else _make_overview()
        )
        print(text, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise UsageError(f"unknown command: got {name!r}, expected one of {', '.join(COMMANDS)}")
    return _run_command(name, COMMANDS[name], rest)


def _run_command(name: str, command: Command, rest: list[str]) -> int:
    """Runs a command on its arguments, under the package's JAX settings; returns the exit code."""
    # Imported here, since JAX takes a second that the lines above do not need.
    from specdec_jax.backends.jax_settings import use_package_settings
    from specdec_jax.commands import generation_flags
    from specdec_jax.decoding.generation_config import GenerationConfig
    from specdec_jax.decoding.program_cache import keep_programs
    from specdec_jax.decoding.results import NonFiniteLogitsError

    cls, run = command.load()
    gc.freeze()  # see `entry.py`
    gc.enable()
    fields = dataclasses.fields(cls) if command.by_flags else ()
    rest, bindings = _split_gin(rest)
    values = _define_flags(cls, fields)
    arguments = _parse_flags(values, rest, command)
    paths.expand_flags(values, ("gin_file", "gin_search_paths", "compilation_cache_dir"))
    if values.help:
        names = [field.name for field in fields]
        print(help_page.make_page(name, command.summary, command.arguments, cls, names, values))
        return 0
    if arguments and not command.arguments:
        raise UsageError(f"specdec {name}: got {arguments[0]!r}, expected flags only")
    given = _read_given(cls, fields, values)
    gin_files = [
        path
        for name in itertools.product(values.gin_search_paths, values.gin_file)
        if (path := places.join(*name)).is_file()
    ]
    # With nothing else, a file of settings may repeat the run that wrote it: it stays as it is.
    repeats = len(values.gin_file) == 1 and not (given or bindings)
    read = {"gin_file": [] if repeats else gin_files}
    with use_package_settings():
        if name == "generate" and "config" in given:  # the file counts before gin, as flags do
            read["config"] = [places.make_path(os.path.expanduser(given["config"]))]
            file = GenerationConfig.load(os.path.expanduser(given["config"]))
            given = generation_flags.unset_flags(file) | given | {"config": file}
        options = paths.expand_options(_make_options(name, cls, given, values, bindings))
        settings = _describe_options(options, given if values.gin_file or bindings else None)
        paths.check_written(options, read)
        keep_programs(values.compilation_cache_dir)
        try:
            more = [arguments] * bool(command.arguments)
            problem = _run_recorded(run, options, settings, more, gin_files)
        except NonFiniteLogitsError as error:  # commands number sentences from 1, as a file's lines
            raise ValueError(f"sentence {error.input + 1}: {error.reason}") from error
    if isinstance(problem, str):
        raise CheckFailed(problem)
    return 0


def _run_recorded(
    run: Callable,
    options: Any,
    settings: str,
    arguments: list[list[str]],
    gin_files: Sequence[places.AnyPath],
) -> Any:
    """Runs a command, and writes its settings beside its output; returns what it returns."""
    resumes = "on_start" in inspect.signature(run).parameters
    on_start = {}
    if resumes:  # so that what is killed can be resumed by its settings
        on_start["on_start"] = functools.partial(paths.record, options, settings, unfinished=True)
    replaced = list(paths.find_replaced(options))
    if replaced and not getattr(options, "suite", None):  # whose options are checked row by row
        options.check()  # so that an error is the only line
    for file in replaced:
        print(f"{file}: this file is there and will be replaced", file=sys.stderr)
    problem = run(options, *arguments, **on_start)
    if not hasattr(options, "output_dir"):  # a training run's were recorded when it began
        paths.record(options, settings, kept=gin_files)
    return problem


# Flags.


def _define_flags(cls: type, fields: Sequence[dataclasses.Field]) -> flags.FlagValues:
    """Returns the flags of one command.

    They are kept apart from absl's global ones, so that commands do not see each other's.
    """
    values = flags.FlagValues()
    values.set_gnu_getopt(True)  # flags may follow sentences
    kinds = typing.get_type_hints(cls)
    for field in fields:
        _define_flag(values, field, kinds[field.name])
    common: dict[str, Any] = {"flag_values": values}
    text = (
        "gin file with settings; repeatable, later files win; it is code: use none from a source"
        " you do not trust"
    )
    flags.DEFINE_multi_string("gin_file", [], text, **common)
    text = "folders in which gin files are looked up, comma-separated"
    flags.DEFINE_list("gin_search_paths", ["."], text, **common)
    text = (
        "folder in which compiled programs are kept between runs; empty: nowhere (default:"
        " specdec_jax/programs in your cache folder)"
    )
    flags.DEFINE_string("compilation_cache_dir", None, text, **common)
    flags.DEFINE_boolean("debug", False, "show the traceback of an error", **common)
    flags.DEFINE_boolean("help", False, "show this help", short_name="h", **common)
    return values


def _parse_flags(values: flags.FlagValues, arguments: list[str], command: Command) -> list[str]:
    """Reads the flags; returns the other arguments."""
    try:
        return values(["specdec", *arguments])[1:]
    except flags.UnrecognizedFlagError as error:
        if not command.arguments:
            raise
        raise UsageError(f"{error}; write -- before sentences that begin with a dash") from None
    except flags.IllegalFlagValueError as error:
        kinds = {"int": "an integer", "float": "a number", "bool": "true or false"}
        match = re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)
        expected = kinds.get(values[match[1]].flag_type()) if match else None
        if not match or not expected:
            raise
        raise UsageError(f"{match[1]}: got {match[2]!r}, expected {expected}") from None


def _define_flag(values: flags.FlagValues, field: Any, kind: Any) -> None:
    if isinstance(kind, types.UnionType):  # `T | None`, or a number or a word
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        kind = str if str in parts else parts[0]
    define: dict[Any, Callable[..., Any]] = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_boolean,
    }
    default, text = field.default, field.metadata["help"]
    if kind == tuple[str, ...]:
        flags.DEFINE_multi_string(field.name, list(default), text, flag_values=values)
    elif typing.get_origin(kind) is tuple:
        flags.DEFINE_list(field.name, [str(item) for item in default], text, flag_values=values)
    else:
        shown = str(default) if kind is str and default is not None else default
        define[kind](field.name, shown, text, flag_values=values)


def _read_given(
    cls: type, fields: Sequence[dataclasses.Field], values: flags.FlagValues
) -> dict[str, Any]:
    """Returns the options that the command line sets, without defaults."""
    given, kinds = {}, typing.get_type_hints(cls)
    for field in fields:
        flag, kinds_of_field = values[field.name], typing.get_args(kinds[field.name])
        if not flag.present:
            continue
        value: Any = flag.value
        if isinstance(flag.parser, flags.ListParser):
            value = _read_numbers(field.name, value, kinds_of_field[0])
        if {int, str} <= set(kinds_of_field) and re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
        given[field.name] = tuple(value) if isinstance(value, list) else value
    return given


def _read_numbers(name: str, items: list[str], kind: type) -> tuple[int | float, ...]:
    try:
        return tuple(kind(item) for item in items)
    except ValueError:
        expected = f"comma-separated { {int: 'integers', float: 'numbers'}[kind] }"
        raise UsageError(f"{name}: got {','.join(items)!r}, expected {expected}") from None


# gin.


def _split_gin(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Takes `--gin.NAME=value` out of the arguments, as T5X does.

    Returns (the other arguments, `NAME=value` …).
    """
    rest: list[str] = []
    bindings: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return rest + arguments[index:], bindings
        if not argument.startswith("--gin."):
            rest.append(argument)
        elif "=" in argument:
            bindings.append(argument.removeprefix("--gin."))
        else:
            raise UsageError(f"got {argument!r}, expected --gin.NAME=value")
    return rest, bindings


def _make_options(
    name: str, cls: type, given: dict[str, Any], values: flags.FlagValues, bindings: list[str]
) -> Any:
    """Returns a command's options from defaults, gin and the given flags."""
    if not (values.gin_file or bindings):
        try:
            return cls(**given)
        except TypeError:  # fields without a default
            expected = "--gin_file or --gin.NAME=value"
            raise UsageError(f"specdec {name}: got no settings, expected {expected}") from None
    folders = values.gin_search_paths
    for file in values.gin_file:
        if not any(places.join(folder, file).is_file() for folder in folders):
            raise UsageError(f"gin_file: got {file!r}, expected a file in {', '.join(folders)}")
    gin.clear_config()
    gin.config.register_file_reader(places.open_text, places.is_remote_file)
    for folder in folders:
        gin.add_config_file_search_path(folder)
    where = ", ".join(values.gin_file) or "--gin.NAME=value"
    try:
        _register(cls)
        # Unlocked afterwards, too: T5X, say, registers what it has when imported.
        with _silence_lookups(), gin.unlock_config():
            gin.parse_config_files_and_bindings(values.gin_file, bindings)
        options = gin.get_configurable(cls)()
    except RecursionError as error:
        got = "settings nested too deeply or in a circle"
        raise UsageError(f"gin: {where}: got {got}, expected plain ones") from error
    except (ValueError, TypeError, OSError, *_BAD_CODE) as error:
        text = str(error).partition(" in config string")[0][:500]
        named = not values.gin_file or any(file in text for file in values.gin_file)
        raise UsageError(f"gin: {text if named else f'{where}: {text}'}") from error
    if given:  # after gin, so that gin counts a setting that a flag overrides as used
        options = dataclasses.replace(options, **given)
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        value, kind = getattr(options, field.name), kinds[field.name]
        if not _has_kind(value, kind):
            expected = getattr(kind, "__name__", kind)
            raise UsageError(f"gin: {field.name}: got {value!r}, expected {expected}")
    _check_used(name, bindings)
    path = re.search(r"\bGenerateOptions\.config =[\s\\]*(['\"].*)", gin.operative_config_str())
    if path and "config" not in given:  # a file would count after gin
        raise UsageError(f"config: got {path[1]} in gin, expected it as --config")
    return options


@contextlib.contextmanager
def _silence_lookups() -> Iterator[None]:
    """Keeps gin from logging every folder in which a file is not as an error."""

    def keep(record: logging.LogRecord) -> bool:
        return record.module != "resource_reader"

    logging.getLogger().addFilter(keep)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(keep)


def _check_used(name: str, bindings: list[str]) -> None:
    """Raises UsageError for a binding of the command line that gin did not use."""
    used = gin.operative_config_str()
    for binding in bindings:
        key = binding.partition("=")[0].strip()
        scope, slash, binding_name = key.rpartition("/")
        tail = re.escape(".".join(binding_name.split(".")[-2:]))
        if not re.search(rf"^{re.escape(scope + slash)}(\S*[./])?{tail} =", used, re.MULTILINE):
            raise UsageError(f"gin: got --gin.{key}, expected a name that `specdec {name}` uses")


def _describe_options(options: Any, given: dict[str, Any] | None) -> str:
    """Returns the settings as a gin file that gives the same run.

    `given` are flags that override gin's operative configuration; None: everything came from flags.
    """
    from specdec_jax.decoding import config_files
    from specdec_jax.decoding.generation_config import GenerationConfig

    cls = type(options)
    package, _, module = cls.__module__.rpartition(".")
    name = f"{module}.{cls.__name__}"
    text = "" if given is None else gin.operative_config_str()
    loaded = isinstance((given or {}).get("config"), GenerationConfig)
    # The file's options can follow gin's only under dynamic registration, and where gin has none.
    mixes = "import dynamic_registration" in text and config_files.CONFIG not in text
    if given is None or loaded and not mixes:
        given = dict.fromkeys(field.name for field in dataclasses.fields(cls))
        text = f"from __gin__ import dynamic_registration\n\nfrom {package} import {module}\n\n"
    else:
        match = re.search(rf"^(\S*\b{cls.__name__})\.\w+ =", text, re.MULTILINE)
        name = match[1] if match else name  # gin's name of the class
        text += "\n# Flags, which override what is above:\n" if given else ""
    shown = {field: repr(getattr(options, field)) for field in given}
    for field in given:
        if isinstance(config := getattr(options, field), GenerationConfig):
            text += config_files.to_gin(config.changed_fields()) + "\n"
            shown[field] = f"@{config_files.CONFIG}()"
    return text + "".join(f"{name}.{field} = {value}\n" for field, value in shown.items())


def _has_kind(value: Any, kind: Any) -> bool:
    """Returns whether a value from gin, which checks no types, is of a field's type."""
    if isinstance(kind, types.UnionType):
        return any(_has_kind(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(
            _has_kind(item, typing.get_args(kind)[0]) for item in value
        )
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def _register(cls: type) -> None:
    """Makes `--gin.NAME=value` know the options, once, without a gin file that imports them."""
    try:
        gin.get_configurable(cls)
    except (KeyError, ValueError):
        gin.external_configurable(cls, module=cls.__module__)


def _make_overview() -> str:
    lines = [
        "usage: specdec COMMAND [flags]",
        "",
        "Exact speculative decoding of T5-family and GPT-like models.",
        "",
    ]
    lines += [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "`specdec COMMAND --help` lists the flags of a command."]
    return "\n".join([*lines, "`specdec --version` prints the version."])


if __name__ == "__main__":
    sys.exit(main())
