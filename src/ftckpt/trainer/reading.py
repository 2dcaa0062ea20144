"""Stored boxes straight into live tensors, block by verified block; knows neither states nor what should be loaded."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import numpy as np
import torch

from ftckpt.format.image import Image
from ftckpt.trainer.copying import copy_one
from ftckpt.trainer.image_plan import part_of
from ftckpt.trainer.reading_plan import Job, Sink, Task, jobs_of, lacking, one_run
from ftckpt.trainer.stored import Index, Stored

__all__ = ["Sink", "borrow", "lacking", "read_all", "read_whole", "writing"]


def read_all(index: Index, sinks: Sequence[Sink], threads: int) -> int:
    """Fill the sinks. Each block is read once, into memory of the thread that checks it and copies from it while it is in cache.

    Args:
        threads: how many threads read, check and copy; each needs memory for one block (for a few, from an object store).

    Returns:
        Bytes that were asked of the images.

    Raises:
        Damaged: a block does not match its digest. No byte of that block is in a live tensor, but others may have been filled.
    """
    brought = [type(image).need is not Image.need for image in index.images]
    for sink in sinks if any(brought) else ():
        for number, chunk in sink.stored.chunks:
            index.images[number].need(chunk.begin, chunk.end)
    jobs, odd, size = jobs_of(index.images, sinks)
    for task in odd:
        with writing([task.target]):
            _run_odd(index.images[task.image], task)
    queue, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def work() -> None:
        room = memoryview(bytearray(max((image.room_bytes for image in index.images), default=0)))
        try:
            with writing(sink.tensor for sink in sinks):
                while not stop.is_set():
                    with lock:
                        job = next(queue, None)
                    if job is None:
                        return
                    _run(job, room)
        except BaseException:
            stop.set()
            raise

    others = min(threads, len(jobs)) - 1
    if others < 1:
        work()
        return size
    with ThreadPoolExecutor(others, "ftckpt-read") as pool:
        running = [pool.submit(work) for _ in range(others)]
        work()
        for future in running:
            future.result()
    return size


def writing(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[object]:
    """The mode of torch in which tensors can be written: those made under ``inference_mode`` in no other."""
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else torch.no_grad()


def _run(job: Job, room: memoryview) -> None:
    data = job.image.checked(job.first, job.stop, room)
    base = job.first * job.image.table.block_bytes
    memory = borrow(data)
    seen_as: dict[torch.dtype, torch.Tensor] = {}  # all of it
    targets, sources = [], []
    for task in job.tasks:
        chunk, item = task.chunk, task.view.itemsize
        begin, end = max(chunk.begin, base), min(chunk.end, base + len(data))
        start = (begin - chunk.begin) // item
        if task.flat is not None:
            at = start - task.shift
            first, last = max(at, 0), min(at + (end - begin) // item, len(task.flat))
            if first < last:
                np.copyto(task.flat[first:last], np.frombuffer(data, task.flat.dtype, last - first, begin - base + (first - at) * item))
            continue
        if task.together and end - begin == chunk.end - chunk.begin:
            whole = seen_as.get(task.view)
            if whole is None:
                whole = seen_as[task.view] = memory[: len(memory) // item * item].view(task.view)
            targets.append(task.target)
            sources.append(part_of(whole, (begin - base) // item, chunk.sizes))
            continue
        part = memory[begin - base : end - base].view(task.view)
        _fill(task.target, task.low, task.high, chunk.sizes, start, part)
    if targets:
        torch._foreach_copy_(targets, sources)


def _run_odd(image: Image, task: Task) -> None:
    """A box whose elements do not keep to blocks, whole (only other writers lay out images like that)."""
    source = borrow(image.range(task.chunk.begin, task.chunk.end)).clone().view(task.view)
    _fill(task.target, task.low, task.high, task.chunk.sizes, 0, source)


def _fill(
    target: torch.Tensor, low: tuple[int, ...], high: tuple[int, ...], sizes: tuple[int, ...], start: int, source: torch.Tensor
) -> None:
    """Elements ``start`` and following of a box, counted row-major, into ``target`` as far as they are among [low, high), which it is for."""
    row = math.prod(sizes[1:])
    if one_run(sizes, low, high):
        shift = low[0] * row if sizes else 0
        first, last = max(start, shift), min(start + source.numel(), shift + target.numel())
        if first < last:
            _scatter(target, first - shift, source[first - start : last - start])
        return
    index, offset = divmod(start, row)
    if offset:
        head = min(row - offset, source.numel())
        if low[0] <= index < high[0]:
            _fill(target[index - low[0]], low[1:], high[1:], sizes[1:], offset, source[:head])
        source, index = source[head:], index + 1
    full = source.numel() // row
    first, last = max(index, low[0]), min(index + full, high[0])
    if first < last:
        rows = source[(first - index) * row : (last - index) * row].view(last - first, *sizes[1:])
        for dim, (lo, h) in enumerate(zip(low[1:], high[1:], strict=True), start=1):
            rows = rows.narrow(dim, lo, h - lo)
        copy_one(target[first - low[0] : last - low[0]], rows)
    rest = source[full * row :]
    if rest.numel() and low[0] <= index + full < high[0]:
        _fill(target[index + full - low[0]], low[1:], high[1:], sizes[1:], 0, rest)


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


def read_whole(index: Index, stored: Stored) -> torch.Tensor:
    """A stored tensor as a new one on the CPU. For small ones and comparisons.

    Raises:
        Damaged: a block does not match its digest.
    """
    tensor = torch.empty(stored.shape, dtype=stored.dtype)
    read_all(index, [Sink(stored, tensor, False)], 1)
    return tensor
