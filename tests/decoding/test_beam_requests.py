"""Beam search as a request: errors, several inputs, continuous batching, the command line."""

import json

import command_line
import numpy as np
import pytest
from toy_models import HashModel, Words, compilations

import specdec_jax as sd

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")

V, LIMIT = 12, 8
TARGET = HashModel(V, 0, vocabulary=Words())
DRAFTER = sd.ModelDrafter(HashModel(V, 1, likeness=0.8, vocabulary=Words()))
RNG = np.random.default_rng(0)
INPUTS = [RNG.integers(2, V, length).tolist() for length in [0, *RNG.integers(1, 9, 6)]]
BEAMS = dict(num_beams=3, num_return_sequences=2, max_new_tokens=LIMIT)
DRAFTED = dict(BEAMS, drafter=DRAFTER, gamma=2)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_beams=0), "num_beams: got 0, expected an integer from 1"),
        (dict(num_beams=True), "num_beams: got True, expected an integer from 1"),
        (dict(num_beams=V + 1), "num_beams: got 13 for 12 ids, of which 1 end a sequence"),
        (
            dict(num_return_sequences=4),
            "num_return_sequences: got 4, expected an integer from 1 to 3 = num_beams",
        ),
        (dict(beam_width=2, drafter=DRAFTER), "beam_width: got 2, expected an integer from 3"),
        (dict(beam_width=8), "beam_width: got 8 where nothing is drafted, expected None"),
        (
            dict(beam_width=8, drafter=DRAFTER, gamma=0),
            "beam_width: got 8 where nothing is drafted, expected None",
        ),
        (dict(beam_style="hf"), "beam_style: got 'hf', expected one of t5x, huggingface"),
        (
            dict(length_penalty=-1.0),
            "length_penalty: got -1.0, expected a finite number of at least 0",
        ),
        (dict(length_penalty=float("nan")), "length_penalty: got nan, expected a finite number"),
        (dict(early_stopping=True), "early_stopping: got True with beam_style 't5x'"),
        (
            dict(early_stopping="later", beam_style="huggingface"),
            "early_stopping: got 'later', expected False, True",
        ),
        (
            dict(sampling=sd.SamplingConfig(temperature=1.0)),
            "temperature: got 1.0 with num_beams, expected 0",
        ),
        (
            dict(verifier="lenient", lenience=0.5, drafter=DRAFTER),
            "verifier: got 'lenient' with num_beams",
        ),
        (dict(num_samples=2), "num_samples: got 2 with num_beams, expected 1"),
        (dict(stop=["w3"]), "stop: got .'w3'. with num_beams"),
        (dict(deadline=1.0), "deadline: got 1.0 with num_beams, expected None"),
        (
            dict(gamma=sd.Heuristic(maximum=4), drafter=DRAFTER),
            "gamma: got Heuristic.* with num_beams, expected 'auto'",
        ),
        (
            dict(gamma=[1] * len(INPUTS), drafter=DRAFTER),
            "gamma: got .* with num_beams, expected 'auto' or one integer",
        ),
        (
            dict(drafter=sd.RandomDrafter(V)),
            "drafter: got RandomDrafter with num_beams, expected one that drafts for",
        ),
        (
            dict(num_beams=None),
            "num_return_sequences: got 2 without num_beams, expected 1 .of samples: num_samples",
        ),
    ],
)
def test_bad_options_are_rejected_before_anything_compiles(options, message):
    def rejected():
        with pytest.raises(ValueError, match=message):
            sd.generate(TARGET, INPUTS, **{**BEAMS, **options})

    assert not compilations(rejected)


@pytest.mark.parametrize(
    "entry",
    [
        lambda **more: list(sd.stream(TARGET, INPUTS, **more)),
        lambda **more: sd.trace(TARGET, "w3 w4", **more),
    ],
    ids=["stream", "trace"],
)
def test_what_is_seen_while_it_is_decoded_has_no_beams(entry):
    with pytest.raises(
        ValueError,
        match=r"num_beams: got 3, expected None: stream\(\), trace\(\) and prepare\(\) do not",
    ):
        entry(num_beams=3)


