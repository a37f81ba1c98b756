"""The table of what works with which family, on the page of models: each of its cells is tried."""

import functools
import pathlib
import re

import golden_languages
import golden_mesh_run
import numpy as np
import pages
import pytest
from gemma_tokenizer import END, write_tokenizer
from golden_models import GOLDEN

import specdec_jax as sd
from specdec_jax.commands import distill, main
from specdec_jax.models import parameters
from specdec_jax.models.gemma import GemmaConfig, T5GemmaConfig
from specdec_jax.models.t5 import check_t5
from specdec_jax.tokenizers import huggingface_folders
from specdec_jax.tokenizers.vocabularies import SentencePieceVocabulary
from specdec_jax.training import eagle, heads, train
from specdec_jax.training.config import TrainConfig
from specdec_jax.training.sequence_distillation import DistillConfig

pytestmark = pytest.mark.usefixtures("quick")
pages.require_checkout()
PAGE = pages.PACKAGE / "models" / "README.md"
TEXTS = ["Tom is learning German.", "The weather is nice.", "We leave before eight."]
SHAPE = dict(emb_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, num_decoder_layers=2, mlp_dim=24)
SHAPE |= dict(windows=(3, 0))
ENCODER = dict(num_encoder_layers=2, encoder_emb_dim=16, encoder_mlp_dim=24, encoder_num_heads=4)
ENCODER |= dict(encoder_num_kv_heads=2, encoder_windows=(4, 0))
CAPS = dict(attention_cap=5.0, logits_cap=8.0)
NORMS = dict(qk_norm=True, local_rotary_base=100.0)


def read_table():
    """Yields (row, family, cell) of the table."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| what works with"))
    families = [name.strip() for name in lines[start].split("|")[2:-1]]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        row, *cells = [cell.strip() for cell in line.split("|")[1:-1]]
        yield from ((row, family, cell) for family, cell in zip(families, cells, strict=True))


# The models.


def make_t5(folder):
    vocabulary = SentencePieceVocabulary.train(TEXTS * 3, 28)
    return sd.T5Config(64, 16, 2, 8, 2, 2, 24), vocabulary, dict(eos_ids=(1,))


def make_bart(folder):
    made = golden_languages.make_model("bart", folder / "files")
    config = made.config.replace(num_encoder_layers=2)
    return config, made.vocabulary, dict(start_token=2, eos_ids=made.eos_ids)


def make_gpt(folder):
    vocabulary = huggingface_folders.open_folder(GOLDEN / "hf_gpt2", (287,))
    config = sd.GPTConfig(288, 16, 2, 2, 24, num_positions=96)
    return config, vocabulary, dict(start_token=287, eos_ids=(287,))


def make_gemma(folder, kind, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    vocabulary = huggingface_folders.open_folder(folder, (1, END))
    config = kind(vocabulary.size, **SHAPE, **fields)
    return config, vocabulary, dict(start_token=2, eos_ids=(1, END))


MERGED = dict(**ENCODER, **NORMS, merged_attention=True)
FAMILIES = {
    "T5": make_t5,
    "BART-like": make_bart,
    "GPT-2": make_gpt,
    "Gemma 2": functools.partial(make_gemma, kind=GemmaConfig, **CAPS),
    "Gemma 3": functools.partial(make_gemma, kind=GemmaConfig, **NORMS),
    "T5Gemma 1": functools.partial(make_gemma, kind=T5GemmaConfig, **ENCODER, **CAPS),
    "T5Gemma 2": functools.partial(make_gemma, kind=T5GemmaConfig, **MERGED),
}


class Pair:
    """A target and a smaller model of its weights, in a folder.

    Attributes:
      folder: where `target` and `drafter` are stored, beside `lines.txt` and, for a model with an
        encoder, `pairs.tsv`.
      target, drafter: the loaded models.
    """

    def __init__(self, family, folder):
        self.folder = folder
        config, vocabulary, ids = FAMILIES[family](folder)
        target = sd.LanguageModel.random(config, 0, vocabulary, **ids)
        if family == "BART-like":  # else every token would have the same probability
            params = target.params
            params["token_embedder"]["embedding"] *= 20
            target = sd.LanguageModel(config, params, vocabulary, **ids)
        fewer = {} if config.decoder_only else dict(num_encoder_layers=1)
        small, flat = (
            config.replace(num_decoder_layers=1, **fewer),
            parameters.flatten(target.params),
        )
        tree = parameters.unflatten(
            {name: flat[name] for name in parameters.parameter_shapes(small)}
        )
        self.paths = {}
        for name, model in (
            ("target", target),
            ("drafter", sd.LanguageModel(small, tree, vocabulary, **ids)),
        ):
            self.paths[name] = str(folder / name)
            sd.save(model, folder / name, say=lambda line: None)
        self.target, self.drafter = map(load, self.paths.values())
        (folder / "lines.txt").write_text("\n".join(TEXTS) + "\n")
        (folder / "pairs.tsv").write_text("".join(f"{text}\t{text}\n" for text in TEXTS))

    @property
    def decoder_only(self):
        return self.target.config.decoder_only

    def generate(self, target=None, **options):
        return sd.generate(target or self.target, TEXTS, **dict(max_new_tokens=8) | options)

    def compare(self, drafter, plain={}, target=None, **how):
        """Compares tokens with plain decoding's."""
        expected = self.generate(target, **plain).tokens
        found = self.generate(target, drafter=drafter, **plain, **how or dict(gamma=3))
        np.testing.assert_array_equal(found.tokens, expected)
        assert found.stats.drafted > 0

    def make_settings(self, output):
        """Returns the settings of a short run of training."""
        run = dict(steps=2, warmup_steps=0, decay_steps=0, batch_tokens=256, dtype="float32")
        run |= dict(log_every=1, save_every=2, evaluate_every=2, data_dir=str(self.folder))
        file = "lines.txt" if self.decoder_only else "pairs.tsv"
        lengths = dict(sequence_length=16) if self.decoder_only else dict(buckets=(64,))
        files = dict(train_files=file, validation_files=file)
        return run | files | lengths | dict(output_dir=str(self.folder / output))


