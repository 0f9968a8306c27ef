"""Comparisons as tables of results, with the numbers that formats have to keep."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from eval.core.table import Bound, Cell, Column, Result, Row, fixed, scientific
from eval.data import text
from eval.quality.protocol import OFFSET, Comparison, Outcome

MAX_KL_NATS = {"auto": 1e-6, "int8": 4e-4, "fp8": 8e-3, "k8v4": 7e-3, "int4": 2.5e-2}
MAX_INT4_BITS = 4.6
MIN_BELOW_STOCK = 4.0  # how many times the KL of a stock cache in 4 bits must be that of `int4`
MAX_PERPLEXITY_CHANGE_PERCENT = {"int8": 3.0, "k8v4": 3.0, "int4": 5.0}  # with the key offset
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


COLUMNS = (
    Column("scheme", "scheme"),
    Column("kl_nats", "KL nats", scientific),
    Column("top1_percent", "top-1 %", fixed(2)),
    Column("perplexity", "perplexity", fixed(3)),
    Column("perplexity_ratio", "x full", fixed(4)),
    Column("stored_bits", "bits", fixed(2)),
    Column("all_bits", "bits, all", fixed(2)),
    Column("note", "note"),
)

_NOTES = (
    "KL: mean over tokens of KL(full precision || scheme); full precision: DynamicCache. "
    "top-1: tokens with the same most likely successor. x full: perplexity over that of full precision.",
    "bits: bytes of sealed records (or of a stock cache's quantized part), scales included, per value in "
    "them. bits, all: of all that is held at the end, with what is kept in the model's dtype.",
)


def result(comparison: Comparison, protocol: Protocol, seconds: float) -> Result:
    """The table of one comparison."""
    about = f"{protocol.model}, {protocol.rows} rows of {protocol.tokens} tokens, chunks of {protocol.chunk}"
    name, title = ("offset", "the same with a key offset") if comparison.key_offset else ("quality", about)
    rows = [
        Row(_cells(outcome, comparison), tuple(bounds(outcome, comparison, protocol)))
        for outcome in comparison.outcomes
    ]
    return Result(name, title, COLUMNS, rows, (*_NOTES, *_more_notes(comparison)), seconds)


def _more_notes(comparison: Comparison) -> tuple[str, ...]:
    if comparison.key_offset:
        return (
            f"{OFFSET:g} is added to two channels of every key on its way into the cache: those of "
            "the pair that rotary embeddings turn slowest (the last of each half of the head). A softmax "
            "does not see it.",
        )
    schemes = [outcome.scheme for outcome in comparison.outcomes]
    stock = tuple(
        f"{scheme.name}: {scheme.title}, otherwise its defaults: groups of 64, and up to 128 of the newest "
        "tokens as they are; everything is quantized anew whenever those are full."
        for scheme in schemes
        if scheme.name.startswith("stock")
    )
    sizes = "block and group sizes are compared without the guard, so that all layers are alike"
    has_sizes = any(scheme.only_defaults for scheme in schemes)
    return (f"text: {text.ROWS_RULE}", *stock, *([sizes] if has_sizes else []))


def _cells(outcome: Outcome, comparison: Comparison) -> dict[str, Cell]:
    cells: dict[str, Cell] = {"scheme": outcome.scheme.name, "title": outcome.scheme.title}
    score, storage = outcome.score, outcome.storage
    if storage is None:
        return {**cells, "note": outcome.problem}
    return cells | {
        "kl_nats": score.kl_nats,
        "top1_percent": score.top1_percent,
        "perplexity": score.perplexity,
        "perplexity_ratio": score.perplexity / comparison.reference.perplexity,
        "stored_bits": storage.stored_bits,
        "all_bits": storage.all_bits,
        **vars(storage),
        "backend": outcome.backend,
        "note": _moves(outcome.moved) or None,
    }


def _moves(moved: dict[int, str]) -> str:
    """`layers 0-3, 7 as k8v4`."""
    parts = []
    for name in sorted(set(moved.values())):
        layers = sorted(layer for layer, other in moved.items() if other == name)
        in_a_row = groupby(enumerate(layers), lambda pair: pair[1] - pair[0])
        runs = [[layer for _, layer in run] for _, run in in_a_row]
        named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
        parts.append(f"layers {named} as {name}")
    return "; ".join(parts)
