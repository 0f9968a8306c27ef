from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from hf_paged_cache.kernels import parts, prefill, torch_blocks
from hf_paged_cache.kernels.prefill import attend_with_history
from hf_paged_cache.kernels.problem import LayerBlocks
from tests.kernels.cases import DTYPES, TOLERANCE, Case, build, case_id, dense_answer, rms_ratio

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Prefill:
    """The history is the stored range of `case`; the rest is about the fresh tokens."""

    name: str
    case: Case
    fresh: int
    mask: str | None = None
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def _case(**fields: object) -> Case:
    return Case("history", **({"group": 3, "end": 130} | fields))  # type: ignore[arg-type]


PREFILLS = (
    Prefill("plain", _case(), 100),
    Prefill("one_fresh_token", _case(), 1),
    Prefill("one_history_token", _case(end=1), 63),
    Prefill("long_history", _case(end=2500, batch=1, kv_heads=1), 33),
    Prefill("history_begins_inside_a_block", _case(start=37, end=150), 20),
    Prefill("history_begins_at_a_block", _case(start=64, end=128), 20),
    Prefill("mha", _case(group=1, kv_heads=5), 20),
    Prefill("gqa_8_head_dim_128", _case(group=8, head_dim=128, kv_heads=1), 65),
    Prefill("head_dim_97", _case(head_dim=97), 20),
    Prefill("v_smaller", _case(head_dim=96, v_head_dim=64), 20),
    Prefill("v_larger", _case(head_dim=64, v_head_dim=80), 20),
    Prefill("small_blocks", _case(block_size=16), 20),
    Prefill("not_causal", _case(), 20, is_causal=False),
    Prefill("null_blocks", _case(nulls=((0, 0), (1, 1))), 20),
    Prefill("window_inside_fresh", _case(), 50, window=8),
    Prefill("window_into_history", _case(), 50, window=70),
    Prefill("window_longer_than_all", _case(), 50, window=1000),
    Prefill("window_not_causal", _case(), 50, window=30, is_causal=False),
    Prefill("softcap", _case(), 20, softcap=1.5),
    Prefill("sinks", _case(), 20, sinks=True),
    Prefill("sinks_window", _case(), 40, sinks=True, window=10),
    Prefill("softcap_window_sinks", _case(), 40, softcap=1.5, sinks=True, window=50),
    Prefill("bool", _case(), 20, mask="bool"),
    Prefill("bool_few_queries", _case(), 7, mask="bool"),
    Prefill("bool_not_causal", _case(), 20, mask="bool", is_causal=False),
    Prefill("bool_per_head", _case(), 20, mask="bool_per_head"),
    Prefill("bool_2d", _case(), 20, mask="bool_2d"),
    Prefill("left_padding", _case(), 20, mask="left_padding"),
    Prefill("left_padding_window", _case(), 20, mask="left_padding", window=60),
    Prefill("left_padding_beyond_history", _case(end=16), 40, mask="left_padding"),
    Prefill("sees_only_fresh", _case(), 20, mask="only_fresh"),
    Prefill("sees_only_history", _case(), 20, mask="only_history"),
    Prefill("sees_nothing", _case(), 20, mask="nothing"),
    Prefill("sees_nothing_but_sinks", _case(), 20, mask="nothing", sinks=True),
    Prefill("bias", _case(), 20, mask="bias"),
    Prefill("bias_softcap", _case(), 20, mask="bias", softcap=2.0),
    Prefill("minus_inf", _case(), 20, mask="minus_inf"),
    Prefill("finfo_min", _case(), 20, mask="finfo_min"),
    Prefill("mask_and_nulls_and_window", _case(nulls=((0, 0),)), 20, mask="bool", window=100),
)


