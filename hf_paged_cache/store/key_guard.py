"""The guard of layers whose K are stored in 4 bits: a look at them before the first becomes bytes.

Keys of some models are so uneven that 4 bits lose what attention goes by. That shows in the error of K
itself, measured against how much K differs from token to token: what all tokens of a block have in common
does not change a softmax.
"""

from __future__ import annotations

import logging

import torch

from hf_paged_cache.errors import QuantizationError
from hf_paged_cache.formats.record import KVFormat
from hf_paged_cache.kernels.autocast import without_autocast

logger = logging.getLogger("hf_paged_cache")

KEY_ERROR_BOUND = 1 / 3
"""The largest error of a layer's K (see `key_error`). Evenly spread K have 0.1 in `int4`; at this the scores
of a head err by a third of what tells common tokens apart. SmolLM2-135M has 0.08 to 0.11 in `int4`, 0.17 to
0.30 in `int4_group` with groups of 32."""

_ALIKE = 1e-4  # tokens that differ by less than this share of their norm count as one and the same


def concerns(kv_format: KVFormat | None) -> bool:
    """Whether layers of a format are looked at."""
    return kv_format is not None and kv_format.keys.bits <= 4


def key_error(kv_format: KVFormat, keys: torch.Tensor) -> float:
    """The error that storing full blocks of K would bring, in the head that it hurts most.

    Both the error and K themselves are taken without their mean over the tokens of a block. A head's error is
    that of its median token over the norm of its median token, so that a few tokens that are much larger
    than all others do not hide what they do to them.

    K are `[blocks, kv_heads, block_size, head_dim]`; a head's error is the mean over blocks.
    """
    wide = keys.float()
    with without_autocast(wide):
        codes, params = kv_format.keys.encode(wide)
        error = kv_format.keys.decode(codes, params, keys.shape[-1]) - wide
    varied = wide - wide.mean(-2, keepdim=True)
    error = error - error.mean(-2, keepdim=True)
    error, varied, size = (x.norm(dim=-1).median(dim=-1).values for x in (error, varied, wide))
    # Tokens that differ by rounding alone (padding) have nothing to lose.
    return float((error / torch.maximum(varied, _ALIKE * size).clamp(min=1e-30)).mean(0).max())


def fault_of(layer_idx: int, kv_format: KVFormat, keys: torch.Tensor, *, raises: bool) -> str | None:
    """Why a layer should have its K in int8, to be told or raised (QuantizationError); None if they fit."""
    error = key_error(kv_format, keys)
    if error <= KEY_ERROR_BOUND:
        return None
    fault = (
        f"layer {layer_idx}: the keys lose too much in {kv_format.name!r} (an error of {error:.3f} of what "
        f"tells tokens apart, in the worst head; the bound is {KEY_ERROR_BOUND:.2f})"
    )
    if raises:
        raise QuantizationError(
            f"{fault}. The step is taken back. Set layer_dtypes={{{layer_idx}: 'int8'}}, another "
            "kv_cache_dtype, or key_error_guard='on', which stores such keys in int8"
        )
    return fault
