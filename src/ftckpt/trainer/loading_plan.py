"""Collects, for one state, what would be loaded and what does not fit; reads no tensor and changes nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ftckpt.errors import Damaged, Mismatch
from ftckpt.format.leaves import decode_tree
from ftckpt.trainer.layout import USUAL, as_integers, dtype_name, is_lazy
from ftckpt.trainer.naming import decode_torch, local_of, memory_key
from ftckpt.trainer.reading import Sink, lacking, read_whole, same_content
from ftckpt.trainer.report import StateReport, Strictness
from ftckpt.trainer.stored import Index, Stored


class Part:
    """What is to be done for one live state.

    Args:
        name: the live state. source: the stored one.
        index: stored tensors.
        mode: how strictly.
        claimed: memory that some state of this restore writes already, shared by all parts.

    Attributes:
        sinks: tensors to fill. finals: what to do when all were filled; cannot fail.
        loads: user code that takes decoded values; comes last. problems: what does not fit.
    """

    def __init__(self, name: str, source: str, index: Index, mode: Strictness, claimed: dict[object, Stored]) -> None:
        self.name, self.source, self.index = name, source, index
        self.lenient, self.cast = "lenient" in mode, "cast" in mode
        self.report = StateReport(name=name, source=source)
        self.sinks: list[Sink] = []
        self.finals: list[Callable[[], object]] = []
        self.loads: list[Callable[[], object]] = []
        self.problems: list[str] = []
        self._claimed = claimed
        self._decoded: dict[tuple[str, bool, bool], torch.Tensor] = {}

    def problem(self, text: str) -> None:
        """Something that does not fit, whatever the strictness."""
        self.problems.append(f"{self.name}: {text}")

    def missing(self, key: str) -> None:
        """A live key that is not stored."""
        self.report.missing.append(key)
        if not self.lenient:
            self.problems.append(f"{self.name}/{key} is missing in what was stored")

    def unexpected(self, key: str) -> None:
        """A stored key that is not live."""
        self.report.unexpected.append(key)
        if not self.lenient:
            self.problems.append(f"{self.name}/{key} is stored but unexpected here")

    def stored(self, key: str) -> Stored | None:
        """A stored tensor of this state."""
        return self.index.get(f"{self.source}/{key}")

    def sink(self, key: str, stored: Stored, tensor: torch.Tensor) -> None:
        """Let a stored tensor fill a live one, if it fits."""
        if type(tensor) in USUAL and tensor.dtype is stored.dtype and tensor.shape == stored.shape:  # most often, and many
            self._fill(key, stored, tensor)
        elif is_lazy(tensor):
            self.problem(f"{key} is not initialised yet (a lazy module); run one forward first")
        elif tensor.shape != stored.shape:
            self.problem(f"{key} has shape {tuple(tensor.shape)}, stored is {stored.shape}")
        elif tensor.dtype != stored.dtype and not self._can_cast(key, tensor.dtype, stored.dtype):
            self.problem(f"{key} is {dtype_name(tensor.dtype)}, stored is {dtype_name(stored.dtype)} (strict='cast' would convert)")
        else:
            self._fill(key, stored, tensor)

    def _fill(self, key: str, stored: Stored, tensor: torch.Tensor) -> None:
        memory = memory_key(tensor)
        other = self._claimed.setdefault(memory, stored)
        if other is not stored:
            if not same_content(self.index, other, stored):
                self.problem(f"{key} shares memory here with what {other.name} fills, but they were stored with different values")
            return
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        sink = Sink(stored, tensor, tensor.dtype != stored.dtype or local.is_conj() or local.is_neg())
        lost = lacking(sink)
        if lost:
            raise Damaged(
                f"{stored.name}: {lost} elements are in none of the shards", now="nothing was changed", todo="take another generation"
            )
        if not local.is_contiguous() and any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)):
            self._fill_expanded(key, stored, local.detach())
        else:
            self.sinks.append(sink)

    def _fill_expanded(self, key: str, stored: Stored, local: torch.Tensor) -> None:
        """A tensor whose elements share memory takes one of each, if the stored ones are alike."""
        whole = read_whole(self.index, stored)
        one, values = local, whole
        for dim, step in enumerate(local.stride()):
            if step == 0:
                one, values = one.narrow(dim, 0, min(1, one.shape[dim])), values.narrow(dim, 0, min(1, values.shape[dim]))
        if not torch.equal(as_integers(values.expand(whole.shape)), as_integers(whole)):
            self.problem(f"{key} is expanded here (its elements share memory), but differing values were stored")
        self.finals.append(lambda: one.copy_(values))

    def _can_cast(self, key: str, live: torch.dtype, stored: torch.dtype) -> bool:
        if not self.cast:
            return False
        try:
            torch.empty(1, dtype=live).copy_(torch.empty(1, dtype=stored))
        except (RuntimeError, NotImplementedError):
            return False
        self.report.cast.append(key)
        return True

    def decode(
        self, node: object, template: Mapping[str, torch.Tensor] | None = None, *, in_place: bool = False, eager: bool = False
    ) -> Any:
        """The value of an encoded tree; its tensors are filled when the sinks are (``eager``: now).

        Args:
            template: live tensors by stored name: tell device and sharding.
            in_place: whether a template's own memory is filled, where it fits.
        """

        def resolve(found: dict[str, Any]) -> object:
            if "$t" in found:
                return self._tensor(found, template or {}, in_place, eager)
            value = decode_torch(found)
            if value is None:
                raise Damaged(f"{self.source}: {next(iter(found))} is not a tag that this release knows", todo="use a newer ftckpt")
            return value

        return decode_tree(node, tensor=resolve)

    def _tensor(self, node: dict[str, Any], template: Mapping[str, torch.Tensor], in_place: bool, eager: bool) -> torch.Tensor:
        name = str(node["$t"])
        stored = self.index.get(name)
        if stored is None:
            raise Damaged(f"{name} is in none of the shards", now="nothing was changed", todo="take another generation")
        parameter, grad = "parameter" in node, bool(node.get("grad"))
        known = self._decoded.get((stored.name, parameter, grad))
        if known is not None:
            return known
        live = template.get(name)
        fits = live is not None and live.dtype == stored.dtype and tuple(live.shape) == stored.shape and not live.is_meta
        if in_place and live is not None and fits and isinstance(live, nn.Parameter) == parameter and _writable(live):
            tensor = live
        elif live is not None and fits and isinstance(live, DTensor):
            tensor = torch.empty_like(live.detach())
        else:
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=live.device if fits and live is not None else None)
        if eager:
            return tensor.copy_(read_whole(self.index, stored)) if not isinstance(tensor, DTensor) else tensor
        self.sink(name, stored, tensor)
        self.report.loaded += 1
        if tensor is not live:
            tensor = nn.Parameter(tensor, requires_grad=grad) if parameter else tensor.requires_grad_(grad)
        self._decoded[stored.name, parameter, grad] = tensor
        return tensor


def _writable(tensor: torch.Tensor) -> bool:
    local = local_of(tensor)
    return not any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True))


def raise_all(problems: list[str], limit: int = 100) -> None:
    """Raise everything that does not fit at once.

    Raises:
        Mismatch: there is something.
    """
    if problems:
        more = f"\n  ... and {len(problems) - limit} more" if len(problems) > limit else ""
        lines = "".join(f"\n  {p}" for p in problems[:limit])
        raise Mismatch(
            f"stored and live state do not fit in {len(problems)} places:{lines}{more}",
            now="nothing was changed",
            todo="build the objects as they were when saved, exclude the state, or choose strict='lenient', 'cast' or on_mismatch='fresh'",
        )
