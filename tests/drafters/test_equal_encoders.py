"""Drafters whose encoder is equal to the target's, as distilbart's: it is kept and run once."""

import functools
import gc

import jax
import numpy as np
import pytest
import tiers
from golden_bart import NAMES
from golden_bart import load as load_bart
from golden_models import GOLDEN
from toy_models import compilations, make_student, noisy_copy, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import timing
from specdec_jax.decoding import continuous_batching, learning
from specdec_jax.decoding.continuous_batching import decode_stream
from specdec_jax.drafters import model as model_drafter
from specdec_jax.models import weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.network import Network
from specdec_jax.speculative.drafter import FullDrafter

pytestmark = pytest.mark.usefixtures("quick")
V, EOS = 24, 1
RNG = np.random.default_rng(0)
INPUTS = [[*RNG.integers(2, V, n).tolist(), EOS] for n in (1, 5, 3, 6)]
TARGET = tiny_t5(0, V)


def decode(target, drafter, inputs=INPUTS, **options):
    options = dict(max_new_tokens=10, generation_config=None, key=jax.random.key(3)) | options
    given = {} if drafter is None or "tree" in options else {"gamma": 3}
    return sd.generate(target, inputs, drafter=drafter, **given | options)


def decode_apart(target, drafter, *args, **options):
    """Decodes with a drafter that runs its own encoder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_drafter, "share_encoder", lambda target, model: False)
        patch.setattr(model_drafter, "_paired", {})
        return decode(target, drafter, *args, **options)


def assert_same(target, drafter, *args, **options):
    """Asserts that drafts are what they are with an encoder of the drafter's own."""
    apart = decode_apart(target, drafter, *args, **options)
    assert not drafter.reads_encoder
    shared = decode(target, drafter, *args, **options)
    assert drafter.pair_with(target).reads_encoder
    np.testing.assert_array_equal(shared.tokens, apart.tokens)
    assert repr(shared.stats) == repr(apart.stats)
    assert repr(shared.stats.per_row) == repr(apart.stats.per_row)
    return shared


def list_arrays(network: Network) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(network.params)}


def test_drafts_are_equal_and_the_encoder_is_kept_once():
    student = make_student(TARGET)
    drafter, contents = sd.ModelDrafter(student), student.contents
    encoder = jax.tree.leaves(student.network.params["encoder"])[0]
    result = assert_same(TARGET, drafter)
    assert 0 < result.stats.accepted < result.stats.drafted
    np.testing.assert_array_equal(result.tokens, decode(TARGET, None).tokens)
    ours, theirs = list_arrays(TARGET.network), student.network.params
    assert {id(leaf) for leaf in jax.tree.leaves(theirs["encoder"])} <= ours
    assert id(theirs["token_embedder"]["embedding"]) in ours
    assert id(encoder) not in ours and len(gc.get_referrers(encoder)) <= 1
    network = drafter.pair_with(TARGET).network
    assert "encoder" not in network.params and network.encoder_dim == TARGET.config.emb_dim
    # The model itself is whole, and drafts for others.
    assert student.contents == contents and "encoder" in drafter.network.params
    assert not drafter.pair_with(tiny_t5(5, V)).reads_encoder
    assert drafter.scorable and drafter.pair_with(TARGET).scorable
    assert compilations(lambda: decode(TARGET, sd.ModelDrafter(student))) == 0


def test_the_encoder_of_a_target_alone_is_timed():
    drafter = sd.ModelDrafter(make_student(TARGET)).pair_with(TARGET)
    shape = timing.CallShape(1, 4, 8)
    calls = timing.encoder_variants(TARGET, drafter, [4], shape)
    for call in calls.values():  # of the drafter: keys and values of the encoder's output
        jax.block_until_ready(call())


