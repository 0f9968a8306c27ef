"""The content of a report, in its order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.plots import Picture
from eval.report import details
from eval.report.columns import COLUMNS, DIFFERENCE_RULE, cells, score_heading
from eval.report.document import Block, Bullets, Document, Figure, Grid, Paragraph, Section
from eval.report.numbers import NOTHING
from eval.run.lookups import by_task, problem_lines, shared_context
from eval.run.rows import Prediction, Row, Run

_MOST_CHARACTERS = 600
"""Of an answer."""
NO_PICTURES = "Not drawn, because matplotlib is not installed: pip install 'hf-paged-cache[plots]'"


def document(run: Run, pictures: Sequence[Picture] | None) -> Document:
    """Return the report of a run and the pictures beside it; None where matplotlib is not installed."""
    sections = [
        Section("What was compared", _subject(run)),
        Section("Results", [Paragraph(DIFFERENCE_RULE)], _results(run.rows)),
        Section(
            "Pictures", [Paragraph(NO_PICTURES)] if pictures is None else [Figure(each) for each in pictures]
        ),
        Section("In full", [Paragraph(details.BRACKETS)], details.sections(run.rows)),
        Section("What the columns mean", [Bullets(_meanings(run))]),
        Section("Answers", (), _answers(run.predictions)),
        Section("Settings", [_mapping(run.settings)]),
        Section("Machine", [_mapping(run.environment)]),
    ]
    return Document(
        "Caches compared", [section for section in sections if section.blocks or section.sections]
    )


def _subject(run: Run) -> list[Block]:
    processes = "one process" if run.processes == 1 else f"{run.processes} processes"
    about = [
        ("model", run.source),
        ("weights and activations", str(run.settings.get("dtype", "of unknown dtype"))),
        ("machine", _machine(run.environment)),
        (
            "time",
            f"{run.seconds:.0f} s in {processes}, loading included; what an earlier call had finished is not",
        ),
    ]
    titles = {row.cache: run.titles.get(row.cache, NOTHING) for row in run.rows}
    blocks: list[Block] = [Bullets(about), Grid(["cache", "what it is"], [*map(list, titles.items())], 2)]
    missing = [("", problem) for problem in problem_lines(run.rows)]
    return [*blocks, Paragraph("These could not be measured:"), Bullets(missing)] if missing else blocks


def _machine(environment: Mapping[str, Any]) -> str:
    words = [environment.get(key) for key in ("machine", "cpu")]
    count, gpu = environment.get("cpu_count"), environment.get("gpu") or {}
    words += [f"{count} CPUs" if count else None, gpu.get("name")]
    device = environment.get("device", "an unknown device")
    return ", ".join([*(str(word) for word in words if word), f"the model on {device}"])


def _results(rows: Sequence[Row]) -> list[Section]:
    return [Section(_task_title(task, of_task), [_main(of_task)]) for task, of_task in by_task(rows).items()]


def _task_title(task: str, rows: Sequence[Row]) -> str:
    context_tokens = shared_context(rows)
    if context_tokens is not None:
        return f"{task}, at {context_tokens} tokens"
    samples = max(row.samples for row in rows)
    return f"{task}, {samples} samples" if samples else task


def _main(rows: Sequence[Row]) -> Grid:
    headings = [column.heading.replace("/ ", "/") for column in COLUMNS]
    headings[1] = score_heading(rows) or headings[1]
    lines = cells(rows)
    kept = [index for index in range(len(headings)) if any(line[index] != NOTHING for line in lines)]
    return Grid([headings[index] for index in kept], [[line[index] for index in kept] for line in lines])


def _meanings(run: Run) -> list[tuple[str, str]]:
    columns = [(column.heading.replace("/ ", "/"), column.meaning) for column in COLUMNS]
    return [*columns, *details.MEANINGS, ("memory", run.memory_method)]


def _answers(predictions: Sequence[Prediction]) -> list[Section]:
    """The first sample of each task: the reference, and what the caches answered; alike answers once."""
    samples: dict[str, dict[str, list[Prediction]]] = {}
    for prediction in predictions:
        samples.setdefault(prediction.task, {}).setdefault(prediction.id, []).append(prediction)
    first = {task: next(iter(by_id.items())) for task, by_id in samples.items()}
    return [Section(f"{task}, {sample}", [_answers_to(found)]) for task, (sample, found) in first.items()]


def _answers_to(predictions: Sequence[Prediction]) -> Bullets:
    caches: dict[str, list[str]] = {}
    for prediction in predictions:
        caches.setdefault(prediction.prediction, []).append(prediction.cache)
    answered = [(", ".join(names), _shown(text)) for text, names in caches.items()]
    return Bullets([("reference", _shown(predictions[0].reference)), *answered])


def _shown(text: str) -> str:
    line = " ".join(text.split()) or "(nothing)"
    left = len(line) - _MOST_CHARACTERS
    return line if left <= 0 else f"{line[:_MOST_CHARACTERS]}… ({left} more characters)"


def _mapping(values: Mapping[str, Any]) -> Grid:
    return Grid(["", "value"], [[str(key), _text(value)] for key, value in values.items()], text_columns=2)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or NOTHING
    return NOTHING if value is None else str(value)
