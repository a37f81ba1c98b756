"""The stages of `results.py`: what is decoded in turn, and how a row of a table reads."""

import functools
import gc
import gzip
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.analysis import timing, variants
from specdec_jax.analysis.timing import summarize
from specdec_jax.analysis.variants import Variant
from specdec_jax.checkpoints import converter, loader
from specdec_jax.commands.sentences import read_built_in_sentences
from specdec_jax.decoding.continuous_batching import decode_all
from specdec_jax.decoding.inputs import encode
from specdec_jax.drafters.early_exit import EarlyExitDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.named import WITHOUT_FILES
from specdec_jax.drafters.ngram import NGramDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.self_drafting import SelfDrafter
from specdec_jax.models.language_model import LanguageModel
from specdec_jax.speculative.policies import Confidence, CostAware, EntropyBound, Heuristic
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import DynamicTree, Tree
from tools.quality import quality

# A row of a table, and the rows of a stage by text and case.
Row = dict[str, Any]
Rows = dict[str, dict[str, Row]]
NEW_TOKENS = 64
TEXTS = ("ende", "wiki_pe", "wikitext2", "scitldr", "dialogsum")


class Skipped(Exception):
    """Why a stage cannot be measured here."""


class Settings(NamedTuple):
    """What a run of the script asks for.

    Attributes:
      data: folder of the texts, or None.
      quick: whether to take fewer sentences and passes.
    """

    data: str | None
    quick: bool

    def choose(self, full: int, quick: int) -> int:
        """Returns a number of sentences or passes."""
        return quick if self.quick else full


class Case(NamedTuple):
    """One way of decoding.

    Attributes:
      form: how the target's weights are multiplied: "none" (float32), "int8" or "w8a8".
      drafter: makes the drafter; None is autoregressive decoding.
      options: of `generate`.
    """

    form: str
    drafter: Callable[[], Any] | None = None
    options: Mapping[str, Any] = {}


class Stage(NamedTuple):
    """A question and its answer.

    Attributes:
      title: what a row is.
      minutes: on two cores, in full and quickly.
      measure: returns the rows.
      format: returns a row as the cell of a table.
    """

    title: str
    minutes: tuple[float, float]
    measure: Callable[[Settings], Rows]
    format: Callable[[Row], str]


@functools.cache
def load_target(form: str) -> LanguageModel:
    """Returns the bundled target in one form."""
    return loader.load("ende/target", "float32", quantize=form, say=lambda line: None)


@functools.cache
def load_drafter(form: str | None = None) -> LanguageModel:
    """Returns the bundled drafter, by default as stored."""
    return loader.load("ende/drafter", "float32", quantize=form, say=lambda line: None)


def read_texts(settings: Settings, names: Sequence[str], count: int) -> dict[str, list[str]]:
    """Returns the first `count` sources of each text that is there, and the package's sentences."""
    found = {"sentences": read_built_in_sentences()[:count]}
    for name in names:
        paths = [
            pathlib.Path(settings.data or "") / name / f"test{end}"
            for end in (".tsv.gz", ".txt.gz")
        ]
        path = next((path for path in paths if settings.data and path.is_file()), None)
        if path is not None:
            found[name] = [source for source, _ in _read_pairs(path, count)]
    return found if len(found) == 1 else {name: found[name] for name in names if name in found}


def _read_pairs(path: pathlib.Path, count: int) -> list[tuple[str, str]]:
    """Returns the first sources of 3 to 60 words, with their references if there are any."""
    pairs: list[tuple[str, str]] = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            source, _, reference = line.strip().partition("\t")
            source = " ".join(source.split()[:60])
            if len(source.split()) >= 3 and not source.startswith("="):
                pairs.append((source, reference))
            if len(pairs) == count:
                break
    return pairs


