"""Rows that begin with padding: what of them is not stored, and at which positions their tokens stand.

A batch of prompts is padded on the left, and the mask of every forward hides the padding. It is not stored,
so a later mask must go on hiding it. And there are two ways to count positions:
`generate` counts the tokens that the mask shows, a plain forward without `position_ids` counts padding too.
Each is right by itself; a cache that was filled in one way and is read in the other answers wrong, row by
row, without a sign of it. So positions of padded rows are remembered, and have to go on as they began.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from .calls import ModelCall
from .errors import CacheMismatchError

_HIDDEN = -1e4
"""What an additive mask adds to a score that is not to count, or less."""


class Run(NamedTuple):
    """Tokens of a row, neighbours in place and position.

    Attributes:
        start: First token.
        end: One past the last token.
        position: Of the first token.
    """

    start: int
    end: int
    position: int

    @property
    def next_position(self) -> int:
        """Where the token after these stands."""
        return self.position + self.end - self.start


class NotedMask(NamedTuple):
    """What the mask function told of a forward.

    Attributes:
        start: Tokens per row before it.
        new_tokens: That it brings.
        mask: `[batch, tokens]`, nonzero where a token is real; None if all are.
    """

    start: int
    new_tokens: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Forward:
    """What is known of a forward before its K and V are stored.

    Attributes:
        start: Tokens per row that are cached.
        end: Tokens per row with the new ones.
        batch: Rows.
        mask: `[batch, end or more]`, nonzero where a token is real; None if all are, or nothing is known.
        is_noted: Whether that came from the mask function.
        device: Where the model computes.
        call: What the stack says of it.
    """

    start: int
    end: int
    batch: int
    mask: torch.Tensor | None
    is_noted: bool
    device: torch.device
    call: ModelCall

    @classmethod
    def of(cls, noted: NotedMask | None, start: int, key_states: torch.Tensor, call: ModelCall) -> Forward:
        """The forward that brings K `[batch, kv_heads, new tokens, head_dim]` after `start` tokens.

        Its mask is what was noted, or what the stack shows.
        """
        batch, _, new_tokens, _ = key_states.shape
        is_noted = noted is not None and noted[:2] == (start, new_tokens)
        mask = noted.mask if noted is not None and is_noted else None
        if not is_noted and call.attention_mask is not None and call.attention_mask.dim() == 2:
            mask = call.attention_mask
        if mask is not None and (mask.shape[0] != batch or mask.shape[1] < start + new_tokens):
            mask = None
        return cls(start, start + new_tokens, batch, mask, is_noted, key_states.device, call)

    @property
    def new_tokens(self) -> int:
        """That it brings to every row."""
        return self.end - self.start

    def real(self) -> torch.Tensor:
        """Which new tokens are real, boolean `[batch, new tokens]` on the CPU."""
        if self.mask is None:
            return torch.ones(self.batch, self.new_tokens, dtype=torch.bool)
        return self.mask[:, self.start : self.end].to("cpu", torch.bool)

    def positions(self) -> torch.Tensor | None:
        """Where they stand, `[batch, new tokens]` on the CPU; None if the model does not say it like this."""
        given = self.call.position_ids
        if given is None or given.dim() != 2 or given.shape[1] != self.new_tokens:
            return None
        return given.expand(self.batch, -1).cpu() if given.shape[0] in (1, self.batch) else None


@dataclass(frozen=True)
class Padding:
    """What a cache remembers of rows that begin with padding. Never changed, but replaced.

    Attributes:
        tokens: Of every row, how many of its first tokens are padding; empty if no row begins with any.
        is_left_out: Whether they have no K and V; if not, all of them are stored.
        runs: Of every row, its real tokens; empty if positions are not known.
        end: Tokens per row that `runs` tell of.
        was_generating: Whether `generate` brought them.
        is_settled: Whether the first forward after the fill, or after rows were changed, has been looked at.
    """

    tokens: tuple[int, ...] = ()
    is_left_out: bool = False
    runs: tuple[tuple[Run, ...], ...] = ()
    end: int = 0
    was_generating: bool = field(default=False, compare=False)
    is_settled: bool = field(default=False, compare=False)

    @property
    def unstored(self) -> tuple[int, ...]:
        """Of every row, how many of its first tokens are not stored; empty if all are."""
        return self.tokens if self.is_left_out else ()

    def after(self, forward: Forward, *, leaves_out: bool) -> Padding:
        """What is to be remembered when a forward is stored.

        Args:
            forward: It.
            leaves_out: Whether padding need not be stored. Where the stack alone tells of the mask, it is.

        Raises:
            CacheMismatchError: Positions of a padded row do not go on where they ended, or the mask shows
                what is not stored.
        """
        if not forward.start:
            tokens = () if forward.mask is None else _leading(forward.real())
            if not any(tokens):
                return NO_PADDING
            is_left_out = leaves_out and forward.is_noted
            known = Padding(tokens, is_left_out, ((),) * forward.batch)
        elif self.tokens:
            if not forward.is_noted:
                self._check_call(forward)
            known = replace(self._up_to(forward.start), tokens=self._longer(forward))
        else:
            return self
        if forward.start and not self._is_worth_waiting(forward.device, forward.new_tokens, forward.call):
            return known._up_to(forward.end)
        seen = known._at_positions(forward)
        return replace(seen, was_generating=forward.call.is_generating, is_settled=forward.start > 0)

    def check_mask(self, noted: NotedMask, call: ModelCall) -> None:
        """Raise CacheMismatchError if the mask of a forward shows what is not stored.

        Where the answer lies on a GPU, only forwards are looked at whose positions would be, see `after`.
        """
        if not any(self.unstored):
            return
        mask = noted.mask
        if mask is None:
            raise self._unhidden("came without a mask that hides it")
        if self._is_worth_waiting(mask.device, noted.new_tokens, call):
            self._check_hidden(mask)

    def crop(self, num_tokens: int) -> Padding:
        """For rows that are cut down to their first tokens."""
        if not self.tokens or not num_tokens:
            return NO_PADDING
        return replace(
            self,
            tokens=tuple(min(n, num_tokens) for n in self.tokens),
            runs=tuple(
                tuple(run._replace(end=min(run.end, num_tokens)) for run in runs if run.start < num_tokens)
                for runs in self.runs
            ),
            end=min(self.end, num_tokens),
            is_settled=False,
        )

    def drop(self, start: int, end: int) -> Padding:
        """Without the tokens `[start, end)`, where no key knows its position."""
        tokens = tuple(n - min(n, end) + min(n, start) for n in self.tokens)
        return Padding(tokens, self.is_left_out) if any(tokens) else NO_PADDING

    def mask(self, tokens: int) -> torch.Tensor | None:
        """The mask `[rows, tokens]` that hides what is not stored; None if all is."""
        if not self.unstored:
            return None
        return torch.arange(tokens) >= torch.tensor(self.unstored)[:, None]

    def state_dict(self) -> dict[str, Any]:
        """The same in lists and numbers."""
        return {
            "tokens": list(self.tokens),
            "is_left_out": self.is_left_out,
            "runs": [[list(run) for run in runs] for runs in self.runs],
            "end": self.end,
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> Padding:
        """What `state_dict` was made of."""
        runs = tuple(tuple(Run(*run) for run in runs) for runs in saved["runs"])
        return cls(tuple(saved["tokens"]), saved["is_left_out"], runs, saved["end"])

    def reorder(self, rows: Sequence[int]) -> Padding:
        """For rows that become copies of old ones; forgets all if none of those begins with padding."""
        tokens = tuple(self.tokens[row] for row in rows) if self.tokens else ()
        if not any(tokens):
            return NO_PADDING
        runs = tuple(self.runs[row] for row in rows) if self.runs else ()
        return replace(self, tokens=tokens, runs=runs, is_settled=False)

    def _check_call(self, forward: Forward) -> None:
        """Look at the mask of a forward that is known from the stack alone."""
        call, mask = forward.call, forward.call.attention_mask
        if not any(self.unstored) or call.forward.frame is None:
            return
        if call.is_without_mask:
            raise self._unhidden("came without a mask that hides it")
        if mask is None or mask.shape[-1] < forward.end:
            return
        if mask.dim() == 4:  # the newest query is no padding
            newest = mask[:, :, -1]
            mask = newest.any(1) if mask.dtype == torch.bool else (newest > _HIDDEN).any(1)
        if mask.dim() == 2 and self._is_worth_waiting(forward.device, forward.new_tokens, call):
            self._check_hidden(mask)

    def _is_worth_waiting(self, device: torch.device, new_tokens: int, call: ModelCall) -> bool:
        """Whether to look at what a forward brings.

        Always on a CPU. A decode step must not make the host wait for a GPU, so there one token after others
        is taken to go on as they did.
        """
        return (
            device.type == "cpu"
            or not self.is_settled
            or new_tokens > 1
            or call.is_generating != self.was_generating
        )

    def _longer(self, forward: Forward) -> tuple[int, ...]:
        """Rows that are padding so far may go on with it."""
        if forward.start not in self.tokens:
            return self.tokens
        more = _leading(forward.real())
        rows = zip(self.tokens, more, strict=True)
        return tuple(n + m if n == forward.start else n for n, m in rows)

    def _up_to(self, start: int) -> Padding:
        """With tokens that were not looked at: they went on as those before."""
        if self.end >= start:
            return self
        runs = tuple(_extended(runs, self.end, start) for runs in self.runs)
        return replace(self, runs=runs, end=start)

    def _at_positions(self, forward: Forward) -> Padding:
        positions = forward.positions() if self.runs else None
        if positions is None:
            # A first prompt without positions of this kind says that there is nothing to compare.
            return self._up_to(forward.end) if forward.start else replace(self, runs=(), end=forward.end)
        found = _runs(forward.real(), positions, forward.start)
        for row, (old, new) in enumerate(zip(self.runs, found, strict=True)):
            if self.tokens[row] and old and new and new[0].position != old[-1].next_position:
                raise _discontinuous(row, old[-1], new[0], forward.call.is_generating)
        runs = tuple(_joined(old, new) for old, new in zip(self.runs, found, strict=True))
        return replace(self, runs=runs, end=forward.end)

    def _check_hidden(self, mask: torch.Tensor) -> None:
        shown = mask[:, : max(self.unstored)].to("cpu", torch.bool)
        places = torch.arange(shown.shape[1])
        if shown.shape[0] != len(self.unstored) and 1 not in (shown.shape[0], len(self.unstored)):
            return  # which is refused elsewhere; copies of one row are not
        if bool((shown & (places < torch.tensor(self.unstored)[:, None])).any()):
            raise self._unhidden("has a mask that shows some of it")

    def _unhidden(self, what: str) -> CacheMismatchError:
        rows = [row for row, count in enumerate(self.unstored) if count]
        return CacheMismatchError(
            f"attention_mask: rows {rows} begin with padding, which the first forward's mask hid, so it is "
            f"not stored; this forward {what}. Pass the whole mask as before (0 for the first "
            f"{[self.tokens[row] for row in rows]} tokens of these rows), or `cache.reset()`"
        )


NO_PADDING = Padding()


def _leading(real: torch.Tensor) -> tuple[int, ...]:
    """Tokens before the first real one, of every row of `[batch, tokens]`."""
    firsts = torch.where(real.any(1), real.to(torch.uint8).argmax(1), real.shape[1])
    return tuple(firsts.tolist())


def _runs(real: torch.Tensor, positions: torch.Tensor, start: int) -> list[list[Run]]:
    """The runs of every row of new tokens, of which the first is token `start`."""
    goes_on = real[:, 1:] & real[:, :-1] & (positions[:, 1:] == positions[:, :-1] + 1)
    edge = torch.zeros(real.shape[0], 1, dtype=torch.bool)
    firsts = (real & ~torch.cat((edge, goes_on), 1)).nonzero().tolist()
    lasts = (real & ~torch.cat((goes_on, edge), 1)).nonzero().tolist()
    found: list[list[Run]] = [[] for _ in range(real.shape[0])]
    for (row, first), (_, last) in zip(firsts, lasts, strict=True):
        found[row].append(Run(start + first, start + last + 1, int(positions[row, first])))
    return found


def _joined(old: tuple[Run, ...], new: list[Run]) -> tuple[Run, ...]:
    if old and new and old[-1].end == new[0].start and old[-1].next_position == new[0].position:
        return (*old[:-1], old[-1]._replace(end=new[0].end), *new[1:])
    return (*old, *new)


def _extended(runs: tuple[Run, ...], start: int, end: int) -> tuple[Run, ...]:
    return _joined(runs, [Run(start, end, runs[-1].next_position)]) if runs else runs


def _discontinuous(row: int, last: Run, first: Run, is_generating: bool) -> CacheMismatchError:
    now = "`generate` counts" if is_generating else "the new ones count"
    return CacheMismatchError(
        f"position_ids: row {row} begins with padding, and its last cached token stands at position "
        f"{last.next_position - 1}, so the next one stands at {last.next_position}; got {first.position}. "
        f"Either those cached count the padding and {now} real tokens only, or the other way round: a "
        "plain forward counts all tokens unless it is given `position_ids=(attention_mask.cumsum(-1) - 1)"
        ".clamp(min=0)` (of the new tokens), as `generate` does. Give them to every forward of a padded "
        "batch; `cache.reset()` starts anew"
    )
