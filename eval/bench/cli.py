"""The command line of `python -m eval.bench`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from eval.core.console import header, write_results
from eval.core.errors import UsageError

EXIT_WRONG = 1
EXIT_USAGE = 2

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    only: Annotated[str | None, typer.Option(help="Comma-separated names of benches; default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases and rounds; coarse numbers.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Measure PagedCache beside the caches of transformers: speed, bytes and peak memory.

    Runs the tests of the kernels in use first, unless they passed and nothing changed since, and checks the
    answers of what it measures; the exit code is 1 if something is wrong, and no speed of it is printed. A
    required number that is missed is marked.
    """
    from eval.bench.kernel_tests import NotGreen
    from eval.core.table import WrongAnswer

    try:
        run(only, quick, json_file)
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(EXIT_USAGE) from error
    except NotGreen as error:
        typer.echo(f"the kernels are not known to be right, so no speed is reported: {error}", err=True)
        raise typer.Exit(EXIT_WRONG) from error
    except WrongAnswer as error:
        typer.echo(f"wrong answer, so no speed is reported: {error}", err=True)
        raise typer.Exit(EXIT_WRONG) from error


def run(only: str | None, quick: bool, json_file: Path | None) -> list[Any]:
    """Run the kernel tests, then the benches; print their tables and what is required, write the JSON file.

    Raises:
        UsageError: an unknown bench, a backend that cannot run, or a file that cannot be written.
        NotGreen: the kernel tests fail or cannot be run.
        WrongAnswer: a cache computed something wrong.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    from rich.console import Console

    from eval.bench import kernel_tests, registry
    from eval.bench.context import Context
    from eval.core import device, table

    benches = registry.chosen(only)
    if json_file is not None:
        write_results(json_file, "", mode="a")  # before the work, to hear of a wrong path; changes nothing
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    started_s = time.perf_counter()
    described = device.describe(torch.device("cpu"))
    backend, isa = _backend()
    console.print(header(described, backend), highlight=False)
    results = []
    with console.status("kernel tests") as status:
        tests = kernel_tests.require_green(backend, isa, quick=quick, progress=status.update)
        console.print(str(tests), highlight=False, markup=False)
        context = Context(quick=quick, progress=status.update)
        for entry in benches:
            result = entry.run(context)
            results.append(result)
            table.show(console, result)
    console.print(table.summary(results), highlight=False, markup=False)
    console.print(f"{time.perf_counter() - started_s:.0f} s", highlight=False)
    if json_file is not None:
        document = {
            "environment": {**described, "backend": backend},
            "quick": quick,
            "kernel_tests": tests.to_dict(),
            "results": [result.to_dict() for result in results],
        }
        write_results(json_file, json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return results


def _backend() -> tuple[str, str | None]:
    """The kernels that a cache on this machine uses, found by using one, and their instruction set.

    Raises:
        UsageError: the environment asks for kernels that cannot run.
    """
    import torch
    from transformers import LlamaConfig

    from hf_paged_cache import BackendUnavailable, PagedCache, PagedCacheError
    from hf_paged_cache.kernels import cpp

    config = LlamaConfig(hidden_size=64, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)
    try:
        cache = PagedCache(config, max_tokens=64)
        cache.update(torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 64), 0)
        backend = str(cache.stats().backend)
    except (BackendUnavailable, PagedCacheError) as error:
        raise UsageError(str(error)) from error
    return backend, cpp.isa() if backend == "cpp" else None


def main() -> None:
    """Run the command line; the exit code is 0, 1 (something is wrong) or 2 (a request cannot be met)."""
    sys.exit(app())
