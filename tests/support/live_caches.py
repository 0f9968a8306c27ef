"""Live caches with what they should hold: what random operations on them have in common."""

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
from functools import cache
from typing import Any, ClassVar

import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedModel

from hf_paged_cache import PagedCache
from hf_paged_cache.attention.view import StoredKV
from hf_paged_cache.errors import PoolExhausted
from tests.support.dense_model import DenseModel

KV_HEADS, HEAD_DIM, GROUP_SIZE = 2, 16, 8
MOST_CACHES, MOST_ROWS = 3, 6


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
    """Stands for a model: a cache looks for the frame of its forward to know whether that has ended.

    It is called, as models are: `use_cache=False` counts only where it shows that somebody said it.
    """

    def __init__(self) -> None:
        super().__init__(model_config("full"))

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


class LiveCaches:
    """Up to `MOST_CACHES` of them.

    Attributes:
        executed: Name of a step -> how often it was made, in all runs.
        live: The caches.
        feeder: The model that all of them belong to.
        steps: Steps of this run.
        dtype: Of K and V.
        max_tokens: Of every pool.
        is_uneven: Keys have a channel in which they are alike and large.
    """

    executed: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Live] = []
        self.feeder = Feeder()
        self.steps = 0
        self.dtype = torch.float32
        self.max_tokens = 0
        self.is_uneven = False
        self._is_sound = True

    # --- forwards -------------------------------------------------------------------------------------------

    def feed(self, one: Live, tokens: int, rows: int, how: Feed = Feed.BY_MODEL, looked_at: int = 0) -> None:
        """A forward of so many tokens, or none; `rows` counts where there are none yet."""
        if not tokens:
            return
        keys, values = self.fresh(one, tokens, rows, how)
        batch = keys.shape[1]
        shown: list[Any] = []
        with self.room_for(one, tokens, batch) as has_room:
            updates = self.updates(one, keys, values, one.layers, looked_at % len(one.layers))
            shown = list(updates) if how is Feed.IN_A_LOOP else self.feeder(updates)
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
        """The cache that a step is about; from now on until `check`, a failure leaves things half done."""
        self._is_sound = False
        return self.live[which % len(self.live)]

    def fresh(
        self, one: Live, tokens: int, rows: int, how: Feed = Feed.BY_MODEL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New K and V for all layers, `[layers, rows, kv_heads, tokens, head_dim]`."""
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
        """Take PoolExhausted for an answer where rows may not fit. The list is empty then."""
        has_room: list[bool] = []
        used, needed = one.cache.stats().used_blocks, (0, 0)
        try:
            yield has_room
            has_room.append(True)
        except PoolExhausted as error:
            needed = error.needed_blocks, error.free_blocks
        if not has_room:
            assert needed[0] > needed[1]
            assert not self.must_fit(one, tokens, rows)
            assert one.cache.stats().used_blocks <= used, "what was refused takes no block"

    def must_fit(self, one: Live, tokens: int, rows: int) -> bool:
        """Whether all rows of a pool would have room even if they shared no block."""
        held = [(max(rows, one.model.batch), one.model.tokens + tokens)]
        held += [
            (other.model.batch, other.model.tokens)
            for other in self.live
            if other.store is one.store and other is not one
        ]
        return all(
            sum(batch * -(-length // size) for batch, length in held) <= self.max_tokens // size
            for size, _, _ in one.model.layout.blocks.values()
        )

    def touch(self, name: str, one: Live) -> None:
        """Check all caches after a step on one."""
        self.executed[name] += 1
        self.steps += 1
        self.check(one)

    def check(self, touched: Live | None = None) -> None:
        """The cache that was touched is compared whole, of the others a layer in turn."""
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
            if one.view is None:
                self.take_view(one)
        self._is_sound = True

    def take_view(self, one: Live) -> None:
        """A view of a layer, to be read by and by."""
        layer, model, state = self.steps % len(one.layers), one.model, one.cache._state
        if model.batch and model.layout.formats[layer] is None:
            # Another one than `layer.keys`, which would be made dense by whoever reads those next.
            first = model.first_visible(layer, model.tokens)
            stored = StoredKV(state, state.blocks[layer], layer, first, model.tokens)
            one.view = stored.views()[0], model.visible(layer)[0].clone()

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
        stores = [group.store for one in self.live for group in one.cache._state.groups]
        self.live = []
        if not self._is_sound:
            return  # what failed holds caches alive
        for _ in range(2):
            for store in stores:
                store.collect()
            if not any(store.blocks.num_referenced for store in stores):
                break
            gc.collect()
        for store in stores:
            store.blocks.check_integrity([])
            assert store.blocks.num_free == store.blocks.num_blocks


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
