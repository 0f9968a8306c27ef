"""The run: a text is fed to the model in chunks, through every cache at once.

```
            chunk 0     chunk 1     chunk 2            the chunk itself attends as it is;
text      |===========|===========|===========|        what lies before it is read from the cache
reference   DynamicCache  ->  log-probabilities
schemes     each its own cache -> compared, chunk by chunk
```

All schemes go side by side, so that nothing of the size of text x vocabulary is kept.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from eval.caches import CacheUnavailable
from eval.core.statistics import kl_divergence, top1_agreement
from eval.quality.schemes import Scheme
from eval.quality.storage import Storage, measure
from eval.run.generate import forward
from hf_paged_cache import PagedCache, disable, enable

OFFSET = 60.0
"""Added to two channels of every key, as models with large key biases have it: `q·(k + c) = q·k + q·c`, whose
second term is the same for all keys of a query, so no softmax sees it. Storing keys in few bits does."""


@dataclass
class Score:
    """Sums over the tokens that were compared."""

    divergence: float = 0.0  # KL(full precision || scheme) in nats
    agreed: int = 0  # tokens whose most likely successor is the same
    tokens: int = 0
    surprise: float = 0.0  # negative log-likelihood of the true successors, in nats
    predicted: int = 0  # successors

    def add(self, logits: torch.Tensor, reference: torch.Tensor, successors: torch.Tensor) -> None:
        """Count one chunk: logits `[rows, tokens, vocabulary]`, the same in full precision, next ids."""
        self.divergence += float(kl_divergence(logits, reference).sum())
        self.agreed += int(top1_agreement(logits, reference).sum())
        self.tokens += logits.shape[0] * logits.shape[1]
        log_p = logits[:, : successors.shape[1]].double().log_softmax(-1)
        self.surprise -= float(log_p.gather(-1, successors.unsqueeze(-1)).sum())
        self.predicted += successors.numel()

    @property
    def kl_nats(self) -> float:
        """Mean KL divergence per token."""
        return self.divergence / self.tokens

    @property
    def top1_percent(self) -> float:
        """Share of tokens with the same most likely successor."""
        return 100 * self.agreed / self.tokens

    @property
    def perplexity(self) -> float:
        """Of the true successors; infinite beyond the range of floats."""
        try:
            return math.exp(self.surprise / self.predicted)
        except OverflowError:
            return math.inf


@dataclass
class Outcome:
    """What one scheme did."""

    scheme: Scheme  # which
    score: Score = field(default_factory=Score)  # against full precision
    storage: Storage | None = None  # what the cache held at the end
    moved: dict[int, str] = field(default_factory=dict)  # layer -> format, where the guard changed it
    backend: str | None = None  # kernels of a paged cache
    problem: str | None = None  # why there are no numbers


@dataclass
class Comparison:
    """All schemes over one text, with or without the offset."""

    reference: Score  # full precision against itself, for its perplexity
    outcomes: list[Outcome]
    key_offset: bool


def run(
    model: Any,
    ids: torch.Tensor,
    schemes: Sequence[Scheme],
    *,
    chunk: int,
    key_offset: bool = False,
    progress: Callable[[int], object] = lambda chunks: None,
) -> Comparison:
    """Feed `ids` `[rows, tokens]` through every scheme, `chunk` tokens of each row at a time.

    The reference is a `DynamicCache`, never with the offset. `progress` is told of each chunk.
    """
    logger = logging.getLogger("hf_paged_cache")
    with torch.inference_mode(), ExitStack() as stack:
        # The table says which layers the guard moved; a warning for each would bury it.
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        runs = [(outcome := Outcome(scheme), _create(model, outcome, key_offset)) for scheme in schemes]
        reference_cache, reference_score = DynamicCache(config=model.config), Score()
        for start in range(0, ids.shape[1], chunk):
            part, successors = ids[:, start : start + chunk], ids[:, start + 1 : start + chunk + 1]
            reference = _logits(model, reference_cache, part)
            reference_score.add(reference, reference, successors)
            for outcome, cache in runs:
                if outcome.problem is None and (logits := _attempt(model, outcome, cache, part)) is not None:
                    outcome.score.add(logits, reference, successors)
            progress(1)
        for outcome, cache in runs:
            if outcome.problem is None:
                outcome.storage = measure(cache, model, ids.shape[0])
                if isinstance(cache, PagedCache):
                    stats = cache.stats()
                    outcome.backend = stats.backend
                    outcome.moved = {layer: stats.layer_dtypes[layer] for layer in stats.moved_layers}
        disable(model)
    return Comparison(reference_score, [outcome for outcome, _ in runs], key_offset)


def _create(model: Any, outcome: Outcome, key_offset: bool) -> Any:
    try:
        cache = outcome.scheme.create(model)
    except CacheUnavailable as reason:
        outcome.problem = str(reason)
        return None
    if key_offset:
        add_to_keys(cache)
    return cache


def _attempt(model: Any, outcome: Outcome, cache: Any, ids: torch.Tensor) -> torch.Tensor | None:
    try:
        return _logits(model, cache, ids)
    except Exception as error:
        if isinstance(cache, PagedCache):
            raise  # our own fault, which a line in a table would hide
        outcome.problem = f"failed: {' '.join(str(error).split())[:160] or type(error).__name__}"
        return None


def _logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    (enable if isinstance(cache, PagedCache) else disable)(model)
    return forward(model, ids, cache)


def channels(head_dim: int) -> tuple[int, int]:
    """The two channels that get the offset: the pair that rotary embeddings turn slowest, as in Llama.

    Only there does a bias of the key projection stay nearly constant from token to token.
    """
    return head_dim // 2 - 1, head_dim - 1


def add_to_keys(cache: Any) -> None:
    """Let every `update` of a cache of any class add `OFFSET` to the keys that it stores and returns."""
    update = cache.update

    def shifted(keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        keys = keys.clone()
        keys[..., channels(keys.shape[-1])] += OFFSET
        return update(keys, values, *args, **kwargs)

    cache.update = shifted
