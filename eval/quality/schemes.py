"""Ways to keep K and V that are compared, one registry entry each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from eval.caches import CacheUnavailable, stock
from eval.core.errors import UsageError, check_choice
from eval.quality import storage
from eval.quality.storage import Storage
from hf_paged_cache.config import LAYER_DTYPES

BLOCK_SIZES = (32, 64, 128)
GROUP_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Scheme:
    """One way.

    Attributes:
        name: what `--only` and the table call it.
        title: one line for the report.
        create: makes a fresh cache for a model. Raises `CacheUnavailable`.
        measure: counts what a cache holds: `(cache, model, rows)`.
        attention: whose attention reads it, `paged` or `dynamic`.
        only_defaults: run for the table that chooses defaults.
        only_offset: run with the key offset alone.
    """

    name: str
    title: str
    create: Callable[[Any], Any]
    measure: Callable[[Any, Any, int], Storage]
    attention: str
    only_defaults: bool = False
    only_offset: bool = False


def _dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _paged(name: str, title: str, *, defaults: bool = False, offset: bool = False, **options: Any) -> Scheme:
    def create(model: Any) -> Any:
        from hf_paged_cache import PagedCache

        try:
            return PagedCache(model, **options)
        except ValueError as error:
            raise CacheUnavailable(str(error)) from error

    return Scheme(
        name,
        title,
        create,
        lambda cache, model, rows: storage.of_paged(cache),
        "paged",
        only_defaults=defaults,
        only_offset=offset,
    )


def _stock(backend: str) -> Scheme:
    arguments = ", ".join(f"{name}={value}" for name, value in stock.AXES[backend].items())
    return Scheme(
        f"stock {backend}",
        f"QuantizedCache of transformers, int4, {backend}" + (f", {arguments}" if arguments else ""),
        lambda model: stock.quantized_cache(model.config, backend),
        lambda cache, model, rows: storage.of_quantized(cache, storage.values_per_token(model), rows),
        "dynamic",
    )


def _all() -> Iterator[Scheme]:
    yield Scheme(
        "dynamic",
        "DynamicCache of transformers: full precision",
        _dynamic,
        lambda cache, model, rows: storage.of_dynamic(cache),
        "dynamic",
    )
    for name in LAYER_DTYPES:
        yield _paged(name, f"PagedCache, kv_cache_dtype={name!r}", kv_cache_dtype=name)
    for name in ("int4", "int4_group"):
        yield _paged(
            f"{name} no guard",
            f"PagedCache, {name}, key_error_guard='off'",
            offset=True,
            kv_cache_dtype=name,
            key_error_guard="off",
        )
    yield from map(_stock, stock.AXES)
    for size in BLOCK_SIZES:
        yield _paged(
            f"int4 block {size}",
            f"PagedCache, int4, block_size={size}, key_error_guard='off'",
            defaults=True,
            kv_cache_dtype="int4",
            key_error_guard="off",
            block_size=size,
        )
    for size in GROUP_SIZES:
        yield _paged(
            f"int4_group {size}",
            f"PagedCache, int4_group, group_size={size}, key_error_guard='off'",
            defaults=True,
            kv_cache_dtype="int4_group",
            key_error_guard="off",
            group_size=size,
        )


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
