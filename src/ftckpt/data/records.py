"""What the audit's records say: values only. Fields are added at their ends, so that each release reads those of the ones before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

SHARED = "*"


class Ids(Sequence[int]):
    """Sample ids as they are held by the millions: packed, and equal to a tuple of them.

    Attributes:
        packed: native signed 64-bit numbers.
    """

    __slots__ = ("packed",)

    def __init__(self, ids: Iterable[int]) -> None:
        self.packed = array("q", ids).tobytes()

    def __len__(self) -> int:
        return len(self.packed) // 8

    def __getitem__(self, at: Any) -> Any:
        return tuple(self)[at]

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.packed).cast("q"))

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, Ids) else tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """What an epoch of a loader is meant to hand out.

    Args:
        loader: replica whose loader it is (taken over from one that is gone); empty: the rank's own; ``SHARED``: the shared order.
        part: which part of it; ranks with the same one take the same samples. Negative: the rank's own.
        of: samples of an epoch of the shared order, draws of an epoch of another; None: not known.
        left: how many samples an epoch leaves out on purpose (``drop_last``, a sampler shorter than its data set); None: any number.
        doubled: how many an epoch repeats on purpose (a sampler longer than its data set, or one with replacement).
        samples: how many an epoch hands out, those that it repeats included; None: not known.
    """

    loader: str = ""
    part: int = -1
    of: int | None = None
    left: int | None = 0
    doubled: int = 0
    samples: int | None = None


class Use(msgspec.Struct, frozen=True, array_like=True, tag="use/1"):
    """Samples that one rank was about to contribute.

    Args:
        before: hash of the trajectory that the step starts from.
        nonce: the attempt's number in the vote.
        member: the replica's number; ``rank``: in its group.
        ordinal: of the draw; 0 without ids: the rank contributed no data.
        epoch: of the samples.
        ids: sample ids.
        plan: of that epoch; None: not told.
        records: how many records the rank writes of this attempt; 0: not told.
        ranks: of the group, each of which writes some; 0: not told.
        left: samples of the epoch that the step passes over on purpose.
    """

    before: str
    nonce: int
    member: int
    rank: int
    ordinal: int
    epoch: int
    ids: Sequence[int]
    plan: Plan | None = None
    records: int = 0
    ranks: int = 0
    left: tuple[int, ...] = ()


class Made(msgspec.Struct, frozen=True, array_like=True, tag="made/1"):
    """One committed step, as somebody who committed it saw it.

    Args:
        before, after: hashes of the trajectory.
        step: reached.
        parts: (member, nonce) of each whose samples are in it; none for an ``open`` or an empty step.
    """

    before: str
    after: str
    step: int
    parts: tuple[tuple[int, int], ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end/1"):
    """A loader has said that it has no more.

    Args:
        at: hash of the trajectory of the state then.
        member, rank: whose feed it was.
        ordinal: the last draw.
        epoch: the last one; it and those before it are over.
        loader, part: as in ``Plan``.
        left: samples that are left out on purpose, as (epoch, ids).
    """

    at: str
    member: int
    rank: int
    ordinal: int
    epoch: int
    loader: str
    part: int
    left: tuple[tuple[int, tuple[int, ...]], ...] = ()


class Fault(msgspec.Struct, frozen=True):
    """Bytes of a file that are no records.

    Args:
        file: its name.
        at: where they begin; ``size``: how many.
        torn: they are the end of the file: who wrote it died, or is writing now.
    """

    file: str
    at: int
    size: int
    torn: bool


class Records(msgspec.Struct, frozen=True):
    """All that could be read of a job."""

    uses: list[Use] = []
    made: list[Made] = []
    ends: list[End] = []
    faults: list[Fault] = []
