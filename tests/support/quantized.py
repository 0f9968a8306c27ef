"""Small quantized caches and what to put into them."""

from __future__ import annotations

from typing import Any

import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.formats import FORMATS
from tests.support.models import cache_kwarg

BLOCK = 16
NAMES = tuple(FORMATS)


def cache_of(model: Any, name: str, **options: Any) -> PagedCache:
    return PagedCache(model, kv_cache_dtype=name, **{"block_size": BLOCK, "group_size": 8} | options)


def ids(tokens: int, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def feed(model: Any, cache: PagedCache, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(tokens, **{cache_kwarg(): cache}).logits
    return out


def feed_beams(model: Any, cache: PagedCache) -> None:
    """Three rows that share what they began with, two of them also what came then."""
    feed(model, cache, ids(20, 1))
    cache.batch_repeat_interleave(3)
    feed(model, cache, ids(2, 3))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    feed(model, cache, ids(1, 3))


def states(tokens: int, rows: int = 1, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as the llama case's layers have them."""
    g = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(rows, 2, tokens, 16, generator=g) for _ in range(2))
    return keys, values


def update_all(cache: PagedCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    for layer_idx in range(len(cache.layers)):
        cache.update(keys, values, layer_idx)
