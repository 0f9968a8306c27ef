"""Takes objects back to what they were when they were last saved."""

from __future__ import annotations

from typing import Any

import torch


class Undo:
    """Remembers the attributes of objects, so that what is done to them can be taken back.

    Dicts are copied as far as they go. Tensors are either cloned, or held as they are, which costs nothing
    and is right for an object that never writes into a tensor but replaces it. All else is held as it is.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Any, dict[str, Any], bool]] = {}  # with `clone`

    def save(self, owner: Any, *, clone: bool = True) -> None:
        """Remember what an object holds now, its tensors cloned. Saving it once more changes nothing."""
        if id(owner) not in self._saved:
            self._saved[id(owner)] = owner, _copied(vars(owner), clone), clone

    def kept(self, owner: Any) -> dict[str, Any]:
        """The attributes that an object had when it was saved."""
        _, held, clone = self._saved[id(owner)]
        attributes: dict[str, Any] = _copied(held, clone)
        return attributes

    def restore(self) -> None:
        """Put every object back as it was when it was saved, and forget them."""
        self.put_back()
        self._saved = {}

    def put_back(self) -> None:
        """Put every object back as it was when it was saved, so that this can be done again."""
        for owner, _, _ in self._saved.values():
            attributes = self.kept(owner)
            for name in vars(owner).keys() - attributes.keys():
                delattr(owner, name)
            vars(owner).update(attributes)

    def __getstate__(self) -> list[tuple[Any, dict[str, Any], bool]]:
        return list(self._saved.values())

    def __setstate__(self, state: list[tuple[Any, dict[str, Any], bool]]) -> None:
        self._saved = {id(saved[0]): saved for saved in state}


def _copied(value: Any, clone: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if clone else value
    if isinstance(value, dict):
        return {key: _copied(item, clone) for key, item in value.items()}
    return value
