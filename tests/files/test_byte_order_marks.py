"""A byte order mark at the beginning of a file is no part of its text, wherever texts are read."""

import gzip
import io
import sys

import pytest

from specdec_jax.commands import sentences
from specdec_jax.training import text_files

TEXT = "Tom\tTim\r\nÄpfel\t\ufeff\r\n"  # the mark that is not at the beginning is text
LINES = ["Tom\tTim", "Äpfel\t\ufeff"]


@pytest.fixture(params=["utf-8", "utf-8-sig", "utf-8-sig, gzip"])
def path(request, tmp_path):
    encoding, *rest = request.param.split(", ")
    path = tmp_path / ("text.tsv.gz" if rest else "text.tsv")
    content = TEXT.encode(encoding)
    path.write_bytes(gzip.compress(content) if rest else content)
    return path


def test_lines_pairs_and_documents(path):
    assert list(text_files.read_lines(path)) == LINES
    assert text_files.read_pairs([path, path])[::2] == [("Tom", "Tim")] * 2
    assert text_files.read_examples([path])[0] == ("Tom", "Tim", None)
    assert text_files.read_documents([path])[0] == "Tom\tTim"
    assert sentences.read_sentences([], str(path)) == LINES


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode("utf-8-sig"))))
    assert sentences.read_sentences([], None) == LINES


def test_a_mark_alone_is_an_empty_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf\n")
    assert list(text_files.read_lines(path)) == [""]
