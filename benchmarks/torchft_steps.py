"""A step of two or three torchft replicas on Gloo: with torchft's own Manager, and with ours, which compares histories before each vote."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

STEPS = 60
PATIENCE = 30.0
GRADIENT = 64 * 1024  # numbers that are averaged in a step
FORWARD = 10  # products of 256 x 256 matrices: some milliseconds
Step = Callable[[], None]


def _plain(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path) -> Step:
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=count,
        store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1, lighthouse_addr=lighthouse, replica_id=f"plain{index}",
        hostname="127.0.0.1",
    )  # fmt: skip
    stack.callback(lambda kept: None, store)  # it would close with this function otherwise
    stack.callback(manager.shutdown)
    gradient = torch.ones(GRADIENT)

    def step() -> None:
        manager.start_quorum()
        manager.allreduce(gradient).wait()
        manager.should_commit()

    return step


def _ours(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path) -> Step:
    """A step without data."""
    manager, ckpt = _resumed(stack, index, count, lighthouse, folder)
    gradient = torch.ones(GRADIENT)

    def step() -> None:
        manager.start_quorum()
        manager.allreduce(gradient).wait()
        manager.should_commit()
        ckpt.step()

    return step


def _own_loader(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path) -> Step:
    from torch.utils.data import DataLoader

    return _fed(stack, index, count, lighthouse, folder, DataLoader(range(1 << 20), batch_size=8))


def _elastic_loader(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path) -> Step:
    from ftckpt import ElasticLoader, ElasticSampler

    return _fed(
        stack, index, count, lighthouse, folder, ElasticLoader(range(1 << 20), ElasticSampler(1 << 20, batch_size=8, shuffle=False))
    )


def _fed(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path, loader: Any) -> Step:
    """A step in the order of a training loop: batch, quorum, forward, gradient, vote."""
    manager, ckpt = _resumed(stack, index, count, lighthouse, folder, loader=loader)
    gradient, a = torch.ones(GRADIENT), torch.randn(256, 256)
    batches = iter(ckpt.batches("loader"))

    def step() -> None:
        next(batches)
        manager.start_quorum()
        for _ in range(FORWARD):
            torch.mm(a, a)
        manager.allreduce(gradient).wait()
        manager.should_commit()
        ckpt.step()

    return step


def _resumed(stack: ExitStack, index: int, count: int, lighthouse: str, folder: Path, **states: Any) -> tuple[Any, Any]:
    from torch.distributed import TCPStore
    from torchft import ProcessGroupGloo

    from ftckpt import Checkpointer, Never

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stack.callback(lambda kept: None, store)
    (folder / "root").mkdir(exist_ok=True)
    ckpt = Checkpointer.open(job="bench", root=folder / "root", policy=Never(), replica=f"r{index}", runtime_dir=str(folder / "run"))
    stack.enter_context(ckpt)
    manager: Any = ckpt.torchft_manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), min_replica_size=count, max_replicas=count, lighthouse=lighthouse,
        store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    ckpt.register(model=torch.nn.Linear(64, 64), **states)
    ckpt.resume()
    return manager, ckpt


def _run(step: Step, count: int) -> list[float]:
    samples = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        samples.append(time.perf_counter() - begun)
    return samples


def _other(pipe: Connection, make: Callable[..., Step], index: int, count: int, lighthouse: str, folder: Path) -> None:
    with ExitStack() as stack:
        step = make(stack, index, count, lighthouse, folder)
        pipe.send("ready")
        for steps in iter(pipe.recv, None):
            _run(step, steps)
            pipe.send("done")


def _answers(pipes: list[Connection]) -> None:
    for pipe in pipes:
        if not pipe.poll(PATIENCE):
            raise TimeoutError("another replica gave no answer")
        pipe.recv()


def _steps(make: Callable[..., Step], folder: Path, count: int = 2) -> Iterator[dict[str, float]]:
    from torchft.coordination import LighthouseServer

    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=count, join_timeout_ms=500, quorum_tick_ms=50)
    address = f"http://127.0.0.1:{server.address().rsplit(':', 1)[1].strip('/')}"
    pipes, others = [], []
    for index in range(1, count):
        pipe, theirs = spawn.Pipe()
        pipes.append(pipe)
        others.append(spawn.Process(target=_other, args=(theirs, make, index, count, address, folder), daemon=False))
        others[-1].start()
    try:
        with ExitStack() as stack:
            step = make(stack, 0, count, address, folder)
            _answers(pipes)
            for pipe in pipes:
                pipe.send(3)  # joining, healing, the first commit
            _run(step, 3)
            _answers(pipes)
            while True:
                for pipe in pipes:
                    pipe.send(STEPS)
                samples = _run(step, STEPS)
                _answers(pipes)
                yield {"step": statistics.median(samples)}
    finally:
        for pipe in pipes:
            pipe.send(None)
        for other in others:
            other.join(timeout=30)
            if other.is_alive():
                other.kill()
        server.shutdown()


def plain(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's Manager."""
    yield from _steps(_plain, folder)


def ours(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Ours, with ``ckpt.step()``."""
    yield from _steps(_ours, folder)


def own_loader(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """With a loader of each replica's own."""
    yield from _steps(_own_loader, folder)


def elastic_loader(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """With the shared order."""
    yield from _steps(_elastic_loader, folder)


def plain3(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's Manager, three replicas."""
    yield from _steps(_plain, folder, 3)


def ours3(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Ours, three replicas."""
    yield from _steps(_ours, folder, 3)


def plain1(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's Manager, alone."""
    yield from _steps(_plain, folder, 1)


def ours1(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Ours, alone."""
    yield from _steps(_ours, folder, 1)
