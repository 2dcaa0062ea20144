"""One replica rank's own state as a typed tree: loader position, RNG streams, per-replica states; never a peer's."""

from __future__ import annotations

import base64
import binascii
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ftckpt.errors import Damaged, Mismatch, Unstorable
from ftckpt.format.leaves import decode_tree, encode_tree
from ftckpt.format.manifest import Cursor
from ftckpt.trainer import rng as streams
from ftckpt.trainer.layout import as_integers, check_storable, dtype_name
from ftckpt.trainer.naming import decode_torch, encode_torch, name_of
from ftckpt.trainer.states import State, StateRegistry

_ATTRIBUTED = (OrderedDict, Counter)  # mappings that are stored with their attributes


def capture_cursor(registry: StateRegistry, loader_state: object | None) -> bytes:
    """The state document of this rank, with its RNG streams, as JSON bytes.

    Args:
        registry: its states of scope "replica" are included.
        loader_state: the loader's ``state_dict()`` value, or ``None``.

    Raises:
        Unstorable: names the key.
    """
    doc: dict[str, object] = {"states": {s.name: _encode(s.value(), s.name) for s in registry.of_scope("replica")}}
    if loader_state is not None:
        doc["loader"] = _encode(loader_state, "loader")
    doc["rng"] = _encode(streams.capture_rng(), "rng")
    return msgspec.json.encode(doc)


def restore_cursor_rng(doc: bytes) -> list[str]:
    """Set the RNG streams of a cursor; the last thing of a resume.

    Returns:
        What could not be set, one sentence each; also that the cursor has no streams.

    Raises:
        Damaged: not such a document; the streams are as before.
    """
    cursor = parse_cursor(doc)
    return streams.restore_rng(decode_value(cursor["rng"])) if "rng" in cursor else ["the cursor holds no random streams"]


def unfit(state: State, value: Any) -> str:
    """Why a tree state cannot take a decoded value: a dict takes a dict, a list a list; "" where it can, or where its own function decides."""
    target = state.parts[0]
    kind = next((k for k in (dict, list) if isinstance(target, k)), type(target))
    if state.load is not None:
        return ""
    if isinstance(value, kind):
        lost = {} if type(target) in _ATTRIBUTED else getattr(value, "__dict__", {})
        return f"it is a {type(target).__name__}, which cannot take the stored attributes {', '.join(lost)}" if lost else ""
    return f"it is a {kind.__name__}, and what was stored is a {type(value).__name__}"


def give(state: State, value: Any) -> None:
    """Let a tree state take a decoded value; dicts and lists are filled in place.

    Raises:
        Mismatch: its ``load_state_dict`` or load function raised.
    """
    target = state.parts[0]
    if state.load is not None:
        call_user(state.name, state.load, value)
        return
    target.clear()
    target.update(value) if isinstance(target, dict) else target.extend(value)
    if type(target) in _ATTRIBUTED:
        vars(target).clear()
        vars(target).update(getattr(value, "__dict__", {}))


def call_user(name: str, load: Callable[[Any], object], value: Any) -> None:
    """Call a state's own load function.

    Raises:
        Mismatch: it raised.
    """
    try:
        load(value)
    except (Damaged, Mismatch):
        raise
    except Exception as e:
        raise Mismatch(
            f"state {name!r} could not take what was stored: {type(e).__name__}: {e}",
            now="states before it were loaded already; do not train on with this mixture",
            todo="mend its load function, or exclude the state",
        ) from e


def own_of(cursor: Cursor) -> bytes:
    """The document of a cursor's rank, as ``capture_cursor`` gave it.

    Raises:
        Damaged: there is none.
    """
    try:
        return bytes(msgspec.json.decode(cursor.state, type=dict[str, msgspec.Raw])["own"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as e:
        raise Damaged(
            f"a cursor of {cursor.replica}, rank {cursor.rank}, is not readable: {e}",
            now="nothing was changed",
            todo="take another generation",
        ) from e


def parse_cursor(doc: bytes) -> dict[str, Any]:
    """What is in a document of ``capture_cursor``: ``states`` by name, ``rng`` and maybe ``loader``, encoded.

    Raises:
        Damaged: it is no such document.
    """
    try:
        return msgspec.json.decode(doc, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Damaged(f"a cursor is not readable: {e}", now="nothing was changed", todo="take another generation") from e


def _encode(value: object, where: str) -> object:
    def hook(path: tuple[object, ...], found: object) -> object | None:
        if not isinstance(found, torch.Tensor):
            return encode_torch(found)
        key = f"{where}/{name_of(path)}"
        check_storable(found, key)
        if isinstance(found, DTensor) or type(found) not in (torch.Tensor, nn.Parameter):
            raise Unstorable(f"{key} is a {type(found).__qualname__}; a cursor holds plain tensors", now="nothing was written")
        plain = found.detach().cpu().resolve_conj().resolve_neg()
        data = as_integers(plain).numpy().tobytes()
        return {"$tensor": [dtype_name(plain.dtype), list(plain.shape), base64.b64encode(data).decode()]}

    return encode_tree(value, hook=hook, where=where)


def decode_value(node: object) -> Any:
    """The value of one of them. Raises Damaged."""

    def resolve(found: dict[str, Any]) -> object:
        if "$tensor" not in found:
            return decode_torch(found)
        try:
            name, shape, text = found["$tensor"]
            data = base64.b64decode(text, validate=True)
            dtype = getattr(torch, name)
            tensor = torch.empty(shape, dtype=dtype)
            if len(data) != tensor.numel() * dtype.itemsize:
                raise ValueError(f"{len(data)} bytes for {name} {shape}")
            if data:
                as_integers(tensor).view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return tensor
        except (ValueError, TypeError, AttributeError, RuntimeError, binascii.Error) as e:
            raise Damaged(f"a cursor holds an unreadable tensor: {e}", now="nothing was changed", todo="take another generation") from e

    return decode_tree(node, tensor=resolve)
