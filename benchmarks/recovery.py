"""A replica of a running job is killed and started again: from the kill to the first step that both made, in parts; with ours and on plain torchft.

Two processes train with a real lighthouse; all of them read one monotonic clock. A round has a deadline, and what ends it early says which
replica waited for what, and what both said last. Run as a program this is one of the two replicas; it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

PATIENCE = 90.0  # for a round: less than a turn may take, so that the reason is told
SAID = 8  # last lines of a replica's output that are shown with a reason
PIECES = 24
STEP_S = 0.05  # what a step's forward and backward take
TIMEOUT = timedelta(seconds=30)


class _Replica:
    """One process and what it says, line by line."""

    def __init__(self, mode: str, name: str, lighthouse: str, mb: int, folder: Path) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        argv = [sys.executable, __file__, mode, name, lighthouse, str(mb), str(folder)]
        with self._log.open("ab") as errors:
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.said: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self.said.put(json.loads(line))
        self.said.put(None)

    def until(self, end: float, **wanted: object) -> list[dict[str, Any]]:
        """What is said up to and including the first line with these values."""
        lines: list[dict[str, Any]] = []
        while not lines or any(lines[-1].get(k) != v for k, v in wanted.items()):
            try:
                line = self.said.get(timeout=max(0.01, end - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"{self.name} did not say {wanted} in time, but {lines[-3:]}; {self.last()}") from None
            if line is None:
                raise RuntimeError(f"{self.name} ended with {self.process.wait(10)} before it said {wanted}; {self.last()}")
            lines.append(line)
        return lines

    def last(self) -> str:
        """The end of its output."""
        return "\n".join((f"{self.name} wrote at the end:", *self._log.read_text(errors="replace").splitlines()[-SAID:]))

    def drop(self) -> None:
        """Forget what was said."""
        with suppress(queue.Empty):
            while (line := self.said.get_nowait()) is not None:
                del line
            self.said.put(None)  # it has ended: for whoever waits next

    def kill(self) -> float:
        """SIGKILL; when."""
        at = time.monotonic()
        self.process.kill()
        self.process.wait(10)
        return at


def _recover(mode: str, mb: int, folder: Path) -> Iterator[dict[str, float]]:
    os.environ.setdefault("RUST_LOG", "warn")  # the lighthouse's lines about each quorum
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=50, heartbeat_timeout_ms=1500)
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1].strip('/')}"
    (folder / "root").mkdir()
    survivor = _Replica(mode, "r0", address, mb, folder)
    other = _Replica(mode, "r1", address, mb, folder)
    try:
        while True:
            end = time.monotonic() + PATIENCE
            survivor.drop()
            for _ in range(6):
                survivor.until(end, event="step", committed=True, members=2)
            time.sleep(STEP_S / 2)  # in the middle of a step, whose quorum has been formed
            killed = other.kill()
            other = _Replica(mode, "r1", address, mb, folder)  # whoever watches it starts it again at once
            healed = {line["event"]: line["at"] for line in other.until(end, event="applied")}
            lines = survivor.until(end, event="step", committed=True, members=2)
            while lines[-1]["at"] < healed["applied"]:  # a step that was voted on just before the kill
                lines += survivor.until(end, event="step", committed=True, members=2)
            seen = next(x["at"] for x in lines if x["at"] > killed and (not x["committed"] or x["members"] < 2 or x is lines[-1]))
            waited = next(i for i, x in enumerate(lines) if x["at"] >= healed["fetched"])  # the survivor's step of the heal
            yield {
                "whole": lines[-1]["at"] - killed,
                "detect": seen - killed,
                "restart": healed["ready"] - killed,
                "begin": healed["ready"] - healed["imported"],
                "quorum": healed["fetching"] - healed["ready"],
                "transfer": healed["fetched"] - healed["fetching"],
                "apply": healed["applied"] - healed["applying"],
                "heal": healed["fetched"] - healed["fetching"] + healed["applied"] - healed["applying"],
                "stall": lines[waited]["at"] - lines[waited - 1]["at"] - STEP_S,
                "rejoin": lines[-1]["at"] - healed["applied"],
            }
    except (TimeoutError, RuntimeError):
        print("\n".join(replica.last() for replica in (survivor, other)), file=sys.stderr)
        raise
    finally:
        for replica in (survivor, other):
            replica.kill()
        server.shutdown()


def ours(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A job with our manager and agents."""
    yield from _recover("ours", mb, folder)


