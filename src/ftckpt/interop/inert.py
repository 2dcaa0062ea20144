"""Reads a pickle stream as inert values: it imports nothing, calls nothing and makes only what is listed. For DCP's metadata.

The opcodes are taken apart by ``pickletools``, which executes none; objects become ``Made`` values that only say what the
stream asked for. Never on an ordinary read path: only when a user names the format.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from typing import Any

from ftckpt.errors import Damaged

_MAX_OPS = 50_000_000
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False,
}  # fmt: skip
_ARGUMENT = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES",
})  # fmt: skip
_MARK = object()


class Made:
    """What a stream asked to have made: the name of a class or function, its arguments, and the state set afterwards."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def get(self, field: str) -> Any:
        """A field of its state (a dict, or the first one of a pair)."""
        for state in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(state, dict) and field in state:
                return state[field]
        return None

    def _key(self) -> tuple[Any, ...]:
        state = self.state
        return self.name, self.args, tuple(sorted(state.items(), key=lambda kv: str(kv[0]))) if isinstance(state, dict) else state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.name)  # equal ones have equal names; their state may be set after they became keys


class Name(str):
    """A global that the stream named."""


def read(data: bytes, allowed: Collection[str], where: str) -> Any:
    """The value of a stream.

    Args:
        allowed: full names (``module.name``) that may be in it.
        where: for messages.

    Raises:
        Damaged: anything else is in it, or it is broken.
    """
    try:
        return _Machine(allowed, where).run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        raise Damaged(f"{where} cannot be read: {e}", now="nothing in it was run") from e


class _Machine:
    def __init__(self, allowed: Collection[str], where: str) -> None:
        self._allowed, self._where = allowed, where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for count, (op, arg, _) in enumerate(pickletools.genops(data)):
            if op.name == "STOP":
                return self._stack.pop()
            if count > _MAX_OPS:
                break
            self._one(op.name, arg)
        raise Damaged(f"{self._where} does not end", now="nothing in it was run")

    def _one(self, op: str, arg: Any) -> None:
        stack = self._stack
        if op in _PLAIN:
            stack.append(_PLAIN[op])
        elif op in _ARGUMENT:
            stack.append(arg)
        elif op in _TUPLES:
            n = _TUPLES[op]
            values = tuple(stack[len(stack) - n :])
            del stack[len(stack) - n :]
            stack.append(values)
        elif op in ("PROTO", "FRAME"):
            pass
        elif op == "MARK":
            stack.append(_MARK)
        elif op in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_SET": set}[op]())
        elif op in ("MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[len(self._memo) if op == "MEMOIZE" else int(arg)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(arg)])
        elif op == "POP":
            stack.pop()
        else:
            self._compose(op, arg)

    def _compose(self, op: str, arg: Any) -> None:
        stack = self._stack
        if op in ("TUPLE", "SETITEMS", "APPENDS", "ADDITEMS", "POP_MARK"):
            values = self._since_mark()
            if op == "TUPLE":
                stack.append(tuple(values))
            elif op == "SETITEMS":
                stack[-1].update(zip(values[::2], values[1::2], strict=True))
            elif op == "APPENDS":
                stack[-1].extend(values)
            elif op == "ADDITEMS":
                stack[-1].update(values)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif op == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif op in ("GLOBAL", "STACK_GLOBAL"):
            module, name = (stack.pop(-2), stack.pop()) if op == "STACK_GLOBAL" else arg.split(" ", 1)
            stack.append(self._global(f"{module}.{name}"))
        elif op in ("REDUCE", "NEWOBJ"):
            args = stack.pop()
            stack.append(Made(self._named(stack.pop()), args))
        elif op == "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Made):
                raise Damaged(f"{self._where} sets the state of what is no object", now="nothing in it was run")
            stack[-1].state = state
        else:
            raise Damaged(f"{self._where} has {op}, which no metadata needs", now="nothing in it was run")

    def _since_mark(self) -> list[Any]:
        at = max(i for i, v in enumerate(self._stack) if v is _MARK)
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _global(self, name: str) -> Name:
        if name not in self._allowed:
            raise Damaged(f"{self._where} names {name}, which may not be in it", now="nothing in it was run", todo="do not trust this file")
        return Name(name)

    def _named(self, value: Any) -> str:
        if not isinstance(value, Name):
            raise Damaged(f"{self._where} calls what is no name", now="nothing in it was run")
        return value
