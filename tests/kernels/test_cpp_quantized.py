"""Records in C++: attention on the bytes, encoding, and the way back, on every instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hf_paged_cache.errors import UnstorableValueError
from hf_paged_cache.formats import KVFormat, RecordFormat
from hf_paged_cache.formats.fp8_token import Fp8Token
from hf_paged_cache.formats.int4_channel import Int4Channel
from hf_paged_cache.formats.int4_group import Int4Group
from hf_paged_cache.formats.int4_token import Int4Token
from hf_paged_cache.formats.int8_block import Int8Block
from hf_paged_cache.formats.int8_token import Int8Token
from hf_paged_cache.formats.record import Side
from hf_paged_cache.formats.rotation import rotate, signs, unrotate
from hf_paged_cache.kernels import cpp, reference
from hf_paged_cache.kernels.call import NULL_BLOCK, LayerBlocks, dense_entry
from hf_paged_cache.kernels.cpp import build as cpu_build
from tests.kernels.cases import CASES, DTYPES, TOLERANCE, Case, Problem, assert_lse, case_id, rms_ratio
from tests.kernels.quantized import FORMAT_NAMES, Dense, build_quantized, layout_of
from tests.support.tails import few

pytestmark = pytest.mark.skipif(cpp.unavailable_reason() is not None, reason=str(cpp.unavailable_reason()))

ISAS = ("avx512", "avx512 without vnni", "avx2", "portable")

CODECS = (Int8Token(), Fp8Token(), Int4Token(), Int4Channel(), Int8Block(), Int4Group(16))

INTEGER_TOLERANCE = 2e-4
"""RMS ratio in float32 where queries and weights become 16-bit integers, relative to the largest of each."""
INTEGER_LSE_TOLERANCE = 2e-3
"""Absolute, in nats: scores of these cases reach a few dozens, and their errors are relative to that."""
FLOAT_TOLERANCE = 2e-6

SIZES = tuple(
    Case(
        f"d{head_dim}_b{block_size}",
        head_dim=head_dim,
        block_size=block_size,
        end=2 * block_size + 21,
        group=3,
        q_tokens=2,
        causal=True,
    )
    for head_dim in (64, 80, 97, 128, 256)
    for block_size in (16, 32, 64, 128, 256)
)

MORE_CASES = (
    Case("group_71", kv_heads=1, group=71, head_dim=64, end=100),
    Case("group_7_q5", batch=1, kv_heads=1, group=7, q_tokens=5, causal=True, end=90, head_dim=128),
    Case("head_dim_512", head_dim=512, group=4, end=65),
    Case("latent_576_512", batch=1, kv_heads=1, group=5, head_dim=576, v_head_dim=512, end=140),
    Case("head_dim_1", head_dim=1, v_head_dim=3, group=3, end=65),
    Case("head_dim_33", head_dim=33, v_head_dim=31, group=7, kv_heads=1, end=65),
    Case("head_dim_160", head_dim=160, v_head_dim=48, group=2, end=65),
    Case("many_splits", batch=1, end=2500, group=4, q_tokens=3, causal=True, block_size=16, kv_heads=1),
    Case("many_splits_nothing_in_some", batch=1, end=2100, kv_heads=1, mask="bool_sees_nothing", q_tokens=2),
    Case("many_splits_sinks", batch=1, end=2100, kv_heads=1, group=3, sinks=True, softcap=3.0),
    Case(
        "window_starts_in_a_later_split", batch=1, end=2100, kv_heads=1, window=700, q_tokens=5, causal=True
    ),
)

FEW = tuple(
    case
    for case in (*CASES, *MORE_CASES)
    if case.name
    in {
        "65_tokens",
        "gqa_5",
        "head_dim_80",
        "head_dim_97",
        "head_dim_128",
        "v_smaller_than_k",
        "q3_causal_at_block_edge",
        "start_inside_a_block",
        "window_q7_causal",
        "sinks_softcap_bias",
        "mask_bool",
        "mask_minus_inf",
        "null_several",
        "block_size_16",
        "latent_576_512",
        "many_splits_sinks",
    }
)


@functools.lru_cache(maxsize=100)
def built(
    case: Case, layout: RecordFormat, dtype: torch.dtype = torch.float32, dense: Dense | None = None
) -> Problem:
    return build_quantized(case, layout, dtype, dense=dense)


@functools.cache
def library(isa: str) -> cpu_build.Library | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_PAGED_CACHE_CPU_ISA", isa.partition(" ")[0])
        patch.setattr(cpp, "_loaded", None)
        if isa.endswith("without vnni"):
            flags = cpu_build._cpu_flags() - {"avx512_vnni"}
            patch.setattr(cpu_build, "_cpu_flags", lambda: flags)
        return cpp._load()


@pytest.fixture(params=few(ISAS, {"avx512", "avx2", "portable"}))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    loaded = library(request.param)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    monkeypatch.setattr(cpp, "_loaded", loaded)
    return str(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tolerance_of(layout: RecordFormat, dtype: torch.dtype = torch.float32) -> float:
    integers = isinstance(layout.format.keys, Int8Token | Int4Channel)
    integers |= isinstance(layout.format.values, Int8Token | Int4Token)
    return max(INTEGER_TOLERANCE if integers else FLOAT_TOLERANCE, TOLERANCE[dtype])


def assert_answers(problem: Problem, tolerance: float) -> None:
    got, lse = cpp.decode(problem.blocks, problem.attention, return_lse=True)
    assert got.dtype == problem.attention.query.dtype
    assert got.is_contiguous()
    assert torch.equal(cpp.decode(problem.blocks, problem.attention)[0], got)
    error = rms_ratio(got, problem.want)
    assert error <= tolerance, f"RMS ratio {error:.2e} > {tolerance:.0e}"
    blind = (~problem.visible.any(-1)).transpose(1, 2)
    assert (got[blind] == 0).all(), "a query that sees nothing must get exact zeros"
    if tolerance == FLOAT_TOLERANCE:
        assert_lse(lse, problem.want_lse)
        return
    empty = problem.want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not lse.isnan().any()
    errors = (lse.double() - problem.want_lse)[~empty].abs()
    assert errors.numel() == 0 or float(errors.max()) <= INTEGER_LSE_TOLERANCE


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES, *SIZES], ids=case_id)
def test_decode_answers_from_the_bytes(case: Case, name: str) -> None:
    layout = layout_of(name, case)
    for dense in ("none", "edges"):
        assert_answers(built(case, layout, torch.float32, dense), tolerance_of(layout))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_decode_on_every_instruction_set(name: str, isa: str) -> None:
    for case in FEW:
        layout = layout_of(name, case)
        assert_answers(built(case, layout), tolerance_of(layout))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_half_precision(name: str, dtype: torch.dtype, isa: str) -> None:
    case = Case("half", group=3, q_tokens=2, causal=True, end=150, head_dim=80)
    layout = layout_of(name, case)
    for dense in ("none", "edges"):
        assert_answers(built(case, layout, dtype, dense), tolerance_of(layout, dtype))


@pytest.mark.parametrize("values", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("keys", CODECS, ids=lambda codec: codec.name)
def test_any_codec_of_k_goes_with_any_of_v(keys: object, values: object) -> None:
    layout = KVFormat("pair", keys, values).bind(32, 64, 96)  # type: ignore[arg-type]
    case = Case("pair", head_dim=64, v_head_dim=96, block_size=32, group=5, end=150, q_tokens=2, mask="bool")
    assert_answers(built(case, layout), tolerance_of(layout))


@pytest.mark.parametrize("group_size", [1, 2, 5, 16, 48, 80])
def test_groups_of_any_size_that_divides(group_size: int, isa: str) -> None:
    case = Case("groups", head_dim=240, group=3, end=70)
    layout = layout_of("int4_group", case, group_size=group_size)
    assert_answers(built(case, layout), FLOAT_TOLERANCE)


def test_dense_blocks_may_lie_between_records() -> None:
    case = Case("middle", group=3, end=300, kv_heads=2)
    for name in FORMAT_NAMES:
        problem = build_quantized(case, layout_of(name, case))
        blocks = problem.blocks
        layout, column = blocks.layout, 2
        assert layout is not None
        assert blocks.records is not None
        slots = [torch.full((6, *x.shape[1:]), torch.nan) for x in (blocks.keys, blocks.values)]
        for side, wide in enumerate((blocks.keys, blocks.values)):
            slots[side][: wide.shape[0]] = wide
        for row in range(2):
            decoded = layout.decode(blocks.records[blocks.table[row, column]])
            for pool, x in zip(slots, decoded, strict=True):
                pool[4 + row] = x
            blocks.table[row, column] = dense_entry(4 + row)
        blocks.keys, blocks.values, blocks.native = slots[0], slots[1], None
        assert_answers(problem, tolerance_of(layout))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_one_thread_and_two_agree(name: str, threads: None) -> None:
    for case in (Case("splits", batch=1, end=1400, group=3), Case("rows", batch=5, end=65, group=3)):
        layout = layout_of(name, case)
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert_answers(built(case, layout), tolerance_of(layout))


@pytest.mark.parametrize("name", ["int8", "int4", "k8v4"])
def test_the_error_of_integer_queries_is_at_most_a_ten_thousandth(name: str) -> None:
    case = Case("long", batch=1, end=3000, group=4, head_dim=128)
    problem = built(case, layout_of(name, case))
    error = rms_ratio(cpp.decode(problem.blocks, problem.attention)[0], problem.want)
    assert error <= 1e-4, f"{error:.2e}"


def test_zero_queries_and_zero_values_give_zeros() -> None:
    case = Case("zeros", group=3, end=100)
    for name in FORMAT_NAMES:
        blocks = empty_blocks(name, entries=[[0, 1], [2, 3]], case=case)
        tokens = 100 if blocks.layout and blocks.layout.format.is_per_token else 128
        zeros = torch.zeros(2, 2, tokens, 64)
        cpp.write(blocks, zeros, zeros, 0)
        attention = replace(built(case, layout_of(name, case)).attention, query=torch.zeros(2, 6, 1, 64))
        got, lse = cpp.decode(blocks, attention, return_lse=True)
        assert (got == 0).all()
        assert torch.allclose(lse, torch.tensor(100.0).log())


def test_nan_in_the_query_reaches_its_own_row_only(isa: str) -> None:
    for name in FORMAT_NAMES:
        case = Case("nan", group=2, end=100)
        problem = build_quantized(case, layout_of(name, case))
        problem.attention.query[1, 3, 0, 5] = torch.nan
        got = cpp.decode(problem.blocks, problem.attention)[0]
        assert got[1, 0, 3].isnan().all()
        assert got.isnan().sum() == 64


def test_a_scale_of_nan_that_is_attended_reaches_the_output(isa: str) -> None:
    for name in FORMAT_NAMES:
        case = Case("nan", batch=1, group=2, end=100)
        layout = layout_of(name, case)
        problem = build_quantized(case, layout, dense="none")
        assert problem.blocks.records is not None
        record = problem.blocks.records[problem.blocks.table[0, 0], 1]
        layout.parts(record, "values")[1].view(-1)[0] = torch.nan
        assert cpp.decode(problem.blocks, problem.attention)[0][0, 0, 2:].isnan().any()


# Writing, sealing, reading back.


def empty_blocks(
    name: str, *, entries: list[list[int]], case: Case, dtype: torch.dtype = torch.float32
) -> LayerBlocks:
    """Records and slots without content, under the given table; layer 1 of two."""
    layout = layout_of(name, case)
    v_head_dim = case.v_head_dim or case.head_dim
    shape = (3, 2, case.kv_heads, case.block_size)
    keys, values = (torch.full((*shape, dim), torch.nan, dtype=dtype) for dim in (case.head_dim, v_head_dim))
    records = torch.full((9, 2, case.kv_heads, layout.nbytes), 0xFF, dtype=torch.uint8)
    table = torch.tensor(entries, dtype=torch.int32)
    return LayerBlocks(keys[:, 1], values[:, 1], table, None, records[:, 1], layout)


def codes_of(packed: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4)).int()
    return packed.int()


def assert_same_records(layout: RecordFormat, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal parameters, up to a unit in the last place; codes that differ by one at most, and hardly ever."""
    sides: tuple[Side, ...] = ("keys", "values")
    for side in sides:
        codec = layout.codec(side)
        got_codes, got_params = layout.parts(got, side)
        codes, params = layout.parts(want, side)
        assert got_params.isfinite().all()
        apart = (got_params.view(torch.int16).int() - params.view(torch.int16).int()).abs()
        assert int(torch.where(got_params == params, 0, apart).max()) <= 1
        difference = (codes_of(got_codes, codec.bits) - codes_of(codes, codec.bits)).abs()
        if isinstance(codec, Int8Token):
            difference = torch.minimum(difference, 256 - difference)
        assert int(difference.max()) <= 1
        assert float((difference > 0).float().mean()) <= 1e-3


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("head_dim", [1, 24, 33, 64, 80, 97, 128, 256])
def test_sealing_gives_the_bytes_that_the_formats_define(head_dim: int, name: str, isa: str) -> None:
    case = Case("seal", block_size=32, head_dim=head_dim, v_head_dim=48)
    layout = layout_of(name, case)
    for dtype in (torch.float32, torch.bfloat16):
        keys = (torch.randn(4, 3, 2, 32, head_dim) * torch.logspace(-3, 3, 4).view(4, 1, 1, 1, 1)).to(dtype)
        values = (torch.randn(4, 3, 2, 32, 48) + 1).to(dtype)
        keys[0, 0], values[0, 1, 1, 3] = 0.0, 0.0
        records, want = (torch.full((5, 3, 2, layout.nbytes), 0xFF, dtype=torch.uint8) for _ in range(2))
        slots, ids = [2, 0, 1, 3], [4, 1, 0, 2]
        cpp.encode_blocks(layout, records, keys, values, slots, ids)
        reference.encode_blocks(layout, want, keys, values, slots, ids)
        assert (records[3] == 0xFF).all()
        assert_same_records(layout, records[ids], want[ids])


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("case", FEW[:6], ids=case_id)
def test_unsealing_is_what_the_formats_decode(case: Case, name: str, isa: str) -> None:
    layout = layout_of(name, case)
    k_dim, v_dim, size = layout.head_dim, layout.v_head_dim, case.block_size
    keys, values = torch.randn(3, 2, 2, size, k_dim), torch.randn(3, 2, 2, size, v_dim)
    records = torch.full((4, 2, 2, layout.nbytes), 0xFF, dtype=torch.uint8)
    reference.encode_blocks(layout, records, keys, values, [0, 1], [3, 1])
    kept = keys[1].clone()
    cpp.decode_blocks(layout, records, keys, values, [2, 0], [3, 1])
    want_keys, want_values = layout.decode(records[[3, 1]])
    assert rms_ratio(keys[[2, 0]], want_keys) < 1e-6
    assert rms_ratio(values[[2, 0]], want_values) < 1e-6
    assert torch.equal(keys[1], kept)


