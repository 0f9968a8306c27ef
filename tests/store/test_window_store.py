"""A window store knows holders of its blocks and nothing else of them."""

from __future__ import annotations

from dataclasses import dataclass

from hf_paged_cache.blocks import BlockManager
from hf_paged_cache.store.window_store import Holder, WindowStore


@dataclass
class Step:
    """A forward that has ended or not."""

    is_over: bool = False


def holder_of(store: WindowStore, tokens: int) -> Holder:
    manager = BlockManager(store.num_blocks, store.block_size, store.window, pool=store.blocks)
    manager.start(1)
    manager.reserve(tokens)
    holder = Holder(manager, [])
    store.join(holder)
    return holder


def test_blocks_of_a_dropped_holder_come_back_when_they_are_collected() -> None:
    store = WindowStore(None, 8, 4)
    kept, dropped = holder_of(store, 9), holder_of(store, 6)
    assert (store.num_available, store.is_shared) == (3, True)
    del dropped
    assert (store.num_available, bool(store.left)) == (3, True)
    store.collect()
    assert (store.num_available, bool(store.left), store.holders) == (5, False, [kept])


def test_tensors_may_move_unless_another_holder_writes() -> None:
    store = WindowStore(None, 8, 4)
    one, other = holder_of(store, 1), holder_of(store, 1)
    assert store.can_move(one)
    other.step = Step()
    assert not store.can_move(one)
    assert store.can_move(other)
    other.step = Step(is_over=True)
    assert store.can_move(one)


def test_what_is_restored_has_the_holders_and_blocks_of_before() -> None:
    store = WindowStore(None, 4, 4)
    holder = holder_of(store, 6)
    restore = store.save()
    late = holder_of(store, 5)
    holder.manager.reset()
    store.resize(9)
    holder.manager.start(1)
    holder.manager.reserve(6)
    restore()
    assert (store.num_blocks, store.holders, late.manager.batch) == (4, [holder], 0)
    store.blocks.check_integrity(table.ids for table in holder.manager.tables)
