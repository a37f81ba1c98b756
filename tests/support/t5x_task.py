"""Registers a seqio task of ids for tests inside T5X.

The file named by `T5X_TASK_FILE` has one line for each example: source, tab, target.
"""

import os

import seqio
import tensorflow as tf


def vocabulary() -> seqio.Vocabulary:
    """Returns the golden T5X model's vocabulary: ids stand for themselves, and 1 is EOS."""
    return seqio.PassThroughVocabulary(128, eos_id=1)


def _dataset(split, shuffle_files, seed=None):
    def numbers(text):
        return tf.strings.to_number(tf.strings.split(text), tf.int32)

    def example(line):
        columns = tf.strings.split(line, "\t")
        return {"inputs": numbers(columns[0]), "targets": numbers(columns[1])}

    return tf.data.TextLineDataset(os.environ["T5X_TASK_FILE"]).map(example)


_feature = seqio.Feature(vocabulary(), add_eos=False, dtype=tf.int32)
seqio.TaskRegistry.add(
    "specdec_ids",
    source=seqio.FunctionDataSource(_dataset, splits=["test"]),
    output_features={"inputs": _feature, "targets": _feature},
)
