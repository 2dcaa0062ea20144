"""Loaders without a state whose order is drawn at random, from whatever streams, and go on in another process."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.deck import Deck
from ftckpt.data.reel import END, Reel
from ftckpt.errors import ConfigError, DataError
from ftckpt.trainer.inline import encode_value
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.rng import capture_rng, restore_rng

N = 20
DATA: Any = list(range(N))
Make = Callable[[], Iterable[Any]]


class ToDevice:
    """The usual wrapper."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            yield batch.to("cpu")


class Shuffled(Sampler[Any]):
    """Batches, or samples one by one, in an order that a function draws."""

    def __init__(self, shuffle: Callable[[list[int]], None], size: int = 0) -> None:
        self.shuffle, self.size = shuffle, size

    def __iter__(self) -> Iterator[Any]:
        order = list(range(N))
        self.shuffle(order)
        return iter([order[i : i + self.size] for i in range(0, N, self.size)] if self.size else order)

    def __len__(self) -> int:
        return N // (self.size or 1)


class Lists:
    """Batches of its own, from one generator, which may be made when it is first needed."""

    def __init__(self, rng: Any = None) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[Any]:
        self.rng = self.rng or random.Random(9)
        order = list(range(N))
        self.rng.shuffle(order)
        return iter(torch.tensor(order).reshape(-1, 2))


class Slots:
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = np.random.RandomState(4)

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.as_tensor(self.rng.permutation(N)).reshape(-1, 2))


class Held:
    """A data set with a generator, from which some other part draws the order."""

    def __init__(self) -> None:
        self.parts = {"streams": [np.random.default_rng(6)]}

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> int:
        return at

    def shuffle(self, order: list[int]) -> None:
        self.parts["streams"][0].shuffle(order)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def held() -> Iterable[Any]:
    data: Any = Held()
    return DataLoader(data, batch_sampler=Shuffled(data.shuffle, 2))


def persistent(**options: Any) -> Make:
    return lambda: ToDevice(DataLoader(DATA, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True, **options))


ORDERS: dict[str, Make] = {
    "wrapped, torch's stream": lambda: ToDevice(DataLoader(DATA, batch_size=2, shuffle=True)),
    "wrapped, generator": lambda: ToDevice(DataLoader(DATA, batch_size=2, shuffle=True, generator=generator())),
    "wrapped twice, generator of a sampler": lambda: ToDevice(
        ToDevice(DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, generator=generator())))
    ),
    "wrapped, a sampler with python's stream": lambda: ToDevice(DataLoader(DATA, batch_size=2, sampler=Shuffled(random.shuffle))),
    "wrapped, torchdata's loader": lambda: ToDevice(StatefulDataLoader(DATA, batch_size=2, shuffle=True)),
    "batch sampler with python's stream": lambda: DataLoader(DATA, batch_sampler=Shuffled(random.shuffle, 2)),
    "batch sampler with NumPy's stream": lambda: DataLoader(DATA, batch_sampler=Shuffled(np.random.shuffle, 2)),
    "batch sampler with a generator": lambda: DataLoader(DATA, batch_sampler=Shuffled(random.Random(5).shuffle, 2)),
    "batch sampler with a generator behind a partial": lambda: DataLoader(
        DATA, batch_sampler=Shuffled(functools.partial(random.Random(5).shuffle), 2)
    ),
    "data set with a generator": held,
    "own, generator": lambda: Lists(random.Random(8)),
    "own, NumPy's generator": lambda: Lists(np.random.default_rng(8)),
    "own, made when needed": Lists,
    "own, in slots": Slots,
}
WORKERS: dict[str, Make] = {"generator": lambda: persistent(generator=generator())(), "torch's stream": persistent()}


def seed(of: int) -> None:
    """As a process begins: with the streams of its own."""
    random.seed(of)
    np.random.seed(of)
    torch.manual_seed(of)


def train() -> None:
    """Whatever else draws, between batches."""
    torch.rand(2)
    random.random()
    np.random.rand()


def goes_on(make: Make, cuts: Iterable[int]) -> None:
    """Three epochs in one process, and those begun anew in another at each of these draws: their batches are the same."""
    seed(0)
    reel, spots, whole = Reel(make(), 3), [], []
    while True:
        spots.append((reel.snapshot(), capture_rng()))
        batch = reel.draw()
        if batch is END:
            break
        whole.append(batch.tolist())
        train()
    reel.close()
    assert [sorted(i for batch in whole[e : e + 10] for i in batch) for e in (0, 10, 20)] == [DATA] * 3
    for cut in cuts:
        seed(100 + cut)
        other = Reel(make(), 3)
        other.restore(spots[cut][0])
        restore_rng(spots[cut][1])  # as a resume does, last
        rest = []
        for _ in range(cut, 30):
            rest.append(other.draw().tolist())
            train()
        assert rest == whole[cut:], cut
        assert other.draw() is END
        other.close()


