"""Takes objects back to what they were when they were last saved."""

from __future__ import annotations

from typing import Any

import torch


class Undo:
    """Remembers the attributes of objects: dicts are copied as far as they go, all else is held as it is.

    Tensors are cloned, or held too, which is right for an object that only ever replaces them.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Any, dict[str, Any], bool]] = []  # owner, attributes, `clone`

    def save(self, owner: Any, *, clone: bool = True) -> None:
        """Remember what an object holds now, its tensors cloned. Each is saved once."""
        self._saved.append((owner, _copied(vars(owner), clone), clone))

    def kept(self, owner: Any) -> dict[str, Any]:
        """The attributes that an object had when it was saved."""
        held, clone = next(saved[1:] for saved in self._saved if saved[0] is owner)
        attributes: dict[str, Any] = _copied(held, clone)
        return attributes

    def restore(self) -> None:
        """Put every object back as it was when it was saved, and forget them."""
        self.put_back()
        self._saved = []

    def put_back(self) -> None:
        """Put every object back as it was when it was saved, so that this can be done again."""
        for owner, _, _ in self._saved:
            attributes = self.kept(owner)
            for name in vars(owner).keys() - attributes.keys():
                delattr(owner, name)
            vars(owner).update(attributes)


def _copied(value: Any, clone: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if clone else value
    if isinstance(value, dict):
        return {key: _copied(item, clone) for key, item in value.items()}
    return value