def load(path, **options):
    return sd.load(path, "float32", say=lambda line: None, **options)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory):
    return functools.cache(
        lambda family: Pair(family, tmp_path_factory.mktemp("family") / "models")
    )


# The rows.


def draft_by_a_model(pair):
    model, config = pair.drafter, pair.target.config
    pair.compare(sd.ModelDrafter(model))
    pair.compare(sd.ModelDrafter(model, int8=True))
    ids = sorted({*model.eos_ids, *range(0, config.vocab_size, 2)})
    pair.compare(sd.ModelDrafter(model, shortlist=ids))


def draft_by_a_reader(pair):
    shape = dict(emb_dim=16, num_heads=2, head_dim=8, num_decoder_layers=1, mlp_dim=16)
    shape |= dict(num_encoder_layers=0, encoder_dim=pair.target.config.encoded_dim)
    ids = dict(start_token=pair.target.start_token, eos_ids=pair.target.eos_ids)
    config = sd.T5Config(pair.target.config.vocab_size, **shape)
    pair.compare(sd.ModelDrafter(sd.LanguageModel.random(config, 0, **ids)))


def draft_without_a_model(pair):
    for drafter in (
        sd.EarlyExitDrafter(pair.target, 1),
        sd.SelfDrafter(pair.target),
        sd.PromptLookupDrafter(min_match=0),
        sd.NGramDrafter.count(
            [[5, 6, 7]], pair.target.config.vocab_size, 2, start_token=pair.target.start_token
        ),
    ):
        pair.compare(drafter)


def search(pair):
    drafter = sd.ModelDrafter(pair.drafter)
    pair.compare(drafter, tree=sd.Tree.uniform((2, 2)))
    pair.compare(drafter, tree=sd.DynamicTree(depth=3, width=2, nodes=6))
    for style in ("t5x", "huggingface"):
        pair.compare(drafter, dict(num_beams=2, beam_style=style), gamma=2)


