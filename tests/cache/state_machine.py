"""Random operations on caches against dense tensors.

A machine has up to three live caches: the first, and copies that go their own ways. Each has a `DenseModel`
that the same is done to. After every step the caches hold what their models say, all layers are equally long,
and no block is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, StaleViewError, UnstorableValueError
from hf_paged_cache.formats import kv_format
from tests.support.dense_model import Blocks, DenseModel, Layout
from tests.support.live_caches import (  # fmt: skip
    COPIES,
    GROUP_SIZE,
    MOST_CACHES,
    MOST_ROWS,
    WINDOWS,
    Feed,
    Interrupted,
    Live,
    LiveCaches,
    model_config,
    spoilt,
)

WHOLE_BLOCKS = {"int4", "int4_group", "int8_block"}
FOUR_BIT_KEYS = {"int4", "int4_group"}

few_tokens = st.integers(1, 3) | st.integers(1, 3) | st.integers(1, 40)
prompt = st.integers(0, 90)
which_cache = st.integers(0, MOST_CACHES - 1)
some_layer = st.integers(0, 2)
some_rows = st.integers(1, 4)


class CacheMachine(LiveCaches, RuleBasedStateMachine):
    """Subclasses choose the format.

    Attributes:
        format_name: `kv_cache_dtype`.
    """

    format_name: ClassVar[str] = "auto"

    @initialize(
        kind=st.sampled_from(list(WINDOWS)),
        block_size=st.sampled_from([16, 16, 32]),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        max_tokens=st.sampled_from([150, 500, 3000]),
        sink_blocks=st.none() | st.integers(0, 2),
        residual_blocks=st.none() | st.integers(1, 2),
        is_mixed=st.booleans(),
        is_uneven=st.booleans(),
        tokens=prompt,
        rows=some_rows,
    )
    def begin(
        self, kind, block_size, dtype, max_tokens, sink_blocks, residual_blocks, is_mixed, is_uneven, tokens,
        rows,
    ) -> None:  # fmt: skip
        names = [self.format_name] * len(WINDOWS[kind])
        if is_mixed:
            names[0] = "auto" if self.format_name == "int8" else "int8"
        quantized = {*names} - {"auto"}
        blocks = {}
        for window in dict.fromkeys(WINDOWS[kind]):
            size = block_size if window is None else 16  # the smallest, for windows as short as these
            sinks, residual = (
                int(bool(quantized & keep)) if given is None else given * block_size // size
                for given, keep in ((sink_blocks, FOUR_BIT_KEYS), (residual_blocks, WHOLE_BLOCKS))
            )
            blocks[window] = Blocks(size, sinks, residual)
        formats = tuple(kv_format(name, group_size=GROUP_SIZE) for name in names)
        layout = Layout(WINDOWS[kind], formats, blocks, is_uneven)
        self.make = partial(
            PagedCache,
            model_config(kind),
            block_size=block_size,
            kv_cache_dtype=self.format_name,
            max_tokens=max_tokens,
            group_size=GROUP_SIZE,
            layer_dtypes={0: names[0]},
            sink_tokens=None if sink_blocks is None else sink_blocks * block_size,
            residual_length=None if residual_blocks is None else residual_blocks * block_size,
            key_error_guard="on" if is_uneven else "off",
        )
        self.dtype, self.max_tokens, self.is_uneven = dtype, max_tokens, is_uneven
        self.live = [Live(self.make(), DenseModel(layout), object())]
        self.feed(self.live[0], tokens, rows)

    # --- forwards -------------------------------------------------------------------------------------------

    @rule(
        which=which_cache, tokens=few_tokens, rows=some_rows, how=st.sampled_from(Feed), looked_at=some_layer
    )
    def update(self, which, tokens, rows, how, looked_at) -> None:
        self.feed(self.chosen(which), tokens, rows, how, looked_at)

    @rule(which=which_cache, rows=some_rows, looked_at=some_layer)
    def decode(self, which, rows, looked_at) -> None:
        self.feed(self.chosen(which), 1, rows, looked_at=looked_at)

    @rule(which=which_cache, tokens=prompt, rows=some_rows, how=st.sampled_from(Feed))
    def extend(self, which, tokens, rows, how) -> None:
        """A longer part of a prompt."""
        self.feed(self.chosen(which), max(1, tokens), rows, how)

    @rule(
        which=which_cache, tokens=few_tokens, rows=some_rows, how=st.sampled_from(Feed), reached=some_layer,
        ending=st.sampled_from(["forward", "again", "by hand"]),
    )  # fmt: skip
    def abort(self, which, tokens, rows, how, reached, ending) -> None:
        """A forward fails when some layers have been updated."""
        one = self.chosen(which)
        keys, values = self.fresh(one, tokens, rows, how)
        reached = 1 + reached % (len(one.layers) - 1)
        updates = self.updates(one, keys, values, range(reached))
        with self.room_for(one, tokens, keys.shape[1]) as has_room:
            if ending == "forward":
                with pytest.raises(Interrupted):
                    self.feeder(updates, is_interrupted=True)
            else:
                list(updates)
        if has_room:
            if ending == "again":
                with pytest.raises(CacheMismatchError, match="interrupted: it is taken back"):
                    one.cache.update(keys[0], values[0], 0)
            elif ending == "by hand":
                one.cache._state.abort_step()
            one.model.begin(tokens)
            one.model.take_back()
        self.touch(f"abort: {ending}", one)

    @rule(which=which_cache, tokens=few_tokens, rows=some_rows, how=st.sampled_from(Feed))
    def peek(self, which, tokens, rows, how) -> None:
        """A forward with `use_cache=False` writes nothing for good."""
        one = self.chosen(which)
        keys, values = self.fresh(one, tokens, rows, how)
        with self.room_for(one, tokens, keys.shape[1]) as has_room:
            self.feeder(self.updates(one, keys, values, one.layers), use_cache=False)
        if has_room:
            one.model.begin(tokens, keeps_history=True)
            one.model.take_back()
        self.touch("peek", one)

    @rule(
        which=which_cache, rows=some_rows, reached=some_layer, tokens=few_tokens,
        fault=st.sampled_from(["nan", "dtype", "lengths", "rows", "heads", "none"]),
    )  # fmt: skip
    def spoil(self, which, tokens, rows, reached, fault) -> None:
        """A layer is given what it cannot take."""
        one = self.chosen(which)
        reached %= len(one.layers)
        keys, values = self.fresh(one, tokens, rows)
        if fault == "nan" and one.model.layout.formats[reached] is None:
            fault = "dtype"
        if (fault == "rows" and one.model.batch < 2 and not reached) or (
            fault == "heads" and not one.cache.layers[reached].is_initialized
        ):
            fault = "lengths"  # of a first layer nothing is known yet, and one row can become many
        bad = spoilt(keys[reached], values[reached], fault)
        error = UnstorableValueError if fault == "nan" else CacheMismatchError

        def updates() -> Iterator[Any]:
            yield from self.updates(one, keys, values, range(reached))
            with pytest.raises(error):
                one.cache.update(*bad, reached)
            raise Interrupted

        with self.room_for(one, tokens, rows) as has_room, pytest.raises(Interrupted):
            self.feeder(updates())
        if has_room and (reached or fault == "nan"):
            one.model.begin(tokens)
            one.model.take_back()
        self.touch("spoil", one)

    # --- between forwards -----------------------------------------------------------------------------------

    @rule(which=which_cache, count=st.just(0) | st.integers(1, 3) | st.integers(1, 50))
    def crop(self, which, count) -> None:
        one = self.chosen(which)
        if one.model.can_crop(count):
            one.cache.crop(-count)
            one.model.crop(count)
        else:
            with pytest.raises(PagedCacheError, match="activate_past_recording"):
                one.cache.crop(-count)
        self.touch("crop", one)

    @rule(which=which_cache, beyond=st.integers(0, 2), tokens=prompt, rows=some_rows)
    def crop_to_nothing(self, which, beyond, tokens, rows) -> None:
        """All is taken back, and mostly another prompt follows."""
        one = self.chosen(which)
        count = one.model.tokens + beyond
        one.cache.crop(-count)
        one.model.crop(count)
        self.touch("crop_to_nothing", one)
        self.feed(one, tokens, rows)

    @rule(which=which_cache, chosen=st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=4))
    def reorder(self, which, chosen) -> None:
        one = self.chosen(which)
        rows = [row % max(1, one.model.batch) for row in chosen]
        one.cache.reorder_cache(torch.tensor(rows))
        one.model.reorder(rows)
        self.touch("reorder", one)

    @rule(which=which_cache, chosen=st.lists(st.booleans(), min_size=MOST_ROWS, max_size=MOST_ROWS))
    def select(self, which, chosen) -> None:
        """Keep some rows, by a mask or by their numbers, of which some count from the end."""
        one = self.chosen(which)
        mask = torch.tensor(chosen[: one.model.batch], dtype=torch.bool)
        rows = mask.nonzero().flatten().tolist()
        if one.model.batch and not rows:
            for nothing in (mask, torch.tensor([], dtype=torch.long)):
                with pytest.raises(PagedCacheError, match="row indices must be a non-empty selection"):
                    one.cache.batch_select_indices(nothing)
        elif chosen[-1]:
            one.cache.batch_select_indices(mask)
            one.model.reorder(rows)
        else:
            one.cache.batch_select_indices(torch.tensor(rows[::-1]) - one.model.batch)
            one.model.reorder(rows[::-1])
        self.touch("select", one)

    @rule(which=which_cache, repeats=st.integers(1, 3))
    def repeat(self, which, repeats) -> None:
        one = self.chosen(which)
        batch = one.model.batch
        if batch * repeats <= MOST_ROWS:
            one.cache.batch_repeat_interleave(repeats)
            one.model.reorder([row for row in range(batch) for _ in range(repeats)])
        else:
            with pytest.raises(PagedCacheError, match="row indices must be"):
                one.cache.reorder_cache(torch.tensor([0, batch]))
        self.touch("repeat", one)

    @rule(which=which_cache, tokens=prompt, rows=some_rows)
    def reset(self, which, tokens, rows) -> None:
        """The same, by a reset."""
        one = self.chosen(which)
        one.cache.reset()
        one.model.reset()
        self.touch("reset", one)
        self.feed(one, tokens, rows)

    @rule(which=which_cache)
    def record_past(self, which) -> None:
        one = self.chosen(which)
        one.cache.activate_past_recording()
        one.model.record_past = any(one.model.layout.windows)
        self.touch("record_past", one)

    # --- several caches -------------------------------------------------------------------------------------

    @rule(which=which_cache, kind=st.sampled_from(["fork", "fork", *COPIES]))
    def twin(self, which, kind) -> None:
        """A copy that goes its own way; where there are many, in the place of the last."""
        one = self.chosen(which)
        store = one.store if kind == "fork" else object()
        # A pool of its own may be smaller than one that was made larger for several caches.
        there = Live(one.cache, DenseModel(one.model.layout), store)
        with self.room_for(there, one.model.tokens, one.model.batch) as has_room:
            made = COPIES[kind](one.cache, self.make)
        if has_room:
            other = Live(made, one.model.copy(), store)
            del self.live[MOST_CACHES - 1 :]
            self.live.append(other)
        del one, there  # what was replaced has to be gone when blocks are counted
        self.touch(kind, self.live[-1])

    @rule(which=which_cache)
    def rewind(self, which) -> None:
        """Go back to what was saved; the first time, save."""
        one = self.chosen(which)
        if one.saved is None:
            one.saved = one.cache.state_dict(), one.model.copy()
        else:
            saved, model = one.saved
            # It takes another pool where this one has no room.
            there = Live(one.cache, DenseModel(model.layout), object())
            with self.room_for(there, model.tokens, model.batch) as has_room:
                one.cache.load_state_dict(saved)
            if has_room:
                one.model = model.copy()
        self.touch("rewind", one)

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=which_cache)
    def drop(self, which) -> None:
        del self.live[which % len(self.live)]
        self.touch("drop", self.live[0])

    @precondition(lambda self: self.live and self.format_name == "auto")
    @rule(which=which_cache)
    def read_later(self, which) -> None:
        """What a view shows is what it stood for when it was made, or it says that it cannot."""
        one = self.chosen(which)
        if one.view is not None:
            view, content = one.view
            with suppress(StaleViewError):
                assert torch.equal(view, content)
        one.view = None
        self.touch("read_later", one)
