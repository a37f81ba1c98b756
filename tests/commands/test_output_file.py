"""The output file has the printed results, survives kills, and never mixes settings."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import command_line
import numpy as np
import pytest
from devices import SPECDEC

import specdec_jax as sd
from specdec_jax.commands import generate
from specdec_jax.commands.resumable_output import Journal
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

pair, cache, specdec = command_line.pair, command_line.cache, command_line.specdec
pytestmark = pytest.mark.usefixtures("quick")
slow = pytest.mark.slow

WARM = "--temperature=1", "--gamma=2", "--dtype=float32"
TEXTS = [
    "We asked",
    "Tom",
    "",
    "She was",
    "We",
    "the book",
    "Tom is nice",
    "She",
    "We leave",
    "learning",
    "asked",
    "is",
]


def arguments(pair, *more):
    models = [f"--target={pair / 'target'}", f"--drafter={pair / 'drafter'}"]
    return ["generate", *models, *command_line.MODELS[2:], "--batch_size=3", *map(str, more)]


FLAGS = [["--json", "--temperature=1", "--num_samples=2"], ["--deadline=1000"]]


@pytest.mark.parametrize(
    "flags", [[], *(pytest.param(flags, marks=slow) for flags in FLAGS)], ids=str
)
def test_the_output_file_has_what_is_printed(specdec, pair, tmp_path, flags):
    code, printed, err = specdec(*arguments(pair, *flags, *TEXTS))
    assert (code, err) == (0, "")
    path = tmp_path / "out"
    code, out, err = specdec(*arguments(pair, *flags, f"--output_file={path}", *TEXTS))
    assert (code, out, err) == (0, "", "")
    if "--json" not in flags:
        assert path.read_text() == printed
    else:

        def texts(lines):
            return [
                (json.loads(line)["text"], json.loads(line)["stats"]) for line in lines.splitlines()
            ]

        assert texts(path.read_text()) == texts(printed) and len(texts(printed)) == 24
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "out.gin"]


# Ends in the midst of writing its N-th result, by SIGKILL, or before that by another signal; or
# when all are there and the output file is written, but the journal is not yet removed.
DYING = """
import os, pathlib, signal, sys
from specdec_jax.commands import entry, resumable_output

how, left = sys.argv.pop(1), [int(sys.argv.pop(1))]
append, unlink = resumable_output.Journal._append, pathlib.Path.unlink

def dying(self, record):
    left[0] -= 1
    if left[0] < 0 and how == "SIGKILL":
        append(self, record)
        os.truncate(self.path, os.path.getsize(self.path) - 5)
    if left[0] < 0:
        signal.raise_signal(getattr(signal, how))
    return append(self, record)

def removing(path, **more):
    if path.name.endswith(".partial"):
        signal.raise_signal(signal.SIGKILL)
    unlink(path, **more)

