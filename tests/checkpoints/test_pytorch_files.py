"""PyTorch's files are read without PyTorch; hostile ones are in `test_hostile_files.py`."""

import make_checkpoints as make
import numpy as np
import pytest
import pytorch_pickles
from golden_models import GOLDEN
from make_checkpoints import TENSORS

from specdec_jax.checkpoints import converter, loader, pytorch_files
from specdec_jax.models import parameters

EXPECTED = dict(np.load(GOLDEN / "pytorch" / "expected.npz"))


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_tensors_are_those_that_torch_wrote(form, tmp_path):
    """`scripts/write_golden_pytorch.py` describes the file: views, dtypes, shared storages."""
    file = GOLDEN / "pytorch" / f"{form}.bin"
    (tmp_path / pytorch_files.WHOLE).write_bytes(file.read_bytes())
    tensors = pytorch_files.open_folder(tmp_path)
    assert tensors.keys() == EXPECTED.keys()
    assert (tensors.pop("ids").dtype, tensors.pop("mask").dtype) == ("int64", "bool")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.load(np.float32), EXPECTED[name], err_msg=name)
        if tensor.dtype.startswith("float"):
            assert tensor.load(tensor.dtype).dtype == tensor.dtype
        if len(tensor.shape) == 2:
            turned = tensor.transposed().load(np.float32)
            np.testing.assert_array_equal(turned, EXPECTED[name].T)


def test_blocks_of_views_with_gaps_are_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("specdec_jax.checkpoints.stored_tensor._BLOCK_BYTES", 32)
    test_tensors_are_those_that_torch_wrote("zip", tmp_path)


def test_python_2_wrote_pairs_and_byte_strings(tmp_path):
    tensor = pytorch_pickles.tensor(pytorch_pickles.storage("0", 4), (4,), (1,))
    pairs = b"](](U\x01a" + tensor + b"ee"
    ordered = pytorch_pickles.name("collections OrderedDict")
    pickled = b"\x80\x02" + ordered + pairs + b"\x85R."
    numbers = np.arange(4, dtype=np.float32)
    path = tmp_path / pytorch_files.WHOLE
    pytorch_pickles.write_legacy(path, pickled, {"0": numbers.tobytes()})
    np.testing.assert_array_equal(
        pytorch_files.open_folder(tmp_path)["a"].load(np.float32), numbers
    )


def test_a_folder_of_pytorchs_file_alone_is_converted(tmp_path):
    source = make.write_hf_pytorch(tmp_path / "source", TENSORS)
    converter.convert(source, tmp_path / "out")
    expected, actual = (
        parameters.flatten(loader.load(path, "float32").params)
        for path in (source, tmp_path / "out")
    )
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
