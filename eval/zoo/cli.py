"""The command line of `python -m eval zoo`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eval.core import console
from eval.core.errors import UsageError, check_choice
from eval.core.isolation import Call, Workers

if TYPE_CHECKING:
    from eval.zoo.examine import Options, Report
    from eval.zoo.registry import Entry

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def zoo(
    types: Annotated[str | None, typer.Option(help="Comma-separated model types; default: all.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only types that have layers of this kind.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    attn: Annotated[
        str | None, typer.Option(help="sdpa or eager; default: what transformers chooses.")
    ] = None,
    formats: Annotated[
        str, typer.Option(help="Comma-separated values of kv_cache_dtype to try beside auto.")
    ] = "int8,fp8,k8v4,int4",
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 1,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds after which a type is given up.")] = 60.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here, and SUPPORT.md beside it.")
    ] = None,
) -> None:
    """Try PagedCache on every generative model type that the installed transformers registers.

    Tiny models with random weights generate with the default cache and with PagedCache, each type in a
    process of its own. The exit code is 1 if PagedCache is not equal anywhere where the default cache is
    and did not refuse.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configs are made, not loaded
    terminal = console.terminal()
    from eval.core.progress import Progress

    with console.usage_errors():
        options = _options(block_size, attn, formats)
        chosen = _chosen(terminal, types, kind)
        console.check_writable(json_file)
        reports = []
        with Progress(terminal, "", total=len(chosen)) as progress:
            for report in reports_of(chosen, options, jobs=jobs, limit_s=limit):
                reports.append(report)
                progress.update(report.name, 1)
        reports.sort(key=lambda report: report.name)
        _hand_out(terminal, reports, options, json_file)
    if any(report.is_wrong for report in reports):
        raise typer.Exit(console.EXIT_WRONG)


def reports_of(
    entries: Sequence[Entry], options: Options, *, jobs: int, limit_s: float, examine: Any = None
) -> Iterator[Report]:
    """Look at every entry in a process of its own, by a function of a module; reports come when ready."""
    from eval.zoo.examine import Report, examine_alone

    # A server that has imported everything and started no thread forks in milliseconds.
    preload = ["eval.zoo.examine", "transformers.generation"]
    workers = Workers(examine or examine_alone, jobs, one_call_each=True, preload=preload)
    for outcome in workers.run([Call((entry, options), limit_s) for entry in entries]):
        if outcome.problem is None:
            yield outcome.value
            continue
        entry = outcome.call.arguments[0]
        report = Report(entry.name, entry.model_type, entry.class_name, problem=outcome.problem)
        report.has_died, report.seconds = True, outcome.seconds
        yield report


def _hand_out(terminal: Any, reports: list[Report], options: Options, json_file: Path | None) -> None:
    """Print the table, write the files."""
    import torch

    from eval.core import device
    from eval.zoo import support

    support.show(terminal, reports)
    if json_file is None:
        return
    described = device.describe(torch.device("cpu"))
    types = [{"group": support.group_of(report), **dataclasses.asdict(report)} for report in reports]
    counts = {group: len(members) for group, members in support.grouped(reports).items()}
    document = {"environment": described, "settings": vars(options), "counts": counts, "types": types}
    console.write_results(json_file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    page = json_file.with_name("SUPPORT.md")
    console.write_results(page, support.page(reports, options, described))
    terminal.print(f"{json_file} and {page.name} are written", highlight=False)


def _options(block_size: int, attn: str | None, formats: str) -> Options:
    from eval.zoo.examine import Options
    from hf_paged_cache.config import KV_CACHE_DTYPES, PagedCacheConfig, own_name

    names = tuple(own_name(name.strip()) for name in formats.split(",") if name.strip())
    for name in names:
        check_choice("format", name, KV_CACHE_DTYPES)
    if attn is not None:
        check_choice("attention", attn, ("sdpa", "eager"))
    try:
        PagedCacheConfig(block_size=block_size)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Options(block_size, attn, tuple(name for name in names if name != "auto"))


def _chosen(terminal: Any, types: str | None, kind: str | None) -> list[Entry]:
    from eval.zoo import kinds, registry

    if kind is None:
        return registry.chosen(types)
    check_choice("kind", kind, kinds.KINDS)
    with terminal.status("reading configs"):
        found = [entry for entry in registry.chosen(types) if kind in kinds.of_entry(entry)]
    if not found:
        raise UsageError(f"none of the types has layers of kind {kind!r}")
    return found
