"""Fingerprints tell models, drafters and vocabularies apart; a resumed job rejects others."""

import dataclasses
import json

import command_line
import make_checkpoints as make
import numpy as np
import pytest
import tiers
import tokenizers
from toy_models import HashModel, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis.variants import SentenceBatch, Workload
from specdec_jax.backends.cpu import native, packed_weights
from specdec_jax.checkpoints import native_format
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import generate, main, suite
from specdec_jax.commands import resumable_output as resumable_output_command
from specdec_jax.decoding.checks import check_pair
from specdec_jax.models.gpt import GPTConfig
from specdec_jax.models.parameters import flatten, unflatten
from specdec_jax.tokenizers.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    TokenizerJsonVocabulary,
)

cache = command_line.cache
pytestmark = pytest.mark.usefixtures("quick")
SHAPES = {
    "t5": tiny_t5(1).config,
    "gpt": GPTConfig(24, 16, 2, 2, 32, num_positions=16),
    "no encoder": dataclasses.replace(tiny_t5(1).config, num_encoder_layers=0, encoder_dim=16),
}


def changed(model: sd.LanguageModel, name: str, factor: float = 1.5) -> sd.LanguageModel:
    """`model` with one element of one parameter times `factor`."""
    flat = flatten(model.params)
    array = np.array(flat[name])
    array.flat[array.size - 2] = array.flat[array.size - 2] * np.asarray(factor, array.dtype) or 1
    return sd.LanguageModel(
        model.config, unflatten({**flat, name: array}), model.vocabulary, eos_ids=model.eos_ids
    )


@tiers.parametrize("shape", SHAPES, first=1)
def test_every_weight_counts(shape):
    model = sd.LanguageModel.random(SHAPES[shape], 1)
    names = list(flatten(model.params))
    others = [model, *(changed(model, name) for name in names)]
    assert len(names) > 20 and len({other.fingerprint for other in others}) == len(others)
    assert len({other.contents for other in others}) == len(others)


def test_the_last_bit_counts_for_a_job_but_not_for_a_pair():
    model = tiny_t5(1)
    other = changed(
        model, "encoder/layers_0/mlp/wo/kernel", np.nextafter(np.float32(1), np.float32(2))
    )
    assert other.fingerprint == model.fingerprint and other.contents != model.contents
    other = sd.LanguageModel(dataclasses.replace(model.config, max_distance=64), model.params)
    assert other.fingerprint == model.fingerprint and other.contents != model.contents


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_stored_model_has_one_fingerprint_whatever_the_dtype_format_and_layout(
    dtype, tmp_path, monkeypatch
):
    model = tiny_t5(1, 64, emb_dim=64, head_dim=32, mlp_dim=192)
    sd.save(model, tmp_path / "model", dtype=dtype)
    first = sd.load(tmp_path / "model", "float32")
    assert (first.fingerprint == model.fingerprint) == (dtype != "int8")
    assert sd.load(tmp_path / "model", "bfloat16").fingerprint == first.fingerprint
    sd.convert(tmp_path / "model", tmp_path / "t5x", "t5x", "bfloat16")
    assert sd.load(tmp_path / "t5x", "float32").fingerprint == first.fingerprint
    for usable in (True, False) if native.is_available() else (False,):
        monkeypatch.setattr(packed_weights, "can_pack", lambda dtype, usable=usable: usable)
        other = sd.load(tmp_path / "model", "float32")
        assert other.fingerprint == first.fingerprint
        assert (other.contents == first.contents) == (other.quantized == first.quantized)
        assert other.quantized == (dtype == "int8" and usable)


@pytest.mark.slow
def test_the_bundled_pair_and_stored_heads(tmp_path):
    drafter = sd.load("ende/drafter", "float32")
    for dtype in ("float32", "bfloat16"):
        target = sd.load("ende/target", dtype)
        assert target.fingerprint == drafter.encoder_fingerprint
    model = tiny_t5(1)
    heads = sd.HeadsDrafter.for_target(model, sd.HeadsConfig(1, 16, 24), {"head_0": head()})
    heads.save(tmp_path / "heads")
    assert sd.HeadsDrafter.load(tmp_path / "heads", model).fingerprint == model.fingerprint
    with pytest.raises(ValueError, match="heads: got heads of a target with other weights"):
        sd.HeadsDrafter.load(tmp_path / "heads", tiny_t5(2))


def head(seed: int = 0) -> dict:
    def weight(*shape):
        return {"kernel": np.random.default_rng(seed).normal(size=shape).astype("f")}

    return {"block_0": weight(16, 16), "logits_dense": weight(16, 24)}