def _mask(p: Prefill, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor | None:
    history, tokens = p.case.end - p.case.start, p.case.end - p.case.start + p.fresh
    shape = (p.case.batch, p.case.q_heads, p.fresh, tokens)
    keep = torch.rand(shape, generator=g) < 0.6
    keep[..., history:] |= torch.eye(p.fresh, dtype=torch.bool)
    padding = torch.arange(tokens) >= torch.arange(p.case.batch)[:, None, None, None] * 25
    bias = torch.randn(p.case.batch, 1, p.fresh, tokens, generator=g)
    match p.mask:
        case None:
            return None
        case "bool":
            return keep
        case "bool_per_head":
            return keep[:1, :, :1] | (torch.arange(tokens) == 0)
        case "bool_2d":
            return keep[0, 0]
        case "left_padding":
            return padding
        case "only_fresh":
            return torch.arange(tokens) >= history
        case "only_history":
            return torch.arange(tokens) < history
        case "nothing":
            keep[0, :, 3:5] = False
            return keep
        case "bias":
            return bias.to(dtype)
        case "minus_inf":
            return bias.masked_fill(~keep[:, :1], -torch.inf).to(dtype)
        case "finfo_min":
            fully_causal = torch.ones(p.fresh, tokens, dtype=torch.bool).tril(history)
            return torch.zeros(bias.shape, dtype=dtype).masked_fill(
                ~(padding & fully_causal), torch.finfo(dtype).min
            )
    raise AssertionError(f"no mask {p.mask}")


def _visible(p: Prefill, mask: torch.Tensor | None) -> torch.Tensor:
    history, tokens = p.case.end - p.case.start, p.case.end - p.case.start + p.fresh
    visible = torch.ones(p.case.batch, p.case.q_heads, p.fresh, tokens, dtype=torch.bool)
    positions = torch.arange(p.case.start, p.case.start + tokens)
    own = p.case.end + torch.arange(p.fresh)[:, None]
    if p.is_causal:
        visible &= positions <= own
    if p.window is not None:
        visible &= positions > own - p.window
    for row, column in p.case.nulls:
        first = column * p.case.block_size - p.case.start
        visible[row, ..., max(first, 0) : min(first + p.case.block_size, history)] = False
    if mask is not None:
        visible &= mask if mask.dtype == torch.bool else ~mask.isneginf()
    return visible


def _answer(p: Prefill, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """What `attend_with_history` says, the float64 answer, and the arguments it was given."""
    g = torch.Generator().manual_seed(1)
    problem = build(p.case, dtype)

    def normal(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(p.case.batch, p.fresh, heads, dim, generator=g).to(dtype).transpose(1, 2)

    query = normal(p.case.q_heads, p.case.head_dim)
    keys, values = (normal(p.case.kv_heads, pool.shape[3]) for pool in (problem.keys, problem.values))
    mask = _mask(p, dtype, g)
    sinks = torch.randn(p.case.q_heads, generator=g).to(dtype) if p.sinks else None
    visible = _visible(p, mask)
    bias = torch.zeros(1, dtype=torch.float64)
    if mask is not None and mask.dtype != torch.bool:
        bias = mask.double().masked_fill(mask.isneginf(), 0.0)
    all_keys, all_values = torch.cat([problem.keys, keys], 2), torch.cat([problem.values, values], 2)
    scale = p.case.head_dim**-0.5
    want, _ = dense_answer(query, all_keys, all_values, visible, bias, scale, p.softcap, sinks)
    # A new token that nobody sees is padding: its K and V may be anything.
    seen = visible.unflatten(1, (p.case.kv_heads, p.case.group)).any(2).any(2)[..., -p.fresh :, None]
    arguments = {
        "query": query,
        "fresh_keys": keys.masked_fill(~seen, torch.nan),
        "fresh_values": values.masked_fill(~seen, torch.nan),
        "history_start": p.case.start,
        "history_end": p.case.end,
        "scale": scale,
        "mask": mask,
        "is_causal": p.is_causal,
        "window": p.window,
        "softcap": p.softcap,
        "sinks": sinks,
    }
    return attend_with_history(problem.blocks, **arguments), want, arguments  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES], ids=str)
@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_is_a_dense_softmax_over_history_and_fresh_tokens(p: Prefill, dtype: torch.dtype) -> None:
    got, want, _ = _answer(p, dtype)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert rms_ratio(got, want) <= TOLERANCE[dtype]
    assert (got[want == 0] == 0).all()


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_in_chunks_of_one_block_is_the_same(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 1)
    got, want, _ = _answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_in_strips_of_seven_queries_is_the_same(p: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "STRIP_TOKENS", 7)
    got, want, _ = _answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("p", PREFILLS, ids=case_id)
def test_prefill_without_the_cpu_flash_operator_is_the_same(
    p: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "has_flash", lambda query, softcap: False)
    got, want, _ = _answer(p, torch.float32)
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("mask", [None, "bool"])
def test_prefill_without_history_attends_the_fresh_tokens_alone(mask: str | None) -> None:
    p = Prefill("fresh", _case(end=1), 20, mask=mask)
    _, _, arguments = _answer(p, torch.float32)
    arguments["history_end"] = 0
    if mask is not None:
        arguments["mask"] = arguments["mask"][..., 1:]  # type: ignore[index]
    blocks = build(p.case).blocks
    blocks.table[:] = 10**6  # nothing may be read
    got = attend_with_history(blocks, **arguments)  # type: ignore[arg-type]
    visible = torch.ones(20, 20, dtype=torch.bool).tril().expand(2, 6, 20, 20)
    if mask is not None:
        visible = visible & arguments["mask"]  # type: ignore[operator]
    keys, values = (arguments[x].nan_to_num() for x in ("fresh_keys", "fresh_values"))  # type: ignore[attr-defined]
    want, _ = dense_answer(
        arguments["query"],
        keys,
        values,
        visible,
        torch.zeros(1).double(),
        arguments["scale"],  # type: ignore[arg-type]
    )
    assert rms_ratio(got, want) <= TOLERANCE[torch.float32]


def test_fresh_tokens_are_not_read_back_from_their_blocks() -> None:
    p = Prefill("stored", _case(end=100), 28)
    case = _case(end=128)  # the same blocks, in which the fresh tokens' slots hold something else
    _, _, arguments = _answer(p, torch.float32)
    stored = build(case)
    got = attend_with_history(stored.blocks, **arguments)  # type: ignore[arg-type]
    blocks = LayerBlocks(stored.blocks.keys.clone(), stored.blocks.values.clone(), stored.blocks.table)
    for row in range(2):
        blocks.keys[blocks.table[row, 1], :, 36:] = torch.nan
        blocks.values[blocks.table[row, 1], :, 36:] = torch.nan
    assert torch.equal(attend_with_history(blocks, **arguments), got)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_tokens", [1, 2048])
def test_query_masked_everywhere_by_finfo_min_averages_all_tokens_alike(
    chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", chunk_tokens)
    p = Prefill("padding", _case(), 20, mask="bias", is_causal=False)
    _, _, arguments = _answer(p, torch.float32)
    mask = torch.zeros(2, 1, 20, 150)
    mask[1, 0, 4] = torch.finfo(torch.float32).min
    arguments["mask"] = mask
    problem = build(p.case)
    got = attend_with_history(problem.blocks, **arguments)  # type: ignore[arg-type]
    values = torch.cat([problem.values, arguments["fresh_values"]], dim=2)  # type: ignore[list-item]
    assert rms_ratio(got[1, 4], values[1].mean(dim=1).repeat_interleave(3, dim=0)) < 2e-6


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_no_more_of_the_history_is_dense_at_one_time_than_a_chunk(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 128)
    spans: list[int] = []
    tokens = torch_blocks._tokens

    def recorded(blocks: LayerBlocks, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        spans.append(end - start)
        return tokens(blocks, start, end)

    monkeypatch.setattr(torch_blocks, "_tokens", recorded)
    _answer(Prefill("long", _case(end=500), 20, softcap=softcap), torch.float32)
    assert spans == [128, 128, 128, 116]
