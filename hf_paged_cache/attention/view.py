"""Lazy views of stored K and V.

The attention function of this package reads the blocks behind a view. Anything else that touches one (another
attention function, a hook, user code) gets the dense tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.errors import PagedCacheError, StaleViewError
from hf_paged_cache.host.lazy_tensor import LazyTensor, make_wrapper
from hf_paged_cache.kernels import dispatch

if TYPE_CHECKING:
    from hf_paged_cache.forward.state import CacheState
    from hf_paged_cache.kernels.call import LayerBlocks


class StoredKV:
    """K and V of one layer over stored tokens `[start, end)`, and what of them this forward brought.

    Attributes:
        blocks: Where the layer's K and V lie.
        state: The cache that they belong to.
        group: Whose tables put them in order.
        layer_idx: Index of the layer, for messages.
        start: First token of the view.
        end: One past the last token.
        fresh_keys: `[batch, kv_heads, new tokens, head_dim]` as the model gave them, the last tokens of the
            view; None for a view that was not returned by `update`.
        fresh_values: The same for V.
    """

    __slots__ = (
        "__weakref__",
        "_dense",
        "_version",
        "blocks",
        "end",
        "fresh_keys",
        "fresh_values",
        "group",
        "layer_idx",
        "start",
        "state",
    )

    def __init__(
        self,
        state: CacheState,
        blocks: LayerBlocks,
        layer_idx: int,
        start: int,
        end: int,
        fresh_keys: torch.Tensor | None = None,
        fresh_values: torch.Tensor | None = None,
    ) -> None:
        self.state = state
        self.group = group = state.layer_groups.of(layer_idx)
        self.blocks = blocks
        self.layer_idx = layer_idx
        self.start = start
        self.end = end
        self.fresh_keys = fresh_keys
        self.fresh_values = fresh_values
        self._version = group.manager.version
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def history_end(self) -> int:
        """One past the last token that earlier forwards stored."""
        return self.end if self.fresh_keys is None else self.end - self.fresh_keys.shape[2]

    @property
    def has_history(self) -> bool:
        """Whether the view goes further back than this forward."""
        return self.history_end > self.start

    @property
    def is_current(self) -> bool:
        """Whether the blocks behind the view still hold the tokens that they held when it was made.

        A block of a quantized layer that was sealed since gives what its bytes say.
        """
        return self._version == self.group.manager.version

    def check_current(self) -> None:
        """Raise if the blocks behind the view have changed since it was made."""
        if not self.is_current:
            raise StaleViewError(
                f"this view of the K/V of layer {self.layer_idx} was made before the cache was cropped, "
                "reordered or reset, and its blocks have moved on; read `cache.layers[i].keys` again, or "
                "`.clone()` it in time"
            )

    def as_stored(self) -> StoredKV:
        """The same tokens, those of this forward as they are stored."""
        return StoredKV(self.state, self.blocks, self.layer_idx, self.start, self.end)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K `[batch, kv_heads, tokens, head_dim]` and V as ordinary tensors, built once per view."""
        if self._dense is None:
            if not self.has_history and self.fresh_keys is not None and self.fresh_values is not None:
                return self.fresh_keys, self.fresh_values
            self.check_current()
            keys, values = dispatch.gather(self.blocks, self.start, self.history_end)
            if self.fresh_keys is not None and self.fresh_values is not None:
                # What a window layer will not need again was never stored, so the new tokens are taken from
                # here.
                keys = torch.cat((keys, self.fresh_keys), dim=2)
                values = torch.cat((values, self.fresh_values), dim=2)
            self._dense = keys, values
        return self._dense

    def views(self) -> tuple[PagedView, PagedView]:
        """The lazy K and V that stand for this."""
        keys = self.blocks.keys
        _, heads, _, head_dim = keys.shape
        batch, tokens, dtype, device = self.state.rows.batch, self.end - self.start, keys.dtype, keys.device
        return (
            PagedView(self, 0, (batch, heads, tokens, head_dim), dtype, device),
            PagedView(self, 1, (batch, heads, tokens, self.blocks.values.shape[3]), dtype, device),
        )

    def in_graph(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of this, as part of a graph whose gradients they pass on, or refuse.

        A gradient that arrives at tokens which earlier forwards stored ends there. That is right for tokens
        that were constants when they came, and would be a wrong answer for the others.
        """
        first = self.state.rows.gradients_from
        if first is None or first >= self.history_end:
            return keys, values
        wanted = slice(max(first - self.start, 0), self.history_end - self.start)
        apply: Any = _Cached.apply
        return apply(keys, _IN_GRAPH, wanted), apply(values, _IN_GRAPH, wanted)


_IN_GRAPH = torch.empty(0, requires_grad=True)
"""Makes the result of a function part of a graph, whether its other arguments are or not."""


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

    @staticmethod
    def __new__(
        cls, stored: StoredKV, side: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> PagedView:
        """A view of `shape`, without storage."""
        view: PagedView = make_wrapper(cls, shape, dtype, device)
        view.stored = stored
        view.side = side
        return view

    def dense(self) -> torch.Tensor:
        """The ordinary tensor `[batch, kv_heads, tokens, head_dim]`."""
        return self.stored.dense()[self.side]

    def origin(self) -> str:
        """Side and layer."""
        return f"stored {'values' if self.side else 'keys'} of layer {self.stored.layer_idx}"
