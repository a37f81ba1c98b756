"""Measures the figures of the pages, stage by stage, and renders the pages' tables.

    python scripts/results.py --data=DATA            # an hour or two on two cores
    python scripts/results.py --data=DATA --quick    # ten minutes: the most important tables
    python scripts/results.py --render               # renders only

Run it alone on the machine. One machine is enough for some stages: their figures are computed, not
timed, or they take long. A run leaves these out if a record has them in full, unless `--only` names
them. All stages together take three hours or more.

Almost everything is decoded with the bundled pair; the ways of decoding of one table take turns,
with eight sentences or a whole file. The record is `results/MACHINE.json` beside this script; it is
rewritten after every stage, and a run that was killed resumes with the stages that its record
lacks. A stage that cannot run is recorded with the reason, unless it was measured before, and the
others follow. Then the tables between
`<!-- results: STAGE TEXT -->` and `<!-- end -->` in all pages are rendered: a row is a way of
decoding, a column is a machine.

DATA has a folder for each text, `ende/test.tsv.gz` for example, as the model card of the bundled
pair describes them; the text `sentences` comes with the package. CTranslate2 and transformers
(extra `peers`) and libtpu (extra `tpu-aot`) are measured where they are installed.
"""

import datetime
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags

from specdec_jax.analysis import machine
from specdec_jax.analysis.variants import IN_A_ROW
from specdec_jax.decoding.iteration_costs import keep_costs
from specdec_jax.decoding.program_cache import keep_programs
from specdec_jax.files.writing import write_file
from tools.results.cases import forget_programs
from tools.results.shortfalls import list_shortfalls
from tools.results.stage import Settings, Skipped, Stage
from tools.results.stages import STAGES
from tools.results.texts import BUILT_IN

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "scripts" / "results"
_DATA = flags.DEFINE_string("data", None, "Folder of the texts; without it only `sentences`.")
_QUICK = flags.DEFINE_bool("quick", False, "Few stages, sentences and passes: ten minutes.")
_ONLY = flags.DEFINE_list(
    "only", [], f"Stages to measure, comma-separated, of: {', '.join(STAGES)}."
)
_AGAIN = flags.DEFINE_bool("again", False, "Measure stages anew that the record has.")
_RENDER = flags.DEFINE_bool("render", False, "Render the pages' tables, measure nothing.")
# Families and models of processors that a virtual machine's name does not tell apart.
_GENERATIONS = (
    (25, (*range(16, 32), *range(96, 128), *range(160, 176)), "Zen 4"),
    (26, range(256), "Zen 5"),
    (6, (85,), "Skylake or Cascade Lake"),
    (6, (106,), "Ice Lake"),
    (6, (143,), "Sapphire Rapids"),
    (6, (173, 174), "Granite Rapids"),
    (6, (207,), "Emerald Rapids"),
)
_MARKED = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"got {argv[1]!r}, expected flags only")
    if unknown := sorted(set(_ONLY.value) - set(STAGES)):
        raise app.UsageError(f"only: got {unknown[0]!r}, expected some of {', '.join(STAGES)}")
    if _DATA.value is not None and not os.path.isdir(_DATA.value):
        raise app.UsageError(f"data: got {_DATA.value!r}, expected a folder")
    if not _RENDER.value:
        with tempfile.TemporaryDirectory() as folder:
            keep_programs(folder)  # stages and texts share many
            keep_costs(pathlib.Path(folder))
            settings = Settings(_DATA.value, _QUICK.value)
            measure(settings, _ONLY.value or choose_stages(settings), _AGAIN.value)
    for page in render_pages(read_records()):
        print(f"rendered {page.relative_to(ROOT)}")


def choose_stages(settings: Settings) -> list[str]:
    """Returns the stages of a run without `--only`."""
    parts = [record["stages"] for record in read_records()]
    return [
        name
        for name, stage in STAGES.items()
        if (stage.minutes[1] is not None or not settings.quick)
        and not (stage.once and any(is_measured(part.get(name, {}), settings) for part in parts))
    ]


