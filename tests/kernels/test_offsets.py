"""Rows that begin later than their batch: each is stored and read as the same row alone, by every backend."""

from __future__ import annotations

import itertools
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch

from hf_paged_cache.errors import UnstorableValueError
from hf_paged_cache.formats import RecordFormat
from hf_paged_cache.kernels.call import Attention, LayerBlocks, dense_entry
from hf_paged_cache.kernels.torch import torch_kernels
from tests.kernels.cases import Case, rms_ratio
from tests.kernels.quantized import FORMAT_NAMES, layout_of

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, HEADS, DIM = 16, 1, 32
PROMPT, STEPS = 53, 2
OFFSETS = (0, 21, 48, 60)
"""The rows have 53, 32, 5 and no tokens of the prompt."""
OUTSIDE = 0x7FFFFFFF
TABLE = (
    (dense_entry(0), 7, 2, dense_entry(1)),
    (dense_entry(2), 0, dense_entry(3), OUTSIDE),
    (dense_entry(4), OUTSIDE, OUTSIDE, OUTSIDE),
    (OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE),
)
DENSE_COLUMNS = ((0, 3), (0, 2), (0,), ())


BACKENDS = ("reference", "torch.torch_kernels", "cpp", "triton")
FORMATS = ("auto", *FORMAT_NAMES)
SLOW = {"triton": ("auto", "int8", "int4")}
"""In the interpreter; what formats differ in knows nothing of where a row begins."""


def module_of(name: str) -> ModuleType:
    module = import_module(f"hf_paged_cache.kernels.{name}")
    if reason := module.unavailable_reason():
        pytest.skip(reason)
    return module


def device_of(backend: ModuleType) -> str:
    return "cuda" if backend.__name__.endswith("triton") and torch.cuda.is_available() else "cpu"


def empty_blocks(layout: RecordFormat | None, device: str) -> LayerBlocks:
    """Blocks without content under the table; without records under one of as many other ids."""
    keys, values = (torch.full((16, HEADS, SIZE, DIM), torch.nan, device=device) for _ in range(2))
    table = torch.tensor(TABLE, dtype=torch.int32)
    records = None
    if layout is None:
        table = torch.where(table < 0, table + 16, table)  # to ids that are not among the others
    else:
        records = torch.full((9, HEADS, layout.nbytes), 0xFF, dtype=torch.uint8, device=device)
    return LayerBlocks(
        keys, values, table.to(device), None, records, layout, DENSE_COLUMNS if layout else None
    )


def alone(blocks: LayerBlocks, row: int) -> LayerBlocks:
    """The same pools under one row's table."""
    columns = None if blocks.dense_columns is None else blocks.dense_columns[row : row + 1]
    table = blocks.table[row : row + 1]
    return LayerBlocks(blocks.keys, blocks.values, table, None, blocks.records, blocks.layout, columns)


def both(layout: RecordFormat | None, backend: ModuleType) -> tuple[LayerBlocks, LayerBlocks]:
    """Blocks for the batch, and others for each of its rows alone."""
    device = device_of(backend)
    padded, single = empty_blocks(layout, device), empty_blocks(layout, device)
    padded.offsets = torch.tensor(OFFSETS, dtype=torch.int32, device=device)
    return padded, single


def states(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the batch, NaN before a row begins."""
    g = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(4, HEADS, PROMPT + STEPS, DIM, generator=g) for _ in range(2))
    before = torch.arange(PROMPT + STEPS) < torch.tensor(OFFSETS)[:, None]
    keys, values = (x.masked_fill(before[:, None, :, None], torch.nan).to(device) for x in (keys, values))
    return keys, values


def layout_named(name: str) -> RecordFormat | None:
    return None if name == "auto" else layout_of(name, Case("offsets", head_dim=DIM, block_size=SIZE))


@pytest.mark.parametrize(
    ("backend_name", "name"),
    [
        pytest.param(b, name, marks=[pytest.mark.full] * (b == "triton" and name != "auto"))
        for b in BACKENDS
        for name in SLOW.get(b, FORMATS)
    ],
)
def test_a_row_is_stored_and_read_as_the_same_row_alone(backend_name: str, name: str) -> None:
    backend = module_of(backend_name)
    layout, device = layout_named(name), device_of(backend)
    padded, single = both(layout, backend)
    keys, values = states(device)
    edges = [0, PROMPT, *range(PROMPT + 1, PROMPT + STEPS + 1)]
    if layout is None or layout.format.is_per_token:
        edges[1:1] = [30, 50]
    for start, end in itertools.pairwise(edges):
        backend.write(padded, keys[:, :, start:end], values[:, :, start:end], start)
        for row, offset in enumerate(OFFSETS):
            if offset < end:
                new = (x[row : row + 1, :, max(start, offset) : end] for x in (keys, values))
                backend.write(alone(single, row), *new, max(start - offset, 0))
    for got, want in ((padded.keys, single.keys), (padded.values, single.values)):
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    if padded.records is not None and single.records is not None:
        assert torch.equal(padded.records, single.records)

    gather = getattr(backend, "gather", torch_kernels.gather)
    if layout is None:
        gather = torch_kernels.gather
    end = PROMPT + STEPS
    for start in (0, 37):
        query = torch.randn(4, 2 * HEADS, 2, DIM, device=device)
        question: dict[str, Any] = {"scale": 0.125, "causal": True, "window": 40}
        got_keys, got_values = gather(padded, start, end)
        out, lse = backend.decode(padded, Attention(query, start, end, **question), return_lse=True)
        for row, offset in enumerate(OFFSETS):
            first = max(start, offset)
            if first >= end:
                assert not any(x[row].any() for x in (got_keys, got_values, out))
                assert (lse[row] == -torch.inf).all()
                continue
            own = alone(single, row)
            wanted = gather(own, first - offset, end - offset)
            for got, want in zip((got_keys, got_values), wanted, strict=True):
                assert not got[row, :, : first - start].any()
                assert torch.equal(got[row, :, first - start :], want[0])
            a = Attention(query[row : row + 1], first - offset, end - offset, **question)
            want, want_lse = backend.decode(own, a, return_lse=True)
            assert rms_ratio(out[row], want[0]) < 1e-6
            assert torch.allclose(lse[row], want_lse[0], atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("backend_name", BACKENDS)
def test_what_has_no_scale_is_refused_from_where_a_row_begins(name: str, backend_name: str) -> None:
    backend = module_of(backend_name)
    padded, _ = both(layout_named(name), backend)
    keys, values = (x[:, :, :PROMPT].clone() for x in states(device_of(backend)))
    values[1, 0, OFFSETS[1], 3] = torch.inf
    with pytest.raises(UnstorableValueError, match=r"^V has a NaN"):
        backend.write(padded, keys, values, 0)
    assert padded.keys.isnan().all()
    assert (padded.records == 0xFF).all()


def test_tables_that_are_too_short_for_where_a_row_begins_are_refused() -> None:
    cpp = module_of("cpp")
    padded, _ = both(None, cpp)
    keys, values = states("cpu")
    end = PROMPT + STEPS + 20  # row 0 would have 75 tokens in 4 blocks
    with pytest.raises(AssertionError, match="outside the pool"):
        cpp.write(padded, keys[:, :, :20].nan_to_num(), values[:, :, :20].nan_to_num(), end - 20)
    with pytest.raises(AssertionError, match="outside the pool"):
        cpp.decode(padded, Attention(torch.zeros(4, HEADS, 1, DIM), 0, end, 1.0))
