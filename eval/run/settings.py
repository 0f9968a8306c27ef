"""Settings of a run: defaults, overridden by a YAML file, overridden by the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from eval.core.errors import UsageError, check_choice

DTYPES = ("float32", "bfloat16", "float16")
ALL = "all"
# Integers and the least value each may take.
_MINIMUM = {"limit": 1, "batch_size": 1, "max_new_tokens": 1, "seed": 0}
_DATASET_KEYS = ("dataset_config", "split", "id_column", "input_column", "reference_column", "instruction")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. `resolve` builds and validates it."""

    # a name of `eval.core.models.MODELS`, a hub id, a local folder or a local `.gguf` file
    model: str = "smollm2"
    # names of `eval.tasks.TASKS`; `all` is every one
    tasks: tuple[str, ...] = ("summarization", "translation", "retrieval", "perplexity")
    # names of `eval.caches.CACHES`; `all` is every one
    caches: tuple[str, ...] = ("dynamic", "paged", "paged-int8", "paged-int4")
    # samples of each task; windows of `perplexity` and texts of `fidelity` count for eight. With few, windows
    # and the contexts of `retrieval` are shorter, unless they were asked for. Six can tell two caches apart.
    limit: int = 6
    batch_size: int = 8  # prompts generated together, padded on the left
    max_new_tokens: int | None = None  # tokens generated for each sample; None leaves it to each task
    # lengths in tokens that the tasks `retrieval`, `perplexity` and `latency` look at; None leaves them to
    # each task, as far as the model's context goes
    contexts: tuple[int, ...] | None = None
    # the model's dtype, and therefore the default cache's; `fp32`, `bf16` and `fp16` are understood
    dtype: str = "float32"
    device: str = "auto"  # a torch device, or "auto": CUDA where there is one, else the CPU
    seed: int = 0  # chooses the samples
    # texts for the one task that takes some: a name of `datasets`, or a local file (JSON lines, JSON, CSV,
    # Parquet, text) or folder; None is what ships
    dataset: str | None = None
    dataset_config: str | None = None  # configuration of the data set
    split: str | None = None  # of the data set
    id_column: str | None = None  # names the sample; None numbers them
    input_column: str | None = None  # the text; a dot reaches into nested columns (`translation.de`)
    reference_column: str | None = None  # what answers are scored against
    instruction: str | None = None  # the user's message, with `{input}` where the text goes
    output: str | None = None  # the run folder; None makes `eval/runs/<timestamp>`

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON and YAML write them (tuples as lists)."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}


def resolve(config: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Merge the defaults, the YAML file and the command line (None: not given), in rising precedence.

    Raises:
        UsageError: for an unreadable file, an unknown key, task, cache or dtype, or a wrong value.
    """
    merged = read_yaml(config) if config is not None else {}
    return _validated(merged | {key: value for key, value in overrides.items() if value is not None})


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; a `UsageError` where it cannot be read or holds something else."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
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
    from eval.caches import ALIASES, CACHES
    from eval.tasks import TASKS
    from hf_paged_cache.tools.planner.amounts import SHORT_DTYPES

    settings = dataclasses.replace(
        settings,
        tasks=_expanded("task", settings.tasks, TASKS),
        caches=_expanded("cache", [ALIASES.get(name, name) for name in settings.caches], CACHES),
        dtype=SHORT_DTYPES.get(settings.dtype, settings.dtype),
    )
    check_choice("dtype", settings.dtype, DTYPES)
    takers = [name for name in settings.tasks if TASKS[name].takes_dataset]
    given = [key for key in _DATASET_KEYS if getattr(settings, key) is not None]
    if given and settings.dataset is None:
        raise UsageError(f"{', '.join(given)} says how to read a dataset, and no dataset is given")
    if settings.dataset is not None and len(takers) != 1:
        raise UsageError(
            "a dataset is for one task, and the chosen tasks that take one are: "
            f"{', '.join(takers) or 'none'}; name one with --tasks"
        )
    if settings.instruction is not None and not TASKS[takers[0]].needs_chat:
        raise UsageError(f"an instruction is for tasks that chat with the model, and {takers[0]} does not")
    return settings


def _expanded(kind: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    checked = dict.fromkeys(check_choice(kind, name, (*known, ALL)) for name in names)
    return tuple(known if ALL in checked else checked)


def _convert(key: str, value: Any) -> Any:
    if value is None and getattr(Settings, key) is None:  # the default
        return None
    if key in ("tasks", "caches"):
        return _names(key, value)
    if key == "contexts":
        parts = (int(p) if isinstance(p, str) and p.strip().isdecimal() else p for p in _parts(key, value))
        return tuple(sorted({_integer(key, part, 1) for part in parts}))
    if key in _MINIMUM:
        return _integer(key, value, _MINIMUM[key])
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} must be a non-empty string, got {value!r}")
    return value


def _integer(key: str, value: Any, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UsageError(f"{key} must be an integer of at least {minimum}, got {value!r}")
    return value


def _parts(key: str, value: Any) -> list[Any]:
    parts = value.split(",") if isinstance(value, str) else value
    parts = [parts] if isinstance(parts, int) and not isinstance(parts, bool) else parts
    if not isinstance(parts, list | tuple) or not parts:
        raise UsageError(f"{key} must be a list or one comma-separated string, got {value!r}")
    return list(parts)


def _names(key: str, value: Any) -> tuple[str, ...]:
    names = _parts(key, value)
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{key} must be a list of names or one comma-separated string, got {value!r}")
    cleaned = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    if not cleaned:
        raise UsageError(f"{key} must name at least one of them, got {value!r}")
    return cleaned
