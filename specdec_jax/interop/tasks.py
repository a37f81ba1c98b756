"""Registers seqio tasks: the data of the paper through TensorFlow Datasets, and local TSV files.

Needs the extra `seqio`.

An import registers `wmt_t2t_ende` and `cnn_dailymail`, which T5 calls `wmt_t2t_ende_v003` and
`cnn_dailymail_v002`, with T5's vocabulary. The functions register a task anew with other settings
and return its name, so that a gin file can bind `task = @tasks.tsv()`, or T5X's
`MIXTURE_OR_TASK_NAME = @tasks.tsv()`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.checkpoints import loader, t5x
from specdec_jax.files import places
from specdec_jax.tokenizers.vocabularies import ByteVocabulary, SentencePieceVocabulary
from specdec_jax.training import text_files

try:
    import seqio
    import tensorflow as tf
except ImportError as error:
    raise ImportError(
        f"seqio: not installed ({error}), expected the extra: pip install '.[seqio]'"
    ) from error

T5_VOCABULARY, T5_SENTINELS = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", 100
_OURS: set[str] = set()


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns sacrebleu's BLEU with the tokeniser "intl", as T5 reports it."""
    import sacrebleu

    return {
        "bleu": sacrebleu.corpus_bleu(list(predictions), [list(targets)], tokenize="intl").score
    }


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns ROUGE-1, -2 and -Lsum as 100 times the mean F-measure.

    T5 reports the middle of a bootstrap around it.
    """
    from rouge_score import rouge_scorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = rouge_scorer.RougeScorer(names)

    # Lsum treats a line as a sentence.
    lines = [[text.replace(" . ", " .\n") for text in texts] for texts in (targets, predictions)]
    scores = [scorer.score(target, output) for target, output in zip(*lines, strict=True)]
    return {
        name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in names
    }


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the percentage of predictions that equal their target."""
    same = [target == output for target, output in zip(targets, predictions, strict=True)]
    return {"exact_match": 100 * sum(same) / len(same)}


def wmt_t2t_ende(
    vocabulary: str = T5_VOCABULARY,
    extra_ids: int | None = None,
    data_dir: str | None = None,
    name: str = "wmt_t2t_ende",
) -> str:
    """Registers WMT English to German as in tensor2tensor; returns the task's name.

    The split "validation" is newstest2013, "test" is newstest2014. `data_dir` is where TensorFlow
    Datasets keeps its data, None for its default. `extra_ids` None adds T5's 100 sentinels to a
    SentencePiece file that has none; one in a store has them if its folder is called `…extra`.
    Other arguments as for `tsv`.
    """
    data = seqio.TfdsDataSource(tfds_name="wmt_t2t_translate/de-en:1.0.0", tfds_data_dir=data_dir)
    texts = dict(prefix="translate English to German: ", source="en", target="de")
    return _register(name, data, texts, _make_vocabulary(vocabulary, extra_ids), (bleu,))


def cnn_dailymail(
    vocabulary: str = T5_VOCABULARY,
    extra_ids: int | None = None,
    data_dir: str | None = None,
    name: str = "cnn_dailymail",
) -> str:
    """Registers news articles and their highlights; returns the task's name.

    Arguments as for `wmt_t2t_ende`.
    """
    data = seqio.TfdsDataSource(tfds_name="cnn_dailymail:3.4.0", tfds_data_dir=data_dir)
    texts = dict(prefix="summarize: ", source="article", target="highlights")
    return _register(name, data, texts, _make_vocabulary(vocabulary, extra_ids), (rouge,))


