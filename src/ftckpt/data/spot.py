"""A position in one loader, as it is journalled and kept in generations. Values only."""

from __future__ import annotations

from typing import Any

import msgspec

from ftckpt.data.streams import NONE
from ftckpt.errors import DataError

SPOT_VERSION = 3


class Spot(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a loader, as journalled: draws taken of an epoch, and the loader's own state where it has one.

    Args:
        epoch: from 0.
        index: draws taken of that epoch.
        seed: that the epochs of torch's loaders are derived from.
        order: what decides the order of its samples; a loader of another order refuses it.
        shape: of version 1, in the place of ``order``: sizes of batches, numbers of workers.
        state: encoded tree of ``loader.state_dict()``; None where the position is counted.
        began: of a plain iterable whose order may be drawn at random: the random streams as they were when the epoch began.
    """

    version: int = SPOT_VERSION
    epoch: int
    index: int
    seed: int
    order: dict[str, Any] = {}
    shape: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    state: Any = None
    began: msgspec.Raw = NONE


def read_spot(data: bytes) -> Spot:
    """A position from its JSON. Raises DataError."""
    try:
        spot = msgspec.json.decode(data, type=Spot)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        if b'"chain"' in data[:40]:
            raise DataError(
                "the journalled position includes loaders of replicas that are gone",
                now="the loader was not moved",
                todo='resume with data="adopt" and loaders=, as when they were taken over',
            ) from e
        raise DataError(f"a journalled position cannot be read: {e}", now="the loader was not moved") from e
    if not 1 <= spot.version <= SPOT_VERSION:
        raise DataError(
            f"a journalled position has version {spot.version}; this release reads 1 to {SPOT_VERSION}", todo="use a newer ftckpt"
        )
    return spot
