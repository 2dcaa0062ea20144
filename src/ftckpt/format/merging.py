"""Puts together what the ranks of a group have of leaves; decides nothing of what a rank writes, and reads no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ftckpt.errors import Mismatch
from ftckpt.format.leaves import exact, path_name


def merge_leaves(docs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Put the encoded trees of several ranks together: objects by key, everything else must be the same.

    Raises:
        Mismatch: two ranks have different values under one key; names the key and the ranks' places in ``docs``.
    """
    merged: dict[str, object] = {}
    for index, doc in enumerate(docs):
        for name, tree in doc.items():
            merged[name] = _merge(merged[name], tree, (name,), index) if name in merged else tree
    return merged


def _merge(a: object, b: object, path: tuple[object, ...], index: int) -> object:
    if (left := _pairs_of(a)) is not None and (right := _pairs_of(b)) is not None:
        merged = {exact(key): [key, value] for key, value in left}
        for key, value in right:
            raw = exact(key)
            merged[raw] = [key, _merge(merged[raw][1], value, (*path, _readable(key)), index) if raw in merged else value]
        pairs = list(merged.values())
        plain = "$dict" not in cast("dict[str, object]", a) and "$dict" not in cast("dict[str, object]", b)
        return {cast(str, key): value for key, value in pairs} if plain else {"$dict": pairs}
    if exact(a) != exact(b):
        raise Mismatch(
            f"{path_name(path)} differs between the ranks: document {index} of those to merge has another value than an earlier one",
            now="the generation was not put together",
            todo="make the value alike on all ranks, or declare the state per rank",
        )
    return a


def _pairs_of(node: object) -> list[list[object]] | None:
    """The keys and values of an encoded ``dict``; None for every other node."""
    if type(node) is not dict:
        return None
    if node.keys() == {"$dict"}:
        return cast("list[list[object]]", node["$dict"])
    return None if next(iter(node), "")[:1] == "$" else [[key, value] for key, value in node.items()]


def _readable(key: object) -> object:
    return key if type(key) in (str, int, bool, type(None)) else exact(key).decode()
