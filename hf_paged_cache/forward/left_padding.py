"""Tokens that masks hide: what of them is not stored, and how the rows that have some go on.

A batch of prompts is padded on the left: the mask of every forward hides that, and it is not stored. A row
that ends before the others is filled up, and the mask of the next turn hides the filler, in its midst.
What is cached of a token was computed under the mask of its own forward, so later masks are held against it:

- What a mask has hidden stays hidden, or the forward is refused: tokens behind it were computed without it.
- More may be hidden; new tokens then do not see it, with this cache as with any other. If nothing behind it
  is shown (filler after a row's end) this is the answer of a fresh run.
- There are two ways to count positions: `generate` counts the tokens that the mask shows, a plain forward
  without `position_ids` counts all. Each is right by itself, and a row that was filled in one way and is read
  in the other answers wrong without a sign of it. So the first new token that is shown stands either next to
  the last cached one that is shown, or farther by what is hidden between them, and in the way in which hidden
  tokens before were counted; or the forward is refused. This also refuses a `generate` whose mask hides more
  inside a row than before, as it does where the host takes pad tokens in a text for padding: it would count
  what is shown, and the cached tokens stand where they stood.

Every call is looked at, but not every forward: inside one `generate` the host goes on by itself, and on a GPU
a decode step must not wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hf_paged_cache.errors import CacheMismatchError

from .positions import Run, discontinuous, joined, next_positions, runs_of

if TYPE_CHECKING:
    from hf_paged_cache.host.frames import Frame
    from hf_paged_cache.host.running_forward import ModelCall
    from hf_paged_cache.store.pool_tensors import NewTokens

_HIDDEN = -1e4  # an additive mask adds this or less to a score that is not to count


class NotedMask(NamedTuple):
    """The mask of a forward, as the mask function gets it."""

    start: int  # tokens per row that are cached before it
    new_tokens: int
    mask: torch.Tensor | None  # `[batch, tokens]`, nonzero where a token is real; None if all are


@dataclass(frozen=True, slots=True)
class Forward:
    """What is known of a forward before its K and V are stored."""

    start: int  # tokens per row that are cached
    end: int  # with the new ones
    batch: int
    mask: torch.Tensor | None  # `[batch, end or more]`, nonzero where real; None: all, or unknown
    is_mask_known: bool
    is_noted: bool  # by the mask function
    call: ModelCall

    @classmethod
    def of(cls, noted: NotedMask | None, start: int, new: NewTokens, call: ModelCall) -> Forward:
        """The forward that brings new tokens, with the mask that was noted of it, or that the stack shows."""
        end = start + new.count
        mask, is_known = None, noted is not None or call.is_without_mask
        if noted is not None:
            mask = noted.mask
        elif call.attention_mask is not None and call.attention_mask.dim() == 2:
            mask, is_known = call.attention_mask, True
        if mask is not None and (mask.shape[0] != new.batch or mask.shape[1] < end):
            mask, is_known = None, False
        return cls(start, end, new.batch, mask, is_known, noted is not None, call)

    def real(self) -> torch.Tensor:
        """Which new tokens are real, boolean `[batch, new tokens]` on the CPU."""
        return self.shown(self.start, self.end)

    def shown(self, start: int, end: int) -> torch.Tensor:
        """Which of the tokens `start … end - 1` its mask shows, boolean `[batch, tokens]` on the CPU."""
        if self.mask is None:
            return torch.ones(self.batch, end - start, dtype=torch.bool)
        return self.mask[:, start:end].to("cpu", torch.bool)

    def positions(self) -> torch.Tensor | None:
        """Where they stand, `[batch, new tokens]` on the CPU; None if the model does not say it like this."""
        given, new_tokens = self.call.position_ids, self.end - self.start
        if given is None or given.shape not in ((1, new_tokens), (self.batch, new_tokens)):
            return None
        return given.cpu().expand(self.batch, -1)


@dataclass(frozen=True)
class Padding:
    """What a cache remembers of the tokens that masks have hidden. Never changed, but replaced."""

    tokens: tuple[int, ...] = ()  # leading padding of every row; empty if no row begins with any
    is_left_out: bool = False  # it has no K and V; otherwise all of it is stored
    runs: tuple[tuple[Run, ...], ...] = ()  # what the last mask showed of every row; empty: no mask is known
    end: int = 0  # tokens per row that `runs` tell of; those after it went on as the last of them did
    # The `generate` that goes on by itself now: every row has a token of its, or follows one. None if the
    # last forward that was looked at was a plain one.
    root: Frame | None = field(default=None, compare=False)
    # The first forward after the fill, or after rows were changed, has been looked at.
    is_settled: bool = field(default=False, compare=False)

    @property
    def unstored(self) -> tuple[int, ...]:
        """Of every row, how many of its first tokens are not stored; empty if all are."""
        return self.tokens if self.is_left_out else ()

    def looks_at(
        self, call: ModelCall, new_tokens: int, device: torch.device, *, is_all_shown: bool = False
    ) -> bool:
        """Whether `after` is to look at a later forward, of which mask and positions lie on a device."""
        if not (self.tokens or self.runs):
            return False
        if call.root == self.root:
            return new_tokens > 1 and not is_all_shown
        return (
            device.type == "cpu"
            or new_tokens > 1
            or not self.is_settled
            or call.is_generating
            or self.root is not None
            or (call.is_without_mask and any(self.unstored))
        )

    def following(
        self, noted: NotedMask | None, start: int, new: NewTokens, call: ModelCall, *, leaves_out: bool
    ) -> Padding:
        """What is to be remembered when the new tokens of a forward are stored, see `after`."""
        if noted is not None and noted[:2] != (start, new.count):
            noted = None  # of another forward
        is_all_shown = noted is not None and noted.mask is None
        if start and not self.looks_at(call, new.count, new.shape.device, is_all_shown=is_all_shown):
            return self
        return self.after(Forward.of(noted, start, new, call), leaves_out=leaves_out)

    def after(self, forward: Forward, *, leaves_out: bool) -> Padding:
        """What is to be remembered when a forward is stored.

        Padding need not be stored where `leaves_out`. Where the stack alone tells of the mask, it is.
        CacheMismatchError if the mask shows what an earlier one hid, or if positions of a row of which some
        tokens are hidden do not go on where they ended.
        """
        known = self
        if not forward.start:
            if not forward.is_mask_known:
                return NO_PADDING
            tokens = _leading(forward.real())
            tokens = tokens if any(tokens) else ()
            is_left_out = bool(tokens) and leaves_out and forward.is_noted
            known = Padding(tokens, is_left_out, ((),) * forward.batch)
        elif forward.batch != len(self.runs or self.tokens):
            return self  # it is refused elsewhere
        elif self.tokens:
            if not forward.is_noted:
                self._check_call(forward)
            if forward.start in self.tokens:  # rows that are padding so far may go on with it
                rows = zip(self.tokens, _leading(forward.real()), strict=True)
                known = replace(self, tokens=tuple(n + m if n == forward.start else n for n, m in rows))
        return known._with(forward) if known.runs else known

    def check_mask(self, noted: NotedMask, call: ModelCall) -> None:
        """Raise CacheMismatchError if the mask of a forward shows what is not stored.

        Where the answer lies on a GPU, only forwards are asked that are looked at, see `after`.
        """
        mask = noted.mask
        if mask is None or mask.is_cpu or self.looks_at(call, noted.new_tokens, mask.device):
            self._check_hidden(mask)

    def by_row(self, rows: int) -> list[tuple[int, tuple[Run, ...]]]:
        """Of every row, its leading padding and its runs."""
        return list(zip(self.tokens or (0,) * rows, self.runs or ((),) * rows, strict=True))

    def crop(self, num_tokens: int) -> Padding:
        """For rows that are cut down to their first tokens."""
        if not num_tokens:
            return NO_PADDING
        tokens = tuple(min(n, num_tokens) for n in self.tokens)
        runs = tuple(
            tuple(run._replace(end=min(run.end, num_tokens)) for run in runs if run.start < num_tokens)
            for runs in self.runs
        )
        return replace(self, tokens=tokens, runs=runs, end=min(self.end, num_tokens), is_settled=False)

    def prune(self, start: int, end: int) -> Padding:
        """Without the tokens `[start, end)`, where no key knows its position."""

        def after(n: int) -> int:
            return n - min(n, end) + min(n, start)

        tokens = tuple(map(after, self.tokens))
        kept = ((Run(after(run.start), after(run.end), None) for run in runs) for runs in self.runs)
        runs = tuple(joined((), [run for run in runs if run.start < run.end]) for runs in kept)
        left = Padding(runs=runs, end=after(self.end))
        return replace(left, tokens=tokens, is_left_out=self.is_left_out) if any(tokens) else left

    def mask(self, tokens: int) -> torch.Tensor:
        """The mask `[rows, tokens]` that hides what is `unstored`, in rows of which some is."""
        return torch.arange(tokens) >= torch.tensor(self.unstored)[:, None]

    def state_dict(self) -> dict[str, Any]:
        """The same in lists and numbers."""
        runs = [[list(run) for run in runs] for runs in self.runs]
        return {"tokens": list(self.tokens), "is_left_out": self.is_left_out, "runs": runs, "end": self.end}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> Padding:
        """What `state_dict` was made of."""
        runs = tuple(tuple(Run(*run) for run in runs) for runs in saved["runs"])
        return cls(tuple(saved["tokens"]), saved["is_left_out"], runs, saved["end"])

    def reorder(self, rows: Sequence[int]) -> Padding:
        """For rows that become copies of old ones."""
        tokens = tuple(self.tokens[row] for row in rows) if self.tokens else ()
        runs = tuple(self.runs[row] for row in rows) if self.runs else ()
        moved = replace(self, tokens=tokens, runs=runs, is_settled=False)
        return moved if any(tokens) else replace(moved, tokens=(), is_left_out=False)

    def _check_call(self, forward: Forward) -> None:
        """Look at the mask of a forward that is known from the stack alone."""
        if not any(self.unstored):
            return
        call, mask = forward.call, forward.call.attention_mask
        if mask is not None and mask.dim() == 4:  # the newest query is no padding
            newest = mask[:, :, -1]
            mask = newest.any(1) if mask.dtype == torch.bool else (newest > _HIDDEN).any(1)
        is_whole = mask is not None and mask.dim() == 2 and mask.shape[1] >= forward.end
        if call.forward.is_known and (is_whole or call.is_without_mask):
            self._check_hidden(mask)

    def _with(self, forward: Forward) -> Padding:
        """With the new tokens, if they go on."""
        start, positions = forward.start, forward.positions()
        known = self._under(forward) if start else self
        if known is self and self._is_next(forward, positions):
            return self._looked_at(forward, self)
        known = known._up_to(start)
        found = runs_of(forward.real(), positions, start)
        for row, (old, new) in enumerate(zip(known.runs, found, strict=True)):
            if old and new:
                self._check_position(row, old, new[0], forward)
        runs = tuple(joined(old, new) for old, new in zip(known.runs, found, strict=True))
        return self._looked_at(forward, replace(known, runs=runs, end=forward.end))

    def _is_next(self, forward: Forward, positions: torch.Tensor | None) -> bool:
        """Whether every row gets one token, and it is the one that follows."""
        is_one = forward.end - forward.start == 1 and forward.start > 0
        if not is_one or not all(runs and runs[-1].end == self.end for runs in self.runs):
            return False
        expected = [runs[-1].next_position for runs in self._up_to(forward.start).runs]
        found = [None] * len(expected) if positions is None else positions[:, 0].tolist()
        return found == expected and bool(forward.real().all())

    def _looked_at(self, forward: Forward, known: Padding) -> Padding:
        """What is known when a forward has been looked at; `self` is what was known before."""
        start, end, call = forward.start, forward.end, forward.call
        # A token after one that is hidden may stand anywhere: it has to be looked at, too.
        goes_on = all(runs and (not start or known.end < end or runs[-1].end == end) for runs in known.runs)
        root = call.root if call.is_generating and goes_on else None
        is_settled = goes_on and start > 0
        if known is self and (root, is_settled) == (self.root, self.is_settled):
            return self
        return replace(known, root=root, is_settled=is_settled)

    def _under(self, forward: Forward) -> Padding:
        """With the cached tokens that a mask hides taken for hidden; refuse one that shows some that were."""
        if not forward.is_mask_known or (
            forward.mask is None
            and all(sum(run.end - run.start for run in runs) == self.end for runs in self.runs)
        ):
            return self
        shown = forward.shown(0, forward.start)
        if self._is_shown_by(shown):
            return self
        again = (shown & ~self._shown(forward.start)).nonzero().tolist()
        if again:
            row, first = again[0]
            raise CacheMismatchError(
                f"attention_mask: row {row} shows token {first}, which an earlier mask hid, so that what is "
                f"cached after it was computed without it ({len(again)} such tokens in all). Pass the whole "
                f"mask as before, `cache.crop({min(token for _, token in again) - forward.start})` and feed "
                "what follows again, or `cache.reset()`"
            )
        known = self._up_to(forward.start)
        return replace(known, runs=tuple(map(tuple, runs_of(shown, known._positions(), 0))))

    def _up_to(self, start: int) -> Padding:
        """With tokens that were not looked at: they went on as those before."""
        if self.end >= start:
            return self
        runs = tuple(
            joined(runs, [Run(self.end, start, runs[-1].next_position)]) if runs else runs
            for runs in self.runs
        )
        return replace(self, runs=runs, end=start)

    def _is_shown_by(self, mask: torch.Tensor) -> bool:
        """Whether a boolean mask `[batch, tokens]` shows what the last one did.

        Every step of a padded batch asks, so nothing is made here that is as long as its rows.
        """
        for row, runs in zip(mask, self._up_to(mask.shape[1]).runs, strict=True):
            hidden = 0
            for run in runs:
                if row[hidden : run.start].any() or not row[run.start : run.end].all():
                    return False
                hidden = run.end
            if row[hidden:].any():
                return False
        return True

    def _shown(self, tokens: int) -> torch.Tensor:
        """Which of the first tokens, `end` or more, the last mask showed, boolean `[batch, tokens]`."""
        shown = torch.zeros(len(self.runs), tokens, dtype=torch.bool)
        for row, runs in enumerate(self.runs):
            shown[row, self.end :] = bool(runs)
            for run in runs:
                shown[row, run.start : run.end] = True
        return shown

    def _positions(self) -> torch.Tensor | None:
        """Where those stand, `[batch, end]`, arbitrary for the others; None if it is not known of all."""
        positions = torch.zeros(len(self.runs), self.end, dtype=torch.long)
        for row, runs in enumerate(self.runs):
            for run in runs:
                if run.position is None or run.next_position is None:
                    return None
                positions[row, run.start : run.end] = torch.arange(run.position, run.next_position)
        return positions

    def _check_position(self, row: int, old: tuple[Run, ...], first: Run, forward: Forward) -> None:
        """Raise CacheMismatchError if a row with these `old` tokens shown does not go on with `first`."""
        shown = sum(run.end - run.start for run in old)
        expected = next_positions(old, first.start)
        if shown == first.start or first.position is None or first.position in expected or not expected:
            return
        before, last = self._up_to(forward.start).runs[row], old[-1].end
        newly_hidden = sum(min(run.end, last) - min(run.start, last) for run in before) - shown
        raise discontinuous(row, expected, first.position, newly_hidden, forward.call.is_generating)

    def _check_hidden(self, mask: torch.Tensor | None) -> None:
        """Raise CacheMismatchError if a mask `[batch, tokens]`, or none, shows what is not stored."""
        if not any(self.unstored):
            return
        if mask is None:
            raise self._unhidden("came without a mask that hides it")
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
