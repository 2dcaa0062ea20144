"""Which stored elements go where: live tensors against stored boxes, by blocks of the images; reads nothing and copies nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ftckpt.format.image import Image
from ftckpt.format.table import Chunk
from ftckpt.trainer.copying import plain
from ftckpt.trainer.layout import box_view, held, integers_for
from ftckpt.trainer.naming import local_of
from ftckpt.trainer.stored import Stored

_SMALL = 32 << 10  # boxes up to this many bytes are copied together


class Sink(NamedTuple):
    """A live tensor and the stored one that fills it; ``typed``: the dtypes differ and values are converted; ``key``: for messages."""

    stored: Stored
    tensor: torch.Tensor
    typed: bool
    key: str = ""


class Task(NamedTuple):
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


class Job(NamedTuple):
    """Consecutive blocks of one image, and all that goes somewhere from them."""

    image: Image
    first: int
    stop: int
    tasks: list[Task]


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


def _whole(sink: Sink) -> bool:
    """Whether one box of one image is all of a tensor that is all here, and it has elements."""
    chunks = sink.stored.chunks
    if len(chunks) != 1 or isinstance(sink.tensor, DTensor):
        return False
    sizes = chunks[0][1].sizes
    return sizes == sink.tensor.shape and 0 not in sizes


def _small(sink: Sink) -> Task | None:
    """The one task of a small tensor that is stored as it is here (most often, and many); None for others."""
    number, chunk = sink.stored.chunks[0] if sink.stored.chunks else (0, None)
    if chunk is None or chunk.end - chunk.begin > _SMALL or sink.typed or not _whole(sink):
        return None
    target = sink.tensor
    if target.is_conj() or target.is_neg():
        return None
    integers = integers_for(target)
    return Task(number, chunk, integers, (0,) * len(chunk.sizes), chunk.sizes, target.view(integers), None, 0, True)


def _tasks_of(sink: Sink) -> Iterator[Task]:
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
            integers = integers_for(target)
            view, target = (stored.dtype, target) if sink.typed else (integers, target.view(integers))
            small = chunk.end - chunk.begin <= _SMALL
            together = small and high == chunk.sizes and not any(low) and not (target.is_conj() or target.is_neg())
            run = (
                not small and one_run(chunk.sizes, low, high) and target.is_contiguous() and target.dtype == view and plain(target, target)
            )
            shift = low[0] * math.prod(chunk.sizes[1:]) if low else 0
            yield Task(image, chunk, view, low, high, target, target.view(-1).numpy() if run else None, shift, together)


def one_run(sizes: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...]) -> bool:
    """Whether the elements [low, high) of a box lie one after another."""
    return high[1:] == sizes[1:] and not any(low[1:])


def jobs_of(images: Sequence[Image], sinks: Iterable[Sink]) -> tuple[list[Job], list[Task], int]:
    """What is taken from which blocks, in the images' order; boxes whose elements lie across blocks; bytes of all."""
    with torch.no_grad():  # targets are views of parameters
        tasks: list[Task] = []
        for sink in sinks:
            task = _small(sink)
            tasks += _tasks_of(sink) if task is None else (task,)
    tasks.sort(key=lambda t: (t.image, t.chunk.begin))
    blocks: dict[tuple[int, int], list[Task]] = {}
    sizes = [image.table.block_bytes for image in images]
    odd, total = [], 0
    at, there = (-1, -1), list[Task]()
    for task in tasks:
        block_bytes, item = sizes[task.image], task.view.itemsize
        straddles = block_bytes % item or task.chunk.begin % item
        if straddles:
            odd.append(task)
        chunk = task.chunk
        whole = ((chunk.begin, chunk.end),) if task.together else ()
        for begin, end in whole or _spans(chunk.begin, chunk.sizes, task.low, task.high, item, block_bytes):
            total += end - begin
            for block in range(begin // block_bytes, 0 if straddles else -(-end // block_bytes)):
                if (task.image, block) != at:
                    at = task.image, block
                    there = blocks.setdefault(at, [])
                if not there or there[-1] is not task:
                    there.append(task)
    jobs: list[Job] = []
    for (number, block), there in sorted(blocks.items(), key=lambda item: item[0]):
        image, last = images[number], jobs[-1] if jobs else None
        if last is not None and last.image is image and last.stop == block < last.first + image.window:
            new = [task for task in there if task is not last.tasks[-1]]
            jobs[-1] = Job(image, last.first, block + 1, last.tasks + new)
        else:
            jobs.append(Job(image, block, block + 1, there))
    return jobs, odd, total


def _spans(
    begin: int, sizes: tuple[int, ...], low: tuple[int, ...], high: tuple[int, ...], item: int, block: int
) -> Iterator[tuple[int, int]]:
    """Ranges of an image's bytes in which the elements [low, high) of a row-major box lie; what lies between rows shorter than a block counts."""
    row = math.prod(sizes[1:]) * item
    if not sizes:
        yield begin, begin + item
    elif row <= block or one_run(sizes, low, high):
        yield begin + low[0] * row, begin + high[0] * row
    else:
        for i in range(low[0], high[0]):
            yield from _spans(begin + i * row, sizes[1:], low[1:], high[1:], item, block)
