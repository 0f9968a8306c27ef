"""Recurrent states: what lies outside blocks, in objects of the host, kept in step with the blocks.

Recurrent states and the inputs of convolutions are overwritten by every forward. A forward that fails
halfway has moved some of them on and others not, so they are saved when a forward begins, and put back if it
turns out not to have come to its end.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hf_paged_cache.errors import CacheMismatchError, PagedCacheError
from hf_paged_cache.host import architectures
from hf_paged_cache.host.lazy_tensor import plain_tensors

from .ownership import check_reading
from .token_ids import UncountedText
from .undo import Undo

if TYPE_CHECKING:
    from hf_paged_cache.store.window_store import Restore

    from .state import CacheState


class HostStates:
    """The objects of the host in one cache: whole layers, and what layers over blocks have beside them."""

    def __init__(self, state: CacheState, hosts: Mapping[int, Any], fixed: Collection[int]) -> None:
        self.fixed = set(fixed)  # layers that hold something else than the tokens of a forward, or nothing
        self._state = state
        self._hosts = dict(hosts)  # layer index -> object, empty yet
        self._text = UncountedText()
        self._empty = Undo()
        self._save_into(self._empty)

    def __bool__(self) -> bool:
        """Whether anything outside blocks has to be kept in step."""
        return bool(self._hosts) or self._state.traits.has_outside_state

    @property
    def all(self) -> list[Any]:
        """The objects, in the order of their layers."""
        return list(self._hosts.values())

    def with_empty(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        """Layer index -> object, and the attributes that it has while it holds nothing."""
        return {index: (host, self._empty.kept(host)) for index, host in self._hosts.items()}

    def settled(self) -> dict[str, Any]:
        """The attributes of this object itself when no forward is known to it, as after `reset`."""
        return {"_text": UncountedText()}

    @property
    def indexer(self) -> Any:
        """The first object that holds the keys of an indexer, or None."""
        return next((host for host in self.all if hasattr(host, "indexer_keys")), None)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in plain_tensors([vars(host) for host in self.all]))

    @property
    def batch(self) -> int:
        """Rows that the states of linear attention and convolutions have; 0 if there are none yet."""
        return next((states.shape[0] for host in self.all for states in _by_row(host)), 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest layer that counts them."""
        return max(map(_length, self.all), default=0)

    def enter(self, write: Hashable | None = None) -> None:
        """Note a use (`Step.goes_on`); if it is the first of a forward, save what that will change."""
        if torch.compiler.is_compiling():
            self._enter_between_graphs(write)
        elif (call := self._state.next_call(write)) is not None:
            is_warm, is_counted = self.batch > 0, bool(self._state.rows.tokens)
            check_reading(call, is_warm=is_warm)
            if is_warm and not is_counted:
                self._text.check(call)
            undo = Undo()
            self._save_into(undo)
            undo.save(self._text, clone=False)
            self._state.open_step(call, write, undo)
            if not is_counted:
                self._text.begin(call, is_warm=is_warm)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's is
    def _enter_between_graphs(self, write: Hashable | None) -> None:
        """What a graph changes in these objects could not be put back if the forward fails."""
        self.enter(write)

    def can(self, layer_idx: int, method: str) -> bool:
        """Whether a layer has an object with a method; where it has none, the host's own refusal is right."""
        return hasattr(self._hosts.get(layer_idx), method)

    def check_begun(self, layer_idx: int, state_idx: int) -> None:
        """Raise CacheMismatchError if a convolution begins only now, and the cache holds a history."""
        host = self._hosts.get(layer_idx)
        if host is None or not architectures.is_linear(host):
            return  # which the host says in its own words
        step = self._state.step
        held = self._state.rows.end if step is None else step.start
        if held and not host.has_previous_state[state_idx]:
            raise CacheMismatchError(
                f"layer {layer_idx} has no state yet, and the cache holds {held} tokens per row: "
                "the forward that brought them was interrupted. Call `cache.reset()`, and start anew"
            )

    def _save_into(self, undo: Undo) -> None:
        for host in self.all:
            undo.save(host, clone=architectures.is_linear(host))

    def select(self, rows: Sequence[int]) -> None:
        """Make the rows copies of the given old rows; their number may change."""
        index = torch.tensor(rows)
        self._text.select(rows)
        for host in self.all:
            if not hasattr(host, "indexer_keys"):
                host.reorder_cache(index)
                continue
            # Its own methods look at keys that are empty here, and forget positions up to transformers 5.17.
            for name, dim in (("indexer_keys", 0), ("indexer_position_ids", 1)):
                if (tensor := getattr(host, name, None)) is not None:
                    setattr(host, name, tensor.index_select(dim, index.to(tensor.device)))

    def save(self) -> Restore:
        """Remember what they are, for a change that replaces tensors. Returns what puts it back."""
        text, undo = self._text, Undo()
        for each in (text, *self.all):
            undo.save(each, clone=False)

        def restore() -> None:
            self._text = text
            undo.put_back()

        return restore

    def check_crop(self, tokens_to_remove: int, *, is_all: bool) -> None:
        """Raise what `crop` would raise; changes nothing."""
        if is_all or not tokens_to_remove:
            return
        for index, host in self._hosts.items():
            if architectures.is_linear(host):
                if any(host.is_recurrent_states_initialized.values()):
                    raise _cannot_crop(index, "a recurrent state, does not say what it was before")
                if any(host.is_conv_states_initialized.values()) and not host.record_past:
                    raise _must_record(index)
            elif index not in self.fixed and not architectures.can_crop(host):
                raise _cannot_crop(index, f"a {type(host).__name__}, has no way back")
            elif (
                getattr(host, "is_sliding", False)
                and not host.record_past
                and host.get_seq_length() >= host.sliding_window
            ):
                raise _must_record(index)

    def crop(self, tokens_to_remove: int, *, is_all: bool) -> None:
        """Forget the last tokens of every row, or all; 0 lets go of what was only kept for this crop."""
        if is_all:
            self.clear()
            return
        for index, host in self._hosts.items():
            if architectures.is_linear(host):
                _crop_convolutions(host, tokens_to_remove)
            elif hasattr(host, "indexer_keys"):
                _crop_indexer(host, tokens_to_remove)
            elif index not in self.fixed and (tokens_to_remove or getattr(host, "record_past", False)):
                host.crop(-tokens_to_remove)

    def clear(self) -> None:
        """Make all of them as they were at first. What the host's own `reset` leaves varies by version."""
        self._empty.put_back()
        self._text = UncountedText()


