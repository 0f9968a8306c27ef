"""Random operations on rows against plain lists of tokens.

The test plays the part of the tensors: it writes a token that is unique in the run into every slot that is
reserved and makes the copies it is told to make. Whatever a table says is stored must read back as the row's
own list has it, in which padding has no part. So a block that is released too early, or not copied, shows up
as a wrong token.
"""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged_cache.blocks import NULL_BLOCK, BlockManager
from hf_paged_cache.errors import PagedCacheError
from tests.blocks.rows import slots

started = precondition(lambda self: self.rows)


class ManagerAgainstLists(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 4]),
        window=st.none() | st.integers(1, 9),
        batch=st.integers(1, 3),
    )
    def begin(self, num_blocks, block_size, window, batch):
        self.manager = BlockManager(num_blocks, block_size, window)
        self.manager.start(batch)
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.padding = [0] * batch
        self.memory: dict[tuple[int, int], int] = {}
        self.held: list[tuple[list[int], dict[tuple[int, int], int]]] = []  # ids and their content
        self.tokens = itertools.count()

    @property
    def length(self) -> int:
        return self.padding[0] + len(self.rows[0])

    def first_needed(self, row: int, length: int | None = None) -> int:
        """The first token of a row that is in the window of the one at column `length`."""
        window, length = self.manager.window, self.length if length is None else length
        return 0 if window is None else max(0, length - window + 1 - self.padding[row])

    def available(self) -> int:
        return self.manager.pool.num_free + self.manager.pool.num_pending

    def more_padding(self, data, count):
        """Rows that are nothing but padding so far may go on with it."""
        if not data.draw(st.booleans()):
            return ()
        more = [0 if tokens else data.draw(st.integers(0, count)) for tokens in self.rows]
        return tuple(p + m for p, m in zip(self.padding, more, strict=True))

    def reserve_checked(self, count, keep_history, padding=()):
        """Reserve, checking all that a reservation promises, and make its copies."""
        manager, before, available = self.manager, copy.deepcopy(self.manager), self.available()
        needed = manager.blocks_needed(count, keep_history=keep_history, padding_tokens=padding)
        reservation = manager.reserve(count, keep_history=keep_history, padding_tokens=padding)
        assert (reservation is None) == (needed > available)
        if reservation is None:
            assert (manager.tables, manager.version) == (before.tables, before.version)
            assert vars(manager.pool).keys() == vars(before.pool).keys()
            assert manager.pool._states == before.pool._states
            assert manager.pool._ref_counts == before.pool._ref_counts
            return None
        assert reservation.needed_blocks == needed == available - self.available()
        changed = reservation.changed_from
        pairs = list(zip(before.tables, manager.tables, strict=True))
        assert all(old.ids[:changed] == new.ids[:changed] for old, new in pairs)
        assert changed >= max(len(old.ids) for old, _ in pairs) or any(
            old.ids[changed:] != new.ids[changed:] for old, new in pairs
        )
        lost = any(
            NULL_BLOCK in new.ids[i : i + 1] for o, new in pairs for i, b in enumerate(o.ids) if b >= 0
        )
        assert (manager.version > before.version) == lost
        starts = [self.first_needed(row) for row in range(len(self.rows))]
        if padding:
            self.padding = list(padding)
        assert [table.offset for table in manager.tables] == self.padding
        for table, tokens, start in zip(manager.tables, self.rows, starts, strict=True):
            # The first new query still sees its window.
            history = slots(table, min(start, len(tokens)), len(tokens))
            assert NULL_BLOCK not in [block_id for block_id, _ in history]
        return reservation

    def prepare(self, reservation):
        for source, destination in reservation.copies:
            for slot in range(self.manager.block_size):
                self.memory[destination, slot] = self.memory.get((source, slot), -1)

    def write(self, row, start, values):
        places = slots(self.manager.tables[row], start, start + len(values))
        self.memory.update({slot: value for slot, value in zip(places, values, strict=True) if slot[0] >= 0})

    @started
    @rule(data=st.data(), count=st.integers(1, 14), keep_history=st.booleans())
    def reserve(self, data, count, keep_history):
        reservation = self.reserve_checked(count, keep_history, self.more_padding(data, count))
        if reservation is not None:
            self.prepare(reservation)
            for row, tokens in enumerate(self.rows):
                values = [next(self.tokens) for _ in range(reservation.end - self.padding[row] - len(tokens))]
                self.write(row, len(tokens), values)
                tokens.extend(values)

    @started
    @rule(data=st.data(), count=st.integers(1, 9), keep_history=st.booleans(), used=st.booleans())
    def reserve_and_take_back(self, data, count, keep_history, used):
        reservation = self.reserve_checked(count, keep_history, self.more_padding(data, count))
        if reservation is not None:
            self.prepare(reservation)
            if used:
                for row, tokens in enumerate(self.rows):
                    self.write(row, len(tokens), [-2] * (reservation.end - self.padding[row] - len(tokens)))
            self.manager.crop(reservation.start)
            self.padding = [min(n, reservation.start) for n in self.padding]

    @started
    @rule(data=st.data())
    def crop(self, data):
        before = self.length
        length = data.draw(st.just(0) | st.integers(0, before))
        version, size = self.manager.version, self.manager.block_size
        kept = [max(0, length - n) for n in self.padding]
        # A started last block must be there too, so that the next token has a place.
        firsts = [min(self.first_needed(row, length), n - n % size) for row, n in enumerate(kept)]
        if any(
            block_id == NULL_BLOCK
            for table, first, n in zip(self.manager.tables, firsts, kept, strict=True)
            for block_id, _ in slots(table, first, n)
        ):
            with pytest.raises(PagedCacheError, match="history was released"):
                self.manager.crop(length)
            assert self.manager.version == version
            return
        self.manager.check_crop(length)
        assert self.manager.version == version
        self.manager.crop(length)
        assert (self.manager.version > version) == (length < before)
        self.rows = [tokens[:n] for tokens, n in zip(self.rows, kept, strict=True)]
        self.padding = [min(n, length) for n in self.padding]

    @started
    @rule(data=st.data())
    def reorder(self, data):
        last = len(self.rows) - 1
        sources = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=4))
        version = self.manager.version
        self.manager.reorder(sources)
        assert (self.manager.version > version) == (sources != list(range(last + 1)))
        self.rows = [list(self.rows[source]) for source in sources]
        self.padding = [self.padding[source] for source in sources]

    @started
    @rule()
    def release_outside_window(self):
        version, free = self.manager.version, self.manager.pool.num_free
        changed = self.manager.release_outside_window()
        assert changed == (self.manager.version > version)
        assert changed or self.manager.pool.num_free == free
        for row, table in enumerate(self.manager.tables):
            outside = self.first_needed(row) // self.manager.block_size
            assert all(block_id == NULL_BLOCK for block_id in table.ids[:outside])

    @started
    @rule(later=st.booleans(), batch=st.integers(1, 3))
    def reset(self, later, batch):
        self.manager.reset(later=later)
        self.manager.start(batch)
        self.rows = [[] for _ in range(batch)]
        self.padding = [0] * batch

    @started
    @rule(data=st.data())
    def hold(self, data):
        """Somebody else shares the blocks of a row, as an index of prefixes does."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        table = self.manager.tables[row]
        stored = {slot for slot in slots(table, 0, table.num_tokens) if slot[0] >= 0}
        ids = [block_id for block_id in table.ids if block_id != NULL_BLOCK]
        self.manager.pool.share(ids)
        self.held.append((ids, {slot: self.memory[slot] for slot in stored}))

    @precondition(lambda self: self.held)
    @rule(keep=st.booleans())
    def let_go(self, keep):
        self.manager.pool.release(self.held.pop(0)[0], keep=keep)

    @rule(count=st.integers(0, 2))
    def grow(self, count):
        self.manager.pool.grow(count)

    @invariant()
    def everything_stored_reads_back(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity(block_ids for block_ids, _ in self.held)
        assert self.manager.batch == len(self.rows)
        for row, (table, tokens) in enumerate(zip(self.manager.tables, self.rows, strict=True)):
            assert table.num_tokens == len(tokens)
            for token, slot in enumerate(slots(table, 0, len(tokens))):
                if slot[0] == NULL_BLOCK:
                    assert token < self.first_needed(row)
                else:
                    assert self.memory[slot] == tokens[token]
        for _, content in self.held:
            assert {slot: self.memory[slot] for slot in content} == content


TestManagerAgainstLists = ManagerAgainstLists.TestCase
TestManagerAgainstLists.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no reason to fail
)
