"""NaN and infinite logits, of weights or of a processor, give one clear error."""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiers
from toy_models import HashModel, HashNetwork, Words, tiny_t5

from specdec_jax.checkpoints.converter import save
from specdec_jax.commands import main
from specdec_jax.decoding.continuous_batching import decode_all, decode_stream
from specdec_jax.decoding.generate import advance, generate, prepare
from specdec_jax.decoding.results import NonFiniteLogitsError
from specdec_jax.decoding.stream import stream
from specdec_jax.decoding.trace import trace
from specdec_jax.drafters.cascade import HorizontalCascade, VerticalCascade
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.random_tokens import RandomDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative import distributions
from specdec_jax.speculative.processors import Context
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import Tree

pytestmark = pytest.mark.usefixtures("quick")

V = 16
SPREAD = SamplingConfig(temperature=1.0)
INPUTS = [[3, 1], [4, 7, 1], [5, 1]]
# Row 1 alone gets so far that it meets what is broken.
LIMITS, AT = [2, 6, 3], 3


@flax.struct.dataclass
class BrokenNetwork(HashNetwork):
    """Its logits of the id 2 are `value` from the new token `at` on."""

    at: int = flax.struct.field(pytree_node=False)
    value: float = flax.struct.field(pytree_node=False)

    def decode(self, tokens, positions, cache, valid=None):
        logits, cache = HashNetwork.decode(self, tokens, positions, cache)
        slots = positions[:, None] + jnp.arange(tokens.shape[1])
        broken = (slots >= self.at)[..., None] & (jnp.arange(self.vocab_size) == 2)
        return jnp.where(broken, self.value, logits), cache


class BrokenModel(HashModel):
    def __init__(self, seed, value=np.nan, at=AT):
        super().__init__(V, seed, spread=3.0, likeness=0.5, eos_ids=())
        self.network = BrokenNetwork(self.dist, at, value)


def whole(seed):
    return HashModel(V, seed, spread=3.0, likeness=0.5, eos_ids=())


VERIFIERS = ["plain", "block", "gumbel", "token", "rejection", "lenient", "synthetic"]
CASES = [(name, temperature, np.nan) for temperature in (1.0, 0.0) for name in VERIFIERS]
CASES += [
    ("typical", 1.0, np.nan),
    ("token", 0.0, np.inf),
    ("block", 1.0, np.inf),
    ("plain", 1.0, np.inf),
]


@tiers.parametrize("verifier, temperature, value", CASES, first=3)
def test_a_broken_target_is_reported(verifier, temperature, value):
    options = {"lenient": dict(lenience=0.5), "synthetic": dict(synthetic_alpha=0.7)}.get(
        verifier, {}
    )
    if verifier != "plain":
        options |= dict(verifier=verifier, drafter=ModelDrafter(whole(1)), gamma=4)
    sampling = SamplingConfig(temperature=temperature)
    message = (
        r"input 1: got logits from the target hash that are not finite numbers, at new token 3, "
        r"expected numbers"
    )
    with pytest.raises(NonFiniteLogitsError, match=message):
        generate(BrokenModel(0, value), INPUTS, sampling=sampling, max_new_tokens=LIMITS, **options)


def cascade(model):
    return VerticalCascade(ModelDrafter(model), RandomDrafter(V), 2)


def behind(model):
    return HorizontalCascade(PromptLookupDrafter(), ModelDrafter(model), 1)


def inside(model):
    return VerticalCascade(ModelDrafter(whole(2)), ModelDrafter(model), 2)


def shortlisted(model):
    return ModelDrafter(model, shortlist=V - 2)