def tsv(
    files: Mapping[str, str | Sequence[str]],
    vocabulary: str,
    extra_ids: int = 0,
    prefix: str = "",
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]] = (bleu,),
    name: str = "tsv",
) -> str:
    """Registers a task of local TSV files, gzip or not, with a source and a target on each line.

    Returns its name.

    Args:
      files: one or more files for every split.
      vocabulary: a SentencePiece file, or the folder or bundled name of a model with a vocabulary.
      extra_ids: number of T5's sentinels to add after the tokens of a SentencePiece file.
      prefix: text put before every source, e.g. "translate English to German: ".
      metric_fns: metric functions as seqio takes them.
      name: name of the task.

    Raises:
      ValueError: a file is missing, the vocabulary cannot be read, or another module has registered
        the name.
    """
    paths = {
        split: [given] if isinstance(given, str) else list(given) for split, given in files.items()
    }
    paths = {split: list(map(os.path.expanduser, given)) for split, given in paths.items()}
    for path in (path for given in paths.values() for path in given):
        text_files.check_is_file("files", path, "a TSV file")

    def pairs(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        read = text_files.read_pairs(paths[split])
        sides = {side: [pair[i] for pair in read] for i, side in enumerate(("source", "target"))}
        return tf.data.Dataset.from_tensor_slices(
            {side: tf.constant(texts, tf.string) for side, texts in sides.items()}
        )

    data = seqio.FunctionDataSource(pairs, splits=list(paths))
    texts = dict(prefix=prefix, source="source", target="target")
    return _register(name, data, texts, _make_vocabulary(vocabulary, extra_ids), metric_fns)


def _register(
    name: str,
    data: seqio.DataSource,
    texts: Mapping[str, str],
    vocabulary: seqio.Vocabulary,
    metric_fns: Sequence[Callable],
) -> str:
    """Registers a task that makes ids of texts as T5's tasks do.

    It replaces one that was registered here under the same name. `texts` names the source, which
    is put after a prefix, and the target among the fields of the data.
    """

    def make_examples(dataset: tf.data.Dataset) -> tf.data.Dataset:
        return dataset.map(
            lambda example: {
                "inputs": tf.strings.join([texts["prefix"], example[texts["source"]]]),
                "targets": example[texts["target"]],
            },
            num_parallel_calls=tf.data.AUTOTUNE,
        )

    if name in seqio.TaskRegistry.names():
        if name not in _OURS:
            raise ValueError(
                f"name: got {name!r}, which another module has registered, expected another name"
            )
        seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(
        name,
        source=data,
        preprocessors=[
            make_examples,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={
            side: seqio.Feature(vocabulary, add_eos=True) for side in ("inputs", "targets")
        },
        metric_fns=list(metric_fns),
    )
    _OURS.add(name)
    return name


def _make_vocabulary(path: str, extra_ids: int | None) -> seqio.Vocabulary:
    """Returns seqio's vocabulary for a SentencePiece file, or for a model's vocabulary.

    `extra_ids` None adds T5's sentinels to a file that has none.
    """
    path = os.path.expanduser(path)
    if path == T5_VOCABULARY:  # read when it is needed
        return seqio.SentencePieceVocabulary(path, T5_SENTINELS if extra_ids is None else extra_ids)
    if places.is_remote(path) and path.endswith(".model"):  # which TensorFlow opens by itself
        extra_ids = 0 if extra_ids is None and "extra/" in path else extra_ids
        return seqio.SentencePieceVocabulary(path, T5_SENTINELS if extra_ids is None else extra_ids)
    folder = loader.BUNDLED / path if path in loader.bundled() else places.make_path(path)
    if not folder.is_dir():
        if extra_ids is None:
            pieces = SentencePieceVocabulary.load(path).list_pieces()
            extra_ids = 0 if any("<extra_id_" in piece for piece in pieces) else T5_SENTINELS
        return seqio.SentencePieceVocabulary(path, extra_ids)
    ours, _ = loader.load_vocabulary(path)
    if isinstance(ours, ByteVocabulary):
        return seqio.ByteVocabulary(ours.extra_ids)
    whole = folder.absolute()
    candidates = [
        place / name
        for place in (t5x.find_step(whole) or whole, whole, whole.parent)
        for name in ("spiece.model", "sentencepiece.model")
    ]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None or ours is None:
        raise ValueError(
            f"vocabulary: got {path!r} without a SentencePiece model, expected a model that has one"
        )
    return seqio.SentencePieceVocabulary(
        str(file), max(0, ours.size - SentencePieceVocabulary.load(file).size)
    )


wmt_t2t_ende()
cnn_dailymail()
