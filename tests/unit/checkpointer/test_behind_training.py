"""What a trainer learns between steps of what goes on behind it: its own generation among others', and what has become of its state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.commitlog.memory import MemoryLog
from ftckpt.domain.ledger import Entry
from ftckpt.domain.policy import Every, Never
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import DeadlineExceeded, Diverged, FtckptError, LogUnreachable, SaveFailed
from ftckpt.stores.memory import MemoryStore
from ftckpt.testing.faults import Fault, FaultyStore
from ftckpt.trainer.background import Background
from ftckpt.trainer.events import Events
from ftckpt.trainer.handle import SaveHandle
from ftckpt.trainer.opening import await_log
from ftckpt.trainer.rank import Rank
from ftckpt.trainer.replicas.base import Outcome
from ftckpt.trainer.tail import TailReader
from ftckpt.trainer.training import Training
from ftckpt.wiring import read_marker


def states(count: int, nonce: int = 1) -> list[Trajectory]:
    made = [genesis("job")]
    for _ in range(count):
        made.append(made[-1].advance([(1, nonce)]))
    return made


def generation(log: MemoryLog, state: Trajectory) -> Entry:
    tail = log.tail()
    index = tail.index if tail is not None else -1
    entry = Entry(
        index=0, kind="generation", log="", step=state.step, trajectory=state.h, prev=-1, base=index, attempt=state.h[:8], writer="w"
    )
    return log.append(entry, expect_tail=index)


@pytest.mark.covers("I14", "B9")
@pytest.mark.parametrize("known", [None, 0, 1], ids=["nothing-known", "older-known", "own-known"])
def test_a_replica_that_does_not_write_finds_its_generation_behind_newer_ones(known: int | None) -> None:
    log, made = MemoryLog("job"), states(4)
    entries = [generation(log, made[s]) for s in (1, 2, 3)]
    client: Any = SimpleNamespace(tail=None if known is None else entries[known])
    reader = TailReader(log, client)
    mine, never = made[2], made[4]

    def handle(state: Trajectory) -> SaveHandle:
        tail = client.tail
        return SaveHandle(state.step, state.h, None, lambda: reader.search(state.h, tail.index - 1 if tail is not None else -1))

    found = handle(mine)
    assert found.wait(5.0) == entries[1]
    assert found.committed
    assert found.location == entries[1].location
    generation(log, made[4].advance([(1, 1)]))
    assert handle(never).wait(5.0) is None  # superseded by a later step


class AstrayRank:
    """A rank whose agent found a state astray."""

    def __init__(self, live: Trajectory) -> None:
        log = MemoryLog("job")
        generation(log, states(2)[2])
        self.notes: list[str] = []
        self.pending: list[Exception] = []
        client = SimpleNamespace(
            stray="the tail is not an ancestor", alive=True, tail=log.tail(), pending=[], raise_pending=self._raise,
            note=lambda kind, text, detail=None: self.notes.append(kind), warnings=lambda: (),
        )  # fmt: skip
        session: Any = SimpleNamespace(client=client)
        self.replica: Any = SimpleNamespace(trajectory=live)
        self.background = Background(session, TailReader(log, client), Events(), SimpleNamespace())  # type: ignore[arg-type]

    def _raise(self) -> None:
        if self.pending:
            raise self.pending.pop()


@pytest.mark.covers("I3", "I14")
def test_a_state_that_the_log_has_left_behind_ends_the_process() -> None:
    rank = AstrayRank(states(3, nonce=2)[3])
    with pytest.raises(Diverged, match="not an ancestor"):
        rank.background.check(rank.replica)


@pytest.mark.covers("I3", "I14")
@pytest.mark.parametrize("live", [states(3)[3], Trajectory(-1, "0" * 64)], ids=["healed", "given-up"])
def test_a_state_that_was_astray_and_was_given_up_does_not_end_the_process(live: Trajectory) -> None:
    rank = AstrayRank(live)
    rank.pending = [Diverged("step 3 was not committed")]
    rank.background.check(rank.replica)
    assert rank.notes == ["fenced"]
    rank.pending = [SaveFailed("disk full")]
    with pytest.raises(SaveFailed, match="disk full"):
        rank.background.check(rank.replica)


class Pending:
    """A client whose agent told of a failure."""

    def __init__(self, *errors: FtckptError) -> None:
        self.stray, self.alive, self.tail, self.url, self.pending = None, True, None, "", ()
        self.errors = list(errors)

    def raise_pending(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def owe(self, error: FtckptError) -> None:
        self.errors.insert(0, error)

    def warnings(self) -> tuple[()]:
        return ()


@pytest.mark.covers("I14")
def test_a_failure_that_another_one_got_in_the_way_of_is_told_at_the_next_call() -> None:
    state = states(1)[1]
    outcome = Outcome(committed=True, contributed=True, healed=False, step=1, members=(1,), present=(1,), writer=True)
    client = Pending(SaveFailed("disk full"))
    session: Any = SimpleNamespace(client=client, captured=lambda: None)
    tail = TailReader(MemoryLog("job"), client)  # type: ignore[arg-type]
    group: Any = SimpleNamespace(rank=1, world_size=1)
    background = Background(session, tail, Events(), group)
    background.tell = lambda *args, **options: None  # type: ignore[method-assign]
    training = Training(None, Every(steps=1), group, None, session, SimpleNamespace(), tail, background, Events())  # type: ignore[arg-type]

    def no_buffer(outcome: Outcome, metrics: object) -> None:
        raise DeadlineExceeded("no buffer became free")

    training._saver = SimpleNamespace(last_step=0, save=no_buffer)  # type: ignore[assignment]
    replica: Any = SimpleNamespace(trajectory=state, step=1, spent=False, outcome=lambda: outcome)
    with pytest.raises(DeadlineExceeded, match="no buffer"):
        training.step(replica, {})
    with pytest.raises(SaveFailed, match="disk full"):
        training.save(replica, {})


@pytest.mark.covers("I14")
@pytest.mark.parametrize("ending", [True, False])
def test_closing_tells_every_failure_that_was_not_told_yet(ending: bool) -> None:
    client: Any = Pending(SaveFailed("disk full"), SaveFailed("no such bucket"))
    client.drain = lambda seconds: never_ends()
    client.close = lambda: None
    session: Any = SimpleNamespace(client=client, close=lambda: None)
    rank: Any = Rank.__new__(Rank)
    closed = SimpleNamespace(close=lambda: None)
    rank._closed, rank.resumed, rank._replica, rank.session = False, False, None, session
    rank.training = SimpleNamespace(captured=lambda: None, close=lambda: None)
    rank.ledger = rank.log = rank.store = rank.group = closed
    rank.settings = SimpleNamespace(deadlines=SimpleNamespace(close_s=1.0))
    rank.background = Background(session, TailReader(MemoryLog("job"), client), Events(), closed)  # type: ignore[arg-type]

    def never_ends() -> None:
        raise DeadlineExceeded("no end of work in flight")

    with pytest.raises(FtckptError) as raised:
        rank.close(ending=ending)
    told = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    for text in ("disk full", "no such bucket", *(["no end of work"] if ending else [])):
        assert sum(text in line for line in told) == 1


@pytest.mark.covers("I8", "I13", "I14", "F65")
def test_a_replica_that_starts_while_the_log_is_away_waits_for_it_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away(MemoryLog):
        """Does not answer the next so many reads."""

        silent = 2

        def tail(self, *, timeout: float | None = None) -> Entry | None:
            if self.silent:
                self.silent -= 1
                raise LogUnreachable("no answer")
            return super().tail(timeout=timeout)

    monkeypatch.setattr("ftckpt.trainer.opening.LOG_POLL_S", 0.01)
    log = Away("job")
    assert await_log(log, 60.0) == ""
    entry = generation(log, states(1)[1])
    log.silent = 2
    assert await_log(log, 60.0) == entry.log
    log.silent = 1
    with pytest.raises(LogUnreachable, match=r"^no answer$"):
        await_log(log, 0.0)
    log.silent = 10**9
    with pytest.raises(LogUnreachable, match=r"no answer; this replica has waited 0\.05 s") as e:
        await_log(log, 0.05)
    assert "nothing was started" in e.value.now


@pytest.mark.covers("I13")
def test_a_root_that_is_away_when_it_is_to_be_bound_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    log, store = MemoryLog("job"), FaultyStore(MemoryStore(), Fault(op="put"))
    settings: Any = SimpleNamespace(job="job", root="memory://r", durable="", log="memory://l")
    client: Any = SimpleNamespace(tail=generation(log, states(1)[1]))
    training = Training(
        settings, Never(), SimpleNamespace(rank=0), store, None, SimpleNamespace(), TailReader(log, client), None, Events()  # type: ignore[arg-type]
    )  # fmt: skip
    training.bind()
    assert read_marker(store, "job") is None
    training.bind()  # not at every step
    assert read_marker(store, "job") is None
    monkeypatch.setattr("ftckpt.trainer.training.time", SimpleNamespace(monotonic=lambda: 1e12))
    training.bind()
    marker = read_marker(store, "job")
    assert marker is not None
    assert marker.log == log.uuid()
