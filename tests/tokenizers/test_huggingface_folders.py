"""Folders with a tokenizer are read as transformers 5.24 reads them.

Tests cover what stands around a text, special tokens that a text spells, and what `convert` writes
for transformers to read.
"""

import dataclasses
import json
import pathlib
import shutil
import unittest.mock

import make_checkpoints as make
import pytest
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.checkpoints import loader, native_format
from specdec_jax.commands import main
from specdec_jax.decoding import inputs
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.files import reading
from specdec_jax.models.t5 import T5Config
from specdec_jax.tokenizers import (
    folder_options,
    huggingface_folders,
    special_tokens,
    vocabularies,
)
from specdec_jax.training import corpus, sequence_distillation

pytestmark = pytest.mark.usefixtures("quick")
CASES = json.loads((GOLDEN / "hf_tokenizers.json").read_text(encoding="utf-8"))
CODET5 = CASES["codet5"]["records"]
BEGIN, END = 1, 2  # CodeT5's <s> and </s>


def build(name: str, folder: pathlib.Path, **changes) -> pathlib.Path:
    """Writes the folder of a case, with further changes by the names of files without `.json`."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    for file in case["files"]:
        shutil.copy(GOLDEN / case["base"] / file, folder)
    for file, fields in [
        *case["changes"].items(),
        *((f"{file}.json", fields) for file, fields in changes.items()),
    ]:
        path = folder / file
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(content | fields, ensure_ascii=False), encoding="utf-8")
    return folder


def opened(name: str, folder: pathlib.Path, **changes) -> vocabularies.Vocabulary:
    stops = (287,) if CASES[name]["base"] == "hf_gpt2" else ()
    vocabulary = huggingface_folders.open_folder(build(name, folder, **changes), stops)
    assert vocabulary is not None
    return vocabulary


def model_of(
    vocabulary: vocabularies.Vocabulary, logits: int | None = None, **ids
) -> sd.LanguageModel:
    """A tiny T5 with this vocabulary, and as many logits unless another number is given."""
    size = vocabulary.size if logits is None else logits
    config = dataclasses.replace(
        make.TINY, vocab_size=size, num_encoder_layers=1, num_decoder_layers=1
    )
    return sd.LanguageModel(
        config, make.model_of(make.random_params(config), config).params, vocabulary, **ids
    )


def gpt_of(vocabulary: vocabularies.Vocabulary) -> sd.LanguageModel:
    config = sd.GPTConfig(vocabulary.size, 8, 2, 1, 16, num_positions=32)
    return sd.LanguageModel.random(config, vocabulary=vocabulary, eos_ids=vocabulary.eos_ids)


def encode_both_ways(target: sd.LanguageModel, text: str) -> list[list[int]]:
    """The ids of an input by both ways in: a list of texts, and the lines of a command."""
    tokens, lengths = inputs.as_ids(target, [text], None, framed=True)
    return [tokens[0, : lengths[0]].tolist(), *inputs.encode(target, [text], 64)]


@pytest.mark.parametrize("name", CASES)
def test_ids_are_those_of_transformers(name, tmp_path):
    vocabulary = opened(name, tmp_path)
    gpt = CASES[name]["changes"]["config.json"]["model_type"] == "gpt2"
    for record in CASES[name]["records"]:
        ids = (
            vocabulary.encode_prompt(record["text"])
            if gpt
            else vocabulary.encode_input(record["text"])
        )
        assert ids == record["ids"], record["text"]


@pytest.mark.parametrize("name", ["codet5", "codet5 fast"])
def test_a_text_is_without_the_tokens_around_it(name, tmp_path):
    """CodeT5's outputs begin with <s>, as its inputs do; a text that is streamed too."""
    vocabulary = opened(name, tmp_path)
    for record in CASES[name]["records"][:3]:
        parts = [vocabulary.decode(record["ids"][:count]) for count in range(len(record["ids"]))]
        assert parts[:2] == ["", ""][: len(parts)] and parts[-1] == record["decoded"]
    assert opened("two before", tmp_path / "two").decode([1, 4, 1, 56]) == "<s>T"


