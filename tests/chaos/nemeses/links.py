"""Cuts, slows and disturbs a unit's link to others. Judges nothing."""

from __future__ import annotations

from chaos.evidence import Happened
from chaos.nemeses.done import Nothing, Undo, did
from chaos.nemeses.schedule import Planned
from chaos.workloads.jobs import Job
from chaos.workloads.network import ETCD, HUB
from chaos.workloads.units import Unit

LOSS = (0.01, 0.05, 0.2)
KBIT = (20_000, 2_000, 500)


def link(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    """Do one of the faults of a link, both ways; who is cut off is not told, its packets vanish."""
    net, number = job.network, job.units.index(unit)
    if net is None:
        return _proxy(job, planned, unit)
    peers = [net.unit(i) for i in range(net.units) if i != number]
    members = [net.address(ETCD + i) for i in range(3)]
    kind, text = planned.kind, ""
    if kind == "slow-link":
        kbit = KBIT[planned.dice % len(KBIT)]
        net.apply(number, kbit=kbit)
        text = f"{kbit} kbit/s"
    elif kind == "lossy-link":
        loss = LOSS[planned.dice % len(LOSS)]
        net.apply(number, loss=loss)
        text = f"{loss:.0%} lost"
    else:
        cut = {"partition-peers": peers, "partition-lighthouse": [net.address(HUB)], "partition-etcd": members}
        net.apply(number, cut=cut.get(kind, [*peers, *members, net.address(HUB)]))
    return did(planned, [unit], [p.pid for p in unit.processes()], text=text), lambda: net.mend(number)


def _proxy(job: Job, planned: Planned, unit: Unit) -> tuple[Happened, Undo]:
    """Cut a unit from the log, or lose what the log answers, where there is only a proxy between them."""
    if not job.proxies:
        raise Nothing("this job has no network of its own, and no proxies")
    proxies = job.proxies[job.units.index(unit)]
    for proxy in proxies:
        if planned.kind == "lost-answers":
            proxy.swallow_answers(0.1)
        else:
            proxy.cut()

    def undo() -> None:
        for proxy in proxies:
            proxy.mend()

    return did(planned, [unit], [p.pid for p in unit.processes()]), undo
