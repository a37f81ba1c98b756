"""Small models with the interface of `LanguageModel`: tiny T5s, a hash of tokens, an echo."""

import dataclasses
import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from specdec_jax.models import parameters, weight_layouts
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.tokenizers.vocabularies import Vocabulary


def count_until_padding(tokens: np.ndarray) -> np.ndarray:
    """Returns one past the place of the last id other than 0 in each row."""
    ends = np.where(tokens != 0, np.arange(1, tokens.shape[1] + 1), 0)
    return ends.max(axis=1, initial=0).astype(np.int32)


def tiny_t5(seed: int, vocab: int = 24, decoder_layers: int = 2, **overrides) -> LanguageModel:
    """Returns a random T5 1.1 of width 16."""
    shape = dict(emb_dim=16, num_heads=2, head_dim=8, num_encoder_layers=1, mlp_dim=32)
    return LanguageModel.random(
        T5Config(vocab, num_decoder_layers=decoder_layers, **{**shape, **overrides}), seed
    )


def noisy_copy(model: LanguageModel, scale: float, seed: int = 0) -> LanguageModel:
    """Returns `model` with noise of `scale` times each parameter's spread.

    As a drafter it is right most of the time.
    """
    rng = np.random.default_rng(seed)

    def noisy(x):  # in numpy, which compiles nothing
        values = np.array(x, np.float32)
        noise = rng.normal(size=x.shape).astype(np.float32)
        values += np.float32(scale) * np.std(values) * noise
        return jnp.asarray(values.astype(x.dtype))

    params = jax.tree.map(noisy, model.params)
    return LanguageModel(model.config, params, start_token=model.start_token, eos_ids=model.eos_ids)


def make_student(target: LanguageModel, layers: int = 1, noise: float = 0.1, **options):
    """Returns a model with the target's encoder and embeddings, and `layers` noisy decoder layers.

    Its arrays are copies. So is distilbart made, whose encoder was frozen. Options are those of
    `LanguageModel`, and "quantize"; without `rules` it lies like the target.
    """
    config = target.config.replace(num_decoder_layers=layers)
    params, rng = parameters.flatten(target.params), np.random.default_rng(0)
    tree = {}
    for name in parameters.parameter_shapes(config):
        values = np.array(params[name], np.float32)
        if name.startswith("decoder/"):
            values += np.float32(noise * np.std(values)) * rng.normal(size=values.shape)
        tree[name] = jnp.asarray(values.astype(params[name].dtype))
    quantize = options.pop("quantize", None)
    ids = dict(
        rules=target.network.rules,
        start_token=target.start_token,
        eos_ids=target.eos_ids,
        name="student",
    )
    made = parameters.unflatten(tree)
    if quantize:
        made = weight_layouts.round_params(made, tied=config.logits_via_embedding)
    return LanguageModel(config, made, **{**ids, **options})


@flax.struct.dataclass
class HashCache:
    """The cache of a hash model.

    Attributes:
      tokens: `[B, S]` int32, what was fed at each slot.
      inputs: `[B]` uint32, a number made from the row's inputs.
    """

    tokens: jax.Array
    inputs: jax.Array


def _mix(h, value):
    """Returns one round of murmur3 over uint32."""
    h = (h ^ value) * np.uint32(0xCC9E2D51)
    h = (h << np.uint32(15)) | (h >> np.uint32(17))
    h = h * np.uint32(0x1B873593) + np.uint32(0xE6546B64)
    return h ^ (h >> np.uint32(13))


@dataclasses.dataclass(frozen=True)
class Hash:
    """Computes logits as a hash of (seed, inputs, the last two tokens fed, id).

    It is the same in numpy and in JAX.

    Attributes:
      vocab_size: V.
      seed: which distribution.
      spread: logits lie in [0, spread).
      likeness: share of the logits that comes from seed 0's distribution, so that distributions of
        different seeds resemble each other.
    """

    vocab_size: int
    seed: int = 0
    spread: float = 4.0
    likeness: float = 0.0

    def logits(self, inputs, previous, current):
        """Returns logits `[..., V]` float32 for uint32 arrays of one shape."""
        ids = np.arange(self.vocab_size, dtype=np.uint32)

        def one(seed):
            h = _mix(
                _mix(_mix(np.uint32(seed * 7919 + 17) ^ (inputs * 0), inputs), previous), current
            )[..., None]
            h = _mix(_mix(h, ids), ids ^ np.uint32(0x9E3779B9))
            return (h >> np.uint32(8)).astype(np.float32) * np.float32(2**-24 * self.spread)

        if not self.likeness:
            return one(self.seed)
        return one(0) * np.float32(self.likeness) + one(self.seed) * np.float32(1 - self.likeness)


