"""Settings of a run: defaults, overridden by a YAML file, overridden by the command line."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from eval.core.errors import UsageError, check_choice

DTYPES = ("float32", "bfloat16", "float16")
ALL = "all"
MINIMUM = {"limit": 1, "batch_size": 1, "max_new_tokens": 1, "seed": 0}  # of integers, the least value
_DATASET_KEYS = ("dataset_config", "split", "id_column", "input_column", "reference_column", "instruction")


def _setting(default: Any, about: str) -> Any:
    """A field with the help of its option."""
    return dataclasses.field(default=default, metadata={"help": about})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. `resolve` builds and validates it. What is None is left to each task."""

    model: str = _setting("smollm2", "smollm2, a hub id, a folder or a .gguf file.")
    tasks: tuple[str, ...] = _setting(
        ("summarization", "translation", "retrieval", "perplexity"), "Comma-separated names of tasks, or all."
    )
    caches: tuple[str, ...] = _setting(
        ("dynamic", "paged", "paged-int8", "paged-int4"), "Comma-separated names of caches, or all."
    )
    # Windows of `perplexity` and texts of `fidelity` count for eight. With few, windows and the contexts of
    # `retrieval` are shorter, unless they were asked for. Six can tell two caches apart.
    limit: int = _setting(6, "Samples of each task.")
    batch_size: int = _setting(8, "Prompts generated together.")
    max_new_tokens: int | None = _setting(None, "Longest answer; default: the task's.")
    contexts: tuple[int, ...] | None = _setting(
        None, "Comma-separated lengths for retrieval, perplexity and latency."
    )
    # The model's, and therefore the default cache's.
    dtype: str = _setting("float32", "float32, bfloat16, float16; or fp32, bf16, fp16.")
    device: str = _setting("auto", "auto, cpu, cuda, cuda:1, …")
    seed: int = _setting(0, "Chooses the samples.")
    dataset: str | None = _setting(
        None, "cnn_dailymail, xsum, wmt16, any name of `datasets`, or a file; for one task."
    )
    dataset_config: str | None = _setting(None, "Configuration of the data set.")
    split: str | None = _setting(None, "Split of the data set; default: test.")
    id_column: str | None = _setting(None, "Column that names a sample.")
    input_column: str | None = _setting(None, "Column of texts; a dot goes inside.")
    reference_column: str | None = _setting(None, "Column of the right answers.")
    instruction: str | None = _setting(None, "The user's message, with {input} in it.")
    output: str | None = _setting(None, "Run folder; default: eval/runs/<timestamp>.")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON and YAML write them (tuples as lists)."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}


def resolve(config: Path | None, overrides: Mapping[str, Any]) -> Settings:
    """Merge the defaults, the YAML file and the command line (None: not given), in rising precedence.

    An unreadable file, an unknown key, task, cache or dtype, and a wrong value are a `UsageError`.
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
        parts = _parts(key, value)
        if not all(isinstance(name, str) for name in parts):
            raise UsageError(f"{key} must be a list of names or one comma-separated string, got {value!r}")
        names = tuple(dict.fromkeys(name.strip() for name in parts if name.strip()))
        if not names:
            raise UsageError(f"{key} must name at least one of them, got {value!r}")
        return names
    if key == "contexts":
        parts = [int(p) if isinstance(p, str) and p.strip().isdecimal() else p for p in _parts(key, value)]
        return tuple(sorted({_integer(key, part, 1) for part in parts}))
    if key in MINIMUM:
        return _integer(key, value, MINIMUM[key])
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
