"""Tokenizers of BART-like models, with and without languages, beside transformers'."""

import json

import pytest
from golden_languages import copy_folder, make_model, open_vocabulary, read_records

import specdec_jax as sd
from specdec_jax.checkpoints import native_format
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.languages import Languages
from specdec_jax.tokenizers.piece_tables import PieceTableVocabulary

RECORDS = read_records()
CASES, LINES = RECORDS["cases"], RECORDS["lines"]
TRANSLATING = [name for name, case in CASES.items() if case["source"]]


@pytest.mark.parametrize("name", CASES)
def test_inputs_and_texts_are_transformers(name, tmp_path):
    case = CASES[name]
    vocabulary = open_vocabulary(name, tmp_path).with_languages(case["source"], case["target"])
    assert len(LINES) == len(case["ids"]) == 200
    for number, line in enumerate(LINES):
        assert vocabulary.encode_input(line) == case["ids"][number], line
        if case["decoded"]:
            assert vocabulary.decode(case["ids"][number]) == case["decoded"][number], line
        if case["target_ids"]:
            assert vocabulary.encode_output(line) == case["target_ids"][number], line
            expected = case["target_decoded"][number]
            assert vocabulary.decode(case["target_ids"][number]) == expected, line


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_again(name, tmp_path):
    vocabulary = open_vocabulary(name, tmp_path)
    entry, contents = native_format.describe_vocabulary(vocabulary)
    (tmp_path / entry["file"]).write_bytes(contents)
    again = native_format.open_vocabulary(tmp_path, json.loads(json.dumps(entry)))
    assert again.fingerprint() == vocabulary.fingerprint()
    assert again.languages == vocabulary.languages and again.frame == vocabulary.frame
    case = CASES[name]
    again = again.with_languages(case["source"], case["target"])
    assert [again.encode_input(line) for line in LINES[:20]] == case["ids"][:20]


@pytest.mark.parametrize("name", CASES)
def test_hugging_faces_files_are_written(name, tmp_path):
    """Read again, they make the same vocabulary, with its languages and added tokens."""
    given = dict(src_lang=CASES[name]["source"]) if CASES[name]["source"] else {}
    vocabulary = open_vocabulary(name, tmp_path / "given", **given)
    assert_written(vocabulary, tmp_path / "written", CASES[name]["model_type"])


def assert_written(vocabulary, folder, model_type):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for file, content in huggingface_folders.make_files(vocabulary).items():
        is_text = not isinstance(content, bytes)
        data = json.dumps(content).encode() if is_text else content
        (folder / file).write_bytes(data)
    again = huggingface_folders.open_folder(folder, (0,))
    assert again.fingerprint() == vocabulary.fingerprint()
    assert again.languages == vocabulary.languages and again.frame == vocabulary.frame
    assert [again.encode(line) for line in LINES[:40]] == [
        vocabulary.encode(line) for line in LINES[:40]
    ]
    if isinstance(vocabulary, PieceTableVocabulary):
        assert json.loads(again.text) == json.loads(vocabulary.text)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_is_exported_with_its_languages(name, tmp_path):
    model = make_model(name, tmp_path / "given")
    sd.save(model, tmp_path / "hf", format="huggingface", say=lambda line: None)
    again = sd.load(tmp_path / "hf", "float32", say=lambda line: None)
    assert again.fingerprint == model.fingerprint
    assert again.vocabulary.fingerprint() == model.vocabulary.fingerprint()
    assert again.vocabulary.languages == model.vocabulary.languages


