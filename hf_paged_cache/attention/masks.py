"""Masks that are written down only if somebody needs them written down.

The host makes a 4-D mask for every forward with history or padding, and its size grows with the context. A
paged kernel needs less: that the pattern is causal, and which tokens are padding. So the mask function
registered here returns a tensor that stands for the host's mask and becomes it when touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from hf_paged_cache.errors import CacheMismatchError
from hf_paged_cache.host import architectures, compat
from hf_paged_cache.host.lazy_tensor import LazyTensor

logger = logging.getLogger("hf_paged_cache")


class PagedLength(int):
    """The key length that a `PagedCache` announces: an int that the mask function can recognise.

    The host does not say for which cache it makes a mask. Those for any other cache are left to it.
    """

    # Tells the cache of the padding that a mask hides, None if of none; not there while a step is compiled.
    note: Callable[[torch.Tensor | None], None] | None = None


class StaticLength(PagedLength):
    """The key length of rows whose blocks are all there: what a row can hold."""

    check_room: Callable[[int], None]  # raises if a row cannot have so many tokens


class LazyMask(LazyTensor):
    """Stands for a causal 4-D mask `[batch, 1, q_tokens, kv_tokens]`."""

    padding: torch.Tensor | None  # boolean `[batch, kv_tokens]`, False where a token is padding
    _make: Callable[[], torch.Tensor]
    _dense: torch.Tensor | None = None

    def dense(self) -> torch.Tensor:
        """The host's own mask, made once."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    def origin(self) -> str:
        """Kind of mask."""
        return "causal mask" if self.padding is None else "causal mask with padding"


def make_mask_function(implementation: str) -> Callable[..., Any]:
    """A mask function that returns what `implementation` does, but lazily for a `PagedCache` if causal."""

    def paged_mask(*args: Any, **kwargs: Any) -> Any:
        host = compat.mask_function(implementation)
        length, mask = kwargs.get("kv_length"), kwargs.get("attention_mask")
        if not isinstance(length, PagedLength):
            return host(*args, **kwargs)
        if isinstance(length, StaticLength):
            if mask is not None and mask.dim() == 2:
                # A compiled step cannot ask for room, but the mask tells how many tokens there will be.
                length.check_room(mask.shape[1])
            return host(*args, **kwargs | {"kv_length": int(length)})
        new = kwargs["q_length"]
        check_length(mask, length + kwargs.get("kv_offset", 0) - new, new, kwargs.get("config"))
        is_causal, padding = _is_causal(length, mask, kwargs), mask
        if is_causal and padding is not None and (padding.is_cpu or new == length) and bool(padding.all()):
            padding = None  # on a GPU the question would make the host wait, so only a prompt asks it
        if length.note is not None and (padding is None or padding.dim() == 2):
            length.note(padding)
        if not is_causal:
            if mask is not None and new == 1 and not mask.is_cpu:
                # To find out whether it can leave the mask out, the host function would wait for the device.
                kwargs["allow_is_causal_skip"] = False
            return host(*args, **kwargs)
        if implementation == "sdpa" and padding is None and new in (1, length):
            return None  # what the host returns here
        dtype = torch.bool if implementation == "sdpa" else kwargs.get("dtype", torch.float32)
        device = torch.device(kwargs.get("device", "cpu"))
        lazy = LazyMask.of_shape((kwargs["batch_size"], 1, new, int(length)), dtype, device)
        lazy._make, lazy.padding = lambda: host(*args, **kwargs), padding
        return lazy

    return paged_mask


def check_length(mask: torch.Tensor | None, held: int, new: int, config: object) -> None:
    """Raise CacheMismatchError if a mask `[batch, tokens]` is shorter than held and new tokens together.

    It would silently hide the newest ones. Other masks are not looked at.
    """
    if mask is None or mask.dim() != 2 or mask.shape[1] >= held + new:
        return
    if getattr(config, "model_type", None) not in architectures.SHORT_MASKS:
        raise CacheMismatchError(
            f"attention_mask covers {mask.shape[1]} tokens, but the cache holds {held} per row and "
            f"{new} new ones came. Pass the whole conversation (ids and mask), longer than what is cached; "
            "`cache.crop(...)` what differs, or `cache.reset()`"
        )
    _warn_once()


@cache
def _warn_once() -> None:
    logger.warning(
        "attention_mask covers only the tokens after the conditioning, which this model puts in front and "
        "keeps in the cache, so that the mask hides as many of the newest tokens, with any cache; pass no "
        "attention_mask to let them be seen"
    )


def _is_causal(length: PagedLength, mask: torch.Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a mask is causal over all tokens seen, but for padding."""
    q_offset = kwargs.get("q_offset", 0)
    return (
        not torch.compiler.is_compiling()
        and not kwargs.get("use_vmap")
        and kwargs.get("local_size") is None
        and bool(kwargs.get("allow_is_causal_skip", False))
        and compat.is_plain_causal(kwargs.get("mask_function"))
        and not isinstance(q_offset, torch.Tensor)
        and kwargs.get("kv_offset", 0) == 0
        and q_offset + kwargs["q_length"] == length
        and (mask is None or (mask.dim() == 2 and mask.shape[1] == length))
    )
