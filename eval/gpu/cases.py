"""Cases of the kernels' tests, loosely typed as they are, moved to the device and into large pools."""

import importlib
from typing import Any

import torch

from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROOM_FOR_THE_DRAW = 1.5  # right kernels were seen at 1.03 times the bound of the tests, with equal inputs


def shared(name: str) -> Any:
    """A module of the tests: `kernels.cases`, `kernels.quantized`, `kernels.prefills`, `support.models`."""
    return importlib.import_module(f"tests.{name}")


def tolerance(dtype: torch.dtype) -> float:
    """RMS ratio to allow: the tests' bound, with room for inputs that are drawn anew in each run."""
    allowed: float = shared("kernels.cases").TOLERANCE[dtype]
    return ROOM_FOR_THE_DRAW * allowed


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS ratio, infinite for an answer that holds NaN (JSON keeps it as such)."""
    if not got.isfinite().all():
        return float("inf")
    return float(shared("kernels.cases").rms_ratio(got, want))


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device with the same strides, the memory between them included."""
    base = x if x._base is None else x._base
    storage = torch.empty(0, dtype=x.dtype).set_(base.untyped_storage())
    copied: torch.Tensor = storage.to(device, copy=True)
    return copied.as_strided(x.shape, x.stride(), x.storage_offset())


def blocks_on(blocks: LayerBlocks, device: torch.device) -> LayerBlocks:
    """Copies of pool, table and records."""
    placed = LayerBlocks(moved(blocks.keys, device), moved(blocks.values, device), blocks.table.to(device))
    if blocks.records is not None:
        placed.records = moved(blocks.records, device)
        placed.layout, placed.dense_columns = blocks.layout, blocks.dense_columns
    return placed


def attention_on(attention: Any, device: torch.device) -> Attention:
    """The same question with its tensors on the device."""
    fields: dict[str, Any] = {name: getattr(attention, name) for name in Attention.__dataclass_fields__}
    tensors = {name: moved(x, device) for name, x in fields.items() if isinstance(x, torch.Tensor)}
    return Attention(**fields | tensors)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of a floating tensor, so that NaN equals NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def whole_pool(layer: torch.Tensor) -> torch.Tensor:
    """`[blocks, layers, kv_heads, block_size, head_dim]` of which `layer` is a slice, on any device."""
    (in_block, *strides), in_layer = layer.stride(), layer[0].numel()
    shape = (layer.shape[0], in_block // in_layer, *layer.shape[1:])
    start = layer.storage_offset() - layer.storage_offset() % in_block
    return layer.as_strided(shape, (in_block, in_layer, *strides), start)


def at_the_end_of(blocks: LayerBlocks, num_blocks: int) -> LayerBlocks:
    """The same layer with its blocks as the last of a pool of `num_blocks`, the others full of NaN."""
    shift = num_blocks - blocks.keys.shape[0]

    def enlarged(layer: torch.Tensor) -> torch.Tensor:
        small = whole_pool(layer)
        large = small.new_full((num_blocks, *small.shape[1:]), torch.nan)
        large[shift:] = small
        return large[:, layer.storage_offset() % layer.stride(0) // layer[0].numel()]

    table = torch.where(blocks.table == NULL_BLOCK, NULL_BLOCK, blocks.table + shift).to(torch.int32)
    return LayerBlocks(enlarged(blocks.keys), enlarged(blocks.values), table)
