"""`PITFALLS.md` names a test for every known failure, and the tests that it names exist."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).parent
ROWS = re.findall(
    r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", (HERE / "PITFALLS.md").read_text(encoding="utf-8"), re.M
)


def test_every_row_is_covered():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 40))
    for number, _, tests in ROWS:
        assert "::test_" in tests, f"row {number} names no test"


def test_the_named_tests_exist():
    for number, _, tests in ROWS:
        for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests):
            (path,) = HERE.parent.rglob(file)
            tree = ast.parse(path.read_text(encoding="utf-8"))
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, f"row {number}: no {name} in {file}"
