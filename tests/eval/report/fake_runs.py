"""A whole run that nobody measured: 14 caches in 6 tasks, with numbers as a small model gives them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from eval.core.statistics import Spread
from eval.run.rows import AtContext, HeatCell, Metric, Prediction, Row, Run

MIB = 2**20
BITS = {
    "dynamic": 32.0,
    "static": 35.2,
    "quanto-int4": 5.0,
    "quanto-int8": 9.0,
    "hqq-int4": 4.8,
    "fp8": 8.0,
    "offloaded": 32.0,
    "paged": 32.6,
    "paged-int8": 8.31,
    "paged-fp8": 8.3,
    "paged-k8v4": 6.4,
    "paged-int4": 4.9,
    "paged-int8_block": 8.4,
    "paged-int4_group": 5.1,
}
"""Name of a cache -> its bits per value."""
EXACT = ("dynamic", "static", "offloaded", "paged")
LOSS = {"quanto-int4": 6.0, "hqq-int4": 3.0, "paged-int4_group": 4.0, "paged-int4": 0.7, "paged-k8v4": 0.2}
KL = {
    "quanto-int4": 0.21,
    "hqq-int4": 0.09,
    "paged-int4_group": 0.14,
    "paged-int4": 0.02,
    "paged-k8v4": 0.005,
}
SLOWER = {
    "static": 1.05,
    "quanto-int4": 3.1,
    "quanto-int8": 2.9,
    "hqq-int4": 4.2,
    "offloaded": 1.9,
    "fp8": 2.2,
}
LENGTHS, DEPTHS, CONTEXTS = (512, 1024, 1536, 2048), (0, 25, 50, 75, 100), (256, 512, 1024, 2048, 4096, 8192)
MISSING, FAILED = "hqq-int4", "quanto-int8"
ATTACK = '<script>alert("x")</script><img src=http://evil.example/x.png> | ![y](http://evil.example/y.png)'


def full_run(seed: int = 0) -> Run:
    """Return a run of every task and cache; one cache is missing on this machine, one failed in one task."""
    chance = random.Random(seed)
    tasks = ("summarization", "translation", "retrieval", "perplexity", "fidelity", "latency")
    rows = [_row(task, cache, chance) for task in tasks for cache in BITS]
    return Run(
        settings={
            "model": "smollm2",
            "tasks": list(tasks),
            "caches": list(BITS),
            "dtype": "float32",
            "seed": 0,
        },
        source="SmolLM2-135M-Instruct.Q8_0.gguf",
        environment={
            "machine": "Linux x86_64",
            "cpu": "AMD EPYC 9V74 80-Core Processor",
            "cpu_count": 2,
            "device": "cpu",
            "versions": {"torch": "2.13.0", "triton": None},
        },
        memory_method="resident memory, sampled every 2 ms",
        seconds=3127.4,
        processes=1,
        rows=rows,
        predictions=_predictions(tasks[:3]),
        titles={cache: f"what {cache} is" for cache in BITS},
    )


def few_rows(tasks: Sequence[str] = ("summarization",), caches: Sequence[str] = ("dynamic", "paged")) -> Run:
    """Return the part of `full_run` with these tasks and caches."""
    run = full_run()
    return dataclasses.replace(
        run, rows=[row for row in run.rows if row.task in tasks and row.cache in caches]
    )


def _row(task: str, cache: str, chance: random.Random) -> Row:
    if cache == MISSING:
        return Row(task, cache, problem="hqq is not installed: pip install hqq")
    if cache == FAILED and task == "translation":
        return Row(task, cache, problem="RuntimeError: shape '[8, 3]' is invalid", failed=True)
    if task == "latency":
        contexts = tuple(_at(cache, tokens, chance) for tokens in CONTEXTS)
        return Row(task, cache, bits_per_value=BITS[cache], contexts=contexts)
    metrics = _metrics(task, cache, chance)
    generates = task in ("summarization", "translation", "retrieval")
    memory = 5 * MIB * BITS[cache] / 32
    return Row(
        task,
        cache,
        samples=24,
        metrics=metrics,
        agreement=dataclasses.replace(metrics[0], value=97.2) if generates else None,
        identical_percent=_identical(cache, chance) if generates else None,
        first_divergence_tokens=7.5 if generates and cache not in EXACT else None,
        kv_bytes=int(memory * 37.3),
        kv_allocated_bytes=int(memory * 40),
        bits_per_value=BITS[cache],
        kv_details={"blocks": 12, "bytes": {"keys": 1}},
        peak_bytes=900 * MIB,
        rise_bytes=int(memory * chance.uniform(40, 60)),
        prefill_ms=_spread(1234.5, chance) if generates else None,
        decode_ms=_spread(78.9 * _slower(cache), chance) if generates else None,
        tokens_per_s=8000 / (78.9 * _slower(cache)) if generates else None,
        heat=_heat(cache, chance) if task == "retrieval" else (),
    )


def _slower(cache: str) -> float:
    return SLOWER.get(cache, 0.6 + BITS[cache] / 100)


def _identical(cache: str, chance: random.Random) -> float:
    return 100.0 if cache in EXACT else 100.0 - 20 * LOSS.get(cache, 0.05) * chance.uniform(0.5, 0.8)


def _spread(middle: float, chance: random.Random) -> Spread:
    median = middle * chance.uniform(0.97, 1.03)
    return Spread(median, median * 0.96, median * 1.09, 40)


def _at(cache: str, tokens: int, chance: random.Random) -> AtContext:
    decode = _spread(20 + tokens * 0.01 * _slower(cache), chance)
    kv = int(tokens * 23040 * BITS[cache] / 32 * 2)
    return AtContext(
        tokens, _spread(tokens * 0.9, chance), decode, 1000 / decode.median, kv, kv + MIB, kv * 3 // 2
    )


def _heat(cache: str, chance: random.Random) -> tuple[HeatCell, ...]:
    return tuple(
        HeatCell(
            length, depth, max(0.0, 100.0 - length / 50 - 9 * LOSS.get(cache, 0.0) - chance.randrange(20)), 8
        )
        for length in LENGTHS
        for depth in DEPTHS
    )


def _metrics(task: str, cache: str, chance: random.Random) -> tuple[Metric, ...]:
    loss = LOSS.get(cache, 0.05)
    kinds = {
        "summarization": [
            ("rouge_l", "ROUGE-L", 19.98),
            ("rouge_1", "ROUGE-1", 23.1),
            ("rouge_2", "ROUGE-2", 5.66),
        ],
        "translation": [("bleu", "BLEU", 12.4), ("chrf", "chrF", 38.8)],
        "retrieval": [("exact", "exact match", 71.3)],
    }
    if task in kinds:
        return tuple(_percent(key, label, value, loss, cache, chance) for key, label, value in kinds[task])
    kl = 0.0 if cache in EXACT else KL.get(cache, 3e-4) * chance.uniform(0.7, 1.3)
    if task == "perplexity":
        return (
            _lower("perplexity", "perplexity", "", 14.83, 14.83 * kl, 1.4, cache),
            _lower("ratio", "perplexity ratio", "", 1.0, kl, 0.0, cache),
        )
    return (
        _lower("kl", "KL", "nats", 0.0, kl, 0.0, cache),
        _percent("top_1", "top-1", 100.0, 40 * kl, cache, chance),
        _lower("first_divergence", "first divergence", "tokens", 128.0, -100 * kl, 20, cache, higher=True),
    )


def _percent(key: str, label: str, value: float, loss: float, cache: str, chance: random.Random) -> Metric:
    if cache in EXACT:
        return Metric(key, label, "%", value, value - 3.1, value + 3.3, True, 0.0, 0.0, 0.0)
    change = -loss * chance.uniform(0.8, 1.2) + chance.uniform(-0.2, 0.2)
    now = value + change
    return Metric(key, label, "%", now, now - 3.1, now + 3.3, True, change, change - 0.6, change + 0.5)


def _lower(
    key: str,
    label: str,
    unit: str,
    value: float,
    change: float,
    half: float,
    cache: str,
    higher: bool = False,
) -> Metric:
    now, margin = value + change, abs(change) / 5
    difference = (change, change - margin, change + margin)
    return Metric(key, label, unit, now, now - half - margin, now + half + margin, higher, *difference)


def _predictions(tasks: Sequence[str]) -> list[Prediction]:
    return [
        Prediction(
            task,
            cache,
            sample,
            ATTACK if cache == "paged-int4_group" else f"an answer\nto {task}",
            "ref",
            True,
        )
        for task in tasks
        for cache in BITS
        if cache != MISSING
        for sample in ("first", "second")
    ]
