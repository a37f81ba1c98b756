"""The Gemma family by configuration: Gemma 2 and 3, and T5Gemma 1 and 2 with their encoders."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from specdec_jax.backends.backend import Backend
from specdec_jax.models.block_options import BlockOptions, LayerKind
from specdec_jax.models.blocks import DecoderOnly, EncoderDecoder
from specdec_jax.models.config_validation import FieldError, check_fields
from specdec_jax.models.family import ModelConfig, list_shapes
from specdec_jax.models.rotary import Rotary


@dataclasses.dataclass(frozen=True)
class GemmaConfig(ModelConfig):
    """The shape of a Gemma: rotary positions, heads that share keys, caps, sliding windows.

    Each block has a norm before it and another after it, and the feed-forward block is gated.

    Attributes:
      vocab_size: rows of the embedding and width V of the logits.
      emb_dim: width D.
      num_heads, head_dim: H heads of K features; H·K need not equal D.
      num_kv_heads: heads of keys and values, each shared by H / `num_kv_heads` heads of queries.
      num_decoder_layers: number of layers.
      mlp_dim: hidden width of the feed-forward block.
      windows: of each layer in turn, and after the last one the first again, how many positions a
        query sees from its own back; 0: all.
      query_scalar: scores are divided by its root.
      attention_cap, logits_cap: c of scores and of logits c·tanh(x / c); None: as they are.
      rotary_base, rotary_factor: of the rotary positions, as in `Rotary`.
      local_rotary_base: θ of layers with a window, without a factor; None: they have what the
        others have.
      qk_norm: whether queries and keys of each head have a norm of their own (Gemma 3).
      mlp_activation: activation of the feed-forward block; "gelu" is the tanh approximation.
      logits_via_embedding: whether the head is the transposed embedding.
      dropout_rate: rate in training.
      dtype: name of the computation's dtype, "float32" or "bfloat16".
      matmul_dtype: dtype to which operands of products are rounded (training); None: `dtype`.
      image_id: id that stands for a part of an image, which inputs may not have; None: none.
    """

    vocab_size: int
    emb_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_decoder_layers: int
    mlp_dim: int
    windows: tuple[int, ...] = (4096, 0)
    query_scalar: float = 256
    attention_cap: float | None = None
    logits_cap: float | None = None
    rotary_base: float = 10_000.0
    rotary_factor: float = 1.0
    local_rotary_base: float | None = None
    qk_norm: bool = False
    mlp_activation: str = "gelu"
    logits_via_embedding: bool = True
    dropout_rate: float = 0.0
    dtype: str = "float32"
    matmul_dtype: str | None = None
    image_id: int | None = dataclasses.field(kw_only=True, default=None)
    family: ClassVar[str] = "gemma"
    decoder_only: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self)
        object.__setattr__(self, "windows", tuple(self.windows))
        _check_heads(self)

    def module(self, backend: Backend = Backend()) -> DecoderOnly:
        return DecoderOnly(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what the decoder is made of."""
        return BlockOptions(
            **self.shared_options(),
            num_kv_heads=self.num_kv_heads,
            num_encoder_layers=0,
            activations=(self.mlp_activation, "linear"),
            norm="offset_rms",
            norm_place="both",
            use_bias=False,
            # Names by which `weight_layouts.py` neither joins nor splits weights, which differ in
            # their widths.
            self_attention="grouped_attention",
            encoder_attention="grouped_attention",
            joint_attention=False,
            joins_attention=False,
            cross_attention=False,
            relative_buckets=None,
            relative_bias_per_layer=False,
            num_positions=None,
            layer_kinds=self._list_kinds(self.windows),
            qk_norm=self.qk_norm,
            query_divisor=math.sqrt(self.query_scalar),
            attention_cap=self.attention_cap,
            logits_cap=self.logits_cap,
            embedding_deviation=0.02,
            embedding_scale=math.sqrt(self.emb_dim),
            scales_outputs=False,
            inner_dropout=False,
        )

    def _list_kinds(self, windows: tuple[int, ...]) -> tuple[LayerKind, ...]:
        whole = Rotary(self.rotary_base, self.rotary_factor)
        local = whole if self.local_rotary_base is None else Rotary(self.local_rotary_base)
        return tuple(
            LayerKind(window, local) if window else LayerKind(None, whole) for window in windows
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return list_shapes(self)

    def resize(self, *, num_heads: int, head_dim: int, **sizes: int) -> Self:
        heads = dict(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
        return self.replace(**heads, query_scalar=head_dim, **sizes)

    def explicit(self) -> Self:
        return self.replace(windows=_repeat_windows(self.windows, self.num_decoder_layers))

    @classmethod
    def presets(cls) -> dict[str, "GemmaConfig"]:
        return GEMMA_PRESETS


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(GemmaConfig):
    """The shape of a T5Gemma: a decoder of `GemmaConfig`'s blocks, which attends to an encoder.

    In T5Gemma 1 cross-attention has keys of its own, no positions and no window, and each stack has
    an embedding. In T5Gemma 2 both are shared.

    Attributes:
      num_encoder_layers, encoder_emb_dim, encoder_mlp_dim, encoder_num_heads, encoder_num_kv_heads:
        the encoder's; what is not listed here is the decoder's too.
      encoder_windows: of the encoder's layers, as `windows`: a query sees as many positions from
        its own back, and as many from its own ahead; with `merged_attention` half as many from its
        own back, rounded up, and half as many after its own, rounded down.
      merged_attention: whether the decoder's self-attention attends to its own tokens and to the
        encoder's output by one softmax, with the same weights, and all share one embedding
        (T5Gemma 2).
      apart_id: id whose embedding is another parameter, which is not scaled; None: none.
    """

    num_encoder_layers: int = dataclasses.field(kw_only=True)
    encoder_emb_dim: int = dataclasses.field(kw_only=True)
    encoder_mlp_dim: int = dataclasses.field(kw_only=True)
    encoder_num_heads: int = dataclasses.field(kw_only=True)
    encoder_num_kv_heads: int = dataclasses.field(kw_only=True)
    encoder_windows: tuple[int, ...] = dataclasses.field(kw_only=True, default=(4096, 0))
    merged_attention: bool = dataclasses.field(kw_only=True, default=False)
    apart_id: int | None = dataclasses.field(kw_only=True, default=None)
    family: ClassVar[str] = "t5gemma"
    decoder_only: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "encoder_windows", tuple(self.encoder_windows))
        if self.num_encoder_layers < 1:
            raise FieldError(self, "num_encoder_layers", "got 0, expected at least 1")
        _check_heads(self, "encoder_")
        if self.merged_attention and self.encoder_emb_dim != self.emb_dim:
            expected = f"emb_dim = {self.emb_dim} with merged_attention"
            raise FieldError(
                self, "encoder_emb_dim", f"got {self.encoder_emb_dim}, expected {expected}"
            )

    @property
    def encoded_dim(self) -> int:
        return self.encoder_emb_dim

    def module(self, backend: Backend = Backend()) -> EncoderDecoder:
        return EncoderDecoder(self, backend)

    def block_options(self) -> BlockOptions:
        """Returns what the decoder is made of."""
        return dataclasses.replace(
            super().block_options(),
            num_encoder_layers=self.num_encoder_layers,
            separate_embeddings=not self.merged_attention,
            cross_attention=not self.merged_attention,
            merged_attention=self.merged_attention,
            apart_id=self.apart_id,
        )

    def encoder_options(self) -> BlockOptions:
        """Returns what the encoder is made of."""
        names = "emb_dim", "mlp_dim", "num_heads", "num_kv_heads"
        return dataclasses.replace(
            self.block_options(),
            **{name: getattr(self, f"encoder_{name}") for name in names},
            layer_kinds=tuple(map(self._reach_ahead, self._list_kinds(self.encoder_windows))),
            embedding_scale=math.sqrt(self.encoder_emb_dim),
        )

    def explicit(self) -> Self:
        windows = _repeat_windows(self.encoder_windows, self.num_encoder_layers)
        return super().explicit().replace(encoder_windows=windows)

    def _reach_ahead(self, kind: LayerKind) -> LayerKind:
        """Returns a layer's kind with the window of an encoder."""
        if kind.window is None:
            return kind
        if self.merged_attention:
            return kind._replace(window=(kind.window + 1) // 2, ahead=kind.window // 2)
        return kind._replace(ahead=kind.window - 1)

    @classmethod
    def presets(cls) -> dict[str, "T5GemmaConfig"]:  # type: ignore[override]
        return T5GEMMA_PRESETS


def shorten_windows(windows: Sequence[int]) -> tuple[int, ...]:
    """Returns as few of the windows of all layers as say them: after the last, the first again."""
    count, windows = len(windows), list(windows)
    repeats = (n for n in range(1, count) if windows[n:] == windows[:-n])
    return tuple(windows[: next(repeats, count)])


def _repeat_windows(windows: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Returns the shortest windows that say what these say of so many layers."""
    return shorten_windows([windows[i % len(windows)] for i in range(layers)])


def _check_heads(config: GemmaConfig, stack: str = "") -> None:
    """Raises FieldError unless heads of keys can be shared, and a head's features be rotated."""
    shared, heads = (getattr(config, f"{stack}num_{kind}heads") for kind in ("kv_", ""))
    if heads % shared:
        expected = f"a divisor of {stack}num_heads = {heads}"
        raise FieldError(config, f"{stack}num_kv_heads", f"got {shared}, expected {expected}")
    if config.head_dim % 2:
        raise FieldError(config, "head_dim", f"got {config.head_dim}, expected an even number")


# D, H, heads of keys, K, layers, the MLP's width.
_SIZES = {
    "s": (512, 8, 8, 64, 8, 1024),
    "b": (768, 12, 12, 64, 12, 2048),
    "l": (1024, 16, 16, 64, 24, 2816),
    "ml": (1152, 4, 4, 256, 26, 6912),
    "xl": (2048, 32, 32, 64, 24, 5120),
    "2b": (2304, 8, 4, 256, 26, 9216),
    "9b": (3584, 16, 8, 256, 42, 14336),
    "27b": (4608, 32, 16, 128, 46, 36864),
    "3-270m": (640, 4, 1, 256, 18, 2048),
    "3-1b": (1152, 4, 1, 256, 26, 6912),
    "3-4b": (2560, 8, 4, 256, 34, 10240),
}
_SIZE_FIELDS = "emb_dim num_heads num_kv_heads head_dim num_decoder_layers mlp_dim".split()
_GEMMA3_SIZES = "270m", "1b", "4b"
_CAPS: dict[str, Any] = dict(attention_cap=50.0, logits_cap=30.0)


def _gemma2(name: str, query_scalar: float = 256) -> GemmaConfig:
    return GemmaConfig(256_000, *_SIZES[name], query_scalar=query_scalar, **_CAPS)


def _t5gemma(encoder: str, decoder: str) -> T5GemmaConfig:
    width, heads, kv_heads, features, layers, mlp_dim = _SIZES[encoder]
    return T5GemmaConfig(
        256_000,
        *_SIZES[decoder],
        query_scalar=features,
        **_CAPS,
        num_encoder_layers=layers,
        encoder_emb_dim=width,
        encoder_mlp_dim=mlp_dim,
        encoder_num_heads=heads,
        encoder_num_kv_heads=kv_heads,
    )


def _list_gemma3(size: str) -> dict[str, Any]:
    """Returns the fields of a Gemma 3, or of a stack of a T5Gemma 2."""
    large = size == "4b"
    return dict(
        zip(_SIZE_FIELDS, _SIZES[f"3-{size}"]),
        vocab_size=262_208 if large else 262_144,
        windows=(*[1024 if large else 512] * 5, 0),
        rotary_base=1_000_000.0,
        rotary_factor=8.0 if large else 1.0,
        local_rotary_base=10_000.0,
        qk_norm=True,
    )


def _t5gemma2(size: str) -> T5GemmaConfig:
    fields = _list_gemma3(size)
    own = "emb_dim", "mlp_dim", "num_heads", "num_kv_heads", "windows"
    return T5GemmaConfig(
        **fields,
        **{f"encoder_{name}": fields[name] for name in own},
        num_encoder_layers=fields["num_decoder_layers"],
        merged_attention=True,
        apart_id=256_000,
    )


GEMMA_PRESETS = {
    "gemma2/2b": _gemma2("2b"),
    "gemma2/9b": _gemma2("9b"),
    "gemma2/27b": _gemma2("27b", 144),
    **{f"gemma3/{size}": GemmaConfig(**_list_gemma3(size)) for size in _GEMMA3_SIZES},
}
_PAIRS = [(name, name) for name in ("s", "b", "l", "ml", "xl", "2b", "9b")] + [("9b", "2b")]
T5GEMMA_PRESETS = {f"t5gemma/{first}-{last}": _t5gemma(first, last) for first, last in _PAIRS}
T5GEMMA_PRESETS |= {f"t5gemma2/{size}-{size}": _t5gemma2(size) for size in _GEMMA3_SIZES}
