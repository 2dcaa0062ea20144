"""What becomes of the data positions of replicas that are gone for good: finds them in the log's generations. Decides by ``domain.cursors``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ftckpt.data.chain import Link, held
from ftckpt.domain.cursors import Redistribution, redistribute
from ftckpt.domain.ledger import Entry
from ftckpt.domain.lineage import lineage
from ftckpt.domain.names import member_id
from ftckpt.errors import DataError
from ftckpt.flows.read import read_manifest, read_small
from ftckpt.format.manifest import Cursor, Manifest, decode
from ftckpt.ports import BlobStore, CommitLog

Make = Callable[[str], Iterable[Any]]


class DataPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a user says of loaders of their own.

    Args:
        word: "strict": a position that nobody continues is an error. "adopt": those present go on with it. "restart": it is
            let go, and a loader that cannot be put where the state says begins anew.
        replicas: names of the job's replicas from now on; empty: not said, so that nobody can be known to be gone.
        make: makes the loader that another replica had, by its name.
    """

    word: Redistribution = "strict"
    replicas: tuple[str, ...] = ()
    make: Make | None = None

    @property
    def words(self) -> str:
        """What must be the same on all replicas."""
        return f'data="{self.word}"' + (f", replicas {', '.join(sorted(self.replicas))}" if self.replicas else "")


class Heritage(msgspec.Struct, frozen=True, kw_only=True):
    """Loaders of others that a replica goes on with from the loaded state on.

    Args:
        count: draws of the replica that the state includes.
        links: the loaders.
    """

    count: int = 0
    links: tuple[Link, ...] = ()


class Orphans:
    """Looks for positions of replicas that are gone, for one rank.

    Args:
        store, log, job: where to look.
        rank, group_world_size: this rank.
    """

    def __init__(self, store: BlobStore, log: CommitLog, job: str, rank: int, group_world_size: int) -> None:
        self._store, self._log, self._job = store, log, job
        self._rank, self._ranks = rank, group_world_size

    def of(self, manifest: Manifest, entry: Entry | None, replica: str, policy: DataPolicy) -> tuple[Link, ...]:
        """The loaders of others that ``replica`` goes on with from a generation.

        Raises:
            DataError: positions that nobody continues ("strict"), or that cannot be continued ("adopt"); names them.
        """
        present = {member_id(name) for name in policy.replicas}
        if not present or not any(count and int(member) not in present for member, count in manifest.counts.items()):
            return ()
        past = self._past(manifest, entry)
        recorded = self._recorded(manifest, past)
        taken = {name for who in policy.replicas for name in self._held(manifest, entry, who)}
        rest = {name: count for name, count in recorded.items() if name in policy.replicas or name not in taken}
        gone = {name: self._newest(name, past) for name in rest if name not in policy.replicas and rest[name]}
        inherited = {name for cursor in gone.values() if cursor is not None for name in held(_state(cursor))}
        rest = {name: count for name, count in rest.items() if name not in inherited}
        plan = redistribute(rest, policy.replicas, policy.word)
        if policy.word != "adopt":
            return ()
        orphans = sorted(name for name in gone if name in rest)
        if orphans and policy.make is None:
            raise DataError(
                f"the data of {', '.join(orphans)} cannot be taken over without their loaders",
                now="nothing was loaded",
                todo="give resume(loaders=…): a function that makes the loader that a replica had, by its name",
            )
        links = {name: self._link(name, rest[name], gone[name]) for name in orphans}  # all, so that all replicas refuse alike
        return tuple(links[name] for name in plan.get(replica, ())[1:])

    # ------------------------------------------------------------------ inside
    def _past(self, manifest: Manifest, entry: Entry | None) -> list[tuple[str, Entry | None, Manifest]]:
        """This generation and those before it, newest first."""
        location = entry.location if entry is not None else ""
        path = lineage(self._log.entries(), entry) if entry is not None else []
        older = [(e.location, e, read_manifest(self._store, self._job, e.location, e)[0]) for e in path if e.location != location]
        return [(location, entry, manifest), *older]

    def _recorded(self, manifest: Manifest, past: Sequence[tuple[str, Entry | None, Manifest]]) -> dict[str, int]:
        """Draws included, by replica; by number where no generation tells the name."""
        names = {member_id(p.replica): p.replica for _, _, m in reversed(past) for p in m.participants if p.cursor is not None}
        return {names.get(int(k), f"member-{k}"): count for k, count in manifest.counts.items()}

    def _held(self, manifest: Manifest, entry: Entry | None, replica: str) -> tuple[str, ...]:
        cursor = self._newest(replica, [(entry.location if entry is not None else "", entry, manifest)])
        return held(_state(cursor)) if cursor is not None else ()

    def _newest(self, replica: str, past: Iterable[tuple[str, Entry | None, Manifest]]) -> Cursor | None:
        """The newest cursor of a replica, for this rank's number; of a generation that has one for each rank here, so that all find alike."""
        for location, _, manifest in past:
            infos = {info.rank: info for info in manifest.cursors if info.replica == replica}
            if location and infos.keys() >= set(range(self._ranks)):
                info = infos[self._rank]
                data = read_small(self._store, self._job, location, info.file)
                cursor = decode(data, Cursor, f"{location}/{info.file.file}")
                if _state(cursor) != b"null":
                    return cursor
        return None

    def _link(self, name: str, count: int, cursor: Cursor | None) -> Link:
        if cursor is None or cursor.group_world_size != self._ranks or cursor.ordinal > count:
            why = f"no kept generation on this trajectory has its cursors of {self._ranks} ranks"
            if cursor is not None and cursor.group_world_size != self._ranks:
                why = f"it had {cursor.group_world_size} ranks, here are {self._ranks}"
            raise DataError(
                f"the data of {name} ({count} draws) cannot be taken over: {why}",
                now="nothing was loaded",
                todo='start that replica again, or let its position go with data="restart"',
            )
        return Link(replica=name, spot=msgspec.Raw(_state(cursor)), skip=count - cursor.ordinal)


def _state(cursor: Cursor) -> bytes:
    return bytes(msgspec.json.decode(cursor.state, type=dict[str, msgspec.Raw])["loader"])
