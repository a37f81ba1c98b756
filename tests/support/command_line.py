"""Runs commands in this process, with tiny models, folders and outputs for all tests."""

import shutil

import cache_settings
import jax
import pytest
from announcements import without_course

import specdec_jax as sd
from specdec_jax.backends.cpu import native
from specdec_jax.commands import main
from specdec_jax.files import user_cache
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

CONFIG = sd.T5Config(64, 16, 2, 8, 1, 1, 24)
TEXT = [
    "Tom is learning German.",
    "The weather is nice.",
    "She asked where the book was.",
    "We leave before eight.",
] * 3
SENTENCES = [
    "We asked",
    "Tom",
    "",
    "She was",
    "We",
]  # all of one padded length: few shapes to compile
MODELS = (
    "--target=TARGET",
    "--drafter=DRAFTER",
    "--dtype=float32",
    "--max_new_tokens=6",
    "--gamma=2",
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Makes folders with a target, a drafter with its vocabulary, and a model with another one."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary = SentencePieceVocabulary.train(TEXT, 36)
    other = SentencePieceVocabulary.train(TEXT, 35)
    for seed, (name, pieces) in enumerate(
        [("target", vocabulary), ("drafter", vocabulary), ("stranger", other)]
    ):
        sd.save(
            sd.LanguageModel.random(CONFIG, seed=seed, vocabulary=pieces, name=name), folder / name
        )
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Uses one compilation cache for all tests of a file, and restores JAX's settings.

    The CPU's kernels are in it from the beginning: processes that had to compile them could run out
    of time, and would then decode without them, which changes last bits.
    """
    base = tmp_path_factory.getbasetemp() / "cache"
    if not base.exists() and native.is_available():
        shutil.copytree(user_cache.private_folder("kernel"), base / "specdec_jax" / "kernel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    with cache_settings.restored():
        yield base / "specdec_jax"


@pytest.fixture
def compilations():
    """Returns a list that collects the seconds of every compilation from here on."""
    seconds = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def specdec(capsys, pair):
    """Returns a function that runs a command: (exit code, output, errors without announcements).

    TARGET, DRAFTER and STRANGER in the arguments stand for the folders of `pair`.
    """

    def run(*argv):
        argv = [str(argument) for argument in argv]
        for name in ("target", "drafter", "stranger"):
            argv = [argument.replace(f"={name.upper()}", f"={pair / name}") for argument in argv]
        code = main.main(argv)
        out, err = capsys.readouterr()
        return code, out, without_course(err)

    return run


def expected(pair, sentences=SENTENCES, **options):
    """Returns the texts that the library gives, one sentence at a time and without a drafter."""
    target = sd.load(pair / "target", dtype="float32")
    return [sd.generate(target, [text], max_new_tokens=6, **options).texts[0] for text in sentences]
