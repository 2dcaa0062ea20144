"""Whether each sample was consumed exactly once along a trajectory, judged from the records of ``audit``. Pure.

Nothing is said that the records do not prove: an epoch is over only where its loader said so, began another one or has handed out all
that it was told to have; and where records lack, nothing is called missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from ftckpt.data.epochs import EpochAudit, Seen, judge_epoch, lost, stream_of
from ftckpt.data.records import End, Made, Use

Verdict = Literal["exact", "wrong", "unproven", "nothing"]
Attempt = tuple[str, int, int]  # hash before, member, nonce


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the records say of the trajectory that leads to one state.

    Args:
        steps: committed steps with samples, judged. ``idle``: committed steps that used no data.
        whole: the records reach back to the job's beginning; else nothing is known of what came before step ``since``.
        since: step of the earliest state that the records reach; None: they do not lead to this state at all.
        epochs: per epoch.
        unrecorded: (step, member) of contributions of which not all was recorded.
        orphaned: uses off this trajectory whose samples were consumed neither on it nor by steps after this state, as (member,
            ordinal): lost work that is to be done again, or is being done.
        after: uses in steps after this state, as (member, ordinal): not judged here.
        unplaced: uses of which the records do not say where they belong, as (member, ordinal).
    """

    steps: int
    idle: int = 0
    whole: bool
    since: int | None
    epochs: tuple[EpochAudit, ...]
    unrecorded: tuple[tuple[int, int], ...]
    orphaned: tuple[tuple[int, int], ...]
    after: tuple[tuple[int, int], ...] = ()
    unplaced: tuple[tuple[int, int], ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst that is proven: samples repeated, missing or unknown; else that it is not shown, or that no step used data."""
        if any(e.state == "wrong" for e in self.epochs):
            return "wrong"
        if self.unrecorded or not self.whole or any(e.state == "unproven" for e in self.epochs):
            return "unproven"
        return "exact" if self.steps else "nothing"

    @property
    def exact(self) -> bool:
        """Each sample exactly once from the beginning, as far as the epochs have come."""
        return self.verdict == "exact"

    @property
    def complete(self) -> bool:
        """It is exact, and no epoch is in progress."""
        return self.exact and all(e.state == "complete" for e in self.epochs)


def judge_audit(
    uses: Iterable[Use],
    made: Iterable[Made],
    newest: str,
    origin: str,
    ids: Iterable[int] = (),
    *,
    ends: Iterable[End] = (),
    owner: int | None = None,
) -> AuditReport:
    """Judge what was consumed along the trajectory that leads to a state. Pure.

    Args:
        uses, made, ends: records of all replicas, in any order.
        newest: hash of the state.
        origin: hash of the untrained state (``domain.trajectory.genesis(job).h``).
        ids: all sample ids of an epoch; by default those of the shared order, else those that occur in any record.
        owner: judge only what the loader of this member handed out, to whomever.
    """
    uses, links = list(uses), {link.after: link for link in made}
    chain = _chain(links, newest)
    attempts: dict[Attempt, list[Use]] = {}
    for use in uses:
        attempts.setdefault((use.before, use.member, use.nonce), []).append(use)
    mine = [u for u in uses if owner is None or stream_of(u)[0] == owner]
    drawers = None if owner is None else {owner, *(u.member for u in mine)}

    consumed: list[Use] = []
    drawn: set[tuple[int, int, int]] = set()
    included: set[Attempt] = set()
    unrecorded, steps, idle = [], 0, 0
    for link in chain:
        used = lacks = told = False
        for member, nonce in link.parts:
            included.add((link.before, member, nonce))
            found = set(attempts.get((link.before, member, nonce), []))
            drawn.update((u.member, u.rank, u.ordinal) for u in found)
            if drawers is not None and member not in drawers:
                continue
            told = True
            if not _whole(found):
                lacks = True
                unrecorded.append((link.step, member))
            of_it = [u for u in found if u.ordinal and (owner is None or stream_of(u)[0] == owner)]
            consumed += of_it
            used = used or bool(of_it)
        steps, idle = steps + used, idle + (told and not used and not lacks)

    place = _Places(links, chain, newest)
    places: dict[str, list[Use]] = {"off": [], "after": [], "unplaced": []}
    for use in mine:
        if use.ordinal and (use.before, use.member, use.nonce) not in included:
            places[place.of(use.before)].append(use)
    whole = (chain[0].before if chain else newest) == origin
    seen = Seen(consumed, mine, tuple(ids), [e for e in set(ends) if place.on(e.at)], drawn, lacking=bool(unrecorded) or not whole)
    made_of = {(link.before, member, nonce) for link in links.values() for member, nonce in link.parts}
    later = [u for u in places["after"] if (u.before, u.member, u.nonce) in made_of]
    gone = lost(places["off"], [*consumed, *later])
    numbers = sorted({u.epoch for u in consumed} | {u.epoch for u in gone})
    return AuditReport(
        steps=steps,
        idle=idle,
        whole=whole,
        since=(chain[0].step - bool(chain[0].parts)) if chain else 0 if whole else None,
        epochs=tuple(judge_epoch(n, seen, gone) for n in numbers),
        unrecorded=tuple(unrecorded),
        orphaned=tuple(sorted({(u.member, u.ordinal) for u in gone})),
        after=tuple(sorted({(u.member, u.ordinal) for u in places["after"]})),
        unplaced=tuple(sorted({(u.member, u.ordinal) for u in places["unplaced"]})),
    )


def judge_each(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str, *, ends: Iterable[End] = ()) -> dict[int, AuditReport]:
    """Judge each replica's loader by itself, by its number: for loaders of their own, whose epochs do not begin together.

    Args:
        uses, made, newest, origin, ends: as for ``judge_audit``.
    """
    uses, made, ends = list(uses), list(made), list(ends)
    members = {stream_of(u)[0] for u in uses if u.ordinal} | {member for link in made for member, _ in link.parts}
    return {member: judge_audit(uses, made, newest, origin, ends=ends, owner=member) for member in sorted(members)}


class _Places:
    """Where states stand to a chain."""

    def __init__(self, links: dict[str, Made], chain: Sequence[Made], newest: str) -> None:
        self._links, self._newest = links, newest
        self._past = {link.before for link in chain} - {newest}
        self._known: dict[str, str] = {}

    def on(self, h: str) -> bool:
        """Whether it is one of the chain's."""
        return h == self._newest or h in self._past

    def of(self, h: str) -> str:
        """Of a step that begins at that state and is none of the chain's: "after" its end, "off" it, or "unplaced"."""
        way: dict[str, None] = {}
        while h not in self._known and not self.on(h) and h not in way and (link := self._links.get(h)) is not None:
            way[h] = None
            h = link.before
        where = self._known.get(h) or ("after" if h == self._newest else "off" if h in self._past else "unplaced")
        self._known |= dict.fromkeys(way, where)
        return where


def _chain(links: dict[str, Made], newest: str) -> list[Made]:
    """The links that lead to a state, oldest first."""
    chain, rest = list[Made](), dict(links)
    while (link := rest.pop(newest, None)) is not None:
        chain.append(link)
        newest = link.before
    return chain[::-1]


def _whole(found: set[Use]) -> bool:
    """Whether these are all records of a contribution: from each rank, and of each as many as it wrote."""
    ranks: dict[int, list[Use]] = {}
    for use in found:
        ranks.setdefault(use.rank, []).append(use)
    told = max((u.ranks for u in found), default=1)
    return bool(found) and len(ranks) >= told and all(len(group) >= max(u.records for u in group) for group in ranks.values())