@tiers.parametrize(
    "make, verifier, temperature",
    [
        (ModelDrafter, "token", 0.0),
        (ModelDrafter, "block", 1.0),
        (cascade, "token", 1.0),
        (cascade, "gumbel", 1.0),
        (behind, "token", 0.0),
        (behind, "block", 1.0),
        (shortlisted, "token", 0.0),
        (shortlisted, "token", 1.0),
    ],
    first=2,
)
def test_a_broken_drafter_is_reported_and_changes_no_token(make, verifier, temperature):
    target, sampling = whole(0), SamplingConfig(temperature=temperature)
    options = dict(verifier=verifier, sampling=sampling, max_new_tokens=6)
    state, request = prepare(target, INPUTS, drafter=make(BrokenModel(1)), gamma=3, **options)
    while not np.all(state.done):
        most, before = np.maximum(AT + 1 - state.lengths, 0), np.asarray(state.counts.drafted)
        state = advance(request.network, request.drafter, state, np.int32(1))
        if make is ModelDrafter:  # what it cannot say counts neither as drafted nor as rejected
            assert np.all(np.asarray(state.counts.drafted) - before <= most)
    np.testing.assert_array_equal(state.draft_failed > 0, True)
    assert np.all(np.asarray(state.tokens)[:, 1:7] >= 0) and np.all(
        np.isfinite(np.asarray(state.log_probs)[:, 1:7])
    )
    plain = generate(target, INPUTS, **options)
    if temperature == 0 or verifier == "gumbel":  # the same tokens by construction
        np.testing.assert_array_equal(np.asarray(state.tokens)[:, 1:7], plain.tokens)
    with pytest.raises(
        NonFiniteLogitsError,
        match="input 0: got logits from the drafter .* at new token [345], expected",
    ):
        generate(target, INPUTS, drafter=make(BrokenModel(1)), gamma=3, **options)


@pytest.mark.parametrize("tree", [None, Tree.uniform((3, 2, 2, 1))], ids=["chain", "tree"])
def test_what_a_processor_does_after_rejected_tokens_is_no_error(tree):
    """It gives NaN after some prefixes, none of which plain decoding reaches."""
    plain = generate(whole(0), INPUTS, max_new_tokens=8).tokens
    reached = {tuple(row[:end]) for row in plain.tolist() for end in range(1, 9)}

    def process(tokens, lengths, logits):
        new = jnp.where(jnp.arange(9) < lengths[:, None], tokens[:, :9], -1)[:, 1:]
        known = jnp.asarray([[*prefix, *[-1] * (8 - len(prefix))] for prefix in sorted(reached)])
        inside = jnp.any(jnp.all(new[:, None] == known, axis=-1), axis=1) | (lengths == 1)
        return jnp.where(inside[:, None], logits, jnp.nan)

    how = dict(gamma="auto", tree=tree) if tree else dict(gamma=4)
    sampling = SamplingConfig(processor=process)
    for model in (whole(0), whole(1)):  # drafts that are all accepted, and drafts that are not
        found = generate(
            whole(0),
            INPUTS,
            drafter=ModelDrafter(model),
            sampling=sampling,
            max_new_tokens=8,
            **how,
        )
        np.testing.assert_array_equal(found.tokens, plain)
    assert found.stats.accepted < found.stats.drafted


def test_an_error_of_a_drafter_names_the_processor_too():
    """One that gives NaN where the drafter's first token is the most probable one."""
    low, high = (whole(seed) for seed in (0, 1))
    first, other = (
        int(generate(m, INPUTS[:1], max_new_tokens=1).tokens[0, 0]) for m in (low, high)
    )
    assert first != other

    def process(tokens, lengths, logits):
        return jnp.where(jnp.argmax(logits, axis=-1)[:, None] == other, jnp.nan, logits)

    with pytest.raises(NonFiniteLogitsError, match="from the drafter hash or the processor that"):
        generate(
            low,
            INPUTS[:1],
            drafter=ModelDrafter(high),
            gamma=2,
            sampling=SamplingConfig(processor=process),
            max_new_tokens=2,
        )


def test_a_broken_inner_drafter_only_proposes_less():
    """A cascade's inner drafter without finite logits is never accepted; the others decode."""
    found = generate(whole(0), INPUTS, drafter=inside(BrokenModel(1)), gamma=3, max_new_tokens=6)
    np.testing.assert_array_equal(found.tokens, generate(whole(0), INPUTS, max_new_tokens=6).tokens)


