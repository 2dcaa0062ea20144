"""Other checkpointers on the same state, each with its defaults, durable at the end (fsync), into a new place every round."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file

from state import Peak, build, flat, nested

warnings.filterwarnings("ignore")
PATIENCE = 120.0


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def torch_save(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``torch.save`` and fsync."""
    value = nested(*build(mb))
    path = folder / "state.pt"
    while True:
        begun = time.perf_counter()
        torch.save(value, path)
        _fsync(path)
        taken = time.perf_counter() - begun
        path.unlink()
        yield {"write": taken}


def safetensors_save(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``safetensors.torch.save_file`` and fsync."""
    tensors = flat(*build(mb))
    path = folder / "state.safetensors"
    while True:
        begun = time.perf_counter()
        save_file(tensors, path)
        _fsync(path)
        taken = time.perf_counter() - begun
        path.unlink()
        yield {"write": taken}


def dcp_save(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``torch.distributed.checkpoint.save`` (which syncs its files)."""
    value = nested(*build(mb))
    place = folder / "dcp"
    while True:
        begun = time.perf_counter()
        dcp.save(value, checkpoint_id=place, no_dist=True)
        taken = time.perf_counter() - begun
        shutil.rmtree(place)
        yield {"write": taken}


def dcp_async_save(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``async_save``: what training waits for, and until it is written."""
    value = nested(*build(mb))
    place = folder / "dcp"
    while True:
        begun = time.perf_counter()
        future: Any = dcp.async_save(value, checkpoint_id=place, no_dist=True)
        waited = time.perf_counter() - begun
        getattr(future, "upload_completion", future).result(timeout=PATIENCE)
        written = time.perf_counter() - begun
        shutil.rmtree(place)
        yield {"wait": waited, "written": written}


def dcp_async_loader(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The loader's state by ``async_save`` in each step, once the last one is written (torchtitan's way with torchft): beyond ``state_dict()``."""
    state = {"loader": {"at": torch.tensor(0), "epoch": 0}}
    number, last = 0, None
    while True:
        samples = []
        for _ in range(20):
            number += 1
            state["loader"]["at"] = torch.tensor(number)
            begun = time.perf_counter()
            if last is not None:
                getattr(last, "upload_completion", last).result(timeout=PATIENCE)
            last = dcp.async_save(state, checkpoint_id=folder / "loader" / str(number % 2), no_dist=True)
            samples.append(time.perf_counter() - begun)
            time.sleep(0.001)  # the step itself
        yield {"step": statistics.median(samples)}


def _applied(source: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> None:
    for name, tensor in live.items():
        tensor.copy_(source[name])


def mmap_load(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The limit for loading: map a safetensors file that is in the page cache and copy into live tensors, unverified."""
    live = flat(*build(mb))
    path = folder / "state.safetensors"
    save_file(live, path)
    while True:
        peak = Peak()
        begun = time.perf_counter()
        with safe_open(path, framework="pt") as file:
            for name, tensor in live.items():
                tensor.copy_(file.get_tensor(name))
        taken = time.perf_counter() - begun
        yield {"load": taken, "extra": peak.megabytes()}


def torch_load(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``torch.load`` and copy into live tensors."""
    live = flat(*build(mb))
    path = folder / "state.pt"
    torch.save(live, path)
    while True:
        peak = Peak()
        begun = time.perf_counter()
        _applied(torch.load(path, weights_only=True), live)
        taken = time.perf_counter() - begun
        yield {"load": taken, "extra": peak.megabytes()}


def dcp_load(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """``torch.distributed.checkpoint.load``, in place."""
    value = nested(*build(mb))
    dcp.save(value, checkpoint_id=folder / "dcp", no_dist=True)
    while True:
        peak = Peak()
        begun = time.perf_counter()
        dcp.load(value, checkpoint_id=folder / "dcp", no_dist=True)
        taken = time.perf_counter() - begun
        yield {"load": taken, "extra": peak.megabytes()}


def _torchft_source(pipe: Connection, mb: int, chunks: int) -> None:
    from torchft.checkpointing import HTTPTransport

    value = {"state": flat(*build(mb))}
    transport = HTTPTransport(timedelta(seconds=PATIENCE), num_chunks=chunks)
    pipe.send(transport.metadata())
    for step in iter(pipe.recv, None):
        transport.send_checkpoint([1], step, value, timedelta(seconds=PATIENCE))
        pipe.send(step)
        pipe.recv()
        transport.disallow_checkpoint()
        pipe.send(step)
    transport.shutdown()


def _torchft_http(mb: int, chunks: int) -> Iterator[dict[str, float]]:
    from torchft.checkpointing import HTTPTransport

    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    source = spawn.Process(target=_torchft_source, args=(theirs, mb, chunks), daemon=True)
    source.start()
    if not pipe.poll(PATIENCE):
        raise TimeoutError("the torchft source did not start")
    metadata = pipe.recv()
    live = flat(*build(mb, seed=1))
    transport = HTTPTransport(timedelta(seconds=PATIENCE), num_chunks=chunks)
    step = 0
    try:
        while True:
            step += 1
            begun = time.perf_counter()
            pipe.send(step)
            pipe.recv()
            got = transport.recv_checkpoint(0, metadata, step, timedelta(seconds=PATIENCE))
            _applied(got["state"], live)
            taken = time.perf_counter() - begun
            del got
            pipe.send("done")
            pipe.recv()
            yield {"heal": taken}
    finally:
        pipe.send(None)
        source.join(timeout=20)
        transport.shutdown()


def torchft_http_whole(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's HTTP transport in one piece, then applied."""
    yield from _torchft_http(mb, 0)


def torchft_http_chunks(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's HTTP transport in four chunks, then applied."""
    yield from _torchft_http(mb, 4)


def _gloo(rank: int, store: str, live: dict[str, torch.Tensor]) -> Any:
    from torchft import ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    group = ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE))
    group.configure(store, f"r{rank}", rank, 2)
    return PGTransport(group, timedelta(seconds=PATIENCE), torch.device("cpu"), state_dict=lambda: {"state": live})


def _gloo_source(pipe: Connection, mb: int, store: str) -> None:
    live = flat(*build(mb))
    transport = _gloo(0, store, live)
    for step in iter(pipe.recv, None):
        transport.send_checkpoint([1], step, {"state": live}, timedelta(seconds=PATIENCE))
        pipe.send(step)


def torchft_gloo(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """torchft's process-group transport over Gloo, received in place: unchecked, and the source's trainer sends."""
    spawn = multiprocessing.get_context("spawn")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}/bench"
    pipe, theirs = spawn.Pipe()
    source = spawn.Process(target=_gloo_source, args=(theirs, mb, address), daemon=True)
    source.start()
    live = flat(*build(mb, seed=1))
    transport = _gloo(1, address, live)
    step = 0
    try:
        while True:
            step += 1
            begun = time.perf_counter()
            pipe.send(step)
            transport.recv_checkpoint(0, "", step, timedelta(seconds=PATIENCE))
            taken = time.perf_counter() - begun
            if not pipe.poll(PATIENCE):
                raise TimeoutError("the source did not finish")
            pipe.recv()
            yield {"heal": taken}
    finally:
        pipe.send(None)
        source.join(timeout=20)
