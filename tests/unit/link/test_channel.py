"""Frames over a socket: whole, bounded, in time, or a clear error."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import AgentError
from ftckpt.link import channel as channel_module
from ftckpt.link import messages as m
from ftckpt.link.channel import Channel, ChannelClosed

Pair = tuple["Channel[m.ToTrainer]", "Channel[m.ToAgent]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = socket.socketpair()
    trainer: Channel[m.ToTrainer] = Channel(one, m.ToTrainer, "agent")
    agent: Channel[m.ToAgent] = Channel(two, m.ToAgent, "trainer")
    yield trainer, agent
    trainer.close()
    agent.close()


def receive(channel: Channel[m.ToAgent], count: int, timeout: float = 10.0) -> list[m.ToAgent]:
    found: list[m.ToAgent] = []
    end = time.monotonic() + timeout
    while len(found) < count and time.monotonic() < end:
        found += channel.receive(0.5)
    return found


@given(st.lists(st.binary(max_size=3000), max_size=30))
def test_messages_arrive_whole_and_in_order(states: list[bytes]) -> None:
    one, two = socket.socketpair()
    trainer: Channel[m.ToTrainer] = Channel(one, m.ToTrainer, "agent")
    agent: Channel[m.ToAgent] = Channel(two, m.ToAgent, "trainer")
    sent = [m.Draw(ordinal=i, state=s) for i, s in enumerate(states)]
    for message in sent:
        trainer.send(message, timeout=5.0)
    assert receive(agent, len(sent)) == sent
    trainer.close()
    agent.close()


def test_message_of_many_megabytes_passes(pair: Pair) -> None:
    trainer, agent = pair
    message = m.Draw(ordinal=1, state=os.urandom(32 << 20))
    sender = threading.Thread(target=lambda: trainer.send(message, timeout=20.0))
    sender.start()
    assert receive(agent, 1) == [message]
    sender.join(5.0)


def test_descriptors_arrive_with_their_messages(pair: Pair) -> None:
    trainer, agent = pair
    files = [os.memfd_create(f"f{i}", os.MFD_CLOEXEC) for i in range(3)]
    for i, fd in enumerate(files):
        os.write(fd, b"%d" % i)
        trainer.send(m.Attach(arena=i, slots=1, slot_bytes=1), fds=(fd,), timeout=5.0)
        os.close(fd)
        trainer.send(m.Draw(ordinal=i, state=b""), timeout=5.0)
    got = receive(agent, 6)
    assert [type(g).__name__ for g in got] == ["Attach", "Draw"] * 3
    for i in range(3):
        fd = agent.take_fd()
        assert os.pread(fd, 10, 0) == b"%d" % i
        assert not os.get_inheritable(fd)
        os.close(fd)
    with pytest.raises(AgentError, match="sent none"):
        agent.take_fd()


@pytest.mark.covers("F21", "I11")
def test_send_to_one_that_does_not_read_ends_at_the_deadline(pair: Pair) -> None:
    trainer, _ = pair
    began = time.monotonic()
    with pytest.raises(AgentError, match=r"took no message for 0\.3 s"):
        trainer.send(m.Draw(ordinal=1, state=bytes(8 << 20)), timeout=0.3)
    assert 0.2 < time.monotonic() - began < 2.0
    with pytest.raises(ChannelClosed):
        trainer.send(m.Bye(), timeout=0.3)


@pytest.mark.covers("I6")
def test_what_was_sent_is_read_though_the_sender_has_gone(pair: Pair) -> None:
    trainer, agent = pair
    for i in range(20):
        trainer.send(m.Draw(ordinal=i, state=b"x" * 1000), timeout=5.0)
    agent.post(m.Bye())
    agent.flush()  # unread input at the sender makes its close a reset
    trainer.close()
    assert len(receive(agent, 20)) == 20
    with pytest.raises(ChannelClosed):
        agent.receive(1.0)


@pytest.mark.covers("I10")
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1", "cannot be read"),
        (struct.pack("<I", 0xFFFFFFFF), "the limit is"),
        (struct.pack("<I", 11) + msgspec.msgpack.encode({"type": "Nope"}), "cannot be read"),
    ],
)
def test_input_of_another_protocol_is_an_error_not_a_crash(data: bytes, text: str) -> None:
    one, two = socket.socketpair()
    agent: Channel[m.ToAgent] = Channel(two, m.ToAgent, "trainer")
    one.sendall(data)
    with pytest.raises(AgentError, match=text):
        agent.receive(1.0)
    one.close()
    agent.close()


def test_messages_before_a_bad_frame_are_returned_first() -> None:
    one, two = socket.socketpair()
    agent: Channel[m.ToAgent] = Channel(two, m.ToAgent, "trainer")
    body = msgspec.msgpack.encode(m.Draw(ordinal=1, state=b"s"))
    one.sendall(struct.pack("<I", len(body)) + body + struct.pack("<I", 0xFFFFFFFF))
    assert agent.receive(1.0) == [m.Draw(ordinal=1, state=b"s")]
    assert agent.faulty
    with pytest.raises(AgentError, match="the limit is"):
        agent.drain_input()
    one.close()
    agent.close()


@pytest.mark.covers("I11")
def test_posting_to_one_that_never_reads_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = pair
    monkeypatch.setattr(channel_module, "MAX_QUEUED", 1 << 20)
    for _ in range(10):
        trainer.post(m.Draw(ordinal=1, state=bytes(100_000)))
    with pytest.raises(ChannelClosed, match="has not read"):
        trainer.post(m.Draw(ordinal=1, state=bytes(100_000)))


def test_posted_messages_are_flushed_as_the_reader_takes_them(pair: Pair) -> None:
    trainer, agent = pair
    for i in range(50):
        trainer.post(m.Draw(ordinal=i, state=bytes(50_000)))
    assert trainer.flush()
    got: list[m.ToAgent] = []
    while len(got) < 50:
        trainer.flush()
        got += agent.receive(1.0)
    assert [g.ordinal for g in got] == list(range(50))  # type: ignore[union-attr]
    assert not trainer.flush()


def test_senders_on_several_threads_do_not_mix_frames(pair: Pair) -> None:
    trainer, agent = pair
    threads = [
        threading.Thread(target=lambda t=t: [trainer.send(m.Draw(ordinal=t, state=bytes([t]) * 5000), timeout=10.0) for _ in range(50)])
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    got = receive(agent, 200)
    assert all(g.state == bytes([g.ordinal]) * 5000 for g in got)  # type: ignore[union-attr]
    for thread in threads:
        thread.join(5.0)


@pytest.mark.covers("F70")
def test_forked_child_closes_its_copy(pair: Pair) -> None:
    trainer, agent = pair
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read_end, 1)
        os._exit(0)
    trainer.close()
    with pytest.raises(ChannelClosed):
        agent.receive(2.0)
    os.write(write_end, b"x")
    os.waitpid(child, 0)
    os.close(read_end)
    os.close(write_end)
