"""Bringing a generation from the first tier to the durable one: file by file, every block verified on the way, manifest last.

Files stay as they are, byte for byte. What an earlier, interrupted run brought there whole is not brought again. It appends no
record and notes no placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import GenerationName, generation_dir
from ftckpt.errors import ConfigError, Damaged, NotFound, SaveFailed, StoreError
from ftckpt.flows.read import open_shard, read_manifest, read_small
from ftckpt.flows.scan import look
from ftckpt.flows.target import check_copy, occupied
from ftckpt.format.manifest import INTENT, MANIFEST, ShardInfo
from ftckpt.ports import BlobStore
from ftckpt.stores.tiered import TieredStore
from ftckpt.wiring import read_marker

Going = Callable[[], bool]
Moved = Callable[[int], None]

_WINDOW = 8 << 20  # bytes written at a time
_HELP_S = 60.0  # then the shard of another rank, whose agent may have died, is brought too
_SLOW = 50e6  # bytes per second that its agent is trusted with besides: a large one takes its time, and would be copied twice
_POLL_S = 0.2


def bring(
    store: TieredStore,
    job: str,
    location: str,
    entry: Entry | None = None,
    *,
    own: Collection[int] | None = None,
    going: Going = lambda: True,
    moved: Moved = lambda count: None,
) -> int:
    """Make a generation that the first tier has whole in the durable one.

    Args:
        entry: its record; with it the manifest's sha256 is compared.
        own: ranks whose shards are brought; those of others are waited for (their agents bring them), and brought only if they
            are late: by a minute, and a second more for each 50 MB. None: all are brought.
        going: asked every few megabytes; False ends the work.
        moved: called with the number of bytes just written.

    Returns:
        Bytes written; 0 if it was there already.

    Raises:
        Damaged: the first tier has it not, or not whole. StoreError: the durable tier fails, is not this job's, or has something
            else under that name. SaveFailed: it was told to stop.
    """
    check_bound(store.durable, job)
    name = GenerationName.parse(location)
    with _target():
        if name is not None and look(store.durable, job, name).complete:
            return 0
    manifest, data = read_manifest(store, job, location, entry)
    work = _Bring(store, job, location, going, moved)
    for other in sorted({r.location for r in manifest.refers}):
        bring(store, job, other, going=going, moved=moved)  # files of it hold tensors of this one
    work.plain(INTENT)  # what an interruption leaves is then known as this job's
    for small in (manifest.leaves, *(c.file for c in manifest.cursors)):
        found = read_small(store, job, location, small)
        work.small(small.file, found)
    mine = [s for s in manifest.shards if own is None or s.rank in own]
    for shard in mine:
        work.shard(shard)
    since = time.monotonic()  # what took long for these takes as long for others
    waiting = [s for s in manifest.shards if s not in mine]
    while waiting := [s for s in waiting if not work.there(s)]:
        for shard in waiting:
            if time.monotonic() > since + _HELP_S + shard.bytes / _SLOW:
                work.shard(shard)
        work.keep_going()
        time.sleep(_POLL_S)
    work.small(MANIFEST, data, near=False)
    check_copy(
        store.durable, job, location, manifest.step, entry,
        now="the first tier has it whole", todo="check the durable tier's storage; copying is tried again",
    )  # fmt: skip
    with suppress(StoreError):  # it is whole without
        for draft in store.durable.leftovers(generation_dir(job, location)):
            store.durable.remove(f"{generation_dir(job, location)}/{draft}")  # of a run that was killed
    return work.bytes


def bring_shard(
    store: TieredStore, job: str, location: str, shard: ShardInfo, *, going: Going = lambda: True, moved: Moved = lambda count: None
) -> int:
    """Bring one rank's shard, before the generation is whole; what it raises and returns is as for :func:`bring`."""
    check_bound(store.durable, job)
    work = _Bring(store, job, location, going, moved)
    work.plain(INTENT)
    work.shard(shard)
    return work.bytes


def check_bound(durable: BlobStore, job: str) -> None:
    """See that the durable tier is there and is this job's: a mount that is missing looks like an empty directory.

    Raises:
        StoreError: it does not answer, or has no marker of the job.
    """
    with _target():
        if read_marker(durable, job) is None:
            raise StoreError(
                f"durable tier {durable.url} has no job.json of job {job!r}: it is not mounted, or was emptied",
                now="nothing was written there",
                todo="mount it; the copy goes on by itself then",
            )


class _Bring:
    """Files of one generation on their way."""

    def __init__(self, store: TieredStore, job: str, location: str, going: Going, moved: Moved) -> None:
        self._store, self._job, self._location = store, job, location
        self._base = generation_dir(job, location)
        self._going, self._moved = going, moved
        self.bytes = 0

    def keep_going(self) -> None:
        """Raises SaveFailed if it was told to stop."""
        if not self._going():
            raise SaveFailed(
                f"copying {self._location} to {self._store.durable.url} was stopped",
                now="the first tier has it whole; what was copied stays",
                todo="the next agent of this rank goes on with it",
            )

    def plain(self, file: str) -> None:
        """A small file that no manifest vouches for, if the first tier has it."""
        try:
            data = self._store.first.get(f"{self._base}/{file}")
        except NotFound:
            return
        with _target():
            self._store.durable.put(f"{self._base}/{file}", data, if_absent=True)

    def small(self, file: str, data: bytes, *, near: bool = True) -> None:
        """A small file, in the durable tier, and (cursors of replicas on other hosts) in the first one."""
        self.keep_going()
        path = f"{self._base}/{file}"
        with _target():
            if self._store.durable.put(path, data, if_absent=True):
                self._count(len(data))
            elif self._store.durable.get(path) != data:
                raise occupied(self._store.durable, path, "see who writes there")
        if near:
            self._store.first.put(path, data, if_absent=True)

    def there(self, info: ShardInfo) -> bool:
        """Whether the durable tier has a shard, by its size and header: files appear there whole or not at all."""
        try:
            reader, _ = open_shard(self._store.durable, self._job, self._location, info)
        except Damaged:
            return False
        with reader:
            return True

    def shard(self, info: ShardInfo) -> None:
        """A shard: header first, then verified blocks in ascending order."""
        path, durable = f"{self._base}/{info.file}", self._store.durable
        if self.there(info):
            return
        reader, image = open_shard(self._store.first, self._job, self._location, info)
        with reader, _target():
            if durable.exists(path):
                if self.there(info):
                    return  # brought by another agent since; a record may vouch for it already
                durable.remove(path)  # not ours whole: no record vouches for it
            with durable.writer(path, info.bytes) as writer:
                header = memoryview(bytearray(info.header_bytes))
                reader.read_into(0, header)
                writer.write_at(0, header)
                for begin in range(0, info.image_bytes, _WINDOW):
                    self.keep_going()
                    piece = image.range(begin, min(begin + _WINDOW, info.image_bytes))
                    writer.write_at(info.header_bytes + begin, piece)
                    self._moved(len(piece))
                writer.commit()
        self._count(info.bytes)

    def _count(self, size: int) -> None:
        self.bytes += size
        self._moved(0)


@contextmanager
def _target() -> Iterator[None]:
    """What the durable tier lacks or refuses is an outage of it, to be tried again; never a verdict on the generation."""
    try:
        yield
    except (NotFound, ConfigError) as e:
        raise StoreError(e.what, now=e.now, todo=e.todo) from e
