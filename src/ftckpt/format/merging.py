"""Puts together what the ranks of a group have of leaves; decides nothing of what a rank writes, and reads no file.

Of what several ranks have one is the writer. The others send a sketch of it, so that a difference is found, and a key that the
writer has not is not lost. In a sketch a short tree stands as it is and a long one as its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec

from ftckpt.errors import Damaged, Mismatch, Unstorable
from ftckpt.format.leaves import LEAVES_VERSION, exact, path_name
from ftckpt.format.manifest import StateInfo
from ftckpt.format.table import TensorTable

_SHORT = 1024  # bytes of JSON; up to this a tree is its own sketch
_MANY = 256  # keys; of a dict with more no key is told apart
_SHOWN = 20  # differences that a message names

Step = str | int
Kinds = dict[str, tuple[str, tuple[int, ...]]]  # dtype name and shape of tensors
Held = Mapping[str, tuple[str, tuple[int, ...], int]]  # the same of tensors that were written, and by which rank
_Key = tuple[bytes, ...]  # a path by its encoded keys


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has and another one writes: where it is in the document, and its sketch."""

    path: tuple[Step, ...]
    sketch: Any


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sends of leaves: what it writes, as in ``Leaves``, and of a group of several what else it has."""

    version: int = LEAVES_VERSION
    states: dict[str, Any]
    seen: list[Seen] = []
    infos: dict[str, StateInfo] = {}
    kinds: Kinds = {}


def encode_part(
    states: Mapping[str, object],
    seen: Iterable[tuple[tuple[Step, ...], object]],
    infos: Mapping[str, StateInfo],
    kinds: Kinds,
) -> bytes:
    """A rank's document, as JSON bytes.

    Args:
        states: encoded trees that it writes.
        seen: others that it has, each with its place in ``states``.
        infos: how its states are stored.
        kinds: of the plain tensors in ``seen``, by name.

    Raises:
        Unstorable: a tree was not encoded with ``encode_tree``.
    """
    try:
        sketches = [Seen(path, sketch(tree)) for path, tree in seen]
        return msgspec.json.encode(Part(states=dict(states), seen=sketches, infos=dict(infos), kinds=kinds))
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise Unstorable(f"the leaves are not encoded trees: {e}", now="nothing was written") from e


def decode_part(data: bytes, where: str) -> Part:
    """Read a rank's document.

    Raises:
        Damaged: not such a document.
    """
    try:
        return msgspec.json.decode(data, type=Part)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise Damaged(f"{where} is not a readable document of leaves: {e}", todo="take another generation") from e


def sketch(tree: object) -> object:
    """What tells whether another encoded tree is the same, and where it is not."""
    text = exact(tree)
    if len(text) <= _SHORT:
        return tree
    pairs = _pairs_of(tree)
    if pairs is not None and len(pairs) <= _MANY:
        return {"$dict": [[key, sketch(value)] for key, value in pairs]}
    return {"$same": _digest(text)}


def held(tables: Sequence[TensorTable]) -> Held:
    """What the tables of all ranks, in their order, hold; under aliases too."""
    found = {entry.name: (entry.dtype, entry.shape, rank) for rank, table in enumerate(tables) for entry in table.all_tensors}
    return found | {alias: found[name] for table in tables for alias, name in table.aliases.items()}


def merge_leaves(docs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """As ``merge_parts`` of ranks that write all that they have.

    Raises:
        Mismatch: as there.
    """
    return merge_parts({rank: Part(states=dict(doc)) for rank, doc in enumerate(docs)})[0]


def merge_parts(parts: Mapping[int, Part], tensors: Callable[[], Held] = dict) -> tuple[dict[str, object], dict[str, StateInfo]]:
    """Put the encoded trees of several ranks together: objects by key, everything else must be the same.

    Args:
        parts: of the ranks, in their order.
        tensors: gives all tensors that were written.

    Returns:
        Trees by state, and how each state was stored.

    Raises:
        Mismatch: ranks have different values, or tensors of different dtype or shape, under one key; names all such keys and their ranks.
        Damaged: a rank sent what is no such document.
    """
    try:
        return _merged(parts, tensors)
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as e:
        raise Damaged(
            f"ranks {min(parts)} to {max(parts)} have sent leaves that are no encoded trees ({type(e).__name__}: {str(e)[:200]})",
            now="this generation was not put together; earlier ones are unchanged",
            todo="run the same release on all ranks",
        ) from e


def _merged(parts: Mapping[int, Part], tensors: Callable[[], Held]) -> tuple[dict[str, object], dict[str, StateInfo]]:
    merger = _Merger(parts)
    merged: dict[str, object] = {}
    for rank, part in parts.items():
        for name, tree in part.states.items():
            merged[name] = merger.merge(merged[name], tree, (exact(name),), rank) if name in merged else tree
    for rank, part in parts.items():
        for seen in part.seen:
            merger.see(merged, seen, rank)
    infos = merger.infos()
    merger.raise_all(tensors)
    return merged, infos


class _Merger:
    def __init__(self, parts: Mapping[int, Part]) -> None:
        self._parts = parts
        self._differing: dict[_Key, list[int]] = {}
        self._taken: list[tuple[_Key, int, object]] = []
        self._problems: list[str] = []

    def merge(self, a: object, b: object, path: _Key, rank: int) -> object:
        """One tree with the keys of both; ``b`` is of that rank, and may be a sketch."""
        if (left := _pairs_of(a)) is not None and (right := _pairs_of(b)) is not None:
            merged = {exact(key): [key, value] for key, value in left}
            for key, value in right:
                below = exact(key)
                if below in merged:
                    merged[below][1] = self.merge(merged[below][1], value, (*path, below), rank)
                else:
                    self._taken.append(((*path, below), rank, value))
                    merged[below] = [key, value]
            pairs = list(merged.values())
            plain = all(type(key) is str and key[:1] != "$" for key, _ in pairs)
            return {cast(str, key): value for key, value in pairs} if plain else {"$dict": pairs}
        text = exact(a)
        if exact(b) != (exact({"$same": _digest(text)}) if type(b) is dict and "$same" in b else text):
            self._differ(path, rank)
        return a

    def _differ(self, path: _Key, rank: int) -> None:
        ranks = self._differing.setdefault(path, [])
        ranks.extend([] if rank in ranks else [rank])

    def see(self, merged: dict[str, object], seen: Seen, rank: int) -> None:
        """Compare with what a rank has that another one writes; where the way there is not the same, that is the difference."""
        path = tuple(map(exact, seen.path))
        at: Any = merged
        for depth, step in enumerate(seen.path, 1):
            if not _leads(at, step):
                self._differ(path[: depth - 1], rank)
                return
            last = depth == len(path)
            if type(at) is dict and step not in at:
                at[step] = seen.sketch if last else {}
                self._taken.extend([(path, rank, seen.sketch)] if last else ())
            elif last:
                at[step] = self.merge(at[step], seen.sketch, path, rank)
            at = at[step]

    def infos(self) -> dict[str, StateInfo]:
        """How each state was stored, by what all ranks say."""
        found: dict[str, StateInfo] = {}
        for rank, part in self._parts.items():
            for name, info in part.infos.items():
                known = found.setdefault(name, info)
                if known.kind != info.kind:
                    self._problems.append(f"{name} is a {info.kind} on rank {rank} and a {known.kind} on one before it")
                partial, empty = known.partial or info.partial, known.empty and info.empty
                found[name] = msgspec.structs.replace(known, partial=partial, empty=empty, note=known.note or info.note)
        return found

    def raise_all(self, tensors: Callable[[], Held]) -> None:
        """Raise everything that does not fit at once."""
        problems = self._problems + self._unlike(tensors)
        for path, ranks in self._differing.items():
            holder = next((rank for rank, part in self._parts.items() if rank not in ranks and _there(part, path)), None)
            of = ", ".join(map(str, ranks))
            problems.append(
                f"{_name(path)} differs between rank {holder} and rank(s) {of}" if holder is not None else f"{_name(path)} differs"
            )
        for path, rank, tree in self._taken:
            lost = [node["$t"] for node in _tagged(tree) if "$t" in node]
            if lost and not set(lost) <= set(tensors()):
                problems.append(f"{_name(path)} is on rank {rank} and not on the one that writes, and holds tensors ({lost[0]})")
            elif any("$same" in node for node in _tagged(tree)):
                problems.append(f"{_name(path)} is on rank {rank} and not on the one that writes, and is long")
        if problems:
            more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise Mismatch(
                f"ranks of the group have shared states that are not alike, in {len(problems)} places:"
                + "".join(f"\n  {p}" for p in problems[:_SHOWN])
                + more,
                now="this generation was not put together; earlier ones are unchanged",
                todo="make it alike on all ranks, register what differs under names of its own, or with scope='replica' what each rank has for itself",
            )

    def _unlike(self, tensors: Callable[[], Held]) -> list[str]:
        """Tensors that a rank has in another dtype or shape than the one that writes them."""
        written = tensors() if any(part.kinds for part in self._parts.values()) else {}
        found: dict[tuple[str, str], list[int]] = {}
        for rank, part in self._parts.items():
            for name, kind in part.kinds.items():
                if name in written and written[name][:2] != kind:
                    found.setdefault((name, _said(*kind)), []).append(rank)
        return [
            f"{name} is {_said(*written[name][:2])} on rank {written[name][2]} and {kind} on rank(s) {', '.join(map(str, ranks))}"
            for (name, kind), ranks in found.items()
        ]


def _said(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _pairs_of(node: object) -> list[list[object]] | None:
    """The keys and values of an encoded ``dict``; None for every other node."""
    if type(node) is not dict:
        return None
    if node.keys() == {"$dict"}:
        return cast("list[list[object]]", node["$dict"])
    return None if next(iter(node), "")[:1] == "$" else [[key, value] for key, value in node.items()]


def _leads(at: object, step: Step) -> bool:
    """Whether something may be under a step below a node: a key of a ``dict``, or an index that a list has."""
    return type(step) is str if type(at) is dict else type(at) is list and type(step) is int and 0 <= step < len(at)


def _tagged(tree: object) -> Iterator[dict[str, Any]]:
    """All nodes with a tag in an encoded tree."""
    if type(tree) is dict:
        if next(iter(tree), "")[:1] == "$":
            yield tree
        for value in tree.values():
            yield from _tagged(value)
    elif type(tree) is list:
        for item in tree:
            yield from _tagged(item)


def _there(part: Part, path: _Key) -> bool:
    """Whether a rank writes what is under a path."""
    at: object = part.states
    for step in path:
        if type(at) is list and step.isdigit() and int(step) < len(at):
            at = at[int(step)]
            continue
        pairs = {exact(key): value for key, value in _pairs_of(at) or []}
        if step not in pairs:
            return False
        at = pairs[step]
    return True


def _name(path: _Key) -> str:
    keys = [msgspec.json.decode(step) for step in path]
    return path_name([key if type(key) in (str, int, bool, type(None)) else step.decode() for key, step in zip(keys, path, strict=True)])


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
