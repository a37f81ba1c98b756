"""Checkpoints are read from a store as from a disk, and written to it."""

import dataclasses
import threading
import time

import command_line
import jax
import make_checkpoints as make
import numpy as np
import pytest
import stores
from stores import FailingStore, list_urls, upload

import specdec_jax as sd
from specdec_jax.checkpoints import int8, loader, safetensors_files, stored_tensor, weights
from specdec_jax.files.places import make_path
from specdec_jax.models.parameters import flatten
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

store = stores.store
slow = pytest.mark.slow
QUICK = ("safetensors", "pytorch", "orbax", "legacy")


@pytest.fixture(autouse=True)
def cache(store, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def load(path, **options):
    return sd.load(path, "float32", say=lambda line: None, **options)


def arrays(model):
    return {name: np.asarray(leaf) for name, leaf in flatten(model.network.params).items()}


def parameters(folder):
    opened = loader.open_checkpoint(loader.resolve(folder), None)
    return {name: tensor.load(np.float32) for name, tensor in opened.parameters.items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], name)


@pytest.mark.parametrize(
    "form", [form if form in QUICK else pytest.param(form, marks=slow) for form in make.FORMATS]
)
def test_every_format_is_read_from_a_store(form, tmp_path, cache):
    make.FORMATS[form](tmp_path / "m")
    url = upload(tmp_path / "m", "memory://models/m")
    assert_same(parameters(url), make.PARAMS)
    assert not list((cache / "specdec_jax").glob("remote/*"))  # copies are gone


def test_a_model_with_its_vocabulary_is_loaded(tmp_path):
    tokenizer = SentencePieceVocabulary.train(command_line.TEXT, 36).model
    make.write_t5x_legacy(tmp_path / "m" / "checkpoint_7", make.PARAMS)
    make.write_t5x_legacy(tmp_path / "m" / "checkpoint_11", make.PARAMS)
    (tmp_path / "m" / "sentencepiece.model").write_bytes(tokenizer)
    url = upload(tmp_path / "m", "memory://models/m")
    assert str(loader.t5x.find_step(loader.resolve(url))) == f"{url}/checkpoint_11"
    model = load(f"{url}/")
    assert model.name == f"{url}/"
    assert model.vocabulary.fingerprint() == load(tmp_path / "m").vocabulary.fingerprint()
    other = load(f"{url}/checkpoint_7", vocabulary=f"{url}/sentencepiece.model")
    assert other.vocabulary.fingerprint() == model.vocabulary.fingerprint()
    jax.tree.map(np.testing.assert_array_equal, model.network.params, other.network.params)


def test_vocab_json_with_merges_is_read_from_a_store(tmp_path):
    from specdec_jax.tokenizers import huggingface_folders

    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    url = upload(tmp_path, "memory://models/gpt")
    vocabulary = huggingface_folders.open_folder(make_path(url), ())
    assert vocabulary.encode("abba") == [2, 1, 0]


@slow
@pytest.mark.parametrize("format", ["specdec", "huggingface", "t5x", "t5x_legacy"])
def test_models_are_written_to_a_store(format, tmp_path):
    make.FORMATS["safetensors"](tmp_path / "m")
    url = upload(tmp_path / "m", "memory://models/m")
    written = sd.convert(url, "memory://out/n", format)
    assert str(written.folder).startswith("memory://out/n")
    assert_same(parameters("memory://out/n"), make.PARAMS)
    with pytest.raises(ValueError, match="memory://out/n: got a folder that is not empty"):
        sd.convert(url, "memory://out/n", format)


def test_a_saved_model_replaces_an_earlier_one_in_a_store():
    model = make.model_of()
    for _ in range(2):
        sd.save(model, "memory://out/m", say=lambda line: None)
    assert_same(parameters("memory://out/m"), make.PARAMS)
    make_path("memory://out/x/mine").create(b"")
    with pytest.raises(ValueError, match="memory://out/x: got something that is no model folder"):
        sd.save(model, "memory://out/x")
    assert list_urls("memory://out/x") == ["mine"]


def test_a_table_and_heads_are_read_from_a_store(tmp_path):
    table = sd.NGramDrafter.count([[3, 4, 5], [3, 4]], 8, 2)
    table.save("memory://out/table.npz")
    again = sd.NGramDrafter.load("memory://out/table.npz")
    np.testing.assert_array_equal(again.unigram, table.unigram)
    with pytest.raises(ValueError, match="memory://out/other.npz: got no such file"):
        sd.NGramDrafter.load("memory://out/other.npz")


