"""Nested values that are not tensors, as typed JSON: encoding, decoding, and the document that holds one tree per state.

No pickle; reading a document imports nothing and calls nothing that the document names. Torch values come and go through
the hooks that the trainer hands in; this module never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import cast

import msgspec

from ftckpt.errors import Damaged, Unstorable
from ftckpt.format import leafclasses, leaftypes
from ftckpt.format.leafclasses import register_class as register_class

LEAVES_VERSION = 1
MAX_DEPTH = 64  # of nesting; deeper values are refused at save, so that every reader can follow

Path = tuple[object, ...]
ATTRIBUTES = object()  # the step of a path below which the attributes of a mapping are
EncodeHook = Callable[[Path, object], object | None]
DecodeHook = Callable[[dict[str, object]], object]

_ATOMS = (type(None), bool)
_PLAIN_KEYS = frozenset({type(None), bool, int, str})  # of which no two are stored alike
_INT64 = 1 << 63


class Leaves(msgspec.Struct, frozen=True, kw_only=True):
    """``leaves.json``: one encoded tree per registered state."""

    version: int = LEAVES_VERSION
    states: dict[str, object]


def encode_tree(value: object, *, hook: EncodeHook | None = None, where: str = "", path: Sequence[object] = ()) -> object:
    """Encode a nested value as what JSON can hold; decode_tree gives the same types and values back.

    ``None``, ``bool``, ``str``, ints below 2**63, finite floats, lists and dicts with plain string keys stay as they are;
    everything else becomes an object with one key that begins with ``$``.

    Args:
        value: the value.
        hook: called as ``hook(path, value)`` for all that is not a plain Python value, before anything else is tried. It
            returns the node to store, such as ``{"$t": name}``, or None for what is not its own.
        where: name of the state, for messages.
        path: keys under which the value is in the state.

    Raises:
        Unstorable: a value cannot be stored faithfully; names its key.
    """
    return _Encoder(hook, where, path).encode(value)


def decode_tree(doc: object, *, tensor: DecodeHook | None = None) -> object:
    """Give back the value that ``encode_tree`` was given.

    Args:
        doc: the encoded tree.
        tensor: resolves nodes that this module does not know, such as ``{"$t": name}``.

    Raises:
        Damaged: not an encoded tree.
        Mismatch: a class that it names is not imported, or has changed.
    """
    try:
        return _Decoder(tensor).decode(doc)
    except RecursionError as e:
        raise Damaged("an encoded tree is nested too deeply to be one", todo="take another generation") from e


def path_name(path: Sequence[object], hook: EncodeHook | None = None, where: str = "") -> str:
    """A path of keys as one name; different paths have different names.

    String keys stand as they are, with ``~`` as ``~0`` and ``/`` as ``~1``; an int 7 is ``~i7``, True ``~b1``, None ``~n``, the
    empty string ``~e``; any other key is ``~j`` and its encoded JSON, escaped likewise. ``ATTRIBUTES`` is ``~a``.

    Args:
        path: the keys.
        hook: as that of ``encode_tree``, for keys.
        where: above all of them, for messages.

    Raises:
        Unstorable: a key cannot be stored; names it and where it is.
    """
    return "/".join([_part(key, hook, (where, path[:i])) for i, key in enumerate(path)])


def is_inside(name: str, keys: Container[str]) -> bool:
    """Whether a tensor of that name is inside the value of one of the keys, which may have slashes themselves."""
    return "/" in name and any(name[:at] in keys for at, char in enumerate(name) if char == "/")


def _part(key: object, hook: EncodeHook | None = None, above: tuple[str, Sequence[object]] = ("", ())) -> str:
    if type(key) is str and key and leaftypes.plain_text(key):
        return key.replace("~", "~0").replace("/", "~1")
    if key == "" and type(key) is str:
        return "~e"
    if key is None:
        return "~n"
    if type(key) is bool:
        return f"~b{int(key)}"
    if type(key) is int and -_INT64 <= key < _INT64:
        return f"~i{key}"
    if key is ATTRIBUTES:
        return "~a"
    text = msgspec.json.encode(_key(key, hook, _place(*above))).decode()
    return "~j" + text.replace("~", "~0").replace("/", "~1")


def _key(key: object, hook: EncodeHook | None, where: str) -> object:
    """A key's encoded form.

    Raises:
        Unstorable: it has none.
    """
    try:
        return encode_tree(key, hook=hook, where="the key")
    except Unstorable as e:
        raise Unstorable(
            f"{where} has the key {repr(key)[:80]}: {e.what}",
            now="nothing was written",
            todo="use keys that can be stored, such as texts and numbers, or leave it out of the state",
        ) from e


class _Encoder:
    def __init__(self, hook: EncodeHook | None, where: str, path: Sequence[object]) -> None:
        self._hook, self._where = hook, where
        self._path = list(path)

    def encode(self, value: object) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            number = cast(int, value)
            return number if -_INT64 <= number < _INT64 else {"$int": hex(number)}
        if kind is float:
            return leaftypes.encode_float(cast(float, value))
        if kind is str:
            return leaftypes.encode_text(cast(str, value))
        if kind is dict:
            return self._dict(cast("dict[object, object]", value))
        if kind is list:
            return self.items(cast("list[object]", value))
        if kind is tuple:
            return {"$tuple": self.items(cast("tuple[object, ...]", value))}
        if self._hook is not None:
            node = self._hook(tuple(self._path), value)
            if node is not None:
                return node
        return self._other(value)

    def child(self, key: object, value: object) -> object:
        """Encode what is under a key."""
        if len(self._path) >= MAX_DEPTH:
            raise self.refusal(f"is nested deeper than {MAX_DEPTH}, or contains itself")
        self._path.append(key)
        node = self.encode(value)
        self._path.pop()
        return node

    def items(self, values: Sequence[object]) -> list[object]:
        """Encode a sequence; the path of an item is its index."""
        if set(map(type, values)) == {int}:  # RNG states are long
            numbers = cast("Sequence[int]", values)
            if min(numbers) >= -_INT64 and max(numbers) < _INT64:
                return list(values)
        return [self.child(i, v) for i, v in enumerate(values)]

    def pairs(self, mapping: Mapping[object, object]) -> list[object]:
        """Encode a mapping with any keys, in its order."""
        found: list[object] = []
        odd: set[bytes] = set()
        for key, value in mapping.items():
            plain = type(key) in _PLAIN_KEYS
            node = self.encode(key) if plain else _key(key, self._key_hook, _place(self._where, self._path))
            if not plain and (text := exact(node)) in odd:
                raise self.refusal(f"has two keys {repr(key)[:80]} that would be stored alike")
            odd.update(() if plain else (text,))
            found.append([node, self.child(key, value)])
        return found

    def attributes(self, value: object) -> dict[str, object]:
        """What stands beside a mapping's items: its attributes, where it has any."""
        found = getattr(value, "__dict__", None)
        return {"attributes": self.child(ATTRIBUTES, found)} if found else {}

    def _key_hook(self, path: Path, value: object) -> object | None:
        node = self._hook(path, value) if self._hook is not None else None
        if type(node) is dict and not node.keys().isdisjoint(("$t", "$tensor")):
            raise Unstorable("the key is a tensor, which would come back as another key")
        return node

    def refusal(self, why: str) -> Unstorable:
        """The error for the value at the present path."""
        return Unstorable(
            f"{_place(self._where, self._path)} {why}",
            now="nothing was written",
            todo="store it as plain values, or leave it out of the state",
        )

    def _dict(self, mapping: dict[object, object]) -> object:
        node: dict[str, object] = {}
        for key, value in mapping.items():
            if type(key) is not str or key[:1] == "$" or not leaftypes.plain_text(key):
                return {"$dict": self.pairs(mapping)}
            node[key] = value if type(value) in _ATOMS else self.child(key, value)
        return node

    def _other(self, value: object) -> object:
        node = leaftypes.encode_other(value, self)
        if node is None:
            node = leafclasses.encode_instance(value, self)
        if node is None:
            raise self.refusal(f"is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored")
        return node


