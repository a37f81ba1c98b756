"""Every option of `generate` and `SamplingConfig` has its effect or is rejected.

None compiles anew that need not.
"""

import dataclasses
import functools
import inspect

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import EchoModel, HashModel, HashNetwork, Words, compilations
from toy_options import (
    ALL,
    DRAFT,
    EOS,
    FILTERS,
    GAMMA,
    INPUTS,
    LIMIT,
    PREFIXES,
    PROCESSORS,
    TARGET,
    B,
    V,
    assert_log_probs,
    decode,
    ids_of,
    of_row,
    slow_greedy,
)

from specdec_jax.commands.generate import GenerateOptions
from specdec_jax.decoding.checks import SamplingChanges, UnsupportedCombination
from specdec_jax.decoding.generate import _decode, advance, generate
from specdec_jax.decoding.generation_config import GenerationConfig
from specdec_jax.decoding.stream import stream
from specdec_jax.decoding.trace import trace
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.strategy import prefill
from specdec_jax.speculative.trees import Tree

pytestmark = pytest.mark.usefixtures("quick")

# --- Filters and rows ---


@pytest.mark.slow
def test_the_drafter_is_verified_by_the_distribution_it_drew_from():
    """Drafter = target: under all processors and filters everything is accepted."""
    result = generate(
        TARGET,
        INPUTS,
        drafter=ModelDrafter(TARGET),
        gamma=GAMMA,
        sampling=ALL,
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        eos_ids=EOS,
        verifier="token",
    )
    assert result.stats.acceptance_rate == 1.0 and result.stats.accepted > 10
    assert_log_probs(result, PROCESSORS["all"])


@pytest.mark.slow
def test_limits_of_the_filters_are_argmax_and_rows_are_their_own():
    """T → 0, k = 1, p → 0 and min-p = 1 each leave the argmax, in one program.

    Processors are applied first, and permuted rows give permuted outputs.
    """
    sampled = decode(ALL, key=jax.random.key(3))
    assert_log_probs(sampled, PROCESSORS["all"])
    wanted = [slow_greedy(row, of_row(PROCESSORS["all"], row)) for row in range(B)]
    for limit in (dict(temperature=1e-6), dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        assert ids_of(decode(dataclasses.replace(ALL, **limit), key=jax.random.key(3))) == wanted
    assert ids_of(sampled) != wanted
    assert ids_of(decode(ALL, key=jax.random.key(3))) == ids_of(sampled), "the same key twice"
    order = np.array([4, 2, 0, 5, 1, 3])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), order)
    turned = {
        n: tuple(v[i] for i in order)
        for n, v in PROCESSORS["all"].items()
        if isinstance(v, tuple) and len(v) == B
    }
    result = generate(
        TARGET,
        [INPUTS[i] for i in order],
        drafter=ModelDrafter(DRAFT),
        gamma=[GAMMA[i] for i in order],
        sampling=dataclasses.replace(ALL, **turned),
        decoder_prefix=[PREFIXES[i] for i in order],
        max_new_tokens=LIMIT,
        eos_ids=EOS,
        key=keys,
    )
    assert ids_of(result) == [ids_of(sampled)[i] for i in order]
    np.testing.assert_array_equal(result.adjusted_log_probs, sampled.adjusted_log_probs[order])


@pytest.mark.slow
def test_padding_changes_nothing():
    """A mate with a longer limit, input and prefix makes every buffer longer."""
    config = SamplingConfig(temperature=1.0, repetition_penalty=1.5, no_repeat_ngram=2)
    options = dict(
        drafter=ModelDrafter(DRAFT), sampling=config, gamma=3, eos_ids=EOS, key=jax.random.key(1)
    )
    short = generate(TARGET, INPUTS, decoder_prefix=PREFIXES, max_new_tokens=LIMIT, **options)
    inputs, prefixes = [*INPUTS[:5], [6] * 10], [*PREFIXES[:5], [2] * 9]
    long = generate(
        TARGET, inputs, decoder_prefix=prefixes, max_new_tokens=[LIMIT] * 5 + [30], **options
    )
    assert ids_of(short)[:5] == ids_of(long)[:5]


