"""Weights from other people's files into a live model, tensor by tensor, each rank its own slices; must not know file formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ftckpt.errors import ConfigError, Mismatch
from ftckpt.interop.adapter import Adapter
from ftckpt.interop.wrappers import said, unwrapped
from ftckpt.trainer.layout import box_view, dtype_name, held, is_lazy
from ftckpt.trainer.loading_plan import CAST, LENIENT, castable, raise_all
from ftckpt.trainer.modules import EXTRA, LoadCode, give_values, is_asked
from ftckpt.trainer.naming import Live, ModuleScan, local_of, memory_key, scan_module
from ftckpt.trainer.overlaps import Late, settle, single
from ftckpt.trainer.report import StateReport, Strictness
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.stored import Index

_WOULD = "(strict='cast' would convert)"


class Kind(NamedTuple):
    """A tensor of a file: its dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights(Protocol):
    """Named tensors of one or more files. Used with ``with``; tensors must not be changed, nor used after it."""

    where: str

    def kinds(self) -> Mapping[str, Kind]:
        """All names with what they are."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU. Raises Damaged."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class _Fill(NamedTuple):
    live: Live
    parts: tuple[str, ...]


def fill(model: nn.Module, weights: Weights, adapter: Adapter | None = None, *, strict: Strictness = "exact") -> StateReport:
    """Load a model's tensors in place. What does not fit is raised at once, before anything was changed (what an adapter's
    ``join`` returns is only known on the way: then tensors before it are loaded already, and the error says so).

    Args:
        model: parameters may be sharded.
        adapter: names and values; the same names when left out. Names are looked for without what wrappers added to them, too (``unwrapped``).
        strict: as for ``load_model``. Missing is what has no other name for the same memory that was loaded.

    Raises:
        Mismatch: lists every missing, unexpected, misshaped or differently typed key. Damaged: a file cannot be read.
    """
    states = StateRegistry()
    state = states.add("model", model, kind="module")
    scan, code = scan_module(state), LoadCode(state)
    report = StateReport(name="model", source=weights.where)
    load = _Load(weights, adapter or Adapter(), strict, report, code)
    fills = load.matched(scan)
    given = load.put(fills, load.read_before(fills))
    for call in give_values(state, code, given) if report.loaded else ():
        call()
    report.cast = sorted(set(report.cast))
    return report


class _Load(NamedTuple):
    """One filling of a model; in order: ``matched``, ``read_before``, ``put``."""

    weights: Weights
    adapter: Adapter
    strict: Strictness
    report: StateReport
    code: LoadCode

    def matched(self, scan: ModuleScan) -> list[_Fill]:
        """What is to be filled from what, by what files and model say of themselves; nothing is read yet.

        Raises:
            Mismatch: something does not fit.
        """
        kinds = self.weights.kinds()
        own = unwrapped(kinds, lambda there: {part for key in scan.tensors for part in _parts(self.adapter, key, there)})
        there = {name: kinds[theirs] for name, theirs in own.items()}
        raise_all([f"{key} {_without_memory(live.tensor)}" for key, live in scan.tensors.items() if is_lazy(live.tensor)])
        problems: list[str] = []
        fills: list[_Fill] = []
        used: set[str] = set()
        absent: dict[str, list[str]] = {}
        for key, live in scan.tensors.items():
            parts = _parts(self.adapter, key, there)
            lacking = [part for part in parts if part not in there]
            used.update(parts)
            if not parts or lacking:
                absent[key] = lacking
                continue
            wrong = self._misfit(live, there[parts[0]]) if type(self.adapter).join is Adapter.join else []
            if not wrong and not is_asked(live):
                why = unwritable(live.tensor) if isinstance(live.tensor, DTensor) else _without_memory(live.tensor)
                wrong = [f"{key} {why}"] if why else []
            problems += wrong
            fills.append(_Fill(live, tuple(own[part] for part in parts)))
        memory = {memory_key(f.live.tensor) for f in fills}
        self.report.missing += [key for key in absent if memory_key(scan.tensors[key].tensor) not in memory]
        self.report.unexpected += sorted(own[name] for name in there.keys() - used if not _inside(name, scan.extras))
        self.report.notes += [f"{key} is not a tensor and was left as it is" for key in scan.extras]
        self.report.notes += said(own)
        remedies = _remedies(problems)
        if "lenient" not in self.strict:
            problems += [f"{key} is missing in the files{_named(key, absent[key])}" for key in self.report.missing]
            problems += [f"{name} is in the files but unexpected here" for name in self.report.unexpected]
            remedies |= {LENIENT} if self.report.missing or self.report.unexpected else set()
        elif there and scan.tensors and not fills:
            names = f"there is {next(iter(there))!r}, here is {next(iter(scan.tensors))!r}"
            problems.append(f"nothing would be loaded: no name in the files is one here ({names})")
        raise_all(problems, remedies)
        return fills

    def read_before(self, fills: list[_Fill]) -> dict[int, torch.Tensor]:
        """Values of those, by number, that share memory with each other or in themselves (tied or expanded tensors), which must agree on it.

        Raises:
            Mismatch: they do not; nothing was changed.
        """
        plain = {n: f for n, f in enumerate(fills) if not is_asked(f.live) and not isinstance(f.live.tensor, DTensor)}
        storages = Counter(f.live.tensor.untyped_storage().data_ptr() for f in plain.values() if f.live.tensor.numel())
        found: dict[int, torch.Tensor] = {}
        late: list[Late] = []
        problems: list[str] = []
        for number, item in plain.items():
            live = item.live
            if live.tensor.numel() and (storages[live.tensor.untyped_storage().data_ptr()] > 1 or unwritable(live.tensor)):
                value = self._joined(item)
                problems += (wrong := self._misfit(live, Kind(value.dtype, tuple(value.shape))))
                if not wrong and not _is_given(live, value, self.code):
                    found[number] = value
                    late.append(Late(live.key, live.tensor.detach(), value))
        raise_all(problems + settle(Index(()), (), late)[1], _remedies(problems))
        return found

    @torch.no_grad()
    def put(self, fills: list[_Fill], read: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fill the memory.

        Args:
            read: values that were read before, by number.

        Returns:
            Values that modules take by code of their own, by key: not put yet.
        """
        given: dict[str, torch.Tensor] = {}
        for done, item in enumerate(fills):
            live, value = item.live, read[done] if done in read else self._joined(item)
            if late := self._misfit(live, Kind(value.dtype, tuple(value.shape))):
                now = f"{done} of {len(fills)} tensors were loaded: do not use the model"
                raise Mismatch("; ".join(late), now=now, todo="correct the adapter")
            if _is_given(live, value, self.code):
                given[live.key] = value.clone()
            elif done in read:
                one, values = single(live.tensor.detach(), value)
                one.copy_(values)
            else:
                _copy(live.tensor, value, live.key)
            self.report.loaded += 1
        return given

    def _joined(self, item: _Fill) -> torch.Tensor:
        value = self.adapter.join(item.live.key, [self.weights.read(part) for part in item.parts])
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{type(self.adapter).__qualname__}.join({item.live.key!r}) gives a {type(value).__qualname__}, and no tensor",
                now="tensors before it are loaded: do not use the model",
                todo="correct the adapter",
            )
        return value

    def _misfit(self, live: Live, kind: Kind) -> list[str]:
        key, tensor = live.key, live.tensor
        if key.rpartition(".")[2] == EXTRA:  # its module takes what it gave
            return []
        if tuple(tensor.shape) != kind.shape and not self.code.shapes(live):
            return [f"{key} has shape {tuple(tensor.shape)}, in the files it is {kind.shape}"]
        if tensor.dtype == kind.dtype:
            return []
        if not castable(tensor.dtype, kind.dtype):
            return [f"{key} is {dtype_name(tensor.dtype)}, in the files it is {dtype_name(kind.dtype)}, which is not converted"]
        if "cast" not in self.strict:
            return [f"{key} is {dtype_name(tensor.dtype)}, in the files it is {dtype_name(kind.dtype)} {_WOULD}"]
        self.report.cast.append(key)
        return []


