"""``threading``, ``time``, ``queue``, ``uuid`` and futures as the code under test sees them in a schedule: cooperative, on virtual time."""

from __future__ import annotations

import queue as real_queue
import traceback as real_traceback
import types
import uuid as real_uuid
from collections import deque
from collections.abc import Callable

from sim_threads import Killed, Task, current, sched

EPOCH = 1.7e9


class Lock:
    """A lock, reentrant."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = current()
        while self._owner is not None and self._owner is not me:
            assert me is not None
            self._waiting.append(me)
            sched().block(None)
        self._owner = me
        self._depth += me is not None
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner, self._depth = None, 0
            while self._waiting:
                sched().wake(self._waiting.popleft())

    def __enter__(self) -> Lock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition(Lock):
    """A condition with its lock."""

    def __init__(self, lock: object = None) -> None:
        super().__init__()
        self._sleeping: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        me, depth = sched().current, self._depth
        assert me is not None
        self._depth = 1
        self.release()
        self._sleeping.append(me)
        try:
            return sched().block(timeout)
        finally:
            if me in self._sleeping:
                self._sleeping.remove(me)
            if me.process.alive:
                self.acquire()
            self._depth = depth

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        end = None if timeout is None else sched().now + timeout
        while not predicate():
            if not self.wait(None if end is None else end - sched().now):
                return bool(predicate())
        return True

    def notify(self, n: int = 1) -> None:
        for task in self._sleeping[:n]:
            sched().wake(task)
        del self._sleeping[:n]

    def notify_all(self) -> None:
        self.notify(len(self._sleeping))


class Event:
    """A flag to wait for."""

    def __init__(self) -> None:
        self._set = False
        self._sleeping: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._sleeping:
            sched().wake(task)
        self._sleeping.clear()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and (timeout is None or timeout > 0):
            me = sched().current
            assert me is not None
            self._sleeping.append(me)
            try:
                sched().block(timeout)
            finally:
                if me in self._sleeping:
                    self._sleeping.remove(me)
        return self._set


class Thread:
    """A thread of the process that starts it."""

    def __init__(self, target: Callable[..., None], name: str = "", daemon: bool = True, args: tuple[object, ...] = ()) -> None:
        self._target, self.name, self._args = target, name, args
        self._task: Task | None = None

    def start(self) -> None:
        me = sched().current
        assert me is not None
        if not me.process.alive:
            raise Killed
        self._task = sched().spawn(me.process, self.name, lambda: self._target(*self._args))

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        sched().join(self._task, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class SimpleQueue:
    """A queue without bound."""

    def __init__(self) -> None:
        self._items: deque[object] = deque()
        self._sleeping: deque[Task] = deque()

    def put(self, item: object) -> None:
        self._items.append(item)
        if self._sleeping:
            sched().wake(self._sleeping.popleft())

    def get(self, timeout: float | None = None) -> object:
        while not self._items:
            me = sched().current
            assert me is not None
            self._sleeping.append(me)
            # an idle thread looks less often than it asks to: a slow machine, and a quick simulation
            woken = sched().block(None if timeout is None else timeout * IDLE)
            if me in self._sleeping:
                self._sleeping.remove(me)
            if not woken and not self._items:
                raise real_queue.Empty
        return self._items.popleft()

    def qsize(self) -> int:
        return len(self._items)


class Future:
    """A result to wait for."""

    def __init__(self) -> None:
        self._done = Event()
        self._result: object = None
        self._error: BaseException | None = None

    def set_result(self, result: object) -> None:
        self._result = result
        self._done.set()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> object:
        if not self._done.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result


IDLE = 4.0


def _current() -> object:
    return sched().current


def _sleep(seconds: float) -> None:
    sched().block(seconds)


def _trace() -> str:
    me = sched().current
    return "killed" if me is not None and not me.process.alive else real_traceback.format_exc()


def _space(**names: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**names)


THREADING = _space(
    Thread=Thread, Lock=Lock, RLock=Lock, Condition=Condition, Event=Event, current_thread=_current, get_ident=lambda: 1,
    get_native_id=lambda: 1,
    enumerate=list,  # no helper has a priority here
)  # fmt: skip
TIME = _space(
    monotonic=lambda: sched().now, time=lambda: EPOCH + sched().now, sleep=_sleep, time_ns=lambda: int((EPOCH + sched().now) * 1e9),
    perf_counter=lambda: sched().now,
)  # fmt: skip
QUEUE = _space(SimpleQueue=SimpleQueue, Empty=real_queue.Empty)
UUID = _space(uuid4=lambda: real_uuid.UUID(int=sched().rng.getrandbits(128), version=4), UUID=real_uuid.UUID)
TRACEBACK = _space(format_exc=_trace)
