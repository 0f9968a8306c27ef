"""A model without weights, on the meta device, where tensors have a shape and no content."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch.fx.experimental import _config as _meta_settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig

from hf_paged_cache.errors import PagedCacheError

_DTYPE = torch.bfloat16
"""Some kernels for experts take no other dtype on the meta device."""


def skeleton(config: PreTrainedConfig) -> torch.nn.Module:
    """A model of that config, in bfloat16.

    Raises:
        PagedCacheError: transformers cannot make it.
    """
    config = copy.deepcopy(config)
    # Eager attention is what every model has; what is stored is the same with any other.
    options: dict[str, Any] = {"dtype": _DTYPE, "attn_implementation": "eager"}
    try:
        with torch.device("meta"), quiet():
            model: torch.nn.Module = _factory(config)(config, **options)
    except Exception as error:
        raise PagedCacheError(
            f"transformers {transformers.__version__} cannot make a {config.model_type!r} model of this "
            f"config: {first_line(error)}"
        ) from error
    return model


@contextmanager
def without_content() -> Iterator[None]:
    """Let code run on the meta device that looks into tensors."""
    assume: Any = _meta_settings
    answer: Any = _Answers
    with answer(), assume.patch(meta_nonzero_assume_all_nonzero=True):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what the host says of configs to itself: it is said again when the model is loaded."""
    log: Any = transformers.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(before)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _factory(config: PreTrainedConfig) -> Any:
    """What makes a model: the class that the config names, else the one with a head, else any."""
    named: Any = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if named is not None and isinstance(config, getattr(named, "config_class", None) or ()):
        return named._from_config
    has_head = type(config) in AutoModelForCausalLM._model_mapping
    return (AutoModelForCausalLM if has_head else AutoModel).from_config


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # __init_subclass__ of torch
    """Answers what code asks of the content of tensors that have none.

    Any answer will do: shapes of K and V do not depend on it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return False if args[0].dtype is torch.bool else 0.0 if args[0].is_floating_point() else 0
        return func(*args, **(kwargs or {}))
