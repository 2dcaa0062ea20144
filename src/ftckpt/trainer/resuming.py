"""Resume: rank 0 chooses, all ranks of the group load the same generation, and the log is told where that matters."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from contextlib import ExitStack

import msgspec

from ftckpt.domain.choice import Choice, Fault, Newest, Request
from ftckpt.domain.deadlines import Deadlines
from ftckpt.domain.ledger import Entry
from ftckpt.domain.names import attempt_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import LogUnreachable, NothingLoadable, StoreError, TailMoved
from ftckpt.flows.readers import reading
from ftckpt.flows.select import UNREAD_PAUSES_S, choose
from ftckpt.ports import BlobStore, CommitLog
from ftckpt.trainer.agreeing import Agreeing, Overtaken, Word
from ftckpt.trainer.branching import branch
from ftckpt.trainer.group import Group
from ftckpt.trainer.loading import GenerationLoader, Loaded, LoadOptions, not_loaded
from ftckpt.trainer.opening import await_log
from ftckpt.trainer.replicas.base import Replica
from ftckpt.trainer.report import ResumeReport

__all__ = ["ResumeReport", "Resumer"]

logger = logging.getLogger("ftckpt")

FIRST_S = 20.0  # how long a replica waits for the first generation that others are making; less than ranks wait for each other
POLL_S = 0.2
OVERTAKEN = 3  # times that a start chooses again because something newer was committed meanwhile
_PEERS_ONLY = "other replicas are at work and no generation was completed yet: the state comes from one of them, or from nowhere"
_MENDED_BY_ANOTHER = ("Damaged", "StoreError", "NotFound")  # another generation may still be loaded


class Resumer:
    """One resume of one rank.

    Args:
        fence: append an ``open`` entry whatever is resumed (without torchft, where no quorum decides who goes on).
        writes: whether the log may be written at all; a reader's is not.
        load_s: seconds that a rank that has loaded waits for the others of its group; their loads may differ by minutes.
        log_wait: seconds that a log which went away since it was opened is waited for (see ``opening.await_log``).
    """

    def __init__(
        self,
        store: BlobStore,
        log: CommitLog,
        job: str,
        group: Group,
        loader: GenerationLoader,
        replica: Replica,
        *,
        fence: bool,
        writes: bool = True,
        load_s: float = Deadlines().load_s,
        log_wait: float = 0.0,
    ) -> None:
        self._log_wait = log_wait
        self._store, self._log, self._job, self._group = store, log, job, group
        self._loader, self._replica, self._fence, self._writes = loader, replica, fence and writes, writes
        self._options, self._load_s, self._base = LoadOptions(), load_s, -1
        self._agreeing = Agreeing(group)
        self._behind = False  # what is newer than the last choice is only unreadable for now: it may be healed from, nothing else

    def look(self, request: Request, *, adopt: bool = False) -> Choice:
        """What ``resume`` would take now, alike on all ranks of the group. Loads nothing.

        Args:
            adopt: whether finished generations without record may be appended, as ``resume`` does; else nothing is written.

        Raises:
            FtckptError: (its kinds as in ``flows.select``) on all ranks of the group alike.
        """
        return self._choose(request, {}, adopt=adopt and self._writes)

    def load(self, choice: Choice, options: LoadOptions) -> Loaded:
        """Load states of a choice that ``resume`` will be given later.

        Raises:
            Damaged: it cannot be loaded. StoreError: it cannot be read. Both on all ranks alike.
        """
        loaded, fault, unread = self._try(choice, options)
        if loaded is None or fault:
            raise not_loaded(choice.location, fault, unread)
        return loaded

    def resume(
        self, request: Request, options: LoadOptions, opening: str = "", first: Choice | None = None, ahead: Collection[str] = ()
    ) -> ResumeReport:
        """Load what the recovery ladder says.

        Args:
            request: what is asked for.
            options: what of it is loaded.
            opening: name of the attempt for an ``open`` entry that several replicas may append together; empty: one's own.
            first: what was chosen before (see ``look``), of which a part is loaded already; then nothing else is tried.
            ahead: states that are loaded already, and left alone now.

        Raises:
            FtckptError: (its kinds as in ``flows.select``) on all ranks of the group alike.
        """
        began, self._options, self._base = time.monotonic(), options, -1
        if ahead:
            options = msgspec.structs.replace(options, exclude={*options.exclude, *ahead})
        faults: dict[str, Fault | None] = {}
        pauses = list(UNREAD_PAUSES_S)
        again = OVERTAKEN
        while True:
            choice = first or self._choose(request, faults, adopt=self._writes)
            loaded, fault, unread = self._try(choice, options) if choice.location else (None, "", False)
            if not fault:
                try:
                    if loaded is None:
                        return self._begin(choice, opening, began)
                    return self._settled(choice, loaded, opening, began)
                except Overtaken as e:
                    if not again or first is not None or not isinstance(request, Newest):
                        raise TailMoved(e.what, now=e.now, todo=e.todo) from e
                    again -= 1
                    logger.warning("resume: %s; choosing again", e.what)
                    continue
            if unread and pauses:  # as many tries on every rank
                logger.warning("%s cannot be read now (%s); trying again in %g s", choice.location, fault, pauses[0])
                time.sleep(pauses.pop(0))
                continue
            if not isinstance(request, Newest) or first is not None:
                raise not_loaded(choice.location, fault, unread)
            faults[choice.location] = Fault("payload", fault, unread)

    def reload(self, index: int) -> Loaded:
        """Load the log entry with this index because a rule says so, in the middle of a job: all of it, position included.

        Raises:
            NothingLoadable: it cannot be loaded, or was resumed from but for some states, which training or a heal has changed
                since; this process must end and be started again.
        """
        tail = self._log.entry(index)
        if tail.from_zero:
            raise NothingLoadable(
                f"the tail #{index} says to start from zero, which a live process cannot", todo="start this replica again"
            )
        source = self._log.entry(tail.base) if tail.kind == "open" else tail
        same = source.index == self._base  # else what was asked of another one is no matter: this one is what the job made
        if same and (self._options.only is not None or self._options.exclude):
            raise NothingLoadable(
                f"the tail #{index} (step {tail.step}) was resumed from in part, and the other states are not what they were then",
                todo="start this replica again",
            )
        options = msgspec.structs.replace(
            self._options, only=None, exclude=(), with_cursor=True, sources=self._options.sources if same else None
        )
        loaded, fault, _ = self._try(Choice(source="generation", step=source.step, entry=source, location=source.location), options)
        if loaded is None or fault:
            raise NothingLoadable(
                f"the tail #{index} (step {tail.step}) cannot be loaded: {fault}", todo="start this replica again; it chooses an older one"
            )
        self._adopt(loaded, self._loader.trajectory(loaded.manifest, tail))
        return loaded

    # ------------------------------------------------------------------ steps
    def _choose(self, request: Request, faults: dict[str, Fault | None], *, adopt: bool) -> Choice:
        try:
            return self._chosen(request, faults, adopt=adopt)
        except LogUnreachable:  # all ranks alike
            if not self._log_wait:
                raise
            await_log(self._log, self._log_wait)
            return self._chosen(request, faults, adopt=adopt)

    def _chosen(self, request: Request, faults: dict[str, Fault | None], *, adopt: bool) -> Choice:
        def make() -> Word:
            end, again = time.monotonic() + FIRST_S, True
            while True:
                known = dict(faults)
                try:
                    return Word(choice=choose(self._log, self._store, self._job, request, findings=known, adopt=adopt))
                except StoreError as unread:
                    if self._fence or not isinstance(request, Newest) or not self._live_elsewhere():
                        raise
                    try:
                        choice = choose(self._log, self._store, self._job, request, findings=known, adopt=adopt, pass_unread=True)
                    except NothingLoadable:  # and that is no reason to begin at zero
                        raise unread from None
                    return Word(choice=choice, yes=bool(choice.rejected))  # those who live have the newest: it is healed from them
                except NothingLoadable:
                    came = again and self._log.tail() is not None  # since it was looked for, maybe
                    again = again and not came
                    if not isinstance(request, Newest) or not (came or self._first_is_coming()):
                        raise
                    if time.monotonic() > end:
                        if self._fence:
                            raise
                        return Word(choice=Choice(source="peers", step=0, reasons=(_PEERS_ONLY,)))
                time.sleep(POLL_S)

        word = self._agreeing.agree("choice", make)
        if word.choice is None:
            raise NothingLoadable("rank 0 chose nothing")
        self._behind = word.yes
        return word.choice

    def _first_is_coming(self) -> bool:
        """Whether another replica is at work on the job's first generation: it is no lost progress, only not there yet."""
        return self._log.tail() is None and self._live_elsewhere()

    def _others_go_on(self) -> bool:
        """Whether other replicas are at work, alike on all ranks: then a generation that cannot be loaded is no loss, they have its state.

        It is a hint: if they die now, the first vote finds this state behind the tail, and the next start opens.
        """
        return self._agreeing.agree("others", lambda: Word(yes=self._live_elsewhere())).yes

    def _live_elsewhere(self) -> bool:
        return any(r.state == "live" for r in self._log.replicas() if r.replica != self._replica.replica)

    def _try(self, choice: Choice, options: LoadOptions) -> tuple[Loaded | None, str, bool]:
        """Load on every rank; the fault is the first rank's that could not, and the same on all, and whether it was only that the store failed.

        Raises:
            FtckptError: what no other generation would mend (Mismatch, DataError ...), on all ranks alike.
        """
        with ExitStack() as held:  # rank 0 reads for the group until all have loaded

            def load() -> Loaded:
                held.enter_context(reading(self._log if self._group.rank == 0 else None, choice.entry, who=self._replica.replica))
                return self._loader.load(choice.location, choice.entry, self._replica, options)

            loaded, said = self._agreeing.each("loaded", load, deadline=self._load_s)
        failed = [w for w in said if w.error]
        for word in failed:
            if word.error not in _MENDED_BY_ANOTHER:
                word.refuse()
        return loaded, next((w.texts[0] for w in failed), ""), all(w.error == "StoreError" for w in failed)

    def _settled(self, choice: Choice, loaded: Loaded, opening: str, began: float) -> ResumeReport:
        base = self._base = choice.entry.index if choice.entry is not None else -1
        heals = not self._fence and bool(choice.rejected) and (choice.opens or self._behind) and self._others_go_on()
        if self._behind and not heals:
            raise StoreError(
                f"{'; '.join(map(str, choice.rejected))}; and the replicas whose state was to be taken instead have gone",
                now="states may be half loaded: do not train; nothing was appended",
                todo="see that it can be read (permissions, mount, server), and start again",
            )
        if choice.opens and heals:
            trajectory = loaded.manifest.trajectory  # behind the tail: it heals from those who have it, and nobody is fenced
        elif choice.opens:
            trajectory = self._open(loaded.manifest.trajectory, base, choice.tail, opening)
        else:
            trajectory = self._loader.trajectory(loaded.manifest, choice.tail)
            if self._fence:
                trajectory = self._open(trajectory, base, choice.tail, opening)
        self._adopt(loaded, trajectory)
        return ResumeReport(
            source=choice.source,
            step=choice.step,
            generation=base if base >= 0 else None,
            location=choice.location,
            reasons=choice.reasons,
            passed_over=tuple(str(r) for r in choice.rejected),
            states=loaded.report,
            bytes=loaded.report.bytes,
            seconds=time.monotonic() - began,
            load_seconds=loaded.seconds,
            warnings=(*(f"passed over: {r}" for r in choice.rejected), *loaded.warnings),
        )

    def _begin(self, choice: Choice, opening: str, began: float) -> ResumeReport:
        if choice.source == "peers":
            self._replica.stand_by()
            return ResumeReport(source=choice.source, step=0, reasons=choice.reasons, seconds=time.monotonic() - began)
        trajectory = genesis(self._job) if choice.opens else self._loader.trajectory(None, choice.tail)
        if choice.opens or self._fence:
            trajectory = self._open(trajectory, -1, choice.tail, opening, fresh=choice.source == "fresh")
        self._replica.adopt(trajectory, {}, 0, 0)
        return ResumeReport(source=choice.source, step=0, reasons=choice.reasons, seconds=time.monotonic() - began)

    def _adopt(self, loaded: Loaded, trajectory: Trajectory) -> None:
        m = loaded.manifest
        self._replica.adopt(trajectory, {int(k): v for k, v in m.counts.items()}, loaded.samples, m.batches_committed)

    def _open(self, base: Trajectory, index: int, tail: Entry | None, opening: str, *, fresh: bool = False) -> Trajectory:
        """Append an ``open`` entry; another replica's with the same attempt is as good."""
        if not self._writes:
            return base
        rounds = self._agreeing.rounds  # alike on all ranks, another at each resume
        attempt = opening or attempt_id(base.h, self._group.incarnation, rounds)

        def make() -> Word:
            return Word(entry=branch(self._log, base, index, tail, attempt=attempt, writer=self._replica.replica, fresh=fresh))

        self._agreeing.agree("open", make)
        return base.open(attempt)
