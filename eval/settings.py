"""What an evaluation runs: defaults, overridden by a YAML file, overridden by the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from eval.errors import UsageError, check_choice

DTYPES = ("float32", "bfloat16", "float16")
# Integers and the least value each may take.
_MINIMUM = {"limit": 1, "batch_size": 1, "max_new_tokens": 1, "seed": 0}
_NAME_LISTS = ("tasks", "caches")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One evaluation. `resolve` builds and validates it.

    Attributes:
        model: a name of `eval.models.MODELS`, a hub id, a local folder or a local `.gguf` file.
        tasks: names of `eval.tasks.TASKS`.
        caches: names of `eval.caches.CACHES`.
        limit: samples of each task.
        batch_size: prompts generated together, padded on the left.
        max_new_tokens: tokens generated for each sample; None leaves it to each task.
        dtype: the model's dtype, and therefore the default cache's.
        device: a torch device, or "auto": CUDA where there is one, else the CPU.
        seed: chooses the samples.
        output: the run folder; None makes `eval/runs/<timestamp>`.
    """

    model: str = "smollm2"
    tasks: tuple[str, ...] = ("summarization", "translation")
    caches: tuple[str, ...] = ("dynamic", "paged")
    limit: int = 16
    batch_size: int = 8
    max_new_tokens: int | None = None
    dtype: str = "float32"
    device: str = "auto"
    seed: int = 0
    output: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON and YAML write them (tuples as lists)."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}


def resolve(config: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Merge the defaults, the YAML file and the command line, in rising order of precedence.

    Args:
        config: a YAML mapping of `Settings` keys, or None.
        overrides: keys given on the command line; a value of None means "not given".

    Raises:
        UsageError: for an unreadable file, an unknown key, task, cache or dtype, or a wrong value.
    """
    merged = _read_yaml(config) if config is not None else {}
    merged.update({key: value for key, value in overrides.items() if value is not None})
    return _validated(merged)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read the config file {path}: {reason}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"the config file {path} holds a {type(loaded).__name__}, not a mapping of settings")
    return loaded


def _validated(values: Mapping[str, Any]) -> Settings:
    fields = {field.name for field in dataclasses.fields(Settings)}
    cleaned = {check_choice("setting", str(key), fields): _convert(str(key), v) for key, v in values.items()}
    settings = Settings(**cleaned)
    # Imported here because the registries hold code that takes Settings.
    from eval.caches import CACHES
    from eval.tasks import TASKS

    for name in settings.tasks:
        check_choice("task", name, TASKS)
    for name in settings.caches:
        check_choice("cache", name, CACHES)
    check_choice("dtype", settings.dtype, DTYPES)
    return settings


def _convert(key: str, value: Any) -> Any:
    if key in _NAME_LISTS:
        return _name_list(key, value)
    if key in _MINIMUM:
        return _integer(key, value)
    if value is None and key == "output":
        return None
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} must be a non-empty string, got {value!r}")
    return value


def _integer(key: str, value: Any) -> int | None:
    if value is None and key == "max_new_tokens":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < _MINIMUM[key]:
        raise UsageError(f"{key} must be an integer of at least {_MINIMUM[key]}, got {value!r}")
    return value


def _name_list(key: str, value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{key} must be a list of names or one comma-separated string, got {value!r}")
    cleaned = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not cleaned:
        raise UsageError(f"{key} must name at least one of them, got {value!r}")
    return cleaned
