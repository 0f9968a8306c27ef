"""Perplexity on long real text, read through the cache in chunks.

```
            chunk 0     chunk 1     chunk 2          the tokens of a chunk attend to each other as they are;
text      |===========|===========|===========|      what lies before it is read from the cache
```
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from eval.caches import CacheEntry, Demand
from eval.core.errors import UsageError
from eval.core.models import LoadedModel
from eval.core.statistics import Statistic
from eval.data import text
from eval.data.source import Source, chosen, read
from eval.run.generate import check_context, context_tokens, forward, measured
from eval.run.settings import Settings

from .base import Answer, MetricSpec, Outcome, Sample, Task, Unit

CHUNK_TOKENS = 64
_DEFAULT_CONTEXT_TOKENS = 2048
_CONTEXT_TOKENS_PER_SAMPLE = 128  # with few samples a window is shorter, unless its length was asked for
SAMPLES_PER_WINDOW = 8  # what a window counts for: it takes as long as so many short answers


def perplexity(answers: Sequence[Answer]) -> Statistic:
    """Exponential of the mean negative log-likelihood of a token, over all tokens of all windows."""
    nll = np.array([answer.values["nll"] for answer in answers])
    tokens = np.array([answer.values["tokens"] for answer in answers])
    return lambda indices: math.exp(float(nll[indices].sum() / tokens[indices].sum()))


class Perplexity(Task):
    """Windows of a long text; every token is predicted from those before it in its window."""

    name = "perplexity"
    title = f"windows of long text, forwarded {CHUNK_TOKENS} tokens at a time"
    metrics = (
        MetricSpec("perplexity", "perplexity", "", perplexity, higher_is_better=False, resolution=1e-4),
    )
    takes_dataset = True

    def units(self, loaded: LoadedModel, settings: Settings) -> list[Unit]:
        """Windows of the longest of `settings.contexts`, spread evenly over the text."""
        limit = context_tokens(loaded.model)
        default = min(_DEFAULT_CONTEXT_TOKENS, _CONTEXT_TOKENS_PER_SAMPLE * settings.limit)
        length = max(settings.contexts or [min(default, limit or default)])
        check_context(loaded.model, length, "the windows of the task 'perplexity'", "smaller --contexts")
        if length < 2:
            raise UsageError("a window of 1 token predicts none; choose larger --contexts for 'perplexity'")
        ids = text.token_ids(loaded.tokenizer, self._text(settings))
        starts = _starts(ids.shape[0], length, -(-settings.limit // SAMPLES_PER_WINDOW))
        windows = [ids[start : start + length][None].to(loaded.device) for start in starts]
        return [
            Unit(index, f"window {index + 1}/{len(starts)}", (Sample(f"token {start}", ""),), window)
            for index, (start, window) in enumerate(zip(starts, windows, strict=True))
        ]

    def run(self, loaded: LoadedModel, unit: Unit, entry: CacheEntry, reference: Any) -> Outcome:
        """Forward one window."""
        window: torch.Tensor = unit.inputs  # [1, tokens]
        with torch.inference_mode(), measured(loaded, entry, Demand(1, window.shape[1])) as made:
            nll = _nll(loaded, window, made.cache)
        answer = Answer(unit.samples[0].id, values={"nll": nll, "tokens": float(window.shape[1] - 1)})
        # Chunks are no prompt and no steps.
        measures = dataclasses.replace(made.measures(is_timed=False), prefill_ms=())
        return Outcome((answer,), measures)

    def _text(self, settings: Settings) -> str:
        if settings.dataset is None:
            return text.shipped()
        given = chosen(settings, Source("", {}))
        return "\n\n".join(row["input"] for row in read(given, ("input",), None, settings.seed))


def _starts(text_tokens: int, length: int, windows: int) -> list[int]:
    """First tokens of windows that do not overlap."""
    room = text_tokens // length
    if room == 0:
        short = f"the text has {text_tokens} tokens, and a window needs {length}"
        raise UsageError(f"{short}; choose smaller --contexts or a longer text")
    count = min(windows, room)
    return [index * room // count * length for index in range(count)]


def _nll(loaded: LoadedModel, ids: torch.Tensor, cache: Any) -> float:
    """Negative log-likelihood of all tokens but the first, in nats, summed."""
    total = 0.0
    for start in range(0, ids.shape[1], CHUNK_TOKENS):
        logits = forward(loaded.model, ids[:, start : start + CHUNK_TOKENS], cache)
        targets = ids[0, start + 1 : start + CHUNK_TOKENS + 1]
        total += float(cross_entropy(logits[0, : len(targets)].double(), targets, reduction="sum"))
    return total
