"""256,000 ids cost no memory beyond the logits, and a tokenizer of Gemma's size is read."""

import itertools
import json
import string
import tracemalloc

import numpy as np
import pytest
from gemma_tokenizer import SPECIAL, make_lines

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from specdec_jax.decoding.generate import advance, prepare
from specdec_jax.tokenizers import huggingface_folders

PIECES, ROWS = 256_000, 8
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def make_model(layers: int) -> sd.LanguageModel:
    return sd.LanguageModel.random(sd.T5Config(PIECES, 8, 1, 8, 1, layers, 8))


@pytest.mark.slow
@pytest.mark.skipif(not native.is_available(), reason=native.describe_state())
def test_a_step_by_argmax_makes_no_array_over_the_ids():
    """Not even the logits: the CPU's kernel keeps a row's greatest one."""
    target, drafter = make_model(2), sd.ModelDrafter(make_model(1))
    for options in ({}, dict(drafter=drafter, gamma=4)):
        inputs = np.full((ROWS, 3), 5, np.int32)
        state, request = prepare(target, inputs, max_new_tokens=8, **options)
        step = advance.lower(target.network, request.drafter, state, np.int32(9)).compile()
        memory = step.memory_analysis()
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes < PIECES


@pytest.mark.slow
def test_a_sampled_step_makes_a_few_arrays_of_the_size_of_the_logits():
    """Both models' distributions are kept: 5 positions of the target, 4 of the drafter."""
    target, drafter = make_model(2), sd.ModelDrafter(make_model(1))
    options = dict(drafter=drafter, gamma=4, sampling=sd.SamplingConfig(temperature=1.0))
    inputs = np.full((ROWS, 3), 5, np.int32)
    state, request = prepare(target, inputs, max_new_tokens=8, **options)
    step = advance.lower(target.network, request.drafter, state, np.int32(9)).compile()
    assert step.memory_analysis().temp_size_in_bytes < 3 * (5 + 4) * ROWS * PIECES * 4


def write_large_tokenizer(folder) -> None:
    """Writes a tokenizer of Gemma's kind with 256,000 pieces and 500,000 merges, some 33 MB."""
    letters = [*string.ascii_letters, *string.digits, "▁"]
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    longer = map("".join, itertools.product(pairs, letters))
    count = PIECES - len(SPECIAL) - len(BYTES) - len(letters) - len(pairs)
    triples = list(itertools.islice(longer, count))
    quads = map("".join, itertools.product(pairs, pairs))
    quads = list(itertools.islice(quads, count - len(triples)))
    names = [*SPECIAL, *BYTES, *letters, *pairs, *triples, *quads]
    merges = [[name[:-1], name[-1]] for name in (*pairs, *triples)]
    merges += [[name[:1], name[1:]] for name in triples]
    merges += [[name[:2], name[2:]] for name in quads]
    special = [
        dict(id=i, content=name, single_word=False, lstrip=False, rstrip=False)
        | dict(normalized=False, special=True)
        for i, name in enumerate(SPECIAL)
    ]
    model = dict(type="BPE", unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    content = dict(version="1.0", added_tokens=special, truncation=None, padding=None)
    content["normalizer"] = dict(type="Replace", pattern=dict(String=" "), content="▁")
    content |= dict(pre_tokenizer=None, post_processor=None)
    decoders = [dict(type="Replace", pattern=dict(String="▁"), content=" ")]
    decoders += [dict(type="ByteFallback"), dict(type="Fuse")]
    content["decoder"] = dict(type="Sequence", decoders=decoders)
    content["model"] = model | dict(vocab={name: i for i, name in enumerate(names)}, merges=merges)
    assert len(names) == len(set(names)) == PIECES
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False, indent=3))
    options = {"tokenizer_class": "GemmaTokenizer", "eos_token": "<eos>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


@pytest.mark.slow
def test_a_tokenizer_of_gemmas_size(tmp_path):
    """Its texts take no memory that grows with the pieces."""
    write_large_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").stat().st_size > 30e6
    vocabulary = huggingface_folders.open_folder(tmp_path, (1,), PIECES)
    assert vocabulary.size == PIECES
    lines = [line.replace("▁", " ") for line in make_lines()]
    vocabulary.encode_input(lines[-1])  # what is made once
    tracemalloc.start()
    for line in lines:
        assert vocabulary.decode(vocabulary.encode_input(line)) == line
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < PIECES