# --- Every option has its effect ---

BASE = dict(
    target=TARGET,
    inputs=INPUTS[:2],
    drafter=ModelDrafter(DRAFT),
    gamma=2,
    sampling=SamplingConfig(temperature=1.0),
    max_new_tokens=7,
)
ARRAY = dict(inputs=np.array([[3, 4, 1], [7, 1, 2]], np.int32))
SYNTHETIC = dict(verifier="synthetic", synthetic_alpha=1.0)
LENIENT, TYPICAL = dict(verifier="lenient", lenience=1.0), dict(verifier="typical")
CHANGES = {  # option: (changes to BASE, the option's other value)
    "drafter": ({}, None),
    "gamma": ({}, [2, 1]),
    "tree": (dict(gamma="auto"), Tree.uniform((2, 1))),
    "sampling": ({}, SamplingConfig(temperature=3.0)),
    "drafter_sampling": ({}, SamplingConfig(temperature=0.1)),
    "verifier": ({}, "gumbel"),
    "lenience": (LENIENT, [1.0, 0.01]),
    "typical_epsilon": (TYPICAL, [1e-4, 0.09]),
    "typical_delta": (TYPICAL, 1e-4),
    "synthetic_alpha": (SYNTHETIC, [1.0, 1e-6]),
    "max_new_tokens": ({}, 5),
    "key": ({}, jax.random.key(1)),
    "num_samples": ({}, 2),
    "input_lengths": (ARRAY, [2, 3]),
    "attention_mask": (ARRAY, [[1, 1, 0], [1, 1, 1]]),
    "decoder_prefix": ({}, [[4], [5, 6]]),
    "eos_ids": (dict(eos_ids=()), (2, 3, 4)),
    "stop": (dict(eos_ids=()), ["w5", "w6"]),
    "generation_config": (
        dict(sampling=None),
        ModelDefaults(suppress_tokens=tuple(range(2, 9))),
    ),
}
REFUSING = {
    "max_input_length": 2,
    "deadline": -1.0,
    "non_finite": "never",
    # What is of a beam search means nothing without one.
    "num_beams": 0,
    "length_penalty": 1.0,
    "beam_style": "huggingface",
    "early_stopping": True,
    "num_return_sequences": 2,
    "beam_width": 4,
    # This model has no languages.
    "source_language": "en_XX",
    "target_language": "de_DE",
}  # what they do is tested where they are rejected, in test_stop or in test_beam_requests


@functools.cache
def base(name: str):
    """The result with the unchanged options that `CHANGES[name]` starts from."""
    same = next(
        other
        for other, (changes, _) in CHANGES.items()
        if changes is CHANGES[name][0] or changes == CHANGES[name][0]
    )
    return generate(**{**BASE, **CHANGES[name][0]}) if same == name else base(same)


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_has_an_effect(name):
    changes, value = CHANGES[name]
    result, unchanged = generate(**{**BASE, **changes, name: value}), base(name)
    both = (ids_of(result), result.stats.drafted), (ids_of(unchanged), unchanged.stats.drafted)
    assert both[0] != both[1]
    if name in ("lenience", "typical_epsilon", "synthetic_alpha"):
        same = [one == other for one, other in zip(ids_of(result), ids_of(unchanged))]
        assert sorted(same) == [False, True], "each row has its own"


def test_every_option_is_in_one_of_the_tables():
    parameters = set(inspect.signature(generate).parameters) - {"target", "inputs", "config"}
    assert parameters == {*CHANGES, *REFUSING}
    of_call = {"drafter", "key", "input_lengths", "attention_mask", "decoder_prefix"}
    options = {field.name for field in dataclasses.fields(GenerationConfig)}
    assert parameters == options | of_call
    fields = {field.name for field in dataclasses.fields(SamplingConfig)}
    assert fields == {*FILTERS, *(name for options in PROCESSORS.values() for name in options)}