def time_cases(cases: Mapping[str, Case], sentences: list[str], passes: int) -> dict[str, Row]:
    """Decodes sentences one at a time by all cases in turn; the first one is the base of ratios."""
    jax.clear_caches()  # a process has too few memory mappings for the programs of all stages
    gc.collect()
    runs: dict[str, Variant] = {}
    for name, case in cases.items():
        target, drafter = load_target(case.form), case.drafter and case.drafter()
        how = dict(max_new_tokens=NEW_TOKENS, drafter=drafter, generation_config=None)
        how |= {"gamma": 0} if drafter is None else {}
        runs[name] = Variant(0, variants.make_decoder(target, how | dict(case.options)))
    ids = encode(load_target("none"), sentences, 512)
    batches = variants.cut_batches(sentences, ids, 1, 0)
    variants.warm_up(runs, {}, batches)
    for run in runs.values():
        for batch in batches:  # what γ = "auto" learns, and programs of other widths
            batch.decode_with(run.decode)
    variants.time_passes(runs, batches, passes, "timing")
    base = next(iter(runs.values()))
    return {name: _describe(run, base) for name, run in runs.items()}


def _describe(run: Variant, base: Variant) -> Row:
    examined = sum(int(one.stats.examined_by_position.sum()) for one in run.results)
    calls = run.total("target_calls")
    return {
        "ms_per_token": 1e3 * float(np.median(run.seconds_per_token)),
        "improvement": summarize(base.seconds_per_token / run.seconds_per_token),
        "alpha": run.total("accepted") / examined if examined else None,
        "tokens_per_call": run.tokens / max(calls, 1),
        "differing": variants.count_differing(run, base),
        "sentences": len(run.results),
    }


def format_speed(row: Row) -> str:
    """Returns the improvement and its spread; α and tokens per target call if it drafts."""
    gain = row["improvement"]
    text = f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
    if row["alpha"] is not None:
        text += f", α {row['alpha']:.2f}, {row['tokens_per_call']:.2f} tokens a call"
    text += f", {row['ms_per_token']:.2f} ms a token"
    return text + f", {row['sentences']} sentences" * (gain["least"] == gain["most"] == 1)


def bundled() -> ModelDrafter:
    """Returns the bundled drafter."""
    return ModelDrafter(load_drafter())


def _drafts(gamma: Any, form: str = "none", drafter: Callable = bundled, **options: Any) -> Case:
    return Case(form, drafter, {"gamma": gamma, **options})


def measure_pair(settings: Settings) -> Rows:
    """Measures the bundled pair, in float32 and as it is stored."""
    cases = {
        "plain, float32": Case("none"),
        "speculative, float32, γ = 4": _drafts(4),
        "speculative, float32, γ = 6": _drafts(6),
        'speculative, float32, `gamma="auto"`': _drafts("auto"),
        "plain, int8": Case("int8"),
        "speculative, int8, γ = 4": _drafts(4, "int8"),
        'speculative, int8, `gamma="auto"`': _drafts("auto", "int8"),
    }
    texts = read_texts(settings, ("ende", "wiki_pe"), settings.choose(200, 25))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_texts(settings: Settings) -> Rows:
    """Measures γ = "auto" beside fixed γ on several texts."""
    rows: Rows = {}
    for form, label in (("none", "float32"), ("int8", "int8")):
        cases = {"plain": Case(form)} | {
            f"γ = {gamma}": _drafts(gamma, form) for gamma in (2, 4, 6)
        }
        cases |= {'`gamma="auto"`': _drafts("auto", form)}
        texts = read_texts(settings, TEXTS, settings.choose(60, 8))
        for name, text in texts.items():
            rows[f"{name} {label}"] = time_cases(cases, text, settings.choose(3, 2))
    return rows


def _count_table(settings: Settings, order: int) -> Callable[[], Any]:
    """Returns what makes a table of the references of `ende/train`."""
    path = pathlib.Path(settings.data or "") / "ende" / "train.tsv.gz"
    if settings.data is None or not path.is_file():
        raise Skipped("needs ende/train.tsv.gz in --data")
    vocabulary = load_target("none").vocabulary
    assert vocabulary is not None
    pairs = _read_pairs(path, settings.choose(50_000, 10_000))
    ids = [vocabulary.encode_output(reference) for _, reference in pairs]
    size = load_target("none").config.vocab_size
    return lambda: NGramDrafter.count(ids, size, order, vocabulary=vocabulary)


