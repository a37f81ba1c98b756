"""Shortlists and 8-bit drafters through the command line."""

import json

import jax
import numpy as np
import pytest
from announcements import without_course
from sample_records import read_macros
from short_heads import EOS, WIDE, V
from toy_models import Words, tiny_t5

import specdec_jax as sd
from specdec_jax.analysis import benchmark as analysis_benchmark
from specdec_jax.analysis import matmul_roofline, timing
from specdec_jax.analysis import variants as analysis_variants
from specdec_jax.analysis.variants import Workload
from specdec_jax.commands import benchmark as benchmark_command
from specdec_jax.commands import main
from specdec_jax.models import weight_layouts
from specdec_jax.models.network import Network
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary

pytestmark = pytest.mark.usefixtures("quick")


# --- The command line ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shortlist")
    text = ["Tom is learning German.", "The weather is nice.", "She asked where the book was."] * 4
    vocabulary = SentencePieceVocabulary.train(text, 32)
    for seed, name in enumerate(("target", "drafter")):
        model = tiny_t5(seed, 64, 1)
        sd.save(sd.LanguageModel(model.config, model.params, vocabulary, name=name), path / name)
    ids = [vocabulary.encode(line) + [EOS] for line in text[:2]]
    sd.NGramDrafter.count(ids, vocabulary.size, 1, vocabulary=vocabulary).save(path / "table.npz")
    sd.NGramDrafter.count([[3]], V, 1, vocabulary=Words()).save(path / "other.npz")
    return path


@pytest.fixture
def specdec(capsys, folder):
    def run(command, *argv):
        where = [f"--target={folder / 'target'}", "--compilation_cache_dir=", "--dtype=float32"]
        code = main.main(
            [command, *where, *(str(argument).replace("FOLDER", str(folder)) for argument in argv)]
        )
        out, err = capsys.readouterr()
        return code, out, without_course(err)

    return run


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--shortlist=FOLDER/table.npz"], None),
        (["--shortlist=FOLDER/table.npz", "--shortlist_size=5"], 5),
        (["--shortlist_size=7", "--drafter_int8"], 7),
    ],
    ids=["counted", "most frequent", "first"],
)
def test_options_make_the_drafter(folder, flags, expected):
    from specdec_jax.commands.generate import GenerateOptions

    given = dict(
        flag.replace("FOLDER", str(folder)).removeprefix("--").partition("=")[::2] for flag in flags
    )
    options = GenerateOptions(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        dtype="float32",
        shortlist=given.get("shortlist"),
        shortlist_size=int(given.get("shortlist_size", 0)),
        drafter_int8="drafter_int8" in given,
    )
    options.check()
    drafter = options.load()[1]
    counts = np.asarray(sd.NGramDrafter.load(folder / "table.npz").unigram)
    if "shortlist" in given:
        ids = sd.shortlist_from_counts(counts, expected or np.count_nonzero(counts), [EOS])
    else:
        ids = np.arange(7)
    assert (
        np.unique(drafter.shortlist.ids).tolist() == ids.tolist()
        and drafter.int8 == options.drafter_int8
    )


def test_generate(specdec):
    decoding = (
        "--drafter=FOLDER/drafter",
        "--max_new_tokens=6",
        "--gamma=2",
        "--shortlist_size=9",
        "--drafter_int8",
    )
    plain = json.loads(specdec("generate", "--max_new_tokens=6", "--json", "Tom")[1])
    code, out, err = specdec("generate", *decoding, "--json", "Tom")
    assert code == 0 and not err and json.loads(out)["tokens"] == plain["tokens"]


@pytest.mark.slow
def test_a_draft_step_is_timed_over_as_many_positions_as_it_feeds(monkeypatch):
    drafter, fed = sd.ModelDrafter(tiny_t5(0, WIDE, 1)), []
    decode = Network.decode_states

    def noted(network, tokens, *arguments, **more):
        fed.append(tokens.shape)
        return decode(network, tokens, *arguments, **more)

    monkeypatch.setattr(Network, "decode_states", noted)
    for free, width in ((False, 1), (True, 2)):
        jax.clear_caches()
        monkeypatch.setattr(Network, "pairs_are_free", lambda network, cache: free)
        variants = timing.step_variants(
            tiny_t5(0, WIDE, 1), drafter, [4], timing.CallShape(3, 4, 16), [2], [2]
        )
        assert ("draft pair" in variants) == (not free)
        fed.clear()
        jax.block_until_ready(variants["draft step"]())
        assert fed == [(3, width)]
        jax.block_until_ready(variants["draft 2 and verify"]())
        assert sorted(fed[1:]) == [(3, width), (3, 3)]
    jax.clear_caches()


def test_the_benchmark_times_what_each_reduction_gains(monkeypatch):
    for name in ("step_variant", "paired_variant", "prefill_variant"):
        monkeypatch.setattr(timing, name, lambda network, *_: network)
    monkeypatch.setattr(matmul_roofline, "products_variants", lambda *_: {})
    options, target = benchmark_command.BenchmarkOptions(target="none"), tiny_t5(0, WIDE, 1)
    batches = [
        analysis_variants.SentenceBatch([[3]], [[3]], [0], jax.random.split(jax.random.key(0), 1))
    ]
    found = {}
    for name, drafter in {
        "none": sd.ModelDrafter(target),
        "list": sd.ModelDrafter(target, 5),
        "both": sd.ModelDrafter(target, 5, True),
    }.items():
        variants = analysis_benchmark._step_variants(
            Workload(target, drafter, batches, options), {}
        )
        found[name] = {variant for variant in variants if variant.startswith("draft step")}
        assert variants["draft step"] is drafter.network
    assert found["none"] == {"draft step"} and found["list"] == {
        "draft step",
        "draft step, unreduced",
    }
    assert found["both"] == found["list"] | {
        "draft step, shortlist alone",
        "draft step, int8 alone",
    }
    assert variants["draft step, unreduced"] is target.network

    def weight(name):
        return variants[name].params["decoder"]["logits_dense"]["kernel"]

    assert weight_layouts.weight_shape(weight("draft step, shortlist alone")) == (16, 64)
    assert weight_layouts.weight_shape(weight("draft step, int8 alone")) == (16, WIDE)
    spread = dict(least=0.1, most=3.0)
    text = read_macros().reductions(
        {
            "draft step": spread | dict(median=1.0),
            "draft step, unreduced": spread | dict(median=2.0),
        }
    )
    assert text == "  unreduced 2.000 s (0.100 to 3.000), of which it takes 0.500\n"


BAD = {
    "no model": (
        ["--drafter=lookup", "--shortlist_size=5"],
        "shortlist_size: got 5, expected a drafter that is a model",
    ),
    "no drafter": (
        ["--drafter_int8"],
        "drafter_int8: got True, expected a drafter that is a model",
    ),
    "size": (
        ["--drafter=FOLDER/drafter", "--shortlist_size=-1"],
        "shortlist_size: got -1, expected at least 0",
    ),
    "too many": (
        ["--drafter=FOLDER/drafter", "--shortlist_size=99"],
        "shortlist: got a size of 99, expected an integer",
    ),
    "no table": (
        ["--drafter=FOLDER/drafter", "--shortlist=none.npz"],
        "none.npz: got no such file, expected an n-gram",
    ),
    "other": (
        ["--drafter=FOLDER/drafter", "--shortlist=FOLDER/other.npz"],
        "shortlist: got a table of 16 ids of another",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_one_line(specdec, name):
    argv, message = BAD[name]
    code, out, err = specdec("generate", *argv, "Tom")
    assert code == 2 and not out and len(err.splitlines()) == 1 and message in err
