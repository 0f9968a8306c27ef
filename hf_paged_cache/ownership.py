"""Whose weights computed the K and V of a layer."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .errors import CacheMismatchError
from .group import LayerGroup, Owner
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
        raise _mismatch(stored.layer_idx, stored.history_end)
    stored.group.owners[stored.layer_idx] = Owner(weakref.ref(module), fingerprint)


def check_prompt_of(model: torch.nn.Module | None, group: LayerGroup, tokens: int) -> None:
    """Refuse a model before its prompt is met, so that nothing is taken back for it.

    Args:
        model: The model that is about to generate; None if it is not known.
        group: Whose K and V it would read.
        tokens: That are cached, for the message.

    Raises:
        CacheMismatchError: Other weights computed them.
    """
    if model is None:
        return
    for layer_idx, owner in group.owners.items():
        modules = _living_modules(model, layer_idx)
        if owner.module() not in modules and modules and owner.fingerprint not in map(_fingerprint, modules):
            raise _mismatch(layer_idx, tokens)


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
    modules = _living_modules(model, stored.layer_idx)
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


def _living_modules(model: torch.nn.Module, layer_idx: int) -> list[torch.nn.Module]:
    found = (reference() for reference in _modules_of(model).get(layer_idx, []))
    return [module for module in found if module is not None]


def _mismatch(layer_idx: int, tokens: int) -> CacheMismatchError:
    return CacheMismatchError(
        f"layer {layer_idx}: the {tokens} cached tokens per row were computed by another model (or by other "
        "weights of this one); make a new PagedCache for this model, or `cache.reset()`"
    )


def _fingerprint(module: torch.nn.Module) -> tuple[Any, ...]:
    """Shapes and a few values of a module's parameters: equal for copies, not for other weights."""
    found: list[Any] = []
    for name, parameter in module.named_parameters():
        count = parameter.numel()
        sample = [] if parameter.is_meta else parameter.detach().reshape(-1)[:: max(1, count // 16)].tolist()
        found.append((name, tuple(parameter.shape), tuple(sample)))
    return tuple(found)
