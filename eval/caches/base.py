"""A contender: how its cache is made, copied and counted."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eval.core.measure import KvBytes
from hf_paged_cache.host.lazy_tensor import plain_tensors


class CacheUnavailable(Exception):
    """A cache that cannot run here; the message says why and becomes its row in the table."""


@dataclass(frozen=True)
class Demand:
    """What a cache is about to hold."""

    rows: int  # sequences of the batch
    tokens: int  # of the longest of them, when all is done


@dataclass(frozen=True)
class CacheEntry:
    """One contender."""

    name: str  # what `--caches` and the table call it
    title: str  # one line for the report
    # makes a fresh cache of a model for what it will hold; leaves the model's attention as this cache wants
    # it, whatever the contender before it left behind. Raises `CacheUnavailable`.
    create: Callable[[Any, Demand], Any]
    kv_bytes: Callable[[Any], KvBytes]  # reads a cache that has just been used
    duplicate: Callable[[Any], Any] = copy.deepcopy  # goes on from where the first is, without changing it


def tensor_bytes(cache: Any) -> KvBytes:
    """The bytes of all tensors that the layers of a stock cache hold, each storage counted once."""
    sizes: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in plain_tensors(tuple(vars(layer).values())):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    total = sum(sizes.values())
    return KvBytes(total, total, {"tensor_bytes": total})
