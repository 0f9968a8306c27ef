"""Looks at the K of layers that are stored in 4 bits, before the first of it becomes bytes.

Keys of some models are so uneven that 4 bits lose what attention goes by. That shows in the error of K
itself, measured against how much K differs from token to token: what all tokens of a block have in common
does not change a softmax.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from hf_paged_cache.errors import QuantizationError
from hf_paged_cache.formats import KVFormat, with_keys_in_int8
from hf_paged_cache.kernels.autocast import without_autocast

logger = logging.getLogger("hf_paged_cache")

KEY_ERROR_BOUND = 1 / 3
"""The largest error of a layer's K (see `key_error`). Evenly spread K have 0.1 in `int4`; at this the scores
of a head err by a third of what tells common tokens apart. SmolLM2-135M has 0.08 to 0.11 in `int4`, 0.17 to
0.30 in `int4_group` with groups of 32."""


_ALIKE = 1e-4
"""Tokens that differ by less than this share of their norm count as one and the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layer whose K are unfit for their format.

    Attributes:
        better: The format that it should have.
        found: What was found, a sentence without its end.
    """

    better: KVFormat
    found: str


def key_error(form: KVFormat, keys: torch.Tensor) -> float:
    """The error that storing full blocks of K would bring, in the head that it hurts most.

    Both the error and K themselves are taken without their mean over the tokens of a block. A head's error is
    that of its median token over the norm of its median token, so that a few tokens that are much larger
    than all others do not hide what they do to them.

    Args:
        form: How.
        keys: `[blocks, kv_heads, block_size, head_dim]`.

    Returns:
        The largest error of a head, each the mean over blocks.
    """
    wide = keys.float()
    with without_autocast(wide):
        codes, params = form.keys.encode(wide)
        error = form.keys.decode(codes, params, keys.shape[-1]) - wide
    varied = wide - wide.mean(-2, keepdim=True)
    error = error - error.mean(-2, keepdim=True)
    error, varied, size = (x.norm(dim=-1).median(dim=-1).values for x in (error, varied, wide))
    # Tokens that differ by rounding alone (padding) have nothing to lose.
    return float((error / torch.maximum(varied, _ALIKE * size).clamp(min=1e-30)).mean(0).max())


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

    def judge(self, layer_idx: int, form: KVFormat, keys: torch.Tensor) -> Verdict | None:
        """What a layer should have instead of its format, or None.

        Args:
            layer_idx: The layer, for messages.
            form: Its format.
            keys: `[blocks, kv_heads, block_size, head_dim]`.

        Raises:
            QuantizationError: There is a better one, and this guard raises.
        """
        error = key_error(form, keys)
        if error <= KEY_ERROR_BOUND:
            return None
        better = with_keys_in_int8(form)
        found = (
            f"layer {layer_idx}: the keys lose too much in {form.name!r} (an error of {error:.3f} of what "
            f"tells tokens apart, in the worst head; the bound is {KEY_ERROR_BOUND:.2f})"
        )
        if self._raises:
            raise QuantizationError(
                f"{found}. The step is taken back. Set layer_dtypes={{{layer_idx}: 'int8'}}, another "
                "kv_cache_dtype, or key_error_guard='on', which stores such keys in int8"
            )
        return Verdict(better, found)

    def say(self, verdict: Verdict) -> None:
        """Tell that a layer has been moved."""
        logger.warning("%s, so its keys are stored in int8", verdict.found)
