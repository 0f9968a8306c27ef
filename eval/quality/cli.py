"""The command line of `python -m eval.quality`."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.console import progress_bar, write_results
from eval.core.errors import UsageError

EXIT_MISSED = 1
EXIT_USAGE = 2
QUICK_TOKENS = 256

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quality(
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of each row; default: 1024.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of text.")] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of each forward.")] = 16,
    only: Annotated[str | None, typer.Option(help="Comma-separated names of schemes; default: all.")] = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Also the block and group sizes, to choose defaults by.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer tokens and schemes; nothing is judged.")
    ] = False,
    model: Annotated[str, typer.Option(help="smollm2, a hub id, a folder or a .gguf file.")] = "smollm2",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the results here, and a picture beside it.")
    ] = None,
) -> None:
    """Compare ways to store K and V by what they do to a model's predictions on real text.

    The text goes through each cache in chunks, so that all but the chunk is read from what the cache keeps;
    once as it is, and once with an offset added to the keys, as models with large key biases have it. What is
    required is judged where the run is the one it belongs to (smollm2, 2 rows of 1024 tokens, chunks of 16);
    the exit code is 1 if a number is missed.
    """
    count = tokens or (QUICK_TOKENS if quick else 1024)
    try:
        results = run(model, rows, count, chunk, only, quick, defaults, json_file)
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    if not all(bound.holds for result in results for row in result.rows for bound in row.bounds):
        raise typer.Exit(EXIT_MISSED)


def run(
    model: str,
    rows: int,
    tokens: int,
    chunk: int,
    only: str | None,
    quick: bool,
    defaults: bool,
    json_file: Path | None,
) -> list[Any]:
    """Run both comparisons, print their tables, write the files.

    Raises:
        UsageError: an unknown scheme, too little text, no such model, or a file that cannot be written.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from rich.console import Console

    from eval import environment, models
    from eval.bench import table
    from eval.quality import protocol, schemes, tables, text
    from eval.quality.requirements import Protocol
    from eval.run.settings import Settings

    selected = schemes.chosen(only, quick=quick, defaults=defaults)
    if json_file is not None:
        # Refused now and not after minutes; older results stay until then.
        write_results(json_file, "", mode="a")
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    described = environment.describe(torch.device("cpu"))
    with console.status(f"loading {model}"):
        loaded = models.load(Settings(model=model, dtype="float32", device="cpu"))
    ids = text.token_ids(loaded.tokenizer, rows, tokens)
    what = Protocol(model, rows, tokens, chunk)
    results = []
    for key_offset in (False, True):
        started_s = time.perf_counter()
        taken = [scheme for scheme in selected if _belongs(scheme, key_offset, is_named=only is not None)]
        if not taken:
            continue
        with progress_bar(console) as progress:
            bar = progress.add_task("key offset" if key_offset else "as it is", total=-(-tokens // chunk))
            comparison = protocol.run(
                loaded.model,
                ids,
                taken,
                chunk=chunk,
                key_offset=key_offset,
                progress=partial(progress.advance, bar),
            )
        result = tables.result(comparison, what, time.perf_counter() - started_s)
        table.show(console, result)
        results.append(result)
    backends = {
        str(row.cells["backend"]) for result in results for row in result.rows if row.cells.get("backend")
    }
    console.print(table.header(described, ", ".join(sorted(backends)) or "none"), highlight=False)
    console.print(table.summary(results), highlight=False, markup=False)
    if json_file is not None:
        document = {
            "environment": {**described, "backends": sorted(backends)},
            "protocol": {**vars(what), "source": loaded.source},
            "results": [result.to_dict() for result in results],
        }
        write_results(json_file, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
        _draw(console, results, json_file.with_suffix(".png"))
    return results


def _belongs(scheme: Any, key_offset: bool, *, is_named: bool) -> bool:
    """Whether a scheme takes part: sizes are chosen by keys as they are; some are for the offset alone."""
    if key_offset:
        return is_named or not scheme.only_defaults
    return is_named or not scheme.only_offset


def _draw(console: Any, results: list[Any], path: Path) -> None:
    from eval.quality import picture

    if picture.draw(results, path):
        console.print(f"{path.with_suffix('.json')} and {path.name} are written", highlight=False)
    else:
        console.print("no picture: pip install 'hf-paged-cache[plots]'", highlight=False, markup=False)


def main() -> None:
    """Run the command line; the exit code is 0, 1 (a number is missed) or 2 (the request cannot be met)."""
    sys.exit(app())
