"""Arguments of every kernel: one layer's blocks, and the question asked of them. No caches, no models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from hf_paged_cache.formats import RecordFormat

NULL_BLOCK = -1
"""Table entry of a block that is not stored. Kernels neither write nor attend its tokens."""

_Entry = TypeVar("_Entry", int, torch.Tensor)


def dense_entry(index: _Entry) -> _Entry:
    """Table entry of a residual block of a quantized layer, one that is stored as it came in `keys`/`values`.

    Such entries lie below `NULL_BLOCK`, and the function is its own inverse.
    """
    return -2 - index


def on_device(integers: Sequence[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    """Integers as an int32 tensor, sent from pinned memory so that the host need not wait for the device."""
    sent = torch.tensor(integers, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    return sent.to(device, non_blocking=True)


@dataclass(slots=True, eq=False)
class RowLengths:
    """How many tokens every row has, where kernels of a GPU read it."""

    tokens: int  # what the host knows of it
    on_device: torch.Tensor  # int32 `[batch]`, all `tokens`, or further where compiled steps have run since

    def set(self, tokens: int) -> None:
        """Give all rows this length, without waiting for the device."""
        self.tokens = tokens
        self.on_device.fill_(tokens)


@dataclass(slots=True, eq=False)
class LayerBlocks:
    """One layer's share of a pool, and the table that puts its blocks in order.

    `keys[table[b, t // block_size], h, t % block_size]` is the key of token `t` of row `b` for kv head `h`.
    A row may begin with padding, which is not stored: then `t` is a *stored position*, and the token of
    column `c` of the batch, which is what all arguments and masks count in, has `t = c - offsets[b]`:

    ```
    columns     0123456789abc        offsets[b] = 5, block_size 4
    row b       .....abcdefgh        its blocks: [abcd] [efgh]
    ```

    A quantized layer has `records` too. Then an entry >= 0 of the table names a record, and one below
    `NULL_BLOCK` a residual block, of the few in the model's own dtype that `keys` and `values` hold:

    ```
    table  [ -2    7    3   -1   -3 ]
             |     |    |    |    keys[1], being filled
             |     |    |    not stored
             |     records[7], records[3]
             keys[0], the sink
    ```

    Attributes:
        keys: `[num_blocks, kv_heads, block_size, head_dim]`; usually a strided slice of a pool that holds
            several layers, so only the last three dimensions are contiguous. May have no blocks where there
            are records; its shape and dtype still say what K are.
        values: `[num_blocks, kv_heads, block_size, v_head_dim]`, same dtype and device.
        table: int32 `[batch, max_blocks]`, contiguous, on the same device. `NULL_BLOCK` marks a block that is
            not stored. Columns past the end of a row hold arbitrary ids.
        records: None, or uint8 `[num_blocks, kv_heads, nbytes]`, usually a strided slice.
        layout: What the bytes of `records` mean.
        lengths: Of the rows, on a GPU; None where kernels are told by the host.
        dense_columns: Of every row, which of its table's entries lie below `NULL_BLOCK`, sorted; others among
            them do no harm. One tuple where it is the same in all rows. Only backends whose tables lie on a
            device want to know; None means that nobody has said, and they look at the table.
        fault: None, or int32 `[2]` on the device, for K and V: writes set it to 1 where they find what a
            quantized block has no scale for, and store zeros for that token. Without it they raise, for which
            they wait for the device.
        offsets: None, or int32 `[batch]` on the device of the table: how many columns a row begins later than
            the batch. Those columns are neither stored nor attended, without a mask that says so, and read as
            zeros; a query in one sees nothing.
        native: This object as a backend takes it (e.g. a C struct). It keeps what it points to, and is made
            anew when a tensor above was replaced.
        choice: The dispatcher's note of the backend that serves these blocks; None until they are used.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: RowLengths | None = None
    records: torch.Tensor | None = None
    layout: RecordFormat | None = None
    dense_columns: tuple[tuple[int, ...], ...] | None = None
    fault: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    native: Any = field(default=None, repr=False)
    choice: Any = field(default=None, repr=False)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # What a backend prepared points into these very tensors, and a copy has others.
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return None, kept | {"native": None, "choice": None}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class StaticBlocks:
    """One layer's blocks in a step that is compiled: tensors that stay in place, and no number of the host's.

    Every row has all its blocks from the start, so that tables do not change either.
    """

    keys: torch.Tensor  # `[num_blocks, layers, kv_heads, block_size, head_dim]`, the whole pool
    values: torch.Tensor  # `[num_blocks, layers, kv_heads, block_size, v_head_dim]`
    layer: int  # place in the second dimension
    table: torch.Tensor  # int32 `[batch, columns]`
    lengths: torch.Tensor  # int32 `[batch]`, tokens of each row
    advances: bool  # whether this layer is the one that counts the new tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a row can hold."""
        return self.table.shape[1] * self.keys.shape[3]


@dataclass(slots=True, eq=False)
class Attention:
    """One attention call of one layer over stored tokens `[start, end)` of every row.

    Query `i` of `q_tokens` stands at token position `end - q_tokens + i` when the queries are the newest
    tokens, which is what `causal` and `window` refer to. The softmax is over `scale * q·k`, soft-capped, plus
    mask; a sink adds one logit per head that takes probability but has no value.

    Attributes:
        query: `[batch, q_heads, q_tokens, head_dim]`; `q_heads` is a multiple of the kv heads and query head
            `h` reads kv head `h // (q_heads // kv_heads)`. Any strides, last dimension contiguous. fp32, bf16
            or fp16, the dtype of the blocks.
        start: First stored token attended (0, or where a sliding window begins).
        end: One past the last stored token attended.
        scale: Factor on q·k.
        mask: None, or broadcastable to `[batch, q_heads, q_tokens, end - start]`: boolean (True = attend) or
            floating (added to the scaled, soft-capped score). A row with nothing to attend yields zeros,
            never NaN.
        causal: Query i sees stored positions <= its own. Independent of `mask`; both apply.
        window: None, or query at position p sees only positions > p - window.
        softcap: None, or c: score = c * tanh(score / c) (Gemma-2).
        sinks: None, or `[q_heads]`: a logit per head in the denominator only (gpt-oss).
        queries_are_last: False for queries that are not the newest stored tokens (history of a prefill;
            cross-attention): then query i stands at position `end + i`.
    """

    query: torch.Tensor
    start: int
    end: int
    scale: float
    mask: torch.Tensor | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    queries_are_last: bool = True
