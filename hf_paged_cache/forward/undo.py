"""Takes objects back to what they were when they were last saved."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class _Kept(NamedTuple):
    """What a tensor of an object contained."""

    tensor: torch.Tensor


class Undo:
    """Remembers the attributes of objects, so that what is done to them can be taken back.

    Dicts are copied as far as they go. Tensors are either cloned, or held as they are, which costs nothing
    and is right for an object that never writes into a tensor but replaces it. All else is held as it is.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Any, dict[str, Any]]] = {}

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

    def restore(self) -> None:
        """Put every object back as it was when it was saved, and forget them."""
        self.put_back()
        self.clear()

    def put_back(self) -> None:
        """Put every object back as it was when it was saved, so that this can be done again."""
        for part, held in self._saved.values():
            attributes = _unpacked(held)
            for name in vars(part).keys() - attributes.keys():
                delattr(part, name)
            vars(part).update(attributes)

    def clear(self) -> None:
        """Let the objects stay as they are."""
        self._saved = {}

    def __getstate__(self) -> list[tuple[Any, dict[str, Any]]]:
        return list(self._saved.values())

    def __setstate__(self, state: list[tuple[Any, dict[str, Any]]]) -> None:
        self._saved = {id(part): (part, held) for part, held in state}


def _held(value: Any, clone: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return _Kept(value.detach().clone()) if clone else value
    if isinstance(value, dict):
        return {key: _held(item, clone) for key, item in value.items()}
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Kept):
        return value.tensor.clone()
    if isinstance(value, dict):
        return {key: _unpacked(item) for key, item in value.items()}
    return value
