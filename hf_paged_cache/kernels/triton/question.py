"""An attention call as kernels take it, and how tensors are made ready for launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from .variants import INTERPRETED, Layout, Rules, attend_constants, mask_kind

if TYPE_CHECKING:
    from hf_paged_cache.kernels.call import Attention, LayerBlocks

_INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What one call of `launch.attend` asks, the same for all launches that answer it."""

    blocks: LayerBlocks  # whose table and offsets are read
    a: Attention
    query: torch.Tensor  # of `a`, last dimension contiguous
    mask: torch.Tensor | None  # what `mask_of` returns, as the next
    mask_rows: bool
    lengths: torch.Tensor  # int32 `[batch]`, columns of each row, those before it begins included
    back: int  # columns at the end of each row that are left out

    @property
    def rows(self) -> int:
        """Queries of all heads."""
        return prod(self.query.shape[:3])

    def constants(self, layout: Layout) -> tuple[dict[str, Any], int]:
        """Compile-time arguments of `attend_kernel` on the current device, and programs without splits."""
        batch, q_heads, q_tokens, _ = self.query.shape
        kv_heads, a = self.blocks.keys.shape[1], self.a
        group = q_heads // kv_heads
        rules = Rules(
            causal=a.causal,
            window=a.window is not None,
            softcap=a.softcap is not None,
            sinks=a.sinks is not None,
            mask=mask_kind(self.mask),
            mask_rows=self.mask_rows,
        )
        constants = attend_constants(
            device=self.query.device,
            dtype=self.query.dtype,
            layout=layout,
            queries=q_tokens * group,
            kv_heads=kv_heads,
            group=group,
            rules=rules,
        )
        return constants, batch * kv_heads * -(-q_tokens * group // constants["M"])

    def answers(self, v_head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the output and the log-sum-exp."""
        batch, q_heads, q_tokens, _ = self.query.shape
        # The interpreter cuts bfloat16 where a device rounds, so there torch rounds.
        dtype = torch.float32 if INTERPRETED else self.query.dtype
        return (
            self.query.new_empty(batch, q_tokens, q_heads, v_head_dim, dtype=dtype),
            self.query.new_empty(batch, q_heads, q_tokens, dtype=torch.float32),
        )

    def scratch(self, splits: int, v_head_dim: int) -> torch.Tensor:
        """Memory for what splits leave: see `attend._part_pointers`."""
        return self.query.new_empty(splits * self.rows * (v_head_dim + 2), dtype=torch.float32)


def mask_of(
    mask: torch.Tensor | None, batch: int, q_heads: int, q_tokens: int
) -> tuple[torch.Tensor | None, bool]:
    """The mask as the kernel reads it, and whether it differs between heads or queries."""
    if mask is None:
        return None, False
    mask = mask[(None,) * (4 - mask.dim())]
    differs = mask.shape[1] > 1 or mask.shape[2] > 1
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    elif mask.dtype == torch.float64:
        mask = mask.float()
    if mask.shape[3] == 1:
        mask = mask.expand(-1, -1, -1, 2)  # a stride of 0, as in other dims that are broadcast
    return mask.expand(batch, q_heads, q_tokens, -1), differs


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be the one that holds the blocks."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)
