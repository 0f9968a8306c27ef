"""The benches of quantized formats, on tiny shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import QuantizedCache, QuantizedLayer

from eval.bench import context
from eval.bench.context import Context
from eval.bench.layers import formats_step, layer_stacks
from eval.bench.layers.layer_stacks import Case, LayerStack, Shape
from eval.bench.models import decode_step, kv_bytes, memory, sealing, workload
from eval.bench.readers import Reader
from eval.caches import CacheUnavailable
from eval.core.hardware import CPU, Device
from eval.core.table import Row, WrongAnswer
from eval.core.timing import STEPS, Timings
from hf_paged_cache import PagedCache
from hf_paged_cache.store.pool_tensors import LayerPool
from tests.eval.bench.test_bench import tiny_llama

TINY = Shape("tiny", 4, 2, 16)
READER = Reader("reader", 1000, lambda: sum(range(100)))


class HalfLayer(QuantizedLayer):  # type: ignore[misc, no-untyped-call]
    """The stock layer over the simplest backend."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        return tensor.half()

    def _dequantize(self, qtensor: Any) -> Any:
        return qtensor.float()


def half_cache(layers: int) -> Any:
    cache = QuantizedCache.__new__(QuantizedCache)
    super(QuantizedCache, cache).__init__(layers=[HalfLayer() for _ in range(layers)])
    return cache


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Context:
    monkeypatch.setattr(Device, "cache_bytes", lambda self: 16 << 10)
    monkeypatch.setattr(formats_step, "quantized_cache", lambda config, backend: half_cache(2))
    monkeypatch.setattr(Context, "bandwidth", (READER, []))
    monkeypatch.setattr(Context, "budget_s", lambda self, seconds: 0.0)
    return Context(quick=True)


def one_step_each(contenders: Any, **kwargs: Any) -> Timings:
    """Seconds that make numbers to compare with: 8 of the first contender, 1 of every other."""
    for contender in contenders:
        contender.prepare()
        contender.step()
        contender.restore(1)
    names = [contender.name for contender in contenders]
    return Timings({name: [8.0 if name == names[0] else 1.0] * 2 for name in names})


def cells(rows: list[Row]) -> dict[str, dict[str, Any]]:
    return {str(row.cells["format"]): dict(row.cells) for row in rows}


# --- attention of formats -----------------------------------------------------------------------------------


def test_every_format_is_checked_and_timed_beside_the_stock_caches(
    quick: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "interleave", one_step_each)
    missing: set[str] = set()
    found = cells(formats_step.measure(quick, TINY, 256, missing))
    assert list(found) == list(formats_step.FORMATS)
    assert not missing
    layers = Case(TINY, 1, torch.float32, 256 - STEPS + 1, formats_step.LEAST_BITS).layers
    for row in found.values():
        assert 0.0 <= row["error"] <= formats_step.TOLERANCE
        assert row["over_dynamic"] == 8.0
        # All spend a second on a step, the stock cache on two layers only.
        assert row["over_stock"] == layers / formats_step.STOCK_LAYERS
    assert found["auto"]["kv_bytes"] == 2 * 2 * 256 * 16 * 4
    assert found["int8"]["kv_bytes"] == 2 * 256 * (2 * 16 + 2 * 2)
    sealed, dense = 2 * 2 * (2 * 64 * 8 + 16 * 4 + 64 * 4), 2 * 2 * 64 * 2 * 16 * 4
    assert found["int4"]["kv_bytes"] == sealed + dense
    assert found["int4"]["gb_per_s"] == pytest.approx((sealed + dense) * layers / 1e9)


