"""The demo's report: what was killed when, how long it took to go on, and what was lost. Judged from history and log."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from ftckpt.demo.judge import Verdict, judge
from ftckpt.demo.samples import SampleCount, count_samples
from ftckpt.demo.scenario import Scenario


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything worth telling; durations in seconds."""

    folder: str
    log: str
    killed: tuple[str, ...]
    start: float
    survivors: float
    back: float
    resume: float
    total: float
    choice: str
    generations: tuple[str, ...]
    verdict: Verdict
    samples: SampleCount

    @property
    def good(self) -> bool:
        """Whether every promise held."""
        return self.verdict.good and self.samples.exact

    @classmethod
    def of(cls, s: Scenario, total: float) -> Report:
        """Judge a scenario that has ended."""
        m = s.marks
        entries = s.entries(fresh=True)
        return cls(
            folder=str(s.plan.folder),
            log=s.plan.log or "embedded SQLite",
            killed=tuple(m.victims),
            start=m.first_step - m.started,
            survivors=m.survivors_on - m.replica_killed,
            back=m.replica_back - m.replica_killed,
            resume=m.resumed - m.resume_called,
            total=total,
            choice=m.choice,
            generations=tuple(
                f"#{e.index} step {e.step} {e.location} by {e.writer}, {e.bytes} bytes" for e in entries if e.kind == "generation"
            ),
            verdict=judge(s.history.lines, entries, m.all_killed),
            samples=count_samples(s),
        )


def show(r: Report, console: Console) -> None:
    """Print it; the last line is ``steps lost: N``."""
    v = r.verdict
    table = Table(title="what happened", title_justify="left", show_header=False, box=None)
    table.add_row("killed", "\n".join(r.killed))
    table.add_row("start to first step", f"{r.start:.1f} s")
    table.add_row("kill of one: the others' next step", f"{r.survivors:.1f} s")
    table.add_row("kill of one: it takes part again, healed from a peer", f"{r.back:.1f} s")
    table.add_row("kill of all: ftckpt resume to every replica's next step", f"{r.resume:.1f} s")
    table.add_row("newest generation at the kill / resumed from", f"step {v.newest_at_kill} / step {v.resumed_at}")
    table.add_row("parameters as recorded before, bit for bit", "yes" if v.bit_equal else "NO")
    table.add_row("all replicas equal at every step they share", "yes" if v.agree else "NO")
    table.add_row("loss before the kill / after resuming", f"{v.loss_before:.3f} / {v.loss_after:.3f}")
    table.add_row("steps made after that generation and made again", str(v.redone))
    s = r.samples
    table.add_row("samples consumed / repeated / skipped", f"{s.consumed} / {s.repeated} / {s.skipped} (audit of {s.steps} steps)")
    table.add_row("all of it", f"{r.total:.0f} s; kept in {r.folder}")
    console.print(table)
    console.print("generations:")
    for line in r.generations:
        console.print(f"  {line}", highlight=False)
    console.print(f"steps lost: {v.steps_lost}", highlight=False)
