"""Paged attention on CPUs: C++ that reads keys and values straight from their blocks.

The library is compiled on first use (`build`) and called through `ctypes` with data pointers. It needs no
torch ABI and shares torch's OpenMP threads, of which it uses `torch.get_num_threads()`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass
from typing import Literal, overload

import torch

from hf_paged_cache.kernels.cpu import build
from hf_paged_cache.kernels.problem import Attention, LayerBlocks

MAX_BLOCK_SIZE = 256
"""Tokens per block that the kernel has room for."""

_ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MASK_TYPES = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}

# The records of abi.h and copy.cpp, field by field.
_BLOCKS = struct.Struct("=3q 1q 3q 3q 6q 1q")
_CALL = struct.Struct("=1q 3q 2q 2q 2q 2d 1q 3q 2q 4q 1q")
_NEW_TOKENS = struct.Struct("=2q 3q 3q 3q")

_BLOCK_OUT_OF_RANGE = 1
_OUT_OF_MEMORY = 2

_load_lock = threading.Lock()
_loaded: build.Library | str | None = None


@dataclass(slots=True, eq=False, frozen=True)
class _Native:
    """`LayerBlocks` as the library takes it; holds good until a tensor of it is replaced."""

    record: bytes
    shape: tuple[int, int, int]  # batch, head_dim, kv_heads
    v_head_dim: int
    capacity_tokens: int
    dtype: torch.dtype


def _load() -> build.Library | str:
    """The loaded library, or the sentence that says why there is none. Decided once per process."""
    global _loaded
    with _load_lock:
        if _loaded is None:
            try:
                library = build.load()
            except (build.BuildError, OSError) as error:
                _loaded = str(error)
            else:
                _declare(library.handle)
                _loaded = library
        return _loaded


def _declare(handle: ctypes.CDLL) -> None:
    integer = ctypes.c_int64
    handle.paged_decode.argtypes = handle.paged_write.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    handle.paged_copy_blocks.argtypes = [integer, integer, ctypes.c_void_p, ctypes.c_void_p, integer, integer]
    handle.paged_copy_blocks.restype = None
    handle.paged_scratch_bytes.restype = integer


def _handle() -> ctypes.CDLL:
    loaded = _loaded if type(_loaded) is build.Library else _load()
    if isinstance(loaded, str):
        raise AssertionError(f"the C++ kernel was called although it is unavailable: {loaded}")
    return loaded.handle


def unavailable_reason() -> str | None:
    """None when the kernel runs here, otherwise a sentence. The first call compiles, for some seconds."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def isa() -> str:
    """The instruction set that the kernel was compiled for: `avx512`, `avx2` or `portable`."""
    loaded = _load()
    if isinstance(loaded, str):
        raise AssertionError(f"the C++ kernel has no instruction set because it is unavailable: {loaded}")
    return loaded.isa


def scratch_bytes() -> int:
    """Bytes of working memory that the kernel keeps between calls, over all calling threads."""
    return int(_handle().paged_scratch_bytes()) if isinstance(_loaded, build.Library) else 0


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """None when the kernel can serve these blocks, otherwise a sentence. Compiles nothing."""
    if type(blocks.native) is _Native:
        return None
    if blocks.records is not None:
        return "The C++ kernel does not read records."
    keys, values, table = blocks.keys, blocks.values, blocks.table
    for name, tensor in (("keys", keys), ("values", values), ("table", table)):
        if tensor.device.type != "cpu":
            return f"The C++ kernel reads CPU memory; {name} are on {tensor.device}."
    if keys.dtype not in _ELEMENT_TYPES or values.dtype != keys.dtype:
        return (
            f"The C++ kernel takes float32, bfloat16 or float16 blocks, not {keys.dtype} and {values.dtype}."
        )
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        return "The C++ kernel takes blocks whose rows of head_dim elements are contiguous."
    if blocks.block_size > MAX_BLOCK_SIZE:
        return f"The C++ kernel takes blocks of up to {MAX_BLOCK_SIZE} tokens, not {blocks.block_size}."
    if table.dtype != torch.int32 or not table.is_contiguous():
        return (
            f"The C++ kernel takes a contiguous int32 table, not {table.dtype} with strides {table.stride()}."
        )
    return None


def _prepare(blocks: LayerBlocks) -> _Native:
    if reason := unsupported_reason(blocks):
        raise AssertionError(f"the C++ kernel was given blocks that it does not support: {reason}")
    keys, values, table = blocks.keys, blocks.values, blocks.table
    num_blocks, kv_heads, block_size, head_dim = keys.shape
    batch, max_blocks = table.shape
    if values.shape[:3] != keys.shape[:3]:
        raise AssertionError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of the same blocks"
        )
    record = _BLOCKS.pack(
        *(keys.data_ptr(), values.data_ptr(), table.data_ptr(), num_blocks),
        *(*keys.stride()[:3], *values.stride()[:3]),
        *(batch, max_blocks, kv_heads, block_size, head_dim, values.shape[3], _ELEMENT_TYPES[keys.dtype]),
    )
    shape = (batch, head_dim, kv_heads)
    native = _Native(record, shape, values.shape[3], max_blocks * block_size, keys.dtype)
    blocks.native = native
    return native


