"""Moves the blocks of one snapshot: which connection asks which source for which run of blocks. Torch-free."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ftckpt.errors import ConfigError
from ftckpt.format.digest import digest_of
from ftckpt.transfer.crew import Source
from ftckpt.transfer.document import SnapshotDoc
from ftckpt.transfer.near import NearImage, near_image
from ftckpt.transfer.order import Fetched, Order, Progress
from ftckpt.transfer.peer import Blocks, Flaw, PeerConnection
from ftckpt.transfer.place import Place
from ftckpt.transfer.roster import PAUSE_S, STRIKES, TICK_S, Roster
from ftckpt.transfer.spans import Spans


class Engine:
    """One fetch; see ``client.fetch`` for the arguments. Blocks may arrive before the digests that they are checked against:
    what was found in them is kept until then, so that each is looked at once, while it is in cache."""

    def __init__(
        self,
        order: Order,
        target: Callable[[SnapshotDoc], memoryview | Place],
        accept: Callable[[SnapshotDoc], None] | None,
        on_progress: Callable[[Progress], None] | None,
        tls: ssl.SSLContext | None,
        started: float,
    ) -> None:
        self._order, self._target, self._accept, self._on_progress = order, target, accept, on_progress
        self._roster = Roster(order, tls, started)
        self._found: dict[int, tuple[str, Source]] = {}  # digests of blocks that nothing is known to compare with yet
        self._changed = self._roster.changed
        self._goal: tuple[SnapshotDoc, Place] | None = None
        self._near: NearImage | None = None
        self._done = 0
        self._retries = 0

    def run(self) -> Fetched:
        """Fetch, or raise what ``client.fetch`` says, or Unproven: the same without that source may succeed."""
        roster, workers = self._roster, list[threading.Thread]()
        try:
            roster.ask_all()
            for i in range(
                self._order.connections
            ):  # now, while nothing is there to be moved yet: starting them takes time on a busy machine
                workers.append(roster.thread(f"fetch-{i}", self._work))
            doc = roster.choose(self._accept)
            image = self._memory(doc)
            self._near = near_image(doc.near, image.size) if self._order.share_memory else None
            if blocks := doc.table.blocks:
                with self._changed:
                    self._spans = Spans(blocks, self._order.chunk // doc.table.block_bytes, self._order.connections)
                    self._goal = doc, image
                    for source in roster.sources:
                        source.served = time.monotonic()
                    self._changed.notify_all()
                self._watch(doc)
        finally:
            roster.stop()
            for thread in workers:  # none of them touches the target after this
                thread.join(self._order.patience.connect + 1)
            if self._near is not None and not any(thread.is_alive() for thread in workers):
                self._near.close()
        table = msgspec.structs.replace(doc.table, digests=roster.digests or ())
        return Fetched(
            doc=msgspec.structs.replace(doc, table=table),
            image=image.whole,
            place=image,
            sources={s.url: s.bytes for s in roster.sources if s.bytes},
            dropped={s.url: s.flaw.why for s in roster.sources if s.state == "out"},
            retries=self._retries,
            seconds=time.monotonic() - roster.started,
            near=self._near is not None and roster.chosen is not None and roster.chosen.state == "used",
        )

    def _memory(self, doc: SnapshotDoc) -> Place:
        target = self._target(doc)
        image = target if isinstance(target, Place) else Place(target)
        readonly = image.whole.readonly or any(part.memory.readonly for part in image.parts)
        if readonly or image.size != doc.table.image_bytes:
            raise ConfigError(
                f"the target for step {self._order.step} has {image.size} bytes{' and is read-only' if readonly else ''}; the image has {doc.table.image_bytes}",
                now="nothing was fetched",
            )
        return image

    def _work(self) -> None:
        """One connection's worth of work: ask the least busy source for the next run of blocks, until none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._goal is not None or self._roster.stopped)
            if self._goal is None:
                return
            doc, image = self._goal
        source: Source | None = None
        connection: PeerConnection | None = None
        try:
            while (task := self._next_task(doc, source)) is not None:
                chosen, run = task
                if connection is None or chosen is not source:
                    if connection is not None:
                        self._roster.disconnect(connection)
                    source, connection = chosen, self._roster.connect(chosen)
                self._take(connection, chosen, run, doc, image)
        finally:
            if connection is not None:
                self._roster.disconnect(connection)

    def _next_task(self, doc: SnapshotDoc, current: Source | None) -> tuple[Source, Blocks] | None:
        """Wait until there is a source and a run of blocks; None when the fetch has ended."""
        with self._changed:
            while not self._ended(doc):
                used = [s for s in self._roster.sources if s.state == "used"]
                used = [s for s in used if self._is_near(s)] or used  # no socket is as fast
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

    def _take(self, connection: PeerConnection, source: Source, run: Blocks, doc: SnapshotDoc, image: Place) -> None:
        """Fetch one run; what of it did not arrive goes back to be asked for again."""
        table, line = doc.table, source.line
        got = 0

        def on_block(block: int, pieces: Sequence[memoryview]) -> bool:
            nonlocal got
            found = digest_of(pieces)
            with self._changed:
                expected = self._roster.digests
                if expected is None:
                    self._found[block] = found, source
                else:
                    self._verify(doc, block, found, expected[block], source)
                got += 1
                source.strikes, source.served = 0, time.monotonic()
                return not self._roster.stopped and source.state == "used"

        flaw: Flaw | None = None
        try:
            if self._near is not None and self._is_near(source):
                self._near.blocks_into(run, table.block_bytes, image, on_block)
            else:
                connection.blocks_into(line.snapshot if line else "", run, table.block_bytes, image, on_block)
        except Flaw as e:
            flaw = e
        with self._changed:
            if got < run.count:
                self._again(Blocks(run.first + got, run.count - got))
            if flaw is not None:
                bearable = flaw.busy and time.monotonic() - source.served < self._order.patience.stall
                source.strikes += not bearable
        if flaw is not None and (flaw.fatal or source.strikes >= STRIKES):
            self._roster.drop(source, flaw)
        elif flaw is not None:
            time.sleep(PAUSE_S)

    def _is_near(self, source: Source) -> bool:
        return self._near is not None and source is self._roster.chosen

    def _verify(self, doc: SnapshotDoc, block: int, found: str, expected: str, source: Source) -> None:
        """Count a block, or raise Flaw. Lock held."""
        if found != expected:
            raise Flaw(f"it sent bad bytes in block {block}: expected {expected}, found {found}", fatal=True)
        table = doc.table
        self._done += 1
        source.bytes += min(table.block_bytes, table.image_bytes - block * table.block_bytes)
        if self._done == table.blocks:
            self._changed.notify_all()

    def _settle(self, doc: SnapshotDoc) -> None:
        """Judge the blocks that came before the digests. Lock held."""
        expected = self._roster.digests
        if expected is None or not self._found:
            return
        came, self._found = self._found, {}
        for block, (found, source) in came.items():
            try:
                self._verify(doc, block, found, expected[block], source)
            except Flaw as flaw:
                self._again(Blocks(block, 1))
                self._roster.drop(source, flaw)

    def _again(self, run: Blocks) -> None:
        """These blocks are to be asked for once more. Lock held."""
        self._spans.give_back(run)
        self._retries += 1
        self._changed.notify_all()

    def _watch(self, doc: SnapshotDoc) -> None:
        """Wait for the last block, telling of progress."""
        table, roster = doc.table, self._roster
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended(doc) or (self._found and roster.digests is not None), TICK_S)
                self._settle(doc)
                roster.standing = f"{self._done} of {table.blocks} blocks had arrived; the target is incomplete and must not be used"
                done = self._done == table.blocks
                if roster.crash is not None:
                    raise roster.crash
                if not done and roster.lost is not None and len(roster.sources) > 1:
                    raise roster.lost
                if not done and roster.forsaken():
                    raise roster.failure()
                if not done:
                    roster.check_total()
                arrived = sum(s.bytes for s in roster.sources)
            if self._on_progress is not None:
                self._on_progress(Progress(done=arrived, bytes=table.image_bytes, seconds=time.monotonic() - roster.started))
            if done:
                return

    def _ended(self, doc: SnapshotDoc) -> bool:
        """Whether nothing is left to do, or nobody to ask. Lock held."""
        roster = self._roster
        return roster.stopped or self._done == doc.table.blocks or roster.crash is not None or roster.lost is not None or roster.forsaken()
