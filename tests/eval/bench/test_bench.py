from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from eval.bench import blocks, kernel_tests, readers, registry
from eval.bench.cli import app
from eval.bench.context import Bench, Context
from eval.bench.kernel_tests import Outcome
from eval.bench.layers import attention_step, layer_stacks
from eval.bench.layers.layer_stacks import Case, Shape
from eval.bench.models import memory, workload
from eval.bench.readers import Reader
from eval.core import table
from eval.core.hardware import CPU, TOY, Device
from eval.core.table import Bound, Column, Result, Row, WrongAnswer, fixed
from eval.core.timing import Contender, Timings, interleave

TINY = Shape("tiny", 4, 2, 16)


@pytest.fixture
def small_l3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "cache_bytes", lambda self: 32 << 10)


@pytest.fixture
def green(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """The kernel tests passed; they are not run."""
    outcome = Outcome("cpp", ["tests/kernels/test_cpp.py"], [], 7, 1, 2.0, "2026-01-01T00:00:00+00:00")
    monkeypatch.setattr(kernel_tests, "require_green", lambda *args, **kwargs: outcome)
    return outcome


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


# --- timing -------------------------------------------------------------------------------------------------


def test_the_order_of_contenders_rotates_from_round_to_round() -> None:
    log: list[str] = []
    contenders = [Contender(name, lambda name=name: log.append(name)) for name in "abc"]
    interleave(contenders, budget_s=1e9, min_rounds=3, max_rounds=3, steps=1)
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"  # the first three are the warm-up


def test_every_turn_is_prepared_and_taken_back_with_its_number_of_steps() -> None:
    log: list[str] = []
    contender = Contender(
        "a",
        lambda: log.append("step"),
        lambda steps: log.append(f"restore {steps}"),
        lambda: log.append("prepare"),
    )
    interleave([contender], budget_s=1e9, min_rounds=1, max_rounds=1, steps=2)
    assert log == ["prepare", "step", "restore 1", "prepare", "step", "step", "restore 2"]


def test_a_budget_that_is_used_up_ends_the_rounds_but_not_before_the_least_number() -> None:
    timings = interleave([Contender("a", lambda: None)], budget_s=-1.0, min_rounds=4, max_rounds=9)
    assert len(timings.seconds["a"]) == 4


def test_steps_fall_to_one_where_more_would_not_fit_the_budget() -> None:
    restored: list[int] = []
    interleave(
        [Contender("a", lambda: None, restored.append)], budget_s=0.0, min_rounds=2, max_rounds=2, steps=3
    )
    assert restored == [1, 1, 1]


def test_speedup_is_the_median_of_quotients_within_rounds_and_not_of_all_times() -> None:
    timings = Timings({"slow": [4.0, 40.0, 6.0], "fast": [2.0, 10.0, 2.0]})
    assert timings.speedup("fast", "slow") == 3.0
    assert timings.median_s("slow") / timings.median_s("fast") == 3.0
    drifting = Timings({"slow": [2.0, 20.0, 200.0], "fast": [1.0, 10.0, 50.0]})
    assert drifting.speedup("fast", "slow") == 2.0


# --- bounds and tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "holds"),
    [
        (3.5, 3.5, True, True),
        (3.49, 3.5, True, False),
        (1.0, 2.0, False, True),
        (2.1, 2.0, False, False),
        (math.nan, 0.0, True, False),
        (math.nan, 1.0, False, False),
    ],
)
def test_a_bound_is_kept_up_to_its_limit_and_never_by_nan(
    value: float, limit: float, at_least: bool, holds: bool
) -> None:
    bound = Bound("speed", value, limit, at_least)
    assert bound.holds is holds
    assert str(bound).startswith("✓" if holds else "✗")


def result_with(bound: Bound) -> Result:
    columns = (Column("dtype", "dtype"), Column("tokens", "tokens"), Column("ms", "ms", fixed(1)))
    return Result(
        "decode", "steps", columns, [Row({"dtype": "float32", "tokens": 128, "ms": 2.26}, (bound,))]
    )


def test_the_summary_names_the_case_of_a_number_that_is_missed() -> None:
    text = table.summary([result_with(Bound("Dynamic", 1.25, 1.6)), result_with(Bound("Dynamic", 2.0, 1.6))])
    assert text.splitlines() == [
        "1 of 2 required numbers hold",
        "✗ decode [float32, 128]: Dynamic is 1.25x, required ≥ 1.6x",
    ]


def test_a_table_shows_the_cells_and_the_marks() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    table.show(console, result_with(Bound("Dynamic", 1.25, 1.6)))
    text = console.export_text()
    assert "2.3" in text
    assert "✗ Dynamic ≥ 1.6x" in text


