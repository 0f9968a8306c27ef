"""Text metrics as `evaluate` modules that need no network: wrappers of `rouge_score` and `sacrebleu`.

Every metric computes from `predictions` and `references`, two lists of strings, and returns percentages.
"""

from __future__ import annotations

from eval.metrics.bleu import Bleu
from eval.metrics.chrf import Chrf
from eval.metrics.rouge import Rouge

__all__ = ["Bleu", "Chrf", "Rouge"]
