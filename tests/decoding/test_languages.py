"""`source_language` and `target_language`: inputs, first and start tokens, and every way in."""

import json

import numpy as np
import pytest
from golden_languages import make_model, open_vocabulary, read_records

import specdec_jax as sd
from specdec_jax.commands import demo, main
from specdec_jax.decoding import continuous_batching, generation_config, inputs
from specdec_jax.decoding.continuous_batching import decode_stream
from specdec_jax.decoding.request import plan
from specdec_jax.decoding.stream import stream

pytestmark = pytest.mark.usefixtures("quick")
TEXTS = ["kocht heute Suppe", "read three letters"]
FIRST = dict(source_language="fr", target_language="de")
CASES = read_records()["cases"]


@pytest.fixture(scope="module")
def m2m(tmp_path_factory):
    return make_model("m2m_100", tmp_path_factory.mktemp("m2m"))


def test_the_code_of_the_language_is_the_first_token(m2m):
    code = m2m.vocabulary.languages.codes["de"]
    result = sd.generate(m2m, TEXTS, **FIRST, max_new_tokens=6)
    assert (result.tokens[:, 0] == code).all()
    ids = [m2m.vocabulary.with_languages("fr").encode_input(text) for text in TEXTS]
    forced = sd.ModelDefaults(forced_bos_token_id=code)
    expected = sd.generate(m2m, ids, generation_config=forced, max_new_tokens=6)
    np.testing.assert_array_equal(result.tokens, expected.tokens)
    # Of ids, and beside a whole SamplingConfig.
    sampling = sd.SamplingConfig(forbidden_tokens=(1,))
    found = sd.generate(m2m, ids, target_language="de", sampling=sampling, max_new_tokens=6)
    assert (found.tokens[:, 0] == code).all()
    with pytest.raises(ValueError, match=f"forced_tokens: got the first token 3, expected {code}"):
        sampling = sd.SamplingConfig(forced_tokens={0: 3})
        sd.generate(m2m, ids, target_language="de", sampling=sampling)


def test_a_decoder_prefix_begins_with_the_code(m2m):
    vocabulary, code = m2m.vocabulary, m2m.vocabulary.languages.codes["de"]
    text = vocabulary.encode("Suppe")
    given = [[code, *text], text, []]
    planned = plan(m2m, [*TEXTS, "a"], decoder_prefix=given, **FIRST)
    assert planned.prefix_lengths.tolist() == [len(text) + 2, len(text) + 2, 2]
    np.testing.assert_array_equal(planned.prefix[0], planned.prefix[1])
    assert planned.prefix[2, :2].tolist() == [2, code] and planned.rows.forced is None


def test_what_is_missing_or_unknown_is_rejected_with_the_codes(m2m):
    for options, expected in (
        (dict(source_language="fr"), "target_language: got none, expected one of af, am, ar"),
        (dict(target_language="fr"), "source_language: got none, expected one of af, am, ar"),
        (FIRST | dict(target_language="deu"), "target_language: got 'deu', expected one of af, am"),
        (FIRST | dict(source_language="deu"), "source_language: got 'deu', expected one of af, am"),
        (FIRST | dict(source_language=5), "source_language: got 5, expected a language's code"),
    ):
        with pytest.raises(ValueError, match=expected):
            plan(m2m, TEXTS, **options)
    alone = sd.LanguageModel(m2m.config, m2m.params, eos_ids=(2,), start_token=2)
    with pytest.raises(ValueError, match="target_language: got 'de', expected none: the model has"):
        plan(alone, [[5, 2]], target_language="de")
    # The model's file gives the language of its outputs.
    m2m.generation_config = sd.ModelDefaults(forced_bos_token_id=9)
    try:
        assert plan(m2m, TEXTS, source_language="fr").rows.forced[:, 0].tolist() == [9, 9]
    finally:
        m2m.generation_config = sd.ModelDefaults()


