"""Decodes speculatively inside T5X.

`SpeculativeEncoderDecoderModel` replaces `models.EncoderDecoderModel` in a gin file.
Needs the extra `t5x`; `configs/t5x/speculative.gin` shows how.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import gin
import jax
import jax.numpy as jnp
import numpy as np
from t5x import decoding, models
from t5x.examples.t5 import network

from specdec_jax.analysis.variants import SentenceBatch, Variant
from specdec_jax.checkpoints import loader, t5x
from specdec_jax.decoding import generation_config
from specdec_jax.decoding.results import GenerationResult
from specdec_jax.decoding.search_options import BeamOptions
from specdec_jax.decoding.under_jit import UNSUPPORTED, Decoder, read_options
from specdec_jax.decoding.under_jit_beams import BeamDecoder
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.named import make_traced_drafter
from specdec_jax.files.reading import mismatch_error
from specdec_jax.interop import t5x_run
from specdec_jax.interop.vocabularies import find_difference
from specdec_jax.models import arguments
from specdec_jax.models.family import ModelConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.models.t5 import T5Config
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.tree_text import read_tree

# T5X's arguments that are passed on as they are.
_THEIRS = {
    name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(models.EncoderDecoderModel).parameters.items()
    if name not in ("module", "input_vocabulary", "output_vocabulary", "optimizer_def", "decode_fn")
}
# Fields of both configurations, T5X's and ours.
_SIZES = (
    *("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim"),
    *("num_encoder_layers", "num_decoder_layers"),
)
# A drafter's weights become constants of T5X's program, unless JAX is set to pass constants as
# arguments.
_CONSTANTS, _MOST_BYTES = "jax_use_simplified_jaxpr_constants", 2 * 10**9


class SpeculativeEncoderDecoderModel(models.EncoderDecoderModel):
    """T5X's encoder–decoder model with a drafter beside it.

    The module is T5X's own; T5X restores, partitions and scores with its parameters as usual.
    `predict_batch` and `predict_batch_with_aux` decode with this package's loop. Their results have
    the distribution, the shapes and the scores of T5X's `decoding.temperature_sample` with the same
    settings, and with argmax the same tokens (but for near-ties in bfloat16, where attention has
    float32 scores here). With `decode_fn = decoding.beam_search`, T5X's
    default, they have the tokens and scores of that. Several samples of one input are rejected.

    An id 0 in `encoder_input_tokens` is padding before and after an input. T5X also masks one
    inside an input; here it is read as a token, and the row's scores are NaN.

    A prompt (`prompt_with_targets`) ends at its first EOS or 0. T5X chooses a token in the place of
    an EOS inside a prompt and then forces what follows there; here what follows is not forced.
    """

    @functools.partial(
        generation_config.document_options,
        without=(*UNSUPPORTED, *generation_config.CallData._fields),
        others=_THEIRS.values(),
    )
    def __init__(
        self,
        module: Any,
        input_vocabulary: Any,
        output_vocabulary: Any,
        optimizer_def: Any,
        drafter: Any = None,
        config: generation_config.ConfigOrPath = None,
        drafter_dtype: str | None = None,
        drafter_vocabulary: str | None = None,
        rescale_log_probs: bool = True,
        counts: bool = False,
        report: bool = True,
        decode_fn: Callable | None = None,
        **options: Any,
    ) -> None:
        """Checks the options; arguments that are not listed here are T5X's.

        Args:
          module: `t5x.examples.t5.network.Transformer`, with separate layers, not scanned.
          drafter: a name that `specdec generate --drafter` takes (a folder, a checkpoint, a bundled
            name, "lookup", "exit:2", a table …), loaded once; or a drafter that needs nothing of
            the target, such as `PromptLookupDrafter()`; None decodes plainly.
          config: a `GenerationConfig`, or the path of its file, which the options change.
          drafter_dtype: "float32" or "bfloat16"; None: the module's dtype.
          drafter_vocabulary: vocabulary of a drafter whose checkpoint has none, to be compared with
            the target's.
          rescale_log_probs: whether scores are under the distribution that was sampled (0 with
            argmax), which is T5X's default; else they are under the model's own distribution.
          counts: whether `predict_batch_with_aux` returns `target_calls`, `drafted` and `accepted`,
            `[B]` each, beside the scores.
          report: whether a line at the start names what decodes, and one at the end of the process
            counts target calls, drafted and accepted tokens. The program then calls the host once a
            batch, so that JAX's persistent compilation cache does not keep it.
          decode_fn: T5X's `beam_search` or `temperature_sample`, with what gin or
            `functools.partial` bind to it, in place of `sampling` and `rescale_log_probs`; None: as
            these define.
          options: the fields of `GenerationConfig` that have a meaning inside T5X, and further
            arguments of T5X's class. `tree` may be a text that `specdec generate --tree` takes.
            `gamma="auto"` is 4 tokens, 3 levels of a beam search's tree, or all nodes of `tree`;
            None is the value of `config`.

        Raises:
          TypeError: an unknown option.
          ValueError: something that cannot be decoded speculatively, an option without meaning
            here, a drafter of another vocabulary, or as for `load`.
        """
        arguments.check_flag("counts", counts)
        arguments.check_flag("report", report)
        if drafter_dtype not in (None, "float32", "bfloat16"):
            got, expected = arguments.quote(drafter_dtype), "'float32', 'bfloat16' or None"
            raise mismatch_error("drafter_dtype", got, expected)
        if (defaults := options.get("default_decoder_params")) is not None:
            expected = "None or a DecoderParams, as @models.DecoderParams() makes"
            arguments.check_kind("default_decoder_params", defaults, models.DecoderParams, expected)
        theirs = {name: options.pop(name) for name in _THEIRS if name in options}
        if options.get("gamma", 0) is None:
            del options["gamma"]
        if isinstance(tree := options.get("tree"), str):
            options["tree"] = read_tree(tree)
        generation = read_options(config, options, "T5X")
        self._bound, function = {}, None
        if decode_fn is not None:
            function, self._bound = read_decode_fn(decode_fn)
            generation_config.check_unset(generation, "for decode_fn", "sampling")
            if not rescale_log_probs:
                raise ValueError("rescale_log_probs: got False for decode_fn, expected True")
        super().__init__(
            module=module,
            input_vocabulary=input_vocabulary,
            output_vocabulary=output_vocabulary,
            optimizer_def=optimizer_def,
            decode_fn=decode_fn or decoding.temperature_sample,
            **theirs,
        )
        shape = read_config(module)
        drafter = _make_drafter(
            drafter, shape, drafter_dtype or shape.dtype, drafter_vocabulary, output_vocabulary
        )
        self._counts, self._report = counts, report
        self._decoder: Decoder | BeamDecoder
        if function is decoding.beam_search:
            self._decoder = BeamDecoder(shape, drafter, generation)
        else:
            self._decoder = Decoder(shape, drafter, generation, rescale_log_probs)
        self._decoder.check_call(self._bound)
        if report:
            name, sampling = function and function.__name__, generation.sampling or SamplingConfig()
            most, verifier = self._decoder.gamma, generation.verifier
            t5x_run.say(t5x_run.describe(drafter, most, verifier, name, self._bound, sampling))

    def loss_fn(
        self, params: Any, batch: Mapping[str, jax.Array], dropout_rng: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        """Returns T5X's loss and metrics.

        Raises:
          ValueError: gin binds other settings of the loss to T5X's class than to this one.
        """
        t5x_run.check_losses(
            dict(
                label_smoothing=self._label_smoothing,
                z_loss=self._z_loss,
                loss_normalizing_factor=self._loss_normalizing_factor,
            )
        )
        return super().loss_fn(params, batch, dropout_rng)

    def predict_batch_with_aux(
        self,
        params: Mapping[str, Any],
        batch: Mapping[str, jax.Array],
        rng: jax.Array | None = None,
        decoder_params: MutableMapping[str, Any] | None = None,
        return_all_decodes: bool | None = None,
        num_decodes: int | None = None,
        prompt_with_targets: bool = False,
    ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
        """Returns what T5X's method does: tokens `[B, L]` and `{"scores": [B]}`.

        With `return_all_decodes` they are `[B, K, L]` and `[B, K]`. L is the length of
        `decoder_input_tokens`, K is `num_decodes`. `decoder_params` are those of T5X's function
        that is meant, without its callbacks and without `min_log_prob`.

        Raises:
          ValueError: more than one sample, or unknown `decoder_params`.
        """
        defaults = self._default_decoder_params
        decodes, options = defaults.num_decodes if num_decodes is None else num_decodes, {}
        if return_all_decodes is None:
            return_all_decodes = defaults.return_all_decodes
        if isinstance(self._decoder, BeamDecoder):
            options = dict(num_decodes=decodes)
        elif decodes != 1:
            raise ValueError(
                f"num_decodes: got {decodes}, expected 1, or decode_fn = "
                "t5x.decoding.beam_search: several samples are t5x.models.EncoderDecoderModel's"
            )
        eos_id, targets = self.output_vocabulary.eos_id or 1, batch["decoder_input_tokens"]
        prompts = jnp.zeros_like(targets)
        if prompt_with_targets:
            prompts = jnp.where(targets == eos_id, 0, targets)
        # A key that is given replaces one that is bound, to T5X's function too.
        replaced = {} if rng is None else {"decode_rng": None}
        given = self._bound | replaced | dict(decoder_params or {})
        decoded = self._decoder.decode(
            params,
            batch["encoder_input_tokens"],
            prompts,
            eos_id,
            rng,
            given,
            prompted=prompt_with_targets,
            **options,
        )
        if self._report:
            t5x_run.count(decoded, "levels" if options else "tokens")
        tokens, scores = decoded.tokens, decoded.scores
        if not options:
            tokens, scores = tokens[:, None], scores[:, None]
        if not return_all_decodes:
            tokens, scores = tokens[:, -1], scores[:, -1]
        names = ("target_calls", "drafted", "accepted") if self._counts else ()
        return tokens, {"scores": scores} | {name: getattr(decoded, name) for name in names}


# What `EncoderDecoderModel` itself passes to a decode function.
_PASSED = ("inputs", "cache", "tokens_to_logits", "eos_id", "num_decodes", "cache_offset")


def read_decode_fn(decode_fn: Callable) -> tuple[Callable, dict[str, Any]]:
    """Returns which of T5X's two functions `decode_fn` is, and the arguments that it will have.

    Those are what the signature, gin and `functools.partial` say, but for what is None and what
    T5X's model passes.

    Raises:
      ValueError: another function, or one in a scope of gin's.
    """
    function: Any = decode_fn
    partly: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function, partly = function.func, function.keywords | partly
    plain = inspect.unwrap(function)
    try:
        if plain not in (decoding.beam_search, decoding.temperature_sample):
            raise ValueError("another function")
        from_gin = {} if plain is function else gin.get_bindings(function)
    except ValueError as error:
        raise ValueError(
            f"decode_fn: got {decode_fn!r}, expected t5x.decoding.beam_search or "
            "temperature_sample, outside of scopes"
        ) from error
    known = (
        {name: one.default for name, one in inspect.signature(plain).parameters.items()}
        | from_gin
        | partly
    )
    return plain, {
        name: value for name, value in known.items() if name not in _PASSED and value is not None
    }


def read_config(module: Any) -> T5Config:
    """Returns the configuration of T5X's module.

    Raises:
      ValueError: a module without the configuration and parameters of
        `t5x.examples.t5.network.Transformer`.
    """
    theirs: Any = getattr(module, "config", None)
    # Only `scalable_t5` has the field at all; its layers have a position table each, even if they
    # are not scanned.
    scalable = getattr(module, "scan_layers", False) or hasattr(theirs, "scan_layers")
    if scalable or not all(hasattr(theirs, name) for name in _SIZES):
        raise ValueError(
            f"module: got {type(module).__name__}, expected "
            "t5x.examples.t5.network.Transformer, not scanned"
        )
    return T5Config(
        **{name: getattr(theirs, name) for name in _SIZES},
        mlp_activations=tuple(theirs.mlp_activations),
        logits_via_embedding=theirs.logits_via_embedding,
        dtype=jnp.dtype(theirs.dtype).name,
    )


@functools.lru_cache(maxsize=2)  # gin makes a model for every place that names it
def _load(path: str, dtype: str, vocabulary: str | None) -> LanguageModel:
    return loader.load(path, dtype, vocabulary=vocabulary)


def _make_drafter(
    given: Any, config: T5Config, dtype: str, vocabulary: str | None, output_vocabulary: Any
) -> Drafter | None:
    """Returns the drafter that `given` is, or that it names."""

    def load(path: str) -> ModelDrafter:
        model = _load(path, dtype, vocabulary)
        _check_model(model, output_vocabulary)
        return ModelDrafter(model)

    if isinstance(given, str):
        return make_traced_drafter(given, config, load)
    if given is not None and (not isinstance(given, Drafter) or given.needs_target_state):
        # The target's parameters exist only while T5X's program is traced.
        expected = "a name as for --drafter, or a drafter that needs nothing of the target"
        raise ValueError(f"drafter: got {type(given).__name__}, expected {expected}")
    return given


def _check_model(model: LanguageModel, vocabulary: Any) -> None:
    """Rejects a drafter's model of another vocabulary than T5X's, or too large for a constant."""
    if model.start_token != 0:
        raise ValueError(f"drafter: got start token {model.start_token}, expected T5X's, 0")
    leaves = jax.tree.leaves(model.network.params)  # an embedding that is the head occurs twice
    size = sum({id(leaf): leaf.nbytes for leaf in leaves}.values())
    if size > _MOST_BYTES and not getattr(jax.config, _CONSTANTS):
        raise ValueError(
            f"drafter: got {size / 1e9:.1f} GB of weights, expected at most "
            f"{_MOST_BYTES / 1e9:.0f} as constants of a program "
            f"({_CONSTANTS.upper()}=1 in the environment makes arguments of them)"
        )
    ours = model.vocabulary
    if ours is not None and find_difference(ours, vocabulary):
        raise ValueError(
            f"drafter: got a vocabulary of {ours.size} tokens that differs from T5X's "
            f"({vocabulary.vocab_size} tokens), expected the same tokens with the same ids"
        )


def make_transformer(config: ModelConfig) -> network.Transformer:
    """Returns T5X's module of this shape.

    Raises:
      ValueError: T5X's module cannot have this shape (`checkpoints.t5x.explain_unsupported`).
    """
    if lack := t5x.explain_unsupported(config):
        raise ValueError(f"t5x: {lack}")
    return network.Transformer(
        network.T5Config(
            **{name: getattr(config, name) for name in _SIZES},
            mlp_activations=config.mlp_activations,
            logits_via_embedding=config.logits_via_embedding,
            dtype=jnp.dtype(config.dtype),
            dropout_rate=0.0,
        )
    )


# From `inputs [B, L]` and a number of new tokens to them, `[B, that number]`, and their scores,
# `[B]`.
Predict = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def make_predictor(target: LanguageModel, beams: BeamOptions | None = None) -> Predict:
    """Returns T5X's own decoding of a model of this package, a compiled function.

    It is `EncoderDecoderModel.predict_batch` on the model's own arrays, with T5X's
    `decoding.beam_search`, or where `beams` is None `decoding.temperature_sample` at temperature 0.
    """
    module = make_transformer(target.config)
    if len(target.eos_ids) > 1 or target.start_token != 0:
        got = f"EOS ids {target.eos_ids}, start token {target.start_token}"
        raise ValueError(f"t5x: got {got}, expected one EOS id and start token 0, as T5X decodes")
    decode_fn = functools.partial(decoding.temperature_sample, temperature=0.0)
    if beams is not None:
        decode_fn = functools.partial(decoding.beam_search, alpha=beams.penalty)
    model = models.EncoderDecoderModel(module, None, None, None, decode_fn=decode_fn)
    options: dict[str, Any] = {} if beams is None else {"num_decodes": beams.num_beams}
    # Without EOS ids one that never occurs.
    options["decoder_params"] = {"eos_id": target.eos_ids[0] if target.eos_ids else -1}
    params = target.params

    @functools.partial(jax.jit, static_argnames="steps")
    def predict(params: Any, inputs: np.ndarray, steps: int) -> tuple[jax.Array, jax.Array]:
        prompts = jnp.zeros((len(inputs), steps), jnp.int32)
        batch = dict(encoder_input_tokens=inputs, decoder_input_tokens=prompts)
        tokens, aux = model.predict_batch_with_aux(params, batch, **options)
        return tokens, aux["scores"]

    def call(inputs: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
        with jax.numpy_dtype_promotion("standard"):  # T5X adds numbers of several dtypes
            return jax.device_get(predict(params, np.asarray(inputs, np.int32), steps))

    return call


def make_variant(
    target: LanguageModel, max_new_tokens: int, beams: BeamOptions | None = None
) -> Variant:
    """Returns a variant that decodes from text to text with T5X's own `predict_batch`.

    It takes the argmax, or searches with `beams`, on the same weights and padded inputs.
    """
    predict, vocabulary = make_predictor(target, beams), target.vocabulary

    def decode(batch: SentenceBatch) -> GenerationResult:
        rows = list(batch.inputs)
        if rows and isinstance(rows[0], str):
            rows = [vocabulary.encode_input(text) if text and text.strip() else [] for text in rows]
        rows = [row or [] for row in rows]
        filled = np.array([len(row) > 0 for row in rows])
        inputs = np.zeros((len(rows), batch.padded), np.int32)
        for number, row in enumerate(rows):
            row = row or rows[0]  # an empty row would have nothing to attend to
            inputs[number, : len(row)] = row
        tokens, scores = predict(inputs, max_new_tokens)
        tokens = tokens * filled[:, None]
        ends = np.isin(tokens, target.eos_ids)
        lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, tokens.shape[1]) * filled
        texts = [vocabulary.decode(row[:end]) for row, end in zip(tokens, lengths) if vocabulary]
        nothing, stats = np.zeros(tokens.shape, np.float32), None  # T5X counts nothing
        lengths = lengths.astype(np.int32)
        result: Any = (tokens, lengths, nothing, stats, nothing, [], scores)
        return GenerationResult(texts if vocabulary else None, *result)

    return Variant(0, decode)
