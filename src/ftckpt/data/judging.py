"""Whether each sample was consumed exactly once along a trajectory, judged from the records of ``audit``. Pure.

Nothing is said that the records do not prove: an epoch is over only where its loader said so, began another one or has handed out all
that it was told to have; and where records lack, nothing is called missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec

from ftckpt.data.epochs import EpochAudit, Seen, judge_epoch, lost, stream_of
from ftckpt.data.records import End, Made, Use

Verdict = Literal["exact", "wrong", "unproven", "nothing"]
Attempt = tuple[str, int, int]  # hash before, member, nonce
MOST_SKIPPED = 1000  # epochs of which no step used anything, in a report


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the records say of the trajectory that leads to one state.

    Args:
        steps: committed steps with samples, judged. ``idle``: committed steps that used no data.
        whole: the records reach back to the job's beginning; else nothing is known of what came before step ``since``.
        since: step of the earliest state that the records reach; None: they do not lead to this state at all.
        epochs: per epoch, also those that were passed over whole.
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
    mine = [u for u in uses if _handed_out(u, owner)]
    along = _walk(chain, uses, mine, owner)
    place, included, recorded = _Places(links, chain, newest), _attempts(chain), _attempts(links.values())
    places: dict[str, list[Use]] = {"off": [], "after": [], "unplaced": []}
    for use in mine:
        if use.ordinal and _attempt(use) not in included:
            places[place.of(use.before)].append(use)
    whole = (chain[0].before if chain else newest) == origin
    lacking = bool(along.unrecorded) or not whole
    seen = Seen(along.consumed, mine, ids, [e for e in set(ends) if place.on(e.at)], along.drawn, lacking=lacking)
    later = [u for u in places["after"] if _attempt(u) in recorded]
    gone = lost(places["off"], [*along.consumed, *later])
    numbers = {u.epoch for u in along.consumed} | {u.epoch for u in gone}
    if not lacking:
        numbers.update(islice((n for n in range(seen.reached) if n not in numbers), MOST_SKIPPED))
        numbers.update({seen.reached} - {-1})
    return AuditReport(
        steps=along.steps,
        idle=along.idle,
        whole=whole,
        since=(chain[0].step - bool(chain[0].parts)) if chain else 0 if whole else None,
        epochs=tuple(judge_epoch(n, seen, gone) for n in sorted(numbers)),
        unrecorded=along.unrecorded,
        orphaned=_named(gone),
        after=_named(places["after"]),
        unplaced=_named(places["unplaced"]),
    )


def judge_each(uses: Iterable[Use], made: Iterable[Made], newest: str, origin: str, *, ends: Iterable[End] = ()) -> dict[int, AuditReport]:
    """Judge each replica's loader by itself, by its number: for loaders of their own, whose epochs do not begin together.

    Args:
        uses, made, newest, origin, ends: as for ``judge_audit``.
    """
    uses, made, ends = list(uses), list(made), list(ends)
    members = {stream_of(u)[0] for u in uses if u.ordinal} | {member for link in made for member, _ in link.parts}
    return {member: judge_audit(uses, made, newest, origin, ends=ends, owner=member) for member in sorted(members)}


class _Along(NamedTuple):
    """What the steps of a chain used; as in ``AuditReport`` and ``Seen``."""

    consumed: list[Use]
    drawn: set[tuple[int, int, int]]
    unrecorded: tuple[tuple[int, int], ...]
    steps: int
    idle: int


def _walk(chain: Sequence[Made], uses: Sequence[Use], mine: Sequence[Use], owner: int | None) -> _Along:
    """Go along a chain, step by step.

    Args:
        mine: those of ``uses`` that the owner's loader handed out; a step in which none of those who drew from it took part says nothing of it.
    """
    of_attempt: dict[Attempt, set[Use]] = {}
    for use in uses:
        of_attempt.setdefault(_attempt(use), set()).add(use)
    drawers = None if owner is None else {owner, *(u.member for u in mine)}
    consumed: list[Use] = []
    drawn: set[tuple[int, int, int]] = set()
    unrecorded, steps, idle = [], 0, 0
    for link in chain:
        used = lacks = told = False
        for member, nonce in link.parts:
            found = of_attempt.get((link.before, member, nonce), set())
            drawn.update((u.member, u.rank, u.ordinal) for u in found)
            if drawers is not None and member not in drawers:
                continue
            told = True
            if not _whole(found):
                lacks = True
                unrecorded.append((link.step, member))
            of_it = [u for u in found if u.ordinal and _handed_out(u, owner)]
            consumed += of_it
            used = used or bool(of_it)
        steps, idle = steps + used, idle + (told and not used and not lacks)
    return _Along(consumed, drawn, tuple(unrecorded), steps, idle)


def _handed_out(use: Use, owner: int | None) -> bool:
    """Whether the loader of that member did it, or any where none is named."""
    return owner is None or stream_of(use)[0] == owner


def _attempt(use: Use) -> Attempt:
    return use.before, use.member, use.nonce


def _attempts(links: Iterable[Made]) -> set[Attempt]:
    return {(link.before, member, nonce) for link in links for member, nonce in link.parts}


def _named(uses: Iterable[Use]) -> tuple[tuple[int, int], ...]:
    """As (member, ordinal), each once."""
    return tuple(sorted({(u.member, u.ordinal) for u in uses}))


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
