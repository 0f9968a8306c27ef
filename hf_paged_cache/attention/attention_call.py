"""One call of an attention function, and the two that can answer it: the host's own, and a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.autocast import as_attended, without_autocast
from hf_paged_cache.kernels.call import Attention
from hf_paged_cache.kernels.prefill import MAX_DECODE_TOKENS, attend_with_history

from .masks import LazyMask

if TYPE_CHECKING:
    from .view import StoredKV

Output = tuple[torch.Tensor, torch.Tensor | None]
"""`[batch, q_tokens, q_heads, v_head_dim]`, and the weights, which only functions of the host return."""


@dataclass(slots=True, eq=False)
class AttentionCall:
    """What a call of the attention function was given."""

    implementation: str  # that was set before, `sdpa` or `eager`
    module: torch.nn.Module  # of the attention
    query: torch.Tensor  # `[batch, q_heads, q_tokens, head_dim]`
    key: torch.Tensor  # `[batch, kv_heads, tokens, head_dim]`, a `PagedView` if straight from a `PagedCache`
    value: torch.Tensor  # `[batch, kv_heads, tokens, v_head_dim]`, the same
    mask: torch.Tensor | None  # as the mask function made it
    kwargs: dict[str, Any]  # what else the module passes

    @property
    def is_eager(self) -> bool:
        """Whether the function that was set before is one of the model's own."""
        return self.implementation == "eager"

    @property
    def scale(self) -> float:
        """Factor on q·k."""
        scale: float | None = self.kwargs.get("scaling")
        return 1.0 / math.sqrt(self.query.shape[3]) if scale is None else scale

    # The host's sdpa knows neither; where it does not refuse them, prompts are computed without.
    @property
    def softcap(self) -> float | None:
        """What scores are capped at."""
        return self.kwargs.get("softcap") if self.is_eager else None

    @property
    def sinks(self) -> torch.Tensor | None:
        """Logits `[q_heads]` that take probability and have no value."""
        return self.kwargs.get("s_aux") if self.is_eager else None

    def suits_kernels(self, dtype: torch.dtype, tokens: int) -> bool:
        """Whether kernels take such a query and mask over so many tokens, and what they return is enough."""
        mask = self.mask
        return (
            as_attended(self.query).dtype == dtype
            and (mask is None or (isinstance(mask, torch.Tensor) and mask.shape[3:] == (tokens,)))
            and not (self.is_eager and compat.wants_weights(self.module, self.kwargs))  # which they lack
        )

    def of_host(self, key: torch.Tensor, value: torch.Tensor) -> Output:
        """What the host's function returns for these K and V."""
        function = compat.attention_function(self.implementation, self.module)
        states = self.query, dense(key), dense(value), dense(self.mask)
        output: Output = function(self.module, *states, **self.kwargs)
        return output

    def of_kernel(self, stored: StoredKV) -> torch.Tensor:
        """What a kernel returns for stored K and V, `[batch, q_tokens, q_heads, v_head_dim]`."""
        stored.check_current()
        query, q_tokens = as_attended(self.query), self.query.shape[2]
        mask, is_causal = self._pattern()
        # One query reads its own K and V as they are stored. More are a prompt or a draft, and see each other
        # in the model's precision.
        reads_own = q_tokens == 1 or stored.fresh is None or stored.blocks.records is None
        question = Attention(query, stored.start, stored.end, float(self.scale), mask, is_causal)
        question.softcap, question.sinks = self.softcap, self.sinks
        if q_tokens <= MAX_DECODE_TOKENS and reads_own and not stored.has_gap:
            return dispatch.decode(stored.blocks, question)[0]
        assert stored.fresh is not None, "only views returned by `update` come this far"
        question.end, question.queries_are_last = stored.history_end, False
        with without_autocast(query):
            return attend_with_history(stored.blocks, question, *stored.fresh)

    def _pattern(self) -> tuple[torch.Tensor | None, bool]:
        """The mask for the kernel, and whether causality comes on top of it."""
        mask, has_more, is_causal = self.mask, self.query.shape[2] > 1, False
        if type(mask) is LazyMask:
            mask, is_causal = None if mask.padding is None else mask.padding[:, None, None, :], has_more
        elif mask is None and not self.is_eager:
            # Eager functions mask nothing that they are not given a mask for.
            given = self.kwargs.get("is_causal")
            is_causal = has_more and bool(getattr(self.module, "is_causal", True) if given is None else given)
        bias = self.kwargs.get("position_bias")
        if bias is not None and mask is not None:
            bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask
        return mask if bias is None else bias, is_causal