resumable_output.Journal._append, pathlib.Path.unlink = dying, removing
sys.exit(entry.main())
"""


@pytest.mark.slow
def test_a_job_that_is_killed_and_interrupted_gives_the_same_file(
    specdec, pair, tmp_path, quick_environment
):
    source, whole, path = (tmp_path / name for name in ("source", "whole", "out"))
    source.write_text("".join(text + "\n" for text in TEXTS))
    common = arguments(
        pair, "--json", "--temperature=1", "--drafter=", "--gamma=0", f"--input_file={source}"
    )
    assert specdec(*common, f"--output_file={whole}")[0] == 0
    partial = path.with_name("out.partial")
    ends = [("SIGKILL", 4, 3), ("SIGKILL", 5, 8), ("SIGTERM", 1, 9), ("SIGKILL", 99, 12)]
    for how, finished, there in ends:  # the first line holds the settings
        done = subprocess.run(
            [sys.executable, "-c", DYING, how, str(finished), *common, f"--output_file={path}"],
            capture_output=True,
            text=True,
            env=os.environ | quick_environment,
        )
        code, reason = (143, "terminated") if how == "SIGTERM" else (-signal.SIGKILL, "")
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert "kernel: not used" not in done.stderr, done.stderr
        assert not reason or done.stderr.endswith(f"specdec: {reason}\n")
        *lines, torn = partial.read_bytes().split(b"\n")
        assert len(lines) == 1 + there and bool(torn) == (how == "SIGKILL" and there < 12)
        assert path.exists() == (there == 12)
    assert path.read_bytes() == whole.read_bytes()
    kept = partial.read_bytes()
    code, out, err = specdec(*common, f"--output_file={path}")
    assert (code, out) == (0, "") and f"{partial}: 12 of 12 sentences are there\n" in err
    assert path.read_bytes() == whole.read_bytes()
    assert (
        len({json.loads(line)[0] for line in kept.splitlines()[1:]}) == 12
    )  # nothing was decoded twice
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "out",
        "out.gin",
        "source",
        "whole",
        "whole.gin",
    ]


# Of every kind: 1 to 20 words, so that rows end at different times and are refilled.
PLACES = [
    "at home",
    "in the garden",
    "behind the old church",
    "on the long road to the sea",
    "here",
]
DOINGS = [
    "Tom sleeps",
    "the children are playing with their dog",
    "we met",
    "nobody has ever seen her brother",
]
BUNDLED = [
    f"{doing} {place}{end}"
    for doing in DOINGS
    for place in PLACES
    for end in (".", ", and it is raining again.")
]


class Kills:
    """A job with the bundled pair, whole or ended by SIGKILL at some moment.

    Attributes:
      seconds: that the last run took, and that it took from the first line of its journal on.
    """

    def __init__(self, folder):
        self.folder, source = folder, folder / "source"
        source.write_text("".join(text + "\n" for text in BUNDLED))
        self.command = [
            *SPECDEC,
            "generate",
            "--target=ende/target",
            "--drafter=ende/drafter",
            "--batch_size=4",
            f"--input_file={source}",
            f"--compilation_cache_dir={folder / 'cache'}",
        ]

    def finished(self, name):
        """Number of the results in the journal."""
        partial = self.folder / f"{name}.partial"
        return max(0, partial.read_bytes().count(b"\n") - 1) if partial.exists() else 0

    def run(self, name, after=None, decoding=False) -> int:
        """Runs the command and kills it after so many seconds; returns the exit code.

        Seconds count from its start, or from that of its decoding.
        """
        begin, (total, decoded) = self.finished(name), (time.monotonic(), None)
        partial = self.folder / f"{name}.partial"
        size = partial.stat().st_size if partial.exists() else 0
        plan = subprocess.Popen(
            [*self.command, f"--output_file={self.folder / name}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while plan.poll() is None:
                now = time.monotonic()
                if decoded is None and partial.exists() and partial.stat().st_size > size:
                    decoded = now
                since = decoded if decoding else total
                if after is not None and since is not None and now - since >= after:
                    plan.kill()
                time.sleep(0.005)
        finally:
            plan.kill()
        reason = plan.communicate()[1]
        assert plan.returncode in (0, -signal.SIGKILL), reason
        assert (
            not begin
            or plan.returncode
            or f"{begin} of {len(BUNDLED)} sentences are there" in reason
        )
        now = time.monotonic()
        self.seconds = now - total, now - (decoded or now)
        return plan.returncode


@slow
def test_twenty_kills_of_the_bundled_pair_change_no_byte(tmp_path):
    rng, plan, where = random.Random(20), Kills(tmp_path), []
    assert plan.run("cold") == 0 and plan.run("whole") == 0
    whole, (total, decoding) = (tmp_path / "whole").read_bytes(), plan.seconds
    assert whole == (tmp_path / "cold").read_bytes() and len(whole.splitlines()) == len(BUNDLED)
    finished = 0
    while len(where) < 20:
        by_journal = (
            len(where) % 2 == 1
        )  # half of them while it decodes, which is a small part of the time
        if plan.run("out", rng.uniform(0, decoding if by_journal else total), by_journal) == 0:
            assert (tmp_path / "out").read_bytes() == whole
            (tmp_path / "out").unlink()
            finished += 1
        else:
            where.append(plan.finished("out"))
    assert plan.run("out") == 0 and (tmp_path / "out").read_bytes() == whole
    assert not list(tmp_path.glob("*.partial"))
    print(
        f"{total:.1f} s undisturbed, {decoding:.1f} s of them decoding; results kept at each kill: "
        f"{where}; "
        f"ends: {finished}"
    )
    assert len({*where} - {0, len(BUNDLED)}) >= 2, (
        where
    )  # a window of sentences is finished together


def settings(target="target", drafter="drafter", sentences=("a", "b"), models=None, **changes):
    options = generate.GenerateOptions(target=target, drafter=drafter, **changes)
    return generate._deciding_options(options, *models, list(sentences))


def test_settings_differ_where_results_may(pair):
    target, drafter = (sd.load(pair / name, dtype="float32") for name in ("target", "drafter"))
    one = functools.partial(settings, models=(target, sd.ModelDrafter(drafter)))
    base = one()
    same = [
        one(target="elsewhere"),
        one(input_file="x", output_file="y"),
        one(dtype="float32", vocabulary="v"),
    ]
    assert all(other == base for other in same)
    copy = sd.load(pair / "target", dtype="float32")
    assert one(models=(copy, sd.ModelDrafter(drafter))) == base
    others = [
        one(sentences=("ab", "")),
        one(gamma=2),
        one(json=True),
        one(seed=1),
        one(batch_size=3),
        one(stop=("x",)),
        one(models=(drafter, sd.ModelDrafter(drafter))),
        one(models=(target, sd.ModelDrafter(target))),
        one(models=(target, None)),
        one(models=(target, sd.ModelDrafter(drafter, 5))),
        one(models=(target, sd.PromptLookupDrafter())),
        one(models=(target, sd.NGramDrafter.count([[3, 4]], 64, 2))),
        one(models=(target, sd.NGramDrafter.count([[3, 5]], 64, 2))),
        one(models=(sd.load(pair / "target", dtype="bfloat16"), sd.ModelDrafter(drafter))),
    ]
    assert len({json.dumps(other, sort_keys=True) for other in [base, *others]}) == 1 + len(others)
    pieces = SentencePieceVocabulary.train(command_line.TEXT, 35)
    renamed = sd.LanguageModel(target.config, target.params, pieces, eos_ids=target.eos_ids)
    assert one(models=(renamed, sd.ModelDrafter(drafter)))["target"] != base["target"]


def test_a_journal_of_other_settings_is_one_clear_line(specdec, pair, tmp_path):
    path = tmp_path / "out"
    Journal(path, {"gamma": 5}, 12).__exit__()
    before = (tmp_path / "out.partial").read_bytes()
    code, out, err = specdec(*arguments(pair, f"--output_file={path}", *TEXTS))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert (
        err.startswith(f"specdec: error: {tmp_path / 'out.partial'}: got results with ")
        and "remove the file" in err
    )
    assert (tmp_path / "out.partial").read_bytes() == before


# Ends before the N-th state of a learner is written, or after it.
LEARNING = """
import os, signal, sys
from specdec_jax.commands import entry, generate
from specdec_jax.training import online

