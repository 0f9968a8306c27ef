"""What a cache of any class holds. Only looks: nothing is settled, and no device is waited for on purpose."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.host.lazy_tensor import plain_tensors

_TOKENS_DIM = -2


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a cache holds.

    Attributes:
        tokens: Of every row; 0 where a cache does not count them.
        used_bytes: Of what holds tokens.
        allocated_bytes: Of what is set aside for them.
        used_blocks: Blocks that hold tokens; None without blocks.
    """

    tokens: int
    used_bytes: int
    allocated_bytes: int
    used_blocks: int | None


def holdings_of(cache: Cache) -> Holdings:
    """What a cache holds; of a pair for an encoder-decoder both, with the tokens of the decoder."""
    if isinstance(cache, EncoderDecoderCache):
        decoder, cross = (
            holdings_of(part) for part in (cache.self_attention_cache, cache.cross_attention_cache)
        )
        blocks = [part.used_blocks for part in (decoder, cross) if part.used_blocks is not None]
        return Holdings(
            decoder.tokens,
            decoder.used_bytes + cross.used_bytes,
            decoder.allocated_bytes + cross.allocated_bytes,
            sum(blocks) if blocks else None,
        )
    return _of_paged(cache) if isinstance(cache, PagedCache) else _of_stock(cache)


def _of_paged(cache: PagedCache) -> Holdings:
    groups, outside = cache._state.groups, cache._hosts.nbytes
    return Holdings(
        cache._num_tokens,
        sum(group.used_bytes for group in groups) + outside,
        sum(group.pool_bytes for group in groups) + outside,
        sum(group.manager.pool.num_referenced for group in groups),
    )


def _of_stock(cache: Cache) -> Holdings:
    tokens = used = 0
    storages: dict[tuple[torch.device, int], int] = {}
    # A cache of recurrent states alone does not count tokens.
    with contextlib.suppress(ValueError):
        tokens = int(cache.get_seq_length())
    for layer in cache.layers:
        filled = _filled_tokens(layer)
        for name, value in vars(layer).items():
            for tensor in plain_tensors(value):
                storage = tensor.untyped_storage()
                storages[tensor.device, storage.data_ptr()] = storage.nbytes()
                has_room = name in ("keys", "values") and tensor.dim() > 2
                length = tensor.shape[_TOKENS_DIM] if has_room else 0
                used += tensor.nbytes * min(filled, length) // length if length else tensor.nbytes
    return Holdings(tokens, used, sum(storages.values()), None)


def _filled_tokens(layer: Any) -> int:
    """Tokens per row that the tensors of a layer hold, which may have room for more."""
    count = getattr(layer, "get_seq_length", None)
    return 0 if count is None else int(count())
