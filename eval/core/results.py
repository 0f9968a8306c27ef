"""The format of all results: a JSON object of `environment`, `settings` and `results`, tables of rows.

```
{"environment": {...},   what it was measured on, see `eval.core.device.describe`
 "settings": {...},      what was asked for
 "results": [{"bench": NAME, "rows": [{...}, ...], ...}, ...],
 ...}                    what only one command has
```
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.core.errors import UsageError

FOLDER = Path(__file__).resolve().parents[1] / "results"  # the results that the README shows


def document(
    environment: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    **more: Any,
) -> dict[str, Any]:
    """The object of a file; `results` are tables, each with a name under `bench` and its `rows`."""
    return {"environment": environment, "settings": settings, **more, "results": list(results)}


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON; it has no word for numbers that are not finite, which become the strings `nan`, `inf`, `-inf`."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read(path: Path) -> dict[str, Any]:
    """The object of a file; a `UsageError` where it cannot be read or is no JSON object."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON object: {error}") from error


def rows(content: Mapping[str, Any], bench: str, **cells: object) -> list[dict[str, Any]]:
    """The rows of a table of a file that have these cells."""
    return [
        row
        for result in content.get("results", [])
        if result.get("bench") == bench
        for row in result["rows"]
        if all(row.get(key) == value for key, value in cells.items())
    ]


def build(kind: Any, value: Any) -> Any:
    """Return `value`, as JSON gives it, as the type `kind`: a dataclass, a container, or a plain one."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        unknown = sorted(value.keys() - hints.keys())
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}")
        return kind(**{name: build(hints[name], item) for name, item in value.items()})
    if value is None:
        return None
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is types.UnionType:
        return build(next(one for one in arguments if one is not types.NoneType), value)
    if typing.get_origin(kind) in (tuple, list):
        return typing.get_origin(kind)(build(arguments[0], item) for item in value)
    return float(value) if kind is float else value
