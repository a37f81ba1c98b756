"""Stages about rules: how drafts are verified, and trees; and predictions beside measurements."""

from collections.abc import Sequence
from typing import Any

from specdec_jax.analysis import acceptance, formulas
from specdec_jax.analysis.benchmark import benchmark
from specdec_jax.analysis.top_k_hit_rate import acceptance_by_rank
from specdec_jax.analysis.variants import Workload, make_batches, make_decoder
from specdec_jax.commands.benchmark import BenchmarkOptions
from specdec_jax.drafters.merged import MergedDrafter
from specdec_jax.drafters.model import ModelDrafter
from specdec_jax.drafters.prompt_lookup import PromptLookupDrafter
from specdec_jax.drafters.shortlist import shortlist_from_counts
from specdec_jax.models.parameters import parameter_count
from specdec_jax.speculative.sampling import SamplingConfig
from specdec_jax.speculative.trees import Chains, Tree
from tools.results.cases import (
    Case,
    drafts,
    format_ratio,
    load_drafter,
    load_target,
    make_bundled,
    time_cases,
)
from tools.results.pair import count_table, read_references
from tools.results.stage import Row, Rows, Settings
from tools.results.texts import read_sentences

GAMMAS = (1, 2, 4, 6, 8)
_WARM = SamplingConfig(temperature=1.0)
_EQUAL: dict[str, Any] = {"sampling": _WARM}
# The rules of verification, and what else decides how often a sampled draft is accepted.
VERIFIERS: dict[str, dict[str, Any]] = {
    **{f"`{name}`": {"verifier": name} for name in ("token", "block", "gumbel", "rejection")},
    "`lenient`, lenience 0.5 (lossy)": {"verifier": "lenient", "lenience": 0.5},
    "`lenient`, lenience 0.1 (lossy)": {"verifier": "lenient", "lenience": 0.1},
    "`typical` (lossy)": {"verifier": "typical"},
    "`block`, drafter at temperature 0.7": {"drafter_sampling": SamplingConfig(temperature=0.7)},
    "`block`, both at temperature 0.7": {"sampling": SamplingConfig(temperature=0.7)},
    "`block`, both with `top_k=40`": {"sampling": SamplingConfig(temperature=1.0, top_k=40)},
    "`block`, both with `top_p=0.9`": {"sampling": SamplingConfig(temperature=1.0, top_p=0.9)},
}
# Trees of ten drafted tokens (chains: nine) by the rules for choosing children and verifying them.
_WIDTHS = (2, 2, 1)
TREES: dict[str, Tree] = {
    **{
        f"children `{children}`, `{verifier}`": Tree.uniform(
            _WIDTHS, children=children, verifier=verifier
        )
        for children, verifier in (
            ("drawn", "traversal"),
            ("drawn", "recursive"),
            ("iid", "recursive"),
            ("iid", "kseq"),
            ("mixed", "mixed"),
            ("top", "point"),
            ("gumbel", "gumbel"),
        )
    },
    "three chains of three tokens, `kseq` (SpecTr)": Chains(3, 3),
}


def measure_verifiers(settings: Settings) -> Rows:
    """Measures the rules of verification, trees by theirs, and shortlists."""
    texts = read_sentences(settings, ("ende", "wiki_pe"), 24, alike=True)
    plain = {"plain": Case("none", None, _EQUAL)}
    verified = plain | {name: drafts(4, **_EQUAL | how) for name, how in VERIFIERS.items()}
    trees = plain | {"chain, γ = 4": drafts(4, **_EQUAL), "chain, γ = 6": drafts(6, **_EQUAL)}
    trees |= {
        name: Case("none", make_bundled, _EQUAL | {"tree": tree}) for name, tree in TREES.items()
    }
    merged = {"tree": Tree.uniform(_WIDTHS, children="top"), **_EQUAL}
    trees["the bundled drafter and `lookup`, merged, `top`, `point`"] = Case("none", _merge, merged)
    rows: Rows = {}
    for name, text in texts.items():
        rows[f"{name} verifiers"] = time_cases(verified, text, 3)
        rows[f"{name} trees"] = time_cases(trees, text, 3)
        rows[f"{name} shortlists"] = time_cases(_list_shortlists(settings), text, 3)
    return rows


