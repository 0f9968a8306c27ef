"""The caches that can be compared, one registry entry each. A cache serves one batch and is then dropped."""

from . import paged, stock
from .base import CacheEntry, CacheUnavailable, Demand, tensor_bytes

__all__ = ["ALIASES", "CACHES", "CacheEntry", "CacheUnavailable", "Demand", "tensor_bytes"]

# Name -> contender, in the order of the table.
CACHES: dict[str, CacheEntry] = {entry.name: entry for entry in (*stock.ENTRIES, *paged.ENTRIES)}

ALIASES = paged.ALIASES  # other names of some of them
