"""An attention call as kernels take it, and how tensors are made ready for launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from .variants import INTERPRETED, Layout, Rules, attend_constants, mask_kind

if TYPE_CHECKING:
    from hf_paged_cache.kernels.call import Attention, LayerBlocks

    from .tiles import Tile

_INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What one call of `launch.attend` asks, the same for all launches that answer it.

    Attributes:
        blocks: Whose table and offsets are read.
        a: What is asked of them.
        query: Of `a`, last dimension contiguous.
        mask: None, or what `mask_of` returns.
        mask_rows: The same.
        lengths: int32 `[batch]`, columns of each row, those before it begins included.
        back: Columns at the end of each row that are left out.
    """

    blocks: LayerBlocks
    a: Attention
    query: torch.Tensor
    mask: torch.Tensor | None
    mask_rows: bool
    lengths: torch.Tensor
    back: int

    def constants(self, layout: Layout) -> tuple[dict[str, Any], Tile]:
        """Compile-time arguments of `attend_kernel`; the device must be the current one."""
        _, q_heads, q_tokens, _ = self.query.shape
        kv_heads = self.blocks.keys.shape[1]
        return attend_constants(
            device=self.query.device,
            dtype=self.query.dtype,
            layout=layout,
            queries=q_tokens * (q_heads // kv_heads),
            kv_heads=kv_heads,
            group=q_heads // kv_heads,
            rules=Rules(
                causal=self.a.causal,
                window=self.a.window is not None,
                softcap=self.a.softcap is not None,
                sinks=self.a.sinks is not None,
                mask=mask_kind(self.mask),
                mask_rows=self.mask_rows,
            ),
        )

    def programs(self, tile: Tile) -> int:
        """Programs without splits."""
        batch, q_heads, q_tokens, _ = self.query.shape
        kv_heads = self.blocks.keys.shape[1]
        return batch * kv_heads * -(-q_tokens * (q_heads // kv_heads) // tile.queries)

    @property
    def tokens_in_reach(self) -> int:
        """The most tokens of a row that are attended."""
        tokens = self.a.end - self.a.start
        return tokens if self.a.window is None else min(tokens, self.a.window + self.query.shape[2])

    def numbers(self, splits: int) -> tuple[Any, ...]:
        """Arguments at the end of those of `attend_kernel`, from the mask's strides on."""
        batch, q_heads, q_tokens, _ = self.query.shape
        return (
            *((0, 0, 0, 0) if self.mask is None else self.mask.stride()),
            q_tokens,
            splits,
            batch * q_heads * q_tokens,
            self.a.start,
            self.back,
            -q_tokens if self.a.queries_are_last else 0,
            self.a.window or 0,
            self.a.scale,
            self.a.softcap or 0.0,
        )

    @property
    def merge_grid(self) -> tuple[int, int]:
        """Programs of a merge."""
        return self.query.shape[1] * self.query.shape[2], self.query.shape[0]

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
        """Memory for what splits leave: see `softmax_steps.part_pointers`."""
        batch, q_heads, q_tokens, _ = self.query.shape
        rows = splits * batch * q_heads * q_tokens
        return self.query.new_empty(rows * (v_head_dim + 2), dtype=torch.float32)


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
