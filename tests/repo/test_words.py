"""The words of the code, pages and messages are the field's."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Words that once meant a distribution, a variant of a benchmark, to reject, to verify, a top-k hit
# rate, int8, synthetic acceptance, a package, dummy weights and the ambient mesh.
WORDS = (
    "law",
    "laws",
    "arm",
    "arms",
    "refuse",
    "refused",
    "refuses",
    "judge",
    "judged",
    "judges",
    "coverage",
    "in 8 bits",
    "by coin",
    "door sign",
    "numbers of no meaning",
    "surroundings",
    "NotNumbers",
    "Renewal",
)


def test_no_other_word_for_a_term_of_the_field():
    listing = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "*.gin"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("no git checkout here")
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b|_laws?\b|\blaws?_")
    found = {
        f"{name}: {match[0]}"
        for name in listing.stdout.splitlines()
        if name != "tests/repo/test_words.py" and (ROOT / name).is_file()
        for match in pattern.finditer((ROOT / name).read_text(encoding="utf-8"))
    }
    assert not found
