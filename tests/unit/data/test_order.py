"""What decides the order of a loader's samples: what is in it, what is not, and positions of releases that did not write it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.elastic import ElasticLoader
from ftckpt.data.order import differing, order_of
from ftckpt.data.reel import Reel
from ftckpt.data.sampler import ElasticSampler
from ftckpt.errors import ConfigError, DataError
from ftckpt.trainer.loaders import Loaders

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
N = 23
DATA: Any = list(range(N))
Make = Callable[[], Iterable[Any]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Own:
    """A plain iterable that says its settings."""

    def __init__(self, batch_size: int | np.int64) -> None:
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([DATA[i : i + self.batch_size] for i in range(0, N, self.batch_size)])


def torch_loader(**options: Any) -> Make:
    return lambda: DataLoader(DATA, **({"batch_size": 4} | options))


def stateful(data: Any = DATA, **options: Any) -> Make:
    return lambda: StatefulDataLoader(data, **({"batch_size": 4} | options))


def cut(kind: Any, size: int, drop_last: bool = False) -> Make:
    return lambda: kind(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), size, drop_last))


def distributed(**options: Any) -> Make:
    told = {"num_replicas": 2, "rank": 0, "shuffle": True, "seed": 0} | options
    return lambda: DataLoader(DATA, batch_size=4, sampler=DistributedSampler(DATA, **told))


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def part(indices: Any) -> Make:
    return lambda: DataLoader(Subset(DATA, indices), batch_size=4, shuffle=True)


def weighted(*weights: float) -> Any:
    return WeightedRandomSampler(weights, N, replacement=False)


class Buckets(Sampler[list[int]]):
    """A batch sampler of one's own, which says its number of batches alone."""

    def __init__(self, size: int) -> None:
        self.width = size

    def __iter__(self) -> Iterator[list[int]]:
        return iter([DATA[i : i + self.width] for i in range(0, N, self.width)])

    def __len__(self) -> int:
        return -(-N // self.width)


def batches(*cuts: int) -> list[list[int]]:
    """The data, cut there."""
    return [DATA[a:b] for a, b in itertools.pairwise((0, *cuts, N))]


def packed(*cuts: int) -> Any:
    return [np.array(batch) for batch in batches(*cuts)]


CHANGES: dict[str, tuple[Make, Make, str]] = {
    "size": (torch_loader(), torch_loader(batch_size=8), "batch_size 4 then, 8 now"),
    "size of another type": (lambda: Own(np.int64(4)), lambda: Own(np.int64(8)), "batch_size 4 then, 8 now"),
    "size of a batch sampler": (cut(DataLoader, 4), cut(DataLoader, 8), "batch_size 4 then, 8 now"),
    "size of a stateful batch sampler": (cut(StatefulDataLoader, 4), cut(StatefulDataLoader, 8), "batch_size 4 then, 8 now"),
    "end of a batch sampler": (cut(DataLoader, 4), cut(DataLoader, 4, True), "drop_last False then, True now"),
    "shuffle": (torch_loader(), torch_loader(shuffle=True), "sampler SequentialSampler then, RandomSampler now"),
    "stateful shuffle": (stateful(shuffle=True), stateful(), "sampler RandomSampler then, SequentialSampler now"),
    "drop_last": (stateful(), stateful(drop_last=True), "drop_last False then, True now"),
    "length": (stateful(), stateful(list(range(40))), "length 23 then, 40 now"),
    "kind": (torch_loader(), stateful(), "kind DataLoader then, StatefulDataLoader now"),
    "plain kind": (lambda: Own(4), lambda: iter(Own(4)), "kind iterable then, iterator now"),
    "plain size": (lambda: Own(4), lambda: Own(6), "batch_size 4 then, 6 now"),
    "length of a list": (lambda: [[1], [2]], lambda: [[1], [2], [3]], "batches 2 then, 3 now"),
    "samples of a sampler": (
        torch_loader(sampler=RandomSampler(DATA, num_samples=8)), torch_loader(sampler=RandomSampler(DATA, num_samples=12)),
        "samples_per_epoch 8 then, 12 now",
    ),
    "seed of a sampler": (distributed(), distributed(seed=1), "seed 0 then, 1 now"),
    "share": (distributed(), distributed(rank=1), "rank 0 then, 1 now"),
    "workers that share a stream": (
        lambda: DataLoader(Stream(), batch_size=4), lambda: DataLoader(Stream(), batch_size=4, num_workers=2), "num_workers 0 then, 2 now",
    ),
    "workers of torchdata": (stateful(), stateful(num_workers=2), "num_workers 0 then, 2 now"),
    "a generator's stream": (
        lambda: torch_loader(shuffle=True, generator=generator())(), torch_loader(shuffle=True),
        "generator loader's own and sampler with the loader's then, global now",
    ),
    "torch's stream": (
        torch_loader(shuffle=True), torch_loader(sampler=RandomSampler(DATA, generator=generator())),
        "generator global then, sampler's own now",
    ),
    "stream that the loader shares": (
        lambda: torch_loader(shuffle=True, generator=generator())(), torch_loader(sampler=RandomSampler(DATA, generator=generator())),
        "generator loader's own and sampler with the loader's then, sampler's own now",
    ),
    "a generator's stream, which torchdata does not keep": (
        lambda: stateful(sampler=RandomSampler(DATA, generator=generator()))(), stateful(sampler=RandomSampler(DATA)),
        "generator sampler's own then, global now",
    ),
    "indices of a sampler": (
        torch_loader(sampler=SubsetRandomSampler(range(10))), torch_loader(sampler=SubsetRandomSampler(range(10, 20))), "indices .* then, .* now",
    ),
    "indices of a subset": (part(range(10)), part(range(10, 20)), "indices .* then, .* now"),
    "subset and no subset": (stateful(Subset(DATA, range(22, -1, -1))), stateful(), "indices .* then, all now"),
    "subsets that are joined": (
        stateful(ConcatDataset([Subset(DATA, range(5)), Subset(DATA, range(5, 10))])),
        stateful(ConcatDataset([Subset(DATA, range(5)), Subset(DATA, range(6, 11))])), "indices .* then, .* now",
    ),
    "batches of a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=Buckets(4)), lambda: DataLoader(DATA, batch_sampler=Buckets(5)),
        "batches_per_epoch 6 then, 5 now",
    ),
    "batches of a stateful batch sampler": (
        lambda: StatefulDataLoader(DATA, batch_sampler=Buckets(4)), lambda: StatefulDataLoader(DATA, batch_sampler=Buckets(5)),
        "batches_per_epoch 6 then, 5 now",
    ),
    "a list as sampler": (torch_loader(sampler=DATA), torch_loader(sampler=DATA[::-1]), "listed .* then, .* now"),
    "a tensor as sampler": (torch_loader(sampler=torch.arange(N)), torch_loader(sampler=torch.arange(N).flip(0)), "listed .* then, .* now"),
    "a list in a batch sampler": (
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(DATA, 4, False)),
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(DATA[::-1], 4, False)), "listed .* then, .* now",
    ),
    "a list of batches": (
        lambda: DataLoader(DATA, batch_sampler=batches(4, 9, 15)), lambda: DataLoader(DATA, batch_sampler=batches(4, 10, 15)),
        "listed .* then, .* now",
    ),
    "a list of tensors": (
        torch_loader(sampler=list(torch.arange(N))), torch_loader(sampler=list(torch.arange(N).flip(0))), "listed .* then, .* now",
    ),
    "weights": (torch_loader(sampler=weighted(*[1.0] * N)), torch_loader(sampler=weighted(*range(1, N + 1))), "weights .* then, .* now"),
}  # fmt: skip

