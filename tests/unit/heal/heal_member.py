"""One replica's trainer in a process of its own, with its agent: publishes and heals as torchft's transport would ask for, told over a pipe."""

from __future__ import annotations

import json
import os
import resource
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

from ftckpt import Checkpointer, Never
from ftckpt.domain.trajectory import Trajectory
from ftckpt.errors import FtckptError, HealRefused
from ftckpt.format.digest import digest
from ftckpt.trainer.healing import STATES, HealCarrier
from ftckpt.trainer.peers import Peers
from ftckpt.trainer.restore import restore
from ftckpt.transfer.tls import taking
from ftckpt.wiring import job_secret


class Told(Peers):
    """The real ones, unless the test names them."""

    named: list[str] | None = None

    def urls(self) -> list[str]:
        return super().urls() if self.named is None else self.named


class Caching(torch.nn.Linear):
    """Forward uses what is made of the weight when that is loaded, and a window whose size training sets."""

    def __init__(self, side: int) -> None:
        super().__init__(side, side, bias=False)
        self.register_buffer("window", torch.zeros(0))
        self.loads = 0
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive())

    def derive(self) -> None:
        self.loads += 1
        self.twice = self.weight.detach() * 2

    def _load_from_state_dict(self, given: Any, prefix: str, *rest: Any) -> None:
        self.window = torch.empty_like(given[prefix + "window"])
        super()._load_from_state_dict(given, prefix, *rest)


class Whole(torch.nn.Sequential):
    """Its load is its own."""

    total = 0.0

    def load_state_dict(self, given: Any, strict: bool = True, assign: bool = False) -> Any:
        taken = super().load_state_dict(given, strict, assign)
        self.total = sum(float(value.sum()) for value in given.values())
        return taken