def stream(pair):
    drafter, plain = sd.ModelDrafter(pair.drafter), pair.generate()
    given = dict(drafter=drafter, gamma=3, max_new_tokens=8)
    texts = [""] * len(TEXTS)
    for piece in sd.stream(pair.target, TEXTS, **given):
        texts[piece.row] += piece.text
    assert texts == plain.texts
    found = dict(sd.decode_stream(pair.target, TEXTS, batch_size=2, **given))
    expected = [row[:n].tolist() for row, n in zip(plain.tokens, plain.lengths)]
    assert [found[i][0].tokens for i in range(len(TEXTS))] == expected


def learn_while_decoding(pair):
    learner = sd.OnlineDistillation(pair.target, sd.ModelDrafter(pair.drafter), share_of_time=1.0)
    given = dict(batch_size=4, max_new_tokens=8)
    expected = dict(sd.decode_stream(pair.target, TEXTS * 16, **given))
    found = dict(sd.decode_stream(pair.target, TEXTS * 16, learner=learner, gamma=2, **given))
    assert all(found[i][0].tokens == expected[i][0].tokens for i in expected)
    assert learner.updates and not learner.ended


def continue_a_prefix(pair):
    prefix = [[pair.target.config.vocab_size - 2, 5]] * len(TEXTS)
    pair.compare(sd.ModelDrafter(pair.drafter), dict(decoder_prefix=prefix))


def round_weights(pair):
    for quantize in ("int8", "w8a8"):
        target = load(pair.paths["target"], quantize=quantize)
        assert target.quantized
        pair.compare(sd.ModelDrafter(pair.drafter), target=target)


def divide(pair):
    inputs = [pair.target.vocabulary.encode_input(text) for text in TEXTS + TEXTS[:1]]
    if pair.decoder_only:
        inputs = [pair.target.vocabulary.encode_prompt(text) for text in TEXTS + TEXTS[:1]]
    plain = sd.generate(
        pair.target, inputs, max_new_tokens=8, sampling=sd.SamplingConfig(no_repeat_ngram=2)
    )
    lengths, width = list(map(len, inputs)), max(map(len, inputs))
    padded = np.array([row + [0] * (width - len(row)) for row in inputs])
    folder = pathlib.Path(pair.paths["target"])
    np.savez(folder / "io.npz", inputs=padded, input_lengths=lengths)
    found = golden_mesh_run.run(folder)["target"]
    expected = [row[:n].tolist() for row, n in zip(plain.tokens, plain.lengths)]
    assert found == dict.fromkeys(golden_mesh_run.MESHES, expected)


def train_on_states(pair):
    settings = pair.make_settings("heads") | dict(target=pair.paths["target"])
    heads.fit(heads.HeadsTrainConfig(**settings, num_heads=2))
    states = settings | dict(output_dir=str(pair.folder / "eagle"))
    eagle.fit(eagle.EagleTrainConfig(**states, drafter=pair.paths["drafter"], depth=2))
    for drafter in (
        sd.HeadsDrafter.load(pair.folder / "heads" / "heads", pair.target),
        sd.EagleDrafter.load(pair.folder / "eagle" / "eagle", pair.target),
    ):
        pair.compare(drafter)
        pair.compare(drafter, tree=sd.Tree.uniform((2, 2)))


def train_a_model(pair):
    start = dict(initialise_from=pair.paths["drafter"], teacher=pair.paths["target"])
    size = pair.target.vocabulary.size
    start |= dict(model=pair.drafter.config, distill_weight=0.5, vocabulary_size=size)
    train.fit(TrainConfig(**pair.make_settings("train"), **start))
    pair.compare(sd.ModelDrafter(load(pair.folder / "train" / "model")))


def train_for_all_at_once(pair):
    start = dict(initialise_from=pair.paths["drafter"], vocabulary_size=pair.target.vocabulary.size)
    start |= pair.make_settings("masks")
    if pair.decoder_only:
        pairs = dict(train_files="pairs.tsv", validation_files="pairs.tsv", prompts=True)
        start |= pairs | dict(sequence_length=None, buckets=(64,))
    config = TrainConfig(**start, model=pair.drafter.config, masks=2)
    train.fit(config)
    pair.compare(sd.ParallelDrafter(load(pair.folder / "masks" / "model")))