when, left = sys.argv.pop(1), [int(sys.argv.pop(1))]
generate._SAVE_SECONDS, online._FIRST_OUTPUTS, save = 0.0, 8, online.OnlineDistillation.save

def saving(self, path, every=0.0):
    left[0] -= self.updates > (self._saved[1] if self._saved else 0)
    if when == "after":
        save(self, path, every)
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, path, every)

online.OnlineDistillation.save = saving
online.OnlineDistillation.__init__.__wrapped__.__kwdefaults__["share_of_time"] = 1.0
sys.exit(entry.main())
"""


@slow
def test_a_job_that_learns_resumes_with_what_it_has_learnt(
    specdec, pair, tmp_path, quick_environment
):
    """Its lines are those of a job that does not learn; the learner's file is gone at the end."""
    texts, whole, path = TEXTS * 4, tmp_path / "whole", tmp_path / "out"
    common = arguments(pair, "--temperature=1", "--verifier=gumbel", "--gamma=2")
    assert specdec(*common, f"--output_file={whole}", *texts)[0] == 0
    updates = []
    for when, count, code in (("after", 0, -9), ("before", 1, -9), ("after", 99, 0)):
        done = subprocess.run(
            [sys.executable, "-c", LEARNING, when, str(count)]
            + [*common, "--learn", f"--output_file={path}", *texts],
            capture_output=True,
            text=True,
            env=os.environ | quick_environment,
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        if code:
            with np.load(path.with_name("out.learned")) as file:
                updates.append(json.loads(str(file["record"]))["updates"])
    # Two updates may follow each other before an output is finished.
    updates.append(int(re.search(r"--learn: (\d+) updates", done.stderr)[1]))
    assert 0 < updates[0] < updates[1] < updates[2]
    assert path.read_bytes() == whole.read_bytes()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["out", "out.gin", "whole", "whole.gin"]


@slow
def test_a_job_that_resumes_learns_for_the_outputs_that_are_left(
    specdec, pair, tmp_path, monkeypatch
):
    from specdec_jax.training.online import OnlineDistillation

    add, seen = Journal.add, []

    def interrupt(*given):
        add(*given)
        raise KeyboardInterrupt

    def summary(learner):
        seen.append((learner.expected, learner.outputs))
        return ""

    monkeypatch.setattr(OnlineDistillation, "summary", summary)
    common = [*arguments(pair, "--learn"), f"--output_file={tmp_path / 'out'}", *TEXTS]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupt)
        assert specdec(*common)[0] == 130
    assert specdec(*common)[0] == 0
    assert seen == [(len(TEXTS) - 1, len(TEXTS) - 1)]


# Ends before the N-th text of a history is written, or after it.
KEEPING = """
import os, signal, sys
from specdec_jax.commands import entry, generate
from specdec_jax.drafters import suffix_history

when, left = sys.argv.pop(1), [int(sys.argv.pop(1))]
generate._SAVE_SECONDS, write = 0.0, suffix_history.write_sorted

def writing(*arguments, **settings):
    left[0] -= 1
    if when == "after":
        write(*arguments, **settings)
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments, **settings)

suffix_history.write_sorted = writing
sys.exit(entry.main())
"""


