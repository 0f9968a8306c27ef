"""Takes objects back to what they were when they were last saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class _Tensor:
    """A tensor that an object held.

    Attributes:
        tensor: The tensor itself.
        kept: What it contained, if it may be written into.
        version: Count of writes into it; None if torch does not count them.
    """

    tensor: torch.Tensor
    kept: torch.Tensor
    version: int | None


class Undo:
    """Remembers the attributes of objects, so that what is done to them can be taken back.

    Dicts are copied as far as they go. Tensors are either cloned, or held as they are, which costs nothing
    and is right for an object that never writes into a tensor but replaces it. All else is held as it is.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Any, dict[str, Any]]] = {}

    @property
    def touched(self) -> list[Any]:
        """The objects that were saved and not put back since, the first one first."""
        return [part for part, _ in self._saved.values()]

    def save(self, part: Any, *, clone: bool = True) -> None:
        """Remember what an object holds now. Saving it once more changes nothing.

        Args:
            part: Any object with a `__dict__`.
            clone: Clone its tensors; False where they are only ever replaced.
        """
        if id(part) not in self._saved:
            self._saved[id(part)] = part, _held(vars(part), clone)

    def kept(self, part: Any) -> dict[str, Any]:
        """The attributes that an object had when it was saved."""
        _, held = self._saved[id(part)]
        return {name: _unpacked(value) for name, value in held.items()}

    def changed(self, part: Any) -> frozenset[tuple[Any, ...]]:
        """Where an object differs from what was saved of it: names of attributes, with keys inside dicts.

        Only tensors count, and what has become one: those replaced, and those written into.
        """
        _, held = self._saved.get(id(part), (part, {}))
        return frozenset(_differences(held, vars(part), ()))

    def restore(self) -> None:
        """Put every object back as it was when it was saved, and forget them."""
        for part, held in self._saved.values():
            attributes = _unpacked(held)
            vars(part).clear()
            vars(part).update(attributes)
        self.clear()

    def clear(self) -> None:
        """Let the objects stay as they are."""
        self._saved = {}

    def __getstate__(self) -> list[tuple[Any, dict[str, Any]]]:
        return list(self._saved.values())

    def __setstate__(self, state: list[tuple[Any, dict[str, Any]]]) -> None:
        self._saved = {id(part): (part, held) for part, held in state}


def _held(value: Any, clone: bool) -> Any:
    if isinstance(value, torch.Tensor):
        version = None if value.is_inference() else value._version
        return _Tensor(value, value.detach().clone() if clone else value, version)
    if isinstance(value, dict):
        return {key: _held(item, clone) for key, item in value.items()}
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return value.kept
    if isinstance(value, dict):
        return {key: _unpacked(item) for key, item in value.items()}
    return value


def _differences(held: Any, now: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(now, dict):
        before = held if isinstance(held, dict) else {}
        for key, item in now.items():
            yield from _differences(before.get(key), item, (*path, key))
    elif isinstance(now, torch.Tensor) and (not isinstance(held, _Tensor) or _is_written(held, now)):
        yield path


def _is_written(held: _Tensor, now: torch.Tensor) -> bool:
    if now is not held.tensor:
        return True
    return not torch.equal(held.kept, now) if held.version is None else held.version != now._version
