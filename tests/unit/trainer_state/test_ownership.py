"""Who writes what: every name and slice exactly once, whatever the ranks hold; agreed on without a collective."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from state_tools import Saved, image_of, registry, same_nested, take
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ftckpt.errors import DeadlineExceeded, Mismatch
from ftckpt.format.merging import decode_part, held, merge_parts
from ftckpt.trainer.capture import Capturer
from ftckpt.trainer.group import Group
from ftckpt.trainer.layout import Claim, Ownership, _runs


def save_together(builds, deadline=10.0):
    """Ranks of one group as threads, each with its own registry; what they saved, put together."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))

    def one(rank):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        with Group(rank, len(builds), store, deadline) as group:
            plan, leaves, memory = take(Capturer(registry(**builds[rank]), group))
            return plan, decode_part(leaves, f"rank {rank}"), memory

    with ThreadPoolExecutor(len(builds)) as pool:
        parts = list(pool.map(one, range(len(builds))))
    tables = [plan.table for plan, _, _ in parts]
    names = [n for t in tables for n in (*(e.name for e in t.tensors), *t.aliases)]
    assert len(names) == len(set(names)), "a name is written twice"
    leaves, states = merge_parts({rank: part for rank, (_, part, _) in enumerate(parts)}, lambda: held(tables))
    return Saved([image_of(p.table, m) for p, _, m in parts], leaves, states or parts[0][0].states), names


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def stepped(module):
    opt = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    opt.step()
    return opt


def test_replicated_ranks_share_the_writing_and_the_lowest_writes_buffers_and_trees():
    models = [net(1) for _ in range(3)]
    builds = [{"model": m, "optimizer": stepped(m), "tree": {"n": 0, "t": torch.ones(2)}} for m in models]
    saved, names = save_together(builds)
    assert len(names) == 6 + 3 + 6 * 3 + 1  # parameters, buffers, three values of state per parameter, the tree's tensor
    assert all(image.table.tensors for image in saved.images)
    assert {"model/1.running_mean", "model/1.num_batches_tracked", "tree/t"} <= {e.name for e in saved.images[0].table.tensors}
    fresh, tree = net(2), {}
    opt = torch.optim.AdamW(fresh.parameters())
    saved.load(registry(model=fresh, optimizer=opt, tree=tree))
    assert same_nested(dict(fresh.state_dict()), dict(models[0].state_dict()))
    assert same_nested(opt.state_dict(), builds[0]["optimizer"].state_dict())
    assert tree["n"] == 0


@pytest.mark.covers("A13", "C1")
def test_stages_of_a_pipeline_on_different_ranks_become_one_state():
    whole = [net(1), net(1)]
    stages = [nn.ModuleDict({"0": whole[0][0]}), nn.ModuleDict({"1": whole[1][1], "2": whole[1][2]})]
    opts = []
    for stage in stages:
        opts.append(torch.optim.AdamW(stage.parameters(), lr=0.1, weight_decay=0.3))
        sum(p.square().sum() for p in stage.parameters()).backward()
        opts[-1].step()
    saved, _ = save_together([{"model": s, "optimizer": o} for s, o in zip(stages, opts, strict=True)])
    fresh = net(2)
    opt = torch.optim.AdamW(fresh.parameters())
    saved.load(registry(model=fresh, optimizer=opt))
    assert same_nested(dict(fresh.state_dict()), {**stages[0].state_dict(), **stages[1].state_dict()})
    assert opt.param_groups[0]["weight_decay"] == 0.3
    assert same_nested(opt.state[fresh[2].weight], dict(opts[1].state[stages[1]["2"].weight]))


class Noted(nn.Linear):
    """A layer with a value beside its tensors."""

    note = "x"

    def get_extra_state(self):
        return {"note": self.note}

    def set_extra_state(self, state):
        self.note = state["note"]


def unlike(**of_ranks):
    """What two or three ranks with shared states of these values save together; those not given are alike."""
    builds = []
    for rank in range(len(next(iter(of_ranks.values())))):
        values = {name: given[rank] for name, given in of_ranks.items()}
        torch.manual_seed(0)
        model = Noted(2, 2)
        model.note = values.get("note", "x")
        opt = torch.optim.SGD(model.parameters(), lr=values.get("lr", 0.1))
        opt.state[model.weight] = {"count": values.get("count", 1)}
        opt.state["all"] = values.get("all", 1)
        builds.append({"model": model, "opt": opt, "d": {"in": values.get("d", 1)}, **values.get("more", {})})
    return save_together(builds)[0]