def test_heads_of_a_target_with_another_encoder_are_rejected():
    model = tiny_t5(1)
    heads = sd.HeadsDrafter.for_target(model, sd.HeadsConfig(1, 16, 24), {"head_0": head()})
    other = changed(model, "encoder/layers_0/attention/key/kernel")
    with pytest.raises(ValueError, match="heads: got heads of a target with other weights"):
        sd.generate(other, [[3, 1]], drafter=heads, gamma=1)


def drafters() -> list:
    model, other = tiny_t5(1), changed(tiny_t5(1), "encoder/layers_0/mlp/wi_0/kernel")
    small, heads = sd.ModelDrafter(tiny_t5(3)), sd.HeadsConfig(1, 16, 24)
    deeper = tiny_t5(1, decoder_layers=3)

    def table(last, **options):
        return sd.NGramDrafter.count([[3, 4, last]], 24, 2, **options)

    def weight(seed):
        return np.random.default_rng(seed).normal(size=(16, 24)).astype("f")

    return [
        *(sd.ModelDrafter(model), sd.ModelDrafter(other), sd.ModelDrafter(model, int8=True)),
        *(
            sd.ModelDrafter(model, 5),
            sd.ModelDrafter(model, 6),
            sd.ModelDrafter(model, 5, int8=True),
        ),
        *(sd.EarlyExitDrafter(model, 1), sd.EarlyExitDrafter(other, 1)),
        *(sd.EarlyExitDrafter(model, 1, weight(seed)) for seed in (0, 1)),
        *(sd.HeadsDrafter.for_target(model, heads, {"head_0": head(seed)}) for seed in (0, 1)),
        *(
            sd.HeadsDrafter.for_target(other, heads, {"head_0": head()}),
            table(5),
            table(6),
            table(5, sampled=True),
        ),
        *(
            sd.PromptLookupDrafter(2),
            sd.PromptLookupDrafter(3),
            sd.AssistedNGramDrafter(),
            sd.RandomDrafter(24),
        ),
        *(
            sd.AssistedNGramDrafter(memory=8),
            sd.TokenRecycling(24),
            sd.TokenRecycling(24, shared=True),
            sd.LookaheadDecoding(),
            sd.LookaheadDecoding(pool=32),
            sd.GatedDrafter(sd.PromptLookupDrafter(2)),
            sd.GatedDrafter(sd.PromptLookupDrafter(2), 0.5),
            sd.EarlyExitDrafter(deeper, (0, 2)),
            sd.EarlyExitDrafter(deeper, (1, 2)),
            sd.HorizontalCascade(sd.PromptLookupDrafter(), small, 1),
        ),
        *(
            sd.HorizontalCascade(sd.PromptLookupDrafter(), small, 2),
            sd.HorizontalCascade(sd.PromptLookupDrafter(), small, 2, then_gamma=3),
            sd.VerticalCascade(small, table(5), 1),
        ),
        sd.HorizontalCascade(sd.PromptLookupDrafter(), sd.ModelDrafter(tiny_t5(4)), 1),
        sd.VerticalCascade(small, table(6), 1),
    ]


@pytest.mark.slow
def test_fingerprints_of_drafters_differ_by_their_contents(monkeypatch):
    found = [drafter.contents for drafter in drafters()]
    assert len(set(found)) == len(found)
    monkeypatch.setattr(packed_weights, "can_pack", lambda dtype: False)
    assert [drafter.contents for drafter in drafters()] == found


# Vocabularies.


def sentencepiece(**options) -> SentencePieceVocabulary:
    texts = [text.lower() for text in command_line.TEXT]
    return SentencePieceVocabulary(
        make.sentencepiece_model(texts, 32, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **options)
    )


def merging(*merges) -> TokenizerJsonVocabulary:
    names = ["</s>", "a", "b", "c", "ab", "bc"]
    model = tokenizers.models.BPE({name: place for place, name in enumerate(names)}, list(merges))
    return TokenizerJsonVocabulary(tokenizers.Tokenizer(model).to_str())


def test_fingerprints_differ_where_the_same_tokens_get_other_ids():
    folded = sentencepiece(normalization_rule_name="nmt_nfkc_cf")
    pairs = [
        (sentencepiece(), folded, "The Book"),
        (merging(("a", "b"), ("b", "c")), merging(("b", "c"), ("a", "b")), "abc"),
    ]
    for one, other, text in pairs:
        assert one.fingerprint() == other.fingerprint() and one.encode(text) != other.encode(text)
        assert native_format.vocabulary_contents(one) != native_format.vocabulary_contents(other)
    assert native_format.vocabulary_contents(sentencepiece()) == native_format.vocabulary_contents(
        sentencepiece()
    )
    assert native_format.vocabulary_contents(
        ByteVocabulary(0)
    ) != native_format.vocabulary_contents(ByteVocabulary(1))


