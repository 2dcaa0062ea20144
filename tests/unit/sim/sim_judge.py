"""Judges what happened by what the states really are; reads log and files by itself and knows none of the project's rules.

A state's weights are one number that names how it came about: which steps, with whose batches, after which explicit opening.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import NamedTuple

from sim_disk import Disk
from sim_log import Server, Values

Batch = tuple[str, int]
"""Whose draw, and its number."""


class Node(NamedTuple):
    """A state: what it came from, its step, and what the last step added."""

    parent: int
    step: int
    batches: tuple[Batch, ...]
    opening: str


ROOT = 0


class Recorded(NamedTuple):
    """One entry as it was appended."""

    log: str
    index: int
    kind: str
    step: int
    location: str
    node: int
    writer: str
    base: int


class Problem(NamedTuple):
    """Something that must not be: its kind, and what."""

    kind: str
    text: str


class Judge:
    """Watches disk and log while a schedule runs.

    Args:
        keep: generations that retention is told to keep.
    """

    def __init__(self, job: str, disk: Disk, server: Server, keep: int, now: Callable[[], float]) -> None:
        self.job, self.disk, self.server, self.keep, self.now = job, disk, server, keep, now
        self.nodes: dict[int, Node] = {ROOT: Node(ROOT, 0, (), "")}
        self.problems: list[Problem] = []
        self.entries: dict[tuple[str, int], Recorded] = {}  # all that ever were
        self.standing: set[str] = set()  # locations that were acknowledged, and not taken back
        self.tail: Recorded | None = None
        self.withdrawn = 0
        self.by: list[tuple[str, Recorded]] = []  # who appended what
        self.reading: dict[str, int] = {}  # location -> readers at work
        self.went_back = self.rebuilt = False
        self.log = ""
        self.names: dict[str, int] = {}  # by trajectory
        self.aliases: dict[str, str] = {}  # how replicas are called where only their number is known
        disk.watcher = server.watcher = self

    def blame(self, kind: str, text: str) -> None:
        self.problems.append(Problem(kind, text))

    # ------------------------------------------------------------ what states are
    def step(self, parent: int, batches: tuple[Batch, ...], attempt: str) -> int:
        """The state after one more step; equal for all who made it together."""
        node = Node(parent, self.nodes[parent].step + 1, tuple(sorted(batches)), "")
        return self._add(node, attempt)

    def opened(self, parent: int, attempt: str) -> int:
        """The state after an explicit opening."""
        return self._add(Node(parent, self.nodes[parent].step, (), attempt), attempt)

    def _add(self, node: Node, attempt: str) -> int:
        digest = hashlib.blake2b(f"{node} {attempt}".encode(), digest_size=7).digest()
        name = int.from_bytes(digest, "big")
        self.nodes[name] = node
        return name

    def name(self, trajectory: str, node: int) -> None:
        """A state goes by this trajectory; equal ones must be equal states, and the other way round."""
        if self.names.setdefault(trajectory, node) != node:
            self.blame("TWIN", f"trajectory {trajectory[:8]} names two states")

    def line(self, node: int) -> list[int]:
        """A state and all that it came from."""
        found = [node]
        while found[-1] != ROOT:
            found.append(self.nodes[found[-1]].parent)
        return found

    def descends(self, node: int, ancestor: int) -> bool:
        return ancestor in self.line(node)

    def drawn(self, node: int, replica: str) -> list[int]:
        """Numbers of a replica's draws in a state, oldest first."""
        return [n for at in reversed(self.line(node)) for who, n in self.nodes[at].batches if who == replica]

    # ------------------------------------------------------------ files
    def image(self, node: int, rank: int) -> bytes:
        return struct.pack("<qq", node, rank)

    def payload(self, location: str, manifest: str = "") -> tuple[int | None, str]:
        """The state that a directory holds, or what is wrong with it."""
        base, files = f"{self.job}/generations/{location}", self.disk.files
        data = files.get(f"{base}/manifest.json")
        if data is None:
            return None, "no manifest"
        if manifest and hashlib.sha256(data).hexdigest() != manifest:
            return None, "another manifest than the record's"
        told = json.loads(data)
        for small in (told["leaves"], *(c["file"] for c in told["cursors"])):
            found = files.get(f"{base}/{small['file']}")
            if found is None or hashlib.sha256(found).hexdigest() != small["sha256"]:
                return None, f"{small['file']} missing or changed"
        held, sizes = set(), {s["file"]: s["bytes"] for s in told["shards"]}
        for rank in range(told["group_world_size"]):
            name = f"shard-{rank:05d}-of-{told['group_world_size']:05d}.safetensors"
            shard = files.get(f"{base}/{name}")
            if shard is None or sizes.get(name) != len(shard):
                return None, f"{name} missing, or not as the manifest says"
            node, of = struct.unpack_from("<qq", shard, 8 + int.from_bytes(shard[:8], "little"))
            if of != rank:
                return None, f"{name} holds rank {of}"
            held.add(node)
        if len(held) != 1:
            return None, f"shards of different states {held}"
        (node,) = held
        if node not in self.nodes or self.nodes[node].step != told["step"]:
            return None, f"says step {told['step']}, is not"
        if self.names.get(told["trajectory"]["h"], node) != node:
            return None, "another state than its trajectory's"
        for who, count, _ in told["participants"]:
            if count != len(self.drawn(node, self.aliases.get(who, who))):
                return None, f"{count} draws of {who} are said to be in it, the state has {self.drawn(node, who)}"
        return node, ""

    def written(self, path: str, before: bytes | None) -> None:
        if before is None or before == self.disk.files[path] or "/generations/" not in path:
            return
        location = path.split("/generations/")[1].split("/")[0]
        if location in self.standing and self.payload(location)[0] is None:
            self.blame("CHANGED", f"{path} was overwritten")

    def removing(self, directory: str) -> None:
        location = directory.rsplit("/", 1)[1]
        listed = [r for r in self.listed() if r.location == location]
        if listed:
            self.blame("LISTED", f"{location} is removed while #{listed[0].index} lists it")
        elif location in self.standing:
            self.blame("LOST", f"{location}, acknowledged and never withdrawn, is removed")
        if self.being_read(location):
            self.blame("READ", f"{location} is removed under its reader")

    def being_read(self, location: str) -> bool:
        """Whether a reader is at work there, and the log says so."""
        if not self.reading.get(location):
            return False
        prefixes = tuple(f"/ftckpt/v1/{self.job}/readers/{r.log}/{r.index:012d}/" for r in self.entries.values() if r.location == location)
        now = self.now()
        return any(k.startswith(prefixes) and (v[1] is None or v[1] > now) for k, v in self.server.values.items())

    # ------------------------------------------------------------ the log
    def listed(self) -> list[Recorded]:
        """Entries of the log as it is, in order."""
        prefix = f"/ftckpt/v1/{self.job}/entries/{self.log}/"
        keys = sorted(k for k in self.server.values if k.startswith(prefix))
        return [r for k in keys if (r := self.entries.get((self.log, int(k[len(prefix) :])))) is not None]

    def transacted(self, who: str, before: Values, after: Values) -> None:
        root = f"/ftckpt/v1/{self.job}/"
        uuid = after.get(f"{root}uuid", (b"", None))[0].decode()
        if uuid != self.log:
            self._another_log(uuid, before, after)
        prefix = f"{root}entries/{uuid}/"
        added = [k for k in after if k not in before and k.startswith(prefix)]
        for key in added:
            self._appended(uuid, json.loads(after[key][0]), who)
        for key in [k for k in before if k not in after and k.startswith(prefix)]:
            self._withdrawn(uuid, int(key[len(prefix) :]), who, before)
        if any(k in before and after.get(k) != before[k] for k in after if k.startswith(prefix)):
            self.blame("ORDER", f"{who} changed an entry")

    def _another_log(self, uuid: str, before: Values, after: Values) -> None:
        """A first log, or one that was rebuilt, maybe where there was none: its entries were written beforehand."""
        prefix = f"/ftckpt/v1/{self.job}/entries/{uuid}/"
        rebuilt, self.log = bool(self.log) or any(k.startswith(prefix) for k in before), uuid
        if not rebuilt:
            return
        newest = self.tail
        self.tail, self.went_back, self.rebuilt = None, False, True
        locations = set()
        for key in sorted(k for k in after if k.startswith(prefix)):
            told = json.loads(after[key][0])
            self._appended(uuid, told, "rebuild")
            locations.add(told["location"])
        if newest is not None and newest.kind == "generation" and newest.location in self.standing and newest.location not in locations:
            self.blame("LOST", f"the rebuilt log has not {newest.location}")
        self.standing &= locations

    def _appended(self, uuid: str, told: dict, who: str) -> None:  # type: ignore[type-arg]
        tail, index = self.tail, told["index"]
        at = f"{who} appends #{index} ({told['kind']}, step {told['step']})"
        if index != (0 if tail is None else tail.index + 1):
            self.blame("ORDER", f"{at} after #{None if tail is None else tail.index}")
        if told["kind"] == "generation":
            node, wrong = self.payload(told["location"], told["manifest"])
            if node is None:
                self.blame("WHOLE", f"{at}: {wrong}")
                node = ROOT
            elif tail is not None and not self.descends(node, tail.node):
                self.blame("CHAIN", f"{at}: not from #{tail.index}")
            elif tail is not None and (node == tail.node or told["step"] < tail.step):
                self.blame("CHAIN", f"{at}: not newer than #{tail.index}")
            self.standing.add(told["location"])
        else:
            base = self.entries.get((uuid, told["base"]))
            if told["base"] >= 0 and (base is None or not any(r.index == told["base"] for r in self.listed())):
                self.blame("ORDER", f"{at}: its base #{told['base']} is not listed")
            if told["base"] < 0 and any(r.kind == "generation" for r in self.entries.values()):
                self.blame("ZERO", f"{at}: from zero, beside generations")
            start = ROOT if base is None else base.node
            again = tail is not None and tail.kind == "open" and tail.base == told["base"]
            node = self.opened(tail.node if again and tail is not None else start, told["attempt"])
        self.name(told["trajectory"], node)
        self.tail = Recorded(uuid, index, told["kind"], told["step"], told.get("location", ""), node, told["writer"], told["base"])
        self.entries[uuid, index] = self.tail
        self.by.append((who, self.tail))

    def _withdrawn(self, uuid: str, index: int, who: str, before: Values) -> None:
        if self.went_back and uuid == self.log and self.tail is not None and index > self.tail.index:
            return
        gone = self.entries.get((uuid, index))
        if gone is None or self.tail is None:
            self.blame("ORDER", f"{who} withdraws #{index} of another log")
            return
        if index == self.tail.index:
            self.blame("FEWER", f"{who} withdraws the tail #{index}")
        if f"/ftckpt/v1/{self.job}/pins/{uuid}/{index:012d}" in before:
            self.blame("FEWER", f"{who} withdraws #{index}, which is pinned")
        self.standing.discard(gone.location)
        self.withdrawn += 1
        if gone.kind == "generation" and self.payload(gone.location)[0] is not None:
            left = self.loadable()
            if left < self.keep:
                self.blame("FEWER", f"{who} withdraws #{index}, and {left} are left of {self.keep}")

    def loadable(self) -> int:
        """Whole generations that the newest state came from."""
        line = set(self.line(self.tail.node)) if self.tail is not None else set()
        return len(
            {r.location for r in self.listed() if r.kind == "generation" and r.node in line and self.payload(r.location)[0] is not None}
        )

    # ------------------------------------------------------------ a backup
    def restored(self) -> None:
        """The server's values were replaced by older ones."""
        uuid, self.went_back = self.log, True
        tail = int(self.server.values[f"/ftckpt/v1/{self.job}/tail"][0])
        self.tail = self.entries.get((uuid, tail))
        for key in [k for k in self.entries if k[0] == uuid and k[1] > tail]:
            del self.entries[key]

    # ------------------------------------------------------------ at the end
    def ended(self) -> None:
        """What must hold when all is quiet."""
        listed = self.listed()
        for r in listed:
            if r.kind == "generation" and self.payload(r.location)[0] is None and r.location in self.standing:
                self.blame("WHOLE", f"#{r.index} is listed and not whole: {self.payload(r.location)[1]}")
        missing = self.standing - {r.location for r in listed}
        if missing:
            self.blame("LOST", f"acknowledged, never withdrawn, and not listed: {sorted(missing)}")
        if self.tail is not None:
            for who in {who for at in self.line(self.tail.node) for who, _ in self.nodes[at].batches}:
                numbers = self.drawn(self.tail.node, who)
                if numbers != list(range(1, len(numbers) + 1)):
                    self.blame("ONCE", f"draws of {who} in the newest generation: {numbers}")

    def rubbish(self) -> list[str]:
        """Directories with bytes of states that no entry lists, and rests of removals and writings."""
        base = f"{self.job}/generations/"
        listed = {r.location for r in self.listed()}
        paths = [p for p in self.disk.files if p.startswith(base)]
        held = {p[len(base) :].split("/")[0] for p in paths if ".safetensors" in p}
        return sorted(held - listed) + sorted(p for p in paths if "/.tmp-" in p or "/.trash-" in p)
