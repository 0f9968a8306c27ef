"""The table of attention cases that every backend is held to, and an answer that no backend had a hand in.

`build(case, dtype)` stores dense random K/V in shuffled blocks. Whatever nobody may read is NaN: slots never
written, blocks of no table, other layers of the pool, tokens that no query of the row sees. `Problem.want` is
a float64 softmax over the dense tensors (as rounded to `dtype`), computed here and not by the code under
test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hf_paged_cache.kernels.call import NULL_BLOCK, Attention, LayerBlocks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 3e-3,  # rounding the output alone costs 1.7e-3
    torch.float16: 4e-4,  # and here 2e-4
}
"""RMS ratio to allow between an answer in that dtype and the float64 one."""

LSE_TOLERANCE = 1e-4
"""Absolute, in nats; inputs are rounded before both sides are computed, so it is the same for every dtype."""


@dataclass(frozen=True)
class Case:
    """One shape and one set of options.

    `nulls` are (row, table column) pairs that are not stored, `offsets` columns before each row begins.
    """

    name: str
    batch: int = 2
    kv_heads: int = 2
    group: int = 1
    q_tokens: int = 1
    head_dim: int = 64
    v_head_dim: int | None = None
    block_size: int = 64
    start: int = 0
    end: int = 65
    scale: float | None = None
    mask: str | None = None
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    queries_are_last: bool = True
    nulls: tuple[tuple[int, int], ...] = ()
    offsets: tuple[int, ...] = ()

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    def offset(self, row: int) -> int:
        return self.offsets[row] if self.offsets else 0

    def offsets_tensor(self) -> torch.Tensor | None:
        return torch.tensor(self.offsets, dtype=torch.int32) if self.offsets else None


@dataclass(eq=False)
class Problem:
    """A built case: what a kernel is given, the dense tensors behind it, and the float64 answer."""

    blocks: LayerBlocks
    attention: Attention
    keys: torch.Tensor
    """`[batch, kv_heads, end - start, head_dim]` in the case's dtype, finite everywhere."""
    values: torch.Tensor
    visible: torch.Tensor
    """bool `[batch, q_heads, q_tokens, end - start]`."""
    want: torch.Tensor
    """float64 `[batch, q_tokens, q_heads, v_head_dim]`."""
    want_lse: torch.Tensor
    """float64 `[batch, q_heads, q_tokens]`."""


MaskOf = Callable[[Case, torch.dtype, torch.Generator], torch.Tensor]


