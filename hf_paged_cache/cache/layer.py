"""One attention layer of a `PagedCache`, with the methods that `transformers` calls on a layer."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_paged_cache.attention import compiled_step, graph_operator
from hf_paged_cache.attention.masks import PagedLength, StaticLength
from hf_paged_cache.attention.view import StoredKV
from hf_paged_cache.errors import WAYS_TO_CHANGE, CacheMismatchError, PagedCacheError
from hf_paged_cache.forward.step import no_new_tokens
from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.autocast import as_attended
from hf_paged_cache.store.pool_tensors import NewTokens

if TYPE_CHECKING:
    from hf_paged_cache.forward.state import CacheState
    from hf_paged_cache.kernels.call import LayerBlocks


def _stored_side(side: int, name: str) -> Any:
    """K or V of a layer, to be read: a property that refuses everything else."""
    dim = ("head_dim", "v_head_dim")[side]
    doc = f"""Stored {name} `[batch, kv_heads, tokens, {dim}]`, dense when touched; None if there are none.

    Zeros stand for what is not stored: tokens outside a window, left padding.
    """

    def read(layer: PagedLayer) -> torch.Tensor | None:
        views = layer._stored_views()
        return views[side] if views else None

    def refuse(layer: PagedLayer, *value: object) -> NoReturn:
        raise PagedCacheError(
            f"`{name}` of layer {layer.layer_idx} cannot be assigned or deleted: it is read from the blocks "
            f"of the cache. {WAYS_TO_CHANGE}"
        )

    return property(read, refuse, refuse, doc)


def refused(reason: str) -> Any:
    """A method of the host that cannot be had, with the text of the PagedCacheError that calls get."""

    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise PagedCacheError(reason)

    refuse.__doc__ = f"Refused: {reason}"
    return refuse


def _of_the_cache(method: str) -> Any:
    return refused(
        f"`{method}` of one layer: layers of a PagedCache share their blocks; call `cache.{method}(...)`"
    )


UNMOVABLE = (
    "the blocks of a PagedCache stay on the device of their layer. To save memory there, store fewer bits "
    "(`kv_cache_dtype='int8'` or 'int4') or bound the pool (`max_tokens`)"
)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # __init_subclass__ of the host
    """A layer whose K and V lie in blocks. Rows belong to the cache: what changes them is called on that."""

    is_sliding = False
    is_croppable = True

    def __init__(self, state: CacheState, layer_idx: int) -> None:
        self._state = state
        self.layer_idx = layer_idx
        self._last_seen: tuple[Any, ...] | None = None
        self._last_read: weakref.ref[StoredKV] | None = None

    def of_fork(self, state: CacheState, memo: dict[int, Any]) -> PagedLayer:
        """The same layer of a cache that was forked from this one; `memo` is that of a deep copy."""
        copied = copy.copy(self)
        copied._state, copied._last_read = state, None
        return copied

    def forget(self) -> None:
        """Expect other K and V than so far, as when saved ones were loaded."""
        self._last_seen = self._last_read = None

    # --- what attention calls -------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take a place in a pool for K `[batch, kv_heads, tokens, head_dim]` and V of these shapes."""
        if self.layer_idx not in self._state.blocks:
            if not _have_content(key_states, value_states):
                self._check(key_states, value_states)
            new = NewTokens.of(as_attended(key_states), as_attended(value_states))
            self._state.claim(self.layer_idx, new)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `PagedCache.update`: views, but where a gradient is wanted, or paged attention is off."""
        state = self._state
        key_states, value_states = as_attended(key_states), as_attended(value_states)
        if torch.compiler.is_compiling():
            if state.traits.can_be_static and state.would_be_static(key_states.device):
                return compiled_step.update_static(state, self.layer_idx, key_states, value_states)
            return self._update_between_graphs(key_states, value_states)  # type: ignore[no-any-return]
        if state.is_static and state.rows.tokens[self.layer_idx] == state.rows.end:
            state.pull()
        # What another cache shows of its layers has no storage that a kernel could read.
        key_states, value_states = dense(key_states), dense(value_states)
        self._check(key_states, value_states)
        _check_data(self.layer_idx, key_states, value_states)
        new, rows = NewTokens.of(key_states, value_states), state.rows
        joins = state.is_open and rows.is_next(self.layer_idx)
        if joins and rows.tokens[self.layer_idx] + new.count == rows.end:
            state.join_step(self.layer_idx)
        else:
            state.begin_step(self.layer_idx, new)
        try:
            if self.layer_idx not in state.blocks:
                state.claim(self.layer_idx, new)
            stored = self._store(key_states, value_states, rows.start)
        except BaseException:
            if state.is_open:  # not taken back yet
                state.abort_step()
            raise
        wants_gradients = key_states.requires_grad or value_states.requires_grad
        if torch.is_grad_enabled() and (wants_gradients or state.rows.gradients_from is not None):
            return stored.in_graph(is_lazy=False)  # below a view the gradient would be lost
        if state.is_attended():
            return stored.views()
        keys, values = stored.dense()  # a compiler around the host's attention (flex) sees nothing in a view
        return keys.contiguous(), values.contiguous()

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int) -> StoredKV:
        """Write what this layer brings to the step in progress."""
        state = self._state
        if key_states.requires_grad or value_states.requires_grad:
            if torch.is_grad_enabled() and state.rows.gradients_from is None:
                state.rows.gradients_from = start
            # What is stored is a constant; a backend in torch would else make the pool part of the graph.
            state.write(self.layer_idx, key_states.detach(), value_states.detach())
        else:
            state.write(self.layer_idx, key_states, value_states)
        blocks, first = state.blocks[self.layer_idx], self._first_visible(start)
        return StoredKV(state, blocks, self.layer_idx, first, state.rows.end, (key_states, value_states))

    def update_traced(
        self, key_states: torch.Tensor, value_states: torch.Tensor, cache: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, for a forward that is being compiled; `cache` is of `graph_operator.register`."""
        tokens = self._state.rows.tokens
        key_states, value_states = as_attended(key_states), as_attended(value_states)
        start, end = tokens[self.layer_idx], tokens[self.layer_idx] + key_states.shape[2]
        visible = end - self._first_visible(start)
        keys, values = graph_operator.update(key_states, value_states, cache, self.layer_idx, start, visible)
        tokens[self.layer_idx] = end  # the compiler does not see that the operator does it
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next forward of `query_length` tokens will attend."""
        if query_length == 0:
            raise no_new_tokens(self.layer_idx, self.get_seq_length())
        state = self._state
        state.has_masks = True
        self._settle()
        state.check_chunk(query_length, is_warm=state.rows.tokens[self.layer_idx] > 0)
        if state.is_static and state.rows.batch:
            if torch.compiler.is_compiling():
                return state.layer_groups.row_capacity_tokens, 0
            if query_length == 1 and state.is_attended():
                room = StaticLength(state.layer_groups.row_capacity_tokens)
                room.check_room = state.check_static_room
                return room, 0
            state.pull()
        tokens = state.rows.tokens[self.layer_idx]
        first = self._first_visible(tokens)
        length = tokens - first + query_length
        if torch.compiler.is_compiling():
            return length, first
        state.check_before_layers()
        if not state.is_attended():
            return length, first  # nobody but the mask function of this package knows more than an int
        announced = PagedLength(length)
        announced.note = partial(state.note_mask, tokens, query_length)
        return announced, first

    def get_seq_length(self) -> int:
        """Tokens per row that this layer has seen; a tensor in a step that is being compiled."""
        self._settle()
        if self._state.is_static and self._state.rows.batch:
            if torch.compiler.is_compiling() and self.is_initialized:
                return self.length_tensor()  # type: ignore[return-value]  # as static layers of the host do
            self._state.pull()
        return self._state.rows.tokens[self.layer_idx]

    def length_tensor(self) -> torch.Tensor:
        """Tokens of a static row, as the device knows it; the host does not wait for it."""
        group = self._state.layer_groups.static_of(self.layer_idx)
        assert group is not None, "the groups of a static cache are static"
        return group.static_blocks[self.layer_idx].lengths[0]

    def get_max_length(self) -> int:
        """Tokens that a static row can hold, otherwise -1: the pool bounds the sum over rows."""
        return self._state.layer_groups.row_capacity_tokens if self._state.is_static else -1

    # --- what people read -----------------------------------------------------------------------------------

    keys: torch.Tensor | None = _stored_side(0, "keys")
    values: torch.Tensor | None = _stored_side(1, "values")

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # an attribute in the host
        """Whether a decode step of this layer can be compiled."""
        return self._state.is_static

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # an attribute in the host
        """Whether K and V of this layer have a place, in rows that there are."""
        return self._blocks is not None and self._state.rows.batch > 0

    @property
    def device(self) -> torch.device | None:
        """Device of the stored K and V."""
        return None if self._blocks is None else self._blocks.keys.device

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the stored K and V."""
        return None if self._blocks is None else self._blocks.keys.dtype

    @property
    def backend(self) -> str | None:
        """Name of the kernels that serve this layer; None before the first update."""
        return None if self._blocks is None else dispatch.backend_name(self._blocks)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.get_seq_length()} tokens)"

    # --- what belongs to the cache --------------------------------------------------------------------------

    reset = _of_the_cache("reset")
    crop = _of_the_cache("crop")
    reorder_cache = _of_the_cache("reorder_cache")
    batch_repeat_interleave = _of_the_cache("batch_repeat_interleave")
    batch_select_indices = _of_the_cache("batch_select_indices")
    offload = refused(f"`offload`: {UNMOVABLE}")
    prefetch = refused(f"`prefetch`: {UNMOVABLE}")

    def _settle(self) -> None:
        """See to what an ended forward has left; steps over static rows are compiled whole, and refuse."""
        if self._state.is_settled:
            return
        if not torch.compiler.is_compiling():
            self._state.settle()
        elif not self._state.is_static:
            self._settle_between_graphs()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is
    def _settle_between_graphs(self) -> None:
        """A graph cannot look at the stack. It is broken only after a forward that has failed."""
        self._state.settle()

    def _first_visible(self, tokens: int) -> int:
        """First stored token that a query after `tokens` tokens attends."""
        return 0

    def _stored_views(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._blocks is None or not self._state.rows.batch:
            return None
        tokens = self.get_seq_length()
        # Whoever reads `keys` and then `values` (every cross-attention does) gets two views of one thing.
        stored = self._last_read() if self._last_read is not None else None
        # A deep copy keeps the reference of its original.
        if stored is None or stored.state is not self._state or stored.end != tokens or not stored.is_current:
            self._state.check_reader(self.layer_idx)
            start = self._first_visible(tokens)
            stored = StoredKV(self._state, self._blocks, self.layer_idx, start, tokens)
            self._last_read = weakref.ref(stored)
        if self._state.rows.gradients_from is not None and torch.is_grad_enabled():
            return stored.in_graph(is_lazy=True)
        return stored.views()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is
    def _update_between_graphs(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `update`, for a forward that somebody has compiled: its graphs take dense tensors."""
        keys, values = self.update(key_states, value_states)
        return dense(keys), dense(values)

    @property
    def _blocks(self) -> LayerBlocks | None:
        return self._state.blocks.get(self.layer_idx)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raise unless K and V fit. Decode steps bring the same again and again, so look for that first."""
        seen = (key_states.shape, value_states.shape, key_states.dtype, value_states.dtype, key_states.device)
        if seen == self._last_seen and self._state.rows.batch == seen[0][0]:
            return
        if (reason := self._mismatch(key_states, value_states)) is not None:
            if self._state.rows.is_next(self.layer_idx):
                self._state.abort_step()  # earlier layers have written tokens that this one can not
            raise CacheMismatchError(f"layer {self.layer_idx}: {reason}")
        self._last_seen = seen

    def _mismatch(self, key_states: torch.Tensor, value_states: torch.Tensor) -> str | None:
        """Why K and V do not fit, and what would; None if they do."""
        batch, blocks = self._state.rows.batch, self._blocks
        k, v, dtype, device = key_states.shape, value_states.shape, key_states.dtype, key_states.device
        got = f"got K {tuple(k)} {dtype} on {device} and V {tuple(v)} {value_states.dtype}"
        if len(k) != 4 or len(v) != 4 or k[:3] != v[:3]:
            return f"K and V must be [batch, kv_heads, tokens, head_dim] and agree in the first three; {got}"
        if not _have_content(key_states, value_states):
            return f"K and V must have at least one row, one kv head and one channel; {got}"
        if batch and k[0] != batch:
            return (
                f"the cache holds {batch} rows, {got}. Use `cache.batch_repeat_interleave(n)` to copy rows, "
                "`cache.batch_select_indices(...)` to drop some, or `cache.reset()` for a new batch"
            )
        if blocks is None and dtype == value_states.dtype:
            return None
        if blocks is None:
            return (
                f"K and V must have one dtype; {got}. Run the model under `torch.autocast`, whose dtype both "
                "are stored in, or cast them before `cache.update(...)`"
            )
        kv_heads, head_dim, v_head_dim = blocks.keys.shape[1], blocks.keys.shape[3], blocks.values.shape[3]
        stored = kv_heads, head_dim, v_head_dim, blocks.keys.dtype, blocks.keys.dtype, blocks.keys.device
        if stored == (k[1], k[3], v[3], dtype, value_states.dtype, device):
            return None
        return (
            f"this cache stores {kv_heads} kv heads, head_dim {head_dim} (K) and {v_head_dim} (V), "
            f"{blocks.keys.dtype} on {blocks.keys.device}; {got}. A cache serves one model in one dtype on "
            "one device, and under `torch.autocast` that is the dtype of autocast: go on as the cache was "
            "filled, or make a new PagedCache"
        )


class PagedWindowLayer(PagedLayer):  # type: ignore[no-untyped-call]  # __init_subclass__ of the host
    """A layer that attends a window (sliding or chunked attention): blocks outside it are given back."""

    is_sliding = True

    def __init__(self, state: CacheState, layer_idx: int, sliding_window: int) -> None:
        super().__init__(state, layer_idx)
        self.sliding_window = sliding_window  # tokens a query sees, itself included
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]  # an attribute in the host
        """Tokens per row that this layer has seen, under the name that window layers of the host have."""
        return self.get_seq_length()

    @property
    def record_past(self) -> bool:
        """Whether blocks outside the window are kept until the next `crop`."""
        return self._state.rows.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self._state.rows.record_past = value

    def activate_past_recording(self) -> None:
        """Keep what the window would drop, so that `crop` can roll back."""
        self._state.rows.record_past = True

    def get_max_length(self) -> int:
        """Tokens a query sees."""
        return self.sliding_window

    def _first_visible(self, tokens: int) -> int:
        return max(0, tokens - (self.sliding_window - 1))


def _have_content(key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
    """Whether K and V `[batch, kv_heads, tokens, head_dim]` have rows, heads and channels, if not tokens."""
    batch, kv_heads, _, head_dim = key_states.shape
    return min(batch, kv_heads, head_dim, value_states.shape[3]) > 0


def _check_data(layer_idx: int, *sides: torch.Tensor) -> None:
    """Raise CacheMismatchError if nobody has computed K or V, or a transform keeps the numbers to itself."""
    for states in sides:
        try:
            has_data = states.untyped_storage().device.type != "meta"
        except NotImplementedError:  # torch's word for a tensor that stands for others
            has_data = False
        if not has_data:
            raise CacheMismatchError(
                f"layer {layer_idx}: K and V have no data, as on the meta device, in FakeTensorMode and "
                "inside transforms of torch.func, and a paged cache stores data. Use a DynamicCache there; "
                "`plan_memory` tells sizes without a forward"
            )
