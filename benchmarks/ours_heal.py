"""ftckpt's heal between two processes with an agent each, by what torchft's transport calls; the bytes are the same as the others'."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from ftckpt import Checkpointer, Never
from ftckpt.domain.trajectory import Trajectory
from ftckpt.trainer.healing import STATES, Arrived, HealCarrier
from ftckpt.trainer.peers import Peers
from ftckpt.trainer.restore import restore
from state import build

PATIENCE = 120.0
SECRET = b"of this benchmark alone, 32 bytes"


class _At:
    """Where the source stands: a new step for each heal."""

    step = 0

    def __call__(self) -> Trajectory:
        return Trajectory(self.step, f"{self.step:064x}")


def _member(mb: int, folder: Path, replica: str, seed: int, at: _At, spend: Callable[[], bool] = bool) -> tuple[Checkpointer, HealCarrier]:
    (folder / "root").mkdir(parents=True, exist_ok=True)
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_bytes(SECRET)
    ckpt = Checkpointer.open(
        job="bench",
        root=folder / "root",
        policy=Never(),
        replica=replica,
        runtime_dir=str(folder / "run"),
        secret_file=str(secret),
    )
    model, optimizer = build(mb, seed)
    ckpt.register(model=model, optimizer=optimizer)
    session = ckpt._rank.session  # the carrier is torchft's; here nobody votes, so that only the transfer is measured
    session.prepare(session.full)
    carrier = HealCarrier(session, trajectory=at, peers=Peers(ckpt._rank.log, SECRET, replica, 0, bytes), spend=spend)
    return ckpt, carrier


def _source(pipe: Connection, mb: int, folder: Path) -> None:
    at = _At()
    ckpt, carrier = _member(mb, folder, "source", 0, at)
    with ckpt:
        time.sleep(2)
        carrier.freeze()
        pipe.send(carrier.metadata())
        for step in iter(pipe.recv, None):
            at.step = step
            carrier.freeze()
            begun = time.perf_counter()
            carrier.publish(step, {"user": {STATES: None}, "torchft": {"step": step, "batches_committed": step}}, PATIENCE)
            pipe.send(time.perf_counter() - begun)
            pipe.recv()
            carrier.retire()
            pipe.send("retired")


def heal(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """From the request to verified bytes in live tensors: over a socket, of a joiner whose own state is worth nothing and of one whose state
    is kept until all has arrived; from the memory of a source on this host; the source's capture; and both together."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    source = spawn.Process(target=_source, args=(theirs, mb, folder), daemon=True)
    source.start()
    if not pipe.poll(PATIENCE):
        raise TimeoutError("the source did not start")
    metadata = pipe.recv()
    kept = [False]
    ckpt, carrier = _member(mb, folder, "joiner", 1, _At(), lambda: not kept[0])
    step = 0

    session = ckpt._rank.session

    def once(*, keep: bool, near: bool) -> tuple[float, float]:
        nonlocal step
        step, kept[0] = step + 1, keep
        session.settings = msgspec.structs.replace(session.settings, share_memory=near)
        carrier.freeze()  # as at each step's boundary
        pipe.send(step)
        capture = pipe.recv()
        begun = time.perf_counter()
        arrived = carrier.fetch(metadata, step, PATIENCE, lambda state: None)["user"][STATES]
        if not isinstance(arrived, Arrived) or keep == bool(arrived.placed) or near != arrived.near:
            raise TypeError(f"the state did not arrive as it should: {arrived}")
        restore(ckpt.registry, [arrived.image], arrived.leaves, arrived.states, placed=arrived.placed)
        taken = time.perf_counter() - begun
        arrived.release()
        pipe.send("applied")
        pipe.recv()
        return taken, capture

    with ckpt:
        try:
            while True:
                kept_s, _ = once(keep=True, near=False)
                wire, _ = once(keep=False, near=False)
                near, capture = once(keep=False, near=True)
                yield {"wire": wire, "kept": kept_s, "near": near, "capture": capture, "both": near + capture}
        finally:
            pipe.send(None)
            source.join(timeout=30)
