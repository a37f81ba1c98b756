"""The package's modules as syntax trees."""

import ast
import pathlib

import specdec_main

import specdec_jax

PACKAGE = pathlib.Path(specdec_jax.__file__).parent


# The beginning of the command: installed outside the package, imports it when needed.
ENTRY = "commands.entry"


def modules() -> dict[str, ast.Module]:
    """Returns syntax trees by module name below the package."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    names[ENTRY] = ast.parse(pathlib.Path(specdec_main.__file__).read_text(encoding="utf-8"))
    return names


MODULES = modules()
