"""The caches of transformers."""

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from eval.core.measure import KvBytes
from hf_paged_cache import disable

from .base import CacheEntry, CacheUnavailable, Demand, tensor_bytes

# Backend -> arguments that differ from the defaults (groups of 64, up to 128 of the newest tokens as they
# are). HQQ groups along head_dim with axis 1, which its makers advise.
AXES: dict[str, dict[str, int]] = {"quanto": {}, "hqq": {"axis_key": 1, "axis_value": 1}}


def quantized_cache(config: Any, backend: str, bits: int = 4) -> Any:
    """A fresh `QuantizedCache`, or `CacheUnavailable`; `bits` is not for the backend `fp8`."""
    options = {} if backend == "fp8" else {"nbits": bits, **AXES[backend]}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # HQQ greets
            return QuantizedCache(backend=backend, config=config, **options)
    except Exception as error:  # whatever a library that is broken here raises
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise CacheUnavailable(f"QuantizedCache with {backend} cannot be made: {reason}") from error


def _copied(cache: Any) -> Any:
    """A cache of the same keys and values: these layers put new ones in their place and write into none."""
    copied = copy.copy(cache)
    copied.layers = []
    for layer in cache.layers:  # states of linear attention are written into
        only_appends = isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionLayer)
        copied.layers.append(copy.copy(layer) if only_appends else copy.deepcopy(layer))
    return copied


def _entry(
    name: str,
    title: str,
    make: Callable[[Any, Demand], Any],
    kv_bytes: Callable[[Any], KvBytes] = tensor_bytes,
    copied: Callable[[Any], Any] = _copied,
) -> CacheEntry:
    def create(model: Any, demand: Demand) -> Any:
        disable(model)
        return make(model, demand)

    return CacheEntry(name, title, create, kv_bytes, copied)


def _quantized(name: str, backend: str, bits: int = 8, about: str = "") -> CacheEntry:
    title = f"QuantizedCache of transformers, {about or f'{backend}, {bits} bits'}"
    return _entry(name, title, lambda model, demand: quantized_cache(model.config, backend, bits))


def _dynamic(model: Any, demand: Demand) -> Any:
    return DynamicCache(config=model.config)


def _static(model: Any, demand: Demand) -> Any:
    return StaticCache(config=model.config, max_cache_len=demand.tokens)


def _offloaded(model: Any, demand: Demand) -> Any:
    if model.device.type == "cpu":
        raise CacheUnavailable("it moves layers from an accelerator to the host, and the model is on the CPU")
    return DynamicCache(config=model.config, offloading=True)


def _resident_bytes(cache: Any) -> KvBytes:
    """Of a cache that offloads, what is on the accelerator at the end is not all that it keeps."""
    kv = tensor_bytes(cache)
    on_device = sum(
        tensor.nbytes
        for layer in cache.layers
        for tensor in vars(layer).values()
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"
    )
    return KvBytes(kv.used_bytes, kv.allocated_bytes, {**kv.details, "device_bytes": on_device})


ENTRIES = (
    _entry("dynamic", "transformers' default cache (DynamicCache)", _dynamic),
    _entry(
        "static", "StaticCache of transformers, as long as the batch needs", _static, copied=copy.deepcopy
    ),
    _entry("offloaded", "DynamicCache with its layers on the host", _offloaded, _resident_bytes),
    _quantized("quanto-int4", "quanto", 4),
    _quantized("hqq-int4", "hqq", 4),
    _quantized("hqq-int8", "hqq", 8),
    _quantized("stock-fp8", "fp8", about="fp8, one scale per tensor"),
)