LONG = list(range(1000))


@pytest.mark.covers("F43", "I5", "I14")
@pytest.mark.parametrize(
    ("of_ranks", "says"),
    [({"d": [1, 1, 2]}, r"d/in differs between rank 0 and rank\(s\) 2$"), ({"d": [{"a": 1}, {"a": 2}, {"a": 3}]}, r"d/in/a differs between rank 0 and rank\(s\) 1, 2$"),
     ({"d": [LONG, [*LONG, 1]]}, "d/in differs between rank 0"), ({"d": [{"x": LONG, "y": 1}, {"x": LONG[1:], "y": 1}]}, "d/in/x differs"),
     ({"d": [{str(n): n for n in range(900)}, {str(n): n for n in range(1, 900)}]}, "d/in differs"), ({"d": [1, 1.0]}, "d/in differs"),
     ({"lr": [0.1, 0.2]}, r"opt/groups/\w{8}/~i0/options/lr differs between rank 0 and rank\(s\) 1$"), ({"note": ["x", "y"]}, "model/_extra_state/note differs"),
     ({"count": [1, 2]}, r"opt/state/weight/count differs between rank \d and rank\(s\) \d$"), ({"all": [1, 2]}, "opt/loose differs between rank 0"),
     ({"d": [{}, {"t": torch.ones(1)}]}, r"d/in/t is on rank 1 and not on the one that writes, and holds tensors \(d/in/t\)$"),
     ({"d": [{}, {"t": LONG}]}, "d/in/t is on rank 1 and not on the one that writes, and is long$"),
     ({"d": [torch.ones(2), torch.ones(3), torch.ones(3)]}, r"d/in is float32 \[2\] on rank 0 and float32 \[3\] on rank\(s\) 1, 2$"),
     ({"d": [{"l": LONG, "t": torch.ones(2, dtype=dtype)} for dtype in (torch.int8, torch.bool)]}, r"d/in/t is int8 \[2\] on rank 0 and bool \[2\] on rank\(s\) 1$"),
     ({"d": [[one := torch.ones(2), one], [torch.ones(2), torch.ones(1)]]}, r"d/in/~i1 is float32 \[2\] on rank 0 and float32 \[1\] on rank\(s\) 1$"),
     ({"lr": [torch.tensor(0.1), torch.tensor(0.1).double()]}, r"opt/groups/\w{8}/0/lr is float32 \[\] on rank 0 and float64 \[\] on rank\(s\) 1$"),
     ({"note": [torch.ones(2), torch.ones(2, 1)]}, r"model/_extra_state/note is float32 \[2\] on rank 0 and float32 \[2, 1\] on rank\(s\) 1$"),
     ({"count": [[torch.ones(2)], [torch.ones(1)]]}, r"opt/state/weight/count/~i0 is float32 \[\d\] on rank \d and float32 \[\d\] on rank\(s\) \d$")],
    ids=range(18),
)  # fmt: skip
def test_a_shared_value_that_is_not_alike_on_all_ranks_is_refused_with_its_key_and_the_ranks(of_ranks, says):
    with pytest.raises(Mismatch, match=f"(?m)  (?:{says})"):
        unlike(**of_ranks)


@pytest.mark.covers("F43")
def test_keys_that_only_some_ranks_have_are_put_together_and_alike_ranks_are_taken_as_they_are():
    value = {"same": LONG, "deep": {str(n): LONG for n in range(3)}, (1, 2): 5, "t": torch.ones(2)}
    saved = unlike(d=[dict(value, a=1), dict(value, b={"c": 2.5}), dict(value, a=1, **{"$d": 3})])
    live = {}
    saved.load(registry(d=live), only=["d"])
    assert same_nested(live["in"], {**value, "a": 1, "b": {"c": 2.5}, "$d": 3})