def plain(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The same on torchft's own Manager and HTTP transport, with the hook that survives a peer's death."""
    yield from _recover("plain", mb, folder)


# ---------------------------------------------------------------- one replica
def _say(event: str, **more: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **more}), flush=True)


def _end_with_parent() -> None:
    """Whoever started this process holds the other end of its input."""
    sys.stdin.read()
    os._exit(1)


def _timed(obj: Any, name: str, before: str, after: str) -> None:
    call = getattr(obj, name)

    def timed(*args: Any, **options: Any) -> Any:
        _say(before)
        try:
            return call(*args, **options)
        finally:
            _say(after)

    setattr(obj, name, timed)


def _model(mb: int) -> Any:
    """A little to train, and ``mb`` * 10**6 bytes of parameters that are only carried along."""
    import torch

    model = torch.nn.Linear(64, 64)
    model.rest = torch.nn.ParameterList(
        torch.nn.Parameter(torch.randn(mb * 1_000_000 // 4 // PIECES), requires_grad=False) for _ in range(PIECES)
    )
    return model


def _train(manager: Any, model: Any, optimizer: Any, done: Any, average: Any) -> None:
    import torch

    _timed(manager._checkpoint_transport, "recv_checkpoint", "fetching", "fetched")
    _timed(manager, "_apply_pending_state_dict", "applying", "applied")
    _say("ready")
    while True:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()
        time.sleep(STEP_S)
        loss.backward()
        average()
        optimizer.step()
        committed, members = done()
        _say("step", committed=committed, members=members)


def _ours(stack: ExitStack, name: str, lighthouse: str, mb: int, folder: Path) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import ProcessGroupGloo

    from ftckpt import Checkpointer, Never
    from ftckpt.trainer.replicas.torchft import Timeouts

    _say("imported")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ckpt = Checkpointer.open(job="bench", root=folder / "root", policy=Never(), replica=name, runtime_dir=str(folder / "run"))
    stack.enter_context(ckpt)
    manager: Any = ckpt.torchft_manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=1, allow_split=True, lighthouse=lighthouse, store_addr="127.0.0.1",
        store_port=store.port, timeouts=Timeouts(heartbeat=1.5, join=3.0, quorum=30.0, step=30.0, connect=10.0),
    )  # fmt: skip
    model = ckpt.hook(_model(mb))
    optimizer = ckpt.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01))
    ckpt.register(model=model, optimizer=optimizer)
    ckpt.resume()

    def done() -> tuple[bool, int]:
        out = ckpt.step()
        return out.committed, len(out.members)

    _train(manager, model, optimizer, done, lambda: None)


def _plain(stack: ExitStack, name: str, lighthouse: str, mb: int, folder: Path) -> None:
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper

    from ftckpt.trainer.replicas.hooks import average_gradients

    _say("imported")
    model = _model(mb)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()}, min_replica_size=1, timeout=TIMEOUT,
        quorum_timeout=TIMEOUT, store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse,
        replica_id=name, hostname="127.0.0.1", quorum_retries=0,
    )  # fmt: skip
    stack.callback(manager.shutdown)
    last = [0]

    def done() -> tuple[bool, int]:
        step, last[0] = last[0], manager.current_step()
        return last[0] > step, manager.num_participants()

    _train(manager, model, OptimizerWrapper(manager, inner), done, lambda: average_gradients(manager, model))


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("RUST_LOG", "warn")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    mode, name, lighthouse, mb, folder = sys.argv[1:]
    with ExitStack() as stack:
        {"ours": _ours, "plain": _plain}[mode](stack, name, lighthouse, int(mb), Path(folder))