SAME: dict[str, tuple[Make, Make]] = {
    "workers": (
        torch_loader(shuffle=True),
        torch_loader(shuffle=True, num_workers=2, prefetch_factor=3, persistent_workers=True, timeout=30),
    ),
    "seed of a generator, which is put back": (
        lambda: torch_loader(shuffle=True, generator=torch.Generator().manual_seed(1))(),
        lambda: torch_loader(shuffle=True, generator=torch.Generator().manual_seed(2))(),
    ),
    "how indices are kept": (part(range(22)), part(list(range(22)))),
    "how indices are kept, as tensor": (
        torch_loader(sampler=SubsetRandomSampler(range(22))),
        torch_loader(sampler=SubsetRandomSampler(torch.arange(22, dtype=torch.int32))),  # type: ignore[arg-type]  # works
    ),
    "how a list is kept": (torch_loader(sampler=torch.arange(N)), torch_loader(sampler=torch.arange(N, dtype=torch.int16))),
    "how the numbers of a list are kept": (torch_loader(sampler=list(torch.arange(N))), torch_loader(sampler=list(np.arange(N)))),
    "a list of arrays without a dimension": (torch_loader(sampler=[np.array(n) for n in DATA]), torch_loader(sampler=DATA)),
    "how a list of batches is kept": (
        lambda: DataLoader(DATA, batch_sampler=batches(*range(4, N, 4))),
        lambda: DataLoader(DATA, batch_sampler=packed(*range(4, N, 4))),
    ),
    "how weights are kept": (torch_loader(sampler=weighted(*[1.0] * N)), torch_loader(sampler=weighted(*[1] * N))),
    "another seed of a sampler": (
        lambda: torch_loader(sampler=RandomSampler(DATA, generator=generator()))(),
        lambda: torch_loader(sampler=RandomSampler(DATA, generator=generator(8)))(),
    ),
    "generator of torchdata, which keeps its order": (lambda: stateful(shuffle=True, generator=generator())(), stateful(shuffle=True)),
    "torchdata's loader with torch's samplers": (stateful(sampler=SubsetRandomSampler(range(N))),) * 2,
    "torchdata's loader with weights": (stateful(sampler=weighted(*range(1, N + 1))),) * 2,
    "torchdata's loader with workers, and torch's samplers": (stateful(sampler=RandomSampler(DATA), num_workers=1),) * 2,
    "generator that nothing draws from": (torch_loader(), torch_loader(generator=torch.Generator())),
    "prefetch": (stateful(num_workers=1), stateful(num_workers=1, prefetch_factor=5)),
    "pinned": (torch_loader(), torch_loader(pin_memory=True)),
}


