"""Quantized blocks in plain torch: the reference, and the backend that falls back to."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from hf_paged_cache.errors import UnstorableValueError
from hf_paged_cache.kernels import reference
from hf_paged_cache.kernels.call import NULL_BLOCK, LayerBlocks, dense_entry
from hf_paged_cache.kernels.torch import torch_kernels
from tests.kernels.cases import CASES, Case, assert_answers, case_id, rms_ratio
from tests.kernels.quantized import FORMAT_NAMES, Dense, build_quantized, layout_of

BACKENDS = (reference, torch_kernels)
FEW = tuple(
    case
    for case in CASES
    if case.name
    in {
        "65_tokens",
        "gqa_5",
        "head_dim_97",
        "v_smaller_than_k",
        "q3_causal_at_block_edge",
        "start_inside_a_block",
        "window_q7_causal",
        "softcap",
        "sinks",
        "mask_bool_padding",
        "mask_minus_inf",
        "null_several",
        "block_size_16",
    }
)


def backend_id(backend: ModuleType) -> str:
    return backend.__name__.rpartition(".")[2]


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_torch_reads_what_the_records_say(case: Case, name: str) -> None:
    for dense in ("none", "edges"):
        problem = build_quantized(case, layout_of(name, case), dense=dense)
        got, lse = torch_kernels.decode(problem.blocks, problem.attention, return_lse=True)
        assert_answers(problem, got, lse)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("case", FEW, ids=case_id)
def test_the_reference_reads_what_the_records_say(case: Case, name: str) -> None:
    problem = build_quantized(case, layout_of(name, case))
    got, lse = reference.decode(problem.blocks, problem.attention, return_lse=True)
    assert_answers(problem, got, lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    case = Case("half", group=3, q_tokens=2, causal=True, end=150)
    problem = build_quantized(case, layout_of(name, case), dtype)
    assert_answers(problem, torch_kernels.decode(problem.blocks, problem.attention)[0])


@pytest.mark.parametrize("dense", ["none", "edges"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_id)
def test_gather_gives_what_is_stored_in_the_model_s_dtype(
    backend: ModuleType, name: str, dense: Dense
) -> None:
    case = Case("gather", group=1, start=37, end=200, nulls=((1, 1),), head_dim=80, block_size=32)
    problem = build_quantized(case, layout_of(name, case), torch.bfloat16, dense=dense)
    keys, values = backend.gather(problem.blocks, case.start, case.end)
    seen = problem.visible[:, :, 0, :, None]
    assert keys.dtype == values.dtype == torch.bfloat16
    assert torch.equal(keys, (problem.keys * seen).bfloat16())
    assert torch.equal(values, (problem.values * seen).bfloat16())


def empty_blocks(name: str, *, entries: list[list[int]], case: Case) -> LayerBlocks:
    """Records and slots without content, under the given table."""
    layout = layout_of(name, case)
    shape = (3, case.kv_heads, case.block_size, case.head_dim)
    keys, values = (torch.full(shape, torch.nan) for _ in range(2))
    records = torch.full((9, case.kv_heads, layout.nbytes), 0xFF, dtype=torch.uint8)
    return LayerBlocks(keys, values, torch.tensor(entries, dtype=torch.int32), None, records, layout)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_id)
def test_writing_a_prompt(backend: ModuleType, name: str) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=64)
    entries = [[dense_entry(0), 4, 7, dense_entry(1)], [dense_entry(2), NULL_BLOCK, 1, 0]]
    blocks = empty_blocks(name, entries=entries, case=case)
    end = 53 if blocks.layout.format.is_per_token else 64
    keys, values = torch.randn(2, 2, end, 64), torch.randn(2, 2, end, 64)
    backend.write(blocks, keys, values, 0)
    got_keys, got_values = backend.gather(blocks, 0, end)
    for got, x in ((got_keys, keys), (got_values, values)):
        assert torch.equal(got[:, :, :16], x[:, :, :16])
        assert torch.equal(got[0, :, 48:], x[0, :, 48:])
        assert not got[1, :, 16:32].any()
        assert rms_ratio(got[0], x[0]) < 0.2


@pytest.mark.parametrize("name", [n for n in FORMAT_NAMES if n not in ("int4", "int8_block")])
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_id)
def test_writing_token_by_token_gives_the_same_bytes(backend: ModuleType, name: str) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=64)
    one, many = (empty_blocks(name, entries=[[4, 7], [2, 1]], case=case) for _ in range(2))
    keys, values = torch.randn(2, 2, 32, 64), torch.randn(2, 2, 32, 64)
    backend.write(many, keys, values, 0)
    for t in range(32):
        backend.write(one, keys[:, :, t : t + 1], values[:, :, t : t + 1], t)
    assert torch.equal(one.records, many.records)


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_id)
def test_sealing_and_back(backend: ModuleType, name: str) -> None:
    case = Case("seal", block_size=16, head_dim=64)
    layout = layout_of(name, case)
    records = torch.full((5, 3, 2, layout.nbytes), 0xFF, dtype=torch.uint8)
    keys, values = torch.randn(4, 3, 2, 16, 64), torch.randn(4, 3, 2, 16, 64)
    before = keys.clone()
    backend.encode_blocks(layout, records, keys, values, [2, 0], [4, 1])
    assert torch.equal(keys, before)
    assert (records[[0, 2, 3]] == 0xFF).all()
    wanted, _ = layout.decode(records[[4, 1]])
    backend.decode_blocks(layout, records, keys, values, [1, 3], [4, 1])
    assert torch.equal(keys[[1, 3]], wanted)
    assert torch.equal(keys[[0, 2]], before[[0, 2]])
    assert 0 < rms_ratio(keys[[1, 3]], before[[2, 0]]) < 0.2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e5])
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_id)
def test_what_has_no_scale_is_refused_and_nothing_written(backend: ModuleType, name: str, bad: float) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=64)
    for side in ("K", "V"):
        blocks = empty_blocks(name, entries=[[dense_entry(0), 7], [2, 1]], case=case)
        states = {"K": torch.randn(2, 2, 32, 64), "V": torch.randn(2, 2, 32, 64)}
        states[side][1, 1, 30, 5] = bad
        with pytest.raises(UnstorableValueError, match=f"^{side} has a NaN"):
            backend.write(blocks, states["K"], states["V"], 0)
        assert (blocks.records == 0xFF).all()
        assert blocks.keys.isnan().all()
