"""Random operations on a pool against a model made of sets and lists."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged_cache.blocks import BlockPool
from hf_paged_cache.errors import PagedCacheError


class PoolModel:
    """What a pool does, without a thought for speed."""

    def __init__(self, num_blocks: int) -> None:
        self.owners: list[int] = []  # an id for each reference
        self.sealed: set[int] = set()
        self.pending: list[int] = []
        self.cached: list[int] = []
        self.num_blocks = num_blocks

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - set(self.owners) - set(self.pending) - set(self.cached)

    def take(self, block_ids: list[int]) -> None:
        """Accept what was handed out: free ones first, then pending, then cached ones in their order."""
        free, others = self.free(), self.pending + self.cached
        num_free = min(len(free), len(block_ids))
        reused = others[: len(block_ids) - num_free]
        expected_from_free = set(block_ids) - set(reused)
        assert expected_from_free <= free
        assert len(expected_from_free) == num_free
        self.pending = [block_id for block_id in self.pending if block_id not in reused]
        self.cached = [block_id for block_id in self.cached if block_id not in reused]
        self.sealed -= set(block_ids)
        self.owners += block_ids

    def release(self, block_ids: list[int], keep: bool, later: bool) -> None:
        for block_id in reversed(block_ids):
            self.owners.remove(block_id)
            if block_id not in self.owners:
                if later:
                    self.pending.append(block_id)
                elif keep and block_id in self.sealed:
                    self.cached.append(block_id)
                if block_id not in self.cached:
                    self.sealed.discard(block_id)


class PoolAgainstModel(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 9))
    def begin(self, num_blocks):
        self.pool, self.model = BlockPool(num_blocks), PoolModel(num_blocks)

    @rule(count=st.integers(0, 5))
    def allocate(self, count):
        available = self.model.num_blocks - len(set(self.model.owners))
        assert self.pool.can_allocate(count) == (count <= available)
        block_ids = self.pool.allocate(count)
        if count > available:
            assert block_ids is None
        else:
            assert len(block_ids) == count
            self.model.take(block_ids)

    @rule(data=st.data())
    def share(self, data):
        candidates = sorted({*self.model.owners, *self.model.cached})
        if candidates:
            block_ids = data.draw(st.lists(st.sampled_from(candidates), max_size=4))
            self.pool.share(block_ids)
            self.model.owners += block_ids
            self.model.cached = [i for i in self.model.cached if i not in block_ids]

    @rule(data=st.data(), keep=st.booleans(), later=st.booleans())
    def release(self, data, keep, later):
        block_ids = data.draw(st.permutations(self.model.owners)) if self.model.owners else []
        block_ids = block_ids[: data.draw(st.integers(0, 5))]
        if later:
            self.pool.release_later(block_ids)
        else:
            self.pool.release(block_ids, keep=keep)
        self.model.release(block_ids, keep, later)

    @rule(extra=st.integers(-1, 10))
    def release_too_often(self, extra):
        if extra not in self.model.owners:
            with pytest.raises(PagedCacheError):
                self.pool.release([extra, *self.model.owners])

    @rule(count=st.none() | st.integers(0, 4))
    def flush(self, count):
        expected = len(self.model.pending) if count is None else min(count, len(self.model.pending))
        assert self.pool.flush_pending(count) == expected
        del self.model.pending[:expected]

    @precondition(lambda self: self.model.owners)
    @rule(data=st.data())
    def seal(self, data):
        block_id = data.draw(st.sampled_from(self.model.owners))
        if block_id in self.model.sealed:
            with pytest.raises(PagedCacheError):
                self.pool.seal(block_id)
        else:
            self.pool.seal(block_id)
            self.model.sealed.add(block_id)

    @precondition(lambda self: self.model.owners)
    @rule(data=st.data())
    def make_writable(self, data):
        block_id = data.draw(st.sampled_from(self.model.owners))
        writable = self.pool.make_writable(block_id)
        if self.model.owners.count(block_id) == 1:
            assert writable == block_id
            self.model.sealed.discard(block_id)
        elif len(set(self.model.owners)) == self.model.num_blocks:
            assert writable is None
        else:
            self.model.take([writable])
            self.model.owners.remove(block_id)

    @rule(count=st.integers(0, 2))
    def grow(self, count):
        self.pool.grow(count)
        self.model.num_blocks += count

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([self.model.owners])
        model = self.model
        for block_id in range(model.num_blocks):
            state = self.pool.state(block_id).name
            assert (state == "FREE") == (block_id in model.free())
            assert (state == "PENDING") == (block_id in model.pending)
            assert (state == "CACHED") == (block_id in model.cached)
            assert (state == "SEALED") == (block_id in model.owners and block_id in model.sealed)
        assert self.pool.num_free == len(model.free()) + len(model.cached)
        assert self.pool.num_referenced == len(set(model.owners))


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no reason to fail
)
