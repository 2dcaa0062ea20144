"""Accelerators copy behind training's back: what is stored is what was there at save(), and the agent hears of it once it is complete.

The device is stood in for by one whose copies are made when somebody on the main thread waits for them, and not before.
"""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from ftckpt import errors
from ftckpt.commitlog.memory import MemoryLog
from ftckpt.config import Settings
from ftckpt.domain.deadlines import Deadlines
from ftckpt.domain.policy import AtEnd, Every, Never
from ftckpt.trainer import copying, events, image_plan
from ftckpt.trainer.background import Background
from ftckpt.trainer.checkpointer import Checkpointer
from ftckpt.trainer.group import Group
from ftckpt.trainer.healing import HealCarrier
from ftckpt.trainer.joining import Joining
from ftckpt.trainer.loaders import Loaders
from ftckpt.trainer.rank import Rank
from ftckpt.trainer.replicas.solo import SoloReplica
from ftckpt.trainer.session import Session
from ftckpt.trainer.states import StateRegistry
from ftckpt.trainer.tail import TailReader
from ftckpt.trainer.training import Training


class Device:
    """One accelerator: copies queue up until somebody on the main thread asks for an event behind them."""

    def __init__(self):
        self.queue, self.main, self.broken, self.stuck = [], threading.get_ident(), None, False
        self.idle = threading.Event()  # lets others than the main thread come back from waiting

    def install(self, patch):
        runtime = SimpleNamespace(
            Stream=lambda device: SimpleNamespace(wait_stream=lambda other: None),
            current_stream=lambda device: None,
            stream=lambda stream: contextlib.nullcontext(),
            Event=lambda: SimpleNamespace(record=lambda stream: None, query=self.query),
        )
        patch.setattr(torch, "get_device_module", lambda device: runtime)
        patch.setattr(copying, "enqueue", lambda targets, sources: self.queue.append((targets, sources)))
        batches = image_plan._batches

        def on_device(pieces, *, frozen):
            return [batch._replace(device=torch.device("xpu", 0)) for batch in batches(pieces, frozen=frozen)]

        patch.setattr(image_plan, "_batches", on_device)

    def query(self):
        if self.stuck or (threading.get_ident() != self.main and not self.idle.is_set()):
            return False
        if self.broken is not None:
            raise self.broken
        while self.queue:
            torch._foreach_copy_(*self.queue.pop(0))
        return True


class Agent:
    """Takes messages, in order, with the bytes as they are when they come."""

    stray, alive, reattached, tail, url = None, True, False, None, "here"

    def __init__(self):
        self.arena, self.pending, self.told, self.owed, self.free, self.bytes = None, [], [], [], [], []
        self.config = SimpleNamespace(rank=0, group_world_size=1, replica="a", job="job", incarnation="ab" * 16)
        self.refuse = None

    def attach(self, arena):
        self.arena, self.free = arena, list(range(arena.slots))
        self.told.append("attach")

    def layout(self, table, states):
        self.size = table.image_bytes
        return 1

    def acquire_slot(self, timeout):
        return self.free.pop(0) if self.free else None

    def release_slot(self, slot):
        self.free.append(slot)

    def check_slot(self, slot):
        pass

    def save(self, *, slot, **options):
        if self.refuse is not None:
            raise self.refuse
        self.told.append("save")
        self.bytes.append(bytes(self.arena.slot(slot)[: self.size]))
        self.free.append(slot)
        return SimpleNamespace(state="persisted", done=True, entry=None, seconds=0.0, location="there", wait=lambda *rest: "persisted")

    def owe(self, error, seen=None):
        self.owed.append((error, seen))

    def raise_pending(self):
        while self.owed:
            error, seen = self.owed.pop(0)
            if seen is None or not seen.reported:
                raise error

    def warnings(self):
        return ()

    def drain(self, seconds, *, whole=None):
        self.told.append("drain")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **options: self.told.append(name)


