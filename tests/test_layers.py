"""The shape of the repository: imports run downward, heavy packages stay inside functions, nothing else at the top."""

import ast
import pathlib
import subprocess
import tomllib

import pytest
import specdec_main

import specdec_jax

PACKAGE = pathlib.Path(specdec_jax.__file__).parent
ROOT = pathlib.Path(__file__).parent.parent

LAYERS = [
    {
        *("draws", "processors", "sampling", "sharding", "cache", "gamma", "auto", "analysis", "paper", "vocabularies"),
        *("stopping", "reading", "tokenizer_checks", "user_cache", "writing"),
    },
    {
        *("models", "models.base", "models.fields", "models.gpt", "models.heads", "models.identity", "models.int8"),
        *(
            "models.layers",
            "models.native",
            "models.packing",
            "models.panels",
            "models.probe",
            "models.shortlist",
            "models.t5",
        ),
    },
    {
        *(
            "formats",
            "formats.allocator",
            "formats.eight_bits",
            "formats.leaves",
            "formats.flax_msgpack",
            "formats.huggingface",
            "formats.huggingface_tokenizers",
            "formats.own",
        ),
        *("formats.safetensors_files", "formats.t5x", "formats.tensorstore_arrays"),
    },
    {"verification", "speculative"},
    {
        *("drafters", "drafters.drawing", "drafters.model", "drafters.ngrams", "drafters.lookup"),
        *("drafters.exit", "drafters.cascade", "drafters.heads"),
    },
    {"compatibility", "costs", "request", "generate", "jobs"},
    {
        *("checkpoints", "corpora", "data", "deepening", "journal", "losses", "optimizer", "progress", "runs", "train"),
        *("train_heads", "weights"),
    },
    {"interop", "interop.decoding", "interop.seqio", "interop.t5x", "interop.tasks", "interop.vocabularies"},
    {
        *(
            "measure",
            "records",
            "inference",
            "options",
            "sentences",
            "against",
            "benchmark",
            "suite",
            "demo",
            "counting",
            "converting",
            "distill",
        ),
        *("passes", "acceptance", "measuring", "tuning", "plots", "results", "figures", "traces"),
        *("markup", "record_types", "help_page"),
    },
    {"cli"},
    {"entry"},
    {"__main__"},
]
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
FACADE = ""  # specdec_jax itself: public names, imported by the command line only
HEAVY = {"torch", "transformers", "seqio", "tensorflow", "matplotlib", "t5x"}
MAY_IMPORT = {  # a subclass has to, and what works on TensorFlow's data
    "interop.t5x": {"t5x"},
    **dict.fromkeys(("interop.seqio", "interop.tasks"), {"seqio", "tensorflow"}),
}


def modules() -> dict[str, ast.Module]:
    """Name below the package -> syntax tree."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        names[".".join(parts)] = ast.parse(path.read_text(encoding="utf-8"))
    # Installed outside the package.
    names["entry"] = ast.parse(pathlib.Path(specdec_main.__file__).read_text(encoding="utf-8"))
    return names


MODULES = modules()


def imports(tree: ast.AST) -> set[str]:
    """Full names of what is imported anywhere in `tree`; `from a import b` counts as `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(module: str) -> set[str]:
    """Modules of the package that `module` imports."""
    found = set()
    for name in imports(MODULES[module]):
        if name.split(".")[0] == "specdec_jax":
            below = name.split(".")[1:]
            while ".".join(below) not in MODULES:  # the last parts are names inside a module
                below = below[:-1]
            found.add(".".join(below))
    return found


def test_every_package_is_installed():
    """They are named one by one, since the one that the command begins with is installed outside the others."""
    described = ROOT / "pyproject.toml"
    if not described.is_file():
        pytest.skip("no checkout here")
    settings = tomllib.loads(described.read_text(encoding="utf-8"))["tool"]["setuptools"]
    outside = {folder: name for name, folder in settings["package-dir"].items()}
    found = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "specdec_jax").rglob("__init__.py")}
    assert {outside.get(name, name.replace("/", ".")) for name in found} == set(settings["packages"])


def test_every_module_has_a_layer():
    assert set(MODULES) - {FACADE} == set(LAYER_OF)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {FACADE}))
def test_imports_run_downward(module):
    upward = {name for name in own_imports(module) - {FACADE} if LAYER_OF[name] > LAYER_OF[module]}
    assert not upward
    assert module == "cli" or FACADE not in own_imports(module)


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


@pytest.mark.parametrize("module", sorted(MODULES))
def test_frameworks_stay_where_they_belong(module):
    names = imports(MODULES[module])
    if module.split(".")[0] != "models":
        assert not {name for name in names if name.startswith("flax.linen")}
    if module != "cli":
        assert not {name for name in names if name.split(".")[0] in ("gin", "absl")}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_heavy_packages_only_inside_functions(module):
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = {
        id(node) for outer in ast.walk(MODULES[module]) if isinstance(outer, functions) for node in ast.walk(outer)
    }
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in inside:
            assert not {name.split(".")[0] for name in imports(node)} & (HEAVY - MAY_IMPORT.get(module, set()))


def test_top_level():
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("no git checkout here")
    top = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == {
        "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "specdec_jax", "configs", "scripts", "tests",
    }  # fmt: skip
