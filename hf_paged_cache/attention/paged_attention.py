"""Paged attention as an attention implementation of `transformers`.

`activate` puts a name of ours into a model's config; under that name the host finds a pair of functions
(attention and mask) that read blocks when K and V are views of a `PagedCache`, and in every other case call
the implementation that was set before. The name carries that implementation (`hf_paged_cache_sdpa`), so
nothing else has to be remembered and `deactivate` can undo it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.store.static_group import Reader, StaticGroup

from . import compiled_step, masks, vetting
from .attention_call import AttentionCall, Output
from .masks import LazyMask
from .view import PagedView

NAME_PREFIX = "hf_paged_cache_"
_FALLBACKS = ("sdpa", "eager")
Observer = Callable[[AttentionCall, torch.Tensor], None]
_OBSERVERS: list[Observer] = []


def activate(config_or_model: object) -> bool:
    """Let the attention layers of a model read blocks. Constructing a `PagedCache` does this.

    Args:
        config_or_model: A model, or the config object that it holds.

    Returns:
        Whether any attention layer takes part. If not (attention code of the model's own, or an
        implementation other than sdpa and eager), a `PagedCache` still works: its K and V become dense
        tensors at every layer.
    """
    active = False
    for held, modeling in compat.attention_configs(config_or_model):
        current = held._attn_implementation
        if current is not None and current.startswith(NAME_PREFIX):
            active = True
        elif current in _FALLBACKS and compat.dispatches_attention(modeling, current):
            mask = masks.make_mask_function(current)
            compat.register_attention(NAME_PREFIX + current, _make_attention(current), mask)
            compat.call_before_continuous_batching(deactivate)
            compat.pickle_with(type(held), _plain_name)
            compat.set_implementation(held, NAME_PREFIX + current)
            active = True
    return active


def watch(config_or_model: object) -> Callable[[], bool]:
    """A function that tells whether attention of this package is on in a model, whenever it is asked."""
    configs = [held for held, _ in compat.attention_configs(config_or_model)]
    return lambda: any(str(held._attn_implementation).startswith(NAME_PREFIX) for held in configs)


def deactivate(config_or_model: object) -> None:
    """Give a model back the attention implementation it had before `activate`."""
    for held, _ in compat.attention_configs(config_or_model):
        current = held._attn_implementation
        if current is not None:
            compat.set_implementation(held, _plain_name(current))


@contextmanager
def paged_attention(config_or_model: object) -> Iterator[None]:
    """Paged attention inside the block; afterwards the model is as it was."""
    before = [(held, held._attn_implementation) for held, _ in compat.attention_configs(config_or_model)]
    activate(config_or_model)
    try:
        yield
    finally:
        for held, implementation in before:
            compat.set_implementation(held, implementation)


def _plain_name(implementation: str) -> str:
    return implementation.removeprefix(NAME_PREFIX)


def _make_attention(implementation: str) -> Callable[..., Output]:
    def paged_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Output:
        call = AttentionCall(implementation, module, query, key, value, attention_mask, kwargs)
        if torch.compiler.is_compiling():
            output = compiled_step.attend(call)
            return call.of_host(key, value) if output is None else (output, None)
        result = compute(call)
        for observer in _OBSERVERS:
            observer(call, result[0])
        return result

    return paged_attention_forward


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Show an observer the calls of the attention function, and what they return, inside the block.

    It does not see those of compiled steps, and of models whose attention layers do not take part.
    """
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


def compute(call: AttentionCall) -> Output:
    """Answer a call: by a kernel if it may, and by the host's function otherwise. No observer sees this."""
    key, value, rows = call.key, call.value, call.query.shape[0]
    if type(key) is PagedView and key.stored.state.rows.batch == 1 != rows:
        # Cross-attention over the text of one row, which all beams share.
        key, value = (dense(side).expand(rows, -1, -1, -1) for side in (key, value))
    if type(key) is not PagedView or type(value) is not PagedView or key.stored is not value.stored:
        return call.of_host(key, value)
    stored, mask = key.stored, call.mask
    if mask is not None and stored.state.is_static and mask.dim() == 4:
        # Masks for static rows are as wide as a row can be.
        is_wide = mask.shape[3] == stored.state.layer_groups.row_capacity_tokens != stored.end - stored.start
        mask = mask[..., stored.start : stored.end] if is_wide else mask
    mask = mask if type(mask) is LazyMask else dense(mask)
    call = call if mask is call.mask else replace(call, mask=mask)
    if isinstance(stored.group, StaticGroup) and getattr(call.module, "layer_idx", None) == stored.layer_idx:
        stored.group.readers[stored.layer_idx] = Reader(weakref.ref(call.module))
    if vetting.may_answer(call, stored):
        return call.of_kernel(stored), None
    if call.is_eager and isinstance(stored.group, StaticGroup):
        return vetting.answer_and_vet(call, stored, stored.group)
    return call.of_host(key, value)
