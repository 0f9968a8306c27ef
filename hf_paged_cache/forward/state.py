"""The shared part of a cache: its rows, its layer groups, and the step that a forward makes (see `step`).

Whatever changes rows and blocks is one change of the store: all of it or none (see `Store.change`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.errors import CacheMismatchError, UnstorableValueError
from hf_paged_cache.host import running_forward
from hf_paged_cache.kernels import dispatch

from .contents import Contents
from .left_padding import NotedMask
from .ownership import Caller, check_reading, owner_after
from .rows import EqualRows
from .step import Step, no_new_tokens
from .weights import Weights

if TYPE_CHECKING:
    from hf_paged_cache.host.running_forward import ModelCall
    from hf_paged_cache.store.pool_tensors import NewTokens

    from .contents import Outside
    from .left_padding import Padding
    from .undo import Undo


class CacheState(Contents):
    """The shared part of a cache. Layers hold it; it holds no layer."""

    step: Step | None  # the forward in progress, or the last one while somebody has to look at how it ended
    _noted: NotedMask | None  # the mask of a forward of which no layer has written yet

    @property
    def is_open(self) -> bool:
        """Whether the tokens of a step have come to some layers and not to all."""
        return self.step is not None and self.step.is_open

    def next_call(self, write: Hashable | None) -> ModelCall | None:
        """Note a use of what lies outside the blocks; return the call for which `open_step` is to follow."""
        if self.step is not None and self.step.goes_on(write):
            self.step.writes.add(write)
            return None
        self.settle()
        call = running_forward.current()
        if not call.forward.is_known and write is None:
            return None
        self.rows.check_lost()
        return call

    def open_step(self, call: ModelCall, write: Hashable | None, undo: Undo) -> None:
        """Begin a step that changes objects outside the blocks, which `undo` has saved."""
        step = Step(call.forward, self.rows.end, call.use_cache is False)
        step.undo, step.writes, step.ids = undo, {write}, call.input_ids
        if self.step is not None and not call.forward.is_known:
            # A round of a loop without a model that did not come to all layers.
            step.missing, step.padding = self.step.missing, self.step.padding
        self.step = step

    def begin_step(self, layer_idx: int, new: NewTokens) -> None:
        """Reserve room for the new tokens in every group; whatever is raised, nothing was written or changed.

        CacheMismatchError if the layers do not advance together, another thread uses the cache, or the mask
        or positions do not go on; PoolExhausted if there are too few blocks; QuantizationError if the guard
        found K of a layer unfit; UnstorableValueError of an earlier step of a quantized layer on a GPU.
        """
        call = running_forward.current()
        self.take(call)
        start = self.rows.tokens[layer_idx]
        self.rows.check_lost()
        if new.count == 0:
            raise no_new_tokens(layer_idx, start)
        self._check_in_step(layer_idx, start, new.count)
        self.check_chunk(new.count, is_warm=start > 0)
        if not self._is_cross:
            check_reading(call, is_warm=start > 0)
            is_decoder = call.is_generating and self.traits.is_encoder_decoder
            if start and is_decoder and self._caller.is_new(call):
                self.rows.ids.check_restart(call.input_ids)
        self._check_weights(call, start)
        noted, self._noted = self._noted, None  # of this forward alone, also if it is refused
        before = self.step
        try:
            padding = self.rows.padding
            if not self._is_cross:
                leaves_out = not self.would_be_static(new.shape.device)
                padding = padding.following(noted, start, new, call, leaves_out=leaves_out)
            if not self.rows.batch:
                # Alone: what the change that opens rows could bring back is not free for their pools.
                self.change(partial(self.layer_groups.adapt, new.count))
            self.change(partial(self._begin, start, new, call, padding))
        except BaseException:
            self.layer_groups.store.recover()
            if self.step is before:
                self._take_back()
            else:  # it is open: an interrupt came after the change
                self.abort_step()
            raise

    def _check_in_step(self, layer_idx: int, start: int, new_tokens: int) -> None:
        """A new step may only begin when every layer has finished the last one."""
        tokens = self.rows.tokens
        left_out = next((index for index, count in tokens.items() if 0 < count < start), None)
        if left_out is not None and not self.is_open and self.layer_groups.would_seal(new_tokens):
            raise self.rows.unlike(left_out, tokens[left_out])  # whose part of a block is not there
        if start != self.rows.end:
            if self.is_open:
                self.abort_step()
            raise self.rows.unlike(layer_idx, start)
        if start and self.is_open and (behind := self.rows.behind()):
            first, held = behind[0], tokens[behind[0]]
            self.abort_step()
            raise CacheMismatchError(
                f"layer {layer_idx} is written again while layer {first} holds {held} tokens per row, not "
                f"{start}. Either a forward was interrupted: it is taken back now, so call the model again. "
                "Or self- and cross-attention write to one cache: an encoder-decoder model needs "
                "`EncoderDecoderCache(PagedCache(model), DynamicCache())`"
            )

    def _begin(self, start: int, new: NewTokens, call: ModelCall, padding: Padding) -> None:
        """Make room in all groups, and open the step."""
        rows, step = self.rows, self.step
        is_read_only = call.use_cache is False and not self._is_cross
        keep_history = rows.record_past or is_read_only
        if not rows.batch:
            self.open_rows(new, keep_history=keep_history)
        let_go = partial(self.layer_groups.store.keep, self._save) if start else lambda: None
        self.layer_groups.reserve(
            start, new.count, keep_history=keep_history, padding=padding.unstored, let_go=let_go
        )
        if step is None or (step.is_open and step.undo is None):  # the layers that it lacks never come
            step = Step(call.forward, start)
        step = replace(step, forward=call.forward, is_read_only=is_read_only)
        step.missing, step.padding = len(rows.tokens), rows.padding
        self.step = step
        rows.begin(start, start + new.count, padding)
        self.has_open_step = self.is_static
        self._equal_rows.begin(rows.batch if not start and not self.is_static else 0)
        if not call.is_generating:
            rows.ids.forget_prompt()
        rows.ids.feed(start, rows.end, rows.batch, call.input_ids)
        self.layer_groups.set_step(self.step)

    def join_step(self, layer_idx: int) -> None:
        """Let a layer write to the step in progress, also if its forward has failed (cross-attention)."""
        step = self.step
        if step is None or not self.layer_groups.of(layer_idx).store.is_shared or not step.is_over:
            return

        def make() -> None:  # until now other caches of the pool could replace its tensors
            step.forward = running_forward.current().forward
            for group in self.groups:
                group.bind_again()

        self.change(make)

    def write(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store K and V `[batch, kv_heads, new tokens, head_dim]` of a layer that has a place.

        QuantizationError if the guard found the keys unfit for the layer's format, UnstorableValueError if a
        quantized layer was given what cannot be stored.
        """
        blocks, group, start = self.blocks[layer_idx], self.layer_groups.of(layer_idx), self.rows.start
        if blocks.records is not None and layer_idx in group.unguarded:
            self.change(partial(group.check_keys, layer_idx, key_states, start))
        try:
            dispatch.write(blocks, key_states, value_states, start)
        except UnstorableValueError as error:
            raise UnstorableValueError(
                f"layer {layer_idx}: {error}. The step is taken back. Look for what makes the model "
                f"overflow, or keep the layer as it is: layer_dtypes={{{layer_idx}: 'auto'}}"
            ) from error
        self._equal_rows.compare(key_states, value_states)
        self.rows.written(layer_idx)
        step = self.step
        if step is not None and step.missing is not None:
            if step.missing == 1 and not step.is_read_only:
                self._share_equal_rows()
                self._close_step(None if step.undo is None else replace(step, missing=0, rows_before=None))
            else:
                step.missing -= 1
        static = (index for group in self.layer_groups.static for index in group.static_blocks)
        self.has_open_step = any(self.rows.tokens[index] != self.rows.end for index in static)

    def _share_equal_rows(self) -> None:
        """Store rows of a prompt once that are the same in every layer."""
        sources = self._equal_rows.sources(self.rows.padding.by_row(self.rows.batch))
        if sources is not None:
            self.reorder(sources)
            self.rows.equal_rows += len(sources) - len(set(sources))

    def _close_step(self, left: Step | None = None) -> None:
        """Nothing more is written by the step, of which `left` is still to be known."""
        # At once: half of it would give rows back of a step that counts, or keep others.
        self.step, self.has_open_step = left, False
        self.layer_groups.set_step(None)
        self._equal_rows.begin(0)

    def abort_step(self) -> None:
        """Take back the forward in progress, in every layer and outside the blocks."""
        step = self.step
        if step is None:
            return

        def make() -> None:
            if step.padding is not None:
                self.rows.padding = step.padding
            if step.missing is not None and self.rows.end > self.rows.start:
                self.crop_to(self.rows.start)
            left = Step(step.forward, step.start, rows_before=step.rows_before)
            self._close_step(None if step.rows_before is None else left)

        self._take_back(make)

    def _take_back(self, change: Callable[[], None] | None = None) -> None:
        """Take back what a forward has changed outside the blocks, make a change, and give rows back."""
        if self.step is not None and self.step.undo is not None:
            self.step.undo.restore()
        self.rows.is_lost = self.traits.has_outside_state
        if change is not None:
            self.change(change)
        self.give_back_rows()

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing in blocks that `settle` would have to look at."""
        step = self.step
        is_quiet = step is None or (step.undo is not None and not step.is_open)
        return is_quiet and not self.layer_groups.store.is_torn

    def settle(self) -> None:
        """See to what an interrupted change and an ended forward have left.

        A forward that has returned counts, also if it did not reach every layer. One that an exception left
        before that, or that was only to read, is taken back. CacheMismatchError if nobody can say which.
        """
        self.layer_groups.store.recover()
        step = self.step
        if step is None or (step.is_open and self._is_cross):
            return  # for cross-attention: what is written is whole, and the host has noted which layers are
        if not step.is_over and (step.forward.is_known or step.is_open or step.undo is None):
            return  # it goes on, as loops without a model do until all layers have their tokens
        if not step.is_open and step.undo is None:
            self.give_back_rows()  # it has done nothing else
            return
        has_returned = False if step.is_read_only else step.has_returned()
        if has_returned is None:
            raise step.unknown_end()
        if has_returned:
            self._close_step()
        else:
            self.abort_step()

    def take(self, call: ModelCall | None) -> None:
        """Let this thread use the cache, on behalf of a call or of none, and `settle`; see `check_thread`."""
        with self.layer_groups.store.lock:
            self.check_thread()
            if call is not None:
                self._caller.user = call.root
        self.settle()

    def check_thread(self) -> None:
        """Raise CacheMismatchError if another thread is using the cache."""
        self._caller.check_thread(is_open=self.is_open)

    def check_reader(self, layer_idx: int) -> None:
        """Look whose weights read, where no update comes before: cross-attention reads what it once wrote."""
        is_first = layer_idx == next(iter(self.rows.tokens))
        if self._is_cross and is_first and not torch.compiler.is_compiling():
            self._check_weights(running_forward.current(), self.rows.end)

    def check_before_layers(self) -> None:
        """Look whose weights read before a layer of theirs has run, if that may write to its buffers."""
        owner = self.rows.owner
        may_write = owner is None or (isinstance(owner, Weights) and owner.has_buffers)
        if may_write and not self.traits.is_encoder_decoder:
            call = running_forward.current()
            if call.root.is_known:
                self._check_weights(call, self.rows.end)

    def _check_weights(self, call: ModelCall, tokens: int) -> None:
        """Note whose weights compute from now on; raise CacheMismatchError if others have so far."""
        if not self._caller.is_new(call):
            return
        try:
            self.rows.owner = owner_after(self.rows.owner, call, tokens)
        except CacheMismatchError:
            self._take_back()
            raise
        self._caller.checked = call.root

    def note_mask(self, start: int, new_tokens: int, mask: torch.Tensor | None) -> None:
        """Hear of the mask of a forward before any layer runs; refuse one that shows unstored padding."""
        noted, self._noted = NotedMask(start, new_tokens, mask), None
        if start and self.rows.padding.tokens:
            self.rows.padding.check_mask(noted, running_forward.current())
        self._noted = noted

    @property
    def _is_cross(self) -> bool:
        """Whether it holds the encoder's tokens, which come once and never change."""
        return self.traits.is_encoder_decoder and not self.has_masks

    def spread_rows(self, count: int, outside: Outside) -> None:
        """Give the one row of the cache to so many, for the step that begins."""
        if self.step is None:
            self.step = Step(running_forward.current().forward, self.rows.end)
        self.step.rows_before = self.rows.batch
        self.reorder([0] * count, outside)

    def give_back_rows(self, outside: Outside | None = None) -> None:
        """Undo `spread_rows`, if the step that wanted it has failed; outside where nothing else does."""
        step = self.step
        if step is None or step.rows_before is None:
            return
        if self.rows.batch > step.rows_before or (outside is not None and not step.rows_before):
            self.reorder([0], outside)
        self.step = replace(step, rows_before=None) if step.undo is not None or step.is_open else None

    def crop_to(self, num_tokens: int) -> None:
        """Keep the first tokens of every row. Part of a change."""
        super().crop_to(num_tokens)
        self.has_open_step = False
        self._noted = None

    def clear(self) -> None:
        """Forget all rows. Part of a change."""
        super().clear()
        self._noted = None
        self._close_step()

    def forget_user(self) -> None:
        """Belong to no thread and no forward, as a new cache and a copy do."""
        super().forget_user()
        self.step = self._noted = None
        self._equal_rows, self._caller = EqualRows(), Caller()
