"""One epoch of an audit: what was consumed of what its loaders were meant to hand out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from ftckpt.data.records import SHARED, End, Ids, Plan, Use
from ftckpt.domain.names import member_id

Numbers = npt.NDArray[np.int64]
NONE: Numbers = np.zeros(0, np.int64)
Ranges = tuple[tuple[int, int], ...]
Stream = tuple[int, int]  # whose loader, and which part of it
ORDER: Stream = (0, 0)  # the shared one
NO_PLAN = Plan()


class EpochAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch along the trajectory; sample ids as ranges (first, last), both included.

    Args:
        state: "complete": over, and each sample that it was meant to hand out was consumed once. "in progress": not known to be over,
            and exact so far. "wrong": samples were repeated, or are missing or unknown, or a loader passed over it whole. "unproven":
            records lack, samples were not consumed and its loader does not tell how many it hands out, or a loader begins after it.
        once: consumed exactly once. ``repeated``: more often than was meant.
        missing: not consumed though the epoch is over; those that are known to exist. ``ahead``: not consumed so far.
        left: left out on purpose (``drop_last``), as many as was meant. ``padded``: consumed more than once on purpose.
        orphaned: used in steps off this trajectory and not consumed on it: lost work that is to be done again.
        unknown: consumed, and not among the ids that an epoch has.
        over: each loader that is known of is known to be through with it.
        samples: that the epoch has, if that is known. ``draws``, ``of_draws``: consumed, and how many there are if that is known.
        handed, of_handed: samples consumed, as often as they were, and how many loaders are to hand out if that is known.
        skipped: loaders, or ranks' parts of them, that are through with it though no step used a draw of theirs. Not of the shared order.
    """

    epoch: int
    state: Literal["complete", "in progress", "wrong", "unproven"]
    once: Ranges
    repeated: Ranges
    missing: Ranges
    ahead: Ranges = ()
    left: Ranges = ()
    padded: Ranges = ()
    orphaned: Ranges = ()
    unknown: Ranges = ()
    over: bool
    samples: int | None = None
    draws: int = 0
    of_draws: int | None = None
    handed: int = 0
    of_handed: int | None = None
    skipped: int = 0

    @property
    def exact(self) -> bool:
        """Each sample once (so far, if the epoch is not over)."""
        return self.state in ("complete", "in progress")


class Seen:
    """All that the judgement of an epoch goes by.

    Args:
        consumed: uses along the trajectory; ``uses``: all of them.
        ids: of an epoch, if told.
        ends: along the trajectory.
        lacking: records lack.
        drawn: draws along the trajectory, as (member, rank, ordinal); of other loaders too.
    """

    def __init__(
        self,
        consumed: Iterable[Use],
        uses: Collection[Use],
        ids: Iterable[int],
        ends: Iterable[End],
        drawn: Collection[tuple[int, int, int]],
        *,
        lacking: bool,
    ) -> None:
        self.lacking, self._uses = lacking, uses
        self.by_epoch: dict[int, dict[Stream, list[Use]]] = {}
        self.newest: dict[Stream, int] = {stream_of(u): -1 for u in uses if u.ordinal}  # that it has come to along the trajectory
        self.began: dict[Stream, int] = {}  # of each that is known to be a loader by itself: the first epoch that was used
        for u in consumed:
            stream = stream_of(u)
            self.by_epoch.setdefault(u.epoch, {}).setdefault(stream, []).append(u)
            self.newest[stream] = max(u.epoch, self.newest[stream])
            if stream != ORDER and u.plan is not None:
                self.began[stream] = min(u.epoch, self.began.get(stream, u.epoch))
        self.shared = bool(self.newest) and set(self.newest) == {ORDER}
        self.ended: dict[Stream, int] = {}
        self.left: dict[int, set[int]] = {}
        for end in ends:
            stream = _stream(end.loader, end.member, end.part, end.rank)
            if stream in self.newest and (stream == ORDER or not end.ordinal or (end.member, end.rank, end.ordinal) in drawn):
                self.ended[stream] = max(end.epoch, self.ended.get(stream, -1))
                for epoch, passed in end.left:
                    self.left.setdefault(epoch, set()).update(passed)
        self.reached = max((*self.newest.values(), *self.ended.values()), default=-1)  # each epoch up to there was begun
        self._told = _distinct(_array(ids))

    @cached_property
    def _every(self) -> Numbers:
        """All ids that occur; an epoch's at a time."""
        by_epoch: dict[int, list[Numbers]] = {}
        for use in self._uses:
            by_epoch.setdefault(use.epoch, []).extend((_array(use.ids), _array(use.left)))
        every = NONE
        for parts in by_epoch.values():
            every = _distinct(np.concatenate((every, *parts)))
        return every

    def samples(self, epoch: int) -> tuple[Numbers, bool]:
        """Ids that an epoch has, in order, and whether those are all."""
        if self._told.size:
            return self._told, True
        used = [parts[ORDER] for parts in (self.by_epoch.get(epoch), *self.by_epoch.values()) if parts is not None and ORDER in parts]
        of = {(u.plan or NO_PLAN).of for u in (used[0] if used else ())}
        if self.shared and len(of) == 1 and (length := of.pop()) is not None:
            return np.arange(length), True
        return self._every, False