# transformers 5.24 has <unk> for every language of an NLLB without a tokenizer.json.
READ = [name for name in CASES if name not in ("nllb", "nllb legacy")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Marian's class recommends sacremoses, which it never uses
@pytest.mark.parametrize("name", READ)
def test_transformers_reads_what_is_written(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    case = CASES[name]
    given = dict(src_lang=case["source"]) if case["source"] else {}
    vocabulary = open_vocabulary(name, tmp_path / "given", **given)
    assert_written(vocabulary, tmp_path / "written", case["model_type"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    code = f">>{case['target']}<< " if name == "marian" else ""
    assert [theirs(code + line).input_ids for line in LINES] == case["ids"]
    if case["target_ids"]:
        assert [theirs(text_target=line).input_ids for line in LINES] == case["target_ids"]


@pytest.mark.parametrize("name", ["m2m_100", "nllb", "pegasus", "marian", "marian separate"])
def test_added_tokens_are_written(name, tmp_path):
    size = open_vocabulary(name, tmp_path / "plain").size
    added = {str(size + 1): {"content": "<new>"}, str(size): {"content": "<other>"}}
    vocabulary = open_vocabulary(name, tmp_path / "given", added_tokens_decoder=added)
    assert vocabulary.size == size + 2
    assert_written(vocabulary, tmp_path / "written", CASES[name]["model_type"])


def test_a_language_beside_tokenizer_json_is_added(tmp_path):
    """The ids are those of transformers 5.24."""
    name, ids = "nllb tokenizer.json", [47, 116, 112, 131, 394, 56, 132, 145, 115, 2]
    open_vocabulary(name, tmp_path)
    known = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    added = {str(token.pop("id")): token for token in known}
    added["394"] = known[-1] | {"content": "tyv_Cyrl", "lstrip": False, "normalized": False}
    for source, first in (("eng_Latn", 237), ("tyv_Cyrl", 394)):
        vocabulary = open_vocabulary(name, tmp_path, src_lang=source, added_tokens_decoder=added)
        assert vocabulary.encode_input("Suppe tyv_Cyrl heiss") == [first, *ids]


@pytest.mark.parametrize("listed", [["<sep>"], []])
def test_marians_added_tokens_are_those_of_transformers(listed, tmp_path):
    """The ids and the text are those of transformers 5.24."""
    copy_folder("marian", tmp_path, additional_special_tokens=listed)
    if not listed:
        (tmp_path / "added_tokens.json").write_text('{"<sep>": 120}')
    vocabulary = huggingface_folders.open_folder(tmp_path, (0,))
    ids = [117, 42, 29, 27, 27, 3, 120, 2, 71, 12, 4, 4]
    assert vocabulary.encode_input(">>deu<< Suppe <sep> heiss") == [*ids, 0]
    if listed:
        assert vocabulary.decode([5, 120, 6]) == "t<sep> r"
    with pytest.raises(ValueError, match="config.json: got added token '<sep>' without an id, exp"):
        open_vocabulary("m2m_100", tmp_path / "m2m", additional_special_tokens=["<sep>"])


def test_marians_end_that_is_no_piece_gets_the_next_id(tmp_path):
    """The ids are those of transformers 5.24; a model without such an id rejects the input."""
    vocabulary = open_vocabulary("marian", tmp_path / "end", eos_token="<nothing>")
    assert vocabulary.eos_ids == (120,)
    ids = vocabulary.encode_input(">>deu<< Suppe heiss")
    assert ids == [117, 42, 29, 27, 27, 3, 2, 71, 12, 4, 4, 120]
    model = make_model("marian", tmp_path / "sound")
    assert model.config.vocab_size == 120
    with pytest.raises(ValueError, match=r"outside the vocabulary, .* \(input 0: id 120\)"):
        sd.generate(model, [ids], gamma=0)


@pytest.mark.parametrize("name", ["mbart", "mbart50", "nllb", "pegasus"])
@pytest.mark.parametrize("token", ["eos_token", "pad_token", "unk_token", "mask_token"])
def test_another_name_of_a_token_with_a_place_of_its_own_is_rejected(token, name, tmp_path):
    """transformers 5.24 gives it the usual token's id."""
    with pytest.raises(ValueError, match=f"{token}: got '<new>', expected a piece of the vocab"):
        open_vocabulary(name, tmp_path, **{token: "<new>"})


@pytest.mark.parametrize("name, i", [("mbart50", 168), ("pegasus", 217)])
def test_a_start_without_a_place_of_its_own_gets_the_next_id(name, i, tmp_path):
    """The id is that of transformers 5.24; mBART's and NLLB's start has the place of `<s>`."""
    assert open_vocabulary(name, tmp_path, bos_token="<new>").encode("<new>") == [i]
    for other in ("mbart", "nllb"):
        with pytest.raises(ValueError, match="bos_token: got '<new>', expected a piece of the voc"):
            open_vocabulary(other, tmp_path / other, bos_token="<new>")


@pytest.mark.parametrize("name", TRANSLATING)
def test_an_input_without_a_language_is_rejected(name, tmp_path):
    case, vocabulary = CASES[name], open_vocabulary(name, tmp_path)
    with pytest.raises(ValueError, match="source_language: got none, expected one of .*[, ]de"):
        vocabulary.encode_input("Suppe")
    for given in ((None, "xx"), ("xx", None)):
        with pytest.raises(ValueError, match="_language: got 'xx', expected one of "):
            vocabulary.with_languages(*given).encode_output("a")
    made = vocabulary.with_languages(case["source"], case["target"])
    first = vocabulary.languages.codes[case["target"]]
    start = [first] if vocabulary.languages.target == "first" else []
    assert made.encode_output("Suppe") == [*start, *vocabulary.encode("Suppe"), 2]
    given = open_vocabulary(name, tmp_path, src_lang=case["source"])
    assert [given.encode_input(line) for line in LINES[:9]] == case["ids"][:9]


def test_a_language_that_the_tokenizer_lacks_is_rejected(tmp_path):
    copy_folder("m2m_100", tmp_path, src_lang="xx")
    with pytest.raises(ValueError, match="tokenizer_config.json: src_lang: got 'xx', expected one"):
        huggingface_folders.open_folder(tmp_path, (2,))
    with pytest.raises(ValueError, match="language_codes: got 'all', expected one of m2m100, wmt"):
        open_vocabulary("m2m_100", tmp_path, language_codes="all")
    with pytest.raises(ValueError, match="offset: got 0, expected 103"):
        open_vocabulary("pegasus", tmp_path / "pegasus", offset=0)
    vocabulary = open_vocabulary("bart", tmp_path / "bart")
    with pytest.raises(ValueError, match="target_language: got 'de', expected none: the model's"):
        vocabulary.with_languages(None, "de")


def test_marians_codes_of_languages(tmp_path):
    vocabulary = open_vocabulary("marian", tmp_path)
    german, code = vocabulary.with_languages(None, "deu"), vocabulary.languages.codes["deu"]
    assert german.encode_input("Suppe")[0] == code
    # A code that the text begins with counts.
    text = ">>fra<< Suppe"
    assert german.encode_input(text) == vocabulary.encode_input(text)
    with pytest.raises(
        ValueError, match="target_language: got none for 'Suppe', .*fra, deu, pt_br"
    ):
        vocabulary.encode_input("Suppe")
    with pytest.raises(ValueError, match="source_language: got 'fra', expected none"):
        vocabulary.with_languages("fra", None)


@pytest.mark.parametrize("name, file", [("m2m_100", "vocab"), ("marian separate", "target_vocab")])
def test_a_piece_that_is_no_text_is_rejected(name, file, tmp_path):
    copy_folder(name, tmp_path)
    path = tmp_path / f"{file}.json"
    table = json.loads(path.read_text())
    table["\ud83d"] = table.pop(next(piece for piece, i in table.items() if i == 10))
    path.write_text(json.dumps(table))
    with pytest.raises(ValueError, match=rf"{file}.json: got the piece '\\ud83d', expected UTF-8"):
        huggingface_folders.open_folder(tmp_path, (0,))


@pytest.mark.parametrize("name", ["m2m_100", "pegasus", "marian"])
def test_an_added_token_without_text_is_left_out(name, tmp_path):
    """transformers 5.24 gives the same ids as without it; it would split texts everywhere."""
    plain = open_vocabulary(name, tmp_path / "plain")
    added = {str(plain.size): {"content": "", "special": True}}
    found = open_vocabulary(name, tmp_path / "added", added_tokens_decoder=added)
    assert found.size == plain.size
    assert [found.encode(line) for line in LINES[:9]] == [plain.encode(line) for line in LINES[:9]]


def test_separate_vocabularies_differ_in_both_tables(tmp_path):
    vocabulary = open_vocabulary("marian separate", tmp_path)
    assert not vocabulary.shares_ids
    content = json.loads(vocabulary.text)
    other = dict(content, pieces={**content["pieces"], "one more": 90})
    assert PieceTableVocabulary(json.dumps(other)).fingerprint() != vocabulary.fingerprint()
    sound = Languages({"a": 1}, "before", "first").written()
    for changes in (
        {"special": ["no piece"]},
        {"special": 3},
        {"after_unknown": "x"},
        {"target_pieces": {"</s>": 0}},
        {"target_spm": "!"},
        {"languages": []},
        {"languages": sound | {"codes": {}}},
        {"languages": sound | {"codes": {"a": 1_000}}},
        {"languages": sound | {"source": "inside"}},
        {"languages": sound | {"default": "b"}},
    ):
        with pytest.raises(ValueError, match="got "):
            PieceTableVocabulary(json.dumps(content | changes))
