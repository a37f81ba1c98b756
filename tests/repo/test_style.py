"""The style of the code that ruff has no rule for, in bounds that may only fall.

Ruff checks the width of lines (E501), lambdas that get a name (E731) and the formatting.
"""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# The greatest share of docstrings, by folder, that do not open with a line of their own.
LONG_OPENINGS = {"scripts": SCRIPTS, "specdec_jax": PACKAGE, "tests": 0.0}
MAX_WIDTH = 100
WIDE_CODE = {"scripts": 0, "specdec_jax": WIDE, "tests": 0}


def read_files(folder: str) -> dict[str, str]:
    """Returns the texts of a folder's Python files by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def opens_with_one_line(docstring: str) -> bool:
    return len(docstring.split("\n\n")[0].splitlines()) == 1


def read_docstrings(text: str) -> list[str]:
    """Returns the docstrings of a module, its classes and its functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [docstring for node in nodes if (docstring := ast.get_docstring(node))]