class World:
    """A rank without a process beside it: one model, its optimizer, one resumed step."""

    def __init__(self, policy=None, slots=2, **deadlines):
        self.agent, self.net = Agent(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.5)
        rank = Rank.__new__(Rank)
        rank.settings, rank.group, rank.registry, rank.loaders, rank.events = (
            Settings(slots=slots, deadlines=Deadlines(**deadlines)),
            Group().open(),
            StateRegistry(),
            Loaders(),
            events.Events(),
        )
        rank.registry.add("model", self.net)
        rank.session = Session(self.agent, rank.registry, rank.group, rank.settings)
        rank.tail = TailReader(MemoryLog("job"), self.agent)
        rank.background = Background(rank.session, rank.tail, rank.events, rank.group)
        rank._replica = SoloReplica("job", "a", rank.group.incarnation)
        store = SimpleNamespace(close=lambda: None)
        rank.training = Training(
            rank.settings, policy or Never(), rank.group, store, rank.session, rank.loaders, rank.tail, rank.background, rank.events
        )
        rank._finishing = SimpleNamespace(wait=lambda *rest: self.agent.told.append("await"))
        rank._closed, rank.resumed, rank.reads_only = False, True, False
        rank.ledger = rank.log = rank.store = SimpleNamespace(close=lambda: None)
        rank.training.begin(rank._replica, SimpleNamespace(generation=None, step=0))
        rank.session.prepare(rank.session.full)
        self.rank, self.session, self.ckpt = rank, rank.session, Checkpointer(rank)
        self.heard = []
        self.ckpt.on(events.Captured, lambda event: self.heard.append(event.step))

    def shown(self):
        """What an image of the state as it is now would be."""
        plan = self.session.full.prepare()
        memory = bytearray(plan.table.image_bytes)
        for batch in (*plan.live, *plan.frozen):
            for view, source in zip(
                image_plan.image_views(torch.frombuffer(memory, dtype=torch.uint8), batch.pieces), batch.sources, strict=True
            ):
                view.copy_(source)
        return bytes(memory)

    def train(self):
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def overwrite(self):
        """As a restore does, where torch does not count it."""
        for parameter in self.net.parameters():
            parameter.data.zero_()

    @property
    def saves(self):
        return self.agent.told.count("save")


@pytest.fixture
def device(monkeypatch):
    found = Device()
    found.install(monkeypatch)
    yield found
    found.broken, found.stuck = None, False
    found.queue.clear()
    found.idle.set()


@pytest.fixture
def world(device):
    made = World()
    yield made
    device.broken, made.agent.refuse = None, None
    with contextlib.suppress(errors.FtckptError):
        made.ckpt.close()


def arrive(world):
    joining = Joining.__new__(Joining)
    joining._session, joining._reload = world.session, lambda index: world.overwrite()
    return joining


def receive(world, monkeypatch):
    from ftckpt.trainer import healing

    monkeypatch.setattr(healing, "fetch", lambda *args, **options: world.overwrite() or 1 / 0)
    peers = SimpleNamespace(urls=list, secret=lambda: b"")
    carrier = HealCarrier(world.session, trajectory=lambda: None, peers=peers)
    with pytest.raises(ZeroDivisionError):
        carrier.fetch('{"url": "there", "replica": "b", "rank": 0}', 1, 1.0, lambda state: None)


def restored(world, monkeypatch):
    from ftckpt.trainer import joining as module

    class Arrived(SimpleNamespace):
        pass

    monkeypatch.setattr(module, "Arrived", Arrived)
    monkeypatch.setattr(module, "restore", lambda *args, **options: world.overwrite() or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        arrive(world)._load_arrived(Arrived(image=None, leaves={}, states={}, placed={}, release=lambda: None))


PLACES = {
    "an optimizer's step": lambda world, patch: world.train(),
    "a step of an optimizer that is not registered": lambda world, patch: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).step(),
    "ckpt.step()": lambda world, patch: world.ckpt.step(),
    "ckpt.captured()": lambda world, patch: world.ckpt.captured(),
    "close": lambda world, patch: world.ckpt.close(),
    "close after an error": lambda world, patch: world.rank.close(ending=False),
    "resume, load_ahead, warm_start": lambda world, patch: world.rank.await_agent(),
    "heal: the boundary": lambda world, patch: HealCarrier(world.session, trajectory=lambda: None, peers=None).freeze(),
    "heal: a buffer": lambda world, patch: world.session.slot(0.0),
    "heal: receiving": receive,
    "heal: restoring": restored,
    "reload": lambda world, patch: arrive(world)._load_tail(1),
    "another agent": lambda world, patch: patch.setattr(world.agent, "reopen", lambda: world.agent) or world.session.revive(),
}


