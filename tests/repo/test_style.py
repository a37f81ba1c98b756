"""Style that ruff has no rule for, or that a run without ruff must notice, in falling bounds."""

import ast
import functools
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
MAX_COLUMNS, MAX_PARAMETERS = 100, 8


class Facts(NamedTuple):
    """What is counted of a folder's Python files, which are parsed once."""

    wide_lines: int
    docstrings: list[str]
    parameters: list[list[ast.arg]]
    lambdas_in_tuples: int


@functools.cache
def read_facts(folder: str) -> Facts:
    """Returns what is counted of a folder; wide lines are those without an address."""
    wide, docstrings, parameters, lambdas = 0, [], [], 0
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    if not texts:
        pytest.skip("no checkout here")
    for text in texts:
        wide += sum(len(line) > MAX_COLUMNS and "://" not in line for line in text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
                docstrings.append(docstring)
            if isinstance(node, FUNCTIONS):
                parameters.append(list_parameters(node))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
                lambdas += any(isinstance(one, ast.Lambda) for one in node.value.elts)
    return Facts(wide, docstrings, parameters, lambdas)


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Returns the parameters of a function, but for `self`, `cls` and variadic ones."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [parameter for parameter in every if parameter.arg not in ("self", "cls")]


def count_wide_lines(folder: str) -> int:
    """Returns the number of lines over 100 columns, but for those with an address."""
    return read_facts(folder).wide_lines


def share_of_long_openings(folder: str) -> float:
    """Returns the share of docstrings whose first paragraph has more than one line."""
    docstrings = read_facts(folder).docstrings
    return sum("\n" in docstring.split("\n\n")[0] for docstring in docstrings) / len(docstrings)


def share_of_bare_parameters(folder: str) -> float:
    """Returns the share of parameters without annotation."""
    parameters = [one for function in read_facts(folder).parameters for one in function]
    return sum(one.annotation is None for one in parameters) / len(parameters)


def count_functions_of_many_parameters(folder: str) -> int:
    """Returns the number of functions with more than 8 parameters."""
    return sum(len(parameters) > MAX_PARAMETERS for parameters in read_facts(folder).parameters)


def count_lambdas_in_tuples(folder: str) -> int:
    """Returns the number of lambdas that get a name as a member of a tuple."""
    return read_facts(folder).lambdas_in_tuples


# The greatest value in each folder. They may only fall.
BOUNDS: dict[Callable[[str], float], dict[str, float]] = {
    count_wide_lines: {"scripts": 0, "specdec_jax": 0, "tests": 0},
    share_of_long_openings: {"scripts": 0, "specdec_jax": 0, "tests": 0},
    share_of_bare_parameters: {"scripts": 0, "specdec_jax": 0.006},
    count_functions_of_many_parameters: {"scripts": 0, "specdec_jax": 2, "tests": 4},
    count_lambdas_in_tuples: {"scripts": 0, "specdec_jax": 0, "tests": 2},
}


@pytest.mark.parametrize("measure", BOUNDS, ids=lambda measure: measure.__name__)
def test_style_keeps_its_bounds(measure):
    values = {folder: measure(folder) for folder in BOUNDS[measure]}
    assert not {
        folder: value for folder, value in values.items() if value > BOUNDS[measure][folder]
    }


def test_no_line_is_left_to_its_own_format():
    """The formatter formats every line."""
    off = re.compile(r"#\s*fmt:\s*(skip|off)")
    paths = [path for folder in BOUNDS[count_wide_lines] for path in (ROOT / folder).rglob("*.py")]
    assert not [path.name for path in paths if off.search(path.read_text(encoding="utf-8"))]
