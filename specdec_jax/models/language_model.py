"""`LanguageModel`: a network with its parameters, vocabulary and special ids."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from specdec_jax.backends.axes import Logits
from specdec_jax.backends.backend import Backend, choose_backend
from specdec_jax.backends.cpu import packed_weights
from specdec_jax.backends.int8 import Int8Weight
from specdec_jax.backends.jax_settings import check_not_traced, isolated
from specdec_jax.backends.sharding import ShardingRules
from specdec_jax.files.reading import mismatch_error, quote_value
from specdec_jax.models import arguments, fingerprints, weight_layouts
from specdec_jax.models.dummy_weights import make_dummy_params
from specdec_jax.models.family import ModelConfig, check_uses_backend
from specdec_jax.models.forks import check_process
from specdec_jax.models.model_defaults import ModelDefaults
from specdec_jax.models.network import (
    Network,
    check_positions,
    continuation_logits,
    is_decoder_only,
    join,
    lay_out,
    random_params,
    teacher_forced_logits,
)
from specdec_jax.models.padding import remove_padding
from specdec_jax.tokenizers.vocabularies import Vocabulary


class LanguageModel:
    """A network with its parameters, vocabulary and special ids.

    Attributes:
      config: the network's shape.
      params: nested dict of arrays, named as in T5X; converted from the loop's layout at every
        access.
      vocabulary: maps text to ids; None: inputs and outputs are ids.
      start_token: id that every decoder sequence begins with; in a decoder-only model, every
        sequence with an empty prompt.
      eos_ids: ids that end a sequence.
      name: name in messages and records.
      encoder_fingerprint: for a model without an encoder of its own, the `fingerprint` of the model
        whose encoder output it was trained on; None: unknown.
      generation_config: how it decodes where a call of `generate` does not say otherwise; may be
        assigned. `ModelDefaults()` says nothing, and so does None.
      network: the same model as jitted functions take it.
      quantized: whether the weights, the head's too, are in int8, with a scale for each output;
        all else is then in the configuration's dtype, and `params` has the values times the scales.
      input_bits: bits to which inputs of products are rounded, 16 or 8, if the model is `quantized`
        and on a CPU. None: they are not rounded.
    """

    @isolated
    def __init__(
        self,
        config: ModelConfig,
        params: dict,
        vocabulary: Vocabulary | None = None,
        *,
        start_token: int = 0,
        eos_ids: Sequence[int] = (1,),
        name: str = "",
        donate_params: bool = False,
        encoder_fingerprint: str | None = None,
        rules: ShardingRules | None = None,
        generation_config: ModelDefaults = ModelDefaults(),
    ):
        """Checks the ids and converts the parameters to the loop's layout.

        Arguments without a line are attributes.

        Args:
          params: nested dict of arrays, named as in T5X. All its weights may be `Int8Weight`s,
            whose inputs are rounded only where `packed_weights.can_pack`; a model whose head is its
            embedding then has a head too, "decoder/logits_dense/kernel".
          donate_params: whether the nested dicts of `params` may be emptied during the conversion,
            so that at most one weight matrix exists twice.
          rules: how the parameters lie on a mesh; None: on one device.

        Raises:
          ValueError: an id without a logit, a shape that the mesh cannot divide, or weights in
            int8 where they cannot be used.
        """
        check_process()
        check_ids(config, vocabulary, start_token, eos_ids)
        self.config, self.name = config, name
        self.vocabulary: Any = vocabulary  # callers that decode texts know that there is one
        self.encoder_fingerprint, self.generation_config = encoder_fingerprint, generation_config
        self.start_token, self.eos_ids = int(start_token), tuple(int(token) for token in eos_ids)
        if not donate_params:
            # Arrays of 64 bits can be made where `jax_enable_x64` is on.
            params = jax.tree.map(
                lambda leaf: leaf.astype(config.dtype) if leaf.dtype == np.float64 else leaf, params
            )
        self.quantized, self.input_bits = weight_layouts.describe_rounding(params)
        check_own_network(config, rules, self.quantized)
        alone = rules is None and not config.matmul_dtype and config.uses_backend
        weight_only = self.quantized and self.input_bits is None  # inputs of products as they are
        native = alone and packed_weights.can_pack(config.dtype) and not weight_only
        if self.quantized and not (native or (alone and weight_only)):
            raise mismatch_error(
                "params", "weights in int8", packed_weights.describe_support(config.dtype)
            )
        if rules is not None:
            rules.check(config)
            lay_out(params, rules)
        platform = jax.default_backend() if rules is None else rules.mesh.devices.flat[0].platform
        backend = choose_backend(platform, rules, native) if config.uses_backend else Backend()
        how = native, backend.joins_weights, backend.transposes_int8
        packed = weight_layouts.pack(params, *how)
        if (native or self.quantized) and config.logits_via_embedding:
            packed = weight_layouts.add_head(packed, True, native)
            config = config.with_own_head()
        self.network = Network(packed, config.module(backend))

    @classmethod
    @isolated
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        vocabulary: Vocabulary | None = None,
        *,
        rules: ShardingRules | None = None,
        quantize: str | None = None,
        **options: Any,
    ) -> "LanguageModel":
        """Makes a model with random parameters in the configuration's dtype, for tests and timing.

        With `quantize="int8"` or "w8a8" its weights are rounded to 8 bits, as by `load`; None and
        "none" leave them as they are. Other options, such as `eos_ids`, are those of the class.
        """

        def make() -> dict:
            key = jax.random.key(seed) if rules is None else rules.put(jax.random.key(seed))
            return random_params(key, module=config.module(), dtype=config.dtype, rules=rules)

        options = {"name": "random", "vocabulary": vocabulary, **options}
        return cls._from_function(config, make, rules, quantize, **options)

    @classmethod
    @isolated
    def dummy(
        cls,
        config: ModelConfig,
        *,
        rules: ShardingRules | None = None,
        quantize: str | None = None,
        report: Callable[[int], None] = lambda count: None,
        **options: Any,
    ) -> "LanguageModel":
        """Makes a model whose parameters are dummy weights, for timing.

        On an accelerator even T5-XXL's take seconds, on a CPU some ten for a thousand million
        (`dummy_weights.py`). Arguments are those of `random`; `report` is called with the size of
        each parameter that is there.
        """

        def make() -> dict:
            if quantize not in packed_weights.INPUT_BITS:
                return make_dummy_params(config, rules, report=report)

            # Else a model that fits only in int8 would first lie there in full.
            def round_weight(weight: jax.Array) -> Int8Weight:
                bits = packed_weights.input_bits(quantize)
                return jax.block_until_ready(Int8Weight.quantize(weight, bits))

            return make_dummy_params(config, rules, round_weight, report)

        return cls._from_function(config, make, rules, quantize, **{"name": "dummy", **options})

    @classmethod
    def _from_function(
        cls,
        config: ModelConfig,
        make: Callable[[], dict],
        rules: ShardingRules | None,
        quantize: str | None,
        **options: Any,
    ) -> "LanguageModel":
        """Checks that there can be a model, and makes it of the parameters that `make` returns."""
        check_process()
        inspect.signature(cls).bind(config, {}, **options)  # before anything is made
        check_own_network(config, rules, quantize in packed_weights.INPUT_BITS)
        packed_weights.check_quantize(quantize, config.dtype, rules is not None)
        if rules is not None:
            rules.check(config)
        params = make()
        if quantize in packed_weights.INPUT_BITS:
            bits = packed_weights.input_bits(quantize)
            params = weight_layouts.round_params(params, bits, config.logits_via_embedding)
        return cls(config, params, donate_params=True, rules=rules, **options)

    def __repr__(self) -> str:
        kind = f"{self.config.dtype}{', weights in int8' * self.quantized}"
        vocabulary = "none" if self.vocabulary is None else f"{self.vocabulary.size:,} ids"
        return f"LanguageModel({self.name!r}: {self.network!r}, {kind}, vocabulary: {vocabulary})"

    @property
    @isolated
    def params(self) -> dict:
        return weight_layouts.unpack(self.network.params)

    @functools.cached_property
    @isolated
    def fingerprint(self) -> str:
        """A digest of all weights rounded to bfloat16, whatever their dtype and layout.

        What was trained on the states of a model stores it, since it fits no other model.
        """
        return fingerprints.digest_rounded(self.network.params, self.network.rules)

    @functools.cached_property
    @isolated
    def contents(self) -> str:
        """A digest of the exact weights, the configuration, and how weights and inputs are rounded.

        Models that may compute different numbers differ in it. Weights in int8 count as different
        from the same numbers in float32, because their products differ.
        """
        exact = fingerprints.digest_exact(self.network.params, self.network.rules)
        inputs = {None: " with inputs as they are", 16: "", 8: " with inputs in int8"}
        rounded = f" in int8{inputs[self.input_bits]}" if self.quantized else ""
        return f"{exact} {self.config}{rounded}"

    @isolated
    def logits(
        self,
        inputs: Any,
        decoder_tokens: Any,
        input_lengths: Any = None,
        encoder: "LanguageModel | None" = None,
        attention_mask: Any = None,
    ) -> Logits:
        """Returns the teacher-forced logits of the token after each of `decoder_tokens`.

        Args:
          inputs: `[B, L]` ids; the model's padding id (T5's is 0, BART's 1) before or after the
            text is padding. For a decoder-only model they are the tokens before
            `decoder_tokens`, 0 is an ordinary id, and None means that there are none.
          decoder_tokens: `[B, T]` decoder inputs, the start token first; for a decoder-only model
            any part of a sequence.
          input_lengths: `[B]`, number of ids of each input that count; None: see `inputs`.
          encoder: the model whose encoder reads the inputs, for a model with an `encoder_dim`; else
            None.
          attention_mask: `[B, L]`, 1 for ids that count and 0 for padding, on either side, in place
            of `input_lengths`.

        Raises:
          ValueError: an id that the model lacks (ids of `inputs` past a row's length do not
            matter), more ids than it has positions, no inputs for a model with an encoder, or an
            `encoder` that is missing or does not fit.
        """
        check_process()
        check_not_traced("logits", [inputs, decoder_tokens, input_lengths, attention_mask])
        if (encoder and encoder.config.encoded_dim) != self.config.encoder_dim:
            got = f"one of width {encoder.config.encoded_dim}" if encoder else "none"
            width = self.config.encoder_dim
            own = width is None
            expected = "none: the model has its own" if own else f"a model of width {width}"
            raise mismatch_error("encoder", got, expected)
        decoder_tokens = _as_ids("decoder_tokens", decoder_tokens)
        if inputs is None:
            if not is_decoder_only(self):
                raise mismatch_error("inputs", "None for a model with an encoder", "ids [B, L]")
            inputs = np.zeros((len(decoder_tokens), 0))
        inputs = _as_ids("inputs", inputs)
        if len(inputs) != len(decoder_tokens):
            expected = f"{len(decoder_tokens)}, as many as decoder_tokens"
            raise mismatch_error("inputs", f"{len(inputs)} rows", expected)
        inputs, input_lengths = remove_padding(self, inputs, input_lengths, attention_mask)
        inside = np.arange(inputs.shape[1]) < input_lengths[:, None]
        reader = (encoder or self).config
        self._check_tokens("inputs", inputs[inside], reader.input_vocab_size)
        self._check_tokens("decoder_tokens", decoder_tokens, self.config.vocab_size)
        if not is_decoder_only(self):
            check_positions(self.config, int(max(input_lengths, default=0)), "inputs")
            check_positions(self.config, decoder_tokens.shape[1], "decoder_tokens")
            call = inputs, input_lengths, decoder_tokens, encoder and encoder.network
            return teacher_forced_logits(self.network, *call)
        check_positions(self.config, int(max(input_lengths, default=0)) + decoder_tokens.shape[1])
        return continuation_logits(self.network, *join(inputs, input_lengths, decoder_tokens))

    def _check_tokens(self, name: str, tokens: Int[np.ndarray, "..."], count: int) -> None:
        wrong = tokens[(tokens < 0) | (tokens >= count)]
        if wrong.size:
            raise mismatch_error(name, f"id {wrong[0]}", f"0 to {count - 1}")


def _as_ids(name: str, ids: Any) -> Int[np.ndarray, "B T"]:
    """Returns rows of ids as int32; raises ValueError for anything that this would change."""
    array = arguments.as_array(ids)
    sound = array.ndim == 2 and (not array.size or np.issubdtype(array.dtype, np.integer))
    if not sound or (array.size and (array.min() < -(2**31) or array.max() >= 2**31)):
        raise mismatch_error(name, arguments.quote(ids), "rows of ids, all of one length")
    if not len(array):
        raise mismatch_error(name, "no rows", "at least one")
    return array.astype(np.int32)


_MOST_PAST_LOGITS = 128  # ids of a vocabulary for which a model has no logit


def check_ids(
    config: ModelConfig, vocabulary: Vocabulary | None, start_token: int, eos_ids: Sequence[int]
) -> None:
    """Raises ValueError unless special ids, and all but a few of the vocabulary, have a logit."""
    eos_ids = arguments.check_list("eos_ids", eos_ids, "a list of ids")
    for token in (start_token, *eos_ids):
        whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not whole or not 0 <= token < config.vocab_size:
            expected = f"an id of the vocabulary of {config.vocab_size}"
            raise mismatch_error("special id", quote_value(token), expected)
    # A few added tokens, or T5's sentinels, may lie past the logits: they cannot come out, and as
    # inputs they are rejected where they occur.
    if vocabulary is not None and vocabulary.size > config.vocab_size + _MOST_PAST_LOGITS:
        logits = f"the {config.vocab_size} logits of the model"
        expected = f"at most {logits} and {_MOST_PAST_LOGITS} more"
        raise mismatch_error("vocabulary", f"{vocabulary.size} pieces", expected)


def check_own_network(config: ModelConfig, rules: ShardingRules | None, quantized: bool) -> None:
    """Raises ValueError for a missing field, or what only a network with a backend can have."""
    for name in ("vocab_size", "emb_dim", "dtype"):
        if not hasattr(config, name):
            raise mismatch_error(type(config).__name__, f"no {name}", f"a field {name}")
    if quantized or rules is not None:
        check_uses_backend(config, "weights in int8" if quantized else "a mesh")
