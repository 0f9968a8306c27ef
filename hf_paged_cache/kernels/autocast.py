"""`torch.autocast`: the dtype that attention computes in under it, and code that it must leave alone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_AS_IT_IS = nullcontext()


def as_attended(states: torch.Tensor) -> torch.Tensor:
    """Q, K or V in the dtype that attention computes in: that of autocast where it is on.

    Under autocast projections give its dtype and rotary embeddings float32, which attention casts back.
    """
    # What is not floating, or float64, autocast leaves as it is.
    if not _is_on(states) or not states.is_floating_point() or states.dtype == torch.float64:
        return states
    return states.to(torch.get_autocast_dtype(states.device.type))


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which operators on tensors like this one compute in the dtypes that they are given."""
    return torch.autocast(tensor.device.type, enabled=False) if _is_on(tensor) else _AS_IT_IS


def _is_on(tensor: torch.Tensor) -> bool:
    # The name of a device is made anew at every look.
    device = "cpu" if tensor.is_cpu else tensor.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
