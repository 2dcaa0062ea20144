"""Loads one generation into the live objects of this rank; must not decide which one."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ftckpt.data.chain import Link
from ftckpt.domain.ledger import Entry
from ftckpt.domain.opening import opened
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import Damaged, DataError, FtckptError, StoreError
from ftckpt.flows.read import OpenGeneration, open_generation
from ftckpt.format.leaves import decode_leaves
from ftckpt.format.manifest import Cursor, Manifest
from ftckpt.link.messages import KeptImage
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.trainer.cursor import restore_cursor_rng
from ftckpt.trainer.group import Group
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.orphans import DataPolicy, Heritage, Orphans
from ftckpt.trainer.own import Own
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.restore import RestoreReport, restore
from ftckpt.trainer.states import StateRegistry


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What of a generation is loaded, and how strictly (see ``trainer.restore``); ``data``: None as at the last load."""

    only: Collection[str] | None = None
    exclude: Collection[str] = ()
    sources: Mapping[str, Any] | None = None
    strict: Any = "exact"
    on_mismatch: Any = "error"
    with_cursor: bool = True
    data: DataPolicy | None = None


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded: the manifest, a report per state, payload bytes read, seconds, what the user should know, and the position in the shared order."""

    manifest: Manifest
    report: RestoreReport
    seconds: float
    samples: int
    warnings: tuple[str, ...] = ()


class GenerationLoader:
    """Loads generations of one job on one rank."""

    def __init__(self, store: BlobStore, log: CommitLog, job: str, group: Group, registry: StateRegistry, loaders: Loaders) -> None:
        self._store, self._log, self._job = store, log, job
        self._group, self._registry, self._loaders = group, registry, loaders
        self.kept: tuple[KeptImage, ...] = ()  # what agents have in memory of a generation that may be loaded
        self._rng: bytes | None = None
        self._policy = DataPolicy()
        self._orphans = Orphans(store, log, job, group.rank, group.world_size)

    def load(self, location: str, entry: Entry | None, replica: Replica, options: LoadOptions) -> Loaded:
        """Load shared states, then this rank's own cursor.

        Raises:
            Damaged: bytes do not match; load another one before training on.
            Mismatch: stored and live state do not fit; nothing was changed.
            DataError: the cursor was made by another number of ranks.
        """
        began = time.monotonic()
        self._policy = options.data or self._policy
        with open_generation(self._store, self._job, location, entry, self.kept) as generation:
            manifest = generation.manifest
            leaves = decode_leaves(generation.leaves, f"{location}/leaves.json")
            anew = self._loaders.reordered(generation, replica.replica, self._group.rank, self._policy.word)
            cursor = generation.cursor(replica.replica, self._group.rank) if options.with_cursor else None
            heirs = self._heirs(cursor, generation, replica) if options.with_cursor and self._loaders.kind == "own" else ()
            only, seeded = self._present(manifest, options)
            own = self._own_of(generation, cursor, replica) if options.with_cursor else None
            report = restore(
                self._registry,
                generation.images,
                leaves,
                manifest.states,
                only=only,
                exclude=options.exclude,
                sources=options.sources,
                strict=options.strict,
                on_mismatch=options.on_mismatch,
                own=own,
            )
            report.memory_bytes, report.store_bytes = generation.remembered
        warnings = seeded + (own.warnings(options.exclude) + self._position(cursor, manifest, replica) if own is not None else ())
        count = manifest.counts.get(str(replica.member), 0)
        self._loaders.settle(self._policy, Heritage(count=count, links=heirs), lost=self._resized(cursor))
        replica.intend(self._loaders.words(anew=bool(anew)))
        samples = manifest.samples if not anew else 0
        return Loaded(manifest=manifest, report=report, seconds=time.monotonic() - began, warnings=warnings + anew, samples=samples)

    def _present(self, manifest: Manifest, options: LoadOptions) -> tuple[Collection[str] | None, tuple[str, ...]]:
        """Names to load: of a seed (a generation of step 0, saved before training) those that it has; the rest begins as it is."""
        if manifest.step > 0 or options.only is not None:
            return options.only, ()
        sources = options.sources or {}
        live = [s.name for s in self._registry.of_scope("shared")]
        here = [name for name in live if name in manifest.states or name in sources]
        absent = [name for name in live if name not in here and name not in options.exclude]
        if not absent:
            return None, ()
        return here, (f"the generation of step 0 is a seed with {', '.join(manifest.states)}: {', '.join(absent)} begin as they are",)

    def trajectory(self, manifest: Manifest | None, tail: Entry | None) -> Trajectory:
        """The trajectory of a state just loaded because the tail says so (``open`` entries between are followed)."""
        base = manifest.trajectory if manifest is not None else genesis(self._job)
        if tail is None:
            return base
        entries = self._log.entries(after=tail.base if tail.kind == "open" else tail.index - 1)
        return opened(base, entries, tail)

    def restore_rng(self) -> None:
        """Set the RNG streams of the cursor loaded last; the last thing of a resume."""
        if self._rng is not None:
            restore_cursor_rng(self._rng)

    def rng_after_seek(self) -> None:
        """The loader was moved, which may have drawn: set the streams once more, and not again in later moves."""
        self.restore_rng()
        self._rng = None

    def _own_of(self, generation: OpenGeneration, cursor: Cursor | None, replica: Replica) -> Own:
        return Own.of(generation, cursor, replica.replica, self._group.rank, self._group.world_size)

    def _position(self, cursor: Cursor | None, manifest: Manifest, replica: Replica) -> tuple[str, ...]:
        """The loader to where the cursor says; its random streams are set later."""
        self._rng = None
        if cursor is None:
            self._loaders.restore(0, None)
            if any(c.replica == replica.replica for c in manifest.cursors):
                return (f"generation of step {manifest.step} has no cursor of rank {self._group.rank} of replica {replica.replica}",)
            return ()
        state = msgspec.json.decode(cursor.state, type=dict[str, msgspec.Raw])
        self._rng = bytes(state["own"])
        self._loaders.restore(cursor.ordinal, bytes(state["loader"]))
        return ()

    def _resized(self, cursor: Cursor | None) -> bool:
        return cursor is not None and cursor.group_world_size != self._group.world_size

    def _heirs(self, cursor: Cursor | None, generation: OpenGeneration, replica: Replica) -> tuple[Link, ...]:
        """Loaders of replicas that are gone, that this one goes on with. Raises DataError."""
        if cursor is not None and self._resized(cursor) and self._policy.word != "restart":
            raise DataError(
                f"step {generation.manifest.step}: replica {replica.replica} had {cursor.group_world_size} ranks, now it has {self._group.world_size}; "
                "their data positions cannot be handed over one to one",
                now="nothing was loaded",
                todo='run with as many ranks as before, use ElasticSampler, or resume(data="restart") to begin the loader anew',
            )
        return self._orphans.of(generation.manifest, generation.entry, replica.replica, self._policy)


def not_loaded(location: str, fault: str, unread: bool) -> FtckptError:
    """What a generation that could not be loaded is to whoever asked for that very one; ``unread``: only because its store failed."""
    what, now = f"{location} cannot be loaded: {fault}", "states may be half loaded: do not train"
    if unread:
        return StoreError(what, now=now, todo="see that it can be read (permissions, mount, server), and start again")
    return Damaged(what, now=now, todo="ask for another generation")