def test_results_of_several_inputs():
    """Every field of a result has a row for each hypothesis; nothing comes of no input."""
    found = sd.generate(TARGET, [*INPUTS, None], **DRAFTED)
    rows = 2 * (len(INPUTS) + 1)
    for values in (
        found.texts,
        found.tokens,
        found.lengths,
        found.log_probs,
        found.scores,
        found.finish_reasons,
    ):
        assert len(values) == rows
    assert len(found.stats.per_row) == len(INPUTS) + 1
    assert found.finish_reasons[-2:] == ["empty", "empty"] and found.lengths[-2:].tolist() == [0, 0]
    sums = np.sum(found.log_probs, axis=1)
    reasons = np.array(found.finish_reasons)
    # Live beams are what there is where none has finished: they have no penalty.
    expected = np.where(reasons == "eos", sums / ((5 + found.lengths) / 6) ** 0.6, sums)
    np.testing.assert_allclose(found.scores, np.where(reasons == "none", -1e7, expected), rtol=1e-5)
    np.testing.assert_array_equal(found.adjusted_log_probs, found.log_probs)
    assert set(found.finish_reasons[:-2]) == {"eos", "length", "none", "empty"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [
        dict(repetition_penalty=1.4, min_new_tokens=3),
        dict(no_repeat_ngram=2, forbidden_tokens=(5,), logit_bias={3: 1.0}),
        dict(forced_tokens={1: 6}),
    ],
    ids=["penalties", "n-grams", "synthetic"],
)
@pytest.mark.parametrize("style", ["t5x", "huggingface"])
def test_processors_see_every_beams_own_prefix(style, sampling):
    options = dict(BEAMS, sampling=sd.SamplingConfig(**sampling), beam_style=style)
    plain = sd.generate(TARGET, INPUTS, **options)
    found = sd.generate(TARGET, INPUTS, drafter=DRAFTER, gamma=2, **options)
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-5)
    bare = sd.generate(TARGET, INPUTS, **dict(options, sampling=sd.SamplingConfig()))
    assert np.any(bare.tokens != plain.tokens)
    for row, length in zip(plain.tokens, plain.lengths):
        row = row[:length].tolist()
        if "no_repeat_ngram" in sampling:
            pairs = list(zip([0, *row], row))
            assert len(set(pairs)) == len(pairs) and 5 not in row
        if "min_new_tokens" in sampling:
            assert length > 3 or not length
        if "forced_tokens" in sampling and length > 1:
            assert row[1] == 6


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 3])
def test_long_jobs_give_what_generate_gives(batch_size):
    whole = sd.generate(TARGET, INPUTS, **DRAFTED)
    found = dict(sd.decode_stream(TARGET, INPUTS, batch_size=batch_size, **DRAFTED))
    assert sorted(found) == list(range(len(INPUTS)))
    for number, outputs in found.items():
        for place, output in enumerate(outputs):
            row = 2 * number + place
            assert output.tokens == whole.tokens[row, : whole.lengths[row]].tolist()
            assert (
                output.text == whole.texts[row]
                and output.finish_reason == whole.finish_reasons[row]
            )
            np.testing.assert_allclose(output.score, whole.scores[row], rtol=1e-6)


def test_nothing_compiles_after_a_warm_up():
    options = {name: value for name, value in DRAFTED.items()}
    sd.warm_up(TARGET, batch_sizes=(2,), max_input_length=8, **options)

    def run(ids):
        return sd.generate(TARGET, ids, **options)

    assert not compilations(lambda: (run(INPUTS[1:3]), run(INPUTS[3:5])))
    assert not compilations(lambda: sd.generate(TARGET, INPUTS[1:3], length_penalty=1.0, **options))


@pytest.mark.slow
def test_the_command_line(pair, specdec):
    """Prints the outputs of every sentence, the best first; a file gets the same."""
    flags = ["--num_beams=3", "--num_return_sequences=2", "--json"]

    def decode(*argv):
        return specdec("generate", *argv, *command_line.SENTENCES)[1].splitlines()

    records = [json.loads(line) for line in decode(*command_line.MODELS, *flags)]
    assert len(records) == 2 * len(command_line.SENTENCES)
    for best, other in zip(records[::2], records[1::2]):
        assert best["score"] >= other["score"]
    plain = [flag for flag in command_line.MODELS if "drafter" not in flag and "gamma" not in flag]
    again = [json.loads(line) for line in decode(*plain, *flags)]
    assert [record["tokens"] for record in again] == [record["tokens"] for record in records]
    decode(*command_line.MODELS, *flags[:2], f"--output_file={pair / 'outputs'}")
    texts = (pair / "outputs").read_text(encoding="utf-8").splitlines()
    assert texts == [record["text"] for record in records]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--num_beams=4", "--temperature=1"], "temperature: got 1.0 with num_beams, expected 0"),
        (["--num_beams=4", "--stop=x"], "stop: got ('x',) with num_beams, expected ()"),
        (["--num_beams=4", "--stream"], "stream: got True with num_beams, expected none"),
        (["--num_beams=4", "--num_samples=2"], "num_samples: got 2 with num_beams"),
        (
            ["--length_penalty=1", "--generation_config=none"],
            "length_penalty: got 1.0 without num_beams, expected None",
        ),
        (
            ["--num_beams=4", "--beam_style=huggingface", "--early_stopping=yes"],
            "early_stopping: got 'yes', expected",
        ),
    ],
)
def test_flags_that_mean_nothing_are_rejected(specdec, flags, message):
    code, _, err = specdec("generate", "--target=nowhere", *flags, "A sentence.")
    assert code == 2 and message in err