@pytest.mark.parametrize(
    "name",
    [
        "codet5",
        "codet5 fast",
        "two before",
        "t5's class decides",
        "no processor",
        "json lacks a token of added_tokens_decoder",
    ],
)
@pytest.mark.parametrize("form", ["specdec", "huggingface", "t5x"])
def test_what_stands_around_a_text_survives_every_format(form, name, tmp_path):
    model = model_of(opened(name, tmp_path / "tokenizer"))
    sd.save(model, tmp_path / "model", format=form)
    vocabulary = loader.load_vocabulary(tmp_path / "model")[0]
    for record in CASES[name]["records"]:
        assert vocabulary.encode_input(record["text"]) == record["ids"]
    assert native_format.vocabulary_contents(vocabulary) == native_format.vocabulary_contents(
        loader.load_vocabulary(tmp_path / "model")[0]
    )


@pytest.mark.parametrize("record", [record for record in CODET5 if record["text"]], ids=str)
def test_every_way_in_puts_both_tokens_around_an_input(record, tmp_path):
    target = model_of(opened("codet5", tmp_path))
    assert encode_both_ways(target, record["text"]) == [record["ids"]] * 2
    prefix, lengths = inputs.decoder_tokens(target, [record["text"]], 1)
    assert prefix[0, : lengths[0]].tolist() == [
        0,
        *record["ids"][1:-1],
    ]  # goes on, and so stands alone


def test_every_way_in_puts_a_token_before_a_prompt(tmp_path):
    target = gpt_of(opened("gpt2 template", tmp_path))
    for record in CASES["gpt2 template"]["records"]:
        assert encode_both_ways(target, record["text"]) == [record["ids"]] * 2


def test_decoding_a_text_is_decoding_its_ids(tmp_path):
    target = model_of(opened("codet5", tmp_path))
    found, expected = (
        sd.generate(target, [[record[form] for record in CODET5[:1]][0]], max_new_tokens=4)
        for form in ("text", "ids")
    )
    assert found.tokens.tolist() == expected.tokens.tolist()
    streamed = list(sd.stream(target, [CODET5[0]["text"]], max_new_tokens=4))
    assert [token for piece in streamed for token in piece.tokens] == found.tokens[
        0, : found.lengths[0]
    ].tolist()


COUNTED = {
    # what the counted outputs begin and end with
    "codet5": ([BEGIN], [END]),
    "t5 fast": ([], [1]),
    "gpt2 template": ([], [287]),  # the start token already stands before them
}


@pytest.mark.parametrize("name", COUNTED)
def test_counted_outputs_begin_and_end_as_the_model_writes_them(name, tmp_path, monkeypatch):
    vocabulary, counted, count = opened(name, tmp_path / "tokenizer"), [], NGramDrafter.count
    model = (
        gpt_of(vocabulary)
        if name.startswith("gpt2")
        else model_of(vocabulary, logits=vocabulary.size - 1)
    )
    sd.save(model, tmp_path / "model")
    (tmp_path / "lines.txt").write_text("The ferry stayed.\nThe river\tThe bread\n")
    monkeypatch.setattr(
        NGramDrafter,
        "count",
        lambda rows, *args, **options: counted.extend(rows) or count(rows, *args, **options),
    )
    flags = dict(
        target=tmp_path / "model", input_file=tmp_path / "lines.txt", output=tmp_path / "table.npz"
    )
    main.main(["count", *(f"--{flag}={value}" for flag, value in flags.items())])
    begin, end = COUNTED[name]
    assert counted == [
        [*begin, *vocabulary.encode(text), *end] for text in ("The ferry stayed.", "The bread")
    ]
    NGramDrafter.load(tmp_path / "table.npz").check(model)  # its ids are those that have a logit