@pytest.mark.covers("I5", "I6")
@pytest.mark.parametrize("place", PLACES)
def test_the_fence_is_passed_before(world, monkeypatch, place):
    before = world.shown()
    handle = world.ckpt.save()
    assert handle.in_flight
    assert not handle.done
    assert world.saves == 0
    assert world.ckpt.waiting == 1
    PLACES[place](world, monkeypatch)
    assert world.agent.bytes == [before]
    assert not handle.in_flight
    assert world.ckpt.waiting == 0
    told = world.agent.told
    assert all(told.index("save") < told.index(word) for word in ("drain", "await", "close") if word in told)


@pytest.mark.covers("I5", "I6")
@pytest.mark.parametrize("look", [lambda handle: handle.captured, lambda handle: handle.wait(1.0, until="persisted") is None])
def test_whoever_asks_a_handle_waits_for_the_copy(world, look):
    before = world.shown()
    handle = world.ckpt.save()
    assert look(handle)
    assert world.agent.bytes == [before]
    assert handle.location == "there"


@pytest.mark.covers("I5", "I11")
@pytest.mark.parametrize("slots", [1, 2])
def test_the_next_save_hands_the_last_one_over_first(device, slots):
    world = World(slots=slots)
    images = []
    for _ in range(4):
        images.append(world.shown())
        world.ckpt.save()
        assert world.saves == len(images) - 1
        world.train()
        assert world.agent.bytes == images
    world.ckpt.save()
    world.ckpt.save()
    assert world.saves == 5
    world.ckpt.close()
    assert world.saves == 6
    assert not hooks


@pytest.mark.covers("I5", "I6")
@pytest.mark.parametrize("slots", [1, 2])
def test_of_two_saves_in_a_row_each_has_what_was_there_when_it_was_made(device, slots):
    world = World(slots=slots)
    images, handles = [], []
    for _ in range(2):  # no optimizer's step between them, only what forward changes
        images.append(world.shown())
        handles.append(world.ckpt.save())
        world.net(torch.ones(3, 4))
    assert [h.in_flight for h in handles] == [False, True]
    assert world.agent.bytes == images[:1]
    world.train()
    assert world.agent.bytes == images
    assert images[0] != images[1]
    assert all(h.captured for h in handles)
    world.ckpt.close()


def changed_in_place(world, device):
    with torch.no_grad():
        world.net[0].weight.mul_(2.0)


FAILURES = {
    "a change in place": (changed_in_place, errors.SaveFailed),
    "the device": (lambda world, device: setattr(device, "broken", RuntimeError("illegal access")), errors.SaveFailed),
    "the agent": (lambda world, device: setattr(world.agent, "refuse", errors.AgentError("it has gone")), errors.AgentError),
}


@pytest.mark.covers("I14", "I5")
@pytest.mark.parametrize("failure", FAILURES)
def test_the_failure_of_the_first_of_two_saves_is_raised_by_the_second_once_and_the_third_is_stored(device, failure):
    world, (fail, error) = World(slots=2), FAILURES[failure]
    first = world.ckpt.save()
    fail(world, device)
    with pytest.raises(error):
        world.ckpt.save()
    assert first.done
    assert not first.captured
    device.broken = world.agent.refuse = None
    image = world.shown()
    third = world.ckpt.save()
    world.train()
    assert third.captured
    assert world.agent.bytes == [image]
    world.ckpt.step()  # nothing is owed any more
    world.ckpt.close()


@pytest.mark.covers("I14", "I5")
def test_a_step_saves_though_the_save_of_the_step_before_failed_and_tells_of_that_once(device):
    world = World(policy=Every(1))
    world.ckpt.step()
    changed_in_place(world, device)
    world.train()
    image = world.shown()
    with pytest.raises(errors.SaveFailed, match=r"step 1: 'model/0\.weight' was changed"):
        world.ckpt.step()
    world.train()
    assert world.agent.bytes == [image]
    world.ckpt.step()
    assert world.heard == [2]
    world.ckpt.close()
    assert world.heard[:1] == [2]