@pytest.mark.slow
def test_errors_name_the_input():
    """The error has the input's number in batches, samples, continuous batching and streams."""
    target, options = BrokenModel(0), dict(max_new_tokens=6)
    late = [[3, 1]] * 9 + [[4, 7, 1]]
    limits = [2] * 9 + [6]
    with pytest.raises(NonFiniteLogitsError, match="input 2: .* at new token 3"):
        generate(target, INPUTS, sampling=SPREAD, num_samples=3, max_new_tokens=[2, 3, 6])
    for refill in (True, False):
        with pytest.raises(NonFiniteLogitsError, match="input 9: .* at new token 3"):
            list(decode_stream(target, late, batch_size=2, refill=refill, max_new_tokens=limits))
    with pytest.raises(NonFiniteLogitsError, match="input 40: .* at new token 3"):
        list(decode_all(target, [[3, 1]] * 3, batch_size=1, seed=0, first=40, **options))
    spoken = BrokenModel(0)
    spoken.vocabulary = Words()
    pieces = stream(spoken, ["w3"], max_new_tokens=6)
    with pytest.raises(NonFiniteLogitsError, match="input 0: .* at new token 3"):
        list(pieces)
    with pytest.raises(NonFiniteLogitsError, match="input 0: .* at new token 3"):
        trace(spoken, "w3", drafter=ModelDrafter(whole(1)), **options)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_infinity_from_a_processor_forces_at_every_temperature(temperature):
    """One id with +inf has all the mass; of two each has half, at temperature 0 the first."""

    def one(tokens, lengths, logits):
        return logits.at[:, 5].set(jnp.inf)

    def two(tokens, lengths, logits):
        return one(tokens, lengths, logits).at[:, 9].set(jnp.inf)

    def sample(processor, **options):
        return generate(
            whole(0),
            [[3, 1]] * 40,
            sampling=SamplingConfig(temperature=temperature, processor=processor),
            max_new_tokens=5,
            **options,
        )

    for options in ({}, dict(drafter=ModelDrafter(whole(1)), gamma=3)):
        assert set(sample(one, **options).tokens.ravel().tolist()) == {5}
        found = sample(two, **options)
        if temperature:
            share = np.mean(found.tokens == 5)
            assert set(found.tokens.ravel().tolist()) == {5, 9} and 0.3 < share < 0.7
            np.testing.assert_allclose(found.adjusted_log_probs, np.log(0.5), atol=1e-6)
        else:
            assert set(found.tokens.ravel().tolist()) == {5}


@tiers.parametrize("temperature", [0.0, 1.0], first=1)
def test_nan_from_a_processor_is_reported(temperature):
    def broken(tokens, lengths, logits):
        return jnp.where(lengths[:, None] > 2, jnp.nan, logits)

    sampling = SamplingConfig(temperature=temperature, processor=broken)
    message = "input 0: got logits from the target hash or the processor that .* at new token 2"
    for options in ({}, dict(drafter=ModelDrafter(whole(1)), gamma=3)):
        with pytest.raises(NonFiniteLogitsError, match=message):
            generate(whole(0), [[3, 1]], sampling=sampling, max_new_tokens=5, **options)


TREE = Tree.uniform((2, 2))
FILTERED = {
    "min_p": (dict(temperature=1.0, min_p=0.05), dict(verifier="gumbel")),
    "top_k": (dict(temperature=1.0, top_k=5), dict(verifier="gumbel")),
    "mixed": (dict(temperature=[0.0, 1.0]), dict(verifier="gumbel")),
    "mixed, tree": (dict(temperature=[0.0, 1.0]), dict(tree=TREE)),
}


@tiers.parametrize(
    "case, drafts",
    [
        *((case, False) for case in FILTERED if case != "mixed, tree"),
        *((c, True) for c in FILTERED),
    ],
    first=3,
)
def test_nan_from_a_processor_passes_filters_and_mixed_temperatures(case, drafts):
    """Of a position that has lost its NaN the first id would be the greatest."""
    sampling, options = FILTERED[case]
    if drafts:
        options = options | dict(drafter=ModelDrafter(whole(1)))
        options |= {} if "tree" in options else dict(gamma=3)

    def broken(tokens, lengths, logits):
        return jnp.where(lengths[:, None] > 2, jnp.nan, logits)

    with pytest.raises(NonFiniteLogitsError, match="at new token 2"):
        generate(
            whole(0),
            INPUTS[:2],
            sampling=SamplingConfig(**sampling, processor=broken),
            max_new_tokens=5,
            **options,
        )


