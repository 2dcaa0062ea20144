"""What Linux tells about a running process, which opens and closes meanwhile."""

from __future__ import annotations

import contextlib
import os


def open_files(pid: int | str = "self") -> dict[str, str]:
    """What each descriptor of a process shows, by the descriptor's own path; what is closed meanwhile is left out."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[path] = os.readlink(path := f"/proc/{pid}/fd/{fd}")
    return found
