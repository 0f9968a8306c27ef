"""Ways to keep K and V that are compared, one registry entry each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import DynamicCache

from eval.caches import CacheUnavailable, stock
from eval.core import errors
from hf_paged_cache import PagedCache
from hf_paged_cache.config import LAYER_DTYPES, KVCacheDtype

BLOCK_SIZES = (32, 64, 128)
GROUP_SIZES = (16, 32, 64)
QUICK = ("dynamic", "auto", "int8", "int4")


@dataclass(frozen=True)
class Scheme:
    """One way."""

    name: str  # what `--only` and the table call it
    title: str  # one line for the report
    create: Callable[[Any], Any]  # makes a fresh cache for a model; raises `CacheUnavailable`
    only_defaults: bool = False  # run for the table that chooses defaults, by keys as they are
    only_offset: bool = False  # run with the key offset alone


def _create_paged(model: Any, **options: Any) -> Any:
    try:
        return PagedCache(model, **options)
    except ValueError as error:
        raise CacheUnavailable(str(error)) from error


def _paged(name: str, kv_cache_dtype: KVCacheDtype, *, defaults: bool = False, **options: Any) -> Scheme:
    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    title = f"PagedCache, {kv_cache_dtype}, {given}" if given else f"PagedCache, {kv_cache_dtype=!r}"
    create = partial(_create_paged, kv_cache_dtype=kv_cache_dtype, **options)
    return Scheme(name, title, create, defaults, bool(options) and not defaults)


def _stock(backend: str) -> Scheme:
    arguments = "".join(f", {name}={value}" for name, value in stock.AXES[backend].items())
    title = f"QuantizedCache of transformers, int4, {backend}{arguments}"
    return Scheme(f"stock {backend}", title, lambda model: stock.quantized_cache(model.config, backend))


def _all() -> Iterator[Scheme]:
    yield Scheme(
        "dynamic", "DynamicCache of transformers: full precision", lambda m: DynamicCache(config=m.config)
    )
    for layer_dtype in LAYER_DTYPES:
        yield _paged(layer_dtype, layer_dtype)
    yield _paged("int4 no guard", "int4", key_error_guard="off")
    yield _paged("int4_group no guard", "int4_group", key_error_guard="off")
    yield from map(_stock, stock.AXES)
    for size in BLOCK_SIZES:
        yield _paged(f"int4 block {size}", "int4", defaults=True, block_size=size, key_error_guard="off")
    for size in GROUP_SIZES:
        name = f"int4_group {size}"
        yield _paged(name, "int4_group", defaults=True, group_size=size, key_error_guard="off")


SCHEMES = {scheme.name: scheme for scheme in _all()}  # in the order of the table


def chosen(only: str | None, *, quick: bool, defaults: bool) -> list[Scheme]:
    """The schemes named in a list; for None most, few if `quick`, also the sizes with `defaults`."""
    if only is not None:
        return [SCHEMES[name] for name in errors.chosen("scheme", only, SCHEMES)]
    schemes = SCHEMES.values()
    return [s for s in schemes if (defaults if s.only_defaults else s.name in QUICK or not quick)]
