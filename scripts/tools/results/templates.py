"""The stage about a job whose inputs are alike: the same sentences with other names."""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from specdec_jax.analysis import timing
from specdec_jax.analysis.timing import summarize
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.suffix_history import SuffixHistory
from specdec_jax.models.language_model import LanguageModel
from tools.results.cases import load_target, make_bundled
from tools.results.stage import Row, Rows, Settings
from tools.results.whole_files import HOW, count_differing

NAMES = "Tom Mary John Anna Peter Laura Paul Julia David Sarah Michael Emma".split()
# Names at the beginning, in the middle and at the end.
SENTENCES = """
{} is learning German.
{} wants to buy a new car.
{} has never been to Boston before.
{} told me that the train was late.
{} asked the doctor for some advice.
{} and I went to school together.
{} could not find the key to the car.
{} gave the children some apples.
{} likes to read books in the evening.
{} forgot to close the window last night.
{} has been waiting for more than an hour.
{} does not know how to swim.
{} said that he would come back tomorrow.
{} works in a hospital near the station.
{} spent three weeks in the mountains.
{} opened the window and looked outside.
{} had to stay in bed because of a cold.
I have not seen {} since last summer.
I think that {} is the best player on our team.
I would like to talk to {} about the problem.
I met {} at the airport this morning.
I am sure that {} will help us.
I wonder why {} did not call me yesterday.
I borrowed this book from {} two months ago.
We were surprised that {} won the race.
We all know that {} can speak French.
We are going to visit {} in the hospital.
Please tell {} that I am sorry.
Please ask {} to wait for me in front of the bank.
Did you know that {} lives in Australia?
Do you think that {} is telling the truth?
Have you ever heard {} sing this song?
When did {} buy this old bicycle?
Why does {} always come late to work?
How long has {} been working here?
Where did {} learn to cook so well?
Yesterday {} showed me the pictures of the garden.
Last year {} moved to a small town by the sea.
In the evening {} often plays the piano.
The teacher gave {} a book about the history of Germany.
The police asked {} many questions about the accident.
The man who is talking to {} is my uncle.
My parents do not want me to play with {}.
Nobody in the village had ever heard of {}.
The letter on the table is from {}.
She has decided to marry {}.
This bridge was built by the father of {}.
They have been friends with {} for a long time.
He wants to go to the cinema with {}.
You should have told the whole story to {}.
""".strip().splitlines()


def make_inputs(target: LanguageModel, names: int) -> list[list[int]]:
    """Returns the ids of the sentences with each of the first names, in random order."""
    texts = [one.format(name) for name in NAMES[:names] for one in SENTENCES]
    random.Random(0).shuffle(texts)
    return encode(target, texts, 512)


def measure_templates(settings: Settings) -> Rows:
    """Measures whole jobs, by drafters that know the job's earlier outputs and others that do not.

    Every pass begins without any.
    """
    target = load_target("none")
    inputs, rows = make_inputs(target, settings.choose(5, 2)), {}
    for batch, gamma in ((1, 8), (8, 4))[: settings.choose(2, 1)]:
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "plain": lambda: dict(gamma=0),
            "`lookup`, γ = 4": lambda: dict(gamma=4, drafter=PromptLookupDrafter()),
            f"`suffix`, γ = {gamma}": functools.partial(remember, target, gamma),
            "bundled drafter, γ = 4": lambda: dict(gamma=4, drafter=make_bundled()),
        }
        found = time_jobs(target, inputs, ways, batch, settings.choose(3, 2))
        rows |= {f"batches of {batch}, {name}": row for name, row in found.items()}
    return {"ende": rows}


def remember(target: LanguageModel, gamma: int) -> dict[str, Any]:
    """Returns the options by which a job drafts from its own outputs, of which there are none."""
    return dict(gamma=gamma, learner=SuffixHistory(target))


def time_jobs(
    target: LanguageModel,
    inputs: list[list[int]],
    ways: dict[str, Callable[[], dict[str, Any]]],
    batch: int,
    passes: int,
) -> dict[str, Row]:
    """Returns the rows of ways of decoding a job, in turn; the first is the base of ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    outputs = {}
    for turn in range(-1, passes):  # the first compiles
        for name in timing.rotate(ways, max(turn, 0)):
            start = time.perf_counter()
            options = HOW | dict(batch_size=batch, seed=0) | ways[name]()
            outputs[name] = list(decode_all(target, inputs, **options))
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    base, plain = np.array(next(iter(seconds.values()))), next(iter(outputs.values()))
    return {
        name: describe_job(outputs[name], plain, np.array(seconds[name]), base) for name in ways
    }


def describe_job(outputs: list, plain: list, seconds: np.ndarray, base: np.ndarray) -> Row:
    """Returns the row of a way of decoding a job."""
    stats = [one.stats for one in outputs]
    examined = sum(int(one.examined_by_position.sum()) for one in stats)
    rated = any(one.acceptance_rate is not None for one in stats)
    accepted, calls = (
        sum(getattr(one, name) for one in stats) for name in ("accepted", "target_calls")
    )
    tokens = sum(len(one.tokens) for one in outputs)
    return {
        "ms_per_token": 1e3 * float(np.median(seconds)) / tokens,
        "improvement": summarize(base / seconds),
        "alpha": accepted / examined if rated else None,
        "tokens_per_call": tokens / calls,
        "differing": count_differing([o.tokens for o in outputs], [p.tokens for p in plain]),
        "sentences": len(outputs),
    }
