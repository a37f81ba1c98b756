"""Runs `specdec convert`: writes a checkpoint in another format."""

import dataclasses
import sys

from specdec_jax.backends.xla import ACTIVATIONS
from specdec_jax.checkpoints import converter, loader, t5x
from specdec_jax.models.arguments import document_fields
from specdec_jax.models.t5 import T5Config, check_t5


@document_fields
@dataclasses.dataclass(frozen=True)
class ConvertOptions:
    """Options of `specdec convert`.

    Attributes:
      source: a Hugging Face folder, a T5X checkpoint (legacy or Orbax), a folder of this package,
        or a bundled name
      output: folder to write, which must not exist or be empty; for T5X: checkpoint_<step>, or the
        folder that is to hold it
      format: huggingface (config.json, safetensors, tokenizer), t5x (Orbax) or t5x_legacy
        (T5 alone), or specdec
      dtype: float32 or bfloat16, for specdec also int8 (matrices in int8; not for a target whose
        drafter or heads were trained on its states) (default: bfloat16 if all parameters are stored
        so, else float32)
      vocabulary: SentencePiece model or tokenizer.json, for a source that has none (T5X's); it is
        written too
      gated_activation: activation of a T5X source's gated feed-forward, which the source does not
        name: silu for UL2 (default: gelu)
    """

    source: str | None = None
    output: str | None = None
    format: str | None = None
    dtype: str | None = None
    vocabulary: str | None = None
    gated_activation: str | None = None

    def check(self) -> None:
        for name in ("source", "output", "format"):
            if not getattr(self, name):
                formats = f" (one of {', '.join(converter.FORMATS)})" if name == "format" else ""
                raise ValueError(f"{name}: got nothing, expected --{name}{formats}")


def run(options: ConvertOptions) -> None:
    """Runs `specdec convert`."""
    options.check()
    assert options.source and options.output and options.format
    config = None
    if options.gated_activation:
        config = _read_gated_config(options.source, options.gated_activation)
    paths = options.source, options.output, options.format, options.dtype
    written = converter.convert(*paths, config=config, vocabulary=options.vocabulary)
    kept = set(written.stored) == {written.dtype} or written.dtype == "int8" in written.stored
    kept |= written.dtype == "float32" and "float64" not in written.stored
    source = ", ".join(written.stored) + ("" if kept else ", rounded")
    print(
        f"{written.folder}: {options.format}, {written.parameters:,} parameters in {written.dtype} "
        f"(from {source}), {written.size / 1e6:,.1f} MB",
        file=sys.stderr,
    )


def _read_gated_config(source: str, activation: str) -> T5Config:
    """Returns the shape of a T5X checkpoint whose gated feed-forward has this activation."""
    name = "gated_activation"
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: got {activation!r}, expected one of {ACTIVATIONS}")
    if t5x.find_step(loader.resolve(source)) is None:
        raise ValueError(f"{name}: got it for {source}, expected it for a T5X checkpoint only")
    shape = check_t5("source", loader.load_shape(source))
    if len(shape.mlp_activations) == 1:
        raise ValueError(f"{name}: got a value for a checkpoint without gates, expected none")
    return shape.replace(mlp_activations=(activation, "linear"))
