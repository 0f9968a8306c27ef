"""Lazy views of stored K and V.

The attention function of this package reads the blocks behind a view. Anything else that touches one (another
attention function, a hook, user code) gets the dense tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.errors import PagedCacheError, StaleViewError
from hf_paged_cache.host.lazy_tensor import LazyTensor
from hf_paged_cache.kernels import dispatch

if TYPE_CHECKING:
    from hf_paged_cache.forward.state import CacheState
    from hf_paged_cache.kernels.call import LayerBlocks
    from hf_paged_cache.store.layer_group import LayerGroup


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class StoredKV:
    """K and V of one layer over stored tokens `[start, end)`, and what of them this forward brought."""

    state: CacheState
    blocks: LayerBlocks
    layer_idx: int
    start: int
    end: int
    # K and V `[batch, kv_heads, new tokens, head_dim]` of the last tokens as the model gave them; None for a
    # view that was not returned by `update`.
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None
    group: LayerGroup = field(init=False)  # whose tables put the blocks in order
    _version: int = field(init=False)
    _dense: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.group = self.state.layer_groups.of(self.layer_idx)
        self._version = self.group.manager.version

    @property
    def history_end(self) -> int:
        """One past the last token that earlier forwards stored."""
        return self.end if self.fresh is None else self.end - self.fresh[0].shape[2]

    @property
    def has_history(self) -> bool:
        """Whether the view goes further back than this forward."""
        return self.history_end > self.start

    @property
    def has_gap(self) -> bool:
        """Whether some token of a window is not stored."""
        return self.group.window is not None and self.group.manager.has_gap(self.start)

    @property
    def is_current(self) -> bool:
        """Whether the blocks still hold the tokens of the view, sealed since or not."""
        return self._version == self.group.manager.version

    def check_current(self) -> None:
        """Raise StaleViewError if the blocks behind the view have changed since it was made."""
        if not self.is_current:
            raise StaleViewError(
                f"this view of the K/V of layer {self.layer_idx} was made before the cache was cropped, "
                "reordered or reset, and its blocks have moved on; read `cache.layers[i].keys` again, or "
                "`.clone()` it in time"
            )

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[batch, kv_heads, tokens, head_dim]` and V as ordinary tensors, built once per view."""
        if self._dense is None:
            if not self.has_history and self.fresh is not None:
                return self.fresh
            self.check_current()
            keys, values = dispatch.gather(self.blocks, self.start, self.history_end)
            if self.fresh is not None:
                # What a window layer will not need again was never stored: the new tokens come from here.
                keys, values = (torch.cat(sides, 2) for sides in zip((keys, values), self.fresh, strict=True))
            self._dense = keys, values
        return self._dense

    def views(self) -> tuple[PagedView, PagedView]:
        """The lazy K and V that stand for this."""
        return self._view(self.blocks.keys, 0), self._view(self.blocks.values, 1)

    def _view(self, pool: torch.Tensor, side: int) -> PagedView:
        shape = (self.state.rows.batch, pool.shape[1], self.end - self.start, pool.shape[3])
        view = PagedView.of_shape(shape, pool.dtype, pool.device)
        view.stored, view.side = self, side
        return view

    def in_graph(self, *, is_lazy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, lazy or dense, as part of a graph whose gradients they pass on, or refuse.

        A gradient that arrives at tokens which earlier forwards stored ends there. That is right for tokens
        that were constants when they came, and would be a wrong answer for the others.
        """
        keys, values = self.views() if is_lazy else self.dense()
        first = self.state.rows.gradients_from
        if first is None or first >= self.history_end:
            return keys, values
        wanted = slice(max(first - self.start, 0), self.history_end - self.start)
        apply: Any = _Cached.apply
        return apply(keys, _IN_GRAPH, wanted), apply(values, _IN_GRAPH, wanted)


_IN_GRAPH = torch.empty(0, requires_grad=True)  # makes the result of a function part of a graph


class _Cached(torch.autograd.Function):
    """The same tensor; its backward refuses gradients of the tokens that are stored without their graph."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, in_graph: torch.Tensor, wanted: slice) -> torch.Tensor:
        """`states` `[batch, kv_heads, tokens, head_dim]`; `wanted` are the tokens to look at."""
        ctx.wanted = wanted
        # A view keeps what was gathered as long as somebody has it; the result is to do the same.
        ctx.view = states if isinstance(states, PagedView) else None
        return states.detach()  # to autograd no view: writes would be its error, and not ours

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient, if there is none for stored tokens."""
        if bool(gradient[:, :, ctx.wanted].any()):
            raise PagedCacheError(
                "a gradient has arrived at K and V that an earlier forward stored under grad mode, and that "
                "want it; but a PagedCache stores K and V without their graph, so it would be lost. Use a "
                "DynamicCache, which keeps the graph; or, if these tokens are to be constants, run the "
                "forwards that fill the cache under `torch.no_grad()`, or go on with a copy made under it, "
                "`PagedCache.from_cache(cache, model)`"
            )
        return gradient, None, None


class PagedView(LazyTensor):
    """Stands for the dense K (side 0) or V (side 1) of one layer."""

    stored: StoredKV
    side: int

    def dense(self) -> torch.Tensor:
        """The ordinary tensor `[batch, kv_heads, tokens, head_dim]`."""
        return self.stored.dense()[self.side]

    def origin(self) -> str:
        """Side and layer."""
        return f"stored {'values' if self.side else 'keys'} of layer {self.stored.layer_idx}"