def test_what_cannot_be_sealed_is_refused() -> None:
    case = Case("seal", block_size=32)
    layout = layout_of("int8", case)
    records = torch.zeros(2, 3, 2, layout.nbytes, dtype=torch.uint8)
    keys, values = torch.zeros(2, 3, 2, 32, 64), torch.zeros(2, 3, 2, 32, 64)
    cpp.encode_blocks(layout, records, keys, values, [], [])
    for slots, ids in (([0], [2]), ([2], [0]), ([-1], [0]), ([0, 1], [1])):
        with pytest.raises(AssertionError, match=r"outside of|cannot be converted"):
            cpp.encode_blocks(layout, records, keys, values, slots, ids)
    with pytest.raises(AssertionError, match="cannot be converted"):
        cpp.encode_blocks(layout, records[:, :2], keys[:, :2], values[:, :2], [0], [0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_writing_a_prompt(name: str, dtype: torch.dtype) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=64, v_head_dim=80)
    entries = [[dense_entry(0), 4, 7, dense_entry(1)], [dense_entry(2), NULL_BLOCK, 1, 0]]
    blocks, want = (empty_blocks(name, entries=entries, case=case, dtype=dtype) for _ in range(2))
    layout = blocks.layout
    assert layout is not None
    assert blocks.records is not None
    assert want.records is not None
    end = 53 if layout.format.is_per_token else 64
    keys = torch.randn(2, end, 2, 64).to(dtype).transpose(1, 2)
    values = torch.randn(2, 2, end, 80).to(dtype)
    cpp.write(blocks, keys, values, 0)
    reference.write(want, keys, values, 0)
    for got, expected in ((blocks.keys, want.keys), (blocks.values, want.values)):
        assert torch.equal(got.nan_to_num(nan=-77.0), expected.nan_to_num(nan=-77.0))
    assert_same_records(layout, blocks.records[[4, 7, 1]], want.records[[4, 7, 1]])
    assert (blocks.records[[2, 3, 5, 6, 8]] == 0xFF).all()


@pytest.mark.parametrize("name", [n for n in FORMAT_NAMES if n not in ("int4", "int8_block")])
def test_writing_token_by_token_gives_the_same_bytes(name: str, isa: str) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=80)
    one, many = (empty_blocks(name, entries=[[4, 7], [2, 1]], case=case) for _ in range(2))
    keys, values = torch.randn(2, 2, 80, 32).transpose(2, 3), torch.randn(2, 2, 32, 80)
    cpp.write(many, keys, values, 0)
    for t in range(32):
        cpp.write(one, keys[:, :, t : t + 1], values[:, :, t : t + 1], t)
    assert one.records is not None
    assert many.records is not None
    assert torch.equal(one.records, many.records)
    assert (one.records[[4, 7, 2, 1]] != 0xFF).any()