def test_the_start_token_of_an_mbart_is_the_language(tmp_path):
    target = make_model("mbart", tmp_path)
    codes = target.vocabulary.languages.codes
    both = dict(source_language="fr_XX", target_language="de_DE")
    planned = plan(target, TEXTS, **both)
    assert planned.prefix[:, 0].tolist() == [codes["de_DE"]] * 2
    expected = CASES["mbart"]["ids"][0]
    assert planned.tokens[0, planned.lengths[0] - 2 : planned.lengths[0]].tolist() == expected[-2:]
    with pytest.raises(ValueError, match="target_language: got none, expected one of ar_AR, cs"):
        plan(target, TEXTS, source_language="fr_XX")
    named = make_model("mbart", tmp_path / "named", codes["ro_RO"])  # the model's file names one
    assert plan(named, TEXTS, source_language="fr_XX").prefix[0, 0] == codes["ro_RO"]
    drafter = sd.ModelDrafter(make_model("mbart", tmp_path / "drafter", seed=1))
    plain = sd.generate(target, TEXTS, **both, max_new_tokens=6)
    drafted = sd.generate(target, TEXTS, **both, max_new_tokens=6, drafter=drafter, gamma=2)
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


def test_marians_code_stands_before_the_text(tmp_path):
    target = make_model("marian", tmp_path, start_token=119)
    code = target.vocabulary.languages.codes["deu"]
    planned = plan(target, TEXTS, target_language="deu")
    assert (planned.tokens[:, 0] == code).all() and planned.rows.forced is None
    with pytest.raises(ValueError, match="target_language: got none for 'kocht"):
        plan(target, TEXTS)
    assert plan(target, [">>deu<< a", ">>fra<< b"]).tokens[1, 0] != code


MIXED = dict(source_language=["fr", "en"], target_language=("de", "fr"))


def test_each_input_may_have_its_own_languages(m2m):
    planned, codes = plan(m2m, TEXTS, **MIXED), m2m.vocabulary.languages.codes
    assert planned.tokens[:, 0].tolist() == [codes["fr"], codes["en"]]
    assert planned.rows.forced[:, 0].tolist() == [codes["de"], codes["fr"]]
    prefixed = plan(m2m, TEXTS, decoder_prefix=[[codes["de"], 5], [5]], **MIXED)
    first, second = prefixed.prefix[:, :3].tolist()
    assert first == [2, codes["de"], 5] and second == [2, codes["fr"], 5]
    assert prefixed.prefix_lengths.tolist() == [3, 3] and prefixed.rows.forced is None
    sampling = sd.SamplingConfig(forced_tokens={1: 7})
    beside = plan(m2m, TEXTS, sampling=sampling, **MIXED).rows.forced
    assert beside[:, :2].tolist() == [[codes["de"], 7], [codes["fr"], 7]]
    for name, given, expected in (
        ("target_language", ["de"], "target_language: got 1 codes, expected one or 2 .one per inp"),
        ("source_language", ["de"] * 3, "source_language: got 3 codes, expected one or 2"),
        ("target_language", ["de", "deu"], "target_language: got 'deu', expected one of af, am"),
        ("target_language", ["de", None], "target_language: got .*None., expected a language's co"),
        ("source_language", 5, "source_language: got 5, expected a language's code, or one per in"),
    ):
        with pytest.raises(ValueError, match=expected):
            plan(m2m, TEXTS, **MIXED | {name: given})


