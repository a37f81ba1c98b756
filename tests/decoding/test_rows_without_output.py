"""An input whose logits are not finite is reported by row, and the other inputs finish."""

import json

import command_line
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.checkpoints.converter import save
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.tokenizers.vocabularies import ByteVocabulary

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")

BAD = 3 + ord("#")  # an id whose embedding is damaged; outputs are kept from it
TEXTS = ["one", "t#o", "three", "", "fi#e"]
WRONG = [1, 4]
OPTIONS = dict(max_new_tokens=5, sampling=sd.SamplingConfig(forbidden_tokens=(BAD,)))


def damaged(model: sd.LanguageModel) -> sd.LanguageModel:
    """Returns a model whose encoder gives NaN where an input has the id `BAD`."""
    params = model.params
    table = params["token_embedder"]["embedding"]
    params["token_embedder"]["embedding"] = table.at[BAD].set(jnp.nan)
    return sd.LanguageModel(model.config, params, ByteVocabulary(0), name="damaged")


@pytest.fixture(scope="module")
def sound():
    model = tiny_t5(0, 300)
    assert not model.config.logits_via_embedding, "else every input would be damaged"
    return sd.LanguageModel(model.config, model.params, ByteVocabulary(0), name="sound")


@pytest.fixture(scope="module")
def target(sound):
    return damaged(sound)


@pytest.fixture(scope="module")
def whole(sound):
    """The result of the same weights without the damage."""
    return sd.generate(sound, TEXTS, **OPTIONS)