class Member:
    """A model with a buffer and AdamW moments, all of whose numbers are the step they belong to."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.at = Trajectory(0, "0" * 64)
        self.worthless, self.asked = False, 0
        self.ckpt = Checkpointer.open(job="heal", policy=Never(), **spec["settings"])
        side = spec.get("side", 256)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(side, side) for _ in range(spec.get("layers", 3))), torch.nn.BatchNorm1d(side))
        if spec.get("code"):
            self.model = Whole(*self.model, Caching(side))
        if spec.get("backwards"):  # the same names, in another order
            for name in reversed(list(self.model._modules)):
                self.model._modules[name] = self.model._modules.pop(name)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.note = {"rounds": 0}
        self.model(torch.randn(2, side)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.ckpt.register(model=self.model, optimizer=self.optimizer, note=self.note)
        session = self.ckpt._rank.session
        session.prepare(session.local)
        settings = self.ckpt.settings
        self.peers = Told(self.ckpt._rank.log, bytes.fromhex(job_secret(settings)), settings.replica, 0, lambda: os.urandom(32))
        self.carrier = HealCarrier(
            session,
            trajectory=lambda: self.at,
            peers=self.peers,
            tls=taking(settings.agent_tls_ca),
            on_progress=self.ckpt._rank.background.healing,
            spend=self.spend,
        )
        self.set(step=spec.get("seed", 0))
        self.training = threading.Event()
        self.trainer: threading.Thread | None = None

    def spend(self) -> bool:
        """Whether this member's own state is worth nothing; told how often it was asked."""
        self.asked += 1
        return self.worthless

    def tensors(self) -> list[torch.Tensor]:
        return [*self.model.state_dict().values(), *(t for s in self.optimizer.state.values() for t in s.values())]

    # ------------------------------------------------------------------ commands
    def set(self, step: int) -> dict[str, Any]:
        """Every number of the state becomes ``step``; whoever is at a step is so by the same history."""
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(step)
        self.note["rounds"] = step
        self.at = Trajectory(step, f"{step:064x}")
        return {}

    def named(self) -> dict[str, torch.Tensor]:
        """Every tensor by a name that does not depend on any order."""
        names = {p: name for name, p in self.model.named_parameters()}
        moments = {f"{names[p]}/{k}": t for p, s in self.optimizer.state.items() for k, t in s.items()}
        return {**self.model.state_dict(), **moments}

    def grow(self, size: int) -> dict[str, Any]:
        """Training has set the size of a buffer."""
        self.model[-1].window = torch.zeros(size)
        return {}

    def derived(self) -> dict[str, Any]:
        """What load code has made of the state, and how often, and whether it is of the live one."""
        last = self.model[-1]
        total = sum(float(value.sum()) for value in self.model.state_dict().values())
        right = hasattr(last, "twice") and torch.equal(last.twice, last.weight * 2) and self.model.total == total
        return {"loads": last.loads, "right": right, "window": last.window.tolist()}

    def mark(self) -> None:
        """Every tensor gets a number of its own."""
        with torch.no_grad():
            for name, tensor in self.named().items():
                tensor.fill_(zlib.crc32(name.encode()) % 8191)

    def mixed(self) -> dict[str, Any]:
        """Tensors that do not have their own number."""
        return {"names": [name for name, t in self.named().items() if not torch.all(t == zlib.crc32(name.encode()) % 8191)]}

    def publish(self, step: int, user: bool = False, marked: bool = False) -> dict[str, Any]:
        self.set(step)
        if marked:
            self.mark()
        self.carrier.freeze()
        keys = {"mine": {"weights": torch.arange(5.0), "word": "ß", "count": 7}} if user else {}
        began = time.perf_counter()
        self.carrier.publish(
            step, {"user": {STATES: None, "ftckpt": b"position", **keys}, "torchft": {"step": step, "batches_committed": step}}, 20
        )
        return {"seconds": time.perf_counter() - began}

    def step(self, step: int) -> dict[str, Any]:
        """Publish a step, and go on changing all of live memory from the moment that ``publish`` has returned."""
        self.training.set()
        if self.trainer is not None:
            self.trainer.join()
        self.carrier.retire()
        answer = self.publish(step)
        self.training.clear()
        self.trainer = threading.Thread(target=self._train, daemon=True)
        self.trainer.start()
        return answer

    def _train(self) -> None:
        while not self.training.wait(0.001):
            with torch.no_grad():
                for tensor in self.tensors():
                    tensor.add_(1)
                self.note["rounds"] += 1

    def retire(self) -> dict[str, Any]:
        self.carrier.retire()
        return {}

    def heal(
        self, metadata: str, step: int, peers: list[str] | None = None, timeout: float = 15.0, refuse: str = "", worthless: bool = False
    ) -> dict[str, Any]:
        self.peers.named, self.worthless, self.asked = peers, worthless, 0
        self.carrier.freeze()  # as each step does

        def admit(state: Any) -> None:
            if refuse:
                raise HealRefused(refuse)

        state = self.carrier.fetch(metadata, step, timeout, admit)
        arrived = state["user"].pop(STATES)
        try:
            restore(self.ckpt.registry, [arrived.image], arrived.leaves, arrived.states, placed=arrived.placed)
        finally:
            arrived.release()
        self.ckpt._rank.session.client.note("healed", arrived.text, arrived.detail)
        mine = state["user"].get("mine")
        return {
            **self.look(),
            "sources": arrived.sources,
            "dropped": arrived.dropped,
            "retries": arrived.retries,
            "placed": sorted(arrived.placed),
            "asked": self.asked,
            "mine": mine and {**mine, "weights": mine["weights"].tolist()},
            "torchft": state["torchft"],
        }

    def look(self) -> dict[str, Any]:
        """The least and greatest number of every tensor of the live state, a digest of it, and this process's memory."""
        seen = sorted({float(v) for t in self.tensors() for v in t.aminmax()} | {float(self.note["rounds"])})
        whole = digest(b"".join(digest(memoryview(t.reshape(-1).view(torch.uint8).numpy())).encode() for t in self.tensors() if t.ndim))
        return {
            "numbers": seen,
            "digest": whole,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "bytes": sum(t.nbytes for t in self.tensors()),
        }

    def address(self) -> dict[str, Any]:
        session = self.ckpt._rank.session
        until = time.monotonic() + 15
        while not session.client.url and time.monotonic() < until:
            time.sleep(0.02)
        return {"metadata": self.carrier.metadata(), "url": session.client.url, "agent": session.client.agent_pid}

    def announce(self) -> dict[str, Any]:
        self.ckpt._rank.session.client.live("live", self.at, {"agents": self.ckpt._rank.session.client.url})
        return {}

    def tell(self) -> dict[str, Any]:
        """Say where training stands, as ``ckpt.step()`` does."""
        self.ckpt._rank.background.tell(self.ckpt.replica, writer=False, force=True)
        return {}

    def close(self) -> dict[str, Any]:
        self.ckpt.close()
        return {}


def main(connection: Any, spec: dict[str, Any]) -> None:
    """Serve commands until the pipe ends; a failed one's answer has ``error``."""
    with Path(spec["out"]).open("a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(spec.get("env", {}))
    try:
        member = Member(spec)
    except FtckptError as e:
        connection.send({"error": type(e).__name__, "text": str(e)})
        return
    connection.send({**member.address(), "pid": os.getpid()})
    while True:
        try:
            name, options = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = getattr(member, name)(**options)
        except Exception as e:
            traceback.print_exc()
            answer = {"error": type(e).__name__, "text": str(e)}
        connection.send(answer)


def through(metadata: str, url: str) -> str:
    """The same address, reached by another URL."""
    return json.dumps({**json.loads(metadata), "url": url})
