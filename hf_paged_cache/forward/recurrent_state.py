"""What a cache holds outside blocks, in objects of the host's own classes, kept in step with the blocks.

Recurrent states and the inputs of convolutions are overwritten by every forward. A forward that fails
halfway has moved some of them on and others not, so they are saved when a forward begins, and put back if it
turns out not to have come to its end. Nobody says that a forward begins or ends; a look at the stack tells,
whenever the cache is used (see `calls`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError
from hf_paged_cache.host import architectures

from .caller import check_reading
from .token_ids import UncountedText
from .undo import Undo

if TYPE_CHECKING:
    from hf_paged_cache.store.holder import Restore

    from .state import CacheState


class HostParts:
    """The objects of the host in one cache: whole layers, and parts of layers that are paged otherwise.

    Args:
        state: What the paged layers of the cache share.
        parts: Layer index -> object. All of them empty.
        fixed: Layers that a forward need not touch: they hold something else than the tokens, or nothing.
    """

    def __init__(self, state: CacheState, parts: Mapping[int, Any], fixed: Collection[int]) -> None:
        self.fixed = set(fixed)
        self._state = state
        self._parts = dict(parts)
        self._text = UncountedText()
        self._empty = Undo()
        self._save_into(self._empty)

    def __bool__(self) -> bool:
        """Whether anything outside blocks has to be kept in step."""
        return bool(self._parts) or self._state.traits.has_outside_state

    @property
    def parts(self) -> list[Any]:
        """The objects, in the order of their layers."""
        return list(self._parts.values())

    def empty_parts(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Layer index -> object, and the attributes that it has while it holds nothing."""
        return {index: (part, self._empty.kept(part)) for index, part in self._parts.items()}

    def settled(self) -> dict[str, Any]:
        """The attributes of this object itself when no forward is known to it, as after `reset`."""
        return {"_text": UncountedText()}

    @property
    def indexer(self) -> Any:
        """The first object that holds the keys of an indexer, or None."""
        return next((part for part in self._parts.values() if hasattr(part, "indexer_keys")), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_bytes_of(vars(part)) for part in self._parts.values())

    @property
    def batch(self) -> int:
        """Rows that the states of linear attention and convolutions have; 0 if there are none yet."""
        tensors = [x for part in self._parts.values() for x in _row_tensors(part)]
        return tensors[0].shape[0] if tensors else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest layer that counts them."""
        return max((_length(part) or 0 for part in self._parts.values()), default=0)

    # --- forwards -------------------------------------------------------------------------------------------

    def enter(self, write: Hashable | None = None) -> None:
        """Note that the cache is used; if that is the first thing a forward does, save what it will change.

        Args:
            write: See `Step.goes_on`.
        """
        if torch.compiler.is_compiling():
            self._enter_between_graphs(write)
        elif (call := self._state.next_call(write)) is not None:
            check_reading(call, is_warm=self.batch > 0)
            is_counted = bool(self._state.rows.tokens)
            self._text.check(call, is_warm=bool(self.batch), is_counted=is_counted)
            undo = Undo()
            self._save_into(undo)
            undo.save(self._text, clone=False)
            self._state.open_step(call, write, undo)
            self._text.begin(call, is_warm=bool(self.batch), is_counted=is_counted)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is
    def _enter_between_graphs(self, write: Hashable | None) -> None:
        """What a graph changes in these objects could not be put back if the forward fails."""
        self.enter(write)

    def can(self, layer_idx: int, method: str) -> bool:
        """Whether a layer has a part with a method; where it has none, the host's own refusal is right."""
        return hasattr(self._parts.get(layer_idx), method)

    def check_begun(self, layer_idx: int, state_idx: int) -> None:
        """Raise CacheMismatchError if a convolution begins only now, and the cache holds a history."""
        part = self._parts.get(layer_idx)
        if part is None or not architectures.is_linear(part):
            return  # which the host says in its own words
        step = self._state.step
        held = self._state.rows.end if step is None else step.start
        if held and not part.has_previous_state[state_idx]:
            raise CacheMismatchError(
                f"layer {layer_idx} has no state yet, and the cache holds {held} tokens per row: "
                "the forward that brought them was interrupted. Call `cache.reset()`, and start anew"
            )

    def _save_into(self, undo: Undo) -> None:
        for part in self._parts.values():
            undo.save(part, clone=architectures.is_linear(part))

    # --- between forwards -----------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows; their number may change."""
        index = torch.tensor(rows)
        self._text.select(rows)
        for part in self._parts.values():
            if hasattr(part, "indexer_keys"):
                _select_in_indexer(part, index)
            else:
                part.reorder_cache(index)

    def save(self) -> Restore:
        """Remember what they are, for a change that replaces tensors. Returns what puts it back."""
        undo = Undo()
        for part in (self._text, *self.parts):
            undo.save(part, clone=False)
        return partial(self._put_back, self._text, undo)

    def _put_back(self, text: UncountedText, undo: Undo) -> None:
        self._text = text
        undo.put_back()

    def check_crop(self, tokens_to_remove: int, *, is_all: bool) -> None:
        """Raise what `crop` would raise; changes nothing."""
        if is_all or not tokens_to_remove:
            return
        for index, part in self._parts.items():
            if architectures.is_linear(part):
                self._check_linear_crop(index, part)
            elif index not in self.fixed and not architectures.can_crop(part):
                raise PagedCacheError(_cannot_crop(index, f"a {type(part).__name__}, has no way back"))
            elif _is_past_window(part):
                raise PagedCacheError(_must_record(index))

    def crop(self, tokens_to_remove: int, *, is_all: bool) -> None:
        """Forget the last tokens of every row.

        Args:
            tokens_to_remove: How many; 0 lets go of what was only kept for this crop.
            is_all: Whether nothing is left.
        """
        if is_all:
            self.clear()
            return
        for index, part in self._parts.items():
            if architectures.is_linear(part):
                _crop_convolutions(part, tokens_to_remove)
            elif hasattr(part, "indexer_keys"):
                _crop_indexer(part, tokens_to_remove)
            elif index not in self.fixed and (tokens_to_remove or getattr(part, "record_past", False)):
                part.crop(-tokens_to_remove)

    def clear(self) -> None:
        """Make all of them as they were at first. What the host's own `reset` leaves varies by version."""
        self._empty.put_back()
        self._text = UncountedText()

    def _check_linear_crop(self, index: int, part: Any) -> None:
        if any(part.is_recurrent_states_initialized.values()):
            raise PagedCacheError(_cannot_crop(index, "a recurrent state, does not say what it was before"))
        if any(part.is_conv_states_initialized.values()) and not part.record_past:
            raise PagedCacheError(_must_record(index))


