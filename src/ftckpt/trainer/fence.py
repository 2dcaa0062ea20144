"""What waits for a device's copies: the fence of one capture, and what may follow only once that is passed. Copies and sends nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftckpt.domain.deadlines import Deadlines
from ftckpt.errors import DeadlineExceeded, FtckptError, SaveFailed
from ftckpt.link.client import SaveHandle

_SHORTEST_S, _LONGEST_S = 0.00002, 0.005  # between two looks at an event


class StillCopying(DeadlineExceeded):
    """A device has not made its copies in time and may make them yet: their memory must not be given back."""


class Fence:
    """Copies that go on by themselves after they were enqueued; on a CPU there are none.

    Args:
        events: that end the copies, as accelerators' modules of torch make them.
        read: what the copies read, by name: nothing may change it until the fence is passed.
        within: seconds that the copies may take from now on.
    """

    def __init__(
        self, events: Sequence[Any] = (), read: Sequence[tuple[str, torch.Tensor]] = (), *, within: float = Deadlines().capture_s
    ) -> None:
        self._events, self._within = tuple(events), within
        self._began = time.monotonic()
        self._read = [(name, tensor, tensor._version) for name, tensor in read if not tensor.is_inference()] if events else []

    @property
    def open(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._events)

    def wait(self) -> None:
        """Return when the copies are complete. Any thread, any number of times.

        Raises:
            StillCopying: they are not, though their time is over.
        """
        began = time.monotonic()
        for event in self._events:
            while not event.query():
                now = time.monotonic()
                if now - self._began >= self._within:
                    raise StillCopying(
                        f"the device has not made a capture's copies within {self._within:g} s",
                        now="their memory stays taken, for it may make them yet",
                        todo="see what it waits for (a collective that another rank does not join?); if it is only slow: deadlines.capture_s",
                    )
                time.sleep(min(max(_SHORTEST_S, (now - began) / 10), _LONGEST_S))

    def changed(self) -> str:
        """Name of something that was changed in place since the copies were enqueued, as far as torch counts that; "" if nothing was."""
        return next((name for name, tensor, version in self._read if tensor._version != version), "")


class HandOver:
    """A capture's way to the agent, held back until its fence is passed. Any thread.

    Args:
        step: that was captured.
        give: hands the captured bytes over.
        drop: gives their memory back instead.
        end: lets go of what the copies needed; called once, whatever became of it.
        owe: takes a failure, to be raised at a later call, unless ``reported`` is True by then.

    Attributes:
        link: what became of it at the agent, once it was handed over.
        error: why it was not.
        reported: the error was raised.
        waited: seconds that training waited for it.
    """

    def __init__(
        self,
        step: int,
        fence: Fence,
        *,
        give: Callable[[], SaveHandle],
        drop: Callable[[], None],
        end: Callable[[], None],
        owe: Callable[[FtckptError, HandOver], None],
    ) -> None:
        self._step, self._owe = step, owe
        self._fence: Fence | None = fence
        self._give, self._drop, self._end = give, drop, end
        self._lock = threading.Lock()
        self.link: SaveHandle | None = None
        self.error: FtckptError | None = None
        self.reported, self.waited = False, 0.0

    @property
    def over(self) -> bool:
        """Whether it was handed over, or failed. Never waits."""
        return self._fence is None

    def follow(self) -> None:
        """Hand it over as soon as its copies are complete, whoever else waits for them or not."""
        threading.Thread(target=self._pass, name="ftckpt-fence", daemon=True).start()

    def finish(self) -> None:
        """Wait for the copies and hand over, unless that was done. A failure is kept in ``error`` and owed."""
        if self._fence is not None:
            began = time.monotonic()
            self._pass()
            self.waited += time.monotonic() - began

    def _pass(self) -> None:
        fence = self._fence
        if fence is None:
            return
        try:
            fence.wait()
        except StillCopying as e:
            with self._lock:
                if self._fence is not None:
                    now = f"this step was not saved; {e.now}"
                    self._over(DeadlineExceeded(f"step {self._step}: {e.what}", now=now, todo=e.todo))
            return
        except Exception as e:  # noqa: BLE001  (whatever the device's runtime raises)
            with self._lock:
                if self._fence is not None:  # the memory stays taken: the device may still write there
                    self._over(
                        SaveFailed(f"step {self._step}: the device's copy failed: {e}", now="this step was not saved", todo=_RESTART)
                    )
            return
        with self._lock:
            if self._fence is None:
                return
            if name := fence.changed():
                self._drop()
                self._over(
                    SaveFailed(
                        f"step {self._step}: {name!r} was changed in place after save() and before the capture was complete",
                        now="this step was not saved; what was changed stays so",
                        todo="call ckpt.captured() before anything but an optimizer's step changes parameters or optimizer state",
                    )
                )
                return
            self._hand_over()

    def _hand_over(self) -> None:
        try:
            self.link = self._give()
        except FtckptError as e:
            self._over(e)
        except BaseException as e:
            self._over(SaveFailed(f"step {self._step}: it could not be handed to the agent: {e!r}", now="this step was not saved"))
            if not isinstance(e, Exception):
                raise
        else:
            self._over(None)

    def _over(self, error: FtckptError | None) -> None:
        """It has ended; with the lock held."""
        end, self.error = self._end, error
        del self._give, self._drop, self._end  # with all that they hold
        self._fence = None
        end()
        if error is not None:
            self._owe(error, self)


_RESTART = "see the device's own error; start this process again"
