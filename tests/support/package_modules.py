"""The package's modules as syntax trees."""

import ast
import functools
import pathlib
from collections.abc import Callable, Iterable

import specdec_jax

PACKAGE = pathlib.Path(specdec_jax.__file__).parent


def modules() -> dict[str, ast.Module]:
    """Returns syntax trees by module name below the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return names


MODULES = modules()


def for_each(values: Iterable) -> Callable:
    """Makes one test of a function: it fails with the values at which the function does."""

    def decorate(function: Callable) -> Callable:
        def check_all():
            failures = []
            for value in values:
                try:
                    function(value)
                except AssertionError as error:
                    failures.append(f"{value}: {error}")
            assert not failures, "\n".join(failures)

        functools.update_wrapper(check_all, function)
        del check_all.__wrapped__  # or pytest asks for a fixture by its parameter's name
        return check_all

    return decorate
