"""`python -m eval zoo` sees caches that lose tokens, crashes and hangs, and who reads what."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from eval.core.errors import UsageError
from eval.zoo import (
    checks,
    exceptions,
    inputs,
    kinds,
    reads,
    registry,
    runs,
    sizes,
    support,
    tiny,
)
from eval.zoo.checks import CASES, Case, Reference, Verdict
from eval.zoo.cli import reports_of
from eval.zoo.examine import RUNS, Options, Report, examine
from eval.zoo.runs import Run
from hf_paged_cache import PagedCache
from hf_paged_cache.errors import PagedCacheError

LLAMA = registry.Entry("llama", "llama", "LlamaForCausalLM")
PAGED_LLAMA = Report("llama", "llama", "LlamaForCausalLM", ("full",), reads.BLOCKS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- verdicts -----------------------------------------------------------------------------------------------


class Forgetful(DynamicCache):
    """Loses its third token as soon as another comes."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if key_states.shape[2] == 1:
            values[:, :, 2] = 0.0
        return keys, values


class Unordered(DynamicCache):
    """Does not follow the beams."""

    def reorder_cache(self, beam_idx: Any) -> None:
        pass


class LosesBetweenTurns(DynamicCache):
    """Loses its last token when a chunk follows."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        known = self.get_seq_length(layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if known and key_states.shape[2] > 1:
            values[:, :, known - 1] = 0.0
        return keys, values


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    model = tiny.build(LLAMA)
    return {case.name: Reference(model, LLAMA, case) for case in CASES}


@pytest.mark.parametrize(
    ("cache", "seen_in"),
    [
        (DynamicCache, set()),
        (Forgetful, {"plain", "padded", "second turn", "beams"}),
        (Unordered, {"beams"}),
        (LosesBetweenTurns, {"second turn"}),
    ],
)
def test_a_cache_that_loses_something_is_not_equal(
    references: dict[str, Reference], cache: type[DynamicCache], seen_in: set[str]
) -> None:
    for name, reference in references.items():
        verdict = reference.judge(lambda model: cache(config=model.config))
        expected = (checks.DIFFERENT, checks.EQUAL) if name in seen_in else (checks.EQUAL, None)
        assert (verdict.status, verdict.default) == expected, name
        assert verdict.is_wrong == (name in seen_in)


def _raising(error: Exception) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        raise error

    return make


@pytest.mark.parametrize(
    ("error", "status", "reason", "is_wrong"),
    [
        (PagedCacheError("not this one"), checks.REFUSED, "not this one", False),
        (ValueError("oops"), checks.FAILED, "ValueError: oops", True),
    ],
)
def test_only_errors_of_the_cache_itself_are_refusals(
    references: dict[str, Reference], error: Exception, status: str, reason: str, is_wrong: bool
) -> None:
    verdict = references["plain"].judge(_raising(error))
    assert (verdict.status, verdict.reason, verdict.default) == (status, reason, checks.EQUAL)
    assert verdict.is_wrong is is_wrong


def test_a_model_that_takes_a_cache_and_writes_nothing_to_it_is_not_equal() -> None:
    entry = registry.Entry("rwkv", "rwkv", "RwkvForCausalLM")
    reference = Reference(tiny.build(entry), entry, Case("plain"))
    assert reference.judge(checks.default_cache).status == checks.IGNORED


def test_a_case_that_transformers_cannot_run_has_no_reference() -> None:
    entry = registry.entries()["musicgen"]
    verdict = Reference(tiny.build(entry), entry, Case("padded", (5, 3))).judge(checks.default_cache)
    assert verdict.status == checks.NO_REFERENCE
    assert "takes prompts of one id" in str(verdict.reason)
    assert not verdict.is_wrong


# --- comparison ---------------------------------------------------------------------------------------------


def run_of(*steps: tuple[list[list[int]], list[list[float]]]) -> Run:
    return Run(torch.tensor([[0]]), 1, [(torch.tensor(ids), torch.tensor(logits)) for ids, logits in steps])


REFERENCE = run_of(([[7]], [[0.0, 1.0, 1.0]]), ([[7, 1]], [[3.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("other", "is_none", "compared"),
    [
        (REFERENCE, True, 2),
        (run_of(([[7]], [[0.0, 1.0, 1.0001]]), ([[7, 2]], [[9.0, 9.0, 9.0]])), True, 1),
        (run_of(([[7]], [[0.0, 1.0, 1.1]]), ([[7, 2]], [[9.0, 9.0, 9.0]])), False, 1),
        (run_of(([[7]], [[0.0, 1.0, 1.0]]), ([[7, 1]], [[3.0, 0.0, 0.1]])), False, 2),
        (run_of(([[7]], [[0.0, 1.0, float("nan")]]), ([[7, 1]], [[3.0, 0.0, 0.0]])), False, 2),
    ],
)
def test_tokens_may_part_where_two_logits_tie_and_nowhere_else(
    other: Run, is_none: bool, compared: int
) -> None:
    found = runs.difference(REFERENCE, other)
    assert (found.is_none, found.compared) == (is_none, compared)


def test_beams_are_matched_by_what_they_say_and_not_by_their_place() -> None:
    logits = [[1.0, 2.0], [3.0, 4.0]]
    reference = run_of(([[0, 5], [0, 6]], logits))
    swapped = run_of(([[0, 6], [0, 5]], logits[::-1]))
    assert runs.difference(reference, swapped, beams=2).logits == 0.0
    assert runs.difference(reference, swapped, beams=1).compared == 0
    assert not runs.difference(reference, swapped, beams=1).is_none


# --- reads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attention", "how"),
    [
        ("llama", None, reads.BLOCKS),
        ("gemma2", "eager", reads.BLOCKS),
        ("bloom", None, reads.DENSE),
        ("gpt_neo", "eager", reads.DENSE),
    ],
)
def test_who_reads_the_stored_tokens_is_seen_at_the_last_step(
    name: str, attention: str | None, how: str
) -> None:
    entry = registry.entries()[name]
    model = tiny.build(entry, attention)
    with reads.watch() as seen:
        prompt = inputs.prompt(model, entry, (9, 9), seed=0)
        runs.generate(model, prompt, 3, cache=PagedCache(model, block_size=16))
    assert seen() == how


def test_layers_that_differ_are_both_named_and_the_last_read_of_each_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("decode", "gather"):
        monkeypatch.setattr(reads.dispatch, name, lambda blocks: None)
    first, second = object(), object()
    with reads.watch() as seen:
        assert seen() == reads.NONE
        reads.dispatch.gather(first)
        reads.dispatch.decode(first)
        assert seen() == reads.BLOCKS
        reads.dispatch.gather(second)
        assert seen() == reads.MIXED


# --- configs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3", "jamba", "whisper", "falcon"])
def test_a_tiny_model_is_tiny_and_the_same_at_every_call(name: str) -> None:
    entry = registry.entries()[name]
    first, second = tiny.build(entry), tiny.build(entry)
    assert sum(weight.numel() for weight in first.parameters()) < 1_000_000
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_layers_are_cut_such_that_every_sort_stays() -> None:
    config = tiny.config("gemma3_text")
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (config.num_hidden_layers, config.vocab_size) == (sizes.LAYERS, sizes.VOCAB)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", ("full",)),
        ("mistral", ("sliding",)),
        ("llama4_text", ("full", "chunked")),
        ("deepseek_v3", ("full", "latent")),
        ("jamba", ("full", "linear")),
        ("lfm2", ("full", "conv")),
        ("falcon_h1", ("hybrid",)),
        ("gemma3n_text", ("full", "sliding", "shared")),
        ("bart", ("full",)),
        ("bart/seq2seq", ("full", "cross")),
        ("deepseek_v4", ("sliding", "own")),
    ],
)
def test_kinds_are_read_from_the_config(name: str, expected: tuple[str, ...]) -> None:
    assert kinds.of_entry(registry.entries()[name]) == expected


def test_every_exception_belongs_to_something_that_exists() -> None:
    known = registry.entries()
    types = {entry.model_type for entry in known.values()}
    assert set(exceptions.SKIPPED) <= types
    assert set(exceptions.CONFIG_CLASSES) <= types
    for entry in known.values():
        if entry.model_type in exceptions.SKIPPED:
            continue
        assert tiny.config(entry.model_type).model_type


def test_types_are_chosen_by_name_once_each() -> None:
    assert [entry.name for entry in registry.chosen(" bart/seq2seq, llama,llama")] == [
        "bart/seq2seq",
        "llama",
    ]
    assert len(registry.chosen(None)) > 200
    with pytest.raises(UsageError, match=r"no generative type 'lama'; did you mean: .*llama"):
        registry.chosen("lama")


# --- groups -------------------------------------------------------------------------------------------------


def report_of(verdict: Verdict, **fields: Any) -> Report:
    return Report(**{**vars(PAGED_LLAMA), "verdicts": {"plain": verdict}, **fields})


EQUAL = Verdict(checks.EQUAL)


@pytest.mark.parametrize(
    ("report", "group", "words"),
    [
        (report_of(EQUAL), reads.BLOCKS, "equal"),
        (report_of(EQUAL, reads=reads.NONE), reads.NONE, "equal"),
        (
            report_of(Verdict(checks.DIFFERENT, 0.5, default=checks.EQUAL)),
            support.WRONG,
            "plain not equal, default cache equal",
        ),
        (
            report_of(Verdict(checks.IGNORED, reason="why", default=checks.IGNORED)),
            support.UNKNOWN,
            "plain ignored with the default cache too (why)",
        ),
        (report_of(Verdict(checks.REFUSED, reason="why", default=checks.EQUAL)), support.REFUSED, "why"),
        (report_of(EQUAL, formats={"auto": RUNS, "int4": "fails: oops"}), support.WRONG, "equal"),
        (report_of(EQUAL, formats={"auto": "fails: oops", "int4": "fails: oops"}), reads.BLOCKS, "equal"),
        (report_of(EQUAL, formats={"auto": RUNS, "int4": "refused: no"}), reads.BLOCKS, "equal"),
        (Report("a", "a", "A", problem="skipped"), support.UNKNOWN, "skipped"),
        (Report("a", "a", "A", problem="died", has_died=True), support.WRONG, "died"),
    ],
)
def test_a_report_is_put_in_its_group_and_into_words(report: Report, group: str, words: str) -> None:
    assert support.group_of(report) == group
    assert report.is_wrong == (group == support.WRONG)
    assert support.checks_in_words(report) == words


def test_formats_are_named_where_not_all_of_them_run() -> None:
    formats = {"auto": RUNS, "int8": RUNS, "int4": "refused: head_dim 6"}
    assert (
        support.formats_in_words(report_of(EQUAL, formats=formats)) == "auto, int8; int4 refused: head_dim 6"
    )
    assert support.formats_in_words(report_of(EQUAL, formats={"auto": RUNS})) == "all"
    assert support.formats_in_words(report_of(EQUAL)) == ""


def test_counts_add_up_and_are_sorted_by_group() -> None:
    reports = [
        report_of(EQUAL, name="z"),
        report_of(EQUAL, reads=reads.DENSE),
        report_of(EQUAL, name="b", model_type="b"),
    ]
    assert support.headline(reports) == "2 types, 3 model classes: 2 blocks, 1 dense"
    assert [report.name for report in support.grouped(reports)[reads.BLOCKS]] == ["b", "z"]


# --- one type, one process ----------------------------------------------------------------------------------


def test_a_skipped_type_says_why() -> None:
    name = "gemma4_unified_assistant"
    report = examine(registry.Entry(name, name, "Gemma4UnifiedAssistantForCausalLM"), Options())
    assert report.problem == exceptions.SKIPPED[name]
    assert not report.is_wrong


def test_a_model_that_cannot_be_built_is_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "build", lambda *_: 1 // 0)
    report = examine(LLAMA, Options())
    assert report.problem == "not built: ZeroDivisionError: integer division or modulo by zero"


def crash(entry: registry.Entry, options: Options) -> Report:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def hang(entry: registry.Entry, options: Options) -> Report:
    threading.Event().wait()
    raise AssertionError("not hanging any more")


def answer(entry: registry.Entry, options: Options) -> Report:
    return Report(entry.name, entry.model_type, entry.class_name, reads=str(options.block_size))


@pytest.mark.parametrize(
    ("behaviour", "limit_s", "problem"),
    [
        pytest.param(crash, 300.0, "its process died with exit code -9", marks=pytest.mark.full),
        (hang, 0.2, "no answer within 0.2 s"),
        pytest.param(answer, 300.0, None, marks=pytest.mark.full),
    ],
)
def test_a_crash_or_a_hang_is_a_row_that_says_so(
    behaviour: Callable[..., Report], limit_s: float, problem: str | None
) -> None:
    other = registry.Entry("gpt2", "gpt2", "GPT2LMHeadModel")
    found = list(reports_of([LLAMA, other], Options(32), jobs=2, limit_s=limit_s, examine=behaviour))
    assert sorted(report.name for report in found) == ["gpt2", "llama"]
    assert {report.problem for report in found} == {problem}
    assert {report.is_wrong for report in found} == {problem is not None}
    assert {report.reads for report in found} == {"32" if problem is None else reads.NONE}
