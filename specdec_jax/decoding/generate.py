"""Decodes texts or ids in one call: `generate`; `prepare` and `warm_up` for what comes before."""

import time
from collections.abc import Sequence

import numpy as np

from specdec_jax.backends.jax_settings import isolated
from specdec_jax.decoding import autotune
from specdec_jax.decoding.beams import plan_decoding
from specdec_jax.decoding.checks import check_non_finite
from specdec_jax.decoding.inputs import bucket
from specdec_jax.decoding.loop import advance, complete, decode_plan
from specdec_jax.decoding.request import Plan, Request
from specdec_jax.decoding.request import plan as plan_request
from specdec_jax.decoding.results import GenerationResult, finish
from specdec_jax.models import arguments
from specdec_jax.models.generation_config import GenerationConfig
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.drafter import Drafter
from specdec_jax.speculative.policies import Policy
from specdec_jax.speculative.randomness import seeded
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.state import DecodeState
from specdec_jax.speculative.trees import DynamicTree, Tree
from specdec_jax.speculative.verifier import Verifier


@isolated
def generate(
    target: LanguageModel,
    inputs,
    *,
    drafter: Drafter | None = None,
    gamma: str | int | Sequence[int] | Policy = "auto",
    sampling: SamplingConfig | None = None,
    tree: Tree | DynamicTree | None = None,
    verifier: str | Verifier = "block",
    lenience: float | Sequence[float] | None = None,
    typical_epsilon: float | Sequence[float] | None = None,
    typical_delta: float | Sequence[float] | None = None,
    synthetic_alpha: float | Sequence[float] | None = None,
    max_new_tokens: int | Sequence[int] | None = None,
    key=None,
    num_samples: int = 1,
    input_lengths=None,
    max_input_length: int = 512,
    decoder_prefix=None,
    eos_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    deadline: float | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    beam_style: str | None = None,
    early_stopping: bool | str | None = None,
    num_return_sequences: int | None = None,
    beam_width: int | None = None,
    non_finite: str = "raise",
    attention_mask=None,
    generation_config: GenerationConfig | str | None = "model",
) -> GenerationResult:
    """Decodes a batch: speculatively with a `drafter`, plainly without one.

    The output distribution is exactly the target's either way, except under the lossy verifiers,
    which say how far off it is.

    Args:
      target: the model whose distribution is sampled.
      inputs: B strings, B lists of ids (with their EOS), or an integer array `[B, L]`. Strings get
        what their tokenizer puts around a text. Of ids, 0 (the vocabulary's padding) before and
        after the text is left out. For an empty string, or None, nothing is decoded. A decoder-only
        target has prompts: 0 is an id like others, and an empty prompt stands for the start token.
      drafter: e.g. `ModelDrafter(model)`; must share the target's vocabulary.
      gamma: γ ≥ 0, tokens drafted per target call, one or one per input; a policy that adapts it
        (`policies.py`), e.g. `Heuristic(maximum=8)`; or "auto": up to 8, as many as pay by each
        row's acceptance and by what iterations cost on this machine (the first call of a kind
        measures it, `autotune.py`); on a mesh 4. Above temperature 0 the tokens that are drawn (not
        their distribution) then depend on the machine: fix γ to repeat them on another.
      tree: a tree of drafted tokens in the place of a chain, e.g. `Tree.uniform((3, 2, 1))`: it has
        a verifier of its own, and γ is the most nodes that are drafted, by default all; a policy
        adapts their number.
      sampling: temperature, filters, processors such as a repetition penalty; None: the model's
        default, else argmax.
      verifier: "token" (Leviathan et al. 2023, Algorithm 1), "block" (accepts more on average),
        "gumbel" (the output is that of plain decoding with "gumbel" and the same key), "rejection"
        (section A.2, for comparison); lossy: "lenient" and "typical"; `verifiers.py` explains each.
        Or a `Verifier` of your own.
      lenience: l in (0, 1] of "lenient". typical_epsilon, typical_delta: ε, δ of "typical", by
        default 0.09, 0.3.
      synthetic_alpha: α in (0, 1] of "synthetic", which accepts at random with a given probability,
        for timing: its outputs mean nothing.
      max_new_tokens: limit for new tokens, EOS included; one, or one per input; None: the model's
        default, else 64.
      key: one key, of any kind (input i gets `fold_in(key, i)`), or B keys; None: the key of seed
        0.
      num_samples: N ≥ 1 outputs for every input, side by side in N·B rows; each input is encoded,
        or read, once.
      input_lengths: `[B]`, only with an array of inputs. max_input_length: longer inputs are
        rejected.
      attention_mask: with ids, 1 for those that count and 0 for padding, on either side, as
        transformers' tokenisers give it: for a decoder-only target with prompts of several lengths,
        this or `input_lengths` is needed.
      decoder_prefix: B forced beginnings of the output, without start token or EOS, which the
        result does not repeat.
      eos_ids: ids that stop a row; None: the model's own. stop: strings that stop a row; neither
        they nor a token that reaches into one are part of the result.
      deadline: seconds after the call, compilation included (see `warm_up`), until the rows are
        returned as they are.
      num_beams: K beams of a beam search; None: the model's default, else none. Others: see
        `beams.BeamOptions`.
      generation_config: the defaults: "model" (`target.generation_config`), other ones, or None for
        none.
      non_finite: "raise" an error at NaN and infinite logits, or "report" it in the result's
        `errors`, row by row.

    Raises:
      UnsupportedCombination: options that make no sense together. NonFiniteLogitsError: see
        `non_finite`. Both are ValueErrors.
      ValueError: a bad argument; the message says what was got and what was expected. Raised before
        anything compiles.
    """
    begun, reports = time.monotonic(), check_non_finite(non_finite)
    plan = plan_decoding(
        target,
        inputs,
        drafter=drafter,
        gamma=gamma,
        sampling=sampling,
        verifier=verifier,
        lenience=lenience,
        typical_epsilon=typical_epsilon,
        typical_delta=typical_delta,
        synthetic_alpha=synthetic_alpha,
        max_new_tokens=max_new_tokens,
        key=key,
        num_samples=num_samples,
        input_lengths=input_lengths,
        max_input_length=max_input_length,
        decoder_prefix=decoder_prefix,
        eos_ids=eos_ids,
        stop=stop,
        deadline=deadline,
        num_beams=num_beams,
        length_penalty=length_penalty,
        beam_style=beam_style,
        beam_width=beam_width,
        tree=tree,
        early_stopping=early_stopping,
        num_return_sequences=num_return_sequences,
        generation_config=generation_config,
        attention_mask=attention_mask,
    )
    plan = autotune.autotune(plan)
    result = complete(target, plan, None, begun)
    autotune.record(plan.request(), result)
    return result.checked(reports)