def _place(where: str, path: Sequence[object]) -> str:
    return "/".join(part for part in (where, path_name_for_people(path)) if part) or "the value"


def path_name_for_people(path: Sequence[object]) -> str:
    """As ``path_name``, and for keys that cannot be encoded their ``repr``."""
    parts = []
    for key in path:
        try:
            parts.append(_part(key))
        except Unstorable:
            parts.append(repr(key)[:80])
    return "/".join(parts)


class _Decoder:
    def __init__(self, tensor: DecodeHook | None) -> None:
        self._tensor = tensor

    def decode(self, doc: object) -> object:
        if type(doc) is list:
            return [self.decode(item) for item in doc]
        if type(doc) is not dict:
            return doc
        tag = next(iter(doc), "")
        if tag[:1] != "$":
            return {key: self.decode(value) for key, value in doc.items()}
        try:
            return self._tagged(tag, doc)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError, MemoryError) as e:
            raise Damaged(f"{tag[:40]} holds no value of its kind ({str(e)[:200]})", todo="take another generation") from e

    def _tagged(self, tag: str, doc: dict[str, object]) -> object:
        if (decoder := leaftypes.DECODERS.get(tag)) is not None:
            return decoder(doc[tag], self.decode, doc)
        if (decoder := leafclasses.DECODERS.get(tag)) is not None:
            return decoder(doc[tag], self.decode, doc)
        if self._tensor is not None:
            return self._tensor(doc)
        raise Damaged(f"{tag} is not a tag of format version {LEAVES_VERSION}", todo="use a newer ftckpt, or take another generation")


def encode_leaves(states: Mapping[str, object]) -> bytes:
    """The document of encoded trees by state name, as JSON bytes.

    Raises:
        Unstorable: a tree was not encoded with ``encode_tree``.
    """
    try:
        return msgspec.json.encode(Leaves(states=dict(states)))
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise Unstorable(f"the leaves are not encoded trees: {e}", now="nothing was written") from e


def decode_leaves(data: bytes, where: str) -> dict[str, object]:
    """Read the document back: encoded trees by state name, for ``decode_tree`` or ``merging.merge_leaves``.

    Args:
        where: file name for messages.

    Raises:
        Damaged: not such a document, or of a version that this release does not read.
    """
    try:
        leaves = msgspec.json.decode(data, type=Leaves)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Damaged(f"{where} is not a readable document of leaves: {e}", todo="take another generation") from e
    if leaves.version != LEAVES_VERSION:
        raise Damaged(f"{where} has version {leaves.version}; this release reads {LEAVES_VERSION}", todo="use a newer ftckpt")
    return leaves.states


def exact(node: object) -> bytes:
    """The same bytes for equal encoded trees, and for no others; in whatever order keys of objects are."""
    return msgspec.json.encode(node, order="deterministic")
