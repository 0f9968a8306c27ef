from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from eval.errors import UsageError
from eval.tasks import TASKS, Task


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_one_seed_chooses_the_same_samples_and_another_seed_others(task: Task) -> None:
    ids = [sample.id for sample in task.load(20, seed=1)]
    assert ids == [sample.id for sample in task.load(20, seed=1)]
    assert len(set(ids)) == 20
    assert ids != [sample.id for sample in task.load(20, seed=2)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_prompt_holds_the_instruction_and_the_whole_text(task: Task) -> None:
    rows = [json.loads(line) for line in task.data_file.read_text(encoding="utf-8").splitlines()]
    texts = {row["id"]: row[task.input_column] for row in rows}
    references = {row["id"]: row[task.reference_column] for row in rows}
    for sample in task.load(5, seed=0):
        assert sample.prompt == task.instruction.replace("{input}", texts[sample.id])
        assert sample.reference == references[sample.id]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_limit_beyond_the_data_gives_all_300_of_them(task: Task) -> None:
    assert len(task.load(10_000, seed=0)) == 300


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_scores_carry_the_keys_the_task_announces(task: Task) -> None:
    assert tuple(task.score(["un deux trois"], ["un deux trois"])) == task.metric_keys


def test_a_missing_column_is_named_with_the_columns_there_are(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"id": "1", "article": "a", "summary": "b"}\n', encoding="utf-8")
    task = dataclasses.replace(TASKS["summarization"], data_file=file)
    with pytest.raises(UsageError) as caught:
        task.load(1, seed=0)
    assert str(caught.value) == "unknown column 'document' in mine.jsonl; choose from: article, id, summary"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    task = dataclasses.replace(TASKS["translation"], data_file=tmp_path / "no.jsonl")
    with pytest.raises(UsageError, match=r"data file of task 'translation' is missing: .*no\.jsonl"):
        task.load(1, seed=0)
