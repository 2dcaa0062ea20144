"""Generators that a loader can reach and that are not, or not only, its own: a trainer's, a state's, those of other epochs."""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ftckpt import AtEnd, Checkpointer
from ftckpt.data.deck import Deck
from ftckpt.data.reached import generators_in
from ftckpt.data.reel import Reel
from ftckpt.data.streams import KEPT_BYTES, seedless
from ftckpt.errors import DataError
from ftckpt.trainer.inline import decode_value, encode_value
from ftckpt.trainer.rng import generator_state, set_generator_state

N = 20
DATA: Any = list(range(N))


class Trainer:
    """Has noise of its own, and what is called on its samples."""

    def __init__(self, **options: Any) -> None:
        self.noise = torch.Generator().manual_seed(1)
        self.loader: Iterable[Any] = DataLoader(DATA, batch_size=2, collate_fn=self.collate, **options)

    def collate(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples)


class Noisy:
    """A loader that draws from the generator that training draws from."""

    def __init__(self, noise: torch.Generator, *, also: bool = True) -> None:
        self.noise, self.also = noise, also

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(N, generator=self.noise) if self.also else torch.arange(N)
        for batch in order.reshape(-1, 2):
            yield batch + torch.rand(1, generator=self.noise) if self.also else batch


class PerEpoch:
    """A generator for each epoch, and one that nothing is drawn from."""

    def __init__(self, spare: str = "spare") -> None:
        self.rngs: dict[int, random.Random] = {}
        self.epoch = 0
        setattr(self, spare, np.random.default_rng(3))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.rngs[self.epoch] = random.Random(self.epoch)
        order = list(range(N))
        self.rngs[self.epoch].shuffle(order)
        return iter(torch.tensor(order).reshape(-1, 2))