def distil_a_drafter(pair):
    given = {name: value for name, value in pair.make_settings("distill").items()}
    for name in ("train_files", "validation_files", "buckets", "sequence_length"):
        given.pop(name, None)
    files = dict(source_files=("lines.txt",), validation_files=("lines.txt",), buckets=(64,))
    given |= files | dict(target=pair.paths["target"], max_new_tokens=8, batch_size=2)
    shapes = dict(drafter=pair.paths["drafter"]), dict(drafter_shape=(16, 2, 8, 0, 1, 16))
    for number, shape in enumerate(shapes):
        output = pair.folder / f"distill{number}"
        distill.run(DistillConfig(**given | dict(output_dir=str(output)) | shape))
        pair.compare(sd.ModelDrafter(load(output / "model")))


def run_commands(pair):
    given = [f"--{name}={path}" for name, path in pair.paths.items()]
    given += ["--dtype=float32", "--max_new_tokens=6"]
    lines = f"--input_file={pair.folder / 'lines.txt'}"
    for command, *more in (
        ("generate", "--num_beams=2", "--gamma=2", TEXTS[0]),
        ("demo", "--gamma=2", TEXTS[0]),
        ("benchmark", lines, "--gamma=2", "--repeats=2", "--tree=widths:2,1"),
        ("measure", lines),
        ("tune", lines, "--gamma=1,2", f"--config={pair.folder / 'tuned.gin'}"),
    ):
        assert main.main([command, *given, *more]) == 0
    table, target = f"{pair.folder / 'table.npz'}", given[0]
    assert main.main(["count", target, lines, "--order=2", f"--output={table}"]) == 0


def write_hugging_face(pair):
    folder = pair.folder / "huggingface"
    sd.save(pair.target, folder, format="huggingface", say=lambda line: None)
    again = load(folder)
    assert again.fingerprint == pair.target.fingerprint
    assert again.vocabulary.fingerprint() == pair.target.vocabulary.fingerprint()


def write_t5x(pair):
    check_t5("target", pair.target.config)
    sd.save(pair.target, pair.folder / "t5x", format="t5x", say=lambda line: None)
    assert load(pair.folder / "t5x").fingerprint == pair.target.fingerprint


ROWS = {
    "a smaller model, also in int8 or with a shortlist": draft_by_a_model,
    "a T5 that reads the target's encoder output": draft_by_a_reader,
    "early exit, `self:int8`, n-grams, copying": draft_without_a_model,
    "token trees, beam search": search,
    "streams, continuous batching": stream,
    "learning while decoding": learn_while_decoding,
    "`decoder_prefix`": continue_a_prefix,
    "int8 and w8a8 on a CPU": round_weights,
    "meshes": divide,
    "Medusa heads, and drafters that read states (EAGLE)": train_on_states,
    "`specdec train`, also from a teacher": train_a_model,
    "`masks`, for a `ParallelDrafter`": train_for_all_at_once,
    "`specdec distill`": distil_a_drafter,
    "`benchmark`, `measure`, `tune`, `count`, `demo`": run_commands,
    "Hugging Face's format in `save` and `convert`": write_hugging_face,
    "inside T5X, and T5X's formats": write_t5x,
}
CELLS = [
    (row, name, cell)
    for row, family, cell in read_table()
    for name in (["Gemma 2", "Gemma 3"] if family == "Gemma 2, 3" else [family])
]


def test_the_table_has_all_rows_and_families():
    assert list(dict.fromkeys(row for row, _, _ in CELLS)) == list(ROWS)
    assert {family for _, family, _ in CELLS} == set(FAMILIES)
    assert {cell for _, _, cell in CELLS} == {"yes", "no", "–"}


@pytest.mark.slow
@pytest.mark.parametrize("row, family", [cell[:2] for cell in CELLS if cell[2] == "yes"])
def test_what_works(row, family, pair_of):
    ROWS[row](pair_of(family))


@pytest.mark.parametrize("row, family", [cell[:2] for cell in CELLS if cell[2] == "no"])
def test_what_does_not_is_rejected_in_one_line(row, family, pair_of):
    with pytest.raises(ValueError, match=re.compile(r"got .*, expected ", re.S)) as caught:
        ROWS[row](pair_of(family))
    assert len(str(caught.value).splitlines()) == 1