def test_what_is_missing_is_named_in_one_line():
    with pytest.raises(ValueError, match="memory://no/where: got no such path|path: got no such"):
        load("memory://no/where")
    make_path("memory://models/m/readme").create(b"")
    with pytest.raises(ValueError, match="memory://models/m: got a folder of no known format"):
        load("memory://models/m")
    with pytest.raises(ValueError, match="memory://no/v.model: got no such file"):
        loader._read_vocabulary("memory://no/v.model", make.TINY)


def test_large_tensors_are_read_by_ranges_alone(tmp_path, monkeypatch):
    make.write_hf(tmp_path, make.TENSORS)
    url = upload(tmp_path, "failing://models/m")
    opened = loader.open_checkpoint(loader.resolve(url), None)
    FailingStore.asked = 0
    name = "encoder/layers_1/mlp/wo/kernel"
    tensor = opened.parameters[name]
    np.testing.assert_array_equal(tensor.load(np.float32), make.PARAMS[name])
    assert FailingStore.asked == make.PARAMS[name].nbytes


@pytest.mark.parametrize(
    "form", ["safetensors", "pytorch", *(pytest.param(f, marks=slow) for f in make.FORMATS)]
)
@pytest.mark.parametrize("how", ["truncated", "error"])
def test_a_store_that_fails_midway_ends_in_one_line(form, how, tmp_path):
    make.FORMATS[form](tmp_path / "m")
    url = upload(tmp_path / "m", "failing://models/m")
    FailingStore.how = "truncated" if how == "truncated" else RuntimeError("503\nno")
    failures = 0
    for left in (0, 1, 2, 3, 5, 8, 13):
        FailingStore.left = left
        try:
            parameters(url)
        except ValueError as error:
            text = str(error)
            assert "failing://models/m" in text and len(text.splitlines()) == 1, text
            failures += 1
    assert failures > 0


def test_an_outline_of_a_remote_file_is_checked_like_a_local_one(tmp_path):
    make.write_hf(tmp_path, make.TENSORS)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"x", content[:100], b"", content[:8] + b"[]"):
        file.write_bytes(damaged)
        errors = []
        for path in (file, make_path(upload(tmp_path, "memory://models/m")) / file.name):
            with pytest.raises(ValueError) as error:
                safetensors_files._open_file(path)
            errors.append(str(error.value).replace(str(path), ""))
        assert errors[0] == errors[1]


def tensors_of(load, count=4):
    one = stored_tensor.StoredTensor.from_function((8,), load, "float32")
    return [(f"t{i}", dataclasses.replace(one, reads_ahead=True)) for i in range(count)]


def test_small_tensors_of_a_store_are_read_together():
    together = threading.Barrier(4, timeout=60)

    def load(dtype):
        together.wait()
        return np.ones(8, dtype)

    read = list(weights._read_ahead(tensors_of(load), "bfloat16", None))
    assert [name for name, _ in read] == ["t0", "t1", "t2", "t3"]
    assert all(tensor.load("bfloat16").tolist() == [1.0] * 8 for _, tensor in read)


def test_large_tensors_are_read_one_after_the_other(monkeypatch):
    monkeypatch.setattr(weights, "_LEAST_AHEAD", 0)
    running, most = [], []

    def load(dtype):
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return np.ones(8, dtype)

    for _, tensor in weights._read_ahead(tensors_of(load), "float32", None):
        assert tensor.load("float32").sum() == 8
    assert most == [1] * 4


def test_integers_and_scales_are_read_ahead_too():
    read = []

    def part(shape, dtype):
        def make(kind):
            read.append(np.dtype(kind).name)
            return np.ones(shape, kind)

        return stored_tensor.StoredTensor.from_function(shape, make, dtype)

    values = dataclasses.replace(part((4, 8), "int8"), reads_ahead=True)
    weight = int8.multiply_parts(values, part((1, 8), "float32"))
    ((name, held),) = weights._read_ahead([("decoder/kernel", weight)], "float32", "stored")
    assert name == "decoder/kernel" and read == ["int8", "float32"]
    got = weights._read_int8(name, held, 16)
    assert read == ["int8", "float32"], "nothing is read again"
    assert got.values.dtype == np.int8 and got.scales.tolist() == [1.0] * 8
    ((_, wide),) = weights._read_ahead([("decoder/kernel", weight)], "float32", None)
    assert wide.parts is None and wide.load("float32").tolist() == np.ones((4, 8)).tolist()


def test_an_error_of_a_tensor_that_is_read_ahead_ends_the_reading():
    def load(dtype):
        raise ValueError("gs://x: got half")

    with pytest.raises(ValueError, match="gs://x: got half"):
        list(weights._read_ahead(tensors_of(load), "float32", None))