def measure(settings: Settings, names: Sequence[str], again: bool) -> None:
    """Measures stages, and writes the record after each."""
    described = machine.describe_machine()
    name = name_machine({"machine": described}).lower()
    path = RECORDS / f"{re.sub('[^a-z0-9]+', '-', name).strip('-')}.json"
    stages = read_record(path)["stages"]
    todo = [one for one in names if again or not is_measured(stages.get(one, {}), settings)]
    minutes = {one: STAGES[one].minutes[settings.quick] or STAGES[one].minutes[0] for one in todo}
    total = sum(minutes.values())
    print(f"{len(todo)} stages, about {total:.0f} minutes on two cores: {', '.join(todo)}")
    for one in todo:
        print(f"{one}: about {minutes[one]:g} minutes", flush=True)
        start = time.perf_counter()
        found: dict[str, Any] = {}
        load = os.getloadavg()[0]
        forget_programs()
        try:
            found["rows"] = STAGES[one].measure(settings)
        except Skipped as reason:
            found["skipped"] = str(reason)
        except Exception as error:  # the others follow
            found["failed"] = describe_error(error)
            traceback.print_exc()
        found |= {
            "seconds": round(time.perf_counter() - start, 1),
            "load": round(load, 1),
            "in_a_row": IN_A_ROW,
            "data": settings.data is not None,
            "command": f"scripts/results.py --only={one}" + " --quick" * settings.quick,
            "commit": find_commit(),
            "date": datetime.date.today().isoformat(),
        }
        record = read_record(path) | {"machine": described}  # another process may have written
        if "rows" in found or "rows" not in record["stages"].get(one, {}):
            record["stages"][one] = found
        RECORDS.mkdir(exist_ok=True)
        write_file(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print(f"{one}: {found.get('skipped') or found.get('failed') or 'measured'}", flush=True)


def describe_error(error: Exception) -> str:
    """Returns an error for a page: one line, without the folders of this machine."""
    text = re.sub(r"(?<![\w.])/[^\s'\"]*/", "", f"{type(error).__name__}: {error}")
    return " ".join(text.split())[:200]


def is_measured(part: Mapping[str, Any], settings: Settings) -> bool:
    """Returns whether a stage has rows; in full, rows of a full run; with texts, rows of texts."""
    if "rows" not in part or was_quick(part) and not settings.quick:
        return False
    lacks = bool(part["rows"]) and all(BUILT_IN in text.split() for text in part["rows"])
    return not (lacks and settings.data and part.get("data") is False)


def was_quick(part: Mapping[str, Any]) -> bool:
    """Returns whether few sentences and passes were measured."""
    return "--quick" in part.get("command", "")


def explain_absence(part: Mapping[str, Any]) -> str:
    """Returns why a stage has no rows for a table."""
    if "rows" in part and was_quick(part):
        return "measured by a run in full only"
    return part.get("skipped") or part.get("failed") or "not measured yet"


def note_conditions(record: Mapping[str, Any], part: Mapping[str, Any], kind: Stage) -> str:
    """Returns what a reader of a stage's figures should know, in parentheses.

    More than one and a half processes a core, before a stage, are mostly those of other programs,
    which matter where the figures are times. Ways of decoding once took turns with every sentence.
    """
    one_by_one = kind.by_sentence and "rows" in part and "in_a_row" not in part
    busy = kind.timed and part.get("load", 0) > 1.5 * record["machine"]["cores"]
    notes = ["`--quick`"] * was_quick(part) + ["on a busy machine"] * busy
    notes += ["in turn with every sentence"] * one_by_one
    return f" ({', '.join(notes)})" if notes else ""


def find_commit() -> str | None:
    """Returns the commit that is checked out, None outside a clone."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout.strip() or None


def read_record(path: pathlib.Path) -> dict[str, Any]:
    """Returns the record of a machine, without stages if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"stages": {}}


def read_records() -> list[dict[str, Any]]:
    """Returns the records of all machines."""
    return [read_record(path) for path in sorted(RECORDS.glob("*.json"))]


def render_pages(records: Sequence[Mapping[str, Any]]) -> list[pathlib.Path]:
    """Renders the tables of all pages, and returns the pages that changed."""
    changed = []
    for page in [ROOT / "README.md", *sorted(ROOT.glob("specdec_jax/**/*.md"))]:
        old = page.read_text(encoding="utf-8")
        new = render_text(old, records)
        if new != old:
            write_file(page, new)
            changed.append(page)
    return changed


