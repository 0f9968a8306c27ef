"""A run of a model in full precision and one on a format, token by token side by side."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from hf_paged_cache.attention.attention_call import AttentionCall
from hf_paged_cache.attention.paged_attention import compute, observe
from hf_paged_cache.attention.view import PagedView
from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import dense

from .measure import HeadSums, errors_of
from .report import LayerErrors

_ALSO_FULL = ("block_size", "max_tokens", "max_cache_len", "gpu_memory_utilization")
"""Arguments that the full-precision cache takes, too; the others say how K and V are stored."""


class _FullCache(PagedCache):
    """Full precision, and beside it another cache that is given the same K and V."""

    def __init__(self, model: object, twin: PagedCache | None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.twin = twin
        self.twin_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.twin is not None:
            self.twin_views[layer_idx] = self.twin.update(key_states, value_states, layer_idx)
        return views


class Pair:
    """The two runs, and the errors between them.

    Attributes:
        full: The cache of the run in full precision.
        cache: That of the run in the format.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any], *, with_layers: bool) -> None:
        self._model = model
        self._with_layers = with_layers
        self.cache = PagedCache(model, **arguments)
        twin = PagedCache(model, **arguments) if with_layers else None
        self.full = _FullCache(model, twin, **{key: arguments[key] for key in _ALSO_FULL if key in arguments})
        # By layer. Own: full precision's queries over the twin's K and V.
        self._attention: dict[int, HeadSums] = {}
        self._own_attention: dict[int, HeadSums] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def feed(self, tokens: torch.Tensor, *, is_prompt: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens `[batch, tokens]` to both runs.

        Returns:
            Logits `[batch, vocabulary]` of the next token on the format, and in full precision.
        """
        looks = self._with_layers and not is_prompt
        full_logits = self._forward(tokens, self.full, self._see_full if looks else None)
        logits = self._forward(tokens, self.cache, self._see_format if looks else None)
        self._outputs.clear()
        self.full.twin_views.clear()
        return logits, full_logits

    def layer_errors(self) -> tuple[LayerErrors, ...]:
        """The errors of every layer now, those of attention since the last call."""
        self._check_seen()
        found = []
        for layer, attention in sorted(self._attention.items()):
            keys, values, own_keys, own_values = (
                errors_of(dense(getattr(got, side)), dense(getattr(self.full.layers[layer], side)))
                for got in (self.cache.layers[layer], self.full.twin.layers[layer])  # type: ignore[union-attr]
                for side in ("keys", "values")
            )
            found.append(
                LayerErrors(
                    layer,
                    keys,
                    values,
                    attention.errors(),
                    own_keys,
                    own_values,
                    self._own_attention[layer].errors(),
                )
            )
        self._attention.clear()
        self._own_attention.clear()
        return tuple(found)

    def _forward(
        self, tokens: torch.Tensor, cache: PagedCache, observer: Callable[..., None] | None
    ) -> torch.Tensor:
        accepted = inspect.signature(type(self._model).forward).parameters
        options: dict[str, Any] = {compat.cache_argument(self._model): cache}
        if "logits_to_keep" in accepted:
            options["logits_to_keep"] = 1
        watching: AbstractContextManager[None] = observe(observer) if observer else nullcontext()
        with watching:
            output = self._model(input_ids=tokens, use_cache=True, **options)
        logits: torch.Tensor | None = getattr(output, "logits", None)
        if logits is None or logits.dim() != 3:
            raise PagedCacheError(
                "model must give logits [batch, tokens, vocabulary], as AutoModelForCausalLM loads it; got a "
                f"{type(self._model).__name__}"
            )
        return logits[:, -1]

    def _see_full(self, call: AttentionCall, output: torch.Tensor) -> None:
        layer = _layer_of(call, self.full)
        if layer is None:
            return
        self._outputs[id(call.module)] = output
        keys, values = self.full.twin_views[layer]
        own, _ = compute(replace(call, key=keys, value=values))
        self._own_attention.setdefault(layer, HeadSums()).add(own.transpose(1, 2), output.transpose(1, 2))

    def _see_format(self, call: AttentionCall, output: torch.Tensor) -> None:
        layer = _layer_of(call, self.cache)
        if layer is not None:
            want = self._outputs[id(call.module)]
            self._attention.setdefault(layer, HeadSums()).add(output.transpose(1, 2), want.transpose(1, 2))

    def _check_seen(self) -> None:
        unseen = sorted(set(bytes_per_token(self.cache)) - set(self._attention))
        if unseen:
            raise UnsupportedLayerError(
                f"layers {unseen} of this {self._model.config.model_type!r} model do not hand the K and V of "
                "the cache to an attention function that can be observed (code of their own, or an "
                "implementation other than sdpa and eager), so their attention cannot be profiled; load the "
                "model with attn_implementation='sdpa' if it has that"
            )


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
        if blocks.form is not None:
            found[layer] = heads * blocks.form.nbytes / block_size
        else:
            found[layer] = float(heads * (head_dim + blocks.values.shape[3]) * blocks.keys.dtype.itemsize)
    return found
