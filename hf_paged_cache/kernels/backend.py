"""The contract of kernels: what the module of a backend provides, and what each function means.

It is said here once; `reference` is the same in loops, and what the fast backends are held to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

    from .call import Attention, LayerBlocks
    from .torch.partial_softmax import Partial


class ConvertBlocks(Protocol):
    """Conversion of full blocks, all layers of a pool at once."""

    def __call__(
        self,
        layout: RecordFormat,
        records: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        dense_ids: list[int],
        ids: list[int],
    ) -> None:
        """Convert between `keys[dense_ids[i]]`, `values[dense_ids[i]]` and `records[ids[i]]`.

        Args:
            layout: What the bytes of the records mean.
            records: uint8 `[num_blocks, layers, kv_heads, nbytes]`.
            keys: `[num_dense, layers, kv_heads, block_size, head_dim]`.
            values: `[num_dense, layers, kv_heads, block_size, v_head_dim]`.
            dense_ids: Distinct blocks of these.
            ids: As many distinct records.
        """


class Backend(Protocol):
    """Functions over the blocks of one layer, or over pools.

    What a call does not ask for must not show in its answer, whatever lies there, NaN included: null blocks,
    columns before a row begins (`LayerBlocks.offsets`), tokens outside `[start, end)`, slots of a block past
    its tokens, and what a mask hides. The table's entries past the end of a row are arbitrary: no block is
    looked up by them.

    A module may have more: `PrefillBackend`; `gather(blocks, start, end)` for quantized layers, as
    `dispatch.gather`; `unusable_reason(device)`, None or a sentence, where it runs on some devices of a
    machine and not on others; `isa()`, the instruction set that it runs on; `scratch_bytes()`, the memory
    that it keeps between calls.
    """

    def unavailable_reason(self) -> str | None:
        """None if it runs on this machine, otherwise a sentence. May compile."""

    def unsupported_reason(self, blocks: LayerBlocks) -> str | None:
        """None if it can serve these blocks, otherwise a sentence. Compiles nothing."""

    def write(
        self, blocks: LayerBlocks, key_states: torch.Tensor, value_states: torch.Tensor, start: int
    ) -> None:
        """Store new tokens, those of columns `start, start + 1, ...` of every row.

        Tokens that fall into a null block, or stand before a row begins, are dropped. Records get whole
        blocks, unless their format is per token.

        Args:
            blocks: Changed in place.
            key_states: `[batch, kv_heads, tokens, head_dim]`, dtype and device of the blocks.
            value_states: `[batch, kv_heads, tokens, v_head_dim]`.
            start: Column of the first new token.

        Raises:
            UnstorableValueError: A quantized layer without `blocks.fault` got NaN, infinity, or a magnitude
                above `formats.LARGEST_VALUE`. Nothing was written.
        """

    def decode(
        self, blocks: LayerBlocks, a: Attention, *, return_lse: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend the stored tokens `[a.start, a.end)`; any number of queries, fastest for few.

        Args:
            blocks: Not changed.
            a: The question; every field is honoured.
            return_lse: Whether the log-sum-exp is wanted too, which merges this answer with a partial one.

        Returns:
            `[batch, q_tokens, q_heads, v_head_dim]`, contiguous, in the query's dtype; zeros where a query
            sees nothing. And None, or with `return_lse` float32 `[batch, q_heads, q_tokens]`: natural log of
            the softmax's denominator, the sink included; -inf where there is neither a visible token nor a
            sink.
        """

    def copy_blocks(self, pool: torch.Tensor, src: list[int], dst: list[int]) -> None:
        """Copy whole blocks inside one pool tensor: `pool[dst[i]] = pool[src[i]]`, all sources read first.

        Args:
            pool: `[num_blocks, ...]`, contiguous, changed in place.
            src: Block ids to read.
            dst: As many distinct block ids to overwrite.
        """

    @property
    def encode_blocks(self) -> ConvertBlocks:
        """Seals full blocks: `records` are changed in place."""

    @property
    def decode_blocks(self) -> ConvertBlocks:
        """The way back, for blocks that are written to again: `keys` and `values` are changed in place."""


class PrefillBackend(Protocol):
    """What a backend adds that has kernels for many queries too, beside torch's own."""

    def attend_history(
        self, blocks: LayerBlocks, a: Attention, visible: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Partial:
        """Attend the stored tokens `[a.start, a.end)`, without sinks.

        `visible` and `bias`, as `masking` has them, stand for the mask of `a`.
        """

    def attend_fresh(
        self,
        a: Attention,
        keys: torch.Tensor,
        values: torch.Tensor,
        visible: torch.Tensor | None,
        bias: torch.Tensor | None,
        is_causal: bool,
    ) -> Partial:
        """Attend new tokens among themselves, without sinks.

        Args:
            a: Query, scale, window and softcap.
            keys: `[batch, kv_heads, q_tokens, head_dim]`.
            values: `[batch, kv_heads, q_tokens, v_head_dim]`.
            visible: What the mask lets see of the new tokens, as `masking` has it.
            bias: What the mask adds.
            is_causal: Query i sees the tokens up to its own.
        """
