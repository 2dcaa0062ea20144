"""Encodes values that are asked for at every save, anew only where they changed; must never take a changed value for an unchanged one.

Each time the whole value is walked beside what it was the last time: containers are compared key by key and item by item. What is kept is
the encoded form of items that are the very same immutable objects or tensors; what else can change inside is encoded each time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ftckpt.format.leaftypes import plain_text
from ftckpt.format.leaves import ATTRIBUTES, MAX_DEPTH, encode_tree, path_name
from ftckpt.format.merging import Kinds
from ftckpt.trainer.layout import Source, check_storable, dtype_name
from ftckpt.trainer.naming import TreeEncoder, tensor_node

_ATOMS = frozenset({type(None), bool, int, float, str})  # cannot change; subclasses can
_KEYS = frozenset({type(None), bool, int, str})
_MAPPINGS = frozenset({dict, OrderedDict})
_CONTAINERS = _MAPPINGS | {list, tuple}
_TENSORS = frozenset({torch.Tensor, nn.Parameter, DTensor})


class _Other(NamedTuple):
    """The mark of a value that is encoded each time: the tensors in it."""

    tensors: dict[str, torch.Tensor]


class _Node:
    """A container as it was: its items, and for each what is known of it.

    ``marks``: None of an atom, the name of a tensor, a ``_Node``, or an ``_Other``; ``walked`` are the places of the latter two.
    ``rows`` is where the encoded items are, in ``doc``: values of a dict, items of a list, or pairs. ``beside``: mark of its attributes.
    """

    __slots__ = ("beside", "doc", "keys", "kind", "marks", "rows", "values", "walked")

    def __init__(self, kind: type, keys: list[Any] | None, values: list[Any]) -> None:
        self.kind, self.keys, self.values = kind, keys, values
        self.marks: list[Any] = [None] * len(values)
        self.walked: list[int] = []
        self.beside: Any = None
        self.doc: Any
        self.rows: Any
        if keys is None:
            self.rows = [None] * len(values)
            self.doc = self.rows if kind is list else {"$tuple": self.rows}
        elif kind is dict and all(type(key) is str and key[:1] != "$" and plain_text(key) for key in keys):
            self.doc = self.rows = dict.fromkeys(keys)
        else:
            self.rows = [[encode_tree(key), None] for key in keys]
            self.doc = {"$dict" if kind is dict else "$odict": self.rows}

    def row(self, place: int) -> tuple[Any, Any]:
        """Where the encoded item of a place is: its container in the document, and its key there."""
        if type(self.rows) is dict:
            return self.rows, self.keys[place]  # type: ignore[index]
        return (self.rows, place) if self.keys is None else (self.rows[place], 1)

    def mark(self, place: int, mark: Any) -> None:
        """Note what is known of an item."""
        was, self.marks[place] = self.marks[place], mark
        if (type(was) in _WALKED) != (type(mark) in _WALKED):
            self.walked = [i for i, m in enumerate(self.marks) if type(m) in _WALKED]

    def tensors(self, into: dict[str, torch.Tensor]) -> None:
        """Names and tensors of all below."""
        for value, mark in zip((*self.values, None), (*self.marks, self.beside), strict=True):
            if type(mark) is str:
                into[mark] = value
            elif mark is not None:
                mark.tensors(into) if type(mark) is _Node else into.update(mark.tensors)


_WALKED = frozenset({_Node, _Other})


class Tree:
    """One value under one prefix.

    Attributes:
        doc: encoded; changed in place by the next ``update``.
        changed: whether the last ``update`` changed ``doc``, or may have.
        replaced: whether it met other tensors, or under other names, than the one before.
        tensors: by name in the table.
        sources: those of them that this rank may write.
        kinds: dtype and shape of the others, by name.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._value: object = self  # no value that is ever given
        self._mark: Any = None
        self._path: list[object] = []
        self.doc: object = None
        self.changed = self.replaced = True
        self.tensors: dict[str, torch.Tensor] = {}
        self.sources: list[Source] = []
        self.kinds: Kinds = {}

    def update(self, value: object) -> None:
        """Take the value as it is now. After an error the object is of no more use.

        Raises:
            Unstorable: names the key.
        """
        self.changed = self.replaced = False
        if value is not self._value or type(self._mark) in _WALKED:
            self.doc, self._mark = self._walk(value, self._mark, self.doc, "")
            self._value = value
        if self.replaced:
            self.tensors = {}
            _Node.tensors(_holder(value, self._mark), self.tensors)

    def _walk(self, value: object, mark: Any, doc: object, name: str) -> tuple[object, Any]:
        """The encoded value and its mark; ``mark`` and ``doc`` are those of what was in its place."""
        kind = type(value)
        if kind in _ATOMS:
            self._turned(mark)
            return encode_tree(value), None
        if kind in _TENSORS:
            return self._tensor(value, mark, doc, name)
        if kind in _CONTAINERS:
            if type(mark) is _Node and mark.kind is kind and self._again(mark, value, name):
                return mark.doc, mark
            node = self._built(value, name)
            if node is not None:
                self._turned(mark)
                return node.doc, node
        return self._other(value, mark)

    def _turned(self, mark: Any) -> None:
        """What was here has gone."""
        self.changed = True
        self.replaced = self.replaced or mark is not None

    def _tensor(self, tensor: Any, mark: Any, doc: object, name: str) -> tuple[object, Any]:
        full = f"{self._prefix}/{name or '~'}"
        node = tensor_node(tensor, full)
        check_storable(tensor, full)
        self.replaced = True
        if mark != full or doc != node:  # nodes are of text and True
            self._turned(mark)
        return node, full

    def _again(self, node: _Node, value: Any, name: str) -> bool:
        """Bring a container's node up to date; False if it has other keys or another length."""
        if node.keys is None:
            values = value
            if len(values) != len(node.values):
                return False
        else:
            keys = list(value)
            if len(keys) != len(node.keys) or not (all(map(is_, keys, node.keys)) or _alike(keys, node.keys)):
                return False
            values = list(value.values())
        if all(map(is_, values, node.values)):
            for place in node.walked:
                self._item(node, place, values[place], name)
            self._attributes(node, value, name)
            return True
        walked = frozenset(node.walked)
        for place, (new, was) in enumerate(zip(values, node.values, strict=True)):
            if new is not was or place in walked:
                self._item(node, place, new, name)
        node.values = list(values)
        self._attributes(node, value, name)
        return True

    def _built(self, value: Any, name: str) -> _Node | None:
        """A container's node; None for one that is better encoded each time, or cannot be."""
        if len(self._path) >= MAX_DEPTH:
            return None
        keys = list(value) if type(value) in _MAPPINGS else None
        values = list(value) if keys is None else list(value.values())
        if keys is None and set(map(type, values)) == {int}:  # long lists of numbers (of random number generators) are quick
            return None
        if keys is not None and not _KEYS.issuperset(map(type, keys)):
            return None
        node = _Node(type(value), keys, values)
        for place, item in enumerate(values):
            self._item(node, place, item, name)
        self._attributes(node, value, name)
        return node

    def _attributes(self, node: _Node, value: Any, name: str) -> None:
        """What stands beside the items of an ordered dict."""
        found = vars(value) if node.kind is OrderedDict else None
        if found or node.beside is not None:
            self._path.append(ATTRIBUTES)
            below = path_name((ATTRIBUTES,))
            doc, node.beside = self._walk(found or {}, node.beside, node.doc.get("attributes"), f"{name}/{below}" if name else below)
            node.doc["attributes"] = doc
            self._path.pop()

    def _item(self, node: _Node, place: int, value: object, name: str) -> None:
        key = place if node.keys is None else node.keys[place]
        holder, at = node.row(place)
        mark = node.marks[place]
        self._path.append(key)
        below = "" if type(value) in _ATOMS else path_name((key,))
        holder[at], new = self._walk(value, mark, holder[at], f"{name}/{below}" if name else below)
        self._path.pop()
        if new is not mark:
            node.mark(place, new)

    def _other(self, value: object, mark: Any) -> tuple[object, Any]:
        encoder = TreeEncoder()
        doc = encoder.encode(value, self._prefix, self._path)
        self.changed = True
        had = mark.tensors if type(mark) is _Other else {}
        same = (mark is None or type(mark) is _Other) and list(had) == list(encoder.tensors)
        if not same or not all(map(is_, had.values(), encoder.tensors.values())):
            self.replaced = True
            for name, tensor in encoder.tensors.items():
                check_storable(tensor, name)
        return doc, _Other(encoder.tensors)