def test_training_and_distilling_put_both_tokens_around_a_text(tmp_path):
    vocabulary = opened("codet5", tmp_path)
    (tmp_path / "pairs.tsv").write_text("The ferry stayed.\tThe ferry stayed.\n")
    batches = corpus.Pairs((16,), ()).batches(
        vocabulary, [tmp_path / "pairs.tsv"], vocabulary.size, 16, 0
    )
    batch, ids = batches[0], CODET5[0]["ids"]
    for side in (batch.inputs, batch.targets):
        assert side[0, : len(ids)].tolist() == ids
    settings = sequence_distillation.DistillConfig(output_dir=str(tmp_path), buckets=(16,))
    shape = T5Config(vocabulary.size, 8, 2, 4, 1, 1, 16)
    (plan,) = sequence_distillation.plan_jobs(
        settings, vocabulary, shape, {"train": ["The ferry stayed."]}
    )
    assert plan.sources == [ids]


# What is rejected.


A, B = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
SPECIAL = {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}
MARK = {"SpecialToken": {"id": "</s>", "type_id": 0}}


def template(*single, tokens=SPECIAL) -> dict:
    return {
        "type": "TemplateProcessing",
        "single": list(single),
        "pair": [A, B],
        "special_tokens": tokens,
    }


NO_FRAMES = {
    "no text": template(MARK),
    "two texts": template(A, MARK, A),
    "a second text": template(B, MARK),
    "an unknown token": template(A, MARK, tokens={}),
    "two templates": {"type": "Sequence", "processors": [template(MARK, A), template(A, MARK)]},
    "another type": {"type": "Pairs"},
    "text": "TemplateProcessing",
    "deep": None,
}
for _ in range(2000):
    NO_FRAMES["deep"] = {"type": "Sequence", "processors": [NO_FRAMES["deep"]]}


@pytest.mark.parametrize("processor", NO_FRAMES.values(), ids=NO_FRAMES)
def test_what_is_no_frame_is_rejected_by_name(processor):
    with pytest.raises(
        ValueError,
        match="post_processor: got .* that is no frame, expected tokens before and after",
    ):
        special_tokens.read_frame(processor, 10)


def test_a_short_file_cannot_put_millions_of_ids_around_a_text():
    tokens = {"</s>": {"id": "</s>", "ids": [1] * 1000, "tokens": ["</s>"] * 1000}}
    with pytest.raises(
        ValueError, match="post_processor: got 'TemplateProcessing' that is no frame"
    ):
        special_tokens.read_frame(template(A, *[MARK] * 10**5, tokens=tokens), 10)