def test_marians_and_mbarts_inputs_may_have_their_own_languages(tmp_path):
    target = make_model("marian", tmp_path / "marian", start_token=119)
    codes = target.vocabulary.languages.codes
    planned = plan(target, TEXTS, target_language=["deu", "fra"])
    assert planned.tokens[:, 0].tolist() == [codes["deu"], codes["fra"]]
    target = make_model("mbart", tmp_path / "mbart")
    codes = target.vocabulary.languages.codes
    both = dict(source_language=["fr_XX", "en_XX"], target_language=["de_DE", "ro_RO"])
    planned = plan(target, TEXTS, **both)
    assert planned.prefix[:, 0].tolist() == [codes["de_DE"], codes["ro_RO"]]
    ends = planned.tokens[np.arange(2), planned.lengths - 1].tolist()
    assert ends == [codes["fr_XX"], codes["en_XX"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2m_100", "mbart"])
def test_a_batch_of_several_languages_is_decoded_like_its_rows(name, tmp_path):
    target = make_model(name, tmp_path / "target")
    draft = sd.ModelDrafter(make_model(name, tmp_path / "drafter", seed=1))
    short = dict(fr="fr_XX", en="en_XX", de="de_DE") if name == "mbart" else {}
    sources, outputs = (
        [short.get(code, code) for code in codes.split()] for codes in ("fr en fr", "de fr en")
    )
    texts, given = [*TEXTS, "kocht heute"], dict(max_new_tokens=6)
    alone = [
        sd.generate(target, [text], source_language=one, target_language=other, **given)
        for text, one, other in zip(texts, sources, outputs)
    ]
    expected = [found.tokens[0, : found.lengths[0]].tolist() for found in alone]
    codes = dict(source_language=sources, target_language=outputs)
    assert len({tuple(row[:2]) for row in expected}) > 1
    for more in (
        {},
        dict(drafter=draft, gamma=2),
        dict(drafter=draft, tree=sd.Tree.uniform((2, 1))),
    ):
        found = sd.generate(target, texts, **codes, **given, **more)
        rows = [row[:n].tolist() for row, n in zip(found.tokens, found.lengths)]
        assert rows == expected, more
    beams = [
        sd.generate(
            target, [text], source_language=one, target_language=other, num_beams=2, **given
        )
        for text, one, other in zip(texts, sources, outputs)
    ]
    together = sd.generate(target, texts, num_beams=2, **codes, **given)
    for row, one in enumerate(beams):
        np.testing.assert_array_equal(together.tokens[row, : one.lengths[0]], one.tokens[0])
    streamed = decode_stream(
        target,
        texts * 2,
        batch_size=2,
        drafter=draft,
        gamma=2,
        **given,
        source_language=sources * 2,
        target_language=outputs * 2,
    )
    found = {number: rows[0].tokens for number, rows in streamed}
    assert [found[number] for number in range(6)] == expected * 2


def test_a_job_in_parts_keeps_each_inputs_language(m2m, monkeypatch):
    ids = [m2m.vocabulary.with_languages("fr").encode_input(text) for text in TEXTS * 2]
    languages, codes = ["de", "fr", "en", "de"], m2m.vocabulary.languages.codes
    monkeypatch.setattr(continuous_batching, "_WINDOW", 1)
    given = dict(batch_size=1, seed=0, target_language=languages, max_new_tokens=1)
    outputs = continuous_batching.decode_all(m2m, ids, **given)
    assert [output.tokens for output in outputs] == [[codes[code]] for code in languages]


@pytest.mark.slow
def test_every_way_in_takes_the_languages(m2m, tmp_path, capsys):
    options = dict(FIRST, max_new_tokens=6)
    expected = sd.generate(m2m, TEXTS, **options).tokens
    streamed = decode_stream(m2m, TEXTS, batch_size=1, **options)
    rows = {number: outputs[0].tokens for number, outputs in streamed}
    pieces = [piece for piece in stream(m2m, TEXTS[:1], **options)]
    assert list(rows[0]) == [token for piece in pieces for token in piece.tokens]
    assert list(rows[1]) == [token for token in expected[1] if token >= 0][: len(rows[1])]
    config = generation_config.GenerationConfig(**options)
    for name in ("options.json", "options.gin"):
        config.save(tmp_path / name)
        assert generation_config.GenerationConfig.load(tmp_path / name) == config
        found = sd.generate(m2m, TEXTS, config=tmp_path / name)
        np.testing.assert_array_equal(found.tokens, expected)
        mixed = generation_config.GenerationConfig(
            **MIXED, sampling=sd.SamplingConfig(forced_tokens=[{0: 5}, {1: 6}])
        )
        mixed.save(tmp_path / name)
        assert generation_config.GenerationConfig.load(tmp_path / name) == mixed
    sd.save(m2m, tmp_path / "model", say=lambda line: None)
    flags = ["--source_language=fr", "--target_language=de", "--max_new_tokens=6", "--json"]
    assert main.main(["generate", f"--target={tmp_path / 'model'}", *flags, *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens"] for line in lines] == [list(rows[i]) for i in range(2)]
    timed = ["--drafter=random", "--gamma=2", "--repeats=1"]
    with pytest.MonkeyPatch.context() as patch:
        seen: list[tuple] = []
        patch.setattr(demo, "encode", lambda *given: seen.append(given) or inputs.encode(*given))
        model = f"--target={tmp_path / 'model'}"
        assert main.main(["demo", model, *timed, *flags[:3], *TEXTS]) == 0
        assert seen[0][3:] == ("fr", "de")
    encoded = inputs.encode(m2m, TEXTS, 64, "fr", "de")
    assert encoded == [m2m.vocabulary.with_languages("fr").encode_input(text) for text in TEXTS]


def test_ids_need_no_source(tmp_path):
    vocabulary = open_vocabulary("nllb", tmp_path)
    assert vocabulary.languages.codes["eng_Latn"] - vocabulary.languages.codes["ace_Arab"] == 46
