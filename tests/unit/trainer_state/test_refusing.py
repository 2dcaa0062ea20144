"""A rank that cannot go on where others wait for it: they learn by its name why, at once, and all may go on later."""

from __future__ import annotations

import threading

import pytest
from state_tools import registry
from torch import nn
from torch.distributed import DistNetworkError, HashStore

from ftckpt.errors import DeadlineExceeded, SaveFailed, Unstorable
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.refusing import refuse, unless_refused


def both(*work):
    """What two ranks of a group return or raise, each on a thread of its own."""
    store, found = HashStore(), [None, None]

    def run(rank):
        try:
            found[rank] = work[rank](Group(rank, 2, store, deadline=50.0).open())
        except Exception as e:
            found[rank] = e

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for one that does not come"
    return found


@pytest.mark.covers("I11", "I14", "F62")
def test_a_rank_that_refuses_ends_the_wait_of_the_others_at_that_boundary_and_at_no_later_one():
    def well(group):
        capturer = Capturer(registry(model=nn.Linear(2, 2)), group)
        with pytest.raises(Unstorable, match=r"rank 1 of this group: train/x is a hammer") as refused:
            capturer.prepare("save/1")
        assert refused.value.todo == "store its parts"
        return capturer.prepare("save/2").table

    def refusing(group):
        refuse(group, "save/1", Unstorable("train/x is a hammer", todo="store its parts"))
        return Capturer(registry(model=nn.Linear(2, 2)), group).prepare("save/2").table

    tables = both(well, refusing)
    assert sorted(e.name for table in tables for e in table.tensors) == ["model/bias", "model/weight"], tables


@pytest.mark.covers("I14")
def test_what_users_code_raised_on_one_rank_is_told_as_a_typed_error_on_the_others():
    def well(group):
        group.publish("point", b"")
        group.collect("point", meanwhile=unless_refused(group, "point"))

    def refusing(group):
        refuse(group, "point", ZeroDivisionError("by nothing"))

    error, _ = both(well, refusing)
    assert isinstance(error, SaveFailed)
    assert error.what == "rank 1 of this group: ZeroDivisionError: by nothing"


class Asked:
    """A store that counts what it is asked, and in which nothing comes while somebody waits."""

    def __init__(self, waits):
        self.store, self.waits, self.requests = HashStore(), waits, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)

    def wait(self, keys, timeout):
        self.waits -= 1
        if self.waits < 0:
            raise ZeroDivisionError
        raise DistNetworkError("timeout")


@pytest.mark.covers("I11")
def test_what_a_waiting_rank_asks_of_the_store_does_not_grow_with_its_group():
    def requests(ranks):
        store = Asked(waits=10)
        group = Group(0, ranks, store, deadline=50.0)
        group._incarnation = "one"
        with pytest.raises(ZeroDivisionError):
            group.collect("point", meanwhile=unless_refused(group, "point"))
        return store.requests

    assert requests(500) == requests(2) <= 20


@pytest.mark.covers("I14")
def test_who_refused_after_it_had_come_is_passed_over_and_another_one_is_not():
    store = HashStore()
    groups = [Group(rank, 4, store, deadline=0.6) for rank in range(4)]
    for group in groups:
        group._incarnation = "one"
    waits, late, missing, _ = groups
    waits.publish("point", b"")
    late.publish("point", b"")
    refuse(late, "point", Unstorable("no memory is left"))
    with pytest.raises(DeadlineExceeded, match=r"from ranks 2, 3 \(2 in all\)"):
        waits.collect("point", meanwhile=unless_refused(waits, "point"))
    refuse(missing, "point", Unstorable("train/x is a hammer"))
    with pytest.raises(Unstorable, match="rank 2 of this group: train/x is a hammer"):
        waits.collect("point", meanwhile=unless_refused(waits, "point"))
