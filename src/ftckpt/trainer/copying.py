"""Copying between tensors' memory bit for bit and fast; knows bytes and devices, never names or images.

On the CPU large tensors are copied by plain memory copies of a few threads of our own: the threads inside torch's operators wait for
each other at every tensor, which costs many times the copy itself when anything else wants the cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from ftckpt.trainer.layout import INTEGERS

_SMALL_BYTES = 32 << 10  # below this torch copies in the calling thread
_SLICE_BYTES = 4 << 20
_SHARED_BYTES = 64 << 20  # from here on a second thread is worth starting
_PLAIN = frozenset(INTEGERS.values())


class Copies:
    """A list of copies on the CPU, prepared once and run often.

    Args:
        targets: where to. sources: where from; same shapes and integer dtypes (see ``layout.integers_for``).
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._large: list[tuple[Any, Any]] = []
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        for target, source in zip(targets, sources, strict=True):
            if source.nbytes < _SMALL_BYTES or not plain(target, source):
                self._targets.append(target)
                self._sources.append(source)
            else:
                self._large.extend(_slices(target.numpy(), source.numpy()))
        self._threads = _helpers(_cores()) if sum(t.nbytes for t, _ in self._large) > _SHARED_BYTES else 0

    def run(self) -> None:
        """Copy all, and return when it is done."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        queue = iter(self._large)
        if self._threads < 1:
            _work(queue)
            return
        with ThreadPoolExecutor(self._threads, "ftckpt-copy") as pool:
            running = [pool.submit(_work, queue) for _ in range(self._threads)]
            _work(queue)
            for future in running:
                future.result()


class SideStreams:
    """Copies from accelerators, beside what training does there; one stream per device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    def copy(self, device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Any:
        """Enqueue copies behind what the device was given so far; the event that ends them."""
        module = torch.get_device_module(device)
        stream = self._streams.get(device) or self._streams.setdefault(device, module.Stream(device))
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            enqueue(targets, sources)
            event = module.Event()
            event.record(stream)
        return event


def enqueue(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy from an accelerator on its current stream; not complete when this returns."""
    torch._foreach_copy_(targets, sources, non_blocking=True)


def plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether NumPy copies these as well as torch does, or better (torch is better at transposing matrices)."""
    if target.device.type != "cpu" or source.device.type != "cpu" or target.dtype != source.dtype or source.dtype not in _PLAIN:
        return False
    return source.ndim > 2 or (source.is_contiguous() and target.is_contiguous())


def copy_one(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy one tensor, converting its values if the dtypes differ."""
    if plain(target, source):
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _work(queue: Iterator[tuple[Any, Any]]) -> None:
    for target, source in queue:  # taking the next of a list iterator is atomic
        np.copyto(target, source)


def _slices(target: Any, source: Any) -> Iterator[tuple[Any, Any]]:
    if not (target.flags.c_contiguous and source.flags.c_contiguous) or source.nbytes <= _SLICE_BYTES:
        yield target, source
        return
    target, source = target.reshape(-1), source.reshape(-1)
    step = _SLICE_BYTES // source.itemsize
    for start in range(0, len(source), step):
        yield target[start : start + step], source[start : start + step]


def _helpers(cores: int) -> int:
    """Threads beside the calling one: one core alone does not reach the memory's speed, a few do."""
    return min(4, max(cores // 4, int(cores > 1)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
