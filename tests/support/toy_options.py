"""Two hash models, a case for every processor, and slow decoding in numpy."""

import jax.numpy as jnp
import numpy as np
import toy
import toy_processors
from toy_models import HashModel, Words

from specdec_jax.decoding.generate import generate
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.speculative.sampling import SamplingConfig

V, LIMIT, EOS = 12, 14, (1, 8)
INPUTS = [[3, 4, 1], [7, 1], [9, 2, 9, 1], [1], [5, 5, 1], [11, 10, 2, 1]]
PREFIXES = [[4, 2], [], [7], [4, 4, 4], [], [9]]
GAMMA = [3, 1, 2, 3, 0, 3]
B = len(INPUTS)
TARGET = HashModel(V, 0, vocabulary=Words())
DRAFT = HashModel(V, 1, likeness=0.4, vocabulary=Words())


def brackets(prefixes, lengths, logits):
    """Applies a grammar: 2 opens, 3 closes, and an EOS comes only when nothing is open."""
    valid = jnp.arange(prefixes.shape[1]) < lengths[:, None]
    depth = jnp.sum(
        jnp.where(valid, jnp.where(prefixes == 2, 1, 0) - jnp.where(prefixes == 3, 1, 0), 0),
        axis=1,
        keepdims=True,
    )
    ids = jnp.arange(logits.shape[1])
    wrong = (ids == 3) & (depth <= 0) | jnp.isin(ids, jnp.array(EOS)) & (depth > 0)
    return jnp.where(wrong, -jnp.inf, logits + jnp.where((ids == 2) | (ids == 3), 3.0, 0.0))


def brackets_in_numpy(prefix, logits):
    depth, result = prefix.count(2) - prefix.count(3), logits.copy()
    result[[2, 3]] += np.float32(3)
    if depth <= 0:
        result[3] = -np.inf
    else:
        result[list(EOS)] = -np.inf
    return result


# With this bias against EOS a row goes on long enough to repeat itself.
QUIET = {1: -2.0, 8: -2.0}
# A tuple with B values holds one for each row.
PROCESSORS = {
    "repetition": dict(repetition_penalty=(1.3, 2.0, 1.0, 4.0, 0.5, 1.7), logit_bias=QUIET),
    "n-grams": dict(no_repeat_ngram=2, logit_bias=QUIET),
    "minimum length": dict(min_new_tokens=(0, 4, 10, 7, 6, 2), logit_bias={8: 2.0}),
    "bias": dict(logit_bias={4: 2.5, 2: -3.0}),
    "forbidden": dict(forbidden_tokens=(2, 4, 7)),
    "sequences": dict(forbidden_sequences=((4, 2), (3,), (2, 9, 5), (0, 6)), logit_bias=QUIET),
    "mask": dict(vocabulary_mask=(True,) * 3 + (False,) * 4 + (True,) * 5),
    "synthetic": dict(forced_tokens={0: 6, 3: 3, 4: 4}),
    "own": dict(processor=brackets),
    "all": dict(
        repetition_penalty=(1.3, 2.0, 1.0, 4.0, 0.5, 1.7),
        no_repeat_ngram=2,
        min_new_tokens=(0, 4, 10, 7, 6, 2),
        logit_bias={4: 1.5, 8: 1.0},
        forbidden_tokens=(7,),
        forced_tokens={0: 6, 3: 3},
        processor=brackets,
    ),
}
FILTERS = dict(temperature=1.1, top_k=9, top_p=0.97, min_p=0.01)


def of_row(options, row: int):
    """Returns one row's options for the slow versions."""
    own = {
        name: value[row] if name in ("repetition_penalty", "min_new_tokens") else value
        for name, value in options.items()
    }
    return {**own, "processor": brackets_in_numpy} if "processor" in own else own


def raw_logits(model, row: int, tokens) -> np.ndarray:
    """Returns logits `[T, V]` after each of `tokens` (start token and prefix first)."""
    return model.logits([INPUTS[row]], [tokens], [len(INPUTS[row])])[0]


def slow_greedy(row: int, options, model=TARGET) -> list[int]:
    prefix, new = [model.start_token, *PREFIXES[row]], []
    while len(new) < LIMIT and not (new and new[-1] in EOS):
        logits = raw_logits(model, row, prefix + new)[-1]
        new.append(
            int(
                np.argmax(
                    toy_processors.processed(
                        logits, prefix + new, new=len(new), eos_ids=EOS, **options
                    )
                )
            )
        )
    return new


def decode(sampling: SamplingConfig, speculative: bool = True, **options):
    options = (
        dict(decoder_prefix=PREFIXES, max_new_tokens=LIMIT, eos_ids=EOS, gamma=GAMMA) | options
    )
    return generate(
        TARGET,
        INPUTS,
        drafter=ModelDrafter(DRAFT) if speculative else None,
        sampling=sampling,
        **options,
    )


def ids_of(result) -> list[list[int]]:
    return [row[:length].tolist() for row, length in zip(result.tokens, result.lengths)]


def assert_log_probs(result, options, filters=FILTERS):
    """Asserts that both kinds of log-probabilities equal a teacher-forced computation in numpy."""
    for row, ids in enumerate(ids_of(result)):
        tokens = [0, *PREFIXES[row], *ids]
        for i, token in enumerate(ids):
            prefix = tokens[: len(tokens) - len(ids) + i]
            logits = raw_logits(TARGET, row, prefix)[-1]
            dist = toy_processors.dist(
                logits, prefix, new=i, eos_ids=EOS, **filters, **of_row(options, row)
            )
            np.testing.assert_allclose(
                result.adjusted_log_probs[row, i], np.log(dist[token]), atol=1e-4
            )
            np.testing.assert_allclose(
                result.log_probs[row, i], np.log(toy.adjusted_probs(logits)[token]), atol=1e-4
            )
        assert not result.adjusted_log_probs[row, len(ids) :].any()


ALL = SamplingConfig(**FILTERS, **PROCESSORS["all"])
