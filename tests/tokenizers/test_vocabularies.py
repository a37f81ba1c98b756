"""Vocabularies against Hugging Face's tokenisers (golden ids), sentinels included."""

import dataclasses
import gzip
import json
import pathlib
import shutil
import time

import make_checkpoints
import pytest
from golden_models import GOLDEN

from specdec_jax.checkpoints import converter, loader
from specdec_jax.decoding import inputs
from specdec_jax.tokenizers import checks, huggingface_folders, vocabularies

FOLDER = GOLDEN / "hf_tokenizer"
IDS = json.loads((FOLDER / "ids.json").read_text(encoding="utf-8"))
TEXTS = pathlib.Path(__file__).parents[3] / "shared" / "data"


def both():
    return {
        "spiece.model": vocabularies.SentencePieceVocabulary.load(
            FOLDER / "spiece.model", IDS["extra_ids"]
        ),
        "tokenizer.json": vocabularies.TokenizerJsonVocabulary.load(FOLDER / "tokenizer.json"),
    }


VOCABULARIES = both()


@pytest.mark.parametrize("record", IDS["records"], ids=lambda record: record["text"][:20])
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_ids_equal_hugging_faces(kind, record):
    vocabulary = VOCABULARIES[kind]
    assert vocabulary.encode(record["text"]) + list(vocabulary.eos_ids) == record["ids"]


@pytest.mark.parametrize("record", IDS["records"], ids=lambda record: record["text"][:20])
def test_byte_ids_equal_hugging_faces(record):
    assert (
        vocabularies.ByteVocabulary().encode(record["text"]) + [vocabularies.EOS_ID]
        == record["byt5_ids"]
    )


def test_both_files_make_the_same_vocabulary():
    spiece, tokenizer = VOCABULARIES.values()
    assert spiece.size == tokenizer.size == IDS["size"]
    assert spiece.fingerprint() == tokenizer.fingerprint()
    assert (
        spiece.fingerprint() != vocabularies.SentencePieceVocabulary(spiece.model, 19).fingerprint()
    )


def test_a_fingerprint_is_made_once(monkeypatch):
    """`generate` compares the two of a pair in every call."""
    vocabulary = vocabularies.ByteVocabulary(0)
    first = vocabulary.fingerprint()
    monkeypatch.setattr(
        vocabularies.ByteVocabulary, "piece", lambda self, token: pytest.fail("made again")
    )
    assert vocabulary.fingerprint() == first


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_decoding(kind):
    vocabulary = VOCABULARIES[kind]
    text = "The river froze early that year."
    ids = vocabulary.encode(text)
    assert vocabulary.decode([0, *ids, 1, 0]) == text
    assert vocabulary.decode([*ids, vocabulary.size, 10**6]) == text  # ids of the logits' padding
    assert vocabulary.decode([]) == ""
    assert "".join(map(vocabulary.piece, ids)) == " " + text
    assert vocabulary.piece(vocabulary.size) == f"<{vocabulary.size}>"


@pytest.mark.parametrize(
    "text", ["The <extra_id_0> stayed on <extra_id_1>", "<extra_id_0> The river <extra_id_1> froze"]
)
def test_sentinels_survive_a_round_trip(text):
    vocabulary = VOCABULARIES["spiece.model"]
    ids = vocabulary.encode(text)
    assert vocabulary.size - 1 in ids and vocabulary.size - 2 in ids
    assert vocabulary.decode(ids) == text


@pytest.mark.parametrize("record", IDS["records"], ids=lambda record: record["text"][:20])
def test_tokenizer_json_decodes_as_hugging_face_does(record):
    """It writes no space before a sentinel."""
    assert VOCABULARIES["tokenizer.json"].decode(record["ids"]) == record["decoded"]


def test_seqio_would_give_the_same_ids_where_a_sentinel_starts_a_word():
    """seqio appends user-defined tokens `▁<extra_id_i>`; here the text around is encoded apart."""
    plain = vocabularies.SentencePieceVocabulary(VOCABULARIES["spiece.model"].model)
    size = IDS["size"]
    expected = [*plain.encode("The river"), size - 1, *plain.encode("froze"), size - 2]
    assert (
        VOCABULARIES["spiece.model"].encode("The river <extra_id_0> froze <extra_id_1>") == expected
    )


