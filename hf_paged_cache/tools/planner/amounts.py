"""Amounts of memory, as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

import torch

from hf_paged_cache.errors import PagedCacheError

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b", re.IGNORECASE)
_SHOWN = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # what people call them


def as_bytes(argument: str, value: object) -> int:
    """Bytes, of a number of them or of a string like "24GiB" (2**30 bytes each) and "24GB" (10**9)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise PagedCacheError(
            f"{argument} must be a number of bytes, or a string like '24GiB' or '24GB', got {value!r}; units "
            "are B, KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB, PiB"
        )
    number, prefix, binary = match.groups()
    power = "kmgtp".index(prefix.lower()) + 1 if prefix else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def as_dtype(argument: str, value: object) -> torch.dtype:
    """A dtype that K and V can have, from itself or its name."""
    found = DTYPES.get(SHORT_DTYPES.get(value, value)) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in DTYPES.values():
        raise PagedCacheError(f"{argument} must be one of {', '.join(DTYPES)}, got {value!r}")
    return found


def shown(count: int) -> str:
    """Bytes for people: `2.00 GiB`."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_SHOWN) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.2f} {_SHOWN[power]}"
