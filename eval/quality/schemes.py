"""Ways to keep K and V that are compared, one registry entry each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eval.caches import CacheUnavailable, stock
from eval.core.errors import UsageError, check_choice
from eval.quality import storage
from eval.quality.storage import Storage
from hf_paged_cache.config import LAYER_DTYPES, KVCacheDtype

BLOCK_SIZES = (32, 64, 128)
GROUP_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Scheme:
    """One way."""

    name: str  # what `--only` and the table call it
    title: str  # one line for the report
    create: Callable[[Any], Any]  # makes a fresh cache for a model. Raises `CacheUnavailable`.
    measure: Callable[[Any, Any, int], Storage]  # counts what a cache holds: `(cache, model, rows)`
    attention: str  # whose attention reads it, `paged` or `dynamic`
    only_defaults: bool = False  # run for the table that chooses defaults, by keys as they are
    only_offset: bool = False  # run with the key offset alone

    def is_run(self, *, key_offset: bool) -> bool:
        """Whether it takes part where nobody has named it."""
        return not (self.only_defaults if key_offset else self.only_offset)


def _dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _paged(name: str, kv_cache_dtype: KVCacheDtype, *, defaults: bool = False, **options: Any) -> Scheme:
    def create(model: Any) -> Any:
        from hf_paged_cache import PagedCache

        try:
            return PagedCache(model, kv_cache_dtype=kv_cache_dtype, **options)
        except ValueError as error:
            raise CacheUnavailable(str(error)) from error

    given = ", ".join(f"{key}={value!r}" for key, value in options.items())
    title = f"PagedCache, {kv_cache_dtype}, {given}" if given else f"PagedCache, {kv_cache_dtype=!r}"
    only_offset = bool(options) and not defaults
    return Scheme(name, title, create, storage.of_paged, "paged", defaults, only_offset)


def _stock(backend: str) -> Scheme:
    arguments = "".join(f", {name}={value}" for name, value in stock.AXES[backend].items())
    return Scheme(
        f"stock {backend}",
        f"QuantizedCache of transformers, int4, {backend}{arguments}",
        lambda model: stock.quantized_cache(model.config, backend),
        storage.of_quantized,
        "dynamic",
    )


def _all() -> Iterator[Scheme]:
    title = "DynamicCache of transformers: full precision"
    yield Scheme("dynamic", title, _dynamic, storage.of_dynamic, "dynamic")
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


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in _all()}
"""Name -> scheme, in the order of the table."""

QUICK = ("dynamic", "auto", "int8", "int4")


def chosen(only: str | None, *, quick: bool, defaults: bool) -> list[Scheme]:
    """The schemes named in a comma-separated list, in the order of the registry.

    Args:
        only: the list; None for those that are run by default.
        quick: by default only a few.
        defaults: by default also those for the choice of defaults.

    Raises:
        UsageError: an unknown name, or no name at all.
    """
    if only is None:
        run = [scheme for scheme in SCHEMES.values() if defaults or not scheme.only_defaults]
        return [scheme for scheme in run if scheme.name in QUICK or scheme.only_defaults or not quick]
    names = {name.strip() for name in only.split(",") if name.strip()}
    if not names:
        raise UsageError(f"--only needs at least one name; choose from: {', '.join(sorted(SCHEMES))}")
    for name in sorted(names):
        check_choice("scheme", name, SCHEMES)
    return [scheme for scheme in SCHEMES.values() if scheme.name in names]
