"""Choosing where a state comes from: looks at log, root and agents, verifies what the ladder wants verified, and says why.

The decision itself is ``domain.sources``. Writes nothing, unless told to append finished generations whose writer died.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, TypeVar

import msgspec

from ftckpt.domain.choice import Choice, Fault, Newest, Probe, Refusal, Request, Situation
from ftckpt.domain.doubts import unseen
from ftckpt.domain.ledger import Append, Entry, judge, own_entry
from ftckpt.domain.lineage import Found, adoptable, chain_to, vouched
from ftckpt.domain.sources import decide
from ftckpt.errors import FtckptError, LogAmbiguous, LogUnreachable, StoreError, TailMoved, Withdrawn
from ftckpt.flows.place import bring, check_bound
from ftckpt.flows.read import read_manifest
from ftckpt.flows.scan import scan
from ftckpt.flows.verify import Progress, verify
from ftckpt.flows.view import view
from ftckpt.format.manifest import record
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.stores.tiered import DURABLE, TieredStore
from ftckpt.wiring import read_marker, remark

logger = logging.getLogger("ftckpt")

T = TypeVar("T")
Level = Literal["headers", "full"]
ROUNDS = 8  # how often the choice begins anew when the tail moves meanwhile
OVERTAKEN = 2  # times that somebody else was quicker to append a finished generation: then its writers live, and commit on their own
UNREAD_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits between tries to read a generation while the store fails: taking an older one leaves the newer ones behind for good."""


def look(log: CommitLog, store: BlobStore, job: str) -> Situation:
    """What a choice is made from. The log is read before the root, so that a generation seen in the log is there.

    Only directories that it does not list are looked at: of the others the log says what they are, and ``verify`` whether they are that.

    Raises:
        StoreError: the root cannot be listed.
    """
    seen = view(log)
    found = scan(store, job, without={e.location for e in seen.entries})
    last = seen.tail.index if seen.tail is not None else -1
    if seen.state == "ok" and any(f.log == seen.uuid and f.known_tail > last for f in found):
        seen = view(log)  # the job may have gone on between the two looks
    return Situation(job=job, log=seen, found=found)


def choose(
    log: CommitLog,
    store: BlobStore,
    job: str,
    request: Request | None = None,
    *,
    verify_level: Level = "headers",
    adopt: bool = False,
    findings: dict[str, Fault | None] | None = None,
    pass_unread: bool = False,
    progress: Progress | None = None,
) -> Choice:
    """Walk the recovery ladder.

    Args:
        request: what is asked for; the newest when left out.
        verify_level: what a candidate must pass: "headers" (all small files, sizes and headers; blocks are verified when they
            are read) or "full" (every byte).
        adopt: may write: append finished generations without record first (rule 9; else such a one is chosen as "durable"),
            and bind the root to this log when told to start from zero.
        findings: what is known already of locations, by earlier tries to load them; added to.
        pass_unread: pass over what the store goes on failing to give, as over what is damaged: for who only needs a state to heal from.
        progress: called with file and bytes while verifying.

    Raises:
        LogUnreachable, LogRegressed, Damaged, ProgressExists, NothingLoadable, NotFound: nothing is chosen; says why and what
            to do. StoreError: the root cannot be listed, or what would be taken cannot be read; or the durable tier is down, and what
            the first tier has does not settle it.
    """
    findings = {} if findings is None else findings
    if pass_unread:
        findings.update({location: _as_damage(fault) for location, fault in findings.items()})
    gap = _gap(store, job)
    at_hand = store.first if isinstance(store, TieredStore) and gap is not None else store
    full, pauses = verify_level == "full", list(UNREAD_PAUSES_S)
    search = _Search(log, at_hand, job, request or Newest(), findings, pauses, full, pass_unread, gap, progress)
    overtaken = 0
    for _ in range(ROUNDS):
        choice = search.settle(at := search.look())
        if adopt and choice.source == "fresh" and at.log.state == "ok":
            _rebind(log, store, job)
        if choice.source != "durable" or not adopt:
            return choice
        overtaken += not adopt_chain(log, store, job, at, choice.location, search.probe)
        if overtaken >= OVERTAKEN:
            break
    at = search.look()
    if at.log.tail is None:
        raise LogUnreachable(f"the log of job {job!r} moved {ROUNDS} times while a choice was made", todo="try again")
    return search.settle(_without(at, adoptable(at.log, at.found)))  # who writes those faster than they can be adopted commits them, too


