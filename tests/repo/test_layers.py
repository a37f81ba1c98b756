"""Imports run downward, heavy packages stay inside functions, nothing else is at the top."""

import ast
import pathlib
import re
import subprocess

import pytest
from package_modules import MODULES, PACKAGE, for_each

ROOT = pathlib.Path(__file__).parents[2]

# Packages of one layer know nothing of each other.
LAYERS = [
    {"files"},
    {"backends", "tokenizers"},
    {"models"},
    {"speculative", "checkpoints"},
    {"drafters", "decoding"},
    {"training", "analysis"},
    {"interop"},
    {"commands"},
]
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}


# specdec_jax itself has the public names; in the package only the command line reads its version.
FACADE = ""
HEAVY = {"torch", "transformers", "seqio", "tensorflow", "matplotlib", "t5x"}
MAY_IMPORT = {  # a subclass has to, and what works on TensorFlow's data
    "interop.t5x": {"t5x", "gin"},  # gin says what T5X's functions are called with
    "decoding.config_files": {"gin"},
    "interop.t5x_run": {"gin"},  # checks what T5X's files have set
    **dict.fromkeys(("interop.seqio_jobs", "interop.tasks"), {"seqio", "tensorflow"}),
}


def imports(tree: ast.AST) -> set[str]:
    """Full names of what is imported anywhere in `tree`; `from a import b` counts as `a.b`."""
    results = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            results |= {f"{node.module}.{alias.name}" for alias in node.names}
    return results


def own_imports(module: str) -> set[str]:
    """Modules of the package that `module` imports."""
    results = set()
    for name in imports(MODULES[module]):
        if name.split(".")[0] == "specdec_jax":
            below = name.split(".")[1:]
            while ".".join(below) not in MODULES:  # the last parts are names inside a module
                below = below[:-1]
            results.add(".".join(below))
    return results


def test_every_package_is_installed():
    """The build finds the folders with an `__init__.py`, so every folder with modules needs one."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not {folder for folder in folders if not (folder / "__init__.py").is_file()}


def package_of(module: str) -> str:
    return module.split(".")[0]


def test_every_module_is_in_a_package():
    assert {package_of(module) for module in MODULES} - {FACADE, "__main__"} == set(LAYER_OF)
    assert {module for module in MODULES if "." not in module} - set(LAYER_OF) == {
        FACADE,
        "__main__",
    }


@for_each(sorted(LAYER_OF))
def test_every_package_has_a_short_docstring(package):
    """One or two lines that say what is inside."""
    sign = ast.get_docstring(MODULES[package])
    assert sign and len(sign) < 200


@for_each(sorted(set(MODULES) - {FACADE, "__main__"}))
def test_imports_run_downward(module):
    here = package_of(module)
    others = {name for name in own_imports(module) - {FACADE} if package_of(name) != here}
    assert not {name for name in others if LAYER_OF[package_of(name)] >= LAYER_OF[here]}
    assert module == "commands.main" or FACADE not in own_imports(module)


@for_each(sorted(MODULES))
def test_no_function_is_long(module):
    """Counted in statements, which do not depend on how the code is formatted."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(MODULES[module]) if isinstance(node, functions)]
    assert not {
        node.name
        for node in found
        if sum(isinstance(part, ast.stmt) for part in ast.walk(node)) > 60
    }


@for_each(sorted(PACKAGE.rglob("*.py")))
def test_what_is_declared_is_not_asked_for_by_name(path):
    """Only the table of drafters or verifiers knows their classes; others know the protocols."""
    text = path.read_text(encoding="utf-8")
    package = package_of(str(path.relative_to(PACKAGE)).replace("/", "."))
    if package != "drafters":
        known = re.findall(r"isinstance\([^()]*?(\w+(?:Drafter|Cascade))\b", text)
        assert set(known) <= {"BeamDrafter", "TreeDrafter"}
    if path.name != "verifiers.py":
        assert not re.findall(r"verifier\b\S* (?:==|!=|in [(]|not in [(]) *\"", text)


def test_no_circle():
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]):
        assert module not in above, " -> ".join([*above, module])
        if module not in done:
            for name in own_imports(module) - {FACADE}:
                visit(name, (*above, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@for_each(sorted(MODULES))
def test_frameworks_stay_where_they_belong(module):
    names = imports(MODULES[module])
    if package_of(module) != "models":
        assert not {name for name in names if name.startswith("flax.linen")}
    if package_of(module) != "commands":
        assert not {name.split(".")[0] for name in names} & {"gin", "absl"} - MAY_IMPORT.get(
            module, set()
        )


@for_each(sorted(MODULES))
def test_heavy_packages_only_inside_functions(module):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        id(node)
        for outer in ast.walk(MODULES[module])
        if isinstance(outer, functions)
        for node in ast.walk(outer)
    }
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside:
            assert not {name.split(".")[0] for name in imports(node)} & (
                HEAVY - MAY_IMPORT.get(module, set())
            )


def test_top_level():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("no git checkout here")
    top = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "specdec_jax",
        "configs",
        "scripts",
        "tests",
    }


@for_each(sorted((ROOT / "tests").rglob("*.py")))
def test_no_test_imports_a_test(path):
    """What several share is in `tests/support/`."""
    parts = {
        part
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        for part in name.split(".")[:1]
    }
    assert not {part for part in parts if part.startswith("test_")}


def test_tests_mirror_the_packages():
    """Each package has a folder; `exactness` is of all packages, and `repo` of the repository."""
    folders = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and any(path.glob("test_*.py"))
    }
    assert folders == set(LAYER_OF) | {"exactness", "repo"}
