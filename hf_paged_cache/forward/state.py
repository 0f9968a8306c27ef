"""What all layers of one cache share: rows, token counts, groups, and the step that a forward makes.

A forward brings the same new tokens to every layer, one layer after the other. The first layer to get them
opens the step: blocks are reserved in every group, or nothing happens at all. The others then only write.

```
            layer 0   layer 1   layer 2
step_end  ─ written   written   ·           <- tokens [step_start, step_end) are reserved everywhere
step_start─ written   written   written
```

A step is over when all layers have joined. One that stays open after its forward has ended (an exception, or
`use_cache=False`) is taken back by whoever looks next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from hf_paged_cache.config import LayerSpec, PagedCacheConfig
from hf_paged_cache.errors import CacheMismatchError, PagedCacheError, PoolExhausted
from hf_paged_cache.host import running_forward
from hf_paged_cache.host.frames import Place
from hf_paged_cache.host.running_forward import ModelCall
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.call import LayerBlocks
from hf_paged_cache.store import static_group
from hf_paged_cache.store.layer_group import LayerGroup
from hf_paged_cache.store.layer_groups import LayerGroups
from hf_paged_cache.store.saved import SavedCache
from hf_paged_cache.store.store import Restore, Saved

from .equal_rows import Twins
from .left_padding import NO_PADDING, Forward, NotedMask, Padding
from .ownership import Owner, Weights, check_prompt, owner_after
from .step import Step
from .token_ids import TokenHistory
from .undo import Undo
from .usage import Usage

_NO_NEW_TOKENS = (
    "layer {layer}: no new tokens. The cache already holds {held} tokens per row, and the prompt has no more "
    "than that; pass a longer prompt, `cache.crop(...)` what differs, or `cache.reset()`"
)


_T = TypeVar("_T")


class Parts(Protocol):
    """What a cache holds beside blocks, and moves with them."""

    def save(self) -> Restore:
        """Remember what they are. Returns what puts that back."""

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows."""

    def clear(self) -> None:
        """Make them as they were at first."""


