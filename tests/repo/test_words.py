"""The words of the code, pages and messages are the field's."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
# Words that once stood for the field's, and the field's. A word also counts inside a name: it may
# have an underscore on either side.
WORDS = {
    "laws?": "distribution",
    "arms?": "variant, run",
    "refus(e|ed|es|ing)": "rejected, raises",
    "judg(e|ed|es|ing)": "verify",
    "coverage": "top-k hit rate",
    "in 8 bits": "int8",
    "by coin": "synthetic acceptance",
    "forced acceptance": "synthetic acceptance",
    "rooms|door signs?|doors?|houses?": "package, layout, layer, entry point",
    "numbers of no meaning": "dummy weights",
    "surroundings": "ambient mesh",
    "long jobs?": "continuous batching",
    "goes on after a kill": "resumes",
    "pinned": "constrain_sharding",
    "tiled": "count_padding",
    "block_stand|rejection_stand": "accept_probs",
    "NotNumbers": "NonFiniteLogitsError",
    "Renewal": "CostAware",
    "Int8Kernel|apply_kernel|step_kernels": "weight",
}
# Where the words mean what they mean everywhere: in sentences to translate, in others' names.
ALLOWED = (
    "The house is wonderful",
    "A house",
    "such a big house",
    "close the door",
    "beartype.door",
    "character_coverage",  # of SentencePiece
)
# Modules that were renamed, and folders of tests.
MODULES = (
    *("auto", "costs", "deepening", "draws", "fields", "filling", "fused_trial", "gamma"),
    *("identity", "jobs", "journal", "laws", "layouts", "leaves", "nodes", "outcomes", "outputs"),
    *("own", "panels", "probe", "products", "surroundings", "traced", "trials"),
)


def list_files(*patterns: str) -> list[pathlib.Path]:
    """Returns the checkout's files of these patterns."""
    listing = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("no git checkout here")
    paths = [ROOT / name for name in listing.stdout.splitlines()]
    return [path for path in paths if path.is_file() and path != pathlib.Path(__file__)]


def find_words(text: str) -> set[str]:
    """Returns the words of `text` that the field has another word for."""
    for phrase in ALLOWED:
        text = text.replace(phrase, "")
    pattern = rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])"
    return {match[0] for match in re.finditer(pattern, text)}


def test_no_other_word_for_a_term_of_the_field():
    texts = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in list_files("*.py", "*.md", "*.gin")
    }
    found = {name: words for name, text in texts.items() if (words := find_words(text))}
    assert not found


def test_no_module_has_a_name_of_before():
    assert not {path.stem for path in list_files("specdec_jax/*.py")} & set(MODULES)


def test_words_inside_names_are_found():
    text = "draft_law, test_it_is_judged, beartype.door, flaw, the arms of a benchmark, coverage"
    assert find_words(text) == {"law", "judged", "arms", "coverage"}