def measure_drafters(settings: Settings) -> Rows:
    """Measures every kind of drafter at temperatures 0 and 1."""
    target = load_target("none")
    drafters: dict[str, tuple[Callable[[], Any], Any]] = {
        "bundled drafter, γ = 4": (bundled, 4),
        "the same in int8": (lambda: ModelDrafter(load_drafter("none"), int8=True), 4),
        "bundled drafter, `Heuristic`": (bundled, Heuristic(8)),
        "bundled drafter, `Confidence`": (bundled, Confidence(8)),
        "bundled drafter, `EntropyBound`": (bundled, EntropyBound(8)),
        "bundled drafter, `CostAware`": (bundled, CostAware(8)),
        "`lookup`, γ = 2": (PromptLookupDrafter, 2),
        "`exit:3`, of four layers, γ = 2": (lambda: EarlyExitDrafter(target, 3), 2),
        "`self:int8`, γ = 4": (lambda: SelfDrafter(target), 4),
        "`random`, γ = 1": (lambda: WITHOUT_FILES["random"].make(target), 1),
    }
    try:
        bigrams, unigrams = _count_table(settings, 2)(), _count_table(settings, 1)()
        drafters |= {
            "bigrams, γ = 1": (lambda: bigrams, 1),
            "unigrams, γ = 1": (lambda: unigrams, 1),
        }
    except Skipped:
        pass
    rows: Rows = {}
    for temperature in (0, 1):
        sampling = SamplingConfig(temperature=float(temperature))
        more: dict[str, Any] = {"sampling": sampling, "verifier": "token"}
        cases = {"plain": Case("none", None, more)}
        cases |= {
            name: Case("none", make, {"gamma": gamma, **more})
            for name, (make, gamma) in drafters.items()
        }
        texts = read_texts(settings, ("ende", "wiki_pe"), settings.choose(60, 8))
        for name, text in texts.items():
            rows[f"{name} T={temperature}"] = time_cases(cases, text, settings.choose(3, 2))
    return rows


def measure_trees(settings: Settings) -> Rows:
    """Measures trees beside chains, at temperatures 0 and 1."""
    shapes: dict[str, dict[str, Any]] = {
        "tree of widths 2, 1, 1, 1": dict(tree=Tree.uniform((2, 1, 1, 1))),
        "tree of widths 3, 2, 1": dict(tree=Tree.uniform((3, 2, 1))),
        "dynamic tree of 16 nodes": dict(tree=DynamicTree(4, 4, 16)),
    }
    rows: Rows = {}
    for temperature in (0, 1):
        more: dict[str, Any] = {"sampling": SamplingConfig(temperature=float(temperature))}
        cases = {"plain": Case("none", None, more), "chain, γ = 4": _drafts(4, **more)}
        cases |= {"chain, γ = 6": _drafts(6, **more)}
        cases |= {name: Case("none", bundled, more | tree) for name, tree in shapes.items()}
        texts = read_texts(settings, ("ende", "wiki_pe"), settings.choose(60, 8))
        for name, text in texts.items():
            rows[f"{name} T={temperature}"] = time_cases(cases, text, settings.choose(3, 2))
    return rows


def measure_beams(settings: Settings) -> Rows:
    """Measures speculative beam search beside plain beam search and greedy decoding."""
    beams = {"num_beams": 4}
    cases = {"four beams, plain": Case("none", None, beams)}
    for gamma in (1, 2, 3):
        options = {"gamma": gamma, "beam_width": 8, **beams}
        cases[f"four beams, γ = {gamma}, 8 nodes a level"] = Case("none", bundled, options)
    cases["greedy, plain"] = Case("none")
    texts = read_texts(settings, ("ende", "wiki_pe"), settings.choose(60, 10))
    passes = settings.choose(3, 2)
    return {name: time_cases(cases, text, passes) for name, text in texts.items()}


