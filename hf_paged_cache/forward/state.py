"""The shared part of a cache: its rows, its layer groups, and the step that a forward makes (see `step`).

Whatever changes rows and blocks is one change of the store: all of it or none (see `Store.change`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hf_paged_cache.errors import CacheMismatchError, UnstorableValueError
from hf_paged_cache.host import running_forward
from hf_paged_cache.kernels import dispatch

from .caller import Caller, check_reading
from .contents import Contents
from .equal_rows import EqualRows
from .left_padding import Forward, NotedMask
from .rows import Rows
from .step import Step, no_new_tokens
from .weights import Weights

if TYPE_CHECKING:
    from hf_paged_cache.config import PagedCacheConfig
    from hf_paged_cache.host.architectures import LayerSpec
    from hf_paged_cache.host.running_forward import ModelCall
    from hf_paged_cache.store.layer_groups import LayerGroups
    from hf_paged_cache.store.pool_tensors import NewTokens
    from hf_paged_cache.store.saved import SavedCache

    from .contents import ModelTraits, Parts
    from .left_padding import Padding
    from .undo import Undo

_T = TypeVar("_T")


class CacheState(Contents):
    """The shared part of a cache. Layers hold it; it holds no layer.

    Attributes:
        step: The forward in progress, or the last one as long as somebody has to look at how it ended.
        has_masks: Somebody has asked how long masks have to be, as nobody does for cross-attention.
        has_open_step: Some layer of static rows has yet to join the step in progress.
    """

    def __init__(
        self,
        config: PagedCacheConfig,
        specs: dict[int, LayerSpec],
        max_positions: int | None,
        traits: ModelTraits,
        is_attended: Callable[[], bool],
    ) -> None:
        super().__init__(config, specs, max_positions, traits, is_attended)
        self.step: Step | None = None
        self.has_masks = False
        self.has_open_step = False
        self._noted: NotedMask | None = None
        self._equal_rows = EqualRows()
        self._caller = Caller()

    @property
    def is_open(self) -> bool:
        """Whether the tokens of a step have come to some layers and not to all."""
        return self.step is not None and self.step.is_open

    # --- the step -------------------------------------------------------------------------------------------

    def next_call(self, write: Hashable | None) -> ModelCall | None:
        """Note a use of what lies outside the blocks.

        Args:
            write: See `Step.goes_on`.

        Returns:
            The call whose first use of the cache it is, for which `open_step` is to be called; None if it is
            part of the step in progress, or no forward at all.

        Raises:
            CacheMismatchError: How the last forward ended cannot be told, or its states are lost.
        """
        if self.step is not None and self.step.goes_on(write):
            self.step.writes.add(write)
            return None
        self.settle()
        call = running_forward.current()
        if not call.forward.is_known and write is None:
            return None
        self.check_lost()
        return call

    def open_step(self, call: ModelCall, write: Hashable | None, undo: Undo) -> None:
        """Begin a step that changes objects outside the blocks, which `undo` has saved."""
        left = self.step  # a round of a loop without a model that did not come to all layers
        step = Step(
            call.forward,
            self.rows.end,
            is_read_only=call.use_cache is False,
            undo=undo,
            has_outside=True,
            writes={write},
            ids=call.input_ids,
        )
        if left is not None and not step.is_of_model:
            step.missing, step.padding = left.missing, left.padding
        self.step = step

    def begin_step(self, layer_idx: int, new: NewTokens) -> None:
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
        start, new_tokens = self.rows.tokens[layer_idx], new.count
        self.check_lost()
        if new_tokens == 0:
            raise no_new_tokens(layer_idx, start)
        self._check_in_step(layer_idx, start, new_tokens)
        self.check_chunk(new_tokens, is_warm=start > 0)
        if call is not None and not self._is_cross:
            check_reading(call, is_warm=start > 0)
        if call is not None and self._caller.is_new(call):
            if start and call.is_generating and self.traits.is_encoder_decoder and not self._is_cross:
                self.rows.ids.check_restart(call.input_ids)
            self._take_weights(call, start)
        noted, self._noted = self._noted, None  # of this forward alone, also if it is refused
        before = self.step
        try:
            padding = self._padding_after(start, new, call, noted)
            if not self.rows.batch:
                # Alone: what the change that opens rows could bring back is not free for their pools.
                self.change(partial(self.layer_groups.adapt, new_tokens))
            self.change(partial(self._begin, start, new, call, padding))
        except BaseException:
            self.layer_groups.store.recover()
            if self.step is before:
                self.take_back_outside()
            else:  # it is open: an interrupt came after the change
                self.abort_step()
            raise

    def _begin(
        self,
        start: int,
        new: NewTokens,
        call: ModelCall | None,
        padding: Padding,
    ) -> None:
        forward = None if call is None else call.forward
        is_read_only = call is not None and call.use_cache is False and not self._is_cross
        keep_history = self.rows.record_past or is_read_only
        rows = self.rows
        self._reserve(start, new, padding, keep_history=keep_history)
        step = self.step
        if step is None or (
            step.is_open and not step.has_outside
        ):  # the layers that it lacks are never written
            step = Step(forward, start)
        self.step = replace(
            step, forward=forward, is_read_only=is_read_only, missing=len(rows.tokens), padding=rows.padding
        )
        rows.begin(start, start + new.count, padding)
        self.has_open_step = self.is_static
        self._equal_rows.begin(rows.batch if not start and not self.is_static else 0)
        if call is None or not call.is_generating:
            rows.ids.forget_prompt()
        rows.ids.feed(start, rows.end, rows.batch, None if call is None else call.input_ids)
        self.layer_groups.set_step(self.step)

    def join_step(self, layer_idx: int) -> None:
        """Let a layer write to the step in progress.

        Somebody may go on with a step whose forward has failed, as cross-attention does. Until then other
        caches of the pool could replace its tensors, and from now on they cannot.
        """
        step = self.step
        if step is None or not self.layer_groups.of(layer_idx).store.is_shared or not step.is_over:
            return

        def make() -> None:
            step.forward = running_forward.current().forward
            for group in self.groups:
                group.bind_again()

        self.change(make)

    def write(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store what a layer that has a place brings to the step in progress.

        Args:
            layer_idx: Index of the layer.
            key_states: `[batch, kv_heads, new tokens, head_dim]`.
            value_states: `[batch, kv_heads, new tokens, v_head_dim]`.

        Raises:
            QuantizationError: The guard found the keys unfit for the layer's format.
            UnstorableValueError: A quantized layer was given what cannot be stored.
        """
        blocks, group, start = self.blocks[layer_idx], self.layer_groups.of(layer_idx), self.rows.start
        if blocks.records is not None and group.is_unguarded(layer_idx):
            self.change(partial(group.check_keys, layer_idx, key_states, start))
        try:
            dispatch.write(blocks, key_states, value_states, start)
        except UnstorableValueError as error:
            raise UnstorableValueError(
                f"layer {layer_idx}: {error}. The step is taken back. Look for what makes the model "
                f"overflow, or keep the layer as it is: layer_dtypes={{{layer_idx}: 'auto'}}"
            ) from error
        self._equal_rows.compare(key_states, value_states)
        self._written(layer_idx)

    def _written(self, layer_idx: int) -> None:
        self.rows.written(layer_idx)
        step = self.step
        if step is not None and step.missing is not None:
            step.missing -= 1
            if not step.is_open:
                self._share_equal_rows()
                self._close_step(replace(step, rows_before=None) if step.has_outside else None)
        if self.is_static:
            self.has_open_step = any(
                self.rows.tokens[index] != self.rows.end
                for group in self.layer_groups.static
                for index in group.static_blocks
            )

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
            is_spread = step.rows_before is not None
            self._close_step(
                Step(step.forward, step.start, rows_before=step.rows_before) if is_spread else None
            )

        self._undo_outside()
        self.change(make)
        self.give_back_rows()

    def take_back_outside(self) -> None:
        """Take back what a forward has changed outside the blocks, rows that it spread included."""
        self._undo_outside()
        self.give_back_rows()

    def _undo_outside(self) -> None:
        if self.step is not None:
            self.step.undo.restore()
        self.rows.is_lost = self.traits.has_outside_state

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing in blocks that `settle` would have to look at."""
        step = self.step
        is_quiet = step is None or (step.has_outside and not step.is_open)
        return is_quiet and not self.layer_groups.store.is_torn

    def settle(self) -> None:
        """See to what an interrupted change and an ended forward have left.

        A forward that has returned counts, also if it did not reach every layer. One that an exception left
        before that, or that was only to read, is taken back.

        Raises:
            CacheMismatchError: Nobody can say which of both it was.
        """
        self.layer_groups.store.recover()
        step = self.step
        if step is None or (step.is_open and self._is_cross):
            return  # for cross-attention: what is written is whole, and the host has noted which layers are
        if not step.is_over and (step.is_of_model or step.is_open or not step.has_outside):
            return  # it goes on, as loops without a model do until all layers have their tokens
        if not step.is_open and not step.has_outside:
            self.give_back_rows()  # it has done nothing else
            return
        has_returned = False if step.is_read_only else step.has_returned()
        if has_returned is None:
            raise CacheMismatchError(_unknown_end(step))
        if has_returned:
            self._close_step()
        else:
            self.abort_step()

    def _close_step(self, left: Step | None = None) -> None:
        """Nothing more is written by the step; its tokens are there, or were taken back.

        Args:
            left: What is still to be known of it.
        """
        self.has_open_step = False
        self.layer_groups.set_step(None)
        self._equal_rows.begin(0)
        self.step = left  # at once: half of it would give rows back of a step that counts, or keep others

    def _share_equal_rows(self) -> None:
        """Store rows of a prompt once that are the same in every layer."""
        sources = self._equal_rows.sources(self.rows.padding.by_row(self.rows.batch))
        if sources is not None:
            self.reorder(sources)
            self.rows.equal_rows += len(sources) - len(set(sources))

    # --- who uses it ----------------------------------------------------------------------------------------

    def take(self, call: ModelCall | None) -> None:
        """Let this thread use the cache, and see to what an ended forward has left.

        Args:
            call: On whose behalf; None does not change who that is.

        Raises:
            CacheMismatchError: Another thread is using it.
        """
        with self.layer_groups.store.lock:
            self._caller.take(call, is_open=self.is_open)
        self.settle()

    def check_thread(self) -> None:
        """Raise CacheMismatchError if another thread is using the cache."""
        self._caller.check_thread(is_open=self.is_open)

    def check_reader(self, layer_idx: int) -> None:
        """Look whose weights read, where no update comes before: cross-attention reads what it once wrote.

        Raises:
            CacheMismatchError: Other weights computed it.
        """
        is_first = layer_idx == next(iter(self.rows.tokens))
        if self._is_cross and is_first and not torch.compiler.is_compiling():
            self._take_weights(running_forward.current(), self.rows.end)

    def check_before_layers(self) -> None:
        """Look whose weights read before a layer of theirs has run, if that may write to its buffers.

        Raises:
            CacheMismatchError: Other weights computed what is cached.
        """
        owner = self.rows.owner
        may_write = owner is None or (isinstance(owner, Weights) and owner.has_buffers)
        if may_write and not self.traits.is_encoder_decoder:
            call = running_forward.current()
            if call.root.is_known:
                self._take_weights(call, self.rows.end)

    def _take_weights(self, call: ModelCall, tokens: int) -> None:
        if not self._caller.is_new(call):
            return
        try:
            self._caller.take_weights(call, self.rows, tokens)
        except CacheMismatchError:
            self.take_back_outside()
            raise

    def check_lost(self) -> None:
        """Raise CacheMismatchError if a forward has moved states on that nobody can take back."""
        if self.rows.is_lost:
            raise CacheMismatchError(
                "a forward failed, or was only to read, after recurrent states had moved on that this model "
                "keeps in itself, or rows were copied over each other (compile=True) and that was "
                "interrupted: nobody can take that back; call `cache.reset()` and start from the "
                "prompt"
            )

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
        if start and self.rows.padding.tokens:
            self.rows.padding.check_mask(noted, running_forward.current())
        self._noted = noted

    def check_chunk(self, new_tokens: int, *, is_warm: bool) -> None:
        """Raise CacheMismatchError if the model goes wrong with so many new tokens after a history."""
        fault = self.traits.chunk_fault
        if fault is not None and new_tokens > 1 and is_warm:
            raise CacheMismatchError(
                f"{new_tokens} new tokens came, and the cache holds a history: {fault}. Feed the "
                "new tokens one at a time, or call `cache.reset()` and feed everything from the start; "
                "nothing was written"
            )

    def spread_rows(self, count: int, parts: Parts) -> None:
        """Give the one row of the cache to so many, for the step that begins."""
        if self.step is None:
            self.step = Step(running_forward.current().forward, self.rows.end)
        self.step.rows_before = self.rows.batch
        self.reorder([0] * count, parts)

    def give_back_rows(self, parts: Parts | None = None) -> None:
        """Undo `spread_rows`, if the step that wanted it has failed.

        Args:
            parts: What is beside the blocks, where it was not put back otherwise.
        """
        step = self.step
        if step is None or step.rows_before is None:
            return
        if self.rows.batch > step.rows_before or (parts is not None and not step.rows_before):
            self.reorder([0], parts)
        self.step = replace(step, rows_before=None) if step.has_outside or step.is_open else None

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

    # --- copies ---------------------------------------------------------------------------------------------

    def fork(self) -> CacheState:
        """The same rows for another cache, by sharing their blocks."""
        copied = copy.copy(self)
        copied.rows = self.rows.copy()
        copied.layer_groups = self.change(self.layer_groups.fork)
        copied.forget_user()
        return copied

    def forget_user(self) -> None:
        """Belong to no thread and no forward, as a copy does."""
        self.step = self._noted = None
        self._equal_rows, self._caller = EqualRows(), Caller()
        self.rows.equal_rows = 0

    def with_contents(
        self, groups: LayerGroups, saved: SavedCache, tokens: dict[int, int], padding: Padding
    ) -> dict[str, Any]:
        """The attributes of this state with saved contents, which these groups hold."""
        copied = copy.copy(self)
        rows = copied.rows = Rows(tokens)
        copied.layer_groups = groups
        rows.batch, rows.tokens, rows.equal_rows = saved.batch, tokens, self.rows.equal_rows
        rows.begin(saved.length, saved.length, padding)
        rows.record_past, rows.owner = saved.record_past, saved.owner
        if saved.input_ids.shape[1]:
            rows.ids.commit(saved.input_ids, saved.input_ids.shape[1])
        copied._noted = None
        copied._equal_rows, copied._caller = EqualRows(), Caller()
        copied._close_step()
        return dict(vars(copied))

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def _is_cross(self) -> bool:
        """Whether it holds the encoder's tokens, which come once and never change."""
        return self.traits.is_encoder_decoder and not self.has_masks

    def _unlike(self, layer_idx: int, held: int) -> CacheMismatchError:
        return CacheMismatchError(
            f"layer {layer_idx} holds {held} tokens per row, and the cache {self.rows.end}: a forward ended "
            "before it came to that layer (layers that were left out, an early exit). "
            f"`cache.crop({held - self.rows.end})` takes back what the layer has missed, `cache.reset()` "
            "starts anew"
        )

    def _check_in_step(self, layer_idx: int, start: int, new_tokens: int) -> None:
        """A new step may only begin when every layer has finished the last one."""
        tokens = self.rows.tokens
        left_out = next((index for index, count in tokens.items() if 0 < count < start), None)
        if left_out is not None and not self.is_open and self.layer_groups.would_seal(new_tokens):
            raise self._unlike(left_out, tokens[left_out])  # whose part of a block is not there
        if start != self.rows.end:
            if self.is_open:
                self.abort_step()
            raise self._unlike(layer_idx, start)
        behind = self.rows.behind(start) if start and self.is_open else []
        if behind:
            first = behind[0]
            held = tokens[first]
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
        new: NewTokens,
        padding: Padding,
        *,
        keep_history: bool,
    ) -> None:
        """Make room in all groups."""
        if not self.rows.batch:
            self.open_rows(new, keep_history=keep_history)
        keep = partial(self.layer_groups.store.keep, partial(self._save, None))
        self.layer_groups.reserve(
            self.rows.batch,
            start,
            new.count,
            keep_history=keep_history,
            padding=padding.unstored,
            let_go=keep if start else lambda: None,
        )

    def _padding_after(
        self, start: int, new: NewTokens, call: ModelCall | None, noted: NotedMask | None
    ) -> Padding:
        """What is to be remembered of padding when the new tokens are stored."""
        padding = self.rows.padding
        if call is None or self._is_cross:
            return padding
        new_tokens, device = new.count, new.shape.device
        is_all_shown = noted is not None and noted.mask is None and noted[:2] == (start, new_tokens)
        if start and not padding.looks_at(call, new_tokens, device, is_all_shown=is_all_shown):
            return padding
        forward = Forward.of(noted, start, new, call)
        return padding.after(forward, leaves_out=not self.would_be_static(device))


def _unknown_end(step: Step) -> str:
    if step.is_open:
        return (
            f"the last forward did not reach {step.missing} of the layers, and it cannot be told whether it "
            "was to end there or failed. Call `cache.reset()`, and start from the prompt"
        )
    return (
        "it cannot be told whether the last forward failed. Call `cache.reset()`, and start from the prompt"
    )
