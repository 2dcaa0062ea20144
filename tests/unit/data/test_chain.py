"""A replica that goes on with the loaders of others: every batch of each once per epoch, from any position on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.chain import Chain, Link, held, with_orphans
from ftckpt.data.reel import END, Reel
from ftckpt.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*")  # torchdata asks torch for it
SHARES = {"": range(6), "b": range(100, 110), "c": range(200, 204)}


def loader(name: str) -> StatefulDataLoader[int]:
    seed = torch.Generator().manual_seed(len(SHARES[name]))
    return StatefulDataLoader(list(SHARES[name]), batch_size=2, shuffle=True, generator=seed)


def counted(name: str) -> Iterable[list[int]]:
    share = list(SHARES[name])
    return [share[i : i + 2] for i in range(0, len(share), 2)]


def spot(name: str, draws: int, make: Any) -> tuple[bytes, list[tuple[int, int]]]:
    """Where a loader is after so many draws, and what was drawn."""
    reel, seen = Reel(make(name), None), []
    for _ in range(draws):
        batch = reel.draw()
        seen += [(reel.epoch, int(i)) for i in batch]
    return reel.snapshot(), seen


@pytest.mark.covers("F47", "I12")
@settings(max_examples=40, deadline=None)
@given(
    own=st.integers(0, 7),
    others=st.tuples(st.integers(0, 8), st.integers(0, 5)),
    late=st.tuples(st.integers(0, 3), st.integers(0, 2)),
    breaks=st.lists(st.integers(0, 40), max_size=4),
    stateful=st.booleans(),
)
def test_each_sample_of_every_loader_once_per_epoch(
    own: int, others: tuple[int, int], late: tuple[int, int], breaks: list[int], stateful: bool
) -> None:
    make = loader if stateful else counted
    at, seen = spot("", own, make)
    links = []
    for name, draws, skip in zip("bc", others, late, strict=True):
        there, drawn = spot(name, draws, make)
        seen += drawn + spot(name, draws + skip, make)[1][len(drawn) :]
        links.append(Link(replica=name, spot=msgspec.Raw(there), skip=skip))
    chain = Chain(make(""), make, 4)
    chain.restore(with_orphans(at, 0, links))
    for count in range(200):
        if count in breaks:  # a new process goes on from the journal
            chain, data = Chain(make(""), make, 4), chain.snapshot()
            chain.restore(data)
        batch = chain.draw()
        if batch is END:
            break
        seen += [(chain.epoch, int(i)) for i in batch]
    assert Counter(seen) == Counter((e, i) for e in range(4) for share in SHARES.values() for i in share)


@pytest.mark.covers("F47")
def test_chain_within_a_chain_and_who_is_in_it() -> None:
    there = Chain(counted("b"), counted, None)
    there.restore(with_orphans(None, 0, [Link(replica="c")]))
    drawn = [there.draw()]
    both = with_orphans(None, 0, [Link(replica="b", spot=msgspec.Raw(there.snapshot()))])
    assert held(both) == ("b", "c")
    chain = Chain(counted(""), counted, 1)
    chain.restore(both)
    while (batch := chain.draw()) is not END:
        drawn.append(batch)
    assert sorted(i for batch in drawn for i in batch) == sorted(i for share in SHARES.values() for i in share)


def test_peek_moves_nothing() -> None:
    chain = Chain(loader(""), loader, 1)
    chain.restore(with_orphans(None, 0, [Link(replica="b")]))
    for _ in range(8):
        peeked = chain.peek()
        assert torch.equal(peeked, chain.draw()) or int(peeked[0]) < 200
    assert chain.draw() is END
    assert chain.peek() is END


@pytest.mark.covers("F47")
def test_position_with_others_is_refused_where_they_cannot_be_made() -> None:
    with pytest.raises(DataError, match="loaders of replicas that are gone"):
        Reel(counted(""), None).restore(with_orphans(None, 0, [Link(replica="b")]))


@pytest.mark.covers("F47")
def test_loader_that_is_not_as_long_as_before_is_an_error() -> None:
    chain = Chain(iter([[1]]), counted, None)
    with pytest.raises(DataError, match="ended after 1 of 2 draws"):
        chain.restore(with_orphans(None, 2, []))
