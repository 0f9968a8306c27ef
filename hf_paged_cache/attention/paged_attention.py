"""Paged attention as an attention implementation of `transformers`.

`activate` puts a name of ours into a model's config; under that name the host finds a pair of functions
(attention and mask) that read blocks when K and V are views of a `PagedCache`, and call the implementation
that was set before in every other case: another cache, no cache, a training step, tensors that were computed
from the views. The name carries that implementation (`hf_paged_cache_sdpa`), so nothing else has to be
remembered and `deactivate` can undo it.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged_cache.host import compat
from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.kernels import dispatch
from hf_paged_cache.kernels.autocast import as_attended, without_autocast
from hf_paged_cache.kernels.call import Attention
from hf_paged_cache.kernels.prefill import MAX_DECODE_TOKENS, attend_with_history
from hf_paged_cache.store.static_group import Reader, StaticGroup

from . import compiled_step, masks
from .masks import LazyMask
from .view import PagedView, StoredKV

logger = logging.getLogger("hf_paged_cache")

NAME_PREFIX = "hf_paged_cache_"
MIN_VETTED_TOKENS = 8
"""With fewer keys, attention functions that differ can agree: over one key they all do."""

_FALLBACKS = ("sdpa", "eager")
_TRUSTED: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], bool]] = (
    weakref.WeakKeyDictionary()
)


def activate(config_or_model: object) -> bool:
    """Let the attention layers of a model read blocks. Constructing a `PagedCache` does this.

    Args:
        config_or_model: A model, or the config object that it holds.

    Returns:
        Whether any attention layer takes part. If not (attention code of the model's own, or an
        implementation other than sdpa and eager), a `PagedCache` still works: its K and V become dense
        tensors at every layer.
    """
    config, model = compat.resolve_config(config_or_model)
    active = False
    for held, modeling in compat.attention_configs(config, model):
        current = held._attn_implementation
        if current is not None and current.startswith(NAME_PREFIX):
            active = True
        elif current in _FALLBACKS and compat.dispatches_attention(modeling, current):
            _register(current)
            compat.pickle_with(type(held), _plain_name)
            compat.set_implementation(held, NAME_PREFIX + current)
            active = True
    return active


def watch(config_or_model: object) -> Callable[[], bool]:
    """A function that tells whether attention of this package is on in a model, whenever it is asked."""
    configs = [held for held, _ in compat.attention_configs(*compat.resolve_config(config_or_model))]

    def is_active() -> bool:
        return any(str(held._attn_implementation).startswith(NAME_PREFIX) for held in configs)

    return is_active


def deactivate(config_or_model: object) -> None:
    """Give a model back the attention implementation it had before `activate`."""
    config, model = compat.resolve_config(config_or_model)
    for held, _ in compat.attention_configs(config, model):
        current = held._attn_implementation
        if current is not None:
            compat.set_implementation(held, _plain_name(current))


@contextmanager
def paged_attention(config_or_model: object) -> Iterator[None]:
    """Paged attention inside the block; afterwards the model is as it was."""
    config, model = compat.resolve_config(config_or_model)
    before = [(held, held._attn_implementation) for held, _ in compat.attention_configs(config, model)]
    activate(config_or_model)
    try:
        yield
    finally:
        for held, implementation in before:
            compat.set_implementation(held, implementation)


def _register(implementation: str) -> None:
    name = NAME_PREFIX + implementation
    compat.register_attention(name, _make_attention(implementation), masks.make_mask_function(implementation))
    compat.call_before_continuous_batching(deactivate)


def _plain_name(implementation: str) -> str:
    return implementation.removeprefix(NAME_PREFIX)


def _make_attention(implementation: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    is_eager = implementation == "eager"

    def paged_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if torch.compiler.is_compiling():
            output = compiled_step.attend(
                module, query, key, value, attention_mask, kwargs, is_eager=is_eager
            )
            if output is not None and not (is_eager and compat.wants_weights(module, kwargs)):
                return output, None
            return _host_attention(implementation, module, query, key, value, attention_mask, kwargs)
        result = _compute(implementation, module, query, key, value, attention_mask, kwargs)
        for observer in _OBSERVERS:
            call = AttentionCall(implementation, module, query, key, value, attention_mask, kwargs)
            observer(call, result[0])
        return result

    return paged_attention_forward


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a call of the attention function was given.

    Attributes:
        implementation: The implementation that was set before, `sdpa` or `eager`.
        module: The attention module.
        query: `[batch, q_heads, q_tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]`, a `PagedView` if it comes straight from a `PagedCache`.
        value: `[batch, kv_heads, tokens, v_head_dim]`, the same.
        mask: As the mask function made it.
        kwargs: What else the module passes.
    """

    implementation: str
    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    kwargs: dict[str, Any]

    def over(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Its output `[batch, q_tokens, q_heads, v_head_dim]` over other K and V. No observer sees this."""
        output, _ = _compute(self.implementation, self.module, self.query, key, value, self.mask, self.kwargs)
        return output


Observer = Callable[[AttentionCall, torch.Tensor], None]
_OBSERVERS: list[Observer] = []


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


def _compute(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if type(key) is PagedView and key.stored.state.rows.batch == 1 != query.shape[0]:
        # Cross-attention over the text of one row, which all beams share.
        key, value = (dense(side).expand(query.shape[0], -1, -1, -1) for side in (key, value))
    if type(key) is PagedView and type(value) is PagedView and key.stored is value.stored:
        attention_mask = _fit(attention_mask, key.stored)
        output = _attend(implementation, module, query, key.stored, attention_mask, kwargs)
        if output is not None:
            return output, None
        group = key.stored.group
        if implementation == "eager" and isinstance(group, StaticGroup):
            return _host_attention_vetted(module, query, key.stored, group, attention_mask, kwargs)
    return _host_attention(implementation, module, query, key, value, attention_mask, kwargs)


def _fit(mask: torch.Tensor | None, stored: StoredKV) -> torch.Tensor | None:
    """The mask over the tokens of a view. Masks for static rows are as wide as a row can be."""
    if mask is not None and stored.state.is_static and mask.dim() == 4:
        is_wide = mask.shape[3] == stored.state.layer_groups.row_capacity_tokens != stored.end - stored.start
        mask = mask[..., stored.start : stored.end] if is_wide else mask
    return mask if type(mask) is LazyMask else dense(mask)


def _host_attention(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    function = compat.attention_function(implementation, module)
    output: tuple[torch.Tensor, torch.Tensor | None] = function(
        module, query, dense(key), dense(value), dense(attention_mask), **kwargs
    )
    return output


def _attend(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention over blocks `[batch, q_tokens, q_heads, v_head_dim]`; None if the host has to do it."""
    if isinstance(stored.group, StaticGroup) and getattr(module, "layer_idx", None) == stored.layer_idx:
        stored.group.readers[stored.layer_idx] = Reader(weakref.ref(module))
    if not stored.has_history:
        # The host's function on the tensors of this forward: to the bit what it computes without us.
        return None
    if kwargs.get("dropout") and module.training:
        return None  # the kernels have none
    if not _is_servable(implementation, module, query, stored, mask, kwargs):
        return None
    if implementation == "eager" and not _is_trusted(module, query, stored, mask, kwargs):
        return None
    return _paged(implementation, module, query, stored, mask, kwargs)


def _is_trusted(
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the kernel may stand in for a module's eager function, seen by trying it once."""
    names = tuple(sorted(name for name, value in kwargs.items() if value is not None))
    case = (names, stored.blocks.keys.dtype, type(mask), None if mask is None else mask.dtype)
    verdicts = _TRUSTED.setdefault(module, {})
    if case not in verdicts:
        verdicts[case] = _agrees(module, query, stored, mask, kwargs)
    return verdicts[case]


def _host_attention_vetted(
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    group: StaticGroup,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A module's eager function, and a note whether the kernel gives the same for the newest queries.

    A step that is being compiled cannot compare, so this is done on the prompt before it.
    """
    keys, values = stored.views()
    result = _host_attention("eager", module, query, keys, values, mask, kwargs)
    if getattr(module, "layer_idx", None) != stored.layer_idx:
        return result  # a layer that shares the K and V of another
    group.vetted.discard(stored.layer_idx)
    newest = query[:, :, -MAX_DECODE_TOKENS:]
    shown = None if mask is None else dense(mask)[..., -MAX_DECODE_TOKENS:, :]
    if (
        stored.end - stored.start >= MIN_VETTED_TOKENS
        and kwargs.get("position_bias") is None
        and _is_servable("eager", module, newest, stored, shown, kwargs)
        and _is_same(_paged("eager", module, newest, stored, shown, kwargs), result[0][:, -newest.shape[2] :])
    ):
        group.vetted.add(stored.layer_idx)
    return result


def _is_servable(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    if as_attended(query).dtype != stored.blocks.keys.dtype:
        return False
    if mask is not None and not (
        isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[3] == stored.end - stored.start
    ):
        return False
    inputs = (query, stored.fresh_keys, stored.fresh_values, kwargs.get("s_aux"), kwargs.get("position_bias"))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return False  # the kernels have no backward
    if implementation == "eager" and compat.wants_weights(module, kwargs):
        return False  # only the host's function returns them
    q_tokens = query.shape[2]
    return q_tokens <= MAX_DECODE_TOKENS or stored.fresh_keys is not None


def _paged(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    stored.check_current()
    query = as_attended(query)
    q_tokens = query.shape[2]
    scale = kwargs.get("scaling")
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else float(scale)
    mask, causal = _pattern(implementation, module, q_tokens, mask, kwargs)
    # The host's sdpa knows neither; where it does not refuse them, prompts are computed without.
    is_eager = implementation == "eager"
    softcap, sinks = (kwargs.get(name) if is_eager else None for name in ("softcap", "s_aux"))
    fresh_keys, fresh_values = stored.fresh_keys, stored.fresh_values
    window = stored.group.window
    # One query reads its own K and V as they are stored. More are a prompt or a draft, and see each other in
    # the model's precision.
    reads_own = q_tokens == 1 or fresh_keys is None or stored.blocks.records is None
    has_gap = window is not None and stored.group.manager.has_gap(stored.start)
    if q_tokens <= MAX_DECODE_TOKENS and reads_own and not has_gap:
        return dispatch.decode(
            stored.blocks,
            Attention(query, stored.start, stored.end, scale, mask, causal, softcap=softcap, sinks=sinks),
        )
    assert fresh_keys is not None, "only views returned by `update` come this far"
    assert fresh_values is not None, "fresh K never come without fresh V"
    with without_autocast(query):
        return attend_with_history(
            stored.blocks,
            query=query,
            fresh_keys=fresh_keys,
            fresh_values=fresh_values,
            history_start=stored.start,
            history_end=stored.history_end,
            scale=scale,
            mask=mask,
            is_causal=causal,
            softcap=softcap,
            sinks=sinks,
        )


def _pattern(
    implementation: str,
    module: torch.nn.Module,
    q_tokens: int,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor | None, bool]:
    """The mask for the kernel, and whether causality comes on top of it."""
    causal = False
    if type(mask) is LazyMask:
        padding = mask.padding
        mask, causal = None if padding is None else padding[:, None, None, :], q_tokens > 1
    elif mask is None and implementation == "sdpa":
        # Eager functions mask nothing that they are not told to.
        is_causal = kwargs.get("is_causal")
        causal = q_tokens > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    bias = kwargs.get("position_bias")
    if bias is None:
        return mask, causal
    if mask is None:
        return bias, causal
    return (bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask), causal


def _agrees(
    module: torch.nn.Module,
    query: torch.Tensor,
    stored: StoredKV,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> bool:
    """Whether the kernel and the model's own eager function give the same on this call."""
    keys, values = (stored.as_stored() if query.shape[2] == 1 else stored).views()
    want, _ = _host_attention("eager", module, query, keys, values, mask, kwargs)
    got = _paged("eager", module, query, stored, mask, kwargs)
    if type(mask) is LazyMask and mask.padding is not None:
        # Queries that are padding themselves have nothing to attend, and any answer will do.
        real = mask.padding[:, -query.shape[2] :]
        got, want = got[real], want[real]
    same = _is_same(got, want)
    if not same:
        logger.warning(
            "%s computes its eager attention in its own way, so the paged kernel is not used for it: its K "
            "and V become dense tensors at every layer, which is right but slower",
            type(module).__name__,
        )
    return same


def _is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = 1e-4 if want.dtype == torch.float32 else 3e-2
    scale = max(float(want.abs().max()), 1e-6)
    return bool((got - want).abs().max() / scale <= tolerance)
