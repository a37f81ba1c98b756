"""Tells what commands announce on standard error from everything else there."""

import re

# "compiling; sentences 0/3"; "compiling 1 of 4: plain"; tests/decoding/test_progress.py has the
# forms.
_COURSE = re.compile(
    r"^(?:compiling; \w+ 0/\d+|tracing the calls of the first input"
    r"|\d+ of \d+ outputs? ended by length: --max_new_tokens=\d+"
    r"|(?:compiling|timing|scoring|counting|comparing|sweep|lines|parameters|pass)\b[^:\n]* \d+ "
    r"of \d+(?:: .*)?)\n",
    re.MULTILINE,
)


def without_course(err: str) -> str:
    """Returns standard error without the lines that say what a job compiles or times next."""
    return _COURSE.sub("", err)