def test_json_holds_cells_and_whether_the_bounds_hold() -> None:
    document = json.loads(json.dumps(result_with(Bound("Dynamic", 1.25, 1.6)).to_dict()))
    assert document["rows"] == [
        {
            "dtype": "float32",
            "tokens": 128,
            "ms": 2.26,
            "required": [
                {"what": "Dynamic", "value": 1.25, "limit": 1.6, "at_least": True, "holds": False},
            ],
        }
    ]


# --- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_case_is_checked_and_measured_and_leaves_the_caches_as_long_as_they_were(
    small_l3: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: int
) -> None:
    case = Case(TINY, batch, dtype, 70)
    kept: list[layer_stacks.LayerStack] = []
    filled = layer_stacks.filled
    monkeypatch.setattr(layer_stacks, "filled", lambda case: kept.extend(filled(case)) or kept)
    monkeypatch.setattr(Context, "bandwidth", (Reader("reader", 1000, lambda: sum(range(100))), []))
    monkeypatch.setattr(Context, "budget_s", lambda self, seconds: 0.0)
    row = attention_step.measure(Context(quick=True), case)
    assert row.cells["rounds"] == 2
    assert row.cells["layers"] == case.layers
    assert 0.0 <= float(row.cells["error"] or 0.0) <= attention_step.TOLERANCE[dtype]
    assert [int(stack.cache.get_seq_length()) for stack in kept] == [69, 69, 69]
    assert [stack.name for stack in kept] == ["dynamic", "static", "paged"]


def test_a_wrong_attention_is_refused_before_anything_is_timed(
    small_l3: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(case: Case) -> list[layer_stacks.LayerStack]:
        stacks = filled(case)
        right = stacks[-1].attention
        stacks[-1].attention = lambda *args, **kwargs: (1.01 * right(*args, **kwargs)[0], None)
        return stacks

    def timed(*args: Any, **kwargs: Any) -> Timings:
        raise AssertionError("timed")

    filled = layer_stacks.filled
    monkeypatch.setattr(layer_stacks, "filled", broken)
    monkeypatch.setattr(Context, "race", timed)
    with pytest.raises(
        WrongAnswer, match=r"paged cache, tiny, batch 1, float32, 70 tokens: RMS error ratio 1\.0e-02"
    ):
        attention_step.measure(Context(), Case(TINY, 1, torch.float32, 70))


@pytest.mark.parametrize("kernel", ["write", "decode"])
def test_kernels_that_write_nothing_or_attend_wrongly_are_refused(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "torch")
    case = Case(TINY, 2, torch.bfloat16, 70, device=TOY)
    rows = attention_step.measure_kernels(case, copy_bytes=1 << 16, budget_s=0.0)
    assert [row.cells["kernel"] for row in rows] == ["blocks", "masked", "sdpa"]
    right = layer_stacks.dispatch.decode
    broken = {
        "write": lambda *args: None,
        "decode": lambda *args: (1.01 * right(*args)[0], None),
    }
    monkeypatch.setattr(layer_stacks.dispatch, kernel, broken[kernel])
    with pytest.raises(WrongAnswer, match=r"blocks, tiny, batch 2, bfloat16, 70 tokens: "):
        attention_step.measure_kernels(case, copy_bytes=1 << 16, budget_s=0.0)


def test_the_dynamic_cache_is_contiguous_again_after_tokens_are_taken_back(small_l3: None) -> None:
    dynamic = layer_stacks.filled(Case(TINY, 1, torch.float32, 8))[0]
    dynamic.step()
    dynamic.restore(1)
    assert all(layer.keys.is_contiguous() and layer.values.is_contiguous() for layer in dynamic.cache.layers)


def test_bytes_and_layers_of_a_case_cover_four_times_the_last_level_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case(Shape("SmolLM2-135M", 9, 3, 64), 1, torch.float32, 512)
    assert case.kv_bytes == 2 * 3 * 512 * 64 * 4
    assert case.kv_bytes * case.layers >= 4 * CPU.cache_bytes()
    large = Case(Shape("Llama-3-8B", 32, 8, 128), 8, torch.float32, 8192)
    for mebibytes, layers in ((32, 2), (384, 3)):
        monkeypatch.setattr(Device, "cache_bytes", lambda self, size=mebibytes: size << 20)
        assert large.layers == layers


def test_readers_read_the_whole_buffer(small_l3: None) -> None:
    for reader in readers.readers():
        assert reader.bytes_read == 16 * (32 << 10)
        reader.read()


def test_bandwidth_is_of_the_reader_in_the_same_rounds() -> None:
    timings = Timings({"ours": [2.0, 1.0, 4.0], "reader": [1.0, 1.0, 1.0]})
    cells = Reader("reader", 8_000_000_000, int).cells(timings, "ours", 4e9)
    assert cells == {"gb_per_s": 2.0, "read_gb_per_s": 8.0, "bandwidth_percent": 25.0}
    assert set(cells) == {column.key for column in readers.COLUMNS}


# --- blocks -------------------------------------------------------------------------------------------------


def test_bookkeeping_has_a_row_for_each_operation_with_ratios_to_the_smallest_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "POOL_SIZES", (16, 32))
    monkeypatch.setattr(blocks, "MIN_BLOCKS_PER_TIMING", 32)
    columns = [column.key for column in blocks._columns()]
    assert columns == ["operation", "us_at_16", "us_at_32", "ratio_at_32"]
    rows, _ = blocks.BENCH.measure(Context(quick=True))
    for row in rows:
        assert row.cells["ratio_at_32"] == float(row.cells["us_at_32"]) / float(row.cells["us_at_16"])
    assert len({row.cells["operation"] for row in rows}) == 5


