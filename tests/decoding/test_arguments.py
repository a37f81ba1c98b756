"""Arguments of a wrong kind are rejected by every entry point before anything compiles.

Numbers of numpy and JAX are as good as Python's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_models import EchoModel, HashModel, Words, compilations, tiny_t5

import specdec_jax as sd
from specdec_jax.models import arguments
from specdec_jax.speculative.sampling import SamplingConfig

pytestmark = pytest.mark.usefixtures("quick")

TARGET, DRAFTER = EchoModel(Words()), sd.ModelDrafter(EchoModel(Words()))
MODEL = HashModel(12)
ARRAY = dict(inputs=np.array([[3, 4], [5, 1]]))
RAGGED = [[1], [1, 2]]
TREE = sd.Tree.uniform((2, 1))
TWO_BEAMS = dict(num_beams=2)
MANY, WARM = np.full(99, 0.5), dict(sampling=SamplingConfig(temperature=1.0))

GENERATE = [
    (dict(inputs=None), "inputs: got None, expected a list of strings or of ids"),
    (dict(inputs=3), "inputs: got 3, expected a list"),
    (dict(inputs={"input_ids": [3]}), "inputs: got {'input_ids': .* expected a list"),
    (dict(inputs=b"w3"), "inputs: got b'w3', expected a list"),
    (dict(inputs=[[True, 2]]), r"input 0: got \[True, 2\], expected a list of integers"),
    (dict(target=None), "target: got NoneType, expected a LanguageModel"),
    (dict(target=DRAFTER), "target: got ModelDrafter, expected a LanguageModel"),
    (dict(target="ende/target"), "target: got 'ende/target', expected a LanguageModel, such as"),
    (
        dict(sampling={"temperature": 1.0}),
        "sampling: got {'temperature': 1.0}, expected a SamplingConfig",
    ),
    (dict(sampling={}, **TWO_BEAMS), "sampling: got {}, expected a SamplingConfig"),
    (dict(drafter=sd.PromptLookupDrafter), "drafter: got the class PromptLookupDrafter, expected"),
    (dict(gamma=True), "gamma: got True, expected an integer"),
    (dict(gamma=[1, True]), r"gamma: got \[1, True\], expected an integer"),
    (dict(gamma=RAGGED), r"gamma: got \[\[1\], \[1, 2\]\], expected an integer"),
    (dict(gamma=RAGGED, tree=TREE), r"gamma: got \[\[1\], \[1, 2\]\], expected an integer"),
    (dict(gamma=RAGGED, **TWO_BEAMS), r"gamma: got \[\[1\], \[1, 2\]\], expected an integer"),
    (dict(tree="ab"), "tree: got 'ab', expected a Tree"),
    (dict(verifier=np.ones(3)), r"verifier: got \[1.0, 1.0, 1.0\], expected one of token"),
    (dict(verifier="lenient", lenience="a"), "lenience: got 'a', expected a number in"),
    (dict(verifier="lenient", lenience="0.5"), "lenience: got '0.5', expected a number in"),
    (dict(verifier="lenient", lenience=True), "lenience: got True, expected a number in"),
    (dict(max_new_tokens=[True, 2]), r"max_new_tokens: got \[True, 2\], expected an integer"),
    (dict(num_samples=[2]), r"num_samples: got \[2\], expected an integer"),
    (dict(num_samples=True), "num_samples: got True, expected an integer"),
    (
        dict(input_lengths=[1.5, 1], **ARRAY),
        r"input_lengths: got \[1.5, 1\], expected 2 integers from 0 to 2",
    ),
    (
        dict(input_lengths=[True, 1], **ARRAY),
        r"input_lengths: got \[True, 1\], expected 2 integers",
    ),
    (dict(max_input_length="a"), "max_input_length: got 'a', expected an integer"),
    (dict(max_input_length=True), "max_input_length: got True, expected an integer"),
    (dict(decoder_prefix=3), "decoder_prefix: got 3, expected a list"),
    (
        dict(decoder_prefix=[[3], [99_999]]),
        r"decoder_prefix: got ids outside.*\(decoder_prefix 1: id 99999\)",
    ),
    (dict(decoder_prefix="w3"), "decoder_prefix: got the string 'w3', expected a list"),
    (dict(eos_ids=[True]), r"eos_ids: got \(True,\), expected ids from 0 to"),
    (dict(eos_ids=1.5), "eos_ids: got 1.5, expected ids"),
    (dict(eos_ids="a"), "eos_ids: got 'a', expected ids"),
    (dict(deadline=True), "deadline: got True"),
    (dict(length_penalty="1", **TWO_BEAMS), "length_penalty: got '1', expected a finite number"),
    (
        dict(length_penalty=[1.0], **TWO_BEAMS),
        r"length_penalty: got \[1.0\], expected a finite number",
    ),
    (dict(beam_style=np.ones(2), **TWO_BEAMS), r"beam_style: got \[1.0, 1.0\], expected one of"),
    (
        dict(beam_style="huggingface", early_stopping=1, **TWO_BEAMS),
        "early_stopping: got 1, expected False, True",
    ),
    (
        dict(beam_style="huggingface", early_stopping=np.ones(2), **TWO_BEAMS),
        r"early_stopping: got \[1.0, 1.0\], expected False, True",
    ),
    (dict(stop=5, **TWO_BEAMS), "stop: got 5 with num_beams"),
    (dict(stop=np.ones(2), **TWO_BEAMS), r"stop: got \[1.0, 1.0\] with num_beams"),
    (dict(lenience=np.ones(3), **TWO_BEAMS), r"lenience: got \[1.0, 1.0, 1.0\] with num_beams"),
    (dict(beam_width=np.ones(3)), r"beam_width: got \[1.0, 1.0, 1.0\] without num_beams"),
    # Arrays that numpy prints on several lines.
    (dict(lenience=MANY), r"lenience: got \[0.5, .* with verifier='block'"),
    (dict(lenience=MANY * 4, verifier="lenient", **WARM), r"lenience: got \[2.0, .* in \(0, 1\]"),
    (dict(max_new_tokens=MANY.astype(int)), r"max_new_tokens: got \[0, .* an integer from 1 to"),
    (dict(deadline=np.ones((2, 2))), r"deadline: got \[\[1.0, 1.0\], .* expected seconds"),
    (dict(stop=np.ones((2, 2))), r"stop: got \[\[1.0, 1.0\], .* expected strings"),
    (dict(non_finite=np.ones((2, 2))), r"non_finite: got \[\[1.0, 1.0\], .* 'report'"),
    (dict(gamma=np.ones((2, 2)), **TWO_BEAMS), r"gamma: got \[\[1.0, 1.0\], .* with num_beams"),
    (dict(key=np.ones((2, 2))), r"key: got \[\[1.0, 1.0\], .* expected jax.random.key"),
]


@pytest.mark.parametrize("change, message", GENERATE, ids=[message for _, message in GENERATE])
def test_generate(change, message):
    options = {
        "target": TARGET,
        "inputs": ["w3", "w4"],
        "drafter": DRAFTER,
        "max_new_tokens": 3,
        **change,
    }
    target, inputs = options.pop("target"), options.pop("inputs")

    def calls():
        for call in (sd.generate, sd.decode_stream):
            with pytest.raises(ValueError, match=message) as caught:
                call(target, inputs, **options)
            assert "\n" not in str(caught.value)

    assert compilations(calls) == 0


SAMPLING = [
    (dict(forbidden_tokens=5), "forbidden_tokens: got 5, expected a list of ids"),
    (dict(forbidden_tokens="ab"), "forbidden_tokens: got 'ab', expected a list of ids"),
    (dict(logit_bias=[1, 2]), r"logit_bias: got \[1, 2\], expected a dictionary"),
    (dict(logit_bias={1: True}), "logit_bias: got True for id 1, expected a finite number"),
    (dict(forced_tokens=[3]), r"forced_tokens: got \[3\], expected a dictionary"),
    (dict(forced_tokens={True: 3}), "forced_tokens: got place True, expected an integer"),
    (dict(temperature="1"), "temperature: got '1', expected a finite number"),
    (dict(temperature=True), "temperature: got True, expected a finite number"),
    (dict(temperature=RAGGED), "temperature: got .* expected a finite number"),
    (dict(top_k=2.0), "top_k: got 2.0, expected an integer"),
    (dict(top_k=[1, True]), r"top_k: got \[1, True\], expected an integer"),
    (dict(no_repeat_ngram=[2]), r"no_repeat_ngram: got \[2\], expected an integer"),
]


@pytest.mark.parametrize("change, message", SAMPLING, ids=[message for _, message in SAMPLING])
def test_sampling(change, message):
    with pytest.raises(ValueError, match=message):
        SamplingConfig(**change)


def test_ids_and_masks_that_need_the_vocabulary():
    for change, message in (
        (dict(forbidden_tokens=[True]), "forbidden_tokens: got id True"),
        (dict(forced_tokens={0: 1.0}), "forced_tokens: got id 1.0"),
        (dict(vocabulary_mask=RAGGED), "vocabulary_mask: got shape .* expected"),
    ):
        with pytest.raises(ValueError, match=message):
            SamplingConfig(**change).rows(1, 12)


OTHERS = {
    "Tree of a string": (lambda: sd.Tree("ab"), "parents: got 'ab', expected a list"),
    "Tree of a number": (lambda: sd.Tree(3), "parents: got 3, expected a list"),
    "Tree of fractions": (
        lambda: sd.Tree((0.5,)),
        "parents: got 0.5 for node 1, expected a number from 0 to 0",
    ),
    "Tree of bools": (lambda: sd.Tree((False,)), "parents: got False for node 1"),
    "widths": (lambda: sd.Tree.uniform(3), "widths: got 3, expected integers"),
    "widths of strings": (
        lambda: sd.Tree.uniform(("a",)),
        r"widths: got \('a',\), expected integers",
    ),
    "chain": (lambda: sd.Tree.chain("a"), "length: got 'a', expected an integer"),
    "shares": (
        lambda: sd.Tree.best([True], 8, 2),
        r"acceptance_by_rank: got \[True\], expected a list of numbers",
    ),
    "costs": (
        lambda: sd.Tree.best([0.5], 8, 2, verify_costs=3),
        "verify_costs: got 3, expected positive numbers",
    ),
    "costs by names": (
        lambda: sd.Tree.best([0.5], 8, 2, verify_costs={"a": 1}),
        "verify_costs: got {'a': 1}",
    ),
    "cost ratio": (
        lambda: sd.Tree.best([0.5], 8, 2, cost_ratio="a"),
        "cost_ratio: got 'a', expected a number",
    ),
    "DynamicTree": (lambda: sd.DynamicTree(2, True, 3), "width: got True, expected an integer"),
    "Chains": (lambda: sd.Chains("a", 2), "count: got 'a', expected an integer"),
    "policy": (lambda: sd.Heuristic(4, start=[True]), r"start: got \[True\], expected an integer"),
    "ragged policy": (
        lambda: sd.Confidence(4, threshold=RAGGED),
        "threshold: got .* expected a number",
    ),
    "max_match": (lambda: sd.PromptLookupDrafter(True), "max_match: got True, expected an integer"),
    "vocab_size": (lambda: sd.RandomDrafter(None), "vocab_size: got None, expected an integer"),
    "order": (lambda: sd.AssistedNGramDrafter(order=True), "order: got True, expected an integer"),
    "ModelDrafter": (lambda: sd.ModelDrafter(3), "model: got int, expected a LanguageModel"),
    "shortlist": (
        lambda: sd.ModelDrafter(MODEL, shortlist=True),
        "shortlist: got True, expected a number of ids",
    ),
    "int8": (lambda: sd.ModelDrafter(MODEL, int8="no"), "int8: got 'no', expected True or False"),
    "EarlyExitDrafter": (
        lambda: sd.EarlyExitDrafter("x", 1),
        "model: got 'x', expected a LanguageModel, such as",
    ),
    "SelfDrafter": (lambda: sd.SelfDrafter(3), "model: got int, expected a LanguageModel"),
    "HeadsDrafter": (lambda: sd.HeadsDrafter.load(3, MODEL), "path: got 3, expected a path"),
    "NGramDrafter": (lambda: sd.NGramDrafter.load(3), "path: got 3, expected a path"),
    "sequences": (lambda: sd.NGramDrafter.count(3, 12, 2), "sequences: got 3, expected lists"),
    "start token": (
        lambda: sd.NGramDrafter.count([[3]], 12, 2, start_token=""),
        "start_token: got '', expected an id",
    ),
    "prefer": (
        lambda: sd.PromptLookupDrafter(prefer="far"),
        "prefer: got 'far', expected 'nearest'",
    ),
    "min_match": (
        lambda: sd.PromptLookupDrafter(2, 3),
        "min_match: got 3, expected an integer from 0 to 2",
    ),
    "prefer in an array": (
        lambda: sd.PromptLookupDrafter(prefer=np.ones(2)),
        r"prefer: got \[1.0, 1.0\], expected 'nearest'",
    ),
    "children in an array": (
        lambda: sd.Tree((0,), children=np.ones(2)),
        r"children: got \[1.0, 1.0\], expected a name",
    ),
    "a tree's verifier in an array": (
        lambda: sd.DynamicTree(2, 2, 4, verifier=np.ones(2)),
        r"verifier: got \[1.0, 1.0\], expected a name",
    ),
    "teacher-forced fractions": (
        lambda: tiny_t5(0).logits([[3.5]], [[0]]),
        r"inputs: got \[\[3.5\]\], expected rows of ids",
    ),
    "teacher-forced long integers": (
        lambda: tiny_t5(0).logits([[3]], np.array([[0, 2**32 + 3]])),
        r"decoder_tokens: got \[\[0, 4294967299\]\], expected rows of ids",
    ),
    "no teacher-forced rows": (
        lambda: tiny_t5(0).logits(np.zeros((0, 2), int), np.zeros((0, 2), int)),
        "decoder_tokens: got no rows, expected at least one",
    ),
    "teacher-forced rows": (
        lambda: tiny_t5(0).logits([[3], [4]], [[0]]),
        "inputs: got 2 rows, expected 1, as many as decoder_tokens",
    ),
    "a configuration's file": (
        lambda: sd.GenerationConfig.load(3),
        "path: got 3, expected a path",
    ),
    "a configuration's new file": (
        lambda: sd.GenerationConfig().save(None),
        "path: got None, expected a path",
    ),
    "a table's new file": (
        lambda: sd.NGramDrafter.count([[3]], 12, 2).save(3),
        "path: got 3, expected a path",
    ),
    "a history's new file": (
        lambda: sd.SuffixHistory(TARGET).save(3),
        "path: got 3, expected a path",
    ),
    "warm_up's longest input": (
        lambda: sd.warm_up(TARGET, max_input_length=10**400),
        "max_input_length: got 1000.*, expected an integer from 1 to 1048576",
    ),
    "EAGLE's projections": (
        lambda: sd.EagleDrafter(tiny_t5(0), tiny_t5(0), 3),
        "params: got 3, expected nested dictionaries",
    ),
    "learning": (
        lambda: sd.OnlineDistillation(3, DRAFTER),
        "target: got int, expected a LanguageModel",
    ),
    "a learner's new file": (
        lambda: sd.OnlineDistillation(tiny_t5(0), sd.ModelDrafter(tiny_t5(1))).save(3),
        "path: got 3, expected a path",
    ),
    "a learner's file": (
        lambda: sd.OnlineDistillation(tiny_t5(0), sd.ModelDrafter(tiny_t5(1))).restore(3),
        "path: got 3, expected a path",
    ),
    "outputs to learn from": (
        lambda: sd.OnlineDistillation(tiny_t5(0), sd.ModelDrafter(tiny_t5(1)), expected=10**400),
        "expected: got 1000.*, expected an integer from 0 to",
    ),
    "learning rate": (
        lambda: sd.OnlineDistillation(TARGET, DRAFTER, learning_rate="a"),
        "learning_rate: got 'a', expected a number in",
    ),
    "share of time": (
        lambda: sd.OnlineDistillation(TARGET, DRAFTER, share_of_time=None),
        "share_of_time: got None, expected a number in",
    ),
    "gate": (
        lambda: sd.generate(TARGET, ["w3"], drafter=sd.GatedDrafter(3), gamma=2),
        "drafter: got 3, expected a drafter that looks up",
    ),
    "history": (lambda: sd.SuffixHistory(3), "target: got int, expected a LanguageModel"),
    "costs of two": (
        lambda: sd.BestOf(DRAFTER, DRAFTER, costs=(1, float("nan"))),
        r"costs: got \(1, nan\), expected two finite numbers",
    ),
    "random tokens": (
        lambda: sd.RandomDrafter(10**30),
        "vocab_size: got 1000.*, expected an integer from 1 to 2147483647",
    ),
    "ids of an end": (
        lambda: sd.shortlist_from_counts([1, 2, 3], 2, 1),
        "eos_ids: got 1, expected ids from 0 to 2",
    ),
    "an id of an end": (
        lambda: sd.shortlist_from_counts([1, 2, 3], 2, [7]),
        r"eos_ids: got \(7,\), expected ids from 0 to 2",
    ),
    "a model's ends": (
        lambda: sd.LanguageModel(sd.T5Config(12, 8, 1, 8, 1, 1, 8), {}, eos_ids=1),
        "eos_ids: got 1, expected a list of ids",
    ),
    "a model's defaults": (
        lambda: sd.ModelDefaults(temperature=10**400),
        "temperature: got 1000.*, expected a finite number",
    ),
    "a model's early stopping": (
        lambda: sd.ModelDefaults(early_stopping=np.ones(2)),
        "early_stopping: got .*, expected true, false",
    ),
    "switch": (
        lambda: sd.HorizontalCascade(DRAFTER, DRAFTER, True),
        "switch: got True, expected an integer",
    ),
    "counts": (lambda: sd.shortlist_from_counts("a", 2), "counts: got 'a', expected one number"),
    "remembers": (lambda: sd.SuffixDrafter(remembers="no"), "remembers: got 'no', expected True"),
    "sampled": (
        lambda: sd.NGramDrafter.load("none.npz", sampled="no"),
        "sampled: got 'no', expected True",
    ),
    "load": (lambda: sd.load(3), "path: got 3, expected a path"),
    "load's config": (
        lambda: sd.load("ende/target", config={}),
        "config: got {}, expected a T5Config",
    ),
    "load's vocabulary": (
        lambda: sd.load("ende/target", vocabulary=3),
        "vocabulary: got 3, expected a Vocabulary",
    ),
    "load's mesh": (lambda: sd.load("ende/target", mesh=3), "mesh: got 3, expected a mesh"),
    "replicate": (
        lambda: sd.load("ende/target", replicate="no"),
        "replicate: got 'no', expected True or False",
    ),
    "say": (lambda: sd.load("ende/target", say=3), "say: got 3, expected a function"),
    "save": (lambda: sd.save(3, "x"), "model: got int, expected a LanguageModel"),
    "convert": (lambda: sd.convert("ende/target", 3), "output: got 3, expected a path"),
    "make_mesh": (lambda: sd.make_mesh("a"), "data: got 'a', expected an integer"),
    "every": (
        lambda: sd.stream(TARGET, ["w3"], every=True),
        "every: got True, expected an integer",
    ),
    "batch_size": (
        lambda: sd.decode_stream(TARGET, ["w3"], batch_size=True),
        "batch_size: got True, expected",
    ),
    "refill": (
        lambda: sd.decode_stream(TARGET, ["w3"], refill="no"),
        "refill: got 'no', expected True or False",
    ),
    "skip": (
        lambda: sd.decode_stream(TARGET, ["w3"], skip=["a"]),
        r"skip: got \('a',\), expected numbers of inputs",
    ),
    "skip past the end": (
        lambda: sd.decode_stream(TARGET, ["w3"], skip=[0, 5]),
        "skip: got 5, expected numbers of inputs, from 0 to 0",
    ),
    "skip from the end": (
        lambda: sd.decode_stream(TARGET, ["w3"], skip=[-1]),
        "skip: got -1, expected numbers of inputs, from 0 to 0",
    ),
    "learner": (
        lambda: sd.decode_stream(TARGET, ["w3"], learner=3),
        "learner: got 3, expected an object with drafter, saw and learn",
    ),
    "a learner's class": (
        lambda: sd.decode_stream(TARGET, ["w3"], learner=sd.SuffixHistory),
        "learner: got .*SuffixHistory.*, expected an object with drafter, saw and learn",
    ),
    "stream": (lambda: list(sd.stream("x", ["w3"])), "target: got 'x', expected a LanguageModel"),
    "trace": (lambda: sd.trace(TARGET, None), "text: got None, expected a string"),
    "trace's samples": (
        lambda: sd.trace(TARGET, "w3", num_samples=np.ones(2)),
        "num_samples: got .* expected an integer from 1",
    ),
    "batch sizes": (
        lambda: sd.warm_up(TARGET, batch_sizes=4),
        "batch_sizes: got 4, expected a list",
    ),
    "warm_up": (
        lambda: sd.warm_up(TARGET, max_input_length="a"),
        "max_input_length: got 'a', expected an integer",
    ),
    "warm_up's target": (lambda: sd.warm_up("x"), "target: got 'x', expected a LanguageModel"),
}


@pytest.mark.parametrize("call, message", OTHERS.values(), ids=OTHERS)
def test_other_entry_points(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


RETURNED = {
    "None": None,
    "a tuple": (1,),
    "bool": jnp.zeros((1, 2), bool),
    "int32": jnp.zeros((1, 2), jnp.int32),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_processor_that_returns_no_logits(name):
    sampling = SamplingConfig(processor=lambda prefixes, lengths, logits: RETURNED[name])
    with pytest.raises(
        ValueError, match="processor: got .* from the function, expected logits, an array of floats"
    ):
        sd.generate(MODEL, [[3]], sampling=sampling, max_new_tokens=3)


@pytest.mark.parametrize(
    "of", [np.int64, np.array, jnp.int32, jnp.array], ids=["numpy", "array", "jax", "jax array"]
)
def test_numbers_of_every_library_are_numbers(of):
    """The same output, and the same compiled program."""

    def decode(one, two, three, four):
        sampling = SamplingConfig(temperature=one, top_k=three)
        return sd.generate(
            MODEL,
            [[3, 4, 1]],
            drafter=sd.ModelDrafter(MODEL),
            gamma=two,
            max_new_tokens=four,
            num_samples=two,
            eos_ids=one,
            max_input_length=four,
            sampling=sampling,
        ).tokens

    expected, numbers, found = decode(1, 2, 3, 4), [of(number) for number in (1, 2, 3, 4)], []
    assert compilations(lambda: found.append(decode(*numbers))) == 0
    np.testing.assert_array_equal(found[0], expected)
    assert sd.Tree(of([0, 0]) if of in (np.array, jnp.array) else [of(0)] * 2) == sd.Tree((0, 0))


DRAFTERS_OF = {
    "lookup": lambda of: sd.PromptLookupDrafter(of(2), of(1)),
    "assisted": lambda of: sd.AssistedNGramDrafter(of(2), of(1), of(8)),
    "recycling": lambda of: sd.TokenRecycling(of(12), of(2)),
    "look-ahead": lambda of: sd.LookaheadDecoding(of(2), of(2), of(2), of(4)),
    "gated": lambda of: sd.GatedDrafter(sd.PromptLookupDrafter(), of(1), of(1)),
    "suffix": lambda of: sd.SuffixDrafter(factor=of(2), least_share=of(1), min_match=of(1)),
    "random": lambda of: sd.RandomDrafter(of(12)),
    "table": lambda of: sd.NGramDrafter.count([[3, 4]], of(12), of(2), continuations=of(2)),
}


@pytest.mark.parametrize("name", DRAFTERS_OF)
def test_a_drafters_numbers_are_of_every_library(name):
    make = DRAFTERS_OF[name]
    ours, theirs = (make(of) for of in (int, jnp.array))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert ours.contents == theirs.contents
    jax.jit(lambda drafter: 0)(theirs)  # its numbers are static


def test_numbers_of_beams_and_policies_are_of_every_library():
    def decode(of):
        return sd.generate(
            MODEL,
            [[3, 4, 1]],
            drafter=sd.PromptLookupDrafter(),
            gamma=of(1),
            num_beams=of(2),
            num_return_sequences=of(2),
            beam_width=of(2),
            length_penalty=of(1),
            max_new_tokens=3,
        ).tokens

    np.testing.assert_array_equal(decode(jnp.array), decode(int))
    assert hash(sd.Confidence(jnp.array(3))) == hash(sd.Confidence(3))


def test_what_is_a_number():
    numbers = 3, 0.5, np.int8(3), np.float16(1), jnp.bfloat16(1), np.array(3), jnp.float32(0.5)
    no_numbers = True, np.True_, jnp.array(True), "3", None, [3], np.array([3]), 1j, object()
    assert all(map(arguments.is_number, numbers)) and not any(map(arguments.is_number, no_numbers))
    assert list(map(arguments.is_integer, numbers)) == [
        True,
        False,
        True,
        False,
        False,
        True,
        False,
    ]
    assert not any(map(arguments.is_integer, no_numbers))
    assert (
        arguments.quote("a\nb" * 100).count("\n") == 0
        and len(arguments.quote(list(range(1000)))) < 200
    )
