"""The tensors behind containers and wrappers, as whoever counts bytes needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors inside tuples, lists, dicts, and tensors that are made of others."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            yield from plain_tensors([getattr(value, name) for name in names])
        else:
            yield value
    elif isinstance(value, dict):
        yield from plain_tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain_tensors(item)
