"""`scripts/wikitext_sentences.py`: what it makes of WikiText's lines."""

import gzip

import pytest
from absl.flags import FLAGS

LINES = """
 = A heading =

 She said : " It 's a one @-@ off , is n't it " . \
In 2012 – 13 there were 1 @,@ 200 ( about 3 @.@ 5 % ) of them .
 A sentence with <unk> goes . Too short . The miners ' wives kept the one that is wanted here .
 This one is among those that are held out , again .
"""


@pytest.fixture
def module(load_script):
    return load_script("wikitext_sentences")


def test_sentences(module, tmp_path, capsys):
    source, held_out, output = (tmp_path / name for name in ("text.txt", "test.tsv", "out.txt.gz"))
    source.write_text(LINES, encoding="utf-8")
    held_out.write_text("this one is among those that are held out: AGAIN\tx\n", encoding="utf-8")
    FLAGS(
        [
            "wikitext_sentences",
            f"--input_file={source}",
            f"--output_file={output}",
            f"--exclude={held_out}",
        ]
    )
    module.main([])
    assert gzip.decompress(output.read_bytes()).decode().splitlines() == [
        "She said: \"It's a one-off, isn't it\".",
        "In 2012–13 there were 1,200 (about 3.5%) of them.",
        "The miners' wives kept the one that is wanted here.",
    ]
    assert capsys.readouterr().out == "3 sentences\n"


def test_lengths_are_counted_in_words(module):
    def words(count):
        return " ".join(["Word"] * (count - 1)) + " ."

    lines = [words(count) for count in (3, 4, 45, 46)]
    assert [len(sentence.split()) for sentence in module.sentences(lines, set())] == [
        3,
        44,
    ]  # the full stop is one
