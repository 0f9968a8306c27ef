"""What a cache says of itself: counts and exact bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """Bytes of a cache.

    Attributes:
        pool_bytes: Preallocated pools. On a CPU the part that was never written is not resident.
        used_bytes: The part of the pools in blocks that hold tokens.
        table_bytes: Block tables that kernels read.
        scratch_bytes: Working memory that kernels keep between calls, shared by all caches of the process.
        host_bytes: States of layers that are not paged (linear attention, convolutions), kept by the classes
            of `transformers`.
    """

    pool_bytes: int
    used_bytes: int
    table_bytes: int
    scratch_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Everything that is allocated."""
        return self.pool_bytes + self.table_bytes + self.scratch_bytes + self.host_bytes


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of a cache, over all layer groups.

    Attributes:
        batch: Rows.
        tokens: Tokens seen per row.
        block_size: Tokens per block.
        num_blocks: Blocks of all groups.
        used_blocks: Blocks that hold tokens, each counted once however many rows share it.
        shared_blocks: Blocks held by more than one row.
        free_blocks: Blocks that can be taken.
        backend: The kernels in use: `cpp`, `triton`, `torch` or `reference`; None before the first update.
        layer_dtypes: Layer index -> the format that the layer is stored in now, which `adaptive` chooses by
            the first forward and the guard may change. `int4_group+k8` is `int4_group` with K in int8.
    """

    batch: int
    tokens: int
    block_size: int
    num_blocks: int
    used_blocks: int
    shared_blocks: int
    free_blocks: int
    backend: str | None
    layer_dtypes: dict[int, str]