def test_a_drafter_of_other_pieces_is_rejected():
    """Also if it has as many of them."""

    def vocabulary(*names):
        model = tokenizers.models.BPE({name: place for place, name in enumerate(names)}, [])
        return TokenizerJsonVocabulary(tokenizers.Tokenizer(model).to_str())

    target, same, other = (
        HashModel(3, vocabulary=vocabulary(*names))
        for names in (("</s>", "a", "b"), ("</s>", "a", "b"), ("</s>", "b", "a"))
    )
    assert target.vocabulary.fingerprint() == same.vocabulary.fingerprint()
    check_pair(target, sd.ModelDrafter(same))
    with pytest.raises(ValueError, match="drafter: got a vocabulary of 3 pieces that differs"):
        check_pair(target, sd.ModelDrafter(other))


# Jobs that resume.


@pytest.mark.slow
def test_a_job_that_resumes_with_other_files_under_the_same_paths_is_rejected(
    capsys, tmp_path, monkeypatch
):
    """The target's encoder, the drafter, a table, the vocabulary and the package count.

    One line names what differs.
    """
    monkeypatch.setattr(generate, "decode_stream", lambda *_, **__: iter(()))

    def kill(journal):
        return (_ for _ in ()).throw(KeyboardInterrupt)

    monkeypatch.setattr(resumable_output_command.Journal, "finish", kill)
    vocabulary = sentencepiece()
    config = dataclasses.replace(command_line.CONFIG, vocab_size=40)
    target, drafter = (sd.LanguageModel.random(config, seed, vocabulary) for seed in (0, 1))
    tables = [
        sd.NGramDrafter.count([[3, 4, last]], 40, 2, vocabulary=vocabulary) for last in (5, 6)
    ]
    models = {"target": target, "drafter": drafter}

    def save(**others):
        for name, model in (models | others).items():
            sd.save(model, tmp_path / name)

    def run(drafting):
        flags = [
            "--dtype=float32",
            f"--output_file={tmp_path / 'out'}",
            f"--drafter={tmp_path / drafting}",
        ]
        code = main.main(["generate", f"--target={tmp_path / 'target'}", *flags, "Tom"])
        return code, *capsys.readouterr()

    save()
    tables[0].save(tmp_path / "table.npz")
    pieces = sentencepiece(normalization_rule_name="nmt_nfkc_cf")

    def other(model):
        return sd.LanguageModel(config, model.params, pieces, eos_ids=model.eos_ids)

    weight = "encoder/layers_0/mlp/wo/kernel"
    cases = [
        ("drafter", "target", lambda: save(target=changed(target, weight))),
        ("drafter", "drafter", lambda: save(drafter=changed(drafter, weight))),
        ("drafter", "target", lambda: save(target=other(target), drafter=other(drafter))),
        ("table.npz", "drafter", lambda: tables[1].save(tmp_path / "table.npz")),
        (
            "drafter",
            "versions",
            lambda: monkeypatch.setattr(generate.importlib.metadata, "version", lambda _: "0.0"),
        ),
    ]
    for drafting, difference, change in cases:
        (tmp_path / "out.partial").unlink(missing_ok=True)
        assert run(drafting)[0] == 130 == run(drafting)[0], "the same job resumes"
        change()
        code, out, err = run(drafting)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert (
            f"out.partial: got results with {difference} " in err
            and "remove the file to begin anew" in err
        )
        save()


def test_a_suite_is_of_its_models(monkeypatch):
    drafter, batches = sd.PromptLookupDrafter(), [SentenceBatch([[3, 1]], [[3, 1]], [0], None)]
    monkeypatch.setattr(Workload, "check_prompts", lambda workload: None)
    found = []
    for model in (tiny_t5(1), tiny_t5(1), changed(tiny_t5(1), "encoder/layers_0/mlp/wo/kernel")):
        monkeypatch.setattr(
            benchmark_command,
            "load",
            lambda row, target, model=model: Workload(model, drafter, batches, row),
        )
        found.append(
            json.dumps(suite._open([benchmark_command.BenchmarkOptions(drafter="lookup")])[1])
        )
    assert found[0] == found[1] != found[2]
