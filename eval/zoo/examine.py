"""Everything that is found out about one type."""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache

from eval.zoo import checks, exceptions, inputs, kinds, reads, runs, tiny
from eval.zoo.checks import CASES, Reference, Verdict
from eval.zoo.registry import Entry
from hf_paged_cache import PagedCache
from hf_paged_cache.config import KVCacheDtype

FORMATS: tuple[KVCacheDtype, ...] = ("int8", "fp8", "k8v4", "int4")
RUNS, REFUSED, FAILS = "runs", "refused", "fails"
_STEPS = 4


@dataclass(frozen=True)
class Options:
    """How types are looked at."""

    block_size: int = 16  # tokens of a block
    attention: str | None = None  # the models' implementation; None for the one that transformers chooses
    formats: tuple[str, ...] = FORMATS  # values of `kv_cache_dtype` to try, beside `auto`


@dataclass
class Report:
    """What was found out."""

    name: str  # of the entry
    model_type: str
    class_name: str  # of the model
    kinds: tuple[str, ...] = ()  # of its layers
    reads: str = reads.NONE  # how a decode step reads stored K and V
    formats: dict[str, str] = field(default_factory=dict)  # -> `runs`, or `refused` or `fails` and why
    verdicts: dict[str, Verdict] = field(default_factory=dict)  # case -> how it went
    # standard deviations by which logits move with another early and late id: what losing it would show
    reach: tuple[float, ...] = ()
    problem: str | None = None  # why nothing more is known: skipped, not built, crashed, too slow
    has_died: bool = False  # its process crashed or had to be stopped
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether its process died, a case is wrong, or a format fails where `auto` runs."""
        fails = any(outcome.startswith(FAILS) for outcome in self.formats.values())
        fails = fails and self.formats["auto"] == RUNS
        return self.has_died or fails or any(verdict.is_wrong for verdict in self.verdicts.values())

    @property
    def refusal(self) -> str | None:
        """Why PagedCache refuses the type altogether, or None."""
        plain = self.verdicts.get(CASES[0].name)
        return plain.reason if plain is not None and plain.status == checks.REFUSED else None


def examine(entry: Entry, options: Options) -> Report:
    """Build a tiny model of a type, and try everything."""
    started_s = time.perf_counter()
    problem = exceptions.SKIPPED.get(entry.model_type)
    report = Report(entry.name, entry.model_type, entry.class_name, problem=problem)
    if problem is None:
        try:
            model = tiny.build(entry, options.attention)
            report.kinds = kinds.of(model.config)
        except Exception as error:  # whatever transformers raises
            report.problem = f"not built: {checks.one_line(error)}"
        else:
            _try_all(model, entry, options, report)
    report.seconds = round(time.perf_counter() - started_s, 2)
    return report


def examine_alone(entry: Entry, options: Options) -> Report:
    """The same in a process that does nothing else: quietly and with one thread."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)  # tiny models gain nothing from more, and processes share the cores
    return examine(entry, options)


def _try_all(model: Any, entry: Entry, options: Options, report: Report) -> None:
    def paged(model: Any, kv_cache_dtype: KVCacheDtype = "auto") -> Any:
        cache = PagedCache(model, block_size=options.block_size, kv_cache_dtype=kv_cache_dtype)
        return EncoderDecoderCache(cache, DynamicCache()) if model.config.is_encoder_decoder else cache

    # A PagedCache changes the model's attention, so whatever it is compared with comes first.
    references = [Reference(model, entry, case) for case in CASES]
    report.reach = _reach(model, references[0])
    for reference in references:
        with reads.watch() as seen:
            report.verdicts[reference.case.name] = reference.judge(paged)
        if reference.case is CASES[0]:
            report.reads = seen()
    if report.refusal is None:
        report.formats = {
            name: _try_format(model, entry, options, lambda name=name: paged(model, name))
            for name in ("auto", *options.formats)
        }


def _try_format(model: Any, entry: Entry, options: Options, make_cache: Any) -> str:
    """Whether a prompt of more than two blocks and some steps run in a format: enough to have one encoded."""
    tokens = 2 * options.block_size + 8
    try:
        prompt = inputs.prompt(model, entry, (tokens, tokens), seed=3, decoder_tokens=tokens)
        run = runs.generate(model, prompt, _STEPS, cache=make_cache())
    except Exception as error:
        return f"{REFUSED if checks.is_refusal(error) else FAILS}: {checks.one_line(error)}"
    has_nan = any(torch.isnan(logits).any() for _, logits in run.steps)
    return f"{FAILS}: the logits are NaN" if has_nan else RUNS


def _reach(model: Any, plain: Reference) -> tuple[float, ...]:
    if plain.run is None or plain.prompt.arguments[plain.prompt.grows].shape[1] < 4:
        return ()
    found = []
    for position in (1, -4):
        ids = plain.prompt.arguments[plain.prompt.grows].clone()
        ids[:, position] = (ids[:, position] + 7) % 200 + 20
        other = runs.generate(model, plain.prompt.continued(ids), 1)
        logits, others = plain.run.steps[0][1], other.steps[0][1]
        finite = torch.isfinite(logits) & torch.isfinite(others)
        found.append(round(float((logits - others)[finite].abs().max() / logits[finite].std()), 6))
    return tuple(found)
