"""The first kernels on a device: whether they compile, run and compute what they should."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import Attention, LayerBlocks

from . import launch

_BLOCK_SIZE, _HEADS, _DIM, _TOKENS = 16, 2, 16, 20
_TOLERANCE = 1e-2  # RMS ratio to the reference, which has the same bfloat16 to read


def failure(device: torch.device) -> str | None:
    """None if a write and an attention over two blocks give the reference's answer, otherwise a sentence.

    Compiles two small kernels, which Triton then finds in its folder, and waits for the device. Raises
    whatever Triton, its compilers or the device raise.
    """
    g = torch.Generator().manual_seed(0)
    keys, values, query = (
        torch.randn(1, _HEADS, tokens, _DIM, generator=g).bfloat16() for tokens in (_TOKENS, _TOKENS, 1)
    )
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    here, there = _blocks(table), _blocks(table.to(device))
    a = Attention(query, 0, _TOKENS, _DIM**-0.5)
    reference.write(here, keys, values, 0)
    want, _ = reference.decode(here, a, return_lse=True)
    lengths = torch.full((1,), _TOKENS, dtype=torch.int32, device=device)
    launch.write(there, lengths, keys.to(device), values.to(device))
    got, _ = launch.attend(there, replace(a, query=query.to(device)), lengths, splits=1)
    error = (got.float().cpu() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
    if not error <= _TOLERANCE:  # NaN is no answer either
        return f"a first attention there is off by {error:.1e} of what it should be."
    return None


def _blocks(table: torch.Tensor) -> LayerBlocks:
    keys, values = (
        torch.zeros(2, _HEADS, _BLOCK_SIZE, _DIM, dtype=torch.bfloat16, device=table.device) for _ in range(2)
    )
    return LayerBlocks(keys, values, table)