@pytest.mark.parametrize("name", ["no text", "two texts", "a second text", "two templates"])
def test_a_folder_without_a_frame_is_rejected_unless_its_class_decides(name, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: post_processor: got .* that is no frame"):
        opened("written tokenizer.json", tmp_path, tokenizer={"post_processor": NO_FRAMES[name]})
    vocabulary = opened("t5 fast", tmp_path / "t5", tokenizer={"post_processor": NO_FRAMES[name]})
    assert vocabulary.frame == special_tokens.Frame((), (1,))


def test_special_tokens_beside_sentinels_are_few():
    ids = {f"<extra_id_{i}>": i for i in range(2000)} | {f"<{i}>": i for i in range(1000)}
    assert special_tokens.SpecialTokens(ids).split("a<999><extra_id_1999><1000>") == [
        *("a", "<999>", "", "<extra_id_1999>", "<1000>")
    ]
    with pytest.raises(ValueError, match="got 1,001 special tokens, expected at most 1,000"):
        special_tokens.SpecialTokens(ids | {"<1000>": 0})


def test_the_first_and_longest_special_tokens_are_found():
    ids = {token: 0 for token in ("", "ab", "abc", "b", "cab", "<", "<extra_id_1>", "]")}
    found = special_tokens.SpecialTokens(ids).split("xabcabd<extra_id_1>a]<extra_id_2><")
    assert found == [
        *("x", "abc", "", "ab", "d", "<extra_id_1>", "a"),
        "]",
        "<extra_id_2>",
        "<",
        "",
    ]
    assert special_tokens.SpecialTokens(ids).split("xyz") == ["xyz"]


def test_many_long_special_tokens_take_time_in_proportion_to_a_text():
    tokens = {"a" * 500 + f"{i:03d}": i for i in range(190)}
    found = special_tokens.SpecialTokens(tokens).split("a" * 500_000 + "007")
    assert found == ["a" * 499_500, "a" * 500 + "007", ""]  # took hours
    with pytest.raises(ValueError, match="got special tokens of 100,001 characters, expected at"):
        special_tokens.SpecialTokens({"a" * 100_001: 0})


def test_tokens_with_names_take_time_in_proportion(tmp_path, monkeypatch):
    """The file that names them is read a few times, which may be from a store."""
    tokens = {f"x{i}_token": f"<{i}>" for i in range(10_000)}  # took minutes
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    read = unittest.mock.Mock(side_effect=reading.read_optional_json)
    monkeypatch.setattr(reading, "read_optional_json", read)
    described = folder_options.describe_added(tmp_path, {})
    assert [token["content"] for token in described] == list(tokens.values())
    assert read.call_count < 5


def test_an_empty_added_token_is_left_out_as_in_transformers(tmp_path):
    for name in ("codet5", "codet5 fast"):
        expected = opened(name, tmp_path / "plain" / name).encode("a bread")
        found = opened(name, tmp_path / name, added_tokens={"": 310})
        assert found.encode("a bread") == expected
        found = opened(name, tmp_path / name, tokenizer_config={"additional_special_tokens": [""]})
        assert found.encode("a bread") == expected


@pytest.mark.parametrize("token", [220, -1, "1", True])
def test_ids_around_a_text_must_be_ids(token):
    tokens = {"</s>": {"id": "</s>", "ids": [token], "tokens": ["</s>"]}}
    with pytest.raises(
        ValueError, match=r"post_processor: got id .*, expected ids of the vocabulary, below 220"
    ):
        special_tokens.read_frame(template(A, MARK, tokens=tokens), 220)


CLASSES = {
    "merges of another class": (
        "codet5",
        "WhisperTokenizer",
        "vocab.json: got the files of a WhisperTokenizer",
    ),
    "pieces of another class": (
        "spiece",
        "BigBirdTokenizerFast",
        "spiece.model: got the files of a BigBirdTokenizer",
    ),
    "no class": ("spiece", 5, "tokenizer_class: got 5, expected a string"),
}


@pytest.mark.parametrize("name, kind, message", CLASSES.values(), ids=CLASSES)
def test_a_class_that_reads_the_files_in_another_way_is_rejected_by_name(
    name, kind, message, tmp_path
):
    with pytest.raises(ValueError, match=message):
        opened(name, tmp_path, tokenizer_config={"tokenizer_class": kind})


HALF = "\ud83d"  # of a surrogate pair


@pytest.mark.parametrize("name", ["spiece", "t5 fast", "byt5", "codet5"])
def test_a_tokenizer_that_splits_special_tokens_is_rejected(name, tmp_path):
    opened(name, tmp_path / "whole", tokenizer_config={"split_special_tokens": False})
    with pytest.raises(ValueError, match="split_special_tokens: got true, expected false"):
        opened(name, tmp_path, tokenizer_config={"split_special_tokens": True})


@pytest.mark.parametrize("name", ["codet5", "spiece"])
@pytest.mark.parametrize(
    "file, fields",
    [
        ("tokenizer_config", {"additional_special_tokens": [HALF], "cls_token": HALF}),
        ("added_tokens", {HALF: 5}),
    ],
)
def test_tokens_that_are_no_text_name_their_file(name, file, fields, tmp_path):
    folder = build(name, tmp_path)
    path = folder / f"{file}.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | fields))  # as an escape: the file itself is UTF-8
    with pytest.raises(
        ValueError, match=rf"{file}.json: got the token '\\ud83d', expected UTF-8 text"
    ):
        huggingface_folders.open_folder(folder, ())


def test_a_token_of_a_wrong_kind_names_the_file_that_gives_it(tmp_path):
    folder = build("codet5", tmp_path)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": 5}))
    with pytest.raises(
        ValueError, match="special_tokens_map.json: eos_token: got 5, expected a string"
    ):
        huggingface_folders.open_folder(folder, ())


def test_a_step_of_a_strange_type_is_rejected_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: got no readable tokenizer.json"):
        opened("t5 fast", tmp_path, tokenizer={"normalizer": {"type": ["NFC"]}})


def test_a_token_around_a_text_must_be_in_the_vocabulary(tmp_path):
    with pytest.raises(
        ValueError, match="got '<s>' around a text, expected a token of the vocabulary"
    ):
        opened("no processor", tmp_path, tokenizer_config={"tokenizer_class": "RobertaTokenizer"})


def test_gpt2s_own_files_have_added_tokens_in_the_order_of_transformers(tmp_path):
    """The ids are those of transformers 5.24: first tokens with ids, then those with names."""
    named = {"pad_token": "[PAD]", "additional_special_tokens": ["<b>"], "x_token": "<x>"}
    found = opened("gpt2 merges", tmp_path / "named", tokenizer_config=named)
    assert found.encode("<x>y <b> [PAD]") == [289, 88, 220, 290, 220, 288]
    named = {
        "additional_special_tokens": ["<b>"],
        "pad_token": {"content": "[PAD]", "lstrip": True},
    }
    numbered = {"<x>": 289, "<hl>": 288}
    changes = dict(special_tokens_map=named, added_tokens=numbered)
    found = opened("gpt2 merges", tmp_path / "both", **changes)
    assert found.encode("a <hl> b [PAD] c<x>y <b> ") == [
        *(64, 220, 288, 271, 290, 280),
        *(289, 88, 220, 291, 220),
    ]


def test_a_listed_token_may_take_the_spaces_around_it(tmp_path):
    """The ids are those of transformers 5.24."""
    listed = [{"content": "<hl>", "lstrip": True, "rstrip": True}]
    changes = {"additional_special_tokens": listed}
    found = opened("gpt2 merges", tmp_path, tokenizer_config=changes)
    expected = [51, 259, 288, 69, 256, 81, 88, 288, 82, 83, 64, 88, 285, 13]
    assert found.encode("The <hl>ferry <hl> stayed.") == expected


@pytest.mark.parametrize("name", ["spiece", "byt5"])
@pytest.mark.parametrize("token", ["eos_token", "unk_token", "pad_token", "bos_token"])
def test_the_name_of_a_token_that_a_vocabulary_lacks_is_rejected(token, name, tmp_path):
    """transformers gives it an id: the next one or, in ByT5, that of the usual token."""
    for file in ("tokenizer_config", "special_tokens_map"):
        with pytest.raises(ValueError, match="got added token '<new>', expected only sentinels"):
            opened(name, tmp_path / file, **{file: {token: "<new>"}})
    if token == "eos_token":
        with pytest.raises(ValueError, match="eos_token: got '<pad>', expected '</s>'"):
            opened(name, tmp_path / "pad", tokenizer_config={token: "<pad>"})


BYT5_NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_byt5s_files_say_whether_spaces_belong_to_its_special_tokens(file, tmp_path):
    """The ids are those of transformers 5.24."""
    sides = {"lstrip": False, "rstrip": False, "__type": "AddedToken"}
    names = {name: {"content": token} | sides for name, token in BYT5_NAMES.items()}
    found = opened("byt5", tmp_path / "kept", **{file: names})
    assert found.encode("a </s> b <pad>") == [100, 35, 1, 35, 101, 35, 0]
    taken = opened("byt5", tmp_path / "taken", **{file: BYT5_NAMES})
    assert taken.encode("a </s> b <pad>") == [100, 1, 101, 0]
    for form in ("specdec", "huggingface"):
        sd.save(model_of(found), tmp_path / form, format=form)
        again = loader.load_vocabulary(tmp_path / form)[0]
        assert again.encode("a </s> b <pad>") == [100, 35, 1, 35, 101, 35, 0]
    mixed = names | {"pad_token": {"content": "<pad>", "lstrip": True}}
    with pytest.raises(ValueError, match="lstrip and rstrip: got true and false, expected the sam"):
        opened("byt5", tmp_path / "mixed", **{file: mixed})


def test_an_added_token_with_another_id_than_the_next_is_rejected(tmp_path):
    with pytest.raises(
        ValueError, match="json: got the added token '<hl>' with id 299, expected 2"
    ):
        opened("codet5 fast", tmp_path, added_tokens={"<hl>": 299})
    # transformers takes tokenizer.json's id of a token that is there.
    vocabulary = opened("codet5 fast", tmp_path / "known", added_tokens={"<mask>": 299})
    assert vocabulary.encode("<mask>") == [4] and vocabulary.size == 296


# transformers 5.24 ignores the option for merges alone.
CLEANED = {"spiece": True, "t5 fast": True, "byt5": True, "codet5": False, "gpt2 merges": False}
BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


@pytest.mark.parametrize("name", CLEANED)
def test_a_line_says_that_spaces_stay_before_punctuation(name, tmp_path):
    flag = {"clean_up_tokenization_spaces": True}
    for changes, expected in (({}, False), (flag, CLEANED[name]), (flag | {BPE: True}, True)):
        vocabulary = opened(name, tmp_path, tokenizer_config=changes)
        lines = huggingface_folders.list_notes(tmp_path, vocabulary)
        end = "and does without: clean_up_tokenization_spaces=True"
        assert [line.endswith(end) for line in lines] == [True] * expected


def test_the_line_about_spaces_is_printed_when_the_model_is_loaded(tmp_path):
    config = dataclasses.replace(make.TINY, vocab_size=328)
    tensors = make.to_tensors(make.random_params(config))
    make.write_hf(tmp_path, tensors, vocab_size=config.vocab_size)
    build("spiece", tmp_path / "tokenizer", tokenizer_config={"clean_up_tokenization_spaces": True})
    for name in ("spiece.model", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokenizer" / name, tmp_path)
    printed: list[str] = []
    sd.load(tmp_path, "float32", say=printed.append)
    assert [line for line in printed if "clean_up" in line] == printed[:1]


@pytest.mark.parametrize("name", ["vocab.json", "vocab.txt", "tokenizer.model"])
def test_half_of_a_tokenizer_is_named_when_the_model_is_loaded(tmp_path, name):
    tensors = make.to_tensors(make.random_params(make.TINY))
    make.write_hf(tmp_path, tensors)
    (tmp_path / name).write_text("{}")
    printed: list[str] = []
    assert sd.load(tmp_path, "float32", say=printed.append).vocabulary is None
    (line,) = [line for line in printed if name in line]
    assert f"got {name}, expected a tokenizer.json, or its tokenizer's other files" in line


# Vocabularies and logits.


@pytest.mark.parametrize("room, sentinels", [(0, 0), (12, 0), (99, 0), (100, 100), (128, 100)])
def test_sentinels_are_assumed_only_where_ids_are_free(room, sentinels, tmp_path):
    model = (GOLDEN / "hf_madlad" / "spiece.model").read_bytes()
    pieces = vocabularies.SentencePieceVocabulary(model).size
    config = dataclasses.replace(make.TINY, vocab_size=pieces + room)
    make.write_hf(
        tmp_path,
        make.to_tensors(make.random_params(config)),
        vocab_size=config.vocab_size,
        eos_token_id=2,
    )
    (tmp_path / "spiece.model").write_bytes(model)
    found = sd.load(tmp_path, "float32").vocabulary
    assert (found.size, found.extra_ids) == (pieces + sentinels, sentinels)
    assert (
        len(found.encode("<extra_id_0>")) == 1
        if sentinels
        else len(found.encode("<extra_id_0>")) > 1
    )


@pytest.mark.parametrize("name", ["spiece", "t5 fast"])
def test_ids_past_the_logits_are_rejected_where_they_occur(name, tmp_path):
    """The last two of 220 ids, two sentinels, have no logit."""
    target = model_of(opened(name, tmp_path), logits=218)
    assert (
        encode_both_ways(target, "The ferry <extra_id_2>")
        == [target.vocabulary.encode_input("The ferry <extra_id_2>")] * 2
    )
    with pytest.raises(
        ValueError,
        match=r"sentence 2: got the token '<extra_id_1>' with id 218, expected ids below",
    ):
        inputs.encode(target, ["The ferry", "The <extra_id_1>"], 64)
    with pytest.raises(
        ValueError, match=r"inputs: got ids outside the vocabulary.*\(input 1: id 218\)"
    ):
        inputs.as_ids(target, ["The ferry", "The <extra_id_1>"], None, framed=True)


def test_a_vocabulary_of_many_more_ids_than_logits_is_rejected(tmp_path):
    vocabulary = opened("spiece", tmp_path)
    assert model_of(vocabulary, logits=220 - 128)
    with pytest.raises(
        ValueError, match="got 220 pieces, expected at most the 91 logits of the model and 128 more"
    ):
        model_of(vocabulary, logits=91)


# What is written for transformers.


WRITTEN = [name for name in CASES if name.startswith("written")]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_what_transformers_has_read(name, tmp_path):
    """The ids, padded ones too, are those that transformers gave for what is written."""
    case, vocabulary = CASES[name], opened(name, tmp_path / "tokenizer")
    model = model_of(vocabulary, eos_ids=vocabulary.eos_ids)
    sd.save(model, tmp_path / "hf", format="huggingface")
    options = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert options == case["changes"]["tokenizer_config.json"]
    for file in case["files"]:
        assert (tmp_path / "hf" / file).read_bytes() == (GOLDEN / case["base"] / file).read_bytes()
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / file).read_text())["pad_token_id"] == case["pad"]
    ids = [record["ids"] for record in case["records"][:2]]
    longest = max(map(len, ids))
    assert case["padded"] == [row + [case["pad"]] * (longest - len(row)) for row in ids]
    assert case["pad"] < vocabulary.size


