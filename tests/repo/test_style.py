"""Style that ruff has no rule for, or that a run without ruff must notice, in falling bounds."""

import ast
import pathlib
import re
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
MAX_COLUMNS, MAX_PARAMETERS = 100, 8


def read_trees(folder: str) -> list[ast.AST]:
    """Returns all nodes of a folder's Python files."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    if not texts:
        pytest.skip("no checkout here")
    return [node for text in texts for node in ast.walk(ast.parse(text))]


def count_wide_lines(folder: str) -> int:
    """Returns the number of lines over 100 columns, but for those with an address."""
    paths = (ROOT / folder).rglob("*.py")
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return sum(len(line) > MAX_COLUMNS and "://" not in line for line in lines)


def share_of_long_openings(folder: str) -> float:
    """Returns the share of docstrings whose first paragraph has more than one line."""
    nodes = [node for node in read_trees(folder) if isinstance(node, DOCUMENTED)]
    docstrings = [docstring for node in nodes if (docstring := ast.get_docstring(node))]
    return sum("\n" in docstring.split("\n\n")[0] for docstring in docstrings) / len(docstrings)


def list_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """Returns the parameters of a function, but for `self`, `cls` and variadic ones."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [parameter for parameter in every if parameter.arg not in ("self", "cls")]


def share_of_bare_parameters(folder: str) -> float:
    """Returns the share of parameters without annotation."""
    functions = [node for node in read_trees(folder) if isinstance(node, FUNCTIONS)]
    parameters = [one for function in functions for one in list_parameters(function)]
    return sum(one.annotation is None for one in parameters) / len(parameters)


def count_functions_of_many_parameters(folder: str) -> int:
    """Returns the number of functions with more than 8 parameters."""
    functions = [node for node in read_trees(folder) if isinstance(node, FUNCTIONS)]
    return sum(len(list_parameters(function)) > MAX_PARAMETERS for function in functions)


def count_lambdas_in_tuples(folder: str) -> int:
    """Returns the number of lambdas that get a name as a member of a tuple."""
    nodes = [node for node in read_trees(folder) if isinstance(node, ast.Assign)]
    tuples = [node.value for node in nodes if isinstance(node.value, ast.Tuple)]
    return sum(any(isinstance(one, ast.Lambda) for one in value.elts) for value in tuples)


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
