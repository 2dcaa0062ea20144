"""How a snapshot is taken: who has it, which connection asks whom for which blocks, and who is given up. Torch-free.

Decisions are made under one lock; every byte moves outside it. Threads: one scout per source, one worker per connection.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from ftckpt.domain.names import check_name
from ftckpt.errors import ConfigError, DeadlineExceeded, FtckptError, PeerError, Unauthorized
from ftckpt.transfer.document import SnapshotDoc, SnapshotLine, check_doc, decode, line_of
from ftckpt.transfer.peer import Blocks, Flaw, PeerConnection, Pulse
from ftckpt.transfer.spans import Spans

log = logging.getLogger("ftckpt.transfer.client")
ASK_S = 10.0  # one question for a step that is not there yet
PAUSE_S = 0.1  # before a question is asked again
GRACE_S = 0.25  # the assigned source may answer that much later than the first
STRIKES = 2  # failed connections in a row, then a source is given up
TICK_S = 0.25


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long to wait for what, in seconds.

    Args:
        connect: for a connection to be accepted.
        stall: without a single byte from a source, before it is dropped.
        find: for any source to publish the step.
        total: for everything; None: as long as bytes flow.
    """

    connect: float = 5.0
    stall: float = 5.0
    find: float = 60.0
    total: float | None = None


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a fetch is: verified bytes, all bytes, seconds since the request."""

    done: int
    bytes: int
    seconds: float


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that has arrived, every block verified.

    Args:
        doc: its document.
        image: the target, filled.
        sources: verified bytes by source URL.
        dropped: sources that were given up, with the reason.
        retries: runs of blocks that had to be asked for again.
        seconds: from request to the last verified block.
    """

    doc: SnapshotDoc
    image: memoryview
    sources: Mapping[str, int]
    dropped: Mapping[str, str]
    retries: int
    seconds: float


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be fetched, from whom, and how."""

    urls: tuple[str, ...]
    step: int
    job: str
    key: bytes
    connections: int
    chunk: int
    patience: Patience


class Source:
    """What is known of one peer. ``state``: asked, offers (has the step), used (has our bytes) or out."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.pulse = Pulse()
        self.state = "asked"
        self.line: SnapshotLine | None = None
        self.flaw = Flaw("")
        self.bytes = 0
        self.load = 0
        self.strikes = 0


