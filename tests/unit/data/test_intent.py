"""What loaders are meant to hand out in an epoch, and jobs audited by it: real loaders, a replica that moves on, kills and resumes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ftckpt.data.audit import AuditWriter, read_audit
from ftckpt.data.batches import BatchFeed
from ftckpt.data.elastic import ElasticFeed, ElasticLoader
from ftckpt.data.epochs import amount
from ftckpt.data.intent import plan_of, sample_ids
from ftckpt.data.judging import AuditReport, judge_audit
from ftckpt.data.records import End, Made, Plan, Use
from ftckpt.data.sampler import ElasticSampler
from ftckpt.domain.names import member_id
from ftckpt.domain.trajectory import Trajectory, genesis
from ftckpt.errors import ConfigError
from ftckpt.trainer.replicas.solo import SoloReplica

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
N, BATCH = 23, 4
DATA: Any = list(range(N))
TENSOR: Any = torch.arange(N)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class Pairs(Sampler[list[int]]):
    """A batch sampler of somebody's own that leaves the odd one out.

    Args:
        drop_last: it says so.
    """

    def __init__(self, drop_last: bool) -> None:
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(N).tolist()
        return iter([order[i : i + 2] for i in range(0, N - 1, 2)])

    def __len__(self) -> int:
        return N // 2


class Plain:
    """Batches of an iterable that is no loader of torch's; what it leaves out differs from epoch to epoch."""

    drop_last = True

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = random.Random(self.epoch).sample(DATA, N)
        return iter([order[i : i + BATCH] for i in range(0, N - BATCH + 1, BATCH)])


def padding(rank: int, **more: Any) -> Any:
    return DistributedSampler(DATA, num_replicas=3, rank=rank, shuffle=True, **more)


Make = Callable[[], Any]
LOADERS: dict[str, tuple[Make, Plan]] = {
    "whole": (lambda: DataLoader(DATA, batch_size=BATCH, shuffle=True), Plan(of=6, samples=23)),
    "stateful": (lambda: StatefulDataLoader(DATA, batch_size=BATCH, shuffle=True), Plan(of=6, samples=23)),
    "one by one": (lambda: DataLoader(DATA, batch_size=None, shuffle=True), Plan(of=23, samples=23)),
    "drop_last": (lambda: StatefulDataLoader(DATA, batch_size=BATCH, shuffle=True, drop_last=True), Plan(of=5, left=3, samples=20)),
    "drop_last of none": (lambda: DataLoader(DATA[:20], batch_size=BATCH, drop_last=True), Plan(of=5, samples=20)),
    "padding": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=padding(2)), Plan(of=2, left=15, doubled=1, samples=8)),
    "padding, another rank": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=padding(0)), Plan(of=2, left=15, samples=8)),
    "dropping": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=padding(2, drop_last=True)), Plan(of=2, left=16, samples=7)),
    "subset": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=SubsetRandomSampler(range(10))), Plan(of=3, left=13, samples=10)),
    "more than all": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=RandomSampler(DATA, num_samples=30)), Plan(of=8, doubled=7, samples=30)),
    "replacement": (lambda: DataLoader(DATA, batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * N, 25)), Plan(of=7, left=None, doubled=25, samples=25)),
    "batch sampler": (lambda: DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 5, True)), Plan(of=4, left=3, samples=20)),
    "own batch sampler": (lambda: DataLoader(DATA, batch_sampler=Pairs(True)), Plan(of=11, left=None)),
    "batches as samples": (
        lambda: DataLoader(TENSOR, batch_size=None, sampler=BatchSampler(RandomSampler(DATA), 5, False)), Plan(of=5, samples=23)
    ),
    "stream": (lambda: DataLoader(Stream(), batch_size=BATCH), Plan()),
    "stream, drop_last": (lambda: DataLoader(Stream(), batch_size=BATCH, drop_last=True), Plan(left=None)),
    "plain": (Plain, Plan(left=None)),
    "list": (lambda: [DATA[i : i + BATCH] for i in range(0, N, BATCH)], Plan()),
}  # fmt: skip


@pytest.mark.covers("I12")
@pytest.mark.parametrize("kind", LOADERS)
def test_plan_of_a_loader(kind: str) -> None:
    make, plan = LOADERS[kind]
    assert plan_of(make()) == plan
    assert plan_of(make(), "r7").loader == "r7"