def render_text(text: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a page with the tables between its marks rendered from records."""

    def render(mark: re.Match) -> str:
        return f"{mark[1]}{make_table(mark[2], records)}\n{mark[3]}"

    return _MARKED.sub(render, text)


def make_table(name: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown table `STAGE TEXT`: a row for each case, a column for each machine.

    With `*` in TEXT there is a table for each machine, with a column for each text that it matches.

    Raises:
      ValueError: there is no such stage.
    """
    if name == "shortfalls":
        records = [record for record in records if list_shortfalls(record["stages"])]
        columns = [list_shortfalls(record["stages"]) for record in records]
        parts = [record["stages"].values() for record in records]
        quick = [any("rows" in part and was_quick(part) for part in some) for some in parts]
        heads = [name_machine(one) + " (`--quick`)" * some for one, some in zip(records, quick)]
        return _write_rows("what falls short", heads, columns)
    stage, _, text = name.partition(" ")
    if stage not in STAGES:
        raise ValueError(
            f"results: got {name!r} on a page, expected a stage of {', '.join(STAGES)}"
        )
    kind, heads, columns, tables, why = STAGES[stage], [], [], [], set()
    # Stages are measured on processors, some on accelerators.
    other = [one for one in records if bool(name_accelerator(one)) == kind.accelerator]
    for record in [one for one in records if stage in one["stages"] or one in other]:
        part = record["stages"].get(stage, {})
        head = name_machine(record) + note_conditions(record, part, kind)
        rows = {
            one: {case: kind.drop_alpha(one, case, row) for case, row in cases.items()}
            for one, cases in part.get("rows", {}).items()
        }
        why.add(explain_absence(part))
        if "*" in text:
            before, after = text.split("*")
            texts = [one for one in rows if one.startswith(before) and one.endswith(after)]
            brief = [{case: kind.brief(row) for case, row in rows[one].items()} for one in texts]
            names = [one.removeprefix(before).removesuffix(after) for one in texts]
            tables += [_write_rows(f"{kind.title}: {head}", names, brief)] * bool(texts)
        heads.append(head)
        columns.append({case: kind.format(row) for case, row in rows.get(text, {}).items()})
    if tables:
        return "\n\n".join(tables)
    if any(columns):  # machines that were not asked have no column
        kept = [(head, column) for head, column in zip(heads, columns) if column]
        heads, columns = [head for head, _ in kept], [column for _, column in kept]
    if not kind.timed:
        heads, columns = _join_equal(heads, columns)
    return _write_rows(kind.title, heads, columns, "; ".join(sorted(why)))


def _join_equal(
    heads: Sequence[str], columns: Sequence[dict[str, str]]
) -> tuple[list[str], list[dict[str, str]]]:
    """Returns columns without those that others contain, whose heads are joined.

    What is computed, not timed, is often the same on several machines.
    """
    kept: dict[int, list[str]] = {}
    for at in sorted(range(len(columns)), key=lambda one: -len(columns[one])):
        whole = next((one for one in kept if columns[at].items() <= columns[one].items()), at)
        kept.setdefault(whole, []).append(heads[at])
    return ["; ".join(kept[one]) for one in sorted(kept)], [columns[one] for one in sorted(kept)]


def name_machine(record: Mapping[str, Any]) -> str:
    """Returns the head of a machine's column: its accelerator, or its processor."""
    cores = record["machine"]["cores"]
    return name_accelerator(record) or f"{name_processor(record['machine'])}, {cores} cores"


def name_processor(described: Mapping[str, Any]) -> str:
    """Returns a processor's name without what says nothing, and its generation if that is known."""
    name = re.sub(r"\((R|TM)\)| Processor\b| CPU\b.*", "", described["processor"])
    family, model = described.get("processor_family") or (0, 0)
    known = (one for number, models, one in _GENERATIONS if number == family and model in models)
    made = next(known, f"family {family}, model {model}" if family else "")
    return f"{name} ({made})" if made else name


def name_accelerator(record: Mapping[str, Any]) -> str:
    """Returns the kind of a machine's accelerator, empty without one."""
    kind = re.fullmatch(r"(?!cpu)\w+: (.*), \d+", record["machine"].get("device", ""))
    return kind[1] if kind else ""


def _write_rows(
    title: str,
    heads: Sequence[str],
    columns: Sequence[Mapping[str, str]],
    why: str = "not measured yet",
) -> str:
    """Returns a Markdown table; `why` takes the place of the rows if there are none."""
    lines = [f"| {' | '.join([title, *heads])} |", "|---" * (1 + len(heads)) + "|"]
    for case in dict.fromkeys(case for column in columns for case in column):
        lines.append(f"| {case} | {' | '.join(column.get(case, '-') for column in columns)} |")
    if not any(columns):
        lines.append(f"| {why} |{' |' * len(heads)}")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