def judge_epoch(epoch: int, seen: Seen, gone: Iterable[Use]) -> EpochAudit:
    """Judge one epoch.

    Args:
        gone: uses of lost work, of all epochs (``lost``).
    """
    uses = seen.by_epoch.get(epoch, {})
    streams = {stream: _part(stream, uses.get(stream, [])) for stream in seen.newest}
    had, times = np.unique(np.concatenate((NONE, *(part.ids for part in streams.values()))), return_counts=True)
    every, known = seen.samples(epoch)
    passed = _without(_distinct(_array(seen.left.get(epoch, set()).union(*(u.left for group in uses.values() for u in group)))), had)
    lacks = _without(_without(every, had), passed)
    ends = {s: max(seen.ended.get(s, -1), seen.newest[s] - 1) >= epoch for s in streams}
    over = bool(streams) and all(ends[s] or (part.full if part.of is not None else known and not lacks.size) for s, part in streams.items())
    through = [part for s, part in streams.items() if ends[s] or part.full]
    fewer = any(part.short or (part.of is not None and not part.full) for part in through)

    skipped = [s for s in seen.began if ends[s] and not streams[s].draws]  # no loader has an epoch without a draw
    fewer = fewer or any(seen.began[s] < epoch for s in skipped)  # of one that begins later it is not known why

    repeated, padded = had[times > 1], NONE
    if times.sum() - had.size <= sum(part.doubled for part in streams.values()):
        repeated, padded = padded, repeated
    room = [part.left for part in streams.values()]
    if over and not fewer and (None in room or lacks.size <= sum(n or 0 for n in room)):
        passed, lacks = _distinct(np.concatenate((passed, lacks))), NONE
    unknown = _without(had, every)
    missing, ahead = (lacks, NONE) if over and not seen.lacking else (NONE, lacks)
    full = [part.full for part in streams.values()]
    untold = not known and all(full) and any(part.samples is None for part in streams.values())  # perhaps they are left out on purpose
    wrong = bool(repeated.size or unknown.size or (missing.size and not untold) or (fewer and not seen.lacking))
    draws = [part.of for part in streams.values()]
    handed = [part.samples for part in streams.values()]
    return EpochAudit(
        epoch=epoch,
        state="wrong" if wrong else "unproven" if seen.lacking or missing.size or skipped else "complete" if over else "in progress",
        once=ranges(had[times == 1]),
        repeated=ranges(repeated),
        missing=ranges(missing),
        ahead=ranges(ahead),
        left=ranges(passed),
        padded=ranges(padded),
        orphaned=ranges({i for u in gone if u.epoch == epoch for i in u.ids}),
        unknown=ranges(unknown),
        over=over,
        samples=every.size if known else None,
        draws=sum(part.draws for part in streams.values()),
        of_draws=None if None in draws or seen.shared else sum(n or 0 for n in draws),
        handed=sum(part.ids.size for part in streams.values()),
        of_handed=None if None in handed else sum(n or 0 for n in handed),
        skipped=len(skipped),
    )