def test_without_the_backend_of_the_stock_cache_its_column_is_empty(
    quick: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(config: Any, backend: str) -> Any:
        raise CacheUnavailable("no such package")

    monkeypatch.setattr(formats_step, "quantized_cache", absent)
    monkeypatch.setattr(context, "interleave", one_step_each)
    missing: set[str] = set()
    rows = formats_step.measure(quick, TINY, 128, missing)
    assert missing == {"no such package"}
    assert all(row.cells["over_stock"] is None for row in rows)


def test_a_wrong_attention_over_records_is_refused(quick: Context) -> None:
    case = Case(TINY, 1, torch.float32, 126)
    stack = layer_stacks.paged(case, "int8")
    layer_stacks.fill([stack])
    right = stack.attention
    stack.attention = lambda *args, **kwargs: (1.01 * right(*args, **kwargs)[0], None)
    with torch.no_grad(), pytest.raises(WrongAnswer, match=r"int8 cache, .*: RMS error ratio 1\.0e-02"):
        layer_stacks.errors_of([stack], formats_step.TOLERANCE)


def test_no_step_of_a_turn_opens_a_block(quick: Context) -> None:
    """Otherwise every turn would seal a block, and decode it again when its tokens are taken back."""
    case = Case(TINY, 1, torch.float32, 256 - STEPS + 1)
    stack = layer_stacks.paged(case, "int4")
    with torch.no_grad():
        layer_stacks.fill([stack])
        before = stack.cache.stats().used_blocks
        for _ in range(STEPS):
            stack.step()
        assert stack.cache.get_seq_length() == 256
        assert stack.cache.stats().used_blocks == before == 4
        stack.restore(STEPS)
    assert stack.cache.get_seq_length() == 256 - STEPS


def test_smaller_contenders_go_round_more_layers() -> None:
    shape = Shape("SmolLM2-135M", 9, 3, 64)
    case = Case(shape, 1, torch.float32, 2048, 4.5)
    assert case.kv_bytes * 4.5 / 32 * case.layers >= 4 * CPU.cache_bytes()
    assert case.layers > Case(shape, 1, torch.float32, 2048).layers


def test_tokens_that_a_stock_cache_has_not_quantized_are_taken_back() -> None:
    cache = half_cache(1)
    states = torch.randn(1, 2, 10, 16)
    cache.update(states, states, 0)
    for _ in range(2):
        cache.update(states[:, :, :1], states[:, :, :1], 0)
    workload.remove_last(cache, 1)
    assert (cache.get_seq_length(), cache.layers[0].keys.shape[-2]) == (11, 1)
    workload.remove_last(cache, 1)
    assert (cache.get_seq_length(), cache.layers[0].keys.numel()) == (10, 0)
    keys, _ = cache.update(states[:, :, :1], states[:, :, :1], 0)
    assert torch.equal(keys, torch.cat([states.half().float(), states[:, :, :1]], dim=-2))


@pytest.mark.parametrize(
    ("shape", "format_name", "tokens", "limit"),
    [
        ("Llama-3-8B", "int8", 8192, 9.0),
        ("Llama-3-8B", "int4", 8192, 10.0),
        ("SmolLM2-135M", "int4", 8192, 6.0),
        ("SmolLM2-135M", "int4", 2048, None),
        ("Llama-3-8B", "fp8", 8192, None),
    ],
)
def test_speed_is_required_at_8192_tokens(
    shape: str, format_name: str, tokens: int, limit: float | None
) -> None:
    assert formats_step.MIN_SPEEDUP.get((shape, format_name, tokens)) == limit


# --- whole models -------------------------------------------------------------------------------------------


def test_a_decode_step_has_a_row_for_each_format(quick: Context) -> None:
    model = tiny_llama()
    with torch.inference_mode():
        found = cells(decode_step.measure(quick, model, torch.float32, 192))
    assert list(found) == ["auto", "int8", "int4"]
    held = {name: row["read_mb"] * 1e6 for name, row in found.items()}
    weights = sum(part.nbytes for part in model.parameters())
    assert held["auto"] == pytest.approx(weights + 2 * 2 * 192 * 16 * 4)
    assert weights < held["int4"] < held["auto"]
    assert all(0.0 <= row["error"] <= decode_step.FORMAT_TOLERANCE for row in found.values())
    with torch.inference_mode():
        found = cells(decode_step.measure(quick, tiny_llama().bfloat16(), torch.bfloat16, 128))
    assert list(found) == ["auto"]


def test_other_logits_than_those_of_its_own_keys_and_values_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_llama()
    cache = workload.new_cache("int8", model)
    monkeypatch.setattr(decode_step, "FORMAT_TOLERANCE", 0.0)
    with torch.inference_mode():
        workload.fill([cache], model, 100)
        with pytest.raises(WrongAnswer, match="logits with a cache in int8"):
            decode_step._format_error(model, "int8", cache, torch.tensor([[5]]))


@pytest.mark.parametrize("name", sealing.FORMATS)
def test_sealing_is_checked_and_its_share_is_of_one_token(
    quick: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(context, "interleave", one_step_each)  # a step takes 8 seconds, sealing one
    model = tiny_llama()
    monkeypatch.setattr(workload, "new_cache", cache_of_small_heads)
    with torch.inference_mode():
        row = sealing.measure(quick, model, name, 192)
    assert row.cells["share_percent"] == pytest.approx(100 / 8 / 64)
    assert row.cells["per_token_us"] == pytest.approx(1e6 / 64)
    assert float(row.cells["error"] or 0.0) <= sealing.TOLERANCE
    assert [bound.holds for bound in row.bounds] == ([True] if name == "int4" else [])


def cache_of_small_heads(name: str, model: Any) -> Any:
    """Heads of 8 channels hold no group of the default size."""
    return DynamicCache() if name == "dynamic" else PagedCache(model, kv_cache_dtype=name, group_size=8)


def test_a_block_sealed_wrongly_is_refused(quick: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(pool: LayerPool, slots: list[int], ids: list[int]) -> None:
        assert pool.records is not None
        pool.records[ids] = 0

    monkeypatch.setattr(LayerPool, "seal", seal)
    with torch.inference_mode(), pytest.raises(WrongAnswer, match="a block sealed in int4"):
        sealing.measure(quick, tiny_llama(), "int4", 128)


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "used_bytes"),
    [
        ("auto", 2 * 2 * 4 * 64 * 2 * 8 * 4),
        ("int8", 2 * 2 * 4 * 64 * (2 * 8 + 2 * 2)),
        ("int4", 2 * 2 * (2 * (2 * 64 * 4 + 8 * 4 + 64 * 4) + 2 * 64 * 2 * 8 * 4)),
    ],
)
def test_bytes_are_counted_with_scales_and_with_blocks_in_the_dtype_of_the_model(
    name: str, used_bytes: int
) -> None:
    row = kv_bytes.measure(tiny_llama().config, torch.float32, name, 256)
    assert row.cells["used_bytes"] == used_bytes
    assert row.cells["dynamic_bytes"] == 2 * 2 * 256 * 2 * 8 * 4
    assert row.cells["ratio"] == used_bytes / row.cells["dynamic_bytes"]
    assert [bound.limit for bound in row.bounds] == {"auto": [], "int8": [0.27], "int4": [0.16]}[name]


def test_the_memory_of_a_quantized_generate_is_measured_with_its_own_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workload, "load_model", lambda dtype: (tiny_llama(), "tiny"))
    measured = memory.peak_of("int8", memory.Case(105, 5, 32, ()))
    assert measured["kv_bytes"] == 2 * 2 * 2 * 64 * (2 * 8 + 2 * 2)  # 104 tokens are two blocks
    assert "formula_bytes" not in measured
    assert len(measured["tokens"]) == 5


def test_formats_must_stay_below_the_peak_of_the_dynamic_cache_and_may_generate_other_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {"dynamic": 100e6, "paged": 99e6, "int8": 50e6, "int4": 101e6}

    def taken(name: str, case: Any) -> dict[str, Any]:
        return {
            "peak_bytes": peaks[name],
            "rise_bytes": 0,
            "kv_bytes": 0,
            "tokens": [int(name in memory.FORMATS)],
            "method": "",
            **({"pool_bytes": 7, "formula_bytes": 7} if name == "paged" else {}),
        }

    monkeypatch.setattr(memory, "_in_own_process", taken)
    rows, _ = memory.BENCH.measure(Context(quick=True))
    assert [[bound.holds for bound in row.bounds] for row in rows] == [[], [True], [True], [False]]


def test_a_stack_has_as_many_layers_as_its_cache() -> None:
    case = Case(TINY, 1, torch.float32, 8)
    stack = LayerStack("stock", case, half_cache(2), lambda *args, **kwargs: (args[2],))
    layer_stacks.fill([stack])
    assert stack.layers == 2