def test_without_extra_ids_a_sentinel_is_text():
    plain = vocabularies.SentencePieceVocabulary(VOCABULARIES["spiece.model"].model)
    assert max(plain.encode("<extra_id_0>")) < plain.size
    assert len(plain.encode("<extra_id_0>")) > 1


def test_bytes():
    vocabulary = vocabularies.ByteVocabulary()
    assert vocabulary.size == 384
    text = "Grüße <extra_id_3> 漢"
    ids = vocabulary.encode(text)
    assert vocabulary.decode([0, *ids, 1]) == text
    assert vocabulary.decode(ids[:-1]) == "Grüße <extra_id_3> "  # a cut character is dropped
    assert len({vocabulary.piece(i) for i in range(vocabulary.size)}) == vocabulary.size


TRAINING = [record["text"] for record in IDS["records"]] * 3


def tokenizer_json(**changes) -> str:
    """The golden tokenizer.json with other contents of some fields."""
    return json.dumps(json.loads(VOCABULARIES["tokenizer.json"].text) | changes)


def test_sentencepiece_with_other_special_ids():
    """SentencePiece's own numbers, which MADLAD has too: unknown 0, beginning 1, EOS 2."""
    vocabulary = vocabularies.SentencePieceVocabulary(
        make_checkpoints.sentencepiece_model(TRAINING, 90, hard_vocab_limit=False, pad_id=3), 2
    )
    assert vocabulary.eos_ids == (2,)
    ids = vocabulary.encode("The river")
    assert vocabulary.decode([3, *ids, 2, 3]) == "The river"
    assert vocabulary.decode([*ids, 0]) != "The river"  # a piece like others, not padding
    assert VOCABULARIES["spiece.model"].eos_ids == (1,)
    assert (
        VOCABULARIES["spiece.model"].decode(
            [0, *VOCABULARIES["spiece.model"].encode("The river"), 1]
        )
        == "The river"
    )


def token(i: int) -> str:
    return VOCABULARIES["tokenizer.json"].piece(i).replace(" ", "▁")


NO_PROCESSOR = dict(post_processor=None)
ENDS = {
    # (changes to tokenizer.json, what other files say of EOS, ids at which the model stops) ->
    # eos_ids
    "as T5's": ({}, {}, None, (1,)),
    "further stop ids": ({}, {}, (95, 1), (1, 95)),
    "a stop id only": ({}, {}, (95,), (1, 95)),
    "no processor": (NO_PROCESSOR, {}, (95, 1), (1, 95)),
    "named": (NO_PROCESSOR, {"tokenizer_config.json": token(2)}, (95,), (2, 95)),
    "named as an object": (
        NO_PROCESSOR,
        {"special_tokens_map.json": {"content": token(2)}},
        None,
        (2,),
    ),
    "named, and so added": (NO_PROCESSOR, {"tokenizer_config.json": "<end>"}, (95,), (220, 95)),
    "the processor knows best": ({}, {"tokenizer_config.json": token(2)}, (95,), (1, 95)),
    "none but the model's": (dict(**NO_PROCESSOR, renamed=True), {}, (95, 1), (95, 1)),
}


@pytest.mark.parametrize("case", ENDS)
def test_inputs_end_with_the_tokenizers_own_eos(case, tmp_path):
    changes, files, stop_ids, expected = ENDS[case]
    text = tokenizer_json(**{name: value for name, value in changes.items() if name != "renamed"})
    (tmp_path / "tokenizer.json").write_text(
        text.replace("</s>", "<other>") if "renamed" in changes else text
    )
    for name, eos_token in files.items():
        (tmp_path / name).write_text(json.dumps({"eos_token": eos_token}))
    vocabulary = huggingface_folders.open_folder(tmp_path, stop_ids or ())
    assert vocabulary.eos_ids == expected


def test_the_ids_of_the_configuration_stop_and_the_tokenizers_ends_inputs(tmp_path):
    """`eos_token_id: [95, 1]` in generation_config.json; saved and loaded again the same."""
    config = dataclasses.replace(make_checkpoints.TINY, vocab_size=328)
    tensors = make_checkpoints.to_tensors(make_checkpoints.random_params(config))
    make_checkpoints.write_hf(tmp_path / "hf", tensors, vocab_size=328)
    (tmp_path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [95, 1]}))
    shutil.copy(FOLDER / "tokenizer.json", tmp_path / "hf")
    model = loader.load(tmp_path / "hf", "float32")
    converter.save(model, tmp_path / "own")
    for model in (model, loader.load(tmp_path / "own", "float32")):
        assert (model.eos_ids, model.vocabulary.eos_ids) == ((95, 1), (1, 95))
        (ids,) = inputs.encode(model, ["The river"], 64)
        assert ids == model.vocabulary.encode("The river") + [1]


