"""A draw that raises is made again by the next that asks: nothing is passed over, nothing is paired with another batch's indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.batches import BatchFeed
from ftckpt.data.elastic import ElasticLoader
from ftckpt.data.reel import Reel
from ftckpt.data.sampler import ElasticSampler
from ftckpt.errors import ConfigError, DataError

SIZE, BATCH, BAD = 23, 4, 9


class Flaky(Dataset[int]):
    """The numbers; one of them cannot be read the first time, in whichever process that is."""

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> int:
        if i == BAD and not self.seen.exists():
            self.seen.touch()
            raise OSError("the disk hiccups")
        return i


class Plain:
    """An iterable whose generator is over once it has raised."""

    def __init__(self, data: Flaky) -> None:
        self.data = data

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(0, SIZE, BATCH):
            yield [self.data[i] for i in range(at, min(SIZE, at + BATCH))]


def fed(loader: Iterable[Any], epochs: int = 1) -> tuple[Callable[[], Any], list[int]]:
    """Draws of a loader, each counted as soon as it was handed out; and how many were."""
    journal: dict[int, bytes] = {}
    done = [0]
    feed = BatchFeed(
        loader,
        journal=journal.__setitem__,
        recall=lambda count: max(((k, v) for k, v in journal.items() if k <= count), default=None),
        position=lambda: done[0],
        votes=lambda: done[0],
        contribute=lambda draws, samples: None,
        epochs=epochs,
    )

    def draw() -> list[int]:
        batch = [int(i) for i in next(feed)]
        done[0] += 1
        return batch

    return draw, done


def whole(draw: Callable[[], list[int]]) -> tuple[list[int], int]:
    """All ids in order, by somebody who goes on after an error; and the errors."""
    ids, errors = [], 0
    while True:
        try:
            ids += draw()
        except StopIteration:
            return ids, errors
        except OSError:
            errors += 1
            assert errors < 5


MAKE: dict[str, Callable[[Flaky], Iterable[Any]]] = {
    "stateful": lambda data: StatefulDataLoader(data, batch_size=BATCH),
    "stateful with workers": lambda data: StatefulDataLoader(data, batch_size=BATCH, num_workers=1),
    "torch": lambda data: DataLoader(data, batch_size=BATCH),
    "torch with workers": lambda data: DataLoader(data, batch_size=BATCH, num_workers=1),
    "generator": Plain,
}


@pytest.mark.covers("I12", "F49")
@pytest.mark.filterwarnings("ignore:.*set_vital.*")
@pytest.mark.parametrize("kind", MAKE)
def test_a_loader_goes_on_with_the_draw_that_failed(kind: str, tmp_path: Path) -> None:
    draw, done = fed(MAKE[kind](Flaky(tmp_path / "seen")))
    assert whole(draw) == (list(range(SIZE)), 1)
    assert done[0] == 6


@pytest.mark.covers("I12")
def test_an_iterator_that_cannot_be_started_again_does_not_pass_for_one_that_is_over(tmp_path: Path) -> None:
    draw, _ = fed(iter(Plain(Flaky(tmp_path / "seen"))))
    with pytest.raises(DataError, match="ended after an error in its draw 3"):
        whole(draw)


@pytest.mark.covers("I12", "F49")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro", [None, 2])
def test_the_shared_order_goes_on_with_the_batch_that_failed(workers: int, micro: int | None, tmp_path: Path) -> None:
    sampler = ElasticSampler(
        SIZE, shuffle=False, epochs=1, **({"global_batch": BATCH, "micro_batch": micro} if micro else {"batch_size": BATCH})
    )
    loader = ElasticLoader(Flaky(tmp_path / "seen"), sampler, num_workers=workers)
    at, ids, errors = 0, [], 0
    while True:
        try:
            got = loader.take(at, 0, 1)
        except OSError:
            errors += 1
            assert errors < 5
            continue
        if got is None:
            break
        batch, share = got
        mine = [int(i) for part in (batch if micro else [batch]) for i in part]
        assert mine == list(share.indices)  # what is recorded is what was given
        ids += mine
        at = sampler.after(at, 1)
    loader.close()
    assert (ids, errors) == (list(range(SIZE)), 1)


def test_batches_that_come_in_any_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_order"):
        ElasticLoader(torch.arange(8), ElasticSampler(8, batch_size=2), num_workers=2, in_order=False)


@pytest.mark.covers("I12", "F46")
@pytest.mark.parametrize("own", [False, True])
def test_workers_that_live_on_give_the_order_that_new_ones_give(own: bool) -> None:
    def made() -> Reel:
        generator = torch.Generator().manual_seed(3) if own else None
        return Reel(
            DataLoader(list(range(SIZE)), batch_size=BATCH, shuffle=True, num_workers=1, persistent_workers=True, generator=generator), 3
        )

    torch.manual_seed(7)
    running = made()
    drawn = [running.draw().tolist() for _ in range(8)]
    spot = running.snapshot()
    rest = [running.draw().tolist() for _ in range(10)]
    restarted = made()
    restarted.restore(spot)
    assert [restarted.draw().tolist() for _ in range(10)] == rest
    epochs = [*drawn, *rest]
    assert [sorted(i for batch in epochs[e : e + 6] for i in batch) for e in (0, 6, 12)] == [list(range(SIZE))] * 3
    assert epochs[:6] != epochs[6:12] != epochs[12:]
