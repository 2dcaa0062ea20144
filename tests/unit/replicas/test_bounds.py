"""When a group of several ranks gives its state up since one rank could not heal."""

from __future__ import annotations

import pytest

from ftckpt.domain.ledger import Entry
from ftckpt.domain.trajectory import genesis
from ftckpt.domain.vote import Act, Quorum
from ftckpt.trainer.replicas.base import Position
from ftckpt.trainer.replicas.bounds import Bounds, Limits

TAIL = Entry(index=0, kind="generation", log="L", step=1, trajectory="0" * 64, prev=-1, base=-1, attempt="a", writer="a")


@pytest.mark.covers("I8", "I11")
@pytest.mark.parametrize(
    ("ranks", "max_step", "blank", "tail", "readable", "act"),
    [
        (2, 0, False, None, True, Act.KEEP),  # the very first step: nothing is lost by trying again, and nobody else is drawn in
        (2, 0, True, None, True, Act.BLANK),  # what was given up stays so
        (2, 0, False, None, False, Act.BLANK),  # the log may have more
        (2, 3, False, None, True, Act.BLANK),  # other ranks may have taken a trained state
        (2, 0, False, TAIL, True, Act.LOAD),
        (1, 3, False, None, True, Act.KEEP),
    ],
)
def test_a_failed_heal_gives_up_only_what_another_rank_may_have_replaced(
    ranks: int, max_step: int, blank: bool, tail: Entry | None, readable: bool, act: Act
) -> None:
    quorum = Quorum(first=True, blank=blank, healed=False, heal_failed=True, max_step=max_step, alone=False)
    stance = Bounds(Limits(), ranks).stance(tail, readable, Position(trajectory=genesis("job")), quorum)
    assert (stance.go, stance.act) == (False, act)