@pytest.mark.covers("I12")
@pytest.mark.parametrize(
    "given", [[3, 4, 5], (3, 4, 5), np.array([3, 4, 5]), torch.tensor([3, 4, 5]), [torch.tensor(3), np.int32(4), 5], range(3, 6)]
)
def test_whole_numbers_of_any_kind_are_ids(given: Any) -> None:
    assert sample_ids(given, 3) == (3, 4, 5)


@pytest.mark.covers("I14")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1.0, 2.0, 3.7], "'float'"),
        (torch.tensor([1.5, 2.5, 3.5]), "'float'"),
        (["a", "b", "c"], "'str'"),
        ("abc", "no sequence"),
        (b"abc", "no sequence"),
        (None, "NoneType"),
        (3, "'int'"),
        (torch.tensor([[1], [2], [3]]), "'list'"),
        ([1, 2, 1 << 64], "63 bits"),
        ([1, 2], "2 numbers for a batch of 3 samples"),
        ([1, 2, 3, 4], "4 numbers for a batch of 3 samples"),
    ],
)
def test_what_is_no_id_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sample_ids(given, 3)


class Job:
    """One replica whose processes come and go; what it saved, its journal and its audit stay.

    Args:
        make: makes the loader.
    """

    def __init__(self, folder: Path, make: Make, **options: Any) -> None:
        self.folder, self.make, self.options = folder, make, options
        self.saved: list[tuple[Trajectory, dict[int, int], int]] = []
        self.entries: dict[int, bytes] = {}
        self.lives = 0
        self.start()

    def start(self, at: int = -1) -> None:
        """A process that goes on from what was saved, the newest or another."""
        self.lives += 1
        self.writer = AuditWriter(self.folder, "r0", member_id("r0"), 0, f"life{self.lives}", 1)
        self.replica = SoloReplica("job", "r0", f"life{self.lives}", self.writer.voting, self.writer.made)
        self.writer.open()
        if self.saved:
            trajectory, counts, samples = self.saved[at]
            opened = trajectory.open(f"{self.lives:08x}")
            self.writer.made(trajectory.h, opened.h, opened.step, ())
            self.replica.adopt(opened, counts, samples, opened.step)
        torch.manual_seed(5)
        loader = self.make()
        if isinstance(loader, ElasticLoader):
            self.feed: Any = ElasticFeed(
                loader,
                position=lambda: self.replica.samples,
                members=self.replica.members,
                votes=lambda: self.replica.votes,
                contribute=self.replica.contribute,
                drawn=self.drawn,
                record=self,
            )
            return
        options: dict[str, Any] = {"epochs": 3, "ids": lambda b: [b] if isinstance(b, int) else b} | self.options
        self.feed = BatchFeed(
            loader,
            journal=self.journal,
            recall=lambda n: max(((o, s) for o, s in self.entries.items() if o <= n), default=None),
            position=self.drawn,
            votes=lambda: self.replica.votes,
            contribute=self.replica.contribute,
            record=self,
            **options,
        )

    def journal(self, ordinal: int, state: bytes) -> None:
        self.entries = {o: s for o, s in self.entries.items() if o < ordinal} | {ordinal: state}

    def drawn(self) -> int:
        return self.replica.counts.get(self.replica.member, 0)

    def draw(self, *told: Any) -> None:
        self.writer.draw(*told)

    def end(self, *told: Any) -> None:
        self.writer.end(self.replica.trajectory.h, *told)

    def save(self) -> None:
        r = self.replica
        self.saved.append((r.trajectory, dict(r.counts), r.samples))

    def run(self, steps: int = 1000, draws: int = 1) -> bool:
        """Make steps; whether there were as many."""
        for _ in range(steps):
            try:
                for _ in range(draws):
                    next(self.feed)
            except StopIteration:
                return False
            self.replica.outcome()
        return True

    def audit(self, *ids: int) -> AuditReport:
        found = read_audit(self.folder)
        return judge_audit(found.uses, found.made, self.replica.trajectory.h, genesis("job").h, ids, ends=found.ends)