def _random_bool(*shape: int, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(shape, generator=generator) < 0.6
    keep[..., -1] = True
    return keep


def _left_padding(case: Case) -> torch.Tensor:
    tokens = case.end - case.start
    pad_tokens = torch.arange(case.batch)[:, None, None, None] * min(7, tokens - 1)
    return torch.arange(tokens) >= pad_tokens


def _one_query_sees_nothing(case: Case, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    keep = _random_bool(case.batch, case.q_heads, case.q_tokens, case.end - case.start, generator=g)
    keep[0, :, 0] = False
    return keep


def _minus_inf(case: Case, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    keep = _random_bool(case.batch, 1, case.q_tokens, case.end - case.start, generator=g)
    keep[-1, :, 0] = False
    bias = torch.randn(keep.shape, generator=g)
    return bias.masked_fill(~keep, -torch.inf).to(dtype)


def _finfo_min(case: Case, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    hidden = ~_left_padding(case).expand(-1, -1, case.q_tokens, -1)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def _slice_of_a_larger_mask(case: Case, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    tokens = case.end - case.start
    larger = _random_bool(case.batch, case.q_tokens, 1, 2 * tokens + 6, generator=g)
    larger[..., 2 * tokens - 1] = True
    return larger[..., 1 : 2 * tokens : 2].transpose(1, 2)


def _bias(dtype: torch.dtype | None, *dims: str) -> MaskOf:
    """An additive mask over the named dims, 1 in the others; None: in the query's dtype."""

    def mask(case: Case, query_dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        return (torch.randn(_sizes(case, dims), generator=g) * 2).to(dtype or query_dtype)

    return mask


def _bool(*dims: str) -> MaskOf:
    def mask(case: Case, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
        return _random_bool(*_sizes(case, dims), generator=g)

    return mask


def _sizes(case: Case, dims: tuple[str, ...]) -> tuple[int, ...]:
    sizes = {
        "batch": case.batch,
        "heads": case.q_heads,
        "queries": case.q_tokens,
        "tokens": case.end - case.start,
    }
    return tuple(size if name in dims else 1 for name, size in sizes.items())


MASKS: dict[str, MaskOf] = {
    "bool": _bool("batch", "heads", "queries", "tokens"),
    "bool_per_head": _bool("heads", "tokens"),
    "bool_per_query": _bool("queries", "tokens"),
    "bool_2d": lambda case, dtype, g: _bool("queries", "tokens")(case, dtype, g)[0, 0],
    "bool_1d": lambda case, dtype, g: _bool("tokens")(case, dtype, g)[0, 0, 0],
    "bool_padding": lambda case, dtype, g: _left_padding(case),
    "bool_padding_expanded": lambda case, dtype, g: _left_padding(case).expand(
        -1, case.q_heads, case.q_tokens, -1
    ),
    "bool_one_column": lambda case, dtype, g: torch.arange(case.batch)[:, None, None, None] != 1,
    "bool_sliced": _slice_of_a_larger_mask,
    "bool_sees_nothing": _one_query_sees_nothing,
    "bias": _bias(None, "batch", "heads", "queries", "tokens"),
    "bias_per_head": _bias(None, "heads", "tokens"),
    "bias_float32": _bias(torch.float32, "batch", "queries", "tokens"),
    "bias_bfloat16": _bias(torch.bfloat16, "batch", "queries", "tokens"),
    "bias_float16": _bias(torch.float16, "heads", "tokens"),
    "bias_float64": _bias(torch.float64, "tokens"),
    "minus_inf": _minus_inf,
    "finfo_min": _finfo_min,
}

CASES: tuple[Case, ...] = (
    # Lengths around a block's edge.
    Case("one_token", end=1),
    Case("two_tokens_small_blocks", end=2, block_size=16),
    Case("63_tokens", end=63),
    Case("64_tokens", end=64),
    Case("65_tokens", end=65),
    Case("500_tokens", end=500, group=3, kv_heads=3),
    Case("1300_tokens_one_row", end=1300, batch=1, group=3, kv_heads=3),
    Case("2100_tokens_mqa", end=2100, batch=1, kv_heads=1, group=8, head_dim=128),
    # Head groups and dims.
    Case("gqa_5", group=5, kv_heads=1, end=130),
    Case("gqa_8", group=8, kv_heads=2, end=130, head_dim=128),
    Case("gqa_16", group=16, kv_heads=1, end=130),
    Case("mha_7_heads", group=1, kv_heads=7, end=130),
    Case("head_dim_80", head_dim=80, group=3, end=100),
    Case("head_dim_96", head_dim=96, group=4, end=100),
    Case("head_dim_97", head_dim=97, group=3, end=100),
    Case("head_dim_128", head_dim=128, group=4, end=200),
    Case("head_dim_256", head_dim=256, group=2, end=100),
    Case("head_dim_8", head_dim=8, end=70),
    Case("v_smaller_than_k", head_dim=192, v_head_dim=128, group=3, end=100),
    Case("v_larger_than_k", head_dim=64, v_head_dim=97, group=2, end=100),
    Case("block_size_16", block_size=16, end=100, group=3),
    Case("block_size_32", block_size=32, end=100, group=5, kv_heads=1),
    Case("block_size_256", block_size=256, end=300, group=3),
    Case("batch_5", batch=5, end=65, group=3),
    Case("scale_one", scale=1.0, end=65, head_dim=16),
    # Several queries.
    Case("q2_causal", q_tokens=2, causal=True, group=3, end=65),
    Case("q3_causal_at_block_edge", q_tokens=3, causal=True, group=4, end=66),
    Case("q5_not_causal", q_tokens=5, group=3, end=100),
    Case("q16_causal", q_tokens=16, causal=True, group=3, kv_heads=3, end=500),
    Case("q16_causal_is_everything", q_tokens=16, causal=True, group=2, end=16),
    Case("q4_history", q_tokens=4, causal=True, queries_are_last=False, group=3, end=70),
    # Where the tokens begin.
    Case("start_inside_a_block", start=37, end=150, group=3),
    Case("start_at_a_block", start=64, end=130, group=3),
    Case("start_and_end_in_one_block", start=70, end=75, group=3),
    Case("start_with_mask", start=37, end=150, group=3, mask="bool"),
    # Windows.
    Case("window_8", window=8, end=100, group=3),
    Case("window_1", window=1, end=100),
    Case("window_wider_than_all", window=500, end=100),
    Case("window_q7_causal", window=50, q_tokens=7, causal=True, end=150, group=3),
    Case("window_q7_causal_start", window=50, q_tokens=7, causal=True, start=94, end=150, group=3),
    Case("window_of_history", window=20, q_tokens=16, queries_are_last=False, end=130, group=2),
    Case(
        "window_that_some_queries_have_left", window=5, q_tokens=8, queries_are_last=False, end=100, group=2
    ),
    # Scores and denominators.
    Case("softcap", softcap=2.0, end=130, group=3),
    Case("softcap_causal_window", softcap=1.5, end=130, group=3, q_tokens=5, causal=True, window=40),
    Case("sinks", sinks=True, end=130, group=8),
    Case("sinks_q5_causal_window", sinks=True, end=130, group=4, q_tokens=5, causal=True, window=16),
    Case("sinks_where_nothing_is_seen", sinks=True, end=70, group=3, q_tokens=2, mask="bool_sees_nothing"),
    Case("sinks_softcap_bias", sinks=True, softcap=3.0, end=70, group=3, q_tokens=2, mask="bias"),
    # Masks: each alone, with queries and heads to broadcast over.
    *(Case(f"mask_{name}", mask=name, q_tokens=3, group=3, end=100, block_size=32) for name in MASKS),
    *(
        Case(f"mask_{name}_q1", mask=name, q_tokens=1, group=3, end=130)
        for name in ("bool", "bool_padding", "bias")
    ),
    Case("mask_and_causal", mask="bool_padding", q_tokens=4, causal=True, group=3, end=100),
    Case(
        "mask_and_causal_and_window", mask="minus_inf", q_tokens=4, causal=True, window=30, group=3, end=100
    ),
    Case("mask_over_1300_tokens", mask="bool", q_tokens=2, group=3, end=1300, batch=2, kv_heads=1),
    # Blocks that are not stored.
    Case("null_first_block", nulls=((0, 0),), end=200, group=3),
    Case("null_last_block", nulls=((1, 3),), end=200, group=3),
    Case(
        "null_several",
        nulls=((0, 1), (0, 2), (1, 0)),
        end=500,
        block_size=32,
        group=3,
        q_tokens=3,
        causal=True,
    ),
    Case("null_everything_of_a_row", nulls=((0, 0), (0, 1)), end=100, group=3),
    Case("null_everything_but_sinks", nulls=((0, 0), (0, 1)), end=100, group=3, sinks=True),
    Case("null_with_mask", nulls=((0, 1),), mask="bool", end=200, group=3, q_tokens=2),
    Case("null_with_window", nulls=((1, 0), (1, 1)), window=60, end=190, group=3),
    # Rows that begin later than the batch.
    Case("offsets", offsets=(5, 70), end=200, group=3),
    Case("offsets_are_whole_blocks", offsets=(64, 0), end=128, group=3),
    Case("offsets_small_blocks_causal", offsets=(0, 37), block_size=16, q_tokens=4, causal=True, end=100),
    Case("offsets_start_inside", offsets=(10, 90), start=37, end=150, group=3),
    Case("offsets_window_q7", offsets=(13, 120), window=50, q_tokens=7, causal=True, end=150, group=3),
    Case("offsets_hide_all", offsets=(130, 3), end=130, group=3),
    Case("offsets_beyond_the_end", offsets=(200, 3), end=130, group=3, sinks=True),
    Case("offsets_queries_before_the_row", offsets=(98, 0), q_tokens=4, causal=True, end=100, group=3),
    Case("offsets_history", offsets=(50, 129, 140), batch=3, q_tokens=16, queries_are_last=False, end=130),
    Case("offsets_history_window", offsets=(0, 40), window=20, q_tokens=9, queries_are_last=False, end=70),
    Case("offsets_mask", offsets=(9, 65), mask="bool", q_tokens=2, group=3, end=100, block_size=32),
    Case("offsets_mask_of_tokens", offsets=(9, 65), mask="bool_1d", group=3, start=5, end=100),
    Case("offsets_bias_softcap_sinks", offsets=(9, 1), mask="bias", softcap=3.0, sinks=True, end=70),
    Case("offsets_minus_inf", offsets=(20, 1), mask="minus_inf", end=70, group=2),
    Case("offsets_null", offsets=(9, 40), nulls=((0, 1), (1, 0)), end=200, group=3),
    Case("offsets_1300_tokens", offsets=(700, 20), kv_heads=1, group=3, end=1300),
)

QUICK = frozenset((
    *("one_token", "65_tokens", "gqa_5", "head_dim_97", "head_dim_256", "v_larger_than_k", "block_size_16"),
    *("q3_causal_at_block_edge", "q4_history", "start_inside_a_block", "window_q7_causal_start"),
    *("softcap_causal_window", "sinks_q5_causal_window", "sinks_where_nothing_is_seen", "mask_bool_1d"),
    *("mask_bool_padding_expanded", "mask_bias_per_head", "mask_bias_float64", "mask_minus_inf"),
    *("null_several", "null_everything_but_sinks", "offsets_window_q7", "offsets_hide_all"),
    *("offsets_history", "offsets_mask", "offsets_bias_softcap_sinks"),
))  # fmt: skip
"""Names of those that `make test` runs where one takes long: one for each path."""


def build(case: Case, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Problem:
    """Blocks, question and float64 answer of a case."""
    g = torch.Generator().manual_seed(seed)
    v_head_dim = case.v_head_dim or case.head_dim
    tokens = case.end - case.start

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    keys = normal(case.batch, case.kv_heads, tokens, case.head_dim)
    values = normal(case.batch, case.kv_heads, tokens, v_head_dim)
    # As models hand it over: heads and tokens swapped, so only the last dimension is contiguous.
    query = normal(case.batch, case.q_tokens, case.q_heads, case.head_dim).transpose(1, 2)
    attention = Attention(
        query=query,
        start=case.start,
        end=case.end,
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        mask=None if case.mask is None else MASKS[case.mask](case, dtype, g),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        sinks=normal(case.q_heads) if case.sinks else None,
        queries_are_last=case.queries_are_last,
    )
    visible, bias = _visible_and_bias(case, attention.mask)
    want, want_lse = dense_answer(
        query, keys, values, visible, bias, attention.scale, attention.softcap, attention.sinks
    )
    blocks = _store(case, keys, values, visible, g)
    return Problem(blocks, attention, keys, values, visible, want, want_lse)


def dense_answer(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    bias: torch.Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain softmax attention in float64: `[batch, q_tokens, q_heads, v_head_dim]` and its log-sum-exp."""
    group = query.shape[1] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("bhqd,bhtd->bhqt", query.double(), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        logit = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, logit], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : keys.shape[2]]
    return torch.einsum("bhqt,bhtd->bqhd", weights, v), torch.logsumexp(scores, dim=-1)


def rms_ratio(got: torch.Tensor, want: torch.Tensor) -> float:
    """RMS of the difference over that of `want` (over 1 if that is all zeros). Refuses NaN, other shapes."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, want = got.double(), want.double()
    assert not want.isnan().any(), "the expected answer has NaN"
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} values are NaN or infinite"
    error = (got - want).square().mean().sqrt()
    scale = want.square().mean().sqrt()
    return float(error / scale) if scale > 0 else float(error)


def assert_answers(
    problem: Problem, got: torch.Tensor, lse: torch.Tensor | None = None, *, tolerance: float | None = None
) -> None:
    """That a backend's answer is the problem's, in shape, dtype, layout and value."""
    query = problem.attention.query
    assert got.dtype == query.dtype, f"dtype {got.dtype}, expected {query.dtype}"
    assert got.is_contiguous(), f"strides {got.stride()} are not contiguous"
    error, bound = rms_ratio(got, problem.want), tolerance or TOLERANCE[query.dtype]
    assert error <= bound, f"RMS ratio {error:.2e} > {bound:.0e}"
    assert (got[problem.want == 0] == 0).all(), "a query that sees nothing must get exact zeros"
    if lse is not None:
        assert_lse(lse, problem.want_lse)


def assert_lse(got: torch.Tensor, want: torch.Tensor) -> None:
    """That a log-sum-exp is float32, -inf exactly where expected, and close elsewhere."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == torch.float32, f"dtype {got.dtype}, expected torch.float32"
    assert not got.isnan().any(), "the log-sum-exp has NaN"
    empty = want == -torch.inf
    assert torch.equal(got == -torch.inf, empty), "-inf must stand exactly where nothing is attended"
    error = float((got.double() - want)[~empty].abs().max()) if (~empty).any() else 0.0
    assert error <= LSE_TOLERANCE, f"log-sum-exp is off by {error:.2e} > {LSE_TOLERANCE:.0e}"


def case_id(case: Case) -> str:
    """For `pytest.mark.parametrize(..., ids=case_id)`."""
    return case.name


def smaller(case: Case, **changes: object) -> Case:
    """The case with some fields changed."""
    return replace(case, **changes)  # type: ignore[arg-type]


def _visible_and_bias(case: Case, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (case.batch, case.q_heads, case.q_tokens, case.end - case.start)
    visible = torch.ones(shape, dtype=torch.bool)
    bias = torch.zeros(shape, dtype=torch.float64)
    for row, column in case.nulls:
        first = column * case.block_size + case.offset(row) - case.start
        visible[row, :, :, max(first, 0) : max(first + case.block_size, 0)] = False
    for row in range(case.batch):
        visible[row, :, :, : max(case.offset(row) - case.start, 0)] = False
    for i in range(case.q_tokens):
        position = (case.end - case.q_tokens if case.queries_are_last else case.end) + i
        if case.causal:
            visible[:, :, i, max(position + 1 - case.start, 0) :] = False
        if case.window is not None:
            visible[:, :, i, : max(position - case.window + 1 - case.start, 0)] = False
    if mask is not None and mask.dtype == torch.bool:
        visible &= mask
    elif mask is not None:
        visible &= ~mask.isneginf()
        bias += mask.double().masked_fill(mask.isneginf(), 0.0)
    return visible, bias


def _store(
    case: Case, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, g: torch.Generator
) -> LayerBlocks:
    """Layer 1 of a pool of three, its blocks shuffled, everything that nobody may read NaN."""
    columns = -(-case.end // case.block_size)
    num_blocks = case.batch * columns + 2
    order = torch.randperm(num_blocks, generator=g, dtype=torch.int32)
    table = order[-1].repeat(case.batch, columns + 2)  # past the end: a block full of NaN
    table[:, :columns] = order[: case.batch * columns].view(case.batch, columns)
    layer_shape = (num_blocks, 3, case.kv_heads, case.block_size)
    pools = [torch.full((*layer_shape, x.shape[-1]), torch.nan, dtype=x.dtype) for x in (keys, values)]
    read = visible.unflatten(1, (case.kv_heads, case.group)).any(2).any(2)  # [batch, kv_heads, tokens]
    for pool, dense in zip(pools, (keys, values), strict=True):
        poisoned = dense.masked_fill(~read[..., None], torch.nan)
        for row in range(case.batch):
            for column in range(max(case.start, case.offset(row)), case.end):
                place, slot = divmod(column - case.offset(row), case.block_size)
                pool[table[row, place], 1, :, slot] = poisoned[row, :, column - case.start]
    for row, place in case.nulls:
        table[row, place] = NULL_BLOCK
    return LayerBlocks(pools[0][:, 1], pools[1][:, 1], table, offsets=case.offsets_tensor())
