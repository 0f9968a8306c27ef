"""The settings of a cache: frozen, validated when made."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

from .errors import PagedCacheError
from .formats import DEFAULT_GROUP_SIZE, FORMATS

LayerDtype: TypeAlias = Literal["auto", "int8", "fp8", "k8v4", "int4", "int8_block", "int4_group", "fp8_e4m3"]
"""Formats that a layer's K and V can be stored in. `auto` is the model's own dtype."""

KVCacheDtype: TypeAlias = Literal[LayerDtype, "adaptive"]
"""What `kv_cache_dtype` can be: a format, or `adaptive`, which chooses by the length of the prompt."""

KeyErrorGuard: TypeAlias = Literal["on", "off", "error"]

DTYPE_ALIASES: Mapping[str, LayerDtype] = {"fp8_e4m3": "fp8"}  # vLLM's name of a format -> ours

LAYER_DTYPES: tuple[LayerDtype, ...] = tuple(n for n in get_args(LayerDtype) if n not in DTYPE_ALIASES)
KV_CACHE_DTYPES: tuple[KVCacheDtype, ...] = (*LAYER_DTYPES, "adaptive")
KEY_ERROR_GUARDS: tuple[KeyErrorGuard, ...] = get_args(KeyErrorGuard)
assert set(LAYER_DTYPES) == {"auto", *FORMATS}, "the types name the formats that there are"

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 256
_WINDOW_EXCESS = 0.15  # of a window that may be held beside it: blocks do not begin and end where it does


@dataclass(frozen=True, slots=True)
class PagedCacheConfig:
    """Settings of a `PagedCache`.

    Attributes:
        block_size: Tokens per block; a power of two from 16 to 256. 64 is the fastest on CPUs; 32 comes
            within 16 %. Layers with a short window have smaller ones: see `block_size_of`.
        kv_cache_dtype: Format of stored K and V; `auto` keeps the model's dtype. `adaptive` is `int4` for
            prompts up to `adaptive_threshold` tokens and `int8` for longer ones.
        max_tokens: Capacity of the pool in tokens, summed over the sequences of a batch. None goes up to the
            model's `max_position_embeddings` for every sequence and to `gpu_memory_utilization`; see
            `capacity`.
        max_cache_len: The same for each sequence, as the static cache of transformers takes it; not with
            `max_tokens`.
        gpu_memory_utilization: Share of the device's free memory (of the available RAM on a CPU) that pools
            may take.
        compile: Keep a decode step such that `torch.compile` can trace it, where the device is a GPU.
        group_size: Channels of a group of `int4_group`; one number, or layer index -> number. It must divide
            the head dim.
        layer_dtypes: Layer index -> format, where it is not `kv_cache_dtype`.
        residual_length: Newest tokens that quantized layers keep in the model's dtype, in whole blocks, the
            one being filled included. None: as few as the formats can do with.
        sink_tokens: First tokens of every row that they keep, in whole blocks. None: one block where K has 4
            bits, otherwise none.
        key_error_guard: What to do with a layer whose K loses too much in 4 bits (see `key_guard`): `on`
            stores its K in int8, `error` raises, `off` does not look.
        adaptive_threshold: Tokens of the longest prompt that `adaptive` stores in int4.

    Raises:
        PagedCacheError: A value is out of range; the message names it.
    """

    block_size: int = 64
    kv_cache_dtype: KVCacheDtype = "auto"
    max_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    compile: bool = False
    group_size: int | Mapping[int, int] = DEFAULT_GROUP_SIZE
    layer_dtypes: Mapping[int, LayerDtype] = field(default_factory=dict)
    residual_length: int | None = None
    sink_tokens: int | None = None
    key_error_guard: KeyErrorGuard = "on"
    adaptive_threshold: int = 512
    max_cache_len: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_dtype", own_name(self.kv_cache_dtype))
        size, share = self.block_size, self.gpu_memory_utilization
        is_power = _is_int(size) and MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and not size & (size - 1)
        self._expect("block_size", is_power, f"a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}")
        self._expect(
            "kv_cache_dtype",
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"one of {', '.join(KV_CACHE_DTYPES)}",
            "'auto' stores K and V in the model's dtype",
        )
        self._check_formats()
        for name in ("max_tokens", "max_cache_len"):
            tokens = getattr(self, name)
            is_right = tokens is None or (_is_int(tokens) and tokens > 0)
            hint = "leave it None for the model's max_position_embeddings"
            self._expect(name, is_right, "a positive number of tokens", hint)
        if self.max_tokens is not None and self.max_cache_len is not None:
            raise PagedCacheError(
                f"max_tokens={self.max_tokens} is the capacity over all rows and "
                f"max_cache_len={self.max_cache_len} that of each row; give one of them"
            )
        is_share = not isinstance(share, bool) and isinstance(share, int | float) and 0.0 < share <= 1.0
        self._expect("gpu_memory_utilization", is_share, "a share above 0 and up to 1")
        self._expect("compile", isinstance(self.compile, bool), "True or False")
        if self.compile and {self.kv_cache_dtype, *self.layer_dtypes.values()} != {"auto"}:
            raise PagedCacheError(
                "compile=True stores K and V in the model's dtype, got "
                f"kv_cache_dtype={self.kv_cache_dtype!r}, layer_dtypes={dict(self.layer_dtypes)}; leave "
                "either away"
            )

    def block_size_of(self, window: int | None) -> int:
        """Tokens per block of layers that see so many tokens.

        A window begins and ends anywhere in a block, and so holds up to a block more than it shows. Blocks
        are halved until that is little beside what the default cache keeps, `window - 1` tokens.

        Args:
            window: Tokens a query sees, itself included, or None for all.
        """
        size, kept = self.block_size, 0 if window is None else window - 1
        while kept and size > MIN_BLOCK_SIZE and (-(-kept // size) + 1) * size > (1 + _WINDOW_EXCESS) * kept:
            size //= 2
        return size

    def group_size_of(self, layer_idx: int) -> int:
        """Channels of a group in a layer."""
        sizes = self.group_size
        return sizes.get(layer_idx, DEFAULT_GROUP_SIZE) if isinstance(sizes, Mapping) else sizes

    def _check_formats(self) -> None:
        sizes = self.group_size if isinstance(self.group_size, Mapping) else {0: self.group_size}
        is_right = _names_layers(sizes) and all(_is_int(size) and size > 0 for size in sizes.values())
        expected = "a positive number of channels, or a dict of layer index to such numbers"
        self._expect("group_size", is_right, expected)
        dtypes, expected = self.layer_dtypes, f"a dict of layer index to one of {', '.join(LAYER_DTYPES)}"
        is_right = _names_layers(dtypes) and all(own_name(name) in LAYER_DTYPES for name in dtypes.values())
        self._expect("layer_dtypes", is_right, expected, "e.g. layer_dtypes={0: 'int8'}")
        object.__setattr__(self, "layer_dtypes", {i: own_name(name) for i, name in dtypes.items()})
        for name in ("residual_length", "sink_tokens"):
            tokens = getattr(self, name)
            is_right = tokens is None or (_is_int(tokens) and tokens >= 0 and tokens % self.block_size == 0)
            expected = f"a number of whole blocks of {self.block_size} tokens"
            hint = "None is the default, which keeps as few as the format can do with"
            self._expect(name, is_right, expected, hint)
        is_right, expected = self.key_error_guard in KEY_ERROR_GUARDS, f"one of {', '.join(KEY_ERROR_GUARDS)}"
        self._expect("key_error_guard", is_right, expected)
        is_right = _is_int(self.adaptive_threshold) and self.adaptive_threshold >= 0
        self._expect("adaptive_threshold", is_right, "a number of tokens")

    def _expect(self, name: str, is_right: bool, expected: str, hint: str | None = None) -> None:
        """Raise PagedCacheError unless a setting is as it must be; without a hint, its default is one."""
        if not is_right:
            default = next(each.default for each in fields(self) if each.name == name)
            hint = hint or f"{default!r} is the default"
            raise PagedCacheError(f"{name} must be {expected}, got {getattr(self, name)!r}; {hint}")


def own_name(dtype: Any) -> Any:
    """The name that this package has for a format, if it is one of vLLM's; else what came."""
    return DTYPE_ALIASES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def unknown_arguments(names: Iterable[str], known: Iterable[str]) -> PagedCacheError:
    """What to raise for arguments that there are not, with the nearest that there are."""
    known = sorted(known)
    told = []
    for name in names:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        told.append(f"{name!r}" + (f" (did you mean {' or '.join(near)}?)" if near else ""))
    return PagedCacheError(f"PagedCache has no argument {', '.join(told)}; it takes {', '.join(known)}")


def _names_layers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_int(index) and index >= 0 for index in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