def _cannot_crop(index: int, what: str) -> PagedCacheError:
    return PagedCacheError(
        f"cannot crop: layer {index}, {what}; `cache.reset()` and feed the shorter prompt, or crop everything"
    )


def _must_record(index: int) -> PagedCacheError:
    return PagedCacheError(
        f"cannot crop: layer {index} no longer holds what the shorter length needs. Call "
        "`cache.activate_past_recording()` before the forwards that may be rolled back"
    )


def _crop_convolutions(host: Any, tokens_to_remove: int) -> None:
    for key, states in host.conv_states.items() if host.record_past else ():
        if states is not None:
            end = states.shape[-1] - tokens_to_remove
            host.conv_states[key] = states[..., max(0, end - host.conv_kernel_size[key]) : end]


def _crop_indexer(host: Any, tokens_to_remove: int) -> None:
    if tokens_to_remove and host.indexer_keys is not None:
        host.indexer_keys = host.indexer_keys[:, :-tokens_to_remove]
    if tokens_to_remove and getattr(host, "indexer_position_ids", None) is not None:
        host.indexer_position_ids = host.indexer_position_ids[..., :-tokens_to_remove]


def _length(host: Any) -> int:
    """Tokens that an object has seen; 0 if it does not count them."""
    if hasattr(host, "indexer_keys"):
        return 0 if host.indexer_keys is None else int(host.indexer_keys.shape[1])
    return 0 if architectures.is_linear(host) else int(host.get_seq_length())


def _by_row(host: Any) -> list[torch.Tensor]:
    """The tensors of an object whose first dimension are the rows."""
    if architectures.is_linear(host):
        found = [*host.conv_states.values(), *host.recurrent_states.values()]
    else:
        found = [getattr(host, name, None) for name in ("indexer_keys", "keys")]
    return [states for states in found if isinstance(states, torch.Tensor) and states.numel()]
