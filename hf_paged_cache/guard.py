"""Looks at the K of layers that are stored in 4 bits, before the first of it becomes bytes.

Keys of some models are so uneven that 4 bits lose what attention goes by. That shows in the error of K
itself, measured against how much K differs from token to token: what all tokens of a block have in common
does not change a softmax.
"""

from __future__ import annotations

import logging

import torch

from .errors import QuantisationError
from .formats import KVFormat, with_keys_in_int8

logger = logging.getLogger("hf_paged_cache")

KEY_ERROR_BOUND = 0.25
"""RMS of the error of K over the RMS of what differs between tokens, per layer. Evenly spread K have 0.1 in
`int4`; at 0.25 the scores of a layer err by a quarter of what distinguishes one token from another."""


def key_error(form: KVFormat, keys: torch.Tensor) -> float:
    """The error that storing full blocks of K would bring.

    Args:
        form: How.
        keys: `[..., block_size, head_dim]`.

    Returns:
        RMS of (stored - given), over the RMS of (given - its mean over the tokens of the block). Both without
        the mean over tokens.
    """
    wide = keys.float()
    codes, params = form.keys.encode(wide)
    error = form.keys.decode(codes, params, keys.shape[-1]) - wide
    error, varied = (x - x.mean(-2, keepdim=True) for x in (error, wide))
    return float(error.norm() / varied.norm().clamp(min=1e-30))


class KeyErrorGuard:
    """Moves the K of layers that are unfit for 4 bits to int8, or raises.

    Args:
        raises: Raise, instead of storing K in int8.
    """

    def __init__(self, *, raises: bool) -> None:
        self._raises = raises

    def concerns(self, form: KVFormat | None) -> bool:
        """Whether layers of a format are looked at."""
        return form is not None and form.keys.bits <= 4

    def judge(self, layer_idx: int, form: KVFormat, keys: torch.Tensor) -> KVFormat | None:
        """The format that a layer should have instead, or None.

        Args:
            layer_idx: The layer, for messages.
            form: Its format.
            keys: `[..., block_size, head_dim]`.

        Raises:
            QuantisationError: There is a better one, and this guard raises.
        """
        error = key_error(form, keys)
        if error <= KEY_ERROR_BOUND:
            return None
        better = with_keys_in_int8(form)
        found = (
            f"layer {layer_idx}: the keys lose too much in {form.name!r} (error {error:.3f} of what differs "
            f"between tokens; the bound is {KEY_ERROR_BOUND})"
        )
        if self._raises:
            raise QuantisationError(
                f"{found}. Nothing was written. Set layer_dtypes={{{layer_idx}: 'int8'}}, another "
                "kv_cache_dtype, or key_error_guard='on', which stores such keys in int8"
            )
        logger.warning("%s, so its keys are stored in int8", found)
        return better
