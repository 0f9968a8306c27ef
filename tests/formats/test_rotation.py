from __future__ import annotations

import pytest
import torch

from hf_paged_cache.formats.rotation import part_size, rotate, signs, unrotate

DIMS = (1, 2, 16, 64, 80, 96, 97, 128, 192, 256)


@pytest.mark.parametrize("dim", DIMS)
def test_rotating_back_gives_what_it_was(dim: int) -> None:
    x = torch.randn(7, dim, dtype=torch.float64)
    assert torch.allclose(unrotate(rotate(x)), x, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_products_of_rotated_vectors_are_the_same(dim: int) -> None:
    x, y = torch.randn(2, 7, dim, dtype=torch.float64)
    assert torch.allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1), atol=1e-10)


@pytest.mark.parametrize(("dim", "n"), [(64, 64), (80, 16), (96, 32), (97, 1), (128, 128), (192, 64)])
def test_it_is_the_hadamard_matrix_of_each_part(dim: int, n: int) -> None:
    assert part_size(dim) == n
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < n:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
    whole = torch.block_diag(*[hadamard] * (dim // n)) / n**0.5
    x = torch.randn(5, dim, dtype=torch.float64)
    want = (x * torch.tensor(signs(dim), dtype=torch.float64)) @ whole.T
    assert torch.allclose(rotate(x), want, atol=1e-12)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_neither_a_constant_nor_one_channel_stays_in_one_place(dim: int) -> None:
    for x in (torch.ones(dim), torch.nn.functional.one_hot(torch.tensor(5), dim).float()):
        assert rotate(x).abs().max() <= 1.5 * x.norm() / dim**0.5


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_signs_are_mixed(dim: int) -> None:
    assert abs(sum(signs(dim))) <= 1.5 * dim**0.5


def test_odd_heads_are_left_alone() -> None:
    x = torch.randn(3, 97)
    assert torch.equal(rotate(x), x)