class _Part(msgspec.Struct, frozen=True):
    """What one loader, or one part of it, gave for an epoch, and was meant to."""

    ids: Numbers
    draws: int
    of: int | None
    left: int | None
    doubled: int
    samples: int | None

    @property
    def full(self) -> bool:
        """As many draws as were meant."""
        return self.draws == self.of

    @property
    def short(self) -> bool:
        """Fewer samples than were meant: a draw may have less than it should."""
        return self.samples is not None and self.ids.size < self.samples


def _part(stream: Stream, uses: list[Use]) -> _Part:
    """Ranks that take the same samples count once."""
    draws: dict[tuple[object, ...], Use] = {}
    for use in uses:
        draws[use.before, use.member, use.nonce, use.ordinal, (use.plan or NO_PLAN).part, use.ids] = use
    plans = {u.plan or NO_PLAN for u in uses}
    of, samples = {plan.of for plan in plans}, {plan.samples for plan in plans}
    left = [plan.left for plan in plans]
    return _Part(
        ids=np.concatenate([NONE, *(_array(u.ids) for u in draws.values())]),
        draws=len({key[:4] for key in draws}),
        of=of.pop() if len(of) == 1 and stream != ORDER else None,
        left=None if None in left else max((n or 0 for n in left), default=0),
        doubled=max((plan.doubled for plan in plans), default=0),
        samples=samples.pop() if len(samples) == 1 and stream != ORDER else None,
    )


def lost(off: Iterable[Use], consumed: Iterable[Use]) -> list[Use]:
    """Of uses off a trajectory those that have samples which were not consumed, with these samples alone.

    Args:
        consumed: uses along the trajectory, and along those that go on from it.
    """
    off = list(off)
    asked: dict[int, set[int]] = {}
    for use in off:
        asked.setdefault(use.epoch, set()).update(use.ids)
    had: dict[int, set[int]] = {epoch: set() for epoch in asked}
    for use in consumed if asked else ():
        if use.epoch in asked:
            had[use.epoch] |= asked[use.epoch].intersection(use.ids)
    left = ((u, tuple(i for i in u.ids if i not in had[u.epoch])) for u in off)
    return [msgspec.structs.replace(u, ids=ids) for u, ids in left if ids]


def stream_of(use: Use) -> Stream:
    """Whose loader a use was drawn from, and which part of it."""
    plan = use.plan or NO_PLAN
    return _stream(plan.loader, use.member, plan.part, use.rank)


def _stream(loader: str, member: int, part: int, rank: int) -> Stream:
    return ORDER if loader == SHARED else (member_id(loader) if loader else member, part if part >= 0 else rank)


def ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges (first, last), both included."""
    held = np.sort(numbers if isinstance(numbers, np.ndarray) else _array(numbers))
    if not held.size:
        return ()
    cuts = np.flatnonzero(np.diff(held) != 1)
    first, last = held[np.append(0, cuts + 1)], held[np.append(cuts, -1)]
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def amount(of: Iterable[tuple[int, int]]) -> int:
    """How many numbers ranges hold."""
    return sum(last - first + 1 for first, last in of)


def _array(ids: Iterable[int]) -> Numbers:
    return np.frombuffer(ids.packed, np.int64) if isinstance(ids, Ids) else np.fromiter(ids, np.int64)


def _without(these: Numbers, those: Numbers) -> Numbers:
    """Ordered numbers, each once, without some of them."""
    return np.setdiff1d(these, those, assume_unique=True)


def _distinct(ids: Numbers) -> Numbers:
    """In order, each once; ``numpy.unique`` may take a hash table for it, several times the memory."""
    held: Numbers = np.sort(ids)
    last: npt.NDArray[np.bool_] = np.ones(held.size, bool)
    last[:-1] = held[1:] != held[:-1]
    return held[last]
