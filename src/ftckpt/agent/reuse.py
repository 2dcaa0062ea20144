"""What this agent leaves out of a save because the generation before it has it already. Reads headers and manifests; writes nothing.

The generation before (the base) is the newest committed one on the state's own trajectory. A save refers to files of the base and
of what the base itself refers to, nothing else: while the base's record is in the log no clean-up removes any of them, and
the append compares that it is (``Entry.via``).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque

from ftckpt.agent.desk import Desk
from ftckpt.agent.jobs import Job
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import generation_dir
from ftckpt.errors import FtckptError
from ftckpt.flows.read import open_shard, read_manifest
from ftckpt.format.manifest import Manifest, ShardInfo
from ftckpt.format.reuse import Key, Place, Reduced, box_digests, holder_of, info_of, known_boxes, reduce
from ftckpt.format.table import Holder, TensorTable
from ftckpt.ports import BlobStore, CommitLog

logger = logging.getLogger("ftckpt.agent")

MAX_HOLDERS = 16  # generations that one refers to, at most: those with the most bytes; what is in others is stored anew
_REMEMBERED = 3  # own saves whose digests are at hand; older ones are read from their headers
_LAGGING = 4  # bases of earlier saves that another rank, slower to learn of commits, may still take


class Reuse:
    """Thread-safe: ``reduced`` and ``wrote`` on the thread ``persist``, the others anywhere."""

    def __init__(self, store: BlobStore, log: CommitLog, desk: Desk) -> None:
        self._store, self._log, self._desk = store, log, desk
        self._lock = threading.Lock()
        self._written: OrderedDict[str, dict[Key, Place]] = OrderedDict()
        self._opened: Entry | None = None  # base of the newest ``open`` entry
        self._doubted: set[int] = set()
        self._bases: dict[tuple[int, int], int] = {}
        self._lately: deque[int] = deque(maxlen=_LAGGING)
        self._checked: set[Holder] = set()

    def reduced(self, job: Job, image: memoryview) -> tuple[Reduced, Entry | None]:
        """A save's image without what is stored already, and the base where that is something."""
        boxes = box_digests(job.table, image, job.config.persist_threads)
        base, known, holders = None, dict[Key, Place](), set[Holder]()
        try:
            base = self._base(job)
            if base is not None:
                with self._lock:
                    self._bases[job.session, job.save.ordinal] = base.index
                    self._lately.append(base.index)
                known, holders = self._known(job, base)
        except FtckptError as e:  # what cannot be read is not referred to
            logger.warning("save of step %d is stored whole: %s", job.save.trajectory.step, e.what)
            known, holders = {}, set()
        found = reduce(job.table, image, boxes, known, holders)
        return found, base if found.refers else None

    def wrote(self, job: Job, table: TensorTable, info: ShardInfo) -> None:
        """A save of this rank is durable: its digests are known without reading it."""
        self._written[job.name] = known_boxes(table, holder_of(job.name, info))
        while len(self._written) > _REMEMBERED:
            self._written.popitem(last=False)

    def doubt(self, indices: tuple[int, ...]) -> None:
        """These generations do not verify: the next save refers to none of them."""
        with self._lock:
            self._doubted.update(indices)

    def in_use(self, group_world_size: int) -> set[int]:
        """Generations through which saves in flight know files of others: not to be withdrawn now."""
        flight = self._desk.flight()
        with self._lock:
            self._bases = {key: index for key, index in self._bases.items() if key in flight}
            held = set(self._bases.values())
            return held | set(self._lately) if flight and group_world_size > 1 else held

    def _base(self, job: Job) -> Entry | None:
        tail = self._desk.tail
        if tail is not None and tail.kind == "open":
            tail = self._opened_by(tail, job.config.log_timeout_s)
        if tail is None or not job.save.trajectory.holds(tail.trajectory) or tail.log != self._desk.log_uuid:
            return None
        with self._lock:
            return None if tail.index in self._doubted else tail

    def _opened_by(self, tail: Entry, timeout: float) -> Entry | None:
        if tail.base < 0:
            return None
        if self._opened is None or (self._opened.log, self._opened.index) != (tail.log, tail.base):
            self._opened = self._log.entry(tail.base, timeout=timeout)
        return self._opened if self._opened.log == tail.log else None

    def _known(self, job: Job, base: Entry) -> tuple[dict[Key, Place], set[Holder]]:
        """Boxes that the base has, and the files of them that are still there."""
        manifest, _ = read_manifest(self._store, job.config.job, base.location, base)
        known = self._written.get(base.location)
        if known is None:
            known = self._stored(job, base, manifest)
        allowed = {base.location, *_largest(manifest)}
        files = {place.holder for place in known.values() if place.holder.location in allowed}
        self._checked &= files
        return known, {holder for holder in files if self._alive(job, holder)}

    def _stored(self, job: Job, base: Entry, manifest: Manifest) -> dict[Key, Place]:
        """What the same rank's shard of the base says; ranks that hold other parts than they did find nothing in it."""
        info = next((s for s in manifest.shards if s.rank == job.config.rank), None)
        if info is None:
            return {}
        reader, image = open_shard(self._store, job.config.job, base.location, info)
        with reader:
            return known_boxes(image.table, holder_of(base.location, info))

    def _alive(self, job: Job, holder: Holder) -> bool:
        """Whether a file is there with its size, and (looked at once) its header."""
        try:
            if holder in self._checked or holder.location in self._written:
                with self._store.reader(f"{generation_dir(job.config.job, holder.location)}/{holder.file}") as reader:
                    return reader.size == holder.bytes
            with open_shard(self._store, job.config.job, holder.location, info_of(holder))[0]:
                self._checked.add(holder)
        except FtckptError as e:
            logger.warning("what %s/%s holds is stored anew: %s", holder.location, holder.file, e.what)
            return False
        return True


def _largest(manifest: Manifest) -> list[str]:
    """Generations that the base refers to, but for those with the fewest bytes where they are many. Alike on all ranks."""
    used: dict[str, int] = {}
    for r in manifest.refers:
        used[r.location] = used.get(r.location, 0) + r.used
    return sorted(used, key=lambda location: (used[location], location), reverse=True)[: MAX_HOLDERS - 1]