def measure_steps(settings: Settings) -> Rows:
    """Measures v, a call over several positions, and c, a drafted token, in plain iterations."""
    steps: dict[str, Any] = {}
    for form, label in (("none", "float32"), ("int8", "int8")):
        target, drafter = load_target(form), bundled()
        state = timing.iteration_state(target, None, 1, 16, 0, max_new_tokens=NEW_TOKENS)
        steps[f"{label}, plain"] = timing.iteration_variant(*state)
        for gamma in (1, 3, 4, 7):
            how = dict(max_new_tokens=NEW_TOKENS)
            state = timing.iteration_state(target, drafter, 1, 16, gamma, **how)
            steps[f"{label}, call over {gamma + 1} positions"] = timing.call_variant(*state)
            steps[f"{label}, iteration with γ = {gamma}"] = timing.iteration_variant(*state)
    variants.warm_up({}, steps, [])
    seconds = variants.time_steps(steps, settings.choose(9, 5))
    rows: dict[str, Row] = {}
    for name, spread in seconds.items():
        plain = seconds[f"{name.partition(',')[0]}, plain"]
        rows[name] = {"ms": 1e3 * spread.median, "over_plain": spread.median / plain.median}
    return {"steps": rows}


def measure_file(settings: Settings) -> Rows:
    """Measures sentences a second of whole files, also with CTranslate2 where it is installed."""
    count = settings.choose(2000, 300)
    rows: Rows = {}
    for name, text in read_texts(settings, ("ende",), count).items():
        ids = encode(load_target("none"), text, 512)
        ways: dict[str, Callable[[], list]] = {}
        for label, form, batch in (
            ("plain, float32, batch 64", "none", 64),
            ("plain, int8, batch 64", "int8", 64),
            ("plain, `w8a8`, batch 64", "w8a8", 64),
        ):
            ways[label] = functools.partial(_decode_file, load_target(form), ids, batch)
        ways |= _make_ctranslate2(ids)
        seconds: dict[str, list[float]] = {label: [] for label in ways}
        outputs = {label: decode() for label, decode in ways.items()}  # compiles
        for turn in range(settings.choose(5, 2)):
            for label in timing.rotate(ways, turn):
                start = time.perf_counter()
                outputs[label] = ways[label]()
                seconds[label].append(time.perf_counter() - start)
        base, first = np.array(next(iter(seconds.values()))), next(iter(outputs.values()))
        rows[name] = {
            label: {
                "sentences_per_second": len(text) / float(np.median(times)),
                "improvement": summarize(base / np.array(times)),
                "differing": sum(a != b for a, b in zip(outputs[label], first, strict=True)),
            }
            for label, times in seconds.items()
        }
    return rows


def _decode_file(target: LanguageModel, ids: list, batch: int, **options: Any) -> list[list[int]]:
    how = dict(batch_size=batch, seed=0, max_new_tokens=NEW_TOKENS, generation_config=None)
    return [output.tokens for output in decode_all(target, ids, gamma=0, **how, **options)]


def _make_ctranslate2(ids: list[list[int]]) -> dict[str, Callable[[], list]]:
    """Returns calls of CTranslate2, with two translators of one thread; {} without it."""
    if not all(map(importlib.util.find_spec, ("ctranslate2", "transformers", "torch"))):
        return {}
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    folder = pathlib.Path(tempfile.mkdtemp())
    converter.save(load_target("none"), folder / "hf", format="huggingface")
    TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    names = json.loads((folder / "ct2" / "shared_vocabulary.json").read_text(encoding="utf-8"))
    numbers = {name: number for number, name in enumerate(names)}
    tokens = [[names[i] for i in row] for row in ids]
    calls: dict[str, Callable[[], list]] = {}
    for kind in ("float32", "int8"):
        translator = ctranslate2.Translator(
            str(folder / "ct2"), compute_type=kind, inter_threads=2, intra_threads=1
        )

        def translate(translator: Any = translator) -> list[list[int]]:
            results = translator.translate_batch(
                tokens,
                beam_size=1,
                max_batch_size=64,
                max_decoding_length=NEW_TOKENS,
                return_end_token=True,
            )
            return [[numbers[name] for name in result.hypotheses[0]] for result in results]

        calls[f"CTranslate2 {ctranslate2.__version__}, {kind}, two threads"] = translate
    return calls


