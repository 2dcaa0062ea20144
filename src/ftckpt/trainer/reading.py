"""Stored boxes straight into live tensors, block by verified block; knows neither states nor what should be loaded."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from ftckpt.format.image import Image
from ftckpt.format.table import Chunk
from ftckpt.trainer.copying import copy_one, plain
from ftckpt.trainer.layout import as_integers, box_view, held, integers_for
from ftckpt.trainer.naming import local_of
from ftckpt.trainer.stored import Index, Stored

_SMALL = 32 << 10  # boxes up to this many bytes are copied in runs
_RUN = 1 << 20  # bytes of a run, and of rows taken together when only a part of each is needed


class Sink(NamedTuple):
    """A live tensor and the stored one that fills it; ``typed``: the dtypes differ and values are converted."""

    stored: Stored
    tensor: torch.Tensor
    typed: bool


class _Task(NamedTuple):
    """One stored box, of which the elements [low, high), looked at as ``view``, go into ``target``."""

    image: int
    chunk: Chunk
    view: torch.dtype
    low: tuple[int, ...]
    high: tuple[int, ...]
    target: torch.Tensor

    @property
    def whole(self) -> bool:
        return self.high == self.chunk.sizes and not any(self.low)


def lacking(sink: Sink) -> int:
    """How many elements that this rank needs are in no image."""
    need = have = 0
    for box in held(sink.tensor, sink.stored.name).boxes:
        need += math.prod(box.sizes)
        for _, chunk in sink.stored.chunks:
            low = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)]
            have += math.prod(max(0, h - lo) for lo, h in zip(low, high, strict=True))
    return need - have


def read_all(index: Index, sinks: Sequence[Sink], threads: int) -> int:
    """Fill the sinks.

    Args:
        threads: how many threads read, check and copy.

    Returns:
        Bytes that were asked of the images.

    Raises:
        Damaged: a block does not match its digest; some tensors were overwritten.
    """
    jobs = _jobs(sorted((t for sink in sinks for t in _tasks(sink)), key=lambda t: (t.image, t.chunk.begin)))
    with torch.no_grad():
        if threads <= 1 or len(jobs) < 2:
            return sum(_run(index.images, job) for job in jobs)
        queue = iter(jobs)
        lock = threading.Lock()
        stop = threading.Event()

        def work() -> int:
            done = 0
            try:
                with torch.no_grad():
                    while not stop.is_set():
                        with lock:
                            job = next(queue, None)
                        if job is None:
                            return done
                        done += _run(index.images, job)
            except BaseException:
                stop.set()
                raise
            return done

        with ThreadPoolExecutor(threads, "ftckpt-read") as pool:
            return sum(future.result() for future in [pool.submit(work) for _ in range(threads)])


def _tasks(sink: Sink) -> Iterator[_Task]:
    stored = sink.stored
    local = None
    for box in held(sink.tensor, stored.name).boxes:
        if not all(box.sizes):
            continue
        for image, chunk in stored.chunks:
            low = tuple(max(0, a - b) for a, b in zip(box.offsets, chunk.offsets, strict=True))
            high = tuple(min(n, a + m - b) for a, m, b, n in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True))
            if any(h <= lo for lo, h in zip(low, high, strict=True)):
                continue
            local = local_of(sink.tensor) if local is None else local
            target = box_view(local, box)
            for dim, (lo, h) in enumerate(zip(low, high, strict=True)):
                start = chunk.offsets[dim] + lo - box.offsets[dim]
                if h - lo != target.shape[dim]:
                    target = target.narrow(dim, start, h - lo)
            plain = integers_for(target)
            view, target = (stored.dtype, target) if sink.typed else (plain, target.view(plain))
            yield _Task(image, chunk, view, low, high, target)


def _jobs(tasks: Sequence[_Task]) -> list[list[_Task]]:
    """Small boxes that lie one after another together, larger ones alone."""
    jobs: list[list[_Task]] = []
    for task in tasks:
        last = jobs[-1] if jobs else None
        small = task.whole and task.chunk.end - task.chunk.begin <= _SMALL
        if (
            small
            and last is not None
            and last[-1].whole
            and last[-1].chunk.end - last[-1].chunk.begin <= _SMALL
            and (last[0].image, last[-1].chunk.end) == (task.image, task.chunk.begin)
            and task.chunk.end - last[0].chunk.begin <= _RUN
        ):
            last.append(task)
        else:
            jobs.append([task])
    return jobs


def _run(images: Sequence[Image], job: Sequence[_Task]) -> int:
    image = images[job[0].image]
    if len(job) > 1:
        return _run_together(image, job)
    task = job[0]
    return _feed(image, task.chunk.begin, task.chunk.sizes, task.low, task.high, task.target, task.view)


def _run_together(image: Image, job: Sequence[_Task]) -> int:
    begin, end = job[0].chunk.begin, job[-1].chunk.end
    data = image.range(begin, end)
    memory = borrow(data)
    targets, sources = [], []
    for task in job:
        part = memory[task.chunk.begin - begin : task.chunk.end - begin]
        targets.append(task.target)
        sources.append(_typed(part, task.view).view(task.chunk.sizes))
    torch._foreach_copy_(targets, sources)
    return end - begin


def _feed(
    image: Image,
    begin: int,
    sizes: tuple[int, ...],
    low: tuple[int, ...],
    high: tuple[int, ...],
    target: torch.Tensor,
    dtype: torch.dtype,
) -> int:
    """Copy elements [low, high) of a row-major box that begins at byte ``begin`` into ``target`` of that shape."""
    row = math.prod(sizes[1:]) * dtype.itemsize
    if all(lo == 0 for lo in low[1:]) and high[1:] == sizes[1:]:
        start = begin + (low[0] * row if sizes else 0)
        return _stream(image, start, target, dtype)
    if row > _RUN:
        return sum(_feed(image, begin + i * row, sizes[1:], low[1:], high[1:], target[i - low[0]], dtype) for i in range(low[0], high[0]))
    rows = max(1, _RUN // row)
    for first in range(low[0], high[0], rows):
        last = min(high[0], first + rows)
        data = image.range(begin + first * row, begin + last * row)
        source = _typed(borrow(data), dtype).view(last - first, *sizes[1:])
        for dim, (lo, h) in enumerate(zip(low[1:], high[1:], strict=True), start=1):
            source = source.narrow(dim, lo, h - lo)
        copy_one(target[first - low[0] : last - low[0]], source)
    return (high[0] - low[0]) * row


def _stream(image: Image, begin: int, target: torch.Tensor, dtype: torch.dtype) -> int:
    """Copy consecutive elements from byte ``begin`` on into all of ``target``."""
    item = dtype.itemsize
    size = target.numel() * item
    at = 0
    pieces = (
        image.pieces(begin, begin + size)
        if begin % item == 0 and image.table.block_bytes % item == 0
        else [image.range(begin, begin + size)]
    )
    flat = target.view(-1).numpy() if target.is_contiguous() and plain(target, target) and target.dtype == dtype else None
    for data in pieces:
        count = len(data) // item
        if flat is not None:  # the common case, with the least work per piece
            np.copyto(flat[at : at + count], np.frombuffer(data, flat.dtype))
        else:
            _scatter(target, at, _typed(borrow(data), dtype))
        at += count
    return size


def _scatter(target: torch.Tensor, start: int, source: torch.Tensor) -> None:
    """Write ``source`` as elements ``start`` and following of ``target``, counted row-major, whatever its strides."""
    if target.is_contiguous():
        copy_one(target.view(-1)[start : start + source.numel()], source)
        return
    row = target[0].numel()
    first, offset = divmod(start, row)
    if offset:
        head = min(row - offset, source.numel())
        _scatter(target[first], offset, source[:head])
        source, first = source[head:], first + 1
    full = source.numel() // row
    if full:
        copy_one(target[first : first + full], source[: full * row].view(full, *target.shape[1:]))
    if source.numel() > full * row:
        _scatter(target[first + full], 0, source[full * row :])


class _Memory:
    """Read-only bytes shown to NumPy as writable: torch takes no others, and nobody here writes to them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data  # held as long as the array is
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(data),), "typestr": "|u1", "data": (address, False), "version": 3}


def borrow(data: memoryview) -> torch.Tensor:
    """Bytes as a tensor, without a copy; read-only by agreement."""
    return torch.from_numpy(np.asarray(_Memory(data))) if len(data) else torch.empty(0, dtype=torch.uint8)


def _typed(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def read_whole(index: Index, stored: Stored) -> torch.Tensor:
    """A stored tensor as a new one on the CPU. For small ones and comparisons.

    Raises:
        Damaged: a block does not match its digest.
    """
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_all(index, [Sink(stored, tensor, False)], 1)
    return tensor


def same_content(index: Index, one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are equal bit for bit."""
    if one.name == other.name:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (as_integers(read_whole(index, stored)).reshape(-1).view(torch.uint8) for stored in (one, other))
    return bool(torch.equal(a, b))