DRAFTERS = {
    "plain": {},
    "chain": {"gamma": 2},
    "tree": {"tree": sd.Tree.uniform((2, 1))},
    "beams": {"num_beams": 2},
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_bad_row_is_reported_and_the_others_are_what_they_are_alone(target, sound, name):
    drafter = None if name == "plain" else sd.ModelDrafter(sound)
    how = dict(drafter=drafter, **DRAFTERS[name], **OPTIONS)
    with pytest.raises(
        NonFiniteLogitsError, match="^input 1: got logits from the target damaged .* at new token 0"
    ):
        sd.generate(target, TEXTS, **how)
    found, expected = (
        sd.generate(target, TEXTS, non_finite="report", **how),
        sd.generate(sound, TEXTS, **how),
    )
    for row, error in enumerate(found.errors):
        if row in WRONG:
            assert (error.input, error.token, error.by_drafter) == (row, 0, False)
            assert (
                found.texts[row] is None
                and found.finish_reasons[row] == "error"
                and found.lengths[row] == 0
            )
            assert not found.tokens[row].any() and not found.log_probs[row].any()
        else:
            assert error is None and found.texts[row] == expected.texts[row]
            np.testing.assert_array_equal(found.log_probs[row], expected.log_probs[row])
    sound_rows = [row for row in range(len(TEXTS)) if row not in WRONG]
    assert [found.finish_reasons[row] for row in sound_rows] == [
        expected.finish_reasons[row] for row in sound_rows
    ]


@pytest.mark.parametrize("refill", [True, False])
def test_a_job_continues_with_its_other_inputs(target, whole, refill):
    plan = dict(
        sd.decode_stream(
            target, TEXTS * 2, batch_size=2, refill=refill, non_finite="report", **OPTIONS
        )
    )
    assert sorted(plan) == list(range(10))
    for number, (output,) in plan.items():
        wrong = number % 5 in WRONG
        assert (
            output.text == (None if wrong else whole.texts[number % 5])
            and bool(output.error) == wrong
        )
        assert not wrong or (output.error.input, output.finish_reason, output.tokens) == (
            number,
            "error",
            [],
        )


def test_numbers_of_inputs_are_those_of_the_whole_job(target):
    ids = [target.vocabulary.encode(text) + [1] for text in TEXTS[:2]]
    outputs = list(
        decode_all(target, ids, batch_size=1, seed=0, first=40, non_finite="report", **OPTIONS)
    )
    assert [output.error and output.error.input for output in outputs] == [None, 41]


def test_a_damaged_drafter_costs_no_output(target, sound, whole):
    how = dict(drafter=sd.ModelDrafter(target), gamma=2, **OPTIONS)
    with pytest.raises(NonFiniteLogitsError, match="^input 1: got logits from the drafter damaged"):
        sd.generate(sound, TEXTS, **how)
    found = sd.generate(sound, TEXTS, non_finite="report", **how)
    assert found.texts == whole.texts and found.finish_reasons == whole.finish_reasons
    assert [row for row, error in enumerate(found.errors) if error and error.by_drafter] == WRONG


def test_stop_strings_and_streams(target, whole):
    text = whole.texts[0]
    found = sd.generate(target, TEXTS[:2], stop=[text[-1]], non_finite="report", **OPTIONS)
    assert found.texts[1] is None and found.texts[0] == text.partition(text[-1])[0]
    with pytest.raises(NonFiniteLogitsError, match="input 1"):
        list(sd.stream(target, TEXTS[:2], **OPTIONS))
    pieces = list(sd.stream(target, TEXTS[:2], non_finite="report", **OPTIONS))
    assert "".join(piece.text for piece in pieces if piece.row == 0) == text
    (last,) = [piece for piece in pieces if piece.row == 1]
    assert (last.text, last.finish_reason) == ("", "error") and isinstance(
        last.error, NonFiniteLogitsError
    )


@pytest.mark.parametrize("value", [None, True, "stop", 3])
def test_another_word_is_rejected(target, value):
    for call in (sd.generate, sd.decode_stream, sd.stream):
        with pytest.raises(ValueError, match="^non_finite: got .*, expected 'raise' or 'report'$"):
            call(target, TEXTS[:1], non_finite=value)


# specdec generate.


@pytest.fixture
def run(specdec, target, tmp_path):
    save(target, tmp_path / "model")
    flags = (
        f"--target={tmp_path / 'model'}",
        "--max_new_tokens=5",
        f"--forbidden_tokens={BAD}",
        "--dtype=float32",
    )

    def call(*more):
        size = "" if "--stream" in more else "--batch_size=2"
        code, out, err = specdec("generate", *flags, *filter(None, [size]), *map(str, more), *TEXTS)
        return (
            code,
            out.replace(str(tmp_path / "model"), "MODEL"),
            err.replace(str(tmp_path / "model"), "MODEL"),
        )

    return call


MESSAGE = "got logits from the target MODEL that are not finite numbers, at new token 0"


def check_messages(code: int, err: str) -> None:
    assert code == 1
    for number in (2, 5):  # as lines of a file are counted
        assert f"sentence {number}: no output: {MESSAGE}" in err
    assert err.splitlines()[-1] == (
        "specdec: error: sentences 2, 5 (2 of 5): no output: got logits that are not finite numbers"
    )


@pytest.mark.parametrize("flag", [None, "--stream", "--output_file"])
def test_an_empty_line_a_message_and_the_exit_code(run, whole, tmp_path, flag):
    path = tmp_path / "out.txt"
    code, out, err = run(
        *([] if flag is None else [f"{flag}={path}" if flag == "--output_file" else flag])
    )
    check_messages(code, err)
    out = path.read_text() if flag == "--output_file" else out
    assert out == "".join(
        f"{' '.join((text or '').splitlines())}\n" for text in blanked(whole.texts)
    )
    assert not list(tmp_path.glob("*.partial*")) and (
        flag != "--output_file" or (tmp_path / "out.txt.gin").exists()
    )


def blanked(texts):
    return [None if row in WRONG else text for row, text in enumerate(texts)]


def test_json_has_null_and_the_reason(run, whole):
    code, out, err = run("--json")
    check_messages(code, err)
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["text"] for record in records] == blanked(whole.texts)
    for row, record in enumerate(records):
        assert (
            record.get("error", "").startswith(MESSAGE)
            == (row in WRONG)
            == (record["finish_reason"] == "error")
        )
    streamed = run("--json", "--stream")[1]
    errors = {
        record["row"]: record["error"]
        for record in map(json.loads, streamed.splitlines())
        if "error" in record
    }
    assert sorted(errors) == WRONG


def test_a_switch_stops_the_job(run, tmp_path):
    for more in ([], [f"--output_file={tmp_path / 'out'}"], ["--stream"]):
        code, _, err = run("--non_finite=raise", *more)
        last = err.splitlines()[-1]
        assert code == 2 and any(
            last.startswith(f"specdec: error: sentence {number}: {MESSAGE}") for number in (2, 5)
        )
    code, _, err = run("--non_finite=stop")
    assert code == 2 and "expected 'raise' or 'report'" in err


def test_errors_of_an_earlier_run_are_reported_again(run, tmp_path, monkeypatch):
    """A run that is killed and resumed ends with the same messages and exit code.

    A stopped one can be resumed.
    """
    path, add = tmp_path / "out", Journal.add

    def dying(journal, number, *rest):
        add(journal, number, *rest)
        if number == 1:
            raise KeyboardInterrupt

    assert run("--non_finite=raise", f"--output_file={path}")[0] == 2
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", dying)
        assert run(f"--output_file={path}")[0] == 130
    assert (tmp_path / "out.partial.gin").exists() and not path.exists()
    code, _, err = run("--non_finite=raise", f"--output_file={path}")
    assert (
        code == 2
        and "got sentences 2, 5 (2 of 5) without output, expected --non_finite=report" in err
    )
    code, _, err = run(f"--output_file={path}")
    assert code == 1 and "sentences 2, 5 (2 of 5): no output" in err
    assert len(path.read_text().splitlines()) == 5
