"""ftckpt itself, by its public API, on the same state as the others: saving, training meanwhile, resuming, the data position, a commit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ftckpt import Checkpointer, Never
from ftckpt.testing.etcd_server import EtcdServer
from state import Peak, build

PATIENCE = 120.0
SAVES = 6  # in one round of training beside saves
SETTLE = 2.0  # seconds between resume and the first save, as in any real job: the arena is prefaulted meanwhile


def _opened(folder: Path, job: str, **options: Any) -> Checkpointer:
    (folder / "root").mkdir(exist_ok=True)
    return Checkpointer.open(job=job, root=folder / "root", policy=Never(), runtime_dir=str(folder / "run"), keep=1, **options)


@contextmanager
def _training(mb: int, folder: Path, **states: Any) -> Iterator[Checkpointer]:
    """A resumed job with the usual state (and more), its log on a real etcd."""
    model, optimizer = build(mb)
    with EtcdServer(directory=folder / "etcd") as server, _opened(folder, "bench", log=server.url) as ckpt:
        ckpt.register(model=model, optimizer=optimizer, **states)
        ckpt.resume()
        time.sleep(SETTLE)
        yield ckpt


def save(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """What ``save`` makes training wait for, and from its return until the generation is in the log."""
    with _training(mb, folder) as ckpt:
        name = "first"
        while True:
            ckpt.step()
            begun = time.perf_counter()
            handle = ckpt.save()
            returned = time.perf_counter()
            handle.wait(PATIENCE)
            yield {name: returned - begun, "committed": time.perf_counter() - returned}
            name = "wait"


def _train(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """A training loop (forward, backward, AdamW, ``ckpt.step()``), steps of some milliseconds: alone, and from the return of saves until their commits."""
    net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-4)
    batch = torch.randn(64, 512)

    with _training(mb, folder, net=net, adamw=adamw) as ckpt:

        def steps_until(done: Callable[[], bool]) -> tuple[int, float]:
            begun, count = time.perf_counter(), 0
            while not done():
                adamw.zero_grad()
                net(batch).square().mean().backward()
                adamw.step()
                ckpt.step()
                count += 1
            return count, time.perf_counter() - begun

        def alone(seconds: float) -> tuple[int, float]:
            end = time.perf_counter() + seconds
            return steps_until(lambda: time.perf_counter() >= end)

        alone(0.5)
        while True:
            idle, taken, counted, free, free_s = [], 0.0, 0, 0, 0.0
            for _ in range(SAVES):
                handle = ckpt.save()
                begun = time.perf_counter()
                handle.wait(PATIENCE)
                idle.append(time.perf_counter() - begun)
                steps = alone(0.3)
                free, free_s = free + steps[0], free_s + steps[1]
                handle = ckpt.save()
                steps = steps_until(lambda: handle.committed)  # noqa: B023  # used up within the turn
                counted, taken = counted + steps[0], taken + steps[1]
                alone(0.05)
            yield {
                "alone": free_s / free,
                "meanwhile": taken / max(counted, 1),
                "committed": taken / SAVES,
                "idle": statistics.median(idle),
            }


def train_all_cores(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Training with two threads, or as many as torch takes: both cores of a small machine are busy."""
    yield from _train(mb, folder)


def train_spare_core(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Training with one thread."""
    torch.set_num_threads(1)
    yield from _train(mb, folder)


def load(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``resume`` of a committed generation into live objects, log on SQLite: as a whole, loading alone, and the memory it took besides."""
    model, optimizer = build(mb)
    with _opened(folder, "bench") as ckpt:
        ckpt.register(model=model, optimizer=optimizer)
        ckpt.resume()
        ckpt.step()
        ckpt.save(wait=PATIENCE)
    while True:
        model, optimizer = build(mb, seed=1)
        with _opened(folder, "bench") as ckpt:
            ckpt.register(model=model, optimizer=optimizer)
            peak = Peak()
            begun = time.perf_counter()
            report = ckpt.resume()
            taken = time.perf_counter() - begun
            extra = peak.megabytes()
        if report.step != 1:
            raise RuntimeError(f"nothing was resumed: {report.reasons}")
        yield {"resume": taken, "load": report.load_seconds, "extra": extra}


def load_small(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """What a resume costs whatever the size: a state of 1 MB."""
    yield from load(1, folder)


class _Counting:
    """A loader with a position, as cheap as one can be: what is measured is what ftckpt adds."""

    is_ftckpt_loader = True

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


STEPS = 200


def _cursor(mb: int, folder: Path, *, persisting: bool) -> Iterator[dict[str, float]]:
    model, optimizer = build(mb)
    with _opened(folder, "bench") as ckpt:
        ckpt.register(model=model, optimizer=optimizer, loader=_Counting())
        ckpt.resume()
        time.sleep(SETTLE)
        batches = iter(ckpt.batches("loader"))
        while True:
            plain, samples, handle = _Counting(), [], None
            own = iter(plain)
            begun = time.perf_counter()
            for _ in range(STEPS):
                next(own)
                plain.state_dict()
            bare = (time.perf_counter() - begun) / STEPS
            for _ in range(STEPS):
                if persisting and (handle is None or handle.committed):
                    next(batches)
                    ckpt.step()
                    handle = ckpt.save()
                begun = time.perf_counter()
                next(batches)
                ckpt.step()
                samples.append(time.perf_counter() - begun)
                time.sleep(0.001)  # the step itself
            yield {"cursor": statistics.median(samples) - bare}


def cursor(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """What a step costs for the data position, nothing else going on."""
    yield from _cursor(mb, folder, persisting=False)


def cursor_while_persisting(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The same with full saves being persisted all the time."""
    yield from _cursor(mb, folder, persisting=True)


def commit(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """One append with its compare, through the adapter, on a real etcd."""
    from ftckpt.domain.ledger import Entry
    from ftckpt.wiring import open_log

    with EtcdServer(directory=folder / "etcd") as server:
        log = open_log(server.url, job="bench", root_url=str(folder))
        number = 0
        try:
            while True:
                samples = []
                for _ in range(20):
                    entry = Entry(
                        index=-1, kind="generation", log="", step=number + 1, trajectory=f"{number:064x}", prev=-1, base=-1,
                        attempt=f"{number:08x}", writer="bench", location=f"s{number + 1:09d}-00000000-{number:08x}", manifest="0" * 64,
                    )  # fmt: skip
                    begun = time.perf_counter()
                    log.append(entry, expect_tail=number - 1)
                    samples.append(time.perf_counter() - begun)
                    number += 1
                yield {"append": statistics.median(samples)}
        finally:
            log.close()
