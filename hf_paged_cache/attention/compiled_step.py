"""A layer's part of a decode step that `torch.compile` traces.

No views here: tensors without storage cannot be traced. `update_static` returns dense K and V, as any
attention could want them, and remembers beside them where they came from. The attention of this package finds
that, reads the blocks, and leaves the dense tensors unused, so that the compiler drops what would have made
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.kernels.autocast import as_attended

if TYPE_CHECKING:
    from hf_paged_cache.forward.state import CacheState
    from hf_paged_cache.kernels.call import StaticBlocks
    from hf_paged_cache.store.static_group import StaticGroup

    from .attention_call import AttentionCall

# The layer that was updated last: dense K and V, the group that holds the blocks behind them, its index.
_last: list[tuple[torch.Tensor, torch.Tensor, StaticGroup, int]] = []


def update_static(
    state: CacheState, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new K and V `[batch, kv_heads, new tokens, head_dim]` of a layer; return all slots of all rows.

    They are `[batch, kv_heads, capacity, head_dim or v_head_dim]`, zeros where nothing is stored.
    CacheMismatchError if there are no rows, some layers were left behind, shape or dtype do not fit, or a
    gradient is wanted.
    """
    group = state.layer_groups.static_of(layer_idx) if state.rows.batch else None
    if group is None or layer_idx not in group.static_blocks:
        refuse(
            "the first forward of a PagedCache, or after a reset, opens its rows and cannot be compiled; "
            "call the model itself for it (`generate` does, unless `prefill_chunk_size` is given)"
        )
        raise AssertionError("refuse has raised")
    if state.has_open_step:
        refuse(
            "a forward was interrupted and left some layers behind; call the model itself once, which "
            "takes it back, or `cache.reset()`"
        )
    blocks = group.static_blocks[layer_idx]
    _check(blocks, key_states, value_states)
    new_want_gradients = key_states.requires_grad or value_states.requires_grad
    if torch.is_grad_enabled() and (new_want_gradients or state.rows.gradients_from is not None):
        refuse(
            "a compiled step over a PagedCache has no backward; call it under `torch.no_grad()`, or without "
            "torch.compile"
        )
    if blocks.advances:
        blocks.lengths.add_(key_states.shape[2])
    ops = torch.ops.hf_paged_cache
    where = (blocks.keys, blocks.values, blocks.layer, blocks.table, blocks.lengths)
    ops.write(*where, key_states, value_states)
    keys, values = ops.gather(*where)
    values = _or_nan_where_full(values, blocks)
    if state.is_attended():  # what nobody asks for would leave the step as one more result of it
        _last.clear()
        _last.append((keys, values, group, layer_idx))
    return keys, values


def attend(call: AttentionCall) -> torch.Tensor | None:
    """Attention over the blocks behind a call's K and V, `[batch, q_tokens, q_heads, v_head_dim]`.

    None where there are none, where the kernel cannot answer, or where it would stand in for an eager
    function that was not vetted; then the dense tensors are right.
    """
    if not _last:
        return None
    keys, values, group, layer_idx = _last[0]
    _last.clear()
    if keys is not call.key or values is not call.value:
        return None
    mask = call.mask
    blocks, reader = group.static_blocks[layer_idx], group.readers.get(layer_idx)
    if reader is not None and reader.module() is not call.module:
        refuse(
            "the cached tokens were not computed by this model; make a new PagedCache for it, or call the "
            "model itself once, which looks at its weights"
        )
    if (
        (call.is_eager and layer_idx not in group.vetted)
        or call.kwargs.get("position_bias") is not None
        or call.kwargs.get("dropout")
        or not call.suits_kernels(blocks.keys.dtype, blocks.capacity_tokens)
    ):
        return None
    has_more = call.query.shape[2] > 1
    is_causal = mask is None and has_more
    window = group.window if mask is None or not has_more else None  # a mask says it for each query
    where = (blocks.keys, blocks.values, blocks.layer, blocks.table, blocks.lengths)
    out: torch.Tensor = torch.ops.hf_paged_cache.attend(
        as_attended(call.query), *where, call.scale, mask, is_causal, window, call.softcap, call.sinks
    )
    return _or_nan_where_full(out, blocks)


def _check(blocks: StaticBlocks, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    """Refuse K and V of other shapes or dtypes than the blocks hold."""
    rows, heads, new_tokens = blocks.table.shape[0], blocks.keys.shape[2], key_states.shape[2]
    fits = [
        states.shape == (rows, heads, new_tokens, held.shape[4]) and states.dtype == held.dtype
        for states, held in ((key_states, blocks.keys), (value_states, blocks.values))
    ]
    if not all(fits):
        refuse(
            f"the cache holds {rows} rows with {heads} kv heads, head_dim {blocks.keys.shape[4]} (K) and "
            f"{blocks.values.shape[4]} (V) in {blocks.keys.dtype}; got K {tuple(key_states.shape)} "
            f"{key_states.dtype} and V {tuple(value_states.shape)} {value_states.dtype}. `cache.reset()` for "
            "a new batch, or a new PagedCache for another model"
        )


def _or_nan_where_full(x: torch.Tensor, blocks: StaticBlocks) -> torch.Tensor:
    """Rows that are full drop new tokens: rather no answer than one without them. One layer is enough."""
    if not blocks.advances:
        return x
    full = blocks.lengths > blocks.capacity_tokens
    return torch.where(full[:, None, None, None], torch.nan, x)


# Raised while a step is traced, an error would only end the tracing.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is
def refuse(message: str) -> NoReturn:
    """Raise CacheMismatchError when the step that is being compiled runs."""
    raise CacheMismatchError(message)
