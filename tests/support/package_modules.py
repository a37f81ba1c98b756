"""The package's modules as syntax trees."""

import ast
import pathlib

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
