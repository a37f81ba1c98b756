"""Records by others are shown as text, or rejected in one line that names the file."""

import copy
import html.parser
import io
import json
import pathlib
import typing
from unittest import mock

import pytest
from sample_records import (
    ACCELERATOR,
    AGAINST,
    BENCHMARK,
    COMPARED,
    ESTIMATE,
    MEASURE,
    SEARCHED,
    SHOWN,
    parse,
)

from specdec_jax.analysis import traces
from specdec_jax.analysis.report import page as report_page
from specdec_jax.analysis.report import plots, records
from specdec_jax.commands import main
from specdec_jax.speculative import trees, verifiers

pytestmark = pytest.mark.usefixtures("theory_once")

SAME = {"positions": 9, "counted": 0.5, "overlap": 0.5, "difference": 0.0, "standard_error": None}
LENIENT = BENCHMARK["options"] | {"verifier": "lenient", "lenience": 0.5}
KINDS = {
    "benchmark": BENCHMARK | {"against": AGAINST},
    "lenient": BENCHMARK | {"options": LENIENT},
    "measure": MEASURE | {"same_positions": SAME},
    "compared": COMPARED,
    "demo": SHOWN,
    "searched": SEARCHED | {"against": AGAINST},
    "estimate": ESTIMATE,
    "accelerator": ACCELERATOR,
}
HOSTILE = (
    "\"><script>alert(1)</script><img src=x onerror=alert(1)>' & $\\frac{ ]]> --> "
    "\0\x1b[2J\x85\ud800\ufffe <a href='javascript:alert(1)'>"
)
# All that the page is made of; the second are matplotlib's.
ELEMENTS = set(
    "html head meta title style body header main nav h1 h2 h3 h4 p i a ul li dl dt dd div code pre "
    "span table caption thead tbody tr th td".split()
)
DRAWN = set("svg defs g path use text clippath rect tspan".split())
ATTRIBUTES = {
    "lang",
    "charset",
    "id",
    "role",
    "aria-label",
    "scope",
    "tabindex",
    "class",
    "d",
    "style",
    "transform",
    "x",
    "y",
    "width",
    "height",
    "viewbox",
    "version",
    "clip-path",
}


class Page(html.parser.HTMLParser):
    """Asserts that a page has no element, attribute or address but those that are expected."""

    def __init__(self, text: str):
        super().__init__()
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        assert tag in ELEMENTS | DRAWN, tag
        for name, value in attrs:
            assert (
                name in ATTRIBUTES
                or name.startswith("xmlns")
                or (tag, name)
                in {
                    ("meta", "name"),
                    ("meta", "content"),
                    ("a", "href"),
                    ("use", "xlink:href"),
                    ("style", "type"),
                }
            ), (tag, name)
            assert name not in ("href", "xlink:href") or value.startswith("#"), value
            assert name != "class" or value in {
                "text",
                "note",
                "verdict",
                "scroll",
                "panels",
                "committed",
                "accepted",
                "rejected",
                "corrected",
                "bonus",
            }, value

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        assert not set(data) & set("<>&$"), data

    def unknown_decl(self, data):
        raise AssertionError(data)

    handle_pi = unknown_decl


def leaves(value, path=()):
    """Every place in a record: of objects and lists too, but for the record itself."""
    if path:
        yield path
    for key, item in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    ):
        yield from leaves(item, (*path, key))


def get_container(record, path):
    for key in path:
        record = record[key]
    return record


def replaced(record, path, value):
    record = copy.deepcopy(record)
    get_container(record, path[:-1])[path[-1]] = value
    return record


def renamed(record, path, key):
    """With another key in the place of the last one in `path`, in the same order."""
    record = copy.deepcopy(record)
    owner = get_container(record, path[:-1])
    items = [(key if name == path[-1] else name, item) for name, item in owner.items()]
    owner.clear()
    owner.update(items)
    return record


@pytest.fixture
def shown(tmp_path, capsys, monkeypatch):
    """Returns the page that the command makes of a record, or None if it is rejected.

    A rejection is one line that names the file.
    """
    monkeypatch.setattr(report_page, "_list_theory", list)
    monkeypatch.setattr(report_page, "_read_bundled", list)
    source, output = tmp_path / "record.json", tmp_path / "report.html"

    def show(*result) -> Page | None:
        source.write_text("\n".join(json.dumps(record) for record in result), encoding="utf-8")
        output.unlink(missing_ok=True)
        code = main.main(["figures", f"--records={source}", f"--output={output}"])
        error = capsys.readouterr().err
        if code:
            assert (
                code == 2
                and error.count("\n") == 1
                and str(source) in error
                and "expected" in error
            ), error
            assert len(error) < 1000 and not output.exists()
            return None
        assert not error
        return Page(output.read_text(encoding="utf-8"))

    return show


def is_text(value) -> bool:
    return isinstance(value, str)


@pytest.mark.parametrize("kind", KINDS)
def test_markup_in_every_text_is_shown_as_text(shown, kind):
    """All texts of a record at once, but for those out of a fixed set."""
    record, count = KINDS[kind], 0
    for path in [path for path in leaves(record) if is_text(get_container(record, path))]:
        changed = replaced(record, path, HOSTILE)
        try:
            records.parse(changed)
        except ValueError:
            continue
        record, count = replaced(record, path, HOSTILE), count + 1
    page = shown(record)
    assert count >= 5 and sum("<script>alert(1)</script>" in text for text in page.texts) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lenient"])