@slow
@pytest.mark.parametrize("sampled", [False, True])
def test_a_job_that_drafts_from_its_outputs_resumes_with_them(
    specdec, pair, tmp_path, quick_environment, sampled
):
    texts, whole, path = TEXTS * 2, tmp_path / "whole", tmp_path / "out"
    common = arguments(pair, *["--temperature=1", "--verifier=gumbel"] * sampled)
    common = [one for one in common if not one.startswith("--drafter")]
    assert specdec(*common, f"--output_file={whole}", "--gamma=0", *texts)[0] == 0
    known = []
    # A job that resumes first writes what it was given.
    for when, count, code in (("after", 2, -9), ("before", 2, -9), ("after", 99, 0)):
        done = subprocess.run(
            [sys.executable, "-c", KEEPING, when, str(count), *common]
            + ["--drafter=suffix", f"--output_file={path}", *texts],
            capture_output=True,
            text=True,
            env=os.environ | quick_environment,
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        if code:
            kept = sd.SuffixDrafter.load(path.with_name("out.learned")).text.ids
            known.append(np.count_nonzero(np.asarray(kept) == 0))
    assert 1 <= known[0] < known[1], "sequences; the second job had those of the first"
    assert "--drafter=suffix: " in done.stderr
    assert path.read_bytes() == whole.read_bytes()
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["out", "out.gin", "whole", "whole.gin"]


@pytest.mark.parametrize("learner", ["--drafter=suffix", "--learn"])
def test_a_file_that_no_learner_saved_is_not_removed(specdec, pair, tmp_path, learner):
    path, own = tmp_path / "out", tmp_path / "out.learned"
    own.write_text("vocabulary that I have learned\n")
    common = [one for one in arguments(pair) if not one.startswith("--drafter")]
    common += [learner, f"--drafter={pair / 'drafter'}"][: 1 + (learner == "--learn")]
    code, out, err = specdec(*common, f"--output_file={path}", *TEXTS[:2])
    assert (code, out) == (2, "") and f"{own}: got " in err and "expected " in err
    assert own.read_text() == "vocabulary that I have learned\n"
    assert [*tmp_path.iterdir()] == [own]


def test_what_is_drawn_with_earlier_outputs_needs_gumbel(specdec, pair):
    code, out, err = specdec("generate", "--target=TARGET", "--drafter=suffix", *WARM, "Tom")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "'block' with a drafter that learns from outputs, expected 'gumbel'" in err


@slow
def test_sorted_text_drafts(specdec, pair, tmp_path):
    """Of lines with sources a known one is drafted as a whole."""
    plain = [specdec("generate", "--target=TARGET", text)[1] for text in TEXTS[:2]]
    lines, path = tmp_path / "lines", tmp_path / "texts.suffix"
    lines.write_text("".join(f"{text}\t{out}" for text, out in zip(TEXTS, plain)))
    count = ["count", "--suffix", "--target=TARGET", f"--input_file={lines}"]
    code, _, err = specdec(*count, f"--output={path}")
    assert code == 0 and err.startswith(f"{path}: ") and "texts of" in err
    found = specdec("generate", "--target=TARGET", f"--drafter={path}", "--gamma=4", *TEXTS[:2])
    assert found[0] == 0 and found[1] == "".join(plain)
    code, _, err = specdec(*count, "--output=texts.npz")
    assert code == 2 and "expected the name of a file that ends in .suffix" in err
    code, _, err = specdec(
        "generate", "--target=STRANGER", f"--drafter={path}", "--dtype=float32", "Tom"
    )
    assert code == 2 and "texts.suffix: got sorted text of" in err and err.count("\n") == 1


NO_LEARNING = {
    "--drafter=lookup": "got True with drafter='lookup'",
    "--gamma=0": (
        "got True with drafter='DRAFTER', gamma=0,"
        " expected a drafter that is a model, and gamma of at least 1"
    ),
    "--stream": "got True with stream=True, expected no stream",
    "--mesh=1x1": "got True with mesh='1x1', expected one device",
}


@pytest.mark.parametrize("flag", NO_LEARNING)
def test_what_cannot_learn_is_rejected_in_one_line(specdec, pair, flag):
    flags = {"--gamma": "--gamma=2", "--drafter": "--drafter=DRAFTER"}
    flags |= {flag.split("=")[0]: flag}
    code, out, err = specdec("generate", "--target=TARGET", *flags.values(), "--learn", "Tom")
    assert (code, out) == (2, "") and err.count("\n") == 1
    message = NO_LEARNING[flag].replace("DRAFTER", str(pair / "drafter"))
    assert f"learn: {message}" in err