@pytest.mark.covers("F50", "I12")
@pytest.mark.parametrize("kind", LOADERS)
def test_killed_and_resumed_job_is_complete_whatever_its_loader_leaves_out(kind: str, tmp_path: Path) -> None:
    make, plan = LOADERS[kind]
    job = Job(tmp_path, make)
    dice = random.Random(kind)
    for _ in range(6):
        if not job.run(dice.randint(1, 4)):
            break
        job.save()
        job.run(dice.randint(0, 3))
        assert job.audit().exact
        job.start(dice.choice([-1, -1, -2]) if len(job.saved) > 1 else -1)
    job.run()
    report = job.audit()
    assert [e.state for e in report.epochs] == ["complete"] * 3, report
    for e in report.epochs:
        assert amount(e.left) == 0 or plan.left != 0
        assert (e.draws, e.of_draws) == ((plan.of,) * 2 if plan.of is not None else (e.draws, None))
    if plan.left == plan.doubled == 0 and kind != "drop_last of none":
        assert job.audit(*DATA).complete
        assert job.audit(*DATA, 99).epochs[0].missing == ((99, 99),)


def without(*bad: int) -> Callable[[Any], Any]:
    """A collate_fn that passes over samples that could not be read."""
    return lambda batch: [i for i in batch if i not in bad]


@pytest.mark.covers("I4", "I12")
@pytest.mark.parametrize("kind", ["whole", "drop_last", "padding", "subset", "replacement"])
@pytest.mark.parametrize("ever", [False, True])
def test_samples_that_batches_come_without_are_lost_and_not_left_out_on_purpose(kind: str, ever: bool, tmp_path: Path) -> None:
    make, plan = LOADERS[kind]
    loader, bad = make(), 7
    loader.collate_fn = without(bad) if ever else list
    job = Job(tmp_path, lambda: loader)
    job.run(2 * (plan.of or 0))
    loader.collate_fn = without(bad)
    job.run()
    epochs = job.audit().epochs
    if kind in ("whole", "subset"):  # others need not take it in each epoch
        assert [(e.of_handed or 0) - e.handed for e in epochs] == [int(ever), int(ever), 1]
        assert [e.missing for e in epochs] == ([()] * 3 if ever else [(), (), ((7, 7),)])
        assert all(e.left == () for e in epochs)
    assert [e.state for e in epochs] == ["wrong" if (e.of_handed or 0) > e.handed else "complete" for e in epochs]


@pytest.mark.covers("I12")
def test_batch_sampler_that_does_not_say_that_it_leaves_some_out_is_not_taken_to_do_so_on_purpose(tmp_path: Path) -> None:
    job = Job(tmp_path, lambda: DataLoader(DATA, batch_sampler=Pairs(False)))
    job.run()
    report = job.audit()
    assert (report.verdict, {amount(e.left) for e in report.epochs}) == ("unproven", {0})
    assert [(e.state, amount(e.missing)) for e in report.epochs] == [("unproven", 1)] * 3
    assert job.audit(*DATA).verdict == "wrong"


@pytest.mark.covers("I12")
def test_another_data_set_of_the_same_length_in_the_middle_of_an_epoch_is_seen(tmp_path: Path) -> None:
    off = [0]
    job = Job(tmp_path, lambda: DataLoader(TENSOR + off[0], batch_size=BATCH), epochs=2)
    job.run(3)
    job.save()
    off[0] = 100
    job.start()
    job.run()
    assert [(e.state, e.left, e.missing) for e in job.audit().epochs] == [("wrong", (), ((100, 111),)), ("wrong", (), ((0, 11),))]


