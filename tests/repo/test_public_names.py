"""Public names are imported when first used, known to type checkers, and pickled."""

import ast
import copy
import inspect
import pathlib
import pickle
import subprocess
import sys

import pytest

import specdec_jax as sd


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_the_package_imports_nothing_heavy():
    """So that it takes milliseconds, and the command can take signals before JAX is imported."""
    for module in ("specdec_jax", "specdec_jax.commands.entry"):
        roots = run(f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})")
        assert not {"jax", "jaxlib", "flax", "numpy", "absl", "gin"} & set(roots.split())
        assert "specdec_jax" in roots.split()


def test_type_checkers_see_the_names_that_are_imported():
    tree = ast.parse(pathlib.Path(sd.__file__).read_text(encoding="utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    seen = {
        alias.name: node.module.removeprefix("specdec_jax.")
        for node in checked.body
        for alias in node.names
    }
    assert seen == sd._MODULES and sorted(seen) == sd.__all__


def test_star_import_gives_every_name():
    names: dict = {}
    exec("from specdec_jax import *", names)
    assert set(sd.__all__) == set(names) - {"__builtins__"}
    assert all(names[name] is getattr(sd, name) for name in sd.__all__)


def test_dir_lists_names_before_they_are_imported():
    listed = run("import specdec_jax as sd; print(*dir(sd), 'generate' in vars(sd))").split()
    assert listed[-1] == "False" and set(sd.__all__) < set(listed)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'specdec_jax' has no attribute 'generat'"):
        sd.generat
    assert not hasattr(sd, "generat")


@pytest.mark.parametrize(
    "name", [name for name in sd.__all__ if inspect.isclass(getattr(sd, name))]
)
def test_classes_are_pickled(name):
    cls = getattr(sd, name)
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_errors_are_pickled():
    """Else a process that raises one breaks the pool that it belongs to."""
    with pytest.raises(ValueError) as caught:
        sd.GPTConfig(24, emb_dim=0, num_heads=2, num_decoder_layers=1, mlp_dim=8)
    errors = caught.value, sd.NonFiniteLogitsError("the target", 3, 4, True)
    for error in (*errors, sd.UnsupportedCombination("gamma: got 3")):
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(again) is type(error) and str(again) == str(error)
            assert vars(again) == vars(error)


@pytest.mark.slow
def test_a_pickled_object_is_read_where_nothing_is_imported():
    text = pickle.dumps(sd.SamplingConfig(temperature=0.5)).hex()
    shown = run(f"import pickle; print(pickle.loads(bytes.fromhex('{text}')).temperature)")
    assert shown == "0.5\n"
