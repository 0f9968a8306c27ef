"""Other kernels for the decode step of `BlockStack`. One that cannot run says why."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from eval.bench.layers.layer_stacks import BLOCK_SIZE, BlockStack
from eval.core.hardware import NEEDS_GPU, Skip

Step = Callable[[], object]


def step_of(name: str, stack: BlockStack) -> Step:
    """All layers once, over dense K and V of the same shape (FlashInfer: over the same blocks).

    Raises:
        Skip: it is not installed, or not for this device.
    """
    if name == "flashinfer":
        return _flashinfer(stack)
    case, query = stack.case, stack.query
    call: Callable[[torch.Tensor, torch.Tensor], object]
    if name == "sdpa":

        def call(keys: torch.Tensor, values: torch.Tensor) -> object:
            return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    elif name == "flash_attn":
        kernel: Any = _imported(name).flash_attn_with_kvcache
        swapped = query.transpose(1, 2).contiguous()

        def call(keys: torch.Tensor, values: torch.Tensor) -> object:
            return kernel(swapped, keys.transpose(1, 2), values.transpose(1, 2), cache_seqlens=case.tokens)

    else:
        if not case.device.is_gpu:
            raise Skip(NEEDS_GPU)
        from torch.nn.attention.flex_attention import flex_attention

        compiled: Any = torch.compile(flex_attention, dynamic=False)

        def call(keys: torch.Tensor, values: torch.Tensor) -> object:
            return compiled(query, keys, values, enable_gqa=True)

    size = (case.batch, case.shape.kv_heads, case.tokens, case.shape.head_dim)
    layers = [
        [torch.empty(size, dtype=case.dtype, device=case.device.torch_device).normal_() for _ in range(2)]
        for _ in range(stack.layers)
    ]

    def step() -> None:
        for keys, values in layers:
            call(keys, values)

    return step


def _flashinfer(stack: BlockStack) -> Step:
    library: Any = _imported("flashinfer")
    case, shape, table = stack.case, stack.case.shape, stack.blocks[0].table
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=table.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(case.batch + 1, dtype=torch.int32, device=table.device) * table.shape[1],
        table.flatten(),
        torch.full_like(table[:, 0], (case.tokens - 1) % BLOCK_SIZE + 1),
        shape.q_heads,
        shape.kv_heads,
        shape.head_dim,
        BLOCK_SIZE,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    query = stack.query[:, :, 0].contiguous()

    def step() -> None:
        for blocks in stack.blocks:
            wrapper.run(query, (blocks.keys, blocks.values))

    return step


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"not installed: {error}") from error