@pytest.mark.covers("I12")
def test_shards_of_a_padding_sampler_are_complete_together(tmp_path: Path) -> None:
    uses: list[Use] = []
    made: list[Made] = []
    ends: list[End] = []
    for rank in range(3):
        job = Job(tmp_path / str(rank), lambda: DataLoader(DATA, batch_size=BATCH, sampler=padding(rank)))  # noqa: B023  # made at once
        job.run()
        found = read_audit(job.folder)
        uses += found.uses
        made, ends = found.made, [*ends, *found.ends]
    # as if each had been a rank of one group: the steps are those of any one
    ranks = [replace(u, rank=n * 3 // len(uses), ranks=3) for n, u in enumerate(uses)]
    report = judge_audit(ranks, made, made[-1].after, genesis("job").h, DATA, ends=[replace(e, rank=n) for n, e in enumerate(ends)])
    assert [(e.state, amount(e.once) + amount(e.padded), e.missing) for e in report.epochs] == [("complete", N, ())] * 3


@pytest.mark.covers("I12")
@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("alike", [True, False])
def test_ranks_that_draw_the_same_samples_count_once_where_they_say_so_and_not_by_their_ids(
    said: bool, alike: bool, tmp_path: Path
) -> None:
    """Four ranks: two parts of the data, each for two ranks."""
    uses: list[Use] = []
    ends: list[End] = []
    made: list[Made] = []
    for rank in range(4):
        part = rank // 2
        data = DATA[part::2]
        seed = part if alike else rank
        job = Job(
            tmp_path / str(rank),
            lambda: DataLoader(data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed)),  # noqa: B023  # made at once
            **({"ranks": 2, "own": part} if said else {}),
        )
        job.run()
        found = read_audit(job.folder)
        uses += [replace(u, rank=rank, ranks=4) for u in found.uses]
        ends += [replace(e, rank=rank) for e in found.ends]
        made = found.made
    report = judge_audit(uses, made, made[-1].after, genesis("job").h, ends=ends)
    if said and alike:
        assert report.complete
        assert [(e.once, e.handed, e.of_handed, e.draws, e.of_draws) for e in report.epochs] == [(((0, N - 1),), N, N, 6, 6)] * 3
    else:
        assert [e.state for e in report.epochs] == ["wrong"] * 3
        assert all(amount(e.repeated) == N for e in report.epochs)


@pytest.mark.covers("I12")
def test_another_data_set_of_the_same_length_is_another_by_its_ids_alone(tmp_path: Path) -> None:
    off = [0]
    job = Job(tmp_path, lambda: DataLoader(TENSOR + off[0], batch_size=BATCH), epochs=1)
    off[0] = 100
    job.start()
    job.run()
    assert job.audit().epochs[0].samples is None  # the verb says then that ids were not checked
    assert job.audit(*DATA).verdict == "wrong"


@pytest.mark.covers("I12")
def test_loader_that_begins_anew_where_it_was_to_go_on_is_caught(tmp_path: Path) -> None:
    class Forgetful(Plain):
        """Says that it went back to where it was, and shuffles once more."""

        def state_dict(self) -> dict[str, int]:
            return {"epoch": self.epoch}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.epoch = state["epoch"] + 50

    job = Job(tmp_path, Forgetful)
    job.run(3)
    job.save()
    job.start()
    job.run()
    report = job.audit(*DATA)
    assert report.verdict == "wrong"
    assert report.epochs[0].repeated


@pytest.mark.covers("I12")
@pytest.mark.parametrize("drop", [False, True])
def test_shared_order_that_drops_the_rest_of_an_epoch(drop: bool, tmp_path: Path) -> None:
    job = Job(tmp_path, lambda: ElasticLoader(torch.arange(N), ElasticSampler(N, seed=1, batch_size=BATCH, drop_last=drop, epochs=3)))
    job.run(7)
    job.save()
    job.run(2)
    job.start()
    assert [e.state for e in job.audit().epochs] == ["complete", "in progress"]
    job.run()
    report = job.audit()
    assert [(e.state, e.samples, amount(e.left)) for e in report.epochs] == [("complete", N, 3 if drop else 0)] * 3


@pytest.mark.covers("I12")
def test_several_draws_of_a_step_and_steps_without_any(tmp_path: Path) -> None:
    job = Job(tmp_path, LOADERS["whole"][0], draws_per_step=2)
    job.replica.outcome()
    job.run(4, draws=2)
    job.replica.outcome()
    report = job.audit()
    assert (report.verdict, report.steps, report.idle) == ("exact", 4, 2)
    assert [(e.state, e.draws) for e in report.epochs] == [("complete", 6), ("in progress", 2)]


@pytest.mark.covers("I14")
def test_batch_whose_ids_were_refused_is_handed_out_later(tmp_path: Path) -> None:
    given: list[Any] = [[0.5] * BATCH]
    job = Job(tmp_path, LOADERS["whole"][0], ids=lambda b: given.pop() if given else b)
    with pytest.raises(ConfigError, match="whole numbers"):
        job.run(1)
    job.run()
    assert job.audit(*DATA).complete
