"""Paged attention on CPUs: C++ that reads keys and values straight from their blocks, records included.

The library is compiled on first use (`build`) and called through `ctypes` with data pointers. It needs no
torch ABI and shares torch's OpenMP threads, of which it uses `torch.get_num_threads()`. The functions are
those of `backend.Backend`; pools are contiguous here.

```
structs.py     what is handed over, as in src/abi.h
build.py       src/ compiled, and kept by library_folder.py
src/base       vectors, elements in memory, working memory
src/storage    codes of a record, and tokens on their way into blocks and out of them
src/attend     decode.cpp: a call in splits > a layer's blocks > tiles, plain and of records
```
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.kernels.call import Attention, LayerBlocks
from hf_paged_cache.kernels.reference import unstorable

from . import build, structs

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat
    from hf_paged_cache.kernels.backend import ConvertBlocks

logger = logging.getLogger("hf_paged_cache")

# `Status` of abi.h.
_OUT_OF_MEMORY = 1
_BLOCK_OUT_OF_RANGE = 2
_PART_OF_A_BLOCK = 3
_UNSTORABLE = {4: "K", 5: "V"}

_ANY_LENGTH = 1 << 62

_pack_call = structs.packer(structs.Call)
_pack_tokens = structs.packer(structs.Tokens)

_load_lock = threading.Lock()
_loaded: build.Library | str | None = None


@dataclass(slots=True, eq=False, frozen=True)
class _Native:
    """`LayerBlocks` as the library takes it, good as long as the tensors are those of the blocks."""

    struct: bytes
    tensors: tuple[torch.Tensor | None, ...]  # that it points into: keys, values, table, records, offsets
    shape: tuple[int, int, int]  # batch, head_dim, kv_heads
    v_head_dim: int
    capacity_tokens: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return (
            f"blocks of [batch, head_dim, kv_heads] {self.shape}, v_head_dim {self.v_head_dim}, "
            f"{self.dtype}, for {self.capacity_tokens} tokens"
        )


def _load() -> build.Library | str:
    """The loaded library, or the sentence that says why there is none. Decided once per process."""
    global _loaded
    with _load_lock:
        if _loaded is None:
            try:
                library = build.load()
                _declare(library.handle)
            except (build.BuildError, OSError) as error:
                _loaded = str(error)
            else:
                if library.problems:
                    logger.warning(" ".join(library.problems))
                _loaded = library
        return _loaded


def _declare(handle: ctypes.CDLL) -> None:
    """Tell ctypes what the functions take; raises BuildError if those are other structs than ours."""
    integer, array, struct_bytes = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
    for struct in (structs.Blocks, structs.Call, structs.Tokens):
        function = getattr(handle, f"paged_bytes_of_{struct.__name__.lower()}")
        function.restype = integer
        if (there := function()) != (here := ctypes.sizeof(struct)):
            raise build.BuildError(
                f"The C++ kernel and its Python side do not fit: the struct {struct.__name__} has {there} "
                f"bytes in abi.h and {here} in structs.py. Install hf-paged-cache again: its files are of "
                "different versions."
            )
    for function in (handle.paged_decode, handle.paged_write, handle.paged_gather):
        function.argtypes = [struct_bytes, struct_bytes]
    handle.paged_convert_blocks.argtypes = [struct_bytes, array, array, integer, integer, integer]
    handle.paged_copy_blocks.argtypes = [ctypes.c_void_p, integer, array, array, integer, integer]
    handle.paged_scratch_bytes.restype = integer


def _library() -> build.Library:
    loaded = _loaded if type(_loaded) is build.Library else _load()
    if isinstance(loaded, str):
        raise AssertionError(f"the C++ kernel was called although it is unavailable: {loaded}")
    return loaded


def unavailable_reason() -> str | None:
    """As `Backend.unavailable_reason`. The first call compiles, for some seconds."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def isa() -> str:
    """The instruction set that the kernel was compiled for: `avx512`, `avx2` or `portable`."""
    return _library().isa


