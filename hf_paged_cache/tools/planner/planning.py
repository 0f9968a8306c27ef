"""`plan_memory`: from a model or its config to what fits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_paged_cache.config import LAYER_DTYPES, KVCacheDtype, LayerDtype, PagedCacheConfig, own_name
from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.formats import DEFAULT_GROUP_SIZE, FORMATS
from hf_paged_cache.host import architectures, compat

from .amounts import DTYPES, SHORT_DTYPES, as_bytes, as_dtype, shown
from .format_sizes import MOST, FormatSizes
from .memory_plan import MemoryPlan
from .stored_shapes import StoredShapes, shapes_of_config, shapes_of_model


def plan_memory(
    config_or_model: object,
    *,
    context: int,
    batch: int = 1,
    kv_cache_dtype: KVCacheDtype = "auto",
    memory: int | str | None = None,
    weights: int | str | torch.dtype | None = None,
    dtype: str | torch.dtype | None = None,
    block_size: int = 64,
    group_size: int | Mapping[int, int] = DEFAULT_GROUP_SIZE,
    layer_dtypes: Mapping[int, LayerDtype] | None = None,
    residual_length: int | None = None,
    sink_tokens: int | None = None,
) -> MemoryPlan:
    """What a `PagedCache` of a model takes in every format, and what fits into a memory.

    ```python
    print(plan_memory(AutoConfig.from_pretrained(name), context=32768, batch=20, memory="24GiB"))
    ```

    Pools are the real ones to the byte: equal to `memory_footprint().pool_bytes` of a cache with
    `max_tokens=plan.max_tokens` after its first forward (of a cache that was not forked, not compiled, and
    where the guard has moved no layer to int8). Shapes of K and V are seen in a forward of a token or two: of
    the model, or of a skeleton without weights on the meta device.

    Args:
        config_or_model: A config, which is enough, or a model.
        context: Tokens of every row, prompt and answer. More than the model was made for is a UserWarning.
        batch: Rows.
        kv_cache_dtype: The format that is asked for; the plan has the others too.
        memory: Of the device, as bytes or `"24GiB"`; None plans sizes only.
        weights: Bytes that the model's weights take, as a number or `"13.5GB"`; or the dtype they are kept
            in. The default are the parameters of the model, or of a skeleton in `dtype`.
        dtype: Of the model, and so of K and V that are not quantized. The default is the model's or the
            config's; bfloat16 where that says nothing.
        block_size: As `PagedCache` takes it; so are the others, for all formats.
        group_size: The same.
        layer_dtypes: The same.
        residual_length: The same.
        sink_tokens: The same.

    Raises:
        PagedCacheError: An argument is out of range or of the wrong type, or the model cannot be looked into.
        UnsupportedLayerError: The model is an encoder-decoder, or `PagedCache` cannot serve it, or its bytes
            depend on more than numbers of tokens.
    """
    config, model = compat.resolve_config(config_or_model)
    kv_cache_dtype = own_name(kv_cache_dtype)
    for name, unit, value in (("context", "tokens", context), ("batch", "rows", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MOST:
            raise PagedCacheError(f"{name} must be a positive number of {unit}, got {value!r}")
    memory_bytes = None if memory is None else as_bytes("memory", memory)
    if config.is_encoder_decoder:
        raise UnsupportedLayerError(
            f"{config.model_type!r} is an encoder-decoder, whose cache also holds K and V of the source; "
            "plans are for decoders alone. Make the caches and ask their `memory_footprint()`"
        )
    if dtype is None and model is not None:
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for holder in (config, config.get_text_config(decoder=True)):
        dtype = getattr(holder, "dtype", None) if dtype is None else dtype
    kept = torch.bfloat16 if dtype is None else as_dtype("dtype", dtype)
    stored = shapes_of_config(config, kept) if model is None else shapes_of_model(model, kept)
    settings = {
        "block_size": block_size,
        "group_size": group_size,
        "layer_dtypes": layer_dtypes,
        "residual_length": residual_length,
        "sink_tokens": sink_tokens,
    }
    sizes, refused = _sizes(config, stored, context, kv_cache_dtype, settings)
    weight_bytes: int | None = _weight_bytes(weights, stored)
    if weights is None and model is None and getattr(config, "quantization_config", None) is not None:
        if memory is not None:
            raise PagedCacheError(
                "the config says that its weights are quantized, and not how many bytes they take: pass them "
                "as weights='...GB' (the size of the checkpoint's files)"
            )
        weight_bytes = None
    budget = None if memory_bytes is None else memory_bytes - (weight_bytes or 0)
    max_positions = architectures.max_positions(config)
    if max_positions is not None and context > max_positions:
        warnings.warn(
            f"a context of {context:,} tokens is longer than the {max_positions:,} that this "
            f"{config.model_type!r} model was made for (max_position_embeddings)",
            UserWarning,
            stacklevel=2,
        )
    return MemoryPlan(
        model_type=str(config.model_type),
        dtype=str(kept).removeprefix("torch."),
        context=context,
        batch=batch,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        max_tokens=batch * (context + stored.own_tokens),
        max_positions=max_positions,
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        formats=tuple(size.plan(context, batch, budget) for size in sizes),
        refused=refused,
        notes=tuple(_notes(kv_cache_dtype, context, config, stored, is_guess=dtype is None)),
    )


def _sizes(
    config: PreTrainedConfig, stored: StoredShapes, context: int, asked: str, settings: Mapping[str, Any]
) -> tuple[list[FormatSizes], dict[str, str]]:
    """Sizes of every format, and why others are refused. The one that was asked for raises."""
    from hf_paged_cache.cache.paged_cache import PagedCache

    sizes, refused = [], {}
    for name in LAYER_DTYPES if asked in LAYER_DTYPES else (*LAYER_DTYPES, asked):
        arguments: dict[str, Any] = {**settings, "kv_cache_dtype": name, "max_tokens": 1}
        try:
            cache = PagedCache(copy.deepcopy(config), **arguments)  # the caller's config stays as it was
            sizes.append(FormatSizes(cache, stored, context))
        except PagedCacheError as error:
            if name == asked:
                raise
            refused[name] = str(error)
    return sizes, refused


def _weight_bytes(weights: int | str | torch.dtype | None, stored: StoredShapes) -> int:
    """Bytes that are given, or follow from a dtype that is given; without either those of the parameters."""
    named = DTYPES.get(SHORT_DTYPES.get(weights, weights)) if isinstance(weights, str) else weights
    if isinstance(named, torch.dtype):
        return stored.weights * named.itemsize
    return stored.weight_bytes if weights is None else as_bytes("weights", weights)


def _notes(
    kv_cache_dtype: str, context: int, config: PreTrainedConfig, stored: StoredShapes, *, is_guess: bool
) -> Iterator[str]:
    if is_guess:
        yield "the config names no dtype: bfloat16 is taken for granted"
    if kv_cache_dtype == "adaptive":
        longest = PagedCacheConfig().adaptive_threshold
        kv_cache_dtype = "int4" if context <= longest else "int8"
        yield (
            f"adaptive is planned as {kv_cache_dtype}, at all lengths: it is int4 for prompts of up to "
            f"{longest} tokens and int8 for longer ones"
        )
    if kv_cache_dtype in FORMATS and FORMATS[kv_cache_dtype].keys.bits <= 4:
        yield "the guard may store K of some layers in int8, which takes more; key_error_guard='off' does not"
    if stored.own_tokens:
        yield f"the model puts {stored.own_tokens} tokens of its own into every row; they are counted"
    if stored.state_bytes:
        yield f"states of {shown(stored.state_bytes)} per row lie beside the blocks; they are counted"
    if stored.state_token_bytes:
        yield f"an indexer keeps {stored.state_token_bytes} bytes per token; they are counted"
    specs = architectures.layer_specs(config)
    if any(spec.window is not None for spec, _ in specs):
        yield (
            "layers with a window hold one window a row; tokens that come several at a time after it is full "
            "take what they need beside it until the next step of one token"
        )
    if architectures.has_outside_state(config):
        yield "the model keeps a recurrent state in itself; it is not counted"
    fixed = sorted(index for index in architectures.fixed_layers(config) if index < len(specs))
    if fixed:
        yield f"layers {', '.join(map(str, fixed))} keep K and V of images; those are not counted"
