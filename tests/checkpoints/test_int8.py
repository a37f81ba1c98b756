"""Matrices stored in int8."""

import dataclasses
import json

import make_checkpoints as make
import numpy as np
import pytest
from make_checkpoints import TINY, TINY_1_0

import specdec_jax as sd
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.checkpoints import int8, native_format, tensorstore_arrays, weights
from specdec_jax.checkpoints.converter import convert
from specdec_jax.checkpoints.stored_tensor import StoredTensor
from specdec_jax.commands import main
from specdec_jax.models.parameters import flatten

pytestmark = pytest.mark.usefixtures("quick")

SHAPES = {"1.1": TINY, "1.0": TINY_1_0}
WO = "decoder/layers_0/mlp/wo/kernel"


def params_of(path, dtype="float32"):
    return {name: np.asarray(array) for name, array in flatten(sd.load(path, dtype).params).items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_the_nearest_of_its_column_or_row(shape, tmp_path):
    params = make.random_params(SHAPES[shape])
    params[WO][:, 3] = 0
    params["token_embedder/embedding"][2] *= 100  # a row of its own
    sd.save(make.model_of(params, SHAPES[shape]), tmp_path / "model", dtype="int8")
    found = params_of(tmp_path / "model")
    assert found.keys() == params.keys()
    rounded = 0
    for name, array in params.items():
        axis = {"kernel": 0, "embedding": 1}.get(name.rpartition("/")[2])
        if axis is None:
            np.testing.assert_array_equal(found[name], array)
            continue
        unit = np.abs(array).max(axis=axis, keepdims=True) / 127
        assert np.all(np.abs(found[name] - array) <= unit * 0.501), name
        assert np.all(
            np.abs(found[name]).max(axis=axis)
            == pytest.approx(np.abs(array).max(axis=axis), rel=1e-6)
        )
        rounded += np.any(found[name] != array)
    assert rounded > 10 and not np.any(found[WO][:, 3])
    stored = native_format.open_folder(tmp_path / "model").parameters
    assert stored[WO].dtype == "int8" and stored["decoder/decoder_norm/scale"].dtype == "float32"


@pytest.mark.slow
def test_size_formats_and_a_second_time(tmp_path):
    params = make.random_params(TINY)
    sd.save(make.model_of(params, TINY), tmp_path / "bfloat16", dtype="bfloat16")
    written = convert(tmp_path / "bfloat16", tmp_path / "int8", "specdec", "int8")
    assert (written.dtype, written.stored) == ("int8", ("bfloat16",))
    again = convert(tmp_path / "int8", tmp_path / "again", "specdec", "int8")
    assert again.stored == ("float32", "int8")
    first = params_of(tmp_path / "int8")
    convert(tmp_path / "int8", tmp_path / "huggingface", "huggingface")
    for other in ("again", "huggingface"):
        for name, array in params_of(tmp_path / other).items():
            np.testing.assert_allclose(array, first[name], rtol=1e-6)
    large = dataclasses.replace(
        TINY, vocab_size=2048, emb_dim=128
    )  # so that scales, norms and indices count little
    sd.save(make.model_of(make.random_params(large), large), tmp_path / "large", dtype="bfloat16")
    sizes = [
        convert(tmp_path / "large", tmp_path / f"as_{dtype}", "specdec", dtype).size
        for dtype in ("int8", "bfloat16")
    ]
    assert sizes[0] < 0.7 * sizes[1], "zstd makes a little less of either"
    shape = json.loads((tmp_path / "int8" / "config.json").read_text())["model"]
    assert shape["dtype"] == "float32", "what it is computed in"


@pytest.mark.parametrize("name", [WO, "token_embedder/embedding"])
def test_a_part_is_that_part(name, tmp_path):
    sd.save(make.model_of(make.random_params(TINY), TINY), tmp_path / "model", dtype="int8")
    leaf = native_format.open_folder(tmp_path / "model").parameters[name]
    whole, box = leaf.load("float32"), (slice(3, 9), slice(1, 4))
    assert leaf.shape == whole.shape
    np.testing.assert_array_equal(leaf.load_part("float32", box), whole[box])
    np.testing.assert_array_equal(leaf.transposed().load("float32"), whole.T)
    np.testing.assert_array_equal(
        leaf.transposed().load_part("float32", box[::-1]), whole.T[box[::-1]]
    )
    assert (
        leaf.load("bfloat16").dtype.name == leaf.load_part("bfloat16", box).dtype.name == "bfloat16"
    )


def test_an_embedding_that_is_the_head_is_read_once(tmp_path, monkeypatch):
    """Of some files a part takes the reading of the whole, or of a chunk."""
    sd.save(make.model_of(make.random_params(TINY_1_0), TINY_1_0), tmp_path / "a", dtype="int8")
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: True)
    checkpoint, name = native_format.open_folder(tmp_path / "a"), "token_embedder/embedding"
    values, scales = (leaf := checkpoint.parameters[name]).parts
    read = []

    def count(*how):
        read.append(how)
        return values.read(*how)

    counted = dataclasses.replace(values, read=count, read_part=None)
    checkpoint.parameters[name] = int8.multiply_parts(counted, scales)
    params = weights.read_params(checkpoint, "float32", None, None, None, lambda size: None)
    packed = params["token_embedder"]["embedding"]
    np.testing.assert_array_equal(packed.unpack_rows(), leaf.load("float32"))
    assert len(read) == 1


