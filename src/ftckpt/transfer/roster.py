"""The peers of one fetch: who has the step, who holds the same bytes, who is given up and why. Must not move image bytes.

Decisions are made under one lock (``changed``), which the engine shares; every byte moves outside it.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable

import msgspec

from ftckpt.domain.names import check_name
from ftckpt.errors import DeadlineExceeded, FtckptError, PeerError, Unauthorized
from ftckpt.transfer.crew import Crew, Source
from ftckpt.transfer.document import Proof, SnapshotDoc, SnapshotLine, check_doc, decode, line_of
from ftckpt.transfer.order import Order
from ftckpt.transfer.peer import Flaw, PeerConnection

log = logging.getLogger("ftckpt.transfer.client")
ASK_S = 10.0  # one question for a step that is not there yet
PAUSE_S = 0.1  # before a question is asked again
GRACE_S = 0.25  # the assigned source may answer that much later than the first
STRIKES = 2  # failed connections in a row, then a source is given up
TICK_S = 0.25


class Unproven(Exception):
    """The source whose document was taken is given up, and nobody knows the digests of its bytes: what came of it is worth nothing.

    Args:
        url: of that source.
        why: it was given up.
    """

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(f"{url}: {why}")


class Roster(Crew):
    """The sources of one fetch, their connections, and the threads that use them.

    Args:
        order: what is fetched.
        tls: client-side context for ``https``.
        started: when the fetch began (monotonic seconds).
    """

    def __init__(self, order: Order, tls: ssl.SSLContext | None, started: float) -> None:
        super().__init__(order, tls)
        self.started = started
        self.standing = "nothing was taken"
        self._chosen: Source | None = None
        self._blocks = 0
        self._refusals: list[FtckptError] = []
        self._alone_since = 0.0

    @property
    def chosen(self) -> Source | None:
        """The source whose document was taken."""
        return self._chosen

    @property
    def digests(self) -> tuple[str, ...] | None:
        """What the bytes are checked against; None while the source is still making it."""
        return self._chosen.digests if self._chosen is not None else None

    @property
    def lost(self) -> Unproven | None:
        """Set when nobody will tell any more what the bytes are to be checked against."""
        chosen = self._chosen
        gone = chosen is not None and chosen.state == "out" and chosen.digests is None
        return Unproven(chosen.url, chosen.flaw.why) if chosen is not None and gone else None

    # ------------------------------------------------------------------ who has it
    def ask_all(self) -> None:
        """Start one scout per source."""
        for i, source in enumerate(self.sources):
            self.thread(f"fetch-scout-{i}", lambda s=source: self._scout(s))  # type: ignore[misc]

    def choose(self, accept: Callable[[SnapshotDoc], None] | None) -> SnapshotDoc:
        """The document of the first source, in the given order, that has an acceptable one; its like are then ``used``."""
        while True:
            source = self._next_offer()
            try:
                doc = self._read_doc(source)
                if accept is not None:
                    accept(doc)
            except Flaw as flaw:
                self.drop(source, flaw)
                continue
            except FtckptError as e:
                if not isinstance(e, PeerError):
                    self._refusals.append(e)
                self.drop(source, Flaw(f"refused: {e.what}", fatal=True))
                continue
            with self.changed:
                self._chosen, self._blocks, source.state = source, doc.table.blocks, "used"
                if len(doc.table.digests) == doc.table.blocks:
                    source.line, source.digests = line_of(doc), doc.table.digests
                elif source.digests is not None and len(source.digests) != self._blocks:
                    source.digests = None  # what it tells of its own bytes does not fit them: it will be lost
                    self.drop(source, Flaw("its digests do not fit its document", fatal=True))
                self._compare_all()
            return doc

    def _scout(self, source: Source) -> None:
        """Ask one source until it has the step and its digests, fails for good, or the time is over."""
        connection = self.connect(source)
        try:
            self._ask(source, connection)
            self._ask_digests(source, connection)
            self.rest(source, connection)
        except Flaw as flaw:
            self.disconnect(connection)
            self.drop(source, flaw)
        except FtckptError as e:
            self.disconnect(connection)
            self.drop(source, Flaw(e.what, fatal=True))

    def _ask(self, source: Source, connection: PeerConnection) -> None:
        body = self._until(connection, f"step/{self.order.step}", f"it did not publish step {self.order.step} in time")
        if body is None:
            return
        line = decode(body, SnapshotLine, source.url)
        check_name("snapshot", line.snapshot)
        with self.changed:
            source.line, source.state = line, "offers"
            self._compare_all()
            self.changed.notify_all()

    def _ask_digests(self, source: Source, connection: PeerConnection) -> None:
        line = source.line
        if line is None or line.content:
            return
        body = self._until(connection, f"snapshots/{line.snapshot}/digests", "it did not make the digests of its bytes in time")
        if body is None:
            return
        proof = decode(body, Proof, source.url)
        with self.changed:
            if source is self._chosen and len(proof.digests) != self._blocks:
                raise Flaw(f"it has {len(proof.digests)} digests for {self._blocks} blocks", fatal=True)
            source.line, source.digests = msgspec.structs.replace(line, content=proof.content), proof.digests
            self._compare_all()
            self.changed.notify_all()

    def _until(self, connection: PeerConnection, path: str, late: str) -> bytes | None:
        """Ask for a document until it is there; None when the fetch has ended meanwhile. Raises Flaw."""
        deadline = max(self.started, time.monotonic() if self._chosen else 0.0) + self.order.patience.find
        failures = 0
        while not self.stopped:
            wait = min(ASK_S, deadline - time.monotonic())
            if wait <= 0:
                raise Flaw(late, absent=True)
            try:
                return connection.document(f"{path}?wait={wait:.3f}", wait=wait)
            except Flaw as flaw:
                failures = 0 if flaw.absent or flaw.busy else failures + 1
                if flaw.fatal or failures > STRIKES:
                    raise
                time.sleep(PAUSE_S)
        return None

    def _compare_all(self) -> None:
        """Once it is known what is fetched, sources that offer the same bytes share the load. Lock held."""
        chosen = self._chosen
        mine = chosen.line if chosen is not None else None
        if chosen is None or mine is None or not mine.content:
            return
        for source in self.sources:
            its = source.line
            if source.state != "offers" or its is None or not its.content:
                continue
            if (its.content, its.trajectory) == (mine.content, mine.trajectory):
                source.state = "used"
            else:
                why = f"it holds other bytes of step {its.step} (trajectory {its.trajectory[:8]}, content {its.content[:8]})"
                source.state, source.flaw = "out", Flaw(why)

    def _next_offer(self) -> Source:
        first_seen = 0.0
        with self.changed:
            while True:
                if self.crash is not None:
                    raise self.crash
                now = time.monotonic()
                offers = [i for i, s in enumerate(self.sources) if s.state == "offers"]
                asked = [i for i, s in enumerate(self.sources) if s.state == "asked"]
                if offers:
                    first_seen = first_seen or now
                    if now >= first_seen + GRACE_S or not any(i < offers[0] for i in asked):
                        return self.sources[offers[0]]
                elif self.forsaken():
                    raise self.failure()
                self.check_total()
                self.changed.wait(0.05 if offers else TICK_S)

    def _read_doc(self, source: Source) -> SnapshotDoc:
        line = source.line
        if line is None:
            raise Flaw("it offered nothing", fatal=True)
        connection = self.connect(source)
        try:
            doc = decode(connection.document(f"snapshots/{line.snapshot}"), SnapshotDoc, source.url)
        finally:
            self.rest(source, connection)
        check_doc(doc, self.order.job, self.order.step, source.url)
        found = line_of(doc)
        if found != (line if line.content else msgspec.structs.replace(line, content=found.content)):
            raise PeerError(f"{source.url} listed another snapshot than it delivered")
        return doc

    # ------------------------------------------------------------------ who is given up, and why
    def drop(self, source: Source, flaw: Flaw) -> None:
        """Take nothing more from a source."""
        with self.changed:
            if source.state == "out" or self.stopped:
                return
            source.state, source.flaw = "out", flaw
            self.changed.notify_all()
        log.warning("step %d: gave up %s: %s", self.order.step, source.url, flaw.why)

    def forsaken(self) -> bool:
        """Whether nobody is left, or only such as were not assigned and have had their time. Lock held."""
        if all(s.state == "out" for s in self.sources):
            return True
        if self.sources[0].state != "out" or any(s.state in ("offers", "used") for s in self.sources):
            self._alone_since = 0.0
            return False
        self._alone_since = self._alone_since or time.monotonic()
        others = self.order.patience.others
        return others is not None and time.monotonic() - self._alone_since >= others

    def check_total(self) -> None:
        """Raise DeadlineExceeded when the time for everything is over. Lock held."""
        total = self.order.patience.total
        if total is not None and time.monotonic() - self.started > total:
            raise DeadlineExceeded(
                f"step {self.order.step} was not fetched within {total:g} s; {self._reasons()}",
                now=self.standing,
                todo="check the network's speed against the size of the state, or allow more time",
            )

    def failure(self) -> FtckptError:
        """Why no source is left. Lock held."""
        flaws = [s.flaw for s in self.sources]
        if self._refusals:
            return self._refusals[0]
        text = f"step {self.order.step} could not be taken from any peer; {self._reasons()}"
        if all(f.stranger for f in flaws):
            return Unauthorized(text, now=self.standing, todo="give all replicas of the job the same secret")
        if any(f.absent and not f.fatal for f in flaws):
            return DeadlineExceeded(
                text, now=self.standing, todo="see the other replicas' logs: they are at another step, or publish too late"
            )
        return PeerError(text, now=self.standing, todo="see the log of the agents named; the next quorum names other sources")

    def _reasons(self) -> str:
        said = {"asked": "it has not published the step"}
        return "; ".join(f"{s.url}: {s.flaw.why or said.get(s.state, s.state)}" for s in self.sources)