def test_writing_is_the_same_by_several_threads(threads: None) -> None:
    case = Case("write", kv_heads=2, head_dim=64)
    keys, values = torch.randn(2, 2, 256, 64), torch.randn(2, 2, 256, 64)
    for name in FORMAT_NAMES:
        written = []
        for count in (1, 3):
            torch.set_num_threads(count)
            blocks = empty_blocks(name, entries=[[0, 1, 2, 3], [5, 6, 7, 8]], case=case)
            cpp.write(blocks, keys, values, 0)
            assert blocks.records is not None
            written.append(blocks.records)
        assert torch.equal(written[0], written[1])


@pytest.mark.parametrize("name", ["int4", "int8_block"])
def test_part_of_a_block_is_refused_where_blocks_are_encoded_whole(name: str) -> None:
    case = Case("write", kv_heads=2, block_size=16)
    blocks = empty_blocks(name, entries=[[3, 1], [2, dense_entry(0)]], case=case)
    states = torch.randn(2, 2, 16, 64)
    with pytest.raises(AssertionError, match="whole blocks"):
        cpp.write(blocks, states, states, 8)
    assert blocks.records is not None
    assert (blocks.records == 0xFF).all()
    assert blocks.keys.isnan().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e5, -65536.0])
@pytest.mark.parametrize("tokens", [1, 32])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_has_no_scale_is_refused_and_nothing_written(name: str, tokens: int, bad: float) -> None:
    case = Case("write", kv_heads=2, block_size=16, head_dim=80)
    for dtype in DTYPES:
        for side in ("K", "V"):
            entries = [[dense_entry(0), dense_entry(1)], [dense_entry(2), 1]]
            blocks = empty_blocks(name, entries=entries, case=case, dtype=dtype)
            states = {x: torch.randn(2, 2, tokens, 80).to(dtype) for x in ("K", "V")}
            states[side][1, 1, -1, 79] = bad
            with pytest.raises(UnstorableValueError, match=f"^{side} has a NaN"):
                cpp.write(blocks, states["K"], states["V"], 0)
            assert blocks.records is not None
            assert (blocks.records == 0xFF).all()
            assert blocks.keys.isnan().all()
            assert blocks.values.isnan().all()


