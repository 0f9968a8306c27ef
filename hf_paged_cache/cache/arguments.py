"""Which rows somebody means."""

from __future__ import annotations

import operator
from typing import Any

import torch

from hf_paged_cache.errors import PagedCacheError

_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def as_rows(method: str, argument: str, indices: Any, batch: int, *, may_be_mask: bool) -> list[int]:
    """Indices of rows as integers, negative ones as they are, or PagedCacheError.

    They come as one dimension of integers (a tensor, an array, a sequence), or as a boolean for each of the
    `batch` rows.
    """
    wanted = "one dimension of row indices" + (" or a boolean for each row" if may_be_mask else "")
    try:
        found = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError):
        raise PagedCacheError(f"{method}: {argument} must be {wanted}, got {indices!r}") from None
    is_mask = found.dtype == torch.bool
    if found.dim() != 1 or not (found.dtype in _INDEX_DTYPES or (is_mask and may_be_mask) or not len(found)):
        raise PagedCacheError(
            f"{method}: {argument} must be {wanted}, got shape {tuple(found.shape)} of {found.dtype}"
        )
    if is_mask and batch not in (0, len(found)):
        raise PagedCacheError(
            f"{method}: a boolean mask of rows must have one entry for each of the {batch} rows, got "
            f"{len(found)}"
        )
    return [int(row) for row in (found.nonzero().flatten() if is_mask else found).tolist()]


def as_count(method: str, argument: str, value: Any) -> int:
    """A whole number, or PagedCacheError."""
    try:
        return operator.index(value)
    except (TypeError, RuntimeError, ValueError):
        raise PagedCacheError(f"{method}: {argument} must be a whole number, got {value!r}") from None
