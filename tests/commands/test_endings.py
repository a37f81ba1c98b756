"""A run reports how many outputs were cut and which inputs are too long."""

import command_line
import pytest
from gpt_models import FOLDER
from toy_models import tiny_t5

import specdec_jax as sd
from specdec_jax.commands import main
from specdec_jax.commands.endings import Endings
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.decoding.checks import check_input_lengths, list_in_words
from specdec_jax.decoding.results import NonFiniteLogitsError

pair, cache = command_line.pair, command_line.cache
pytestmark = pytest.mark.usefixtures("quick")

TEXTS = ["We asked", "Tom", "She was"]


def generate(capsys, pair, *more):
    """Runs the command with one row a batch; returns exit code, output and errors."""
    models = [f"--target={pair / 'target'}", "--dtype=float32", "--batch_size=1"]
    code = main.main(["generate", *models, *map(str, more)])
    return code, *capsys.readouterr()


@pytest.fixture
def cut(pair):
    """Number of `TEXTS` whose outputs end at six tokens."""
    target = sd.load(pair / "target", dtype="float32", say=lambda line: None)
    reasons = sd.generate(target, TEXTS, max_new_tokens=6).finish_reasons
    assert reasons.count("length")
    return reasons.count("length")


@pytest.mark.slow
def test_outputs_that_were_cut_are_counted(capsys, pair, cut, tmp_path, monkeypatch):
    """Printed, streamed, or written by a job that was killed and resumed."""
    line = f"{cut} of 3 outputs ended by length: --max_new_tokens=6\n"
    for more in ([], ["--json"], ["--stream"]):
        code, _, err = generate(capsys, pair, "--max_new_tokens=6", *more, *TEXTS)
        assert code == 0 and err.endswith(line)
    add, path = Journal.add, tmp_path / "out"

    def dying(journal, *result):
        add(journal, *result)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", dying)
        assert (
            generate(capsys, pair, "--max_new_tokens=6", f"--output_file={path}", *TEXTS)[0] == 130
        )
    code, _, err = generate(capsys, pair, "--max_new_tokens=6", f"--output_file={path}", *TEXTS)
    assert code == 0 and "1 of 3 sentences are there" in err and err.endswith(line)


def test_nothing_is_printed_where_nothing_was_cut(capsys, pair):
    code, _, err = generate(capsys, pair, "--forced_tokens=0:1", *TEXTS)
    assert code == 0 and "length" not in err


def test_outputs_that_a_deadline_ends_are_counted(capsys, pair):
    code, _, err = generate(capsys, pair, "--deadline=0.000001", *TEXTS)
    assert code == 0
    assert err.endswith("3 of 3 outputs ended by --deadline, before they were whole\n")


def test_inputs_that_are_too_long_are_counted_and_named(capsys, pair):
    target = sd.load(pair / "target", dtype="float32", say=lambda line: None)
    sizes = [len(target.vocabulary.encode(text)) + 1 for text in TEXTS]
    most = sorted(sizes)[0]
    wrong = [number for number, size in enumerate(sizes) if size > most]
    assert len(wrong) == 2
    named = ", ".join(str(number + 1) for number in wrong)
    code, out, err = generate(capsys, pair, f"--max_input_length={most}", *TEXTS)
    assert (code, out) == (2, "") and err.splitlines()[-1] == (
        f"specdec: error: sentences {named} (2 of 3): got up to {max(sizes)} tokens, expected at "
        "most "
        f"max_input_length = {most}; --max_input_length={max(sizes)} takes all"
    )
    assert (
        generate(capsys, pair, f"--max_input_length={max(sizes)}", "--max_new_tokens=2", *TEXTS)[0]
        == 0
    )


@pytest.mark.slow
def test_the_library_names_them_from_zero():
    target, inputs = tiny_t5(0), [[3] * 600, [4, 1], [3] * 513]
    message = (
        r"^inputs 0, 2 \(2 of 3\): got up to 600 tokens, expected at most max_input_length = 512; "
        "max_input_length=600 takes all$"
    )
    with pytest.raises(ValueError, match=message):
        sd.generate(target, inputs)
    with pytest.raises(
        ValueError, match="^input 1: got 2 tokens, .*; max_input_length=2 takes all$"
    ):
        sd.generate(target, [[3], [4, 1]], max_input_length=1)
    with pytest.raises(
        ValueError, match="^sentence 1: got 40 tokens, .* = 8; the model has 32 positions$"
    ):
        check_input_lengths("sentence", [40], 8, 32, 1, "--max_input_length")
    gpt = sd.load(FOLDER, say=lambda line: None)
    most = gpt.config.max_positions
    with pytest.raises(
        ValueError, match=rf"^input 0: got {most} tokens, .*; the model has {most} positions$"
    ):
        sd.generate(gpt, [[3] * most], max_input_length=8)


def test_long_lists_of_numbers_are_cut():
    assert list_in_words("sentence", [4], 9) == "sentence 5"
    assert list_in_words("input", [0, 4], 9, first=0) == "inputs 0, 4 (2 of 9)"
    assert list_in_words("sentence", range(3000), 4000) == (
        "sentences 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2,990 more (3,000 of 4,000)"
    )


def test_many_inputs_without_output_are_few_lines():
    printed = []
    endings = Endings("--max_new_tokens=64", printed.append)

    def output(number):
        return sd.Output(
            None, [], [], [], "error", None, None, NonFiniteLogitsError("the target t", number, 0)
        )

    notes = [endings.add(number, [output(number)]) for number in range(40)]
    assert notes == [{"lost": True}] * 40 and len(printed) == 5
    assert endings.report(40).startswith("sentences 1, 2, ") and len(printed) == 5