@pytest.mark.covers("I4", "I12", "F47")
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
@pytest.mark.parametrize("name", ORDERS)
def test_an_order_that_is_drawn_goes_on_in_another_process(name: str) -> None:
    goes_on(ORDERS[name], [1, 4, 10, 11, 17, 20, 29])


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("name", WORKERS)
def test_so_it_does_with_workers_that_outlive_an_epoch(name: str) -> None:
    goes_on(WORKERS[name], [4, 14])


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("name", WORKERS)
def test_and_where_this_process_goes_back_in_an_epoch(name: str) -> None:
    seed(0)
    reel = Reel(WORKERS[name](), 2)
    for _ in (0, 1):
        drawn = [reel.draw().tolist() for _ in range(7)]
        spot = reel.snapshot()
        rest = [reel.draw().tolist() for _ in range(3)]
        assert sorted(i for batch in drawn + rest for i in batch) == DATA
        reel.restore(spot)
        assert [reel.draw().tolist() for _ in range(3)] == rest
    reel.close()


@pytest.mark.covers("I4")
def test_streams_of_the_process_are_left_alone_by_a_replay() -> None:
    reel = Reel(ToDevice(DataLoader(DATA, batch_size=2, shuffle=True)), None)
    for _ in range(4):
        reel.draw()
    spot = reel.snapshot()
    seed(7)
    before = encode_value(capture_rng())
    reel.restore(spot)
    assert encode_value(capture_rng()) == before


class Stated:
    """A torchdata loader inside a class with a state."""

    def __init__(self) -> None:
        self.loader: Any = StatefulDataLoader(DATA, batch_size=2, shuffle=True)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


@pytest.mark.covers("I4")
@pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
def test_a_wrapped_loader_with_a_state_draws_no_seed_again_when_it_goes_on() -> None:
    def go_on(reel: Reel) -> list[Any]:
        return [(reel.draw().tolist(), torch.rand(1).item()) for _ in range(4)]

    seed(0)
    reel = Reel(Stated(), None)
    for _ in range(3):
        reel.draw()
    spot, streams = reel.snapshot(), capture_rng()
    expected = go_on(reel)
    seed(5)
    other = Reel(Stated(), None)
    other.restore(spot)
    restore_rng(streams)
    assert go_on(other) == expected


@pytest.mark.covers("I12")
def test_a_loader_that_has_not_the_generators_of_before_is_refused() -> None:
    reel = Reel(ORDERS["wrapped, generator"](), None)
    reel.draw()
    with pytest.raises(DataError, match=r"does not have now: loader\.generator"):
        Reel(ORDERS["wrapped, torch's stream"](), None).restore(reel.snapshot())


def deck(make: Make, journal: dict[int, bytes]) -> Deck:
    """One that finds what was journalled last, and nothing newer."""

    def recall(count: int) -> tuple[int, bytes] | None:
        best = max((o for o in journal if o <= count), default=None)
        return None if best is None else (best, journal[best])

    return Deck(Reel(make(), None), journal.__setitem__, recall)


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("lost", [0, 11])
def test_an_epoch_whose_streams_nobody_knows_is_not_guessed(lost: int) -> None:
    for name, known in {"wrapped, torch's stream": False, "own, generator": True}.items():
        seed(0)
        journal: dict[int, bytes] = {}
        first = deck(ORDERS[name], journal)
        drawn = [first.draw(n, n - 1, None) for n in range(1, 15)]
        for ordinal in [o for o in journal if o >= lost]:
            del journal[ordinal]
        other = deck(ORDERS[name], journal)
        if known:
            again, before = other.draw(14, 13, None), drawn[-1]
            assert again is not None
            assert before is not None
            assert again.batch.tolist() == before.batch.tolist()
            continue
        with pytest.raises(DataError, match="is passed over, and its order was drawn from the process's random streams"):
            other.draw(14, 13, None)


@pytest.mark.covers("I12")
def test_positions_of_releases_that_kept_no_streams_are_read_and_lists_have_none() -> None:
    reel = Reel([[i] for i in range(5)], None)
    for _ in range(3):
        reel.draw()
    spot = msgspec.json.decode(reel.snapshot())
    assert (spot["version"], spot.pop("began")) == (2, None)
    other = Reel([[i] for i in range(5)], None)
    other.restore(msgspec.json.encode(spot))
    assert other.draw() == [3]


@pytest.mark.covers("I12")
def test_a_generator_without_a_state_is_let_be() -> None:
    reel = Reel(Lists(random.SystemRandom()), 1)
    assert sorted(i for _ in range(10) for i in reel.draw().tolist()) == DATA
    assert msgspec.json.decode(reel.snapshot())["began"] is None


@pytest.mark.covers("I4")
def test_a_wrapped_loader_whose_batches_come_in_any_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_order=False"):
        Loaders().add("loader", ToDevice(DataLoader(DATA, batch_size=2, num_workers=2, in_order=False)))
