"""Training loops as people write them, with a real checkpointer: changed settings at a resume, accumulation, loops left in the middle."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ftckpt
from ftckpt import ElasticLoader, ElasticSampler
from ftckpt.errors import ConfigError, DataError
from unit.interop.saved_jobs import opened

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
N = 23
DATA: Any = list(range(N))
Make = Callable[[], Any]


def own(size: int = 4, **options: Any) -> Make:
    return lambda: StatefulDataLoader(DATA, batch_size=size, **options)


def cut(size: int) -> Make:
    return lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), size, False))


def shared(length: int = N, **options: Any) -> Make:
    return lambda: ElasticLoader(list(range(length)), ElasticSampler(length, **({"seed": 1, "epochs": 2, "batch_size": 4} | options)))


class Job:
    """A model whose weight is the sum of all ids that it was trained with, so that weights and position can be compared."""

    def __init__(self, folder: Path, policy: Any = None) -> None:
        self.folder, self.policy = folder, policy or ftckpt.AtEnd()
        self.ids: list[int] = []
        self.weight = 0.0

    def run(self, loader: Any, loop: Callable[[Any, Callable[[Any], None]], None], **resume: Any) -> Any:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        opt = torch.optim.SGD(model.parameters(), lr=1.0)

        def train(*batches: Any) -> None:
            opt.zero_grad()
            for batch in batches:
                self.ids += map(int, batch)
                (-model.weight * float(sum(map(int, batch)))).sum().backward()
            opt.step()

        try:
            with opened(self.folder, policy=self.policy) as ckpt:
                ckpt.register(model=model, opt=opt)
                ckpt.add("loader", loader, kind="loader")
                report = ckpt.resume(**resume)
                loop(ckpt, train)
        finally:
            self.weight = model.weight.item()
        return report


def steps(count: int | None = None, **options: Any) -> Callable[[Any, Callable[[Any], None]], None]:
    def loop(ckpt: Any, train: Callable[[Any], None]) -> None:
        given = {"epochs": 2} if ckpt._rank.loaders.kind == "own" else {}
        for batch in ckpt.batches(**(given | options)):
            train(batch)
            ckpt.step()
            if ckpt.current_step == count:
                break

    return loop


CHANGED = {
    "own, a batch sampler's size": (cut(4), cut(8), "batch_size 4 then, 8 now"),
    "own, length": (own(), lambda: StatefulDataLoader(list(range(40)), batch_size=4), "length 23 then, 40 now"),
    "own, shuffle": (own(), own(shuffle=True), "sampler SequentialSampler then, RandomSampler now"),
    "shared, seed": (shared(), shared(seed=2), "seed 1 then, 2 now"),
    "shared, length": (shared(), shared(40), "length 23 then, 40 now"),
    "shared, shuffle": (shared(), shared(shuffle=False), "shuffle True then, False now"),
    "own, then shared": (own(), shared(), "kind StatefulDataLoader then, ElasticLoader now"),
    "shared, then own": (shared(), own(), "kind ElasticLoader then, StatefulDataLoader now"),
}


@pytest.mark.covers("I4", "I12", "F47")
@pytest.mark.parametrize("name", CHANGED)
def test_another_order_is_refused_before_anything_is_loaded_unless_the_data_may_begin_anew(name: str, tmp_path: Path) -> None:
    then, now, words = CHANGED[name]
    job = Job(tmp_path)
    job.run(then(), steps(3))
    for what in ("all", "weights"):
        with pytest.raises(DataError, match=words) as refused:
            job.run(now(), steps(), what=what)
        assert "nothing was loaded" in str(refused.value)
        assert job.weight == 0.0
    job.ids = []
    assert job.run(now(), steps(6), data="restart").step == 3
    assert len(job.ids) == len(set(job.ids)) >= 12
    first = list(job.ids)
    job.run(now(), steps())  # the new order is the job's from now on
    length = 40 if "length" in name else N
    assert Counter(job.ids) == Counter(list(range(length)) * 2)
    assert sorted(job.ids[:length]) == list(range(length))
    assert job.ids[: len(first)] == first


LEGAL = {
    "shared, sizes": (shared(), shared(batch_size=None, global_batch=5)),
    "shared, micro": (shared(), shared(drop_last=False, batch_size=7)),
    "shared, epochs": (shared(epochs=1), shared(epochs=2)),
    "own, workers": (
        lambda: DataLoader(DATA, batch_size=4, shuffle=True),
        lambda: DataLoader(DATA, batch_size=4, shuffle=True, num_workers=1),
    ),
}


@pytest.mark.covers("I12")
@pytest.mark.parametrize("name", LEGAL)
def test_what_a_position_does_not_depend_on_may_change(name: str, tmp_path: Path) -> None:
    then, now = LEGAL[name]
    job = Job(tmp_path)
    job.run(then(), steps(3))
    job.run(now(), steps())
    assert Counter(job.ids) == Counter(DATA * 2)
    assert sorted(job.ids[:N]) == DATA
    assert job.weight == 2.0 * sum(DATA)


@pytest.mark.covers("I12")
def test_a_generation_that_does_not_tell_its_order_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    encode = ftckpt.trainer.saving.encode

    def older(cursor: Any) -> bytes:
        state = msgspec.json.decode(cursor.state, type=dict[str, msgspec.Raw])
        del state["order"]
        return encode(msgspec.structs.replace(cursor, state=msgspec.Raw(msgspec.json.encode(state))))

    with monkeypatch.context() as patch:
        patch.setattr("ftckpt.trainer.saving.encode", older)
        job.run(shared()(), steps(3))
    job.run(shared()(), steps())
    assert Counter(job.ids) == Counter(DATA * 2)
    cursors = sorted(tmp_path.glob("root/gpt/generations/*/cursors/*.json"))
    told = [json.loads(path.read_text())["state"].get("order") for path in cursors]
    assert told == [None, {"kind": "ElasticLoader", "length": N, "shuffle": True, "seed": 1}]


@pytest.mark.covers("I12", "F61")
@pytest.mark.parametrize("make", [own(), lambda: [DATA[i : i + 4] for i in range(0, N, 4)]])
def test_accumulation_counts_each_batch_once_and_is_refused_where_it_was_not_told(make: Make, tmp_path: Path) -> None:
    def accumulate(ckpt: Any, train: Callable[..., None], **options: Any) -> None:
        held = []
        for batch in ckpt.batches(epochs=1, **options):
            held.append(batch)
            if len(held) == 2:
                train(*held)
                ckpt.step()
                held.clear()
            if ckpt.current_step == 1 and len(held) == 1 and not job.weight:
                raise InterruptedError

    job = Job(tmp_path, ftckpt.Every(1))
    with pytest.raises(ConfigError, match="draws_per_step"):
        job.run(make(), accumulate)
    assert job.ids == []
    with pytest.raises(InterruptedError):
        job.run(make(), lambda ckpt, train: accumulate(ckpt, train, draws_per_step=2))
    job.run(make(), lambda ckpt, train: accumulate(ckpt, train, draws_per_step=2))
    assert job.ids == DATA
    assert job.weight == sum(DATA)


@pytest.mark.covers("I14")
@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (own(), {"ranks": 1}, "given only ranks"),
        (own(), {"own": 0}, "given only own"),
        (own(), {"ranks": 2, "own": 0}, "below 2"),
        (own(), {"ranks": 1, "own": 1}, "below 1"),
        (shared(), {"ranks": 1, "own": 0}, "takes no own, ranks"),
    ],
    ids=lambda value: "" if isinstance(value, dict) or callable(value) else value,
)
def test_parts_of_a_groups_data_that_cannot_be_are_refused(make: Make, options: dict[str, int], words: str, tmp_path: Path) -> None:
    job = Job(tmp_path)
    with pytest.raises(ConfigError, match=words):
        job.run(make(), steps(**options))
    assert job.ids == []


@pytest.mark.covers("I12")
def test_a_shared_order_gives_a_step_one_batch(tmp_path: Path) -> None:
    def twice(ckpt: Any, train: Callable[[Any], None]) -> None:
        feed = ckpt.batches()
        first = next(feed)
        with pytest.raises(ConfigError, match="micro_batch"):
            next(feed)
        train(first)
        ckpt.step()
        train(next(feed))
        ckpt.step()

    job = Job(tmp_path)
    job.run(shared()(), twice)
    assert len(set(job.ids)) == 8


@pytest.mark.covers("I4", "I12", "I14")
def test_a_save_between_the_optimizers_step_and_the_counted_one_is_refused(tmp_path: Path) -> None:
    def loop(ckpt: Any, train: Callable[[Any], None]) -> None:
        for batch in ckpt.batches(epochs=1):
            ckpt.save()  # a batch is drawn, and the weights do not have it yet: it comes again
            train(batch)
            with pytest.raises(ConfigError, match=r"between optimizer.step\(\) and ckpt.step\(\)") as refused:
                ckpt.save()
            assert "nothing was saved" in str(refused.value)
            ckpt.step()
            if ckpt.current_step == 2:
                ckpt.save(wait=30.0)
                return

    job = Job(tmp_path, ftckpt.Never())
    job.run(own()(), loop)
    job.run(own()(), steps(epochs=1))
    assert job.ids == DATA
    assert job.weight == sum(DATA)


@pytest.mark.covers("I4", "I12", "I14")
@pytest.mark.parametrize("again", [False, True])
def test_a_loop_left_between_the_two_is_counted_at_the_end_and_not_begun_anew(
    again: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(ckpt: Any, train: Callable[[Any], None]) -> None:
        feed = ckpt.batches(epochs=1)
        for number, batch in enumerate(feed):
            train(batch)
            if number == 2:
                break
            ckpt.step()
        for more in (feed, ckpt.batches(epochs=1)) if again else ():
            with pytest.raises(ConfigError, match="a loop over batches"):
                next(iter(more))

    job = Job(tmp_path)
    with caplog.at_level(logging.WARNING):
        job.run(own()(), loop)
    assert "step 3 is counted now" in caplog.text
    assert job.run(own()(), steps(epochs=1)).step == 3
    assert job.ids == DATA
    assert job.weight == sum(DATA)


@pytest.mark.covers("I12")
def test_a_generator_goes_on_where_its_loop_was_left(tmp_path: Path) -> None:
    def batches() -> Iterator[list[int]]:
        yield from ([*DATA[i : i + 4]] for i in range(0, N, 4))

    def loop(ckpt: Any, train: Callable[[Any], None]) -> None:
        for turn in range(9):
            for batch in ckpt.batches(epochs=1):
                if turn % 2:
                    break  # drawn and not used: it comes again
                train(batch)
                ckpt.step()
                break

    job = Job(tmp_path)
    job.run(batches(), loop)
    job.run(batches(), steps(epochs=1))
    assert job.ids == DATA
    assert job.weight == sum(DATA)


def test_a_loaders_workers_live_over_loops_and_end_with_the_checkpointer(tmp_path: Path) -> None:
    gc.collect()
    before = set(multiprocessing.active_children())  # of other tests
    gc.disable()  # nothing else may end them

    def workers_now() -> list[int | None]:
        return [process.pid for process in set(multiprocessing.active_children()) - before]

    try:
        with opened(tmp_path) as ckpt:
            ckpt.register(model=torch.nn.Linear(1, 1), loader=DataLoader(DATA, batch_size=4, num_workers=1))
            ckpt.resume()
            workers = []
            for _ in range(2):
                next(ckpt.batches())
                ckpt.step()
                workers.append(workers_now())
            assert len(workers[0]) == 1
            assert workers[0] == workers[1]
        assert workers_now() == []
    finally:
        gc.enable()


def test_a_state_in_the_place_of_a_loader_is_told(tmp_path: Path) -> None:
    with opened(tmp_path) as ckpt:
        with pytest.raises(ConfigError, match="gives no batches"):
            ckpt.add("more", 3, kind="loader")
        ckpt.register(model=torch.nn.Linear(1, 1), loader=[[1], [2]])
        ckpt.resume()
        with pytest.raises(ConfigError, match="registered as a state") as told:
            ckpt.batches("loader")
        assert 'kind="loader"' in str(told.value)
        with pytest.raises(ConfigError, match="no loader 'other'"):
            ckpt.batches("other")


def workers(make: Make, between: Callable[[Any, Any, Callable[[Any], None]], Any], folder: Path) -> int:
    """How many workers there are after a checkpointer was closed, whose loader and loop live on."""
    loader = make()
    before, kept = set(multiprocessing.active_children()), list[Any]()
    during: set[Any] = set()

    def train(ckpt: Any, train: Callable[[Any], None]) -> None:
        batches = iter(ckpt.batches())
        for turn in range(2):
            train(next(batches))
            ckpt.step()
            if turn == 0:
                between(ckpt, batches, kept.append)
        during.update(set(multiprocessing.active_children()) - before)
        kept.append(batches)

    Job(folder, ftckpt.Never()).run(loader, train)
    assert during
    for child in during:
        child.join(5)
    return len(set(multiprocessing.active_children()) - before)


def load_again(ckpt: Any, batches: Any, keep: Callable[[Any], None]) -> None:
    ckpt.save(wait=30)
    ckpt.resume()


def another_loop(ckpt: Any, batches: Any, keep: Callable[[Any], None]) -> None:
    load_again(ckpt, batches, keep)
    keep(ckpt.batches())


@pytest.mark.covers("I11")
@pytest.mark.parametrize("loop", [lambda *_: None, load_again, another_loop], ids=["plain", "loaded again", "beside another loop"])
@pytest.mark.parametrize("kind", ["own", "elastic", "elastic, persistent"])
def test_workers_end_with_the_checkpointer(tmp_path: Path, kind: str, loop: Any) -> None:
    def make() -> Any:
        if kind == "own":
            return DataLoader(DATA, batch_size=4, num_workers=1)
        sampler = ElasticSampler(60, batch_size=4)
        return ElasticLoader(torch.arange(60), sampler, num_workers=1, persistent_workers="persistent" in kind)

    assert workers(make, loop, tmp_path) == 0
