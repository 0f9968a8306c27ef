"""What a launch of an attention kernel is asked, and how tensors are made ready for launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .tiles import Tile
from .variants import INTERPRETED, attend_constants, mask_kind

_INTERPRETED_PROCESSORS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Arguments of `launch.attend` that do not depend on how blocks are stored, as kernels take them.

    Attributes:
        query: `[batch, q_heads, q_tokens, head_dim]`, last dimension contiguous.
        table: int32 `[batch, columns]`.
        lengths: int32 `[batch]`.
        offsets: None, or int32 `[batch]`.
        start: First column attended.
        back: Columns at the end of each row that are left out.
        scale: Factor on q·k.
        mask: None, or what `mask_of` returns.
        mask_rows: The same.
        causal: As in `Attention`, as all that follow.
        window: See there.
        softcap: See there.
        sinks: See there.
        queries_are_last: See there.
    """

    query: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor | None
    start: int
    back: int
    scale: float
    mask: torch.Tensor | None
    mask_rows: bool
    causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    queries_are_last: bool

    def rules(self, kv_heads: int) -> dict[str, Any]:
        """Arguments that the functions for compile-time arguments share."""
        _, q_heads, q_tokens, _ = self.query.shape
        return {
            "device": self.query.device,
            "rows": q_tokens * (q_heads // kv_heads),
            "kv_heads": kv_heads,
            "group": q_heads // kv_heads,
            "causal": self.causal,
            "window": self.window is not None,
            "softcap": self.softcap is not None,
            "sinks": self.sinks is not None,
            "mask": mask_kind(self.mask),
            "mask_rows": self.mask_rows,
        }

    def constants(
        self, keys: torch.Tensor, values: torch.Tensor, block_size: int
    ) -> tuple[dict[str, Any], Tile]:
        """Of `attend_kernel`; the device must be the current one."""
        return attend_constants(
            dtype=keys.dtype,
            head_dim=keys.shape[3],
            v_head_dim=values.shape[3],
            block_size=block_size,
            k_stride_t=keys.stride(2),
            v_stride_t=values.stride(2),
            **self.rules(keys.shape[1]),
        )

    def programs(self, kv_heads: int, tile: Tile) -> int:
        """Programs without splits."""
        batch, q_heads, q_tokens, _ = self.query.shape
        return batch * kv_heads * -(-q_tokens * (q_heads // kv_heads) // tile.queries)

    def seen(self, tokens: int) -> int:
        """The most tokens of a row, out of so many, that are attended."""
        if self.window is None:
            return tokens - self.start
        return min(tokens - self.start, self.window + self.query.shape[2])

    def numbers(self, splits: int) -> tuple[Any, ...]:
        """Arguments at the end of all attention kernels, from the mask's strides on."""
        batch, q_heads, q_tokens, _ = self.query.shape
        return (
            *((0, 0, 0, 0) if self.mask is None else self.mask.stride()),
            q_tokens,
            splits,
            batch * q_heads * q_tokens,
            self.start,
            self.back,
            -q_tokens if self.queries_are_last else 0,
            self.window or 0,
            self.scale,
            self.softcap or 0.0,
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

    def rounded(self, out: torch.Tensor) -> torch.Tensor:
        """The output in the query's dtype."""
        return out.to(self.query.dtype) if INTERPRETED else out

    def scratch(self, splits: int, v_head_dim: int) -> torch.Tensor:
        """Memory for what splits leave: see `softmax.part_pointers`."""
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
