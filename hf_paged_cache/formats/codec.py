"""The codec: how the K, or the V, of one block and head become codes and float16 parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_paged_cache.errors import PagedCacheError

from .rotation import unrotate

LARGEST_VALUE = 65504.0
"""The largest magnitude of a value that can be stored: beyond it a zero or a scale could leave float16."""


@dataclass(frozen=True)
class Codec(ABC):
    """One way to store the K or the V of a block, for one head.

    Shapes: values are `[..., tokens, dim]`, codes uint8 `[..., tokens, row_bytes(dim)]`, parameters float16
    `[..., *param_shape(tokens, dim)]`. Codes of different tokens never share a byte.
    """

    name: ClassVar[str]  # for messages and kernels
    kernel_id: ClassVar[int] = 0  # in the C++ kernels (`enum Codec` of abi.h); 0 if they do not know it
    bits: ClassVar[int]  # of one code
    params_per_token: ClassVar[int] = 1  # 1 for a scale, 2 with a zero; of codecs whose tokens have their own
    # Tokens can be encoded one by one; otherwise all of a block's are needed at once. The parameters of such
    # a codec are `[kinds, tokens, groups]`, so that a token's have their place.
    is_per_token: ClassVar[bool] = True
    is_rotated: ClassVar[bool] = False  # what is stored is rotated (see `rotation`)

    @property
    def group_size(self) -> int:
        """Channels of a group; 1 where there are no groups."""
        return 1

    def with_group_size(self, group_size: int) -> Codec:
        """The same codec with groups of that size; itself where there are no groups."""
        return self

    def check(self, dim: int) -> None:
        """Raise PagedCacheError if heads of that dim cannot be stored."""
        if dim < 1:
            raise PagedCacheError(f"a head has at least one channel, got a head dim of {dim}")

    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of one token."""
        return -(-dim * self.bits // 8)

    def param_shape(self, tokens: int, dim: int) -> tuple[int, ...]:
        """Shape of the float16 parameters of so many tokens."""
        return (self.params_per_token, tokens, 1)

    @abstractmethod
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and parameters of finite values, magnitude at most `LARGEST_VALUE`."""

    @abstractmethod
    def decode_stored(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Float32 values as they are stored, that is, rotated where the codec rotates."""

    def decode(self, codes: torch.Tensor, params: torch.Tensor, dim: int) -> torch.Tensor:
        """Float32 values."""
        x = self.decode_stored(codes, params, dim)
        return unrotate(x) if self.is_rotated else x
