"""`profile_cache`: two runs of a model side by side, one on full-precision K and V and one on a format's."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.attention.paged_attention import compute, observe, paged_attention
from hf_paged_cache.attention.view import PagedView
from hf_paged_cache.cache.paged_cache import PagedCache
from hf_paged_cache.config import KVCacheDtype, LayerDtype, own_name
from hf_paged_cache.errors import PagedCacheError, UnsupportedLayerError
from hf_paged_cache.host import architectures, compat
from hf_paged_cache.host.lazy_tensor import dense

from .cache_profile import CacheProfile
from .step_errors import HeadSums, LayerErrors, StepErrors, errors_of, kl_divergence, top1_agreement

if TYPE_CHECKING:
    from hf_paged_cache.attention.attention_call import AttentionCall

_ALSO_FULL = ("block_size", "max_tokens", "max_cache_len", "gpu_memory_utilization")
"""Arguments that the full-precision cache takes, too; the others say how K and V are stored."""


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
        progress: Show a progress bar, with tqdm or rich, whichever is installed.
        **cache_arguments: What else `PagedCache` takes, but for `compile`. `max_tokens` is by default what
            the tokens need.

    Returns:
        The errors by layer and head, and those of the logits.

    Raises:
        PagedCacheError: An argument is out of range or of the wrong type, the input is too short, or the
            model's logits hold NaN or infinity.
        UnsupportedLayerError: The model is an encoder-decoder, keeps no K and V per token, or has attention
            layers that do not go through the attention function of this package.
    """
    _check_model(model)
    steps = _checked_steps(steps)
    _check_input(input_ids, steps)
    if cache_arguments.pop("compile", False):
        raise PagedCacheError(
            "compile=True is of no use here: compiled steps cannot be looked into; leave it away"
        )
    block_size = cache_arguments.get("block_size", 64)
    is_sized = any(cache_arguments.get(name) is not None for name in ("max_tokens", "max_cache_len"))
    if not is_sized and isinstance(block_size, int) and block_size > 0:
        batch, tokens = input_ids.shape
        cache_arguments["max_tokens"] = batch * -(-tokens // block_size) * block_size
    run = partial(
        _profile,
        model,
        input_ids.to(compat.expected_device(model)),
        steps,
        cache_arguments | {"kv_cache_dtype": own_name(kv_cache_dtype)},
        set(),
        progress,
    )
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
    prompt_tokens = input_ids.shape[1] - steps[-1]
    with torch.no_grad(), _evaluating(model), paged_attention(model), _each_once(messages):
        pair = _Pair(model, {**arguments, "layer_dtypes": layer_dtypes}, with_layers=with_layers)
        pair.feed(input_ids[:, :prompt_tokens], is_prompt=True)
        kls, agreements, found = [], [], []
        for step in _shown(range(1, steps[-1] + 1), progress):
            token = prompt_tokens + step - 1
            logits, full_logits = pair.feed(input_ids[:, token : token + 1])
            if any((x.isnan() | x.isposinf()).any() for x in (logits, full_logits)):
                raise PagedCacheError(
                    f"the logits of decode step {step} hold NaN or infinity, so nothing can be compared; "
                    "look for what makes the model overflow"
                )
            kls.append(kl_divergence(logits, full_logits))
            agreements.append(top1_agreement(logits, full_logits))
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


# --- the two runs -------------------------------------------------------------------------------------------


class _FullCache(PagedCache):
    """Full precision, and beside it another cache that is given the same K and V."""

    def __init__(self, model: object, own: PagedCache | None, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self.own = own
        self.own_views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        views = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.own is not None:
            self.own_views[layer_idx] = self.own.update(key_states, value_states, layer_idx)
        return views


class _Pair:
    """The two runs, and the errors between them.

    Attributes:
        full: The cache of the run in full precision. Its `own` stores the same K and V in the format.
        cache: That of the run in the format.
    """

    def __init__(self, model: Any, arguments: Mapping[str, Any], *, with_layers: bool) -> None:
        self._model = model
        self._with_layers = with_layers
        self.cache = PagedCache(model, **arguments)
        own = PagedCache(model, **arguments) if with_layers else None
        self.full = _FullCache(model, own, **{key: arguments[key] for key in _ALSO_FULL if key in arguments})
        # By layer. Own: full precision's queries over what `full.own` has stored.
        self._attention: dict[int, HeadSums] = defaultdict(HeadSums)
        self._own_attention: dict[int, HeadSums] = defaultdict(HeadSums)
        self._outputs: dict[int, torch.Tensor] = {}

    def feed(self, tokens: torch.Tensor, *, is_prompt: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens `[batch, tokens]` to both runs.

        Returns:
            Logits `[batch, vocabulary]` of the next token on the format, and in full precision.
        """
        observes = self._with_layers and not is_prompt
        full_logits = self._forward(tokens, self.full, self._observe_full if observes else None)
        logits = self._forward(tokens, self.cache, self._observe_format if observes else None)
        self._outputs.clear()
        self.full.own_views.clear()
        return logits, full_logits

    def layer_errors(self) -> tuple[LayerErrors, ...]:
        """The errors of every layer now, those of attention since the last call."""
        self._check_observed()
        found = []
        for layer, attention in sorted(self._attention.items()):
            keys, values, own_keys, own_values = (
                errors_of(dense(getattr(got, side)), dense(getattr(self.full.layers[layer], side)))
                for got in (self.cache.layers[layer], self.full.own.layers[layer])  # type: ignore[union-attr]
                for side in ("keys", "values")
            )
            sums = attention.errors(), self._own_attention[layer].errors()
            found.append(LayerErrors(layer, keys, values, sums[0], own_keys, own_values, sums[1]))
        self._attention.clear()
        self._own_attention.clear()
        return tuple(found)

    def _forward(
        self, tokens: torch.Tensor, cache: PagedCache, observer: Callable[..., None] | None
    ) -> torch.Tensor:
        options: dict[str, Any] = {compat.cache_argument(self._model): cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(type(self._model).forward).parameters:
            options["logits_to_keep"] = 1
        with observe(observer) if observer else nullcontext():
            output = self._model(input_ids=tokens, **options)
        logits: torch.Tensor | None = getattr(output, "logits", None)
        if logits is None or logits.dim() != 3:
            raise PagedCacheError(
                "model must give logits [batch, tokens, vocabulary], as AutoModelForCausalLM loads it; got a "
                f"{type(self._model).__name__}"
            )
        return logits[:, -1]

    def _observe_full(self, call: AttentionCall, output: torch.Tensor) -> None:
        if (layer := _layer_of(call, self.full)) is not None:
            self._outputs[id(call.module)] = output
            keys, values = self.full.own_views[layer]
            own, _ = compute(replace(call, key=keys, value=values))
            self._own_attention[layer].add(own.transpose(1, 2), output.transpose(1, 2))

    def _observe_format(self, call: AttentionCall, output: torch.Tensor) -> None:
        if (layer := _layer_of(call, self.cache)) is not None:
            want = self._outputs[id(call.module)]
            self._attention[layer].add(output.transpose(1, 2), want.transpose(1, 2))

    def _check_observed(self) -> None:
        missing = sorted(set(bytes_per_token(self.cache)) - set(self._attention))
        if missing:
            raise UnsupportedLayerError(
                f"layers {missing} of this {self._model.config.model_type!r} model do not hand the K and V "
                "of the cache to an attention function that can be observed (code of their own, or an "
                "implementation other than sdpa and eager), so their attention cannot be profiled; load the "
                "model with attn_implementation='sdpa' if it has that"
            )


def _layer_of(call: AttentionCall, cache: PagedCache) -> int | None:
    """The layer of a cache whose K and V a call attends; None if they are not of that cache."""
    if type(call.key) is PagedView and call.key.stored.state is cache._state:
        return call.key.stored.layer_idx
    return None


def bytes_per_token(cache: PagedCache) -> dict[int, float]:
    """Layer index -> bytes of K and V of one token in all heads, for layers that hold any."""
    found = {}
    for layer, blocks in sorted(cache._state.blocks.items()):
        heads, block_size, head_dim = blocks.keys.shape[1:]
        plain = float((head_dim + blocks.values.shape[3]) * blocks.keys.dtype.itemsize)
        found[layer] = heads * (plain if blocks.form is None else blocks.form.nbytes / block_size)
    return found


# --- around the runs ----------------------------------------------------------------------------------------


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


def _shown(steps: range, progress: bool) -> Iterable[int]:
    for module, name in (("tqdm.auto", "tqdm"), ("rich.progress", "track")) if progress else ():
        with suppress(ImportError):
            shown: Iterable[int] = getattr(import_module(module), name)(steps, "decode steps")
            return shown
    return steps


def _check_model(model: object) -> None:
    config, found = compat.resolve_config(model)
    if found is None:
        raise PagedCacheError(
            f"model must be a model, which can be run; got its config, a {type(config).__name__}"
        )
    if config.is_encoder_decoder:
        raise UnsupportedLayerError(
            f"this {config.model_type!r} model is an encoder-decoder, and profiles are of decoders that "
            "continue a prompt"
        )
    if not any(spec.is_paged for spec, _ in architectures.layer_specs(config)):
        raise UnsupportedLayerError(
            f"no layer of this {config.model_type!r} model keeps K and V in blocks, so there is nothing to "
            "profile"
        )


def _checked_steps(steps: object) -> tuple[int, ...]:
    if (
        isinstance(steps, list | tuple | range)
        and all(isinstance(step, int) and not isinstance(step, bool) and step > 0 for step in steps)
        and 0 < len(set(steps)) == len(steps)
    ):
        return tuple(sorted(steps))
    raise PagedCacheError(
        f"steps must be different positive numbers of decode steps, got {steps!r}; the "
        "default is (10, 50, 100)"
    )


def _check_input(input_ids: torch.Tensor, steps: tuple[int, ...]) -> None:
    is_tensor = isinstance(input_ids, torch.Tensor)
    if not is_tensor or input_ids.dim() != 2 or not len(input_ids) or input_ids.is_floating_point():
        got = f"{input_ids.dtype} {list(input_ids.shape)}" if is_tensor else type(input_ids).__name__
        raise PagedCacheError(f"input_ids must be token ids [batch, tokens], got {got}")
    tokens = input_ids.shape[1]
    if tokens <= steps[-1]:
        raise PagedCacheError(
            f"input_ids has {tokens} tokens per row, and {steps[-1]} decode steps after a prompt need at "
            f"least {steps[-1] + 1}; give longer rows, or steps below {tokens}"
        )