def _parts(adapter: Adapter, key: str, there: Mapping[str, object]) -> tuple[str, ...]:
    """What an adapter says that a tensor is made of. Raises ConfigError: it is no list of names."""
    parts = adapter.parts(key, there)
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise ConfigError(
            f"{type(adapter).__qualname__}.parts({key!r}) gives {parts!r}", now="nothing was changed", todo="give a list of names"
        )
    return tuple(parts)


def unwritable(tensor: torch.Tensor) -> str:
    """Why values cannot be put into a live tensor as they are; "" if they can."""
    if why := _without_memory(tensor):
        return why
    local = local_of(tensor)
    reach = 0  # of the dimensions with smaller steps
    for step, size in sorted((step, size) for step, size in zip(local.stride(), local.shape, strict=True) if size > 1):
        if step <= reach and local.numel():
            return "is expanded here (its elements share memory)" if step == 0 else "has elements that share memory here"
        reach += (size - 1) * step
    return ""


def _without_memory(tensor: torch.Tensor) -> str:
    """Why a live tensor has no memory to be filled; "" if it has."""
    if is_lazy(tensor):
        return "is not initialised yet (a lazy module): run one forward first"
    local = local_of(tensor)
    if local.is_meta:
        return "is on the meta device"
    if local.layout is not torch.strided or local.is_nested or local.is_quantized:
        return f"is a {'nested' if local.is_nested else local.dtype if local.is_quantized else local.layout} tensor"
    return ""


def _inside(name: str, extras: Collection[str]) -> bool:
    """Whether it is a part of a value that is no tensor, which files of tensors do not have whole."""
    return any(name.startswith((f"{extra}.", f"{extra}/")) for extra in extras)


def _named(key: str, lacking: list[str]) -> str:
    return f" (as {', '.join(lacking)})" if lacking and lacking != [key] else ""


def _is_given(live: Live, value: torch.Tensor, code: LoadCode) -> bool:
    """Whether its module takes a value by code of its own: it is not copied into memory."""
    return is_asked(live) or (live.tensor.shape != value.shape and code.shapes(live))


def _remedies(problems: Collection[str]) -> set[str]:
    return {CAST} if any(problem.endswith(_WOULD) for problem in problems) else set()


def _copy(tensor: torch.Tensor, value: torch.Tensor, key: str) -> None:
    local = local_of(tensor)
    for box in held(tensor, key).boxes:
        part = value
        for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != value.shape[dim]:
                part = part.narrow(dim, start, size)
        box_view(local, box).copy_(part)


def named(report: StateReport, state: str) -> StateReport:
    """A report under a state's name."""
    return msgspec.structs.replace(report, name=state)
