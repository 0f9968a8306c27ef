"""Overwrites all memory of a cache in which no token lies, so that whoever reads it is found out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_paged_cache import PagedCache
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, dense_entry
from hf_paged_cache.store.layer_group import LayerGroup

GARBAGE_ID = 0x7FFFFFFF
"""In columns of tables that rows do not have."""


def poison(cache: PagedCache, *, too_many: int = 0) -> None:
    """Fill what is free with NaN, 0xFF bytes and ids of no block.

    That is: blocks and slots that no row holds, records of blocks that are kept dense, the rest of blocks
    that are filled in part (also by tokens that a step in progress has yet to write), columns past the end
    of tables, and the working memory of kernels.

    Args:
        cache: A cache, also in the middle of a forward.
        too_many: Newest tokens of every row that are overwritten too, to see that this shows.
    """
    state = cache._state
    for group in state.groups if state.rows.batch else ():
        for layer_idx in group.blocks:
            blocks = group.blocks[layer_idx]
            records, slots = _tokens_in(group, layer_idx, max(0, state.rows.tokens[layer_idx] - too_many))
            if blocks.records is None:
                slots = records
            else:
                _poison_records(blocks, records)
            for tensor in (blocks.keys, blocks.values):
                tensor.masked_fill_(
                    ~_mask(tensor.shape[0], blocks.block_size, slots)[:, None, :, None], torch.nan
                )
            for row, table in enumerate(group.manager.tables):
                blocks.table[row, len(table.ids) :] = GARBAGE_ID
            _poison_scratch(blocks)


def _tokens_in(group: LayerGroup, layer_idx: int, length: int) -> tuple[dict[int, int], dict[int, int]]:
    """How many tokens of a layer lie in each block of the pool, and in each slot."""
    blocks = group.blocks[layer_idx]
    records: dict[int, int] = {}
    slots: dict[int, int] = {}
    pool, size = group._pools[layer_idx], blocks.block_size
    for holder in group.store.holders:
        if not any(each.tensors is pool.tensors for each in holder.pools):
            continue
        is_own = holder is group.holder
        tokens = length if is_own else holder.manager.num_tokens
        for row, table in enumerate(holder.manager.tables):
            own = table.token_at(tokens)
            for column in range(-(-own // size)):
                entry, held = table.ids[column], min(size, own - column * size)
                if is_own:
                    entry = int(blocks.table[row, column])
                elif pool.layout is not None and column in table.dense:
                    continue
                if entry > NULL_BLOCK:
                    records[entry] = max(held, records.get(entry, 0))
                elif entry < NULL_BLOCK:
                    slots[dense_entry(entry)] = held
    return records, slots


def _mask(count: int, size: int, held: dict[int, int]) -> torch.Tensor:
    """Boolean `[count, size]`: where a token lies."""
    tokens = torch.zeros(count, dtype=torch.long)
    for index, number in held.items():
        tokens[index] = number
    return torch.arange(size) < tokens[:, None]


def _poison_records(blocks: LayerBlocks, held: dict[int, int]) -> None:
    records, layout = blocks.records, blocks.layout
    assert records is not None
    assert layout is not None
    is_held = _mask(records.shape[0], blocks.block_size, held)
    before = records.clone()
    records.fill_(0xFF)
    for side in ("keys", "values"):
        codes, params = layout.parts(records, side)
        old_codes, old_params = layout.parts(before, side)
        codes.copy_(torch.where(is_held[:, None, :, None], old_codes, codes))
        kept = is_held[:, 0].reshape(-1, *[1] * (params.dim() - 1))
        if layout.codec(side).is_per_token:
            kept = is_held[:, None, None, :, None]
        bits = params.view(torch.int16)
        bits.copy_(torch.where(kept, old_params.view(torch.int16), bits))


def _poison_scratch(blocks: LayerBlocks) -> None:
    """Let kernels compute with numbers that are none, so that their working memory is full of them."""
    kind = (2, *blocks.keys.shape[1:])
    nothing = LayerBlocks(
        blocks.keys.new_full(kind, torch.nan),
        blocks.values.new_full((*kind[:3], blocks.values.shape[3]), torch.nan),
        torch.arange(2, dtype=torch.int32)[None],
        records=None
        if blocks.records is None
        else blocks.records.new_full((2, *blocks.records.shape[1:]), 255),
        layout=blocks.layout,
    )
    query = blocks.keys.new_full((1, 4 * kind[1], 3, kind[3]), torch.nan)
    dispatch.decode(nothing, Attention(query, 0, 2 * blocks.block_size, 1.0), return_lse=True)


@contextmanager
def poisoned(model: Any, cache: PagedCache | None) -> Iterator[list[torch.Tensor]]:
    """Collect the logits of all forwards of a model; with a cache, poison it at every turn.

    Before and after a forward and before each of its layers; and new tensors are made full of NaN.
    """
    logits: list[torch.Tensor] = []

    def collect(module: Any, args: Any, output: Any) -> None:
        logits.append(output.logits.clone())
        before()

    def before(*_: Any) -> None:
        if cache is not None:
            poison(cache)

    handles = [model.register_forward_hook(collect), model.register_forward_pre_hook(before)]
    handles += [layer.register_forward_pre_hook(before) for layer in model.get_decoder().layers]
    torch.use_deterministic_algorithms(cache is not None, warn_only=True)  # this fills what `empty` returns
    try:
        yield logits
    finally:
        torch.use_deterministic_algorithms(False)
        for handle in handles:
            handle.remove()
