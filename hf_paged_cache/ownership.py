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


def check_model(model: torch.nn.Module | None, stored: StoredKV) -> None:
    """As `check_owner`, where only the model is known that calls: its graph does not show the module.

    Args:
        model: The model whose forward is running; None if it is not known.
        stored: What a layer of it reads. A module becomes the owner if it is the only one for that layer.

    Raises:
        CacheMismatchError: Other weights computed them. The step in progress is taken back.
    """
    if model is None:
        return
    references = _modules_of(model).get(stored.layer_idx, [])
    modules = [module for module in (reference() for reference in references) if module is not None]
    owner = stored.group.owners.get(stored.layer_idx)
    if len(modules) > 1 and (owner is None or owner.fingerprint in map(_fingerprint, modules)):
        return
    if modules:
        check_owner(modules[0], stored)


_Modules = dict[int, list[weakref.ref[torch.nn.Module]]]
_modules: weakref.WeakKeyDictionary[torch.nn.Module, _Modules] = weakref.WeakKeyDictionary()


def _modules_of(model: torch.nn.Module) -> _Modules:
    """Layer index -> modules that have it."""
    if model not in _modules:
        found = _modules[model] = {}
        for module in model.modules():
            layer_idx = getattr(module, "layer_idx", None)
            if isinstance(layer_idx, int):
                found.setdefault(layer_idx, []).append(weakref.ref(module))
    return _modules[model]


def _fingerprint(module: torch.nn.Module) -> tuple[Any, ...]:
    """Shapes and a few values of a module's parameters: equal for copies, not for other weights."""
    found: list[Any] = []
    for name, parameter in module.named_parameters():
        count = parameter.numel()
        sample = [] if parameter.is_meta else parameter.detach().reshape(-1)[:: max(1, count // 16)].tolist()
        found.append((name, tuple(parameter.shape), tuple(sample)))
    return tuple(found)