# --- whole models -------------------------------------------------------------------------------------------


def test_filled_caches_give_the_same_logits_and_keep_their_length() -> None:
    model = tiny_llama()
    caches = {name: workload.new_cache(name, model) for name in ("dynamic", "paged")}
    with torch.inference_mode():
        workload.fill(list(caches.values()), model, 100)
        error = workload.compare_logits(model, caches, torch.tensor([[1, 2, 3]]), torch.float32)
    assert error < 1e-5
    assert [cache.get_seq_length() for cache in caches.values()] == [100, 100]


@pytest.mark.parametrize(
    ("got", "message"),
    [([1.1, 1.0], "RMS error ratio 7.1e-02, allowed 1e-04"), ([math.nan, 1.0], "NaN or infinity")],
)
def test_other_logits_are_refused(got: list[float], message: str) -> None:
    logits = {"paged": torch.tensor(got), "dynamic": torch.ones(2)}
    with pytest.raises(WrongAnswer, match=message):
        workload.check_logits(logits, "2 tokens", torch.float32)


def test_using_a_cache_name_switches_the_attention_of_the_model() -> None:
    model = tiny_llama()
    workload.use("paged", model)
    assert model.config._attn_implementation == "hf_paged_cache_sdpa"
    workload.use("dynamic", model)
    assert model.config._attn_implementation == "sdpa"


def test_the_memory_of_a_paged_generate_is_the_formula_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "load_model", lambda dtype: (tiny_llama(), "tiny"))
    measured = {name: memory.peak_of(name, memory.Case(105, 5, 32, ())) for name in ("dynamic", "paged")}
    paged = measured["paged"]
    # 256 positions are 4 blocks of 64 tokens; 2 layers of 2 kv heads of 8 float32.
    assert paged["pool_bytes"] == paged["formula_bytes"] == 2 * 2 * 2 * 8 * 4 * 256
    assert paged["kv_bytes"] == 2 * 2 * 2 * 8 * 4 * 104  # the last token is never fed
    assert paged["tokens"] == measured["dynamic"]["tokens"]
    assert len(paged["tokens"]) == 5


# --- the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--only", "speed"],
            "unknown bench 'speed'; choose from: attention, bandwidth, blocks, bytes, decode, formats, "
            "memory, prefill, sealing",
        ),
        (["--only", ","], "--only needs at least one name"),
        (["--only", "bandwidth", "--json", "/does/not/exist.json"], "cannot write the results to"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


def test_kernels_that_cannot_run_are_a_request_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PAGED_CACHE_BACKEND", "fortran")
    result = CliRunner().invoke(app, ["--only", "bandwidth"])
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: HF_PAGED_CACHE_BACKEND must be one of cpp, triton, torch, reference"
    )


def test_benches_run_in_the_order_of_the_registry() -> None:
    assert [bench.name for bench in registry.chosen("prefill, attention")] == ["attention", "prefill"]
    assert [bench.name for bench in registry.chosen(None)] == list(registry.BENCHES)


def test_a_run_prints_header_table_and_summary_and_writes_json(
    small_l3: None, green: Outcome, tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    result = CliRunner().invoke(app, ["--only", "bandwidth", "--quick", "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "kernels: " in result.output
    assert result.output.index("kernel tests (cpp): 7 passed") < result.output.index("GB/s")
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["environment"]["torch_threads"] == torch.get_num_threads()
    assert document["kernel_tests"] == dataclasses.asdict(green)
    (bench,) = document["results"]
    assert [row["best"] for row in bench["rows"]].count("best") == 1


def test_a_wrong_answer_is_exit_code_1_and_no_table(green: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(context: Any) -> Any:
        raise WrongAnswer("paged cache: RMS error ratio 1.0e+00")

    monkeypatch.setitem(registry.BENCHES, "attention", Bench("attention", "", (), wrong))
    result = CliRunner().invoke(app, ["--only", "attention"])
    assert result.exit_code == 1
    assert result.stderr == "wrong answer, so no speed is reported: paged cache: RMS error ratio 1.0e+00\n"
