"""Recorded system calls replayed on a simulated disk, and every kind of state that a power loss could leave. Judges nothing.

What was not fsynced may be there, be missing, or be torn; entries of a directory are safe only once the directory was fsynced,
and may reach the disk in any order.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from ftckpt.testing.faults import Call

SECTOR = 512
_ENTRY = frozenset({"open", "mkdir", "rename", "rename_new", "link", "unlink", "rmdir"})


class Node:
    """One file or directory: what is on the disk, and what is only in memory."""

    def __init__(self, *, directory: bool) -> None:
        self.directory = directory
        self.data = bytearray()
        self.pending: list[tuple[int, bytes]] = []
        self.names: dict[str, Node] = {}  # durable
        self.live: dict[str, Node] = {}

    def now(self) -> bytearray:
        """A file's content as a running system sees it."""
        return _written(self.data, self.pending)


class Change:
    """One change of a directory's entries that is not yet on disk: names set (or, with None, removed)."""

    def __init__(self, folder: Node, sets: dict[str, Node | None]) -> None:
        self.folder, self.sets = folder, sets


class Disk:
    """A simulated disk below one root.

    Args:
        root: absolute path; everything recorded must lie below it. It and what is above it are taken for durable.
    """

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.top = Node(directory=True)
        self.changes: list[Change] = []

    def apply(self, call: Call) -> None:
        """One recorded call; those that failed changed nothing, but for the bytes that a torn write left."""
        if call.failed and call.op != "pwrite":
            return
        if call.op == "pwrite" and isinstance(call.args[0], bytes):
            self._file(call.path).pending.append((cast(int, call.args[1]), call.args[0]))
        elif call.op == "allocate":
            self._allocate(self._file(call.path), cast(int, call.args[0]))
        elif call.op == "fsync":
            self._sync(self._node(call.path))
        elif call.op in _ENTRY:
            self._entry(call)

    # ------------------------------------------------------------------ calls
    def _entry(self, call: Call) -> None:
        if call.path.rstrip("/") == self.root:
            return  # the root itself is taken for durable
        folder, name = self._parent(call.path)
        if call.op == "open":
            if name not in folder.live and cast(int, call.args[0]) & os.O_CREAT:
                self._change(folder, {name: Node(directory=False)})
        elif call.op == "mkdir":
            self._change(folder, {name: Node(directory=True)})
        elif call.op in ("unlink", "rmdir"):
            self._change(folder, {name: None})
        else:
            target, new = self._parent(str(call.args[0]))
            node = folder.live[name]
            if target is folder:
                self._change(folder, {new: node} if call.op == "link" else {new: node, name: None})
                return
            self._change(target, {new: node})
            if call.op != "link":
                self._change(folder, {name: None})

    def _change(self, folder: Node, sets: dict[str, Node | None]) -> None:
        _set(folder.live, sets)
        self.changes.append(Change(folder, sets))

    def _allocate(self, node: Node, size: int) -> None:
        if size > len(node.now()):
            node.pending.append((len(node.now()), b"\0" * (size - len(node.now()))))

    def _sync(self, node: Node) -> None:
        if not node.directory:
            node.data, node.pending = node.now(), []
            return
        for change in [c for c in self.changes if c.folder is node]:
            _set(node.names, change.sets)
        self.changes = [c for c in self.changes if c.folder is not node]

    # ------------------------------------------------------------------ places
    def _parts(self, path: str) -> list[str]:
        if path.rstrip("/") == self.root:
            return []
        if not path.startswith(self.root + "/"):
            raise ValueError(f"{path} is not below {self.root}")
        return path[len(self.root) + 1 :].split("/")

    def _node(self, path: str) -> Node:
        node = self.top
        for part in self._parts(path):
            node = node.live[part]
        return node

    def _file(self, path: str) -> Node:
        return self._node(path)

    def _parent(self, path: str) -> tuple[Node, str]:
        *folders, name = self._parts(path)
        node = self.top
        for part in folders:
            node = node.live[part]
        return node, name

    # ------------------------------------------------------------------ after the loss
    def after_loss(self, names: str, data: str, rng: random.Random) -> dict[str, bytes | None]:
        """What is on the disk when the power goes now.

        Args:
            names: which unsynced directory entries made it: "none", "all" or "some" (any of them, in any combination).
            data: which unsynced writes did: "none", "all" or "torn" (any sectors of them).
            rng: decides what "some" and "torn" are.

        Returns:
            Paths below the root: bytes of files, None for directories.
        """
        kept = [c for c in self.changes if names == "all" or (names == "some" and rng.random() < 0.5)]
        folders: dict[int, dict[str, Node]] = {}
        for change in kept:
            _set(folders.setdefault(id(change.folder), dict(change.folder.names)), change.sets)
        out: dict[str, bytes | None] = {}

        def walk(node: Node, at: str) -> None:
            for name, child in sorted(folders.get(id(node), node.names).items()):
                path = f"{at}/{name}" if at else name
                out[path] = None if child.directory else _left(child, data, rng)
                if child.directory:
                    walk(child, path)

        walk(self.top, "")
        return out


def losses(calls: Iterable[Call], root: str, *, seed: int = 0, chances: int = 3) -> Iterator[tuple[int, str, dict[str, bytes | None]]]:
    """For every prefix of recorded calls: what a power loss right after it could leave.

    Args:
        root: absolute path that the calls were made below.
        chances: how many random combinations besides the extreme ones.

    Yields:
        Calls made, what was kept, and the files left.
    """
    disk = Disk(root)
    kinds = [("none", "none"), ("all", "none"), ("all", "all"), *[("some", "torn")] * chances]
    for number, call in enumerate([None, *calls]):
        if call is not None:
            disk.apply(call)
        for turn, (names, data) in enumerate(kinds):
            rng = random.Random(f"{seed} {number} {turn}")
            yield number, f"names {names}, data {data}, turn {turn}", disk.after_loss(names, data, rng)


def lay_out(files: dict[str, bytes | None], folder: Path) -> None:
    """Write what was left into an empty directory."""
    folder.mkdir(parents=True)
    for path, data in files.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def _set(names: dict[str, Node], sets: dict[str, Node | None]) -> None:
    for name, node in sets.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _written(data: bytearray, writes: Iterable[tuple[int, bytes]]) -> bytearray:
    out = bytearray(data)
    for at, piece in writes:
        if at > len(out):
            out += bytes(at - len(out))
        out[at : at + len(piece)] = piece
    return out


def _left(node: Node, data: str, rng: random.Random) -> bytes:
    if data == "all":
        return bytes(node.now())
    if data == "none" or not node.pending:
        return bytes(node.data)
    pieces = [(at + i, piece[i : i + SECTOR]) for at, piece in node.pending for i in range(0, len(piece), SECTOR) if rng.random() < 0.5]
    torn = _written(node.data, pieces)
    whole = len(node.now())
    if len(torn) < whole and rng.random() < 0.5:  # the new length is there, the bytes are not
        torn += bytes(whole - len(torn))
    return bytes(torn)
