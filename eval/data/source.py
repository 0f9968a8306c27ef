"""Texts of a task: what ships, a local file, or a data set by its `datasets` name."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.core.errors import UsageError
from eval.run.settings import Settings

_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


@dataclass(frozen=True)
class Source:
    """A table of texts."""

    name: str  # a local file or folder, or a data set's name
    # role (`id`, `input`, `reference`) -> column; a dot reaches into nested ones. A task reads the roles that
    # it knows; without `id` samples are numbered.
    columns: Mapping[str, str]
    config: str | None = None  # configuration of a data set
    split: str = "test"  # of a data set
    instruction: str | None = None  # the user's message, `{input}` where the text goes; None: the task's


# Data sets whose columns are known; any other needs `--input-column` and, for a reference, its column.
PRESETS = {
    "cnn_dailymail": Source(
        "abisee/cnn_dailymail",
        {"id": "id", "input": "article", "reference": "highlights"},
        "3.0.0",
        instruction="Summarize the following article in three sentences.\n\n{input}",
    ),
    "xsum": Source(
        "EdinburghNLP/xsum",
        {"id": "id", "input": "document", "reference": "summary"},
        instruction="Summarize the following article in one sentence.\n\n{input}",
    ),
    "wmt16": Source(
        "wmt/wmt16",
        {"input": "translation.de", "reference": "translation.en"},
        "de-en",
        instruction="Translate the following German text to English:\n\n{input}",
    ),
}


def chosen(settings: Settings, shipped: Source) -> Source:
    """The source that settings ask for: what is given, over a preset, over what ships."""
    if settings.dataset is None:
        return shipped
    if Path(settings.dataset).suffix in _LOADERS and (settings.split or settings.dataset_config):
        raise UsageError(f"{settings.dataset} is a file, without splits and configurations: leave those away")
    known = PRESETS.get(settings.dataset)
    base = known or Source(settings.dataset, {})
    given = {role: getattr(settings, f"{role}_column") for role in ("id", "input", "reference")}
    return Source(
        base.name,
        {**base.columns, **{role: column for role, column in given.items() if column is not None}},
        settings.dataset_config or base.config,
        settings.split or base.split,
        settings.instruction or base.instruction,
    )


def read(source: Source, roles: tuple[str, ...], limit: int | None, seed: int) -> list[dict[str, str]]:
    """Rows as role -> text for `id` and `roles`, `limit` of them chosen by `seed`, or all in their order.

    Rows that lack one of the texts are passed over. Without an id, a row's place in the table is its name.
    """
    table = _load(source)
    paths = sorted(_paths(table.features))
    for role in roles:
        if role not in source.columns:
            raise UsageError(
                f"the dataset {source.name!r} needs --{role}-column; choose from: {', '.join(paths)}"
            )
    wanted = {role: source.columns[role] for role in ("id", *roles) if role in source.columns}
    if not len(table):
        raise UsageError(f"the dataset {source.name!r} is empty")
    if missing := [repr(name) for name in wanted.values() if name not in (*table.features, *paths)]:
        where = Path(source.name).name
        raise UsageError(f"unknown column {', '.join(missing)} in {where}; choose from: {', '.join(paths)}")
    order = range(len(table)) if limit is None else np.random.default_rng(seed).permutation(len(table))
    found = (_row(int(number), table[int(number)], wanted) for number in order)
    rows = list(itertools.islice((row for row in found if all(row.values())), limit))
    if not rows:
        names = ", ".join(repr(column) for column in wanted.values())
        raise UsageError(f"no row of the dataset {source.name!r} has a text in {names}")
    return rows


def _load(source: Source) -> Any:
    # Imported late: it takes seconds, and a mistake in the settings should not.
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.name)
    if path.suffix in _LOADERS and not path.is_file():
        raise UsageError(f"the data file {source.name} is missing")
    try:
        if path.suffix in _LOADERS:
            return datasets.load_dataset(_LOADERS[path.suffix], data_files=str(path), split="train")
        return datasets.load_dataset(source.name, source.config, split=source.split)
    except Exception as error:  # whatever the hub, the network, or a file's content makes of it
        reason = " ".join(str(error).split())[:200]
        known = ", ".join(sorted(PRESETS))
        raise UsageError(
            f"the dataset {source.name!r} cannot be had ({reason}); choose from: {known}, any name on "
            f"the hub, or a local file ({', '.join(sorted(_LOADERS))})"
        ) from error


def _paths(features: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, Mapping):
            yield from _paths(inner, f"{prefix}{name}.")
        else:
            languages = getattr(inner, "languages", None)  # of a pair of translations
            yield from [f"{prefix}{name}.{each}" for each in languages] if languages else [f"{prefix}{name}"]


def _value(record: Any, column: str) -> Any:
    if isinstance(record, list):
        return [_value(item, column) for item in record]
    if not isinstance(record, Mapping):
        return None
    name, _, inner = column.partition(".")
    return record[column] if column in record else _value(record.get(name), inner)


def _row(number: int, record: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, str]:
    texts = {role: _text(_value(record, column)) for role, column in wanted.items()}
    return {**texts, "id": texts.get("id") or str(number)}


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    return "" if value is None else str(value)
