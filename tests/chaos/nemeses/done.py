"""What doing a fault comes to: it was done, or it cannot be done now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from chaos.evidence import Happened
from chaos.nemeses.schedule import Planned
from chaos.workloads.units import Unit

Undo = Callable[[], None]


class Nothing(Exception):
    """This fault cannot be done just now (nobody there to kill, nothing to damage)."""


def did(planned: Planned, units: Sequence[Unit], pids: Sequence[int], **more: Any) -> Happened:
    """A fault that was done now, to these. Raises Nothing if nobody was hit."""
    if not pids:
        raise Nothing(f"{planned.kind}: nobody was there")
    now = time.time()
    until = now + planned.hold if planned.hold else 0.0
    return Happened(kind=planned.kind, time=now, until=until, units=tuple(u.name for u in units), pids=tuple(pids), **more)
