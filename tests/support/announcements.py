"""Tells what commands announce on standard error from everything else there."""

import re

# "decoding: 0 of 3 sentences"; tests/files/test_progress.py has the forms. Only commands in a
# process of their own show them (tests/conftest.py).
_COURSE = re.compile(
    r"^(?:tracing the calls of the first input"
    r"|\d+ of \d+ outputs? ended by length: --max_new_tokens=\d+"
    r"|(?:compiling|counting|decoding|generating|making|reading|training|writing)\b[^:\n]*"
    r": [\d,.]+ of [\d,.]+[^\n]*)\n",
    re.MULTILINE,
)


def without_course(err: str) -> str:
    """Returns standard error without the lines that say what a job compiles or times next."""
    return _COURSE.sub("", err)
