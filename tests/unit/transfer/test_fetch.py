"""Taking a snapshot from peers that are processes of their own: waiting, spreading, verifying, giving up."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from serving import JOB, SECRET, pattern

from ftckpt.errors import DeadlineExceeded, HealRefused, PeerError, Unauthorized
from ftckpt.format.digest import digest_blocks
from ftckpt.transfer import Fetched, Patience, Progress, SnapshotDoc, fetch
from ftckpt.transfer.place import Part, Place

MIB = 1 << 20
Start = Callable[..., Any]


def take(*urls: str, step: int = 5, secret: bytes = SECRET, **options: Any) -> Fetched:
    options.setdefault("patience", Patience(connect=5, stall=5, find=10, total=60))
    return fetch(urls, step, JOB, secret, lambda doc: memoryview(bytearray(doc.table.image_bytes)), **options)


@pytest.mark.covers("I9")
def test_image_arrives_bit_for_bit_with_its_document(peer: Start) -> None:
    got = take(peer(size=5 * MIB + 77).url)
    assert got.image == pattern(5 * MIB + 77, 1)
    assert got.doc.table.digests == digest_blocks(got.image, 1 << 16)
    assert (got.doc.trajectory.step, bytes(got.doc.leaves), got.retries, got.dropped) == (5, b'{"n":1}', 0, {})


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1])
def test_odd_sizes(peer: Start, size: int) -> None:
    assert take(peer(size=size).url).image == pattern(size, 1)


@pytest.mark.covers("I9")
@pytest.mark.parametrize("at", [[], [(0, 10)], [(65_530, 65_542), (65_542, 200_000)], [(1, 2), (70_000, 140_000), (299_999, 300_000)]])
def test_parts_of_an_image_arrive_where_they_belong(peer: Start, at: list[tuple[int, int]]) -> None:
    size = 300_000
    whole = bytearray(size)
    parts = [Part(begin, end, memoryview(bytearray(end - begin))) for begin, end in at]
    place = Place(memoryview(whole), parts)
    got = fetch([peer(size=size).url], 5, JOB, SECRET, lambda doc: place, patience=Patience(find=10))
    expected = pattern(size, 1)
    for part in parts:
        assert part.memory == expected[part.begin : part.end]
        assert not any(whole[part.begin : part.end])
    assert b"".join(got.place.pieces(0, size)) == expected
    assert b"".join(got.place.pieces(69_500, 70_500)) == expected[69_500:70_500]


@pytest.mark.covers("F54", "I9")
def test_a_byte_flipped_in_a_part_is_found(peer: Start, proxy: Start) -> None:
    size = 4 * MIB
    place = Place(memoryview(bytearray(size)), [Part(MIB + 7, 3 * MIB, memoryview(bytearray(2 * MIB - 7)))])
    bad = proxy(peer(size=size).url, flip_at=2 * MIB)
    with pytest.raises(PeerError, match="bad bytes in block"):
        fetch([bad.url], 5, JOB, SECRET, lambda doc: place, patience=Patience(find=10))


@pytest.mark.covers("F51")
def test_works_over_ipv6_and_tells_source_bytes_and_seconds(peer: Start, caplog: pytest.LogCaptureFixture) -> None:
    source = peer(host="::1")
    assert source.url.startswith("http://[::1]:")
    with caplog.at_level(logging.INFO, "ftckpt.transfer"):
        got = take(source.url)
    assert got.sources == {source.url: MIB}
    assert f"{MIB} bytes in" in caplog.text
    assert source.url in caplog.text


@pytest.mark.covers("F52")
def test_request_one_second_before_publication_succeeds(peer: Start) -> None:
    got = take(peer(delay=1.0).url)
    assert 0.5 < got.seconds < 8


@pytest.mark.covers("F52", "I11")
def test_step_never_published_is_an_error_at_the_deadline(peer: Start) -> None:
    source = peer(wait=0.3)  # shorter than the client's patience: it must ask again
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=f"(?s)step 6 .*{source.url}.*did not publish"):
        take(source.url, step=6, patience=Patience(find=1.0))
    assert 0.9 < time.monotonic() - begin < 4


@pytest.mark.covers("F54", "I9")
def test_flipped_byte_is_refused_and_another_source_takes_over(peer: Start, proxy: Start) -> None:
    good, bad = peer(size=8 * MIB), proxy(peer(size=8 * MIB).url, flip_at=MIB)
    got = take(bad.url, good.url, chunk=MIB)
    assert got.image == pattern(8 * MIB, 1)
    assert "bad bytes in block" in got.dropped[bad.url]
    assert got.sources[good.url] > 4 * MIB


@pytest.mark.covers("F54", "I9")
def test_flipped_byte_with_no_other_source_names_source_block_and_digests(peer: Start, proxy: Start) -> None:
    bad = proxy(peer(size=4 * MIB).url, flip_at=2 * MIB)
    with pytest.raises(PeerError, match=rf"{bad.url}: it sent bad bytes in block \d+: expected [0-9a-f]{{32}}, found [0-9a-f]{{32}}") as e:
        take(bad.url)
    assert "must not be used" in e.value.now


@pytest.mark.covers("F54")
def test_source_killed_half_way(peer: Start, proxy: Start) -> None:
    dying, other = peer(size=16 * MIB), peer(size=16 * MIB)
    through = proxy(dying.url, rate=32 * MIB, at=5 * MIB, act=dying.process.kill)
    got = take(through.url, proxy(other.url, rate=32 * MIB).url, chunk=MIB)
    assert got.image == pattern(16 * MIB, 1)
    assert through.url in got.dropped
    assert got.sources[through.url] > 0


@pytest.mark.covers("F54", "I9")
def test_bytes_that_come_before_their_digests_are_checked_all_the_same(peer: Start, proxy: Start) -> None:
    bad = proxy(peer(size=4 * MIB, digests_after=1.0).url, flip_at=2 * MIB)
    good = peer(size=4 * MIB, digests_after=0.7)
    got = take(bad.url, good.url)
    assert got.image == pattern(4 * MIB, 1)
    assert "bad bytes in block" in got.dropped[bad.url]
    assert got.retries >= 1
    assert sum(got.sources.values()) == 4 * MIB


@pytest.mark.covers("F54", "I9")
def test_a_source_killed_before_it_told_its_digests_is_begun_again_without(peer: Start, proxy: Start) -> None:
    dying, other = peer(size=8 * MIB, digests_after=30.0), peer(size=8 * MIB, digests_after=1.0, seed=2)
    through = proxy(dying.url, rate=32 * MIB, at=3 * MIB, act=dying.process.kill)
    got = take(through.url, other.url)
    assert got.image == pattern(8 * MIB, 2)  # nothing that could not be proven was kept
    assert through.url in got.dropped
    assert got.sources == {other.url: 8 * MIB}


@pytest.mark.covers("I9", "I11")
def test_a_source_that_never_tells_its_digests_gives_nothing(peer: Start) -> None:
    source = peer(digests_after=60.0)
    with pytest.raises(DeadlineExceeded, match="digests"):
        take(source.url, patience=Patience(find=1.5))


def test_source_killed_half_way_alone_fails_quickly(peer: Start, proxy: Start) -> None:
    dying = peer(size=16 * MIB)
    through = proxy(dying.url, rate=32 * MIB, at=5 * MIB, act=dying.process.kill)
    begin = time.monotonic()
    with pytest.raises(PeerError, match=through.url):
        take(through.url)
    assert time.monotonic() - begin < 8


@pytest.mark.covers("F54", "I11")
def test_stopped_source_is_dropped_after_the_stall_limit(peer: Start, proxy: Start) -> None:
    stopped, other = peer(size=16 * MIB), peer(size=16 * MIB)
    through = proxy(stopped.url, rate=32 * MIB, at=4 * MIB, act=lambda: os.kill(stopped.process.pid, signal.SIGSTOP))
    got = take(through.url, proxy(other.url, rate=32 * MIB).url, chunk=MIB, patience=Patience(stall=1.0, total=30))
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert got.image == pattern(16 * MIB, 1)
    assert "stalled" in got.dropped[through.url]
    assert got.seconds < 15


def test_source_stopped_before_the_request_does_not_hold_up_the_others(peer: Start) -> None:
    stopped, other = peer(), peer()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    got = take(stopped.url, other.url)
    os.kill(stopped.process.pid, signal.SIGCONT)
    assert got.sources == {other.url: MIB}
    assert time.monotonic() - begin < 3


@pytest.mark.covers("I11")
def test_slow_link_is_no_stall(peer: Start, proxy: Start) -> None:
    slow = proxy(peer(size=2 * MIB, block=MIB).url, rate=0.75 * MIB)  # a block takes longer than the stall limit
    got = take(slow.url, patience=Patience(stall=0.5))
    assert got.image == pattern(2 * MIB, 1)
    assert got.seconds > 2
    assert got.retries == 0


@pytest.mark.covers("I11")
def test_total_limit_ends_even_what_still_flows(peer: Start, proxy: Start) -> None:
    slow = proxy(peer(size=8 * MIB).url, rate=0.5 * MIB)
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="not fetched within 1 s"):
        take(slow.url, patience=Patience(total=1.0))
    assert time.monotonic() - begin < 5


@pytest.mark.covers("F55")
def test_three_joiners_and_three_sources_are_spread(peer: Start) -> None:
    sources = [peer(size=24 * MIB) for _ in range(3)]
    urls = [s.url for s in sources]
    got: list[Fetched] = []
    joiners = [threading.Thread(target=lambda i=i: got.append(take(*urls[i:], *urls[:i], chunk=MIB))) for i in range(3)]
    for j in joiners:
        j.start()
    for j in joiners:
        j.join(30)
    assert len(got) == 3
    assert all(g.image == pattern(24 * MIB, 1) for g in got)
    totals = {u: sum(g.sources.get(u, 0) for g in got) for u in urls}
    assert min(totals.values()) > 72 * MIB / 8, totals


def test_two_joiners_share_one_source(peer: Start) -> None:
    url = peer(size=8 * MIB).url
    got: list[Fetched] = []
    joiners = [threading.Thread(target=lambda: got.append(take(url))) for _ in range(2)]
    for j in joiners:
        j.start()
    for j in joiners:
        j.join(30)
    assert [g.image == pattern(8 * MIB, 1) for g in got] == [True, True]


def test_source_with_other_bytes_of_the_same_step_is_not_mixed_in(peer: Start) -> None:
    mine, other_bytes, other_past = peer(size=8 * MIB), peer(size=8 * MIB, seed=2), peer(size=8 * MIB, h="cd" * 32)
    got = take(mine.url, other_bytes.url, other_past.url, chunk=MIB, on_progress=lambda p: time.sleep(0.01))
    assert got.image == pattern(8 * MIB, 1)
    assert got.sources == {mine.url: 8 * MIB}


@pytest.mark.covers("F75", "I10")
def test_joiner_with_a_wrong_secret_gets_nothing(peer: Start) -> None:
    with pytest.raises(Unauthorized, match="refused us"):
        take(peer().url, secret=b"some other secret, also 32 bytes")


@pytest.mark.covers("F75", "I10")
def test_source_without_the_secret_is_passed_over(peer: Start) -> None:
    stranger, friend = peer(secret="some other secret, also 32 bytes", seed=3), peer()
    got = take(stranger.url, friend.url)
    assert got.image == pattern(MIB, 1)
    assert stranger.url in got.dropped


@pytest.mark.covers("F74", "F75", "I10")
@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\nX-Ftckpt-Proof: 00\r\n\r\n" + b"\x80\x04cbuiltins\nexec\n(V1/0\ntR." + b" " * 15,
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\x00" * 70000,
        b"",
    ],
)
def test_foreign_server_is_an_error_that_names_it(answer: bytes) -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                c, _ = server.accept()
                with c, contextlib.suppress(OSError):
                    c.recv(65536)
                    c.sendall(answer)
                    c.shutdown(socket.SHUT_WR)
                    while c.recv(65536):
                        pass

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    try:
        with pytest.raises(PeerError, match=url):
            take(url, patience=Patience(stall=1.0, find=5.0))
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(5)


def test_refused_document_raises_what_the_judge_raised(peer: Start) -> None:
    def accept(doc: SnapshotDoc) -> None:
        raise HealRefused("not on the tail's trajectory")

    with pytest.raises(HealRefused):
        take(peer().url, accept=accept)


def test_refused_source_is_passed_over(peer: Start) -> None:
    def accept(doc: SnapshotDoc) -> None:
        if doc.trajectory.h.startswith("cd"):
            raise HealRefused("not on the tail's trajectory")

    astray, good = peer(h="cd" * 32), peer()
    got = take(astray.url, good.url, accept=accept)
    assert got.doc.trajectory.h.startswith("ab")
    assert got.sources == {good.url: MIB}


def test_nobody_listening_fails_at_once(peer: Start) -> None:
    gone = peer()
    gone.close()
    begin = time.monotonic()
    with pytest.raises(PeerError, match="connection failed"):
        take(gone.url)
    assert time.monotonic() - begin < 3


def test_progress_grows_to_the_whole(peer: Start, proxy: Start) -> None:
    told: list[Progress] = []
    take(proxy(peer(size=4 * MIB).url, rate=4 * MIB).url, on_progress=told.append)
    done = [p.done for p in told]
    assert len(done) > 2
    assert done == sorted(done)
    assert done[-1] == told[-1].bytes == 4 * MIB


@pytest.mark.covers("F54", "I11")
def test_extra_memory_stays_below_a_chunk_and_threads_end(peer: Start) -> None:
    import resource

    url = peer(size=96 * MIB, block=MIB).url
    target = memoryview(bytearray(96 * MIB))
    target[:] = bytes(96 * MIB)
    before, threads = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, threading.active_count()
    fetch([url], 5, JOB, SECRET, lambda doc: target, chunk=16 * MIB)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 16 * MIB
    assert threading.active_count() == threads
