"""The contract of every format: bytes to the byte, errors within the bound, codes as the pictures say."""

from __future__ import annotations

import math

import pytest
import torch

from hf_paged_cache.errors import PagedCacheError
from hf_paged_cache.formats import (
    FORMATS,
    LARGEST_VALUE,
    Codec,
    KVFormat,
    RecordFormat,
    kv_format,
    with_keys_in_int8,
)
from hf_paged_cache.formats.fp8_token import Fp8Token
from hf_paged_cache.formats.int4_channel import Int4Channel
from hf_paged_cache.formats.int4_group import Int4Group
from hf_paged_cache.formats.int4_token import Int4Token
from hf_paged_cache.formats.int8_block import Int8Block
from hf_paged_cache.formats.int8_token import Int8Token
from hf_paged_cache.formats.rotation import signs
from tests.support.error_bounds import error_bound

HEAD_DIMS = (64, 80, 97, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128, 256)
NAMES = tuple(FORMATS)


def bound(name: str, block_size: int, head_dim: int, v_head_dim: int | None = None) -> RecordFormat:
    layer_format = kv_format(name, group_size=97 if head_dim == 97 else 16)
    assert layer_format is not None
    return layer_format.bind(block_size, head_dim, v_head_dim or head_dim)


def expected_bytes(name: str, tokens: int, dim: int) -> int:
    """Codes of K and V, then fp16 parameters, every part rounded up to 16 bytes; counted by hand."""

    def up(count: int) -> int:
        return math.ceil(count / 16) * 16

    nibbles = tokens * math.ceil(dim / 2)
    groups = 1 if dim == 97 else dim // 16
    parts = {
        "int8": (tokens * dim, tokens * dim, 2 * tokens, 2 * tokens),
        "fp8": (tokens * dim, tokens * dim, 2 * tokens, 2 * tokens),
        "k8v4": (tokens * dim, nibbles, 2 * tokens, 4 * tokens),
        "int4": (nibbles, nibbles, 4 * dim, 4 * tokens),
        "int8_block": (tokens * dim, tokens * dim, 4, 4),
        "int4_group": (nibbles, nibbles, 4 * tokens * groups, 4 * tokens * groups),
    }
    return sum(up(part) for part in parts[name])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_record_has_the_bytes_it_says(name: str, head_dim: int, block_size: int) -> None:
    layout = bound(name, block_size, head_dim)
    assert layout.nbytes == expected_bytes(name, block_size, head_dim)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8", 8.25), ("fp8", 8.25), ("k8v4", 6.375), ("int4", 4.5), ("int8_block", 8.03125)],
)
def test_bits_per_value_at_block_size_64_and_head_dim_64(name: str, bits: float) -> None:
    assert 8 * FORMATS[name].bind(64, 64, 64).nbytes / (2 * 64 * 64) == bits


SPREADS = {
    "normal": lambda x: x,
    "outlier_channel": lambda x: x + 60.0 * (torch.arange(x.shape[-1]) == 3),
    "outlier_token": lambda x: x * (1 + 40 * (torch.arange(x.shape[-2]) == 5))[:, None],
    "tiny": lambda x: x * 1e-6,
    "large": lambda x: x * 9000,
    "one_sided": lambda x: x.abs() + 1000,
    "constant": lambda x: torch.full_like(x, -0.3),
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_round_trip_stays_within_the_bound(
    name: str, head_dim: int, block_size: int, spread: str
) -> None:
    layout = bound(name, block_size, head_dim)
    g = torch.Generator().manual_seed(head_dim * block_size)
    shape = (2, 3, block_size, head_dim)
    keys, values = (SPREADS[spread](torch.randn(shape, generator=g)) for _ in range(2))
    records = torch.full((2, 3, layout.nbytes), 0xFF, dtype=torch.uint8)
    layout.encode(keys, values, records)
    got_keys, got_values = layout.decode(records)
    for codec, x, got in ((layout.format.keys, keys, got_keys), (layout.format.values, values, got_values)):
        rounding = 2e-6 * float(x.abs().amax())
        assert got.isfinite().all()
        assert ((got - x).abs() <= error_bound(codec, x) + rounding).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_no_idle_promise(name: str) -> None:
    """It is small beside the values, and errors come near it."""
    x = torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(0))
    for codec in (FORMATS[name].keys, FORMATS[name].values):
        error = (codec.decode(*codec.encode(x), 64) - x).abs()
        assert error_bound(codec, x).mean() < {8: 0.11, 4: 1.5}[codec.bits]
        assert (error / error_bound(codec, x).expand_as(x).clamp(min=1e-9)).max() > 0.2


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].is_per_token])
def test_token_by_token_gives_the_bytes_of_a_block(name: str) -> None:
    layout = bound(name, 16, 64, 128)
    keys, values = torch.randn(2, 16, 64), torch.randn(2, 16, 128)
    at_once, one_by_one = (torch.zeros(2, layout.nbytes, dtype=torch.uint8) for _ in range(2))
    layout.encode(keys, values, at_once)
    for first, last in ((0, 1), (1, 5), (5, 16)):
        layout.encode_tokens(keys[:, first:last], values[:, first:last], one_by_one, first)
    assert torch.equal(at_once, one_by_one)


