"""The numbers that formats have to keep, and whether they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eval.core.table import Bound
from eval.quality.protocol import Comparison, Outcome

MAX_KL_NATS = {"auto": 1e-6, "int8": 4e-4, "fp8": 8e-3, "k8v4": 7e-3, "int4": 2.5e-2}
MAX_BITS = {"int4": 4.6}
MIN_BELOW_STOCK = 4.0
"""How many times the KL of a stock cache in 4 bits must be that of `int4`."""
MAX_PERPLEXITY_CHANGE_PERCENT = {"int8": 3.0, "k8v4": 3.0, "int4": 5.0}
"""With the key offset."""
MAX_KL_OF_OFFSET_NATS = {"dynamic": 1e-3, "auto": 1e-3}
"""A softmax does not see the offset; more than rounding would mean that the experiment is wrong."""


@dataclass(frozen=True)
class Protocol:
    """What was run. The required numbers belong to `REQUIRED`; of another one nothing is required."""

    model: str
    rows: int
    tokens: int
    chunk: int


REQUIRED = Protocol("smollm2", rows=2, tokens=1024, chunk=16)


def bounds(comparison: Comparison, protocol: Protocol) -> dict[str, tuple[Bound, ...]]:
    """Scheme -> what is required of it."""
    if protocol != REQUIRED:
        return {}
    judge = _with_offset if comparison.key_offset else _as_it_is
    return {
        outcome.scheme.name: tuple(judge(outcome, comparison))
        for outcome in comparison.outcomes
        if outcome.problem is None
    }


def _as_it_is(outcome: Outcome, comparison: Comparison) -> Iterator[Bound]:
    name, kl = outcome.scheme.name, outcome.score.kl_nats
    if name in MAX_KL_NATS:
        yield Bound("KL", kl, MAX_KL_NATS[name], at_least=False, unit="")
    if name in MAX_BITS and outcome.storage is not None:
        yield Bound(
            "bits", outcome.storage.stored_bits or float("nan"), MAX_BITS[name], at_least=False, unit=""
        )
    if name == "int4":
        for other in comparison.outcomes:
            if other.scheme.name.startswith("stock ") and other.problem is None:
                yield Bound(f"below {other.scheme.name}", other.score.kl_nats / kl, MIN_BELOW_STOCK)


def _with_offset(outcome: Outcome, comparison: Comparison) -> Iterator[Bound]:
    name = outcome.scheme.name
    if name in MAX_KL_OF_OFFSET_NATS:
        yield Bound("KL", outcome.score.kl_nats, MAX_KL_OF_OFFSET_NATS[name], at_least=False, unit="")
    if name in MAX_PERPLEXITY_CHANGE_PERCENT:
        change = 100 * abs(outcome.score.perplexity / comparison.reference.perplexity - 1)
        limit = MAX_PERPLEXITY_CHANGE_PERCENT[name]
        yield Bound("perplexity change", change, limit, at_least=False, unit=" %")
