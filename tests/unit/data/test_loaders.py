"""The registered loader between a loaded state, the journal, and the states of peers: what is known of it, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from ftckpt.data.chain import Link, held
from ftckpt.data.elastic import ElasticLoader
from ftckpt.data.reel import Reel
from ftckpt.data.sampler import ElasticSampler
from ftckpt.errors import AgentError, ConfigError, DataError
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.orphans import DataPolicy, Heritage

ME = 7


def share(name: str) -> Iterable[list[int]]:
    first = {"": 0, "gone": 100}[name]
    return [[first + i] for i in range(6)]


class World:
    """A replica, its agent's journal, and a loader restored from a cursor of 2 draws."""

    def __init__(self, *, word: Any = "adopt", journal: dict[int, bytes] | None = None, links: tuple[Link, ...] | None = None) -> None:
        self.journal = journal if journal is not None else {}
        self.rank: int | None = 0
        self.dies_at = -1  # draw at which the agent dies
        self.notes: list[str] = []
        self.replica: Any = SimpleNamespace(
            member=ME, counts={ME: 2}, samples=0, step=2, votes=0, blank=False, heals_first=False, trajectory=SimpleNamespace(h="loaded"),
            members=lambda: (self.rank, 2), contribute=lambda draws, samples: None,
        )  # fmt: skip
        client = SimpleNamespace(
            draw=self._draw, recall=self._recall, note=lambda kind, text: self.notes.append(text),
            config=SimpleNamespace(group_world_size=1, rank=0), alive=True,
        )  # fmt: skip
        self.client = client
        session: Any = SimpleNamespace(client=client, settings=SimpleNamespace(deadlines=SimpleNamespace(agent_send_s=1.0)))
        self.loaders = Loaders()
        self.loaders.add("loader", share(""))
        self.loaders.restore(2, self.spot(2))
        links = (Link(replica="gone", skip=4),) if links is None else links
        self.loaders.settle(DataPolicy(word=word, replicas=("me",), make=share), Heritage(count=2, links=links), lost=False)
        self.feed = self.loaders.feed("loader", session, self.replica)

    @staticmethod
    def spot(draws: int) -> bytes:
        reel = Reel(share(""), None)
        for _ in range(draws):
            reel.draw()
        return reel.snapshot()

    def _draw(self, ordinal: int, state: bytes) -> None:
        if self.dies_at == ordinal:
            self.client.alive = False
        if not self.client.alive:
            raise AgentError("the agent is lost")
        self.journal = {o: s for o, s in self.journal.items() if o < ordinal} | {ordinal: state}

    def _recall(self, count: int, timeout: float) -> tuple[int, bytes] | None:
        best = max((o for o in self.journal if o <= count), default=None)
        return None if best is None else (best, self.journal[best])

    def step(self, committed: bool = True) -> int:
        batch = next(self.feed)
        self.replica.votes += 1
        if committed:
            self.moved(self.replica.counts[ME] + 1)
        return int(batch[0])

    def moved(self, count: int) -> None:
        """The state has become another one."""
        self.replica.counts = {ME: count}
        self.replica.step += 1
        self.replica.trajectory = SimpleNamespace(h=f"step {self.replica.step}")


@pytest.mark.covers("F47", "I12")
def test_data_are_taken_over_at_the_loaded_state_and_the_journal_says_so() -> None:
    w = World()
    assert [w.step() for _ in range(6)] == [2, 3, 4, 5, 104, 105]
    assert {o: held(s) for o, s in w.journal.items()} == dict.fromkeys(range(2, 9), ("gone",))
    assert held(w.loaders.position(8)[1] or b"") == ("gone",)  # so that the next cursor has it


@pytest.mark.covers("F47", "I4")
def test_nothing_is_touched_before_it_is_known_which_state_goes_on() -> None:
    w = World(journal={o: World.spot(o) for o in range(3, 6)})
    before, w.rank = dict(w.journal), None  # the quorum says: heal
    w.step(committed=False)
    assert w.journal == before
    w.moved(5)  # a peer's state, in which this replica had gone on without taking anything over
    w.rank = 0
    assert [w.step() for _ in range(2)] == [5, 0]
    assert held(w.journal[7]) == ()


@pytest.mark.covers("F47", "I12")
def test_whether_data_were_taken_over_is_not_guessed() -> None:
    w = World(journal={})
    w.rank = None
    w.step(committed=False)
    w.moved(5)  # a peer's state, and no journal that tells what the draws after the cursor were
    w.rank = 0
    with pytest.raises(DataError, match="whether the data of gone were taken over after draw 2"):
        w.step()


@pytest.mark.covers("F47")
def test_loader_begins_anew_only_where_its_position_is_lost() -> None:
    w = World(word="restart", links=())
    assert w.step() == 2
    assert w.notes == []
    w = World(word="restart", links=())
    w.loaders.settle(DataPolicy(word="restart"), Heritage(count=2), lost=True)  # the group had other ranks
    assert [w.step() for _ in range(2)] == [0, 1]
    assert len(w.notes) == 1


@pytest.mark.covers("F49")
def test_states_drawn_before_a_heal_are_still_known_after_it() -> None:
    w = World(links=())
    for _ in range(3):
        w.step()
    w.moved(4)
    assert w.loaders.position(4)[0] == 4
    assert w.step() == 4
    assert w.loaders.position(9)[0] == 5  # draws that are done again replace those of before


@pytest.mark.covers("I12", "I14")
def test_draws_that_a_dying_agent_did_not_take_go_to_the_next_one() -> None:
    w = World(links=())
    w.step()
    w.dies_at = 4
    assert [w.step() for _ in range(2)] == [3, 4]  # the loop goes on; the trainer hears of the agent at its next step()
    assert max(w.journal) == 3
    w.client.alive, w.dies_at = True, -1
    w.step()
    assert sorted(w.journal) == [3, 4, 5, 6]


@pytest.mark.covers("I14")
def test_an_agent_that_lives_and_takes_no_draw_is_an_error() -> None:
    w = World(links=())
    w.client.draw = lambda ordinal, state: (_ for _ in ()).throw(AgentError("it did not take it in time"))
    with pytest.raises(AgentError, match="in time"):
        w.step()


def test_shared_order_takes_no_options_of_loaders() -> None:
    loaders = Loaders()
    loaders.add("loader", ElasticLoader(range(4), ElasticSampler(4, batch_size=2)))
    session: Any = SimpleNamespace(client=SimpleNamespace(config=SimpleNamespace(group_world_size=1, rank=0)))
    with pytest.raises(ConfigError, match="takes no epochs, ids"):
        loaders.feed("loader", session, SimpleNamespace(), epochs=3, ids=list)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="already"):
        loaders.add("more", ElasticLoader(range(4), ElasticSampler(4, batch_size=2)))
