"""What formats promise: the most that a codec changes a value."""

from __future__ import annotations

import torch

from hf_paged_cache.formats import Codec
from hf_paged_cache.formats.fp8_token import Fp8Token
from hf_paged_cache.formats.int4_channel import Int4Channel
from hf_paged_cache.formats.int8_block import Int8Block
from hf_paged_cache.formats.rotation import part_size


def error_bound(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """The most that `decode(encode(x))` may differ from x, in each element; broadcasts to x's shape.

    Half a scale, in the norm of a part where the codec rotates. Float32 arithmetic comes on top: a few 1e-7
    of the largest value of the token (of the block).
    """
    params = codec.encode(x)[1].float()
    if isinstance(codec, Int8Block):
        return params[..., 0, None, None] / 2
    if isinstance(codec, Int4Channel):
        return params[..., :1, :] / 2
    scale = params[..., 0, :, :].repeat_interleave(codec.group_size, -1)
    if isinstance(codec, Fp8Token):  # of normal and of subnormal numbers
        return torch.maximum(x.float().abs() / 16, scale / 1024)
    return scale * (part_size(x.shape[-1]) ** 0.5 / 2 if codec.is_rotated else 0.5)
