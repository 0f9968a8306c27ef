"""The table in the terminal, and the files of a run folder: config, results, answers, report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from eval.caches import BASELINE, CACHES
from eval.runner import Prediction, Row
from eval.settings import Settings

MIB = 2**20
_NOTHING = "-"
_FULL_WIDTH = 100
_NO_PICTURES = "Not drawn, because matplotlib is not installed: `pip install 'hf-paged-cache[plots]'`."


@dataclass(frozen=True)
class Run:
    """All that a run leaves behind.

    Attributes:
        settings: what was asked for.
        source: where the model's weights came from.
        environment: see `eval.environment.describe`.
        memory_method: what the peak memory numbers are.
        seconds: wall time, the model's loading included.
        rows: the table.
        predictions: every answer of every cache.
    """

    settings: Settings
    source: str
    environment: dict[str, Any]
    memory_method: str
    seconds: float
    rows: list[Row]
    predictions: list[Prediction]


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        heading: with the unit of its numbers.
        cell: what it says of a row.
        meaning: explained below the table of the report.
        is_text: set to the left.
        essential: stays in a narrow terminal.
    """

    heading: str
    cell: Callable[[Row], str]
    meaning: str = ""
    is_text: bool = False
    essential: bool = True


def _number(value: float | None, spec: str, scale: float = 1.0) -> str:
    return _NOTHING if value is None else format(value / scale, spec)


def _score(row: Row) -> str:
    return _NOTHING if row.metrics is None else "/".join(f"{value:.1f}" for value in row.metrics.values())


COLUMNS = (
    Column("task", lambda row: row.task, is_text=True),
    Column("cache", lambda row: row.cache, is_text=True),
    Column("metric", lambda row: row.metric_names, is_text=True, essential=False),
    Column("score", _score, "percent, against the references, in the order that `metric` names"),
    Column(
        "identical",
        lambda row: _NOTHING if row.identical is None else f"{row.identical:.1%}",
        f"share of samples whose generated tokens all equal those of `{BASELINE}`",
    ),
    Column(
        "KV MiB",
        lambda row: _number(row.kv_bytes, ".2f", MIB),
        "keys and values held at the end, largest batch",
    ),
    Column("peak MiB", lambda row: _number(row.peak_bytes, ".0f", MIB), "peak memory, weights included"),
    Column(
        "rise MiB",
        lambda row: _number(row.rise_bytes, ".0f", MIB),
        "largest rise during one batch",
        essential=False,
    ),
    Column("prefill ms", lambda row: _number(row.prefill_ms, ".1f"), "first forward; median over batches"),
    Column(
        "decode ms/token",
        lambda row: _number(row.decode_ms_per_token, ".2f"),
        "one decode step, which gives one token to each sequence of the batch; median over steps",
    ),
)


def table(rows: Sequence[Row], width: int = _FULL_WIDTH) -> Table:
    """Return the rows as a rich table, tasks set apart; what kept a cache from running is said below it.

    Args:
        rows: the table's lines, sorted by task.
        width: characters there are; below 100 the columns that a reader can do without are left out.
    """
    columns = [column for column in COLUMNS if column.essential or width >= _FULL_WIDTH]
    result = Table(
        title="Caches compared",
        caption="\n".join(_problems(rows)) or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for column in columns:
        heading = column.heading.replace(" ", "\n", 1)
        result.add_column(heading, justify="left" if column.is_text else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        last = following is None or following.task != row.task
        result.add_row(*(column.cell(row) for column in columns), end_section=last)
    return result


def _problems(rows: Sequence[Row]) -> list[str]:
    by_problem: dict[tuple[str, str, bool], list[str]] = {}
    for row in rows:
        if row.problem is not None:
            by_problem.setdefault((row.cache, row.problem, row.failed), []).append(row.task)
    return [
        f"{cache} {'failed' if failed else 'is not available'} ({', '.join(tasks)}): {problem}"
        for (cache, problem, failed), tasks in by_problem.items()
    ]


def markdown(run: Run, pictures: Sequence[str] | None = None) -> str:
    """Return the report: table, pictures, what the columns mean, settings, machine, an answer of each task.

    Args:
        run: what was measured.
        pictures: names of files beside the report; None where they could not be drawn.
    """
    sections = [
        "# Caches compared\n",
        f"Model: `{run.source}`. Wall time: {run.seconds:.0f} s, the model's loading included.\n",
        _markdown_table([c.heading for c in COLUMNS], [[c.cell(row) for c in COLUMNS] for row in run.rows]),
        *[f"- **{problem}**" for problem in _problems(run.rows)],
        "",
        *[f"- *{column.heading}*: {column.meaning}" for column in COLUMNS if column.meaning],
        f"- memory is {run.memory_method}",
        *[f"- `{name}`: {CACHES[name].title}" for name in run.settings.caches],
        "\n## Pictures\n",
        _NO_PICTURES if pictures is None else "\n\n".join(f"![{name}]({name})" for name in pictures),
        "\n## Settings\n",
        _markdown_table(["setting", "value"], [[k, _text(v)] for k, v in run.settings.to_dict().items()]),
        "\n## Machine\n",
        _markdown_table(["", ""], [[k, _text(v)] for k, v in run.environment.items()]),
        "\n## One answer of each task\n",
        _examples(run.predictions),
    ]
    return "\n".join(sections)


def _examples(predictions: Sequence[Prediction]) -> str:
    first: dict[str, str] = {}
    for prediction in predictions:
        first.setdefault(prediction.task, prediction.id)
    lines: list[str] = []
    for task, sample_id in first.items():
        answers = [p for p in predictions if p.task == task and p.id == sample_id]
        lines += [f"**{task}, {sample_id}**\n", f"- reference: {_one_line(answers[0].reference)}"]
        lines += [f"- `{answer.cache}`: {_one_line(answer.prediction)}" for answer in answers]
        lines.append("")
    return "\n".join(lines)


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return _NOTHING if value is None else str(value)


def _one_line(text: str) -> str:
    return " ".join(text.split()) or "(nothing)"


def write(run: Run, folder: Path, pictures: Sequence[str] | None = None) -> None:
    """Write `config.yaml`, `results.json`, `predictions.jsonl` and `report.md` into `folder`, making it.

    `pictures` are the names of files that are in the folder already; None: they could not be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_dump(run.settings.to_dict(), sort_keys=False)
    results = {
        "settings": run.settings.to_dict(),
        "model_source": run.source,
        "environment": run.environment,
        "memory_method": run.memory_method,
        "seconds": round(run.seconds, 1),
        "rows": [dataclasses.asdict(row) for row in run.rows],
    }
    answers = [json.dumps(dataclasses.asdict(p), ensure_ascii=False) for p in run.predictions]
    files = {
        "config.yaml": config,
        "results.json": json.dumps(results, indent=2, ensure_ascii=False) + "\n",
        "predictions.jsonl": "".join(line + "\n" for line in answers),
        "report.md": markdown(run, pictures),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