class Headless:
    """A toy `Network` whose states are its logits."""

    encoder_dim = None
    rules = None
    skips_padding = False
    pairs_are_free = staticmethod(lambda cache: False)

    def head_alone(self):
        return self

    def decode_states(self, tokens, positions, cache, layers=None, valid=None):
        return self.decode(tokens, positions, cache)

    def head(self, states, valid=None):
        return states

    def shortlisted(self, ids):
        return ShortNetwork(self, jnp.asarray(ids))


@flax.struct.dataclass
class ShortNetwork:
    """A toy network with logits for `ids` only."""

    network: Headless
    ids: jax.Array
    encoder_dim = None
    pairs_are_free = staticmethod(lambda cache: False)

    def prefill(self, inputs, input_lengths, slots, copies=1):
        return self.network.prefill(inputs, input_lengths, slots, copies)

    def decode(self, tokens, positions, cache, valid=None):
        logits, cache = self.network.decode(tokens, positions, cache)
        return logits[..., self.ids], cache

    def decode_states(self, tokens, positions, cache, layers=None, valid=None):
        return self.decode(tokens, positions, cache)

    def head(self, states, valid=None):
        return states


@flax.struct.dataclass
class HashNetwork(Headless):
    """Implements `Network` for a `Hash`.

    Its cache holds the tokens, so that a stale or missing slot changes the logits.
    """

    dist: Hash = flax.struct.field(pytree_node=False)

    @property
    def vocab_size(self) -> int:
        return self.dist.vocab_size

    def prefill(self, inputs, input_lengths, slots, copies=1):
        valid = jnp.arange(inputs.shape[1]) < input_lengths[:, None]
        number = input_lengths.astype(jnp.uint32)
        for column in range(inputs.shape[1]):
            number = jnp.where(
                valid[:, column], _mix(number, inputs[:, column].astype(jnp.uint32)), number
            )
        return HashCache(
            jnp.full((inputs.shape[0] * copies, slots), -1, jnp.int32), jnp.repeat(number, copies)
        )

    def decode(self, tokens, positions, cache, valid=None):
        row, queries = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
        slots = positions[:, None] + jnp.arange(queries)
        stored = cache.tokens.at[row, slots].set(tokens)
        previous = jnp.where(slots > 0, stored[row, jnp.maximum(slots - 1, 0)], 0)
        number = jnp.broadcast_to(cache.inputs[:, None], tokens.shape)
        logits = self.dist.logits(number, previous.astype(jnp.uint32), tokens.astype(jnp.uint32))
        return logits, cache.replace(tokens=stored)

    def node_cache(self, cache, slots, positions):
        room = ((0, 0), (0, slots - cache.tokens.shape[1]))
        return cache.replace(tokens=jnp.pad(cache.tokens, room, constant_values=-1))

    def decode_nodes(self, tokens, nodes, cache, valid=None):
        row = jnp.arange(len(tokens))[:, None]
        slots = nodes.starts[:, None] + jnp.arange(tokens.shape[1])
        stored = cache.tokens.at[row, slots].set(tokens)
        before = jnp.maximum(nodes.positions - 1, 0)[..., None]
        parents = jnp.take_along_axis(nodes.paths, before, axis=2)[..., 0]
        previous = jnp.where(nodes.positions > 0, jnp.take_along_axis(stored, parents, axis=1), 0)
        number = jnp.broadcast_to(cache.inputs[:, None], tokens.shape)
        logits = self.dist.logits(number, previous.astype(jnp.uint32), tokens.astype(jnp.uint32))
        return logits, cache.replace(tokens=stored)

    def move_nodes(self, cache, sources, starts):
        row = jnp.arange(len(starts))[:, None]
        slots = starts[:, None] + jnp.arange(sources.shape[1])
        moved = cache.tokens.at[row, slots].set(
            jnp.take_along_axis(cache.tokens, sources, axis=1), mode="drop"
        )
        return cache.replace(tokens=moved)


