"""Stored boxes straight into live tensors, block by verified block; knows neither states nor what should be loaded."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ftckpt.format.image import Image
from ftckpt.format.table import Chunk
from ftckpt.trainer.copying import copy_one, plain
from ftckpt.trainer.layout import as_integers, box_view, held, integers_for
from ftckpt.trainer.naming import local_of
from ftckpt.trainer.stored import Index, Stored

_SMALL = 32 << 10  # boxes up to this many bytes are copied together


class Sink(NamedTuple):
    """A live tensor and the stored one that fills it; ``typed``: the dtypes differ and values are converted."""

    stored: Stored
    tensor: torch.Tensor
    typed: bool


class _Task(NamedTuple):
    """One stored box, of which the elements [low, high), looked at as ``view``, go into ``target``.

    ``flat``: the target as one array, if it is one run of elements here and in the box, which NumPy copies with the least work per
    block; else None. ``shift``: the element of the box at which it begins. ``together``: a small box that is needed whole, which is
    copied with others of its block.
    """

    image: int
    chunk: Chunk
    view: torch.dtype
    low: tuple[int, ...]
    high: tuple[int, ...]
    target: torch.Tensor
    flat: Any
    shift: int
    together: bool


class _Job(NamedTuple):
    """Consecutive blocks of one image, and all that goes somewhere from them."""

    image: Image
    first: int
    stop: int
    tasks: list[_Task]


def lacking(sink: Sink) -> int:
    """How many elements that this rank needs are in no image."""
    if _whole(sink):
        return 0
    need = have = 0
    for box in held(sink.tensor, sink.stored.name).boxes:
        need += math.prod(box.sizes)
        for _, chunk in sink.stored.chunks:
            low = [max(a, b) for a, b in zip(box.offsets, chunk.offsets, strict=True)]
            high = [min(a + m, b + n) for a, m, b, n in zip(box.offsets, box.sizes, chunk.offsets, chunk.sizes, strict=True)]
            have += math.prod(max(0, h - lo) for lo, h in zip(low, high, strict=True))
    return need - have


def read_all(index: Index, sinks: Sequence[Sink], threads: int) -> int:
    """Fill the sinks. Each block is read once, into memory of the thread that checks it and copies from it while it is in cache.

    Args:
        threads: how many threads read, check and copy; each needs memory for one block (for a few, from an object store).

    Returns:
        Bytes that were asked of the images.

    Raises:
        Damaged: a block does not match its digest. No byte of that block is in a live tensor, but others may have been filled.
    """
    for sink in sinks:
        for number, chunk in sink.stored.chunks:
            index.images[number].need(chunk.begin, chunk.end)
    jobs, odd, size = _jobs(index.images, [task for sink in sinks for task in _tasks(sink)])
    for task in odd:
        _run_odd(index.images[task.image], task)
    queue, lock, stop = iter(jobs), threading.Lock(), threading.Event()

    def work() -> None:
        room = memoryview(bytearray(max((image.room_bytes for image in index.images), default=0)))
        try:
            with torch.no_grad():
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


def _whole(sink: Sink) -> bool:
    """Whether one box of one image is all of a tensor that is all here, and it has elements."""
    chunks = sink.stored.chunks
    return len(chunks) == 1 and not isinstance(sink.tensor, DTensor) and chunks[0][1].sizes == sink.tensor.shape and all(sink.tensor.shape)


def _tasks(sink: Sink) -> Iterator[_Task]:
    stored = sink.stored
    if _whole(sink) and stored.chunks[0][1].end - stored.chunks[0][1].begin <= _SMALL and not sink.typed:  # most often, and many
        number, chunk = stored.chunks[0]
        target = sink.tensor.detach()
        if not (target.is_conj() or target.is_neg()):
            integers = integers_for(target)
            yield _Task(number, chunk, integers, (0,) * len(chunk.sizes), chunk.sizes, target.view(integers), None, 0, True)
            return
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
            integers = integers_for(target)
            view, target = (stored.dtype, target) if sink.typed else (integers, target.view(integers))
            small = chunk.end - chunk.begin <= _SMALL
            together = small and high == chunk.sizes and not any(low) and not (target.is_conj() or target.is_neg())
            run = (
                not small and _one_run(chunk.sizes, low, high) and target.is_contiguous() and target.dtype == view and plain(target, target)
            )
            shift = low[0] * math.prod(chunk.sizes[1:]) if low else 0
            yield _Task(image, chunk, view, low, high, target, target.view(-1).numpy() if run else None, shift, together)


def _one_run(sizes: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...]) -> bool:
    """Whether the elements [low, high) of a box lie one after another."""
    return high[1:] == sizes[1:] and not any(low[1:])


def _jobs(images: Sequence[Image], tasks: Sequence[_Task]) -> tuple[list[_Job], list[_Task], int]:
    """What is taken from which blocks, in the images' order; boxes whose elements lie across blocks; bytes of all."""
    blocks: dict[tuple[int, int], list[_Task]] = {}
    odd, total = [], 0
    for task in sorted(tasks, key=lambda t: (t.image, t.chunk.begin)):
        block_bytes, item = images[task.image].table.block_bytes, task.view.itemsize
        straddles = block_bytes % item or task.chunk.begin % item
        if straddles:
            odd.append(task)
        for begin, end in _spans(task.chunk.begin, task.chunk.sizes, task.low, task.high, item, block_bytes):
            total += end - begin
            for block in range(begin // block_bytes, 0 if straddles else -(-end // block_bytes)):
                there = blocks.setdefault((task.image, block), [])
                if not there or there[-1] is not task:
                    there.append(task)
    jobs: list[_Job] = []
    for (number, block), there in sorted(blocks.items(), key=lambda item: item[0]):
        image, last = images[number], jobs[-1] if jobs else None
        if last is not None and last.image is image and last.stop == block < last.first + image.window:
            new = [task for task in there if task is not last.tasks[-1]]
            jobs[-1] = _Job(image, last.first, block + 1, last.tasks + new)
        else:
            jobs.append(_Job(image, block, block + 1, there))
    return jobs, odd, total


def _spans(
    begin: int, sizes: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...], item: int, block: int
) -> Iterator[tuple[int, int]]:
    """Ranges of an image's bytes in which the elements [low, high) of a row-major box lie; what lies between rows shorter than a block counts."""
    row = math.prod(sizes[1:]) * item
    if not sizes:
        yield begin, begin + item
    elif row <= block or _one_run(sizes, low, high):
        yield begin + low[0] * row, begin + high[0] * row
    else:
        for i in range(low[0], high[0]):
            yield from _spans(begin + i * row, sizes[1:], low[1:], high[1:], item, block)


