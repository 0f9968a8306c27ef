"""Shapes and bytes that a model stores of a token, seen in a forward and not read from its config.

Configs do not say it: latent attention stores one narrow head where its config has many wide ones, V may be
narrower than K, and some layers share the K and V of others. Of a config a skeleton is made, a model on the
meta device, where tensors have a shape and no content.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch.fx.experimental import _config as _meta_settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import architectures, compat
from hf_paged_cache.store.pool_tensors import PoolShape

_REMEMBERED = 32
_INSTEAD = "make the cache and ask its `memory_footprint()`"
_SKELETON_DTYPE = torch.bfloat16  # some kernels for experts take no other on the meta device


@dataclass(frozen=True)
class StoredShapes:
    """What a cache holds of a model."""

    layers: dict[int, PoolShape]  # layer index -> heads, dims and dtype of K and V, as a forward writes them
    state_bytes: int  # of one row, whatever its length: states of linear attention and convolutions
    state_token_bytes: int  # of one row and token, outside the blocks: keys of indexers
    own_tokens: int  # that the model puts into every row beside those it is given
    weight_bytes: int
    weights: int  # number of parameters


_known: dict[tuple[type, str, torch.dtype], StoredShapes] = {}


def shapes_of_config(config: PreTrainedConfig, dtype: torch.dtype) -> StoredShapes:
    """What a model of that config and dtype stores; remembered, since a forward takes a second or more."""
    key = type(config), config.to_json_string(use_diff=False), dtype
    if key not in _known:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        _known[key] = shapes_of_model(_skeleton(config), dtype)
    return _known[key]


def shapes_of_model(model: torch.nn.Module, dtype: torch.dtype) -> StoredShapes:
    """Run a token or two through a model or skeleton, and see what it stores if `dtype` is its own."""
    config: Any = model.config
    architectures.layer_specs(config)  # refuses what PagedCache does, before a forward fails
    parameters = list(model.parameters())
    own = next((p.dtype for p in parameters if p.is_floating_point()), dtype)

    def kept(x: torch.Tensor) -> torch.dtype:
        return dtype if x.dtype == own else x.dtype

    def nbytes(tensors: Sequence[torch.Tensor]) -> int:
        return sum(x.numel() * kept(x).itemsize for x in tensors)

    cache = _feed(model, 1)
    _check_kinds(config, cache)
    stored_tokens = next((keys.shape[2] for keys, _ in cache.written.values()), 1)  # of the one that was fed
    states = nbytes(_states(cache))
    grows = any(hasattr(layer, "indexer_keys") for layer in cache.layers)
    per_token = nbytes(_states(_feed(model, 2))) - states if grows else 0
    return StoredShapes(
        layers={
            index: PoolShape(k.shape[1], k.shape[3], v.shape[3], kept(k), torch.device("meta"))
            for index, (k, v) in cache.written.items()
        },
        state_bytes=states - per_token * stored_tokens,
        state_token_bytes=per_token,
        own_tokens=stored_tokens - 1,
        weight_bytes=nbytes(parameters),
        weights=sum(x.numel() for x in parameters),
    )


class _Recorder(DynamicCache):
    """The host's own cache, which notes the K and V that it is given."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note, and go on."""
        self.written.setdefault(layer_idx, (key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def _feed(model: Any, tokens: int) -> _Recorder:
    """A cache of the host after a forward of so many tokens."""
    device = next(model.parameters()).device
    is_skeleton = device.type == "meta"
    try:
        try:
            cache = _run(model, device, tokens, nullcontext())
        except RuntimeError:
            if not is_skeleton:
                raise
            # Several times slower, so only for models that look into tensors.
            cache = _run(model, device, tokens, _without_content())
    except Exception as error:
        way_out = " Pass the loaded model instead of its config" if is_skeleton else ""
        raise PagedCacheError(
            f"what a {model.config.model_type!r} model stores is seen in a forward on {device.type!r}, which "
            f"failed: {_first_line(error)}.{way_out}"
        ) from error
    devices = {x.device for x, _ in cache.written.values()}
    if len(devices) > 1:
        raise PagedCacheError(
            f"the model lies on {', '.join(sorted(map(str, devices)))}, and a plan is for one device; pass "
            "`model.config`, and as `memory` and `weights` the sums over the devices"
        )
    return cache


def _run(model: Any, device: torch.device, tokens: int, mode: AbstractContextManager[None]) -> _Recorder:
    cache = _Recorder(model.config)
    ids = torch.ones(1, tokens, dtype=torch.long, device=device)
    with torch.no_grad(), device, mode, _quiet():
        model(ids, **{compat.cache_argument(model): cache}, use_cache=True)
    return cache


def _check_kinds(config: PreTrainedConfig, cache: _Recorder) -> None:
    """Raise where nothing, or more than blocks, states and indexer keys can tell, was stored."""
    fixed, specs = architectures.fixed_layers(config), architectures.layer_specs(config)
    if not cache.written and any(spec.is_paged for spec, _ in specs):
        raise PagedCacheError(
            f"a forward of this {config.model_type!r} model wrote nothing to its cache, so that what it "
            "stores is not known; in training some do not: call `model.eval()`"
        )
    for index, (spec, _) in enumerate(specs):
        if spec.is_paged or spec.layer_type in architectures.EMPTY_LAYER_TYPES or index in fixed:
            continue
        if not architectures.is_linear(cache.layers[index]):
            raise UnsupportedLayerError(
                f"layer {index} of this {config.model_type!r} model is of kind {spec.layer_type!r}, kept by "
                f"a class of transformers, and its bytes cannot be planned; {_INSTEAD}"
            )
    if len({keys.shape[2] for keys, _ in cache.written.values()}) > 1:
        raise PagedCacheError(
            f"layers of this {config.model_type!r} model store unlike numbers of tokens, so a context does "
            f"not say how much that is; {_INSTEAD}"
        )


def _states(cache: _Recorder) -> list[torch.Tensor]:
    """Tensors of a cache beside K and V."""
    found: list[Any] = [vars(cache).get("position_ids")]  # of an indexer, up to transformers 5.17
    layer: Any
    for layer in cache.layers:
        for states in ("conv_states", "recurrent_states"):
            found += getattr(layer, states, {}).values()
        found += [getattr(layer, name, None) for name in ("indexer_keys", "indexer_position_ids")]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _skeleton(config: PreTrainedConfig) -> torch.nn.Module:
    """A model of that config on the meta device."""
    config = copy.deepcopy(config)
    # Eager attention is what every model has; what is stored is the same with any other.
    options: dict[str, Any] = {"dtype": _SKELETON_DTYPE, "attn_implementation": "eager"}
    try:
        with torch.device("meta"), _quiet():
            model: torch.nn.Module = _factory(config)(config, **options)
    except Exception as error:
        raise PagedCacheError(
            f"transformers {transformers.__version__} cannot make a {config.model_type!r} model of this "
            f"config: {_first_line(error)}"
        ) from error
    return model


def _factory(config: PreTrainedConfig) -> Any:
    """What makes a model: the class that the config names, else the one with a head, else any."""
    named: Any = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if named is not None and isinstance(config, getattr(named, "config_class", None) or ()):
        return named._from_config
    has_head = type(config) in AutoModelForCausalLM._model_mapping
    return (AutoModelForCausalLM if has_head else AutoModel).from_config


@contextmanager
def _without_content() -> Iterator[None]:
    answers, settings = cast("Any", _Answers), cast("Any", _meta_settings)
    with answers(), settings.patch(meta_nonzero_assume_all_nonzero=True):
        yield


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # __init_subclass__ of torch
    """Answers what code asks of content that is not there: any will do, as shapes do not depend on it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the host says of configs to itself: it is said again when the model is loaded."""
    log: Any = transformers.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