def _check(status: int) -> None:
    if status == _BLOCK_OUT_OF_RANGE:
        raise AssertionError("the block table names a block outside the pool")
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the working space of paged attention")


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """Store new tokens at positions `start`, `start + 1`, … of every row. Tokens of null blocks are dropped.

    Args:
        blocks: Where to.
        key_states: `[batch, kv_heads, tokens, head_dim]`, dtype of the blocks.
        value_states: `[batch, kv_heads, tokens, v_head_dim]`.
        start: Position of the first token.
    """
    native = blocks.native
    if type(native) is not _Native:
        native = _prepare(blocks)
    batch, kv_heads, tokens, head_dim = key_states.shape
    if (
        (batch, head_dim, kv_heads) != native.shape
        or value_states.shape != (batch, kv_heads, tokens, native.v_head_dim)
        or key_states.dtype is not native.dtype
        or value_states.dtype is not native.dtype
        or not 0 <= start <= start + tokens <= native.capacity_tokens
    ):
        raise AssertionError(
            f"keys {tuple(key_states.shape)} {key_states.dtype} and values {tuple(value_states.shape)} "
            f"{value_states.dtype} from position {start} do not fit blocks of [batch, head_dim, kv_heads] "
            f"{native.shape}, v_head_dim {native.v_head_dim}, {native.dtype}, "
            f"for {native.capacity_tokens} tokens"
        )
    key_batch, key_head, key_token, key_element = key_states.stride()
    value_batch, value_head, value_token, value_element = value_states.stride()
    if key_element != 1 or value_element != 1:
        return write(blocks, key_states.contiguous(), value_states.contiguous(), start)
    fresh = _NEW_TOKENS.pack(
        *(key_states.data_ptr(), value_states.data_ptr()),
        *(key_batch, key_head, key_token, value_batch, value_head, value_token),
        *(tokens, start, torch.get_num_threads()),
    )
    _check(_handle().paged_write(native.record, fresh))


@overload
def decode(blocks: LayerBlocks, a: Attention, *, return_lse: Literal[False] = False) -> torch.Tensor: ...
@overload
def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: Literal[True]
) -> tuple[torch.Tensor, torch.Tensor]: ...


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend stored tokens. Fastest for few query tokens, right for any number.

    Args:
        blocks: The stored tokens; not modified.
        a: The question.
        return_lse: Also return the log of the softmax's denominator, to merge it with other parts'.

    Returns:
        `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, dtype of the query. With `return_lse` also
        float32 `[batch, q_heads, q_tokens]`: natural log, sink included, -inf where there is neither a
        visible token nor a sink.
    """
    native = blocks.native
    if type(native) is not _Native:
        native = _prepare(blocks)
    query = a.query
    batch, q_heads, q_tokens, head_dim = query.shape
    if (
        (batch, head_dim) != native.shape[:2]
        or q_heads % native.shape[2] != 0
        or query.dtype is not native.dtype
        or not 0 <= a.start <= a.end <= native.capacity_tokens
    ):
        raise AssertionError(
            f"query {tuple(query.shape)} {query.dtype} over tokens [{a.start}, {a.end}) does not fit blocks "
            f"of [batch, head_dim, kv_heads] {native.shape}, {native.dtype}, "
            f"for {native.capacity_tokens} tokens"
        )
    query_batch, query_head, query_token, query_element = query.stride()
    if query_element != 1:
        query = query.contiguous()
        query_batch, query_head, query_token, query_element = query.stride()
    out = torch.empty((batch, q_tokens, q_heads, native.v_head_dim), dtype=native.dtype)
    lse = torch.empty((batch, q_heads, q_tokens), dtype=torch.float32) if return_lse else None
    sinks = None if a.sinks is None else a.sinks.to("cpu", torch.float32).contiguous()
    mask = None if a.mask is None else _expand_mask(a.mask, (batch, q_heads, q_tokens, a.end - a.start))
    call = _CALL.pack(
        *(query.data_ptr(), query_batch, query_head, query_token, q_heads, q_tokens),
        *(out.data_ptr(), 0 if lse is None else lse.data_ptr(), a.start, a.end, a.scale, a.softcap or 0.0),
        *(0 if sinks is None else sinks.data_ptr(), a.window or 0, a.causal),
        a.end - q_tokens if a.queries_are_last else a.end,
        *((0, 0, 0, 0, 0, 0) if mask is None else (mask.data_ptr(), _MASK_TYPES[mask.dtype], *mask.stride())),
        torch.get_num_threads(),
    )
    _check(_handle().paged_decode(native.record, call))
    return out if lse is None else (out, lse)


def _expand_mask(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    if mask.dtype not in _MASK_TYPES:
        if not mask.is_floating_point():
            raise AssertionError(f"an attention mask is boolean or floating, not {mask.dtype}")
        mask = mask.to(torch.float32)
    return mask.expand(shape)


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """Copy whole blocks inside a pool: `pool[dst[i]] = pool[src[i]]`, all sources being read first.

    Args:
        pool: `[num_blocks, ...]`, contiguous, on the CPU, any dtype.
        src: Blocks to copy from.
        dst: As many distinct blocks to copy to.
    """
    count = len(src)
    num_blocks = pool.shape[0]
    if len(dst) != count or not pool.is_contiguous():
        raise AssertionError(
            f"{count} blocks cannot be copied to {len(dst)} of a pool with strides {pool.stride()}"
        )
    if count == 0:
        return
    if min(*src, *dst) < 0 or max(*src, *dst) >= num_blocks:
        raise AssertionError(f"blocks to copy lie outside the pool of {num_blocks}")
    if not set(dst).isdisjoint(src):
        pool[dst] = pool[src]
        return
    source, target = (ctypes.c_int64 * count)(*src), (ctypes.c_int64 * count)(*dst)
    block_bytes = pool.stride(0) * pool.element_size()
    _handle().paged_copy_blocks(pool.data_ptr(), block_bytes, source, target, count, torch.get_num_threads())
