"""A make-believe job: replicas that are killed, restart, heal, commit apart; each state knows the batches that are in it.

It follows ``torchft``'s ways as far as data are concerned: those at the greatest step contribute, those behind heal and
contribute nothing, and whether a step is committed is decided by each replica for itself. Here a commit by several is one
state, and replicas with different states at the greatest step make no step (the one-state rule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ftckpt.data.batches import BatchFeed
from ftckpt.data.elastic import ElasticFeed, ElasticLoader
from ftckpt.data.records import Made, Use

ORIGIN = "origin"


class Element(NamedTuple):
    """One step: its number among all attempts, and by contributor the (epoch, sample ids) that went into it."""

    nonce: int
    used: dict[int, list[tuple[int, int]]]
    samples: int


State = tuple[Element, ...]


def name_of(state: State) -> str:
    return "/".join([ORIGIN, *(str(e.nonce) for e in state)])


class Member:
    """One replica: what is lost with its process, and what is not (its journal, and the naive rules' own counters)."""

    def __init__(self) -> None:
        self.up = True
        self.state: State = ()
        self.feed: Any = None
        self.entries: dict[int, bytes] = {}
        self.contributed = (0, 0)
        self.own = 0  # naive: counted by the replica itself
        self.by_step: dict[int, int] = {}  # naive: step -> own count after it

    def journal(self, ordinal: int, state: bytes) -> None:
        self.entries = {o: s for o, s in self.entries.items() if o < ordinal} | {ordinal: state}

    def recall(self, count: int) -> tuple[int, bytes] | None:
        known = [o for o in self.entries if o <= count]
        return (max(known), self.entries[max(known)]) if known else None

    def contribute(self, draws: int, samples: int) -> None:
        self.contributed = (draws, samples)


class World:
    """The job.

    Args:
        replicas: how many.
        loader: makes a replica's loader anew, as a new process does.
        rule: where a replica's position comes from: "table" (ours: the state), "own", "ownpart" or "bystep" (naive).
        elastic: one shared order instead of a loader each.
    """

    def __init__(
        self,
        replicas: int,
        loader: Callable[[int], Iterable[Any]] | None = None,
        rule: str = "table",
        elastic: Callable[[], ElasticLoader] | None = None,
    ) -> None:
        self.members = [Member() for _ in range(replicas)]
        self.saved: State = ()
        self.rule, self._loader, self._elastic = rule, loader, elastic
        self._nonce = 0
        self._voters: list[int] = []
        self.uses: list[Use] = []
        self.made: list[Made] = []
        for i in range(replicas):
            self._start(i)

    # ------------------------------------------------------------------ what happens
    def kill(self, i: int) -> None:
        self.members[i].up, self.members[i].feed = False, None

    def restart(self, i: int) -> None:
        """A new process loads the newest generation."""
        m = self.members[i]
        m.up, m.state = True, self.saved
        if self.rule == "bystep":
            m.own = self._at_step(m)
        self._start(i)

    def attempt(self, commit: Callable[[int], bool], save: bool = False) -> None:
        """One step of all who are up; ``commit`` says who sees it committed."""
        up = [i for i, m in enumerate(self.members) if m.up]
        top = max((len(self.members[i].state) for i in up), default=0)
        voters = [i for i in up if len(self.members[i].state) == top]
        if not voters or len({name_of(self.members[i].state) for i in voters}) > 1:
            return
        self._voters, self._nonce = voters, self._nonce + 1
        source = self.members[voters[0]].state
        used: dict[int, list[tuple[int, int]]] = {}
        samples = 0
        for i in up:
            m = self.members[i]
            m.contributed = (0, 0)
            taken = self._draw(i)
            if i in voters:
                used[i] = taken
                samples += m.contributed[1]
        if self._elastic is not None and any(not u for u in used.values()):
            return  # the data are over
        element = Element(self._nonce, used, samples)
        for i in up:
            self._after(i, i in voters, commit(i), source, element)
        first = self.members[voters[0]]
        if save and len(first.state) > len(self.saved) and first.state[: len(source)] == source and first.state != source:
            self.saved = first.state

    # ------------------------------------------------------------------ inside
    def _after(self, i: int, voted: bool, committed: bool, source: State, element: Element) -> None:
        m = self.members[i]
        if voted:
            m.by_step = {s: n for s, n in m.by_step.items() if s <= len(source)} | {len(source) + 1: m.own + 1}
        elif self.rule == "bystep":
            m.state = source
            m.own = self._at_step(m)
        if committed:
            m.state = (*source, element)
            m.own += voted or self.rule == "own"
            self.made.append(Made(name_of(source), name_of(m.state), len(m.state), tuple((j, element.nonce) for j in element.used)))
        elif not voted:
            m.state = source

    def _at_step(self, m: Member) -> int:
        return max(((s, n) for s, n in m.by_step.items() if s <= len(m.state)), default=(0, 0))[1]

    def _draw(self, i: int) -> list[tuple[int, int]]:
        """What a replica is handed for the step: (epoch, id) pairs."""
        m = self.members[i]
        batch = next(m.feed, None)
        if batch is None:
            return []
        if self._elastic is not None:
            pairs = list(zip(m.feed.share.epochs, m.feed.share.indices, strict=True))
            assert [int(x) for x in batch] == [x for _, x in pairs]
        else:
            pairs = [(m.feed.epoch, int(x)) for x in batch]
        if i in self._voters:
            for epoch in {e for e, _ in pairs}:
                ids = tuple(x for e, x in pairs if e == epoch)
                self.uses.append(Use(name_of(m.state), self._nonce, i, 0, self._included(i) + 1, epoch, ids))
        return pairs

    def _included(self, i: int) -> int:
        return sum(1 for e in self.members[i].state if i in e.used)

    def _start(self, i: int) -> None:
        m = self.members[i]
        if self._elastic is not None:
            m.feed = ElasticFeed(
                self._elastic(),
                position=lambda: sum(e.samples for e in m.state),
                members=lambda: (self._voters.index(i) if i in self._voters else None, len(self._voters)),
                votes=lambda: self._nonce,
                contribute=m.contribute,
            )
            return
        assert self._loader is not None
        m.feed = BatchFeed(
            self._loader(i),
            journal=m.journal,
            recall=m.recall,
            votes=lambda: self._nonce,
            position=(lambda: self._included(i)) if self.rule == "table" else (lambda: m.own),
            contribute=m.contribute,
        )