def _cannot_crop(index: int, what: str) -> str:
    return (
        f"cannot crop: layer {index}, {what}; `cache.reset()` and feed the shorter prompt, or crop everything"
    )


def _must_record(index: int) -> str:
    return (
        f"cannot crop: layer {index} no longer holds what the shorter length needs. Call "
        "`cache.activate_past_recording()` before the forwards that may be rolled back"
    )


def _is_past_window(part: Any) -> bool:
    """Whether a window layer has dropped tokens for good."""
    is_cut = getattr(part, "is_sliding", False) and not part.record_past
    return is_cut and part.get_seq_length() >= part.sliding_window


def _crop_convolutions(part: Any, tokens_to_remove: int) -> None:
    if part.record_past:
        for key, states in part.conv_states.items():
            if states is not None:
                end = states.shape[-1] - tokens_to_remove
                part.conv_states[key] = states[..., max(0, end - part.conv_kernel_size[key]) : end]


def _select_in_indexer(part: Any, rows: torch.Tensor) -> None:
    # The host's own methods look at keys that are empty here, and forget positions up to transformers 5.17.
    for name, dim in (("indexer_keys", 0), ("indexer_position_ids", 1)):
        tensor = getattr(part, name, None)
        if tensor is not None:
            setattr(part, name, tensor.index_select(dim, rows.to(tensor.device)))


def _crop_indexer(part: Any, tokens_to_remove: int) -> None:
    if not tokens_to_remove:
        return
    if part.indexer_keys is not None:
        part.indexer_keys = part.indexer_keys[:, :-tokens_to_remove]
    if getattr(part, "indexer_position_ids", None) is not None:
        part.indexer_position_ids = part.indexer_position_ids[..., :-tokens_to_remove]


def _length(part: Any) -> int | None:
    """Tokens that an object has seen; None if it does not count them."""
    if hasattr(part, "indexer_keys"):
        return 0 if part.indexer_keys is None else int(part.indexer_keys.shape[1])
    return None if architectures.is_linear(part) else int(part.get_seq_length())


def _row_tensors(part: Any) -> list[torch.Tensor]:
    """The tensors of a part whose first dimension are the rows."""
    if architectures.is_linear(part):
        found = [*part.conv_states.values(), *part.recurrent_states.values()]
    else:
        found = [getattr(part, name, None) for name in ("indexer_keys", "keys")]
    return [x for x in found if isinstance(x, torch.Tensor) and x.numel()]


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_bytes_of(item) for item in value.values())
    return 0
