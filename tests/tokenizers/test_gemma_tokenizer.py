"""Tokenizers of Gemma's kind: 200 lines beside `tokenizers` and transformers, and damaged files."""

import json

import pytest
import tokenizers
from gemma_tokenizer import END, SPECIAL, make_lines, write_tokenizer

from specdec_jax.decoding.stop import strip_end
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.vocabularies import TokenizerJsonVocabulary

EOS, BOS = 1, 2


def open_vocabulary(folder):
    vocabulary = huggingface_folders.open_folder(folder, (EOS, END))
    assert isinstance(vocabulary, TokenizerJsonVocabulary)
    return vocabulary


def test_lines_beside_the_library(tmp_path):
    """Inputs begin with <bos>; spaces, line breaks and bytes come back as they were."""
    tokenizer, lines = write_tokenizer(tmp_path), make_lines()
    vocabulary = open_vocabulary(tmp_path)
    assert (vocabulary.eos_ids, vocabulary.pad_id) == ((EOS, END), 0)
    for line in lines:
        expected = tokenizer.encode(line).ids
        assert vocabulary.encode_input(line) == vocabulary.encode_prompt(line) == expected
        assert vocabulary.encode(line) == expected[1:] and expected[0] == BOS
        text = vocabulary.decode(expected)
        assert text == tokenizer.decode(expected[1:], skip_special_tokens=False)
        assert text == line.replace("▁", " ")
        # A prefix that ends inside a character is decoded too, and with EOS it is the same text.
        for cut in range(1, len(expected), 3):
            part = tokenizer.decode(expected[1:cut], skip_special_tokens=False)
            assert vocabulary.decode([*expected[:cut], EOS]) == part
    used = {i for line in lines for i in vocabulary.encode(line)}
    assert used >= {END, vocabulary._tokenizer.token_to_id("▁▁")}
    assert len(used & set(range(len(SPECIAL), len(SPECIAL) + 256))) > 30  # bytes


def test_no_mark_of_a_texts_beginning_stands_before_an_output(tmp_path):
    """Nor is <bos> twice where a decoder begins with it, as T5Gemma's does."""
    write_tokenizer(tmp_path)
    vocabulary = open_vocabulary(tmp_path)
    ids = [*vocabulary.encode("the river"), EOS]
    assert vocabulary.encode_continuation("the river") == ids
    assert vocabulary.encode_output("the river", BOS) == ids
    assert vocabulary.encode_output("the river", 0) == [BOS, *ids]


@pytest.mark.parametrize("special", [False, True])
def test_a_tag_of_html_is_no_end(special, tmp_path):
    """Gemma has `</s>` among its ordinary tokens; without other files the model's ids decide."""
    tokenizer = tokenizers.Tokenizer.from_str(write_tokenizer(tmp_path).to_str())
    tokenizer.add_tokens([tokenizers.AddedToken("</s>", normalized=False, special=special)])
    tag = tokenizer.token_to_id("</s>")
    for stops, expected in (((EOS, END), (EOS, END)), ((), (tag,)), ((END, tag), (tag, END))):
        found = TokenizerJsonVocabulary(tokenizer.to_str(), stop_ids=stops)
        assert found.eos_ids == ((tag, *stops) if special and tag not in stops else expected)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = open_vocabulary(tmp_path)
    assert found.eos_ids == ((tag, EOS, END) if special else (EOS, END))
    text = "a </s> b"
    assert (found.decode(found.encode(text)) == text) is not special


def test_marks_of_turns_are_one_id_each(tmp_path):
    """The frame that decoding/README.md shows; a folder's template is not applied."""
    write_tokenizer(tmp_path)
    options = json.loads((tmp_path / "tokenizer_config.json").read_text())
    options["chat_template"] = "{{ bos_token }}{{ messages }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    vocabulary = open_vocabulary(tmp_path)
    turn = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    start, line, text = SPECIAL.index("<start_of_turn>"), vocabulary.encode("\n"), "the river"
    user, model = (vocabulary.encode(f"{role}\n") for role in ("user", "model"))
    user_text = vocabulary.encode(f"user\n{text}")
    expected = [BOS, start, *user_text, END, *line, start, *model]
    assert user_text[: len(user)] == user
    for encode in (vocabulary.encode_prompt, vocabulary.encode_input):
        assert encode(turn.format(text)) == expected
    # Texts omit what ends a turn.
    output = strip_end(vocabulary, [*vocabulary.encode(text), END], "eos")
    assert vocabulary.decode(output) == text


@pytest.mark.slow
def test_lines_beside_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_tokenizer(tmp_path)
    vocabulary = open_vocabulary(tmp_path)
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")),
    ):
        for line in make_lines():
            ids = theirs(line)["input_ids"]
            assert vocabulary.encode_input(line) == ids, line
            decoded = theirs.decode(ids[1:], clean_up_tokenization_spaces=False)
            assert vocabulary.decode(ids) == decoded, line


def edited(change):
    def damage(content):
        change(content)
        return json.dumps(content)

    return damage


DAMAGED = {
    "a merge of a missing piece": edited(lambda c: c["model"]["merges"].append(["zz", "zz"])),
    "a merge of three": edited(lambda c: c["model"]["merges"].append(["a", "b", "c"])),
    "merges that are no list": edited(lambda c: c["model"].update(merges={"a": "b"})),
    "a byte with an id past memory": edited(
        lambda c: c["model"]["vocab"].update({"<0x41>": 2**40})
    ),
    "a byte with an id below 0": edited(lambda c: c["model"]["vocab"].update({"<0x41>": -1})),
    "byte fallback of words": edited(lambda c: c["model"].update(byte_fallback="yes")),
    "text that becomes megabytes": edited(
        lambda c: c["decoder"]["decoders"][0].update(content="a" * 10**7)
    ),
    "nothing": lambda content: "",
    "half of it": lambda content: json.dumps(content)[:9000],
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_rejected_in_one_line(case, tmp_path):
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(DAMAGED[case](json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")
    with pytest.raises(ValueError, match="tokenizer.json: ") as caught:
        open_vocabulary(tmp_path).encode_input("a 𝒳 b")
    assert len(str(caught.value).splitlines()) == 1
