"""The calls of the host that use a cache, from which thread and with whose weights; the refusal of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError
from hf_paged_cache.store.saved import SavedWeights

from .weights import Weights, weights_of

if TYPE_CHECKING:
    from hf_paged_cache.host.frames import Frame
    from hf_paged_cache.host.running_forward import ModelCall

Owner = Weights | SavedWeights


@dataclass(slots=True)
class Caller:
    """The calls that have used a cache last. Taking a change back leaves them."""

    user: Frame | None = None  # the outermost
    checked: Frame | None = None  # the last whose weights were looked at

    def check_thread(self, *, is_open: bool) -> None:
        """Raise CacheMismatchError if another thread is using the cache, whose last step may be open."""
        user = self.user
        if user is None or user.is_here or not user.is_running() or not (user.is_known or is_open):
            return  # at the last nobody knows, but no forward is in progress
        raise CacheMismatchError(
            "a forward or `generate` in another thread is using this cache, and one cache serves one thread "
            "at a time. Give every thread its own: `cache.fork()` shares what is cached so far, "
            "`PagedCache(model)` starts empty"
        )

    def is_new(self, call: ModelCall) -> bool:
        """Whether another call of the host has come than the last one; models of others do not tell."""
        return not call.root.is_known or call.root != self.checked


def check_reading(call: ModelCall, *, is_warm: bool) -> None:
    """Raise PagedCacheError if `generate` was told not to use a cache that holds something."""
    if call.use_cache is False and call.is_generating and is_warm:
        raise PagedCacheError(
            "generate(use_cache=False) would feed the whole text at every step, on top of what the cache "
            "holds. Leave `use_cache` away, or pass `cache.frozen()` to generate without changing this cache"
        )


def owner_after(owner: Owner | None, call: ModelCall, tokens: int) -> Owner | None:
    """Whose weights a cache is of when a call adds to its tokens; CacheMismatchError if of other ones."""
    whole = None if call.whole is None else call.whole()
    if whole is None:
        return owner if tokens else None
    inner = None if call.model is None else call.model()
    owner = _checked(owner if tokens else None, whole, inner or whole, tokens)
    if isinstance(owner, Weights) and owner.has_buffers:
        call.root.when_returned(owner.take_in_buffers)
    return owner


def check_prompt(owner: Owner | None, model: torch.nn.Module | None, tokens: int) -> None:
    """CacheMismatchError before a model's prompt is met, if other weights computed the cached tokens."""
    if model is not None:
        _checked(owner, model, model, tokens)


def _checked(owner: Owner | None, whole: torch.nn.Module, inner: torch.nn.Module, tokens: int) -> Owner:
    now = weights_of(whole)
    if owner is None:
        return now
    if isinstance(owner, SavedWeights):
        then, found = now, _difference(owner, now.saved())
    else:
        # A decoder may run alone or inside a larger model. The model that was seen first is looked at.
        first = owner.model()
        then = now if first is None or first is whole else weights_of(first)
        is_part = id(first) in now.modules
        if is_part or (first is not None and id(inner) in then.modules):
            found = owner.difference(then)
        else:
            found = f"this {type(inner).__name__} is not the one that did"
        then = now if is_part else then
    if found is not None:
        raise CacheMismatchError(
            f"the {tokens} cached tokens per row were computed by another model (or by other weights of this "
            f"one): {found}. Make a new PagedCache for this model, or call `cache.reset()` and feed the "
            "whole text"
        )
    return then


def _difference(held: SavedWeights, now: SavedWeights) -> str | None:
    """How weights differ from saved ones; None if nothing tells them apart."""
    fewer, more = sorted((held.tensors, now.tensors), key=len)
    # A decoder calls its tensors as the model around it does, but for a prefix.
    first = next(iter(fewer), "")
    prefix = next((name.removesuffix(first) for name in more if f".{name}".endswith(f".{first}")), "")
    for name, weight in fewer.items():
        other = more.get(prefix + name)
        if (
            other is None
            or (weight.shape, weight.dtype) != (other.shape, other.dtype)
            or (weight.digest != other.digest and None not in (weight.digest, other.digest))
        ):
            return f"`{name}` is another tensor"
    if not prefix and len(fewer) != len(more):
        return f"it has {len(now.tensors)} tensors, and had {len(held.tensors)}"
    return None if held.adapters == now.adapters else "other adapters were active"
