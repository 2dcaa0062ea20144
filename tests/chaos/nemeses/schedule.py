"""Which faults come when: drawn from a seed alone, so that the seed shows the same run again. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

Needs = Literal["group", "peers", "etcd", "etcd3", "network", "proxies", "small-disk"]
POINTS = ("capture", "handed-over", "shard-fsync", "rename", "manifest", "commit-sent", "commit-answered", "tail-seen")
PEER_POINTS = ("heal-received", "heal-applied", "vote")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault.

    Args:
        needs: what the job must have, all of it: "group" (a torchrun launcher), "peers" (a lighthouse), "etcd", "etcd3" (three members),
            "network" (namespaces), "proxies" (an etcd, and no network), "small-disk".
        hold: (least, most) seconds until it is undone; (0, 0) for faults that need no undoing.
        weight: how early in a round it tends to come.
        willing: seconds that it waits until it can be done.
    """

    name: str
    needs: tuple[Needs, ...] = ()
    hold: tuple[float, float] = (0.0, 0.0)
    weight: float = 1.0
    willing: float = 20.0


KINDS: dict[str, Kind] = {
    k.name: k
    for k in (
        Kind(name="kill-trainer", weight=2),
        Kind(name="stop-trainer", hold=(1, 15)),
        Kind(name="term-trainer"),
        Kind(name="kill-launcher", needs=("group",)),
        Kind(name="term-launcher", needs=("group",)),
        Kind(name="kill-trainers"),  # all trainers and launchers of one unit; its agents live
        Kind(name="kill-machine", weight=2),  # a unit with its agents
        Kind(name="kill-all", weight=2),  # everything, agents and lighthouse too
        Kind(name="kill-all-trainers"),  # everything but the agents
        Kind(name="kill-agent"),
        Kind(name="stop-agent", hold=(1, 10)),
        Kind(name="late-agent", hold=(2, 14)),  # agents are stopped, the trainers die and come back, and only then do the agents go on
        Kind(name="zombie", hold=(3, 20)),  # a unit is stopped and replaced on another machine, and then goes on
        Kind(name="kill-lighthouse", needs=("peers",), hold=(0.5, 8)),
        Kind(name="stop-lighthouse", needs=("peers",), hold=(1, 8)),
        Kind(name="pause-etcd", needs=("etcd",), hold=(1, 25)),
        Kind(name="kill-etcd", needs=("etcd",), hold=(0.5, 15)),
        Kind(name="compact-etcd", needs=("etcd",), weight=0.5),
        Kind(name="damage-newest"),  # a byte of the newest generation flips, then everything dies
        Kind(name="damage-then-one", needs=("peers",), weight=0.5),  # the same, then one replica dies: its peers have the state
        Kind(name="truncate-newest", weight=0.5),  # the newest generation loses its end, then everything dies
        Kind(name="disk-full", needs=("small-disk",), hold=(1, 10)),
        Kind(name="power-loss", needs=("small-disk",)),  # everything dies, and so does what the root's file system had not made durable
        Kind(name="disk-eio", hold=(1, 8)),  # a share of the store's system calls fails, on all replicas
        Kind(name="disk-slow", hold=(2, 12)),
        Kind(name="disk-readonly", hold=(1, 8)),
        Kind(name="clock-jump", hold=(2, 15)),  # a unit's wall clock jumps by seconds, hours or days, and back
        Kind(name="neighbour", hold=(8, 30), weight=0.5),  # another job on the same log and root works a while, and is killed
        Kind(
            name="two-lighthouses", needs=("peers",), hold=(4, 12), weight=0.5
        ),  # a unit is started with another lighthouse, and comes back
        Kind(name="partition-peers", needs=("network", "peers"), hold=(2, 20)),  # a unit from all others; lighthouse and log are reached
        Kind(name="partition-lighthouse", needs=("network", "peers"), hold=(2, 12), weight=0.5),
        Kind(name="partition-etcd", needs=("etcd",), hold=(2, 20)),
        Kind(
            name="lost-answers", needs=("proxies",), hold=(1, 6)
        ),  # a unit's requests reach etcd, the answers are lost and the connections cut
        Kind(name="isolate", needs=("network", "etcd"), hold=(2, 15)),  # a unit from everything
        Kind(name="slow-link", needs=("network",), hold=(3, 12)),
        Kind(name="lossy-link", needs=("network",), hold=(3, 12)),
        Kind(name="kill-etcd-leader", needs=("etcd3",), hold=(1, 10)),
        Kind(name="pause-etcd-member", needs=("etcd3",), hold=(1, 12)),
        Kind(name="lose-quorum", needs=("etcd3",), hold=(2, 15)),
        Kind(
            name="fill-etcd", needs=("etcd",), hold=(2, 10), weight=0.5
        ),  # its quota is reached; later space is made and the alarm disarmed
        Kind(
            name="restore-etcd", needs=("etcd",), hold=(6, 12), weight=0.3, willing=60
        ),  # from a backup: the log regresses, and is rebuilt
        *(Kind(name=f"kill-at-{point}", weight=0.4, willing=60) for point in POINTS),
        *(Kind(name=f"kill-at-{point}", needs=("peers",), weight=0.4, willing=150) for point in PEER_POINTS),
    )
}


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to come.

    Args:
        wait: "healthy" (``gap`` seconds after the job has recovered) or "moment" (``gap`` seconds after the fault before, whatever
            goes on).
        target, rank: chosen modulo what there is.
        hold: seconds until it is undone.
        dice: for whatever else the fault draws.
    """

    kind: str
    wait: Literal["healthy", "moment"]
    gap: float
    target: int
    rank: int
    hold: float
    dice: int


def possible(needs: Sequence[str], only: Sequence[str] = ()) -> list[str]:
    """Kinds that can be done to a job which has ``needs``; ``only`` narrows them.

    Raises:
        ValueError: a name in ``only`` is none, or cannot be done.
    """
    able = [k.name for k in KINDS.values() if set(k.needs) <= set(needs)]
    wrong = [name for name in only if name not in able]
    if wrong:
        raise ValueError(f"cannot be done to this job: {', '.join(wrong)}; possible are {', '.join(able)}")
    return [name for name in able if not only or name in only]


def schedule(seed: int, kinds: Sequence[str], *, overlap: float = 0.25, span: float = 20.0) -> Iterator[Planned]:
    """Faults without end, in rounds: each kind comes once, in an order that the seed draws, before any comes again.

    Args:
        kinds: names to draw from.
        overlap: share of faults that do not wait until the job has recovered.
        span: seconds within which those come.
    """
    rng = random.Random(f"{seed} {' '.join(sorted(kinds))}")
    names = sorted(kinds)
    while True:
        # without replacement, by weight: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006)
        for name in sorted(names, key=lambda n: rng.random() ** (1 / KINDS[n].weight), reverse=True):
            yield _planned(KINDS[name], rng, overlap, span)


def _planned(kind: Kind, rng: random.Random, overlap: float, span: float) -> Planned:
    now = rng.random() < overlap
    return Planned(
        kind=kind.name,
        wait="moment" if now else "healthy",
        gap=round(rng.uniform(0.05, span if now else 4.0), 3),
        target=rng.randrange(1 << 16),
        rank=rng.randrange(1 << 16),
        hold=round(rng.uniform(*kind.hold), 3),
        dice=rng.randrange(1 << 32),
    )
