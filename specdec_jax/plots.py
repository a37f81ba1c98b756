"""Figures of records; matplotlib (the extra `plots`) is imported where it draws."""

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

FORMATS = (".png", ".pdf", ".svg")


def check(path: str) -> None:
    """Refuses what could not be drawn after everything is measured.

    Raises:
      ValueError: another format, or no such folder.
      ImportError: no matplotlib.
    """
    if not path.endswith(FORMATS) or not pathlib.Path(path).absolute().parent.is_dir():
        raise ValueError(f"plot: got {path!r}, expected a file ({', '.join(FORMATS)}) in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plot: got no matplotlib, expected it: pip install 'specdec_jax[plots]'")


def improvement(record: Mapping[str, Any], path: str) -> None:
    """Draws what `specdec measure` found: expected improvement by γ, acceptance by position, v by width."""
    from matplotlib.figure import Figure

    table, accepted = record["table"], record["acceptance"]
    gammas = [row["gamma"] for row in table]
    figure = Figure(figsize=(12, 4), layout="constrained")
    gain, stands, cost = figure.subplots(1, 3)
    if accepted["alpha"] is not None:
        gain.plot(gammas, [row["theorem_3_8"] for row in table], "o--", label="from α, v = 1")
        gain.plot(gammas, [row["with_verify_cost"] for row in table], "o-", label="from α, v measured")
        stands.plot(gammas, [accepted["alpha"] ** gamma for gamma in gammas], "k:", label="α to the power of i")
    for name, values in accepted["by_position"].items():
        gain.plot(
            gammas, [row["by_position"][name]["with_verify_cost"] for row in table], "s-", label=f"by position, {name}"
        )
        errors = [value["standard_error"] or 0.0 for value in values]
        stands.errorbar(gammas, [value["stands"] for value in values], errors, fmt="s-", capsize=3, label=name)
    gain.axhline(1, color="grey", linewidth=1)
    gain.set(xlabel="γ, drafted tokens", ylabel="expected improvement over plain decoding", xticks=gammas)
    stands.set(xlabel="i", ylabel="P(first i drafted tokens stand)", xticks=gammas, ylim=(0, 1))
    cost.plot([int(width) for width in record["verify_cost"]], list(record["verify_cost"].values()), "o-")
    cost.set(xlabel="positions", ylabel="v: cost of a target call, in single steps", ylim=(0, None))
    cost.axhline(1, color="grey", linewidth=1)
    for axes in (gain, stands):
        axes.legend()
    options = record["options"]
    figure.suptitle(
        f"{record['target']['name']} with {record['drafter']['name']}, temperature {options['temperature']:g}, "
        f"batch {options['batch_size']}: c = {record['cost_ratio']:.3f}"
    )
    figure.savefig(path, dpi=150)