DIFFERENT = {
    "another encoder": lambda: noisy_copy(TARGET, 0.1),
    "one weight": lambda: change_last_number(make_student(TARGET), "encoder"),
    "one embedding": lambda: change_last_number(make_student(TARGET), "token_embedder"),
    "more layers": lambda: repeat_encoder_layer(),
    "int8": lambda: make_student(TARGET, quantize="int8"),
    "another dtype": lambda: LanguageModel(
        TARGET.config.replace(dtype="bfloat16"),
        jax.tree.map(lambda leaf: leaf.astype("bfloat16"), TARGET.params),
    ),
}


def repeat_encoder_layer():
    params = TARGET.params
    params["encoder"]["layers_1"] = params["encoder"]["layers_0"]
    return LanguageModel(TARGET.config.replace(num_encoder_layers=2), params)


def change_last_number(model, part):
    params = model.params
    *_, last = jax.tree.leaves(params[part])
    changed = jax.tree.map(lambda leaf: leaf.at[-1].add(1e-7) if leaf is last else leaf, params)
    return LanguageModel(model.config, changed)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_another_encoder_is_not_shared(kind):
    drafter = sd.ModelDrafter(DIFFERENT[kind]())
    assert drafter.pair_with(TARGET) is drafter
    before = list_arrays(drafter.network)
    assert drafter.pair_with(TARGET) is drafter and list_arrays(drafter.network) == before


@tiers.parametrize(
    "target_tied, student_tied", [(True, False), (True, True), (False, True)], first=2
)
def test_equal_encoders_of_models_whose_head_is_the_embedding(target_tied, student_tied):
    """They are shared whatever the other model's head is; two such heads are one array, too."""

    def make(tied, layers):
        own = dict(logits_via_embedding=True) if tied else dict(scale_decoder_outputs=True)
        made = tiny_t5(layers, V, layers, **own)
        params, encoder = made.params, TARGET.params["encoder"]
        params |= {"encoder": encoder, "token_embedder": TARGET.params["token_embedder"]}
        return LanguageModel(made.config, params, eos_ids=(EOS,))

    target, student = make(target_tied, 2), make(student_tied, 1)
    contents = student.contents
    assert_same(target, sd.ModelDrafter(student))
    assert student.contents == contents
    ours, theirs = list_arrays(target.network), student.network.params
    assert {id(leaf) for leaf in jax.tree.leaves(theirs["encoder"])} <= ours
    if target_tied and student_tied:
        head = theirs["decoder"]["logits_dense"]["kernel"]
        assert {id(leaf) for leaf in jax.tree.leaves([theirs["token_embedder"], head])} <= ours


SAMPLED = dict(sampling=sd.SamplingConfig(temperature=1.0, top_k=8))
WAYS = {
    "samples": dict(num_samples=2, verifier="block", **SAMPLED),
    "tree": dict(tree=sd.Tree.uniform((2, 2))),
    "dynamic tree": dict(tree=sd.DynamicTree(3, 2, 6)),
    "beams": dict(num_beams=3, gamma=2),
    "policy": dict(gamma=sd.Heuristic(4)),
    "prefix": dict(decoder_prefix=[[3, 4], [], [5], [2]]),
    "stop by a deadline": dict(deadline=60.0),
}


@tiers.parametrize("way", WAYS, first=0)
def test_every_way_of_decoding_drafts_the_same(way):
    drafter = sd.ModelDrafter(make_student(TARGET))
    assert_same(TARGET, drafter, **WAYS[way])


REDUCED = {
    "shortlist": lambda student: sd.ModelDrafter(student, [1, 2, 5, 7, 9, 11, 20]),
    "int8": lambda student: sd.ModelDrafter(student, int8=True),
    "parallel": sd.ParallelDrafter,
}


@tiers.parametrize("kind", REDUCED, first=0)
def test_reduced_drafters_draft_the_same(kind):
    assert_same(TARGET, REDUCED[kind](make_student(TARGET)))


PAIRS = {
    "horizontal": lambda one: sd.HorizontalCascade(one, sd.PromptLookupDrafter(), 2),
    "vertical": lambda one: sd.VerticalCascade(one, sd.PromptLookupDrafter(), 2),
    "best of": lambda one: sd.BestOf(one, sd.ModelDrafter(tiny_t5(5, V))),
}


