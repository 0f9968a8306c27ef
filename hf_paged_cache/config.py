"""The settings of a cache: frozen, validated when made."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PagedCacheError

KV_CACHE_DTYPES = ("auto",)
"""Formats that K and V can be stored in. `auto` is the model's own dtype."""

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class PagedCacheConfig:
    """Settings of a `PagedCache`.

    Attributes:
        block_size: Tokens per block; a power of two from 16 to 256. 64 is the fastest on CPUs, within 16 % of
            32.
        kv_cache_dtype: Format of stored K and V; `auto` keeps the model's dtype.
        max_tokens: Capacity of the pool in tokens, summed over the sequences of a batch. None takes the
            model's `max_position_embeddings` for every sequence, cut to `gpu_memory_utilization`.
        gpu_memory_utilization: Share of the device's free memory (of the available RAM on a CPU) that pools
            may take.
        compile: Keep a decode step such that `torch.compile` can trace it, where the device is a GPU.

    Raises:
        PagedCacheError: A value is out of range; the message names it.
    """

    block_size: int = 64
    kv_cache_dtype: str = "auto"
    max_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    compile: bool = False

    def __post_init__(self) -> None:
        size = self.block_size
        if not _is_int(size) or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE or size & (size - 1):
            raise PagedCacheError(
                f"block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got {size!r}; "
                "64 is the default"
            )
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise PagedCacheError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}; "
                "'auto' stores K and V in the model's dtype"
            )
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens <= 0):
            raise PagedCacheError(
                f"max_tokens must be a positive number of tokens, got {self.max_tokens!r}; "
                "leave it None for the model's max_position_embeddings"
            )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise PagedCacheError(
                f"gpu_memory_utilization must be a share above 0 and up to 1, got {share!r}; 0.9 is the "
                "default"
            )
        if not isinstance(self.compile, bool):
            raise PagedCacheError(
                f"compile must be True or False, got {self.compile!r}; False is the default"
            )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