def test_tiny_and_infinite_numbers():
    tiny = np.full((3, 2), 1.9e-43, np.float32)
    found = int8.join_parts(
        {name: StoredTensor.from_array(x) for name, x in int8.quantize(WO, tiny).items()}, "here"
    )[WO]
    assert np.all(found.load("float32") >= 0)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"parameter {WO}: got numbers that are not finite"):
            int8.quantize(WO, np.array([[1, bad]], np.float32))


def test_what_does_not_fit_is_rejected(tmp_path):
    stored = {
        name: StoredTensor.from_array(array)
        for name, array in int8.quantize(WO, np.ones((4, 6), np.float32)).items()
    }
    assert set(stored) == {f"{WO}/values", f"{WO}/scales"}
    for part in ("values", "scales"):
        alone = {f"{WO}/{part}": stored[f"{WO}/{part}"]}
        with pytest.raises(ValueError, match=f"here: parameter {WO}: got 8-bit {part} alone"):
            int8.join_parts(alone, "here")
    for shape in ((1, 5), (4,), (4, 6)):
        wrong = stored | {f"{WO}/scales": StoredTensor.from_array(np.ones(shape, np.float32))}
        with pytest.raises(ValueError, match="got scales of shape .* for values of shape"):
            int8.join_parts(wrong, "here")
    sd.save(make.model_of(make.random_params(TINY), TINY), tmp_path / "model")
    arrays = {
        name: leaf.load("float32")
        for name, leaf in native_format.open_folder(tmp_path / "model").parameters.items()
    }
    arrays[WO] = np.ones_like(arrays[WO], np.int8)  # integers without scales
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    paths = ((tuple(name.split("/")), array) for name, array in arrays.items())
    tensorstore_arrays.write_ocdbt(paths, tmp_path / "bad" / "params")
    with pytest.raises(
        ValueError, match=f"parameter {WO}: got dtype int8, expected one of float32"
    ):
        sd.load(tmp_path / "bad")


@pytest.mark.slow
def test_command(tmp_path, capsys):
    make.FORMATS["own"](tmp_path / "source")
    argv = [
        "convert",
        f"--source={tmp_path / 'source'}",
        f"--output={tmp_path / 'out'}",
        "--format=specdec",
        "--dtype=int8",
    ]
    assert main.main([*argv, "--compilation_cache_dir="]) == 0
    assert "parameters in int8 (from float32, rounded)" in capsys.readouterr().err
    assert np.all(np.isfinite(sd.load(tmp_path / "out").logits([[3, 4, 1]], [[0, 5]])))