def _run(job: _Job, room: memoryview) -> None:
    data = job.image.checked(job.first, job.stop, room)
    base = job.first * job.image.table.block_bytes
    memory = None
    targets, sources = [], []
    run: list[_Task] = []  # small boxes one after another: cut from one view, which is far less work each
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
        memory = borrow(data) if memory is None else memory
        if task.together and end - begin == chunk.end - chunk.begin:
            if run and (run[-1].chunk.end != begin or run[-1].view is not task.view):
                sources += _cut(memory, base, run)
                run = []
            run.append(task)
            targets.append(task.target)
            continue
        part = memory[begin - base : end - base].view(task.view)
        _fill(task.target, task.low, task.high, chunk.sizes, start, part)
    if memory is not None and run:
        sources += _cut(memory, base, run)
    if targets:
        torch._foreach_copy_(targets, sources)


def _cut(memory: torch.Tensor, base: int, run: Sequence[_Task]) -> list[torch.Tensor]:
    """Boxes that lie one after another in a block, as tensors."""
    view = run[0].view
    whole = memory[run[0].chunk.begin - base : run[-1].chunk.end - base].view(view)
    parts = torch.split(whole, [(task.chunk.end - task.chunk.begin) // view.itemsize for task in run])
    return [part if len(task.chunk.sizes) == 1 else part.view(task.chunk.sizes) for part, task in zip(parts, run, strict=True)]


def _run_odd(image: Image, task: _Task) -> None:
    """A box whose elements do not keep to blocks, whole (only other writers lay out images like that)."""
    with torch.no_grad():
        source = borrow(image.range(task.chunk.begin, task.chunk.end)).clone().view(task.view)
        _fill(task.target, task.low, task.high, task.chunk.sizes, 0, source)


def _fill(
    target: torch.Tensor, low: tuple[int, ...], high: tuple[int, ...], sizes: tuple[int, ...], start: int, source: torch.Tensor
) -> None:
    """Elements ``start`` and following of a box, counted row-major, into ``target`` as far as they are among [low, high), which it is for."""
    row = math.prod(sizes[1:])
    if _one_run(sizes, low, high):
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


def same_content(index: Index, one: Stored, other: Stored) -> bool:
    """Whether two stored tensors are equal bit for bit."""
    if one.name == other.name:
        return True
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    a, b = (as_integers(read_whole(index, stored)).reshape(-1).view(torch.uint8) for stored in (one, other))
    return bool(torch.equal(a, b))
