"""The command line of `python -m eval.zoo`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.core.console import progress_bar, write_results
from eval.core.errors import UsageError, check_choice

EXIT_WRONG = 1
EXIT_USAGE = 2

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
    try:
        reports = run(types, kind, block_size, attn, formats, jobs, limit, json_file)
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    if any(report.is_wrong for report in reports):
        raise typer.Exit(EXIT_WRONG)


def run(
    types: str | None,
    kind: str | None,
    block_size: int,
    attn: str | None,
    formats: str,
    jobs: int,
    limit_s: float,
    json_file: Path | None,
) -> list[Any]:
    """Look at the types, print their table, write the files.

    Raises:
        UsageError: an unknown type, kind, format or attention, a block size that no cache takes, or a file
            that cannot be written.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configs are made, not loaded
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from rich.console import Console

    from eval.core import device
    from eval.zoo import groups, processes, registry, support, table
    from eval.zoo.examine import examine

    options = _options(block_size, attn, formats)
    if kind is not None:
        _check_kind(kind)
    chosen = registry.chosen(types)
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    if kind is not None:
        with console.status("reading configs"):
            chosen = _of_kind(chosen, kind)
    if json_file is not None:
        # Refused now and not after minutes; older results stay until then.
        write_results(json_file, "", mode="a")
    reports = []
    with progress_bar(console) as progress:
        bar = progress.add_task("", total=len(chosen))
        for report in processes.reports(chosen, options, jobs=jobs, limit_s=limit_s, examine=examine):
            reports.append(report)
            progress.update(bar, advance=1, description=report.name)
    reports.sort(key=lambda report: report.name)
    table.show(console, reports)
    console.print(groups.headline(reports), highlight=False)
    if json_file is not None:
        described = device.describe(torch.device("cpu"))
        document = {
            "environment": described,
            "settings": vars(options),
            "counts": groups.counts(reports),
            "types": [{"group": groups.group_of(report), **report.to_dict()} for report in reports],
        }
        write_results(json_file, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        page = json_file.with_name("SUPPORT.md")
        write_results(page, support.page(reports, options, described))
        console.print(f"{json_file} and {page.name} are written", highlight=False)
    return reports


def _options(block_size: int, attn: str | None, formats: str) -> Any:
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


def _check_kind(kind: str) -> None:
    from eval.zoo.kinds import KINDS

    check_choice("kind", kind, KINDS)


def _of_kind(entries: list[Any], kind: str) -> list[Any]:
    from eval.zoo import kinds

    found = [entry for entry in entries if kind in kinds.of_entry(entry)]
    if not found:
        raise UsageError(f"none of the types has layers of kind {kind!r}")
    return found


def main() -> None:
    """Run the command line; the exit code is 0, 1 (a wrong answer) or 2 (a request that cannot be met)."""
    sys.exit(app())