@pytest.mark.parametrize("ids", [slice(None), 5])
def test_nan_from_a_processor_is_no_maximum_in_a_wide_vocabulary(ids):
    """A CPU's maximum of many numbers may pass over NaN, and of NaN alone be −inf."""
    wide, two = 4096, jnp.full(2, 2, jnp.int32)

    def broken(tokens, lengths, logits):
        return jnp.where((tokens[:, 1] == 7)[:, None], logits.at[:, ids].set(jnp.nan), logits)

    sampling = SamplingConfig(processor=broken)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, wide)), jnp.float32)
    context = Context(jnp.array([[0, 7, 0], [0, 8, 0]]), two, two, jnp.full((2, 1), -1))
    chosen = jax.jit(
        lambda *given: distributions.argmax(distributions.process(*given, sampling.mode))
    )
    found = chosen(logits, context, sampling.rows(2, wide))
    assert found.ravel().tolist() == [-1, int(np.argmax(logits[1]))]


def damaged(model: LanguageModel) -> LanguageModel:
    params = model.params
    weights = params["decoder"]["layers_0"]["mlp"]["wo"]
    weights["kernel"] = weights["kernel"].at[0, 0].set(jnp.nan)
    return LanguageModel(
        model.config, params, model.vocabulary, eos_ids=model.eos_ids, name="damaged"
    )


@pytest.mark.slow
def test_damaged_weights():
    sound = tiny_t5(0, V)
    with pytest.raises(
        NonFiniteLogitsError,
        match="input 0: got logits from the target damaged .* at new token 0, .* damaged",
    ):
        generate(damaged(sound), INPUTS, max_new_tokens=4)
    with pytest.raises(
        NonFiniteLogitsError, match="input 0: got logits from the drafter damaged .* at new token 0"
    ):
        generate(sound, INPUTS, drafter=ModelDrafter(damaged(sound)), max_new_tokens=4)


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys):
    from specdec_jax.tokenizers.vocabularies import ByteVocabulary

    sound = tiny_t5(0, 300)
    model = damaged(LanguageModel(sound.config, sound.params, ByteVocabulary(0)))
    save(model, tmp_path / "model")
    out = tmp_path / "out.txt"
    flags = f"--target={tmp_path / 'model'}", "--max_new_tokens=4", "--compilation_cache_dir="
    for more in ([], [f"--output_file={out}"], ["--stream"]):
        assert main.main(["generate", *flags, "--non_finite=raise", *more, "one", "two"]) == 2
        captured = capsys.readouterr()
        (line,) = [line for line in captured.err.splitlines() if line.startswith("specdec: error")]
        assert "sentence 1: got logits from the target" in line and "at new token 0" in line
    assert not out.exists()


@pytest.mark.slow
def test_counts_are_reported_under_block_verification():
    """A sampled block-verified decode has no α, but tokens per call and by position."""
    found = generate(
        whole(0),
        INPUTS,
        drafter=ModelDrafter(whole(1)),
        gamma=3,
        sampling=SPREAD,
        verifier="block",
        max_new_tokens=24,
    )
    stats = found.stats
    assert stats.acceptance_rate is None
    assert stats.accepted_per_target_call == stats.accepted / stats.target_calls > 0
    assert stats.tokens_per_target_call == pytest.approx(found.lengths.sum() / stats.target_calls)
    assert stats.accepted_by_position.sum() == stats.accepted
    rows = [row.accepted_per_target_call for row in stats.per_row]
    calls = [row.target_calls for row in stats.per_row]
    assert np.dot(rows, calls) == pytest.approx(stats.accepted)
    assert generate(whole(0), [[]], max_new_tokens=2).stats.accepted_per_target_call is None
