"""The README: its Python examples run as they stand, and its list of files is complete."""

import pathlib
import re

import specdec_jax as sd

ROOT = pathlib.Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_examples(capsys):
    assert {"ende/target", "ende/drafter"} <= set(sd.bundled())  # the examples load it
    basic, streaming = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict = {}
    exec(compile(basic, "README.md", "exec"), names)
    texts, figures = capsys.readouterr().out.splitlines()
    assert "Tom" in texts and "Deutsch" in texts
    rate, per_call, accepted = map(float, figures.split())
    assert 0 < rate <= 1 < per_call <= 5 and 0 < accepted < per_call
    exec(compile(streaming, "README.md", "exec"), names)
    assert "." not in capsys.readouterr().out.partition("[")[0], "the first output stops before its full stop"
    assert len(names["several"].texts) == 4 and set(names["several"].finish_reasons) <= {"eos", "length", "deadline"}


def test_every_file_is_listed():
    section = TEXT.partition("\n## Files\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    folders = [path.rstrip("/") for path in listed if path.endswith("/")]
    there = {
        str(path.relative_to(ROOT))
        for pattern in (
            "specdec_jax/**/*.py",
            "configs/**/*.gin",
            "configs/examples/*",
            "scripts/*.py",
            "tests/*.py",
            ".ci/*",
        )
        for path in ROOT.glob(pattern)
        if path.name != "__init__.py" and not any(str(path.relative_to(ROOT)).startswith(folder) for folder in folders)
    }
    assert {path for path in listed if not path.endswith("/")} == there


def test_links_inside_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"^#+ (.*)", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_commands_exist():
    from specdec_jax.commands.main import COMMANDS

    assert set(re.findall(r"^specdec (\w+)", TEXT, re.MULTILINE)) == set(COMMANDS)
