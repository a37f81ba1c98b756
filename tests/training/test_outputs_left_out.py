"""A source whose logits are not finite is left out; a damaged target is an error."""

import pathlib
import types

import jax.numpy as jnp
import pytest
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.tokenizers.vocabularies import ByteVocabulary
from specdec_jax.training import sequence_distillation

pytestmark = pytest.mark.usefixtures("quick")
BAD = 3 + ord("#")
SETTINGS = types.SimpleNamespace(
    batch_size=2,
    seed=0,
    temperature=1.0,
    max_new_tokens=3,
    buckets=(16,),
    shard_size=10,
    greedy=True,
    samples=0,
    target_language=None,
)


@pytest.fixture(scope="module")
def target():
    model = tiny_t5(0, 300)
    params = model.params
    params["token_embedder"]["embedding"] = (
        params["token_embedder"]["embedding"].at[BAD].set(jnp.nan)
    )
    head = params["decoder"]["logits_dense"]
    head["kernel"] = head["kernel"].at[:, jnp.array([0, BAD])].set(0.0)  # never the most probable
    return sd.LanguageModel(model.config, params, ByteVocabulary(0), name="damaged", eos_ids=())


def lines(target, texts, printed, start=0, path=pathlib.Path("a.tsv")):
    ids = [target.vocabulary.encode(text) + [1] for text in texts]
    job = sequence_distillation.Job(path, ids, texts, 0, 0)
    return list(sequence_distillation._yield_lines(SETTINGS, target, job, start, printed.append))


@pytest.mark.slow
def test_one_source_is_left_out_and_reported(target):
    printed = []
    first, second, third = lines(target, ["one", "t#o", "three"], printed)
    assert first.startswith("one\t") and second == "" and third.startswith("three\t")
    (line,) = printed
    assert line.startswith(
        "1 of 3 outputs are left out: got logits from the target damaged that are not finite"
    )


def test_a_target_without_any_output_is_an_error(target):
    with pytest.raises(
        sd.NonFiniteLogitsError, match="^input 0: got logits from the target damaged"
    ):
        lines(target, ["#", "t#o"], [])


@pytest.mark.parametrize("before", ["a\tb\t5\n", ""])
def test_a_source_alone_in_the_last_shard_is_left_out(target, tmp_path, before):
    path, printed = tmp_path / "outputs.tsv", []
    texts = ["one"] * SETTINGS.shard_size + ["t#o"]
    (tmp_path / "outputs.000000000.tsv").write_text(before)
    how = dict(printed=printed, start=SETTINGS.shard_size, path=path)
    if before:
        assert lines(target, texts, **how) == [""] and "1 of 1 outputs are left" in printed[0]
    else:
        with pytest.raises(sd.NonFiniteLogitsError):
            lines(target, texts, **how)
