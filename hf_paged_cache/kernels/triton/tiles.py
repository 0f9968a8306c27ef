"""Sizes that the kernels are compiled for, and how many programs share a row's tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Beyond it a tile of keys or the sums of a tile of queries no longer fit registers and shared memory.
MAX_HEAD_DIM = 256
DECODE_QUERIES = 16  # rows of the smallest tile, of decode steps: matrix units want at least as many
Generation = Literal["ampere", "hopper", "amd"]
"""Kinds of devices that want different tiles: NVIDIA with the shared memory of an A100 or less, which newer
small ones are too (sm_120), with that of an H100, and AMD."""

HOPPER_SHARED_BYTES = 200 << 10  # from that much for one program on: devices have 99, 163 or 227 KiB

_TILE_BYTES = 32 << 10  # K and V of one tile of tokens; less, and its reductions take longer than its bytes
# K and V of all tiles that a program holds: half of that is always in flight, which for two programs keeps
# the memory of a large device busy, and one of them still fits the 99 KiB of a small one.
_BUFFER_BYTES = 64 << 10
_MOST_BUFFERS = 6
_RECORD_BUFFER_BYTES = 32 << 10  # the same for codes: what they become takes its place beside them
_PROGRAMS_PER_PROCESSOR = 2
_SPLIT_TOKENS = 256  # fewer are not worth a program and a share of the merge
_WHOLE_TOKENS = 512  # up to so many, splitting saves less than launching the merge costs


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program of the attention kernel works on."""

    queries: int  # rows of the tile: query tokens times the head group, padded (`M`)
    tokens: int  # stored tokens read at one time; they lie in one block (`N`)
    warps: int
    stages: int  # tiles of tokens in flight, the one that is being worked on counted twice
    # Of float32; "tf32x3" is three products on matrix units, less the last two bits or so.
    precision: str = "ieee"

    @property
    def min_tiles(self) -> int:
        """Tiles of tokens that a split has at least."""
        return _SPLIT_TOKENS // self.tokens


def padded(dim: int) -> int:
    """The power of two that holds a head dim; matrix units want at least 16."""
    return max(DECODE_QUERIES, power_of_two(dim))


def power_of_two(number: int) -> int:
    """The next power of two that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


def choose_tile(
    *,
    queries: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    block_size: int,
    is_masked: bool,
    mask_rows: bool,
    generation: Generation,
    code_bits: tuple[int, int] | None = None,
) -> Tile:
    """The tile for so many queries (query tokens x head group).

    The limits are those of registers and shared memory: `python -m dev.aot` shows both. `code_bits` are those
    of a code of K and of V, where K and V are quantized.
    """
    token_bytes = (padded(head_dim) + padded(v_head_dim)) * itemsize
    is_wide = max(head_dim, v_head_dim) > 128
    is_odd = (head_dim * itemsize) % 16 != 0 or (v_head_dim * itemsize) % 16 != 0
    most, tokens, warps, precision = min(64, padded(queries)), 64, 4, "ieee"
    if generation == "amd":
        tokens = 32 if most < 64 or token_bytes < 512 else 16
    elif itemsize == 4:
        # No matrix unit takes float32 as it is, and the parts that wide queries fall into overflow registers.
        most, tokens, precision = 16, 16, "ieee" if is_wide else "tf32x3"
    elif most > 16 and (is_wide or is_odd or mask_rows):
        tokens = 32
        if is_odd or (is_wide and generation == "ampere"):
            most = 32
        warps = 8 if mask_rows or most == 64 else 4
    elif most > 16 and (is_masked or generation == "ampere"):
        tokens = 32
    tokens = min(tokens, block_size, max(16, power_of_two(_TILE_BYTES // token_bytes + 1) // 2))
    buffers = max(2, min(_MOST_BUFFERS, _BUFFER_BYTES // (tokens * token_bytes)))
    tile = Tile(most, tokens, warps, 2 if generation == "amd" else buffers + 1, precision)
    if code_bits is None:
        return tile

    # Codes take fewer bytes in flight than what they become, so that there are more tiles of them.
    if min(code_bits) == 4 and tile.queries > 16:
        # Unpacking nibbles takes registers, and so do zeros of channels and of tokens.
        tokens = min(block_size, 32 if is_wide or is_masked else 64)
        tile = replace(tile, queries=16 if is_wide else 32, tokens=tokens, warps=4)
    elif tile.queries == 64:
        tile = replace(tile, queries=32 if mask_rows and generation == "ampere" else 64, warps=8)
    if generation == "amd":
        # So many tokens that each of 256 threads has 16 bytes of codes.
        row_bytes = min(padded(head_dim) * code_bits[0], padded(v_head_dim) * code_bits[1]) // 8
        tokens = max(tile.tokens, min(64, block_size, 4096 // row_bytes))
        return replace(tile, tokens=tokens, warps=4) if itemsize < 4 else tile
    token_bytes = (padded(head_dim) * code_bits[0] + padded(v_head_dim) * code_bits[1]) // 8
    buffers = max(2, min(_MOST_BUFFERS, _RECORD_BUFFER_BYTES // (tile.tokens * token_bytes)))
    return replace(tile, stages=buffers + 1)


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Programs that share the tokens of the longest row (`splits` of Flash-Decoding).

    Without splits there are so many `programs`: rows x kv heads x tiles of queries. Tokens are taken up to a
    power of two, so that grids keep their shape while rows grow within that class.
    """
    if tokens <= _WHOLE_TOKENS:
        return 1
    most = _PROGRAMS_PER_PROCESSOR * processors // programs  # a few more would run when all others are done
    return max(1, min(most, power_of_two(tokens) // _SPLIT_TOKENS))


def splits_of(tokens: int) -> int:
    """Programs that share a few tokens that many programs wait for: none have more than a split's."""
    return -(-tokens // _SPLIT_TOKENS)
