"""Generators that are held under another name by now, or by an object that is a state itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.chain import Chain
from ftckpt.data.deck import Deck
from ftckpt.data.reel import Reel
from ftckpt.trainer.states import StateRegistry

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")  # torchdata asks torch for it
Journal = dict[int, bytes]


def deck(loader: Any, journal: Journal, registered: Iterable[Any] = (), *, chained: bool = False) -> Deck:
    def recall(count: int) -> tuple[int, bytes] | None:
        best = max((n for n in journal if n <= count), default=None)
        return None if best is None else (best, journal[best])

    reel: Reel | Chain = Chain(loader, lambda name: loader, None) if chained else Reel(loader, None)
    return Deck(reel, journal.__setitem__, recall, generators=lambda: registered)


def take(of: Deck, first: int, last: int) -> list[Any]:
    held: Any = [of.draw(n, n - 1, None) for n in range(first, last + 1)]
    return [one.batch for one in held]


class Noisy(Dataset[Any]):
    """Draws for each sample."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> int:
        self.rng.random()
        return at


class Prefetcher:
    """Keeps its iterator, and so a second way to all that the loader holds."""

    def __init__(self) -> None:
        self.it: Any = None
        self.loader = DataLoader(Noisy(), batch_size=1)

    def __iter__(self) -> Iterator[Any]:
        self.it = iter(self.loader)
        yield from self.it


class Current:
    """Says which of its loaders is gone through."""

    def __init__(self) -> None:
        self.now: Any = None
        data: Any = range(6)
        self.loaders = [DataLoader(data, batch_size=1, shuffle=True, generator=torch.Generator().manual_seed(n)) for n in range(2)]

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            self.now = loader
            yield from loader


class Seeded(Current):
    """Seeds its generators for each epoch by itself."""

    def set_epoch(self, epoch: int) -> None:
        for n, loader in enumerate(self.loaders):
            loader.generator.manual_seed(10 * epoch + n)


class Parts(Sampler[int]):
    """A sampler that keeps the part that it is in."""

    def __init__(self) -> None:
        self.now: Any = None
        self.rngs = [np.random.default_rng(n) for n in range(2)]

    def __iter__(self) -> Iterator[int]:
        for n, rng in enumerate(self.rngs):
            self.now = rng
            yield from (5 * n + rng.permutation(5)).tolist()

    def __len__(self) -> int:
        return 10


def sampled() -> Any:
    data: Any = range(10)
    return DataLoader(data, batch_size=1, sampler=Parts())


@pytest.mark.covers("I4", "I12", "F46")
@pytest.mark.parametrize("make", [Prefetcher, Current, Seeded, sampled])
@pytest.mark.parametrize("live", [False, True], ids=["new process", "live"])
@pytest.mark.parametrize("cut", [3, 13, 20])
def test_a_generator_keeps_its_name_when_something_else_holds_it_too(make: Callable[[], Any], live: bool, cut: int) -> None:
    for chained in (False, True):
        journal: Journal = {}
        first = deck(make(), journal, chained=chained)
        want = take(first, 1, 30)
        journal = {}
        of = deck(make(), journal, chained=chained)
        take(of, 1, cut)
        if live:
            of.close()
        else:
            of = deck(make(), journal, chained=chained)
        assert take(of, cut + 1, 30) == want[cut:]


class Mixup:
    """A state of a training script's own, which training draws from."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]


class Batches:
    """Holds it, and draws from a generator of its own."""

    def __init__(self, mixup: Mixup) -> None:
        self.mixup, self.own = mixup, np.random.default_rng(2)

    def __iter__(self) -> Iterator[int]:
        yield from self.own.permutation(10).tolist()


@pytest.mark.covers("I4", "I5")
@pytest.mark.parametrize("live", [False, True], ids=["new process", "live"])
@pytest.mark.parametrize("cut", [4, 13])
def test_a_generator_that_a_registered_object_holds_is_a_state(live: bool, cut: int) -> None:
    def made() -> tuple[Mixup, Batches, list[Any]]:
        mixup, states = Mixup(), StateRegistry()
        loader = Batches(mixup)
        states.add("mixup", mixup)
        states.add("trainer", {"loader": loader, "mixup": mixup})
        assert states.generators(loader) == [mixup.rng, mixup.rng]  # of either, and none that the loader alone has
        return mixup, loader, states.generators(loader)

    def steps(of: Deck, mixup: Mixup, first: int, last: int) -> list[Any]:
        return [(batch, float(mixup.rng.random())) for n in range(first, last + 1) for batch in take(of, n, n)]

    mixup, loader, states = made()
    journal: Journal = {}
    of = deck(loader, journal, states)
    steps(of, mixup, 1, cut)
    saved, known = mixup.state_dict(), dict(journal)
    want = steps(of, mixup, cut + 1, 20)
    if live:
        of.close()
        for n in [n for n in journal if n > cut]:
            del journal[n]
    else:
        mixup, loader, states = made()
        of = deck(loader, known, states)
    mixup.load_state_dict(saved)
    assert steps(of, mixup, cut + 1, 20) == want


class Augmented(Dataset[Any]):
    """Draws for each sample from what is a state."""

    def __init__(self) -> None:
        self.noise = torch.Generator().manual_seed(9)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, at: int) -> Any:
        return at + torch.rand((), generator=self.noise)


@pytest.mark.covers("I4", "I5")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize(("entry", "cut"), [(4, 4), (4, 7), (14, 17)])
def test_what_a_data_set_draws_from_a_state_is_as_the_state_says(kind: Any, entry: int, cut: int) -> None:
    data, journal = Augmented(), Journal()
    first = deck(kind(data, batch_size=1), journal, [data.noise])
    take(first, 1, cut)
    state, known = data.noise.get_state(), {n: spot for n, spot in journal.items() if n <= entry}
    want = take(first, cut + 1, 25)
    data = Augmented()
    data.noise.set_state(state)
    assert take(deck(kind(data, batch_size=1), known, [data.noise]), cut + 1, 25) == want
