"""The numbers that formats have to keep, and whether they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eval.core.table import Bound
from eval.quality.protocol import Comparison, Outcome

MAX_KL_NATS = {"auto": 1e-6, "int8": 4e-4, "fp8": 8e-3, "k8v4": 7e-3, "int4": 2.5e-2}
MAX_INT4_BITS = 4.6
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


def bounds(outcome: Outcome, comparison: Comparison, protocol: Protocol) -> Iterator[Bound]:
    """What is required of a scheme."""
    if protocol != REQUIRED or outcome.problem is not None:
        return
    name, kl = outcome.scheme.name, outcome.score.kl_nats
    max_kl = MAX_KL_OF_OFFSET_NATS if comparison.key_offset else MAX_KL_NATS
    if name in max_kl:
        yield Bound("KL", kl, max_kl[name], at_least=False, unit="")
    if comparison.key_offset:
        if name in MAX_PERPLEXITY_CHANGE_PERCENT:
            change = 100 * abs(outcome.score.perplexity / comparison.reference.perplexity - 1)
            limit = MAX_PERPLEXITY_CHANGE_PERCENT[name]
            yield Bound("perplexity change", change, limit, at_least=False, unit=" %")
    elif name == "int4":
        bits = outcome.storage and outcome.storage.stored_bits
        yield Bound("bits", bits or float("nan"), MAX_INT4_BITS, at_least=False, unit="")
        for other in comparison.outcomes:
            if other.scheme.name.startswith("stock ") and other.problem is None:
                yield Bound(f"below {other.scheme.name}", other.score.kl_nats / kl, MIN_BELOW_STOCK)