def test_the_largest_values_are_stored() -> None:
    case = Case("write", kv_heads=2, block_size=16)
    for name in FORMAT_NAMES:
        blocks = empty_blocks(name, entries=[[0], [1]], case=case)
        states = torch.randn(2, 2, 16, 64)
        states[..., 3] = 65504.0
        states[..., 4] = -65504.0
        cpp.write(blocks, states, states, 0)
        keys, values = cpp.gather(blocks, 0, 16)
        for got in (keys, values):  # in `int4_group` small values in the group of a huge one are lost
            assert rms_ratio(got, states) < (0.3 if name == "int4_group" else 0.1)
        # A rotation would put all of this into one channel, beyond float16.
        states = (65504.0 * torch.tensor(signs(64), dtype=torch.float32)).expand(2, 2, 16, 64)
        cpp.write(blocks, states, states, 0)
        for got in cpp.gather(blocks, 0, 16):
            assert got.isfinite().all()
            assert got.norm() <= 1.01 * states.norm()
            assert (got * states).sum() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dense", ["none", "edges"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_gather_gives_what_is_stored_in_the_model_s_dtype(
    name: str, dense: Dense, dtype: torch.dtype, isa: str, threads: None
) -> None:
    case = Case("gather", group=1, start=37, end=200, nulls=((1, 1),), head_dim=80, block_size=32)
    problem = build_quantized(case, layout_of(name, case), dtype, dense=dense)
    seen = problem.visible[:, :, 0, :, None]
    for count in (1, 2):
        torch.set_num_threads(count)
        keys, values = cpp.gather(problem.blocks, case.start, case.end)
        assert keys.dtype == values.dtype == dtype
        for got, want in ((keys, problem.keys), (values, problem.values)):
            assert got.is_contiguous()
            assert rms_ratio(got, (want * seen).to(dtype)) <= TOLERANCE[dtype] / 4
            assert not got[1, :, : 64 - 37].any()


