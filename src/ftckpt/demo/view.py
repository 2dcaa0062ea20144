"""What the demo shows while it runs (rich): replicas, loss, writer, generations. Changes nothing."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ftckpt.demo.scenario import Scenario

_BARS = "▁▂▃▄▅▆▇█"


class View:
    """Draws the scenario's state; on a terminal as a live picture, elsewhere as a line whenever the act changes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.scenario: Scenario | None = None
        self._live: Live | None = None
        self._began = time.monotonic()
        self._act = ""
        self._shown = 0.0

    def tick(self, act: str) -> None:
        """Called a few times per second with what goes on."""
        changed, self._act = act != self._act, act
        if not self.console.is_terminal:
            if changed:
                self.console.print(f"[{time.monotonic() - self._began:6.1f} s] {act}")
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=5, transient=False)
            self._live.start()
        self._live.update(self.picture())

    def close(self) -> None:
        """Leave the last picture on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def picture(self) -> RenderableType:
        """The picture of this moment."""
        s = self.scenario
        if s is None:
            return Text("")
        table = Table(expand=True, box=None, pad_edge=False)
        for column in ("replica", "step", "loss", "last losses", "state", "trajectory"):
            table.add_column(column)
        now = time.time()
        for r in range(s.plan.replicas):
            line = s.history.last(r)
            group = s.groups[r] if r < len(s.groups) else None
            dead = group is None or group.poll() is not None
            if line is None or (dead and line.step < s.goal):
                state = Text("killed" if line else "not started", style="red" if line else "dim")
            elif now - line.time > 5 and not dead:
                state = Text("starting", style="yellow")
            elif line.healed:
                state = Text("healed from a peer", style="yellow")
            else:
                state = Text("trains, writes the checkpoint" if line.writer else "trains", style="green")
            losses = [x.loss for x in s.history.steps(r)[-40:] if x.committed]
            step, loss = (str(line.step), f"{line.loss:.3f}") if line else ("", "")
            table.add_row(f"replica {r}", step, loss, spark(losses), state, line.trajectory[:8] if line else "")
        generations = [e for e in s.entries() if e.kind == "generation"]
        shown = ", ".join(f"#{e.index} step {e.step} by {e.writer}" for e in generations[-4:]) or "none yet"
        seconds = time.monotonic() - self._began
        return Panel(Group(table, Text(f"\ncommitted generations: {shown}")), title=f"{self._act}  ({seconds:.0f} s)", title_align="left")


def spark(values: list[float]) -> str:
    """A row of bars for a list of numbers."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, int((v - low) / span * 8))] for v in values)