def format_file(row: Row) -> str:
    """Returns sentences a second, and over float32."""
    gain = row["improvement"]
    text = f"{row['sentences_per_second']:.0f} a second; "
    text += f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"
    return f"{text}; {row['differing']} outputs differ"


def measure_quality(settings: Settings) -> Rows:
    """Measures BLEU and chrF of the target's argmax output, in float32 and rounded."""
    if settings.data is None:
        raise Skipped("needs --data")
    rows: Rows = {}
    for name in ("ende", "wiki_pe"):
        path = pathlib.Path(settings.data) / name / "test.tsv.gz"
        pairs = _read_pairs(path, settings.choose(2000, 200))
        rows[name] = {}
        for form, label in (("none", "float32"), ("int8", "int8"), ("w8a8", "`w8a8`")):
            ids = encode(load_target(form), [source for source, _ in pairs], 512)
            how = dict(batch_size=64, seed=0, max_new_tokens=128, generation_config=None, gamma=0)
            outputs = list(decode_all(load_target(form), ids, **how))
            scores = quality(outputs, [reference for _, reference in pairs])
            rows[name][label] = {
                "bleu": scores["bleu"],
                "chrf": scores["chrf"],
                "count": len(pairs),
            }
    return rows


def measure_t5x(settings: Settings) -> Rows:
    """Measures T5X's own decoding in turn with ours, on the same weights."""
    if importlib.util.find_spec("t5x") is None:
        raise Skipped("T5X is not installed")
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "record.json"
        command = [sys.executable, "-m", "specdec_jax", "benchmark", "--against=t5x"]
        command += ["--target=ende/target", "--drafter=ende/drafter", "--quantize=none"]
        command += [f"--repeats={settings.choose(5, 2)}", "--gamma=4,6", f"--output={output}"]
        command += ["--input_file=ende/sentences.txt"]
        subprocess.run(command, check=True)
        record = json.loads(output.read_text(encoding="utf-8"))
    found = record["against"]
    rows = {"T5X": {"improvement": {"median": 1.0, "least": 1.0, "most": 1.0}}}
    for name, gain in found["improvement"].items():
        rows[name] = {"improvement": gain}
    return {"sentences": rows}


def format_ratio(row: Row) -> str:
    """Returns a ratio and its spread."""
    gain = row["improvement"]
    return f"{gain['median']:.2f} ({gain['least']:.2f} to {gain['most']:.2f})"


def measure_tpu(settings: Settings) -> Rows:
    """Compiles T5-XXL with T5-small for TPUs; seconds are the compiler's estimates."""
    if importlib.util.find_spec("libtpu") is None:
        raise Skipped("libtpu is not installed")
    rows: dict[str, Row] = {}
    script = pathlib.Path(__file__).resolve().parents[1] / "tpu_aot.py"
    cases = {"v4, one row": [], "v4, one row, int8": ["--quantize=int8"]}
    if not settings.quick:
        cases |= {"v4, 8 rows": ["--batch_size=8"], "v4, 32 rows": ["--batch_size=32"]}
        cases |= {"v4-8, one row": ["--mesh=1x4"]}
        cases |= {f"{chip}, one row": [f"--chip={chip}"] for chip in ("v5e", "v5p", "v6e")}
    for name, more in cases.items():
        command = [sys.executable, str(script), "--target=t5_1_1/xxl", "--drafter=t5_1_1/small"]
        command += ["--gamma=7", "--iteration", *more]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        record = json.loads(ended.stdout[ended.stdout.index("{") :])
        names = ("needed_gb", "memory_gb", "fits", "iteration_ms", "floor_ms")
        rows[name] = {one: record.get(one) for one in names}
    return {"estimates": rows}