def after_two(make: Make) -> bytes:
    torch.manual_seed(5)
    reel = Reel(make(), 2)
    reel.snapshot()
    reel.draw()
    reel.draw()
    spot = reel.snapshot()
    reel.close()
    return spot


@pytest.mark.covers("I4", "I12", "F47")
@pytest.mark.parametrize("name", CHANGES)
def test_a_position_is_refused_by_a_loader_of_another_order_which_is_named(name: str) -> None:
    then, now, words = CHANGES[name]
    with pytest.raises(DataError, match=words) as refused:
        Reel(now(), 2).restore(after_two(then))
    assert "restart" in str(refused.value)


@pytest.mark.covers("I4", "I12")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
@pytest.mark.parametrize("name", SAME)
def test_what_does_not_change_the_order_may_change(name: str) -> None:
    then, now = SAME[name]
    torch.manual_seed(5)
    whole = Reel(then(), 2)
    whole.snapshot()
    expected = [whole.draw().tolist() for _ in range(12)][2:]
    torch.manual_seed(6)
    other = Reel(now(), 2)
    other.restore(after_two(then))
    assert [other.draw().tolist() for _ in range(10)] == expected
    whole.close()
    other.close()


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("done", [0, 1, 5, 6, 7, 13])
def test_torchdata_goes_on_with_a_sampler_that_keeps_no_state(done: int, shared: bool) -> None:
    def make() -> Reel:
        own = generator() if shared else None  # of the loader and its sampler, which draw from one stream in either case
        return Reel(stateful(sampler=RandomSampler(DATA, generator=own), generator=own)(), 3)

    torch.manual_seed(5)
    whole = make()
    spot = whole.snapshot()
    for _ in range(done):
        whole.draw()
        spot = whole.snapshot()
    torch.manual_seed(6)
    other = make()
    other.restore(spot)
    assert [other.draw().tolist() for _ in range(done, 18)] == [whole.draw().tolist() for _ in range(done, 18)]