@pytest.mark.covers("I5")
def test_what_forward_changes_is_held_apart_before_save_returns(world):
    before = world.shown()
    world.ckpt.save()
    world.net(torch.ones(3, 4))  # moves the statistics of the batch norm
    assert world.shown() != before
    world.ckpt.captured()
    assert world.agent.bytes == [before]


@pytest.mark.covers("I5", "I14")
def test_a_change_by_others_than_an_optimizer_is_found_and_not_stored(world):
    handle = world.ckpt.save()
    with torch.no_grad():
        world.net[0].weight.mul_(2.0)
    world.train()  # raises nothing: a step that was voted on is made
    with pytest.raises(errors.SaveFailed, match=r"model/0.weight.*changed in place"):
        world.ckpt.step()
    assert world.saves == 0
    assert not handle.captured
    assert handle.done
    assert len(world.agent.free) == 2
    world.ckpt.save()
    world.ckpt.captured()
    assert world.saves == 1


@pytest.mark.covers("I6")
def test_a_save_is_handed_over_though_nothing_else_is_called(device, world):
    before = world.shown()
    handle = world.ckpt.save()
    device.idle.set()
    for thread in threading.enumerate():
        if thread.name == "ftckpt-fence":
            thread.join(30.0)
    assert not handle.in_flight
    assert world.agent.bytes == [before]
    assert world.heard == []  # callbacks run on the main thread, in calls
    world.ckpt.step()
    assert world.heard == [handle.step]


@pytest.mark.covers("I14")
@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("kind", ["device", "agent"])
def test_what_goes_wrong_behind_save_is_raised_once(device, world, kind, seen):
    if kind == "device":
        device.broken, error = RuntimeError("illegal access"), errors.SaveFailed
    else:
        world.agent.refuse, error = errors.AgentError("it has gone"), errors.AgentError
    handle = world.ckpt.save()
    world.train()
    assert not handle.captured
    assert handle.done
    if seen:
        with pytest.raises(error):
            handle.wait(1.0)
    else:
        with pytest.raises(error):
            world.ckpt.step()
    world.ckpt.step()
    device.broken = world.agent.refuse = None
    assert world.saves == 0
    assert world.heard == []


@pytest.mark.covers("I14")
def test_close_raises_what_the_last_copy_came_to(device):
    world = World(policy=AtEnd())
    world.ckpt.step()
    device.broken = RuntimeError("illegal access")
    with pytest.raises(errors.SaveFailed, match="illegal access"):
        world.ckpt.close()


@pytest.mark.covers("I11", "I14")
def test_a_device_that_never_ends_its_copies_holds_nobody_up_for_longer_than_the_deadline(device):
    world = World(slots=1, capture_s=0.05)
    device.stuck = True
    handle = world.ckpt.save()
    world.train()  # raises nothing
    assert handle.done
    assert not handle.captured
    assert world.agent.free == []  # the device may write there yet
    with pytest.raises(errors.DeadlineExceeded, match="step 0: the device has not made") as e:
        world.ckpt.step()
    assert "capture_s" in e.value.todo
    world.ckpt.close()
    assert world.saves == 0


@pytest.mark.covers("I11", "I5")
def test_a_source_whose_device_never_ends_its_copies_gives_the_buffer_to_nobody_else(device):
    world = World(slots=1, capture_s=0.05)
    carrier = HealCarrier(world.session, trajectory=lambda: None, peers=None)
    carrier.freeze()
    device.stuck = True
    with pytest.raises(errors.DeadlineExceeded, match="copies"):
        carrier.publish(1, {}, 1.0)
    assert world.agent.free == []
    world.ckpt.close()


def test_on_a_cpu_save_itself_hands_over_and_nothing_is_added(monkeypatch):
    monkeypatch.setattr(Session, "hold", lambda *args: pytest.fail("held back"))
    world = World(policy=Every(1))
    image = world.shown()
    world.ckpt.step()
    assert world.agent.bytes == [image]
    assert world.heard == [1]
    assert world.agent.told[-2:] == ["save", "live"]
    assert not hooks
    world.agent.refuse = errors.AgentError("it has gone")
    with pytest.raises(errors.AgentError):
        world.ckpt.save()
    world.agent.refuse = None
    world.ckpt.close()
