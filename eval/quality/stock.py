"""The quantised cache of transformers, with its backends."""

from __future__ import annotations

import contextlib
import io
from typing import Any

from eval.caches import CacheUnavailable

AXES = {"quanto": {}, "hqq": {"axis_key": 1, "axis_value": 1}}
"""Backend -> arguments that differ from the defaults (4 bits, groups of 64, up to 128 of the newest tokens
as they are). HQQ groups along head_dim with axis 1, which its makers advise."""


def quantized_cache(config: Any, backend: str) -> Any:
    """A fresh `QuantizedCache` in 4 bits for a model's config.

    Raises:
        CacheUnavailable: the backend is not installed or refuses; the message says why.
    """
    from transformers import QuantizedCache

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # HQQ greets
            return QuantizedCache(backend=backend, config=config, nbits=4, **AXES[backend])
    except Exception as error:  # whatever a library that is broken here raises
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise CacheUnavailable(f"QuantizedCache with {backend} cannot be made: {reason}") from error


def values_per_token(model: Any) -> int:
    """Numbers of K and V of one token over all layers of a decoder."""
    config = model.config.get_text_config(decoder=True)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim)