def test_the_command_line_passes_every_option_on():
    values = dict(
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        no_repeat_ngram=2,
        min_new_tokens=1,
        forbidden_tokens=(3,),
        logit_bias=("5:1.5",),
        forced_tokens=("0:4",),
    )
    no_flag = {"vocabulary_mask", "processor", "forbidden_sequences"}
    assert {field.name for field in dataclasses.fields(SamplingConfig)} - no_flag == set(values)
    expected = SamplingConfig(**{**values, "logit_bias": {5: 1.5}, "forced_tokens": {0: 4}})
    others = dict(
        verifier="lenient", lenience=0.5, typical_epsilon=0.1, typical_delta=0.2, max_new_tokens=9
    )
    found = GenerateOptions(**values, **others, max_input_length=11).configuration()
    fields = {name: getattr(expected, name) for name in values}
    how = {"max_input_length": 11, "sampling": SamplingChanges(fields), "non_finite": "report"}
    assert found.changed_fields() == others | how


def test_lenience_one_is_strict():
    strict = generate(**BASE, verifier="token")
    assert ids_of(base("lenience")) == ids_of(strict)
    np.testing.assert_array_equal(base("lenience").log_probs, strict.log_probs)


# --- What is rejected ---


def test_a_text_that_is_far_too_long_is_rejected_by_its_length():
    with pytest.raises(
        ValueError, match="input 1: got a text of 1,200,000 characters, expected at most 1,000,000"
    ):
        generate(EchoModel(Words()), ["w2", "w2 " * 400_000])


