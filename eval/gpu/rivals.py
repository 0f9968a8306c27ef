"""Section c: other kernels for the same decode step. A rival that cannot run says why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from eval.gpu.attention_setup import BLOCK_SIZE, DenseStack, PagedStack
from eval.gpu.device import NEEDS_GPU, Device
from eval.gpu.items import Skip


def sdpa(dense: DenseStack) -> Callable[[], object]:
    """SDPA of torch over dense K and V."""

    def step() -> None:
        for keys, values in dense.layers:
            scaled_dot_product_attention(dense.query, keys, values, enable_gqa=True)

    return step


def flash_attention(dense: DenseStack) -> Callable[[], object]:
    """`flash_attn` over dense K and V."""
    kernel: Any = _imported("flash_attn").flash_attn_with_kvcache
    query = dense.query.transpose(1, 2).contiguous()

    def step() -> None:
        for keys, values in dense.layers:
            kernel(query, keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=dense.case.tokens)

    return step


def flashinfer(paged: PagedStack, device: Device) -> Callable[[], object]:
    """FlashInfer's paged decode over the same blocks."""
    library: Any = _imported("flashinfer")
    case, shape = paged.case, paged.case.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device.torch_device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    columns = paged.blocks[0].table.shape[1]
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=device.torch_device) * columns,
        paged.blocks[0].table.flatten(),
        torch.full(
            (case.batch,), (case.tokens - 1) % BLOCK_SIZE + 1, dtype=torch.int32, device=device.torch_device
        ),
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        BLOCK_SIZE,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
    )
    query = paged.query[:, :, 0].contiguous()

    def step() -> None:
        for blocks in paged.blocks:
            wrapper.run(query, (blocks.keys, blocks.values))

    return step


def flex_attention(dense: DenseStack, device: Device) -> Callable[[], object]:
    """Flex attention of torch, compiled, over dense K and V."""
    if not device.is_gpu:
        raise Skip(NEEDS_GPU)
    from torch.nn.attention.flex_attention import flex_attention as kernel

    compiled: Any = torch.compile(kernel, dynamic=False)

    def step() -> None:
        for keys, values in dense.layers:
            compiled(dense.query, keys, values, enable_gqa=True)

    return step


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"not installed: {error}") from error