@pytest.mark.parametrize("name", ["no processor", "t5's class decides", "codet5"])
def test_the_ends_that_no_tokenizer_json_names_are_written_into_it(name, tmp_path):
    """For transformers puts nothing around a text that this file does not name."""
    sd.save(model_of(opened(name, tmp_path / "tokenizer")), tmp_path / "hf", format="huggingface")
    processor = json.loads((tmp_path / "hf" / "tokenizer.json").read_text(encoding="utf-8"))[
        "post_processor"
    ]
    (before, after), ids = (
        special_tokens.read_frame(processor, 10_000),
        CASES[name]["records"][1]["ids"],
    )
    assert [*before, *after] == ids  # those of an empty text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["codet5", "codet5 fast", "no processor", "control pieces", *WRITTEN]
)
def test_transformers_loads_what_is_written(name, tmp_path):
    """transformers' tokenizer and model give our tokens on a padded batch.

    There are as many ids as the embedding has rows.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    vocabulary = opened(name, tmp_path / "tokenizer")
    target = model_of(vocabulary, eos_ids=vocabulary.eos_ids)
    sd.save(target, tmp_path / "hf", format="huggingface")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf").eval()
    assert len(tokenizer) <= vocabulary.size
    texts = ["The ferry stayed.", "Is there bread?", "The"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert int(batch["input_ids"].max()) < vocabulary.size
    for row, mask, text in zip(batch["input_ids"], batch["attention_mask"], texts):
        assert row[mask > 0].tolist() == vocabulary.encode_input(text)
    ours = sd.generate(target, texts, max_new_tokens=6)
    with torch.no_grad():
        theirs = model.generate(**batch, do_sample=False, num_beams=1, max_new_tokens=6)[:, 1:]
    for row, tokens, length in zip(theirs.tolist(), ours.tokens.tolist(), ours.lengths):
        assert row[:length] == tokens[:length]