def scratch_bytes() -> int:
    """Bytes of working memory that is kept between calls, over all calling threads."""
    return int(_library().handle.paged_scratch_bytes()) if isinstance(_loaded, build.Library) else 0


def unsupported_reason(blocks: LayerBlocks) -> str | None:
    """As `Backend.unsupported_reason`."""
    return structs.unsupported_reason(blocks)


def _native(blocks: LayerBlocks) -> _Native:
    native = blocks.native
    if type(native) is _Native:
        keys, values, table, records, offsets = native.tensors
        if (
            keys is blocks.keys
            and values is blocks.values
            and table is blocks.table
            and records is blocks.records
            and offsets is blocks.offsets
        ):
            return native
    if reason := structs.unsupported_reason(blocks):
        raise AssertionError(f"the C++ kernel was given blocks that it does not support: {reason}")
    _, kv_heads, block_size, head_dim = blocks.keys.shape
    batch, max_blocks = blocks.table.shape
    blocks.native = native = _Native(
        structs.blocks_struct(blocks),
        (blocks.keys, blocks.values, blocks.table, blocks.records, blocks.offsets),
        (batch, head_dim, kv_heads),
        blocks.values.shape[3],
        # Rows that begin later reach further; the library looks at the table's width itself.
        max_blocks * block_size if blocks.offsets is None else _ANY_LENGTH,
        blocks.keys.dtype,
    )
    return native


def _fail(status: int) -> None:
    if status == _OUT_OF_MEMORY:
        raise MemoryError("no memory for the working space of paged attention")
    if status == _BLOCK_OUT_OF_RANGE:
        raise AssertionError("the block table names a block outside the pool")
    if status == _PART_OF_A_BLOCK:
        raise AssertionError("tokens of part of a block were written to a record that takes whole blocks")
    raise unstorable(_UNSTORABLE[status])


def write(blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> None:
    """As `Backend.write`."""
    native = _native(blocks)
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
            f"{value_states.dtype} from position {start} do not fit {native}"
        )
    key_strides, value_strides = key_states.stride(), value_states.stride()
    if key_strides[3] != 1 or value_strides[3] != 1:
        return write(blocks, key_states.contiguous(), value_states.contiguous(), start)
    keys, values = key_states.data_ptr(), value_states.data_ptr()
    counts = (tokens, start, torch.get_num_threads())
    fresh = _pack_tokens(keys, *key_strides[:3], values, *value_strides[:3], *counts)
    if status := _library().handle.paged_write(native.struct, fresh):
        _fail(status)