def test_a_tokenizers_truncation_and_padding_are_ignored():
    content = json.loads(VOCABULARIES["tokenizer.json"].text)
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 30},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    text = "The river froze early that year."
    assert vocabularies.TokenizerJsonVocabulary(json.dumps(content)).encode(text) == VOCABULARIES[
        "tokenizer.json"
    ].encode(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: vocabularies.SentencePieceVocabulary(b"no model"),
        lambda: vocabularies.SentencePieceVocabulary(b""),
        lambda: vocabularies.TokenizerJsonVocabulary("{}"),
        lambda: vocabularies.TokenizerJsonVocabulary(
            tokenizer_json(post_processor=None).replace("</s>", "<end>")
        ),
        lambda: vocabularies.SentencePieceVocabulary(
            make_checkpoints.sentencepiece_model(TRAINING, 90, hard_vocab_limit=False, eos_id=-1)
        ),
    ],
)
def test_what_is_no_vocabulary_is_rejected(make):
    with pytest.raises(ValueError, match=r"^got .*, expected "):
        make()


FOLDERS = {
    # files beside spiece.model -> sentinels
    "default": ({}, 100),
    "extra_ids": ({"tokenizer_config.json": {"extra_ids": 7}}, 7),
    "none": ({"tokenizer_config.json": {"extra_ids": 0, "additional_special_tokens": None}}, 0),
    "listed": (
        {"tokenizer_config.json": {"additional_special_tokens": ["<extra_id_0>", "<extra_id_1>"]}},
        2,
    ),
    "map": (
        {
            "special_tokens_map.json": {
                "additional_special_tokens": ["<extra_id_0>"],
                "eos_token": "</s>",
            }
        },
        1,
    ),
    "decoder": (
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "200": {"content": "<extra_id_1>"},
                    "201": {"content": "<extra_id_0>"},
                }
            }
        },
        2,
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_sentinels_of_a_hugging_face_folder(case, tmp_path):
    files, extra_ids = FOLDERS[case]
    (tmp_path / "spiece.model").write_bytes(VOCABULARIES["spiece.model"].model)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    vocabulary = huggingface_folders.open_folder(tmp_path, ())
    assert (type(vocabulary), vocabulary.extra_ids) == (
        vocabularies.SentencePieceVocabulary,
        extra_ids,
    )


def test_which_tokenizer_a_folder_has(tmp_path):
    assert huggingface_folders.open_folder(tmp_path, ()) is None
    listed = {"additional_special_tokens": [f"<extra_id_{i}>" for i in range(7)]}
    for options, sentinels in (
        ({}, 125),
        ({"extra_ids": 5}, 5),
        ({"extra_ids": 0}, 0),
        ({"extra_ids": 0} | listed, 7),
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "ByT5Tokenizer"} | options)
        )
        vocabulary = huggingface_folders.open_folder(tmp_path, ())
        assert type(vocabulary) is vocabularies.ByteVocabulary
        assert (vocabulary.extra_ids, vocabulary.size) == (sentinels, 259 + sentinels)
    assert (
        type(huggingface_folders.open_folder(FOLDER, (1,))) is vocabularies.TokenizerJsonVocabulary
    )


@pytest.mark.parametrize("added", [{"<sep>": 200}, {"<extra_id_0>": 150}])
def test_added_tokens_that_spiece_model_does_not_give_are_rejected(added, tmp_path):
    (tmp_path / "spiece.model").write_bytes(VOCABULARIES["spiece.model"].model)
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    with pytest.raises(ValueError, match="got added token .* expected only sentinels"):
        huggingface_folders.open_folder(tmp_path, ())


