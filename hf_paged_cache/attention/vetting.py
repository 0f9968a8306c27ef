"""Whether a kernel may answer a call of the attention function: what it can compute, and gives the same.

Models write eager functions of their own, and some compute something else. So a kernel stands in for one only
where it was seen to give the same: at the first call of that kind, or, where steps are compiled and cannot
compare, on the prompt before them.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from hf_paged_cache.host.lazy_tensor import dense
from hf_paged_cache.kernels.prefill import MAX_DECODE_TOKENS

from .masks import LazyMask

if TYPE_CHECKING:
    from hf_paged_cache.store.static_group import StaticGroup

    from .attention_call import AttentionCall, Output
    from .view import StoredKV

logger = logging.getLogger("hf_paged_cache")

MIN_VETTED_TOKENS = 8  # with fewer keys, attention functions that differ can agree: over one key they all do

_trusted: WeakKeyDictionary[torch.nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()


def may_answer(call: AttentionCall, stored: StoredKV) -> bool:
    """Whether a kernel may answer a call over stored K and V."""
    # Without history: the host's function on the tensors of this forward, to the bit what it computes
    # without us.
    if not stored.has_history or (call.kwargs.get("dropout") and call.module.training):
        return False  # the kernels have no dropout
    return _is_servable(call, stored) and (not call.is_eager or _is_trusted(call, stored))


def answer_and_vet(call: AttentionCall, stored: StoredKV, group: StaticGroup) -> Output:
    """What an eager function returns for a prompt; notes whether a kernel gives the same for its end."""
    result = call.of_host(*stored.views())
    if getattr(call.module, "layer_idx", None) != stored.layer_idx:
        return result  # a layer that shares the K and V of another
    group.vetted.discard(stored.layer_idx)
    query = call.query[:, :, -MAX_DECODE_TOKENS:]
    mask = None if call.mask is None else dense(call.mask)[..., -MAX_DECODE_TOKENS:, :]
    newest = replace(call, query=query, mask=mask)
    if (
        stored.end - stored.start >= MIN_VETTED_TOKENS
        and call.kwargs.get("position_bias") is None
        and _is_servable(newest, stored)
        and _is_same(newest.of_kernel(stored), result[0][:, -query.shape[2] :])
    ):
        group.vetted.add(stored.layer_idx)
    return result


def _is_servable(call: AttentionCall, stored: StoredKV) -> bool:
    """Whether kernels compute what is asked for."""
    inputs = (call.query, *(stored.fresh or ()), call.kwargs.get("s_aux"), call.kwargs.get("position_bias"))
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return False  # the kernels have no backward
    is_readable = call.query.shape[2] <= MAX_DECODE_TOKENS or stored.fresh is not None
    return is_readable and call.suits_kernels(stored.blocks.keys.dtype, stored.end - stored.start)


def _is_trusted(call: AttentionCall, stored: StoredKV) -> bool:
    """Whether a kernel may stand in for a module's eager function, found out by trying it once."""
    names = tuple(sorted(name for name, value in call.kwargs.items() if value is not None))
    case = (names, stored.blocks.keys.dtype, type(call.mask), getattr(call.mask, "dtype", None))
    known = _trusted.setdefault(call.module, {})
    if case not in known:
        known[case] = _agrees(call, stored)
    return known[case]


def _agrees(call: AttentionCall, stored: StoredKV) -> bool:
    """Whether a kernel and the model's own eager function give the same on this call."""
    # One query reads this forward's K and V as they are stored.
    read = replace(stored, fresh=None) if call.query.shape[2] == 1 else stored
    want, _ = call.of_host(*read.views())
    got = call.of_kernel(stored)
    if type(call.mask) is LazyMask and call.mask.padding is not None:
        # Queries that are padding themselves have nothing to attend, and any answer will do.
        real = call.mask.padding[:, -call.query.shape[2] :]
        got, want = got[real], want[real]
    if _is_same(got, want):
        return True
    logger.warning(
        "%s computes its eager attention in its own way, so the paged kernel is not used for it: its K "
        "and V become dense tensors at every layer, which is right but slower",
        type(call.module).__name__,
    )
    return False


def _is_same(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = 1e-4 if want.dtype == torch.float32 else 3e-2
    scale = max(float(want.abs().max()), 1e-6)
    return bool((got - want).abs().max() / scale <= tolerance)
