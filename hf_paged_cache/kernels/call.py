"""Arguments of every kernel: one layer's blocks, and the question asked of them. No caches, no models."""

from __future__ import annotations

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
    """

    # K `[num_blocks, kv_heads, block_size, head_dim]` and V `[..., v_head_dim]`, of one dtype and device;
    # usually strided slices of a pool that holds several layers, so only the last three dimensions are
    # contiguous. May have no blocks where there are records; their shapes and dtype still say what K and V
    # are.
    keys: torch.Tensor
    values: torch.Tensor
    # int32 `[batch, max_blocks]`, contiguous, on the same device. Columns past the end of a row hold any ids.
    table: torch.Tensor
    lengths: RowLengths | None = None  # on a GPU; None where kernels are told by the host
    records: torch.Tensor | None = None  # uint8 `[num_blocks, kv_heads, nbytes]`, usually a strided slice
    layout: RecordFormat | None = None  # what the bytes of `records` mean
    # Of every row, which columns of the table are below `NULL_BLOCK`, sorted; others among them do no harm.
    # One tuple where that is the same in all rows. None: nobody has said, and backends that want to know,
    # those with tables on a device, look at the table.
    dense_columns: tuple[tuple[int, ...], ...] | None = None
    # int32 `[2]` on the device, for K and V: writes set it to 1 where they find what a quantized block has no
    # scale for, and store zeros for that token. Without it they raise, for which they wait for the device.
    fault: torch.Tensor | None = None
    # int32 `[batch]` on the device: how many columns a row begins later than the batch. Those are neither
    # stored nor attended, without a mask that says so, and read as zeros; a query in one sees nothing.
    offsets: torch.Tensor | None = None
    # This object as a backend takes it (e.g. a C struct), and the dispatcher's note of the backend that
    # serves it. The former keeps what it points to, and is made anew when a tensor above was replaced.
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
    mask; a sink adds one logit per head that takes probability but has no value. A query that sees nothing
    yields zeros, never NaN.
    """

    # `[batch, q_heads, q_tokens, head_dim]` in fp32, bf16 or fp16, the dtype of the blocks; any strides, last
    # dimension contiguous. `q_heads` is a multiple of the kv heads, and query head `h` reads kv head
    # `h // (q_heads // kv_heads)`.
    query: torch.Tensor
    start: int  # first stored token attended: 0, or where a sliding window begins
    end: int  # one past the last
    scale: float  # on q·k
    # Broadcastable to `[batch, q_heads, q_tokens, end - start]`: boolean (True = attend) or floating (added
    # to the scaled, soft-capped score).
    mask: torch.Tensor | None = None
    causal: bool = False  # query i sees stored positions <= its own; `mask` applies too
    window: int | None = None  # query at position p sees only positions > p - window
    softcap: float | None = None  # c: score = c * tanh(score / c) (Gemma-2)
    sinks: torch.Tensor | None = None  # `[q_heads]`: a logit per head in the denominator only (gpt-oss)
    # False for queries that are not the newest stored tokens (history of a prefill; cross-attention): then
    # query i stands at position `end + i`.
    queries_are_last: bool = True