class HashModel:
    """The `LanguageModel` of a `Hash`: rows with different inputs have different distributions."""

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        *,
        eos_ids=(1,),
        start_token=0,
        vocabulary=None,
        **dist,
    ):
        self.dist = Hash(vocab_size, seed, **dist)
        self.network, self.fingerprint = HashNetwork(self.dist), str(self.dist)
        self.config = types.SimpleNamespace(
            image_id=None,
            vocab_size=vocab_size,
            input_vocab_size=vocab_size,
            shares_vocabulary=True,
            emb_dim=vocab_size,
            dtype="float32",
            encoder_dim=None,
            decoder_only=False,
            max_positions=None,
        )
        self.vocabulary, self.start_token, self.eos_ids, self.name = (
            vocabulary,
            start_token,
            tuple(eos_ids),
            "hash",
        )

    def logits(self, inputs, decoder_tokens, input_lengths=None):
        """Returns teacher-forced logits `[B, T, V]` in numpy."""
        inputs, tokens = np.asarray(inputs), np.asarray(decoder_tokens, np.uint32)
        lengths = (
            count_until_padding(inputs) if input_lengths is None else np.asarray(input_lengths)
        )
        number = lengths.astype(np.uint32)
        for column in range(inputs.shape[1]):
            number = np.where(
                column < lengths, _mix(number, inputs[:, column].astype(np.uint32)), number
            )
        previous = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        return self.dist.logits(np.broadcast_to(number[:, None], tokens.shape), previous, tokens)


@flax.struct.dataclass
class EchoNetwork(Headless):
    """Implements a `Network` whose i-th new token is the i-th id of its input.

    Its cache is the inputs `[B, L]`.

    Attributes:
      vocab_size: V.
      wrong: at every `wrong`-th position it predicts the id after the right one; 0: never.
    """

    vocab_size: int = flax.struct.field(pytree_node=False)
    wrong: int = flax.struct.field(pytree_node=False, default=0)

    def prefill(self, inputs, input_lengths, slots, copies=1):
        return jnp.repeat(inputs, copies, axis=0)

    def decode(self, tokens, positions, cache, valid=None):
        slots = positions[:, None] + jnp.arange(tokens.shape[1])
        echoed = jnp.take_along_axis(cache, jnp.minimum(slots, cache.shape[1] - 1), axis=1)
        if self.wrong:
            echoed = jnp.where(
                slots % self.wrong == self.wrong - 1, (echoed + 1) % self.vocab_size, echoed
            )
        return 8 * jax.nn.one_hot(echoed, self.vocab_size), cache


class EchoModel:
    """A `LanguageModel` that repeats its input, so that a test can choose the decoded text."""

    def __init__(self, vocabulary, wrong: int = 0):
        self.network, self.config = (
            EchoNetwork(vocabulary.size, wrong),
            types.SimpleNamespace(
                image_id=None,
                vocab_size=vocabulary.size,
                input_vocab_size=vocabulary.size,
                shares_vocabulary=True,
                encoder_dim=None,
                decoder_only=False,
                max_positions=None,
            ),
        )
        self.vocabulary, self.start_token, self.eos_ids, self.name = vocabulary, 0, (1,), "echo"


class Words(Vocabulary):
    """A vocabulary of the words w2, w3, … with EOS 1; `offset` tells two of them apart."""

    size, eos_ids = 16, (1,)

    def __init__(self, offset=0):
        self.offset = offset

    def encode(self, text):
        return [int(word[1:]) + self.offset for word in text.split()]

    def decode(self, ids):
        return " ".join(f"w{int(i) - self.offset}" for i in ids if i > 1)

    def piece(self, token):
        return f"w{token - self.offset}"

    def fingerprint(self):
        return str(self.offset)


def compilations(function):
    """Returns how many programs XLA compiled during a call."""
    events, active = [], [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: (
            events.append(event) if active[0] and "backend_compile" in event else None
        )
    )
    function()
    active[0] = False
    return len(events)


def teacher_forced_greedy(
    model, row, limit: int, eos_ids=(), prefix=()
) -> tuple[list[int], list[float]]:
    """Returns the new ids of one row and their log-probabilities: the slow reference.

    It takes the argmax of the whole teacher-forced sequence, one token at a time.
    """
    tokens, log_probs = [model.start_token, *prefix], []
    inputs = np.array(
        [[*row, *[0] * (8 - len(row))]], np.int32
    )  # one shape for all rows: one compilation
    while len(log_probs) < limit:
        padded = np.array([tokens + [0] * (16 - len(tokens))], np.int32)
        logits = np.asarray(model.logits(inputs, padded, [len(row)]), np.float64)[
            0, len(tokens) - 1
        ]
        token = int(np.argmax(logits))
        log_probs.append(
            logits[token] - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
        )
        tokens.append(token)
        if token in eos_ids:
            break
    return tokens[1 + len(prefix) :], log_probs
