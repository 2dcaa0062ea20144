"""Collects, for one state, what would be loaded and what does not fit; reads no tensor and changes nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ftckpt.errors import Damaged, Mismatch, Unstorable
from ftckpt.format.leaves import decode_tree
from ftckpt.trainer.layout import USUAL, check_storable, dtype_name, is_lazy
from ftckpt.trainer.naming import decode_torch, local_of, memory_key
from ftckpt.trainer.overlaps import Late, read_local, single
from ftckpt.trainer.reading import Sink, lacking, read_whole, writing
from ftckpt.trainer.report import StateReport, Strictness
from ftckpt.trainer.stored import Index, Stored

LENIENT = "strict='lenient' passes over missing and unexpected keys"
CAST = "strict='cast' converts dtypes"
FRESH = "on_mismatch='fresh' leaves an optimizer that does not fit as it is"


class Part:
    """What is to be done for one live state.

    Args:
        name: the live state. source: the stored one.
        index: stored tensors.
        mode: how strictly.
        owners: live tensors of modules by the name of what fills them, shared by all parts.

    Attributes:
        sinks: tensors to fill. late: those of them that ``finals`` fill.
        finals: what to do when all were filled; cannot fail.
        loads: user code that takes decoded values; comes last.
        problems: what does not fit. remedies: words that would let some of it pass.
    """

    def __init__(self, name: str, source: str, index: Index, mode: Strictness, owners: dict[str, torch.Tensor]) -> None:
        self.name, self.source, self.index = name, source, index
        self.lenient, self.cast = "lenient" in mode, "cast" in mode
        self.report = StateReport(name=name, source=source)
        self.sinks: list[Sink] = []
        self.late: list[Late] = []
        self.finals: list[Callable[[], object]] = []
        self.loads: list[Callable[[], object]] = []
        self.problems: list[str] = []
        self.remedies: set[str] = set()
        self._owners = owners
        self._decoded: dict[tuple[str, bool], dict[tuple[bool, bool], torch.Tensor]] = {}  # by kind

    def problem(self, text: str) -> None:
        """Something that does not fit, whatever the strictness."""
        self.problems.append(f"{self.name}: {text}")

    def missing(self, key: str) -> None:
        """A live key that is not stored."""
        self.report.missing.append(key)
        if not self.lenient:
            self.problems.append(f"{self.name}/{key} is missing in what was stored")
            self.remedies.add(LENIENT)

    def unexpected(self, key: str) -> None:
        """A stored key that is not live."""
        self.report.unexpected.append(key)
        if not self.lenient:
            self.problems.append(f"{self.name}/{key} is stored but unexpected here")
            self.remedies.add(LENIENT)

    def stored(self, key: str) -> Stored | None:
        """A stored tensor of this state."""
        return self.index.get(f"{self.source}/{key}")

    def sink(self, key: str, stored: Stored, tensor: torch.Tensor) -> None:
        """Let a stored tensor fill a live one, if it fits."""
        if self.fits(key, stored.dtype, stored.shape, tensor):
            self._fill(key, stored, tensor)

    def fits(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], tensor: torch.Tensor) -> bool:
        """Whether a live tensor can take a stored one of that dtype and shape; where not, it is a problem."""
        try:
            check_storable(tensor, key)
        except Unstorable as e:
            self.problem(f"{e.what}: run one forward first" if is_lazy(tensor) else e.what)
            return False
        if type(tensor) in USUAL and tensor.dtype is dtype and tensor.shape == shape:  # most often, and many
            return True
        if tensor.shape != shape:
            self.problem(f"{key} has shape {tuple(tensor.shape)}, stored is {tuple(shape)}")
            return False
        if tensor.dtype == dtype or self._can_cast(key, tensor.dtype, dtype):
            return True
        would = "" if self.cast or not castable(tensor.dtype, dtype) else " (strict='cast' would convert)"
        self.problem(f"{key} is {dtype_name(tensor.dtype)}, stored is {dtype_name(dtype)}{would}")
        if would:
            self.remedies.add(CAST)
        return False

    def number(self, key: str, tensor: torch.Tensor, value: float) -> None:
        """Let a stored Python number fill a live tensor without dimensions, if that can hold it."""
        if tensor.ndim:
            self.problem(f"{key} has shape {tuple(tensor.shape)}, stored is the number {value!r}")
            return
        try:
            made = torch.zeros((), dtype=tensor.dtype).fill_(value)
        except (RuntimeError, OverflowError):  # beyond what its dtype can tell
            made = None
        if made is not None and (self.cast or made.item() == value or value != value):  # NaN stays NaN
            self.report.cast.extend([key] if self.cast else ())
            self.put(key, tensor, made)
            return
        would = "" if made is None else " (strict='cast' rounds)"
        self.problem(f"{key} is a {dtype_name(tensor.dtype)} tensor, which cannot hold the stored number {value!r}{would}")
        self.remedies.update([CAST] if would else ())

    def owns(self, stored: Stored, tensor: torch.Tensor) -> None:
        """A module's tensor is filled by what was stored of that very tensor."""
        if self.name == self.source:
            self._owners[stored.name] = tensor

    def owner(self, name: str) -> torch.Tensor | None:
        """The live tensor whose memory a tensor stored under that name shared, and is to share again."""
        stored = self.index.get(name)
        owner = self._owners.get(stored.name) if stored is not None and name != stored.name and self.name == self.source else None
        return owner if owner is not None and stored is not None and (owner.dtype, owner.shape) == (stored.dtype, stored.shape) else None

    def put(self, key: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Let values of its shape that were read already fill a live tensor once the sinks are filled."""
        one, value = single(tensor.detach(), values)
        self.late.append(Late(f"{self.name}/{key}", tensor, values))
        self.finals.append(lambda: _put(one, value))

    def _fill(self, key: str, stored: Stored, tensor: torch.Tensor) -> None:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        sink = Sink(stored, tensor, tensor.dtype != stored.dtype or local.is_conj() or local.is_neg(), f"{self.name}/{key}")
        lost = lacking(sink)
        if lost:
            raise Damaged(
                f"{stored.name}: {lost} elements are in none of the shards", now="nothing was changed", todo="take another generation"
            )
        if local.is_contiguous() or _writable(local):
            self.sinks.append(sink)
        else:
            self.put(key, local.detach(), read_local(self.index, sink))

    def _can_cast(self, key: str, live: torch.dtype, stored: torch.dtype) -> bool:
        if not self.cast or not castable(live, stored):
            return False
        self.report.cast.append(key)
        return True

    def decode(
        self,
        node: object,
        template: Mapping[str, torch.Tensor] | None = None,
        *,
        in_place: bool = False,
        eager: bool = False,
        owned: bool = False,
    ) -> Any:
        """The value of an encoded tree; its tensors are filled when the sinks are (``eager``: now).

        Args:
            template: live tensors by stored name: tell device and sharding.
            in_place: whether a template's own memory is filled, where it fits.
            owned: whether what shared memory with a module's tensor does so again.
        """

        def resolve(found: dict[str, Any]) -> object:
            if "$t" in found:
                name = str(found["$t"])
                owner = self.owner(name) if owned else None
                return self._tensor(found, template or {}, in_place, eager) if owner is None else _again(found, owner)
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
        known = self._decoded.setdefault((stored.name, eager), {})
        live = _like(template.get(name), stored)
        place = live if in_place and live is not None and _fillable(live, parameter, grad) else None
        if known:
            if (parameter, grad) not in known:
                first = next(iter(known.values()))
                known[parameter, grad] = place if place is not None and memory_key(place) == memory_key(first) else _again(node, first)
            return known[parameter, grad]
        if place is not None:
            tensor = place
        elif isinstance(live, DTensor):
            tensor = torch.empty_like(live.detach())
        else:
            tensor = torch.empty(stored.shape, dtype=stored.dtype, device=None if live is None else live.device)
        if eager:
            tensor.copy_(read_whole(self.index, stored))
        else:
            self.sink(name.removeprefix(f"{self.source}/"), stored, tensor)
            self.report.loaded += 1
        if place is None:
            tensor = nn.Parameter(tensor, requires_grad=grad) if parameter else tensor.requires_grad_(grad)
        elif place.requires_grad != grad:
            self.finals.append(partial(place.requires_grad_, grad))
        known[parameter, grad] = tensor
        return tensor


def _put(one: torch.Tensor, value: torch.Tensor) -> None:
    with writing([one]):
        one.copy_(value)


def _like(live: torch.Tensor | None, stored: Stored) -> torch.Tensor | None:
    """A live tensor that is of the kind, dtype and shape of a stored one."""
    try:
        if live is not None:
            check_storable(live, stored.name)
    except Unstorable:
        return None
    return live if live is not None and (live.dtype, live.shape) == (stored.dtype, stored.shape) else None


def _fillable(live: torch.Tensor, parameter: bool, grad: bool) -> bool:
    """Whether a live tensor itself can become one that is, or is no, parameter and that does, or does not, need a gradient."""
    return isinstance(live, nn.Parameter) == parameter and _writable(live) and (live.is_leaf or grad)


def _again(node: Mapping[str, Any], owner: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the memory of another one, of the kind that a node tells."""
    parameter, grad = "parameter" in node, bool(node.get("grad"))
    if parameter and isinstance(owner, nn.Parameter) and owner.requires_grad == grad:
        return owner
    return nn.Parameter(owner.detach(), requires_grad=grad) if parameter else owner.detach().requires_grad_(grad)


def _writable(tensor: torch.Tensor) -> bool:
    local = local_of(tensor)
    return not any(step == 0 and size > 1 for step, size in zip(local.stride(), local.shape, strict=True))


def castable(live: torch.dtype, stored: torch.dtype) -> bool:
    """Whether values of one dtype are converted into another: as torch does it, but for an imaginary part, which is no matter of precision."""
    if stored.is_complex and not live.is_complex:
        return False
    try:
        torch.empty(1, dtype=live).copy_(torch.empty(1, dtype=stored))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def raise_all(problems: list[str], remedies: Collection[str] = (), limit: int = 100) -> None:
    """Raise everything that does not fit at once.

    Args:
        remedies: what would let some of it pass, besides building the objects as they were.

    Raises:
        Mismatch: there is something.
    """
    if problems:
        more = f"\n  ... and {len(problems) - limit} more" if len(problems) > limit else ""
        lines = "".join(f"\n  {p}" for p in problems[:limit])
        raise Mismatch(
            f"stored and live state do not fit in {len(problems)} places:{lines}{more}",
            now="nothing was changed",
            todo="; ".join(("build the objects as they were when saved, or exclude the state", *sorted(remedies))),
        )
