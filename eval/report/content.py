"""The content of a report for its template: plain texts, points of lists, tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.plots import Picture
from eval.report import details
from eval.report.details import Table, table
from eval.report.numbers import NOTHING
from eval.report.terminal import COLUMNS, DIFFERENCE_RULE, cells, score_heading
from eval.run.rows import Prediction, Row, Run, by_task, problem_lines, shared_context

_MOST_CHARACTERS = 600  # of an answer
NO_PICTURES = "Not drawn, because matplotlib is not installed: pip install 'hf-paged-cache[plots]'"


def content(run: Run, pictures: Sequence[Picture] | None) -> dict[str, Any]:
    """Return what the template asks for by name; `pictures` are None where matplotlib is not installed."""
    headings = [column.heading.replace("/ ", "/") for column in COLUMNS]
    meanings = zip(headings, [column.meaning for column in COLUMNS], strict=True)
    return {
        "subject": _subject(run),
        "titles": {row.cache: run.titles.get(row.cache, NOTHING) for row in run.rows}.items(),
        "problems": [("", problem) for problem in problem_lines(run.rows)],
        "difference_rule": DIFFERENCE_RULE,
        "results": [_main(task, of_task, headings) for task, of_task in by_task(run.rows).items()],
        "pictures": pictures,
        "no_pictures": NO_PICTURES,
        "brackets": details.BRACKETS,
        "details": details.tables(run.rows),
        "meanings": [*meanings, *details.MEANINGS, ("memory", run.memory_method)],
        "answers": _answers(run.predictions),
        "settings": _lines(run.settings),
        "machine": _lines(run.environment),
    }


def _subject(run: Run) -> list[tuple[str, str]]:
    environment, dtype = run.environment, run.settings.get("dtype", "of unknown dtype")
    count, gpu = environment.get("cpu_count"), environment.get("gpu") or {}
    words = [environment.get("machine"), environment.get("cpu"), f"{count} CPUs" if count else None]
    words += [gpu.get("name"), f"the model on {environment.get('device', 'an unknown device')}"]
    processes = "one process" if run.processes == 1 else f"{run.processes} processes"
    time = f"{run.seconds:.0f} s in {processes}, loading included; what an earlier call had finished is not"
    return [
        ("model", run.source),
        ("weights and activations", str(dtype)),
        ("machine", ", ".join(str(word) for word in words if word)),
        ("time", time),
    ]


def _main(task: str, rows: Sequence[Row], headings: Sequence[str]) -> Table:
    first, score, *others = headings
    samples, context_tokens = max(row.samples for row in rows), shared_context(rows)
    where = f"at {context_tokens} tokens" if context_tokens is not None else f"{samples} samples"
    title = f"{task}, {where}" if samples or context_tokens is not None else task
    return table(title, [first, score_heading(rows) or score, *others], cells(rows))


def _answers(predictions: Sequence[Prediction]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The first sample of each task: the reference, and what the caches answered; alike answers once."""
    first: dict[str, Prediction] = {}
    caches: dict[str, dict[str, list[str]]] = {}  # task -> answer -> who gave it
    for each in predictions:
        if first.setdefault(each.task, each).id == each.id:
            caches.setdefault(each.task, {}).setdefault(each.prediction, []).append(each.cache)
    answers = []
    for task, sample in first.items():
        answered = [(", ".join(names), _shown(text)) for text, names in caches[task].items()]
        answers.append((f"{task}, {sample.id}", [("reference", _shown(sample.reference)), *answered]))
    return answers


def _shown(text: str) -> str:
    line = " ".join(text.split()) or "(nothing)"
    left = len(line) - _MOST_CHARACTERS
    return line if left <= 0 else f"{line[:_MOST_CHARACTERS]}… ({left} more characters)"


def _lines(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), _text(value)) for key, value in values.items()]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items() if item is not None) or NOTHING
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or NOTHING
    return NOTHING if value is None else str(value)
