"""Whose weights computed what a cache holds, and the refusal of others (see `weights`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.store.saved import SavedWeights

from .weights import Weights, weights_of

if TYPE_CHECKING:
    from hf_paged_cache.host.running_forward import ModelCall

Owner = Weights | SavedWeights


def owner_after(owner: Owner | None, call: ModelCall, tokens: int) -> Owner | None:
    """Whose weights the contents of a cache are of, when a call has added to them.

    Args:
        owner: Whose they are so far; None if that is not known.
        call: That is about to read them, and to add to them.
        tokens: That are cached.

    Raises:
        CacheMismatchError: Other weights computed them.
    """
    whole = None if call.whole is None else call.whole()
    if whole is None:
        return owner if tokens else None
    inner = None if call.model is None else call.model()
    owner = _checked(owner if tokens else None, whole, inner or whole, tokens)
    if isinstance(owner, Weights) and owner.has_buffers:
        call.root.when_returned(owner.take_in_buffers)
    return owner


def check_prompt(owner: Owner | None, model: torch.nn.Module | None, tokens: int) -> None:
    """Refuse a model before its prompt is met, so that nothing is taken back for it.

    Args:
        owner: Whose weights computed what is cached.
        model: The model that is about to generate; None if it is not known.
        tokens: That are cached.

    Raises:
        CacheMismatchError: Other weights computed them.
    """
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
        if other is None or (weight.shape, weight.dtype) != (other.shape, other.dtype):
            return f"`{name}` is another tensor"
        if weight.digest != other.digest and None not in (weight.digest, other.digest):
            return f"`{name}` is another tensor"
    if not prefix and len(fewer) != len(more):
        return f"it has {len(now.tensors)} tensors, and had {len(held.tensors)}"
    return None if held.adapters == now.adapters else "other adapters were active"