def format_tpu(row: Row) -> str:
    """Returns memory and the estimate of an iteration."""
    fits = "fits" if row["fits"] else "does not fit"
    memory = f"{row['needed_gb']:.1f} of {row['memory_gb']} GB, {fits}"
    return f"{memory}; {row['iteration_ms']:.1f} ms an iteration, its bytes {row['floor_ms']:.1f}"


STAGES: dict[str, Stage] = {
    "pair": Stage("bundled pair, one sentence at a time", (12, 1.5), measure_pair, format_speed),
    "steps": Stage(
        "one row",
        (2, 1),
        measure_steps,
        lambda row: f"{row['ms']:.3f} ms, {row['over_plain']:.2f} plain iterations",
    ),
    "texts": Stage("one sentence at a time, over plain", (14, 2.5), measure_texts, format_speed),
    "drafters": Stage(
        "one sentence at a time, over plain", (14, 3), measure_drafters, format_speed
    ),
    "trees": Stage("one sentence at a time, over plain", (8, 2), measure_trees, format_speed),
    "beams": Stage("one sentence at a time, over plain beams", (6, 1), measure_beams, format_speed),
    "file": Stage("a whole file, over float32", (6, 1), measure_file, format_file),
    "quality": Stage(
        "the bundled target's argmax output",
        (4, 1),
        measure_quality,
        lambda row: f"BLEU {row['bleu']:.1f}, chrF {row['chrf']:.1f} ({row['count']} sentences)",
    ),
    "t5x": Stage("the package's sentences, over T5X", (6, 2), measure_t5x, format_ratio),
    "tpu": Stage("T5-XXL with T5-small, γ = 7, bfloat16", (6, 1.5), measure_tpu, format_tpu),
}


def list_shortfalls(stages: Mapping[str, Any]) -> dict[str, str]:
    """Returns what falls short on one machine: each figure beside what is asked of it."""
    found: dict[str, str] = {}

    def add(name: str, values: list[float], asked: str, worst: Callable = min):
        if values:
            found[f"{name} (asked: {asked})"] = f"{worst(values):.2f}"

    def rows(stage: str) -> list[dict[str, Row]]:
        return list(stages.get(stage, {}).get("rows", {}).values())

    def gain(row: Row) -> float:
        return row["improvement"]["median"]

    def best(table: Mapping[str, Row], begins: str) -> float:
        return max(gain(row) for name, row in table.items() if name.startswith(begins))

    pairs = rows("pair")
    ratio = [gain(one["speculative, int8, γ = 4"]) / gain(one["plain, int8"]) for one in pairs]
    add("speculative over plain in int8, one sentence at a time", ratio, "1.8")
    auto = [gain(one['`gamma="auto"`']) / best(one, "γ") for one in rows("texts")]
    add('`gamma="auto"` over the best fixed γ, on the worst text', auto, "0.96")
    auto = [gain(one['`gamma="auto"`']) for one in rows("texts")]
    add('`gamma="auto"` over plain decoding, on the worst text', auto, "0.98")
    trees = [max(best(one, "tree"), best(one, "dynamic")) for one in rows("trees")]
    chains = [best(one, "chain") for one in rows("trees")]
    add("the best tree over the best chain", [a / b for a, b in zip(trees, chains)], "1.0")
    beams = [best(one, "four beams, γ") for one in rows("beams")]
    add("speculative over plain beam search", beams, "1.3")
    for form in ("float32", "int8"):
        calls = [one[f"{form}, call over 5 positions"]["over_plain"] for one in rows("steps")]
        add(f"v of five positions, {form}", calls, "at most 1.15", max)
        files = [
            gain(ours) / gain(theirs)
            for one in rows("file")
            for theirs in (one[name] for name in one if f", {form}, two" in name)
            for ours in (one[f"plain, {'float32' if form == 'float32' else '`w8a8`'}, batch 64"],)
        ]
        add(f"a whole file, plain, over CTranslate2 in {form}", files, "1.0")
    return found
