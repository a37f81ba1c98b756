"""Reads the documentation: README, the pages of packages, the bundled model card, others."""

import pathlib
import re
import shlex
import unicodedata

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "specdec_jax"
README = ROOT / "README.md"


def require_checkout() -> None:
    """Skips the test, or the test file, that calls it if the tests are not in a checkout."""
    if not README.is_file() or not PACKAGE.is_dir():
        pytest.skip(
            "no checkout here: an installed package has no pages and no configs",
            allow_module_level=True,
        )


def pages() -> list[pathlib.Path]:
    found = [README, *sorted(PACKAGE.glob("*/README.md")), PACKAGE / "bundled/ende/README.md"]
    found += [PACKAGE / "analysis/RESULTS.md"]
    found += [ROOT / "scripts/README.md", ROOT / ".github/CONTRIBUTING.md"]
    return [path for path in found if path.is_file()]


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def packages() -> list[pathlib.Path]:
    return sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def blocks(text: str) -> list[tuple[str, int, str]]:
    """Returns (language, number of its first line, text) of every fenced block."""
    found = re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(match[1], text[: match.start(2)].count("\n") + 1, match[2]) for match in found]


def prose(text: str) -> str:
    """Returns the text with every line of a fenced block empty."""
    return re.sub(
        r"^```.*?^```[^\n]*",
        lambda match: "\n" * match[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def shell(text: str) -> str:
    """Returns the lines of all fenced blocks that are not Python, continued lines joined."""
    result = "\n".join(body for language, _, body in blocks(text) if language != "python")
    return re.sub(r"\s*\\\n\s*", " ", result)


def commands(text: str) -> list[list[str]]:
    """Returns the arguments of every `specdec` command in fenced blocks, up to a pipe."""
    results = []
    for line in shell(text).splitlines():
        match = re.match(r"(?:.* && |(?:\w+=\S* )+)?(specdec [a-z].*)", line)
        if match:
            words = shlex.split(match[1], comments=True)
            ends = [place for place, word in enumerate(words) if word in ("|", "&&")]
            results.append(words[: ends[0]] if ends else words)
    return results


def written_by_shell(text: str) -> set[str]:
    """Returns the files that lines of fenced blocks write with `>`, or scripts with `--output`."""
    return set(
        re.findall(
            r"(?: > |^(?:\w+=\S+ )*python scripts/.* --output=)(\S+)", shell(text), re.MULTILINE
        )
    )


def links(text: str) -> list[str]:
    """Returns the targets of links, pictures and HTML's `href` and `src`, outside code."""
    plain = re.sub(r"`[^`\n]*`", "", prose(text))
    patterns = (
        r"\]\(\s*<?([^\s)>]+)",
        r"^\[[^\]]+\]:\s*(\S+)",
        r"""(?:href|src|srcset)=["']([^"']+)["']""",
    )
    return [target for pattern in patterns for target in re.findall(pattern, plain, re.MULTILINE)]


def anchors(text: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings."""
    results: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.*?)[ #]*$", prose(text), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = "".join(char for char in shown if char in "- " or _is_of_a_word(char)).replace(
            " ", "-"
        )
        results[anchor] = number = results.get(anchor, -1) + 1
        if number:
            results[f"{anchor}-{number}"] = 0
    return set(results)


def _is_of_a_word(char: str) -> bool:
    category = unicodedata.category(char)
    return category[0] in "LM" or category in ("Nd", "Pc")


def files_table(text: str) -> list[str]:
    """Returns the names in the first column of the table under the heading "Files"."""
    section = re.search(r"^#+ Files *\n(.*?)(?=^#|\Z)", prose(text), re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\|([^|]*)\|", section[1], re.MULTILINE) if section else []
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