class _Search(NamedTuple):
    """A choice under way.

    Args:
        store: the one that is looked at: the first tier while the durable one is down.
        findings: what is known of locations; added to.
        pauses: seconds to wait before the next tries to read; used ones are taken out.
        gap: why the durable tier cannot be looked at; None where it can, or there is none.
    """

    log: CommitLog
    store: BlobStore
    job: str
    asked: Request
    findings: dict[str, Fault | None]
    pauses: list[float]
    full: bool
    pass_unread: bool
    gap: StoreError | None
    progress: Progress | None

    def look(self) -> Situation:
        """What is there now."""
        waits = self.pauses if isinstance(self.asked, Newest) and not self.pass_unread else []
        at = _patiently(lambda: look(self.log, self.store, self.job), _unseen, waits)
        return _without(at, unseen(at)) if self.pass_unread else at

    def probe(self, location: str, entry: Entry | None) -> Fault | None:
        """What is wrong with a generation; each is looked at once."""
        if location not in self.findings:
            found = _patiently(
                lambda: verify(self.store, self.job, location, entry, full=self.full, progress=self.progress).fault, _unread, self.pauses
            )
            self.findings[location] = _as_damage(found) if self.pass_unread else found
        return self.findings[location]

    def settle(self, at: Situation) -> Choice:
        """The ladder's choice; while the durable tier is down only if what that may have could not be better.

        Raises:
            FtckptError: nothing is chosen; a StoreError where the durable tier would have to be asked.
        """
        if self.gap is None:
            return self._decided(at)
        try:
            choice = self._decided(at)
        except FtckptError as e:
            raise _down(self.job, self.gap, e.what) from e
        if choice.rejected or choice.source == "new":
            raise _down(self.job, self.gap, "; ".join(choice.reasons))
        unasked = f"the durable tier does not answer, and was not looked at: {self.gap.what}"
        return msgspec.structs.replace(choice, reasons=(*choice.reasons, unasked))

    def _decided(self, at: Situation) -> Choice:
        while True:
            decision = decide(at, self.asked, self.findings)
            if isinstance(decision, Probe):
                self.probe(decision.location, decision.entry)
            elif isinstance(decision, Refusal):
                raise decision.error()
            else:
                return decision


def _without(at: Situation, left_out: Collection[Found]) -> Situation:
    return msgspec.structs.replace(at, found=tuple(f for f in at.found if f not in left_out))


def _gap(store: BlobStore, job: str) -> StoreError | None:
    """Why the durable tier cannot be looked at now; None where it can, or there is none."""
    if not isinstance(store, TieredStore):
        return None
    try:
        near = read_marker(store.first, job)
        if near is not None and near.durable:
            check_bound(store.durable, job)
        else:
            store.durable.listdir(job)
    except StoreError as e:
        return e
    return None


def _down(job: str, gap: StoreError, why: str) -> StoreError:
    return StoreError(
        f"the durable tier of job {job!r} does not answer ({gap.what}), and the first tier alone does not do: {why}",
        now="nothing was chosen and nothing was started",
        todo="start again when it is back",
    )


def _as_damage(fault: Fault | None) -> Fault | None:
    return fault if fault is None else msgspec.structs.replace(fault, unread=False)


def _patiently(check: Callable[[], T], lacking: Callable[[T], str], pauses: list[float]) -> T:
    """The same again as long as it is only the store that fails, until all pauses are used up.

    Args:
        lacking: what cannot be read now, by what was found; empty if nothing.
        pauses: seconds; used ones are taken out.
    """
    found = check()
    while pauses and (what := lacking(found)):
        logger.warning("%s; trying again in %g s", what, pauses[0])
        time.sleep(pauses.pop(0))
        found = check()
    return found


def _unread(fault: Fault | None) -> str:
    return f"{fault.part} cannot be read now ({fault.reason})" if fault is not None and fault.unread else ""


def _unseen(at: Situation) -> str:
    return next((f"{f.location}: {f.why}" for f in unseen(at)), "")


def _rebind(log: CommitLog, store: BlobStore, job: str) -> None:
    """A fresh start leaves a lost log's generations behind: from now on this log vouches for the root."""
    marker = read_marker(store, job)
    if marker is not None and marker.log not in ("", log.uuid()):
        remark(store, job, log=log.url, uuid=log.uuid())


def adopt_chain(
    log: CommitLog,
    store: BlobStore,
    job: str,
    at: Situation,
    location: str,
    probe: Callable[[str, Entry | None], Fault | None],
) -> list[Entry]:
    """Append a finished generation without record, and before it those of its ancestors that have none either.

    Returns:
        The entries appended here; fewer when another writer was quicker (that is no error: look again).
    """
    tip = next(f for f in at.found if f.location == location)
    recorded = {e.location for e in at.log.entries}
    open_ones = [f for f in at.found if f.complete and f.location not in recorded and f.log == at.log.uuid and vouched(at.log, f)]
    tail, done = at.log.tail, []
    for found in chain_to(tip, open_ones):
        if found.trajectory is None or not isinstance(judge(tail, found.trajectory), Append) or probe(found.location, None) is not None:
            continue
        _acknowledged(store, job, found.location)
        entry = append(log, store, job, found, tail)
        if entry is None:
            break
        tail = entry
        done.append(entry)
    return done


def _acknowledged(store: BlobStore, job: str, location: str) -> None:
    """See that a generation is where the user wants it before its record says that it exists: as its writer would have done.

    While the durable tier is down the record says it without: else what this host has would be lost to the job for an outage.
    """
    if isinstance(store, TieredStore) and store.acknowledge == DURABLE:
        try:
            bring(store, job, location)
        except StoreError as e:
            logger.warning("%s is not in the durable tier yet: %s", location, e.what)


def append(log: CommitLog, store: BlobStore, job: str, found: Found, tail: Entry | None) -> Entry | None:
    """Append one finished generation after ``tail``; its own attempt is looked for first when that is refused (rule 6).

    Returns:
        The entry; None if the tail has moved on without it.
    """
    manifest, data = read_manifest(store, job, found.location)
    last = tail.index if tail is not None else -1
    entry = msgspec.structs.replace(
        record(manifest, data, found.location), base=last if tail is None or tail.kind == "generation" else tail.base
    )
    try:
        return log.append(msgspec.structs.replace(entry, log=tail.log if tail else ""), expect_tail=last)
    except Withdrawn:
        return None
    except (TailMoved, LogAmbiguous):
        return own_entry(log.entries(after=last), entry.attempt)
