"""Decoder-only models beside transformers' GPT-2: logits, prompts, files and errors."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpt_inputs import IO, PROMPTS, decode, decode_golden, golden, tiny
from gpt_models import FOLDER
from toy_models import HashModel, compilations, noisy_copy

import specdec_jax as sd
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.decoding.generate import prepare
from specdec_jax.decoding.request import Plan
from specdec_jax.models import heads
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import count_slots
from specdec_jax.tokenizers import huggingface_folders

pytestmark = pytest.mark.usefixtures("quick")
RECORDS = json.loads((FOLDER / "ids.json").read_text(encoding="utf-8"))
GREEDY = np.where(IO["greedy"] < 0, 0, IO["greedy"])


DRAFTERS = {
    "plain": lambda model: None,
    "model": lambda model: sd.ModelDrafter(noisy_copy(model, 0.05)),
    "lookup": lambda model: sd.PromptLookupDrafter(max_match=1),
    "exit": lambda model: sd.EarlyExitDrafter(model, 1),
}


# Against Hugging Face.


def test_logits_of_whole_sequences_and_of_their_ends():
    logits = golden().logits(None, IO["decoder_tokens"])
    np.testing.assert_allclose(logits, IO["logits"], rtol=0, atol=1e-4)
    rest = golden().logits(IO["decoder_tokens"][:, :5], IO["decoder_tokens"][:, 5:])
    np.testing.assert_allclose(rest, IO["logits"][:, 5:], rtol=0, atol=1e-4)
    # Prompts of several lengths: the ids after each are those of `decoder_tokens` again.
    lengths = np.array([3, 1, 6, 2])
    tail = np.stack(
        [row[length : length + 4] for row, length in zip(IO["decoder_tokens"], lengths)]
    )
    expected = np.stack([row[length : length + 4] for row, length in zip(IO["logits"], lengths)])
    rest = golden().logits(
        np.where(np.arange(7) < lengths[:, None], IO["decoder_tokens"][:, :7], 999), tail, lengths
    )
    np.testing.assert_allclose(rest, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_of_prompts_of_different_lengths(name):
    """One batch is padded on the right; Hugging Face decoded each alone, padded on the left."""
    assert IO["greedy_margin"] > 0.01 and len(set(IO["input_lengths"].tolist())) == 4
    np.testing.assert_array_equal(IO["greedy"], IO["greedy_alone"])
    run = functools.partial(
        decode, golden(), IO["inputs"], DRAFTERS[name](golden()), max_new_tokens=16
    )
    result = run(input_lengths=IO["input_lengths"], eos_ids=None)
    np.testing.assert_array_equal(result.tokens, GREEDY)
    if name != "plain":
        assert 0 < result.stats.accepted < result.stats.drafted
    early = run(input_lengths=IO["input_lengths"], eos_ids=int(IO["early_eos_id"]))
    np.testing.assert_array_equal(
        early.tokens, np.where(IO["greedy_early"] < 0, 0, IO["greedy_early"])
    )
    np.testing.assert_array_equal(early.lengths, (IO["greedy_early"] >= 0).sum(axis=1))


def test_log_probs_are_those_of_the_whole_sequence():
    result = decode(golden(), PROMPTS, max_new_tokens=16)
    for row, prompt in enumerate(PROMPTS):
        whole = np.array([[*prompt, *result.tokens[row]]])
        dist = jax.nn.log_softmax(
            golden().logits(None, np.pad(whole, ((0, 0), (0, 40 - whole.shape[1]))))
        )[0]
        places = np.arange(len(prompt) - 1, whole.shape[1] - 1)
        np.testing.assert_allclose(
            result.log_probs[row], dist[places, whole[0, places + 1]], atol=1e-4
        )


def test_an_empty_prompt_is_the_start_token_and_none_is_nothing():
    result = decode_golden([[], None], eos_ids=None)
    np.testing.assert_array_equal(result.tokens[0], IO["unconditional"])
    assert result.finish_reasons == ["length", "empty", "length", "empty"]
    assert result.lengths.tolist() == [16, 0, 16, 0] and result.texts[1] == ""
    assert prepare(HashModel(16), [[5, 1], None], max_new_tokens=2)[1].empty.tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_tokenizers_of_both_forms(form, tmp_path):
    files = ("tokenizer.json",) if form == "tokenizer.json" else ("vocab.json", "merges.txt")
    for name in files:
        shutil.copy(FOLDER / name, tmp_path)
    vocabulary = huggingface_folders.open_folder(tmp_path, (287,))
    assert (vocabulary.size, vocabulary.eos_ids) == (288, (287,))
    assert vocabulary.fingerprint() == golden().vocabulary.fingerprint()
    for record in RECORDS:
        assert vocabulary.encode(record["text"]) == record["ids"]
        assert vocabulary.decode(record["ids"]) == record["text"].replace("<|endoftext|>", "")


def test_added_tokens_beside_merges(tmp_path):
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(FOLDER / name, tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<turn>": 289, "<pause>": 288}))
    vocabulary = huggingface_folders.open_folder(tmp_path, (287,))
    assert vocabulary.encode("<turn>The<pause>") == [289, *vocabulary.encode("The"), 288]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<turn>": 300}))
    with pytest.raises(ValueError, match="the added token '<turn>' with id 300, expected 288"):
        huggingface_folders.open_folder(tmp_path, (287,))
    (tmp_path / "merges.txt").write_text("no merge of pieces\n")
    with pytest.raises(ValueError, match="vocab.json: got no readable vocabulary with merges"):
        huggingface_folders.open_folder(tmp_path, (287,))


# Through the loop.


@pytest.mark.slow
def test_id_0_is_an_id():
    """In prompts, arrays without lengths among them, and in outputs."""
    model, rows = tiny(), [[5, 7, 0, 0], [0, 0, 0, 0], [5, 7, 0, 3], [1, 0, 0, 0]]
    expected = decode(model, rows)
    np.testing.assert_array_equal(decode(model, np.array(rows)).tokens, expected.tokens)
    assert not np.array_equal(expected.tokens[0], decode(model, [[5, 7]]).tokens[0])
    zeros = decode(
        model, rows, sd.ModelDrafter(model), sampling=SamplingConfig(logit_bias={0: 1e3})
    )
    assert not zeros.tokens.any() and zeros.lengths.tolist() == [12] * 4
    assert np.all(zeros.log_probs < 0) and zeros.finish_reasons == ["length"] * 4
    assert zeros.stats.acceptance_rate == 1


@pytest.mark.slow
def test_what_lies_past_a_prompt_does_not_matter():
    """To a target, and to a drafter with a short head and weights of 8 bits."""
    rng, lengths = np.random.default_rng(1), np.array([2, 5, 3, 1])
    inputs, junk = rng.integers(0, 24, (2, 4, 7))
    drafter = sd.ModelDrafter(tiny(1), shortlist=range(3, 24), int8=True)
    clean, dirty = (
        decode(
            tiny(),
            np.where(np.arange(7) < lengths[:, None], inputs, rest),
            drafter,
            input_lengths=lengths,
        )
        for rest in (0, junk)
    )
    assert clean.stats.drafted
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)
    np.testing.assert_allclose(clean.log_probs, dirty.log_probs, atol=1e-5)
    for row, length in enumerate(lengths):
        alone = decode(tiny(), [inputs[row, :length]])
        np.testing.assert_array_equal(alone.tokens[0], clean.tokens[row])


def test_samples_share_their_prompt():
    """Four rows each time: of four prompts, and of two, whose cache is repeated."""
    prompts, key = [[3, 4, 5], [9, 3], [0, 0], [7]], jax.random.key(3)
    spread, narrow = SamplingConfig(temperature=1.0), SamplingConfig(temperature=1e-4)

    def run(number, config):
        return sd.generate(
            tiny(),
            prompts[: 4 // number],
            num_samples=number,
            sampling=config,
            max_new_tokens=12,
            eos_ids=(),
            key=key,
        ).tokens

    one, several = run(1, spread), run(2, spread)
    np.testing.assert_array_equal(several[::2], one[:2])
    assert len({tuple(row) for row in several.tolist()}) == 4
    np.testing.assert_array_equal(
        run(2, narrow), np.repeat(decode(tiny(), prompts).tokens[:2], 2, axis=0)
    )
    one_row = jnp.arange(6.0).reshape(1, 3, 2)  # without batch axis
    np.testing.assert_array_equal(
        KVCache(one_row, one_row).repeated(2).key, np.stack([one_row, one_row])
    )


def test_processors_see_the_prompt():
    """Against the argmax of adjusted logits of the whole sequence, id by id."""
    config = SamplingConfig(repetition_penalty=3.0, no_repeat_ngram=2)
    result = decode_golden([[3, 4, 5, 3]], sampling=config)
    sequence = [3, 4, 5, 3]
    for token in result.tokens[0]:
        whole = np.array([sequence + [0] * (24 - len(sequence))])
        logits = np.array(golden().logits(None, whole)[0, len(sequence) - 1])
        seen = list(set(sequence))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 3, logits[seen] * 3)
        logits[[b for a, b in zip(sequence, sequence[1:]) if a == sequence[-1]]] = -np.inf
        assert token == np.argmax(logits)
        sequence.append(token)


def test_heads_draft_from_the_states():
    config = sd.HeadsConfig(2, 16, 24, share_head=True)
    drafter = sd.HeadsDrafter.for_target(
        tiny(), config, heads.init_params(config, jax.random.key(0))
    )
    result = decode(tiny(), [[3, 4, 5, 3, 4], [7]], drafter)
    np.testing.assert_array_equal(result.tokens, decode(tiny(), [[3, 4, 5, 3, 4], [7]]).tokens)
    assert result.stats.drafted


@pytest.mark.parametrize("drafter", [sd.PromptLookupDrafter(), sd.AssistedNGramDrafter()])
def test_copies_come_from_the_prompt(drafter):
    """The first draft, of which nothing has been decoded yet."""
    state, request = prepare(
        tiny(), [[0, 5, 6, 7, 8, 0, 5], [9]], drafter=drafter, gamma=3, max_new_tokens=12
    )

    def draft(state, wanted):
        return request.drafter.draft(state.draft_state, state, wanted)[1]

    found = jax.jit(draft)(state, np.array([3, 0], np.int32))
    assert found.tokens[0].tolist() == [6, 7, 8] and found.num_drafted.tolist() == [3, 0]


def test_after_warm_up_nothing_compiles():
    model, options = tiny(), dict(max_new_tokens=9)
    assert sd.warm_up(model, max_input_length=12, **options) == 2

    def prompts_of_every_length():
        for length in range(13):
            sd.generate(model, [[3] * length], key=jax.random.key(0), **options)

    assert compilations(prompts_of_every_length) == 0


@pytest.mark.slow
@pytest.mark.parametrize("refill", [True, False])
def test_prompts_of_long_jobs_are_padded_to_their_own_length(monkeypatch, refill):
    """Every prompt gives what it gives in one batch; states of short ones have fewer slots."""
    rng, widths = np.random.default_rng(2), []
    prompts = [
        rng.integers(0, 24, length).tolist()
        for length in [12, 3, 0, 9, 5, 11, 1, 10, 8, 12, 2, 11, 10, 4, 9, 6, 8]
    ]
    options = dict(max_new_tokens=6, eos_ids=(23,))
    expected = sd.generate(tiny(), prompts, **options)
    arguments = Plan.arguments
    monkeypatch.setattr(
        Plan,
        "arguments",
        lambda plan, *given: (
            found := arguments(plan, *given),
            widths.append((found[4].tokens.shape[1], found[3])),
        )[0],
    )
    found = dict(sd.decode_stream(tiny(), prompts, batch_size=2, refill=refill, **options))
    for row, length in enumerate(expected.lengths):
        assert found[row][0].tokens == expected.tokens[row, :length].tolist()
    assert set(widths) == {(8, count_slots(8 + 6, 0)), (12, count_slots(12 + 6, 0))}


@pytest.mark.slow
def test_streamed_text_is_the_text():
    drafter, prompts = (
        DRAFTERS["model"](golden()),
        [golden().vocabulary.encode("The ferry"), None, None, PROMPTS[0]],
    )
    expected = decode(golden(), prompts, drafter, max_new_tokens=16)
    pieces = list(
        sd.stream(golden(), prompts, drafter=drafter, gamma=3, max_new_tokens=16, eos_ids=())
    )
    for row in range(4):
        assert "".join(piece.text for piece in pieces if piece.row == row) == expected.texts[row]
        ids = sum((piece.tokens for piece in pieces if piece.row == row), [])
        assert ids == expected.tokens[row, : expected.lengths[row]].tolist()
