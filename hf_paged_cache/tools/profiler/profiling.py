"""`profile_cache`: two runs of a model side by side, one on full-precision K and V and one on a format's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm.auto import tqdm

from hf_paged_cache.attention.paged_attention import paged_attention
from hf_paged_cache.config import KVCacheDtype, LayerDtype, own_name
from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import architectures, compat

from .cache_profile import CacheProfile
from .step_errors import StepErrors, kl_divergence, top1_agreement


def profile_cache(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    kv_cache_dtype: KVCacheDtype,
    steps: Sequence[int] = (10, 50, 100),
    *,
    layer_dtypes: Mapping[int, LayerDtype] | None = None,
    progress: bool = False,
    **cache_arguments: Any,
) -> CacheProfile:
    """Measure what storing K and V in a format does to a model, against full precision.

    The last `max(steps)` tokens of every row follow a prompt of the others one by one, in two runs that see
    the same tokens whatever they would have generated: one on a `PagedCache` in the model's dtype, one on a
    `PagedCache` in the format. Nothing is kept of a step but sums.

    ```python
    profile = profile_cache(model, input_ids, "int4")
    print(profile.table())
    profile.plot("int4.png")
    print(profile.suggest_layer_dtypes(target_kl=1e-2))
    ```

    Args:
        model: A decoder with a language-model head. It is as it was afterwards.
        input_ids: `[batch, tokens]`, without padding; more tokens than `max(steps)`.
        kv_cache_dtype: As `PagedCache` takes it.
        steps: Decode steps after the prompt at which layers are measured.
        layer_dtypes: As `PagedCache` takes it.
        progress: Show a progress bar.
        **cache_arguments: What else `PagedCache` takes, but for `compile`. By default pools fit the tokens.

    Raises:
        PagedCacheError: An argument is out of range or of the wrong type, the input is too short, or the
            model's logits hold NaN or infinity.
        UnsupportedLayerError: The model is an encoder-decoder, keeps no K and V per token, or has attention
            layers that do not go through the attention function of this package.
    """
    _check_model(model)
    steps = _checked_steps(input_ids, steps)
    if cache_arguments.pop("compile", False):
        raise PagedCacheError("compile=True is of no use here: leave it away, as steps are looked into")
    if all(cache_arguments.get(name) is None for name in ("max_tokens", "max_cache_len")):
        cache_arguments["max_cache_len"] = input_ids.shape[1]
    arguments = cache_arguments | {"kv_cache_dtype": own_name(kv_cache_dtype)}
    ids = input_ids.to(compat.expected_device(model))
    run = partial(_profile, model, ids, steps, arguments, set(), progress)
    profile = run({index: own_name(name) for index, name in (layer_dtypes or {}).items()}, True)
    return replace(profile, rerun=run)


def _profile(
    model: Any,
    input_ids: torch.Tensor,
    steps: tuple[int, ...],
    arguments: Mapping[str, Any],
    messages: set[str],
    progress: bool,
    layer_dtypes: Mapping[int, str],
    with_layers: bool,
) -> CacheProfile:
    """One profile; without layers it has the logits' errors only."""
    from .paired_forwards import Pair, bytes_per_token

    prompt_tokens = input_ids.shape[1] - steps[-1]
    with torch.no_grad(), _evaluating(model), paged_attention(model), _each_once(messages):
        pair = Pair(model, {**arguments, "layer_dtypes": layer_dtypes}, with_layers=with_layers)
        pair.feed(input_ids[:, :prompt_tokens], is_prompt=True)
        kls, agreements, found = [], [], []
        for step in tqdm(range(1, steps[-1] + 1), "decode steps", disable=not progress):
            token = prompt_tokens + step - 1
            logits, full_logits = pair.feed(input_ids[:, token : token + 1])
            if any((x.isnan() | x.isposinf()).any() for x in (logits, full_logits)):
                raise PagedCacheError(
                    f"the logits of decode step {step} hold NaN or infinity, so nothing can be compared; "
                    "look for what makes the model overflow"
                )
            kls.append(float(kl_divergence(logits, full_logits).mean()))
            agreements.append(float(top1_agreement(logits, full_logits).double().mean()))
            if with_layers and step in steps:
                found.append(StepErrors(step, kls[-1], agreements[-1], pair.layer_errors()))
        stats = pair.cache.stats()
        by_layer = bytes_per_token(pair.cache)
    return CacheProfile(
        model_type=str(model.config.model_type),
        kv_cache_dtype=arguments["kv_cache_dtype"],
        asked_layer_dtypes=dict(layer_dtypes),
        layer_dtypes={layer: stats.layer_dtypes[layer] for layer in by_layer},
        batch=input_ids.shape[0],
        prompt_tokens=prompt_tokens,
        kl_by_step=tuple(kls),
        top1_by_step=tuple(agreements),
        steps=tuple(found),
        bytes_per_token_by_layer=by_layer,
        full_bytes_per_token=sum(bytes_per_token(pair.full).values()),
    )


@contextmanager
def _each_once(messages: set[str]) -> Iterator[None]:
    """Let every warning of this package pass once: several caches of one profile would say the same."""

    def is_new(record: logging.LogRecord) -> bool:
        before = len(messages)
        messages.add(record.getMessage())
        return len(messages) > before

    logger = logging.getLogger("hf_paged_cache")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside the block, and as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_model(model: object) -> None:
    config, found = compat.resolve_config(model)
    if found is None:
        raise PagedCacheError(f"model must be one that runs; got its config, a {type(config).__name__}")
    if config.is_encoder_decoder:
        raise UnsupportedLayerError(
            f"this {config.model_type!r} model is an encoder-decoder, and profiles are of decoders alone"
        )
    if not any(spec.is_paged for spec, _ in architectures.layer_specs(config)):
        raise UnsupportedLayerError(
            f"no layer of this {config.model_type!r} model has K and V in blocks: there is nothing to profile"
        )


def _checked_steps(input_ids: torch.Tensor, steps: Any) -> tuple[int, ...]:
    """The steps in order, which leave a prompt of the ids."""
    are_numbers = isinstance(steps, list | tuple | range) and all(
        isinstance(step, int) and not isinstance(step, bool) and step > 0 for step in steps
    )
    if not are_numbers or not 0 < len(set(steps)) == len(steps):
        raise PagedCacheError(
            f"steps must be different positive numbers of decode steps, as (10, 50, 100), got {steps!r}"
        )
    is_tensor = isinstance(input_ids, torch.Tensor)
    if not is_tensor or input_ids.dim() != 2 or not len(input_ids) or input_ids.is_floating_point():
        got = f"{input_ids.dtype} {list(input_ids.shape)}" if is_tensor else type(input_ids).__name__
        raise PagedCacheError(f"input_ids must be token ids [batch, tokens], got {got}")
    tokens, last = input_ids.shape[1], max(steps)
    if tokens <= last:
        raise PagedCacheError(
            f"input_ids has {tokens} tokens per row, and {last} decode steps after a prompt need at "
            f"least {last + 1}; give longer rows, or steps below {tokens}"
        )
    return tuple(sorted(steps))