def _alike(keys: list[Any], others: list[Any]) -> bool:
    return list(map(type, keys)) == list(map(type, others)) and keys == others


def _holder(value: object, mark: Any) -> _Node:
    node = _Node(list, None, [value])
    node.marks[0] = mark
    return node


class Trees:
    """All values that are asked for, by prefix.

    Attributes:
        changed: whether anything encoded changed since the round before, or may have.
        replaced: whether other tensors were met, or under other names.
    """

    def __init__(self) -> None:
        self._trees: dict[str, Tree] = {}
        self._before: dict[str, Tree] = {}
        self._shapes: dict[str, tuple[list[Any], list[list[int]]]] = {}
        self.changed = self.replaced = False

    def begin(self) -> None:
        """Begin a round."""
        self._before, self._trees = self._trees, {}
        self.changed = self.replaced = False

    def encode(self, value: object, prefix: str, claim: str, mine: Callable[[str], bool]) -> Tree:
        """The value's tree; its sources are those that this rank may write.

        Raises:
            Unstorable: names the key.
        """
        tree = self._before.pop(prefix, None) or Tree(prefix)
        tree.update(value)
        if tree.replaced:
            writes = mine(claim)
            tree.sources = [Source(name, t, True, claim) for name, t in tree.tensors.items() if writes or isinstance(t, DTensor)]
            others = {} if writes else tree.tensors
            kinds = {name: (dtype_name(t.dtype), tuple(t.shape)) for name, t in others.items() if not isinstance(t, DTensor)}
            tree.changed, tree.kinds = tree.changed or kinds != tree.kinds, kinds
        self._trees[prefix] = tree
        self.changed, self.replaced = self.changed or tree.changed, self.replaced or tree.replaced
        return tree

    def shapes(self, key: str, tensors: list[torch.Tensor]) -> list[list[int]]:
        """Shapes of tensors, as lists."""
        now = [tensor.shape for tensor in tensors]
        known = self._shapes.get(key)
        if known is None or known[0] != now:
            self.changed = True
            known = self._shapes[key] = (now, list(map(list, now)))
        return known[1]

    def end(self) -> None:
        """End a round: what was not asked for is forgotten."""
        if self._before:
            self.changed = self.replaced = True
            self._before = {}