@tiers.parametrize("kind", PAIRS, first=0)
def test_a_part_of_a_pair_shares_the_encoder(kind):
    pair = PAIRS[kind](sd.ModelDrafter(make_student(TARGET)))
    assert_same(TARGET, pair)
    assert FullDrafter(pair).pair_with(TARGET).reads_encoder


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "w8a8"])
def test_encoders_in_int8_are_compared_as_they_are(quantize):
    def rounded(model):
        bits = 16 if quantize == "int8" else 8
        params = weight_layouts.round_params(model.params, bits, model.config.logits_via_embedding)
        return LanguageModel(model.config, params)

    target, student = rounded(TARGET), rounded(make_student(TARGET, noise=0.02))
    assert target.quantized and student.quantized
    assert_same(target, sd.ModelDrafter(student))


@pytest.mark.slow
def test_streams_and_batches_draft_the_same():
    drafter = sd.ModelDrafter(make_student(TARGET))
    options = dict(gamma=3, max_new_tokens=10, eos_ids=[EOS], generation_config=None)
    plain = decode(TARGET, None, eos_ids=[EOS])
    expected = [row[:n].tolist() for row, n in zip(plain.tokens, plain.lengths)]
    found = dict(decode_stream(TARGET, INPUTS * 2, batch_size=3, drafter=drafter, **options))
    assert [found[number][0].tokens for number in range(8)] == expected * 2
    steps = sd.trace(TARGET, INPUTS[1], drafter=drafter, **options)
    ends = ([] if step.corrected is None else [step.corrected] for step in steps)
    assert sum((step.accepted + end for step, end in zip(steps, ends)), []) == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size, refill", [(3, True), (2, False), (1, True)])
def test_a_part_of_a_pair_with_a_history_shares_the_encoder(batch_size, refill, monkeypatch):
    """The history gives the loop another pair after every output."""
    asked, before = [], learning.update_drafter

    def update_drafter(*given):
        plan = before(*given)
        asked.append(plan.drafter.reads_encoder)
        return plan

    monkeypatch.setattr(continuous_batching, "update_drafter", update_drafter)
    student = sd.ModelDrafter(make_student(TARGET))
    history = sd.SuffixHistory(TARGET, sd.HorizontalCascade(sd.SuffixDrafter(), student, 2))
    plain = decode(TARGET, None, eos_ids=[EOS])
    expected = [row[:n].tolist() for row, n in zip(plain.tokens, plain.lengths)]
    options = dict(batch_size=batch_size, refill=refill, gamma=3, max_new_tokens=10, eos_ids=[EOS])

    def decode_all():
        found = dict(decode_stream(TARGET, INPUTS * 2, learner=history, **options))
        assert [found[number][0].tokens for number in range(8)] == expected * 2

    decode_all()
    assert len(asked) > 2 and all(asked)
    assert history.outputs == 8 and compilations(decode_all) == 0


@functools.cache
def load(family, name):
    if family == "bart":
        return load_bart(name)
    return sd.load(GOLDEN / "hf_gemma" / name, "float32", say=lambda line: None)


FAMILIES = [*(("bart", name) for name in NAMES), ("gemma", "t5gemma_capped"), ("gemma", "t5gemma2")]


@pytest.mark.slow
@pytest.mark.parametrize("family,name", FAMILIES)
def test_every_family_drafts_the_same(family, name):
    target = load(family, name)
    numbers = np.load(GOLDEN / f"hf_{family}" / name / "io.npz")
    rows = [row[:n].tolist() for row, n in zip(numbers["inputs"], numbers["input_lengths"])]
    drafter = sd.ModelDrafter(make_student(target))
    for way in (dict(), dict(tree=sd.Tree.uniform((2, 2))), dict(num_beams=3, gamma=2)):
        assert_same(target, drafter, rows, **way)
