"""Counts samples along the demo's final trajectory, from the trainers' own lines. Judges nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from ftckpt.demo.history import Line
from ftckpt.demo.scenario import Scenario


class SampleCount(msgspec.Struct, frozen=True, kw_only=True):
    """Samples in the final state: consumed in all, consumed more than once, passed over."""

    consumed: int
    repeated: int
    skipped: int


def count_samples(scenario: Scenario) -> SampleCount:
    """Count for a scenario that has ended; the order of each replica's loader is found by drawing from it anew."""
    order = {r: draw_order(r, scenario.plan.replicas, 1 + max((len(s) for s in scenario.history.lines.values()), default=0)) for r in scenario.history.lines}
    return compare(scenario.history.lines, order)


def compare(lines: Mapping[int, Sequence[Line]], order: Mapping[int, Sequence[int]]) -> SampleCount:
    """Compare what was consumed along the newest state's trajectory with the first that many ids of each loader's order.

    Args:
        lines: history of each replica.
        order: for each replica its loader's sample ids, in order.
    """
    chain = final_chain(lines)
    consumed = repeated = skipped = 0
    for replica, seq in lines.items():
        by_state = {x.trajectory: x.ids for x in seq if x.kind == "step" and x.committed and x.contributed}
        ids = [i for h in chain for i in by_state.get(h, ())]
        want = Counter(list(order[replica])[: len(ids)])
        have = Counter(ids)
        consumed += len(ids)
        repeated += sum((have - want).values())
        skipped += sum((want - have).values())
    return SampleCount(consumed=consumed, repeated=repeated, skipped=skipped)


def final_chain(lines: Mapping[int, Sequence[Line]]) -> list[str]:
    """Trajectory hashes from the first committed step to the newest state, oldest first."""
    parent: dict[str, str] = {}
    newest: Line | None = None
    for seq in lines.values():
        before = ""
        for x in seq:
            if x.kind == "step" and x.committed and not x.healed and before and x.trajectory != before:
                parent.setdefault(x.trajectory, before)
            before = x.trajectory
            if newest is None or (x.step, x.time) >= (newest.step, newest.time):
                newest = x
    chain: list[str] = []
    at = newest.trajectory if newest else ""
    while at and at not in chain:
        chain.append(at)
        at = parent.get(at, "")
    return chain[::-1]


def draw_order(replica: int, replicas: int, batches: int) -> list[int]:
    """The first ``batches`` batches' sample ids of a replica, from the example's own data set and loader."""
    from ftckpt.examples.train_gpt import make_loader

    ids: list[int] = []
    loader = make_loader(replica, replicas)
    while batches > 0:
        for batch, _, _ in loader:
            ids += batch.tolist()
            batches -= 1
            if batches == 0:
                break
    return ids
