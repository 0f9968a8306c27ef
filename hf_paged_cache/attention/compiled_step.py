"""What a layer does in a decode step that `torch.compile` traces.

No views here: tensors without storage cannot be traced. `update` returns dense K and V, as any attention
could want them, and remembers beside them where they came from. The attention of this package finds that,
reads the blocks, and leaves the dense tensors unused, so that the compiler drops what would have made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.kernels.autocast import as_attended
from hf_paged_cache.kernels.call import StaticBlocks
from hf_paged_cache.store.static_group import Reader


@dataclass(slots=True, eq=False)
class _Updated:
    """The layer that was updated last: its dense K and V, and the blocks behind them."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: StaticBlocks
    window: int | None
    is_vetted: bool
    reader: Reader | None


_last: list[_Updated] = []


def update(
    blocks: StaticBlocks,
    window: int | None,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    *,
    remember: bool,
    is_vetted: bool,
    reader: Reader | None,
    wants_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write new K and V; return all slots of all rows.

    Args:
        blocks: The layer's.
        window: Tokens a query sees, or None for all.
        key_states: `[batch, kv_heads, new tokens, head_dim]`.
        value_states: `[batch, kv_heads, new tokens, v_head_dim]`.
        remember: Whether attention of this package follows. What is never asked for would leave the step as
            one more result of it.
        is_vetted: Whether the kernel was seen to compute what the model's eager function does.
        reader: The module whose attention has read what is stored; None if none has.
        wants_gradients: Whether stored tokens wanted a gradient when they came.

    Returns:
        K `[batch, kv_heads, capacity, head_dim]` and V, zeros where nothing is stored.

    Raises:
        CacheMismatchError: Shape or dtype do not fit what the cache holds, or a gradient is wanted.
    """
    ops = torch.ops.hf_paged_cache
    rows, (_, _, heads, _, head_dim), v_head_dim = (
        blocks.table.shape[0],
        blocks.keys.shape,
        blocks.values.shape[4],
    )
    if (
        key_states.shape != (rows, heads, key_states.shape[2], head_dim)
        or value_states.shape != (rows, heads, key_states.shape[2], v_head_dim)
        or key_states.dtype != blocks.keys.dtype
        or value_states.dtype != blocks.keys.dtype
    ):
        refuse(
            f"the cache holds {rows} rows with {heads} kv heads, head_dim {head_dim} (K) and {v_head_dim} "
            f"(V) in {blocks.keys.dtype}; got K {tuple(key_states.shape)} {key_states.dtype} and V "
            f"{tuple(value_states.shape)} {value_states.dtype}. `cache.reset()` for a new batch, or a new "
            "PagedCache for another model"
        )
    wants_gradients = wants_gradients or key_states.requires_grad or value_states.requires_grad
    if wants_gradients and torch.is_grad_enabled():
        refuse(
            "a compiled step over a PagedCache has no backward; call it under `torch.no_grad()`, or without "
            "torch.compile"
        )
    if blocks.advances:
        blocks.lengths.add_(key_states.shape[2])
    ops.write(
        blocks.keys, blocks.values, blocks.layer, blocks.table, blocks.lengths, key_states, value_states
    )
    keys, values = ops.gather(blocks.keys, blocks.values, blocks.layer, blocks.table, blocks.lengths)
    values = _or_nan_where_full(values, blocks)
    if remember:
        _last.clear()
        _last.append(_Updated(keys, values, blocks, window, is_vetted, reader))
    return keys, values


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    *,
    is_eager: bool,
) -> torch.Tensor | None:
    """Attention over the blocks behind `key` and `value`, `[batch, q_tokens, q_heads, v_head_dim]`.

    None where there are none, where the kernel cannot answer, or where it would stand in for an eager
    function that was not vetted; then the dense tensors are right.
    """
    if not _last:
        return None
    updated = _last[0]
    _last.clear()
    if updated.keys is not key or updated.values is not value:
        return None
    if updated.reader is not None and updated.reader.module() is not module:
        refuse(
            "the cached tokens were not computed by this model; make a new PagedCache for it, or call the "
            "model itself once, which looks at its weights"
        )
    blocks = updated.blocks
    if is_eager and not updated.is_vetted:
        return None
    query = as_attended(query)
    if query.dtype != blocks.keys.dtype or not _is_servable(mask, blocks, kwargs):
        return None
    scale, q_tokens = kwargs.get("scaling"), query.shape[2]
    out: torch.Tensor = torch.ops.hf_paged_cache.attend(
        query,
        blocks.keys,
        blocks.values,
        blocks.layer,
        blocks.table,
        blocks.lengths,
        query.shape[3] ** -0.5 if scale is None else scale,
        mask,
        mask is None and q_tokens > 1,
        updated.window if mask is None or q_tokens == 1 else None,  # a mask says it for each query
        kwargs.get("softcap") if is_eager else None,  # the host's sdpa knows neither
        kwargs.get("s_aux") if is_eager else None,
    )
    return _or_nan_where_full(out, blocks)


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


def _is_servable(mask: torch.Tensor | None, blocks: StaticBlocks, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("position_bias") is not None or kwargs.get("dropout"):
        return False
    return mask is None or (mask.dim() == 4 and mask.shape[3] == blocks.capacity_tokens)