def stored(codec: Codec, x: list[list[float]]) -> tuple[list[list[int]], torch.Tensor]:
    codes, params = codec.encode(torch.tensor(x))
    return codes.tolist(), params.float()


def test_the_picture_of_int8_token() -> None:
    # A head of five channels is not rotated, so that codes can be followed by eye.
    codes, params = stored(Int8Token(), [[0.1, -2.0, 0.05, 0.3, 0.0]])
    assert codes == [[6, 0x81, 3, 19, 0]]
    assert float(params) >= 2 / 127 > float(params) * (1 - 2**-10)


def test_the_picture_of_fp8_token() -> None:
    codes, _ = stored(Fp8Token(), [[0.1, -2.0, 0.05, 0.3]])
    assert codes == [[0x5B, 0xFE, 0x53, 0x68]]


def test_the_picture_of_int4_token() -> None:
    codes, params = stored(Int4Token(), [[0.1, -2.0, 0.05, 0.9, 1.0]])
    assert codes == [[0xEA, 0xF0, 0x0A]]
    assert params[1].item() == -2.0


def test_the_picture_of_int4_channel() -> None:
    codes, params = stored(Int4Channel(), [[60.1, -0.5], [60.7, 0.1], [60.4, 1.5]])
    assert codes == [[0 | 0 << 4], [15 | 4 << 4], [8 | 15 << 4]]
    assert params[1].tolist() == [60.09375, -0.5]


def test_the_picture_of_int8_block() -> None:
    codes, params = stored(Int8Block(), [[0.0, 1.0], [2.0, 10.2]])
    assert codes == [[0, 25], [50, 255]]
    assert params[1].item() == 0.0


def test_the_picture_of_int4_group() -> None:
    codes, params = stored(Int4Group(group_size=2), [[0.0, 1.5, 60.0, 61.5]])
    assert codes == [[0 | 0 << 4, 15 | 15 << 4]]
    assert params[1].tolist() == [[0.0, 60.0]]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", NAMES)
def test_the_largest_values_saturate_and_are_never_lost(name: str, head_dim: int) -> None:
    layout = bound(name, 16, head_dim)
    for sign in (1.0, -1.0):
        # Signs under which a rotation would put all of it into one channel.
        extreme = sign * LARGEST_VALUE * torch.tensor(signs(head_dim), dtype=torch.float32)
        x = extreme.expand(16, head_dim)
        records = torch.zeros(layout.nbytes, dtype=torch.uint8)
        layout.encode(x, x, records)
        for got in layout.decode(records):
            assert got.isfinite().all()
            assert got.norm() <= 1.01 * x.norm()
            assert (got * x).sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_what_comes_in_another_dtype_is_the_same_number(name: str, dtype: torch.dtype) -> None:
    layout = bound(name, 16, 64)
    keys, values = torch.randn(16, 64).to(dtype), torch.randn(16, 64).to(dtype)
    there, here = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    layout.encode(keys, values, there)
    layout.encode(keys.float(), values.float(), here)
    assert torch.equal(there, here)


def test_every_pair_of_codecs_makes_a_record() -> None:
    codecs = (Int8Token(), Fp8Token(), Int4Token(), Int4Channel(), Int8Block(), Int4Group(16))
    for keys in codecs:
        for values in codecs:
            layout = KVFormat("pair", keys, values).bind(16, 64, 32)
            k, v = torch.randn(3, 16, 64), torch.randn(3, 16, 32)
            records = torch.zeros(3, layout.nbytes, dtype=torch.uint8)
            layout.encode(k, v, records)
            got_k, got_v = layout.decode(records)
            assert ((got_k - k).abs() <= error_bound(keys, k) + 1e-5).all()
            assert ((got_v - v).abs() <= error_bound(values, v) + 1e-5).all()


def test_auto_has_no_format_and_unknown_names_are_refused() -> None:
    assert kv_format("auto") is None
    with pytest.raises(PagedCacheError, match=r"one of auto, int8, fp8, k8v4, int4.*got 'int3'"):
        kv_format("int3")


def test_groups_must_fill_a_head() -> None:
    layer_format = kv_format("int4_group", group_size=48)
    assert layer_format is not None
    with pytest.raises(PagedCacheError, match=r"group_size must divide the head dim, which is 64; got 48"):
        layer_format.bind(64, 64, 64)
    layer_format.bind(64, 96, 96)


def test_keys_in_int8_are_known_by_name_where_the_pair_has_one() -> None:
    assert with_keys_in_int8(FORMATS["int4"]) is FORMATS["k8v4"]
    mixed = with_keys_in_int8(FORMATS["int4_group"])
    assert (mixed.name, mixed.keys, mixed.values) == ("int4_group+k8", Int8Token(), Int4Group())