@pytest.mark.covers("I12")
def test_a_position_of_the_release_before_is_taken_and_its_settings_are_compared() -> None:
    def first(data: bytes) -> bytes:
        doc = msgspec.json.decode(data)
        del doc["order"]
        return msgspec.json.encode(doc | {"version": 1, "shape": {"num_workers": 0, "batch_size": 4}})

    spot = first(after_two(torch_loader()))
    reel = Reel(torch_loader(num_workers=1)(), 2)
    reel.restore(spot)
    assert reel.draw().tolist() == [8, 9, 10, 11]
    reel.close()
    Reel(DATA, 2).restore(msgspec.json.encode(msgspec.json.decode(spot) | {"shape": {}}))
    with pytest.raises(DataError, match="batch_size 4 then, 8 now"):
        Reel(torch_loader(batch_size=8)(), 2).restore(spot)
    with pytest.raises(DataError, match="num_workers 0 then, 1 now"):
        Reel(stateful(num_workers=1)(), 2).restore(first(after_two(stateful())))
    with pytest.raises(DataError, match="version 9"):
        Reel(DATA, 2).restore(msgspec.json.encode(msgspec.json.decode(spot) | {"version": 9}))


@pytest.mark.covers("I12")
def test_a_position_without_what_a_later_release_compares_is_taken() -> None:
    make = part(range(9))
    doc = msgspec.json.decode(after_two(make))
    for name in ("generator", "indices"):
        del doc["order"][name]
    reel = Reel(make(), 2)
    reel.restore(msgspec.json.encode(doc))
    assert len(reel.draw()) == 1
    assert set(doc["order"]) < set(order_of(make()))


@pytest.mark.covers("I12")
def test_a_shared_order_is_its_length_its_shuffle_and_its_seed() -> None:
    base: dict[str, Any] = {"length": N, "seed": 1, "batch_size": 4, "epochs": 2}

    def made(**more: Any) -> dict[str, Any]:
        return ElasticSampler(**(base | more)).order

    legal: list[dict[str, Any]] = [
        {"batch_size": 8}, {"batch_size": None, "global_batch": 6}, {"micro_batch": 2}, {"drop_last": True}, {"epochs": 3}
    ]  # fmt: skip
    assert [differing(made(), made(**more)) for more in legal] == [""] * 5
    assert msgspec.json.decode(msgspec.json.encode(made(seed=2**100, length=np.int64(N)))) == made(seed=2**100)
    assert differing(made(), made(seed=2)) == "seed 1 then, 2 now"
    assert differing(made(), made(length=40)) == "length 23 then, 40 now"
    assert differing(made(), made(shuffle=False)) == "seed 1 then, none now, shuffle True then, False now"
    assert differing(made(shuffle=False), made(shuffle=False, seed=9)) == ""
    assert differing(made(), order_of(stateful()())) == "kind ElasticLoader then, StatefulDataLoader now"


@pytest.mark.covers("I4")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_whose_batches_come_in_any_order_is_refused(kind: Any) -> None:
    loaders = Loaders()
    with pytest.raises(ConfigError, match="in_order=False"):
        loaders.add("loader", kind(DATA, batch_size=4, num_workers=2, in_order=False))
    loaders.add("loader", kind(DATA, batch_size=4, in_order=False))  # without workers there is one order, and nothing was registered


@pytest.mark.covers("I4")
def test_loaders_that_are_not_the_loader_are_none_of_ours() -> None:
    class Holder:
        """A trainer: the loader's functions are its own, and so is another loader."""

        def __init__(self) -> None:
            self.validation = DataLoader(DATA, num_workers=1, in_order=False)
            self.train = DataLoader(DATA, batch_size=4, collate_fn=self.collate, worker_init_fn=self.enter)

        def collate(self, samples: list[int]) -> list[int]:
            return samples

        def enter(self, number: int) -> None: ...

    class Wrapper:
        """Hands on batches of a loader, with another's in the reach of what it calls."""

        def __init__(self, holder: Holder, loader: Any) -> None:
            self.loader, self.call, self.holder = loader, holder.collate, holder

        def __iter__(self) -> Iterator[Any]:
            return iter(self.loader)

    holder = Holder()
    Loaders().add("loader", holder.train)
    Loaders().add("loader", Wrapper(holder, holder.train))
    for wrapped in (holder.validation, [holder.train, holder.validation], Wrapper(holder, holder.validation)):
        with pytest.raises(ConfigError, match="in_order=False"):
            Loaders().add("loader", Wrapper(holder, wrapped))


