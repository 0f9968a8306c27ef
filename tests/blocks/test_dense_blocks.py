"""Which blocks stay in the model's dtype, step by step."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache.blocks import NULL_BLOCK, BlockManager, DenseBlocks
from tests.blocks.rows import Counted


class Rows:
    """A manager and its dense blocks, driven as a layer group does; content is what was written."""

    def __init__(
        self, *, sinks: int, residual: int, batch: int = 1, window: int | None = None, num_blocks: int = 400
    ) -> None:
        self.manager = BlockManager(num_blocks, 4, window=window)
        self.dense = DenseBlocks(sinks, residual)
        self.manager.start(batch)
        self.dense.provide(batch * self.dense.dense_per_row)
        self.records: dict[int, str] = {}
        self.slots: dict[int, str] = {}

    def reserve(self, new_tokens: int, *, keep_history: bool = False, padding: tuple[int, ...] = ()) -> None:
        self.step(new_tokens, keep_history=keep_history, padding=padding)
        self.dense.check_integrity(self.manager)

    def step(self, new_tokens: int, *, keep_history: bool = False, padding: tuple[int, ...] = ()) -> None:
        for slot, block_id in self.dense.full(self.manager, new_tokens):
            self.records[block_id] = self.slots.get(slot, "")
        self.dense.release_full(self.manager, new_tokens)
        reservation = self.manager.reserve(new_tokens, keep_history=keep_history, padding_tokens=padding)
        assert reservation is not None
        moves = self.dense.follow(self.manager, reservation)
        for source, target in moves.copied:
            self.slots[target] = self.slots.get(source, "")
        for block_id, slot in moves.unsealed:
            self.slots[slot] = self.records.get(block_id, "")

    def write(self, tokens: list[str], padding: tuple[int, ...] = ()) -> None:
        """One token for each row, as a step of decoding does; none for a row that goes on with padding."""
        end = self.manager.num_tokens + 1
        starts = [table.num_tokens for table in self.manager.tables]
        self.reserve(1, padding=tuple(min(n, end) for n in padding))
        for table, start, token in zip(self.manager.tables, starts, tokens, strict=True):
            if not token:
                continue
            slot = dict(self.dense.columns_of(table))[start // 4]
            self.slots[slot] = self.slots.get(slot, "")[: start % 4] + token

    def content(self, row: int) -> str:
        ids = self.manager.tables[row].ids
        slots = dict(self.dense.columns_of(self.manager.tables[row]))
        size, end = self.manager.block_size, self.manager.tables[row].num_tokens
        blocks = [self.slots[slots[c]] if c in slots else self.records[ids[c]] for c in range(len(ids))]
        return "".join(b[:size] for b in blocks)[:end]

    @property
    def picture(self) -> str:
        """A letter a token: D dense, r record, - not stored."""
        table, end = self.manager.tables[0], self.manager.num_tokens
        dense = dict.fromkeys(table.dense, "D")
        kinds = [dense.get(c, "-" if i == NULL_BLOCK else "r") for c, i in enumerate(table.ids)]
        return " ".join(kind * min(4, end - 4 * c) for c, kind in enumerate(kinds))


def test_the_picture_in_the_documentation() -> None:
    rows = Rows(sinks=1, residual=1)
    rows.reserve(18)
    assert rows.picture == "DDDD rrrr rrrr rrrr DD"
    rows.reserve(2)
    assert rows.picture == "DDDD rrrr rrrr rrrr DDDD"
    rows.reserve(1)
    assert rows.picture == "DDDD rrrr rrrr rrrr rrrr D"
    rows.manager.crop(15)
    assert rows.picture == "DDDD rrrr rrrr rrr"
    rows.reserve(1)
    assert rows.picture == "DDDD rrrr rrrr DDDD"


def test_a_prompt_that_ends_with_a_block_keeps_it() -> None:
    rows = Rows(sinks=0, residual=1)
    rows.reserve(12)
    assert rows.picture == "rrrr rrrr DDDD"


def test_a_longer_residual() -> None:
    rows = Rows(sinks=1, residual=2)
    rows.reserve(18)
    assert rows.picture == "DDDD rrrr rrrr DDDD DD"
    rows.reserve(3)
    assert rows.picture == "DDDD rrrr rrrr rrrr DDDD D"
    rows.reserve(1)
    assert rows.picture == "DDDD rrrr rrrr rrrr DDDD DD"


def test_a_block_that_fills_in_a_long_step_waits_for_the_next() -> None:
    rows = Rows(sinks=0, residual=1)
    rows.reserve(2)
    rows.reserve(12)
    assert rows.picture == "DDDD rrrr rrrr DD"
    rows.reserve(1)
    assert rows.picture == "rrrr rrrr rrrr DDD"


def test_tokens_that_go_to_bytes_at_once_leave_the_sink_only() -> None:
    rows = Rows(sinks=1, residual=0)
    rows.reserve(6)
    assert rows.picture == "DDDD rr"
    rows.reserve(5)
    assert rows.picture == "DDDD rrrr rrr"


def test_drafts_that_are_rejected_never_become_bytes() -> None:
    rows = Rows(sinks=0, residual=1)
    rows.reserve(6)
    for _ in range(9):
        rows.reserve(5)
        rows.manager.crop(rows.manager.num_tokens - 4)
    assert rows.picture == "rrrr rrrr rrrr DDD"


def test_slots_of_a_window_come_back() -> None:
    rows = Rows(sinks=1, residual=1, window=6)
    rows.reserve(30)
    assert rows.picture == "- - - - - - rrrr DD".replace("-", "----")
    rows.reserve(1)
    for _ in range(60):
        rows.reserve(1)
    assert rows.dense.num_dense <= 4


@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 3, 14)], ids=str)
@pytest.mark.parametrize(("sinks", "residual"), [(0, 1), (1, 1), (1, 2), (2, 1)])
def test_rows_keep_their_tokens_whatever_happens(sinks: int, residual: int, padding: tuple[int, ...]) -> None:
    rng = random.Random(sinks * 10 + residual)
    rows = Rows(sinks=sinks, residual=residual, batch=3)
    expected = ["", "", ""]
    for column in range(max(padding)):  # tokens of rows that have begun
        begun = [row for row in range(3) if column >= padding[row]]
        rows.write(["." if row in begun else "" for row in range(3)], padding=padding)
        for row in begun:
            expected[row] += "."
    for step in range(600):
        if rng.random() < 0.15:
            order = rng.sample(range(3), 3) if any(padding) else [rng.randrange(3) for _ in range(3)]
            rows.manager.reorder(order)
            expected = [expected[i] for i in order]
        if rng.random() < 0.1 and rows.manager.num_tokens > 1:
            kept = rng.randrange(max(1, rows.manager.num_tokens - 12), rows.manager.num_tokens)
            rows.manager.crop(kept)
            expected = [
                text[: max(0, kept - table.offset)]
                for text, table in zip(expected, rows.manager.tables, strict=True)
            ]
        tokens = [chr(ord("a") + (step + row) % 26) for row in range(3)]
        rows.write(tokens)
        expected = [text + token for text, token in zip(expected, tokens, strict=True)]
        assert [rows.content(row) for row in range(3)] == expected
        assert len(rows.dense.dense_ids(rows.manager)) <= 3 * rows.dense.dense_per_row


def test_slots_do_not_multiply_as_rows_go_on() -> None:
    rows = Rows(sinks=1, residual=1, batch=2)
    rows.reserve(10)
    for _ in range(500):
        rows.reserve(1)
    assert rows.dense.num_dense == 2 * 3 == 2 * rows.dense.dense_per_row


def test_a_step_looks_at_as_many_ids_however_long_rows_are() -> None:
    def looks(blocks: int) -> int:
        rows = Rows(sinks=1, residual=2, batch=2, num_blocks=2 * blocks + 20)
        rows.reserve(4 * blocks)
        rows.reserve(1)  # which seals the blocks of the prompt
        for table in rows.manager.tables:
            table.ids = Counted(table.ids)
        Counted.looks = 0
        for _ in range(9):  # over two edges of blocks
            rows.step(1)
        return Counted.looks

    assert 0 < looks(2000) == looks(10)
