"""Tells whether tensors, and the modules and optimizers that they were found in, are still what they were; asks nobody for a state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ftckpt.trainer.collect import Static
from ftckpt.trainer.naming import local_of

_AT_A_TIME = 1024  # tensors looked at: what is looked at of them stays in cache


class Tensors:
    """Tensors as they show their memory: where it is, and dtype, sizes and strides. The same objects, that is; what they hold may change."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, graded: bool = False) -> None:
        self._plain = [t for t in tensors if not isinstance(t, DTensor)]
        self._sharded = [t for t in tensors if isinstance(t, DTensor)]
        self._graded = graded
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether one of them shows other memory than when this was made, or (``graded``) began or ceased to need a gradient."""
        return self._look() != self._seen

    def _look(self) -> list[object]:
        kind = torch.Tensor
        looks = [kind.data_ptr, kind.size, kind.dtype.__get__]  # type: ignore[attr-defined]
        seen: list[object] = [[t.requires_grad for t in chain(self._plain, self._sharded)]] if self._graded else []
        for tensors in (self._plain, [local_of(t) for t in self._sharded]):
            for start in range(0, len(tensors), _AT_A_TIME):
                some = tensors[start : start + _AT_A_TIME]
                plain = list(map(kind.is_contiguous, some))
                seen += [list(map(look, some)) for look in looks]
                seen += [plain, [tensor.stride() for tensor, usual in zip(some, plain, strict=True) if not usual]]
        return seen


class Watch:
    """Tells whether what a ``Static`` was made from is still what it was; some milliseconds for 100 000 tensors."""

    def __init__(self, static: Static) -> None:
        self._tensors = Tensors([source.tensor for source in static.sources])
        self._modules = [m for state in static.states if state.kind == "module" for part in state.parts for m in part.modules()]
        self._optimizers = [part for state in static.states if state.kind == "optimizer" for part in state.parts]
        self._parameters = [
            p for s in static.states if s.kind == "module" and s.only_trainable for part in s.parts for p in part.parameters()
        ]
        self._uniform = [
            all(type(v) is torch.Tensor for held in part.state.values() if isinstance(held, dict) for v in held.values())
            for part in self._optimizers
        ]
        self._seen = self._look()
        self._kept = [  # so that nothing new has the identity of one of these
            [list(table.values()) for table in self._tables() if table],
            [(list(part.state), [list(group["params"]) for group in part.param_groups]) for part in self._optimizers],
        ]

    def changed(self) -> bool:
        """Whether tensors were added, removed, renamed, replaced or given other memory since this was made."""
        return self._look() != self._seen or self._tensors.changed()

    def _tables(self) -> list[dict[Any, Any]]:
        tables = [table for m in self._modules for table in (m._parameters, m._buffers, m._modules)]
        return [table if isinstance(table, dict) else dict(table.items()) for table in tables]  # those of a scripted module are none

    def _look(self) -> list[object]:
        kind = torch.Tensor
        tables = self._tables()
        filled = [table for table in tables if table]
        seen: list[object] = [
            list(map(len, tables)),
            list(map(id, chain.from_iterable(map(dict.values, filled)))),
            list(chain.from_iterable(filled)),
            [p.requires_grad for p in self._parameters],
        ]
        for optimizer, uniform in zip(self._optimizers, self._uniform, strict=True):
            seen.append([list(map(id, group["params"])) for group in optimizer.param_groups])
            seen.append(list(map(id, optimizer.state)))
            held = [value for value in optimizer.state.values() if isinstance(value, dict)]
            values = list(chain.from_iterable(map(dict.values, held)))
            seen.append(list(chain.from_iterable(held)))
            if uniform:  # as long as they are the same objects; looking at each one's type costs as much as all the rest
                seen.append(list(map(id, values)))
            else:
                seen.append([id(v) if isinstance(v, kind) else None for v in values])
        return seen
