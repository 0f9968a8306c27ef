"""The command line of `python -m eval bench`."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eval.core.console import EXIT_WRONG, check_writable, header, terminal, usage_errors, write_results
from eval.core.errors import UsageError
from eval.core.table import WrongAnswer

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

    try:
        with usage_errors():
            run(only, quick, json_file)
    except (NotGreen, WrongAnswer) as error:
        what = "wrong answer" if isinstance(error, WrongAnswer) else "the kernels are not known to be right"
        typer.echo(f"{what}, so no speed is reported: {error}", err=True)
        raise typer.Exit(EXIT_WRONG) from error


def run(only: str | None, quick: bool, json_file: Path | None) -> None:
    """Run the kernel tests, then the benches; print tables and what is required, write the JSON file."""
    console = terminal()
    import torch

    from eval.bench import kernel_tests, registry
    from eval.bench.context import Context
    from eval.core import device, table

    benches = registry.chosen(only)
    check_writable(json_file)
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
            "kernel_tests": asdict(tests),
            "results": [result.to_dict() for result in results],
        }
        write_results(json_file, json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _backend() -> tuple[str, str | None]:
    """The kernels that a cache on this machine uses, found by using one, and their instruction set."""
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
