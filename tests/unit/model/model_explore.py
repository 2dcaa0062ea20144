"""Walks all worlds within bounds, breadth first, up to renaming of attempts; keeps the shortest way to each problem."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from model_check import problems
from model_world import Budget, Event, Live, Rec, Rules, Save, World, put, start, step_of, successors


class Walk(NamedTuple):
    """What a walk found: how many worlds, whether these are all, and for each kind of problem the way to it."""

    worlds: int
    whole: bool
    found: dict[str, list[str]]


def canonical(world: World) -> World:
    """The same world with attempts numbered in order of appearance."""
    names: dict[int, int] = {}

    def one(live: Live | None) -> Live | None:
        if live is None:
            return None
        path = None if live.path is None else tuple((names.setdefault(n, len(names) + 1), p) for n, p in live.path)
        return Live(path, tuple((names.setdefault(n, len(names) + 1), g) for n, g in live.truth))

    log = tuple(Rec(one(e.live), e.writer) for e in world.log)
    reps = tuple(
        r._replace(
            live=one(r.live), memory=one(r.memory), save=None if r.save is None else Save(one(r.save.live), r.save.phase, r.save.expect)
        )
        for r in world.reps
    )
    messages = tuple(sorted(((w, one(m), e) for w, m, e in world.messages), key=repr))
    return World(reps, log, messages, len(names) + 1, world.budget)


def walk(rules: Rules, budget: Budget, *, seconds: float = 20.0, live_every: int = 0, wanted: str = "") -> Walk:
    """Explore; ``live_every``: from each so-manieth new world, check that a healthy job goes on; ``wanted``: stop at this problem."""
    first = canonical(start(rules, budget))
    ways: dict[World, tuple[World, str] | None] = {first: None}
    queue, found, until = deque([first]), {}, time.monotonic() + seconds
    while queue and time.monotonic() < until and wanted not in found:
        world = queue.popleft()
        for event, after in successors(rules, world):
            wrong = problems(world, event, after)
            if not wrong:
                key = canonical(after)
                if key in ways:
                    continue
                ways[key] = (world, event.text)
                if live_every and len(ways) % live_every == 0 and not goes_on(rules, key):
                    wrong = ["STUCK: faults have stopped, and no generation is ever committed again"]
                else:
                    queue.append(key)
            for problem in wrong:
                found.setdefault(problem.split(":")[0], [problem, *trace(ways, world), event.text])
    return Walk(len(ways), not queue, found)


def trace(ways: dict[World, tuple[World, str] | None], world: World) -> list[str]:
    texts = []
    while (way := ways[world]) is not None:
        texts.append(way[1])
        world = way[0]
    return texts[::-1]


def goes_on(rules: Rules, world: World) -> bool:
    """Whether, once faults have stopped and everybody is started and told the tail, a new generation gets into the log."""
    before = len(world.log)
    world = world._replace(budget=Budget())
    more = rules._replace(steps=step_limit(world) + 6, split=False)
    for i, rep in enumerate(world.reps):
        if rep.at == "P":
            world = put(world, i, at="U")
    for _ in range(16):
        world = settle(more, world)
        if len(world.log) > before + 1:
            return True
        best = best_step(more, world)
        if best is None:
            return False
        world = best
    return False


def step_limit(world: World) -> int:
    return max([step_of(r.live) for r in world.reps] + [step_of(e.live) for e in world.log])


def settle(rules: Rules, world: World) -> World:
    """Start who is down (from the tail), tell the tail, and let commits run until nothing of that is left to do."""
    wanted = ("starts", "told", "looks", "sends", "the log", "dropped", "exits")
    for _ in range(60):
        options = [
            (e, w) for e, w in successors(rules, world) if e.text.startswith(("step",)) is False and any(x in e.text for x in wanted)
        ]
        options = [(e, w) for e, w in options if "untrained" not in e.text or not world.log]
        if not options:
            return world
        world = canonical(options[-1][1]) if "starts" in options[-1][0].text else canonical(options[0][1])
    return world


def best_step(rules: Rules, world: World) -> World | None:
    steps: list[tuple[Event, World]] = [(e, w) for e, w in successors(rules, world) if e.text.startswith("step")]
    if not steps:
        return None
    saving = [w for e, w in steps if "saves" in e.text]
    committing = [w for e, w in steps if e.committed]
    return canonical((saving or committing or [w for _, w in steps])[0])
