"""What the machine itself can do: copy memory, write a file, copy over loopback. No checkpointer does better."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PIECE = 16 << 20
PAGE = 4096
HUGE = 2 << 20


def memcpy(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Every tensor of the state into memory that was written before."""
    import torch

    from state import build, flat

    tensors = list(flat(*build(mb)).values())
    room = [torch.empty_like(t).zero_() for t in tensors]
    for t, r in zip(tensors, room, strict=True):
        r.copy_(t)
    while True:
        samples = []
        for _ in range(5):
            begun = time.perf_counter()
            for t, r in zip(tensors, room, strict=True):
                r.copy_(t)
            samples.append(time.perf_counter() - begun)
        yield {"copy": statistics.median(samples)}


def _huge(mb: int) -> memoryview | None:
    """The same in huge pages, which the device takes in larger pieces; None where the kernel makes none."""
    size = mb * 1_000_000 // PAGE * PAGE
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    room = libc.mmap(None, ctypes.c_size_t(size + HUGE), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
    begin = -(-room // HUGE) * HUGE
    libc.mmap(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10, fd, ctypes.c_long(0))
    os.close(fd)
    view = memoryview((ctypes.c_char * size).from_address(begin)).cast("B")
    for at in range(0, size, HUGE):
        view[at] = 1
    if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size // HUGE * HUGE), 25) != 0:  # MADV_COLLAPSE
        return None
    piece = os.urandom(1 << 20)
    for at in range(0, size, 1 << 20):
        view[at : at + (1 << 20)] = piece[: min(1 << 20, size - at)]
    return view


def many_copies(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """As many small tensors as ``ours_many`` captures, one copy each, and all by one call."""
    import torch

    from ours_many import COUNT, SIDE

    tensors = [torch.randn(SIDE, SIDE) for _ in range(COUNT)]
    room = [torch.empty_like(t) for t in tensors]
    while True:
        begun = time.perf_counter()
        for t, r in zip(tensors, room, strict=True):
            r.copy_(t)
        between = time.perf_counter()
        torch._foreach_copy_(room, tensors)
        yield {"copies": between - begun, "foreach": time.perf_counter() - between}


def _shared(mb: int) -> mmap.mmap:
    """Shared memory that another process has filled."""
    size = mb * 1_000_000 // PAGE * PAGE
    fd = os.memfd_create("bench")
    os.ftruncate(fd, size)
    fill = f"import mmap, os; m = mmap.mmap({fd}, {size}); b = os.urandom(1 << 20)\nfor i in range(0, {size}, 1 << 20): m[i:i + (1 << 20)] = b[:{size} - i]"
    subprocess.run([sys.executable, "-c", fill], pass_fds=[fd], check=True, timeout=120)
    shared = mmap.mmap(fd, size)
    os.close(fd)
    sum(shared[i] for i in range(0, size, PAGE))
    return shared


def _write(path: Path, data: memoryview, flags: int, threads: int) -> float:
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o644)

    def part(number: int) -> None:
        for at in range(number * PIECE, len(data), threads * PIECE):
            end = min(at + PIECE, len(data))
            while at < end:
                at += os.pwrite(fd, data[at:end], at)

    workers = [threading.Thread(target=part, args=(n,)) for n in range(1, threads)]
    for worker in workers:
        worker.start()
    part(0)
    for worker in workers:
        worker.join()
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds


def write(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """Write and fsync shared memory, past the page cache (one and two at a time; of small and of huge pages) and through it."""
    view, huge = memoryview(_shared(mb)), _huge(mb)
    number = 0
    while True:
        found = {}
        number += 1
        with suppress(OSError):  # a file system without O_DIRECT
            found["direct"] = _write(folder / f"d{number}", view, os.O_DIRECT, 1)
            found["direct2"] = _write(folder / f"e{number}", view, os.O_DIRECT, 2)
            if huge is not None:
                found["huge"] = _write(folder / f"h{number}", huge, os.O_DIRECT, 1)
                found["huge2"] = _write(folder / f"i{number}", huge, os.O_DIRECT, 2)
        found["buffered"] = _write(folder / f"b{number}", view, 0, 1)
        yield found


def loopback(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """The same bytes from another process's shared memory over 1, 2 and 4 TCP connections into memory written before."""
    view = memoryview(_shared(mb))
    listener = socket.create_server(("127.0.0.1", 0))
    source = os.fork()
    if source == 0:
        signal.alarm(900)
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=_send, args=(peer, view), daemon=True).start()
    address = listener.getsockname()
    target = memoryview(bytearray(os.urandom(1 << 20) * (len(view) // (1 << 20) + 1)))[: len(view)]
    try:
        while True:
            yield {f"copy{n}": _fetch(address, target, n) for n in (1, 2, 4)}
    finally:
        os.kill(source, signal.SIGKILL)
        os.waitpid(source, 0)


def _send(peer: socket.socket, view: memoryview) -> None:
    with peer:
        begin, end = (int(x) for x in peer.recv(64).split())
        peer.sendall(view[begin:end])


def _fetch(address: tuple[str, int], target: memoryview, connections: int) -> float:
    step = -(-len(target) // connections)

    def part(begin: int) -> None:
        end = min(begin + step, len(target))
        with socket.create_connection(address) as s:
            s.sendall(f"{begin} {end}".encode())
            at = begin
            while at < end:
                got = s.recv_into(target[at:end])
                if got == 0:
                    raise ConnectionError("the source has ended")
                at += got

    begun = time.perf_counter()
    workers = [threading.Thread(target=part, args=(n * step,)) for n in range(1, connections)]
    for worker in workers:
        worker.start()
    part(0)
    for worker in workers:
        worker.join()
    return time.perf_counter() - begun


def etcd_transaction(mb: int, folder: Path) -> Iterator[dict[str, float]]:
    """One compare-and-put of a record's size on a real etcd, by the same client as ours."""
    import etcd3

    from ftckpt.testing.etcd_server import EtcdServer

    with EtcdServer(directory=folder / "etcd") as server:
        host, port = server.endpoint.split(":")
        client = etcd3.client(host=host, port=int(port), timeout=10)
        client.put("/bench/tail", "0")
        number = 0
        while True:
            samples = []
            for _ in range(20):
                begun = time.perf_counter()
                done, _answers = client.transaction(
                    compare=[client.transactions.value("/bench/tail") == str(number)],
                    success=[
                        client.transactions.put("/bench/tail", str(number + 1)),
                        client.transactions.put(f"/bench/entries/{number}", "x" * 1024),
                    ],
                    failure=[],
                )
                samples.append(time.perf_counter() - begun)
                if not done:
                    raise RuntimeError("the raw transaction was refused")
                number += 1
            yield {"txn": sorted(samples)[len(samples) // 2]}