COLD, WARM = SamplingConfig(), SamplingConfig(temperature=1.0)
NO_WORDS = HashModel(V)
COMBINATIONS = [
    (dict(lenience=0.5), "lenience: got 0.5 with verifier='block', expected 'lenient'"),
    (
        dict(typical_epsilon=0.1),
        "typical_epsilon: got 0.1 with verifier='block', expected 'typical'",
    ),
    (
        dict(verifier="lenient", lenience=0.5, typical_delta=0.1),
        "typical_delta: got 0.1 with verifier='lenient'",
    ),
    (dict(verifier="lenient"), "lenience: got none with verifier='lenient', expected a number"),
    (
        dict(verifier="lenient", lenience=0.5, drafter=None),
        "verifier: got 'lenient' for plain decoding, expected a drafter",
    ),
    (dict(verifier="typical", gamma=0), "verifier: got 'typical' for plain decoding"),
    (
        dict(verifier="typical", sampling=COLD),
        "temperature: got 0.0 with verifier='typical', expected more than 0",
    ),
    (
        dict(verifier="typical", sampling=SamplingConfig(temperature=[1.0, 0.0])),
        "with verifier='typical', expected more",
    ),
    (dict(num_samples=2, sampling=COLD), "num_samples: got 2 at temperature 0, expected 1"),
    (
        dict(sampling=SamplingConfig(min_new_tokens=8)),
        "min_new_tokens: got 8, expected at most max_new_tokens = 7",
    ),
    (
        dict(max_new_tokens=[7, 2], sampling=SamplingConfig(min_new_tokens=[7, 3])),
        "min_new_tokens: got .7, 3., expected",
    ),
    (
        dict(sampling=SamplingConfig(forced_tokens={7: 3})),
        "forced_tokens: got place 7, expected below max_new_tokens = 7",
    ),
    *(
        (
            dict(max_new_tokens=[7, 2], sampling=SamplingConfig(forced_tokens=forced)),
            "forced_tokens: got place 5, expected below max_new_tokens = 2",
        )
        for forced in ({5: 3}, [{5: 3}, {5: 3}])
    ),
]
BAD = [
    (dict(verifier="lenient", lenience=0.0), r"lenience: got 0.0, expected a number in \(0, 1\]"),
    (dict(verifier="lenient", lenience=1.5), "lenience: got 1.5"),
    (dict(verifier="lenient", lenience=float("nan")), "lenience: got nan"),
    (
        dict(verifier="lenient", lenience=[0.5, 0.5, 0.5]),
        "lenience: got 3 values, expected one or 2",
    ),
    (
        dict(verifier="typical", typical_epsilon=-1.0),
        "typical_epsilon: got -1.0, expected a number in",
    ),
    (dict(verifier="typical", typical_delta=2.0), "typical_delta: got 2.0"),
    (dict(num_samples=0), "num_samples: got 0, expected an integer from 1"),
    (dict(num_samples=1.5), "num_samples: got 1.5"),
    (dict(stop=""), r"stop: got \('',\), expected strings that are not empty"),
    (dict(stop=["a", 3]), "stop: got .*3.*, expected strings"),
    (dict(stop=3), "stop: got 3, expected strings"),
    (
        dict(stop="a", target=NO_WORDS),
        "stop: got strings for a model without a vocabulary, expected none",
    ),
    (dict(deadline=0), "deadline: got 0, expected seconds, more than 0"),
    (dict(deadline=-1.0), "deadline: got -1.0"),
    (dict(deadline=float("nan")), "deadline: got nan"),
    (dict(deadline="soon"), "deadline: got 'soon'"),
    (dict(eos_ids=(1.5,)), r"eos_ids: got \(1.5,\), expected ids from 0 to 11"),
    (dict(eos_ids=V), r"eos_ids: got \(12,\), expected ids"),
    (dict(max_input_length=2), "input 0: got 3 tokens, expected at most max_input_length = 2"),
    (
        dict(sampling=SamplingConfig(logit_bias={V: 1.0})),
        "logit_bias: got id 12, expected one from 0 to 11",
    ),
    (dict(sampling=SamplingConfig(forbidden_tokens=[V])), "forbidden_tokens: got id 12"),
    (dict(sampling=SamplingConfig(forced_tokens={0: V})), "forced_tokens: got id 12"),
    (
        dict(sampling=SamplingConfig(vocabulary_mask=[True])),
        r"vocabulary_mask: got shape \(1,\) and type bool",
    ),
    (
        dict(sampling=SamplingConfig(repetition_penalty=[1.0, 2, 3])),
        "repetition_penalty: got 3 values, expected one or 2",
    ),
]


@pytest.mark.parametrize("function", [generate, stream], ids=["generate", "stream"])
@pytest.mark.parametrize(
    "change, message", [*COMBINATIONS, *BAD], ids=[message for _, message in [*COMBINATIONS, *BAD]]
)
def test_what_makes_no_sense_is_rejected_before_anything_compiles(change, message, function):
    arguments = {**BASE, **change}
    expected = message
    if function is stream and arguments["target"] is NO_WORDS:
        expected = "stream: got a model without a vocabulary"

    def call():
        with pytest.raises(ValueError, match=expected) as caught:
            function(**arguments)
        assert isinstance(caught.value, UnsupportedCombination) == (
            (change, message) in COMBINATIONS
        )
        assert "\n" not in str(caught.value)

    assert compilations(call) == 0


@pytest.mark.parametrize(
    "change", [dict(stop="a"), dict(deadline=1.0), dict(num_samples=2)], ids=str
)
def test_a_trace_has_no_early_end(change):
    (name,) = change
    with pytest.raises(UnsupportedCombination, match=f"{name}: got .* for a trace, expected"):
        trace(TARGET, "w3", sampling=WARM, **change)


# --- Compilation, permuted ids ---