def _merge() -> MergedDrafter:
    return MergedDrafter(make_bundled(), PromptLookupDrafter(1))


def _list_shortlists(settings: Settings) -> dict[str, Case]:
    """Returns shortlists of the ids that are the most frequent in references, at temperature 0."""
    counts = count_table(read_references(settings, 10_000), 1).unigram
    model = load_drafter("none")
    cases = {
        "plain": Case("none"),
        "all ids, γ = 4": drafts(4, drafter=lambda: ModelDrafter(model)),
    }
    for size in (3072, 1024):
        ids = shortlist_from_counts(counts, size, model.eos_ids)
        cases[f"{size:,} of {model.config.vocab_size:,} ids, γ = 4"] = drafts(
            4, drafter=lambda ids=ids: ModelDrafter(model, ids)
        )
    return cases


def measure_expected(settings: Settings) -> Rows:
    """Measures improvements beside what α, c and v predict, and top-k hit rates."""
    texts, rows = read_sentences(settings, ("ende", "wiki_pe"), 24, alike=True), {}
    for temperature in (0.0, 1.0):
        for name, text in texts.items():
            workload = _make_workload(text, temperature)
            place = f"{name} T={temperature:g}"
            rows[place] = _compare_predictions(workload)
            rows[f"{place} hits"] = _measure_hits(workload)
    return rows


def _make_workload(text: Sequence[str], temperature: float) -> Workload:
    target = load_target("none")
    options = BenchmarkOptions(
        target="ende/target", gamma=GAMMAS, temperature=temperature, verifier="token"
    )
    return Workload(target, make_bundled(), make_batches(target, text, options), options)


def _compare_predictions(workload: Workload) -> dict[str, Row]:
    """Returns a row for each γ: Table 4 of the paper, with the oracle and operations (3.11)."""
    record, _ = benchmark(workload)
    sizes = [parameter_count(model.config) for model in (load_drafter(), workload.target)]
    rows = {}
    for one in record["speculative"]:
        alpha, gamma = one["stats"]["acceptance_rate_per_position"], one["gamma"]
        rows[f"γ = {gamma}"] = {
            "improvement": one["improvement"],
            "alpha": alpha,
            **{name: one["predicted"][name] for name in ("cost_ratio", "verify_cost")},
            "theorem": one["predicted"]["theorem_3_8"],
            "with_v": one["predicted"]["with_verify_cost"],
            "with_lengths": one["predicted"]["with_lengths"],
            "oracle": one["oracle"]["improvement"],
            "operations": formulas.operations(alpha, gamma, sizes[0] / sizes[1]),
        }
    return rows


def format_expected(row: Row) -> str:
    """Returns measured and predicted improvements, or hit rates."""
    if "hits" in row:
        return ", ".join(f"{mean:.3f}" for mean in row["hits"])
    c, v, alpha = row["cost_ratio"], row["verify_cost"], row["alpha"]
    return (
        f"{format_ratio(row)}; {row['theorem']:.2f} by theorem 3.8 (α {alpha:.2f}, c {c:.2f}), "
        f"{row['with_v']:.2f} with v {v:.2f}, {row['with_lengths']:.2f} with encoders and lengths; "
        f"oracle {row['oracle']:.2f}; operations {row['operations']:.2f}"
    )


def _measure_hits(workload: Workload) -> dict[str, Row]:
    """Returns the top-k hit rates along plain outputs, for k = 1 to 5, and what each k adds."""
    decode = make_decoder(workload.target, workload.options.decoding(plain=True) | {"gamma": 0})
    results = [batch.decode_with(decode) for batch in workload.batches]
    rates = acceptance.measure_hit_rate(workload, results)
    names = {"top": "the k most probable ids", "mixed": "k − 1 of them and a drawn one"}
    rows: dict[str, Row] = {
        names[kind]: {"hits": [mean for mean, _ in found[:5]]} for kind, found in rates.items()
    }
    by_rank = acceptance_by_rank(rates["top"])
    rows["what each of the most probable ids adds"] = {"hits": by_rank[:5]}
    return rows