@isolated
def prepare(target: LanguageModel, inputs, **options) -> tuple[DecodeState, Request]:
    """Checks the arguments of `generate` and prefills, for callers that drive `advance` themselves.

    With `num_samples` = N everything has N·B rows; the rows of one input lie side by side. No beam
    search can be prepared. `autotune.record` takes the request and its result, if later requests
    with γ = "auto" are to know how many drafted tokens were accepted.
    """
    return autotune.autotune(plan_request(target, inputs, **options)).start()


@isolated
def warm_up(
    target: LanguageModel,
    *,
    drafter: Drafter | None = None,
    batch_sizes: Sequence[int] = (1,),
    max_input_length: int = 64,
    **options,
) -> int:
    """Compiles what `generate` needs for these batch sizes and for every input length up to
    `max_input_length`.

    Afterwards calls with the same `gamma`, `max_new_tokens`, kind of sampling and number of EOS ids
    (up to 4) compile nothing. The options are those of `generate`. Stop strings, deadlines and
    `stream` need other programs: give a stop string or a deadline if the calls have any, and either
    of them for `stream`.

    Returns:
      The number of shapes that were compiled for.
    """
    arguments.check_model("target", target)
    arguments.check_integer("max_input_length", max_input_length, 1)
    batches = arguments.check_list("batch_sizes", batch_sizes, "a list of integers")
    lengths = sorted({bucket(length) for length in range(1, max_input_length + 1)})
    options = {"key": seeded(0), **options}
    for batch in (arguments.check_integer("batch_sizes", size, 1) for size in batches):
        for length in lengths:
            inputs = np.full(
                (batch, min(length, max_input_length)),
                target.eos_ids[0] if target.eos_ids else 1,
                np.int32,
            )
            plan = plan_decoding(
                target,
                inputs,
                input_lengths=np.full(batch, inputs.shape[1]),
                drafter=drafter,
                max_input_length=max_input_length,
                **options,
            )
            plan = autotune.autotune(plan, first=True)
            _run_once(target, plan)
            if plan.costs_key and plan.config.gamma:  # later calls may decode plainly
                _run_once(target, plan.plainly())
    return len(lengths) * len(batch_sizes)


def _run_once(target: LanguageModel, plan: Plan) -> None:
    """Runs one iteration of a plan, so that its programs are compiled."""
    if plan.search is not None:
        complete(target, plan, None, time.monotonic()).checked()
        return
    request = plan.request()
    if plan.stop or plan.deadline:
        state, _ = plan.start()
        finish(target, advance(request.network, request.drafter, state, np.int32(1)), request)
    else:
        finish(target, decode_plan(plan, max_iterations=np.int32(1)), request)