@pytest.mark.covers("I4")
def test_a_loader_whose_position_is_not_kept_may_give_batches_in_any_order() -> None:
    class Untold(DataLoader[int]):
        def __len__(self) -> int:
            raise RuntimeError("nobody asks")

    loaders = Loaders()
    loader = Untold(DATA, batch_size=4, num_workers=1, in_order=False)
    loaders.add("loader", loader, cursor=False)
    assert loaders.order is None
    reel = Reel(loader, 1, {})  # as the feed of such a loader makes it
    assert sorted(n for _ in range(6) for n in reel.draw().tolist()) == DATA
    reel.close()


@pytest.mark.covers("F47", "I4")
def test_the_workers_of_loaders_that_are_not_the_loader_are_left_to_them() -> None:
    class Holder:
        def __init__(self) -> None:
            self.validation = DataLoader(DATA, num_workers=1, persistent_workers=True)
            self.train = DataLoader(DATA, batch_size=4, shuffle=True, collate_fn=self.collate)

        def collate(self, samples: list[int]) -> list[int]:
            return samples

    holder = Holder()
    reel = Reel(holder.train, 2)
    reel.draw()
    spot = reel.snapshot()
    assert len(list(holder.validation)) == N
    workers = holder.validation._iterator
    assert workers is not None
    expected = reel.draw()
    reel.restore(spot)
    assert reel.draw() == expected
    assert holder.validation._iterator is workers
    reel.close()


@pytest.mark.parametrize(
    "listed",
    [[[1, 2], 3], [np.array(3), [4]], [1, [2, [3]]], [{1}, {2, 3}], ["a", ["b"]], [], [None], [torch.tensor([1, 2]), torch.tensor(3)]],
    ids=["mixed", "array", "deep", "sets", "keys", "empty", "none", "tensors"],
)
def test_whatever_is_listed_in_the_place_of_a_sampler_can_be_registered(listed: list[Any]) -> None:
    for loader in (DataLoader(DATA, sampler=listed), DataLoader(DATA, batch_sampler=listed)):
        assert order_of(loader)["listed"] == order_of(loader)["listed"]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2.5}, {"batch_size": True}, {"batch_size": 2, "epochs": 0}, {"batch_size": 2, "epochs": -1},
        {"batch_size": 2, "length": -1}, {"batch_size": 2, "length": 0}, {"batch_size": 2, "length": None}, {"global_batch": "8"},
        {"batch_size": 2, "micro_batch": 0}, {"batch_size": torch.zeros(2)}, {"batch_size": 2, "seed": "a"}, {"batch_size": 2, "seed": 1.5},
    ],
)  # fmt: skip
def test_numbers_that_a_shared_order_cannot_have_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ElasticSampler: "):
        ElasticSampler(**({"length": 5} | options))


@pytest.mark.parametrize("told", [(0, 5, 3), (0, 3, 3), (-3, 0, 1), (0, 0, 0), (0, -1, 2), (0, 0, 1, 0), (0, 0, 1, 2, 2), (0.5, 0, 1)])
def test_shares_that_cannot_be_are_refused(told: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="share"):
        ElasticSampler(10, batch_size=3).share(*told)


def test_a_shared_order_takes_a_seed_of_any_size() -> None:
    loader = ElasticLoader(range(12), ElasticSampler(12, batch_size=3, seed=2**100))
    taken = loader.take(0, 0, 1)
    assert taken is not None
    assert taken[0].tolist() == list(loader.sampler.share(0, 0, 1).indices)


def test_a_shared_order_longer_than_its_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 10 samples, and the ElasticSampler 12"):
        ElasticLoader(range(10), ElasticSampler(12, batch_size=3))
    with pytest.raises(ConfigError, match="own=2"):
        ElasticLoader(range(12), ElasticSampler(12, batch_size=3), ranks=2, own=2)
