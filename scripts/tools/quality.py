"""Scores decoded texts against references, by sacrebleu."""

from collections.abc import Sequence
from typing import Any


def quality(outputs: Sequence[Any], references: Sequence[str]) -> dict[str, float | str]:
    """Returns BLEU and chrF of the texts of `outputs`, and sacrebleu's signatures.

    Raises:
      ImportError: sacrebleu, of the extra `test`, is not installed.
    """
    import sacrebleu

    record: dict[str, float | str] = {}
    for name, metric in (("bleu", sacrebleu.BLEU()), ("chrf", sacrebleu.CHRF())):
        score = metric.corpus_score([output.text for output in outputs], [references])
        record[name] = round(score.score, 2)
        record[f"{name}_signature"] = str(metric.get_signature())
    return record