class Changing(dict[str, Any]):
    """As one that another thread is changing."""

    def items(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


class Gone:
    """What a proxy stood for."""


class Many:
    """As many generators, of which the first few decide the order."""

    def __init__(self, drawn: int) -> None:
        self.rngs = [np.random.RandomState(i) for i in range(128)]
        self.drawn = drawn

    def __iter__(self) -> Iterator[Any]:
        order = np.arange(N)
        for rng in self.rngs[: self.drawn]:
            rng.shuffle(order)
        return iter(torch.from_numpy(order).reshape(-1, 2))


class Batches:
    """A batch sampler with python's stream."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(N))
        random.shuffle(order)
        return iter([order[i : i + 2] for i in range(0, N, 2)])

    def __len__(self) -> int:
        return N // 2


class Augmented:
    """A data set that draws for each sample."""

    def __init__(self) -> None:
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> int:
        random.random()
        np.random.rand()
        self.rng.random()
        return at


def drawn(reel: Reel, count: int) -> list[Any]:
    return [reel.draw().tolist() for _ in range(count)]


def began(reel: Reel) -> Any:
    return msgspec.json.decode(reel.snapshot())["began"]


@pytest.mark.covers("I4")
def test_a_trainers_generator_is_not_the_loaders() -> None:
    trainer = Trainer(shuffle=True)
    assert generators_in([trainer.loader, trainer.collate]) == []
    reel = Reel(trainer.loader, None)
    drawn(reel, 3)
    spot = reel.snapshot()
    torch.rand(3, generator=trainer.noise)
    before = trainer.noise.get_state()
    reel.restore(spot)
    assert torch.equal(trainer.noise.get_state(), before)
    reel.peek()
    assert torch.equal(trainer.noise.get_state(), before)


def steps(root: Path, until: int, *, also: bool) -> list[float]:
    """What training draws in each step, up to one."""
    noise = torch.Generator().manual_seed(1)
    model = nn.Linear(1, 1)
    seen = []
    root.mkdir(exist_ok=True)
    with Checkpointer.open(job="j", root=root, policy=AtEnd()) as ckpt:
        ckpt.register(model=model, noise=noise)
        ckpt.add("loader", Noisy(noise, also=also), kind="loader")
        ckpt.resume()
        feed = ckpt.batches("loader")
        while ckpt.current_step < until:
            batch = next(feed)
            seen.append(batch.sum().item() + torch.rand(1, generator=noise).item())
            ckpt.step()
    return seen


@pytest.mark.slow
@pytest.mark.covers("I4", "I7")
@pytest.mark.parametrize("also", [False, True])
def test_a_generator_that_is_a_state_is_as_the_state_says(tmp_path: Path, also: bool) -> None:
    whole = steps(tmp_path / "whole", 12, also=also)
    parts = [steps(tmp_path / "parts", until, also=also) for until in (3, 10, 12)]
    assert [value for part in parts for value in part] == whole


@pytest.mark.covers("I4")
def test_a_batch_for_a_step_that_does_not_count_leaves_generators_as_they_were() -> None:
    noise = torch.Generator().manual_seed(1)
    reel, plain = Reel(Noisy(noise), None), Reel(Noisy(torch.Generator().manual_seed(1)), None)
    for count in (0, 3, 7, 5):
        assert drawn(reel, count) == drawn(plain, count)
        before = noise.get_state()
        reel.peek()
        assert torch.equal(noise.get_state(), before)


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("cut", [4, 10, 14, 25])
def test_generators_that_the_order_did_not_move_need_not_be_there(cut: int) -> None:
    reel = Reel(PerEpoch(), None)
    drawn(reel, cut)
    assert began(reel)["moved"] == []
    other = Reel(PerEpoch("renamed"), None)
    other.restore(reel.snapshot())
    assert drawn(other, 30) == drawn(reel, 30)


@pytest.mark.covers("I12")
def test_what_cannot_be_looked_at_holds_nothing() -> None:
    gone = Gone()
    for holds in (weakref.proxy(gone), Changing(a=random.Random(1)), {"deep": [Changing()]}):
        loader = Many(1)
        loader.holds = holds  # type: ignore[attr-defined]
        if holds is not None and type(holds) is weakref.ProxyType:
            del gone
        reel = Reel(loader, None)
        drawn(reel, 12)
        assert list(began(reel)["own"]) == ["rngs.0"]


@pytest.mark.covers("I4")
def test_workers_that_draw_no_seed_from_a_stream_have_one_that_comes_of_it() -> None:
    loader: Any = DataLoader(DATA)
    seeds = []
    for rank in (0, 1):
        for _ in (0, 1):
            torch.manual_seed(rank)
            before = torch.get_rng_state()
            with seedless([loader]):
                seeds.append(loader.generator.initial_seed())
            assert torch.equal(torch.get_rng_state(), before)
            assert loader.generator is None
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    generator = torch.Generator().manual_seed(7)
    with seedless([DataLoader(DATA, generator=generator)]):
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(7).get_state())


def deck(loader: Iterable[Any], journal: dict[int, bytes], registered: Iterable[Any] = ()) -> Deck:
    def recall(count: int) -> tuple[int, bytes] | None:
        best = max((o for o in journal if o <= count), default=None)
        return None if best is None else (best, journal[best])

    return Deck(Reel(loader, None), journal.__setitem__, recall, generators=lambda: registered)


def passed_over(make: Callable[[], Iterable[Any]]) -> tuple[Any, Any]:
    """Draw 14, and that draw of a process that knows nothing after draw 8."""
    journal: dict[int, bytes] = {}
    first = deck(make(), journal)
    held = [first.draw(n, n - 1, None) for n in range(1, 15)]
    again = deck(make(), {o: spot for o, spot in journal.items() if o <= 8}).draw(14, 13, None)
    assert again is not None
    assert held[-1] is not None
    return held[-1].batch.tolist(), again.batch.tolist()


@pytest.mark.covers("I4", "I12")
def test_a_torch_loader_whose_epoch_cannot_be_made_again_is_refused_as_a_plain_one_is() -> None:
    batches: Any = Batches()
    with pytest.raises(DataError, match="is passed over, and its order was drawn from the process's random streams"):
        passed_over(lambda: DataLoader(DATA, batch_sampler=batches))


@pytest.mark.covers("I4", "I12")
def test_what_a_data_set_draws_for_its_samples_is_no_order() -> None:
    def make() -> Any:
        data: Any = Augmented()
        return DataLoader(data, batch_size=2, shuffle=True)

    before, again = passed_over(make)
    assert before == again
    reel = Reel(make(), None)
    drawn(reel, 3)
    assert began(reel) is None


@pytest.mark.covers("I12")
def test_a_position_is_no_longer_than_its_order_needs(caplog: pytest.LogCaptureFixture) -> None:
    few, many = Reel(Many(2), None), Reel(Many(100), None)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        drawn(few, 3)
        assert sorted(began(few)["own"]) == ["rngs.0", "rngs.1"]
        assert len(few.snapshot()) < 12_000
        assert not caplog.records
        for _ in (0, 1):
            drawn(many, 12)
    assert len(many.snapshot()) < KEPT_BYTES
    assert [record.getMessage()[:4] for record in caplog.records] == ["Many"]


class OneAfterTheOther:
    """Two shuffled loaders with a generator each: the second one's is drawn from in the middle of an epoch."""

    def __init__(self) -> None:
        self.generators = [torch.Generator().manual_seed(i) for i in (1, 2)]
        data: Any = range(N)
        self.loaders = [DataLoader(data, batch_size=2, shuffle=True, generator=g) for g in self.generators]

    def __iter__(self) -> Iterator[Any]:
        for loader in self.loaders:
            yield from loader


class Kept:
    """A loader with a state: its generator as it was when the epoch began, and how far it is."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(5)
        self.at, self.start = 0, None

    @property
    def generators(self) -> list[Any]:
        return [self.rng]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rng": self.start or self.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        self.at, self.start = state["at"], None

    def __iter__(self) -> Iterator[Any]:
        self.start = self.rng.bit_generator.state  # type: ignore[assignment]
        for sample in self.rng.permutation(N)[self.at :].tolist():
            self.at += 1
            yield torch.tensor(sample)
        self.at, self.start = 0, None


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("kind", [OneAfterTheOther, Kept])
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("cut", [5, 10, 25, 35, 40])
def test_generators_that_are_drawn_from_later_or_by_a_loaders_own_state(kind: Any, registered: bool, cut: int) -> None:
    journal: dict[int, bytes] = {}
    loader = kind()
    first = deck(loader, journal, loader.generators if registered else ())
    held: Any = [first.draw(n, n - 1, None) for n in range(1, cut + 1)]
    states = [encode_value(generator_state(g)) for g in loader.generators]
    known = dict(journal)
    held += [first.draw(n, n - 1, None) for n in range(cut + 1, 61)]
    other = kind()
    if registered:
        for generator, state in zip(other.generators, states, strict=True):
            set_generator_state(generator, decode_value(state))
    second = deck(other, known, other.generators if registered else ())
    again: Any = [second.draw(n, n - 1, None) for n in range(cut + 1, 61)]
    assert [a.batch.tolist() for a in again] == [h.batch.tolist() for h in held[cut:]]


@pytest.mark.covers("I4", "I12")
def test_a_step_that_does_not_count_leaves_a_loaders_own_state_alone() -> None:
    reel, plain = Reel(Kept(), None), Reel(Kept(), None)
    for count in (0, 3, 7, 15):
        assert drawn(reel, count) == drawn(plain, count)
        reel.peek()