def test_no_tokens_are_gathered_as_none() -> None:
    problem = built(Case("none", end=100), layout_of("int8", Case("none")))
    keys, values = cpp.gather(problem.blocks, 50, 50)
    assert keys.shape == values.shape == (2, 2, 0, 64)
    capacity = problem.blocks.table.shape[1] * 64
    for start, end in ((-1, 10), (20, 10), (0, capacity + 1)):
        with pytest.raises(AssertionError, match="cannot be gathered"):
            cpp.gather(problem.blocks, start, end)


@pytest.mark.parametrize("dim", [1, 2, 8, 24, 33, 64, 80, 96, 128, 192, 256])
def test_rotation_has_the_bits_of_the_formats(dim: int, isa: str) -> None:
    """A codec whose codes are exact for what is one step: the rotation alone decides."""
    case = Case("rotation", kv_heads=1, batch=1, block_size=16, head_dim=dim)
    layout = layout_of("int8", case)
    x = torch.randn(1, 1, 16, dim)
    blocks = empty_blocks("int8", entries=[[0]], case=case)
    cpp.write(blocks, x, x, 0)
    assert blocks.records is not None
    want = torch.zeros_like(blocks.records[0])
    layout.encode(x[0], x[0], want)
    assert torch.equal(blocks.records[0], want)
    assert rms_ratio(unrotate(rotate(x)), x) < 1e-6