@pytest.mark.skipif(not TEXTS.is_dir(), reason=f"real text not beside the checkout ({TEXTS.name}/)")
@pytest.mark.parametrize("name", ["ende/test.tsv.gz", "wiki_pe/test.tsv.gz"])
def test_the_two_files_agree_on_real_text(name):
    """Two independent tokenizers agree on thousands of real sentences.

    transformers made tokenizer.json of spiece.model.
    """
    with gzip.open(TEXTS / name, "rt", encoding="utf-8") as file:
        texts = [text for line in file for text in line.rstrip("\n").split("\t")]
    spiece, tokenizer = VOCABULARIES.values()
    different = [text for text in texts if spiece.encode(text) != tokenizer.encode(text)]
    assert len(texts) > 1000 and different == []


def test_a_text_that_is_too_long_is_rejected_by_its_length():
    texts = ["short", None, "a" * 1_000_001]
    vocabularies.check_texts("input", texts[:2])
    with pytest.raises(
        ValueError, match="input 3: got a text of 1,000,001 characters, expected at most 1,000,000"
    ):
        vocabularies.check_texts("input", texts)


def regex_tokenizer(pattern: str) -> str:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return tokenizer_json(normalizer=None, pre_tokenizer=split)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            " {2,}",
            r"\s+",
            r" ?\p{L}+|\d{1,3}|[^\s\p{L}]+",
            r"(\s+)",
            r"(?:\r\n|\r|\n)",
            "[[:punct:]]",
            r"\b",
            "[^a]+",
        ),
        *sorted(checks.PUBLISHED),
    ],
)
def test_expressions_of_published_tokenizers_take_time_in_proportion_to_the_text(pattern):
    vocabulary = vocabularies.TokenizerJsonVocabulary(regex_tokenizer(pattern))
    for character in (" ", "a", "1", "'", "a ", "\n", "é"):
        start = time.process_time()
        vocabulary._tokenizer.pre_tokenizer.pre_tokenize_str(character * 100_000)
        assert time.process_time() - start < 5, repr(character)  # quadratic time would be a minute


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+", "a*a*", r"\s+$", "(?:a|a)*", "a?a?", r"\s*x", "a{3}{3}", "(?=a)", "[a&&b]+", "a+?b"],
)
def test_expressions_that_could_take_longer_are_rejected(pattern):
    with pytest.raises(
        ValueError,
        match="got the regular expression .*, which might take for ever; expected one of",
    ):
        vocabularies.TokenizerJsonVocabulary(regex_tokenizer(pattern))


@pytest.mark.parametrize(
    "pattern",
    ["[^a]" * 49 + "(", "a{1,2}|" * 28 + "(", "a?" * 99 + "(", "a" * 199 + "(", "(" * 200],
)
def test_the_check_of_an_expression_takes_no_time_itself(pattern):
    start = time.process_time()
    with pytest.raises(ValueError, match="got the regular expression"):
        vocabularies.TokenizerJsonVocabulary(regex_tokenizer(pattern))
    assert time.process_time() - start < 1


def replacing(*pairs) -> dict:
    def step(old, new):
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    return {"type": "Sequence", "normalizers": [step(*pair) for pair in pairs]}


def test_steps_that_make_a_text_longer_allow_shorter_texts():
    """Letters of the same length cost nothing; what could fill the memory is rejected.

    It is rejected before it is encoded.
    """
    same = replacing(*[(letter, "ی") for letter in "يىئےېۍێۑؽؾ"])
    assert vocabularies.TokenizerJsonVocabulary(tokenizer_json(normalizer=same)).encode(
        "Tom " * 10_000
    )
    wider = replacing(*[(mark, chr(ord(mark) + 0xFEE0)) for mark in "!?,.:;()"])  # 1 byte becomes 3
    assert vocabularies.TokenizerJsonVocabulary(tokenizer_json(normalizer=wider)).encode(
        "Tom " * 1000
    )
    decomposed = {
        "type": "Sequence",
        "normalizers": [{"type": "NFKD"}, *replacing((" ", "x" * 900))["normalizers"]],
    }
    vocabulary = vocabularies.TokenizerJsonVocabulary(tokenizer_json(normalizer=decomposed))
    with pytest.raises(
        ValueError,
        match="got a text of 100,000 characters, which this tokenizer may make 16,200 times as",
    ):
        vocabulary.encode("\ufdfa" * 100_000)


@pytest.mark.parametrize("rule", ["identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf"])
def test_every_normalisation_of_sentencepiece_is_let_through(rule):
    model = make_checkpoints.sentencepiece_model(TRAINING, 80, normalization_rule_name=rule)
    assert vocabularies.SentencePieceVocabulary(model).encode("Ｔom")
