"""Model families are declared in one table; one from outside decodes like our own."""

import ast
import dataclasses
import pathlib
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specdec_jax as sd
from specdec_jax.backends.backend import Backend
from specdec_jax.backends.kv_cache import KVCache
from specdec_jax.backends.xla import DecoderCall
from specdec_jax.models import families, parameters
from specdec_jax.models.attention import Attention
from specdec_jax.models.bart import BartConfig
from specdec_jax.models.block_options import BlockOptions
from specdec_jax.models.config_validation import check_fields
from specdec_jax.models.family import FamilyModule, ModelConfig
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.layers import Dense, undrawn_parameters
from specdec_jax.models.network import initial_params
from specdec_jax.models.t5 import T5Config, check_t5

pytestmark = pytest.mark.usefixtures("quick")

PACKAGE = pathlib.Path(sd.__file__).parent
CLASSES = {"T5Config", "GPTConfig"}
# The families' own files; what reads other people's files of one family, or knows another library
# that has only one.
MAY_ASK = (
    "models/t5.py",
    "models/gpt.py",
    "models/families.py",
    "checkpoints/huggingface",
    "interop/",
)

# A family of its own: attention without positions, whose first token weighs as much as the last.


@dataclasses.dataclass(frozen=True)
class BagConfig(ModelConfig):
    """Shape of a decoder-only network of layers that are attention alone."""

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_decoder_layers: int
    mlp_dim: int = 8
    logits_via_embedding: bool = False
    dropout_rate: float = 0.0
    dtype: str = "float32"
    matmul_dtype: str | None = None
    family: ClassVar[str] = "bag"
    decoder_only: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self)

    @property
    def head_dim(self) -> int:
        return self.emb_dim // self.num_heads

    def with_own_head(self) -> "BagConfig":
        return dataclasses.replace(self, logits_via_embedding=False)

    def module(self, backend: Backend = Backend()) -> "Bag":
        # No kernel of a CPU's own: weights are not packed.
        return Bag(self, Backend(backend.joins_weights, backend.rules))

    def block_options(self) -> BlockOptions:
        return BlockOptions(
            **self.shared_options(),
            num_encoder_layers=0,
            activations=("relu",),
            norm="rms",
            use_bias=False,
            self_attention="self_attention",
            joint_attention=False,
            cross_attention=False,
            relative_buckets=None,
            relative_bias_per_layer=False,
            num_positions=None,
            query_divisor=1.0,
            embedding_deviation=1.0,
            scales_outputs=False,
            inner_dropout=False,
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        width, square = self.emb_dim, (self.emb_dim, self.emb_dim)
        weights = {
            f"self_attention/{name}/kernel": square for name in ("query", "key", "value", "out")
        }
        layers = range(self.num_decoder_layers)
        return {
            "token_embedder/embedding": (self.vocab_size, width),
            "decoder/logits_dense/kernel": (width, self.vocab_size),
            **{
                f"decoder/layers_{i}/{name}": shape
                for i in layers
                for name, shape in weights.items()
            },
            **{f"decoder/layers_{i}/norm/scale": (width,) for i in layers},
        }


@flax.struct.dataclass
class BagCache:
    blocks: tuple[KVCache, ...]

    def repeated(self, copies: int) -> "BagCache":
        return BagCache(tuple(layer.repeated(copies) for layer in self.blocks))


class BagEmbedder(FamilyModule):
    config: BagConfig

    def setup(self):
        shape = (self.config.vocab_size, self.config.emb_dim)
        self.embedding = self.param("embedding", jax.nn.initializers.normal(1.0), shape)

    def __call__(self, tokens, valid=None):
        return jnp.take(self.embedding, tokens, axis=0, mode="clip")


class BagLayer(FamilyModule):
    config: BagConfig
    backend: Backend = Backend()

    def setup(self):
        options = self.config.block_options()
        self.norm = options.make_norm()
        self.self_attention = Attention(options, self.backend, self.backend.joins_weights)

    def __call__(self, x, cache, call):
        return self.self_attention.attend_to_cache(x, self.norm, cache, call, None, lambda y: y)

    def over(self, x, mask):
        return self.self_attention.attend_to_sequence(x, self.norm, mask, None, lambda y: y)


class BagDecoder(FamilyModule):
    config: BagConfig
    backend: Backend = Backend()

    def setup(self):
        self.layers = [
            BagLayer(self.config, self.backend) for _ in range(self.config.num_decoder_layers)
        ]
        self.logits_dense = Dense(self.config.vocab_size, output_dtype=jnp.float32)

    def step(self, x, positions, cache: BagCache, layers: int | None = None, valid=None):
        queries, written = positions[:, None] + jnp.arange(x.shape[1]), list(cache.blocks)
        mask = jnp.arange(cache.blocks[0].slots) <= queries[:, None, :, None]
        for i, layer in enumerate(self.layers[:layers]):
            x, written[i] = layer(x, cache.blocks[i], DecoderCall(positions, mask))
        return x, BagCache(tuple(written))

    def __call__(self, x):
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        for layer in self.layers:
            x = layer.over(x, mask)
        return x

    def logits(self, x, embedding, valid=None):
        return self.logits_dense(x, valid)


class Bag(FamilyModule):
    config: BagConfig
    backend: Backend = Backend()

    def setup(self):
        self.token_embedder, self.decoder = (
            BagEmbedder(self.config),
            BagDecoder(self.config, self.backend),
        )

    def decode_states(self, tokens, positions, cache, layers=None, valid=None):
        x = self.token_embedder(tokens, valid)
        return self.decoder.step(x, positions, cache, layers, valid)

    def head(self, states, valid=None):
        return self.decoder.logits(states, None, valid)

    def prefill(self, inputs, mask, slots: int, copies: int = 1, encoded=None) -> BagCache:
        config = self.config
        shape = (len(inputs) * copies, config.num_heads, slots, config.head_dim)
        return BagCache(
            tuple(KVCache.empty(*shape, jnp.float32) for _ in range(config.num_decoder_layers))
        )

    def __call__(self, tokens, places=None):
        states = self.decoder(self.token_embedder(tokens))
        return self.head(
            states if places is None else jnp.take_along_axis(states, places[..., None], axis=1)
        )


TINY = BagConfig(24, 16, 2, 2)
PROMPTS = [[5, 6, 7, 8], [3], [9, 2, 11]]


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(families.FAMILIES, "bag", BagConfig)


def bag(seed: int, config: BagConfig = TINY) -> sd.LanguageModel:
    return sd.LanguageModel.random(config, seed, eos_ids=())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_family_from_outside_decodes_speculatively_as_plainly(temperature):
    target = bag(0)
    # Of another seed, or of fewer layers: some of its drafts are taken.
    drafters = [
        sd.ModelDrafter(bag(1)),
        sd.ModelDrafter(target),
        sd.EarlyExitDrafter(target, 1),
        sd.PromptLookupDrafter(),
    ]
    # With the Gumbel coupling a draw does not depend on the drafter either.
    sampling = sd.SamplingConfig(temperature=temperature)
    options = dict(max_new_tokens=9, key=jax.random.key(0), sampling=sampling, verifier="gumbel")
    plain = sd.generate(target, PROMPTS, **options)
    for drafter in drafters:
        found = sd.generate(target, PROMPTS, drafter=drafter, gamma=3, **options)
        np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert len(set(plain.tokens.ravel().tolist())) > 3 and found.stats.drafted > 0


@pytest.mark.slow
def test_its_loop_computes_what_it_computes_teacher_forced():
    target = bag(0)
    result = sd.generate(target, PROMPTS, max_new_tokens=9)
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        fed = np.array([prompt + tokens[:-1].tolist()])
        logits = target.logits(None, fed)[0, len(prompt) - 1 :]
        np.testing.assert_array_equal(np.argmax(logits, axis=-1), tokens)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_it_is_stored_and_loaded(tmp_path, registered, dtype):
    target = bag(0)
    sd.save(target, tmp_path / "bag", dtype)
    loaded = sd.load(tmp_path / "bag", "float32", quantize="none")
    assert loaded.config == target.config
    if dtype == "float32":
        assert loaded.fingerprint == target.fingerprint
    sd.convert(tmp_path / "bag", tmp_path / "again", "specdec")
    assert sd.load(tmp_path / "again", "float32", quantize="none").fingerprint == loaded.fingerprint
    for form in ("huggingface", "t5x", "t5x_legacy"):
        with pytest.raises(
            ValueError, match=f"format: got '{form}' for a decoder-only model, expected 'specdec'"
        ):
            sd.convert(tmp_path / "bag", tmp_path / "rejected", form)


def test_a_family_that_is_not_in_the_table_is_not_stored(tmp_path):
    with pytest.raises(ValueError, match="got a BagConfig, expected one of the table of families"):
        sd.save(bag(0), tmp_path / "bag")
    assert not (tmp_path / "bag").exists()


def test_a_stored_family_that_is_gone_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(families.FAMILIES, "bag", BagConfig)
        sd.save(bag(0), tmp_path / "bag")
    with pytest.raises(ValueError, match="architecture: got 'bag', expected one of t5, gpt"):
        sd.load(tmp_path / "bag", "float32")


def test_a_bag_is_no_t5():
    with pytest.raises(ValueError, match="target: got a decoder-only model, expected a T5"):
        check_t5("target", TINY)


# The table.


@pytest.mark.parametrize("name", [*families.FAMILIES, "bag"])
def test_every_row_answers(name, registered):
    shape = families.FAMILIES[name]
    assert shape.family == name and isinstance(shape.decoder_only, bool)
    tiny = {
        "t5": T5Config(24, 16, 2, 8, 1, 1, 24),
        "gpt": sd.GPTConfig(24, 16, 2, 1, 24),
        "bart": BartConfig(24, 16, 2, 1, 1, 24),
        "gemma": GemmaConfig(24, 16, 2, 1, 8, 1, 24),
        "t5gemma": T5GemmaConfig(
            *(24, 16, 2, 1, 8, 1, 24),
            num_encoder_layers=1,
            encoder_emb_dim=12,
            encoder_mlp_dim=8,
            encoder_num_heads=1,
            encoder_num_kv_heads=1,
        ),
        "bag": TINY,
    }[name]
    made = jax.eval_shape(lambda key: initial_params(tiny.module(), key), jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in parameters.flatten(made).items()}
    assert shapes == tiny.parameter_shapes() == parameters.parameter_shapes(tiny)
    assert tiny.max_positions == (1024 if name in ("gpt", "bart") else None)
    assert tiny.explicit() == tiny.explicit().explicit()
    assert not tiny.with_own_head().logits_via_embedding
    assert families.build_config(families.describe(tiny)) == tiny
    assert shape.presets().items() <= families.PRESETS.items()


def test_no_file_asks_for_a_family_by_its_class():
    """Files of other families contain no `isinstance`, `issubclass` or `match` on its classes."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(MAY_ASK):
            found += [
                f"{name}:{line}" for line in asked(ast.parse(path.read_text(encoding="utf-8")))
            ]
    assert not found


def asked(tree: ast.AST) -> list[int]:
    """Lines of a file that ask for a family's class."""

    def named(node):
        return any(
            isinstance(part, ast.Name)
            and part.id in CLASSES
            or isinstance(part, ast.Attribute)
            and part.attr in CLASSES
            for part in ast.walk(node)
        )

    lines = []
    for node in ast.walk(tree):
        calls = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if (
            calls
            and node.func.id in ("isinstance", "issubclass")
            and any(named(each) for each in node.args[1:])
        ):
            lines.append(node.lineno)
        if isinstance(node, ast.Compare) and any(
            isinstance(each, ast.Name | ast.Attribute)
            and named(each)
            and not isinstance(each.ctx, ast.Store)
            and (each.id if isinstance(each, ast.Name) else each.attr) in CLASSES
            for each in [node.left, *node.comparators]
        ):
            lines.append(node.lineno)
        if isinstance(node, ast.MatchClass) and named(node.cls):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize(
    "line, count",
    [
        ("isinstance(config, T5Config)", 1),
        ("isinstance(config, (t5.T5Config, gpt.GPTConfig))", 1),
        ("issubclass(kind, GPTConfig)", 1),
        ("type(config) is T5Config", 1),
        ("config.family == T5Config.family", 0),
        ("T5Config(1, 1, 1, 1, 1, 1, 1)", 0),
    ],
)
def test_the_search_finds_what_it_looks_for(line, count):
    assert len(asked(ast.parse(line))) == count


def test_parameters_are_zeros_only_where_shapes_are_asked_for():
    def weight():
        return Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))["params"]["kernel"]

    drawn = weight()
    with undrawn_parameters():
        assert not weight().any()
    assert drawn.any() and np.array_equal(weight(), drawn)