def test_markup_in_the_place_of_every_key_and_value(shown, kind):
    """One at a time; what is rejected names the file, what is shown is harmless."""
    record, rejected, harmless = KINDS[kind], 0, 0
    for path in leaves(record):
        changed = [replaced(record, path, HOSTILE)]
        if isinstance(path[-1], str):
            changed.append(renamed(record, path, HOSTILE))
        pages = [shown(one) for one in changed]
        rejected, harmless = rejected + pages.count(None), harmless + len(pages) - pages.count(None)
    assert rejected > 20 and harmless > 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "value",
    [None, [], {}, True, -1, 10**400, float("nan"), float("inf"), "x" * 10**6],
    ids=lambda x: str(x)[:9],
)
def test_every_wrong_type_is_rejected_or_shown(tmp_path, value):
    """The check knows all that the page reads: what it lets through can be laid out."""
    rejected = 0
    for record in KINDS.values():
        for path in leaves(record):
            changed = json.loads(json.dumps(replaced(record, path, value)))
            try:
                checked = records.parse(changed)
            except ValueError as error:
                rejected += 1
                assert "\n" not in str(error) and ": got " in str(error) and len(str(error)) < 300
            else:
                with (
                    mock.patch.object(report_page, "_list_theory", list),
                    mock.patch.object(report_page, "_read_bundled", list),
                    mock.patch.object(plots, "render_svg", lambda figure, label: ""),
                ):
                    report_page.report([(tmp_path, checked)])
    assert rejected > 100


@pytest.mark.slow
@pytest.mark.parametrize("extra", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_another_kind_holds_is_not_read(shown, kind, extra):
    both = {name: value for name, value in KINDS[extra].items() if name not in KINDS[kind]} | KINDS[
        kind
    ]
    shown(both)
    shown(
        KINDS[extra]
        | KINDS[kind]
        | {"machine": "<script>", "options": [], "target": "<script>", "against": "<script>"}
    )


def test_a_suites_lines_are_checked_each(shown):
    assert shown(KINDS["benchmark"], KINDS["measure"])
    assert not shown(
        KINDS["benchmark"], replaced(KINDS["measure"], ("table", 0, "gamma"), "<script>")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("benchmark", ("speculative",)),
        ("benchmark", ("example", "variants")),
        ("benchmark", ("example", "variants", 1, "spans")),
        ("benchmark", ("example", "variants", 1, "lines")),
        ("benchmark", ("example", "trees")),
        ("benchmark", ("example", "trees", 0, "nodes")),
        ("benchmark", ("example", "trees", 0, "path")),
        ("demo", ("calls",)),
        ("demo", ("calls", 0, "lines")),
        ("measure", ("table",)),
        ("compared", ("variants",)),
        ("estimate", ("times", "rows")),
    ],
)
def test_more_than_can_be_drawn_is_rejected_at_once(shown, kind, path):
    """What lies beyond the limit is not looked at: of its faults none is found."""
    items = get_container(KINDS[kind], path)[-1:] * (records.MOST_CALLS + 1)
    changed = replaced(KINDS[kind], path, items + [None] * 30_000)
    assert not shown(changed)
    with pytest.raises(ValueError, match="got a list of 50001, expected at most ") as error:
        records.parse(changed)
    assert error.value.__context__.error_count() == 1


@pytest.mark.slow
def test_the_greatest_tree_is_drawn(shown):
    """A chain of as many nodes as there may be, every text long."""
    nodes = [{"text": "<b>" * 99, "parent": node - 1} for node in range(trees.MAX_NODES)]
    drawn = {"nodes": nodes, "path": list(range(len(nodes)))}
    page = shown(
        replaced(
            KINDS["benchmark"], ("example", "trees", 0), BENCHMARK["example"]["trees"][0] | drawn
        )
    )
    assert sum(text.startswith("<b><b>") and len(text) == 60 for text in page.texts) == len(nodes)


def test_names_are_drawn_as_they_are(shown):
    """Names are neither formulas nor wider than the page; the browser has the glyphs."""
    page = shown(
        replaced(KINDS["compared"], ("variants", 0, "variant"), "$\\frac{1}{2}$ _学 " + "x" * 500)
    )
    (name,) = {text for text in page.texts if text.startswith("$") and len(text) < 100}
    assert name.startswith("$\\frac{1}{2}$ _学 xxx") and len(name) == 60
    picture = io.BytesIO()
    plots.draw_measurement(parse(replaced(MEASURE, ("target", "name"), "$\\frac"))).savefig(picture)
    assert picture.getvalue()


def test_fixed_sets_are_whole():
    assert typing.get_args(records.Verifier) == tuple(verifiers.VERIFIERS)
    assert typing.get_args(records.Call) == tuple(plots._COLOURS)


def test_attributes_are_escaped(shown, monkeypatch):
    monkeypatch.setattr(traces, "LEGEND", [("\"'>&", "<b>")])
    text = report_page.report([(pathlib.Path("demo.json"), parse(SHOWN))])
    assert '<span class="&#34;&#39;&gt;&amp;">&lt;b&gt;</span>' in text
