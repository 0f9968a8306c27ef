"""Formats of the layers of a cache, and which of their blocks stay in the model's own dtype."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_paged_cache.blocks import DenseBlocks
from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import KVFormat, kv_format

if TYPE_CHECKING:
    from hf_paged_cache.config import PagedCacheConfig


@dataclass(frozen=True)
class Precision:
    """How the layers of a cache are stored."""

    formats: dict[int, KVFormat | None]  # by layer index; None for the model's own dtype
    sink_tokens: int | None  # first ones of a row that are kept as they came; None: a block
    residual_tokens: int  # newest ones that they keep at least, in whole blocks
    needs_full_blocks: bool  # a format encodes blocks when they are full, not token by token

    @classmethod
    def of(cls, config: PagedCacheConfig, layers: Iterable[int], prompt_tokens: int) -> Precision:
        """What the settings say for a prompt of so many tokens."""
        name = config.kv_cache_dtype
        if name == "adaptive":
            name = "int4" if prompt_tokens <= config.adaptive_threshold else "int8"
        formats = {
            index: kv_format(config.layer_dtypes.get(index, name), group_size=config.group_size_of(index))
            for index in layers
        }
        # Layers share tables, so all of them keep what one of them has to keep.
        quantized = [layer_format for layer_format in formats.values() if layer_format is not None]
        keeps_sinks = any(layer_format.keys.bits <= 4 for layer_format in quantized)
        needs_full_blocks = keeps_sinks or any(not layer_format.is_per_token for layer_format in quantized)
        size, sinks, residual = config.block_size, config.sink_tokens, config.residual_length
        if residual is not None and residual // size < needs_full_blocks:
            raise PagedCacheError(
                f"residual_length must be at least a block of {size} tokens, got {residual}: a format in use "
                "encodes blocks when they are full; None is the default"
            )
        sinks = 0 if sinks is None and not keeps_sinks else sinks
        return cls(formats, sinks, residual or 0, needs_full_blocks)

    def dense_blocks(self, block_size: int) -> DenseBlocks:
        """The blocks that quantized layers of a new cache keep as they came."""
        sink_blocks = 1 if self.sink_tokens is None else self.sink_tokens // block_size
        return DenseBlocks(sink_blocks, max(int(self.needs_full_blocks), self.residual_tokens // block_size))
