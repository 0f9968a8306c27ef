"""Whose weights computed the K and V of a layer."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .errors import CacheMismatchError
from .group import Owner
from .view import StoredKV


def check_owner(module: torch.nn.Module, stored: StoredKV) -> None:
    """K and V belong to the weights that made them: another model would read them as its own.

    Args:
        module: The attention module that is about to read them.
        stored: What it reads. The first module to do so becomes the owner.

    Raises:
        CacheMismatchError: Other weights computed them. The step in progress is taken back.
    """
    if getattr(module, "layer_idx", None) != stored.layer_idx:
        return  # a layer that shares the K and V of another
    owner = stored.group.owners.get(stored.layer_idx)
    if owner is not None and owner.module() is module:
        return
    fingerprint = _fingerprint(module)
    if owner is not None and owner.fingerprint != fingerprint:
        stored.state.abort_step()
        raise CacheMismatchError(
            f"layer {stored.layer_idx}: the {stored.history_end} cached tokens per row were computed by "
            "another model (or by other weights of this one); make a new PagedCache for this model, or "
            "`cache.reset()`"
        )
    stored.group.owners[stored.layer_idx] = Owner(weakref.ref(module), fingerprint)


def _fingerprint(module: torch.nn.Module) -> tuple[Any, ...]:
    """Shapes and a few values of a module's parameters: equal for copies, not for other weights."""
    found: list[Any] = []
    for name, parameter in module.named_parameters():
        count = parameter.numel()
        sample = [] if parameter.is_meta else parameter.detach().reshape(-1)[:: max(1, count // 16)].tolist()
        found.append((name, tuple(parameter.shape), tuple(sample)))
    return tuple(found)