class CacheState:
    """The shared part of a cache. Layers hold it; it holds no layer.

    Attributes:
        config: Settings.
        batch: Rows, or 0 before the first update and after a reset.
        tokens: Layer index -> tokens that this layer holds of every row, in the order of writing.
        step_start: Tokens stored before the step in progress (or the last one).
        step_end: Tokens stored when that step is complete.
        history: Ids of the stored tokens, as far as they are known.
        record_past: Window layers keep what they would drop, so that `crop` can bring it back.
        is_encoder_decoder: The model has an encoder, so that this may be the cache of its cross-attention.
        has_masks: Somebody has asked how long masks have to be, as nobody does for cross-attention.
        undo: What a step in progress has changed outside the blocks.
        has_outside_state: The model keeps a recurrent state in itself, where nobody can take it back.
        is_lost: A forward failed after such a state had moved on; only a reset helps.
        chunk_fault: Why the model cannot take several new tokens at once after a history; None if it can.
        is_attended: Tells whether attention of this package reads the cache now.
        can_be_static: Whether the model's layers and the settings allow compiled steps.
        has_open_step: Some layer of static rows has yet to join the step in progress.
        padding: What is remembered of tokens that masks hide.
        gradients_from: First stored token whose K or V wanted a gradient when it came; None if there is none.
        owner: Whose weights computed what is stored; None if that is not known.
        equal_rows: Rows of prompts so far that were stored by reference to an equal one.
    """

    def __init__(
        self, config: PagedCacheConfig, specs: dict[int, LayerSpec], max_positions: int | None
    ) -> None:
        self.config = config
        self.batch = 0
        self.tokens = dict.fromkeys(specs, 0)
        self.step_start = 0
        self.step_end = 0
        self.history = TokenHistory()
        self.record_past = False
        self.is_encoder_decoder = False
        self.has_masks = False
        self.undo = Undo()
        self.chunk_fault: str | None = None
        self.has_outside_state = False
        self.is_lost = False
        self.is_attended: Callable[[], bool] = lambda: False
        self.can_be_static = False
        self.has_open_step = False
        self.padding = NO_PADDING
        self.gradients_from: int | None = None
        self.equal_rows = 0
        self.owner: Owner | None = None
        self._noted: NotedMask | None = None
        self._groups = LayerGroups(config, specs, max_positions)
        self._last_written: int | None = None
        self._step: Step | None = None  # that is in progress, or was when somebody last looked
        self._twins = Twins()
        self._spread: tuple[int, Place] | None = None  # rows before a forward spread them over more, and that
        self._root: Place | None = None  # the call of the host that the last step was part of
        self._usage = Usage()

    @property
    def groups(self) -> list[LayerGroup]:
        """The groups, in the order of their first layers; empty before the first update."""
        return self._groups.all

    @property
    def blocks(self) -> dict[int, LayerBlocks]:
        """Layer index -> where its K and V lie; filled as layers get their first."""
        return self._groups.blocks

    @property
    def is_static(self) -> bool:
        """Whether steps can be compiled: every row has its blocks from the start.

        Then `tokens`, `step_start` and `step_end` are what they were at the last `pull`.
        """
        return self._groups.is_static

    @property
    def row_capacity_tokens(self) -> int:
        """Tokens that a static row can hold."""
        return self._groups.row_capacity_tokens

    def group_of(self, layer_idx: int) -> LayerGroup:
        """The group that a layer belongs to (only after the first update)."""
        return self._groups.of(layer_idx)

    def layer_dtypes(self) -> dict[int, str]:
        """Layer index -> name of the format that it is stored in now."""
        return self._groups.layer_dtypes()

    # --- the step -------------------------------------------------------------------------------------------

    def begin_step(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Reserve room for the new tokens in every group, all or nothing.

        Raises:
            CacheMismatchError: The layers do not advance together, another thread uses the cache, or the mask
                shows what was hidden, or positions of rows with hidden tokens do not go on.
            PoolExhausted: Too few blocks. Nothing was written, nothing changed.
            QuantizationError: The guard found K of a layer unfit for its format. Nothing changed.
            UnstorableValueError: An earlier step gave a quantized layer on a GPU what cannot be stored.
        """
        call = None if torch.compiler.is_compiling() else running_forward.current()
        self.take(call)
        start, new_tokens = self.tokens[layer_idx], key_states.shape[2]
        self.check_lost()
        if new_tokens == 0:
            raise CacheMismatchError(_NO_NEW_TOKENS.format(layer=layer_idx, held=start))
        self._check_in_step(layer_idx, start, new_tokens)
        self.check_chunk(new_tokens, is_warm=start > 0)
        is_read_only = call is not None and call.use_cache is False and not self._is_cross
        if is_read_only and call is not None:
            self.check_reading(call, is_warm=start > 0)
        if call is not None and self._is_new(call):
            if start and call.is_generating and self.is_encoder_decoder and not self._is_cross:
                self.history.check_restart(call.input_ids)
            self._enter(call, start)
        noted, self._noted = self._noted, None  # of this forward alone, also if it is refused
        before = self._step
        try:
            padding = self._padding_after(start, key_states, call, noted)
            if not self.batch:
                # Alone: what the change that opens rows could bring back is not free for their pools.
                self.change(partial(self._groups.adapt, new_tokens))
            self.change(partial(self._begin, start, key_states, value_states, call, padding, is_read_only))
        except BaseException:
            self._groups.store.recover()
            if self._step is before:
                self.take_back_outside()
            else:  # it is open: an interrupt came after the change
                self.abort_step()
            raise

    def _begin(
        self,
        start: int,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        call: ModelCall | None,
        padding: Padding,
        is_read_only: bool,
    ) -> None:
        keep_history = self.record_past or is_read_only
        self._reserve(start, key_states, value_states, padding, keep_history=keep_history)
        before, self.padding = self.padding, padding
        self.step_start, self.step_end = start, start + key_states.shape[2]
        self.has_open_step = self.is_static
        self._twins.begin(self.batch if not start and not self.is_static else 0)
        self._step = Step(None if call is None else call.forward, len(self.tokens), is_read_only, before)
        if call is None or not call.is_generating:
            self.history.forget_prompt()
        self.history.feed(start, self.step_end, self.batch, None if call is None else call.input_ids)
        self._groups.set_step(self._step)

    def join_step(self, layer_idx: int) -> None:
        """Let a layer write to the step in progress.

        Somebody may go on with a step whose forward has failed, as cross-attention does. Until then other
        caches of the pool could replace its tensors, and from now on they cannot.
        """
        step = self._step
        if step is None or not self.group_of(layer_idx).section.is_shared or not step.is_over:
            return

        def make() -> None:
            step.forward = running_forward.current().forward
            for group in self.groups:
                group.bind_again()

        self.change(make)

    def check_reader(self, layer_idx: int) -> None:
        """Look whose weights read, where no update comes before: cross-attention reads what it once wrote.

        Raises:
            CacheMismatchError: Other weights computed it.
        """
        if self._is_cross and layer_idx == next(iter(self.tokens)) and not torch.compiler.is_compiling():
            call = running_forward.current()
            if self._is_new(call):
                self._enter(call, self.step_end)

    def check_before_layers(self) -> None:
        """Look whose weights read before a layer of theirs has run, if that may write to its buffers.

        Raises:
            CacheMismatchError: Other weights computed what is cached.
        """
        may_write = self.owner is None or (isinstance(self.owner, Weights) and self.owner.has_buffers)
        if may_write and not self.is_encoder_decoder:
            call = running_forward.current()
            if call.root.frame is not None and self._is_new(call):
                self._enter(call, self.step_end)

    def check_prompt_of(self, model: torch.nn.Module | None) -> None:
        """Raise CacheMismatchError if a model is about to go on with what other weights computed."""
        check_prompt(self.owner, model, self.step_end)

    def _is_new(self, call: ModelCall) -> bool:
        """Whether another call of the host has come than the last one; models of others do not tell."""
        return call.root.frame is None or call.root != self._root

    def _enter(self, call: ModelCall, tokens: int) -> None:
        try:
            self.owner = owner_after(self.owner, call, tokens)
        except CacheMismatchError:
            self.take_back_outside()
            raise
        self._root = call.root

    @staticmethod
    def check_reading(call: ModelCall, *, is_warm: bool) -> None:
        """Raise PagedCacheError if `generate` was told not to use a cache that holds something."""
        if call.use_cache is False and call.is_generating and is_warm:
            raise PagedCacheError(
                "generate(use_cache=False) would feed the whole text at every step, on top of what the cache "
                "holds. Leave `use_cache` away, or pass `cache.frozen()` to generate without changing this "
                "cache"
            )

    def check_lost(self) -> None:
        """Raise CacheMismatchError if a forward has moved states on that nobody can take back."""
        if self.is_lost:
            raise CacheMismatchError(
                "a forward failed, or was only to read, after recurrent states had moved on that this model "
                "keeps in itself, or rows were copied over each other (compile=True) and that was "
                "interrupted: nobody can take that back; call `cache.reset()` and start from the "
                "prompt"
            )

    def take(self, call: ModelCall | None) -> None:
        """Let this thread use the cache, and see to what an ended forward has left.

        Raises:
            CacheMismatchError: Another thread is using it.
        """
        with self._groups.store.lock:
            self._usage.take(call, is_open=self.is_open)
        self.settle()

    def check_thread(self) -> None:
        """Raise CacheMismatchError if another thread is using the cache."""
        self._usage.check(is_open=self.is_open)

    def change(self, make: Callable[[], _T], parts: Parts | None = None) -> _T:
        """Make a change to rows and blocks, all of it or none; see `Store.change`.

        Args:
            make: The change.
            parts: What else it touches.
        """
        return self._groups.store.change(partial(self._save, parts), make)

    def _save(self, parts: Parts | None) -> Saved:
        attributes, tokens, history = dict(vars(self)), dict(self.tokens), self.history.save()
        groups, restore_parts = self._groups.save(), None if parts is None else parts.save()

        def restore() -> None:
            vars(self).update(attributes | {"tokens": dict(tokens)})
            history()
            groups.restore()
            if restore_parts is not None:
                restore_parts()

        return Saved(restore, groups.follow)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing that `settle` would have to look at."""
        return self._step is None and self._spread is None and not self._groups.store.is_torn

    def settle(self) -> None:
        """See to what an interrupted change and an ended forward have left.

        A forward that has returned counts, also if it did not reach every layer. One that an exception left
        before that, or that was only to read, is taken back.

        Raises:
            CacheMismatchError: Nobody can say which of both it was.
        """
        self._groups.store.recover()
        step = self._step
        if step is None:
            if self._spread is not None and not self._spread[1].is_running():
                self.give_back_rows()
            return
        if not step.is_over or self._is_cross:
            return  # for cross-attention: what is written is whole, and the host has noted which layers are
        if step.is_read_only:
            self.abort_step()
        elif step.missing:
            has_returned = step.forward.has_returned() if step.forward is not None else None
            if has_returned is None:
                raise CacheMismatchError(
                    f"the last forward did not reach {step.missing} of the layers, and it cannot be told "
                    "whether it was to end there or failed. Call `cache.reset()`, and start from the prompt"
                )
            if not has_returned:
                self.abort_step()
        self._close_step()

    def note_mask(self, start: int, new_tokens: int, mask: torch.Tensor | None) -> None:
        """Hear of the mask of a forward before any layer runs.

        Args:
            start: Tokens per row before it.
            new_tokens: That it brings.
            mask: `[batch, tokens]`, nonzero where a token is real; None if all are.

        Raises:
            CacheMismatchError: It shows padding that is not stored.
        """
        noted, self._noted = NotedMask(start, new_tokens, mask), None
        if start and self.padding.tokens:
            self.padding.check_mask(noted, running_forward.current())
        self._noted = noted

    def check_static_room(self, tokens: int) -> None:
        """Raise PoolExhausted if static rows cannot have so many tokens."""
        if tokens > self.row_capacity_tokens:
            raise self._groups.no_static_room(tokens, self.row_capacity_tokens, self.batch)

    def check_chunk(self, new_tokens: int, *, is_warm: bool) -> None:
        """Raise CacheMismatchError if the model goes wrong with so many new tokens after a history."""
        if self.chunk_fault is not None and new_tokens > 1 and is_warm:
            raise CacheMismatchError(
                f"{new_tokens} new tokens came, and the cache holds a history: {self.chunk_fault}. Feed the "
                "new tokens one at a time, or call `cache.reset()` and feed everything from the start; "
                "nothing was written"
            )

    def pull(self) -> None:
        """Learn how far compiled steps have come; waits for the device. Nothing to do without static rows.

        Raises:
            PoolExhausted: They went on when rows were full, so their last results are no numbers.
        """
        if not (self.is_static and self.batch):
            return
        length = self._groups.pull_length()
        if length != self.step_end:
            self.tokens = {
                index: length if count == self.step_end else count for index, count in self.tokens.items()
            }
            self.step_start = self.step_end = length
        capacity = self.row_capacity_tokens
        if length > capacity:
            raise PoolExhausted(
                f"compiled steps have fed {length} tokens per row, and a row holds {capacity}; what they "
                "returned since is NaN. `cache.reset()`, and make the cache with a larger `max_tokens` "
                "(over all rows)",
                needed_blocks=-(-length // self.config.block_size),
                free_blocks=0,
                block_size=self.config.block_size,
            )

    def would_be_static(self, device: torch.device) -> bool:
        """Whether rows on a device are, or will be, static."""
        return self.is_static or (
            not self.groups
            and self.can_be_static
            and device.type in static_group.DEVICES
            and self.is_attended()
        )

    def written(self, layer_idx: int) -> None:
        """Note that a layer holds the tokens of this step."""
        step = self._step
        self.tokens[layer_idx] = self.step_end
        self._last_written = layer_idx
        if step is not None:
            step.missing -= 1
            if not step.missing and not step.is_read_only:
                self._share_twins()
                self._close_step()
        if self.is_static:
            self.has_open_step = any(
                self.tokens[index] != self.step_end
                for group in self._groups.static
                for index in group.static_blocks
            )

    @property
    def is_open(self) -> bool:
        """Whether a step is in progress, or its forward has left it so."""
        return self._step is not None

    def compare_rows(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Look which rows of a prompt are the same in this layer too."""
        self._twins.compare(key_states, value_states)

    def _share_twins(self) -> None:
        """Store rows of a prompt once that are the same in every layer."""
        sources = self._twins.sources(self.padding.by_row(self.batch))
        if sources is not None:
            self.reorder(sources)
            self.equal_rows += len(sources) - len(set(sources))

    def is_next_in_step(self, layer_idx: int) -> bool:
        """Whether a step is in progress that this layer has yet to join."""
        return self.tokens[layer_idx] == self.step_start < self.step_end

    def is_next_in_any_layer(self) -> bool:
        """Whether some layer has yet to join a step in progress."""
        return any(self.is_next_in_step(index) for index in self._behind(self.step_end))

    def abort_step(self) -> None:
        """Take back the step in progress, in every layer."""

        def make() -> None:
            if self._step is not None:
                self.padding = self._step.padding
            if self.step_end > self.step_start:
                self._crop_to(self.step_start)
            self._close_step(has_failed=True)

        self.take_back_parts()
        self.change(make)
        self.give_back_rows()

    def take_back_outside(self) -> None:
        """Take back what a forward has changed outside the blocks, rows that it spread included."""
        self.take_back_parts()
        self.give_back_rows()

    def take_back_parts(self) -> None:
        """Take back what a forward has changed in objects of the host."""
        self.undo.restore()
        self.is_lost = self.has_outside_state

    def claim(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> LayerBlocks:
        """Give a layer its place in a pool."""

        def make() -> LayerBlocks:
            if not self.groups:
                self._open_rows(key_states, value_states, keep_history=self.record_past)
            return self._groups.claim(layer_idx, key_states, value_states)

        return self.change(make)

    # --- what a user does between forwards ------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; more than there are forgets all. Part of a change."""
        if tokens_to_remove and self.step_end:
            self._crop_to(max(0, self.step_end - tokens_to_remove))
        if self.record_past:
            # What a rejected draft could have needed is settled now.
            self._groups.release_outside_window()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what `crop` would raise; changes nothing."""
        num_tokens = self.step_end - tokens_to_remove
        try:
            self._groups.check_crop(num_tokens)
        except ValueError as error:
            raise PagedCacheError(
                f"cannot crop to {num_tokens} tokens: a window layer has given back what that length needs. "
                "Call `cache.activate_past_recording()` before the forwards that may be rolled back"
            ) from error

    def reorder(self, row_indices: Sequence[int], parts: Parts | None = None) -> None:
        """Make the rows copies of the given old rows, by reference; their number may change.

        Args:
            row_indices: For every new row the old one.
            parts: What is beside the blocks, to be moved in the same change.
        """
        self.pull()
        rows = self.checked_rows(row_indices, self.batch) if self.batch else list(row_indices)

        def make() -> None:
            if self.batch:
                self._groups.reorder(rows)
                self.history.reorder(rows)
                self.batch = len(rows)
                self.padding = self.padding.reorder(rows)
            if parts is not None:
                parts.select(rows)

        for group in self._groups.static:
            group.check_rows(len(rows))
        # Rows that own their blocks are copied over each other, which cannot be taken back.
        was_lost, self.is_lost = self.is_lost, self.is_lost or self.is_static
        self.change(make, parts)
        self.is_lost = was_lost

    @staticmethod
    def checked_rows(row_indices: Sequence[int], batch: int) -> list[int]:
        """Rows counted from the first; raises PagedCacheError if there are none, or none of that index."""
        bad = [row for row in row_indices if not -batch <= row < batch]
        if bad or not row_indices:
            raise PagedCacheError(
                f"row indices must be a non-empty selection of 0…{batch - 1} (the cache holds "
                f"{batch} rows), got {list(row_indices)}"
            )
        return [row % batch for row in row_indices]

    def spread_rows(self, rows: int, parts: Parts) -> None:
        """Give the one row of the cache to so many, for the step that begins."""
        self._spread = self.batch, running_forward.current().forward
        self.reorder([0] * rows, parts)

    def give_back_rows(self, parts: Parts | None = None) -> None:
        """Undo `spread_rows`, if the step that wanted it has failed.

        Args:
            parts: What is beside the blocks, where it was not put back otherwise.
        """
        if self._spread is None:
            return
        before, _ = self._spread
        if self.batch > before or (parts is not None and not before):
            self.reorder([0], parts)
        self._spread = None

    def reset(self, parts: Parts) -> None:
        """Forget all rows and give their blocks back; pools stay."""

        def make() -> None:
            self._clear()
            self.record_past = False
            parts.clear()

        self.change(make, parts)

    def _clear(self) -> None:
        self._groups.reset()
        self.history.crop(0)
        self.tokens = dict.fromkeys(self.tokens, 0)
        self.batch = self.step_start = self.step_end = 0
        self.is_lost = False
        self.owner = None
        self._last_written = None
        self.padding, self._noted = NO_PADDING, None
        self.gradients_from = None
        self._close_step()

    def replace_tail(
        self, start: int, behind: Sequence[tuple[int, torch.Tensor, torch.Tensor]], padding: Padding
    ) -> None:
        """Cut every row down to its first tokens, and put others behind them. Part of a change.

        Where that fails after the cut, the first tokens are what is left.

        Args:
            start: Tokens that stay.
            behind: For every layer that holds tokens its index, and K and V of those that come.
            padding: What is to be remembered of padding then.
        """
        _, keys, values = behind[0]
        self._groups.check_room_for(start, keys.shape[2], self.batch)
        self._crop_to(start)
        # What is written now may lie where the tail did.
        self._groups.store.keep(partial(self._save, None))
        if not start:
            self._open_rows(keys, values, keep_history=self.record_past)
        self._groups.reserve(
            self.batch, start, keys.shape[2], keep_history=self.record_past, padding=padding.unstored
        )
        self.padding = padding
        for index, keys, values in behind:
            dispatch.write(self.blocks[index], keys, values, start)
            self.tokens[index] = start + keys.shape[2]
        self.step_start = self.step_end = start + keys.shape[2]

    def fork(self) -> CacheState:
        """The same rows for another cache, by sharing their blocks."""
        twin = copy.copy(self)
        twin.tokens = dict(self.tokens)
        twin.history, twin.undo = self.history.copy(), Undo()
        twin._groups = self.change(self._groups.fork)
        twin.forget_user()
        return twin

    def forget_user(self) -> None:
        """Belong to no thread and no forward, as a copy does."""
        self._step = self._noted = self._root = self._spread = None
        self._usage, self._twins = Usage(), Twins()
        self.equal_rows = 0

    def with_contents(
        self, groups: LayerGroups, saved: SavedCache, tokens: dict[int, int], padding: Padding
    ) -> dict[str, Any]:
        """The attributes of this state with saved contents, which these groups hold."""
        twin = copy.copy(self)
        twin._groups, twin.history, twin.undo = groups, TokenHistory(), Undo()
        twin.batch, twin.tokens, twin.padding = saved.batch, tokens, padding
        twin.step_start = twin.step_end = saved.length
        twin.record_past, twin.is_lost = saved.record_past, False
        twin.owner = saved.owner
        twin._last_written = twin._noted = twin._root = twin.gradients_from = None
        twin._twins = Twins()
        twin._close_step()
        if saved.input_ids.shape[1]:
            twin.history.commit(saved.input_ids, saved.input_ids.shape[1])
        return dict(vars(twin))

    @property
    def layer_groups(self) -> LayerGroups:
        """All groups as one."""
        return self._groups

    def check_integrity(self) -> None:
        """Raise an AssertionError if blocks were lost or the layers disagree."""
        self._groups.check_integrity()
        for group in self.groups:
            assert group.num_tokens in (self.step_end, 0), (
                f"the group of window {group.window} has {group.num_tokens} tokens, the cache {self.step_end}"
            )
        assert max(self.tokens.values(), default=0) <= self.step_end, (
            f"layers hold {sorted(set(self.tokens.values()))} tokens, but the last step ended at "
            f"{self.step_end}"
        )
        assert self.history.count <= self.step_end, "ids are known of tokens that are not stored"

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def _is_cross(self) -> bool:
        """Whether it holds the encoder's tokens, which come once and never change."""
        return self.is_encoder_decoder and not self.has_masks

    def _behind(self, count: int) -> list[int]:
        """The layers that have not come as far as the last step.

        Layers that a model never writes hold nothing; layers after the last one written were not reached.
        """
        order = list(self.tokens)
        reached = 0 if self._last_written is None else order.index(self._last_written) + 1
        return [
            index
            for place, index in enumerate(order)
            if self.tokens[index] != count and (self.tokens[index] or place >= reached > 0)
        ]

    def _unlike(self, layer_idx: int, held: int) -> CacheMismatchError:
        return CacheMismatchError(
            f"layer {layer_idx} holds {held} tokens per row, and the cache {self.step_end}: a forward ended "
            "before it came to that layer (layers that were left out, an early exit). "
            f"`cache.crop({held - self.step_end})` takes back what the layer has missed, `cache.reset()` "
            "starts anew"
        )

    def _check_in_step(self, layer_idx: int, start: int, new_tokens: int) -> None:
        """A new step may only begin when every layer has finished the last one."""
        left_out = next((index for index, count in self.tokens.items() if 0 < count < start), None)
        if left_out is not None and not self.is_open and self._groups.would_seal(new_tokens):
            raise self._unlike(left_out, self.tokens[left_out])  # whose part of a block is not there
        if start != self.step_end:
            if self.is_open:
                self.abort_step()
            raise self._unlike(layer_idx, start)
        behind = self._behind(start) if start and self.is_open else []
        if behind:
            first = behind[0]
            held = self.tokens[first]
            self.abort_step()
            raise CacheMismatchError(
                f"layer {layer_idx} is written again while layer {first} holds {held} tokens per row, not "
                f"{start}. Either a forward was interrupted: it is taken back now, so call the model again. "
                "Or self- and cross-attention write to one cache: an encoder-decoder model needs "
                "`EncoderDecoderCache(PagedCache(model), DynamicCache())`"
            )

    def _reserve(
        self,
        start: int,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        padding: Padding,
        *,
        keep_history: bool,
    ) -> None:
        """Make room in all groups."""
        if not self.batch:
            self._open_rows(key_states, value_states, keep_history=keep_history)
        keep = partial(self._groups.store.keep, partial(self._save, None))
        self._groups.reserve(
            self.batch,
            start,
            key_states.shape[2],
            keep_history=keep_history,
            padding=padding.unstored,
            let_go=keep if start else lambda: None,
        )

    def _open_rows(self, key_states: torch.Tensor, value_states: torch.Tensor, *, keep_history: bool) -> None:
        self._groups.open_rows(
            key_states, value_states, keep_history=keep_history, would_be_static=self.would_be_static
        )
        self.batch = key_states.shape[0]

    def _padding_after(
        self, start: int, key_states: torch.Tensor, call: ModelCall | None, noted: NotedMask | None
    ) -> Padding:
        """What is to be remembered of padding when the new tokens are stored."""
        if call is None or self._is_cross:
            return self.padding
        new_tokens, device = key_states.shape[2], key_states.device
        is_all_shown = noted is not None and noted.mask is None and noted[:2] == (start, new_tokens)
        if start and not self.padding.looks_at(call, new_tokens, device, is_all_shown=is_all_shown):
            return self.padding
        forward = Forward.of(noted, start, key_states, call)
        return self.padding.after(forward, leaves_out=not self.would_be_static(device))

    def _close_step(self, *, has_failed: bool = False) -> None:
        """Nothing more is written by the step; its tokens are there, or were taken back."""
        self.has_open_step = False
        self._groups.set_step(None)
        self._twins.begin(0)
        # At once: half of it would give rows back of a step that counts, or keep those of one that does not.
        vars(self).update({"_step": None} if has_failed else {"_step": None, "_spread": None})

    def _crop_to(self, num_tokens: int) -> None:
        if not num_tokens:
            self._clear()
            return
        self.check_crop(self.step_end - num_tokens)
        self._groups.crop(num_tokens)
        self.history.crop(num_tokens)
        self.tokens = {index: min(count, num_tokens) for index, count in self.tokens.items()}
        self.step_start = self.step_end = num_tokens
        self.has_open_step = False
        self._last_written = None
        self.padding, self._noted = self.padding.crop(num_tokens), None
        if self.gradients_from is not None and self.gradients_from >= num_tokens:
            self.gradients_from = None
