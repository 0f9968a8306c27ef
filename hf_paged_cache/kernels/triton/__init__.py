"""Paged attention on GPUs: Triton kernels that read keys and values straight from their blocks.

A decode step launches `write_kernel` and `attend_kernel` for each layer, and `merge_kernel` where rows are
long and few enough to be split; `launch` has the whole table. None of them waits for the device: tables and
lengths are read there, and grids depend on the numbers of rows and heads and on the power of two above the
rows' length, so that a CUDA graph can replay a step.

One set of kernels serves plain and quantized pools: how K and V are stored is a pair of functions that they
are compiled for.

```
__init__ -> launch -> attend, move       kernels; decoders and encoders have the functions of each codec
               |
            variants -> tiles            what kernels are compiled for
```

With `TRITON_INTERPRET=1` in the environment before the first import of Triton the same kernels run on CPU
tensors, slowly; that is how they are tested on machines without a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks, on_device
from hf_paged_cache.kernels.torch.masking import additive
from hf_paged_cache.kernels.torch.partial_softmax import Partial, split_heads

from .tiles import MAX_HEAD_DIM

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

LOWEST_CAPABILITY = 8, 0  # of NVIDIA: the first with bfloat16 in its matrix units and copies past registers
# With matrix units and 512 registers a lane; on gfx11 and gfx12 every attention kernel spills.
AMD_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

decode_blocks = reference.decode_blocks


@cache
def unavailable_reason() -> str | None:
    """None if Triton can be imported, otherwise a sentence."""
    if importlib.util.find_spec("triton") is None:
        return (
            "Triton is not installed. Builds of torch for CUDA and ROCm bring theirs; elsewhere on Linux: "
            "`pip install 'hf-paged-cache[triton]'`."
        )
    try:
        _loaded("launch")
    except Exception as error:
        return f"Triton cannot be used: {error}"
    return None


@cache
def unusable_reason(device: torch.device) -> str | None:
    """None if kernels run on a device, otherwise a sentence. The first call compiles two small ones.

    What an architecture lacks shows in its kernels: below capability 8.0 they do not assemble, or spill
    kilobytes a thread. An OutOfMemoryError of torch says nothing of the device, and is raised.
    """
    if unavailable_reason() is not None or device.type != "cuda":
        return unavailable_reason()
    reason = _architecture_reason(device)
    if reason is not None:
        return reason
    try:
        reason = _loaded("probe").failure(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or a driver raises, another backend takes over
        text = str(error).strip().splitlines() or [type(error).__name__]
        return (
            f"A first kernel failed on {device}: {text[0]} Triton needs a C compiler and Python's headers "
            "(gcc and python3-dev), and a folder to write to; `python -m hf_paged_cache doctor` tries again."
        )
    return reason and f"The Triton kernels cannot be trusted on {device}: {reason}"


def _architecture_reason(device: torch.device) -> str | None:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = properties.gcnArchName.partition(":")[0]
        if name not in AMD_ARCHITECTURES:
            return f"The Triton kernels are made for {', '.join(AMD_ARCHITECTURES)}; {device} is {name}."
    elif (properties.major, properties.minor) < LOWEST_CAPABILITY:
        return (
            f"The Triton kernels need capability {'.'.join(map(str, LOWEST_CAPABILITY))} or above; {device} "
            f"({properties.name}) has {properties.major}.{properties.minor}."
        )
    return None


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None if the kernels can serve these blocks, otherwise a sentence. Compiles nothing."""
    if unavailable_reason() is not None:
        return unavailable_reason()
    keys, values = blocks.keys, blocks.values
    if keys.is_cpu and not _loaded("variants").INTERPRETED:
        return (
            "The Triton kernels take CPU tensors only in the interpreter: set TRITON_INTERPRET=1 before "
            "Python starts."
        )
    if keys.dtype not in DTYPES or values.dtype != keys.dtype:
        found = f"{keys.dtype} and {values.dtype}"
        return f"The Triton kernels take float32, bfloat16 or float16 blocks, not {found}."
    widest = max(keys.shape[3], values.shape[3])
    if widest > MAX_HEAD_DIM:
        return f"The Triton kernels take head dims up to {MAX_HEAD_DIM}, not {widest}."
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return "The Triton kernels take blocks whose rows of head_dim elements are contiguous."
    if keys.shape[2] < 16 or keys.shape[2] & (keys.shape[2] - 1):
        return f"The Triton kernels take blocks of 16, 32, 64, ... tokens, not {keys.shape[2]}."
    if blocks.records is not None and blocks.records.stride(2) != 1:
        return "The Triton kernels take records whose bytes are contiguous."
    return None if blocks.layout is None else _loaded("variants").unreadable_reason(blocks.layout)


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """As `Backend.write`, in one launch, or one for residual and one for whole blocks that are encoded."""
    end, layout = start + key_states.shape[2], blocks.layout
    if layout is None:
        _loaded("launch").write(blocks, _lengths(blocks, end), key_states, value_states)
        return
    if blocks.fault is None:
        reference.check_storable(blocks, key_states, value_states, start)
    dense = _dense_columns(blocks, start, end)
    if layout.format.is_per_token or dense:
        _loaded("launch").write(blocks, _lengths(blocks, end), key_states, value_states, dense=bool(dense))
    if layout.format.is_per_token:
        return
    if blocks.offsets is None:
        whole = set(range(-(-start // layout.block_size), end // layout.block_size))
        always = set.intersection(*map(set, dense)) if dense else set()
        partial = {start // layout.block_size, (end - 1) // layout.block_size} - whole - always
        name = layout.format.name
        assert not partial, f"{name} encodes full blocks, got some tokens of columns {sorted(partial)}"
        if whole <= always:
            return
    if end - start >= layout.block_size:
        _loaded("launch").encode(blocks, layout, key_states, value_states, start)


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `Backend.decode`."""
    held = blocks.lengths
    back = held.tokens - a.end if held is not None and held.tokens > a.end else 0
    out, lse = _loaded("launch").attend(
        blocks,
        a,
        _lengths(blocks, a.end + back),
        back=back,
        dense_columns=_dense_columns(blocks, a.start, a.end) if blocks.layout is not None else (),
    )
    return out, lse if return_lse else None


def attend_history(
    blocks: LayerBlocks, a: Attention, visible: torch.Tensor | None, bias: torch.Tensor | None
) -> Partial:
    """As `PrefillBackend.attend_history`."""
    out, lse = decode(blocks, replace(a, mask=_mask(visible, bias), sinks=None), return_lse=True)
    assert lse is not None, "it was asked for"
    return _partial(out, lse, blocks.keys.shape[1])


def attend_fresh(
    a: Attention,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor | None,
    bias: torch.Tensor | None,
    is_causal: bool,
) -> Partial:
    """As `PrefillBackend.attend_fresh`."""
    own = replace(
        a, start=0, end=keys.shape[2], mask=_mask(visible, bias), causal=is_causal, queries_are_last=True
    )
    out, lse = _loaded("launch").attend_dense(own, keys, values)
    return _partial(out, lse, keys.shape[1])


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """As `Backend.copy_blocks`."""
    assert len(src) == len(dst), f"{len(src)} blocks to read but {len(dst)} to overwrite"
    if not src:
        return
    if set(src).isdisjoint(dst):
        _loaded("launch").copy_blocks(pool, src, dst)
        return
    # Programs run in any order, so blocks that are both read and overwritten go through memory of their own.
    ids = on_device([src, dst], pool.device).long()
    pool[ids[1]] = pool[ids[0]]


def encode_blocks(
    layout: RecordFormat,
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    dense_ids: list[int],
    ids: list[int],
) -> None:
    """As `Backend.encode_blocks`."""
    assert len(dense_ids) == len(ids), f"{len(dense_ids)} blocks to read but {len(ids)} to overwrite"
    if dense_ids:
        sent = on_device([dense_ids, ids], records.device)
        _loaded("launch").seal(layout, records, keys, values, sent[0], sent[1])


def _dense_columns(blocks: LayerBlocks, start: int, end: int) -> tuple[tuple[int, ...], ...]:
    """The columns of `[start, end)` of residual blocks, of every row or once for all; empty if none is."""
    if not len(blocks.keys) or end <= start:
        return ()
    # A row that begins later has its last token before the batch's last, and its first before `start`.
    first = start // blocks.block_size if blocks.offsets is None else 0
    last = (end - 1) // blocks.block_size
    found = blocks.dense_columns
    if found is None:
        # What a row does not store is nothing in a residual block as well as in a record.
        is_dense = (blocks.table <= NULL_BLOCK) & (blocks.table < NULL_BLOCK).any(0)
        found = tuple(tuple(c for c, dense in enumerate(row) if dense) for row in is_dense.tolist())
    found = tuple(tuple(column for column in row if first <= column <= last) for row in found)
    return found if any(found) else ()


def _mask(visible: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor | None:
    return visible if bias is None else additive(visible, bias, torch.float32)


def _partial(out: torch.Tensor, lse: torch.Tensor, kv_heads: int) -> Partial:
    return Partial(split_heads(out.transpose(1, 2), kv_heads), split_heads(lse, kv_heads))


def _lengths(blocks: LayerBlocks, tokens: int) -> torch.Tensor:
    """int32 `[batch]`, all of them so many tokens; what the device holds where it says so."""
    if blocks.lengths is not None and blocks.lengths.tokens == tokens:
        return blocks.lengths.on_device
    return torch.full((blocks.table.shape[0],), tokens, dtype=torch.int32, device=blocks.table.device)


@cache
def _loaded(module: str) -> Any:
    # Importing Triton takes a while and fails where there is none, so this waits until a kernel is wanted.
    return import_module(f".{module}", __package__)