class Engine:
    """One fetch. See ``client.fetch`` for the arguments."""

    def __init__(
        self,
        order: Order,
        target: Callable[[SnapshotDoc], memoryview],
        accept: Callable[[SnapshotDoc], None] | None,
        on_progress: Callable[[Progress], None] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._order, self._target, self._accept, self._on_progress, self._tls = order, target, accept, on_progress, tls
        self._changed = threading.Condition()
        self._sources = [Source(u) for u in order.urls]
        self._connections: set[PeerConnection] = set()
        self._refusals: list[FtckptError] = []
        self._crash: BaseException | None = None
        self._stopped = False
        self._started = time.monotonic()
        self._doc: SnapshotDoc | None = None
        self._line: SnapshotLine | None = None
        self._image = memoryview(b"")
        self._spans = Spans(0, 1, 1)
        self._done = 0
        self._retries = 0

    def run(self) -> Fetched:
        """Fetch, or raise what ``client.fetch`` says."""
        workers: list[threading.Thread] = []
        try:
            for i, source in enumerate(self._sources):
                self._thread(f"fetch-scout-{i}", lambda s=source: self._scout(s))  # type: ignore[misc]
            doc = self._choose()
            self._prepare(doc)
            if doc.table.blocks:
                workers += [self._thread(f"fetch-{i}", self._work) for i in range(min(self._order.connections, doc.table.blocks))]
                self._watch(doc)
        finally:
            self._stop(workers)
        return Fetched(
            doc=doc,
            image=self._image,
            sources={s.url: s.bytes for s in self._sources if s.bytes},
            dropped={s.url: s.flaw.why for s in self._sources if s.state == "out"},
            retries=self._retries,
            seconds=time.monotonic() - self._started,
        )

    # ------------------------------------------------------------------ who has it
    def _scout(self, source: Source) -> None:
        """Ask one source until it has the step, fails for good, or the time is over."""
        deadline = self._started + self._order.patience.find
        connection = self._connect(source)
        failures = 0
        while not self._stopped:
            wait = min(ASK_S, deadline - time.monotonic())
            if wait <= 0:
                return self._drop(source, Flaw(f"it did not publish step {self._order.step} in time", absent=True))
            try:
                line = decode(connection.document(f"step/{self._order.step}?wait={wait:.3f}", wait=wait), SnapshotLine, source.url)
                check_name("snapshot", line.snapshot)
                return self._offer(source, line)
            except Flaw as flaw:
                failures = 0 if flaw.absent else failures + 1
                if flaw.fatal or failures > STRIKES:
                    return self._drop(source, flaw)
                time.sleep(PAUSE_S)
            except FtckptError as e:
                return self._drop(source, Flaw(e.what, fatal=True))

    def _offer(self, source: Source, line: SnapshotLine) -> None:
        with self._changed:
            if source.state != "asked":
                return
            source.line, source.state = line, "offers"
            self._compare(source)
            self._changed.notify_all()

    def _compare(self, source: Source) -> None:
        """Once it is known what is fetched, a source that offers the same bytes shares the load. Lock held."""
        mine, its = self._line, source.line
        if mine is None or its is None or source.state != "offers":
            return
        if (its.content, its.trajectory) == (mine.content, mine.trajectory):
            source.state = "used"
        else:
            source.state, source.flaw = "out", Flaw(f"it holds other bytes of step {its.step} (trajectory {its.trajectory[:8]}, content {its.content[:8]})")

    def _choose(self) -> SnapshotDoc:
        """The document of the first source, in the given order, that has an acceptable one."""
        while True:
            source = self._next_offer()
            try:
                doc = self._read_doc(source)
            except Flaw as flaw:
                self._drop(source, flaw)
                continue
            except PeerError as e:
                self._drop(source, Flaw(e.what, fatal=True))
                continue
            try:
                if self._accept is not None:
                    self._accept(doc)
            except FtckptError as e:
                self._refusals.append(e)
                self._drop(source, Flaw(f"refused: {e.what}", fatal=True))
                continue
            return doc

    def _next_offer(self) -> Source:
        first_seen = 0.0
        with self._changed:
            while True:
                if self._crash is not None:
                    raise self._crash
                now = time.monotonic()
                offers = [i for i, s in enumerate(self._sources) if s.state == "offers"]
                asked = [i for i, s in enumerate(self._sources) if s.state == "asked"]
                if offers:
                    first_seen = first_seen or now
                    earlier = any(i < offers[0] for i in asked)
                    if not earlier or now >= first_seen + GRACE_S:
                        return self._sources[offers[0]]
                elif not asked:
                    raise self._failure()
                self._check_total(now)
                self._changed.wait(0.05 if offers else TICK_S)

    def _read_doc(self, source: Source) -> SnapshotDoc:
        line = source.line
        if line is None:
            raise Flaw("it offered nothing", fatal=True)
        connection = self._connect(source)
        try:
            doc = decode(connection.document(f"snapshots/{line.snapshot}"), SnapshotDoc, source.url)
        finally:
            self._disconnect(connection)
        check_doc(doc, self._order.job, self._order.step, source.url)
        if line_of(doc) != line:
            raise PeerError(f"{source.url} listed another snapshot than it delivered")
        return doc

    def _prepare(self, doc: SnapshotDoc) -> None:
        """Get the memory for the image and let the workers loose on the sources that hold it."""
        image = self._target(doc).cast("B")
        if image.readonly or len(image) != doc.table.image_bytes:
            raise ConfigError(
                f"the target for step {self._order.step} has {len(image)} bytes{' and is read-only' if image.readonly else ''}; the image has {doc.table.image_bytes}",
                now="nothing was fetched",
            )
        with self._changed:
            self._doc, self._line, self._image = doc, line_of(doc), image
            self._spans = Spans(doc.table.blocks, self._order.chunk // doc.table.block_bytes, self._order.connections)
            for source in self._sources:
                self._compare(source)

    # ------------------------------------------------------------------ the bytes
    def _work(self) -> None:
        """One connection's worth of work: ask the least busy source for the next run of blocks, until none is left."""
        source: Source | None = None
        connection: PeerConnection | None = None
        while (task := self._next_task(source)) is not None:
            chosen, run = task
            if connection is None or chosen is not source:
                if connection is not None:
                    self._disconnect(connection)
                source, connection = chosen, self._connect(chosen)
            self._take(connection, chosen, run)
        if connection is not None:
            self._disconnect(connection)

    def _next_task(self, current: Source | None) -> tuple[Source, Blocks] | None:
        """Wait until there is a source and a run of blocks; None when the fetch has ended."""
        with self._changed:
            while not self._ended():
                used = [s for s in self._sources if s.state == "used"]
                run = self._spans.take() if used else None
                if run is not None:
                    chosen = min(used, key=lambda s: s.load - (s is current))
                    if current is not None and current in used and current.load <= chosen.load + 1:
                        chosen = current
                    if chosen is not current:
                        chosen.load += 1
                        if current is not None:
                            current.load -= 1
                    return chosen, run
                self._changed.wait(TICK_S)
            return None

    def _take(self, connection: PeerConnection, source: Source, run: Blocks) -> None:
        doc, line = self._doc, source.line
        if doc is None or line is None:
            return
        table = doc.table
        got = 0

        def on_block(block: int) -> bool:
            nonlocal got
            with self._changed:
                got += 1
                self._done += 1
                source.bytes += min(table.block_bytes, table.image_bytes - block * table.block_bytes)
                source.strikes = 0
                if self._done == table.blocks:
                    self._changed.notify_all()
                return not self._stopped and source.state == "used"

        flaw: Flaw | None = None
        try:
            connection.blocks_into(line.snapshot, run, table.block_bytes, table.digests, self._image, on_block)
        except Flaw as e:
            flaw = e
        with self._changed:
            if got < run.count:
                self._spans.give_back(Blocks(run.first + got, run.count - got))
                self._retries += 1
                self._changed.notify_all()
        if flaw is not None and not self._stopped:
            source.strikes += 1
            if flaw.fatal or source.strikes >= STRIKES:
                self._drop(source, flaw)
            else:
                time.sleep(PAUSE_S)

    def _watch(self, doc: SnapshotDoc) -> None:
        """Wait for the last block, telling of progress."""
        size = doc.table.image_bytes
        while True:
            with self._changed:
                self._changed.wait_for(self._ended, TICK_S)
                done, failed = self._done == doc.table.blocks, self._crash
                if failed is not None:
                    raise failed
                if not done and self._forsaken():
                    raise self._failure()
                if not done:
                    self._check_total(time.monotonic())
                arrived = sum(s.bytes for s in self._sources)
            if self._on_progress is not None:
                self._on_progress(Progress(done=arrived, bytes=size, seconds=time.monotonic() - self._started))
            if done:
                return

    # ------------------------------------------------------------------ common
    def _ended(self) -> bool:
        """Whether nothing is left to do or nobody is left to ask. Lock held."""
        complete = self._doc is not None and self._done == self._doc.table.blocks
        return self._stopped or complete or self._crash is not None or self._forsaken()

    def _forsaken(self) -> bool:
        return all(s.state == "out" for s in self._sources)

    def _drop(self, source: Source, flaw: Flaw) -> None:
        with self._changed:
            if source.state == "out" or self._stopped:
                return
            source.state, source.flaw = "out", flaw
            self._changed.notify_all()
        log.warning("step %d: gave up %s: %s", self._order.step, source.url, flaw.why)

    def _check_total(self, now: float) -> None:
        total = self._order.patience.total
        if total is not None and now - self._started > total:
            raise DeadlineExceeded(
                f"step {self._order.step} was not fetched within {total:g} s; {self._reasons()}",
                now=self._standing(),
                todo="check the network's speed against the size of the state, or allow more time",
            )

    def _failure(self) -> FtckptError:
        """Why no source is left. Lock held."""
        flaws = [s.flaw for s in self._sources]
        if self._refusals:
            return self._refusals[0]
        text, now = f"step {self._order.step} could not be taken from any peer; {self._reasons()}", self._standing()
        if all(f.stranger for f in flaws):
            return Unauthorized(text, now=now, todo="give all replicas of the job the same secret")
        if any(f.absent and not f.fatal for f in flaws):
            return DeadlineExceeded(text, now=now, todo="see the other replicas' logs: they are at another step, or publish too late")
        return PeerError(text, now=now, todo="see the log of the agents named; the next quorum names other sources")

    def _reasons(self) -> str:
        return "; ".join(f"{s.url}: {s.flaw.why or s.state}" for s in self._sources)

    def _standing(self) -> str:
        if self._doc is None:
            return "nothing was taken"
        return f"{self._done} of {self._doc.table.blocks} blocks had arrived; the target is incomplete and must not be used"

    def _connect(self, source: Source) -> PeerConnection:
        patience = self._order.patience
        connection = PeerConnection(
            source.url, self._order.job, self._order.key, connect_s=patience.connect, stall_s=patience.stall, pulse=source.pulse, tls=self._tls
        )
        with self._changed:
            self._connections.add(connection)
            if self._stopped:
                connection.abort()
        return connection

    def _disconnect(self, connection: PeerConnection) -> None:
        connection.close()
        with self._changed:
            self._connections.discard(connection)

    def _thread(self, name: str, act: Callable[[], None]) -> threading.Thread:
        """Start a thread whose crash ends the fetch on the calling thread."""

        def body() -> None:
            try:
                act()
            except BaseException as e:  # noqa: BLE001 - handed over, raised by _watch or _next_offer
                with self._changed:
                    self._crash = self._crash or e
                    self._changed.notify_all()

        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread

    def _stop(self, workers: list[threading.Thread]) -> None:
        """End all threads; no worker touches the target after this."""
        with self._changed:
            self._stopped = True
            open_now = list(self._connections)
            self._changed.notify_all()
        for connection in open_now:
            connection.abort()
        for thread in workers:
            thread.join(self._order.patience.connect + 1)
        for connection in open_now:
            connection.close()
