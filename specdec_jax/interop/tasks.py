"""seqio tasks: the data of the paper through TensorFlow Datasets, and local TSV files. The extra `seqio`.

An import registers `wmt_t2t_ende` and `cnn_dailymail`, what T5 calls `wmt_t2t_ende_v003` and
`cnn_dailymail_v002`, with T5's vocabulary. The functions register a task anew with other settings
and return its name, so that a gin file can say `task = @tasks.tsv()`, ours or, as
MIXTURE_OR_TASK_NAME, T5X's.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_jax.checkpoints import loader
from specdec_jax.models.vocabularies import ByteVocabulary, SentencePieceVocabulary
from specdec_jax.training import text_files

try:
    import seqio
    import tensorflow as tf
except ImportError as error:
    raise ImportError(f"seqio: not installed ({error}), expected the extra: pip install '.[seqio]'") from error

T5_VOCABULARY, T5_SENTINELS = "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", 100
_OURS: set[str] = set()


def bleu(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """sacrebleu's BLEU with its tokeniser "intl", as T5 reports it."""
    import sacrebleu

    return {"bleu": sacrebleu.corpus_bleu(list(predictions), [list(targets)], tokenize="intl").score}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, -2 and -Lsum, 100 times the mean F; T5's are the middle of a bootstrap around it."""
    from rouge_score import rouge_scorer

    names = ("rouge1", "rouge2", "rougeLsum")
    scorer = rouge_scorer.RougeScorer(names)
    lines = lambda text: text.replace(" . ", " .\n")  # Lsum takes a line for a sentence
    scores = [scorer.score(lines(target), lines(found)) for target, found in zip(targets, predictions, strict=True)]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in names}


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
    """Percentage of predictions that are the target."""
    same = [target == found for target, found in zip(targets, predictions, strict=True)]
    return {"exact_match": 100 * sum(same) / len(same)}


def wmt_t2t_ende(
    vocabulary: str = T5_VOCABULARY, extra_ids: int = T5_SENTINELS, data_dir: str | None = None,
    name: str = "wmt_t2t_ende"
) -> str:  # fmt: skip
    """WMT English to German as in tensor2tensor: newstest2013 is "validation", newstest2014 "test".
    Arguments as `tsv`'s.

    Args:
      data_dir: where TensorFlow Datasets keeps its data; None: its default.
    """
    source = seqio.TfdsDataSource(tfds_name="wmt_t2t_translate/de-en:1.0.0", tfds_data_dir=data_dir)
    texts = functools.partial(_texts, prefix="translate English to German: ", source="en", target="de")
    return _register(name, source, texts, _vocabulary(vocabulary, extra_ids), (bleu,))


def cnn_dailymail(
    vocabulary: str = T5_VOCABULARY, extra_ids: int = T5_SENTINELS, data_dir: str | None = None,
    name: str = "cnn_dailymail"
) -> str:  # fmt: skip
    """Articles and their highlights. Arguments as `wmt_t2t_ende`'s."""
    source = seqio.TfdsDataSource(tfds_name="cnn_dailymail:3.4.0", tfds_data_dir=data_dir)
    texts = functools.partial(_texts, prefix="summarize: ", source="article", target="highlights")
    return _register(name, source, texts, _vocabulary(vocabulary, extra_ids), (rouge,))


def tsv(
    files: Mapping[str, str | Sequence[str]], vocabulary: str, extra_ids: int = 0, prefix: str = "",
    metric_fns: Sequence[Callable[..., Mapping[str, Any]]] = (bleu,), name: str = "tsv",
) -> str:  # fmt: skip
    """Registers a task of local TSV files, gzip or not, with a source and a target in each line; returns its name.

    Args:
      files: a file or several for every split.
      vocabulary: a SentencePiece file, or the folder or bundled name of a model, whose vocabulary is taken.
      extra_ids: T5's sentinels after the pieces of a file.
      prefix: put before every source, e.g. "translate English to German: ".
      metric_fns: as seqio takes them.

    Raises:
      ValueError: a missing file, a vocabulary that cannot be had, or a name that is another's.
    """
    paths = {split: [found] if isinstance(found, str) else list(found) for split, found in files.items()}
    for path in (path for found in paths.values() for path in found):
        if not pathlib.Path(path).is_file():
            raise ValueError(f"files: got {path!r}, which is no file, expected a TSV file")

    def pairs(split: str, shuffle_files: bool, seed: int | None = None) -> tf.data.Dataset:
        found = text_files.read_pairs(paths[split])
        sides = {side: [pair[i] for pair in found] for i, side in enumerate(("source", "target"))}
        return tf.data.Dataset.from_tensor_slices(
            {side: tf.constant(texts, tf.string) for side, texts in sides.items()}
        )

    source = seqio.FunctionDataSource(pairs, splits=list(paths))
    texts = functools.partial(_texts, prefix=prefix, source="source", target="target")
    return _register(name, source, texts, _vocabulary(vocabulary, extra_ids), metric_fns)


def _texts(dataset: tf.data.Dataset, prefix: str, source: str, target: str) -> tf.data.Dataset:
    """Examples with `source` after `prefix` as inputs and `target` as targets."""
    example = lambda found: {"inputs": tf.strings.join([prefix, found[source]]), "targets": found[target]}
    return dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)


def _register(name: str, source, texts: Callable, vocabulary: seqio.Vocabulary, metric_fns: Sequence[Callable]) -> str:
    """Registers from texts to ids as T5's tasks do it; replaces what was registered here under the same name."""
    if name in seqio.TaskRegistry.names():
        if name not in _OURS:
            raise ValueError(f"name: got {name!r}, which another module has registered, expected another name")
        seqio.TaskRegistry.remove(name)
    seqio.TaskRegistry.add(
        name,
        source=source,
        preprocessors=[
            texts,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={side: seqio.Feature(vocabulary, add_eos=True) for side in ("inputs", "targets")},
        metric_fns=list(metric_fns),
    )
    _OURS.add(name)
    return name


def _vocabulary(path: str, extra_ids: int) -> seqio.Vocabulary:
    """seqio's vocabulary of a SentencePiece file, or that of a model."""
    if path not in loader.bundled() and not pathlib.Path(path).is_dir():
        return seqio.SentencePieceVocabulary(path, extra_ids)  # reads it when it is needed
    ours, _ = loader.load_vocabulary(path)
    if isinstance(ours, ByteVocabulary):
        return seqio.ByteVocabulary(ours.extra_ids)
    folder = loader.BUNDLED / path if path in loader.bundled() else pathlib.Path(path)
    files = [
        place / name for place in (folder, folder.absolute().parent) for name in ("spiece.model", "sentencepiece.model")
    ]
    file = next((file for file in files if file.is_file()), None)
    if file is None or ours is None:
        raise ValueError(f"vocabulary: got {path!r} without a SentencePiece model, expected one")
    return seqio.SentencePieceVocabulary(str(file), max(0, ours.size - SentencePieceVocabulary.load(file).size))


wmt_t2t_ende()
cnn_dailymail()
