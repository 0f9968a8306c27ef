"""Contents of a cache as values that know what they hold, and plain dicts of them for `torch.save`.

What comes out of a file may be anything that a safe loader lets pass. `parse` makes a value of it or says
which part of it is wrong; whether the parts agree with each other and with a cache is asked by `state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from hashlib import blake2b
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.kernels.call import NULL_BLOCK

VERSION = 2


@dataclass(frozen=True)
class SavedLayer:
    """K and V of one layer, of its own tokens only: all else in the blocks is zero."""

    format: str
    keys: torch.Tensor  # `[blocks, kv_heads, block_size, head_dim]` of all blocks; quantized: of dense ones
    values: torch.Tensor  # the same, with the head dim of V
    records: torch.Tensor  # uint8 `[blocks, kv_heads, nbytes]` of the blocks that are not in the others


@dataclass(frozen=True)
class SavedGroup:
    """The layers of one window."""

    window: int | None  # tokens that a query sees, or None for all
    tables: list[list[int]]  # of every row, numbers of its blocks, counted as they come here, or NULL_BLOCK
    offsets: list[int]  # of every row, columns of the batch before it begins
    first_held: int  # first token that is what a forward stored
    dense: list[int]  # numbers of the dense blocks of quantized layers, in the order of `SavedLayer.keys`
    unguarded: list[int]  # layers that the guard has yet to look at
    layers: dict[int, SavedLayer]  # by index; those that have their places

    @property
    def num_blocks(self) -> int:
        """Blocks that the rows hold."""
        return len({number for table in self.tables for number in table} - {NULL_BLOCK})

    @property
    def encoded(self) -> list[int]:
        """The numbers of all other blocks, in the order of `SavedLayer.records`."""
        return sorted(set(range(self.num_blocks)) - set(self.dense))


@dataclass(frozen=True)
class SavedPadding:
    """What is remembered of rows that begin with padding; see `left_padding.Padding`."""

    tokens: list[int]
    is_left_out: bool
    runs: list[list[tuple[int, int, int | None]]]
    end: int


@dataclass(frozen=True)
class SavedWeight:
    """What a file knows of a tensor; no digest of its values if they were not there, or not plain."""

    shape: list[int]
    dtype: str
    digest: str | None


@dataclass(frozen=True)
class SavedWeights:
    """What a file knows of the weights that computed K and V, by name, and of active adapters."""

    tensors: dict[str, SavedWeight]
    adapters: str


@dataclass(frozen=True)
class SavedSettings:
    """What must agree with the cache that loads it."""

    block_size: int
    kv_cache_dtype: str


@dataclass(frozen=True)
class SavedCache:
    """All of a cache."""

    version: int  # of this format
    settings: SavedSettings
    batch: int  # rows
    length: int  # tokens per row
    tokens: dict[int, int]  # layer index -> tokens per row that it holds
    record_past: bool  # window layers keep what they would drop
    input_ids: torch.Tensor  # `[rows, known tokens]`
    owner: SavedWeights | None  # tells the weights that computed K and V from others; None if not known
    padding: SavedPadding
    groups: list[SavedGroup]  # one per window; none without rows
    hosts: list[dict[str, Any]]  # attributes of the layers (and parts of them) of the host's own classes
    checksum: str = ""  # of all the rest


def plain(value: Any) -> Any:
    """The same in dicts, lists, tensors and numbers."""
    if is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if type(value) is list else value


def checksum(contents: Mapping[str, Any]) -> str:
    """What tells a saved cache, as a plain dict, from one that was cut or changed."""
    digest = blake2b(digest_size=16)
    _feed({name: value for name, value in contents.items() if name != "checksum"}, digest.update)
    return digest.hexdigest()


def _feed(value: Any, update: Callable[[Any], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype} {tuple(value.shape)} ".encode())
        update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        update(f"{len(value)} items ".encode())
        for key in sorted(value, key=repr):
            update(f"{key!r}: ".encode())
            _feed(value[key], update)
    elif isinstance(value, list | tuple):
        update(f"{len(value)} of ".encode())
        for item in value:
            _feed(item, update)
    elif not isinstance(value, torch.device):  # where tensors are may change when they are read
        update(f"{value!r} ".encode())


def parse(kind: Any, value: Any, where: str = "state_dict") -> Any:
    """What `plain` was made of: an object of a class of this module, or of what a field is declared as.

    Raises PagedCacheError if the value is something else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        expect(type(value) is dict, where, "a dict", value)
        if missing := sorted(hints.keys() - value.keys()):
            raise PagedCacheError(f"{where} lacks {', '.join(missing)}: it was cut or changed")
        expect(value.keys() == hints.keys(), where, f"a dict of {', '.join(hints)}", value)
        return kind(**{name: parse(hint, value[name], f"{where}[{name!r}]") for name, hint in hints.items()})
    if origin is UnionType:
        return None if value is None and NoneType in inner else parse(inner[0], value, where)
    if origin is tuple:
        expect(type(value) in (list, tuple) and len(value) == len(inner), where, f"{len(inner)} items", value)
        return tuple(parse(kind, item, where) for kind, item in zip(inner, value, strict=True))
    if origin is list:
        expect(type(value) is list, where, "a list", value)
        return [parse(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        expect(type(value) is dict, where, "a dict", value)
        of_key, of_item = inner
        return {parse(of_key, k, where): parse(of_item, v, f"{where}[{k!r}]") for k, v in value.items()}
    if kind is torch.Tensor:
        expect(is_whole(value), where, "a tensor with memory for all its values", value)
        return value.detach()
    if kind is int:
        expect(type(value) is int and abs(value) < 1 << 63, where, "a whole number", value)
    expect(kind is Any or type(value) is kind, where, f"of type {getattr(kind, '__name__', kind)}", value)
    return value


def expect(is_right: bool, where: str, expected: str, got: object) -> None:
    """Raise PagedCacheError unless a part of a state dict is as it must be."""
    if is_right:
        return
    found = f"a {type(got).__name__}"
    if isinstance(got, torch.Tensor):
        found = f"{tuple(got.shape)} of {got.dtype} on {got.device}"
    elif isinstance(got, str) or (isinstance(got, int) and abs(got) < 1 << 64):
        found = repr(got)[:80]
    elif isinstance(got, list | tuple | dict):
        found += f" of {len(got)}"
    raise PagedCacheError(
        f"{where} must be {expected}, got {found}: it was cut or changed. The cache is as it was"
    )


def is_whole(value: object) -> bool:
    """Whether a value is an ordinary tensor whose memory really holds as many values as its shape says."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and not value.is_meta
        and not value.is_quantized
        and value.nbytes <= value.untyped_storage().nbytes()
    )
