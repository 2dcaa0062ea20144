"""Reads the lines that the demo's trainers write, as they come. Judges nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trainer's history.

    Args:
        kind: "resumed" (once per process, after restoring) or "step" (one attempt at a step).
        time: seconds since the epoch.
        step, trajectory, params: the state after it; ``params`` is a digest of all parameters.
        ids: sample ids of the batch that the attempt used.
    """

    kind: str
    time: float
    pid: int
    replica: int
    step: int
    trajectory: str
    params: str
    loss: float = 0.0
    committed: bool = False
    contributed: bool = False
    healed: bool = False
    writer: bool = False
    members: int = 0
    ids: tuple[int, ...] = ()
    source: str = ""
    location: str = ""


class History:
    """All replicas' lines so far; ``poll`` reads what was added."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.folder = folder
        self.lines: dict[int, list[Line]] = {r: [] for r in range(replicas)}
        self._offsets = dict.fromkeys(range(replicas), 0)

    def poll(self) -> list[Line]:
        """Lines added since the last call, of all replicas."""
        new: list[Line] = []
        for replica in self.lines:
            path = self.folder / f"replica{replica}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as f:
                f.seek(self._offsets[replica])
                for raw in f:
                    if not raw.endswith(b"\n"):
                        break
                    self._offsets[replica] += len(raw)
                    try:
                        line = msgspec.json.decode(raw, type=Line)
                    except msgspec.DecodeError:
                        continue  # a line torn by SIGKILL, completed by the next process
                    self.lines[replica].append(line)
                    new.append(line)
        return new

    def steps(self, replica: int) -> list[Line]:
        """Attempts at steps of one replica."""
        return [x for x in self.lines[replica] if x.kind == "step"]

    def last(self, replica: int) -> Line | None:
        """Newest line of one replica."""
        return self.lines[replica][-1] if self.lines[replica] else None

    @property
    def top(self) -> int:
        """Highest step that any replica has reached."""
        return max((x[-1].step for x in self.lines.values() if x), default=0)
