"""How much memory this process may still take: the kernel's estimate and every control group above it. Reads only."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ftckpt.errors import ConfigError

_UNLIMITED = 1 << 60


class Budget(msgspec.Struct, frozen=True):
    """Bytes still to be had, and what sets the bound."""

    available: int
    bound: str


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Budget:
    """The smallest of MemAvailable and, for each control group from this process's up, limit minus unreclaimable use."""
    found = [Budget(_mem_available(proc), "MemAvailable")]
    found += _cgroup_budgets(proc, cgroup)
    return min(found, key=lambda b: b.available)


def check_budget(size: int, *, available: Budget | None = None) -> None:
    """Refuse an arena that memory does not suffice for.

    Args:
        size: bytes wanted.

    Raises:
        ConfigError: with both numbers and what sets the bound.
    """
    have = available_memory() if available is None else available
    if size > have.available:
        raise ConfigError(
            f"captured state needs {size:,} bytes of memory, {have.available:,} are available ({have.bound})",
            now="no memory was taken",
            todo="use one capture buffer instead of two, or give the job more memory",
        )


def _mem_available(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return _UNLIMITED
    return _UNLIMITED


def _cgroup_budgets(proc: Path, root: Path) -> list[Budget]:
    """Control groups of both versions, from the process's own up to the root of what is visible."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for directory in (group, *group.parents):
            budget = _one_cgroup(directory, *names)
            if budget is not None:
                found.append(budget)
            if directory == top:
                break
    return found


def _one_cgroup(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> Budget | None:
    try:
        limit = int((directory / limit_file).read_text())
        used = int((directory / usage_file).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # "max", or not a group with a limit
    if limit >= _UNLIMITED:
        return None
    return Budget(max(0, limit - used + int(stat.get(reclaimable, 0))), str(directory / limit_file))
