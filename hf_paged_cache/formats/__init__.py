"""Formats, by which a block's K and V become bytes: one file a codec, and the pairs that have a name.

A format is a codec for K and one for V. `record` says how their parts lie in a block's record, `packing` how
codes share bytes, `rotation` what is done to vectors before. What is here is plain torch and the meaning of
the bytes; kernels read and write the same bytes faster, and are tested against it.
"""

from __future__ import annotations

from hf_paged_cache.errors import PagedCacheError

from .codec import LARGEST_VALUE, Codec
from .fp8_token import Fp8Token
from .int4_channel import Int4Channel
from .int4_group import Int4Group
from .int4_token import Int4Token
from .int8_block import Int8Block
from .int8_token import Int8Token
from .record import KVFormat, RecordFormat, blank_beyond

__all__ = [
    "DEFAULT_GROUP_SIZE",
    "FORMATS",
    "LARGEST_VALUE",
    "Codec",
    "KVFormat",
    "RecordFormat",
    "blank_beyond",
    "format_name",
    "kv_format",
    "with_keys_in_int8",
]

DEFAULT_GROUP_SIZE = 32  # channels of a group of `int4_group`

FORMATS = {
    layer_format.name: layer_format
    for layer_format in (
        KVFormat("int8", Int8Token(), Int8Token()),
        KVFormat("fp8", Fp8Token(), Fp8Token()),
        KVFormat("k8v4", Int8Token(), Int4Token()),
        KVFormat("int4", Int4Channel(), Int4Token()),
        KVFormat("int8_block", Int8Block(), Int8Block()),
        KVFormat("int4_group", Int4Group(), Int4Group()),
    )
}
"""The formats by name, `int4_group` with the default group size."""


def kv_format(name: str, *, group_size: int = DEFAULT_GROUP_SIZE) -> KVFormat | None:
    """The format that `kv_cache_dtype` names; None for `auto`, which stores values as they are.

    Groups of formats that have them become `group_size` channels wide. Any other name is a PagedCacheError.
    """
    if name == "auto":
        return None
    if name not in FORMATS:
        raise PagedCacheError(
            f"kv_cache_dtype must be one of auto, {', '.join(FORMATS)}, got {name!r}; 'auto' stores K and V "
            "in the model's dtype"
        )
    known = FORMATS[name]
    return KVFormat(name, known.keys.with_group_size(group_size), known.values.with_group_size(group_size))


def format_name(layer_format: KVFormat | None) -> str:
    """What `kv_format` takes for a format."""
    return "auto" if layer_format is None else layer_format.name


def with_keys_in_int8(layer_format: KVFormat) -> KVFormat:
    """The format with K as `int8` stores it; named after a pair that has a name, else after both."""
    wanted = Int8Token()
    for known in FORMATS.values():
        if known.keys == wanted and known.values == layer_format.values:
            return known
    return KVFormat(f"{layer_format.name}+k8", wanted, layer_format.values)
