"""The server seen from the wire: what it answers, what it refuses, and that nothing makes it stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import JOB, SECRET, document, pattern

from ftckpt.errors import ConfigError
from ftckpt.format.digest import digest_blocks
from ftckpt.transfer import Patience, ServerLimits, SnapshotDoc, SnapshotServer, fetch
from ftckpt.transfer.auth import authorization, derive_key, sign_answer
from ftckpt.transfer.probe import PIECE, noise

SIZE = 300_000
KEY = derive_key(SECRET, JOB)


@pytest.fixture
def server() -> Iterator[SnapshotServer]:
    limits = ServerLimits(connections=8, head_bytes=2048, header_lines=16, head_s=0.5, idle_s=2.0, send_stall_s=1.0, wait_s=0.3)
    with SnapshotServer("127.0.0.1", 0, SECRET, JOB, limits=limits) as s:
        s.publish("snap", document(SIZE), memoryview(pattern(SIZE, 1)), lambda: None)
        yield s


def address(server: SnapshotServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def ask(
    server: SnapshotServer, path: str, *, method: str = "GET", span: str = "", key: bytes = KEY, auth: str | None = None, now: float = 0.0
) -> Any:
    """One request as any HTTP client makes it: (status, headers, body, signature of the request)."""
    header, mac = authorization(key, method, path, span, now or time.time())
    connection = http.client.HTTPConnection(*address(server), timeout=5)
    headers = {"Authorization": header if auth is None else auth} | ({"Range": span} if span else {})
    connection.request(method, path, headers={k: v for k, v in headers.items() if v})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body, mac


def alive(server: SnapshotServer) -> bool:
    return bool(ask(server, f"/v1/{JOB}/snapshots")[0] == 200)


def eventually(true: Callable[[], bool], within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_listing_document_and_data(server: SnapshotServer) -> None:
    lines = json.loads(ask(server, f"/v1/{JOB}/snapshots")[2])
    assert [(x["snapshot"], x["step"], x["bytes"]) for x in lines] == [("snap", 5, SIZE)]
    doc = msgspec.json.decode(ask(server, f"/v1/{JOB}/snapshots/snap")[2], type=SnapshotDoc)
    assert doc.table.digests == digest_blocks(pattern(SIZE, 1), doc.table.block_bytes)
    status, _, body, _ = ask(server, f"/v1/{JOB}/snapshots/snap/data")
    assert (status, body == pattern(SIZE, 1)) == (200, True)


@pytest.mark.parametrize(
    ("span", "begin", "end"),
    [("bytes=0-0", 0, 1), ("bytes=7-99999", 7, 100_000), ("bytes=299990-", 299_990, SIZE), ("bytes=-5", SIZE - 5, SIZE)],
)
def test_ranges(server: SnapshotServer, span: str, begin: int, end: int) -> None:
    status, headers, body, _ = ask(server, f"/v1/{JOB}/snapshots/snap/data", span=span)
    assert (status, headers["Content-Range"]) == (206, f"bytes {begin}-{end - 1}/{SIZE}")
    assert body == pattern(SIZE, 1)[begin:end]


@pytest.mark.parametrize(
    "span", ["bytes=300000-", "bytes=5-4", "bytes=-", "bytes=0-1,3-4", "lines=0-1", "bytes=x-y", "bytes=" + "9" * 30 + "-"]
)
def test_ranges_that_cannot_be_served(server: SnapshotServer, span: str) -> None:
    assert ask(server, f"/v1/{JOB}/snapshots/snap/data", span=span)[0] == 416


def test_head_tells_the_size_alone(server: SnapshotServer) -> None:
    status, headers, body, _ = ask(server, f"/v1/{JOB}/snapshots/snap/data", method="HEAD")
    assert (status, headers["Content-Length"], body) == (200, str(SIZE), b"")


def test_answers_prove_the_secret(server: SnapshotServer) -> None:
    status, headers, body, mac = ask(server, f"/v1/{JOB}/snapshots")
    assert headers["X-Ftckpt-Proof"] == sign_answer(KEY, mac, status, len(body), body)
    assert headers["X-Ftckpt-Proof"] != sign_answer(derive_key(b"other" * 8, JOB), mac, status, len(body), body)


def test_a_probe_gives_as_many_bytes_as_asked_for_within_bounds(server: SnapshotServer) -> None:
    status, headers, body, mac = ask(server, f"/v1/{JOB}/probe?bytes=70000")
    assert (status, len(body)) == (200, 70_000)
    assert headers["X-Ftckpt-Proof"] == sign_answer(KEY, mac, status, len(body), None)
    assert len(set(body)) > 200  # nothing that a link could compress
    for wrong in ("", "?bytes=0", "?bytes=-1", "?bytes=x", f"?bytes={(8 << 20) + 1}", "?bytes=" + "9" * 30):
        assert ask(server, f"/v1/{JOB}/probe{wrong}")[0] == 400
    assert alive(server)


@pytest.mark.covers("I11")
def test_probes_make_no_bytes_of_their_own() -> None:
    first = noise(str(PIECE))
    assert len(first) == PIECE
    assert all(noise(str(n)).obj is first.obj for n in (1, 70_000, PIECE))  # served by many threads at once, for as long as an agent lives


@pytest.mark.parametrize(("path", "status"), [("/", 404), ("/v1/other/snapshots", 404), (f"/v1/{JOB}/snapshots/none", 404), (f"/v1/{JOB}/step/x", 404), (f"/v1/{JOB}/step/5?wait=nan", 400), (f"/v1/{JOB}/step/5?wait=1&wait", 400), (f"/v1/{JOB}/snapshots/../../etc/passwd", 404)])  # fmt: skip
def test_paths_that_are_not_there(server: SnapshotServer, path: str, status: int) -> None:
    assert ask(server, path)[0] == status


@pytest.mark.skipif(shutil.which("curl") is None or shutil.which("openssl") is None, reason="no curl or openssl in PATH")
def test_a_snapshot_can_be_asked_for_by_hand_as_the_document_says(server: SnapshotServer) -> None:
    document = Path(__file__).parents[3] / "docs" / "transfer.md"
    recipe = textwrap.dedent(document.read_text().split("By hand:")[1].split("\n## ")[0])
    told = {"JOB": JOB, "SECRET_HEX": SECRET.hex(), "AGENT": server.url, "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-eu", "-c", recipe], env=told, capture_output=True, text=True, timeout=30, check=False)
    assert json.loads(done.stdout) == json.loads(ask(server, f"/v1/{JOB}/snapshots")[2]), done.stderr
    told["SECRET_HEX"] = bytes(32).hex()
    done = subprocess.run(["bash", "-eu", "-c", recipe], env=told, capture_output=True, text=True, timeout=30, check=False)
    assert "snap" not in done.stdout


@pytest.mark.covers("F75", "I10")
def test_requests_that_prove_nothing_are_refused(server: SnapshotServer) -> None:
    path = f"/v1/{JOB}/snapshots"
    good = authorization(KEY, "GET", path, "", time.time())[0]
    refused = {
        "missing": ask(server, path, auth=""),
        "wrong secret": ask(server, path, key=derive_key(b"other" * 8, JOB)),
        "another job's": ask(server, path, key=derive_key(SECRET, "other")),
        "other scheme": ask(server, path, auth="Basic " + good),
        "for another path": ask(server, f"/v1/{JOB}/snapshots/snap", auth=good),
        "for another range": ask(server, f"/v1/{JOB}/snapshots/snap/data", span="bytes=0-1", auth=authorization(KEY, "GET", f"/v1/{JOB}/snapshots/snap/data", "bytes=0-2", time.time())[0]),
        "for another method": ask(server, path, method="HEAD", auth=good),
        "expired": ask(server, path, now=time.time() - 1000),
        "good for too long": ask(server, path, now=time.time() + 100_000),
        "garbled": ask(server, path, auth="FTCKPT expires=12x,mac="),
    }  # fmt: skip
    assert {k: v[0] for k, v in refused.items()} == dict.fromkeys(refused, 401)
    assert all("X-Ftckpt-Proof" not in v[1] and b"snap" not in v[2] for v in refused.values())


@pytest.mark.covers("F51", "F75", "I10")
def test_only_the_configured_address_is_listened_on(server: SnapshotServer) -> None:
    port = address(server)[1]
    assert port > 0
    for other in ("127.0.0.2", socket.gethostbyname(socket.gethostname())):
        if other != "127.0.0.1":
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((other, port), timeout=2)


@pytest.mark.covers("F51")
@pytest.mark.parametrize(("advertise", "url"), [("heal.example", "http://heal.example:{port}"), ("10.1.2.3:99", "http://10.1.2.3:99"), ("[fd00::1]:99", "http://[fd00::1]:99"), ("fd00::1", "http://[fd00::1]:{port}")])  # fmt: skip
def test_advertised_address(advertise: str, url: str) -> None:
    with SnapshotServer("127.0.0.1", 0, SECRET, JOB, advertise=advertise) as s:
        assert s.url == url.format(port=s._listener.port)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_all_interfaces_need_a_word_where_to_come(host: str) -> None:
    with pytest.raises(ConfigError, match="without an address"):
        SnapshotServer(host, 0, SECRET, JOB)


def test_taken_port_and_foreign_address_are_config_errors(server: SnapshotServer) -> None:
    for host, port in (address(server), ("192.0.2.1", 0)):
        with pytest.raises(ConfigError, match="cannot listen"):
            SnapshotServer(host, port, SECRET, JOB).start()


def test_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="shorter"):
        SnapshotServer("127.0.0.1", 0, b"short", JOB)


# ---------------------------------------------------------------- life of a snapshot
def test_retired_snapshot_is_freed_when_its_last_reader_has_left(server: SnapshotServer) -> None:
    size = 64 << 20
    freed = threading.Event()
    server.publish("big", document(size, name="big", block=1 << 20), memoryview(bytearray(size)), freed.set)
    path = f"/v1/{JOB}/snapshots/big/data"
    connection = http.client.HTTPConnection(*address(server), timeout=5)
    connection.request("GET", path, headers={"Authorization": authorization(KEY, "GET", path, "", time.time())[0]})
    answer = connection.getresponse()
    answer.read(1000)
    server.retire("big")
    assert ask(server, path)[0] == 404
    assert not freed.is_set()
    assert len(answer.read()) == size - 1000
    connection.close()
    assert freed.wait(5)


@pytest.mark.covers("I11")
def test_reader_that_stalls_does_not_hold_a_snapshot_for_ever(server: SnapshotServer) -> None:
    size = 64 << 20
    freed = threading.Event()
    server.publish("big", document(size, name="big", block=1 << 20), memoryview(bytearray(size)), freed.set)
    path = f"/v1/{JOB}/snapshots/big/data"
    with socket.create_connection(address(server)) as stalled:
        stalled.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: {authorization(KEY, 'GET', path, '', time.time())[0]}\r\n\r\n".encode())
        assert stalled.recv(10)
        server.retire("big")
        assert not freed.is_set()
        assert freed.wait(5)


def test_snapshots_are_freed_once_at_close() -> None:
    freed: list[str] = []
    with SnapshotServer("127.0.0.1", 0, SECRET, JOB) as s:
        for name in ("a", "b"):
            s.publish(name, document(100, name=name), memoryview(pattern(100, 1)), lambda name=name: freed.append(name))  # type: ignore[misc]
        s.retire("a")
        s.retire("a")
        s.retire("unknown")
        assert freed == ["a"]
    assert freed == ["a", "b"]


def test_what_does_not_fit_is_not_published(server: SnapshotServer) -> None:
    image = memoryview(pattern(100, 1))
    for name, doc in (
        ("snap", document(100)),
        ("x", document(100, name="y")),
        ("x", document(99, name="x")),
        ("a/b", document(100, name="a/b")),
    ):
        with pytest.raises(ConfigError):
            server.publish(name, doc, image, lambda: None)


def test_close_cuts_readers_and_leaves_no_thread() -> None:
    before = threading.active_count()
    s = SnapshotServer("127.0.0.1", 0, SECRET, JOB)
    s.start()
    idle = [socket.create_connection(address(s)) for _ in range(3)]
    assert eventually(lambda: threading.active_count() == before + 4)
    begin = time.monotonic()
    s.close()
    assert time.monotonic() - begin < 3
    assert threading.active_count() == before
    for c in idle:
        c.close()


# ---------------------------------------------------------------- those who mean no good
def raw(server: SnapshotServer, data: bytes, wait: float = 3.0) -> bytes:
    """Send bytes, and read until the server closes."""
    with socket.create_connection(address(server), timeout=wait) as c:
        got = bytearray()
        with contextlib.suppress(OSError):
            c.sendall(data)
            c.shutdown(socket.SHUT_WR)
            while piece := c.recv(65536):
                got += piece
        return bytes(got)


@pytest.mark.covers("F74", "I10", "I11")
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 40 + b"\r\n", 431),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 5000, 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 413),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"get / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n bad: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"\x80\x04cos\nsystem\n(V1\ntR.\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\n\r\n", 401),
    ],
)
def test_malformed_request_is_answered_and_costs_its_connection_alone(server: SnapshotServer, data: bytes, status: int) -> None:
    assert raw(server, data).startswith(f"HTTP/1.1 {status} ".encode())
    assert alive(server)


REQUEST = f"GET /v1/{JOB}/snapshots HTTP/1.1\r\nAuthorization: {authorization(KEY, 'GET', f'/v1/{JOB}/snapshots', '', time.time() + 900)[0]}\r\n\r\n".encode()


@pytest.mark.covers("F74", "I10", "I11")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    junk=st.binary(max_size=300),
    cuts=st.lists(st.tuples(st.integers(0, len(REQUEST)), st.integers(0, 40), st.binary(max_size=12)), max_size=4),
)
def test_fuzzed_bytes_never_stop_it(server: SnapshotServer, junk: bytes, cuts: list[tuple[int, int, bytes]]) -> None:
    data = REQUEST
    for at, gone, new in cuts:
        data = data[:at] + new + data[at + gone :]
    for what in (junk, data, data + junk):
        answer = raw(server, what)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert alive(server)


@pytest.mark.covers("I11")
def test_slow_head_is_cut_off(server: SnapshotServer) -> None:
    with socket.create_connection(address(server), timeout=5) as c:
        begin = time.monotonic()
        try:
            for byte in REQUEST:
                c.sendall(bytes([byte]))
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - begin < 4
    assert alive(server)


@pytest.mark.covers("I11")
def test_connections_are_limited_and_come_free_again(server: SnapshotServer) -> None:
    before = threading.active_count()
    crowd = [socket.create_connection(address(server), timeout=5) for _ in range(30)]
    assert threading.active_count() <= before + 8
    assert crowd[12].recv(100).startswith(b"HTTP/1.1 503 ")
    for c in crowd:
        c.close()
    assert eventually(lambda: threading.active_count() <= before)
    assert alive(server)


def test_busy_source_is_tried_again_by_the_client(server: SnapshotServer) -> None:
    crowd = [socket.create_connection(address(server), timeout=5) for _ in range(8)]  # they are cut off after head_s
    got = fetch([server.url], 5, JOB, SECRET, lambda d: memoryview(bytearray(d.table.image_bytes)), patience=Patience(find=10))
    assert got.image == pattern(SIZE, 1)
    for c in crowd:
        c.close()


def test_many_connections_leave_descriptors_and_threads_flat(server: SnapshotServer) -> None:
    import psutil

    me = psutil.Process()
    for _ in range(20):
        alive(server)
    files, threads = me.num_fds(), threading.active_count()
    rng = random.Random(1)
    for i in range(200):
        if i % 2:
            alive(server)
        else:
            raw(server, rng.randbytes(50))
    eventually(lambda: threading.active_count() <= threads and me.num_fds() <= files)
    assert (me.num_fds(), threading.active_count()) <= (files, threads)
