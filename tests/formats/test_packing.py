from __future__ import annotations

import pytest
import torch

from hf_paged_cache.formats.packing import (
    inverse,
    nibble_bytes,
    pack_nibbles,
    scale_up,
    unpack_nibbles,
    zero_down,
)


@pytest.mark.parametrize("dim", [1, 2, 5, 6, 64, 97])
def test_nibbles_come_back(dim: int) -> None:
    codes = torch.randint(0, 16, (3, 4, dim))
    packed = pack_nibbles(codes)
    assert packed.shape == (3, 4, nibble_bytes(dim))
    assert torch.equal(unpack_nibbles(packed, dim), codes.to(torch.uint8))


def test_where_nibbles_lie() -> None:
    assert pack_nibbles(torch.tensor([1, 2, 3, 4, 5, 6])).tolist() == [0x41, 0x52, 0x63]
    assert pack_nibbles(torch.tensor([1, 2, 3, 4, 5])).tolist() == [0x41, 0x52, 0x03]


NUMBERS = torch.cat(
    [
        torch.tensor([0.0, 1.0, 2.0**-24, 2.0**-25, 1e-9, 6.1e-5, 65504.0, 0.1, 1 / 3, 2047.4, 60000.3]),
        torch.rand(1000) * 10 ** (torch.rand(1000) * 12 - 8),
    ]
).clamp(max=65504)


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The float16 numbers next below and next above a float16 number."""
    up, down = (torch.full_like(x, bound) for bound in (torch.inf, -torch.inf))
    return torch.nextafter(x, down).float(), torch.nextafter(x, up).float()


def test_scales_are_the_next_float16_upwards() -> None:
    scale = scale_up(NUMBERS)
    below, _ = neighbours(scale)
    assert (scale.float() >= NUMBERS).all()
    assert ((below < NUMBERS) | (scale == 0)).all()


def test_zeros_are_the_next_float16_downwards() -> None:
    for x in (NUMBERS, -NUMBERS):
        zero = zero_down(x)
        _, above = neighbours(zero)
        assert zero.isfinite().all()
        assert (zero.float() <= x).all()
        assert (above > x).all()


def test_nothing_is_divided_by_zero() -> None:
    assert inverse(torch.tensor([0.0, 0.5], dtype=torch.float16)).tolist() == [0.0, 2.0]
