"""The blocks of one sequence, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hf_paged_cache.errors import PagedCacheError

from .block import NULL_BLOCK


@dataclass(slots=True)
class BlockTable:
    """Logical block i of a sequence → block id; token t lies in logical block `t // block_size`.

    A sequence may begin later than the batch it stands in, whose columns before it are padding. It counts its
    own tokens only.

    ```
    block_size 4    columns 012 3456 789a bc
                    tokens  ... 0123 4567 89     offset 3
                    ids         [ 7,   2,  5]    num_tokens 10, slot of token 9 = (5, 1)
    ```

    Holds no references: whoever puts ids in or takes them out shares and releases them in the pool. A number
    that does not fit the sequence raises a PagedCacheError, and nothing has changed.
    """

    block_size: int  # tokens
    ids: list[int] = field(default_factory=list)  # of started blocks; NULL_BLOCK where tokens are not stored
    num_tokens: int = 0  # length of the sequence, stored or not
    offset: int = 0  # columns of the batch before the sequence begins
    num_dropped: int = 0  # leading blocks known to be NULL: `drop_before` need not look at them again
    num_sealed: int = 0  # leading blocks that need no look when full blocks are sealed
    dense: list[int] = field(default_factory=list)  # logical blocks, in order; see `DenseBlocks`

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise PagedCacheError(f"Expected block_size ≥ 1, got {self.block_size}.")

    @property
    def end(self) -> int:
        """Columns of the batch, with those before the sequence begins."""
        return self.offset + self.num_tokens

    def token_at(self, column: int) -> int:
        """The first token at a column of the batch or after it."""
        return max(0, column - self.offset)

    def blocks_needed(self, num_tokens: int) -> int:
        """How many ids `append` wants for so many new tokens."""
        if num_tokens < 0:
            raise PagedCacheError(f"Expected num_tokens ≥ 0 new tokens, got {num_tokens}.")
        return -(-(self.num_tokens + num_tokens) // self.block_size) - len(self.ids)

    def append(self, num_tokens: int, new_ids: Sequence[int]) -> None:
        """Make room for `num_tokens` new tokens: first in the last block, then in `new_ids`."""
        needed = self.blocks_needed(num_tokens)
        if len(new_ids) != needed:
            raise PagedCacheError(
                f"Expected {needed} block ids for {num_tokens} tokens after {self.num_tokens} in blocks of"
                f" {self.block_size}, got {len(new_ids)}."
            )
        self.ids.extend(new_ids)
        self.num_tokens += num_tokens

    def crop(self, num_tokens: int) -> list[int]:
        """Cut the sequence down to its first tokens. Returns the ids of blocks that have no token left."""
        self._require_token(num_tokens, "num_tokens")
        num_blocks = -(-num_tokens // self.block_size)
        dropped = [block_id for block_id in self.ids[num_blocks:] if block_id != NULL_BLOCK]
        del self.ids[num_blocks:]
        self.dense = [i for i in self.dense if i < num_blocks]
        self.num_tokens = num_tokens
        self.num_dropped = min(self.num_dropped, num_blocks)
        self.num_sealed = min(self.num_sealed, num_tokens // self.block_size)
        return dropped

    def drop_before(self, token: int) -> list[int]:
        """Make the entries of blocks that lie wholly before a token NULL_BLOCK. Returns the ids they had."""
        self._require_token(token, "token")
        first, self.num_dropped = self.num_dropped, max(self.num_dropped, token // self.block_size)
        dropped = [block_id for block_id in self.ids[first : self.num_dropped] if block_id != NULL_BLOCK]
        if dropped:
            self.ids[first : self.num_dropped] = [NULL_BLOCK] * (self.num_dropped - first)
            self.dense = [i for i in self.dense if i >= self.num_dropped]
        return dropped

    def fork(self) -> BlockTable:
        """A second sequence with the same blocks so far. The caller shares them in the pool."""
        return replace(self, ids=self.ids.copy(), dense=self.dense.copy())

    def _require_token(self, token: int, name: str) -> None:
        if not 0 <= token <= self.num_tokens:
            raise PagedCacheError(f"Expected 0 ≤ {name} ≤ {self.num_tokens} tokens, got {token}.")
