"""The command line of `python -m eval quality`."""

import time
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated

import typer

from eval.core.console import EXIT_WRONG, check_writable, header, terminal, usage_errors, write_results

QUICK_TOKENS = 256

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quality(
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens of each row; default: 1024.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of text.")] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of each forward.")] = 16,
    only: Annotated[str | None, typer.Option(help="Comma-separated names of schemes; default: all.")] = None,
    key_offset: Annotated[
        bool | None,
        typer.Option(help="Keys with an offset alone, or as they are alone; default: one after the other."),
    ] = None,
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
    offsets = (False, True) if key_offset is None else (key_offset,)
    tokens = tokens or (QUICK_TOKENS if quick else 1024)
    console = terminal()
    import torch

    from eval.core import device, models, results, table
    from eval.core.progress import Progress
    from eval.data import text
    from eval.quality import picture, protocol, schemes, tables

    with usage_errors():
        selected = schemes.chosen(only, quick=quick, defaults=defaults)
        check_writable(json_file)
    described = device.describe(torch.device("cpu"))
    what = tables.Protocol(model, rows, tokens, chunk)
    found = []
    with usage_errors(), Progress(console, f"loading {model}") as progress:
        loaded = models.load(model)
        ids = text.row_ids(loaded.tokenizer, rows, tokens)
        for is_shifted in offsets:
            started_s = time.perf_counter()
            is_left_out = attrgetter("only_defaults" if is_shifted else "only_offset")
            taken = [scheme for scheme in selected if only is not None or not is_left_out(scheme)]
            if taken:
                label = "chunks, with a key offset" if is_shifted else "chunks, keys as they are"
                progress.update(label, total=-(-tokens // chunk) * len(offsets))
                advance = partial(progress.update, label)
                comparison = protocol.run(
                    loaded.model, ids, taken, chunk=chunk, key_offset=is_shifted, progress=advance
                )
                found.append(tables.result(comparison, what, time.perf_counter() - started_s))
    for result in found:
        table.show(console, result)
    found_rows = [row for result in found for row in result.rows]
    backends = sorted({str(row.cells["backend"]) for row in found_rows if row.cells.get("backend")})
    console.print(header(described, ", ".join(backends) or "none"), highlight=False)
    console.print(table.summary(found), highlight=False, markup=False)
    if json_file is not None:
        environment, settings = {**described, "backends": backends}, {**vars(what), "source": loaded.source}
        document = results.document(environment, settings, [result.to_dict() for result in found])
        write_results(json_file, results.to_json(document, indent=2) + "\n")
        drawn = json_file.with_suffix(".png")
        said = f"{json_file} and {drawn.name} are written"
        if not picture.draw(found, drawn):
            said = "no picture: pip install 'hf-paged-cache[plots]'"
        console.print(said, highlight=False, markup=False)
    if not all(bound.holds for row in found_rows for bound in row.bounds):
        raise typer.Exit(EXIT_WRONG)
