"""The parts of a sharded job, one after the other, are what one run gives."""

import json

import command_line
import pytest
import stores

from specdec_jax.files.places import make_path

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
store = stores.store
pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow
TEXTS = ["We asked", "Tom", "", "She was", "We", "the book", "Tom is nice"]
SAMPLED = ["--temperature=1", "--num_samples=2", "--verifier=token"]


@pytest.fixture
def sentences(tmp_path):
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path / "in.txt"


def generate(specdec, *arguments):
    code, out, err = specdec("generate", *command_line.MODELS, "--batch_size=2", *arguments)
    assert (code, err) == (0, ""), err
    return out


@pytest.mark.parametrize("flags", [SAMPLED, pytest.param([], marks=slow)], ids=str)
def test_parts_join_into_what_one_run_gives(specdec, sentences, tmp_path, flags):
    source = f"--input_file={sentences}"
    whole = generate(specdec, source, *flags)
    files = [tmp_path / "out-0", tmp_path / "out-1"]
    for part, file in enumerate(files):
        generate(specdec, source, *flags, f"--shard={part}/2", f"--output_file={file}")
    assert "".join(file.read_text() for file in files) == whole
    assert generate(specdec, source, *flags, "--shard=1/2") == files[1].read_text(), "if printed"


@slow
@pytest.mark.parametrize("flags", [SAMPLED, []], ids=str)
def test_printed_parts_join_too(specdec, sentences, flags):
    source = f"--input_file={sentences}"
    printed = [generate(specdec, source, *flags, f"--shard={part}/3") for part in range(3)]
    assert all(printed) and "".join(printed) == generate(specdec, source, *flags)


@slow
def test_streams_and_json_have_the_numbers_of_the_whole(specdec, sentences):
    flags = f"--input_file={sentences}", "--json", "--stream", "--batch_size=1"
    whole = generate(specdec, *flags)
    parts = [generate(specdec, *flags, f"--shard={part}/2") for part in range(2)]
    assert "".join(parts) == whole
    assert json.loads(parts[1].splitlines()[0])["row"] == 3


@pytest.mark.parametrize("shard", ["", "1", "1/1", "4/3", "-1/3", "a/b", "0/0", "1/2/3", "0 / 2"])
def test_a_wrong_part_is_rejected_before_anything_else(specdec, sentences, shard):
    code, out, err = specdec(
        "generate", "--target=no", f"--input_file={sentences}", f"--shard={shard}"
    )
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert f"shard: got {shard!r}, expected I/N" in err


def test_a_part_of_what_no_file_gives_is_rejected(specdec, sentences):
    code, _, err = specdec("generate", "--target=TARGET", "--shard=0/2", "Tom", "We")
    assert code == 2 and "shard: got '0/2', expected --input_file or --task too" in err
    code, _, err = specdec("generate", "--target=no", f"--input_file={sentences}", "--shard=0/8")
    assert code == 2 and "shard: got '0/8' of 7 sentences, expected at most as many parts" in err


def test_a_part_is_not_resumed_as_another(specdec, sentences, tmp_path):
    from specdec_jax.commands import resumable_output

    output = tmp_path / "out"
    finish = resumable_output.Journal.finish
    try:
        resumable_output.Journal.finish = lambda self: (_ for _ in ()).throw(OSError("full"))
        arguments = [*command_line.MODELS, f"--input_file={sentences}", f"--output_file={output}"]
        code, _, _ = specdec("generate", *arguments, "--shard=0/2")
        assert code == 2
    finally:
        resumable_output.Journal.finish = finish
    code, _, err = specdec("generate", *arguments, "--shard=1/2")
    assert code == 2 and "got results with shard '0/2', expected '1/2'" in err


def test_models_sentences_and_outputs_may_lie_in_a_store(specdec, sentences, pair, tmp_path):
    for name in ("target", "drafter"):
        stores.upload(pair / name, f"memory://models/{name}")
    stores.upload(sentences.parent, "memory://data")
    (tmp_path / "a.gin").write_text(
        "from __gin__ import dynamic_registration\n"
        "from specdec_jax.commands import generate\n"
        "generate.GenerateOptions.max_new_tokens = 6\n"
    )
    stores.upload(tmp_path, "memory://data")
    local = generate(specdec, f"--input_file={sentences}")
    code, out, err = specdec(
        "generate",
        "--target=memory://models/target",
        "--drafter=memory://models/drafter",
        "--dtype=float32",
        "--gamma=2",
        "--batch_size=2",
        "--gin_file=memory://data/a.gin",
        "--input_file=memory://data/in.txt",
        "--output_file=memory://out/de.txt",
    )
    assert (code, out, err) == (0, "", "")
    assert make_path("memory://out/de.txt").read_bytes().decode() == local
    assert stores.list_urls("memory://out") == ["de.txt", "de.txt.gin"]
    code, _, err = specdec("generate", "--target=TARGET", "--gin_file=memory://data/b.gin", "Tom")
    assert code == 2 and "gin_file: got 'memory://data/b.gin', expected a file in" in err
