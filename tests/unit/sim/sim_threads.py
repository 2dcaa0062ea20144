"""Real threads stepped one at a time by a seeded baton, on a virtual clock: what the agent's threads run on in the simulation.

Code under test sees ``threading``, ``time``, ``queue`` and ``uuid`` as ``sim_spaces`` has them. Whoever holds the baton runs; it is
passed on only where a port is called or something is waited for, so that a seed gives one schedule. Knows nothing of checkpoints.
"""

from __future__ import annotations

import heapq
import random
import threading as real_threading
import traceback as real_traceback
from _thread import allocate_lock
from collections.abc import Callable

REAL_S = 60.0  # one schedule takes some milliseconds


class Killed(BaseException):
    """The process of this task is gone: raised in it wherever it would have gone on."""


class Process:
    """What is killed, stopped and continued as one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.paused = True, False
        self.ended = False  # by itself
        self.tasks = 0
        self.parked: list[Task] = []
        self.shuns: set[str] = set()  # what it cannot reach


class Task:
    """One thread of a process."""

    __slots__ = ("begun", "carrier", "do", "done", "joining", "name", "process", "token", "waiting", "woken")

    def __init__(self, name: str, process: Process, do: Callable[[], None]) -> None:
        self.name, self.process, self.do = name, process, do
        self.begun = self.done = self.waiting = self.woken = False
        self.token = 0
        self.carrier: _Carrier | None = None
        self.joining: list[Task] = []


class _Carrier:
    """A real thread that tasks are run on."""

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.lock.acquire()
        self.task: Task | None = None
        real_threading.Thread(target=self._run, name="sim", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.lock.acquire()
            self._carry()

    def _carry(self) -> None:
        while True:
            task = self.task
            assert task is not None
            task.carrier = self
            sched().run_task(task)
            follows = sched().next_task()
            if follows is not None and not follows.begun:
                self.task = follows
                continue
            self.task = None
            _idle.append(self)
            sched().hand(follows)
            return


_idle: list[_Carrier] = []
_scheduler: Scheduler | None = None


def current() -> Task | None:
    """The task that runs; None outside of a schedule."""
    return None if _scheduler is None else _scheduler.current


def sched() -> Scheduler:
    """The scheduler of the schedule that runs."""
    assert _scheduler is not None, "no schedule runs"
    return _scheduler


class Scheduler:
    """Who runs next, and what time it is.

    Args:
        rng: decides everything.
        switch: how likely a port call lets others run.
    """

    def __init__(self, rng: random.Random, switch: float) -> None:
        self.rng, self.switch = rng, switch
        self.now = 0.0
        self.calls = 0  # of ports
        self.at_call: dict[int, Callable[[], None]] = {}
        self.current: Task | None = None
        self.crashes: list[str] = []
        self.trace: Callable[[str], None] | None = None
        self._ready: list[Task] = []
        self._blocked: dict[Task, None] = {}  # in order, for the sake of the seed
        self._timers: list[tuple[float, int, object, int]] = []
        self._seq = 0
        self._limit = float("inf")
        self._main = allocate_lock()
        self._main.acquire()

    # ------------------------------------------------------------ from outside
    def run(self, until: float) -> None:
        """Let tasks run until nothing is left to do, or the virtual time has come."""
        global _scheduler
        _scheduler, self._limit = self, until
        follows = self.next_task()
        if follows is not None:
            self.hand(follows)
            if not self._main.acquire(timeout=REAL_S):
                raise RuntimeError("the baton is lost: something under test waits for real time or a real thread")
        if self._timers and until < float("inf"):
            self.now = max(self.now, until)

    def spawn(self, process: Process, name: str, do: Callable[[], None]) -> Task:
        """A new task, ready to run."""
        task = Task(name, process, do)
        process.tasks += 1
        self._ready.append(task)
        return task

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call back at a virtual time; must not block."""
        self._seq += 1
        heapq.heappush(self._timers, (when, self._seq, do, 0))

    @property
    def busy(self) -> bool:
        """Whether anything can still happen."""
        return bool(self._ready or self._timers)

    # ------------------------------------------------------------ processes
    def kill(self, process: Process) -> None:
        """SIGKILL: none of its tasks does anything any more."""
        if not process.alive:
            return
        process.alive = False
        self._ready += process.parked
        process.parked = []
        self._doomed(process)

    def _doomed(self, process: Process) -> None:
        for task in list(self._blocked):
            if task.process is process:
                self.wake(task)

    def pause(self, process: Process) -> None:
        """SIGSTOP."""
        process.paused = process.alive

    def resume(self, process: Process) -> None:
        """SIGCONT."""
        process.paused = False
        self._ready += process.parked
        process.parked = []

    # ------------------------------------------------------------ from tasks
    def turn(self) -> None:
        """A port is called: others may run first, and what was planned for this call happens."""
        me = self.current
        assert me is not None
        if not me.process.alive:
            raise Killed
        self.calls += 1
        planned = self.at_call.pop(self.calls, None)
        if planned is not None:
            planned()
            if not me.process.alive:
                raise Killed
        if me.process.paused or (self._ready and self.rng.random() < self.switch):
            self._ready.append(me)
            self._give_way(me)

    def block(self, timeout: float | None) -> bool:
        """Wait to be woken; whether that was before ``timeout`` virtual seconds had passed."""
        me = self.current
        assert me is not None
        if not me.process.alive:
            raise Killed
        me.token += 1
        me.waiting, me.woken = True, False
        self._blocked[me] = None
        if timeout is not None:
            self._seq += 1
            heapq.heappush(self._timers, (self.now + max(timeout, 0.0), self._seq, me, me.token))
        self._give_way(me)
        return me.woken

    def wake(self, task: Task) -> None:
        """Let a waiting task go on."""
        if task.waiting:
            task.waiting, task.woken = False, True
            self._blocked.pop(task, None)
            self._ready.append(task)

    def join(self, task: Task, timeout: float | None) -> bool:
        """Wait for the end of a task; one of this process that was not begun is run in place."""
        me = self.current
        assert me is not None
        if not task.begun and task.process is me.process and not me.process.paused:
            self._ready.remove(task)
            task.carrier = me.carrier
            self.run_task(task)
            self.current = me
            if not me.process.alive:
                raise Killed
        end = None if timeout is None else self.now + timeout
        while not task.done:
            task.joining.append(me)
            if not self.block(None if end is None else end - self.now):
                return False
        return True

    # ------------------------------------------------------------ inside
    def run_task(self, task: Task) -> None:
        """Run a task to its end, on the calling thread."""
        task.begun, self.current = True, task
        try:
            if task.process.alive:
                task.do()
        except Killed:
            pass
        except BaseException:
            self.crashes.append(f"{task.process.name}/{task.name}: {real_traceback.format_exc()}")
        task.done = True
        task.process.tasks -= 1
        for other in task.joining:
            self.wake(other)

    def next_task(self) -> Task | None:
        """Choose who runs; time passes when nobody can."""
        while True:
            while self._ready:
                at = int(self.rng.random() * len(self._ready))
                task = self._ready[at]
                self._ready[at] = self._ready[-1]
                self._ready.pop()
                if task.process.paused and task.process.alive:
                    task.process.parked.append(task)
                    continue
                return task
            if not self._timers or self._timers[0][0] > self._limit:
                return None
            when, _, what, token = heapq.heappop(self._timers)
            if isinstance(what, Task):
                if what.waiting and what.token == token:
                    self.now = max(self.now, when)
                    self.wake(what)
                    what.woken = False
            else:
                self.now = max(self.now, when)
                try:
                    what()  # type: ignore[operator]
                except Exception:
                    self.crashes.append(f"planned for {when:.1f}: {real_traceback.format_exc()}")

    def hand(self, task: Task | None) -> None:
        """Pass the baton; to the outside, if there is no task."""
        if task is None:
            self._main.release()
            return
        if not task.begun:
            task.carrier = _idle.pop() if _idle else _Carrier()
            task.carrier.task = task
            task.begun = True
        assert task.carrier is not None
        task.carrier.lock.release()

    def _give_way(self, me: Task) -> None:
        follows = self.next_task()
        if follows is not me:
            assert me.carrier is not None
            self.hand(follows)
            me.carrier.lock.acquire()
        self.current = me
        if not me.process.alive:
            raise Killed