@pytest.mark.slow
def test_nothing_compiles_when_traced_options_change():
    keys = jax.random.split(jax.random.key(9), B)
    on = dict(
        decoder_prefix=PREFIXES,
        max_new_tokens=LIMIT,
        eos_ids=EOS,
        drafter=ModelDrafter(DRAFT),
        key=jax.random.key(0),
    )
    decode(ALL)
    generate(
        TARGET, INPUTS, gamma=3, sampling=ALL, **on, stop="w9"
    )  # with an end of its own: two programs, not one
    two = dict(sampling=WARM, max_new_tokens=7, drafter=ModelDrafter(DRAFT))
    for verifier in (LENIENT, TYPICAL):
        generate(TARGET, INPUTS[:2], gamma=2, **verifier, **two)
    sizes = advance._cache_size(), prefill._cache_size(), _decode._cache_size()
    changes = [
        dict(temperature=2.0),
        dict(temperature=[0.0, 1, 0, 2, 0, 0]),
        dict(top_k=3),
        dict(top_k=list(range(6))),
        dict(top_p=0.5),
        dict(min_p=0.3),
        dict(repetition_penalty=1.9),
        dict(min_new_tokens=1),
        dict(logit_bias={2: 3.0}),
        dict(forbidden_tokens=(3, 4)),
        dict(vocabulary_mask=[True] * 11 + [False]),
        dict(forced_tokens={5: 5, 6: 6}),
    ]

    def varied():
        for change in changes:
            generate(
                TARGET,
                INPUTS,
                gamma=[3, 3, 2, 1, 0, 2],
                sampling=dataclasses.replace(ALL, **change),
                **on,
            )
        for more in (
            dict(key=keys),
            dict(stop="w5"),
            dict(stop=["w6 w3", "w2"]),
            dict(deadline=1e6),
            dict(eos_ids=(2, 3, 4)),
        ):
            generate(TARGET, INPUTS, gamma=3, sampling=ALL, **{**on, **more})
        for _ in stream(TARGET, INPUTS, gamma=3, sampling=ALL, every=3, **{**on, "stop": "w7"}):
            pass
        for lenience in (0.1, [0.5, 0.9]):
            generate(TARGET, INPUTS[:2], gamma=2, verifier="lenient", lenience=lenience, **two)
        for change in (dict(typical_epsilon=0.5), dict(typical_delta=[0.1, 0.9])):
            generate(TARGET, INPUTS[:2], gamma=2, verifier="typical", **change, **two)

    assert compilations(varied) == 0
    assert (advance._cache_size(), prefill._cache_size(), _decode._cache_size()) == sizes


@flax.struct.dataclass
class Permuted(HashNetwork):
    """A `HashNetwork` whose id i is called `names[i]`."""

    names: tuple = flax.struct.field(pytree_node=False, default=())

    def decode(self, tokens, positions, cache, valid=None):
        old = jnp.array(np.argsort(self.names), jnp.int32)
        logits, cache = super().decode(old[tokens], positions, cache)
        return logits[..., old], cache


@pytest.mark.slow
def test_permuted_ids_give_the_permuted_output():
    names = tuple(np.random.default_rng(0).permutation(V).tolist())
    models = []
    for model in (TARGET, DRAFT):
        models.append(HashModel(V, start_token=names[0]))
        models[-1].network = Permuted(model.dist, names)

    def renamed(table):
        return {names[token]: value for token, value in table.items()}

    options = {name: value for name, value in PROCESSORS["all"].items() if name != "processor"}
    permuted = {
        **options,
        "logit_bias": renamed(options["logit_bias"]),
        "forbidden_tokens": [names[7]],
        "forced_tokens": {place: names[token] for place, token in options["forced_tokens"].items()},
    }
    result = generate(
        models[0],
        INPUTS,
        drafter=ModelDrafter(models[1]),
        gamma=GAMMA,
        sampling=SamplingConfig(**permuted),
        decoder_prefix=[[names[token] for token in prefix] for prefix in PREFIXES],
        max_new_tokens=LIMIT,
        eos_ids=[names[token] for token in EOS],
    )
    wanted = [slow_greedy(row, of_row(options, row)) for row in range(B)]
    assert ids_of(result) == [[names[token] for token in ids] for ids in wanted]
