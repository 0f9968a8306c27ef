"""The run: a text is fed to the model in chunks, through every cache at once.

```
            chunk 0     chunk 1     chunk 2            the chunk itself attends as it is;
text      |===========|===========|===========|        what lies before it is read from the cache
reference   DynamicCache  ->  log-probabilities
schemes     each its own cache -> compared, chunk by chunk
```

All schemes go side by side, so that nothing of the size of text x vocabulary is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from eval.bench import workload
from eval.caches import CacheUnavailable
from eval.quality import offset
from eval.quality.schemes import Scheme
from eval.quality.score import Score, log_probabilities
from eval.quality.storage import Storage
from hf_paged_cache.host.compat import cache_argument


@dataclass
class Outcome:
    """What one scheme did.

    Attributes:
        scheme: which.
        score: against full precision.
        storage: what the cache held at the end.
        moved: layer -> format, where the guard changed it.
        backend: kernels of a paged cache.
        problem: why there are no numbers.
    """

    scheme: Scheme
    score: Score = field(default_factory=Score)
    storage: Storage | None = None
    moved: dict[int, str] = field(default_factory=dict)
    backend: str | None = None
    problem: str | None = None


@dataclass
class Comparison:
    """All schemes over one text.

    Attributes:
        reference: full precision against itself, for its perplexity.
        outcomes: one for each scheme, in their order.
        key_offset: whether keys were shifted.
    """

    reference: Score
    outcomes: list[Outcome]
    key_offset: bool


@dataclass
class _Run:
    outcome: Outcome
    cache: Any


def run(
    model: Any,
    ids: torch.Tensor,
    schemes: Sequence[Scheme],
    *,
    chunk: int,
    key_offset: bool = False,
    progress: Callable[[int], object] = lambda chunks: None,
) -> Comparison:
    """Feed the text through every scheme; the reference is a `DynamicCache`, never with an offset.

    Args:
        model: a causal language model.
        ids: `[rows, tokens]`.
        schemes: what to compare.
        chunk: tokens of each forward.
        key_offset: add a constant to two channels of all keys, see `eval.quality.offset`.
        progress: told after each chunk.
    """
    with torch.inference_mode(), _guard_is_silent():
        runs = [_start(model, scheme, key_offset) for scheme in schemes]
        reference_cache, reference_score = DynamicCache(config=model.config), Score()
        for start in range(0, ids.shape[1], chunk):
            part = ids[:, start : start + chunk]
            successors = ids[:, start + 1 : start + chunk + 1]
            logits = _logits("dynamic", model, reference_cache, part)
            reference = log_probabilities(logits)
            reference_score.add(logits, reference, successors)
            for each in runs:
                if each.outcome.problem is None:
                    _step(model, each, part, reference, successors)
            progress(1)
        for each in runs:
            if each.outcome.problem is None:
                _finish(model, each, ids.shape[0])
        workload.use("dynamic", model)
    return Comparison(reference_score, [each.outcome for each in runs], key_offset)


def _start(model: Any, scheme: Scheme, key_offset: bool) -> _Run:
    try:
        cache = scheme.create(model)
    except CacheUnavailable as reason:
        return _Run(Outcome(scheme, problem=str(reason)), None)
    if key_offset:
        offset.add_to_keys(cache)
    return _Run(Outcome(scheme), cache)


def _step(
    model: Any, run: _Run, part: torch.Tensor, reference: torch.Tensor, successors: torch.Tensor
) -> None:
    scheme = run.outcome.scheme
    try:
        logits = _logits(scheme.attention, model, run.cache, part)
    except Exception as error:
        if scheme.attention == "paged":
            raise  # our own fault, which a line in a table would hide
        run.outcome.problem = f"failed: {' '.join(str(error).split())[:160] or type(error).__name__}"
        return
    run.outcome.score.add(logits, reference, successors)


def _finish(model: Any, run: _Run, rows: int) -> None:
    run.outcome.storage = run.outcome.scheme.measure(run.cache, model, rows)
    if run.outcome.scheme.attention == "paged":
        stats = run.cache.stats()
        run.outcome.backend = stats.backend
        run.outcome.moved = {layer: stats.layer_dtypes[layer] for layer in stats.moved_layers}


def _logits(attention: str, model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    workload.use(attention, model)
    argument = {cache_argument(model): cache}
    logits: torch.Tensor = model(ids, use_cache=True, **argument).logits
    return logits


@contextmanager
def _guard_is_silent() -> Iterator[None]:
    """The table says which layers the guard moved; a warning for each would bury it."""
    logger = logging.getLogger("hf_paged_cache")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