def test_tables_that_name_what_is_not_there_are_refused() -> None:
    case = Case("outside", end=64)
    for entry in (9, dense_entry(3)):
        blocks = empty_blocks("int8", entries=[[0], [entry]], case=case)
        states = torch.zeros(2, 2, 64, 64)
        with pytest.raises(AssertionError, match="outside the pool"):
            cpp.write(blocks, states, states, 0)
        with pytest.raises(AssertionError, match="outside the pool"):
            cpp.gather(blocks, 0, 64)
        problem = built(case, layout_of("int8", case))
        with pytest.raises(AssertionError, match="outside the pool"):
            cpp.decode(blocks, problem.attention)


def test_unsupported_records_are_named() -> None:
    case = Case("blocks")
    blocks = empty_blocks("int8", entries=[[0], [1]], case=case)
    assert blocks.records is not None
    assert cpp.unsupported_reason(blocks) is None
    assert "meta" in str(cpp.unsupported_reason(replace(blocks, records=blocks.records.to("meta"))))
    assert "int8" in str(cpp.unsupported_reason(replace(blocks, records=blocks.records.to(torch.int8))))
    short = replace(blocks, records=blocks.records[..., :-16])
    with pytest.raises(AssertionError, match="do not belong"):
        cpp.gather(short, 0, 1)


def test_layers_without_dense_slots_have_empty_pools() -> None:
    case = Case("pure", group=3, end=100)
    problem = build_quantized(case, layout_of("int8", case), dense="none")
    blocks = problem.blocks
    empty = replace(
        blocks, keys=blocks.keys.new_empty(0, 2, 64, 64), values=blocks.values.new_empty(0, 2, 64, 64)
    )
    assert torch.equal(cpp.decode(empty, problem.attention)[0], cpp.decode(blocks, problem.attention)[0])


def test_scratch_does_not_grow_from_step_to_step() -> None:
    case = Case("scratch", end=130, group=3)
    problem = built(case, layout_of("int4", case))
    cpp.decode(problem.blocks, problem.attention)
    held = cpp.scratch_bytes()
    for end in range(120, 130):
        cpp.decode(problem.blocks, replace(problem.attention, end=end))
    assert cpp.scratch_bytes() == held
