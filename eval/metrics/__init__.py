"""Text metrics as `evaluate` modules that need no network: wrappers of `rouge_score` and `sacrebleu`.

Every metric computes from `predictions` and `references`, two lists of strings, and returns percentages.
`resampled` has the same numbers as statistics over any choice of samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eval.metrics.bleu import Bleu
    from eval.metrics.chrf import Chrf
    from eval.metrics.rouge import Rouge

__all__ = ["Bleu", "Chrf", "Rouge"]


def __getattr__(name: str) -> Any:
    # Imported on first use: `evaluate` and what it brings take seconds.
    if name not in __all__:
        raise AttributeError(f"module 'eval.metrics' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"eval.metrics.{name.lower()}"), name)
