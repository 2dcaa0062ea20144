"""Real agents for tests: configurations under one temporary directory, saves of small states, clean ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import msgspec

from ftckpt import wiring
from ftckpt.domain.names import attempt_id, member_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.format.leaves import encode_leaves
from ftckpt.format.manifest import Cursor, Manifest, StateInfo, decode, encode
from ftckpt.format.plan import plan_image
from ftckpt.format.table import TensorTable
from ftckpt.link import launch
from ftckpt.link.arena import Arena
from ftckpt.link.client import AgentClient, AgentConfig, SaveHandle
from ftckpt.link.messages import Warned
from ftckpt.ports import BlobStore, CommitLog

LARGE = 2_500_000  # elements: an image of ten blocks
STATES = {"model": StateInfo(kind="module")}


def table_of(elements: int = 5000, name: str = "model/w") -> TensorTable:
    return plan_image([(name, "float32", (elements,), (0,), (elements,))])


def pattern(size: int, seed: int) -> bytes:
    """``size`` bytes that differ from block to block."""
    return (random.Random(seed).randbytes((1 << 16) + 13) * (size // (1 << 16) + 1))[:size]


class Rig:
    """One job's root, log and runtime directory, and everything started on them."""

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        self.claim("job")
        self.clients: list[Trainer] = []
        self.pids: set[int] = set()

    def config(self, replica: str = "a", rank: int = 0, world: int = 1, incarnation: str = "i1", **changes: object) -> AgentConfig:
        base = AgentConfig(
            job="job",
            replica=replica,
            rank=rank,
            group_world_size=world,
            incarnation=incarnation,
            root=(self.tmp / "root").as_uri(),
            log=f"sqlite://{self.tmp}/log.sqlite3",
            runtime_dir=str(self.tmp / "run"),
            linger_s=0.2,
            start_timeout_s=15.0,
            send_timeout_s=5.0,
            receipts_s=10.0,
            cursors_s=5.0,
            cursor_search_s=5.0,
            commit_linger_s=10.0,
            log_timeout_s=2.0,
            tail_poll_s=0.2,
            nice=0,
        )
        return msgspec.structs.replace(base, **changes)

    def trainer(self, config: AgentConfig | None = None, **changes: object) -> Trainer:
        config = config or self.config(**changes)  # type: ignore[arg-type]
        self.claim(config.job)
        trainer = Trainer(config)
        self.clients.append(trainer)
        self.pids.add(trainer.client.agent_pid)
        return trainer

    def claim(self, job: str) -> None:
        """As a trainer does before it starts an agent: the job's directory in the root."""
        (self.tmp / "root" / job).mkdir(parents=True, exist_ok=True)

    def store(self) -> BlobStore:
        return wiring.open_store((self.tmp / "root").as_uri(), create=True)

    def log(self) -> CommitLog:
        return wiring.open_log(f"sqlite://{self.tmp}/log.sqlite3", job="job", root_url=(self.tmp / "root").as_uri())

    def entries(self) -> list[object]:
        log = self.log()
        try:
            return list(log.entries())
        finally:
            log.close()

    def manifest(self, location: str) -> Manifest:
        path = f"job/generations/{location}/manifest.json"
        return decode(self.store().get(path), Manifest, path)

    def output(self, config: AgentConfig) -> str:
        return launch.paths_of(config).output.read_text()

    def close(self) -> None:
        for trainer in self.clients:
            trainer.close()
        for pid in self.pids:
            for number in (signal.SIGCONT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for pid in self.pids:
            if not ended(pid, 3.0):
                os.kill(pid, signal.SIGKILL)
                ended(pid, 5.0)


class Trainer:
    """A torch-free stand-in for one training rank."""

    def __init__(self, config: AgentConfig, client: AgentClient | None = None) -> None:
        self.warnings: list[Warned] = []
        self.client = client or AgentClient.open(config, on_warning=self.warnings.append)
        self.config = config
        self.at = genesis("job")
        self.table = table_of(name=f"model/w{config.rank}")
        self.arena: Arena | None = None
        self.saves = 0
        self.layout = -1

    def attach(self, slots: int = 2) -> Trainer:
        self.arena = Arena.create(slots, self.table.image_bytes)
        self.client.attach(self.arena)
        self.layout = self.client.layout(self.table, STATES)
        return self

    def step(self, nonce: int = 0) -> Trajectory:
        self.at = self.at.advance([(1, nonce)])
        return self.at

    def save(self, fill: int | bytes | None = None, **changes: object) -> SaveHandle:
        """Advance a step and save a state whose bytes are all ``fill``, or begin with it."""
        if self.arena is None:
            self.attach()
        if "trajectory" not in changes:
            self.step()
        assert self.arena is not None
        slot = self.client.acquire_slot(10.0)
        assert slot is not None
        self.saves += 1
        memory = self.arena.slot(slot)
        if isinstance(fill, bytes):
            memory[: len(fill)] = fill
        else:
            memory[:] = bytes([self.saves % 256 if fill is None else fill]) * len(memory)
        tail = self.client.tail
        values: dict[str, object] = {
            "slot": slot,
            "layout": self.layout,
            "attempt": attempt_id(self.at.h, self.config.incarnation, self.saves),
            "trajectory": self.at,
            "leaves": encode_leaves({"train": {"step": self.at.step}}),
            "known_tail": -1 if tail is None else tail.index,
            **changes,
        }
        return self.client.save(**values)  # type: ignore[arg-type]

    def cursor(self, count: int = 3, ordinal: int = 3) -> bytes:
        config = self.config
        return encode(
            Cursor(
                replica=config.replica,
                member=member_id(config.replica),
                rank=config.rank,
                group_world_size=config.group_world_size,
                step=self.at.step,
                trajectory=self.at.h,
                count=count,
                ordinal=ordinal,
                state=msgspec.Raw(b"{}"),
            )
        )

    def close(self) -> None:
        self.client.close(1.0)
        if self.arena is not None:
            self.arena.close()


def running(pid: int) -> bool:
    launch.reap()
    return _state(pid) not in "ZX"


def stop(pid: int) -> None:
    """SIGSTOP, and return once it does nothing any more."""
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: _state(pid) == "T", 10.0)


def _state(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[0]
    return "X"


def ended(pid: int, timeout: float) -> bool:
    return until(lambda: not running(pid), timeout)


def until(condition: object, timeout: float) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]
