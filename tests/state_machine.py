"""Random operations on caches against dense tensors.

A machine has up to three live caches: the first, and copies that go their own ways. Each has a `DenseModel`
that the same is done to. After every step the caches hold what their models say, all layers are equally long,
and no block is lost.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedModel

from hf_paged_cache import PagedCache
from hf_paged_cache.errors import (
    CacheMismatchError,
    PagedCacheError,
    PoolExhausted,
    StaleViewError,
    UnstorableValueError,
)
from hf_paged_cache.formats import kv_format
from hf_paged_cache.view import StoredKV
from tests.dense_model import DenseModel, Layout

KV_HEADS, HEAD_DIM, GROUP_SIZE = 2, 16, 8
MOST_CACHES, MOST_ROWS = 3, 6
WHOLE_BLOCKS = {"int4", "int4_group", "int8_block"}
FOUR_BIT_KEYS = {"int4", "int4_group"}


def _saved_and_loaded(one: PagedCache, make: Callable[[], PagedCache]) -> PagedCache:
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    twin = make()
    twin.load_state_dict(torch.load(file, weights_only=True))
    return twin


COPIES: dict[str, Callable[[PagedCache, Callable[[], PagedCache]], PagedCache]] = {
    "fork": lambda one, _: one.fork(),
    "deepcopy": lambda one, _: copy.deepcopy(one),
    "pickle": lambda one, _: pickle.loads(pickle.dumps(one)),
    "save": _saved_and_loaded,
}
"""Ways to make a second cache of one; the last argument makes an empty one. A fork has the same pool."""


class Feed(Enum):
    """How a forward is made."""

    BY_MODEL = auto()
    IN_A_LOOP = auto()
    """Of calls of `update`, so that nobody knows when it ends."""
    SPREAD = auto()
    """By a model, and one row becomes several."""


few_tokens = st.integers(1, 3) | st.integers(1, 3) | st.integers(1, 40)
prompt = st.integers(0, 90)
which_cache = st.integers(0, MOST_CACHES - 1)
some_layer = st.integers(0, 2)
some_rows = st.integers(1, 4)


@cache
def _bank() -> torch.Tensor:
    return torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))


@cache
def model_config(kind: str) -> Any:
    """The config of a model that is never built, with the windows of its layers."""
    shared = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 97,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": 512,
    }  # fmt: skip
    if kind == "full":
        return LlamaConfig(num_hidden_layers=2, **shared)
    if kind == "window":
        return MistralConfig(num_hidden_layers=2, sliding_window=24, **shared)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(
        num_hidden_layers=3, sliding_window=8, layer_types=layers, head_dim=HEAD_DIM, **shared
    )


WINDOWS: dict[str, tuple[int | None, ...]] = {"full": (None, None), "window": (24, 24), "mixed": (8, None, 8)}


class Interrupted(Exception):
    """What happens in the middle of a forward."""


class Feeder(PreTrainedModel):
    """Stands for a model: a cache looks for the frame of its forward to know whether that has ended."""

    def __init__(self) -> None:  # it has no parts
        pass

    def forward(
        self,
        updates: Iterator[Any],
        *,
        use_cache: bool = True,
        is_interrupted: bool = False,
    ) -> list[Any]:
        shown = list(updates)
        if is_interrupted:
            raise Interrupted
        return shown


@dataclass
class Live:
    """A cache and what it should hold.

    Attributes:
        cache: The cache.
        model: What it should hold.
        store: The same object for caches that share a pool.
        view: A view of a layer that was taken earlier, and what it showed then.
        saved: A state dict that was taken earlier, and what the cache held then.
    """

    cache: PagedCache
    model: DenseModel
    store: object
    view: tuple[torch.Tensor, torch.Tensor] | None = None
    saved: tuple[dict[str, Any], DenseModel] | None = None

    @property
    def layers(self) -> range:
        return range(len(self.model.layout.windows))


class CacheMachine(RuleBasedStateMachine):
    """Subclasses choose the format.

    Attributes:
        form: `kv_cache_dtype`.
        executed: Name of a rule -> how often its work was done, in all runs.
    """

    form: ClassVar[str] = "auto"
    executed: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Live] = []
        self.steps = 0
        self.is_sound = True

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
        names = [self.form] * len(WINDOWS[kind])
        if is_mixed:
            names[0] = "auto" if self.form == "int8" else "int8"
        quantised = {*names} - {"auto"}
        layout = Layout(
            WINDOWS[kind],
            tuple(kv_format(name, group_size=GROUP_SIZE) for name in names),
            block_size,
            bool(quantised & FOUR_BIT_KEYS) if sink_blocks is None else sink_blocks,
            bool(quantised & WHOLE_BLOCKS) if residual_blocks is None else residual_blocks,
            is_uneven,
        )
        self.make = partial(
            PagedCache,
            model_config(kind),
            block_size=block_size,
            kv_cache_dtype=self.form,
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

    @rule(which=which_cache, tokens=few_tokens, rows=some_rows, how=st.sampled_from(Feed), looked_at=some_layer)
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
        ending=st.sampled_from(["forward", "again", "by hand", "read only"]),
    )  # fmt: skip
    def abort(self, which, tokens, rows, how, reached, ending) -> None:
        """A forward fails when some layers have been updated, or was only to read."""
        one = self.chosen(which)
        keys, values = self.fresh(one, tokens, rows, how)
        reached = 1 + reached % (len(one.layers) - 1)
        only_reads = ending == "read only"
        updates = self.updates(one, keys, values, one.layers if only_reads else range(reached))
        with self.room_for(one, tokens, keys.shape[1]) as has_room:
            if only_reads:
                Feeder().forward(updates, use_cache=False)
            elif ending == "forward":
                with pytest.raises(Interrupted):
                    Feeder().forward(updates, is_interrupted=True)
            else:
                list(updates)
        if has_room:
            if ending == "again":
                with pytest.raises(CacheMismatchError, match="interrupted: it is taken back"):
                    one.cache.update(keys[0], values[0], 0)
            elif ending == "by hand":
                one.cache._state.abort_step()
            one.model.begin(tokens, keeps_history=only_reads)
            one.model.take_back()
        self.touch(f"abort: {ending}", one)

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

        with self.room_for(one, tokens, rows) as has_room, pytest.raises((Interrupted, PoolExhausted)):
            Feeder().forward(updates())
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
        other = Live(COPIES[kind](one.cache, self.make), one.model.copy(), store)
        del self.live[MOST_CACHES - 1 :]
        self.live.append(other)
        self.touch(kind, other)

    @rule(which=which_cache)
    def rewind(self, which) -> None:
        """Go back to what was saved; the first time, save."""
        one = self.chosen(which)
        if one.saved is None:
            one.saved = one.cache.state_dict(), one.model.copy()
        else:
            saved, model = one.saved
            one.model.reset()
            with self.room_for(one, model.tokens, model.batch) as has_room:
                one.cache.load_state_dict(saved)
            if has_room:
                one.model = model.copy()
            one.model.record_past = model.record_past
        self.touch("rewind", one)

    @precondition(lambda self: len(self.live) > 1)
    @rule(which=which_cache)
    def drop(self, which) -> None:
        del self.live[which % len(self.live)]
        self.touch("drop", self.live[0])

    @precondition(lambda self: self.live and self.form == "auto")
    @rule(which=which_cache, layer=some_layer)
    def read_later(self, which, layer) -> None:
        """What a view shows is what it stood for when it was made, or it says that it cannot."""
        one = self.chosen(which)
        if one.view is not None:
            view, content = one.view
            try:
                assert torch.equal(view, content)
            except StaleViewError:
                self.executed["stale view"] += 1
        layer, state = layer % len(one.layers), one.cache._state
        one.view = None
        if one.model.batch and one.model.layout.formats[layer] is None:
            first = one.model.first_visible(layer, one.model.tokens)
            # Another one than `layer.keys`, which would be made dense by whoever reads those next.
            stored = StoredKV(state, state.blocks[layer], layer, first, one.model.tokens)
            one.view = stored.views()[0], one.model.visible(layer)[0].clone()
        self.touch("read_later", one)

    # --- what rules share -----------------------------------------------------------------------------------

    def feed(
        self, one: Live, tokens: int, rows: int, how: Feed = Feed.BY_MODEL, looked_at: int = 0
    ) -> None:
        """A forward of so many tokens, or none; `rows` counts where there are none yet."""
        if not tokens:
            return
        keys, values = self.fresh(one, tokens, rows, how)
        batch = keys.shape[1]
        shown: list[Any] = []
        with self.room_for(one, tokens, batch) as has_room:
            updates = self.updates(one, keys, values, one.layers, looked_at % len(one.layers))
            shown = list(updates) if how is Feed.IN_A_LOOP else Feeder().forward(updates)
        if not has_room:
            self.touch("no room", one)
            if not one.model.batch and rows > 1:
                self.feed(one, 1 + tokens // 2, 1)
            return
        history = one.model.tokens
        if batch != one.model.batch:
            one.model.reorder([0] * batch)
        one.model.begin(tokens)
        one.model.write(keys, values)
        self.touch("update", one)
        layer = looked_at % len(one.layers)
        first = one.model.first_visible(layer, history)
        for got, side, new in zip(shown[layer], one.model.sides, (keys, values), strict=True):
            # The history that the first new query sees, and new tokens as they came.
            assert torch.equal(got, torch.cat((side[layer][:, :, first:history], new[layer]), 2))

    def updates(
        self, one: Live, keys: torch.Tensor, values: torch.Tensor, layers: range, looked_at: int | None = None
    ) -> Iterator[Any]:
        """Update layers one after the other, and look at once at what one of them shows."""
        for layer in layers:
            shown = one.cache.update(keys[layer], values[layer], layer)
            yield [view.clone() for view in shown] if layer == looked_at else None

    # --- after every step -----------------------------------------------------------------------------------

    def chosen(self, which: int) -> Live:
        return self.live[which % len(self.live)]

    def fresh(
        self, one: Live, tokens: int, rows: int, how: Feed = Feed.BY_MODEL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New K and V for all layers, `[layers, rows, kv_heads, tokens, head_dim]`, as a model lays them out."""
        batch = one.model.batch
        if not batch or (batch == 1 and how is Feed.SPREAD):
            batch = rows
        shape = len(one.layers), batch, tokens, KV_HEADS, HEAD_DIM
        count = shape[0] * shape[1] * shape[2] * KV_HEADS * HEAD_DIM
        sides = []
        for side in range(2):
            start = (self.steps * 7919 + side * 500_009) % (_bank().numel() - count)
            sides.append(_bank()[start : start + count].view(shape).transpose(2, 3).to(self.dtype))
        if self.is_uneven:  # a channel in which all keys are alike and large
            sides[0] = sides[0] + (torch.arange(HEAD_DIM) == 3).to(self.dtype) * 60
        return sides[0], sides[1]

    @contextmanager
    def room_for(self, one: Live, tokens: int, rows: int) -> Iterator[list[bool]]:
        """Take PoolExhausted for an answer where there may be too little room. True in the list: there was."""
        has_room: list[bool] = []
        free = one.cache.stats().free_blocks
        try:
            yield has_room
        except PoolExhausted as error:
            assert error.needed_blocks > error.free_blocks
            assert not self.must_fit(one, tokens, rows)
            assert free <= one.cache.stats().free_blocks
        else:
            has_room.append(True)

    def must_fit(self, one: Live, tokens: int, rows: int) -> bool:
        """Whether all rows of a pool would have room even if they shared no block."""
        size, needed = one.model.layout.block_size, 0
        for other in self.live:
            if other.store is one.store:
                batch, length = other.model.batch, other.model.tokens
                if other is one:
                    batch, length = max(rows, batch), length + tokens
                needed += batch * -(-length // size)
        return needed <= self.max_tokens // size

    def touch(self, name: str, one: Live) -> None:
        """Check all caches after a step on one."""
        self.executed[name] += 1
        self.steps += 1
        self.check(one)

    def check(self, touched: Live | None = None) -> None:
        """The cache that was touched is compared whole, of the others a layer in turn."""
        self.is_sound = False
        for one in self.live:
            one.cache.check_integrity()
            stats, model = one.cache.stats(), one.model
            assert (stats.batch, stats.tokens) == (model.batch, model.tokens)
            assert stats.used_blocks + stats.free_blocks == stats.num_blocks
            assert {one.cache.get_seq_length(layer) for layer in one.layers} == {model.tokens}
            layers = one.layers if one is touched else [self.steps % len(one.layers)]
            for layer in layers if model.batch else ():
                self.check_layer(one, layer)
            if not model.batch:
                assert stats.used_blocks == 0 or one.store in [x.store for x in self.live if x is not one]
                assert all(layer.keys is None and layer.values is None for layer in one.cache.layers)
        self.is_sound = True

    def check_layer(self, one: Live, layer: int) -> None:
        held = one.cache.layers[layer]
        if one.model.layout.windows[layer] is None:
            keys, values = held.keys, held.values
            one.model.check_layer(layer, keys.dense(), values.dense())
            return
        state = one.cache._state
        whole = StoredKV(state, state.blocks[layer], layer, 0, one.model.tokens)
        one.model.check_layer(layer, *whole.dense())
        keys, values = held.keys, held.values
        for got, want in zip((keys, values), one.model.visible(layer), strict=True):
            assert torch.equal(got.dense(), want)

    def teardown(self) -> None:
        """When the last cache of a pool is gone, all blocks are there again."""
        sections = [group.section for one in self.live for group in one.cache._state.groups]
        self.live = []
        if not self.is_sound:
            return  # a failure holds caches alive
        for _ in range(2):
            for section in sections:
                section.collect()
            if not any(section.blocks.num_referenced for section in sections):
                break
            gc.collect()
        for section in sections:
            section.blocks.check_integrity([])
            assert section.blocks.num_free == section.blocks.num_blocks


def spoilt(keys: torch.Tensor, values: torch.Tensor, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that no layer takes."""
    if fault == "dtype":
        return keys, values.double()
    if fault == "lengths":
        return keys, torch.cat((values, values), 2)
    if fault == "rows":
        return torch.cat((keys, keys)), torch.cat((values, values))
    if fault == "heads":
        return keys[..., :-1, :, :], values[..., :-1, :, :]
    if fault == "none":
        return keys[:, :, :0], values[:, :, :0]
    keys, values = keys.clone(), values.clone()
    (keys if values.shape[2] % 2 else values)[-1, -1, -1, -1] = torch.nan
    return keys, values
