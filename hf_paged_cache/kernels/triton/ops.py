"""The kernels of a decode step as operators of torch, for steps that `torch.compile` traces.

Each is one opaque call there. Steps that are not traced launch kernels without this detour.

They take whole pools, `[num_blocks, layers, kv_heads, block_size, head_dim]`, and a layer's place in them.
Slices of a pool would reach the compiler as inputs that share memory and are written to, which it answers
with copies. Tables and lengths are those of `StaticBlocks`, all else is as in `Backend`.
"""

# No `from __future__ import annotations` here: the schemas are read from the annotations.
from typing import Any

import torch

from hf_paged_cache.kernels.call import Attention, LayerBlocks

from . import launch


@torch.library.custom_op("hf_paged_cache::write", mutates_args=("keys", "values"))
def write(
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Store new tokens at the end of every row of one layer; `lengths` count them already."""
    launch.write(LayerBlocks(keys[:, layer], values[:, layer], table), lengths, new_keys, new_values)


@write.register_fake
def _(*arguments: Any) -> None:
    return None


@torch.library.custom_op("hf_paged_cache::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend all stored tokens of every row of one layer; the queries are the newest of them.

    The mask is over `columns * block_size` tokens, as many as the table has room for.
    """
    tokens = table.shape[1] * keys.shape[3]
    a = Attention(query, 0, tokens, scale, mask, causal, window, softcap, sinks)
    out, _ = launch.attend(LayerBlocks(keys[:, layer], values[:, layer], table), a, lengths)
    return out


@attend.register_fake
def _(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *rest: Any) -> torch.Tensor:
    batch, q_heads, q_tokens, _ = query.shape
    return query.new_empty(batch, q_tokens, q_heads, values.shape[4])


@torch.library.custom_op("hf_paged_cache::gather", mutates_args=())
def gather(
    keys: torch.Tensor, values: torch.Tensor, layer: int, table: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All slots of every row of one layer, as `dispatch.gather`; zeros where nothing is stored."""
    tokens = table.shape[1] * keys.shape[3]
    stored = torch.arange(tokens, device=table.device) < lengths[:, None]
    stored &= (table >= 0).repeat_interleave(keys.shape[3], dim=1)
    dense_keys, dense_values = (
        pool[:, layer][table.clamp(min=0).long()]
        .transpose(1, 2)
        .flatten(2, 3)
        .masked_fill(~stored[:, None, :, None], 0.0)
        .contiguous()
        for pool in (keys, values)
    )
    return dense_keys, dense_values


@gather.register_fake
def _(
    keys: torch.Tensor, values: torch.Tensor, layer: int, table: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, kv_heads, block_size, head_dim = keys.shape
    dense_keys = keys.new_empty(table.shape[0], kv_heads, table.shape[1] * block_size, head_dim)
    return dense_keys, dense_keys.new_empty(*dense_keys.shape[:3], values.shape[4])