def decode(
    blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `Backend.decode`."""
    native = _native(blocks)
    query = a.query
    batch, q_heads, q_tokens, head_dim = query.shape
    if (
        (batch, head_dim) != native.shape[:2]
        or q_heads % native.shape[2] != 0
        or query.dtype is not native.dtype
        or not 0 <= a.start <= a.end <= native.capacity_tokens
    ):
        raise AssertionError(
            f"query {tuple(query.shape)} {query.dtype} over tokens [{a.start}, {a.end}) does not fit {native}"
        )
    if query.stride(3) != 1:
        query = query.contiguous()
    out = torch.empty((batch, q_tokens, q_heads, native.v_head_dim), dtype=native.dtype)
    lse = torch.empty((batch, q_heads, q_tokens), dtype=torch.float32) if return_lse else None
    sinks = None if a.sinks is None else a.sinks.to("cpu", torch.float32).contiguous()
    mask = None if a.mask is None else _expand_mask(a.mask, (batch, q_heads, q_tokens, a.end - a.start))
    call = _pack_call(
        *(query.data_ptr(), *query.stride()[:3], q_heads, q_tokens),
        *(out.data_ptr(), 0 if lse is None else lse.data_ptr(), a.start, a.end, a.scale, a.softcap or 0.0),
        *(0 if sinks is None else sinks.data_ptr(), a.window or 0, a.causal),
        a.end - q_tokens if a.queries_are_last else a.end,
        *((0,) * 6 if mask is None else (mask.data_ptr(), structs.ELEMENT_TYPES[mask.dtype], *mask.stride())),
        torch.get_num_threads(),
    )
    if status := _library().handle.paged_decode(native.struct, call):
        _fail(status)
    return out, lse


def gather(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dispatch.gather`, of a quantized layer."""
    native = _native(blocks)
    if blocks.records is None or not 0 <= start <= end <= native.capacity_tokens:
        raise AssertionError(f"tokens [{start}, {end}) of {native} cannot be gathered from records")
    batch, head_dim, kv_heads = native.shape
    # What stands before a row begins is not visited.
    new = torch.empty if blocks.offsets is None else torch.zeros
    keys = new((batch, kv_heads, end - start, head_dim), dtype=native.dtype)
    values = new((batch, kv_heads, end - start, native.v_head_dim), dtype=native.dtype)
    to_keys, to_values = ((x.data_ptr(), *x.stride()[:3]) for x in (keys, values))
    wanted = _pack_tokens(*to_keys, *to_values, end - start, start, torch.get_num_threads())
    if status := _library().handle.paged_gather(native.struct, wanted):
        _fail(status)
    return keys, values


def _conversion(*, seals: bool) -> ConvertBlocks:
    """To records, or the way back."""

    def convert(
        layout: RecordFormat,
        records: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        dense_ids: list[int],
        ids: list[int],
    ) -> None:
        if len(dense_ids) != len(ids) or not all(pool.is_contiguous() for pool in (records, keys, values)):
            raise AssertionError(
                f"{len(dense_ids)} dense blocks cannot be converted to {len(ids)} records; strides are "
                f"{keys.stride()}, {values.stride()} and {records.stride()}"
            )
        if not dense_ids:
            return
        if min(*dense_ids, *ids) < 0 or max(dense_ids) >= keys.shape[0] or max(ids) >= records.shape[0]:
            raise AssertionError(
                f"dense blocks {dense_ids} or records {ids} lie outside of {keys.shape[0]}, "
                f"{records.shape[0]}"
            )
        # To the library the heads of all layers are heads of one.
        keys, values, records = (pool.flatten(1, 2) for pool in (keys, values, records))
        no_table = torch.empty((0, 0), dtype=torch.int32)
        native = _native(LayerBlocks(keys, values, no_table, records=records, layout=layout))
        array = ctypes.c_int64 * len(dense_ids)
        numbers = (array(*dense_ids), array(*ids), len(dense_ids), torch.get_num_threads(), seals)
        if status := _library().handle.paged_convert_blocks(native.struct, *numbers):
            _fail(status)

    return convert


encode_blocks, decode_blocks = _conversion(seals=True), _conversion(seals=False)


def _expand_mask(mask: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    if mask.dtype not in structs.ELEMENT_TYPES:
        if not mask.is_floating_point():
            raise AssertionError(f"an attention mask is boolean or floating, not {mask.dtype}")
        mask = mask.to(torch.float32)
    return mask.expand(shape)


def copy_blocks(pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
    """As `Backend.copy_blocks`."""
    if len(src) != len(dst) or not pool.is_contiguous():
        raise AssertionError(
            f"{len(src)} blocks cannot be copied to {len(dst)} of a pool with strides {pool.stride()}"
        )
    if src and (min(*src, *dst) < 0 or max(*src, *dst) >= pool.shape[0]):
        raise AssertionError(f"blocks to copy lie outside the pool of {pool.shape[0]}")
    if not set(dst).isdisjoint(src):
        pool[dst] = pool[src]
    elif src:
        array, block_bytes = ctypes.c_int64 * len(src), pool.stride(0) * pool.element_size()
        numbers = (array(*src), array(*dst), len(src), torch.get_num_threads())
        _library().handle.paged_copy_blocks(pool.data_ptr(), block_bytes, *numbers)
