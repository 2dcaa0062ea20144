"""Instances of classes in typed JSON: enums, dataclasses and registered named tuples, by name.

A name in a document is only ever compared with classes that the program has imported already; nothing is imported for it, and no
constructor, ``__setstate__`` or module ``__getattr__`` runs.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any

from ftckpt.errors import ConfigError, Mismatch
from ftckpt.format.leaftypes import Decode, Decoder, Encoder

_registered: dict[tuple[str, str], type] = {}


def register_class(cls: type) -> type:
    """Let instances of an enum, a dataclass or a named tuple be stored though its name leads nowhere (it is local, say).

    Named tuples are stored only when registered. May be used as a decorator. The class must be registered again, under the
    same module and name, before a state with it is read.

    Raises:
        ConfigError: another kind of class.
    """
    if not (isinstance(cls, enum.EnumMeta) or dataclasses.is_dataclass(cls) or _is_named_tuple(cls)):
        raise ConfigError(f"{cls!r} is no enum, dataclass or named tuple", todo="give the object state_dict and load_state_dict")
    _registered[_name(cls)] = cls
    return cls


def encode_instance(value: object, to: Encoder) -> dict[str, object] | None:
    """The tagged form of an instance of such a class; None for all others.

    Raises:
        Unstorable: it is one, but could not be read back as it is.
    """
    cls = type(value)
    if isinstance(value, enum.Enum):
        module, name = _checked_name(cls, to)
        if type(value).__members__.get(value.name) is value:
            return {"$enum": [module, name, value.name]}
        if isinstance(value, enum.Flag):
            return {"$flag": [module, name, to.encode(int(value.value))]}
        raise to.refusal(f"is {value!r}, which is no named member of {cls.__qualname__}")
    if dataclasses.is_dataclass(cls):
        return _encode_dataclass(value, to)
    if _is_named_tuple(cls) and _registered.get(_name(cls)) is cls:
        return {"$namedtuple": [*_name(cls), list(cls._fields), to.items(list(value))]}  # type: ignore[attr-defined, call-overload]
    return None


def _encode_dataclass(value: Any, to: Encoder) -> dict[str, object]:
    cls = type(value)
    module, name = _checked_name(cls, to)
    names = [field.name for field in dataclasses.fields(cls)]
    extra = {*getattr(value, "__dict__", {}), *_slots(cls)} - set(names)
    if extra or not _is_bare(cls):
        why = (
            f"has more than its fields ({', '.join(sorted(extra))})" if extra else "derives from a builtin container or has its own __new__"
        )
        raise to.refusal(f"is a {cls.__qualname__} that {why}")
    missing = [n for n in names if not hasattr(value, n)]
    if missing:
        raise to.refusal(f"is a {cls.__qualname__} without a value for {', '.join(missing)}")
    return {"$dataclass": [module, name, {n: to.child(n, getattr(value, n)) for n in names}]}


def _is_bare(cls: type) -> bool:
    """Whether an instance is nothing but its attributes."""
    return not any(("__new__" in vars(base) or base.__module__ == "builtins") for base in cls.__mro__ if base is not object)


def _slots(cls: type) -> set[str]:
    slots: set[str] = set()
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        slots.update((own,) if isinstance(own, str) else own)
    return slots - {"__dict__", "__weakref__"}


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple) and cls.__bases__ == (tuple,)


def _name(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _checked_name(cls: type, to: Encoder) -> tuple[str, str]:
    module, name = _name(cls)
    if _find(module, name) is not cls:
        raise to.refusal(f"is of class {module}.{name}, which cannot be found again by that name (see register_class)")
    return module, name


def _find(module: str, name: str) -> object:
    """A registered class, or one that an imported module holds under that name; never imports, never calls."""
    found: object = _registered.get((module, name))
    if found is not None:
        return found
    found = sys.modules.get(module)
    for part in name.split("."):
        if isinstance(found, ModuleType):
            found = object.__getattribute__(found, "__dict__").get(part)  # a lazy module stays as it is
        elif isinstance(found, type):
            found = vars(found).get(part)
        else:
            return None
    return found


def _class(module: str, name: str, kind: str) -> Any:
    cls = _find(module, name)
    if cls is None:
        raise Mismatch(
            f"the state holds a value of {module}.{name}, which is not imported",
            now="nothing of this state was changed",
            todo=f"import {module} before restoring, or register the class with register_class",
        )
    fits = {
        "enum": isinstance(cls, enum.EnumMeta),
        "dataclass": isinstance(cls, type) and dataclasses.is_dataclass(cls) and _is_bare(cls),
        "named tuple": isinstance(cls, type) and _is_named_tuple(cls) and (module, name) in _registered,
    }
    if not fits[kind]:
        raise Mismatch(f"the state holds a value of {module}.{name}, which is no {kind} here", now="nothing of this state was changed")
    return cls


def _decode_enum(content: list[Any]) -> object:
    module, name, member = content
    cls = _class(module, name, "enum")
    if member not in cls.__members__:
        raise Mismatch(f"the state holds {module}.{name}.{member}, which this class does not have", now="nothing of this state was changed")
    return cls.__members__[member]


def _decode_flag(content: list[Any], decode: Decode) -> object:
    module, name, value = content
    cls = _class(module, name, "enum")
    if not issubclass(cls, enum.Flag):
        raise Mismatch(f"the state holds flags of {module}.{name}, which has none", now="nothing of this state was changed")
    number = decode(value)
    if type(number) is not int:
        raise ValueError("flags that are no number")
    return cls(number)


def _decode_dataclass(content: list[Any], decode: Decode) -> object:
    module, name, fields = content
    cls = _class(module, name, "dataclass")
    _same_fields(module, name, list(fields), [field.name for field in dataclasses.fields(cls)])
    value = object.__new__(cls)
    for key, node in fields.items():
        object.__setattr__(value, key, decode(node))
    return value


def _decode_named_tuple(content: list[Any], decode: Decode) -> object:
    module, name, fields, values = content
    cls = _class(module, name, "named tuple")
    _same_fields(module, name, fields, list(cls._fields))
    return tuple.__new__(cls, map(decode, values))


def _same_fields(module: str, name: str, stored: list[str], here: list[str]) -> None:
    if sorted(stored) != sorted(here):
        raise Mismatch(
            f"the state holds a {module}.{name} with fields {sorted(stored)}; the class has {sorted(here)}",
            now="nothing of this state was changed",
            todo="use the class as it was when the state was saved",
        )


DECODERS: dict[str, Decoder] = {
    "$enum": lambda c, decode, node: _decode_enum(c),
    "$flag": lambda c, decode, node: _decode_flag(c, decode),
    "$dataclass": lambda c, decode, node: _decode_dataclass(c, decode),
    "$namedtuple": lambda c, decode, node: _decode_named_tuple(c, decode),
}
