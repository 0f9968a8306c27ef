"""What a contender is: how its cache is made, copied and weighed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hf_paged_cache import disable
from hf_paged_cache.host.lazy_tensor import plain_tensors


class CacheUnavailable(Exception):
    """A cache that cannot run here; the message says why and becomes its row in the table."""


@dataclass(frozen=True)
class Demand:
    """What a cache is about to hold.

    Attributes:
        rows: sequences of the batch.
        tokens: of the longest of them, when all is done.
    """

    rows: int
    tokens: int


@dataclass(frozen=True)
class KvBytes:
    """What a cache holds after a batch, in bytes.

    Attributes:
        used_bytes: keys and values kept, as they are kept, with padding and part-filled blocks.
        allocated_bytes: what was set aside for them; memory no one has touched costs nothing on a CPU.
        details: what the cache itself reports.
    """

    used_bytes: int
    allocated_bytes: int
    details: dict[str, Any]


@dataclass(frozen=True)
class CacheEntry:
    """One contender.

    Attributes:
        name: what `--caches` and the table call it.
        title: one line for the report.
        create: makes a fresh cache of a model for what it will hold; leaves the model's attention as this
            cache wants it, whatever the contender before it left behind. Raises `CacheUnavailable`.
        kv_bytes: reads a cache that has just been used.
        duplicate: a cache that goes on from where the first one is, without changing it.
    """

    name: str
    title: str
    create: Callable[[Any, Demand], Any]
    kv_bytes: Callable[[Any], KvBytes]
    duplicate: Callable[[Any], Any] = copy.deepcopy


def restore_attention(model: Any) -> None:
    """Undo what a paged cache did to the model's attention; no effect on a model never patched."""
    disable(model)


def tensor_bytes(cache: Any) -> KvBytes:
    """The bytes of all tensors that the layers of a stock cache hold, each storage counted once."""
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in plain_tensors(tuple(vars(layer).values())):
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    total = sum(seen.values())
    return KvBytes(total, total, {"tensor_bytes": total})
