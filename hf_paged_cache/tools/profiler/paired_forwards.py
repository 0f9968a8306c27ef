"""The two runs of `profile_cache`, forward by forward: one on full-precision K and V, one on a format's."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.attention.paged_attention import compute, observe
from hf_paged_cache.attention.view import PagedView
from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import dense

from .step_errors import HeadSums, LayerErrors, errors_of

if TYPE_CHECKING:
    from hf_paged_cache.attention.attention_call import AttentionCall

# Arguments that the full-precision cache takes, too; the others say how K and V are stored.
_ALSO_FULL = ("block_size", "max_tokens", "max_cache_len", "gpu_memory_utilization")


class _FullCache(PagedCache):
    """Full precision, and beside it another cache that is given the same K and V."""

    def __init__(self, model: object, own: PagedCache | None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.own = own
        self.own_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        views = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.own is not None:
            self.own_views[layer_idx] = self.own.update(key_states, value_states, layer_idx)
        return views


class Pair:
    """The two runs, and the errors between them: `full` in full precision, and `cache` in the format.

    Layers are looked at if `full` has its `own`, which stores the K and V of that run in the format.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any], *, with_layers: bool) -> None:
        self._model = model
        self.cache = PagedCache(model, **arguments)
        own = PagedCache(model, **arguments) if with_layers else None
        self.full = _FullCache(model, own, **{key: arguments[key] for key in _ALSO_FULL if key in arguments})
        # By layer. Own: full precision's queries over what `full.own` has stored.
        self._attention: dict[int, HeadSums] = defaultdict(HeadSums)
        self._own_attention: dict[int, HeadSums] = defaultdict(HeadSums)
        self._outputs: dict[int, torch.Tensor] = {}

    def feed(self, tokens: torch.Tensor, *, is_prompt: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed `[batch, tokens]`; return next logits `[batch, vocabulary]` of the format and of the other."""
        observes = self.full.own is not None and not is_prompt
        full_logits = self._forward(tokens, self.full, self._observe_full if observes else None)
        logits = self._forward(tokens, self.cache, self._observe_format if observes else None)
        self._outputs.clear()
        self.full.own_views.clear()
        return logits, full_logits

    def layer_errors(self) -> tuple[LayerErrors, ...]:
        """The errors of every layer now, those of attention since the last call."""
        missing = sorted(set(self.cache._state.blocks) - set(self._attention))
        if missing:
            raise UnsupportedLayerError(
                f"layers {missing} of this {self._model.config.model_type!r} model do not hand the K and V "
                "of the cache to an attention function that can be observed (code of their own, or an "
                "implementation other than sdpa and eager), so their attention cannot be profiled; load the "
                "model with attn_implementation='sdpa' if it has that"
            )
        found = []
        for layer, attention in sorted(self._attention.items()):
            keys, values, own_keys, own_values = (
                errors_of(dense(getattr(got, side)), dense(getattr(self.full.layers[layer], side)))
                for got in (self.cache.layers[layer], self.full.own.layers[layer])  # type: ignore[union-attr]
                for side in ("keys", "values")
            )
            own = own_keys, own_values, self._own_attention[layer].errors()
            found.append(LayerErrors(layer, keys, values, attention.errors(), *own))
        self._attention.clear()
        self._own_attention.clear()
        return tuple(found)

    def _forward(
        self, tokens: torch.Tensor, cache: PagedCache, observer: Callable[..., None] | None
    ) -> torch.Tensor:
        options: dict[str, Any] = {compat.cache_argument(self._model): cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(type(self._model).forward).parameters:
            options["logits_to_keep"] = 1
        with observe(observer) if observer else nullcontext():
            output = self._model(input_ids=tokens, **options)
        logits: torch.Tensor | None = getattr(output, "logits", None)
        if logits is None or logits.dim() != 3:
            raise PagedCacheError(
                "model must give logits [batch, tokens, vocabulary], as AutoModelForCausalLM loads it; got a "
                f"{type(self._model).__name__}"
            )
        return logits[:, -1]

    def _observe_full(self, call: AttentionCall, output: torch.Tensor) -> None:
        if (layer := _layer_of(call, self.full)) is not None:
            self._outputs[id(call.module)] = output
            keys, values = self.full.own_views[layer]
            own, _ = compute(replace(call, key=keys, value=values))
            self._own_attention[layer].add(own.transpose(1, 2), output.transpose(1, 2))

    def _observe_format(self, call: AttentionCall, output: torch.Tensor) -> None:
        if (layer := _layer_of(call, self.cache)) is not None:
            want = self._outputs[id(call.module)]
            self._attention[layer].add(output.transpose(1, 2), want.transpose(1, 2))


def _layer_of(call: AttentionCall, cache: PagedCache) -> int | None:
    """The layer of a cache whose K and V a call attends; None if they are not of that cache."""
    if type(call.key) is PagedView and call.key.stored.state is cache._state:
        return call.key.stored.layer_idx
    return None


def bytes_per_token(cache: PagedCache) -> dict[int, float]:
    """Layer index -> bytes of K and V of one token in all heads, for layers that hold any."""
    found = {}
    for layer, blocks in sorted(cache._state.blocks.items()):
        heads, block_size, head_dim = blocks.keys.shape[1:]
        plain = float((head_dim + blocks.values.shape[3]) * blocks.keys.dtype.itemsize)
        found[layer] = heads * (plain if blocks.layout is None else blocks.layout.nbytes / block_size)
    return found
