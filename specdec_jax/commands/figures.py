"""Runs `specdec figures`: writes an HTML page of the paper's figures and measured records."""

import dataclasses

from specdec_jax.analysis.report.page import report
from specdec_jax.analysis.report.records import MOST_ITEMS, read_records
from specdec_jax.files.writing import check_output, write_file
from specdec_jax.models.arguments import make_option


@dataclasses.dataclass(frozen=True)
class FiguresOptions:
    """Options of `specdec figures`."""

    records: tuple[str, ...] = make_option(
        (),
        "file with a record of `specdec benchmark`, `measure` or `demo`, "
        "scripts/compare_drafters.py, scripts/tpu_aot.py --times or "
        "scripts/accelerator_report.py; repeatable",
    )
    output: str = make_option("report.html", "HTML file to write; it needs no other files")

    def check(self) -> None:
        check_page("output", self.output)


def check_page(name: str, path: str, source: str | None = None) -> None:
    """Raises ValueError if `path`, of the option `name`, is no HTML file in an existing folder.

    It is also raised for the path of the input, `source`.
    """
    if not path.endswith(".html"):
        raise ValueError(f"{name}: got {path!r}, expected the name of a file that ends in .html")
    check_output(path, name, source)


def run(options: FiguresOptions) -> None:
    """Runs `specdec figures`."""
    options.check()
    read = [(path, record) for path in options.records for record in read_records(path)]
    if len(read) > MOST_ITEMS:
        raise ValueError(f"records: got {len(read)} records, expected at most {MOST_ITEMS}")
    write_file(options.output, report(read))
    print(f"wrote {options.output}")
