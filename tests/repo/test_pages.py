"""The pages' Python runs as it stands, their links lead somewhere, their tables are complete."""

import ast
import re

import pages
import pytest

import specdec_jax as sd

pages.require_checkout()

TEXTS = {pages.name_of(path): path.read_text(encoding="utf-8") for path in pages.pages()}
README = TEXTS["README.md"]
# Pages whose examples take several seconds.
LONG = [
    f"specdec_jax/{package}/README.md"
    for package in ("speculative", "decoding", "models", "drafters", "checkpoints", "interop")
]
every_page = pytest.mark.parametrize("name", TEXTS)
with_python = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name, text in TEXTS.items()
        if any(block[0] == "python" for block in pages.blocks(text))
    ],
)


def python(name: str) -> list[tuple[int, str]]:
    return [
        (line, body) for language, line, body in pages.blocks(TEXTS[name]) if language == "python"
    ]


@with_python
def test_python_examples(name, tmp_path, monkeypatch, capsys):
    """In order, in one namespace, in a folder where what they write does no harm."""
    (tmp_path / "configs").symlink_to(pages.ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for line, body in python(name):
        exec(compile("\n" * (line - 1) + body, pages.ROOT / name, "exec"), names)
    for result in names.values():
        if isinstance(result, sd.GenerationResult) and result.stats.drafted:
            assert (
                0 < result.stats.tokens_per_target_call
                and 0 <= result.stats.accepted_per_target_call
            )
    assert name != "README.md" or capsys.readouterr().out.strip(), (
        "the README's example shows something"
    )


@every_page
def test_python_examples_name_what_is_there(name):
    """Also those of pages that take long to run."""
    trees = [ast.parse(body) for _, body in python(name)]
    named = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "sd"
    }
    assert not [attribute for attribute in named if not hasattr(sd, attribute)]


def test_readme_has_an_example():
    assert python("README.md") and {"ende/target", "ende/drafter"} <= set(sd.bundled())


def test_readme_is_short_and_has_pictures():
    assert len(README.splitlines()) <= 200
    pictures = {link for link in pages.links(README) if link.startswith(".github/")}
    assert len(pictures) >= 2
    assert not [picture for picture in pictures if not (pages.ROOT / picture).is_file()]


@every_page
def test_prose_is_narrow(name):
    """Tables apart, and where a link leads to."""
    shown = re.sub(r"\]\([^)]*\)", "]()", pages.prose(TEXTS[name]))
    lines = enumerate(shown.splitlines(), 1)
    assert not [number for number, line in lines if len(line) > 120 and not line.startswith("|")]
    code = [
        (first + number, line)
        for first, body in python(name)
        for number, line in enumerate(body.splitlines())
    ]
    assert not [number for number, line in code if len(line) > 120]


@every_page
def test_links_lead_somewhere(name):
    page, broken = pages.ROOT / name, []
    for link in pages.links(TEXTS[name]):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue  # elsewhere
        path, _, anchor = link.partition("#")
        result = (
            pages.ROOT / path[1:] if path.startswith("/") else page.parent / path if path else page
        )
        inside = result.resolve().is_relative_to(pages.ROOT.resolve())
        if not (inside and result.exists()):
            broken.append(link)
        elif anchor and (
            result.suffix != ".md"
            or anchor not in pages.anchors(result.read_text(encoding="utf-8"))
        ):
            broken.append(link)
    assert not broken


@every_page
def test_files_of_the_repository_exist(name):
    """Those that a page names by their path from the root."""
    named = set(
        re.findall(
            r"(?<![\w/.~*-])(?:specdec_jax|configs|scripts|tests)/[\w*./-]*\.\w+", TEXTS[name]
        )
    )
    assert not [path for path in named if not list(pages.ROOT.glob(path))]


@every_page
def test_commands_exist(name):
    from specdec_jax.commands.main import COMMANDS

    spans = re.findall(r"`specdec ([a-z_]+)[^`]*`", pages.prose(TEXTS[name]))
    assert {argv[1] for argv in pages.commands(TEXTS[name])} | set(spans) <= set(COMMANDS)


def test_every_command_is_shown():
    from specdec_jax.commands.main import COMMANDS

    assert {argv[1] for text in TEXTS.values() for argv in pages.commands(text)} == set(COMMANDS)


@pytest.mark.parametrize("package", pages.packages(), ids=lambda package: package.name)
def test_every_file_of_a_package_is_listed(package):
    """A file is listed with its path; a folder with an `__init__.py` alone by its own name."""
    page = package / "README.md"
    assert page.is_file(), f"{package.name} has no page"
    there = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    }
    folders = {path.parent for path in package.rglob("*/__init__.py")}
    there |= {
        f"{folder.relative_to(package)}/"
        for folder in folders
        if len(list(folder.rglob("*.py"))) == 1
    }
    listed = pages.files_table(page.read_text(encoding="utf-8"))
    assert len(listed) == len(set(listed))
    assert {name for name in listed if name.endswith((".py", "/"))} == there
    assert not [name for name in listed if not (package / name).exists()]
