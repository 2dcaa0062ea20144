"""What must hold in every world, said in terms of what the weights really are; knows none of the project's rules."""

from __future__ import annotations

from model_world import NAMES, Event, Truth, World


def prefix(a: Truth, b: Truth) -> bool:
    return b[: len(a)] == a


def problems(before: World, event: Event, after: World) -> list[str]:
    """Everything that is wrong with one thing that happened; the word before the colon is its kind."""
    found = []
    if len({truth for _, truth in event.committed}) > 1:
        found.append("MIXED: unequal states committed a step together")
    if any(truth == () for _, truth in event.committed) and before.log:
        found.append("ZERO: a step was committed from nothing though the log has entries")
    for a, b in zip(after.log, after.log[1:], strict=False):
        if not prefix(a.live.truth, b.live.truth) or len(b.live.truth) <= len(a.live.truth):
            found.append("CHAIN: an entry does not descend from the one before it")
    states = {r.live for r in after.reps if r.at != "D" and r.live.path is not None} | {e.live for e in after.log}
    if len({s.path for s in states}) != len(states) or len({s.truth for s in states}) != len(states):
        found.append("TWIN: trajectories are equal and states are not, or the other way round")
    for state in states:
        for i, name in enumerate(NAMES[: len(after.reps)]):
            drawn = [ordinal for _, grad in state.truth for replica, ordinal in grad if replica == i]
            if drawn != list(range(1, len(drawn) + 1)):
                found.append(f"ONCE: {name}'s batches in a state are {drawn}")
    if event.denied is not None and any(e.live == event.denied[1] and e.writer == event.denied[0] for e in after.log):
        found.append("DENIED: a writer was told that its generation is not in the log, and it is")
    return found
