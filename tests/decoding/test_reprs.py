"""Results, models and drafters print as a few short lines without arrays and addresses."""

import jax
import pytest
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.tokenizers.vocabularies import ByteVocabulary

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def model():
    made = tiny_t5(0, 300)
    return sd.LanguageModel(made.config, made.params, ByteVocabulary(0), name="toy")


def is_short(text: str) -> bool:
    return (
        "array" not in text.lower()
        and " at 0x" not in text
        and max(map(len, text.splitlines())) < 350
    )


def test_a_result_is_a_line_for_each_of_its_first_rows(model):
    result = sd.generate(model, ["abc", ""] * 6, max_new_tokens=5, eos_ids=())
    head, *rows, more = str(result).splitlines()
    per_call = f"{result.stats.tokens_per_target_call:.2f} per target call"
    assert head == f"GenerationResult(12 rows, 30 tokens, {per_call})"
    assert rows[:2] == [f"  0: {result.texts[0]!r} (length, 5 tokens)", "  1: '' (empty, 0 tokens)"]
    assert (len(rows), more) == (10, "  … 2 more") and is_short(str(result))
    assert is_short(str(result.stats)) and "per_row=<12 rows>" in str(result.stats)
    assert (
        str(result._replace(finish_reasons=[])).splitlines()[1]
        == f"  0: {result.texts[0]!r} (5 tokens)"
    )
    tokens = sd.generate(model, ["abc"], max_new_tokens=40, eos_ids=())._replace(texts=None)
    assert is_short(str(tokens)) and str(tokens.tokens[0, 0]) in str(tokens)


def test_what_a_search_or_a_stream_gives(model):
    found = sd.generate(model, ["abc"], max_new_tokens=3, num_beams=2, num_return_sequences=2)
    assert f"score {found.scores[0]:.4g})" in str(found) and is_short(str(found))
    ((_, (output,)),) = sd.decode_stream(model, ["abc"], max_new_tokens=5, eos_ids=())
    assert str(output) == f"Output({output.text!r} (length, 5 tokens))"


def test_repr_of_a_model(model):
    assert (
        str(model)
        == "LanguageModel('toy': T5Config of 19,616 parameters, float32, vocabulary: 259 ids)"
    )
    assert str(model.vocabulary) == "ByteVocabulary(259 ids)"
    assert is_short(str(model.network))


def test_repr_of_a_drafter(model):
    table = sd.NGramDrafter.count([[3, 4]], 300, 2)
    drafters = [
        sd.ModelDrafter(model),
        sd.PromptLookupDrafter(),
        table,
        sd.EarlyExitDrafter(model, 1),
        sd.RandomDrafter(300),
        sd.AssistedNGramDrafter(),
        sd.GatedDrafter(table),
        sd.SelfDrafter(model),
        sd.HorizontalCascade(table, sd.ModelDrafter(model), 1),
    ]
    for drafter in drafters:
        assert str(drafter).startswith(type(drafter).__name__) and is_short(str(drafter)), str(
            drafter
        )
    assert str(drafters[0]) == "ModelDrafter(toy)"
    inside = jax.tree.unflatten(
        *reversed(jax.tree.flatten(drafters[0]))
    )  # as inside jit, without the model
    assert str(inside) == "ModelDrafter(under jit)"