@pytest.mark.covers("F43")
def test_a_tensor_that_another_rank_writes_is_compared_as_it_is_now():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    trees = [{"t": torch.zeros(2)} for _ in range(2)]

    def one(rank):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        with Group(rank, 2, store, 10.0) as group:
            capturer = Capturer(registry(tree=trees[rank]), group)
            found = []
            for now in (torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.float16), torch.zeros(2)):
                trees[rank]["t"] = now if rank else torch.ones(2)
                plan, leaves, _ = take(capturer)
                found.append((plan.table, decode_part(leaves, f"rank {rank}"), leaves))
            return found

    with ThreadPoolExecutor(2) as pool:
        rounds = list(zip(*pool.map(one, range(2)), strict=True))
    for number, ranks in enumerate(rounds):
        parts, tables = {rank: part for rank, (_, part, _) in enumerate(ranks)}, [table for table, _, _ in ranks]
        if number == 2:
            with pytest.raises(Mismatch, match=r"tree/t is float32 \[2\] on rank 0 and float16 \[2\] on rank\(s\) 1"):
                merge_parts(parts, lambda tables=tables: held(tables))
        else:
            merge_parts(parts, lambda tables=tables: held(tables))


def test_a_state_that_only_one_rank_has_is_stored_with_its_kind():
    saved = unlike(more=[{}, {"mine": {"n": 7}, "net": nn.Linear(1, 1)}])
    live = {"n": 0}
    report = saved.load(registry(mine=live, net=nn.Linear(1, 1)))
    assert live == {"n": 7}
    assert report.states["net"].loaded == 2


def test_a_weight_tied_on_one_rank_only_is_stored_under_both_names():
    tied = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    tied["head"].weight = tied["embed"].weight
    alone = nn.ModuleDict({"head": nn.Linear(3, 3, bias=False)})
    alone["head"].weight.data = tied["head"].weight.data.clone()
    saved, names = save_together([{"model": tied}, {"model": alone}])
    assert sorted(names) == ["model/embed.weight", "model/head.weight"]
    fresh = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    saved.load(registry(model=fresh))
    assert torch.equal(fresh["embed"].weight, fresh["head"].weight)


def test_one_name_for_different_things_is_refused_on_every_rank():
    with pytest.raises(Mismatch, match=r"model/weight is float32 \(2, 2\) on rank 0"):
        save_together([{"model": nn.Linear(2, 2)}, {"model": nn.Linear(3, 2)}])


def test_a_rank_that_does_not_announce_its_names_is_named():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))

    def one(rank):
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        with Group(rank, 2, store, 1.0) as group:
            if rank == 1:
                return None
            with pytest.raises(DeadlineExceeded, match=r"layout/0/digest.* from rank 1"):
                Capturer(registry(model=nn.Linear(2, 2)), group).prepare()
            return None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


NAMES = st.sampled_from("abcdef")


@given(st.lists(st.lists(st.sets(NAMES, min_size=1, max_size=3), max_size=3), min_size=1, max_size=4))
def test_every_name_has_exactly_one_writer_and_shared_names_go_together_or_stand_apart(ranks):
    claims = []
    for groups in ranks:
        mine: dict[str, Claim] = {}
        for group in groups:
            free = sorted(group - mine.keys())
            mine |= {name: Claim("k", tuple(free)) for name in free}
        claims.append(mine)
    owners = [Ownership(r, claims) for r in range(len(claims))]
    for name in {n for c in claims for n in c}:
        writers = [r for r, c in enumerate(claims) if name in c and owners[r].mine(name)]
        assert len(writers) == 1
        claim = claims[writers[0]][name]
        if not owners[writers[0]].apart(name):
            assert all(owners[writers[0]].mine(n) and not owners[writers[0]].apart(n) for n in claim.names)


@given(st.integers(0, 23), st.integers(1, 4), st.integers(1, 3), st.sampled_from(["shard", "strided"]))
def test_the_runs_of_all_ranks_cover_a_dimension_exactly_once(size, first, second, kind):
    placement = Shard(0) if kind == "shard" else _StridedShard(0, split_factor=second)
    seen = []
    for a in range(first):
        for b in range(second):
            cuts = [(placement, first, a), (Shard(0), second, b)]
            seen += [i for begin, end in _runs(size, cuts) for i in range(begin, end)]
    assert sorted(seen) == list(range(size))
